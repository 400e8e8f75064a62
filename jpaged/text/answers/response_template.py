"""Reads a `response_template`, by which transformers (from 5.24 on) is told how a model writes its answers.

It is data here: none of its patterns is ever run, since one can take exponential time. A pattern is read if it consists
of literal text, whitespace (`\\s*`) and named groups, and the template if it says what a format of `formats` can say.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from .formats import AnswerFormat, CallFormat, JsonCalls, NamedCalls, TaggedCalls, ThoughtFormat
from .json_text import Dialect

TEMPLATE_KEYS = ("version", "defaults", "fields", "start_anchor", "start_anchor_pattern")
FIELD_KEYS = (
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
    "transform", "transform_each",
)  # fmt: skip
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
CONTENTS = ("text", "int", "float", "bool", "json", "xml-inline", "kv-lines", "python-call-list")
JSON_CALLS = (
    ("{content}",),
    ("{content.name}", "{content.arguments}"),
    ("{content.name}", "{content.parameters}"),
    ("{name}", "{arguments}"),
    ("{name}", "{parameters}"),
)
"""What `transform` may make of an object: the object itself, or its name and arguments."""
_PATTERN_PART = re.compile(
    r"(?P<space>\\s\*)"
    r"|\(\?P<(?P<group>\w+)>(?:\\w\+|\\S\+|\.[*+]\??|\[\^[^\]]+\][*+]\??)\)"
    r"|\\(?P<escaped>[^\w\s])|\\(?P<line_feed>n)"
    r"|(?P<plain>[^\\.^$*+?{}\[\]()|])",
    re.DOTALL,
)


class UnreadableTemplateError(Exception):
    """A `response_template` is valid, but says what no format here can say."""


@dataclass(frozen=True)
class Part:
    """A part of a pattern: literal text, whitespace if `text` is empty, or a named group."""

    text: str = ""
    group: str = ""


def read_response_template(template: Any, tokens: Collection[str]) -> AnswerFormat:
    """Return the format that a `response_template` describes; `tokens` are texts that are single tokens.

    Raise ConfigError for a template that is broken, and UnreadableTemplateError for one that is beyond this reader.
    """
    fields = _fields(template)
    thought: ThoughtFormat | None = None
    calls: CallFormat | None = None
    dropped: tuple[str, ...] = ()
    for name, field in fields.items():
        if name in THOUGHT_FIELDS:
            if field.get("content", "text") != "text":
                raise UnreadableTemplateError(f"{name}: its content is {field['content']!r}, and not text")
            open_, close = _literal(name, field, "open"), _literal(name, field, "close")
            thought = ThoughtFormat(open_, close, _marks(tokens, open_, close))
        elif name == "tool_calls":
            calls = _calls(field, tokens)
        elif name == "content":
            if "open" in field or "open_pattern" in field:
                dropped = (_literal(name, field, "open"), _literal(name, field, "close"))
        else:
            raise UnreadableTemplateError(f"{name}: no part of an answer that is known")
    if dropped and thought is None:
        raise UnreadableTemplateError("content: has a mark of its own, but there are no thoughts before it")
    if dropped and thought is not None:
        marks = (*thought.marks, *_marks(tokens, *dropped))
        thought = ThoughtFormat(thought.open, thought.close, marks, dropped)
    return AnswerFormat(thought, calls)


def _fields(template: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return the fields of a template; raise ConfigError if it has not the form of one."""
    if not isinstance(template, Mapping):
        raise _broken("", f"is {type(template).__name__}", "an object")
    if unknown := sorted(set(template) - set(TEMPLATE_KEYS)):
        raise _broken("", f"has the key {unknown[0]!r}", ", ".join(TEMPLATE_KEYS))
    if template.get("version", 1) != 1:
        raise _broken("version", f"is {template['version']!r}", "1")
    fields = template.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise _broken("fields", "is missing or empty", "an object with at least one field")
    for name, field in fields.items():
        place = f"fields.{name}"
        if not isinstance(field, Mapping):
            raise _broken(place, f"is {type(field).__name__}", "an object")
        if unknown := sorted(set(field) - set(FIELD_KEYS)):
            raise _broken(place, f"has the key {unknown[0]!r}", ", ".join(FIELD_KEYS))
        for side in ("open", "close"):
            _check_side(place, field, side)
        if field.get("content", "text") not in CONTENTS:
            raise _broken(f"{place}.content", f"is {field['content']!r}", ", ".join(CONTENTS))
        if not isinstance(field.get("content_args", {}), Mapping):
            raise _broken(f"{place}.content_args", "is no object", "an object")
    if sum("open" not in field and "open_pattern" not in field for field in fields.values()) > 1:
        raise _broken("fields", "has several fields without open", "one at most")
    return fields


