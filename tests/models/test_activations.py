"""Activations against their formulas, under every name that config.json gives them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.activations import ACTIVATIONS

X = np.linspace(-6, 6, 97)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


SILU = X * sigmoid(X)
GELU = X * np.array([(1 + math.erf(x / math.sqrt(2))) / 2 for x in X])
GELU_TANH = X / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)))
WANTED = {
    "silu": SILU,
    "swish": SILU,
    "gelu": GELU,
    "gelu_python": GELU,
    "gelu_new": GELU_TANH,
    "gelu_fast": GELU_TANH,
    "gelu_accurate": GELU_TANH,
    "gelu_pytorch_tanh": GELU_TANH,
    "gelu_python_tanh": GELU_TANH,
    "quick_gelu": X * sigmoid(1.702 * X),
    "relu": np.maximum(X, 0),
    "relu2": np.maximum(X, 0) ** 2,
    "tanh": np.tanh(X),
    "sigmoid": sigmoid(X),
}


def test_every_activation_has_a_formula_here() -> None:
    assert WANTED.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("name", WANTED)
def test_an_activation_is_what_its_name_means(name: str) -> None:
    found = jax.jit(ACTIVATIONS[name])(jnp.asarray(X, jnp.float32))
    np.testing.assert_allclose(found, WANTED[name], rtol=0, atol=2e-6)
