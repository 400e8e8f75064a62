"""Expressions for the formats of strings that llguidance reads otherwise.

There, an IPv6 address that ends as an IPv4 one is none, and each year has a 29 February. Each is an expression of a
whole text, in what every dialect of expressions reads alike.
"""

from __future__ import annotations

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_LAST_TWO = f"(?:{_GROUP}:{_GROUP}|{IPV4})"
"""The last 32 bits of an IPv6 address, which may be written as an IPv4 address."""


def _at_most(num_groups: int) -> str:
    """Return an expression of so many groups before the double colon that stands for groups of zeros."""
    return f"(?:(?:{_GROUP}:){{0,{num_groups - 1}}}{_GROUP})?" if num_groups else ""


_IPV6 = "|".join(
    [
        f"(?:{_GROUP}:){{6}}{_LAST_TWO}",
        *(f"{_at_most(5 - after)}::(?:{_GROUP}:){{{after}}}{_LAST_TWO}" for after in range(5, -1, -1)),
        f"{_at_most(6)}::{_GROUP}",
        f"{_at_most(7)}::",
    ]
)
"""RFC 3986, section 3.2.2: groups of 16 bits, of which one run of zeros is a double colon."""
_ESCAPED = "%[0-9A-Fa-f]{2}"
_SEGMENT = f"(?:[0-9A-Za-z._~!$&'()*+,;=:@-]|{_ESCAPED})"
"""One character of a path."""
_USER = f"(?:[0-9A-Za-z._~!$&'()*+,;=:-]|{_ESCAPED})*"
_NAME = f"(?:[0-9A-Za-z._~!$&'()*+,;=-]|{_ESCAPED})*"
_FUTURE = "[vV][0-9A-Fa-f]+[.][0-9A-Za-z._~!$&'()*+,;=:-]+"
_AUTHORITY = rf"(?:{_USER}@)?(?:\[(?:{_IPV6}|{_FUTURE})\]|{_NAME})(?::[0-9]*)?"
_PATH = f"(?://{_AUTHORITY}(?:/{_SEGMENT}*)*|/(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?|{_SEGMENT}+(?:/{_SEGMENT}*)*)?"
_URI = rf"[A-Za-z][0-9A-Za-z+.-]*:{_PATH}(?:\?(?:{_SEGMENT}|[/?])*)?(?:#(?:{_SEGMENT}|[/?])*)?"
"""RFC 3986, appendix A."""

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTHS = "(?:0[48]|[2468][048]|[13579][26])"
"""The last two digits of leap years, and the first two of leap years at the end of a century."""
_LONG_MONTH_DAY = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTH_DAY = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_FEBRUARY_DAY = "02-(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = (
    f"(?:{_YEAR}-(?:{_LONG_MONTH_DAY}|{_SHORT_MONTH_DAY}|{_FEBRUARY_DAY})|(?:[0-9]{{2}}{_FOURTHS}|{_FOURTHS}00)-02-29)"
)
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:[.][0-9]+)?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
"""RFC 3339, section 5.6. Whether a minute has a 61st second is not known here."""

EXPRESSIONS = {"date": _DATE, "date-time": f"{_DATE}[Tt]{TIME}", "ipv6": _IPV6, "uri": _URI}
"""Format → the expression of a whole text."""
