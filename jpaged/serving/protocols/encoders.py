"""Writes answers in the words of OpenAI's protocols: whole, or event by event as tokens come.

An encoder reads the internal form of a request and what the core gives for it. Streamed and whole answers are made of
the same parts, so that the pieces of a stream joined together are the whole answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from ...outputs import CompletionOutput, PromptLogprobs, RequestOutput, SampleDelta
from ...text.tokenizer import Tokenizer
from .generation_request import GenerationRequest
from .logprob_records import ChatLogprobs, CompletionLogprobs, prompt_records
from .replies import HTTPError, error_record

INT32_BYTES = 4
DONE = b"data: [DONE]\n\n"
_json = msgspec.json.encode


class Encoder:
    """Writes the answer to one request. Subclasses say what a choice looks like."""

    kind: ClassVar[str]
    """`object` of a whole answer."""
    event_kind: ClassVar[str]
    """`object` of an event of a stream."""
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
        self._index_of = {request_id: index * request.num_samples for index, request_id in enumerate(request_ids)}
        """The core's id of a prompt → index of the choice of its first sample."""
        self._prompts = dict(zip(request_ids, request.messages, strict=True))
        self._header = {"created": created, "model": request.model, "system_fingerprint": fingerprint}
        head = _json({"id": self.id, "object": self.event_kind, **self._header})
        self._event_start = b"data: " + head[:-1] + b',"choices":['
        # OpenAI's events have `usage: null` before the last one if that one was asked for.
        self._event_end = b'],"usage":null}\n\n' if request.has_usage else b"]}\n\n"
        self._num_tokens = 0
        """Output tokens of all samples so far."""
        self._num_cached = 0
        self._num_prompt_tokens = sum(len(one.prompt_token_ids) // INT32_BYTES for one in request.messages)
        self._prompt_logprobs: dict[str, PromptLogprobs] = {}

    # Whole

    def whole(self, outputs: Mapping[str, RequestOutput]) -> bytes:
        """Return the body of a whole answer, from the last outputs by the core's ids."""
        choices = []
        for request_id in self._index_of:
            output = outputs[request_id]
            self._num_cached += output.num_cached_tokens
            choices += [self.choice(output, sample) for sample in output.outputs]
            self._num_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        body = {"id": self.id, "object": self.kind, **self._header, "choices": choices, "usage": self.usage()}
        if self.request.num_prompt_logprobs is not None and len(outputs) == 1:
            body["prompt_logprobs"] = choices[0].get("prompt_logprobs")
        return _json(body)

    def choice(self, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """Return one choice of a whole answer."""
        raise NotImplementedError

    # Event by event

    def opening(self) -> bytes:
        """Return the events that come before any token."""
        return b""

    def take_prompt_logprobs(self, entries: Mapping[str, PromptLogprobs]) -> None:
        """Keep the logprobs of prompts, which come before the first tokens of their samples."""
        self._prompt_logprobs.update(entries)

    def events(self, deltas: Sequence[SampleDelta]) -> bytes:
        """Return the events for new tokens and text."""
        return b"".join(map(self.event, deltas))

    def event(self, delta: SampleDelta) -> bytes:
        """Return the events for one delta."""
        raise NotImplementedError

    def closing(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the last events, given the last outputs of all prompts."""
        self._num_cached = sum(output.num_cached_tokens for output in outputs)
        if not self.request.has_usage:
            return DONE
        event = self._event_start + b'],"usage":' + _json(self.usage()) + b"}\n\n"
        return event + DONE

    @staticmethod
    def failure(error: HTTPError) -> bytes:
        """Return the event that ends a stream which has failed."""
        return b"data: " + _json({"error": error_record(error)}) + b"\n\n"

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

    def _event(self, choice: dict[str, Any]) -> bytes:
        """Return the event of one choice."""
        if self.request.has_continuous_usage:
            return self._event_start + _json(choice) + b'],"usage":' + _json(self.usage()) + b"}\n\n"
        return self._event_start + _json(choice) + self._event_end

    def _prompt_ids(self, request_id: str) -> list[int]:
        return memoryview(self._prompts[request_id].prompt_token_ids).cast("i").tolist()

    def _token_fields(self, request_id: str, token_ids: Sequence[int], *, has_prompt: bool) -> dict[str, Any]:
        """Return the fields of a choice that show token ids; empty unless they were asked for."""
        if not self.request.has_token_ids:
            return {}
        ids = self._prompt_ids(request_id) if has_prompt else None
        return {"token_ids": list(token_ids), "prompt_token_ids": ids}

    def _prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        if self.request.num_prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_records(output.prompt_logprobs or ())}


class CompletionEncoder(Encoder):
    """Answers of /v1/completions."""

    kind = event_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._logprobs: dict[tuple[str, int], CompletionLogprobs] = {}
        """The logprobs of each sample: their text offsets go on from event to event."""

    def choice(self, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[output.request_id] = output.prompt_logprobs
        text, token_ids, logprobs = self._echo(output.request_id, sample.index)
        if self.request.has_output:
            text, token_ids = text + sample.text, [*token_ids, *sample.token_ids]
            if logprobs is not None:
                logprobs.add(sample.token_ids, sample.logprobs or ())
        return {
            "index": self._index_of[output.request_id] + sample.index,
            "text": text,
            "logprobs": None if logprobs is None else logprobs.take(),
            "finish_reason": sample.finish_reason if self.request.has_output else "length",
            "stop_reason": sample.stop_reason,
            **self._prompt_fields(output),
            **self._token_fields(output.request_id, sample.token_ids, has_prompt=True),
        }

    def event(self, delta: SampleDelta) -> bytes:
        key, event = (delta.request_id, delta.index), b""
        index = self._index_of[delta.request_id] + delta.index
        is_first = key not in self._logprobs
        if is_first:
            text, _, logprobs = self._echo(*key)
            if self.request.is_echoed:
                shown = None if logprobs is None else logprobs.take()
                choice = {"index": index, "text": text, "logprobs": shown, "finish_reason": None, "stop_reason": None}
                event = self._event(choice)
        self._num_tokens += len(delta.token_ids)
        text, shown = delta.text, None
        if self.request.num_logprobs is not None:
            logprobs = self._logprobs[key]
            logprobs.add(delta.token_ids, delta.logprobs or ())
            shown = logprobs.take()
        if not self.request.has_output:
            text, shown = "", None
            if delta.finish_reason is None:
                return event
        choice = {
            "index": index,
            "text": text,
            "logprobs": shown,
            "finish_reason": delta.finish_reason if self.request.has_output else "length",
            "stop_reason": delta.stop_reason,
            **self._token_fields(delta.request_id, delta.token_ids, has_prompt=is_first),
        }
        return event + self._event(choice)

    def _echo(self, request_id: str, sample: int) -> tuple[str, list[int], CompletionLogprobs | None]:
        """Return the text of a prompt that is echoed, its ids, and the logprobs of a sample, which begin with its own.

        Without an echo the text is empty; without logprobs the last is None.
        """
        records = CompletionLogprobs(has_ids=self.request.has_tokens_as_ids)
        self._logprobs[request_id, sample] = records
        if not self.request.is_echoed:
            return "", [], None if self.request.num_logprobs is None else records
        message, token_ids = self._prompts[request_id], self._prompt_ids(request_id)
        text = message.prompt
        if text is None:
            text = "" if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=False)
        if self.request.num_logprobs is None:
            return text, token_ids, None
        records.add(token_ids, self._prompt_logprobs.get(request_id, ()), tokenizer=self.tokenizer)
        return text, token_ids, records


class ChatEncoder(Encoder):
    """Answers of /v1/chat/completions."""

    kind = "chat.completion"
    event_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def choice(self, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        return {
            "index": self._index_of[output.request_id] + sample.index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None},
            "logprobs": self._logprobs(sample.token_ids, sample.logprobs),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            **self._prompt_fields(output),
            **self._token_fields(output.request_id, sample.token_ids, has_prompt=True),
        }

    def opening(self) -> bytes:
        events = []
        for request_id, first in self._index_of.items():
            for index in range(first, first + self.request.num_samples):
                delta = {"role": "assistant", "content": ""}
                fields = self._token_fields(request_id, (), has_prompt=True)
                events.append(
                    self._event({"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | fields)
                )
        return b"".join(events)

    def event(self, delta: SampleDelta) -> bytes:
        self._num_tokens += len(delta.token_ids)
        choice = {
            "index": self._index_of[delta.request_id] + delta.index,
            "delta": {"content": delta.text} if delta.text or delta.finish_reason is None else {},
            "logprobs": self._logprobs(delta.token_ids, delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return self._event(choice | self._token_fields(delta.request_id, delta.token_ids, has_prompt=False))

    def _logprobs(self, token_ids: Sequence[int], entries: Any) -> dict[str, Any] | None:
        if self.request.num_logprobs is None:
            return None
        records = ChatLogprobs(self.tokenizer, self.request.num_logprobs, has_ids=self.request.has_tokens_as_ids)
        return {"content": records.of(token_ids, entries or ()), "refusal": None}
