"""The core client of this process: a thread that owns an engine's loop, and what its callers send and get.

    add, abort, call ─▶ commands ─▶ between two steps ─▶ step ─▶ outputs of all readers, delivered at once

Callers send requests as messages and get flat outputs, so that a core in a process of its own can be served by the same
calls. The thread makes an output for a reader only once the reader has taken the one before: a slow reader costs one
output, however many tokens its requests have got. It knows no event loop: `deliver` hands everything of one step over.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ..errors import EngineStoppedError
from ..messages import NewRequest
from ..outputs import PromptLogprobs, RequestOutput, SampleDelta
from ..request import Request
from ..text.grammar import Matcher
from .engine_loop import EngineLoop
from .inbox import Inbox

logger = logging.getLogger("jpaged")

ASLEEP_POLL_S = 0.05
"""Seconds after which a thread whose engine sleeps looks again whether it is awake."""
STOP_S = 10.0
"""Seconds that `stop` waits for the step that the thread computes."""

Reply = Callable[[Any, Exception | None], None]
"""Takes the result of a command, or its exception. Called through `deliver`."""
Deliver = Callable[[list[Callable[[], None]]], None]
"""Takes what a step, or the commands before it, have to tell the callers: functions to call on their side."""


@dataclass(slots=True)
class StepOutputs:
    """What the requests of one reader have got since its last outputs."""

    deltas: list[SampleDelta]
    """New tokens and texts, for a reader that takes deltas."""
    prompt_logprobs: dict[str, PromptLogprobs]
    """The logprobs of the prompts of requests that asked for them, by their ids, once; for a reader that takes deltas,
    before the first delta of a request."""
    outputs: list[RequestOutput]
    """The last output of each request that has ended; for a reader that takes no deltas, the present output of each
    request that has changed, by its `output_kind`."""


class Outbox:
    """The requests of one reader, and whether it has taken what they had got. See `CoreThread.add`."""

    def __init__(self, *, takes_deltas: bool):
        """Start without requests. With `takes_deltas` the reader gets deltas, else outputs."""
        self.takes_deltas = takes_deltas
        self.inbox = Inbox()
        self.is_free = True
        """The reader has taken its last outputs. Only the reader sets it, and only the core's thread clears it."""

    def put(self, outputs: StepOutputs) -> None:
        """Take what the requests have got. Called on the reader's side."""
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        """Learn that no more outputs come, since the engine has stopped. Called on the reader's side."""
        raise NotImplementedError


