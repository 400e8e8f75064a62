"""Calls of a model that programs share: for hidden states, and for logits on all devices."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from ..models.inputs import ModelInputs
from ..models.weights.weight_state import KeptState
from ..models.weights.weights import UnbuiltGraph
from ..sharding import TENSOR_AXIS

if TYPE_CHECKING:
    from flax import nnx

    from ..models.served import ModelGraph

Cache = TypeVar("Cache")


class Model(Protocol):
    """A module that a step runs: a Decoder, or a caller's own."""

    def __call__(self, inputs: ModelInputs, cache: Cache) -> tuple[Float[Array, "T D"], Cache]:
        """Return the hidden states of the step's tokens, and the cache with their keys and values."""
        ...

    def logits(self, hidden_RD: Float[Array, "R D"]) -> Float[Array, "R X"]:
        """Return the logits of hidden states; on a mesh each device has those of a part of the vocabulary."""
        ...


def merged_model(graph: ModelGraph | UnbuiltGraph, weights: nnx.State | KeptState) -> Model:
    """Return the model that `graph` and `weights` are the two halves of.

    `jax.tree.map` rebuilds the state, so that the model's nnx variables are new and belong to the present JAX trace.
    `nnx.merge` alone would keep the state's variables. Another trace may have made these, and nnx's transforms would
    refuse them.
    """
    from flax import nnx

    from ..models.served import ModuleGraph

    if isinstance(graph, UnbuiltGraph):
        graph, weights = graph.built.graph, graph.state(weights)
    weights = jax.tree.map(lambda leaf: leaf, weights)
    return graph.merge(weights) if isinstance(graph, ModuleGraph) else nnx.merge(graph, weights)


def hidden_and_counts(
    model: Model, inputs: ModelInputs, cache: Any
) -> tuple[Float[Array, "T D"], Any, Int[Array, "L E"] | None]:
    """Return the hidden states of a step's tokens, the written cache, and how many tokens have chosen each expert.

    The numbers, by layer, are those of the tokens `inputs.counted`; they are None where nothing is counted.
    """
    if inputs.counted is None:
        return *model(inputs, cache), None
    from ..models.decoder import Decoder

    assert isinstance(model, Decoder), "experts of a caller's own module are not known"
    return model.with_expert_tokens(inputs, cache)


def whole_logits(model: Model, hidden_RD: Float[Array, "R D"], mesh: Mesh | None) -> Float[Array, "R V"]:
    """Return the logits of the whole vocabulary on every device, in float32 whatever dtype the model returns.

    On a mesh each device computes its share of the logits [R, X], where X is V padded to equal shares, and gathers the
    other shares, so that all devices draw the same tokens. The gather stands outside of the sampler's loops and
    branches, because the compiler for TPUs hangs on communication in a branch. It is explicit, because XLA would
    otherwise gather the weights of the model's head. Without a mesh the model's logits are [R, V] already.
    """
    logits_RX = model.logits(hidden_RD)
    if mesh is None:
        return logits_RX.astype(jnp.float32)
    gather = partial(lax.all_gather, axis_name=TENSOR_AXIS, axis=1, tiled=True)
    by_vocab, whole = PartitionSpec(None, TENSOR_AXIS), PartitionSpec()
    gather_on_mesh = jax.shard_map(gather, mesh=mesh, in_specs=by_vocab, out_specs=whole, check_vma=False)
    # The slice cuts off the padding of a Decoder; a caller's own module has no `vocab_size` and no padding. The layout
    # is set to row-major, because a GPU's sampler sums along rows: XLA would leave the logits column-major, as they
    # were gathered.
    whole_RV = gather_on_mesh(logits_RX)[:, : getattr(model, "vocab_size", None)].astype(jnp.float32)
    return with_layout_constraint(whole_RV, Layout((0, 1)))
