"""Samples the next token of every row, on the device, without sorting the vocabulary.

Each truncation rule keeps the tokens whose probability reaches a threshold, which is found exactly by bisecting the
bits of a float32. A token is then drawn down a tree over the vocabulary: at each node by the inverse CDF of its
branches' weights, with a random number for each level. Rules apply in vLLM's order: temperature, min-p, top-k, top-p,
each over the tokens that the one before left. Tokens that tie with the last one kept are kept as well.

The random numbers depend on (seed, sample index, output index, purpose) and on nothing else: not on the row, the batch,
a preemption or a restart.

Letters: R rows, V vocabulary, L levels of the tree; r is a group of rows.
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

from .logits_processor import LogitsProcessor
from .sample_columns import FLOAT_PARAMETERS, SAMPLE_FIELDS, UNSCORED
from .sampling_params import GREEDY_TEMPERATURE, SampleMode

PURPOSE_SAMPLE = 0
"""The last part of the random key. Numbers for another purpose, such as accepting a speculated token, take another."""
BITS_OF_ONE = int(np.float32(1.0).view(np.int32))
NUM_BRANCHES = 16
"""Children of a node of the tree that tokens are drawn by."""
ROWS_PER_GROUP = 8
"""Rows that are computed together where only some rows need a computation: few, so that they stay in a CPU's cache."""

T = TypeVar("T")
Bounds = tuple[Array, Array, Array, Array]
"""State of a bisection, [R] each: lower and upper bound as the bits of a float32, and how many tokens reach each."""


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


@dataclass(frozen=True)
class SampleSettings:
    """The settings of the sampler that are fixed for an engine: its logits processors and how it gives logprobs."""

    processors: tuple[LogitsProcessor, ...] = ()
    max_logprobs: int = 0
    """Most likely tokens per row that get logprobs; −1: all of the vocabulary."""
    has_processed_logprobs: bool = False
    """Logprobs are those of the distribution that is drawn from, after rules, temperature and truncation; else those of
    the model's logits."""


PLAIN = SampleSettings()
"""No logits processors, no logprobs."""


def sample(
    logits_RV: Float[Array, "R V"],
    rows: SamplingRows,
    mode: SampleMode,
    settings: SampleSettings = PLAIN,
    ruled_RV: Float[Array, "R V"] | None = None,
) -> SampledRows:
    """Sample a token for every row. `ruled_RV` are the logits after the rows' rules, in mode FULL only."""
    if mode is SampleMode.FULL:
        return sample_full(logits_RV, logits_RV if ruled_RV is None else ruled_RV, rows, settings)
    row_max = jnp.max(logits_RV, axis=-1, keepdims=True)
    greedy, is_finite = _first_maximum(logits_RV, row_max)
    if mode is SampleMode.GREEDY:
        return SampledRows(greedy, is_finite)
    # ≤, not <: a temperature just below the limit may round up to it on its way to float32.
    is_greedy = rows.temperature <= GREEDY_TEMPERATURE
    tempered_RV = tempered(logits_RV - row_max, rows, is_greedy)
    weights, _ = truncated_weights(tempered_RV, rows, is_greedy)
    uniform = uniforms(rows, PURPOSE_SAMPLE, num_levels(weights.shape[1]))
    return SampledRows(jnp.where(is_greedy, greedy, draw_tokens(weights, uniform)), is_finite)


