"""The contract between models, backends and the step: metadata, KV layout, backend.

A model calls `PagedCache.attend` (paged_cache) once per attention layer and knows no page, no slot and no layout. A
backend owns the layout of the pages and the order of work over them. The step fills in `AttentionMetadata` and calls
`Backend.plan` without understanding what it writes.

Nothing here knows a request, a schedule or a chip.
"""

from __future__ import annotations

import dataclasses
import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..layer_ops import XLA_OPS, LayerOps
from .kv_scales import LayerScales, kv_cache_dtype

Pages = tuple[Array, ...]
"""The arrays of a cache, of the shapes that its `KVLayout` lists: pages of all layers."""
Tuned = tuple[Any, ...]
"""Entries of a tuned table, as `Backend.read_tuned` of the backend has returned them."""
NULL_PAGE = 0
"""Page that no sequence owns. Padding tokens have its slot 0: a backend writes them there, in any order, or nowhere.
What the page holds (NaN in the tests) is never used."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of one step stand: one value for every layer of a step, all arrays int32 on the device.

    Rows are sequences, in the order of their tokens. Rows with exactly one query come first and are
    counted by `num_decode_rows`, so token r belongs to row r for r < num_decode_rows. Padding tokens have
    slot 0; padding rows have no queries and context length 0. Entries of a page table beyond a row's context,
    and those that its window has passed, are arbitrary but valid page numbers, the null page's among them.
    """

    positions: Int[Array, " T"]
    """Position of each token in its sequence."""
    slot_mapping: Int[Array, "groups T"]
    """page × page size + offset that each token's key and value are written to, per page-table group."""
    query_starts: Int[Array, " R1"]
    """First token of each row, R + 1 values: row r holds tokens query_starts[r] to query_starts[r + 1]."""
    context_lens: Int[Array, " R"]
    """Tokens of each row known after this step's writes: cached ones and this step's queries."""
    page_tables: Int[Array, "groups R P"]
    """Page numbers of each row in order of position, per page-table group."""
    num_rows: Int[Array, ""]
    num_decode_rows: Int[Array, ""]
    plan: Int[Array, " plan"]
    """Output of `Backend.plan`, written on the host; only the backend reads it."""
    decodes_only: bool = field(default=False, metadata={"static": True})
    """Whether every row of the step has exactly one query. Static: such steps have programs of their own, which contain
    no attention of prefill rows."""


@dataclass(frozen=True, slots=True)
class PlanRows:
    """The rows of one step that a backend plans its work for: numpy arrays on the host, rows in the step's order."""

    query_lens: np.ndarray
    """[R] int32: queries of each row; rows with exactly one come first."""
    context_lens: np.ndarray
    """[R] int32: tokens of each row after this step, or the most that its context grows to while the plan is in use."""
    num_decode_rows: int
    """Rows with exactly one query."""
    page_tables: np.ndarray
    """[groups, tables, P] int32: page numbers of the page-table groups of full attention, of this step's rows and of
    others. Rows share no work in layers with a window, whose tables hold old numbers where it has passed."""
    table_rows: np.ndarray
    """[R] integers: row r has the page table `page_tables[:, table_rows[r]]`."""
    page_size: int
    """Slots of a page."""
    padded_tokens: int
    """Tokens that the step is padded to."""
    padded_rows: int
    """Rows that the step is padded to."""
    decodes_only: bool = False
    """Whether the step's program is one for decode rows only; then each row has exactly one query."""


