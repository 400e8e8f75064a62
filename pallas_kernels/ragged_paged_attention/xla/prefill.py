"""Many queries over the pages of one row, in plain XLA: tiles of prefill rows, or of rows that share first pages.

                 pages of the row ─▶
tile of queries  ■ ■ ■ ■ ◧            one tile of pages per iteration: k [K, S, H], v [K, S, H]
  [K, M, H]      ■ seen by all        M = G × tile_q queries of one KV head in one product
                 ◧ causal edge        iterations from the window's start to the last query's page
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..interface import AttentionMetadata
from ..tile_plan import PlanSections
from .pages import XlaPages, as_float32
from .softmax import Softmax


@dataclass(frozen=True)
class PrefillTiles:
    """Attention of a tile of queries, `pages_per_tile` pages of its row per iteration."""

    pages: XlaPages
    pages_per_tile: int

    def attend(
        self,
        q: Float[Array, "K M H"],
        table: Int[Array, " P"],
        positions: Int[Array, " M"],
        end: Int[Array, ""],
        state: Softmax,
    ) -> Softmax:
        """Attend queries at `positions`, the smallest of which comes first, to the first `end` tokens of a row."""
        tile_kv, window = self.pages_per_tile * self.pages.page_size, self.pages.options.window
        table = jnp.pad(table, (0, -table.shape[0] % self.pages_per_tile)) + self.pages.first_page
        q *= self.pages.options.scale
        first_key = jnp.int32(0) if window is None else jnp.maximum(positions[0] - window + 1, 0)

        def see_tile(tile: Array, state: Softmax) -> Softmax:
            pages = lax.dynamic_slice_in_dim(table, tile * self.pages_per_tile, self.pages_per_tile)
            k, v = _joined(self.pages.keys[pages]), _joined(self.pages.values[pages])
            keys = tile * tile_kv + jnp.arange(tile_kv)
            # Slots that no query of the tile sees: past the row's end, or in pages that the window has left.
            is_alive = (keys < end) & (keys >= first_key)
            is_seen = (keys[None] <= positions[:, None]) & is_alive[None]
            if window is not None:
                is_seen &= keys[None] > positions[:, None] - window
            scores = jnp.where(is_seen[None], self.pages.scores(q, k), -jnp.inf)
            # An unwritten slot may hold NaN, and 0 × NaN is NaN: its value is replaced, not only its weight.
            v = jnp.where(is_alive[None, :, None], v, 0.0)
            return state.add(
                scores[None],
                lambda weights: jnp.einsum("kms,ksh->kmh", weights[0], v, preferred_element_type=jnp.float32)[None],
            )

        return lax.fori_loop(first_key // tile_kv, (end + tile_kv - 1) // tile_kv, see_tile, state)


def _joined(pages: Float[Array, "p K Z H"]) -> Float[Array, "K S H"]:
    """Concatenate keys or values of some pages along their slots, in float32."""
    num_pages, num_kv_heads, page_size, head_size = pages.shape
    side_by_side = jnp.moveaxis(pages, 0, 1).reshape(num_kv_heads, num_pages * page_size, head_size)
    return as_float32(side_by_side)


def prefill(
    tiles: PrefillTiles,
    q: Float[Array, "T K G H"],
    out: Float[Array, "T2 K G H"],
    tables: Int[Array, "R P"],
    plan: PlanSections,
    step: AttentionMetadata,
    sinks: Float[Array, "K G"] | None,
    tile_q: int,
) -> Float[Array, "T2 K G H"]:
    """Return `out` with the attention of the plan's query tiles.

    T2 is at least T + tile_q, so that the last tile's write fits. Tiles are in token order, and only padding
    follows them: what a short tile computes past its row's end is overwritten by the next.
    """
    group = q.shape[2]
    padded_q = jnp.pad(q, ((0, tile_q), (0, 0), (0, 0), (0, 0)))
    rows, starts, lens = plan.query_tiles
    # `context_lens` counts this step's queries, so a row's last query stands at the context's last position.
    first_positions = step.context_lens[rows] - step.query_starts[rows + 1] + starts
    ends = first_positions + lens
    positions = jnp.minimum(first_positions[:, None] + jnp.arange(tile_q)[None, :], ends[:, None] - 1)

    def attend_tile(index: Array, out: Array) -> Array:
        queries = lax.dynamic_slice_in_dim(padded_q, starts[index], tile_q)
        state = Softmax.start(by_head(queries)[None], None if sinks is None else jnp.repeat(sinks, tile_q, axis=1))
        state = tiles.attend(
            by_head(queries), tables[rows[index]], jnp.tile(positions[index], group), ends[index], state
        )
        return lax.dynamic_update_slice_in_dim(out, by_row(state.result()[0], group), starts[index], 0)

    return lax.fori_loop(0, plan.num_query_tiles[0], attend_tile, out)


def by_head(x: Float[Array, "t K G *rest"]) -> Float[Array, "K M *rest"]:
    """Put all queries of a KV head side by side: M = G × t."""
    return jnp.moveaxis(x, 0, 2).reshape(x.shape[1], -1, *x.shape[3:])


def by_row(x: Float[Array, "K M *rest"], group: int) -> Float[Array, "t K G *rest"]:
    """Undo `by_head`."""
    return jnp.moveaxis(x.reshape(x.shape[0], group, -1, *x.shape[2:]), 2, 0)
