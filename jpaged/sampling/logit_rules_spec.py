"""The rules that requests set for their logits, and how the host packs them for the device: a row per state slot.

`logit_rules.py` is the device's half. Imports no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from ..checks import nearest, refusal, shown
from ..limits import ceiling
from .logits_processor import LogitsProcessor
from .parameter import Column
from .sampling_params import SamplingParams, parameters_in

MAX_BAD_TOKENS = ceiling("bad_word_tokens")
"""Tokens of all bad words of a request together."""
IN_PROMPT, ENDS = 1 << 30, 1 << 29
"""Bits of an entry of `tokens`: the prompt holds this token; it may not come before min_tokens. The bits below count
how often it was drawn."""
COUNT_MASK = ENDS - 1
IS_FIRST, IS_LAST, IS_MATCHED = 1 << 30, 1 << 29, 1 << 28
"""Bits of an entry of `words`, a token of a bad word: it is the word's first; its last; the output ends with the word's
tokens up to this one. The bits below are the token's id."""
ID_MASK = IS_MATCHED - 1
TOUCHED_BLOCK = 128
"""Tokens of a block of `touched`: as many as `top_blocks.BLOCK`, whose module needs JAX."""
RULE_PARAMETERS = parameters_in(Column.RULE)
"""Parameters at the front of `values`; the arguments of processors stand behind them."""


