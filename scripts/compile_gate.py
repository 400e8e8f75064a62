"""Do the attention kernels compile for chips that are not there, and does nothing copy the cache?

    python scripts/compile_gate.py --chip v6e --output gate.json
    python scripts/compile_gate.py --chip v6e --share 1/3        # every third cell
    python scripts/compile_gate.py --list

One process a chip: the compiler reads its environment when it is loaded. A cell is a shape: heads, head size, dtype,
page, feature, step. Every pair of values of two of these is in some cell; besides there are the shapes of public models
and seeded random ones. Each is a step of two layers over a cache that is given up: it has to compile, to alias the
whole cache, and to need little memory beside it. Needs the wheels of the extra `aot`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}
MOST_TEMP_BYTES = 16 << 20
NUM_RANDOM = 200

VALUES: dict[str, tuple[Any, ...]] = {
    "heads": ((8, 8), (16, 8), (9, 3), (32, 8), (28, 4), (32, 4), (16, 1), (64, 4)),
    "head_size": (64, 80, 96, 128, 192, 256),
    "dtype": ("bfloat16", "float32"),
    "page_size": (16, 32, 64, 128, 256),
    "feature": ("none", "window", "soft_cap", "sinks", "all"),
    "step": ("decode", "mixed", "one token"),
}
FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "window": {"window": 1000},
    "soft_cap": {"soft_cap": 50.0},
    "sinks": {"sinks": True},
    "all": {"window": 128, "soft_cap": 30.0, "sinks": True},
}
STEPS = {"decode": (64, 64), "mixed": (256, 16), "one token": (1, 1)}
"""Tokens and rows of a step."""
MODELS: dict[str, tuple[tuple[int, int], int, str]] = {
    "Llama-3.1-8B": ((32, 8), 128, "none"),
    "Llama-3.1-70B": ((64, 8), 128, "none"),
    "Llama-3.2-1B": ((32, 8), 64, "none"),
    "Llama-3.2-3B": ((24, 8), 128, "none"),
    "Llama-2-7B": ((32, 32), 128, "none"),
    "Mistral-7B-v0.1": ((32, 8), 128, "window"),
    "Qwen2.5-0.5B": ((14, 2), 64, "none"),
    "Qwen2.5-7B": ((28, 4), 128, "none"),
    "Qwen3-0.6B": ((16, 8), 128, "none"),
    "Qwen3-30B-A3B": ((32, 4), 128, "none"),
    "Gemma-2-2B": ((8, 4), 256, "soft_cap"),
    "Gemma-2-9B": ((16, 8), 256, "soft_cap"),
    "Gemma-3-4B": ((8, 4), 256, "window"),
    "Gemma-3-27B": ((32, 16), 128, "window"),
    "Phi-3-mini": ((32, 32), 96, "none"),
    "Phi-4": ((40, 10), 128, "none"),
    "SmolLM2-135M": ((9, 3), 64, "none"),
    "SmolLM2-1.7B": ((32, 32), 64, "none"),
    "gpt-oss-20b": ((64, 8), 64, "all"),
    "Falcon-7B": ((71, 1), 64, "none"),
}
"""As their configurations say: query and KV heads, head size."""


class Cell(NamedTuple):
    """One shape to be compiled."""

    heads: tuple[int, int]
    head_size: int
    dtype: str
    page_size: int
    feature: str
    step: str
    why: str


def covering_cells() -> list[Cell]:
    """Cells that together have every pair of values, greedily chosen, the same each time."""
    names = list(VALUES)
    pairs = list(itertools.combinations(range(len(names)), 2))
    missing = {(a, x, b, y) for a, b in pairs for x in VALUES[names[a]] for y in VALUES[names[b]]}
    rng, cells = random.Random(0), []
    while missing:
        candidates = []
        for _ in range(60):
            a, x, b, y = rng.choice(sorted(missing, key=repr))
            values = [rng.choice(VALUES[name]) for name in names]
            values[a], values[b] = x, y
            candidates.append(values)
        best = max(candidates, key=lambda values: len(missing & set(_pairs_of(values, pairs))))
        missing -= set(_pairs_of(best, pairs))
        cells.append(Cell(*best, why="pairs"))
    return cells


def _pairs_of(values: list[Any], pairs: list[tuple[int, int]]) -> list[tuple[int, Any, int, Any]]:
    return [(a, values[a], b, values[b]) for a, b in pairs]


def all_cells() -> list[Cell]:
    """Pairs, public models, random ones; the same for every chip."""
    rng = random.Random(20261120)
    models = [
        Cell(heads, head_size, "bfloat16", 128 if index % 2 else 16, feature, step, why=model)
        for index, (model, (heads, head_size, feature)) in enumerate(MODELS.items())
        for step in ("decode", "mixed")
    ]
    chance = [Cell(*(rng.choice(values) for values in VALUES.values()), why="random") for _ in range(NUM_RANDOM)]
    return [*covering_cells(), *models, *chance]


def prepare() -> None:
    """Environment of a JAX that compiles for TPUs; before JAX is imported."""
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


class Gate:
    """Compiles cells for one chip."""

    def __init__(self, chip: str):
        from jax.experimental import topologies

        from jpaged.sharding import device_mesh

        topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
        self.mesh = device_mesh(topology.devices[:1])

    def compile(self, cell: Cell) -> dict[str, Any]:
        """What became of it; `fault` says what is not as it has to be."""
        import jax

        start = time.monotonic()
        try:
            with jax.set_mesh(self.mesh):
                lowered, cache_bytes = self._lower(cell)
            memory = lowered.compile().memory_analysis()
        except Exception as error:
            message = str(error).strip().splitlines()
            return {**cell._asdict(), "fault": f"{type(error).__name__}: {' '.join(message)[:400]}"}
        fault = None
        if memory.alias_size_in_bytes < cache_bytes:
            fault = f"{memory.alias_size_in_bytes} bytes of a cache of {cache_bytes} are aliased"
        elif memory.temp_size_in_bytes > MOST_TEMP_BYTES:
            fault = f"{memory.temp_size_in_bytes} bytes of temporary memory"
        seconds = round(time.monotonic() - start, 2)
        return {**cell._asdict(), "temp_bytes": memory.temp_size_in_bytes, "seconds": seconds, "fault": fault}

    def _lower(self, cell: Cell) -> tuple[Any, int]:
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec

        from jpaged.pallas_kernels.ragged_paged_attention import AttentionMetadata, LayerPlace, PagedCache, TpuBackend

        (num_heads, num_kv_heads), (num_tokens, num_rows) = cell.heads, STEPS[cell.step]
        backend, everywhere = TpuBackend(), NamedSharding(self.mesh, PartitionSpec())

        def shaped(*shape: int, dtype: Any = jnp.int32) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

        layout = backend.layout(
            num_layers=2,
            num_pages=8192 // cell.page_size,
            page_size=cell.page_size,
            num_kv_heads=num_kv_heads,
            head_size=cell.head_size,
            dtype=cell.dtype,
        )
        pages = tuple(shaped(*shape, dtype=layout.dtype) for shape in layout.shapes)
        cache = PagedCache(pages, layout, (LayerPlace(0, 0), LayerPlace(0, 1)), backend)
        step = AttentionMetadata(
            positions=shaped(num_tokens),
            slots=shaped(1, num_tokens),
            query_starts=shaped(num_rows + 1),
            context_lens=shaped(num_rows),
            page_tables=shaped(1, num_rows, 8192 // cell.page_size),
            num_rows=shaped(),
            num_decode_rows=shaped(),
            plan=shaped(backend.plan_len(num_tokens, num_rows)),
        )
        options = dict(FEATURES[cell.feature])
        sinks = shaped(num_heads, dtype=jnp.float32) if options.pop("sinks", False) else None
        q, k, v = (
            shaped(num_tokens, n, cell.head_size, dtype=layout.dtype) for n in (num_heads, num_kv_heads, num_kv_heads)
        )

        def two_layers(cache: Any, q: Any, k: Any, v: Any, step: Any, sinks: Any) -> Any:
            for layer in range(2):
                out, cache = cache.attend(layer, q, k, v, step, scale=cell.head_size**-0.5, sinks=sinks, **options)
                q, k = q + out, k + out[:, :num_kv_heads]
            return q, cache

        lowered = jax.jit(two_layers, donate_argnums=0).lower(cache, q, k, v, step, sinks)
        return lowered, layout.page_bytes * layout.num_pages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=TOPOLOGIES, default="v6e")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="the I-th of N shares of the cells")
    parser.add_argument("--kind", choices=("pairs", "models", "random"), help="only these cells")
    parser.add_argument("--output", type=Path, help="write the report here, as JSON")
    parser.add_argument("--list", action="store_true", help="print the cells, compile nothing")
    args = parser.parse_args()
    index, count = map(int, args.share.split("/"))
    cells = all_cells()
    if args.kind:
        kinds = {"pairs": {"pairs"}, "random": {"random"}, "models": set(MODELS)}
        cells = [cell for cell in cells if cell.why in kinds[args.kind]]
    cells = cells[index - 1 :: count]
    if args.list:
        print("\n".join(map(str, cells)))
        return 0
    prepare()
    sys.path.insert(0, str(ROOT))
    gate, found = Gate(args.chip), []
    for cell in cells:
        found.append(gate.compile(cell))
        print(f"{args.chip} {cell}: {found[-1]['fault'] or 'compiles'}", flush=True)
    faults = [each for each in found if each["fault"]]
    report = {"chip": args.chip, "share": args.share, "cells": len(found), "faults": len(faults), "found": found}
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{len(found) - len(faults)} of {len(found)} cells compile for {args.chip}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
