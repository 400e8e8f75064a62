"""Rotary embedding: its definition, and what each scaling promises at its ends. Values: see test_llama."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.config import RopeConfig
from jpaged.models.rope import attention_factor, inverse_frequencies, rotation_at

HEAD = 64
PLAIN = inverse_frequencies(RopeConfig(theta=10000.0), HEAD)


def test_frequencies_fall_from_one_radian_per_position_to_one_over_theta() -> None:
    """Su et al.: θ_i = theta^(−2i / H)."""
    assert PLAIN.dtype == np.float32
    assert PLAIN[0] == 1.0
    assert PLAIN[HEAD // 4] == pytest.approx(10000.0**-0.5)
    assert PLAIN[1:] / PLAIN[:-1] == pytest.approx(10000.0 ** (-2 / HEAD), rel=1e-6)


def test_rotation_turns_lane_i_with_lane_i_plus_half() -> None:
    x = np.zeros((2, 1, HEAD), np.float32)
    x[:, :, 3] = 1.0
    turned = np.asarray(rotation_at(jnp.array([0, 5]), PLAIN, 2.0).apply(jnp.asarray(x)))[:, 0]
    assert np.flatnonzero(turned[0]).tolist() == [3]
    assert turned[0, 3] == 2.0
    assert np.flatnonzero(turned[1]).tolist() == [3, 3 + HEAD // 2]
    angle = 5 * float(PLAIN[3])
    assert turned[1, [3, 3 + HEAD // 2]] == pytest.approx([2 * math.cos(angle), 2 * math.sin(angle)], rel=1e-6)


def test_scores_depend_on_the_distance_only() -> None:
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, HEAD)), jnp.float32) for _ in range(2))

    def score(start: int) -> float:
        turn_q, turn_k = (rotation_at(jnp.array([position]), PLAIN, 1.0) for position in (start + 7, start))
        return float(jnp.sum(turn_q.apply(q) * turn_k.apply(k)))

    near, far = score(0), score(1000)
    # At position 1000 a float32 angle is rounded by 1000 × 6e-8.
    assert near == pytest.approx(far, abs=2e-3)


def test_bfloat16_lanes_are_turned_in_float32() -> None:
    x = jnp.ones((1, 1, HEAD), jnp.bfloat16)
    rotation = rotation_at(jnp.array([12345]), PLAIN, 1.0)
    turned = rotation.apply(x)
    assert turned.dtype == jnp.bfloat16
    exact = rotation.apply(x.astype(jnp.float32))
    # One rounding to eight bits, of numbers below 2.
    np.testing.assert_allclose(turned.astype(jnp.float32), exact, rtol=0, atol=2**-8)


def test_linear_divides_every_frequency() -> None:
    scaled = inverse_frequencies(RopeConfig(kind="linear", factor=4.0), HEAD)
    assert scaled == pytest.approx(PLAIN / 4, rel=1e-6)


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between() -> None:
    config = RopeConfig(
        kind="llama3", factor=8.0, original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    scaled, waves = inverse_frequencies(config, HEAD), 2 * math.pi / PLAIN
    is_short, is_long = waves < 8192 / 4, waves > 8192 / 1
    assert is_short.any()
    assert is_long.any()
    assert scaled[is_short] == pytest.approx(PLAIN[is_short])
    assert scaled[is_long] == pytest.approx(PLAIN[is_long] / 8)
    between = ~is_short & ~is_long
    assert between.any()
    assert ((scaled > PLAIN / 8) & (scaled < PLAIN))[between].all()


def test_yarn_keeps_fast_lanes_and_stretches_slow_ones() -> None:
    """Lanes that turn more than beta_fast times within the original length stay, those below beta_slow stretch."""
    config = RopeConfig(kind="yarn", factor=4.0, original_max_position=2048)
    scaled, turns = inverse_frequencies(config, HEAD), 2048 * PLAIN / (2 * math.pi)
    assert scaled[turns > 64] == pytest.approx(PLAIN[turns > 64])
    assert scaled[turns < 0.5] == pytest.approx(PLAIN[turns < 0.5] / 4)
    assert (np.diff(scaled / PLAIN) <= 1e-7).all()


def test_a_files_own_factors_replace_the_formula() -> None:
    factors = tuple(float(i + 1) for i in range(HEAD // 2))
    scaled = inverse_frequencies(RopeConfig(kind="llama3", freq_factors=factors), HEAD)
    assert scaled == pytest.approx(PLAIN / np.array(factors), rel=1e-6)


FACTORS = {
    "only yarn has one": (RopeConfig(kind="linear", factor=4.0), 1.0),
    "eq. 22": (RopeConfig(kind="yarn", factor=4.0, original_max_position=16), 0.1 * math.log(4) + 1),
    "given": (RopeConfig(kind="yarn", factor=4.0, original_max_position=16, attention_factor=1.5), 1.5),
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


def test_cosines_are_computed_once_for_all_layers() -> None:
    """XLA:CPU likes to compute them again in every consumer, for every head."""

    def layers(positions: jax.Array, x: jax.Array) -> jax.Array:
        rotation = rotation_at(positions, PLAIN, 1.0)
        for _ in range(4):
            x = jnp.sin(rotation.apply(x) @ jnp.ones((HEAD, HEAD)))
        return x

    shapes = jax.ShapeDtypeStruct((16,), jnp.int32), jax.ShapeDtypeStruct((16, 9, HEAD), jnp.float32)
    text = jax.jit(layers).lower(*shapes).compile().as_text()
    assert 1 <= text.count(" cosine(") <= 2
