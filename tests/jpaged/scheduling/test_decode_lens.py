"""How many tokens a step lets each sequence decode, on the symbolic device."""

import pytest

from jpaged.sampling.sampling_params import SampleMode, SamplingParams

from ..symbolic import Host

PLAIN = SamplingParams(temperature=0.0, detokenize=False, ignore_eos=True)


def new_host(**options):
    return Host(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_decode_steps": 16, **options})


def run_ahead(host):
    """Run to the end with up to two steps in flight; yield each step's work and the number of waiting requests."""
    while host.scheduler.has_unfinished:
        num_waiting = len(host.scheduler.waiting)
        work = host.dispatch()
        if not work.is_empty:
            yield work, num_waiting
        if host.core.in_flight and (len(host.core.in_flight) == 2 or work.is_empty):
            host.retire()
    while host.core.in_flight:
        host.retire()


def test_while_requests_wait_each_step_decodes_one_token():
    """A waiting request would otherwise wait for all of those tokens."""
    host = new_host(max_num_seqs=2)
    for length in (3, 10, 17, 24, 31):
        host.add(range(20, 20 + length), max_tokens=49, params=PLAIN)
    steps = [(num_waiting, max(work.decode_lens, default=1)) for work, num_waiting in run_ahead(host)]
    assert {decode_len for num_waiting, decode_len in steps if num_waiting} == {1}
    assert max(decode_len for _, decode_len in steps) == 16


def test_pages_for_tokens_ahead_preempt_no_sequence():
    """The pool holds two sequences to their ends and not one page more."""
    host = new_host(num_blocks=7, block_size=16, max_model_len=96, enable_prefix_caching=False)
    for length in (3, 10):
        host.add(range(20, 20 + length), max_tokens=33, params=PLAIN)
    works = [work for work, _ in run_ahead(host)]
    assert not any(work.preempted for work in works)
    assert max(max(work.decode_lens, default=1) for work in works) > 1
    assert host.max_used == 6


@pytest.mark.parametrize("has_program", [True, False])
@pytest.mark.parametrize("asked", [{}, {"logprobs": 2}], ids=str)
def test_requests_with_logprobs_decode_several_tokens_where_there_is_a_program_for_it(asked, has_program):
    several = {SampleMode.GREEDY, SampleMode.RANDOM, *([SampleMode.FULL] if has_program else [])}
    host = new_host(several_modes=frozenset(several))
    params = SamplingParams(temperature=0.0, detokenize=False, **asked)
    host.add(range(20, 30), max_tokens=49, params=params)
    host.dispatch()
    assert (max(host.dispatch().decode_lens, default=1) > 1) == (has_program or not asked)
