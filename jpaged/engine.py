"""The engine: one model behind a paged cache, for offline batches, for research code, and step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, overload

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from .checks import check, number, refusal, shown
from .core.engine_loop import StepEngine
from .errors import ConfigError, InvalidRequestError
from .intake.offline import as_conversations, as_prompts, as_sequences, one_for_each, progress_bar
from .intake.request_builder import CheckedRequest, Params
from .outputs import RequestOutput, error_output
from .request import Request, ResultForm
from .research.arrays import (
    GenerationArrays,
    LogprobComparison,
    compare,
    for_arrays,
    generation_arrays,
    scores_of_prompts,
)
from .sampling.sampling_params import BeamSearchParams, SamplingParams


class Engine(StepEngine):
    """One model behind a paged cache.

    `generate`, `chat` and `beam_search` take a list of prompts and return when all are done. `add_request` and `step`
    serve callers with a loop of their own. Beside a trainer, `update_params` takes its weights, `logprobs` scores
    tokens, and `sleep` gives the device's memory away. An engine is not thread-safe. It is a context manager;
    `shutdown` gives the device's memory back.
    """

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
    ) -> list[RequestOutput]: ...

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
    ) -> GenerationArrays: ...

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
        `messages`, beside which `cache_salt` and `priority` may stand. `sampling_params` is one value for all prompts
        or a list with one for each; None is `default_sampling_params`. `priority`, likewise one or a list, goes before
        that of a mapping; a lower value is served sooner. `use_tqdm` shows a progress bar on a terminal.

        With `return_arrays` the result is one `GenerationArrays` of all samples, with the logprobs of the tokens drawn
        and without text; parameters that ask for more logprobs, for stop strings or for beams are refused.

        With `on_error="raise"` a bad prompt raises InvalidRequestError with its index before anything is computed, and
        an exception in a step, in the model or in an output is raised as it is, with a note that names the request.
        With `on_error="return"` such a request gets an output whose `error` is set and whose finish reason is "error",
        the others are computed, and the exception is logged; beside `return_arrays` a bad prompt still raises, and the
        result's `errors` tell of failures. A request whose logits are NaN or infinite, or whose rules leave no token,
        ends with such an output in either case.

        Raise ConfigError while requests of `add_request` are unfinished. Requests of a call that raises, or is
        interrupted, are aborted.
        """
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        prompts = as_prompts(prompts)
        each = one_for_each(sampling_params, len(prompts), "sampling_params", Params, "SamplingParams")
        options: dict[str, Any] = {"use_tqdm": use_tqdm, "priority": priority, "on_error": on_error}
        if not return_arrays:
            outputs, _ = self._run("generate", prompts, each, **options)
            return list(outputs.values())
        each = [for_arrays(params) for params in each]
        return generation_arrays(self._run("generate", prompts, each, **options, form=ResultForm.ARRAYS)[1])

    def _run(
        self,
        call: str,
        prompts: list[Any],
        each_params: list[Any],
        *,
        use_tqdm: bool = False,
        priority: Any = None,
        on_error: str = "raise",
        form: ResultForm = ResultForm.ENTRIES,
        **options: Any,
    ) -> tuple[dict[str, RequestOutput], list[Request]]:
        """Compute one request for each prompt; return their outputs by id in the order of the prompts.

        The second value holds the requests in the order of the prompts, and is empty if `form` is ENTRIES, whose
        results are the outputs. `call` is what errors name; `form` and `options` are those of `RequestBuilder.check`.
        The rest is as in `generate`.
        """
        self._check_ready(call)
        self._last_fault = None  # Each call logs its first failure with a traceback.
        if on_error not in ("raise", "return"):
            raise refusal("on_error", shown(on_error), "raise, return", error=ConfigError)
        if self.requests:
            got = f"an engine with {len(self.requests)} unfinished requests of add_request"
            raise refusal(call, got, "none", "step() them to their end or abort them first", error=ConfigError)
        each_priority = one_for_each(priority, len(prompts), "priority", Integral | None, "an integer")
        outputs: dict[str, Any] = {}
        checked: list[CheckedRequest] = []
        has_entries = form is ResultForm.ENTRIES
        num_before = self._num_requests
        for index, (prompt, params, own_priority) in enumerate(zip(prompts, each_params, each_priority, strict=True)):
            request_id = f"{call}-{num_before + index}"
            outputs[request_id] = None  # So that outputs keep the order of the prompts.
            try:
                checked.append(
                    self._check_request(request_id, prompt, params, priority=own_priority, form=form, **options)
                )
            except InvalidRequestError as error:
                if on_error == "raise" or not has_entries:
                    self._num_requests = num_before  # Later requests draw as if this call had never been.
                    raise InvalidRequestError(f"prompt {index}: {error}", param=error.param) from error
                self._num_requests += 1  # The others draw as they would beside a good one.
                outputs[request_id] = error_output(request_id, prompt, str(error))
        kept: dict[str, Request] = {}
        with progress_bar(len(checked), is_shown=use_tqdm) as bar:
            in_order = sorted(checked, key=lambda request: request.policy_key)
            for request, output in self.run_requests(map(self._make_request, in_order), on_error=on_error):
                if request.failure is not None and on_error == "raise":
                    request.failure.add_note(f"{request.request_id}: {output.error}")
                    raise request.failure
                self.log_failure(request)
                if not has_entries:
                    kept[request.request_id] = request
                outputs[request.request_id] = output
                bar.update()
        return outputs, [kept[request_id] for request_id in outputs if request_id in kept]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of conversations, written out by the model's chat template.

        A conversation is a list of mappings with `role` and `content`. The other arguments, the order of the outputs
        and the errors are those of `generate`.
        """
        prompts = [{"messages": conversation} for conversation in as_conversations(messages)]
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
        """Search the most likely continuations of each prompt; each output has the best `beam_width`, best first.

        `cumulative_logprob` of a beam is the sum over its tokens. A search needs the logprobs of `beam_width` + number
        of EOS tokens per row, which the engine's `max_logprobs` must allow. The other arguments and the errors are
        those of `generate`.
        """
        prompts = as_prompts(prompts)
        each = one_for_each(params, len(prompts), "params", BeamSearchParams, "BeamSearchParams")
        if not all(isinstance(one, BeamSearchParams) for one in each):
            raise refusal("params", shown(params), "BeamSearchParams or a list of them")
        return self.generate(prompts, each, use_tqdm=use_tqdm, priority=priority, on_error=on_error)

    def default_sampling_params(self) -> SamplingParams:
        """Return what the model's generation config recommends, with output up to the end of the context."""
        return self._builder.default_params()

    # Beside a trainer

    @property
    def weights_version(self) -> int:
        """Return the version of the weights: 0 at start, then what `update_params` was told, or counted."""
        return self._versions.version

    @property
    def params(self) -> nnx.State:
        """Return the engine's weights, in its own layout: a state of nnx. Raise ConfigError while they are away.

        They are the arrays that steps read: copy those that are to outlive the next update.
        """
        if not self.runner.store.leaves:
            raise refusal("params", "an engine that sleeps, without weights", "one that has them", error=ConfigError)
        return self.runner.weights.state

    def logprobs(self, token_ids: Any, *, temperature: float = 1.0) -> Float[Array, "*B N1"]:
        """Return the logprob of each token but the first, given those before it: float32, [N − 1] for N token ids.

        For a list of B lists of ids, or an array [B, N], the result is [B, N − 1] for the longest, padded by zeros.
        They come from the programs that serve, and mean what logprobs of drawn tokens mean: the log-softmax of the
        logits ÷ `temperature`, from 1e-4 to 2, without truncation. Raise InvalidRequestError for a sequence of more
        than `max_model_len` tokens, and for other arguments that are wrong.
        """
        sequences, is_one = as_sequences(token_ids)
        check("temperature", temperature, number(1e-4, 2.0))
        params = SamplingParams(logprobs=0, prompt_logprobs=0, max_tokens=1, temperature=temperature, detokenize=False)
        # Requests without a seed draw as if this call had never been.
        options: dict[str, Any] = {"number": 0, "form": ResultForm.SCORES}
        _, requests = self._run("logprobs", sequences, [params] * len(sequences), **options)
        scores = scores_of_prompts(requests)
        return scores[0] if is_one else scores

    def compare_logprobs(
        self,
        trainer_fn: Callable[[Int[Array, "B N"]], Float[Array, "B N1"]],
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> LogprobComparison:
        """Draw a continuation of each prompt and compare the logprobs of its tokens with a trainer's.

        `trainer_fn` takes ids [B, N], int32, prompts and outputs, padded at their ends by zeros, and returns the
        logprob of each token but the first, [B, N − 1]. They have to mean what the engine's `logprobs_mode` says: with
        raw_logprobs the model's own, whatever the temperature.
        """
        prompts = as_prompts(prompts)
        params = self.default_sampling_params() if sampling_params is None else sampling_params
        each = one_for_each(params, len(prompts), "sampling_params", Params, "SamplingParams")
        each = [for_arrays(one) for one in each]
        _, requests = self._run("compare_logprobs", prompts, each, form=ResultForm.ARRAYS)
        return compare(requests, trainer_fn)

    def update_params(
        self, params: Mapping[str, Any], *, version: int | None = None, in_flight: str = "wait", copy: bool = True
    ) -> None:
        """Replace all weights by a tree of arrays. No program is compiled for it after the first two of a kind of tree.

        `params` is flat or nested. It holds all tensors of the model under their Hugging Face names; or these without
        the layers' numbers, the tensors of all layers in one array [L, …]; or arrays under the paths of the engine's
        own weights (`Engine.params`), or of your own module. Their dtypes may differ from the engine's. Arrays
        of JAX on any devices of this process are taken, and numpy's. They are copied, so that a trainer may donate
        them; with `copy=False` those that are what the engine needs are taken as they are, and must stay.

        `version` is what outputs call the new weights, by default one more than before. `in_flight` says what becomes
        of unfinished requests: "wait" computes those that have begun to their end, "keep" lets them go on with the keys
        and values they have, "recompute" computes these anew from their tokens, "abort" ends them. While the engine
        sleeps, all but "abort" mean "recompute". The next `step` returns what they have got. No later request finds
        prefixes that other weights have computed.

        Raises ModelLoadError, which lists every leaf that is missing, left over, misshapen, of a wrong type or not
        finite, and ConfigError, before anything is changed. If the devices fail meanwhile, their exception is raised,
        and the engine sleeps without weights until the next update.
        """
        self._check_open()
        self._check_outside("update_params")
        number = self._versions.check_options(version, in_flight, copy)
        with jax.transfer_guard("allow"):  # A trainer may guard its own code against transfers.
            checked = self._live.check(params)
            self._drain(in_flight)
            self.runner.store.update(self._live, checked, self.plan.get, copy=copy)
        self._versions.advance(number)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the memory of the device for others, until `wake_up`.

        Level 1 frees the pages and moves the weights to the host's memory, where a CPU has them already; level 2 drops
        them: `update_params`, or `wake_up` if they are those of a checkpoint, refills them. `mode` says what becomes of
        unfinished requests: "abort" ends them, "wait" computes those that have begun to their end, "keep" lets them go
        on after waking, with the same tokens. The next `step` after waking returns what they have got. Raises
        ConfigError for an engine that sleeps already.
        """
        self._check_open()
        self._check_outside("sleep")
        self._sleep.check(level, mode)
        self._drain(mode)
        self.core.restart()
        self._sleep.begin(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take back the memory that `sleep` has freed: all of it, or what `tags` name, "weights" and "kv_cache".

        Weights that were dropped and are not those of a checkpoint come by `update_params` alone: without `tags` that
        is a ConfigError, and `wake_up(["weights"])` then changes nothing.
        """
        self._check_open()
        self._check_outside("wake_up")
        self._sleep.end(tags)

    def is_sleeping(self) -> bool:
        """Return whether something that steps need is away: `sleep` has taken it, or an update has failed."""
        return bool(self._sleep.missing)
