"""The decoder that the families share: layers of attention over the paged cache and an MLP.

A family subclasses what differs, and says which names config.json and checkpoints use. Keys and values go through
`cache.attend`. Source: Vaswani et al. 2017, arXiv:1706.03762; grouped queries: Ainslie et al. 2023, arXiv:2305.13245.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ..pallas_kernels.layer_ops import Heads, Product, RowNorm, scaled
from ..pallas_kernels.ragged_paged_attention.paged_cache import AttentionCache
from ..pallas_kernels.rotation import Rotation
from .config.decoder import DecoderConfig
from .config.rope import RopeConfig
from .experts import LayerOutput, SparseMLP
from .inputs import ModelInputs
from .layers import Embedding, FusedLinear, Linear, RMSNorm, WeightMaker
from .rope import attention_factor, inverse_frequencies, rotation_at


class QKV(NamedTuple):
    """The queries, keys and values of one layer, by head."""

    queries: Float[Array, "T N H"]
    keys: Float[Array, "T K H"]
    values: Float[Array, "T K H"]


class Attention(nnx.Module):
    """Grouped-query attention over the paged cache."""

    def __init__(self, config: DecoderConfig, *, norm: Callable[..., nnx.Module], make: WeightMaker) -> None:
        """Make the projections and, as the config says, norms of queries and keys of the class `norm`, and sinks.

        Sizes are totals over the `make.num_shards` devices, in rows: heads × head size. They include heads of zeros
        that pad the number of heads, and the copies of KV heads that lie on several devices. For example, 9 query heads
        and 3 KV heads are stored as 12 and 4 on 2 devices. A run (first stored row, first row of the model, number of
        rows) says where the model's own heads are stored; rows in no run are zeros.

        `qk_norm` "all" norms all heads of a token together, and "head" each head alone. `norm` is called as norm(size,
        eps=…, make=…, axis=…), and for "all" also with `runs` and `num_values`.
        """
        hidden, head, shares = config.hidden_size, config.head_size, config.shares(make.num_shards)
        queries, keys = shares.stored_heads * head, shares.stored_kv_heads * head
        query_runs, kv_runs = shares.query_runs(head), shares.kv_runs(head)
        parts = ("q_proj", queries), ("k_proj", keys), ("v_proj", keys)
        runs = {"q_proj": query_runs, "k_proj": kv_runs, "v_proj": kv_runs}
        options: dict[str, Any] = {"bias": config.qkv_bias, "make": make, "runs": runs}
        # "heads" and "kv_heads" are split over the same axis of the mesh, so one name serves for all three parts.
        self.qkv_proj = FusedLinear(hidden, parts, axes=("embed", "kv_heads"), **options)
        options = {"bias": config.out_bias, "make": make, "in_runs": query_runs}
        self.o_proj = Linear(queries, hidden, axes=("heads", "embed"), **options)
        self.head_size, self.norms_all_heads = head, config.qk_norm == "all"
        # nnx makes an attribute that is a bare None static, and a module could not be assigned to it below.
        self.q_norm, self.k_norm, self.sinks = nnx.data(None), nnx.data(None), nnx.data(None)
        if config.has_sinks:
            # Padded heads have a sink of 0: their outputs are finite, and the output projection has zeros for them.
            sink_rows = ((None, shares.query_runs(1)),)
            self.sinks = make.vector(shares.stored_heads, "heads", fill=0.0, rows=sink_rows)
        if config.qk_norm is not None:
            if self.norms_all_heads:
                # Padded heads are zero and do not count in the mean of squares. Each KV head of the model is stored
                # `kv_copies` times, and all copies count, which leaves the mean as it is.
                query_values, key_values = config.num_heads * head, config.num_kv_heads * head * shares.kv_copies
                q_layout: dict[str, Any] = {"size": queries, "axis": "heads", "runs": query_runs}
                k_layout: dict[str, Any] = {"size": keys, "axis": "kv_heads", "runs": kv_runs}
                self.q_norm = norm(**q_layout, num_values=query_values, eps=config.norm_eps, make=make)
                self.k_norm = norm(**k_layout, num_values=key_values, eps=config.norm_eps, make=make)
            else:  # One gain [head size] serves all heads of a device, so every device has the whole of it.
                self.q_norm, self.k_norm = (norm(head, eps=config.norm_eps, make=make, axis=None) for _ in range(2))

    def project(self, x_TD: Float[Array, "T D"], rotation: Rotation | None, norm: RowNorm | None = None) -> QKV:
        """Return queries, keys and values by head, for the layer's input `x_TD`, which `norm` norms first.

        T are the tokens of the step, and D is the model's width. The results are [T, heads, head size], with N heads of
        queries and K of keys and values. Queries and keys are normed if the model has such norms, and then rotated
        unless `rotation` is None; values are neither normed nor rotated.
        """
        if self.norms_all_heads:
            queries, keys, values = self.qkv_proj(x_TD, norm)
            q_TNH, k_TKH = self._by_head(self.q_norm(queries)), self._by_head(self.k_norm(keys))
            if rotation is not None:
                q_TNH, k_TKH = rotation.apply(q_TNH), rotation.apply(k_TKH)
            return QKV(q_TNH, k_TKH, self._by_head(values))
        norms = tuple(None if each is None else each.as_row_norm() for each in (self.q_norm, self.k_norm))
        heads = Heads(self.head_size, rotation, norms)
        return QKV(*map(self._by_head, self.qkv_proj(x_TD, norm, heads)))

    def sink_logits(self) -> Float[Array, " N"] | None:
        """Return the sink of each stored query head in float32, as `cache.attend` takes them; None without sinks.

        Source: Xiao et al. 2023, arXiv:2309.17453; OpenAI 2025, arXiv:2508.10925.
        """
        return None if self.sinks is None else self.sinks[...].astype(jnp.float32)

    def _by_head(self, x: Float[Array, "T NH"]) -> Float[Array, "T N H"]:
        """Return queries, keys or values `x` [T, heads × head size] as [T, heads, head size]."""
        return x.reshape(x.shape[0], -1, self.head_size)


class GatedMLP(nnx.Module):
    """down(act(gate(x)) × up(x)). Source: Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, config: DecoderConfig, *, make: WeightMaker) -> None:
        """Make the fused projection of gate and up, and the down projection.

        The inner width, `config.intermediate_size`, is padded with zeros to a multiple of the devices. `run`, (first
        stored column, first column of the model, number of columns), says that the model's own columns come first and
        the padding last. The padding adds 0 to every output, since the rows of the down projection are 0 there, too.
        """
        hidden, inner = config.hidden_size, config.shares(make.num_shards).stored_inner
        parts, run = (("gate_proj", inner), ("up_proj", inner)), ((0, 0, config.intermediate_size),)
        options: dict[str, Any] = {"bias": config.mlp_bias, "make": make}
        runs = {"gate_proj": run, "up_proj": run}
        self.gate_up_proj = FusedLinear(hidden, parts, axes=("embed", "mlp"), runs=runs, **options)
        self.down_proj = Linear(inner, hidden, axes=("mlp", "embed"), in_runs=run, **options)
        self.activation = config.activation

    def as_products(self, norm: RowNorm | None, **ends: Any) -> list[Product]:
        """Return the MLP as a chain of products. `norm` norms what it reads, and `ends` are fields of the last one."""
        gate_up = self.gate_up_proj.as_product(norm=norm, activation=self.activation, is_gated=True)
        return [gate_up, self.down_proj.as_product(**ends)]


