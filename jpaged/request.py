"""The nouns of the host core: a request is one prompt with one or more samples, each a sequence of tokens.

Knows tokens, pages and states; neither arrays nor text. A request without a seed of its own draws from (engine seed,
request number), so that the same requests in the same order give the same text. Each field has one writer besides
creation, which is named above the fields; `tests/jpaged/test_request.py` holds that.
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field
from typing import Any, Protocol

from .messages import ResultForm, Scoring
from .outputs import Logprob
from .sampling.sampling_params import SampleMode, SamplingParams, sample_mode

SEED_MODULUS = 1 << 64


class RequestState(enum.Enum):
    """The state of a request or a sequence, as (word for logs, finish reason for the caller or None if not ended)."""

    WAITING = "waiting", None
    RUNNING = "running", None
    SWAPPED = "swapped", None
    FINISHED_STOPPED = "stopped", "stop"
    FINISHED_LENGTH = "at full length", "length"
    FINISHED_ABORTED = "aborted", "abort"
    FINISHED_IGNORED = "ignored", "error"
    """The request was accepted, and later found to need more pages than the pool has left, or what will never be there.
    """
    FINISHED_ERROR = "failed", "error"

    def __init__(self, label: str, finish_reason: str | None):
        self.label = label
        self.finish_reason = finish_reason
        self.is_finished = finish_reason is not None


@dataclass(frozen=True, slots=True)
class CacheKey:
    """All that keys and values depend on besides tokens: requests with different cache keys share no page."""

    lora_name: str | None = None
    lora_version: int = 0
    """How often an adapter has been loaded under this name."""
    cache_salt: str | None = None
    """A tenant's secret: other tenants cannot learn from latency which prompts are cached."""
    weights_version: int = 0
    items: tuple[tuple[int, bytes], ...] = ()
    """(position, content hash) of what stands in for tokens, such as images, in order of position."""


NO_EXTRAS = CacheKey()
"""The cache key of a request whose keys and values depend on its tokens alone."""


class SampleSearch(Protocol):
    """The part of a search over the samples of one request, such as a beam search, that the scheduler uses."""

    @property
    def is_over(self) -> bool:
        """Return whether the search has ended, so that its samples have no next token."""

    def forget_rows(self) -> None:
        """Drop the scores collected since the last choice: the samples lose their pages and compute them anew."""


@dataclass(slots=True)
class SequencePrefix:
    """What the prefix cache knows of one sequence."""

    hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the first full pages, as far as they were needed."""
    num_published: int = 0
    """Full pages already offered to the prefix cache."""
    passed_pages: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(group, index) → (device page, how often it had been taken), for pages that a window passed before the sequence
    was known to be sound. They are published then, unless they have been taken since."""


@dataclass(slots=True)
class AdmissionState:
    """What the last check of a waiting or swapped request found out."""

    pages_needed: int = 0
    """Free pages that the request needs. It is checked again when so many are free, or when the prefix cache has the
    page of `missing_hash`."""
    missing_hash: bytes | None = None
    """Hash of the first page that the prefix cache lacked."""
    awaits_prefix: bool = False
    """Whether the request waits for a running one to publish most of what it would otherwise compute once more."""
    num_bypassed: int = 0
    """Later requests that were admitted before this one, because it did not fit yet or awaited a prefix."""


@dataclass(slots=True)
class PromptScores:
    """Logprobs of a request's prompt, as far as they are scored."""

    entries: list[dict[int, Logprob] | None] | tuple[dict[int, Logprob] | None, ...] = ()
    """One entry per token; a tuple before the first is scored and once all are shown."""
    are_shown: bool = False
    """Whether they were sent already, in a stream of deltas."""


