"""The two pools of pages, and the moves between them."""

import pytest

from jpaged.kv_cache.page_pool import PagePool
from jpaged.kv_cache.page_store import MAX_KEPT, MoveKind, PageMove, PageStore


def store_of(num_blocks=6, num_host_blocks=6, *, max_cached_blocks=None, keep_evicted=True):
    return PageStore(
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_cached_blocks=max_cached_blocks,
        keep_evicted=keep_evicted,
    )


def key(number):
    return 0, bytes([number])


def cached(pool, *numbers):
    """Make free pages with these prefixes, used in this order; return the pages."""
    pages = []
    for number in numbers:
        page, _ = pool.take()
        assert pool.publish(page, key(number))
        pages.append(page)
    for page in pages:
        pool.drop_ref(page)
    return pages


def test_a_pool_counts_what_is_used_and_free():
    pool = PagePool(6)
    assert (pool.num_usable, pool.num_free, pool.num_used) == (5, 5, 0)
    pages = [pool.take()[0] for _ in range(3)]
    pool.add_ref(pages[0])
    assert (pool.num_free, pool.num_used, pool.peak_used) == (2, 3, 3)
    pool.drop_ref(pages[0])
    assert (pool.num_free, pool.num_used) == (2, 3)
    pool.drop_ref(pages[0])
    pool.drop_ref(pages[1])
    assert (pool.num_usable, pool.num_free, pool.num_used, pool.peak_used) == (5, 4, 1, 3)


def test_empty_pages_are_taken_first_then_the_prefix_used_least_recently():
    pool = PagePool(6)
    pages = cached(pool, 1, 2)
    taken = [pool.take() for _ in range(5)]
    assert [prefix for _, prefix in taken] == [None, None, None, key(1), key(2)]
    assert [page for page, _ in taken[3:]] == pages
    assert pool.page_of == pool.key_of == {}


def test_of_two_pages_with_one_prefix_the_first_stays_the_one_that_is_found():
    pool = PagePool(4)
    first, second = pool.take()[0], pool.take()[0]
    assert pool.publish(first, key(1)) is True
    assert pool.publish(second, key(1)) is False
    pool.drop_ref(second)
    assert pool.page_of == {key(1): first}
    assert list(pool.free) == [3, second]


def test_max_cached_caps_the_free_pages_with_a_prefix():
    pool = PagePool(6, max_cached=2)
    pages = cached(pool, 1, 2, 3)
    assert list(pool.cached) == pages[1:]
    assert pages[0] in pool.free
    pool.forget(pages[1])
    assert (list(pool.cached), pages[1] in pool.free) == ([pages[2]], True)
    pool.forget_all()
    assert (pool.num_free, pool.cached, pool.page_of) == (5, {}, {})


@pytest.mark.parametrize("retired", [3, 4, 5])
def test_a_page_that_a_step_in_flight_may_write_is_free_once_that_step_has_retired(retired):
    pool = PagePool(3)
    pool.retire(2)
    page = pool.take()[0]
    pool.defer_free(page, 4)
    pool.drop_ref(page)
    assert (pool.deferred, pool.num_free) == ([(4, page)], 1)
    assert pool.num_used == 0
    pool.retire(retired)
    assert (pool.deferred == []) == (page in pool.free) == (retired >= 4)


def test_deferred_pages_become_free_by_their_steps_whatever_the_order_they_were_given_back_in():
    pool = PagePool(4)
    early, late = pool.take()[0], pool.take()[0]
    pool.defer_free(early, 1)
    pool.defer_free(late, 2)
    pool.drop_ref(late)
    pool.drop_ref(early)
    pool.retire(1)
    assert (pool.deferred, early in pool.free) == ([(2, late)], True)


def test_no_writer_is_pending_for_pages_of_retired_steps_and_for_published_ones():
    pool = PagePool(4)
    kept, full = pool.take()[0], pool.take()[0]
    pool.defer_free(kept, 1)
    pool.defer_free(full, 2)
    pool.retire(1)
    assert pool.pending_writers == {full: 2}
    pool.publish(full, key(1))
    assert pool.pending_writers == {}
    for page in (kept, full):
        pool.drop_ref(page)
    assert pool.num_free == 3


