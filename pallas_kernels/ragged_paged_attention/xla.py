"""Ragged paged attention in plain XLA: loops over pages with an online softmax, on any platform.

    decode rows (one query each)              prefill rows
    tile of rows ── loop over pages           tile of queries of one row ── loop over pages
      k [r, K, H, S]  q [r, K, G, H]            k [K, H, S]  q [K, G × tile, H]
      m, l, acc carried, one division at the end

Trip counts are dynamic: a step costs what its rows' contexts need, not what the bucket could hold. Keys
are stored transposed, [page, K, H, Z], values [page, K, Z, H], so that both products run over the page
without a transpose (0.27 ms against 0.36 ms for 16 rows × 200 tokens on a CPU).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from .interface import AttentionMetadata, KVLayout, LayerPlace, PagedCache, refuse_one_of
from .kv_scales import LayerScales

LEAST_MAX = -1e30
"""Where the running maximum starts: finite, so that masked scores, −inf, give weight 0 and not NaN."""
PLAN_HEADER = 1


@dataclass(frozen=True)
class XlaLayout(KVLayout):
    """Keys [L × C, K, H, Z], values [L × C, K, Z, H]."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the keys and of the values."""
        pages, heads = self.num_layers * self.num_pages, self.num_kv_heads
        return (pages, heads, self.head_size, self.page_size), (pages, heads, self.page_size, self.head_size)

    @property
    def logical_axes(self) -> tuple[tuple[str | None, ...], ...]:
        """KV heads are the only axis that may be spread."""
        return (None, "kv_heads", None, None), (None, "kv_heads", None, None)


