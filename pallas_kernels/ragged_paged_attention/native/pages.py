"""The pages of one layer on a CPU, as native code sees them, and new keys and values written into them.

    keys    [C, K, H, Z]    by columns: a vector holds some slots of a page
    values  [C, K, Z, H]    by rows: a vector holds some lanes of a head

Two bfloat16 numbers that are multiplied after one another share a word of 32 bits, the first one in its lower half:
keys [C, K, H ÷ 2, Z] pair two numbers of a slot, values [C, K, Z ÷ 2, H] pair two slots. Processors that multiply pairs
read them so, and a word is one lane of a vector for either dtype. Only native code reads and writes pages: XLA would
copy a whole array of bfloat16 to write one row. Pages of one byte a number (`byte_pages`) lie like those of float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
from jax.ffi import ffi_call
from jaxtyping import Array, Float, Int
from llvmlite import ir

from ...native.llvm import F32, I8, I16, I32, I64, LONG_LANES, Code, lanes_for
from ...native.processor import host_has
from ...native.registry import register
from ...native.xla_call import Call, Work, handler
from ..kv_scales import LayerScales
from ..layer_pages import LayerPages
from .byte_pages import as_bytes
from .page_shapes import BYTE_DTYPES, PACKED_BF16, pages_shapes, words_of

MAX_SERIAL_ELEMENTS = 1 << 11
"""Largest number of elements of keys that one thread writes alone. Each word of a key lies in its own cache line."""
FEW_TOKENS, MANY_TOKENS = 4, 16
"""Tokens that one unit of work writes. The words of 16 consecutive tokens of a prompt share cache lines."""
MAX_TOKENS_OF_SMALL_UNITS = 64
"""Steps of at most this many tokens are cut into small units: they are decode steps, whose tokens share no lines."""


@dataclass(frozen=True)
class NativePages(LayerPages):
    """Keys [C, K, H, Z] and values [C, K, Z, H], or pairs [C, K, H ÷ 2, Z] and [C, K, Z ÷ 2, H]."""

    page_step: int = 1
    """The layer's page p is `first_page` + p × `page_step` in these arrays."""

    @property
    def place(self) -> Int[Array, " 2"]:
        """Where the layer's pages are, as native code reads it: its first page, and the step to the next."""
        return jnp.stack([self.first_page, jnp.int32(self.page_step)])

    @property
    def is_bf16_packed(self) -> bool:
        return bool(self.keys.dtype == PACKED_BF16)

    @property
    def byte_dtype(self) -> str | None:
        """Return the dtype of numbers of one byte, by that of the arrays; None for other numbers."""
        return next((name for name, stored in BYTE_DTYPES.items() if self.keys.dtype == stored), None)

    @property
    def page_size(self) -> int:
        return self.keys.shape[3]

    def check(self, num_kv_heads: int, head_size: int) -> None:
        """Raise ValueError unless keys and values have the shapes and dtypes of pages of these heads.

        Native code checks neither, and would read or write other memory. The array of keys gives the number of pages,
        the page size and, by its dtype, whether bfloat16 is packed in pairs. Both arrays must have the shapes that
        follow from these: with pages of 16 slots and 2 heads of size 64, float32 keys are [pages, 2, 64, 16] and values
        [pages, 2, 16, 64].
        """
        sizes = self.keys.shape[0], num_kv_heads, self.page_size, head_size
        dtype = self.keys.dtype if self.is_bf16_packed or self.byte_dtype else jnp.float32
        shapes = pages_shapes(*sizes, is_bf16_packed=self.is_bf16_packed)
        for name, array, shape in zip(("keys", "values"), (self.keys, self.values), shapes, strict=True):
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(
                    f"pages: got {name} {array.shape} of {array.dtype}, wanted {shape} of {jnp.dtype(dtype)}; make "
                    "them by the shapes and the stored_dtype of the backend's layout"
                )


def write_pages(
    pages: NativePages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slots: Int[Array, " T"],
    scales: LayerScales | None = None,
) -> tuple[Array, Array]:
    """Write k and v into `slots` of the layer by native code; return the new keys and values of all layers.

    Token t's key and value for all K heads go to slot `slots[t]`. A slot is page × page size + offset, and pages are
    counted within the layer; slots are not checked. Slot 0 is that of padding tokens and is not written: several
    threads would write it at once. k and v are rounded to the dtype of the pages; in one byte they are first divided by
    `scales`, those of keys and those of values, and then clipped: see `quantize`. The results reuse the memory of
    `pages.keys` and `pages.values`, so that no page is copied unless these are used later. Raises ValueError if these
    arrays do not fit the heads of `k`.
    """
    num_kv_heads, head_size = k.shape[1:]
    pages.check(num_kv_heads, head_size)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (pages.keys, pages.values)]
    name = _write_handler(pages.is_bf16_packed, pages.byte_dtype, num_kv_heads, head_size, pages.page_size)
    call = ffi_call(name, shapes, input_output_aliases={0: 0, 1: 1})
    new_kv = k.astype(jnp.float32), v.astype(jnp.float32)
    keys, values = call(pages.keys, pages.values, *new_kv, slots, pages.place, stacked(scales))
    return keys, values


def stacked(scales: LayerScales | None) -> Float[Array, ...]:
    """Return the scales of keys and values as native code reads them, float32 [2, K]; an empty array for none."""
    return jnp.zeros((0,), jnp.float32) if scales is None else jnp.stack(scales).astype(jnp.float32)


