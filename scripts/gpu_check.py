"""Are the GPU attention kernels right on this GPU, and how fast are they?

    python scripts/gpu_check.py --output docs/measurements/gpu_check.json
    python scripts/gpu_check.py --interpret          # no GPU: tiny shapes, whether they are right and nothing else

Needs no network and no weights, and at most 8 minutes: what would begin later is listed as not done. Every kind of
kernel is held against the dense oracle over fresh random inputs, whose seed is printed. Then ratios are measured, each
between things that ran in turn: decoding to a copy on the device, prefill to a product of matrices and to cuDNN, a
window to full attention, pages of one byte to those of two. The table is printed last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import kernel_speed
from kernel_check import TINY, Bench, Case, arguments, check, random_numbers
from kernel_speed import LLAMA, Loop, Sizes, causal_flops, repeated

from jpaged.pallas_kernels.ragged_paged_attention import GpuBackend

GOALS = kernel_speed.GOALS | {"K4": ("≤", 1.1)}


def cases() -> list[Case]:
    """Every kind of kernel there is, each in some case."""
    base = Case("plain")
    found = [base]
    found += [replace(base, name=f"page {page}", page_size=page) for page in (16, 32)]
    found += [replace(base, name=f"{n}/{k} heads", num_heads=n, num_kv_heads=k) for n, k in ((9, 3), (8, 8), (71, 1))]
    for head_size in (64, 256):
        found.append(replace(base, name=f"head size {head_size}", head_size=head_size))
    for dtype in ("int8", "float8_e4m3fn"):
        for head_size, page in ((64, 16), (128, 64), (256, 32)):
            found.append(replace(base, name=f"{dtype}, {head_size}", dtype=dtype, head_size=head_size, page_size=page))
    features: list[dict[str, Any]] = [{"window": 100}, {"soft_cap": 2.0}, {"has_sinks": True}]
    features.append({"window": 77, "soft_cap": 2.0, "has_sinks": True})
    found += [replace(base, name=f"{feature}", **feature) for feature in features]
    found.append(replace(base, name="window with an order of its own", window=100, backend={"windows": (100,)}))
    found.append(replace(base, name="uncut", backend={"is_cut": False}))
    found.append(replace(base, name="cut often", backend={"least_share": 1}))
    return found


def hopper_cases() -> list[Case]:
    """Those of the candidate for prefill."""
    base = Case("wgmma", backend={"prefill": "wgmma"})
    return [base, replace(base, name="wgmma, int8, 64", head_size=64, dtype="int8", window=100)]


def tiny_cases() -> list[Case]:
    """For the interpreter: the first and the last kind."""
    return [replace(case, rows=TINY) for case in (cases()[0], cases()[-1])]


def backend_of(chip: dict[str, Any]) -> Callable[[Case], GpuBackend]:
    """The backend of each case on that chip."""
    return lambda case: GpuBackend(
        num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_size=case.head_size, **chip, **case.backend
    )


def interpreted() -> dict[str, Any]:
    """A chip that is none."""
    from jax.experimental.pallas import mosaic_gpu

    return {"num_sms": 2, "interpret": mosaic_gpu.InterpretGPUParams(detect_races=True)}


def chip_of(device: Any) -> dict[str, Any]:
    """What the backend has to know of a GPU."""
    if device.platform != "gpu":
        raise SystemExit(f"gpu_check: the first device is a {device.platform}, not a GPU; try --interpret")
    return {
        "num_sms": device.core_count,
        "block_memory": device.shared_memory_per_block_optin,
        "capability": capability(device),
    }


def capability(device: Any) -> tuple[int, ...]:
    return tuple(map(int, device.compute_capability.split(".")))


def measure_prefill(bench: Bench, case: Case, sizes: Sizes) -> dict[str, Any]:
    """K3 and K4: as on every device, and rows of different length against cuDNN's dense attention."""
    longest = max(sizes.ragged)
    q, k = (
        random_numbers(jax.random.key(heads), (1, longest, heads, case.head_size), jnp.bfloat16)
        for heads in (case.num_heads, case.num_kv_heads)
    )
    dense: Loop = repeated(
        lambda q, k: jax.nn.dot_product_attention(q, k, k, is_causal=True, implementation="cudnn"), q, k
    )
    found = kernel_speed.measure_prefill(bench, case, sizes, {"cudnn": dense})
    if "cudnn" in found["refused"]:
        return {**found, "K4": None}
    found["flops_per_s"]["cudnn"] = causal_flops(case, [longest]) / found["seconds"]["cudnn"]
    return {**found, "K4": found["flops_per_s"]["cudnn"] / found["flops_per_s"]["ragged"]}


def measures(bench: Bench, case: Case, sizes: Sizes, *, is_hopper: bool) -> dict[str, Any]:
    """Name → what measures it."""
    found = {
        "decode": lambda: kernel_speed.measure_decode(bench, case, sizes, {}),
        "prefill": lambda: measure_prefill(bench, case, sizes),
    }
    if is_hopper:
        candidate = replace(case, backend={"prefill": "wgmma"})
        found["prefill by wgmma"] = lambda: measure_prefill(bench, candidate, sizes)
    found["window"] = lambda: kernel_speed.measure_window(bench, case, sizes, windows=(sizes.window,))
    found["bytes"] = lambda: kernel_speed.measure_bytes(bench, case, sizes)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(__doc__, argv)
    if args.interpret:
        return check(args, Bench(backend_of(interpreted()), args.seed), tiny_cases(), {}, GOALS)
    device = jax.devices()[0]
    bench = Bench(backend_of(chip_of(device)), args.seed)
    is_hopper = capability(device)[0] == 9
    chosen = cases() + (hopper_cases() if is_hopper else [])
    return check(args, bench, chosen, measures(bench, LLAMA, Sizes(), is_hopper=is_hopper), GOALS)


if __name__ == "__main__":
    sys.exit(main())
