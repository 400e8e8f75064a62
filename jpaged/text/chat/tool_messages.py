"""The tool calls and results in the messages of a chat, in the form that chat templates are written for.

This module knows OpenAI's forms of a call and which result belongs to which call. It does not know templates.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable
from typing import Any, NoReturn

from ...checks import told
from ...errors import InvalidRequestError
from .tools import CUSTOM_ARGUMENT


class ToolArguments(dict[str, Any]):
    """The arguments of a tool call: a mapping that is JSON wherever a template takes it as text.

    Some templates read its items or put it through `tojson`, others join it to other text, as the string that OpenAI's
    interface has there.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def bad_messages(message: str) -> InvalidRequestError:
    """Return the error about messages that is told as it is; it begins with the path of what is wrong."""
    return InvalidRequestError(message, param="messages")


def with_calls(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Change a message to the form of tool calls that templates are written for, and return the same dict.

    The role function becomes tool, and `function_call` becomes a list of one call in `tool_calls`, or is dropped if the
    message has `tool_calls` too. Each call is normalized by `_normalized_call`. `index` names the message in errors.
    Raise InvalidRequestError for malformed calls.
    """
    if message["role"] == "function":
        message["role"] = "tool"
    call = message.pop("function_call", None)
    if call is not None:
        message.setdefault("tool_calls", [{"type": "function", "function": call}])
    if (calls := message.get("tool_calls")) is not None:
        name = f"messages[{index}].tool_calls"
        if not isinstance(calls, list):
            raise bad_messages(f"{name} is {told(calls)}, allowed is a list of calls")
        message["tool_calls"] = [_normalized_call(call, f"{name}[{number}]") for number, call in enumerate(calls)]
    return message


def match_results(messages: Iterable[dict[str, Any]]) -> None:
    """Give each tool result in normalized messages the id and the name of its call, where it lacks them.

    A result belongs to the last call before it with its `tool_call_id`. One without an id, or whose call has none,
    belongs to the first call of the last message with calls that waits for a result. Raise InvalidRequestError for a
    result without a call.
    """
    calls: dict[str, dict[str, Any]] = {}  # Id → the last call of that id.
    waiting = without_id = _Waiting([])
    for index, message in enumerate(messages):
        if message.get("tool_calls"):
            latest = [call for call in message["tool_calls"] if isinstance(call, dict)]
            calls |= {call["id"]: call for call in latest if isinstance(call.get("id"), str)}
            waiting, without_id = _Waiting(latest), _Waiting([call for call in latest if "id" not in call])
        if message["role"] != "tool":
            continue
        call_id = message.get("tool_call_id")
        call = calls.get(call_id) if isinstance(call_id, str) else None
        if call is None:
            call = waiting.first() if call_id is None else without_id.first()
        if call is None:
            got = "has no tool_call_id, and no call before it waits for a result"
            got = got if call_id is None else "has a tool_call_id that no call before it has"
            raise bad_messages(f"messages[{index}] {got}; send the message with its call before it")
        waiting.take(call)
        without_id.take(call)
        if "name" not in message and (name := name_of(call)):
            message["name"] = name
        if call_id is None and "id" in call:
            message["tool_call_id"] = call["id"]


class _Waiting:
    """Calls of one message that wait for their results, in order. Each is looked at once, however many there are."""

    def __init__(self, calls: list[dict[str, Any]]):
        self._calls, self._answered = deque(calls), set[int]()

    def first(self) -> dict[str, Any] | None:
        """Return the first call that waits; None if none does."""
        while self._calls and id(self._calls[0]) in self._answered:
            self._calls.popleft()
        return self._calls[0] if self._calls else None

    def take(self, call: dict[str, Any]) -> None:
        """Note that a call has its result."""
        self._answered.add(id(call))


def name_of(call: dict[str, Any]) -> str | None:
    """Return the name of a normalized call's function; None for a form that has none."""
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _normalized_call(call: Any, path: str) -> Any:
    """Return a copy of a tool call without null fields and with its arguments as a mapping.

    The arguments are in the field `function`, or in the call itself, as Qwen's templates take it. A call of a custom
    tool becomes one of a function with the argument `input`. A call that is no mapping is returned as it is: it may be
    a form that the model's own template knows. `path` is the place of the call in errors. Raise InvalidRequestError for
    malformed arguments, and for another type.
    """
    if not isinstance(call, dict):
        return call
    call = {key: value for key, value in call.items() if value is not None}
    custom = call.pop("custom", None)
    if call.get("type") == "custom" and "function" not in call:
        if not isinstance(custom, dict) or not all(isinstance(custom.get(key), str) for key in ("name", "input")):
            raise bad_messages(f'{path}.custom is {told(custom)}, allowed is {{"name": "…", "input": "…"}}')
        arguments = ToolArguments({CUSTOM_ARGUMENT: custom["input"]})
        return {**call, "type": "function", "function": {"name": custom["name"], "arguments": arguments}}
    function = call.get("function")
    if function is None and call.get("type", "function") != "function":
        allowed = 'allowed is {"type": "function", "function": {"name": …, "arguments": …}}'
        raise bad_messages(f"{path} is {told(call)}, {allowed}")
    if isinstance(function, dict):
        function = {key: value for key, value in function.items() if value is not None}
        if not isinstance(name := function.get("name"), str) or not name:
            raise bad_messages(f"{path}.function.name is {told(name)}, allowed is the name of a function")
        call["function"] = {
            **function,
            "arguments": _arguments(function.get("arguments"), f"{path}.function.arguments"),
        }
    elif "arguments" in call:
        call["arguments"] = _arguments(call["arguments"], f"{path}.arguments")
    return call


def _arguments(value: Any, path: str) -> ToolArguments:
    """Return the arguments of a tool call as a mapping, which prints as JSON.

    They come as a mapping or as the JSON text of an object, such as '{"city": "Rome"}'. None and an empty text give an
    empty mapping. A number beyond float64, such as 1e400, becomes the text that was sent, since JSON has no infinity.
    Raise InvalidRequestError, with the place `path`, for anything else.
    """
    arguments = value
    if isinstance(value, str):
        try:
            arguments = json.loads(value or "{}", parse_float=_finite, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            place = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
            fault = f"is no JSON{place}; send a JSON object, as text or as it is"
            raise bad_messages(f"{path} {fault}") from error
        if "\\u" in value and not _is_unicode(arguments):
            raise bad_messages(f"{path} holds a lone surrogate, which is not valid Unicode; replace it")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise bad_messages(f"{path} is {told(value)}, allowed is a JSON object, as text or as it is")
    return ToolArguments(arguments)


def _is_unicode(value: Any) -> bool:
    """Return whether no string of a JSON value holds a lone surrogate, which JSON can write as an escape."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _finite(text: str) -> float | str:
    return number if math.isfinite(number := float(text)) else text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
