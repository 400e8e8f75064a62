"""Are the GPU attention kernels right on this GPU, and how fast are they?

    python scripts/gpu_check.py --output docs/measurements/gpu_check.json
    python scripts/gpu_check.py --interpret          # no GPU: tiny shapes, whether they are right and nothing else

Needs no network and no weights, and at most 8 minutes: what would begin later is listed as not done. Every kind of
kernel is held against the dense oracle over fresh random inputs, whose seed is printed. Then ratios are measured, each
between things that ran in turn: decoding to a copy on the device, prefill to a product of matrices and to cuDNN, a
window to full attention, pages of one byte to those of two. The table is printed last.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
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
    GpuBackend,
    KVScales,
    LayerPlace,
    PagedCache,
    quantize,
)
from jpaged.pallas_kernels.ragged_paged_attention.reference import dense_attention  # noqa: E402

MOST_ERROR = 1e-2
"""Of one head's output, relative to its norm: a weight and a value rounded to 8 bits each, and the sum."""
LAST_START_S = 7 * 60
ROUNDS = 7
TRIAL_CALLS = 10
ROUND_S = 0.02
"""What one round of one measurement takes, about."""


@dataclass(frozen=True)
class Case:
    """One kind of kernel."""

    name: str
    num_heads: int = 8
    num_kv_heads: int = 2
    head_size: int = 128
    dtype: str = "bfloat16"
    page_size: int = 64
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    backend: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)


@dataclass
class Batch:
    """A step ready to run: rows of `query_lens` new tokens, `context_lens` with them."""

    case: Case
    cache: PagedCache
    step: AttentionMetadata
    q: jax.Array
    k: jax.Array
    v: jax.Array
    options: dict[str, Any]


def cases() -> list[Case]:
    """Every kind of kernel there is, each in some case."""
    base = Case("plain")
    change = dataclasses.replace
    found = [base]
    found += [change(base, name=f"page {page}", page_size=page) for page in (16, 32)]
    found += [change(base, name=f"{n}/{k} heads", num_heads=n, num_kv_heads=k) for n, k in ((9, 3), (8, 8), (71, 1))]
    for head_size in (64, 256):
        found.append(change(base, name=f"head size {head_size}", head_size=head_size))
    for dtype in ("int8", "float8_e4m3fn"):
        for head_size, page in ((64, 16), (128, 64), (256, 32)):
            found.append(change(base, name=f"{dtype}, {head_size}", dtype=dtype, head_size=head_size, page_size=page))
    features: list[dict[str, Any]] = [{"window": 100}, {"soft_cap": 2.0}, {"has_sinks": True}]
    features.append({"window": 77, "soft_cap": 2.0, "has_sinks": True})
    found += [change(base, name=f"{feature}", **feature) for feature in features]
    found.append(change(base, name="window with an order of its own", window=100, backend={"windows": (100,)}))
    found.append(change(base, name="uncut", backend={"is_cut": False}))
    found.append(change(base, name="cut often", backend={"least_share": 1}))
    return found


def hopper_cases() -> list[Case]:
    """Those of the candidate for prefill."""
    base = Case("wgmma", backend={"prefill": "wgmma"})
    return [base, dataclasses.replace(base, name="wgmma, int8, 64", head_size=64, dtype="int8", window=100)]


