"""Products with a weight on a CPU, in native code: as fast as the weight comes from memory, or as the processor adds.

    x [R, K] · W [K, N]      W lies in panels of 32 columns: [N ÷ 32, K, 32], one after the other as they are read

    panel ──▶ for some rows of x at once:   sums [rows, 32] in registers, one value of x × 32 of W a time, k by k

Each result is one sum in one order, whatever rows it is computed beside: its bits do not depend on how many there are.
A panel of bfloat16 holds pairs, [N ÷ 32, K ÷ 2, 32, 2], for what the processor has: a matrix unit (`amx`), or
vectors, which multiply both at once (AVX512-BF16) or one after the other as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ffi import ffi_call
from jaxtyping import Array, Float, Int
from llvmlite import ir

from .amx import DEPTH, MAX_SERIAL_WORDS, PANEL, has_amx_unit, tile_handler
from .llvm import F32, I32, I64, Code, constant, host_has, host_has_avx512, register
from .xla_call import Buffer, handler

VECTORS = 2
"""Vectors of sums per row of x that stay in registers."""
MAX_WORDS_PER_BLOCK = 768
"""Words of a column per block at most: this part of a panel stays in the level-2 cache while all rows of x use it."""
FETCHED_AHEAD = 32 * PANEL
"""Words of a panel by which prefetches run ahead: hardware prefetchers do not reach as far."""


def panels_shape(depth: int, num_out: int, dtype: Any) -> tuple[int, ...]:
    """Return the shape of a weight [K, N] in panels. Columns and pairs beyond N and K are zeros."""
    panels = -(-num_out // PANEL)
    if jnp.dtype(dtype) == jnp.bfloat16:
        return panels, -(-depth // DEPTH) * DEPTH // 2, PANEL, 2
    return panels, depth, PANEL


def empty_panels(depth: int, num_out: int, buffer: np.ndarray) -> np.ndarray:
    """Return `buffer`, of the shape `panels_shape`, with zeros where no column and no pair will be written."""
    if num_out % PANEL:
        buffer[-1] = 0
    if buffer.ndim == 4:
        buffer[:, depth // 2 :] = 0
    return buffer


def fill_panels(panels: np.ndarray, first: int, columns: np.ndarray) -> None:
    """Write W[:, first + i] = columns[i] into panels, for columns [n, K] as a checkpoint stores them."""
    depth = columns.shape[1]
    # [panel, column, K], or with pairs of K: as a checkpoint counts.
    turned = panels.transpose(0, 2, 1) if panels.ndim == 3 else panels.transpose(0, 2, 1, 3)
    done = 0
    while done < len(columns):
        panel, lane = divmod(first + done, PANEL)
        whole = (len(columns) - done) // PANEL
        if lane == 0 and whole > 0:
            some = columns[done : done + whole * PANEL].reshape(whole, PANEL, depth)
            target = turned[panel : panel + whole]
        else:
            some = columns[None, done : done + PANEL - lane]
            target = turned[panel : panel + 1, lane : lane + some.shape[1]]
        if panels.ndim == 3:
            target[...] = some
        else:
            target[:, :, : depth // 2] = some[..., : depth // 2 * 2].reshape(*some.shape[:2], -1, 2)
            if depth % 2:
                target[:, :, depth // 2, 0] = some[..., -1]
        done += some.shape[0] * some.shape[1]


def in_panels(matrix: Float[Array, "K N"]) -> Array:
    """Return a weight W [K, N] in panels, as `fill_panels` writes them."""
    depth, num_out = matrix.shape
    shape = panels_shape(depth, num_out, matrix.dtype)
    padded_depth = 2 * shape[1] if len(shape) == 4 else depth
    padded = jnp.pad(matrix, ((0, padded_depth - depth), (0, shape[0] * PANEL - num_out)))
    if len(shape) == 3:
        return padded.reshape(depth, shape[0], PANEL).transpose(1, 0, 2)
    return padded.reshape(shape[1], 2, shape[0], PANEL).transpose(2, 0, 3, 1)


def columns_of(panels: Float[Array, ...], ids: Int[Array, " T"], depth: int) -> Float[Array, "T K"]:
    """Return W[:, ids] transposed: rows of embeddings."""
    bits = panels
    if panels.dtype == jnp.bfloat16:
        # XLA would make float32 of all of W; and, ahead of a loop that decodes, all of its bits, but for the barrier.
        panels, ids = jax.lax.optimization_barrier((panels, ids))
        bits = jax.lax.bitcast_convert_type(panels, jnp.uint16)
    found = bits[ids // PANEL, :, ids % PANEL].reshape(ids.shape[0], -1)[:, :depth]
    return jax.lax.bitcast_convert_type(found, panels.dtype) if bits is not panels else found


def product(x: Float[Array, "R K"], panels: Float[Array, ...], num_out: int) -> Float[Array, "R N"]:
    """Return x · W in float32, for x and W both float32 or both bfloat16; W [K, num_out] is in panels."""
    # Native code reads what it is given as what it was made for.
    if x.dtype != panels.dtype or x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"product: got rows of {x.dtype} and a weight of {panels.dtype}, wanted both float32 or both bfloat16"
        )
    if (wanted := panels_shape(x.shape[1], num_out, x.dtype)) != panels.shape:
        raise ValueError(
            f"product: got a weight of shape {panels.shape}, wanted {wanted}: panels of {x.shape[1]} × {num_out}"
        )
    is_bf16_packed = x.dtype == jnp.bfloat16
    if is_bf16_packed and (rest := 2 * panels.shape[1] - x.shape[1]):
        x = jnp.pad(x, ((0, 0), (0, rest)))
    num_rows, has_avx512 = x.shape[0], host_has_avx512()
    if is_bf16_packed and has_amx_unit():
        name = tile_handler()
    else:
        num_groups = -(-num_rows // _most_rows(has_avx512))
        name = _handler(is_bf16_packed, is_bf16_packed and host_has("avx512bf16"), has_avx512, num_rows // num_groups)
    out = ffi_call(name, jax.ShapeDtypeStruct((num_rows, panels.shape[0] * PANEL), jnp.float32))(x, panels)
    return out[:, :num_out]


def _most_rows(has_avx512: bool) -> int:
    """Return the rows of x that are multiplied together, whose sums all stay in registers."""
    return 12 if has_avx512 else 6


@cache
def _handler(is_bf16_packed: bool, has_avx512_bf16: bool, has_avx512: bool, group: int) -> str:
    """Return the name of the custom call that takes rows in groups of `group` and of one more."""
    lanes, most_rows = 16 if has_avx512 else 8, _most_rows(has_avx512)
    none = constant(ir.VectorType(F32, lanes), 0.0)
    # Type of one word of x and of a panel.
    kind = I32 if is_bf16_packed else F32

    def prepare(code: Code, args: list[Buffer], rets: list[Buffer]) -> tuple[list[ir.Value], ir.Value, ir.Value]:
        x, panels = args
        build, num_rows, num_panels, depth = code.build, x.size(0), panels.size(0), panels.size(1)
        num_groups = build.sdiv(build.add(num_rows, I64(most_rows - 1)), I64(most_rows))
        num_larger = build.sub(num_rows, build.mul(num_groups, I64(group)))
        words = build.mul(build.mul(num_panels, I64(PANEL)), depth)
        values = [x.data, panels.data, rets[0].data, depth, rets[0].size(1), num_larger, num_groups]
        return values, num_panels, build.icmp_signed(">", words, I64(MAX_SERIAL_WORDS))

    def body(code: Code, given: list[ir.Value], unit: ir.Value) -> None:
        x, panels, out, depth, width, num_larger, num_groups = given
        build, add, mul = code.build, code.build.add, code.build.mul
        panel = mul(mul(unit, depth), I64(PANEL))
        num_parts = build.sdiv(add(depth, I64(MAX_WORDS_PER_BLOCK - 1)), I64(MAX_WORDS_PER_BLOCK))
        part = build.sdiv(add(depth, build.sub(num_parts, I64(1))), num_parts)

        def some_rows(first: ir.Value, count: int, column: int, begin: ir.Value, end: ir.Value) -> None:
            rows = [add(first, I64(i)) for i in range(count)]
            starts = [mul(row, depth) for row in rows]
            places = [
                add(add(mul(row, width), mul(unit, I64(PANEL))), I64(column + v * lanes))
                for row in rows
                for v in range(VECTORS)
            ]
            is_begun = build.icmp_signed(">", begin, I64(0))

            def add_products(k: ir.Value, *sums: ir.Value) -> list[ir.Value]:
                at = add(add(panel, mul(k, I64(PANEL))), I64(column))
                w = [code.load_vector(panels, add(at, I64(v * lanes)), kind, lanes) for v in range(VECTORS)]
                code.prefetch(panels, add(at, I64(FETCHED_AHEAD)), kind, VECTORS * lanes)
                factors = (code.load(x, add(start, k), kind) for start in starts)
                return code.add_outer(factors, w, sums, has_avx512_bf16=has_avx512_bf16)

            before = [build.select(is_begun, code.load_vector(out, place, F32, lanes), none) for place in places]
            for place, total in zip(places, code.loop(begin, end, add_products, carried=before), strict=True):
                code.store_vector(total, out, place)

        def some_depth(index: ir.Value) -> None:
            begin = mul(index, part)
            end = code.min(add(begin, part), depth)

            def of_size(count: int, before: ir.Value | int) -> Callable[[ir.Value], None]:
                def some_columns(index: ir.Value) -> None:
                    for column in range(0, PANEL, VECTORS * lanes):
                        some_rows(add(before, mul(index, I64(count))), count, column, begin, end)

                return some_columns

            larger = mul(num_larger, I64(group + 1))
            if group < most_rows:
                code.loop(0, num_larger, of_size(group + 1, I64(0)))
            code.loop(0, build.sub(num_groups, num_larger), of_size(group, larger))

        code.loop(0, num_parts, some_depth)

    sizes = is_bf16_packed, has_avx512_bf16, lanes, group
    name = "_".join(["jpaged_product", *(str(int(size)) for size in sizes)])
    return register(handler(name, 2, 1, prepare, body))
