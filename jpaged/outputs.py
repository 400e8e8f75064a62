"""The records that the engine returns to its callers: frozen, each complete in itself.

`msgspec.to_builtins(output, str_keys=True)` makes plain data of one, for JSON.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """The log-probability of one token at one position of a text.

    Outputs hold many of them, so they are objects that Python's garbage collector need not visit.
    """

    logprob: float
    """Natural logarithm of the probability that the engine's `logprobs_mode` names."""
    rank: int
    """Place of the token among all tokens of the vocabulary; the most likely one has rank 1."""
    decoded_token: str | None
    """Text of this token alone; None if the engine has no tokenizer."""


PromptLogprobs = tuple[dict[int, Logprob] | None, ...]
"""One entry per prompt token; the first token has no logprob, its entry is None."""


class WeightVersion(msgspec.Struct, frozen=True, gc=False):
    """Output tokens of a sample that were drawn by one version of the weights: those from `start` up to `end`."""

    version: int
    """As `Engine.update_params` was told, or counted; 0 for the weights that the engine started with."""
    start: int
    end: int


class Mark(msgspec.Struct, frozen=True, gc=False):
    """Where a token stands in a text of which its reader must know the id, such as the one that begins a tool call.

    The characters `<tool_call>` may be that token or ordinary ones; only the id tells.
    """

    place: int
    """Characters of the text before the token. A special token that the text leaves out has none of its own there.
    Those of another token follow; in a stream, some may come with the next delta."""
    token_id: int


class SampleDelta(msgspec.Struct, frozen=True, gc=False):
    """The new tokens and text of one sample of a request since its last delta.

    A stream gets deltas, and one `RequestOutput` for each request that has ended. A delta is a flat record, since a
    step makes one for each of its rows.
    """

    request_id: str
    index: int
    """The sample index."""
    token_ids: tuple[int, ...]
    text: str
    """New text that is certain: no part of a stop string that may be cut off, no part of a character."""
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    """One entry per token of `token_ids`, as in `CompletionOutput`; None unless logprobs were asked for."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    marks: tuple[Mark, ...] = ()
    """Those in `text`, in order: of the tokens that the request has named, the one that ended the sample apart."""
    start: int = 0
    """How many output tokens of the sample came in earlier deltas: the index of the first of `token_ids`."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a request: all of it so far, or with RequestOutputKind.DELTA what is new since the last output.

    `token_ids` include the EOS or stop token that ended the sample; `text` does not.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    """Sum of the logprobs of all tokens so far, also with RequestOutputKind.DELTA; None unless logprobs were asked
    for."""
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    """One entry per token of `token_ids`: the sampled token first, then the most likely ones."""
    log_kept_masses: tuple[float, ...] | None = None
    """For each token of `token_ids` the logarithm of the probability that truncation left; None unless it was asked
    for."""
    finish_reason: str | None = None
    """"stop", "length", "abort" or "error"; None while the sample goes on."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the sample; None for EOS and for every other end."""
    weight_versions: tuple[WeightVersion, ...] = ()
    """Which version of the weights drew which of the sample's tokens so far, in order; empty before the first token."""
    marks: tuple[Mark, ...] = ()
    """Those in `text`, as in `SampleDelta`; outputs of a beam search have none."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times and counts of one request. Times are seconds of `time.monotonic()`; None for what has not happened."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    finished_time: float | None
    time_in_queue: float | None
    """Seconds from arrival to the first step that computed tokens of the request."""
    num_preemptions: int
    """Times that the request lost its pages, to another request or because they were computed anew."""
    num_swaps: int
    """Preemptions at which the pages were moved to the host instead of being dropped."""
    num_cached_tokens: int
    """Prompt tokens that were found in the prefix cache when the request was first admitted."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request with its samples so far.

    With RequestOutputKind.DELTA it holds what is new since the last output, and only the samples that have anything
    new.
    """

    request_id: str
    prompt: str | None
    """The prompt's text; None if the request was given as token ids."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int
    prompt_logprobs: PromptLogprobs | None = None
    """The field is None unless prompt
    logprobs were asked for and all are computed. With RequestOutputKind.DELTA one output alone carries them."""
    error: str | None = None
    """Why the request failed, where a `finish_reason` is "error"."""


class StepOutputs(msgspec.Struct, frozen=True):
    """What the requests of one reader have got since its last outputs."""

    deltas: list[SampleDelta]
    """New tokens and texts, for a reader that takes deltas."""
    prompt_logprobs: dict[str, PromptLogprobs]
    """The logprobs of the prompts of requests that asked for them, by their ids, once; for a reader that takes deltas,
    before the first delta of a request."""
    outputs: list[RequestOutput]
    """The last output of each request that has ended; for a reader that takes no deltas, the present output of each
    request that has changed, by its `output_kind`."""


class LastOutput(msgspec.Struct, frozen=True):
    """The output of a request that has ended, for the engine's owner."""

    output: RequestOutput
    failure: str = ""
    """The text of the exception that has ended the request, in one line; empty if none has, or if it has no text. Only
    the owner may see it, since it may quote other requests: the output's `error` names its type."""


class EngineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is and what it has done, for the owner who has run it."""

    device: str
    """Its kind and its platform, such as "TPU v5e (tpu)"."""
    dtype: str
    kv_cache_dtype: str
    mesh: str
    """How heads, MLP and vocabulary are spread over the devices; empty for one device."""
    attention: str
    """The attention backend, and why that one."""
    rope: str
    """Which factors of LongRoPE the rotary embedding has; empty for other embeddings."""
    experts: str
    """How the experts are computed; empty for a model without."""
    memory: str
    """What the memory of the device is used for."""
    ends: str
    """The tokens that end a reply; empty if none does."""
    load_s: float
    """Seconds in which the weights were loaded."""
    block_size: int
    """Tokens of a page."""
    page_groups: str
    """What is said behind a number of pages: " in 2 groups of layers", or nothing for one group."""
    num_host_blocks: int
    """Pages of the host pool that requests can use; 0 without one."""
    stats: dict[str, Any]
    """As `Engine.stats` returns them."""


class ClusterSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers of a run on a cluster were, and what they have done, for the owner of the run."""

    num_workers: int
    resources: dict[str, float]
    """What the cluster reserved for each."""
    nodes: list[str]
    """The machines that results came from."""
    start_s: float
    """Seconds until the first worker took requests."""
    num_prompt_tokens: int
    num_output_tokens: int


def error_output(request_id: str, prompt: Any, message: str) -> RequestOutput:
    """Return the output of a request that failed before it was queued, or whose own output could not be made.

    It has one empty sample with the finish reason "error", and `message` as its `error`. It arrived and finished now;
    all other times are None, and all counts are 0. The prompt is kept only if it is a text.
    """
    now = time.monotonic()
    text = prompt if isinstance(prompt, str) else None
    sample = CompletionOutput(index=0, text="", token_ids=(), finish_reason="error")
    metrics = RequestMetrics(
        arrival_time=now,
        first_scheduled_time=None,
        first_token_time=None,
        last_token_time=None,
        finished_time=now,
        time_in_queue=None,
        num_preemptions=0,
        num_swaps=0,
        num_cached_tokens=0,
    )
    return RequestOutput(
        request_id, text, (), outputs=(sample,), finished=True, metrics=metrics, num_cached_tokens=0, error=message
    )
