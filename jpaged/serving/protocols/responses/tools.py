"""Translates the tools of /v1/responses into those of chat completions, and their names back.

    {"type": "function", "name", "parameters", …}       → {"type": "function", "function": {"name", "parameters", …}}
    {"type": "custom", "name", "format"}                → {"type": "custom", "custom": {"name", "format"}}
    {"type": "namespace", "name": "a", "tools": [b, c]} → functions and custom tools named a__b and a__c
    {"type": "tool_search", "execution": "client", …}   → a function tool_search

Tools that only OpenAI's own servers run are left out, with a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ....checks import check, one_of, refusal, shown_name, told
from ....text.chat.tools import definition, tools_of
from ..places import Places

HOSTED_KINDS = (
    "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search",
    "code_interpreter", "image_generation", "mcp", "computer", "computer_use", "computer_use_preview", "local_shell",
    "shell", "apply_patch", "programmatic_tool_calling",
)  # fmt: skip
"""Tools without a schema that a model could be shown: OpenAI's servers run them, or its models are trained for them."""
CALLED_KINDS, SEARCH_NAME = ("function", "custom"), "tool_search"
KINDS = (*CALLED_KINDS, "namespace", SEARCH_NAME)
JOINT = "__"
"""Stands between a namespace and the name of a tool in it, where the model sees the tool."""
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")
_CUSTOM_KEYS = ("name", "description", "format")
_NEUTRAL_KEYS = ("type", "async", "allowed_callers", "defer_loading", "execution")
"""Keys that are looked at elsewhere, or mean nothing here: deferred tools of the field `tools` are listed too."""


def joined_name(namespace: Any, name: str) -> str:
    """Return the name under which the model sees a tool of a namespace, or of none."""
    return f"{namespace}{JOINT}{name}" if namespace else name


