"""The options of a body of /v1/messages that say how to think and what to answer."""

from __future__ import annotations

from typing import Any

from ....checks import Unfit, check, check_name, integer, json_integer, one_of, or_none, refusal, told
from ....text.chat.chat_template import readable_arguments
from ..fields import TakenFields
from ..request_parser import RequestParser
from ..template_arguments import SWITCHES

THINKING_KEYS = ("type", "budget_tokens", "display", "block_binding")
OUTPUT_KEYS = ("effort", "format", "task_budget")
EFFORTS = one_of("low", "medium", "high", "xhigh", "max")


def take_thinking(parser: RequestParser, fields: TakenFields) -> None:
    """Make a budget of thoughts and variables of the chat template of `thinking` and of the effort in `output_config`.

    Disabled thoughts have a budget of 0: the prompt stays, and with it its cached prefix. An effort, and thoughts that
    are enabled, switch thoughts on where the template has a switch. What the model or its template does not know means
    nothing. Raise InvalidRequestError for a malformed object.
    """
    thinking = _object("thinking", fields.protocol.get("thinking"), THINKING_KEYS)
    output = _object("output_config", fields.protocol.get("output_config"), OUTPUT_KEYS) or {}
    effort = check("output_config.effort", output.get("effort"), or_none(EFFORTS))
    template = parser.builder.encoder.template
    known, arguments = readable_arguments(template), dict[str, Any]()
    if effort is not None and "reasoning_effort" in known:
        arguments["reasoning_effort"] = effort
    if thinking is not None:
        kinds = one_of("enabled", "adaptive", "disabled", "between_tools")
        kind = check("thinking.type", thinking.get("type"), kinds)
        budget = check("thinking.budget_tokens", json_integer(thinking.get("budget_tokens")), or_none(integer(0)))
        if kind == "enabled" and budget is None:
            raise refusal("thinking.budget_tokens", "none", "an integer ≥ 0")
        budget = 0 if kind == "disabled" else budget
        if budget is not None and parser.builder.encoder.params_checker.may_think:
            fields.sampling["thinking_token_budget"] = budget
    if effort is not None or (thinking is not None and thinking["type"] == "enabled"):
        arguments |= {name: True for name in SWITCHES if name in known}
    own = fields.prompt_options.get("chat_template_kwargs", {})
    if arguments and isinstance(own, dict):  # What is none is refused later.
        fields.prompt_options["chat_template_kwargs"] = {**arguments, **own}


def structure_of(output_config: Any) -> dict[str, Any] | None:
    """Return what `output_config.format` asks for, as `structured_outputs` has it; None for free text."""
    given = _object("output_config", output_config, OUTPUT_KEYS) or {}
    format_ = _object("output_config.format", given.get("format"), ("type", "schema"))
    if format_ is None:
        return None
    check("output_config.format.type", format_.get("type"), one_of("json_schema"))
    if format_.get("schema") is None:
        raise refusal("output_config.format.schema", "none", "a JSON schema")
    return {"json": format_["schema"]}


def stop_strings(value: Any) -> list[str]:
    """Take `stop_sequences`: a list of texts."""
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise Unfit("a list of texts that are not empty")
    return value


def _object(name: str, value: Any, keys: tuple[str, ...]) -> dict[str, Any] | None:
    """Return an object of options without its null ones; None for none. Refuse other values and unknown keys."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise refusal(name, told(value), f"an object with {', '.join(keys)}")
    for key in value:
        check_name(key, keys, "field", place=f"{name}.", way_out="leave it out")
    return {key: one for key, one in value.items() if one is not None}
