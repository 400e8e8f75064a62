"""How requests fork and end, how results are appended, and what a restart leaves. Small pools, exact numbers."""

import pytest

from jpaged.errors import InvalidRequestError
from jpaged.kv_cache.page_pool import NULL_PAGE
from jpaged.request import RequestState

from ..host_requests import SWAP, decodes, prompt, samples
from ..symbolic import Host


class CountingGate:
    """A gate that admits every request and remembers which run."""

    version = 0

    def fault_of(self, request):
        return None

    def __init__(self):
        self.inside = []

    def admits(self, request):
        return True

    def enter(self, request):
        self.inside.append(request)

    def leave(self, request):
        self.inside.remove(request)


def chunks(work):
    """Return (sample, first position, tokens, samples that draw) of each chunk."""
    return [
        (chunk.sequence.index, chunk.start, chunk.num_tokens, [sample.index for sample in chunk.samples])
        for chunk in work.chunks
    ]


# Forks: whether they fit.


def refusal_of_a_fork(host, parent):
    """Add one more sample; return the error if it is refused, which then changes nothing, or an empty string."""
    num_live = len(parent.request.live)
    try:
        host.fork(parent)
        return ""
    except InvalidRequestError as error:
        return str(error) if len(parent.request.live) == num_live else "it has changed the request"


@pytest.mark.parametrize(
    ("max_tokens", "num_pages"), [(8, 1 + 2 * 2), (9, 1 + 2 * 3)], ids=["up to a page's end", "one token more"]
)
def test_a_fork_is_refused_if_the_pool_lacks_one_page_for_both_at_full_length(max_tokens, num_pages):
    """Parent and fork share their first page, and compute 5 + max_tokens − 1 tokens each: the last token ends them."""
    for num_missing in (0, 1):
        host = Host(num_blocks=1 + num_pages - num_missing)
        request = host.add(prompt(5), max_tokens=max_tokens)
        host.step()
        refusal = refusal_of_a_fork(host, request.sequences[0])
        assert (f"up to {num_pages} pages, allowed: {num_pages - 1} pages" in refusal) == bool(refusal) == num_missing
        host.run()


def test_a_fork_shares_no_more_than_all_samples_of_its_request_share():
    """Three samples of 12 tokens with one page in common, though fork and parent have two: 1 + 3 × 2 pages."""
    for num_blocks, is_refused in [(1 + 7, False), (1 + 6, True)]:
        host = Host(num_blocks=num_blocks)
        request = host.add(prompt(5), max_tokens=8, params=samples(2))
        for _ in range(4):
            host.step()
        assert len(request.sequences[0].token_ids) == 9
        assert ("samples of one request" in refusal_of_a_fork(host, request.sequences[0])) == is_refused
        host.run()


def test_a_token_in_flight_is_not_counted_among_those_that_a_fork_shares():
    """The fork draws its own: of 8 known tokens, 7 are shared and fill one page; the two take 1 + 2 × 2."""
    for num_blocks, is_refused in [(1 + 5, False), (1 + 4, True)]:
        host = Host(num_blocks=num_blocks)
        request = host.add(prompt(5), max_tokens=8)
        for _ in range(3):
            host.step()
        host.dispatch()
        sequence = request.sequences[0]
        assert (len(sequence.token_ids), sequence.num_tokens) == (8, 9)
        assert ("samples of one request" in refusal_of_a_fork(host, sequence)) == is_refused
        host.retire()
        host.run()


def test_forks_may_use_every_slot_and_no_more():
    host = Host(max_num_seqs=3)
    request = host.add(prompt(5), max_tokens=8)
    host.step()
    with pytest.raises(InvalidRequestError, match="4 samples of one request, which would take 4 of 3 slots"):
        host.fork(request.sequences[0], 3)
    host.fork(request.sequences[0], 2)
    assert host.scheduler.counts["fork"] == 2
    host.run()


# Forks: when they go on.


