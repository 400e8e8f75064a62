"""Rotary embedding: frequencies, rotation and factors. tests/models/families/test_goldens.py compares each scaling."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.config.rope import ORIGINAL, RopeConfig, context_len, read_rope, rope_fields
from jpaged.models.fields import Fields
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


def test_yarn_of_gpt_oss_blends_between_indices_that_are_no_integers() -> None:
    """Without `truncate` the ramp begins where a frequency makes 32 rotations in 4,096 tokens, and ends at 1."""
    yarn = {"rope_type": "yarn", "factor": 32.0, ORIGINAL: 4096, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    data = {"rope_scaling": yarn, "rope_theta": 150_000, "max_position_embeddings": 131_072}
    fields = Fields(data, Path("config.json"))
    rope = read_rope(fields, rope_fields(fields), head_size=HEAD)
    plain = 150_000.0 ** (-np.arange(HEAD // 2) / 32)
    low, high = (32 * math.log(4096 / (2 * math.pi * rotations)) / math.log(150_000) for rotations in (32, 1))
    assert (low, high) == pytest.approx((8.093, 17.398), abs=1e-3)
    shares = np.clip((np.arange(HEAD // 2) - low) / (high - low), 0, 1)
    assert inverse_frequencies(rope, HEAD) == pytest.approx(plain / 32 * shares + plain * (1 - shares), rel=1e-6)
    assert attention_factor(rope) == pytest.approx(1.3465736)
    assert context_len(rope, 131_072) == 131_072


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
