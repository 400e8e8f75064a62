"""Steps are dispatched ahead and decode several tokens; no token depends on either."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from jpaged import Engine, SamplingParams
from jpaged.core.step_record import StepRecord
from jpaged.sampling.sampling_params import SampleMode
from jpaged.scheduling.buckets import make_buckets
from jpaged.step import step_sizes
from jpaged.step.step_outputs import StepOutputs
from jpaged.step.step_records import StepInputs

from ..tiny_model import SIZES

pytestmark = pytest.mark.usefixtures("shared_executables")
GREEDY = SamplingParams(temperature=0.0, max_tokens=49, ignore_eos=True)
RANDOM = SamplingParams(temperature=1.2, top_p=0.9, max_tokens=49, ignore_eos=True, seed=3)
PROMPTS = [[20 + index] * (3 + 7 * index) for index in range(5)]
MODES: dict[str, dict[str, Any]] = {
    "one after another": {"async_scheduling": False, "num_decode_steps": 1},
    "one ahead": {"num_decode_steps": 1},
    "three tokens": {"async_scheduling": False, "num_decode_steps": 3},
    "auto": {},
}


@dataclass
class Recorder:
    """Observes the steps of an engine."""

    events: list[tuple[str, int]] = field(default_factory=list)
    """("dispatch" or "retire", number of the step from 1), in order."""
    steps: list[StepInputs] = field(default_factory=list)

    def dispatched(self, record: StepRecord) -> None:
        self.events.append(("dispatch", record.number))
        self.steps.append(record.inputs)

    def retired(self, record: StepRecord) -> None:
        self.events.append(("retire", record.number))


@contextmanager
def recorded_engine(model: str, **options: Any) -> Iterator[tuple[Engine, Recorder]]:
    """Yield an engine, and a record of its steps."""
    with Engine(model, **SIZES | options) as engine:
        engine.core.observer = recorder = Recorder()
        yield engine, recorder


def tokens(outputs: list[Any]) -> list[tuple[int, ...]]:
    return [one.token_ids for output in outputs for one in output.outputs]


def test_every_mode_gives_the_same_tokens(tiny: str) -> None:
    """Greedy and drawn rows, samples of one prompt, ends by length, token and text, more requests than rows."""
    ends = replace(RANDOM, ignore_eos=False, stop_token_ids=(100, 101, 102, 103, 104, 105), stop=["e"], temperature=1.5)
    params = [GREEDY, replace(RANDOM, n=3), replace(GREEDY, max_tokens=7), ends, replace(ends, seed=8, max_tokens=200)]
    found = {}
    for name, options in MODES.items():
        with Engine(tiny, **SIZES, **options) as engine:
            outputs = engine.generate(PROMPTS * 3, params * 3, use_tqdm=False)
            found[name] = tokens(outputs), [one.finish_reason for output in outputs for one in output.outputs]
            assert engine.stats()["blocks_used"] == engine.stats()["recompiles"] == 0
    assert {reason for reason in found["auto"][1]} == {"length", "stop"}
    assert all(each == found["one after another"] for each in found.values())


def test_a_step_is_dispatched_before_the_previous_one_is_read(tiny: str) -> None:
    with recorded_engine(tiny, num_decode_steps=4) as (engine, recorded):
        engine.generate(PROMPTS, GREEDY, use_tqdm=False)
        events, last = recorded.events, len(recorded.steps)
        for number in range(1, last):
            assert events.index(("dispatch", number + 1)) < events.index(("retire", number))
        assert [number for kind, number in events if kind == "retire"] == list(range(1, last + 1))


def test_without_async_scheduling_each_step_is_read_before_the_next_is_dispatched(tiny: str) -> None:
    with recorded_engine(tiny, async_scheduling=False) as (engine, recorded):
        engine.generate(PROMPTS, GREEDY, use_tqdm=False)
        numbers = range(1, len(recorded.steps) + 1)
        assert recorded.events == [(kind, number) for number in numbers for kind in ("dispatch", "retire")]


@pytest.mark.parametrize(("num_decode_steps", "num_dispatches"), [(2, 24), ("auto", 3)])
def test_a_dispatch_decodes_as_many_tokens_as_the_option_says(
    tiny: str, num_decode_steps: Any, num_dispatches: int
) -> None:
    """One dispatch computes the prompts; the others decode 48 tokens of each sequence."""
    with recorded_engine(tiny, num_decode_steps=num_decode_steps) as (engine, recorded):
        engine.generate([[20 + index] * 6 for index in range(5)], GREEDY, use_tqdm=False)
        assert len(recorded.steps) == 1 + num_dispatches


def test_fewer_sequences_than_the_smallest_bucket_has_tokens_decode_in_it(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accelerator's smallest bucket has 16 tokens."""
    with Engine(tiny, **SIZES) as engine:
        wanted = tokens(engine.generate(PROMPTS[:1], GREEDY, use_tqdm=False))
    monkeypatch.setattr(step_sizes, "make_buckets", lambda **options: make_buckets(**options | {"platform": "tpu"}))
    with Engine(tiny, **SIZES | {"max_num_seqs": 1}) as engine:
        assert tokens(engine.generate(PROMPTS[:1], GREEDY, use_tqdm=False)) == wanted
        assert engine.stats()["steps"] < 20, "several tokens per step"


