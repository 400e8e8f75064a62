"""What a chat template can show of a conversation, found by rendering small ones with words that occur nowhere else.

Templates drop what they do not know without a word: tools, the second of two calls, the text beside a call. Others
raise an error. This module only finds out; `template_fit` decides what becomes of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from .chat_messages import NoContent
from .tool_messages import ToolArguments
from .tools import Tool, ToolSet, template_tools

PROBE_S = 5.0
"""Seconds that one rendering may take. Those of published templates take 1 to 40 ms all together."""


@dataclass(frozen=True)
class TemplateTraits:
    """What a template shows, at its place, of what a conversation may hold. False: it drops it or raises an error.

    The defaults are those of a template of which nothing is known.
    """

    shows_tools: bool = True
    needs_full_tools: bool = False
    """It raises for a tool without a description, or whose parameters have no `properties`."""
    shows_calls: bool = True
    """A tool call in an assistant's message: its name and its arguments."""
    shows_call_content: bool = True
    """The text of a message that calls a tool, beside the call."""
    takes_thought_text_and_call: bool = True
    """A message may have a thought, a text and a call."""
    shows_parallel_calls: bool = True
    """Several calls in one message."""
    shows_results: bool = True
    """A tool's result behind its call."""
    shows_parallel_results: bool = True
    """The results of several calls of one message."""
    takes_several_users: bool = True
    """A user's message may follow another one."""
    takes_user_after_result: bool = True
    """A user's message may follow a tool's result."""
    shows_system: bool = True
    """A system message at the start."""
    shows_lone_system: bool = True
    """One without any other message."""
    shows_several_systems: bool = True
    """Several of them at the start."""
    shows_late_system: bool = True
    """A system message behind the first turn, at its place."""
    shows_developer: bool = True
    shows_late_developer: bool = True
    thoughts: Literal["field", "parts", "none"] = "field"
    """Where the template looks for the thoughts of an assistant's message: in the fields `reasoning_content` and
    `thinking`, in parts of its content, as Mistral's templates do, or nowhere."""
    needs_short_ids: bool = False
    """Ids of calls must have 9 characters."""


def traits_of(template: str, special_tokens: Mapping[str, str]) -> TemplateTraits:
    """Return what a template shows. The 64 last results are cached.

    Of a template that does not even show a single question, since it needs variables or messages of its own, nothing is
    known: it counts as one that shows everything, and what it refuses it refuses itself.
    """
    return _traits(template, tuple(sorted(special_tokens.items())))


_NAMES = ("zqxfirst", "zqxsecond")
_VALUES = ("zqxone", "zqxtwo")
_IDS = ("zqxcall01", "zqxcall02")  # Of 9 characters, which every template takes.
_LONG_ID = "call_zqx0123456789"
_USER = {"role": "user", "content": "zqxquestion"}
_USER_AGAIN = {"role": "user", "content": "zqxagain"}
_ANSWER = {"role": "assistant", "content": "zqxanswer"}
_RESULTS = [
    {"role": "tool", "content": text, "tool_call_id": call_id, "name": name}
    for text, call_id, name in zip(("zqxresult", "zqxother"), _IDS, _NAMES, strict=True)
]
_TURN_WORDS = ("zqxquestion", "zqxanswer", "zqxorders", "zqxagain")
_KEY_SCHEMA = {"type": "string", "description": "zqxmeaning"}
_TOOLS = template_tools(
    ToolSet(
        tuple(
            Tool(
                name, "zqxdescribed", {"type": "object", "properties": {"zqxkey": _KEY_SCHEMA}, "required": ["zqxkey"]}
            )
            for name in _NAMES
        )
    )
)
_THOUGHT = {"reasoning_content": "zqxthought", "thinking": "zqxthought"}
_BARE_TOOLS = template_tools(ToolSet((Tool(_NAMES[0], parameters={"type": "object"}),)))


