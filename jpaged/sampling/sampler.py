"""Samples the next token of every row, on the device, without sorting the vocabulary.

Truncation rules (truncation.py) say which tokens are kept. One of them is then drawn down a tree over the vocabulary
(drawing.py), with a random number for each level. The random numbers depend on (seed, sample index, output index,
purpose) and on nothing else: not on the row, the batch, a preemption or a restart.

Letters: R rows, V vocabulary; r selected rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..pallas_kernels.row_sums import sum_by_halves
from .control_flow import DYNAMIC, ControlFlow
from .drawing import NUM_BRANCHES, draw_tokens, num_draw_levels
from .logit_rules import LogitRulesState, apply_rules
from .logits_processor import LogitsProcessor
from .sample_columns import ALL_ALLOWED, Score
from .sampling_params import SampleMode
from .sampling_rows import SamplingRows
from .token_scores import TokenScores, logits_of, token_scores
from .top_blocks import BLOCK, BlockRows, RowSelection, block_rows, take_rows
from .truncation import KeptTokens, RowFunction, is_in_top_k, truncate
from .uniforms import uniforms

if TYPE_CHECKING:
    from ..pallas_kernels.native.row_scores import ScoredRows

PURPOSE_SAMPLE = 0
"""The last part of the random key. Numbers for another purpose, such as accepting a speculated token, take another."""

T = TypeVar("T")


class RowWork(IntEnum):
    """What has to be computed for a row's token. Rows with equal or neighbouring values are computed together."""

    RULED = 0
    """Rules, then the likeliest token."""
    RULED_DRAWN = 1
    RULED_TRUNCATED = 2
    TRUNCATED = 3
    """A draw from some of the row's tokens, without rules."""
    DRAWN = 4
    """A draw from all of them."""
    PLAIN = 5
    """Nothing but the likeliest token."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampledRows:
    """One token per row."""

    token_ids: Int[Array, " R"]
    is_finite: Bool[Array, " R"]
    """False where the logits held a NaN or +inf, or nothing but −inf; the row's token is then meaningless."""
    scores: TokenScores | None = None
    """Logprobs and ranks in modes SCORED and FULL, meaningless for rows that ask for none; None in other modes."""

    def at(self, index: int, rows: list[int]) -> SampledRows:
        """Return these rows of one iteration of a decode program, whose arrays are numpy arrays [K, R, …]."""
        return jax.tree.map(lambda array: array[index, rows], self)


@dataclass(frozen=True)
class SampleSettings:
    """The settings of the sampler that are fixed for an engine: its logits processors and how it gives logprobs."""

    processors: tuple[LogitsProcessor, ...] = ()
    max_logprobs: int = 0
    """Most likely tokens per row that get logprobs; −1: all of the vocabulary."""
    logprobs_mode: str = "raw_logprobs"
    """One of `config.LOGPROBS_MODES`. raw_logprobs are those of the model's logits, tempered_logprobs those of these
    logits divided by the temperature, processed_logprobs those of what is drawn from, after rules and truncation."""
    control_flow: ControlFlow = DYNAMIC
    """Whether programs have branches and loops that depend on the data."""
    has_native_code: bool = False
    """Whether the device is a CPU that runs native code."""

    @property
    def applies_rules_natively(self) -> bool:
        """Whether native code applies rules and masks: it has no processors, which stand between rules."""
        return self.has_native_code and not self.processors

    @property
    def weighs_natively(self) -> bool:
        """Whether native code weighs rows, for draws and for logprobs: all rows of an engine in the same way.

        Processed logprobs are those of the tokens that a draw keeps, so that both are then computed alike.
        """
        return self.applies_rules_natively and self.logprobs_mode != "processed_logprobs"


PLAIN = SampleSettings()
"""No logits processors, no logprobs."""


