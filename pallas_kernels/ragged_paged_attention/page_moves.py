"""Moves whole pages: within a KV cache, out of it and back into it, bit for bit, in all layers at once.

A page outside of the cache is a tuple of small arrays, one per array of the cache: the entries of its layers,
[L, …]. A host pool is a table of such pages in pinned host memory, each an array of its own, because what
happens to it is then nothing but transfers, which need no compiler. One array for the whole pool was tried: the
TPU's compiler refuses a scatter into pinned host memory (it takes a loop of slices), and a GPU that is only
compiled for has no host memory, so that there nothing could be proven.

Each page and array is one gather and one scatter, in order: that is done in place everywhere. To take all pages of
a batch before putting the first, or to use dynamic slices, made XLA copy the whole cache on CPU or GPU (measured).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from .interface import KVLayout

MAX_MOVES = 8
"""Pages that one call moves. The pages under way take as much room beside the cache: 64 MiB for a model of 8e9
parameters in bfloat16 with 64 tokens a page, and with that much to transfer, a call's dispatch is nothing."""

Page = tuple[Array, ...]
"""One page outside of the cache: the shapes of `KVLayout.shapes`, each with `num_layers` entries."""


def copy_pages(
    pages: tuple[Array, ...], sources: Int[Array, " N"], destinations: Int[Array, " N"], *, layout: KVLayout
) -> tuple[Array, ...]:
    """Copy pages within the cache, in the order given. Padding copies the null page to itself.

    Returns the new arrays; `pages`, to be donated, are overwritten. Needs the room of one page.
    """
    for source, destination in zip(sources, destinations, strict=True):
        to, at = _entries(destination, layout), _entries(source, layout)
        pages = tuple(array.at[to].set(array[at]) for array in pages)
    return pages


def take_pages(pages: tuple[Array, ...], sources: Int[Array, " N"], *, layout: KVLayout) -> tuple[Page, ...]:
    """The N pages, as arrays of their own: what later happens to the cache does not touch them."""
    return tuple(tuple(array[_entries(source, layout)] for array in pages) for source in sources)


def put_pages(
    pages: tuple[Array, ...], taken: tuple[Page, ...], destinations: Int[Array, " N"], *, layout: KVLayout
) -> tuple[tuple[Array, ...], Int[Array, ""]]:
    """Write N pages that `take_pages` returned into the cache. Padding writes some page to the null page.

    Returns the new arrays and a number without meaning that is there once they are: the arrays themselves,
    being donated to whatever comes next, cannot be waited for. `pages`, to be donated, are overwritten.
    """
    for page, destination in zip(taken, destinations, strict=True):
        at = _entries(destination, layout)
        pages = tuple(array.at[at].set(entries) for array, entries in zip(pages, page, strict=True))
    return pages, destinations.sum()


def _entries(page: Int[Array, ""], layout: KVLayout) -> Int[Array, " L"]:
    """Where a page lies in each layer."""
    return jnp.arange(layout.num_layers, dtype=jnp.int32) * layout.num_pages + page
