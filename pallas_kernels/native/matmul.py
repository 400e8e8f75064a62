"""Products with a weight on a CPU, in native code, bound by memory bandwidth (few rows) or arithmetic (many rows).

    x [R, K] · W [K, N]      W lies in panels of 32 columns: [N ÷ 32, K, 32], one after the other as they are read

    panel ──▶ for some rows of x at once:   sums [rows, 32] in registers; for each k, one value of x × 32 values of W

Each result is summed in one fixed order, so its bits do not depend on the other rows. Panels of bfloat16 hold pairs of
values along K, [N ÷ 32, K ÷ 2, 32, 2]. A matrix unit (`amx`) multiplies them, or vectors do, both values of a pair at
once (AVX512-BF16) or one after the other as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.ffi import ffi_call
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int
from llvmlite import ir

from .amx import DEPTH, MAX_SERIAL_WORDS, PANEL, has_amx_unit, tile_handler
from .llvm import F32, I32, I64, Code, constant, host_has, host_has_avx512, register
from .xla_call import Buffer, Work, handler

VECTORS = 2
"""Vectors of sums per row of x that stay in registers."""
MAX_WORDS_PER_BLOCK = 768
"""Words of a column per block at most: this part of a panel stays in the level-2 cache while all rows of x use it."""
PREFETCH_WORDS = 32 * PANEL
"""Distance in words from what is read in a panel to what is prefetched: hardware prefetchers do not reach as far."""


def panels_shape(depth: int, num_out: int, dtype: DTypeLike) -> tuple[int, ...]:
    """Return the shape of a weight W [K, N] in panels of 32 columns; `depth` is K and `num_out` is N.

    Bfloat16 has the shape [panels, pairs, 32, 2]. A pair is two values of one column that follow each other along K,
    as a matrix unit (AMX) reads them; K is padded to a multiple of the `DEPTH` = 32 values that one AMX instruction
    multiplies. Any other dtype, such as float32, has the shape [panels, K, 32]. N is padded to whole panels. W [100,
    70] has the shape [3, 64, 32, 2] in bfloat16, and [3, 100, 32] in float32.
    """
    panels = -(-num_out // PANEL)
    if jnp.dtype(dtype) == jnp.bfloat16:
        return panels, -(-depth // DEPTH) * DEPTH // 2, PANEL, 2
    return panels, depth, PANEL


def empty_panels(depth: int, num_out: int, buffer: np.ndarray) -> np.ndarray:
    """Write zeros to the padding of `buffer`, an uninitialised array for W [K, N] in panels, and return `buffer`.

    `depth` is K, `num_out` is N, and `buffer` has the shape `panels_shape(depth, num_out, dtype)`. `fill_panels` later
    writes all elements of W but no padding. So zeros may also be written to elements of W here: the last panel is
    cleared whole if it has padding columns, and the pair that holds the last value of an odd K is cleared whole.
    """
    if num_out % PANEL:
        buffer[-1] = 0
    if buffer.ndim == 4:  # [panels, pairs of K, 32, 2]: bfloat16, with K padded.
        buffer[:, depth // 2 :] = 0
    return buffer


def fill_panels(panels: np.ndarray, first_column: int, columns: np.ndarray) -> None:
    """Write W[:, first_column + i] = columns[i] into the panels of W [K, N]; `columns` are n rows of Wᵀ, [n, K].

    `panels` is [panels, K, 32], or [panels, pairs of K, 32, 2] in bfloat16. Column 70 of W is column 6 of panel 2; in
    bfloat16 its values 2p and 2p + 1 are pair p. If K is odd, the last pair holds one value, and `empty_panels` has set
    the second to zero. All whole panels are written by one assignment. The columns before and after them, which fill
    a panel only in part, take one assignment each: columns 20 … 99 are written as 20 … 31, 32 … 95 and 96 … 99.
    """
    depth = columns.shape[1]
    # A view with the axis of columns before that of K, as in `columns`: [panel, column, K] or [panel, column, pair, 2].
    panels_by_column = panels.transpose(0, 2, 1) if panels.ndim == 3 else panels.transpose(0, 2, 1, 3)
    num_written = 0
    while num_written < len(columns):
        panel, column = divmod(first_column + num_written, PANEL)
        num_whole_panels = (len(columns) - num_written) // PANEL
        if column == 0 and num_whole_panels > 0:
            end = num_written + num_whole_panels * PANEL
            new_columns = columns[num_written:end].reshape(num_whole_panels, PANEL, depth)
            target = panels_by_column[panel : panel + num_whole_panels]
        else:  # Columns up to the panel's end, or fewer if fewer are left.
            new_columns = columns[None, num_written : num_written + PANEL - column]
            target = panels_by_column[panel : panel + 1, column : column + new_columns.shape[1]]
        if panels.ndim == 3:
            target[...] = new_columns
        else:
            target[:, :, : depth // 2] = new_columns[..., : depth // 2 * 2].reshape(*new_columns.shape[:2], -1, 2)
            if depth % 2:
                target[:, :, depth // 2, 0] = new_columns[..., -1]
        num_written += new_columns.shape[0] * new_columns.shape[1]


def in_panels(matrix: Float[Array, "K N"]) -> Array:
    """Return a weight W [K, N] in panels of 32 columns, padded with zeros; XLA computes it, also when traced.

    The result is [panels, K, 32], or [panels, pairs of K, 32, 2] in bfloat16, as `panels_shape` says: element (k, n) of
    W is element (n // 32, k, n % 32), or (n // 32, k // 2, n % 32, k % 2).
    """
    depth, num_out = matrix.shape
    shape = panels_shape(depth, num_out, matrix.dtype)
    padded_depth = 2 * shape[1] if len(shape) == 4 else depth
    padded = jnp.pad(matrix, ((0, padded_depth - depth), (0, shape[0] * PANEL - num_out)))
    if len(shape) == 3:
        return padded.reshape(depth, shape[0], PANEL).transpose(1, 0, 2)
    return padded.reshape(shape[1], 2, shape[0], PANEL).transpose(2, 0, 3, 1)


def columns_of(panels: Float[Array, ...], ids: Int[Array, " T"], depth: int) -> Float[Array, "T K"]:
    """Return the columns `ids` of W [K, N] as rows [T, K]; `depth` is K.

    `panels` hold W in panels of 32 columns: [panels, K, 32] in float32, [panels, pairs of K, 32, 2] in bfloat16, where
    K is padded. This looks up tied embeddings: W is one matrix for the embedding, by columns, and for the logits.
    """
    is_bf16 = panels.dtype == jnp.bfloat16
    if is_bf16:
        # XLA would convert all of W to float32 to gather from it, so its bits are gathered. The barrier keeps XLA from
        # moving the conversion to bits out of a loop that decodes tokens, since there it would copy all of W.
        panels, ids = jax.lax.optimization_barrier((panels, ids))
        panels = jax.lax.bitcast_convert_type(panels, jnp.uint16)
    # A slice between two index arrays moves their axis T to the front: [T, K], or [T, pairs, 2].
    gathered = panels[ids // PANEL, :, ids % PANEL].reshape(ids.shape[0], -1)[:, :depth]
    return jax.lax.bitcast_convert_type(gathered, jnp.bfloat16) if is_bf16 else gathered


def product(x: Float[Array, "R K"], panels: Float[Array, ...], num_out: int) -> Float[Array, "R N"]:
    """Return x · W in float32, for x and W both float32 or both bfloat16; W [K, N = `num_out`] is stored in panels.

    `panels` is [panels, K, 32], or [panels, pairs of K, 32, 2] in bfloat16, with K and N padded. x has at least one
    row, R ≥ 1. The bits of a result row do not depend on the other rows. Bfloat16 is multiplied by the matrix unit
    (AMX) if there is one, everything else by vectors. Raises ValueError if x or W has another dtype, or if `panels`
    does not have the shape of the panels of a [K, N] matrix.
    """
    # Native code checks neither dtype nor shape, and would read other memory.
    if x.dtype != panels.dtype or x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"product: got rows of {x.dtype} and a weight of {panels.dtype}, wanted both float32 or both bfloat16"
        )
    if (wanted := panels_shape(x.shape[1], num_out, x.dtype)) != panels.shape:
        raise ValueError(
            f"product: got a weight of shape {panels.shape}, wanted {wanted}: panels of {x.shape[1]} × {num_out}"
        )
    is_bf16_packed = x.dtype == jnp.bfloat16
    # In bfloat16, K is padded as the panels are; the zeros add nothing.
    if is_bf16_packed and (num_padding := 2 * panels.shape[1] - x.shape[1]):
        x = jnp.pad(x, ((0, 0), (0, num_padding)))
    num_rows, has_avx512 = x.shape[0], host_has_avx512()
    if is_bf16_packed and has_amx_unit():
        name = tile_handler()
    else:
        # As few batches of rows as possible, of equal sizes or one row apart: 25 rows are 9 + 8 + 8 if at most 12 fit.
        # A handler is compiled for each size of the smaller batches, here 8.
        num_batches = -(-num_rows // _max_rows_together(has_avx512))
        name = _handler(is_bf16_packed, is_bf16_packed and host_has("avx512bf16"), has_avx512, num_rows // num_batches)
    out = ffi_call(name, jax.ShapeDtypeStruct((num_rows, panels.shape[0] * PANEL), jnp.float32))(x, panels)
    return out[:, :num_out]  # The last panel has padding columns unless N is a multiple of 32.


def _max_rows_together(has_avx512: bool) -> int:
    """Return how many rows of x are multiplied together at most: all their sums must stay in registers."""
    return 12 if has_avx512 else 6


@cache
def _handler(is_bf16_packed: bool, has_avx512_bf16: bool, has_avx512: bool, rows_per_batch: int) -> str:
    """Compile the custom call x [R, K] · panels → float32 [R, N] for vectors of the processor; return its name.

    A unit of work is one panel of 32 columns. K is cut into blocks that stay in the level-2 cache, and each batch of
    rows keeps its sums in registers during a block. R is divided evenly into as few batches as possible: the larger
    ones, of `rows_per_batch` + 1 rows, come first, then those of `rows_per_batch`. With AVX-512 (at most 12 rows
    together), 25 rows are 3 batches with `rows_per_batch` 8: one of 9 rows and two of 8.
    """
    lanes, max_rows = 16 if has_avx512 else 8, _max_rows_together(has_avx512)
    zeros = constant(ir.VectorType(F32, lanes), 0.0)
    # A word of x or of a panel is a float32 or a pair of bfloat16. Below, `depth` counts words.
    word_type = I32 if is_bf16_packed else F32

    def prepare(code: Code, args: list[Buffer], rets: list[Buffer]) -> Work:
        """Emit code that counts the panels, which are the units, and divides the rows of x into batches.

        25 rows with `rows_per_batch` 8 and at most 12 rows together are 3 batches, of which 25 − 3 × 8 = 1 is larger.
        A large weight is worth several threads, as reading it bounds the product.
        """
        x, panels = args
        build, num_rows, num_panels, depth = code.build, x.size(0), panels.size(0), panels.size(1)
        num_batches = build.sdiv(build.add(num_rows, I64(max_rows - 1)), I64(max_rows))
        num_larger_batches = build.sub(num_rows, build.mul(num_batches, I64(rows_per_batch)))
        num_words = build.mul(build.mul(num_panels, I64(PANEL)), depth)
        values = [x.data, panels.data, rets[0].data, depth, rets[0].size(1), num_larger_batches, num_batches]
        return Work(values, num_units=num_panels, is_large=build.icmp_signed(">", num_words, I64(MAX_SERIAL_WORDS)))

    def body(code: Code, arguments: list[ir.Value], unit: ir.Value) -> None:
        """Emit the product of all rows of x and panel `unit`, one block of K after the other.

        `out` holds the partial sums between blocks. Blocks are of about equal size, at most `MAX_WORDS_PER_BLOCK` = 768
        words: 1000 words are 2 blocks of 500.
        """
        x, panels, out, depth, num_columns, num_larger_batches, num_batches = arguments
        build, add, mul = code.build, code.build.add, code.build.mul
        panel_offset = mul(mul(unit, depth), I64(PANEL))
        num_blocks = build.sdiv(add(depth, I64(MAX_WORDS_PER_BLOCK - 1)), I64(MAX_WORDS_PER_BLOCK))
        block_depth = build.sdiv(add(depth, build.sub(num_blocks, I64(1))), num_blocks)

        def multiply_rows(
            first_row: ir.Value, num_rows_together: int, first_column: int, begin: ir.Value, end: ir.Value
        ) -> None:
            """Multiply words `begin` … `end` − 1 of K for a batch of rows and `VECTORS` vectors of the panel's columns.

            `first_row` is the batch's first row of x [R, K], `first_column` the first column within the panel. The sums
            stay in registers, one vector per row and v < `VECTORS`, while k goes over the words. They start at zero if
            `begin` is 0, else at the partial sums in `out` [R, columns], and are written to `out`.
            """
            rows = [add(first_row, I64(i)) for i in range(num_rows_together)]
            starts = [mul(row, depth) for row in rows]
            sum_offsets = [
                add(add(mul(row, num_columns), mul(unit, I64(PANEL))), I64(first_column + v * lanes))
                for row in rows
                for v in range(VECTORS)
            ]
            has_partial_sums = build.icmp_signed(">", begin, I64(0))

            def add_products(k: ir.Value, *sums: ir.Value) -> list[ir.Value]:
                """Return the sums plus the products of word k of each row of x and of each column: an outer product.

                The panel is also prefetched, 32 of its rows ahead; beyond its end this is harmless.
                """
                word_offset = add(add(panel_offset, mul(k, I64(PANEL))), I64(first_column))
                offsets = (add(word_offset, I64(v * lanes)) for v in range(VECTORS))
                words = code.load_vectors(panels, offsets, word_type, lanes)
                code.prefetch(panels, add(word_offset, I64(PREFETCH_WORDS)), word_type, VECTORS * lanes)
                factors = (code.load(x, add(start, k), word_type) for start in starts)
                return code.add_outer(factors, words, sums, has_avx512_bf16=has_avx512_bf16)

            # To avoid a branch, `out` is always read: in the first block it holds nothing yet, and zeros are selected.
            stored = (code.load_vector(out, offset, F32, lanes) for offset in sum_offsets)
            old_sums = [build.select(has_partial_sums, vector, zeros) for vector in stored]
            new_sums = code.loop(begin, end, add_products, carried=old_sums)
            for sum_offset, total in zip(sum_offsets, new_sums, strict=True):
                code.store_vector(total, out, sum_offset)

        def multiply_block(block: ir.Value) -> None:
            """Multiply all rows of x by one block of the panel, the larger batches of rows before the smaller ones.

            Block `block` is words `block` × `block_depth` … of K; the last block may be shorter.
            """
            begin = mul(block, block_depth)
            end = code.min(add(begin, block_depth), depth)

            def multiply_batches(num_rows_together: int, rows_before: ir.Value) -> Callable[[ir.Value], None]:
                """Return a loop body that multiplies one batch, counted among those of `num_rows_together` rows.

                The first of these batches begins at row `rows_before`. A batch takes the panel's 32 columns in one or
                more parts of `VECTORS` vectors each.
                """

                def multiply_batch(batch: ir.Value) -> None:
                    for first_column in range(0, PANEL, VECTORS * lanes):
                        first_row = add(rows_before, mul(batch, I64(num_rows_together)))
                        multiply_rows(first_row, num_rows_together, first_column, begin, end)

                return multiply_batch

            rows_of_larger_batches = mul(num_larger_batches, I64(rows_per_batch + 1))
            # If `rows_per_batch` is the most that fits, no batch is larger, and code for one would spill registers.
            if rows_per_batch < max_rows:
                code.loop(0, num_larger_batches, multiply_batches(rows_per_batch + 1, I64(0)))
            num_smaller_batches = build.sub(num_batches, num_larger_batches)
            code.loop(0, num_smaller_batches, multiply_batches(rows_per_batch, rows_of_larger_batches))

        code.loop(0, num_blocks, multiply_block)

    sizes = is_bf16_packed, has_avx512_bf16, lanes, rows_per_batch
    name = "_".join(["jpaged_product", *(str(int(size)) for size in sizes)])
    return register(handler(name, 2, 1, prepare, body))
