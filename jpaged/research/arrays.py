"""Results as arrays: what requests have drawn or scored, padded, without an object for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..checks import check, integer, is_integer, refusal, shown
from ..errors import JpagedError
from ..outputs import CompletionOutput, RequestOutput
from ..request import Request, SampleSequence
from ..sampling.sampling_params import SamplingParams
from ..sampling.token_numbers import TokenNumbers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GenerationArrays:
    """The samples of all prompts, in the order of the prompts: B samples, padded to T tokens by zeros at their ends.

    It is a pytree, so that jitted functions take it as it is.
    """

    prompt_tokens: Int[Array, "B P"]
    """int32; the prompt of each sample, padded by zeros in front."""
    prompt_mask: Bool[Array, "B P"]
    """Whether there is a token of the prompt."""
    tokens: Int[Array, "B T"]
    """int32; with the EOS or stop token that ended a sample, or the token that completed its stop string."""
    logprobs: Float[Array, "B T"]
    """float32; of each token, as the engine's `logprobs_mode` says."""
    log_kept_masses: Float[Array, "B T"] | None
    """float32; what `SamplingParams.log_kept_mass` asks for, zeros for samples that do not; None if none does."""
    mask: Bool[Array, "B T"]
    """Whether there is a token."""
    is_truncated: Bool[Array, " B"]
    """Whether a sample had no end of its own: it ended by its length, an abort or an error."""
    is_aborted: Bool[Array, " B"]
    """Whether a sample was aborted, as by `sleep` or `update_params(in_flight="abort")`: it is truncated too, and lacks
    tokens that it would have had."""
    top_token_ids: Int[Array, "B T K"] | None
    """int32; the K tokens that were most likely at each place, the most likely one first, for
    `SamplingParams(logprobs=K)`; None if no sample asks for them."""
    top_logprobs: Float[Array, "B T K"] | None
    """float32; their logprobs. Samples that ask for fewer have zeros behind theirs."""
    versions: Int[Array, "B T"]
    """int32; the version of the weights that drew each token."""
    prompt_indices: Int[Array, " B"]
    """int32; the prompt that each sample belongs to."""
    errors: tuple[str | None, ...] = field(metadata={"static": True})
    """For each sample why it failed; None for one that did not."""

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput], *, max_tokens: int | None = None, num_tops: int = 0) -> Self:
        """Return the samples of outputs of `Engine.step` or `generate`, which hold all tokens so far.

        T is `max_tokens`, or the length of the longest sample for None; K is `num_tops`, at most the K of
        `SamplingParams(logprobs=K)`; `prompt_indices` are places in `outputs`. Raise InvalidRequestError for samples
        without logprobs, which `SamplingParams(logprobs=0)` asks for, or with too few of them, for samples of more than
        `max_tokens` tokens, for deltas, and for what is no list of outputs.
        """
        if not isinstance(outputs, Sequence) or not all(isinstance(output, RequestOutput) for output in outputs):
            raise refusal("outputs", shown(outputs), "a list of RequestOutput")
        check("num_tops", num_tops, integer(0))
        samples = [
            _of_output(index, output, one, num_tops) for index, output in enumerate(outputs) for one in output.outputs
        ]
        longest = max((len(sample.tokens) for sample in samples), default=0)
        if max_tokens is not None and (not is_integer(max_tokens) or max_tokens < longest):
            raise refusal("max_tokens", shown(max_tokens), f"an integer ≥ {longest}, the tokens of the longest sample")
        return cls(**_columns(samples, longest if max_tokens is None else max_tokens))

    def with_prompt_len(self, prompt_len: int) -> Self:
        """Return these samples with P = `prompt_len`, so that jitted functions see one shape whatever was prompted.

        Raise InvalidRequestError for fewer than the tokens of the longest prompt.
        """
        prompts, mask = _from_device(self.prompt_tokens), _from_device(self.prompt_mask)
        longest = int(mask.sum(axis=1).max(initial=0))
        if not is_integer(prompt_len) or prompt_len < longest:
            raise refusal("prompt_len", shown(prompt_len), f"an integer ≥ {longest}, the tokens of the longest prompt")
        padding = (0, 0), (max(0, prompt_len - mask.shape[1]), 0)
        start = max(0, mask.shape[1] - prompt_len)
        prompts, mask = (np.pad(array[:, start:], padding) for array in (prompts, mask))
        return replace(self, prompt_tokens=on_device(prompts), prompt_mask=on_device(mask))


