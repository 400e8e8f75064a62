"""The client of an engine in this process: what it answers, and what it waits for."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from jpaged import Engine, SamplingParams
from jpaged.codec import decode, encode
from jpaged.errors import EngineStoppedError
from jpaged.messages import NewRequest
from jpaged.outputs import StepOutputs
from jpaged.remote.core_client import CoreSnapshot, CoreStatus, OutputStream
from jpaged.remote.thread_client import ThreadClient
from jpaged.text.grammar.grammar import Grammars

from ..tiny_model import SIZES

pytestmark = pytest.mark.usefixtures("shared_executables")
PARAMS = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


@pytest.fixture
def engine(tiny: str) -> Engine:
    return Engine(tiny, **SIZES)


@pytest.fixture
def client(engine: Engine) -> Iterator[ThreadClient]:
    client = ThreadClient(engine)
    yield client
    client.shutdown()


async def taken_from(stream: OutputStream) -> list[StepOutputs]:
    """Return all that a stream of one request gets."""
    found: list[StepOutputs] = []
    while not (found and found[-1].outputs):
        if (outputs := await stream.take()) is not None:
            found.append(outputs)
    return found


def test_all_that_a_reader_gets_can_be_sent_to_another_process(engine: Engine, client: ThreadClient):
    async def run() -> None:
        message = decode(encode(engine.builder.build("", "Once", PARAMS, number=0)), NewRequest)
        found = await taken_from(await client.submit([message], takes_deltas=True))
        assert [decode(encode(outputs), StepOutputs) for outputs in found] == found
        deltas = [delta for outputs in found for delta in outputs.deltas]
        (sample,) = found[-1].outputs[0].outputs
        assert "".join(delta.text for delta in deltas) == sample.text
        assert [one for delta in deltas for one in delta.token_ids] == list(sample.token_ids)
        snapshot, status = await client.snapshot(), client.status()
        assert snapshot.stats["generation_tokens"] == 20
        assert decode(encode(snapshot), CoreSnapshot) == snapshot
        assert decode(encode(status), CoreStatus) == status

    asyncio.run(run())


def test_status_and_snapshot_wait_for_no_step(engine: Engine, client: ThreadClient):
    """A step may wait for a program for a minute; a server tells its health and its metrics meanwhile."""

    async def run() -> None:
        with engine.loop.turn("step"):
            assert client.status().is_alive
            assert (await asyncio.wait_for(client.snapshot(), 20)).block_size == engine.step_sizes.block_size
            forgetting = asyncio.create_task(client.reset_prefix_cache())
            assert not (await asyncio.wait([forgetting], timeout=0.1))[0], "this call waits for the step"
        await forgetting

    asyncio.run(run())


def test_an_engine_that_was_shut_down_has_a_status_and_counters_and_takes_no_call(client: ThreadClient):
    async def run() -> None:
        await asyncio.to_thread(client.shutdown)
        assert not client.status().is_alive
        assert (await client.snapshot()).stats["generation_tokens"] == 0
        with pytest.raises(EngineStoppedError):
            await client.stats()

    asyncio.run(run())


def test_a_grammar_is_compiled_beside_the_steps_and_the_calls_of_others(
    engine: Engine, client: ThreadClient, monkeypatch: pytest.MonkeyPatch
):
    begun, may_go_on, matcher = threading.Event(), threading.Event(), Grammars.matcher

    def slow(self: Grammars, grammar: str) -> object:
        begun.set()
        assert may_go_on.wait(60)
        return matcher(self, grammar)

    async def run() -> None:
        plain = engine.builder.build("", "Once", PARAMS, number=0)
        choice = SamplingParams(max_tokens=20, structured_outputs={"choice": ["yes", "no"]})
        with_grammar = engine.builder.build("", "Once", choice, number=0)
        monkeypatch.setattr(Grammars, "matcher", slow)
        waiting = asyncio.create_task(client.submit([with_grammar], takes_deltas=True))
        assert await asyncio.to_thread(begun.wait, 60)
        await taken_from(await client.submit([plain], takes_deltas=True))
        assert not waiting.done()
        may_go_on.set()
        (sample,) = (await taken_from(await waiting))[-1].outputs[0].outputs
        assert sample.text in ("yes", "no")

    asyncio.run(run())


def test_one_profile_is_taken_at_a_time(client: ThreadClient, tmp_path):
    async def run() -> None:
        assert not await client.stop_profile()
        assert await client.start_profile(str(tmp_path))
        assert not await client.start_profile(str(tmp_path))
        assert await client.stop_profile()
        assert list(tmp_path.rglob("*.xplane.pb"))

    asyncio.run(run())
