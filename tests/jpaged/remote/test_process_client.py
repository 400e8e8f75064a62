"""Messages that are lost, repeated, broken or too long cost no other request anything, and no process its life."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from jpaged import Engine, SamplingParams, codec
from jpaged.errors import InvalidRequestError, JpagedError, QueueFullError
from jpaged.messages import NewRequest
from jpaged.outputs import RequestOutput
from jpaged.remote import message_socket
from jpaged.remote.core_client import OutputStream
from jpaged.remote.process_client import ProcessClient
from jpaged.remote.sent_outputs import LOST
from jpaged.remote.wire import Call, Drop, Submit, Taken, Update

from .conftest import StartProcess
from .test_clients import last_output, taken_from, timeless, until_idle

MAX_BYTES = 30_000
"""Of a message of the core. Its tokenizer fits."""
PARAMS = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def process(start_process: StartProcess) -> ProcessClient:
    return start_process("has_short_messages", options={"max_bytes": MAX_BYTES})


@pytest.fixture(scope="module")
def message(alone: Engine) -> NewRequest:
    """Give a request that is streamed token by token."""
    return msgspec.structs.replace(alone.builder.build("", "Once", PARAMS, number=0), is_streamed=True)


@pytest.fixture(scope="module")
def expected(alone: Engine) -> RequestOutput:
    """Give its output."""
    return alone.generate("Once", PARAMS, use_tqdm=False)[0]


def run_for_a_minute(test: Coroutine[Any, Any, None]) -> None:
    """Run a test, which would wait for ever for what is lost."""
    asyncio.run(asyncio.wait_for(test, 60))


@pytest.mark.parametrize("which", ["first", "last"])
def test_lost_outputs_end_their_request_alone_by_an_error(
    process: ProcessClient,
    message: NewRequest,
    expected: RequestOutput,
    monkeypatch: pytest.MonkeyPatch,
    which: str,
):
    lost, update = list[int](), ProcessClient._update

    def lose(self: ProcessClient, message: Update) -> None:
        """Lose the first or the last outputs of the stream that was submitted first."""
        for one in message.outputs:
            is_last = any(output.finished for output in one.outputs.outputs)
            if one.stream == first and not lost and (which == "first" or is_last):
                lost.append(first)
                others = tuple(each for each in message.outputs if each.stream != first)
                message = msgspec.structs.replace(message, outputs=others)
        update(self, message)

    async def error_of_first() -> str:
        try:
            return (await taken_from(streams[0]))[-1].outputs[0].error or ""
        except JpagedError as error:
            streams[0].close()
            return str(error)

    async def run() -> None:
        nonlocal first
        monkeypatch.setattr(ProcessClient, "_update", lose)
        process.pause()
        for _ in range(2):
            streams.append(await process.submit([message], takes_deltas=True))
            first = first or min(process._streams)
        process.resume()
        error, found = await asyncio.gather(error_of_first(), taken_from(streams[1]))
        assert (error, lost) == (LOST, [first])
        assert timeless(found[-1].outputs[0]) == timeless(expected)
        tokens = [one for outputs in found for delta in outputs.deltas for one in delta.token_ids]
        assert tuple(tokens) == expected.outputs[0].token_ids
        await until_idle(process)

    first, streams = 0, list[OutputStream]()
    run_for_a_minute(run())


def test_messages_that_come_twice_change_nothing(
    process: ProcessClient, message: NewRequest, expected: RequestOutput, monkeypatch: pytest.MonkeyPatch
):
    take, send = ProcessClient._take_data, ProcessClient._send

    def take_twice(self: ProcessClient, data: bytes) -> None:
        take(self, data)
        take(self, data)

    def send_twice(self: ProcessClient, message: Any) -> None:
        send(self, message)
        send(self, message)

    async def run() -> None:
        monkeypatch.setattr(ProcessClient, "_take_data", take_twice)
        monkeypatch.setattr(ProcessClient, "_send", send_twice)
        for _ in range(2):
            found = await taken_from(await process.submit([message], takes_deltas=True))
            assert timeless(found[-1].outputs[-1]) == timeless(expected)
            tokens = [one for outputs in found for delta in outputs.deltas for one in delta.token_ids]
            assert tuple(tokens) == expected.outputs[0].token_ids
        left = await process.submit([message], takes_deltas=True)
        left.close()
        await until_idle(process)

    run_for_a_minute(run())


def test_outputs_that_are_told_as_taken_twice_are_followed_by_the_next_ones_alone(
    process: ProcessClient, message: NewRequest, expected: RequestOutput
):
    """Else some would come that their reader has no room for."""

    async def run() -> None:
        stream = await process.submit([message], takes_deltas=True)
        first = await stream.take()
        (number,) = process._streams
        for _ in range(PARAMS.max_tokens or 0):
            process._socket.send(codec.encode(Taken({number: 1})))
            time.sleep(0.005)  # The event loop reads nothing meanwhile.
        assert first is not None
        found = [first, *await taken_from(stream)]
        tokens = [one for outputs in found for delta in outputs.deltas for one in delta.token_ids]
        assert tuple(tokens) == expected.outputs[0].token_ids

    run_for_a_minute(run())


def test_messages_that_mean_nothing_are_passed_over(
    process: ProcessClient, message: NewRequest, expected: RequestOutput
):
    submit = codec.encode(Submit(10**6, True, codec.PackedRequests.of([message])))
    broken = [b"", b"\xc1", b"jpaged", submit[:-1], submit[:10], *map(codec.encode, (["Strange", 1], ["Drop", "x"]))]
    strange = [Drop(10**9), Taken({10**9: -1}), Call(10**9, "shutdown"), Call(10**9, "fork", (1, 2, 3, 4, 5))]

    async def run() -> None:
        stream = await process.submit([message], takes_deltas=True)
        for data in (*broken, *map(codec.encode, strange)):
            process._socket.send(data)
            process._take_data(data)
        assert timeless((await taken_from(stream))[-1].outputs[0]) == timeless(expected)
        with pytest.raises(JpagedError, match="the core has no call shutdown"):
            await process._call("shutdown")
        with pytest.raises(JpagedError, match="TypeError"):
            await process._call("fork")
        await until_idle(process)

    run_for_a_minute(run())


def test_outputs_that_no_message_can_hold_end_their_stream_alone(
    process: ProcessClient, alone: Engine, message: NewRequest, expected: RequestOutput
):
    params = SamplingParams(max_tokens=100, n=4, logprobs=20, temperature=1, seed=1, ignore_eos=True)

    async def run() -> None:
        process.pause()
        stream = await process.submit([alone.builder.build("", "Hi", params, number=0)], takes_deltas=False)
        beside = asyncio.create_task(last_output(process, message))
        await asyncio.sleep(0)
        process.resume()
        with pytest.raises(JpagedError, match=f"a message of [0-9]+ bytes, allowed: at most {MAX_BYTES}"):
            await taken_from(stream)
        stream.close()
        assert timeless(await beside) == timeless(expected)
        await until_idle(process)

    run_for_a_minute(run())


def test_a_prompt_with_more_logprobs_than_a_message_holds_gets_them(process: ProcessClient, alone: Engine):
    params = SamplingParams(max_tokens=2, prompt_logprobs=7, temperature=0, ignore_eos=True)
    prompt = "x" * 110

    async def run() -> None:
        output = await last_output(process, alone.builder.build("", prompt, params, number=0))
        assert len(codec.encode(output)) > MAX_BYTES
        assert timeless(output) == timeless(alone.generate(prompt, params, use_tqdm=False)[0])

    run_for_a_minute(run())


def test_a_request_that_no_message_can_hold_is_refused(
    process: ProcessClient, message: NewRequest, expected: RequestOutput, monkeypatch: pytest.MonkeyPatch
):
    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(message_socket, "MAX_MESSAGE_BYTES", len(codec.encode(Drop(10**9))))
            with pytest.raises(InvalidRequestError, match="cannot be sent to the core process: a message of"):
                await process.submit([message], takes_deltas=True)
        assert timeless(await last_output(process, message)) == timeless(expected)

    run_for_a_minute(run())


def test_a_front_that_reads_nothing_for_long_gets_all_that_has_come(process: ProcessClient, message: NewRequest):
    """Its event loop is busy while a stream's outputs come; steps go on meanwhile."""

    async def run() -> None:
        stream = await process.submit([message], takes_deltas=True)
        process._socket.wait(5)  # Messages have come.
        found = await taken_from(stream)
        assert sum(len(delta.token_ids) for outputs in found for delta in outputs.deltas) == PARAMS.max_tokens

    run_for_a_minute(run())


def test_it_is_told_once_that_the_requests_of_a_stream_are_over(process: ProcessClient, message: NewRequest):
    told: list[str] = []

    async def submitted(name: str) -> OutputStream:
        return await process.submit([message], takes_deltas=True, on_over=lambda: told.append(name))

    async def run() -> None:
        await taken_from(await submitted("computed"))
        assert told == ["computed"]
        left = await submitted("left")
        left.close()
        left.close()
        assert told == ["computed", "left"]
        process.pause()
        waiting = [await submitted("waits") for _ in range(4)]
        with pytest.raises(QueueFullError):
            await submitted("refused")
        assert told[2:] == ["refused"]
        for stream in waiting:
            stream.close()
        process.resume()
        await until_idle(process)

    run_for_a_minute(run())
