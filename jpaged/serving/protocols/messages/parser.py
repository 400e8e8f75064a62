"""Reads the bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ....checks import INT64, boolean, check, integer, refusal, sent_as, told
from ....errors import ContextLengthError
from ....json_lines import encode_json
from ..fields import TakenFields
from ..generation_request import GenerationRequest
from ..http_errors import HTTPError
from ..places import Places
from ..request_parser import ParserResponse, RequestParser, Wanted
from ..sampling_fields import params_of
from ..template_arguments import take_template_arguments
from .conversation import conversation_of
from .errors import NO_THREADS
from .fields import MESSAGE_FIELDS
from .left_out import LeftOut
from .options import stop_strings, structure_of, take_thinking
from .tools import sent_tools

SENT_NAMES = {
    "prompt": "messages", "prompt_token_ids": "messages", "stop": "stop_sequences",
    "structured_outputs": "output_config.format", "structured_outputs.json": "output_config.format.schema",
    "thinking_token_budget": "thinking.budget_tokens", "reasoning_effort": "output_config.effort",
    "continue_final_message": "messages",
}  # fmt: skip
"""The engine's names → those of the fields of a body."""


def parse_messages(parser: RequestParser, body: bytearray) -> GenerationRequest:
    """Return the request that a body of /v1/messages asks for. Raise HTTPError or InvalidRequestError."""
    fields = parser.read_fields(body, MESSAGE_FIELDS)
    given = fields.protocol
    if "thread" in given:
        message = "thread: conversations are not stored; leave it out, and send the whole conversation"
        raise HTTPError(400, message, param="thread", code=NO_THREADS)
    if "max_tokens" not in given:
        raise refusal("max_tokens", "none", "an integer ≥ 1")
    max_tokens = check("max_tokens", given["max_tokens"], integer(1))
    if "stop_sequences" in given:
        fields.sampling["stop"] = check("stop_sequences", given["stop_sequences"], stop_strings)
    prompt, places = _prompt(parser, fields)
    wanted = Wanted(
        max_tokens=None,  # More than the context leaves is cut to it.
        num_logprobs=None,
        is_stream=check("stream", given.get("stream", False), boolean),
        sent_names=SENT_NAMES,
        structure=structure_of(given.get("output_config")),
    )
    with _in_anthropics_words(parser.max_model_len - 1), places.named(), sent_as(SENT_NAMES):
        params = params_of(parser, fields, wanted, min(max_tokens, INT64[1]))
        return parser.request(fields, [prompt], params, wanted, places)


def count_tokens(parser: RequestParser, body: bytearray) -> ParserResponse:
    """Return the response of /v1/messages/count_tokens: the input tokens that the usage of the same body would tell."""
    fields = parser.read_fields(body, MESSAGE_FIELDS)
    prompt, places = _prompt(parser, fields)
    with _in_anthropics_words(parser.max_model_len - 1), places.named(), sent_as(SENT_NAMES):
        encoded = parser.counting_encoder.encode({**prompt, **fields.prompt_options})
    return ParserResponse(encode_json({"input_tokens": len(encoded.token_ids)}), tuple(fields.warnings))


def _prompt(parser: RequestParser, fields: TakenFields) -> tuple[dict[str, Any], Places]:
    """Return the mapping of a body's prompt, and where its parts stand in the body.

    Its options among the fields, such as the variables of the chat template, are checked; they are not in the mapping.
    """
    given, left_out = fields.protocol, LeftOut(is_strict=parser.is_strict)
    tools = sent_tools(given.get("tools"), given.get("tool_choice"), left_out, parser.limits)
    conversation = conversation_of(given.get("system"), given.get("messages"), tools, left_out)
    for index in range(len(_servers(given.get("mcp_servers")))):
        left_out.add(f"mcp_servers[{index}]", "a server of tools")
    left_out.warn(fields)
    take_thinking(parser, fields)
    take_template_arguments(parser, fields)
    tools = tools.shown_in(conversation.brought_in)
    places = tools.places
    for index, path in enumerate(conversation.paths):
        places[f"messages[{index}]"] = path
        places[f"messages[{index}].tool_calls"] = f"{path}.content"
    prompt: dict[str, Any] = {"messages": conversation.messages, **tools.prompt_options}
    if conversation.is_prefilled:
        prompt["continue_final_message"] = True
    return prompt, places


def _servers(value: Any) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise refusal("mcp_servers", told(value), "a list of servers", "leave it out")
    return value or []


@contextmanager
def _in_anthropics_words(max_tokens: int) -> Iterator[None]:
    """Let errors of the `with` block tell that a prompt has more than `max_tokens` tokens in Anthropic's words.

    By these words clients see that they have to shorten the conversation: Claude Code compacts it.
    """
    try:
        yield
    except ContextLengthError as error:
        num_tokens = error.num_prompt_tokens or max_tokens + 1  # Where it is not known, more than fit.
        message = f"prompt is too long: {num_tokens} tokens > {max_tokens} maximum"
        raise error.reworded(message, param="messages") from None
