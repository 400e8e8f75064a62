"""The loop of `jpaged chat`: reads a message, shows its answer, and obeys commands and Ctrl-C.

Answers are all that stdout gets; thoughts, hints and errors go to stderr.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import FrameType

from ...checks import shown
from ...errors import InvalidRequestError
from ..process import EXIT_INTERRUPTED, EXIT_SOME_FAILED
from ..progress import say
from .answers import Answerer, AnswerError, AnswerPart
from .conversation import Answer, Conversation
from .inputs import Input

COMMANDS = {
    "/system": "TEXT: set the system message; without a text, show it",
    "/reset": "forget the conversation, but for the system message",
    "/retry": "send the last message again if it got no answer",
    "/help": "show this",
    "/exit": "end; so does Ctrl-D",
}
HELP = "\n".join(
    [
        *(f"{name:8} {meaning}" for name, meaning in COMMANDS.items()),
        "A line that begins with // is text that begins with one slash. A backslash at the end of a line continues it.",
        "Ctrl-C ends an answer; what has come of it stays in the conversation.",
    ]
)
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Characters that could command a terminal → what is shown of them there."""


def is_command(line: str) -> bool:
    """Return whether a line is one of COMMANDS, perhaps with a text behind it."""
    return line.startswith("/") and line.split(maxsplit=1)[0] in COMMANDS


