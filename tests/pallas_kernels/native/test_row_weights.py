"""Rows that native code draws and scores: kept tokens, sums and totals are those of numpy in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.native import llvm, processor, row_draws, row_scores
from jpaged.pallas_kernels.native.row_draws import DrawnRows, RowLimits, drawn_rows
from jpaged.pallas_kernels.native.row_scores import ScoredRows, scored_rows
from jpaged.sampling.drawing import NUM_BRANCHES, draw_tokens, num_draw_levels
from jpaged.sampling.top_blocks import block_rows
from jpaged.sampling.truncation import KeptTokens

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
        self.uniforms = rng.random((ROWS, num_draw_levels(BLOCKS * BLOCK)), np.float32)

    def exact_weights(self) -> np.ndarray:
        """Return float64 weights, of exponents that are rounded to float32 as those of native code are."""
        exponents = (self.logits - self.logits.max(axis=1, keepdims=True)) * (np.float32(1) / self.temperature)[:, None]
        return np.where(exponents >= -87, np.exp(exponents.astype(np.float64)), 0)

    def drawn(self, rows: list[int]) -> DrawnRows:
        """Return what native code gives for some of the rows, in one call."""
        limits = RowLimits(
            *(jnp.asarray([self.limits[row][name] for row in rows], dtype) for name, dtype in
              (("min_p", jnp.float32), ("top_k", jnp.int32), ("top_p", jnp.float32)))
        )  # fmt: skip
        blocks = jnp.asarray(self.logits[rows].reshape(-1, BLOCKS, BLOCK))
        given = [jnp.asarray(array[rows]) for array in (self.is_drawn, self.temperature)]
        draw = partial(drawn_rows, num_branches=NUM_BRANCHES)
        return compiled(draw, blocks, blocks.max(axis=(1, 2)), *given, limits, jnp.asarray(self.uniforms[rows]))

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
    for handler in (row_draws._handler, row_scores._handler):
        handler.cache_clear()
    yield
    for handler in (row_draws._handler, row_scores._handler):
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
    drawn, exact = rows.drawn(list(range(ROWS))), rows.exact_weights()
    for row in np.flatnonzero(rows.is_drawn):
        weights, limits = exact[row], rows.limits[row]
        # Native weights are within 2 units in the last place, so that a few may lie on either side of the threshold.
        surely, perhaps = (
            (weights >= drawn.threshold[row] * factor) & (weights > 0) for factor in (1 + 4e-7, 1 - 4e-7)
        )
        num_wanted = (kept_tokens(weights, **limits) & (weights > 0)).sum()
        # Of weights that are alike, a rounding of their sum may keep one more or less.
        may_differ = limits["top_p"] < 1
        assert surely.sum() - may_differ <= num_wanted <= perhaps.sum() + may_differ, limits
        least, most = (np.where(kept, weights, 0).reshape(BLOCKS, BLOCK).sum(axis=1) for kept in (surely, perhaps))
        assert (drawn.block_sums[row] >= least * (1 - 1e-6)).all()
        assert (drawn.block_sums[row] <= most * (1 + 1e-6)).all()
        np.testing.assert_allclose(drawn.totals[row], weights.sum(), rtol=1e-6)


@pytest.mark.usefixtures("_lanes")
def test_tokens_are_those_that_xla_draws_down_the_same_tree():
    rows, copies, rng = Rows(), list(range(ROWS)) * 8, np.random.default_rng(1)
    for name in ("logits", "temperature", "is_drawn", "limits"):
        setattr(rows, name, np.asarray(getattr(rows, name))[copies])
    rows.uniforms = rng.random((len(copies), rows.uniforms.shape[1]), np.float32)
    rows.uniforms[:ROWS], rows.uniforms[ROWS : 2 * ROWS] = 0, 1 - 2.0**-24
    drawn, exact = rows.drawn(list(range(len(copies)))), rows.exact_weights()
    kept = KeptTokens(jnp.asarray(drawn.threshold), jnp.asarray(drawn.block_sums))
    wanted = compiled(
        lambda weights, kept, uniforms: draw_tokens(block_rows(weights), lambda weight: weight, kept, uniforms),
        exact.astype(np.float32), kept, rows.uniforms,
    )  # fmt: skip
    assert len(set(wanted[rows.is_drawn])) > 60
    assert np.array_equal(drawn.token_ids[rows.is_drawn], wanted[rows.is_drawn])


@pytest.mark.parametrize("min_p", [-0.0, -1.0, np.nan])
def test_a_min_p_that_is_not_above_0_keeps_all(min_p):
    rows = Rows()
    others = [{"top_k": 40}, {"top_p": 0.9}, {}]
    results = []
    for given in (0.0, min_p):
        rows.limits = [{"top_k": 0, "top_p": 1.0, **others[row % 3], "min_p": given} for row in range(ROWS)]
        results.append(rows.drawn(list(range(ROWS))))
    for wanted, found in zip(*results, strict=True):
        assert np.array_equal(found[rows.is_drawn], wanted[rows.is_drawn])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_a_token(value):
    """Its request fails, but its token is embedded before that is known."""
    rows = Rows()
    rows.logits[:8], rows.logits[8:16, 9], rows.logits[16:, :] = value, value, -np.inf
    tokens = rows.drawn(list(range(ROWS))).token_ids[rows.is_drawn]
    assert ((tokens >= 0) & (tokens < BLOCKS * BLOCK)).all()


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
    # Of equal logits a zero with a sign comes last; the sort is stable.
    order = np.lexsort((np.signbit(rows.logits), -rows.logits), axis=1)[:, :num_tops]
    wanted = np.take_along_axis(rows.logits, order, axis=1)
    finite = scored & (np.arange(ROWS) != 5)
    assert np.array_equal(found.top_logits[finite], wanted[finite])
    assert np.array_equal(found.top_ids[finite], order[finite])
    assert ((found.top_ids[5] >= 0) & (found.top_ids[5] < BLOCKS * BLOCK)).all()


def test_a_program_has_no_room_for_the_weights_of_all_rows():
    rows = Rows()
    blocks = jnp.asarray(rows.logits.reshape(-1, BLOCKS, BLOCK))
    limits = RowLimits(jnp.zeros(ROWS), jnp.full(ROWS, 40, jnp.int32), jnp.full(ROWS, 0.9))

    def draw(blocks: jax.Array) -> DrawnRows:
        given = blocks.max(axis=(1, 2)), jnp.asarray(rows.is_drawn), jnp.asarray(rows.temperature), limits
        return drawn_rows(blocks, *given, jnp.asarray(rows.uniforms), num_branches=NUM_BRANCHES)

    analysis = jax.jit(draw).lower(blocks).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < blocks[0].nbytes


def test_a_row_has_the_same_results_in_any_company():
    rows = Rows()
    together, scores = rows.drawn(list(range(ROWS))), rows.scored(list(range(ROWS)))
    for row in (0, 5, 9):
        for all_rows, alone in ((together, rows.drawn([row])), (scores, rows.scored([row]))):
            assert all(np.array_equal(a[row], b[0]) for a, b in zip(all_rows, alone, strict=True))
