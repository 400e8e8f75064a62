"""The messages of one conversation. Knows neither models nor terminals."""

from __future__ import annotations

from dataclasses import dataclass, field

from .answers import AnswerPart, Message


@dataclass
class Answer:
    """What a model has said so far in one turn."""

    text: str = ""
    thought: str = ""
    finish_reason: str | None = None
    """None while the answer goes on, and for one that was interrupted."""

    def add(self, part: AnswerPart) -> None:
        """Add what is new of the answer."""
        if part.is_thought:
            self.thought += part.text
        else:
            self.text += part.text
        self.finish_reason = part.finish_reason or self.finish_reason


@dataclass
class Conversation:
    """A system message and turns; a turn is a message of the user and its answer."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    """Messages of the user and of the assistant, one after the other."""
    unanswered: str | None = None
    """The last text of the user if it got no answer. It is no part of `turns`."""

    def messages_with(self, text: str) -> list[Message]:
        """Return all messages, with a new one of the user at the end."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns, {"role": "user", "content": text}]

    def add_turn(self, text: str, answer: Answer, *, keeps_thought: bool) -> None:
        """Add a text of the user and its answer; one without text leaves the turn out, and the text unanswered."""
        if not answer.text:
            self.unanswered = text
            return
        said = {"role": "assistant", "content": answer.text}
        if keeps_thought and answer.thought:
            said["reasoning_content"] = answer.thought
        self.turns += [{"role": "user", "content": text}, said]
        self.unanswered = None

    def reset(self) -> None:
        """Forget all turns. The system message and the unanswered text stay."""
        self.turns.clear()
