"""What the encoders of all protocols share: an encoder writes the response to one request, complete or as a stream.

It reads the internal form of a request and what the core gives for it. Both kinds of responses are made of the same
parts, so that the events of a stream joined together are the complete response.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...outputs import PromptLogprobs, RequestOutput, SampleDelta
from ...text.answers.bound_format import BoundFormat
from ...text.tokenizing.tokenizer import Tokenizer
from .generation_request import GenerationRequest
from .http_errors import HTTPError
from .sample_answer import SampleAnswer


@dataclass
class TokenCounts:
    """The tokens of a response so far, whatever words its protocol has for them."""

    num_prompt_tokens: int = 0
    """Tokens of the prompts; those of a prompt with several samples count once."""
    num_cached_tokens: int = 0
    """Tokens of the prompts that were found in the cache."""
    num_output_tokens: int = 0
    """Tokens of all samples."""


class Encoder(ABC):
    """Writes the response to one request. Subclasses say what it looks like."""

    id_prefix: ClassVar[str]
    """What the id of a response begins with."""

    def __init__(
        self,
        request: GenerationRequest,
        request_ids: Sequence[str],
        tokenizer: Tokenizer | None,
        *,
        created: int,
        fingerprint: str,
        answer_format: BoundFormat | None = None,
        http_id: str = "",
        clock: Callable[[], float] = time.time,
    ):
        """`request_ids` are the core's ids of the prompts, in order; `created` is in seconds since 1970.

        `answer_format` is how the model marks the parts of an answer; None if that is not known. `http_id` is the id by
        which the log and the headers of the response call the request. `clock` tells when a response is complete.
        """
        self.http_id, self.clock = http_id, clock
        self.request, self.tokenizer, self.created, self.fingerprint = request, tokenizer, created, fingerprint
        self.request_ids, self.id = tuple(request_ids), f"{self.id_prefix}{request_ids[0]}"
        num_prompt_tokens = sum(one.num_prompt_tokens for one in request.new_requests)
        self.answer_format = answer_format
        self.counts = TokenCounts(num_prompt_tokens=num_prompt_tokens)

    def new_answers(self) -> list[SampleAnswer] | None:
        """Return what reads the answer of each sample of a chat, from its first token on; None for text alone."""
        (new,) = self.request.new_requests
        if new.answer is None or self.answer_format is None:
            return None
        return [SampleAnswer(self.answer_format, new.answer) for _ in range(self.request.num_samples)]

    @abstractmethod
    def body(self, outputs: Mapping[str, RequestOutput]) -> bytes:
        """Return the body of a complete response, from the last outputs by the core's ids."""

    @property
    def keepalive(self) -> bytes:
        """Return what breaks the silence of a stream, so that no proxy takes it for dead.

        It is a comment, behind which no empty line follows: some clients take one for the end of an event, although
        none has begun.
        """
        return b": waiting\n"

    def opening(self) -> bytes:
        """Return the events of a stream that come before any token."""
        return b""

    def take_prompt_logprobs(  # noqa: B027 - protocols without such logprobs drop them
        self, prompt_logprobs: Mapping[str, PromptLogprobs]
    ) -> None:
        """Take the logprobs of prompts, by the core's ids, which come before the first tokens of their samples."""

    def chunks(self, deltas: Sequence[SampleDelta]) -> bytes:
        """Return the events for new tokens and text."""
        return b"".join(map(self.chunks_of, deltas))

    @abstractmethod
    def chunks_of(self, delta: SampleDelta) -> bytes:
        """Return the events for one delta."""

    @abstractmethod
    def closing(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the last events, given the last outputs of all prompts."""

    @abstractmethod
    def failure(self, error: HTTPError) -> bytes:
        """Return the events that end a stream which has failed, also before its first token."""