def sample(
    logits_RV: Float[Array, "R V"],
    rows: SamplingRows,
    mode: SampleMode,
    settings: SampleSettings = PLAIN,
    rules: LogitRulesState | None = None,
    masks: Int[Array, "R W"] | None = None,
) -> SampledRows:
    """Return a token for every row, with whether its logits are finite; with scores in the modes SCORED and FULL.

    `logits_RV` are the model's logits of R rows over a vocabulary of V tokens. `rows` are the parameters of the rows,
    and `rules` the logit rules of all state slots (None if the mode reads none). `masks` have a bit for each token, 32
    in a word: a row draws only tokens whose bit is set, and a row of ALL_ALLOWED, or None, allows all. They come after
    all rules, and raw and tempered logprobs are those of the logits before them.

    There are three passes. First, each row gets its likeliest token, as if all were greedy; mode GREEDY ends here if
    there are no masks. Second, rows that need rules, a mask or a draw are computed in batches of similar work, which
    replace these results; mode RANDOM ends here. Third, in the modes SCORED and FULL, rows that ask for scores are
    scored in batches. The scores of other rows mean nothing. Native code, where `settings.weighs_natively`, makes the
    second pass for all rows in one call, and finds for the third what whole rows are read for.
    """
    if mode is SampleMode.SCORED:  # This mode scores the sampled token alone, without the most likely ones.
        settings = replace(settings, max_logprobs=0)
    control_flow, logits, vocab_size = settings.control_flow, block_rows(logits_RV), logits_RV.shape[1]
    is_ruled, is_finite, ruled = _is_ruled(rows, rules, masks), is_finite_row(logits), None
    if settings.applies_rules_natively and (rules is not None or masks is not None):
        from .native_rules import natively_ruled  # Only a trace needs what writes native code.

        ruled = natively_ruled(logits, rows, is_ruled, rules, masks, vocab_size=vocab_size)
        logits, rules, masks, is_ruled = ruled.logits, None, None, jnp.zeros_like(is_ruled)
    likeliest = _DrawnRows(
        token_ids=_first_maximum(logits, vocab_size),
        is_finite=is_finite_row(logits),
        log_masses=jnp.zeros(logits_RV.shape[0], jnp.float32),
    )
    if mode is SampleMode.GREEDY and masks is None:
        return SampledRows(likeliest.token_ids, likeliest.is_finite)
    # All rows at once: hashing takes many short steps, whose number does not depend on the rows.
    num_levels = num_draw_levels(vocab_size)
    uniforms_RL = control_flow.compute_if(
        jnp.any(~rows.is_greedy),
        lambda: uniforms(rows, PURPOSE_SAMPLE, num_levels, control_flow),
        lambda: jnp.zeros((logits_RV.shape[0], num_levels), jnp.float32),
    )
    batch = _Batch(logits, vocab_size, rows, mode, settings, rules, masks, is_ruled, uniforms_RL)

    def draw(selection: RowSelection, drawn: _DrawnRows) -> _DrawnRows:
        """Return the results of all rows, `drawn`, with those of the selected rows computed and replaced."""
        return _with_rows(drawn, selection, batch.draw(selection))

    row_work = _row_work(rows, is_ruled)
    if settings.weighs_natively:
        drawn = control_flow.compute_if(
            jnp.any(~rows.is_greedy), lambda: batch.draw_natively(likeliest), lambda: likeliest
        )
    else:
        is_needed = row_work != RowWork.PLAIN
        drawn = control_flow.for_row_batches(is_needed, row_work, draw, likeliest, num_keys=len(RowWork))
    token_ids = drawn.token_ids
    if mode in (SampleMode.GREEDY, SampleMode.RANDOM):
        return SampledRows(token_ids, drawn.is_finite)
    # Processors may have replaced a NaN of the model's; other rules keep it.
    is_finite &= drawn.is_finite
    if ruled is not None and settings.logprobs_mode != "processed_logprobs":
        batch = replace(batch, logits=ruled.raw(token_ids))
    scores = batch.score_all(token_ids, row_work)
    scores = replace(scores, log_kept_masses=drawn.log_masses if mode is SampleMode.FULL else None)
    return SampledRows(token_ids, is_finite, scores)


