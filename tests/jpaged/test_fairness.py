"""Nobody starves: a long prompt amid endless short ones, short ones beside a long one, and who may pass whom."""

import time
from dataclasses import dataclass

import numpy as np
import pytest

from jpaged.admission import MAX_BYPASSES
from jpaged.block_manager import BlockManager
from jpaged.buckets import make_buckets
from jpaged.core import Core
from jpaged.invariants import check_scheduler
from jpaged.output_processor import OutputProcessor
from jpaged.pallas_kernels.ragged_paged_attention import XlaBackend
from jpaged.preemption import PreemptionMode, PreemptionPolicy
from jpaged.request import RequestState, make_request
from jpaged.rule_book import RuleBook
from jpaged.sampler import SampledRows
from jpaged.sampling_params import SamplingParams
from jpaged.scheduler import MAX_WITHHELD, Scheduler
from jpaged.step_inputs import StepInputBuilder

LONG = 1500


@dataclass(frozen=True)
class InstantResults:
    """Tokens that were drawn before anybody asked, and end nothing."""

    num_samples: int

    def read(self):
        tokens = np.full(self.num_samples, 10, np.int32)
        return SampledRows(token_ids=tokens, is_finite=np.ones(self.num_samples, bool))


class InstantRunner:
    """A device that takes no time."""

    def dispatch(self, step):
        return InstantResults(len(step.samples))


class Service:
    """A host core on a device that takes no time."""

    def __init__(
        self,
        *,
        budget,
        num_seqs=64,
        num_blocks=4097,
        block_size=16,
        num_host_blocks=0,
        enable_prefix_caching=False,
        **options,
    ):
        blocks = BlockManager(
            num_blocks=num_blocks,
            block_size=block_size,
            max_chunk=budget,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=enable_prefix_caching,
        )
        scheduler = Scheduler(
            blocks, max_num_seqs=num_seqs, max_num_batched_tokens=budget, clock=time.monotonic, **options
        )
        buckets = make_buckets(max_num_batched_tokens=budget, max_num_seqs=num_seqs, platform="cpu")
        builder = StepInputBuilder(
            buckets=buckets,
            backend=XlaBackend(),
            block_size=block_size,
            num_groups=1,
            max_num_seqs=num_seqs,
            max_pages=1 + (LONG + 500) // block_size,
            rule_book=RuleBook(0),
        )
        self.core = Core(
            scheduler=scheduler,
            builder=builder,
            runner=InstantRunner(),
            outputs=OutputProcessor(None, eos_token_ids=()),
            clock=time.monotonic,
        )
        self.num_requests = 0

    def add(self, prompt_len, max_tokens, priority=0):
        request = make_request(
            request_id=str(self.num_requests),
            number=self.num_requests,
            prompt_token_ids=range(prompt_len),
            params=SamplingParams(detokenize=False),
            arrival_time=0.0,
            max_tokens=max_tokens,
            engine_seed=0,
            num_groups=1,
            priority=priority,
        )
        self.num_requests += 1
        self.core.add(request)
        return request

    def step(self):
        """One step; the sequences that got a token."""
        self.core.dispatch()
        samples = self.core.retire() if self.core.in_flight else []
        check_scheduler(self.core.scheduler)
        return samples


def steps_to_first_token(service, request, before_each=lambda: None):
    for num_steps in range(1, 1000):
        before_each()
        if any(sequence.request is request for sequence in service.step()):
            return num_steps
    raise AssertionError("no token in 1000 steps")


