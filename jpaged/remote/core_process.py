"""The process in which an engine computes for a front in another one: `python -m jpaged.remote.core_process FOLDER`.

Three threads have a part of it. The main thread makes the engine. The socket's thread takes the front's messages, sends
a heartbeat a second, and hands what takes long to workers: grammars are compiled there. The thread that steps sends
what each step has for all readers as one message. The process ends with its stdin, and when it is told to stop.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from .. import codec
from ..checks import one_line
from ..config.engine_config import EngineConfig
from ..core.core_thread import Delivery
from ..errors import JpagedError, ModelLoadError
from ..intake.builder_setup import setup_of
from ..messages import NewRequest
from ..outputs import StepOutputs
from ..startup.parent_death import end_with_stdin, kill_with_parent
from ..startup.sizing.host_memory import limit_host_bytes
from ..text.grammar.grammar import Matcher
from .core_calls import BETWEEN_STEPS, CALLS, CoreCalls
from .core_client import CoreStatus
from .failures import Failure, failure_of
from .message_socket import MessageSocket, MessageTooLongError
from .sent_outputs import LOST_MESSAGE, DepartingOutputs
from .watchdog import print_stacks_at_signal
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
    StartSpec,
    Stop,
    Stopped,
    StreamFailure,
    StreamOutputs,
    Submit,
    Taken,
    ToCore,
    Update,
    Welcome,
    greeting,
    read_by_core,
)

if TYPE_CHECKING:
    from ..engine import Engine

logger = logging.getLogger("jpaged")

HEARTBEAT_S = 1.0
"""Seconds between two heartbeats, while the front reads them."""
LINGER_MS = 2000
"""Milliseconds that the last message has to leave."""
NUM_WORKERS = 4
"""Threads for calls that wait for steps, and for grammars."""
SWITCH_INTERVAL_S = 0.001
"""Thread switch interval, as in a server: CPython's default of 5 ms would hold up outputs behind a message."""
EXIT_START_FAILED = 1
STARTING = CoreStatus(
    is_alive=False,
    is_sleeping=False,
    num_programs_done=0,
    num_programs=0,
    held_s=0.0,
    is_compiling=True,
    num_steps=0,
    has_work=True,
)
"""The status of a core whose engine is being made."""


class RemoteReader:
    """The core's end of a stream: what `CoreThread` takes for its reader."""

    def __init__(self, core: CoreServer, number: int, num_requests: int):
        self._core, self.number = core, number
        self.outputs = DepartingOutputs(number, num_requests)
        self.num_sent = self.num_taken = 0
        """Outputs that were sent, and how many of them the front's reader has taken."""
        self.is_dropped = False

    def put(self, outputs: StepOutputs) -> None:
        self._core.note_outputs(self, outputs)

    def fail(self, error: Exception) -> None:
        self._core.note_failure(self, error)


