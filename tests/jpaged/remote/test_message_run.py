"""Runs over many requests on core processes: one engine's outputs, also if cores end on the way."""

import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jpaged import Engine, SamplingParams
from jpaged.config.engine_config import EngineConfig
from jpaged.errors import EngineStoppedError
from jpaged.messages import NewRequest
from jpaged.outputs import RequestOutput, SampleDelta
from jpaged.remote.core_client import GivenNames
from jpaged.remote.core_group import CoreGroup
from jpaged.remote.last_outputs import ENDED_CORES
from jpaged.remote.message_run import MessageRun
from jpaged.remote.new_deltas import NewDeltas

from ..tiny_model import SIZES
from .test_clients import timeless

pytestmark = pytest.mark.usefixtures("shared_executables")
PARAMS = SamplingParams(max_tokens=20, temperature=1, ignore_eos=True)


@contextmanager
def running(tiny: str, *, num_restarts: int = 9, maker: str = "", **options: Any) -> Iterator[MessageRun]:
    """Give a run on two cores."""
    named = {"maker": f"core_makers:{maker}", "options": options} if maker else {}
    config = EngineConfig(model=tiny, **SIZES, data_parallel_size=2)
    with MessageRun(CoreGroup(config, num_restarts=num_restarts, names=GivenNames(), **named)) as run:
        yield run


def messages(alone: Engine, count: int) -> list[NewRequest]:
    """Return requests whose ids are their numbers."""
    return [alone.builder.build(str(index), f"Number {index}", PARAMS, number=index) for index in range(count)]


@pytest.fixture(scope="module")
def run(tiny: str, shared_executables: None) -> Iterator[MessageRun]:
    """Give a run on two cores that goes on from one test to the next."""
    with running(tiny) as found:
        yield found


@pytest.fixture(scope="module")
def expected(alone: Engine) -> list[Any]:
    found = {last.output.request_id: timeless(last.output) for last in alone.run_messages(messages(alone, 60))}
    return [found[str(index)] for index in range(60)]


def computed(run: MessageRun, source: Iterable[NewRequest | None]) -> dict[int, RequestOutput]:
    return {int(last.output.request_id): last.output for last in run.run_messages(source)}


def test_outputs_are_those_of_one_engine_also_of_messages_that_are_not_there_yet(
    run: MessageRun, alone: Engine, expected: list[Any]
):
    source = [None, *messages(alone, 60)[:30], None, None, *messages(alone, 60)[30:], None]
    found = computed(run, source)
    assert [timeless(found[index]) for index in range(60)] == expected
    snapshots = run._run(run._group.snapshots())
    assert min(one.stats["generation_tokens"] for one in snapshots.values()) > 0
    assert (run.stats()["generation_tokens"], run.summary().stats["generation_tokens"]) == (1200, 1200)
    assert run.summary().device.startswith("2 × ")
    assert computed(run, []) == {}


def test_deltas_are_shown_as_they_come(run: MessageRun, alone: Engine):
    shown: list[SampleDelta] = []
    (last,) = run.run_messages(messages(alone, 1), stream=shown.extend)
    assert "".join(delta.text for delta in shown) == last.output.outputs[0].text
    assert len(shown) > 1


def test_a_request_that_can_never_fit_ends_by_an_error(run: MessageRun, alone: Engine):
    invalid = alone.builder.build("1", "Hi", SamplingParams(n=8, max_tokens=2), number=1)
    (last,) = run.run_messages([msgspec.structs.replace(invalid, params=SamplingParams(n=9))])
    assert (last.output.error or "").startswith("n: got 9")


def test_a_run_that_is_left_early_leaves_no_request(run: MessageRun, alone: Engine):
    for _ in run.run_messages(messages(alone, 60)):
        break
    assert not run._tasks
    while run.stats()["requests"]:
        continue


def test_requests_of_a_killed_core_are_computed_again(run: MessageRun, alone: Engine, expected: list[Any]):
    def source() -> Iterator[NewRequest]:
        for index, message in enumerate(messages(alone, 60)):
            if index == 40:
                os.kill(run._group._cores[0].client.pid or 0, signal.SIGKILL)
            yield message

    found = computed(run, source())
    assert [timeless(found[index]) for index in range(60)] == expected


def test_text_is_shown_once_if_its_core_is_killed(run: MessageRun, alone: Engine):
    long = SamplingParams(max_tokens=110, temperature=1, ignore_eos=True)
    message = alone.builder.build("0", "Once", long, number=0)
    shown: list[SampleDelta] = []
    killed: list[int] = []

    def show(deltas: list[SampleDelta]) -> None:
        if not shown:
            killed.append(run._group._core_of["0"].client.pid or 0)
            os.kill(killed[0], signal.SIGKILL)
        shown.extend(deltas)

    (last,) = run.run_messages([message], stream=show)
    (expected,) = alone.run_messages([message])
    assert len(killed) == 1
    assert "".join(delta.text for delta in shown) == last.output.outputs[0].text == expected.output.outputs[0].text


@pytest.mark.slow
def test_a_request_that_ends_cores_gets_an_error_and_no_other_does(
    tiny: str, alone: Engine, expected: list[Any], tmp_path: Path
):
    with running(tiny, maker="dies_of", ids=["5", "50"], folder=str(tmp_path)) as run:
        found = computed(run, messages(alone, 60))
        failed = {index: output.error for index, output in found.items() if output.error}
        assert failed == {5: ENDED_CORES, 50: ENDED_CORES}
        assert [timeless(found[index]) for index in range(60) if index not in failed] == [
            one for index, one in enumerate(expected) if index not in failed
        ]
        num_ends = Counter(path.name.partition(" ")[0] for path in tmp_path.iterdir())
        assert sum(num_ends.values()) <= 6


@pytest.mark.slow
def test_a_run_ends_once_no_core_is_left(tiny: str, alone: Engine, tmp_path: Path):
    with (
        running(tiny, maker="dies_of", ids=["5"], folder=str(tmp_path), num_restarts=0) as run,
        pytest.raises(EngineStoppedError, match=r"engine 0: .* SIGKILL; engine 1: .* SIGKILL"),
    ):
        computed(run, messages(alone, 60))


def test_text_that_was_shown_is_not_shown_again():
    shown: list[SampleDelta] = []
    deltas = NewDeltas(shown.extend)

    def take(*texts: str, index: int = 0) -> None:
        deltas.take([SampleDelta("", index, (), text) for text in texts])

    take("Once ", "upon")
    take("Twice", index=1)
    deltas.begin()
    take("Once", " upon a", " time")
    take("Twice as", index=1)
    texts = ["".join(delta.text for delta in shown if delta.index == index) for index in (0, 1)]
    assert texts == ["Once upon a time", "Twice as"]
