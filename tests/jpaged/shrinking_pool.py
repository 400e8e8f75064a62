"""A pool of pages that tests make smaller and larger while it is in use. The engine's own pools keep their size."""

from __future__ import annotations

from jpaged.kv_cache.page_pool import PagePool


class ShrinkingPool(PagePool):
    """A pool some of whose pages are withdrawn: those in use as soon as they are given back."""

    num_withdrawn = 0
    """Pages that are to be kept out of use."""
    withdrawn: set[int]

    def clear(self) -> None:
        """Make every page free and empty; as many as before stay withdrawn."""
        super().clear()
        self.withdrawn = set()
        self._withdraw_free()

    @property
    def num_usable(self) -> int:
        return max(0, super().num_usable - self.num_withdrawn)

    @property
    def num_used(self) -> int:
        return super().num_used - len(self.withdrawn)

    def resize(self, num_pages: int) -> None:
        """Withdraw `num_pages` pages, or give some back if it is negative."""
        self.num_withdrawn += num_pages
        while len(self.withdrawn) > self.num_withdrawn:
            self._make_free(self.withdrawn.pop())
        self._withdraw_free()

    def _withdraw_free(self) -> None:
        while len(self.withdrawn) < self.num_withdrawn and self.num_free:
            self.withdrawn.add(self._pop()[0])

    def _make_free(self, page: int, *, keeps_content: bool = False) -> None:
        super()._make_free(page, keeps_content=keeps_content)
        self._withdraw_free()


def withdraw(pool: PagePool, num_pages: int) -> None:
    """Make a pool that may be in use smaller by `num_pages` pages, larger if it is negative."""
    if not isinstance(pool, ShrinkingPool):
        pool.__class__ = ShrinkingPool
        assert isinstance(pool, ShrinkingPool)
        pool.withdrawn = set()
    pool.resize(num_pages)


def withdrawn_pages(pool: PagePool) -> set[int]:
    """Return the pages that were withdrawn and that nothing uses any more."""
    return pool.withdrawn if isinstance(pool, ShrinkingPool) else set()
