"""Responses of /v1/completions, complete or in chunks."""

from __future__ import annotations

from typing import Any

from ....outputs import CompletionOutput, RequestOutput, SampleDelta
from ..choices_encoder import ChoicesEncoder
from ..logprob_records import CompletionLogprobs


class CompletionEncoder(ChoicesEncoder):
    """Responses of /v1/completions."""

    object_name = chunk_object_name = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._sample_logprobs: dict[tuple[str, int], CompletionLogprobs] = {}
        """Those of each sample of a stream, whose text offsets go on from chunk to chunk."""

    def choice(self, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[output.request_id] = output.prompt_logprobs
        text, logprobs = self._echoed_text(output.request_id), self._new_logprobs(output.request_id)
        if self.request.has_output:
            text += sample.text
            logprobs.add(sample.token_ids, sample.logprobs or ())
        index = self._first_choices[output.request_id] + sample.index
        return {
            **self._choice(index, text, logprobs, sample.finish_reason, sample.stop_reason),
            **self._output_ids(sample.token_ids),
            **self._prompt_ids_field(output.request_id),
            **self._prompt_logprobs_field(output),
        }

    def chunks_of(self, delta: SampleDelta) -> bytes:
        key, index = (delta.request_id, delta.index), self._first_choices[delta.request_id] + delta.index
        is_first, echo = key not in self._sample_logprobs, b""
        if is_first:
            self._sample_logprobs[key] = self._new_logprobs(delta.request_id)
            if self.request.is_echoed:
                text = self._echoed_text(delta.request_id)
                echo = self._chunk(self._choice(index, text, self._sample_logprobs[key], None, None))
        if self.request.has_output:
            self.counts.num_output_tokens += len(delta.token_ids)
        if not self.request.has_output and delta.finish_reason is None:
            return echo
        text, logprobs = "", None
        if self.request.has_output:
            text, logprobs = delta.text, self._sample_logprobs[key]
            logprobs.add(delta.token_ids, delta.logprobs or ())
        choice = self._choice(index, text, logprobs, delta.finish_reason, delta.stop_reason)
        choice |= self._output_ids(delta.token_ids) | (self._prompt_ids_field(delta.request_id) if is_first else {})
        return echo + self._chunk(choice)

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: CompletionLogprobs | None,
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> dict[str, Any]:
        """Return a choice with those of the logprobs that none has shown yet."""
        if not self.request.has_output and finish_reason is not None:
            finish_reason, stop_reason = "length", None
        if self.request.num_logprobs is None:
            logprobs = None
        return {
            "index": index,
            "text": text,
            "logprobs": None if logprobs is None else logprobs.take(),
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def _echoed_text(self, request_id: str) -> str:
        """Return the text of a prompt that is echoed, and "" for one that is not."""
        if not self.request.is_echoed:
            return ""
        text = self._new_requests[request_id].prompt
        if text is None and self.tokenizer is not None:
            text = self.tokenizer.decode(self._prompt_ids(request_id), skip_special_tokens=False)
        return text or ""

    def _new_logprobs(self, request_id: str) -> CompletionLogprobs:
        """Return the logprobs of a sample before its first token: those of the prompt if it is echoed."""
        logprobs = CompletionLogprobs(shows_ids=self.request.has_tokens_as_ids)
        if self.request.is_echoed and self.request.num_logprobs is not None:
            token_logprobs = self._prompt_logprobs.get(request_id, ())
            logprobs.add(self._prompt_ids(request_id), token_logprobs, tokenizer=self.tokenizer)
        return logprobs