@lru_cache(maxsize=64)
def _traits(template: str, special_tokens: tuple[tuple[str, str], ...]) -> TemplateTraits:
    probe = _Probe(template, dict(special_tokens))
    if not probe.shows([_USER], "zqxquestion"):
        return TemplateTraits()
    one_call = [_USER, _calling(1), _RESULTS[0]]
    both = [_USER, _calling(1, content="zqxanswer"), _RESULTS[0]]
    two_calls = [_USER, _calling(2), *_RESULTS]
    late_system = [_USER, _ANSWER, _orders("system"), _USER_AGAIN]
    late_developer = [_USER, _ANSWER, _orders("developer"), _USER_AGAIN]
    long_id = [_USER, _calling(1, call_id=_LONG_ID), {**_RESULTS[0], "tool_call_id": _LONG_ID}]
    # A role that the source never names is written out by a rule for all roles, and the model does not know it.
    knows_developer = "'developer'" in template or '"developer"' in template
    return TemplateTraits(
        shows_tools=probe.shows_tools,
        needs_full_tools=probe.shows_tools and probe.text([_USER], tools=_BARE_TOOLS) is None,
        shows_calls=probe.shows(one_call, *_VALUES[:1])
        and probe.count(one_call, _NAMES[0]) > probe.count([_USER], _NAMES[0]),
        shows_call_content=probe.shows(both, "zqxanswer") and probe.shows(both, _VALUES[0]),
        takes_thought_text_and_call=probe.text([_USER, {**_calling(1, content="zqxanswer"), **_THOUGHT}]) is not None,
        shows_parallel_calls=probe.shows(two_calls, *_VALUES),
        shows_results=probe.shows(one_call, "zqxresult"),
        shows_parallel_results=probe.shows(two_calls, "zqxresult", "zqxother"),
        takes_several_users=probe.shows([_USER, _USER_AGAIN], "zqxquestion", "zqxagain"),
        takes_user_after_result=probe.shows([*one_call, _USER_AGAIN], "zqxresult", "zqxagain"),
        shows_system=probe.shows([_orders("system"), _USER], "zqxorders"),
        shows_lone_system=probe.shows([_orders("system")], "zqxorders"),
        shows_several_systems=probe.shows(
            [_orders("system"), {"role": "system", "content": "zqxmore"}, _USER], "zqxorders", "zqxmore", "zqxquestion"
        ),
        shows_late_system=probe.shows(late_system, *_TURN_WORDS),
        shows_developer=knows_developer and probe.shows([_orders("developer"), _USER], "zqxorders"),
        shows_late_developer=knows_developer and probe.shows(late_developer, *_TURN_WORDS),
        thoughts=_place_of_thoughts(probe),
        needs_short_ids=probe.text(one_call) is not None and probe.text(long_id) is None,
    )


def _place_of_thoughts(probe: _Probe) -> Literal["field", "parts", "none"]:
    """Return where the template looks for thoughts, in a message with a call as in one with an answer."""
    parts = [{"type": "thinking", "thinking": "zqxthought"}, {"type": "text", "text": "zqxanswer"}]
    if probe.shows([_USER, {**_ANSWER, **_THOUGHT}], "zqxthought") or probe.shows(
        [_USER, {**_calling(1), **_THOUGHT}, _RESULTS[0]], "zqxthought"
    ):
        return "field"
    # A template that writes out a list as it is would show its brackets too.
    text = probe.text([_USER, {**_ANSWER, "content": parts}]) or ""
    return "parts" if "zqxthought" in text and "'thinking'" not in text and '"thinking"' not in text else "none"


class _Probe:
    """Renders small conversations by one template, with tools where it shows them."""

    def __init__(self, template: str, special_tokens: Mapping[str, str]):
        self.template = template
        self.variables = {"documents": None, "add_generation_prompt": False, **special_tokens}
        self.tools: list[dict[str, Any]] | None = _TOOLS
        self.shows_tools = self.shows([_USER], *_NAMES) and self.shows([_USER], "zqxkey")
        if not self.shows_tools:
            self.tools = None

    def text(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None) -> str | None:
        """Return the text of a conversation, with other tools if they are given; None if the template raises."""
        from .template_environment import render  # Here, since Jinja2 takes time to import.

        try:
            variables = {**self.variables, "messages": messages, "tools": tools or self.tools}
            return render(self.template, variables, max_s=PROBE_S)
        except Exception:  # A template is a program: it may raise anything.
            return None

    def count(self, messages: list[dict[str, Any]], word: str) -> int:
        """Return how often a word stands in the text of a conversation; 0 if the template raises."""
        return (self.text(messages) or "").count(word)

    def shows(self, messages: list[dict[str, Any]], *words: str) -> bool:
        """Return whether all words stand in the text of a conversation, in this order behind one another."""
        text, end = self.text(messages) or "", 0
        for word in words:
            start = text.find(word, end)
            if start < 0:
                return False
            end = start + len(word)
        return True


def _orders(role: str) -> dict[str, Any]:
    return {"role": role, "content": "zqxorders"}


def _calling(num_calls: int, *, content: str = "", call_id: str | None = None) -> dict[str, Any]:
    """Return an assistant's message with so many calls, and with the id `call_id` if it is not None."""
    calls = [
        {
            "id": call_id or id_,
            "type": "function",
            "function": {"name": name, "arguments": ToolArguments({"zqxkey": value})},
        }
        for name, value, id_ in zip(_NAMES, _VALUES, _IDS, strict=True)
    ]
    return {"role": "assistant", "content": content or NoContent(), "tool_calls": calls[:num_calls]}
