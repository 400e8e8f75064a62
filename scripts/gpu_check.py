"""Check jpaged on this GPU, and measure it.

    python scripts/gpu_check.py --list                               # every item, with its minutes
    python scripts/gpu_check.py --only correctness copy K1 --output gpu_1.json
    python scripts/gpu_check.py --interpret                          # no GPU: tiny shapes, times mean nothing

The script needs no network and no weights. A run takes at most 8 minutes (`--minutes`): an item that would be over
later is listed as not done. docs/first_light.md says which runs to make, and what to do with what they find. Every
kind of kernel is compared with the dense oracle over fresh random inputs, whose seed is printed, and has to give the
same bits each of 20 times. Ratios are measured between loops that ran in turn: decoding to a copy on the device,
prefill to a product of matrices, a window to full attention, pages of one byte to those of two; beside each the
kernels with other options, and plain XLA. Ratios to cuDNN stand apart: work that cuDNN refuses is named, and the run
may pass. Golden tokens and the speed of a model of 8B check the whole engine. The table is printed last.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_checks import item_list, kernel_check, run
from device_checks.driver import find_driver_fault
from device_checks.item_list import all_items
from device_checks.items import Goal
from device_checks.kernel_check import ONE_TOKEN, ONLY_DECODE, SHARED, TINY, Batch, Case, Rows
from device_checks.kernel_items import Rival, Session
from device_checks.kernel_speed import LLAMA, TINY_SIZES, Loop, Sizes

from jpaged.pallas_kernels.ragged_paged_attention.gpu.backend import GpuBackend, faster_prefill
from jpaged.pallas_kernels.ragged_paged_attention.interface import AttentionMetadata

GOALS = {
    **item_list.GOALS,
    "K4": Goal("≤", 1.1, "K4", is_own=False),
    "prefill ÷ cuDNN": Goal("≤", 1.1, "K4", is_own=False),
    "decode ÷ cuDNN": Goal("≤", 1.0, "cudnn", is_own=False),
}
"""Ratio → its goal. `decode ÷ cuDNN` is the worst ratio of all shapes to cuDNN's paged attention, which pads skewed
rows and may refuse them; `prefill ÷ cuDNN` is that of one prompt to its dense attention."""
KERNELS_JAX, INTERPRETER_JAX = (0, 11), (0, 11, 2)
"""First versions of JAX with what the kernels need, and with their interpreter."""
MEMORY_SHARE = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
"""JAX gives out three quarters of a GPU's memory by default, too little for the 8B model on small ones."""

RATIOS = ((9, 3), (8, 8), (24, 1), (40, 1), (71, 1))
"""Query heads and KV heads whose groups fill a small tile of 16 or 32 rows, a large tile, and more than one."""
EVERY: dict[str, Any] = {"window": 77, "soft_cap": 2.0, "has_sinks": True}
FEW_SMS = {"num_sms": 4}
"""With so few multiprocessors a thread block gets as many pieces as a long prefill gives it on a whole chip."""
CROWDED = Rows((*[1] * 57, 2, 64, 65, 300, 33), (*range(1, 1009, 18), 5000, 2, 64, 640, 800, 2500), 640, num_rows=64)
FULL = Rows(
    (*[1] * 400, *[64] * 64), (*(1 + 37 * row % 160 for row in range(400)), *range(64, 320, 4)), 4608, num_rows=512
)
"""With 32/8 heads these rows give every thread block of a chip of 132 multiprocessors several pieces."""


