"""The nouns of the host core: a request is a group of sequences over one prompt.

Knows tokens, pages and states; neither arrays nor text. A request without a seed of its own draws from
(engine seed, request number), so that the same inputs in the same order give the same text.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .output_processor import SequenceOutput
    from .sampling_params import SamplingParams

SEED_MODULUS = 1 << 64


class RequestState(enum.Enum):
    """Where a request or a sequence stands. The value of a finished state is its finish reason."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def is_finished(self) -> bool:
        return self not in (RequestState.WAITING, RequestState.RUNNING)

    @property
    def finish_reason(self) -> str | None:
        """One of "stop", "length", "abort" and "error"; None while it is not finished."""
        return self.value if self.is_finished else None


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request: its tokens so far, how many are computed, and its pages."""

    request: Request
    index: int
    """Sample index, which the random draws depend on."""
    token_ids: list[int]
    """Prompt and output tokens."""
    pages: list[list[int]]
    """Page numbers in order of position, per page-table group."""
    num_computed: int = 0
    """Tokens whose keys and values are in the pages."""
    slot: int = 0
    """State slot on the device; 0, the null slot, when it does not run."""
    pages_sent: list[int] = field(default_factory=list)
    """Entries of each page table that the device has, for the slot held now."""
    is_last_token_on_device: bool = False
    """Its last token was sampled in the slot it holds: the step takes it from there."""
    has_sample_row: bool = False
    """What the sampler wants to know of it is written down under the slot it holds."""
    page_hashes: list[bytes] = field(default_factory=list)
    """Chained hash of each full page, as far as it was needed."""
    num_published: int = 0
    """Full pages already offered to the prefix cache."""
    state: RequestState = RequestState.WAITING
    stop_reason: int | str | None = None
    output: SequenceOutput | None = None
    """Text and logprobs, which the output processor keeps here."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens to compute: one when it decodes, many when it prefills."""
        return len(self.token_ids) - self.num_computed

    def release_device(self) -> None:
        """Forget what was on the device, once its pages have been freed."""
        for pages in self.pages:
            pages.clear()
        self.num_computed = self.num_published = self.slot = 0
        self.pages_sent = [0] * len(self.pages)
        self.is_last_token_on_device = self.has_sample_row = False


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and its samples. They are admitted and preempted together."""

    request_id: str
    number: int
    """Counts requests from 0; part of the seed of a request without one."""
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    max_tokens: int
    """Output tokens at most: the parameter, or what the context has left."""
    seed: int
    """64 bits, from which every draw of this request comes."""
    prompt: str | None = None
    sequences: list[Sequence] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    error: str | None = None

    @property
    def live_sequences(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.state.is_finished]


def make_request(
    *,
    request_id: str,
    number: int,
    prompt_token_ids: list[int],
    params: SamplingParams,
    arrival_time: float,
    max_tokens: int,
    engine_seed: int,
    num_groups: int,
    prompt: str | None = None,
) -> Request:
    """A waiting request with its `params.n` sequences, sample indices 0 to n − 1."""
    request = Request(
        request_id=request_id,
        number=number,
        prompt_token_ids=prompt_token_ids,
        params=params,
        arrival_time=arrival_time,
        max_tokens=max_tokens,
        seed=params.seed % SEED_MODULUS if params.seed is not None else derived_seed(engine_seed, number),
        prompt=prompt,
    )
    for index in range(params.n):
        pages: list[list[int]] = [[] for _ in range(num_groups)]
        request.sequences.append(Sequence(request, index, list(prompt_token_ids), pages, pages_sent=[0] * num_groups))
    return request


def derived_seed(engine_seed: int, number: int) -> int:
    """64-bit seed of request `number` in an engine of that seed; neighbours share nothing."""
    text = f"jpaged request seed {engine_seed % SEED_MODULUS} {number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
