"""One pool of pages, on the device or on the host: which are free, who references them, what they hold.

A page is free, or fenced (free as soon as a step in flight that may write it has retired), or referenced. A
free page may still hold a published prefix; it is found by that until somebody takes it. Pages that are withdrawn
make the pool smaller. Page 0 is the null page: never owned, never given, never published. Knows numbers and keys;
no sequence, no token.
"""

from __future__ import annotations

from collections import OrderedDict

NULL_PAGE = 0

PageKey = tuple[int, bytes]
"""Page-table group, and the chained hash of the tokens up to the end of the page."""


class PagePool:
    """Pages 1 to `num_pages` − 1, taken and given one at a time."""

    def __init__(self, num_pages: int, *, max_cached: int | None = None):
        """`max_cached` bounds the free pages that keep a published prefix."""
        self.num_pages = num_pages
        self.max_cached = max_cached
        self.num_withdrawn = 0
        """Pages that the pool is to do without."""
        self.retired_step = 0
        self.peak_used = 0
        """Most pages that were ever referenced at once."""
        self.clear()

    def clear(self) -> None:
        """Every page is free and holds nothing: the memory behind them is new. A smaller pool stays so."""
        self.ref_counts = [0] * self.num_pages
        self.free = list(range(self.num_pages - 1, 0, -1))
        """Free pages without content. The last given is the first taken."""
        self.cached: OrderedDict[int, None] = OrderedDict()
        """Free pages with a published prefix, least recently used first."""
        self.fenced: list[tuple[int, int]] = []
        """(step, page): free once that step has retired."""
        self.writers: dict[int, int] = {}
        """Page → the last step in flight that may write it, where its owner may give it back before."""
        self.page_of: dict[PageKey, int] = {}
        self.key_of: dict[int, PageKey] = {}
        self.withdrawn: set[int] = set()
        self._withdraw()

    @property
    def num_usable(self) -> int:
        """Pages that sequences can own: neither the null page nor those that were withdrawn."""
        return max(0, self.num_pages - 1 - self.num_withdrawn)

    @property
    def num_free(self) -> int:
        return len(self.free) + len(self.cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - self.num_free - len(self.fenced) - len(self.withdrawn)

    def take(self) -> tuple[int, PageKey | None]:
        """A free page with one reference, and what it held that can now be found no more. One must be free."""
        page, key = self._pop()
        self.ref_counts[page] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return page, key

    def add_ref(self, page: int) -> None:
        """Reference a page that is referenced already, or one that is free and was found by its prefix."""
        if self.ref_counts[page] == 0:
            del self.cached[page]
            self.peak_used = max(self.peak_used, self.num_used)
        self.ref_counts[page] += 1

    def drop_ref(self, page: int) -> None:
        """Give up one reference; with the last one the page is free, as soon as no step in flight may write it."""
        self.ref_counts[page] -= 1
        if self.ref_counts[page] > 0:
            return
        step = self.writers.pop(page, 0)
        if step > self.retired_step:
            self.fenced.append((step, page))
        else:
            self._give(page)

    def publish(self, page: int, key: PageKey) -> bool:
        """Let the page be found by `key`; False if another one is. The first stays the one that is found."""
        if key in self.page_of:
            return False
        self.page_of[key] = page
        self.key_of[page] = key
        self.writers.pop(page, None)  # It is full: nobody writes it any more.
        return True

    def forget(self, page: int) -> None:
        """Let the page be found no more; who owns it keeps it."""
        key = self.key_of.pop(page, None)
        if key is not None:
            del self.page_of[key]
            if page in self.cached:
                del self.cached[page]
                self._give(page)

    def forget_all(self) -> None:
        """Let no page be found any more."""
        self.page_of.clear()
        self.key_of.clear()
        self.free.extend(self.cached)
        self.cached.clear()

    def fence(self, page: int, step: int) -> None:
        """A step in flight may write the page: nobody takes it before that step has retired."""
        self.writers[page] = step

    def retire(self, step: int) -> None:
        """Every step up to this one is done: pages that only those could write are free."""
        self.retired_step = step
        done = [page for last, page in self.fenced if last <= step]
        # Not always the first ones: a page may be given back later than one that is written longer.
        self.fenced = [(last, page) for last, page in self.fenced if last > step]
        for page in done:
            self._give(page)
        self.writers = {page: last for page, last in self.writers.items() if last > step}

    def withdraw(self, num_pages: int) -> None:
        """Make the pool smaller by so many pages (larger, if negative): free ones at once, others as they come free."""
        self.num_withdrawn += num_pages
        while len(self.withdrawn) > self.num_withdrawn:
            self._give(self.withdrawn.pop())
        self._withdraw()

    def _pop(self) -> tuple[int, PageKey | None]:
        """The free page that is taken next: one without content, else the least recently used prefix."""
        if self.free:
            return self.free.pop(), None
        page, _ = self.cached.popitem(last=False)
        key = self.key_of[page]
        self.forget(page)
        return page, key

    def _withdraw(self) -> None:
        while len(self.withdrawn) < self.num_withdrawn and self.num_free:
            self.withdrawn.add(self._pop()[0])

    def _give(self, page: int) -> None:
        if page in self.key_of:
            self.cached[page] = None
            if self.max_cached is not None and len(self.cached) > self.max_cached:
                self.forget(next(iter(self.cached)))
        else:
            self.free.append(page)
        self._withdraw()
