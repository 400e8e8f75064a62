"""Tells which tokens have written which text, so that a message has the logprobs of its own tokens alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from ....outputs import CompletionOutput, Mark, SampleDelta
from ..logprob_records import ChatLogprobs

Record = dict[str, Any]


class TextLogprobs:
    """Cuts the text of a sample into the pieces that its tokens have written, however many come at once.

    Text may come later than its tokens, since the beginnings of stop strings and of characters are held back.
    """

    def __init__(self, logprobs: ChatLogprobs, hidden_ids: frozenset[int]):
        """`hidden_ids` are the tokens that have no characters in the text."""
        self._logprobs, self._hidden_ids = logprobs, hidden_ids
        self._waiting: deque[Record] = deque()
        """Records of tokens whose text has not come."""
        self._begun: list[Record] = []
        """Those of tokens that have begun the next character of the text."""
        self._num_bytes = 0
        """Bytes of the tokens that are no longer waiting, without those of the text so far."""

    def pieces(self, sample: SampleDelta | CompletionOutput) -> Iterator[tuple[SampleDelta, list[Record]]]:
        """Yield the parts of a delta or of a whole output, each with the records of the tokens that have written it.

        The first has the token ids and no text, the last the end of the sample; those between have the text of one
        token each, or of several that have written one character. Joined they are the sample. It is the caller that
        tells text of a message from other text.
        """
        text, marks = sample.text, deque(sample.marks)
        records = self._logprobs.records(sample.token_ids, sample.logprobs or ())
        ids_and_records = zip(sample.token_ids, records, strict=True)
        self._waiting.extend(record for token_id, record in ids_and_records if token_id not in self._hidden_ids)
        yield SampleDelta("", 0, sample.token_ids, ""), []
        start = 0
        while start < len(text):
            end = self._end_of_piece(text, start)
            if end == start:
                continue
            inside = []
            while marks and marks[0].place < end:
                mark = marks.popleft()
                inside.append(Mark(mark.place - start, mark.token_id))
            records, self._begun = self._begun, []
            yield SampleDelta("", 0, (), text[start:end], marks=tuple(inside)), records
            start = end
        last = tuple(Mark(0, mark.token_id) for mark in marks)
        yield SampleDelta("", 0, (), "", finish_reason=sample.finish_reason, marks=last), []

    def _end_of_piece(self, text: str, start: int) -> int:
        """Take the next token, and return the end of what it has completed of the text from `start` on."""
        if self._waiting:
            record = self._waiting.popleft()
            self._begun.append(record)
            self._num_bytes += len(record["bytes"])
        else:  # Bytes of no character have become U+FFFD, which is longer.
            self._num_bytes = len(text.encode())
        end = start
        while end < len(text) and (size := len(text[end].encode())) <= self._num_bytes:
            self._num_bytes -= size
            end += 1
        return end
