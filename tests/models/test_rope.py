"""Rotary embedding: frequencies, rotation and factors. tests/models/families/test_goldens.py compares each scaling."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.config.rope import RopeConfig
from jpaged.models.rope import attention_factor, inverse_frequencies, rotation_at

HEAD = 64
PLAIN = inverse_frequencies(RopeConfig(theta=10000.0), HEAD)


def test_frequencies_fall_from_one_radian_per_position_to_one_over_theta() -> None:
    """Su et al. define θ_i = theta^(−2i / H)."""
    assert PLAIN.dtype == np.float32
    assert PLAIN[0] == 1.0
    assert PLAIN[HEAD // 4] == pytest.approx(10000.0**-0.5)
    assert PLAIN[1:] / PLAIN[:-1] == pytest.approx(10000.0 ** (-2 / HEAD), rel=1e-6)


def test_rotation_mixes_lane_i_with_lane_i_plus_half_of_the_head() -> None:
    x = np.zeros((2, 1, HEAD), np.float32)
    x[:, :, 3] = 1.0
    rotated = np.asarray(rotation_at(jnp.array([0, 5]), PLAIN, 2.0).apply(jnp.asarray(x)))[:, 0]
    assert np.flatnonzero(rotated[0]).tolist() == [3]
    assert rotated[0, 3] == 2.0
    assert np.flatnonzero(rotated[1]).tolist() == [3, 3 + HEAD // 2]
    angle = 5 * float(PLAIN[3])
    assert rotated[1, [3, 3 + HEAD // 2]] == pytest.approx([2 * math.cos(angle), 2 * math.sin(angle)], rel=1e-6)


def test_bfloat16_lanes_are_rotated_in_float32() -> None:
    x = jnp.ones((1, 1, HEAD), jnp.bfloat16)
    rotation = rotation_at(jnp.array([12345]), PLAIN, 1.0)
    rotated = rotation.apply(x)
    assert rotated.dtype == jnp.bfloat16
    exact = rotation.apply(x.astype(jnp.float32))
    # Numbers below 2 are rounded once, to eight bits.
    np.testing.assert_allclose(rotated.astype(jnp.float32), exact, rtol=0, atol=2**-8)


def test_frequency_factors_replace_the_formula_of_llama3() -> None:
    factors = tuple(float(i + 1) for i in range(HEAD // 2))
    scaled = inverse_frequencies(RopeConfig(kind="llama3", freq_factors=factors), HEAD)
    assert scaled == pytest.approx(PLAIN / np.array(factors), rel=1e-6)


FACTORS = {
    "linear has none": (RopeConfig(kind="linear", factor=4.0), 1.0),
    "longrope, from the config": (RopeConfig(kind="longrope", factor=4.0, attention_factor=1.2), 1.2),
    "eq. 22": (RopeConfig(kind="yarn", factor=4.0, original_max_position=16), 0.1 * math.log(4) + 1),
    "given by the config": (RopeConfig(kind="yarn", factor=4.0, original_max_position=16, attention_factor=1.5), 1.5),
    "nothing stretched": (RopeConfig(kind="yarn", factor=1.0, original_max_position=16), 1.0),
    "mscale over mscale_all_dim": (
        RopeConfig(kind="yarn", factor=4.0, original_max_position=16, mscale=0.7, mscale_all_dim=0.2),
        (0.07 * math.log(4) + 1) / (0.02 * math.log(4) + 1),
    ),
    "mscale alone is not used": (
        RopeConfig(kind="yarn", factor=4.0, original_max_position=16, mscale=0.7),
        0.1 * math.log(4) + 1,
    ),
}


@pytest.mark.parametrize(("config", "wanted"), FACTORS.values(), ids=FACTORS.keys())
def test_attention_factor(config: RopeConfig, wanted: float) -> None:
    assert attention_factor(config) == pytest.approx(wanted)


@pytest.mark.usefixtures("optimized")
def test_cosines_are_computed_once_for_all_layers() -> None:
    """Otherwise XLA:CPU computes them again in every consumer, for every head."""

    def layers(positions: jax.Array, x: jax.Array) -> jax.Array:
        rotation = rotation_at(positions, PLAIN, 1.0)
        for _ in range(4):
            x = jnp.sin(rotation.apply(x) @ jnp.ones((HEAD, HEAD)))
        return x

    shapes = jax.ShapeDtypeStruct((16,), jnp.int32), jax.ShapeDtypeStruct((16, 9, HEAD), jnp.float32)
    text = jax.jit(layers).lower(*shapes).compile().as_text()
    assert 1 <= text.count(" cosine(") <= 2