def cases() -> list[Case]:
    """Return cases in which every kind of kernel occurs."""
    base = Case("plain")
    found = [base, replace(base, name="only decode", rows=ONLY_DECODE)]
    found += [replace(base, name=f"one token, {dtype}", rows=ONE_TOKEN, dtype=dtype) for dtype in ("bfloat16", "int8")]
    found += [replace(base, name=f"second layer, {dtype}", layer=1, dtype=dtype) for dtype in ("bfloat16", "int8")]
    found.append(replace(base, name="shared pages", rows=SHARED))
    found.append(replace(base, name="2³¹ numbers before the pages", num_numbers=1 << 31))
    found += [replace(base, name=f"page {page}", page_size=page) for page in (16, 32)]
    found += [replace(base, name=f"{n}/{k} heads", num_heads=n, num_kv_heads=k) for n, k in RATIOS]
    for head_size in (64, 80, 96, 192, 256):
        found.append(replace(base, name=f"head size {head_size}", head_size=head_size))
    for dtype in ("int8", "float8_e4m3fn"):
        for head_size, page in ((64, 16), (128, 64), (256, 32)):
            found.append(replace(base, name=f"{dtype}, {head_size}", dtype=dtype, head_size=head_size, page_size=page))
    features: list[dict[str, Any]] = [{"window": 100}, {"soft_cap": 2.0}, {"has_sinks": True}, EVERY]
    found += [replace(base, name=f"{feature}", **feature) for feature in features]
    found.append(replace(base, name="window with an order of its own", window=100, backend={"windows": (100,)}))
    found.append(replace(base, name="null pages behind the window", window=100, is_freed=True))
    found.append(replace(base, name="uncut", backend={"split_kv": False}))
    found.append(replace(base, name="cut often, all, int8", dtype="int8", backend={"min_share": 1}, **EVERY))
    many = replace(base, name="many pieces", rows=CROWDED, backend=FEW_SMS)
    found += [many, replace(many, name="many pieces, 256", head_size=256)]
    found.append(replace(many, name="many pieces, all, int8, 64", head_size=64, dtype="int8", page_size=16, **EVERY))
    own = {**FEW_SMS, "windows": (100,)}
    found.append(replace(many, name="many pieces, window with an order of its own", window=100, backend=own))
    found.append(replace(base, name="full chip", num_heads=32, num_kv_heads=8, rows=FULL))
    found.append(replace(base, name="cut often", backend={"min_share": 1}))
    return found


def hopper_cases() -> list[Case]:
    """Return the cases of prefill by `wgmma`, which only Hopper has."""
    base = Case("wgmma", backend={"prefill": "wgmma"})
    many = replace(base, name="wgmma, many pieces", rows=CROWDED, backend={"prefill": "wgmma", **FEW_SMS})
    return [
        base,
        replace(base, name="wgmma, int8, 64", head_size=64, dtype="int8", window=100),
        replace(base, name="wgmma, cut often, all", backend={"prefill": "wgmma", "min_share": 1}, **EVERY),
        many,
        replace(many, name="wgmma, many pieces, all, int8, 64", head_size=64, dtype="int8", **EVERY),
    ]


def tiny_cases() -> list[Case]:
    """Return two cases with few tokens, for the interpreter."""
    return [replace(case, rows=TINY) for case in (cases()[0], cases()[-1])]


def backend_of(chip: dict[str, Any]) -> Callable[[Case], GpuBackend]:
    """Return what makes the backend of a case for that chip, or for the part of the chip that the case asks for."""
    return lambda case: GpuBackend(
        num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_size=case.head_size, **{**chip, **case.backend}
    )


def interpreted() -> dict[str, Any]:
    """Return the properties of an interpreted chip."""
    from jax.experimental.pallas import mosaic_gpu

    return {"num_sms": 2, "interpret": mosaic_gpu.InterpretGPUParams(detect_races=True)}


def chip_of(device: Any) -> dict[str, Any]:
    """Return the properties of a GPU that the backend needs. SystemExit if the device is no GPU."""
    if device.platform != "gpu":
        raise SystemExit(f"gpu_check: the first device is a {device.platform}, not a GPU; try --interpret")
    return {
        "num_sms": device.core_count,
        "block_memory": device.shared_memory_per_block_optin,
        "capability": capability(device),
    }


def capability(device: Any) -> tuple[int, int]:
    major, minor = map(int, device.compute_capability.split("."))
    return major, minor


def cudnn_call(head_size: int) -> Callable[..., Any]:
    """Return cuDNN's paged attention of one query a row: q [R, N, 1, H] and the arrays of `cudnn_rows` → [R, N, 1, H].

    JAX has it as a private function.
    """
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention

    options = {"scale": head_size**-0.5, "mask_type": MaskType.PADDING, "qkv_layout": "BNTH"}
    return lambda q, keys, values, query_lens, context_lens, tables: paged_attention(
        q, keys, values, query_lens, context_lens, tables, tables, **options
    )


