"""Rollouts: groups of samples that a thread of the engine's own computes while their caller does other work."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, Self

import msgspec

from ..checks import refusal
from ..core.batch import BatchRunner
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
    it; the next call goes on with the others. `close`, or the end of a `with` block, aborts what is in flight.
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
        self._ended: dict[Request, int] = {}
        """Those that have ended and that nobody has taken, likewise, in the order of their ends."""
        self._errors: deque[Exception] = deque()
        """Errors of prompts that were refused; each of the next calls raises one."""
        self._next: tuple[int, NewRequest] | None = None
        """A prompt that found the queue full."""
        self._num_read, self._is_at_end, self._is_closed = 0, False, False
        self._refill()

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

        Wait until `num_groups` have ended, or all that are left. Raise StopIteration if none is left, the exception of
        a group that has failed, InvalidRequestError for a prompt that is refused, ConfigError if the engine sleeps, and
        RuntimeError if it was shut down. Groups that have ended stay for the next call then.
        """
        if num_groups < 1 or num_groups > self.max_in_flight:
            raise refusal("num_groups", num_groups, f"1 to max_in_flight, {self.max_in_flight}")
        self._refill()
        while True:
            self._loop.call("submit", self._collect)
            if self._errors:
                raise self._errors.popleft()
            wanted = min(num_groups, self.num_in_flight)
            if not wanted:
                raise StopIteration
            ready = list(self._ended)
            if self.in_order:  # Those at the head of the prompts' order that have ended.
                order = sorted({**self._index_of, **self._ended}.items(), key=lambda entry: entry[1])[:wanted]
                ready = [request for request, _ in order if request in self._ended]
            if len(ready) >= wanted:
                return self._give(ready[:wanted])
            self._wait()

    def close(self) -> None:
        """Abort the requests in flight; further calls, and further groups, find nothing left."""
        if not self._is_closed:
            self._is_closed = self._is_at_end = True
            self._next = None
            if self._loop.is_open:
                self._loop.call("submit", self._drop)
            self._index_of.clear()
            self._ended.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _give(self, requests: list[Request]) -> GenerationArrays:
        """Return these groups, which have ended, and read as many prompts more. Raise the exception of the first one
        that has failed, which is then taken alone."""
        failed = next((request for request in requests if request.failure is not None), None)
        taken = requests if failed is None else [failed]
        indices = [self._ended.pop(request) for request in taken]
        self._refill()
        if failed is not None and failed.failure is not None:
            failed.failure.add_note(f"prompt {indices[0]}: {failed.error}")
            raise failed.failure
        return generation_arrays(taken, indices)

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
            self._ended[request] = self._index_of.pop(request)

    def _refill(self) -> None:
        """Read prompts and queue them, until `max_in_flight` are in flight or none is left.

        A prompt that is refused leaves its error for the next call. One that finds the queue full waits for the next
        refill, unless nothing of these rollouts is in flight: then QueueFullError is left for the next call.
        """
        while not self._is_at_end and self.num_in_flight < self.max_in_flight:
            if self._next is None and not self._read():
                continue
            assert self._next is not None
            try:
                self._loop.call("submit", partial(self._queue, *self._next))
            except QueueFullError as error:
                if not self.num_in_flight:
                    self._errors.append(error)
                return
            except InvalidRequestError as error:
                self._refuse(self._next[0], error)
            self._next = None

    def _read(self) -> bool:
        """Read the next prompt into `_next`; return whether there is one that was not refused."""
        try:
            prompt, params = next(self._prompts)
        except StopIteration:
            self._is_at_end = True
            return False
        index, self._num_read = self._num_read, self._num_read + 1
        try:
            options: dict[str, Any] = {"number": 0, "priority": self._priority, "form": ResultForm.ARRAYS}
            self._next = index, self._batch.builder.build("", prompt, params, **options)
        except InvalidRequestError as error:
            self._refuse(index, error)
        return self._next is not None

    def _refuse(self, index: int, error: InvalidRequestError) -> None:
        self._errors.append(InvalidRequestError(f"prompt {index}: {error}", param=error.param))

    def _queue(self, index: int, new: NewRequest) -> None:
        """Give a request its number and its id, and queue it. Runs between steps."""
        self._loop.check_ready("submit")
        builder = self._batch.builder
        number = builder.num_requests
        new = msgspec.structs.replace(new, request_id=f"submit-{number}", number=number)
        request = self._loop.queue(self._loop.make(new), self._inbox)
        builder.num_requests += 1
        self._index_of[request] = index
        self._thread.serve(self._inbox)

    def _drop(self) -> None:
        self._loop.drop(self._inbox)
        self._thread.leave(self._inbox)
