"""Samples the next token of every row, on the device, without sorting the vocabulary.

Truncation rules (truncation.py) say which tokens are kept. One of them is then drawn down a tree over the vocabulary
(drawing.py), with a random number for each level. The random numbers depend on (seed, sample index, output index,
purpose) and on nothing else: not on the row, the batch, a preemption or a restart.

Letters: R rows, V vocabulary; r is a group of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from .drawing import draw_tokens, num_draw_levels
from .logits_processor import LogitsProcessor
from .sample_columns import FLOAT_PARAMETERS, SAMPLE_FIELDS, UNSCORED
from .sampling_params import GREEDY_TEMPERATURE, SampleMode
from .top_blocks import BLOCK, BlockRows, Group, block_rows
from .truncation import KeptTokens, TruncationLimits, Weigh, is_in_top_k, truncate

PURPOSE_SAMPLE = 0
"""The last part of the random key. Numbers for another purpose, such as accepting a speculated token, take another."""
ROWS_PER_GROUP = 16
"""Rows that are computed together where only some rows need a computation. Where all need it, other numbers are no
faster on a CPU."""

T = TypeVar("T")


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
    """In mode FULL: 1 + the id of a given token, which is scored instead of drawing one; or SCORED or UNSCORED, which
    say whether the drawn token is scored."""
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenScores:
    """The logprob and rank of one token per row, and the logprobs of the most likely tokens, or of all of them."""

    logprobs: Float[Array, " R"]
    ranks: Int[Array, " R"]
    """1 for the most likely token."""
    top_token_ids: Int[Array, "R k"] | None = None
    """The k most likely tokens, most likely first."""
    top_logprobs: Float[Array, "R k"] | None = None
    all_logprobs: Float[Array, "R V"] | None = None
    """Instead of the two above, where requests may ask for the whole vocabulary."""

    def top(self, row: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and logprobs of the `count` most likely tokens of a row, most likely first; −1 asks for all.

        Runs on the host, once the scores have been copied there.
        """
        if self.all_logprobs is None:
            assert self.top_token_ids is not None
            assert self.top_logprobs is not None
            return np.asarray(self.top_token_ids[row, :count]), np.asarray(self.top_logprobs[row, :count])
        logprobs = np.asarray(self.all_logprobs[row])
        if 0 <= count < len(logprobs):
            # Tokens that tie with the last one are candidates too: the lower id goes first.
            lowest = np.partition(logprobs, -count)[-count] if count else np.inf
            ids = np.flatnonzero(logprobs >= lowest)
        else:
            ids = np.arange(len(logprobs))
        ids = ids[np.argsort(-logprobs[ids], kind="stable")][: count if count >= 0 else None]
        return ids, logprobs[ids]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampledRows:
    """One token per row."""

    token_ids: Int[Array, " R"]
    is_finite: Bool[Array, " R"]
    """False where the logits held a NaN or +inf, or nothing but −inf; the row's token is then meaningless."""
    scores: TokenScores | None = None
    """Logprobs and ranks in mode FULL, zeros for rows that ask for none; None in the other modes."""

    def at(self, index: int, rows: list[int]) -> SampledRows:
        """Return these rows of one iteration of a decode program, whose arrays are numpy arrays [K, R, …]."""
        return jax.tree.map(lambda each: each[index, rows], self)


