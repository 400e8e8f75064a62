"""Rules of requests about their logits, kept on the device by state slot and applied to all rows at once.

    allowed tokens ─▶ bad words ─▶ min_tokens ─▶ logit bias ─▶ the engine's processors ─▶ penalties

What a slot's owner asks for is written once, when it takes the slot (`RuleBook.row`, `set_rules`). What depends on the
tokens drawn is kept up by the step that draws them (`note_tokens`): the host need not have seen the last one. Rows
without rules read slot 0, whose rules change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .logits_processor import LogitsProcessor
from .rule_book import (
    COUNT_MASK,
    ENDS,
    ID_MASK,
    IN_PROMPT,
    IS_LAST,
    VALUES,
    RuleBook,
    goes_on,
    matched_on,
)
from .sampling_params import SamplingParams


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotRules:
    """What the rows of each state slot are held to; `RuleBook.widths` says how wide each field is."""

    tokens: Int[Array, "slots V"]
    """How often each token was drawn, and bits: in the prompt, ends the sequence."""
    bias: Float[Array, "slots V"]
    """Added; −inf for what is not allowed."""
    words: Int[Array, "slots B"]
    """Bad words, one after another, as ids with bits: first, last, matched; 0 behind the last."""
    values: Float[Array, "slots A"]
    """Penalties, min_tokens, arguments of processors; NaN for those not given."""


def rule_shapes(book: RuleBook, num_slots: int, sharding: Any = None) -> SlotRules:
    """Abstract arrays for `num_slots` slots, the null slot among them."""
    dtypes = {"tokens": jnp.int32, "bias": jnp.float32, "words": jnp.int32, "values": jnp.float32}
    shapes: dict[str, Any] = {
        name: jax.ShapeDtypeStruct((num_slots, width), dtypes[name], sharding=sharding)
        for name, width in book.widths.items()
    }
    return SlotRules(**shapes)


def new_rules(book: RuleBook, num_slots: int) -> SlotRules:
    """Rules that change nothing, in every slot."""
    rules = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), rule_shapes(book, num_slots))
    return replace(rules, values=jnp.broadcast_to(book.values(SamplingParams()), rules.values.shape))


def set_rules(rules: SlotRules, packed: Int[Array, " n"], slot: Int[Array, ""]) -> SlotRules:
    """Let a slot have the rules of its new owner."""
    at = 0
    leaves = {}
    for name, leaf in vars(rules).items():
        row = lax.bitcast_convert_type(packed[at : at + leaf.shape[1]], leaf.dtype)
        leaves[name] = lax.dynamic_update_slice(leaf, row[None], (slot, 0))
        at += leaf.shape[1]
    return SlotRules(**leaves)


def apply_rules(
    logits_RV: Float[Array, "R V"],
    rules: SlotRules,
    slots: Int[Array, " R"],
    output_index: Int[Array, " R"],
    processors: Sequence[LogitsProcessor] = (),
) -> Float[Array, "R V"]:
    """The logits as the rules of each row's slot leave them."""
    tokens_RV, words_RB, values = rules.tokens[slots], rules.words[slots], rules.values[slots]
    presence, frequency, repetition, min_tokens = (values[:, at, None] for at in range(len(VALUES)))
    is_too_early = (output_index[:, None].astype(jnp.float32) < min_tokens) & (tokens_RV & ENDS != 0)
    logits_RV = jnp.where(is_too_early, -jnp.inf, logits_RV + rules.bias[slots])
    would_complete = goes_on(words_RB, jnp) & (words_RB & IS_LAST != 0)
    banned = jnp.where(would_complete, words_RB & ID_MASK, logits_RV.shape[1])

    def without_bad_words(logits_RV: Float[Array, "R V"]) -> Float[Array, "R V"]:
        return logits_RV.at[jnp.arange(len(slots))[:, None], banned].set(-jnp.inf, mode="drop")

    if processors:
        logits_RV = without_bad_words(logits_RV)
    at = len(VALUES)
    for processor in processors:
        given = values[:, at : at + len(processor.arguments)]
        at += len(processor.arguments)
        changed = jax.vmap(lambda logits, row, apply=processor.apply: apply(logits, *row))(logits_RV, given)
        logits_RV = jnp.where(jnp.isnan(given).any(axis=1, keepdims=True), logits_RV, changed)
    counts_RV = (tokens_RV & COUNT_MASK).astype(jnp.float32)
    is_drawn_RV = counts_RV > 0
    repeated = jnp.where(logits_RV > 0, logits_RV / repetition, logits_RV * repetition)
    logits_RV = jnp.where(is_drawn_RV | (tokens_RV & IN_PROMPT != 0), repeated, logits_RV)
    logits_RV = logits_RV - frequency * counts_RV - presence * is_drawn_RV.astype(jnp.float32)
    # Last, where only penalties come between, which do not change −inf: what is scattered into is written out, where
    # XLA:CPU would compute all of the above once for every reader.
    return logits_RV if processors else without_bad_words(logits_RV)


def note_tokens(rules: SlotRules, slots: Int[Array, " R"], token_ids: Int[Array, " R"]) -> SlotRules:
    """Enter what each slot drew. Of slot 0 nothing is kept: its rules stay as they are."""
    kept = jnp.where(slots > 0, slots, rules.tokens.shape[0])
    words_RB = matched_on(rules.words[slots], token_ids[:, None], jnp)
    return replace(
        rules,
        tokens=rules.tokens.at[kept, token_ids].add(1, mode="drop"),
        words=rules.words.at[kept].set(words_RB, mode="drop"),
    )
