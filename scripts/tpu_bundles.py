"""How long are the TPU kernels' instruction schedules, beside those of jax's own ragged paged attention (v2)?

    python scripts/tpu_bundles.py --chip v6e --output docs/measurements/bundles_v6e.json

The compiler writes down every VLIW bundle of a kernel with the slots that it uses. A bundle takes a cycle if nothing
waits for memory; loops are told apart by their marks, and what a row or a prompt costs is the sum of its loops' bundles
times their turns. Both sides of a branch count, so that this is no less than what is executed. Static: caches, copies
and the rest of the chip are not in it. The shape is 32/8 heads of 128, pages of 128 tokens, bfloat16.

Needs the wheels of the extra `aot`; takes some minutes. v2 is compiled with many block sizes and the best one counts.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from compile_tpu import CHIPS, prepare

ROOT = Path(__file__).parents[1]
HEADS, KV_HEADS, HEAD_SIZE, PAGE, ROWS, TOKENS = 32, 8, 128, 128, 64, 8192
PROMPT = 1024
MOST_ROWS = 1024
"""Of our prefill's scores computed together."""
V2_DECODE = ((1, 16), (1, 24), (1, 32), (2, 16), (2, 32))
V2_SHORT = ((1, 1),)
V2_PREFILL = ((128, 8), (256, 4), (256, 8))
"""Queries and pages of v2's blocks: those that were the best, of (1 … 256) × (1 … 32), on one of the chips."""
SPILLS = "VSTORE:SPILL"


class Loop(NamedTuple):
    """A loop of a kernel, with the loops in it; `own` are the bundles in no inner loop."""

    begin: int
    end: int
    depth: int
    own: int
    slots: dict[str, int]

    @property
    def size(self) -> int:
        """Bundles, inner loops once."""
        return self.end - self.begin

    def holds(self, other: Loop) -> bool:
        """Whether `other` lies within."""
        return self.depth < other.depth and self.begin <= other.begin and other.end <= self.end


class Dump:
    """A folder that the compiler writes its schedules to."""

    def __init__(self, folder: str):
        self.folder = Path(folder)

    def clear(self) -> None:
        """Forget what was compiled before."""
        for path in self.folder.iterdir():
            path.unlink()

    def loops_of(self, kernel: str) -> list[Loop]:
        """The loops of the kernel of that name, in their order."""
        named = [path for path in self.folder.iterdir() if kernel in path.name]
        bundles = next(
            path for path in named if path.name.endswith("-final_bundles.txt") and "analysis" not in path.name
        )
        slots = next(path for path in named if path.name.endswith("-final_hlo-static-per-bundle-utilization.txt"))
        return _loops(bundles.read_text(), slots.read_text())


def _loops(bundles: str, utilization: str) -> list[Loop]:
    lines = re.findall(r"^\s*(?:0x[0-9a-f]+|0)\s+(\w\w)?\s*:\s*((?:>\s*)*)\{", bundles, re.MULTILINE)
    marks = [(mark, depth.count(">")) for mark, depth in lines]
    names = re.search(r"\n(MXU.*)\n", utilization)
    assert names, "the compiler's table of slots looks different"
    table = utilization.split("== UTILIZATION:")[1].strip().splitlines()
    slots = [list(map(int, line.split())) for line in table if re.fullmatch(r"[\d ]+", line)]
    assert len(slots) == len(marks), "the compiler's dump has another form than this script knows"
    # A loop goes from its mark to the next mark that lies outside it; unmarked lines may show any depth.
    spans = []
    for begin, (mark, depth) in enumerate(marks):
        if mark == "LB":
            end = begin + 1
            while end < len(marks) and not _is_outside(*marks[end], depth):
                end += 1
            spans.append((begin, end, depth))
    loops = []
    for begin, end, depth in spans:
        inner = {n for b, e, d in spans if d > depth and begin <= b and e <= end for n in range(b, e)}
        own = [n for n in range(begin, end) if n not in inner]
        totals = [sum(slots[n][column] for n in own) for column in range(len(slots[0]))]
        loops.append(Loop(begin, end, depth, len(own), dict(zip(names[1].split(", "), totals, strict=True))))
    return loops


def _is_outside(mark: str, depth: int, of: int) -> bool:
    return bool(mark) and (depth < of or (mark == "LB" and depth <= of))


