"""What a body sets for the chat template: its variables, and the roles that the template knows."""

from __future__ import annotations

from typing import Any

from ...checks import check, one_line, one_of, or_none, refusal, shown_name
from ...text.chat.chat_messages import normalize_messages, without_developers
from ...text.chat.chat_template import readable_arguments
from ...text.chat.thinking import may_think
from ...text.prompts import template_kwargs
from .fields import MAX_WARNED, TakenFields
from .request_parser import RequestParser

EFFORT = one_of("none", "minimal", "low", "medium", "high", "xhigh")
MAX_READABLE_CHARS = 300
"""Characters of the list of template variables in a warning or an error."""


def take_template_arguments(parser: RequestParser, fields: TakenFields) -> None:
    """Make `chat_template_kwargs` the variables of a chat that its template reads, `reasoning_effort` among them.

    Of others a warning is noted, and a strict server refuses them. An effort of "none" is what a model without
    thoughts makes in any case, so it needs neither; nor does a variable that is null.
    """
    arguments, effort = _template_arguments(fields), fields.protocol.get("reasoning_effort")
    if not arguments:
        return
    template = parser.builder.encoder.template
    known = readable_arguments(template)
    unread = [name for name, value in arguments.items() if name not in known and value is not None]
    thinks = parser.tokenizer is not None and may_think(parser.tokenizer, template)
    if effort == "none" and "reasoning_effort" in unread and not thinks:
        unread.remove("reasoning_effort")
    fields.prompt_options["chat_template_kwargs"] = {name: value for name, value in arguments.items() if name in known}
    if not unread:
        return
    names = ", ".join(map(shown_name, unread[:MAX_WARNED]))
    readable = one_line(", ".join(sorted(known)) or "nothing", MAX_READABLE_CHARS)
    if parser.is_strict:
        is_effort = effort is not None and unread == ["reasoning_effort"]
        name = "reasoning_effort" if is_effort else "chat_template_kwargs"
        way_out = "leave it out, or start the server without --strict"
        raise refusal(name, "it" if is_effort else names, f"what the chat template reads: {readable}", way_out)
    fields.warnings.append(f"the chat template does not read {names}, left out; it reads: {readable}")


def for_template(parser: RequestParser, messages: Any) -> Any:
    """Return messages in which the role developer is system, if the chat template does not know that role.

    Others are returned as they are, also malformed ones.
    """
    is_list = isinstance(messages, list) and all(isinstance(one, dict) for one in messages)
    if not is_list or "developer" in parser.builder.encoder.template:
        return messages
    if not any(one.get("role") == "developer" for one in messages):
        return messages
    return without_developers(normalize_messages(messages))


def _template_arguments(fields: TakenFields) -> dict[str, Any]:
    """Return the variables that a body sets for the chat template, `reasoning_effort` among them."""
    given = fields.prompt_options.get("chat_template_kwargs", {})
    arguments: dict[str, Any] = check("chat_template_kwargs", given, template_kwargs)
    effort = check("reasoning_effort", fields.protocol.get("reasoning_effort"), or_none(EFFORT))
    if effort is None:
        return arguments
    if "reasoning_effort" in arguments:
        got = "it and chat_template_kwargs with the same name"
        raise refusal("reasoning_effort", got, "one of them", "leave one out")
    return arguments | {"reasoning_effort": effort}
