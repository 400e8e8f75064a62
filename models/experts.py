"""Sparse MLPs: a router chooses experts for each row, whose outputs are added up.

Source: Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021, arXiv:2101.03961.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ..pallas_kernels.expert_shares import add_experts_over_devices
from ..pallas_kernels.grouped import Routing
from ..pallas_kernels.layer_ops import ExpertProducts, Product, RowNorm, SharedProducts
from ..pallas_kernels.row_sums import sum_by_halves
from ..sharding import TENSOR_AXIS
from .config.decoder import DecoderConfig
from .config.experts import ExpertsConfig
from .config.shares import Run
from .inputs import ModelInputs
from .layers import Linear, WeightMaker, stored_matrix

ROWS_APART = jax.__version_info__ < (0, 11)
"""Whether a CPU computes exponentials row by row."""


def route(
    logits: Float[Array, "T E"],
    config: ExpertsConfig,
    *,
    correction_bias: Float[Array, " E"] | None = None,
) -> Routing:
    """Return the experts that each row chooses, by its router's logits in float32; of equal scores the lower number.

    The best come first. `correction_bias` is added to the scores by which experts are chosen, and not to their weights.
    A softmax alone keeps the order of the logits, which then choose themselves: unequal logits may have equal scores
    in float32. The weights of a row without any finite logit are NaN.
    """
    scores = _softmax(logits) if config.scoring == "softmax" else _sigmoid(logits)
    wanted = scores if correction_bias is None else scores + correction_bias[None]
    if config.scoring == "softmax" and correction_bias is None and config.num_groups == 1:
        wanted = logits
    if config.num_chosen_groups < config.num_groups:
        wanted = _within_best_groups(wanted, config)
    _, experts = jax.lax.top_k(wanted, config.num_chosen)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.renormalizes:
        # Sigmoids may all be 0 in float32. As in DeepSeek-V3, their weights are then 0 too; other sums do not change.
        weights = weights / (sum_by_halves(weights)[:, None] + 1e-20)
    return Routing(experts.astype(jnp.int32), weights * config.scale)


def _within_best_groups(wanted: Float[Array, "T E"], config: ExpertsConfig) -> Float[Array, "T E"]:
    """Return scores of experts with −∞ outside of each row's best groups; of equal groups the lower number is better.

    A group is E ÷ `num_groups` experts beside each other, and its score the sum of its `scores_of_group` best ones.
    """
    by_group = wanted.reshape(len(wanted), config.num_groups, -1)
    best, _ = jax.lax.top_k(by_group, config.scores_of_group)
    _, groups = jax.lax.top_k(sum_by_halves(best), config.num_chosen_groups)
    is_chosen = jnp.any(groups[:, :, None] == jnp.arange(config.num_groups)[None, None], axis=1)
    return jnp.where(is_chosen[:, :, None], by_group, -jnp.inf).reshape(wanted.shape)


def tokens_of_experts(experts: Int[Array, "T k"], counted: Bool[Array, " T"], num_experts: int) -> Int[Array, " E"]:
    """Return how many of the `counted` tokens have chosen each expert; numbers from `num_experts` on are no expert."""
    is_chosen = experts[:, :, None] == jnp.arange(num_experts, dtype=experts.dtype)[None, None]
    return jnp.sum(is_chosen & counted[:, None, None], axis=(0, 1), dtype=jnp.int32)


def _softmax(logits: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """Return the softmax of each row."""
    shares = _exponential(logits - jnp.max(logits, axis=-1, keepdims=True))
    return shares / sum_by_halves(shares)[:, None]


def _sigmoid(x: Float[Array, "T N"]) -> Float[Array, "T N"]:
    return 1 / (1 + _exponential(-x))


def _exponential(x: Float[Array, "T N"]) -> Float[Array, "T N"]:
    """Return eˣ, computed apart from everything else.

    Where XLA on a CPU fuses an exponential with what surrounds it, the last bits depend on the number of rows. In
    versions of JAX before 0.11 they do so in any case, and rows are computed one after the other.
    """
    x = jax.lax.optimization_barrier(x)
    if ROWS_APART:
        found = jax.lax.platform_dependent(x, cpu=partial(jax.lax.map, jnp.exp), default=jnp.exp)
    else:
        found = jnp.exp(x)
    return jax.lax.optimization_barrier(found)


class Router(Linear):
    """The product whose results are a row's scores of all experts. Its weights are float32, whatever others are."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, *, make: WeightMaker) -> None:
        make = make.in_float32()
        axes = ("embed", None)
        super().__init__(hidden_size, config.num_experts, axes=axes, bias=config.router_bias, make=make)
        bias = make.vector(config.num_experts, None, fill=0.0, tensor="e_score_correction_bias")
        self.correction_bias = bias if config.has_correction_bias else nnx.data(None)
        self.config = config

    def choose(self, rows: Float[Array, "T D"]) -> Routing:
        """Return the experts of each row."""
        bias = None if self.correction_bias is None else self.correction_bias[...]
        with jax.default_matmul_precision("highest"):  # Else chips round what they multiply.
            logits = self.product(rows.astype(jnp.float32))
        return route(logits, self.config, correction_bias=bias)


