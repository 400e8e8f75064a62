"""Products of the GPU kernels by `wgmma`, a candidate for prefill on Hopper: operands in shared memory, 64 rows.

    scores [64, T] = Q · Kᵀ      both as TMA has left them
    acc [64, H] += P · V         into registers of their own, then added: as many again as the sums

What ordinary instructions have written, weights, converted pages and zeroed values, has to be committed before. Only
Hopper has the instruction. Not the default until a GPU has shown it to be faster than `mma`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .gpu_tiles import COMPUTE_DTYPE, Chip, plgpu, tile_memory

ROWS = 64
MOST_LANES = 128


def sums(tile_rows: int) -> Any:
    """Layout of results; `.reduce(1)` is that of one number a row."""
    assert tile_rows == ROWS
    return plgpu.Layout.WGMMA


def weights_memory(tile_rows: int, tile_kv: int, chip: Chip) -> Any:
    """Shared memory for the weights of one tile."""
    return tile_memory((tile_rows, tile_kv), COMPUTE_DTYPE, chip)


def scores(q_tile: Any, k_tile: Any, chip: Chip) -> jax.Array:
    """Q · Kᵀ: [64, T]."""
    return _product(q_tile, k_tile.T)


def add_values(acc: jax.Array, weights: Any, v_tile: Any, chip: Chip) -> jax.Array:
    """acc + P · V: [64, H]."""
    return acc + _product(weights, v_tile)


def _product(a_ref: Any, b_ref: Any) -> jax.Array:
    plgpu.commit_smem()

    def product(acc_ref: Any) -> jax.Array:
        plgpu.wgmma(acc_ref, a_ref, b_ref)
        result: jax.Array = acc_ref[...]
        return result

    found: jax.Array = pl.run_scoped(product, plgpu.ACC((a_ref.shape[0], b_ref.shape[1]), jnp.float32))
    return found