@dataclass(frozen=True)
class AttendOptions:
    """Options that distinguish the attention of one layer, static in compiled programs. See `PagedCache.attend`."""

    scale: float
    """Factor of the scores."""
    window: int | None = None
    """Positions that a query attends to, its own included; None for all up to its own."""
    soft_cap: float | None = None
    """Scores are bounded to ± this number by a hyperbolic tangent; None for no bound."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerInputs:
    """Inputs of one attention layer in a step. Arrays are those of `PagedCache.attend`."""

    q: Float[Array, "T N H"]
    k: Float[Array, "T K H"] | None
    v: Float[Array, "T K H"] | None
    sinks: Float[Array, " N"] | None
    kv_scales: LayerScales | None
    """Scales of the layer's keys and values, for pages of one byte a number."""
    first_page: Int[Array, ""]
    """`KVLayout.entry` of the layer's page 0."""
    slots: Int[Array, " T"]
    """`AttentionMetadata.slot_mapping` of the layer's page-table group."""
    tables: Int[Array, "R P"]
    """`AttentionMetadata.page_tables` of the layer's page-table group."""
    step: AttentionMetadata
    options: AttendOptions = field(metadata={"static": True})


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer's pages are: layers with the same page tables form a page-table group."""

    table_group: int
    """Index of the layer's page-table group."""
    index: int
    """Index of the layer among the layers of its group."""


