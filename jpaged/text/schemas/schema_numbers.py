"""The numbers that a JSON schema's keywords allow, and which of them llguidance's compiler of schemas writes right.

That compiler computes bounds as float64 and builds expressions that leave numbers out, or in: with
`exclusiveMinimum: 0, maximum: 0.5` it allows 0, and under `maximum: 1.25` it cannot write 1.2. So it gets only ranges
whose expressions are right; `schema_grammar.py` writes the others itself. Knows no grammar.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import MAX_PREC, ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import Any

from .number_texts import NumberRange, decimal_places, multiple_regex
from .schema_analysis import TYPES, is_json_number, type_of, types_of, values_of

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
NUMBERS = (*BOUNDS, "multipleOf")
"""Keywords about numbers."""
MAX_EXACT = 1 << 53
"""Integers beyond it are not exact as a float64, in which llguidance has bounds and constants."""
NUM_SAFE_DIGITS = 15
"""Decimals of so many digits are told apart by float64, and llguidance reads their fraction as an int64."""
MAX_BOUND_PLACES = 40
"""Each place of a bound nests an expression, and llguidance's may nest 250 times."""
MAX_PLACES, MAX_STEP = 6, 65_535
"""The places and the digits of a multiple whose remainders llguidance computes, in 32 bits."""


def number_range(schema: Mapping[str, Any], *, is_integer: bool) -> NumberRange:
    """Return the numbers, or the integers, that the keywords about numbers allow.

    Bounds of more than MAX_BOUND_PLACES places, such as 5e-324, are rounded to fewer numbers.
    """
    numbers = NumberRange()
    for name in BOUNDS:
        if name not in schema:
            continue
        is_low, exact = name.endswith("inimum"), as_decimal(schema[name])
        bound = _rounded(exact, ROUND_CEILING if is_low else ROUND_FLOOR)
        is_open = name.startswith("exclusive") and bound == exact
        numbers = numbers.above(bound, is_open) if is_low else numbers.below(bound, is_open)
    if "multipleOf" in schema:
        numbers = numbers.multiples_of(Fraction(as_decimal(schema["multipleOf"])))
    return numbers.integers() if is_integer else numbers


def _rounded(bound: Decimal, rounding: str) -> Decimal:
    """Return a bound with at most MAX_BOUND_PLACES places."""
    if -int(bound.as_tuple().exponent) <= MAX_BOUND_PLACES:
        return bound
    return bound.quantize(Decimal(1).scaleb(-MAX_BOUND_PLACES), rounding, Context(prec=MAX_PREC))


def as_decimal(number: float) -> Decimal:
    """Return a JSON number as it is written, which is the shortest text of a float64."""
    return Decimal(repr(number))


def allowed_values(schema: dict[str, Any]) -> list[Any]:
    """Return those values of an `enum` or a `const` that the type and the keywords about numbers beside it allow."""
    return [value for value in values_of(schema) or () if allows(schema, value)]


def allows(schema: dict[str, Any], value: Any) -> bool:
    """Return whether the type and the keywords about numbers of a schema allow a value."""
    names = schema.get("type", TYPES)
    types = {names} if isinstance(names, str) else set(names)
    if not is_json_number(value):
        return type_of(value) in types
    is_of_type = "number" in types or ("integer" in types and value % 1 == 0)
    return is_of_type and number_range(schema, is_integer=False).has(as_decimal(value))


def needs_own_numbers(schema: dict[str, Any]) -> bool:
    """Return whether llguidance would allow too many or too few of the numbers that one schema allows by itself."""
    if any(not _is_exact(value) for value in values_of(schema) or ()):
        return True
    types = schema.get("type", "number")
    names = [types] if isinstance(types, str) else types
    given = {name: as_decimal(schema[name]) for name in NUMBERS if name in schema}
    if not given or ("number" not in names and "integer" not in names):
        return False
    if any(abs(value) > MAX_EXACT for value in given.values()):
        return True
    if "number" not in names:
        # A range without an integer would be refused with all that stands around it, also where it is optional.
        return any(value % 1 for value in given.values()) or number_range(schema, is_integer=True).tightened() is None
    # From an integer ≥ 0 upwards, or up to a larger one, llguidance's expressions are right.
    low, high = given.get("minimum"), given.get("maximum")
    if low is None or low < 0 or low % 1 or given.keys() - {"minimum", "maximum"}:
        return True
    return high is not None and (bool(high % 1) or high <= low)


