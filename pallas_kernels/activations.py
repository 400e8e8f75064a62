"""Activations of MLPs, under the names that config.json gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Gate = Callable[[Float[Array, "T F"], Float[Array, "T F"]], Float[Array, "T F"]]
Activation = Callable[[Float[Array, "T F"]], Float[Array, "T F"]]


SWIGLU_LIMIT = 7.0
"""Bound of what `clamped_swiglu` takes."""


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


def _clamped_swiglu(gate: Float[Array, "T F"], up: Float[Array, "T F"]) -> Float[Array, "T F"]:
    """Return gate × σ(1.702 gate) × (up + 1), with gate at most 7 and up from −7 to 7, as GPT-OSS computes it.

    Source: OpenAI 2025, arXiv:2508.10925.
    """
    gate, up = jnp.minimum(gate, SWIGLU_LIMIT), jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return _quick_gelu(gate) * (up + 1)


GATES: Mapping[str, Gate] = {"clamped_swiglu": _clamped_swiglu}
"""Name → function of gates and what they gate, of those that are no activation(gate) × other."""