def mask_bias(masks: Int[Array, "R W"], vocab_size: int) -> Float[Array, "R V"]:
    """Return 0 for each token whose bit is set in a row of `masks`, and −inf for each other one.

    Token t has bit t % 32 of word t // 32; bits beyond the vocabulary mean nothing. To be added, so that a NaN among
    the logits stays one.
    """
    bits_RWb = masks[:, :, None] >> jnp.arange(32, dtype=masks.dtype)[None, None] & 1
    bits_RV = bits_RWb.reshape(masks.shape[0], -1)[:, :vocab_size]
    return jnp.where(bits_RV != 0, 0.0, -jnp.inf).astype(jnp.float32)


def _is_ruled(rows: SamplingRows, rules: LogitRulesState | None, masks: Int[Array, "R W"] | None) -> Bool[Array, " R"]:
    """Return whether a row has logit rules, or a mask that forbids a token."""
    is_ruled = (rows.ruled_slot > 0) & (rules is not None)
    return is_ruled if masks is None else is_ruled | jnp.any(masks != ALL_ALLOWED, axis=1)


def _row_work(rows: SamplingRows, is_ruled: Bool[Array, " R"]) -> Int[Array, " R"]:
    """Return the RowWork of each row, int [R]: what has to be computed for its token. It is the sort key of batches.

    `is_ruled` says whether a row has logit rules or a mask. A random row with rules and a top-k is RULED_TRUNCATED, one
    with neither is DRAWN, and a greedy row without rules is PLAIN, whatever its top-k.
    """
    # Min-p alone does not count: its threshold is known, while top-k and top-p search theirs.
    is_drawn, is_truncated = ~rows.is_greedy, (rows.top_k > 0) | (rows.top_p < 1)
    ruled = jnp.where(is_truncated, RowWork.RULED_TRUNCATED, RowWork.RULED_DRAWN)
    drawn = jnp.where(is_truncated, RowWork.TRUNCATED, RowWork.DRAWN)
    return jnp.where(is_ruled, jnp.where(is_drawn, ruled, RowWork.RULED), jnp.where(is_drawn, drawn, RowWork.PLAIN))


def _with_rows(results: T, selection: RowSelection, new_rows: T) -> T:
    """Return the results of all R rows, a tree of arrays, in which the selected rows are replaced by `new_rows`."""
    return jax.tree.map(lambda old, new: old.at[selection].set(new), results, new_rows)


class _DrawnRows(NamedTuple):
    """The results of drawing, for all rows or for some."""

    token_ids: Int[Array, " R"]
    is_finite: Bool[Array, " R"]
    log_masses: Float[Array, " R"]
    """The logarithm of the probability that truncation left; 0 for rows that do not ask for it."""