def metadata(
    backend: GpuBackend, query_lens: list[int], context_lens: list[int], tables: np.ndarray, page_size: int
) -> AttentionMetadata:
    """Rows in order, those with one query first; `tables` [R, P]."""
    num_tokens, num_rows = sum(query_lens), len(query_lens)
    row = np.repeat(np.arange(num_rows), query_lens)
    starts = np.cumsum([0, *query_lens])
    positions = np.arange(num_tokens) - starts[row] + (np.array(context_lens) - query_lens)[row]
    slots = tables[row, positions // page_size] * page_size + positions % page_size
    num_decode_rows = sum(length == 1 for length in query_lens)
    plan = np.zeros(backend.plan_len(num_tokens, num_rows), np.int32)
    lens = np.array(query_lens, np.int32), np.array(context_lens, np.int32)
    sizes = {"page_size": page_size, "num_tokens": num_tokens, "num_rows": num_rows}
    backend.plan(*lens, num_decode_rows, tables[None], np.arange(num_rows), **sizes, out=plan)
    as_array = [jnp.asarray(x, jnp.int32) for x in (positions, slots[None], starts, context_lens, tables[None])]
    return AttentionMetadata(*as_array, jnp.int32(num_rows), jnp.int32(num_decode_rows), jnp.asarray(plan))


class Bench:
    """The GPU, or the interpreter, and the random numbers of this run."""

    def __init__(self, *, interpret: bool, seed: int):
        self.rng, self.key = np.random.default_rng(seed), jax.random.key(seed)
        self.chip: dict[str, Any] = {"num_sms": 2}
        if interpret:
            from jax.experimental.pallas import mosaic_gpu

            self.chip["interpret"] = mosaic_gpu.InterpretGPUParams(detect_races=True)
        else:
            device = jax.devices()[0]
            if device.platform != "gpu":
                raise SystemExit(f"gpu_check: the first device is a {device.platform}, not a GPU; try --interpret")
            self.chip = {
                "num_sms": device.core_count,
                "block_memory": device.shared_memory_per_block_optin,
                "has_tma": self.capability(device) >= (9, 0),
            }

    @staticmethod
    def capability(device: Any) -> tuple[int, ...]:
        return tuple(map(int, device.compute_capability.split(".")))

    def batch(self, case: Case, query_lens: list[int], context_lens: list[int]) -> Batch:
        """Pages in random order, full of random numbers made on the device."""
        backend = GpuBackend(
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            head_size=case.head_size,
            **self.chip,
            **case.backend,
        )
        lens = -(-np.array(context_lens) // case.page_size)
        num_pages = int(lens.sum()) + 1
        order = self.rng.permutation(np.arange(1, num_pages))
        tables = np.zeros((len(lens), lens.max()), np.int32)
        tables[np.arange(lens.max()) < lens[:, None]] = order
        layout = backend.layout(
            num_layers=1,
            num_pages=num_pages,
            page_size=case.page_size,
            num_kv_heads=case.num_kv_heads,
            head_size=case.head_size,
            dtype=case.dtype,
        )
        self.key, *keys = jax.random.split(self.key, 7)
        scales = None
        if layout.dtype.itemsize == 1:
            most = 127 if case.dtype == "int8" else 448
            scales = KVScales(
                *(jax.random.uniform(key, (1, case.num_kv_heads), minval=4, maxval=8) / most for key in keys[5:] * 2)
            )
        pages = tuple(_normal(key, shape, layout.dtype) for key, shape in zip(keys, layout.shapes, strict=False))
        cache = PagedCache(pages, layout, (LayerPlace(0, 0),), backend, scales)
        heads = case.num_heads, case.num_kv_heads, case.num_kv_heads
        q, k, v = (
            _normal(key, (sum(query_lens), n, case.head_size), jnp.bfloat16)
            for key, n in zip(keys[2:5], heads, strict=True)
        )
        options: dict[str, Any] = {"window": case.window, "soft_cap": case.soft_cap, "scale": case.head_size**-0.5}
        if case.has_sinks:
            options["sinks"] = jnp.asarray(self.rng.normal(size=case.num_heads), jnp.float32)
        step = metadata(backend, query_lens, context_lens, tables, case.page_size)
        return Batch(case, cache, step, q, k, v, options)

    def error(self, case: Case, query_lens: list[int], context_lens: list[int]) -> float:
        """The largest error of any head's output, relative to its norm."""
        batch = self.batch(case, query_lens, context_lens)
        pages, expected = _expected(batch, query_lens, context_lens)
        cache = dataclasses.replace(batch.cache, pages=pages)
        attend = jax.jit(lambda cache, q, k, v, step: cache.attend(0, q, k, v, step, **batch.options)[0])
        got = np.asarray(attend(cache, batch.q, batch.k, batch.v, batch.step), np.float64)
        errors = np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        return float(np.max(np.where(np.isnan(errors), np.inf, errors)))


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if jnp.dtype(dtype) == jnp.int8:
        return jax.random.randint(key, shape, -100, 101, jnp.int32).astype(jnp.int8)
    return jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16).astype(dtype))(key)


