"""The scheduler's promises over many steps: fairness, preemption, samples that share pages, faulty values.

`test_simulation` holds random lives to all promises at every step; `test_scheduler_steps` holds single steps exactly.
"""

import gc

import pytest

from jpaged.kv_cache.page_store import MoveKind
from jpaged.request import CacheKey, RequestState, SampleSequence
from jpaged.scheduling.request_queue import POLICIES

from ..host_requests import SWAP, prompt, samples
from ..invariants import check_scheduler
from ..symbolic import NAN, Host


def rows(work):
    return [*work.decodes, *(chunk.sequence for chunk in work.chunks)]


def num_preemptions(host):
    return sum(host.scheduler.counts[f"preemptions_{mode}"] for mode in ("recompute", "swap"))


# Fairness.


def test_the_oldest_request_is_in_every_step_however_small_the_pool():
    host = Host(num_blocks=1 + 12, block_size=4, enable_prefix_caching=False)
    requests = [host.add(prompt(4, 20 * index), max_tokens=44) for index in range(6)]
    while host.scheduler.has_unfinished:
        oldest = next(request for request in requests if not request.state.is_finished)
        assert oldest.live[0] in rows(host.step())
    host.check_end()
    assert num_preemptions(host) >= 3
    assert requests[0].num_preemptions == 0


def test_the_last_request_in_the_policy_s_order_is_preempted_first():
    """Under `priority` this is the highest number; among equals the one that arrived last."""
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


def test_no_later_prompt_passes_a_long_one_and_others_decode_beside_it():
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


# Preemption.


def test_pages_that_a_window_has_passed_do_not_keep_a_swapped_request_from_resuming():
    """Two of its chunks were computed when it was preempted, one still in flight: 3 + 5 pages, of which it sees one."""
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


def test_prompt_positions_not_scored_before_a_preemption_are_computed_after_it():
    """This holds though the whole prompt is pinned in the cache."""
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


def test_ended_requests_are_not_kept_in_memory():
    """A request is freed by the step after its last one."""
    host = Host(max_num_seqs=2)
    for index in range(4):
        host.add(prompt(5, 20 * index), max_tokens=3).request_id = "ended"
    host.run()
    host.add(prompt(5), max_tokens=2)
    host.run()
    of_the_test = host.requests, host.solos, host.ends, host.first_starts, host.num_claimed, host.num_recomputed
    for memory in (*of_the_test, host.scheduler.ended):
        memory.clear()
    gc.collect()
    kept = [
        each for each in gc.get_objects() if isinstance(each, SampleSequence) and each.request.request_id == "ended"
    ]
    assert not kept


# Samples and forks.


def test_samples_share_the_prompt_s_pages_and_copy_the_partly_filled_one():
    host = Host(max_num_batched_tokens=64, enable_prefix_caching=False)
    request = host.add(prompt(10), max_tokens=6, params=samples(4))
    work = host.step()
    assert [(chunk.num_tokens, len(chunk.samples)) for chunk in work.chunks] == [(10, 4)]
    assert host.blocks.device.num_used == 3
    work = host.step()
    assert [move.kind for move in work.moves] == [MoveKind.COPY] * 3
    assert host.blocks.device.num_used == 2 + 4
    host.run()
    outputs = {tuple(sequence.token_ids) for sequence in request.sequences}
    assert len(outputs) == 4


@pytest.mark.parametrize("num_more", [0, 1, 8, 30])
def test_a_fork_that_waits_for_a_slot_takes_no_more_pages_than_it_was_accepted_with(num_more):
    """A window passes meanwhile what the fork shares with its parent. Both are swapped now and then."""
    host = Host(
        num_blocks=1 + (39 + 2 * 16) + (2 * 8) + num_more,
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
    assert [sequence.state for sequence in forked.sequences] == [RequestState.FINISHED_LENGTH] * 2
    assert host.scheduler.counts["preemptions_swap"] < 20
    host.check_end()


# Values that are not finite (P8).


def test_a_cached_page_gone_bad_fails_its_readers_and_no_later_request():
    """No failing request has written the page, and yet a prefix lookup must not find it again."""
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
