"""Admission of waiting and swapped requests: each rule at the page, slot, token or second where it takes effect."""

import pytest

from jpaged.errors import QueueFullError
from jpaged.request import CacheKey, RequestState
from jpaged.scheduling.admission import MAX_BYPASSES
from jpaged.scheduling.preemption import PreemptionPolicy
from jpaged.scheduling.request_queue import POLICIES, QueueLimits

from ..host_requests import SWAP, prompt, samples
from ..shrinking_pool import withdraw
from ..simulation import AdapterGate
from ..symbolic import POISON_TOKEN, Host

RUNNING, SWAPPED, WAITING = RequestState.RUNNING, RequestState.SWAPPED, RequestState.WAITING


def chunks(work):
    return [(chunk.sequence.request, chunk.num_tokens) for chunk in work.chunks]


def leave_free(host, num_pages):
    """Give the pool the size at which this many pages are free."""
    device = host.blocks.device
    withdraw(device, device.num_free - num_pages)
    assert device.num_free == num_pages


# Budget and slots.


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [((5, 4, 20), [5, 4, 7]), ((10, 5, 3), [10, 5, 1]), ((10, 6, 3), [10, 6])],
    ids=["seven tokens left", "one token left", "none left"],
)
def test_newcomers_share_what_the_step_has_left(lengths, expected):
    host = Host(max_num_batched_tokens=16)
    requests = [host.add(prompt(length, 100 * index)) for index, length in enumerate(lengths)]
    assert chunks(host.step()) == list(zip(requests, expected, strict=False))
    host.run()


@pytest.mark.parametrize(("length", "is_admitted"), [(10, True), (11, False)])
@pytest.mark.parametrize("num_cached", [0, 8])
def test_a_prompt_computed_whole_is_admitted_if_its_uncached_part_fits_the_step(num_cached, length, is_admitted):
    host = Host(enable_chunked_prefill=False, max_num_batched_tokens=16)
    if num_cached:
        host.add(prompt(num_cached), max_tokens=1)
        host.run()
    other = host.add(prompt(6, 500))
    request = host.add(prompt(num_cached + length))
    assert chunks(host.step()) == [(other, 6), (request, 10)][: 1 + is_admitted]
    host.abort(request)
    host.run()


@pytest.mark.parametrize(("n", "state"), [(3, RUNNING), (4, WAITING)])
def test_a_request_is_admitted_only_with_slots_for_all_of_its_samples(n, state):
    host = Host(max_num_seqs=4)
    host.add(prompt(3))
    request = host.add(prompt(3, 100), params=samples(n))
    host.step()
    assert request.state is state
    host.run()


# Pages.


@pytest.mark.parametrize(
    ("start", "length", "n", "watermark", "num_pages"),
    [
        (500, 6, 1, 0.0, 2),
        (500, 6, 2, 0.0, 3),  # Each sample writes the partly filled second page itself.
        (0, 18, 1, 0.0, 2),  # Three pages of five are shared with the running request.
        (500, 6, 1, 0.25, 3),  # Of 4 + 3 pages one stays free; of 4 + 2 as well.
        (500, 10, 1, 0.25, 5),  # Of 4 + 5 pages two stay free; of 4 + 4 as well.
    ],
    ids=["one sample", "two samples", "a shared prefix", "watermark rounded down", "watermark exact"],
)
def test_a_newcomer_is_admitted_beside_others_when_its_pages_and_the_reserve_are_free(
    start, length, n, watermark, num_pages
):
    host = Host(num_blocks=1 + 16, max_num_batched_tokens=64, watermark=watermark)
    host.add(prompt(13), max_tokens=4)  # 4 pages, to the end.
    host.step()
    request = host.add(prompt(length, start), params=samples(n), max_tokens=2)
    leave_free(host, num_pages - 1)
    host.step()
    assert request.state is WAITING
    leave_free(host, num_pages)
    host.step()
    assert request.state is RUNNING
    host.run()