@dataclass(frozen=True)
class XlaBackend:
    """Attention by loops over pages. `tile_rows`, `tile_q` and `tile_kv` count rows, queries and key positions."""

    tile_rows: int = 8
    tile_q: int = 64
    tile_kv: int = 64
    platform: str = "cpu"

    name = "xla"

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        """KV cache dtypes taken: a bf16 scatter on the CPU copies the whole cache, even donated."""
        return ("float32",) if self.platform == "cpu" else ("float32", "bfloat16")

    def layout(
        self, *, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_size: int, dtype: Any
    ) -> XlaLayout:
        """Layout of a cache of that many pages; ValueError names a dtype that is not taken."""
        if np.dtype(dtype).name not in self.kv_dtypes:
            raise ValueError(
                f"kv_cache_dtype: got {np.dtype(dtype).name}, the xla backend on {self.platform} takes "
                f"{' or '.join(self.kv_dtypes)}; use kv_cache_dtype=auto"
            )
        return XlaLayout(num_layers, num_pages, page_size, num_kv_heads, head_size, np.dtype(dtype))

    def plan_len(self, num_tokens: int, num_rows: int) -> int:
        """One count and three values per query tile; each prefill row may end in a partial tile."""
        return PLAN_HEADER + 3 * self._max_tiles(num_tokens, num_rows)

    def plan(
        self,
        query_lens: np.ndarray,
        context_lens: np.ndarray,
        num_decode_rows: int,
        num_tokens: int,
        out: np.ndarray,
    ) -> None:
        """Cut the prefill rows into query tiles, in token order: (row, first token, number of queries)."""
        max_tiles = (len(out) - PLAN_HEADER) // 3
        rows, starts, lens = out[PLAN_HEADER:].reshape(3, max_tiles)
        num_tiles, start = 0, num_decode_rows
        for row in range(num_decode_rows, len(query_lens)):
            end = start + int(query_lens[row])
            for tile in range(start, end, self.tile_q):
                rows[num_tiles], starts[num_tiles], lens[num_tiles] = row, tile, min(self.tile_q, end - tile)
                num_tiles += 1
            start = end
        out[0] = num_tiles

    def attend(
        self,
        cache: PagedCache,
        place: LayerPlace,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"] | None,
        v: Float[Array, "T K H"] | None,
        step: AttentionMetadata,
        *,
        kv_scales: LayerScales | None,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: Float[Array, " N"] | None,
    ) -> tuple[Float[Array, "T N H"], tuple[Array, ...]]:
        """See `PagedCache.attend`. `kv_scales` is None: `layout` refuses pages that need them."""
        refuse_one_of(k, v)
        # One function for all layers, with the layer's place as data: it is traced once and not once a layer.
        return _attend_layer(
            cache.pages,
            jnp.int32(place.index * cache.layout.num_pages),
            q,
            k,
            v,
            step.slots[place.group],
            step.page_tables[place.group],
            step,
            sinks,
            backend=self,
            layout=cache.layout,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
        )

    def pages_per_tile(self, layout: KVLayout) -> int:
        """Pages that one turn of the loop reads."""
        return max(1, self.tile_kv // layout.page_size)

    def _max_tiles(self, num_tokens: int, num_rows: int) -> int:
        return num_tokens // self.tile_q + num_rows

    def decode(self, layer: _Layer, q: Float[Array, "T K G H"], step: AttentionMetadata) -> Float[Array, "T2 K G H"]:
        """Rows with one query, `tile_rows` at a time: their keys in one batched product. Other tokens get zeros.

        T2 leaves room for what the last query tile of `prefill` computes past the end.
        """
        num_rows = step.context_lens.shape[0]
        tile = min(self.tile_rows, num_rows)
        num_padded = num_rows + -num_rows % tile
        lens = jnp.where(jnp.arange(num_rows) < step.num_decode_rows, step.context_lens, 0)
        lens = jnp.pad(lens, (0, num_padded - num_rows))
        tables = jnp.pad(layer.tables, ((0, num_padded - num_rows), (0, 0)))
        q_RKGqH = jnp.pad(q[:num_rows], ((0, num_padded - num_rows), (0, 0), (0, 0), (0, 0)))[:, :, :, None]
        room = max(num_padded, q.shape[0] + min(self.tile_q, q.shape[0]))
        out = jnp.zeros((room, *q.shape[1:]), jnp.float32)
        if num_padded == tile:  # One tile, that may find nothing to do.
            tile_out = layer.attend(q_RKGqH, tables, lens, lens[:, None] - 1)
            return lax.dynamic_update_slice_in_dim(out, tile_out[:, :, :, 0], 0, 0)

        def attend_tile(index: Array, out: Array) -> Array:
            start = index * tile
            queries, tile_tables, tile_lens = (
                lax.dynamic_slice_in_dim(x, start, tile) for x in (q_RKGqH, tables, lens)
            )
            tile_out = layer.attend(queries, tile_tables, tile_lens, tile_lens[:, None] - 1)
            return lax.dynamic_update_slice_in_dim(out, tile_out[:, :, :, 0], start, 0)

        return lax.fori_loop(0, (step.num_decode_rows + tile - 1) // tile, attend_tile, out)

    def prefill(
        self, layer: _Layer, q: Float[Array, "T K G H"], out: Float[Array, "T2 K G H"], step: AttentionMetadata
    ) -> Float[Array, "T2 K G H"]:
        """Rows with many queries, a tile of them at a time.

        Tiles run in token order, so what a short tile computes past its row's end is overwritten by the next.
        """
        tile_q = min(self.tile_q, q.shape[0])
        q_TKGH = jnp.pad(q, ((0, tile_q), (0, 0), (0, 0), (0, 0)))
        rows, starts, lens = step.plan[PLAN_HEADER:].reshape(3, -1)
        # The context ends where the row's last query stands.
        first_positions = step.context_lens[rows] - step.query_starts[rows + 1] + starts
        ends = first_positions + lens
        positions = jnp.minimum(first_positions[:, None] + jnp.arange(tile_q)[None, :], ends[:, None] - 1)

        def attend_tile(index: Array, out: Array) -> Array:
            start = starts[index]
            # [tile, K, G, H] → [1, K, G, tile, H]
            queries = jnp.moveaxis(lax.dynamic_slice_in_dim(q_TKGH, start, tile_q), 0, 2)[None]
            table = lax.dynamic_slice_in_dim(layer.tables, rows[index], 1)
            tile_out = layer.attend(queries, table, ends[index][None], positions[index][None])
            return lax.dynamic_update_slice_in_dim(out, jnp.moveaxis(tile_out[0], 2, 0), start, 0)

        return lax.fori_loop(0, step.plan[0], attend_tile, out)


@partial(jax.jit, static_argnames=("backend", "layout", "scale", "window", "soft_cap"))
def _attend_layer(
    kv_pages: tuple[Array, ...],
    first_page: Int[Array, ""],
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"] | None,
    v: Float[Array, "T K H"] | None,
    slots: Int[Array, " T"],
    tables: Int[Array, "R P"],
    step: AttentionMetadata,
    sinks: Float[Array, " N"] | None,
    *,
    backend: XlaBackend,
    layout: KVLayout,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[Float[Array, "T N H"], tuple[Array, ...]]:
    """Write and attend in the layer whose pages begin at `first_page`."""
    k_pages, v_pages = kv_pages
    if k is not None and v is not None:
        page_size = jnp.int32(layout.page_size)
        pages, offsets = first_page + lax.div(slots, page_size), lax.rem(slots, page_size)
        k_pages = k_pages.at[pages, :, :, offsets].set(k.astype(k_pages.dtype))
        v_pages = v_pages.at[pages, :, offsets, :].set(v.astype(v_pages.dtype))
    num_tokens, num_heads, head_size = q.shape
    grouped = (layout.num_kv_heads, num_heads // layout.num_kv_heads)
    pages_per_tile = backend.pages_per_tile(layout)
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % pages_per_tile)))
    layer = _Layer(
        k_pages=k_pages,
        v_pages=v_pages,
        # Added here and not within the loops: there it takes a third more time to compile.
        tables=tables + first_page,
        pages_per_tile=pages_per_tile,
        window=window,
        soft_cap=soft_cap,
        sinks=None if sinks is None else sinks.astype(jnp.float32).reshape(grouped),
    )
    q_TKGH = (q.astype(jnp.float32) * scale).reshape(num_tokens, *grouped, head_size)
    out = backend.decode(layer, q_TKGH, step)
    if num_tokens > 1:  # A step of one token has no prefill row.
        out = backend.prefill(layer, q_TKGH, out, step)
    return out[:num_tokens].reshape(q.shape).astype(q.dtype), (k_pages, v_pages)


@dataclass(frozen=True)
class _Layer:
    """What every tile of one layer's attention reads."""

    k_pages: Array
    v_pages: Array
    tables: Int[Array, "R P"]
    pages_per_tile: int
    window: int | None
    soft_cap: float | None
    sinks: Float[Array, "K G"] | None

    def attend(
        self,
        q: Float[Array, "r K G q H"],
        tables: Int[Array, "r P"],
        lens: Int[Array, " r"],
        positions: Int[Array, "r q"],
    ) -> Float[Array, "r K G q H"]:
        """Attend queries at `positions` to the first `lens` tokens of their rows, one tile of pages at a time."""
        page_size = self.v_pages.shape[2]
        tile_kv = self.pages_per_tile * page_size
        state_shape = (*q.shape[:4], 1)
        if self.sinks is None:
            running_max = jnp.full(state_shape, LEAST_MAX, jnp.float32)
            running_sum = jnp.zeros(state_shape, jnp.float32)
        else:
            running_max = jnp.broadcast_to(self.sinks[None, :, :, None, None], state_shape)
            running_sum = jnp.ones(state_shape, jnp.float32)
        num_tiles = (jnp.max(lens) + tile_kv - 1) // tile_kv
        first_tile = jnp.int32(0)
        if self.window is not None:
            oldest = jnp.min(jnp.where(lens > 0, positions[:, 0] - self.window + 1, jnp.iinfo(jnp.int32).max))
            first_tile = jnp.minimum(jnp.maximum(oldest, 0) // tile_kv, num_tiles)

        def attend_pages(tile: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            running_max, running_sum, acc = state
            pages = lax.dynamic_slice_in_dim(tables, tile * self.pages_per_tile, self.pages_per_tile, 1)
            k, v = self._tile(pages)
            scores = jnp.einsum("rkgqh,rkhs->rkgqs", q, k, preferred_element_type=jnp.float32)
            if self.soft_cap is not None:
                scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
            keys = tile * tile_kv + jnp.arange(tile_kv)
            # Slots that no query of the tile sees: past the row's end, or in pages that the window has left.
            alive = keys[None, :] < lens[:, None]
            seen = keys[None, None, :] <= positions[:, :, None]
            if self.window is not None:
                alive &= keys[None, :] > positions[:, :1] - self.window
                seen &= keys[None, None, :] > positions[:, :, None] - self.window
            scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
            new_max = jnp.maximum(running_max, jnp.max(scores, axis=-1, keepdims=True))
            weights = jnp.exp(scores - new_max)
            decay = jnp.exp(running_max - new_max)
            # A dead slot may hold NaN, and 0 × NaN is NaN: its value is replaced, not only its weight.
            v = jnp.where(alive[:, None, :, None], v, 0.0)
            values = jnp.einsum("rkgqs,rksh->rkgqh", weights, v, preferred_element_type=jnp.float32)
            running_sum = running_sum * decay + jnp.sum(weights, axis=-1, keepdims=True)
            return new_max, running_sum, acc * decay + values

        state = (running_max, running_sum, jnp.zeros(q.shape, jnp.float32))
        _, running_sum, acc = lax.fori_loop(first_tile, num_tiles, attend_pages, state)
        return acc / jnp.where(running_sum == 0.0, 1.0, running_sum)

    def _tile(self, pages: Int[Array, "r p"]) -> tuple[Float[Array, "r K H S"], Float[Array, "r K S H"]]:
        """Keys and values of some pages of each row, in order of position."""
        if self.pages_per_tile == 1:
            k, v = self.k_pages[pages[:, 0]], self.v_pages[pages[:, 0]]
        else:
            k, v = jnp.moveaxis(self.k_pages[pages], 1, 3), jnp.moveaxis(self.v_pages[pages], 1, 2)
            k, v = k.reshape(*k.shape[:3], -1), v.reshape(*v.shape[:2], -1, v.shape[4])
        return k.astype(jnp.float32), v.astype(jnp.float32)
