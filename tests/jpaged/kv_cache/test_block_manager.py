"""Pages: which sequences own them, which are found in the prefix cache, which are taken first, which are moved.

The state machine keeps a record of its own of what every slot of every page holds, by whole token history. It carries
out the moves that the block manager notes, and compares the two after each rule. Comments name the invariants B1 … X1.
"""

import hashlib
from array import array
from collections import Counter
from itertools import chain

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jpaged.kv_cache.block_manager import BlockManager
from jpaged.kv_cache.page_store import MoveKind
from jpaged.request import CacheKey, RequestState, make_request
from jpaged.sampling.sampling_params import SamplingParams

from ..invariants import check_pages

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
"""Two token ids, so that sequences often share a prefix."""
MAX_TOKENS = 16
KEY = CacheKey()


def sequence_of(token_ids, num_groups=1):
    request = make_request(
        request_id="r",
        number=0,
        prompt_token_ids=token_ids,
        params=SamplingParams(),
        arrival_time=0.0,
        max_tokens=100,
        engine_seed=0,
        num_groups=num_groups,
    )
    sequence = request.sequences[0]
    sequence.state = RequestState.RUNNING
    return sequence


def manager(num_blocks=10, block_size=2, **options):
    return BlockManager(num_blocks=num_blocks, block_size=block_size, **options)


# What the scheduler does around calls of the block manager: it counts what is computed, and has the slots.


def place(blocks, sequence, slot):
    sequence.seq_slot = slot
    blocks.send_table(sequence)


def adopt(blocks, sequence, match):
    sequence.num_computed = blocks.adopt(sequence, match)
    return sequence.num_computed


def share(blocks, parent, child, num_tokens):
    blocks.share(parent, child, num_tokens)
    child.num_computed = num_tokens


def release(blocks, sequence):
    blocks.release(sequence)
    sequence.num_computed = sequence.seq_slot = 0


def found(blocks, token_ids):
    """Number of cached pages that hold the start of these tokens."""
    return blocks.prefixes.match(sequence_of(token_ids, blocks.num_groups), len(token_ids)).num_pages


def start(blocks, token_ids, *, compute=True):
    """A sequence with pages for all of its tokens, which with `compute` are computed and published."""
    sequence = sequence_of(token_ids, blocks.num_groups)
    adopt(blocks, sequence, blocks.prefixes.match(sequence, len(token_ids) - 1))
    assert blocks.prepare(sequence, len(token_ids))
    if compute:
        sequence.num_computed = len(token_ids)
        blocks.prefixes.publish(sequence, len(token_ids))
    return sequence


def page_key(group, token_ids, block_size):
    """The key of a page by P3: SHA-256 chained over pages of 32-bit token ids, from a root that the extras give."""
    digest = hashlib.sha256(b"jpaged prefix v2\0lora_version\x001\x000\0weights_version\x001\x000").digest()
    for first in range(0, len(token_ids), block_size):
        digest = hashlib.sha256(digest + array("i", token_ids[first : first + block_size]).tobytes()).digest()
    return group, digest


def snapshot(blocks):
    """All state that a refusal may not change."""
    pools = [
        (
            list(pool.ref_counts),
            list(pool.free),
            list(pool.cached),
            list(pool.deferred),
            dict(pool.page_of),
            dict(pool.key_of),
        )
        for pool in (blocks.device, blocks.host)
    ]
    return pools, list(blocks.store.moves), dict(blocks.table_changes), dict(blocks.store.pinned_pages)


def tables_of(sequences):
    return [([list(pages) for pages in s.pages], s.num_computed, s.num_published, s.num_passed) for s in sequences]