def test_the_watermark_keeps_nothing_from_a_request_that_runs_alone():
    host = Host(num_blocks=1 + 5, max_num_batched_tokens=64, watermark=0.5)
    request = host.add(prompt(20), max_tokens=1)
    assert chunks(host.step()) == [(request, 20)]
    host.check_end()


def test_a_request_that_lacked_pages_is_admitted_once_others_have_computed_its_prefix():
    """The request is admitted though no more pages are free than before."""
    host = Host(num_blocks=1 + 10, long_prefill_token_threshold=8)
    host.add(prompt(24), max_tokens=4)
    request = host.add(prompt(22), max_tokens=2)
    states = []
    for _ in range(4):  # The first one's prompt takes three steps; 4 pages are free, and the second wants 6.
        host.step()
        states.append(request.state)
    assert states == [WAITING, WAITING, WAITING, RUNNING]
    assert request.num_cached_tokens == 20
    host.run()


def test_a_passed_request_needs_no_free_pages_for_those_shared_with_the_one_that_passed_it():
    host = Host(num_blocks=1 + 14, max_num_batched_tokens=64)
    host.add(prompt(24), max_tokens=1)
    host.run()
    first = host.add(prompt(13, 500), max_tokens=3)
    host.step()
    large = host.add([*prompt(24), *prompt(21, 700)], max_tokens=2)  # 12 pages, and 10 are free, 6 of them cached.
    small = host.add([*prompt(24), *prompt(2, 900)], max_tokens=20)
    host.step()
    assert (large.state, small.state) == (WAITING, RUNNING)
    host.abort(first)
    host.step()
    assert large.state is RUNNING, "7 are free, and 6 of its 12 are in use"
    host.run()


@pytest.mark.parametrize("preemption", [PreemptionPolicy(), SWAP], ids=["recompute", "swap"])
def test_a_preempted_request_runs_again_only_after_all_of_its_results(preemption):
    host = Host(num_blocks=1 + 14, num_host_blocks=20, max_num_batched_tokens=64, preemption=preemption)
    host.add(prompt(15), max_tokens=8)  # Asks for a fifth page in its third step.
    last = host.add(prompt(13, 100), max_tokens=8)
    host.step()
    leave_free(host, 0)
    host.dispatch()
    assert [each.request for each in host.dispatch().preempted] == [last]
    leave_free(host, 5)
    host.dispatch()
    assert last.state is not RUNNING, "the token that its second step draws is not known yet"
    host.retire()
    host.dispatch()
    assert last.state is RUNNING
    while host.core.in_flight:
        host.retire()
    host.run()


# Requests that pass, and requests that are passed.


def beside_a_large_one(num_large, num_small):
    """Return a host with a pool of 14 pages: 5 are used, each large request wants 10, each small one 1."""
    host = Host(num_blocks=1 + 14, max_num_seqs=16, max_num_batched_tokens=64)
    host.add(prompt(17), max_tokens=4)
    large = [host.add(prompt(37, 100 * index), max_tokens=2) for index in range(1, 1 + num_large)]
    small = [host.add(prompt(2, 600 + 10 * index), max_tokens=2) for index in range(num_small)]
    return host, large, small


@pytest.mark.parametrize("num_large", [1, 2])
def test_eight_requests_may_pass_one_that_does_not_fit_and_the_ninth_waits_behind_it(num_large):
    host, large, small = beside_a_large_one(num_large, 9)
    host.step()
    assert [request.state for request in small] == 8 * [RUNNING] + [WAITING]
    assert [request.admission.num_bypassed for request in large] == num_large * [8]
    assert host.scheduler.counts["bypass"] == num_large * 8
    host.step()
    host.step()
    assert small[-1].state is WAITING, "there has been room for it all the time"
    host.run()
    assert [request.admission.num_bypassed for request in large] == num_large * [0], "each may be passed as often again"


@pytest.mark.parametrize(("num_large", "state"), [(3, RUNNING), (4, WAITING)])
def test_a_step_looks_past_three_requests_that_do_not_fit_but_not_past_four(num_large, state):
    host, large, [small] = beside_a_large_one(num_large, 1)
    host.step()
    assert small.state is state
    assert [request.state for request in large] == num_large * [WAITING]
    assert list(host.scheduler.waiting)[:num_large] == large
    host.run()


