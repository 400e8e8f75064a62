"""How long are the TPU kernels' instruction schedules, beside those of jax's own ragged paged attention (v2)?

    python scripts/tpu_bundles.py --chip v6e --output docs/measurements/bundles_v6e.json
    python scripts/tpu_bundles.py --chip v6e --spills --output docs/measurements/spills_v6e.json

What is counted, and how, is told in `jpaged/bundles.py`. The shape is 32/8 heads of 128, pages of 128 tokens, bfloat16.
v2 is compiled with many block sizes and the best one counts. With `--spills`, the shapes are those of the compile gate
that v2 takes, and what is compared are the registers spilled: at head size 128 decode has to have none in its innermost
loops, and no kernel more than v2's has in all.

Needs the wheels of the extra `aot`; takes some minutes.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gate_cells import FEATURES, Cell, all_cells

sys.path.insert(0, str(Path(__file__).parents[1]))

from jpaged.bundles import ROWS, SPILLS, TOPOLOGIES, Compiler, DecodeLoops, Loop, bundles_of_prompt, prepare

if TYPE_CHECKING:
    from jpaged.pallas_kernels.ragged_paged_attention.tpu_sizes import TpuShape

HEADS, KV_HEADS, HEAD_SIZE, PAGE = 32, 8, 128, 128
PROMPT = 1024
V2_DECODE = ((1, 16), (1, 24), (1, 32), (2, 16), (2, 32))
V2_SHORT = ((1, 1),)
V2_PREFILL = ((128, 8), (256, 4), (256, 8))
"""Queries and pages of v2's blocks: those that were the best, of (1 … 256) × (1 … 32), on one of the chips."""
V2_SPILLS = 32, 512
"""Queries and tokens of v2's blocks where spills are compared: the smallest that its own table has often."""