def sample_full(
    logits_RV: Float[Array, "R V"], ruled_RV: Float[Array, "R V"], rows: SamplingRows, settings: SampleSettings
) -> SampledRows:
    """Sample every row from `ruled_RV`, its logits after its rules, and score the tokens of rows that ask for logprobs.

    Drawing and scoring are computed only for groups of rows that hold one that needs it.
    """
    row_max = jnp.max(ruled_RV, axis=-1, keepdims=True)
    greedy, is_finite = _first_maximum(ruled_RV, row_max)
    # A NaN of the model's counts even where a rule has replaced it by −inf.
    is_finite &= _first_maximum(logits_RV, jnp.max(logits_RV, axis=-1, keepdims=True))[1]
    is_greedy = rows.temperature <= GREEDY_TEMPERATURE
    uniform = uniforms(rows, PURPOSE_SAMPLE, num_levels(logits_RV.shape[1]))

    def weights_of(group: Int[Array, " r"]) -> tuple[Array, Array, Array]:
        own: SamplingRows = jax.tree.map(lambda column: column[group], rows)
        tempered_rV = tempered(ruled_RV[group] - row_max[group], own, is_greedy[group])
        return tempered_rV, *truncated_weights(tempered_rV, own, is_greedy[group])

    def draw(group: Int[Array, " r"], token_ids: Int[Array, " R"]) -> Int[Array, " R"]:
        _, weights, _ = weights_of(group)
        drawn = jnp.where(is_greedy[group], greedy[group], draw_tokens(weights, uniform[group]))
        return token_ids.at[group].set(drawn)

    is_forced = rows.forced_token > 0
    token_ids = jnp.where(is_forced, rows.forced_token - 1, _for_groups(~(is_greedy | is_forced), draw, greedy))

    def score(group: Int[Array, " r"], scores: TokenScores) -> TokenScores:
        if settings.has_processed_logprobs:
            tempered_rV, _, is_kept = weights_of(group)
            is_kept &= is_in_top_k(tempered_rV, rows.top_k[group], is_greedy[group])
            logprobs = shifted_log_softmax(jnp.where(is_kept, tempered_rV, -jnp.inf))
        else:
            logits_rV = logits_RV[group]
            logprobs = shifted_log_softmax(logits_rV - jnp.max(logits_rV, axis=-1, keepdims=True))
        new = token_scores(logprobs, token_ids[group], settings.max_logprobs)
        return jax.tree.map(lambda all_rows, own: all_rows.at[group].set(own), scores, new)

    shapes = jax.eval_shape(lambda: token_scores(logits_RV, token_ids, settings.max_logprobs))
    no_scores = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return SampledRows(token_ids, is_finite, _for_groups(rows.forced_token != UNSCORED, score, no_scores))


def _for_groups(is_needed: Bool[Array, " R"], body: Callable[[Int[Array, " r"], T], T], state: T) -> T:
    """Run state = body(rows, state) for groups of rows until each row with `is_needed` was in one.

    A group may hold other rows too, and a row may be in two groups: `body` must write the same for it each time.
    """
    num_rows = len(is_needed)
    if num_rows <= ROWS_PER_GROUP:
        # Not a loop: its body would be the same each time, and XLA computes such a body before it asks for how often.
        return lax.cond(jnp.any(is_needed), lambda x: body(jnp.arange(num_rows), x), lambda x: x, state)
    order = jnp.argsort(~is_needed, stable=True)
    num_groups = (jnp.sum(is_needed.astype(jnp.int32)) + ROWS_PER_GROUP - 1) // ROWS_PER_GROUP

    def next_group(index: Array, x: T) -> T:
        # dynamic_slice moves a last group that would reach beyond the end back, onto rows of the one before.
        return body(lax.dynamic_slice_in_dim(order, index * ROWS_PER_GROUP, ROWS_PER_GROUP), x)

    return lax.fori_loop(0, num_groups, next_group, state)


def shifted_log_softmax(shifted_RV: Float[Array, "R V"]) -> Float[Array, "R V"]:
    """Return the log-softmax of logits whose row maximum is 0; the rounding of large logits would show otherwise."""
    return shifted_RV - jnp.log(jnp.sum(jnp.exp(shifted_RV), axis=-1, keepdims=True))


def token_scores(logprobs_RV: Float[Array, "R V"], token_ids: Int[Array, " R"], max_logprobs: int) -> TokenScores:
    """Score one token per row among the row's logprobs, with the `max_logprobs` highest ones; −1: with all."""
    own = jnp.take_along_axis(logprobs_RV, token_ids[:, None], axis=1)
    ranks = 1 + jnp.sum((logprobs_RV > own).astype(jnp.int32), axis=-1)
    if max_logprobs < 0:
        return TokenScores(own[:, 0], ranks, all_logprobs=logprobs_RV)
    top_logprobs, top_ids = lax.top_k(logprobs_RV, min(max_logprobs, logprobs_RV.shape[1]))
    return TokenScores(own[:, 0], ranks, top_ids, top_logprobs)


