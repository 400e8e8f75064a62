"""Ragged paged attention in plain XLA, on any platform: the layout of the pages, and the way of a step through them.

    tokens of a step:   │ decode rows, one token each │ prefill rows │ padding │
    keys and values:      all written into the donated pages
    attention:            xla_shared, pages that rows   xla_prefill, tile of
                          have in common (optional);    queries by tile
                          xla_decode, by strands
                          of pages

Trip counts are dynamic: a step costs what its rows' contexts need, not what the bucket could hold. On a CPU all of this
is native code, `cpu_attention`, by the same plan, over pages as `cpu_pages` lays them out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from ..interface import (
    AttendOptions,
    AttentionMetadata,
    AttentionShape,
    Backend,
    KVLayout,
    KVShape,
    LayerPlace,
    PlanRows,
    refuse_one_of,
)
from ..kv_scales import LayerScales
from ..native.attention import TilePlan, attend_tiles
from ..native.pages import PAIRS, CpuPages, pages_shapes, write_pages
from ..page_writes import write_rows
from .decode import DecodeStrands
from .pages import XlaPages
from .prefill import PrefillTiles, prefill
from .shared import SharedPlan, see_shared
from .softmax import Softmax

PLAN_HEADER = 1


@dataclass(frozen=True)
class Tiles:
    """How much is taken at once. `strands` and `queries` count those, `..._keys` key positions."""

    queries: int
    """Of one prefill row."""
    prefill_keys: int
    shared_rows: int = 16
    """Rows that take their common pages together."""
    strands: int = 256
    """Of all decode rows together; one of each if there are more rows."""
    decode_keys: int = 64 * 256
    """Of the strands of a turn together."""
    strand_keys: int = 1
    """Of a strand, if its row has as many and the rows fill a turn."""
    decode_bytes: int = 32 << 20
    """Of the keys of a turn's strands together, at most: copied together, they are read again by a product."""

    def deal(self, pages: XlaPages, num_rows: int) -> DecodeStrands:
        """How the pages of that many rows are dealt: few rows over more strands, which are shorter."""
        page_bytes = math.prod(pages.keys.shape[1:]) * pages.keys.dtype.itemsize
        a_turn = max(1, min(self.decode_keys // pages.page_size, self.decode_bytes // page_bytes))
        return DecodeStrands(
            pages,
            strands_a_turn=a_turn,
            most_strands=max(1, min(self.strands // num_rows, a_turn)),
            strand_pages=max(1, self.strand_keys // pages.page_size * min(num_rows, a_turn) // a_turn),
        )


CPU_TILES = Tiles(queries=16, prefill_keys=64, shared_rows=8)
"""Of which native code takes what it is told by `queries` and `shared_rows`."""
DEVICE_TILES = Tiles(queries=128, prefill_keys=512, shared_rows=64)


@dataclass(frozen=True)
class XlaLayout(KVLayout):
    """Keys and values [L × C, K, Z, H]; `of_cpu`: as native code wants them, see cpu_pages."""

    of_cpu: bool = False

    @property
    def are_pairs(self) -> bool:
        """Whether the arrays hold pairs of bfloat16 numbers."""
        return self.of_cpu and np.dtype(self.dtype) == jnp.bfloat16

    @property
    def stored_dtype(self) -> Any:
        """uint32 for pairs."""
        return np.dtype(PAIRS) if self.are_pairs else self.dtype

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the keys and of the values."""
        sizes = self.num_layers * self.num_pages, self.num_kv_heads, self.page_size, self.head_size
        return pages_shapes(*sizes, are_pairs=self.are_pairs) if self.of_cpu else (sizes, sizes)

    @property
    def logical_axes(self) -> tuple[tuple[str | None, ...], ...]:
        """KV heads are the only axis that may be spread."""
        return (None, "kv_heads", None, None), (None, "kv_heads", None, None)


@dataclass(frozen=True)
class XlaBackend(Backend):
    """Attention by loops over pages.

    `tiles`: None for those of the platform. `share_prefixes`: rows with one query that begin with the same pages
    attend to these together, if that saves reading `min_saved_tokens` in all. It makes a row's rounding depend on its
    company, but not on a CPU, and does nothing in layers with a window.
    """

    tiles: Tiles | None = None
    platform: str = "cpu"
    share_prefixes: bool = False
    min_saved_tokens: int = 2048

    name = "xla"
    kv_dtypes = ("float32", "bfloat16")
    needs_check = False

    @property
    def sizes(self) -> Tiles:
        """The tiles in use."""
        return self.tiles or (CPU_TILES if self.platform == "cpu" else DEVICE_TILES)

    @classmethod
    def for_devices(
        cls,
        devices: Sequence[Any],
        shape: AttentionShape,
        *,
        deterministic: bool = False,
        tuned: tuple[Any, ...] = (),
    ) -> XlaBackend:
        """See `Backend.for_devices`: plain XLA takes every model, and some dtypes of pages."""
        platform = devices[0].platform
        # On a CPU a row has the same bits whether it shares or not.
        backend = cls(platform=platform, share_prefixes=platform == "cpu")
        backend.layout(shape.kv_shape(cls.block_sizes[0]))
        return backend

    def with_shared_prefixes(self) -> XlaBackend:
        """See `Backend.with_shared_prefixes`."""
        return replace(self, share_prefixes=True)

    def layout(self, shape: KVShape) -> XlaLayout:
        """Layout of a cache of that many pages; ValueError names a dtype that is not taken."""
        self.refuse_unlisted("kv_cache_dtype", shape.dtype.name, self.kv_dtypes, "use kv_cache_dtype=auto")
        return XlaLayout.of(shape, of_cpu=self.platform == "cpu")

    def plan_len(self, num_tokens: int, num_rows: int) -> int:
        """One count and three values per query tile; each prefill row may end in a partial tile. Then shared pages."""
        return self._num_prefill(num_tokens, num_rows) + (self._shared(num_rows).size if self.share_prefixes else 0)

    def plan(self, rows: PlanRows, out: np.ndarray) -> None:
        """Cut the prefill rows into query tiles, in token order: (row, first token, number of queries)."""
        num_prefill = self._num_prefill(rows.padded_tokens, rows.padded_rows)
        tile_rows, starts, lens = out[PLAN_HEADER:num_prefill].reshape(3, -1)
        tile_q = self.sizes.queries
        num_tiles, start = 0, rows.num_decode_rows
        for row in range(rows.num_decode_rows, len(rows.query_lens)):
            end = start + int(rows.query_lens[row])
            for tile in range(start, end, tile_q):
                tile_rows[num_tiles], starts[num_tiles], lens[num_tiles] = row, tile, min(tile_q, end - tile)
                num_tiles += 1
            start = end
        out[0] = num_tiles
        if self.share_prefixes:
            self._shared(rows.padded_rows).fill(
                out[num_prefill:],
                rows.context_lens[: rows.num_decode_rows],
                rows.page_tables,
                rows.table_rows[: rows.num_decode_rows],
                page_size=rows.page_size,
                min_saved_tokens=self.min_saved_tokens,
            )

    def attend(
        self,
        pages: tuple[Array, ...],
        layout: KVLayout,
        place: LayerPlace,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"] | None,
        v: Float[Array, "T K H"] | None,
        step: AttentionMetadata,
        options: AttendOptions,
        *,
        kv_scales: LayerScales | None,
        sinks: Float[Array, " N"] | None,
    ) -> tuple[Float[Array, "T N H"], tuple[Array, ...]]:
        """See `PagedCache.attend`. `kv_scales` is None: `layout` refuses pages that need them."""
        refuse_one_of(k, v)
        assert isinstance(layout, XlaLayout)
        # One function for all layers, with the layer's place as data: it is traced once and not once a layer.
        return _attend_layer(
            pages,
            jnp.int32(place.index * layout.num_pages),
            q,
            k,
            v,
            step.slot_mapping[place.group],
            step.page_tables[place.group],
            step,
            sinks,
            backend=self,
            layout=layout,
            options=options,
        )

    def _num_prefill(self, num_tokens: int, num_rows: int) -> int:
        return PLAN_HEADER + 3 * (num_tokens // self.sizes.queries + num_rows)

    def _shared(self, num_rows: int) -> SharedPlan:
        return SharedPlan(num_rows, min(self.sizes.shared_rows, num_rows))


@partial(jax.jit, static_argnames=("backend", "layout", "options"))
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
    layout: XlaLayout,
    options: AttendOptions,
) -> tuple[Float[Array, "T N H"], tuple[Array, ...]]:
    """Write and attend in the layer whose pages begin at `first_page`."""
    k_pages, v_pages = kv_pages
    num_tokens, num_heads, head_size = q.shape
    num_rows = step.context_lens.shape[0]
    grouped = (layout.num_kv_heads, num_heads // layout.num_kv_heads)
    sizes, num_prefill = backend.sizes, backend._num_prefill(num_tokens, num_rows)
    q_TKGH = q.astype(jnp.float32).reshape(num_tokens, *grouped, head_size)
    sinks_KG = None if sinks is None else sinks.astype(jnp.float32).reshape(grouped)
    shared, of_shared = backend._shared(num_rows), step.plan[num_prefill:]
    is_sharing = backend.share_prefixes and options.window is None
    if layout.of_cpu:
        pages = CpuPages(k_pages, v_pages, first_page, options)
        if k is not None and v is not None:
            k_pages, v_pages = write_pages(pages, k, v, slots)
            pages = replace(pages, keys=k_pages, values=v_pages)
        of_shared = of_shared if is_sharing else jnp.zeros(shared.size, jnp.int32)
        num_shared, shared_tiles, members, num_seen = shared.sections(of_shared)
        tiles = TilePlan(
            counts=jnp.stack([num_shared[0], step.num_decode_rows, step.plan[0]]),
            prefill=step.plan[PLAN_HEADER:num_prefill].reshape(3, -1),
            shared=shared_tiles,
            members=members,
            num_seen=num_seen,
        )
        most_tokens = max(sizes.queries, shared.tile_rows)
        out = attend_tiles(pages, q_TKGH, tables, step.positions, tiles, most_tokens=most_tokens, sinks=sinks_KG)
        return out.reshape(q.shape).astype(q.dtype), (k_pages, v_pages)
    if k is not None and v is not None:
        k_pages = write_rows(k_pages, k, first_page, slots)
        v_pages = write_rows(v_pages, v, first_page, slots)
    layer = XlaPages(k_pages, v_pages, first_page, options)
    prefill_tiles = PrefillTiles(layer, pages_a_turn=max(1, sizes.prefill_keys // layout.page_size))
    q_RKGH = jnp.pad(q_TKGH[:num_rows], [(0, max(num_rows - num_tokens, 0)), (0, 0), (0, 0), (0, 0)])
    before = None if sinks is None else Softmax.start(q_RKGH, sinks_KG)
    lens = jnp.where(jnp.arange(num_rows) < step.num_decode_rows, step.context_lens, 0)
    num_seen = jnp.zeros_like(lens)
    if is_sharing:
        before = see_shared(prefill_tiles, q_RKGH, tables, shared, of_shared, before or Softmax.start(q_RKGH, None))
        num_seen = shared.sections(of_shared).num_seen
    decoded = sizes.deal(layer, num_rows).attend(q_RKGH, tables, lens, num_seen)
    if before is not None:
        decoded = decoded.and_also(before)
    # Room for what the last query tile computes past the end.
    tile_q = min(sizes.queries, num_tokens)
    room = max(num_tokens, num_rows) + tile_q
    out = lax.dynamic_update_slice_in_dim(jnp.zeros((room, *q_TKGH.shape[1:])), decoded.result(), 0, 0)
    if num_tokens > 1:  # A step of one token has no prefill row.
        out = prefill(
            prefill_tiles,
            q_TKGH,
            out,
            tables,
            step.plan[PLAN_HEADER:num_prefill],
            step.plan[0],
            step,
            sinks_KG,
            tile_q,
        )
    return out[:num_tokens].reshape(q.shape).astype(q.dtype), (k_pages, v_pages)