class Bench:
    """Compiles both kernels for one chip."""

    def __init__(self, chip: str, dump: Dump):
        import jax
        from jax.experimental import topologies
        from jax.sharding import NamedSharding, PartitionSpec

        from jpaged.sharding import device_mesh

        self.chip, self.dump = chip, dump
        topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
        self.mesh = device_mesh(topology.devices[:1])
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        self.shaped = functools.partial(jax.ShapeDtypeStruct, sharding=everywhere)

    def compile(self, function: Any, *args: Any) -> None:
        import jax

        self.dump.clear()
        with jax.set_mesh(self.mesh):
            jax.jit(function).lower(*args).compile()

    def ours(self) -> dict[str, Any]:
        """Bundles of both programs of `TpuBackend`, at the sizes that it chooses."""
        import jax.numpy as jnp

        from jpaged.pallas_kernels.ragged_paged_attention import AttentionMetadata, LayerPlace, PagedCache, TpuBackend
        from jpaged.pallas_kernels.ragged_paged_attention.tpu_decode import BLOCK
        from jpaged.pallas_kernels.ragged_paged_attention.tpu_decode_kernel import PAIR
        from jpaged.pallas_kernels.ragged_paged_attention.tpu_sizes import TpuShape, sizes_of

        backend, shaped = TpuBackend(chip=self.chip), self.shaped
        sizes = sizes_of(self.chip, TpuShape(HEADS, KV_HEADS, HEAD_SIZE, "bfloat16", PAGE))
        layout = backend.layout(
            num_layers=1, num_pages=512, page_size=PAGE, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype="bfloat16"
        )
        pages = tuple(shaped(shape, layout.dtype) for shape in layout.shapes)
        cache = PagedCache(pages, layout, (LayerPlace(0, 0),), backend)
        ints = functools.partial(shaped, dtype=jnp.int32)
        step = AttentionMetadata(
            positions=ints((TOKENS,)),
            slots=ints((1, TOKENS)),
            query_starts=ints((ROWS + 1,)),
            context_lens=ints((ROWS,)),
            page_tables=ints((1, ROWS, 4096 // PAGE)),
            num_rows=ints(()),
            num_decode_rows=ints(()),
            plan=ints((backend.plan_len(TOKENS, ROWS),)),
        )
        q, k, v = (shaped((TOKENS, n, HEAD_SIZE), jnp.bfloat16) for n in (HEADS, KV_HEADS, KV_HEADS))

        def attend(cache: Any, q: Any, k: Any, v: Any, step: Any) -> Any:
            return cache.attend(0, q, k, v, step, scale=HEAD_SIZE**-0.5)

        self.compile(attend, cache, q, k, v, step)
        decode, prefill = self.dump.loops_of("ragged_paged_decode"), self.dump.loops_of("ragged_paged_prefill")
        grid, (full, tail) = decode[0], [loop for loop in decode if loop.slots["MXU"]]
        around_full = next(loop for loop in decode if loop.depth == 2 and loop.holds(full))
        block_of_short_rows = grid.size - around_full.size + (BLOCK // PAIR - 1) * tail.size
        return {
            "sizes": {**sizes._asdict(), "decode": sizes.decode._asdict(), "tile_q": backend.tile_q},
            "decode_per_row_token": full.size / sizes.decode.tile,
            "decode_loop": {"bundles": full.size, **full.slots},
            "tail_loop": {"bundles": tail.size, **tail.slots},
            "row_of_100": block_of_short_rows / BLOCK,
            "prompt_of_1024": _prompt_bundles(prefill, backend.tile_q, sizes.tile_kv, sizes.sub_kv),
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

        num_tokens, ints = 256, functools.partial(self.shaped, dtype=jnp.int32)
        attention = functools.partial(
            kernel.ragged_paged_attention,
            sm_scale=HEAD_SIZE**-0.5,
            num_kv_pages_per_block=num_pages,
            num_queries_per_block=num_queries,
            vmem_limit_bytes=100 << 20,
        )
        args = (
            self.shaped((num_tokens, HEADS, HEAD_SIZE), jnp.bfloat16),
            self.shaped((512, PAGE, 2 * KV_HEADS, HEAD_SIZE), jnp.bfloat16),
            ints((ROWS,)),
            ints((ROWS, 4096 // PAGE)),
            ints((ROWS + 1,)),
            ints((1,)),
        )
        self.compile(attention, *args)
        return self.dump.loops_of("ragged_paged_attention")


def _prompt_bundles(loops: list[Loop], tile_q: int, tile_kv: int, sub: int) -> int:
    """Of all query tiles of a prompt: what surrounds the loops over heads, and these once for each piece of keys."""
    whole, masked, half = (loop for loop in loops if loop.slots["MXU"])
    key_tiles = next(loop for loop in loops if loop.depth == 2 and loop.holds(whole))
    around_queries, around_keys = loops[0].size - key_tiles.size, key_tiles.size - whole.size - masked.size - half.size
    bunches = KV_HEADS if HEADS // KV_HEADS * tile_q <= MOST_ROWS else HEADS
    total = 0
    for position in range(0, PROMPT, tile_q):
        end = position + tile_q
        total += around_queries + -(-end // tile_kv) * around_keys
        for begin in range(0, end, sub):
            is_whole, is_long = begin + sub - 1 <= position, min(end - begin, sub) > sub // 2
            total += bunches * (whole if is_whole else masked if is_long else half).size
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=CHIPS, default="v6e")
    parser.add_argument("--output", type=Path, help="write the report here, as JSON")
    args = parser.parse_args()
    prepare()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        bench = Bench(args.chip, Dump(folder))
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