def _check_side(place: str, field: Mapping[str, Any], side: str) -> None:
    """Raise ConfigError unless `open` or `close` of a field is text, a list of texts, or a regular expression."""
    if side in field and f"{side}_pattern" in field:
        raise _broken(place, f"has {side} and {side}_pattern", "one of them")
    texts = field.get(side, "-")
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise _broken(f"{place}.{side}", "is no text", "a text or a list of texts, none empty")
    import regex  # By which transformers runs the patterns. Imported here, since few models have any.

    pattern = field.get(f"{side}_pattern", "")
    if not isinstance(pattern, str):
        raise _broken(f"{place}.{side}_pattern", "is no text", "a regular expression")
    try:
        regex.compile(pattern)  # The package by which transformers runs it.
    except regex.error as error:
        raise _broken(f"{place}.{side}_pattern", f"is no regular expression ({error})", "one") from error


def _broken(place: str, fault: str, allowed: str) -> ConfigError:
    name = f"response_template.{place}" if place else "response_template"
    return ConfigError(f"{name}: {fault}, allowed: {allowed}; correct the model's tokenizer_config.json")


def _calls(field: Mapping[str, Any], tokens: Collection[str]) -> CallFormat:
    """Return the format of calls that the field `tool_calls` describes."""
    content, arguments = field.get("content", "text"), field.get("content_args") or {}
    opening, closing = _parts("tool_calls", field, "open"), _parts("tool_calls", field, "close")
    called = _called(field)
    groups = [part.group for part in opening if part.group]
    if any(part.group for part in closing) or groups not in ([], ["name"]):
        raise UnreadableTemplateError("tool_calls: it has a group that is not the name")
    ends = [part.text for part in closing if part.text]
    if not groups:
        texts = [part.text for part in opening if part.text]
        is_json = content == "json" and not arguments and len(texts) == 1 and len(ends) == 1
        if not is_json or called not in JSON_CALLS:
            raise UnreadableTemplateError(
                "tool_calls: without a name in open, only objects of name and arguments are read"
            )
        return CallFormat(texts[0], ends[0], (JsonCalls(),), _marks(tokens, texts[0], ends[0]))
    if called != ("{name}", "{content}"):
        raise UnreadableTemplateError("tool_calls: its transform is not {name} with {content}")
    before, after = _around_group(opening)
    if content == "json":
        dialect = _dialect(arguments)
        if len(ends) != 1 or not before or len(before) > 2:
            raise UnreadableTemplateError("tool_calls: open or close has too many parts")
        body = NamedCalls(before_name="".join(before[1:]), before_arguments="".join(after), dialect=dialect)
        return CallFormat(before[0], ends[0], (body,), _marks(tokens, *before, *after, *ends, dialect.quote))
    if content != "xml-inline":
        raise UnreadableTemplateError(f"tool_calls: its content is {content!r}; json and xml-inline are read")
    if len(before) not in (1, 2) or len(after) > 1 or len(ends) != len(before):
        raise UnreadableTemplateError("tool_calls: open or close has too many parts")
    tagged = _tags(arguments, name_end="".join(after), own_tags=(before[1:], ends[:-1]))
    tags = (tagged.key_open, tagged.key_close, tagged.value_open, tagged.value_close)
    return CallFormat(before[0], ends[-1], (tagged,), _marks(tokens, *before, *after, *ends, *tags))


