"""The pages of the device and of the host, and the copies between them that a step has to make before it computes.

A prefix that the device evicts may live on in the host pool and be found there. Every copy is noted in `moves`; the
moves are carried out in that order, before the step writes anything. Knows pages and hashes; no sequence, no token.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from .page_pool import PageKey, PagePool


class MoveKind(enum.Enum):
    """The source and the destination of a page that is copied."""

    COPY = "copy"
    """A device page is copied to another device page."""
    SWAP_OUT = "swap_out"
    """A device page is copied to a host page."""
    SWAP_IN = "swap_in"
    """A host page is copied to a device page."""


class PageMove(NamedTuple):
    """A copy of one page's keys and values of all layers, made before the step writes anything."""

    kind: MoveKind
    source: int
    destination: int


MAX_KEPT = 16
"""Evicted prefixes, in pages, that one step copies to the host: a long prompt evicts hundreds, and must not wait."""


class PageStore:
    """The pools of device and host, and the moves that were asked of them since the last step."""

    def __init__(self, num_blocks: int, num_host_blocks: int, max_cached_blocks: int | None, *, keep_evicted: bool):
        """Make two empty pools, of `num_blocks` device pages and `num_host_blocks` host pages, null pages included.

        `num_host_blocks=0` means that there is no host pool. `max_cached_blocks` caps the free device pages that keep a
        published prefix; None sets no cap. With `keep_evicted`, prefixes that the device evicts are copied to the host
        pool.
        """
        self.device = PagePool(num_blocks, max_cached=max_cached_blocks)
        self.host = PagePool(max(1, num_host_blocks))  # At least the null page, so that every pool works alike.
        self.keep_evicted = keep_evicted
        self.moves: list[PageMove] = []
        self.num_kept = 0
        """Evicted pages among `moves` that are copied to the host pool."""
        self.pins: Counter[PageKey] = Counter()
        """Key of each page that is to stay on the device → how many pinned prefixes keep it."""
        self.pinned_pages: dict[PageKey, int] = {}
        """Pages of `pins` that are on the device now. Each is referenced once for its pin."""
        self.num_pin_changes = 0
        """How often prefixes were pinned or unpinned: what depends on pins is checked again when this has changed."""
        self.counts: Counter[str] = Counter()

    def take(self) -> int:
        """Take a free device page and return it. A prefix that it held is evicted from the device.

        The caller makes sure that a page is free. With `keep_evicted` the content of that page is copied to the host
        pool, unless the pool has the prefix already or has no free page, or MAX_KEPT pages were copied for this step.
        The copy becomes a free host page that keeps its content, so the prefix can be found there. Both events are
        counted (`eviction`, `eviction_kept`).
        """
        page, key = self.device.take()
        if key is not None:
            self.counts["eviction"] += 1
            is_kept = self.keep_evicted and self.num_kept < MAX_KEPT and self.host.num_free > 0
            if is_kept and key not in self.host.page_of:
                self.counts["eviction_kept"] += 1
                self.num_kept += 1
                self.host.drop_ref(self._copy_out(page, key))  # Published and without a reference: cached.
        return page

    def copy(self, page: int) -> int:
        """Take a device page that gets the content of another device page."""
        copy = self.take()
        self.moves.append(PageMove(MoveKind.COPY, page, copy))
        self.counts["copy_on_write"] += 1
        return copy

    def swap_out(self, page: int) -> int:
        """Take a host page that gets the content of a device page, and its hash. The host pool must have room."""
        return self._copy_out(page, self.device.key_of.get(page))

    def swap_in(self, host_page: int) -> int:
        """Take a device page that gets the content of a referenced host page, and its hash."""
        page = self.take()
        self.moves.append(PageMove(MoveKind.SWAP_IN, host_page, page))
        if host_page in self.host.key_of:
            self.publish(page, self.host.key_of[host_page])
        return page

    def publish(self, page: int, key: PageKey) -> bool:
        """Let a device page be found by `key`, and pin it if `key` is pinned; False if another page has that key."""
        is_found = self.device.publish(page, key)
        if is_found and key in self.pins:
            self.pin(key)
        return is_found

    def pin(self, key: PageKey) -> None:
        """Keep the device page that is found by `key` from eviction, if there is one; a second call does nothing."""
        page = self.device.page_of.get(key)
        if page is not None and key not in self.pinned_pages:
            self.device.add_ref(page)
            self.pinned_pages[key] = page

    def unpin(self, key: PageKey) -> None:
        """Let the page that is found by `key` be evicted like others."""
        page = self.pinned_pages.pop(key, None)
        if page is not None:
            self.device.drop_ref(page)

    def unpin_all(self) -> None:
        """Let all pinned pages be evicted. `pins` stay: these prefixes are pinned again once they are computed anew."""
        for key in list(self.pinned_pages):
            self.unpin(key)

    def take_moves(self) -> list[PageMove]:
        """Return the moves since the last call, which the caller then has carried out."""
        moves, self.moves, self.num_kept = self.moves, [], 0
        return moves

    def clear(self) -> None:
        """Make every page of both pools free and empty: the device has lost everything, the host pool with it."""
        self.device.clear()
        self.host.clear()
        self.pinned_pages.clear()
        self.take_moves()

    def _copy_out(self, page: int, key: PageKey | None) -> int:
        """Take a host page for the content of a device page and note the move; publish it if `key` is not None."""
        copy, _ = self.host.take()
        self.moves.append(PageMove(MoveKind.SWAP_OUT, page, copy))
        if key is not None:
            self.host.publish(copy, key)
        return copy


def move_batches(moves: list[PageMove], max_moves: int) -> Iterator[tuple[MoveKind, list[PageMove]]]:
    """Yield (kind, moves) for runs of consecutive moves of one kind, cut to at most `max_moves` moves, in order.

    With `max_moves` 8, ten copies, then a swap-out and then a copy give four batches: 8 copies, 2 copies, the swap-out,
    and the last copy. Without moves nothing is yielded.
    """
    for kind, run in groupby(moves, key=lambda move: move.kind):
        moves_of_kind = list(run)
        for start in range(0, len(moves_of_kind), max_moves):
            yield kind, moves_of_kind[start : start + max_moves]
