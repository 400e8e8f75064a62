"""Are attention kernels right on this device? What `gpu_check` and `tpu_check` share: cases, the oracle, the report.

    NaN-filled pages ──▶ prefill steps of each row's history ──▶ the step that is checked ──▶ dense oracle

All is written through the backend itself, so that nothing here knows how its pages are laid out. Inputs are random and
new in each run, whose seed is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import subprocess
import sys
import time
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
    AttentionMetadata,
    Backend,
    KVScales,
    LayerPlace,
    PagedCache,
    quantize,
    step_of_rows,
)
from jpaged.pallas_kernels.ragged_paged_attention.reference import dense_attention  # noqa: E402

MOST_ERROR = 1e-2
"""Of one head's output, relative to its norm: a weight and a value rounded to 8 bits each, and the sum."""
MOST_ERROR_FLOAT32 = 1e-4
"""Sums in float32 of exact products, and a hundred times that for powers and reciprocals that hardware approximates."""
LAST_START_S = 7 * 60
HISTORY_TOKENS = 64
"""At least so many are written by one step."""

Goals = dict[str, tuple[str, float]]
Measures = dict[str, Callable[[], dict[str, Any]]]


@dataclass(frozen=True)
class Rows:
    """Rows of a step, those with one query first: `query_lens` new tokens each, `context_lens` with them."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_tokens: int
    """That the step has room for; the rest is padding."""
    num_rows: int


MIXED = Rows(
    (*[1] * 8, 2, 64, 65, 300, 33), (1, 63, 64, 65, 700, 2048, 2049, 3000, 2, 64, 640, 300, 2500), 512, num_rows=16
)
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


class Bench:
    """The backend of each case, on the device or interpreted, and the random numbers of this run."""

    def __init__(self, backend_of: Callable[[Case], Backend], seed: int):
        self.backend_of = backend_of
        self.rng, self.key = np.random.default_rng(seed), jax.random.key(seed)

    def next_key(self) -> jax.Array:
        self.key, key = jax.random.split(self.key)
        return key

    def tables(self, case: Case, context_lens: Sequence[int]) -> np.ndarray:
        """Pages in random order [rows, P]; of those numbers 0 is the null page."""
        lens = -(-np.array(context_lens) // case.page_size)
        tables = np.zeros((len(lens), lens.max()), np.int32)
        tables[np.arange(lens.max()) < lens[:, None]] = 1 + self.rng.permutation(lens.sum())
        return tables

    def cache(self, case: Case, num_pages: int, *, is_dead: bool) -> PagedCache:
        """Pages full of NaN (the largest number where there is none), or of random numbers."""
        backend = self.backend_of(case)
        layout = backend.layout(
            num_layers=1,
            num_pages=num_pages,
            page_size=case.page_size,
            num_kv_heads=case.num_kv_heads,
            head_size=case.head_size,
            dtype=case.dtype,
        )
        dead = jnp.iinfo(layout.dtype).max if layout.dtype == np.int8 else jnp.nan
        pages = tuple(
            jnp.full(shape, dead, layout.dtype) if is_dead else random_numbers(self.next_key(), shape, layout.dtype)
            for shape in layout.shapes
        )
        scales = None
        if layout.dtype.itemsize == 1:
            most, shape = 127 if case.dtype == "int8" else 448, (1, case.num_kv_heads)
            scales = KVScales(
                *(jax.random.uniform(self.next_key(), shape, minval=4, maxval=8) / most for _ in range(2))
            )
        return PagedCache(pages, layout, (LayerPlace(0, 0),), backend, scales)

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

    def batch(self, case: Case, query_lens: Sequence[int], context_lens: Sequence[int]) -> Batch:
        """A step without padding over pages full of random numbers: for its time, not for its result."""
        total, rows = sum(query_lens), len(query_lens)
        tables = self.tables(case, context_lens)
        cache = self.cache(case, int(tables.max()) + 1, is_dead=False)
        work = Work(tuple(range(rows)), tuple(query_lens), tuple(context_lens), total, rows)
        step = step_of(cache.backend, work, tables, case.page_size)
        return Batch(case, cache, step, *self.inputs(case, total, total), self.options(case))

    def error(self, case: Case) -> float:
        """The largest error of any head's output, relative to its norm."""
        tables = self.tables(case, case.rows.context_lens)
        cache, options = self.cache(case, int(tables.max()) + 1, is_dead=True), self.options(case)
        attend = jax.jit(lambda cache, q, k, v, step: cache.attend(0, q, k, v, step, **options), donate_argnums=0)
        scales = (None, None) if cache.scales is None else tuple(np.asarray(x) for x in cache.scales.of_layer(0))
        histories: list[list[list[np.ndarray]]] = [[[] for _ in case.rows.query_lens] for _ in range(2)]
        for work in works(case.rows):
            total, starts = sum(work.query_lens), np.cumsum([0, *work.query_lens])
            q, k, v = self.inputs(case, total, work.num_tokens)
            for history, x, scale in zip(histories, (k, v), scales, strict=True):
                stored = as_stored(x, scale, case.dtype)
                for row, start, length in zip(work.rows, starts, work.query_lens, strict=False):
                    history[row].append(stored[start : start + length])
            out, cache = attend(cache, q, k, v, step_of(cache.backend, work, tables, case.page_size))
        options = {name: np.asarray(x) if name == "sinks" else x for name, x in options.items()}
        keys, values = ([np.concatenate(row) for row in history] for history in histories)
        expected = dense_attention(np.asarray(q[:total], np.float64), keys, values, work.query_lens, **options)
        got = np.asarray(out[:total], np.float64)
        errors = np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        return float(np.max(np.where(np.isnan(errors), np.inf, errors)))


