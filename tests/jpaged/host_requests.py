"""Requests for tests of the host core, and what a step computes of them, as tuples that are short to compare."""

from jpaged.request import Request
from jpaged.sampling.sampling_params import SamplingParams
from jpaged.scheduling.preemption import PreemptionMode, PreemptionPolicy

SWAP = PreemptionPolicy(PreemptionMode.SWAP)


def new_request(prompt_token_ids, **options):
    """Return a request outside any engine; `options` replace arguments of `Request`."""
    defaults = {
        "request_id": "r", "number": 0, "params": SamplingParams(), "arrival_time": 0.0, "max_tokens": 10,
        "engine_seed": 0, "num_groups": 1,
    }  # fmt: skip
    return Request(**{**defaults, "prompt_token_ids": prompt_token_ids, **options})


def prompt(length, start=0):
    """Return `length` token ids; prompts whose `start` differs share no prefix."""
    return [100 + (start + i) % 1000 for i in range(length)]


def samples(n):
    return SamplingParams(n=n, detokenize=False)


def chunks(work):
    """Return (request, sample, first position, tokens, samples that draw) of each chunk of a step."""
    return [
        (chunk.sequence.request.number, chunk.sequence.index, chunk.start, chunk.num_tokens,
         [sample.index for sample in chunk.samples])
        for chunk in work.chunks
    ]  # fmt: skip


def decodes(work):
    """Return (request, sample) of each sequence that decodes in a step."""
    return [(sequence.request.number, sequence.index) for sequence in work.decodes]


def preempted(work):
    """Return (request, mode) of each request that a step preempts."""
    return [(each.request.number, each.mode.value) for each in work.preempted]
