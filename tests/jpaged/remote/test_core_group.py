"""Several core processes behind one client: one's tokens, calls that reach the right ones, ends and restarts."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from jpaged import Engine, SamplingParams
from jpaged.config.engine_config import EngineConfig
from jpaged.errors import ConfigError, EngineStoppedError, InvalidRequestError, QueueFullError
from jpaged.intake.request_builder import RequestBuilder
from jpaged.remote.core_client import CoreState, OutputStream
from jpaged.remote.core_group import CoreGroup
from jpaged.remote.process_client import ProcessClient

from .conftest import OPTIONS
from .test_clients import PARAMS, last_output, taken_from, timeless, until_idle
from .test_core_process import is_running, take_all, until

pytestmark = pytest.mark.usefixtures("shared_executables")
LONG = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=20, temperature=1, ignore_eos=True)


SIZES = {**OPTIONS, "limits": {"waiting_requests": 8}}


def start(tiny: str, num_cores: int, maker: str = "", **options: Any) -> CoreGroup:
    named = {"maker": f"core_makers:{maker}"} if maker else {}
    return CoreGroup(EngineConfig(model=tiny, **SIZES, data_parallel_size=num_cores), **named, **options)


@pytest.fixture(scope="module")
def group(tiny: str, shared_executables: None) -> Iterator[CoreGroup]:
    """Give two cores, each of which may be started again twice; tests leave them awake and idle."""
    found = start(tiny, 2, num_restarts=2)
    yield found
    found.shutdown()


def run_for_a_minute(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def client_of(stream: OutputStream) -> ProcessClient:
    """Return the client of the core that computes a stream."""
    assert isinstance(stream._owner, ProcessClient)
    return stream._owner


async def until_true(is_true: Callable[[], Any]) -> None:
    while not is_true():
        await asyncio.sleep(0.01)


def test_two_cores_share_the_work_and_draw_as_one_does(group: CoreGroup, alone: Engine):
    """Draws without a seed depend on a request's number, which goes on over both."""
    prompts = [f"{index} times" for index in range(8)]
    expected = {one.prompt: one for one in alone.generate(prompts, DRAWN, use_tqdm=False)}

    async def run() -> None:
        before = {engine: one.stats["generation_tokens"] for engine, one in (await group.snapshots()).items()}
        group.pause()
        streams = []
        for prompt in prompts:
            message = alone.builder.build("", prompt, DRAWN, number=0)
            streams.append(await group.submit([message], takes_deltas=True))
        group.resume()
        for stream in streams:
            output = (await taken_from(stream))[-1].outputs[-1]
            assert timeless(output) == timeless(expected[output.prompt])
        assert len({client_of(stream) for stream in streams}) == 2
        assert len({one for stream in streams for one in stream.request_ids}) == 8
        after = {engine: one.stats["generation_tokens"] for engine, one in (await group.snapshots()).items()}
        assert {engine: after[engine] - before[engine] for engine in (0, 1)} == {0: 80, 1: 80}
        assert (await group.snapshot()).stats["generation_tokens"] == sum(after.values())
        assert (await group.stats())["blocks"] == 2 * alone.stats()["blocks"]
        assert group.states() == [CoreState(0, "ok"), CoreState(1, "ok")]

    run_for_a_minute(run())


def test_a_conversation_goes_where_its_prefix_is(group: CoreGroup, alone: Engine):
    async def run() -> None:
        for index in range(4):
            prompt, clients = f"{index} was the first of all the numbers", set()
            for _ in range(3):
                stream = await group.submit([alone.builder.build("", prompt, PARAMS, number=0)], takes_deltas=True)
                output = (await taken_from(stream))[-1].outputs[-1]
                clients.add(client_of(stream))
                prompt += output.outputs[0].text
            assert len(clients) == 1
            assert output.num_cached_tokens >= 40

    run_for_a_minute(run())