@dataclass(frozen=True)
class LogitRulesSpec:
    """The width of an engine's logits, its own processors, and the tokens that end its sequences."""

    vocab_size: int
    processors: tuple[LogitsProcessor, ...] = ()
    eos_token_ids: frozenset[int] = frozenset()
    """The model's. None of them comes before min_tokens, even where ignore_eos is set and it would end nothing."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the names that `extra_args` may hold."""
        return tuple(name for processor in self.processors for name in processor.arguments)

    @property
    def widths(self) -> dict[str, int]:
        """Return how many 32-bit values each field of one slot's rules has."""
        return {
            "tokens": self.vocab_size,
            "bias": self.vocab_size,
            "touched": -(-self.vocab_size // TOUCHED_BLOCK),
            "words": MAX_BAD_TOKENS,
            "values": len(RULE_PARAMETERS) + len(self.arguments),
        }

    @property
    def width(self) -> int:
        """Return how many 32-bit values one slot's rules have."""
        return sum(self.widths.values())

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidRequestError if `extra_args` do not fit the engine's processors; None and {} always fit.

        Each name must be an argument of a processor, and a processor's arguments are given all together or not at all.
        An error for an unknown name says which known one is most like it, if one is.
        """
        extra_args = params.extra_args or {}
        for name in extra_args:
            if name not in self.arguments:
                allowed = f"arguments of this engine's logits_processors: {', '.join(self.arguments) or 'it has none'}"
                similar_name = nearest(name, self.arguments)
                advice = f"did you mean {similar_name}?" if similar_name else "leave it out"
                raise refusal("extra_args", shown(name), allowed, advice)
        for processor in self.processors:
            missing = [name for name in processor.arguments if name not in extra_args]
            # If all are missing, the request does not ask for this processor.
            if missing and len(missing) < len(processor.arguments):
                allowed = f"all arguments of {processor.name}: {', '.join(processor.arguments)}"
                raise refusal("extra_args", f"no {', '.join(missing)}", allowed, "add it")

    def row(
        self,
        params: SamplingParams,
        *,
        prompt: Sequence[int],
        output: Sequence[int],
        stop_ids: Collection[int],
        bad_words: Sequence[Sequence[int]],
    ) -> np.ndarray:
        """Return the logit rules of a sequence as one array, int32 [width]: its fields in the order of `widths`.

        `prompt` and `output` are its token ids so far, which penalties count. `stop_ids` are the tokens that end the
        sequence. `bad_words` are the token ids of each word that the output must not hold, at most MAX_BAD_TOKENS
        together, which the caller has checked. Words that the end of the output has begun are marked as matched so far.
        The bias of a token that is not allowed is −inf, and a `logit_bias` for it changes nothing. Floats travel as
        their bits.
        """
        # Each entry counts how often the output holds the token, with flags in the high bits (IN_PROMPT, ENDS).
        tokens = np.bincount(np.asarray(output, np.intp), minlength=self.vocab_size).astype(np.int32)
        tokens[np.asarray(prompt, np.intp)] |= IN_PROMPT
        # An end-of-sequence id of the model may lie outside the vocabulary, so that it has no logit.
        tokens[[token_id for token_id in self.eos_token_ids.union(stop_ids) if token_id < self.vocab_size]] |= ENDS
        bias = np.zeros(self.vocab_size, np.float32)
        if params.allowed_token_ids is not None:
            bias[:] = -np.inf
            bias[list(params.allowed_token_ids)] = 0.0
        if params.logit_bias:
            bias[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float32)
        words = _pack_words(bad_words)
        # A match holds at most as many tokens as the longest word, so earlier tokens need not be read.
        max_word_len = max(map(len, bad_words), default=0)
        for token_id in output[max(0, len(output) - max_word_len) :]:
            words = advance_matches(words, token_id, np)
        has_rule = np.zeros((self.widths["touched"], TOUCHED_BLOCK), bool)
        np.logical_or(tokens, bias, out=has_rule.reshape(-1)[: self.vocab_size])
        touched, values = has_rule.any(axis=1).astype(np.int32), self.values(params).view(np.int32)
        return np.concatenate([tokens, bias.view(np.int32), touched, words, values])

    def values(self, params: SamplingParams) -> np.ndarray:
        """Return a request's RULE_PARAMETERS, then the arguments of all processors, as one float32 array.

        NaN stands for each argument that the request does not give: the processor then leaves its logits as they are.
        """
        extra_args = params.extra_args or {}
        parameters = [getattr(params, name) for name in RULE_PARAMETERS]
        return np.array([*parameters, *(extra_args.get(name, math.nan) for name in self.arguments)], np.float32)


def _pack_words(bad_words: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the tokens of all words one after another, int32 [MAX_BAD_TOKENS], padded with 0; none is matched yet.

    No word may be empty, and together they must fit, which callers have checked.
    Example: [[7, 8], [9]] gives 7 | IS_FIRST, 8 | IS_LAST, 9 | IS_FIRST | IS_LAST, 0, 0 …
    """
    words = np.zeros(MAX_BAD_TOKENS, np.int32)
    offset = 0
    for word in bad_words:
        words[offset : offset + len(word)] = word
        words[offset] |= IS_FIRST
        offset += len(word)
        words[offset - 1] |= IS_LAST
    return words


def may_come_next(words: Any, xp: ModuleType) -> Any:
    """Return, as bools [..., B], which entries of `words` the next token may match: it starts or continues a bad word.

    `words`, int32 [..., B], is an array of `xp` (numpy or jax.numpy). It holds the bad words one after another: an
    entry is one token of a word, with the bits IS_FIRST, IS_LAST and IS_MATCHED, and padding is 0. The result is true
    for the first token of each word and for the entry after each matched one. `roll` moves the last entry in front of
    entry 0, which does no harm: entry 0 is a first token or padding. Padding has no IS_LAST and so ends no word.
    """
    is_behind_matched = xp.roll(words, 1, axis=-1) & IS_MATCHED != 0
    return (words & IS_FIRST != 0) | is_behind_matched


def advance_matches(words: Any, token_id: Any, xp: ModuleType) -> Any:
    """Return `words`, int32 [..., B], with the IS_MATCHED bits after the output has got `token_id` as its next token.

    An entry is matched if the output ends with its word's tokens up to this one. This is the Shift-And algorithm over
    all words at once: with the words [7, 8] and [7, 9], token 7 matches the entries 0 and 2, and a token 9 after it
    matches entry 3 alone. `words` is an array of `xp` (numpy or jax.numpy); `token_id` broadcasts against it.
    """
    is_matched = may_come_next(words, xp) & (words & ID_MASK == token_id)
    return xp.where(is_matched, words | IS_MATCHED, words & ~IS_MATCHED)
