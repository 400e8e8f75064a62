"""How long are the TPU kernels' instruction schedules, beside those of jax's own ragged paged attention (v2)?

    python scripts/tpu_bundles.py --chip v6e --output docs/measurements/bundles_v6e.json

What is counted, and how, is told in `jpaged/bundles.py`. The shape is 32/8 heads of 128, pages of 128 tokens, bfloat16.

Needs the wheels of the extra `aot`; takes some minutes. v2 is compiled with many block sizes and the best one counts.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from jpaged.bundles import ROWS, SPILLS, TOPOLOGIES, Compiler, DecodeLoops, Loop, bundles_of_prompt, prepare

HEADS, KV_HEADS, HEAD_SIZE, PAGE = 32, 8, 128, 128
PROMPT = 1024
V2_DECODE = ((1, 16), (1, 24), (1, 32), (2, 16), (2, 32))
V2_SHORT = ((1, 1),)
V2_PREFILL = ((128, 8), (256, 4), (256, 8))
"""Queries and pages of v2's blocks: those that were the best, of (1 … 256) × (1 … 32), on one of the chips."""


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
        decode = DecodeLoops.of(loops)
        return {
            "sizes": {**sizes._asdict(), "decode": sizes.decode._asdict(), "tile_q": backend.tile_q},
            "decode_per_row_token": decode.full.size / sizes.decode.tile,
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

    def _v2_loops(self, num_queries: int, num_pages: int) -> list[Loop]:
        import jax.numpy as jnp
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

        num_tokens, ints = 256, functools.partial(self.compiler.shaped, dtype=jnp.int32)
        attention = functools.partial(
            kernel.ragged_paged_attention,
            sm_scale=HEAD_SIZE**-0.5,
            num_kv_pages_per_block=num_pages,
            num_queries_per_block=num_queries,
            vmem_limit_bytes=100 << 20,
        )
        args = (
            self.compiler.shaped((num_tokens, HEADS, HEAD_SIZE), jnp.bfloat16),
            self.compiler.shaped((512, PAGE, 2 * KV_HEADS, HEAD_SIZE), jnp.bfloat16),
            ints((ROWS,)),
            ints((ROWS, 4096 // PAGE)),
            ints((ROWS + 1,)),
            ints((1,)),
        )
        self.compiler.compile(attention, *args)
        return self.compiler.loops_of("ragged_paged_attention")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=TOPOLOGIES, default="v6e")
    parser.add_argument("--output", type=Path, help="write the report here, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        bench = Bench(Compiler(args.chip, folder))
        ours, v2 = bench.ours(), bench.v2()
    ratios = {name: ours[name] / v2[name] for name in ("decode_per_row_token", "row_of_100", "prompt_of_1024")}
    for name, ratio in ratios.items():
        print(f"{args.chip} {name}: {ours[name]:.2f}, v2 {v2[name]:.2f}: {ratio:.3f} of it")
    print(f"{args.chip} spills: decode {ours['decode_loop'][SPILLS]}, tail {ours['tail_loop'][SPILLS]}, ", end="")
    print(f"prefill {ours['prefill_spills']} (v2 {v2['decode_loop'][SPILLS]}, {v2['prefill_spills']})")
    if args.output:
        import jax

        report = {"chip": args.chip, "jax": jax.__version__, "ratios": ratios, "ours": ours, "v2": v2}
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
