"""The config of a decoder: sizes and options that the families share. A family's own config may add to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ...pallas_kernels.layer_ops import XLA_OPS, LayerOps
from .experts import ExpertsConfig
from .rope import RopeConfig
from .shares import Shares
from .spec import AttentionLayer, ModelSpec


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The sizes and options of a decoder; each module of `families` reads them from config.json.

    `windows` and `ropes` have one entry per layer. A window is the number of latest positions that a query attends to,
    its own included, or None for all. A rope is the layer's rotary embedding, or None for none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    ropes: tuple[RopeConfig | None, ...]
    windows: tuple[int | None, ...]
    max_context_len: int
    """Longest context, in positions, that the position embedding is made for."""
    tie_word_embeddings: bool
    """Whether the output matrix is the embedding."""
    dtype: str
    """Dtype of the checkpoint: float32, bfloat16 or float16."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    activation: str = "silu"
    """Name of the MLP's activation, as in config.json."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    experts: ExpertsConfig | None = None
    """The experts of sparse MLPs; None for a model without them."""
    spreads_experts: bool = False
    """Whether each device of a mesh has whole experts; else it has its share of every one."""
    qk_norm: str | None = None
    """How queries and keys are normed: "head" norms each head by itself, "all" norms all heads together; None for no
    norm."""
    attention_scale: float | None = None
    """Factor of the scores; None for head_size ** −0.5."""
    divides_scale_by_layer: bool = False
    """Whether each layer divides the factor of its scores by the layer's number, which counts from 1."""
    attention_soft_cap: float | None = None
    has_sinks: bool = False
    """Whether each layer has a learned sink for each query head: a logit in the denominator of the softmax."""
    logits_soft_cap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    has_head_though_tied: bool = False
    """Whether config.json ties the output matrix to the embedding, and the weights hold another one, which counts. In
    weights without a head it is the embedding all the same."""
    architecture: str = ""
    """The transformers class; `config_from_hf` sets it."""
    source: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The content of config.json that this was read from, for `save_checkpoint`."""

    @property
    def may_store_one_matrix(self) -> bool:
        """Return whether weights may hold only one of the embedding and the head, which then serves as both."""
        return self.tie_word_embeddings or self.has_head_though_tied

    def shares(self, num_shards: int) -> Shares:
        """Return how heads, MLP and vocabulary are spread over `num_shards` devices, and padded for that."""
        return Shares(num_shards, self.num_heads, self.num_kv_heads, self.intermediate_size, self.vocab_size)

    def with_inner_width(self, width: int) -> Self:
        """Return the config with another inner width of MLPs."""
        return replace(self, intermediate_size=width)

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer has experts in place of one MLP."""
        return self.experts is not None and self.experts.sparse_layers[layer]

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def scales(self) -> tuple[float, ...]:
        """Return the factor of the attention scores of each layer.

        With a head size of 64 it is 1/8 for all layers, and 1/8, 1/16, 1/24, … with `divides_scale_by_layer`.
        """
        scale = self.head_size**-0.5 if self.attention_scale is None else self.attention_scale
        return tuple(scale / (layer + 1 if self.divides_scale_by_layer else 1) for layer in range(self.num_layers))

    def spec_on_chip(self, num_shards: int, ops: LayerOps = XLA_OPS, itemsize: int = 2) -> ModelSpec:
        """Return the model's spec as one of `num_shards` devices sees it, if `ops` compute its layers.

        `itemsize` is the bytes of an activation; it and `ops` change only the estimates of what experts take. Heads,
        `activation_width` and `program_values` are those of one device: its share of the query heads, of the KV heads
        and of the MLP columns, with their padding. All other values are those of `spec`. Example: 9 query heads and 3
        KV heads on 2 devices are padded to 12 and 4, so one device has 6 and 2.
        """
        shares = self.shares(num_shards)
        num_kv_heads = shares.stored_kv_heads // num_shards
        num_heads = num_kv_heads * shares.group_size
        spec = self.spec
        layers = [replace(layer, num_heads=num_heads, num_kv_heads=num_kv_heads) for layer in spec.layers]
        activation_width = self._activation_width(num_shards, num_heads, ops, itemsize)
        if num_shards > 1:
            # XLA on a GPU sums over devices in float32: each value of a sum takes the memory of two 16-bit values.
            activation_width += 2 * self.hidden_size
        return replace(
            spec,
            layers=tuple(layers),
            activation_width=activation_width,
            program_values=self._expert_values(num_shards, ops),
        )

    def _activation_width(self, num_shards: int, num_heads: int, ops: LayerOps, itemsize: int) -> int:
        """Return an estimate of how many values per token a forward program holds at once on one device.

        `num_shards` counts the devices, and `num_heads` are the query heads of one. The factors 4, 3 and 2 estimate how
        many arrays of each width, of the model, the MLP and all query heads, are alive at the same time. Experts take
        so much more than heads that these are no longer alive beside them, so in a model with experts the layer that
        takes most counts.

        Example: on one device, a hidden size of 64, an MLP of 128 and 4 heads of 16 give 4 × 64 + 3 × 128 + 2 × 64.
        """
        stream_width = 4 * self.hidden_size
        heads_width = 2 * num_heads * self.head_size
        mlp_width = 3 * self.shares(num_shards).stored_inner // num_shards
        if self.experts is None:
            return stream_width + heads_width + mlp_width
        has_dense_layers = not all(self.experts.sparse_layers)
        dense_width = heads_width + mlp_width if has_dense_layers else heads_width
        return stream_width + max(dense_width, self._sparse_width(num_shards, ops, itemsize))

    def _sparse_width(self, num_shards: int, ops: LayerOps, itemsize: int) -> int:
        """Return the values per token of the experts of a layer, or of the MLP that all tokens take if that has more.

        Even where each device has whole experts, all those that a token has chosen may be on one device.
        """
        experts = self.experts
        assert experts is not None, "a model with experts"
        inner = self._expert_inner(num_shards)
        values_per_choice = ops.choice_values(self.hidden_size, inner, itemsize, has_bias=experts.expert_bias)
        shared_inner = -(-experts.shared_width // num_shards)
        return max(experts.num_chosen * values_per_choice, 3 * shared_inner)

    def _expert_values(self, num_shards: int, ops: LayerOps) -> int:
        """Return the values that experts take in a program whatever its tokens; 0 without experts."""
        if self.experts is None:
            return 0
        return ops.expert_values(self.experts.num_experts, self.hidden_size, self._expert_inner(num_shards))

    def _expert_inner(self, num_shards: int) -> int:
        """Return the inner width of an expert on one device."""
        assert self.experts is not None, "a model with experts"
        return self.experts.width if self.spreads_experts else -(-self.experts.width // num_shards)

    def for_context(self, max_model_len: int) -> Self:
        """Return the config with the rotary embeddings for sequences of at most `max_model_len` tokens."""
        return replace(self, ropes=tuple(rope and rope.for_context(max_model_len) for rope in self.ropes))

    def without_idle_windows(self, max_model_len: int) -> Self:
        """Return the config with full attention in place of each window of `max_model_len` tokens or more.

        No sequence of at most `max_model_len` tokens is longer than the window of these layers.
        """
        windows = (None if window is not None and window >= max_model_len else window for window in self.windows)
        return replace(self, windows=tuple(windows))

    @property
    def longrope(self) -> str | None:
        """Return in words which set of LongRoPE's factors is in use; None for a model without LongRoPE.

        Example: "LongRoPE with its short factors, for contexts up to 4096 tokens".
        """
        longrope = next((rope for rope in self.ropes if rope is not None and rope.kind == "longrope"), None)
        if longrope is None:
            return None
        kind, reach = ("long", "beyond") if longrope.is_long else ("short", "up to")
        return f"LongRoPE with its {kind} factors, for contexts {reach} {longrope.original_max_position} tokens"

    @property
    def spec(self) -> ModelSpec:
        """Return the sizes, token ids and attention layers that an engine reads, for the whole model on all devices.

        Heads and sizes are those of the checkpoint, without padding. All layers have the same heads and soft cap, all
        or none have sinks, and each writes its own keys and values; only their windows may differ. `activation_width`,
        in values per token, is an estimate.
        """
        heads: dict[str, Any] = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "soft_cap": self.attention_soft_cap,
            "has_sinks": self.has_sinks,
        }
        return ModelSpec(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            dtype=self.dtype,
            max_context_len=self.max_context_len,
            activation_width=self._activation_width(1, self.num_heads, XLA_OPS, 2),
            program_values=self._expert_values(1, XLA_OPS),
            layers=tuple(AttentionLayer(**heads, window=window) for window in self.windows),
            bos_token_id=self.bos_token_id,
            eos_token_ids=self.eos_token_ids,
        )