class CountingGate(AdapterGate):
    """Counts its answers, and refuses some adapters for ever."""

    num_asked = 0

    def admits(self, request):
        self.num_asked += 1
        return super().admits(request)

    def fault_of(self, request):
        return "no such adapter" if request.cache_key.lora_name == "none" else None


def test_requests_that_the_gate_refuses_delay_no_other_and_are_asked_again_only_once_it_has_changed():
    gate = CountingGate(1)
    host = Host(gate=gate, max_num_seqs=4)
    first = host.add(prompt(3), max_tokens=8, cache_key=CacheKey(lora_name="a"))
    refused = [host.add(prompt(1, index), max_tokens=2, cache_key=CacheKey(lora_name="b")) for index in range(100)]
    last = host.add(prompt(3, 500), max_tokens=8, cache_key=CacheKey(lora_name="a"))
    host.step()
    assert [first.state, last.state] == [RUNNING, RUNNING]
    assert {request.state for request in refused} == {WAITING}
    assert host.scheduler.counts["bypass"] == 0, "the others wait for the gate alone"
    assert len(host.scheduler.waiting) == 100
    host.step()
    num_asked = gate.num_asked
    for _ in range(3):
        host.step()
    assert gate.num_asked == num_asked
    host.abort(first)
    host.abort(last)
    host.step()
    assert [request.number for request in host.scheduler.running] == [1, 2, 3, 4], "in the order of their arrival"
    host.run()


def test_a_request_that_the_gate_would_refuse_for_ever_ends_with_its_reason():
    host = Host(gate=CountingGate(1))
    lost = host.add(prompt(3), cache_key=CacheKey(lora_name="none"))
    other = host.add(prompt(3, 500), max_tokens=8)
    host.step()
    assert (lost.state, lost.error) == (RequestState.FINISHED_IGNORED, "no such adapter")
    assert other.state is RUNNING
    host.run()


# Time.


def test_no_request_is_delayed_before_a_step_with_newcomers_has_been_timed():
    host = Host(delay_factor=2.0)
    host.now = 4.0
    requests = [host.add(prompt(3, 10 * index)) for index in range(2)]
    host.now = 5.0
    host.step()
    assert [request.state for request in requests] == [RUNNING, RUNNING]
    host.run()


def test_no_request_is_delayed_while_none_runs():
    host = Host(delay_factor=2.0)
    host.add(prompt(3), max_tokens=2)
    for host.now in (0.0, 1.0):
        host.step()
    assert not host.scheduler.running
    request = host.add(prompt(3, 100))
    host.step()
    assert request.state is RUNNING
    host.run()


def step_for(host, seconds):
    host.dispatch()
    host.now += seconds
    host.retire()


@pytest.mark.parametrize("others_s", [(), (0.25, 0.5), (8.0,)], ids=["no others", "short ones", "a long one"])
@pytest.mark.parametrize("pause_s", [0.0, 3600.0])
@pytest.mark.parametrize("before_s", [1.0, 3.0])
def test_the_delay_follows_the_last_step_with_newcomers_alone(before_s, pause_s, others_s):
    host = Host(delay_factor=2.0)
    host.now = 10.0
    host.add(prompt(3), max_tokens=40)
    step_for(host, before_s)
    host.add(prompt(3, 100), max_tokens=40)
    host.now = 100.0
    step_for(host, 2.0)
    host.now += pause_s
    for seconds in others_s:
        step_for(host, seconds)
    late = host.add(prompt(3, 200), max_tokens=2)
    arrival, states = host.now, []
    for host.now in (arrival, arrival + 4.0, arrival + 4.25):
        host.step()
        states.append(late.state)
    assert states == [WAITING, WAITING, RUNNING]
    host.run()


