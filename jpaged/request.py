"""The nouns of the host core: a request is a group of sequences over one prompt.

Knows tokens, pages and states; neither arrays nor text. A request without a seed of its own draws from
(engine seed, request number), so that the same inputs in the same order give the same text.
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .prefix_hash import NO_EXTRAS, CacheKey

if TYPE_CHECKING:
    from .beam_search import BeamSearch
    from .output_processor import SequenceOutput
    from .outputs import Logprob
    from .sampling_params import SamplingParams

SEED_MODULUS = 1 << 64


class RequestState(enum.Enum):
    """Where a request or a sequence stands: what to call it, and the finish reason that its caller is told."""

    WAITING = "waiting", None
    RUNNING = "running", None
    SWAPPED = "swapped", None
    FINISHED_STOPPED = "stopped", "stop"
    FINISHED_LENGTH = "at full length", "length"
    FINISHED_ABORTED = "aborted", "abort"
    FINISHED_IGNORED = "ignored", "error"
    """Admitted, and later found to need more pages than the pool has left."""
    FINISHED_ERROR = "failed", "error"

    def __init__(self, label: str, finish_reason: str | None):
        self.label = label
        self.finish_reason = finish_reason
        self.is_finished = finish_reason is not None


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request: its tokens so far, how many are computed, and its pages."""

    request: Request
    index: int
    """Sample index, which the random draws depend on."""
    token_ids: array[int]
    """Prompt and output tokens, as far as the host knows them. An array: with 10⁵ requests in the queue, lists
    would be what the garbage collector spends its time on."""
    pages: list[list[int]]
    """Page numbers in order of position, per page-table group; of the host pool while it is swapped out. The
    null page stands where a window has passed."""
    num_tokens: int
    """Tokens that exist: those that steps in flight draw are counted, and the host does not know them yet."""
    max_len: int
    """Tokens that it ends with, whatever it draws: its prompt and the output tokens it was promised."""
    num_computed: int = 0
    """Tokens whose keys and values are in the pages, once every step dispatched so far is done."""
    granted: int = 0
    """Tokens that it may have computed before the scheduler must look at it again: its pages reach so far, the
    page it writes is its own, and its last token is on the device. A sequence below it just decodes."""
    slot: int = 0
    """State slot on the device; 0, the null slot, when it has none."""
    next_check: int = 0
    """Known tokens from which on a new token is looked at: until then it can neither end the sequence by length
    nor fill a page."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that may end it."""
    is_watched: bool = False
    """Its output processor wants to see every token: for text or logprobs."""
    is_last_token_on_device: bool = False
    """Its last token was drawn in the slot it holds: the step takes it from there."""
    last_chunk_step: int = 0
    """The last step that computed tokens of it which the host knew."""
    parent: Sequence | None = None
    """The sequence it shares its first `fork_len` tokens with."""
    fork_len: int = 0
    awaits_parent: bool = False
    """Its first pages will be its parent's, which has still to compute them."""
    num_passed: list[int] = field(default_factory=list)
    """Leading pages of each group that a window has left behind and that were given back."""
    page_hashes: list[bytes] = field(default_factory=list)
    """Chained hash of each full page, as far as it was needed."""
    num_published: int = 0
    """Full pages already offered to the prefix cache."""
    state: RequestState = RequestState.WAITING
    stop_reason: int | str | None = None
    output: SequenceOutput | None = None
    """Text and logprobs, which the output processor keeps here."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    def forget_pages(self) -> None:
        """It owns no page and no slot any more: the caller has given them to others."""
        for pages in self.pages:
            pages.clear()
        self.num_passed = [0] * len(self.pages)
        self.num_computed = self.num_published = self.next_check = self.slot = self.granted = 0
        self.is_last_token_on_device = False


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and its samples. They are admitted, preempted and resumed together."""

    request_id: str
    number: int
    """Counts requests from 0; part of the seed of a request without one."""
    prompt_token_ids: array[int]
    params: SamplingParams
    arrival_time: float
    max_tokens: int
    """Output tokens at most: the parameter, or what the context has left."""
    seed: int
    """64 bits, from which every draw of this request comes."""
    prompt: str | None = None
    priority: int = 0
    """Lower is sooner, under the policy `priority`."""
    cache_key: CacheKey = NO_EXTRAS
    """What besides tokens its keys and values depend on."""
    is_plain: bool = True
    """Its tokens may be drawn several at a time: no step of the host's, no rule and no logprob comes between."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Tokens that may not come out one after another."""
    beams: BeamSearch | None = None
    """Its samples are the running beams of this search: each waits for the host to choose its next token."""
    needs_prompt_scores: bool = False
    """Its prompt's logprobs are wanted: no position of the prompt may be left to the prefix cache."""
    num_scored: int = 0
    """Prompt positions whose scores have been delivered."""
    prompt_logprobs: list[dict[int, Logprob] | None] | tuple[dict[int, Logprob] | None, ...] = ()
    """Of the prompt's tokens, as far as they have been scored; a tuple before the first and when a caller has seen
    all. Kept by the output processor."""
    are_prompt_logprobs_told: bool = False
    sequences: list[Sequence] = field(default_factory=list)
    """All samples, those that ended too, in the order they came."""
    live: list[Sequence] = field(default_factory=list)
    """Samples that have not ended. The first one has no parent among them."""
    state: RequestState = RequestState.WAITING
    policy_key: Any = None
    """What the policy makes of it; None until it is asked."""
    order: tuple[Any, int] = (0, 0)
    """What the scheduler sorts by: the policy's key, then arrival."""
    pages_wanted: int = 0
    """Free pages that the last look at it found to be needed. It is looked at again when they are there, or when
    the prefix cache has what it then lacked:"""
    next_hash: bytes | None = None
    """Hash of the first page that the prefix cache did not have."""
    awaits_prefix: bool = False
    """Somebody who runs is about to publish most of what it would compute once more."""
    fits_under: tuple[int, int, int] | None = None
    """Under which conditions it was found that it could run if it were alone."""
    num_bypassed: int = 0
    """Later requests that were admitted before it: they fitted and it did not, or it waited for a prefix."""
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_swaps: int = 0
    """Preemptions among them that went to the host pool."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    error: str | None = None
    _prompt_tuple: tuple[int, ...] = ()

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def prompt_tuple(self) -> tuple[int, ...]:
        """The prompt as its caller gets it back, made once: a stream shows it with every token."""
        if not self._prompt_tuple:
            self._prompt_tuple = tuple(self.prompt_token_ids)
        return self._prompt_tuple

    def new_sequence(self, index: int, token_ids: array[int], num_groups: int) -> Sequence:
        """Another sample, with a copy of these tokens; the caller says what it shares and with whom."""
        sequence = Sequence(
            request=self,
            index=index,
            token_ids=token_ids[:],
            pages=[[] for _ in range(num_groups)],
            num_tokens=len(token_ids),
            max_len=self.prompt_len + self.max_tokens,
            num_passed=[0] * num_groups,
        )
        self.sequences.append(sequence)
        self.live.append(sequence)
        return sequence


def make_request(
    *,
    request_id: str,
    number: int,
    prompt_token_ids: SequenceOf[int],
    params: SamplingParams,
    arrival_time: float,
    max_tokens: int,
    engine_seed: int,
    num_groups: int,
    prompt: str | None = None,
    priority: int = 0,
    cache_key: CacheKey = NO_EXTRAS,
    bad_words: tuple[tuple[int, ...], ...] = (),
    beams: BeamSearch | None = None,
    sample_indices: Iterable[int] | None = None,
) -> Request:
    """A waiting request with its `params.n` sequences; their sample indices count from 0 unless they are given.

    All but the first wait for the first one to compute the prompt, and share its pages.
    """
    request = Request(
        request_id=request_id,
        number=number,
        prompt_token_ids=array("i", prompt_token_ids),
        params=params,
        arrival_time=arrival_time,
        max_tokens=max_tokens,
        seed=params.seed % SEED_MODULUS if params.seed is not None else derived_seed(engine_seed, number),
        prompt=prompt,
        priority=priority,
        cache_key=cache_key,
        is_plain=params.logprobs is None and not params.has_rules,
        bad_words=bad_words,
        beams=beams,
        needs_prompt_scores=params.prompt_logprobs is not None,
    )
    for index in range(params.n) if sample_indices is None else sample_indices:
        sequence = request.new_sequence(index, request.prompt_token_ids, num_groups)
        first = request.sequences[0]
        if sequence is not first:
            sequence.parent, sequence.fork_len, sequence.awaits_parent = first, request.prompt_len, True
    return request


def derived_seed(engine_seed: int, number: int) -> int:
    """64-bit seed of request `number` in an engine of that seed; neighbours share nothing."""
    text = f"jpaged request seed {engine_seed % SEED_MODULUS} {number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
