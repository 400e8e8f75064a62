"""The work of single steps and the requests that they preempt: small pools, exact numbers."""

import pytest

from jpaged.kv_cache.page_store import MoveKind
from jpaged.request import RequestState
from jpaged.scheduling.preemption import PreemptionMode, PreemptionPolicy, SwapCosts
from jpaged.scheduling.request_queue import POLICIES

from ..host_requests import SWAP, chunks, decodes, preempted, prompt, samples
from ..shrinking_pool import withdraw
from ..symbolic import Host


def step_until(host, is_reached):
    """Step until `is_reached(work)`; return the work of that step."""
    for _ in range(60):
        work = host.step()
        if is_reached(work):
            return work
    raise AssertionError("60 steps do not reach it")


# Pages for the next tokens.


@pytest.mark.parametrize(
    ("tokens_ahead", "max_tokens", "num_pages"),
    [(7, 50, 3), (8, 50, 4), (100, 4, 2), (100, 5, 3)],
    ids=["up to a page's end", "one beyond it", "all but the last token", "and one more"],
)
def test_a_decoding_sequence_has_pages_for_tokens_ahead_up_to_its_last_token(tokens_ahead, max_tokens, num_pages):
    host = Host(tokens_ahead=tokens_ahead)
    host.add(prompt(5), max_tokens=max_tokens)
    host.step()
    assert host.blocks.device.num_used == 2
    host.step()
    assert host.blocks.device.num_used == num_pages  # For 5 + tokens_ahead, or for 5 + max_tokens − 1.
    host.run()


def test_a_sequence_whose_last_token_is_in_flight_takes_no_further_page():
    """This holds even when a fork comes to share its pages."""
    host = Host(max_num_seqs=2, max_num_batched_tokens=5, enable_prefix_caching=False)
    other = host.add(prompt(2, 500), max_tokens=20)
    request = host.add(prompt(5), max_tokens=4)
    host.step()
    host.fork(request.sequences[0])  # Has to wait for the slot of the request before its own.
    for _ in range(3):
        host.step()
    host.dispatch()
    assert request.sequences[0].num_tokens == 9
    host.abort(other)
    work = host.dispatch()
    assert chunks(work) == [(1, 1, 4, 1, [1])]
    assert host.blocks.device.num_used == 2 + 1
    host.retire()
    host.run()


# Chunks.


@pytest.mark.parametrize("enable_chunked_prefill", [True, False])
def test_what_samples_have_in_common_is_computed_first_and_by_one_of_them(enable_chunked_prefill):
    host = Host(enable_chunked_prefill=enable_chunked_prefill, long_prefill_token_threshold=6)
    host.add(prompt(4), max_tokens=10, params=samples(2))
    for _ in range(4):
        host.step()
    host.restart()
    assert chunks(host.step()) == [(0, 0, 0, 4, [])]
    assert chunks(host.step()) == [(0, 0, 4, 4, [0]), (0, 1, 4, 4, [1])]
    host.run()


def test_a_sample_that_waits_for_no_parent_does_not_stop_its_own_children():
    """A sample that becomes the first one before it has shared anything computes all of its tokens at once."""
    host = Host(enable_prefix_caching=False)
    request = host.add(prompt(4), max_tokens=30)
    parent = request.sequences[0]
    host.step()
    host.step()
    host.fork(parent)  # At 6 tokens.
    host.step()
    host.step()
    host.fork(parent)  # At 8 tokens.
    host.step()
    host.restart()
    assert chunks(host.step()) == [(0, 0, 0, 6, [])]
    assert chunks(host.step()) == [(0, 0, 6, 2, []), (0, 1, 6, 3, [1])]
    host.abort_sequence(parent)
    work = host.step()
    assert chunks(work) == [(0, 2, 0, 9, [2])]
    assert decodes(work) == [(0, 1)]
    host.run()