def _expected(batch: Batch, query_lens: list[int], context_lens: list[int]) -> tuple[tuple[jax.Array, ...], np.ndarray]:
    """The batch's pages with NaN in every slot that no token has, and what attention must give."""
    layout, table = batch.cache.layout, np.asarray(batch.step.page_tables[0])
    scales = batch.cache.scales
    starts = np.cumsum([0, *query_lens])
    dead = jnp.iinfo(layout.dtype).max if layout.dtype == np.int8 else jnp.nan
    new = batch.k, batch.v
    if scales is not None:
        new = quantize(batch.k, scales.k[0], layout.dtype), quantize(batch.v, scales.v[0], layout.dtype)
    pages, histories = [], []
    for index, (stored, fresh) in enumerate(zip(batch.cache.pages, new, strict=True)):
        is_alive = np.zeros((layout.num_pages, 1, layout.page_size, 1), bool)
        history = []
        scale = np.ones(layout.num_kv_heads) if scales is None else np.asarray((scales.k, scales.v)[index][0])
        for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
            old = np.arange(context_len - query_len)
            at = table[row, old // layout.page_size], slice(None), old % layout.page_size
            is_alive[at] = True
            # Converted on the host: an 8-bit float's way there is part of what is checked.
            tokens = np.concatenate([np.asarray(stored)[at], np.asarray(fresh)[starts[row] : starts[row + 1]]])
            history.append(tokens.astype(np.float64) * scale[:, None])
        pages.append(jnp.where(jnp.asarray(is_alive), stored, jnp.asarray(dead, layout.dtype)))
        histories.append(history)
    options = {name: np.asarray(x) if name == "sinks" else x for name, x in batch.options.items()}
    q = np.asarray(batch.q, np.float64)
    return tuple(pages), dense_attention(q, histories[0], histories[1], query_lens, **options)


# Speed


def loop_of(batch: Batch) -> Callable[[int], Any]:
    """Many calls one after the other in one program: each takes the last one's output for its queries."""

    @jax.jit
    def run(count: Any, cache: Any, q: Any, k: Any, v: Any, step: Any) -> Any:
        def once(_: Any, carry: Any) -> Any:
            cache, q = carry
            out, cache = cache.attend(0, q, k, v, step, **batch.options)
            return cache, out

        return jax.lax.fori_loop(0, count, once, (cache, q))[1]

    return lambda count: run(count, batch.cache, batch.q, batch.k, batch.v, batch.step)


def repeated(body: Callable[..., Any], first: jax.Array, *others: jax.Array) -> Callable[[int], Any]:
    """The same of body(x, *others) → x."""
    run = jax.jit(lambda count, x, *others: jax.lax.fori_loop(0, count, lambda _, x: body(x, *others), x))
    return lambda count: run(count, first, *others)


def times(candidates: dict[str, Callable[[int], Any]]) -> dict[str, float]:
    """Seconds a call: medians over rounds in which every candidate has its turn.

    The time of a loop of one call is taken off that of a longer one: what is left are the calls between, without the
    launch, and without the copies that are made before the first.
    """

    def seconds(run: Callable[[int], Any], count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(count))
        return time.perf_counter() - start

    counts = {}
    for name, run in candidates.items():
        seconds(run, 1)
        counts[name] = max(
            2, min(2000, int(ROUND_S / max((seconds(run, 1 + TRIAL_CALLS) - seconds(run, 1)) / TRIAL_CALLS, 1e-6)))
        )
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(ROUNDS):
        for name, run in candidates.items():
            found[name].append((seconds(run, 1 + counts[name]) - seconds(run, 1)) / counts[name])
    return {name: statistics.median(each) for name, each in found.items()}


def kv_bytes(case: Case, context_lens: list[int]) -> int:
    return 2 * sum(context_lens) * case.num_kv_heads * case.head_size * jnp.dtype(case.dtype).itemsize


def causal_flops(case: Case, lens: list[int]) -> float:
    return sum(4.0 * n * (n + 1) / 2 * case.num_heads * case.head_size for n in lens)


LLAMA = Case("llama", num_heads=32, num_kv_heads=8, head_size=128)


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    decode: tuple[tuple[int, ...], ...] = ((8192,) * 64, (4096,) * 128, (1024,) * 256)
    """Contexts of rows of one query; the first also with pages of one byte a number."""
    skewed: tuple[int, ...] = (512,) * 58 + (32768,) * 6
    prefill: int = 8192
    ragged: tuple[int, ...] = (4096, 2500, 1000, 333, 200, 63)
    window: int = 1024
    windowed_rows: int = 16
    copied_bytes: int = 1 << 30
    matmul: int = 8192


def measure_decode(bench: Bench, case: Case, sizes: Sizes) -> dict[str, Any]:
    """K1 and K2: bytes of keys and values a second, against those that a copy reads and writes."""
    shapes = {f"{len(lens)} × {lens[0]}": list(lens) for lens in sizes.decode}
    first = next(iter(shapes))
    shapes["skewed"] = list(sizes.skewed)
    candidates = {name: loop_of(bench.batch(case, [1] * len(lens), lens)) for name, lens in shapes.items()}
    copy = repeated(lambda x: -x, jnp.ones(sizes.copied_bytes // 2, jnp.bfloat16))
    taken = times({"copy": copy, **candidates})
    copied = 2 * sizes.copied_bytes / taken["copy"]
    rates = {name: kv_bytes(case, lens) / taken[name] / copied for name, lens in shapes.items()}
    least = min(rate for name, rate in rates.items() if name != "skewed")
    shares = {"K1": least, "K2": rates["skewed"] / rates[first]}
    return {**shares, "copy_bytes_per_s": copied, "seconds": taken, "of_copy": rates}


def measure_prefill(bench: Bench, case: Case, sizes: Sizes) -> dict[str, Any]:
    """K3 and K4: one long prompt against a matrix product, and rows of different length against cuDNN's dense."""
    one, ragged, side = [sizes.prefill], list(sizes.ragged), sizes.matmul
    candidates: dict[str, Callable[[int], Any]] = {
        "one": loop_of(bench.batch(case, one, one)),
        "ragged": loop_of(bench.batch(case, ragged, ragged)),
    }
    square = _normal(jax.random.key(0), (side, side), jnp.bfloat16) * jnp.bfloat16(side**-0.5)
    candidates["matmul"] = repeated(lambda x, y: x @ y, square, square)
    longest, heads = max(ragged), (case.num_heads, case.num_kv_heads)
    q, k = (_normal(jax.random.key(n), (1, longest, n, case.head_size), jnp.bfloat16) for n in heads)
    dense = repeated(lambda q, k: jax.nn.dot_product_attention(q, k, k, is_causal=True, implementation="cudnn"), q, k)
    refusal = None
    try:
        jax.block_until_ready(dense(1))
        candidates["cudnn"] = dense
    except Exception as error:
        refusal = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    taken = times(candidates)
    rates = {"one": causal_flops(case, one) / taken["one"], "ragged": causal_flops(case, ragged) / taken["ragged"]}
    rates["matmul"] = 2 * side**3 / taken["matmul"]
    found: dict[str, Any] = {"K3": rates["one"] / rates["matmul"], "K4": None, "seconds": taken, "flops_per_s": rates}
    if refusal is not None:
        return {**found, "cudnn_refused": refusal}
    rates["cudnn"] = causal_flops(case, [longest]) / taken["cudnn"]
    return {**found, "K4": rates["cudnn"] / rates["ragged"]}


def measure_window(bench: Bench, case: Case, sizes: Sizes) -> dict[str, Any]:
    """K5: one layer with a window to one without, at 32 windows of context."""
    rows = sizes.windowed_rows
    lens = [32 * sizes.window] * rows
    windowed = dataclasses.replace(case, window=sizes.window, backend={"windows": (sizes.window,)})
    kinds = {"full": case, "windowed": windowed}
    taken = times({name: loop_of(bench.batch(kind, [1] * rows, lens)) for name, kind in kinds.items()})
    return {"K5": taken["windowed"] / taken["full"], "seconds": taken}


def measure_bytes(bench: Bench, case: Case, sizes: Sizes) -> dict[str, Any]:
    """K6: pages of one byte a number to those of two."""
    dtypes, lens = ("bfloat16", "int8", "float8_e4m3fn"), list(sizes.decode[0])
    batches = {d: bench.batch(dataclasses.replace(case, dtype=d), [1] * len(lens), lens) for d in dtypes}
    taken = times({dtype: loop_of(batch) for dtype, batch in batches.items()})
    ratios = {dtype: taken[dtype] / taken["bfloat16"] for dtype in dtypes[1:]}
    return {"K6": max(ratios.values()), "seconds": taken, "of_bfloat16": ratios}


GOALS = {"K1": ("≥", 0.90), "K2": ("≥", 0.9), "K3": ("≥", 0.75), "K4": ("≤", 1.1), "K5": ("≤", 0.10), "K6": ("≤", 0.60)}


def machine() -> dict[str, Any]:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="no GPU: a few tiny cases, step by step")
    parser.add_argument("--seed", type=int, default=None, help="of the random inputs; a new one each time if not given")
    parser.add_argument("--output", type=Path, help="write what was found here, as JSON")
    args = parser.parse_args()
    began = time.monotonic()
    seed = int(np.random.SeedSequence().entropy % 2**32) if args.seed is None else args.seed  # type: ignore[operator]
    print(f"seed {seed}", flush=True)
    bench = Bench(interpret=args.interpret, seed=seed)
    is_hopper = not args.interpret and bench.capability(jax.devices()[0])[0] == 9
    report: dict[str, Any] = {"machine": machine(), "seed": seed, "interpreted": args.interpret}
    report |= {"checks": {}, "measured": {}, "not_done": []}

    def attempt(into: str, name: str, do: Callable[[], Any]) -> None:
        """Do it unless it is too late; an error is what was found."""
        if time.monotonic() - began > LAST_START_S:
            report["not_done"].append(name)
            return
        try:
            report[into][name] = do()
        except Exception as error:
            report[into][name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"{name}: {report[into][name]}", flush=True)

    rows = (
        ([1, 1, 3, 17], [1, 66, 3, 40])
        if args.interpret
        else ([1] * 6 + [2, 64, 65, 300], [1, 63, 64, 65, 700, 3000, 2, 64, 640, 300])
    )
    chosen = cases()[:1] + cases()[-1:] if args.interpret else cases() + (hopper_cases() if is_hopper else [])
    for case in chosen:
        attempt("checks", case.name, lambda case=case: bench.error(case, *rows))
    if not args.interpret:
        attempt("measured", "decode", lambda: measure_decode(bench, LLAMA, Sizes()))
        attempt("measured", "prefill", lambda: measure_prefill(bench, LLAMA, Sizes()))
        if is_hopper:
            candidate = dataclasses.replace(LLAMA, backend={"prefill": "wgmma"})
            attempt("measured", "prefill by wgmma", lambda: measure_prefill(bench, candidate, Sizes()))
        attempt("measured", "window", lambda: measure_window(bench, LLAMA, Sizes()))
        attempt("measured", "bytes", lambda: measure_bytes(bench, LLAMA, Sizes()))
    wrong = [name for name, found in report["checks"].items() if isinstance(found, str) or not found <= MOST_ERROR]
    broken = [name for name, found in report["measured"].items() if isinstance(found, str)]
    report["passed"] = not (wrong or broken or report["not_done"])
    report["seconds"] = round(time.monotonic() - began, 1)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    for name, found in report["measured"].items():
        for key, (relation, goal) in GOALS.items():
            if isinstance(found, dict) and key in found:
                value = "not measured" if found[key] is None else f"{found[key]:.3f}"
                print(f"{key}  {value:>12}  goal {relation} {goal:<5}  {name}")
    print(f"{len(report['checks']) - len(wrong)} of {len(report['checks'])} cases right in {report['seconds']} s")
    for title, names in (("wrong", wrong), ("broken", broken), ("not done", report["not_done"])):
        if names:
            print(f"{title}: {', '.join(names)}")
    return not report["passed"]


if __name__ == "__main__":
    sys.exit(main())