class CoreThread:
    """Steps an engine's loop on a thread of its own while requests of its readers are unfinished."""

    def __init__(
        self,
        loop: EngineLoop,
        deliver: Deliver,
        *,
        take_numbers: Callable[[int], int],
        on_ended: Callable[[Request], None],
    ):
        """Start the thread. `take_numbers` counts so many requests, and returns the number of the first of them.

        `on_ended` is told of each request that has ended, on this thread.
        """
        self.loop = loop
        self.is_paused = False
        """While true, no step is computed; requests are taken and wait."""
        self.error: BaseException | None = None
        """What has ended the thread; None while it runs."""
        self._deliver, self._take_numbers, self._on_ended = deliver, take_numbers, on_ended
        self._id_prefix = secrets.token_hex(4)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outboxes: dict[Outbox, None] = {}
        self._messages: list[Callable[[], None]] = []
        """What is delivered after the present step."""
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="jpaged core", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Return whether the thread takes commands and computes steps."""
        return self._thread.is_alive() and not self._is_stopped

    @property
    def num_readers(self) -> int:
        """Return the number of readers with unfinished requests, or with outputs that they have not taken."""
        return len(self._outboxes)

    # Calls, from any thread

    def call(self, command: Callable[[], Any], reply: Reply) -> None:
        """Run `command` between two steps, in the order of the calls, and give its result to `reply`."""
        self._post(partial(self._answer, command, reply))

    def add(
        self, messages: Sequence[NewRequest], grammars: Sequence[Matcher | None], outbox: Outbox, reply: Reply
    ) -> None:
        """Queue the requests of some messages, all of them or none, for the reader of `outbox`.

        Their ids and their numbers are given here; `reply` gets the ids in the order of the messages. It gets
        InvalidRequestError if one can never fit, and QueueFullError if there is no room for all.
        """
        self.call(partial(self._add, messages, grammars, outbox), reply)

    def drop(self, outbox: Outbox) -> None:
        """End all requests of a reader that takes no more outputs, and forget it."""
        self._post(partial(self._drop, outbox))

    def took(self, outbox: Outbox) -> None:
        """Note that a reader has taken its last outputs. Called by the reader's side, after each `put`."""
        outbox.is_free = True
        # The thread notes changes before it looks at `is_free`, so at least one of the two sees the other.
        if outbox.inbox.has_changed:
            self._post(_nothing)

    def wake(self) -> None:
        """Let the thread look again at what there is to do, such as after `is_paused` has changed."""
        self._post(_nothing)

    def stop(self) -> None:
        """End the thread after its present step; readers that still wait get EngineStoppedError."""
        self._is_stopped = True
        self._post(_nothing)
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_S)

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        if self.error is not None:  # Nobody else runs it any more.
            self._fail_all(self.error)

    # On the thread

    def _run(self) -> None:
        error: BaseException = EngineStoppedError("the engine was shut down")
        try:
            while not self._is_stopped and self.loop.is_open:
                self._run_once()
        except BaseException as fault:
            logger.critical("the engine's thread has ended; requests cannot be served any more", exc_info=fault)
            error = fault
        finally:
            self.error = error
            self._fail_all(error)

    def _run_once(self) -> None:
        """Run the commands that wait, compute a step if there is one to compute, and deliver what both have given."""
        commands = self._take_commands()
        with self.loop.turn("serve"):
            for command in commands:
                command()
            if self._has_work:
                try:
                    self.loop.advance()
                except Exception as error:
                    logger.exception("steps failed, and end the requests of the server")
                    for outbox in self._outboxes:
                        self.loop.fail(outbox.inbox, error)
            self._collect()
        if self._messages:
            messages, self._messages = self._messages, []
            self._deliver(messages)

    @property
    def _has_work(self) -> bool:
        """Return whether a step can do anything for a reader."""
        is_able = not self.is_paused and self.loop.is_open and not self.loop.sleep.missing
        return is_able and any(outbox.inbox.has_unfinished for outbox in self._outboxes)

    def _take_commands(self) -> list[Callable[[], None]]:
        """Return the commands that wait; wait for one if no step can be computed."""
        commands: list[Callable[[], None]] = []
        try:
            if not self._has_work:
                is_asleep = bool(self._outboxes and self.loop.sleep.missing)
                commands.append(self._commands.get(timeout=ASLEEP_POLL_S if is_asleep else None))
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def _collect(self) -> None:
        """Make the outputs of the readers that have taken their last ones, and forget those whose requests are over."""
        for outbox in list(self._outboxes):
            if outbox.inbox.has_changed and outbox.is_free:
                outputs = self._outputs_of(outbox)
                if outputs.deltas or outputs.outputs or outputs.prompt_logprobs:
                    outbox.is_free = False
                    self._messages.append(partial(outbox.put, outputs))
            if not outbox.inbox.requests:
                del self._outboxes[outbox]

    def _outputs_of(self, outbox: Outbox) -> StepOutputs:
        """Return what the changed requests of a reader have got; those that have ended are forgotten by the loop."""
        changed = outbox.inbox.take()
        deltas: list[SampleDelta] = []
        prompt_logprobs: dict[str, PromptLogprobs] = {}
        outputs: list[RequestOutput] = []
        if outbox.takes_deltas:
            deltas = self.loop.deltas_of(changed)
            entries = ((one.request_id, self.loop.outputs.prompt_logprobs(one, is_delta=True)) for one in changed)
            prompt_logprobs = {request_id: found for request_id, found in entries if found is not None}
        for request in changed:
            if outbox.takes_deltas and not request.state.is_finished:
                continue
            output = self.loop.output_of(request)
            if output is not None:
                outputs.append(output)
            if request.state.is_finished and output is not None:
                self.loop.log_failure(request)
                self._on_ended(request)
        return StepOutputs(deltas, prompt_logprobs, outputs)

    def _answer(self, command: Callable[[], Any], reply: Reply) -> None:
        """Run a command, and note its result or its exception for the caller."""
        try:
            result = command()
        except Exception as error:
            self._messages.append(partial(reply, None, error))
        else:
            self._messages.append(partial(reply, result, None))

    def _add(self, messages: Sequence[NewRequest], grammars: Sequence[Matcher | None], outbox: Outbox) -> list[str]:
        """Queue requests, all or none; return their ids."""
        self.loop.check_ready("generate")
        first = self._take_numbers(len(messages))
        named = [
            msgspec.structs.replace(message, request_id=f"{self._id_prefix}-{number}", number=number)
            for number, message in enumerate(messages, first)
        ]
        requests = [self.loop.make(new, grammar) for new, grammar in zip(named, grammars, strict=True)]
        self.loop.scheduler.waiting.check_room(*requests)
        for request in requests:
            self.loop.queue(request, outbox.inbox)
        self._outboxes[outbox] = None
        return [request.request_id for request in requests]

    def _drop(self, outbox: Outbox) -> None:
        ended = [request for request in outbox.inbox.requests if not request.state.is_finished]
        self.loop.drop(outbox.inbox)
        self._outboxes.pop(outbox, None)
        for request in ended:
            self._on_ended(request)

    def _fail_all(self, error: BaseException) -> None:
        """Tell all readers, and the callers whose commands wait, that the thread has ended."""
        failure = error if isinstance(error, EngineStoppedError) else EngineStoppedError("the engine has failed")
        messages, self._messages = self._messages, []
        for outbox in list(self._outboxes):
            messages.append(partial(outbox.fail, failure))
        self._outboxes.clear()
        while not self._commands.empty():
            command = self._commands.get_nowait()
            if isinstance(command, partial) and command.func == self._answer:
                messages.append(partial(command.args[1], None, failure))
        if messages:
            self._deliver(messages)


def _nothing() -> None:
    """Do nothing: a command that wakes the thread."""
