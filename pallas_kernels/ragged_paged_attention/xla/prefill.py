"""Many queries over the pages of one row, in plain XLA: tiles of a prefill row, or of rows that share first pages.

                 pages of the row ─▶
tile of queries  ■ ■ ■ ■ ◧            one tile of pages per iteration: k [K, S, H], v [K, S, H]
  [K, M, H]      ■ visible to all     M = G × tile_q queries of one KV head in one product
                 ◧ causal edge        iterations from the window's start to the last query's page
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..interface import AttentionMetadata
from ..tile_plan import PlanSections
from .pages import XlaPages, as_float32
from .softmax import Softmax


class QueryTile(NamedTuple):
    """M queries per KV head that attend to the pages of one row together."""

    queries: Float[Array, "K M H"]
    table: Int[Array, " P"]
    """The page table that names the row's pages."""
    positions: Int[Array, " M"]
    """Position of each query in its row; the smallest comes first."""
    end: Int[Array, ""]
    """Position after the last key that any of the queries attends to."""


@dataclass(frozen=True)
class PrefillTiles:
    """Attention of tiles of queries, `pages_per_tile` pages of a tile's row per iteration."""

    pages: XlaPages
    pages_per_tile: int

    @property
    def tile_kv(self) -> int:
        """Keys of a tile of pages."""
        return self.pages_per_tile * self.pages.page_size

    def first_key(self, first_position: Int[Array, " *tiles"]) -> Int[Array, " *tiles"]:
        """Return the first key position that a tile of queries attends to; its first query is at `first_position`."""
        window = self.pages.options.window
        return jnp.zeros_like(first_position) if window is None else jnp.maximum(first_position - window + 1, 0)

    def attend(self, tile: QueryTile, state: Softmax) -> Softmax:
        """Return the softmax state of a tile's queries, [1, K, M], after all keys that they attend to.

        A tile is M queries of one row (sequence) for each of K KV heads. `state` is theirs before any of these keys.
        `tile.queries` are not scaled yet, and `tile.table` holds page numbers within the layer. The loop goes over KV
        tiles of `tile_kv` keys, from the one with the first key of the first query's window (key 0 without a window) to
        the one with the last key before `tile.end`.
        """
        first_kv_tile = self.first_key(tile.positions[0]) // self.tile_kv
        end_kv_tile = (tile.end + self.tile_kv - 1) // self.tile_kv
        queries = tile.queries * self.pages.options.scale
        scaled_tile = tile._replace(queries=queries, table=self.page_indices(tile.table))
        return lax.fori_loop(first_kv_tile, end_kv_tile, partial(self.attend_kv_tile, scaled_tile), state)

    def page_indices(self, tables: Int[Array, "*rows P"]) -> Int[Array, "*rows P2"]:
        """Return page tables of the layer as indices among the pages of all layers, padded to whole tiles of pages."""
        padding = [(0, 0)] * (tables.ndim - 1) + [(0, -tables.shape[-1] % self.pages_per_tile)]
        return jnp.pad(tables, padding) + self.pages.first_page

    def attend_kv_tile(self, tile: QueryTile, kv_tile_index: Int[Array, ""], state: Softmax) -> Softmax:
        """Return the softmax state after one more KV tile of the row: one step of the online softmax.

        The KV tile is entries kv_tile_index × pages_per_tile … of `tile.table`, which `page_indices` has made: indices
        among the pages of all layers, padded to whole KV tiles, so that the slice is never clamped. `tile.queries` [K,
        M, H] are scaled already. A query attends to keys up to its own position, and within the window if any. If it
        attends to none of this tile, its state stays as it is. `state` has a leading axis of one row, which `[None]`
        below adds to the scores and the weighted values.
        """
        window, first_key, positions = self.pages.options.window, self.first_key(tile.positions[0]), tile.positions
        pages = lax.dynamic_slice_in_dim(tile.table, kv_tile_index * self.pages_per_tile, self.pages_per_tile)
        # [K, S, H] in float32, for the S = `tile_kv` keys of the KV tile.
        k, v = _joined(self.pages.keys[pages]), _joined(self.pages.values[pages])
        key_positions = kv_tile_index * self.tile_kv + jnp.arange(self.tile_kv)
        # Keys from `tile.end` on, or before every query's window, are visible to no query of the query tile.
        is_visible_to_any = (key_positions < tile.end) & (key_positions >= first_key)
        is_visible = (key_positions[None] <= positions[:, None]) & is_visible_to_any[None]
        if window is not None:
            is_visible &= key_positions[None] > positions[:, None] - window
        scores = jnp.where(is_visible[None], self.pages.scores(tile.queries, k), -jnp.inf)
        # An unwritten slot may hold NaN, and 0 × NaN is NaN: its value is replaced, not only its weight.
        v = jnp.where(is_visible_to_any[None, :, None], v, 0.0)
        weigh_values = partial(jnp.einsum, "kms,ksh->kmh", preferred_element_type=jnp.float32)
        return state.add(scores[None], lambda weights: weigh_values(weights[0], v)[None])


