"""Rotary position embedding, and its scalings for contexts longer than those that a model was trained on."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..pallas_kernels.rotation import Rotation
from .config.rope import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_size: int) -> np.ndarray:
    """Return the radians per position of each pair of rotated lanes: float32 [F] on the host, F ≤ H / 2.

    Without scaling they are theta^(−2i / size) for i < F, where `size` lanes of a head of `head_size` are rotated.
    `freq_factors`, if set, take the place of the scaling that `kind` names. linear divides all frequencies by `factor`;
    longrope and `freq_factors` divide each by its own factor; llama3 and yarn divide the slow ones, keep the fast ones,
    and blend in between. Computed in float64. Example: a head of 4 lanes and a theta of 10,000 give [1, 0.01].
    Sources: Su et al. 2021, arXiv:2104.09864; linear: Chen et al. 2023, arXiv:2306.15595; yarn: Peng et al.
    2023, arXiv:2309.00071, eq. 17 to 22; llama3: the Llama 3.1 release.
    """
    size = rope.rotary_size or head_size
    exponents = np.arange(0, size, 2, dtype=np.float64) / size
    frequencies = 1.0 / rope.theta**exponents
    if rope.freq_factors is not None:
        frequencies = frequencies / np.asarray(rope.freq_factors, np.float64)
    elif rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.kind == "yarn":
        frequencies = _yarn(rope, frequencies, size)
    elif rope.kind == "longrope":
        frequencies = frequencies / np.asarray(rope.long_factors if rope.is_long else rope.short_factors, np.float64)
    return frequencies.astype(np.float32)


def attention_factor(rope: RopeConfig) -> float:
    """Return the factor by which cosines and sines are multiplied: 1 except for yarn and longrope.

    `rope.attention_factor` counts if it is set, as it always is for longrope. Otherwise, with s = `rope.factor`, by
    which the context is stretched, and f(m) = 0.1 m ln(s) + 1, it is f(`mscale`) ÷ f(`mscale_all_dim`) if both are set,
    as in DeepSeek's models, and else f(1). For s ≤ 1 every f is 1.
    Source: Peng et al. 2023, arXiv:2309.00071, eq. 22.
    """
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:  # One of them alone has no effect, as in transformers.
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
    return _yarn_mscale(rope.factor, 1.0)


def rotation_at(positions: Int[Array, " T"], frequencies: np.ndarray, factor: float) -> Rotation:
    """Return the rotation by position × frequency (radians) of each token; `factor` multiplies cosines and sines."""
    angles_T1F = positions.astype(jnp.float32)[:, None, None] * jnp.asarray(frequencies)[None, None]
    return Rotation(jnp.cos(angles_T1F) * factor, jnp.sin(angles_T1F) * factor)


def _original_max(rope: RopeConfig) -> int:
    assert rope.original_max_position is not None, "the config readers set it for llama3 and yarn"
    return rope.original_max_position


def _llama3(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Return frequencies with llama3's scaling, by how often each rotates within the original context.

    A frequency (radians per position) that makes at most `low_freq_factor` rotations there is divided by `factor`. One
    that makes at least `high_freq_factor` is kept. In between, both results are blended linearly in the number of
    rotations: with the factors 1 and 4, one that makes 2.5 becomes the mean of both. `high_freq_factor` is larger than
    `low_freq_factor`; the config reader has checked it.
    """
    num_rotations = _original_max(rope) * frequencies / (2 * math.pi)
    blend = np.clip((num_rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(rope: RopeConfig, frequencies: np.ndarray, rotary_size: int) -> np.ndarray:
    """Return frequencies with YaRN's scaling: fast ones are kept, slow ones divided by `factor`, with a ramp between.

    The ramp is linear in the index of the frequency. It runs from the frequency that rotates `beta_fast` times within
    the original context to the one that rotates `beta_slow` times. With `truncate` both ends are moved outwards to
    whole indices. `rotary_size` is the number of rotated lanes, two for each frequency. Source: Peng et al. 2023,
    arXiv:2309.00071.
    """

    def index_with_rotations(num_rotations: float) -> float:
        """Return the index i, a fraction, of the frequency that makes `num_rotations` within the original context.

        Frequency i is theta^(−2i / rotary_size) radians per position, which is solved for i.
        """
        return rotary_size * math.log(_original_max(rope) / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_with_rotations(rope.beta_fast), index_with_rotations(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    # Like transformers, this limits `high` by the number of lanes, although there are only half as many frequencies.
    low, high = max(low, 0), min(high, rotary_size - 1)
    # The least length keeps the division defined where both ends are the same index.
    ramp = np.clip((np.arange(rotary_size // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
