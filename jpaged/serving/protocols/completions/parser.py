"""Reads the bodies of /v1/completions."""

from __future__ import annotations

from typing import Any

from ....checks import boolean, check, integer, or_none, refusal, sent_as, told
from ..generation_request import GenerationRequest
from ..nested_options import structure_of
from ..request_parser import RequestParser, Wanted
from ..sampling_fields import params_of, sent_names
from .fields import COMPLETION_FIELDS

DEFAULT_COMPLETION_TOKENS = 16
"""Output tokens of /v1/completions where a body does not say, as OpenAI has it."""


def parse_completion(parser: RequestParser, body: bytearray) -> GenerationRequest:
    """Return the request that a body of /v1/completions asks for. Raise HTTPError or InvalidRequestError."""
    fields = parser.read_fields(body, COMPLETION_FIELDS)
    given = fields.protocol
    is_echoed = check("echo", given.get("echo", False), boolean)
    num_logprobs = check("logprobs", given.get("logprobs"), or_none(integer(-1)))
    max_tokens = check("max_tokens", given.get("max_tokens"), or_none(integer(0 if is_echoed else 1)))
    prompts = [{_key_of(prompt): prompt} for prompt in _prompts(parser, given.get("prompt"))]
    wanted = Wanted(
        max_tokens=max_tokens or None,
        num_logprobs=num_logprobs,
        is_stream=check("stream", given.get("stream", False), boolean),
        is_echoed=is_echoed,
        has_output=max_tokens != 0,
        structure=structure_of(given.get("response_format")),
        sent_names=sent_names(fields, "prompt"),
    )
    # None: the default, cut to what the context leaves. 0: one token is computed, as always, and not shown. Others
    # are refused if they do not fit.
    num_computed = DEFAULT_COMPLETION_TOKENS if max_tokens is None else max(max_tokens, 1)
    with sent_as(wanted.sent_names):
        return parser.request(fields, prompts, params_of(parser, fields, wanted, num_computed), wanted)


def _prompts(parser: RequestParser, value: Any) -> list[Any]:
    """Return the list of prompts in a body: one text, token ids, or a list of either kind."""
    if value is None or value in ("", []):
        raise refusal("prompt", "none" if value is None else told(value), "a prompt that is not empty")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise refusal("prompt", told(value), "a text, a list of token ids, or a list of such prompts")
    if not any(isinstance(one, str | list) for one in value):
        return [value]
    max_prompts = parser.limits["prompts"]
    if max_prompts is not None and len(value) > max_prompts:
        raise refusal("prompt", f"{len(value)} prompts", f"at most {max_prompts}", "send several requests")
    if not all(type(one) is type(value[0]) for one in value):
        raise refusal("prompt", "a list of prompts of several kinds", "texts alone, or lists of token ids alone")
    return value


def _key_of(prompt: Any) -> str:
    """Return the key of a prompt in the mapping that the engine takes."""
    return "prompt" if isinstance(prompt, str) else "prompt_token_ids"
