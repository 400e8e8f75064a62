"""An answer in the words of OpenAI's chats: a message, or the deltas of one."""

from __future__ import annotations

from typing import Any

from ....outputs import CompletionOutput, SampleDelta
from ....text.answers.events import CallArguments, CallStart, Content, Event, Reasoning
from ....text.answers.whole_answer import joined_events
from ..call_ids import call_id
from ..generation_request import GenerationRequest
from ..sample_answer import SampleAnswer


class ChatAnswer:
    """The answer of one choice. A thought is told as `reasoning` and `reasoning_content`, since clients read either."""

    def __init__(self, answer: SampleAnswer, request: GenerationRequest, response_id: str, choice: int):
        """`choice` is the index of the choice in the response."""
        self._answer, self._request = answer, request
        self._response_id, self._choice = response_id, choice
        self._num_calls = 0
        """Calls that have begun."""
        self._customs: set[int] = set()
        """Those that are calls of custom tools."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Return the number of tokens of thoughts so far."""
        return self._answer.num_thought_tokens

    def message(self, sample: CompletionOutput) -> dict[str, Any]:
        """Return the message of a whole answer. Its content is null where there are calls alone."""
        answer = joined_events(self._answer.read(sample))
        self._num_calls = len(answer.tool_calls)
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if self._num_calls and not answer.content:
            message["content"] = None
        if answer.reasoning is not None and not self._request.hides_reasoning:
            message |= _thought(answer.reasoning)
        if self._num_calls and self._request.has_function_call:
            call = answer.tool_calls[0]
            message["function_call"] = {"name": call.name, "arguments": call.arguments}
        elif self._num_calls:
            message["tool_calls"] = [
                _call(self._call_id(index), one.name, one.arguments, is_custom=one.is_custom)
                for index, one in enumerate(answer.tool_calls)
            ]
        return message

    def deltas(self, sample: SampleDelta) -> list[dict[str, Any]]:
        """Return the `delta` objects for new tokens: one for each event that the client is shown, often none."""
        deltas = []
        for event in self._answer.read(sample):
            if type(event) is Content:  # As for most tokens.
                deltas.append({"content": event.text})
            elif (delta := self._delta(event)) is not None:
                deltas.append(delta)
        return deltas

    def finish_reason(self, reason: str | None) -> str | None:
        """Return OpenAI's word for the end of a sample, whose own `reason` is "stop" also where it ends by a call.

        Where the client has chosen the tool, "stop" stays.
        """
        if reason != "stop" or not self._num_calls or self._request.has_named_call:
            return reason
        return "function_call" if self._request.has_function_call else "tool_calls"

    def _delta(self, event: Event) -> dict[str, Any] | None:
        """Return the `delta` object of an event that is no content; None for one that is not shown."""
        match event:
            case Reasoning(text=text):
                return None if self._request.hides_reasoning else _thought(text)
            case CallArguments(index=index, text=text):
                if self._request.has_function_call:
                    return None if index else {"function_call": {"arguments": text}}
                if index in self._customs:
                    return {"tool_calls": [{"index": index, "custom": {"input": text}}]}
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case CallStart(index=index, name=name, is_custom=is_custom):
                self._num_calls += 1
                if is_custom:
                    self._customs.add(index)
                if not self._request.has_function_call:
                    call = _call(self._call_id(index), name, "", is_custom=is_custom)
                    return {"tool_calls": [{"index": index, **call}]}
                return None if index else {"function_call": {"name": name, "arguments": ""}}
        return None

    def _call_id(self, index: int) -> str:
        return call_id(self._response_id, self._choice, index, is_short=self._request.has_short_call_ids)


def _thought(text: str) -> dict[str, Any]:
    return {"reasoning": text, "reasoning_content": text}


def _call(id_: str, name: str, arguments: str, *, is_custom: bool) -> dict[str, Any]:
    """Return a call as an item of `tool_calls`."""
    if is_custom:
        return {"id": id_, "type": "custom", "custom": {"name": name, "input": arguments}}
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
