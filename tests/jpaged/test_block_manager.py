"""Pages: who owns them, what is found in the prefix cache, and which are taken first.

The state machine keeps its own record of what every slot of every page holds, by whole token history, and
holds the block manager against it after each rule. Invariants by their names in comments: B1 … P5.
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

from jpaged.block_manager import BlockManager
from jpaged.request import make_request
from jpaged.sampling_params import SamplingParams

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
"""Two token ids: prefixes meet all the time."""


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
    return request.sequences[0]


def manager(num_blocks=10, block_size=2, *, enable_prefix_caching=True, num_groups=1):
    return BlockManager(
        num_blocks=num_blocks,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        num_groups=num_groups,
    )


def start(blocks, token_ids, *, compute=True):
    """A sequence with pages for all of its tokens, computed and published if asked."""
    sequence = sequence_of(token_ids, blocks.num_groups)
    blocks.adopt(sequence, blocks.match_prefix(sequence))
    assert blocks.grow(sequence, len(token_ids))
    if compute:
        sequence.num_computed = len(token_ids)
        blocks.publish(sequence)
    return sequence


def page_key(group, token_ids, block_size):
    """P3, spelled out: SHA-256 chained over pages of 32-bit token ids."""
    digest = hashlib.sha256(b"jpaged prefix v1").digest()
    for first in range(0, len(token_ids), block_size):
        digest = hashlib.sha256(digest + array("i", token_ids[first : first + block_size]).tobytes()).digest()
    return group, digest


def snapshot(blocks):
    return (
        list(blocks.ref_counts),
        list(blocks.free),
        dict(blocks.page_of_hash),
        dict(blocks.hash_of_page),
        blocks.num_queried_tokens,
        blocks.num_hit_tokens,
    )


class Pool(RuleBasedStateMachine):
    """Sequences start, grow, compute, get tokens and end, in any order."""

    @initialize(
        num_blocks=st.integers(2, 10),
        block_size=st.sampled_from([1, 2, 4]),
        num_groups=st.integers(1, 2),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def create(self, num_blocks, block_size, num_groups, enable_prefix_caching):
        self.blocks = manager(
            num_blocks, block_size, num_groups=num_groups, enable_prefix_caching=enable_prefix_caching
        )
        self.live = []
        # Page → the tokens up to and including each of its slots, with the group: what is really there.
        self.contents = {page: [None] * block_size for page in range(num_blocks)}
        # Free page → when it was released and, within that, which position goes first.
        self.released = {}
        self.num_releases = 0

    def owners(self):
        return Counter(chain.from_iterable(chain.from_iterable(sequence.pages) for sequence in self.live))

    @rule(token_ids=TOKENS, is_served=st.booleans())
    def start(self, token_ids, is_served):
        """A sequence starts with what is cached; `is_served`: and is computed to its end, if it fits, and released."""
        sequence = self._start(token_ids)
        if is_served:
            self._grow(sequence, len(token_ids))
            self._compute(sequence, len(token_ids))
            self._release(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_tokens=st.integers(1, 16))
    def grow(self, data, num_tokens):
        self._grow(data.draw(st.sampled_from(self.live)), num_tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_tokens=st.integers(1, 12))
    def compute(self, data, num_tokens):
        self._compute(data.draw(st.sampled_from(self.live)), num_tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token_ids=TOKENS)
    def append(self, data, token_ids):
        sequence = data.draw(st.sampled_from(self.live))
        sequence.token_ids.extend(token_ids[: 16 - len(sequence.token_ids)])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_unsound=st.sampled_from([False, False, False, True]))
    def release(self, data, is_unsound):
        sequence = data.draw(st.sampled_from(self.live))
        if is_unsound:
            pages = list(chain.from_iterable(sequence.pages))
            self.blocks.discard_unsound(sequence)
            assert not any(page in self.blocks.hash_of_page for page in pages)
        self._release(sequence)

    @rule()
    def reset_prefix_cache(self):
        self.blocks.reset_prefix_cache()
        assert not self.blocks.page_of_hash

    def _start(self, token_ids):
        blocks = self.blocks
        sequence = sequence_of(token_ids, blocks.num_groups)
        before = snapshot(blocks)
        matched = blocks.match_prefix(sequence)
        assert len(matched) == blocks.num_groups
        num_found = len(matched[0])
        assert num_found * blocks.block_size <= len(token_ids) - 1  # P4
        for group, pages in enumerate(matched):
            assert len(pages) == num_found
            for index, page in enumerate(pages):
                for offset in range(blocks.block_size):
                    known = token_ids[: index * blocks.block_size + offset + 1]
                    assert self.contents[page][offset] == (group, tuple(known))  # P1
        owned = self.owners()
        all_found = set(chain.from_iterable(matched))
        expected = blocks.num_usable - len(owned) - len(all_found - set(owned))
        assert blocks.num_free_without([*matched, *matched]) == expected  # B8
        assert snapshot(blocks) == before
        blocks.adopt(sequence, matched)
        assert sequence.pages == matched
        assert len(blocks.free) == expected
        assert sequence.num_computed == num_found * blocks.block_size
        self.live.append(sequence)
        return sequence

    def _grow(self, sequence, num_tokens):
        blocks = self.blocks
        before, pages_before = snapshot(blocks), [list(pages) for pages in sequence.pages]
        cached = {page: self.released[page] for page in blocks.free if page in blocks.hash_of_page}
        num_blank = len(blocks.free) - len(cached)
        wanted = [max(-(-num_tokens // blocks.block_size), len(pages)) for pages in sequence.pages]
        missing = sum(wanted) - sum(map(len, pages_before))
        owned = set(self.owners())
        if not blocks.grow(sequence, num_tokens):
            assert missing > blocks.num_usable - len(owned)
            assert snapshot(blocks) == before  # B7
            assert sequence.pages == pages_before  # B7
            return
        assert [len(pages) for pages in sequence.pages] == wanted
        taken = [page for old, new in zip(pages_before, sequence.pages, strict=True) for page in new[len(old) :]]
        assert [new[: len(old)] for old, new in zip(pages_before, sequence.pages, strict=True)] == pages_before
        assert not set(taken) & owned  # P5: nobody's page is evicted.
        evicted = [cached.pop(page) for page in taken if page in cached]
        assert len(evicted) == max(0, missing - num_blank)  # Pages without content go first.
        assert not evicted or not cached or max(evicted) <= min(cached.values())  # P5: oldest first, tail first.
        assert not any(page in blocks.hash_of_page for page in taken)  # P1

    def _compute(self, sequence, num_tokens):
        blocks = self.blocks
        size = blocks.block_size
        first = sequence.num_computed
        end = min(first + num_tokens, sequence.num_tokens, len(sequence.pages[0]) * size)
        owners = self.owners()
        for group, pages in enumerate(sequence.pages):
            for position in range(first, end):
                page = pages[position // size]
                assert owners[page] == 1  # B3: nobody reads it,
                assert page not in blocks.hash_of_page  # B3: and nobody finds it.
                self.contents[page][position % size] = (group, tuple(sequence.token_ids[: position + 1]))
        sequence.num_computed = end
        blocks.publish(sequence)

    def _release(self, sequence):
        blocks = self.blocks
        pages = [list(group) for group in sequence.pages]
        self.live.remove(sequence)
        self.num_releases += 1
        for group in pages:
            for index, page in enumerate(group):
                self.released[page] = (self.num_releases, -index)
        blocks.release(sequence)
        assert not any(sequence.pages)
        assert (sequence.num_computed, sequence.num_published, sequence.slot) == (0, 0, 0)

    @invariant()
    def every_page_is_free_or_owned(self):
        blocks, owners = self.blocks, self.owners()
        assert list(blocks.ref_counts) == [owners[page] for page in range(blocks.num_blocks)]  # B2
        assert sorted([*blocks.free, *owners]) == list(range(1, blocks.num_blocks))  # B1, B5
        assert blocks.num_used == len(owners) <= blocks.peak_used
        blocks.check(self.live)

    @invariant()
    def published_pages_hold_what_their_hash_says(self):
        blocks = self.blocks
        for key, page in blocks.page_of_hash.items():
            slots = self.contents[page]
            assert all(slot is not None for slot in slots)  # P2: full and computed.
            group, tokens = slots[-1]
            assert len(tokens) % blocks.block_size == 0
            for back, slot in enumerate(reversed(slots)):
                assert slot == (group, tokens[: len(tokens) - back])  # P1
            assert key == page_key(group, tokens, blocks.block_size)  # P1, P3
            assert blocks.hash_of_page[page] == key
        assert len(blocks.hash_of_page) == len(blocks.page_of_hash)
        assert blocks.enable_prefix_caching or not blocks.page_of_hash


def run_pool(*, max_examples):
    run_state_machine_as_test(
        Pool,
        settings=settings(
            max_examples=max_examples, stateful_step_count=40, deadline=None, derandomize=True, database=None
        ),
    )


def test_pages_under_random_use():
    run_pool(max_examples=100)


@pytest.mark.slow
def test_pages_under_random_use_at_length():
    run_pool(max_examples=3000)


def test_one_page_more_than_there_are_changes_nothing():
    """B7."""
    blocks = manager(num_blocks=1 + 4)
    start(blocks, [1, 2, 3])
    other = sequence_of([9] * 6)
    before = snapshot(blocks)
    assert not blocks.grow(other, 5)
    assert snapshot(blocks) == before
    assert other.pages == [[]]
    assert blocks.grow(other, 4)


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_at_their_boundaries(num_tokens, num_pages):
    blocks = manager(block_size=4, num_groups=2, num_blocks=20)
    sequence = start(blocks, list(range(num_tokens)))
    assert [len(pages) for pages in sequence.pages] == [num_pages] * 2
    assert blocks.pages_for(num_tokens) == 2 * num_pages
    assert len(blocks.page_of_hash) == 2 * (num_tokens // 4)


def test_a_hit_never_covers_the_whole_sequence():
    """P4: only a computed token yields logits."""
    blocks = manager(block_size=2)
    blocks.release(start(blocks, [1, 2, 3, 4]))
    assert [len(blocks.match_prefix(sequence_of([1, 2, 3, 4][:n]))[0]) for n in (1, 2, 3, 4)] == [0, 0, 1, 1]
    assert len(blocks.match_prefix(sequence_of([1, 2, 3, 4, 5]))[0]) == 2


def test_the_same_tokens_after_another_beginning_are_another_page():
    """P3: a page's keys depend on all that comes before it."""
    blocks = manager(block_size=2)
    blocks.release(start(blocks, [1, 2, 3, 4]))
    assert blocks.match_prefix(sequence_of([3, 4, 5])) == [[]]
    assert blocks.match_prefix(sequence_of([5, 5, 3, 4, 5])) == [[]]