def test_without_chunks_a_prompt_that_does_not_fit_the_step_waits_and_others_use_the_rest():
    host = Host(enable_chunked_prefill=False, max_num_batched_tokens=17, max_num_seqs=5)
    host.add(prompt(4), max_tokens=20, params=samples(3))
    for _ in range(9):
        host.step()
    host.restart()
    assert chunks(host.step()) == [(0, 0, 0, 4, [])]
    host.add(prompt(8, 500))
    # 9 tokens of each sample are to be computed: 17 − 9 are left, too few for another sample.
    assert chunks(host.step()) == [(0, 0, 4, 9, [0]), (1, 0, 0, 8, [0])]
    assert chunks(host.step()) == [(0, 1, 4, 9, [1])]
    assert chunks(host.step()) == [(0, 2, 4, 9, [2])]
    host.run()


def test_without_chunks_two_that_fill_the_step_are_computed_together():
    host = Host(enable_chunked_prefill=False, max_num_batched_tokens=16, long_prefill_token_threshold=6)
    host.add(prompt(4), max_tokens=20, params=samples(2))
    for _ in range(8):
        host.step()
    host.restart()
    assert chunks(host.step()) == [(0, 0, 0, 4, [])]
    assert chunks(host.step()) == [(0, 0, 4, 8, [0]), (0, 1, 4, 8, [1])]
    host.run()


def test_without_chunks_a_prompt_may_take_the_whole_step_from_those_that_decode():
    host = Host(enable_chunked_prefill=False, max_num_batched_tokens=16)
    host.add([100], max_tokens=4)
    host.step()
    host.add(prompt(16, 500))
    work = host.step()
    assert (chunks(work), decodes(work)) == ([(1, 0, 0, 16, [0])], [])
    host.run()


def test_running_prompts_fill_the_step_exactly():
    host = Host(max_num_batched_tokens=15, long_prefill_token_threshold=5)
    for index in range(3):
        host.add(prompt(11, 100 * index))
    assert [[num_tokens for *_, num_tokens, _ in chunks(host.step())] for _ in range(2)] == [[5, 5, 5]] * 2
    host.run()


def test_without_chunks_endless_prompts_keep_a_sequence_from_decoding_for_8_steps_at_most():
    host = Host(enable_chunked_prefill=False, max_num_batched_tokens=64, enable_prefix_caching=False)
    host.add([100], max_tokens=5)
    host.step()
    held = []
    for index in range(4 * 9):
        host.add(prompt(50, 10 * index), max_tokens=1)
        held.append(not decodes(host.step()))
    assert held == 4 * (8 * [True] + [False])
    host.run()


def test_without_chunks_a_prompt_starts_at_once_when_no_sequence_decodes_any_more():
    host = Host(enable_chunked_prefill=False, max_num_batched_tokens=64)
    first = host.add([100], max_tokens=50)
    host.step()
    for index in range(8):
        host.add(prompt(50, 10 * index), max_tokens=1)
        assert not decodes(host.step())
    host.abort(first)
    last = host.add(prompt(50, 500), max_tokens=1)
    host.step()
    assert last.state is RequestState.FINISHED_LENGTH


@pytest.mark.parametrize("num_earlier", [1, 2], ids=["it finds no room itself", "an earlier one takes its pages"])
def test_what_an_ignored_request_would_have_computed_is_left_to_a_newcomer(num_earlier):
    """Its two samples need 8 pages at most, more than are left when the pool has shrunk."""
    host = Host(
        windows=(8,),
        num_blocks=1 + 10,
        long_prefill_token_threshold=4,
        max_num_batched_tokens=4 * num_earlier + 3,
        max_num_seqs=5,
    )
    for index in range(num_earlier):
        host.add(prompt(40, 100 * index))
    large = host.add(prompt(40, 500), params=samples(2))
    host.step()
    host.step()
    num_left = host.blocks.device.num_used + 1  # For the third page of the first one.
    withdraw(host.blocks.device, 10 - num_left)
    late = host.add(prompt(4, 700), max_tokens=2)
    work = host.step()
    assert (work.ignored, work.preempted, large.state) == ([large], [], RequestState.FINISHED_IGNORED)
    assert host.scheduler.counts["ignored"] == 1
    assert large.error == (
        f"the pool has become too small: it needs up to 8 pages, and there are {num_left} pages of 4 tokens"
    )
    assert chunks(work) == [*[(index, 0, 8, 4, []) for index in range(num_earlier)], (late.number, 0, 0, 3, [])]
    host.run()


