"""Ragged paged attention on NVIDIA GPUs: the layout of the pages, and the way of a step through the kernels.

    keys and values     scattered by XLA into the donated pages
    queries [T, N, H]   ─ gather ─▶ aligned by KV head [K, A, H]
    attention           outputs to the memory of the queries; one launch over small tiles, of rows with few queries
                        (decode), one over large tiles, of all others (prefill), each followed by one that merges the
                        pieces of split tiles; a step that only decodes has small tiles alone
    out [T, N, H]       ◀─ gather ─

Pages are [L × C, K, Z, H], one array of keys and one of values, so that the slots of one page and KV head lie side by
side. This module asks no device: the constructor takes what the kernels must know of the chip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..interface import AttendOptions, AttentionShape, Backend, CheckGuard, KVLayout, KVShape, LayerInputs, Pages, Tuned
from ..kv_scales import kv_cache_dtype, quantize
from ..page_writes import write_rows
from . import mma, wgmma
from .attention import ragged_attention, repeat_sinks
from .attention_refs import AttentionInputs, Launch
from .memory_ops import COMPUTE_DTYPE, Chip, plgpu
from .merge import merge
from .plan import GpuPlanner
from .queries import QueryRows

HEAD_SIZES = (64, 80, 96, 128, 192, 256)
ONE_BYTE_HEAD_SIZES = (64, 128, 256)
"""Head sizes of pages of one byte a number: rows of other sizes are no even number of blocks of shared memory."""
AMPERE_PAGE_SIZES_OF_80 = (32, 64)
"""Tokens of a page that Ampere takes at head size 80: 16 rows of five blocks cannot be shared by its four warps."""
PAGE_SIZES = (16, 32, 64)
TABLE_ALIGN = 64
"""Page-table entries of 256 bytes: the kernels' arrays begin at a multiple of that."""
PREFILL = ("mma", "wgmma")
NUM_STAGES, MAX_TILE_KV = (2, 3, 4), (32, 64)
"""Splits of keys lie at multiples of 64, so tiles are no larger."""
MIN_CAPABILITY, HOPPER = (8, 0), (9, 0)
"""Compute capabilities: the first that the kernels run on, Ampere, and Hopper's."""


def faster_prefill(capability: tuple[int, int], head_size: int) -> str:
    """Return the faster instruction for large tiles: wgmma on a Hopper at head sizes 64 and 128, else mma.

    An H100 computed a prompt of 8,192 tokens in 0.68 of the time of mma (docs/measurements/first_light_h100_3.json).
    """
    return "wgmma" if capability[0] == HOPPER[0] and head_size in wgmma.HEAD_SIZES else "mma"


