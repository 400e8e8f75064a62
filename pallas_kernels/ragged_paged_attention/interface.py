"""The contract between models, backends and the step: metadata, KV layout, backend, paged cache.

A model calls `cache.attend(layer, q, k, v, step, …)` once per attention layer and knows no page, no slot
and no layout. A backend owns the layout of the pages and the order of work over them. The step fills in
`AttentionMetadata` and calls `Backend.plan` without understanding what it writes.

Nothing here knows a request, a schedule or a chip.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from .kv_scales import KVScales, LayerScales, is_quantized

NULL_PAGE = 0
"""Page that no sequence owns. Padding tokens write its slot 0; what it holds (NaN in the tests) is never used."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of one step stand: one value for every layer of a step.

    Rows are sequences, in the order of their tokens. Rows with exactly one query come first and are
    counted by `num_decode_rows`, so token r belongs to row r for r < num_decode_rows. Padding tokens have
    slot 0; padding rows have no queries and context length 0. Page tables may hold the null page where a
    window has passed; entries beyond a row's context are arbitrary but valid page numbers.
    """

    positions: Int[Array, " T"]
    """Position of each token in its sequence."""
    slots: Int[Array, "groups T"]
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
    """What `Backend.plan` wrote on the host; only the backend reads it."""


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer's pages are: its page-table group, and its index among the layers of that group."""

    group: int
    index: int


@dataclass(frozen=True)
class KVLayout(ABC):
    """Shape of a backend's KV cache: an object that is handed around, never a convention.

    `num_layers` counts the layers of the largest page-table group: layers of different groups share the
    arrays, because a page belongs to one group at a time. Page p of layer index i is entry i × num_pages + p.
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_size: int
    dtype: Any

    @property
    @abstractmethod
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each array of the cache."""

    @property
    @abstractmethod
    def logical_axes(self) -> tuple[tuple[str | None, ...], ...]:
        """Logical axis names of each array, which `sharding` maps to mesh axes."""

    @property
    def stored_dtype(self) -> Any:
        """Of the arrays, which may hold numbers of `dtype` as integers, one or two in each."""
        return self.dtype

    @property
    def unwritten(self) -> Any:
        """An element of the arrays as checks fill them before anything is written: NaN, or the largest number."""
        is_whole = np.issubdtype(self.dtype, np.integer)
        number = np.iinfo(self.dtype).max if is_whole else np.nan
        in_one = np.dtype(self.stored_dtype).itemsize // np.dtype(self.dtype).itemsize
        return np.full(in_one, number, self.dtype).view(self.stored_dtype)[0]

    @property
    def page_bytes(self) -> int:
        """Bytes that one page takes in all layers together."""
        num_values = sum(int(np.prod(shape)) for shape in self.shapes)
        return num_values * np.dtype(self.stored_dtype).itemsize // self.num_pages


def refuse_one_of(k: Array | None, v: Array | None) -> None:
    """ValueError for keys without values, or values without keys: for backends that do not take them."""
    if (k is None) is not (v is None):
        raise ValueError(
            "attend: got one of k and v, wanted both, or neither for a layer that shares another's pages; "
            "values that lie in the keys (MLA, v = None) are not available in this version"
        )


class Backend(Protocol):
    """One way to compute ragged paged attention. Frozen and hashable: it is a static part of the cache."""

    name: str

    def layout(
        self, *, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_size: int, dtype: Any
    ) -> KVLayout:
        """Layout of a cache of that many pages; ValueError names what this backend cannot take."""
        ...

    def plan_len(self, num_tokens: int, num_rows: int) -> int:
        """Length of the plan of a step with room for that many tokens and rows."""
        ...

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
        """Write the order of work for these rows into `out`, int32 of `plan_len(num_tokens, num_rows)`.

        `page_tables` are [groups, tables, P], of which row r has table `table_rows[r]`. Pure numpy, on the host.
        """
        ...

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
        """Write k and v into the pages, attend, and return the output and the new pages."""
        ...


