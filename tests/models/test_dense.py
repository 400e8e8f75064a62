"""Dense attention beside its definition in float64: windows, soft caps and sinks, several sequences, gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.dense import DenseAttention
from jpaged.models.inputs import unpaged_inputs

from ..pallas_kernels.ragged_paged_attention.dense_attention import dense_attention

NUM_TOKENS = 7
STEP = unpaged_inputs(jnp.zeros(2 * NUM_TOKENS, jnp.int32), jnp.tile(jnp.arange(NUM_TOKENS), 2)).attention
SINKS = np.float32([0.5, -0.5, 3.0, 0.0])
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"sinks": SINKS},
    "sinks whose exponentials no float32 holds": {"sinks": np.float32([200.0, -200.0, 95.0, 0.0])},
    "all": {"window": 3, "soft_cap": 2.0, "sinks": SINKS},
}


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return queries of 4 heads, and keys and values of 2, for the tokens of both sequences."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2 * NUM_TOKENS, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    return q, k, v


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_each_sequence_attends_as_the_definition_says(options: dict[str, Any]) -> None:
    q, k, v = inputs()
    out, _ = DenseAttention(2).attend(0, *map(jnp.asarray, (q, k, v)), STEP, scale=0.3, **options)
    wanted = dense_attention(q, np.split(k, 2), np.split(v, 2), [NUM_TOKENS] * 2, scale=0.3, **options)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)


def test_a_token_that_sees_nothing_gives_zeros_with_sinks_and_a_mean_without() -> None:
    q, k, v = inputs()
    cache = DenseAttention(2, jnp.zeros((2, NUM_TOKENS, NUM_TOKENS), bool))
    out, _ = cache.attend(0, *map(jnp.asarray, (q, k, v)), STEP, scale=0.3, sinks=jnp.asarray(SINKS))
    np.testing.assert_array_equal(out, np.zeros_like(q))
    out, _ = cache.attend(0, *map(jnp.asarray, (q, k, v)), STEP, scale=0.3)
    np.testing.assert_allclose(out[0, 0], v[:NUM_TOKENS, 0].mean(axis=0), rtol=0, atol=1e-6)


def test_the_gradients_of_sinks_are_those_of_differences() -> None:
    q, k, v = map(jnp.asarray, inputs())

    def total(sinks: jax.Array) -> jax.Array:
        out, _ = DenseAttention(2).attend(0, q, k, v, STEP, scale=0.3, sinks=sinks)
        return jnp.sum(out * v[:, :1])

    steps = 0.05 * np.eye(4, dtype=np.float32)
    differences = [(total(SINKS + step) - total(SINKS - step)) / 0.1 for step in steps]
    gradients = np.asarray(jax.grad(total)(jnp.asarray(SINKS)))
    assert (np.abs(gradients) > 0.01).all()
    np.testing.assert_allclose(gradients, differences, rtol=0.01)