@dataclass(frozen=True, kw_only=True)
class GpuBackend(GpuPlanner, Backend):
    """Attention by Pallas kernels for NVIDIA GPUs, Ampere and later.

    The fields of `GpuPlanner` count the heads on one chip; the defaults of those that describe the chip are an H100's
    and an H200's. `capability` is the chip's compute capability. `prefill` is the instruction of large tiles: mma or,
    on a Hopper and for heads of 64 and 128, wgmma. `interpret`, a `plgpu.InterpretGPUParams`, runs the kernels on any
    platform, for tests.
    """

    capability: tuple[int, int] = HOPPER
    prefill: str = "mma"
    interpret: Any = None

    name = "pallas-gpu"
    check_guard = CheckGuard.CHILD
    kv_dtypes = ("bfloat16", "int8", "float8_e4m3fn")

    @classmethod
    def on(cls, devices: Sequence[Any], shape: AttentionShape, deterministic: bool, tuned: Tuned) -> GpuBackend:
        """Return the backend for these GPUs of one kind: its kernels are compiled for their compute capability.

        `shape` holds the heads of one GPU. Number of multiprocessors and shared memory are those of `devices[0]`. The
        plan gets a section for full attention and one for each different window. With `deterministic`, keys are not
        split (split-KV), since the splits of a row depend on the other rows. `tuned` is not used: nothing is tuned for
        this backend. Raises ValueError for a GPU older than Ampere.
        """
        device = devices[0]
        major, minor = (int(number) for number in device.compute_capability.split("."))
        if (major, minor) < MIN_CAPABILITY:
            raise ValueError(
                f"attention_backend: got pallas-gpu, its kernels run from Ampere (8.0) on, {device.device_kind} is of "
                f"compute capability {device.compute_capability}; use --attention-backend xla"
            )
        return cls(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            windows=tuple(sorted({window for window in shape.windows if window is not None})),
            num_sms=device.core_count,
            block_memory=device.shared_memory_per_block_optin,
            capability=(major, minor),
            prefill=faster_prefill((major, minor), shape.head_size),
            split_kv=not deterministic,
        )

    def __post_init__(self) -> None:
        """Raise ValueError if this JAX has no `mma`, or if a field has a value that the kernels do not take.

        `num_heads` is a positive multiple of `num_kv_heads`. `num_stages` and `max_tile_kv` are among the values listed
        above. Sizes of the chip, `min_share` and windows are at least 1. `prefill` is mma, or wgmma on a Hopper at some
        head sizes. The text of an error names the field and the values that are allowed.
        """
        if not hasattr(plgpu, "mma"):
            raise ValueError(
                f"attention backend: got pallas-gpu with jax {jax.__version__}, its kernels need jax 0.11 or later "
                "(Python 3.12 or later); update jax or use --attention-backend xla"
            )
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads: got {self.num_heads} with {self.num_kv_heads} KV heads, the pallas-gpu backend takes a "
                "multiple of at least one"
            )
        self.refuse_unlisted("num_stages", self.num_stages, NUM_STAGES, "leave it at 2")
        self.refuse_unlisted("max_tile_kv", self.max_tile_kv, MAX_TILE_KV, "leave it at 64")
        fields = [("num_sms", self.num_sms), ("block_memory", self.block_memory), ("min_share", self.min_share)]
        for name, got in fields + [("windows", window) for window in self.windows if window is not None]:
            if got < 1:
                raise ValueError(f"{name}: got {got}, the pallas-gpu backend takes at least 1")
        has_wgmma = self.capability[0] == HOPPER[0] and self.head_size in wgmma.HEAD_SIZES
        if self.prefill not in PREFILL or (self.prefill == "wgmma" and not has_wgmma):
            raise ValueError(
                f"prefill: got {self.prefill} with head size {self.head_size} on a GPU of compute capability "
                f"{'.'.join(map(str, self.capability))}, the pallas-gpu backend takes {' or '.join(PREFILL)}, wgmma on "
                f"9.0 (Hopper) alone and for head sizes {' and '.join(map(str, wgmma.HEAD_SIZES))}; leave it at mma"
            )

    def layout(self, shape: KVShape) -> KVLayout:
        """Return the layout of a cache of these sizes; raise ValueError if the kernels cannot take one of them.

        They take the dtypes `kv_dtypes`, the head sizes `HEAD_SIZES` (fewer of them in one-byte pages), and pages of
        16, 32 or 64 tokens (not of 16 at head size 80 before Hopper). Keys and values are an array each,
        [L × C, K, Z, H]: the pages of all layers, K KV heads, Z slots of a page, head size H.
        """
        # `kv_cache_dtype` is auto by default, which means the model's dtype.
        dtype_way_out = "use --dtype bfloat16 and leave kv_cache_dtype out, or use --attention-backend xla"
        self.refuse_kv_dtype(shape.dtype, dtype_way_out)
        self.refuse_unlisted("head_size", shape.head_size, HEAD_SIZES, "use --attention-backend xla")
        if shape.dtype.itemsize == 1 and shape.head_size not in ONE_BYTE_HEAD_SIZES:
            raise ValueError(
                f"kv_cache_dtype: got {kv_cache_dtype(shape.dtype)} with head size {shape.head_size}, the pallas-gpu "
                f"backend takes it with {', '.join(map(str, ONE_BYTE_HEAD_SIZES))} only; leave kv_cache_dtype out"
            )
        is_80_before_hopper = shape.head_size == 80 and self.capability < HOPPER
        page_sizes = AMPERE_PAGE_SIZES_OF_80 if is_80_before_hopper else PAGE_SIZES
        self.refuse_unlisted("block_size", shape.page_size, page_sizes, "leave it out or use --attention-backend xla")
        return KVLayout.of(shape)

    def launches(
        self, num_tokens: int, num_rows: int, options: AttendOptions, *, decodes_only: bool = False
    ) -> list[Launch]:
        """Return one launch of the attention kernel for each size of query tiles, small or large, that a step may have.

        The step is padded to `num_tokens` and `num_rows` (sequences); with `decodes_only` it has small tiles only. Each
        launch names its section of the plan, which depends on the window in `options`. If the plan has no section for
        this window, the launch takes that of full attention, and the kernel skips the keys that the window hides: the
        result is the same, but the thread blocks get unequal work. Only large tiles may be computed by wgmma.
        """
        windows = self.planned_windows
        window_index = windows.index(options.window) if options.window in windows else 0
        launches = []
        for by_window in self.sections(num_tokens, num_rows, decodes_only=decodes_only):
            section, tile_rows = by_window[window_index], by_window[0].tiles.tile_rows
            if section.tiles.max_tiles:  # A step of few tokens cannot have large tiles.
                launch = Launch(
                    section=section,
                    group_size=self.group_size,
                    options=options,
                    tile_kv=self.tile_kv,
                    num_stages=self.num_stages,
                    reads_ahead=self.reads_ahead(tile_rows),
                    num_query_tiles=self.num_query_tiles(tile_rows),
                    products=wgmma if self.prefill == "wgmma" and tile_rows == self.large_tile_rows else mma,
                    chip=Chip(has_tma=self.capability >= HOPPER, interpret=self.interpret),
                )
                launches.append(launch)
        return launches

    def attend(self, pages: Pages, layout: KVLayout, inputs: LayerInputs) -> tuple[Float[Array, "T N H"], Pages]:
        """See `Backend.attend`: scatter k and v into the pages, then flash attention with split-KV.

        The queries are gathered into a mutable array [K, A, H] by KV head: A counts the query rows of all sequences,
        each of which begins at a multiple of 8. One launch over small query tiles and one over large ones overwrite the
        queries by their outputs. If keys can be split, a launch returns partial results too, and `merge` combines them.
        Outputs are returned as [T, N, H], zeros for padding tokens, with the written pages of keys and of values. Into
        one-byte pages, k and v are written divided by their scales. If k and v are None, nothing is written.
        """
        q, k, v, step = inputs.q, inputs.k, inputs.v, inputs.step
        k_pages, v_pages = pages
        self._refuse_misfits(inputs, k_pages)
        if k is not None and v is not None:
            if inputs.kv_scales is not None:
                k, v = (quantize(x, scale, k_pages.dtype) for x, scale in zip((k, v), inputs.kv_scales, strict=True))
            k_pages = write_rows(k_pages, k, inputs.first_page, inputs.slots)
            v_pages = write_rows(v_pages, v, inputs.first_page, inputs.slots)
        rows = QueryRows(step, self.num_kv_heads, self.group_size, self.large_tile_rows)
        queries = jax.new_ref(rows.align(q))
        k_scales, v_scales = inputs.kv_scales or (None, None)
        num_rows = step.context_lens.shape[0]
        # The tables may be a slice of those of all groups, which XLA hands to the kernel in place. With rows of a
        # multiple of 256 bytes it begins at such a multiple, as Mosaic's kernels require.
        tables = jnp.pad(inputs.tables, ((0, 0), (0, -inputs.tables.shape[1] % TABLE_ALIGN)))
        for launch in self.launches(q.shape[0], num_rows, inputs.options, decodes_only=step.decodes_only):
            page_tables, first_page, sinks = tables.reshape(-1), inputs.first_page[None], None
            if inputs.sinks is not None:
                # A tile may begin at any of the heads that share a KV head, so their sinks are repeated cyclically.
                sinks = repeat_sinks(inputs.sinks, self.num_kv_heads, launch.section.tiles.tile_rows)
            lens_and_plan = step.context_lens, step.query_starts, step.plan
            arguments = AttentionInputs(
                queries, k_pages, v_pages, page_tables, *lens_and_plan, first_page, k_scales, v_scales, sinks
            )
            partials = ragged_attention(arguments, launch)
            if partials is not None:
                merge(queries, partials, step.plan, launch.section, launch.chip)
        return rows.restore(queries[...]), (k_pages, v_pages)

    def _refuse_misfits(self, inputs: LayerInputs, k_pages: Array) -> None:
        """Raise ValueError if the queries, the pages' heads or the plan do not fit the sizes of this backend.

        The kernels are compiled for these sizes and would misread the arrays: queries [T, N, H] in bfloat16, pages
        [L × C, K, Z, H], and a plan of `plan_len` numbers for T tokens and R rows (sequences), padding included.
        """
        q, step = inputs.q, inputs.step
        if q.dtype != COMPUTE_DTYPE:
            raise ValueError(
                f"attend: got queries of {q.dtype.name}, the pallas-gpu kernels compute in {np.dtype(COMPUTE_DTYPE)}; "
                "use --dtype bfloat16 or --attention-backend xla"
            )
        got = q.shape[1], k_pages.shape[1], q.shape[2]
        if got != (self.num_heads, self.num_kv_heads, self.head_size):
            raise ValueError(
                f"attend: got {got[0]} query heads, {got[1]} KV heads and head size {got[2]}, this pallas-gpu backend "
                f"was made for {self.num_heads}, {self.num_kv_heads} and {self.head_size}; make it with what lies on "
                "one chip"
            )
        num_tokens, num_rows = q.shape[0], step.context_lens.shape[0]
        wanted_len = self.plan_len(num_tokens, num_rows, decodes_only=step.decodes_only)
        if step.plan.shape[0] != wanted_len:
            # The kernels find the section of each class and window by its offset, which differs in another plan.
            raise ValueError(
                f"attend: got a plan of {step.plan.shape[0]} numbers, this pallas-gpu backend takes {wanted_len} for "
                f"{num_tokens} tokens in {num_rows} rows{', all of them decoding' * step.decodes_only}; make the plan "
                "with the backend that attends, for a step of the same kind"
            )