class Bench:
    """Compiles both kernels for one chip."""

    def __init__(self, compiler: Compiler):
        self.compiler = compiler

    def ours(self) -> dict[str, Any]:
        """Bundles of both programs of `TpuBackend`, at the sizes that it chooses."""
        from jpaged.pallas_kernels.ragged_paged_attention import TpuBackend
        from jpaged.pallas_kernels.ragged_paged_attention.tpu_sizes import TpuShape, sizes_of

        backend = TpuBackend(chip=self.compiler.chip)
        shape = TpuShape(HEADS, KV_HEADS, HEAD_SIZE, "bfloat16", PAGE)
        sizes = sizes_of(backend.chip, shape)
        loops, prefill = self.compiler.attention_loops(backend, shape)
        decode = DecodeLoops.of(loops, shape, sizes.decode)
        return {
            "sizes": {**sizes._asdict(), "decode": sizes.decode._asdict(), "tile_q": backend.tile_q},
            "decode_per_row_token": decode.full_tile / sizes.decode.tile,
            "decode_loop": {"bundles": decode.full.size, **decode.full.slots},
            "tail_loop": {"bundles": decode.tail.size, **decode.tail.slots},
            "row_of_100": decode.bundles_of_row(100, sizes.decode),
            "prompt_of_1024": bundles_of_prompt(prefill, PROMPT, shape, sizes, backend.tile_q),
            "prefill_spills": max(loop.slots[SPILLS] for loop in prefill if loop.slots["MXU"]),
        }

    def v2(self) -> dict[str, Any]:
        """The best of v2's block sizes for each purpose."""
        decode = {sizes: self._v2_loops(*sizes) for sizes in V2_DECODE}
        short = {sizes: self._v2_loops(*sizes) for sizes in V2_SHORT}
        prefill = {sizes: self._v2_loops(*sizes) for sizes in V2_PREFILL}

        def inner(loops: list[Loop]) -> Loop:
            return max(loops, key=lambda loop: loop.slots["MXU"])

        best_decode = min(decode, key=lambda sizes: inner(decode[sizes]).size / sizes[1])
        best_short = min(short, key=lambda sizes: short[sizes][0].size)
        prompts = {
            # Every block of queries meets every block of keys: v2 does not leave out those behind the diagonal.
            sizes: PROMPT / sizes[0] * (loops[0].size + (-(-PROMPT // (sizes[1] * PAGE)) - 1) * inner(loops).size)
            for sizes, loops in prefill.items()
        }
        best_prefill = min(prompts, key=lambda sizes: prompts[sizes])
        loop = inner(decode[best_decode])
        return {
            "decode_blocks": best_decode,
            "decode_per_row_token": loop.size / (best_decode[1] * PAGE),
            "decode_loop": {"bundles": loop.size, **loop.slots},
            "short_blocks": best_short,
            "row_of_100": short[best_short][0].size,
            "prefill_blocks": best_prefill,
            "prompt_of_1024": prompts[best_prefill],
            "prefill_spills": inner(prefill[best_prefill]).slots[SPILLS],
        }

    def spills(self, cell: Cell) -> dict[str, Any]:
        """Registers spilled by both at a cell's shape; `fault` says what is more than it may be. v2 has no sinks."""
        from jpaged.pallas_kernels.ragged_paged_attention import TpuBackend
        from jpaged.pallas_kernels.ragged_paged_attention.tpu_sizes import TpuShape

        shape = TpuShape(*cell.heads, cell.head_size, cell.dtype, cell.page_size)
        options = {name: value for name, value in FEATURES[cell.feature].items() if name != "sinks"}
        num_queries, num_tokens = V2_SPILLS
        found: dict[str, Any] = {**shape._asdict(), "options": options, "fault": None}
        try:
            v2 = self._v2_loops(num_queries, num_tokens // shape.page_size, shape, **options)
        except Exception as error:
            found["v2"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if shape.head_size != HEAD_SIZE:
                return found
        else:
            found["v2"] = all_spills(v2)
        backend = TpuBackend.for_heads(self.compiler.chip, shape.num_heads, shape.head_size)
        loops, prefill = self.compiler.attention_loops(backend, shape, **options)
        inner = [loop.slots[SPILLS] for loop in loops if loop.slots["MXU"]]
        found |= {"decode_inner": inner, "decode": all_spills(loops), "prefill": all_spills(prefill)}
        if shape.head_size == HEAD_SIZE and any(inner):
            found["fault"] = "decode spills in its innermost loops"
        elif isinstance(found["v2"], int) and max(found["decode"], found["prefill"]) > found["v2"]:
            found["fault"] = "spills more than v2"
        return found

    def _v2_loops(
        self, num_queries: int, num_pages: int, shape: TpuShape | None = None, **options: float
    ) -> list[Loop]:
        import jax.numpy as jnp
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

        from jpaged.pallas_kernels.ragged_paged_attention.tpu_sizes import TpuShape

        shape = shape or TpuShape(HEADS, KV_HEADS, HEAD_SIZE, "bfloat16", PAGE)
        num_tokens, ints = 256, functools.partial(self.compiler.shaped, dtype=jnp.int32)
        if "window" in options:
            options["sliding_window"] = options.pop("window")
        attention = functools.partial(
            kernel.ragged_paged_attention,
            sm_scale=shape.head_size**-0.5,
            num_kv_pages_per_block=num_pages,
            num_queries_per_block=num_queries,
            vmem_limit_bytes=100 << 20,
            **options,
        )
        args = (
            self.compiler.shaped((num_tokens, shape.num_heads, shape.head_size), shape.dtype),
            self.compiler.shaped((512, shape.page_size, 2 * shape.num_kv_heads, shape.head_size), shape.dtype),
            ints((ROWS,)),
            ints((ROWS, 4096 // shape.page_size)),
            ints((ROWS + 1,)),
            ints((1,)),
        )
        self.compiler.compile(attention, *args)
        return self.compiler.loops_of("ragged_paged_attention")


def all_spills(loops: list[Loop]) -> int:
    """Of a kernel: a loop's own do not count those of the loops in it."""
    return sum(loop.slots[SPILLS] for loop in loops)


def compared_cells(chip: str) -> list[Cell]:
    """The gate's cells whose shapes v2 could take: head sizes in whole lanes, numbers of two or four bytes."""
    cells = [
        cell
        for cell in all_cells("tpu")
        if cell.chip == chip and cell.head_size % 128 == 0 and cell.dtype in ("bfloat16", "float32")
    ]
    return list({(*cell[1:5], cell.feature): cell for cell in cells}.values())


def bench_spills(bench: Bench) -> dict[str, Any]:
    """Compare all cells, a line each."""
    found = []
    for cell in compared_cells(bench.compiler.chip):
        found.append(bench.spills(cell))
        print(found[-1], flush=True)
    faults = sum(bool(each["fault"]) for each in found)
    print(f"{bench.compiler.chip}: {len(found)} shapes, {faults} spill more than they may")
    return {"fail": faults, "found": found}


def bench_bundles(bench: Bench) -> dict[str, Any]:
    """Ours beside v2's best, ratios first."""
    ours, v2 = bench.ours(), bench.v2()
    chip = bench.compiler.chip
    ratios = {name: ours[name] / v2[name] for name in ("decode_per_row_token", "row_of_100", "prompt_of_1024")}
    for name, ratio in ratios.items():
        print(f"{chip} {name}: {ours[name]:.2f}, v2 {v2[name]:.2f}: {ratio:.3f} of it")
    print(f"{chip} spills: decode {ours['decode_loop'][SPILLS]}, tail {ours['tail_loop'][SPILLS]}, ", end="")
    print(f"prefill {ours['prefill_spills']} (v2 {v2['decode_loop'][SPILLS]}, {v2['prefill_spills']})")
    return {"fail": 0, "ratios": ratios, "ours": ours, "v2": v2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=TOPOLOGIES, default="v6e")
    parser.add_argument("--spills", action="store_true", help="compare spilled registers at many shapes")
    parser.add_argument("--output", type=Path, help="write the report here, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        bench = Bench(Compiler(args.chip, folder))
        report = (bench_spills if args.spills else bench_bundles)(bench)
    if args.output:
        report = {"chip": args.chip, "jax": importlib.metadata.version("jax"), **report}
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    return bool(report["fail"])


if __name__ == "__main__":
    sys.exit(main())