class MLP(nnx.Module):
    """down(act(up(x)))."""

    def __init__(self, config: DecoderConfig, *, make: WeightMaker) -> None:
        """Make both projections. The inner width is padded to a multiple of the devices, with the padding last.

        The down projection has zeros for padded columns, so these add nothing, whatever the activation makes of 0.
        """
        hidden, inner = config.hidden_size, config.shares(make.num_shards).stored_inner
        run, options = ((0, 0, config.intermediate_size),), dict[str, Any](bias=config.mlp_bias, make=make)
        self.up_proj = Linear(hidden, inner, axes=("embed", "mlp"), out_runs=run, **options)
        self.down_proj = Linear(inner, hidden, axes=("mlp", "embed"), in_runs=run, **options)
        self.activation = config.activation

    def as_products(self, norm: RowNorm | None, **ends: Any) -> list[Product]:
        """Return the MLP as a chain of products. `norm` norms what it reads, and `ends` are fields of the last one."""
        return [self.up_proj.as_product(norm=norm, activation=self.activation), self.down_proj.as_product(**ends)]


class DecoderLayer(nnx.Module):
    """Attention and MLP: each reads the residual stream through its norm, and its output is added to the stream.

    `before` and `after`, the work before and after the cache, are jitted: layers differ in their weights alone, so JAX
    traces each function once and not once per layer. A layer that keeps its index as an attribute, or any other value
    that differs between layers, is traced on its own.
    """

    norm: ClassVar[Any] = RMSNorm
    """Class of all norms, also of the one after the last layer: (size, eps=…, make=…, axis=…)."""
    mlp_class: ClassVar[Any] = GatedMLP
    norms_in_front: ClassVar[Mapping[str, str]] = {"attention": "attention_norm", "mlp": "mlp_norm"}
    """Block → name of the norm of what it reads; a block without one reads the stream as it is."""
    norms_behind: ClassVar[Mapping[str, str]] = {}
    """Block → name of the norm of what it gives, before that is added to the stream."""

    def __init__(self, config: DecoderConfig, index: int, *, make: WeightMaker) -> None:
        """Make the layer's norms, attention and MLP.

        Each norm becomes an attribute under the name that `norms_in_front` or `norms_behind` gives it; `tensor_names`
        of a family finds its tensor by that name. `index` is the layer's number from 0: it
        says whether the layer has experts, and subclasses may have layers that differ in more.
        """
        for name in (*self.norms_in_front.values(), *self.norms_behind.values()):
            setattr(self, name, self.new_norm(config, make))
        self.attention = Attention(config, norm=self.norm, make=make)
        if config.is_sparse(index):
            self.mlp: Any = SparseMLP(config, mlp_class=self.mlp_class, make=make)
        else:
            self.mlp = self.mlp_class(config, make=make)
        self.residual_multiplier = config.residual_multiplier

    @classmethod
    def new_norm(cls, config: DecoderConfig, make: WeightMaker) -> Any:
        """Return a norm of the stream."""
        return cls.norm(config.hidden_size, eps=config.norm_eps, make=make)

    @jax.jit
    def before(self, x_TD: Float[Array, "T D"], rotation: Rotation | None, inputs: ModelInputs) -> QKV:
        """Return the layer's queries, keys and values for the residual stream `x_TD`.

        `rotation` is the rotary embedding of the step's positions; None for a layer without one. `inputs` are unused
        here, for subclasses that read more of a step.
        """
        return self.attention.project(x_TD, rotation, self._norm(self.norms_in_front, "attention"))

    @jax.jit
    def after(self, x_TD: Float[Array, "T D"], out_TNH: Float[Array, "T N H"], inputs: ModelInputs) -> LayerOutput:
        """Return the residual stream after the layer: attention's output and the MLP's are added to `x_TD`.

        `out_TNH`, [T, N heads, head size], is what `cache.attend` returned for the T tokens of the step. Each output is
        normed, if the family has norms behind its blocks, and scaled, before it is added. `inputs` say which tokens
        are padding, which goes to no expert, and which ones are counted for the experts that they choose.
        """
        rows, norm = out_TNH.reshape(x_TD.shape[0], -1), self._norm(self.norms_in_front, "mlp")
        o_proj = self.attention.o_proj.as_product(**self._adds("attention"))
        if isinstance(self.mlp, SparseMLP):
            stream = self.chain(rows, [o_proj], x_TD)
            return self.mlp.add_to(stream, norm, inputs, **self._adds("mlp"))
        return LayerOutput(self.chain(rows, [o_proj, *self.mlp.as_products(norm, **self._adds("mlp"))], x_TD))

    def chain(
        self, rows: Float[Array, "T I"], products: Sequence[Product], stream: Float[Array, "T D"] | None = None
    ) -> Float[Array, "T D"]:
        """Return what the last of the products gives, by the layer operations of the weights: see `LayerOps.chain`."""
        (result,) = self.attention.o_proj.weight.ops.chain(rows, products, stream)
        return result

    def _adds(self, block: str) -> dict[str, Any]:
        """Return the fields of the product by which a block ("attention" or "mlp") adds its output to the stream."""
        norm = self._norm(self.norms_behind, block)
        return {"adds_to_stream": True, "norm_behind": norm, "scale": self.residual_multiplier}

    def _norm(self, norms: Mapping[str, str], block: str) -> RowNorm | None:
        """Return the norm that `norms` names for a block ("attention" or "mlp"); None without one."""
        return getattr(self, norms[block]).as_row_norm() if block in norms else None


