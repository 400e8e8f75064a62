"""Rotary embeddings as configs describe them: kinds, parameters, and how config.json names these.

transformers 4 writes `rope_theta` and `rope_scaling`, version 5 `rope_parameters`. `models/rope.py` computes them.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ModelLoadError
from ..fields import Fields
from .hf import FULL, ROPE_OBJECTS

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
DEFAULT_THETA = 10_000.0
MAX_FACTOR = 1e6
"""Largest factor that is read, whether it stretches a context or divides a frequency."""
ORIGINAL = "original_max_position_embeddings"


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
        """Return the embedding for an engine whose sequences have at most `max_model_len` tokens.

        Only longrope depends on the length: it has short factors, for up to `original_max_position` tokens, and long
        ones for more. One set serves all sequences of an engine, short ones included, since all keys in the cache must
        be rotated by the same frequencies. For every other kind this returns the embedding itself.
        """
        if self.kind != "longrope":
            return self
        assert self.original_max_position is not None, "read_rope sets it"
        return replace(self, is_long=max_model_len > self.original_max_position)


def rope_fields(
    fields: Fields,
    *,
    theta: float = DEFAULT_THETA,
    theta_key: str = "rope_theta",
    share: float = 1.0,
    share_key: str = "partial_rotary_factor",
) -> Fields:
    """Return the parameters of the rotary embedding that all layers share, as one object in the form of transformers 5.

    As in transformers, a value inside of the file's object wins over one at the top level. Only for
    `original_max_position_embeddings` the top level wins. `theta` and `share`, the rotated share of a head, are the
    family's defaults; `theta_key` and `share_key` are their top-level keys in files of transformers 4. Raises
    ModelLoadError, also for an object per layer type.

    Example: {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2}} gives {"rope_theta": 5e5,
    "partial_rotary_factor": 1.0, "rope_type": "linear", "factor": 2}.
    """
    key = rope_key(fields)
    in_object = fields.mapping(key)
    if any(isinstance(value, dict) for value in in_object.data.values()):
        raise fields.wrong(key, "one rotary embedding for all layers: this family has none per layer type")
    values = {
        "rope_theta": fields.number(theta_key, theta, above=1),
        "partial_rotary_factor": fields.number(share_key, share, above=0, max=1),
    }
    # The values from the top level count only where the object has none.
    merged = _over(values, in_object)
    if fields.has(ORIGINAL):
        merged = merged.with_data({**merged.data, ORIGINAL: fields.integer(ORIGINAL)})
    # Errors name a value that came from the top level by its key there.
    outside = {"rope_theta": theta_key, "partial_rotary_factor": share_key}
    names = {inner: fields.name_of(outer) for inner, outer in outside.items() if in_object.data.get(inner) is None}
    return replace(merged, names={**in_object.names, **names})


def _over(defaults: Mapping[str, Any], found: Fields) -> Fields:
    """Return the fields of the object `found`, with `defaults` for keys that are absent or null."""
    return found.with_data({**defaults, **{key: value for key, value in found.data.items() if value is not None}})


def read_rope(fields: Fields, rope: Fields, *, head_size: int, is_partial: bool = False) -> RopeConfig:
    """Return the rotary embedding whose parameters are the fields `rope`; `fields` are those of the whole config.

    `head_size` is in lanes. `is_partial` says whether the family may rotate only the first lanes of each head, a share
    `partial_rotary_factor` of them. The kind is under `rope_type`, or under `type` in older files. Raises
    ModelLoadError for a kind or a value that is not supported, and for an odd number of rotated lanes.
    """
    kind = rope.choice("rope_type" if rope.has("rope_type") else "type", ROPE_KINDS, "default")
    # All lanes by default. A share is rounded down to whole lanes: 0.25 of 80 lanes rotates the first 20.
    share = rope.number("partial_rotary_factor", 1.0, above=0, max=1)
    if share != 1.0 and not is_partial:
        raise rope.wrong("partial_rotary_factor", "1: this family rotates whole heads")
    size = int(head_size * share)
    if size < 2 or size % 2:
        raise ModelLoadError(f"{fields.path}: {size} lanes of a head are rotated, wanted an even number above 0")
    scaled = _read_scaling(rope, kind, fields.integer("max_position_embeddings"), size)
    theta = rope.number("rope_theta", above=1)  # The caller has put the family's default into `rope`.
    return replace(scaled, theta=theta, rotary_size=None if size == head_size else size)


def read_ropes_by_type(
    fields: Fields, layer_types: list[str], *, head_size: int, thetas: Mapping[str, tuple[str | None, float]]
) -> tuple[RopeConfig, ...]:
    """Return the rotary embedding of each layer, for a family with one rotary embedding per layer type.

    Files of transformers 5 have an object per layer type in `rope_parameters`. Files of version 4 have each theta at
    the top level, and a `rope_scaling` that applies to layers of full attention only. `thetas` maps a layer type to
    (its top-level key, None if it has none; the default theta). A layer type without an object of its own is read in
    the form of version 4. Parameters for all layers in `rope_parameters` have no effect in transformers; they may stand
    there if they say what each layer type has. Raises ModelLoadError for others, and for a file that mixes both forms.

    Example: with the `thetas` {FULL: ("rope_theta", 1e6), SLIDING: (None, 1e4)}, a file with only {"rope_scaling":
    {"rope_type": "linear", "factor": 8}} gives theta 1e6 and factor 8 on layers of full attention, and theta 1e4
    without scaling on all others.
    """
    by_type = fields.mapping("rope_parameters")
    scaling = fields.mapping("rope_scaling")
    of_all_layers = {key: value for key, value in by_type.data.items() if key not in thetas}
    if unknown := [key for key, value in of_all_layers.items() if isinstance(value, dict)]:
        raise fields.wrong("rope_parameters", f"an object for each of {', '.join(thetas)}, and not {unknown[0]!r}")
    if scaling.data and by_type.data:
        raise fields.wrong("rope_scaling", "none beside rope_parameters")
    if scaling.data and not scaling.has("rope_type"):
        raise fields.wrong("rope_scaling", "an object with rope_type")
    ropes = {}
    for layer_type, (key, default) in thetas.items():
        # In the form of version 4, only layers of full attention have a scaling.
        older_form = scaling if layer_type == FULL else Fields({}, fields.path, fields.names)
        theta = default if key is None else fields.number(key, default, above=1)
        rope = by_type.mapping(layer_type) if by_type.has(layer_type) else older_form
        rope = _over({"rope_theta": theta}, rope)
        ropes[layer_type] = read_rope(fields, rope, head_size=head_size)
        if not ropes[layer_type].truncate:
            reason = "transformers ignores it in an object per layer type; leave it out"
            raise rope.wrong("truncate", f"true: {reason}")
        with_others = rope.with_data({**rope.data, **of_all_layers})
        if of_all_layers and read_rope(fields, with_others, head_size=head_size) != ropes[layer_type]:
            wanted = f"objects for {' and '.join(thetas)}, each with its parameters"
            reason = "transformers ignores parameters for all layers, and these differ from what it uses"
            raise fields.wrong("rope_parameters", f"{wanted}: {reason}")
    return tuple(ropes[layer_type] for layer_type in layer_types)


def context_len(rope: RopeConfig, max_position: int) -> int:
    """Return the longest context, in positions, that a model with this rotary embedding is made for.

    `max_position` is `max_position_embeddings` of the file. For `linear` it is the context before stretching, so it is
    multiplied by the factor: 4096 with the factor 4 gives 16,384. For `yarn`, some files have the context before
    stretching there and some the one after it, so the result is the larger of `max_position` and the original context
    times the factor. For all other kinds, `max_position` is the result.
    """
    if rope.kind == "linear":
        return int(max_position * rope.factor)
    if rope.kind == "yarn" and rope.original_max_position is not None:
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position


def rope_key(fields: Fields) -> str:
    """Return the key of the object with the rotary embedding's parameters.

    It is `rope_scaling` if that is there and not empty, and `rope_parameters` otherwise, even if that is absent.
    """
    old, new = ROPE_OBJECTS
    return old if fields.has(old) and fields.data[old] else new


def _read_scaling(rope: Fields, kind: str, max_position: int, size: int) -> RopeConfig:
    """Return the embedding of this `kind` with its scaling; the caller sets theta and the number of rotated lanes.

    `kind` is one of ROPE_KINDS. `max_position` is the model's longest context in tokens, and `size` the number of
    rotated lanes. The original context, before stretching, is `max_position` if the file does not name it. A factor is
    required for linear and llama3; for yarn its default is `max_position` ÷ original context. Raises ModelLoadError for
    a parameter that is missing, out of range or contradicts another.
    """
    if kind == "default":
        return RopeConfig()
    # longrope divides by the logarithm of the original context, which is 0 for 1.
    original = rope.integer(ORIGINAL, max_position, min=2 if kind == "longrope" else 1)
    if kind == "longrope":
        return _read_longrope(rope, original, max_position, size)
    factor = rope.number("factor", max_position / original if kind == "yarn" else None, min=1, max=MAX_FACTOR)
    if kind == "linear":
        return RopeConfig(kind=kind, factor=factor)
    base = RopeConfig(kind=kind, factor=factor, original_max_position=original)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor", above=0), rope.number("high_freq_factor", above=0)
        if high <= low:
            raise rope.wrong("high_freq_factor", f"a number above low_freq_factor, {low:g}")
        return replace(base, low_freq_factor=low, high_freq_factor=high)
    # The remaining kind is yarn. 32 and 1 rotations within the original context are the defaults of its paper.
    beta_fast, beta_slow = rope.number("beta_fast", 32.0, above=0), rope.number("beta_slow", 1.0, above=0)
    if beta_fast < beta_slow:
        raise rope.wrong("beta_fast", f"a number from beta_slow, {beta_slow:g}")
    names = [name for name in ("attention_factor", "mscale", "mscale_all_dim") if rope.has(name)]
    more: dict[str, Any] = {name: rope.number(name, above=0) for name in names}
    return replace(base, beta_fast=beta_fast, beta_slow=beta_slow, truncate=rope.boolean("truncate", True), **more)


def _read_longrope(rope: Fields, original: int, max_position: int, size: int) -> RopeConfig:
    """Return a longrope embedding with its short and long factors, and its factor of cosines and sines.

    The latter is √(1 + ln(s) ÷ ln(original)) unless the file gives it as `attention_factor`, and 1 for s ≤ 1. Here s is
    the factor by which the context is stretched: the file's `factor`, or else max_position ÷ original. `original` and
    `max_position` are in tokens, and `size` is the number of rotated lanes. Each list of factors has `size` ÷ 2 values.
    Source: Ding et al. 2024, arXiv:2402.13753.
    """
    factor = rope.number("factor", max_position / original, above=0, max=MAX_FACTOR)
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
    """Return the list under `key`: one divisor for each of the `size` ÷ 2 inverse frequencies."""
    return checked_factors(rope.items(key, (int, float)), size, f"{rope.path}: {rope.name_of(key)}")


def checked_factors(values: Sequence[float], size: int, name: str) -> tuple[float, ...]:
    """Return `values`, one divisor for each of the `size` ÷ 2 inverse frequencies, as floats.

    `size` is the number of rotated lanes; each pair of lanes has one frequency. Raises ModelLoadError, which begins
    with `name`, for another number of values, and for one that is not a number above 0 and up to MAX_FACTOR.
    """
    if len(values) != size // 2:
        raise ModelLoadError(f"{name} holds {len(values)} values, wanted {size // 2}")
    for value in values:
        if isinstance(value, bool) or not 0 < value <= MAX_FACTOR:
            raise ModelLoadError(f"{name} holds {reprlib.repr(value)}, wanted numbers above 0 and up to {MAX_FACTOR:g}")
    return tuple(map(float, values))