def written_multiples(numbers: NumberRange) -> Iterator[dict[str, Any]]:
    """Yield schemas that allow together the multiples of a number whose digits do not tell them, such as 0.7.

    Each is about numbers of one sign with at most so many digits behind the point, since llguidance wants as many as
    the multiple has. Raise ValueError for a multiple or a bound that it cannot compute with.
    """
    assert numbers.multiple is not None
    places, _ = decimal_places(numbers.multiple)
    if places is None or places > MAX_PLACES:
        raise ValueError
    for num_places in range(places + 1):
        part = numbers.multiples_of(Fraction(1, 10**num_places))
        step = part.multiple
        assert step is not None
        if step * 10**num_places > MAX_STEP:
            raise ValueError
        for half in part.above(Decimal(0), False).tightened(), part.below(Decimal(0), True).tightened():
            if half is None:
                continue
            bounds = {
                "minimum": half.low,
                "maximum": half.high,
                "multipleOf": Decimal(step.numerator) / step.denominator,
            }
            if any(value is not None and abs(value) > MAX_EXACT for value in bounds.values()):
                raise ValueError
            kept = {name: _as_json(value) for name, value in bounds.items() if value is not None}
            yield {"type": "integer" if numbers.is_integer else "number", **kept}


def safe_numbers(schema: dict[str, Any]) -> dict[str, Any] | None:
    """Return one schema with bounds under which llguidance allows no number that the schema does not; None: none known.

    Some are lost: those nearer to a bound than 15 digits tell, and those that llguidance cannot write.
    """
    if any(not _is_exact(value) for value in values_of(schema) or ()):
        return None
    safe = dict(schema)
    for name, is_low, is_open in (
        ("minimum", True, False), ("exclusiveMinimum", True, True),
        ("maximum", False, False), ("exclusiveMaximum", False, True),
    ):  # fmt: skip
        if name not in schema or "number" not in types_of(schema):
            continue
        bound = as_decimal(schema[name])
        if abs(bound) > MAX_EXACT:
            return None
        # The smallest step that leaves a number of NUM_SAFE_DIGITS digits.
        step = Decimal(1).scaleb(bound.adjusted() - NUM_SAFE_DIGITS + 1 if abs(bound) >= 1 else -NUM_SAFE_DIGITS)
        rounded = bound.quantize(step, ROUND_CEILING if is_low else ROUND_FLOOR, Context(prec=60))
        if is_open and rounded == bound and bound % 1 == 0:
            rounded += step if is_low else -step
            del safe[name]
            name, pick = ("minimum", max) if is_low else ("maximum", min)
            rounded = pick(rounded, as_decimal(safe[name])) if name in safe else rounded
        safe[name] = _as_json(rounded)
    if "multipleOf" in schema:
        places, step_digits = decimal_places(Fraction(as_decimal(schema["multipleOf"])))
        if places is None or places > MAX_PLACES or step_digits > MAX_STEP:
            return None
    return safe


def has_multiple_regex(numbers: NumberRange) -> bool:
    """Return whether the last digits of a text tell whether it is one of the multiples."""
    return numbers.multiple is None or bool(multiple_regex(numbers.multiple))


def _is_exact(value: Any) -> bool:
    """Return whether llguidance writes a constant as it is: each integer in it is exact as a float64."""
    if isinstance(value, dict | list):
        return all(map(_is_exact, value.values() if isinstance(value, dict) else value))
    return not is_json_number(value) or abs(value) <= MAX_EXACT


def _as_json(value: Decimal) -> float:
    return int(value) if value % 1 == 0 else float(value)
