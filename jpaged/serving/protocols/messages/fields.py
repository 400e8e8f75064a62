"""The fields of bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from ....text.prompts import PROMPT_EXTRAS
from ..fields import BodyField, Use, used_fields

MESSAGE_FIELDS: dict[str, BodyField] = {
    **used_fields(
        Use.PROTOCOL,
        "model", "messages", "system", "max_tokens", "stream", "stop_sequences", "thinking", "output_config", "tools",
        "tool_choice", "mcp_servers", "thread",
    ),
    **used_fields(Use.SAMPLING, "temperature", "top_p", "top_k", "min_p", "seed"),
    **used_fields(Use.PROMPT, *PROMPT_EXTRAS, "chat_template_kwargs"),
    **used_fields(
        Use.IGNORED,
        "metadata", "service_tier", "context_management", "container", "betas", "cache_control", "billing_policy",
        "compaction", "diagnostics", "fallback_credit_token", "fallbacks", "inference_geo", "speed", "user_profile_id",
        "workspace_id",
    ),
}  # fmt: skip
"""Bodies to count have the same fields; what says how to answer means nothing there."""
