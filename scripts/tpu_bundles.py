"""Compare the TPU kernels' instruction schedules with those of jax's own ragged paged attention (v2).

    python scripts/tpu_bundles.py --chip v6e --output docs/measurements/bundles_v6e.json
    python scripts/tpu_bundles.py --chip v6e --spills --output spills_v6e.json

`jpaged/commands/bench/bundles.py` says what is counted, and how. The shape is 32/8 heads of 128, pages of 128 tokens,
bfloat16. v2 is compiled with many block sizes and the best one counts. With `--spills`, the shapes are those of the
compile gate with heads of 128, which is all that v2 takes. Decode may spill no register in its innermost loops, and
elsewhere no more than v2, which is one program for decode and prefill. Prefill may spill no more than v2 for each score
that an iteration of its innermost loop computes, with small blocks or else with blocks of our size. Products in float32
are exempt: v2 computes them from bfloat16 in one pass, ours take six.

Needs the wheels of the extra `aot`; takes some minutes.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gate_cells import FEATURES, REFUSED, Cell, all_cells

sys.path.insert(0, str(Path(__file__).parents[1]))

from jpaged.commands.bench import bundles
from jpaged.commands.bench.bundles import SPILLS, TOPOLOGIES, Compiler, DecodeLoops, Loop

if TYPE_CHECKING:
    from jpaged.pallas_kernels.ragged_paged_attention.tpu.sizes import TpuShape

HEADS, KV_HEADS, HEAD_SIZE, PAGE = 32, 8, 128, 128
PROMPT = 1024
V2_DECODE = ((1, 16), (1, 24), (1, 32), (2, 16), (2, 32))
V2_SHORT = ((1, 1),)
V2_PREFILL = ((128, 8), (256, 4), (256, 8))
"""Queries and pages of v2's blocks: sizes that were the best of (1 … 256) × (1 … 32) on one of the chips."""
V2 = "ragged_paged_attention"
V2_SMALL = 32, 512
"""Queries and tokens of v2's blocks in the first comparison of spills: small blocks compile in a fraction of the time
and spill less than large ones."""


GOALS = {
    "decode_per_row_token": {"v5e": 0.50, "v6e": 0.45, "v7x": 0.45},
    "row_of_100": dict.fromkeys(TOPOLOGIES, 0.5),
    "prompt_of_1024": dict.fromkeys(TOPOLOGIES, 0.8),
}
"""Measure → chip → the largest allowed ratio of our bundles to v2's."""