def for_arrays(params: Any) -> SamplingParams:
    """Return a copy of `params` for results as arrays: with the logprob of each drawn token.

    `logprobs` of None becomes 0, which means the drawn token alone. Text is made only where stop strings need it; the
    token that completes one is the sample's last, as in outputs. Raise InvalidRequestError for what arrays do not hold:
    beams, the logprobs of the prompt (`prompt_logprobs`) and those of the whole vocabulary (`logprobs` −1).
    """
    way_out = (
        "arrays hold no beams, no prompt_logprobs and no logprobs of -1; generate without return_arrays gives them"
    )
    if not isinstance(params, SamplingParams):
        raise refusal("sampling_params", type(params).__name__, "SamplingParams beside return_arrays", way_out)
    if params.prompt_logprobs is not None:
        raise refusal("prompt_logprobs", params.prompt_logprobs, "None beside return_arrays", way_out)
    if (params.logprobs or 0) < 0:
        raise refusal("logprobs", params.logprobs, "a number of tokens beside return_arrays", way_out)
    return replace(params, logprobs=params.logprobs or 0, detokenize=bool(params.stop))


class _Sample(NamedTuple):
    """One row of `GenerationArrays`."""

    prompt_index: int
    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float] | np.ndarray
    log_masses: Sequence[float] | np.ndarray | None
    tops: tuple[np.ndarray, np.ndarray] | None
    """Ids and logprobs of the most likely tokens, [T, K] each."""
    versions: Sequence[tuple[int, int]]
    """(index of the first token, version), in ascending order: each version holds up to the start of the next."""
    finish_reason: str | None
    error: str | None


def generation_arrays(requests: Sequence[Request], prompt_indices: Sequence[int] | None = None) -> GenerationArrays:
    """Return the samples of requests that have ended, one row per sample, in the order of `requests`.

    B is the number of samples, one row each. T is the largest `max_tokens` of the requests, not the longest output: the
    shapes do not depend on what was drawn. P is the longest prompt. Outputs are padded at their ends and prompts in
    front, by zeros where `mask` and `prompt_mask` are false. Without requests, B, P and T are 0. `prompt_indices` are
    those of the requests, their places for None.

    Example: a prompt [5, 6] with the output [7] and a prompt [8] with the output [9, 4], `max_tokens` 3, give the
    prompts [[5, 6], [0, 8]] and the tokens [[7, 0, 0], [9, 4, 0]].
    """
    indices = range(len(requests)) if prompt_indices is None else prompt_indices
    samples = [
        _of_sample(index, one) for index, request in zip(indices, requests, strict=True) for one in request.sequences
    ]
    return GenerationArrays(**_columns(samples, max((request.max_tokens for request in requests), default=0)))


def _of_sample(prompt_index: int, sample: SampleSequence) -> _Sample:
    request, numbers = sample.request, sample.numbers
    assert isinstance(numbers, TokenNumbers), "a request whose results are numbers"
    assert numbers.logprobs is not None
    tops = None
    if numbers.top_token_ids is not None and numbers.top_logprobs is not None:
        tops = numbers.top_token_ids, numbers.top_logprobs
    return _Sample(
        prompt_index,
        request.prompt_token_ids,
        sample.token_ids[request.prompt_len :],
        numbers.logprobs,
        numbers.log_masses,
        tops,
        sample.weight_versions,
        sample.state.finish_reason,
        request.error,
    )


