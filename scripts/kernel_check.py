"""Are attention kernels right on this device? What `gpu_check` and `tpu_check` share: cases, and the oracle.

    NaN-filled pages ──▶ prefill steps of each row's history ──▶ the step that is checked ──▶ dense oracle

All is written through the backend itself, so that nothing here knows how its pages are laid out. Inputs are random and
new in each run, whose seed is printed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from jpaged.pallas_kernels.ragged_paged_attention import (  # noqa: E402
    NULL_PAGE,
    AttentionMetadata,
    Backend,
    KVLayout,
    KVScales,
    KVShape,
    LayerPlace,
    PagedCache,
    random_tables,
    step_of_rows,
)
from jpaged.pallas_kernels.ragged_paged_attention.reference import dense_attention  # noqa: E402

MOST_ERROR = 1e-2
"""Of one head's output, relative to its norm: a weight and a value rounded to 8 bits each, and the sum."""
MOST_ERROR_FLOAT32 = 1e-4
"""Sums in float32 of exact products, and a hundred times that for powers and reciprocals that hardware approximates."""
NUM_REPEATS = 20
"""Of each checked step on a device: what two blocks race for, one wins most of the times."""
HISTORY_TOKENS = 64
"""At least so many are written by one step."""


@dataclass(frozen=True)
class Rows:
    """Rows of a step, those with one query first: `query_lens` new tokens each, `context_lens` with them."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_tokens: int
    """That the step has room for; the rest is padding."""
    num_rows: int
    num_shared: int = 0
    """Tokens whose pages all rows share that have known so many: whole pages."""

    @property
    def sharing(self) -> list[int]:
        """The rows that share their first pages; the first of them has written them."""
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
    """One kind of kernel. `backend` are options of the backend that are not told by the rest."""

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
    """Of a cache of so many layers and one more."""
    is_freed: bool = False
    """The pages that lie behind the window are given back before the checked step, their entries null."""
    num_numbers: int = 0
    """That lie in each array before the rows' pages, at least: 2³¹ and more want 64 bits of an address."""

    @property
    def most_error(self) -> float:
        return MOST_ERROR_FLOAT32 if self.dtype == "float32" else MOST_ERROR

    @property
    def input_dtype(self) -> str:
        return "float32" if self.dtype == "float32" else "bfloat16"


