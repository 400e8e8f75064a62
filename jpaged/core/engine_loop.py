"""The engine's loop: queues requests, steps the host core, and gives callers what their requests have got.

    queue ─▶ compute ─▶ the inbox of each caller ─▶ outputs
    drain: no step in flight, and unfinished requests as the caller wants them

It decides how many steps are in flight, and which calls an engine takes at present. It knows no prompt: requests come
as messages. Threads may share it: each step serves the requests of all callers, and what changes requests or weights
runs between steps (step_lock.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from ..checks import one_line, refusal, shown
from ..errors import ConfigError, EngineStoppedError
from ..intake.request_builder import check_new_id
from ..intake.sample_calls import as_request_ids, checked_fork, forbidden_token, sample_of, unfinished_request
from ..messages import NewRequest
from ..outputs import LastOutput, RequestOutput, SampleDelta, error_output
from ..request import CacheKey, Request, RequestState, SampleSequence
from ..research.sleeping import Sleep
from ..research.weight_updates import WeightVersions
from ..scheduling.request_source import RequestSource
from ..startup.build_engine import EngineComponents
from ..step.jax_settings import engine_settings, refuse_traced
from ..text.grammar.grammar import Matcher
from .engine_core import STEPS_FAILED
from .inbox import Inbox
from .step_lock import Result, StepLock
from .step_results import OUTPUT_FAILED

logger = logging.getLogger("jpaged")

StreamSink = Callable[[list[SampleDelta]], None]
"""Takes what a step has given to samples."""


class EngineLoop:
    """The unfinished requests of one engine, and the steps that compute them. See `Engine` for what callers hold."""

    def __init__(self, parts: EngineComponents):
        """Start without requests, over the core, the runner and the sizes in `parts`; no step is computed yet."""
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
        self._max_num_seqs, self._rules = parts.sizes.step.max_num_seqs, self.core.builder.rules_spec
        self._max_in_flight = 2 if parts.config.async_scheduling else 1
        self._is_computing = False
        self.lock = StepLock()
        self._last_fault: tuple[str, str, int] | None = None
        """`_fault_of` the exception whose traceback was logged, or raised to a caller, last."""
        self.inbox = Inbox()
        """The requests of `add_request`, whose outputs `step` returns."""
        self._inbox_of: dict[Request, Inbox] = {}
        """For each of `requests` that of its caller."""
        self.unreturned: list[RequestOutput] = []
        """Outputs of steps that were interrupted before they returned them."""

    # Which thread does what

    def call(self, name: str, command: Callable[[], Result]) -> Result:
        """Run `command` while no step runs, and return its result or raise its exception. `name` is for errors.

        During a step of another thread the command waits, and that thread runs it after the step. A thread that holds
        the lock between two steps runs the command at once. Raise ConfigError for a call from inside of a step, such as
        from a scheduling policy: the step would wait for the command, and the command for the end of the step. Raise it
        too for a call from a function that JAX traces.
        """
        if self.lock.is_own:
            self.check_outside(name)
            return command()
        refuse_traced(name)
        return self.lock.call(name, command)

    def read(self, name: str, command: Callable[[], Result]) -> Result:
        """Return what `command` reads while no other thread changes the engine, also from inside of a step.

        Raise ConfigError for a call from a function that JAX traces.
        """
        refuse_traced(name)
        return self.lock.read(name, command)

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Hold the lock for one step, the `with` block; a thread that holds it already does not take it again.

        Raise ConfigError inside of a step, and in a function that JAX traces; `name` is the method in the error.
        """
        if self.lock.is_own:
            self.check_outside(name)
            yield
            return
        refuse_traced(name)
        with self.lock.hold():
            yield

    # Requests come and go

    def make(self, new: NewRequest, grammar: Matcher | None = None) -> Request:
        """Return a request that is not queued. Raise InvalidRequestError if it can never fit; see `EngineCore.make`."""
        return self.core.make(new, grammar)

    def checked(self, new: NewRequest) -> NewRequest:
        """Return a message with the key that the scheduling policy gives it, so that `make` need not check it again.

        Raise InvalidRequestError if its request can never fit.
        """
        return msgspec.structs.replace(new, policy_key=self.core.policy_key(new))

    def queue(self, request: Request, inbox: Inbox | None = None) -> Request:
        """Queue a request of `make`, tagged with the present version of the weights, and return it.

        `inbox` is its caller's; None is that of `step`. Raise InvalidRequestError if its id is in use, QueueFullError
        if too many requests or tokens wait, and RuntimeError if the engine was shut down.
        """
        self.check_open()
        check_new_id(request.request_id, self.requests)
        inbox = self.inbox if inbox is None else inbox
        self.versions.tag(request)
        self.core.queue(request)
        self.requests[request.request_id] = request
        inbox.requests[request] = None
        self._inbox_of[request] = inbox
        self.num_prompt_tokens += request.prompt_len
        return request

    def abort(self, request_ids: str | Iterable[str], sample: int | None = None) -> None:
        """End requests in any state, or one sample of one. Ids of no unfinished request are ignored.

        `request_ids` is one id or several. Requests of `add_request` give no further output. A call such as `generate`
        does return an output for each of its requests: those that are aborted here have the finish reason "abort". With
        `sample`, only the sample with this index ends; a request whose last sample that was gives its last output.
        """
        ids = as_request_ids(request_ids)
        if sample is not None and len(ids) > 1:
            raise refusal("request_ids", f"{len(ids)} ids beside sample", "one id", "abort samples one by one")
        for request_id in ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if sample is not None:
                sequence = sample_of(request, sample)
                if not sequence.state.is_finished:
                    self.core.abort_sample(sequence)
                    self._note(request)
                continue
            self.core.abort(request)
            if self._inbox_of[request] is self.inbox:
                self._forget(request)
        self._distribute([])

    def fork(self, request_id: str, n: int | None, **options: Any) -> list[int]:
        """Add `n` samples that go on from the tokens of one sample; return their indices. See `Engine.fork`.

        `options` are those of `checked_fork` that say what the caller asks for.
        """
        request = unfinished_request(request_id, self.requests)
        limits: dict[str, Any] = {"max_num_seqs": self._max_num_seqs, "rules": self._rules}
        fork = checked_fork(request, n, **options, **limits)
        for token_id in fork.first_token_ids or ():
            if not self.outputs.may_follow(fork.parent, fork.num_tokens, token_id):
                raise forbidden_token(token_id, "the grammar of structured_outputs forbids")
        self.core.fork(fork.parent, fork.sample_indices, fork.num_tokens, fork.first_token_ids)
        return fork.sample_indices

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
        """Compute one step; return an output for each request that got a token or ended, by its `output_kind`.

        A failed request has an error in its output, and its exception is logged. An exception that ends all requests is
        raised. Outputs that an interrupt kept from being returned come first in the next call. See `Engine.step`.
        """
        outputs: list[RequestOutput] = []
        try:
            with self.turn("step"):
                outputs, self.unreturned = self.unreturned, []
                try:
                    self.advance()
                except Exception as error:
                    self._last_fault = _fault_of(error)  # Its caller has the traceback now: the log needs none.
                    raise
                for request in self.inbox.take():
                    if (output := self.output_of(request)) is not None:
                        outputs.append(output)
                    self.log_failure(request)
        except BaseException:  # Also an interrupt in a call of another thread, which ran after the step.
            self.unreturned += outputs
            raise
        return outputs

    def run_requests(
        self,
        requests: Iterable[Request | None] = (),
        *,
        inbox: Inbox | None = None,
        stream: StreamSink | None = None,
        on_error: str = "raise",
    ) -> Iterator[tuple[Request, RequestOutput]]:
        """Step until no request of `inbox` is left; yield each request with its last output.

        `requests`, made by `make`, are read while fewer than max(1000, 2 × `max_num_seqs`) wait. Requests that were
        read are queued in the order of the scheduling policy, as soon as the queue's limits leave room. If the iterator
        gives None, the next request is not there yet, and the iterator is asked again after a step. `inbox` of None is
        that of `step`, so that the requests of `add_request` are computed to their end too. `stream` is called after
        each step with the deltas of its samples, before the last outputs of that step are yielded.

        If steps fail whichever requests they compute, all unfinished requests end and the exception is raised; with
        `on_error="return"` their outputs are yielded instead, and the rest of `requests` is computed. A request that
        has failed holds the exception as its `failure`; it is not logged here. If the loop ends early, by an exception
        or because its caller leaves it, the unfinished requests of `inbox` are aborted. Raise RuntimeError if another
        thread shuts the engine down meanwhile.
        """
        if stream is not None and not callable(stream):
            raise refusal("stream", shown(stream), "a function that takes a list of SampleDelta", error=ConfigError)
        inbox = self.inbox if inbox is None else inbox
        queue, source = partial(self.queue, inbox=inbox), RequestSource(requests, max_num_seqs=self._max_num_seqs)
        try:
            while not source.is_empty or inbox.requests:
                source.read(len(self.scheduler.waiting))
                with self.turn("generate"):
                    source.queue(queue, is_idle=not self.requests)
                    if not inbox.has_changed:  # Otherwise the step of another thread has served these requests.
                        self._advance_or_fail(on_error)
                    changed = inbox.take()
                    deltas = [] if stream is None else self.deltas_of(changed)
                    outputs = self.last_outputs(changed)
                if stream is not None:
                    stream(deltas)
                yield from outputs
            self.check_open()
        finally:
            self.call("generate", partial(self.drop, inbox))

    def run_messages(
        self, messages: Iterable[NewRequest | None], *, stream: StreamSink | None = None
    ) -> Iterator[LastOutput]:
        """Compute the requests of messages of `checked`, as `run_requests` does with `on_error="return"`.

        The exceptions that end requests are logged, once for each fault.
        """
        requests = (None if new is None else self.make(new) for new in messages)
        for request, output in self.run_requests(requests, stream=stream, on_error="return"):
            self.log_failure(request, is_repeat_logged=False)
            yield LastOutput(output, "" if request.failure is None else one_line(request.failure))

    def last_outputs(self, requests: Iterable[Request]) -> list[tuple[Request, RequestOutput]]:
        """Return those of `requests` that have ended, each with its last output, and forget them."""
        ended = [request for request in requests if request.state.is_finished]
        outputs = [(request, self.output_of(request)) for request in ended]
        return [(request, output) for request, output in outputs if output is not None]

    def drain(self, in_flight: str) -> None:
        """Wait for the steps in flight, then treat unfinished requests as `in_flight` says.

        "abort" ends them. "recompute" drops their pages and queues them again, to be computed anew from their tokens.
        "wait" computes the requests that have begun to their end. "keep" leaves them as they are, but for those that
        score given tokens, which are computed anew. In an engine that sleeps, all but "abort" mean "recompute". The
        next `step` returns the tokens that requests have got here.
        """
        self._read_all()
        if in_flight == "abort":
            for request in list(self.scheduler.unfinished):
                self.core.abort(request)
        elif in_flight == "recompute" or self.sleep.missing:
            self.core.restart()
        elif in_flight == "wait":
            self._finish_those_that_have_begun()
        else:
            for request in list(self.scheduler.unfinished):
                if request.scoring is not None and request.state is not RequestState.WAITING:
                    self.scheduler.recompute(request)
        self._distribute([])

    def stats(self) -> dict[str, float | int]:
        """Return counters since the start, and present sizes, of all parts, under the names of `Engine.stats`."""
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
        for request, inbox in list(self._inbox_of.items()):
            self.core.abort(request)
            self._forget(request)
            inbox.changes.set()  # A caller that waits finds the engine closed.

    # What the log says, and which calls are refused

    def log_failure(self, request: Request, *, is_repeat_logged: bool = True) -> None:
        """Log the exception that has ended a request, with its traceback; do nothing if none has.

        One fault may end many requests. If the exception has the same type and comes from the same line of code as the
        one before, the traceback is left out, and with `is_repeat_logged` false nothing is logged.
        """
        if (failure := request.failure) is None:
            return
        fault = _fault_of(failure)
        is_repeat, self._last_fault = fault == self._last_fault, fault
        if is_repeat_logged or not is_repeat:
            text, traced = f"{type(failure).__name__}: {one_line(failure)}", None if is_repeat else failure
            logger.error("request %s failed: %s", request.request_id, text, exc_info=traced)

    def forget_last_fault(self) -> None:
        """Let the next failure be logged with its traceback, whatever failed before."""
        self._last_fault = None

    def check_ready(self, call: str) -> None:
        """Raise ConfigError for a call from inside of a step, or of an engine that sleeps; see `check_outside`."""
        self.check_outside(call)
        if self.sleep.missing:
            got = f"an engine that sleeps, without {' and '.join(self.sleep.missing)}"
            raise refusal(call, got, "one that is awake", self.sleep.way_out, error=ConfigError)

    def check_outside(self, call: str) -> None:
        """Raise ConfigError for a call from inside of a step or from a function that JAX traces.

        Raise RuntimeError for an engine that was shut down.
        """
        self.check_open()
        refuse_traced(call)
        if self._is_computing and self.lock.is_own:
            raise refusal(call, "a call from inside of a step", "calls between steps", error=ConfigError)

    def check_open(self) -> None:
        """Raise EngineStoppedError, a RuntimeError, for an engine that was shut down."""
        if not self.is_open:
            raise EngineStoppedError("this engine was shut down; make a new one")

    # Inside of a step

    def advance(self) -> None:
        """Compute one step, whose results go to the inboxes of the requests' callers.

        An engine that sleeps computes nothing, and raises ConfigError if requests are unfinished.
        """
        self.check_open()
        if self.scheduler.has_unfinished or not self.sleep.missing:
            self.check_ready("step")
            self._compute(self._max_in_flight)

    def _advance_or_fail(self, on_error: str) -> None:
        """Compute one step; pass over an exception after which the loop of `run_requests` can go on.

        With `on_error="return"` that is one after which no request is unfinished: their outputs tell of it. With
        "raise", and while requests are unfinished, every exception is raised.
        """
        try:
            self.advance()
        except Exception:
            if on_error == "raise" or self.scheduler.has_unfinished:
                raise

    @engine_settings()
    def _compute(self, max_in_flight: int) -> None:
        """Start steps until `max_in_flight` are in flight, then wait for the oldest one and distribute its results.

        With 0, no step is started. If a step fails, requests are queued anew. The exception is raised only if it ends
        all requests or is an interrupt.
        """
        core = self.core
        sampled: list[SampleSequence] = []
        self._is_computing = True
        try:
            core.prepare()
            with self.plan.serving():
                core.drop_finished()
                # A CPU that compiles is slow at steps, and the next step may have to wait for its executable.
                is_compiling = self._is_cpu and self.plan.is_compiling and not self.plan.is_held
                core.dispatch_ahead(min(1, max_in_flight) if is_compiling else max_in_flight)
                sampled = core.retire() if core.in_flight else []
                self.plan.start_deferred()  # Programs that the first step did not need are compiled now.
                core.drop_finished()  # The results may have ended all sequences of the next step in flight.
        except BaseException as error:
            core.recover(error)
        finally:
            self._is_computing = False
            self._distribute(sampled)

    def _finish_those_that_have_begun(self) -> None:
        """Compute all requests that have been scheduled at least once to their end, and begin no other.

        The others wait outside of the queue meanwhile, and return to it at the end. After an exception, all unfinished
        requests are queued anew.
        """
        admission = self.scheduler.admission
        try:
            admission.hold_newcomers()
            while any(request.first_scheduled_time is not None for request in self.scheduler.unfinished):
                self._compute(self._max_in_flight)
            self._read_all()
            admission.release_newcomers()
        except BaseException:  # An interrupt may leave queues half-written, so they are rebuilt.
            admission.holds_newcomers = False
            self.core.restart()
            raise

    def _read_all(self) -> None:
        while self.core.in_flight:
            self._compute(0)

    def _distribute(self, sampled: list[SampleSequence]) -> None:
        """Note the requests of the sequences in `sampled`, and all that have ended, in the inboxes of their callers.

        The time of the last token is noted in those that got tokens. An ended request whose caller takes no output any
        more, since it was aborted, is forgotten here, and so is one that its caller takes from `Inbox.ended`.
        """
        now = time.monotonic()
        # `_inbox_of` has lost those that were aborted since the step was started.
        changed = {sequence.request: None for sequence in sampled if sequence.request in self._inbox_of}
        for request in changed:
            request.last_token_time = now if request.finished_time is None else request.finished_time
        # Requests that ended in an earlier step which then failed, or between steps, are among these too.
        for request in list(self.scheduler.ended):
            if request in self._inbox_of:
                changed[request] = None
            else:
                self._forget(request)
        for request in changed:
            self._note(request)

    def _note(self, request: Request) -> None:
        """Note in the inbox of its caller that a request has changed; see `_distribute`."""
        inbox = self._inbox_of[request]
        if inbox.ended is None:
            inbox.note(request)
        elif request.state.is_finished:
            self._forget(request)
            inbox.ended.append(request)
            inbox.changes.set()

    def output_of(self, request: Request) -> RequestOutput | None:
        """Return the output that a request's caller gets now; None if its `output_kind` gives nothing yet.

        A request that has ended is forgotten, but only after its output was made: an interrupt before that leaves it to
        the next step. If the output cannot be made, the request ends with an error.
        """
        try:
            output = self.outputs.output_of(request)
        except Exception as exception:  # A fault in one request's output must not stop other requests.
            self.core.fail(request, OUTPUT_FAILED, cause=exception)
            output = error_output(request.request_id, request.prompt, request.error or OUTPUT_FAILED)
        if request.state.is_finished:
            self._forget(request)
        return output

    def deltas_of(self, requests: list[Request]) -> list[SampleDelta]:
        """Return the tokens and texts that the samples of `requests` have got since their last deltas.

        A request whose deltas cannot be made ends with an error, and the deltas of the others are returned.
        """
        deltas: list[SampleDelta] = []
        for request in requests:
            try:
                deltas += self.outputs.take_deltas(request)
            except Exception as exception:  # A fault in one request's output must not stop other requests.
                self.core.fail(request, OUTPUT_FAILED, cause=exception)
        return deltas

    def fail(self, inbox: Inbox, error: Exception) -> None:
        """End the unfinished requests of an inbox by an error, which they hold for their caller."""
        for request in list(inbox.requests):
            if not request.state.is_finished:
                self.core.fail(request, STEPS_FAILED, cause=error)
        self._distribute([])

    def drop(self, inbox: Inbox) -> None:
        """End all requests of an inbox, and forget them, since their outputs are not taken any more."""
        for request in list(inbox.requests):
            self.core.abort(request)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        """Drop a request that has ended: its id is free, and no step returns it any more."""
        self.scheduler.ended.pop(request, None)
        self.outputs.set_grammar(request, None)
        if (inbox := self._inbox_of.pop(request, None)) is not None:
            inbox.forget(request)
            del self.requests[request.request_id]
            if not self.requests:
                self.core.check_idle()  # All requests are gone, so all pages and slots must be free.


def _fault_of(failure: BaseException) -> tuple[str, str, int]:
    """Return what identifies the fault of an exception: its type's name, and the file and line that raised it.

    Example: ("ValueError", "/src/model.py", 17). File and line are those of the innermost frame of the traceback, or ""
    and 0 for an exception without a traceback. Two exceptions with equal results are taken for one fault.
    """
    traceback = failure.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    place = ("", 0) if traceback is None else (traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
    return type(failure).__name__, *place