class Decoder(nnx.Module):
    """A decoder. `__call__` returns hidden states, and `logits` the scores of chosen rows of them.

    A family whose layers differ has a subclass in `decoders`.
    """

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(self, config: DecoderConfig, *, make: WeightMaker) -> None:
        """Make the embedding, the layers, the last norm and, unless it is tied to the embedding, the head.

        `make` makes the weights, as arrays or as abstract shapes, for `make.num_shards` devices. Embedding and head
        have `num_rows` rows: the vocabulary, padded with zeros at its end to a multiple of the devices.
        """
        is_tied = config.tie_word_embeddings
        self.vocab_size, num_rows = config.vocab_size, config.shares(make.num_shards).stored_vocab
        run = ((0, 0, config.vocab_size),)
        self.embed = Embedding(num_rows, config.hidden_size, is_tied=is_tied, make=make, runs=run)
        self.layers = nnx.List([self.layer_class(config, index, make=make) for index in range(config.num_layers)])
        self.norm = self.layer_class.new_norm(config, make)
        self.ropes, self.windows, self.head_size = config.ropes, config.windows, config.head_size
        self.scales, self.soft_cap = config.scales, config.attention_soft_cap
        self.embedding_multiplier = config.embedding_multiplier
        self.logits_divisor, self.logits_soft_cap = config.logits_divisor, config.logits_soft_cap
        # A tied model computes logits with the embedding.
        self.head = (
            nnx.data(None)
            if is_tied
            else Linear(config.hidden_size, num_rows, axes=("embed", "vocab"), bias=False, make=make, out_runs=run)
        )

    def __call__(self, inputs: ModelInputs, cache: AttentionCache) -> tuple[Float[Array, "T D"], Any]:
        """Return hidden states [T, D] after the last norm, and the cache with this step's keys and values.

        T are the tokens of the step, those of all sequences one after the other, and D is the model's width. Each layer
        makes queries, keys and values of the residual stream (`before`); `cache.attend` writes keys and values and
        attends; then the layer adds its outputs to the stream (`after`). Layers with equal rotary embeddings share one
        computation of cosines and sines; None stands for a layer without one.
        """
        hidden_TD, cache, _ = self.with_expert_tokens(inputs, cache)
        return hidden_TD, cache

    def with_expert_tokens(
        self, inputs: ModelInputs, cache: AttentionCache
    ) -> tuple[Float[Array, "T D"], Any, Int[Array, "L E"] | None]:
        """Return what `__call__` returns, and how many of the tokens `inputs.counted` have chosen each expert.

        The counts have a row for each of L layers, zeros for one without experts; they are None if nothing is counted.
        """
        x_TD, counts_by_layer = self.embedded(inputs), list[Array | None]()
        rotations = {rope: self._rotation(rope, inputs) for rope in dict.fromkeys(self.ropes)}
        for index, layer in enumerate(self.layers):
            q_TNH, k_TKH, v_TKH = layer.before(x_TD, rotations[self.ropes[index]], inputs)
            options = {"scale": self.scales[index], "window": self.windows[index], "soft_cap": self.soft_cap}
            sinks = layer.attention.sink_logits()
            out_TNH, cache = cache.attend(index, q_TNH, k_TKH, v_TKH, inputs.attention, sinks=sinks, **options)
            output = layer.after(x_TD, out_TNH, inputs)
            x_TD = output.stream
            counts_by_layer.append(output.expert_tokens)
        zeros = next((jnp.zeros_like(counts) for counts in counts_by_layer if counts is not None), None)
        if zeros is None:
            return self.norm(x_TD), cache, None
        expert_tokens = jnp.stack([zeros if counts is None else counts for counts in counts_by_layer])
        return self.norm(x_TD), cache, expert_tokens

    def embedded(self, inputs: ModelInputs) -> Float[Array, "T D"]:
        """Return the residual stream before the first layer."""
        return scaled(self.embed(inputs.token_ids), self.embedding_multiplier)

    def _rotation(self, rope: RopeConfig | None, inputs: ModelInputs) -> Rotation | None:
        """Return the rotation of each token of the step by a rotary embedding; None without one."""
        if rope is None:
            return None
        frequencies = inverse_frequencies(rope, self.head_size)
        return rotation_at(inputs.attention.positions, frequencies, attention_factor(rope))

    def logits(self, x_RD: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Return scores [R, V] over the vocabulary in float32, for R chosen rows of the hidden states.

        A tied model takes the embedding in place of the head. Scores are divided by `logits_divisor`, then limited to
        ±`logits_soft_cap` by a hyperbolic tangent, unless that is None. On several devices the vocabulary may be
        padded; the last columns then belong to no token.
        """
        logits_RV = self.embed.logits(x_RD) if self.head is None else self.head.product(x_RD)
        if self.logits_divisor != 1.0:
            logits_RV = logits_RV / self.logits_divisor
        if self.logits_soft_cap is not None:
            logits_RV = self.logits_soft_cap * jnp.tanh(logits_RV / self.logits_soft_cap)
        return logits_RV
