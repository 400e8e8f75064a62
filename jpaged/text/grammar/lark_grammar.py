"""Reads a request's grammar as Lark: tells Lark from GBNF, and joins long lists of texts into one expression.

llguidance converts GBNF, and compiles Lark; what its converter misreads is written in another way before. Knows no
schemas: `grammar.py` enforces those within a grammar.
"""

from __future__ import annotations

import json
import re

from ..schemas.ecma_regex import literal_regex

MIN_JOINED = 32
"""Alternatives of texts from which on they are joined. Each would otherwise be a lexeme, and an item of the parser,
by itself: some thousands of them are more than one step may take."""
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_GBNF_PART = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*")|(?P<class>\[(?:\\.|[^\]\\])*\])|(?P<comment>\#[^\n]*)|(?P<any>\.)|(?P<name>[\w-]+)',
    re.DOTALL,
)
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_ANY = "[\\x00-\U0010ffff]"
_RULE = re.compile(r'^[ \t]*[?!]{0,2}[A-Za-z_][^\n:"/]*:', re.MULTILINE)
"""The name of a rule of a Lark grammar, where the rule begins."""
_LARK_PART = re.compile(
    r'(?P<text>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?:\\.|[^/\\])+/)|(?P<space>[ \t\r]+|(?:\#|//)[^\n]*)|(?P<line>\n)'
    r"|(?P<token><[^<>\s]+>)|(?P<word>[\w.-]+)|(?P<other>.)",
    re.DOTALL,
)
_LARK_ESCAPE = re.compile(r"\\x([0-9A-Fa-f]{2})|\\.")


def is_gbnf(grammar: str) -> bool:
    """Return whether a grammar is written in GBNF: a line of it begins with a name and ::=."""
    return _GBNF_RULE.search(grammar) is not None


def readable_gbnf(grammar: str) -> str:
    """Return a GBNF grammar that llguidance's converter reads as llama.cpp does.

    The converter leaves zeros of \\u0041 out, so that letters behind it become part of the number. Its dot is no line
    end. It gives the name `start` to the rule `root`, and Rust's dialect reads && and ~~ in a class as operations.
    """

    def part(found: re.Match[str]) -> str:
        text: str = found[0]
        match found.lastgroup:
            case "text":
                return _GBNF_ESCAPE.sub(_character, text)
            case "class":
                return _GBNF_ESCAPE.sub(_character, text).replace("&", "\\x26").replace("~", "\\x7e")
            case "any":
                return _ANY
            case "name" if text == "start":
                return "start-rule"
        return text

    return _GBNF_PART.sub(part, grammar)


def num_rules(lark: str) -> int:
    """Return how many rules and terminals a Lark grammar has."""
    return len(_RULE.findall(lark))


def joined_texts(lark: str) -> str:
    """Return a Lark grammar in which each list of at least MIN_JOINED alternatives that are texts is one expression.

    Were two enough, `start: "a" | "b" | x` would become `start: /(?:a|b)/ | x`. What is no Lark stays as it is, for the
    compiler to refuse.
    """
    parts = [(found.lastgroup or "", found[0]) for found in _LARK_PART.finditer(lark)]
    written, index, before = [], 0, ""
    while index < len(parts):
        kind, part = parts[index]
        texts, end = _texts(parts, index) if before in (*":([|",) else ([], index)
        if len(texts) >= MIN_JOINED:
            written.append(f"/(?:{'|'.join(texts)})/")
            after = _behind_space(parts, end)
            if after == len(parts) or parts[after][0] == "line":  # The lines behind it keep their numbers for errors.
                written += [one for kind, one in parts[index:end] if kind == "line"]
        else:
            end = max(end, index + 1)
            written += [one for _, one in parts[index:end]]
        before = before if kind == "space" else "text" if texts else part
        index = end
    return "".join(written)


def _texts(parts: list[tuple[str, str]], index: int) -> tuple[list[str], int]:
    """Return expressions of the alternatives from `index` on that are one text each, and the index behind the last."""
    texts: list[str] = []
    end = index
    while index < len(parts) and parts[index][0] == "text" and (text := _expression(parts[index][1])):
        after = _behind_space(parts, index + 1)
        bar = after
        while bar < len(parts) and parts[bar][0] in ("line", "space"):
            bar += 1
        is_followed = bar < len(parts) and parts[bar][1] == "|"
        if not is_followed and after < len(parts) and parts[after][1] not in "\n)]":
            break  # Something else belongs to this alternative.
        texts.append(text)
        end = index + 1
        index = _behind_space(parts, bar + 1) if is_followed else len(parts)
    return texts, end


def _behind_space(parts: list[tuple[str, str]], index: int) -> int:
    while index < len(parts) and parts[index][0] == "space":
        index += 1
    return index


def _expression(text: str) -> str:
    """Return an expression of a text as Lark writes it, empty if it is none or the empty text."""
    is_any_case = text.endswith("i")
    escaped = _LARK_ESCAPE.sub(lambda found: f"\\u00{found[1]}" if found[1] else found[0], text.removesuffix("i"))
    try:
        literal = literal_regex(json.loads(escaped))
    except ValueError:
        return ""
    return f"(?i:{literal})" if is_any_case and literal else literal


def _character(found: re.Match[str]) -> str:
    """Return an escape of GBNF as its converter reads it: a number of ASCII in two digits, another one as itself."""
    digits = found[1] or found[2]
    code = int(digits, 16) if digits else 0
    is_character = digits and code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF
    return found[0] if not is_character else chr(code) if code > 0x7F else f"\\x{code:02x}"
