"""Invariants of scheduler, queues, slots and pages between any two steps; AssertionError names a broken one.

The simulation checks them after every step. Checking takes time in proportion to the pages: not for service.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from jpaged.kv_cache.block_manager import BlockManager
from jpaged.kv_cache.page_arithmetic import PageArithmetic
from jpaged.kv_cache.page_pool import NULL_PAGE, PagePool
from jpaged.request import Request, RequestState, SampleSequence
from jpaged.scheduling.scheduler import Scheduler

from .shrinking_pool import ShrinkingPool, withdrawn_pages


def check_scheduler(scheduler: Scheduler) -> None:
    """Check queues, slots and pages."""
    for state, queue in (
        (RequestState.WAITING, list(scheduler.waiting)),
        (RequestState.SWAPPED, list(scheduler.swapped)),
        (RequestState.RUNNING, scheduler.running),
    ):
        for request in queue:
            assert request.state is state, "a request in the wrong queue"
            assert request.live, "a request without a live sequence is queued"
            assert request.live[0].parent is None, "a group without a first sequence"
            for sequence in request.live:
                _check_sequence(scheduler, sequence, state)
                is_waiting = state is RequestState.WAITING
                assert not is_waiting or sequence.parent is None or sequence.awaits_parent, "a prompt computed twice"
    running = [sequence for request in scheduler.running for sequence in request.live]
    swapped = [sequence for request in scheduler.swapped for sequence in request.live]
    orders = [request.order for request in scheduler.running]
    assert orders == sorted(orders), "running requests out of order"
    slots = [sequence.seq_slot for sequence in running if sequence.seq_slot]
    assert sorted([*slots, *scheduler.free_slots]) == list(range(1, scheduler.config.max_num_seqs + 1)), (
        "a slot is lost or held twice"
    )
    check_pages(scheduler.blocks, running, swapped)
    num_steps = max(1, scheduler.step - scheduler.retired_step)
    _check_windows(scheduler.blocks.arithmetic, running, num_steps)
    for request in scheduler.running:
        _check_shared_pages(scheduler.blocks.arithmetic, request)


def check_pages(blocks: BlockManager, running: Sequence[SampleSequence], swapped: Sequence[SampleSequence]) -> None:
    """Check both pools, given all sequences that own pages."""
    store = blocks.store
    _check_pool(blocks, store.device, running, store.pinned_pages.values())
    _check_pool(blocks, store.host, swapped, ())
    _check_passed_pages(store.device, [*running, *swapped])
    assert all(page in store.host.key_of for page in store.host.cached), "a host page without content is cached"
    block_size = blocks.arithmetic.block_size
    for sequence in running:
        first = sequence.num_computed // block_size
        for pages in sequence.pages:
            assert sequence.decode_limit <= len(pages) * block_size, "a sequence may write where it has no page"
            if sequence.decode_limit > sequence.num_computed:
                page = pages[first]
                assert store.device.ref_counts[page] == 1, "a page that will be written is shared"
                assert page not in store.device.key_of, "a page that will be written is published"
    for key, page in store.pinned_pages.items():
        assert store.device.page_of[key] == page, "a pinned page is not published"
        assert key in store.pins, "a page is pinned without a pin"


def _check_pool(blocks: BlockManager, pool: PagePool, owners: Iterable[SampleSequence], pinned: Iterable[int]) -> None:
    counts = [0] * pool.num_pages
    for page in pinned:
        counts[page] += 1
    for sequence in owners:
        _check_table(blocks, sequence)
        for pages in sequence.pages:
            for page in pages:
                counts[page] += 1
    counts[NULL_PAGE] = 0
    assert counts == pool.ref_counts, "reference counts differ from page tables and pins"
    deferred = [page for _, page in pool.deferred]
    withdrawn = withdrawn_pages(pool)
    unowned = [*pool.free, *pool.cached, *deferred, *withdrawn]
    assert len(set(unowned)) == len(unowned), "a page is free twice"
    assert set(unowned) == {page for page in range(1, pool.num_pages) if counts[page] == 0}, "free ≠ unreferenced"
    assert {page: key for key, page in pool.page_of.items()} == pool.key_of, "a page under another's hash"
    assert NULL_PAGE not in pool.key_of, "the null page is published"
    assert not any(page in pool.key_of for page in (*pool.free, *deferred, *withdrawn)), "a prefix is lost"
    assert pool.max_cached is None or len(pool.cached) <= pool.max_cached, "too many cached pages"
    assert all(step > pool.retired_step for step, _ in pool.deferred), "a page is deferred for ever"
    if isinstance(pool, ShrinkingPool):
        assert len(withdrawn) <= pool.num_withdrawn, "more pages were withdrawn than asked"
        assert len(withdrawn) == pool.num_withdrawn or not pool.num_free, "free pages that were to be withdrawn"


def _check_passed_pages(device: PagePool, owners: Sequence[SampleSequence]) -> None:
    """Check that each free page that is cached is published, or was passed by one sequence that may publish it yet."""
    kept = [
        page
        for sequence in owners
        for page, num_takes in sequence.prefix.passed_pages.values()
        if device.is_kept(page, num_takes)
    ]
    assert len(set(kept)) == len(kept), "a passed page is remembered twice"
    assert not any(page in device.key_of for page in kept), (
        "a passed page was published before it was known to be sound"
    )
    assert set(kept) == device.cached.keys() - device.key_of.keys(), "a page without content is cached"


def _check_table(blocks: BlockManager, sequence: SampleSequence) -> None:
    num_full = sequence.num_computed // blocks.arithmetic.block_size
    assert sequence.prefix.num_published <= num_full, "a page published before it was computed"
    for pages, num_passed in zip(sequence.pages, sequence.num_passed, strict=True):
        own = [page for page in pages if page != NULL_PAGE]
        assert len(set(own)) == len(own), "a page twice in one table"
        assert len(pages) >= blocks.arithmetic.pages_for(sequence.num_computed), "computed tokens without a page"
        assert NULL_PAGE not in pages[num_passed:], "a page is missing that a query may see"
        assert not any(pages[:num_passed]), "a page that no query sees is kept"


def _check_windows(arithmetic: PageArithmetic, running: Sequence[SampleSequence], num_steps: int) -> None:
    for group, window in arithmetic.window_groups:
        for sequence in running:
            most = arithmetic.window_pages(window, num_steps, is_fork=len(sequence.request.sequences) > 1)
            num_pages = len(sequence.pages[group]) - sequence.num_passed[group]
            assert num_pages <= most, "a window has more pages than counted"


def _check_shared_pages(arithmetic: PageArithmetic, request: Request) -> None:
    """Check that what samples share under full attention they share behind a window too, as is counted."""
    tables = zip(*(sequence.pages for sequence in request.live), strict=True)
    counts = [len(set(chain.from_iterable(group)) - {NULL_PAGE}) for group in tables]
    full = [count for count, window in zip(counts, arithmetic.windows, strict=True) if window is None]
    assert max(counts) <= min(full, default=max(counts)), "samples share less behind a window"


def _check_sequence(scheduler: Scheduler, sequence: SampleSequence, state: RequestState) -> None:
    assert sequence.state is state, "a sequence in another state than its request"
    assert sequence.num_computed <= sequence.num_tokens <= sequence.max_len, "tokens computed that do not exist"
    num_in_flight = sequence.num_tokens - len(sequence.token_ids)
    most_in_flight = (scheduler.step - scheduler.retired_step) * scheduler.config.max_decode_steps
    assert 0 <= num_in_flight <= most_in_flight, "tokens in flight without a step"
    assert sequence.parent is None or sequence.parent in sequence.request.live, "a parent that ended"
    assert (sequence.parent is None) == (sequence.fork_len == 0), "a sample that shares nothing with its parent"
    if state is not RequestState.RUNNING:
        assert sequence.seq_slot == sequence.decode_limit == 0, "a slot without running"
        assert not sequence.is_last_token_on_device, "a token on the device without a slot"
    if state is RequestState.WAITING or sequence.awaits_parent:
        assert not any(sequence.pages), "pages before they are due"
        assert sequence.num_computed == sequence.prefix.num_published == 0, "a waiting sequence that has kept progress"
    if sequence.decode_limit > sequence.num_computed:
        assert sequence.seq_slot, "a sequence decodes without a slot"
        assert sequence.is_last_token_on_device, "a sequence decodes a token that is not there"
        assert sequence.num_tokens == sequence.num_computed + 1, "a sequence decodes that has a chunk to compute"
        assert sequence.decode_limit < sequence.max_len, "the last token is computed"
