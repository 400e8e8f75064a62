"""The client of an engine in a core process of its own, for the tasks of one event loop at a time.

    call ─▶ message with a number ─▶ core process ─▶ answer with it ─▶ the future that the call waits for
                                                  ─▶ outputs of a step ─▶ the streams

A thread starts the process, and learns of its end at once. The event loop that makes calls reads the messages.
Loads no JAX, and opens no model.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

import msgspec

from .. import codec
from ..checks import one_line, refusal, shown
from ..codec import PackedRequests
from ..config.engine_config import PYTHON_ONLY, EngineConfig
from ..errors import ConfigError, EngineStoppedError, InvalidRequestError, JpagedError, QueueFullError
from ..intake.builder_setup import BuilderSetup, builder_of
from ..intake.request_builder import RequestBuilder
from ..messages import NewRequest
from ..outputs import EngineSummary
from .child_process import ChildProcess
from .core_client import CoreClient, CoreSnapshot, CoreStatus, OutputStream, RequestNames, StreamOwner, WatchOptions
from .failures import error_of
from .machine_share import WHOLE_MACHINE, MachineShare
from .message_socket import MAX_QUEUED, MessageSocket, MessageTooLongError
from .sent_outputs import LOST, ArrivingOutputs, without_prompts
from .watchdog import STACKS_S, STACKS_SIGNAL, Watchdog, sign_of_life, work_of
from .wire import (
    Answer,
    Call,
    Drop,
    Expect,
    FromCore,
    Pause,
    Progress,
    PromptPiece,
    Ready,
    StartFailed,
    Stop,
    Stopped,
    Submit,
    Taken,
    ToCore,
    Update,
    Welcome,
    greeting,
    read_by_front,
)

logger = logging.getLogger("jpaged")

Result = TypeVar("Result")
ReportProgress = Callable[[str, int, int], None]

ENGINE_MAKER = "jpaged.remote.engine_maker:make_engine"
START_POLL_S = 1.0
"""Seconds between two looks whether a process that starts has ended."""
LAST_MESSAGES_S = 0.1
"""Seconds in which the last messages of a process that has ended are read."""
MAX_MESSAGES_A_TURN = 16
"""Messages that are read before the event loop goes on."""
IN_PROCESS = "with a core process"


class ProcessClient(CoreClient, StreamOwner):
    """Starts a core process, and takes the calls of tasks to it and its answers and outputs to them."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        maker: str = ENGINE_MAKER,
        options: Mapping[str, Any] | None = None,
        progress: ReportProgress | None = None,
        watch: WatchOptions = WatchOptions(),  # noqa: B008 (it is frozen)
        names: RequestNames | None = None,
        share: MachineShare = WHOLE_MACHINE,
        is_unwanted: threading.Event | None = None,
    ):
        """Start the process, and wait until it takes requests. `options` are those of the `maker`.

        `progress(name, done, total)` is called meanwhile, and `watch` says how long there may be none. `names` names
        the requests, and `share` is what the process uses of the machine. Raise ConfigError for an option that no
        message can hold, what has kept the engine from starting, and EngineStoppedError if the process ends before it
        is ready, or hangs, or if `is_unwanted` is set meanwhile.
        """
        self._names = names or RequestNames()
        self._is_unwanted = is_unwanted or threading.Event()
        self._numbers = itertools.count(1)
        """Those of calls and streams."""
        self._streams: dict[int, _ProcessStream] = {}
        """Streams that are not closed and whose requests are not over."""
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._taken: dict[int, int] = {}
        """Streams whose outputs were taken in this turn of the event loop, and the numbers of those."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The one that reads the messages."""
        self._snapshot: CoreSnapshot | None = None
        """The last one that has come."""
        self._end = ""
        """Why the core takes no requests any more; empty while it does."""
        self._is_stopping = False
        """It was this client that has ended it."""
        self._num_heard = 0
        """Messages that have come."""
        self._child = ChildProcess(maker, sent_config(config), options or {}, share, self._on_child_end)
        self._watchdog = Watchdog(partial(self._child.signal, STACKS_SIGNAL))
        try:
            self._socket = MessageSocket(self._child.address, is_front=True)
        except BaseException:
            self._child.remove_folder()
            raise
        try:
            self._child.start()
            ready = self._wait_until_ready(progress, watch)
        except BaseException:
            self._child.kill()
            self._socket.close()
            raise
        self.builder_setup = ready.builder
        """What makes the engine's builder of requests: a `BuilderSetup`, encoded."""
        self.memory, self.identity = ready.memory, ready.identity
        """What the device's memory is used for; the names of the model, of the options and of the backend."""
        self.num_cached_pages = ready.num_cached_pages
        """Pages that the core can keep for later prefixes."""
        self._status = ready.status

    def builder(self) -> RequestBuilder:
        """Return a builder as the engine has it."""
        return builder_of(codec.decode(self.builder_setup, BuilderSetup))

    @property
    def pid(self) -> int | None:
        """Return the id of the core process."""
        return self._child.pid

    def wait_for_end(self) -> str:
        """Wait until the process has ended, and return how, as `lost_process` does. Any thread may call."""
        self._child.wait_for_end()
        return self._end or self._child.end

    # The start

    def _wait_until_ready(self, progress: ReportProgress | None, watch: WatchOptions) -> Ready:
        """Read the messages of the start, up to the one that says that the core is ready."""
        first = self._next_message(0, watch)
        check_greeting(first)
        self._child.remove_folder()
        self._send(Welcome())
        num_parts = 1
        while True:
            message = read_by_front(self._next_message(num_parts, watch))
            if isinstance(message, StartFailed):
                raise error_of(message.failure)
            if isinstance(message, Ready):
                return message
            if isinstance(message, Progress):
                num_parts += 1
                if progress is not None:
                    progress(message.name, message.num_done, message.num_parts)

    def _next_message(self, num_parts: int, watch: WatchOptions) -> bytes:
        """Wait for the next message, after so many that have told of progress.

        Raise EngineStoppedError if the process ends instead, hangs and is to end, or is not wanted any more.
        """
        while (data := self._socket.receive()) is None:
            if not self._child.has_ended:
                self._socket.wait(START_POLL_S)
                self._look(num_parts, watch.start_s, "the start of the core process", watch)
                if self._is_unwanted.is_set():
                    raise EngineStoppedError("the engine was shut down, before it was ready")
                continue
            self._socket.wait(LAST_MESSAGES_S)
            if (data := self._socket.receive()) is None:
                raise EngineStoppedError(f"{self._end or self._child.end}, before it was ready")
            break
        return data

    # Calls

    async def submit(
        self, messages: Sequence[NewRequest], *, takes_deltas: bool, on_over: Callable[[], None] | None = None
    ) -> OutputStream:
        """Queue requests, see `CoreClient.submit`; `on_over` is called once when the core computes none of them any
        more.

        It is called too if this raises an error, unless no core has been asked.
        """
        self._attach()
        if self._socket.is_full:
            raise QueueFullError("messages", got=MAX_QUEUED + 1, allowed=MAX_QUEUED)
        named = self._names.named(messages)
        number = next(self._numbers)
        packed = PackedRequests.of(without_prompts(named))
        stream = _ProcessStream(self, number, named, on_over)
        self._streams[number] = stream
        try:
            await self._answer(number, Submit(number, takes_deltas, packed))
            stream.is_queued = True
        except MessageTooLongError as error:
            stream.close()
            raise InvalidRequestError(f"the request cannot be sent to the core process: {error}") from None
        except BaseException:  # Cancelled while the requests may be queued already.
            stream.close()
            raise
        return stream

    def note_taken(self, stream: OutputStream) -> None:
        assert isinstance(stream, _ProcessStream)
        if stream.arriving.are_over:
            return
        if not self._taken:
            stream.loop.call_soon(self._send_taken)
        self._taken[stream.number] = stream.num_come

    def _send_taken(self) -> None:
        """Send which streams have taken their outputs in this turn of the event loop."""
        taken, self._taken = self._taken, {}
        self._send(Taken(taken))

    def drop(self, stream: OutputStream) -> None:
        assert isinstance(stream, _ProcessStream)
        if self._streams.pop(stream.number, None) is not None and not stream.arriving.are_over:
            self._send(Drop(stream.number))
        stream.note_over()

    async def abort(self, request_ids: Sequence[str], sample: int | None = None) -> None:
        await self._call("abort", list(request_ids), sample)

    async def fork(self, request_id: str, n: int | None, options: Mapping[str, Any]) -> list[int]:
        return codec.decode(await self._call("fork", request_id, n, dict(options)), list[int])

    async def reset_prefix_cache(self) -> None:
        await self._call("reset_prefix_cache")

    async def sleep(self, level: int, mode: str) -> None:
        await self._call("sleep", level, mode)

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        await self._call("wake_up", None if tags is None else list(tags))

    def pause(self) -> None:
        self._send(Pause(True))

    def resume(self) -> None:
        self._send(Pause(False))

    def status(self) -> CoreStatus:
        with suppress(RuntimeError):  # Without an event loop nothing is read, and after the end nothing comes.
            self._attach()
        if not self._end:
            return self._status
        return msgspec.structs.replace(self._status, is_alive=False, is_compiling=False, has_work=False)

    def watch(self, options: WatchOptions) -> str:
        status = self.status()
        if self._end:
            return ""
        sign = sign_of_life(status, self._num_heard)
        return self._look(sign, options.limit_s(status), work_of(status), options)

    def _look(self, sign: Hashable, limit_s: float, doing: str, options: WatchOptions) -> str:
        """Return what hangs; kill the process, once it had time to print its stacks, if that is to end it."""
        stall = self._watchdog.look(sign, limit_s, doing)
        if stall and options.ends_core and self._watchdog.silent_s >= limit_s + STACKS_S:
            self._end = f"the core process was killed, since {stall}"
            self._child.signal(signal.SIGKILL)
        return stall

    @property
    def lost_process(self) -> str:
        return "" if self._is_stopping else self._end

    async def snapshot(self) -> CoreSnapshot:
        if not self._end or self._snapshot is None:
            self._snapshot = codec.decode(await self._call("snapshot"), CoreSnapshot)
        return self._snapshot

    async def stats(self) -> dict[str, Any]:
        return codec.decode(await self._call("stats"), dict[str, Any])

    async def summary(self) -> EngineSummary:
        return codec.decode(await self._call("summary"), EngineSummary)

    async def start_profile(self, folder: str) -> bool:
        return codec.decode(await self._call("start_profile", folder), bool)

    async def stop_profile(self) -> bool:
        return codec.decode(await self._call("stop_profile"), bool)

    def stop(self) -> None:
        """Take no more requests, and tell the process to end; `shutdown` waits for that."""
        if not self._end:
            self._is_stopping, self._end = True, "the engine was shut down"
            self._send(Stop())

    def close(self) -> None:
        """Close what is left of a process that has ended. Any thread may call: the event loop does it, if it has one.

        The loop need not run now: streams that wait are its own.
        """
        loop = self._loop
        try:
            if loop is not None and not loop.is_closed():
                loop.call_soon_threadsafe(self._finish)
                return
        except RuntimeError:  # It was closed in this moment.
            pass
        self._finish()

    def shutdown(self) -> None:
        self.stop()
        self._child.wait()
        loop = self._loop
        if loop is not None and loop.is_running() and loop is not _running_loop():
            loop.call_soon_threadsafe(self._finish)
        else:
            self._finish()

    def send_call(self, name: str, *arguments: Any) -> None:
        """Make a call whose answer nothing waits for."""
        self._send(Call(next(self._numbers), name, arguments))

    async def _call(self, name: str, *arguments: Any) -> msgspec.Raw:
        """Return the result of a named call, encoded, or raise what it has raised."""
        number = next(self._numbers)
        return await self._answer(number, Call(number, name, arguments))

    async def _answer(self, number: int, message: ToCore) -> msgspec.Raw:
        """Send a message, and wait for its answer."""
        self._attach()
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(message)
            return await future
        finally:
            del self._calls[number]

    def _send(self, message: ToCore) -> None:
        self._socket.send(codec.encode(message))

    # Messages of the core

    def _attach(self) -> None:
        """Let the event loop that runs read the messages. Raise RuntimeError while another loop does.

        Raise EngineStoppedError if no messages come any more.
        """
        if self._end:
            raise EngineStoppedError(self._end)
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise RuntimeError("a core process has one event loop at a time, and another one uses it")
        self._detach()
        self._loop = loop
        for file in self._socket.files:
            loop.add_reader(file, self._read)
        loop.call_soon(self._read)

    def _detach(self) -> None:
        """Let the event loop read no messages any more."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            for file in self._socket.files:
                loop.remove_reader(file)

    def _read(self) -> None:
        """Take the messages that have come; on the event loop."""
        self._socket.clear_wake()
        for _ in range(MAX_MESSAGES_A_TURN):
            if (data := self._socket.receive()) is None:
                break
            self._take_data(data)
        else:
            self._socket.wake()
        if self._child.has_ended and self._loop is not None:
            self._loop.call_later(LAST_MESSAGES_S, self._finish)

    def _take_data(self, data: bytes) -> None:
        """Take a message, or pass over one that cannot be read."""
        self._num_heard += 1
        try:
            self._take(read_by_front(data))
        except Exception as error:
            logger.error("a message of the core process is passed over: %s", one_line(error))

    def _take(self, message: FromCore) -> None:
        if isinstance(message, Update):
            self._update(message)
        elif isinstance(message, PromptPiece):
            if (stream := self._streams.get(message.stream)) is not None:
                stream.arriving.take_piece(message)
        elif isinstance(message, Stopped):
            self._snapshot = message.snapshot

    def _update(self, update: Update) -> None:
        """Give all that an update has to those who wait for it."""
        self._status = update.status
        for answer in update.answers:
            self._resolve(answer)
        for sent in update.outputs:
            stream = self._streams.get(sent.stream)
            if stream is not None and stream.num_come < sent.number:  # Else they come twice.
                stream.num_come = sent.number
                outputs, lost = stream.arriving.taken(sent.outputs)
                if lost:
                    self.send_call("abort", lost)
                if outputs.deltas or outputs.outputs or outputs.prompt_logprobs:
                    stream.put(outputs)
                if stream.arriving.are_over:
                    stream.note_over()
        for failed in update.failures:
            self._fail(failed.stream, error_of(failed.failure))
        if update.open_streams is not None:
            self._mend(update.open_streams)

    def _mend(self, open_streams: Mapping[int, int]) -> None:
        """Go on after messages that were lost, by what a heartbeat tells of the streams that are open in the core."""
        waiting = [number for number, one in self._streams.items() if one.is_queued and not one.arriving.are_over]
        for number in set(waiting).difference(open_streams):
            self._fail(number, JpagedError(LOST))
        taken: dict[int, int] = {}
        for number, num_sent in open_streams.items():
            if (stream := self._streams.get(number)) is None:
                self._send(Drop(number))
            elif stream.stands_still(num_sent):
                taken[number] = num_sent
        if taken:
            self._send(Taken(taken))
        if self._calls:
            self._send(Expect(tuple(self._calls)))

    def _fail(self, number: int, error: Exception) -> None:
        """End a stream by an error."""
        if (stream := self._streams.pop(number, None)) is not None:
            stream.fail(error)
            stream.note_over()

    def _resolve(self, answer: Answer) -> None:
        future = self._calls.get(answer.number)
        if future is None or future.done():
            return
        if answer.failure is None:
            future.set_result(answer.result)
        else:
            future.set_exception(error_of(answer.failure))

    # The end

    def _on_child_end(self) -> None:
        """Learn that the process has ended. Runs on the thread that has waited for it."""
        if not self._end:
            self._end = self._child.end
        self._socket.wake()

    def _finish(self) -> None:
        """Read the last messages, and fail everything that waits for more. Further calls do nothing."""
        while (data := self._socket.receive()) is not None:
            self._take_data(data)
        self._detach()
        self._socket.close()
        for number in list(self._streams):
            self._fail(number, EngineStoppedError(self._end))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineStoppedError(self._end))


class _ProcessStream(OutputStream):
    """A stream, and what has come of it."""

    def __init__(
        self,
        client: ProcessClient,
        number: int,
        messages: Sequence[NewRequest],
        on_over: Callable[[], None] | None,
    ):
        super().__init__(client, [message.request_id for message in messages])
        self.number = number
        self.arriving = ArrivingOutputs(messages)
        self.is_queued = False
        """The core has its requests."""
        self.num_come = 0
        """The number of the last outputs that have come."""
        self._num_at_beat = 0
        """The number of the last ones that the core had sent at its last heartbeat."""
        self._on_over = on_over

    def note_over(self) -> None:
        """Tell that the core computes none of its requests any more; further calls do nothing."""
        if self._on_over is not None:
            on_over, self._on_over = self._on_over, None
            on_over()

    def stands_still(self, num_sent: int) -> bool:
        """Return whether the core waits until outputs are taken of which there are none: they were lost, or `Taken`.

        Called at each heartbeat, which tells how many outputs were sent.
        """
        has_gone_on, self._num_at_beat = num_sent != self._num_at_beat, num_sent
        return not has_gone_on and num_sent > 0 and self._outputs is None


def sent_config(config: EngineConfig) -> dict[str, Any]:
    """Return the options that are not the default ones. Raise ConfigError for those that no message can hold."""
    default = EngineConfig()
    names = [one.name for one in fields(config)]
    given = {name: value for name in names if (value := getattr(config, name)) != getattr(default, name)}
    for name in PYTHON_ONLY:
        if name in given:
            way_out = 'leave it out, or take core="thread"'
            raise refusal(name, f"one {IN_PROCESS}", "none there", way_out, error=ConfigError)
    if callable(config.scheduling_policy):
        got, way_out = f"a function {IN_PROCESS}", 'or take core="thread"'
        raise refusal("scheduling_policy", got, "fcfs or priority there", way_out, error=ConfigError)
    return given


def check_greeting(first: bytes) -> None:
    """Raise ConfigError unless the first message of a core is the greeting of the same version."""
    if first != (own := greeting()):
        got = shown(first.decode(errors="replace"))
        raise refusal(
            "core", f"{got} as its greeting", own.decode(), "start again: jpaged was changed", error=ConfigError
        )


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