@pytest.mark.parametrize("budget", [64, 1024])
@pytest.mark.parametrize("num_decoding", [0, 20, 62])
def test_a_long_prompt_amid_endless_short_arrivals_needs_at_most_three_times_its_steps_alone(budget, num_decoding):
    alone = Service(budget=budget)
    num_alone = steps_to_first_token(alone, alone.add(LONG, 5))
    assert num_alone == -(-LONG // budget)
    service = Service(budget=budget)
    for _ in range(num_decoding):
        service.add(10, 400)
    for _ in range(30):
        service.step()
    long = service.add(LONG, 5)
    assert steps_to_first_token(service, long, before_each=lambda: service.add(5, 8)) <= 3 * num_alone


@pytest.mark.parametrize("budget", [64, 1024])
def test_whoever_decodes_goes_on_while_a_long_prompt_is_computed(budget):
    service = Service(budget=budget)
    decoding = [service.add(4, 400) for _ in range(60)]
    for _ in range(30):
        service.step()
    long = service.add(LONG, 5)
    silent_for = dict.fromkeys(decoding, 0)
    longest = 0
    while long.first_token_time is None:
        seen = {sequence.request for sequence in service.step()}
        silent_for = {request: 0 if request in seen else silent_for[request] + 1 for request in decoding}
        longest = max(longest, *silent_for.values())
    # With room for all, each gets a token in each step; if prompts take half of a small budget, in every second.
    assert longest == (0 if budget == 1024 else 1)


def test_who_fits_may_pass_who_does_not_but_not_for_ever():
    """A request that needs half of the pool waits while small ones keep the other half busy."""
    service = Service(budget=64, num_blocks=1 + 40, num_seqs=16)
    first = service.add(16 * 24, 60)
    service.step()
    large = service.add(16 * 20, 5)
    passed_by = set()
    for _ in range(200):
        service.add(10, 3)
        service.step()
        if large.state is RequestState.RUNNING:
            break
        passed_by |= {request for request in service.core.scheduler.running if request not in (first, large)}
    assert large.state is RequestState.RUNNING
    assert 1 <= len(passed_by) <= MAX_BYPASSES + 16
    assert service.core.scheduler.counts["bypass"] == MAX_BYPASSES


def test_the_more_urgent_goes_first_and_the_least_urgent_gives_way():
    service = Service(budget=64, num_blocks=1 + 12, num_seqs=8, policy=lambda request: request.priority)
    late = service.add(16, 150, priority=9)
    service.step()
    soon = service.add(16, 150, priority=-1)
    for _ in range(10):
        service.add(16, 2, priority=3)
    while soon.live:
        service.step()
        assert soon.num_preemptions == 0
    assert late.num_preemptions > 0
    while late.live:
        service.step()
    assert late.state is RequestState.FINISHED_LENGTH


def test_with_prefill_first_a_step_is_all_prompts_or_all_decoding():
    service = Service(budget=2048, enable_chunked_prefill=False)
    for index in range(30):
        service.add(50 + index, 20)
    kinds = set()
    while service.core.scheduler.has_unfinished:
        work = service.core.dispatch()
        service.core.retire()
        kinds.add((bool(work.chunks), bool(work.decodes)))
        assert all(chunk.num_tokens == chunk.sequence.request.prompt_len for chunk in work.chunks)
    assert kinds == {(True, False), (False, True)}


def test_with_prefill_first_endless_prompts_keep_nobody_from_decoding_for_ever():
    service = Service(budget=2048, enable_chunked_prefill=False)
    first = service.add(10, 50)
    service.step()
    num_steps = 0
    while first.live:
        service.add(50, 1)
        service.step()
        num_steps += 1
    assert num_steps == 49 * (MAX_WITHHELD + 1)


def test_with_prefill_first_a_prompt_comes_in_at_once_where_nobody_decodes_any_more():
    service = Service(budget=2048, enable_chunked_prefill=False)
    first = service.add(10, 50)
    service.step()
    for _ in range(MAX_WITHHELD):
        service.add(50, 1)
        service.step()
    service.core.abort(first)
    last = service.add(50, 1)
    service.step()
    assert last.state is RequestState.FINISHED_LENGTH


def test_a_prompts_share_of_a_step_can_be_bounded():
    service = Service(budget=1024, long_prefill_token_threshold=100)
    long, short = service.add(LONG, 5), service.add(300, 5)
    work = service.core.dispatch()
    assert [(chunk.sequence.request, chunk.num_tokens) for chunk in work.chunks] == [(long, 100), (short, 100)]


def test_newcomers_wait_for_others_to_come_along():
    """Twice as long as the last step with newcomers took, while somebody runs."""
    now = [0.0]
    service = Service(budget=64, delay_factor=2.0)
    service.core.scheduler.clock = lambda: now[0]
    service.add(10, 100)
    service.core.dispatch()
    now[0] = 5.0  # The step with the newcomer took 5 s.
    service.core.retire()
    second = service.add(10, 5)
    second.arrival_time = 5.0
    for now[0] in (6.0, 14.9, 15.0):
        service.step()
        assert second.state is RequestState.WAITING
    now[0] = 15.1
    service.step()
    assert second.state is RequestState.RUNNING


def test_who_waits_for_pages_comes_in_as_soon_as_the_cache_has_them():
    """Ten requests with one prefix of 100 pages in a pool of 150: one computes it, then all fit."""
    service = Service(budget=2048, num_blocks=1 + 150, num_seqs=16, enable_prefix_caching=True)
    for _ in range(10):
        service.add(1600, 20)
    num_steps = most_running = 0
    while service.core.scheduler.has_unfinished:
        service.step()
        num_steps += 1
        most_running = max(most_running, len(service.core.scheduler.running))
    assert most_running == 10
    assert num_steps <= 45


def test_whom_only_a_gate_refuses_stands_in_nobodys_way():
    class OneAtATime:
        """Takes odd priorities one at a time."""

        running = 0

        def admits(self, request):
            return request.priority % 2 == 0 or not self.running

        def enter(self, request):
            self.running += request.priority % 2

        def leave(self, request):
            self.running -= request.priority % 2

    service = Service(budget=64, gate=OneAtATime())
    first, second = service.add(10, 100, priority=1), service.add(10, 5, priority=1)
    others = [service.add(10, 5) for _ in range(50)]
    while not all(other.state.is_finished for other in others):
        service.step()
    assert first.live
    assert second.state is RequestState.WAITING
    while second.live:
        service.step()
    assert not first.live


def test_a_more_urgent_request_need_not_wait_behind_one_that_is_swapped_out():
    service = Service(
        budget=64,
        num_blocks=1 + 20,
        num_host_blocks=100,
        policy=lambda request: request.priority,
        preemption=PreemptionPolicy(PreemptionMode.SWAP),
    )
    for priority in (1, 9):
        service.add(100, 160, priority=priority)
    while not service.core.scheduler.swapped:
        service.step()
    urgent, patient = service.add(16, 5, priority=-5), service.add(16, 5, priority=10)
    assert steps_to_first_token(service, urgent) <= 2
    assert patient.state is RequestState.WAITING
