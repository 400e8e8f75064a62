"""Copies of a sequence's pages from HBM into a tile [K, S, tile, 128] in VMEM, by its page table.

A tile holds `tile` consecutive positions of one sequence, a whole number of pages; tile n of a row begins at position
n × tile. Each page is one DMA. Copies are started by `fetch` or `fetch_full` and waited for by their bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from .lanes import Ref, Scalar, divide


class PageSpan(NamedTuple):
    """Consecutive entries `begin` … `end` − 1 of one row's page table; none if `end` ≤ `begin`."""

    begin: Scalar
    end: Scalar


class PageCopies(NamedTuple):
    """The pages of one layer and the page tables of a step, as both attention kernels read them."""

    pages: Ref
    """[C, K, S, Z, 128] in HBM, of the cache's dtype: the pages of all layers."""
    page_tables: Ref
    """int32 [R × P] in SMEM: the page tables of all rows, row after row."""
    table_len: int
    """P: entries of one row's page table."""
    first_page: Scalar
    """int32 scalar: index in `pages` of this layer's page 0."""
    tile: int
    """Tokens per tile, a multiple of the page size."""

    @property
    def page_size(self) -> int:
        """Return Z, the number of tokens per page."""
        return int(self.pages.shape[3])

    @property
    def pages_per_tile(self) -> int:
        """Return the number of pages of one full tile."""
        return self.tile // self.page_size

    def page(self, row: Scalar, table_index: Scalar) -> Scalar:
        """Return the index in `pages` of the page that entry `table_index` of the row's page table names."""
        return self.first_page + self.page_tables[row * self.table_len + table_index]

    def span(self, tile_index: Scalar, begin_position: Scalar, end_position: Scalar) -> PageSpan:
        """Return the page-table entries of a tile whose pages hold positions `begin_position` … `end_position` − 1.

        Example: in pages of 16 tokens and tiles of 64, the positions 70 … 99 of tile 1 (64 … 127) lie in the pages of
        entries 4 … 6, so the span is (4, 7). If none of these positions lies in the tile, the span is empty: its end is
        not after its begin.
        """
        first_of_tile = tile_index * self.pages_per_tile
        end_of_row = divide(end_position + self.page_size - 1, self.page_size)
        return PageSpan(
            jnp.maximum(first_of_tile, divide(begin_position, self.page_size)),
            jnp.minimum(first_of_tile + self.pages_per_tile, end_of_row),
        )

    def fetch(self, row: Scalar, tile_index: Scalar, span: PageSpan, target: Ref, semaphore: Ref) -> None:
        """Start one DMA for each page of `span`, from HBM into `target`, the buffer in VMEM for one tile of a row.

        `span` holds entries of the row's page table within tile `tile_index`; an empty span starts nothing. `target` is
        [K, S, tile, 128], and each page goes to the offset of its tokens in the tile. The caller waits for all these
        pages with `wait(span.end - span.begin, semaphore)`.
        """

        @pl.loop(span.begin, span.end)
        def _(table_index: Array) -> None:
            page_of_tile = table_index - tile_index * self.pages_per_tile
            offset = pl.multiple_of(page_of_tile * self.page_size, self.page_size)
            self._start(self.page(row, table_index), target, offset, semaphore)

    def fetch_full(
        self, row: Scalar, tile_index: Scalar, target: Ref, semaphore: Ref, *, is_needed: bool | Array
    ) -> None:
        """If `is_needed`, start the DMAs of all pages of tile `tile_index` of a row into `target`, without a loop.

        `target` is [K, S, tile, 128] in VMEM. The page table is read in either case, outside the branch: a branch that
        contains only the starts of copies takes the fewest VLIW bundles. `row` and `tile_index` must therefore be valid
        even if the tile is not needed.
        """
        first_of_tile = tile_index * self.pages_per_tile
        pages = [self.page(row, first_of_tile + index) for index in range(self.pages_per_tile)]

        @pl.when(is_needed)
        def _() -> None:
            for index, page in enumerate(pages):
                self._start(page, target, index * self.page_size, semaphore)

    def wait(self, num_pages: Scalar, semaphore: Ref) -> None:
        """Wait until the bytes of `num_pages` pages have arrived at the semaphore, whichever pages they are.

        No copy is started: the descriptor only tells `wait` how many bytes to expect. `num_pages` must not exceed the
        pages of the cache.
        """
        pages = self.pages.at[pl.ds(0, num_pages)]
        pltpu.make_async_copy(pages, pages, semaphore).wait()

    def _start(self, page: Scalar, target: Ref, offset: Scalar, semaphore: Ref) -> None:
        slots = target.at[:, :, pl.ds(offset, self.page_size)]
        pltpu.make_async_copy(self.pages.at[page], slots, semaphore).start()
