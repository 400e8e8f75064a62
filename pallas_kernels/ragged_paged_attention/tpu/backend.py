"""Ragged paged attention on TPU: the layout of the pages, and the way of a step through the kernels.

    tokens of a step:  │ decode rows, one token each │ prefill rows │ padding │
    keys and values:     tpu_decode puts them            tpu_write, by tiles of tokens
                         into the page itself
    attention:           tpu_decode, by blocks of rows   tpu_prefill, by tiles of queries

Pages are [L × C, K, S, Z, 128]: see tpu_tiles. Queries, keys and values are taken as the model made them, and outputs
take the place of the queries. Nothing here asks which chip there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .interface import AttentionMetadata, KVLayout, LayerPlace, PagedCache, refuse_one_of
from .kv_scales import QUANTIZED_DTYPES, LayerScales, quantize
from .tpu_decode import decode_attention, decode_vmem
from .tpu_heads import TOKENS
from .tpu_prefill import QueryTiles, prefill_attention
from .tpu_sizes import CHIPS, VMEM_BYTES, TpuShape, TpuSizes, TunedEntry, ruled_sizes, sizes_of, tile_q_of, write_height
from .tpu_tiles import LANES, HeadLanes
from .tpu_write import write_prefill

HEAD_SIZES = (64, 80, 96, 128, 192, 256)
DTYPES = ("bfloat16", "float32", *QUANTIZED_DTYPES)
LEAST_PAGE = 16
PLAN_HEADER = 1


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


def refuse_large_pages(chip: str, layout: TpuLayout) -> None:
    """ValueError if decode's tiles, of a page or of 128 tokens at least, would not fit into the chip's VMEM."""
    token_bytes = layout.page_bytes // (layout.num_layers * layout.page_size)
    needed = decode_vmem(max(layout.page_size, LANES) * token_bytes)
    if needed > VMEM_BYTES[chip]:
        raise ValueError(
            f"block_size: got {layout.page_size}; with {layout.num_kv_heads} KV heads of {layout.head_size} in "
            f"{layout.dtype.name} the pallas-tpu backend would need {needed >> 20} MiB of a core's "
            f"{VMEM_BYTES[chip] >> 20} MiB of VMEM; "
            + ("set block_size to 128, or use" if layout.page_size > LANES else "use")
            + " --attention-backend xla"
        )


@dataclass(frozen=True)
class TpuBackend:
    """Attention by Pallas kernels for TPU.

    `chip` is what sizes are looked up for, in `tuned` before our own table; `sizes` are taken instead if given.
    `tile_q` is the most queries of a tile, a power of two. `interpret` runs the kernels anywhere, step by step:
    `pltpu.InterpretParams`, for tests. `check_bounds` has a TPU stop at a copy beyond its memory, which takes time.
    """

    chip: str = "v6e"
    sizes: TpuSizes | None = None
    tile_q: int = 256
    interpret: Any = False
    check_bounds: bool = False
    tuned: tuple[TunedEntry, ...] = ()

    name = "pallas-tpu"

    def __post_init__(self) -> None:
        if self.tile_q < TOKENS or self.tile_q & (self.tile_q - 1):
            raise ValueError(f"tile_q: got {self.tile_q}, the pallas-tpu backend takes powers of two from {TOKENS} on")
        if self.chip not in CHIPS:
            raise ValueError(
                f"chip: got {self.chip}, the pallas-tpu backend knows {', '.join(CHIPS)}; use --attention-backend xla"
            )

    @classmethod
    def for_heads(cls, chip: str, num_heads: int, head_size: int, tuned: tuple[TunedEntry, ...] = ()) -> TpuBackend:
        """With tiles of queries that fit into the chip's VMEM."""
        return cls(chip, tile_q=tile_q_of(num_heads, head_size), tuned=tuned)

    def layout(
        self, *, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_size: int, dtype: Any
    ) -> TpuLayout:
        """Layout of a cache of that many pages; ValueError names what these kernels cannot take."""
        if num_kv_heads < 1:
            raise ValueError(f"num_kv_heads: got {num_kv_heads}, allowed: an integer ≥ 1")
        for name, got, allowed, way_out in (
            ("kv_cache_dtype", np.dtype(dtype).name, DTYPES, "use kv_cache_dtype=auto"),
            ("head_size", head_size, HEAD_SIZES, "use --attention-backend xla"),
        ):
            if got not in allowed:
                raise ValueError(
                    f"{name}: got {got}, the pallas-tpu backend takes {', '.join(map(str, allowed))}; {way_out}"
                )
        least = max(LEAST_PAGE, write_height(self.chip, dtype))
        if page_size < least or page_size & (page_size - 1):
            raise ValueError(
                f"block_size: got {page_size}, the pallas-tpu backend takes powers of two from {least} on in pages "
                f"of {np.dtype(dtype).name}; leave it out or use --attention-backend xla"
            )
        layout = TpuLayout(num_layers, num_pages, page_size, num_kv_heads, head_size, np.dtype(dtype))
        refuse_large_pages(self.chip, layout)
        return layout

    def sizes_for(self, num_heads: int, layout: KVLayout, dtype: Any) -> TpuSizes:
        """Of the tiles of keys, for so many query heads of `dtype` over such pages."""
        if self.sizes is not None:
            return self.sizes
        shape = TpuShape(num_heads, layout.num_kv_heads, layout.head_size, layout.dtype.name, layout.page_size)
        # Sizes are tuned for queries in the pages' dtype, or in bfloat16 over pages of one byte a number.
        if np.dtype(dtype) == np.float32 and layout.dtype != np.float32:
            return ruled_sizes(self.chip, shape, in_float32=True)
        return sizes_of(self.chip, shape, self.tuned)

    def plan_len(self, num_tokens: int, num_rows: int) -> int:
        """One count and four values per tile of queries; each prefill row may begin and end with a short one."""
        return PLAN_HEADER + 4 * (num_tokens // self.tile_q + 2 * min(num_rows, num_tokens))

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
        """Cut the prefill rows into tiles, (row, first token, its position, length), at multiples of `tile_q`.

        These are positions and not tokens: the mask's diagonal then lies alike in all tiles but a row's first and last.
        """
        rows, tokens, positions, lens = out[PLAN_HEADER:].reshape(4, -1)
        num_tiles, token = 0, num_decode_rows
        for row in range(num_decode_rows, len(query_lens)):
            position, end = int(context_lens[row] - query_lens[row]), int(context_lens[row])
            while position < end:
                length = min(self.tile_q - position % self.tile_q, end - position)
                rows[num_tiles], tokens[num_tiles] = row, token
                positions[num_tiles], lens[num_tiles] = position, length
                num_tiles, token, position = num_tiles + 1, token + length, position + length
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
        """See `PagedCache.attend`."""
        refuse_one_of(k, v)
        layout, (pages,) = cache.layout, cache.pages
        num_tokens, num_heads, _ = q.shape
        sizes = self.sizes_for(num_heads, layout, q.dtype)
        first_page, tables = jnp.int32(place.index * layout.num_pages), step.page_tables[place.group]
        rows, tokens, positions, tile_lens = step.plan[PLAN_HEADER:].reshape(4, -1)
        how: dict[str, Any] = dict(interpret=self.interpret, check_bounds=self.check_bounds)
        tiles = QueryTiles(rows, tokens, positions, tile_lens, step.plan[0])
        if k is not None and v is not None:
            if kv_scales is None:
                k, v = k.astype(pages.dtype), v.astype(pages.dtype)
            else:  # In q's dtype, which holds them exactly: kernels sort heads of two or four bytes a number.
                k, v = (quantize(x, s, pages.dtype).astype(q.dtype) for x, s in zip((k, v), kv_scales, strict=True))
            if num_tokens > 1:  # A step of one token has no prefill row.
                pages = write_prefill(k, v, pages, tables, tiles, first_page, tile_q=self.tile_q, **how)
        options: dict[str, Any] = dict(scale=scale, window=window, soft_cap=soft_cap, **how)
        lens = step.context_lens[:num_tokens]
        out, pages = decode_attention(
            q,
            k,
            v,
            pages,
            tables,
            lens,
            step.num_decode_rows,
            first_page,
            sinks,
            kv_scales,
            sizes=sizes.decode,
            **options,
        )
        if num_tokens > 1:
            out = prefill_attention(
                out,
                pages,
                tables,
                tiles,
                first_page,
                sinks,
                kv_scales,
                tile_q=self.tile_q,
                tile=sizes.tile_kv,
                sub=sizes.sub_kv,
                **options,
            )
        return out, (pages,)
