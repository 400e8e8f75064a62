"""The tools that a request offers to a model, in the one form that every protocol is translated into.

The form of callers is that of OpenAI's chat completions: a list of {"type": "function", "function": {…}} and {"type":
"custom", "custom": {…}}. A custom tool takes one text, which may have to follow a grammar, instead of an object. With
`defer_loading` a tool is not listed in the prompt. This module does not know how a model writes a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ...checks import Unfit, boolean, check, check_name, one_of, or_none, refusal, shown_name, told
from ...limits import DEFAULT_LIMITS, ceiling
from ...structured_outputs import schema_of

CUSTOM_ARGUMENT = "input"
"""The name under which a chat template, and so the model, sees the text of a custom tool."""
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
"""What templates see of a function without parameters; most of them need the key `properties`."""
MAX_TOOLS = ceiling("tools")
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""OpenAI allows 64 of these characters and no dot, Anthropic 128. None of them means anything in a format of calls."""
UNUSED_KEYS = ("cache_control",)
"""Keys of a tool that say nothing to a model: Anthropic's mark of where a cached prefix ends."""


@dataclass(frozen=True)
class Tool:
    """A function or a custom tool that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of a function's arguments, an object; None for a function without any and for a custom tool."""
    is_strict: bool = False
    """Whether the arguments must follow the schema also where the model chooses freely whether to call."""
    kind: Literal["function", "custom"] = "function"
    grammar: str | None = None
    """What the text of a custom tool must follow; None: any text."""
    grammar_syntax: Literal["lark", "regex"] = "lark"
    is_listed: bool = True
    """Whether the prompt lists it among the tools; otherwise a message holds its `definition`, and it may be called all
    the same."""


@dataclass(frozen=True)
class ToolChoice:
    """Which tools an answer may call, and whether it must call one."""

    kind: Literal["auto", "none", "required", "named", "allowed"] = "auto"
    names: tuple[str, ...] = ()
    """The one tool of "named", and the tools of "allowed"."""
    is_required: bool = False
    """Whether "allowed" means that one of the tools must be called."""


@dataclass(frozen=True)
class ToolSet:
    """The tools of a request, of which there is at least one."""

    tools: tuple[Tool, ...]
    choice: ToolChoice = ToolChoice()
    is_parallel: bool = True
    """Whether an answer may call several."""

    @cached_property
    def callable_tools(self) -> tuple[Tool, ...]:
        """Return the tools that the choice allows, in the order of the list. The model sees the others too."""
        if self.choice.kind in ("named", "allowed"):
            return tuple(tool for tool in self.tools if tool.name in self.choice.names)
        return () if self.choice.kind == "none" else self.tools

    @property
    def must_call(self) -> bool:
        """Return whether the answer must call a tool."""
        return self.choice.kind in ("required", "named") or self.choice.is_required


def tools_of(
    value: Any, choice: Any = None, parallel: Any = None, *, limits: Mapping[str, int | None] = DEFAULT_LIMITS
) -> ToolSet | None:
    """Return the checked tools of a request, or None for a request without any: None or an empty list.

    `value`, `choice` and `parallel` are `tools`, `tool_choice` and `parallel_tool_calls` of a chat completion; None is
    the default of each. `limits` bounds the number of tools and the size of schemas and grammars. Raise
    InvalidRequestError, whose `param` is the path of what is wrong, for a malformed tool, a name that stands twice, a
    choice of a tool that is not in the list, and a choice without tools.
    """
    is_parallel = check("parallel_tool_calls", True if parallel is None else parallel, boolean)
    if value is not None and (not isinstance(value, Sequence) or isinstance(value, str | bytes)):
        raise refusal("tools", told(value), "a list of tools")
    if not value:
        if choice not in (None, "none", "auto"):
            raise refusal("tool_choice", f"{told(choice)} without tools", "none or auto", "give tools, or leave it out")
        return None
    if (max_tools := limits["tools"]) is not None and len(value) > max_tools:
        raise refusal("tools", f"{len(value)} tools", f"at most {max_tools}", "send fewer")
    tools = tuple(_tool(one, f"tools[{index}]", limits["schema_bytes"]) for index, one in enumerate(value))
    first_with: dict[str, int] = {}
    for index, tool in enumerate(tools):
        if (first := first_with.setdefault(tool.name, index)) != index:
            got = f"{shown_name(tool.name)}, which is the name of tools[{first}] too"
            raise refusal(f"tools[{index}].{tool.kind}.name", got, "each name once", "rename one or leave it out")
    return ToolSet(tools, _choice(choice, tools), is_parallel)


