"""Checks attention kernels on this device against the oracle; shared by `gpu_check` and `tpu_check`.

    NaN-filled pages ──▶ prefill steps of each row's history ──▶ the step that is checked ──▶ dense oracle

All keys and values are written through the backend itself, so that this module knows no layout of pages. Inputs are
random and new in each run, whose seed is printed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.pallas_kernels.ragged_paged_attention.interface import (
    NULL_PAGE,
    AttentionMetadata,
    Backend,
    KVLayout,
    KVShape,
    LayerPlace,
)
from jpaged.pallas_kernels.ragged_paged_attention.kv_scales import KVScales
from jpaged.pallas_kernels.ragged_paged_attention.paged_cache import PagedCache
from jpaged.pallas_kernels.ragged_paged_attention.plain_steps import random_tables, step_of_rows
from tests.pallas_kernels.ragged_paged_attention.dense_attention import dense_attention

from .items import Part

MOST_ERROR = 1e-2
"""The most error of a head's output, relative to its norm: a weight, a value and their sum, each rounded to 8 bits."""
MOST_ERROR_FLOAT32 = 1e-4
"""The most error in float32: sums of exact products, times a hundred for approximate powers and reciprocals."""
NUM_REPEATS = 20
"""How often a checked step runs again on a device: a race between two thread blocks shows only in some runs."""
HISTORY_TOKENS = 64
"""The fewest tokens of history that a step has room to write."""


@dataclass(frozen=True)
class Rows:
    """Rows of a step, those with one query first: `query_lens` new tokens each, `context_lens` with them."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_tokens: int
    """Tokens that the step has room for; those beyond the rows' own are padding."""
    num_rows: int
    num_shared: int = 0
    """Tokens of common first pages, a multiple of the page size; all rows with at least so much history share them."""

    @property
    def sharing(self) -> list[int]:
        """Return the rows that share their first pages; the first of these rows writes them."""
        lens = enumerate(zip(self.query_lens, self.context_lens, strict=True))
        return [row for row, (new, known) in lens if known - new >= self.num_shared > 0]


MIXED = Rows(
    (*[1] * 8, 2, 64, 65, 300, 33), (1, 63, 64, 65, 700, 2048, 2049, 3000, 2, 64, 640, 300, 2500), 512, num_rows=16
)
SHARED = dataclasses.replace(MIXED, num_shared=256)
ONE_TOKEN = Rows((1,), (2500,), num_tokens=1, num_rows=1)
ONLY_DECODE = Rows((1,) * 7, (1, 64, 2047, 2048, 2049, 2304, 3000), num_tokens=8, num_rows=8)
TINY = Rows((1, 1, 3, 17), (1, 66, 3, 40), 64, num_rows=4)


@dataclass(frozen=True)
class Case:
    """One kind of kernel to check. `backend` holds the backend's options that do not follow from the other fields."""

    name: str
    num_heads: int = 8
    num_kv_heads: int = 2
    head_size: int = 128
    dtype: str = "bfloat16"
    page_size: int = 64
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    rows: Rows = MIXED
    backend: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    layer: int = 0
    """Index of the layer that attends; the cache has `layer + 1` layers."""
    is_freed: bool = False
    """Whether pages left behind by the window are freed before the checked step, their table entries null."""
    num_numbers: int = 0
    """The fewest numbers in each array before the rows' pages: from 2³¹ on, an offset needs 64 bits."""

    @property
    def most_error(self) -> float:
        return MOST_ERROR_FLOAT32 if self.dtype == "float32" else MOST_ERROR

    @property
    def input_dtype(self) -> str:
        return "float32" if self.dtype == "float32" else "bfloat16"


@dataclass
class Batch:
    """One step with its cache and arrays, ready to run; `options` are keyword arguments of `attend`."""

    case: Case
    cache: PagedCache
    step: AttentionMetadata
    q: jax.Array
    k: jax.Array
    v: jax.Array
    options: dict[str, Any]


