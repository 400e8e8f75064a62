"""Draws the next token of every row, on the device, without sorting the vocabulary.

Every truncation rule is a threshold on the probability, found exactly by bisecting the bits of a float32;
the token is then drawn down a tree over the vocabulary, by inverse CDF of the branches of each node and a uniform
for each level. Rules apply in vLLM's order: temperature, min-p, top-k, top-p, each over what the one before left;
tokens that tie with the last one kept are kept as well.

The uniforms depend on (seed, sample index, output index, purpose) and on nothing else: not on the row, the
batch, a preemption or a restart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from .logits_processor import LogitsProcessor
from .sampling_params import GREEDY_TEMPERATURE, UNSCORED, SampleMode

PURPOSE_SAMPLE = 0
BITS_OF_ONE = int(np.float32(1.0).view(np.int32))
BRANCHES = 16
"""Of a node of the tree that tokens are drawn by."""
ROWS_AT_ONCE = 8
"""Of those that need what others do not: a few, so that they stay in a processor's cache."""

T = TypeVar("T")
Bounds = tuple[Array, Array, Array, Array]
"""Of a bisection: the lower and the upper bound as bits, and how many tokens each keeps."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """Parameters of R rows, as `step_inputs.SAMPLE_FIELDS` names them."""

    seed_low: Int[Array, " R"]
    seed_high: Int[Array, " R"]
    sample_index: Int[Array, " R"]
    output_index: Int[Array, " R"]
    ruled_slot: Int[Array, " R"]
    """The row's slot if its owner has rules, else 0."""
    forced_token: Int[Array, " R"]
    """In mode EVERYTHING 1 + the id of a token that is taken, and scored, instead of drawing one; else SCORED or
    UNSCORED: what is drawn is scored, or not."""
    top_k: Int[Array, " R"]
    temperature: Float[Array, " R"]
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenScores:
    """How likely a token of each row was, and which were the most likely ones: those, or all by id."""

    logprobs: Float[Array, " R"]
    ranks: Int[Array, " R"]
    """1 for the most likely token."""
    top_token_ids: Int[Array, "R k"] | None = None
    top_logprobs: Float[Array, "R k"] | None = None
    all_logprobs: Float[Array, "R V"] | None = None
    """In place of the most likely ones, where requests may ask for all."""

    def top(self, row: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and logprobs of the `count` most likely tokens of a row, −1 for all, the likeliest first; on the host."""
        if self.all_logprobs is None:
            assert self.top_token_ids is not None
            assert self.top_logprobs is not None
            return np.asarray(self.top_token_ids[row, :count]), np.asarray(self.top_logprobs[row, :count])
        logprobs = np.asarray(self.all_logprobs[row])
        if 0 <= count < len(logprobs):
            # Those that tie with the last one too: the lower id goes first.
            least = np.partition(logprobs, -count)[-count] if count else np.inf
            ids = np.flatnonzero(logprobs >= least)
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
    """False where the logits held a NaN or +inf, or nothing but −inf: the token means nothing."""
    scores: TokenScores | None = None
    """In mode EVERYTHING; zeros for rows that want none."""


@dataclass(frozen=True)
class SampleSettings:
    """What is fixed for an engine: its own rules, and which logprobs it gives."""

    processors: tuple[LogitsProcessor, ...] = ()
    max_logprobs: int = 0
    """Most likely tokens that come with logprobs; −1: all of the vocabulary."""
    has_processed_logprobs: bool = False
    """Of the distribution that is drawn from, after rules, temperature and truncation; else of the model's own."""


PLAIN = SampleSettings()
"""No rules of the engine's own, no logprobs."""


def sample(
    logits_RV: Float[Array, "R V"],
    rows: SamplingRows,
    mode: SampleMode,
    settings: SampleSettings = PLAIN,
    ruled_RV: Float[Array, "R V"] | None = None,
) -> SampledRows:
    """Sample every row; in mode EVERYTHING from `ruled_RV`, the logits as the rows' rules leave them, with logprobs."""
    if mode is SampleMode.EVERYTHING:
        return sample_everything(logits_RV, logits_RV if ruled_RV is None else ruled_RV, rows, settings)
    row_max = jnp.max(logits_RV, axis=-1, keepdims=True)
    greedy, is_finite = _first_maximum(logits_RV, row_max)
    if mode is SampleMode.GREEDY:
        return SampledRows(greedy, is_finite)
    # Not above: what the host calls greedy may round up to the limit on its way to float32.
    is_greedy = rows.temperature <= GREEDY_TEMPERATURE
    tempered_RV = tempered(logits_RV - row_max, rows, is_greedy)
    weights, _ = truncated_weights(tempered_RV, rows, is_greedy)
    uniform = uniforms(rows, PURPOSE_SAMPLE, num_levels(weights.shape[1]))
    return SampledRows(jnp.where(is_greedy, greedy, draw_tokens(weights, uniform)), is_finite)


def sample_everything(
    logits_RV: Float[Array, "R V"], ruled_RV: Float[Array, "R V"], rows: SamplingRows, settings: SampleSettings
) -> SampledRows:
    """Sample every row from `ruled_RV`, its logits as its rules leave them, and score the tokens of those that want it.

    What only some rows need is computed for those alone, a few at a time, so that they stay in a processor's cache.
    """
    row_max = jnp.max(ruled_RV, axis=-1, keepdims=True)
    greedy, is_finite = _first_maximum(ruled_RV, row_max)
    # A NaN that a rule has taken away still means that the model has failed.
    is_finite &= _first_maximum(logits_RV, jnp.max(logits_RV, axis=-1, keepdims=True))[1]
    is_greedy = rows.temperature <= GREEDY_TEMPERATURE
    uniform = uniforms(rows, PURPOSE_SAMPLE, num_levels(logits_RV.shape[1]))

    def weights_of(some: Int[Array, " r"]) -> tuple[Array, Array, Array]:
        own: SamplingRows = jax.tree.map(lambda column: column[some], rows)
        tempered_rV = tempered(ruled_RV[some] - row_max[some], own, is_greedy[some])
        return tempered_rV, *truncated_weights(tempered_rV, own, is_greedy[some])

    def draw(some: Int[Array, " r"], token_ids: Int[Array, " R"]) -> Int[Array, " R"]:
        _, weights, _ = weights_of(some)
        return token_ids.at[some].set(jnp.where(is_greedy[some], greedy[some], draw_tokens(weights, uniform[some])))

    is_forced = rows.forced_token > 0
    token_ids = jnp.where(is_forced, rows.forced_token - 1, _for_some(~(is_greedy | is_forced), draw, greedy))

    def score(some: Int[Array, " r"], scores: TokenScores) -> TokenScores:
        if settings.has_processed_logprobs:
            tempered_rV, _, is_kept = weights_of(some)
            is_kept &= is_in_top_k(tempered_rV, rows.top_k[some], is_greedy[some])
            logprobs = log_shares(jnp.where(is_kept, tempered_rV, -jnp.inf))
        else:
            logits_rV = logits_RV[some]
            logprobs = log_shares(logits_rV - jnp.max(logits_rV, axis=-1, keepdims=True))
        new = token_scores(logprobs, token_ids[some], settings.max_logprobs)
        return jax.tree.map(lambda all_rows, own: all_rows.at[some].set(own), scores, new)

    nothing = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        jax.eval_shape(lambda: token_scores(logits_RV, token_ids, settings.max_logprobs)),
    )
    return SampledRows(token_ids, is_finite, _for_some(rows.forced_token != UNSCORED, score, nothing))


