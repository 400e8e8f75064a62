"""The engine: one model behind a paged cache, for offline batches, for research code, and step by step.

This is the face of its parts: a loop that steps, a front that checks requests, and what a trainer uses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

import msgspec

from .checks import refusal, shown
from .config.engine_config import EngineConfig
from .core.batch import BatchRunner
from .core.engine_loop import EngineLoop, StreamSink
from .errors import ConfigError
from .intake.offline import as_conversations, as_prompts, one_for_each
from .intake.request_builder import RequestBuilder, check_new_id
from .messages import NewRequest, Params, ResultForm
from .outputs import EngineSummary, LastOutput, RequestOutput
from .request import Request
from .research.calls import ResearchCalls
from .sampling.sampling_params import BeamSearchParams, SampleMode, SamplingParams
from .startup.build_engine import EngineComponents, Progress, build_engine
from .startup.open_model import ModelHandle, open_model, open_module
from .startup.sizing.sizes import Demand
from .step.jax_settings import refuse_traced
from .text.answers.whole_answer import Answer
from .text.chat.tools import tools_of
from .text.grammar.grammar import Matcher
from .text.parsed_outputs import OutputParser
from .text.prompts import ChatOptions

if TYPE_CHECKING:
    from flax import nnx

    from .models.weights.live_weights import LiveWeights
    from .research.arrays import GenerationArrays
    from .research.trainer import Trainer


class Engine(ResearchCalls):
    """One model behind a paged cache.

    `generate`, `chat` and `beam_search` take a list of prompts and return when all are done. `add_request` and `step`
    serve callers with a loop of their own. Beside a trainer, `update_params` takes its weights, `logprobs` scores
    tokens, and `sleep` gives the device's memory away, as `shutdown` does at the end of a `with`. Threads may share it:
    each step computes the requests of all callers, and other calls wait for the end of another thread's step.
    """

    def __init__(
        self, model: str | nnx.Module | None = None, *, call: str = "__call__", logits: str = "logits", **options: Any
    ):
        """Load a model and get ready to serve it: `Engine("smollm2-135m", max_num_seqs=8)`.

        `model` is the name of a built-in model, a repository of the Hugging Face hub, a directory or a GGUF file; None
        is the default of `EngineConfig`. `options` are the other fields of `EngineConfig`. With `params`, a tree of
        arrays, only the config and the tokenizer come from `model`, and the weights are copies of the arrays. Raise
        ConfigError or ModelLoadError, before anything large is allocated, if an option or the model is wrong.

        `model` may also be an nnx module of your own whose `spec` is a `ModelSpec` (docs/research.md), whose methods
        `call` and `logits` take (inputs, cache) and hidden states. The weights are then copies of the module's arrays,
        or of `params`, a tree under the paths of the module's state. Without `compilation_cache_dir`, JAX's
        configuration is then unchanged and executables are not kept for later runs.
        """
        refuse_traced("Engine")
        if not isinstance(model, str | None) and _is_module(model):
            config = EngineConfig(model=type(model).__name__, **options)
            self._start(build_engine(config, open_module(config, model, call=call, head=logits)))
            return
        if (call, logits) != ("__call__", "logits"):
            raise refusal("call, logits", f"{call!r}, {logits!r}", "nothing without a module", error=ConfigError)
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
        keeps_programs: bool = False,
        compiles_behind: bool = False,
    ) -> Self:
        """Return an engine for a validated config. `handle` is its model if that is open already; None opens it.

        `demands` (tokens of each request) and `modes` (kinds of sampling) describe all requests that will come. With
        them the page pool is no larger than these requests need, and the programs that they need first are compiled
        while the weights load. If they are left out, nothing is assumed. `progress(name, done, total)` is called in
        the phases `check`, `load` and `compile`. `keeps_programs` lets a CPU trace step programs once, for this start
        and for later ones: leave it out where functions of jpaged are replaced by others. With `compiles_behind`, as
        servers have it, an engine with `warmup=lazy` is ready with the programs of a plain request, and compiles the
        others behind. Raise ConfigError or ModelLoadError.
        """
        refuse_traced("Engine")
        handle = handle or open_model(config)
        engine = cls.__new__(cls)
        parts = build_engine(
            config,
            handle,
            demands=demands,
            modes=modes,
            progress=progress,
            keeps_programs=keeps_programs,
            compiles_behind=compiles_behind,
        )
        engine._start(parts)
        return engine

    def _start(self, parts: EngineComponents) -> None:
        """Set this engine's attributes from the parts that `build_engine` has made, without requests."""
        self.config, self.handle, self.sizes = parts.config, parts.handle, parts.sizes
        self.step_sizes = parts.sizes.step
        self.tokenizer = parts.handle.tokenizer
        self.device, self.mesh, self.backend = parts.device, parts.mesh, parts.backend
        self.attention, self.experts, self.memory = parts.attention, parts.experts, parts.memory
        self.core, self.runner, self.plan = parts.core, parts.runner, parts.runner.compile_plan
        self.scheduler, self.blocks = parts.core.scheduler, parts.core.scheduler.blocks
        self.load_s = parts.load_s
        self.loop = EngineLoop(parts)
        encoder = self.handle.prompt_encoder(self.config, parts.rules_spec, self.step_sizes.max_model_len)
        self.builder = RequestBuilder(self.config, encoder, self.step_sizes, self.handle.sampling_defaults)
        self._batch = BatchRunner(self.loop, self.builder)
        self._trainer_lock, self._made_trainer = Lock(), None
        self._make_trainer = partial(_trainer_of, self._batch, parts.live)

    @property
    def requests(self) -> Mapping[str, Request]:
        """Return the requests whose last output has not been returned, by their ids."""
        return self.loop.requests

    # Offline

    @overload
    def generate(
        self,
        prompts: Any,
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        on_error: str = "raise",
        return_arrays: Literal[False] = False,
    ) -> list[RequestOutput]:
        """Return one `RequestOutput` per prompt, in order; the last definition below has the contract and the code."""

    @overload
    def generate(
        self,
        prompts: Any,
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        on_error: str = "raise",
        return_arrays: Literal[True],
    ) -> GenerationArrays:
        """Return all samples as arrays; the definition below has the contract and the code."""

    def generate(
        self,
        prompts: Any,
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        on_error: str = "raise",
        return_arrays: bool = False,
    ) -> list[RequestOutput] | GenerationArrays:
        """Complete one prompt or a list of prompts; return one output per prompt, in the order of the prompts.

        A prompt is a text, a list or an array of token ids, or a mapping with one of `prompt`, `prompt_token_ids` and
        `messages`, and optionally `cache_salt` and `priority`. One mapping may hold padded `prompt_token_ids` [B, P]
        and a `mask` or `lengths`. `sampling_params` is one value, or a list with one for each prompt; None is
        `default_sampling_params`. `priority`, likewise, overrides a mapping's: lower is sooner. `use_tqdm` shows a bar.

        With `return_arrays` the result is one `GenerationArrays` of all samples, with the logprobs of the tokens drawn,
        those of the `SamplingParams.logprobs` most likely ones beside each, and without text. A stop string ends a
        sample with the token that completes it, as in outputs, also where text goes on in that token. Parameters that
        ask for beams, for prompt logprobs, or for logprobs of −1, the whole vocabulary, are refused.

        With `on_error="raise"` a bad prompt raises InvalidRequestError with its index before anything is computed, and
        an exception in a step, in the model or in an output is raised unchanged, with a note that names the request.
        With `on_error="return"` such a request gets an output whose `error` is set and whose finish reason is "error",
        the exception is logged, and other requests go on; with `return_arrays` a bad prompt still raises, and failures
        are in the result's `errors`. A request whose logits are NaN or infinite, or whose rules leave no token, gets
        such an output whatever `on_error` is.

        Requests of other threads and of `add_request` are computed beside these. Requests of a call that raises, or is
        interrupted, are aborted.
        """
        refuse_traced("generate")
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        prompts = as_prompts(prompts)
        each = one_for_each(sampling_params, len(prompts), "sampling_params", Params, "SamplingParams")
        options: dict[str, Any] = {"use_tqdm": use_tqdm, "priority": priority, "on_error": on_error}
        if not return_arrays:
            outputs, _ = self._batch.run("generate", prompts, each, **options)
            return list(outputs.values())
        from .research.arrays import for_arrays, generation_arrays

        each = [for_arrays(params) for params in each]
        return generation_arrays(self._batch.run("generate", prompts, each, **options, form=ResultForm.ARRAYS)[1])

    @overload
    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        on_error: str = "raise",
        return_arrays: Literal[False] = False,
        **chat_options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Return one `RequestOutput` per conversation; the last definition below has the contract and the code."""

    @overload
    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        on_error: str = "raise",
        return_arrays: Literal[True],
        **chat_options: Unpack[ChatOptions],
    ) -> GenerationArrays:
        """Return all samples as arrays; the definition below has the contract and the code."""

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        on_error: str = "raise",
        return_arrays: bool = False,
        **chat_options: Unpack[ChatOptions],
    ) -> list[RequestOutput] | GenerationArrays:
        """Answer one conversation or a list of conversations, written out by the model's chat template.

        A conversation is a list of mappings with `role` and `content`. `chat_options` are for each of them: `tools`
        that the model may call, in OpenAI's form, `tool_choice`, `chat_template_kwargs` and the others of
        `ChatOptions`; `parse_answer` finds the calls in an output. The other arguments, the results, their order and
        the errors are those of `generate`.
        """
        prompts = [{**chat_options, "messages": conversation} for conversation in as_conversations(messages)]
        options: dict[str, Any] = {"use_tqdm": use_tqdm, "priority": priority, "on_error": on_error}
        if return_arrays:
            return self.generate(prompts, sampling_params, **options, return_arrays=True)
        return self.generate(prompts, sampling_params, **options)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **chat_options: Unpack[ChatOptions]) -> str:
        """Return the text of a conversation that `chat` gives the model, special tokens included.

        Encode it with `add_special_tokens=False`, or give it as {"prompt": text, "add_special_tokens": False}. Raise
        InvalidRequestError for messages or options that `chat` refuses.
        """
        return self.builder.encoder.render(messages, chat_options)

    def parse_answer(
        self,
        output: RequestOutput,
        *,
        index: int = 0,
        tools: Sequence[Mapping[str, Any]] | None = None,
        skip_special_tokens: bool = True,
    ) -> Answer:
        """Return thoughts, content and tool calls of an answer to a chat: of the output's `index`th sample.

        `tools` are those of the chat: arguments get the types of their schemas, and what calls another tool is content.
        Without them every name is a tool's. `skip_special_tokens` is that of the request's parameters. A call that the
        answer's end has cut has arguments that are JSON too. For a model that marks neither thoughts nor calls all is
        content. Raise InvalidRequestError for wrong arguments, and without a tokenizer.
        """
        known = tools_of(tools, limits=self.config.limits)
        return self.output_parser().answer(output, index, tools=known, skip_special_tokens=skip_special_tokens)

    def output_parser(self) -> OutputParser:
        """Return what reads the outputs of this model; raise InvalidRequestError without a tokenizer."""
        return self.builder.output_parser()

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Search the most likely continuations of each prompt; an output has the best `beam_width` beams, best first.

        `cumulative_logprob` of a beam is the sum over its tokens. A step of a search needs the logprobs of
        `beam_width` + (number of EOS tokens) tokens per beam, which the engine's `max_logprobs` must allow. The other
        arguments, the order of the outputs and the errors are those of `generate`.
        """
        prompts = as_prompts(prompts)
        each = one_for_each(params, len(prompts), "params", BeamSearchParams, "BeamSearchParams")
        if not all(isinstance(one, BeamSearchParams) for one in each):
            raise refusal("params", shown(params), "BeamSearchParams or a list of them")
        return self.generate(prompts, each, use_tqdm=use_tqdm, priority=priority, on_error=on_error)

    def default_sampling_params(self) -> SamplingParams:
        """Return what the model's generation config recommends, with output up to the end of the context."""
        return self.builder.default_params()

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
        """Queue a request; `step` returns its outputs under `request_id`.

        `prompt` has any form that `generate` takes; `params` of None are `default_sampling_params`. `arrival_time` is
        in seconds of `time.monotonic()`, not in the future; None is now. The request's metrics and the wait of
        `scheduling_delay_factor` start there; the order of requests does not depend on it. `priority` overrides that of
        the prompt's mapping. A lower value is served sooner, and equal ones in the order of the calls. If `params` have
        no seed, the seed is made of the engine's seed and of `number`, by default the count of earlier requests. A
        resumed job that gives the numbers of its first run draws the same tokens.

        Raise InvalidRequestError if an argument is wrong, the id belongs to an unfinished request, or the request can
        never fit; QueueFullError if as many requests or tokens wait as the engine's `limits` allow. Nothing is queued
        then.
        """
        refuse_traced("add_request")
        check_new_id(request_id, self.loop.requests)
        options: dict[str, Any] = {"priority": priority, "arrival_time": arrival_time}
        new = self.builder.build(request_id, prompt, params, number=0 if number is None else number, **options)
        # Taken here, since one that has to be compiled would delay the next step.
        grammar = self.core.outputs.grammars.matcher(new.grammar) if new.grammar else None
        self.loop.call("add_request", partial(self._add, new, grammar, is_counted=number is None))

    def _add(self, new: NewRequest, grammar: Matcher | None, *, is_counted: bool) -> None:
        """Queue a request between two steps, where no other thread can take its id or its number.

        `grammar` is a matcher of its grammar, if it has one. If `is_counted` is true, its number is the count of
        requests so far, which then grows by one.
        """
        new = msgspec.structs.replace(new, number=self.builder.num_requests) if is_counted else new
        self.loop.queue(self.loop.make(new, grammar))
        self.builder.num_requests += is_counted

    def step(self) -> list[RequestOutput]:
        """Compute one step; return an output for each request that got a token or ended, by its `output_kind`.

        An exception in a step costs no tokens: the next steps compute again what was lost. If steps fail repeatedly
        without a token between them, requests are computed one at a time, and one that fails alone ends with an
        error. If several fail alone, all unfinished requests end with errors and the exception is raised; the next
        step returns their outputs. An interrupt such as KeyboardInterrupt is raised at once; later calls go on.

        `error` of an output names only the type of the exception; the exception itself is logged.
        """
        return self.loop.step()

    def run_until_done(self, requests: Iterable[Request] = (), *, on_error: str = "raise") -> Iterator[RequestOutput]:
        """Yield the last output of each request, as `run_requests` does, and log the exceptions of failed requests."""
        for request, output in self.run_requests(requests, on_error=on_error):
            self.loop.log_failure(request)
            yield output

    def run_requests(
        self, requests: Iterable[Request | None] = (), *, stream: StreamSink | None = None, on_error: str = "raise"
    ) -> Iterator[tuple[Request, RequestOutput]]:
        """Queue `requests` of `EngineLoop.make`, and step until none is left. See `EngineLoop.run_requests`."""
        return self.loop.run_requests(requests, stream=stream, on_error=on_error)

    def checked_message(self, new: NewRequest) -> NewRequest:
        """Return the message of a request that fits in this engine, for `run_messages`. Raise InvalidRequestError."""
        return self.loop.checked(new)

    def run_messages(
        self, messages: Iterable[NewRequest | None], *, stream: StreamSink | None = None
    ) -> Iterator[LastOutput]:
        """Queue the requests of `checked_message`, and step until none is left. See `EngineLoop.run_messages`."""
        return self.loop.run_messages(messages, stream=stream)

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has outputs to come."""
        return bool(self.loop.inbox.requests or self.loop.unreturned)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests whose last output `step` has not returned."""
        return len(self.loop.inbox.requests) + sum(output.finished for output in self.loop.unreturned)

    def abort_request(self, request_ids: str | Iterable[str], *, sample: int | None = None) -> None:
        """End requests, in any state, and free what they hold; they give no further output.

        `request_ids` is one id or several; ids of no unfinished request are ignored. Other requests go on unchanged. A
        request of `generate` or its like, in another thread, keeps its output there, with the finish reason "abort".

        With `sample` and one id, only the sample with this index ends, by the finish reason "abort". The others go on
        with the same tokens, and the request gives its outputs as before, the last one once all samples have ended. A
        sample that has ended already stays as it is. Raise InvalidRequestError for what is no id, and for a sample that
        the request does not have.
        """
        self.loop.call("abort_request", lambda: self.loop.abort(request_ids, sample))

    def fork(
        self,
        request_id: str,
        n: int | None = None,
        *,
        sample: int = 0,
        sample_indices: Sequence[int] | None = None,
        num_output_tokens: int | None = None,
        first_token_ids: Sequence[int] | None = None,
    ) -> list[int]:
        """Add `n` samples to a request that begin as its sample `sample` does; return their sample indices.

        The new samples start with the first `num_output_tokens` output tokens of `sample`, by default all that it has
        got, and share its pages. `first_token_ids`, one for each of them, are their next tokens, instead of drawn ones;
        each counts as drawn: by penalties, by stop rules, which may end the sample there, and with a logprob, which is
        the model's where `logprobs_mode` is not processed_logprobs (then it is 0: no other token was left). All other
        tokens are drawn as ever, output token t by the request's seed, the sample's index and t. Sample indices are
        `sample_indices`, or the lowest free ones. `n` of None is the number of `first_token_ids`, or 1. Outputs are
        those of the request. The new samples may delay other requests.

        Raise InvalidRequestError, changing nothing, if the request or the sample is unknown or has ended, if the sample
        has fewer output tokens, if a token is outside the vocabulary or one that the request may not draw there (by
        its grammar, `allowed_token_ids`, `bad_words` or `min_tokens`), if the request is a beam search or, without
        `first_token_ids`, greedy, or if so many samples can never fit.
        """
        options: dict[str, Any] = {
            "sample": sample,
            "sample_indices": sample_indices,
            "num_output_tokens": num_output_tokens,
            "first_token_ids": first_token_ids,
        }
        return self.loop.call("fork", partial(self.loop.fork, request_id, n, **options))

    def pin_prefix(self, prompt: Any, *, cache_salt: str | None = None) -> int:
        """Keep the full pages of a prompt in the prefix cache, however rarely used; return the tokens cached so far.

        Pages that are not cached yet are kept once a request has computed them; to compute them now, run the prompt
        with `max_tokens=1`. The pages are not available to other requests, but are evicted where an accepted request
        could otherwise never run. `cache_salt` is that of the requests that share the pages. Raise InvalidRequestError
        if prefix caching is off, if the prompt fills no page, or if an unfinished request could then never end.
        """
        refuse_traced("pin_prefix")
        token_ids, key = self.builder.prefix(prompt, cache_salt)
        return self.loop.call("pin_prefix", lambda: self.loop.pin(token_ids, key))

    def unpin_prefix(self, prompt: Any, *, cache_salt: str | None = None) -> None:
        """Undo one `pin_prefix` of the same prompt and salt. Raise InvalidRequestError if it is not pinned."""
        refuse_traced("unpin_prefix")
        token_ids, key = self.builder.prefix(prompt, cache_salt)
        self.loop.call("unpin_prefix", lambda: self.loop.unpin(token_ids, key))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Running requests keep their pages; pins hold for pages computed from now on."""
        self.loop.call("reset_prefix_cache", self.blocks.prefixes.reset)

    def stats(self) -> dict[str, Any]:
        """Return counters since the start and present sizes; `blocks` count pages, `*_bytes` are bytes.

        With `count_expert_tokens` they have `expert_tokens`, see there.
        """
        stats: dict[str, Any] = {**self.loop.stats(), "end_tokens": len(self.handle.eos_token_ids)}
        if (expert_tokens := self.expert_tokens()) is not None:
            stats["expert_tokens"] = expert_tokens
        return stats

    def summary(self) -> EngineSummary:
        """Return what this engine is, and its `stats`, as plain values."""
        config, sizes = self.handle.config, self.sizes
        return EngineSummary(
            device=f"{self.device.device_kind} ({self.device.platform})",
            dtype=self.step_sizes.dtype,
            kv_cache_dtype=self.step_sizes.kv_cache_dtype,
            mesh=str(config.shares(self.mesh.size)) if self.mesh.size > 1 else "",
            attention=self.attention,
            rope=config.longrope or "",
            experts=self.experts,
            memory=self.memory,
            ends=self.handle.ends,
            load_s=self.load_s,
            block_size=self.step_sizes.block_size,
            page_groups=sizes.arithmetic.in_groups,
            num_host_blocks=max(0, sizes.num_host_blocks - 1),  # One is the null page, which no request uses.
            stats=self.stats(),
        )

    def expert_tokens(self) -> list[list[int]] | None:
        """Return how many tokens have chosen each expert, [layer][expert]; None without `count_expert_tokens`.

        A layer without experts has zeros. Every token that a step has computed counts: those of prompts too and, after
        a preemption by recompute, those that are computed again; tokens of cached prefixes are not computed. Padding
        does not count, nor does a row that one of its four lowest stop tokens has ended; other ends are known only when
        the host reads a step, and the tokens of steps that it has started by then count. This waits for the steps in
        flight. The counts of a step that fails are lost.
        """
        counted = self.runner.expert_tokens
        return None if counted is None else counted.of_all_steps().tolist()

    def expert_tokens_by_layer(self) -> dict[int, list[int]]:
        """Return the `expert_tokens` of the steps that the device is done with, for each layer that has experts.

        This waits for no step that a device still computes. A step that starts meanwhile waits at most while the counts
        of ended steps are copied to the host. Nothing is returned without `count_expert_tokens`.
        """
        if (counted := self.runner.expert_tokens) is None:
            return {}
        by_layer = enumerate(counted.of_ended_steps().tolist())
        return {layer: counts for layer, counts in by_layer if self.handle.decoder.is_sparse(layer)}

    def shutdown(self) -> None:
        """Abort all requests and free the device's memory; further calls do nothing. The engine cannot start again.

        A step of another thread ends first, but for one that waits for a compilation. A compilation that has begun goes
        on behind this call, and the end of the program waits for it.
        """
        if self.loop.is_open:
            self.loop.check_outside("shutdown")
            self.plan.close()
            self.loop.call("shutdown", self.loop.close)
            self.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


def _trainer_of(batch: BatchRunner, live: Callable[[], LiveWeights]) -> Trainer:
    """Import what a trainer calls, and return it for one engine."""
    from .research.trainer import Trainer

    return Trainer(batch, live)


def _is_module(model: object) -> bool:
    """Return whether a model is an nnx module; an engine of a named model imports no flax."""
    from flax import nnx

    return isinstance(model, nnx.Module)