def _of_output(prompt_index: int, output: RequestOutput, one: CompletionOutput, num_tops: int) -> _Sample:
    """Return a row of one sample of an output, with its `num_tops` most likely tokens at each place.

    Raise InvalidRequestError if it has tokens without logprobs, too few most likely ones, or is a delta.
    """
    if one.logprobs is None and one.token_ids:
        way_out = "ask for SamplingParams(logprobs=0)"
        raise refusal("outputs", f"{output.request_id} without logprobs", "samples with logprobs", way_out)
    if one.weight_versions and one.weight_versions[-1].end != len(one.token_ids):
        way_out = "leave output_kind out, or take the last outputs of FINAL_ONLY"
        raise refusal("outputs", f"{output.request_id}, a delta", "outputs with all tokens of a sample", way_out)
    entries = zip(one.logprobs or (), one.token_ids, strict=True)
    tops = None
    if num_tops:
        # The drawn token has an entry too, whatever its rank.
        likeliest = [
            sorted((entry.logprob, token_id) for token_id, entry in place.items() if entry.rank <= num_tops)[::-1]
            for place in one.logprobs or ()
        ]
        if any(len(place) < num_tops for place in likeliest):
            got = f"{output.request_id} with fewer than {num_tops} most likely tokens"
            raise refusal("outputs", got, f"samples of SamplingParams(logprobs={num_tops}) or more")
        pairs = np.array([place[:num_tops] for place in likeliest]).reshape(-1, num_tops, 2)
        tops = pairs[..., 1].astype(np.int32), pairs[..., 0].astype(np.float32)
    return _Sample(
        prompt_index,
        output.prompt_token_ids,
        one.token_ids,
        [entry[token_id].logprob for entry, token_id in entries],
        one.log_kept_masses,
        tops,
        [(span.start, span.version) for span in one.weight_versions],
        one.finish_reason,
        output.error,
    )


def _columns(samples: Sequence[_Sample], num_tokens: int) -> dict[str, Any]:
    """Return the fields of `GenerationArrays` for these rows, whose outputs are padded to `num_tokens`."""
    shape, prompt_shape = (
        (len(samples), width) for width in (num_tokens, max((len(sample.prompt) for sample in samples), default=0))
    )
    tokens, versions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    logprobs, log_masses, mask = np.zeros(shape, np.float32), np.zeros(shape, np.float32), np.zeros(shape, bool)
    num_tops = max((sample.tops[0].shape[1] for sample in samples if sample.tops is not None), default=0)
    top_ids, top_logprobs = np.zeros((*shape, num_tops), np.int32), np.zeros((*shape, num_tops), np.float32)
    prompts, prompt_mask = np.zeros(prompt_shape, np.int32), np.zeros(prompt_shape, bool)
    for row, sample in enumerate(samples):
        length, prompt_start = len(sample.tokens), prompt_shape[1] - len(sample.prompt)
        prompts[row, prompt_start:] = sample.prompt
        prompt_mask[row, prompt_start:] = True
        tokens[row, :length] = sample.tokens
        logprobs[row, :length] = sample.logprobs[:length]
        if sample.log_masses is not None:
            log_masses[row, :length] = sample.log_masses[:length]
        if sample.tops is not None:
            for all_tops, own in zip((top_ids, top_logprobs), sample.tops, strict=True):
                all_tops[row, :length, : own.shape[1]] = own[:length]
        mask[row, :length] = True
        # In ascending order of `start`: each version overwrites the tail of the one before.
        for start, version in sample.versions:
            versions[row, start:length] = version
    has_masses = any(sample.log_masses is not None for sample in samples)
    return {
        "prompt_tokens": on_device(prompts),
        "prompt_mask": on_device(prompt_mask),
        "tokens": on_device(tokens),
        "logprobs": on_device(logprobs),
        "log_kept_masses": on_device(log_masses) if has_masses else None,
        "top_token_ids": on_device(top_ids) if num_tops else None,
        "top_logprobs": on_device(top_logprobs) if num_tops else None,
        "mask": on_device(mask),
        "is_truncated": on_device(np.array([sample.finish_reason != "stop" for sample in samples], bool)),
        "is_aborted": on_device(np.array([sample.finish_reason == "abort" for sample in samples], bool)),
        "versions": on_device(versions),
        "prompt_indices": on_device(np.array([sample.prompt_index for sample in samples], np.int32)),
        "errors": tuple(sample.error for sample in samples),
    }