class CoreServer:
    """Serves a front: its messages to an engine, and the engine's outputs and answers to the front."""

    def __init__(self, socket: MessageSocket):
        """Serve nothing but a heartbeat yet."""
        self._socket = socket
        self._calls: CoreCalls | None = None
        self._readers: dict[int, RemoteReader] = {}
        """Those of streams whose requests are not all over, by their numbers."""
        self._unanswered: set[int] = set()
        """Numbers of submitted streams and of calls whose answers were not sent."""
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="jpaged core worker")
        self._is_stopping = threading.Event()
        self._deliver_lock = threading.Lock()
        """Guards the four lists, which hold what one `deliver` sends, and the order in which that leaves."""
        self._pieces: list[PromptPiece] = []
        self._outputs: list[StreamOutputs] = []
        self._answers: list[Answer] = []
        self._failures: list[StreamFailure] = []

    def run(self, spec: StartSpec) -> int:
        """Make the engine and serve it until the front wants it to stop; return the exit status."""
        serving = threading.Thread(target=self._serve, name="jpaged core socket", daemon=True)
        serving.start()
        try:
            module, _, function = spec.maker.partition(":")
            maker = getattr(importlib.import_module(module), function)
            engine = maker(EngineConfig(**spec.config), self._report, **spec.options)
        except Exception as error:
            if not isinstance(error, JpagedError | ModelLoadError | OSError):
                logger.error("the engine could not start", exc_info=error)
            self._send(StartFailed(failure_of(error)))
            return EXIT_START_FAILED
        calls = CoreCalls(engine, self.deliver, counts_requests=True)
        builder = codec.encode(setup_of(engine.builder))
        identity = f"{engine.config} {engine.backend.name}"
        self._calls = calls
        self._send(Ready(builder, engine.memory, identity, _num_cached_pages(engine), calls.status()))
        self._is_stopping.wait()
        calls.shutdown()
        self._send(Stopped(calls.snapshot()))
        return 0

    def _report(self, name: str, done: int, total: int) -> None:
        self._send(Progress(name, done, total))

    # On the socket's thread

    def _serve(self) -> None:
        """Take the front's messages, and send a heartbeat a second."""
        next_beat_s = time.monotonic() + HEARTBEAT_S
        while not self._is_stopping.is_set():
            while (data := self._socket.receive()) is not None:
                try:
                    self._take(read_by_core(data))
                except Exception as error:
                    logger.error("a message of the front is passed over: %s", one_line(error))
            if time.monotonic() >= next_beat_s and not self._socket.is_full:
                next_beat_s = time.monotonic() + HEARTBEAT_S
                with self._deliver_lock:
                    readers = list(self._readers.values())  # Workers change it.
                    self._send(Update(self._status(), open_streams={one.number: one.num_sent for one in readers}))
            self._socket.wait(max(0.0, next_beat_s - time.monotonic()))

    def _take(self, message: ToCore) -> None:
        """Do what a message asks for."""
        if isinstance(message, Stop):
            self._is_stopping.set()
        elif self._calls is None:
            logger.error("a message came before the engine was there: %s", type(message).__name__)
        elif isinstance(message, Taken):
            for stream, number in message.streams.items():
                reader = self._readers.get(stream)
                if reader is not None and reader.num_taken < number <= reader.num_sent:  # Else it comes twice.
                    reader.num_taken = number
                    self._calls.thread.note_taken(reader)
        elif isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Drop):
            if (reader := self._readers.pop(message.stream, None)) is not None:
                reader.is_dropped = True
                self._calls.thread.drop(reader)
        elif isinstance(message, Expect):
            for number in message.numbers:
                if number not in self._unanswered:
                    self._answer_now(number, None, JpagedError(LOST_MESSAGE))
        elif isinstance(message, Pause):
            self._calls.pause(message.is_paused)
        elif isinstance(message, Call):
            self._call(self._calls, message)

    def _submit(self, message: Submit) -> None:
        """Queue requests; grammars are compiled on a worker before that."""
        if message.stream in self._readers:
            return  # It came twice.
        messages = message.requests.unpacked()
        self._unanswered.add(message.stream)
        reader = self._readers[message.stream] = RemoteReader(self, message.stream, len(messages))
        if any(one.grammar for one in messages):
            self._workers.submit(self._submit_with_grammars, messages, reader, message.takes_deltas)
        else:
            self._add(messages, [None] * len(messages), reader, takes_deltas=message.takes_deltas)

    def _submit_with_grammars(self, messages: Sequence[NewRequest], reader: RemoteReader, takes_deltas: bool) -> None:
        assert self._calls is not None
        try:
            grammars = self._calls.matchers(messages)
        except Exception as error:
            self._readers.pop(reader.number, None)
            self._answer_now(reader.number, None, error)
            return
        if not reader.is_dropped:
            self._add(messages, grammars, reader, takes_deltas=takes_deltas)
        else:  # Nobody waits for an answer.
            self._unanswered.discard(reader.number)
        if reader.is_dropped:  # Meanwhile: the command to drop it may have come before the one to add it.
            self._calls.thread.drop(reader)

    def _add(
        self,
        messages: Sequence[NewRequest],
        grammars: Sequence[Matcher | None],
        reader: RemoteReader,
        *,
        takes_deltas: bool,
    ) -> None:
        assert self._calls is not None
        callback = partial(self._note_added, reader)
        self._calls.thread.add(messages, grammars, reader, callback, takes_deltas=takes_deltas)

    def _note_added(self, reader: RemoteReader, result: None, error: Exception | None) -> None:
        if error is not None:
            self._readers.pop(reader.number, None)
        self._note_answer(reader.number, result, error)

    def _call(self, calls: CoreCalls, message: Call) -> None:
        """Make a named call: between two steps, or on a worker."""
        self._unanswered.add(message.number)
        if message.name not in CALLS:
            self._answer_now(message.number, None, JpagedError(f"the core has no call {one_line(message.name)}"))
            return
        run = partial(getattr(calls, message.name), *message.arguments)
        if message.name in BETWEEN_STEPS:
            calls.thread.call(run, partial(self._note_answer, message.number))
        else:
            self._workers.submit(self._run_call, message.number, run)

    def _run_call(self, number: int, run: Any) -> None:
        try:
            result, error = run(), None
        except Exception as exception:
            result, error = None, exception
        self._answer_now(number, result, error)

    # On the thread that steps; workers come here too

    def deliver(self, deliveries: list[Delivery]) -> None:
        """Send what a step, and the commands before it, have for the front."""
        with self._deliver_lock:
            for delivery in deliveries:
                delivery.call()
            pieces, self._pieces = self._pieces, []
            outputs, self._outputs = tuple(self._outputs), []
            answers, self._answers = tuple(self._answers), []
            failures, self._failures = tuple(self._failures), []
            for piece in pieces:
                self._send(piece)
            self._send_update(Update(self._status(), outputs, answers, failures))
            self._unanswered.difference_update(answer.number for answer in answers)

    def note_outputs(self, reader: RemoteReader, outputs: StepOutputs) -> None:
        """Add outputs of a stream to what is sent next. Called within `deliver`."""
        pieces, sent = reader.outputs.sent(outputs)
        self._pieces += pieces
        reader.num_sent += 1
        self._outputs.append(StreamOutputs(reader.number, reader.num_sent, sent))
        if reader.outputs.are_over:
            self._readers.pop(reader.number, None)

    def note_failure(self, reader: RemoteReader, error: Exception) -> None:
        """Add the end of a stream to what is sent next. Called within `deliver`."""
        self._failures.append(StreamFailure(reader.number, failure_of(error)))
        self._readers.pop(reader.number, None)

    def _note_answer(self, number: int, result: Any, error: Exception | None) -> None:
        """Add the answer of a call to what is sent next. Called within `deliver`."""
        self._answers.append(_answer(number, result, error))

    def _answer_now(self, number: int, result: Any, error: Exception | None) -> None:
        self._send_update(Update(self._status(), answers=(_answer(number, result, error),)))
        self._unanswered.discard(number)

    def _status(self) -> CoreStatus:
        return STARTING if self._calls is None else self._calls.status()

    def _send_update(self, update: Update) -> None:
        """Send a message; of one that cannot be sent, each part by itself, and a failure for the part that cannot."""
        try:
            self._send(update)
            return
        except Exception as error:  # It would end the thread that steps.
            failure = failure_of(error)
            if not isinstance(error, MessageTooLongError):
                logger.exception("outputs cannot be sent")
        if len(update.outputs) + len(update.answers) + len(update.failures) > 1:
            for output in update.outputs:
                self._send_update(Update(update.status, outputs=(output,)))
            for answer in update.answers:
                self._send_update(Update(update.status, answers=(answer,)))
            self._send_update(Update(update.status, failures=update.failures))
        else:
            self._refuse(update, failure)

    def _refuse(self, update: Update, failure: Failure) -> None:
        """Send an error instead of outputs or an answer that no message can hold; the requests end."""
        for output in update.outputs:
            self._take(Drop(output.stream))
            self._send(Update(update.status, failures=(StreamFailure(output.stream, failure),)))
        for answer in update.answers:
            self._send(Update(update.status, answers=(Answer(answer.number, NOTHING, failure),)))

    def _send(self, message: FromCore) -> None:
        self._socket.send(codec.encode(message))


