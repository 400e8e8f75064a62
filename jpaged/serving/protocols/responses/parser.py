"""Reads the bodies of /v1/responses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from ....checks import Rule, Unfit, boolean, check, integer, one_of, or_none, refusal, sent_as, told
from ....errors import InvalidRequestError
from ....json_lines import encode_json
from ....sampling.sampling_params import SamplingParams
from ....text.chat.chat_template import readable_arguments
from ..fields import MAX_WARNED, TakenFields
from ..generation_request import GenerationRequest
from ..nested_options import JSON_SCHEMA, take_object
from ..places import Places
from ..request_parser import RequestParser, Wanted
from ..sampling_fields import params_of
from ..template_arguments import EFFORT, take_template_arguments
from .details import ResponseDetails
from .fields import RESPONSE_FIELDS
from .input_items import WORDS, Conversation, last_user_index
from .tools import SentTools

ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
INCLUDES = (
    ENCRYPTED, LOGPROBS, "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
)  # fmt: skip
"""What `include` may name. The others than the first two tell of hosted tools and images, of which there are none."""
SUMMARY = one_of("auto", "concise", "detailed")
REASONING: dict[str, Rule] = {
    "effort": EFFORT, "summary": SUMMARY, "generate_summary": SUMMARY, "mode": one_of("standard"),
    "context": one_of("auto", "current_turn", "all_turns"),
}  # fmt: skip
TEXT: dict[str, Rule] = {"format": lambda value: value, "verbosity": one_of("low", "medium", "high")}
FORMAT_TYPE = one_of("text", "json_object", "json_schema")


def parse_response(parser: RequestParser, body: bytearray) -> GenerationRequest:
    """Return the request that a body of /v1/responses asks for. Raise HTTPError or InvalidRequestError."""
    fields = parser.read_fields(body, RESPONSE_FIELDS)
    given = fields.protocol
    reasoning = take_object("reasoning", given.get("reasoning", {}), REASONING)
    text = take_object("text", given.get("text", {}), TEXT)
    includes = _includes(given.get("include"))
    given["metadata"] = check("metadata", given.get("metadata", {}), _metadata)
    conversation = _conversation_of(given, is_short=reasoning.get("context") == "current_turn")
    tools, places = conversation.tools, conversation.places
    prompt = {
        "messages": conversation.messages,
        "tools": tools.tools,
        "tool_choice": tools.choice(given.get("tool_choice")),
        "parallel_tool_calls": given.get("parallel_tool_calls"),
    }
    _note_left_out(parser, fields, conversation)
    _take_style(parser, fields, reasoning.get("effort"), text.get("verbosity"))
    wanted = _wanted(given, _structure_of(text.get("format")), includes)
    with sent_as(wanted.sent_names), places.named():
        take_template_arguments(parser, fields)
        params = params_of(parser, fields, wanted, wanted.max_tokens)
        request = parser.request(fields, [prompt], params, wanted, places)
    assert isinstance(params, SamplingParams), "no field asks for beams"
    details = ResponseDetails(
        repeated=encode_json(_repeated(given, params, tools, reasoning, text)).decode(),
        names=tools.names,
        has_search=tools.has_search,
        has_encrypted=ENCRYPTED in includes,
    )
    return replace(request, details=msgspec.to_builtins(details))


def _conversation_of(given: dict[str, Any], *, is_short: bool) -> Conversation:
    """Return the messages and tools of a body. With `is_short`, thoughts before the last user message are left out."""
    places = Places(WORDS)
    places["messages"] = "input"
    conversation = Conversation(places, SentTools(places))
    conversation.tools.add_field(given.get("tools"))
    if "instructions" in given:
        conversation.instruct(given["instructions"])
    value = given.get("input")
    conversation.read(value, first_thought=last_user_index(value) if is_short else 0)
    return conversation


def _includes(value: Any) -> tuple[str, ...]:
    """Return what `include` names."""
    if value is not None and not isinstance(value, list):
        raise refusal("include", told(value), f"a list of {', '.join(INCLUDES)}")
    return tuple(check(f"include[{index}]", one, one_of(*INCLUDES)) for index, one in enumerate(value or ()))


def _structure_of(text_format: Any) -> dict[str, Any] | None:
    """Return the structured output that `text.format` asks for, as `structured_outputs` has it; None for plain text."""
    if text_format is None:
        return None
    is_schema = isinstance(text_format, dict) and text_format.get("type") == "json_schema"
    described = take_object("text.format", text_format, {"type": FORMAT_TYPE, **(JSON_SCHEMA if is_schema else {})})
    if "type" not in described:
        raise refusal("text.format.type", "none", "text, json_object or json_schema")
    if is_schema and "schema" not in described:
        raise refusal("text.format", "an object without schema", "one with the schema")
    structures = {"text": None, "json_object": {"json_object": True}, "json_schema": {"json": described.get("schema")}}
    return structures[described["type"]]


def _wanted(given: dict[str, Any], structure: dict[str, Any] | None, includes: tuple[str, ...]) -> Wanted:
    """Return what a body asks for beside its prompt and how tokens are drawn."""
    take_object("stream_options", given.pop("stream_options", {}), {"include_obfuscation": boolean})
    num_tops = check("top_logprobs", given.get("top_logprobs", 0), integer(0))
    names = {
        "prompt": "input",
        "prompt_token_ids": "input",
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "logprobs": "top_logprobs",
    }
    if structure is not None:
        format_names = ("response_format", "structured_outputs")
        names |= dict.fromkeys(format_names, "text.format") | {"structured_outputs.json": "text.format.schema"}
    return Wanted(
        max_tokens=check("max_output_tokens", given.get("max_output_tokens"), or_none(integer(1))),
        num_logprobs=num_tops if num_tops or LOGPROBS in includes else None,
        is_stream=check("stream", given.get("stream", False), boolean),
        sent_names=names,
        structure=structure,
    )


def _take_style(parser: RequestParser, fields: TakenFields, effort: str | None, verbosity: str | None) -> None:
    """Give the chat template the effort and the verbosity; a verbosity that is not medium needs one that reads it."""
    if effort is not None:
        fields.protocol["reasoning_effort"] = effort
    if verbosity is None:
        return
    if "verbosity" in readable_arguments(parser.builder.encoder.template):
        given = fields.prompt_options.get("chat_template_kwargs", {})
        if isinstance(given, dict):  # Anything else is refused where it is read.
            fields.prompt_options["chat_template_kwargs"] = {"verbosity": verbosity, **given}
    elif verbosity != "medium":
        _note(
            parser, fields, "text.verbosity", f"the chat template does not read verbosity, so {verbosity} has no effect"
        )


def _note_left_out(parser: RequestParser, fields: TakenFields, conversation: Conversation) -> None:
    """Note warnings about what was left out of tools and input, and about a truncation that has no effect."""
    if left_out := conversation.tools.left_out:
        kinds = ", ".join(list(dict.fromkeys(left_out))[:MAX_WARNED])
        _note(parser, fields, "tools", f"tools that this server does not run are left out: {kinds}")
    if unread := conversation.tools.unread:
        _note(parser, fields, "tools", f"keys of tools are left out: {', '.join(unread[:MAX_WARNED])}")
    for warning in dict.fromkeys(conversation.warnings):
        _note(parser, fields, "input", warning)
    truncation = fields.protocol.get("truncation", "disabled")
    if check("truncation", truncation, one_of("auto", "disabled")) == "auto":
        _note(parser, fields, "truncation", "truncation auto drops no items: an input that is too long is refused")


def _note(parser: RequestParser, fields: TakenFields, name: str, warning: str) -> None:
    """Note a warning about what has no effect; a strict server refuses it by its name."""
    if parser.is_strict:
        raise InvalidRequestError(f"{name}: {warning}; leave it out, or start the server without --strict", param=name)
    fields.warnings.append(warning)


def _repeated(
    given: dict[str, Any],
    params: SamplingParams,
    tools: SentTools,
    reasoning: dict[str, Any],
    text: dict[str, Any],
) -> dict[str, Any]:
    """Return the fields of a response that only repeat what was asked for, as OpenAI's type has them."""
    return {
        "background": False,
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "max_tool_calls": None,
        "metadata": given.get("metadata", {}),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": False,
        "temperature": params.temperature,
        "text": {"format": text.get("format", {"type": "text"}), "verbosity": text.get("verbosity", "medium")},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [_shown_tool(tool) for tool in tools.shown],
        "top_logprobs": given.get("top_logprobs", 0),
        "top_p": params.top_p,
        "truncation": "disabled",
    }


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as OpenAI's type of a response has it: a function has all its fields."""
    return {"parameters": None, "strict": False, **tool} if tool["type"] == "function" else tool


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise Unfit("an object of texts")
    return value
