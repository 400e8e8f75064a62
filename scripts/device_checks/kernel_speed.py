"""Measures attention kernels on this device: the ratios K1 to K6, each between loops that ran in turn.

K1, K2  decoding to a copy on the device      K3, K4  prefill to a product of matrices, and to another library
K5      a window to full attention            K6      pages of one byte a number to those of two

Beside each ratio stand the same work in plain XLA and the kernels with other tiles. All programs of a measurement are
compiled first, several at a time; nothing compiles while loops are timed.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend

from .kernel_check import Batch, Bench, Case, random_numbers

BYTES_PER_S = {
    "NVIDIA A100-SXM4-80GB": 2.04e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA H200": 4.8e12,
    "NVIDIA B200": 8e12,
    "TPU v5 lite": 8.19e11,
    "TPU v6 lite": 1.64e12,
    "TPU7x": 3.69e12,
}
"""Device kind → memory bandwidth by its data sheet, of one core of a TPU7x. K1 says little if the copy itself is far
below it."""
LLAMA = Case("llama", num_heads=32, num_kv_heads=8, head_size=128)
XLA = "plain xla"


@dataclass(frozen=True)
class Loop:
    """A program that repeats `body`(carry, *others) → carry, starting with `first`."""

    body: Callable[..., Any]
    first: Any
    others: tuple[Any, ...]

    def compile(self, count: int) -> Callable[[], Any]:
        """Return a function that runs the body `count` times in one program, compiled for that count."""
        compiled = run.lower(self.body, count, self.first, *self.others).compile()
        return lambda: compiled(self.first, *self.others)

    def __call__(self, count: int) -> Any:
        """Run the body `count` times."""
        return self.compile(count)()


Others = Mapping[str, Callable[[Batch], Loop]]
"""Name of another implementation → the function that makes its loop for a batch."""
Variants = Mapping[str, Mapping[str, Any]]
"""What the kernels do otherwise, in words → the options of the backend."""


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
    """Contexts of decode rows, one tuple a batch; the first batch also with other tiles and in plain XLA."""
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


TINY_SIZES = Sizes(
    decode=((40, 40),),
    skewed=(34, 60),
    prefill=20,
    ragged=(20,),
    window=2,
    windowed_rows=2,
    copied_bytes=64,
    matmul=8,
    rounds=1,
    trial_calls=1,
    round_s=0.0,
)
"""Shapes that take little time, for interpreters; what is measured with them means nothing. Rows that decode take as
many pages, and prompts are as long, in every item: the loops of several items are one program, compiled once."""


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


def matmul_loop(side: int) -> Loop:
    """Return a loop of products of square matrices of bfloat16."""
    square = random_numbers(jax.random.key(0), (side, side), jnp.bfloat16) * jnp.bfloat16(side**-0.5)
    return Loop(lambda x, y: x @ y, square, (square,))


@dataclass
class Timed:
    """Seconds of a call of each loop, and the error of each optional loop that does not run here."""

    seconds: dict[str, float]
    refused: dict[str, str]

    def ratios(self, names: Iterable[str], to: str) -> dict[str, float | str]:
        """Return the time of each of these loops ÷ that of `to`, or the error."""
        return {
            name: self.refused[name] if name in self.refused else self.seconds[name] / self.seconds[to]
            for name in names
        }


def times(loops: Mapping[str, Loop], sizes: Sizes, optional: Mapping[str, Callable[[], Loop]] | None = None) -> Timed:
    """Return the seconds of a call of each loop: medians over rounds in which every loop has its turn.

    The time of a loop of few calls is subtracted from that of a longer one. The difference holds neither the launch nor
    the copies before the first call. Loops of `optional` may fail to be made, to compile or to run; the others are
    measured before them, and once more with them. An optional loop whose call takes longer than a round is measured
    once, by its few calls: it is so slow that their launch makes no difference.
    """
    optional, refused = optional or {}, dict[str, str]()
    slow: dict[str, float] = {}

    def attempt(name: str, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except Exception as error:
            if name in loops:
                raise
            refused[name] = error_text(error)

    made = {**loops, **{name: attempt(name, make) for name, make in optional.items()}}
    few: dict[str, Callable[[], Any]] = {}
    longer: dict[str, Callable[[], Any]] = {}
    more: dict[str, int] = {}

    def compile_all(counts: Mapping[str, int]) -> dict[str, Callable[[], Any]]:
        with ThreadPoolExecutor(os.cpu_count()) as compilers:
            programs = compilers.map(lambda name: attempt(name, lambda: made[name].compile(counts[name])), counts)
            return {name: program for name, program in zip(counts, programs, strict=True) if name not in refused}

    def seconds(program: Callable[[], Any]) -> float:
        start = time.perf_counter()
        jax.block_until_ready(program())
        return time.perf_counter() - start

    def measured(names: Iterable[str]) -> dict[str, float]:
        """Compile the loops of these names; return the seconds of each loop so far, measured together."""
        few.update(compile_all({name: sizes.trial_calls for name in names if name not in refused}))
        for name in [name for name in few if name not in more]:
            attempt(name, lambda name=name: seconds(few[name]))
            if name not in refused:
                call_s = seconds(few[name]) / sizes.trial_calls
                if name not in loops and call_s > sizes.round_s > 0:
                    slow[name] = call_s
                    del few[name]
                    continue
                more[name] = max(2, min(2000, int(sizes.round_s / max(call_s, 1e-6))))
        new = compile_all({name: sizes.trial_calls + more[name] for name in more if name not in longer})
        for program in new.values():
            seconds(program)
        longer.update(new)
        found: dict[str, list[float]] = {name: [] for name in longer}
        for _ in range(sizes.rounds):
            for name, program in longer.items():
                found[name].append((seconds(program) - seconds(few[name])) / more[name])
        return {name: statistics.median(each) for name, each in found.items()} | slow

    taken = measured(loops)
    try:
        return Timed(measured(optional) if optional else taken, refused)
    except Exception as error:  # An optional loop has lost the device, for the others too.
        return Timed(taken, dict.fromkeys(optional, error_text(error)) | refused)


def error_text(error: Exception) -> str:
    """Return an error's type and message in one line of at most some 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def kv_bytes(case: Case, context_lens: Sequence[int]) -> int:
    """Return the bytes of the keys and values of rows with these contexts, in one layer."""
    return 2 * sum(context_lens) * case.num_kv_heads * case.head_size * jnp.dtype(case.dtype).itemsize


