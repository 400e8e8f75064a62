"""Times attention over pages here, beside what the machine could do and what is naive.

    python scripts/bench/kernels.py --backend xla -o kernels.json

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

With `--kv-dtype int8` or `fp8` only decode over pages of that dtype is timed, beside pages of the queries' dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.checks import check, one_of, or_none
from jpaged.commands.bench.kernels import (
    HEAD_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    Program,
    Workload,
    chain_of_layers,
    compiled,
    measure,
    paged,
    random_pages,
)
from jpaged.commands.bench.report import add_report_flags, machine, parse_bench, write_report
from jpaged.commands.flags import FlagParser
from jpaged.commands.process import run_command
from jpaged.commands.progress import say
from jpaged.errors import ConfigError
from jpaged.pallas_kernels.ragged_paged_attention.interface import (
    AttentionShape,
    Backend,
)
from jpaged.pallas_kernels.ragged_paged_attention.names import BACKEND_NAMES, BACKENDS
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend
from jpaged.startup.attention.choice import choose_attention

LLAMA_8B = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
GATHER_KINDS = ("full gather", "grouped", "naive")
READ_BYTES, NUM_READS = 256 << 20, 16
"""Size of the array that is read, and how often one program reads it, so that a launch takes little of its time."""


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
BYTE_DECODES = {
    "16 × 2048": Workload(16, 2048, 8),
    "1 × 2048": Workload(1, 2048, 8),
    "Llama 8B, 16 × 2048": Workload(16, 2048, 2, **LLAMA_8B),
}
KV_DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn"}
SHARED = {
    "16 × 1000, 896 shared": Workload(16, 1000, 8, num_shared=896),
    "64 × 600, 512 shared": Workload(64, 600, 8, num_shared=512),
}
PREFILLS = {"512 at 0": Workload(1, 512, 4, 512), "512 at 2000": Workload(1, 2512, 4, 512)}


def kv_bytes(workload: Workload, dtype: str) -> int:
    """Return the bytes of the keys and values of all rows in one layer."""
    num_values = sum(workload.context_lens) * 2 * workload.num_kv_heads * workload.head_size
    return num_values * jnp.dtype(dtype).itemsize


def full_gather(workload: Workload, page_size: int, kind: str) -> Program:
    """Return a program that copies, for every row, all pages that its table has room for, to [R, P × Z, heads, H].

    Attention is then dense and masked. `kind` is one of `GATHER_KINDS`: "full gather" repeats the KV heads for each
    query head, "grouped" does not, and "naive" repeats them and keeps its pages as tokens [C, Z, K, H], while the
    others keep the `xla` backend's layout [C, K, Z, H]. Keys and values of the step are written first.
    """
    cache, step = random_pages(XlaBackend(), workload, page_size, "float32", 1)
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

    return chain_of_layers(attend, pages, workload, "float32")


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

    return chain_of_layers(attend, context, workload, dtype)


def read_bandwidth() -> Program:
    """Return a program that sums a large array `NUM_READS` times, in rows, so that all cores take part.

    Its time per layer is the time of one read.
    """
    state = jnp.ones((256, READ_BYTES // 4 // 256), jnp.float32), jnp.zeros(256)

    def read(_: Any, state: Any) -> Any:
        # The barrier hides from XLA that the array is the last read's, whose sum it could use again.
        array, sums = jax.lax.optimization_barrier(state)
        return array, sums + jnp.sum(array, axis=1)

    return compiled(lambda state: jax.lax.fori_loop(0, NUM_READS, read, state), state, NUM_READS)


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
        kv_bytes_per_s = kv_bytes(workload, dtype) / median(measured["paged"].times_s)
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


def bench_kv_dtype(backend: Backend, kv_dtype: str, *, page_size: int, dtype: str, num_runs: int) -> dict[str, Any]:
    """Measure decode over pages of `dtype` and over those of `kv_dtype` in turns; return ratios and times."""
    ratios: dict[str, dict[str, float]] = {}
    times_ms: dict[str, dict[str, float]] = {}
    for name, workload in BYTE_DECODES.items():
        say(f"decode: {name}")
        programs = {of: paged(backend, workload, page_size, dtype, kv_dtype=of) for of in (dtype, kv_dtype)}
        measure(programs, num_runs)
        times_ms[f"decode, {name}"] = {of: program.ms for of, program in programs.items()}
        ratios[f"decode, {name}"] = {f"{dtype} ÷ {kv_dtype} pages": _ratio(programs, dtype, kv_dtype)}
    return {"ratios": ratios, "ms_per_layer": times_ms}


def main(argv: Sequence[str]) -> int:
    """Run the bench; the table goes to stderr, the JSON to stdout or a file."""
    parser = FlagParser(prog="kernels.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--backend", default="auto", help=f"auto or one of {', '.join(BACKEND_NAMES)}")
    defaults = ", ".join(f"{entry.block_size} with {entry.name}" for entry in BACKENDS)
    help = f"tokens per page; default as the backend serves: {defaults}"
    parser.add_argument("--block-size", type=int, metavar="N", help=help)
    help = f"time decode over pages of this dtype alone: {', '.join(KV_DTYPES)}"
    parser.add_argument("--kv-dtype", metavar="DTYPE", help=help)
    add_report_flags(parser, 7, "interleaved runs of everything")
    args = parse_bench(parser, argv, "block_size")
    device = jax.devices()[0]
    check("--backend", args.backend, one_of("auto", *BACKEND_NAMES), error=ConfigError)
    check("--kv-dtype", args.kv_dtype, or_none(one_of(*KV_DTYPES)), error=ConfigError)
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
        options: dict[str, Any] = {"page_size": page_size, "dtype": dtype, "num_runs": args.runs}
        if args.kv_dtype is None:
            result = bench(backend, **options)
        else:
            result = bench_kv_dtype(backend, KV_DTYPES[args.kv_dtype], **options)
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


def _temp_bytes(program: Program) -> int:
    """Return the bytes of temporary memory that the program needs beside its state."""
    return int(program.run.memory_analysis().temp_size_in_bytes)


def _ratio(programs: dict[str, Program], over: str, under: str) -> float:
    """Return the ratio of two programs' median times to three digits; a small one is not 0."""
    return float(f"{median(programs[over].times_s) / median(programs[under].times_s):.3g}")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
