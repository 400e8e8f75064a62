"""Check jpaged on this TPU, and measure it.

    python scripts/tpu_check.py --list                               # every item, with its minutes
    python scripts/tpu_check.py --only correctness copy K1 --output tpu_1.json
    python scripts/tpu_check.py --interpret                          # no TPU: tiny shapes, times mean nothing

The script needs no network and no weights. A run takes at most 8 minutes (`--minutes`): an item that would be over
later is listed as not done. docs/first_light.md says which runs to make, and what to do with what they find. Every
kind of kernel is compared with the dense oracle over fresh random inputs, whose seed is printed, and has to give the
same bits each of 20 times. Ratios are measured between loops that ran in turn: decoding to a copy on the device,
prefill to a product of matrices, a window to full attention, pages of one byte to those of two; beside each the
kernels with other sizes of tiles, and plain XLA. Ratios to jax's own ragged paged attention (v2; the worst of all
shapes) stand apart. Golden tokens and the speed of a model of 8B check the whole engine. The table is printed last.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from device_checks import item_list, kernel_check, run
from device_checks.item_list import all_items
from device_checks.items import Goal
from device_checks.kernel_check import ONE_TOKEN, ONLY_DECODE, SHARED, TINY, Batch, Case, Rows
from device_checks.kernel_items import Rival, Session
from device_checks.kernel_speed import LLAMA, TINY_SIZES, Loop, Sizes, Variants

from jpaged.commands.bench.tune import DECODE_SIZES, PREFILL_SIZES, other_sizes
from jpaged.pallas_kernels.ragged_paged_attention.tpu.backend import TPU_CHIPS, TpuBackend
from jpaged.pallas_kernels.ragged_paged_attention.tpu.decode_refs import DecodeSizes
from jpaged.pallas_kernels.ragged_paged_attention.tpu.sizes import TpuShape, TpuSizes, sizes_of, write_slots_of

GOALS = {
    **item_list.GOALS,
    "decode ÷ v2": Goal("≤", 1.0, "v2", is_own=False),
    "skewed ÷ v2": Goal("≤", 1.0, "v2", is_own=False),
    "prefill ÷ v2": Goal("≤", 1.0, "K4", is_own=False),
}
SIZES = Sizes(decode=((8192,) * 32, (4096,) * 64, (1024,) * 256), skewed=(512,) * 29 + (32768,) * 3, windowed_rows=16)
"""Half of the sizes for GPUs: they fit in the 16 GB of a v5e, copies included."""
FACTORS = (0.5, 2.0)
"""Factors of a tile's sizes that are measured in their place."""


def cases() -> list[Case]:
    """Return cases in which every kind of kernel occurs."""
    base = Case("plain", page_size=128)
    found = [base, replace(base, name="only decode", rows=ONLY_DECODE), replace(base, name="one token", rows=ONE_TOKEN)]
    found += [replace(base, name=f"page {page}", page_size=page) for page in (16, 32, 64, 256)]
    ratios = ((9, 3), (8, 8), (16, 1), (71, 1))
    found += [replace(base, name=f"{n}/{k} heads", num_heads=n, num_kv_heads=k) for n, k in ratios]
    for head_size in (64, 80, 96, 112, 192, 256):
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
    """Return cases with few tokens that run every kernel and both kinds of step, for the interpreter.

    The program that checks the first one writes the history of the second one.
    """
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "page_size": 32, "dtype": "int8"}
    every = Case("all, int8", **sizes, window=21, soft_cap=2.0, has_sinks=True, rows=TINY)
    decodes = Rows((1,) * 4, TINY.context_lens, num_tokens=4, num_rows=4)
    return [every, replace(every, name="only decode, all, int8", rows=decodes)]


def interpreted(case: Case) -> TpuBackend:
    """Return an interpreted backend with tiles of few tokens, so that rows of a few dozen tokens have many tiles."""
    from jax.experimental.pallas import tpu as pltpu

    tile = max(32, case.page_size)
    decode = DecodeSizes(tile, tile, case.page_size, max_rows=8, write_slots=write_slots_of("v6e", case.dtype))
    params = pltpu.InterpretParams(uninitialized_memory="nan", dma_execution_mode="on_wait")
    return TpuBackend(sizes=TpuSizes(decode, tile, case.page_size), tile_q=16, interpret=params)


def backend_of(device: Any) -> Callable[[Case], TpuBackend]:
    """Return what makes the backend of a case on that TPU. SystemExit if the device is no known TPU."""
    chip = chip_of(device)
    return lambda case: replace(TpuBackend.for_heads(chip, case.num_heads, case.head_size), **case.backend)


def chip_of(device: Any) -> str:
    """Return the name of a TPU that the kernels have sizes for. SystemExit if the device is none."""
    if device.platform != "tpu":
        raise SystemExit(f"tpu_check: the first device is a {device.platform}, not a TPU; try --interpret")
    chip = TPU_CHIPS.get(device.device_kind)
    if chip is None:
        known = ", ".join(TPU_CHIPS)
        raise SystemExit(f"tpu_check: got {device.device_kind}, the kernels have sizes for {known}; try --interpret")
    return chip


def variants(chip: str, case: Case, names: Sequence[str]) -> Variants:
    """Return tiles in which one of the sizes `names` is another, as far as the kernels can work with them."""
    shape = TpuShape(case.num_heads, case.num_kv_heads, case.head_size, case.dtype, case.page_size)
    found = {}
    for name in names:
        for sizes in other_sizes(chip, shape, sizes_of(chip, shape), name, FACTORS):
            value = getattr(sizes.decode if name in DECODE_SIZES else sizes, name)
            found[f"{name} {value}"] = {"sizes": sizes}
    return found


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


ITEMS = all_items(Rival("v2", "v2", v2_loop, is_ragged=True, paged=v2_loop), {}, has_command_buffers=False)


def session_of(args: argparse.Namespace) -> Session:
    """Return what the items need of this TPU. SystemExit, in one line, if there is none."""
    case = replace(LLAMA, page_size=128)
    if args.interpret:
        case = replace(case, num_heads=2, num_kv_heads=1, head_size=64, page_size=32)
        return Session(
            args.seed, interpreted, tiny_cases(), case, TINY_SIZES, ("xla",), is_tiny=True, output=args.output
        )
    try:
        device = jax.devices()[0]
    except RuntimeError as error:
        raise SystemExit(f"tpu_check: {' '.join(str(error).split())}") from error
    chip = chip_of(device)
    return Session(
        args.seed,
        backend_of(device),
        cases(),
        case,
        SIZES,
        ("pallas-tpu", "xla"),
        num_repeats=kernel_check.NUM_REPEATS,
        decode_variants=variants(chip, case, DECODE_SIZES),
        prefill_variants=variants(chip, case, PREFILL_SIZES),
        output=args.output,
    )


def main(argv: Sequence[str] | None = None) -> int:
    return run.main(__file__, __doc__, ITEMS, GOALS, session_of, argv)


if __name__ == "__main__":
    sys.exit(main())
