"""Decode rows that begin with the same pages attend to these together: one read of the pages, one product for all.

Which rows share, `tile_plan` decides on the host. Rounding depends on how many rows share, so a row's bits depend on
the other rows of its step: a start that promises otherwise leaves sharing off.

Source: Ye et al. 2025, arXiv:2501.01005 (merging attention states).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..tile_plan import PlanSections
from .prefill import PrefillTiles, by_head, by_row
from .softmax import Softmax


def attend_shared(
    tiles: PrefillTiles,
    q: Float[Array, "R K G H"],
    tables: Int[Array, "R P"],
    plan: PlanSections,
    tile_rows: int,
    state: Softmax,
) -> Softmax:
    """Return the softmax state of all rows after each shared tile, of at most `tile_rows` rows, attended to its pages.

    What is computed for places beyond a tile's last row is dropped.
    """
    page_size, (num_rows, _, group, _) = tiles.pages.page_size, q.shape
    padded_members = jnp.pad(plan.members, (0, tile_rows))  # A slice of the last tile must not be moved to fit.

    def attend_tile(index: Array, state: Softmax) -> Softmax:
        start, count, num_pages = plan.shared_tiles[:, index]
        members = lax.dynamic_slice_in_dim(padded_members, start, tile_rows)
        before = jax.tree.map(lambda x: by_head(x[members])[None], state)
        end = num_pages * page_size
        # Every query's position is past the shared pages, so no causal mask is needed.
        positions = jnp.full((group * tile_rows,), end)
        after = tiles.attend(by_head(q[members]), tables[members[0]], positions, end, before)
        targets = jnp.where(jnp.arange(tile_rows) < count, members, num_rows)
        return jax.tree.map(lambda old, new: old.at[targets].set(by_row(new[0], group), mode="drop"), state, after)

    return lax.fori_loop(0, plan.num_shared_tiles[0], attend_tile, state)
