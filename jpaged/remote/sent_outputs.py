"""What the requests of one stream get, at both ends of the line between a core process and its front.

    StepOutputs ─▶ DepartingOutputs ─▶ prompt pieces, outputs without prompts ─▶ ArrivingOutputs ─▶ StepOutputs

Prompts, which the front has, are not sent back, and their logprobs come in pieces. Each delta says where it begins, so
that one which comes twice or is missing is found. Knows no socket.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from ..messages import NewRequest
from ..outputs import PromptLogprobs, RequestOutput, SampleDelta, StepOutputs, error_output
from .wire import SENT_BEFORE, PromptPiece

logger = logging.getLogger("jpaged")

PIECE_LOGPROBS = 1 << 14
"""Logprobs in a piece of those of a prompt: about 1 MiB."""
LOST = "a part of the output was lost on its way from the core process"
LOST_MESSAGE = "a message was lost on its way to the core process or back"


class DepartingOutputs:
    """The core's end of a stream."""

    def __init__(self, stream: int, num_requests: int):
        self.stream = stream
        self._num_unended = num_requests
        self._with_prompt_logprobs: set[str] = set()
        """Requests whose prompt logprobs were sent."""

    @property
    def are_over(self) -> bool:
        """Return whether all requests have had their last output."""
        return self._num_unended == 0

    def sent(self, outputs: StepOutputs) -> tuple[list[PromptPiece], StepOutputs]:
        """Return outputs as they are sent: the pieces come first."""
        pieces: list[PromptPiece] = []
        for request_id, entries in outputs.prompt_logprobs.items():
            pieces += self._pieces(request_id, entries)
        sent: list[RequestOutput] = []
        for output in outputs.outputs:
            prompt_logprobs = output.prompt_logprobs
            if prompt_logprobs is not None:
                pieces += self._pieces(output.request_id, prompt_logprobs)
                prompt_logprobs = SENT_BEFORE
            sent.append(replace(output, prompt=None, prompt_token_ids=(), prompt_logprobs=prompt_logprobs))
            self._num_unended -= output.finished
        return pieces, StepOutputs(outputs.deltas, dict.fromkeys(outputs.prompt_logprobs, SENT_BEFORE), sent)

    def _pieces(self, request_id: str, entries: PromptLogprobs) -> Iterator[PromptPiece]:
        """Yield the prompt logprobs of a request in pieces, the first time that an output has them."""
        if request_id in self._with_prompt_logprobs:
            return
        self._with_prompt_logprobs.add(request_id)
        start = num_logprobs = 0
        for end, entry in enumerate(entries, 1):
            num_logprobs += len(entry or ())
            if num_logprobs >= PIECE_LOGPROBS or end == len(entries):
                yield PromptPiece(self.stream, request_id, start, entries[start:end])
                start, num_logprobs = end, 0


class ArrivingOutputs:
    """The front's end of a stream."""

    def __init__(self, messages: Sequence[NewRequest]):
        """`messages` are those of its requests, as they were sent but for the prompts."""
        self._messages = {message.request_id: message for message in messages}
        self._next: dict[tuple[str, int], int] = {}
        """For each sample of a request the index of the token that comes next."""
        self._ended_samples: set[tuple[str, int]] = set()
        self._unended = set(self._messages)
        """Requests whose last output has not come."""
        self._has_lost = False
        """A request has ended here by an error, and in the core perhaps not."""
        self._prompt_tokens: dict[str, tuple[int, ...]] = {}
        """The prompts of requests that have had an output."""
        self._prompt_entries: dict[str, list[PromptLogprobs]] = {}
        """For each request the pieces of its prompt logprobs, of which the first one is whole once they have ended."""

    @property
    def are_over(self) -> bool:
        """Return whether the last output of each request has come, so that the core has forgotten the stream."""
        return not self._unended and not self._has_lost

    def take_piece(self, piece: PromptPiece) -> None:
        """Keep a piece of prompt logprobs for the output that it belongs to."""
        pieces = self._prompt_entries.setdefault(piece.request_id, [])
        if piece.start == sum(map(len, pieces)):  # Else it comes twice, or one is missing.
            pieces.append(piece.entries)

    def taken(self, sent: StepOutputs) -> tuple[StepOutputs, list[str]]:
        """Return outputs as their reader takes them, and the ids of requests that end here since some were lost.

        What comes a second time is left out. A lost part ends its request alone, by an error.
        """
        lost: list[str] = []
        deltas: list[SampleDelta] = []
        for delta in sent.deltas:
            if delta.request_id not in self._unended or delta.request_id in lost:
                continue
            start = self._next.get((delta.request_id, delta.index), 0)
            if delta.start == start:
                if self._is_new(delta):
                    deltas.append(delta)
            elif delta.start + len(delta.token_ids) > start:
                lost.append(delta.request_id)
        outputs: list[RequestOutput] = []
        for output in sent.outputs:
            request_id = output.request_id
            if request_id in self._unended and request_id not in lost:
                whole = self._whole(output)
                if whole is None:
                    lost.append(request_id)
                    continue
                outputs.append(whole)
                if output.finished:
                    self._unended.discard(request_id)
        prompt_logprobs = {}
        for request_id in sent.prompt_logprobs:
            if request_id in self._messages and (entries := self._prompt_logprobs(request_id)) is not None:
                prompt_logprobs[request_id] = entries
        for request_id in lost:
            logger.error("request %s: %s", request_id, LOST)
            self._has_lost = True
            outputs.append(error_output(request_id, self._messages[request_id].prompt, LOST))
            self._unended.discard(request_id)
        kept = [delta for delta in deltas if delta.request_id not in lost]
        return StepOutputs(kept, prompt_logprobs, outputs), lost

    def _is_new(self, delta: SampleDelta) -> bool:
        """Return whether a delta has not come before, where it begins with the next token; note that it has."""
        key = delta.request_id, delta.index
        self._next[key] = delta.start + len(delta.token_ids)
        if delta.finish_reason is None:
            return True
        is_new = key not in self._ended_samples
        self._ended_samples.add(key)
        return is_new

    def _whole(self, output: RequestOutput) -> RequestOutput | None:
        """Return an output with its prompt; None if the logprobs of that have not come."""
        message, entries = self._messages[output.request_id], output.prompt_logprobs
        if entries == SENT_BEFORE:
            entries = self._prompt_logprobs(output.request_id)
            if entries is None:
                return None
        if output.request_id not in self._prompt_tokens:
            self._prompt_tokens[output.request_id] = tuple(array("i", message.prompt_token_ids))
        token_ids = self._prompt_tokens[output.request_id]
        return replace(output, prompt=message.prompt, prompt_token_ids=token_ids, prompt_logprobs=entries)

    def _prompt_logprobs(self, request_id: str) -> PromptLogprobs | None:
        """Return the logprobs of a prompt, put together; None unless there is one for each token."""
        pieces = self._prompt_entries.get(request_id, [])
        if len(pieces) > 1:
            pieces[:] = [tuple(entry for piece in pieces for entry in piece)]
        is_whole = bool(pieces) and len(pieces[0]) == self._messages[request_id].num_prompt_tokens
        return pieces[0] if is_whole else None


def without_prompts(messages: Sequence[NewRequest]) -> list[NewRequest]:
    """Return messages without the texts of their prompts, which no step reads."""
    return [msgspec.structs.replace(message, prompt=None) for message in messages]
