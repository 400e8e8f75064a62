"""Rotary embeddings as configs describe them: kinds, parameters, and how config.json names these.

transformers 4 writes `rope_theta` and `rope_scaling`, version 5 `rope_parameters`. `models/rope.py` computes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ModelLoadError
from ..io.fields import Fields

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10_000.0


@dataclass(frozen=True)
class RopeConfig:
    """The parameters of a rotary embedding, under transformers' names.

    `freq_factors` is GGUF's form of llama3: one divisor for each of the H / 2 default inverse frequencies. Where it is
    set, `factor`, `low_freq_factor`, `high_freq_factor` and `original_max_position` are not used.
    """

    theta: float = DEFAULT_THETA
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None


def read_rope(
    fields: Fields, *, head_size: int, rope: Fields | None = None, theta: float = DEFAULT_THETA
) -> RopeConfig:
    """Read the rotary embedding of a config: the object `rope`, by default the one that `rope_object` finds.

    `theta` is the default of the family. Raises ModelLoadError.
    """
    if rope is None:
        rope = rope_object(fields)
        if any(isinstance(value, dict) for value in rope.data.values()):
            wanted = "one rotary embedding for all layers: this family has none per layer type"
            raise fields.wrong(_rope_key(fields), wanted)
    theta = fields.number("rope_theta", theta, above=1)
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        reason = "rotary embedding of a part of each head is not supported"
        raise ModelLoadError(f"{fields.path}: partial_rotary_factor is {partial:g}, wanted 1: {reason}")
    kind = rope.choice("rope_type" if rope.has("rope_type") else "type", ROPE_KINDS, "default")
    max_position = fields.integer("max_position_embeddings")
    # A value beside rope_scaling overrides the one inside, as in transformers.
    original = rope.integer("original_max_position_embeddings", max_position)
    original = fields.integer("original_max_position_embeddings", original)
    theta = rope.number("rope_theta", theta, above=1)
    if rope.has("freq_factors"):
        return RopeConfig(theta, "llama3", freq_factors=_freq_factors(rope, head_size))
    return _checked_rope(rope, kind, theta, original, max_position)


def rope_object(fields: Fields) -> Fields:
    """Return the object that holds the parameters of the rotary embedding; an absent one is empty."""
    return fields.mapping(_rope_key(fields))


def context_len(rope: RopeConfig, max_position: int) -> int:
    """Return the longest context, in positions, that a model with this rotary embedding is made for.

    `linear` and `yarn` stretch the context that the model was trained on, and files differ in whether
    `max_position_embeddings` already includes that. For llama3 it always does.
    """
    if rope.kind == "linear":
        return int(max_position * rope.factor)
    if rope.kind == "yarn" and rope.original_max_position is not None:
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position


def _rope_key(fields: Fields) -> str:
    return "rope_scaling" if fields.has("rope_scaling") and fields.data["rope_scaling"] else "rope_parameters"


def _freq_factors(rope: Fields, head_size: int) -> tuple[float, ...]:
    factors = rope.items("freq_factors", float)
    if len(factors) != head_size // 2 or not all(0 < value < float("inf") for value in factors):
        wanted = f"{head_size // 2} that are positive and finite"
        name = rope.name_of("freq_factors")
        raise ModelLoadError(f"{rope.path}: {name} holds {len(factors)} values, wanted {wanted}")
    return tuple(factors)


def _checked_rope(rope: Fields, kind: str, theta: float, original: int, max_position: int) -> RopeConfig:
    """Read the parameters that rotary embeddings of this `kind` have; positions are in tokens."""
    if kind == "default":
        return RopeConfig(theta=theta)
    implied = max_position / original if kind == "yarn" else None
    factor = rope.number("factor", implied, min=1)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor", above=0), rope.number("high_freq_factor", above=0)
        if high <= low:
            raise rope.wrong("high_freq_factor", f"a number above low_freq_factor, {low:g}")
        return RopeConfig(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    beta_fast, beta_slow = rope.number("beta_fast", 32.0, above=0), rope.number("beta_slow", 1.0, above=0)
    if beta_fast < beta_slow:
        raise rope.wrong("beta_fast", f"a number from beta_slow, {beta_slow:g}")
    names = [name for name in ("attention_factor", "mscale", "mscale_all_dim") if rope.has(name)]
    more: dict[str, Any] = {name: rope.number(name, above=0) for name in names}
    more |= {"beta_fast": beta_fast, "beta_slow": beta_slow, "truncate": rope.boolean("truncate", True)}
    return RopeConfig(theta, kind, factor, original, **more)