@pytest.mark.parametrize("windows", [(None,), (None, 3), (2, 6)], ids=str)
@pytest.mark.parametrize("is_swapped", [False, True], ids=["running", "swapped"])
def test_forks_behind_earlier_tokens_share_what_windows_have_not_passed(windows, is_swapped):
    """Where a window has passed, they compute their tokens anew; `Host` compares each with a run of its own."""
    host = Host(windows=windows, num_blocks=200, num_host_blocks=200, max_num_seqs=8, preemption=SWAP)
    request = host.add(prompt(5), max_tokens=40)
    parent = request.sequences[0]
    while len(parent.token_ids) < 24:
        host.step()
    if is_swapped:
        host.scheduler.preempt(request)
        assert request.state is RequestState.SWAPPED
    for num_tokens, given in ((23, None), (22, [99]), (16, [77, 78]), (9, None), (5, [55])):
        (child, *_) = host.fork(parent, len(given or [0]), num_tokens, given)
        is_shared = windows == (None,) or num_tokens >= 22
        assert (child.fork_len == num_tokens) == (is_shared or request.state is RequestState.WAITING)
    host.abort_sequence(parent)
    host.run()
    assert [child.token_ids[22] for child in request.sequences[2:3]] == [99]
    assert [child.token_ids[16] for child in request.sequences[3:5]] == [77, 78]


@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("prompt_len", [1, 5])
def test_a_fork_goes_on_in_the_next_step_if_its_parent_is_computed(prompt_len, num_steps):
    """All but the last token is shared, even if that is one token only."""
    host = Host()
    request = host.add(prompt(prompt_len), max_tokens=8)
    for _ in range(num_steps):
        host.step()
    host.fork(request.sequences[0])
    work = host.step()
    assert chunks(work) == [(1, prompt_len + num_steps - 1, 1, [1])]
    assert decodes(work) == [(0, 0)]
    host.run()


def test_a_fork_of_a_waiting_one_token_prompt_draws_from_its_parent_s_chunk():
    host = Host()
    request = host.add(prompt(1), max_tokens=8)
    host.fork(request.sequences[0])
    assert chunks(host.step()) == [(0, 0, 1, [0, 1])]
    host.run()


# Ends.


def waiting(host):
    return host.add(prompt(5))


def prefilling(host):
    request = host.add(prompt(40))
    host.step()
    return request


def decoding(host):
    request = host.add(prompt(5))
    host.step()
    return request


def swapped(host):
    """Step until a request is swapped out: both grow to 7 pages, and there are 12."""
    requests = [host.add(prompt(5, start), max_tokens=24) for start in (0, 500)]
    while not requests[1].num_swaps:
        host.step()
    return requests[1]


@pytest.mark.parametrize("reach", [waiting, prefilling, decoding, swapped], ids=lambda reach: reach.__name__)
def test_an_abort_is_counted_once_by_the_stage_in_which_it_comes(reach):
    host = Host(num_blocks=1 + 12, num_host_blocks=20, preemption=SWAP)
    request = reach(host)
    for _ in range(2):
        host.abort(request)
    aborts = {name: count for name, count in host.scheduler.counts.items() if name.startswith("abort_")}
    assert aborts == {f"abort_{reach.__name__}": 1}


def test_an_end_is_reported_once_with_its_time():
    host = Host()
    requests = [host.add(prompt(5, 100 * index), max_tokens=1 + index) for index in range(2)]
    for host.now in (3.0, 7.0):
        host.step()
    assert list(host.scheduler.ended) == requests
    assert [request.finished_time for request in requests] == [3.0, 7.0]


def test_a_step_interrupted_while_it_was_completed_leaves_no_trace_after_a_restart():
    host = Host()
    host.add(prompt(5), max_tokens=3)
    host.blocks.store.take_moves = None
    with pytest.raises(TypeError):
        host.core.dispatch()
    del host.blocks.store.take_moves
    host.restart()
    host.run()


def test_samples_whose_parent_s_end_was_interrupted_wait_for_it_no_more():
    host = Host()
    request = host.add(prompt(5), max_tokens=9, params=samples(3))
    host.step()
    first, second, third = request.sequences
    first.state = RequestState.FINISHED_ABORTED  # What `finish` had done when it was interrupted.
    request.live.remove(first)
    host.restart()
    assert (second.parent, third.parent) == (None, second)
    host.run()


