"""The `xla` backend: ragged paged attention in plain XLA, on any platform. It defines the layout of the pages
and the path of a step.

    tokens of a step:   │ decode rows, one token each │ prefill rows │ padding │
    keys and values:      all written into the donated pages
    attention:            shared, pages that rows       prefill, tile of
                          have in common (optional);    queries by tile
                          decode, by KV splits

Trip counts are dynamic: a step costs what its rows' contexts need, not what the bucket could hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ..interface import AttentionShape, KVLayout, KVShape, LayerInputs, Pages, Tuned
from ..kv_scales import QUANTIZED_DTYPES, scaled_by_head
from ..tile_plan import TiledBackend, TilePlanner
from .decode import KVSplits
from .pages import XlaPages
from .prefill import PrefillTiles, prefill
from .shared import attend_shared
from .softmax import Softmax


@dataclass(frozen=True)
class Tiles:
    """How much work one iteration of each loop does. Fields that end in `_keys` count key positions."""

    queries: int
    """Queries of a prefill tile."""
    prefill_keys: int
    shared_rows: int
    """Rows of a shared tile."""
    kv_splits: int = 256
    """KV splits of all decode rows together; one of each row if there are more rows."""
    decode_keys: int = 64 * 256
    """Keys of the splits that are computed at once."""
    split_keys: int = 1
    """Keys of a split, if its row has as many and the rows fill a batch of splits."""
    decode_bytes: int = 32 << 20
    """Bytes of the keys of the splits that are computed at once: they are copied and then read by a product."""
    has_few_loops: bool = False
    """Whether decode and prefill have one loop each whose count is an array, instead of nested ones: a GPU's host waits
    in each iteration of such a loop to read its condition."""

    def kv_splits_of(self, pages: XlaPages, num_rows: int) -> KVSplits:
        """Return how the pages of `num_rows` decode rows are cut into KV splits, which are computed in batches.

        A decode row is a sequence with one query; `num_rows` counts padding rows, too. A KV split is some of a row's
        pages (flash decoding). One loop iteration computes one page of each split of a batch, so a batch has as many
        splits as `decode_keys` and `decode_bytes` allow for that many pages, and at least one.

        - Most splits of a row: `kv_splits` ÷ `num_rows`, but at least one and at most a batch. With `kv_splits` 256
          and batches of 64 or more, 4 rows have up to 64 splits each, and 256 rows or more have one.
        - Fewest pages of a split, if its row has them: those of `split_keys` keys. If there are fewer rows than splits
          in a batch, it shrinks in proportion, so that more splits fill the batch. With `split_keys` 256, pages of 16
          slots and batches of 32 splits, it is 16 pages for 32 rows or more and 4 pages for 8 rows; at least one.
        """
        # `decode_bytes` is a limit for the keys alone; the values of the same pages take as many bytes beside them.
        key_page_bytes = math.prod(pages.keys.shape[1:]) * pages.keys.dtype.itemsize
        batch_size = max(1, min(self.decode_keys // pages.page_size, self.decode_bytes // key_page_bytes))
        # A row with more splits than a batch would not have more of them computed at once, only more of them to merge.
        max_splits = max(1, min(self.kv_splits // num_rows, batch_size))
        full_min_pages = self.split_keys // pages.page_size
        min_pages = max(1, full_min_pages * min(num_rows, batch_size) // batch_size)
        # `has_few_loops` is set for GPUs, whose host waits in each iteration of a loop whose count is an array. With
        # static counts only the loop over a batch's pages is such a loop, not those over batches and merges around it.
        return KVSplits(
            pages,
            batch_size=batch_size,
            max_splits=max_splits,
            min_pages=min_pages,
            has_static_counts=self.has_few_loops,
        )


STORED_AS_BITS = ("bfloat16", "float8_e4m3fn")
"""Dtypes of pages of which a CPU stores the bits."""
CPU_TILES = Tiles(queries=16, prefill_keys=64, shared_rows=8, kv_splits=16, decode_keys=64 * 16)
DEVICE_TILES = Tiles(queries=128, prefill_keys=512, shared_rows=64)
GPU_TILES = replace(DEVICE_TILES, has_few_loops=True)


@dataclass(frozen=True)
class XlaLayout(KVLayout):
    """Keys and values [L × C, K, Z, H], as `KVLayout` lays them out.

    `is_bits`: numbers are stored as their bits, bfloat16 in uint16 and float8_e4m3fn in uint8, because XLA:CPU would
    convert whole arrays of them to float32 before it reads a page.
    """

    is_bits: bool = False

    @property
    def stored_dtype(self) -> Any:
        """Return the dtype of the arrays."""
        return np.dtype(f"uint{8 * self.dtype.itemsize}") if self.is_bits else self.dtype


@dataclass(frozen=True)
class XlaBackend(TiledBackend):
    """Attention by loops over pages.

    `tiles`: sizes of the loops; None stands for those of the platform. `share_prefixes`: decode rows that begin with
    the same pages attend to these together, if that saves reading `min_saved_tokens` tokens in all. It makes a row's
    rounding depend on the other rows, and does nothing in layers with a window.
    """

    tiles: Tiles | None = None
    platform: str = "cpu"
    share_prefixes: bool = False
    min_saved_tokens: int = 2048

    name = "xla"
    kv_dtypes = ("float32", "bfloat16", *QUANTIZED_DTYPES)
    needs_check = False

    @property
    def sizes(self) -> Tiles:
        """Return the tiles in use: those given, else those of the platform."""
        return self.tiles or {"cpu": CPU_TILES, "gpu": GPU_TILES}.get(self.platform, DEVICE_TILES)

    @property
    def planner(self) -> TilePlanner:
        """Return the planner that writes and reads this backend's plans."""
        return TilePlanner(self.sizes.queries, self.sizes.shared_rows, self.share_prefixes, self.min_saved_tokens)

    @classmethod
    def on(cls, devices: Sequence[Any], shape: AttentionShape, deterministic: bool, tuned: Tuned) -> XlaBackend:
        """Return the backend for the platform of these devices; plain XLA takes every model."""
        return cls(platform=devices[0].platform)

    def with_shared_prefixes(self) -> XlaBackend:
        """See `Backend.with_shared_prefixes`."""
        return replace(self, share_prefixes=True)

    def layout(self, shape: KVShape) -> XlaLayout:
        """Return the layout of a cache of these sizes; ValueError names a dtype that is not taken."""
        self.refuse_kv_dtype(shape.dtype, "use kv_cache_dtype=auto")
        return XlaLayout.of(shape, is_bits=self.platform == "cpu" and shape.dtype.name in STORED_AS_BITS)

    def attend(self, pages: Pages, layout: KVLayout, inputs: LayerInputs) -> tuple[Float[Array, "T N H"], Pages]:
        """Write k and v into the layer's pages, attend, and return the outputs in q's dtype and the new pages.

        Nothing is written if k and v are None. Decode rows, which come first with one token each, attend before the
        query tiles of the other rows. A decode row's output comes from two softmax states, which are merged: the one of
        the sinks and of the pages that it shares with other rows (cascade attention), and the one of its other pages
        (split-KV). Pages of one byte a number are read without their scales: the queries are multiplied by those of
        the keys, and the outputs by those of the values. Letters: T tokens and R rows (sequences) of the step, both
        with padding; N = K × G query heads, G for each of K KV heads; H head size.
        """
        (keys, values), step, tables = pages, inputs.step, inputs.tables
        layer = XlaPages(keys, values, inputs.first_page, inputs.options)
        if inputs.k is not None and inputs.v is not None:
            layer = layer.write(inputs.k, inputs.v, inputs)
        num_tokens, num_heads, head_size = inputs.q.shape
        num_rows, sizes = step.context_lens.shape[0], self.sizes
        heads = layout.num_kv_heads, num_heads // layout.num_kv_heads
        q_TKGH = inputs.q.astype(jnp.float32).reshape(num_tokens, *heads, head_size)
        if inputs.kv_scales is not None:
            q_TKGH = scaled_by_head(q_TKGH, inputs.kv_scales[0])
        sinks_KG = None if inputs.sinks is None else inputs.sinks.astype(jnp.float32).reshape(heads)
        plan = self.planner.sections(step.plan, num_tokens, num_rows, decodes_only=step.decodes_only)
        tiles = PrefillTiles(layer, pages_per_tile=max(1, sizes.prefill_keys // layer.page_size))
        # Token r belongs to row r in decode rows; all others get length 0. There may be more rows than tokens.
        q_RKGH = jnp.pad(q_TKGH[:num_rows], [(0, max(num_rows - num_tokens, 0)), (0, 0), (0, 0), (0, 0)])
        state = None if inputs.sinks is None else Softmax.start(q_RKGH, sinks_KG)
        decode_lens = jnp.where(jnp.arange(num_rows) < step.num_decode_rows, step.context_lens, 0)
        num_shared_pages = jnp.zeros_like(decode_lens)
        if self.share_prefixes and inputs.options.window is None:
            tile_rows = min(sizes.shared_rows, num_rows)
            state = attend_shared(tiles, q_RKGH, tables, plan, tile_rows, state or Softmax.start(q_RKGH, None))
            num_shared_pages = plan.num_shared_pages
        decoded = sizes.kv_splits_of(layer, num_rows).attend(q_RKGH, tables, decode_lens, num_shared_pages)
        if state is not None:
            decoded = decoded.merge(state)
        # `out` begins with the outputs of the decode rows, and all others are zero. It is longer by a query tile, since
        # the last tile also stores outputs after the last token.
        tile_q = min(sizes.queries, num_tokens)
        zeros = jnp.zeros((max(num_tokens, num_rows) + tile_q, *q_TKGH.shape[1:]), jnp.float32)
        out = lax.dynamic_update_slice_in_dim(zeros, decoded.result(), 0, 0)
        if not step.decodes_only:
            out = prefill(tiles, q_TKGH, out, tables, plan, step, sinks_KG, tile_q, in_one_loop=sizes.has_few_loops)
        out = out[:num_tokens]
        if inputs.kv_scales is not None:
            out = scaled_by_head(out, inputs.kv_scales[1])
        return out.reshape(inputs.q.shape).astype(inputs.q.dtype), (layer.keys, layer.values)