def _first_maximum(
    logits_RV: Float[Array, "R V"], row_max: Float[Array, "R 1"]
) -> tuple[Int[Array, " R"], Bool[Array, " R"]]:
    """Return the index of each row's first maximum, and whether the row is finite: no NaN, no +inf, not all −inf.

    Every logit is compared with the maximum, because XLA's maximum on a CPU passes over a NaN. Both results come from
    one reduction, which takes a twentieth of argmax's time there.
    """
    last = logits_RV.shape[1] - 1
    indices = jnp.where(logits_RV == row_max, jnp.arange(last + 1, dtype=jnp.int32)[None, :], last)
    operands, starts = (indices, logits_RV <= row_max), (jnp.int32(last), jnp.bool_(True))
    first, is_ordered = lax.reduce(
        operands, starts, lambda best, item: (jnp.minimum(best[0], item[0]), best[1] & item[1]), (1,)
    )
    return first, is_ordered & jnp.isfinite(row_max[:, 0])


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


def tempered(shifted_RV: Float[Array, "R V"], rows: SamplingRows, is_greedy: Bool[Array, " R"]) -> Float[Array, "R V"]:
    """Return logits whose row maximum is 0 divided by each row's temperature; greedy rows (padding too) unchanged."""
    return shifted_RV / jnp.where(is_greedy, 1.0, rows.temperature)[:, None]


def truncated_weights(
    tempered_RV: Float[Array, "R V"], rows: SamplingRows, is_greedy: Bool[Array, " R"]
) -> tuple[Float[Array, "R V"], Bool[Array, "R V"]]:
    """Return softmax numerators, 0 for tokens that min-p, top-k or top-p drop, and which tokens are kept.

    The row maximum of `tempered_RV` is 0, so that the weight of the most likely token is 1.
    """
    weights = jnp.exp(tempered_RV)
    threshold = jnp.where(is_greedy, 0.0, rows.min_p)
    has_top_k = ~is_greedy & (rows.top_k > 0) & (rows.top_k < weights.shape[1])
    threshold = _raised_threshold(weights, threshold, has_top_k, rows.top_k, jnp.zeros_like(threshold))
    has_top_p = ~is_greedy & (rows.top_p < 1.0)
    _, mass = _kept_total(weights, threshold)
    threshold = _raised_threshold(weights, threshold, has_top_p, jnp.zeros_like(rows.top_k), rows.top_p * mass)
    is_kept = weights >= threshold[:, None]
    return jnp.where(is_kept, weights, 0.0), is_kept


def is_in_top_k(
    tempered_RV: Float[Array, "R V"], top_k: Int[Array, " R"], is_greedy: Bool[Array, " R"]
) -> Bool[Array, "R V"]:
    """Return which tokens are among the top k, told apart also where their weight e^x is 0, below x = −104.

    1 / (1 − x) is ordered as x is and does not underflow.
    """
    heights = 1.0 / (1.0 - tempered_RV)
    no_mass = jnp.zeros(heights.shape[0], jnp.float32)
    has_top_k = ~is_greedy & (top_k > 0) & (top_k < heights.shape[1])
    return heights >= _raised_threshold(heights, no_mass, has_top_k, top_k, no_mass)[:, None]


