"""Compares the `attend` calls of a module with its spec while JAX traces it: each layer once, in order, as specified.

An engine allocates and frees pages as the spec says: a call that differs would read pages that have been freed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..pallas_kernels.ragged_paged_attention.interface import AttentionMetadata
from ..pallas_kernels.ragged_paged_attention.paged_cache import AttentionCache
from .config.spec import AttentionLayer

LOOP = (
    "in place of the scan write: for i in range(N): "
    "x, cache = jax.tree.map(lambda leaf: leaf[i], blocks)(x, inputs, cache, i)"
)
"""What computes the same as a scan over N stacked blocks, with integers of Python for the layers."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CheckedCache:
    """A cache whose `attend` raises ValueError for a call that the layers of a spec do not describe.

    The number of layers that have attended is a static part of the pytree. So a module may jit, rematerialise or wrap
    its calls: JAX reuses an earlier trace only for a call at the same layer.
    """

    cache: AttentionCache
    layers: tuple[AttentionLayer, ...] = field(metadata={"static": True})
    num_attended: int = field(default=0, metadata={"static": True})
    """Layers whose keys and values are in the cache; the next call is that of the layer with this number."""
    num_scanned: Int[Array, ""] | np.int32 = field(default_factory=lambda: np.int32(0))
    """Calls with a traced layer, as in a scan over layers, whose carry may not change in what is static."""

    @property
    def num_layers_attended(self) -> Int[Array, ""]:
        """Return the number of layers whose keys and values are in the cache."""
        return jnp.int32(self.num_attended) + self.num_scanned

    def attend(
        self,
        layer: int | Int[Array, ""],
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"] | None,
        v: Float[Array, "T K H"] | None,
        step: AttentionMetadata,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Float[Array, " N"] | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "T N H"], CheckedCache]:
        """Check the call against the spec and attend; return the output and the cache for the next layer.

        `layer` is the layer's number in the spec, from 0. In a scan over layers, which must then all be equal, it is
        traced and not compared; `num_attention_calls` counts such calls. `options` are the other options of
        `PagedCache.attend`, which are passed on unchecked. A layer that reads the keys and values of an earlier layer
        passes None for both; as `layer` it may give its own number or the earlier layer's. Raises ValueError for a call
        that differs from the spec: another layer than the next one, another window, soft cap or shape, or sinks in a
        layer that has none by its spec, or no sinks in one that has some.
        """
        options |= {"window": window, "soft_cap": soft_cap, "sinks": sinks}
        if isinstance(layer, jax.core.Tracer):
            self._check_scan()
            self._check_options(0, window, soft_cap, sinks)
            self._check_heads(0, q, k, v, step)
            out, cache = self.cache.attend(layer, _attention_call(q), k, v, step, **options)
            return out, replace(self, cache=cache, num_scanned=self.num_scanned + np.int32(1))
        # If such a layer gives the earlier layer's number, its own number takes its place, and the checks use that.
        if isinstance(layer, np.integer | jax.Array) and jnp.issubdtype(layer.dtype, jnp.integer):
            layer = int(layer)
        if k is None and v is None and isinstance(layer, int) and self.num_attended < len(self.layers):
            layer = self.num_attended if layer == self.layers[self.num_attended].pages_of else layer
        self._check_layer(layer)
        assert isinstance(layer, int)
        self._check_options(layer, window, soft_cap, sinks)
        self._check_heads(layer, q, k, v, step)
        out, cache = self.cache.attend(layer, _attention_call(q), k, v, step, **options)
        return out, replace(self, cache=cache, num_attended=self.num_attended + 1)

    def _check_scan(self) -> None:
        """Raise ValueError unless all layers of the spec are equal and have keys of their own: a scan needs that."""
        if len(set(self.layers)) > 1 or self.layers[0].pages_of is not None:
            wanted = "an integer of Python, since the layers of the spec differ"
            raise ValueError(f"attend: got a traced number for the layer, wanted {wanted}; {LOOP}")

    def _check_layer(self, layer: Any) -> None:
        """Raise ValueError unless `layer` is the number of the layer that attends next, as a Python or numpy integer.

        Layers must attend in the order of the spec, each exactly once: a cache in which `num_attended` layers have
        attended wants the layer with that number. With 2 layers, the numbers 0 and 1 pass, one after the other, and any
        third call raises.
        """
        count = len(self.layers)
        # bool is a subclass of int, and True is no layer's number.
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise ValueError(f"attend: got {layer!r} for the layer, wanted an integer, as the spec counts layers")
        if not 0 <= layer < count:
            raise ValueError(f"attend: got layer {layer}, wanted one of the spec's {count}, from 0 on")
        if layer < self.num_attended:
            fault = f"got layer {layer} a second time"
        elif layer > self.num_attended:
            fault = f"got layer {layer} in a cache that has no keys and values of layer {self.num_attended}"
        else:
            return
        wanted = (
            f"layer {self.num_attended}" if self.num_attended < count else f"no more than the spec's {count} layers"
        )
        way_out = "give each layer its own number, and the cache that the last `attend` returned"
        raise ValueError(f"attend: {fault}, wanted {wanted}: each layer once, in the order of the spec; {way_out}")

    def _check_options(self, layer: int, window: Any, soft_cap: Any, sinks: Any) -> None:
        """Raise ValueError unless window and soft cap are those of the layer's spec, and sinks are there if it says so.

        None stands for full attention, for no soft cap and for no sinks. A traced window or soft cap is refused, since
        it cannot be compared while JAX traces. The values of sinks are weights, and are not looked at.
        """
        spec = self.layers[layer]
        for name, got, wanted, number_type in (
            ("window", window, spec.window, Integral),
            ("soft_cap", soft_cap, spec.soft_cap, Real),
        ):
            if isinstance(got, jax.core.Tracer) or (got is not None and not isinstance(got, number_type)):
                raise ValueError(f"attend: got {got!r} for the {name} of layer {layer}, wanted {wanted}, a constant")
            if got != wanted:
                way_out = f"pass {name}={wanted}, or correct the spec"
                raise ValueError(f"attend: got {name} {got} in layer {layer}, its spec wants {wanted}: {way_out}")
        if (sinks is not None) is not spec.has_sinks:
            fault, way_out = ("no sinks", "pass them") if sinks is None else ("sinks", "pass none")
            says = f"its spec has has_sinks={spec.has_sinks}"
            raise ValueError(f"attend: got {fault} in layer {layer}, {says}: {way_out}, or correct the spec")

    def _check_heads(self, layer: int, q: Array, k: Array | None, v: Array | None, step: AttentionMetadata) -> None:
        """Raise ValueError unless queries, keys and values have the shapes that the layer's spec says.

        The shapes are [tokens, query heads, head size] for queries and [tokens, KV heads, head size] for keys and
        values, where `step` gives the number of tokens. Keys and values must be None for a layer that reads those of
        another layer, `pages_of` in its spec.
        """
        spec, num_tokens = self.layers[layer], step.positions.shape[0]  # A step has one position per token.
        arrays: list[tuple[str, Array | None, tuple[int, ...]]]
        arrays = [("queries", q, (num_tokens, spec.num_heads, spec.head_size))]
        if spec.pages_of is None:
            kv_shape = (num_tokens, spec.num_kv_heads, spec.head_size)
            arrays += [("keys", k, kv_shape), ("values", v, kv_shape)]
        elif k is not None or v is not None:
            fault = f"got keys or values of its own in layer {layer}, wanted None, since the spec says that it reads"
            raise ValueError(f"attend: {fault} those of layer {spec.pages_of}")
        for name, array, shape in arrays:
            if array is None or array.shape != shape:
                got = f"no {name}" if array is None else f"{name} {list(array.shape)}"
                wanted = f"its spec wants {list(shape)} for {num_tokens} tokens"
                raise ValueError(f"attend: got {got} in layer {layer}, {wanted}")


