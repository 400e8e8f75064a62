"""Products of the GPU kernels by Hopper's `wgmma` instructions: operands in shared memory, tiles of 64 rows.

    scores [64, T] = Q · Kᵀ      both operands as TMA has left them
    acc [64, H] += P · V         into registers of its own, then added: twice the registers of acc

This module computes prefill in place of `mma` with `GpuBackend(prefill="wgmma")`, which engines choose on a Hopper.
Shared memory that ordinary instructions have written (weights, converted pages, zeroed values) must be committed before
a product reads it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .memory_ops import COMPUTE_DTYPE, Chip, Ref, plgpu, smem_tile

TILE_ROWS = 64
HEAD_SIZES = (64, 128)
"""Head sizes whose rows are whole blocks of 128 bytes and whose results fit into the registers twice."""


def acc_layout(tile_rows: int) -> Any:
    """Return the register layout of results [64, …]; `.reduce(1)` of it is the layout of one number per row."""
    assert tile_rows == TILE_ROWS
    return plgpu.Layout.WGMMA


def weights_smem(tile_rows: int, tile_kv: int, chip: Chip) -> Any:
    """Return the type of the shared memory for the softmax weights [64, T] of one KV tile."""
    return smem_tile((tile_rows, tile_kv), COMPUTE_DTYPE, chip)


def scores(q_tile: Ref, k_tile: Ref, chip: Chip) -> jax.Array:
    """Return Q · Kᵀ, [64, T] in float32."""
    return _product(q_tile, k_tile.T)


def add_values(acc: jax.Array, weights: Ref, v_tile: Ref, chip: Chip) -> jax.Array:
    """Return acc + P · V, [64, H] in float32."""
    return acc + _product(weights, v_tile)


def _product(a_ref: Ref, b_ref: Ref) -> jax.Array:
    """Return a · b, [M, Y] in float32, for `a_ref` [M, X] and `b_ref` [X, Y] in shared memory.

    What ordinary instructions have written to shared memory is committed first, so that `wgmma` sees it. `wgmma` adds
    to an accumulator in registers, which starts at zero here. It is asynchronous: reading the accumulator waits for the
    product.
    """
    plgpu.commit_smem()

    def product(acc_ref: Ref) -> jax.Array:
        plgpu.wgmma(acc_ref, a_ref, b_ref)
        return acc_ref[...]

    return pl.run_scoped(product, plgpu.ACC((a_ref.shape[0], b_ref.shape[1]), jnp.float32))