@runtime_checkable
class AttentionCache(Protocol):
    """All that a model knows of a cache: what `PagedCache.attend` does. What it returns goes on to the next layer."""

    def attend(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"] | None,
        v: Float[Array, "T K H"] | None,
        step: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "T N H"], Any]: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """Keys and values of every sequence, in pages. A pytree whose arrays are donated to each step."""

    pages: tuple[Array, ...]
    layout: KVLayout = field(metadata={"static": True})
    layers: tuple[LayerPlace, ...] = field(metadata={"static": True})
    backend: Backend = field(metadata={"static": True})
    scales: KVScales | None = None
    """Of pages of one byte a number; None for all others."""
    mesh: Mesh | None = field(default=None, metadata={"static": True})
    """Over whose one axis the KV heads are spread, each chip with the query heads of its own; None for one chip.
    `backend` is then made for what lies on one of them, `layout` for all."""

    def attend(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"] | None,
        v: Float[Array, "T K H"] | None,
        step: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "T N H"], PagedCache]:
        """Write this step's keys and values of `layer`, then attend to all that its rows may see.

        A query at position p sees positions max(0, p − window + 1) … p. Scores are
        `soft_cap × tanh(scale × q·k / soft_cap)` (the cap only if given); `sinks` are per-head logits that
        take part in the softmax's denominator and carry no value. k = v = None writes nothing: the layer
        shares the pages of the layer it names. v = None alone means that the values are the first lanes of
        the keys (MLA); ValueError from a backend that does not take it. ValueError, too, for a window below 1,
        a soft cap that is not positive, and arrays that do not fit the cache. Returns zeros or any finite values
        for padding tokens whose queries are finite: nobody reads them. The written cache replaces `self`, which
        is donated.

        Source: Kwon et al. 2023, arXiv:2309.06180 (paged attention); Milakov & Gimelshein 2018,
        arXiv:1805.02867 (online softmax).
        """
        if window is not None and window < 1:
            raise ValueError(f"attend: got a window of {window}, wanted at least 1, the query's own; None sees all")
        if soft_cap is not None and soft_cap <= 0:
            raise ValueError(f"attend: got a soft cap of {soft_cap}, wanted a positive number; None caps nothing")
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"attend: got layer {layer}, wanted one of the cache's {len(self.layers)}, from 0 on")
        self._refuse_misfits(q, {"k": k, "v": v}, sinks)
        if is_quantized(self.layout.dtype) is (self.scales is None):
            raise ValueError(
                f"attend: pages of {np.dtype(self.layout.dtype).name} {'without' if self.scales is None else 'with'} "
                "scales; PagedCache.scales is given for int8 and float8_e4m3fn, and for no other dtype"
            )
        if self.scales is not None:
            of_cache = (len(self.layers), self.layout.num_kv_heads)
            for name, scales in (("k", self.scales.k), ("v", self.scales.v)):
                if scales.shape != of_cache:
                    raise ValueError(
                        f"attend: got scales of {name} {list(scales.shape)}, wanted {list(of_cache)}: one for each "
                        "layer and KV head of the cache"
                    )
        if self.mesh is not None:
            options = {"scale": scale, "window": window, "soft_cap": soft_cap}
            return self._attend_on_chips(layer, q, k, v, step, sinks, options)
        out, pages = self.backend.attend(
            self,
            self.layers[layer],
            q,
            k,
            v,
            step,
            kv_scales=None if self.scales is None else self.scales.of_layer(layer),
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
        )
        return out, dataclasses.replace(self, pages=pages)

    def _attend_on_chips(
        self, layer: int, q: Array, k: Array | None, v: Array | None, step: Any, sinks: Array | None, options: Any
    ) -> tuple[Array, PagedCache]:
        """Attend on every chip to its own heads: nothing has to be told to the others."""
        mesh, layout = self.mesh, self.layout
        assert mesh is not None
        (axis,) = mesh.axis_names
        if layout.num_kv_heads % mesh.size:
            raise ValueError(
                f"attend: got {layout.num_kv_heads} KV heads for {mesh.size} chips, wanted a multiple: each has some"
            )
        local_layout = dataclasses.replace(layout, num_kv_heads=layout.num_kv_heads // mesh.size)
        whole, by_head = PartitionSpec(), PartitionSpec(None, axis)
        by_axes = tuple(
            PartitionSpec(*(axis if name == "kv_heads" else None for name in axes)) for axes in layout.logical_axes
        )

        def on_a_chip(pages: Any, scales: Any, q: Any, k: Any, v: Any, step: Any, sinks: Any) -> Any:
            cache = dataclasses.replace(self, pages=pages, scales=scales, layout=local_layout, mesh=None)
            out, cache = cache.attend(layer, q, k, v, step, sinks=sinks, **options)
            return out, cache.pages

        out, pages = jax.shard_map(
            on_a_chip,
            mesh=mesh,
            in_specs=(by_axes, by_head, by_head, by_head, by_head, whole, PartitionSpec(axis)),
            out_specs=(by_head, by_axes),
            check_vma=False,  # Kernels do not say how their results vary over the mesh.
        )(self.pages, self.scales, q, k, v, step, sinks)
        return out, dataclasses.replace(self, pages=pages)

    def _refuse_misfits(self, q: Array, new: dict[str, Array | None], sinks: Array | None) -> None:
        """ValueError for shapes that are not of this cache: a kernel would read and write beyond its memory."""
        layout = self.layout
        wanted = f"{layout.num_kv_heads} KV heads of {layout.head_size}"
        if q.ndim != 3 or q.shape[2] != layout.head_size or q.shape[1] % layout.num_kv_heads or not q.shape[1]:
            raise ValueError(
                f"attend: got queries {list(q.shape)}, wanted [tokens, heads, {layout.head_size}] with a multiple of "
                f"{layout.num_kv_heads} heads: the cache is of {wanted}"
            )
        for name, x in new.items():
            if x is not None and x.shape != (q.shape[0], layout.num_kv_heads, layout.head_size):
                raise ValueError(
                    f"attend: got {name} {list(x.shape)}, wanted one of {wanted} for each of {q.shape[0]} tokens"
                )
        if sinks is not None and sinks.shape != (q.shape[1],):
            raise ValueError(f"attend: got sinks {list(sinks.shape)}, wanted one for each of {q.shape[1]} query heads")