@dataclass(frozen=True)
class Work:
    """The work of one step: the rows that take part, their new tokens, and their contexts with these."""

    rows: tuple[int, ...]
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_tokens: int
    num_rows: int

    @property
    def decodes_only(self) -> bool:
        """Return whether every row has one query: the engine has programs of their own for such steps."""
        return set(self.query_lens) == {1}


def works(rows: Rows) -> Iterator[Work]:
    """Yield the steps that write the rows' history, a chunk of tokens each, and then the step that is checked."""
    sizes = max(rows.num_tokens, HISTORY_TOKENS), rows.num_rows
    missing = [context - query for query, context in zip(rows.query_lens, rows.context_lens, strict=True)]
    done = [0] * len(missing)
    for row in rows.sharing[1:]:
        done[row], missing[row] = rows.num_shared, missing[row] - rows.num_shared
    while any(missing):
        room, lens = sizes[0], {}
        for row, length in enumerate(missing):
            if taken := min(room, length):
                room, lens[row] = room - taken, taken
                done[row], missing[row] = done[row] + taken, length - taken
        order = sorted(lens, key=lambda row: lens[row] != 1)
        yield Work(tuple(order), tuple(lens[row] for row in order), tuple(done[row] for row in order), *sizes)
    every = tuple(range(len(missing)))
    yield Work(every, rows.query_lens, rows.context_lens, rows.num_tokens, rows.num_rows)


