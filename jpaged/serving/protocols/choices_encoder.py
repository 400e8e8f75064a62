"""Responses whose samples are `choices`: what OpenAI's completions and chats share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...json_lines import encode_json
from ...outputs import CompletionOutput, PromptLogprobs, RequestOutput
from .encoder import Encoder
from .http_errors import HTTPError
from .logprob_records import prompt_records
from .openai_errors import error_body

DONE = b"data: [DONE]\n\n"


class ChoicesEncoder(Encoder):
    """Writes a response of choices. Subclasses say what a choice looks like."""

    object_name: ClassVar[str]
    """`object` of a complete response."""
    chunk_object_name: ClassVar[str]
    """`object` of a chunk of a stream."""

    def __init__(self, *args: Any, **options: Any):
        """The arguments are those of `Encoder`."""
        super().__init__(*args, **options)
        request = self.request
        self._first_choices = {
            request_id: index * request.num_samples for index, request_id in enumerate(self.request_ids)
        }
        """The core's id of a prompt → index of the choice of its first sample."""
        self._new_requests = dict(zip(self.request_ids, request.new_requests, strict=True))
        self._common_fields = {
            "created": self.created, "model": request.model, "system_fingerprint": self.fingerprint
        }  # fmt: skip
        head = encode_json({"id": self.id, "object": self.chunk_object_name, **self._common_fields})
        self._chunk_start = b"data: " + head[:-1] + b',"choices":['
        # OpenAI's chunks have `usage: null` before the last one if that one was asked for.
        self._chunk_end = b',"usage":null}\n\n' if request.has_usage else b"}\n\n"
        self._prompt_logprobs: dict[str, PromptLogprobs] = {}

    # Complete

    def body(self, outputs: Mapping[str, RequestOutput]) -> bytes:
        choices = []
        for request_id in self.request_ids:
            output = outputs[request_id]
            self.counts.num_cached_tokens += output.num_cached_tokens
            choices += [self.choice(output, sample) for sample in output.outputs]
            if self.request.has_output:
                self.counts.num_output_tokens += sum(len(sample.token_ids) for sample in output.outputs)
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

    @abstractmethod
    def choice(self, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """Return one choice of a complete response."""

    # Streamed

    def take_prompt_logprobs(self, prompt_logprobs: Mapping[str, PromptLogprobs]) -> None:
        self._prompt_logprobs.update(prompt_logprobs)

    def closing(self, outputs: Sequence[RequestOutput]) -> bytes:
        self.counts.num_cached_tokens = sum(output.num_cached_tokens for output in outputs)
        if not self.request.has_usage:
            return DONE
        return self._chunk_start + b'],"usage":' + encode_json(self.usage()) + b"}\n\n" + DONE

    def failure(self, error: HTTPError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"

    def usage(self) -> dict[str, Any]:
        """Return the tokens so far in OpenAI's words."""
        counts = self.counts
        return {
            "prompt_tokens": counts.num_prompt_tokens,
            "completion_tokens": counts.num_output_tokens,
            "total_tokens": counts.num_prompt_tokens + counts.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": counts.num_cached_tokens},
        }

    # What both share

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