class Repl:
    """One conversation between an input and a model."""

    def __init__(self, answerer: Answerer, conversation: Conversation, source: Input):
        self.answerer, self.conversation, self.source = answerer, conversation, source
        self._num_failed = 0
        self._num_interrupts = 0
        """Interrupts in a row with no message between them that was answered."""
        self._is_answering = self._is_stopped = False
        """Whether an answer comes, and whether Ctrl-C has come meanwhile."""

    def run(self) -> int:
        """Serve the input to its end, and return the exit status: that of an interrupt after two in a row.

        A run over a pipe has failed in part if a message got no answer or a command was wrong; at a terminal its user
        has seen to that.
        """
        with self._interrupts_handled():
            while True:
                try:
                    message = self.source.read()
                    if message is None or not self._obey(message):
                        break
                except InvalidRequestError as error:
                    self._fail(str(error))
                except KeyboardInterrupt:
                    if self.source.is_terminal:
                        print(file=sys.stderr)  # Behind the "^C" that the terminal shows.
                    if self.source.has_text():
                        self._num_interrupts = 0
                    elif self._has_interrupted_twice():
                        return EXIT_INTERRUPTED
        return EXIT_SOME_FAILED if self._num_failed and not self.source.is_terminal else 0

    @contextmanager
    def _interrupts_handled(self) -> Iterator[None]:
        """Let Ctrl-C stop an answer where that is safe, and raise KeyboardInterrupt elsewhere, during a `with`."""
        former = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, former)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        is_first, self._is_stopped = not self._is_stopped, True
        # The second one is for an answer that does not stop, such as while a program is compiled.
        if not self._is_answering or self.answerer.may_be_interrupted or not is_first:
            raise KeyboardInterrupt

    def _has_interrupted_twice(self) -> bool:
        """Count an interrupt; give a hint after the first of a row, and return whether this is the second."""
        self._num_interrupts += 1
        if self._num_interrupts == 1:
            say("Ctrl-C again ends, as do Ctrl-D and /exit")
        return self._num_interrupts > 1

    def _obey(self, message: str) -> bool:
        """Do what a message asks for, which is an answer unless it is a command; return False for /exit."""
        if not message.strip():
            return True
        if self.source.is_terminal:
            self._num_interrupts = 0
        if not message.startswith("/") or message.startswith("//"):
            self._answer(message[1:] if message.startswith("//") else message)
            return True
        name = message.split(maxsplit=1)[0]
        text = message.removeprefix(name).strip()
        if name not in COMMANDS:
            self._fail(f"{shown(name)}: no command, allowed: {', '.join(COMMANDS)}; // begins a text with one slash")
        elif text and name != "/system":
            self._fail(f"{name}: got {shown(text)}, allowed: nothing behind it")
        elif name == "/system":
            self._set_or_show_system(text)
        elif name == "/reset":
            self.conversation.reset()
        elif name == "/retry":
            self._retry()
        elif name == "/help":
            say(HELP)
        return name != "/exit"

    def _set_or_show_system(self, text: str) -> None:
        if text:
            self.conversation.system = text
        else:
            say("no system message" if self.conversation.system is None else self.conversation.system)

    def _retry(self) -> None:
        if self.conversation.unanswered is None:
            self._fail("/retry: got no message without an answer, allowed: one; type a message")
        else:
            self._answer(self.conversation.unanswered)

    def _fail(self, error: str) -> None:
        """Tell an error in one line. The loop goes on."""
        self._num_failed += 1
        say(f"error: {error}")

    def _answer(self, text: str) -> None:
        """Send a message of the user, show the answer as it comes, and keep both if there was any text.

        Ctrl-C ends the answer where it is. After an error the conversation is as it was before.
        """
        answer, screen, conversation = Answer(), _Screen(), self.conversation
        conversation.unanswered = text
        self._is_answering, self._is_stopped = True, False
        error: AnswerError | None = None
        try:
            with closing(self.answerer.parts(conversation.messages_with(text))) as parts:
                for part in parts:
                    answer.add(part)
                    screen.show(part)
                    if self._is_stopped:
                        break
        except AnswerError as failure:
            error = failure
        except KeyboardInterrupt:  # From `_interrupt`.
            self._is_stopped = True
        finally:
            self._is_answering = False
        screen.end()
        if error is not None:
            self._fail(self._with_way_out(error))
            return
        conversation.add_turn(text, answer, keeps_thought=self.answerer.keeps_thoughts)
        if self._is_stopped:
            self._note_stopped(answer)
        else:
            self._num_interrupts = 0
        if answer.finish_reason == "length":
            say("the answer was cut: by --max-tokens, or because the context is full")

    def _note_stopped(self, answer: Answer) -> None:
        """Say what an interrupt has left. Over a pipe, where no prompt waits for another one, it counts like that."""
        kept = "what has come of it is kept" if answer.text else "/retry asks for it again"
        say(f"the answer was ended; {kept}")
        if not self.source.is_terminal and self._has_interrupted_twice():
            raise KeyboardInterrupt

    def _with_way_out(self, error: AnswerError) -> str:
        """Return what is told of an error: of a conversation that is too long for the model, how to go on."""
        if not error.is_full:
            return f"{error}; /retry sends the message again"
        if not self.conversation.turns:
            return str(error)
        way_out = "/reset forgets it, and /retry then sends this message again"
        return f"the conversation has no room for this message; {way_out} ({error})"


class _Screen:
    """Shows one answer: its text on stdout, its thoughts on stderr, dim where that is a terminal."""

    def __init__(self) -> None:
        self._is_safe = not sys.stdout.isatty()
        """Whether characters may be written that command a terminal."""
        self._dims = sys.stderr.isatty()
        self._is_in_thought = self._has_text = False

    def show(self, part: AnswerPart) -> None:
        """Write the text of a part."""
        if not part.text:
            return
        if part.is_thought:
            self._begin_thought()
            text = part.text.translate(CONTROLS) if self._dims else part.text
            print(text, end="", file=sys.stderr, flush=True)
            return
        self._end_thought()
        self._has_text = True
        print(part.text if self._is_safe else part.text.translate(CONTROLS), end="", flush=True)

    def end(self) -> None:
        """End the lines that were begun."""
        self._end_thought()
        if self._has_text:
            print(flush=True)

    def _begin_thought(self) -> None:
        if not self._is_in_thought and self._dims:
            print(DIM, end="", file=sys.stderr)
        self._is_in_thought = True

    def _end_thought(self) -> None:
        if self._is_in_thought:
            print(PLAIN if self._dims else "", file=sys.stderr, flush=True)
        self._is_in_thought = False
