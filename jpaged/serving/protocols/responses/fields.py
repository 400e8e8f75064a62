"""The fields of bodies of /v1/responses."""

from __future__ import annotations

from ....text.prompts import CHAT_OPTIONS, PROMPT_EXTRAS, TEXT_OPTIONS
from ..fields import COMMON_FIELDS, BodyField, Use, refused_fields, used_fields

_WHOLE_INPUT = "send the whole conversation as input: the items of each response's output go back as they are"
_SAMPLING = {name: field for name, field in COMMON_FIELDS.items() if field.use is Use.SAMPLING}
RESPONSE_FIELDS: dict[str, BodyField] = {
    **{name: field for name, field in _SAMPLING.items() if name != "prompt_logprobs"},
    **used_fields(Use.PROMPT, *PROMPT_EXTRAS, *TEXT_OPTIONS, *CHAT_OPTIONS),
    **used_fields(
        Use.PROTOCOL,
        "model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning", "include",
        "max_output_tokens", "top_logprobs", "stream", "stream_options", "truncation", "metadata", "request_id",
    ),
    **used_fields(
        Use.IGNORED,
        "store", "client_metadata", "service_tier", "safety_identifier", "user", "max_tool_calls", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "access_programs", "image",
    ),
    **refused_fields(_WHOLE_INPUT, previous_response_id=(), conversation=()),
    **refused_fields("send instructions and input", prompt=()),
    **refused_fields("leave it out, and read the stream", background=(False,), background_options=({},)),
    **refused_fields(context_management=([],), moderation=()),
    **refused_fields("give max_output_tokens", max_tokens=(), max_completion_tokens=()),
    **refused_fields("give input", messages=()),
    **refused_fields("give text.format", response_format=()),
    **refused_fields("give reasoning.effort", reasoning_effort=()),
}  # fmt: skip
"""`max_tool_calls` bounds calls of hosted tools, of which there are none."""
