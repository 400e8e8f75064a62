"""Decode rows that begin with the same pages attend to these together: one read of the pages, one product for all.

`tile_plan` decides on the host which rows share. Rounding depends on how many rows share, so a row's bits depend on the
other rows of its step. A deterministic start therefore leaves sharing off.

Source: Ye et al. 2025, arXiv:2501.01005 (merging attention states).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..tile_plan import PlanSections
from .prefill import PrefillTiles, QueryTile, by_head, by_row
from .softmax import Softmax


def attend_shared(
    tiles: PrefillTiles,
    q: Float[Array, "R K G H"],
    tables: Int[Array, "R P"],
    plan: PlanSections,
    tile_rows: int,
    state: Softmax,
) -> Softmax:
    """Return the rows' softmax states after the rows of each shared tile have attended to the pages that they share.

    Cascade attention: the queries of a tile's rows, at most `tile_rows`, stand side by side as if they were queries of
    one row, so that the shared pages are read once. A row is a sequence with one query, of G heads for each of K KV
    heads. `state` holds a state of each of the R rows, and rows in no tile keep theirs. Column i of `plan.shared_tiles`
    holds the index of tile i's first member in `plan.members`, its number of members and its number of shared pages.
    Every tile computes `tile_rows` rows: one with fewer members also computes the rows that follow in `plan.members`,
    and drops the results.
    """
    page_size, (num_rows, _, group_size, _) = tiles.pages.page_size, q.shape
    # Without padding, `dynamic_slice` would move the last tile's slice back to fit into the array.
    padded_members = jnp.pad(plan.members, (0, tile_rows))

    def attend_tile(index: Array, state: Softmax) -> Softmax:
        """Return the states of all R rows after the members of shared tile `index` have attended to their shared pages.

        The tile computes `tile_rows` rows [1, K, G × tile_rows] as queries of its first member, whose page table begins
        with the shared pages. Rows after its last member are computed, too, but get the target R, one past the last
        row, so the scatter drops their results.
        """
        first_member, num_members, num_pages = plan.shared_tiles[:, index]
        members = lax.dynamic_slice_in_dim(padded_members, first_member, tile_rows)
        old_state = jax.tree.map(lambda x: by_head(x[members])[None], state)
        end_position = num_pages * page_size
        # Every query's position is past the shared pages, so no causal mask is needed.
        positions = jnp.full((group_size * tile_rows,), end_position)
        tile = QueryTile(by_head(q[members]), tables[members[0]], positions, end_position)
        new_state = tiles.attend(tile, old_state)
        target_rows = jnp.where(jnp.arange(tile_rows) < num_members, members, num_rows)
        return jax.tree.map(
            lambda old, new: old.at[target_rows].set(by_row(new[0], group_size), mode="drop"), state, new_state
        )

    return lax.fori_loop(0, plan.num_shared_tiles[0], attend_tile, state)
