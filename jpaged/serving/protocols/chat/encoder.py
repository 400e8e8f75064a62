"""Responses of /v1/chat/completions, complete or in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....outputs import CompletionOutput, RequestOutput, SampleDelta
from ..choices_encoder import ChoicesEncoder
from ..logprob_records import ChatLogprobs, TokenLogprobs
from .answer import ChatAnswer


class ChatEncoder(ChoicesEncoder):
    """Writes the answer of a chat: as the model's text, or with thoughts and calls told apart."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        answers = self.new_answers()
        self._answers = (
            None
            if answers is None
            else [ChatAnswer(one, self.request, self.id, index) for index, one in enumerate(answers)]
        )
        """The answer of each choice; None if its text is all."""
        request = self.request
        self._tells_of_tokens = (
            request.num_logprobs is not None or request.has_token_ids or request.has_continuous_usage
        )
        """A chunk tells more of its tokens than their text."""

    def choice(self, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        index = self._first_choices[output.request_id] + sample.index
        message: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
        finish_reason = sample.finish_reason
        if self._answers is not None:
            answer = self._answers[index]
            message, finish_reason = answer.message(sample), answer.finish_reason(finish_reason)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs_field(sample.token_ids, sample.logprobs),
            "finish_reason": finish_reason,
            "stop_reason": sample.stop_reason,
            **self._output_ids(sample.token_ids),
        }

    def prompt_fields(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        return self._prompt_ids_field(output.request_id) | self._prompt_logprobs_field(output)

    def opening(self) -> bytes:
        chunks = []
        # Where calls may be all there is, the content is null until there is some.
        content = "" if self._answers is None else None
        for request_id, first in self._first_choices.items():
            for index in range(first, first + self.request.num_samples):
                delta = {"role": "assistant", "content": content}
                choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                chunks.append(self._chunk(choice, self._prompt_ids_field(request_id)))
        return b"".join(chunks)

    def chunks_of(self, delta: SampleDelta) -> bytes:
        self.counts.num_output_tokens += len(delta.token_ids)
        index = self._first_choices[delta.request_id] + delta.index
        if self._answers is None:
            shown = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
            return self._choice_chunk(index, shown, delta, delta.finish_reason)
        answer = self._answers[index]
        deltas = answer.deltas(delta)
        finish_reason = None if delta.finish_reason is None else answer.finish_reason(delta.finish_reason)
        if len(deltas) == 1:  # As for most tokens.
            return self._choice_chunk(index, deltas[0], delta, finish_reason)
        # Tokens whose text is held back are told at once only where there is more to tell of them than text.
        if not deltas and finish_reason is None and not self._tells_of_tokens:
            return b""
        *first_ones, shown = deltas or [{}]
        chunks = [
            self._chunk({"index": index, "delta": one, "logprobs": None, "finish_reason": None}) for one in first_ones
        ]
        return b"".join([*chunks, self._choice_chunk(index, shown, delta, finish_reason)])

    def _choice_chunk(self, index: int, shown: dict[str, Any], delta: SampleDelta, finish_reason: str | None) -> bytes:
        """Return the chunk of the tokens of a delta, of whose text `shown` is what it shows."""
        choice = {
            "index": index,
            "delta": shown,
            "logprobs": self._logprobs_field(delta.token_ids, delta.logprobs),
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self.request.has_token_ids:
            choice |= self._output_ids(delta.token_ids)
        return self._chunk(choice)

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        if self._answers is not None:
            num_tokens = sum(answer.num_reasoning_tokens for answer in self._answers)
            usage["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return usage

    def _logprobs_field(
        self, token_ids: Sequence[int], token_logprobs: Sequence[TokenLogprobs] | None
    ) -> dict[str, Any] | None:
        """Return the logprobs of tokens: of all that the model wrote, thoughts and calls too."""
        if self.request.num_logprobs is None:
            return None
        logprobs = ChatLogprobs(self.tokenizer, self.request.num_logprobs, shows_ids=self.request.has_tokens_as_ids)
        return {"content": logprobs.records(token_ids, token_logprobs or ()), "refusal": None}
