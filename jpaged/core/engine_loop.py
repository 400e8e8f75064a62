"""The engine's loop: queues requests, steps the host core, and gives callers what their requests have got.

    queue ─▶ step: compute ─▶ publish ─▶ outputs
    drain: no step in flight, and unfinished requests as the caller wants them

It decides how many steps are in flight, and which calls an engine takes at present. It knows no prompt: requests come
as messages. Threads may share it: what changes requests or weights runs between steps, see `EngineLoop.call`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import jax

from ..checks import one_line, refusal
from ..errors import ConfigError
from ..intake.request_builder import as_request_ids, fork_source, unfinished_request
from ..messages import NewRequest
from ..outputs import RequestOutput, SampleDelta, error_output
from ..request import CacheKey, Request, SampleSequence
from ..research.sleeping import Sleep
from ..research.weight_updates import WeightVersions
from ..scheduling.request_source import RequestSource
from ..startup.build_engine import EngineComponents
from .engine_core import fault_of
from .step_results import OUTPUT_FAILED

logger = logging.getLogger("jpaged")

POLL_S = 0.005
"""Seconds after which a thread that waits for a step of another thread looks again whether it may run its own call."""
Result = TypeVar("Result")
StreamSink = Callable[[list[SampleDelta]], None]
"""Takes what a step has given to samples."""


class EngineLoop:
    """The unfinished requests of one engine, and the steps that compute them. See `Engine` for what callers hold."""

    def __init__(self, parts: EngineComponents):
        """Start without requests."""
        self.core, self.runner, self.plan = parts.core, parts.runner, parts.runner.compile_plan
        self.scheduler, self.outputs = self.core.scheduler, self.core.outputs
        self.requests: dict[str, Request] = {}
        """Requests whose last output has not been returned, by their ids."""
        self.versions = WeightVersions(self.scheduler)
        self.sleep = Sleep(parts, self.versions)
        self.num_prompt_tokens = 0
        """Prompt tokens of all requests that were queued so far."""
        self.is_open = True
        self._is_cpu = parts.device.platform == "cpu"
        self._max_num_seqs = parts.sizes.step.max_num_seqs
        self._max_in_flight = 2 if parts.config.async_scheduling else 1
        self._is_computing = False
        self._lock = threading.Lock()
        """Held by the thread that computes a step, or runs calls between steps."""
        self._owner: int | None = None  # The identifier of that thread.
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        """Calls of other threads that wait for the end of a step."""
        self._alone: tuple[int, str] | None = None
        """The thread that alone may queue and step requests at present, and its call."""
        self._last_fault: tuple[str, str, int] | None = None  # Its traceback was logged, or raised, last.
        self._unread: list[SampleSequence] = []
        """Sequences that got tokens which no `step` has returned yet."""

    # Which thread does what

    def call(self, name: str, command: Callable[[], Result]) -> Result:
        """Run a command while no step runs, and return what it returns.

        If no step runs, the caller's thread runs it. During a step of another thread the command waits, and that thread
        runs it behind the step. Raise ConfigError, which names the call `name`, from inside of a step, such as from a
        scheduling policy: no later moment of that call would be between two steps.
        """
        if self._owner == threading.get_ident():
            self.check_outside(name)
            return command()
        future: Future[Result] = Future()
        self._calls.append((future, command))
        try:
            while not future.done():
                if self._lock.acquire(blocking=False):
                    try:
                        self._run_calls()
                    finally:
                        self._lock.release()
                else:
                    wait([future], POLL_S)
        except BaseException:  # An interrupt: the command is not to run later.
            future.cancel()
            raise
        return future.result()

    @contextmanager
    def alone(self, call: str) -> Iterator[None]:
        """Let only this thread queue and step requests meanwhile; the call that does so is named `call`.

        Raise ConfigError if requests are unfinished, another thread is alone with the engine, or it is not ready.
        """
        caller = threading.get_ident()

        def begin() -> None:
            self.check_ready(call)
            self.check_shared(call, caller)
            if self.requests:
                got = f"an engine with {len(self.requests)} unfinished requests of add_request"
                raise refusal(call, got, "none", "step() them to their end or abort them first", error=ConfigError)
            self._alone = caller, call

        self.call(call, begin)
        try:
            yield
        finally:
            self._alone = None

    def check_shared(self, call: str, caller: int) -> None:
        """Refuse a call of the thread `caller` about requests while another thread is alone with the engine."""
        alone = self._alone
        if alone is not None and alone[0] != caller:
            got = f"an engine that computes {alone[1]} for another thread"
            raise refusal(call, got, "one that does not", "wait for its end", error=ConfigError)

    @contextmanager
    def _between_calls(self, name: str) -> Iterator[None]:
        """Hold the lock for a step; behind it, run the calls that came meanwhile. Refuse a step inside of a step."""
        caller = threading.get_ident()
        if self._owner == caller:
            self.check_outside(name)
            yield
            return
        self.check_shared(name, caller)  # At once: the other thread may never leave the lock for long.
        with self._lock:
            try:
                self._owner = caller
                self.check_shared(name, caller)  # It may have begun since.
                yield
            finally:
                self._run_calls()

    def _run_calls(self) -> None:
        """Run the calls that wait, as the thread that holds the lock."""
        try:
            self._owner = threading.get_ident()
            while self._calls:
                future, command = self._calls.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    future.set_result(command())
                except BaseException as error:
                    future.set_exception(error)
                    if not isinstance(error, Exception):  # An interrupt is this thread's own.
                        raise
        finally:
            self._owner = None

    # Requests come and go

    def make(self, new: NewRequest) -> Request:
        """Return a request that is not queued. Raise InvalidRequestError if it can never fit."""
        return self.core.make(new)

    def queue(self, request: Request) -> Request:
        """Queue a request of `make`, and return it. Raise QueueFullError if too many wait."""
        self.check_open()
        self.versions.tag(request)
        self.core.queue(request)
        self.requests[request.request_id] = request
        self.num_prompt_tokens += request.prompt_len
        return request

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests, in any state; see `Engine.abort_request`."""
        for request_id in as_request_ids(request_ids):
            request = self.requests.get(request_id)
            if request is not None:
                self.core.abort(request)
                self._forget(request)

    def fork(self, request_id: str, n: int, *, sample: int, sample_indices: Sequence[int] | None) -> list[int]:
        """Add samples to a request; see `Engine.fork`."""
        request = unfinished_request(request_id, self.requests)
        options: dict[str, Any] = {"sample_indices": sample_indices, "max_num_seqs": self._max_num_seqs}
        parent, indices = fork_source(request, n, sample=sample, **options)
        self.core.fork(parent, indices)
        return indices

    def pin(self, token_ids: list[int], key: CacheKey) -> int:
        """Keep the full pages of a prefix; see `Engine.pin_prefix`."""
        key, prefixes = self.versions.key(key), self.scheduler.prefixes
        self.scheduler.demand.check_pin(prefixes.num_new_pins(token_ids, key), self.scheduler.unfinished)
        return prefixes.pin(token_ids, key)

    def unpin(self, token_ids: list[int], key: CacheKey) -> None:
        """Undo one `pin` of a prefix."""
        if not self.scheduler.prefixes.unpin(token_ids, self.versions.key(key)):
            raise refusal("prompt", "a prompt that is not pinned", "one that pin_prefix has taken")

    # Steps

    def step(self) -> list[RequestOutput]:
        """Compute one step, and return the outputs of the requests that it has changed; see `Engine.step`."""
        with self._between_calls("step"):
            try:
                changed = self._advance()
            except Exception as error:
                self._last_fault = fault_of(error)  # Its caller has the traceback now: the log needs none.
                raise
            outputs = [output for request in changed if (output := self._output_of(request)) is not None]
            for request in changed:
                self.log_failure(request)
            return outputs

    def run_requests(
        self, requests: Iterable[Request | None] = (), *, stream: StreamSink | None = None, on_error: str = "raise"
    ) -> Iterator[tuple[Request, RequestOutput]]:
        """Step until no request is left; yield each request with its last output.

        `requests`, of `make`, are read while fewer than max(1000, 2 × `max_num_seqs`) wait. Those that were read are
        queued in the order of the scheduling policy, as soon as the queue's limits leave room. None among them says
        that the next one is not there yet: it is asked for again after a step. `stream` is called behind each step
        with what it has given to samples, before the last outputs of this step are yielded.

        If all unfinished requests end because steps fail whatever is computed, the exception is raised; with
        `on_error="return"` their outputs are yielded and the other `requests` follow. A request that has failed holds
        the exception as its `failure`; nothing is logged of it. A loop that ends early, by an exception or because its
        caller leaves it, aborts every unfinished request of the engine.
        """
        source = RequestSource(requests, max_num_seqs=self._max_num_seqs)
        try:
            while not source.is_empty or self.requests:
                source.read(len(self.scheduler.waiting))
                with self._between_calls("generate"):
                    source.queue(self.queue, is_idle=not self.requests)
                    changed = self._advance_or_fail(on_error)
                    deltas = [] if stream is None else self._deltas_of(changed)
                    ended = [request for request in changed if request.state.is_finished]
                    outputs = [(request, self._output_of(request)) for request in ended]
                if stream is not None:
                    stream(deltas)
                yield from ((request, output) for request, output in outputs if output is not None)
        finally:
            self.call("generate", lambda: self.abort(list(self.requests)))

    def drain(self, in_flight: str) -> None:
        """Leave no step in flight, and do with unfinished requests what `research.weight_updates.IN_FLIGHT` says.

        In an engine that sleeps, all but "abort" mean "recompute". What requests have got is returned by the next
        `step`.
        """
        self._read_all()
        if in_flight == "abort":
            for request in list(self.scheduler.unfinished):
                self.core.abort(request)
        elif in_flight == "recompute" or self.sleep.missing:
            self.core.restart()
        elif in_flight == "wait":
            self._finish_those_that_have_begun()

    def stats(self) -> dict[str, float | int]:
        """Return counters since the start and present sizes, under the names of `Engine.stats`."""
        return {
            **self.core.stats(),
            "prompt_tokens": self.num_prompt_tokens,
            "requests": len(self.requests),
            **self.scheduler.stats(),
            **self.scheduler.blocks.stats(),
            "swap_bytes": self.runner.swap_bytes,
            **self.plan.stats(),
        }

    def close(self) -> None:
        """Abort all requests, and let every later call fail; further calls of this do nothing."""
        self.is_open = False
        self.abort(list(self.requests))

    # What the log says, and which calls are refused

    def log_failure(self, request: Request, *, is_repeat_logged: bool = True) -> None:
        """Log the exception that has ended a request, with its traceback.

        One fault may end many requests: if the failure logged last has the same type and comes from the same line of
        code, the traceback is left out, and without `is_repeat_logged` the log has nothing of it.
        """
        if (failure := request.failure) is None:
            return
        fault = fault_of(failure)
        is_repeat, self._last_fault = fault == self._last_fault, fault
        if is_repeat_logged or not is_repeat:
            text, traced = f"{type(failure).__name__}: {one_line(failure)}", None if is_repeat else failure
            logger.error("request %s failed: %s", request.request_id, text, exc_info=traced)

    def forget_last_fault(self) -> None:
        """Let the next failure be logged with its traceback, whatever failed before."""
        self._last_fault = None

    def check_ready(self, call: str) -> None:
        """Refuse a call of an engine that was shut down, from inside of a step, or that needs what sleep took."""
        self.check_outside(call)
        if self.sleep.missing:
            got = f"an engine that sleeps, without {' and '.join(self.sleep.missing)}"
            raise refusal(call, got, "one that is awake", self.sleep.way_out, error=ConfigError)

    def check_outside(self, call: str) -> None:
        """Refuse a call of an engine that was shut down, or from inside of a step, as from a scheduling policy."""
        self.check_open()
        if self._is_computing and self._owner == threading.get_ident():
            raise refusal(call, "a call from inside of a step", "calls between steps", error=ConfigError)

    def check_open(self) -> None:
        """Raise RuntimeError for an engine that was shut down."""
        if not self.is_open:
            raise RuntimeError("this engine was shut down; make a new one")

    # Inside of a step

    def _advance(self) -> list[Request]:
        """Compute one step; return the requests that got a token or ended."""
        self.check_open()
        if self.scheduler.has_unfinished or not self.sleep.missing:
            self.check_ready("step")
            self._unread += self._compute(self._max_in_flight)
        sampled, self._unread = self._unread, []
        changed = self._publish(sampled)
        if changed and not self.requests:
            self.core.check_idle()
        return changed

    def _advance_or_fail(self, on_error: str) -> list[Request]:
        """Advance; with `on_error="return"` an exception that has ended all requests is left to their outputs."""
        try:
            return self._advance()
        except Exception:
            if on_error == "raise" or self.scheduler.has_unfinished:
                raise
            return []  # The next step publishes the requests that have ended.

    def _compute(self, max_in_flight: int) -> list[SampleSequence]:
        """Start steps until so many are in flight, and read the oldest one; return the sequences that got a token."""
        core = self.core
        self._is_computing = True
        try:
            core.prepare()
            with self.plan.serving(), jax.transfer_guard("allow"):  # Callers may guard code of their own.
                core.drop_finished()
                # A CPU that compiles is slow at steps, and the next step may have to wait for its executable.
                is_compiling = self._is_cpu and self.plan.is_compiling
                core.dispatch_ahead(min(1, max_in_flight) if is_compiling else max_in_flight)
                sampled = core.retire() if core.in_flight else []
                self.plan.start_deferred()
                core.drop_finished()
            return sampled
        except BaseException as error:
            core.recover(error)
            return []
        finally:
            self._is_computing = False

    def _finish_those_that_have_begun(self) -> None:
        """Compute all requests that have ever run to their end, and begin no other."""
        admission = self.scheduler.admission
        try:
            admission.hold_newcomers()
            while any(request.first_scheduled_time is not None for request in self.scheduler.unfinished):
                self._unread += self._compute(self._max_in_flight)
            self._read_all()
            admission.release_newcomers()
        except BaseException:  # An interrupt may leave queues half-written.
            admission.holds_newcomers = False
            self.core.restart()
            raise

    def _read_all(self) -> None:
        while self.core.in_flight:
            self._unread += self._compute(0)

    def _publish(self, sampled: list[SampleSequence]) -> list[Request]:
        """Return the requests whose callers have something new, and forget those that have ended."""
        now = time.monotonic()
        # A request that has ended, or was aborted, since the step was started is no longer among `requests`.
        changed = {s.request: None for s in sampled if self.requests.get(s.request.request_id) is s.request}
        for request in changed:
            request.last_token_time = now if request.finished_time is None else request.finished_time
        # Requests that ended in an earlier step which then failed, or between steps, are among these too.
        for request in list(self.scheduler.ended):
            if self.requests.get(request.request_id) is request:
                changed[request] = None
            self._forget(request)
        return list(changed)

    def _output_of(self, request: Request) -> RequestOutput | None:
        """Return what the caller of a request gets now; if that cannot be made, end the request with an error."""
        try:
            return self.outputs.output_of(request)
        except Exception as exception:  # Whatever one request does to its output, the others go on.
            self.core.fail(request, OUTPUT_FAILED, cause=exception)
            self._forget(request)
            return error_output(request.request_id, request.prompt, request.error or OUTPUT_FAILED)

    def _deltas_of(self, requests: list[Request]) -> list[SampleDelta]:
        """Return what the samples of these requests have got since the last deltas; those that fail end now."""
        deltas: list[SampleDelta] = []
        for request in requests:
            try:
                deltas += self.outputs.take_deltas(request)
            except Exception as exception:  # Whatever one request does to its output, the others go on.
                self.core.fail(request, OUTPUT_FAILED, cause=exception)
                self._forget(request)
        return deltas

    def _forget(self, request: Request) -> None:
        """Drop a request that has ended: its id is free, and no step returns it any more."""
        if self.requests.get(request.request_id) is request:
            del self.requests[request.request_id]
        self.scheduler.ended.pop(request, None)
