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
        """Make empty pools of device pages and of host pages.

        `num_blocks` and `num_host_blocks` count the pages of each pool, including the null page 0, which no sequence
        owns. With `num_host_blocks=0` no page is ever on the host. `arithmetic` holds the page size and the page-table
        groups: layers with the same attention window share a page table. `max_cached_blocks` caps the free device pages
        that keep a cached prefix; None sets no cap. With `keep_evicted`, a prefix that the device evicts is copied to
        the host pool, if that has room.
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
        """Return counts of pages, copies, evictions and prefix-cache tokens, under the names of `Engine.stats`.

        Names with `blocks` count pages, without the null page: `blocks` and `host_blocks` are the sizes of the two
        pools, `_used` counts the pages that something references now, and `peak_` is the highest such count so far.
        `copies` counts pages copied on write, `evictions` cached device pages that were taken for something else, and
        `host_hits` pages that were found in the host pool. The two `prefix_cache_` values count the tokens that were
        looked up and the tokens that were found.
        """
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
        """Give a sequence the pages that it needs to compute its first `num_tokens` tokens; return whether it has them.

        If too few pages are free, nothing changes. A page-table group with full attention gets pages for
        all tokens that the sequence has, so that an admitted prompt never has to compete for its own pages. A group
        with a sliding window gets pages for `num_tokens` tokens. The page that the next token is written to must belong
        to this sequence alone: if other sequences reference it, or the prefix cache offers it, it is replaced by a copy
        in the sequence's table (copy on write).

        Example with pages of 4 tokens: a sequence of 10 tokens that owns 1 page per group, and has computed 4 tokens,
        gets pages for `num_tokens=8`. Full attention adds 2 pages (for all 10 tokens), and a sliding window adds 1.
        """
        arithmetic = self.arithmetic
        # Index, in the page table of every group, of the page that the next token is written to.
        page_to_write = sequence.num_computed // arithmetic.block_size
        ref_counts, key_of = self.device.ref_counts, self.device.key_of
        # A group that has no such page yet has nothing to copy: it gets a new page below.
        groups_to_copy = [
            group
            for group, pages in enumerate(sequence.pages)
            if page_to_write < len(pages) and (ref_counts[pages[page_to_write]] > 1 or pages[page_to_write] in key_of)
        ]
        # Pages that each group lacks; negative if it has more than enough.
        num_missing = [
            arithmetic.pages_for(max(num_tokens, sequence.num_tokens) if window is None else num_tokens) - len(pages)
            for window, pages in zip(arithmetic.windows, sequence.pages, strict=True)
        ]
        if len(groups_to_copy) + sum(num_pages for num_pages in num_missing if num_pages > 0) > self.num_free:
            return False
        for group in groups_to_copy:
            self._copy_on_write(sequence, group, page_to_write)
        for group, num_pages in enumerate(num_missing):
            for _ in range(num_pages):  # Empty if the group has enough pages.
                self._append(sequence, group, self.store.take())
        return True

    def release(self, sequence: SampleSequence) -> None:
        """Give up all references of a sequence to its pages, the last page first, and empty its page tables.

        A page that nothing else references becomes free. Pages that become free first are evicted first, so the start
        of a prefix, which serves more sequences than its end, stays longer. The pages of all groups at one index are
        given up one after another, since a prefix is found only while every group has it.
        """
        self._drop_refs(sequence)
        self._forget_pages(sequence)

    def pass_windows(self, sequence: SampleSequence, num_done: int) -> None:
        """Give back the sequence's pages that no query at position `num_done` or later reads through a sliding window.

        No step in flight may compute a token before that position. In the page table, the null page replaces each page
        that is given back, and `num_passed` counts these pages. The pages of a sequence that is swapped out go back to
        the host pool. Nothing happens to groups without a window, or to a sequence that has lost its pages.

        Example with pages of 4 tokens and a window of 8: with `num_done=13` the next query reads the positions 6 to 13,
        so page 0 (positions 0 to 3) is given back, and page 1 stays.
        """
        pool = self._pool_of(sequence)
        for group, _ in self.arithmetic.window_groups:
            pages = sequence.pages[group]
            first_visible = self.arithmetic.first_visible_page(group, num_done)
            # The table of a sequence that has lost its pages is empty, so the range may not go beyond its length.
            for index in range(sequence.num_passed[group], min(first_visible, len(pages))):
                if pool is self.device:  # The prefix cache may still offer a device page to later sequences.
                    self.prefixes.give_back(sequence, group, index)
                else:
                    pool.drop_ref(pages[index])
                pages[index] = NULL_PAGE
                sequence.num_passed[group] = index + 1

    def can_share(self, parent: SampleSequence, num_tokens: int) -> bool:
        """Return whether the parent still has all pages that a child which shares `num_tokens` tokens attends to.

        The child's first query is at position `num_tokens`. Only leading pages that a sliding window has passed can be
        gone (`num_passed` counts them), so groups with full attention are not looked at.
        """
        return all(
            parent.num_passed[group] <= self.arithmetic.first_visible_page(group, num_tokens)
            for group, _ in self.arithmetic.window_groups
        )

    def share(self, parent: SampleSequence, child: SampleSequence, num_tokens: int) -> None:
        """Let `child`, which owns no page, share the parent's pages of the first `num_tokens` computed tokens.

        The last of these pages may be partly filled; `prepare` copies it before one of the two writes it. The caller
        sets the child's number of computed tokens. In a group with a sliding window, the child gets the null page for
        each page that the query at position `num_tokens` - 1 does not attend to. The parent may still have that page,
        since its own steps in flight may read it. The child also gets the hashes of the shared full pages, and the
        count of those that are published already.

        Example with pages of 4 tokens and full attention: sharing 10 tokens adds a reference to each of the parent's
        first 3 pages, the last of which is partly filled.
        """
        assert self.can_share(parent, num_tokens), "the child would see what its parent has given back"
        arithmetic, num_pages = self.arithmetic, self.arithmetic.pages_for(num_tokens)
        pool = self._pool_of(parent)
        for group, pages in enumerate(parent.pages):
            # The child may be forked in turn. Its fork computes the last shared token again, at num_tokens - 1.
            first_visible = arithmetic.first_visible_page(group, max(0, num_tokens - 1))
            first_page = max(parent.num_passed[group], first_visible)
            for page in [NULL_PAGE] * first_page + pages[first_page:num_pages]:
                if page != NULL_PAGE:
                    pool.add_ref(page)
                self._append(child, group, page)
            child.num_passed[group] = first_page
        self.prefixes.inherit(parent, child, num_tokens)

    def adopt(self, sequence: SampleSequence, match: PrefixMatch) -> int:
        """Give the sequence, which owns no page, the pages of a prefix-cache hit; return how many tokens they hold.

        The caller sets the sequence's number of computed tokens. `match` is what `PrefixCache.match` returned, and
        `PrefixCache.num_free_needed` device pages must be free. In a group with a sliding window, the null page stands
        for the first pages if no later query attends to them; they count as passed.
        """
        for group, pages in enumerate(self.prefixes.adopt(sequence, match)):
            sequence.num_passed[group] = pages.count(NULL_PAGE)  # Null pages stand only before all others.
            for page in pages:
                self._append(sequence, group, page)
        return match.num_pages * self.arithmetic.block_size

    def defer_free(self, sequence: SampleSequence, step: int) -> None:
        """Keep the pages that steps in flight may write for this sequence from being reused before those steps retire.

        `step` is the number of the last step in flight, and every page is treated as if that step wrote it. Decoding
        steps write the page of the last token that the host knows, and later pages. A chunk in flight (a step with
        tokens that the host knew) may write any page of the sequence. Pages in `key_of` are published, so they are full
        and no step writes them. The sequence keeps its pages until it gives them back.
        """
        has_chunk_in_flight = sequence.last_chunk_step > self.device.retired_step
        first_page = 0 if has_chunk_in_flight else (len(sequence.token_ids) - 1) // self.arithmetic.block_size
        for pages in sequence.pages:
            for page in pages[first_page:]:
                if page != NULL_PAGE and page not in self.device.key_of:
                    self.device.defer_free(page, step)

    # Swap

    def num_held(self, sequences: Sequence[SampleSequence]) -> int:
        """Count the distinct pages that hold computed tokens of these sequences."""
        return len(self._held(sequences))

    def swap_out(self, sequences: Sequence[SampleSequence]) -> bool:
        """Move the computed pages of these sequences, which may share pages, to the host pool.

        Return True if this was done. If the host pool is too full, return False, move nothing, and raise the counter
        `host_pool_full`. A shared page is copied once. A page is not copied if the host pool has it already, under the
        same prefix hash. Pages without computed tokens are given back. Afterwards the sequences' page tables name pages
        of the host pool. The caller sets the state SWAPPED after this call.
        """
        device_pages = self._held(sequences)
        host_copies = self._copies(device_pages, self.device, self.host)
        # A copy without a reference still counts as a free page of the host pool; referencing it takes that page.
        num_free_copies = sum(self.host.ref_counts[copy] == 0 for copy in host_copies.values())
        if len(device_pages) - len(host_copies) + num_free_copies > self.host.num_free:
            self.store.counts["host_pool_full"] += 1
            return False
        self._move(sequences, device_pages, host_copies, is_out=True)
        return True

    def num_to_swap_in(self, sequences: Sequence[SampleSequence]) -> int:
        """Count the free device pages that `swap_in` would take for these sequences.

        Each distinct host page takes one. It takes none if a device page with the same content is referenced, which the
        sequences then share. A device page with that content that is free saves the copy, but is taken all the same.
        """
        host_pages = self._held(sequences)
        device_copies = self._copies(host_pages, self.host, self.device)
        return len(host_pages) - sum(self.device.ref_counts[copy] > 0 for copy in device_copies.values())

    def swap_in(self, sequences: Sequence[SampleSequence]) -> None:
        """Move the pages of swapped-out sequences back to the device; `num_to_swap_in` device pages must be free.

        Afterwards the sequences' page tables name device pages. A page is not copied if the device still has it, under
        the same prefix hash. The caller replaces the state SWAPPED after this call, since the state says which pool the
        pages are given back to.
        """
        host_pages = self._held(sequences)
        device_copies = self._copies(host_pages, self.host, self.device)
        self._move(sequences, host_pages, device_copies, is_out=False)

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
        """Return the sequence's pages that hold computed tokens, one list per page-table group."""
        num_pages = self.arithmetic.pages_for(sequence.num_computed)
        return [pages[:num_pages] for pages in sequence.pages]

    def _held(self, sequences: Sequence[SampleSequence]) -> list[int]:
        """Return the distinct pages of all groups that hold computed tokens of these sequences, in table order."""
        tables = chain.from_iterable(self._computed(sequence) for sequence in sequences)
        return [page for page in dict.fromkeys(chain.from_iterable(tables)) if page != NULL_PAGE]

    def _copies(self, pages: Iterable[int], source: PagePool, target: PagePool) -> dict[int, int]:
        """Return page of `source` → page of `target` with the same content, for those of `pages` that have one.

        Pages have the same content if both pools publish them under the same key (group and prefix hash).
        """
        keys = {page: source.key_of[page] for page in pages if page in source.key_of}
        return {page: target.page_of[key] for page, key in keys.items() if key in target.page_of}

    def _move(self, owners: Sequence[SampleSequence], held: list[int], copies: dict[int, int], *, is_out: bool) -> None:
        """Replace the pages in the tables of `owners` by pages of the other pool.

        `is_out` moves device pages to the host pool; False moves host pages to the device. `held` are the distinct
        pages in the tables that hold computed tokens. `copies` maps some of them to pages of the other pool with equal
        content. For each other one a page is taken, a copy is scheduled, and the pair is added to `copies`. The owners
        give back all pages that they had, and so lose those without computed tokens. Null pages stay null pages.
        """
        target, take = (self.host, self.store.swap_out) if is_out else (self.device, self.store.swap_in)
        # All copies are referenced before any page is taken, because taking may evict a page without a reference.
        for copy in copies.values():
            target.add_ref(copy)
        for page in held:
            if page not in copies:
                copies[page] = take(page)
        for sequence in owners:
            tables = [[copies[page] if page else NULL_PAGE for page in pages] for pages in self._computed(sequence)]
            self._drop_refs(sequence)  # Drops them in the pool that the sequence's state, not yet changed, names.
            for page in chain.from_iterable(tables):
                if page != NULL_PAGE:
                    target.add_ref(page)
            sequence.pages = tables
        # The owners reference each page now, so the reference from above, or from `take`, is given up.
        for copy in copies.values():
            target.drop_ref(copy)
