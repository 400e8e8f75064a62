"""Fits a conversation to what a chat template can show, and refuses what the template would drop without a word.

A system message behind the first turn, for a template that only has one at the start, joins the user's turn at its
place: moved to the start it would change the text before it, and with that every cached page. So does a user's message
for which a template raises an error, since agents send several in a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from ...checks import refusal, told
from ...errors import InvalidRequestError
from .chat_messages import REASONING_NAMES, NoContent
from .template_traits import TemplateTraits
from .tool_messages import bad_messages
from .tools import ToolSet, template_tools

INSTRUCTIONS = ("system", "developer")
SHORT_ID_LEN = 9
"""The length of the ids that Mistral's templates demand."""


def fit_to_template(
    conversation: Sequence[dict[str, Any]], traits: TemplateTraits, tools: ToolSet | None
) -> list[dict[str, Any]]:
    """Return normalized messages in the form that a template with these traits shows whole.

    The given messages are not changed. Raise InvalidRequestError for tools that the template does not show, and for the
    first message of which it would drop something or for which it raises.
    """
    if tools is not None and not traits.shows_tools and template_tools(tools):
        way_out = "leave them out, or give a template that shows tools (--chat-template FILE)"
        allowed = "none, since this model's chat template does not show them to the model"
        raise refusal("tools", told(tools.tools), allowed, way_out)
    num_results = 0  # Results in a row.
    for index, message in enumerate(conversation):
        num_results = num_results + 1 if message["role"] == "tool" else 0
        _check_message(message, f"messages[{index}]", traits, num_results)
    fitted = _with_texts_in_place(conversation, traits)
    if traits.needs_short_ids:
        fitted = _with_short_ids(fitted)
    if not traits.shows_call_content:
        fitted = [_without_blank_content(message) for message in fitted]
    if not traits.takes_thought_text_and_call:
        fitted = [_with_thought_in_text(message) for message in fitted]
    return [_with_thought_parts(message) for message in fitted] if traits.thoughts == "parts" else fitted


def _check_message(message: dict[str, Any], path: str, traits: TemplateTraits, num_results: int) -> None:
    """Refuse a message with calls or a result that the template does not show whole.

    `num_results` is the number of results up to this one that follow one another.
    """
    calls = message.get("tool_calls") or ()
    if calls and not traits.shows_calls:
        raise _dropped(f"{path}.tool_calls", told(calls), "none", "does not show calls")
    if len(calls) > 1 and not traits.shows_parallel_calls:
        raise _dropped(f"{path}.tool_calls", f"{len(calls)} calls", "one call", "does not show several of a message")
    if calls and message["content"].strip() and not traits.shows_call_content:
        raise _dropped(f"{path}.content", "a text", "none", "does not show a text beside tool calls")
    if num_results and not traits.shows_results:
        raise _dropped(path, "the result of a tool", "none", "does not show results")
    if num_results > 1 and traits.shows_parallel_calls and not traits.shows_parallel_results:
        raise _dropped(path, "a further result", "one behind a call", "does not show several")


def _dropped(path: str, got: str, allowed: str, what: str) -> InvalidRequestError:
    """Return the error about a part of a message that the template would drop, or for which it would raise."""
    way_out = "leave it out, or give a template that does (--chat-template FILE)"
    return bad_messages(f"{path}: got {got}, allowed: {allowed}, since this model's chat template {what}; {way_out}")


def _with_texts_in_place(conversation: Sequence[dict[str, Any]], traits: TemplateTraits) -> list[dict[str, Any]]:
    """Return messages whose system, developer and user messages are where and what the template shows.

    The role developer becomes system where the template does not know it. Further ones at the start are joined to the
    first one. One behind the first turn that the template does not show at its place is joined to the user's message
    before it or behind it, or to the tool's result before it where no user's message may follow a result; otherwise it
    becomes a user's message. A user's message is joined to the one before it, or to a tool's result, where the template
    takes none behind it. Raise InvalidRequestError for a system message at the start that the template does not show,
    there or alone.
    """
    fitted = _Joined()
    has_turn = False
    pending: list[str] = []  # Instructions that wait for the next user's message.
    for index, message in enumerate(_with_results_at_calls(conversation)):
        role, text = message["role"], message["content"]
        if role not in INSTRUCTIONS:
            has_turn = True
            if pending and role != "user":
                fitted.add({"role": "user"}, *pending)
            if pending and role == "user":
                fitted.add(message, *pending, text)
            elif role == "user" and not _takes_user(fitted, traits):
                fitted.join(text)
            else:
                fitted.add(message)
            pending = []
        elif has_turn:
            if role == "developer" and not traits.shows_developer:
                role = "system"
            last = fitted.last["role"]
            if traits.shows_late_developer if role == "developer" else traits.shows_late_system:
                fitted.add({**message, "role": role})
            elif last == "user" or (last == "tool" and not traits.takes_user_after_result):
                fitted.join(text)
            else:
                pending.append(text)
        elif fitted.messages and not (traits.shows_several_systems and role == "system" == fitted.last["role"]):
            fitted.join(text)
        else:
            role = "system" if role == "developer" and not traits.shows_developer else role
            if role == "system" and not traits.shows_system:
                way_out = "put its text into the first user message"
                reason = "none, since this model's chat template does not show one"
                raise bad_messages(f"messages[{index}]: got a {message['role']} message, allowed: {reason}; {way_out}")
            fitted.add({**message, "role": role})
    if not has_turn and not traits.shows_lone_system:
        got, allowed = f"a {conversation[0]['role']} message alone", "one before a user's message"
        raise bad_messages(f"messages[0]: got {got}, allowed: {allowed}, for this model's chat template; add one")
    if pending:
        fitted.add({"role": "user"}, *pending)
    return fitted.whole()


