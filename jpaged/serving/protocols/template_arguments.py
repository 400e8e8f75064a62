"""What a body sets for the chat template: its variables, and whether and how much the model thinks."""

from __future__ import annotations

from typing import Any

from ...checks import boolean, check, one_line, one_of, or_none, refusal, shown_name
from ...text.chat.chat_template import readable_arguments
from ...text.prompts import template_kwargs
from .fields import MAX_WARNED, TakenFields
from .request_parser import RequestParser

EFFORT = one_of("none", "minimal", "low", "medium", "high", "xhigh", "max")
BESIDE = {"reasoning_effort": or_none(EFFORT), "enable_thinking": or_none(boolean)}
"""Variables of the template that may stand in the body too → the rules of their values."""
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates switch thoughts on or off."""
MAX_READABLE_CHARS = 300
"""Characters of the list of template variables in a warning or an error."""


def take_template_arguments(parser: RequestParser, fields: TakenFields) -> None:
    """Make `chat_template_kwargs` the variables of a chat that its template reads, with those of BESIDE among them.

    Of others a warning is noted, and a strict server refuses them; a variable that is null needs neither. An effort of
    "none" and `enable_thinking` of false are met by whatever keeps the model from thinking: the template's own switch,
    else an empty thought. Any other effort switches thoughts on.
    """
    arguments = _template_arguments(fields)
    if not arguments:
        return
    template = parser.builder.encoder.template
    known = readable_arguments(template)
    met = _set_thinking(parser, fields, arguments, known)
    unread = [name for name, value in arguments.items() if name not in known and value is not None and name not in met]
    fields.prompt_options["chat_template_kwargs"] = {name: value for name, value in arguments.items() if name in known}
    if not unread:
        return
    names = ", ".join(map(shown_name, unread[:MAX_WARNED]))
    readable = one_line(", ".join(sorted(known)) or "nothing", MAX_READABLE_CHARS)
    if parser.is_strict:
        is_beside = len(unread) == 1 and unread[0] in BESIDE and fields.protocol.get(unread[0]) is not None
        name = unread[0] if is_beside else "chat_template_kwargs"
        way_out = "leave it out, or start the server without --strict"
        raise refusal(name, "it" if is_beside else names, f"what the chat template reads: {readable}", way_out)
    fields.warnings.append(f"the chat template does not read {names}, left out; it reads: {readable}")


def _set_thinking(
    parser: RequestParser, fields: TakenFields, arguments: dict[str, Any], known: frozenset[str]
) -> set[str]:
    """Switch thoughts on or off as `arguments` ask, and return those of them that are met by that.

    `known` are the variables that the template reads; its switch is added to `arguments` unless the client has set it.
    """
    effort, wanted = arguments.get("reasoning_effort"), arguments.get("enable_thinking")
    wants_thoughts = wanted if isinstance(wanted, bool) else None if effort is None else effort != "none"
    if wants_thoughts is None:
        return set()
    met = {"enable_thinking"} | ({"reasoning_effort"} if effort == "none" else set())
    switch = next((name for name in SWITCHES if name in known), None)
    if switch is not None:
        arguments.setdefault(switch, wants_thoughts)
        return met
    thinks = parser.builder.encoder.params_checker.may_think
    if thinks and not wants_thoughts and "reasoning_effort" not in known & arguments.keys():
        fields.sampling.setdefault("thinking_token_budget", 0)
    return met if thinks or not wants_thoughts else met - {"enable_thinking"}


def _template_arguments(fields: TakenFields) -> dict[str, Any]:
    """Return the variables that a body sets for the chat template, those of BESIDE among them."""
    given = fields.prompt_options.get("chat_template_kwargs", {})
    arguments: dict[str, Any] = check("chat_template_kwargs", given, template_kwargs)
    for name, rule in BESIDE.items():
        value = check(name, fields.protocol.get(name), rule)
        if value is None:
            continue
        if name in arguments and arguments[name] != value:
            raise refusal(name, "it and chat_template_kwargs with another value", "one of them", "leave one out")
        arguments[name] = value
    return arguments
