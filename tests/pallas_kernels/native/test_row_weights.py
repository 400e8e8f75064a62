"""Rows that native code weighs and scores: kept tokens, sums and totals are those of numpy in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.native import llvm, processor, row_scores, row_weights
from jpaged.pallas_kernels.native.row_scores import ScoredRows, scored_rows
from jpaged.pallas_kernels.native.row_weights import RowLimits, WeighedRows, weighed_rows

ROWS, BLOCKS, BLOCK = 24, 41, 128
NUM_TOPS = 20
LIMITS = (
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": BLOCKS * BLOCK - 1},
    {"top_k": BLOCKS * BLOCK},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"min_p": 0.02},
    {"min_p": 0.3, "top_k": 3, "top_p": 0.5},
    {"top_k": 500, "top_p": 0.8},
    {"min_p": 0.001, "top_p": 0.95},
)
SPREADS = 0.01, 1.0, 8.0
"""Standard deviations of logits: nearly all tokens are alike, many are likely, and few are."""


class Rows:
    """Rows with all limits and spreads, of which every seventh is not drawn."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        spreads = np.array([SPREADS[row % 3] for row in range(ROWS)], np.float32)
        self.logits = (rng.normal(size=(ROWS, BLOCKS * BLOCK)) * spreads[:, None]).astype(np.float32)
        self.logits[:, 5001:] = -np.inf  # As it fills up the last block, and as masks forbid tokens.
        self.logits[4] = np.round(self.logits[4])  # Tokens that tie.
        self.temperature = rng.uniform(0.1, 2, ROWS).astype(np.float32)
        self.is_drawn = np.arange(ROWS) % 7 != 6
        limits = [{"min_p": 0.0, "top_k": 0, "top_p": 1.0} | LIMITS[row % len(LIMITS)] for row in range(ROWS)]
        self.limits = limits
        self.token_logits = self.logits[:, 17]

    def exact_weights(self) -> np.ndarray:
        exact = self.logits.astype(np.float64)
        return np.exp((exact - exact.max(axis=1, keepdims=True)) / self.temperature[:, None])

    def weighed(self, rows: list[int]) -> WeighedRows:
        """Return what native code gives for some of the rows, in one call."""
        limits = RowLimits(
            *(jnp.asarray([self.limits[row][name] for row in rows], dtype) for name, dtype in
              (("min_p", jnp.float32), ("top_k", jnp.int32), ("top_p", jnp.float32)))
        )  # fmt: skip
        blocks = jnp.asarray(self.logits[rows].reshape(-1, BLOCKS, BLOCK))
        row_max = blocks.max(axis=(1, 2))
        drawn, temperature = jnp.asarray(self.is_drawn[rows]), jnp.asarray(self.temperature[rows])
        return compiled(weighed_rows, blocks, row_max, drawn, temperature, limits)

    def scored(self, rows: list[int], num_tops: int = NUM_TOPS) -> ScoredRows:
        blocks = jnp.asarray(self.logits[rows].reshape(-1, BLOCKS, BLOCK))
        given = [jnp.asarray(array[rows]) for array in (self.is_drawn, self.is_drawn, self.temperature)]
        tokens = jnp.asarray(self.token_logits[rows])
        return compiled(partial(scored_rows, num_tops=num_tops), blocks, blocks.max(axis=2), *given, tokens)


def compiled(function, *arguments):
    """Return numpy arrays of a call that is traced anew: JAX would keep a program with vectors of other lanes."""
    return jax.tree.map(np.asarray, jax.jit(lambda *given: function(*given))(*arguments))


@pytest.fixture(params=[8, 16], ids=["eight lanes", "sixteen"])
def _lanes(request, monkeypatch):
    if request.param == 16 and not processor.host_has_avx512():
        pytest.skip("this processor has no vectors of sixteen lanes")
    monkeypatch.setattr(llvm, "host_has_avx512", lambda: request.param == 16)
    for handler in (row_weights._weigh_handler, row_scores._handler):
        handler.cache_clear()
    yield
    for handler in (row_weights._weigh_handler, row_scores._handler):
        handler.cache_clear()