@dataclass(frozen=True)
class SampleSettings:
    """The settings of the sampler that are fixed for an engine: its logits processors and how it gives logprobs."""

    processors: tuple[LogitsProcessor, ...] = ()
    max_logprobs: int = 0
    """Most likely tokens per row that get logprobs; −1: all of the vocabulary."""
    has_processed_logprobs: bool = False
    """Logprobs are those of the distribution that is drawn from, after rules, temperature and truncation; else those of
    the model's logits."""
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
    ruled_RV: Float[Array, "R V"] | None = None,
) -> SampledRows:
    """Sample a token for every row from `ruled_RV`, its logits after its rules; in mode FULL, score tokens too.

    `ruled_RV` is None where no row has rules. Drawing and scoring are computed only for groups of rows that hold one
    that needs it, unless the settings are static.
    """
    ruled = block_rows(logits_RV if ruled_RV is None else ruled_RV)
    row_max = jnp.max(ruled.maxima, axis=-1)
    greedy = jnp.minimum(_first_maximum(ruled, row_max), logits_RV.shape[1] - 1)
    is_finite = _is_finite(ruled)
    if mode is SampleMode.GREEDY:
        return SampledRows(greedy, is_finite)
    # ≤, not <: a temperature just below the limit may round up to it on its way to float32.
    is_greedy = rows.temperature <= GREEDY_TEMPERATURE
    is_forced = (rows.forced_token > 0) & (mode is SampleMode.FULL)
    uniform = uniforms(rows, PURPOSE_SAMPLE, num_draw_levels(logits_RV.shape[1]))

    # Greedy rows have no limits.
    min_p, top_k = jnp.where(is_greedy, 0.0, rows.min_p), jnp.where(is_greedy, 0, rows.top_k)
    limits = TruncationLimits(min_p, top_k, jnp.where(is_greedy, 1.0, rows.top_p))

    def tempered(group: Group) -> Weigh:
        """Return what turns logits of a group into ones of temperature 1 whose row maximum is 0."""
        maximum, temperature = row_max[group, None], jnp.where(is_greedy, 1.0, rows.temperature)[group, None]
        return lambda logits: (logits - maximum) / temperature

    def truncated(group: Group) -> tuple[BlockRows, Weigh, KeptTokens]:
        """Return the logits of a group, what turns them into weights, and which tokens are kept."""
        own, scaled = ruled._replace(group=group), tempered(group)
        own_limits, is_drawn = TruncationLimits(*(each[group] for each in limits)), ~(is_greedy | is_forced)[group]

        def weigh(logits: Float[Array, "r n"]) -> Float[Array, "r n"]:
            return jnp.exp(scaled(logits))

        return own, weigh, truncate(own, weigh, own_limits, is_drawn, settings.is_static)

    def draw(group: Group, token_ids: Int[Array, " R"]) -> Int[Array, " R"]:
        drawn = draw_tokens(*truncated(group), uniform[group])
        return token_ids.at[group].set(jnp.where(is_greedy[group], greedy[group], drawn))

    drawn = _for_groups(~(is_greedy | is_forced), draw, greedy, settings.is_static)
    if mode is SampleMode.RANDOM:
        return SampledRows(drawn, is_finite)
    token_ids = jnp.where(is_forced, rows.forced_token - 1, drawn)
    if settings.processors:  # They may have replaced a NaN of the model's; other rules keep it.
        is_finite &= _is_finite(block_rows(logits_RV))

    def processed(group: Group) -> Float[Array, "r V"]:
        """Return the logits of the distribution that is drawn from."""
        own, weigh, kept = truncated(group)
        scaled = tempered(group)

        def heights(logits: Float[Array, "r n"]) -> Float[Array, "r n"]:
            """Tell tokens apart also where their weight e^x is 0, below x = −104: this does not underflow."""
            return 1.0 / (1.0 - scaled(logits))

        is_kept = weigh(own.values) >= kept.threshold[:, None]
        is_kept &= is_in_top_k(own, heights, top_k[group], settings.is_static)
        return jnp.where(is_kept, scaled(own.values), -jnp.inf)[:, : logits_RV.shape[1]]

    def score(group: Group, scores: TokenScores) -> TokenScores:
        scored_rV = processed(group) if settings.has_processed_logprobs else logits_RV[group]
        new = token_scores(scored_rV, token_ids[group], settings.max_logprobs)
        return jax.tree.map(lambda all_rows, own: all_rows.at[group].set(own), scores, new)

    shapes = jax.eval_shape(lambda: token_scores(logits_RV, token_ids, settings.max_logprobs))
    no_scores = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    scores = _for_groups(rows.forced_token != UNSCORED, score, no_scores, settings.is_static)
    return SampledRows(token_ids, is_finite, scores)


