"""Whether a model thinks before it answers: what the end of a prompt says of it."""

from __future__ import annotations

import enum
from functools import lru_cache

from ...errors import InvalidRequestError
from ..tokenizing.tokenizer import Tokenizer
from .chat_template import render_chat

BEGIN, END = "<think>", "</think>"
"""The marks around a thought, as Qwen3, SmolLM3, DeepSeek-R1 and others write them."""


class Thinking(enum.Enum):
    """What an output holds before its answer."""

    NONE = "none"
    """Nothing: the model does not think, or the prompt has closed the thought, as chat templates do to prevent one."""
    OPTIONAL = "optional"
    """A thought, if the model begins one: the prompt ends where an answer of the assistant begins."""
    OPEN = "open"
    """The rest of a thought that the prompt has begun."""


def thinking_after(tokenizer: Tokenizer, prompt: str, template: str | None) -> Thinking:
    """Return what comes after a prompt, of which its end is enough; NONE for models without the marks of a thought.

    `template` is the chat template in use, None for the model's own.
    """
    template = template or tokenizer.chat_template or ""
    if not may_think(tokenizer, template):
        return Thinking.NONE
    opening = _answer_opening(tokenizer, template)
    if opening and BEGIN not in opening and END not in opening and prompt.endswith(opening):
        return Thinking.OPTIONAL
    return Thinking.OPEN if prompt.rfind(BEGIN) > prompt.rfind(END) else Thinking.NONE


def thinking_in(opening: str, begin: str, end: str) -> Thinking:
    """Return what comes after a chat that has opened its answer by this text, for a model with these marks."""
    opening = opening.rstrip()
    if opening.rfind(begin) > opening.rfind(end):
        return Thinking.OPEN
    return Thinking.NONE if opening.endswith(end) else Thinking.OPTIONAL


def may_think(tokenizer: Tokenizer, template: str) -> bool:
    """Return whether the chat template in use, or the tokenizer, has the mark that ends a thought."""
    return END in template or tokenizer.backend.token_to_id(END) is not None


@lru_cache(maxsize=8)
def _answer_opening(tokenizer: Tokenizer, template: str) -> str:
    """Return the text by which a chat template begins an answer; empty if there is none."""
    messages = [{"role": "user", "content": "Hello"}]
    try:
        texts = [
            render_chat(tokenizer, messages, template=template, add_generation_prompt=is_open) if template else ""
            for is_open in (False, True)
        ]
    except InvalidRequestError:  # The template refuses these messages.
        return ""
    return texts[1].removeprefix(texts[0]) if texts[1].startswith(texts[0]) else ""


def opening_of(tokenizer: Tokenizer, template: str, prompt: str, begin: str = BEGIN) -> str:
    """Return the text by which a chat has opened an answer: from the last place on where the template begins one.

    `begin` is the mark of a thought. What stands behind that place may be an empty thought, or the beginning of an
    answer that is continued. The result is empty for other texts.
    """
    head = _answer_opening(tokenizer, template).partition(begin)[0]
    place = prompt.rfind(head) if head else -1
    return prompt[place:] if place >= 0 else ""