def causal_flops(case: Case, lens: Sequence[int]) -> float:
    """Return the operations of both products of attention over whole prompts, without masked scores."""
    return sum(4.0 * n * (n + 1) / 2 * case.num_heads * case.head_size for n in lens)


def beside(bench: Bench, batch: Batch, lens: tuple[Sequence[int], Sequence[int]], variants: Variants) -> dict[str, Any]:
    """Return name → what makes the loop of the same work in plain XLA, and with each of `variants`.

    `lens` are the queries and contexts of the batch's rows. Variants share the batch's pages. Plain XLA has no loop
    beside itself.
    """
    case = batch.case
    plain = Bench(lambda case: XlaBackend(), bench.seed)

    def variant(options: Mapping[str, Any]) -> Loop:
        other = dataclasses.replace(case, backend={**case.backend, **options})
        return loop_of(bench.batch(other, *lens, pages_of=batch))

    made: dict[str, Any] = {}
    if batch.cache.backend.name != XlaBackend.name:
        made[XLA] = lambda: loop_of(plain.batch(dataclasses.replace(case, backend={}), *lens))
    return made | {name: functools.partial(variant, options) for name, options in variants.items()}


def by_others(batches: Mapping[str, Batch], others: Others) -> dict[str, Callable[[], Loop]]:
    """Return name → what makes the loop of another implementation over each of the batches."""
    return {
        f"{what} by {who}": functools.partial(make, batch)
        for who, make in others.items()
        for what, batch in batches.items()
    }


def worst_ratio(taken: Mapping[str, float], whats: Iterable[str], who: str) -> float | None:
    """Return the largest ratio of our time to that of `who`; None if `who` did not run every batch of `whats`."""
    pairs = [(taken[what], taken.get(f"{what} by {who}")) for what in whats]
    return (
        None if any(theirs is None for _, theirs in pairs) else max(ours / theirs for ours, theirs in pairs if theirs)
    )


