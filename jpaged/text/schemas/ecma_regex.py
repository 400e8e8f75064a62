"""Rewrites regular expressions so that what they match, every common dialect matches too.

JSON Schema has ECMAScript's expressions (with the flag u), validators in Python use Python's, and llguidance has those
of Rust. A construct is taken where the dialects that have it read it alike, and rewritten where they differ in what
`\\d`, `\\w`, `\\s` and the dot are: the rewritten expression allows only what all of them allow, so `\\d` is [0-9], and
`\\D` is everything but the numbers of Unicode. What two dialects read differently is refused, and so is what no grammar
can follow, such as a look-ahead. docs/structured_outputs.md has the table. Knows no llguidance.
"""

from __future__ import annotations

import re
from typing import NoReturn

from ...checks import Unfit

NARROW = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
"""What every dialect counts among these characters."""
WIDE = {
    "d": r"\p{N}",
    "w": r"\p{L}\p{M}\p{N}\p{Pc}\p{Alphabetic}\u{200c}\u{200d}",
    "s": r"\s\x1c-\x1f\u{85}\u{feff}",
}
"""What any dialect counts among them; their opposites leave all of it out."""
DOT = r"[^\n\r\u{2028}\u{2029}]"
ANY, NONE = "(?s:.)", r"[^\s\S]"
"""A class of all characters, and one of no character."""
SPECIAL = r"\.+*?()|[]{}^$#&-~"
"""Characters that Rust's dialect takes by themselves only after a backslash."""
CONTROLS = {"a": "\a", "t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r"}
VERBOSE_SPACE = " \t\n\r\f\v"
"""White space that every dialect skips under the flag x."""
SET_OPERATIONS = ("&&", "--", "~~")
"""Rust combines sets by them within a class; to Python and ECMAScript they are two characters."""
UNFOLLOWED_GROUPS = {
    "(?P=": "a back reference",
    "(?>": "an atomic group",
    "(?(": "a condition",
}
READ_ALIKE = "what ECMAScript, Python and Rust read alike"
FOLLOWED = "no back references, word boundaries, and repeats or groups that keep what they took"
VALID = "an expression of ECMAScript, Python or Rust"
_REPEAT = re.compile(r"\{[0-9]+(,[0-9]*)?\}")
_REPEAT_UP_TO = re.compile(r"\{,[0-9]*\}")
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xuU]\{([0-9A-Fa-f]+)\}")
_CONTROL = re.compile("c[A-Za-z]")
_PROPERTY = re.compile(r"[pP](\{[^{}\\]+\}|[A-Za-z])")
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_NAMED_GROUP = re.compile(r"\(\?P?<([^\W\d]\w*)>")
_FLAGS = re.compile(r"\(\?([A-Za-z]*)(?:-([A-Za-z]+))?([:)])")


def portable_regex(pattern: str) -> str:
    """Return a pattern in Rust's dialect.

    Raise Unfit, with the construct and its place, for what dialects read differently and for what no grammar can
    follow. The compiler of grammars refuses look-arounds, and what is no expression in any dialect if it is not here.
    """
    return _Rewriter(pattern).rewritten()


def literal_regex(text: str) -> str:
    """Return the expression of one text, in Rust's dialect, for a place between two slashes too."""
    return "".join(
        f"\\x{ord(char):02x}" if char < " " else f"\\{char}" if char in (*SPECIAL, "/") else char for char in text
    )