def _num_cached_pages(engine: Engine) -> int:
    """Return how many pages an engine can keep for later prefixes."""
    stats, config = engine.loop.stats(), engine.config
    if not config.enable_prefix_caching:
        return 0
    num_pages, max_pages = int(stats["blocks"]), config.max_cached_blocks
    return (num_pages if max_pages is None else min(num_pages, max_pages)) + int(stats["host_blocks"])


NOTHING = msgspec.Raw(codec.encode(None))


def _answer(number: int, result: Any, error: Exception | None) -> Answer:
    """Return the answer of a call. An error that is no caller's is logged, since the front learns its text alone."""
    if error is None:
        return Answer(number, msgspec.Raw(codec.encode(result)))
    failure = failure_of(error)
    if failure.kind == JpagedError.__name__ and type(error) is not JpagedError:
        logger.error("a call has failed in the core: %s", failure.message, exc_info=error)
    return Answer(number, NOTHING, failure)


def main() -> int:
    """Serve the front that has started this process; return the exit status."""
    remove_folder = partial(shutil.rmtree, sys.argv[1], ignore_errors=True)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # The front has died.
        remove_folder()
        return EXIT_START_FAILED
    spec = msgspec.json.decode(line, type=StartSpec)
    if spec.cpus:
        os.sched_setaffinity(0, spec.cpus)  # Threads that start from now on have it too.
    if spec.host_bytes is not None:
        limit_host_bytes(spec.host_bytes)
    end_with_stdin(sys.stdin.buffer, remove_folder)
    print_stacks_at_signal()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Service managers send it to all processes; the front decides.
    os.dup2(2, 1)  # What libraries print goes to the log.
    _log(spec.log_level)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    socket = MessageSocket(spec.address, is_front=False)
    socket.send(greeting())
    while (welcome := socket.receive()) is None:
        socket.wait(HEARTBEAT_S)
    codec.decode(welcome, Welcome)
    kill_with_parent(spec.parent)
    status = CoreServer(socket).run(spec)
    socket.close(LINGER_MS)
    return status


def _log(level: int) -> None:
    """Write the log to stderr as a server does."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


if __name__ == "__main__":
    # Nothing waits for threads, such as one that compiles.
    status = main()
    logging.shutdown()
    os._exit(status)