@dataclass(frozen=True)
class _Batch:
    """The logits of R rows with their parameters. Its methods sample and score some of the rows."""

    logits: BlockRows
    """The model's logits as they are."""
    vocab_size: int
    rows: SamplingRows
    mode: SampleMode
    settings: SampleSettings
    rules: LogitRulesState | None
    masks: Int[Array, "R W"] | None
    is_ruled: Bool[Array, " R"]
    """Whether a row has logit rules or a mask."""
    uniforms: Float[Array, "R L"]
    """The random numbers of each row, for `draw_tokens`; they mean nothing if no row is random."""

    def ruled_logits(self, selection: RowSelection) -> BlockRows:
        """Return the logits of the selected rows, after the rules of their state slots and after their masks.

        If no selected row has either, they are copied as they are. This is decided when the program runs, if the
        control flow has branches. Otherwise both are always applied; those of rows without change nothing. A program
        without rules and masks (None) reads the logits in place. All callers get one array, whichever it is, so that
        what they do with it is in the program once.
        """
        plain = self.logits._replace(selection=selection)
        if self.rules is None and self.masks is None:
            return plain

        def ruled() -> tuple[Array, Array, Array]:
            # The slice cuts off what fills up the last block.
            logits_rV = plain.values[:, : self.vocab_size]
            if self.rules is not None:
                params, processors = self.rows.at(selection), self.settings.processors
                logits_rV = apply_rules(logits_rV, self.rules, params.ruled_slot, params.output_index, processors)
            # Masks come last: a caller's logits processor may replace any logit.
            if self.masks is not None:
                logits_rV = logits_rV + mask_bias(take_rows(self.masks, selection), self.vocab_size)
            return block_rows(logits_rV).arrays

        is_needed = jnp.any(take_rows(self.is_ruled, selection))
        return BlockRows(*self.settings.control_flow.compute_if(is_needed, ruled, lambda: plain.selected_arrays))

    def draw(self, selection: RowSelection) -> _DrawnRows:
        """Return a token of each selected row, whether its logits are finite, and the probability mass of its draw.

        All three are those of the logits after rules and masks. Random rows get a token among those that truncation
        keeps, greedy rows and those with a top-p of 0 the likeliest token. The mass is the logarithm of the probability
        of all kept tokens together: log 0.9 if the tokens left out have 0.1. It is 0 for rows that do not ask for it.
        If no row is random, a program with branches skips truncation and draws; mode GREEDY has none.
        """
        logits, params = self.ruled_logits(selection), self.rows.at(selection)
        is_drawn, likeliest = ~params.is_greedy, _first_maximum(logits, self.vocab_size)
        control_flow = self.settings.control_flow
        asks_for_mass = (params.score & Score.MASS > 0) & is_drawn  # The column `score` holds bits of `Score`.
        no_masses = jnp.zeros(len(is_drawn), jnp.float32)

        def draw_all() -> tuple[Int[Array, " r"], Float[Array, " r"]]:
            """Return the tokens and the log masses of all selected rows."""
            weigh, kept = self._truncate(logits, params, is_drawn)

            def log_masses() -> Float[Array, " r"]:
                """Return the logarithm of kept weights ÷ all weights of each row that asks for it, else 0."""
                # The likeliest token has the weight 1.
                kept_sums = jnp.where(params.keeps_one, 1.0, sum_by_halves(kept.block_sums))
                kept_shares = kept_sums / sum_by_halves(weigh(logits.values))
                return jnp.where(asks_for_mass, jnp.log(kept_shares), 0.0)

            masses = no_masses
            if self.mode is SampleMode.FULL:
                masses = control_flow.compute_if(jnp.any(asks_for_mass), log_masses, lambda: no_masses)
            drawn = draw_tokens(logits, weigh, kept, take_rows(self.uniforms, selection))
            return jnp.where(params.is_greedy | params.keeps_one, likeliest, drawn), masses

        if self.mode is SampleMode.GREEDY:
            token_ids, masses = likeliest, no_masses
        elif self.rules is None and self.masks is None:  # Only random rows are selected, so no branch is needed.
            token_ids, masses = draw_all()
        else:
            token_ids, masses = control_flow.compute_if(jnp.any(is_drawn), draw_all, lambda: (likeliest, no_masses))
        return _DrawnRows(token_ids, is_finite_row(logits), masses)

    def draw_natively(self, likeliest: _DrawnRows) -> _DrawnRows:
        """Return what `draw` does of all rows at once, drawn by native code; the logits are those after rules.

        `likeliest` are the results of rows that are greedy.
        """
        from ..pallas_kernels.native.row_draws import RowLimits, drawn_rows  # Only a trace needs what writes it.

        logits, rows, limits = self.logits, self.rows, RowLimits(*self.rows.limits)
        of_rows = ~rows.is_greedy, rows.temperature, limits, self.uniforms
        drawn = drawn_rows(logits.blocks, logits.row_max, *of_rows, num_branches=NUM_BRANCHES)
        token_ids = jnp.where(rows.is_greedy | rows.keeps_one, likeliest.token_ids, drawn.token_ids)
        masses = likeliest.log_masses
        if self.mode is SampleMode.FULL:
            # The likeliest token has the weight 1. The column `score` holds bits of `Score`.
            kept_sums = jnp.where(rows.keeps_one, 1.0, sum_by_halves(drawn.block_sums))
            asks_for_mass = (rows.score & Score.MASS > 0) & ~rows.is_greedy
            masses = jnp.where(asks_for_mass, jnp.log(kept_sums / drawn.totals), 0.0)
        return likeliest._replace(token_ids=token_ids, log_masses=masses)

    def score_all(self, token_ids: Int[Array, " R"], row_work: Int[Array, " R"]) -> TokenScores:
        """Return the scores of one token of each row; those of rows that ask for none mean nothing.

        `row_work` is each row's RowWork. If native code finds all that whole rows are read for, no batches are needed.
        """
        native_scores = self._native_scores(token_ids) if self.settings.weighs_natively else None
        if native_scores is not None and (native_scores.top_logits is not None or self.settings.max_logprobs == 0):
            return self.score_tokens(slice(None), token_ids, native_scores)

        def score(selection: RowSelection, scores: TokenScores) -> TokenScores:
            """Return the scores of all rows with those of the selected rows computed and replaced."""
            native_rows = jax.tree.map(lambda array: take_rows(array, selection), native_scores)
            return _with_rows(scores, selection, self.score_tokens(selection, token_ids[selection], native_rows))

        # Only the shapes of the scores are wanted here: nothing is computed.
        shapes = jax.eval_shape(lambda: self.score_tokens(slice(None), token_ids))
        no_scores = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        is_scored, num_keys = self.rows.score > 0, len(RowWork)
        return self.settings.control_flow.for_row_batches(is_scored, row_work, score, no_scores, num_keys=num_keys)

    def _native_scores(self, token_ids: Int[Array, " R"]) -> ScoredRows:
        """Return what native code finds of all rows that are scored."""
        from ..pallas_kernels.native.row_scores import MAX_TOPS, scored_rows

        logits, score, num_tops = self.logits, self.rows.score, min(self.settings.max_logprobs, self.vocab_size)
        return scored_rows(
            logits.blocks,
            logits.maxima,
            score > 0,
            score & Score.TOPS > 0,
            self._score_temperature(self.rows),
            logits_of(logits, token_ids[:, None])[:, 0],
            num_tops=num_tops if 0 < num_tops <= MAX_TOPS else 0,
        )

    def _score_temperature(self, params: SamplingRows) -> Float[Array, " r"]:
        """Return what logits are divided by before they are scored; greedy rows have temperature 1."""
        is_tempered = self.settings.logprobs_mode == "tempered_logprobs"
        return jnp.where(is_tempered & ~params.is_greedy, params.temperature, 1.0)

    def score_tokens(
        self, selection: RowSelection, token_ids: Int[Array, " r"], native_scores: ScoredRows | None = None
    ) -> TokenScores:
        """Return the logprob and rank of one token of each of r selected rows, and the row's most likely tokens.

        The latter are left out if the engine's `max_logprobs` is 0, and mean nothing for rows that do not ask. The
        setting `logprobs_mode` chooses the logits: "processed_logprobs" those after rules, temperature and
        truncation, "tempered_logprobs" the model's logits ÷ temperature, "raw_logprobs" the model's logits as they are.
        Greedy rows are computed with temperature 1. `native_scores` are those of the selected rows, of native code.
        """
        params = self.rows.at(selection)
        compute = partial(
            token_scores,
            # The column `score` holds `Score` bits: which results each row's request asks for.
            wants_tops=jnp.any(params.score & Score.TOPS > 0),
            max_logprobs=self.settings.max_logprobs,
            vocab_size=self.vocab_size,
            control_flow=self.settings.control_flow,
        )
        if self.settings.logprobs_mode == "processed_logprobs":
            ones = jnp.ones_like(params.temperature)  # Processed logits have been divided by the temperature.
            return compute(self._processed(self.ruled_logits(selection), selection), token_ids, ones)
        logits = self.logits._replace(selection=selection)
        return compute(logits, token_ids, self._score_temperature(params), native_scores=native_scores)

    def _truncate(
        self, logits: BlockRows, params: SamplingRows, is_drawn: Bool[Array, " r"]
    ) -> tuple[RowFunction, KeptTokens]:
        """Return the function that turns logits of the selected rows into weights, and the tokens that are kept.

        A weight is exp((logit − row maximum) ÷ temperature), so that the largest of a row is 1; greedy rows have
        temperature 1 and keep all tokens. Kept tokens are those whose weight reaches the row's threshold. The sums of
        their weights in each block are valid in rows with `is_drawn` only.
        """
        scale = _scale(logits, params)

        def weigh(logits_rn: Float[Array, "r n"]) -> Float[Array, "r n"]:
            return jnp.exp(scale(logits_rn))

        return weigh, truncate(logits, weigh, params.limits, is_drawn, self.settings.control_flow)

    def _processed(self, logits: BlockRows, selection: RowSelection) -> BlockRows:
        """Return (logit − row maximum) ÷ temperature of the selected rows, with −inf for tokens that truncation drops.

        These are the logits of the distribution that tokens are drawn from, again in blocks. `logits` are those after
        the rules. Greedy rows have temperature 1 and keep all tokens.
        """
        params = self.rows.at(selection)
        scale = _scale(logits, params)
        # No row counts as drawn, since only the threshold of the kept tokens is used, not their block sums.
        weigh, kept = self._truncate(logits, params, jnp.zeros_like(params.is_greedy))

        def heights(logits_rn: Float[Array, "r n"]) -> Float[Array, "r n"]:
            """Return 1 ÷ (1 − x) of scaled logits x ≤ 0: it ascends with x as eˣ does, but is never rounded to 0."""
            return 1.0 / (1.0 - scale(logits_rn))

        # Weights of unlikely tokens are rounded to 0, where they tie: top-k is applied again to heights, which do not.
        is_kept = weigh(logits.values) >= kept.threshold[:, None]
        is_kept &= is_in_top_k(logits, heights, params.limits.top_k, self.settings.control_flow)
        is_likeliest = jnp.arange(is_kept.shape[1])[None] == _first_maximum(logits, self.vocab_size)[:, None]
        is_kept &= is_likeliest | ~params.keeps_one[:, None]
        return block_rows(jnp.where(is_kept, scale(logits.values), -jnp.inf))


