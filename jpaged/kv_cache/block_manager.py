"""Page tables of sequences: who owns which pages, shares them, gets more, gives them back, moves to the host.

Full pages are immutable and shared freely. The partly filled last page of a sequence has one writer: a fork
shares it, and whoever writes it first gets a copy. Layers that differ in what they see, full attention or a
sliding window, have page tables of their own (groups); a window gives back what no later query can see.

Every change that the device must know is noted: moves of pages in the store, to be done before the step's own
work, and `table_changes`, to be sent with it. The caller takes both with each step.

Knows pages and token ids; no array, no device, no time.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import chain
from typing import NamedTuple

from .page_pool import NULL_PAGE, PagePool
from .page_store import PageStore
from .prefix_cache import PrefixCache, PrefixMatch
from .request import RequestState, Sequence


class AllocStatus(enum.Enum):
    """Whether pages can be had: now, after others have given some back, or not from this pool beside its pins."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class TableEntry(NamedTuple):
    """A place in the page tables on the device: an entry of the table of `slot` in `group`."""

    group: int
    slot: int
    entry: int


class BlockManager:
    """The page tables over one store, whose pools and prefix cache are `device`, `host` and `prefixes`."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        windows: tuple[int | None, ...] = (None,),
        num_host_blocks: int = 0,
        max_cached_blocks: int | None = None,
        max_chunk: int = 1,
        keep_evicted: bool = True,
    ):
        """`num_blocks` and `num_host_blocks` count every page, the null pages too; no host pages: 0.

        `windows` has an entry for each page-table group: None sees everything, a number so many tokens, the
        query's own among them. `max_chunk` bounds the tokens that one sequence computes in a step. `keep_evicted`:
        prefixes that the device evicts go to the host pool.
        """
        self.block_size = block_size
        self.windows = windows
        self.max_chunk = max_chunk
        self.store = PageStore(
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            max_cached_blocks=max_cached_blocks,
            keep_evicted=keep_evicted,
        )
        self.prefixes = PrefixCache(
            self.store, block_size=block_size, windows=windows, is_enabled=enable_prefix_caching
        )
        self.table_changes: dict[TableEntry, int] = {}
        """What the device has still to be told. An entry that changes twice between two steps is told once; what it
        is told of a slot that has changed hands, the new owner overrides, or never reads."""
        self.window_groups = [(group, window) for group, window in enumerate(windows) if window is not None]

    @property
    def device(self) -> PagePool:
        return self.store.device

    @property
    def host(self) -> PagePool:
        return self.store.host

    def clear(self) -> None:
        """The device has lost everything: no page holds anything, and nothing is left to tell."""
        self.store.clear()
        self.table_changes.clear()

    # Room

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def num_available(self) -> int:
        """Pages that one request could have if it were alone: pinned prefixes stay where they are."""
        return self.device.num_usable - self.num_pinned

    @property
    def num_pinned(self) -> int:
        """Pages that pinned prefixes keep, or will once they are computed."""
        return len(self.store.pins) * self.num_groups

    def pages_for(self, num_tokens: int) -> int:
        """Pages of one full-attention group that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def most_pages(self, fork_len: int, total_lens: Iterable[int]) -> int:
        """Pages that sequences of these lengths take at most, if they share their first `fork_len` tokens."""
        lens = list(total_lens)
        # A fork computes the last token that it has in common anew, in a page of its own.
        shared = max(0, fork_len - 1) // self.block_size
        own = [self.pages_for(length) - shared for length in lens]
        num_pages = self.windows.count(None) * (shared + sum(own))
        for _, window in self.window_groups:
            # What a chunk's first query still sees, the chunk itself, and a page cut at either end.
            widest = self.pages_for(window - 1 + self.max_chunk) + 1
            num_pages += sum(min(widest, shared + pages) for pages in own)
        return num_pages

    def status_of(self, most_pages: int, num_pages: int) -> AllocStatus:
        """Whether a request of at most `most_pages` fits, and `num_pages` can be taken now."""
        if most_pages > self.num_available:
            return AllocStatus.NEVER
        return AllocStatus.OK if num_pages <= self.device.num_free else AllocStatus.LATER

    # The life of a page table

    def place(self, sequence: Sequence, slot: int) -> None:
        """The sequence gets a state slot: the device must know all of its pages."""
        sequence.slot = slot
        for group, pages in enumerate(sequence.pages):
            for index in range(sequence.num_passed[group], len(pages)):
                self.table_changes[TableEntry(group, slot, index)] = pages[index]

    def prepare(self, sequence: Sequence, num_tokens: int) -> bool:
        """Pages to write for its first `num_tokens` tokens; False, changing nothing, if too few are free.

        A full-attention group gets pages for all that the sequence knows, so that a prompt that was admitted
        never has to fight for its own pages. The page it writes next becomes its own: if others read it, or
        may find it, the sequence gets a copy.
        """
        first = sequence.num_computed // self.block_size
        tails = [(group, pages[first]) for group, pages in enumerate(sequence.pages) if first < len(pages)]
        shared = [group for group, page in tails if self._is_shared(page)]
        missing = [
            self.pages_for(max(num_tokens, sequence.num_tokens) if window is None else num_tokens) - len(pages)
            for window, pages in zip(self.windows, sequence.pages, strict=True)
        ]
        if len(shared) + sum(count for count in missing if count > 0) > self.device.num_free:
            return False
        for group in shared:
            self._copy_on_write(sequence, group, first)
        for group, count in enumerate(missing):
            for _ in range(count):
                self._append(sequence, group, self.store.take())
        return True

    def release(self, sequence: Sequence) -> None:
        """Take all pages back. The tail goes first in line to be evicted, since a prefix serves more sequences.

        All groups' pages of one position go together: a prefix is found only while every group has it.
        """
        pool = self._pool_of(sequence)
        for index in reversed(range(max(map(len, sequence.pages)))):
            for pages in sequence.pages:
                if index < len(pages) and pages[index] != NULL_PAGE:
                    pool.drop_ref(pages[index])
        sequence.forget_pages()

    def pass_windows(self, sequence: Sequence, num_done: int) -> None:
        """Give back what no query from position `num_done` on can see, of the device or of the host. No step in flight
        may have an earlier one. Does nothing for a sequence that has lost its pages."""
        pool = self._pool_of(sequence)
        for group, _ in self.window_groups:
            pages = sequence.pages[group]
            first_seen = self.prefixes.first_seen(group, num_done)
            for index in range(sequence.num_passed[group], min(first_seen, len(pages))):
                pool.drop_ref(pages[index])
                pages[index] = NULL_PAGE
                sequence.num_passed[group] = index + 1

    def can_share(self, parent: Sequence, num_tokens: int) -> bool:
        """Whether the parent still has all that a query behind its first tokens sees: windows may have passed it."""
        return all(
            parent.num_passed[group] <= self.prefixes.first_seen(group, num_tokens) for group, _ in self.window_groups
        )

    def share(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let the child, which owns no page, have the parent's pages of the first tokens, the last one half filled."""
        assert self.can_share(parent, num_tokens), "the child would see what its parent has given back"
        num_pages = self.pages_for(num_tokens)
        pool = self._pool_of(parent)
        for group, pages in enumerate(parent.pages):
            for page in pages[:num_pages]:
                if page != NULL_PAGE:
                    pool.add_ref(page)
                self._append(child, group, page)
        num_full = num_tokens // self.block_size
        child.num_computed = num_tokens
        child.num_passed = list(parent.num_passed)
        child.num_published = min(parent.num_published, num_full)
        child.page_hashes = parent.page_hashes[:num_full]

    def fence(self, sequence: Sequence, step: int) -> None:
        """Steps in flight, `step` the last of them, may write pages of this sequence: not to be reused before.

        They write where the host does not know the token yet; with a chunk in flight, anywhere.
        """
        has_chunk_in_flight = sequence.last_chunk_step > self.device.retired_step
        first = 0 if has_chunk_in_flight else (len(sequence.token_ids) - 1) // self.block_size
        for pages in sequence.pages:
            for page in pages[first:]:
                if page != NULL_PAGE and page not in self.device.key_of:
                    self.device.fence(page, step)

    def adopt(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Start the sequence, which owns no page, with these cached ones; returns the tokens they hold."""
        for group, pages in enumerate(self.prefixes.fetch(match)):
            sequence.num_passed[group] = pages.count(NULL_PAGE)
            for page in pages:
                self._append(sequence, group, page)
        sequence.num_computed = match.num_pages * self.block_size
        sequence.num_published = match.num_pages
        return sequence.num_computed

    # Swap

    def num_held(self, sequences: SequenceOf[Sequence]) -> int:
        """Pages that hold something computed of these sequences, each counted once."""
        return len(self._held(sequences))

    def swap_out(self, sequences: SequenceOf[Sequence]) -> bool:
        """Move all that these sequences, who share pages, have computed to the host pool; False if that is too full.

        A page that several of them share is copied once, and one that the host pool has already not at all. Pages
        that hold nothing yet are given back. Afterwards the page tables count pages of the host pool. False
        changes nothing.
        """
        held = self._held(sequences)
        copies = {page: copy for page in held if (copy := self.store.host_copy_of(page)) is not None}
        num_free_copies = sum(self.host.ref_counts[copy] == 0 for copy in copies.values())
        if len(held) - len(copies) + num_free_copies > self.host.num_free:
            self.store.counts["host_pool_full"] += 1
            return False
        for copy in copies.values():  # Before any is taken, which may evict what nobody references.
            self.host.add_ref(copy)
        for page in held:
            if page not in copies:
                copies[page] = self.store.swap_out(page)
        for sequence in sequences:
            tables = self._computed(sequence)
            kept = sequence.num_computed, sequence.num_published, sequence.num_passed
            self.release(sequence)
            sequence.num_computed, sequence.num_published, sequence.num_passed = kept
            sequence.pages = [_translated(pages, copies, self.host) for pages in tables]
        for copy in copies.values():
            self.host.drop_ref(copy)
        return True

    def num_to_swap_in(self, sequences: SequenceOf[Sequence]) -> int:
        """Free pages that it takes to bring these swapped sequences back: what somebody uses on the device is there."""
        copies = [self.store.device_copy_of(page) for page in self._held(sequences)]
        return sum(copy is None or self.device.ref_counts[copy] == 0 for copy in copies)

    def swap_in(self, sequences: SequenceOf[Sequence]) -> None:
        """Bring back what `swap_out` moved; `num_to_swap_in` pages must be free.

        What the device still has under its hash is not copied.
        """
        held = self._held(sequences)
        copies = {page: copy for page in held if (copy := self.store.device_copy_of(page)) is not None}
        for copy in copies.values():
            self.device.add_ref(copy)
        for page in held:
            if page not in copies:
                copies[page] = self.store.swap_in(page)
        for sequence in sequences:
            tables, sequence.pages = sequence.pages, [_translated(p, copies, self.device) for p in sequence.pages]
            for page in chain.from_iterable(tables):
                if page != NULL_PAGE:
                    self.host.drop_ref(page)
        for copy in copies.values():
            self.device.drop_ref(copy)

    # Parts of the above

    def _copy_on_write(self, sequence: Sequence, group: int, index: int) -> None:
        shared = sequence.pages[group][index]
        own = sequence.pages[group][index] = self.store.copy(shared)
        self.table_changes[TableEntry(group, sequence.slot, index)] = own
        self.device.drop_ref(shared)

    def _append(self, sequence: Sequence, group: int, page: int) -> None:
        pages = sequence.pages[group]
        if sequence.slot and page != NULL_PAGE:
            self.table_changes[TableEntry(group, sequence.slot, len(pages))] = page
        pages.append(page)

    def _pool_of(self, sequence: Sequence) -> PagePool:
        return self.host if sequence.state is RequestState.SWAPPED else self.device

    def _is_shared(self, page: int) -> bool:
        return self.device.ref_counts[page] > 1 or page in self.device.key_of

    def _computed(self, sequence: Sequence) -> list[list[int]]:
        """The sequence's pages that hold something, per group."""
        return [pages[: self.pages_for(sequence.num_computed)] for pages in sequence.pages]

    def _held(self, sequences: SequenceOf[Sequence]) -> list[int]:
        """Pages of all groups that hold something of these sequences, each once, in order of appearance."""
        tables = chain.from_iterable(self._computed(sequence) for sequence in sequences)
        return [page for page in dict.fromkeys(chain.from_iterable(tables)) if page != NULL_PAGE]


def _translated(pages: list[int], copies: dict[int, int], pool: PagePool) -> list[int]:
    """The same pages in another pool, each with a reference more there."""
    translated = [NULL_PAGE if page == NULL_PAGE else copies[page] for page in pages]
    for page in translated:
        if page != NULL_PAGE:
            pool.add_ref(page)
    return translated
