"""What is said to `jpaged chat`: messages typed at a terminal, perhaps of several lines, or one a line of a pipe.

A line that ends with a backslash goes on in the next one. At a terminal, so do lines that come together, as pasted ones
do; a line with a command stands for itself.
"""

from __future__ import annotations

import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from ...errors import InvalidRequestError
from ..files.lines import LineSource, decoded_line

PASTE_GAP_S = 0.05
"""Seconds after a line within which another one belongs to the same paste."""
PROMPT, NEXT_PROMPT = "> ", ". "
IsCommand = Callable[[str], bool]


class Input(Protocol):
    """Where messages come from."""

    is_terminal: bool

    def read(self) -> str | None:
        """Wait for a message and return it without its last line end; None at the end of the input.

        Raise KeyboardInterrupt for Ctrl-C, and InvalidRequestError for a line that is not UTF-8.
        """

    def has_text(self) -> bool:
        """Return whether a message had been begun when KeyboardInterrupt came, which then is dropped."""


class PipeInput:
    """The lines of stdin, or of another file or pipe. Blank lines are skipped."""

    is_terminal = False

    def __init__(self, lines: LineSource):
        self._lines = lines
        self._begun: list[str] = []

    def read(self) -> str | None:
        self._begun = []
        for numbered in self._lines:  # An iterator of its own, since Ctrl-C ends the one that waits.
            assert numbered is not None, "reads of this input wait"
            try:
                line = decoded_line(numbered[1])
            except InvalidRequestError as error:
                raise error.within(f"line {numbered[0]}") from error
            if not line.endswith("\\"):
                return "\n".join([*self._begun, line])
            self._begun.append(line[:-1])
        return "\n".join(self._begun) if self._begun else None

    def has_text(self) -> bool:
        return bool(self._begun)


class TerminalInput:
    """Lines that are typed at a terminal, with readline's editing and history where Python has it."""

    is_terminal = True

    def __init__(self, is_command: IsCommand):
        """`is_command` says of a line whether it stands for itself, also among lines that come together."""
        self._is_command = is_command
        self._begun: list[str] = []
        self._next_line: str | None = None
        """A line that came together with the last message, and is none of it."""
        self._readline = None
        with suppress(ImportError):
            import readline

            self._readline = readline
            readline.set_auto_history(False)

    def read(self) -> str | None:
        lines: list[str] = []
        self._begun = lines
        while True:
            prompt = NEXT_PROMPT if lines else PROMPT
            line = self._line(prompt) if self._next_line is None else self._next_line
            self._next_line = None
            if line is None:
                break
            if lines and self._is_command(line):
                self._next_line = line
                break
            goes_on = line.endswith("\\")
            lines.append(line[:-1] if goes_on else line)
            if not goes_on and (self._is_command(line) or not self._has_more()):
                break
        if not lines:
            return None
        message = "\n".join(lines)
        if self._readline is not None and message.strip():
            self._readline.add_history(message)
        return message

    def has_text(self) -> bool:
        is_typed = self._readline is not None and sys.stdout.isatty() and bool(self._readline.get_line_buffer())
        return bool(self._begun) or is_typed

    def _line(self, prompt: str) -> str | None:
        """Return a typed line; None for Ctrl-D. The prompt is no part of a stdout that is redirected."""
        try:
            if sys.stdout.isatty():
                return input(prompt)
            print(prompt, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
        except EOFError:
            line = ""
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"line: is not {sys.stdin.encoding} ({error.reason})") from error
        return line.rstrip("\n") if line else None

    def _has_more(self) -> bool:
        """Return whether another line is there already, or comes at once."""
        return bool(select.select([sys.stdin], [], [], PASTE_GAP_S)[0])