@dataclass
class SentTools:
    """The tools of one body, in the order in which they were sent, as chat completions have them."""

    places: Places
    tools: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name of a tool of a namespace as the model sees it → namespace, name."""
    shown: list[dict[str, Any]] = field(default_factory=list)
    """The tools of the field `tools` that are in force, as they were sent."""
    left_out: list[str] = field(default_factory=list)
    """Kinds that were left out."""
    unread: list[str] = field(default_factory=list)
    """Places of keys that were left out."""
    has_search: bool = False
    _known: set[str] = field(default_factory=set)
    """Names of the tools, as the model sees them."""

    def add_field(self, value: Any) -> None:
        """Take the field `tools` of a body."""
        for index, tool in enumerate(_list_of_tools(value, "tools")):
            found = self._found(tool, f"tools[{index}]")
            for path, made in found:
                self._add(made, path)
            if found:
                self.shown.append(tool)

    def announce(self, value: Any, path: str, *, is_listed: bool) -> list[str]:
        """Take tools that an item of the input announces at `path`, and return what a message says of each.

        One whose name is known already is the same tool, announced again. `is_listed` says whether the prompt lists
        the tools, which then stand before the whole conversation.
        """
        definitions = []
        for index, tool in enumerate(_list_of_tools(value, path)):
            for tool_path, made in self._found(tool, f"{path}[{index}]"):
                places = Places()
                self._note(places, 0, made, tool_path)
                with places.named():
                    checked = tools_of([made])
                assert checked is not None
                definitions.append(definition(checked.tools[0]))
                if checked.tools[0].name not in self._known:
                    kind = made["type"]
                    unlisted = {**made, kind: {**made[kind], "defer_loading": True}}
                    self._add(made if is_listed else unlisted, tool_path)
        return definitions

    def choice(self, value: Any) -> Any:
        """Return `tool_choice` as chat completions have it."""
        if not isinstance(value, dict):
            return value
        kind = check("tool_choice.type", value.get("type"), one_of(*CALLED_KINDS, SEARCH_NAME, "allowed_tools"))
        if kind != "allowed_tools":
            self.places[f"tool_choice.{kind}"] = self.places["tool_choice.function"] = "tool_choice"
            return self._chosen(value)
        path = "tool_choice.allowed_tools"
        self.places[path] = "tool_choice"
        allowed, listed = list[dict[str, Any]](), value.get("tools")
        for index, tool in enumerate(listed if isinstance(listed, list) else ()):
            tool_path = f"tool_choice.tools[{index}]"
            if not isinstance(tool, dict):
                raise refusal(tool_path, told(tool), 'an object such as {"type": "function", "name": …}')
            if tool.get("type") in HOSTED_KINDS:
                self.left_out.append(tool["type"])
                continue
            check(f"{tool_path}.type", tool.get("type"), one_of(*CALLED_KINDS, SEARCH_NAME))
            chosen = self._chosen(tool)
            self.places[f"{path}.tools[{len(allowed)}].{chosen['type']}"] = tool_path
            allowed.append(chosen)
        tools = allowed if isinstance(listed, list) else listed
        return {"type": kind, kind: {"mode": value.get("mode"), "tools": tools}}

    def _chosen(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return the choice of one tool: of `value`, an object with the tool's type and name."""
        kind, name = value["type"], value.get("name")
        if kind == SEARCH_NAME:
            kind, name = "function", SEARCH_NAME
        if isinstance(name, str):
            name = joined_name(value.get("namespace"), name)
        return {"type": kind, kind: {"name": name}}

    def _found(self, tool: Any, path: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the functions and custom tools that one tool stands for, each behind its place; none if left out."""
        kind = _kind_of(tool, path, (*KINDS, *HOSTED_KINDS))
        if kind in HOSTED_KINDS or (kind == SEARCH_NAME and tool.get("execution") != "client"):
            self.left_out.append(kind)
            return []
        if kind == SEARCH_NAME:
            self.has_search = True
            return [(path, self._made({**tool, "type": "function", "name": SEARCH_NAME}, path, None))]
        if kind != "namespace":
            return [(path, self._made(tool, path, None))]
        namespace = tool.get("name")
        if not isinstance(namespace, str) or not namespace:
            raise refusal(f"{path}.name", told(namespace), "the name of a namespace")
        found = []
        for index, inner in enumerate(_list_of_tools(tool.get("tools"), f"{path}.tools")):
            inner_path = f"{path}.tools[{index}]"
            _kind_of(inner, inner_path, CALLED_KINDS)
            found.append((inner_path, self._made(inner, inner_path, namespace)))
        return found

    def _made(self, tool: dict[str, Any], path: str, namespace: str | None) -> dict[str, Any]:
        """Return a function or a custom tool, of a namespace or of none, as chat completions have it."""
        callers = tool.get("allowed_callers")
        if callers is not None and not (isinstance(callers, list) and (not callers or "direct" in callers)):
            raise refusal(f"{path}.allowed_callers", told(callers), '["direct"]', "leave it out")
        if tool.get("async"):
            raise refusal(f"{path}.async", told(tool["async"]), "false", "leave it out")
        kind, name = tool["type"], tool.get("name")
        if isinstance(name, str) and namespace is not None:
            self.names[joined_name(namespace, name)] = namespace, name
            name = joined_name(namespace, name)
        keys = _FUNCTION_KEYS if kind == "function" else _CUSTOM_KEYS
        given = {key: one for key, one in tool.items() if one is not None and key not in _NEUTRAL_KEYS}
        self.unread += [f"{path}.{shown_name(key)}" for key in given if key not in keys]
        made = {key: one for key, one in given.items() if key in keys} | {"name": name}
        if kind == "custom" and _has_grammar(made.get("format")):
            grammar = {key: value for key, value in made["format"].items() if key != "type"}
            made["format"] = {"type": "grammar", "grammar": grammar}
        return {"type": kind, kind: made}

    def _add(self, tool: dict[str, Any], path: str) -> None:
        """Take a tool in the form of chat completions that was sent at `path`."""
        self._note(self.places, len(self.tools), tool, path)
        self.tools.append(tool)
        if isinstance(name := tool[tool["type"]]["name"], str):
            self._known.add(name)

    @staticmethod
    def _note(places: Places, index: int, tool: dict[str, Any], path: str) -> None:
        """Note where the tool `tools[index]` of a chat was sent."""
        place, kind = f"tools[{index}]", tool["type"]
        places[place] = places[f"{place}.{kind}"] = path
        places[f"{place}.{kind}.format.grammar"] = f"{path}.format"


def _list_of_tools(value: Any, path: str) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise refusal(path, told(value), "a list of tools")
    return value


def _has_grammar(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "grammar"


def _kind_of(tool: Any, path: str, kinds: Sequence[str]) -> str:
    """Return the type of a tool, which must be one of `kinds`."""
    if not isinstance(tool, dict):
        raise refusal(path, told(tool), 'an object such as {"type": "function", "name": …, "parameters": …}')
    kind = tool.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        got = shown_name(kind) if isinstance(kind, str) else told(kind)
        raise refusal(f"{path}.type", got, ", ".join(one for one in kinds if one not in HOSTED_KINDS))
    return kind
