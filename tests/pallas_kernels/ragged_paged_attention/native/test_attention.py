"""Native attention and page writes on a CPU: numbers, unwritten slots, threads, other rows, tiles, layers."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llvmlite import ir

from jpaged.pallas_kernels.native import llvm, processor
from jpaged.pallas_kernels.native.llvm import F32, I64, LOG2_E, Code
from jpaged.pallas_kernels.native.processor import has_amx_unit
from jpaged.pallas_kernels.native.registry import register
from jpaged.pallas_kernels.native.xla_call import Call, Work, handler
from jpaged.pallas_kernels.ragged_paged_attention.interface import AttendOptions
from jpaged.pallas_kernels.ragged_paged_attention.native import attention
from jpaged.pallas_kernels.ragged_paged_attention.native.attention import attend_tiles
from jpaged.pallas_kernels.ragged_paged_attention.native.pages import PACKED_BF16, NativePages, write_pages
from jpaged.pallas_kernels.ragged_paged_attention.tile_plan import PlanSections

from ..paged_world import COMPILER_OPTIONS

ROOT = Path(__file__).parents[4]
NUM_PAGES = 40
BIT = ir.IntType(1)


DTYPES = "float32", "bfloat16"
ROUNDING = 2**-8
"""The largest relative error of a number rounded to bfloat16."""


def in_words(x: np.ndarray, dtype: str) -> jax.Array:
    """Return numbers [C, K, X, Y] as pages store them: bfloat16 as pairs along X, [C, K, ⌈X ÷ 2⌉, Y] uint32."""
    if dtype == "float32":
        return jnp.asarray(x, dtype)
    bits = np.asarray(jnp.asarray(x, dtype)).view(np.uint16).astype(np.uint32)
    bits = np.pad(bits, [(0, 0), (0, 0), (0, x.shape[2] % 2), (0, 0)])
    return jnp.asarray(bits[:, :, ::2] | bits[:, :, 1::2] << 16)


def in_numbers(words: jax.Array, size: int) -> np.ndarray:
    """Return the numbers [C, K, size, Y] that `in_words` packed, in float64."""
    array = np.asarray(words)
    if array.dtype == np.float32:
        return array.astype(np.float64)
    halves = np.stack([array << 16, array & np.uint32(0xFFFF0000)], axis=3).view(np.float32)
    return halves.reshape(*array.shape[:2], -1, array.shape[3])[:, :, :size].astype(np.float64)


def random_pages(rng: np.random.Generator, heads: int, head_size: int, page_size: int, dtype: str) -> list[jax.Array]:
    shapes = (NUM_PAGES, heads, head_size, page_size), (NUM_PAGES, heads, page_size, head_size)
    return [in_words(rng.normal(size=shape), dtype) for shape in shapes]


@dataclass
class Step:
    """Tokens of some rows over pages: the first rows have one each, and may share pages."""

    pages: NativePages
    q: np.ndarray
    tables: np.ndarray
    rows: np.ndarray
    """The row of each token."""
    positions: np.ndarray
    num_decode: int
    prefill: list[tuple[int, int, int]] = field(default_factory=list)
    """(Row, first token, number of tokens), one entry a tile."""
    shared: list[tuple[list[int], int]] = field(default_factory=list)
    """(Rows, number of first pages that these rows share), one entry a tile."""
    sinks: np.ndarray | None = None

    def attend(self) -> np.ndarray:
        return np.asarray(self.compiled()())

    def compiled(self) -> Callable[[], jax.Array]:
        prefill, tiles = np.zeros((3, 9), np.int32), np.zeros((3, 5), np.int32)
        members, num_seen = (np.zeros(max(1, len(self.tables)), np.int32) for _ in range(2))
        place = 0
        for index, (rows, num_pages) in enumerate(self.shared):
            tiles[:, index] = place, len(rows), num_pages
            members[place : place + len(rows)], num_seen[rows] = rows, num_pages
            place += len(rows)
        prefill[:, : len(self.prefill)] = np.reshape(self.prefill, (-1, 3)).T
        num_decode = np.int32(self.num_decode)
        most = max([1, *(count for _, _, count in self.prefill), *(len(rows) for rows, _ in self.shared)])

        def run(q: jax.Array, tables: jax.Array, positions: jax.Array, plan: tuple[jax.Array, ...]) -> jax.Array:
            sections = PlanSections(*plan)
            return attend_tiles(self.pages, q, tables, positions, sections, num_decode, max_tokens=most, sinks=sinks)

        sinks = None if self.sinks is None else jnp.asarray(self.sinks)
        num_prefill, num_shared = (np.array([len(tiles)], np.int32) for tiles in (self.prefill, self.shared))
        plan = tuple(jnp.asarray(array) for array in (num_prefill, prefill, num_shared, tiles, members, num_seen))
        return partial(jax.jit(run, compiler_options=COMPILER_OPTIONS), self.q, self.tables, self.positions, plan)

    def error(self, out: np.ndarray) -> float:
        """Return the largest error against the definition in float64.

        In bfloat16 it is the norm of a query's error beyond that of rounded weights. Roundings of many weights have
        either sign, so their squares add up.
        """
        page_size, window, head_size = self.pages.page_size, self.pages.options.window, self.q.shape[3]
        is_bf16_packed = self.pages.keys.dtype == PACKED_BF16
        keys, values = in_numbers(self.pages.keys, head_size), in_numbers(self.pages.values, page_size)
        # Pairs have queries in units of ln 2, which are rounded to bfloat16 so.
        unit = LOG2_E if is_bf16_packed else 1.0
        q = self.q.astype(np.float32) * np.float32(self.pages.options.scale * unit)
        if is_bf16_packed:
            q = np.asarray(jnp.asarray(q, jnp.bfloat16), np.float32)
        wanted, slack = np.zeros(q.shape), np.zeros(q.shape[:3])
        tokens = [*range(self.num_decode)]
        tokens += [token for _, start, count in self.prefill for token in range(start, start + count)]
        for token in tokens:
            length = self.positions[token] + 1
            table = self.tables[self.rows[token], : -(-length // page_size)]
            ids = int(self.pages.first_page) + self.pages.page_step * table
            seen = slice(0 if window is None else max(0, length - window), length)
            for head in range(q.shape[1]):
                k = np.concatenate(keys[ids, head], axis=1)[:, seen]
                v = np.concatenate(values[ids, head], axis=0)[seen]
                scores = q[token, head].astype(np.float64) @ k / unit
                if (cap := self.pages.options.soft_cap) is not None:
                    scores = cap * np.tanh(scores / cap)
                sinks = np.full(len(scores), -np.inf) if self.sinks is None else self.sinks[head].astype(np.float64)
                weights = np.exp(scores - np.maximum(scores.max(axis=1), sinks)[:, None])
                total = weights.sum(axis=1) + np.exp(sinks - np.maximum(scores.max(axis=1), sinks))
                wanted[token, head] = weights @ v / total[:, None]
                slack[token, head] = ROUNDING * is_bf16_packed * np.sqrt(weights**2 @ (v**2).sum(axis=1)) / total
        if not is_bf16_packed:
            return float(np.abs(out - wanted).max())
        return float((np.linalg.norm(out - wanted, axis=-1) - slack).max())


def random_step(
    rng: np.random.Generator,
    pages: list[jax.Array],
    group: int,
    lens: list[int],
    queries: tuple[int, ...] = (),
    *,
    padding: int = 0,
    first_page: int = 0,
    page_step: int = 1,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Step:
    """Return a step of rows of these lengths: one token each, the last ones with `queries` tokens in one tile each."""
    heads, page_size, head_size = pages[0].shape[1], pages[0].shape[3], pages[1].shape[3]
    counts = [1] * (len(lens) - len(queries)) + list(queries)
    rows = np.repeat(np.arange(len(lens)), counts)
    positions = np.concatenate([np.arange(n - count, n) for n, count in zip(lens, counts, strict=True)])
    most = max(-(-n // page_size) for n in lens) + 1
    tables = rng.integers(0, (NUM_PAGES - first_page) // page_step, (len(lens), most)).astype(np.int32)
    tables[np.arange(most)[None] * page_size >= np.array(lens)[:, None]] = 2**30  # Not looked at.
    starts = np.cumsum([0, *counts])
    first = len(lens) - len(queries)
    prefill = [(row, int(starts[row]), counts[row]) for row in range(first, len(lens))]
    q = rng.normal(size=(len(rows) + padding, heads, group, head_size)).astype(np.float32)
    options = AttendOptions(scale or head_size**-0.5, window, soft_cap)
    layer = NativePages(*pages, jnp.int32(first_page), options, page_step)
    padded = np.concatenate([positions, np.full(padding, 7)]).astype(np.int32)
    return Step(layer, q, tables, rows, padded, first, prefill)


SHAPES = [(3, 3, 64, 64), (1, 1, 64, 16), (2, 7, 128, 32), (2, 5, 80, 8), (1, 4, 24, 12), (2, 8, 256, 64), (1, 3, 7, 5)]
MASKS = {"plain": (None, None), "1": (1, None), "20": (20, None), "cap": (None, 3.0)}


@pytest.mark.parametrize(
    ("heads", "group", "head_size", "page_size", "dtype", "mask"),
    [
        pytest.param(
            *shape,
            dtype,
            list(MASKS)[(index + place) % len(MASKS)],
            marks=[pytest.mark.slow] * (place != index % 2 and index > 1),
        )
        for index, shape in enumerate(SHAPES)
        for place, dtype in enumerate(DTYPES)
    ],
)
def test_tokens_see_what_attention_says(
    heads: int, group: int, head_size: int, page_size: int, dtype: str, mask: str
) -> None:
    """Shapes give whole and partial vectors, rows end at every edge of a page, and the layer is not the first."""
    rng = np.random.default_rng(page_size)
    pages = random_pages(rng, heads, head_size, page_size, dtype)
    window, soft_cap = MASKS[mask]
    lens = [1, page_size - 1, page_size, page_size + 1, 3 * page_size, 4 * page_size - 1]
    lens, queries = [*lens, 2 * page_size + 3, 5, 3 * page_size], (page_size + 2, 5, 1)
    step = random_step(
        rng, pages, group, lens, queries, padding=3, first_page=4, page_step=3, window=window, soft_cap=soft_cap
    )
    out = step.attend()
    assert step.error(out) < 2e-6
    assert (out[-3:] == 0).all(), "padding"


@pytest.mark.parametrize(
    ("has_pairs", "has_avx512", "dtype"),
    [
        *((False, False, dtype) for dtype in DTYPES),
        (True, True, "bfloat16"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((False, True, "float32"), (False, True, "bfloat16"), (True, True, "float32"))
        ),
    ],
)
def test_other_processors_attend_as_well(
    monkeypatch: pytest.MonkeyPatch, has_pairs: bool, has_avx512: bool, dtype: str
) -> None:
    """Processors without AMX, with and without AVX512-BF16, with vectors of sixteen lanes and of eight."""
    if has_pairs and not processor.host_has("avx512bf16"):
        pytest.skip("this processor has no products of pairs")
    for module in (llvm, attention):
        monkeypatch.setattr(module, "host_has_avx512", lambda: has_avx512)
    monkeypatch.setattr(attention, "has_amx_unit", lambda: False)
    monkeypatch.setattr(attention, "host_has", lambda feature: has_pairs)
    rng = np.random.default_rng(0)
    for heads, group, head_size, page_size in ((3, 5, 80, 24), (2, 2, 64, 64)):
        pages = random_pages(rng, heads, head_size, page_size, dtype)
        step = random_step(rng, pages, group, [70, 20, 61], (7,), window=20)
        step.sinks = rng.normal(size=(heads, group)).astype(np.float32)
        assert step.error(step.attend()) < 2e-6


PAGES = [("float32", 16), ("bfloat16", 16), ("bfloat16", 32)]
"""Dtype and page size of pages of float32, of bfloat16 pairs, and of pairs that fit AMX tiles."""


@pytest.mark.parametrize(("dtype", "page_size"), PAGES)
def test_sinks_take_their_share(dtype: str, page_size: int) -> None:
    rng = np.random.default_rng(0)
    step = random_step(rng, random_pages(rng, 2, 64, page_size, dtype), 3, [40, 1, 33], (9,))
    without = step.attend()
    step.sinks = rng.normal(2.0, 1.0, size=(2, 3)).astype(np.float32)
    assert step.error(step.attend()) < 2e-6
    assert np.abs(step.attend() - without).max() > 0.1


@pytest.mark.parametrize(
    ("dtype", "page_size", "window", "length"),
    [
        ("float32", 16, 30, 70),
        ("bfloat16", 64, 300, 700),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("bfloat16", 16, None, 70), ("bfloat16", 32, 30, 70), ("bfloat16", 64, None, 810))
        ),
    ],
)
def test_a_token_has_the_same_bits_in_any_tile(dtype: str, page_size: int, window: int | None, length: int) -> None:
    """A token gives the same bits in a decode row and in every cut of its prompt into tiles.

    The matrix unit takes 256 tokens of context at a time: 700 are several such blocks.
    """
    rng = np.random.default_rng(0)
    pages = random_pages(rng, 2, 64, page_size, dtype)
    step = random_step(rng, pages, 7, [length], (41,), window=window)
    whole = step.attend().view(np.int32)
    for cuts in ((1, 40), (16, 16, 9), (7, 2, 1, 31), (5,) * 8 + (1,)):
        starts = np.cumsum([0, *cuts[:-1]])
        tiles = [(0, int(start), count) for start, count in zip(starts, cuts, strict=True)]
        assert np.array_equal(replace(step, prefill=tiles).attend().view(np.int32), whole)
    for token in (0, 8, 40):
        alone = replace(
            step, q=step.q[token : token + 1], positions=step.positions[token : token + 1], num_decode=1, prefill=[]
        )
        assert np.array_equal(alone.attend().view(np.int32)[0], whole[token])


@pytest.mark.parametrize(
    ("group", "head_size", "page_size", "window"),
    [
        (3, 64, 64, None),
        (2, 128, 32, 600),
        pytest.param(1, 64, 256, None, marks=pytest.mark.slow),
        pytest.param(4, 256, 128, None, marks=pytest.mark.slow),
    ],
)
def test_a_token_has_the_same_bits_beside_whole_groups_of_queries(
    group: int, head_size: int, page_size: int, window: int | None
) -> None:
    """Groups of 32 queries that see blocks of 256 slots whole are computed in turns with the groups beside them.

    Tiles of 64 and of 32 tokens are whole groups, the others are not. The first two blocks are seen whole, or with a
    window only the second.
    """
    rng = np.random.default_rng(0)
    step = random_step(rng, random_pages(rng, 2, head_size, page_size, "bfloat16"), group, [700], (64,), window=window)
    whole = step.attend()
    assert step.error(whole) < 1e-5
    for cuts in ((32, 32), (63, 1), (31, 32, 1)):
        starts = np.cumsum([0, *cuts[:-1]])
        tiles = [(0, int(start), count) for start, count in zip(starts, cuts, strict=True)]
        found = replace(step, prefill=tiles).attend()
        assert np.array_equal(found.view(np.int32), whole.view(np.int32)), cuts


@pytest.mark.parametrize(
    ("group", "dtype", "page_size"),
    [
        *((8, *pages) for pages in (*PAGES, ("bfloat16", 128))),
        *(pytest.param(1, *pages, marks=pytest.mark.slow) for pages in (*PAGES, ("bfloat16", 128))),
    ],
)
def test_rows_that_share_pages_have_the_bits_that_they_have_alone(group: int, dtype: str, page_size: int) -> None:
    """Rows of one tile in any order, of different lengths, beside rows that share nothing and a prompt.

    Three pages of 128 tokens are more than the 256 that the matrix unit takes at a time.
    """
    rng = np.random.default_rng(0)
    lens = [length * page_size // 16 for length in (50, 90, 65, 20, 49, 33)]
    step = random_step(rng, random_pages(rng, 2, 64, page_size, dtype), group, lens, (9,))
    for rows, num_pages in (([4, 0, 2], 3), ([1, 3], 1)):
        step.tables[rows, :num_pages] = step.tables[rows[0], :num_pages]
    alone = step.attend()
    assert step.error(alone) < 2e-6
    for shared in ([([4, 0, 2], 3)], [([4, 0, 2], 3), ([1, 3], 1)], [([0, 4], 2), ([3, 1], 1)], [([4, 0], 3)]):
        assert np.array_equal(replace(step, shared=shared).attend().view(np.int32), alone.view(np.int32)), shared


def test_shared_pages_are_read_from_the_first_rows_table() -> None:
    """Only the first row's table is read for the pages that all rows share."""
    rng = np.random.default_rng(0)
    step = random_step(rng, random_pages(rng, 1, 64, 16, "float32"), 2, [50, 60, 70])
    step.tables[:, :3] = step.tables[0, :3]
    wanted = step.attend()
    step.tables[1:, :3] = 2**30
    assert np.array_equal(replace(step, shared=[([0, 2, 1], 3)]).attend(), wanted)