@cache
def _write_handler(
    is_bf16_packed: bool, byte_dtype: str | None, num_kv_heads: int, head_size: int, page_size: int
) -> str:
    """Compile the custom call that writes keys and values into pages of these sizes; return its name.

    A unit of work is `FEW_TOKENS` or `MANY_TOKENS` consecutive tokens. In packed bfloat16, numbers 2w and 2w + 1 of a
    key share word w, and the values of slots 2w and 2w + 1 share the words of row w: those of slot 5 are the upper
    halves of row 2.
    """
    element_type, word_type = (I16, I32) if is_bf16_packed else (F32, F32) if byte_dtype is None else (I8, I8)
    has_avx512_bf16 = is_bf16_packed and host_has("avx512bf16")
    token_values = num_kv_heads * head_size
    key_words, value_words = (words_of(size, is_bf16_packed=is_bf16_packed) for size in (head_size, page_size))

    def prepare(code: Code, call: Call) -> Work:
        """Emit code that cuts the tokens into units; return the work.

        The arguments are keys, values, k, v, slots, place and scales; the results are keys and values, in the same
        memory as the first two arguments. Steps of few tokens get small units. 10 tokens in units of 4 are 3 units.
        """
        build, args = code.build, call.arguments
        num_tokens = args[4].size(0)
        has_small_units = build.icmp_signed("<=", num_tokens, I64(MAX_TOKENS_OF_SMALL_UNITS))
        tokens_per_unit = build.select(has_small_units, I64(FEW_TOKENS), I64(MANY_TOKENS))
        num_units = build.sdiv(build.add(num_tokens, build.sub(tokens_per_unit, I64(1))), tokens_per_unit)
        is_large = build.icmp_signed(">", num_tokens, I64(MAX_SERIAL_ELEMENTS // token_values))
        data = [buffer.data for buffer in (*call.results, *args[2:5])]
        numbers = [*(code.load_index(args[5].data, index) for index in range(2)), num_tokens, tokens_per_unit]
        return Work([*data, args[6].data, *numbers], [num_units], is_large)

    def body(code: Code, arguments: list[ir.Value], unit: ir.Value) -> None:
        """Emit code that writes the tokens of unit `unit`, head by head; the last unit may have fewer tokens."""
        keys, values, k, v, slots, scales, first_page, page_step, num_tokens, tokens_per_unit = arguments
        build, add, mul = code.build, code.build.add, code.build.mul
        begin = mul(unit, tokens_per_unit)

        # The key and the value of one token and head, in the dtype of the pages. A key of an odd head size ends with a
        # word whose upper half is zero.
        rounded_key, rounded_value = (code.allocate(I32, head_size) for _ in range(2))
        code.store(I32(0), rounded_key, key_words - 1)
        lanes = lanes_for(head_size)

        def round_head(x: ir.Value, source: ir.Value, target: ir.Value, scale_index: int) -> None:
            """Copy a head of a token from element `source` of x, float32, rounded to the dtype of the pages."""
            scale = None if byte_dtype is None else code.broadcast(code.load(scales, scale_index, F32), lanes)

            def round_lanes(lane: ir.Value) -> None:
                numbers = code.load_vector(x, add(source, lane), F32, lanes)
                if is_bf16_packed:
                    code.store_rounded(numbers, target, lane, has_avx512_bf16=has_avx512_bf16 and lanes == LONG_LANES)
                elif byte_dtype is not None:
                    code.store_vector(as_bytes(code, build.fdiv(numbers, scale), byte_dtype), target, lane)
                else:
                    code.store_vector(numbers, target, lane)

            code.loop(0, head_size, round_lanes, step=lanes)

        def write_unless_padding(token: ir.Value) -> None:
            """Write a token's key and value, unless its slot is 0."""
            slot = code.load_index(slots, token)
            with build.if_then(build.icmp_signed("!=", slot, I64(0))):
                write(token, slot)

        def write(token: ir.Value, slot: ir.Value) -> None:
            """Write a token's key and value into slot `slot`, for every KV head.

            A page of one head is key words [head words, slots] and values [slots, lanes]. In packed bfloat16 the values
            are 16-bit elements [slots ÷ 2, lanes, 2]: that of slot 5 and lane 3 is element (2, 3, 1).
            """
            page, slot_in_page = build.sdiv(slot, I64(page_size)), build.srem(slot, I64(page_size))
            token_offset = mul(token, I64(token_values))
            page_head = mul(add(first_page, mul(page, page_step)), I64(num_kv_heads))
            for head in range(num_kv_heads):
                source, page_head_index = add(token_offset, I64(head * head_size)), add(page_head, I64(head))
                round_head(k, source, rounded_key, head)
                round_head(v, source, rounded_value, num_kv_heads + head)
                key_target = add(mul(page_head_index, I64(key_words * page_size)), slot_in_page)
                value_target = mul(page_head_index, I64(value_words * head_size))

                # The defaults bind this head's offsets.
                def write_key(word: ir.Value, target: ir.Value = key_target) -> None:
                    code.store(code.load(rounded_key, word, word_type), keys, add(target, mul(word, I64(page_size))))

                def write_value(lane: ir.Value, target: ir.Value = value_target) -> None:
                    if is_bf16_packed:
                        value_offset = add(mul(build.sdiv(slot_in_page, I64(2)), I64(head_size)), lane)
                        element = add(mul(add(target, value_offset), I64(2)), build.srem(slot_in_page, I64(2)))
                    else:
                        element = add(target, add(mul(slot_in_page, I64(head_size)), lane))
                    code.store(code.load(rounded_value, lane, element_type), values, element)

                code.loop(0, key_words, write_key)
                code.loop(0, head_size, write_value)

        code.loop(begin, code.min(add(begin, tokens_per_unit), num_tokens), write_unless_padding)

    sizes = int(is_bf16_packed), byte_dtype or "words", num_kv_heads, head_size, page_size
    name = "_".join(["jpaged_write", *map(str, sizes)])
    return register(name, lambda: handler(name, 7, 2, prepare, body))