class Pool(RuleBasedStateMachine):
    """Sequences start, grow, compute, fork, swap and end, in any order; prefixes are pinned, pools shrink."""

    @initialize(
        num_blocks=st.integers(2, 12),
        block_size=st.sampled_from([1, 2, 4]),
        windows=st.sampled_from([(None,), (None,), (None, None), (None, 3), (2,), (3, 6)]),
        num_host_blocks=st.sampled_from([0, 2, 5, 30]),
        max_cached_blocks=st.sampled_from([None, None, 0, 2]),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def create(self, **options):
        self.blocks = blocks = manager(**options)
        self.running, self.swapped = [], []
        # Pool and page → for each of its slots the group and the tokens up to and including it: what is really there.
        self.contents = {
            pool: [[None] * blocks.block_size for _ in range(pool.num_pages)] for pool in (blocks.device, blocks.host)
        }
        self.tables = {}
        """(state slot, group, entry) → page, as it was sent to the device."""
        self.free_slots = list(range(20, 0, -1))
        # Free cached page → (when it was given back, − its position): the smaller is to be evicted first.
        self.released = {}
        self.num_releases = 0
        self.step = 0
        self.still_written = {}
        """Page that was given back → the step in flight that may write it."""
        self.pins = []
        self.num_withdrawn = {"device": 0, "host": 0}

    # What the device does, and what it knows.

    def flush(self):
        """Carry out the moves and the table changes, as a step would."""
        blocks = self.blocks
        pools = {
            MoveKind.COPY: (blocks.device, blocks.device),
            MoveKind.SWAP_OUT: (blocks.device, blocks.host),
            MoveKind.SWAP_IN: (blocks.host, blocks.device),
        }
        for move in blocks.store.moves:
            source, destination = pools[move.kind]
            assert move.source > 0 < move.destination  # B5
            assert move.destination not in self.still_written or destination is blocks.host  # B6
            self.contents[destination][move.destination] = list(self.contents[source][move.source])
        for (group, slot, entry), page in blocks.table_changes.items():
            self.tables[slot, group, entry] = page
        blocks.store.moves.clear()
        blocks.table_changes.clear()
        for sequence in self.running:
            for group, pages in enumerate(sequence.pages):
                for entry in range(sequence.num_passed[group], len(pages)):
                    assert self.tables[sequence.seq_slot, group, entry] == pages[entry]

    def owners(self, sequences):
        return Counter(page for s in sequences for pages in s.pages for page in pages if page)

    def note_releases(self, before, positions=None):
        """Note that pages that lost their last owner are the youngest of the cache; of one sequence the tail is evicted
        first."""
        self.num_releases += 1
        for page, count in enumerate(self.blocks.device.ref_counts):
            if before[page] and not count:
                self.released[page] = (self.num_releases, -(positions or {}).get(page, 0))

    def drop(self, sequence):
        if sequence.seq_slot:
            self.free_slots.append(sequence.seq_slot)
        (self.swapped if sequence.state is RequestState.SWAPPED else self.running).remove(sequence)

    # Rules

    @rule(token_ids=TOKENS, is_served=st.booleans())
    def start(self, token_ids, is_served):
        """A sequence starts with what is cached; `is_served`: and is computed to its end, if it fits, and released."""
        sequence = self._start(token_ids)
        if sequence and is_served:
            self._prepare(sequence, len(token_ids))
            self._compute(sequence, len(token_ids))
            self._release(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, MAX_TOKENS))
    def prepare(self, data, num_tokens):
        self._prepare(data.draw(st.sampled_from(self.running)), num_tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 12))
    def compute(self, data, num_tokens):
        sequence = data.draw(st.sampled_from(self.running))
        num_tokens = min(num_tokens, sequence.num_tokens - sequence.num_computed)
        if num_tokens and self._prepare(sequence, sequence.num_computed + num_tokens):
            self._compute(sequence, num_tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token_ids=TOKENS)
    def append(self, data, token_ids):
        sequence = data.draw(st.sampled_from(self.running))
        for token_id in token_ids[: MAX_TOKENS - len(sequence.token_ids)]:
            sequence.token_ids.append(token_id)
        sequence.num_tokens = len(sequence.token_ids)

    @precondition(lambda self: self.running or self.swapped)
    @rule(data=st.data(), is_unsound=st.sampled_from([False, False, False, True]))
    def release(self, data, is_unsound):
        sequence = data.draw(st.sampled_from(self.running + self.swapped))
        if is_unsound:
            pool = self.blocks.host if sequence.state is RequestState.SWAPPED else self.blocks.device
            pages = list(chain.from_iterable(sequence.pages))
            keys = [pool.key_of[page] for page in pages if page in pool.key_of]
            self.blocks.prefixes.discard(sequence)
            assert not any(key in each.page_of for key in keys for each in (self.blocks.device, self.blocks.host))
        self._release(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data):
        """B4: one more reference for each distinct page, and no copy before a sequence writes."""
        parent = data.draw(st.sampled_from(self.running))
        num_shared = min(parent.num_computed, len(parent.token_ids) - 1)
        size = self.blocks.block_size
        starts = [max(0, num_shared - window + 1) // size if window else 0 for window in self.windows]
        has_passed = any(passed > start for passed, start in zip(parent.num_passed, starts, strict=True))
        if num_shared == 0 or has_passed or len(self.running) > 9:
            return
        child = sequence_of(list(parent.token_ids), self.blocks.num_groups)
        before, num_moves = list(self.blocks.device.ref_counts), len(self.blocks.store.moves)
        share(self.blocks, parent, child, num_shared)
        self._place(child)
        added = Counter(page for pages in child.pages for page in pages if page)
        assert [new - old for new, old in zip(self.blocks.device.ref_counts, before, strict=True)] == [
            added[page] for page in range(self.blocks.device.num_pages)
        ]
        assert len(self.blocks.store.moves) == num_moves
        assert child.num_computed == num_shared

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 3))
    def swap_out(self, data, count):
        first = data.draw(st.integers(0, len(self.running) - 1))
        group = self.running[first : first + count]
        self.flush()
        blocks = self.blocks
        before, kept, counts = snapshot(blocks), tables_of(group), list(blocks.device.ref_counts)
        slots = [sequence.seq_slot for sequence in group]
        if not blocks.swap_out(group):
            assert (snapshot(blocks), tables_of(group)) == (before, kept)  # B7, W2
            tables = [pages[: blocks.pages_for(s.num_computed)] for s in group for pages in s.pages]
            held = set(chain.from_iterable(tables)) - {0}
            assert len(held) > blocks.host.num_usable - len(self.owners(self.swapped)) or self.num_withdrawn["host"]
            return
        self.free_slots += slots
        for sequence in group:
            sequence.state, sequence.seq_slot = RequestState.SWAPPED, 0
            self.running.remove(sequence)
            self.swapped.append(sequence)
        self.note_releases(counts)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data(), count=st.integers(1, 3))
    def swap_in(self, data, count):
        first = data.draw(st.integers(0, len(self.swapped) - 1))
        group = self.swapped[first : first + count]
        self.flush()
        blocks = self.blocks
        num_free, num_wanted = blocks.device.num_free, blocks.num_to_swap_in(group)
        if num_wanted > num_free:
            return
        blocks.swap_in(group)
        assert num_free - blocks.device.num_free == num_wanted, "it took as many pages as it said"
        for sequence in group:
            sequence.state = RequestState.RUNNING
            self.swapped.remove(sequence)
            self._place(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def pass_windows(self, data):
        """X1: pages that no query sees any more are given back; the invariants hold that the others stay."""
        sequence, blocks = data.draw(st.sampled_from(self.running)), self.blocks
        before = list(blocks.device.ref_counts)
        blocks.pass_windows(sequence, sequence.num_computed)
        for window, pages in zip(self.windows, sequence.pages, strict=True):
            first_seen = max(0, sequence.num_computed - window + 1) // blocks.block_size if window else 0
            assert [page == 0 for page in pages] == [index < first_seen for index in range(len(pages))]
        self.note_releases(before)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release_in_flight(self, data):
        """B6: no sequence gets pages that a step in flight may write before that step has retired."""
        sequence, blocks = data.draw(st.sampled_from(self.running)), self.blocks
        self.flush()
        self.step += 1
        sequence.last_chunk_step = self.step
        first = sequence.num_computed // blocks.block_size
        mine = [page for page in chain.from_iterable(pages[first:] for pages in sequence.pages) if page]
        blocks.defer_free(sequence, self.step)
        self._release(sequence)
        for page in mine:
            if not blocks.device.ref_counts[page] and page not in blocks.device.key_of:
                self.still_written[page] = self.step

    @rule()
    def retire(self):
        self.still_written.clear()
        self.blocks.device.retire(self.step)
        assert not self.blocks.device.deferred

    @rule()
    def reset_prefix_cache(self):
        before = list(self.blocks.device.ref_counts)
        self.blocks.prefixes.reset()
        assert not self.blocks.device.page_of
        assert not self.blocks.host.page_of
        self.note_releases(before)

    @rule(token_ids=TOKENS)
    def pin(self, token_ids):
        blocks = self.blocks
        num_new = blocks.prefixes.num_new_pins(token_ids, KEY)
        if num_new > blocks.num_available:
            return
        available = blocks.num_available
        num_kept = blocks.prefixes.pin(token_ids, KEY)
        assert blocks.num_available == available - num_new
        assert num_kept % blocks.block_size == 0
        assert num_kept <= len(token_ids)
        self.pins.append(token_ids)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        token_ids = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        before = list(self.blocks.device.ref_counts)
        assert self.blocks.prefixes.unpin(token_ids, KEY) == (len(token_ids) >= self.blocks.block_size)
        self.note_releases(before)

    @rule(name=st.sampled_from(["device", "host"]), change=st.integers(-4, 4))
    def resize(self, name, change):
        pool = getattr(self.blocks, name)
        change = max(-self.num_withdrawn[name], min(change, pool.num_pages - 1 - self.num_withdrawn[name]))
        pool.withdraw(change)
        self.num_withdrawn[name] += change
        assert pool.num_usable == pool.num_pages - 1 - self.num_withdrawn[name]

    # Parts of the rules

    @property
    def windows(self):
        return self.blocks.windows

    def _place(self, sequence):
        self.running.append(sequence)
        place(self.blocks, sequence, self.free_slots.pop())

    def _start(self, token_ids):
        blocks = self.blocks
        if len(self.running) > 9:
            return None
        self.flush()
        sequence = sequence_of(token_ids, blocks.num_groups)
        before = snapshot(blocks)
        match = blocks.prefixes.match(sequence, len(token_ids) - 1)
        assert snapshot(blocks) == before
        assert match.num_pages * blocks.block_size <= len(token_ids) - 1  # P4
        taken, num_free = blocks.prefixes.num_free_needed(match), blocks.device.num_free
        if taken > num_free:
            return None
        adopt(blocks, sequence, match)
        assert blocks.device.num_free == num_free - taken or self.num_withdrawn["device"]  # B8
        assert sequence.num_computed == match.num_pages * blocks.block_size
        self._place(sequence)
        self.flush()
        return sequence  # An invariant compares what its pages hold.

    def _prepare(self, sequence, num_tokens):
        blocks, device = self.blocks, self.blocks.device
        self.flush()
        num_tokens = min(num_tokens, sequence.num_tokens)
        before, kept, counts = snapshot(blocks), tables_of([sequence]), list(device.ref_counts)
        cached = {page: self.released.get(page, (0, 0)) for page in device.cached}
        num_blank, num_free = len(device.free), device.num_free
        first = sequence.num_computed // blocks.block_size
        num_shared = sum(
            first < len(pages) and (device.ref_counts[pages[first]] > 1 or pages[first] in device.key_of)
            for pages in sequence.pages
        )
        lens = [sequence.num_tokens if window is None else num_tokens for window in self.windows]
        wanted = [max(-(-n // blocks.block_size), len(p)) for n, p in zip(lens, sequence.pages, strict=True)]
        missing = sum(wanted) - sum(map(len, sequence.pages)) + num_shared
        if not blocks.prepare(sequence, num_tokens):
            assert missing > num_free
            assert (snapshot(blocks), tables_of([sequence])) == (before, kept)  # B7
            return False
        assert [len(pages) for pages in sequence.pages] == wanted
        taken = [page for page in range(device.num_pages) if device.ref_counts[page] and not counts[page]]
        assert len(taken) == missing
        assert not set(taken) & self.still_written.keys()  # B6
        evicted = [cached.pop(page) for page in taken if page in cached]
        assert len(evicted) == max(0, missing - num_blank)  # Pages without content go first.
        assert not evicted or not cached or max(evicted) <= min(cached.values())  # P5: oldest first, tail first.
        assert not any(page in device.key_of for page in taken)  # P1
        self.flush()
        return True

    def _compute(self, sequence, num_tokens):
        blocks = self.blocks
        size, first = blocks.block_size, sequence.num_computed
        end = min(first + num_tokens, sequence.num_tokens, *(len(pages) * size for pages in sequence.pages))
        for group, pages in enumerate(sequence.pages):
            for position in range(first, end):
                page = pages[position // size]
                assert blocks.device.ref_counts[page] == 1  # B3: no other sequence reads it,
                assert page not in blocks.device.key_of  # B3: and none finds it.
                assert page not in self.still_written  # B6
                self.contents[blocks.device][page][position % size] = (group, tuple(sequence.token_ids[: position + 1]))
        sequence.num_computed = end
        blocks.prefixes.publish(sequence, end)

    def _release(self, sequence):
        self.drop(sequence)
        positions = {page: index for pages in sequence.pages for index, page in enumerate(pages)}
        before, is_swapped = list(self.blocks.device.ref_counts), sequence.state is RequestState.SWAPPED
        release(self.blocks, sequence)
        self.note_releases(before, {} if is_swapped else positions)
        assert not any(sequence.pages)
        assert sequence.num_published == 0

    @invariant()
    def every_page_is_free_or_owned(self):
        blocks = self.blocks
        pinned = Counter(blocks.store.pinned_pages.values())
        owners_of = {blocks.device: self.owners(self.running) + pinned, blocks.host: self.owners(self.swapped)}
        for pool, owners in owners_of.items():
            assert pool.ref_counts == [owners[page] for page in range(pool.num_pages)]  # B2
            deferred = [page for _, page in pool.deferred]
            pages = [*pool.free, *pool.cached, *deferred, *pool.withdrawn, *owners]
            assert sorted(pages) == list(range(1, pool.num_pages))  # B1, B5
            assert pool.num_used == len(owners)
        assert all(pool.peak_used >= pool.num_used for pool in owners_of)
        assert set(self.still_written) <= {page for _, page in blocks.device.deferred}  # B6
        check_pages(blocks, self.running, self.swapped)

    @invariant()
    def every_sequence_has_what_it_computed(self):
        """B4, W1, X1: this holds after copies, swaps and passed windows too."""
        self.flush()
        size = self.blocks.block_size
        for pool, sequences in ((self.blocks.device, self.running), (self.blocks.host, self.swapped)):
            for sequence in sequences:
                next_query = min(sequence.num_computed, len(sequence.token_ids) - 1)
                for group, (window, pages) in enumerate(zip(self.windows, sequence.pages, strict=True)):
                    first = max(0, next_query - window + 1) if window else 0
                    for position in range(max(first, sequence.num_passed[group] * size), sequence.num_computed):
                        known = (group, tuple(sequence.token_ids[: position + 1]))
                        assert self.contents[pool][pages[position // size]][position % size] == known

    @invariant()
    def published_pages_hold_what_their_hash_says(self):
        self.flush()
        for pool in (self.blocks.device, self.blocks.host):
            for key, page in pool.page_of.items():
                slots = self.contents[pool][page]
                assert all(slot is not None for slot in slots)  # P2: full and computed.
                group, tokens = slots[-1]
                assert len(tokens) % self.blocks.block_size == 0
                for back, slot in enumerate(reversed(slots)):
                    assert slot == (group, tokens[: len(tokens) - back])  # P1
                assert key == page_key(group, tokens, self.blocks.block_size)  # P1, P3
                assert pool.key_of[page] == key
            assert len(pool.key_of) == len(pool.page_of)
            assert self.blocks.prefixes.is_enabled or not pool.page_of


def run_pool(*, max_examples):
    run_state_machine_as_test(
        Pool,
        settings=settings(
            max_examples=max_examples, stateful_step_count=40, deadline=None, derandomize=True, database=None
        ),
    )


def test_pages_under_random_use():
    run_pool(max_examples=150)


@pytest.mark.slow
def test_pages_under_random_use_at_length():
    run_pool(max_examples=5000)


@pytest.mark.parametrize(
    ("fork_len", "lens", "num_pages"),
    [(0, [9], 3), (0, [9, 9], 6), (9, [9, 9], 4), (8, [9, 9], 5), (7, [9, 9], 5), (4, [9, 9, 9], 9), (9, [9], 3)],
)
def test_max_pages_counts_shared_pages_once_and_the_page_of_a_fork_s_last_token_apart(fork_len, lens, num_pages):
    assert manager(block_size=4).max_pages(fork_len, lens) == num_pages
    assert manager(block_size=1).max_pages(fork_len, lens) == sum(lens) - max(0, fork_len - 1) * (len(lens) - 1)


def test_a_window_takes_no_more_pages_than_it_sees_and_computes():
    blocks = manager(num_blocks=60, block_size=4, windows=(None, 5), max_chunk=8)
    assert blocks.max_pages(0, [100]) == 25 + 4
    assert blocks.max_pages(0, [8]) == 2 + 2
    assert manager(block_size=4, windows=(6,), max_chunk=8).max_pages(0, [100]) == 5
    assert manager(block_size=4, windows=(5,), max_chunk=9).max_pages(0, [100]) == 5
    assert manager(block_size=1, windows=(3,)).max_pages(0, [100]) == 3 + 1, "one token a step is the default"


def test_pages_that_one_group_has_in_excess_do_not_serve_another():
    """B7."""
    blocks = manager(num_blocks=1 + 6, block_size=4, windows=(None, 4))
    sequence = sequence_of([1, 2, 3, 4], num_groups=2)
    assert blocks.prepare(sequence, 12)
    assert [len(pages) for pages in sequence.pages] == [3, 3]
    assert blocks.device.num_free == 0
    sequence.num_tokens = 16
    before = snapshot(blocks)
    assert not blocks.prepare(sequence, 8)
    assert snapshot(blocks) == before


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("window", [2, 3, 4, 5, 8, 20])
def test_a_window_gives_back_exactly_the_pages_that_no_later_query_sees(window, block_size):
    """X1. A query sees itself and the window − 1 positions before it."""
    for num_done in range(1, 21):
        blocks = manager(num_blocks=60, block_size=block_size, windows=(window,))
        sequence = start(blocks, list(range(16)))
        assert blocks.can_share(sequence, num_done)
        blocks.pass_windows(sequence, num_done)
        num_pages = 16 // block_size
        seen = {position // block_size for position in range(max(0, num_done - window + 1), 100)}
        assert [page != 0 for page in sequence.pages[0]] == [page in seen for page in range(num_pages)]
        assert sequence.num_passed == [sum(page not in seen for page in range(num_pages))]
        # A child may begin wherever its next query misses nothing.
        for num_tokens in range(1, 17):
            needed = {position // block_size for position in range(max(0, num_tokens - window + 1), num_tokens)}
            assert blocks.can_share(sequence, num_tokens) or not needed <= seen, (num_done, num_tokens)
            assert needed <= seen or not blocks.can_share(sequence, num_tokens), (num_done, num_tokens)


def test_a_child_inherits_hashes_and_published_pages_of_its_parent():
    blocks = manager(num_blocks=20, block_size=2)
    parent, child = start(blocks, [1, 2, 3, 4, 5, 6]), sequence_of([1, 2, 3, 4, 5, 6])
    share(blocks, parent, child, 5)
    assert (child.num_computed, child.num_published) == (5, 2)
    assert child.page_hashes == parent.page_hashes[:2]
    assert child.pages == [parent.pages[0][:3]]
    other, late = start(blocks, [7, 7, 7, 7], compute=False), sequence_of([7, 7, 7, 7])
    other.num_computed = 4
    share(blocks, other, late, 3)
    assert late.num_published == 0


@pytest.mark.parametrize(("has_chunk_in_flight", "deferred"), [(True, [1, 2, 3]), (False, [2, 3])])
def test_pages_that_steps_in_flight_may_write_are_deferred_and_published_ones_are_not(has_chunk_in_flight, deferred):
    """B6. Steps that decode write from the page of the last known token on; a chunk, anywhere."""
    blocks = manager(num_blocks=20, block_size=2)
    sequence = start(blocks, [1, 2, 3, 4, 5], compute=False)
    assert blocks.prepare(sequence, 8)
    blocks.device.retire(6)
    sequence.num_computed = 2
    blocks.prefixes.publish(sequence, 2)
    sequence.last_chunk_step = 7 if has_chunk_in_flight else 6
    blocks.defer_free(sequence, 7)
    assert blocks.device.pending_writers == {sequence.pages[0][index]: 7 for index in deferred}


@pytest.mark.parametrize(("num_others", "is_moved"), [(0, True), (1, False)])
def test_free_copies_in_the_host_pool_count_as_pages_that_a_swap_out_takes(num_others, is_moved):
    """B8: of three host pages one is a free copy of a page of the sequence; the others are needed too."""
    blocks = manager(num_blocks=20, block_size=2, num_host_blocks=1 + 3)
    sequence = start(blocks, [1, 2, 3, 4, 5])
    blocks.host.drop_ref(blocks.store.swap_out(sequence.pages[0][0]))
    for _ in range(num_others):
        blocks.host.take()
    assert blocks.host.num_free == 3 - num_others
    before = snapshot(blocks)
    assert blocks.swap_out([sequence]) == is_moved
    assert blocks.store.counts["host_pool_full"] == num_others
    if not is_moved:
        assert snapshot(blocks) == before


@pytest.mark.parametrize(("num_taken", "length"), [(1, 3), (2, 3), (3, 2)])
def test_the_pages_of_all_groups_at_one_position_are_evicted_together(num_taken, length):
    """A prefix that one group has lost is useless to the others: half of the pages leave half of the prefix."""
    blocks = manager(num_blocks=1 + 8, block_size=1, windows=(None, None))
    release(blocks, start(blocks, [1, 2, 3, 4]))
    for _ in range(num_taken):
        blocks.store.take()
    assert found(blocks, [1, 2, 3, 4, 5]) == length


def test_a_prefix_is_found_while_a_window_has_the_pages_that_the_next_query_sees():
    blocks = manager(num_blocks=30, block_size=2, windows=(None, 3))
    sequence = start(blocks, list(range(9)))
    blocks.pass_windows(sequence, 9)
    release(blocks, sequence)
    match = blocks.prefixes.match(sequence_of(list(range(10)), 2), 9)
    assert match.num_pages == 4
    assert match.device_pages[1][:3] == [0, 0, 0]
    assert match.device_pages[1][3] > 0
    for page in list(blocks.device.key_of):
        if blocks.device.key_of[page][0] == 1 and page != match.device_pages[1][3]:
            blocks.device.forget(page)
    assert blocks.prefixes.match(sequence_of(list(range(10)), 2), 9).num_pages == 4, "it needs no passed page"
    for page in list(blocks.device.key_of):
        if blocks.device.key_of[page][0] == 1:
            blocks.device.forget(page)
    assert blocks.prefixes.match(sequence_of(list(range(10)), 2), 9).num_pages == 0


def test_clear_leaves_every_page_free_and_no_change_for_the_device():
    blocks = manager(num_host_blocks=5)
    sequence = start(blocks, [1, 2, 3])
    place(blocks, sequence, 1)
    blocks.store.swap_out(sequence.pages[0][0])
    assert blocks.table_changes
    blocks.clear()
    assert (blocks.device.num_free, blocks.host.num_free) == (9, 4)
    assert not blocks.table_changes
    assert not blocks.store.moves
    assert found(blocks, [1, 2, 3]) == 0


def test_a_pinned_prefix_is_never_evicted_and_is_pinned_anew_after_a_reset():
    blocks = manager(num_blocks=1 + 5, block_size=2)
    assert blocks.prefixes.pin([1, 2, 3, 4], KEY) == 0
    assert blocks.num_available == 3
    release(blocks, start(blocks, [1, 2, 3, 4, 5]))
    for _ in range(2):
        others = sequence_of([9] * 6)
        assert blocks.prepare(others, 6)
        assert not blocks.prepare(sequence_of([8]), 1)
        assert found(blocks, [1, 2, 3, 4]) == 2
        release(blocks, others)
        blocks.prefixes.reset()
        assert found(blocks, [1, 2, 3, 4]) == 0
        release(blocks, start(blocks, [1, 2, 3, 4, 5]))
    assert blocks.prefixes.unpin([1, 2, 3, 4], KEY)
    assert not blocks.prefixes.unpin([1, 2, 3, 4], KEY)
    assert (blocks.num_available, blocks.device.num_used) == (5, 0)


def test_a_pin_is_undone_only_by_the_same_prefix():
    """A shorter prefix of a pinned one does not count as pinned."""
    blocks = manager(num_blocks=20, block_size=2)
    blocks.prefixes.pin([1, 2, 3, 4], KEY)
    assert not blocks.prefixes.unpin([1, 2], KEY)
    assert blocks.num_available == 19 - 2
    assert blocks.prefixes.unpin([1, 2, 3, 4], KEY)
    assert blocks.num_available == 19


def test_pins_are_counted():
    blocks = manager(block_size=2)
    release(blocks, start(blocks, [1, 2, 3, 4, 5]))
    assert [blocks.prefixes.pin(tokens, KEY) for tokens in ([1, 2, 3, 4], [1, 2, 9], [1])] == [4, 2, 0]
    assert blocks.prefixes.num_new_pins([1, 2, 3, 4, 5, 6], KEY) == 1
    assert blocks.prefixes.unpin([1, 2, 3, 4], KEY)
    assert blocks.device.num_used == 1
    assert not blocks.prefixes.unpin([1], KEY)


def test_all_pages_of_an_unsound_sequence_are_unpublished_and_their_owners_keep_them():
    """P8: this includes pages that it found in the cache, for nothing tells which page is to blame."""
    blocks = manager(block_size=2)
    writer = start(blocks, [1, 2, 3])
    unsound = start(blocks, [1, 2, 3, 4, 5])
    other = start(blocks, [8, 8, 8])
    assert unsound.pages[0][0] == writer.pages[0][0]
    blocks.prefixes.discard(unsound)
    release(blocks, unsound)
    check_pages(blocks, [writer, other], [])
    assert found(blocks, [1, 2, 3]) == 0
    assert found(blocks, [8, 8, 9]) == 1
    # The writer goes on, and does not offer the page again.
    writer.token_ids.extend([4, 5])
    writer.num_tokens = 5
    assert blocks.prepare(writer, 5)
    writer.num_computed = 5
    blocks.prefixes.publish(writer, 5)
    assert found(blocks, [1, 2, 3, 4, 5]) == 0
    # A sequence that computes the prefix anew publishes it again.
    start(blocks, [1, 2, 7])
    assert found(blocks, [1, 2, 3]) == 1


def test_a_swap_copies_shared_pages_once_and_pages_that_are_there_already_not_at_all():
    blocks = manager(num_blocks=20, num_host_blocks=20, block_size=2)
    parent = start(blocks, [1, 2, 3, 4, 5])
    child = sequence_of([1, 2, 3, 4, 5])
    share(blocks, parent, child, 4)
    group, num_moves = [parent, child], []
    for _ in range(2):
        assert blocks.swap_out(group)
        for sequence in group:
            sequence.state = RequestState.SWAPPED
        num_moves.append(len(blocks.store.moves))
        assert blocks.device.num_used == 0
        assert blocks.host.num_used == 3
        blocks.swap_in(group)
        for sequence in group:
            sequence.state = RequestState.RUNNING
        num_moves.append(len(blocks.store.moves))
        assert blocks.host.num_used == 0
    # The full pages are published in both pools; the partly filled one is copied each time.
    assert num_moves == [3, 4, 5, 6]
    assert parent.pages[0][:2] == child.pages[0]


BREAKS = {
    "a count too high": lambda pool, sequence: pool.ref_counts.__setitem__(sequence.pages[0][0], 2),
    "an owned page free": lambda pool, sequence: pool.free.append(sequence.pages[0][0]),
    "a free page lost": lambda pool, sequence: pool.free.pop(),
    "a free page twice": lambda pool, sequence: pool.free.append(pool.free[0]),
    "a page missing": lambda pool, sequence: sequence.pages[0].pop(0),
    "a page twice in a table": lambda pool, sequence: sequence.pages[0].append(sequence.pages[0][0]),
    "the null page free": lambda pool, sequence: pool.free.append(0),
    "the null page published": lambda pool, sequence: pool.publish(0, (0, b"")),
    "a partial page published": lambda pool, sequence: pool.key_of.update({sequence.pages[0][-1]: (0, b"")}),
    "a hash without its page": lambda pool, sequence: pool.page_of.clear(),
    "a page deferred for ever": lambda pool, sequence: pool.deferred.append((0, pool.free.pop())),
    "published before computed": lambda pool, sequence: setattr(sequence, "num_published", 2),
    "computed without a page": lambda pool, sequence: setattr(sequence, "num_computed", 5),
    "may write where it has no page": lambda pool, sequence: setattr(sequence, "decode_limit", 5),
    "may write a published page": lambda pool, sequence: (
        setattr(sequence, "decode_limit", 3),
        setattr(sequence, "num_published", 0),
        setattr(sequence, "num_computed", 1),
    ),
}


@pytest.mark.skipif(not __debug__, reason="python -O leaves out the assertions")
@pytest.mark.parametrize("break_it", BREAKS.values(), ids=BREAKS.keys())
def test_the_invariants_see_each_fault(break_it):
    blocks = manager()
    sequence = start(blocks, [1, 2, 3])
    check_pages(blocks, [sequence], [])
    break_it(blocks.device, sequence)
    with pytest.raises(AssertionError):
        check_pages(blocks, [sequence], [])
