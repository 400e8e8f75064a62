"""Sums of rows that are the same in any company."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def sum_by_halves(values: Float[Array, "*r n"]) -> Float[Array, "*r"]:
    """Return the sums over the last axis, in an order that depends on its length alone: halves are added repeatedly.

    XLA on a CPU adds up short and very long rows in an order that depends on their number, and a row's results must
    not.
    """
    while (size := values.shape[-1]) > 1:
        half = -(-size // 2)
        padding = [(0, 0)] * (values.ndim - 1) + [(0, 2 * half - size)]
        values = values[..., :half] + jnp.pad(values[..., half:], padding)
    return values[..., 0]