def _for_some(wanted: Bool[Array, " R"], body: Callable[[Int[Array, " r"], T], T], state: T) -> T:
    """state = body(rows, state) for groups of rows until all that are wanted were among them; others may be too."""
    at_once = min(ROWS_AT_ONCE, len(wanted))
    order = jnp.argsort(~wanted, stable=True)
    num_groups = (jnp.sum(wanted.astype(jnp.int32)) + at_once - 1) // at_once
    # Behind the last whole group, a group begins sooner and takes some once more: what it writes is the same.
    return lax.fori_loop(
        0, num_groups, lambda group, x: body(lax.dynamic_slice_in_dim(order, group * at_once, at_once), x), state
    )


def log_shares(shifted_RV: Float[Array, "R V"]) -> Float[Array, "R V"]:
    """Logprobs of logits whose row maximum is 0: where logits are large, their own rounding would show."""
    return shifted_RV - jnp.log(jnp.sum(jnp.exp(shifted_RV), axis=-1, keepdims=True))


def token_scores(logprobs_RV: Float[Array, "R V"], token_ids: Int[Array, " R"], max_logprobs: int) -> TokenScores:
    """How each row's token stands among its logprobs, with the `max_logprobs` highest, −1 for all."""
    own = jnp.take_along_axis(logprobs_RV, token_ids[:, None], axis=1)
    ranks = 1 + jnp.sum((logprobs_RV > own).astype(jnp.int32), axis=-1)
    if max_logprobs < 0:
        return TokenScores(own[:, 0], ranks, all_logprobs=logprobs_RV)
    top_logprobs, top_ids = lax.top_k(logprobs_RV, min(max_logprobs, logprobs_RV.shape[1]))
    return TokenScores(own[:, 0], ranks, top_ids, top_logprobs)


