"""Patterns with a look-ahead that common generators write, without one.

llguidance has no look-around. Only these patterns are known, by their text; what else has one is left as it is.
"""

from __future__ import annotations

import re

EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
"""The e-mail address of zod 4: its look-aheads forbid a dot at the beginning, and two in a row."""
EMAIL_WITHOUT = (
    r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
"""The duration of zod 4: its look-aheads want a number behind P, and one behind T."""
_SECONDS = r"\d+(?:[.,]\d+)?S"
_TIME = rf"T(?:\d+H(?:\d+M)?(?:{_SECONDS})?|\d+M(?:{_SECONDS})?|{_SECONDS})"
DURATION_WITHOUT = rf"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:{_TIME})?|{_TIME})$"
HOSTNAME = (
    r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$"
)
"""The host name of zod 4: its look-ahead bounds the length, as MAX_LENGTHS does."""
HOSTNAME_WITHOUT = f"^{HOSTNAME.partition(')')[2]}"
MAX_LENGTHS = {HOSTNAME: 253}
"""A pattern whose look-ahead bounds the length of texts → that bound. A dot at the end counts too, unlike there."""
_KNOWN = {EMAIL: EMAIL_WITHOUT, DURATION: DURATION_WITHOUT, HOSTNAME: HOSTNAME_WITHOUT}
_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"
"""How the pattern of a Decimal begins that Pydantic writes up to 2.13. It forbids a text without a digit."""
_DECIMAL_KINDS = {
    "any": re.compile(r"\\d\*\\\.\?\\d\*\$"),
    "places": re.compile(r"\\d\*\\\.\?\\d\{0,(\d+)\}0\*\$"),
    "digits": re.compile(r"\(\?:\\d\{0,(\d+)\}\|\(\?=\[\\d\.\]\{1,(\d+)\}0\*\$\)\\d\*\\\.\\d\*0\*\$\)"),
    "both": re.compile(r"\(\?:\\d\{0,(\d+)\}\|\(\?=\[\\d\.\]\{1,(\d+)\}0\*\$\)\\d\{0,(\d+)\}\\\.\\d\{0,(\d+)\}0\*\$\)"),
}
"""What follows that beginning, by the constraints of the Decimal."""
MAX_DIGITS = 60
"""Digits of a Decimal with `max_digits` and without `decimal_places`: each place of the point is written by itself."""


def without_look_ahead(pattern: str) -> str:
    """Return a pattern that means the same without its look-ahead; a pattern that is not known, as it is.

    Pydantic's patterns of a Decimal with `max_digits` end without `$` where there is no point, so they match any text
    that begins with digits. What is returned matches a whole number only.
    """
    if not pattern.startswith(_DECIMAL):
        return _KNOWN.get(pattern, pattern)
    for kind, regex in _DECIMAL_KINDS.items():
        found = regex.fullmatch(pattern, len(_DECIMAL))
        if found is not None:
            numbers = [int(number) for number in found.groups()]
            if kind == "any":
                return r"^[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)$"
            if kind == "places":
                return _decimal([("[0-9]+", numbers[0])])
            if kind == "both" and numbers[0] == numbers[2]:
                # All digits together are bounded too, which matters where fewer are allowed than places.
                places = min(numbers[3], numbers[1] - 1 - numbers[2])
                return _decimal([(_at_most(numbers[2]), places)], max_alone=numbers[0])
            if kind == "digits" and numbers[1] == numbers[0] + 1 <= MAX_DIGITS:
                parts = [(_at_most(number), numbers[0] - number) for number in range(numbers[0] + 1)]
                return _decimal(parts, max_alone=numbers[0])
    return pattern


def _at_most(num_digits: int) -> str:
    """Return the expression of a digit or more, of which at most so many are left without leading zeros."""
    return f"(?:0+[0-9]{{0,{num_digits}}}|[0-9]{{1,{num_digits}}})" if num_digits else "0+"


def _decimal(parts: list[tuple[str, int]], max_alone: int | None = None) -> str:
    """Return the pattern of a sign, an integer and digits behind a point, from pairs of the last two.

    A pair is the expression of the integer and the most digits behind the point, apart from zeros at the end.
    `max_alone` are the digits of an integer without a point, where they are fewer than the expressions allow.
    """
    options = [rf"{integer}\.[0-9]{{0,{places}}}0*" for integer, places in parts]
    options += [rf"\.(?:[0-9]{{1,{places}}}0*|0+)" if places else r"\.0+" for _, places in parts[:1]]
    options.append("[0-9]+" if max_alone is None else _at_most(max_alone))
    return f"^[+-]?(?:{'|'.join(options)})$"
