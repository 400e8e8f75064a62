"""The scheduler's promises: alone or in company, preempted or not, every request draws the same tokens.

Replay one workload with `pytest "tests/jpaged/test_scheduler.py::test_company_changes_no_token[17]"`.
"""

import gc

import pytest

from jpaged.request import RequestState, Sequence
from jpaged.sampling_params import SamplingParams

from .symbolic import NAN, Host, Tally, Workload

NUM_WORKLOADS = 240
TALLY, DONE = Tally(), set()


def prompt(length, start=0):
    return [100 + (start + i) % 1000 for i in range(length)]


def run_workload(seed):
    return Workload(seed).run()


@pytest.mark.parametrize("seed", range(NUM_WORKLOADS))
def test_company_changes_no_token(seed):
    global TALLY
    TALLY += run_workload(seed)
    DONE.add(seed)


def test_the_workloads_made_everything_happen():
    """Floors at about half of what the seeds give today (27,515 steps, 389 preemptions)."""
    if len(DONE) < NUM_WORKLOADS:
        pytest.skip("only some of the workloads ran, or one failed")
    assert TALLY.steps >= 20_000
    assert TALLY.requests >= 2_500
    assert TALLY.preemptions >= 200
    assert TALLY.hits >= 6_000
    assert TALLY.chunks >= 2_500
    assert TALLY.update_batches >= 80
    assert TALLY.aborts >= 200
    assert TALLY.errors >= 100
    assert TALLY.groups >= 250


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(3, 103))
def test_company_changes_no_token_at_length(hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        try:
            run_workload(seed)
        except Exception as error:
            error.add_note(f"replay: Workload({seed}).run()")
            raise


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_seed_replays_to_the_same_events(seed):
    first, second = Workload(seed), Workload(seed)
    first.run()
    second.run()
    assert first.host.log == second.host.log


# S1: budget and slots.


def test_a_step_uses_its_budget_and_its_slots_and_no_more():
    host = Host(max_num_seqs=3, max_num_batched_tokens=8)
    for index in range(10):
        host.add(prompt(5, 10 * index), max_tokens=6)
    tokens, rows = [], []
    while host.scheduler.has_unfinished:
        work = host.step()
        tokens.append(work.num_tokens)
        rows.append(len(host.scheduler.running))
    assert max(tokens) == 8
    assert max(rows) == 3
    host.check_results()


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
    assert request.state is RequestState.WAITING
    return request


def finished(host):
    request = host.add(prompt(5), max_tokens=1)
    host.step()
    assert request.state.is_finished
    return request


@pytest.mark.parametrize(
    "reach", [waiting, prefilling, decoding, preempted, finished], ids=lambda reach: reach.__name__
)
def test_abort_frees_all_in_any_state_and_a_second_abort_does_nothing(reach):
    host = Host(num_blocks=32)
    request = reach(host)
    state = request.state
    expected = state if state.is_finished else RequestState.FINISHED_ABORTED
    for _ in range(2):
        host.abort(request)
        host.scheduler.check()
        assert request.state is request.sequences[0].state is expected
        assert not any(request.sequences[0].pages)
    host.add(prompt(30, 7), max_tokens=10)
    host.run()


def test_a_request_ends_with_its_first_end():
    host = Host()
    request = decoding(host)
    host.finish(request.sequences[0], RequestState.FINISHED_STOPPED)
    ended = request.finished_time
    host.num_steps += 1
    host.scheduler.finish(request.sequences[0], RequestState.FINISHED_ABORTED)
    assert (request.state, request.finished_time) == (RequestState.FINISHED_STOPPED, ended)
    assert not host.scheduler.has_unfinished
    host.scheduler.check()


def test_a_group_ends_with_its_last_sequence():
    host = Host()
    request = host.add(prompt(5), max_tokens=50, n=3)
    host.step()
    for left in (2, 1):
        host.finish(request.live_sequences[0], RequestState.FINISHED_STOPPED)
        assert (len(request.live_sequences), request.state) == (left, RequestState.RUNNING)
        host.step()
    host.finish(request.live_sequences[0], RequestState.FINISHED_STOPPED)
    assert request.state is RequestState.FINISHED_STOPPED
    assert not host.scheduler.has_unfinished


# S3, S4: progress.


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_pool_that_holds_one_request_serves_them_one_after_another(enable_prefix_caching):
    host = Host(num_blocks=1 + 5, block_size=4, enable_prefix_caching=enable_prefix_caching)
    for index in range(5):
        host.add(prompt(9, 20 * index), max_tokens=12)  # The last token needs no slot: 20 fill 5 pages exactly.
    host.run()


@pytest.mark.skipif(not __debug__, reason="python -O leaves out what this looks for")
def test_a_request_that_can_never_fit_is_not_queued():
    host = Host(num_blocks=1 + 5, block_size=4, max_num_seqs=2)
    for too_much in ({"max_tokens": 13}, {"max_tokens": 1, "n": 3}):
        with pytest.raises(AssertionError):
            host.add(prompt(9), **too_much)
    assert not host.scheduler.has_unfinished


def test_a_lone_request_may_use_what_the_watermark_keeps_from_newcomers():
    for watermark, state in [(0.0, RequestState.RUNNING), (0.5, RequestState.WAITING)]:
        host = Host(num_blocks=1 + 10, block_size=4, max_num_batched_tokens=64, watermark=watermark)
        first = host.add(prompt(30), max_tokens=8)
        second = host.add(prompt(5, 500), max_tokens=2)
        host.step()  # 8 pages of 10 for the first; the 2 that are left would do for the second.
        assert (first.state, second.state) == (RequestState.RUNNING, state)
        host.run()


# S5, S6: nobody starves.


def test_the_oldest_request_is_in_every_step_however_small_the_pool():
    host = Host(num_blocks=1 + 12, block_size=4, enable_prefix_caching=False)
    requests = [host.add(prompt(4, 20 * index), max_tokens=44) for index in range(6)]
    host.run()  # `step` holds each step against it.
    assert host.scheduler.num_preemptions >= 3
    assert requests[0].num_preemptions == 0


def test_nobody_is_admitted_in_a_step_that_preempted():
    host = Host(num_blocks=1 + 12, block_size=4)
    for index in range(6):
        host.add(prompt(4, 20 * index), max_tokens=44)
    num_preempting = 0
    while host.scheduler.has_unfinished:
        before = list(host.scheduler.running)
        work = host.step()
        if work.preempted:
            num_preempting += 1
            assert {item.sequence.request for item in work.scheduled} <= set(before) - set(work.preempted)
    assert num_preempting


def test_a_long_prompt_is_passed_by_no_later_one_and_decoding_goes_on_beside_it():
    host = Host(num_blocks=200, max_num_batched_tokens=16)
    short = host.add(prompt(3, 900), max_tokens=40)
    host.step()
    long = host.add(prompt(100), max_tokens=5)
    for index in range(20):
        host.add(prompt(3, 300 + 10 * index), max_tokens=5)
    for _ in range(7):  # ceil(100 / 15): all of the budget that decoding leaves.
        scheduled = [item.sequence.request for item in host.step().scheduled]
        assert scheduled[:2] == [short, long]
    assert long.sequences[0].num_output_tokens == 1
    host.run()


# S7: preemption changes no token.


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_preempted_run_draws_what_an_unbroken_one_draws(enable_prefix_caching, n):
    outputs, preemptions = [], []
    for num_blocks in (1 + 60, 1 + 300):
        host = Host(num_blocks=num_blocks, enable_prefix_caching=enable_prefix_caching, max_num_seqs=8, watermark=0.0)
        for index in range(8):
            host.add(prompt(10, 3 * index), max_tokens=60, n=n)
        host.run()
        outputs.append([sequence.token_ids for request in host.requests for sequence in request.sequences])
        preemptions.append(host.scheduler.num_preemptions)
    assert outputs[0] == outputs[1]
    assert preemptions[0] >= 2
    assert preemptions[1] == 0


def test_finding_its_own_pages_after_a_preemption_is_no_cache_hit():
    """P9: prompts that share nothing hit nothing, though resumed requests find their pages."""
    host = Host(num_blocks=1 + 24)
    for index in range(4):
        host.add(prompt(20, 100 * index), max_tokens=60)
    found = []
    while host.scheduler.has_unfinished:
        work = host.step()
        found += [item.start for item in work.scheduled if item.sequence.request.num_preemptions and item.start]
    host.check_results()
    assert host.scheduler.num_preemptions >= 1
    assert found
    assert (host.blocks.num_queried_tokens, host.blocks.num_hit_tokens) == (80, 0)
    assert [request.num_cached_tokens for request in host.requests] == [0] * 4


def test_a_shared_prefix_is_computed_once_and_counted():
    host = Host()
    for _ in range(3):
        host.add(prompt(10), max_tokens=2)
        host.run()
    assert [request.num_cached_tokens for request in host.requests] == [0, 8, 8]
    assert (host.blocks.num_queried_tokens, host.blocks.num_hit_tokens) == (30, 16)


# S9, S10.


def test_no_token_is_drawn_before_the_last_chunk_of_a_prompt():
    host = Host(max_num_batched_tokens=8)
    request = host.add(prompt(20), max_tokens=2)
    drawn = []
    for _ in range(4):
        host.step()
        drawn.append(request.sequences[0].num_output_tokens)
    assert drawn == [0, 0, 1, 2]
    assert host.scheduler.num_prefill_chunks == 2


def test_a_slot_that_changes_hands_takes_nothing_along():
    """S10: with one slot, each request samples with its own seed, temperature and limits."""
    host = Host(max_num_seqs=1, max_num_batched_tokens=4)
    kinds = [
        SamplingParams(seed=1, temperature=0.5, top_k=5),
        SamplingParams(seed=2, top_p=0.3),
        SamplingParams(min_p=0.2),
    ]
    for params in kinds:
        host.add(prompt(4), max_tokens=6, params=params)
    host.run()
    # One that never samples in the slot, between two that do.
    aborted = host.add(prompt(12, 50), max_tokens=6, params=kinds[0])
    host.step()
    host.abort(aborted)
    host.add(prompt(4), max_tokens=6, params=SamplingParams(seed=3))
    host.run()


def test_ended_requests_are_let_go():
    host = Host(max_num_seqs=2)
    for index in range(4):
        host.add(prompt(5, 20 * index), max_tokens=3).request_id = "let go"
    host.run()
    host.requests.clear()
    gc.collect()
    kept = [each for each in gc.get_objects() if isinstance(each, Sequence) and each.request.request_id == "let go"]
    assert not kept


# P8: values that are not finite.


def test_a_page_gone_bad_fails_those_that_read_it_and_no_later_request():
    """The bad page was found in the cache: nobody who fails wrote it, and yet it must not be found again."""
    host = Host()
    host.add(prompt(8), max_tokens=1)
    host.run()
    bad_page = host.blocks.page_of_hash[next(key for key in host.blocks.page_of_hash)]
    readers = [host.add(prompt(10), max_tokens=5), host.add(prompt(11), max_tokens=5)]
    neighbour = host.add(prompt(4, 500), max_tokens=3)
    host.device.keys[bad_page * 4 + 1] = NAN
    host.step()
    assert [request.state for request in readers] == [RequestState.FINISHED_ERROR] * 2
    later = host.add(prompt(10), max_tokens=5)
    while host.scheduler.has_unfinished:
        host.step()
    for request in (neighbour, later):
        tokens, state = host.solo(request)
        assert (request.sequences[0].token_ids[len(request.prompt_token_ids) :], request.state) == (tokens, state)
    assert later.num_cached_tokens == 0
    assert host.blocks.num_used == 0
