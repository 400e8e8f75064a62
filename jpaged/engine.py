"""The engine: requests in, steps through scheduler and runner, outputs out. `_advance` is the whole flow."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import jax
import numpy as np

from .assembly import NUM_GROUPS, EngineParts, Progress, assemble
from .config import EngineConfig
from .errors import ConfigError, InvalidRequestError
from .opening import OpenedModel, open_for_engine
from .output_processor import OutputProcessor
from .outputs import CompletionOutput, RequestMetrics, RequestOutput
from .prompts import EncodedPrompt, PromptEncoder
from .request import Request, RequestState, make_request
from .sampler import SampledRows, SampleMode
from .sampling_params import SamplingParams, is_integer, shown
from .scheduler import SchedulerOutput
from .sizing import Demand
from .step_inputs import BuiltStep

logger = logging.getLogger("jpaged")


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
        self.blocks, self.scheduler = parts.scheduler.blocks, parts.scheduler
        self.builder, self.runner = parts.builder, parts.runner
        self.load_seconds = parts.load_seconds
        self.prompts = PromptEncoder(self.tokenizer, self.opened.config.vocab_size, self.sizes.max_model_len)
        self.outputs = OutputProcessor(self.tokenizer, eos_token_ids=self.opened.eos_token_ids)
        self.requests: dict[str, Request] = {}
        self._num_requests = 0
        self._counts = {"steps": 0, "prompt_tokens": 0, "generation_tokens": 0, "step_tokens": 0, "padded_tokens": 0}
        self._is_open = True

    # Offline

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of them; outputs come in the order of the prompts.

        A prompt is a text, a list (or array) of token ids, or a mapping with `prompt`, `prompt_token_ids` or
        `messages`. Without `sampling_params` the model's own defaults hold. A bad prompt raises
        InvalidRequestError naming its index before anything is computed; `on_error="return"` gives it an
        output with finish_reason "error" instead.
        """
        if on_error not in ("raise", "return"):
            raise ConfigError(f"on_error: got {on_error!r}, allowed: raise, return")
        if self.requests:
            raise ConfigError(
                f"generate: got an engine with {len(self.requests)} unfinished requests of add_request, allowed: none; "
                "step() them to their end or abort them first"
            )
        prompts = _as_prompts(prompts)
        if isinstance(sampling_params, SamplingParams) or sampling_params is None:
            each: list[SamplingParams] = [sampling_params or self.default_sampling_params()] * len(prompts)
        else:
            if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str):
                raise InvalidRequestError(
                    f"sampling_params: got {shown(sampling_params)}, allowed: SamplingParams or a list of them",
                    param="sampling_params",
                )
            each = list(sampling_params)
        if len(each) != len(prompts):
            raise InvalidRequestError(
                f"sampling_params: got {len(each)} for {len(prompts)} prompts, allowed: one for all or one for each",
                param="sampling_params",
            )
        results: list[RequestOutput | None] = [None] * len(prompts)
        checked: list[EncodedPrompt | None] = []
        for index, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
            try:
                checked.append(self._check(prompt, params))
            except InvalidRequestError as error:
                if on_error == "raise":
                    raise InvalidRequestError(f"prompt {index}: {error}", param=error.param) from error
                checked.append(None)
                results[index] = error_output(str(index), prompt, str(error))
        index_of: dict[str, int] = {}
        for index, (encoded, params) in enumerate(zip(checked, each, strict=True)):
            number = self._num_requests
            self._num_requests += 1
            if encoded is not None:
                index_of[self.enqueue(f"generate-{number}", encoded, params, number=number).request_id] = index
        with _bar(len(index_of), use_tqdm) as update:
            for output in self.run_until_done():
                results[index_of[output.request_id]] = output
                update()
        return [result for result in results if result is not None]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of {"role", "content"}, or a list of conversations."""
        if isinstance(messages, Mapping) or not isinstance(messages, Sequence) or not messages:
            raise InvalidRequestError(
                f"messages: got {shown(messages)}, allowed: a list of {{role, content}}, or a list of such lists",
                param="messages",
            )
        conversations = [messages] if isinstance(messages[0], Mapping) else list(messages)
        return self.generate([{"messages": one} for one in conversations], sampling_params, use_tqdm=use_tqdm)

    def default_sampling_params(self) -> SamplingParams:
        """What the model's makers recommend, to the end of the context."""
        return SamplingParams(**{"max_tokens": None, **self.opened.sampling_defaults})

    # Step by step

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        number: int | None = None,
    ) -> None:
        """Queue a request. InvalidRequestError if it is wrong, can never fit, or its id is in use.

        `number` stands in for the count of requests so far in the seed of a request without one, so that a
        resumed job draws as the first did.
        """
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(
                f"request_id: got {shown(request_id)}, allowed: a non-empty string", param="request_id"
            )
        if arrival_time is not None and not isinstance(arrival_time, int | float):
            raise InvalidRequestError(
                f"arrival_time: got {shown(arrival_time)}, allowed: monotonic seconds", param="arrival_time"
            )
        if request_id in self.requests:
            raise InvalidRequestError(
                f"request_id: {request_id!r} is in use; allowed: an id that no unfinished request has",
                param="request_id",
            )
        params = params or self.default_sampling_params()
        encoded = self._check(prompt, params)
        if number is None:
            number = self._num_requests
            self._num_requests += 1
        self.enqueue(request_id, encoded, params, number=number, arrival_time=arrival_time)

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns the outputs so far of every request that it brought a token or an end."""
        return [self.outputs.output_of(request) for request in self._advance()]

    def run_until_done(self) -> Iterator[RequestOutput]:
        """Step until nothing is left, giving each request's output when it ends. Aborts all if that is cut short."""
        try:
            while self.has_unfinished_requests():
                for request in self._advance():
                    if request.state.is_finished:
                        yield self.outputs.output_of(request)
        finally:
            self.abort_request(list(self.requests))

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests and free what they hold; they give no further output. Ids that are not live are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            request = self.requests.pop(request_id, None)
            if request is not None:
                for sequence in request.live_sequences:
                    self.scheduler.finish(sequence, RequestState.FINISHED_ABORTED)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep their pages."""
        self.blocks.reset_prefix_cache()

    def stats(self) -> dict[str, float | int]:
        """Counters since start: steps, tokens, pages, cache hits, preemptions, compilations."""
        plan, blocks, counts = self.runner.plan, self.blocks, self._counts
        return {
            **counts,
            "prefill_chunks": self.scheduler.num_prefill_chunks,
            "preemptions": self.scheduler.num_preemptions,
            "prefix_cache_queries": blocks.num_queried_tokens,
            "prefix_cache_hits": blocks.num_hit_tokens,
            "blocks": blocks.num_usable,
            "blocks_used": blocks.num_used,
            "peak_blocks_used": blocks.peak_used,
            "requests": len(self.requests),
            "executables": plan.num_compiled,
            "planned_executables": len(plan.programs),
            "compile_seconds": plan.waited_seconds,
            "recompiles": plan.num_outside,
            "padding_share": 1 - counts["step_tokens"] / counts["padded_tokens"] if counts["padded_tokens"] else 0.0,
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
        """One step: schedule, build, dispatch, process. Returns the requests that changed for their caller."""
        self._check_open()
        try:
            with self.runner.plan.serving():
                work = self.scheduler.schedule()
                if not work.scheduled:
                    return []
                step = self.builder.build(work.scheduled)
                outputs = self.runner.dispatch(step, sample_mode(s.request.params for s in step.samples))
                return self._process(work, step, outputs.read())
        except BaseException:
            # The device state may be half written, or gone with a donation: live requests compute theirs anew.
            self.scheduler.preempt_all()
            self.runner.reset()
            raise

    def _check_open(self) -> None:
        if not self._is_open:
            raise RuntimeError("this engine was shut down; make a new one")

    def _process(self, work: SchedulerOutput, step: BuiltStep, sampled: SampledRows | None) -> list[Request]:
        """Count the step's tokens as computed, append what it drew, and end what has ended."""
        self._counts["steps"] += 1
        self._counts["step_tokens"] += work.num_tokens
        self._counts["padded_tokens"] += step.layout.num_tokens
        for item in work.scheduled:
            self.scheduler.complete(item)
        now = time.monotonic()
        changed: dict[str, Request] = {}
        for row, sequence in enumerate(step.samples):
            request = sequence.request
            assert sampled is not None, "a step with samples has drawn them"
            try:
                end = self.outputs.append(sequence, sampled, row)
            except Exception as error:  # Whatever one request does to its output, the others go on.
                logger.exception("request %s failed", request.request_id)
                request.error = f"internal error while its output was made: {type(error).__name__}"
                end = RequestState.FINISHED_ERROR
            self._counts["generation_tokens"] += 1
            if request.first_token_time is None:
                request.first_token_time = now
            request.last_token_time = now
            changed[request.request_id] = request
            if end is not None:
                self.scheduler.finish(sequence, end)
                if request.state.is_finished:
                    del self.requests[request.request_id]
        return list(changed.values())

    def _check(self, prompt: Any, params: SamplingParams) -> EncodedPrompt:
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params: got {type(params).__name__}, allowed: SamplingParams", param="sampling_params"
            )
        self.prompts.check_params(params, max_logprobs=self.config.max_logprobs)
        return self.prompts.encode(prompt)

    def enqueue(
        self,
        request_id: str,
        encoded: EncodedPrompt,
        params: SamplingParams,
        *,
        number: int,
        arrival_time: float | None = None,
    ) -> Request:
        """Queue a request whose prompt and parameters have been checked against this engine's model."""
        self._check_open()
        room = self.sizes.max_model_len - len(encoded.token_ids)
        request = make_request(
            request_id=request_id,
            number=number,
            prompt_token_ids=encoded.token_ids,
            params=params,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            max_tokens=min(room, params.max_tokens or room),
            engine_seed=self.config.seed,
            num_groups=NUM_GROUPS,
            prompt=encoded.text,
        )
        for sequence in request.sequences:
            self.outputs.start(sequence)
        self._counts["prompt_tokens"] += len(encoded.token_ids)
        self.requests[request_id] = request
        self.scheduler.add(request)
        return request


def error_output(request_id: str, prompt: Any, message: str) -> RequestOutput:
    """The output of a request that never reached the engine."""
    now = time.monotonic()
    return RequestOutput(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=(),
        outputs=(CompletionOutput(index=0, text="", token_ids=(), finish_reason="error"),),
        finished=True,
        metrics=RequestMetrics(now, None, None, None, now, None, 0, 0),
        num_cached_tokens=0,
        error=message,
    )


def sample_mode(params: Iterable[SamplingParams]) -> SampleMode:
    """The least mode that does what all of these ask for."""
    mode = SampleMode.GREEDY
    for each in params:
        if each.logprobs is not None:
            return SampleMode.LOGPROBS
        if not each.is_greedy:
            mode = SampleMode.FULL
    return mode


def _as_prompts(prompts: Any) -> list[Any]:
    """One prompt or many: a text, a mapping, ids or an array of ids is one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, jax.Array | np.ndarray):
        return list(prompts) if prompts.ndim == 2 else [prompts]
    if not isinstance(prompts, Sequence):
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