class ExpertLinear(nnx.Module):
    """One projection, or two that read the same rows, of each of E experts: weights W [E, in, out], biases [E, out]."""

    def __init__(
        self,
        num_experts: int,
        num_in: int,
        parts: tuple[tuple[str | None, int], ...],
        *,
        axes: tuple[str | None, str | None, str | None],
        bias: bool,
        make: WeightMaker,
        runs: tuple[Run, ...],
        in_runs: tuple[Run, ...],
        num_shards: int,
        true_experts: int,
    ) -> None:
        """Make the weight and, with `bias`, the biases. `num_experts` includes experts that the model has not.

        `parts` are as in `FusedLinear`, or (None, outputs) for a single one. `runs` are those of the outputs of each
        part and `in_runs` those of the inputs. `axes` are the logical axes of experts, inputs and outputs; `num_shards`
        is the number of devices that the last axis is spread over.
        """
        self.sizes, self.num_shards = tuple(size for _, size in parts), num_shards
        self.num_out = sum(self.sizes)
        metadata: dict[str, Any] = {
            "num_shards": num_shards, "rows": tuple((name, runs) for name, _ in parts), "true_experts": true_experts,
        }  # fmt: skip
        if parts[0][0] is not None:
            metadata["parts"] = parts
        self.weight = make.experts(num_experts, num_in, self.num_out, axes, columns=in_runs, **metadata)
        self.scales: Any = nnx.data(None)
        self.bias = make.expert_biases(num_experts, self.num_out, axes, **metadata) if bias else nnx.data(None)

    def as_product(self, **ends: Any) -> Product:
        """Return the projections as a product of all experts; `ends` are fields of `Product`."""
        parts = self.sizes if len(self.sizes) > 1 else ()
        bias = None if self.bias is None else self.bias[...]
        weight = stored_matrix(self.weight, self.scales)
        return Product(weight=weight, num_out=self.num_out, bias=bias, parts=parts, num_shards=self.num_shards, **ends)


