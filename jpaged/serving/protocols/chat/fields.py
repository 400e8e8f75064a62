"""The fields of bodies of /v1/chat/completions."""

from __future__ import annotations

from ....text.prompts import CHAT_OPTIONS, TOOL_OPTIONS
from ..fields import COMMON_FIELDS, BodyField, Use, refused_fields, used_fields

CHAT_FIELDS: dict[str, BodyField] = {
    **COMMON_FIELDS,
    **used_fields(
        Use.PROTOCOL, "messages", "top_logprobs", "max_completion_tokens", "reasoning_effort", "enable_thinking",
        "include_reasoning", "functions", "function_call",
    ),
    **used_fields(Use.PROMPT, *CHAT_OPTIONS, *TOOL_OPTIONS),
    **used_fields(
        Use.IGNORED,
        "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "prediction", "verbosity",
    ),
    **refused_fields(
        modalities=(["text"],), audio=(), web_search_options=(), moderation=(), 
        echo=(False,), documents=([],), return_prompt_text=(False,),
        mm_processor_kwargs=({},), media_io_kwargs=({},),
    ),
    **refused_fields("start the server with --chat-template", chat_template=()),
}  # fmt: skip