def test_the_delay_follows_the_step_with_newcomers_not_one_that_retires_before_it():
    host = Host(delay_factor=2.0)
    host.add(prompt(3), max_tokens=40)
    host.step()
    host.dispatch()
    host.add(prompt(3, 100), max_tokens=40)
    host.now = 10.0
    assert chunks(host.dispatch())  # Takes 3 seconds; the step before it ends after one of them.
    host.now = 11.0
    host.retire()
    host.now = 13.0
    host.retire()
    late, states = host.add(prompt(3, 200), max_tokens=2), []
    for host.now in (18.75, 19.0, 19.25):
        host.step()
        states.append(late.state)
    assert states == [WAITING, WAITING, RUNNING]
    host.run()


@pytest.mark.parametrize(("now", "state"), [(6.0, WAITING), (6.25, RUNNING)])
def test_the_delay_is_measured_though_each_step_has_newcomers(now, state):
    host = Host(delay_factor=2.0)
    host.add(prompt(3), max_tokens=40)
    host.dispatch()
    host.now = 0.5
    host.add(prompt(3, 100), max_tokens=40)
    host.now = 1.0
    assert chunks(host.dispatch())
    host.now = 2.0
    host.retire()  # The first one took 2 seconds, the second one is in flight.
    late = host.add(prompt(3, 200), max_tokens=2)
    host.now = now
    host.dispatch()
    assert late.state is state
    while host.core.in_flight:
        host.retire()
    host.run()


# Swapped requests.


def beside_a_swapped_one(length=15, n=1, max_tokens=4, **options):
    """Return a host, a running request with 5 pages, and one that was swapped out for it."""
    host = Host(
        num_blocks=1 + 16,
        num_host_blocks=50,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        preemption=SWAP,
        **options,
    )
    first, between = (host.add(prompt(16, 100 * index), max_tokens=8) for index in range(2))
    last = host.add(prompt(length, 300), max_tokens=max_tokens, params=samples(n))
    host.step()
    leave_free(host, 1)
    assert [each.request for each in host.step().preempted] == [last]  # Two want a fifth page.
    host.abort(between)
    assert (host.blocks.device.num_used, last.state) == (5, SWAPPED)
    return host, first, last


@pytest.mark.parametrize(
    ("length", "n", "watermark", "num_pages"),
    [
        (15, 1, 0.0, 4 + 1),
        (16, 1, 0.0, 4 + 1 + 1),  # Its last token begins a page.
        (15, 2, 0.0, 4 + 1 + 2),  # The partly filled page becomes two.
        (15, 1, 0.25, 4 + 1 + 3),  # A quarter of 5 + 8 stays free, and of 5 + 7.
    ],
    ids=["within a page", "at its end", "two samples", "watermark"],
)
def test_a_swapped_request_resumes_with_room_for_its_tokens_and_a_page_more_per_sample(length, n, watermark, num_pages):
    host, _, last = beside_a_swapped_one(length, n, watermark=watermark)
    leave_free(host, num_pages - 1)
    host.step()
    assert last.state is SWAPPED
    leave_free(host, num_pages)
    host.step()
    assert last.state is RUNNING
    host.run()


def test_a_swapped_decoder_needs_what_windows_see_and_a_page_more_in_each_group_however_large_a_step_may_be():
    """Each of the windows sees three of its 15 pages. A chunk of 64 tokens would touch 17, which it never takes."""
    host = Host(num_host_blocks=50, windows=(9, 9, 9), max_num_batched_tokens=64, preemption=SWAP)
    host.add(prompt(2, 500), max_tokens=40)
    request = host.add(prompt(58), max_tokens=20)
    host.step()
    host.step()
    host.scheduler.preempt(request)
    host.step()
    assert (request.num_swaps, request.state, request.admission.pages_needed) == (1, RUNNING, 3 * 3 + 3)
    host.run()


def test_a_swapped_request_beside_none_needs_no_page_more_than_it_holds():
    host, first, last = beside_a_swapped_one(max_tokens=2, watermark=0.25)
    host.abort(first)
    leave_free(host, 4)
    host.step()
    assert last.state is RequestState.FINISHED_LENGTH
    host.check_end()


