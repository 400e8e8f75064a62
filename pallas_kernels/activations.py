"""Activations of MLPs, under the names that config.json gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Activation = Callable[[Float[Array, "T F"]], Float[Array, "T F"]]


def _gelu(x: Float[Array, "T F"]) -> Float[Array, "T F"]:
    """Return x Φ(x), exactly. Source: Hendrycks & Gimpel 2016, arXiv:1606.08415."""
    return jax.nn.gelu(x, approximate=False)


def _gelu_tanh(x: Float[Array, "T F"]) -> Float[Array, "T F"]:
    """Return x Φ(x), approximated by a hyperbolic tangent. Source: Hendrycks & Gimpel 2016, arXiv:1606.08415."""
    return jax.nn.gelu(x, approximate=True)


def _quick_gelu(x: Float[Array, "T F"]) -> Float[Array, "T F"]:
    return x * jax.nn.sigmoid(1.702 * x)


def _relu2(x: Float[Array, "T F"]) -> Float[Array, "T F"]:
    """Return relu(x)². Source: So et al. 2021, arXiv:2109.08668."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": _gelu,
    "gelu_python": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_accurate": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_python_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": jax.nn.relu,
    "relu2": _relu2,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}
"""Name in config.json → activation."""