def cudnn_rows(pages: tuple[Any, ...], step: AttentionMetadata) -> tuple[Any, ...]:
    """Return keys and values [C, K, Z, H], lengths and page table of the rows of `step`, as cuDNN takes them.

    cuDNN's arrays have no null page, and as many pages as its page table has entries.
    """
    num_rows, num_entries = step.page_tables.shape[1:]
    missing = num_rows * num_entries - (pages[0].shape[0] - 1)
    every = (jnp.pad(each[1:], ((0, missing), (0, 0), (0, 0), (0, 0))) for each in pages)
    tables = jnp.maximum(step.page_tables[0] - 1, 0)[:, None, :, None]
    return *every, jnp.ones(num_rows, jnp.int32), step.context_lens, tables


def paged_by_cudnn(batch: Batch) -> Loop:
    """Return cuDNN's attention over the same pages.

    Raises ValueError if its results differ from the kernels' results: it then did other work.
    """
    options = batch.options
    attend = jax.jit(lambda cache, q, k, v, step: cache.attend(0, q, k, v, step, **options))
    ours, cache = attend(batch.cache, batch.q, batch.k, batch.v, batch.step)
    loop = Loop(cudnn_call(batch.case.head_size), batch.q[:, :, None], cudnn_rows(cache.pages, batch.step))
    theirs, expected = (np.asarray(x, np.float32) for x in (loop(1)[:, :, 0], ours))
    error = np.max(np.linalg.norm(theirs - expected, axis=-1) / np.linalg.norm(expected, axis=-1))
    if not error <= 2 * kernel_check.MOST_ERROR:
        raise ValueError(f"cuDNN's results differ by {error:.3g} of a head's, allowed: {2 * kernel_check.MOST_ERROR}")
    return loop


def dense_by_cudnn(batch: Batch) -> Loop:
    """Return cuDNN's dense attention of one prompt as long as the longest row."""
    case, longest = batch.case, int(batch.step.context_lens.max())
    q, k = (
        kernel_check.random_numbers(jax.random.key(heads), (1, longest, heads, case.head_size), jnp.bfloat16)
        for heads in (case.num_heads, case.num_kv_heads)
    )
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    return Loop(lambda q, k: attend(q, k, k), q, (k,))


TILES = {f"{stages} stages": {"num_stages": stages} for stages in (3, 4)} | {"32 keys": {"max_tile_kv": 32}}
"""Options of the backend that are measured beside 2 stages of tiles of 64 keys."""
ITEMS = all_items(
    Rival("cudnn", "cuDNN", dense_by_cudnn, is_ragged=False, paged=paged_by_cudnn),
    MEMORY_SHARE,
    has_command_buffers=True,
)


def session_of(args: argparse.Namespace) -> Session:
    """Return what the items need of this GPU.

    SystemExit, in one line, if there is none, or if its driver or JAX is too old.
    """
    needed = INTERPRETER_JAX if args.interpret else KERNELS_JAX
    if jax.__version_info__ < needed:
        what = "--interpret needs" if args.interpret else "the kernels need"
        raise SystemExit(f"gpu_check: got jax {jax.__version__}, {what} {'.'.join(map(str, needed))} or later")
    if args.interpret:
        chip = interpreted()
        case = replace(LLAMA, num_heads=2, num_kv_heads=1, head_size=64)
        return Session(
            args.seed, backend_of(chip), tiny_cases(), case, TINY_SIZES, ("xla",), is_tiny=True, output=args.output
        )
    try:
        device = jax.devices()[0]
    except RuntimeError as error:
        raise SystemExit(f"gpu_check: {find_driver_fault() or ' '.join(str(error).split())}") from error
    if device.platform != "gpu" and (fault := find_driver_fault()):
        raise SystemExit(f"gpu_check: {fault}")
    chip = chip_of(device)
    is_hopper = capability(device)[0] == 9
    served = {"prefill": faster_prefill(capability(device), LLAMA.head_size)}
    return Session(
        args.seed,
        backend_of(chip),
        cases() + (hopper_cases() if is_hopper else []),
        replace(LLAMA, backend=served),
        Sizes(),
        ("pallas-gpu", "xla"),
        num_repeats=kernel_check.NUM_REPEATS,
        decode_variants={f"min_share {share}": {"min_share": share} for share in (1, 3, 12)} | TILES,
        prefill_variants=TILES | ({"mma": {"prefill": "mma"}} if is_hopper else {}),
        window_options={"windows": (Sizes().window,)},
        output=args.output,
    )


def main(argv: Sequence[str] | None = None) -> int:
    return run.main(__file__, __doc__, ITEMS, GOALS, session_of, argv)


if __name__ == "__main__":
    sys.exit(main())