def test_a_sequence_preempted_in_the_step_that_gave_it_a_slot_is_not_new_in_a_slot():
    host = Host(windows=(8,), num_blocks=1 + 4, long_prefill_token_threshold=4)
    host.add(prompt(40))
    last = host.add(prompt(3, 500), max_tokens=4)
    host.step()
    host.step()
    host.fork(last.sequences[0])
    work = host.step()
    assert preempted(work) == [(1, "recompute")]
    assert (work.new_in_slots, chunks(work), decodes(work)) == ([], [(0, 0, 8, 4, [])], [])
    host.run()


@pytest.mark.parametrize(("budget", "num_decoding", "num_tokens"), [(9, 0, 9), (9, 3, 6), (9, 7, 4), (8, 7, 4)])
def test_chunks_get_what_decoding_leaves_but_half_of_the_step_at_least(budget, num_decoding, num_tokens):
    host = Host(max_num_seqs=8, max_num_batched_tokens=budget)
    for index in range(num_decoding):
        host.add([100 + index], max_tokens=20)
    host.step()
    host.add(prompt(30, 500))
    assert [chunk.num_tokens for chunk in host.step().chunks] == [num_tokens]
    host.run()


def test_sequences_that_decode_beyond_the_budget_rotate_in_order():
    """Six of them beside a prompt that takes half of the step: room for the first and three others."""
    host = Host(max_num_seqs=7, max_num_batched_tokens=8)
    requests = [host.add([100 + index], max_tokens=30) for index in range(6)]
    host.step()
    long = host.add(prompt(60, 500), max_tokens=30)
    served = [[number for number, _ in decodes(host.step())] for _ in range(5)]
    assert served == [[0, 1, 2, 3], [0, 4, 5, 1], [0, 2, 3, 4], [0, 5, 1, 2], [0, 3, 4, 5]]
    # Four fill the room: none has to wait, and the rotation does not move.
    host.abort(requests[1])
    host.abort(requests[2])
    work = host.step()
    assert ([number for number, _ in decodes(work)], len(chunks(work))) == ([0, 3, 4, 5], 1)
    host.abort(long)
    host.run()


# Pages.


def test_pages_that_steps_in_flight_may_write_are_awaited_before_any_request_is_preempted():
    host = Host(num_blocks=1 + 3, enable_prefix_caching=False)
    requests = [host.add(prompt(3, 100 * index), max_tokens=4) for index in range(3)]
    host.step()
    host.dispatch()
    host.abort(requests[2])
    work = host.dispatch()
    assert (work.is_empty, work.preempted, host.scheduler.counts["awaited_retirement"]) == (True, [], 2)
    host.retire()
    work = host.step()
    assert decodes(work) == [(0, 0)]
    assert preempted(work) == [(1, "recompute")]
    host.run()


def test_a_chunk_waits_for_pages_that_steps_in_flight_may_write():
    host = Host(windows=(8,), num_blocks=1 + 4, long_prefill_token_threshold=4)
    host.add(prompt(40))
    other = host.add(prompt(2, 500), max_tokens=6)
    host.step()
    host.step()
    assert chunks(host.dispatch()) == [(0, 0, 8, 4, [])]
    host.abort(other)
    assert host.dispatch().is_empty
    assert host.scheduler.counts["awaited_retirement"] == 1
    host.retire()
    assert chunks(host.step()) == [(0, 0, 12, 4, [])]
    host.run()