def _first_maximum(
    logits_RV: Float[Array, "R V"], row_max: Float[Array, "R 1"]
) -> tuple[Int[Array, " R"], Bool[Array, " R"]]:
    """Index of each row's first maximum, and whether the row can be trusted: no NaN, no +inf, not all −inf.

    Every logit is compared, because XLA's maximum on a CPU passes over a NaN. In one reduction: twenty times faster
    there than argmax.
    """
    last = logits_RV.shape[1] - 1
    places = jnp.where(logits_RV == row_max, jnp.arange(last + 1, dtype=jnp.int32)[None, :], last)
    first, is_ordered = lax.reduce(
        (places, logits_RV <= row_max),
        (jnp.int32(last), jnp.bool_(True)),
        lambda best, item: (jnp.minimum(best[0], item[0]), best[1] & item[1]),
        (1,),
    )
    return first, is_ordered & jnp.isfinite(row_max[:, 0])


def uniforms(rows: SamplingRows, purpose: int, count: int) -> Float[Array, "R count"]:
    """Numbers in [0, 1) with 24 random bits each, per row: the first ones, however many are asked for."""

    def one(low: UInt32[Array, ""], high: UInt32[Array, ""], sample: Array, output: Array) -> Array:
        key = jax.random.wrap_key_data(jnp.stack([high, low]), impl="threefry2x32")
        for part in (sample, output, jnp.int32(purpose)):
            key = jax.random.fold_in(key, part)
        with jax.threefry_partitionable(True):  # What it is by default: else bits would depend on how many they are.
            return jax.random.bits(key, (count,), jnp.uint32)

    low, high = (lax.bitcast_convert_type(word, jnp.uint32) for word in (rows.seed_low, rows.seed_high))
    bits: UInt32[Array, "R count"] = jax.vmap(one)(low, high, rows.sample_index, rows.output_index)
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def tempered(shifted_RV: Float[Array, "R V"], rows: SamplingRows, is_greedy: Bool[Array, " R"]) -> Float[Array, "R V"]:
    """Logits whose row maximum is 0, at each row's temperature. Greedy rows (padding among them) stay as they are."""
    return shifted_RV / jnp.where(is_greedy, 1.0, rows.temperature)[:, None]


def truncated_weights(
    tempered_RV: Float[Array, "R V"], rows: SamplingRows, is_greedy: Bool[Array, " R"]
) -> tuple[Float[Array, "R V"], Bool[Array, "R V"]]:
    """Softmax numerators of tempered logits, with 0 for the tokens that the row's rules drop, and which are kept."""
    weights = jnp.exp(tempered_RV)
    threshold = jnp.where(is_greedy, 0.0, rows.min_p)
    has_top_k = ~is_greedy & (rows.top_k > 0) & (rows.top_k < weights.shape[1])
    threshold = _raise(weights, threshold, has_top_k, rows.top_k, jnp.zeros_like(threshold))
    has_top_p = ~is_greedy & (rows.top_p < 1.0)
    _, mass = _total(weights, threshold)
    threshold = _raise(weights, threshold, has_top_p, jnp.zeros_like(rows.top_k), rows.top_p * mass)
    is_kept = weights >= threshold[:, None]
    return jnp.where(is_kept, weights, 0.0), is_kept


