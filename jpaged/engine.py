"""The engine: requests in, steps through scheduler and runner, outputs out. `_advance` is the whole flow."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice
from numbers import Integral, Real
from types import TracebackType
from typing import Any

import jax
import numpy as np

from .assembly import EngineParts, Progress, assemble
from .beam_search import BeamSearch
from .config import EngineConfig
from .errors import ConfigError, InvalidRequestError, QueueFullError
from .opening import OpenedModel, open_for_engine
from .outputs import CompletionOutput, RequestMetrics, RequestOutput
from .prefix_hash import CacheKey
from .prompts import EncodedPrompt, PromptEncoder, check_priority
from .request import Request, make_request
from .sampling_params import BeamSearchParams, SampleMode, SamplingParams, is_integer, shown
from .sizing import Demand

logger = logging.getLogger("jpaged")

Params = SamplingParams | BeamSearchParams
MAX_FAILED_STEPS = 3
"""Without a token between them. Then those that ran are tried one by one; if so many fail alone, nothing works."""
MAX_SAMPLE_INDEX = (1 << 31) - 1
"""Sample indices travel as int32."""


class Engine:
    """One model behind a paged cache. Offline: `generate`, `chat`. Step by step: `add_request`, `step`.

    `Engine("smollm2-135m", max_num_seqs=8)`: a model's name or directory, and any option of `EngineConfig`.
    Raises ConfigError or ModelLoadError before anything large is allocated. Not thread-safe. A context
    manager; `shutdown` gives the device's memory back.
    """

    def __init__(self, model: str | None = None, **options: Any):
        config = EngineConfig(**options) if model is None else EngineConfig(model=model, **options)
        self._start(assemble(config, open_for_engine(config)))

    @classmethod
    def from_engine_args(
        cls,
        config: EngineConfig,
        opened: OpenedModel | None = None,
        *,
        demands: Sequence[Demand] = (),
        modes: Collection[SampleMode] = (),
        progress: Progress | None = None,
    ) -> Engine:
        """An engine from checked options, and from a model that was opened before.

        `demands` and `modes` are the requests that will come, if all are known: no larger pool is taken than
        they need, and what they need first is compiled while the weights are read.
        """
        engine = cls.__new__(cls)
        opened = opened or open_for_engine(config)
        engine._start(assemble(config, opened, demands=demands, modes=modes, progress=progress))
        return engine

    def _start(self, parts: EngineParts) -> None:
        self.config, self.opened, self.sizes = parts.config, parts.opened, parts.sizes
        self.tokenizer = parts.opened.tokenizer
        self.device, self.backend = parts.device, parts.backend
        self.core, self.runner = parts.core, parts.runner
        self.scheduler, self.blocks = self.core.scheduler, self.core.scheduler.blocks
        self.load_seconds = parts.load_seconds
        self.prompts = PromptEncoder(
            self.tokenizer,
            parts.rule_book,
            self.sizes.max_model_len,
            max_waiting_tokens=self.config.limits["waiting_tokens"],
            eos_token_ids=self.opened.eos_token_ids,
        )
        self.requests: dict[str, Request] = {}
        self._num_requests = self._num_prompt_tokens = 0
        self._depth = 2 if self.config.async_scheduling else 1
        self._num_failed_steps = self._num_failed_alone = self._num_generated_before = 0
        self._suspects: deque[Request] = deque()
        """Of steps that failed: each is to draw a token alone, the first one now."""
        self._is_open = True

    # Offline

    def generate(
        self,
        prompts: Any,
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of them; outputs come in the order of the prompts.

        A prompt is a text, a list (or array) of token ids, or a mapping with `prompt`, `prompt_token_ids` or
        `messages`, and with `cache_salt` or `priority` beside it. Without `sampling_params` the model's own
        defaults hold. `priority`, one for all or one for each, goes before that of a mapping. A bad prompt raises
        InvalidRequestError naming its index before anything is computed; `on_error="return"` gives it an output
        with finish_reason "error" instead.
        """
        if on_error not in ("raise", "return"):
            raise ConfigError(f"on_error: got {on_error!r}, allowed: raise, return")
        if self.requests:
            raise ConfigError(
                f"generate: got an engine with {len(self.requests)} unfinished requests of add_request, allowed: none; "
                "step() them to their end or abort them first"
            )
        prompts = _as_prompts(prompts)
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        each_params = _each(sampling_params, len(prompts), "sampling_params", Params, "SamplingParams")
        each_priority = _each(priority, len(prompts), "priority", Integral | None, "an integer")
        results: list[RequestOutput | None] = [None] * len(prompts)
        requests: deque[Request] = deque()
        index_of: dict[str, int] = {}
        num_before = self._num_requests
        for index, (prompt, params, urgency) in enumerate(zip(prompts, each_params, each_priority, strict=True)):
            request_id = f"generate-{self._num_requests}"
            try:
                requests.append(self._new_request(request_id, prompt, params, priority=urgency))
                index_of[request_id] = index
            except InvalidRequestError as error:
                if on_error == "raise":
                    self._num_requests = num_before  # Later requests draw as if this call had never been.
                    raise InvalidRequestError(f"prompt {index}: {error}", param=error.param) from error
                self._num_requests += 1  # The others draw as they would beside a good one.
                results[index] = error_output(request_id, prompt, str(error))
        with _bar(len(requests), use_tqdm) as update:
            for output in self.run_until_done(requests):
                results[index_of[output.request_id]] = output
                update()
        return [result for result in results if result is not None]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of {"role", "content"}, or a list of conversations; else as `generate`."""
        if isinstance(messages, Mapping | str) or not isinstance(messages, Sequence) or not messages:
            raise InvalidRequestError(
                f"messages: got {shown(messages)}, allowed: a list of {{role, content}}, or a list of such lists",
                param="messages",
            )
        conversations = [messages] if isinstance(messages[0], Mapping) else list(messages)
        prompts = [{"messages": one} for one in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority, on_error=on_error)

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Search each prompt's most likely continuations; of each the `beam_width` best come back, the best first.

        `cumulative_logprob` is the sum over a beam's tokens. The search needs the logprobs of `beam_width` +
        number of EOS tokens of each row, which the engine's `max_logprobs` must allow. Else as `generate`.
        """
        prompts = _as_prompts(prompts)
        each = _each(params, len(prompts), "params", BeamSearchParams, "BeamSearchParams")
        if not all(isinstance(one, BeamSearchParams) for one in each):
            raise InvalidRequestError(
                f"params: got {shown(params)}, allowed: BeamSearchParams or a list of them", param="params"
            )
        return self.generate(prompts, each, use_tqdm=use_tqdm, priority=priority, on_error=on_error)

    def default_sampling_params(self) -> SamplingParams:
        """What the model's makers recommend, to the end of the context."""
        return SamplingParams(**{"max_tokens": None, **self.opened.sampling_defaults})

    # Step by step

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
        """Queue a request. InvalidRequestError if it is wrong, can never fit, or its id is in use; QueueFullError
        if as many wait as the engine's limits allow.

        `priority` goes before that of the prompt's mapping; lower is sooner. `number` stands in for the count of
        requests so far in the seed of a request without one, so that a resumed job draws as the first did.
        `arrival_time`, in seconds of time.monotonic(), is where its metrics and `scheduling_delay_factor` count
        from; equally urgent requests go in the order of their calls.
        """
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(
                f"request_id: got {shown(request_id)}, allowed: a non-empty string", param="request_id"
            )
        now = time.monotonic()
        is_number = isinstance(arrival_time, Real) and not isinstance(arrival_time, bool)
        if arrival_time is not None and not (is_number and -math.inf < arrival_time <= now):
            raise InvalidRequestError(
                f"arrival_time: got {shown(arrival_time)}, allowed: seconds of time.monotonic(), at most now, "
                f"{now:.3f}; leave it out to take the present",
                param="arrival_time",
            )
        if number is not None and not (is_integer(number) and number >= 0):
            raise InvalidRequestError(f"number: got {shown(number)}, allowed: an integer ≥ 0", param="number")
        if request_id in self.requests:
            raise InvalidRequestError(
                f"request_id: {request_id!r} is in use; allowed: an id that no unfinished request has",
                param="request_id",
            )
        if params is None:
            params = self.default_sampling_params()
        arrival_time = None if arrival_time is None else float(arrival_time)
        request = self._new_request(
            request_id, prompt, params, priority=priority, number=number, arrival_time=arrival_time
        )
        self._queue(request)

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns the outputs of every request that it brought a token or an end, each as its
        `output_kind` wants it.

        A step that fails costs nobody a token: what was live is computed anew by the next ones. If several fail in a
        row, requests are tried one by one, and who fails alone ends with an error; if several of these do so, all end,
        and the exception is raised.
        """
        outputs = [self._output_of(request) for request in self._advance()]
        return [output for output in outputs if output is not None]

    def run_until_done(self, requests: Iterable[Request] = ()) -> Iterator[RequestOutput]:
        """Step until nothing is left, giving each request's output when it ends. Aborts all if that is cut short.

        `requests`, which have been checked, are queued as soon as the queue has room for them, in the order of the
        scheduling policy.
        """
        held = deque(sorted(requests, key=lambda request: request.policy_key))
        try:
            while held or self.has_unfinished_requests():
                self._queue_while_there_is_room(held)
                for request in self._advance():
                    if request.state.is_finished and (output := self._output_of(request)) is not None:
                        yield output
        finally:
            self.abort_request(list(self.requests))

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests and free what they hold; they give no further output. Ids that are not live are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        ids = list(ids) if isinstance(ids, Iterable) else [ids]
        if not all(isinstance(request_id, str) for request_id in ids):
            raise InvalidRequestError(
                f"request_ids: got {shown(request_ids)}, allowed: a string or a list of strings", param="request_ids"
            )
        for request_id in ids:
            request = self.requests.pop(request_id, None)
            if request is not None:
                self.core.abort(request)
                self.scheduler.ended.pop(request, None)

    def fork(
        self, request_id: str, n: int = 1, *, sample: int = 0, sample_indices: Sequence[int] | None = None
    ) -> list[int]:
        """Let a request go on in `n` more ways from where its sample `sample` stands; returns their sample indices.

        The new samples have the tokens so far, share their pages, and draw with their own indices from there on:
        `sample_indices`, or the lowest free ones. They come among the request's outputs. InvalidRequestError,
        changing nothing, for a request or a sample that is not running or waiting, or if so many can never fit.
        """
        request = self.requests.get(request_id) if isinstance(request_id, str) else None
        if request is None:
            raise InvalidRequestError(
                f"request_id: got {shown(request_id)}, allowed: an unfinished request; fork before it ends",
                param="request_id",
            )
        if request.beams is not None:
            raise InvalidRequestError("request_id: got a beam search, whose samples are its beams", param="request_id")
        parent = next((one for one in request.live if one.index == sample), None)
        if parent is None:
            raise InvalidRequestError(
                f"sample: got {shown(sample)}, allowed: one of those that go on, {[one.index for one in request.live]}",
                param="sample",
            )
        if request.params.is_greedy:
            raise InvalidRequestError(
                "temperature: got a greedy request, whose samples would all be equal; fork one with temperature > 0",
                param="temperature",
            )
        room = self.sizes.max_num_seqs - len(request.live)
        if not is_integer(n) or not 1 <= n <= room:
            raise InvalidRequestError(
                f"n: got {shown(n)}, allowed: {f'an integer in [1, {room}]' if room else 'none'}, what max_num_seqs, "
                f"{self.sizes.max_num_seqs}, leaves beside {len(request.live)} samples that go on; fork fewer, or "
                "start the engine with a larger max_num_seqs",
                param="n",
            )
        taken = {one.index for one in request.sequences}
        if sample_indices is None:
            sample_indices = list(islice((index for index in count() if index not in taken), n))
        if isinstance(sample_indices, str) or not isinstance(sample_indices, Sequence):
            raise InvalidRequestError(
                f"sample_indices: got {shown(sample_indices)}, allowed: a list of integers", param="sample_indices"
            )
        indices = list(sample_indices)
        is_valid = all(is_integer(index) and 0 <= index <= MAX_SAMPLE_INDEX for index in indices)
        if not is_valid or len(indices) != n or len(taken.union(indices)) != len(taken) + n:
            raise InvalidRequestError(
                f"sample_indices: got {shown(indices)}, allowed: n, {n}, different integers ≥ 0 that the request does "
                f"not have yet; it has {sorted(taken)}",
                param="sample_indices",
            )
        self.core.fork(parent, indices)
        return indices

    def pin_prefix(self, prompt: Any, *, cache_salt: str | None = None) -> int:
        """Keep the full pages of this prompt in the prefix cache, however little it is used; returns tokens kept now.

        Pages that are not cached now are kept as soon as a request has computed them; to have them at once, run
        the prompt with max_tokens=1. Pinned pages are lost to other requests, but give way where one that was
        taken could otherwise never run. InvalidRequestError if prefix caching is off, if the prompt fills no page,
        or if an unfinished request could then never end.
        """
        token_ids, key = self._prefix(prompt, cache_salt)
        num_pages = self.blocks.prefixes.num_new_pins(token_ids, key)
        needed = max((self.scheduler.demand.most_pages(request) for request in self.requests.values()), default=1)
        num_available = self.blocks.num_available
        if num_pages + needed > num_available:
            raise InvalidRequestError(
                f"prompt: got one whose pin takes {num_pages} pages, allowed: {max(0, num_available - needed)}, since "
                f"{needed} of {num_available} must be left for requests; pin less, or start the engine with more "
                "num_blocks",
                param="prompt",
            )
        return self.blocks.prefixes.pin(token_ids, key)

    def unpin_prefix(self, prompt: Any, *, cache_salt: str | None = None) -> None:
        """Undo one `pin_prefix` of the same prompt. InvalidRequestError if it is not pinned."""
        if not self.blocks.prefixes.unpin(*self._prefix(prompt, cache_salt)):
            raise InvalidRequestError("prompt: got one that is not pinned, allowed: one that is", param="prompt")

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep their pages, pins hold for what is computed anew."""
        self.blocks.prefixes.reset()

    def stats(self) -> dict[str, float | int]:
        """Counters since start: steps, tokens, pages, cache hits, preemptions, compilations."""
        core, scheduler, store, plan = self.core, self.scheduler, self.blocks.store, self.runner.plan
        num_recomputed, num_swapped = (scheduler.counts[f"preemptions_{mode}"] for mode in ("recompute", "swap"))
        return {
            "steps": core.num_steps,
            "prompt_tokens": self._num_prompt_tokens,
            "generation_tokens": core.num_generated,
            "step_tokens": core.num_step_tokens,
            "padded_tokens": core.num_padded_tokens,
            "prefill_chunks": scheduler.counts["prefill_chunks"],
            "preemptions": num_recomputed + num_swapped,
            "preemptions_recompute": num_recomputed,
            "preemptions_swap": num_swapped,
            "swap_bytes": self.runner.swap_bytes,
            "copies": store.counts["copy_on_write"],
            "prefix_cache_queries": self.blocks.prefixes.num_queried_tokens,
            "prefix_cache_hits": self.blocks.prefixes.num_hit_tokens,
            "blocks": store.device.num_usable,
            "blocks_used": store.device.num_used,
            "peak_blocks_used": store.device.peak_used,
            "host_blocks": store.host.num_usable,
            "host_blocks_used": store.host.num_used,
            "peak_host_blocks_used": store.host.peak_used,
            "evictions": store.counts["eviction"],
            "come_backs": store.counts["come_back"],
            "requests": len(self.requests),
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.waiting),
            "requests_swapped": len(scheduler.swapped),
            "executables": plan.num_compiled,
            "planned_executables": len(plan.programs),
            "compile_seconds": plan.waited_seconds,
            "recompiles": plan.num_outside,
            "padding_share": 1 - core.num_step_tokens / core.num_padded_tokens if core.num_padded_tokens else 0.0,
        }

    def shutdown(self) -> None:
        """Abort what is left and free the device. Idempotent."""
        if self._is_open:
            self._is_open = False
            self.abort_request(list(self.requests))
            self.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # The flow

    def _advance(self) -> list[Request]:
        """One step, through the core. Returns the requests that changed for their caller."""
        self._check_open()
        self._choose_suspect()
        try:
            with self.runner.plan.serving():
                self.core.drop()
                # The step after the one that is read is under way before that is read; but not, on a CPU, while
                # executables are being compiled: it may have to wait for one, and all share the cores.
                is_busy = self.device.platform == "cpu" and self.runner.plan.is_compiling
                depth = 1 if is_busy else self._depth
                while len(self.core.in_flight) < depth and not self.core.dispatch().is_empty:
                    pass
                samples = self.core.retire() if self.core.in_flight else []
                self.runner.plan.start_rest()
                self.core.drop()
            self._note_step()
        except BaseException as error:
            # The device state may be half written, or gone with a donation.
            running = list(self.scheduler.running)
            self._start_anew()
            if not isinstance(error, Exception):
                raise
            self._note_failed_step(error, running)
            samples = []
        now = time.monotonic()
        # Not those that have ended, or were aborted, since the step was started.
        changed = {s.request: None for s in samples if self.requests.get(s.request.request_id) is s.request}
        for request in changed:
            request.last_token_time = now if request.finished_time is None else request.finished_time
        # Those that ended in a step that failed later are told of now.
        for request in list(self.scheduler.ended):
            if self.requests.get(request.request_id) is request:
                changed[request] = None
                del self.requests[request.request_id]
            del self.scheduler.ended[request]
        return list(changed)

    def _start_anew(self) -> None:
        """Live requests compute all of theirs once more."""
        self.core.restart()
        self.runner.reset()

    def _choose_suspect(self) -> None:
        """Let the next suspect that has not ended be alone; after the last one everybody runs again."""
        while self._suspects and self._suspects[0].state.is_finished:
            self._suspects.popleft()
        self.scheduler.admission.alone = self._suspects[0] if self._suspects else None

    def _note_step(self) -> None:
        """A step is done. A suspect that drew a token in it gives its place to the next one."""
        if self._suspects and self._has_drawn():
            self._suspects.popleft()
            self._start_anew()

    def _note_failed_step(self, error: Exception, running: list[Request]) -> None:
        """Go on with the next step. Where steps fail that bring no token between them, those that ran are tried one by
        one, and who fails alone ends by it; if as many of them do so, nothing works: all end, and `error` is raised.
        """
        logger.error("a step failed; its requests are computed anew", exc_info=error)
        self._has_drawn()
        self._num_failed_steps += 1
        message = f"internal error while its steps were computed: {type(error).__name__}"
        if self._suspects:
            self._num_failed_alone += 1
            self.core.fail(self._suspects[0], message)
        elif self._num_failed_steps >= MAX_FAILED_STEPS:
            self._suspects.extend(running)
        is_hopeless = self._num_failed_steps >= MAX_FAILED_STEPS and not self._suspects
        if is_hopeless or self._num_failed_alone == MAX_FAILED_STEPS:
            self._suspects.clear()
            self._num_failed_steps = self._num_failed_alone = 0
            for request in list(self.scheduler.unfinished):
                self.core.fail(request, message)
            raise error

    def _has_drawn(self) -> bool:
        """Whether there are more tokens than when this was asked before; failures until then do not count any more."""
        before, self._num_generated_before = self._num_generated_before, self.core.num_generated
        if is_more := self.core.num_generated > before:
            self._num_failed_steps = self._num_failed_alone = 0
        return is_more

    def _output_of(self, request: Request) -> RequestOutput | None:
        """What the caller of a request is shown now; if that cannot be made, its error."""
        try:
            return self.core.outputs.output_of(request)
        except Exception as exception:  # Whatever one request does to its output, the others go on.
            self.core.fail_by(request, exception)
            self.requests.pop(request.request_id, None)
            self.scheduler.ended.pop(request, None)
            return error_output(request.request_id, request.prompt, request.error or "")

    def _check_open(self) -> None:
        if not self._is_open:
            raise RuntimeError("this engine was shut down; make a new one")

    def enqueue(self, request_id: str, encoded: EncodedPrompt, params: Params, *, number: int) -> Request:
        """Queue a request whose prompt and parameters have been checked against this engine's model.

        InvalidRequestError if it can never fit, QueueFullError if it cannot be queued now.
        """
        return self._queue(self._make_request(request_id, encoded, params, number=number))

    def _new_request(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        *,
        priority: int | None = None,
        number: int | None = None,
        arrival_time: float | None = None,
    ) -> Request:
        """A request with everything about it checked, and not yet queued. InvalidRequestError."""
        if not isinstance(params, Params):
            raise InvalidRequestError(
                f"sampling_params: got {type(params).__name__}, allowed: SamplingParams, BeamSearchParams",
                param="sampling_params",
            )
        self.prompts.check_params(params, max_logprobs=self.config.max_logprobs, max_num_seqs=self.sizes.max_num_seqs)
        encoded = self.prompts.encode(prompt)
        priority = encoded.priority if priority is None else priority
        encoded = replace(encoded, priority=check_priority(priority, self.config.scheduling_policy))
        request = self._make_request(
            request_id,
            encoded,
            params,
            number=self._num_requests if number is None else number,
            arrival_time=arrival_time,
        )
        self.scheduler.check(request)
        self._num_requests += number is None
        return request

    def _make_request(
        self,
        request_id: str,
        encoded: EncodedPrompt,
        params: Params,
        *,
        number: int,
        arrival_time: float | None = None,
    ) -> Request:
        room = self.sizes.max_model_len - len(encoded.token_ids)
        max_tokens = min(room, params.max_tokens or room)
        beams = None
        if isinstance(params, BeamSearchParams):
            beams = BeamSearch(params, params.end_ids(self.opened.eos_token_ids), max_tokens)
            params = params.as_samples(beams.num_of_beam)
        return make_request(
            request_id=request_id,
            number=number,
            prompt_token_ids=encoded.token_ids,
            params=params,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            max_tokens=max_tokens,
            engine_seed=self.config.seed,
            num_groups=self.blocks.num_groups,
            prompt=encoded.text,
            priority=encoded.priority,
            cache_key=CacheKey(cache_salt=encoded.cache_salt),
            bad_words=self.prompts.bad_words(params),
            beams=beams,
        )

    def _queue(self, request: Request) -> Request:
        self._check_open()
        self.core.add(request)
        self.requests[request.request_id] = request
        self._num_prompt_tokens += request.prompt_len
        return request

    def _queue_while_there_is_room(self, held: deque[Request]) -> None:
        while held:
            try:
                self._queue(held[0])
            except QueueFullError:
                if not self.requests:
                    raise
                return
            held.popleft()

    def _prefix(self, prompt: Any, cache_salt: str | None) -> tuple[list[int], CacheKey]:
        """What a pin is about, checked."""
        if not self.config.enable_prefix_caching:
            raise InvalidRequestError(
                "prompt: got one to pin while enable_prefix_caching is off; start the engine with it on", param="prompt"
            )
        if cache_salt is not None:
            prompt = {**(prompt if isinstance(prompt, Mapping) else _as_mapping(prompt)), "cache_salt": cache_salt}
        encoded = self.prompts.encode(prompt)
        if len(encoded.token_ids) < self.blocks.block_size:
            raise InvalidRequestError(
                f"prompt: got {len(encoded.token_ids)} tokens, allowed: {self.blocks.block_size} at least, a full page",
                param="prompt",
            )
        return encoded.token_ids, CacheKey(cache_salt=encoded.cache_salt)