def _for_groups(is_needed: Bool[Array, " R"], body: Callable[[Group, T], T], state: T, is_static: bool) -> T:
    """Run state = body(rows, state) for groups of rows until each row with `is_needed` was in one.

    A group may hold other rows too, and a row may be in two groups: `body` must write the same for it each time.
    `is_static`: all rows are one group, whether they need it or not.
    """
    num_rows = len(is_needed)
    if is_static:
        return body(slice(None), state)
    if num_rows <= ROWS_PER_GROUP:
        # Not a loop: its body would be the same each time, and XLA computes such a body before it asks for how often.
        return lax.cond(jnp.any(is_needed), lambda x: body(slice(None), x), lambda x: x, state)
    order = jnp.argsort(~is_needed, stable=True)
    num_groups = (jnp.sum(is_needed.astype(jnp.int32)) + ROWS_PER_GROUP - 1) // ROWS_PER_GROUP

    def next_group(index: Array, x: T) -> T:
        # dynamic_slice moves a last group that would reach beyond the end back, onto rows of the one before.
        return body(lax.dynamic_slice_in_dim(order, index * ROWS_PER_GROUP, ROWS_PER_GROUP), x)

    return lax.fori_loop(0, num_groups, next_group, state)


def token_scores(logits_RV: Float[Array, "R V"], token_ids: Int[Array, " R"], max_logprobs: int) -> TokenScores:
    """Score one token per row by log-softmax, with the `max_logprobs` most likely ones; −1: with all.

    The row maximum is subtracted before the logarithm of the total: the rounding of large logits would show otherwise.
    """
    own = jnp.take_along_axis(logits_RV, token_ids[:, None], axis=1)
    rows = block_rows(logits_RV)
    # Without the barrier XLA reads all logits once more for the row's maximum.
    row_max = jnp.max(lax.optimization_barrier(rows.maxima), axis=1, keepdims=True)
    ranks, log_total = _ranks_and_log_totals(rows.blocks, own, row_max)

    def logprobs(logits: Float[Array, "R n"]) -> Float[Array, "R n"]:
        return logits - row_max - log_total

    own_logprobs = logprobs(own)[:, 0]
    if max_logprobs < 0:
        return TokenScores(own_logprobs, ranks, all_logprobs=logprobs(logits_RV))
    top, top_ids = rows.top_k(min(max_logprobs, logits_RV.shape[1]))
    return TokenScores(own_logprobs, ranks, top_ids, logprobs(top))


def _ranks_and_log_totals(
    blocks: Float[Array, "R b B"], own: Float[Array, "R 1"], row_max: Float[Array, "R 1"]
) -> tuple[Int[Array, " R"], Float[Array, "R 1"]]:
    """Return the rank of each row's own logit, 1 for the largest, and the logarithm of the sum of exponentials.

    The exponentials are those of the logits minus `row_max`. Both results come from one reduction of blocks and one
    over blocks: a CPU would take longer for the ranks than for the exponentials, and a single running sum over a
    vocabulary would be off by 1e-6.
    """
    operands = (blocks > own[:, :, None]).astype(jnp.int32), jnp.exp(blocks - row_max[:, :, None])
    counts, totals = lax.reduce(
        operands, (jnp.int32(0), jnp.float32(0)), lambda total, item: (total[0] + item[0], total[1] + item[1]), (2,)
    )
    return 1 + jnp.sum(counts, axis=1), jnp.log(jnp.sum(totals, axis=1, keepdims=True))


def _first_maximum(rows: BlockRows, row_max: Float[Array, " R"]) -> Int[Array, " R"]:
    """Return the index of each row's first maximum, in the first block with that maximum; of NaNs, the last index."""
    block = _first(rows.maxima == row_max[:, None])
    return block * BLOCK + _first(rows.taken(block[:, None])[:, 0] == row_max[:, None])


def _first(is_it: Bool[Array, "R n"]) -> Int[Array, " R"]:
    """Return the first true index of each row; the last index if there is none."""
    last = is_it.shape[1] - 1
    return jnp.min(jnp.where(is_it, jnp.arange(last + 1, dtype=jnp.int32)[None], last), axis=1)


def _is_finite(rows: BlockRows) -> Bool[Array, " R"]:
    """Return whether each row is finite: no NaN, no +inf, not all −inf."""
    return ~jnp.any(rows.has_nan, axis=-1) & jnp.isfinite(jnp.max(rows.maxima, axis=-1))


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
