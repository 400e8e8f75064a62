"""Samples the next token of every row, on the device, without sorting the vocabulary.

Truncation rules (truncation.py) say which tokens are kept. One of them is then drawn down a tree over the vocabulary
(drawing.py), with a random number for each level. The random numbers depend on (seed, sample index, output index,
purpose) and on nothing else: not on the row, the batch, a preemption or a restart.

Letters: R rows, V vocabulary; r is a group of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from .drawing import draw_tokens, num_draw_levels
from .logit_rules import LogitRulesState, apply_rules
from .logits_processor import LogitsProcessor
from .sample_columns import FLOAT_PARAMETERS, SAMPLE_FIELDS, Score
from .sampling_params import GREEDY_TEMPERATURE, SampleMode
from .token_scores import TokenScores, token_scores
from .top_blocks import BLOCK, BlockRows, Group, block_rows
from .truncation import KeptTokens, RowFunction, TruncationLimits, is_in_top_k, truncate

PURPOSE_SAMPLE = 0
"""The last part of the random key. Numbers for another purpose, such as accepting a speculated token, take another."""

T = TypeVar("T")


class RowKind(IntEnum):
    """What a row's token takes. Rows of one kind, or of neighbouring ones, are computed together."""

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
class SamplingRows:
    """The parameters that R rows are sampled by. Each field is a column of SAMPLE_FIELDS."""

    seed_low: Int[Array, " R"]
    """The low 32 bits of the seed; `seed_high` are the high ones."""
    seed_high: Int[Array, " R"]
    sample_index: Int[Array, " R"]
    """Index of the sample within its request."""
    output_index: Int[Array, " R"]
    """Output tokens that the sample has already: 0 for its first one."""
    ruled_slot: Int[Array, " R"]
    """The row's state slot if its request has logit rules, else 0."""
    forced_token: Int[Array, " R"]
    """In modes SCORED and FULL: 1 + the id of a token that is given instead of drawn; else 0."""
    score: Int[Array, " R"]
    """In modes SCORED and FULL: the `Score` of each row, what its token gets beside its id."""
    top_k: Int[Array, " R"]
    temperature: Float[Array, " R"]
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]

    @classmethod
    def from_columns(cls, columns: Int[Array, "fields R"]) -> SamplingRows:
        """Unpack rows from SAMPLE_FIELDS."""
        named = dict(zip(SAMPLE_FIELDS, columns, strict=True))
        for name in FLOAT_PARAMETERS:
            named[name] = lax.bitcast_convert_type(named[name], jnp.float32)
        return cls(**{field.name: named[field.name] for field in fields(cls)})

    def at(self, group: Group) -> SamplingRows:
        """Return the parameters of some of the rows."""
        return jax.tree.map(lambda column: column[group], self)

    @property
    def is_greedy(self) -> Bool[Array, " R"]:
        """Whether a row's likeliest token is taken."""
        # ≤, not <: a temperature just below the limit may round up to it on its way to float32.
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def limits(self) -> TruncationLimits:
        """What rows keep of their tokens; greedy rows have no limits."""
        is_greedy = self.is_greedy
        min_p, top_k = jnp.where(is_greedy, 0.0, self.min_p), jnp.where(is_greedy, 0, self.top_k)
        return TruncationLimits(min_p, top_k, jnp.where(is_greedy, 1.0, self.top_p))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampledRows:
    """One token per row."""

    token_ids: Int[Array, " R"]
    is_finite: Bool[Array, " R"]
    """False where the logits held a NaN or +inf, or nothing but −inf; the row's token is then meaningless."""
    scores: TokenScores | None = None
    """Logprobs and ranks in modes SCORED and FULL, zeros for rows that ask for none; None in the other modes."""

    def at(self, index: int, rows: list[int]) -> SampledRows:
        """Return these rows of one iteration of a decode program, whose arrays are numpy arrays [K, R, …]."""
        return jax.tree.map(lambda each: each[index, rows], self)


