"""Pages of one layer, copied into tiles [K, S, T, 128] in VMEM: what both kernels do with a row's page table."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .tpu_tiles import divide


class PageCopies(NamedTuple):
    """`pages` in HBM, and the page tables, row after row, in scalar memory."""

    pages: Any
    tables: Any
    table_len: int
    first_page: Any
    page_size: int
    tile: int

    @property
    def pages_per_tile(self) -> int:
        """Pages of one full tile."""
        return self.tile // self.page_size

    def page(self, row: Any, index: Any) -> Any:
        """Number of a row's page."""
        return self.first_page + self.tables[row * self.table_len + index]

    def span(self, number: Any, begin: Any, end: Any) -> tuple[Any, Any]:
        """First page and last + 1 of tile `number` that hold something of the positions `begin` … `end` − 1."""
        first = number * self.pages_per_tile
        past = divide(end + self.page_size - 1, self.page_size)
        return jnp.maximum(first, divide(begin, self.page_size)), jnp.minimum(first + self.pages_per_tile, past)

    def fetch(self, row: Any, number: Any, span: tuple[Any, Any], target: Any, semaphore: Any) -> None:
        """Start the copies of some pages of a tile."""

        @pl.loop(*span)
        def _(index: Any) -> None:
            place = pl.multiple_of((index - number * self.pages_per_tile) * self.page_size, self.page_size)
            self._start(row, index, target, place, semaphore)

    def fetch_full(self, row: Any, number: Any, target: Any, semaphore: Any) -> None:
        """Start the copies of all pages of a tile: without a loop, so that they are issued beside other work."""
        for index in range(self.pages_per_tile):
            self._start(row, number * self.pages_per_tile + index, target, index * self.page_size, semaphore)

    def wait(self, num_pages: Any, semaphore: Any) -> None:
        """For as many bytes as so many pages have, in whichever order they come; no more than there are."""
        some = self.pages.at[pl.ds(0, num_pages)]
        pltpu.make_async_copy(some, some, semaphore).wait()

    def _start(self, row: Any, index: Any, target: Any, place: Any, semaphore: Any) -> None:
        source = self.pages.at[self.page(row, index)]
        pltpu.make_async_copy(source, target.at[:, :, pl.ds(place, self.page_size)], semaphore).start()