@dataclass(frozen=True)
class KVShape:
    """Sizes of a KV cache, whatever the layout of its pages.

    `num_layers` counts the layers of the largest page-table group: layers of different groups share the
    arrays, because a page belongs to one group at a time.
    """

    num_layers: int
    num_pages: int
    """Pages of each layer, the null page among them."""
    page_size: int
    """Slots of a page: the tokens whose keys and values it holds."""
    num_kv_heads: int
    head_size: int
    dtype: Any
    """Dtype of keys and values, any that numpy takes the name of; kept as a numpy dtype."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))


@dataclass(frozen=True)
class KVLayout(KVShape):
    """A KV cache as a backend lays it out: an object that is handed around, never a convention.

    This class lays keys and values out as an array each, [L × C, K, Z, H], with the pages of one layer after those of
    another; subclasses do it in other ways.
    """

    @classmethod
    def of(cls, shape: KVShape, **added_fields: Any) -> Self:
        """Return the layout of a cache of these sizes; `added_fields` are those that a subclass has beside them."""
        return cls(**{field.name: getattr(shape, field.name) for field in dataclasses.fields(KVShape)}, **added_fields)

    def entry(self, layer: Any, page: Any) -> Any:
        """Return the entry of each array that is this page of a layer, by the layer's index; both may be arrays."""
        return layer * self.num_pages + page

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shape of each array of the cache."""
        return ((self.num_layers * self.num_pages, self.num_kv_heads, self.page_size, self.head_size),) * 2

    @property
    def logical_axes(self) -> tuple[tuple[str | None, ...], ...]:
        """Return the logical axis names of each array, which `sharding` maps to mesh axes; axis 1 counts KV heads."""
        return tuple((None, "kv_heads", *[None] * (len(shape) - 2)) for shape in self.shapes)

    @property
    def stored_dtype(self) -> Any:
        """Return the dtype of the arrays, which may hold numbers of `dtype` as integers, one or two in each."""
        return self.dtype

    @property
    def unwritten(self) -> Any:
        """Return the element that checks fill the arrays with before any write: NaN, or the largest integer.

        Reads of slots that were never written then show in the results. The element is a scalar of `stored_dtype`,
        which may hold the bits of several numbers of `dtype`; then each of them has that value. Two bfloat16
        numbers in a uint32 are 0x7FC07FC0.
        """
        is_integer = np.issubdtype(self.dtype, np.integer)
        number = np.iinfo(self.dtype).max if is_integer else np.nan
        numbers_per_element = np.dtype(self.stored_dtype).itemsize // np.dtype(self.dtype).itemsize
        return np.full(numbers_per_element, number, self.dtype).view(self.stored_dtype)[0]

    @property
    def page_bytes(self) -> int:
        """Return the bytes that one page takes in all arrays and all L layers together."""
        num_values = sum(int(np.prod(shape)) for shape in self.shapes)
        return num_values * np.dtype(self.stored_dtype).itemsize // self.num_pages


@dataclass(frozen=True)
class AttentionShape:
    """The properties of a model that a backend is chosen for: heads on one device, windows, dtype of the pages."""

    num_heads: int
    """Query heads, a multiple of the KV heads."""
    num_kv_heads: int
    head_size: int
    windows: tuple[int | None, ...] = ()
    """Window of each attention layer; None for full attention."""
    kv_dtype: str = "bfloat16"
    has_soft_cap: bool = False
    """Whether scores are bounded in some layer."""
    has_sinks: bool = False
    """Whether a logit joins the softmax of each query head in some layer."""

    def kv_shape(self, page_size: int, *, num_layers: int = 1, num_pages: int = 1) -> KVShape:
        """Return the sizes of a cache for such a model."""
        return KVShape(num_layers, num_pages, page_size, self.num_kv_heads, self.head_size, self.kv_dtype)


class BackendUnavailableError(ValueError):
    """A backend cannot serve on this machine, whatever the model. The text says why, as a clause."""


class CheckGuard(enum.Enum):
    """What guards a start against a kernel that hangs or crashes while it is compared with numpy."""

    NONE = "none"
    WATCHDOG = "watchdog"
    """The process ends if there is no answer in time. A TPU belongs to one process at a time."""
    CHILD = "child"
    """The comparison is made in a subprocess, whatever happens to it. It is of attention alone: such a backend leaves
    products and norms to XLA."""


class PageTableLimit(NamedTuple):
    """Room that a device has for page tables, in int32 entries."""

    max_entries: int
    """Entries that fit, those of `row_entries` among them."""
    row_entries: int
    """Entries that each row takes beside its page numbers."""


class Backend(ABC):
    """One way to compute ragged paged attention, and all that a start has to know of it.

    Instances are frozen dataclasses: a backend is a static part of the cache. Class attributes hold for every instance.
    """

    name: ClassVar[str]
    """Value of `attention_backend` that asks for this backend."""
    block_sizes: ClassVar[tuple[int, ...]] = (64,)
    """Tokens of a page: the default first, then the sizes that pages may grow to where page tables are limited."""
    kv_dtypes: ClassVar[tuple[str, ...]]
    """Dtypes of pages that are taken."""
    page_table_limit: ClassVar[PageTableLimit | None] = None
    """Room for page tables on the device; None where nothing but memory limits them."""
    needs_check: ClassVar[bool] = True
    """Whether a start compares this backend with the `xla` backend on the device before it serves."""
    check_guard: ClassVar[CheckGuard] = CheckGuard.NONE
    """What guards a start against a comparison that does not come back."""
    has_own_products: ClassVar[bool] = False
    """Whether products and norms are native code, and matrices may stay the bytes of codes that a file has."""
    tuned_table: ClassVar[str | None] = None
    """Name of the file in the user's cache with the sizes that `jpaged tune` found; None where nothing is tuned."""

    @property
    def layer_ops(self) -> LayerOps:
        """Return the products, norms and weight storage that go with this backend."""
        return XLA_OPS

    def uninitialized(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return an array whose elements may have any value; see `LayerOps.uninitialized`."""
        return self.layer_ops.uninitialized(shape, dtype)

    @classmethod
    def read_tuned(cls, path: Path) -> Tuned:
        """Return the entries of a tuned table. ValueError names the file and the entry that cannot be used."""
        raise NotImplementedError(f"nothing is tuned for the {cls.name} backend")

    @classmethod
    def hardware(cls, device: Any) -> str:
        """Return the chip or processor that a check of this backend holds for."""
        return str(device.device_kind)

    def describe(self) -> str:
        """Return, for the log, the machine's features that the backend uses, or what it lacks there; else nothing."""
        return ""

    def name_code_for_perf(self) -> bool:
        """Have code that is compiled from now on named for Linux's profiler, perf; return whether the backend can."""
        return False

    def native_names(self) -> Sequence[str]:
        """Return the names of this backend's own code that programs have been traced with, as custom calls."""
        return ()

    def load_native(self, names: Sequence[str]) -> bool:
        """Load code of these names, which an earlier process compiled, for a program that calls it; return whether all
        of it is there.
        """
        return not names

    @classmethod
    def for_devices(
        cls, devices: Sequence[Any], shape: AttentionShape, *, deterministic: bool = False, tuned: Tuned = ()
    ) -> Self:
        """Return the backend for models of this shape on these JAX devices of one kind, over pages of the default size.

        `shape` counts the heads on one device. `deterministic`: a row's bits must not depend on the other rows of its
        step. `tuned` are entries that `read_tuned` returned. Raises ValueError if this backend cannot take the shape,
        the device or pages of the default size, with a text that says what to do instead, and BackendUnavailableError
        if this machine lacks something, whatever the model.
        """
        backend = cls.on(devices, shape, deterministic, tuned)
        # The layout itself is not needed yet: it is made here only to raise ValueError.
        backend.layout(shape.kv_shape(cls.block_sizes[0]))
        return backend

    @classmethod
    @abstractmethod
    def on(cls, devices: Sequence[Any], shape: AttentionShape, deterministic: bool, tuned: Tuned) -> Self:
        """Return the backend for these devices, without checking that it can lay out pages of the default size.

        `for_devices` calls this and checks the pages; the arguments and errors are the same.
        """

    @abstractmethod
    def layout(self, shape: KVShape) -> KVLayout:
        """Return the layout of a cache of these sizes; raise ValueError if this backend cannot take one of them."""

    @abstractmethod
    def plan_len(self, num_tokens: int, num_rows: int, *, decodes_only: bool = False) -> int:
        """Return the length of the plan of a step that is padded to that many tokens and rows.

        `decodes_only`: the step's program takes no rows with more than one query.
        """

    @abstractmethod
    def plan(self, rows: PlanRows, out: np.ndarray) -> None:
        """Write the backend's plan for these rows, for example its tiles of queries, into `out`, by numpy on the host.

        `out` is int32, of `plan_len` numbers, all zeros.
        """

    @abstractmethod
    def attend(self, pages: Pages, layout: KVLayout, inputs: LayerInputs) -> tuple[Float[Array, "T N H"], Pages]:
        """Write k and v into the layer's pages, attend, and return the output and the new pages.

        `pages` holds the arrays that `layout` lists, each with the pages of all layers. This layer's page 0 is entry
        `inputs.first_page`, a traced value, so that one trace serves all layers with the same options. If k and v are
        None, nothing is written. `PagedCache.attend` has checked that the inputs fit the cache. Outputs of padding
        tokens may be any finite numbers.
        """

    def check_context_len(self, num_heads: int, layout: KVLayout, dtype: str) -> int:
        """Return the tokens of the longest row in the check at start: enough for every code path of this backend."""
        return 1000

    def with_shared_prefixes(self) -> Backend | None:
        """Return this backend with attention to shared first pages done once for all rows that share them.

        Return None if this backend cannot do so.
        """
        return None

    def refuse_kv_dtype(self, dtype: np.dtype, way_out: str) -> None:
        """Raise ValueError unless this backend takes pages of `dtype`; the text has the values of the option."""
        self.refuse_unlisted("kv_cache_dtype", kv_cache_dtype(dtype), [*map(kv_cache_dtype, self.kv_dtypes)], way_out)

    def refuse_unlisted(self, name: str, got: object, allowed: Sequence[object], way_out: str) -> None:
        """Raise ValueError unless `got`, the value of option `name`, is allowed; `way_out` says what to do instead.

        The text names the option, the value, this backend and all allowed values.
        """
        if got not in allowed:
            raise ValueError(
                f"{name}: got {got}, the {self.name} backend takes {', '.join(map(str, allowed))}; {way_out}"
            )
