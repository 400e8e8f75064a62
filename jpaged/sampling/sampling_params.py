"""What a caller asks of the sampler, checked as soon as it is said."""

from __future__ import annotations

import difflib
import enum
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, NoReturn

from .errors import InvalidRequestError

GREEDY_TEMPERATURE = 1e-5
MAX_SAMPLES = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_TOKEN_ID = (1 << 31) - 1
MAX_MIN_TOKENS = 1 << 24
"""Float32, in which it travels, holds every integer up to there."""
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_BAD_WORDS = 128
MAX_LENGTH_PENALTY = 10.0
MAX_FLOAT = 3.4028234663852886e38
"""Of a float32."""
SEED_RANGE = (-(1 << 63), (1 << 63) - 1)

NOT_BUILT = ("structured_outputs",)
"""Parameters of the full interface that this version refuses by name."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


class RequestOutputKind(enum.Enum):
    """What the outputs of a step hold: all so far, what is new, or nothing before the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


class _Checked:
    """What is common to parameters: each field is checked as soon as it is said."""

    def _integer(self, name: str, low: int, high: int | None) -> None:
        value = getattr(self, name)
        if not is_integer(value) or value < low or (high is not None and value > high):
            self._refuse(name, f"an integer ≥ {low}" if high is None else f"an integer in [{low}, {high}]")
        object.__setattr__(self, name, int(value))

    def _number(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        # A NaN compares false with everything.
        if not _is_number(value) or not low <= value <= high or (open_low and value == low):
            self._refuse(name, f"a number in {'(' if open_low else '['}{low:g}, {high:g}]")
        # Adding zero makes 0.0 of −0.0: thresholds are compared by their bits.
        object.__setattr__(self, name, float(value) + 0.0)

    def _refuse(self, name: str, allowed: str) -> NoReturn:
        raise InvalidRequestError(f"{name}: got {shown(getattr(self, name))}, allowed: {allowed}", param=name)


@dataclass(frozen=True, kw_only=True)
class SamplingParams(_Checked):
    """How one request is sampled. Raises InvalidRequestError naming the field, the value and what is allowed.

    `n` samples share the prompt, and each has its own draws. `temperature` below 1e-5 is greedy. `top_k` 0 or −1
    is off. `max_tokens` None runs to the end of the context. `seed` fixes the draws of this request whatever it
    shares a batch with; without one (or −1) they come from the engine's seed and the request's number.

    Rules change the logits before that, in this order: `allowed_token_ids` leaves these tokens only; `bad_words`
    may not come out, each with and without a space before it; the first `min_tokens` tokens end nothing, by EOS, by a
    stop id or by a stop string; `logit_bias` is added by token id; then a token that was in the prompt or the output
    has its logit divided by `repetition_penalty` (multiplied where negative), one that was in the output is lowered by
    `presence_penalty`, and by `frequency_penalty` each time. `extra_args` are arguments of the engine's own
    `logits_processors`.

    `logprobs` k asks for the sampled token's logprob and the k highest, `prompt_logprobs` for the same of the prompt;
    −1 is all of the vocabulary, where the engine's `max_logprobs` is −1. `stop` strings end the text before them,
    unless `include_stop_str_in_output`. `spaces_between_special_tokens` False leaves out the space that some
    tokenizers write between two special tokens in a row, where these are not skipped.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[str, ...] | list[str] | None = None
    extra_args: Mapping[str, float] | None = field(default=None, hash=False)

    def __new__(cls, **values: Any) -> SamplingParams:
        """Refuse unknown names with the nearest known one, where a dataclass would say `unexpected keyword`."""
        for name in values:
            check_name(name)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._integer("n", 1, MAX_SAMPLES)
        self._number("temperature", 0.0, 2.0)
        if self.n > 1 and self.is_greedy:
            self._refuse("n", f"1 when sampling greedily: at temperature {self.temperature:g} all are equal; raise it")
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        # Beyond, no logit would be left that a float32 holds.
        self._number("repetition_penalty", 1e-6, 1e6)
        self._number("top_p", 0.0, 1.0, open_low=True)
        self._integer("top_k", -1, None)
        self._number("min_p", 0.0, 1.0)
        if self.seed is not None:
            self._integer("seed", *SEED_RANGE)
            if self.seed == -1:  # As vLLM has it.
                object.__setattr__(self, "seed", None)
        if self.max_tokens is not None:
            self._integer("max_tokens", 1, None)
        self._integer("min_tokens", 0, min(self.max_tokens or MAX_MIN_TOKENS, MAX_MIN_TOKENS))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._integer(name, -1, None)
        for name in BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "true or false")
        object.__setattr__(self, "stop", self._stops())
        object.__setattr__(self, "stop_token_ids", self._token_ids("stop_token_ids") or ())
        object.__setattr__(self, "allowed_token_ids", self._token_ids("allowed_token_ids"))
        object.__setattr__(self, "bad_words", self._bad_words())
        object.__setattr__(self, "logit_bias", self._logit_bias())
        object.__setattr__(self, "extra_args", self._extra_args())
        object.__setattr__(self, "output_kind", self._output_kind())
        if self.stop and not self.detokenize:
            self._refuse("stop", "none while detokenize is false: stop strings are found in the text")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_rules(self) -> bool:
        """Its logits are changed by more than temperature and truncation."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.min_tokens
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.extra_args
        )

    def _stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else () if self.stop is None else self.stop
        if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) and stop for stop in stops):
            self._refuse("stop", "a non-empty string or a list of them")
        if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
            self._refuse("stop", f"at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters")
        if any("\ud800" <= character <= "\udfff" for stop in stops for character in stop):
            self._refuse("stop", "strings of whole characters; a lone surrogate stands in no text")
        return tuple(map(str, stops))

    def _token_ids(self, name: str) -> tuple[int, ...] | None:
        ids = getattr(self, name)
        if ids is None:
            return None
        if not isinstance(ids, list | tuple) or not all(is_integer(i) and i >= 0 for i in ids):
            self._refuse(name, "a list of token ids ≥ 0")
        if not ids and name == "allowed_token_ids":
            self._refuse(name, "at least one token id; leave it out to allow all")
        return tuple(map(int, ids))

    def _bad_words(self) -> tuple[str, ...]:
        words = () if self.bad_words is None else self.bad_words
        if not isinstance(words, list | tuple) or not all(isinstance(word, str) and word.strip() for word in words):
            self._refuse("bad_words", "a list of strings that are not empty or all spaces")
        if len(words) > MAX_BAD_WORDS:
            self._refuse("bad_words", f"at most {MAX_BAD_WORDS} words")
        return tuple(map(str, words))

    def _logit_bias(self) -> dict[int, float] | None:
        """Token ids may be written out as strings, as the keys of JSON are."""
        given = self.logit_bias
        if given is None:
            return None
        allowed = f"a mapping of token ids ≥ 0 to numbers in [{-MAX_BIAS:g}, {MAX_BIAS:g}]"
        if not isinstance(given, Mapping):
            self._refuse("logit_bias", allowed)
        if len(given) > MAX_BIASES:
            self._refuse("logit_bias", f"at most {MAX_BIASES} token ids")
        biases: dict[int, float] = {}
        for key, value in given.items():
            if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= len(str(MAX_TOKEN_ID)):
                key = int(key)
            is_id = is_integer(key) and 0 <= key <= MAX_TOKEN_ID
            if not is_id or not _is_number(value) or not -MAX_BIAS <= value <= MAX_BIAS:
                self._refuse("logit_bias", f"{allowed}; its entry {shown(key)}: {shown(value)} is none")
            if int(key) in biases:
                self._refuse("logit_bias", f"each token id once; it has {int(key)} twice")
            biases[int(key)] = float(value)
        return biases

    def _extra_args(self) -> dict[str, float] | None:
        if self.extra_args is None:
            return None
        given = self.extra_args.items() if isinstance(self.extra_args, Mapping) else [(None, None)]
        if not all(isinstance(name, str) and _is_number(value) and abs(value) <= MAX_FLOAT for name, value in given):
            self._refuse("extra_args", "a mapping of arguments of the engine's logits_processors to finite numbers")
        return {name: float(value) for name, value in self.extra_args.items()}

    def _output_kind(self) -> RequestOutputKind:
        try:
            return RequestOutputKind(self.output_kind)
        except ValueError:
            self._refuse("output_kind", f"one of {', '.join(kind.value for kind in RequestOutputKind)}")


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams(_Checked):
    """How one request is searched. Raises InvalidRequestError naming the field, the value and what is allowed.

    The `beam_width` best continuations go on together; outputs are the best that have ended, the best first, by the
    sum of their tokens' logprobs / length ** `length_penalty`. `max_tokens` None runs to the end of the context.
    `early_stopping`: True ends the search as soon as `beam_width` beams have ended, False when none that runs is better
    than they are as long as it is now, "never" when none can become better, however long.
    """

    beam_width: int
    max_tokens: int | None
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __new__(cls, **values: Any) -> BeamSearchParams:
        """Refuse unknown names with the nearest known one, where a dataclass would say `unexpected keyword`."""
        known = [one.name for one in fields(cls)]
        for name in values:
            if name not in known:
                raise _unknown(name, known)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._integer("beam_width", 1, MAX_SAMPLES)
        if self.max_tokens is not None:
            self._integer("max_tokens", 1, None)
        if not isinstance(self.ignore_eos, bool):
            self._refuse("ignore_eos", "true or false")
        if not _is_number(self.temperature) or self.temperature != 0:
            self._refuse("temperature", "0: a search draws nothing; sample with SamplingParams")
        self._number("length_penalty", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            self._refuse("early_stopping", "true, false or never")

    @property
    def n(self) -> int:
        """Beams run together."""
        return self.beam_width

    def end_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Tokens that end a beam, of a model with these end-of-sequence tokens."""
        return frozenset() if self.ignore_eos else eos_token_ids

    def num_candidates(self, num_end_ids: int) -> int:
        """Continuations that each token is chosen from, where so many tokens end a beam."""
        return max(2, 1 + num_end_ids) * self.beam_width

    def num_of_beam(self, num_end_ids: int) -> int:
        """The most of one beam that may be needed: among them are as many that go on as there are beams."""
        return self.beam_width + num_end_ids

    def as_samples(self, num_of_beam: int) -> SamplingParams:
        """How the samples of a request are sampled whose running beams they are."""
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=num_of_beam,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


class SampleMode(enum.Enum):
    """What a step's rows need: each mode is an executable of its own, and computes what the ones before it do."""

    GREEDY = "greedy"
    DRAWN = "drawn"
    EVERYTHING = "everything"
    """Rules and logprobs too."""


UNSCORED, SCORED = 0, -1
"""Whether a row of a sampler wants the logprob of what it draws; nothing but zeros, padding wants none."""


def sample_mode(params: SamplingParams | BeamSearchParams) -> SampleMode:
    """The least mode that does what these parameters ask for."""
    if isinstance(params, BeamSearchParams) or params.logprobs is not None or params.has_rules:
        return SampleMode.EVERYTHING
    return SampleMode.GREEDY if params.is_greedy else SampleMode.DRAWN


FIELDS = tuple(one.name for one in fields(SamplingParams))
BOOLEANS = tuple(one.name for one in fields(SamplingParams) if one.type == "bool")


def check_name(name: str, others: Iterable[str] = ()) -> None:
    """Refuse a name that is no sampling parameter (nor one of `others`), naming the nearest."""
    if name in FIELDS or name in others:
        return
    if name in NOT_BUILT:
        raise InvalidRequestError(f"{name}: not available in this version; leave it out", param=name)
    raise _unknown(name, [*FIELDS, *others])


def _unknown(name: str, known: list[str]) -> InvalidRequestError:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(known)}"
    told = name if name.isidentifier() and len(name) <= 100 else shown(name)
    return InvalidRequestError(f"{told}: unknown parameter; {hint}", param=name[:100])


def shown(value: Any) -> str:
    """`value` as Python would write it, cut to what fits into any message, on one line."""
    try:
        return " ".join(_REPR.repr(value).split())
    except ValueError:  # Python does not write out integers of thousands of digits.
        return f"a huge {type(value).__name__}"


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """Whether it is an integer of any make (numpy's too) and no boolean."""
    return isinstance(value, Integral) and not isinstance(value, bool)
