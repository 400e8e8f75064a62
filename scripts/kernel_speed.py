"""How fast are attention kernels on this device? Ratios, each between things that ran in turn: K1 to K6.

K1, K2  decoding to a copy on the device      K3      prefill to a product of matrices
K5      a window to full attention            K6      pages of one byte a number to those of two
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from check_report import Goals
from kernel_check import Batch, Bench, Case, random_numbers

GOALS: Goals = {"K1": ("≥", 0.90), "K2": ("≥", 0.9), "K3": ("≥", 0.75), "K5": ("≤", 0.10), "K6": ("≤", 0.60)}
LLAMA = Case("llama", num_heads=32, num_kv_heads=8, head_size=128)

Loop = Callable[[int], Any]
"""Runs something that many times, one after the other."""


@dataclass(frozen=True)
class Sizes:
    """What is measured, and for how long."""

    decode: tuple[tuple[int, ...], ...] = ((8192,) * 64, (4096,) * 128, (1024,) * 256)
    """Contexts of rows of one query; the first also with pages of one byte a number."""
    skewed: tuple[int, ...] = (512,) * 58 + (32768,) * 6
    prefill: int = 8192
    ragged: tuple[int, ...] = (4096, 2500, 1000, 333, 200, 63)
    window: int = 1024
    windowed_rows: int = 16
    copied_bytes: int = 1 << 30
    matmul: int = 8192
    rounds: int = 7
    trial_calls: int = 10
    round_s: float = 0.02
    """What one round of one measurement takes, about."""


def loop_of(batch: Batch) -> Loop:
    """Many calls one after the other in one program: each takes the last one's output for its queries."""

    @jax.jit
    def run(count: Any, cache: Any, q: Any, k: Any, v: Any, step: Any) -> Any:
        def once(_: Any, carry: Any) -> Any:
            cache, q = carry
            out, cache = cache.attend(0, q, k, v, step, **batch.options)
            return cache, out

        return jax.lax.fori_loop(0, count, once, (cache, q))[1]

    return lambda count: run(count, batch.cache, batch.q, batch.k, batch.v, batch.step)


def repeated(body: Callable[..., Any], first: jax.Array, *others: jax.Array) -> Loop:
    """The same of body(x, *others) → x."""
    run = jax.jit(lambda count, x, *others: jax.lax.fori_loop(0, count, lambda _, x: body(x, *others), x))
    return lambda count: run(count, first, *others)


def times(loops: dict[str, Loop], sizes: Sizes) -> dict[str, float]:
    """Seconds a call: medians over rounds in which every loop has its turn.

    The time of a loop of one call is taken off that of a longer one: what is left are the calls between, without the
    launch, and without the copies that are made before the first.
    """

    def seconds(run: Loop, count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(count))
        return time.perf_counter() - start

    counts = {}
    for name, run in loops.items():
        seconds(run, 1)
        call_s = (seconds(run, 1 + sizes.trial_calls) - seconds(run, 1)) / sizes.trial_calls
        counts[name] = max(2, min(2000, int(sizes.round_s / max(call_s, 1e-6))))
    found: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(sizes.rounds):
        for name, run in loops.items():
            found[name].append((seconds(run, 1 + counts[name]) - seconds(run, 1)) / counts[name])
    return {name: statistics.median(each) for name, each in found.items()}


def kv_bytes(case: Case, context_lens: Sequence[int]) -> int:
    """Of the keys and values of these rows."""
    return 2 * sum(context_lens) * case.num_kv_heads * case.head_size * jnp.dtype(case.dtype).itemsize


def causal_flops(case: Case, lens: Sequence[int]) -> float:
    """Of both products of whole prompts, without what the mask hides."""
    return sum(4.0 * n * (n + 1) / 2 * case.num_heads * case.head_size for n in lens)


def runnable(loops: dict[str, Loop]) -> tuple[dict[str, Loop], dict[str, str]]:
    """Of what others made, the loops that run here, and why the rest does not."""
    found, refused = {}, {}
    for name, run in loops.items():
        try:
            jax.block_until_ready(run(1))
            found[name] = run
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return found, refused


def measure_decode(bench: Bench, case: Case, sizes: Sizes, others: dict[str, Loop]) -> dict[str, Any]:
    """K1 and K2: bytes of keys and values a second, against those that a copy reads and writes.

    `others` do what the first of `sizes.decode` does.
    """
    shapes = {f"{len(lens)} × {lens[0]}": lens for lens in sizes.decode}
    first = next(iter(shapes))
    shapes["skewed"] = sizes.skewed
    loops = {name: loop_of(bench.batch(case, [1] * len(lens), lens)) for name, lens in shapes.items()}
    loops["copy"] = repeated(lambda x: -x, jnp.ones(sizes.copied_bytes // 2, jnp.bfloat16))
    others, refused = runnable(others)
    taken = times(loops | others, sizes)
    copied = 2 * sizes.copied_bytes / taken["copy"]
    rates = {name: kv_bytes(case, lens) / taken[name] / copied for name, lens in shapes.items()}
    least = min(rate for name, rate in rates.items() if name != "skewed")
    found = {"K1": least, "K2": rates["skewed"] / rates[first], "copy_bytes_per_s": copied, "seconds": taken}
    against = {name: taken[first] / taken[name] for name in others}
    return {**found, "of_copy": rates, "of_others": against, "refused": refused}


def measure_prefill(bench: Bench, case: Case, sizes: Sizes, others: dict[str, Loop]) -> dict[str, Any]:
    """K3: one long prompt against a matrix product; beside it rows of different length, and what others made."""
    lens, side = {"one": [sizes.prefill], "ragged": list(sizes.ragged)}, sizes.matmul
    loops = {name: loop_of(bench.batch(case, each, each)) for name, each in lens.items()}
    square = random_numbers(jax.random.key(0), (side, side), jnp.bfloat16) * jnp.bfloat16(side**-0.5)
    loops["matmul"] = repeated(lambda x, y: x @ y, square, square)
    others, refused = runnable(others)
    taken = times(loops | others, sizes)
    rates = {name: causal_flops(case, each) / taken[name] for name, each in lens.items()}
    rates["matmul"] = 2 * side**3 / taken["matmul"]
    return {"K3": rates["one"] / rates["matmul"], "seconds": taken, "flops_per_s": rates, "refused": refused}


def measure_window(bench: Bench, case: Case, sizes: Sizes, **options: Any) -> dict[str, Any]:
    """K5: one layer with a window to one without, at 32 windows of context; `options` are its backend's."""
    rows, lens = sizes.windowed_rows, [32 * sizes.window] * sizes.windowed_rows
    windowed = dataclasses.replace(case, window=sizes.window, backend=options)
    loops = {
        name: loop_of(bench.batch(kind, [1] * rows, lens)) for name, kind in (("full", case), ("windowed", windowed))
    }
    taken = times(loops, sizes)
    return {"K5": taken["windowed"] / taken["full"], "seconds": taken}


def measure_bytes(bench: Bench, case: Case, sizes: Sizes) -> dict[str, Any]:
    """K6: pages of one byte a number to those of two."""
    dtypes, lens = ("bfloat16", "int8", "float8_e4m3fn"), sizes.decode[0]
    batches = {d: bench.batch(dataclasses.replace(case, dtype=d), [1] * len(lens), lens) for d in dtypes}
    taken = times({dtype: loop_of(batch) for dtype, batch in batches.items()}, sizes)
    ratios = {dtype: taken[dtype] / taken["bfloat16"] for dtype in dtypes[1:]}
    return {"K6": max(ratios.values()), "seconds": taken, "of_bfloat16": ratios}
