"""What the GPU kernels share: memory for tiles, copies, and numbers of one byte.

One thread block is one warpgroup of 128 threads, four warps, that all do the same. Rows of a tile lie in shared memory
in blocks of eight, their bytes shuffled (swizzled) so that the reads of a warp hit different banks.
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

from .gpu_plan import ALIGN

plgpu: Any = mosaic_gpu

LEAST_MAX = -1e30
"""Where running maxima start, and what masked scores are: finite, so that no difference of them is NaN."""
LOG2_E = math.log2(math.e)
COMPUTE_DTYPE = jnp.bfloat16
"""Of the operands of products; sums are float32."""


@dataclass(frozen=True)
class Chip:
    """What a kernel has to know of the chip it runs on; nothing asks a device."""

    has_tma: bool = True
    """Hopper and later copy by TMA, Ampere by cp.async."""
    interpret: Any = None
    """`plgpu.InterpretGPUParams`, for tests."""


def tile_memory(shape: tuple[int, ...], dtype: Any, chip: Chip, lanes: int | None = None) -> Any:
    """Shared memory for tiles [rows, lanes], laid out so that products read it without bank conflicts."""
    row_bytes = (lanes or shape[-1]) * jnp.dtype(dtype).itemsize
    # The four warps that copy on Ampere want two blocks of lanes to share 16 rows.
    width = min(128, row_bytes if chip.has_tma or lanes else row_bytes // 2)
    tiling = plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(width)))


def copy_in(source: Any, target: Any, barrier: Any, chip: Chip) -> None:
    """Start a copy from global to shared memory."""
    if chip.has_tma:
        plgpu.copy_gmem_to_smem(source, target, barrier)
    else:
        plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def wait_for(barrier: Any, num_later: int, chip: Chip) -> None:
    """Wait for the copies of one barrier; on Ampere, for all but the `num_later` that were started last."""
    if chip.has_tma:
        plgpu.barrier_wait(barrier)
    else:
        plgpu.wait_gmem_to_smem(num_later)


def release(chip: Chip) -> None:
    """What was read or written by ordinary instructions before may be overwritten by TMA after."""
    if chip.has_tma:
        plgpu.commit_smem()


def write_out(target: Any, value: jax.Array) -> None:
    """Registers to global memory."""
    if hasattr(plgpu, "store"):  # jax ≥ 0.12
        plgpu.store(target, value, optimized=False)
    else:
        target[...] = value


def read_rows(source: Any, head: Any, place: Any, num_rows: Any, target: Any, barrier: Any, chip: Chip) -> None:
    """Start copies of source[head, place:], ALIGN rows at a time, to a tile of which `num_rows` or all are meant. Those
    behind them are the last ones once more: what follows in `source` may be another thread block's, just being written.

    Ampere cannot copy so few rows, and takes what is there: rows that are computed of it are not written.
    """
    if not chip.has_tma:
        return copy_in(source.at[head, pl.ds(place, target.shape[0])], target, barrier, chip)
    last = lax.div(num_rows - 1, jnp.int32(ALIGN)) * ALIGN
    for first in range(0, target.shape[0], ALIGN):
        begin = pl.multiple_of(place + jnp.minimum(first, last), ALIGN)
        copy_in(source.at[head, pl.ds(begin, ALIGN)], target.at[pl.ds(first, ALIGN)], barrier, chip)


def write_rows(target: Any, head: Any, place: Any, num_rows: Any, values: jax.Array, staging: Any, chip: Chip) -> None:
    """The first `num_rows` of a tile to target[head, place:], by way of `staging`, ALIGN at a time and sixteen bytes
    a thread; rows behind them in the last ALIGN are padding and may be written."""
    staging[...] = values.astype(staging.dtype)
    for first in range(0, staging.shape[0], ALIGN):

        @pl.when(first < num_rows)
        def _(first: int = first) -> None:
            rows = plgpu.load(staging.at[pl.ds(first, ALIGN)], layout=spread(staging.shape[1], chip))
            write_out(target.at[head, pl.ds(pl.multiple_of(place + first, ALIGN), ALIGN)], rows)


def spread(head_size: int, chip: Chip) -> Any:
    """Layout of ALIGN rows at a time: neighbouring lanes side by side, two rows to a warp; four halves of a row on
    Ampere, where a row of 64 lies in two blocks."""
    width = min(head_size, 128)
    if width == 64 and not chip.has_tma:
        halves = plgpu.Tiling(((ALIGN, 64), (4, 32), (4,)))
        return plgpu.Layout.TILED(halves, warp_dims=(-5, -4), lane_dims=(-3, -2), vector_dim=-1)
    tiling = plgpu.Tiling(((ALIGN, width), (2, width), (width // 16,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def read_in(source: Any, layout: Any) -> jax.Array:
    """Global memory to registers."""
    loaded: jax.Array = plgpu.load(source, layout=layout, optimized=False)
    return loaded


def as_operand(stored: jax.Array, chip: Chip) -> jax.Array:
    """Numbers as they lie in a page → as products take them; exact, since one byte fits into eight bits of mantissa."""
    if chip.has_tma:
        return stored.astype(jnp.float32).astype(COMPUTE_DTYPE)
    if stored.dtype == jnp.int8:
        return _float_of_int8(stored).astype(COMPUTE_DTYPE)
    return _float_of_e4m3(lax.bitcast_convert_type(stored, jnp.int8)).astype(COMPUTE_DTYPE)


def _float_of_int8(stored: jax.Array) -> jax.Array:
    """Added to the bits of 1.5 · 2²³, whose last place counts ones: the compiler's own way needs a Hopper."""
    return lax.bitcast_convert_type(stored.astype(jnp.int32) + 0x4B400000, jnp.float32) - 1.5 * 2.0**23


def _float_of_e4m3(bits: jax.Array) -> jax.Array:
    """float8_e4m3fn by its bits: seven places further left they are those of a float16, but for 8 in the exponent."""
    bits = bits.astype(jnp.int32)
    half = lax.bitcast_convert_type((((bits << 7) & 0x3F80) | (bits & -0x8000)).astype(jnp.int16), jnp.float16)
    return jnp.where((bits & 0x7F) == 0x7F, jnp.nan, half.astype(jnp.float32) * 256.0)
