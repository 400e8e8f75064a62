"""Regular expressions for the JSON texts of the numbers within a range, and of multiples.

A text is a plain decimal: an optional minus, an integer without leading zeros, and digits behind a point. It has no
exponent. Its value is compared in decimal, digit by digit, so no bound is rounded. The minus stands only where some
negative number is allowed: "-0" is no text of a number from 0 to 1. Knows no JSON schema and no grammar.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import MAX_PREC, Context, Decimal
from fractions import Fraction
from math import lcm

ANY_INTEGER = "(?:0|[1-9][0-9]*)"
ANY_FRACTION = r"(?:\.[0-9]+)?"
MAX_ENDINGS = 100
"""Endings of the digits of a multiple, which `multiple_regex` lists: those of 0.25 are 00, 25, 50 and 75."""


@dataclass(frozen=True)
class NumberRange:
    """Which numbers are meant: those between two bounds, all of them or the integers, or the multiples of a number."""

    low: Decimal | None = None
    high: Decimal | None = None
    """None is no bound."""
    is_low_open: bool = False
    is_high_open: bool = False
    """Whether the bound itself is left out."""
    is_integer: bool = False
    multiple: Fraction | None = None

    def above(self, low: Decimal, is_open: bool) -> NumberRange:
        """Return those of the numbers that are at least `low`, or above it."""
        if self.low is not None and (self.low > low or (self.low == low and not is_open)):
            return self
        return replace(self, low=low, is_low_open=is_open)

    def below(self, high: Decimal, is_open: bool) -> NumberRange:
        """Return those of the numbers that are at most `high`, or below it."""
        if self.high is not None and (self.high < high or (self.high == high and not is_open)):
            return self
        return replace(self, high=high, is_high_open=is_open)

    def multiples_of(self, step: Fraction) -> NumberRange:
        """Return those of the numbers that are multiples of `step` too."""
        return replace(self, multiple=step if self.multiple is None else _common_multiple(self.multiple, step))

    def integers(self) -> NumberRange:
        """Return the integers among the numbers."""
        multiple = None if self.multiple is None else _common_multiple(self.multiple, Fraction(1))
        return replace(self, is_integer=True, multiple=multiple)

    def tightened(self) -> NumberRange | None:
        """Return the same numbers with bounds that are among them; None if there are none.

        Only integers and multiples have such bounds; other numbers are returned as they are.
        """
        if self.multiple is None and not self.is_integer:
            return self
        step, tight = self.multiple or Fraction(1), self
        if self.low is not None:
            number = -(-Fraction(self.low) // step)
            number += self.is_low_open and number * step == Fraction(self.low)
            tight = replace(tight, low=_as_decimal(number * step), is_low_open=False)
        if self.high is not None:
            number = Fraction(self.high) // step
            number -= self.is_high_open and number * step == Fraction(self.high)
            tight = replace(tight, high=_as_decimal(number * step), is_high_open=False)
        return None if tight.low is not None and tight.high is not None and tight.low > tight.high else tight

    def has(self, value: Decimal) -> bool:
        """Return whether a number is among those."""
        above = self.low is None or self.low < value or (self.low == value and not self.is_low_open)
        below = self.high is None or value < self.high or (self.high == value and not self.is_high_open)
        exact = Fraction(value)
        is_multiple = self.multiple is None or exact % self.multiple == 0
        return above and below and is_multiple and not (self.is_integer and exact.denominator > 1)


def range_regex(numbers: NumberRange) -> str:
    """Return the expression of the texts of numbers within the bounds, whatever their multiple; empty if none is."""
    low, high = numbers.low, numbers.high
    parts = []
    if low is None or low < 0:
        # The magnitudes of negative numbers. Zero is among them, as "-0", if it is within the bounds.
        # (Decimal's own minus would round to 28 digits.)
        end = None if low is None else low.copy_negate()
        begin, is_open = (Decimal(0), False) if high is None or high > 0 else (high.copy_negate(), numbers.is_high_open)
        part = _magnitudes(begin, is_open, end, numbers.is_low_open, numbers.is_integer)
        parts += [f"-{part}"] if part else []
    if high is None or high >= 0:
        if low is None or low < 0:
            part = _magnitudes(Decimal(0), False, high, numbers.is_high_open, numbers.is_integer)
        else:
            part = _magnitudes(low, numbers.is_low_open, high, numbers.is_high_open, numbers.is_integer)
        parts += [part] if part else []
    return _any_of(parts)


def multiple_regex(multiple: Fraction) -> str:
    """Return the expression of the texts of a number's multiples, zeros before and behind them included.

    It exists for multiples whose last digits tell them, those that divide a power of ten: 0.01, 0.25, 5. It is empty
    for others, and where too many endings would be listed.
    """
    places, step = decimal_places(multiple)
    if places is None:
        return ""
    num_digits = 0
    while 10**num_digits % step:
        num_digits += 1
        if num_digits > 18 or 10**num_digits // step > 10 * MAX_ENDINGS:
            return ""
    endings = [f"{ending:0{num_digits}d}" if num_digits else "" for ending in range(0, 10**num_digits, step)]
    if len(endings) > MAX_ENDINGS:
        return ""
    num_free = max(0, places - num_digits)
    fractions: dict[str, list[str]] = {}
    """The end of the integer → expressions of what may stand behind it."""
    for ending in endings:
        split = max(0, num_digits - places)
        fractions.setdefault(ending[:split], []).append(_fraction_regex(num_free, ending[split:]))
    parts = []
    for ending, behind in fractions.items():
        integer = _any_of([f"[0-9]*{ending}", str(int(ending))]) if ending else ANY_INTEGER
        parts.append(integer + _any_of(behind))
    return f"-?{_any_of(parts)}"


def decimal_places(number: Fraction) -> tuple[int | None, int]:
    """Return how many places a number has behind the point, and the integer that its digits are; None: no end."""
    places, rest = 0, number.denominator
    while rest % 10 == 0:
        rest, places = rest // 10, places + 1
    for prime in (2, 5):
        while rest % prime == 0:
            rest, places = rest // prime, places + 1
    return (places, int(number * 10**places)) if rest == 1 else (None, 0)


def _as_decimal(number: Fraction) -> Decimal:
    """Return a number with an end as a decimal, without rounding."""
    places, digits = decimal_places(number)
    return Decimal(digits).scaleb(-(places or 0), Context(prec=MAX_PREC))


def _fraction_regex(num_free: int, ending: str) -> str:
    """Return the expression of a point, so many free digits, and an ending; zeros at the end may be more or fewer."""
    digits = ending.rstrip("0")
    if digits:
        return rf"\.{f'[0-9]{{{num_free}}}' if num_free else ''}{digits}0*"
    return rf"(?:\.(?:[0-9]{{1,{num_free}}}0*|0+))?" if num_free else r"(?:\.0+)?"


def _common_multiple(one: Fraction, other: Fraction) -> Fraction:
    denominator = lcm(one.denominator, other.denominator)
    return Fraction(lcm(int(one * denominator), int(other * denominator)), denominator)


def _magnitudes(low: Decimal, is_low_open: bool, high: Decimal | None, is_high_open: bool, is_integer: bool) -> str:
    """Return the expression of texts without a sign whose value lies between two bounds ≥ 0; empty if none does."""
    if high is not None and low > high:
        return ""
    first, low_digits = _split(low)
    last, high_digits = (None, "") if high is None else _split(high)
    if is_integer:
        first += bool(low_digits) or is_low_open
        return _integers(first, None if last is None else last - (is_high_open and not high_digits))
    parts = []
    if low_digits or is_low_open:  # Otherwise the first integer is as those behind it.
        if first == last:
            return _with_fraction(first, _fractions(low_digits, is_low_open, high_digits, is_high_open))
        parts.append(_with_fraction(first, _fractions(low_digits, is_low_open, None, False)))
        first += 1
    if last is None:
        return _any_of([*parts, _integers(first, None) + ANY_FRACTION])
    if first < last:
        parts.append(_integers(first, last - 1) + ANY_FRACTION)
    parts.append(_with_fraction(last, _fractions("", False, high_digits, is_high_open)))
    return _any_of([part for part in parts if part])


def _split(number: Decimal) -> tuple[int, str]:
    """Return the integer part of a number ≥ 0, and its digits behind the point without zeros at the end."""
    integer, _, digits = f"{number:f}".partition(".")
    return int(integer), digits.rstrip("0")


@dataclass(frozen=True)
class _Fractions:
    """Digits behind a point: whether there may be none, and the expression of those that there are; empty for none."""

    may_be_none: bool
    digits: str


def _with_fraction(integer: int, fractions: _Fractions) -> str:
    """Return the expression of an integer and what may stand behind it; empty if nothing may, and it not alone."""
    if not fractions.digits:
        return str(integer) if fractions.may_be_none else ""
    return rf"{integer}(?:\.{fractions.digits}){'?' if fractions.may_be_none else ''}"


def _fractions(low: str, is_low_open: bool, high: str | None, is_high_open: bool) -> _Fractions:
    """Return the digits d for which 0.d lies between 0.low and 0.high; a `high` of None is 1, left out.

    The first digit is compared, and the rest by recursion: 0.d ≥ 0.25 if d begins with 3 to 9, or with 2 and the rest
    is ≥ 0.5.
    """
    if high is None and not low:
        return _Fractions(False, "0*[1-9][0-9]*") if is_low_open else _Fractions(True, "[0-9]+")
    if high == "":
        # Only zero is left.
        return _Fractions(False, "") if low or is_low_open or is_high_open else _Fractions(True, "0+")
    parts: list[str] = []
    run: list[int] = []
    """Digits in a row behind which anything may stand."""

    def end_run() -> None:
        if run:
            parts.append(f"{_digit_class(run[0], run[-1])}[0-9]*")
            run.clear()

    low_digit = int(low[0]) if low else 0
    high_digit = 9 if high is None else int(high[0])
    for digit in range(low_digit, high_digit + 1):
        is_low_free = digit > low_digit or not (low or is_low_open)
        is_high_free = high is None or digit < high_digit
        if is_low_free and is_high_free:
            run.append(digit)
            continue
        end_run()
        rest = _fractions(
            "" if is_low_free else low[1:],
            is_low_open and not is_low_free,
            None if is_high_free or high is None else high[1:],
            is_high_open,
        )
        if rest.digits or rest.may_be_none:
            parts.append(f"{digit}{_optional(rest.digits) if rest.may_be_none else rest.digits}")
    end_run()
    return _Fractions(not low and not is_low_open, _any_of(parts))


def _integers(first: int, last: int | None) -> str:
    """Return the expression of the integers from `first` ≥ 0 to `last`, without leading zeros; empty if there are none.

    A `last` of None is no bound.
    """
    if last is None:
        if first == 0:
            return ANY_INTEGER
        num_digits = len(str(first))
        return _any_of([_same_length(str(first), "9" * num_digits), f"[1-9][0-9]{{{num_digits},}}"])
    if first > last:
        return ""
    low, high = str(first), str(last)
    if len(low) == len(high):
        return _same_length(low, high)
    parts = [_same_length(low, "9" * len(low))]
    if len(low) + 1 < len(high):
        parts.append(f"[1-9][0-9]{{{len(low)},{len(high) - 2}}}")
    return _any_of([*parts, _same_length("1" + "0" * (len(high) - 1), high)])


def _same_length(low: str, high: str) -> str:
    """Return the expression of all numbers between two that have the same number of digits."""
    num_digits = len(low)
    if low == "0" * num_digits and high == "9" * num_digits:
        return f"[0-9]{{{num_digits}}}" if num_digits else ""
    if low == high:
        return low
    if num_digits == 1:
        return _digit_class(int(low), int(high))
    parts = []
    first, last = int(low[0]), int(high[0])
    if first == last:
        return low[0] + _same_length(low[1:], high[1:])
    if low[1:] != "0" * (num_digits - 1):
        parts.append(low[0] + _same_length(low[1:], "9" * (num_digits - 1)))
        first += 1
    ends_early = high[1:] != "9" * (num_digits - 1)
    if first <= last - ends_early:
        parts.append(f"{_digit_class(first, last - ends_early)}[0-9]{{{num_digits - 1}}}")
    if ends_early:
        parts.append(high[0] + _same_length("0" * (num_digits - 1), high[1:]))
    return _any_of(parts)


def _digit_class(first: int, last: int) -> str:
    return str(first) if first == last else f"[{first}-{last}]"


def _any_of(parts: list[str]) -> str:
    """Return the expression that matches what one of some expressions does; empty for none."""
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})" if parts else ""


def _optional(regex: str) -> str:
    return f"(?:{regex})?" if regex else ""
