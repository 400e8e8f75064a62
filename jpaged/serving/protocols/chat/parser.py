"""Reads the bodies of /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace

from ....checks import boolean, check, integer, or_none, refusal, sent_as, told
from ....text.chat.template_traits import traits_of
from ....text.prompts import TOOL_OPTIONS
from ..fields import TakenFields
from ..generation_request import GenerationRequest
from ..nested_options import structure_of
from ..places import Places
from ..request_parser import RequestParser, Wanted
from ..sampling_fields import params_of, sent_names
from ..template_arguments import take_template_arguments
from .fields import CHAT_FIELDS


def parse_chat(parser: RequestParser, body: bytearray) -> GenerationRequest:
    """Return the request that a body of /v1/chat/completions asks for. Raise HTTPError or InvalidRequestError."""
    fields = parser.read_fields(body, CHAT_FIELDS)
    given = fields.protocol
    if "messages" not in given:
        raise refusal("messages", "none", "a list of at least one message")
    if "max_tokens" in given and "max_completion_tokens" in given:
        raise refusal("max_tokens", "it and max_completion_tokens", "one of them", "leave max_tokens out")
    max_tokens_name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    max_tokens = check(max_tokens_name, given.get(max_tokens_name), or_none(integer(1)))
    has_logprobs = check("logprobs", given.get("logprobs", False), boolean)
    num_logprobs = check("top_logprobs", given.get("top_logprobs", 0), integer(-1))
    if num_logprobs and not has_logprobs:
        raise refusal("top_logprobs", f"{num_logprobs} without logprobs", "0", "give logprobs: true too")
    renamed = {**sent_names(fields, "messages"), "max_tokens": max_tokens_name}
    if "top_logprobs" in given:
        renamed["logprobs"] = "top_logprobs"
    wanted = Wanted(
        max_tokens=max_tokens,
        num_logprobs=num_logprobs if has_logprobs else None,
        is_stream=check("stream", given.get("stream", False), boolean),
        sent_names=renamed,
        structure=structure_of(given.get("response_format")),
    )
    shows_reasoning = check("include_reasoning", given.get("include_reasoning", True), boolean)
    take_template_arguments(parser, fields)
    places = _take_functions(fields)
    prompts = [{"messages": given["messages"]}]
    with sent_as(wanted.sent_names), places.named():
        params = params_of(parser, fields, wanted, max_tokens)
        request = parser.request(fields, prompts, params, wanted, places)
    choice = fields.prompt_options.get("tool_choice")
    return replace(
        request,
        hides_reasoning=not shows_reasoning,
        has_named_call=isinstance(choice, dict) and choice.get("type") in ("function", "custom"),
        has_function_call=bool(given.get("functions")),
        has_short_call_ids=bool(fields.prompt_options.get("tools")) and _needs_short_ids(parser),
    )


def _needs_short_ids(parser: RequestParser) -> bool:
    special_tokens = parser.tokenizer_for("tools").special_tokens
    return traits_of(parser.builder.encoder.template, special_tokens).needs_short_ids


def _take_functions(fields: TakenFields) -> Places:
    """Make OpenAI's older fields `functions` and `function_call` the tools of a chat, of which one may be called.

    Return the places by which errors about tools name them.
    """
    functions, call = fields.protocol.get("functions"), fields.protocol.get("function_call")
    places = Places()
    if functions is None and call is None:
        return places
    for name in TOOL_OPTIONS:
        if name in fields.prompt_options:
            own_name = "functions" if functions is not None else "function_call"
            raise refusal(own_name, f"it and {name}", "one of the two forms", f"leave {own_name} out")
    if functions is not None and not isinstance(functions, list):
        raise refusal("functions", told(functions), "a list of functions")
    for index in range(len(functions or ())):
        places[f"tools[{index}].function"] = f"functions[{index}]"
    places["tools"] = "functions"
    places["tool_choice"] = places["tool_choice.function"] = "function_call"
    fields.prompt_options |= {
        "tools": [{"type": "function", "function": one} for one in functions or ()],
        "tool_choice": {"type": "function", "function": call} if isinstance(call, dict) else call,
        "parallel_tool_calls": False,
    }
    return places
