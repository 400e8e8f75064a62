"""What tables of the fields of request bodies are made of, and what this server does with the fields of a body.

Each protocol has a table of its own, which docs/serving.md shows; a test holds it to the types of the package of the
protocol's owner. A field whose value is null counts as left out.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...checks import check_name, json_integer, nearest, refusal, shown_name, told
from ...sampling.sampling_params import INTEGER_FIELDS
from ...text.prompts import PROMPT_EXTRAS, TEXT_OPTIONS

MAX_WARNED = 8
"""Fields without effect of one body, and template variables, that the log and the response name at most."""
CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""An id that a client may give to a request, in the body or in a header."""


class Use(enum.Enum):
    """What is done with a field."""

    SAMPLING = "a sampling parameter of the same name"
    PROMPT = "how the prompt is made or scheduled"
    PROTOCOL = "read by the parser of the route"
    IGNORED = "taken, and without meaning here"
    REFUSED = "refused by name"


@dataclass(frozen=True)
class BodyField:
    """One field of a body."""

    use: Use
    neutral_values: tuple[Any, ...] = ()
    """Values of a REFUSED field that ask for nothing, which are taken."""
    way_out: str = "leave it out"


def used_fields(use: Use, *names: str) -> dict[str, BodyField]:
    """Return rows of a table: fields that are used alike."""
    return {name: BodyField(use) for name in names}


def refused_fields(way_out: str = "leave it out", **neutral_values: tuple[Any, ...]) -> dict[str, BodyField]:
    """Return rows of a table: fields that are refused unless they hold one of the values given here."""
    return {name: BodyField(Use.REFUSED, values, way_out) for name, values in neutral_values.items()}


INTEGERS = frozenset(
    (
        *INTEGER_FIELDS, "max_completion_tokens", "top_logprobs", "priority", "truncate_prompt_tokens", "best_of",
        "stream_interval", "routed_experts_prompt_start",
    )
)  # fmt: skip
"""Fields that hold one integer, which JSON may write as 4.0 too."""
_STRUCTURED = "give structured_outputs or response_format"
COMMON_FIELDS: dict[str, BodyField] = {
    **used_fields(
        Use.SAMPLING,
        "frequency_penalty", "presence_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed",
        "stop", "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
        "include_stop_str_in_output", "allowed_token_ids", "bad_words", "prompt_logprobs", "structured_outputs",
        "logit_bias", "thinking_token_budget",
    ),
    **used_fields(Use.PROMPT, *PROMPT_EXTRAS, *TEXT_OPTIONS),
    **used_fields(
        Use.PROTOCOL,
        "model", "n", "max_tokens", "logprobs", "stream", "stream_options", "response_format",
        "return_token_ids", "return_tokens_as_token_ids", "request_id", "use_beam_search", "length_penalty",
    ),
    **used_fields(Use.IGNORED, "user", "session_id"),
    **refused_fields(best_of=(1,), logits_processors=([],), kv_transfer_params=({},), vllm_xargs=({},)),
    **refused_fields(
        repetition_detection=(), prompt_embeds=(), ec_transfer_params=({},), logprob_token_ids=([],), mm_payload=(),
        return_mm_kwargs=(False,), return_token_offsets=(False,), routed_experts_prompt_start=(0,),
        stream_interval=(1,), truncation_side=("left",), watermarking=(),
    ),
    **refused_fields(
        _STRUCTURED,
        guided_json=(), guided_regex=(), guided_choice=(), guided_grammar=(), guided_decoding_backend=(),
        guided_whitespace_pattern=(), structural_tag=(), json=(), json_schema=(), json_object=(False,), schema=(),
        regex=(), choice=(), grammar=(), ebnf=(), format=(),
    ),
}  # fmt: skip
"""What OpenAI's completions and chats share."""


@dataclass
class TakenFields:
    """The fields of one body, by what is done with them."""

    sampling: dict[str, Any] = field(default_factory=dict)
    prompt_options: dict[str, Any] = field(default_factory=dict)
    protocol: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    """What was sent and has no effect, a sentence for each kind."""


def take_fields(body: Mapping[str, Any], table: Mapping[str, BodyField], *, is_strict: bool) -> TakenFields:
    """Return the fields of a body by their use. Raise InvalidRequestError for one that this version does not have.

    A field whose value is null counts as left out. One that is not in the table is a warning, with `is_strict` an
    error. A whole number is an integer where one belongs: `max_tokens` of 4.0 is 4.
    """
    taken, unknown = TakenFields(), list[str]()
    targets = {Use.SAMPLING: taken.sampling, Use.PROMPT: taken.prompt_options, Use.PROTOCOL: taken.protocol}
    for name, value in body.items():
        if value is None:
            continue
        known = table.get(name)
        value = json_integer(value) if name in INTEGERS else value
        if known is None:
            if is_strict:
                check_name(name, table, "field", way_out="leave it out, or start the server without --strict")
            if len(unknown) < MAX_WARNED:
                near = nearest(name, table)
                unknown.append(shown_name(name) + (f" (did you mean {near}?)" if near else ""))
        elif known.use is Use.REFUSED:
            # The type counts too: true is no 1.
            if not any(type(value) is type(one) and value == one for one in known.neutral_values):
                allowed = " or ".join(map(json.dumps, known.neutral_values)) or "nothing"
                fault = f"{told(value)}, which is not available in this version"
                raise refusal(name, fault, allowed, known.way_out)
        elif known.use in targets:
            targets[known.use][name] = value
    if unknown:
        taken.warnings.append(f"unknown fields are ignored: {', '.join(unknown)}")
    return taken
