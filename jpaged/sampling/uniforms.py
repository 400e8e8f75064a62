"""The random numbers of a row: a function of its seed and of what the draw is for, and of nothing else.

Letters: R rows, n numbers of each.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from .control_flow import DYNAMIC, ControlFlow
from .sampling_rows import SamplingRows


def uniforms(
    rows: SamplingRows, purpose: int, num_draws: int, control_flow: ControlFlow = DYNAMIC
) -> Float[Array, "R num_draws"]:
    """Return `num_draws` random numbers in [0, 1) for each row, multiples of 2⁻²⁴.

    Each row has a Threefry key of its own: its 64-bit seed, with the sample index, the output index and `purpose` (such
    as PURPOSE_SAMPLE) folded in, as `jax.random.fold_in` does. The numbers are from `jax.random.bits` of that key. They
    depend on nothing else, and a larger `num_draws` keeps the first ones.

    To fold in a part is to hash it by the key, and number i comes from the hash of i. So one loop hashes them all, for
    each number of a row in its own lane: a program of a quarter of the instructions of four calls.
    """
    from jax.extend.random import threefry_2x32  # With Pallas, which a start that traces nothing does not need.

    shape, hash_each = (len(rows.seed_low), num_draws), jax.vmap(jax.vmap(threefry_2x32))
    seeds = jnp.stack([rows.seed_high, rows.seed_low], axis=1)
    parts = [rows.sample_index, rows.output_index, jnp.full_like(rows.output_index, purpose)]
    hashed = jnp.stack(
        [
            *(jnp.broadcast_to(part[:, None], shape) for part in parts),
            jnp.broadcast_to(jnp.arange(num_draws, dtype=jnp.int32), shape),
        ]
    )
    keys, counters = (lax.bitcast_convert_type(words, jnp.uint32) for words in (seeds, hashed))

    def hash_next(index: Int[Array, ""], keys: UInt32[Array, "R n 2"]) -> UInt32[Array, "R n 2"]:
        low_words = counters[index]
        return hash_each(keys, jnp.stack([jnp.zeros_like(low_words), low_words], axis=-1))

    hashes = control_flow.repeat(len(counters), hash_next, jnp.broadcast_to(keys[:, None], (*shape, 2)))
    bits = hashes[..., 0] ^ hashes[..., 1]
    # A float32 holds every integer of 24 bits, so that no number is rounded up to 1.
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
