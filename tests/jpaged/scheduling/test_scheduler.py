"""The scheduler's promises, one by one; `test_simulation` holds random lives against all of them at every step."""

import gc
from collections import Counter

import pytest

from jpaged.admission import MAX_BYPASSES
from jpaged.block_manager import AllocStatus
from jpaged.errors import InvalidRequestError, QueueFullError
from jpaged.invariants import check_scheduler
from jpaged.page_store import MoveKind
from jpaged.preemption import PreemptionMode, PreemptionPolicy, SwapCosts
from jpaged.prefix_hash import CacheKey
from jpaged.request import RequestState, Sequence
from jpaged.request_queue import POLICIES, QueueLimits
from jpaged.sampling_params import SamplingParams

from .simulation import AdapterGate
from .symbolic import NAN, POISON_TOKEN, Host

SWAP = PreemptionPolicy(PreemptionMode.SWAP)


def prompt(length, start=0):
    return [100 + (start + i) % 1000 for i in range(length)]


def samples(n, **options):
    return SamplingParams(n=n, detokenize=False, **options)


def rows(work):
    return [*work.decodes, *(chunk.sequence for chunk in work.chunks)]


def num_preemptions(host):
    return sum(host.scheduler.counts[f"preemptions_{mode}"] for mode in ("recompute", "swap"))


# S1: budget and slots.


def test_a_step_uses_its_budget_and_its_slots_and_no_more():
    host = Host(max_num_seqs=3, max_num_batched_tokens=8)
    for index in range(10):
        host.add(prompt(5, 10 * index), max_tokens=6)
    tokens, num_running = [], []
    while host.scheduler.has_unfinished:
        work = host.step()
        tokens.append(work.num_tokens)
        num_running.append(len(host.scheduler.running))
    assert max(tokens) == 8
    assert max(num_running) == 3
    host.check_end()


def test_chunks_are_no_longer_than_the_threshold_and_leave_room_for_others():
    host = Host(long_prefill_token_threshold=5, max_num_batched_tokens=16)
    for index in range(2):
        host.add(prompt(11, 100 * index))
    chunks = [[chunk.num_tokens for chunk in host.step().chunks] for _ in range(3)]
    assert chunks == [[5, 5], [5, 5], [1, 1]]
    host.run()


def test_without_chunks_a_prompt_is_computed_whole_and_before_anybody_decodes():
    host = Host(enable_chunked_prefill=False, max_num_batched_tokens=32)
    host.add(prompt(20), max_tokens=8)
    host.step()
    host.add(prompt(30, 100), max_tokens=8)
    work = host.step()
    assert (work.decodes, [chunk.num_tokens for chunk in work.chunks]) == ([], [30])
    assert len(host.step().decodes) == 2
    host.run()


def test_decodes_beyond_the_budget_take_turns_and_the_first_is_always_served():
    host = Host(max_num_seqs=8, max_num_batched_tokens=8, num_blocks=200)
    for index in range(7):
        host.add([100 + index], max_tokens=60)
    host.step()
    host.add(prompt(40, 500), max_tokens=2)
    served = Counter()
    for _ in range(6):
        work = host.step()
        served.update(sequence.request.number for sequence in work.decodes)
    assert served[0] == 6
    assert min(served[number] for number in range(7)) >= 2
    host.run()


# S2: one queue, one end.


def decoding(host):
    request = host.add(prompt(5), max_tokens=50)
    host.step()
    host.step()
    assert request.sequences[0].num_output_tokens == 2
    return request


def prefilling(host):
    request = host.add(prompt(40), max_tokens=5)
    host.step()
    assert 0 < request.sequences[0].num_computed < 40
    return request


def waiting(host):
    for index in range(4):
        host.add(prompt(3, 50 + 10 * index), max_tokens=50)
    request = host.add(prompt(5), max_tokens=5)
    host.step()
    assert request.state is RequestState.WAITING
    return request


def preempted(host):
    for index in range(4):
        request = host.add(prompt(20, 50 * index), max_tokens=60)
    while not request.num_preemptions:
        host.step()
    assert request.state in (RequestState.WAITING, RequestState.SWAPPED)
    return request