@dataclass(frozen=True)
class LogprobComparison:
    """How far the logprobs of an engine and of a trainer lie apart, over the tokens that the engine drew."""

    num_tokens: int
    mean: float
    """Mean of the absolute differences of logprobs, in nats."""
    p95: float
    """95th percentile of these differences."""
    max: float
    """The largest of these differences."""
    share_outside: float
    """Share of the tokens whose ratio of probabilities is outside [0.9, 1.1]."""


def compare(
    requests: Sequence[Request], trainer_fn: Callable[[Int[Array, "B N"]], Float[Array, "B N1"]]
) -> LogprobComparison:
    """Compare the logprobs of the output tokens of finished requests with a trainer's.

    `trainer_fn` takes int32 ids [B, N], each row the prompt and the output of one sample, padded by zeros at the end.
    It returns the logprob of each token but the first, [B, N − 1]; entries of prompt tokens and of padding are not
    used. B is the number of samples, N the length of the longest. Differences are the engine's − the trainer's. Raise
    JpagedError if a request has failed, InvalidRequestError if there is none or `trainer_fn` returns another shape.
    """
    _raise_if_failed("compare_logprobs", requests)
    samples = [sample for request in requests for sample in request.sequences]
    if not samples:
        raise refusal("prompts", "none", "at least one")
    ids = np.zeros((len(samples), max(len(sample.token_ids) for sample in samples)), np.int32)
    for row, sample in zip(ids, samples, strict=True):
        row[: len(sample.token_ids)] = sample.token_ids
    theirs = _from_device(trainer_fn(on_device(ids)))
    if theirs.shape != (wanted := (ids.shape[0], ids.shape[1] - 1)):
        raise refusal("trainer_fn", f"the shape {theirs.shape} for ids {ids.shape}", f"{wanted}")
    differences = np.concatenate([_differences(sample, row) for sample, row in zip(samples, theirs, strict=True)])
    distances = np.abs(differences)
    return LogprobComparison(
        num_tokens=len(differences),
        mean=float(distances.mean()),
        p95=float(np.quantile(distances, 0.95)),
        max=float(distances.max()),
        # The exponential of a difference of logprobs is the ratio of the probabilities.
        share_outside=float(np.mean((np.exp(differences) < 0.9) | (np.exp(differences) > 1.1))),
    )


def _raise_if_failed(call: str, requests: Sequence[Request]) -> None:
    """Raise JpagedError for the first request that has failed; `call` is the method that the message names."""
    for index, request in enumerate(requests):
        if request.error is not None:
            raise JpagedError(f"{call}: sequence {index} failed: {request.error}")


def _differences(sample: SampleSequence, theirs: np.ndarray) -> np.ndarray:
    """Return ours − theirs for each output token; entry i of `theirs` is the logprob of token i + 1."""
    # The first output token is token `prompt_len`, so its entry in `theirs` is the one before.
    assert isinstance(sample.numbers, TokenNumbers)
    assert sample.numbers.logprobs is not None
    ours, first = sample.numbers.logprobs[: sample.num_output_tokens], sample.request.prompt_len - 1
    return ours - theirs[first : first + len(ours)]


def on_device(array: np.ndarray) -> jax.Array:
    """Return an array of JAX, also where a trainer guards its own code against transfers.

    A CPU takes the memory of an array that begins at a multiple of 64 bytes as it is: the array must not change later.
    """
    with jax.transfer_guard("allow"):
        return jax.device_put(array)


def _from_device(array: Any) -> np.ndarray:
    with jax.transfer_guard("allow"):
        return np.asarray(array)