def measure_copy(sizes: Sizes) -> dict[str, Any]:
    """Measure the bytes a second that a copy on the device reads and writes, beside the data sheet's."""
    copied = 2 * sizes.copied_bytes / times({"copy": copy_loop(sizes.copied_bytes)}, sizes).seconds["copy"]
    found = {"copy_bytes_per_s": copied}
    if bandwidth := BYTES_PER_S.get(jax.devices()[0].device_kind):
        found["copy_of_data_sheet"] = copied / bandwidth
    return found


def measure_decode(bench: Bench, case: Case, sizes: Sizes, variants: Variants) -> dict[str, Any]:
    """Measure K1: bytes of keys and values a second of equally long rows, against those of a copy; the worst shape."""
    shapes = {f"{len(lens)} × {lens[0]}": lens for lens in sizes.decode}
    batches = {name: bench.batch(case, [1] * len(lens), lens) for name, lens in shapes.items()}
    first, lens = next(iter(shapes.items()))
    optional = beside(bench, batches[first], ([1] * len(lens), lens), variants)
    loops = {name: loop_of(batch) for name, batch in batches.items()}
    timed = times({**loops, "copy": copy_loop(sizes.copied_bytes)}, sizes, optional)
    copied = 2 * sizes.copied_bytes / timed.seconds["copy"]
    rates = {name: kv_bytes(case, lens) / timed.seconds[name] / copied for name, lens in shapes.items()}
    found = {"K1": min(rates.values()), "copy_bytes_per_s": copied, "of_copy": rates, "seconds": timed.seconds}
    found |= {"times ours": timed.ratios(optional, first), "notes": {}}
    if bandwidth := BYTES_PER_S.get(jax.devices()[0].device_kind):
        found["copy_of_data_sheet"] = of_data_sheet = copied / bandwidth
        found["notes"]["K1"] = f"the copy: {of_data_sheet:.3f} of the data sheet's bandwidth"
    return found


def measure_skewed(bench: Bench, case: Case, sizes: Sizes, variants: Variants) -> dict[str, Any]:
    """Measure K2: bytes a second of rows of very different length, against those of equally long rows."""
    lens = {"equal": sizes.decode[0], "skewed": sizes.skewed}
    batches = {name: bench.batch(case, [1] * len(each), each) for name, each in lens.items()}
    optional = beside(bench, batches["skewed"], ([1] * len(sizes.skewed), sizes.skewed), variants)
    timed = times({name: loop_of(batch) for name, batch in batches.items()}, sizes, optional)
    rates = {name: kv_bytes(case, each) / timed.seconds[name] for name, each in lens.items()}
    found = {"K2": rates["skewed"] / rates["equal"], "bytes_per_s": rates, "seconds": timed.seconds}
    return {**found, "times ours": timed.ratios(optional, "skewed")}


def measure_prefill(bench: Bench, case: Case, sizes: Sizes, variants: Variants) -> dict[str, Any]:
    """Measure K3: the operations a second of one long prompt, against a matrix product's."""
    lens = [sizes.prefill]
    batch = bench.batch(case, lens, lens)
    optional = beside(bench, batch, (lens, lens), variants)
    timed = times({"one": loop_of(batch), "matmul": matmul_loop(sizes.matmul)}, sizes, optional)
    rates = {"one": causal_flops(case, lens) / timed.seconds["one"], "matmul": 2 * sizes.matmul**3}
    rates["matmul"] /= timed.seconds["matmul"]
    found = {"K3": rates["one"] / rates["matmul"], "flops_per_s": rates, "seconds": timed.seconds}
    return {**found, "times ours": timed.ratios(optional, "one")}


