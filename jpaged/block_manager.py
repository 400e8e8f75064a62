"""Who owns which page: reference counts, page tables, and the cache of full pages by content.

A page is free, or referenced by one or more sequences. A free page may still hold a published prefix, and
then it is found again by its hash until somebody takes it. Full pages are immutable; the partly filled last
page of a sequence is its own. Page 0 is the null page: never owned, never freed, never hashed.

Knows pages and token ids; no array, no device, no time.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import chain

from .request import Sequence

NULL_PAGE = 0
ROOT_HASH = hashlib.sha256(b"jpaged prefix v1").digest()


class BlockManager:
    """Hands out the pages of one device pool to sequences, for one page-table group or several."""

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool, num_groups: int = 1):
        """`num_blocks` counts every page of the pool, the null page among them."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_groups = num_groups
        self.ref_counts = [0] * num_blocks
        # Taken from the left: pages without content first, then the least recently used cached ones.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.page_of_hash: dict[tuple[int, bytes], int] = {}
        self.hash_of_page: dict[int, tuple[int, bytes]] = {}
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.peak_used = 0

    @property
    def num_usable(self) -> int:
        """Pages that sequences can own: all but the null page."""
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self.free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens, in all groups together."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give the sequence pages for its first `num_tokens` tokens; False, changing nothing, if too few are free."""
        wanted = -(-num_tokens // self.block_size)
        if sum(max(0, wanted - len(pages)) for pages in sequence.pages) > len(self.free):
            return False
        for pages in sequence.pages:
            while len(pages) < wanted:
                pages.append(self._take())
        self.peak_used = max(self.peak_used, self.num_used)
        return True

    def match_prefix(self, sequence: Sequence) -> list[list[int]]:
        """Cached pages that hold the start of this sequence, per group; changes nothing.

        Never the whole sequence: at least one token is left to compute, since only that yields logits.
        """
        if not self.enable_prefix_caching:
            return [[] for _ in range(self.num_groups)]
        hashes = self._hashes(sequence, (sequence.num_tokens - 1) // self.block_size)
        matched = []
        for group in range(self.num_groups):
            pages: list[int] = []
            for page_hash in hashes:
                page = self.page_of_hash.get((group, page_hash))
                if page is None:
                    break
                pages.append(page)
            matched.append(pages)
        shortest = min(len(pages) for pages in matched)
        return [pages[:shortest] for pages in matched]

    def num_free_without(self, pages: Iterable[Iterable[int]]) -> int:
        """Free pages that would be left if these cached ones were adopted: hits may lie among the free.

        A page that several sequences of a group have hit is taken once.
        """
        return len(self.free) - sum(page in self.free for page in set(chain.from_iterable(pages)))

    def adopt(self, sequence: Sequence, matched: list[list[int]]) -> int:
        """Start the sequence, which owns no page, with these cached ones; returns the tokens they hold."""
        for pages, found in zip(sequence.pages, matched, strict=True):
            for page in found:
                self.ref_counts[page] += 1
                self.free.pop(page, None)
            pages.extend(found)
        num_pages = len(matched[0])
        sequence.num_computed = num_pages * self.block_size
        sequence.num_published = num_pages
        self.peak_used = max(self.peak_used, self.num_used)
        return sequence.num_computed

    def count_query(self, num_tokens: int, num_hit: int) -> None:
        """Statistics of a first admission; a resumed sequence finding its own pages is no hit."""
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += num_hit

    def publish(self, sequence: Sequence) -> None:
        """Offer the full pages whose keys and values are computed to later sequences."""
        if not self.enable_prefix_caching:
            return
        num_full = sequence.num_computed // self.block_size
        if num_full <= sequence.num_published:
            return
        hashes = self._hashes(sequence, num_full)
        for index in range(sequence.num_published, num_full):
            for group, pages in enumerate(sequence.pages):
                key, page = (group, hashes[index]), pages[index]
                # Two sequences may have computed the same content: the first page stays the one that is found.
                if key not in self.page_of_hash:
                    self.page_of_hash[key] = page
                    self.hash_of_page[page] = key
        sequence.num_published = num_full

    def release(self, sequence: Sequence) -> None:
        """Take all pages back. The tail goes first in line to be reused, since a prefix serves more sequences.

        All groups' pages of one position go together: a prefix is found only while every group has it.
        """
        for page in chain.from_iterable(zip(*map(reversed, sequence.pages), strict=True)):
            self.ref_counts[page] -= 1
            if self.ref_counts[page] == 0:
                self.free[page] = None
                if page not in self.hash_of_page:
                    self.free.move_to_end(page, last=False)
        sequence.release_device()

    def discard_unsound(self, sequence: Sequence) -> None:
        """Unpublish all pages of a sequence whose values turned out not to be finite; their owners keep them.

        Pages that it found in the cache among them: nothing tells which page is to blame, and an unsound page
        that stays published would fail every later request with that prefix. A sound one is computed anew.
        """
        for page in chain.from_iterable(sequence.pages):
            self._forget(page)

    def reset_prefix_cache(self) -> None:
        """Forget every published page; sequences keep the pages they own."""
        self.page_of_hash.clear()
        self.hash_of_page.clear()

    def check(self, sequences: SequenceOf[Sequence]) -> None:
        """Hold the pool against its invariants; `sequences`: all that own pages. AssertionError if one is broken."""
        counts = [0] * self.num_blocks
        for sequence in sequences:
            owned = list(chain.from_iterable(sequence.pages))
            assert len(set(owned)) == len(owned), "a page twice in one sequence"
            for page in owned:
                counts[page] += 1
            num_full = sequence.num_computed // self.block_size
            assert sequence.num_published <= num_full, "a page published before it was computed"
            for pages in sequence.pages:
                assert len(pages) * self.block_size >= sequence.num_computed, "computed tokens without a page"
                for page in pages[num_full:]:
                    assert self.ref_counts[page] == 1, "a page that is still written is shared"
                    assert page not in self.hash_of_page, "a page that is still written is published"
        assert counts[NULL_PAGE] == 0, "the null page is owned"
        assert counts == self.ref_counts, "reference counts differ from the page tables"
        assert NULL_PAGE not in self.free, "the null page is free"
        assert set(self.free) == {page for page in range(1, self.num_blocks) if counts[page] == 0}, (
            "free ≠ unreferenced"
        )
        assert len(self.page_of_hash) == len(self.hash_of_page), "a hash without its page"
        for key, page in self.page_of_hash.items():
            assert page != NULL_PAGE, "the null page is published"
            assert self.hash_of_page[page] == key, "a page under another's hash"

    def _take(self) -> int:
        page, _ = self.free.popitem(last=False)
        self._forget(page)
        self.ref_counts[page] = 1
        return page

    def _forget(self, page: int) -> None:
        key = self.hash_of_page.pop(page, None)
        if key is not None:
            del self.page_of_hash[key]

    def _hashes(self, sequence: Sequence, num_pages: int) -> list[bytes]:
        """Chained SHA-256 of the first full pages; kept on the sequence, since tokens never change."""
        hashes = sequence.page_hashes
        size = self.block_size
        while len(hashes) < num_pages:
            start = len(hashes) * size
            tokens = array("i", sequence.token_ids[start : start + size]).tobytes()
            hashes.append(hashlib.sha256((hashes[-1] if hashes else ROOT_HASH) + tokens).digest())
        return hashes[:num_pages]
