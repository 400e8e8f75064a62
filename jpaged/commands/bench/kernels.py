"""`jpaged bench kernels`: what attention over pages costs here, beside what the machine could do and what is naive.

The shapes are those of SmolLM2-135M, 9 query and 3 KV heads of 64; full gathers are also made at those of Llama 3 8B,
32 and 8 heads of 128. Layers are chained, each with pages of its own: what a layer writes depends on what the layer
before attended to, as in a model. Runs of programs that are compared are interleaved.

    decode        rows with one query; bytes of keys and values ÷ time, beside the bandwidth of reading an array; rows
                  of one length, and ragged ones, longest first
    full gather   the same result from every page that the page tables have room for, copied together and masked, the
                  KV heads repeated for each query head; grouped: without repeating them; naive: repeated, from pages
                  of tokens [C, Z, K, H] by one product over all heads, as one would write it down
    shared        rows that begin with the same pages: attended to once, beside each by itself
    prefill       a chunk of one row, beside dense attention over contiguous keys and values
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...checks import check, one_of
from ...errors import ConfigError
from ...pallas_kernels.ragged_paged_attention.interface import (
    NULL_PAGE,
    AttentionMetadata,
    AttentionShape,
    Backend,
    KVShape,
    LayerPlace,
)
from ...pallas_kernels.ragged_paged_attention.names import BACKEND_NAMES, BACKENDS
from ...pallas_kernels.ragged_paged_attention.paged_cache import PagedCache
from ...pallas_kernels.ragged_paged_attention.plain_steps import random_tables, step_of_rows
from ...pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend
from ...startup.attention.choice import choose_attention
from ..flags import FlagParser
from ..progress import say
from .report import add_report_flags, machine, parse_bench, write_report

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 9, 3, 64
LLAMA_8B = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
GATHER_KINDS = ("full gather", "grouped", "naive")
READ_BYTES, NUM_READS = 256 << 20, 16
"""Size of the array that is read, and how often one program reads it, so that a launch takes little of its time."""


@dataclass(frozen=True)
class Workload:
    """Rows of a step: of one length, or of lengths spread evenly between two."""

    num_rows: int
    context_len: int
    """Tokens of the longest row, with the step's own tokens."""
    num_layers: int
    query_len: int = 1
    num_shared: int = 0
    """Tokens that all rows begin with, whose pages are the same."""
    shortest_len: int | None = None
    """Context of the shortest row; None: as long as the longest."""
    table_len: int | None = None
    """Tokens that a page table has room for; None: as many as the context."""
    num_heads: int = NUM_HEADS
    num_kv_heads: int = NUM_KV_HEADS
    head_size: int = HEAD_SIZE

    @property
    def context_lens(self) -> list[int]:
        """Return the tokens of each row, longest first, as the engine orders them."""
        shortest = self.context_len if self.shortest_len is None else self.shortest_len
        return np.linspace(self.context_len, shortest, self.num_rows).astype(int).tolist()

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of the keys and values of all rows in one layer, in float32."""
        return sum(self.context_lens) * 2 * self.num_kv_heads * self.head_size * 4

    @property
    def scale(self) -> float:
        """Return the factor of the scores."""
        return self.head_size**-0.5


DECODES = {
    "16 × 200": Workload(16, 200, 30),
    "16 × 1000": Workload(16, 1000, 30),
    "16 × 60…1000": Workload(16, 1000, 30, shortest_len=60),
    "32 × 30…1000": Workload(32, 1000, 30, shortest_len=30),
}
GATHERS = {
    "16 × 2048": Workload(16, 2048, 4, table_len=2048),
    "16 × 128 in tables of 2048": Workload(16, 128, 4, table_len=2048),
    "Llama 8B, 16 × 2048": Workload(16, 2048, 4, table_len=2048, **LLAMA_8B),
    "Llama 8B, 16 × 128 in tables of 2048": Workload(16, 128, 4, table_len=2048, **LLAMA_8B),
}
SHARED = {
    "16 × 1000, 896 shared": Workload(16, 1000, 8, num_shared=896),
    "64 × 600, 512 shared": Workload(64, 600, 8, num_shared=512),
}
PREFILLS = {"512 at 0": Workload(1, 512, 4, 512), "512 at 2000": Workload(1, 2512, 4, 512)}


@dataclass
class Program:
    """A compiled step and its state, which each run donates; `times_s` are the seconds per layer of each run."""

    run: Any
    state: Any
    num_layers: int
    times_s: list[float]

    def time(self) -> None:
        """Run the step once and record its seconds per layer."""
        start = time.perf_counter()
        self.state = jax.block_until_ready(self.run(self.state))
        self.times_s.append((time.perf_counter() - start) / self.num_layers)

    @property
    def ms(self) -> float:
        """Return the median milliseconds per layer."""
        return round(1e3 * median(self.times_s), 4)


def paged(backend: Backend, workload: Workload, page_size: int, dtype: str, *, num_copies: int = 1) -> Program:
    """Return the workload over pages in random order, in a cache of `num_copies` times the pages that its rows need."""
    cache, step = _pages(backend, workload, page_size, dtype, num_copies)

    def attend(layer: int, cache: PagedCache, q: Any, k: Any, v: Any) -> tuple[Any, PagedCache]:
        return cache.attend(layer, q, k, v, step, scale=workload.scale)

    return _compiled(attend, cache, workload, dtype)


def full_gather(workload: Workload, page_size: int, kind: str) -> Program:
    """Return a program that copies, for every row, all pages that its table has room for, to [R, P × Z, heads, H].

    Attention is then dense and masked. `kind` is one of `GATHER_KINDS`: "full gather" repeats the KV heads for each
    query head, "grouped" does not, and "naive" repeats them and keeps its pages as tokens [C, Z, K, H], while the
    others keep the `xla` backend's layout [C, K, Z, H]. Keys and values of the step are written first.
    """
    cache, step = _pages(XlaBackend(), workload, page_size, "float32", 1)
    num_pages, is_naive = cache.layout.num_pages, kind == "naive"
    pages = tuple(x.transpose(0, 2, 1, 3) for x in cache.pages) if is_naive else cache.pages

    def attend(layer: int, pages: tuple[Any, Any], q: Any, k: Any, v: Any) -> tuple[Any, tuple[Any, Any]]:
        first = layer * num_pages
        page, offset = first + step.slot_mapping[0] // page_size, step.slot_mapping[0] % page_size
        tables = first + step.page_tables[0]
        is_seen = jnp.arange(tables.shape[1] * page_size)[None] < step.context_lens[:, None]
        slots = (page, offset) if is_naive else (page, slice(None), offset)
        pages = pages[0].at[slots].set(k), pages[1].at[slots].set(v)
        keys, values = (jnp.take(x, tables, axis=0) for x in pages)
        if not is_naive:
            keys, values = (x.transpose(0, 1, 3, 2, 4) for x in (keys, values))
        keys, values = (x.reshape(len(q), -1, workload.num_kv_heads, workload.head_size) for x in (keys, values))
        if not is_naive:
            values = jnp.where(is_seen[:, :, None, None], values, 0.0)
        if kind != "grouped":
            keys, values = (jnp.repeat(x, workload.num_heads // workload.num_kv_heads, axis=2) for x in (keys, values))
        q_RKGH = q.reshape(len(q), keys.shape[2], -1, workload.head_size)
        scores = jnp.einsum("rkgh,rskh->rkgs", q_RKGH, keys) * workload.scale
        weights = jax.nn.softmax(jnp.where(is_seen[:, None, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("rkgs,rskh->rkgh", weights, values).reshape(q.shape), pages

    return _compiled(attend, pages, workload, "float32")


def dense(workload: Workload, dtype: str) -> Program:
    """Return a program in which the queries of one row attend to contiguous keys and values: all scores, masked."""
    start, shape = workload.context_len - workload.query_len, (workload.num_kv_heads, workload.head_size)
    context = jax.random.normal(jax.random.key(3), (2, workload.context_len, *shape), dtype)
    is_seen_TS = jnp.arange(workload.context_len)[None] <= jnp.arange(start, workload.context_len)[:, None]

    def attend(layer: int, context: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        context = context.at[0, start:].set(k).at[1, start:].set(v)
        q_TKGH = q.reshape(len(q), workload.num_kv_heads, -1, workload.head_size)
        scores = jnp.einsum("tkgh,skh->kgts", q_TKGH, context[0], preferred_element_type=jnp.float32) * workload.scale
        weights = jax.nn.softmax(jnp.where(is_seen_TS[None, None], scores, -jnp.inf), axis=-1).astype(dtype)
        return jnp.einsum("kgts,skh->tkgh", weights, context[1]).reshape(q.shape), context

    return _compiled(attend, context, workload, dtype)


def read_bandwidth() -> Program:
    """Return a program that sums a large array `NUM_READS` times, in rows, so that all cores take part.

    Its time per layer is the time of one read.
    """
    state = jnp.ones((256, READ_BYTES // 4 // 256), jnp.float32), jnp.zeros(256)

    def read(_: Any, state: Any) -> Any:
        # The barrier hides from XLA that the array is the last read's, whose sum it could use again.
        array, sums = jax.lax.optimization_barrier(state)
        return array, sums + jnp.sum(array, axis=1)

    return _program(lambda state: jax.lax.fori_loop(0, NUM_READS, read, state), state, NUM_READS)


def measure(programs: dict[str, Program], num_runs: int) -> None:
    """Time all programs in interleaved runs, after one run of each that is not counted."""
    for program in programs.values():
        program.time()
        program.times_s.clear()
    for _ in range(num_runs):
        for program in programs.values():
            program.time()


def bench(backend: Backend, *, page_size: int, dtype: str, num_runs: int) -> dict[str, Any]:
    """Measure every workload, each beside a read of memory; return ratios, times and the read bandwidth.

    Shared pages and full gathers are left out where the backend does not share prefixes.
    """
    sharing = backend.with_shared_prefixes()
    ratios: dict[str, dict[str, float]] = {}
    times_ms: dict[str, dict[str, float]] = {}
    bandwidths: list[float] = []

    def timed(kind: str, name: str, programs: dict[str, Program]) -> dict[str, Program]:
        """Run the programs and a read of memory in turns, and record their times."""
        programs = {"read": read_bandwidth(), **programs}
        say(f"{kind}: {name}")
        measure(programs, num_runs)
        bandwidths.append(READ_BYTES / median(programs["read"].times_s))
        times_ms[f"{kind}, {name}"] = {key: program.ms for key, program in programs.items() if key != "read"}
        return programs

    for name, workload in DECODES.items():
        measured = timed("decode", name, {"paged": paged(backend, workload, page_size, dtype)})
        kv_bytes_per_s = workload.kv_bytes * jnp.dtype(dtype).itemsize / 4 / median(measured["paged"].times_s)
        temp_bytes = _temp_bytes(measured["paged"])
        twice_bytes = _temp_bytes(paged(backend, workload, page_size, dtype, num_copies=2))
        cache_bytes = sum(page.nbytes for page in measured["paged"].state[0].pages)
        ratios[f"decode, {name}"] = {
            "KV bytes/s ÷ read bandwidth": round(kv_bytes_per_s / bandwidths[-1], 3),
            "temporary memory ÷ pages of these rows": round(temp_bytes / cache_bytes, 4),
            "temporary memory at twice the pages ÷ at once": round(twice_bytes / temp_bytes, 4),
        }
    if sharing is not None:
        for name, workload in GATHERS.items():
            gathers = {kind: full_gather(workload, page_size, kind) for kind in GATHER_KINDS}
            measured = timed("full gather", name, {"paged": paged(backend, workload, page_size, "float32"), **gathers})
            ratios[f"full gather, {name}"] = {f"{kind} ÷ paged": _ratio(measured, kind, "paged") for kind in gathers}
        for name, workload in SHARED.items():
            pair = {"off": paged(backend, workload, page_size, dtype), "on": paged(sharing, workload, page_size, dtype)}
            measured = timed("shared", name, pair)
            ratios[f"shared, {name}"] = {"on ÷ off": _ratio(measured, "on", "off")}
    for name, workload in PREFILLS.items():
        pair = {"paged": paged(backend, workload, page_size, dtype), "dense": dense(workload, dtype)}
        measured = timed("prefill", name, pair)
        ratios[f"prefill, {name}"] = {"paged ÷ dense": _ratio(measured, "paged", "dense")}
    return {"ratios": ratios, "ms_per_layer": times_ms, "read_bytes_per_s": round(median(bandwidths))}


def main(argv: Sequence[str]) -> int:
    """Run the bench; the table goes to stderr, the JSON to stdout or a file."""
    parser = FlagParser(prog="jpaged bench kernels", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--backend", default="auto", help=f"auto or one of {', '.join(BACKEND_NAMES)}")
    defaults = ", ".join(f"{entry.block_size} with {entry.name}" for entry in BACKENDS)
    help = f"tokens per page; default as the backend serves: {defaults}"
    parser.add_argument("--block-size", type=int, metavar="N", help=help)
    add_report_flags(parser, 7, "interleaved runs of everything")
    args = parse_bench(parser, argv, "block_size")
    device = jax.devices()[0]
    check("--backend", args.backend, one_of("auto", *BACKEND_NAMES), error=ConfigError)
    entry = next((entry for entry in BACKENDS if entry.name == args.backend), None)
    if entry is not None and not entry.runs_on(device.platform):
        raise ConfigError(
            f"--backend: got {args.backend}, which runs on a {' or '.join(entry.platforms)}, this is a "
            f"{device.platform}; use --backend xla"
        )
    dtype = "float32" if device.platform == "cpu" else "bfloat16"
    shape = AttentionShape(NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, kv_dtype=dtype)
    backend = choose_attention(args.backend, shape, [device]).backend
    page_size = args.block_size or backend.block_sizes[0]
    try:
        result = bench(backend, page_size=page_size, dtype=dtype, num_runs=args.runs)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    result = {
        "what": "attention over pages; medians of interleaved runs; 9 query and 3 KV heads of 64 if no model is named",
        **result,
        "backend": backend.name,
        "block_size": page_size,
        "dtype": dtype,
        "runs": args.runs,
        **machine(device),
    }
    for name, values in result["ratios"].items():
        say(f"{name:40} " + "  ".join(f"{key} {value}" for key, value in values.items()))
    write_report(result, args.output)
    return 0


def _pages(
    backend: Backend, workload: Workload, page_size: int, dtype: str, num_copies: int
) -> tuple[PagedCache, AttentionMetadata]:
    """Return a cache with random pages, and the step's metadata, whose page tables name them in random order."""
    num_layers, num_rows, query_len = workload.num_layers, workload.num_rows, workload.query_len
    tables = random_tables(workload.context_lens, page_size, np.random.default_rng(0))
    num_pages, num_shared = 1 + num_copies * int(tables.max()), workload.num_shared // page_size
    tables[:, :num_shared] = tables[0, :num_shared]
    layout = backend.layout(KVShape(num_layers, num_pages, page_size, workload.num_kv_heads, workload.head_size, dtype))
    pages = tuple(jax.random.normal(jax.random.key(index), shape, dtype) for index, shape in enumerate(layout.shapes))
    places = tuple(LayerPlace(0, layer) for layer in range(num_layers))
    num_more = -(-(workload.table_len or workload.context_len) // page_size) - tables.shape[1]
    tables = np.pad(tables, ((0, 0), (0, num_more)), constant_values=NULL_PAGE)
    step = step_of_rows(
        backend,
        [query_len] * num_rows,
        workload.context_lens,
        tables,
        page_size=page_size,
        num_tokens=num_rows * query_len,
        num_rows=num_rows,
        decodes_only=query_len == 1,
    )
    return PagedCache(pages, layout, places, backend), step


def _compiled(attend: Callable[..., tuple[Any, Any]], cache: Any, workload: Workload, dtype: str) -> Program:
    """Compile a chain of layers, each of whose queries, keys and values come from what the one before attended to."""
    num_tokens, num_kv_heads = workload.num_rows * workload.query_len, workload.num_kv_heads
    q, k, v = (
        jax.random.normal(jax.random.key(10 + index), (num_tokens, heads, workload.head_size), dtype)
        for index, heads in enumerate((workload.num_heads, num_kv_heads, num_kv_heads))
    )

    def run(state: tuple[Any, ...]) -> tuple[Any, ...]:
        cache, q, k, v = state
        for layer in range(workload.num_layers):
            out, cache = attend(layer, cache, q, k, v)
            mean = out[:, :num_kv_heads].astype(dtype)
            q, k, v = 0.9 * q + 0.1 * out.astype(dtype), 0.9 * k + 0.1 * mean, 0.9 * v + 0.1 * mean
        return cache, q, k, v

    return _program(run, (cache, q, k, v), workload.num_layers)


def _program(run: Callable[[Any], Any], state: Any, num_layers: int) -> Program:
    """Compile a function from a donated state to the next state."""
    return Program(jax.jit(run, donate_argnums=0).lower(state).compile(), state, num_layers, [])


def _temp_bytes(program: Program) -> int:
    """Return the bytes of temporary memory that the program needs beside its state."""
    return int(program.run.memory_analysis().temp_size_in_bytes)


def _ratio(programs: dict[str, Program], over: str, under: str) -> float:
    """Return the ratio of two programs' median times to three digits; a small one is not 0."""
    return float(f"{median(programs[over].times_s) / median(programs[under].times_s):.3g}")
