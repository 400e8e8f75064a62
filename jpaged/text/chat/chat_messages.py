"""Checks the messages of a chat, and writes them in the one form that chat templates are written for.

Clients write the same message in many forms: the package `openai` gives every field of a message that it dumps, most of
them null; the arguments of a tool call are JSON in a string; a message that calls a tool has no content. Templates test
these fields in as many ways. A template must therefore see no difference between forms that mean the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...checks import one_line, told
from .tool_messages import bad_messages, match_results, with_calls

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
OTHER_PARTS = ("image_url", "input_audio", "audio_url", "video_url", "file")
"""Types of parts of a message that OpenAI or vLLM takes, and this version refuses by name."""
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Names of the message field that holds what a model thought before it answered.

Clients send any of the three; templates read one of the first two."""


class NoContent(str):
    """The content of a message that has none: an empty string for which the test `is none` holds too.

    Some templates test for None, others join the content to other text without a test.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or other == ""

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("")


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as templates see them: plain JSON values, one string as content, no null or empty fields.

    The model's reasoning is put under both of the names that templates read. OpenAI's older forms become the newer
    ones: `function_call` becomes a tool call, and the role function the role tool. A refusal becomes the message's
    content, and the arguments of a tool call a mapping, if they came as JSON text. A tool result has the name of its
    call, and a call of a custom tool is one of a function. A message without content gets NoContent, an empty string
    that passes a template's test `is none`. Raise InvalidRequestError, which names the index, for the first malformed
    message.
    """
    conversation = []
    for index, message in enumerate(_checked(messages)):
        conversation.append(with_calls(_plain_data(message, index), index))
        conversation[-1].setdefault("content", NoContent())
    match_results(conversation)
    return conversation


def _checked(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each message as a new dict without empty fields, its content as one string.

    Empty fields are null, empty lists and empty mappings. An assistant's message may lack content (none, empty or "")
    in two cases. If it has a refusal, the refusal becomes the content. If it has reasoning or tool calls, it is yielded
    without content, or with the empty string that it came with. Raise InvalidRequestError if `messages` is no list or
    is empty, and for the first message that is malformed, has an unknown role, or has audio.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise bad_messages(f"messages must be a list of at least one message, got {told(messages)}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise bad_messages(f"messages[{index}] must be an object with role and content, got {told(message)}")
        role = message.get("role")
        if role not in ROLES:
            raise bad_messages(f"messages[{index}].role is {told(role)}, allowed are {', '.join(ROLES)}")
        if not _is_empty(message.get("audio")):
            raise bad_messages(f"messages[{index}].audio: not available in this version; send text")
        fields = {name: value for name, value in message.items() if name == "content" or not _is_empty(value)}
        content = fields.pop("content", None)
        if role == "assistant" and isinstance(content, list | tuple):
            thought, content = _thought_and_parts(content)
            fields |= {"reasoning": thought} if thought and not fields.keys() & set(REASONING_NAMES) else {}
        lacks_content = role == "assistant" and (_is_empty(content) or content == "")
        if lacks_content and "refusal" in fields:
            content = fields["refusal"]
        elif lacks_content and not {"tool_calls", "function_call", *REASONING_NAMES}.isdisjoint(fields):
            yield fields if _is_empty(content) else {**fields, "content": content}
            continue
        yield {**fields, "content": _content_text(content, f"messages[{index}].content")}


def _thought_and_parts(content: Sequence[Any]) -> tuple[str, list[Any]]:
    """Return the text of the parts of the type thinking, as Mistral's interface has them, and the other parts."""
    thoughts, parts = [], []
    for part in content:
        thought = part.get("thinking") if isinstance(part, Mapping) and part.get("type") == "thinking" else None
        if isinstance(thought, str):
            thoughts.append(thought)
        elif isinstance(thought, list) and all(isinstance(one, Mapping) for one in thought):
            thoughts += [str(one.get("text", "")) for one in thought]
        else:
            parts.append(part)
    return "".join(thoughts), parts


def _is_empty(value: object) -> bool:
    """Return whether a field's value means that the field is not there: null, [] or {}, but not ""."""
    return value is None or (isinstance(value, Sequence | Mapping) and not isinstance(value, str) and not value)


def _plain_data(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a copy of `message` in plain JSON values, with its reasoning as `thinking` and as `reasoning_content`.

    Templates read one of these two names. Of several fields with reasoning, the first of REASONING_NAMES counts, but an
    existing `thinking` stays. Only plain values are safe: a template could call any method of the caller's objects.
    `index` names the message in errors. Raise InvalidRequestError for a value that JSON cannot hold.
    """
    reasoning = next((message[name] for name in REASONING_NAMES if message.get(name)), None)  # Empty text is none.
    if reasoning is not None:
        message = {**message, "thinking": message.get("thinking") or reasoning, "reasoning_content": reasoning}
    try:
        # Through JSON text and back: what comes out has no other types, and shares nothing with the caller's objects.
        return json.loads(json.dumps(message, default=_mapping_as_dict))
    except (TypeError, ValueError, RecursionError) as error:
        way_out = "send strings, numbers, booleans, null, and lists and mappings of them"
        fault = f"messages[{index}] holds a value that JSON cannot hold ({one_line(error)})"
        raise bad_messages(f"{fault}; {way_out}") from error


def _mapping_as_dict(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"an object of type {type(value).__name__}")


def _content_text(content: object, name: str) -> str:
    """Return a message's content as one string: a string as it is, the texts of a list of parts joined by newlines.

    Parts are {"type": "text", "text": …} or {"type": "refusal", "refusal": …}, each with its text under the name of its
    type. Raise InvalidRequestError, with the place `name`, for other parts (images, for example) and for other content,
    an empty list included.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes) or not content:
        allowed = 'allowed are a string or a list of {"type": "text", …}'
        raise bad_messages(f'{name} is {told(content)}, {allowed}: give "", or leave out a message without any')
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            got = f"a part of the type {kind}" if kind in OTHER_PARTS else told(part)
            raise bad_messages(f'{name}[{index}] is {got}, allowed is {{"type": "text", "text": "…"}}')
        texts.append(text)
    return "\n".join(texts)
