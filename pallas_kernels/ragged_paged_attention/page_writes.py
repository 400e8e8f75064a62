"""A step's keys or values into pages of rows, [C, K, Z, H]: by XLA's scatter, on whatever device."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def write_rows(
    pages: Float[Array, "C K Z H"], new: Float[Array, "T K H"], first_page: Int[Array, ""], slots: Int[Array, " T"]
) -> Float[Array, "C K Z H"]:
    """Return `pages` with the T tokens' keys or values written to their `slots` in one layer, in the pages' dtype.

    `pages` [C, K, Z, H] holds the pages of all layers, Z slots of K KV heads each, and `first_page` is the index of the
    layer's page 0. Slot 70 in pages of 64 is offset 6 of the layer's page 1. The caller should donate `pages`, so that
    the result takes their memory.

    The pages are viewed as rows of H values, [C × K × Z, H], and rows are scattered: with other indices XLA would copy
    the whole cache on a TPU to lay it out anew. With one KV head XLA would copy the cache for that view on a CPU, so
    the pages are indexed directly.
    """
    _, num_kv_heads, page_size, head_size = pages.shape
    page, offset = first_page + lax.div(slots, jnp.int32(page_size)), lax.rem(slots, jnp.int32(page_size))
    if num_kv_heads == 1:
        return pages.at[page, 0, offset].set(new.astype(pages.dtype)[:, 0])
    # Row index of [C, K, Z, H] viewed as [C · K · Z, H], for each token and KV head.
    row_indices = (page[:, None] * num_kv_heads + jnp.arange(num_kv_heads)[None]) * page_size + offset[:, None]
    rows = new.astype(pages.dtype).reshape(-1, head_size)
    return pages.reshape(-1, head_size).at[row_indices.reshape(-1)].set(rows).reshape(pages.shape)
