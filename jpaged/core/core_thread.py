"""The thread that owns an engine's loop for many readers, and what its callers send and get.

    add, abort, call ─▶ commands ─▶ between two steps ─▶ step ─▶ outputs of all readers, delivered at once

Callers send requests as messages and get flat outputs. The thread makes an output for a reader only once the reader has
taken the one before: a slow reader costs one output, however many tokens its requests have got. It knows no event loop:
`deliver` takes all deliveries of one step. This module loads no JAX; the loop that it is given does.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..errors import EngineStoppedError
from ..messages import NewRequest
from ..outputs import PromptLogprobs, RequestOutput, SampleDelta, StepOutputs
from ..request import Request
from ..text.grammar.grammar import Matcher
from .inbox import Inbox

if TYPE_CHECKING:
    from .engine_loop import EngineLoop

logger = logging.getLogger("jpaged")

ASLEEP_POLL_S = 0.05
"""Seconds between two looks of the thread whether an engine that sleeps is awake: waking up posts no command."""
STOP_S = 10.0
"""Seconds that `stop` waits for the step that the thread computes."""

ResultCallback = Callable[[Any, Exception | None], None]
"""Takes the result of a command, or its exception."""


class Command(NamedTuple):
    """What a caller wants done between two steps."""

    run: Callable[[], Any]
    callback: ResultCallback | None = None
    """Gets the result, by a delivery; None if nobody waits for it."""


class Delivery(NamedTuple):
    """A call to be made on the caller's side."""

    receiver: Any
    """The reader or the callback that it is for, by which `deliver` knows where to call."""
    call: Callable[[], None]


Deliver = Callable[[list[Delivery]], None]
"""Takes everything that a step, or the commands before it, have to tell the callers."""


class Reader(Protocol):
    """Takes the outputs of the requests that it was named for. See `CoreThread.add`."""

    def put(self, outputs: StepOutputs) -> None:
        """Take what the requests have got. Called on the reader's side."""

    def fail(self, error: Exception) -> None:
        """Learn that no more outputs come, since the engine has stopped. Called on the reader's side."""


@dataclass(slots=True)
class _Subscription:
    """The requests of one reader, and whether it has taken what they had got."""

    takes_deltas: bool
    """The reader gets deltas, else outputs."""
    inbox: Inbox = field(default_factory=Inbox)
    has_taken: bool = True
    """The reader has taken its last outputs. Only the reader sets it, and only the core's thread clears it."""