@dataclass(frozen=True)
class SampleSettings:
    """The settings of the sampler that are fixed for an engine: its logits processors and how it gives logprobs."""

    processors: tuple[LogitsProcessor, ...] = ()
    max_logprobs: int = 0
    """Most likely tokens per row that get logprobs; −1: all of the vocabulary."""
    logprobs_mode: str = "raw_logprobs"
    """One of `config.LOGPROBS_MODES`. raw_logprobs are those of the model's logits, tempered_logprobs those of these
    logits divided by the temperature, processed_logprobs those of what is drawn from, after rules and truncation."""
    is_static: bool = False
    """Whether a sampler has no branch, and no loop whose length depends on data: all rows are computed as if each
    needed everything. For a device whose conditions the host has to read, a GPU."""


PLAIN = SampleSettings()
"""No logits processors, no logprobs."""


def sample(
    logits_RV: Float[Array, "R V"],
    rows: SamplingRows,
    mode: SampleMode,
    settings: SampleSettings = PLAIN,
    rules: LogitRulesState | None = None,
) -> SampledRows:
    """Sample a token for every row from its logits, after its rules if there are any, and score it if the mode does.

    Rules, draws and scores are computed only for groups of rows that hold one that needs them, unless the settings are
    static.
    """
    if mode is SampleMode.SCORED:
        settings = replace(settings, max_logprobs=0)
    sampler = _Sampler(block_rows(logits_RV), logits_RV.shape[1], rows, settings, rules, mode is SampleMode.FULL)
    plain = _first_maximum(sampler.logits, sampler.vocab_size), _is_finite(sampler.logits)
    if mode is SampleMode.GREEDY:
        return SampledRows(*plain)
    has_rows_to_score = mode in (SampleMode.SCORED, SampleMode.FULL)
    is_forced = (rows.forced_token > 0) & has_rows_to_score
    is_drawn = ~(rows.is_greedy | is_forced)

    def draw(group: Group, drawn: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        new = sampler.with_rules(group, lambda logits: sampler.draw(logits, group, is_drawn[group]))
        return _written(drawn, group, new)

    kinds = _kinds(rows, is_drawn, (rows.ruled_slot > 0) & (rules is not None))
    start = *plain, jnp.zeros(len(kinds), jnp.float32)
    drawn, is_finite, log_masses = _for_groups(kinds != RowKind.PLAIN, kinds, draw, start, settings.is_static)
    if mode is SampleMode.RANDOM:
        return SampledRows(drawn, is_finite)
    token_ids = jnp.where(is_forced, rows.forced_token - 1, drawn)
    is_finite &= plain[1]  # Processors may have replaced a NaN of the model's; other rules keep it.

    def score(group: Group, scores: TokenScores) -> TokenScores:
        return _written(scores, group, sampler.scores(group, token_ids[group]))

    shapes = jax.eval_shape(lambda: sampler.scores(slice(None), token_ids))
    no_scores = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    scores = _for_groups(rows.score > 0, kinds, score, no_scores, settings.is_static)
    return SampledRows(
        token_ids, is_finite, replace(scores, log_kept_masses=log_masses if sampler.has_masses else None)
    )


def _kinds(rows: SamplingRows, is_drawn: Bool[Array, " R"], is_ruled: Bool[Array, " R"]) -> Int[Array, " R"]:
    """Return the RowKind of each row."""
    is_truncated = (rows.top_k > 0) | (rows.top_p < 1)
    ruled = jnp.where(is_truncated, RowKind.RULED_TRUNCATED, RowKind.RULED_DRAWN)
    drawn = jnp.where(is_truncated, RowKind.TRUNCATED, RowKind.DRAWN)
    return jnp.where(is_ruled, jnp.where(is_drawn, ruled, RowKind.RULED), jnp.where(is_drawn, drawn, RowKind.PLAIN))


def _written(results: T, group: Group, of_group: T) -> T:
    """Return the results of all rows with those of a group in their place."""
    return jax.tree.map(lambda old, new: old.at[group].set(new), results, of_group)


@dataclass(frozen=True)
class _Sampler:
    """A batch of rows, of which it samples and scores groups."""

    logits: BlockRows
    vocab_size: int
    rows: SamplingRows
    settings: SampleSettings
    rules: LogitRulesState | None
    has_masses: bool
    """Whether rows may ask for the probability that truncation has left."""

    def with_rules(self, group: Group, use: Callable[[BlockRows], T]) -> T:
        """Return what `use` gives for the logits of a group after their rules.

        Logits without rules are read where they lie.
        """
        rules, params = self.rules, self.rows.at(group)
        if rules is None:
            return use(self.logits._replace(group=group))

        def ruled() -> T:
            logits_rV = self.logits.blocks[group].reshape(len(params.top_k), -1)[:, : self.vocab_size]
            return use(
                block_rows(
                    apply_rules(logits_rV, rules, params.ruled_slot, params.output_index, self.settings.processors)
                )
            )

        if self.settings.is_static:
            return ruled()
        return lax.cond(jnp.any(params.ruled_slot > 0), ruled, lambda: use(self.logits._replace(group=group)))

    def draw(self, logits: BlockRows, group: Group, is_drawn: Bool[Array, " r"]) -> tuple[Array, Array, Array]:
        """Return a token for each row of a group, the likeliest where none is drawn, whether the row is finite, and the
        logarithm of the probability that truncation has left, where a row asks for it."""
        params, greedy = self.rows.at(group), _first_maximum(logits, self.vocab_size)
        is_asked = (params.score & Score.MASS > 0) & is_drawn
        no_masses = jnp.zeros(len(is_drawn), jnp.float32)

        def drawn() -> tuple[Int[Array, " r"], Float[Array, " r"]]:
            uniform = uniforms(params, PURPOSE_SAMPLE, num_draw_levels(self.vocab_size))
            weigh, kept = self._truncate(logits, params, is_drawn)

            def log_masses() -> Float[Array, " r"]:
                shares = jnp.sum(kept.block_sums, axis=1) / jnp.sum(weigh(logits.values), axis=1)
                return jnp.where(is_asked, jnp.log(shares), 0.0)

            if not self.has_masses:
                masses = no_masses
            elif self.settings.is_static:
                masses = log_masses()
            else:
                masses = lax.cond(jnp.any(is_asked), log_masses, lambda: no_masses)
            return jnp.where(params.is_greedy, greedy, draw_tokens(logits, weigh, kept, uniform)), masses

        if self.settings.is_static or self.rules is None:
            tokens, masses = drawn()
        else:
            tokens, masses = lax.cond(jnp.any(is_drawn), drawn, lambda: (greedy, no_masses))
        return tokens, _is_finite(logits), masses

    def scores(self, group: Group, token_ids: Int[Array, " r"]) -> TokenScores:
        """Score a token of each row of a group."""
        params, sizes = self.rows.at(group), (self.settings.max_logprobs, self.vocab_size)
        wants_tops = None if self.settings.is_static else jnp.any(params.score & Score.TOPS > 0)
        if self.settings.logprobs_mode == "processed_logprobs":
            ones = jnp.ones_like(params.temperature)
            return self.with_rules(
                group, lambda logits: token_scores(self._processed(logits, group), token_ids, ones, wants_tops, *sizes)
            )
        # The row of a given token has a temperature only if that token's logprob is to be tempered.
        is_tempered = (params.forced_token > 0) | (self.settings.logprobs_mode == "tempered_logprobs")
        temperature = jnp.where(is_tempered & ~params.is_greedy, params.temperature, 1.0)
        return token_scores(self.logits._replace(group=group), token_ids, temperature, wants_tops, *sizes)

    def _truncate(
        self, logits: BlockRows, params: SamplingRows, is_drawn: Bool[Array, " r"]
    ) -> tuple[RowFunction, KeptTokens]:
        """Return what turns logits of a group into weights, and which of its tokens are kept."""
        scaled = _scale(logits, params)

        def weigh(logits: Float[Array, "r n"]) -> Float[Array, "r n"]:
            return jnp.exp(scaled(logits))

        return weigh, truncate(logits, weigh, params.limits, is_drawn, self.settings.is_static)

    def _processed(self, logits: BlockRows, group: Group) -> BlockRows:
        """Return the logits of the distribution that is drawn from."""
        params = self.rows.at(group)
        scaled = _scale(logits, params)
        weigh, kept = self._truncate(logits, params, jnp.zeros_like(params.is_greedy))

        def heights(logits: Float[Array, "r n"]) -> Float[Array, "r n"]:
            """Tell tokens apart also where their weight e^x is 0, below x = −104: this does not underflow."""
            return 1.0 / (1.0 - scaled(logits))

        is_kept = weigh(logits.values) >= kept.threshold[:, None]
        is_kept &= is_in_top_k(logits, heights, params.limits.top_k, self.settings.is_static)
        return block_rows(jnp.where(is_kept, scaled(logits.values), -jnp.inf))


def _scale(logits: BlockRows, params: SamplingRows) -> RowFunction:
    """Return what turns logits of a group into ones of temperature 1 whose row maximum is 0."""
    maximum, temperature = logits.row_max[:, None], jnp.where(params.is_greedy, 1.0, params.temperature)[:, None]
    return lambda logits: (logits - maximum) / temperature


def _rows_per_group(num_rows: int) -> int:
    """Return how many rows are computed together where only some need a computation."""
    return 8 if num_rows > 16 else 4


def _for_groups(
    is_needed: Bool[Array, " R"], kinds: Int[Array, " R"], body: Callable[[Group, T], T], state: T, is_static: bool
) -> T:
    """Run state = body(rows, state) for groups of rows, by kind, until each row that needs it was in one.

    A group may hold other rows too, and a row may be in two groups: `body` must write the same for it each time.
    `is_static`: all rows are one group, whether they need it or not.
    """
    if is_static:
        return body(slice(None), state)
    size = _rows_per_group(len(kinds))
    if len(kinds) <= size:
        # Not a loop: its body would be the same each time, and XLA computes such a body before it asks for how often.
        return lax.cond(jnp.any(is_needed), lambda x: body(slice(None), x), lambda x: x, state)
    order = jnp.argsort(jnp.where(is_needed, kinds, len(RowKind)), stable=True)
    num_groups = (jnp.sum(is_needed.astype(jnp.int32)) + size - 1) // size

    def next_group(index: Array, x: T) -> T:
        # dynamic_slice moves a last group that would reach beyond the end back, onto rows of the one before.
        return body(lax.dynamic_slice_in_dim(order, index * size, size), x)

    return lax.fori_loop(0, num_groups, next_group, state)


def _first_maximum(rows: BlockRows, vocab_size: int) -> Int[Array, " r"]:
    """Return the index of each row's first maximum, in the first block with that maximum; of NaNs, the last index."""
    row_max = rows.row_max[:, None]
    block = _first(rows.maxima[rows.group] == row_max)
    return jnp.minimum(block * BLOCK + _first(rows.taken(block[:, None])[:, 0] == row_max), vocab_size - 1)


def _first(is_it: Bool[Array, "R n"]) -> Int[Array, " R"]:
    """Return the first true index of each row; the last index if there is none."""
    last = is_it.shape[1] - 1
    return jnp.min(jnp.where(is_it, jnp.arange(last + 1, dtype=jnp.int32)[None], last), axis=1)


def _is_finite(rows: BlockRows) -> Bool[Array, " r"]:
    """Return whether each row is finite: no NaN, no +inf, not all −inf."""
    return ~jnp.any(rows.has_nan[rows.group], axis=-1) & jnp.isfinite(rows.row_max)


def uniforms(rows: SamplingRows, purpose: int, count: int) -> Float[Array, "R count"]:
    """Return random numbers in [0, 1) per row, with 24 random bits each; a larger `count` only adds to them."""

    def one(low: UInt32[Array, ""], high: UInt32[Array, ""], sample: Array, output: Array) -> Array:
        key = jax.random.wrap_key_data(jnp.stack([high, low]), impl="threefry2x32")
        for part in (sample, output, jnp.int32(purpose)):
            key = jax.random.fold_in(key, part)
        # JAX's default, set here because without it the bits would depend on `count`.
        with jax.threefry_partitionable(True):
            return jax.random.bits(key, (count,), jnp.uint32)

    low, high = (lax.bitcast_convert_type(word, jnp.uint32) for word in (rows.seed_low, rows.seed_high))
    bits: UInt32[Array, "R count"] = jax.vmap(one)(low, high, rows.sample_index, rows.output_index)
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
