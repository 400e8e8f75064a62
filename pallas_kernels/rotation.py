"""The rotation of heads by the positions of their tokens. Source: Su et al. 2021, arXiv:2104.09864."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rotation:
    """The cosines and sines of every token's angles, float32 on the device. F is half of the rotated lanes."""

    cos: Float[Array, "T 1 F"]
    sin: Float[Array, "T 1 F"]

    def apply(self, x_TNH: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        """Return `x_TNH` with the lane pairs (i, i + F) of every head rotated, and lanes from 2 F on unchanged.

        It is computed in float32 and returned in the dtype of `x_TNH`.
        """
        rotated_size = 2 * self.cos.shape[-1]
        if rotated_size < x_TNH.shape[-1]:  # The call below gets only lanes that are rotated.
            rotated, rest = jnp.split(x_TNH, [rotated_size], axis=-1)
            return jnp.concatenate([self.apply(rotated), rest], axis=-1)
        rotated = lax.platform_dependent(x_TNH.astype(jnp.float32), cpu=self._rotate_on_cpu, default=self._rotate)
        return rotated.astype(x_TNH.dtype)

    def _rotate(self, x_TNH: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        """Return `x_TNH` with all lanes rotated, by the pairs (i, i + F)."""
        first, second = jnp.split(x_TNH, 2, axis=-1)
        cos, sin = self.cos, self.sin
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _rotate_on_cpu(self, x_TNH: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        """Return what `_rotate` returns, in a form that XLA compiles to faster code on a CPU.

        XLA fuses the concatenation in `_rotate` so that each lane tests which half it is in, and so that cosines are
        computed again in every layer for every head. It does not recompute the operands of a concatenation, so here the
        cosines and sines are stacked: [T, 1, 2, F] factors of the first half and of the second half.
        """
        halves = x_TNH.reshape(*x_TNH.shape[:2], 2, -1)
        for_first, for_second = jnp.stack([self.cos, self.sin], axis=2), jnp.stack([-self.sin, self.cos], axis=2)
        return (halves[:, :, :1] * for_first + halves[:, :, 1:] * for_second).reshape(x_TNH.shape)
