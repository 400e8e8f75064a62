"""Writes responses in the words of OpenAI's protocols: complete, or as chunks that are streamed while tokens come.

An encoder reads the internal form of a request and what the core gives for it. Both kinds of responses are made of the
same parts, so that the chunks of a stream joined together are the complete response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...json_lines import encode_json
from ...outputs import CompletionOutput, PromptLogprobs, RequestOutput, SampleDelta
from ...text.tokenizing.tokenizer import Tokenizer
from .generation_request import GenerationRequest
from .http_errors import HTTPError, error_record
from .logprob_records import ChatLogprobs, CompletionLogprobs, TokenLogprobs, prompt_records

DONE = b"data: [DONE]\n\n"


class Encoder:
    """Writes the response to one request. Subclasses say what a choice looks like."""

    object_name: ClassVar[str]
    """`object` of a complete response."""
    chunk_object_name: ClassVar[str]
    """`object` of a chunk of a stream."""
    id_prefix: ClassVar[str]

    def __init__(
        self,
        request: GenerationRequest,
        request_ids: Sequence[str],
        tokenizer: Tokenizer | None,
        *,
        created: int,
        fingerprint: str,
    ):
        """`request_ids` are the core's ids of the prompts, in order; `created` is in seconds since 1970."""
        self.request, self.tokenizer = request, tokenizer
        self.id = f"{self.id_prefix}-{request_ids[0]}"
        self._first_choices = {request_id: index * request.num_samples for index, request_id in enumerate(request_ids)}
        """The core's id of a prompt → index of the choice of its first sample."""
        self._new_requests = dict(zip(request_ids, request.new_requests, strict=True))
        self._common_fields = {"created": created, "model": request.model, "system_fingerprint": fingerprint}
        head = encode_json({"id": self.id, "object": self.chunk_object_name, **self._common_fields})
        self._chunk_start = b"data: " + head[:-1] + b',"choices":['
        # OpenAI's chunks have `usage: null` before the last one if that one was asked for.
        self._chunk_end = b',"usage":null}\n\n' if request.has_usage else b"}\n\n"
        self._num_tokens = 0
        """Output tokens of all samples so far."""
        self._num_cached = 0
        self._num_prompt_tokens = sum(one.num_prompt_tokens for one in request.new_requests)
        self._prompt_logprobs: dict[str, PromptLogprobs] = {}

    # Complete

    def body(self, outputs: Mapping[str, RequestOutput]) -> bytes:
        """Return the body of a complete response, from the last outputs by the core's ids."""
        choices = []
        for request_id in self._first_choices:
            output = outputs[request_id]
            self._num_cached += output.num_cached_tokens
            choices += [self.choice(output, sample) for sample in output.outputs]
            self._num_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        body = {
            "id": self.id,
            "object": self.object_name,
            **self._common_fields,
            "choices": choices,
            "usage": self.usage(),
        }
        return encode_json(body | self.prompt_fields(list(outputs.values())))

    def prompt_fields(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the fields of a complete response, beside its choices, that tell of its prompt."""
        return {}

    def choice(self, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """Return one choice of a complete response."""
        raise NotImplementedError

    # Streamed

    def opening(self) -> bytes:
        """Return the chunks that come before any token."""
        return b""

    def take_prompt_logprobs(self, prompt_logprobs: Mapping[str, PromptLogprobs]) -> None:
        """Keep the logprobs of prompts, which come before the first tokens of their samples."""
        self._prompt_logprobs.update(prompt_logprobs)

    def chunks(self, deltas: Sequence[SampleDelta]) -> bytes:
        """Return the chunks for new tokens and text."""
        return b"".join(map(self.chunks_of, deltas))

    def chunks_of(self, delta: SampleDelta) -> bytes:
        """Return the chunks for one delta."""
        raise NotImplementedError

    def closing(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the last chunks, given the last outputs of all prompts."""
        self._num_cached = sum(output.num_cached_tokens for output in outputs)
        if not self.request.has_usage:
            return DONE
        return self._chunk_start + b'],"usage":' + encode_json(self.usage()) + b"}\n\n" + DONE

    @staticmethod
    def failure(error: HTTPError) -> bytes:
        """Return the event that ends a stream which has failed."""
        return b"data: " + encode_json({"error": error_record(error)}) + b"\n\n"

    def usage(self) -> dict[str, Any]:
        """Return the tokens so far: of each prompt once, and of all samples."""
        prompt, output = self._num_prompt_tokens, self._num_tokens if self.request.has_output else 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }

    # What encoders share

    def _chunk(self, choice: dict[str, Any], other_fields: Mapping[str, Any] | None = None) -> bytes:
        """Return the chunk of one choice, with further fields beside its choices."""
        others = b"," + encode_json(other_fields)[1:-1] if other_fields else b""
        end = self._chunk_end
        if self.request.has_continuous_usage:
            end = b',"usage":' + encode_json(self.usage()) + b"}\n\n"
        return self._chunk_start + encode_json(choice) + b"]" + others + end

    def _prompt_ids(self, request_id: str) -> list[int]:
        """Return the token ids of a prompt."""
        return memoryview(self._new_requests[request_id].prompt_token_ids).cast("i").tolist()

    def _output_ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the field of a choice for the ids of its tokens; empty unless they were asked for."""
        if not self.request.has_token_ids:
            return {}
        return {"token_ids": list(token_ids) if self.request.has_output else []}

    def _prompt_ids_field(self, request_id: str) -> dict[str, Any]:
        """Return the field for the ids of a prompt; empty unless they were asked for."""
        return {"prompt_token_ids": self._prompt_ids(request_id)} if self.request.has_token_ids else {}

    def _prompt_logprobs_field(self, output: RequestOutput) -> dict[str, Any]:
        """Return the field for the logprobs of a prompt; empty unless they were asked for."""
        if self.request.num_prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_records(output.prompt_logprobs or ())}


class CompletionEncoder(Encoder):
    """Responses of /v1/completions."""

    object_name = chunk_object_name = "text_completion"
    id_prefix = "cmpl"

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
        self._num_tokens += len(delta.token_ids)
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


class ChatEncoder(Encoder):
    """Responses of /v1/chat/completions."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

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
        self._num_tokens += len(delta.token_ids)
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