def _called(field: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a call's transform takes as the function: all of it, or as name and arguments."""
    transform = field.get("transform")
    if not isinstance(transform, Mapping) or set(transform) - {"type", "function"}:
        raise UnreadableTemplateError("tool_calls: its transform is no object of type and function")
    function = transform.get("function")
    if isinstance(function, str):
        return (function,)
    if not isinstance(function, Mapping) or set(function) != {"name", "arguments"}:
        raise UnreadableTemplateError("tool_calls: its transform's function is not name and arguments")
    return str(function["name"]), str(function["arguments"])


def _tags(arguments: Mapping[str, Any], *, name_end: str, own_tags: tuple[list[str], list[str]]) -> TaggedCalls:
    """Return the body of calls whose arguments are the tags of `tag_pattern`."""
    if unknown := sorted(set(arguments) - {"tag_pattern", "value_parser"}):
        raise UnreadableTemplateError(f"tool_calls.content_args: {unknown[0]} is not read")
    parser = arguments.get("value_parser") or {"name": "text"}
    if not isinstance(parser, Mapping) or parser.get("name") not in ("text", "json"):
        raise UnreadableTemplateError("tool_calls.content_args.value_parser: text and json are read")
    parts = _pattern_parts("tool_calls.content_args.tag_pattern", str(arguments.get("tag_pattern", "")))
    groups = [part.group for part in parts if part.group]
    if groups != ["key", "value"]:
        raise UnreadableTemplateError("tool_calls.content_args.tag_pattern: it has not the groups key and value")
    key, value = (next(i for i, part in enumerate(parts) if part.group == name) for name in groups)
    before_key = [part.text for part in parts[:key] if part.text]
    between = [part.text for part in parts[key + 1 : value] if part.text]
    behind = [part.text for part in parts[value + 1 :] if part.text]
    if len(before_key) != 1 or len(between) not in (1, 2) or len(behind) != 1:
        raise UnreadableTemplateError("tool_calls.content_args.tag_pattern: it has too many parts")
    key_close, value_close = between[0].removesuffix("\n"), behind[0].removeprefix("\n")
    if not key_close or not value_close:
        raise UnreadableTemplateError("tool_calls.content_args.tag_pattern: a line feed alone ends a key or a value")
    opens, closes = own_tags
    has_space = value > 0 and not parts[value - 1].text and not parts[value - 1].group
    return TaggedCalls(
        open="".join(opens),
        close="".join(closes),
        name_end=name_end,
        key_open=before_key[0],
        key_close=key_close,
        value_open="".join(between[1:]).removesuffix("\n"),
        value_close=value_close,
        has_lines=has_space or between[-1].endswith("\n"),
    )


def _dialect(arguments: Mapping[str, Any]) -> Dialect:
    """Return how JSON is written."""
    if unknown := sorted(set(arguments) - {"unquoted_keys", "string_delims"}):
        raise UnreadableTemplateError(f"tool_calls.content_args: {unknown[0]} is not read")
    quotes = arguments.get("string_delims") or [["", ""]]
    match quotes:
        case [[str(opening), str(closing)]] if opening == closing:
            return Dialect(quote=opening, has_bare_keys=bool(arguments.get("unquoted_keys")))
    raise UnreadableTemplateError("tool_calls.content_args.string_delims: one mark that opens and closes is read")


def _around_group(parts: list[Part]) -> tuple[list[str], list[str]]:
    """Return the literal texts before the named group and behind it, one for each stretch between whitespace."""
    at = next(index for index, part in enumerate(parts) if part.group)
    return [part.text for part in parts[:at] if part.text], [part.text for part in parts[at + 1 :] if part.text]


def _literal(name: str, field: Mapping[str, Any], side: str) -> str:
    """Return the one literal text that opens or closes a field; whitespace around it does not matter."""
    texts = [part.text for part in _parts(name, field, side) if part.text]
    literal = texts[0].strip("\n") if len(texts) == 1 else ""
    if not literal or any(part.group for part in _parts(name, field, side)):
        raise UnreadableTemplateError(f"{name}: its {side} is not one literal text")
    return literal


def _parts(name: str, field: Mapping[str, Any], side: str) -> list[Part]:
    """Return the parts of what opens or closes a field."""
    if f"{side}_pattern" in field:
        return _pattern_parts(f"{name}.{side}_pattern", field[f"{side}_pattern"])
    text = field.get(side)
    if not isinstance(text, str):
        raise UnreadableTemplateError(f"{name}: its {side} is not one literal text")
    return [Part(text)]


def _pattern_parts(place: str, pattern: str) -> list[Part]:
    """Return the parts of a regular expression of literals, whitespace and named groups."""
    parts: list[Part] = []
    place_in_pattern = 0
    while place_in_pattern < len(pattern):
        found = _PATTERN_PART.match(pattern, place_in_pattern)
        if found is None:
            raise UnreadableTemplateError(f"{place}: it is more than literal text, whitespace and named groups")
        place_in_pattern = found.end()
        text = "\n" if found["line_feed"] else found["escaped"] or found["plain"] or ""
        if text and parts and parts[-1].text:
            parts[-1] = Part(parts[-1].text + text)
        else:
            parts.append(Part(text, found["group"] or ""))
    return parts


def _marks(tokens: Collection[str], *texts: str) -> tuple[str, ...]:
    """Return the tokens that stand in any of the texts."""
    return tuple(token for token in tokens if token and any(token in text for text in texts))
