"""Ragged paged attention on TPU: the layout of the pages, and the way of a step through the two kernels.

    tokens of a step:  │ decode rows, one token each │ prefill rows │ padding │
    keys and values:     the decode kernel puts them    scattered by XLA into the donated pages
                         into the page itself
    attention:           tpu_decode, row by row         tpu_prefill, tile by tile of aligned queries

Pages are [L × C, K, S, Z, 128]: see tpu_tiles. Nothing here asks which chip there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from .interface import AttentionMetadata, KVLayout, LayerPlace, PagedCache, refuse_one_of
from .tpu_decode import decode_attention
from .tpu_prefill import ALIGN, QueryTiles, prefill_attention
from .tpu_tiles import LANES, HeadLanes

HEAD_SIZES = (64, 80, 96, 128, 192, 256)
DTYPES = ("bfloat16", "float32")
PLAN_HEADER = 1
NOWHERE = 1 << 30
"""The place of a query that is not computed in tiles."""
TILE_BYTES = 2 << 20
"""Of keys and values of all heads in one tile: enough to hide the latency of a copy, and two fit beside the rest."""


@dataclass(frozen=True)
class TpuLayout(KVLayout):
    """Keys and values together: [L × C, K, S, Z, 128]."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of the one array."""
        pages, rows = self.num_layers * self.num_pages, HeadLanes(self.head_size).num_rows
        return ((pages, self.num_kv_heads, rows, self.page_size, LANES),)

    @property
    def logical_axes(self) -> tuple[tuple[str | None, ...], ...]:
        """KV heads are the only axis that may be spread."""
        return ((None, "kv_heads", None, None, None),)


