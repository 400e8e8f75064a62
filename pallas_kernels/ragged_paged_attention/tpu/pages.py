"""Copies of a sequence's pages from HBM into a tile [K, S, tile, 128] in VMEM, by its page table.

A tile holds `tile` consecutive positions of one sequence, a whole number of pages; tile n of a row begins at position
n × tile. Each page is one DMA. Copies are started by `fetch` or `fetch_full` and waited for by their bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .lanes import Ref, divide


class PageCopies(NamedTuple):
    """The pages of one layer and the page tables of a step, as both attention kernels read them."""

    pages: Ref
    """[C, K, S, Z, 128] in HBM, of the cache's dtype: the pages of all layers."""
    page_tables: Ref
    """int32 [R × P] in SMEM: the page tables of all rows, row after row."""
    table_len: int
    """P: entries of one row's page table."""
    first_page: Any
    """int32 scalar: index in `pages` of this layer's page 0."""
    tile: int
    """Tokens per tile, a multiple of the page size."""

    @property
    def page_size(self) -> int:
        """Return Z, the number of tokens per page."""
        return int(self.pages.shape[3])

    @property
    def pages_per_tile(self) -> int:
        """Pages of one full tile."""
        return self.tile // self.page_size

    def page(self, row: Any, index: Any) -> Any:
        """Return where in `pages` the page with this index in the row's page table lies."""
        return self.first_page + self.page_tables[row * self.table_len + index]

    def span(self, tile_index: Any, begin: Any, end: Any) -> tuple[Any, Any]:
        """Return the first page index and the last + 1 of a tile that hold any of the positions `begin` … `end` − 1."""
        first = tile_index * self.pages_per_tile
        past = divide(end + self.page_size - 1, self.page_size)
        return jnp.maximum(first, divide(begin, self.page_size)), jnp.minimum(first + self.pages_per_tile, past)

    def fetch(self, row: Any, tile_index: Any, span: tuple[Any, Any], target: Ref, semaphore: Ref) -> None:
        """Start the copies of the pages of `span` into their places in the tile `target`."""

        @pl.loop(*span)
        def _(index: Any) -> None:
            offset = pl.multiple_of((index - tile_index * self.pages_per_tile) * self.page_size, self.page_size)
            self._start(self.page(row, index), target, offset, semaphore)

    def fetch_full(self, row: Any, tile_index: Any, target: Ref, semaphore: Ref, *, is_wanted: Any) -> None:
        """Start the copies of all pages of a tile, without a loop, if it is wanted. Its page numbers are read anyway.

        A branch with nothing but the starts of copies in it costs the fewest bundles.
        """
        first = tile_index * self.pages_per_tile
        pages = [self.page(row, first + index) for index in range(self.pages_per_tile)]

        @pl.when(is_wanted)
        def _() -> None:
            for index, page in enumerate(pages):
                self._start(page, target, index * self.page_size, semaphore)

    def wait(self, num_pages: Any, semaphore: Ref) -> None:
        """Wait until the bytes of `num_pages` pages have arrived, in whichever order.

        `num_pages` must not exceed the pages of the cache.
        """
        pages = self.pages.at[pl.ds(0, num_pages)]
        pltpu.make_async_copy(pages, pages, semaphore).wait()

    def _start(self, page: Any, target: Ref, offset: Any, semaphore: Ref) -> None:
        slots = target.at[:, :, pl.ds(offset, self.page_size)]
        pltpu.make_async_copy(self.pages.at[page], slots, semaphore).start()
