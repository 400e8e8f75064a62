"""The parameters of sampling and of beam search. A value is checked as soon as an object is made.

`SamplingParams` is the one table of sampling parameters.

To add a parameter, add a field here and compute with it: in `sampler.py` if it has a column of its own, in
`logit_rules.py` if it is a rule.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from ..checks import INT64, CheckedFields, Unfit, boolean, described, integer, is_number, number, or_none
from ..errors import InvalidRequestError
from ..limits import ceiling
from ..structured_outputs import StructuredOutputsParams, structured_outputs
from .parameter import Column, Flag, arguments, biases, parameter, some_token_ids, stop_strings, token_ids, words

INT32, FLOAT32, RULE = Column
GREEDY_TEMPERATURE = 1e-5
MAX_SAMPLES = ceiling("samples")
MAX_MIN_TOKENS = 1 << 24
"""`min_tokens` travels as a float32, which holds every integer up to this one."""
MAX_LENGTH_PENALTY = 10.0


class RequestOutputKind(enum.Enum):
    """Selects what the outputs of a step hold: everything so far, only what is new, or nothing before the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


def _output_kind(value: Any) -> RequestOutputKind:
    """Take a RequestOutputKind, or its value, such as "delta". Raises Unfit for anything else."""
    try:
        return RequestOutputKind(value)
    except ValueError:
        raise Unfit(f"one of {', '.join(kind.value for kind in RequestOutputKind)}") from None


def _seed(value: Any) -> int | None:
    """Take a seed of 64 bits; −1 means none, as it does in vLLM."""
    seed = or_none(integer(*INT64))(value)
    return None if seed == -1 else seed


def _zero(value: Any) -> float:
    if not is_number(value) or value != 0:
        raise Unfit("0, since a search draws nothing", "sample with SamplingParams")
    return float(value)


def _early_stopping(value: Any) -> bool | str:
    if not isinstance(value, bool) and value != "never":
        raise Unfit("true, false or never")
    return value


class RequestParams:
    """Base of the parameters that a request may have: SamplingParams, BeamSearchParams."""