def in_flight(host):
    request = decoding(host)
    host.dispatch()
    host.dispatch()
    assert host.scheduler.is_in_flight(request.sequences[0])
    return request


def finished(host):
    request = host.add(prompt(5), max_tokens=1)
    host.step()
    assert request.state.is_finished
    return request


@pytest.mark.parametrize("preemption", [PreemptionPolicy(), SWAP], ids=["recompute", "swap"])
@pytest.mark.parametrize(
    "reach", [waiting, prefilling, decoding, preempted, in_flight, finished], ids=lambda reach: reach.__name__
)
def test_abort_frees_all_in_any_state_and_a_second_abort_does_nothing(reach, preemption):
    host = Host(num_blocks=32, num_host_blocks=32, preemption=preemption)
    request = reach(host)
    state = request.state
    expected = state if state.is_finished else RequestState.FINISHED_ABORTED
    for _ in range(2):
        host.abort(request)
        assert request.state is request.sequences[0].state is expected
        assert not any(request.sequences[0].pages)
    while host.core.in_flight:
        host.retire()
    host.add(prompt(30, 7), max_tokens=10)
    host.run()


def test_a_request_ends_with_its_first_end():
    host = Host()
    request = decoding(host)
    host.abort(request)
    ended = request.finished_time
    host.now += 1
    host.scheduler.finish(request.sequences[0], RequestState.FINISHED_STOPPED)
    assert (request.state, request.finished_time) == (RequestState.FINISHED_ABORTED, ended)
    assert not host.scheduler.has_unfinished
    check_scheduler(host.scheduler)


def test_a_group_ends_with_its_last_sequence():
    host = Host()
    request = host.add(prompt(5), max_tokens=50, params=samples(3))
    host.step()
    for left in (2, 1):
        host.abort_sequence(request.live[0])
        assert (len(request.live), request.state) == (left, RequestState.RUNNING)
        host.step()
    host.abort_sequence(request.live[0])
    assert request.state is RequestState.FINISHED_ABORTED
    assert not host.scheduler.has_unfinished


@pytest.mark.parametrize(
    ("limits", "allowed"), [({"waiting_requests": 3}, 3), ({"waiting_tokens": 20}, 4), ({}, 20)], ids=str
)
def test_a_queue_takes_as_much_as_its_limits_allow(limits, allowed):
    host = Host(limits=QueueLimits(**limits))
    for index in range(allowed):
        host.add(prompt(5, 10 * index))
    if limits:
        with pytest.raises(QueueFullError):
            host.add(prompt(5, 500))
        host.step()
        host.add(prompt(5, 500))
    assert len(host.requests) == allowed + bool(limits)
    host.run()


# S3, S4: progress.


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_pool_that_holds_one_request_serves_them_one_after_another(enable_prefix_caching):
    host = Host(num_blocks=1 + 5, block_size=4, enable_prefix_caching=enable_prefix_caching)
    for index in range(5):
        host.add(prompt(9, 20 * index), max_tokens=12)  # The last token needs no slot: 20 fill 5 pages exactly.
    host.run()


def test_a_request_that_can_never_fit_is_refused_and_others_go_on():
    host = Host(num_blocks=1 + 5, block_size=4, max_num_seqs=2)
    host.add(prompt(9), max_tokens=12)
    for too_much in ({"max_tokens": 13}, {"max_tokens": 12, "params": samples(2)}, {"params": samples(3)}):
        with pytest.raises(InvalidRequestError):
            host.add(prompt(9), **too_much)
    host.run()
    assert len(host.requests) == 1


def test_a_request_that_no_longer_fits_is_ignored_and_others_go_on():
    host = Host(num_blocks=1 + 10, block_size=4, max_num_seqs=1, max_num_batched_tokens=64)
    first = host.add(prompt(9), max_tokens=4)
    large, small = host.add(prompt(30, 100), max_tokens=8), host.add(prompt(9, 200), max_tokens=4)
    host.step()
    host.blocks.device.withdraw(5)
    host.run()
    assert large.state is RequestState.FINISHED_IGNORED
    assert large.state.finish_reason == "error"
    assert "can never be had" in large.error
    assert {first.state, small.state} == {RequestState.FINISHED_LENGTH}


