"""One model behind a paged cache, for callers that queue requests and step it themselves: the base of `Engine`."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import jax
from flax import nnx

from ..checks import one_line, refusal
from ..config.engine_config import EngineConfig
from ..errors import ConfigError
from ..intake.request_builder import (
    CheckedRequest,
    Params,
    RequestBuilder,
    as_request_ids,
    check_new_id,
    fork_source,
    unfinished_request,
)
from ..outputs import RequestOutput, error_output
from ..request import Request, SampleSequence
from ..research.sleeping import Sleep
from ..research.weight_updates import WeightVersions
from ..sampling.sampling_params import SampleMode
from ..scheduling.request_source import RequestSource
from ..startup.build_engine import EngineComponents, Progress, build_engine
from ..startup.open_model import ModelHandle, open_model, open_module
from ..startup.sizing.sizes import Demand
from ..text.prompts import EncodedPrompt
from .engine_core import OUTPUT_FAILED, fault_of

logger = logging.getLogger("jpaged")


class StepEngine:
    """A model behind a paged cache, its queue of requests, and its steps. See `Engine` for what callers hold."""

    def __init__(self, model: str | nnx.Module | None = None, **options: Any):
        """Load a model and get ready to serve it: `Engine("smollm2-135m", max_num_seqs=8)`.

        `model` is the name of a built-in model, a repository of the Hugging Face hub, a directory or a GGUF file; None
        is the default of `EngineConfig`. `options` are the other fields of `EngineConfig`; with `params`, a tree of
        arrays, only the config and the tokenizer come from `model`, and the arrays are copied. Raise ConfigError or
        ModelLoadError, before anything large is allocated, if an option or the model is wrong.

        `model` may also be a module of nnx of your own with a `ModelSpec` as its `spec` (docs/research.md): its weights
        are copies of its arrays, or of `params`, a tree under the paths of its state. JAX's configuration is then left
        alone, and executables are not kept, unless `compilation_cache_dir` is given.
        """
        if isinstance(model, nnx.Module):
            config = EngineConfig(model=type(model).__name__, **options)
            self._start(build_engine(config, open_module(config, model)))
            return
        config = EngineConfig(**options) if model is None else EngineConfig(model=model, **options)
        self._start(build_engine(config, open_model(config)))

    @classmethod
    def from_engine_args(
        cls,
        config: EngineConfig,
        handle: ModelHandle | None = None,
        *,
        demands: Sequence[Demand] = (),
        modes: Collection[SampleMode] = (),
        progress: Progress | None = None,
    ) -> Self:
        """Return an engine for a validated config, and for an already opened model, if one is given.

        `demands` (tokens of each request) and `modes` (kinds of sampling) describe the requests that will come, if
        all are known; left out, nothing is assumed. With them the page pool is no larger than these requests need,
        and the programs that they need first are compiled while the weights load. `progress(name, done, total)` is
        called in the phases `check`, `load` and `compile`. Raises ConfigError or ModelLoadError.
        """
        handle = handle or open_model(config)
        engine = cls.__new__(cls)
        engine._start(build_engine(config, handle, demands=demands, modes=modes, progress=progress))
        return engine

    def _start(self, parts: EngineComponents) -> None:
        self.config, self.handle, self.sizes = parts.config, parts.handle, parts.sizes
        self.step_sizes = parts.sizes.step
        self.tokenizer = parts.handle.tokenizer
        self.device, self.mesh, self.backend = parts.device, parts.mesh, parts.backend
        self.attention, self.memory = parts.attention, parts.memory
        self.core, self.runner = parts.core, parts.runner
        self.plan = self.runner.plan
        self.scheduler = self.core.scheduler
        self.blocks = self.scheduler.blocks
        self.prefixes = self.blocks.prefixes
        self.load_s = parts.load_s
        self.requests: dict[str, Request] = {}
        """Requests whose last output has not been returned, by their ids."""
        self._outputs, self._demand = self.core.outputs, self.scheduler.demand
        self._builder = RequestBuilder(parts, num_groups=self.blocks.arithmetic.num_groups)
        self._num_requests = self._num_prompt_tokens = 0
        self._max_in_flight = 2 if self.config.async_scheduling else 1
        self._is_open, self._is_computing = True, False
        self._last_fault: tuple[str, str, int] | None = None  # Its traceback was logged, or raised, last.
        self._unread: list[SampleSequence] = []
        """Sequences that got tokens which no `step` has returned yet."""
        self._live, self._versions = parts.live, WeightVersions(self.scheduler)
        self._sleep = Sleep(parts, self._versions)

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: Params | None = None,
        *,
        arrival_time: float | None = None,
        priority: int | None = None,
        number: int | None = None,
    ) -> None:
        """Queue a request; `step` returns its outputs under `request_id`.

        `prompt` has any form that `generate` takes; `params` of None are `default_sampling_params`. `arrival_time`, in
        seconds of `time.monotonic()` and not in the future, is the start of its metrics and of the wait that
        `scheduling_delay_factor` bounds; requests of equal urgency are served in the order of the calls, whatever it
        says. `priority` goes before that of the prompt's mapping; a lower value is served sooner. `number` is the
        request's place in the seed of a request without one, by default the count of earlier requests: a resumed job
        gives the number of the first run and draws the same tokens.

        Raise InvalidRequestError if an argument is wrong, the id belongs to an unfinished request, or the request can
        never fit; QueueFullError if as many requests or tokens wait as the engine's `limits` allow. Other requests
        are unchanged then.
        """
        check_new_id(request_id, self.requests)
        options: dict[str, Any] = {"priority": priority, "number": number, "arrival_time": arrival_time}
        self._queue(self._make_request(self._check_request(request_id, prompt, params, **options)))

    def prepare_request(self, request_id: str, encoded: EncodedPrompt, params: Params, *, number: int) -> Request:
        """Return a checked request that is not queued, for `run_requests`.

        `encoded` and `params` have been checked against this engine's model. `number` is that of `add_request`. Raise
        InvalidRequestError if the request does not fit into this engine.
        """
        self._builder.check_size(encoded, params)
        return self._make_request(CheckedRequest.of(request_id, encoded, params, number=number))

    def enqueue(self, request_id: str, encoded: EncodedPrompt, params: Params, *, number: int) -> Request:
        """Queue what `prepare_request` returns, and return it. Raise QueueFullError if too many wait."""
        return self._queue(self.prepare_request(request_id, encoded, params, number=number))

    def step(self) -> list[RequestOutput]:
        """Compute one step; return an output for each request that got a token or ended, by its `output_kind`.

        An exception in a step costs no tokens: the next steps compute again what was lost. If steps fail repeatedly
        without a token between them, requests are computed one at a time, and one that fails alone ends with an
        error. If several fail alone, all unfinished requests end with errors and the exception is raised; the next
        step returns their outputs. An interrupt such as KeyboardInterrupt is raised at once, and later steps go on.

        `error` of an output names the type of what has failed; its message is logged, see `log_failure`.
        """
        try:
            changed = self._advance()
        except Exception as error:
            self._last_fault = fault_of(error)  # Its caller has the traceback now: the log needs none.
            raise
        outputs = [output for request in changed if (output := self._output_of(request)) is not None]
        for request in changed:
            self.log_failure(request)
        return outputs

    def run_until_done(
        self, requests: Iterable[Request] = (), *, stream: bool = False, on_error: str = "raise"
    ) -> Iterator[RequestOutput]:
        """Step until no request is left; yield the last output of each request, with `stream` all of its outputs.

        The rest is as in `run_requests`; what has failed is logged as by `step`.
        """
        for request, output in self.run_requests(requests, stream=stream, on_error=on_error):
            self.log_failure(request)
            yield output

    def run_requests(
        self, requests: Iterable[Request | None] = (), *, stream: bool = False, on_error: str = "raise"
    ) -> Iterator[tuple[Request, RequestOutput]]:
        """Step until no request is left; yield each request with its last output, with `stream` with all outputs.

        `requests`, of `prepare_request`, are read while fewer than max(1000, 2 × `max_num_seqs`) wait. Those that were
        read are queued in the order of the scheduling policy, as soon as the queue's limits leave room. None among them
        says that the next one is not there yet: it is asked for again after a step.

        If all unfinished requests end because steps fail whatever is computed, the exception is raised; with
        `on_error="return"` their outputs are yielded and the other `requests` follow. A request that has failed holds
        the exception as its `failure`; nothing is logged of it. A loop that ends early, by an exception or because its
        caller leaves it, aborts every unfinished request of the engine.
        """
        source = RequestSource(requests, max_num_seqs=self.step_sizes.max_num_seqs)
        try:
            while not source.is_empty or self.requests:
                source.read(len(self.scheduler.waiting))
                source.queue(self._queue, is_idle=not self.requests)
                for request in self._advance_or_fail(on_error):
                    if (stream or request.state.is_finished) and (output := self._output_of(request)) is not None:
                        yield request, output
        finally:
            self.abort_request(list(self.requests))

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

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has outputs to come."""
        return bool(self.requests)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests whose last output `step` has not returned."""
        return len(self.requests)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests, in any state, and free what they hold; they give no further output.

        `request_ids` is one id or several; ids of no unfinished request are ignored. Other requests go on unchanged.
        Raise InvalidRequestError for anything else.
        """
        for request_id in as_request_ids(request_ids):
            request = self.requests.get(request_id)
            if request is not None:
                self.core.abort(request)
                self._forget(request)

    def fork(
        self, request_id: str, n: int = 1, *, sample: int = 0, sample_indices: Sequence[int] | None = None
    ) -> list[int]:
        """Add `n` samples to a request that go on from where its sample `sample` stands; return their sample indices.

        The new samples have the tokens so far and share their pages; from there on they draw by their own indices:
        `sample_indices`, or the lowest free ones. They come among the outputs of the request. Other requests go on,
        but may lose a place to the new samples. Raise InvalidRequestError, changing nothing, if the request or the
        sample has ended or is unknown, is greedy or a beam search, or if so many samples can never fit.
        """
        request, max_seqs = unfinished_request(request_id, self.requests), self.step_sizes.max_num_seqs
        parent, indices = fork_source(request, n, sample=sample, sample_indices=sample_indices, max_num_seqs=max_seqs)
        self.core.fork(parent, indices)
        return indices

    def pin_prefix(self, prompt: Any, *, cache_salt: str | None = None) -> int:
        """Keep the full pages of a prompt in the prefix cache, however rarely used; return the tokens they hold now.

        Pages that are not cached yet are kept once a request has computed them; to compute them now, run the prompt
        with `max_tokens=1`. Other requests have that many pages less. Pinned pages are evicted all the same where a
        request that was accepted could otherwise never run. Raise InvalidRequestError if prefix caching is off, if the
        prompt fills no page, or if an unfinished request could then never end.
        """
        token_ids, key = self._builder.prefix(prompt, cache_salt)
        key = self._versions.key(key)
        self._demand.check_pin(self.prefixes.num_new_pins(token_ids, key), self.scheduler.unfinished)
        return self.prefixes.pin(token_ids, key)

    def unpin_prefix(self, prompt: Any, *, cache_salt: str | None = None) -> None:
        """Undo one `pin_prefix` of the same prompt and salt. Raise InvalidRequestError if it is not pinned."""
        token_ids, key = self._builder.prefix(prompt, cache_salt)
        if not self.prefixes.unpin(token_ids, self._versions.key(key)):
            raise refusal("prompt", "a prompt that is not pinned", "one that pin_prefix has taken")

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Running requests keep their pages; pins hold for pages computed from now on."""
        self.prefixes.reset()

    def stats(self) -> dict[str, float | int]:
        """Return counters since the start (steps, tokens, hits, preemptions, compilations) and present sizes.

        Names with `blocks` count pages; `*_bytes` are bytes and `*_seconds` seconds.
        """
        return {
            **self.core.stats(),
            "prompt_tokens": self._num_prompt_tokens,
            "requests": len(self.requests),
            "end_tokens": len(self.handle.eos_token_ids),
            **self.scheduler.stats(),
            **self.blocks.stats(),
            "swap_bytes": self.runner.swap_bytes,
            **self.plan.stats(),
        }

    def shutdown(self) -> None:
        """Abort all requests and free the device's memory; further calls do nothing. The engine cannot start again."""
        if self._is_open:
            self._is_open = False
            self.abort_request(list(self.requests))
            self.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    # The step

    def _advance(self) -> list[Request]:
        """Compute one step; return the requests that got a token or ended."""
        self._check_open()
        if self.scheduler.has_unfinished or not self._sleep.missing:
            self._check_ready("step")
            self._unread += self._compute(self._max_in_flight)
        sampled, self._unread = self._unread, []
        return self._publish(sampled)

    def _compute(self, max_in_flight: int) -> list[SampleSequence]:
        """Start steps until so many are in flight, and read the oldest one; return the sequences that got a token."""
        core = self.core
        self._is_computing = True
        try:
            core.prepare()
            with self.plan.serving(), jax.transfer_guard("allow"):  # Callers may guard code of their own.
                core.drop_finished()
                # A CPU that compiles is slow at steps, and the next step may have to wait for its executable.
                is_compiling = self.device.platform == "cpu" and self.plan.is_compiling
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

    def _drain(self, in_flight: str) -> None:
        """Leave no step in flight, and do with unfinished requests what `research.weight_updates.IN_FLIGHT` says.

        In an engine that sleeps, all but "abort" mean "recompute". What requests have got is returned by the next
        `step`.
        """
        self._read_all()
        if in_flight == "abort":
            for request in list(self.scheduler.unfinished):
                self.core.abort(request)
        elif in_flight == "recompute" or self._sleep.missing:
            self.core.restart()
        elif in_flight == "wait":
            self._finish_those_that_have_begun()

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

    def _advance_or_fail(self, on_error: str) -> list[Request]:
        """Advance; with `on_error="return"` an exception that has ended all requests is left to their outputs."""
        try:
            return self._advance()
        except Exception:
            if on_error == "raise" or self.scheduler.has_unfinished:
                raise
            return []  # The next step publishes the requests that have ended.

    def _check_request(
        self, request_id: str, prompt: Any, params: Any, *, number: int | None = None, **options: Any
    ) -> CheckedRequest:
        """Check what a request is made of, and that it can ever run; count it unless it has a number of its own."""
        is_counted = number is None
        number = self._num_requests if is_counted else number
        checked = self._builder.check(request_id, prompt, params, number=number, **options)
        checked = replace(checked, policy_key=self._make_request(checked).policy_key)
        self._num_requests += is_counted
        return checked

    def _make_request(self, checked: CheckedRequest) -> Request:
        """Return a request that is not queued. Raise InvalidRequestError if it can never fit."""
        request = self._builder.make(checked)
        self.scheduler.check(request)
        return request

    def _queue(self, request: Request) -> Request:
        self._check_open()
        self._versions.tag(request)
        self.core.add(request)
        self.requests[request.request_id] = request
        self._num_prompt_tokens += request.prompt_len
        return request

    def _check_ready(self, call: str) -> None:
        """Refuse a call of an engine that was shut down, from inside of a step, or that needs what sleep took."""
        self._check_open()
        self._check_outside(call)
        if self._sleep.missing:
            got = f"an engine that sleeps, without {' and '.join(self._sleep.missing)}"
            raise refusal(call, got, "one that is awake", self._sleep.way_out, error=ConfigError)

    def _check_outside(self, call: str) -> None:
        """Refuse a call from inside of a step, as from a scheduling policy; ConfigError."""
        if self._is_computing:
            raise refusal(call, "a call from inside of a step", "calls between steps", error=ConfigError)

    def _check_open(self) -> None:
        if not self._is_open:
            raise RuntimeError("this engine was shut down; make a new one")

    def _output_of(self, request: Request) -> RequestOutput | None:
        """Return what the caller of a request gets now; if that cannot be made, end the request with an error."""
        try:
            return self._outputs.output_of(request)
        except Exception as exception:  # Whatever one request does to its output, the others go on.
            self.core.fail(request, OUTPUT_FAILED, cause=exception)
            self._forget(request)
            return error_output(request.request_id, request.prompt, request.error or OUTPUT_FAILED)

    def _forget(self, request: Request) -> None:
        """Drop a request that has ended: its id is free, and no step returns it any more."""
        if self.requests.get(request.request_id) is request:
            del self.requests[request.request_id]
        self.scheduler.ended.pop(request, None)
