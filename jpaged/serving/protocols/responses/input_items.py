"""Translates the `input` of /v1/responses into the messages of chat completions.

An answer of a model is several items here and one message there: thoughts, messages and calls that follow one another
become one assistant's message, in which a new one begins where two messages follow directly. So the prompt is that of
chat completions for the same conversation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ....checks import refusal, shown_name, told
from ..places import Places
from .thoughts import unsealed
from .tools import SEARCH_NAME, SentTools, joined_name

INSTRUCTIONS = ("system", "developer")
ROLES = (*INSTRUCTIONS, "user", "assistant")
TEXT_PARTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")
OTHER_PARTS = ("input_image", "input_file", "input_audio", "computer_screenshot")
"""Types of parts that OpenAI takes, and this version refuses by name."""
ONLY_TEXT = '{"type": "input_text", "text": "…"}'
NO_TOOLS = "No tools were found."
NEW_TOOLS = "These tools can be called from here on:"
WORDS = {"tool_call_id": "call_id"}
"""Words of chat completions → what items call them."""


@dataclass
class _Answer:
    """An assistant's message while its items are read."""

    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    ends_with_text: bool = False
    """Whether its last item is a message."""

    def message(self) -> dict[str, Any]:
        """Return it as chat completions have it."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.texts) if self.texts else None}
        if self.thoughts:
            message["reasoning"] = "".join(self.thoughts)
        return {**message, "tool_calls": self.calls} if self.calls else message


class Conversation:
    """The messages of one body, while its items are read."""

    def __init__(self, places: Places, tools: SentTools):
        """`tools` takes what items announce."""
        self.places, self.tools = places, tools
        self.messages: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self._answer: _Answer | None = None
        """What further items may join; it is not among the messages yet."""
        self._has_turn = False
        """There is a message that is neither a system's nor a developer's."""

    def instruct(self, text: Any) -> None:
        """Put the field `instructions` in front."""
        if not isinstance(text, str):
            raise refusal("instructions", told(text), "a text", "send messages of the role developer in input")
        self._append({"role": "system", "content": text}, "instructions")

    def read(self, value: Any, *, first_thought: int = 0) -> None:
        """Read the field `input`. Thoughts before the item of the index `first_thought` are left out."""
        if isinstance(value, str):
            self._append({"role": "user", "content": value}, "input")
            return
        if not isinstance(value, list) or not value:
            raise refusal("input", "none" if value is None else told(value), "a text, or a list of at least one item")
        for index, item in enumerate(value):
            path = f"input[{index}]"
            if not isinstance(item, dict):
                raise refusal(path, told(item), "an item, which is an object with a type")
            kind = item.get("type")
            if kind is None and "role" in item:
                kind = "message"
            if not isinstance(kind, str) or kind not in READERS:
                got = "none" if kind is None else shown_name(kind) if isinstance(kind, str) else told(kind)
                way_out = REFUSED_ITEMS.get(str(kind), "leave the item out")
                raise refusal(f"{path}.type", got, ", ".join(READERS), way_out)
            if kind == "reasoning" and index < first_thought:
                continue
            READERS[kind](self, item, path)
        self._end_answer()

    def _append(self, message: dict[str, Any], path: str) -> None:
        """Add a message that no further item joins."""
        self._end_answer()
        self.places[f"messages[{len(self.messages)}]"] = path
        self.messages.append(message)
        self._has_turn = self._has_turn or message["role"] not in INSTRUCTIONS

    def _answer_at(self, path: str) -> _Answer:
        """Return the answer that an item joins; a new one begins with the item at `path`."""
        if self._answer is None:
            self.places[f"messages[{len(self.messages)}]"] = path
            self._answer, self._has_turn = _Answer(), True
        self._answer.ends_with_text = False
        return self._answer

    def _end_answer(self) -> None:
        if self._answer is not None:
            self.messages.append(self._answer.message())
            self._answer = None

    # One kind of items each

    def message(self, item: dict[str, Any], path: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise refusal(f"{path}.role", told(role), ", ".join(ROLES))
        parts = _parts_of(item.get("content"), f"{path}.content", refusals=role == "assistant")
        if role != "assistant":
            self._append({"role": role, "content": parts}, path)
            return
        if self._answer is not None and self._answer.ends_with_text:
            self._end_answer()
        answer = self._answer_at(path)
        self.places[f"messages[{len(self.messages)}].content"] = f"{path}.content"
        answer.texts.append(_joined(parts))
        answer.ends_with_text = True

    def reasoning(self, item: dict[str, Any], path: str) -> None:
        thought = _joined(_parts_of(item.get("content") or [], f"{path}.content"))
        if not thought and (sealed := item.get("encrypted_content")) is not None:
            thought = unsealed(sealed) or ""
        if not thought:
            thought = _joined(_parts_of(item.get("summary") or [], f"{path}.summary"), "\n\n")
        if not thought:
            if item.get("encrypted_content"):
                self.warnings.append("thoughts that another server has encrypted cannot be read, and are left out")
            return
        thoughts = self._answer_at(path).thoughts
        if thoughts and not (thoughts[-1][-1].isspace() or thought[0].isspace()):
            thoughts.append("\n")
        thoughts.append(thought)

    def function_call(self, item: dict[str, Any], path: str) -> None:
        arguments = item.get("arguments")
        if not isinstance(arguments, str):
            raise refusal(f"{path}.arguments", told(arguments), "the JSON text of an object")
        self._call(item, path, "function", {"name": self._called(item, path), "arguments": arguments})

    def custom_tool_call(self, item: dict[str, Any], path: str) -> None:
        text = item.get("input")
        if not isinstance(text, str):
            raise refusal(f"{path}.input", told(text), "a text")
        self._call(item, path, "custom", {"name": self._called(item, path), "input": text})

    def tool_search_call(self, item: dict[str, Any], path: str) -> None:
        arguments = item.get("arguments")
        if not isinstance(arguments, dict):
            raise refusal(f"{path}.arguments", told(arguments), "an object")
        self._call(item, path, "function", {"name": SEARCH_NAME, "arguments": json.dumps(arguments)})

    def _called(self, item: dict[str, Any], path: str) -> str:
        """Return the name of the tool that an item calls, as the model sees it."""
        name, namespace = item.get("name"), item.get("namespace")
        if not isinstance(name, str) or not name:
            raise refusal(f"{path}.name", told(name), "the name of a tool")
        if namespace is not None and not isinstance(namespace, str):
            raise refusal(f"{path}.namespace", told(namespace), "the name of a namespace")
        return joined_name(namespace, name)

    def _call(self, item: dict[str, Any], path: str, kind: str, called: dict[str, Any]) -> None:
        calls = self._answer_at(path).calls
        all_calls = f"messages[{len(self.messages)}].tool_calls"
        if len(calls) < 2:  # Errors about all calls name the second one, which is one too many, or the only one.
            self.places[all_calls] = path
        place = f"{all_calls}[{len(calls)}]"
        self.places[place] = self.places[f"{place}.{kind}"] = path
        calls.append({"id": _call_id(item, path), "type": kind, kind: called})

    def tool_output(self, item: dict[str, Any], path: str) -> None:
        parts = _parts_of(item.get("output"), f"{path}.output")
        self._append({"role": "tool", "tool_call_id": _call_id(item, path), "content": parts}, path)

    def tool_search_output(self, item: dict[str, Any], path: str) -> None:
        definitions = self.tools.announce(item.get("tools"), f"{path}.tools", is_listed=False)
        content = "\n".join(definitions) or NO_TOOLS
        self._append({"role": "tool", "tool_call_id": _call_id(item, path), "content": content}, path)

    def additional_tools(self, item: dict[str, Any], path: str) -> None:
        """List tools that stand before the first turn. Others stand at their place: no text before them changes."""
        definitions = self.tools.announce(item.get("tools"), f"{path}.tools", is_listed=not self._has_turn)
        if definitions and self._has_turn:
            self._append({"role": "developer", "content": "\n".join([NEW_TOOLS, *definitions])}, path)

    def compaction(self, item: dict[str, Any], path: str) -> None:
        key = next((key for key in ("text", "summary", "content") if item.get(key)), None)
        if key is not None:
            self._append({"role": "user", "content": _parts_of(item[key], f"{path}.{key}")}, path)
        elif (thought := unsealed(item.get("encrypted_content"))) is not None:
            self._append({"role": "user", "content": thought}, path)
        else:
            self.warnings.append("items of the type compaction without a text are left out")


READERS: dict[str, Callable[[Conversation, dict[str, Any], str], None]] = {
    "message": Conversation.message,
    "reasoning": Conversation.reasoning,
    "function_call": Conversation.function_call,
    "function_call_output": Conversation.tool_output,
    "custom_tool_call": Conversation.custom_tool_call,
    "custom_tool_call_output": Conversation.tool_output,
    "tool_search_call": Conversation.tool_search_call,
    "tool_search_output": Conversation.tool_search_output,
    "additional_tools": Conversation.additional_tools,
    "compaction": Conversation.compaction,
}
"""Type of an item → what reads it."""
REFUSED_ITEMS = {
    **dict.fromkeys(
        (
            "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_list_tools",
            "mcp_call", "mcp_approval_request", "mcp_approval_response", "computer_call", "computer_call_output",
            "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output", "apply_patch_call",
            "apply_patch_call_output", "program", "program_output",
        ),
        "leave it out, or tell of it in a message",
    ),
    "item_reference": "responses are not stored: send the item itself",
    "compaction_trigger": "responses are not compacted here: send a message that asks for a summary",
    "configuration_update": "give reasoning and text beside input",
}  # fmt: skip
"""Type of an item that is refused → what a client can do instead."""


def last_user_index(value: Any) -> int:
    """Return the index of the last item of an `input` that is a user's message; 0 without any."""
    items = value if isinstance(value, list) else ()
    found = (index for index, item in enumerate(items) if isinstance(item, dict) and item.get("role") == "user")
    return max(found, default=0)


def _call_id(item: dict[str, Any], path: str) -> str:
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or not call_id:
        raise refusal(f"{path}.call_id", "none" if call_id is None else told(call_id), "the id of a call")
    return call_id


def _joined(parts: str | list[dict[str, str]], separator: str = "\n") -> str:
    """Return what `_parts_of` returns as one text."""
    return parts if isinstance(parts, str) else separator.join(part["text"] for part in parts)


def _parts_of(value: Any, path: str, *, refusals: bool = False) -> str | list[dict[str, str]]:
    """Return a text or a list of parts as chat completions have it. With `refusals` a part may be a refusal."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refusal(path, told(value), f"a text, or a list of {ONLY_TEXT}")
    if not value:
        return ""
    parts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        key = "refusal" if refusals and kind == "refusal" else "text"
        if (kind not in TEXT_PARTS and key == "text") or not isinstance(part.get(key), str):
            got = f"a part of the type {kind}" if kind in OTHER_PARTS else told(part)
            raise refusal(f"{path}[{index}]", got, ONLY_TEXT, "send text" if kind in OTHER_PARTS else "")
        parts.append({"type": "text", "text": part[key]})
    return parts
