"""What requests may ask of their logits, and how the host writes it down for the device: a row of numbers per slot.

The device's half is logit_rules.py. Imports no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from .errors import InvalidRequestError
from .logits_processor import LogitsProcessor
from .sampling_params import SamplingParams, shown

MAX_BAD_TOKENS = 1024
"""Of all bad words of a request together."""
IN_PROMPT, ENDS = 1 << 30, 1 << 29
"""Bits of `tokens`: the prompt has this token; it may not come before min_tokens. The rest counts how often it was
drawn."""
COUNT_MASK = ENDS - 1
IS_FIRST, IS_LAST, IS_MATCHED = 1 << 30, 1 << 29, 1 << 28
"""Bits of `words`: a word's first token; its last; the output ends with the word's tokens up to this one."""
ID_MASK = IS_MATCHED - 1
VALUES = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")
"""Before the arguments of processors in `values`."""


@dataclass(frozen=True)
class RuleBook:
    """The rules that an engine knows, and how wide its logits are."""

    vocab_size: int
    processors: tuple[LogitsProcessor, ...] = ()
    eos_token_ids: frozenset[int] = frozenset()
    """The model's: none comes before min_tokens, also where it would not end the sequence."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names that `extra_args` may hold."""
        return tuple(name for processor in self.processors for name in processor.arguments)

    @property
    def widths(self) -> dict[str, int]:
        """Numbers of one slot's rules, by field."""
        return {
            "tokens": self.vocab_size,
            "bias": self.vocab_size,
            "words": MAX_BAD_TOKENS,
            "values": len(VALUES) + len(self.arguments),
        }

    @property
    def width(self) -> int:
        """Of one slot's rules, in int32."""
        return sum(self.widths.values())

    def check(self, params: SamplingParams) -> None:
        """InvalidRequestError for arguments that no processor takes, and for some of one's and not all."""
        given = params.extra_args or {}
        for name in given:
            if name not in self.arguments:
                near = get_close_matches(name, self.arguments, n=1)
                hint = f"did you mean {near[0]}?" if near else "leave it out"
                known = f"one of {', '.join(self.arguments)}" if self.arguments else "none: it has no logits_processors"
                raise InvalidRequestError(
                    f"extra_args: got {shown(name)}, this engine takes {known}; {hint}", param="extra_args"
                )
        for processor in self.processors:
            missing = [name for name in processor.arguments if name not in given]
            if missing and len(missing) < len(processor.arguments):
                raise InvalidRequestError(
                    f"extra_args: got no {', '.join(missing)}, {processor.name} takes all of "
                    f"{', '.join(processor.arguments)}; add it",
                    param="extra_args",
                )

    def row(
        self,
        params: SamplingParams,
        *,
        prompt: Sequence[int],
        output: Sequence[int],
        stop_ids: Collection[int],
        bad_words: Sequence[Sequence[int]],
    ) -> np.ndarray:
        """Rules of a sequence with this prompt and output so far: the fields one after another, as int32.

        `stop_ids` are the tokens that end it, `bad_words` the ids of what may not come out, MAX_BAD_TOKENS in all.
        """
        tokens = np.bincount(np.asarray(output, np.intp), minlength=self.vocab_size).astype(np.int32)
        tokens[np.asarray(prompt, np.intp)] |= IN_PROMPT
        # A model's own end-of-sequence id may have no row in its head.
        tokens[[token_id for token_id in self.eos_token_ids.union(stop_ids) if token_id < self.vocab_size]] |= ENDS
        bias = np.zeros(self.vocab_size, np.float32)
        if params.allowed_token_ids is not None:
            bias[:] = -np.inf
            bias[list(params.allowed_token_ids)] = 0.0
        if params.logit_bias:
            bias[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float32)
        words = packed_words(bad_words)
        longest = max(map(len, bad_words), default=0)
        for token_id in output[max(0, len(output) - longest) :]:
            words = matched_on(words, token_id, np)
        return np.concatenate([tokens, bias.view(np.int32), words, self.values(params).view(np.int32)])

    def values(self, params: SamplingParams) -> np.ndarray:
        """Numbers of a request's rules; NaN for the arguments that it does not give."""
        given = params.extra_args or {}
        own = [getattr(params, name) for name in VALUES]
        return np.array([*own, *(given.get(name, math.nan) for name in self.arguments)], np.float32)


def packed_words(bad_words: Sequence[Sequence[int]]) -> np.ndarray:
    """Bad words one after another, of which nothing is matched yet."""
    words = np.zeros(MAX_BAD_TOKENS, np.int32)
    at = 0
    for word in bad_words:
        words[at : at + len(word)] = word
        words[at] |= IS_FIRST
        at += len(word)
        words[at - 1] |= IS_LAST
    return words


def goes_on(words: Any, xp: Any) -> Any:
    """Where the next token may continue a bad word: at each first one, and behind each that is matched."""
    is_behind_matched = xp.roll(words, 1, axis=-1) & IS_MATCHED != 0
    return (words & IS_FIRST != 0) | is_behind_matched


def matched_on(words: Any, token_id: Any, xp: Any) -> Any:
    """The words with the marks that they have after one more token: Shift-And, over all of them at once."""
    is_matched = goes_on(words, xp) & (words & ID_MASK == token_id)
    return xp.where(is_matched, words | IS_MATCHED, words & ~IS_MATCHED)