def _scale(logits: BlockRows, params: SamplingRows) -> RowFunction:
    """Return the function logit → (logit − row maximum) ÷ temperature; greedy rows have temperature 1."""
    maximum, temperature = logits.row_max[:, None], jnp.where(params.is_greedy, 1.0, params.temperature)[:, None]
    return lambda logits: (logits - maximum) / temperature


def _first_maximum(logits: BlockRows, vocab_size: int) -> Int[Array, " r"]:
    """Return the lowest index of each row's maximum; the vocabulary's last index if the maximum is a NaN.

    The maxima of the blocks (of BLOCK tokens) tell the first block that holds the row's maximum, so that of each row
    only this block is read. A NaN equals nothing: then both searches give their last index, which may be padding of the
    last block and is limited to V − 1. With BLOCK = 128, a maximum first found at offset 2 of block 7 is token
    7 × 128 + 2 = 898.
    """
    row_max = logits.row_max[:, None]
    block_ids = _first_true(take_rows(logits.maxima, logits.selection) == row_max)
    block_starts = block_ids * BLOCK
    offsets = _first_true(logits.take_blocks(block_ids[:, None])[:, 0] == row_max)
    return jnp.minimum(block_starts + offsets, vocab_size - 1)


def _first_true(mask: Bool[Array, "R n"]) -> Int[Array, " R"]:
    """Return the first true index of each row; the last index, n − 1, if there is none."""
    last_index = mask.shape[1] - 1
    return jnp.min(jnp.where(mask, jnp.arange(last_index + 1, dtype=jnp.int32)[None], last_index), axis=1)


def is_finite_row(logits: BlockRows) -> Bool[Array, " r"]:
    """Return whether each row is finite: no NaN, no +inf, not all −inf."""
    return ~jnp.any(take_rows(logits.has_nan, logits.selection), axis=-1) & jnp.isfinite(logits.row_max)