def test_the_least_recently_used_page_goes_first_and_of_a_sequence_its_tail():
    """P5."""
    blocks = manager(num_blocks=1 + 6, block_size=1)
    old, new = [1, 2, 3], [4, 5, 6]
    for token_ids in (old, new, old):  # The second use of `old` makes `new` the older one.
        blocks.release(start(blocks, token_ids))
    held = sequence_of([7] * 4)
    found = []
    for num_tokens in (1, 2, 3, 4):
        assert blocks.grow(held, num_tokens)
        found.append([len(blocks.match_prefix(sequence_of([*tokens, 0]))[0]) for tokens in (old, new)])
    assert found == [[3, 2], [3, 1], [3, 0], [2, 0]]


def test_pages_that_nobody_can_find_go_before_those_in_the_cache():
    blocks = manager(num_blocks=1 + 5, block_size=2)
    blocks.release(start(blocks, [1, 2, 3, 4]))
    blocks.release(start(blocks, [5, 6, 7, 8, 9], compute=False))
    assert blocks.grow(sequence_of([9] * 6), 6)
    assert len(blocks.match_prefix(sequence_of([1, 2, 3, 4, 5]))[0]) == 2


def test_the_groups_of_one_position_are_evicted_together():
    """A prefix that one group has lost is of no use to the others: half of the pages leave half of the prefix."""
    blocks = manager(num_blocks=1 + 8, block_size=1, num_groups=2)
    blocks.release(start(blocks, [1, 2, 3, 4]))
    assert blocks.grow(sequence_of([9, 9], num_groups=2), 2)
    assert [len(pages) for pages in blocks.match_prefix(sequence_of([1, 2, 3, 4, 5], num_groups=2))] == [2, 2]


