"""Shared memory, copies and loads of the GPU kernels, and the conversion of one-byte numbers.

A thread block is one warpgroup: 128 threads in four warps that all run the same code. The rows of a tile lie in shared
memory in blocks of eight whose bytes are permuted (swizzled), so that the reads of one warp hit different banks. Hopper
and later chips copy from global to shared memory by TMA, which signals a barrier; Ampere copies by `cp.async`, whose
copies are waited for by their number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jax.typing import DTypeLike

from .plan import ROW_ALIGN

plgpu: Any = mosaic_gpu

MASK_VALUE = -1e30
"""Score of a masked key, and the start of a running maximum. It is finite so that no difference of scores is NaN."""
LOG2_E = math.log2(math.e)
COMPUTE_DTYPE = jnp.bfloat16
"""Dtype of the operands of products; their sums are float32."""
Ref = Any
"""Type of a field in the kernels' records: inside a kernel a reference to memory or a barrier; while the call is built,
the array or the scratch type that becomes that reference."""
Scalar = int | jax.Array
"""An int32 number inside a kernel: loaded or computed there, or known when the kernel is traced."""


@dataclass(frozen=True)
class Chip:
    """Facts about the GPU that a kernel is compiled for; kernels ask no device."""

    has_tma: bool = True
    """Whether the chip copies by TMA (Hopper and later) or by cp.async (Ampere)."""
    interpret: Any = None
    """`plgpu.InterpretGPUParams` to run the kernel step by step in tests, else None."""


def smem_tile(shape: tuple[int, ...], dtype: DTypeLike, chip: Chip, lanes: int | None = None) -> Any:
    """Return the type of a tile in shared memory that products read without bank conflicts.

    `shape` ends in [rows, lanes]; a lane is one number of a row. A row lies in swizzled blocks of 128, 64 or 32 bytes,
    the sizes that the hardware can permute: the largest of them that divides the row, or on Ampere half the row, but at
    least 32. A row of 96 bfloat16, 192 bytes, is three blocks of 64 on Hopper and six blocks of 32 on Ampere. `lanes`
    is given if a product reads fewer lanes at a time than the tile has: then the block size divides the bytes of that
    many lanes, on any chip. A block is eight rows high.
    """
    row_bytes = (lanes or shape[-1]) * jnp.dtype(dtype).itemsize
    # On Ampere, four warps share the copy of 16 rows, which takes an even number of blocks in a row. Below, x & −x is
    # the largest power of two that divides x.
    bytes_to_divide = row_bytes if chip.has_tma or lanes else row_bytes // 2
    block_bytes = max(min(bytes_to_divide & -bytes_to_divide, 128), 32)
    tiling = plgpu.TilingTransform((8, block_bytes // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(block_bytes)))


def start_copy(source: Ref, target: Ref, barrier: Ref | None, chip: Chip) -> None:
    """Start an asynchronous copy of `source` in global memory to `target` in shared memory, of the same shape.

    `wait_copies` waits for it. With TMA (Hopper and later), the copy arrives at `barrier`. Otherwise (Ampere) it is a
    cp.async copy, `barrier` is None, and `source` must lie within its array, since out-of-bounds reads are not checked.
    """
    if chip.has_tma:
        plgpu.copy_gmem_to_smem(source, target, barrier)
    else:
        plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def wait_copies(barrier: Ref | None, num_later: int, chip: Chip) -> None:
    """Wait for the copies that arrive at `barrier`; without TMA, for all copies but the last `num_later` started.

    With TMA (Hopper and later), `num_later` is not used. Copies by cp.async (Ampere) arrive at no barrier, so `barrier`
    is not used. They end in the order of their start: with 6 started and `num_later` 2, the first 4 have ended. Each
    thread counts its own copies. Then the threads of the block synchronize, and each sees the data of all.
    """
    if chip.has_tma:
        plgpu.barrier_wait(barrier)
    else:
        plgpu.wait_gmem_to_smem(num_later)


def fence_before_copy(chip: Chip) -> None:
    """Make later TMA copies wait for earlier reads and writes of shared memory by ordinary instructions."""
    if chip.has_tma:
        plgpu.commit_smem()


def load_global(source: Ref, layout: Any) -> jax.Array:
    """Load an array from global memory into registers of this layout."""
    return plgpu.load(source, layout=layout, optimized=False)


def store_global(target: Ref, value: jax.Array) -> None:
    """Store registers to global memory."""
    if hasattr(plgpu, "store"):  # jax ≥ 0.12
        plgpu.store(target, value, optimized=False)
    else:
        target[...] = value


def start_query_copies(
    source: Ref, head: Scalar, aligned_row: jax.Array, num_rows: Scalar, target: Ref, barrier: Ref | None, chip: Chip
) -> None:
    """Start the copies of `num_rows` query rows, source[head, aligned_row:], to the tile `target` in shared memory.

    `source` is [K, A, H], A query rows for each of K KV heads; `target` is [M, H]. All M rows are filled, ROW_ALIGN = 8
    rows at a time. If `num_rows` exceeds M, the first M rows are copied. If it is less, the 8 rows that hold the last
    one are copied again in place of those after them, because another thread block may be writing those: 20 rows to a
    tile of 32 copy the rows 0 … 7, 8 … 15, 16 … 23, and 16 … 23 again. Ampere cannot copy so few rows at a time and
    copies M rows of `source`, some of which may be another sequence's. Results of the added rows are not stored. On
    Hopper, `barrier` gets one arrival for each 8 rows.
    """
    if not chip.has_tma:  # Ampere.
        return start_copy(source.at[head, pl.ds(aligned_row, target.shape[0])], target, barrier, chip)
    last_copied_row = lax.div(num_rows - 1, jnp.int32(ROW_ALIGN)) * ROW_ALIGN
    for first_row in range(0, target.shape[0], ROW_ALIGN):
        source_row = pl.multiple_of(aligned_row + jnp.minimum(first_row, last_copied_row), ROW_ALIGN)
        start_copy(source.at[head, pl.ds(source_row, ROW_ALIGN)], target.at[pl.ds(first_row, ROW_ALIGN)], barrier, chip)


def store_query_rows(
    target: Ref, head: Scalar, aligned_row: jax.Array, num_rows: Scalar, values: jax.Array, staging: Ref, chip: Chip
) -> None:
    """Store the first `num_rows` rows of `values` [M, H] to target[head, aligned_row:], all M if `num_rows` is larger.

    `target` is [K, A, H] in global memory. The rows go through `staging`, a tile [M, H] in shared memory, and are
    rounded to its dtype there. Thus each thread stores adjacent numbers: 16 bytes at head size 128. Rows are stored
    ROW_ALIGN = 8 at a time: with `num_rows` 20, the rows 0 … 23. The additional rows overwrite padding only, because
    the rows of each sequence begin at a multiple of 8 in `target`.
    """
    staging[...] = values.astype(staging.dtype)
    for first_row in range(0, staging.shape[0], ROW_ALIGN):

        @pl.when(first_row < num_rows)
        def _(first_row: int = first_row) -> None:
            rows = plgpu.load(staging.at[pl.ds(first_row, ROW_ALIGN)], layout=row_layout(staging.shape[1], chip))
            store_global(target.at[head, pl.ds(pl.multiple_of(aligned_row + first_row, ROW_ALIGN), ROW_ALIGN)], rows)


def row_layout(head_size: int, chip: Chip) -> Any:
    """Return the register layout in which a thread block loads and stores a tile [rows, H], of 8 rows or a multiple.

    The layout repeats every 8 rows and every `width` numbers of a row. `width` is the largest power of two that divides
    H, at most 128: a row of 96 numbers is three times 32. Each of the four warps of a thread block has two of the 8
    rows, 16 threads to a row, and a thread has `width` // 16 adjacent numbers: 2 at H = 96, 8 at H = 128.

    On Ampere, `smem_tile` stores `width` = 64 or 32 bfloat16 numbers of a row in two swizzled blocks, half of them in
    each. So that a warp reads from one block only, without bank conflicts, it has there half of the numbers of four
    rows, 8 threads to a row.
    """
    # x & −x is the largest power of two that divides x.
    width = min(head_size & -head_size, 128)
    # Each tuple of a tiling cuts the last axes further and appends its sizes. The axes that follow from the last two
    # tuples are named from the end: −1 is the numbers of one thread, −2 the threads of a row, −3 the rows of a warp.
    # `lane_dims` are the axes over the 32 threads of a warp, `warp_dims` those over the four warps.
    if width in (32, 64) and not chip.has_tma:
        # [8, width] becomes [2, 2, 4, 8, width // 16]: two times four rows, and two halves of a row.
        half_rows = plgpu.Tiling(((ROW_ALIGN, width), (4, width // 2), (width // 16,)))
        return plgpu.Layout.TILED(half_rows, warp_dims=(-5, -4), lane_dims=(-3, -2), vector_dim=-1)
    # [8, width] becomes [4, 1, 2, 16, width // 16]: four times two whole rows.
    tiling = plgpu.Tiling(((ROW_ALIGN, width), (2, width), (width // 16,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def to_compute_dtype(stored: jax.Array, chip: Chip) -> jax.Array:
    """Convert one-byte numbers of a page, int8 or float8_e4m3fn, to bfloat16, which is exact; NaN stays NaN.

    Scales are not applied here. Chips before Hopper, which are those without TMA, have no instruction for the
    conversion. There the numbers are converted by operations on their bits, float8 as the int8 of the same bits.
    """
    if chip.has_tma:
        return stored.astype(jnp.float32).astype(COMPUTE_DTYPE)
    if stored.dtype == jnp.int8:
        return _int8_to_float32(stored).astype(COMPUTE_DTYPE)
    return _float8_to_float32(lax.bitcast_convert_type(stored, jnp.int8)).astype(COMPUTE_DTYPE)


def _int8_to_float32(stored: jax.Array) -> jax.Array:
    """Convert int8 to float32 without the conversion instruction, which needs a Hopper.

    Adding an integer to the bits 0x4B400000 of 1.5 · 2²³ adds it to the number, whose last mantissa bit stands for 1.
    """
    return lax.bitcast_convert_type(stored.astype(jnp.int32) + 0x4B400000, jnp.float32) - 1.5 * 2.0**23


def _float8_to_float32(bits: jax.Array) -> jax.Array:
    """Convert the bits of float8_e4m3fn, given as int8, to float32, NaN included, without the conversion instruction.

    The four bits of the exponent and the three of the mantissa, shifted left by 7, are those of a float16. Its exponent
    is too small by 8, the difference of the two formats' biases (15 − 7), so the result is multiplied by 2⁸ = 256. The
    sign is in bit 15, because the conversion to int32 repeats it in all higher bits. NaN has ones in the seven lower
    bits. Example: 0x38 is 1.0; shifted it is 0x1C00, the float16 1 ÷ 256.
    """
    bits = bits.astype(jnp.int32)
    half = lax.bitcast_convert_type((((bits << 7) & 0x3F80) | (bits & -0x8000)).astype(jnp.int16), jnp.float16)
    return jnp.where((bits & 0x7F) == 0x7F, jnp.nan, half.astype(jnp.float32) * 256.0)
