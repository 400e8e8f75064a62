"""Pages of single sequences: how many they take, which are evicted, shared, deferred, swapped, pinned and forgotten.

What random use does to pages is the simulation's: it checks the invariants B1 to X1 at every step.
"""

import pytest

from jpaged.kv_cache.block_manager import BlockManager
from jpaged.kv_cache.page_arithmetic import PageArithmetic
from jpaged.request import CacheKey, RequestState

from ..host_requests import new_request
from ..invariants import check_pages

KEY = CacheKey()


def sequence_of(token_ids, num_groups=1):
    request = new_request(token_ids, max_tokens=100, num_groups=num_groups)
    sequence = request.sequences[0]
    sequence.state = RequestState.RUNNING
    return sequence


def manager(num_blocks=10, block_size=2, *, windows=(None,), **options):
    return BlockManager(num_blocks=num_blocks, arithmetic=PageArithmetic(windows, block_size), **options)


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
    """Return the number of cached pages that hold the start of these tokens."""
    return blocks.prefixes.match(sequence_of(token_ids, blocks.arithmetic.num_groups), len(token_ids)).num_pages


def start(blocks, token_ids, *, compute=True):
    """Return a sequence with pages for all of its tokens, which with `compute` are computed and published."""
    sequence = sequence_of(token_ids, blocks.arithmetic.num_groups)
    adopt(blocks, sequence, blocks.prefixes.match(sequence, len(token_ids) - 1))
    assert blocks.prepare(sequence, len(token_ids))
    if compute:
        sequence.num_computed = len(token_ids)
        blocks.prefixes.publish(sequence, len(token_ids))
    return sequence


def snapshot(blocks):
    """Return all state that a refusal may not change."""
    pools = [
        (list(pool.ref_counts), list(pool.free), list(pool.cached), list(pool.deferred), dict(pool.key_of))
        for pool in (blocks.device, blocks.host)
    ]
    return pools, list(blocks.store.moves), dict(blocks.table_changes), dict(blocks.store.pinned_pages)


def test_pages_that_one_group_has_in_excess_do_not_serve_another():
    """This is B7: a refusal changes nothing."""
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
    """This is X1: a query sees itself and the window − 1 positions before it."""
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
    assert (child.num_computed, child.prefix.num_published) == (5, 2)
    assert child.prefix.hashes == parent.prefix.hashes[:2]
    assert child.pages == [parent.pages[0][:3]]
    other, late = start(blocks, [7, 7, 7, 7], compute=False), sequence_of([7, 7, 7, 7])
    other.num_computed = 4
    share(blocks, other, late, 3)
    assert late.prefix.num_published == 0


@pytest.mark.parametrize(("has_chunk_in_flight", "deferred"), [(True, [1, 2, 3]), (False, [2, 3])])
def test_pages_that_steps_in_flight_may_write_are_deferred_and_published_ones_are_not(has_chunk_in_flight, deferred):
    """This is B6: steps that decode write from the page of the last known token on; a chunk writes anywhere."""
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
