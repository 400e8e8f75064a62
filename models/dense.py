"""Computes models without pages: whole sequences side by side, as a trainer does, so that it can be differentiated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..pallas_kernels.ragged_paged_attention.interface import AttentionMetadata
from .checked_cache import CheckedCache, check_all_layers_attended
from .config.spec import ModelSpec
from .inputs import call_fault, unpaged_inputs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseAttention:
    """Causal attention within B sequences of N tokens each, which lie one after the other: T = B × N. It keeps nothing
    between calls. `attend` has the signature of `PagedCache.attend`."""

    num_sequences: int = field(metadata={"static": True})
    mask: Bool[Array, "B N N"] | None = None
    """Whether a query (axis 1) may attend to a key (axis 2), in addition to causality; None allows all keys."""

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
    ) -> tuple[Float[Array, "T N H"], DenseAttention]:
        """Return the attention of each token to itself and the tokens before it, and this cache, unchanged.

        `q` [T, N, H] has N query heads of size H, and `k` and `v` have K heads, each shared by G = N ÷ K query heads.
        Scores are multiplied by `scale`, and limited to ±`soft_cap` by tanh unless that is None. A token attends to the
        latest `window` tokens, its own included; None for all. `sinks` are logits that join the softmax of each query
        head and carry no value. `layer` and `step` are not used. Scores and weights are computed in float32. Raises
        ValueError for a layer without keys and values of its own.
        """
        if k is None or v is None:
            raise ValueError("attend: got no keys and values, wanted those of the layer's own")
        # T = B × S: the tokens lie sequence by sequence, and S is the number of tokens of each of the B sequences.
        q_BSKGH = q.reshape(self.num_sequences, -1, k.shape[1], q.shape[1] // k.shape[1], q.shape[2])
        k_BSKH, v_BSKH = (x.reshape(self.num_sequences, -1, *x.shape[1:]) for x in (k, v))
        scores = jnp.einsum("bqkgh,bskh->bkgqs", q_BSKGH, k_BSKH, preferred_element_type=jnp.float32) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        positions = jnp.arange(k_BSKH.shape[1])
        distance = positions[:, None] - positions[None]
        is_seen = (distance >= 0) & (distance < (len(positions) if window is None else window))
        is_seen = is_seen[None] if self.mask is None else is_seen[None] & self.mask  # [1 or B, queries, keys]
        # All scores of a token that sees nothing, such as padding before a sequence, are equal and finite: its output
        # is the mean of all values, or 0 with sinks, and no NaN.
        scores = jnp.where(is_seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
        if sinks is not None:  # They are the scores of a last key, whose value is 0.
            sinks_1KG11 = sinks.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1, 1)
            scores = jnp.concatenate([scores, jnp.broadcast_to(sinks_1KG11, (*scores.shape[:-1], 1))], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : len(positions)]
        out = jnp.einsum("bkgqs,bskh->bqkgh", weights, v_BSKH.astype(jnp.float32))
        return out.reshape(q.shape).astype(q.dtype), self


def dense_logits(
    model: Any,
    ids_BN: Int[Array, "B N"],
    *,
    mask_BN: Bool[Array, "B N"] | None = None,
    positions_BN: Int[Array, "B N"] | None = None,
    mask_BNN: Bool[Array, "B N N"] | None = None,
) -> Float[Array, "B N V"]:
    """Return the logits that follow each token of B sequences.

    `model` is a `Decoder` or a module of your own with `__call__` and `logits` as an engine calls them. Sequences may
    be padded at their ends, by any token ids, or in front, where `mask_BN` says which tokens count: the first of them
    has position 0, and none sees padding. For other positions and masks there are `positions_BN`, the position of each
    token, and `mask_BNN`, which tokens (axis 2) each token (axis 1) may see. The logits of padding mean nothing.

    Entry [b, n] of the result are the scores of the token after token n of sequence b. Raises ValueError if the module
    cannot be called with (inputs, cache), or if its calls of `attend` differ from its `spec`. The calls of a module
    without a `ModelSpec` are not checked.
    """
    if fault := call_fault(model):
        raise ValueError(f"model: {fault}")
    num_sequences, length = ids_BN.shape
    if mask_BN is not None:
        mask_BN = jnp.asarray(mask_BN, bool)
        mask_BNN = mask_BN[:, None] if mask_BNN is None else mask_BN[:, None] & mask_BNN
        if positions_BN is None:  # Padding in front is at 0.
            positions_BN = jnp.maximum(jnp.cumsum(mask_BN, axis=1, dtype=jnp.int32) - 1, 0)
    if positions_BN is None:
        positions_BN = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), ids_BN.shape)
    inputs = unpaged_inputs(ids_BN.reshape(-1), positions_BN.reshape(-1))
    # T = B × N: a model takes tokens without an axis of sequences. `DenseAttention` knows where each one begins.
    cache, spec = DenseAttention(num_sequences, mask_BNN), getattr(model, "spec", None)
    if isinstance(spec, ModelSpec):
        hidden_TD, returned = model(inputs, CheckedCache(cache, spec.layers))
        check_all_layers_attended(returned, spec.layers)
    else:
        hidden_TD, _ = model(inputs, cache)
    return model.logits(hidden_TD).reshape(num_sequences, length, -1)


def dense_logprobs(
    model: Any, ids_BN: Int[Array, "B N"], temperature: float = 1.0, *, mask_BN: Bool[Array, "B N"] | None = None
) -> Float[Array, "B N1"]:
    """Return the logprob of each token but the first of B sequences, [B, N − 1], as `Engine.logprobs` defines it.

    Entry [b, n] is the logprob of token n + 1 of sequence b, given the tokens before it, after the logits were divided
    by `temperature`. `ids_BN`, `model` and `mask_BN` are as `dense_logits` takes them. The first token has no logprob,
    since nothing comes before it, and the logits behind the last one are not used; entries of padding, and of the first
    token behind padding in front, mean nothing.
    """
    logits = dense_logits(model, ids_BN, mask_BN=mask_BN)[:, :-1].astype(jnp.float32) / temperature
    drawn = jnp.take_along_axis(logits, ids_BN[:, 1:, None], axis=2)[..., 0]
    return drawn - jax.nn.logsumexp(logits, axis=2)