@jax.jit
def _attention_call(q: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
    """Return `q`. JAX records the name of this function in a jaxpr, where `traces.num_attention_calls` counts it."""
    return q


def check_all_layers_attended(cache: Any, layers: tuple[AttentionLayer, ...]) -> None:
    """Raise ValueError unless `cache` is a CheckedCache in which every one of `layers` has attended.

    `cache` is what a module's `__call__` returned, and `layers` are those of its spec. `attend` lets layers attend only
    in order, so the number of those that have attended tells which they are. That number is 0 in a cache to which
    nothing was written, which a module may return by mistake. A cache that has passed through a transform of JAX, such
    as a scan over layers, passes here: `num_layers_attended` is then known to the trace alone.
    """
    if isinstance(cache, CheckedCache) and not isinstance(cache.num_scanned, np.int32):
        return
    if not isinstance(cache, CheckedCache) or not cache.num_attended:
        raise ValueError("the model returns no cache with new keys and values, wanted the one that `attend` gave last")
    if cache.num_attended < len(layers):
        way_out = "attend once in each, and return the cache that `attend` gave last"
        fault = f"the model returns a cache with new keys and values of {cache.num_attended} layers"
        raise ValueError(f"{fault}, wanted those of the spec's {len(layers)}: {way_out}")