class Experts(nnx.Module):
    """The MLPs of E experts: down(act(gate(x)) × up(x)) for each."""

    def __init__(self, config: DecoderConfig, *, make: WeightMaker) -> None:
        """Make both projections of all experts.

        By default every expert is cut along its inner width, over the `make.num_shards` devices, and padded to a
        multiple of them; with `config.spreads_experts` each device has whole experts, and their number is padded.
        """
        experts = config.experts
        assert experts is not None, "a sparse MLP has experts"
        hidden, is_by_expert = config.hidden_size, config.spreads_experts
        shares = make.ops.expert_share(experts.num_experts, experts.width, make.num_shards, is_by_expert=is_by_expert)
        self.num_experts, inner = shares
        run, whole = ((0, 0, experts.width),), ((0, 0, hidden),)
        num_shards = 1 if is_by_expert else make.num_shards
        expert_axis, inner_axis = ("expert", None) if is_by_expert else (None, "mlp")
        options: dict[str, Any] = {
            "bias": experts.expert_bias, "make": make, "true_experts": experts.num_experts,
        }  # fmt: skip
        self.gate_up_proj = ExpertLinear(
            self.num_experts, hidden, (("gate_proj", inner), ("up_proj", inner)),
            axes=(expert_axis, "embed", inner_axis), runs=run, in_runs=whole, num_shards=num_shards, **options,
        )  # fmt: skip
        self.down_proj = ExpertLinear(
            self.num_experts, inner, ((None, hidden),),
            axes=(expert_axis, inner_axis, "embed"), runs=whole, in_runs=run, num_shards=1, **options,
        )  # fmt: skip
        self.activation = experts.activation or config.activation
        assert make.num_shards == 1 or make.mesh is not None, "sums over devices need their mesh"
        self.mesh, self.is_by_expert = make.mesh, is_by_expert

    def as_products(self, shared: SharedProducts | None, **ends: Any) -> ExpertProducts:
        """Return the products of all experts, with the shared MLP if there is one; `ends` are fields of `down`."""
        return ExpertProducts(
            gate_up=self.gate_up_proj.as_product(activation=self.activation, is_gated=True),
            down=self.down_proj.as_product(**ends),
            num_experts=self.num_experts,
            mesh=self.mesh,
            mesh_axis=TENSOR_AXIS,
            is_spread_by_expert=self.is_by_expert,
            shared=shared,
        )


class LayerOutput(NamedTuple):
    """What a layer of the model, or its MLP, gives."""

    stream: Float[Array, "T D"]
    """The residual stream with what the layer adds to it."""
    expert_tokens: Int[Array, " E"] | None = None
    """How many of the step's tokens `ModelInputs.counted` have chosen each expert; None without experts, and where
    nothing is counted."""


class SparseMLP(nnx.Module):
    """Experts with their router and, in some families, an MLP that all rows take."""

    def __init__(self, config: DecoderConfig, *, mlp_class: Any, make: WeightMaker) -> None:
        """Make router, experts and the shared MLP, which is an `mlp_class`."""
        experts = config.experts
        assert experts is not None, "a sparse MLP has experts"
        self.router = Router(experts, config.hidden_size, make=make)
        self.experts = Experts(config, make=make)
        self.shared, self.shared_gate = nnx.data(None), nnx.data(None)
        if experts.shared_width:
            self.shared = mlp_class(config.with_inner_width(experts.shared_width), make=make)
        if experts.has_shared_gate:
            axes: Any = ("embed", None)
            float_maker = replace(make, stays_floats=True)  # One column, of little weight and much effect.
            self.shared_gate = Linear(config.hidden_size, 1, axes=axes, bias=False, make=float_maker)

    def add_to(
        self, stream: Float[Array, "T D"], norm: RowNorm | None, inputs: ModelInputs, **ends: Any
    ) -> LayerOutput:
        """Return the stream plus what experts and the shared MLP make of its normed rows, and the tokens of experts.

        Padding goes to no expert. `ends` say how outputs are added: see `Product`.
        """
        ops = self.router.weight.ops
        rows = stream if norm is None else ops.norm(stream, norm)
        routing = self.router.choose(rows)
        is_token = jnp.arange(rows.shape[0]) < inputs.num_tokens
        chosen = jnp.where(is_token[:, None], routing.experts, self.experts.num_experts)
        routing = Routing(chosen, routing.weights)
        products = self.experts.as_products(self._shared_products(rows), **ends)
        if products.mesh is not None:
            added = add_experts_over_devices(ops, rows, routing, products, stream)
        else:
            added = ops.add_experts(rows, routing, products, stream)
        if inputs.counted is None:
            return LayerOutput(added)
        return LayerOutput(added, tokens_of_experts(chosen, inputs.counted, self.router.config.num_experts))

    def _shared_products(self, rows: Float[Array, "T D"]) -> SharedProducts | None:
        """Return the shared MLP as products, with its gate for these rows, which are normed; None without one."""
        if self.shared is None:
            return None
        first, down = self.shared.as_products(norm=None)
        weights = None if self.shared_gate is None else _sigmoid(self.shared_gate.product(rows))
        return SharedProducts(first=first, down=down, weights=weights)
