"""Renders a chat as text by a Jinja2 template. A template comes with the model or from the user, and is not trusted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..checks import one_line
from ..errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Names of the message field that holds what a model thought before it answered.

Clients send any of the three; templates read one of the first two."""


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool,
) -> str:
    """Return the text of `messages`. A content is a string or a list of text parts, which are joined by newlines.

    The template sees `special_tokens` by their names. Raises InvalidRequestError for malformed messages (it names
    the first one by its index), for anything that the template raises, and for a template that exceeds the limits
    of `template_environment` on time or length.
    """
    conversation = [_plain_data(message, index) for index, message in enumerate(_checked_messages(messages))]
    names = {"add_generation_prompt": add_generation_prompt, **special_tokens}
    import jinja2

    from .template_environment import render

    try:
        return render(template, messages=conversation, tools=None, documents=None, **names)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequestError(
            f"the chat template is not valid Jinja2: line {error.lineno}: {one_line(error.message)}; correct it",
            param="chat_template",
        ) from error
    except Exception as error:  # A template is a program: it may raise anything.
        raise InvalidRequestError(
            f"the chat template refuses these messages: {one_line(error)}; change the messages or the template",
            param="messages",
        ) from error


def _plain_data(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a copy of `message` in plain JSON values: a template could call any method of the caller's objects.

    The model's reasoning is put under both of the names that templates read.
    """
    reasoning = next((message[name] for name in REASONING_NAMES if message.get(name) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    try:
        return json.loads(json.dumps(message, default=_mapping_as_dict))
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad_messages(
            f"messages[{index}] holds a value that JSON cannot hold ({one_line(error)}); send strings, numbers, "
            "booleans, null, and lists and mappings of them"
        ) from error


def _mapping_as_dict(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"an object of type {type(value).__name__}")


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each message as a dict whose content is one string; the first malformed one raises InvalidRequestError."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise _bad_messages(f"messages must be a list of at least one message, got {shorten(messages)}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _bad_messages(f"messages[{index}] must be a mapping with role and content, got {shorten(message)}")
        role = message.get("role")
        if role not in ROLES:
            raise _bad_messages(f"messages[{index}].role is {shorten(role)}, allowed are {', '.join(ROLES)}")
        content = message.get("content")
        if content is None and role == "assistant" and message.get("tool_calls"):
            yield dict(message)
        else:
            yield {**message, "content": _content_text(content, f"messages[{index}].content")}


def _content_text(content: object, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes) or not content:
        raise _bad_messages(f'{name} is {shorten(content)}, allowed are a string or a list of {{"type": "text", …}}')
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise _bad_messages(f'{name}[{index}] is {shorten(part)}, allowed is {{"type": "text", "text": "…"}}')
        texts.append(text)
    return "\n".join(texts)


def _bad_messages(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")


def shorten(value: object) -> str:
    """Return Python's `ascii(value)` cut to 80 characters, which is safe to put into any error message."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
