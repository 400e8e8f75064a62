"""Applies rules and masks to logits by native code, on a CPU that runs it; a program only imports this to be traced.

The results are those of `logit_rules.apply_rules` and `sampler.mask_bias` up to a rounding of penalties, in one pass
instead of several.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

from ..pallas_kernels.native.ruled_rows import LogitBlocks, RuleBits, Rules, SavedBlocks, restored_rows, ruled_rows
from .logit_rules import LogitRulesState
from .logit_rules_spec import (
    COUNT_MASK,
    ENDS,
    ID_MASK,
    IN_PROMPT,
    IS_FIRST,
    IS_LAST,
    IS_MATCHED,
    RULE_PARAMETERS,
    TOUCHED_BLOCK,
)
from .sampling_rows import SamplingRows
from .top_blocks import BLOCK, BlockRows

BITS = RuleBits(
    in_prompt=IN_PROMPT,
    ends=ENDS,
    drawn=COUNT_MASK,
    is_first=IS_FIRST,
    is_last=IS_LAST,
    is_matched=IS_MATCHED,
    word_id=ID_MASK,
    **{name: RULE_PARAMETERS.index(name) for name in RULE_PARAMETERS},
)


class RuledLogits(NamedTuple):
    """Logits of R rows after their rules and masks, which may be taken back."""

    logits: BlockRows
    is_ruled: Bool[Array, " R"]
    saved: SavedBlocks
    raw_maxima: Float[Array, "R b"]
    """The maximum of each block of the logits as they were."""
    raw_has_nan: Bool[Array, "R b"]
    """Whether a block of the logits as they were holds a NaN."""

    def raw(self, token_ids: Int[Array, " R"]) -> BlockRows:
        """Return the logits as they were, in place, once `token_ids` are drawn. `logits` may not be read any more."""
        blocks = restored_rows(self.logits.blocks, self.is_ruled, self.saved, after=token_ids)
        return BlockRows(blocks, self.raw_maxima, self.raw_has_nan)


def natively_ruled(
    logits: BlockRows,
    rows: SamplingRows,
    is_ruled: Bool[Array, " R"],
    rules: LogitRulesState | None,
    masks: Int[Array, "R W"] | None,
    *,
    vocab_size: int,
) -> RuledLogits:
    """Return logits after the rules of the state slots of `rows` and after their masks, in place.

    `is_ruled` says whether a row has either. `logits` may not be read any more.
    """
    assert BLOCK == TOUCHED_BLOCK, "a block of `touched` is a block of logits"
    of_slots = None
    if rules is not None:
        fields = rules.tokens, rules.bias, rules.touched, rules.words, rules.values
        of_slots = Rules(*fields, slots=rows.ruled_slot, output_index=rows.output_index)
    ruled, saved = ruled_rows(LogitBlocks(*logits.arrays), is_ruled, of_slots, masks, BITS, vocab_size=vocab_size)
    return RuledLogits(BlockRows(*ruled), is_ruled, saved, logits.maxima, logits.has_nan)