def test_after_rows_end_the_others_decode_in_a_smaller_bucket(tiny: str) -> None:
    """Seven of eight rows end after six tokens; the eighth decodes by itself."""
    with recorded_engine(tiny) as (engine, recorded):
        params = [replace(GREEDY, max_tokens=6)] * 7 + [replace(GREEDY, max_tokens=22)]
        engine.generate([[20 + index] for index in range(8)], params, use_tqdm=False)
        shapes = [(step.layout.num_tokens, max(step.decode_lens, default=1)) for step in recorded.steps if step.layout]
        assert shapes == [(8, 1), (8, 5), (1, 16)]


def test_the_decode_loop_stops_at_a_token_that_ends_the_sequence(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later tokens are neither computed nor shown; the next dispatch, already in flight, draws nothing."""
    with Engine(tiny, **SIZES) as engine:
        (free,) = tokens(engine.generate([PROMPTS[1]], RANDOM, use_tqdm=False))
        stop = next(token for token in free[3:] if free.index(token) >= 3)
        end = free.index(stop)
        seen: list[list[int]] = []
        read = StepOutputs.read

        def record_and_read(self: StepOutputs) -> Any:
            rows = read(self)
            if rows is not None and rows.token_ids.ndim == 2:
                seen.append(rows.token_ids[:, 0].tolist())
            return rows

        monkeypatch.setattr(StepOutputs, "read", record_and_read)
        (ended,) = tokens(engine.generate([PROMPTS[1]], replace(RANDOM, stop_token_ids=(stop,)), use_tqdm=False))
        assert ended == free[: end + 1]
        assert [token for step in seen for token in step if token] == list(free[1 : end + 1])


def test_an_abort_with_steps_in_flight_changes_no_other_request(tiny: str) -> None:
    with Engine(tiny, **SIZES) as engine:
        wanted = tokens(engine.generate(PROMPTS[:2], RANDOM, use_tqdm=False))
        for index in range(2):
            engine.add_request(str(index), PROMPTS[index], RANDOM)
        for _ in range(2):
            engine.step()
        engine.abort_request("0")
        outputs = list(engine.run_until_done())
        assert tokens(outputs) == wanted[1:]
        assert engine.stats()["blocks_used"] == 0


def test_the_first_token_does_not_wait_for_deferred_executables(tiny: str) -> None:
    """No step that would have to wait for a deferred executable is dispatched ahead."""
    with recorded_engine(tiny) as (engine, recorded):
        engine.runner.compile_plan.defer([("decode", 8, SampleMode.RANDOM)])
        engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, GREEDY)
        while not (outputs := engine.step()):
            pass
        assert outputs[0].outputs[0].token_ids
        assert recorded.events == [("dispatch", 1), ("retire", 1)]
        engine.runner.compile_plan.wait()
        while engine.has_unfinished_requests():
            engine.step()