def test_a_hit_is_as_long_as_that_of_the_group_that_has_lost_most():
    blocks = manager(num_blocks=1 + 9, block_size=1, num_groups=2)
    blocks.release(start(blocks, [1, 2, 3, 4]))
    assert blocks.grow(sequence_of([9], num_groups=2), 1)  # One page is blank, so one group loses one.
    assert [len(pages) for pages in blocks.match_prefix(sequence_of([1, 2, 3, 4, 5], num_groups=2))] == [3, 3]


def test_of_two_pages_with_the_same_content_one_may_go():
    """P5: both were computed at the same time, so neither found the other."""
    blocks = manager(block_size=2)
    first, second = (start(blocks, [1, 2, 3], compute=False) for _ in range(2))
    for sequence in (first, second):
        sequence.num_computed = 3
        blocks.publish(sequence)
    found = blocks.match_prefix(sequence_of([1, 2, 9]))
    assert found == [[first.pages[0][0]]]
    blocks.release(second)
    blocks.check([first])
    assert blocks.match_prefix(sequence_of([1, 2, 9])) == found


def test_nothing_is_found_before_it_is_computed():
    """P2: not when its page is handed out, and not while its page is partly filled."""
    blocks = manager(block_size=4)
    sequence = start(blocks, [1, 2, 3, 4, 5, 6], compute=False)
    follower = sequence_of([1, 2, 3, 4, 5, 6, 7, 8, 9])
    found = []
    for sequence.num_computed in (3, 4, 6):
        blocks.publish(sequence)
        found.append(len(blocks.match_prefix(follower)[0]))
    assert found == [0, 1, 1]