def _raised_threshold(
    weights: Float[Array, "R V"],
    threshold: Float[Array, " R"],
    is_limited: Bool[Array, " R"],
    min_count: Int[Array, " R"],
    min_mass: Float[Array, " R"],
) -> Float[Array, " R"]:
    """Return each row's highest threshold that still keeps `min_count` tokens whose weights sum up to `min_mass`.

    Rows without `is_limited` keep the threshold that they have. Bisects the bits of a float32, which are in the
    order of the numbers, until at most one token lies between the bounds of every limited row: further passes for
    other rows would not change which tokens are kept. Without a limited row there is no pass at all.
    """

    def is_open(bounds: Bounds) -> Array:
        low, high, num_low, num_high = bounds
        return jnp.any(is_limited & (high - low > 1) & (num_low - num_high > 1))

    def halve(bounds: Bounds) -> Bounds:
        low, high, num_low, num_high = bounds
        middle = low + (high - low) // 2
        count, mass = _kept_total(weights, lax.bitcast_convert_type(middle, jnp.float32))
        is_enough = (count >= min_count) & (mass >= min_mass)
        return (
            jnp.where(is_enough, middle, low),
            jnp.where(is_enough, high, middle),
            jnp.where(is_enough, count, num_low),
            jnp.where(is_enough, num_high, count),
        )

    low = lax.bitcast_convert_type(threshold, jnp.int32)
    high, num_low = jnp.full_like(low, BITS_OF_ONE + 1), jnp.full_like(low, weights.shape[1])
    low, *_ = lax.while_loop(is_open, halve, (low, high, num_low, jnp.zeros_like(low)))
    return jnp.where(is_limited, lax.bitcast_convert_type(low, jnp.float32), threshold)


def _kept_total(
    weights: Float[Array, "R V"], threshold: Float[Array, " R"]
) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """Return how many weights reach the threshold, and their sum.

    Both come from one reduction: two of them take a CPU ten times as long.
    """
    is_kept = weights >= threshold[:, None]
    operands = is_kept.astype(jnp.int32), jnp.where(is_kept, weights, 0.0)
    count, mass = lax.reduce(
        operands, (jnp.int32(0), jnp.float32(0)), lambda total, item: (total[0] + item[0], total[1] + item[1]), (1,)
    )
    return count, mass


def num_levels(vocab_size: int) -> int:
    """Return the number of levels of the tree over so many tokens, which is how many random numbers a draw takes."""
    levels = 1
    while (vocab_size := -(-vocab_size // NUM_BRANCHES)) > 1:
        levels += 1
    return levels


def draw_tokens(weights_RV: Float[Array, "R V"], uniforms_RL: Float[Array, "R L"]) -> Int[Array, " R"]:
    """Draw a token of each row by its weight: down a tree, at each node by the inverse CDF of its branches' weights.

    Where a level has n nodes, the children of node g are nodes g, g + n, g + 2 n … of the level below, so that the sums
    over children are sums of slices. With one running sum over the whole vocabulary, rounding moves each of its edges,
    and one draw in 300 falls where that matters, in the tail. Here each draw meets few edges, with a random number of
    its own at each level.
    """
    levels: list[Float[Array, "R branches n"]] = []
    sums = weights_RV
    while not levels or sums.shape[1] > 1:
        rows, size = sums.shape
        levels.append(jnp.pad(sums, ((0, 0), (0, -size % NUM_BRANCHES))).reshape(rows, NUM_BRANCHES, -1))
        sums = jnp.sum(levels[-1], axis=1)
    nodes = jnp.zeros(weights_RV.shape[0], jnp.int32)
    for level, uniform in zip(reversed(levels), uniforms_RL.T, strict=True):
        branches = jnp.take_along_axis(level, nodes[:, None, None], axis=2)[:, :, 0]
        ends = jnp.cumsum(branches, axis=-1)
        nodes += level.shape[2] * _inverse_cdf(branches, ends, uniform * ends[:, -1])
    return nodes


def _inverse_cdf(
    weights: Float[Array, "R n"], ends: Float[Array, "R n"], target: Float[Array, " R"]
) -> Int[Array, " R"]:
    """Return the first index with a weight whose running sum in `ends` exceeds the target; if none, the last one.

    Running sums are rounded and do not always ascend, so an index without weight is skipped whatever its sum says. A
    row without any weight gives 0.
    """
    indices = jnp.arange(weights.shape[1], dtype=jnp.int32)[None, :]
    has_weight = weights > 0
    last = jnp.max(jnp.where(has_weight, indices, 0), axis=-1)
    first = jnp.min(jnp.where(has_weight & (ends > target[:, None]), indices, weights.shape[1]), axis=-1)
    return jnp.minimum(first, last)
