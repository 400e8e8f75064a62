"""Products of the GPU kernels by `mma` instructions: operands in registers, on Ampere and every later chip.

    tile of 16 or 32 rows   16 rows to a warp, the warps that are left share the columns     decode: few queries
    tile of 64 rows         each of the four warps has 16 rows and all columns               prefill

Operands are loaded from shared memory a part at a time, so that they take no more registers than one product needs.
Letters: M rows of a query tile · T keys of a KV tile · H head size.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .memory_ops import COMPUTE_DTYPE, Chip, Ref, plgpu, smem_tile

NUM_WARPS = 4
Q_LANES = 64
"""Lanes of queries and keys that one product takes."""
KEYS = 16
"""Keys of weights and values that one product takes."""


def acc_layout(tile_rows: int) -> Any:
    """Return the register layout of results [M, …]; `.reduce(1)` of it is the layout of one number per row."""
    return plgpu.Layout.MMA_ACC(COMPUTE_DTYPE, m_warps=_warps_along_rows(tile_rows))


def weights_smem(tile_rows: int, tile_kv: int, chip: Chip) -> Any:
    """Return the type of the shared memory for the softmax weights [M, T] of one KV tile."""
    return smem_tile((tile_rows, tile_kv), COMPUTE_DTYPE, chip, lanes=KEYS)


def scores(q_tile: Ref, k_tile: Ref, chip: Chip) -> jax.Array:
    """Return the raw scores Q · Kᵀ, [M, T] in float32, of M query rows and T keys, neither scaled nor masked.

    Both tiles lie in shared memory, [M, H] and [T, H]. One product takes `Q_LANES` = 64 of the H lanes, the last
    product the rest, so that operands take few registers: at head size 80 two products take 64 and 16 lanes.
    """
    tile_rows, head_size = q_tile.shape
    acc = plgpu.layout_cast(jnp.zeros((tile_rows, k_tile.shape[0]), jnp.float32), acc_layout(tile_rows))
    for first_lane in range(0, head_size, Q_LANES):
        lanes = slice(first_lane, min(first_lane + Q_LANES, head_size))
        acc = _multiply_add(acc, q_tile.at[:, lanes], k_tile.at[:, lanes].T, chip)
    return acc


def add_values(acc: jax.Array, weights: Ref, v_tile: Ref, chip: Chip) -> jax.Array:
    """Return acc + P · V, [M, H] in float32: weights P [M, T], values V [T, H], `KEYS` keys to a product."""
    for first_key in range(0, v_tile.shape[0], KEYS):
        keys = slice(first_key, first_key + KEYS)
        acc = _multiply_add(acc, weights.at[:, keys], v_tile.at[keys], chip)
    return acc


def _multiply_add(acc: jax.Array, a_ref: Ref, b_ref: Ref, chip: Chip) -> jax.Array:
    """Return acc + a · b in float32: a [M, X] and b [X, Y] are loaded from shared memory, acc [M, Y] is in registers.

    a and b are bfloat16, loaded into the register layouts that the instruction `mma` reads. When the kernel is
    interpreted, as in tests, `jnp.dot` takes the place of `mma`, which the interpreter does not have.
    """
    m_warps = _warps_along_rows(acc.shape[0])
    a = plgpu.load(a_ref, layout=plgpu.Layout.MMA_LHS(COMPUTE_DTYPE, m_warps=m_warps))
    b = plgpu.load(b_ref, layout=plgpu.Layout.MMA_RHS(COMPUTE_DTYPE, m_warps=m_warps))
    if chip.interpret is None:
        return plgpu.mma(acc, a, b)
    return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)


def _warps_along_rows(tile_rows: int) -> int:
    """Return how many of the four warps lie along the rows, 16 rows each; the rest share these rows' columns."""
    return min(NUM_WARPS, tile_rows // 16)
