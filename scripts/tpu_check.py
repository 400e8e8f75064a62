"""Check the TPU attention kernels on this TPU, and measure them.

    python scripts/tpu_check.py --output tpu_check.json
    python scripts/tpu_check.py --interpret          # no TPU: checks tiny shapes, measures nothing

The script needs no network and no weights, and takes at most 8 minutes: an item that would begin later is listed as not
done. Every kind of kernel is compared with the dense oracle over fresh random inputs, whose seed is printed. Then
ratios are measured, each between loops that ran in turn: decoding to a copy on the device, prefill to a product of
matrices, both to jax's own ragged paged attention (v2; the worst of all shapes), a window to full attention, pages of
one byte to those of two. The table is printed last.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import check_report
import jax
import kernel_check
import kernel_speed
from kernel_check import ONE_TOKEN, ONLY_DECODE, SHARED, TINY, Batch, Bench, Case, Rows, checks
from kernel_speed import LLAMA, Loop, Sizes

from jpaged.pallas_kernels.ragged_paged_attention.tpu.backend import TPU_CHIPS, TpuBackend
from jpaged.pallas_kernels.ragged_paged_attention.tpu.decode_refs import DecodeSizes
from jpaged.pallas_kernels.ragged_paged_attention.tpu.sizes import TpuSizes, write_slots_of

GOALS = kernel_speed.GOALS | {"decode ÷ v2": ("≤", 1.0), "skewed ÷ v2": ("≤", 1.0), "prefill ÷ v2": ("≤", 1.0)}
SIZES = Sizes(decode=((8192,) * 32, (4096,) * 64, (1024,) * 256), skewed=(512,) * 29 + (32768,) * 3, windowed_rows=16)
"""Half of the sizes for GPUs: they fit in the 16 GB of a v5e, copies included."""


def cases() -> list[Case]:
    """Return cases in which every kind of kernel occurs."""
    base = Case("plain", page_size=128)
    found = [base, replace(base, name="only decode", rows=ONLY_DECODE), replace(base, name="one token", rows=ONE_TOKEN)]
    found += [replace(base, name=f"page {page}", page_size=page) for page in (16, 32, 64, 256)]
    ratios = ((9, 3), (8, 8), (16, 1), (71, 1))
    found += [replace(base, name=f"{n}/{k} heads", num_heads=n, num_kv_heads=k) for n, k in ratios]
    for head_size in (64, 80, 96, 192, 256):
        found.append(replace(base, name=f"head size {head_size}", head_size=head_size))
    for dtype in ("float32", "int8", "float8_e4m3fn"):
        for head_size, page in ((64, 32), (128, 128), (192, 64), (256, 256)):
            found.append(replace(base, name=f"{dtype}, {head_size}", dtype=dtype, head_size=head_size, page_size=page))
    features: list[dict[str, Any]] = [{"window": 100}, {"window": 2100}, {"soft_cap": 2.0}, {"has_sinks": True}]
    features.append({"window": 77, "soft_cap": 2.0, "has_sinks": True})
    found += [replace(base, name=f"{feature}", **feature) for feature in features]
    found.append(replace(base, name="null pages behind the window", window=100, is_freed=True))
    found += [replace(base, name=f"second layer, {dtype}", layer=1, dtype=dtype) for dtype in ("bfloat16", "int8")]
    found.append(replace(base, name="shared pages", rows=SHARED))
    found.append(replace(base, name="2³¹ numbers before the pages", num_numbers=1 << 31))
    found.append(replace(base, name="one token, int8", dtype="int8", rows=ONE_TOKEN))
    found.append(replace(base, name="all, int8, 64", dtype="int8", head_size=64, **features[-1]))
    return found


def tiny_cases() -> list[Case]:
    """Return cases with few tokens that take every path, for the interpreter."""
    base = Case("plain", num_heads=4, num_kv_heads=2, head_size=64, page_size=16, rows=TINY)
    every = {"window": 21, "soft_cap": 2.0, "has_sinks": True}
    return [
        base,
        replace(base, name="one token", rows=Rows((1,), (40,), num_tokens=1, num_rows=1)),
        replace(base, name="all, int8", dtype="int8", page_size=32, **every),
    ]


def interpreted(case: Case) -> TpuBackend:
    """Return an interpreted backend with tiles of few tokens, so that rows of a few dozen tokens have many tiles."""
    from jax.experimental.pallas import tpu as pltpu

    tile = max(32, case.page_size)
    decode = DecodeSizes(tile, tile, case.page_size, max_rows=8, write_slots=write_slots_of("v6e", case.dtype))
    params = pltpu.InterpretParams(uninitialized_memory="nan", dma_execution_mode="on_wait")
    return TpuBackend(sizes=TpuSizes(decode, tile, case.page_size), tile_q=16, interpret=params)


def backend_of(device: Any) -> Callable[[Case], TpuBackend]:
    """Return what makes the backend of a case on that TPU. SystemExit if the device is no known TPU."""
    if device.platform != "tpu":
        raise SystemExit(f"tpu_check: the first device is a {device.platform}, not a TPU; try --interpret")
    chip = TPU_CHIPS.get(device.device_kind)
    if chip is None:
        known = ", ".join(TPU_CHIPS)
        raise SystemExit(f"tpu_check: got {device.device_kind}, the kernels have sizes for {known}; try --interpret")
    return lambda case: TpuBackend.for_heads(chip, case.num_heads, case.head_size)


def v2_loop(batch: Batch) -> Loop:
    """Return a loop of jax's own kernel (v2) on the same rows, with the block sizes that v2 chooses.

    Its pages are [C, Z, 2 × K, H]. It only reads them and writes no keys or values.
    """
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    case, step = batch.case, batch.step
    shape = (batch.cache.layout.num_pages, case.page_size, 2 * case.num_kv_heads, case.head_size)
    pages = kernel_check.random_numbers(jax.random.key(0), shape, case.dtype)
    rows = step.context_lens, step.page_tables[0], step.query_starts, step.num_rows[None]
    return Loop(functools.partial(ragged_paged_attention, sm_scale=case.head_size**-0.5), batch.q, (pages, *rows))


def measures(bench: Bench, case: Case, sizes: Sizes) -> dict[str, Any]:
    """Return name → the function that measures it."""
    others = {"v2": v2_loop}
    return {
        "decode": lambda: kernel_speed.measure_decode(bench, case, sizes, others),
        "prefill": lambda: kernel_speed.measure_prefill(bench, case, sizes, others),
        "window": lambda: kernel_speed.measure_window(bench, case, sizes, {}),
        "bytes": lambda: kernel_speed.measure_bytes(bench, case, sizes),
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = check_report.arguments(__doc__, argv)
    if args.interpret:
        return check_report.run(args, checks(Bench(interpreted, args.seed), tiny_cases()), {}, {})
    bench = Bench(backend_of(jax.devices()[0]), args.seed, num_repeats=kernel_check.NUM_REPEATS)
    llama = replace(LLAMA, page_size=128)
    return check_report.run(args, checks(bench, cases()), measures(bench, llama, SIZES), GOALS)


if __name__ == "__main__":
    sys.exit(main())
