"""Reads the output of one sample as an answer: its events, and how many of its tokens are thoughts."""

from __future__ import annotations

from collections import deque

from ...messages import AnswerSpec
from ...outputs import CompletionOutput, Mark, SampleDelta
from ...text.answers.bound_format import BoundFormat
from ...text.answers.events import Event, Reasoning
from ...text.answers.formats import Channels
from ...text.answers.scanner import AnswerScanner


class SampleAnswer:
    """The answer of one sample, which comes in deltas, or at once as the sample's last output.

    Thoughts are counted in tokens from the first token of their opening mark to the last one of their end mark. Where
    marks are no tokens of their own, the count is the thoughts' share of the characters, marks included.
    """

    def __init__(self, format: BoundFormat, spec: AnswerSpec):
        """`format` is the model's; `spec` is what the request says of its answers."""
        self._scanner = AnswerScanner(format, spec)
        self._mark_ids = format.mark_ids
        self._marks = _thought_marks(format)
        chars = set(format.chars.values())
        num_opening_tokens, num_end_tokens = (sum(char in chars for char in mark) for mark in self._marks)
        self._has_mark_tokens = bool(num_opening_tokens and num_end_tokens)
        self._mark_indices: deque[int] = deque()
        """Indices among the tokens of the marks which the text has not reached yet."""
        self._last_indices: deque[int] = deque(maxlen=max(num_opening_tokens, 1))
        """Those of the last marks that it has reached, as many as open a thought."""
        self._num_prompt_ends = self._scanner.num_thought_edges
        """1 if the prompt has opened a thought, else 0."""
        self._thought_start: int | None = 0 if self._num_prompt_ends else None
        """Index of the token by which the thought that has not ended began; None outside of thoughts."""
        self._num_thought_tokens = 0
        """Tokens of the thoughts that have ended."""
        self._num_tokens = self._num_chars = self._num_thought_chars = 0

    @property
    def num_thought_tokens(self) -> int:
        """Return the number of tokens of thoughts so far."""
        if self._has_mark_tokens:
            num_open_tokens = 0 if self._thought_start is None else self._num_tokens - self._thought_start
            return self._num_thought_tokens + num_open_tokens
        opening, end = self._marks
        num_ends = self._scanner.num_thought_edges
        num_mark_chars = ((num_ends + 1) // 2 - self._num_prompt_ends) * len(opening) + num_ends // 2 * len(end)
        num_thought_chars = self._num_thought_chars + num_mark_chars
        return round(self._num_tokens * num_thought_chars / self._num_chars) if self._num_chars else 0

    def read(self, sample: SampleDelta | CompletionOutput) -> list[Event]:
        """Return the events of a delta, or of a whole output; the end of the sample ends what is open."""
        if not self._mark_ids.isdisjoint(sample.token_ids):
            for index, token_id in enumerate(sample.token_ids, self._num_tokens):
                if token_id in self._mark_ids:
                    self._mark_indices.append(index)
        self._num_tokens += len(sample.token_ids)
        text, marks = sample.text, sample.marks
        if not marks:
            events = self._scanner.feed(text) if text else []
        else:
            # Cut before each mark, so that what begins or ends a thought is the last mark.
            places = [mark.place for mark in marks] + [len(text)]
            events = self._scanner.feed(text[: places[0]])
            for mark, end in zip(marks, places[1:], strict=True):
                self._note_edge()
                self._last_indices.append(self._mark_indices.popleft())
                events += self._scanner.feed(text[mark.place : end], (Mark(0, mark.token_id),))
        if self._last_indices:
            self._note_edge()
        if sample.finish_reason is not None:
            events += self._scanner.finish()
        if not self._has_mark_tokens:
            self._num_chars += len(text)
            for event in events:
                if type(event) is Reasoning:
                    self._num_thought_chars += len(event.text)
        return events

    def _note_edge(self) -> None:
        """Note that a thought has begun or ended, if the text so far says so: by the last mark that it has reached."""
        is_in_thought = self._scanner.num_thought_edges % 2 == 1
        if is_in_thought == (self._thought_start is not None) or not self._last_indices:
            return
        if is_in_thought:
            self._thought_start = self._last_indices[0]
        else:
            assert self._thought_start is not None
            self._num_thought_tokens += self._last_indices[-1] + 1 - self._thought_start
            self._thought_start = None


def _thought_marks(format: BoundFormat) -> tuple[str, str]:
    """Return what opens and what ends a thought, with a character for each mark that is a token."""
    thought = format.format.thought
    if thought is None:
        return "", ""
    if isinstance(thought, Channels):
        return thought.channel + thought.thought + thought.message, thought.ends[0]
    return thought.open, thought.close
