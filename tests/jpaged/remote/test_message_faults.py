"""Messages that are cut, repeated, reordered or too long by a byte, in both directions of a core process.

Those of some requests, the victims, are changed on their way; their neighbours' tokens are what they are alone. Each
victim ends by its own tokens or by one error, and nothing is left.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged import Engine, SamplingParams, codec
from jpaged.errors import JpagedError
from jpaged.messages import NewRequest
from jpaged.outputs import RequestOutput, StepOutputs
from jpaged.remote.process_client import ProcessClient
from jpaged.remote.sent_outputs import LOST, LOST_MESSAGE
from jpaged.remote.wire import (
    Call,
    Drop,
    Expect,
    FromCore,
    PromptPiece,
    Submit,
    Taken,
    ToCore,
    Update,
    read_by_front,
)

from .conftest import StartProcess
from .test_clients import taken_from, timeless, until_idle

KINDS = ("cut", "repeated", "held", "long")
Send = Callable[[bytes], None]


class Fault(msgspec.Struct, frozen=True):
    """What becomes of one message."""

    kind: str
    num_before: int
    """Messages between the last fault and this one."""
    amount: int
    """Bytes that are left of a cut one, or messages that overtake a held one."""


FAULTS = st.lists(
    st.builds(Fault, st.sampled_from(KINDS), st.integers(0, 12), st.integers(0, 30)), min_size=20, max_size=80
)


class Line:
    """One direction of a line, that changes messages until there are no more faults."""

    def __init__(self, faults: Sequence[Fault]):
        self.counts: Counter[str] = Counter()
        """Kind → how many messages it has changed; all messages under "all"."""
        self._faults, self._num_before = deque(faults), 0
        self._held: list[tuple[int, bytes]] = []
        """Messages, and how many more go before them."""

    def carry(self, message: bytes, send: Send) -> None:
        """Take a message to its other end, or what becomes of it, and those that have been held long enough."""
        self.counts["all"] += 1
        for arrived in self._changed(message):
            send(arrived)
        self._held = [(left - 1, one) for left, one in self._held]
        for left, one in self._held:
            if left < 0:
                send(one)
        self._held = [one for one in self._held if one[0] >= 0]

    def _changed(self, message: bytes) -> list[bytes]:
        """Return what arrives now of a message."""
        self._num_before += 1
        if not self._faults or self._num_before <= self._faults[0].num_before:
            return [message]
        fault, self._num_before = self._faults.popleft(), 0
        self.counts[fault.kind] += 1
        if fault.kind == "held":
            self._held.append((fault.amount + 1, message))
            return []
        return {
            "cut": [message[: fault.amount % len(message)]],
            "repeated": [message, message],
            "long": [message + b"\0"],
        }[fault.kind]


class Victims:
    """Changes the messages of all streams but some, where a client sends and takes them."""

    def __init__(self, client: ProcessClient, faults: Sequence[Fault], patch: pytest.MonkeyPatch):
        """From now on; the streams that the client has already are neighbours."""
        self.lines = Line(faults), Line(faults[::-1])
        """To the core, and from it."""
        self._neighbours = frozenset(client._streams)
        self._send, self._take_data = client._send, client._take_data
        self._send_data = client._socket.send
        patch.setattr(client, "_send", self.send)
        patch.setattr(client, "_take_data", self.take_data)

    def send(self, message: ToCore) -> None:
        """Send a message to the core: the neighbours' part of it as it is."""
        if isinstance(message, Taken):
            for number, num_taken in message.streams.items():
                self._send_one(number, Taken({number: num_taken}))
        else:
            assert isinstance(message, Submit | Drop | Call | Expect)
            self._send_one(getattr(message, "stream", 0), message)

    def _send_one(self, stream: int, message: ToCore) -> None:
        if stream in self._neighbours:
            self._send(message)
        else:
            self.lines[0].carry(codec.encode(message), self._send_data)

    def take_data(self, data: bytes) -> None:
        """Take a message from the core: each part of it by itself, and heartbeats and the neighbours' parts first."""
        message = read_by_front(data)
        if isinstance(message, PromptPiece):
            self._take_one(message.stream, message)
            return
        assert isinstance(message, Update)
        self._take_data(codec.encode(self._part(message, self._neighbours, message.open_streams)))
        numbers = {one.stream for one in (*message.outputs, *message.failures)}
        for number in sorted({*numbers, *(one.number for one in message.answers)} - self._neighbours):
            self._take_one(number, self._part(message, {number}))

    def _part(self, update: Update, numbers: Set[int], open_streams: dict[int, int] | None = None) -> Update:
        """Return what an update has for some streams and calls."""
        return Update(
            update.status,
            tuple(one for one in update.outputs if one.stream in numbers),
            tuple(one for one in update.answers if one.number in numbers),
            tuple(one for one in update.failures if one.stream in numbers),
            open_streams,
        )

    def _take_one(self, stream: int, message: FromCore) -> None:
        if stream in self._neighbours:
            self._take_data(codec.encode(message))
        else:
            self.lines[1].carry(codec.encode(message), self._take_data)


VICTIMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samples": {"n": 2, "temperature": 1.0, "seed": 7},
    "logprobs of the prompt": {"prompt_logprobs": 2, "logprobs": 1},
    "a grammar": {"structured_outputs": {"choice": ["yes", "no", "a long answer"]}},
}
NUM_TIMES = 3
"""How often each victim is sent, one time after another."""
NEIGHBOURS = {"greedy": {"max_tokens": 100}, "samples": {"max_tokens": 100, "n": 2, "temperature": 1.0, "seed": 3}}


