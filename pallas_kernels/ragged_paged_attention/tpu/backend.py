"""Ragged paged attention on TPU: the layout of the pages, and the way of a step through the kernels.

    tokens of a step:  │ decode rows, one token each │ prefill rows │ padding │
    keys and values:     `decode` writes them            `write`, by tiles of tokens
    attention:           `decode`, by blocks of rows     `prefill`, by tiles of queries

Pages are [L × C, K, S, Z, 128], as `lanes` describes. Queries, keys and values are taken as the model made them, and
outputs take the memory of the queries. This module asks no device: `TpuBackend.chip` names the chip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ...layer_ops import LayerOps
from ...tpu_ops import TPU_OPS
from ..interface import AttentionShape, Backend, CheckGuard, KVLayout, KVShape, LayerInputs, PageTableLimit, PlanRows
from ..kv_scales import QUANTIZED_DTYPES, kv_cache_dtype, quantize
from .decode import decode_attention, decode_vmem_bytes
from .heads import TOKEN_UNROLL
from .kernel_call import CallOptions
from .lanes import LANES, HeadLanes
from .prefill import prefill_attention
from .query_tiles import PLAN_HEADER
from .sizes import (
    CHIPS,
    TpuShape,
    TpuSizes,
    TunedEntry,
    buffers_of,
    read_tuned,
    sizes_by_rule,
    sizes_of,
    tile_q_of,
    write_slots_of,
)
from .write import write_prefill

HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
TPU_CHIPS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7x",
    "TPU v7x": "v7x",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v4": "v4",
}
"""Device kind as JAX reports it → the chip that the kernels have sizes for."""
MIN_PAGE_SIZE = 16


@dataclass(frozen=True)
class TpuLayout(KVLayout):
    """Keys and values together: [L × C, K, S, Z, 128]."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shape of the one array, keys and values of all layers."""
        pages, rows = self.num_layers * self.num_pages, HeadLanes(self.head_size).num_rows
        return ((pages, self.num_kv_heads, rows, self.page_size, LANES),)


def refuse_large_pages(chip: str, layout: TpuLayout) -> None:
    """Raise ValueError if decode's KV tiles do not fit into the VMEM of a core of `chip`; the text says the way out.

    A tile has whole pages and at least 128 tokens, keys and values of all KV heads; this smallest tile is checked, with
    the number of buffers that the rule gives it. Example: pages of 16 tokens are checked with a tile of 128 tokens.
    """
    token_bytes = layout.page_bytes // (layout.num_layers * layout.page_size)
    tile_bytes, vmem_bytes = max(layout.page_size, LANES) * token_bytes, CHIPS[chip].vmem_bytes
    needed_bytes = decode_vmem_bytes(tile_bytes, buffers_of(chip, tile_bytes), spare_bytes=CHIPS[chip].spare_bytes)
    if needed_bytes > vmem_bytes:
        raise ValueError(
            f"block_size: got {layout.page_size}; with {layout.num_kv_heads} KV heads of {layout.head_size} in "
            f"{kv_cache_dtype(layout.dtype)} the pallas-tpu backend would need {needed_bytes >> 20} MiB of a core's "
            f"{vmem_bytes >> 20} MiB of VMEM; "
            + ("set block_size to 128, or use" if layout.page_size > LANES else "use")
            + " --attention-backend xla"
        )