@dataclass(frozen=True)
class TpuBackend:
    """Attention by Pallas kernels for TPU. `tile_q` counts queries, `tile_kv` keys; None: what fits the shape.

    `interpret` runs the kernels anywhere, step by step: `pltpu.InterpretParams`, for tests.
    """

    tile_q: int = 128
    tile_kv: int | None = None
    interpret: Any = False

    name = "pallas-tpu"

    def layout(
        self, *, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_size: int, dtype: Any
    ) -> TpuLayout:
        """Layout of a cache of that many pages; ValueError names what these kernels cannot take."""
        for name, got, allowed, way_out in (
            ("kv_cache_dtype", np.dtype(dtype).name, DTYPES, "use kv_cache_dtype=auto"),
            ("head_size", head_size, HEAD_SIZES, "use --attention-backend xla"),
        ):
            if got not in allowed:
                raise ValueError(
                    f"{name}: got {got}, the pallas-tpu backend takes {', '.join(map(str, allowed))}; {way_out}"
                )
        if page_size % ALIGN:
            raise ValueError(
                f"block_size: got {page_size}, the pallas-tpu backend takes multiples of {ALIGN}; leave it out or "
                "use --attention-backend xla"
            )
        return TpuLayout(num_layers, num_pages, page_size, num_kv_heads, head_size, np.dtype(dtype))

    def plan_len(self, num_tokens: int, num_rows: int) -> int:
        """One count and four values per tile of queries; each prefill row may end in a partial tile."""
        return PLAN_HEADER + 4 * (num_tokens // self.tile_q + num_rows)

    def plan(
        self,
        query_lens: np.ndarray,
        context_lens: np.ndarray,
        num_decode_rows: int,
        page_tables: np.ndarray,
        table_rows: np.ndarray,
        *,
        page_size: int,
        num_tokens: int,
        num_rows: int,
        out: np.ndarray,
    ) -> None:
        """Cut the prefill rows into tiles, in token order: (row, aligned place, first position, number of queries)."""
        rows, places, positions, lens = out[PLAN_HEADER:].reshape(4, -1)
        num_tiles = place = 0
        for row in range(num_decode_rows, len(query_lens)):
            num_queries, start = int(query_lens[row]), int(context_lens[row] - query_lens[row])
            for offset in range(0, num_queries, self.tile_q):
                rows[num_tiles], places[num_tiles], positions[num_tiles] = row, place + offset, start + offset
                lens[num_tiles] = min(self.tile_q, num_queries - offset)
                num_tiles += 1
            place += _aligned(num_queries)
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
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: Float[Array, " N"] | None,
    ) -> tuple[Float[Array, "T N H"], tuple[Array, ...]]:
        """See `PagedCache.attend`."""
        refuse_one_of(k, v)
        layout, (pages,) = cache.layout, cache.pages
        lanes = HeadLanes(layout.head_size)
        first_page = jnp.int32(place.index * layout.num_pages)
        tables, num_tokens, num_rows = step.page_tables[place.group], q.shape[0], step.context_lens.shape[0]
        token = jnp.arange(num_tokens)
        is_decode = token < step.num_decode_rows
        new = None
        if k is not None and v is not None:
            new = lanes.pack(k, v).astype(pages.dtype)
            # The decode kernel writes its own; here those go to the null page.
            slots = jnp.where(is_decode, 0, step.slots[place.group])
            if num_tokens > 1:
                pages = _scatter(
                    pages, new, first_page + lax.div(slots, layout.page_size), lax.rem(slots, layout.page_size)
                )
            new = _first(new, num_rows)
        options: dict[str, Any] = dict(
            scale=scale, window=window, soft_cap=soft_cap, tile=self._tile(layout), interpret=self.interpret
        )
        decoded, pages = decode_attention(
            _first(q, num_rows),
            new,
            pages,
            tables,
            step.context_lens,
            step.num_decode_rows,
            first_page,
            sinks,
            **options,
        )
        out = jnp.where(is_decode[:, None, None], _first(decoded, num_tokens), 0)
        if num_tokens > 1:  # A step of one token has no prefill row.
            places = _places(step, num_tokens)
            tile_q = min(self.tile_q, _aligned(num_tokens))
            aligned = _align(q, places, layout.num_kv_heads, lanes.width, num_rows, tile_q)
            rows, begins, positions, lens = step.plan[PLAN_HEADER:].reshape(4, -1)
            tiles = QueryTiles(rows, begins, positions, lens, step.plan[0])
            prefilled = prefill_attention(
                aligned, pages, tables, tiles, first_page, sinks, head_size=layout.head_size, tile_q=tile_q, **options
            )
            prefilled = jnp.moveaxis(prefilled.at[:, :, places].get(mode="clip"), 2, 0)
            prefilled = prefilled.reshape(num_tokens, q.shape[1], lanes.width)
            prefilled = prefilled[:, :, lanes.value_lane : lanes.value_lane + layout.head_size]
            out = jnp.where((places < NOWHERE)[:, None, None], prefilled, out)
        return out, (pages,)

    def _tile(self, layout: KVLayout) -> int:
        """Keys of a tile, a multiple of the page size."""
        tile = self.tile_kv
        if tile is None:
            token_bytes = layout.num_kv_heads * HeadLanes(layout.head_size).num_rows * LANES * layout.dtype.itemsize
            tile = min(max(1 << (TILE_BYTES // token_bytes).bit_length() - 1, 128), 2048)
        return max(tile // layout.page_size, 1) * layout.page_size


def _aligned(length: int) -> int:
    return -(-length // ALIGN) * ALIGN


def _first(x: Array, length: int) -> Array:
    """The first `length` entries; zeros where there are fewer."""
    return x[:length] if x.shape[0] >= length else jnp.pad(x, [(0, length - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])


def _places(step: AttentionMetadata, num_tokens: int) -> Int[Array, " T"]:
    """Where each token's query stands among the aligned ones, as in `TpuBackend.plan`; NOWHERE if in no prefill row."""
    num_rows = step.context_lens.shape[0]
    row = jnp.arange(num_rows)
    lens = jnp.diff(step.query_starts)
    is_prefill = (row >= step.num_decode_rows) & (row < step.num_rows)
    aligned_lens = jnp.where(is_prefill, -(-lens // ALIGN) * ALIGN, 0)
    begins = jnp.cumsum(aligned_lens) - aligned_lens
    token = jnp.arange(num_tokens)
    row_of_token = jnp.minimum(jnp.searchsorted(step.query_starts, token, side="right") - 1, num_rows - 1)
    places = begins[row_of_token] + token - step.query_starts[row_of_token]
    is_prefill_token = (token >= step.num_decode_rows) & (token < step.query_starts[-1])
    return jnp.where(is_prefill_token, places, NOWHERE)


def _align(
    q: Float[Array, "T N H"], places: Int[Array, " T"], num_kv_heads: int, width: int, num_rows: int, tile_q: int
) -> Float[Array, "K G A W"]:
    """Queries by KV head, each row from a multiple of ALIGN on, with room for the last tile's end."""
    num_tokens, num_heads, head_size = q.shape
    room = _aligned(num_tokens + (ALIGN - 1) * min(num_rows, num_tokens) + tile_q)
    by_head = jnp.pad(q, ((0, 0), (0, 0), (0, width - head_size)))
    by_head = jnp.moveaxis(by_head.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, width), 0, 2)
    return jnp.zeros((*by_head.shape[:2], room, width), q.dtype).at[:, :, places].set(by_head, mode="drop")


def _scatter(
    pages: Float[Array, "C K S Z L"],
    new: Float[Array, "T K S L"],
    at_page: Int[Array, " T"],
    offsets: Int[Array, " T"],
) -> Float[Array, "C K S Z L"]:
    """Write tokens one row of lanes at a time: any other way XLA lays the whole cache out anew, in a copy."""
    _, num_kv_heads, num_rows, page_size, _ = pages.shape
    rows = num_kv_heads * num_rows
    places = (at_page[:, None] * rows + jnp.arange(rows)[None]) * page_size + offsets[:, None]
    return pages.reshape(-1, LANES).at[places.reshape(-1)].set(new.reshape(-1, LANES)).reshape(pages.shape)
