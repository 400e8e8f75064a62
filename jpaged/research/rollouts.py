"""Rollouts: groups of samples that a thread of the engine's own computes while their caller does other work.

    caller   reads prompts ─▶ _unqueued                                 Inbox.ended, _refused ─▶ takes groups
    engine                       └─▶ between two steps: queued ─▶ steps ─▶┘

The caller never waits for the step lock: whatever step or compilation goes on, it queues prompts and takes groups that
have ended at once.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import msgspec

from ..checks import check, integer, refusal
from ..core.batch import BatchRunner
from ..core.engine_loop import EngineLoop
from ..core.inbox import Inbox
from ..core.step_lock import QueuedCall
from ..core.step_thread import StepThread
from ..errors import ConfigError, InvalidRequestError, QueueFullError
from ..messages import NewRequest, Params, ResultForm
from ..request import Request
from ..text.grammar.grammar import Matcher
from .arrays import GenerationArrays, generation_arrays

ANSWER_S = 0.1
"""Seconds that `submit` and `close` wait for an engine that is between two steps, so that a caller who looks at its
requests next finds them changed. During a longer step they return, and the change follows behind it."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt that was read and is not queued yet."""

    index: int
    request: NewRequest
    grammar: Matcher | None
    """A matcher of its grammar, compiled by the caller's thread; None without a grammar."""