@dataclass
class Batch:
    """A step ready to run."""

    case: Case
    cache: PagedCache
    step: AttentionMetadata
    q: jax.Array
    k: jax.Array
    v: jax.Array
    options: dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What one step does: for some rows, so many more tokens and so many with them."""

    rows: tuple[int, ...]
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_tokens: int
    num_rows: int


def works(rows: Rows) -> Iterator[Work]:
    """Steps that write the rows' history, a chunk of tokens each, and then the step that is checked."""
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
    """What attention is told of a step; `tables` [rows, P] are those of all rows."""
    return step_of_rows(
        backend,
        work.query_lens,
        work.context_lens,
        tables[list(work.rows)],
        page_size=page_size,
        num_tokens=work.num_tokens,
        num_rows=work.num_rows,
    )


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def random_numbers(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Made on the device."""
    if jnp.dtype(dtype) == jnp.int8:
        return jax.random.randint(key, shape, -100, 101, jnp.int32).astype(jnp.int8)
    source = jnp.float32 if jnp.dtype(dtype) == jnp.float32 else jnp.bfloat16
    return jax.random.normal(key, shape, source).astype(dtype)


def random_elements(key: jax.Array, shape: tuple[int, ...], dtype: Any, stored_dtype: Any) -> jax.Array:
    """Of arrays that hold numbers of `dtype`, one or two in each element."""
    in_one = np.dtype(stored_dtype).itemsize // np.dtype(dtype).itemsize
    numbers = random_numbers(key, shape if in_one == 1 else (*shape, in_one), dtype)
    return jax.lax.bitcast_convert_type(numbers, stored_dtype)


class Bench:
    """The backend of each case, on the device or interpreted, and the random numbers of this run.

    A checked step is run `num_repeats` times more and has to give the same bits: what a race changes, it changes at
    times.
    """

    def __init__(self, backend_of: Callable[[Case], Backend], seed: int, *, num_repeats: int = 0):
        self.backend_of, self.num_repeats = backend_of, num_repeats
        self.rng, self.key = np.random.default_rng(seed), jax.random.key(seed)

    def next_key(self) -> jax.Array:
        self.key, key = jax.random.split(self.key)
        return key

    def tables(self, case: Case, context_lens: Sequence[int]) -> np.ndarray:
        """Pages in random order [rows, P]; of those numbers 0 is the null page."""
        page_numbers = min(math.prod(shape) for shape in self.layout(case, 1).shapes)
        first = 1 + -(-case.num_numbers // page_numbers)
        return random_tables(context_lens, case.page_size, self.rng, first=first)

    def layout(self, case: Case, num_pages: int) -> KVLayout:
        """Of that many pages a layer."""
        sizes = case.layer + 1, num_pages, case.page_size, case.num_kv_heads, case.head_size, case.dtype
        return self.backend_of(case).layout(KVShape(*sizes))

    def cache(self, case: Case, num_pages: int, *, is_dead: bool) -> PagedCache:
        """Pages full of NaN (the largest number where there is none), or of random numbers."""
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
        """Queries, keys and values; those of padding tokens are NaN."""
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
        """What `attend` is asked for."""
        options: dict[str, Any] = {"window": case.window, "soft_cap": case.soft_cap, "scale": case.head_size**-0.5}
        if case.has_sinks:
            options["sinks"] = jnp.asarray(self.rng.normal(size=case.num_heads), jnp.float32)
        return options

    def batch(
        self, case: Case, query_lens: Sequence[int], context_lens: Sequence[int], *, pages_of: Batch | None = None
    ) -> Batch:
        """A step without padding over pages full of random numbers: for its time, not for its result.

        `pages_of` another batch with as many pages: they are the same arrays.
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
        """The largest error of any head's output, relative to its norm. FloatingPointError if one is not finite.

        RuntimeError if the step, run again, gives other bits, or if it wrote to another layer.
        """
        tables, layer = with_aliases(self.tables(case, case.rows.context_lens), case), case.layer
        cache, options = self.cache(case, int(tables.max()) + 1, is_dead=True), self.options(case)
        attend = jax.jit(lambda cache, q, k, v, step: cache.attend(layer, q, k, v, step, **options), donate_argnums=0)
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
            out, cache = attend(cache, q, k, v, step)
        got = np.asarray(out[:total])
        for _ in range(self.num_repeats):  # Writes what is there already, and so changes nothing.
            again, cache = attend(cache, q, k, v, step)
            if np.asarray(again[:total]).tobytes() != got.tobytes():
                raise RuntimeError("the same step gives other bits when it is run again")
        others = [each[: layer * cache.layout.num_pages] for each in cache.pages]
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
    """The first pages of rows that share them are those of the first such row."""
    num_pages, sharing = case.rows.num_shared // case.page_size, case.rows.sharing
    if sharing:
        tables[sharing, :num_pages] = tables[sharing[0], :num_pages]
    return tables


def without_freed(tables: np.ndarray, case: Case) -> np.ndarray:
    """Page tables of the checked step: null where no query of a row sees anything of a page that was given back."""
    if not (case.is_freed and case.window):
        return tables
    first_seen = np.array(case.rows.context_lens) - case.rows.query_lens - case.window + 1
    return np.where(np.arange(tables.shape[1]) < (first_seen // case.page_size)[:, None], NULL_PAGE, tables)


def with_shared(history: list[list[np.ndarray]], rows: Rows) -> list[list[np.ndarray]]:
    """What each row's pages hold, [tokens, K, H] each: those that share their first pages have another's tokens."""
    first = np.concatenate(history[rows.sharing[0]])[: rows.num_shared] if rows.num_shared else None
    return [[first, *own] if row in rows.sharing[1:] else own for row, own in enumerate(history)]


def as_stored(x: np.ndarray, scale: np.ndarray | None, dtype: str) -> np.ndarray:
    """What a page stands for that `x` [T, K, H] was written to; by numpy: the device's way is checked."""
    if scale is None:
        return x.astype(dtype).astype(np.float64)
    scaled, limits = x.astype(np.float32) / scale[:, None], jnp.iinfo if dtype == "int8" else jnp.finfo
    most = float(limits(dtype).max)
    clipped = np.clip(np.round(scaled) if dtype == "int8" else scaled, -most, most)
    return clipped.astype(dtype).astype(np.float64) * scale[:, None]


def checks(bench: Bench, cases: Sequence[Case]) -> dict[str, tuple[Callable[[], float], float]]:
    """Name → what finds the error of a case, and the most that is forgiven."""
    assert len({case.name for case in cases}) == len(cases), "a name for two cases: one would not be checked"
    return {case.name: (functools.partial(bench.error, case), case.most_error) for case in cases}
