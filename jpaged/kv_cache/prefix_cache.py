"""Finds the pages that hold the start of a sequence, and offers full pages to later sequences.

A page is found by the chained hash of all tokens up to its end (`prefix_hash`), on the device or else in the host
pool. Only full pages whose content has proved sound are published; free ones are evicted least recently used first.
Pinned prefixes stay unless a request could not run otherwise, and are pinned again once a sequence computes them anew.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from ..request import CacheKey, RequestState, SampleSequence
from .page_arithmetic import PageArithmetic
from .page_pool import NULL_PAGE, PageKey
from .page_store import PageStore
from .prefix_hash import extend_hashes


class HostPage(NamedTuple):
    """A matched page that only the host pool has."""

    group: int
    """Page-table group."""
    table_index: int
    """Index of the page in the page table."""
    page: int
    """Page number in the host pool."""


class PinnedPrefix(NamedTuple):
    """The tokens of a pinned prefix, and what else its pages depend on."""

    token_ids: array[int]
    cache_key: CacheKey


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached pages that hold the start of a sequence."""

    num_pages: int
    """Pages in order of position that need not be computed."""
    device_pages: list[list[int]]
    """Device pages per group; the null page where only the host has the page, or a window needs none."""
    host_pages: list[HostPage]
    """The pages of the match that only the host pool still has."""
    missing_hash: bytes | None
    """Hash of the next page, which is not cached; None if the match is as long as was asked for."""


