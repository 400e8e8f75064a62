"""Measures attention kernels on this device: the ratios K1 to K6, each between loops that ran in turn.

K1, K2  decoding to a copy on the device      K3      prefill to a product of matrices
K5      a window to full attention            K6      pages of one byte a number to those of two
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from check_report import Goals
from kernel_check import Batch, Bench, Case, random_numbers

GOALS: Goals = {"K1": ("≥", 0.90), "K2": ("≥", 0.9), "K3": ("≥", 0.75), "K5": ("≤", 0.10), "K6": ("≤", 0.60)}
BYTES_PER_S = {
    "NVIDIA A100-SXM4-80GB": 2.04e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA H200": 4.8e12,
    "NVIDIA B200": 8e12,
}
"""Device kind → memory bandwidth by its data sheet. K1 says little if the copy itself is far below it."""
LLAMA = Case("llama", num_heads=32, num_kv_heads=8, head_size=128)


@dataclass(frozen=True)
class Loop:
    """A program that repeats `body`(carry, *others) → carry, starting with `first`."""

    body: Callable[..., Any]
    first: Any
    others: tuple[Any, ...]

    def __call__(self, count: int) -> Any:
        """Run the body `count` times in one program, compiled for that count."""
        return run(self.body, count, self.first, *self.others)


Others = Mapping[str, Callable[[Batch], Loop]]
"""Name of another implementation → the function that makes its loop for a batch."""


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(body: Callable[..., Any], count: int, first: Any, *others: Any) -> Any:
    """Return the carry after `count` calls of `body`.

    The count is static: otherwise XLA reads a condition from the device after each call.
    """
    return jax.lax.fori_loop(0, count, lambda _, carry: body(carry, *others), first)


@dataclass(frozen=True)
class Sizes:
    """Shapes of what is measured, and how long a measurement takes."""

    decode: tuple[tuple[int, ...], ...] = ((8192,) * 64, (4096,) * 128, (1024,) * 256)
    """Contexts of decode rows, one tuple a batch; the first batch also with pages of one byte a number."""
    skewed: tuple[int, ...] = (512,) * 58 + (32768,) * 6
    prefill: int = 8192
    ragged: tuple[int, ...] = (4096, 2500, 1000, 333, 200, 63)
    window: int = 1024
    windowed_rows: int = 64
    """Rows of the step with a window: enough that it is limited by memory bandwidth and not by its launch."""
    copied_bytes: int = 1 << 30
    matmul: int = 8192
    rounds: int = 7
    trial_calls: int = 10
    """Calls in the shorter of the two loops that are subtracted."""
    round_s: float = 0.02
    """The approximate time of one round of a measurement."""


def loop_of(batch: Batch) -> Loop:
    """Return a loop of attention calls, in which each call takes the output of the last one as its queries."""

    options = batch.options  # Not `batch`: JAX would keep the closure, and with it the pages.

    def body(carry: Any, k: Any, v: Any, step: Any) -> Any:
        cache, q = carry
        out, cache = cache.attend(0, q, k, v, step, **options)
        return cache, out

    return Loop(body, (batch.cache, batch.q), (batch.k, batch.v, batch.step))


def copy_loop(num_bytes: int) -> Loop:
    """Return a loop of copies on the device. The barrier keeps XLA from simplifying −(−x) if it unrolls the loop."""
    return Loop(lambda x: jax.lax.optimization_barrier(-x), jnp.ones(num_bytes // 2, jnp.bfloat16), ())


def times(loops: dict[str, Loop], sizes: Sizes) -> dict[str, float]:
    """Return the seconds of a call of each loop: medians over rounds in which every loop has its turn.

    The time of a loop of few calls is subtracted from that of a longer one. The difference holds neither the launch nor
    the copies before the first call. Each loop is compiled twice.
    """

    def seconds(loop: Loop, count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(loop(count))
        return time.perf_counter() - start

    few, more = sizes.trial_calls, {}
    for name, loop in loops.items():
        seconds(loop, few)
        call_s = seconds(loop, few) / few
        more[name] = max(2, min(2000, int(sizes.round_s / max(call_s, 1e-6))))
        seconds(loop, few + more[name])
    found: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(sizes.rounds):
        for name, loop in loops.items():
            found[name].append((seconds(loop, few + more[name]) - seconds(loop, few)) / more[name])
    return {name: statistics.median(each) for name, each in found.items()}


def kv_bytes(case: Case, context_lens: Sequence[int]) -> int:
    """Return the bytes of the keys and values of rows with these contexts, in one layer."""
    return 2 * sum(context_lens) * case.num_kv_heads * case.head_size * jnp.dtype(case.dtype).itemsize


def causal_flops(case: Case, lens: Sequence[int]) -> float:
    """Return the operations of both products of attention over whole prompts, without masked scores."""
    return sum(4.0 * n * (n + 1) / 2 * case.num_heads * case.head_size for n in lens)


def loops_of_others(batches: dict[str, Batch], others: Others, sizes: Sizes) -> tuple[dict[str, Loop], dict[str, str]]:
    """Return the loops of other implementations that run here, and the error of each one that does not."""
    found, refused = {}, {}
    for who, make in others.items():
        for what, batch in batches.items():
            try:
                loop = make(batch)
                jax.block_until_ready(loop(sizes.trial_calls))
                found[f"{what} by {who}"] = loop
            except Exception as error:
                refused[f"{what} by {who}"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return found, refused


def worst_ratio(taken: dict[str, float], whats: Iterable[str], who: str) -> float | None:
    """Return the largest ratio of our time to that of `who`; None if `who` did not run every batch of `whats`."""
    pairs = [(taken[what], taken.get(f"{what} by {who}")) for what in whats]
    return (
        None if any(theirs is None for _, theirs in pairs) else max(ours / theirs for ours, theirs in pairs if theirs)
    )


def measure_decode(bench: Bench, case: Case, sizes: Sizes, others: Others) -> dict[str, Any]:
    """Measure K1 and K2, bytes of keys and values a second against those of a copy, and decode ÷ others.

    The ratio to another implementation is the worst of all shapes. One that pads rows to the longest may have no memory
    for skewed rows: the ratio is then that of equally long rows, and a note says so.
    """
    shapes = {f"{len(lens)} × {lens[0]}": lens for lens in sizes.decode}
    equal = list(shapes)
    shapes["skewed"] = sizes.skewed
    batches = {name: bench.batch(case, [1] * len(lens), lens) for name, lens in shapes.items()}
    loops = {name: loop_of(batch) for name, batch in batches.items()}
    loops["copy"] = copy_loop(sizes.copied_bytes)
    theirs, refused = loops_of_others(batches, others, sizes)
    taken = times(loops | theirs, sizes)
    copied = 2 * sizes.copied_bytes / taken["copy"]
    rates = {name: kv_bytes(case, lens) / taken[name] / copied for name, lens in shapes.items()}
    least = min(rates[name] for name in equal)
    found = {"K1": least, "K2": rates["skewed"] / rates[equal[0]], "copy_bytes_per_s": copied, "seconds": taken}
    notes = {}
    if bandwidth := BYTES_PER_S.get(jax.devices()[0].device_kind):
        found["copy_of_data_sheet"] = of_data_sheet = copied / bandwidth
        notes["K1"] = f"the copy: {of_data_sheet:.3f} of the data sheet's bandwidth"
    for who in others:
        found[f"skewed ÷ {who}"] = skewed = worst_ratio(taken, ["skewed"], who)
        found[f"decode ÷ {who}"] = worst_ratio(taken, equal if skewed is None else shapes, who)
        if skewed is None:
            notes[f"decode ÷ {who}"] = f"skewed refused: {refused[f'skewed by {who}']}"
        else:
            notes[f"decode ÷ {who}"] = f"skewed: {skewed:.3f}"
    return {**found, "of_copy": rates, "refused": refused, "notes": notes}


def measure_prefill(bench: Bench, case: Case, sizes: Sizes, others: Others) -> dict[str, Any]:
    """Measure K3: one long prompt against a matrix product and others; also the rate of rows of different lengths."""
    lens, side = {"one": [sizes.prefill], "ragged": list(sizes.ragged)}, sizes.matmul
    batches = {name: bench.batch(case, each, each) for name, each in lens.items()}
    loops = {name: loop_of(batch) for name, batch in batches.items()}
    square = random_numbers(jax.random.key(0), (side, side), jnp.bfloat16) * jnp.bfloat16(side**-0.5)
    loops["matmul"] = Loop(lambda x, y: x @ y, square, (square,))
    theirs, refused = loops_of_others(batches, others, sizes)
    taken = times(loops | theirs, sizes)
    rates = {name: causal_flops(case, each) / taken[name] for name, each in lens.items()}
    rates["matmul"] = 2 * side**3 / taken["matmul"]
    against = {f"prefill ÷ {who}": worst_ratio(taken, ["one"], who) for who in others}
    return {"K3": rates["one"] / rates["matmul"], **against, "seconds": taken, "flops_per_s": rates, "refused": refused}


def measure_window(bench: Bench, case: Case, sizes: Sizes, others: Others, **options: Any) -> dict[str, Any]:
    """Measure K5: a layer with a window against one without, at 32 windows of context; `options` are its backend's."""
    rows, lens = sizes.windowed_rows, [32 * sizes.window] * sizes.windowed_rows
    windowed = dataclasses.replace(case, window=sizes.window, backend=options)
    full = bench.batch(case, [1] * rows, lens)
    theirs, refused = loops_of_others({"full": full}, others, sizes)
    loops = {"full": loop_of(full), "windowed": loop_of(bench.batch(windowed, [1] * rows, lens, pages_of=full))}
    taken = times(loops | theirs, sizes)
    return {"K5": taken["windowed"] / taken["full"], "seconds": taken, "refused": refused}


def measure_bytes(bench: Bench, case: Case, sizes: Sizes) -> dict[str, Any]:
    """Measure K6: pages of one byte a number against those of two."""
    dtypes, lens = ("bfloat16", "int8", "float8_e4m3fn"), sizes.decode[0]
    batches = {d: bench.batch(dataclasses.replace(case, dtype=d), [1] * len(lens), lens) for d in dtypes}
    taken = times({dtype: loop_of(batch) for dtype, batch in batches.items()}, sizes)
    ratios = {dtype: taken[dtype] / taken["bfloat16"] for dtype in dtypes[1:]}
    return {"K6": max(ratios.values()), "seconds": taken, "of_bfloat16": ratios}
