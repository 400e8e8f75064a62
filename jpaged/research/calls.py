"""The calls of `Engine` beside a trainer: rollouts, scores, live weights and sleep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
from jaxtyping import Array, Float, Int

from ..core.engine_loop import EngineLoop
from ..messages import Params
from ..sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from flax import nnx

    from .arrays import LogprobComparison
    from .rollouts import Rollouts
    from .scores import Scorer, Scores, TopLogprobs
    from .trainer import Trainer


class ResearchCalls:
    """The part of `Engine` that a trainer in the same process uses. Threads may share it, also while requests run."""

    loop: EngineLoop
    _make_trainer: Callable[[], Trainer]
    _trainer_lock: Lock
    _made_trainer: Trainer | None

    @property
    def _trainer(self) -> Trainer:
        """Return what makes these calls, made at the first of them: an engine that only generates imports none of it.

        Threads may be first together.
        """
        with self._trainer_lock:
            if self._made_trainer is None:
                self._made_trainer = self._make_trainer()
            return self._made_trainer

    def submit(
        self,
        prompts: Any,
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        max_in_flight: int | None = None,
        in_order: bool = False,
        priority: int | None = None,
    ) -> Rollouts:
        """Compute samples of prompts in a thread of the engine's own; return an iterator of the groups that have ended.

        `prompts` is what `generate` takes, or an iterator of prompts, which may be endless. `sampling_params` is one
        value, or a list with one for each prompt of a list; None is `default_sampling_params`. Each item of the result
        is a `GenerationArrays` with all samples of one prompt, in the order in which they end, or in that of the
        prompts with `in_order`. At most `max_in_flight` prompts are in flight, those included that have ended and were
        not taken; None is as many as fill the engine's `max_num_seqs` twice. The next prompt is read, in the caller's
        thread, when a group is taken.

        This returns once the prompts have token ids: they are queued behind the step, or the compilation, that goes on.
        Stop strings end samples as in outputs, with the token that completes one; beams, `prompt_logprobs` and logprobs
        of −1 are refused, as beside `return_arrays`.

        Other calls go on meanwhile. After `update_params` with `in_flight="keep"` a sample's later tokens are drawn by
        the new weights; its `versions` tell. With `in_order` a group is at most ⌈max_in_flight ÷ G⌉ versions older than
        the weights if each G groups that are taken make one version.

        Raise InvalidRequestError for wrong arguments, and ConfigError for an engine that sleeps. Errors of prompts, and
        of their iterator, are raised by the result.
        """
        return self._trainer.submit(
            prompts, sampling_params, max_in_flight=max_in_flight, in_order=in_order, priority=priority
        )

    @property
    def weights_version(self) -> int:
        """Return the version of the weights: 0 at start, then what `update_params` was told, or counted."""
        return self.loop.versions.version

    @property
    def scorer(self) -> Scorer:
        """Return what scores tokens into arrays: `logprobs` and `score` are its calls, and `distill` uses it."""
        return self._trainer.scorer

    @property
    def params(self) -> nnx.State:
        """Return the engine's weights, in its own layout: a state of nnx. Raise ConfigError while they are away.

        They are the arrays that steps read: copy those that are to outlive the next update. Matrices that stay codes of
        a quantized file are arrays of bytes.
        """
        return self.loop.read("params", lambda: self._trainer.params)

    @overload
    def logprobs(self, ids: Any, /, *, temperature: Any = 1.0) -> Float[Array, "*B N1"]:
        """Return the logprob of each token but the first; the last definition has the contract and the code."""

    @overload
    def logprobs(self, ids: Any, /, *, temperature: Any = 1.0, top_k: int) -> TopLogprobs:
        """Return the most likely tokens at each place."""

    @overload
    def logprobs(self, ids: Any, /, *, temperature: Any = 1.0, token_ids: Any) -> Float[Array, "*B N1 S"]:
        """Return the logprobs of the tokens asked for at each place."""

    @overload
    def logprobs(self, ids: Any, /, *, temperature: Any = 1.0, hidden: Literal[True]) -> Float[Array, "*B N D"]:
        """Return the hidden state of each token."""

    def logprobs(
        self,
        ids: Any,
        /,
        *,
        temperature: Any = 1.0,
        top_k: int | None = None,
        token_ids: Any = None,
        hidden: bool = False,
    ) -> Any:
        """Return the logprob of each token but the first, given those before it: float32, [N − 1] for N token ids.

        For a list of B lists of ids, or an array [B, N], the result is [B, N − 1] for the longest list; shorter rows
        are padded by zeros. The logprobs come from the layers that serve: the log-softmax of the logits ÷
        `temperature`, from 1e-4 to 2, one for all rows or one for each, without truncation.

        With `top_k` the result is `TopLogprobs` instead: the ids and logprobs [B, N − 1, K] of the most likely tokens
        at each place, and the logarithm of the probability of all others. With `token_ids`, an array [B, N − 1, S], it
        is the logprobs of these tokens, [B, N − 1, S]. K and S are at most the engine's `max_logprobs`. With `hidden`
        it is the output of the last norm for each token, [B, N, D], from which the model's head makes logits; the
        temperature does not count. For one list of ids, no result has the axis B.

        Scores are of one version of the weights: a row that an update finds in the middle is computed anew. Raise
        InvalidRequestError for a sequence of more than `max_model_len` tokens, and for other arguments that are wrong.
        """
        with jax.transfer_guard("allow"):  # A trainer may guard its own code against transfers.
            return self.scorer.logprobs(ids, temperature=temperature, top_k=top_k, token_ids=token_ids, hidden=hidden)

    def score(self, contexts: Any, continuations: Any, *, temperature: Any = 1.0, from_position: int = 0) -> Scores:
        """Return the logprobs of the tokens of continuations, given their contexts; each context is computed once.

        `contexts` is a list of token ids or texts, and `continuations` has one for each context, or a list of several.
        Equal contexts count as one, wherever they stand; others share what the prefix cache has. The B continuations
        are the rows of the result, in their order, padded by zeros. `temperature`, from 1e-4 to 2, is one for all or
        one for each row. Tokens of a continuation before `from_position` are computed and not scored.

        Raise InvalidRequestError for an empty context or continuation, and for other arguments that are wrong.
        """
        with jax.transfer_guard("allow"):
            options: dict[str, Any] = {"temperature": temperature, "from_position": from_position}
            return self.scorer.score(contexts, continuations, **options)

    def compare_logprobs(
        self,
        trainer_fn: Callable[[Int[Array, "B N"]], Float[Array, "B N1"]],
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> LogprobComparison:
        """Draw a continuation of each prompt and compare the logprobs of its tokens with a trainer's.

        `trainer_fn` takes int32 ids [B, N], each row a prompt and its output, padded at the end by zeros. It returns
        the logprob of each token but the first, [B, N − 1], in the sense of the engine's `logprobs_mode`: with
        raw_logprobs those of the model's logits, whatever the temperature.
        """
        return self._trainer.compare_logprobs(trainer_fn, prompts, sampling_params)

    def update_params(
        self, params: Mapping[str, Any], *, version: int | None = None, in_flight: str = "wait", copy: bool = True
    ) -> None:
        """Replace all weights by a tree of arrays. Only the first two updates by a kind of tree compile programs.

        `params` is flat or nested. Its names are the tensors' Hugging Face names; or these without the layers' numbers,
        with the tensors of all layers in one array [L, …]; or the paths of the engine's own weights (`Engine.params`),
        or of your own module. Dtypes may differ from the engine's. Arrays may be numpy's, or JAX's on any devices of
        this process. They are copied, so a trainer may donate them later; with `copy=False` an array that needs no
        conversion becomes the engine's weight, and must not be deleted or donated. An engine of int8, fp8, int4 or
        other codes with one scale for a group quantizes them; one of other codes, such as those of a Q4_K file, raises
        ModelLoadError for floats: make it with `quantization="none"`.

        `version` is what outputs call the new weights, by default one more than before. `in_flight` says what becomes
        of unfinished requests: "wait" computes those that have begun to their end, "keep" lets them go on with the keys
        and values they have, "recompute" computes these anew from their tokens, "abort" ends them. While the engine
        sleeps, all but "abort" mean "recompute". The next `step` returns the tokens that they have got meanwhile.
        Prefixes computed by other weights are no longer found in the cache.

        Before anything is changed, raise ModelLoadError, which lists every leaf that is missing, unknown, misshapen, of
        a wrong type or not finite, or ConfigError for a wrong option. If the devices fail during the update, their
        exception is raised, and the engine sleeps without weights until the next update.
        """
        update = partial(self._trainer.update_params, params, version=version, in_flight=in_flight, copy=copy)
        self.loop.call("update_params", update)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the device's memory for other uses, until `wake_up`.

        Both levels free the pages. Level 1 moves the weights to the host's memory, where a CPU has them already. Level
        2 drops them: `update_params` refills them, or `wake_up` if they are a checkpoint's. `mode` says what becomes of
        unfinished requests: "abort" ends them, "wait" computes those that have begun to their end, "keep" lets them go
        on after waking, with the same tokens. The next `step` after waking returns the tokens that they have got. Raise
        ConfigError if an argument is wrong or the engine sleeps already.
        """
        self.loop.call("sleep", lambda: self._trainer.sleep(level, mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take back the memory that `sleep` has freed: all of it, or what `tags` name, "weights" and "kv_cache".

        Where only `update_params` can refill the weights, it raises ConfigError; `wake_up(["weights"])` does nothing.
        """
        self.loop.call("wake_up", lambda: self._trainer.wake_up(tags))

    def is_sleeping(self) -> bool:
        """Return whether something that steps need is away: `sleep` has taken it, or an update has failed."""
        return self.loop.read("is_sleeping", lambda: bool(self.loop.sleep.missing))
