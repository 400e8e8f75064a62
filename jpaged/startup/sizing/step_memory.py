"""Estimates the device memory that a step takes beside weights and pages. Knows no JAX."""

from __future__ import annotations

from ...models.config.spec import ModelSpec
from ...sampling.logit_rules_spec import LogitRulesSpec

ATTENTION_BYTES = 16 << 20
"""Most bytes that attention takes beside a step's queries, keys and values; the compile gates check it."""
SCORE_ARRAYS = 3
"""Most arrays of float32 scores, of all heads and pairs of tokens, that dense attention holds at once."""
LOGIT_ARRAYS = 12
"""Most arrays of float32 logits, of all rows and the whole vocabulary, that a sampler holds at once."""


def activation_bytes(dtype: str, *, on_cpu: bool) -> int:
    """Return the bytes of an activation: a CPU computes in float32 whatever the `dtype` of weights is."""
    return 4 if on_cpu or dtype == "float32" else 2


def estimated_program_bytes(model: ModelSpec, itemsize: int, num_tokens: int, num_seqs: int) -> int:
    """Return an upper estimate of the bytes that the largest program of a step takes beside its arguments.

    An activation has `itemsize` bytes, and a token has `model.activation_width` of them. A forward program holds the
    activations of `num_tokens` tokens, and `model.program_values` beside them. A sample program holds those of one row
    per sequence, and LOGIT_ARRAYS arrays of float32 logits [num_seqs, vocab_size]. A decode program does the work of
    both, one after the other, so it needs no more than the larger one. Returned is the larger of the two, plus
    ATTENTION_BYTES.

    Compared with compiled programs for 8,192 tokens and 256 sequences of a model with 8e9 parameters, the estimate is
    1.63 GB; the largest program takes 0.71 GB on an H100, 1.06 GB on a v6e and, with rules and logprobs, 1.42 GB on a
    v7x. With a vocabulary of 8,192, over 8 H100, the estimate is 0.52 GB per device, the largest program 0.41 GB.

    With experts, forward programs of 8,192 tokens take more: of Mixtral 8x7B 2.39 GB on an H100 and 3.54 GB on a v6e,
    where 3.0 and 3.7 GB are estimated; of Qwen3-30B-A3B 0.69 and 1.13 GB, where 0.93 and 1.33 GB are.
    """
    width = model.activation_width
    forward_bytes = itemsize * (num_tokens * width + model.program_values)
    sample_bytes = itemsize * num_seqs * width + LOGIT_ARRAYS * 4 * num_seqs * model.vocab_size
    return max(forward_bytes, sample_bytes) + ATTENTION_BYTES


def measured_bytes(model: ModelSpec, itemsize: int, num_tokens: int) -> int:
    """Return an upper estimate of the bytes that the program takes which measures scales of pages on `num_tokens`.

    It holds their activations, and the scores of dense attention. Of SmolLM2-135M with 512 tokens the estimate is 50
    MB, and a CPU's program takes 30 MB.
    """
    num_heads = max(layer.num_heads for layer in model.layers)
    scores_bytes = SCORE_ARRAYS * 4 * num_heads * num_tokens**2
    return itemsize * (num_tokens * model.activation_width + model.program_values) + scores_bytes


def state_bytes(model: ModelSpec, itemsize: int, num_tokens: int, num_seqs: int) -> int:
    """Return the bytes of what stays between programs: hidden states and logit rules."""
    return itemsize * num_tokens * model.hidden_size + rules_bytes(model.vocab_size, num_seqs)


def rules_bytes(vocab_size: int, num_seqs: int) -> int:
    """Return the bytes of the logit rules of all state slots, the null slot included."""
    return 4 * (num_seqs + 1) * LogitRulesSpec(vocab_size).width
