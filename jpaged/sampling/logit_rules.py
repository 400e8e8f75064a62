"""Rules of requests for their logits, kept on the device by state slot and applied to all rows at once.

    allowed tokens ─▶ bad words ─▶ min_tokens ─▶ logit bias ─▶ the engine's processors ─▶ penalties

The rules of a sequence are written once, when it gets its slot (`LogitRulesSpec.row`, `set_rules`). What depends on the
tokens drawn since is updated by the step that draws them (`record_tokens`), so that the host need not know them yet.
Rows without rules read slot 0, whose rules change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .logit_rules_spec import (
    COUNT_MASK,
    ENDS,
    ID_MASK,
    IN_PROMPT,
    IS_LAST,
    RULE_PARAMETERS,
    TOUCHED_BLOCK,
    LogitRulesSpec,
    advance_matches,
    may_come_next,
)
from .logits_processor import LogitsProcessor
from .sampling_params import SamplingParams


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitRulesState:
    """The rules of each state slot; `LogitRulesSpec.widths` gives the width of each field."""

    tokens: Int[Array, "slots V"]
    """How often each token was drawn, and the bits IN_PROMPT and ENDS."""
    bias: Float[Array, "slots V"]
    """Added to the logits; −inf for tokens that are not allowed."""
    touched: Int[Array, "slots b"]
    """Whether any token of a block of TOUCHED_BLOCK has a bias or an entry in `tokens`: native code reads no others."""
    words: Int[Array, "slots B"]
    """Tokens of bad words in a row, with the bits IS_FIRST, IS_LAST and IS_MATCHED; 0 behind the last."""
    values: Float[Array, "slots A"]
    """RULE_PARAMETERS, then arguments of processors; NaN for those not given."""


def rule_shapes(spec: LogitRulesSpec, num_slots: int, sharding: jax.sharding.Sharding | None = None) -> LogitRulesState:
    """Return abstract arrays [num_slots, width of the field], placed by `sharding`; they include the null slot 0."""
    floats = {"bias", "values"}
    shape_of: Any = partial(jax.ShapeDtypeStruct, sharding=sharding)
    leaves = {
        name: shape_of((num_slots, width), jnp.float32 if name in floats else jnp.int32)
        for name, width in spec.widths.items()
    }
    return LogitRulesState(**leaves)


def new_rules(spec: LogitRulesSpec, num_slots: int) -> LogitRulesState:
    """Return rules that change nothing, for every slot."""
    rules = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), rule_shapes(spec, num_slots))
    return replace(rules, values=jnp.broadcast_to(spec.values(SamplingParams()), rules.values.shape))


def set_rules(rules: LogitRulesState, packed: Int[Array, " n"], slot: Int[Array, ""]) -> LogitRulesState:
    """Return the rules of all slots after those of one state slot are replaced by a new sequence's.

    `packed` is the int32 array that `LogitRulesSpec.row` made: the slot's row of each field of `rules`, [slots, width],
    one field after the other, in the order of `LogitRulesSpec.widths`. Floats travel as the bits of a float32.
    """
    offset = 0
    leaves = {}
    for name, leaf in vars(rules).items():
        row = lax.bitcast_convert_type(packed[offset : offset + leaf.shape[1]], leaf.dtype)
        # Both start indices must have one dtype: with x64, a Python 0 would be an int64 beside the int32 slot.
        leaves[name] = lax.dynamic_update_slice(leaf, row[None], (slot, jnp.int32(0)))
        offset += leaf.shape[1]
    return LogitRulesState(**leaves)


def apply_rules(
    logits_RV: Float[Array, "R V"],
    rules: LogitRulesState,
    slots: Int[Array, " R"],
    output_index: Int[Array, " R"],
    processors: Sequence[LogitsProcessor] = (),
) -> Float[Array, "R V"]:
    """Return the logits of each row after the rules of its state slot; slot 0 has no rules.

    `output_index` is how many tokens each row has drawn. Letters: R rows, V vocabulary, B tokens of bad words, A rule
    parameters and arguments of processors (`LogitRulesState.values`). Allowed tokens, min_tokens and logit bias come
    first, with −inf in `rules.bias` for tokens that are not allowed. Then come the engine's `processors`, then
    penalties. Bad words come before the processors, or last where there are none, which gives the same result. −inf is
    added to the logits of forbidden tokens: a row with a NaN or +inf still holds one afterwards, unless a processor
    replaces it.
    """
    tokens_RV, words_RB, values_RA = rules.tokens[slots], rules.words[slots], rules.values[slots]
    parameters = {name: values_RA[:, index, None] for index, name in enumerate(RULE_PARAMETERS)}
    # ENDS marks the tokens that end a sequence; before `min_tokens` they are forbidden.
    is_too_early = (output_index[:, None].astype(jnp.float32) < parameters["min_tokens"]) & (tokens_RV & ENDS != 0)
    logits_RV = logits_RV + jnp.where(is_too_early, -jnp.inf, rules.bias[slots])
    would_complete_word = may_come_next(words_RB, jnp) & (words_RB & IS_LAST != 0)
    # Entries of `words_RB` that ban no token get the vocabulary's size as id, which the scatter drops.
    banned_RB = jnp.where(would_complete_word, words_RB & ID_MASK, logits_RV.shape[1])

    def without_bad_words(logits_RV: Float[Array, "R V"]) -> Float[Array, "R V"]:
        return logits_RV.at[jnp.arange(len(slots))[:, None], banned_RB].add(-jnp.inf, mode="drop")

    if processors:
        logits_RV = without_bad_words(logits_RV)
        logits_RV = _process(logits_RV, values_RA, processors)
    logits_RV = _penalize(logits_RV, tokens_RV, parameters)
    # Without processors, bad words may come last, since penalties do not change −inf. XLA:CPU writes out an array that
    # it scatters into, so the logits are computed once. If the scatter came earlier, XLA:CPU would repeat the work
    # after it for each reader of the result.
    return logits_RV if processors else without_bad_words(logits_RV)


def _process(
    logits_RV: Float[Array, "R V"], values_RA: Float[Array, "R A"], processors: Sequence[LogitsProcessor]
) -> Float[Array, "R V"]:
    """Return the logits after the engine's processors, one after another.

    `values_RA` holds each row's RULE_PARAMETERS, then the arguments of all processors in their order; NaN stands for an
    argument that the request has not given. A row that lacks an argument of a processor is not changed by it.
    """
    offset = len(RULE_PARAMETERS)
    for processor in processors:
        # `offset` is the index of the processor's first argument.
        arguments = values_RA[:, offset : offset + len(processor.arguments)]
        offset += len(processor.arguments)
        # `apply` takes one row, so it is mapped over rows. The default argument binds this processor's function.
        processed = jax.vmap(lambda logits, given, apply=processor.apply: apply(logits, *given))(logits_RV, arguments)
        logits_RV = jnp.where(jnp.isnan(arguments).any(axis=1, keepdims=True), logits_RV, processed)
    return logits_RV


def _penalize(
    logits_RV: Float[Array, "R V"], tokens_RV: Int[Array, "R V"], parameters: Mapping[str, Float[Array, "R 1"]]
) -> Float[Array, "R V"]:
    """Return the logits after the repetition penalty and then the frequency and presence penalties.

    `tokens_RV` says how often each token was drawn (COUNT_MASK) and whether the prompt holds it (IN_PROMPT). The
    repetition penalty divides positive logits of tokens drawn or in the prompt, and multiplies the others of them. The
    frequency penalty is subtracted once per draw of a token, the presence penalty once if it was drawn at all. A
    token that was drawn twice, with the logit 2, has 2 ÷ 1.25 − 2 × 0.1 − 0.3 = 1.1 after the repetition penalty 1.25,
    the frequency penalty 0.1 and the presence penalty 0.3.
    """
    counts_RV = (tokens_RV & COUNT_MASK).astype(jnp.float32)
    is_drawn_RV = counts_RV > 0
    repetition = parameters["repetition_penalty"]
    repeated = jnp.where(logits_RV > 0, logits_RV / repetition, logits_RV * repetition)
    logits_RV = jnp.where(is_drawn_RV | (tokens_RV & IN_PROMPT != 0), repeated, logits_RV)
    frequency, presence = parameters["frequency_penalty"], parameters["presence_penalty"]
    return logits_RV - frequency * counts_RV - presence * is_drawn_RV.astype(jnp.float32)


def record_tokens(rules: LogitRulesState, slots: Int[Array, " R"], token_ids: Int[Array, " R"]) -> LogitRulesState:
    """Return the rules of all slots after each of R rows has drawn a token.

    In the rows' state slots, `slots`, the count of the token drawn is raised by one, and each bad word's matched
    beginning is extended by the token or dropped. Rows without rules have slot 0, whose rules stay as they are, as does
    padding. No other slot may occur twice, since only one of two writes of its words would stay.
    """
    # Slot 0 is replaced by an index beyond the last slot, which the scatters drop.
    slots_to_write = jnp.where(slots > 0, slots, rules.tokens.shape[0])
    words_RB = advance_matches(rules.words[slots], token_ids[:, None], jnp)
    return replace(
        rules,
        tokens=rules.tokens.at[slots_to_write, token_ids].add(1, mode="drop"),
        touched=rules.touched.at[slots_to_write, token_ids // TOUCHED_BLOCK].set(1, mode="drop"),
        words=rules.words.at[slots_to_write].set(words_RB, mode="drop"),
    )
