"""Moves whole pages: within a KV cache, out of it and back into it, bit for bit, in all layers at once.

A page outside of the cache is a tuple of small arrays, one per array of the cache: the entries of its layers,
[L, …]. A host pool is a table of such pages in pinned host memory, each an array of its own, so that a swap is only
transfers, which need no compiled program. One array for the whole pool does not work: the TPU's compiler refuses a
scatter into pinned host memory (it accepts a loop of slices), and ahead-of-time compilation for a GPU has no host
memory to test it with.

Each page and array is one gather and one scatter, in order, which XLA does in place on every platform. Taking all
pages of a batch before putting the first, or dynamic slices, made XLA copy the whole cache on CPU or GPU (measured).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from .interface import KVLayout, Pages

MAX_MOVES = 8
"""Pages that one call moves. They take as much memory beside the cache: 64 MiB for a model of 8e9 parameters in
bfloat16 with 64 tokens a page. Transferring that much takes far longer than dispatching the call."""

Page = tuple[Array, ...]
"""One page outside of the cache: the shapes of `KVLayout.shapes`, each with `num_layers` entries."""


def copy_pages(pages: Pages, sources: Int[Array, " N"], destinations: Int[Array, " N"], *, layout: KVLayout) -> Pages:
    """Copy page `sources[i]` to page `destinations[i]` in all layers, for each i in order, and return the new arrays.

    `pages` are the arrays of the cache; both index arrays hold page numbers within a layer, the same in every layer. A
    page that an earlier copy has written may be a later source. The caller must donate `pages`, whose memory the result
    takes. Padding entries copy the null page to itself. The copies are unrolled and made one by one, so
    that XLA works in place and needs memory for one page only.
    """
    for source, destination in zip(sources, destinations, strict=True):
        target_entries, source_entries = _entries(destination, layout), _entries(source, layout)
        pages = tuple(array.at[target_entries].set(array[source_entries]) for array in pages)
    return pages


def take_pages(pages: Pages, sources: Int[Array, " N"], *, layout: KVLayout) -> tuple[Page, ...]:
    """Return the N pages as arrays of their own, which later writes to the cache do not change."""
    return tuple(tuple(array[_entries(source, layout)] for array in pages) for source in sources)


def put_pages(
    pages: Pages, taken: tuple[Page, ...], destinations: Int[Array, " N"], *, layout: KVLayout
) -> tuple[Pages, Int[Array, ""]]:
    """Write the N pages `taken`, which `take_pages` returned, to the pages `destinations` of the cache in all layers.

    `pages` are the arrays of the cache, which the caller must donate; `destinations` are page numbers within a layer.
    Padding entries have the null page as destination, and any content. Return the new arrays, and a scalar whose only
    use is to wait for the program: all outputs of a program are ready together, and a caller cannot wait for the
    arrays, since they are donated to the next step. The scalar's value, the sum of `destinations`, means nothing.
    """
    for page, destination in zip(taken, destinations, strict=True):
        target_entries = _entries(destination, layout)
        pages = tuple(array.at[target_entries].set(entries) for array, entries in zip(pages, page, strict=True))
    return pages, destinations.sum()


def _entries(page: Int[Array, ""], layout: KVLayout) -> Int[Array, " L"]:
    """Return the index of a page's entry for each layer."""
    return layout.entry(jnp.arange(layout.num_layers, dtype=jnp.int32), page)