def test_a_swapped_request_waits_for_a_slot_and_resumes_before_less_urgent_ones_start():
    host, _, last = beside_a_swapped_one(max_num_seqs=3, policy=POLICIES["priority"])
    less_urgent = host.add(prompt(2, 700), priority=1)
    leave_free(host, 4)  # One fewer than it needs.
    host.step()
    assert (last.state, less_urgent.state) == (SWAPPED, WAITING)
    urgent = [host.add(prompt(2, 600 + 10 * index), priority=-1) for index in range(2)]
    host.step()
    assert [request.state for request in (*urgent, last, less_urgent)] == [RUNNING, RUNNING, SWAPPED, WAITING]
    leave_free(host, 8)
    host.step()
    assert last.state is SWAPPED, "pages without a slot"
    host.abort(urgent[0])
    host.step()
    assert (last.state, less_urgent.state) == (RUNNING, WAITING)
    host.run()


def two_swapped(lengths, num_usable):
    """Return a host, a request that decodes, and two swapped out with 8 and 6 tokens of their prompts computed."""
    host = Host(
        num_blocks=1 + 40,
        num_host_blocks=50,
        max_num_batched_tokens=8,
        long_prefill_token_threshold=4,
        enable_prefix_caching=False,
        preemption=SWAP,
    )
    first = host.add(prompt(6), max_tokens=8)
    host.step()
    host.step()
    others = [host.add(prompt(length, 100 * index), max_tokens=2) for index, length in enumerate(lengths, 1)]
    for _ in range(2):
        assert chunks(host.step()) == list(zip(others, [4, 3], strict=True))
    withdraw(host.blocks.device, host.blocks.device.num_usable - num_usable)
    assert [each.request for each in host.step().preempted] == [others[1], others[0]]  # The first wants a third page.
    return host, first, others


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [((10, 9), [2, 3, 2]), ((14, 14), [4, 3])],
    ids=["tokens are left for a newcomer", "none are left"],
)
def test_swapped_requests_share_the_budget_in_order_and_newcomers_get_the_rest(lengths, expected):
    host, _, others = two_swapped(lengths, num_usable=4)
    leave_free(host, 20)
    newcomer = host.add(prompt(20, 500))
    # Of 8 tokens one is decoded, and none of a prompt computes more than 4 at once.
    assert chunks(host.step()) == list(zip([*others, newcomer], expected, strict=False))
    host.run()


def test_a_swapped_request_that_can_never_run_again_ends_and_the_next_one_resumes():
    host, first, (large, small) = two_swapped((22, 9), num_usable=6)
    host.abort(first)
    leave_free(host, 5)
    work = host.step()
    assert work.ignored == [large]
    assert (large.state, small.state) == (RequestState.FINISHED_IGNORED, RUNNING)
    assert "it needs up to 6 pages, and there are 5 pages of 4 tokens" in large.error
    host.run()


# Pinned prefixes.


def with_half_a_pinned_prefix(num_blocks):
    """Return a host with two pinned pages; the first was not finite and was forgotten, so that none is found."""
    host = Host(num_blocks=num_blocks, max_num_batched_tokens=64)
    host.add(prompt(9), max_tokens=1)
    host.run()
    assert host.blocks.prefixes.pin(prompt(8), CacheKey()) == 8
    host.add([*prompt(5), POISON_TOKEN], max_tokens=1)
    host.run()
    assert num_pinned(host) == 1
    return host


def num_pinned(host):
    return len(host.blocks.store.pinned_pages)


def test_pinned_pages_are_given_up_for_a_request_that_needs_them_once_no_other_runs():
    host = with_half_a_pinned_prefix(1 + 6)
    other = host.add(prompt(3, 500), max_tokens=3)
    request = host.add(prompt(21), max_tokens=3)  # 6 pages; it was accepted because two of them are pinned.
    while not other.state.is_finished:
        host.step()
        assert (request.state, num_pinned(host)) == (WAITING, 1)
    host.step()
    assert request.state is RUNNING
    host.run()


