"""The paged KV cache: the one protocol between models and attention backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from .interface import AttendOptions, AttentionMetadata, Backend, KVLayout, LayerInputs, LayerPlace, Pages
from .kv_scales import KVScales, is_quantized


@runtime_checkable
class AttentionCache(Protocol):
    """The part of a cache that a model knows: `PagedCache.attend`. The cache returned goes on to the next layer."""

    @property
    def attend(self) -> Callable[..., tuple[Array, Any]]: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """Keys and values of every sequence, in pages. A pytree whose arrays are donated to each step."""

    pages: Pages
    layout: KVLayout = field(metadata={"static": True})
    layers: tuple[LayerPlace, ...] = field(metadata={"static": True})
    backend: Backend = field(metadata={"static": True})
    scales: KVScales | None = None
    """Scales of pages that hold one byte a number; None for all other pages."""
    mesh: Mesh | None = field(default=None, metadata={"static": True})
    """Mesh over whose devices the KV heads are spread, each with their query heads; None for one device. `backend` is
    then made for the heads of one device, `layout` for all of them."""
    mesh_axis: str = field(default="tensor", metadata={"static": True})
    """The axis of the mesh that the KV heads are spread over."""

    def attend(
        self,
        layer: int | Int[Array, ""],
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
        """Write this step's keys and values of `layer`, then attend from every query to its row's (sequence's) keys.

        `layer` may be traced, as in a scan over layers, where all layers have the same page tables.
        Return outputs [T, N, H] and the written cache, which replaces `self`: that is donated. T tokens of the step,
        N query heads, K KV heads, head size H. A query at position p attends to positions max(0, p − window + 1) … p,
        without a window to 0 … p. Scores are scale × q·k, or with a soft cap soft_cap × tanh(scale × q·k ÷ soft_cap).
        `sinks` are per-head logits that take part in the softmax's denominator and carry no value. If k and v are
        None, nothing is written: a model layer without keys of its own attends to the pages of `layer`. v = None alone
        would mean that the values are the first lanes of the keys (MLA), which is not supported. Raises ValueError for
        that, for a window below 1, a soft cap that is not positive, a layer or arrays that do not fit the cache.
        Outputs of padding tokens whose queries are finite are zeros or any finite values. With a mesh, each device
        attends with its own heads.

        Source: Kwon et al. 2023, arXiv:2309.06180 (paged attention); Milakov & Gimelshein 2018,
        arXiv:1805.02867 (online softmax).
        """
        options = AttendOptions(scale, window, soft_cap)
        self._refuse_options(layer, options)
        self._refuse_misfits(q, k, v, sinks)
        self._refuse_scales()
        if self.mesh is not None:
            return self._attend_on_devices(layer, q, k, v, step, sinks, options)
        table_group, first_page = self._place(layer)
        if self.scales is not None:
            q, k, v = self.scales.to_pages(layer, q, k, v)
        inputs = LayerInputs(
            q=q,
            k=k,
            v=v,
            sinks=sinks,
            kv_scales=None if self.scales is None else self.scales.of_layer(layer),
            first_page=first_page,
            slots=step.slot_mapping[table_group],
            tables=step.page_tables[table_group],
            step=step,
            options=options,
        )
        out, pages = _attend_layer(self.backend, self.layout, self.pages, inputs)
        if self.scales is not None:
            out = self.scales.from_pages(layer, out)
        return out, dataclasses.replace(self, pages=pages)

    def _place(self, layer: int | Int[Array, ""]) -> tuple[int, Int[Array, ""]]:
        """Return the index of a layer's page-table group, and the index of the layer's page 0 in the arrays of pages.

        Raises ValueError for a traced layer in a cache of several groups, since a program reads one group's tables.
        """
        if not isinstance(layer, jax.core.Tracer):
            place = self.layers[layer]
            return place.table_group, jnp.int32(self.layout.entry(place.index, 0))
        table_group, *others = {place.table_group for place in self.layers}
        if others:
            got, way_out = "a traced number for the layer", "layers with different windows need their own numbers"
            raise ValueError(f"attend: got {got}, wanted an integer of Python: {way_out}")
        first_pages = jnp.array([self.layout.entry(place.index, 0) for place in self.layers], jnp.int32)
        return table_group, first_pages[layer]

    def _attend_on_devices(
        self,
        layer: int | Int[Array, ""],
        q: Array,
        k: Array | None,
        v: Array | None,
        step: AttentionMetadata,
        sinks: Array | None,
        options: AttendOptions,
    ) -> tuple[Array, PagedCache]:
        """Do what `attend` does with a cache whose KV heads are spread over the devices of a mesh.

        This is tensor parallelism over heads by `shard_map`: each device attends with its own KV heads and their query
        heads, and the devices exchange nothing. Inside, `attend` is called with a cache that is one device's part and
        has no mesh. The metadata `step` is the same on all devices. Return the outputs [T, N, H] of all heads, sharded
        like the queries, and the written cache. Raises ValueError if the number of KV heads is no multiple of the
        number of devices.
        """
        mesh, layout, axis = self.mesh, self.layout, self.mesh_axis
        assert mesh is not None  # `attend` calls this only with a mesh.
        num_devices = mesh.shape[axis]
        if layout.num_kv_heads % num_devices:
            raise ValueError(
                f"attend: got {layout.num_kv_heads} KV heads for {num_devices} chips, wanted a multiple: each has some"
            )
        local_layout = dataclasses.replace(layout, num_kv_heads=layout.num_kv_heads // num_devices)
        replicated, by_head = PartitionSpec(), PartitionSpec(None, axis)  # Axis 1 of q, k, v and scales counts heads.
        # The layout says which axis of each array of pages counts KV heads.
        page_specs = tuple(
            PartitionSpec(*(axis if name == "kv_heads" else None for name in axes)) for axes in layout.logical_axes
        )

        def attend_on_device(
            pages: Pages,
            scales: KVScales | None,
            q: Array,
            k: Array | None,
            v: Array | None,
            step: AttentionMetadata,
            sinks: Array | None,
        ) -> tuple[Array, Pages]:
            """Attend with the parts of the arguments that lie on one device, and return outputs and pages."""
            cache = dataclasses.replace(self, pages=pages, scales=scales, layout=local_layout, mesh=None)
            out, cache = cache.attend(layer, q, k, v, step, sinks=sinks, **dataclasses.asdict(options))
            return out, cache.pages

        out, pages = jax.shard_map(
            attend_on_device,
            mesh=mesh,
            in_specs=(page_specs, by_head, by_head, by_head, by_head, replicated, PartitionSpec(axis)),
            out_specs=(by_head, page_specs),
            check_vma=False,  # JAX cannot check this: kernels do not say how their results vary over the mesh.
        )(self.pages, self.scales, q, k, v, step, sinks)
        return out, dataclasses.replace(self, pages=pages)

    def _refuse_options(self, layer: int | Int[Array, ""], options: AttendOptions) -> None:
        """Raise ValueError for a window below 1, a soft cap that is not positive, or a layer that the cache lacks.

        None stands for no window and for no soft cap. `layer` is an index among the cache's layers, from 0 on.
        """
        window, soft_cap = options.window, options.soft_cap
        if window is not None and window < 1:
            raise ValueError(
                f"attend: got a window of {window}, wanted at least 1, the query's own; None for no window"
            )
        if soft_cap is not None and soft_cap <= 0:
            raise ValueError(f"attend: got a soft cap of {soft_cap}, wanted a positive number; None caps nothing")
        if not isinstance(layer, jax.core.Tracer) and not 0 <= layer < len(self.layers):
            raise ValueError(f"attend: got layer {layer}, wanted one of the cache's {len(self.layers)}, from 0 on")

    def _refuse_misfits(self, q: Array, k: Array | None, v: Array | None, sinks: Array | None) -> None:
        """Raise ValueError for shapes that do not fit this cache: a kernel would read and write beyond its memory.

        `q` is [T, N, H]: T tokens, N query heads, a positive multiple of the K KV heads, and head size H. `k` and `v`
        are [T, K, H], or both None; `sinks` is [N] or None. K and H are the cache's.
        """
        if (k is None) is not (v is None):
            raise ValueError(
                "attend: got one of k and v, wanted both, or neither for a layer that shares another's pages; values "
                "that lie in the keys (MLA, v = None) are not supported"
            )
        layout = self.layout
        wanted = f"{layout.num_kv_heads} KV heads of {layout.head_size}"
        if q.ndim != 3 or q.shape[2] != layout.head_size or q.shape[1] % layout.num_kv_heads or not q.shape[1]:
            raise ValueError(
                f"attend: got queries {list(q.shape)}, wanted [tokens, heads, {layout.head_size}] with a multiple of "
                f"{layout.num_kv_heads} heads: the cache is of {wanted}"
            )
        for name, x in (("k", k), ("v", v)):
            if x is not None and x.shape != (q.shape[0], layout.num_kv_heads, layout.head_size):
                raise ValueError(
                    f"attend: got {name} {list(x.shape)}, wanted one of {wanted} for each of {q.shape[0]} tokens"
                )
        if sinks is not None and sinks.shape != (q.shape[1],):
            raise ValueError(f"attend: got sinks {list(sinks.shape)}, wanted one for each of {q.shape[1]} query heads")

    def _refuse_scales(self) -> None:
        """Raise ValueError unless pages of one byte a number, and only these, have scales of the right shape.

        Scales of keys and of values are [L, K] each: one for each layer and KV head of the cache. One-byte dtypes are
        int8 and float8_e4m3fn.
        """
        # An error if quantized pages lack scales, and also if other pages have some.
        if is_quantized(self.layout.dtype) is (self.scales is None):
            raise ValueError(
                f"attend: pages of {np.dtype(self.layout.dtype).name} {'without' if self.scales is None else 'with'} "
                "scales; PagedCache.scales is given for int8 and float8_e4m3fn, and for no other dtype"
            )
        if self.scales is not None:
            wanted = (len(self.layers), self.layout.num_kv_heads)
            for name, scales in (("k", self.scales.k), ("v", self.scales.v)):
                if scales.shape != wanted:
                    raise ValueError(
                        f"attend: got scales of {name} {list(scales.shape)}, wanted {list(wanted)}: one for each "
                        "layer and KV head of the cache"
                    )
            by_channel = (*wanted, self.layout.head_size)
            for name, channels in (("keys", self.scales.key_channels), ("values", self.scales.value_channels)):
                for field_name, array in (channels._asdict() if channels else {}).items():
                    if array.shape != by_channel:
                        raise ValueError(
                            f"attend: got {field_name} of {name} {list(array.shape)}, wanted {list(by_channel)}: one "
                            "for each layer, KV head and channel of the cache"
                        )


@partial(jax.jit, static_argnums=(0, 1))
def _attend_layer(
    backend: Backend, layout: KVLayout, pages: Pages, inputs: LayerInputs
) -> tuple[Float[Array, "T N H"], Pages]:
    """Call the backend in a jitted function, which JAX traces once for all layers with the same static options."""
    return backend.attend(pages, layout, inputs)