def test_a_prefix_that_the_device_evicts_lives_on_in_the_host_pool():
    store = store_of(num_blocks=3)
    pages = cached(store.device, 1, 2)
    assert [store.take(), store.take()] == pages
    assert store.take_moves() == [
        PageMove(MoveKind.SWAP_OUT, page, copy) for page, copy in zip(pages, (1, 2), strict=True)
    ]
    assert store.host.page_of == {key(1): 1, key(2): 2}
    assert list(store.host.cached) == [1, 2]
    assert store.counts == {"eviction": 2, "eviction_kept": 2}
    assert (store.device.peak_used, store.host.peak_used) == (2, 1)


@pytest.mark.parametrize(
    ("options", "num_host_taken", "is_kept"),
    [({"keep_evicted": False}, 0, False), ({"num_host_blocks": 0}, 0, False), ({}, 5, False), ({}, 4, True)],
    ids=str,
)
def test_an_evicted_prefix_is_copied_to_the_host_only_if_allowed_and_if_there_is_room(options, num_host_taken, is_kept):
    store = store_of(num_blocks=2, **options)
    for _ in range(num_host_taken):
        store.host.take()
    cached(store.device, 1)
    store.take()
    assert len(store.moves) == is_kept
    assert store.counts == ({"eviction": 1, "eviction_kept": 1} if is_kept else {"eviction": 1})


def test_a_prefix_that_the_host_has_already_is_not_copied_again():
    store = store_of(num_blocks=2)
    cached(store.device, 1)
    cached(store.host, 1)
    store.take()
    assert store.moves == []
    assert store.counts == {"eviction": 1}


def test_a_step_keeps_a_bounded_number_of_evicted_pages():
    store = store_of(num_blocks=3 * MAX_KEPT + 1, num_host_blocks=100)
    cached(store.device, *range(3 * MAX_KEPT))
    for _ in range(MAX_KEPT + 3):
        store.take()
    assert store.counts == {"eviction": MAX_KEPT + 3, "eviction_kept": MAX_KEPT}
    assert len(store.take_moves()) == MAX_KEPT == 16
    assert store.take_moves() == []
    for _ in range(MAX_KEPT + 3):
        store.take()
    assert store.counts["eviction_kept"] == 2 * MAX_KEPT, "the next step keeps as many again"


def test_copies_within_the_device_and_to_and_from_the_host():
    store = store_of()
    page = store.take()
    store.publish(page, key(7))
    own, out = store.copy(page), store.swap_out(page)
    back = store.swap_in(out)
    assert store.take_moves() == [
        PageMove(MoveKind.COPY, page, own),
        PageMove(MoveKind.SWAP_OUT, page, out),
        PageMove(MoveKind.SWAP_IN, out, back),
    ]
    assert (store.host.page_of, store.device.page_of) == ({key(7): out}, {key(7): page})
    assert store.counts == {"copy_on_write": 1}


def test_a_prefix_swapped_in_is_found_on_the_device():
    store = store_of()
    page = store.take()
    store.publish(page, key(7))
    out = store.swap_out(page)
    store.device.forget(page)
    store.device.drop_ref(page)
    back = store.swap_in(out)
    assert store.device.page_of == {key(7): back}
    nameless = store.swap_out(store.take())
    store.swap_in(nameless)
    assert store.device.page_of == {key(7): back}
    assert store.host.page_of == {key(7): out}


def test_a_page_is_pinned_once_and_unpinned_once():
    store = store_of()
    store.pin(key(1))
    store.unpin(key(1))
    assert store.pinned_pages == {}
    (page,) = cached(store.device, 1)
    store.pin(key(1))
    store.pin(key(1))
    assert (store.pinned_pages, store.device.ref_counts[page]) == ({key(1): page}, 1)
    store.unpin(key(1))
    store.unpin(key(1))
    assert (store.pinned_pages, store.device.ref_counts[page], page in store.device.cached) == ({}, 0, True)


def test_a_pinned_prefix_is_kept_as_soon_as_it_is_published():
    store = store_of()
    store.pins[key(1)] += 1
    page, other = store.take(), store.take()
    store.publish(page, key(1))
    store.publish(other, key(2))
    assert store.pinned_pages == {key(1): page}
    assert [store.device.ref_counts[each] for each in (page, other)] == [2, 1]


def test_clear_leaves_every_page_free_and_nothing_published_or_pinned():
    store = store_of()
    page = store.take()
    store.publish(page, key(1))
    store.pin(key(1))
    store.device.defer_free(store.take(), 5)
    store.swap_out(page)
    store.clear()
    assert store.take_moves() == []
    assert store.pinned_pages == {}
    for pool in (store.device, store.host):
        assert (pool.num_free, pool.num_used, pool.page_of, pool.pending_writers) == (5, 0, {}, {})