def test_pinned_pages_stay_beside_a_request_that_takes_all_other_pages():
    host = with_half_a_pinned_prefix(1 + 6)
    [pinned] = host.blocks.store.pinned_pages.values()
    request = host.add(prompt(20), max_tokens=3)
    host.dispatch()
    assert request.state is RUNNING
    assert [*host.blocks.store.pinned_pages.values()] == [pinned]
    host.retire()
    host.run()


def test_pinned_pages_stay_while_a_step_in_flight_will_free_enough():
    host = with_half_a_pinned_prefix(1 + 6)
    other = host.add(prompt(3, 500), max_tokens=3)
    host.dispatch()
    host.abort(other)
    request = host.add(prompt(20), max_tokens=3)
    host.dispatch()
    assert (request.state, num_pinned(host)) == (WAITING, 1)
    host.retire()
    host.dispatch()
    assert (request.state, num_pinned(host)) == (RUNNING, 1)
    host.retire()
    host.run()


def test_pinned_pages_are_given_up_for_a_swapped_request_that_holds_copies_of_them():
    host = Host(num_blocks=1 + 8, num_host_blocks=20, max_num_batched_tokens=64, preemption=SWAP)
    host.blocks.prefixes.pin(prompt(8), CacheKey())
    first = host.add(prompt(12), max_tokens=2)  # Wants a fourth page in its second and last step.
    last = host.add([*prompt(8), *prompt(9, 500)], max_tokens=4)  # Computes the pinned pages too: 5 pages in all.
    host.step()
    assert [each.request for each in host.step().preempted] == [last]
    assert first.state.is_finished
    leave_free(host, 4)
    assert num_pinned(host) == 2
    host.step()
    assert (last.state, num_pinned(host)) == (RUNNING, 0)
    host.run()


# After a fault.


def test_after_a_restart_the_queue_has_its_limits_and_counts_each_request_once():
    host = Host(limits=QueueLimits(waiting_tokens=15))
    for index in range(2):
        host.add(prompt(5, 100 * index))
    host.restart()
    host.add(prompt(5, 500))
    with pytest.raises(QueueFullError):
        host.add(prompt(5, 600))
    host.run()


# Prefixes that running requests compute. Pages have four tokens.


def test_requests_wait_for_a_prefix_that_a_running_one_computes_and_compute_only_the_rest():
    """Others pass them meanwhile. Pages that are found were published, so they are sound."""
    host = Host(max_num_batched_tokens=64)
    first, *others = [host.add(prompt(16) + prompt(3, 300 + 10 * i), max_tokens=2) for i in range(3)]
    stranger = host.add(prompt(6, 800), max_tokens=2)
    assert chunks(host.step()) == [(first, 19), (stranger, 6)]
    assert [request.state for request in others] == [WAITING, WAITING]
    assert chunks(host.step()) == [(request, 3) for request in others]
    assert [request.num_cached_tokens for request in others] == [16, 16]
    host.run()


def test_a_request_that_was_passed_too_often_waits_for_no_prefix():
    """Eight newcomers pass; then the prefix is computed twice."""
    host = Host(max_num_batched_tokens=128, max_num_seqs=32, long_prefill_token_threshold=12)
    host.add(prompt(40), max_tokens=2)
    request = host.add(prompt(48), max_tokens=2)
    strangers = [host.add(prompt(2, 500 + 10 * index), max_tokens=2) for index in range(MAX_BYPASSES + 1)]
    work = host.step()
    assert [one.state for one in strangers] == [RUNNING] * MAX_BYPASSES + [WAITING]
    assert request not in dict(chunks(work))
    assert request in dict(chunks(host.step()))
    assert strangers[-1].state is RUNNING
    host.run()


