"""Tools in Anthropic's form, translated into the one form that every protocol shares."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ....checks import boolean, check, check_name, one_of, refusal, shown_name, told
from ....text.chat.tools import Tool, tools_of
from ..places import Places
from .left_out import LeftOut

TOOL_KEYS = {
    "type", "name", "description", "input_schema", "strict", "defer_loading", "cache_control", "eager_input_streaming",
    "input_examples", "allowed_callers",
}  # fmt: skip
"""Keys of a tool with a schema. The last four mean nothing here."""
TYPED_TOOL = re.compile(r"[a-z0-9_]+_\d{8}|mcp_toolset|tool_search_tool_(?:bm25|regex)")
"""Types of tools of Anthropic's own: hosted ones, and those whose schema only its models know. A date is a version."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Anthropic's word for a choice → OpenAI's."""


@dataclass(frozen=True)
class SentTools:
    """The tools of a body and the choice among them, in the shared form."""

    forms: list[dict[str, Any]]
    indices: list[int]
    """The index of each among the tools of the body."""
    choice: Any
    is_parallel: bool
    limits: Mapping[str, int | None]
    """The engine's limits, for the number of tools and their sizes."""

    @cached_property
    def by_name(self) -> dict[str, Tool]:
        """Return the checked tools by name, for a conversation that refers to them."""
        with self.places.named():
            checked = tools_of(self.forms, limits=self.limits)
        return {} if checked is None else {tool.name: tool for tool in checked.tools}

    def shown_in(self, brought_in: Collection[str]) -> SentTools:
        """Return the tools that the model knows in a conversation that holds the definitions of these.

        A deferred tool that is not among them is left out.
        """
        kept = [
            (form, index)
            for form, index in zip(self.forms, self.indices, strict=True)
            if not form["function"].get("defer_loading") or form["function"]["name"] in brought_in
        ]
        return replace(self, forms=[form for form, _ in kept], indices=[index for _, index in kept])

    @property
    def places(self) -> Places:
        """Return the places of the shared form, with those of the body."""
        places = Places({"parallel_tool_calls": "tool_choice.disable_parallel_tool_use"})
        places["tool_choice.function"] = "tool_choice"
        for place, index in enumerate(self.indices):
            places[f"tools[{place}]"] = places[f"tools[{place}].function"] = f"tools[{index}]"
            places[f"tools[{place}].function.parameters"] = f"tools[{index}].input_schema"
        return places

    @property
    def prompt_options(self) -> dict[str, Any]:
        """Return the keys of a prompt's mapping."""
        if self.forms:
            return {"tools": self.forms, "tool_choice": self.choice, "parallel_tool_calls": self.is_parallel}
        if self.choice not in ("auto", "none"):
            raise refusal("tool_choice", "a tool to call without tools", "auto or none", "give tools, or leave it out")
        return {}


def sent_tools(value: Any, choice: Any, left_out: LeftOut, limits: Mapping[str, int | None]) -> SentTools:
    """Return the tools and the choice of a body, None where it has none.

    `left_out` takes tools without a schema. Raise InvalidRequestError, with the place in the body, for a malformed tool
    or choice.
    """
    if value is not None and not isinstance(value, list):
        raise refusal("tools", told(value), "a list of tools")
    forms, indices = list[dict[str, Any]](), list[int]()
    for index, tool in enumerate(value or ()):
        if (form := _form(tool, f"tools[{index}]", left_out)) is not None:
            forms.append(form)
            indices.append(index)
    return SentTools(forms, indices, *_choice(choice), limits)


def _form(tool: Any, path: str, left_out: LeftOut) -> dict[str, Any] | None:
    """Return one tool in the shared form; None for one without a schema, which is left out."""
    if not isinstance(tool, dict):
        raise refusal(path, told(tool), "a tool: an object with name and input_schema")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        if not isinstance(kind, str) or not TYPED_TOOL.fullmatch(kind):
            got = shown_name(kind) if isinstance(kind, str) else told(kind)
            raise refusal(f"{path}.type", got, "custom, or a type of Anthropic's own tools, which are left out")
        left_out.add(path, kind)
        return None
    for key in tool:
        check_name(key, TOOL_KEYS, "field", place=f"{path}.", way_out="leave it out")
    if not isinstance(tool.get("name"), str):
        raise refusal(f"{path}.name", told(tool.get("name")), "a text")
    if tool.get("input_schema") is None:
        raise refusal(f"{path}.input_schema", "none", "a JSON schema of an object")
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}
    more = {
        key: check(f"{path}.{key}", tool[key], boolean)
        for key in ("strict", "defer_loading")
        if tool.get(key) is not None
    }
    return {"type": "function", "function": {**function, **more}}


def _choice(value: Any) -> tuple[Any, bool]:
    """Return a choice in OpenAI's form, and whether an answer may call several tools."""
    if value is None:
        return "auto", True
    if not isinstance(value, dict):
        raise refusal("tool_choice", told(value), 'an object such as {"type": "auto"}')
    for key in value:
        check_name(key, ("type", "name", "disable_parallel_tool_use"), "field", place="tool_choice.")
    kind = check("tool_choice.type", value.get("type"), one_of(*CHOICES, "tool"))
    is_single = value.get("disable_parallel_tool_use")
    is_single = check("tool_choice.disable_parallel_tool_use", False if is_single is None else is_single, boolean)
    if kind != "tool":
        return CHOICES[kind], not is_single
    return {"type": "function", "function": {"name": value.get("name")}}, not is_single