def test_calls_reach_the_core_of_their_request_or_all(group: CoreGroup, builder: RequestBuilder):
    async def run() -> None:
        group.pause()
        drawn = SamplingParams(max_tokens=60, temperature=1, seed=3, ignore_eos=True)
        messages = [builder.build("", prompt, drawn, number=0) for prompt in ("Once", "Twice")]
        streams = [await group.submit([message], takes_deltas=True) for message in messages]
        assert {one.stats["requests_waiting"] for one in (await group.snapshots()).values()} == {1}
        for stream in streams:
            assert await group.fork(stream.request_ids[0], 1, {}) == [1]
        await group.abort([one for stream in streams for one in stream.request_ids])
        for stream in streams:
            (output,) = (await taken_from(stream))[-1].outputs
            assert {sample.finish_reason for sample in output.outputs} == {"abort"}
        with pytest.raises(InvalidRequestError, match="request_id"):
            await group.fork(streams[0].request_ids[0], 1, {})
        group.resume()
        await group.sleep(1, "abort")
        assert group.states() == [CoreState(0, "sleeping"), CoreState(1, "sleeping")]
        with pytest.raises(ConfigError, match="an engine that sleeps"):
            await group.submit(messages[:1], takes_deltas=True)
        await group.wake_up()
        await group.reset_prefix_cache()
        assert group.states() == [CoreState(0, "ok"), CoreState(1, "ok")]
        await until_idle(group)

    run_for_a_minute(run())


def test_one_profile_of_all_cores_is_taken_at_a_time(group: CoreGroup, tmp_path: Path):
    async def run() -> None:
        assert not await group.stop_profile()
        assert await group.start_profile(str(tmp_path))
        assert not await group.start_profile(str(tmp_path))
        assert await group.stop_profile()
        assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.xplane.pb")} == {
            "engine-0",
            "engine-1",
        }

    run_for_a_minute(run())


def test_what_may_wait_is_divided_and_a_full_core_leaves_room_in_the_other(group: CoreGroup, builder: RequestBuilder):
    async def run() -> None:
        group.pause()
        long, short = (builder.build("", prompt, PARAMS, number=0) for prompt in ("x" * 90, "Hi"))
        streams = [await group.submit([long], takes_deltas=True)]
        streams += [await group.submit([short], takes_deltas=True) for _ in range(7)]
        computing = [client_of(stream) for stream in streams]
        assert computing[1:5] == [computing[1]] * 4 != [computing[0]] * 4
        assert computing[5:] == [computing[0]] * 3, "less is before them where the short ones are, which is full"
        with pytest.raises(QueueFullError):
            await group.submit([short], takes_deltas=True)
        for stream in streams:
            stream.close()
        group.resume()
        await until_idle(group)

    run_for_a_minute(run())


def test_a_killed_core_ends_its_streams_alone_and_is_started_again(
    group: CoreGroup, builder: RequestBuilder, alone: Engine, caplog: pytest.LogCaptureFixture
):
    expected = alone.generate("Hi", LONG, use_tqdm=False)[0]

    async def run() -> None:
        group.pause()
        messages = [builder.build("", "Hi", LONG, number=0)]
        streams = [await group.submit(messages, takes_deltas=False) for _ in range(4)]
        num_files = len(os.listdir("/dev/fd"))
        lost = client_of(streams[0])
        assert lost.pid is not None
        os.kill(lost.pid, signal.SIGKILL)
        survivors = [stream for stream in streams if client_of(stream) is not lost]
        assert len(survivors) == 2
        for stream in set(streams).difference(survivors):
            with pytest.raises(EngineStoppedError, match=r"^the core process was ended by SIGKILL$"):
                await asyncio.wait_for(take_all(stream), 5)
        assert [one.status for one in group.states()] == ["starting", "ok"]
        assert group.lost_process == ""
        more = await group.submit(messages, takes_deltas=False)
        assert client_of(more) is not lost
        await until_true(lambda: group.states()[0].status == "ok")
        assert (await group.snapshots())[0].stats["generation_tokens"] == 0
        await until_true(lambda: len(os.listdir("/dev/fd")) <= num_files)  # Those of the lost one are closed.
        later = await group.submit(messages, takes_deltas=False)
        assert client_of(later) not in (lost, client_of(more)), "it has nothing to do"
        ids = [one for stream in (*streams, more, later) for one in stream.request_ids]
        assert len(set(ids)) == 6
        assert len({one.partition("-")[0] for one in ids}) == 1
        await asyncio.sleep(0.1)
        assert not group.status().num_steps or (await group.snapshots())[0].stats["steps"] == 0, "it pauses too"
        group.resume()
        for stream in (*survivors, more, later):
            assert timeless((await taken_from(stream))[-1].outputs[-1]) == timeless(expected)
        await until_idle(group)

    with caplog.at_level(logging.INFO, logger="jpaged"):
        run_for_a_minute(run())
    assert "engine 0: the core process was ended by SIGKILL; restarts left: 2" in caplog.text
    assert "engine 0 serves again" in caplog.text