def _with_results_at_calls(conversation: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield messages in their order, but results before system and developer messages between them and their calls.

    Gemma 4's template would drop a result that does not follow its call.
    """
    held: list[dict[str, Any]] = []  # Instructions that stand behind a call or a result.
    may_have_result = False
    for message in conversation:
        if may_have_result and message["role"] in INSTRUCTIONS:
            held.append(message)
            continue
        if message["role"] != "tool":
            yield from held
            held.clear()
            may_have_result = bool(message.get("tool_calls"))
        yield message
    yield from held


def _takes_user(messages: _Joined, traits: TemplateTraits) -> bool:
    """Return whether a user's message may follow the last message."""
    last = messages.last["role"] if messages.messages else None
    return traits.takes_several_users if last == "user" else traits.takes_user_after_result if last == "tool" else True


class _Joined:
    """Messages to which further texts are joined, with an empty line between two."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._texts: dict[int, list[str]] = {}  # Index of a message → its texts, joined at the end.

    @property
    def last(self) -> dict[str, Any]:
        return self.messages[-1]

    def add(self, message: dict[str, Any], *texts: str) -> None:
        """Add a message, whose content are the `texts` if there are any."""
        if texts:
            self._texts[len(self.messages)] = list(texts)
        self.messages.append(message)

    def join(self, text: str) -> None:
        """Join a text to the last message."""
        self._texts.setdefault(len(self.messages) - 1, [self.last.get("content", "")]).append(text)

    def whole(self) -> list[dict[str, Any]]:
        """Return all messages with their texts."""
        for index, texts in self._texts.items():
            self.messages[index] = {**self.messages[index], "content": "\n\n".join(texts)}
        return self.messages


def _with_short_ids(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which ids of calls have SHORT_ID_LEN letters and digits; those that do stay as they are.

    Others are numbered in the order of the calls, so the same conversation has the same ids through every protocol. A
    call without an id gets one, and so does its result.
    """
    taken = {call.get("id") for message in conversation for call in _calls_of(message)}
    numbers = (number for number in count() if f"call{number:05d}" not in taken)
    new_ids: dict[str, str] = {}  # The last call's own id → its short one.
    without_id = deque[str]()  # Short ids of the last message's calls that had none; their results follow in order.
    fitted = []
    for message in conversation:
        if message.get("tool_calls"):
            calls = []
            without_id.clear()
            for call in message["tool_calls"]:
                if isinstance(call, dict) and not _is_short(call_id := call.get("id")):
                    short_id = f"call{next(numbers):05d}"
                    if isinstance(call_id, str):
                        new_ids[call_id] = short_id
                    else:
                        without_id.append(short_id)
                    call = {**call, "id": short_id}
                calls.append(call)
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool" and not _is_short(call_id := message.get("tool_call_id")):
            known = new_ids.get(call_id) if isinstance(call_id, str) else None
            if known or without_id:
                message = {**message, "tool_call_id": known or without_id.popleft()}
        fitted.append(message)
    return fitted


def _calls_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [call for call in message.get("tool_calls") or () if isinstance(call, dict)]


def _is_short(call_id: Any) -> bool:
    return isinstance(call_id, str) and len(call_id) == SHORT_ID_LEN and call_id.isascii() and call_id.isalnum()


def _without_blank_content(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with calls without the blank text beside them, for which a template may drop the calls."""
    return {**message, "content": NoContent()} if message.get("tool_calls") else message


def _with_thought_in_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message that calls a tool with its thought before its text: OpenAI's template takes one of the two."""
    thought, text = message.get("reasoning_content"), message["content"]
    if not message.get("tool_calls") or not thought or not text:
        return message
    without = {name: value for name, value in message.items() if name not in REASONING_NAMES}
    return {**without, "content": f"{thought}\n\n{text}"}


def _with_thought_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant's message with its thought as a part of its content."""
    thought = message.get("reasoning_content")
    if message["role"] != "assistant" or not thought:
        return message
    text = [{"type": "text", "text": message["content"]}] if message["content"] else []
    return {**message, "content": [{"type": "thinking", "thinking": thought}, *text]}
