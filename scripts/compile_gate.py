"""Check, without the chip, that the attention kernels compile for it and that no program copies the cache.

    python scripts/compile_gate.py --chip v6e --output gate.json
    python scripts/compile_gate.py --chip h200 --share 1/3       # every third cell
    python scripts/compile_gate.py --chip h200 --prefill wgmma   # prefill by wgmma, on Hopper
    python scripts/compile_gate.py --chip v6e --layer            # one layer over four chips
    python scripts/compile_gate.py --chip v6e --list

A process serves one chip, since compilers read their environment when they are loaded. Each cell of `gate_cells` has to
compile, to alias the whole cache, and to need little memory beside it; on a GPU no register may be spilled. Cells that
the kernels refuse by name (`gate_cells.REFUSED`) are listed with the message: the `xla` backend serves them. Any other
refusal is a failure. The script needs the wheels of the extra `aot`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import compile_gpu
import compile_tpu
from gate_cells import MODELS, REFUSED, VALUES, all_cells, check_sharded_layer

ROOT = Path(__file__).parents[1]
NEAREST = {"v4": "v5e", "v5p": "v5e"}
"""Chips whose kernels have the sizes of another chip → that chip, whose cells are compiled for them."""
CHIPS = (*(chip for values in VALUES.values() for chip in values["chip"]), *NEAREST)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=CHIPS, default="v6e")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="the I-th of N shares of the cells")
    parser.add_argument("--kind", choices=("pairs", "models", "random"), help="only these cells")
    parser.add_argument("--layer", action="store_true", help="a layer spread over four chips, and no cell")
    parser.add_argument("--prefill", choices=("wgmma",), help="Hopper: prefill by wgmma instead of mma")
    parser.add_argument("--output", type=Path, help="write the report here, as JSON")
    parser.add_argument("--list", action="store_true", help="print the cells, compile nothing")
    args = parser.parse_args()
    is_tpu = args.chip in (*VALUES["tpu"]["chip"], *NEAREST)
    if args.prefill and is_tpu:
        parser.error(f"--prefill is an option of GPUs, got {args.chip}")
    try:
        index, count = map(int, args.share.split("/"))
    except ValueError:
        index, count = 0, 0
    if not 1 <= index <= count:
        parser.error(f"--share: got {args.share}, allowed: I/N with 1 ≤ I ≤ N, as 1/3")
    of_chip = NEAREST.get(args.chip, args.chip)
    cells = [cell for cell in all_cells("tpu" if is_tpu else "gpu") if cell.chip == of_chip]
    cells = [cell._replace(chip=args.chip) for cell in cells]
    if args.kind:
        kinds = {"pairs": {"pairs"}, "random": {"random"}, "models": set(MODELS)}
        cells = [cell for cell in cells if cell.why in kinds[args.kind]]
    cells = cells[index - 1 :: count]
    if args.list:
        print("\n".join(map(str, cells)))
        return 0
    sys.path.insert(0, str(ROOT))
    options = {"prefill": args.prefill} if args.prefill else {}
    gate: Any = (compile_tpu.TpuGate if is_tpu else compile_gpu.GpuGate)(args.chip, 4 if args.layer else 1, **options)
    if args.layer:
        result = check_sharded_layer(gate, 128 if is_tpu else 64)
        print(f"{args.chip}, a layer over four chips: {result['fault'] or 'compiles'}, {result}")
        return bool(result["fault"])
    found = []
    is_refused, why = REFUSED["tpu" if is_tpu else f"gpu, {args.prefill}" if args.prefill else "gpu"]
    for cell in cells:
        result = gate.compile(cell)
        # A v4 has a quarter of the others' VMEM at most, and refuses cells whose tiles need more.
        may_refuse = args.chip == "v4" and "of a core's 16 MiB of VMEM" in result.get("refused", "")
        if not may_refuse and is_refused(cell) is not ("refused" in result):
            result["fault"] = f"refused: {result['refused']}" if "refused" in result else f"not refused, but: {why}"
        found.append(result)
        print(f"{cell}: {result['fault'] or result.get('refused') or 'compiles'}", flush=True)
    faults = sum(bool(each["fault"]) for each in found)
    num_refused = sum("refused" in each and not each["fault"] for each in found)
    good = len(found) - faults - num_refused
    print(f"{args.chip}: {good} cells compile, {num_refused} are refused by name, {faults} fail")
    if args.output:
        report = {
            "chip": args.chip,
            "jax": importlib.metadata.version("jax"),
            "share": args.share,
            **options,
            "compile": good,
            "refused": num_refused,
            "fail": faults,
        }
        rows = ",\n".join(f"  {json.dumps(each)}" for each in found)  # A line each.
        text = json.dumps(report, indent=1).removesuffix("\n}") + f',\n "found": [\n{rows}\n ]\n}}\n'
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text)
    return bool(faults) or not good


if __name__ == "__main__":
    sys.exit(main())