@pytest.mark.parametrize("is_in_flight", [True, False])
def test_the_last_request_waits_for_its_results_before_it_is_preempted_for_itself(is_in_flight):
    host = Host(num_blocks=1 + 3, enable_prefix_caching=False)
    for index in range(2):
        host.add(prompt(3, 100 * index), max_tokens=5)
    host.step()
    host.dispatch()
    if not is_in_flight:
        host.retire()
    work = host.dispatch()
    assert decodes(work) == [(0, 0)]
    assert preempted(work) == ([] if is_in_flight else [(1, "recompute")])
    while host.core.in_flight:
        host.retire()
    host.run()


def test_a_later_request_is_preempted_at_once_though_its_results_are_in_flight():
    host = Host(num_blocks=1 + 2, enable_prefix_caching=False)
    for index in range(2):
        host.add(prompt(3, 100 * index), max_tokens=5)
    host.step()
    host.dispatch()
    work = host.dispatch()
    assert preempted(work) == [(1, "recompute")]
    assert decodes(work) == []  # The page may still be written.
    while host.core.in_flight:
        host.retire()
    host.run()


# Slots.


def test_a_fork_takes_the_slot_of_a_later_request():
    host = Host(max_num_seqs=2)
    first = host.add(prompt(3), max_tokens=5)
    host.add(prompt(3, 100), max_tokens=5)
    host.step()
    [child] = host.fork(first.sequences[0])
    work = host.step()
    assert preempted(work) == [(1, "recompute")]
    assert work.new_in_slots == [child]
    assert decodes(work) == [(0, 0)]
    assert chunks(work) == [(0, 1, 3, 1, [1])]
    host.step()
    assert host.scheduler.sequences == first.sequences
    host.run()


def test_a_fork_waits_for_a_slot_if_its_request_is_the_last():
    host = Host(max_num_seqs=2)
    first, second = host.add(prompt(3), max_tokens=5), host.add(prompt(3, 100), max_tokens=5)
    host.step()
    [child] = host.fork(second.sequences[0])
    for _ in range(2):
        work = host.step()
        assert decodes(work) == [(0, 0), (1, 0)]
        assert (work.preempted, work.new_in_slots) == ([], [])
    host.abort(first)
    work = host.step()
    assert work.new_in_slots == [child]
    assert chunks(work) == [(1, 1, 3, 1, [1])]
    host.run()


# Swapped requests.


class Door:
    """A gate that admits urgent requests, and others while it is open."""

    def __init__(self):
        self.is_open = True
        self.inside = []

    @property
    def version(self):
        return int(self.is_open)

    def fault_of(self, request):
        return None

    def admits(self, request):
        return self.is_open or request.priority == 0

    def enter(self, request):
        self.inside.append(request.number)

    def leave(self, request):
        self.inside.remove(request.number)


@pytest.mark.parametrize(
    ("num_left", "samples_served", "newcomer"),
    [(1, [0], []), (2, [0, 1], []), (4, [0, 1, 2], [1]), (5, [0, 1, 2], [2])],
)
def test_swapped_samples_share_what_the_step_has_left(num_left, samples_served, newcomer):
    door = Door()
    host = Host(
        num_blocks=1 + 20,
        num_host_blocks=20,
        max_num_seqs=6,
        max_num_batched_tokens=8,
        policy=POLICIES["priority"],
        preemption=SWAP,
        gate=door,
        enable_prefix_caching=False,
    )
    first = host.add(prompt(47, 500), max_tokens=30)
    group = host.add(prompt(4), max_tokens=12, params=samples(3), priority=1)
    assert preempted(step_until(host, lambda work: work.preempted)) == [(1, "swap")]
    door.is_open = False
    host.abort(first)
    urgent = host.add(prompt(16 - num_left, 600), max_tokens=4)
    late = host.add(prompt(5, 700), max_tokens=1, priority=2)
    assert chunks(host.step()) == [(urgent.number, 0, 0, 8, [])]
    assert door.inside == [urgent.number]
    door.is_open = True
    start = group.sequences[0].num_computed
    assert chunks(host.step()) == [
        (urgent.number, 0, 8, 8 - num_left, [0]),
        *[(group.number, index, start, 1, [index]) for index in samples_served],
        *[(late.number, 0, 0, num_tokens, []) for num_tokens in newcomer],
    ]
    assert host.scheduler.running[:2] == [urgent, group]
    assert host.scheduler.counts["swap_in"] == 1
    host.run()
    assert door.inside == []