def _joined(pages: Float[Array, "p K Z H"]) -> Float[Array, "K S H"]:
    """Return keys or values of p pages side by side along their slots, S = p × Z, in float32."""
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
    *,
    in_one_loop: bool,
) -> Float[Array, "T2 K G H"]:
    """Return `out` with the attention of the plan's query tiles, by flash attention: an online softmax over KV tiles.

    A query tile is up to `tile_q` consecutive tokens of one prefill row, and a KV tile is some pages of that row.
    Each query tile computes and writes `tile_q` outputs. Tiles are in token order, so what a short tile writes after
    its last token is overwritten by the next tile, or lies in padding: T2 is at least T + tile_q. `q` is not
    scaled yet. `sinks` are the logits of one attention sink per query head. `in_one_loop` runs one loop over all
    KV tiles of all query tiles, instead of a loop over query tiles that contains one over KV tiles; a GPU's host
    waits in each iteration of a loop to read its condition. Letters: T tokens of the step, G query heads for each of K
    KV heads, H head size, R rows, P entries of a page table.
    """
    group_size = q.shape[2]
    # A slice of `tile_q` tokens from any first token then lies within the array and is never clamped.
    padded_q = jnp.pad(q, ((0, tile_q), (0, 0), (0, 0), (0, 0)))
    tile_rows, first_tokens, lens = plan.query_tiles
    # `context_lens` counts this step's queries, so a row's last query stands at the context's last position.
    first_positions = step.context_lens[tile_rows] - step.query_starts[tile_rows + 1] + first_tokens
    end_positions = first_positions + lens
    # Queries after a short tile's last one get its position; their outputs are overwritten or lie in padding.
    positions = jnp.minimum(first_positions[:, None] + jnp.arange(tile_q)[None, :], end_positions[:, None] - 1)

    def query_tile(index: Array) -> QueryTile:
        """Return query tile `index` of the plan, `tile_q` tokens; of a short tile the last ones mean nothing.

        Its queries are [K, M, H], M = G × `tile_q`, head after head, so the tokens' positions are repeated G times.
        """
        queries = by_head(lax.dynamic_slice_in_dim(padded_q, first_tokens[index], tile_q))
        table, query_positions = tables[tile_rows[index]], jnp.tile(positions[index], group_size)
        return QueryTile(queries, table, query_positions, end_positions[index])

    def start_state(queries: Array) -> Softmax:
        return Softmax.start(queries[None], None if sinks is None else jnp.repeat(sinks, tile_q, axis=1))

    def store_outputs(index: Array, state: Softmax, out: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(out, by_row(state.result()[0], group_size), first_tokens[index], 0)

    def attend_query_tile(index: Array, out: Array) -> Array:
        tile = query_tile(index)
        return store_outputs(index, tiles.attend(tile, start_state(tile.queries)), out)

    if not in_one_loop:
        return lax.fori_loop(0, plan.num_query_tiles[0], attend_query_tile, out)

    # With 3 and 2 KV tiles, `iteration_ends` is [3, 5], and iteration 3 is KV tile 3 − 5 + 2 = 0 of query tile 1.
    padded_q, tables = padded_q * tiles.pages.options.scale, tiles.page_indices(tables)
    first_kv_tiles = tiles.first_key(first_positions) // tiles.tile_kv
    num_kv_tiles = (end_positions + tiles.tile_kv - 1) // tiles.tile_kv - first_kv_tiles
    iteration_ends = jnp.cumsum(jnp.where(jnp.arange(len(num_kv_tiles)) < plan.num_query_tiles[0], num_kv_tiles, 0))

    def attend_kv_tile(iteration: Array, carry: tuple[Softmax, Array]) -> tuple[Softmax, Array]:
        """Return the softmax state and the outputs after one KV tile of one query tile.

        `iteration` counts the KV tiles of all query tiles. `index` is the query tile, and `kv_tile` counts its KV tiles
        from 0; at 0 the state of the query tile before is replaced by a new one. Every iteration stores the outputs so
        far; those of the query tile's last iteration remain.
        """
        state, out = carry
        index = jnp.sum(iteration_ends <= iteration, dtype=jnp.int32)
        kv_tile = iteration - iteration_ends[index] + num_kv_tiles[index]
        tile = query_tile(index)
        state = jax.tree.map(lambda new, old: jnp.where(kv_tile == 0, new, old), start_state(tile.queries), state)
        state = tiles.attend_kv_tile(tile, first_kv_tiles[index] + kv_tile, state)
        return state, store_outputs(index, state, out)

    empty_state = start_state(by_head(padded_q[:tile_q]))
    return lax.fori_loop(0, iteration_ends[-1], attend_kv_tile, (empty_state, out))[1]


def by_head(x: Float[Array, "t K G *rest"]) -> Float[Array, "K M *rest"]:
    """Return t tokens' queries side by side for each KV head, M = G × t: query g × t + i is query head g of token i."""
    return jnp.moveaxis(x, 0, 2).reshape(x.shape[1], -1, *x.shape[3:])


def by_row(x: Float[Array, "K M *rest"], group_size: int) -> Float[Array, "t K G *rest"]:
    """Return queries [K, G × t] in the order of tokens, [t, K, G]: the inverse of `by_head`. `group_size` is G."""
    return jnp.moveaxis(x.reshape(x.shape[0], group_size, -1, *x.shape[2:]), 2, 0)
