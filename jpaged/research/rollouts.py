"""Rollouts: groups of samples that a thread of the engine's own computes while their caller does other work."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, Self

import msgspec

from ..checks import check, integer, refusal
from ..core.batch import BatchRunner
from ..core.engine_loop import EngineLoop
from ..core.inbox import Inbox
from ..core.step_thread import StepThread
from ..errors import ConfigError, InvalidRequestError, QueueFullError
from ..messages import NewRequest, Params, ResultForm
from ..request import Request
from .arrays import GenerationArrays, generation_arrays


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
        self._inbox = Inbox()
        self._index_of: dict[Request, int] = {}
        """Requests in flight in the order of their prompts, each with the index of its prompt."""
        self._ended: dict[int, Request | Exception] = {}
        """By the index of its prompt what nobody has taken, in the order of the ends: requests, errors of prompts that
        were refused, and what the iterator of prompts has raised in place of one."""
        self._next: tuple[int, NewRequest] | None = None
        """A prompt that found the queue full."""
        self._full: QueueFullError | None = None
        """What that prompt was told."""
        self._num_read, self._is_at_end = 0, False
        # Rollouts that their caller drops without `close` must not go on computing for nobody.
        self._dropping = weakref.finalize(self, _drop_later, self._loop, thread, self._inbox)
        self._dropping.atexit = False
        try:
            self._refill()
        except BaseException:
            self.close()
            raise

    @property
    def num_in_flight(self) -> int:
        """Return the number of prompts that were read and whose groups nobody has taken."""
        return len(self._index_of) + len(self._ended)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GenerationArrays:
        """Return the next group, after waiting for its end; see `take`."""
        return self.take(1)

    def take(self, num_groups: int) -> GenerationArrays:
        """Return the next groups in one `GenerationArrays`: those that have ended first, or in the prompts' order.

        Wait until `num_groups` have ended, or all that are left once the prompts have come to their end. Raise
        StopIteration if none is left, the exception of a group that has failed, InvalidRequestError for a prompt that
        is refused, what the iterator of prompts has raised in place of one, ConfigError if the engine sleeps,
        RuntimeError if it was shut down, and QueueFullError if requests of others leave no room for any of these. Other
        groups that have ended stay for the next call then.
        """
        check("num_groups", num_groups, integer(1, self.max_in_flight))
        while True:
            self._refill()
            self._loop.call("submit", self._collect)
            wanted = min(num_groups, self.num_in_flight) if self._is_at_end else num_groups
            if not wanted:
                raise StopIteration
            ready = list(self._ended)
            if self.in_order:  # Those at the head of the prompts' order that have ended.
                order = sorted([*self._index_of.values(), *self._ended])[:wanted]
                ready = [index for index in order if index in self._ended]
            if len(ready) >= wanted:
                return self._give(ready[:wanted])
            if not self._index_of and self._full is not None:
                raise self._full  # Nothing of this is computed, so that no end of a group can make room.
            self._wait()

    def close(self) -> None:
        """Abort the requests in flight; further calls, and further groups, find nothing left."""
        if self._dropping.detach() is not None:
            self._is_at_end, self._next = True, None
            if self._loop.is_open:
                self._loop.call("submit", partial(_drop, self._loop, self._thread, self._inbox))
            self._index_of.clear()
            self._ended.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _give(self, indices: list[int]) -> GenerationArrays:
        """Return these groups, which have ended, and read as many prompts more. Raise the exception of the first one
        that has failed, which is then taken alone."""
        groups = [self._ended[index] for index in indices]
        failed = next((place for place, one in enumerate(groups) if _failure_of(one) is not None), None)
        indices, groups = (indices, groups) if failed is None else ([indices[failed]], [groups[failed]])
        samples = None
        if failed is None:
            samples = generation_arrays([one for one in groups if isinstance(one, Request)], indices)
        self._refill(num_leaving=len(indices))  # Before they leave: an interrupt may end it.
        for index in indices:
            del self._ended[index]
        if samples is not None:
            return samples
        (group,) = groups
        failure = _failure_of(group)
        assert failure is not None
        if isinstance(group, Request):
            failure.add_note(f"prompt {indices[0]}: {group.error}")
        raise failure

    def _wait(self) -> None:
        """Wait until a request has ended. Raise ConfigError or RuntimeError if the engine computes nothing."""
        self._loop.check_open()
        if self._loop.sleep.missing:
            way_out = f"{self._loop.sleep.way_out}; the samples in flight go on then"
            raise refusal("submit", "an engine that sleeps", "one that is awake", way_out, error=ConfigError)
        self._inbox.changes.wait()

    def _collect(self) -> None:
        """Take what has ended out of the inbox. Runs between steps."""
        self._loop.check_open()
        for request, _ in self._loop.last_outputs(self._inbox.take()):
            self._ended[self._index_of.pop(request)] = request

    def _refill(self, num_leaving: int = 0) -> None:
        """Read prompts and queue them, until `max_in_flight` are in flight beside those that leave, or none is left.

        A prompt that is refused has its error in the place of its group. One that finds the queue full waits for the
        next refill. While the engine sleeps nothing is read, and groups that have ended can be taken.
        """
        self._full = None
        while not self._is_at_end and self.num_in_flight < self.max_in_flight + num_leaving:
            if self._loop.sleep.missing:
                return
            if self._next is None:
                self._read()
            if self._next is None:
                continue
            index, new = self._next
            try:
                self._loop.call("submit", partial(self._queue, index, new))
            except QueueFullError as error:
                self._full = error
                return
            except InvalidRequestError as error:
                self._refuse(index, error)
            self._next = None

    def _read(self) -> None:
        """Read the next prompt into `_next`, which stays None at the end of the prompts and for one that is refused."""
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
            self._next = index, self._batch.builder.build("", prompt, params, **options)
        except InvalidRequestError as error:
            self._refuse(index, error)

    def _refuse(self, index: int, error: InvalidRequestError) -> None:
        self._ended[index] = InvalidRequestError(f"prompt {index}: {error}", param=error.param)

    def _queue(self, index: int, new: NewRequest) -> None:
        """Give a request its number and its id, and queue it. Runs between steps."""
        self._loop.check_ready("submit")
        builder = self._batch.builder
        number = builder.num_requests
        request_id = self._batch.unused_id(f"submit-{number}")
        request = self._loop.make(msgspec.structs.replace(new, request_id=request_id, number=number))
        self._loop.queue(request, self._inbox)
        builder.num_requests += 1
        self._index_of[request] = index
        self._thread.serve(self._inbox)


def _failure_of(group: Request | Exception) -> Exception | None:
    """Return why a prompt has no samples; None if it has."""
    return group.failure if isinstance(group, Request) else group


def _drop(loop: EngineLoop, thread: StepThread, inbox: Inbox) -> None:
    """End the requests of an inbox that nobody looks at any more. Runs between steps."""
    loop.drop(inbox)
    thread.leave(inbox)


def _drop_later(loop: EngineLoop, thread: StepThread, inbox: Inbox) -> None:
    """Do what `_drop` does, now or after the present step: garbage is collected in any thread, also within a step."""
    loop.lock.post("submit", partial(_drop, loop, thread, inbox))