def template_tools(tools: ToolSet, *, is_full: bool = False) -> list[dict[str, Any]] | None:
    """Return the tools as chat templates see them: plain data, in one order of keys, without what means nothing.

    Only the keys of a schema keep the caller's order. Tools that the choice forbids are among them: which tool may be
    called is enforced by the output's grammar, so the prompt and its cached prefix stay. Those that are not listed are
    left out; None if that leaves none. With `is_full`, a description and `properties` of a schema are there and empty
    where the caller has left them out.
    """
    listed = [_template_tool(tool) for tool in tools.tools if tool.is_listed]
    if is_full:
        for function in (tool["function"] for tool in listed):
            function.setdefault("description", "")
            if "$ref" not in function["parameters"]:  # Its properties stand elsewhere: none would be a lie.
                function["parameters"].setdefault("properties", {})
    return listed or None


def definition(tool: Tool) -> str:
    """Return what a message says of a tool that the prompt does not list: JSON on one line, as templates see tools.

    A tool that a conversation brings in later stands at its place there. In the list it would change the text before
    everything, and with that each cached page.
    """
    return json.dumps(_template_tool(tool), ensure_ascii=False)


def _template_tool(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": _template_function(tool)}


def _template_function(tool: Tool) -> dict[str, Any]:
    parameters = _custom_parameters(tool) if tool.kind == "custom" else tool.parameters or NO_PARAMETERS
    description = {} if tool.description is None else {"description": tool.description}
    return {"name": tool.name, **description, "parameters": dict(parameters)}  # Templates change nothing.


def _custom_parameters(tool: Tool) -> dict[str, Any]:
    """Return the schema by which a model sees a custom tool: a function of one text. Its grammar is told in words."""
    description = "The input of the tool, as plain text."
    if tool.grammar is not None:
        syntax = "Lark grammar" if tool.grammar_syntax == "lark" else "regular expression"
        description = f"The input of the tool, as plain text that follows this {syntax}:\n{tool.grammar}"
    properties = {CUSTOM_ARGUMENT: {"type": "string", "description": description}}
    return {"type": "object", "properties": properties, "required": [CUSTOM_ARGUMENT]}


def _tool(value: Any, path: str, max_bytes: int | None) -> Tool:
    """Return one tool, checked. `path` is its place in errors, `max_bytes` the limit on its schema or grammar."""
    if isinstance(value, Mapping) and "name" in value:  # The form of /v1/responses.
        allowed = 'it within {"type": "function", "function": {…}}'
        raise refusal(f"{path}.name", "it beside the type", allowed, "move it there, with the other fields")
    kind = _kind_of(value, path, ("function", "custom"))
    fields = _fields(value[kind], f"{path}.{kind}", _KEYS[kind])
    path = f"{path}.{kind}"
    name = check(f"{path}.name", fields.get("name"), _name)
    description = check(f"{path}.description", fields.get("description"), or_none(_string))
    is_listed = not check(f"{path}.defer_loading", fields.get("defer_loading", False), boolean)
    if kind == "function":
        is_strict = check(f"{path}.strict", fields.get("strict", False), boolean)
        parameters = _parameters(fields.get("parameters"), f"{path}.parameters", max_bytes)
        return Tool(name, description, parameters, is_strict, is_listed=is_listed)
    syntax, grammar = _custom_format(fields.get("format"), f"{path}.format", max_bytes)
    return Tool(name, description, kind="custom", grammar=grammar, grammar_syntax=syntax, is_listed=is_listed)


_KEYS = {
    "function": ("name", "description", "parameters", "strict", "defer_loading"),
    "custom": ("name", "description", "format", "defer_loading"),
}


def _kind_of(value: Any, path: str, kinds: tuple[str, ...]) -> str:
    """Return the type of a tagged object {"type": kind, kind: {…}}, whose form is checked."""
    fields = _fields(value, path, ("type", *kinds))
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        got = shown_name(kind) if isinstance(kind, str) else told(kind)
        raise refusal(f"{path}.type", got, " or ".join(kinds))
    if kind not in fields:
        raise refusal(f"{path}.{kind}", "none", f'{{"type": "{kind}", "{kind}": {{…}}}}')
    for other in kinds:
        if other != kind and other in fields:
            raise refusal(f"{path}.{other}", f"it beside the type {kind}", f"{kind} alone", "leave it out")
    return kind


def _fields(value: Any, path: str, known: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of an object that are not null and mean something. Refuse another value and unknown fields."""
    if not isinstance(value, Mapping):
        raise refusal(path, told(value), f"an object with {', '.join(known)}")
    fields = {name: one for name, one in value.items() if one is not None and name not in UNUSED_KEYS}
    for name in fields:
        check_name(name, known, "field", place=f"{path}.", way_out="leave it out")
    return fields


def _name(value: Any) -> str:
    if not isinstance(value, str) or not TOOL_NAME.fullmatch(value):
        raise Unfit("1 to 128 letters of ASCII, digits, _, - and dots")
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise Unfit("a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Unfit("valid Unicode, without lone surrogates") from None
    return value


def _parameters(value: Any, path: str, max_bytes: int | None) -> dict[str, Any] | None:
    """Return the schema of a function's arguments as plain data; None for none.

    Refuse what is no schema of an object, and one whose `properties` or `required` no template could read.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise refusal(path, told(value), "a JSON schema of an object")
    text, schema = check(path, value, schema_of)
    if max_bytes is not None and (num_bytes := len(text.encode())) > max_bytes:
        raise refusal(path, f"{num_bytes} bytes", f"at most {max_bytes}", "shorten the schema")
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise refusal(f"{path}.type", told(kind), '"object", since arguments have names')
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise refusal(f"{path}.properties", told(properties), "an object: a name → its schema")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise refusal(f"{path}.required", told(required), "a list of names")
    plain: dict[str, Any] = schema
    return plain


def _custom_format(value: Any, path: str, max_bytes: int | None) -> tuple[Literal["lark", "regex"], str | None]:
    """Return the syntax and the text of a custom tool's grammar, ("lark", None) for a tool that takes any text."""
    if value is None:
        return "lark", None
    fields = _fields(value, path, ("type", "grammar"))
    if check(f"{path}.type", fields.get("type"), one_of("text", "grammar")) == "text":
        if "grammar" in fields:
            raise refusal(f"{path}.grammar", "it in a format of the type text", "none", 'give the type "grammar"')
        return "lark", None
    path = f"{path}.grammar"
    grammar = _fields(fields.get("grammar"), path, ("syntax", "definition"))
    syntax = check(f"{path}.syntax", grammar.get("syntax"), one_of("lark", "regex"))
    text = check(f"{path}.definition", grammar.get("definition"), _string)
    if not text.strip():
        raise refusal(f"{path}.definition", "no grammar", "a text with a grammar")
    if max_bytes is not None and (num_bytes := len(text.encode())) > max_bytes:
        raise refusal(f"{path}.definition", f"{num_bytes} bytes", f"at most {max_bytes}", "shorten the grammar")
    return syntax, text


def _choice(value: Any, tools: tuple[Tool, ...]) -> ToolChoice:
    """Return which of `tools` may be called; raise InvalidRequestError for one that is not among them."""
    if value is None:
        return ToolChoice()
    if isinstance(value, str):
        return ToolChoice(check("tool_choice", value, one_of("auto", "none", "required")))
    choice_kind = _kind_of(value, "tool_choice", ("function", "custom", "allowed_tools"))
    path = f"tool_choice.{choice_kind}"
    if choice_kind != "allowed_tools":
        return ToolChoice("named", (_chosen(value[choice_kind], path, choice_kind, tools),))
    fields = _fields(value[choice_kind], path, ("mode", "tools"))
    mode = check(f"{path}.mode", fields.get("mode"), one_of("auto", "required"))
    allowed = fields.get("tools")
    if not isinstance(allowed, Sequence) or isinstance(allowed, str) or not 1 <= len(allowed) <= MAX_TOOLS:
        raise refusal(f"{path}.tools", told(allowed), f"a list of 1 to {MAX_TOOLS} tools")
    names = []
    for index, allowed_tool in enumerate(allowed):
        tool_path = f"{path}.tools[{index}]"
        kind = _kind_of(allowed_tool, tool_path, ("function", "custom"))
        names.append(_chosen(allowed_tool[kind], f"{tool_path}.{kind}", kind, tools))
    return ToolChoice("allowed", tuple(dict.fromkeys(names)), is_required=mode == "required")


def _chosen(value: Any, path: str, kind: str, tools: tuple[Tool, ...]) -> str:
    """Return the name in {"name": …}, which must be that of a tool of this kind."""
    name = _fields(value, path, ("name",)).get("name")
    known = [tool.name for tool in tools if tool.kind == kind]
    if not isinstance(name, str) or name not in known:
        got = shown_name(name) if isinstance(name, str) else told(name)
        raise refusal(f"{path}.name", got, f"a {kind} among tools: {_list_of(known)}")
    return name


def _list_of(names: list[str]) -> str:
    """Return the first of `names` in a sentence."""
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "none is given"
