"""Rewrites regular expressions so that what they match, every common dialect matches too.

JSON Schema has ECMAScript's expressions, validators in Python use Python's, and llguidance has those of Rust. They
differ in what `\\d`, `\\w`, `\\s` and the dot are, and in how a class is written. The rewritten expression allows only
what all of them allow: `\\d` is [0-9], and `\\D` is everything but the numbers of Unicode.
"""

from __future__ import annotations

import re

NARROW = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
"""What every dialect counts among these characters."""
WIDE = {"d": r"\p{N}", "w": r"\p{L}\p{M}\p{N}\p{Pc}", "s": r"\s\x1c-\x1f\u{85}\u{feff}"}
"""What any dialect counts among them; their opposites leave all of it out."""
DOT = r"[^\n\r\u{2028}\u{2029}]"
SPECIAL = r"\.+*?()|[]{}^$#&-~"
"""Characters that Rust's dialect takes by themselves only after a backslash."""
ESCAPES = {"0": r"\x00", "/": "/"}
CLASS_ESCAPES = {**ESCAPES, "b": r"\x08"}
QUANTIFIERS = "*+?}"
_REPEAT = re.compile(r"\{[0-9]+(,[0-9]*)?\}")
_SET = re.compile(r"\\[dwsDWS]")


def portable_regex(pattern: str) -> str:
    """Return a pattern in Rust's dialect. What cannot be rewritten, such as a look-ahead, is left as it is."""
    parts: list[str] = []
    index = 0
    while index < len(pattern):
        char = pattern[index]
        if char == "\\":
            part, index = _escape(pattern, index, is_in_class=False, is_negated=False)
        elif char == "[":
            part, index = _class(pattern, index)
        elif char == "{" and _REPEAT.match(pattern, index) is None:
            part, index = r"\{", index + 1  # No count: the character itself.
        elif char == "?" and index and pattern[index - 1] in QUANTIFIERS and parts[-1] == pattern[index - 1]:
            part, index = "", index + 1  # A lazy quantifier: which of several matches is taken does not matter.
        else:
            part, index = DOT if char == "." else char, index + 1
        parts.append(part)
    return "".join(parts)


def whole_match_regex(pattern: str) -> str:
    """Return `portable_regex` of an expression that the whole text must match: anchors at its ends mean nothing."""
    pattern = pattern.removeprefix("^").removeprefix(r"\A")
    num_backslashes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    if pattern.endswith("$") and num_backslashes % 2 == 0:
        pattern = pattern[:-1]
    elif pattern.endswith((r"\Z", r"\z")) and num_backslashes % 2:
        pattern = pattern[:-2]
    return portable_regex(pattern)


def _escape(pattern: str, index: int, *, is_in_class: bool, is_negated: bool) -> tuple[str, int]:
    """Return the rewritten escape at `index`, and the index behind it. `is_negated`: within a class such as [^a]."""
    char = pattern[index + 1 : index + 2]
    end, kind = index + 2, char.lower()
    if kind in NARROW:
        # A class of what is not in [^…] leaves out as much as possible, as the opposite of a set does outside of one.
        is_opposite = char.isupper()
        members = (WIDE if is_opposite != is_negated else NARROW)[kind]
        if is_opposite:
            return f"[^{members}]", end
        return (members if is_in_class else f"[{members}]"), end
    known = CLASS_ESCAPES if is_in_class else ESCAPES
    if char in known and not pattern[end : end + 1].isdigit():  # Some dialects read \01 as a number in octal.
        return known[char], end
    if char and char.isascii() and not char.isalnum() and char not in SPECIAL:
        return char, end  # Rust's \< and \> are no characters.
    return pattern[index:end], end


def _class(pattern: str, index: int) -> tuple[str, int]:
    """Return the rewritten class that begins at `index`, with a bracket, and the index behind it."""
    is_negated = pattern.startswith("[^", index)
    begin = index + 1 + is_negated
    if pattern.startswith("]", begin):  # ECMAScript's class of no character, or of any.
        return ("(?s:.)" if is_negated else r"[^\s\S]"), begin + 1
    parts = ["[^" if is_negated else "["]
    index = begin
    while index < len(pattern) and pattern[index] != "]":
        char = pattern[index]
        if char == "\\":
            part, index = _escape(pattern, index, is_in_class=True, is_negated=is_negated)
        else:
            # In Rust's classes, a bracket opens a class, and && -- ~~ combine classes. The dash of [\w-.] and of [+-\d]
            # would span to or from what the escape stands for.
            is_after_set = begin < index and _SET.fullmatch(pattern, index - 2, index) is not None
            is_beside_set = is_after_set or _SET.match(pattern, index + 1) is not None
            is_plain = char not in "[&~" and not (char == "-" and (parts[-1] == "-" or is_beside_set))
            part, index = char if is_plain else f"\\x{ord(char):02x}", index + 1
        parts.append(part)
    return "".join([*parts, "]"]) if index < len(pattern) else "".join(parts), index + 1
