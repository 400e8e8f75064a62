"""Rotary embeddings as configs describe them: kinds, parameters, and how config.json names these.

transformers 4 writes `rope_theta` and `rope_scaling`, version 5 `rope_parameters`. `models/rope.py` computes them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ModelLoadError
from ..io.fields import Fields
from .hf import FULL

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
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
    rotary_size: int | None = None
    """Lanes of a head that are rotated, the first ones; None for all."""
    short_factors: tuple[float, ...] = ()
    """longrope: a divisor of each inverse frequency, for contexts up to `original_max_position`."""
    long_factors: tuple[float, ...] = ()
    """longrope: such divisors for longer contexts."""
    is_long: bool = False
    """Whether `long_factors` are in use; see `for_context`."""

    def for_context(self, max_model_len: int) -> RopeConfig:
        """Return the embedding for sequences of up to this many tokens: longrope has two sets of factors.

        One set serves all sequences of an engine, since keys in the cache were rotated by one of them.
        """
        if self.kind != "longrope":
            return self
        assert self.original_max_position is not None, "read_rope sets it"
        return replace(self, is_long=max_model_len > self.original_max_position)


def read_rope(
    fields: Fields,
    *,
    head_size: int,
    rope: Fields | None = None,
    theta: float = DEFAULT_THETA,
    kinds: Collection[str] = ROPE_KINDS,
    partial: float | None = None,
) -> RopeConfig:
    """Read the rotary embedding of a config: the object `rope`, by default the one that all layers share.

    `theta` is the default of the family, and `kinds` are those that it has. `partial` is the share of a head that is
    rotated; without it a file that asks for less than all is refused. Raises ModelLoadError.
    """
    is_shared = rope is None
    if rope is None:
        rope = fields.mapping(rope_key(fields))
        if any(isinstance(value, dict) for value in rope.data.values()):
            wanted = "one rotary embedding for all layers: this family has none per layer type"
            raise fields.wrong(rope_key(fields), wanted)
        theta = fields.number("rope_theta", theta, above=1)
        if partial is None and (share := read_partial(fields, rope, 1.0)) != 1.0:
            reason = "this family rotates whole heads"
            raise ModelLoadError(f"{fields.path}: partial_rotary_factor is {share:g}, wanted 1: {reason}")
    kind = rope.choice("rope_type" if rope.has("rope_type") else "type", kinds, "default")
    max_position = fields.integer("max_position_embeddings")
    original = rope.integer("original_max_position_embeddings", max_position)
    if is_shared:  # A value beside rope_scaling overrides the one inside, as in transformers.
        original = fields.integer("original_max_position_embeddings", original)
    rotary_size = None if partial in (None, 1.0) else int(head_size * (partial or 0))
    if rotary_size is not None and (rotary_size < 2 or rotary_size % 2):
        raise ModelLoadError(f"{fields.path}: {rotary_size} lanes of a head are rotated, wanted an even number above 0")
    found = _checked_rope(rope, kind, original, max_position, rotary_size or head_size)
    return replace(found, theta=rope.number("rope_theta", theta, above=1), rotary_size=rotary_size)


def read_partial(fields: Fields, rope: Fields, default: float) -> float:
    """Return the share of a head that is rotated, from the object of the rotary embedding or from beside it."""
    share = fields.number("partial_rotary_factor", default, above=0, max=1)
    return rope.number("partial_rotary_factor", share, above=0, max=1)


def read_ropes_by_type(
    fields: Fields, layer_types: list[str], *, head_size: int, thetas: Mapping[str, tuple[str | None, float]]
) -> tuple[RopeConfig, ...]:
    """Read the rotary embedding of each layer, where the config has one per layer type.

    `thetas` maps the layer type to the top-level key of its theta in older files, None if there is none, and to the
    default. Older files' `rope_scaling` is for layers of full attention.
    """
    by_type = fields.mapping("rope_parameters")
    scaling = fields.mapping("rope_scaling")
    if unknown := [key for key in by_type.data if key not in thetas]:
        raise fields.wrong("rope_parameters", f"an object for each of {', '.join(thetas)}, and not {unknown[0]!r}")
    if scaling.data and by_type.data:
        raise fields.wrong("rope_scaling", "none beside rope_parameters")
    if scaling.data and not scaling.has("rope_type"):
        raise fields.wrong("rope_scaling", "an object with rope_type")
    ropes = {}
    for kind, (key, theta) in thetas.items():
        old = scaling if kind == FULL else Fields({}, fields.path, fields.names)
        theta = theta if key is None else fields.number(key, theta, above=1)
        rope = by_type.mapping(kind) if by_type.has(kind) else old
        ropes[kind] = read_rope(fields, head_size=head_size, rope=rope, theta=theta)
        if not ropes[kind].truncate:
            raise rope.wrong("truncate", "true: for one rotary embedding per layer type there is no other")
    return tuple(ropes[kind] for kind in layer_types)


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


def rope_key(fields: Fields) -> str:
    """Return the key of the object with the rotary embedding's parameters; older files' key counts if both are set."""
    return "rope_scaling" if fields.has("rope_scaling") and fields.data["rope_scaling"] else "rope_parameters"


def _checked_rope(rope: Fields, kind: str, original: int, max_position: int, size: int) -> RopeConfig:
    """Read the parameters that rotary embeddings of this `kind` have; positions are in tokens, `size` in lanes."""
    if rope.has("freq_factors"):
        return RopeConfig(kind="llama3", freq_factors=_factors(rope, "freq_factors", size))
    if kind == "default":
        return RopeConfig()
    if kind == "longrope":
        return _longrope(rope, original, max_position, size)
    implied = max_position / original if kind == "yarn" else None
    factor = rope.number("factor", implied, min=1)
    if kind == "linear":
        return RopeConfig(kind=kind, factor=factor)
    base = RopeConfig(kind=kind, factor=factor, original_max_position=original)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor", above=0), rope.number("high_freq_factor", above=0)
        if high <= low:
            raise rope.wrong("high_freq_factor", f"a number above low_freq_factor, {low:g}")
        return replace(base, low_freq_factor=low, high_freq_factor=high)
    beta_fast, beta_slow = rope.number("beta_fast", 32.0, above=0), rope.number("beta_slow", 1.0, above=0)
    if beta_fast < beta_slow:
        raise rope.wrong("beta_fast", f"a number from beta_slow, {beta_slow:g}")
    names = [name for name in ("attention_factor", "mscale", "mscale_all_dim") if rope.has(name)]
    more: dict[str, Any] = {name: rope.number(name, above=0) for name in names}
    return replace(base, beta_fast=beta_fast, beta_slow=beta_slow, truncate=rope.boolean("truncate", True), **more)


def _longrope(rope: Fields, original: int, max_position: int, size: int) -> RopeConfig:
    """Read two sets of factors, and the factor of cosines and sines: √(1 + ln(s) ÷ ln(original)) for a context × s.

    Source: Ding et al. 2024, arXiv:2402.13753.
    """
    factor = rope.number("factor", max_position / original, above=0)
    implied = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        kind="longrope",
        factor=factor,
        original_max_position=original,
        attention_factor=rope.number("attention_factor", implied, above=0),
        short_factors=_factors(rope, "short_factor", size),
        long_factors=_factors(rope, "long_factor", size),
    )


def _factors(rope: Fields, key: str, size: int) -> tuple[float, ...]:
    """Return a divisor for each of the inverse frequencies of `size` lanes."""
    factors = [float(value) for value in rope.items(key, (int, float))]
    if len(factors) != size // 2 or not all(0 < value < math.inf for value in factors):
        wanted = f"{size // 2} that are positive and finite"
        raise ModelLoadError(f"{rope.path}: {rope.name_of(key)} holds {len(factors)} values, wanted {wanted}")
    return tuple(factors)