def test_a_lone_request_may_use_what_the_watermark_keeps_from_newcomers():
    for watermark, state in [(0.0, RequestState.RUNNING), (0.5, RequestState.WAITING)]:
        host = Host(num_blocks=1 + 10, block_size=4, max_num_batched_tokens=64, watermark=watermark)
        first = host.add(prompt(30), max_tokens=8)
        second = host.add(prompt(5, 500), max_tokens=2)
        host.step()  # 8 pages of 10 for the first; the 2 that are left would do for the second.
        assert (first.state, second.state) == (RequestState.RUNNING, state)
        host.run()


def test_newcomers_wait_in_proportion_to_the_last_step_with_newcomers():
    host = Host(delay_factor=2.0)
    host.add(prompt(5), max_tokens=60)
    host.dispatch()
    host.now = 1.0  # The step with a newcomer took a second.
    host.retire()
    late = host.add(prompt(5, 100), max_tokens=4)
    states = []
    for host.now in (2.0, 3.0, 3.1):
        host.step()
        states.append(late.state)
    assert states == [RequestState.WAITING, RequestState.WAITING, RequestState.RUNNING]
    host.run()


def test_a_gate_keeps_requests_waiting_and_learns_of_all_who_come_and_go():
    gate = AdapterGate(1)
    host = Host(gate=gate)
    keys = [CacheKey(lora_name="a"), CacheKey(lora_name="b"), CacheKey(lora_name="a"), None]
    requests = [host.add(prompt(5, 10 * i), max_tokens=4, cache_key=key) for i, key in enumerate(keys)]
    host.step()
    states = [request.state is RequestState.RUNNING for request in requests]
    assert states == [True, False, True, True]
    host.run()
    assert not gate.running


# S5, S6: nobody starves.


def test_the_oldest_request_is_in_every_step_however_small_the_pool():
    host = Host(num_blocks=1 + 12, block_size=4, enable_prefix_caching=False)
    requests = [host.add(prompt(4, 20 * index), max_tokens=44) for index in range(6)]
    while host.scheduler.has_unfinished:
        oldest = next(request for request in requests if not request.state.is_finished)
        assert oldest.live[0] in rows(host.step())
    host.check_end()
    assert num_preemptions(host) >= 3
    assert requests[0].num_preemptions == 0


@pytest.mark.parametrize("preemption", [PreemptionPolicy(), SWAP], ids=["recompute", "swap"])
def test_nobody_comes_in_in_a_step_that_preempted(preemption):
    host = Host(num_blocks=1 + 12, block_size=4, num_host_blocks=50, preemption=preemption)
    for index in range(6):
        host.add(prompt(4, 20 * index), max_tokens=44)
    num_preempting = 0
    while host.scheduler.has_unfinished:
        before = list(host.scheduler.running)
        work = host.step()
        if work.preempted:
            num_preempting += 1
            preempted = {each.request for each in work.preempted}
            assert {sequence.request for sequence in rows(work)} <= set(before) - preempted
            assert preempted <= set(before)
    assert num_preempting


def test_the_last_in_order_gives_way_first():
    """Under `priority` the highest number; among equals the one that came last."""
    host = Host(num_blocks=1 + 14, block_size=4, policy=POLICIES["priority"], enable_prefix_caching=False)
    requests = [
        host.add(prompt(4, 20 * i), max_tokens=30, priority=priority) for i, priority in enumerate([2, 0, 0, 1])
    ]
    while not num_preemptions(host):
        work = host.step()
    assert work.preempted[0].request is requests[0]
    ended = []
    while host.scheduler.has_unfinished:
        host.step()
        ended += [request for request in requests if request.state.is_finished and request not in ended]
    assert ended.index(requests[1]) < ended.index(requests[0])
    host.check_end()


def test_a_key_function_orders_requests():
    host = Host(max_num_seqs=1, policy=lambda request: -request.prompt_len)
    requests = [host.add(prompt(length), max_tokens=1) for length in (3, 9, 6)]
    order = []
    while host.scheduler.has_unfinished:
        order += [chunk.sequence.request for chunk in host.step().chunks]
    assert order == [requests[1], requests[2], requests[0]]


