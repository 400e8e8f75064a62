"""Products of the GPU kernels by `mma`: operands in registers, 16 rows to a warp, on Ampere and all that came after.

    16 rows   every warp has all rows, and a quarter of the columns     decode: few queries
    64 rows   every warp has 16 rows, and all columns                   prefill

Tiles are read from shared memory a part at a time, so that no operand takes more registers than it must.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .gpu_tiles import COMPUTE_DTYPE, Chip, plgpu, tile_memory

WARPS = 4
LANES = 64
"""Of queries and keys in one product."""
KEYS = 16
"""Of weights and values in one product."""


def sums(tile_rows: int) -> Any:
    """Layout of results; `.reduce(1)` is that of one number a row."""
    return plgpu.Layout.MMA_ACC(COMPUTE_DTYPE, m_warps=_warps_on_rows(tile_rows))


def weights_memory(tile_rows: int, tile_kv: int, chip: Chip) -> Any:
    """Shared memory for the weights of one tile."""
    return tile_memory((tile_rows, tile_kv), COMPUTE_DTYPE, chip, lanes=KEYS)


def scores(q_tile: Any, k_tile: Any, chip: Chip) -> jax.Array:
    """Q · Kᵀ: [M, T]."""
    tile_rows, head_size = q_tile.shape
    acc = plgpu.layout_cast(jnp.zeros((tile_rows, k_tile.shape[0]), jnp.float32), sums(tile_rows))
    for lane in range(0, head_size, LANES):
        q, k = q_tile.at[:, lane : lane + LANES], k_tile.at[:, lane : lane + LANES].T
        acc = _multiply(acc, q, k, chip)
    return acc


def add_values(acc: jax.Array, weights: Any, v_tile: Any, chip: Chip) -> jax.Array:
    """acc + P · V: [M, H]."""
    for key in range(0, v_tile.shape[0], KEYS):
        acc = _multiply(acc, weights.at[:, key : key + KEYS], v_tile.at[key : key + KEYS], chip)
    return acc


def _multiply(acc: jax.Array, a_ref: Any, b_ref: Any, chip: Chip) -> jax.Array:
    """acc + a · b. The one thing that differs when interpreted: the interpreter knows no `mma`."""
    m_warps = _warps_on_rows(acc.shape[0])
    a = plgpu.load(a_ref, layout=plgpu.Layout.MMA_LHS(COMPUTE_DTYPE, m_warps=m_warps))
    b = plgpu.load(b_ref, layout=plgpu.Layout.MMA_RHS(COMPUTE_DTYPE, m_warps=m_warps))
    if chip.interpret is None:
        return plgpu.mma(acc, a, b)
    return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)


def _warps_on_rows(tile_rows: int) -> int:
    """Of the four warps, those that have rows of their own."""
    return min(WARPS, tile_rows // 16)