class PrefixCache:
    """The published pages of a store, for one page-table group or several.

    The only writer of `SampleSequence.prefix`.
    """

    def __init__(self, store: PageStore, arithmetic: PageArithmetic, *, is_enabled: bool):
        """Use the pages of `store`. `arithmetic` holds the page size and the page-table groups.

        Layers with the same attention window form one page-table group. Without `is_enabled`, no prefix of a sequence
        is published or found. The cache starts empty and without pins.
        """
        self.store, self.device, self.host = store, store.device, store.host
        self.arithmetic, self.block_size, self.windows = arithmetic, arithmetic.block_size, arithmetic.windows
        self.is_enabled = is_enabled
        self.pinned_prefixes: Counter[bytes] = Counter()
        """Hash of a pinned prefix's last page → how often that prefix was pinned."""
        self._pinned_tokens: dict[bytes, PinnedPrefix] = {}
        """Hash of a pinned prefix's last page → that prefix."""
        self.num_queried_tokens = self.num_hit_tokens = 0

    def count_query(self, num_tokens: int, num_hit: int) -> None:
        """Add to the statistics: of `num_tokens` tokens that were looked up, the cache had `num_hit`.

        Nothing is counted while prefix caching is off. The caller does this at a request's first admission only, so
        that a preempted request which finds its own pages again does not count as a hit.
        """
        if self.is_enabled:
            self.num_queried_tokens += num_tokens
            self.num_hit_tokens += num_hit

    # Finding

    def match(self, sequence: SampleSequence, num_tokens: int) -> PrefixMatch:
        """Return the longest cached prefix of this sequence, in whole pages, of at most `num_tokens` tokens.

        A page-table group of layers with full attention needs every page of the prefix. A group of layers with a
        sliding window needs only the pages that the first query after the prefix attends to. A prefix counts only if
        every group has what it needs, on the device or in the host pool.

        The result may have 0 pages. It also has the hash of the first page after the prefix, or None if the prefix is
        as long as `num_tokens` allows or the cache is off. This call neither references nor moves a page; `adopt` does.

        Example with pages of 4 tokens: 11 tokens allow 2 pages. If only the first one is cached, the result has 1 page
        and the hash of page 1.
        """
        num_pages = max_pages = num_tokens // self.block_size if self.is_enabled else 0
        hashes = self._hashes(sequence, num_pages)
        for group, window in enumerate(self.windows):
            if window is None:
                num_pages = self._num_leading(group, hashes, num_pages)
        # If a window's page is missing, every prefix that includes this page and is no longer than `num_pages` needs it
        # too, so the prefix ends before it. The shorter prefix needs earlier pages of the windows: look again.
        while (missing_index := self._last_missing(hashes, num_pages)) is not None:
            num_pages = missing_index
        device_pages: list[list[int]] = []
        host_pages: list[HostPage] = []
        for group in range(len(self.windows)):
            first_visible = self.arithmetic.first_visible_page(group, num_pages * self.block_size)
            pages = [NULL_PAGE] * first_visible  # No later query attends to these pages.
            for index in range(first_visible, num_pages):
                key = (group, hashes[index])
                page = self.device.page_of.get(key, NULL_PAGE)
                if page == NULL_PAGE:
                    host_pages.append(HostPage(group, index, self.host.page_of[key]))
                pages.append(page)
            device_pages.append(pages)
        return PrefixMatch(num_pages, device_pages, host_pages, hashes[num_pages] if num_pages < max_pages else None)

    def has_page(self, page_hash: bytes | None) -> bool:
        """Return whether a page of that hash is cached, in the first group at least. No hash: False."""
        pools = self.device.page_of, self.host.page_of
        return page_hash is not None and any((0, page_hash) in pages for pages in pools)

    def num_shared(self, match: PrefixMatch) -> int:
        """Count the matched device pages that are referenced already: adopting these takes no free page."""
        counts = self.device.ref_counts
        return sum(counts[page] > 0 for pages in match.device_pages for page in pages)

    def num_free_needed(self, match: PrefixMatch) -> int:
        """Count the free device pages that `adopt` takes: matched pages that are free, and one per host page."""
        num_pages = sum(page != NULL_PAGE for pages in match.device_pages for page in pages)
        return num_pages - self.num_shared(match) + len(match.host_pages)

    def adopt(self, sequence: SampleSequence, match: PrefixMatch) -> list[list[int]]:
        """Reference the matched pages for a sequence and return its page tables: one list of device pages per group.

        For each page that only the host has, a device page is taken, a copy from the host is scheduled, and `host_hit`
        is counted. The null page stands for pages that a sliding window needs no more. All pages of the match count as
        published for the sequence. `num_free_needed` device pages must be free.
        """
        # All matched pages are referenced before any page is taken, because taking may evict unreferenced pages.
        for pages in match.device_pages:
            for page in pages:
                if page != NULL_PAGE:
                    self.device.add_ref(page)
        for host_page in match.host_pages:
            self.host.add_ref(host_page.page)
        tables = [list(pages) for pages in match.device_pages]
        for host_page in match.host_pages:
            tables[host_page.group][host_page.table_index] = self.store.swap_in(host_page.page)
            self.host.drop_ref(host_page.page)  # Moves are made in order: a later one may write it.
            self.store.counts["host_hit"] += 1
        sequence.prefix.num_published = match.num_pages
        return tables

    # Publishing

    def publish(self, sequence: SampleSequence, num_sound: int) -> None:
        """Offer the full pages among the first `num_sound` tokens of a sequence to later sequences.

        These tokens are computed, and the logits after them were finite, so their pages hold no NaN. Nothing is offered
        while prefix caching is off, or if several versions of the weights have computed the request's pages. If another
        page with the same prefix hash is offered already, that one stays.
        """
        num_full = num_sound // self.block_size
        if not self.is_enabled or num_full <= sequence.prefix.num_published or sequence.request.has_mixed_pages:
            return
        hashes = self._hashes(sequence, num_full)
        for index in range(sequence.prefix.num_published, num_full):
            for group, pages in enumerate(sequence.pages):
                page = pages[index]
                # A window has passed a null page. A page that has a key is published already.
                if page != NULL_PAGE and page not in self.device.key_of:
                    self.store.publish(page, (group, hashes[index]))
        # Pages that left a sliding window and were given back before their content was known to be sound. They are
        # offered if no other sequence has taken them since.
        for (group, index), (page, num_takes) in sequence.prefix.passed_pages.items():
            if not self.device.is_kept(page, num_takes):
                continue
            if self.store.publish(page, (group, hashes[index])):
                self.store.counts["passed_published"] += 1
            else:  # Another page offers the same prefix, so this one becomes an empty free page.
                self.device.forget(page)
        sequence.prefix.passed_pages = {}
        sequence.prefix.num_published = num_full

    def give_back(self, sequence: SampleSequence, group: int, index: int) -> None:
        """Give back the device page at `index` of a group's page table, which the sliding window has passed.

        If it is not yet known whether its content is sound (finite), the page is remembered in
        `sequence.prefix.passed_pages`, and `publish` offers it later, unless another sequence has taken it before then.
        A page that is published already, or that may never be, is only given back. The caller replaces the entry of the
        page table.
        """
        page = sequence.pages[group][index]
        is_cacheable = self.is_enabled and not sequence.request.has_mixed_pages
        may_be_published = is_cacheable and index >= sequence.prefix.num_published and page not in self.device.key_of
        self.device.drop_ref(page, keeps_content=may_be_published)
        # If another sequence still references the page, it may write the page, and may publish it itself.
        if may_be_published and page in self.device.cached:
            sequence.prefix.passed_pages[group, index] = page, self.device.num_takes[page]

    def will_have(self, sequence: SampleSequence, num_pages: int) -> bool:
        """Return whether the cache will have the pages that sliding windows need after `num_pages` pages of a sequence.

        These are the pages that the first query after that prefix attends to, in each group with a window. Pages that
        the sequence still owns will be published once their content is known to be sound (finite). A page that it has
        given back must be in the cache already, or still be free with its content: another sequence may have taken it.
        Groups with full attention give no page back before the sequence ends, so they are not looked at.
        """
        for group, _ in self.arithmetic.window_groups:
            first_visible = self.arithmetic.first_visible_page(group, num_pages * self.block_size)
            for index in range(first_visible, min(num_pages, sequence.num_passed[group])):
                passed_page = sequence.prefix.passed_pages.get((group, index))
                is_kept = passed_page is not None and self.device.is_kept(*passed_page)
                if not is_kept and not self._is_cached((group, sequence.prefix.hashes[index])):
                    return False
        return True

    def inherit(self, parent: SampleSequence, child: SampleSequence, num_tokens: int) -> None:
        """Copy the hashes and the count of published pages to a child that shares `num_tokens` tokens' pages."""
        num_full = num_tokens // self.block_size
        child.prefix.num_published = min(parent.prefix.num_published, num_full)
        child.prefix.hashes = parent.prefix.hashes[:num_full]

    def forget_pages(self, sequence: SampleSequence) -> None:
        """Record that a sequence has lost its pages, those that windows have passed too. Its page hashes stay."""
        for page, num_takes in sequence.prefix.passed_pages.values():
            if self.device.is_kept(page, num_takes):
                self.device.forget(page)
        sequence.prefix.passed_pages = {}
        sequence.prefix.num_published = 0

    def forget_hashes(self, sequence: SampleSequence) -> None:
        """Drop a sequence's page hashes, since its tokens or the weights have changed."""
        sequence.prefix.hashes = []

    def discard(self, sequence: SampleSequence) -> None:
        """Unpublish and unpin all pages of a sequence that has failed; sequences that own them keep them.

        The sequence's logits may not have been finite, so a page may hold NaN, and nothing tells which one. A page with
        NaN that stays published would fail every later request with that prefix. So pages that the sequence found in
        the cache are unpublished too, and so are pages with the same key in the other pool (device or host).
        """
        pools = self.device, self.host
        # Index True is the host: the pages of a swapped sequence are in the host pool.
        key_of = pools[sequence.state is RequestState.SWAPPED].key_of
        for key in [key_of[page] for pages in sequence.pages for page in pages if page in key_of]:
            self.store.unpin(key)
            for pool in pools:
                pool.forget(pool.page_of.get(key, NULL_PAGE))  # To forget the null page changes nothing.

    def reset(self) -> None:
        """Unpublish every page; sequences keep the pages they own. Pins hold for pages computed from now on."""
        self.store.unpin_all()
        self.device.forget_all()
        self.host.forget_all()
        self.store.counts["reset"] += 1

    def renew(self, weights_version: int) -> None:
        """Unpublish every page because the weights have changed, and pin the same prefixes for the new weights.

        A prefix that was pinned n times is unpinned and then pinned n times under its cache key with the new
        `weights_version`. No page has that key yet, so the pins take effect once the new weights compute the prefixes.
        """
        pins = [(self._pinned_tokens[last_hash], num_pins) for last_hash, num_pins in self.pinned_prefixes.items()]
        for (token_ids, key), num_pins in pins:
            for _ in range(num_pins):
                self.unpin(token_ids, key)
        self.reset()
        for (token_ids, key), num_pins in pins:
            for _ in range(num_pins):
                self.pin(token_ids, replace(key, weights_version=weights_version))

    # Pins

    def pin(self, token_ids: Sequence[int], cache_key: CacheKey) -> int:
        """Keep this prefix's full pages from eviction, now or once they are computed.

        Return how many of its first tokens are in pages that are kept now, in every page-table group. Layers with a
        sliding window need only the pages that the first query after the last full page attends to; with such layers
        the result is the whole prefix or 0. Two pins of a prefix need two calls of `unpin`. A prefix of less than one
        page is not pinned, and the result is 0.

        Example with pages of 4 tokens and full attention: of a prefix of 14 tokens, 3 full pages are pinned. If only
        the first two are cached, the result is 8.
        """
        hashes = self._prefix_hashes(token_ids, cache_key)
        if not hashes:
            return 0
        self.pinned_prefixes[hashes[-1]] += 1
        self._pinned_tokens[hashes[-1]] = PinnedPrefix(array("i", token_ids), cache_key)
        self.store.num_pin_changes += 1
        keys = self._pin_keys(hashes)
        self.store.pins.update(chain.from_iterable(keys))
        for key in chain.from_iterable(keys):
            self.store.pin(key)
        are_kept = [all(key in self.store.pinned_pages for key in page_keys) for page_keys in keys]
        # Pages from the start of the prefix that are all kept now. The False at the end stops the count there.
        num_leading = [*are_kept, False].index(False)
        is_whole_prefix_kept = num_leading == len(keys)
        return num_leading * self.block_size if is_whole_prefix_kept or not self.arithmetic.window_groups else 0

    def unpin(self, token_ids: Sequence[int], key: CacheKey) -> bool:
        """Undo one `pin` of the prefix with these token ids and cache key; return whether there was one.

        Pages that no other pin keeps may then be evicted. The last page is given up first, since the start of a prefix
        serves more sequences than its end. Without such a pin, nothing changes. `num_pin_changes` counts the change, so
        that requests are checked again.
        """
        hashes, pins = self._prefix_hashes(token_ids, key), self.store.pins
        if not hashes or not self.pinned_prefixes[hashes[-1]]:
            return False
        self.pinned_prefixes -= Counter([hashes[-1]])  # This removes the entry if its count reaches 0.
        if not self.pinned_prefixes[hashes[-1]]:
            del self._pinned_tokens[hashes[-1]]
        self.store.num_pin_changes += 1
        for page_key in chain.from_iterable(reversed(self._pin_keys(hashes))):
            pins[page_key] -= 1
            if pins[page_key] == 0:
                del pins[page_key]
                self.store.unpin(page_key)
        return True

    def num_new_pins(self, token_ids: Sequence[int], key: CacheKey) -> int:
        """Count the pages that a pin of this prefix would take from requests, beyond those pinned already."""
        keys = self._pin_keys(self._prefix_hashes(token_ids, key))
        return sum(page_key not in self.store.pins for page_key in chain.from_iterable(keys))

    def num_pinned(self, sequence: SampleSequence, num_tokens: int) -> int:
        """Count the pages of this sequence's first `num_tokens` tokens that have a pin, in full-attention groups only.

        Groups with a sliding window are left out: a sequence gives its pages back there, the pinned ones too. A page
        counts even if it is not on the device now, since it is kept once it has been computed.
        """
        pins, num_pages = self.store.pins, num_tokens // self.block_size
        if not pins:
            return 0
        hashes = self._hashes(sequence, num_pages)[:num_pages]  # The sequence may have hashes of more pages.
        full_groups = [group for group, window in enumerate(self.windows) if window is None]
        return sum((group, page_hash) in pins for group in full_groups for page_hash in hashes)

    # Parts of the above

    def _hashes(self, sequence: SampleSequence, num_pages: int) -> list[bytes]:
        """Return the chained hashes of the first `num_pages` full pages or more; they are kept in the sequence."""
        key = sequence.request.cache_key
        extend_hashes(sequence.prefix.hashes, sequence.token_ids, num_pages, self.block_size, key)
        return sequence.prefix.hashes

    def _prefix_hashes(self, token_ids: Sequence[int], key: CacheKey) -> list[bytes]:
        hashes: list[bytes] = []
        extend_hashes(hashes, array("i", token_ids), len(token_ids) // self.block_size, self.block_size, key)
        return hashes

    def _pin_keys(self, hashes: list[bytes]) -> list[list[PageKey]]:
        """Return, for each page of a prefix with these page hashes, the keys (group, hash) that a pin keeps.

        There is one key per page-table group. A group with a sliding window has none for a page that the first query
        after the prefix does not attend to.

        Example of 2 pages with the hashes a and b, full attention in group 0, and a window in group 1 that reaches only
        the last page: [[(0, a)], [(0, b), (1, b)]].
        """
        num_tokens, groups = len(hashes) * self.block_size, range(len(self.windows))
        first_visible = [self.arithmetic.first_visible_page(group, num_tokens) for group in groups]
        return [
            [(group, page_hash) for group in groups if index >= first_visible[group]]
            for index, page_hash in enumerate(hashes)
        ]

    def _num_leading(self, group: int, hashes: list[bytes], length: int) -> int:
        """Return how many of the first `length` pages, from the start without a gap, are cached in this group."""
        on_device, on_host = self.device.page_of, self.host.page_of
        for index, page_hash in enumerate(hashes[:length]):
            if (group, page_hash) not in on_device and (group, page_hash) not in on_host:
                return index
        return length

    def _last_missing(self, hashes: list[bytes], length: int) -> int | None:
        """Return the index of a page that a sliding window needs and the cache lacks; None if no such page is missing.

        A window needs the pages that the first query after a prefix of `length` pages attends to, whose hashes are in
        `hashes`. If several are missing, the last one of the first page-table group that lacks any is returned. Groups
        with full attention are not looked at.
        """
        for group, _ in self.arithmetic.window_groups:
            first_visible = self.arithmetic.first_visible_page(group, length * self.block_size)
            for index in reversed(range(first_visible, length)):
                if not self._is_cached((group, hashes[index])):
                    return index
        return None

    def _is_cached(self, key: PageKey) -> bool:
        return key in self.device.page_of or key in self.host.page_of