@dataclass(frozen=True)
class TpuBackend(Backend):
    """Attention by Pallas kernels for TPU.

    Sizes of KV tiles are looked up for `chip`, in `tuned` before the package's own table, unless `sizes` gives them.
    `tile_q` is the largest number of queries of a tile, a power of two. `interpret`, a `pltpu.InterpretParams`, runs
    the kernels on any platform, for tests. With `check_bounds` a TPU stops at a copy beyond its memory, which takes
    time.
    """

    chip: str = "v6e"
    sizes: TpuSizes | None = None
    tile_q: int = 256
    interpret: Any = False
    check_bounds: bool = False
    tuned: tuple[TunedEntry, ...] = ()

    name = "pallas-tpu"
    block_sizes = (128, 256, 512, 1024)
    kv_dtypes = ("bfloat16", "float32", *QUANTIZED_DTYPES)
    # Page tables lie in a core's scalar memory of 1 MiB; beside its page numbers a row takes its lengths, and its share
    # of the plan of prefill's tiles.
    page_table_limit = PageTableLimit(max_entries=255_000, row_entries=8)
    tuned_table = "tpu.json"
    check_guard = CheckGuard.WATCHDOG

    @property
    def layer_ops(self) -> LayerOps:
        """See `Backend.layer_ops`."""
        return TPU_OPS

    def __post_init__(self) -> None:
        """Raise ValueError if `tile_q` is no power of two from 16 on, or if the kernels have no sizes for `chip`.

        The kernels copy the tokens of a tile in whole blocks of `TOKEN_UNROLL` = 16 tokens.
        """
        if self.tile_q < TOKEN_UNROLL or self.tile_q & (self.tile_q - 1):  # A power of two has a single bit.
            raise ValueError(
                f"tile_q: got {self.tile_q}, the pallas-tpu backend takes powers of two from {TOKEN_UNROLL} on"
            )
        if self.chip not in CHIPS:
            raise ValueError(
                f"chip: got {self.chip}, the pallas-tpu backend knows {', '.join(CHIPS)}; use --attention-backend xla"
            )

    @classmethod
    def read_tuned(cls, path: Path) -> tuple[TunedEntry, ...]:
        """See `Backend.read_tuned`."""
        return read_tuned(path)

    @classmethod
    def on(
        cls, devices: Sequence[Any], shape: AttentionShape, deterministic: bool, tuned: tuple[TunedEntry, ...]
    ) -> TpuBackend:
        """Return the backend for these JAX devices, TPUs of one kind; `shape` holds the heads of one device.

        `tuned` are entries of a user's table of tile sizes. `deterministic` has no effect, because this backend is not
        chosen where it is set (`BackendEntry.not_deterministic`). Raises ValueError if the kernels have no sizes for
        the chip.
        """
        device_kind = devices[0].device_kind
        if device_kind not in TPU_CHIPS:
            raise ValueError(
                f"attention_backend: got pallas-tpu, its kernels have sizes for {', '.join(TPU_CHIPS)}, this device is "
                f"{device_kind}; use --attention-backend xla"
            )
        return cls.for_heads(TPU_CHIPS[device_kind], shape.num_heads, shape.head_size, tuned)

    def describe(self) -> str:
        """Return, for the log, the chip whose sizes are used if nothing was tuned for this chip; else an empty text."""
        nearest = CHIPS[self.chip].rule
        return f"sizes of {nearest}, not tuned for {self.chip}" if nearest else ""

    def check_context_len(self, num_heads: int, layout: KVLayout, dtype: str) -> int:
        """Return the tokens of the longest row in the check at start: one more than two full tiles of decode."""
        return 2 * self.sizes_for(num_heads, layout, dtype).decode.tile + 1

    @classmethod
    def for_heads(cls, chip: str, num_heads: int, head_size: int, tuned: tuple[TunedEntry, ...] = ()) -> TpuBackend:
        """Make a backend for that many heads on one chip, with tiles of queries that fit into its VMEM."""
        return cls(chip, tile_q=tile_q_of(chip, num_heads, head_size), tuned=tuned)

    def layout(self, shape: KVShape) -> TpuLayout:
        """Return the layout of a cache of these sizes; raise ValueError if the kernels cannot take one of them.

        The slots of a page are a power of two, and at least as many as one DMA can address. A KV tile of whole pages
        must fit into VMEM.
        """
        page_size = shape.page_size
        if shape.num_kv_heads < 1:
            raise ValueError(f"num_kv_heads: got {shape.num_kv_heads}, allowed: an integer ≥ 1")
        self.refuse_kv_dtype(shape.dtype, "use kv_cache_dtype=auto")
        self.refuse_unlisted("head_size", shape.head_size, HEAD_SIZES, "use --attention-backend xla")
        min_page_size = max(MIN_PAGE_SIZE, write_slots_of(self.chip, shape.dtype))
        if page_size < min_page_size or page_size & (page_size - 1):
            raise ValueError(
                f"block_size: got {page_size}, the pallas-tpu backend takes powers of two from {min_page_size} on in "
                f"pages of {kv_cache_dtype(shape.dtype)}; leave it out or use --attention-backend xla"
            )
        layout = TpuLayout.of(shape)
        refuse_large_pages(self.chip, layout)
        return layout

    def sizes_for(self, num_heads: int, layout: KVLayout, dtype: DTypeLike) -> TpuSizes:
        """Return the sizes of the KV tiles for that many query heads of `dtype` over pages of `layout`.

        They are `self.sizes` if given. Else float32 queries over narrower pages take the sizes of the rule, and all
        others those of the tuned tables, `self.tuned` before the package's own, or of the rule if no table has the
        shape.
        """
        if self.sizes is not None:
            return self.sizes
        shape = TpuShape(num_heads, layout.num_kv_heads, layout.head_size, layout.dtype.name, layout.page_size)
        # Tables hold sizes for queries in the pages' dtype, or in bfloat16 over pages of one byte a number.
        if np.dtype(dtype) == np.float32 and layout.dtype != np.float32:
            return sizes_by_rule(self.chip, shape, in_float32=True)
        return sizes_of(self.chip, shape, self.tuned)

    def plan_len(self, num_tokens: int, num_rows: int, *, decodes_only: bool = False) -> int:
        """Return how many int32 numbers a plan has: one that counts the query tiles, and four for each possible tile.

        The step is padded to `num_tokens` tokens and `num_rows` rows. Each row may begin and end with a tile of less
        than `tile_q` tokens, all others are full. With tiles of 256, 1,024 tokens and 3 rows, a plan has room for 4 + 6
        tiles: 41 numbers. A row has at least one token, so no more rows than tokens count. A step of decode rows only
        has an empty plan.
        """
        return 0 if decodes_only else PLAN_HEADER + 4 * (num_tokens // self.tile_q + 2 * min(num_rows, num_tokens))

    def plan(self, rows: PlanRows, out: np.ndarray) -> None:
        """Cut the prefill rows into query tiles and write these into `out`: (row, first token, its position, length).

        `out` is int32, all zeros, of `plan_len` numbers: first the number of tiles, then each field of all tiles. Tiles
        are cut at positions that are multiples of `tile_q`, so that the causal mask's diagonal lies in the same way in
        every tile but the first and the last of a row. With `tile_q` 32, a row's positions 40 … 99 become tiles of 24,
        32 and 4 tokens. Decode rows, one token each, come first and have no tiles. If the step has decode rows only,
        nothing is written.
        """
        if rows.decodes_only:
            return
        tile_rows, first_tokens, first_positions, lens = out[PLAN_HEADER:].reshape(4, -1)
        num_tiles, first_token = 0, rows.num_decode_rows
        for row in range(rows.num_decode_rows, len(rows.query_lens)):
            position, end = int(rows.context_lens[row] - rows.query_lens[row]), int(rows.context_lens[row])
            while position < end:
                length = min(self.tile_q - position % self.tile_q, end - position)
                tile_rows[num_tiles], first_tokens[num_tiles] = row, first_token
                first_positions[num_tiles], lens[num_tiles] = position, length
                num_tiles, first_token, position = num_tiles + 1, first_token + length, position + length
        out[0] = num_tiles

    def attend(
        self, pages: tuple[Array, ...], layout: KVLayout, inputs: LayerInputs
    ) -> tuple[Float[Array, "T N H"], tuple[Array, ...]]:
        """See `Backend.attend`: three kernels, the last of which attends to what the first two have written.

        `write_prefill` writes the keys and values of prefill rows. `decode_attention` writes those of decode rows and
        attends, `prefill_attention` attends; each replaces the queries [T, N, H] of its rows by their outputs and
        leaves the others. A step of decode rows only runs the second kernel alone. In a layer without new keys and
        values, nothing is written.
        """
        (kv_pages,), q_dtype, has_prefill = pages, inputs.q.dtype, not inputs.step.decodes_only
        sizes = self.sizes_for(inputs.q.shape[1], layout, q_dtype)
        call = CallOptions(CHIPS[self.chip].vmem_bytes, self.interpret, self.check_bounds)
        if inputs.k is not None and inputs.v is not None:
            k, v = inputs.k, inputs.v
            if inputs.kv_scales is None:
                k, v = k.astype(kv_pages.dtype), v.astype(kv_pages.dtype)
            else:  # Kernels transpose only numbers of two or four bytes; q's dtype holds one-byte numbers exactly.
                k_scales, v_scales = inputs.kv_scales
                k = quantize(k, k_scales, kv_pages.dtype).astype(q_dtype)
                v = quantize(v, v_scales, kv_pages.dtype).astype(q_dtype)
            inputs = replace(inputs, k=k, v=v)
            if has_prefill:
                kv_pages = write_prefill(kv_pages, inputs, call, tile_q=self.tile_q)
        out, kv_pages = decode_attention(kv_pages, inputs, call, sizes=sizes.decode)
        if has_prefill:
            tile_sizes = {"tile_q": self.tile_q, "tile_kv": sizes.tile_kv, "sub_kv": sizes.sub_kv}
            out = prefill_attention(kv_pages, replace(inputs, q=out), call, **tile_sizes)
        return out, (kv_pages,)