@dataclass(eq=False, slots=True)
class SampleSequence:
    """One sample of a request: its tokens so far, how many of them are computed, and its pages."""

    # Fixed at creation.
    request: Request
    index: int
    """The sample index, which the random draws depend on."""
    max_len: int
    """Tokens that the sample has when it ends by length: its prompt and `Request.max_tokens` output tokens."""
    stop_ids: frozenset[int]
    """Tokens that end the sample."""

    # Written by core/step_results.
    token_ids: array[int]
    """Prompt and output tokens, as far as the host knows them. An array: lists of 10⁵ queued requests would keep the
    garbage collector busy. A sample that is scored has all its tokens but the last from the start."""

    # Written by research/weight_updates.
    weight_versions: list[tuple[int, int]]
    """(index of the first output token drawn with this version, version) for each version of the weights."""

    # Written by scheduling/progress.
    num_tokens: int
    """Tokens that exist: those that steps in flight draw count, and the host does not know them yet."""
    num_computed: int = 0
    """Tokens whose keys and values are in the pages once every step scheduled so far is done."""
    decode_limit: int = 0
    """Tokens that may be computed before the scheduler must check the sequence again: its pages reach so far, it alone
    owns the page that it writes, and its last token is on the device. A sequence below the limit decodes."""
    check_at_len: int = 0
    """Until the host knows more than this many tokens, a new one can neither end the sequence by length nor show that
    a page is full, and is appended without a closer look."""
    is_last_token_on_device: bool = False
    """Whether its last token was drawn in the state slot that it holds, where the next step reads it."""
    last_chunk_step: int = 0
    """Number of the last step that computed a chunk of the sequence, that is, tokens that the host knew."""

    # Written by core/step_results.
    numbers: object | None = None
    """`TokenNumbers` of the output tokens, for a request that asks for any; opaque to everything but its writer and
    those who make results of them."""

    # Written by scheduling/scheduler.
    num_scored: int = 0
    """Positions before this one need no score any more, in a sample that is scored."""

    # Written by scheduling/lifecycle.
    state: RequestState = RequestState.WAITING
    seq_slot: int = 0
    """State slot on the device; 0, the null slot, while it has none."""
    given_token: tuple[int, int] | None = None
    """(number of tokens before it, token id): the token that the sample draws there, whatever the logits are."""

    # Written by kv_cache/block_manager.
    pages: list[list[int]] = field(default_factory=list)
    """Page numbers in order of position, per page-table group; pages of the host pool while it is swapped out. The
    null page stands where a window has passed."""
    num_passed: list[int] = field(default_factory=list)
    """Leading pages of each group that a window has passed and that were given back."""

    # Written by kv_cache/prefix_cache.
    prefix: SequencePrefix = field(default_factory=SequencePrefix)

    # Written by kv_cache/sample_tree.
    parent: SampleSequence | None = None
    """The sample that it shares its first `fork_len` tokens with."""
    fork_len: int = 0
    awaits_parent: bool = False
    """Whether it waits to share pages with its parent, which has not computed their tokens yet."""

    # Written by text/output_processor.
    needs_every_token: bool = False
    """Whether every new token must be processed, for text or logprobs, and not only tokens that may end the sample."""
    stop_reason: int | str | None = None
    """The stop string or stop id that ended it; None for an EOS token."""
    output: object | None = None
    """Text and logprobs so far; opaque to everything but its writer."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    def token_given_after(self, num_tokens: int) -> int | None:
        """Return the token that follows the first `num_tokens` ones whatever the logits are; None if it is drawn."""
        if self.given_token is None or self.given_token[0] != num_tokens:
            return None
        return self.given_token[1]


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One prompt and its samples, which are admitted, preempted and resumed together.

    A new request waits, with `params.n` samples that are numbered from 0 unless `sample_indices` are given. All but the
    first wait for the first one to compute the prompt, and share its pages. `num_groups` counts page-table groups.
    """

    # Fixed at creation.
    request_id: str
    number: int
    """Counts requests from 0; part of the seed of a request without one."""
    prompt_token_ids: array[int]
    params: SamplingParams
    arrival_time: float
    """Seconds of the engine's clock, as all times below."""
    max_tokens: int
    """Most output tokens of a sample: as many as its parameters ask for, or as the context has room for."""
    engine_seed: InitVar[int]
    num_groups: InitVar[int]
    sample_indices: InitVar[Iterable[int] | None] = None
    prompt: str | None = None
    priority: int = 0
    """Lower is sooner, under the policy `priority`."""
    seed: int = field(init=False)
    """64 bits, from which every draw of this request comes."""
    mode: SampleMode = field(init=False)
    """How much a sampler has to compute for the request."""
    form: ResultForm = ResultForm.ENTRIES
    scoring: Scoring | None = None
    """What a request asks for that draws no token; None for other requests."""
    tempers_scores: bool = False
    """Whether its prompt's logprobs are computed at its temperature, whatever the engine's mode of logprobs."""
    is_streamed: bool = False
    """Whether its caller is shown each token as it comes."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a sample."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that may not be generated."""
    mark_ids: frozenset[int] = frozenset()
    """Tokens whose places in the text its outputs tell."""
    beams: SampleSearch | None = None
    """The search whose running beams its samples are: the host chooses their next tokens."""
    needs_prompt_scores: bool = field(init=False)
    """Whether its prompt's logprobs are wanted. Every prompt position must then be computed, not found in the cache."""
    sequences: list[SampleSequence] = field(default_factory=list)
    """All samples, ended ones too, in order of creation."""
    _prompt_tuple: tuple[int, ...] = ()

    # Written by research/weight_updates.
    cache_key: CacheKey = NO_EXTRAS
    weights_version: int = 0
    """The version of the weights that draw its next token, as their owner counts."""

    # Written by scheduling/lifecycle.
    state: RequestState = RequestState.WAITING
    error: str | None = None
    """Why it ended by an error."""
    has_mixed_pages: bool = False
    """Whether several versions of the weights have computed its pages. The prefix cache never offers such pages."""
    finished_time: float | None = None
    num_preemptions: int = 0
    num_swaps: int = 0
    """Preemptions among `num_preemptions` that moved its pages to the host pool."""

    # Written by scheduling/scheduler.
    num_scored: int = 0
    """Prompt positions that retired steps have computed, so that their scores are known."""
    first_scheduled_time: float | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache at the first admission."""

    # Written by scheduling/admission.
    policy_key: Any = None
    """The key that the scheduling policy gives it; None until the policy was asked."""
    order: tuple[Any, int] = (0, 0)
    """The sort key of requests: the policy's key, then the number of the arrival."""
    admission: AdmissionState = field(default_factory=AdmissionState)

    # Written by kv_cache/page_demand.
    fits_limits: tuple[int, int, int] | None = None
    """Available pages, number of pin changes and number of live samples at the last check that the request can run
    alone. It is checked again only when they change."""

    # Written by kv_cache/sample_tree.
    live: list[SampleSequence] = field(default_factory=list)
    """Samples that have not ended. The first one has no parent among them."""

    # Written by core/step_results.
    first_token_time: float | None = None
    failure: Exception | None = None
    """The exception that ended this request. Only the owner of the engine may see its text, which may quote other
    requests; `error` names its type."""

    # Written by core/engine_loop.
    last_token_time: float | None = None

    # Written by text/output_processor.
    prompt_scores: PromptScores = field(default_factory=PromptScores)
    grammar: object | None = None
    """A matcher of the grammar that its output follows, at the grammar's start; opaque to everything but its writer.
    None without a grammar."""

    def __post_init__(self, engine_seed: int, num_groups: int, sample_indices: Iterable[int] | None) -> None:
        """Fill the fields that `params` and the seed decide, and create the samples.

        `params.seed` is used if it is set, else a seed that is derived from `engine_seed` and the request's number. The
        samples have the indices `sample_indices`, or 0 to n − 1 for None. All but the first become children of the
        first sample: they share the whole prompt (`fork_len`), and wait until the first sample has computed it. Samples
        that are scored have all tokens of their continuations but the last, whose keys and values nobody reads.
        `num_groups` counts page-table groups. `prompt_token_ids` becomes an int32 array of the request's own.
        """
        params, self.prompt_token_ids = self.params, array("i", self.prompt_token_ids)
        self.seed = derived_seed(engine_seed, self.number) if params.seed is None else params.seed % SEED_MODULUS
        self.mode = sample_mode(params)
        self.needs_prompt_scores = params.prompt_logprobs is not None
        for index in range(params.n) if sample_indices is None else sample_indices:
            sequence = self.new_sequence(index, self.prompt_token_ids, num_groups)
            if self.scoring is not None:
                sequence.token_ids.frombytes(self.scoring.continuations[index])
                sequence.max_len = len(sequence.token_ids)
                sequence.token_ids.pop()
                sequence.num_tokens, sequence.num_scored = len(sequence.token_ids), self.first_scored
            first = self.sequences[0]
            if sequence is not first:
                # A sample that is scored computes the prompt's last token itself, whose logits score its next one.
                fork_len = self.prompt_len - (self.scoring is not None)
                sequence.parent, sequence.fork_len, sequence.awaits_parent = first, fork_len, True

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def first_scored(self) -> int:
        """Return the first position whose logits score a token of a continuation that is asked for."""
        return self.prompt_len - 1 + (0 if self.scoring is None else self.scoring.first)

    @property
    def awaits_each_token(self) -> bool:
        """Return whether the host must see each token before it can say what comes next, so that the device never
        draws several tokens of a sample by itself."""
        return self.is_streamed or self.beams is not None or self.grammar is not None

    @property
    def has_numbers(self) -> bool:
        """Return whether its logprobs are kept as numbers."""
        return self.form is not ResultForm.ENTRIES

    @property
    def prompt_tuple(self) -> tuple[int, ...]:
        """Return the prompt as a tuple, made once: a stream returns it with every token."""
        if not self._prompt_tuple:
            self._prompt_tuple = tuple(self.prompt_token_ids)
        return self._prompt_tuple

    def new_sequence(
        self, index: int, token_ids: array[int], num_groups: int, *, parent: SampleSequence | None = None
    ) -> SampleSequence:
        """Add a live sample with the index `index` and a copy of `token_ids`, and return it.

        It waits, has no pages, and has no parent in the tree of samples: the caller sets that. If `token_ids` are the
        first tokens of another sample, `parent`, the new sample also gets the weight versions that drew these.
        `num_groups` counts page-table groups.
        """
        max_len, num_passed = self.prompt_len + self.max_tokens, [0] * num_groups
        pages: list[list[int]] = [[] for _ in range(num_groups)]
        num_output_tokens = len(token_ids) - self.prompt_len
        versions = [] if parent is None else [one for one in parent.weight_versions if one[0] < num_output_tokens]
        if not versions or versions[-1][1] != self.weights_version:
            versions.append((max(0, num_output_tokens), self.weights_version))
        sample = SampleSequence(
            request=self,
            index=index,
            max_len=max_len,
            stop_ids=self.stop_ids,
            token_ids=token_ids[:],
            weight_versions=versions,
            num_tokens=len(token_ids),
            pages=pages,
            num_passed=num_passed,
        )
        self.sequences.append(sample)
        self.live.append(sample)
        return sample


def derived_seed(engine_seed: int, number: int) -> int:
    """Return the 64-bit seed of request `number` in an engine of that seed; seeds of neighbours share nothing."""
    text = f"jpaged request seed {engine_seed % SEED_MODULUS} {number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