def kept_tokens(weights: np.ndarray, min_p: float, top_k: int, top_p: float) -> np.ndarray:
    """Return which weights of a row min-p, top-k and top-p keep, by sorting."""
    is_kept = weights >= min_p
    if 0 < top_k < len(weights):
        is_kept &= weights >= np.sort(weights)[-top_k]
    if top_p < 1:
        left = np.sort(weights[is_kept])[::-1]
        num_kept = np.searchsorted(np.cumsum(left, dtype=np.float64), top_p * left.sum(dtype=np.float64)) + 1
        is_kept &= weights >= left[min(num_kept, len(left)) - 1]
    return is_kept


@pytest.mark.usefixtures("_lanes")
def test_truncation_keeps_what_sorted_weights_keep():
    rows = Rows()
    weighed, exact = rows.weighed(list(range(ROWS))), rows.exact_weights()
    assert not weighed.block_sums[~rows.is_drawn].any()
    for row in np.flatnonzero(rows.is_drawn):
        weights, limits = weighed.weights[row].ravel(), rows.limits[row]
        np.testing.assert_allclose(weights, exact[row], rtol=1e-5, atol=1e-37)
        is_kept = weights >= weighed.threshold[row]
        # A weight of 0 is never drawn. Of weights that are alike, a rounding of their sum may keep one more or less.
        num_kept, num_wanted = ((one & (weights > 0)).sum() for one in (is_kept, kept_tokens(weights, **limits)))
        assert abs(int(num_kept) - int(num_wanted)) <= (limits["top_p"] < 1), limits
        sums = np.where(is_kept, weights, 0).reshape(BLOCKS, BLOCK).sum(axis=1, dtype=np.float64)
        np.testing.assert_allclose(weighed.block_sums[row], sums, rtol=1e-6)


@pytest.mark.usefixtures("_lanes")
def test_totals_are_those_of_the_softmax_and_larger_logits_are_counted():
    rows = Rows()
    found, scored = rows.scored(list(range(ROWS)), num_tops=0), rows.is_drawn
    assert found.top_ids is None
    np.testing.assert_allclose(found.totals[scored], rows.exact_weights().sum(axis=1)[scored], rtol=1e-6)
    num_larger = (rows.logits > rows.token_logits[:, None]).sum(axis=1)
    assert np.array_equal(found.num_larger[scored], num_larger[scored])


@pytest.mark.usefixtures("_lanes")
@pytest.mark.parametrize("num_tops", [1, NUM_TOPS, row_scores.MAX_TOPS])
def test_the_largest_logits_come_in_order_and_ties_by_token(num_tops):
    rows = Rows()
    rows.logits[0], rows.logits[1] = 0.0, np.sort(rows.logits[1])  # All tie; each logit is larger than those before.
    rows.logits[2, 3:] = -np.inf  # There are fewer than are wanted.
    rows.logits[3, :5001], rows.logits[3, 40:80:2], rows.logits[3, 41:81:2] = -1.0, 0.0, -0.0  # Zeros of both signs.
    rows.logits[5, 200] = np.nan  # The row means nothing; its tokens are some.
    found, scored = rows.scored(list(range(ROWS)), num_tops), rows.is_drawn
    order = np.argsort(-rows.logits, axis=1, kind="stable")[:, :num_tops]
    wanted = np.take_along_axis(rows.logits, order, axis=1)
    finite = scored & (np.arange(ROWS) != 5)
    assert np.array_equal(found.top_logits[finite], wanted[finite])
    ordered = finite & (np.arange(ROWS) != 3)  # A zero with a sign counts as the smaller one.
    assert np.array_equal(found.top_ids[ordered], order[ordered])
    assert ((found.top_ids[5] >= 0) & (found.top_ids[5] < BLOCKS * BLOCK)).all()


def test_a_row_has_the_same_results_in_any_company():
    rows = Rows()
    together, scores = rows.weighed(list(range(ROWS))), rows.scored(list(range(ROWS)))
    for row in (0, 5, 9):
        for all_rows, alone in ((together, rows.weighed([row])), (scores, rows.scored([row]))):
            assert all(np.array_equal(a[row], b[0]) for a, b in zip(all_rows, alone, strict=True))
