"""What an engine reads of a model, whatever its family: sizes, token ids, and what each attention layer keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """The heads of one attention layer, and the tokens whose keys and values it reads."""

    num_heads: int
    """Query heads, a multiple of the KV heads."""
    num_kv_heads: int
    head_size: int
    window: int | None = None
    """Latest positions that a query attends to, its own included; None for all. Pages are freed by it, so a module's
    `attend` has to say the same, as it has for what stands below."""
    soft_cap: float | None = None
    """Bound of the scores, by a hyperbolic tangent; None for none."""
    has_sinks: bool = False
    """Whether each query head has a sink, a logit in the denominator of the softmax."""
    pages_of: int | None = None
    """Index of the earlier layer whose keys and values it reads; None for a layer that writes its own."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The properties of a model that an engine sizes, places and checks things by."""

    vocab_size: int
    """Rows of the output head: token ids are below it."""
    hidden_size: int
    dtype: str
    """The checkpoint's: float32, bfloat16 or float16."""
    max_context_len: int
    """Longest context, in positions, that the model's position embedding is made for."""
    layers: tuple[AttentionLayer, ...]
    """The attention layers, by the number that `cache.attend` is called with."""
    activation_width: int = 0
    """Values per token that a forward program holds at once, at most; an upper estimate. 0: 16 × hidden_size."""
    program_values: int = 0
    """Values that a forward program holds beside those of its tokens, whatever their number; an upper estimate."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the window of each attention layer."""
        return tuple(layer.window for layer in self.layers)