@pytest.mark.parametrize(
    ("page_size", "head_size", "dtype"),
    [
        pytest.param(*size, dtype, marks=() if place == index % 2 else pytest.mark.slow)
        for index, size in enumerate([(64, 64), (32, 96), (16, 64), (4, 24), (1, 64)], 1)
        for place, dtype in enumerate(DTYPES)
    ],
)
def test_dead_slots_are_not_looked_at(page_size: int, head_size: int, dtype: str) -> None:
    """Pages begin with whatever was there: nothing of it comes through, not even what is no number."""
    rng = np.random.default_rng(0)
    lens = [1, 3 * page_size - 1, page_size, page_size + 1, 2 * page_size + 3, page_size + (page_size + 1) // 2, 7]
    shapes = (NUM_PAGES, 2, head_size, page_size), (NUM_PAGES, 2, page_size, head_size)
    numbers = [rng.normal(size=shape) for shape in shapes]
    step = random_step(rng, [in_words(array, dtype) for array in numbers], 3, lens, (5,))
    order = iter(rng.permutation(NUM_PAGES))
    for row, length in enumerate(lens):
        for index in range(-(-length // page_size)):
            page = step.tables[row, index] = next(order)
            dead = np.arange(page_size) + index * page_size >= length
            numbers[0][page, :, :, dead] = np.nan
            numbers[1][page][:, dead] = np.inf
    keys, values = (in_words(np.where(np.isfinite(array), array, 0.0), dtype) for array in numbers)
    wanted = replace(step, pages=replace(step.pages, keys=keys, values=values)).attend()
    keys, values = (in_words(array, dtype) for array in numbers)
    assert np.isfinite(wanted).all()
    assert np.array_equal(replace(step, pages=replace(step.pages, keys=keys, values=values)).attend(), wanted)


@pytest.mark.parametrize(("dtype", "page_size"), PAGES)
@pytest.mark.parametrize("spread", [1e-3, pytest.param(30.0, marks=pytest.mark.slow), 1e4])
def test_scores_of_any_size_make_weights(spread: float, dtype: str, page_size: int) -> None:
    """One key for all weight, or nearly the same for each: no overflow, no page forgotten."""
    rng = np.random.default_rng(0)
    keys, values = (rng.normal(size=(NUM_PAGES, 1, *shape)) for shape in ((64, page_size), (page_size, 64)))
    pages = [in_words(keys * spread, dtype), in_words(values, dtype)]
    step = random_step(rng, pages, 2, [160], scale=1.0)
    # A score of 1e4 has a unit of the last place of 1e-3.
    assert step.error(step.attend()) < max(2e-6, spread * 1e-6)


@pytest.mark.parametrize(("dtype", "page_size"), PAGES)
def test_what_is_not_a_number_stays_in_its_row(dtype: str, page_size: int) -> None:
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(NUM_PAGES, 2, 64, page_size)), rng.normal(size=(NUM_PAGES, 2, page_size, 64))
    keys[3, 1, 5, 2], values[7, 0, 4, 9], values[9] = np.nan, np.inf, np.nan
    lens = [2 * page_size] * 3 + [page_size]
    step = random_step(rng, [in_words(keys, dtype), in_words(values, dtype)], 2, lens)
    step.tables[:, :2] = [[1, 2], [1, 3], [7, 2], [2, 9]]
    for shared in ([], [([0, 1], 1)]):
        out = replace(step, shared=shared).attend()
        assert np.isfinite(out[0]).all()
        assert np.isnan(out[1, 1]).all()
        assert np.isfinite(out[1, 0]).all()
        assert not np.isfinite(out[2, 0, :, 9]).any()
        assert np.isfinite(np.delete(out[2, 0], 9, axis=1)).all()
        assert np.isfinite(out[3]).all()


def test_a_tile_as_large_as_a_stack_is_left_to_vectors() -> None:
    rng = np.random.default_rng(0)
    step = random_step(rng, random_pages(rng, 1, 64, 64, "bfloat16"), 48, [100], (64,))
    assert step.error(step.attend()) < 2e-6
    assert "tdpbf16ps" not in code_of(step)


def test_a_matrix_unit_multiplies_where_there_is_one() -> None:
    if not has_amx_unit():
        pytest.skip("this processor has no matrix unit, or the system does not let this process use it")
    rng = np.random.default_rng(0)
    for (dtype, page_size), is_used in zip(PAGES, (False, False, True), strict=True):
        step = random_step(rng, random_pages(rng, 2, 64, page_size, dtype), 3, [40])
        assert ("tdpbf16ps" in code_of(step)) == is_used


def code_of(step: Step) -> str:
    """Return the LLVM code of the attention that the step calls."""
    attention._attend_handler.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        texts: list[str] = []
        patch.setattr(attention, "register", lambda name, build: (texts.append(str(build())), register(name, build))[1])
        step.attend()
    return texts[0]


@pytest.mark.parametrize("change", ["dtype", "values"])
def test_pages_that_native_code_would_misread_are_refused(change: str) -> None:
    rng = np.random.default_rng(0)
    keys, values = random_pages(rng, 2, 64, 16, "float32")
    pages = [keys.astype("bfloat16"), values.astype("bfloat16")] if change == "dtype" else [keys, values[:, :, :8]]
    wanted = {"dtype": r"keys .* of bfloat16, wanted .* of float32", "values": r"values .*8, 64\) of float32, wanted"}
    step = random_step(rng, [keys, values], 2, [40])
    with pytest.raises(ValueError, match=wanted[change]):
        replace(step, pages=replace(step.pages, keys=pages[0], values=pages[1])).attend()


BITS_OF_LONG_ROWS = """
import hashlib, numpy as np
from dataclasses import replace
from tests.pallas_kernels.ragged_paged_attention.native.test_attention import DTYPES, random_pages, random_step
bits = hashlib.sha256()
for dtype in DTYPES:
    rng = np.random.default_rng(0)
    pages = random_pages(rng, 3, 64, 64, dtype)
    step = random_step(rng, pages, 3, rng.integers(500, 1300, 17).tolist(), (40,))
    run = step.compiled()
    for _ in range(200):  # A helper that comes late must find nothing left, and no memory that is gone.
        out = np.asarray(run())
    bits.update(out.tobytes())
    q, positions, tables = (array[5:6] for array in (step.q, step.positions, step.tables))
    alone = replace(step, q=q, positions=positions, tables=tables, num_decode=1, prefill=[])
    assert np.array_equal(alone.attend()[0], out[5]), "a row alone"
    # Two units: a helper begins later and is not done when the caller is.
    two = random_step(rng, random_pages(rng, 1, 64, 64, dtype), 3, [1500, 1500])
    ones = [slice(i, i + 1) for i in (0, 1)]
    each = [replace(two, q=two.q[i], positions=two.positions[i], tables=two.tables[i], num_decode=1) for i in ones]
    alone = np.concatenate([one.attend() for one in each])
    run = two.compiled()
    for _ in range(300):
        assert np.array_equal(np.asarray(run()), alone), "waits for its helper"
print(bits.hexdigest())
"""


@pytest.mark.slow
def test_any_number_of_threads_gives_the_same_bits() -> None:
    """The numbers include the caller's thread alone, and more threads than cores."""
    found = set()
    for num_threads in (1, 2, 5):
        # XLA makes its pool as large as NPROC says.
        environment = {**os.environ, "NPROC": str(num_threads), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", BITS_OF_LONG_ROWS]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT)
        assert result.returncode == 0, result.stderr[-2000:]
        found.add(result.stdout)
    assert len(found) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "heads", "head_size", "page_size"), [(1, 3, 64, 64), (17, 2, 7, 5)])
def test_keys_and_values_are_written_where_they_belong_and_nowhere_else(
    num_tokens: int, heads: int, head_size: int, page_size: int, dtype: str
) -> None:
    check_writes(num_tokens, heads, head_size, page_size, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [40, 1000])
def test_many_tokens_are_written_by_several_threads(num_tokens: int, dtype: str) -> None:
    check_writes(num_tokens, 3, 64, 64, dtype)


def check_writes(num_tokens: int, heads: int, head_size: int, page_size: int, dtype: str) -> None:
    """Write tokens to slots at random among as many padding tokens, which have slot 0 and write nothing."""
    rng = np.random.default_rng(num_tokens)
    shapes = (NUM_PAGES, heads, head_size, page_size), (NUM_PAGES, heads, page_size, head_size)
    wanted = [np.array(jnp.asarray(rng.normal(size=shape), dtype), np.float32) for shape in shapes]
    pages = [in_words(array, dtype) for array in wanted]
    first_page, page_step = 1, 2
    slots = 1 + rng.permutation((NUM_PAGES - first_page) // page_step * page_size - 1)[:num_tokens].astype(np.int32)
    slots = rng.permutation(np.concatenate([slots, np.zeros_like(slots)]))
    k, v = (jnp.asarray(rng.normal(size=(len(slots), heads, head_size)), dtype) for _ in range(2))
    for token in np.flatnonzero(slots):
        slot = slots[token]
        page, place = first_page + page_step * (slot // page_size), slot % page_size
        wanted[0][page, :, :, place] = k[token]
        wanted[1][page, :, place] = v[token]

    def write(keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        layer = NativePages(keys, values, jnp.int32(first_page), AttendOptions(1.0), page_step)
        return write_pages(layer, k, v, jnp.asarray(slots))

    found = jax.jit(write, donate_argnums=(0, 1))(*pages)
    for array, expected in zip(found, wanted, strict=True):
        assert np.array_equal(np.asarray(array), np.asarray(in_words(expected, dtype)))


@pytest.mark.parametrize(("kind", "largest", "num_units"), [("exp", 87, 2), ("exp2", 125, 1)])
def test_exponentials_are_within_units_of_the_last_place(kind: str, largest: int, num_units: int) -> None:
    def prepare(code: Code, call: Call) -> Work:
        source = call.arguments[0]
        return Work([source.data, call.results[0].data, source.size(0)], [I64(1)], BIT(0))

    def body(code: Code, given: list[Any], unit: Any) -> None:
        source, target, size = given

        def compute(at: ir.Value) -> None:
            code.store_vector(getattr(code, kind)(code.load_vector(source, at, F32, 16)), target, at)

        code.loop(0, size, compute, step=16)

    name = register(f"jpaged_test_{kind}", lambda: handler(f"jpaged_test_{kind}", 1, 1, prepare, body))
    x = -np.concatenate([np.linspace(0, largest, 1 << 16), np.geomspace(1e-30, 1, 1 << 12)]).astype(np.float32)
    out = np.asarray(jax.jit(lambda x: jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, x.dtype))(x))(x))
    wanted = getattr(np, kind)(x.astype(np.float64))
    assert (np.abs(out - wanted) <= num_units * np.spacing(wanted.astype(np.float32))).all()
    assert out[0] == 1


@pytest.mark.parametrize("has_avx512_bf16", [False, True])
def test_numbers_are_rounded_to_bfloat16_to_nearest_even(has_avx512_bf16: bool) -> None:
    if has_avx512_bf16 and not processor.host_has("avx512bf16"):
        pytest.skip("this processor has no products of pairs")

    def prepare(code: Code, call: Call) -> Work:
        source = call.arguments[0]
        return Work([source.data, call.results[0].data, source.size(0)], [I64(1)], BIT(0))

    def body(code: Code, given: list[Any], unit: Any) -> None:
        source, target, size = given

        def some(at: Any) -> None:
            code.store_rounded(code.load_vector(source, at, F32, 16), target, at, has_avx512_bf16=has_avx512_bf16)

        code.loop(0, size, some, step=16)

    name = f"jpaged_test_rounded_{has_avx512_bf16}"
    register(name, lambda: handler(name, 1, 1, prepare, body))
    # Every pair of neighbours, what lies in their middle, and beside that.
    bits = np.arange(0x3800, 0x4000, dtype=np.uint32)[:, None] << 16 | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = np.concatenate([bits.astype(np.uint32).ravel(), np.zeros(16, np.uint32)]).view(np.float32)
    x = x[: len(x) // 16 * 16]
    out = jax.jit(lambda x: jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, jnp.uint16))(x))(x)
    assert np.array_equal(np.asarray(out), np.asarray(jnp.asarray(x).astype(jnp.bfloat16)).view(np.uint16))
