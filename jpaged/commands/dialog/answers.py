"""What the model of a conversation gives, wherever it runs: an answer piece by piece, or one line why there is none."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Message = Mapping[str, Any]


class AnswerPart(NamedTuple):
    """New text of an answer, perhaps none."""

    text: str = ""
    is_thought: bool = False
    """Whether the text is what the model thinks before it answers."""
    finish_reason: str | None = None
    """Why the answer ends here; None while it goes on."""


class AnswerError(Exception):
    """There is no answer, or no more of it; the conversation can go on. The message is one line."""

    def __init__(self, message: str, *, is_full: bool = False):
        """`is_full` says that the conversation exceeds the model's context."""
        super().__init__(message)
        self.is_full = is_full


class Answerer(Protocol):
    """A model that answers conversations, one at a time."""

    may_be_interrupted: bool
    """Whether KeyboardInterrupt may be raised anywhere in `parts`. If not, its parts come often enough to stop there,
    some of them without text."""
    keeps_thoughts: bool
    """Whether messages of the assistant have their thoughts beside them, in `reasoning_content`."""

    def parts(self, messages: Sequence[Message]) -> Generator[AnswerPart, None, None]:
        """Yield the answer to a conversation as it comes. Closing the iterator ends the request. Raise AnswerError."""
