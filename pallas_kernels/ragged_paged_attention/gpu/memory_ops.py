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


@dataclass(frozen=True)
class Chip:
    """Facts about the GPU that a kernel is compiled for; kernels ask no device."""

    has_tma: bool = True
    """Whether the chip copies by TMA (Hopper and later) or by cp.async (Ampere)."""
    interpret: Any = None
    """`plgpu.InterpretGPUParams` to run the kernel step by step in tests, else None."""


def smem_tile(shape: tuple[int, ...], dtype: Any, chip: Chip, lanes: int | None = None) -> Any:
    """Return the type of a tile [rows, lanes] in shared memory that products read without bank conflicts.

    `lanes` is the width of a product's operand where it is narrower than the tile. A row's bytes lie in blocks of 128,
    64 or 32, whatever divides the row.
    """
    row_bytes = (lanes or shape[-1]) * jnp.dtype(dtype).itemsize
    # The four warps that copy on Ampere want an even number of blocks to share 16 rows.
    divided_bytes = row_bytes if chip.has_tma or lanes else row_bytes // 2
    width = max(min(divided_bytes & -divided_bytes, 128), 32)
    tiling = plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(width)))


def start_copy(source: Ref, target: Ref, barrier: Ref | None, chip: Chip) -> None:
    """Start a copy from global to shared memory; a TMA copy arrives at `barrier`."""
    if chip.has_tma:
        plgpu.copy_gmem_to_smem(source, target, barrier)
    else:
        plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def wait_copies(barrier: Ref | None, num_later: int, chip: Chip) -> None:
    """Wait for the copies of one barrier; on Ampere, for all copies but the `num_later` that were started last."""
    if chip.has_tma:
        plgpu.barrier_wait(barrier)
    else:
        plgpu.wait_gmem_to_smem(num_later)


def fence_before_copy(chip: Chip) -> None:
    """Order earlier reads and writes of shared memory by ordinary instructions before TMA copies that follow."""
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
    source: Ref, head: Any, aligned_row: Any, num_rows: Any, target: Ref, barrier: Ref | None, chip: Chip
) -> None:
    """Start the copies of `num_rows` query rows, source[head, aligned_row:], to the tile `target`.

    Rows are copied ROW_ALIGN at a time. Those behind the last row are the last ROW_ALIGN rows once more, because what
    follows in `source` may be another thread block's, which is just being written. Ampere cannot copy so few rows and
    copies what is there; results computed from it are not stored.
    """
    if not chip.has_tma:
        return start_copy(source.at[head, pl.ds(aligned_row, target.shape[0])], target, barrier, chip)
    last = lax.div(num_rows - 1, jnp.int32(ROW_ALIGN)) * ROW_ALIGN
    for first in range(0, target.shape[0], ROW_ALIGN):
        begin = pl.multiple_of(aligned_row + jnp.minimum(first, last), ROW_ALIGN)
        start_copy(source.at[head, pl.ds(begin, ROW_ALIGN)], target.at[pl.ds(first, ROW_ALIGN)], barrier, chip)


def store_query_rows(
    target: Ref, head: Any, aligned_row: Any, num_rows: Any, values: jax.Array, staging: Ref, chip: Chip
) -> None:
    """Store the first `num_rows` rows of `values` to target[head, aligned_row:], through shared memory `staging`.

    Rows go ROW_ALIGN at a time, sixteen bytes a thread at head size 128. The last of these may be padding rows, which
    are written as well.
    """
    staging[...] = values.astype(staging.dtype)
    for first in range(0, staging.shape[0], ROW_ALIGN):

        @pl.when(first < num_rows)
        def _(first: int = first) -> None:
            rows = plgpu.load(staging.at[pl.ds(first, ROW_ALIGN)], layout=row_layout(staging.shape[1], chip))
            store_global(target.at[head, pl.ds(pl.multiple_of(aligned_row + first, ROW_ALIGN), ROW_ALIGN)], rows)


def row_layout(head_size: int, chip: Chip) -> Any:
    """Return the register layout of ROW_ALIGN rows: neighbouring lanes in one thread, two rows to a warp.

    A warp takes the largest power of two of lanes at once that divides the head size. On Ampere 64 or 32 of these lie
    in two blocks of shared memory, so a warp has half of them in four rows there.
    """
    width = min(head_size & -head_size, 128)
    if width in (32, 64) and not chip.has_tma:
        half_rows = plgpu.Tiling(((ROW_ALIGN, width), (4, width // 2), (width // 16,)))
        return plgpu.Layout.TILED(half_rows, warp_dims=(-5, -4), lane_dims=(-3, -2), vector_dim=-1)
    tiling = plgpu.Tiling(((ROW_ALIGN, width), (2, width), (width // 16,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def to_compute_dtype(stored: jax.Array, chip: Chip) -> jax.Array:
    """Convert one-byte numbers of a page to bfloat16, exactly: they fit into its eight bits of mantissa."""
    if chip.has_tma:
        return stored.astype(jnp.float32).astype(COMPUTE_DTYPE)
    if stored.dtype == jnp.int8:
        return _int8_to_float32(stored).astype(COMPUTE_DTYPE)
    return _float8_to_float32(lax.bitcast_convert_type(stored, jnp.int8)).astype(COMPUTE_DTYPE)


def _int8_to_float32(stored: jax.Array) -> jax.Array:
    """Convert by adding to the bits of 1.5 · 2²³, whose last place counts ones; the instruction needs a Hopper."""
    return lax.bitcast_convert_type(stored.astype(jnp.int32) + 0x4B400000, jnp.float32) - 1.5 * 2.0**23


def _float8_to_float32(bits: jax.Array) -> jax.Array:
    """Convert the bits of float8_e4m3fn: shifted left by 7 they are a float16 whose exponent is too small by 8."""
    bits = bits.astype(jnp.int32)
    half = lax.bitcast_convert_type((((bits << 7) & 0x3F80) | (bits & -0x8000)).astype(jnp.int16), jnp.float16)
    return jnp.where((bits & 0x7F) == 0x7F, jnp.nan, half.astype(jnp.float32) * 256.0)
