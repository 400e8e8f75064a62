"""The one internal form of a request to generate, whatever protocol it came by.

The parser of a protocol makes it of a body, and the protocol's encoder writes the response from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...messages import NewRequest


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What a client asked for: requests of the core, and how it wants to be answered."""

    model: str
    """The name by which the client called the model."""
    new_requests: tuple[NewRequest, ...]
    """One for each prompt, in order; their ids and numbers are the core's to give."""
    num_samples: int
    """Samples of each prompt."""
    is_stream: bool = False
    has_usage: bool = False
    """Whether a stream ends with the usage; a complete response always has it."""
    has_continuous_usage: bool = False
    """Whether each chunk of a stream carries the usage so far."""
    num_logprobs: int | None = None
    """Likeliest tokens beside each token, whose logprobs are shown; None: no logprobs."""
    num_prompt_logprobs: int | None = None
    """Likeliest tokens beside each token of the prompt, shown in the field `prompt_logprobs`; None: no such field."""
    is_echoed: bool = False
    """Whether the text of the prompt is part of the response, and its logprobs too if there are any."""
    has_output: bool = True
    """False if no token was asked for: the one that is computed all the same is not shown."""
    has_token_ids: bool = False
    """Whether the response has the ids of the tokens of prompt and output."""
    has_tokens_as_ids: bool = False
    """Whether tokens beside logprobs are shown as `token_id:5`."""
    hides_reasoning: bool = False
    """Whether the response leaves thoughts out."""
    has_named_call: bool = False
    """Whether the client has chosen the tool that is called."""
    has_function_call: bool = False
    """Whether a call is told in OpenAI's older form, the field `function_call`, which holds one."""
    has_short_call_ids: bool = False
    """Whether ids of calls must have 9 characters, since the chat template takes no others."""
    details: Mapping[str, Any] | None = None
    """What the encoder of its protocol must know beside, as plain data."""
    client_id: str | None = None
    """The id that the client has given to the request."""
    warnings: tuple[str, ...] = ()
    """What the client sent and has no effect, in sentences."""