class Asked(NamedTuple):
    """A request, and its output alone."""

    message: NewRequest
    expected: RequestOutput

    def is_met_by(self, found: Sequence[StepOutputs]) -> bool:
        """Return whether what a stream has got is the output, and so are its deltas, or outputs that never go back."""
        tokens: dict[int, list[int]] = {sample.index: [] for sample in self.expected.outputs}
        for delta in (delta for outputs in found for delta in outputs.deltas):
            tokens[delta.index] += delta.token_ids
        are_deltas = {index: tuple(ids) for index, ids in tokens.items()} == {
            sample.index: sample.token_ids for sample in self.expected.outputs
        }
        lengths = [sum(len(one.token_ids) for one in output.outputs) for outputs in found for output in outputs.outputs]
        is_whole = timeless(found[-1].outputs[-1]) == timeless(self.expected) and lengths == sorted(lengths)
        return is_whole and (are_deltas or not any(outputs.deltas for outputs in found))


def asked(alone: Engine, fields: dict[str, Any], number: int) -> Asked:
    params = SamplingParams(**{"max_tokens": 40, "temperature": 0, "ignore_eos": True, **fields})
    message = alone.builder.build("", "Once upon a time", params, number=number)
    expected = alone.generate("Once upon a time", params, use_tqdm=False)[0]
    return Asked(msgspec.structs.replace(message, is_streamed=True), expected)


@pytest.fixture(scope="module")
def process(start_process: StartProcess) -> ProcessClient:
    return start_process("has_room_and_beats_often")


@pytest.fixture(scope="module")
def requests(alone: Engine) -> tuple[list[Asked], list[Asked]]:
    """Give the victims and the neighbours."""
    victims = [asked(alone, fields, 0) for fields in VICTIMS.values()]
    return victims, [asked(alone, fields, 0) for fields in NEIGHBOURS.values()]


async def end_of(client: ProcessClient, one: Asked, *, takes_deltas: bool) -> str:
    """Return how a victim has ended: "tokens", if they are its own, or its error."""
    try:
        stream = await client.submit([one.message], takes_deltas=takes_deltas)
    except JpagedError as error:
        return str(error)
    try:
        found = await taken_from(stream)
    except JpagedError as error:
        return str(error)
    finally:
        stream.close()
    return found[-1].outputs[-1].error or ("tokens" if one.is_met_by(found) else "wrong tokens")


async def ends_of(client: ProcessClient, one: Asked, *, takes_deltas: bool) -> list[str]:
    return [await end_of(client, one, takes_deltas=takes_deltas) for _ in range(NUM_TIMES)]


async def run_beside_victims(
    client: ProcessClient, requests: tuple[list[Asked], list[Asked]], faults: Sequence[Fault]
) -> Counter[str]:
    """Run victims and neighbours, and check what becomes of both; return counts of the changed messages."""
    victims, neighbours = requests
    pid = client.pid
    streams = [await client.submit([one.message], takes_deltas=True) for one in neighbours]
    with pytest.MonkeyPatch.context() as patch:
        line = Victims(client, faults, patch)
        ends = [ends_of(client, one, takes_deltas=index != 1) for index, one in enumerate(victims)]
        found, victims_ends = await asyncio.gather(
            asyncio.gather(*(taken_from(stream) for stream in streams)), asyncio.gather(*ends)
        )
    for one, outputs in zip(neighbours, found, strict=True):
        assert one.is_met_by(outputs)
    assert {end for ends in victims_ends for end in ends} <= {"tokens", LOST, LOST_MESSAGE}
    await until_idle(client)
    await until_forgotten(client)
    assert (client.status().is_alive, client.pid) == (True, pid)
    return line.lines[0].counts + line.lines[1].counts


async def until_forgotten(client: ProcessClient) -> None:
    """Wait until neither end has a stream or a call."""
    beats: list[Mapping[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_mend", lambda open_streams: (beats.append(open_streams), mend(open_streams)))
        mend = type(client)._mend.__get__(client)
        while {} not in beats:
            await asyncio.sleep(0.01)
    assert (client._streams, client._calls) == ({}, {})


def run(
    process: ProcessClient, requests: tuple[list[Asked], list[Asked]], *, num_messages: int, max_examples: int
) -> None:
    """Try so many lists of faults, that change among so many messages."""
    counts: Counter[str] = Counter()

    @settings(max_examples=max_examples, deadline=None, derandomize=True, database=None)
    @given(FAULTS)
    def try_faults(faults: list[Fault]) -> None:
        counts.update(asyncio.run(asyncio.wait_for(run_beside_victims(process, requests, faults), 60)))

    try_faults()
    assert counts["all"] >= num_messages
    assert all(counts[kind] for kind in KINDS)


def test_changed_messages_cost_their_own_requests_alone(
    process: ProcessClient, requests: tuple[list[Asked], list[Asked]]
) -> None:
    run(process, requests, num_messages=300, max_examples=5)


@pytest.mark.slow
def test_ten_thousand_changed_messages_cost_their_own_requests_alone(
    process: ProcessClient, requests: tuple[list[Asked], list[Asked]]
) -> None:
    run(process, requests, num_messages=10_000, max_examples=60)
