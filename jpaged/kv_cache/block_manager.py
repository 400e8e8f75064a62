"""Page tables of sequences: which pages each owns or shares, how it gets more, gives them back, or moves to the host.

Full pages are immutable and shared freely. The partly filled last page of a sequence has one writer: a fork shares
it, and the first of the two that writes it gets a copy. Layers that differ in what they see, full attention or a
sliding window, have page tables of their own (groups); pages that no later query of a window sees are given back.

Every change that the device must know is noted: moves of pages in the store, carried out before the step's own work,
and changes of the page tables, sent with it. The scheduler takes both with each step.

Knows pages and token ids; no array, no device, no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from ..request import RequestState, SampleSequence
from .page_arithmetic import PageArithmetic
from .page_pool import NULL_PAGE, PagePool
from .page_store import PageMove, PageStore
from .prefix_cache import PrefixCache, PrefixMatch


class BlockManager:
    """The page tables over one store of pages.

    The only writer of `pages` and `num_passed` of sequences. It reads how many of their tokens are computed, and
    which state slot they have; its callers count those.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        arithmetic: PageArithmetic,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        max_cached_blocks: int | None = None,
        keep_evicted: bool = True,
    ):
        """Make empty pools. `num_blocks` and `num_host_blocks` count every page, the null pages too; 0: no host pool.

        `arithmetic` has the page-table groups and the page size. `max_cached_blocks` caps the free pages that keep a
        prefix. `keep_evicted`: prefixes that the device evicts go to the host pool.
        """
        self.arithmetic = arithmetic
        self.store = PageStore(num_blocks, num_host_blocks, max_cached_blocks, keep_evicted=keep_evicted)
        self.device, self.host = self.store.device, self.store.host
        self.prefixes = PrefixCache(self.store, arithmetic, is_enabled=enable_prefix_caching)
        self.table_changes: dict[tuple[int, int, int], int] = {}
        """(group, state slot, index) → page, for each entry of the device's page tables that has changed since the last
        step. An entry that changes twice is sent once. What is sent for a slot that another sequence has got since is
        overwritten by that sequence, or never read."""

    def clear(self, sequences: Iterable[SampleSequence] = ()) -> None:
        """Make every page free and empty, since the device has lost everything; `sequences` owned some of them."""
        self.store.clear()
        self.table_changes.clear()
        for sequence in sequences:
            self._forget_pages(sequence)

    def take_changes(self) -> tuple[list[tuple[int, int, int, int]], list[PageMove]]:
        """Return the page-table changes, as (group, slot, entry, page), and the page moves since the last call."""
        changes = [(*entry, page) for entry, page in self.table_changes.items()]
        self.table_changes.clear()
        return changes, self.store.take_moves()

    def retire(self, step: int) -> None:
        """Note that every step up to this one is done: pages that only those could write may be taken again."""
        self.device.retire(step)

    def stats(self) -> dict[str, int]:
        """Return counts of pages, copies, evictions and prefix-cache tokens, under the names of `Engine.stats`."""
        device, host, counts = self.device, self.host, self.store.counts
        return {
            "copies": counts["copy_on_write"],
            "prefix_cache_queries": self.prefixes.num_queried_tokens,
            "prefix_cache_hits": self.prefixes.num_hit_tokens,
            "blocks": device.num_usable,
            "blocks_used": device.num_used,
            "peak_blocks_used": device.peak_used,
            "host_blocks": host.num_usable,
            "host_blocks_used": host.num_used,
            "peak_host_blocks_used": host.peak_used,
            "evictions": counts["eviction"],
            "host_hits": counts["host_hit"],
        }

    # How many pages there are, and how many are needed

    @property
    def num_free(self) -> int:
        """Return the number of device pages that can be taken now."""
        return self.device.num_free

    @property
    def num_usable(self) -> int:
        """Return the number of device pages that sequences and pins can own."""
        return self.device.num_usable

    @property
    def num_available(self) -> int:
        """Return the number of pages that one request could have if it ran alone; pinned prefixes keep theirs."""
        return self.device.num_usable - self.num_pinned

    @property
    def num_pinned(self) -> int:
        """Return the number of pages that pinned prefixes keep, or will keep once they are computed."""
        return len(self.store.pins)

    @property
    def has_deferred(self) -> bool:
        """Return whether the retirement of a step in flight will free pages."""
        return bool(self.device.deferred)

    def release_pins(self) -> None:
        """Let pinned pages be evicted. Their prefixes are pinned again once a sequence computes them anew."""
        self.store.unpin_all()

    # The life of a page table

    def send_table(self, sequence: SampleSequence) -> None:
        """Note every page of a sequence that has just got a state slot, for the device."""
        slot = sequence.seq_slot
        for group, pages in enumerate(sequence.pages):
            for index in range(sequence.num_passed[group], len(pages)):
                self.table_changes[group, slot, index] = pages[index]

    def prepare(self, sequence: SampleSequence, num_tokens: int) -> bool:
        """Get pages to write the first `num_tokens` tokens of a sequence; False, changing nothing, if too few are free.

        A full-attention group gets pages for all tokens that the sequence has, so that an admitted prompt never has
        to compete for its own pages. The page that is written next becomes the sequence's own: if other sequences
        read it, or may find it, the sequence gets a copy.
        """
        arithmetic = self.arithmetic
        page_to_write = sequence.num_computed // arithmetic.block_size  # Its index in the page tables.
        ref_counts, key_of = self.device.ref_counts, self.device.key_of
        groups_to_copy = [
            group
            for group, pages in enumerate(sequence.pages)
            if page_to_write < len(pages) and (ref_counts[pages[page_to_write]] > 1 or pages[page_to_write] in key_of)
        ]
        # Pages that each group lacks; negative where it has more than enough.
        num_missing = [
            arithmetic.pages_for(max(num_tokens, sequence.num_tokens) if window is None else num_tokens) - len(pages)
            for window, pages in zip(arithmetic.windows, sequence.pages, strict=True)
        ]
        if len(groups_to_copy) + sum(num_pages for num_pages in num_missing if num_pages > 0) > self.num_free:
            return False
        for group in groups_to_copy:
            self._copy_on_write(sequence, group, page_to_write)
        for group, num_pages in enumerate(num_missing):
            for _ in range(num_pages):
                self._append(sequence, group, self.store.take())
        return True

    def release(self, sequence: SampleSequence) -> None:
        """Take all pages of a sequence back. The first pages are evicted last: a prefix serves more sequences.

        All groups' pages of one position go together, since a prefix is found only while every group has it.
        """
        self._drop_refs(sequence)
        self._forget_pages(sequence)

    def pass_windows(self, sequence: SampleSequence, num_done: int) -> None:
        """Give back the pages, of the device or the host, that no query from position `num_done` on can see.

        No step in flight may have an earlier query. Does nothing for a sequence that has lost its pages.
        """
        pool = self._pool_of(sequence)
        for group, _ in self.arithmetic.window_groups:
            pages = sequence.pages[group]
            first_visible = self.arithmetic.first_visible_page(group, num_done)
            for index in range(sequence.num_passed[group], min(first_visible, len(pages))):
                if pool is self.device:
                    self.prefixes.give_back(sequence, group, index)
                else:
                    pool.drop_ref(pages[index])
                pages[index] = NULL_PAGE
                sequence.num_passed[group] = index + 1

    def can_share(self, parent: SampleSequence, num_tokens: int) -> bool:
        """Return whether the parent still has all pages that a query behind its first `num_tokens` tokens sees."""
        return all(
            parent.num_passed[group] <= self.arithmetic.first_visible_page(group, num_tokens)
            for group, _ in self.arithmetic.window_groups
        )

    def share(self, parent: SampleSequence, child: SampleSequence, num_tokens: int) -> None:
        """Give the child, which owns no page, the parent's pages of the first `num_tokens` computed tokens.

        The last of these pages may be partly filled. The caller counts the tokens as computed by the child. Pages that
        a window has passed at the last of these tokens stay the parent's alone: its steps in flight may still see them.
        """
        assert self.can_share(parent, num_tokens), "the child would see what its parent has given back"
        arithmetic, num_pages = self.arithmetic, self.arithmetic.pages_for(num_tokens)
        pool = self._pool_of(parent)
        for group, pages in enumerate(parent.pages):
            # Another fork may begin one token earlier: it computes the last token itself.
            first_visible = arithmetic.first_visible_page(group, max(0, num_tokens - 1))
            first_page = max(parent.num_passed[group], first_visible)
            for page in [NULL_PAGE] * first_page + pages[first_page:num_pages]:
                if page != NULL_PAGE:
                    pool.add_ref(page)
                self._append(child, group, page)
            child.num_passed[group] = first_page
        self.prefixes.inherit(parent, child, num_tokens)

    def adopt(self, sequence: SampleSequence, match: PrefixMatch) -> int:
        """Give the sequence, which owns no page, the pages of a prefix-cache hit; return their number of tokens.

        The caller adds these tokens to the computed ones. In a page-table group whose window has passed them, the first
        pages are null.
        """
        for group, pages in enumerate(self.prefixes.adopt(sequence, match)):
            sequence.num_passed[group] = pages.count(NULL_PAGE)
            for page in pages:
                self._append(sequence, group, page)
        return match.num_pages * self.arithmetic.block_size

    def defer_free(self, sequence: SampleSequence, step: int) -> None:
        """Keep the pages that steps in flight may write for this sequence from being taken before they have retired.

        `step` is the last of these steps. They write the pages of tokens that the host does not know yet; with a chunk
        in flight, all pages of the sequence.
        """
        has_chunk_in_flight = sequence.last_chunk_step > self.device.retired_step
        first_page = 0 if has_chunk_in_flight else (len(sequence.token_ids) - 1) // self.arithmetic.block_size
        for pages in sequence.pages:
            for page in pages[first_page:]:
                if page != NULL_PAGE and page not in self.device.key_of:
                    self.device.defer_free(page, step)

    # Swap

    def num_held(self, sequences: Sequence[SampleSequence]) -> int:
        """Count the pages that hold something computed of these sequences, each once."""
        return len(self._held(sequences))

    def swap_out(self, sequences: Sequence[SampleSequence]) -> bool:
        """Move all that these sequences, which share pages, have computed to the host pool; False if that is too full.

        A page that several of them share is copied once, and one that the host pool has already not at all. Pages
        that hold nothing yet are given back. Afterwards the page tables name pages of the host pool. False changes
        nothing.
        """
        device_pages = self._held(sequences)
        host_copies = self._copies(device_pages, self.device, self.host)
        # A copy without a reference is a free page now, and leaves the free ones once it is referenced.
        num_free_copies = sum(self.host.ref_counts[copy] == 0 for copy in host_copies.values())
        if len(device_pages) - len(host_copies) + num_free_copies > self.host.num_free:
            self.store.counts["host_pool_full"] += 1
            return False
        self._move(sequences, device_pages, host_copies, is_out=True)
        return True

    def num_to_swap_in(self, sequences: Sequence[SampleSequence]) -> int:
        """Count the free pages that swapping these sequences in takes: pages in use on the device are there already."""
        held = self._held(sequences)
        copies = self._copies(held, self.host, self.device)
        return len(held) - sum(self.device.ref_counts[copy] > 0 for copy in copies.values())

    def swap_in(self, sequences: Sequence[SampleSequence]) -> None:
        """Move back what `swap_out` moved; `num_to_swap_in` pages must be free.

        What the device still has under its hash is not copied.
        """
        held = self._held(sequences)
        copies = self._copies(held, self.host, self.device)
        self._move(sequences, held, copies, is_out=False)

    # Parts of the above

    def _copy_on_write(self, sequence: SampleSequence, group: int, index: int) -> None:
        shared = sequence.pages[group][index]
        copy = sequence.pages[group][index] = self.store.copy(shared)
        self.table_changes[group, sequence.seq_slot, index] = copy
        self.device.drop_ref(shared)

    def _append(self, sequence: SampleSequence, group: int, page: int) -> None:
        pages = sequence.pages[group]
        if sequence.seq_slot and page != NULL_PAGE:
            self.table_changes[group, sequence.seq_slot, len(pages)] = page
        pages.append(page)

    def _drop_refs(self, sequence: SampleSequence) -> None:
        """Give up the references of all pages of a sequence, the last position first."""
        pool = self._pool_of(sequence)
        for index in reversed(range(max(map(len, sequence.pages)))):
            for pages in sequence.pages:
                if index < len(pages) and pages[index] != NULL_PAGE:
                    pool.drop_ref(pages[index])

    def _forget_pages(self, sequence: SampleSequence) -> None:
        sequence.pages = [[] for _ in self.arithmetic.windows]
        sequence.num_passed = [0] * self.arithmetic.num_groups
        self.prefixes.forget_pages(sequence)

    def _pool_of(self, sequence: SampleSequence) -> PagePool:
        return self.host if sequence.state is RequestState.SWAPPED else self.device

    def _computed(self, sequence: SampleSequence) -> list[list[int]]:
        """Return the sequence's pages that hold something, per group."""
        num_pages = self.arithmetic.pages_for(sequence.num_computed)
        return [pages[:num_pages] for pages in sequence.pages]

    def _held(self, sequences: Sequence[SampleSequence]) -> list[int]:
        """Return the pages of all groups that hold something of these sequences, each once, in order of appearance."""
        tables = chain.from_iterable(self._computed(sequence) for sequence in sequences)
        return [page for page in dict.fromkeys(chain.from_iterable(tables)) if page != NULL_PAGE]

    def _copies(self, pages: Iterable[int], source: PagePool, target: PagePool) -> dict[int, int]:
        """Return source page → target page for those pages that both pools have under one hash."""
        keys = {page: source.key_of[page] for page in pages if page in source.key_of}
        return {page: target.page_of[key] for page, key in keys.items() if key in target.page_of}

    def _move(self, owners: Sequence[SampleSequence], held: list[int], copies: dict[int, int], *, is_out: bool) -> None:
        """Replace the pages in these sequences' tables by pages of the other pool: `copies`, else newly taken ones.

        `held` are the pages that hold something, and `copies` maps some of them to equal pages of the other pool; the
        others are added to it. `is_out`: the other pool is the host's.
        """
        target, take = (self.host, self.store.swap_out) if is_out else (self.device, self.store.swap_in)
        # The copies are referenced before any page is taken, which may evict pages without a reference.
        for copy in copies.values():
            target.add_ref(copy)
        for page in held:
            if page not in copies:
                copies[page] = take(page)
        for sequence in owners:
            tables = [[copies[page] if page else NULL_PAGE for page in pages] for pages in self._computed(sequence)]
            self._drop_refs(sequence)
            for page in chain.from_iterable(tables):
                if page != NULL_PAGE:
                    target.add_ref(page)
            sequence.pages = tables
        # Each page is now referenced by its owners; this gives up the reference from above, or from `take`.
        for copy in copies.values():
            target.drop_ref(copy)