@described
@dataclass(frozen=True, kw_only=True)
class SamplingParams(CheckedFields, RequestParams, kind="parameter", error=InvalidRequestError):
    """How one request is sampled. Raises InvalidRequestError naming the field, the value and what is allowed.

    Logits are changed in this order: `allowed_token_ids`, `bad_words`, `min_tokens`, `logit_bias`, the engine's
    `logits_processors`, `repetition_penalty`, `frequency_penalty`, `presence_penalty`, and what `structured_outputs`
    allow. Then come `temperature`, `min_p`, `top_k` and `top_p`, each over the tokens that the one before left.
    """

    n: int = parameter(
        1,
        integer(1, MAX_SAMPLES),
        "samples of the prompt, 1 to 128, which share its pages; all equal where the most likely token is taken",
        Flag("N", ("--num-samples",)),
    )
    presence_penalty: float = parameter(
        0.0, number(-2.0, 2.0), "subtract this from the logit of each token that the output holds", Flag("X"), RULE
    )
    frequency_penalty: float = parameter(
        0.0,
        number(-2.0, 2.0),
        "subtract this from a token's logit once for each time that the output holds it",
        Flag("X"),
        RULE,
    )
    repetition_penalty: float = parameter(
        1.0,
        number(1e-6, 1e6),  # Beyond that, a logit would leave the range of a float32.
        "divide the logit of each token of prompt or output by this, or multiply it where it is negative; 1 is off",
        Flag("X"),
        RULE,
    )
    temperature: float = parameter(
        1.0,
        number(0.0, 2.0),
        "divide the logits by this, 0 to 2; below 1e-5 the most likely token is taken (greedy)",
        Flag("X", default="the model's"),
        FLOAT32,
    )
    top_p: float = parameter(
        1.0,
        number(0.0, 1.0),
        "keep the fewest most likely tokens whose probabilities sum up to this; 0 keeps the likeliest one alone, "
        "1 keeps all",
        Flag("X"),
        FLOAT32,
    )
    top_k: int = parameter(
        0, integer(-1), "keep this many of the most likely tokens; 0 and -1 keep all", Flag("N"), INT32
    )
    min_p: float = parameter(
        0.0,
        number(0.0, 1.0),
        "keep tokens whose probability is at least this share of the likeliest one's; 0 keeps all",
        Flag("X"),
        FLOAT32,
    )
    seed: int | None = parameter(
        None,
        _seed,
        "fix the draws, whatever else is in the batch; default, and -1: by the engine's seed and the request's number",
        Flag("N"),
    )
    stop: str | tuple[str, ...] | list[str] | None = parameter(
        None, stop_strings, "end before the first of these texts; at most 16", Flag("TEXT")
    )
    stop_token_ids: tuple[int, ...] | list[int] | None = parameter(
        None, token_ids, "end at one of these token ids, beside the model's end-of-sequence tokens", Flag("ID")
    )
    ignore_eos: bool = parameter(False, boolean, "go on past the model's end-of-sequence tokens", Flag(""))
    max_tokens: int | None = parameter(
        16,
        or_none(integer(1)),
        "most tokens to generate; none: to the end of the reply or of the context",
        Flag("N", ("-n", "--max-tokens"), default="none"),
    )
    """16 is vLLM's default."""
    min_tokens: int = parameter(
        0, integer(0, MAX_MIN_TOKENS), "nothing ends the output before it has so many tokens", Flag("N"), RULE
    )
    logprobs: int | None = parameter(
        None,
        or_none(integer(-1)),
        "give the logprob of each drawn token and of this many most likely ones; -1: of the vocabulary, if the "
        "engine's max_logprobs is -1",
        Flag("N"),
    )
    prompt_logprobs: int | None = parameter(
        None,
        or_none(integer(-1)),
        "give the logprob of each token of the prompt but the first, and of this many most likely ones; -1: as for "
        "logprobs",
        Flag("N"),
    )
    log_kept_mass: bool = parameter(
        False,
        boolean,
        "give for each drawn token the logarithm of the probability that min_p, top_k and top_p have left, at the "
        "request's temperature; needs logprobs",
    )
    """A tempered logprob minus this is the logprob of what was drawn from."""
    detokenize: bool = parameter(True, boolean, "give text; without it token ids alone, and stop must be empty")
    skip_special_tokens: bool = parameter(True, boolean, "leave special tokens out of the text")
    spaces_between_special_tokens: bool = parameter(
        True, boolean, "keep the space that some tokenizers write between two special tokens that are not skipped"
    )
    include_stop_str_in_output: bool = parameter(
        False, boolean, "end the text with the stop string that ended it, instead of before it"
    )
    output_kind: RequestOutputKind = parameter(
        RequestOutputKind.CUMULATIVE,
        _output_kind,
        "what the outputs of a step hold: cumulative, delta (what is new) or final_only (nothing before the end)",
    )
    logit_bias: Mapping[int, float] | None = parameter(
        None,
        or_none(biases),
        "add these numbers to logits, by token id, -100 to 100; at most 1024",
        Flag("ID=X"),
        is_rule=True,
        hash=False,
    )
    allowed_token_ids: tuple[int, ...] | list[int] | None = parameter(
        None, or_none(some_token_ids), "generate these tokens only", Flag("ID"), is_rule=True
    )
    bad_words: tuple[str, ...] | list[str] | None = parameter(
        None,
        words,
        "never generate the tokens of these texts, with or without a space before each; other tokens may still spell "
        "them; at most 128",
        Flag("TEXT"),
        is_rule=True,
    )
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = parameter(
        None,
        or_none(structured_outputs),
        "what the output must look like: a StructuredOutputsParams, or a mapping of its fields",
    )
    thinking_token_budget: int | None = parameter(
        None,
        or_none(integer(0, INT64[1])),
        "end each thought behind so many tokens, its marks not counted; 0: at once",
        Flag("N"),
    )
    extra_args: Mapping[str, float] | None = parameter(
        None, or_none(arguments), "arguments of the engine's logits_processors, by name", is_rule=True, hash=False
    )

    def __post_init__(self) -> None:
        """Check each field by its own rule, then the pairs of fields that exclude each other.

        Raises InvalidRequestError if a rule refuses a value, for `min_tokens` above `max_tokens`, for `log_kept_mass`
        without `logprobs`, and for `stop` without `detokenize`.
        """
        self._check_fields()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            self._refuse("min_tokens", f"at most max_tokens, {self.max_tokens}", "lower it or raise max_tokens")
        if self.log_kept_mass and self.logprobs is None:
            self._refuse("log_kept_mass", "false without logprobs", "give logprobs=0")
        if self.stop and not self.detokenize:
            self._refuse("stop", "none while detokenize is false, since stop strings are found in the text")

    def end_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end a sample, for a model with these end-of-sequence tokens."""
        ends = frozenset() if self.ignore_eos else eos_token_ids
        return ends.union(self.stop_token_ids or ())

    @property
    def is_greedy(self) -> bool:
        """Return whether the most likely token is taken instead of drawing one."""
        return self.temperature < GREEDY_TEMPERATURE

    @cached_property
    def has_rules(self) -> bool:
        """Return whether logits are changed by more than temperature and truncation."""
        return any((value := getattr(self, name)) and value != default for name, default in _RULE_DEFAULTS.items())


@described
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams(CheckedFields, RequestParams, kind="parameter", error=InvalidRequestError):
    """How one request is searched. Raises InvalidRequestError naming the field, the value and what is allowed.

    The `beam_width` best continuations go on together. The outputs are the best ones that have ended, best first, by
    the sum of their tokens' logprobs / length ** `length_penalty`.
    """

    beam_width: int = parameter(
        MISSING, integer(1, MAX_SAMPLES), "beam search: beams that go on together, and outputs, best first", Flag("N")
    )
    max_tokens: int | None = parameter(
        MISSING, or_none(integer(1)), "most tokens to generate; none: to the end of the context"
    )
    ignore_eos: bool = parameter(False, boolean, "go on past the model's end-of-sequence tokens")
    temperature: float = parameter(0.0, _zero, "0, since a search draws nothing")
    length_penalty: float = parameter(
        1.0,
        number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
        "beam search: compare beams by their logprob / length ** this; above 0 favours longer outputs",
        Flag("X", default="1"),
    )
    early_stopping: bool | str = parameter(
        False,
        _early_stopping,
        "true: end as soon as beam_width beams have ended; false: when no running beam is better at its present "
        "length; never: when none can become better at any length",
    )

    def __post_init__(self) -> None:
        self._check_fields()

    @property
    def n(self) -> int:
        """Return the number of beams that go on together."""
        return self.beam_width

    def end_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end a beam, for a model with these end-of-sequence tokens."""
        return frozenset() if self.ignore_eos else eos_token_ids

    def num_top_tokens(self, num_end_ids: int) -> int:
        """Return how many most likely next tokens of one beam a step needs: `beam_width` + `num_end_ids`.

        `num_end_ids` tokens end a beam. Even if all of them are among the most likely tokens, `beam_width` tokens that
        continue the beam are left: with 4 beams and 2 tokens that end them, 6 are needed.
        """
        return self.beam_width + num_end_ids

    def as_samples(self, num_top_tokens: int) -> SamplingParams:
        """Return the sampling parameters of the request that computes this beam search: one sample per running beam.

        Each step gives the logprobs of the `num_top_tokens` most likely next tokens of each beam. The search chooses
        among them on the host, so what the samples draw does not matter. Text is not decoded, and there are no outputs
        before the end. `max_tokens` and `ignore_eos` are those of the search; all other parameters have their defaults.
        """
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=num_top_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