def test_a_long_prompt_is_passed_by_no_later_one_and_decoding_goes_on_beside_it():
    host = Host(num_blocks=200, max_num_batched_tokens=16)
    short = host.add(prompt(3, 900), max_tokens=40)
    host.step()
    long = host.add(prompt(100), max_tokens=5)
    for index in range(20):
        host.add(prompt(3, 300 + 10 * index), max_tokens=5)
    for _ in range(7):  # ceil(100 / 15): all of the budget that decoding leaves.
        assert [sequence.request for sequence in rows(host.step())][:2] == [short, long]
    assert long.sequences[0].num_output_tokens == 1
    host.run()


def test_who_does_not_fit_is_passed_a_bounded_number_of_times():
    host = Host(num_blocks=1 + 12, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    host.add(prompt(20), max_tokens=20)
    large = host.add(prompt(40, 100), max_tokens=2)
    for index in range(30):
        host.add(prompt(2, 300 + 10 * index), max_tokens=2)
    while large.state is RequestState.WAITING:
        host.step()
    assert host.scheduler.counts["bypass"] == MAX_BYPASSES
    assert large.num_bypassed == 0, "it is passed as often again when it waits again"
    host.run()


# S7: preemption changes no token.


@pytest.mark.parametrize("num_host_blocks", [0, 2, 30, 400])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_preempted_run_draws_what_an_unbroken_one_draws(enable_prefix_caching, n, num_host_blocks):
    outputs, preemptions = [], []
    for num_blocks in (1 + 60, 1 + 500):
        host = Host(
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            preemption=SWAP,
            enable_prefix_caching=enable_prefix_caching,
            max_num_seqs=16,
        )
        for index in range(8):
            host.add(prompt(10, 3 * index), max_tokens=60, params=samples(n))
        host.run()
        outputs.append([list(sequence.token_ids) for request in host.requests for sequence in request.sequences])
        preemptions.append(num_preemptions(host))
        if num_blocks == 1 + 60:
            num_swaps = host.scheduler.counts["preemptions_swap"]
            assert num_swaps == 0 if num_host_blocks == 0 else num_swaps > 0 or num_host_blocks == 2
            assert (host.blocks.store.counts["host_pool_full"] > 0) == (num_host_blocks < 400)
    assert outputs[0] == outputs[1]
    assert preemptions[0] >= 2
    assert preemptions[1] == 0


def test_swap_or_recompute_is_chosen_by_cost_and_says_why():
    reasons = {}
    for swap_bytes_per_s, mode in [(1e9, PreemptionMode.SWAP), (1e-3, PreemptionMode.RECOMPUTE)]:
        costs = SwapCosts(page_bytes=100, swap_bytes_per_s=swap_bytes_per_s, prefill_s_per_token=1e-3)
        host = Host(num_blocks=1 + 12, num_host_blocks=50, preemption=PreemptionPolicy(PreemptionMode.AUTO, costs))
        for index in range(4):
            host.add(prompt(4, 20 * index), max_tokens=40)
        while not num_preemptions(host):
            work = host.step()
        assert work.preempted[0].mode is mode
        reasons[mode] = work.preempted[0].reason
        host.run()
    assert all("pages out and in take" in reason for reason in reasons.values())


def test_what_a_swapped_request_no_longer_sees_does_not_keep_it_from_coming_back():
    """Two chunks of it were computed when it gave way, the second one in flight: 3 + 5 pages, of which it sees one."""
    host = Host(
        num_blocks=1 + 8,
        num_host_blocks=20,
        windows=(4,),
        preemption=SWAP,
        long_prefill_token_threshold=16,
        max_num_batched_tokens=32,
    )
    host.add(prompt(4), max_tokens=8)
    host.add(prompt(3, 100), max_tokens=8)
    request = host.add(prompt(60, 500))
    host.step()
    host.dispatch()
    assert [each.request for each in host.dispatch().preempted] == [request]
    while host.core.in_flight:
        host.retire()
    for _ in range(20):
        host.step()
    assert request.num_swaps == 1
    host.check_end()


def test_finding_its_own_pages_after_a_preemption_is_no_cache_hit():
    """P9: prompts that share nothing hit nothing, though resumed requests find their pages."""
    host = Host(num_blocks=1 + 24)
    for index in range(4):
        host.add(prompt(20, 100 * index), max_tokens=60)
    found = []
    while host.scheduler.has_unfinished:
        work = host.step()
        found += [chunk.start for chunk in work.chunks if chunk.sequence.request.num_preemptions and chunk.start]
    host.check_end()
    assert num_preemptions(host) >= 1
    assert found
    prefixes = host.blocks.prefixes
    assert (prefixes.num_queried_tokens, prefixes.num_hit_tokens) == (80, 0)
    assert [request.num_cached_tokens for request in host.requests] == [0] * 4


def test_a_shared_prefix_is_computed_once_and_counted():
    host = Host()
    for _ in range(3):
        host.add(prompt(10), max_tokens=2)
        host.run()
    assert [request.num_cached_tokens for request in host.requests] == [0, 8, 8]
    assert (host.blocks.prefixes.num_queried_tokens, host.blocks.prefixes.num_hit_tokens) == (30, 16)


@pytest.mark.parametrize(
    "other", [CacheKey(lora_name="a"), CacheKey(cache_salt="a"), CacheKey(weights_version=1)], ids=str
)
def test_requests_with_other_extras_share_nothing(other):
    host = Host()
    for cache_key in (None, other):
        host.add(prompt(10), max_tokens=2, cache_key=cache_key)
        host.run()
    assert host.requests[1].num_cached_tokens == 0


def test_a_request_that_wants_prompt_scores_computes_its_whole_prompt_once():
    """P7, also when it is preempted on the way: what was scored may then be found."""
    host = Host(num_blocks=1 + 24)
    host.add(prompt(20), max_tokens=2)
    host.run()
    host.add(prompt(4, 500), max_tokens=90)
    scored = host.add(prompt(20), max_tokens=60, scores=True)
    starts = []
    while host.scheduler.has_unfinished:
        starts += [chunk.start for chunk in host.step().chunks if chunk.sequence.request is scored]
    assert starts[0] == 0
    assert scored.num_preemptions
    assert max(starts) >= 20
    assert scored.num_scored == 20


def test_what_was_not_scored_before_a_preemption_is_computed_after_it():
    """Though the whole prompt is pinned in the cache."""
    host = Host(num_blocks=1 + 16, max_num_seqs=2, max_num_batched_tokens=2)
    host.add(prompt(20), max_tokens=2)
    host.run()
    assert host.blocks.prefixes.pin(prompt(20), CacheKey()) == 20
    host.add(prompt(4, 500), max_tokens=40)
    for _ in range(16):
        host.step()
    scored = host.add(prompt(20), max_tokens=4, scores=True)
    num_scored = 0
    while not scored.num_preemptions:
        num_scored = scored.num_scored
        host.step()
    assert 0 < num_scored < 20
    host.run()


# S9, S10.


def test_no_token_is_drawn_before_the_last_chunk_of_a_prompt():
    host = Host(max_num_batched_tokens=8)
    request = host.add(prompt(20), max_tokens=2)
    drawn = []
    for _ in range(4):
        host.step()
        drawn.append(request.sequences[0].num_output_tokens)
    assert drawn == [0, 0, 1, 2]
    assert host.scheduler.counts["prefill_chunks"] == 2


def test_a_slot_that_changes_hands_takes_nothing_along():
    """S10: with one slot, each request samples with its own seed, temperature and limits."""
    host = Host(max_num_seqs=1, max_num_batched_tokens=4)
    kinds = [
        samples(1, seed=1, temperature=0.5, top_k=5),
        samples(1, seed=2, top_p=0.3),
        samples(1, min_p=0.2),
    ]
    for params in kinds:
        host.add(prompt(4), max_tokens=6, params=params)
    host.run()
    # One that never samples in the slot, between two that do.
    aborted = host.add(prompt(12, 50), max_tokens=6, params=kinds[0])
    host.step()
    host.abort(aborted)
    host.add(prompt(4), max_tokens=6, params=samples(1, seed=3))
    host.run()


def test_ended_requests_are_let_go():
    """By the step after their last one."""
    host = Host(max_num_seqs=2)
    for index in range(4):
        host.add(prompt(5, 20 * index), max_tokens=3).request_id = "let go"
    host.run()
    host.add(prompt(5), max_tokens=2)
    host.run()
    for memory in (host.requests, host.solos, host.ends, host.first_starts, host.num_claimed, host.scheduler.ended):
        memory.clear()
    gc.collect()
    kept = [each for each in gc.get_objects() if isinstance(each, Sequence) and each.request.request_id == "let go"]
    assert not kept


# Samples and forks.


def test_the_samples_of_a_prompt_share_its_pages_and_copy_the_half_filled_one():
    host = Host(max_num_batched_tokens=64, enable_prefix_caching=False)
    request = host.add(prompt(10), max_tokens=6, params=samples(4))
    work = host.step()
    assert [(chunk.num_tokens, len(chunk.samplers)) for chunk in work.chunks] == [(10, 4)]
    assert host.blocks.device.num_used == 3
    work = host.step()
    assert [move.kind for move in work.moves] == [MoveKind.COPY] * 3
    assert host.blocks.device.num_used == 2 + 4
    host.run()
    outputs = {tuple(sequence.token_ids) for sequence in request.sequences}
    assert len(outputs) == 4


@pytest.mark.parametrize("known", [7, 8, 9], ids=["page − 1", "page", "page + 1"])
@pytest.mark.parametrize("num_ahead", [0, 1, 2])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_fork_goes_on_as_alone(known, num_ahead, enable_prefix_caching):
    host = Host(enable_prefix_caching=enable_prefix_caching)
    request = host.add(prompt(4), max_tokens=20)
    parent = request.sequences[0]
    while len(parent.token_ids) < known:
        host.step()
    for _ in range(num_ahead):
        host.dispatch()
    [child] = host.fork(parent)
    for _ in range(num_ahead):
        host.retire()
    host.run()
    assert parent.token_ids[:known] == child.token_ids[:known]
    assert parent.token_ids[known:] != child.token_ids[known:]


@pytest.mark.parametrize(
    "reach", [waiting, prefilling, decoding, preempted, in_flight], ids=lambda reach: reach.__name__
)
def test_a_fork_in_any_state_goes_on_as_alone(reach):
    host = Host(num_blocks=50, num_host_blocks=50, preemption=SWAP)
    request = reach(host)
    assert len(host.fork(request.sequences[0], 2)) == 2
    while host.core.in_flight:
        host.retire()
    host.run()
    assert host.scheduler.counts["fork"] == 2


def test_a_fork_that_could_never_fit_is_refused_and_changes_nothing():
    host = Host(num_blocks=1 + 12, max_num_seqs=2)
    request = host.add(prompt(5), max_tokens=30)
    host.step()
    for n in (1, 2):
        with pytest.raises(InvalidRequestError):
            host.fork(request.sequences[0], n)
        assert len(request.sequences) == len(request.live) == 1
    host.run()


def test_a_child_outlives_its_parent():
    host = Host()
    request = host.add(prompt(6), max_tokens=10, params=samples(3))
    host.dispatch()
    host.abort_sequence(request.sequences[0])
    host.retire()
    host.run()
    assert [len(sequence.token_ids) for sequence in request.sequences] == [6, 16, 16]


@pytest.mark.parametrize("num_pages", [100, 103, 106, 112, 121, 130])
def test_a_fork_that_could_share_nothing_is_counted_with_pages_of_its_own(num_pages):
    """It waited for a slot until a window had passed what it would have shared. Then both are swapped out and in."""
    host = Host(
        num_blocks=num_pages,
        num_host_blocks=200,
        block_size=2,
        windows=(None, 4),
        max_num_seqs=3,
        max_num_batched_tokens=8,
        max_model_len=256,
        enable_prefix_caching=False,
        preemption=SWAP,
    )
    host.add(prompt(3), max_tokens=20)
    host.add(prompt(3, 100), max_tokens=90)
    forked = host.add(prompt(80, 300), max_tokens=30)
    host.step()
    host.fork(forked.sequences[0])
    for _ in range(200):
        if host.scheduler.has_unfinished:
            host.step()
    assert host.scheduler.counts["preemptions_swap"] < 20
    host.check_end()


def test_a_sample_that_gives_its_pages_back_as_it_gets_them_waits_for_its_parent_again():
    """It shares its parent's last page, the parent needs a copy of that, and only their own pages are left to take."""
    host = Host(num_blocks=1 + 9, block_size=4, max_num_seqs=3, max_num_batched_tokens=7, enable_prefix_caching=False)
    first = host.add(prompt(17), max_tokens=10)
    while not first.sequences[0].num_output_tokens:
        host.step()
    host.add(prompt(1, 300), max_tokens=3)
    forked = host.add(prompt(10, 600), max_tokens=6)
    while not forked.sequences[0].num_computed:
        host.step()
    host.fork(forked.sequences[0])
    while not forked.num_preemptions:
        host.step()
    assert forked.sequences[1].awaits_parent
    starts = []
    while host.scheduler.has_unfinished:
        starts += [(chunk.sequence.index, chunk.start) for chunk in host.step().chunks]
    assert (1, 0) not in starts
    host.check_end()


# P8: values that are not finite.


def test_a_page_gone_bad_fails_those_that_read_it_and_no_later_request():
    """The bad page was found in the cache: nobody who fails wrote it, and yet it must not be found again."""
    host = Host()
    host.add(prompt(8), max_tokens=1)
    host.run()
    host.add(prompt(9), max_tokens=1)
    host.run()
    bad_page = next(iter(host.blocks.device.page_of.values()))
    readers = [host.add(prompt(10), max_tokens=5), host.add(prompt(11), max_tokens=5)]
    neighbour = host.add(prompt(4, 500), max_tokens=3)
    host.runner.device.keys[bad_page * 4 + 1] = NAN
    host.core.dispatch()
    host.core.retire()
    assert [request.state for request in readers] == [RequestState.FINISHED_ERROR] * 2
    later = host.add(prompt(10), max_tokens=5)
    while host.scheduler.has_unfinished:
        host.core.dispatch()
        host.core.retire()
        check_scheduler(host.scheduler)
    for request in (neighbour, later):
        tokens, state = host.solos[request.sequences[0]].run()
        assert (list(request.sequences[0].token_ids[request.prompt_len :]), request.state) == (tokens, state)
    assert later.num_cached_tokens == 0
    assert host.blocks.device.num_used == 0


def test_a_poisoned_prompt_ends_itself_alone():
    host = Host()
    poisoned = host.add([*prompt(5), POISON_TOKEN, *prompt(3)], max_tokens=5)
    other = host.add(prompt(9), max_tokens=5)
    host.run()
    assert (poisoned.state, other.state) == (RequestState.FINISHED_ERROR, RequestState.FINISHED_LENGTH)


# A device that fails.


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_after_a_restart_everybody_goes_on_as_alone(num_ahead):
    host = Host(num_blocks=40, num_host_blocks=40, preemption=SWAP)
    requests = [host.add(prompt(20, 50 * index), max_tokens=40, params=samples(index % 2 + 1)) for index in range(4)]
    for _ in range(15):
        host.step()
    for _ in range(num_ahead):
        host.dispatch()
    host.restart()
    assert {request.state for request in requests} == {RequestState.WAITING}
    assert host.blocks.device.num_used == host.blocks.host.num_used == 0
    host.run()


def test_status_tells_never_from_later():
    blocks = Host(num_blocks=1 + 10).blocks
    assert blocks.status_of(11, 0) is AllocStatus.NEVER
    assert blocks.status_of(10, 10) is AllocStatus.OK
    assert blocks.status_of(10, 11) is AllocStatus.LATER
    blocks.device.withdraw(1)
    assert blocks.status_of(10, 0) is AllocStatus.NEVER
