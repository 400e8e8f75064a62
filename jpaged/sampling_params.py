"""What a caller asks of the sampler, checked as soon as it is said."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from .errors import InvalidRequestError

GREEDY_TEMPERATURE = 1e-5
MAX_SAMPLES = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
SEED_RANGE = (-(1 << 63), (1 << 63) - 1)

NOT_BUILT = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "prompt_logprobs", "structured_outputs",
    "logit_bias", "allowed_token_ids", "bad_words", "extra_args", "output_kind", "min_tokens",
    "spaces_between_special_tokens",
)  # fmt: skip
"""Parameters of the full interface that this version refuses by name."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Raises InvalidRequestError naming the field, the value and what is allowed.

    `n` samples share the prompt, and each has its own draws. `temperature` below 1e-5 is greedy. `top_k` 0 or −1
    is off. `max_tokens` None runs to the end of the context. `logprobs` k asks for the sampled token's logprob
    and the k highest. `seed` fixes the draws of this request whatever it shares a batch with; without one they
    come from the engine's seed and the request's number. `stop` strings end the text before them, unless
    `include_stop_str_in_output`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

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
        self._number("top_p", 0.0, 1.0, open_low=True)
        self._integer("top_k", -1, None)
        self._number("min_p", 0.0, 1.0)
        if self.seed is not None:
            self._integer("seed", *SEED_RANGE)
        if self.max_tokens is not None:
            self._integer("max_tokens", 1, None)
        if self.logprobs is not None:
            self._integer("logprobs", 0, None)
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "true or false")
        object.__setattr__(self, "stop", self._stops())
        object.__setattr__(self, "stop_token_ids", self._stop_ids())
        if self.stop and not self.detokenize:
            self._refuse("stop", "none while detokenize is false: stop strings are found in the text")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def _stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else () if self.stop is None else self.stop
        if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) and stop for stop in stops):
            self._refuse("stop", "a non-empty string or a list of them")
        if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
            self._refuse("stop", f"at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters")
        return tuple(map(str, stops))

    def _stop_ids(self) -> tuple[int, ...]:
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        if not isinstance(ids, list | tuple) or not all(is_integer(i) and i >= 0 for i in ids):
            self._refuse("stop_token_ids", "a list of token ids ≥ 0")
        return tuple(map(int, ids))

    def _integer(self, name: str, low: int, high: int | None) -> None:
        value = getattr(self, name)
        if not is_integer(value) or value < low or (high is not None and value > high):
            self._refuse(name, f"an integer ≥ {low}" if high is None else f"an integer in [{low}, {high}]")
        object.__setattr__(self, name, int(value))

    def _number(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        # A NaN compares false with everything.
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (open_low and value == low):
            self._refuse(name, f"a number in {'(' if open_low else '['}{low:g}, {high:g}]")
        # Adding zero makes 0.0 of −0.0: thresholds are compared by their bits.
        object.__setattr__(self, name, float(value) + 0.0)

    def _refuse(self, name: str, allowed: str) -> None:
        raise InvalidRequestError(f"{name}: got {shown(getattr(self, name))}, allowed: {allowed}", param=name)


FIELDS = tuple(field.name for field in fields(SamplingParams))


def check_name(name: str, others: Iterable[str] = ()) -> None:
    """Refuse a name that is no sampling parameter (nor one of `others`), naming the nearest."""
    if name in FIELDS or name in others:
        return
    if name in NOT_BUILT:
        raise InvalidRequestError(f"{name}: not available in this version; leave it out", param=name)
    near = difflib.get_close_matches(name, [*FIELDS, *others], n=1)
    hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join([*FIELDS, *others])}"
    raise InvalidRequestError(f"{name[:100]}: unknown parameter; {hint}", param=name[:100])


def shown(value: Any) -> str:
    """`value` as Python would write it, cut to what fits into any message, on one line."""
    try:
        return " ".join(_REPR.repr(value).split())
    except ValueError:  # Python does not write out integers of thousands of digits.
        return f"a huge {type(value).__name__}"


def is_integer(value: Any) -> bool:
    """Whether it is an integer of any make (numpy's too) and no boolean."""
    return isinstance(value, Integral) and not isinstance(value, bool)