# How requests are preempted.


@pytest.mark.parametrize(
    ("length", "n", "expected"),
    [
        (7, 1, "2 pages out and in take 2 ms, 7 tokens anew 7 ms"),
        (8, 2, "2 pages out and in take 2 ms, 8 tokens anew 8 ms"),
    ],
    ids=["a page partly filled", "shared ones count once"],
)
def test_preemption_costs_count_computed_tokens_and_the_pages_that_hold_them(length, n, expected):
    costs = SwapCosts(page_bytes=500, swap_bytes_per_s=1e6, prefill_s_per_token=1e-3)
    policy = PreemptionPolicy(PreemptionMode.AUTO, costs)
    host = Host(num_blocks=1 + 4 + n, num_host_blocks=10, max_num_batched_tokens=32, preemption=policy)
    host.add(prompt(12, 500), max_tokens=9)
    host.add(prompt(length), max_tokens=2, params=samples(n))
    host.step()
    [preemption] = host.step().preempted
    assert (preemption.mode, preemption.reason) == (PreemptionMode.SWAP, expected)
    host.run()


@pytest.mark.parametrize(
    ("num_host_pages", "mode", "reason"),
    [(1, "recompute", "the host pool is full"), (2, "swap", "preemption_mode=swap")],
)
def test_a_request_that_the_host_pool_cannot_hold_is_recomputed(num_host_pages, mode, reason):
    host = Host(num_blocks=1 + 4, num_host_blocks=1 + num_host_pages, preemption=SWAP)
    host.add(prompt(8, 500), max_tokens=9)
    request = host.add(prompt(7), max_tokens=2)
    host.step()
    work = host.step()
    assert preempted(work) == [(1, mode)]
    assert work.preempted[0].reason == reason
    assert request.state is (RequestState.SWAPPED if mode == "swap" else RequestState.WAITING)
    assert (request.num_preemptions, request.num_swaps) == (1, mode == "swap")
    kinds = [host.scheduler.counts[f"preemptions_{kind}"] for kind in ("recompute", "swap")]
    assert kinds == [mode == "recompute", mode == "swap"]
    host.run()


def test_pages_are_deferred_only_for_sequences_in_flight():
    host = Host(max_num_seqs=7, max_num_batched_tokens=8)
    requests = [host.add([100 + index], max_tokens=30) for index in range(6)]
    host.step()
    host.add(prompt(60, 500), max_tokens=4)
    assert decodes(host.dispatch()) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    num_free = host.blocks.device.num_free
    host.abort(requests[3])
    assert host.blocks.device.num_free == num_free
    host.abort(requests[4])
    assert host.blocks.device.num_free == num_free + 1
    host.retire()
    assert host.blocks.device.num_free == num_free + 2
    host.run()


# Requests that start.


def test_a_request_keeps_the_time_and_the_cache_hits_of_its_first_admission():
    host = Host()
    host.add(prompt(9), max_tokens=1)
    host.run()
    host.now = 2.0
    request = host.add(prompt(10), max_tokens=5)
    host.now = 3.0
    host.step()
    host.now = 4.0
    host.restart()
    assert chunks(host.step()) == [(1, 0, 0, 11, [0])]  # The cache is lost, and a token more is known.
    assert (request.first_scheduled_time, request.num_cached_tokens) == (3.0, 8)
    prefixes = host.blocks.prefixes
    assert (prefixes.num_queried_tokens, prefixes.num_hit_tokens) == (9 + 10, 8)
    host.run()


