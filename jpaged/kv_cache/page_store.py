"""The pages of the device and of the host, and the copies between them that a step has to make first.

A page that the device evicts may live on in the host pool and be found there. Every copy is noted in order, in
`moves`; they are to be done in that order, before anything of the step is written. Knows pages and hashes; no
sequence, no token.
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import NamedTuple

from .page_pool import PageKey, PagePool


class MoveKind(enum.Enum):
    """What is copied where."""

    COPY = "copy"
    """Device page to device page."""
    SWAP_OUT = "swap_out"
    """Device page to host page."""
    SWAP_IN = "swap_in"
    """Host page to device page."""


class PageMove(NamedTuple):
    """One page's keys and values of all layers, copied before the step writes anything."""

    kind: MoveKind
    source: int
    destination: int


MAX_KEPT = 16
"""Evicted pages that a step copies to the host at most: a long prompt may evict hundreds, and shall not wait."""


class PageStore:
    """Two pools, and the moves that were asked of them since the last step."""

    def __init__(self, *, num_blocks: int, num_host_blocks: int, max_cached_blocks: int | None, keep_evicted: bool):
        self.device = PagePool(num_blocks, max_cached=max_cached_blocks)
        self.host = PagePool(max(1, num_host_blocks))
        self.keep_evicted = keep_evicted
        self.moves: list[PageMove] = []
        self.num_kept = 0
        """Evicted pages among the moves that go to the host pool."""
        self.pins: Counter[bytes] = Counter()
        """Hashes of pages that are to stay on the device, and how many pinned prefixes they belong to."""
        self.pinned_pages: dict[PageKey, int] = {}
        """Those of them that are there now. Each is referenced once for its pin."""
        self.num_pinnings = 0
        """Counts pins and unpins: what depends on them is looked at anew when it has changed."""
        self.counts: Counter[str] = Counter()

    def take(self) -> int:
        """A free device page. What it held lives on in the host pool if it can, and is found there."""
        page, key = self.device.take()
        if key is not None:
            self.counts["eviction"] += 1
            is_kept = self.keep_evicted and self.num_kept < MAX_KEPT and self.host.num_free > 0
            if is_kept and key not in self.host.page_of:
                self.counts["eviction_kept"] += 1
                self.num_kept += 1
                self.host.drop_ref(self._copy_out(page, key))
        return page

    def copy(self, page: int) -> int:
        """A device page with the content of another one."""
        own = self.take()
        self.moves.append(PageMove(MoveKind.COPY, page, own))
        self.counts["copy_on_write"] += 1
        return own

    def swap_out(self, page: int) -> int:
        """A host page with the content of a device page, and found by the same hash. The host pool must have room."""
        return self._copy_out(page, self.device.key_of.get(page))

    def swap_in(self, host_page: int) -> int:
        """A device page with the content of a referenced host page, and found by the same hash."""
        page = self.take()
        self.moves.append(PageMove(MoveKind.SWAP_IN, host_page, page))
        if host_page in self.host.key_of:
            self.publish(page, self.host.key_of[host_page])
        return page

    def host_copy_of(self, page: int) -> int | None:
        """The host page that holds what a device page holds, if it is published in both pools."""
        key = self.device.key_of.get(page)
        return None if key is None else self.host.page_of.get(key)

    def device_copy_of(self, host_page: int) -> int | None:
        """The device page that holds what a host page holds, if it is published in both pools."""
        key = self.host.key_of.get(host_page)
        return None if key is None else self.device.page_of.get(key)

    def publish(self, page: int, key: PageKey) -> None:
        """Let a device page be found by `key`, and keep it if that prefix is pinned."""
        if self.device.publish(page, key) and key[1] in self.pins:
            self.pin(key)

    def pin(self, key: PageKey) -> None:
        """Keep the device page that is found by `key`, if there is one and it is not kept already."""
        page = self.device.page_of.get(key)
        if page is not None and key not in self.pinned_pages:
            self.device.add_ref(page)
            self.pinned_pages[key] = page

    def unpin(self, key: PageKey) -> None:
        """Let the page of `key` be evicted like others."""
        page = self.pinned_pages.pop(key, None)
        if page is not None:
            self.device.drop_ref(page)

    def take_moves(self) -> list[PageMove]:
        """The moves since the last call: the caller has them done."""
        moves, self.moves, self.num_kept = self.moves, [], 0
        return moves

    def clear(self) -> None:
        """The device has lost everything, and the host pool with it: every page is free and holds nothing."""
        self.device.clear()
        self.host.clear()
        self.pinned_pages.clear()
        self.take_moves()

    def _copy_out(self, page: int, key: PageKey | None) -> int:
        copy, _ = self.host.take()
        self.moves.append(PageMove(MoveKind.SWAP_OUT, page, copy))
        if key is not None:
            self.host.publish(copy, key)
        return copy
