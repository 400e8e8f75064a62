"""Times cross clocks as ages, and nothing travels twice."""

import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from jpaged import codec
from jpaged.cluster.blocks import RequestBlock, ResultBlock
from jpaged.messages import NewRequest
from jpaged.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jpaged.sampling.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=5, stop=["x"])
DRIVER_S, WORKER_S = 1000.0, 50.0
"""What the two clocks say at the same time."""
METRICS = RequestMetrics(
    arrival_time=DRIVER_S - 9,
    first_scheduled_time=DRIVER_S - 8,
    first_token_time=DRIVER_S - 7,
    last_token_time=DRIVER_S - 6,
    finished_time=None,
    time_in_queue=1.0,
    num_preemptions=2,
    num_swaps=3,
    num_cached_tokens=4,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_to(now: float) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: now)

    return set_to


def request(number: int, arrival_time: float) -> NewRequest:
    return NewRequest(
        request_id=f"{number}",
        number=number,
        prompt_token_ids=bytes(8),
        prompt="a long text",
        params=PARAMS,
        max_tokens=5,
        stop_ids=frozenset({0}),
        arrival_time=arrival_time,
    )


def test_requests_arrive_as_long_ago_as_they_were_sent(clock: Any) -> None:
    clock(DRIVER_S)
    sent = [request(3, DRIVER_S - 2), request(4, DRIVER_S - 1)]
    data = codec.encode(RequestBlock.of(sent))
    clock(WORKER_S)
    arrived = codec.decode(data, RequestBlock).unpacked()
    expected = [msgspec.structs.replace(one, prompt=None) for one in sent]
    assert arrived == [
        msgspec.structs.replace(one, arrival_time=WORKER_S - age) for one, age in zip(expected, (2, 1), strict=True)
    ]


def test_results_come_back_with_times_of_this_clock_and_without_prompts(clock: Any) -> None:
    sample = CompletionOutput(0, "text", (5, 6), finish_reason="stop")
    output = RequestOutput("3", "a prompt", (1, 2), (sample,), True, METRICS, 4)
    clock(DRIVER_S)
    data = codec.encode(ResultBlock.of("host", [output], 2.5))
    clock(WORKER_S)
    block = codec.decode(data, ResultBlock)
    shifted = replace(
        METRICS,
        arrival_time=WORKER_S - 9,
        first_scheduled_time=WORKER_S - 8,
        first_token_time=WORKER_S - 7,
        last_token_time=WORKER_S - 6,
    )
    assert block.outputs_here() == [replace(output, prompt=None, prompt_token_ids=(), metrics=shifted)]
    assert (block.node, block.problem, block.computed_s) == ("host", "", 2.5)