def step_of(backend: Backend, work: Work, tables: np.ndarray, page_size: int) -> AttentionMetadata:
    """Return the metadata of a step; `tables` [rows, P] are the page tables of all rows."""
    return step_of_rows(
        backend,
        work.query_lens,
        work.context_lens,
        tables[list(work.rows)],
        page_size=page_size,
        num_tokens=work.num_tokens,
        num_rows=work.num_rows,
        decodes_only=work.decodes_only,
    )


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def random_numbers(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return random numbers, made on the device: normal ones, or integers from −100 to 100 in int8."""
    if jnp.dtype(dtype) == jnp.int8:
        return jax.random.randint(key, shape, -100, 101, jnp.int32).astype(jnp.int8)
    source = jnp.float32 if jnp.dtype(dtype) == jnp.float32 else jnp.bfloat16
    return jax.random.normal(key, shape, source).astype(dtype)


def random_elements(key: jax.Array, shape: tuple[int, ...], dtype: Any, stored_dtype: Any) -> jax.Array:
    """Return random elements of `stored_dtype`, each holding one or two numbers of `dtype`."""
    in_one = np.dtype(stored_dtype).itemsize // np.dtype(dtype).itemsize
    numbers = random_numbers(key, shape if in_one == 1 else (*shape, in_one), dtype)
    return jax.lax.bitcast_convert_type(numbers, stored_dtype)


@functools.partial(jax.jit, static_argnames=("layer", "scale", "window", "soft_cap"), donate_argnums=0)
def attend(
    cache: PagedCache, q: jax.Array, k: jax.Array, v: jax.Array, step: AttentionMetadata, *, layer: int, **options: Any
) -> tuple[jax.Array, PagedCache]:
    """Attend in one layer of a donated cache; steps of the same shapes and options are one program."""
    return cache.attend(layer, q, k, v, step, **options)


class Bench:
    """Holds the backend of each case, on the device or interpreted, and the random numbers of this run.

    A checked step runs `num_repeats` times more and has to give the same bits each time, since a race changes results
    only at times.
    """

    def __init__(self, backend_of: Callable[[Case], Backend], seed: int, *, num_repeats: int = 0):
        self.backend_of, self.num_repeats, self.seed = backend_of, num_repeats, seed
        self.rng, self.key = np.random.default_rng(seed), jax.random.key(seed)

    def next_key(self) -> jax.Array:
        self.key, key = jax.random.split(self.key)
        return key

    def tables(self, case: Case, context_lens: Sequence[int]) -> np.ndarray:
        """Return page tables [rows, P] with pages in random order; 0 is the null page."""
        page_numbers = min(math.prod(shape) for shape in self.layout(case, 1).shapes)
        first = 1 + -(-case.num_numbers // page_numbers)
        return random_tables(context_lens, case.page_size, self.rng, first_page=first)

    def layout(self, case: Case, num_pages: int) -> KVLayout:
        """Return the layout of the case's cache with `num_pages` pages a layer."""
        sizes = case.layer + 1, num_pages, case.page_size, case.num_kv_heads, case.head_size, case.dtype
        return self.backend_of(case).layout(KVShape(*sizes))

    def cache(self, case: Case, num_pages: int, *, is_dead: bool) -> PagedCache:
        """Return a cache full of NaN (in dtypes without NaN, of the largest number), or of random numbers."""
        layout = self.layout(case, num_pages)
        pages = tuple(
            jnp.full(shape, layout.unwritten)
            if is_dead
            else random_elements(self.next_key(), shape, layout.dtype, layout.stored_dtype)
            for shape in layout.shapes
        )
        scales = None
        if layout.dtype.itemsize == 1:
            most, shape = 127 if case.dtype == "int8" else 448, (case.layer + 1, case.num_kv_heads)
            scales = KVScales(
                *(jax.random.uniform(self.next_key(), shape, minval=4, maxval=8) / most for _ in range(2))
            )
        layers = tuple(LayerPlace(0, index) for index in range(case.layer + 1))
        return PagedCache(pages, layout, layers, self.backend_of(case), scales)

    def inputs(self, case: Case, num_real: int, num_tokens: int) -> list[jax.Array]:
        """Return random queries, keys and values [T, heads, H]; those of padding tokens are NaN."""
        is_real = jnp.arange(num_tokens)[:, None, None] < num_real
        return [
            jnp.where(
                is_real,
                random_numbers(self.next_key(), (num_tokens, heads, case.head_size), case.input_dtype),
                jnp.asarray(jnp.nan, case.input_dtype),
            )
            for heads in (case.num_heads, case.num_kv_heads, case.num_kv_heads)
        ]

    def options(self, case: Case) -> dict[str, Any]:
        """Return the keyword arguments of `attend` for this case."""
        options: dict[str, Any] = {"window": case.window, "soft_cap": case.soft_cap, "scale": case.head_size**-0.5}
        if case.has_sinks:
            options["sinks"] = jnp.asarray(self.rng.normal(size=case.num_heads), jnp.float32)
        return options

    def batch(
        self, case: Case, query_lens: Sequence[int], context_lens: Sequence[int], *, pages_of: Batch | None = None
    ) -> Batch:
        """Return a step without padding over random pages, to be timed and not checked.

        With `pages_of`, a batch with as many pages, it takes that batch's pages and allocates none.
        """
        total, rows = sum(query_lens), len(query_lens)
        tables = self.tables(case, context_lens)
        if pages_of is None:
            cache = self.cache(case, int(tables.max()) + 1, is_dead=False)
        else:
            cache = dataclasses.replace(pages_of.cache, backend=self.backend_of(case))
        work = Work(tuple(range(rows)), tuple(query_lens), tuple(context_lens), total, rows)
        step = step_of(cache.backend, work, tables, case.page_size)
        return Batch(case, cache, step, *self.inputs(case, total, total), self.options(case))

    def error(self, case: Case) -> float:
        """Run a case and return the largest error of any head's output, relative to its norm.

        Raises FloatingPointError if an output is not finite, RuntimeError if the step gives other bits when it runs
        again or writes to another layer.
        """
        tables, layer = with_aliases(self.tables(case, case.rows.context_lens), case), case.layer
        cache, options = self.cache(case, int(tables.max()) + 1, is_dead=True), self.options(case)
        scales = (None, None) if cache.scales is None else tuple(np.asarray(x) for x in cache.scales.of_layer(layer))
        histories: list[list[list[np.ndarray]]] = [[[] for _ in case.rows.query_lens] for _ in range(2)]
        *before, checked = works(case.rows)
        for work in (*before, checked):
            total, starts = sum(work.query_lens), np.cumsum([0, *work.query_lens])
            q, k, v = self.inputs(case, total, work.num_tokens)
            for history, x, scale in zip(histories, (k, v), scales, strict=True):
                stored = as_stored(np.asarray(x[:total]), scale, case.dtype)
                for row, start, length in zip(work.rows, starts, work.query_lens, strict=False):
                    history[row].append(stored[start : start + length])
            seen = without_freed(tables, case) if work is checked else tables
            step = step_of(cache.backend, work, seen, case.page_size)
            out, cache = attend(cache, q, k, v, step, layer=layer, **options)
        got = np.asarray(out[:total])
        for _ in range(self.num_repeats):  # It writes the same keys and values again.
            again, cache = attend(cache, q, k, v, step, layer=layer, **options)
            if np.asarray(again[:total]).tobytes() != got.tobytes():
                raise RuntimeError("the same step gives other bits when it is run again")
        entries = cache.layout.entry(np.arange(layer)[:, None], np.arange(cache.layout.num_pages)).reshape(-1)
        others = [each[entries] for each in cache.pages]
        if not all((jnp.isnan(each) | (each == cache.layout.unwritten)).all() for each in others):
            raise RuntimeError("pages of another layer were written")
        options = {name: np.asarray(x) if name == "sinks" else x for name, x in options.items()}
        keys, values = ([np.concatenate(row) for row in with_shared(history, case.rows)] for history in histories)
        expected = dense_attention(np.asarray(q[:total], np.float64), keys, values, checked.query_lens, **options)
        errors = np.linalg.norm(got.astype(np.float64) - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        if not np.isfinite(errors).all():
            raise FloatingPointError(
                f"{np.count_nonzero(~np.isfinite(errors))} of {errors.size} outputs are not finite"
            )
        return float(np.max(errors))


def with_aliases(tables: np.ndarray, case: Case) -> np.ndarray:
    """Give all rows that share their first pages those of the first such row, in place; return the tables."""
    num_pages, sharing = case.rows.num_shared // case.page_size, case.rows.sharing
    if sharing:
        tables[sharing, :num_pages] = tables[sharing[0], :num_pages]
    return tables


def without_freed(tables: np.ndarray, case: Case) -> np.ndarray:
    """Return the page tables of the checked step, with null for pages that no query of the row reaches, if freed."""
    if not (case.is_freed and case.window):
        return tables
    first_seen = np.array(case.rows.context_lens) - case.rows.query_lens - case.window + 1
    return np.where(np.arange(tables.shape[1]) < (first_seen // case.page_size)[:, None], NULL_PAGE, tables)


def with_shared(history: list[list[np.ndarray]], rows: Rows) -> list[list[np.ndarray]]:
    """Return the history of each row, [tokens, K, H] each, with the common tokens in front of rows that share pages."""
    first = np.concatenate(history[rows.sharing[0]])[: rows.num_shared] if rows.num_shared else None
    return [[first, *own] if row in rows.sharing[1:] else own for row, own in enumerate(history)]


def as_stored(x: np.ndarray, scale: np.ndarray | None, dtype: str) -> np.ndarray:
    """Return `x` [T, K, H] rounded as in a page of `dtype`, in float64; by numpy, to check the device's rounding."""
    if scale is None:
        return x.astype(dtype).astype(np.float64)
    scaled, limits = x.astype(np.float32) / scale[:, None], jnp.iinfo if dtype == "int8" else jnp.finfo
    most = float(limits(dtype).max)
    clipped = np.clip(np.round(scaled) if dtype == "int8" else scaled, -most, most)
    return clipped.astype(dtype).astype(np.float64) * scale[:, None]


def parts_of(
    backend_of: Callable[[Case], Backend], cases: Sequence[Case], seed: int, *, num_repeats: int = 0
) -> dict[str, Part]:
    """Return a part for each case, named after it. Each has random numbers of its own: parts may run in any order."""
    assert len({case.name for case in cases}) == len(cases), "two cases have the same name: one would not be checked"

    def error(case: Case) -> float:
        return Bench(backend_of, seed ^ zlib.crc32(case.name.encode()), num_repeats=num_repeats).error(case)

    return {case.name: Part(functools.partial(error, case), case.most_error) for case in cases}