@pytest.mark.parametrize("n", [1, 2])
def test_an_interrupted_end_is_reported_once_after_a_restart(n):
    """The interrupt comes after the last sequence has left its request and before the request has ended."""
    host = Host()
    request = host.add(prompt(5), max_tokens=2, params=samples(n))
    other = host.add(prompt(6, 100), max_tokens=9)
    host.step()
    scheduler = host.scheduler
    clock, scheduler.clock = scheduler.clock, None
    with pytest.raises(TypeError):
        host.core.abort(request)
    assert not request.state.is_finished
    scheduler.clock = clock
    host.restart()
    assert (request.state, list(host.scheduler.ended)) == (RequestState.FINISHED_ABORTED, [request])
    host.run()
    assert list(host.scheduler.ended) == [request, other]


# Pages of retired steps.


@pytest.mark.parametrize(("chunk", "num_passed"), [(6, 0), (7, 1)])
def test_a_window_passes_a_page_once_the_chunk_that_saw_it_last_has_retired(chunk, num_passed):
    """With a window of 4, the query at position 6 sees 3 to 6 and with that page 0; the one at position 7 does not."""
    host = Host(windows=(4,), long_prefill_token_threshold=chunk)
    sequence = host.add(prompt(15)).sequences[0]
    host.dispatch()
    assert NULL_PAGE not in sequence.pages[0]
    host.retire()
    assert (sequence.num_passed, sequence.pages[0].count(NULL_PAGE)) == ([num_passed], num_passed)
    host.run()


def test_a_window_passes_a_page_with_the_first_token_that_does_not_see_it():
    """With a window of 5, the query at position 8, of the ninth token, sees 4 to 8, and so on every fourth token."""
    host = Host(windows=(5,))
    sequence = host.add(prompt(5), max_tokens=14).sequences[0]
    num_passed = {}
    for _ in range(13):
        host.step()
        num_passed[len(sequence.token_ids)] = sequence.num_passed[0]
    assert num_passed == {num_known: (num_known - 5) // 4 for num_known in range(6, 19)}
    host.run()


def test_a_page_is_published_with_the_token_after_its_last_one():
    """Only a finite token drawn after a page shows that the page holds no NaN."""
    host = Host()
    sequence = host.add(prompt(3), max_tokens=14).sequences[0]
    published = {}
    while host.scheduler.has_unfinished:
        host.step()
        published[len(sequence.token_ids)] = len(host.blocks.device.key_of)
    assert published == {num_known: (num_known - 1) // 4 for num_known in range(4, 18)}


# A device that starts anew.


def test_a_restart_counts_as_a_preemption_of_requests_that_had_begun():
    host = Host(num_blocks=1 + 12, num_host_blocks=20, preemption=SWAP, max_num_seqs=2)
    second = swapped(host)
    requests = [host.requests[0], second, host.add(prompt(5, 900))]
    assert [request.num_preemptions for request in requests] == [0, 1, 0]
    host.restart()
    assert [request.num_preemptions for request in requests] == [1, 2, 0]
    assert host.scheduler.counts["restart"] == 1
    host.run()


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_after_a_restart_no_request_is_in_the_gate_nothing_in_flight_and_every_slot_free(num_ahead):
    gate = CountingGate()
    host = Host(gate=gate, max_num_seqs=3)
    requests = [host.add(prompt(5, 100 * index), max_tokens=20) for index in range(3)]
    host.step()
    for _ in range(num_ahead):
        host.dispatch()
    assert gate.inside == requests
    host.restart()
    scheduler = host.scheduler
    assert gate.inside == []
    assert not any(scheduler.is_in_flight(sequence) for request in requests for sequence in request.live)
    assert sorted(scheduler.free_slots) == [1, 2, 3]
    assert scheduler.retired_step == host.blocks.device.retired_step == scheduler.step == 1 + num_ahead
    assert chunks(host.step()) == [(0, 0, 6, [0]), (0, 0, 6, [0]), (0, 0, 4, [])]  # 6 known tokens of each.
    host.run()
