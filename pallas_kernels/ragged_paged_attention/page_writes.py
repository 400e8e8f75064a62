"""A step's keys or values into pages of rows, [C, K, Z, H]: by XLA's scatter, on whatever device."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def write_rows(
    pages: Float[Array, "C K Z H"], new: Float[Array, "T K H"], first_page: Int[Array, ""], slots: Int[Array, " T"]
) -> Float[Array, "C K Z H"]:
    """Write tokens to their slots in the layer whose pages begin at `first_page`.

    One row of H values at a time: any other way a TPU lays the whole cache out anew, in a copy. With one head a CPU
    would copy it behind that view of rows.
    """
    _, num_kv_heads, page_size, head_size = pages.shape
    page, offset = first_page + lax.div(slots, jnp.int32(page_size)), lax.rem(slots, jnp.int32(page_size))
    if num_kv_heads == 1:
        return pages.at[page, 0, offset].set(new.astype(pages.dtype)[:, 0])
    places = (page[:, None] * num_kv_heads + jnp.arange(num_kv_heads)[None]) * page_size + offset[:, None]
    rows = new.astype(pages.dtype).reshape(-1, head_size)
    return pages.reshape(-1, head_size).at[places.reshape(-1)].set(rows).reshape(pages.shape)
