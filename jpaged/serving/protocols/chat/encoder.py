"""Responses of /v1/chat/completions, complete or in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....outputs import CompletionOutput, RequestOutput, SampleDelta
from ..choices_encoder import ChoicesEncoder
from ..logprob_records import ChatLogprobs, TokenLogprobs


class ChatEncoder(ChoicesEncoder):
    """Responses of /v1/chat/completions."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def choice(self, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        return {
            "index": self._first_choices[output.request_id] + sample.index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None},
            "logprobs": self._logprobs_field(sample.token_ids, sample.logprobs),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            **self._output_ids(sample.token_ids),
        }

    def prompt_fields(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        return self._prompt_ids_field(output.request_id) | self._prompt_logprobs_field(output)

    def opening(self) -> bytes:
        chunks = []
        for request_id, first in self._first_choices.items():
            for index in range(first, first + self.request.num_samples):
                delta = {"role": "assistant", "content": ""}
                choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                chunks.append(self._chunk(choice, self._prompt_ids_field(request_id)))
        return b"".join(chunks)

    def chunks_of(self, delta: SampleDelta) -> bytes:
        self.counts.num_output_tokens += len(delta.token_ids)
        choice = {
            "index": self._first_choices[delta.request_id] + delta.index,
            "delta": {"content": delta.text} if delta.text or delta.finish_reason is None else {},
            "logprobs": self._logprobs_field(delta.token_ids, delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return self._chunk(choice | self._output_ids(delta.token_ids))

    def _logprobs_field(
        self, token_ids: Sequence[int], token_logprobs: Sequence[TokenLogprobs] | None
    ) -> dict[str, Any] | None:
        if self.request.num_logprobs is None:
            return None
        logprobs = ChatLogprobs(self.tokenizer, self.request.num_logprobs, shows_ids=self.request.has_tokens_as_ids)
        return {"content": logprobs.records(token_ids, token_logprobs or ()), "refusal": None}