def test_a_hit_among_the_free_pages_costs_capacity():
    """B8: five pages are free, two of them are the hit, so three are left."""
    blocks = manager(num_blocks=1 + 5, block_size=2)
    blocks.release(start(blocks, [1, 2, 3, 4]))
    matched = blocks.match_prefix(sequence_of([1, 2, 3, 4, 5]))
    assert len(blocks.free) == 5
    assert blocks.num_free_without(matched) == 3
    assert blocks.num_free_without([*matched, *matched]) == 3  # Two sequences of a group share their hit.


def test_all_pages_of_an_unsound_sequence_are_distrusted_and_their_owners_keep_them():
    """P8: also those that it found in the cache, for nothing tells which page is to blame."""
    blocks = manager(block_size=2)
    writer = start(blocks, [1, 2, 3])
    unsound = start(blocks, [1, 2, 3, 4, 5])
    other = start(blocks, [8, 8, 8])
    assert unsound.pages[0][0] == writer.pages[0][0]
    blocks.discard_unsound(unsound)
    blocks.release(unsound)
    blocks.check([writer, other])
    assert blocks.match_prefix(sequence_of([1, 2, 3])) == [[]]
    assert blocks.match_prefix(sequence_of([8, 8, 9])) == [other.pages[0][:1]]
    # The writer goes on, and does not offer the page again.
    writer.token_ids += [4, 5]
    assert blocks.grow(writer, 5)
    writer.num_computed = 5
    blocks.publish(writer)
    assert blocks.match_prefix(sequence_of([1, 2, 3, 4, 5])) == [[]]
    # Who computes the prefix anew makes it known again.
    fresh = start(blocks, [1, 2, 7])
    assert blocks.match_prefix(sequence_of([1, 2, 3])) == [fresh.pages[0][:1]]


def test_after_a_reset_nothing_is_found_and_everybody_keeps_his_pages():
    blocks = manager(block_size=2)
    sequence = start(blocks, [1, 2, 3, 4, 5])
    pages = [list(group) for group in sequence.pages]
    blocks.reset_prefix_cache()
    assert blocks.match_prefix(sequence_of([1, 2, 3])) == [[]]
    assert sequence.pages == pages
    blocks.check([sequence])


def test_without_a_prefix_cache_nothing_is_published_or_found():
    blocks = manager(enable_prefix_caching=False)
    blocks.release(start(blocks, [1, 2, 3, 4]))
    assert blocks.match_prefix(sequence_of([1, 2, 3])) == [[]]
    assert not blocks.page_of_hash


BREAKS = {
    "a count too high": lambda blocks, sequence: blocks.ref_counts.__setitem__(sequence.pages[0][0], 2),
    "an owned page free": lambda blocks, sequence: blocks.free.update({sequence.pages[0][0]: None}),
    "a free page lost": lambda blocks, sequence: blocks.free.popitem(),
    "the null page owned": lambda blocks, sequence: sequence.pages[0].append(0),
    "the null page free": lambda blocks, sequence: blocks.free.update({0: None}),
    "a page twice": lambda blocks, sequence: sequence.pages[0].append(sequence.pages[0][0]),
    "a page missing": lambda blocks, sequence: sequence.pages[0].pop(0),
    "a partial page published": lambda blocks, sequence: blocks.hash_of_page.update({sequence.pages[0][-1]: (0, b"")}),
    "a hash without its page": lambda blocks, sequence: blocks.page_of_hash.clear(),
}


@pytest.mark.skipif(not __debug__, reason="python -O leaves out what this looks for")
@pytest.mark.parametrize("break_it", BREAKS.values(), ids=BREAKS.keys())
def test_check_sees(break_it):
    blocks = manager()
    sequence = start(blocks, [1, 2, 3])
    blocks.check([sequence])
    break_it(blocks, sequence)
    with pytest.raises(AssertionError):
        blocks.check([sequence])
