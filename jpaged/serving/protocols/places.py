"""Names the parts of a body in errors about the chat that the body was translated into.

Every protocol's conversation becomes messages and tools in the form of chat completions, and the checks of that form
name what is wrong by its place there: `messages[3].tool_calls[0].function.arguments`. A client knows other places.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ...errors import InvalidRequestError

_PATH = re.compile(r"(?<![\w.\]])(?:messages|tools|tool_choice)(?:\[\d+\]|\.\w+)*")
_STEP = re.compile(r"(?:\[\d+\]|\.\w+)$")


class Places:
    """Places in a chat, each with the place in the body from which it was made."""

    def __init__(self, words: Mapping[str, str] | None = None):
        """`words` are names of fields of the chat → what the body calls them."""
        self._sent: dict[str, str] = {}
        words = words or {}
        self._words = {re.compile(rf"(?<![\w.]){re.escape(word)}(?!\w)"): sent for word, sent in words.items()}

    def __setitem__(self, place: str, sent: str) -> None:
        """Note that what stands at `place` of the chat, and below it, was sent at the place `sent`."""
        self._sent[place] = sent

    def of(self, place: str) -> str:
        """Return where the body has what stands at a place of the chat: by its longest known beginning."""
        known = place
        while known and known not in self._sent:
            step = _STEP.search(known)
            known = known[: step.start()] if step else ""
        return self._sent[known] + place[len(known) :] if known else place

    def reworded(self, sentence: str) -> str:
        """Return a sentence about a chat that names the places of the body."""
        for path in reversed(_paths_in(sentence)):
            sentence = sentence[: path.start()] + self.of(path.group()) + sentence[path.end() :]
        for word, sent in self._words.items():
            sentence = word.sub(sent, sentence)
        return sentence

    @contextmanager
    def named(self) -> Iterator[None]:
        """Let InvalidRequestErrors of the `with` block name the places of the body."""
        try:
            yield
        except InvalidRequestError as error:
            message, param = str(error), error.param
            if (paths := _paths_in(message)) and paths[0].start() == 0:
                param = paths[0].group()
            raise error.reworded(self.reworded(message), param=param and self.of(param)) from error.__cause__


def _paths_in(sentence: str) -> list[re.Match[str]]:
    """Return the places in a sentence; a word such as "tools" is one where the sentence begins with it."""
    return [one for one in _PATH.finditer(sentence) if one.start() == 0 or not one.group().isalpha()]