class CoreThread:
    """Steps an engine's loop on a thread of its own while requests of its readers are unfinished."""

    def __init__(
        self,
        loop: EngineLoop,
        deliver: Deliver,
        *,
        on_ended: Callable[[Request], None],
    ):
        """Start the thread. `on_ended` is told of each request that has ended, on this thread."""
        self.loop = loop
        self.is_paused = False
        """While true, no step is computed; requests are taken and wait."""
        self.error: BaseException | None = None
        """What has ended the thread; None while it runs."""
        self.has_work = False
        """A step has something to compute, as far as this thread has looked. Any thread may read it."""
        self._deliver, self._on_ended = deliver, on_ended
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._subscriptions: dict[Reader, _Subscription] = {}
        """Those of readers with requests whose last output was not made yet."""
        self._deliveries: list[Delivery] = []
        """What is delivered after the present step."""
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="jpaged core", daemon=True)
        self._thread.start()
        # A thread that computes while the interpreter takes its modules apart would crash it.
        atexit.register(_stop, weakref.ref(self))

    @property
    def is_alive(self) -> bool:
        """Return whether the thread takes commands and computes steps."""
        return self._thread.is_alive() and not self._is_stopped

    # Calls, from any thread

    def call(self, run: Callable[[], Any], callback: ResultCallback) -> None:
        """Call `run` between two steps, in the order of these calls, and give its result to `callback`."""
        self._post(Command(run, callback))

    def add(
        self,
        messages: Sequence[NewRequest],
        grammars: Sequence[Matcher | None],
        reader: Reader,
        callback: ResultCallback,
        *,
        takes_deltas: bool,
    ) -> None:
        """Queue the requests of some messages, all of them or none, for a reader that has none yet.

        Their ids are those of no other requests. `callback` gets InvalidRequestError if one can never fit, and
        QueueFullError if there is no room for all.
        """
        self.call(partial(self._add, messages, grammars, reader, takes_deltas), callback)

    def drop(self, reader: Reader) -> None:
        """End all requests of a reader that takes no more outputs, and forget it."""
        self._post(Command(partial(self._drop, reader)))

    def note_taken(self, reader: Reader) -> None:
        """Note that a reader has taken its last outputs. Called by the reader's side, after each `put`."""
        subscription = self._subscriptions.get(reader)
        if subscription is None:  # These were its last outputs of all.
            return
        subscription.has_taken = True
        # The thread notes changes before it looks at `has_taken`, so at least one of the two sees the other.
        if subscription.inbox.has_changed:
            self.wake()

    def wake(self) -> None:
        """Let the thread look again at what there is to do, such as after `is_paused` has changed."""
        self._post(Command(_nothing))

    def stop(self) -> None:
        """End the thread after its present step; readers that still wait get EngineStoppedError.

        No step comes after this, of other threads neither: one that waits for a compilation ends at once.
        """
        self._is_stopped = True
        self.loop.plan.close()
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_S)

    def _post(self, command: Command) -> None:
        self._commands.put(command)
        if self.error is not None:  # Nobody else runs it any more.
            self._fail_all(self.error)

    # On the thread

    def _run(self) -> None:
        error: BaseException = EngineStoppedError("the engine was shut down")
        try:
            while not self._is_stopped and self.loop.is_open:
                self._run_once()
        except EngineStoppedError:
            pass  # The engine was shut down while a step waited for a compilation.
        except BaseException as fault:
            logger.critical("the engine's thread has ended; requests cannot be served any more", exc_info=fault)
            error = fault
        finally:
            self.error = error
            self._fail_all(error)

    def _run_once(self) -> None:
        """Run the commands that wait, compute a step if there is one to compute, and deliver what both have given."""
        commands = [] if self.has_work else self._wait_for_command()
        commands += self._waiting_commands()
        with self.loop.turn("serve"):
            for command in commands:
                self._run_command(command)
            self.has_work = self._has_work
            if self.has_work:
                try:
                    self.loop.advance()
                except EngineStoppedError:
                    raise
                except Exception as error:
                    logger.exception("steps failed, and end the requests of the server")
                    for subscription in self._subscriptions.values():
                        self.loop.fail(subscription.inbox, error)
            self._collect()
            self.has_work = self._has_work
        if self._deliveries:
            deliveries, self._deliveries = self._deliveries, []
            self._deliver(deliveries)

    @property
    def _has_work(self) -> bool:
        """Return whether a step can do anything for a reader."""
        is_able = not self.is_paused and self.loop.is_open and not self.loop.sleep.missing
        return is_able and any(one.inbox.has_unfinished for one in self._subscriptions.values())

    def _wait_for_command(self) -> list[Command]:
        """Wait for a command and return it; return none if an engine that sleeps may be awake by now."""
        is_asleep = bool(self._subscriptions and self.loop.sleep.missing)
        try:
            return [self._commands.get(timeout=ASLEEP_POLL_S if is_asleep else None)]
        except queue.Empty:
            return []

    def _waiting_commands(self) -> list[Command]:
        """Return the commands that wait, in the order of their calls."""
        commands = []
        while not self._commands.empty():  # Nobody else takes commands, so what is there stays.
            commands.append(self._commands.get())
        return commands

    def _run_command(self, command: Command) -> None:
        """Run a command, and note its result or its exception for its caller."""
        result, error = None, None
        try:
            result = command.run()
        except Exception as exception:
            if command.callback is None:
                raise
            error = exception
        if command.callback is not None:
            self._deliveries.append(Delivery(command.callback, partial(command.callback, result, error)))

    def _collect(self) -> None:
        """Make the outputs of the readers that have taken their last ones, and forget those whose requests are over."""
        for reader, subscription in list(self._subscriptions.items()):
            if subscription.inbox.has_changed and subscription.has_taken:
                outputs = self._outputs_of(subscription)
                if outputs.deltas or outputs.outputs or outputs.prompt_logprobs:
                    subscription.has_taken = False
                    self._deliveries.append(Delivery(reader, partial(reader.put, outputs)))
            if not subscription.inbox.requests:
                del self._subscriptions[reader]

    def _outputs_of(self, subscription: _Subscription) -> StepOutputs:
        """Return what the changed requests of a reader have got; those that have ended are forgotten by the loop."""
        changed = subscription.inbox.take()
        deltas: list[SampleDelta] = []
        prompt_logprobs: dict[str, PromptLogprobs] = {}
        outputs: list[RequestOutput] = []
        if subscription.takes_deltas:
            deltas = self.loop.deltas_of(changed)
            entries = ((one.request_id, self.loop.outputs.prompt_logprobs(one, is_delta=True)) for one in changed)
            prompt_logprobs = {request_id: found for request_id, found in entries if found is not None}
        for request in changed:
            if subscription.takes_deltas and not request.state.is_finished:
                continue
            output = self.loop.output_of(request)
            if output is not None:
                outputs.append(output)
            if request.state.is_finished:
                self._note_end(request)
        return StepOutputs(deltas, prompt_logprobs, outputs)

    def _note_end(self, request: Request) -> None:
        """Tell the log and `on_ended` of a request that has ended."""
        self.loop.log_failure(request)
        self._on_ended(request)

    def _add(
        self, messages: Sequence[NewRequest], grammars: Sequence[Matcher | None], reader: Reader, takes_deltas: bool
    ) -> None:
        """Queue requests, all or none."""
        self.loop.check_ready("generate")
        requests = [self.loop.make(new, grammar) for new, grammar in zip(messages, grammars, strict=True)]
        self.loop.scheduler.waiting.check_room(*requests)
        subscription = self._subscriptions[reader] = _Subscription(takes_deltas)
        for request in requests:
            self.loop.queue(request, subscription.inbox)

    def _drop(self, reader: Reader) -> None:
        """End and forget the requests of a reader, also those that had ended before it took their last output."""
        subscription = self._subscriptions.pop(reader, None)
        if subscription is None:
            return
        requests = list(subscription.inbox.requests)
        self.loop.drop(subscription.inbox)
        for request in requests:
            self._note_end(request)

    def _fail_all(self, error: BaseException) -> None:
        """Tell all readers, and the callers whose commands wait, that the thread has ended."""
        failure = error if isinstance(error, EngineStoppedError) else EngineStoppedError("the engine has failed")
        deliveries, self._deliveries = self._deliveries, []
        for reader in list(self._subscriptions):
            deliveries.append(Delivery(reader, partial(reader.fail, failure)))
        self._subscriptions.clear()
        for command in self._waiting_commands():
            if command.callback is not None:
                deliveries.append(Delivery(command.callback, partial(command.callback, None, failure)))
        if deliveries:
            self._deliver(deliveries)


def _nothing() -> None:
    """Do nothing: the command that only wakes the thread."""


def _stop(thread: weakref.ref[CoreThread]) -> None:
    """Stop a thread that is still there at the end of the program."""
    if (own := thread()) is not None:
        own.stop()