def measure_ragged(
    bench: Bench, case: Case, sizes: Sizes, variants: Variants, others: Others, *, is_ragged: bool
) -> dict[str, Any]:
    """Measure rows of different length, and K4: their time per operation against another implementation's.

    That one computes the same rows if `is_ragged`, else one prompt as long as the longest of them, causally. K4 is None
    where it does not run.
    """
    lens = list(sizes.ragged)
    batches = {"ragged": bench.batch(case, lens, lens), "one": bench.batch(case, [sizes.prefill], [sizes.prefill])}
    optional = beside(bench, batches["ragged"], (lens, lens), variants)
    theirs = by_others(batches, others)
    timed = times({name: loop_of(batch) for name, batch in batches.items()}, sizes, {**optional, **theirs})
    operations = {"ragged": causal_flops(case, lens), "one": causal_flops(case, [sizes.prefill])}
    found: dict[str, Any] = {"seconds": timed.seconds, "times ours": timed.ratios(optional, "ragged")}
    found["flops_per_s"] = {name: count / timed.seconds[name] for name, count in operations.items()}
    for who in others:
        dense_s = timed.seconds.get(f"ragged by {who}")
        dense = causal_flops(case, lens if is_ragged else [max(lens)])
        found["K4"] = dense_s and (timed.seconds["ragged"] / operations["ragged"]) / (dense_s / dense)
        found[f"prefill ÷ {who}"] = worst_ratio(timed.seconds, ["one"], who)
    return {**found, "refused": timed.refused}


def measure_window(bench: Bench, case: Case, sizes: Sizes, variants: Variants, **options: Any) -> dict[str, Any]:
    """Measure K5: a layer with a window against one without, at 32 windows of context; `options` are its backend's."""
    rows, lens = sizes.windowed_rows, [32 * sizes.window] * sizes.windowed_rows
    windowed = dataclasses.replace(case, window=sizes.window, backend=options)
    full = bench.batch(case, [1] * rows, lens)
    batch = bench.batch(windowed, [1] * rows, lens, pages_of=full)
    optional = beside(bench, batch, ([1] * rows, lens), variants)
    timed = times({"full": loop_of(full), "windowed": loop_of(batch)}, sizes, optional)
    found = {"K5": timed.seconds["windowed"] / timed.seconds["full"], "seconds": timed.seconds}
    return {**found, "times ours": timed.ratios(optional, "windowed")}


def measure_bytes(bench: Bench, case: Case, sizes: Sizes) -> dict[str, Any]:
    """Measure K6: pages of one byte a number against those of two."""
    dtypes, lens = ("bfloat16", "int8", "float8_e4m3fn"), sizes.decode[0]
    batches = {d: bench.batch(dataclasses.replace(case, dtype=d), [1] * len(lens), lens) for d in dtypes}
    taken = times({dtype: loop_of(batch) for dtype, batch in batches.items()}, sizes).seconds
    ratios = {dtype: taken[dtype] / taken["bfloat16"] for dtype in dtypes[1:]}
    return {"K6": max(ratios.values()), "seconds": taken, "of_bfloat16": ratios}


def measure_others(bench: Bench, case: Case, sizes: Sizes, others: Others) -> dict[str, Any]:
    """Measure decode, and for each implementation that has a loop for it one prompt, against `others`.

    The ratio is the worst of all shapes. An implementation that pads rows to the longest may have no memory for skewed
    rows: the ratio is then that of equally long rows, and a note says so.
    """
    shapes = {f"{len(lens)} × {lens[0]}": lens for lens in sizes.decode}
    equal = list(shapes)
    shapes["skewed"] = sizes.skewed
    batches = {name: bench.batch(case, [1] * len(lens), lens) for name, lens in shapes.items()}
    timed = times({name: loop_of(batch) for name, batch in batches.items()}, sizes, by_others(batches, others))
    found, notes = dict[str, Any](), {}
    for who in others:
        found[f"skewed ÷ {who}"] = skewed = worst_ratio(timed.seconds, ["skewed"], who)
        found[f"decode ÷ {who}"] = worst_ratio(timed.seconds, equal if skewed is None else shapes, who)
        if skewed is None:
            notes[f"decode ÷ {who}"] = f"skewed refused: {timed.refused[f'skewed by {who}']}"
        else:
            notes[f"decode ÷ {who}"] = f"skewed: {skewed:.3f}"
    return {**found, "seconds": timed.seconds, "refused": timed.refused, "notes": notes}
