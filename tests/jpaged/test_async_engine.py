"""AsyncEngine: many tasks on one engine, each with the outputs that it would have alone; leaving frees what is held."""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest

from jpaged import AsyncEngine, Engine, InvalidRequestError, QueueFullError, RequestOutput, SamplingParams
from jpaged.core.request_counts import RequestCounter
from jpaged.core.stat_loggers import EndedRequest
from jpaged.core.step_record import StepRecord
from jpaged.errors import EngineStoppedError
from jpaged.messages import NewRequest
from jpaged.outputs import Mark, SampleDelta

from .tiny_model import SIZES

pytestmark = pytest.mark.usefixtures("shared_executables")
PROMPTS = [f"Prompt number {index} says" for index in range(12)]


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 30, "temperature": 1.0, "seed": 5, "ignore_eos": True, **fields})


@pytest.fixture
def make(tiny: str) -> Iterator[Callable[..., AsyncEngine]]:
    """Give a function that makes an engine; all are shut down after the test."""
    engines: list[AsyncEngine] = []

    def make(**options: Any) -> AsyncEngine:
        engines.append(AsyncEngine(tiny, **{**SIZES, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


@pytest.fixture(scope="module")
def alone(tiny: str) -> list[RequestOutput]:
    with Engine(tiny, **SIZES) as engine:
        return engine.generate(PROMPTS, params(), use_tqdm=False)


async def until(is_true: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
def test_many_tasks_get_what_each_gets_alone(make, alone, kind: str):
    async def run() -> list[list[RequestOutput]]:
        each = (collect(engine.generate(prompt, params(output_kind=kind), f"id-{index}"))
                for index, prompt in enumerate(PROMPTS))  # fmt: skip
        return list(await asyncio.gather(*each))

    engine = make()
    for index, (outputs, expected) in enumerate(zip(asyncio.run(run()), alone, strict=True)):
        assert {output.request_id for output in outputs} == {f"id-{index}"}
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        texts = [output.outputs[0].text if output.outputs else "" for output in outputs]
        assert ("".join(texts) if kind == "delta" else texts[-1]) == expected.outputs[0].text
        assert (len(outputs) == 1) == (kind == "final_only")


def test_a_slow_reader_gets_what_has_come_in_one_output(make, alone):
    async def run() -> list[RequestOutput]:
        outputs = []
        async for output in engine.generate(PROMPTS[0], params(output_kind="delta")):
            outputs.append(output)
            await until(lambda: not engine.engine.loop.scheduler.has_unfinished)
        return outputs

    engine = make()
    outputs = asyncio.run(run())
    assert len(outputs) <= 3  # The first, one that was made when that was taken, and all that came later.
    assert "".join(output.outputs[0].text for output in outputs) == alone[0].outputs[0].text


@pytest.mark.parametrize("how", ["break", "cancel", "aclose", "abort"])
def test_leaving_aborts_and_frees_all_pages(make, how: str):
    async def run() -> None:
        stream = engine.generate(PROMPTS[0], params(max_tokens=100), "leaves")
        beside = asyncio.create_task(collect(engine.generate(PROMPTS[1], params(max_tokens=20))))
        if how == "cancel":
            task = asyncio.create_task(collect(stream))
            await until(lambda: len(engine.engine.requests) == 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "abort":
            outputs = []
            async for output in stream:
                outputs.append(output)
                if len(outputs) == 1:
                    await engine.abort("leaves")
            assert outputs[-1].outputs[0].finish_reason == "abort"
        else:
            async for _ in stream:
                break
            await stream.aclose()
        assert (await beside)[-1].outputs[0].finish_reason == "length"
        await until(lambda: not engine.engine.requests)
        assert (await engine.stats())["blocks_used"] == 0

    engine = make()
    asyncio.run(run())


def test_a_wrong_request_raises_before_anything_is_queued(make):
    async def run() -> None:
        for prompt, wanted in (("", params()), ([999], params()), (5, params()), ("a", "b"), ("x" * 200, params())):
            with pytest.raises(InvalidRequestError):
                await collect(engine.generate(prompt, wanted))
        with pytest.raises(InvalidRequestError, match="request_id"):
            await collect(engine.generate("a", params(), ""))
        assert not engine.engine.requests

    engine = make()
    asyncio.run(run())


def test_several_requests_are_queued_all_or_none(make):
    """Three fit a queue of four beside one that waits; four do not, and then none of them is queued."""

    async def run() -> None:
        engine.pause()
        build = engine.engine.builder.build
        message = build("", "Hi", params(), number=0)
        first = await engine.submit([message], takes_deltas=True)
        with pytest.raises(QueueFullError):
            await engine.submit([message] * 4, takes_deltas=True)
        assert len(engine.engine.requests) == 1
        others = await engine.submit([message] * 3, takes_deltas=True)
        assert len(set(first.request_ids + others.request_ids)) == 4
        engine.resume()
        for stream, count in ((first, 1), (others, 3)):
            ended = 0
            while ended < count:
                taken = await stream.take()
                ended += len(taken.outputs) if taken else 0
            stream.close()

    engine = make(limits={"waiting_requests": 4})
    asyncio.run(run())


def test_marks_of_deltas_are_those_of_the_whole_text(make):
    """The places of the tokens that a request names, also in text that is held back for a stop string."""

    async def run() -> None:
        options = params(max_tokens=60, stop=["never", "\n" * 9], output_kind="final_only")
        message = engine.engine.builder.build("", "Hi", options, number=0)
        (plain,) = (await samples_of(message, takes_deltas=False))[0]
        message = msgspec.structs.replace(message, mark_ids=frozenset(plain.token_ids[::3]))
        (whole,), _ = await samples_of(message, takes_deltas=False)
        _, deltas = await samples_of(message, takes_deltas=True)
        text, marks = "", list[Mark]()
        for delta in deltas:
            marks += [Mark(len(text) + mark.place, mark.token_id) for mark in delta.marks]
            text += delta.text
        assert (text, tuple(marks)) == (whole.text, whole.marks)
        assert [mark.token_id for mark in marks] == [one for one in whole.token_ids if one in message.mark_ids]
        assert plain.marks == ()

    async def samples_of(message: NewRequest, *, takes_deltas: bool) -> tuple[Any, list[SampleDelta]]:
        stream, deltas = await engine.submit([message], takes_deltas=takes_deltas), list[SampleDelta]()
        while True:
            if taken := await stream.take():
                deltas += taken.deltas
                if taken.outputs:
                    stream.close()
                    return taken.outputs[0].outputs, deltas

    engine = make()
    asyncio.run(run())


def test_loggers_learn_of_each_request_once_and_metrics_keep_nothing_of_it(make):
    """Of those that end by a stop string beside others, of aborted ones, and of those whose output nobody took."""

    async def run() -> None:
        build = engine.engine.builder.build
        message = build("", "Hi", params(max_tokens=3), number=0)
        stream = await engine.submit([message] * 2, takes_deltas=True)
        await until(lambda: not engine.client._core._has_work)
        stream.close()
        ends = [collect(engine.generate(prompt, params(max_tokens=30, stop=["e", "a"]))) for prompt in PROMPTS * 4]
        await asyncio.gather(*ends)
        aborted = engine.generate("Hi", params(max_tokens=100))
        await anext(aborted)
        await aborted.aclose()
        await collect(engine.generate("Hi", params()))
        assert sum(metrics.finished.values()) == 2 + len(ends) + 2
        assert metrics.finished["stop"] > 0
        assert metrics.finished["abort"] == 1
        assert not metrics._last_token_s
        assert not metrics._prompt_end_s

    metrics = RequestCounter()
    engine = make(stat_loggers=[metrics])
    asyncio.run(run())


def test_a_fork_of_no_request_names_the_callers_id(make):
    engine = make()
    with pytest.raises(InvalidRequestError, match="request_id: got 'other', the id of 0 unfinished requests"):
        asyncio.run(engine.fork("other"))


def test_calls_between_steps_fork_update_sleep_and_forget(make):
    async def run() -> None:
        stream = engine.generate(PROMPTS[0], params(max_tokens=60), "forked")
        outputs, indices = [], []
        async for output in stream:
            outputs.append(output)
            if len(outputs) == 3:
                indices = await engine.fork("forked", num_output_tokens=1, first_token_ids=[70, 71])
                await engine.abort("forked", sample=0)
        assert indices == [1, 2]
        ends = {sample.index: (sample.token_ids[1], sample.finish_reason) for sample in outputs[-1].outputs}
        assert ends == {0: (ends[0][0], "abort"), 1: (70, "length"), 2: (71, "length")}
        before = (await collect(engine.generate("Hi", params())))[-1].outputs[0].text
        await engine.reset_prefix_cache()
        await engine.sleep(1)
        assert engine.is_sleeping()
        await engine.wake_up()
        assert (await collect(engine.generate("Hi", params())))[-1].outputs[0].text == before

    engine = make()
    asyncio.run(run())


def test_a_request_that_waits_while_the_engine_sleeps_goes_on_when_it_wakes(make):
    async def run() -> None:
        task = asyncio.create_task(collect(engine.generate("Hi", params(max_tokens=100))))
        await until(lambda: bool(engine.engine.requests))
        await engine.sleep(1, "keep")
        await engine.wake_up()
        assert (await task)[-1].outputs[0].finish_reason == "length"

    engine = make()
    asyncio.run(run())


def test_readers_learn_that_the_engine_has_stopped(make):
    async def run() -> None:
        engine.pause()
        task = asyncio.create_task(collect(engine.generate("Hi", params())))
        await until(lambda: bool(engine.engine.requests))
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineStoppedError):
            await task
        assert not engine.is_alive
        with pytest.raises(EngineStoppedError):
            await collect(engine.generate("Hi", params()))

    engine = make()
    asyncio.run(run())


def test_no_reader_and_no_shutdown_waits_for_a_program_that_compiles(make, caplog):
    begun, may_go_on = threading.Event(), threading.Event()

    def lower() -> None:
        begun.set()
        may_go_on.wait(60)

    async def run() -> None:
        task = asyncio.create_task(collect(engine.generate("Hi", params())))
        await until(begun.is_set)
        start_s = time.monotonic()
        await asyncio.to_thread(engine.shutdown)
        assert time.monotonic() - start_s < 2
        with pytest.raises(EngineStoppedError):
            await task

    engine = make()
    engine.engine.plan.programs = dict.fromkeys(engine.engine.plan.programs, lower)
    asyncio.run(run())
    may_go_on.set()
    assert not caplog.records


def test_steps_that_fail_end_the_requests_by_an_error_and_the_engine_goes_on(make, monkeypatch, caplog):
    async def run() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(engine.engine.runner, "dispatch", lambda step: 1 / 0)
            (output,) = await collect(engine.generate("Hi", params(output_kind="final_only")))
            assert output.outputs[0].finish_reason == "error"
            assert "ZeroDivisionError" in (output.error or "")
        assert (await collect(engine.generate("Hi", params())))[-1].outputs[0].finish_reason == "length"

    engine = make()
    asyncio.run(run())


class Counting:
    """A stat logger that counts, and raises when it is told to."""

    def __init__(self, *, raises: bool = False):
        self.ends: list[EndedRequest] = []
        self.num_steps, self.raises = 0, raises

    def dispatched(self, record: StepRecord) -> None:
        if self.raises:
            raise RuntimeError("no more")

    def retired(self, record: StepRecord) -> None:
        self.num_steps += 1

    def ended(self, request: EndedRequest) -> None:
        self.ends.append(request)


def test_stat_loggers_are_told_of_steps_and_ends_and_one_that_raises_is_dropped(make, caplog):
    async def run() -> None:
        await collect(engine.generate("Hello", params(max_tokens=7)))
        async for _ in engine.generate("Hello", params(max_tokens=90)):
            break
        await until(lambda: len(good.ends) == 2)

    good, bad = Counting(), Counting(raises=True)
    engine = make(stat_loggers=[bad, good])
    asyncio.run(run())
    assert [(end.finish_reason, end.num_prompt_tokens) for end in good.ends] == [("length", 5), ("abort", 5)]
    assert good.ends[0].num_output_tokens == 7
    assert good.num_steps >= 7
    assert (bad.num_steps, bad.ends) == (0, [])


class Dispatches:
    """A stat logger that notes the number of the last step that was dispatched, and the first of each request."""

    def __init__(self) -> None:
        self.last, self.first_of = 0, dict[str, int]()

    def dispatched(self, record: StepRecord) -> None:
        self.last = record.number
        for turn in record.turns:
            self.first_of.setdefault(turn.request_id, record.number)

    def retired(self, record: StepRecord) -> None:
        """Count dispatches alone."""

    def ended(self, request: EndedRequest) -> None:
        """Count dispatches alone."""


def test_a_newcomer_beside_eight_streams_begins_within_two_steps(make):
    async def run() -> None:
        options = params(max_tokens=90, output_kind="delta")
        streams = [asyncio.create_task(collect(engine.generate(prompt, options))) for prompt in PROMPTS[:7]]
        await until(lambda: len(steps.first_of) == 7)
        message = engine.engine.builder.build("", "New", params(max_tokens=2), number=0)
        for _ in range(5):
            last = asyncio.create_task(engine.client._between_steps(lambda: steps.last))
            await asyncio.sleep(0)  # Its command is in front of the newcomer's.
            newcomer = await engine.submit([message], takes_deltas=True)
            await until(lambda stream=newcomer: stream.request_ids[0] in steps.first_of)
            assert steps.first_of[newcomer.request_ids[0]] - await last <= 2
            newcomer.close()
        assert not any(stream.done() for stream in streams)
        await asyncio.gather(*streams)

    steps = Dispatches()
    engine = make(stat_loggers=[steps])
    asyncio.run(run())


def test_the_thread_ends_with_the_engine_and_another_loop_may_use_it(make):
    before = threading.enumerate()  # Servers of other tests have engines of their own.
    engine = make()
    for _ in range(2):  # Each `run` has an event loop of its own.
        (output,) = asyncio.run(collect(engine.generate("Hi", params(output_kind="final_only"))))
        assert output.finished
    assert "jpaged core" in [thread.name for thread in threading.enumerate() if thread not in before]
    engine.shutdown()
    gc.collect()
    assert "jpaged core" not in [thread.name for thread in threading.enumerate() if thread not in before]