class SampleMode(enum.Enum):
    """How much a sampler computes. Each mode has its own executables, and also computes what the modes before it do."""

    GREEDY = "greedy"
    RANDOM = "random"
    SCORED = "scored"
    """Random draws, with the logprobs of the tokens drawn and of no others."""
    FULL = "full"
    """Random draws under rules, with all logprobs."""


MODES = tuple(SampleMode)
"""Sampling modes in ascending order: each can do what the ones before it do."""


def sample_mode(params: SamplingParams | BeamSearchParams) -> SampleMode:
    """Return the first mode that computes what these parameters ask for."""
    if isinstance(params, BeamSearchParams) or params.logprobs or params.has_rules or params.log_kept_mass:
        return SampleMode.FULL
    if params.logprobs == 0:
        return SampleMode.SCORED
    return SampleMode.GREEDY if params.is_greedy else SampleMode.RANDOM


FIELDS = tuple(one.name for one in fields(SamplingParams))
INTEGER_FIELDS = tuple(one.name for one in fields(SamplingParams) if one.type in ("int", "int | None"))
"""Parameters that are one integer."""
_RULE_DEFAULTS = {one.name: one.default for one in fields(SamplingParams) if one.metadata["is_rule"]}


def parameters_in(column: Column) -> tuple[str, ...]:
    """Return the names of the parameters that travel to the device in this way, in the order of the table."""
    return tuple(one.name for one in fields(SamplingParams) if one.metadata["column"] is column)


class ScoreKind(NamedTuple):
    """What is computed for tokens that are scored and not drawn. Tokens of one kind share a program."""

    num_tops: int = 0
    """Most likely tokens beside each token; −1: the logprobs of the whole vocabulary."""
    num_asked: int = 0
    """Other tokens whose logprobs are given at each place."""
    is_hidden: bool = False
    """Whether the hidden state is given, and no logits are computed."""

    def padded(self, max_logprobs: int) -> ScoreKind:
        """Return the kind of the program that serves this one: counts are rounded up to one of COUNTS.

        `max_logprobs` is the engine's limit, −1 for none.
        """
        counts = _padded(self.num_tops, max_logprobs), _padded(self.num_asked, max_logprobs)
        return ScoreKind(*counts, is_hidden=self.is_hidden)


OWN_SCORE = ScoreKind()
"""The logprob and the rank of each token alone."""
COUNTS = (64, 256, 1024)
"""Numbers of tokens at one place that have programs, up to the engine's `max_logprobs`, which has one too."""


def _padded(count: int, max_logprobs: int) -> int:
    """Return the smallest number of tokens with a program that is not below `count`; 0 and −1 stay as they are.

    Beyond COUNTS it is the limit `max_logprobs`, so −1, the whole vocabulary, where there is none.
    """
    if count <= 0:
        return count
    rounded = next((number for number in COUNTS if number >= count), max_logprobs)
    return rounded if max_logprobs < 0 else min(rounded, max_logprobs)


def score_kinds(max_logprobs: int) -> set[ScoreKind]:
    """Return the kinds that have programs in an engine with this limit, −1 for none."""
    counts = {_padded(count, max_logprobs) for count in (0, *COUNTS, COUNTS[-1] + 1)}
    asked = {ScoreKind(num_asked=count) for count in counts if count > 0}
    return {ScoreKind(count) for count in counts} | asked | {ScoreKind(is_hidden=True)}
