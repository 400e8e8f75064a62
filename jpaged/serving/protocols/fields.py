"""The one table of the fields of request bodies: OpenAI's, vLLM's, and what this server does with each.

A field whose value is null counts as left out. docs/serving.md shows this table; a test holds it to the types of
OpenAI's package.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...checks import check_name, nearest, refusal, shown
from ...text.prompts import CHAT_OPTIONS, PROMPT_EXTRAS, TEXT_OPTIONS

logger = logging.getLogger("jpaged")

MAX_WARNED = 8
"""Unknown fields of one body that the log and the reply name at most."""


class Role(enum.Enum):
    """What becomes of a field."""

    SAMPLING = "a sampling parameter of the same name"
    PROMPT = "how the prompt is made or scheduled"
    ROUTE = "read by the route itself"
    KEPT = "taken, and without meaning here"
    MISSING = "refused by name"


@dataclass(frozen=True)
class BodyField:
    """One field of a body."""

    role: Role
    harmless: tuple[Any, ...] = ()
    """Values of a MISSING field that ask for nothing, which are taken."""
    way_out: str = "leave it out"


def _fields(role: Role, *names: str) -> dict[str, BodyField]:
    return {name: BodyField(role) for name in names}


def _missing(way_out: str = "leave it out", **harmless: tuple[Any, ...]) -> dict[str, BodyField]:
    return {name: BodyField(Role.MISSING, values, way_out) for name, values in harmless.items()}


_STRUCTURED = "give structured_outputs or response_format"
_COMMON: dict[str, BodyField] = {
    **_fields(
        Role.SAMPLING,
        "frequency_penalty", "presence_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed",
        "stop", "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
        "include_stop_str_in_output", "allowed_token_ids", "bad_words", "prompt_logprobs", "structured_outputs",
        "logit_bias",
    ),
    **_fields(Role.PROMPT, *PROMPT_EXTRAS, *TEXT_OPTIONS),
    **_fields(
        Role.ROUTE,
        "model", "n", "max_tokens", "logprobs", "stream", "stream_options", "response_format",
        "return_token_ids", "return_tokens_as_token_ids", "request_id", "use_beam_search", "length_penalty",
    ),
    **_fields(Role.KEPT, "user"),
    **_missing(best_of=(1,), logits_processors=([],), kv_transfer_params=({},), vllm_xargs=({},)),
    **_missing(repetition_detection=(), prompt_embeds=()),
    **_missing(
        _STRUCTURED,
        guided_json=(), guided_regex=(), guided_choice=(), guided_grammar=(), guided_decoding_backend=(),
        guided_whitespace_pattern=(), structural_tag=(),
    ),
}  # fmt: skip

COMPLETION_FIELDS: dict[str, BodyField] = {
    **_COMMON,
    **_fields(Role.ROUTE, "prompt", "echo"),
    **_missing(suffix=("",)),
}
CHAT_FIELDS: dict[str, BodyField] = {
    **_COMMON,
    **_fields(Role.ROUTE, "messages", "top_logprobs", "max_completion_tokens", "reasoning_effort"),
    **_fields(Role.PROMPT, *CHAT_OPTIONS),
    **_fields(
        Role.KEPT,
        "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "prediction", "parallel_tool_calls",
    ),
    **_missing(
        tools=([],), tool_choice=("none", "auto"), functions=([],), function_call=("none", "auto"),
        modalities=(["text"],), audio=(), web_search_options=(), moderation=(), verbosity=("medium",),
        echo=(False,), documents=([],), include_reasoning=(True,), thinking_token_budget=(), mm_processor_kwargs=({},),
        media_io_kwargs=({},),
    ),
    **_missing("start the server with --chat-template", chat_template=()),
}  # fmt: skip
TOKENIZE_FIELDS: dict[str, BodyField] = {
    **_fields(Role.ROUTE, "model", "prompt", "messages", "return_token_strs"),
    **_fields(Role.PROMPT, "add_special_tokens", *CHAT_OPTIONS),
    **_missing(tools=([],), mm_processor_kwargs=({},), media_io_kwargs=({},), chat_template=()),
}
DETOKENIZE_FIELDS: dict[str, BodyField] = _fields(Role.ROUTE, "model", "tokens")


@dataclass
class TakenFields:
    """The fields of one body, sorted by what becomes of them."""

    sampling: dict[str, Any] = field(default_factory=dict)
    prompt: dict[str, Any] = field(default_factory=dict)
    route: dict[str, Any] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    """Names that neither OpenAI nor vLLM has, for a warning; at most MAX_WARNED."""


def take_fields(body: Mapping[str, Any], table: Mapping[str, BodyField], *, is_strict: bool) -> TakenFields:
    """Return the fields of a body, sorted. Raise InvalidRequestError for one that this version does not have.

    A field that is not in the table is a warning, with `is_strict` an error.
    """
    taken = TakenFields()
    targets = {Role.SAMPLING: taken.sampling, Role.PROMPT: taken.prompt, Role.ROUTE: taken.route}
    for name, value in body.items():
        known = table.get(name)
        if known is None:
            if is_strict:
                check_name(name, table, "field", way_out="leave it out, or start the server without --strict")
            if len(taken.unknown) < MAX_WARNED:
                near = nearest(name, table)
                taken.unknown.append(shown(name) + (f" (did you mean {near}?)" if near else ""))
        elif known.role is Role.MISSING:
            # The type counts too: true is no 1.
            is_harmless = any(type(value) is type(one) and value == one for one in known.harmless)
            if value is not None and not is_harmless:
                allowed = " or ".join(map(str, known.harmless)) or "nothing"
                got = "a value" if isinstance(value, str | list | dict) else shown(value)
                fault = f"{got}, which is not available in this version"
                raise refusal(name, fault, allowed, known.way_out)
        elif value is not None and known.role in targets:
            targets[known.role][name] = value
    return taken