def test_a_core_that_slept_sleeps_again(group: CoreGroup, builder: RequestBuilder):
    async def run() -> None:
        await group.sleep(1, "abort")
        pid = group._cores[1].client.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until_true(lambda: group.states()[1].status == "starting")
        assert group.status().is_sleeping
        await until_true(lambda: [one.status for one in group.states()] == ["sleeping", "sleeping"])
        await group.wake_up()
        assert (await last_output(group, builder.build("", "Hi", PARAMS, number=0))).finished

    run_for_a_minute(run())


def test_a_core_is_lost_once_its_restarts_are_spent_of_which_failed_ones_are_some(
    tiny: str, tmp_path: Path, builder: RequestBuilder
):
    group = start(tiny, 1, "starts_once", options={"folder": str(tmp_path)}, num_restarts=2)

    async def run() -> None:
        message = builder.build("", "Hi", PARAMS, number=0)
        stream = await group.submit([message], takes_deltas=True)
        await taken_from(stream)
        assert client_of(stream).pid is not None
        os.kill(client_of(stream).pid or 0, signal.SIGKILL)
        await until_true(lambda: not group.status().is_alive)
        assert group.lost_process == ""
        with pytest.raises(EngineStoppedError, match="is started again"):
            await group.submit([message], takes_deltas=True)
        await until_true(lambda: group.lost_process)
        assert group._cores[0].num_restarts_left == 0
        assert group.lost_process == "model: got one that is gone"
        assert group.states() == [CoreState(0, "failed")]
        with pytest.raises(EngineStoppedError, match="is gone"):
            await group.submit([message], takes_deltas=True)

    try:
        run_for_a_minute(run())
    finally:
        group.shutdown()
    assert group.lost_process == ""


def test_shutdown_ends_a_start(tiny: str, tmp_path: Path):
    options = {"folder": str(tmp_path)}
    group = start(tiny, 1, "starts_once_then_sleeps", options=options, num_restarts=1)
    pid = group._cores[0].client.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until((tmp_path / "sleeps").exists)
    begin_s = time.monotonic()
    group.shutdown()
    assert time.monotonic() - begin_s < 10
    assert not any(keeper.is_alive() for keeper in group._keepers)


def test_a_core_that_cannot_start_ends_the_others(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pids: list[int] = []
    wait_until_ready = ProcessClient._wait_until_ready

    def noting(self: ProcessClient, *args: Any) -> Any:
        pids.append(self.pid or 0)
        return wait_until_ready(self, *args)

    monkeypatch.setattr(ProcessClient, "_wait_until_ready", noting)
    with pytest.raises(ConfigError, match="model: got one that is gone"):
        start(tiny, 2, "starts_once", options={"folder": str(tmp_path)})
    assert len(pids) == 2
    assert not any(map(is_running, pids))