def is_in_top_k(
    tempered_RV: Float[Array, "R V"], top_k: Int[Array, " R"], is_greedy: Bool[Array, " R"]
) -> Bool[Array, "R V"]:
    """Also among tokens that are never drawn: the weights of those below −104, e^x, are all 0."""
    heights = 1.0 / (1.0 - tempered_RV)
    no_mass = jnp.zeros(heights.shape[0], jnp.float32)
    has_top_k = ~is_greedy & (top_k > 0) & (top_k < heights.shape[1])
    return heights >= _raise(heights, no_mass, has_top_k, top_k, no_mass)[:, None]


def _raise(
    weights: Float[Array, "R V"],
    threshold: Float[Array, " R"],
    is_asked: Bool[Array, " R"],
    min_count: Int[Array, " R"],
    min_mass: Float[Array, " R"],
) -> Float[Array, " R"]:
    """Raise the threshold of the rows that ask for it as far as it keeps `min_count` tokens of `min_mass` together.

    Bisects the bits of a float32, which are in the order of the numbers, until at most one token lies between
    the bounds: what is kept is settled then, whatever further passes the other rows need. No row, no pass.
    """

    def is_open(bounds: Bounds) -> Array:
        low, high, num_low, num_high = bounds
        return jnp.any(is_asked & (high - low > 1) & (num_low - num_high > 1))

    def halve(bounds: Bounds) -> Bounds:
        low, high, num_low, num_high = bounds
        middle = low + (high - low) // 2
        count, mass = _total(weights, lax.bitcast_convert_type(middle, jnp.float32))
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
    return jnp.where(is_asked, lax.bitcast_convert_type(low, jnp.float32), threshold)


def _total(weights: Float[Array, "R V"], threshold: Float[Array, " R"]) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """How many weights reach the threshold, and their sum. In one reduction: two take a CPU ten times as long."""
    is_kept = weights >= threshold[:, None]
    operands = is_kept.astype(jnp.int32), jnp.where(is_kept, weights, 0.0)
    count, mass = lax.reduce(
        operands, (jnp.int32(0), jnp.float32(0)), lambda total, item: (total[0] + item[0], total[1] + item[1]), (1,)
    )
    return count, mass


def num_levels(vocab_size: int) -> int:
    """Of the tree over so many tokens."""
    levels = 1
    while (vocab_size := -(-vocab_size // BRANCHES)) > 1:
        levels += 1
    return levels


def draw_tokens(weights_RV: Float[Array, "R V"], uniforms_RL: Float[Array, "R L"]) -> Int[Array, " R"]:
    """A token of each row by its weight: down a tree, at each node by inverse CDF of the weights of its branches.

    The children of node g, where the level below has n × BRANCHES nodes, are g, g + n, g + 2 n … there: sums of slices.
    With one running sum over a vocabulary, rounding moves each of its edges, and one draw in 300 falls where that
    counts, in the tail; here few edges lie near a draw, which has a number of its own at each level.
    """
    levels: list[Float[Array, "R branches n"]] = []
    sums = weights_RV
    while not levels or sums.shape[1] > 1:
        rows, size = sums.shape
        levels.append(jnp.pad(sums, ((0, 0), (0, -size % BRANCHES))).reshape(rows, BRANCHES, -1))
        sums = jnp.sum(levels[-1], axis=1)
    nodes = jnp.zeros(weights_RV.shape[0], jnp.int32)
    for level, uniform in zip(reversed(levels), uniforms_RL.T, strict=True):
        branches = jnp.take_along_axis(level, nodes[:, None, None], axis=2)[:, :, 0]
        ends = jnp.cumsum(branches, axis=-1)
        nodes += level.shape[2] * _passed(branches, ends, uniform * ends[:, -1])
    return nodes


def _passed(weights: Float[Array, "R n"], ends: Float[Array, "R n"], target: Float[Array, " R"]) -> Int[Array, " R"]:
    """First place with a weight whose running sum exceeds the target, the last one with a weight if none does.

    A place without a weight is never returned, though running sums are rounded and not always ascending: only
    a row without any weight gives 0.
    """
    places = jnp.arange(weights.shape[1], dtype=jnp.int32)[None, :]
    has_weight = weights > 0
    last = jnp.max(jnp.where(has_weight, places, 0), axis=-1)
    first = jnp.min(jnp.where(has_weight & (ends > target[:, None]), places, weights.shape[1]), axis=-1)
    return jnp.minimum(first, last)
