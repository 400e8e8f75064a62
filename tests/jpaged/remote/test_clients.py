"""What clients of both kinds answer, and what they wait for: an engine in this process, and one in a core process."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jpaged import Engine, SamplingParams
from jpaged.codec import decode, encode
from jpaged.config.engine_config import EngineConfig
from jpaged.errors import ConfigError, EngineStoppedError, InvalidRequestError, QueueFullError
from jpaged.intake.request_builder import RequestBuilder
from jpaged.messages import NewRequest
from jpaged.outputs import RequestOutput, StepOutputs
from jpaged.remote.core_client import CoreClient, CoreSnapshot, CoreStatus, OutputStream
from jpaged.remote.process_client import ProcessClient
from jpaged.remote.thread_client import ThreadClient
from jpaged.step.programs import Programs
from jpaged.text.grammar.grammar import Grammars

from ..tiny_model import SIZES
from .conftest import OPTIONS, StartProcess

pytestmark = pytest.mark.usefixtures("shared_executables")
PARAMS = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


async def taken_from(stream: OutputStream, num_requests: int = 1) -> list[StepOutputs]:
    """Return all that a stream gets, up to the last output of each request."""
    found: list[StepOutputs] = []
    while sum(output.finished for outputs in found for output in outputs.outputs) < num_requests:
        if (outputs := await stream.take()) is not None:
            found.append(outputs)
    stream.close()
    return found


async def last_output(client: CoreClient, message: NewRequest) -> RequestOutput:
    return (await taken_from(await client.submit([message], takes_deltas=False)))[-1].outputs[-1]


async def until_idle(client: CoreClient) -> None:
    while (await client.snapshot()).stats["blocks_used"] or (await client.snapshot()).stats["requests"]:
        await asyncio.sleep(0.01)


def timeless(output: RequestOutput) -> Any:
    """Return an output without its id, its times and what was cached, as plain data."""
    plain = msgspec.to_builtins(output, str_keys=True)
    del plain["metrics"], plain["request_id"], plain["num_cached_tokens"]
    return plain


def test_all_that_a_reader_gets_can_be_sent_to_another_process(client: CoreClient, builder: RequestBuilder):
    async def run() -> None:
        message = decode(encode(builder.build("", "Once", PARAMS, number=0)), NewRequest)
        stream = await client.submit([message], takes_deltas=True)
        found = await taken_from(stream)
        assert [decode(encode(outputs), StepOutputs) for outputs in found] == found
        deltas = [delta for outputs in found for delta in outputs.deltas]
        assert {delta.request_id for delta in deltas} == set(stream.request_ids)
        (sample,) = found[-1].outputs[0].outputs
        assert "".join(delta.text for delta in deltas) == sample.text
        assert [one for delta in deltas for one in delta.token_ids] == list(sample.token_ids)
        starts = [delta.start for delta in deltas]
        assert starts == [sum(len(one.token_ids) for one in deltas[:index]) for index in range(len(deltas))]
        snapshot, status = await client.snapshot(), client.status()
        assert snapshot.stats["generation_tokens"] >= 20
        assert snapshot.requests is not None
        assert snapshot.requests.finished["length"] >= 1
        assert decode(encode(snapshot), CoreSnapshot) == snapshot
        assert decode(encode(status), CoreStatus) == status
        assert (status.is_alive, status.is_sleeping) == (True, False)
        assert status.num_steps > 0

    asyncio.run(run())


WANTED = {
    "tokens that were drawn": {"temperature": 1.0, "seed": 7, "n": 3},
    "logprobs of the prompt": {"prompt_logprobs": 2, "logprobs": 1},
    "a stop string": {"stop": ["a", "e", "o", "i"], "max_tokens": 60},
}


@pytest.mark.parametrize("takes_deltas", [True, False], ids=["deltas", "outputs"])
@pytest.mark.parametrize("fields", WANTED.values(), ids=WANTED.keys())
def test_outputs_are_those_of_an_engine(client: CoreClient, alone: Engine, fields: Any, takes_deltas: bool):
    params = SamplingParams(**{"max_tokens": 20, "temperature": 0, "ignore_eos": True, **fields})
    prompts = ["Once upon a time", "Hi"]

    async def run() -> list[StepOutputs]:
        messages = [alone.builder.build("", prompt, params, number=0) for prompt in prompts]
        return await taken_from(await client.submit(messages, takes_deltas=takes_deltas), len(prompts))

    found = asyncio.run(run())
    ends = {output.prompt: output for outputs in found for output in outputs.outputs if output.finished}
    for expected in alone.generate(prompts, params, use_tqdm=False):
        assert timeless(ends[expected.prompt]) == timeless(expected)
        if takes_deltas and expected.prompt_logprobs is not None:
            entries = [found for outputs in found for found in outputs.prompt_logprobs.values()]
            assert expected.prompt_logprobs in entries


def test_requests_are_queued_all_or_none_and_wait_while_the_core_pauses(client: CoreClient, builder: RequestBuilder):
    async def run() -> None:
        client.pause()
        message = builder.build("", "Hi", PARAMS, number=0)
        first = await client.submit([message], takes_deltas=True)
        with pytest.raises(QueueFullError, match="waiting_requests") as refused:
            await client.submit([message] * 4, takes_deltas=True)
        assert (refused.value.limit, refused.value.allowed, refused.value.param) == (
            "waiting_requests",
            4,
            refused.value.limit,
        )
        others = await client.submit([message] * 3, takes_deltas=True)
        assert len(set(first.request_ids + others.request_ids)) == 4
        first.close()
        assert (await client.stats())["requests"] == 3
        client.resume()
        await taken_from(others, 3)
        await until_idle(client)

    asyncio.run(run())


def test_a_request_that_can_never_fit_is_refused(client: CoreClient, builder: RequestBuilder):
    async def run() -> None:
        message = builder.build("", "Hi", SamplingParams(n=8, max_tokens=4), number=0)
        with pytest.raises(InvalidRequestError) as refused:
            await client.submit([msgspec.structs.replace(message, params=SamplingParams(n=9))], takes_deltas=True)
        assert refused.value.param == "n"

    asyncio.run(run())


def test_calls_fork_abort_forget_and_sleep(client: CoreClient, builder: RequestBuilder):
    async def run() -> None:
        message = builder.build(
            "", "Once", SamplingParams(max_tokens=60, temperature=1, seed=3, ignore_eos=True), number=0
        )
        client.pause()
        stream = await client.submit([msgspec.structs.replace(message, is_streamed=True)], takes_deltas=True)
        (request_id,) = stream.request_ids
        options = {"num_output_tokens": 0, "first_token_ids": [70, 71]}
        assert await client.fork(request_id, None, options) == [1, 2]
        await client.abort([request_id], 0)
        client.resume()
        last = (await taken_from(stream))[-1].outputs[-1]
        ends = {sample.index: (sample.token_ids[:1], sample.finish_reason) for sample in last.outputs}
        assert ends == {0: ((), "abort"), 1: ((70,), "length"), 2: ((71,), "length")}
        with pytest.raises(InvalidRequestError, match="request_id"):
            await client.fork("none", 1, {})
        plain = builder.build("", "Hi", PARAMS, number=0)
        before = await last_output(client, plain)
        await client.reset_prefix_cache()
        await client.sleep(1, "abort")
        assert client.status().is_sleeping
        with pytest.raises(ConfigError, match="generate: got an engine that sleeps"):
            await client.submit([plain], takes_deltas=True)
        await client.wake_up(["weights"])
        await client.wake_up()
        assert not client.status().is_sleeping
        assert timeless(await last_output(client, plain)) == timeless(before)

    asyncio.run(run())


def test_a_reader_that_does_not_take_gets_what_has_come_in_one_output(client: CoreClient, builder: RequestBuilder):
    async def run() -> None:
        message = builder.build("", "Hi", SamplingParams(max_tokens=50, temperature=0, ignore_eos=True), number=0)
        stream = await client.submit([msgspec.structs.replace(message, is_streamed=True)], takes_deltas=True)
        while (await client.stats())["requests_running"]:
            await asyncio.sleep(0.01)
        found = await taken_from(stream)
        assert len(found) <= 3
        assert sum(len(delta.token_ids) for outputs in found for delta in outputs.deltas) == 50

    asyncio.run(run())


def test_one_profile_is_taken_at_a_time(client: CoreClient, tmp_path: Path):
    async def run() -> None:
        assert not await client.stop_profile()
        assert await client.start_profile(str(tmp_path))
        assert not await client.start_profile(str(tmp_path))
        assert await client.stop_profile()
        assert list(tmp_path.rglob("*.xplane.pb"))

    asyncio.run(run())


class HoldUp:
    """A client whose steps and grammars can be held up."""

    def __init__(self, client: CoreClient, folder: Path):
        self.client, self._folder = client, folder

    def hold(self, name: str) -> None:
        (self._folder / name).touch()

    def release(self, name: str) -> None:
        (self._folder / name).unlink()

    async def begins(self, name: str) -> None:
        while not (self._folder / f"{name} held").exists():
            await asyncio.sleep(0.01)


@pytest.fixture(params=["thread", "process"])
def hold_up(
    request: pytest.FixtureRequest,
    tiny: str,
    start_process: StartProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[HoldUp]:
    options = {"folder": str(tmp_path)}
    if request.param == "process":
        yield HoldUp(start_process("held", options=options), tmp_path)
        return
    from .core_makers import held

    monkeypatch.setattr(Grammars, "matcher", Grammars.matcher)  # Put back afterwards.
    engine = held(Engine(tiny, **OPTIONS).config, lambda *_: None, **options)
    client = ThreadClient(engine)
    yield HoldUp(client, tmp_path)
    client.shutdown()


def test_status_and_snapshot_wait_for_no_step_and_no_step_for_a_grammar(hold_up: HoldUp, builder: RequestBuilder):
    """A step may wait for a program for a minute; a server tells its health and its metrics meanwhile."""
    client = hold_up.client
    choice = SamplingParams(max_tokens=20, structured_outputs={"choice": ["yes", "no"]})

    async def run() -> None:
        hold_up.hold("grammar")
        with_grammar = asyncio.create_task(last_output(client, builder.build("", "Once", choice, number=0)))
        await hold_up.begins("grammar")
        await last_output(client, builder.build("", "Once", PARAMS, number=0))
        assert not with_grammar.done()
        given_up = asyncio.create_task(client.submit([builder.build("", "Hi", choice, number=0)], takes_deltas=True))
        await asyncio.sleep(0.1)
        given_up.cancel()
        hold_up.release("grammar")
        (sample,) = (await with_grammar).outputs
        assert sample.text in ("yes", "no")
        await until_idle(client)
        hold_up.hold("step")
        last = asyncio.create_task(last_output(client, builder.build("", "Once", PARAMS, number=0)))
        await hold_up.begins("step")
        assert client.status().is_alive
        assert (await asyncio.wait_for(client.snapshot(), 20)).block_size == SIZES["block_size"]
        forgetting = asyncio.create_task(client.reset_prefix_cache())
        assert not (await asyncio.wait([forgetting], timeout=0.1))[0], "this call waits for the step"
        hold_up.release("step")
        await forgetting
        assert (await last).finished

    asyncio.run(run())


@pytest.fixture(params=["thread", "process"])
def own_client(request: pytest.FixtureRequest, tiny: str, start_process: StartProcess) -> Iterator[CoreClient]:
    """Give a client that the test may end."""
    client = start_process() if request.param == "process" else ThreadClient(Engine(tiny, **OPTIONS))
    yield client
    client.shutdown()


@pytest.fixture(params=["thread", "process"])
def cannot_compile(
    request: pytest.FixtureRequest, tiny: str, start_process: StartProcess, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CoreClient]:
    if request.param == "process":
        yield start_process("cannot_compile")
        return
    from .core_makers import cannot_compile

    monkeypatch.setattr(Programs, "__init__", Programs.__init__)  # Put back afterwards.
    client = ThreadClient(cannot_compile(EngineConfig(model=tiny, **OPTIONS), lambda *_: None))
    yield client
    client.shutdown()


def test_a_program_that_cannot_be_compiled_ends_the_requests_that_need_it_alone(
    cannot_compile: CoreClient, alone: Engine
):
    async def run() -> None:
        plain = alone.builder.build("", "Once", PARAMS, number=0)
        scored = alone.builder.build("", "Once", SamplingParams(max_tokens=20, prompt_logprobs=1), number=0)
        outputs = await asyncio.gather(*(last_output(cannot_compile, one) for one in (plain, scored, plain, scored)))
        for failed in outputs[1::2]:
            assert failed.error is not None
            assert "a program that this request needs was not compiled (MemoryError" in failed.error
        expected = timeless(alone.generate("Once", PARAMS, use_tqdm=False)[0])
        assert [timeless(output) for output in outputs[::2]] == [expected] * 2
        await until_idle(cannot_compile)

    asyncio.run(run())


def test_an_engine_that_was_shut_down_has_a_status_and_counters_and_takes_no_call(
    own_client: CoreClient, builder: RequestBuilder
):
    async def run() -> None:
        before = threading.active_count()
        await last_output(own_client, builder.build("", "Hi", PARAMS, number=0))
        own_client.pause()
        stream = await own_client.submit([builder.build("", "Hi", PARAMS, number=0)], takes_deltas=True)
        await asyncio.to_thread(own_client.shutdown)
        with pytest.raises(EngineStoppedError, match="shut down"):
            await taken_from(stream)
        assert not own_client.status().is_alive
        assert not own_client.status().is_compiling
        assert not own_client.lost_process
        assert (await own_client.snapshot()).stats["generation_tokens"] == 20
        for call in (
            own_client.stats(),
            own_client.submit([builder.build("", "Hi", PARAMS, number=0)], takes_deltas=True),
        ):
            with pytest.raises(EngineStoppedError):
                await call
        own_client.shutdown()
        assert threading.active_count() <= before + 1  # One of the event loop's pool.

    asyncio.run(run())
    if isinstance(own_client, ProcessClient):
        assert own_client.pid is not None
        assert not Path(f"/proc/{own_client.pid}").exists()