def as_stored(x: jax.Array, scale: np.ndarray | None, dtype: str) -> np.ndarray:
    """What a page stands for that `x` [T, K, H] was written to; converted on the host: a device's way is checked."""
    if scale is None:
        return np.asarray(x.astype(dtype)).astype(np.float64)
    return np.asarray(quantize(x, jnp.asarray(scale), dtype)).astype(np.float64) * scale[:, None]


# The run


def arguments(description: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags of both scripts; a seed is drawn if none is given, and printed."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="anywhere: a few tiny cases, step by step")
    parser.add_argument("--seed", type=int, default=None, help="of the random inputs; a new one each time if not given")
    parser.add_argument("--output", type=Path, help="write what was found here, as JSON")
    args = parser.parse_args(argv)
    if args.seed is None:
        args.seed = int(np.random.SeedSequence().entropy % 2**32)  # type: ignore[operator]
    print(f"seed {args.seed}", flush=True)
    return args


def machine() -> dict[str, Any]:
    """What JAX and the checkout say of themselves."""
    device = jax.devices()[0]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "device": device.device_kind,
        "platform": device.client.platform_version,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "commit": commit.stdout.strip() or None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def check(
    args: argparse.Namespace,
    bench: Bench,
    cases: Sequence[Case],
    measures: Measures,
    goals: Goals,
    *,
    last_start_s: float = LAST_START_S,
) -> int:
    """Check every case, then measure; print the table last. What would begin after `last_start_s` is not done."""
    began = time.monotonic()
    report: dict[str, Any] = {"machine": machine(), "seed": args.seed, "interpreted": args.interpret}
    report |= {"checks": {}, "measured": {}, "not_done": []}

    def attempt(into: str, name: str, do: Callable[[], Any]) -> None:
        """Do it unless it is too late; an error is what was found."""
        if time.monotonic() - began > last_start_s:
            report["not_done"].append(name)
            return
        try:
            report[into][name] = do()
        except Exception as error:
            report[into][name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"{name}: {report[into][name]}", flush=True)

    for case in cases:
        attempt("checks", case.name, lambda case=case: bench.error(case))
    for name, measure in measures.items():
        attempt("measured", name, measure)
    most = {case.name: case.most_error for case in cases}
    wrong = [name for name, found in report["checks"].items() if isinstance(found, str) or not found <= most[name]]
    broken = [name for name, found in report["measured"].items() if isinstance(found, str)]
    report["passed"] = not (wrong or broken or report["not_done"])
    report["seconds"] = round(time.monotonic() - began, 1)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    for name, found in report["measured"].items():
        for key, (relation, goal) in goals.items():
            if isinstance(found, dict) and key in found:
                value = "not measured" if found[key] is None else f"{found[key]:.3f}"
                print(f"{key:12} {value:>12}  goal {relation} {goal:<5}  {name}")
    print(f"{len(report['checks']) - len(wrong)} of {len(report['checks'])} cases right in {report['seconds']} s")
    for title, names in (("wrong", wrong), ("broken", broken), ("not done", report["not_done"])):
        if names:
            print(f"{title}: {', '.join(names)}")
    return not report["passed"]
