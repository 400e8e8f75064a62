"""One pool of pages, on the device or on the host: which are free, how often each is referenced, what each holds.

A page is free, referenced, or deferred (given back, but a step in flight may still write it). A free page may still
hold a published prefix, by which it is found until the page is taken for something else, or one that may yet be
published. Page 0 is the null page: it is never taken and never published. Knows page numbers and keys; no sequence,
no token.
"""

from __future__ import annotations

from collections import OrderedDict

NULL_PAGE = 0

PageKey = tuple[int, bytes]
"""Page-table group, and the chained hash of all tokens up to the end of the page."""


class PagePool:
    """Pages 1 to `num_pages` − 1, taken and given back one at a time."""

    def __init__(self, num_pages: int, *, max_cached: int | None = None):
        """Make a pool of empty free pages. `num_pages` counts the null page 0 too, which is never taken.

        `max_cached` caps the free pages that keep a published prefix; None sets no cap.
        """
        self.num_pages = num_pages
        self.max_cached = max_cached
        self.retired_step = 0
        self.peak_used = 0
        """The largest number of pages that were referenced at the same time."""
        self.clear()

    def clear(self) -> None:
        """Make every page free and empty, as for new memory. `retired_step` and `peak_used` keep their values."""
        self.ref_counts = [0] * self.num_pages
        self.num_takes = [0] * self.num_pages
        """How often each page was taken: what it held before the last time is lost."""
        self.free = list(range(self.num_pages - 1, 0, -1))  # Page 1 is taken first, and the null page 0 never.
        """Free pages without content. The page given back last is taken first."""
        self.cached: OrderedDict[int, None] = OrderedDict()
        """Free pages with a prefix that is published or may yet be, least recently used first."""
        self.deferred: list[tuple[int, int]] = []
        """(step, page): pages that become free once that step has retired."""
        self.pending_writers: dict[int, int] = {}
        """Page → the last step in flight that may write it, where its owner may give it back before that retires."""
        self.page_of: dict[PageKey, int] = {}
        self.key_of: dict[int, PageKey] = {}

    @property
    def num_usable(self) -> int:
        """Return the number of pages that sequences can own: all but the null page."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self.free) + len(self.cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - self.num_free - len(self.deferred)

    def take(self) -> tuple[int, PageKey | None]:
        """Take a free page, which is now referenced once. Return it and the key of the prefix that it held, or None.

        That prefix can no longer be found in this pool. Empty pages are taken before pages with a prefix. The caller
        makes sure that a page is free. `num_takes` of the page grows by one, so that a note of its old content is known
        to be out of date.
        """
        page, key = self._pop()
        self.ref_counts[page] = 1
        self.num_takes[page] += 1
        self.peak_used = max(self.peak_used, self.num_used)
        return page, key

    def add_ref(self, page: int) -> None:
        """Reference a page that is referenced already, or a free one that was found by its prefix."""
        if self.ref_counts[page] == 0:
            del self.cached[page]
            self.peak_used = max(self.peak_used, self.num_used)
        self.ref_counts[page] += 1

    def drop_ref(self, page: int, *, keeps_content: bool = False) -> None:
        """Give up one reference. After the last one the page is free, or deferred while a step in flight may write it.

        `keeps_content` says that the page may still be published later: if it becomes free now, it keeps its content as
        a published page does, and is taken only after all empty pages. A deferred page ignores `keeps_content`. While
        other references remain, nothing else happens.
        """
        self.ref_counts[page] -= 1
        if self.ref_counts[page] > 0:
            return
        step = self.pending_writers.pop(page, 0)  # Steps count from 1, so 0 means that none may write it.
        if step > self.retired_step:
            self.deferred.append((step, page))
        else:
            self._make_free(page, keeps_content=keeps_content)

    def is_kept(self, page: int, num_takes: int) -> bool:
        """Return whether a page that was given back with `keeps_content` is still free with the same content.

        `num_takes` is how often the page had been taken when it was given back.
        """
        return page in self.cached and self.num_takes[page] == num_takes

    def publish(self, page: int, key: PageKey) -> bool:
        """Let the page be found by `key`, and return True.

        If a page is found by `key` already, return False and change nothing: that page stays the one that is found.
        """
        if key in self.page_of:
            return False
        self.page_of[key] = page
        self.key_of[page] = key
        self.pending_writers.pop(page, None)  # A published page is full: no step writes it any more.
        return True

    def forget(self, page: int) -> None:
        """Make the page unpublished, so that it is not found by its key any more. Sequences that own it keep it.

        If the page is free and kept its content, it becomes an empty free page, even if it was not published yet.
        Nothing happens to any other page without a key, such as the null page.
        """
        key = self.key_of.pop(page, None)
        if key is not None:
            del self.page_of[key]
        if page in self.cached:
            del self.cached[page]
            self._make_free(page)

    def forget_all(self) -> None:
        """Make all pages unpublished, and empty those that are free: their content cannot be published later."""
        self.page_of.clear()
        self.key_of.clear()
        self.free.extend(self.cached)
        self.cached.clear()

    def defer_free(self, page: int, step: int) -> None:
        """Note that `step`, which is in flight, may write the page: it is not taken again before that step retires."""
        self.pending_writers[page] = step

    def retire(self, step: int) -> None:
        """Record that every step up to `step` is done. Deferred pages that no later step may write become free.

        A page that is still referenced stays with its owner. It becomes free as soon as its last reference goes, unless
        a step after `step` may write it.
        """
        self.retired_step = step
        # `deferred` is in the order in which pages were given back, not in the order of steps, so all are looked at.
        written_pages = [page for last_step, page in self.deferred if last_step <= step]
        self.deferred = [(last_step, page) for last_step, page in self.deferred if last_step > step]
        for page in written_pages:
            self._make_free(page)
        self.pending_writers = {page: last_step for page, last_step in self.pending_writers.items() if last_step > step}

    def _pop(self) -> tuple[int, PageKey | None]:
        """Remove a free page and return it with the key of the prefix that it held, or None.

        An empty page goes first, then the page whose prefix was used least recently; that prefix is unpublished.
        """
        if self.free:
            return self.free.pop(), None
        page, _ = self.cached.popitem(last=False)
        key = self.key_of.get(page)  # None for a page that kept its content and was never published.
        self.forget(page)
        return page, key

    def _make_free(self, page: int, *, keeps_content: bool = False) -> None:
        """Add a page without references to the free ones, with its content if it is published or with `keeps_content`.

        If more than `max_cached` free pages have content then, the one that was used least recently becomes empty.
        """
        if keeps_content or page in self.key_of:
            self.cached[page] = None
            # With `max_cached` 0 that is this page itself.
            if self.max_cached is not None and len(self.cached) > self.max_cached:
                self.forget(next(iter(self.cached)))
        else:
            self.free.append(page)
