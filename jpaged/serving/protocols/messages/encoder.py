"""Responses of /v1/messages, complete or as a stream of named events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....json_lines import encode_json
from ....outputs import CompletionOutput, RequestOutput, SampleDelta
from ....sampling.sampling_params import SamplingParams
from ....text.answers.events import Content
from ..encoder import Encoder
from ..http_errors import HTTPError
from .content_blocks import BlockWriter, Record, joined_blocks
from .errors import error_record


def _event(record: Record) -> bytes:
    """Return an event of a stream. Clients read its type from the line `event`, and skip data without one."""
    return b"event: " + record["type"].encode() + b"\ndata: " + encode_json(record) + b"\n\n"


class MessagesEncoder(Encoder):
    """Writes an answer as content blocks. Whole, it is what the events of a stream join to."""

    id_prefix = "msg_"
    keepalive = _event({"type": "ping"})

    def __init__(self, *args: Any, **options: Any):
        """The arguments are those of `Encoder`."""
        super().__init__(*args, **options)
        answers = self.new_answers()
        self._answer = None if answers is None else answers[0]
        """Tells thoughts and calls apart; None if the text is all."""
        self._blocks = BlockWriter(self.id)
        self._stop: Record = {"stop_reason": None, "stop_sequence": None}

    def body(self, outputs: Mapping[str, RequestOutput]) -> bytes:
        (output,) = outputs.values()
        (sample,) = output.outputs
        self.counts.num_cached_tokens = output.num_cached_tokens
        content = joined_blocks(self._records(sample))
        return encode_json(self._message(content))

    def opening(self) -> bytes:
        return _event({"type": "message_start", "message": self._message([])}) + self.keepalive

    def chunks_of(self, delta: SampleDelta) -> bytes:
        return b"".join(map(_event, self._records(delta)))

    def closing(self, outputs: Sequence[RequestOutput]) -> bytes:
        self.counts.num_cached_tokens = sum(output.num_cached_tokens for output in outputs)
        delta = {"type": "message_delta", "delta": self._stop, "usage": self._usage()}
        return _event(delta) + _event({"type": "message_stop"})

    def failure(self, error: HTTPError) -> bytes:
        return _event(error_record(error, self.http_id))

    def _records(self, sample: SampleDelta | CompletionOutput) -> list[Record]:
        """Return the records for new tokens, or for all tokens of a sample; its end stops the open block."""
        self.counts.num_output_tokens += len(sample.token_ids)
        if self._answer is not None:
            events = self._answer.read(sample)
        else:
            events = [Content(sample.text)] if sample.text else []
        records = list(self._blocks.write(events))
        if sample.finish_reason is not None:
            records += self._blocks.stop()
            self._stop = self._stop_fields(sample)
        return records

    def _stop_fields(self, sample: SampleDelta | CompletionOutput) -> Record:
        """Return why a sample has ended, in Anthropic's words."""
        new = self.request.new_requests[0]
        assert isinstance(new.params, SamplingParams)
        if isinstance(sample.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_reason}
        if sample.finish_reason == "length":
            is_cut = new.params.max_tokens is None or new.max_tokens < new.params.max_tokens
            reason = "model_context_window_exceeded" if is_cut else "max_tokens"
        else:
            reason = "tool_use" if self._blocks.num_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def _message(self, content: Sequence[Record]) -> Record:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
            "content": content,
            **self._stop,
            "usage": self._usage(),
        }

    def _usage(self) -> Record:
        """Return the tokens so far. Those of the prompt that were in the cache are known at the end."""
        counts = self.counts
        usage: Record = {
            "input_tokens": counts.num_prompt_tokens - counts.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.num_cached_tokens,
            "output_tokens": counts.num_output_tokens,
        }
        if self._answer is not None:
            usage["output_tokens_details"] = {"thinking_tokens": self._answer.num_thought_tokens}
        return usage
