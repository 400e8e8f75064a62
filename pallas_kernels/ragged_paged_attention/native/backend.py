"""The `native` backend: attention, products, norms and page writes by code that LLVM compiles for this processor.

For one CPU device. The order in which numbers are added depends on their row alone, so a row has the same bits in any
batch, also when it shares prefixes with others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import llvmlite
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ...layer_ops import LayerOps
from ...native.ffi import check_interface, interface_header
from ...native.processor import cpu_features, processor
from ...native.registry import name_functions_for_perf, register_kept, registered
from ..interface import AttentionShape, BackendUnavailableError, KVLayout, KVShape, LayerInputs, Pages, Tuned
from ..kv_scales import QUANTIZED_DTYPES
from ..tile_plan import LEAST_TILE, TiledBackend, TilePlanner
from .page_shapes import BYTE_DTYPES, PACKED_BF16, pages_shapes

MAX_TILE_ELEMENTS = 1 << 15
"""Elements of a tile's queries for one KV head at most: they, their sums and their scores fit the level-2 cache."""
MIN_TILES = 8
"""Query tiles of a prompt at least, if each has 16 tokens: with fewer, some threads would have nothing to do."""


@dataclass(frozen=True)
class NativeLayout(KVLayout):
    """Keys and values as native code reads them, see `pages`: float32, pairs of bfloat16 in uint32, or single bytes."""

    def entry(self, layer: Any, page: Any) -> Any:
        """Return the entry of a page: that of one layer follows that of another.

        So the first pages of all layers share large pages of the system. If each layer had pages of its own, a first
        token would take as many large pages as there are layers, 112 MB for 28 of them.
        """
        return page * self.num_layers + layer

    @property
    def is_bf16_packed(self) -> bool:
        """Return whether the arrays hold pairs of bfloat16 numbers."""
        return bool(self.dtype == jnp.bfloat16)

    @property
    def stored_dtype(self) -> Any:
        """Return the dtype of the arrays."""
        return np.dtype(PACKED_BF16) if self.is_bf16_packed else BYTE_DTYPES.get(self.dtype.name, self.dtype)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the keys and of the values."""
        sizes = self.num_layers * self.num_pages, self.num_kv_heads, self.page_size, self.head_size
        return pages_shapes(*sizes, is_bf16_packed=self.is_bf16_packed)


@dataclass(frozen=True)
class NativeBackend(TiledBackend):
    """Attention by native code over tiles of queries. The fields are those of `TilePlanner`."""

    tile_q: int = 64
    shared_rows: int = 8
    share_prefixes: bool = True
    min_saved_tokens: int = 2048

    name = "native"
    kv_dtypes = ("float32", "bfloat16", *QUANTIZED_DTYPES)
    has_own_products = True

    @property
    def layer_ops(self) -> LayerOps:
        """Import the operations, whose many modules only a trace needs, and return them."""
        from ...native.layer_ops import NATIVE_OPS

        return NATIVE_OPS

    def uninitialized(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """See `Backend.uninitialized`."""
        from ...native.xla_call import uninitialized

        return uninitialized(shape, dtype)

    @property
    def planner(self) -> TilePlanner:
        """Return the planner that writes and reads this backend's plans."""
        return TilePlanner(self.tile_q, self.shared_rows, self.share_prefixes, self.min_saved_tokens, MIN_TILES)

    @classmethod
    def on(cls, devices: Sequence[Any], shape: AttentionShape, deterministic: bool, tuned: Tuned) -> NativeBackend:
        """Return the backend for one CPU device. Raise BackendUnavailableError if native code cannot run.

        It needs a single device, a little-endian processor of 64 bits, the version of XLA's custom-call interface that
        the code was written for, and an LLVM that knows the processor; the error says what is missing. `shape` gives
        the queries of a tile. `deterministic` and `tuned` are not read: results are the same bits in any batch, and
        there are no tuned sizes.
        """
        if len(devices) > 1:
            raise BackendUnavailableError(f"it runs on one CPU device, and there are {len(devices)}")
        if sys.byteorder != "little" or sys.maxsize < 1 << 32:
            raise BackendUnavailableError("it needs a little-endian processor of 64 bits")
        try:
            check_interface(interface_header())
            cpu_features()  # Where the system does not tell them it asks LLVM, which raises if it cannot tell them.
        except Exception as error:  # LLVM raises many types of errors.
            raise BackendUnavailableError(str(error)) from error
        return cls(tile_q=_tile_q_of(shape))

    @classmethod
    def hardware(cls, device: Any) -> str:
        """See `Backend.hardware`: JAX calls every processor "cpu"; the system may not let this process use AMX."""
        return f"{processor()}; {cpu_features()}; llvmlite {llvmlite.__version__}"

    def describe(self) -> str:
        """See `Backend.describe`."""
        return cpu_features()

    def name_code_for_perf(self) -> bool:
        """See `Backend.name_code_for_perf`."""
        if sys.platform != "linux":
            return False
        name_functions_for_perf()
        return True

    def native_names(self) -> list[str]:
        """See `Backend.native_names`."""
        return registered()

    def load_native(self, names: Sequence[str]) -> bool:
        """See `Backend.load_native`."""
        return register_kept(names)

    def layout(self, shape: KVShape) -> NativeLayout:
        """Return the layout of a cache of these sizes; ValueError names a dtype that is not taken."""
        self.refuse_kv_dtype(shape.dtype, "use kv_cache_dtype=auto")
        return NativeLayout.of(shape)

    def check_context_len(self, num_heads: int, layout: KVLayout, dtype: str) -> int:
        """Return the longest row in the check at start: at least 4 pages and 64 tokens, plus part of a page."""
        return max(4 * layout.page_size, 64) + 7

    def with_shared_prefixes(self) -> NativeBackend:
        """See `Backend.with_shared_prefixes`."""
        return replace(self, share_prefixes=True)

    def attend(self, pages: Pages, layout: KVLayout, inputs: LayerInputs) -> tuple[Float[Array, "T N H"], Pages]:
        """Write k and v into the layer's pages, attend, and return the outputs in q's dtype and the new pages.

        T tokens have N = K × G query heads, K KV heads and head size H; head n belongs to KV head n // G. One custom
        call writes k and v, unless they are None; a second one computes attention for all tiles of the plan. `pages`
        and the returned pages are the keys and values of all layers.
        """
        from .attention import attend_tiles  # Only a trace needs what writes native code.
        from .pages import NativePages, write_pages

        q, sinks, step = inputs.q, inputs.sinks, inputs.step
        keys, values = pages
        layer = NativePages(keys, values, inputs.first_page, inputs.options, layout.num_layers)
        if inputs.k is not None and inputs.v is not None:
            keys, values = write_pages(layer, inputs.k, inputs.v, inputs.slots, inputs.kv_scales)
            layer = replace(layer, keys=keys, values=values)
        num_tokens, num_heads, head_size = q.shape
        num_rows, heads = len(step.context_lens), (layout.num_kv_heads, num_heads // layout.num_kv_heads)
        plan = self.planner.sections(step.plan, num_tokens, num_rows, decodes_only=step.decodes_only)
        if inputs.options.window is not None:
            # All rows of a shared tile attend to all of its pages, but a row's window may have passed some of them.
            plan = plan.without_shared_tiles()
        out = attend_tiles(
            layer,
            q.astype(jnp.float32).reshape(num_tokens, *heads, head_size),
            inputs.tables,
            step.positions,
            plan,
            step.num_decode_rows,
            # A tile has up to `tile_q` tokens of one row, or one token of up to `shared_rows` rows.
            max_tokens=max(self.tile_q, min(self.shared_rows, num_rows)),
            sinks=None if sinks is None else sinks.astype(jnp.float32).reshape(heads),
            scales=inputs.kv_scales,
        )
        return out.reshape(q.shape).astype(q.dtype), (layer.keys, layer.values)


def _tile_q_of(shape: AttentionShape) -> int:
    """Return the largest number of queries of a tile: 64, or 32 or 16 where a KV head has many or large query heads.

    Each tile reads all keys and values of its row, which are in the level-2 cache for a short prompt alone. 9/3 heads
    of 64 and 32/8 heads of 128 give 64, and 64/8 heads of 128 give 32.
    """
    elements_per_token = shape.num_heads // shape.num_kv_heads * shape.head_size
    return next((tile_q for tile_q in (64, 32) if tile_q * elements_per_token <= MAX_TILE_ELEMENTS), LEAST_TILE)