def test_running_requests_are_served_in_the_policy_s_order():
    host = Host(policy=POLICIES["priority"])
    for index, priority in enumerate([1, 2, 0]):
        host.add(prompt(3, 100 * index), max_tokens=8, priority=priority)
        host.step()
    assert decodes(host.step()) == [(2, 0), (0, 0), (1, 0)]
    host.run()


# Samples that attach.


@pytest.mark.parametrize(("num_free", "start"), [(2, 8), (1, 0)], ids=["just room for it", "one page too few"])
def test_a_sample_whose_parent_has_ended_starts_with_cached_pages_if_there_is_room(num_free, start):
    """The device has lost a prefix of two pages, and the host pool has kept it."""
    host = Host(num_blocks=1 + 16, num_host_blocks=20, long_prefill_token_threshold=4)
    host.add(prompt(9), max_tokens=1)
    host.run()
    host.add(prompt(62, 300), max_tokens=1)  # Evicts it.
    host.run()
    request, last = host.add(prompt(17), max_tokens=2), host.add(prompt(16, 500), max_tokens=2)
    assert [chunk[2:4] for chunk in chunks(host.step())] == [(8, 4), (0, 4)]
    host.fork(request.sequences[0])
    host.abort_sequence(request.sequences[0])
    withdraw(host.blocks.device, host.blocks.device.num_free - num_free)
    work = host.step()
    assert preempted(work) == [(last.number, "recompute")]  # For the pages that are to be computed.
    assert chunks(work) == [(request.number, 1, start, 4, [])]
    host.run()


@pytest.mark.parametrize("windows", [(None,), (4,)], ids=["full attention", "a window that passes"])
def test_a_sample_that_gets_its_slot_late_shares_what_its_parent_had_when_it_was_forked(windows):
    host = Host(windows=windows, max_num_seqs=2, max_num_batched_tokens=8, enable_prefix_caching=False)
    other, request = host.add(prompt(2, 500), max_tokens=40), host.add(prompt(9), max_tokens=40)
    host.step()
    host.fork(request.sequences[0])
    for _ in range(6):
        host.step()
    host.abort(other)
    work = host.step()
    assert chunks(work) == [(1, 1, 8, 1, [1])]
    assert decodes(work) == [(1, 0)]
    host.run()


@pytest.mark.parametrize("has_room", [True, False])
def test_a_parent_decodes_on_in_a_copy_of_the_partly_filled_page_that_a_sample_shares(has_room):
    """The parent decodes in the same step; without a page for the copy neither sequence goes on."""
    host = Host(max_num_seqs=2, max_num_batched_tokens=5, enable_prefix_caching=False)
    other, request = host.add(prompt(2, 500), max_tokens=20), host.add(prompt(6), max_tokens=20)
    host.step()
    [child] = host.fork(request.sequences[0])
    host.step()
    assert request.sequences[0].num_computed == 6
    host.dispatch()
    host.abort(other)
    num_taken = 0 if has_room else host.blocks.device.num_free
    withdraw(host.blocks.device, num_taken)
    shared = request.sequences[0].pages[0][1]
    work = host.dispatch()
    assert decodes(work) == [(1, 0)] * has_room
    assert chunks(work) == [(1, 1, 5, 1, [1])] * has_room
    assert [(move.kind, move.source) for move in work.moves] == [(MoveKind.COPY, shared)] * has_room
    assert child.pages[0][1] == shared
    withdraw(host.blocks.device, -num_taken)
    while host.core.in_flight:
        host.retire()
    host.run()
