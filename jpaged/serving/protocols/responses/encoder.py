"""Responses of /v1/responses, complete or as a stream of events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ....json_lines import encode_json
from ....outputs import CompletionOutput, RequestOutput, SampleDelta
from ....sampling.sampling_params import SamplingParams
from ....text.answers.events import Content, Event
from ..encoder import Encoder
from ..http_errors import HTTPError, short_message
from ..logprob_records import ChatLogprobs
from .details import ResponseDetails
from .output_items import OutputItems
from .text_logprobs import TextLogprobs

FAILURE_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""OpenAI's word for why a response has failed, by the status of the error; others are `server_error`."""


class ResponsesEncoder(Encoder):
    """Writes a response, whose output is a list of items. A stream tells how the items come about."""

    id_prefix = "resp_"

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._details = msgspec.convert(self.request.details, ResponseDetails)
        answers = self.new_answers()
        self._answer = None if answers is None else answers[0]
        self._items = OutputItems(self.id, self._details, self._tell)
        self._finish_reason: str | None = None
        self._logprobs = self._text_logprobs()
        self._held_records: list[dict[str, Any]] = []
        """Those of tokens whose text no event has told of yet."""
        self._events = bytearray()
        """Events that have still to be sent."""
        self._num_events = 0

    # Complete

    def body(self, outputs: Mapping[str, RequestOutput]) -> bytes:
        (output,) = outputs.values()
        self._read(output.outputs[0])
        self._finish([output])
        return self._response(self._final_status)

    # Streamed

    @property
    def keepalive(self) -> bytes:
        """Return an event that every client ignores; a comment does not reset Codex's clock."""
        self._tell("keepalive", {})
        return self._take()

    def opening(self) -> bytes:
        for kind in ("response.created", "response.in_progress"):
            self._tell_response(kind, "in_progress")
        return self._take()

    def chunks_of(self, delta: SampleDelta) -> bytes:
        self._read(delta)
        return self._take()

    def closing(self, outputs: Sequence[RequestOutput]) -> bytes:
        self._finish(outputs)
        self._tell_response(f"response.{self._final_status}", self._final_status)
        return self._take()

    def failure(self, error: HTTPError) -> bytes:
        opening = b"" if self._num_events else self.opening()
        code = error.code or FAILURE_CODES.get(error.status, "server_error")
        self._tell_response("response.failed", "failed", {"code": code, "message": short_message(error)})
        return opening + self._take()

    # What both share

    def _read(self, sample: SampleDelta | CompletionOutput) -> None:
        """Read new tokens and text: those of a delta, or of the whole answer."""
        self.counts.num_output_tokens += len(sample.token_ids)
        self._finish_reason = sample.finish_reason
        if self._logprobs is None:
            self._items.read(self._events_of(sample))
            return
        for piece, records in self._logprobs.pieces(sample):
            events = self._events_of(piece)
            self._held_records += records
            if events:
                records, self._held_records = self._held_records, []
                self._items.read(events, records)

    def _events_of(self, sample: SampleDelta | CompletionOutput) -> Sequence[Event]:
        """Return the events of the answer that new tokens make certain."""
        if self._answer is not None:
            return self._answer.read(sample)
        return [Content(sample.text)] if sample.text else []

    def _text_logprobs(self) -> TextLogprobs | None:
        """Return what finds the logprobs of a text; None if they were not asked for."""
        num_tops, tokenizer = self.request.num_logprobs, self.tokenizer
        if num_tops is None or tokenizer is None:
            return None
        (new,) = self.request.new_requests
        hides_special = isinstance(new.params, SamplingParams) and new.params.skip_special_tokens
        logprobs = ChatLogprobs(tokenizer, num_tops, shows_ids=self.request.has_tokens_as_ids)
        return TextLogprobs(logprobs, frozenset(tokenizer.special_ids) if hides_special else frozenset())

    def _finish(self, outputs: Sequence[RequestOutput]) -> None:
        """End the output, given the last output of the prompt."""
        self.counts.num_cached_tokens = sum(output.num_cached_tokens for output in outputs)
        self._items.finish(is_cut=self._finish_reason == "length")

    @property
    def _final_status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _response(self, status: str, error: dict[str, str] | None = None) -> bytes:
        """Return the response as it is now, as JSON."""
        is_over = status != "in_progress"
        fields = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(self.clock()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.request.model,
            "output": self._items.ended,
            "usage": self._usage() if is_over else None,
        }
        return encode_json(fields)[:-1] + b"," + self._details.repeated.encode()[1:]

    def _usage(self) -> dict[str, Any]:
        """Return the tokens so far. Writing to the cache costs nothing, so no tokens are told of that."""
        counts = self.counts
        num_reasoning_tokens = 0 if self._answer is None else self._answer.num_thought_tokens
        return {
            "input_tokens": counts.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": counts.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": counts.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
            "total_tokens": counts.num_prompt_tokens + counts.num_output_tokens,
        }

    def _tell_response(self, kind: str, status: str, error: dict[str, str] | None = None) -> None:
        """Add the event of a type that holds the response."""
        self._tell(kind, {"response": msgspec.Raw(self._response(status, error))})

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        """Add an event to those that have still to be sent; a complete response has none."""
        if not self.request.is_stream:
            return
        event = encode_json({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        self._events += b"event: %b\ndata: %b\n\n" % (kind.encode(), event)

    def _take(self) -> bytes:
        events = bytes(self._events)
        self._events.clear()
        return events