class Bench:
    """Compiles both kernels for one chip."""

    def __init__(self, compiler: Compiler):
        self.compiler = compiler

    def ours(self) -> dict[str, Any]:
        """Return the bundles of both programs of `TpuBackend`, at the sizes that it chooses."""
        from jpaged.pallas_kernels.ragged_paged_attention.tpu.backend import TpuBackend
        from jpaged.pallas_kernels.ragged_paged_attention.tpu.sizes import TpuShape, sizes_of

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
            "prompt_of_1024": bundles.bundles_of_prompt(prefill, PROMPT, shape, sizes, backend.tile_q),
            "prefill_spills": max(loop.slots[SPILLS] for loop in prefill if loop.slots["MXU"]),
        }

    def v2(self) -> dict[str, Any]:
        """Return v2's bundles at the best of its block sizes for each purpose."""
        decode = {sizes: self._v2_loops(*sizes) for sizes in V2_DECODE}
        short = {sizes: self._v2_loops(*sizes) for sizes in V2_SHORT}
        prefill = {sizes: self._v2_loops(*sizes) for sizes in V2_PREFILL}

        best_decode = min(decode, key=lambda sizes: inner_loop(decode[sizes]).size / sizes[1])
        best_short = min(short, key=lambda sizes: short[sizes][0].size)
        prompts = {
            # Every block of queries meets every block of keys: v2 does not leave out those behind the diagonal.
            sizes: PROMPT / sizes[0] * (loops[0].size + (-(-PROMPT // (sizes[1] * PAGE)) - 1) * inner_loop(loops).size)
            for sizes, loops in prefill.items()
        }
        best_prefill = min(prompts, key=lambda sizes: prompts[sizes])
        loop = inner_loop(decode[best_decode])
        return {
            "decode_blocks": best_decode,
            "decode_per_row_token": loop.size / (best_decode[1] * PAGE),
            "decode_loop": {"bundles": loop.size, **loop.slots},
            "short_blocks": best_short,
            "row_of_100": short[best_short][0].size,
            "prefill_blocks": best_prefill,
            "prompt_of_1024": prompts[best_prefill],
            "prefill_spills": inner_loop(prefill[best_prefill]).slots[SPILLS],
        }

    def spills(self, cell: Cell) -> dict[str, Any]:
        """Return the registers that our kernels spill at a cell's shape; `fault` says which count is too large."""
        from jpaged.pallas_kernels.ragged_paged_attention.tpu.backend import TpuBackend
        from jpaged.pallas_kernels.ragged_paged_attention.tpu.prefill import heads_per_chunk
        from jpaged.pallas_kernels.ragged_paged_attention.tpu.sizes import TpuShape

        dtype, kv_dtype = cell.dtypes
        shape = TpuShape(*cell.heads, cell.head_size, kv_dtype, cell.page_size)
        options = {name: FEATURES[cell.feature].get(name) for name in ("window", "soft_cap")}
        backend = TpuBackend.for_heads(self.compiler.chip, shape.num_heads, shape.head_size)
        decode, prefill = self.compiler.attention_loops(backend, shape, dtype, **options)
        inner = [loop.slots[SPILLS] for loop in decode if loop.slots["MXU"]]
        sub_kv = backend.sizes_for(shape.num_heads, bundles.page_layout(backend, shape), dtype).sub_kv
        bunch = heads_per_chunk(shape.num_heads // shape.num_kv_heads, backend.tile_q)
        body = max(loop.slots[SPILLS] for loop in prefill if loop.slots["MXU"])
        per_1000_scores = 1000 * body / (bunch * backend.tile_q * sub_kv)
        found: dict[str, Any] = {"decode_inner": inner, "decode": all_spills(decode), "prefill": all_spills(prefill)}
        found |= {"prefill_per_1000_scores": round(per_1000_scores, 2), "v2": [], "fault": None}
        for num_queries, num_tokens in (V2_SMALL, (backend.tile_q, sub_kv)):
            num_pages = max(num_tokens // shape.page_size, 1)
            try:
                self._compile_v2(num_queries, num_pages, shape, dtype, **options)
            except Exception as error:  # Whatever another kernel raises for a shape that it does not take.
                found["v2"].append(f"does not take it: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
                continue
            v2 = self.compiler.loops_of(V2)
            scores = self._v2_heads(shape, dtype) * num_queries * num_pages * shape.page_size
            v2_per_1000 = 1000 * inner_loop(v2).slots[SPILLS] / scores
            blocks = {"queries": num_queries, "pages": num_pages}
            found["v2"].append({**blocks, "all": all_spills(v2), "per_1000_scores": round(v2_per_1000, 2)})
            found["fault"] = None
            if found["decode"] > all_spills(v2):
                found["fault"] = "decode spills more than v2"
            elif "float32" not in (dtype, kv_dtype) and per_1000_scores > v2_per_1000:
                found["fault"] = "prefill spills more than v2"
            else:
                break
        if any(inner):
            found["fault"] = "decode spills in its innermost loops"
        return {**shape._asdict(), "step_dtype": dtype, **options, **found}

    def _v2_loops(self, num_queries: int, num_pages: int) -> list[Loop]:
        from jpaged.pallas_kernels.ragged_paged_attention.tpu.sizes import TpuShape

        self._compile_v2(num_queries, num_pages, TpuShape(HEADS, KV_HEADS, HEAD_SIZE, "bfloat16", PAGE), "bfloat16")
        return self.compiler.loops_of(V2)

    def _compile_v2(self, num_queries: int, num_pages: int, shape: TpuShape, dtype: str, **options: Any) -> None:
        """Compile v2 with blocks of these queries and pages; `options` are `window` and `soft_cap`."""
        import jax.numpy as jnp
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

        is_narrow = jnp.dtype(shape.dtype).itemsize == 1
        page_shape = shape.page_size, 2 * shape.num_kv_heads, shape.head_size
        total_pages = -(-bundles.CACHE_BYTES // (math.prod(page_shape) * jnp.dtype(shape.dtype).itemsize))
        num_tokens, ints = 256, functools.partial(self.compiler.shaped, dtype=jnp.int32)
        attention = functools.partial(
            kernel.ragged_paged_attention,
            sm_scale=shape.head_size**-0.5,
            num_kv_pages_per_block=num_pages,
            num_queries_per_block=num_queries,
            vmem_limit_bytes=100 << 20,
            sliding_window=options.get("window"),
            soft_cap=options.get("soft_cap"),
            **({"k_scale": 1.0, "v_scale": 1.0} if is_narrow else {}),
        )
        args = (
            self.compiler.shaped((num_tokens, shape.num_heads, shape.head_size), dtype),
            self.compiler.shaped((total_pages, *page_shape), shape.dtype),
            ints((bundles.ROWS,)),
            ints((bundles.ROWS, 4096 // shape.page_size)),
            ints((bundles.ROWS + 1,)),
            ints((1,)),
        )
        self.compiler.compile(attention, *args)

    def _v2_heads(self, shape: TpuShape, dtype: str) -> int:
        """Return the query heads that v2 computes in one iteration of its innermost loop."""
        import jax.numpy as jnp
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

        dtypes = jnp.dtype(dtype), jnp.dtype(shape.dtype)
        heads: int = kernel.get_min_heads_per_blk(shape.num_heads, 2 * shape.num_kv_heads, *dtypes)[0]
        return heads


def inner_loop(loops: list[Loop]) -> Loop:
    """Return the loop of v2 that holds its products."""
    return max(loops, key=lambda loop: loop.slots["MXU"])


def all_spills(loops: list[Loop]) -> int:
    """Return the registers that a kernel spills; a loop's own slots leave out those of the loops within it."""
    return sum(loop.slots[SPILLS] for loop in loops)


def spill_cells(chip: str) -> list[Cell]:
    """Return the gate's cells of the one head size that v2 takes, each shape once."""
    cells = [cell for cell in all_cells("tpu") if cell.chip == chip and cell.head_size == HEAD_SIZE]
    return list({cell[1:6]: cell for cell in cells if not REFUSED["tpu"][0](cell)}.values())


def bench_spills(bench: Bench) -> dict[str, Any]:
    """Compare the spills at all cells, print a line for each, and return the report."""
    found = []
    for cell in spill_cells(bench.compiler.chip):
        begin = time.perf_counter()
        found.append(bench.spills(cell))
        print(f"{time.perf_counter() - begin:.0f} s", found[-1], flush=True)
    faults = sum(bool(each["fault"]) for each in found)
    compared = sum(isinstance(each["v2"][-1], dict) for each in found)
    print(f"{bench.compiler.chip}: {len(found)} shapes, {compared} beside v2, {faults} spill more than they may")
    return {"fail": faults + (not compared), "compared": compared, "found": found}


def bench_bundles(bench: Bench) -> dict[str, Any]:
    """Return our bundles and v2's best, with the ratios first."""
    ours, v2 = bench.ours(), bench.v2()
    chip = bench.compiler.chip
    ratios = {name: ours[name] / v2[name] for name in ("decode_per_row_token", "row_of_100", "prompt_of_1024")}
    missed = [name for name, ratio in ratios.items() if ratio > GOALS[name][chip]]
    for name, ratio in ratios.items():
        print(f"{chip} {name}: {ours[name]:.2f}, v2 {v2[name]:.2f}: {ratio:.3f} of it, goal {GOALS[name][chip]}")
    print(f"{chip} spills: decode {ours['decode_loop'][SPILLS]}, tail {ours['tail_loop'][SPILLS]}, ", end="")
    print(f"prefill {ours['prefill_spills']} (v2 {v2['decode_loop'][SPILLS]}, {v2['prefill_spills']})")
    faults = len(missed) + any(ours[name][SPILLS] for name in ("decode_loop", "tail_loop"))
    return {"fail": faults, "ratios": ratios, "ours": ours, "v2": v2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=TOPOLOGIES, default="v6e")
    parser.add_argument("--spills", action="store_true", help="compare spilled registers at many shapes")
    parser.add_argument("--output", type=Path, help="write the report here, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundles.prepare(folder)
        bench = Bench(Compiler(args.chip, folder))
        report = (bench_spills if args.spills else bench_bundles)(bench)
    if args.output:
        report = {"chip": args.chip, "jax": importlib.metadata.version("jax"), **report}
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    return bool(report["fail"])


if __name__ == "__main__":
    sys.exit(main())