@pytest.mark.parametrize(
    ("num_same", "length", "waits"),
    [(8, 16, True), (8, 17, False), (16, 40, False), (4, 5, False), (3, 6, False)],
    ids=["half of its tokens", "less than half", "little of much", "the other has more to compute", "no full page"],
)
def test_a_request_waits_if_that_spares_it_half_and_the_other_is_not_far_from_done(num_same, length, waits):
    host = Host(max_num_batched_tokens=64)
    host.add(prompt(16), max_tokens=2)
    request = host.add(prompt(num_same) + prompt(length - num_same, 500), max_tokens=2)
    host.step()
    assert request.state is (WAITING if waits else RUNNING)
    host.run()


def test_no_request_waits_for_a_prefix_without_a_prefix_cache():
    host = Host(max_num_batched_tokens=64, enable_prefix_caching=False)
    requests = [host.add(prompt(16), max_tokens=2) for _ in range(2)]
    host.step()
    assert [request.state for request in requests] == [RUNNING, RUNNING]
    host.run()


def test_no_request_waits_for_the_prefix_of_one_that_is_served_later():
    """The prompt of that one may take long to be computed."""
    host = Host(max_num_batched_tokens=64, policy=POLICIES["priority"], long_prefill_token_threshold=12)
    host.add(prompt(16), max_tokens=2, priority=5)
    host.step()
    sooner, later = (host.add(prompt(18), max_tokens=2, priority=priority) for priority in (1, 9))
    host.step()
    assert (sooner.state, later.state) == (RUNNING, WAITING)
    host.run()


@pytest.mark.parametrize("lora_name", [None, "a"])
def test_no_request_waits_for_the_prefix_of_another_adapter(lora_name):
    host = Host(max_num_batched_tokens=64)
    host.add(prompt(16), max_tokens=2)
    request = host.add(prompt(16), max_tokens=2, cache_key=CacheKey(lora_name=lora_name))
    host.step()
    assert request.state is (WAITING if lora_name is None else RUNNING)
    host.run()


@pytest.mark.parametrize("windows", [(None, 8), (8,), (4, 9)])
def test_prompts_with_a_common_beginning_and_longer_ends_than_a_window_run_together_once_it_is_computed(windows):
    """The window has passed the end of the common beginning when the first prompt is known to be sound."""
    host = Host(num_blocks=200, windows=windows, max_num_batched_tokens=64, long_prefill_token_threshold=16)
    first, *others = [host.add(prompt(40) + prompt(24, 300 + 100 * index), max_tokens=2) for index in range(4)]
    for _ in range(4):
        assert chunks(host.step()) == [(first, 16)]
    assert chunks(host.step()) == [(request, 16) for request in others]
    assert [request.num_cached_tokens for request in others] == [40, 40, 40]
    host.run()


@pytest.mark.parametrize("is_taken", [False, True])
def test_no_request_waits_for_a_prefix_of_which_a_window_has_passed_pages_that_were_taken_since(is_taken):
    host = Host(num_blocks=200, windows=(None, 8), max_num_batched_tokens=64, long_prefill_token_threshold=16)
    host.add(prompt(40) + prompt(24, 300), max_tokens=2)
    for _ in range(3):  # 48 tokens are computed: the window has passed 40.
        host.step()
    if is_taken:
        num_pages = host.blocks.num_free
        withdraw(host.blocks.device, num_pages)
        withdraw(host.blocks.device, -num_pages)
    request = host.add(prompt(40) + prompt(24, 400), max_tokens=2)
    host.step()
    assert request.state is (RUNNING if is_taken else WAITING)
    host.run()
    assert request.num_cached_tokens == (0 if is_taken else 40)


@pytest.mark.parametrize("how", ["abort", "not finite"])
def test_a_request_that_awaits_a_prefix_computes_it_if_the_other_one_does_not(how):
    host = Host(max_num_batched_tokens=64, long_prefill_token_threshold=12)
    first = host.add([*prompt(16), POISON_TOKEN if how == "not finite" else 50], max_tokens=4)
    request = host.add(prompt(18), max_tokens=2)
    host.step()
    assert request.state is WAITING
    if how == "abort":
        host.abort(first)
    host.run()
    assert request.num_cached_tokens == 0
    assert request.state is RequestState.FINISHED_LENGTH
