"""Finding the pages that hold the start of a sequence, and offering pages to be found.

A page is found by the chained hash of all tokens up to its end (`prefix_hash`), on the device or else in the
host pool. Only full pages whose content has proved sound are published; free ones are evicted least recently
used first. Pinned prefixes stay, unless a request could not run otherwise, and are pinned anew when they were lost
and somebody computes them again.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from .page_pool import NULL_PAGE
from .page_store import PageStore
from .prefix_hash import CacheKey, extend_hashes
from .request import RequestState, Sequence


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached pages that hold the start of a sequence."""

    num_pages: int
    """Pages in order of position that need not be computed."""
    device_pages: list[list[int]]
    """Per group; the null page where the device has none, or a window needs none."""
    host_pages: list[tuple[int, int, int]]
    """(group, index, host page) of those that only the host pool still has."""
    next_hash: bytes | None
    """Of the page that would have made the match longer, had it been cached."""


class PrefixCache:
    """The published pages of a store, for one page-table group or several."""

    def __init__(self, store: PageStore, *, block_size: int, windows: tuple[int | None, ...], is_enabled: bool):
        """`windows` as for `BlockManager`."""
        self.store = store
        self.block_size = block_size
        self.windows = windows
        self.is_enabled = is_enabled
        self.pinned_prefixes: Counter[bytes] = Counter()
        """Hash of a prefix's last page, and how often it was pinned."""
        self.num_queried_tokens = self.num_hit_tokens = 0

    def count_query(self, num_tokens: int, num_hit: int) -> None:
        """Statistics of a first admission; a resumed sequence that finds its own pages is no hit."""
        if self.is_enabled:
            self.num_queried_tokens += num_tokens
            self.num_hit_tokens += num_hit

    def match(self, sequence: Sequence, num_tokens: int) -> PrefixMatch:
        """Cached pages that hold the start of this sequence, at most so many tokens; changes nothing."""
        length = most = num_tokens // self.block_size if self.is_enabled else 0
        hashes = self._hashes(sequence, length)
        for group, window in enumerate(self.windows):
            if window is None:
                length = self._num_leading(group, hashes, length)
        # A window needs only the pages that the next query sees. A shorter prefix needs others: look again.
        while (missing := self._last_missing(hashes, length)) is not None:
            length = missing
        device_pages: list[list[int]] = []
        host_pages: list[tuple[int, int, int]] = []
        for group in range(len(self.windows)):
            first = self.first_seen(group, length * self.block_size)
            pages = [NULL_PAGE] * first
            for index in range(first, length):
                key = (group, hashes[index])
                page = self.store.device.page_of.get(key, NULL_PAGE)
                if page == NULL_PAGE:
                    host_pages.append((group, index, self.store.host.page_of[key]))
                pages.append(page)
            device_pages.append(pages)
        next_hash = hashes[length] if length < most else None
        return PrefixMatch(length, device_pages, host_pages, next_hash)

    def first_seen(self, group: int, num_tokens: int) -> int:
        """First page that the query at position `num_tokens`, or any later one, sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, num_tokens - window + 1) // self.block_size

    def has(self, page_hash: bytes | None) -> bool:
        """Whether a page of that hash is cached, in the first group at least."""
        pools = self.store.device.page_of, self.store.host.page_of
        return page_hash is not None and any((0, page_hash) in pages for pages in pools)

    def num_shared(self, match: PrefixMatch) -> int:
        """Matched pages that cost nothing, since somebody references them: others lie among the free ones."""
        counts = self.store.device.ref_counts
        return sum(counts[page] > 0 for pages in match.device_pages for page in pages)

    def num_taken(self, match: PrefixMatch) -> int:
        """Free pages that adopting the match takes: those found among them, and those that the others come into."""
        num_pages = sum(page != NULL_PAGE for pages in match.device_pages for page in pages)
        return num_pages - self.num_shared(match) + len(match.host_pages)

    def fetch(self, match: PrefixMatch) -> list[list[int]]:
        """Device pages of the match per group, each with a reference more; `num_taken` of them must be free."""
        device, host = self.store.device, self.store.host
        # All are referenced before any is taken: taking evicts what nobody references.
        for pages in match.device_pages:
            for page in pages:
                if page != NULL_PAGE:
                    device.add_ref(page)
        for _, _, host_page in match.host_pages:
            host.add_ref(host_page)
        tables = [list(pages) for pages in match.device_pages]
        for group, index, host_page in match.host_pages:
            tables[group][index] = self.store.swap_in(host_page)
            host.drop_ref(host_page)
            self.store.counts["come_back"] += 1
        return tables

    def publish(self, sequence: Sequence, num_sound: int) -> None:
        """Offer the full pages among the first `num_sound` tokens to later sequences.

        Those tokens are computed, and a token drawn after them was finite: what they hold is sound.
        """
        num_full = num_sound // self.block_size
        if not self.is_enabled or num_full <= sequence.num_published:
            return
        hashes = self._hashes(sequence, num_full)
        for index in range(sequence.num_published, num_full):
            for group, pages in enumerate(sequence.pages):
                page = pages[index]
                if page != NULL_PAGE and page not in self.store.device.key_of:
                    self.store.publish(page, (group, hashes[index]))
        sequence.num_published = num_full

    def pin(self, token_ids: SequenceOf[int], key: CacheKey) -> int:
        """Keep the full pages of this prefix, now or as soon as somebody has computed them; returns tokens kept now."""
        hashes = self._prefix_hashes(token_ids, key)
        if not hashes:
            return 0
        self.pinned_prefixes[hashes[-1]] += 1
        self.store.num_pinnings += 1
        keys = [[(group, page_hash) for group in range(len(self.windows))] for page_hash in hashes]
        for page_hash, page_keys in zip(hashes, keys, strict=True):
            self.store.pins[page_hash] += 1
            for page_key in page_keys:
                self.store.pin(page_key)
        are_kept = [all(page_key in self.store.pinned_pages for page_key in page_keys) for page_keys in keys]
        return [*are_kept, False].index(False) * self.block_size

    def unpin(self, token_ids: SequenceOf[int], key: CacheKey) -> bool:
        """Undo one `pin` of the same prefix, whose pages may then be evicted; False if there was none."""
        hashes, pins = self._prefix_hashes(token_ids, key), self.store.pins
        if not hashes or not self.pinned_prefixes[hashes[-1]]:
            return False
        self.pinned_prefixes -= Counter([hashes[-1]])
        self.store.num_pinnings += 1
        for page_hash in reversed(hashes):
            pins[page_hash] -= 1
            if pins[page_hash] == 0:
                del pins[page_hash]
                for group in range(len(self.windows)):
                    self.store.unpin((group, page_hash))
        return True

    def num_new_pins(self, token_ids: SequenceOf[int], key: CacheKey) -> int:
        """Pages that a pin of this prefix would keep from requests, beyond those pinned already."""
        hashes = self._prefix_hashes(token_ids, key)
        return len(self.windows) * sum(page_hash not in self.store.pins for page_hash in hashes)

    def num_pinned(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages among those of the first tokens of this sequence that are pinned, or will be once they are computed."""
        if not self.store.pins:
            return 0
        num_pages = num_tokens // self.block_size
        hashes = self._hashes(sequence, num_pages)[:num_pages]
        return self.windows.count(None) * sum(page_hash in self.store.pins for page_hash in hashes)

    def discard(self, sequence: Sequence) -> None:
        """Unpublish all pages of a sequence whose logits turned out not to be finite; their owners keep them.

        Pages that it found in the cache among them, and copies in the other pool: nothing tells which page is to
        blame, and an unsound page that stays published would fail every later request with that prefix.
        """
        pools = self.store.device, self.store.host
        key_of = pools[sequence.state is RequestState.SWAPPED].key_of
        for key in [key_of[page] for pages in sequence.pages for page in pages if page in key_of]:
            self.store.unpin(key)
            for pool in pools:
                pool.forget(pool.page_of.get(key, NULL_PAGE))

    def reset(self) -> None:
        """Forget every published page; sequences keep the pages they own. Pins hold for what is computed anew."""
        for key in list(self.store.pinned_pages):
            self.store.unpin(key)
        self.store.device.forget_all()
        self.store.host.forget_all()
        self.store.counts["reset"] += 1

    def _hashes(self, sequence: Sequence, num_pages: int) -> list[bytes]:
        """Chained hashes of the first full pages at least; kept on the sequence, since tokens never change."""
        key = sequence.request.cache_key
        extend_hashes(sequence.page_hashes, sequence.token_ids, num_pages, self.block_size, key)
        return sequence.page_hashes

    def _prefix_hashes(self, token_ids: SequenceOf[int], key: CacheKey) -> list[bytes]:
        hashes: list[bytes] = []
        extend_hashes(hashes, array("i", token_ids), len(token_ids) // self.block_size, self.block_size, key)
        return hashes

    def _num_leading(self, group: int, hashes: list[bytes], length: int) -> int:
        """Pages from the start on that are cached, at most `length`."""
        on_device, on_host = self.store.device.page_of, self.store.host.page_of
        for index in range(length):
            key = (group, hashes[index])
            if key not in on_device and key not in on_host:
                return index
        return length

    def _last_missing(self, hashes: list[bytes], length: int) -> int | None:
        """The last page that some window needs for a prefix of `length` pages and that is not cached."""
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            for index in reversed(range(self.first_seen(group, length * self.block_size), length)):
                key = (group, hashes[index])
                if key not in self.store.device.page_of and key not in self.store.host.page_of:
                    return index
        return None