class Rollouts:
    """The samples of each prompt that `Engine.submit` was given, as they end: an iterator of `GenerationArrays`.

    Each item is one group: all samples of one prompt, whose `prompt_indices` count the prompts from 0. `take` gives
    several groups in one. At most `max_in_flight` prompts are in flight, which includes groups that have ended and that
    nobody has taken; whenever one is taken, the next prompt is read. One thread at a time may take groups.

    A prompt that is refused, or whose computation has failed, raises its error from the call that would have returned
    it; the next call goes on with the others. `close`, the end of a `with` block, or that nobody holds this any more
    aborts what is in flight.
    """

    def __init__(
        self,
        batch: BatchRunner,
        thread: StepThread,
        prompts: Iterator[tuple[Any, Params]],
        *,
        max_in_flight: int,
        in_order: bool,
        priority: int | None,
    ):
        """Queue the first prompts. `prompts` gives each prompt with its parameters; see `Engine.submit` for others."""
        self._batch, self._loop, self._thread = batch, batch.loop, thread
        self._prompts, self._priority = prompts, priority
        self.max_in_flight, self.in_order = max_in_flight, in_order
        # The caller's: the engine neither reads nor writes these.
        self._in_flight: dict[int, None] = {}
        """The indices of prompts whose groups have not ended, in the order of the prompts."""
        self._ended: dict[int, Request | Exception] = {}
        """By the index of its prompt what nobody has taken, in the order of the ends: requests, errors of prompts that
        were refused, and what the iterator of prompts has raised in place of one."""
        self._num_read, self._is_at_end = 0, False
        # Between the caller and the engine: single operations of these are atomic.
        self._inbox = Inbox(gives_ended=True)
        self._unqueued: deque[_Prompt] = deque()
        """Prompts in their order, until the engine has room for them and is awake. The caller appends, `_queue` takes
        out."""
        self._index_of: dict[Request, int] = {}
        """Requests in flight, each with the index of its prompt. `_queue` adds, the caller takes out."""
        self._refused: deque[tuple[int, Exception]] = deque()
        """Prompts that the engine has refused. `_queue` appends, the caller takes out."""
        self._full: QueueFullError | None = None
        """What the first of `_unqueued` was told that found the queue full. Written by `_queue`."""
        self._is_asleep = False
        """Whether the engine was asleep when `_queue` ran last. Written by `_queue`, and by the caller before that."""
        # Once Python frees this object, its requests are ended as by `close`.
        self._dropping = weakref.finalize(self, _drop_later, self._loop, thread, self._inbox)
        self._dropping.atexit = False
        try:
            self._read_ahead()
            self._post_queue().is_done.wait(ANSWER_S)
            if self._is_asleep:
                self._raise_asleep()
        except BaseException:
            self.close()
            raise

    @property
    def num_in_flight(self) -> int:
        """Return the number of prompts that were read and whose groups nobody has taken."""
        return len(self._in_flight) + len(self._ended)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GenerationArrays:
        """Return the next group, after waiting for its end; see `take`."""
        return self.take(1)

    def take(self, num_groups: int) -> GenerationArrays:
        """Return the next groups in one `GenerationArrays`: those that have ended first, or in the prompts' order.

        Wait until `num_groups` have ended, or all that are left once the prompts have come to their end. Return at once
        if they have ended already, also while the engine computes a step or compiles a program.

        Raise StopIteration if none is left, the exception of a group that has failed, InvalidRequestError for a prompt
        that is refused, what the iterator of prompts has raised in place of one, ConfigError if the engine sleeps,
        RuntimeError if it was shut down, and QueueFullError if requests of others leave no room for any of these. Other
        groups that have ended stay for the next call then.
        """
        check("num_groups", num_groups, integer(1, self.max_in_flight))
        while True:
            self._loop.check_outside("submit")
            if not self._dropping.alive:
                raise StopIteration
            self._inbox.changes.clear()  # Before looking: what comes meanwhile sets it again.
            self._collect()
            self._read_ahead()
            wanted = min(num_groups, self.num_in_flight) if self._is_at_end else num_groups
            if not wanted:
                raise StopIteration
            ready = list(self._ended)
            if self.in_order:  # Those at the head of the prompts' order that have ended.
                order = sorted([*self._in_flight, *self._ended])[:wanted]
                ready = [index for index in order if index in self._ended]
            if len(ready) >= wanted:
                return self._give(ready[:wanted])
            self._wait()

    def close(self) -> None:
        """Abort the requests in flight; further calls, and further groups, find nothing left.

        During a step of more than 0.1 s this returns, and the requests end with the step.
        """
        if self._dropping.detach() is not None:
            self._is_at_end, self._unqueued = True, deque()
            self._in_flight.clear()
            self._ended.clear()
            if self._loop.is_open:
                call = self._thread.post("submit", partial(_drop, self._loop, self._thread, self._inbox))
                call.is_done.wait(ANSWER_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _give(self, indices: list[int]) -> GenerationArrays:
        """Return the groups of these prompts, which have ended; or raise the exception of the first one that has
        failed, which is then taken alone."""
        requests: list[Request] = []
        for index in indices:
            group = self._ended[index]
            failure = group.failure if isinstance(group, Request) else group
            if failure is not None:
                if isinstance(group, Request):
                    failure.add_note(f"prompt {index}: {group.error}")
                self._let_go([index])
                raise failure
            assert isinstance(group, Request)
            requests.append(group)
        samples = generation_arrays(requests, indices)
        self._let_go(indices)
        return samples

    def _let_go(self, indices: list[int]) -> None:
        """Drop groups that are taken, once as many prompts more were read: an interrupt of that loses no group."""
        self._read_ahead(num_leaving=len(indices))
        if self._unqueued:
            self._post_queue()
        for index in indices:
            self._ended.pop(index, None)  # Another thread may have closed these rollouts while prompts were read.

    def _wait(self) -> None:
        """Wait until a request in flight has ended or a prompt is refused.

        Raise ConfigError if the engine sleeps, and QueueFullError if requests of others leave no room for any of these.
        """
        self._is_asleep, self._full = False, None
        call = self._post_queue()  # Which also looks whether the engine sleeps.
        self._inbox.changes.wait()
        if self._is_asleep:
            self._raise_asleep()
        if self._full is not None and call.is_done.is_set() and not self._index_of and not self._has_news:
            raise self._full  # Nothing of this is computed, so that no end of a group can make room.

    def _raise_asleep(self) -> None:
        """Raise the ConfigError of an engine that sleeps."""
        way_out = f"{self._loop.sleep.way_out}; the samples in flight go on then"
        raise refusal("submit", "an engine that sleeps", "one that is awake", way_out, error=ConfigError)

    @property
    def _has_news(self) -> bool:
        """Return whether `_collect` would find anything."""
        return bool(self._inbox.ended or self._refused)

    def _collect(self) -> None:
        """Take the groups that have ended, and the errors of prompts that the engine has refused."""
        assert self._inbox.ended is not None
        # What is taken out last is there still after an interrupt.
        while self._inbox.ended:
            request = self._inbox.ended[0]
            if (index := self._index_of.get(request)) is not None:
                self._end(index, request)
                del self._index_of[request]
            self._inbox.ended.popleft()
        while self._refused:
            self._end(*self._refused[0])
            self._refused.popleft()

    def _end(self, index: int, group: Request | Exception) -> None:
        """Note the end of a group, or the error that comes in its place; a second call changes nothing."""
        self._in_flight.pop(index, None)
        self._ended[index] = group

    def _read_ahead(self, num_leaving: int = 0) -> None:
        """Read prompts until `max_in_flight` are in flight beside those that leave, or none is left."""
        while not self._is_at_end and self.num_in_flight < self.max_in_flight + num_leaving:
            self._read()

    def _read(self) -> None:
        """Read the next prompt, and check it; one that is refused has its error in the place of its group."""
        try:
            prompt, params = next(self._prompts)
        except StopIteration:
            self._is_at_end = True
            return
        except Exception as error:
            self._is_at_end, self._ended[self._num_read] = True, error
            return
        index, self._num_read = self._num_read, self._num_read + 1
        try:
            options: dict[str, Any] = {"number": 0, "priority": self._priority, "form": ResultForm.ARRAYS}
            new = self._batch.builder.build("", prompt, params, **options)
            # Compiled here, since it would delay the next step.
            grammar = self._loop.outputs.grammars.matcher(new.grammar) if new.grammar else None
        except InvalidRequestError as error:
            self._end(index, error.within(f"prompt {index}"))
            return
        self._unqueued.append(_Prompt(index, new, grammar))
        self._in_flight[index] = None

    def _post_queue(self) -> QueuedCall[Any]:
        """Let `_queue` run between two steps, and return at once."""
        return self._thread.post("submit", self._queue)

    def _queue(self) -> None:
        """Queue prompts in their order, until none is left or the queue is full. Runs between steps.

        A prompt that is refused has its error in the place of its group. One that finds the queue full, or the engine
        asleep, waits for the next call, and so do those behind it: groups that have ended can be taken then.
        """
        if not self._loop.is_open or not self._dropping.alive:
            self._inbox.changes.set()  # A caller that waits finds the engine, or the rollouts, closed.
            return
        unqueued, self._is_asleep = self._unqueued, bool(self._loop.sleep.missing)
        while unqueued and not self._is_asleep:
            prompt = unqueued[0]
            try:
                self._queue_one(prompt)
            except QueueFullError as error:
                self._full = error
                break
            except InvalidRequestError as error:
                self._refused.append((prompt.index, error.within(f"prompt {prompt.index}")))
            except Exception as error:  # Of a scheduling policy, for example: the caller gets it, not the engine.
                self._refused.append((prompt.index, error))
            unqueued.popleft()
        if self._is_asleep or self._refused or (self._full is not None and not self._index_of):
            self._inbox.changes.set()

    def _queue_one(self, prompt: _Prompt) -> None:
        """Give a request its number and its id, and queue it."""
        builder = self._batch.builder
        number = builder.num_requests
        request_id = self._batch.unused_id(f"submit-{number}")
        named = msgspec.structs.replace(prompt.request, request_id=request_id, number=number)
        request = self._loop.make(named, prompt.grammar)
        self._loop.queue(request, self._inbox)
        builder.num_requests += 1
        self._index_of[request] = prompt.index
        self._thread.serve(self._inbox)


def _drop(loop: EngineLoop, thread: StepThread, inbox: Inbox) -> None:
    """End the requests of an inbox that nobody looks at any more. Runs between steps."""
    loop.drop(inbox)
    thread.leave(inbox)
    inbox.changes.set()  # A thread that waits in `take` finds that another one has closed the rollouts.


def _drop_later(loop: EngineLoop, thread: StepThread, inbox: Inbox) -> None:
    """Do what `_drop` does after the present step, or with the next call.

    Garbage is collected in any thread, also within a step or while a trainer's function is traced: nothing runs here. A
    thread that computes steps for the requests is there as long as any is unfinished and the engine is awake.
    """
    loop.lock.post("submit", partial(_drop, loop, thread, inbox))