def error_output(request_id: str, prompt: Any, message: str) -> RequestOutput:
    """The output of a request that never reached the engine."""
    now = time.monotonic()
    return RequestOutput(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=(),
        outputs=(CompletionOutput(index=0, text="", token_ids=(), finish_reason="error"),),
        finished=True,
        metrics=RequestMetrics(now, None, None, None, now, None, 0, 0, 0),
        num_cached_tokens=0,
        error=message,
    )


def _each(values: Any, count: int, name: str, kind: Any, kind_name: str) -> list[Any]:
    """One value for all prompts, or a list of one for each."""
    if isinstance(values, kind):
        return [values] * count
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise InvalidRequestError(f"{name}: got {shown(values)}, allowed: {kind_name} or a list of them", param=name)
    if len(values) != count:
        raise InvalidRequestError(
            f"{name}: got {len(values)} for {count} prompts, allowed: one for all or one for each", param=name
        )
    return list(values)


def _as_mapping(prompt: Any) -> dict[str, Any]:
    return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}


def _as_prompts(prompts: Any) -> list[Any]:
    """One prompt or many: a text, a mapping, ids or an array of ids is one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, jax.Array | np.ndarray):
        return list(prompts) if prompts.ndim == 2 else [prompts]
    if isinstance(prompts, bytes | bytearray | memoryview) or not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts: got {type(prompts).__name__}, allowed: a prompt or a list of prompts", param="prompts"
        )
    if not prompts:
        return []
    return [list(prompts)] if is_integer(prompts[0]) else list(prompts)


@contextmanager
def _bar(total: int, use_tqdm: bool) -> Iterator[Callable[[], None]]:
    """A progress bar over requests on a terminal."""
    if not use_tqdm:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc="requests", unit="req", disable=None) as bar:
        yield lambda: bar.update(1) and None