class _Rewriter:
    """One pattern, read from its beginning to its end."""

    def __init__(self, pattern: str):
        self._pattern, self._index = pattern, 0
        self._flags: frozenset[str] = frozenset()
        """Which of the flags i, m, s and x hold at the index."""
        self._outer_flags: list[frozenset[str]] = []
        """For each group that is open at the index: the flags before it."""
        self._names: set[str] = set()
        """The names of groups so far."""
        self._previous = "nothing"
        """What a repeat at the index would repeat: "nothing", an "atom", a "repeat", or a repeat that is "complete"."""

    def rewritten(self) -> str:
        parts = []
        while self._index < len(self._pattern):
            parts.append(self._part())
        if self._outer_flags:
            self._refuse("a group without its end", VALID)
        return "".join(parts)

    def _part(self) -> str:
        """Return the rewritten construct at the index, and move the index behind it."""
        char = self._pattern[self._index]
        if "x" in self._flags and (char.isspace() or char == "#"):
            return self._verbose(char)
        if char in "*+?" or (char == "{" and self._is_repeat()):
            return self._repeat(char)
        if char == "(":
            return self._group()
        if char == "[":
            text = self._class()
        elif char == "\\":
            text, _ = self._escape(is_in_class=False, is_negated=False)
        else:
            text = self._other(char)
            self._index += 1
        self._previous = "nothing" if text in ("|", "^", "$", r"\A", r"\z") else "atom"
        return text

    def _other(self, char: str) -> str:
        """Return a character that is no group, class, escape or repeat."""
        if char == ".":
            return ANY if "s" in self._flags else DOT
        if char in "^$" and "m" in self._flags:
            self._refuse(f"{char} under the flag m", READ_ALIKE, "they differ in what ends a line: give \\n by itself")
        if char == ")":
            if not self._outer_flags:
                self._refuse("the end of a group that did not begin", VALID)
            self._flags = self._outer_flags.pop()
        return char if char in "^$|)" else self._literal(char)

    def _verbose(self, char: str) -> str:
        """Skip white space, or a comment, under the flag x."""
        if char != "#" and char not in VERBOSE_SPACE:
            self._refuse("white space that only some dialects skip under the flag x", READ_ALIKE, "escape it")
        end = self._pattern.find("\n", self._index)
        self._index = self._index + 1 if char != "#" else len(self._pattern) if end < 0 else end + 1
        if self._previous == "repeat":
            self._previous = "complete"  # A question mark behind the space makes nothing lazy.
        return ""

    def _is_repeat(self) -> bool:
        """Return whether the brace at the index begins a count; by itself it is a character."""
        if _REPEAT_UP_TO.match(self._pattern, self._index):
            reason = "which Python reads as {0,n} and ECMAScript as text"
            self._refuse(f"a repeat {{,n}}, {reason},", READ_ALIKE, "give {0,n}, or \\{ for text")
        is_repeat = _REPEAT.match(self._pattern, self._index) is not None
        if not is_repeat and "x" in self._flags:
            self._refuse("a brace that begins no count under the flag x", READ_ALIKE, "give \\{")
        return is_repeat

    def _repeat(self, char: str) -> str:
        """Return a repeat. A lazy one is a greedy one here: which of several matches is taken does not matter."""
        if self._previous == "repeat" and char == "?":
            self._index, self._previous = self._index + 1, "complete"
            return ""
        if self._previous == "repeat" and char == "+":
            self._refuse("a repeat that keeps what it took (such as a++)", FOLLOWED, "leave the second + out")
        if self._previous in ("nothing", "complete"):
            self._refuse(f"a repeat {'of nothing' if self._previous == 'nothing' else 'behind a lazy one'}", VALID)
        found = _REPEAT.match(self._pattern, self._index)
        text = found[0] if found else char
        self._index, self._previous = self._index + len(text), "repeat"
        return text

    def _group(self) -> str:
        """Return the beginning of a group, or flags. Names are left out: llguidance reads meaning into some."""
        for prefix, kind in UNFOLLOWED_GROUPS.items():
            if self._pattern.startswith(prefix, self._index):
                self._refuse(kind, FOLLOWED)
        self._previous = "nothing"
        if around := _LOOK_AROUND.match(self._pattern, self._index):  # The compiler refuses it.
            self._index += len(around[0])
            self._outer_flags.append(self._flags)
            return around[0]
        if (flags := _FLAGS.match(self._pattern, self._index)) and flags[0] != "(?:":
            return self._set_flags(flags)
        named = _NAMED_GROUP.match(self._pattern, self._index)
        if named is None and self._pattern.startswith("(?", self._index) and flags is None:
            self._refuse("a group (?… of an unknown kind", "(…), (?:…), (?<name>…), (?P<name>…), (?i), (?i:…)")
        if named is not None and named[1] in self._names:
            self._refuse("the name of another group", VALID, "give each group a name of its own")
        self._names.update(named.groups() if named else ())
        self._index += len(named[0]) if named else 3 if flags else 1
        self._outer_flags.append(self._flags)
        return "(?:"

    def _set_flags(self, found: re.Match[str]) -> str:
        """Return flags, (?i), or the beginning of a group with flags, (?i:…). Only i is left to Rust."""
        on, off, end = found[1], found[2] or "", found[3]
        if not set(on) <= set("imsxuU") or not set(off) <= set("imsx") or len({*on, *off}) < max(1, len(on + off)):
            self._refuse("flags that dialects do not share", "i, m, s and x, each once, as in (?i), (?s:…) and (?-s:…)")
        self._index += len(found[0])
        if end == ":":
            self._outer_flags.append(self._flags)
        self._flags = (self._flags | set(on)) - set(off)
        case = "i" if "i" in on else "-i" if "i" in off else ""
        return f"(?{case}{end}" if case or end == ":" else ""

    def _class(self) -> str:
        """Return the class that begins at the index, with its brackets."""
        begin = self._index
        is_negated = self._pattern.startswith("[^", begin)
        first = self._index = begin + 1 + is_negated
        if self._pattern.startswith("]", first):  # ECMAScript's class of no character, or of any.
            if "]" in self._pattern[first + 1 :]:
                reason = "which ECMAScript ends there and Python does not"
                self._refuse(f"a class that begins with a bracket, {reason},", READ_ALIKE, "give \\]")
            self._index += 1
            return ANY if is_negated else NONE
        can_nest = _closes_with_nested(self._pattern, begin)
        parts: list[str] = []
        sets: set[str] = set()

        def member() -> tuple[str, str]:
            text, name = self._member(first, is_negated=is_negated, can_nest=can_nest)
            sets.add(name)
            return text, name

        while not self._pattern.startswith("]", self._index):
            text, name = member()
            parts.append(text)
            if self._pattern.startswith("-", self._index) and not self._pattern.startswith("-]", self._index):
                self._check_set_operation()
                self._index += 1
                end_text, end_name = member()
                # The dash of [\w-.] and of [+-\d] is a character, since a set is no end of a range.
                is_range = name in ("", "property") and end_name in ("", "property")
                parts += ["-" if is_range else "\\-", end_text]
        self._index += 1
        if any(name in sets and name.upper() in sets for name in NARROW):  # As in [\s\S].
            return NONE if is_negated else ANY
        return "".join(["[^" if is_negated else "[", *parts, "]"])

    def _member(self, first: int, *, is_negated: bool, can_nest: bool) -> tuple[str, str]:
        """Return the character or set of a class that stands at the index, and the name of a set, as d in \\d."""
        if self._index >= len(self._pattern):
            self._refuse("a class without its end", VALID)
        char = self._pattern[self._index]
        if char == "\\":
            return self._escape(is_in_class=True, is_negated=is_negated)
        if char == "[" and can_nest:
            reason = "which Rust reads as a class of its own and other dialects as a character"
            self._refuse(f"a bracket within a class (as in [[:alpha:]]), {reason},", READ_ALIKE, "give a-z, or \\[")
        if "x" in self._flags and (char.isspace() or char == "#"):
            self._refuse("white space or # in a class under the flag x", READ_ALIKE, "escape it")
        if self._pattern[first : self._index + 3] != "--]":  # [--] is the class of a dash everywhere.
            self._check_set_operation()
        text = self._literal(char)
        self._index += 1
        return text, ""

    def _check_set_operation(self) -> None:
        if self._pattern.startswith(SET_OPERATIONS, self._index):
            reason = "which Rust reads as an operation on sets and other dialects as characters"
            self._refuse(f"&&, -- or ~~ in a class, {reason},", READ_ALIKE, "escape the second character")

    def _escape(self, *, is_in_class: bool, is_negated: bool) -> tuple[str, str]:
        """Return the rewritten escape at the index, and the name of a set; `is_negated`: in a class such as [^a]."""
        char = self._pattern[self._index + 1 : self._index + 2]
        begin, after = self._index + 1, self._pattern[self._index + 2 : self._index + 3]
        if kind := NARROW.get(char.lower()):
            # A class of what is not in [^…] leaves out as much as possible, as the opposite of a set does elsewhere.
            is_opposite = char.isupper()
            members = WIDE[char.lower()] if is_opposite != is_negated else kind
            self._index += 2
            text = f"[^{members}]" if is_opposite else members if is_in_class else f"[{members}]"
            return text, char
        if found := _PROPERTY.match(self._pattern, begin):
            self._index += 1 + len(found[0])
            return "\\" + found[0], "property"
        if found := _CODE.match(self._pattern, begin):
            text = self._character(int("".join(filter(None, found.groups())), 16))
            self._index += 1 + len(found[0])
            return text, ""
        if found := _CONTROL.match(self._pattern, begin):
            self._index += 3
            return self._character(ord(found[0][1]) & 31), ""
        if char in CONTROLS or (char == "0" and not after.isdigit()) or (char == "b" and is_in_class):
            self._index += 2
            return self._literal({**CONTROLS, "0": "\0", "b": "\b"}[char]), ""
        if char in "AzZ" and char and not is_in_class:
            self._index += 2
            return r"\A" if char == "A" else r"\z", ""
        if char and not (char.isascii() and char.isalnum()) and (is_in_class or char not in "<>"):
            text = self._literal(char)
            self._index += 2
            return text, ""
        return self._refuse_escape(char, is_in_class)

    def _refuse_escape(self, char: str, is_in_class: bool) -> NoReturn:
        if char in "<>" and char:
            reason = "which Rust reads as the boundary of a word and other dialects as a character"
            self._refuse(f"\\< or \\>, {reason},", READ_ALIKE, "leave the backslash out")
        if char in "bB" and char and not is_in_class:
            self._refuse("a word boundary", FOLLOWED)
        if char.isdigit() or char == "k":
            self._refuse("a back reference or an octal number", FOLLOWED, "give \\x.. for a character")
        self._refuse("a backslash that begins no escape", VALID, "give \\\\ for a backslash")

    def _character(self, code: int) -> str:
        """Return the character of a number."""
        if code > 0x10FFFF:
            self._refuse("a number beyond those of characters", "at most \\u{10ffff}")
        return self._literal(chr(code))

    def _literal(self, char: str) -> str:
        """Return a character that stands for itself."""
        if "\ud800" <= char <= "\udfff":
            reason = "of which only ECMAScript makes a pair"
            self._refuse(f"a surrogate, {reason},", READ_ALIKE, "give the character itself, or \\u{1f600}")
        return "\\" + char if char in SPECIAL else char

    def _refuse(self, got: str, allowed: str, way_out: str = "") -> NoReturn:
        raise Unfit(allowed, way_out, got=f"{got} at character {self._index + 1}")


def _closes_with_nested(pattern: str, index: int) -> bool:
    """Return whether the class that begins at the index has an end where a bracket in it begins another class.

    Rust reads brackets so. Where its class has no end, the pattern is none of Rust, and others read it alike.
    """
    depth = 0
    while index < len(pattern):
        char = pattern[index]
        index += 2 if char == "\\" else 1
        if char == "[":
            depth += 1
            index += pattern.startswith("^", index)
            dashes = len(pattern) - len(pattern[index:].lstrip("-")) - index
            index += dashes or pattern.startswith("]", index)
        elif char == "]":
            depth -= 1
            if depth == 0:
                return True
    return False
