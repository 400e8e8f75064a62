"""The shapes that the compile gate compiles attention for, and the program it compiles for each.

No machine with the chip is needed. Every pair of values of two of a cell's fields, the chip among them, is in some
cell; besides there are the shapes of public models, for every chip, and seeded random ones. A program is a step of two
layers over a donated cache.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

NUM_RANDOM = 200


class Cell(NamedTuple):
    """One shape that the gate compiles, with the chip it is compiled for."""

    chip: str
    heads: tuple[int, int]
    head_size: int
    dtype: str
    page_size: int
    feature: str
    step: str
    why: str

    @property
    def dtypes(self) -> tuple[str, str]:
        """Return two dtypes: that of queries, keys and values, and that of the pages."""
        first, _, pages = self.dtype.partition(" on ")
        if pages:
            return first, pages
        return ("bfloat16" if first in ("int8", "float8_e4m3fn") else first), first

    @property
    def decodes_only(self) -> bool:
        """Return whether the cell's program takes rows with one query only."""
        return self.step in DECODE_STEPS


HEADS = ((8, 8), (16, 8), (9, 3), (32, 8), (40, 8), (12, 2), (28, 4), (32, 4), (96, 8), (16, 1), (64, 4))
VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "tpu": {
        "chip": ("v5e", "v6e", "v7x"),
        "heads": HEADS,
        "head_size": (64, 80, 96, 112, 128, 192, 256),
        "dtype": (
            "bfloat16",
            "float32",
            "int8",
            "float8_e4m3fn",
            "float32 on bfloat16",
            "bfloat16 on float32",
            "float32 on int8",
        ),
        "page_size": (16, 32, 64, 128, 256),
        "feature": ("none", "window", "soft_cap", "sinks", "all", "read only"),
        "step": ("decode", "mixed", "prefill", "one token"),
    },
    "gpu": {
        "chip": ("a100", "h200", "b200"),
        "heads": (*HEADS, (24, 1)),
        "head_size": (64, 80, 96, 128, 192, 256),
        "dtype": ("bfloat16", "int8", "float8_e4m3fn"),
        "page_size": (16, 32, 64),
        "feature": ("none", "window", "soft_cap", "sinks", "all", "read only"),
        "step": ("decode", "mixed", "prefill", "one token"),
    },
}
"""Platform → field of a `Cell` → the values that its kernels are compiled for."""
FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "window": {"window": 1000},
    "soft_cap": {"soft_cap": 50.0},
    "sinks": {"sinks": True},
    "all": {"window": 128, "soft_cap": 30.0, "sinks": True},
    "read only": {"reads": True},
    "mistral": {"window": 4096},
    "gemma-2": {"window": 4096, "soft_cap": 50.0},
    "gemma-3": {"window": 1024},
    "gpt-oss": {"window": 128, "sinks": True},
}
"""Feature → keyword arguments of `attend`. `sinks` stands for an array of sinks; with `reads` the step has no keys and
values to write, since it reads the pages of another layer."""
DECODE_STEPS = ("decode", "one token")
"""Steps that are compiled by the program of steps that only decode."""
STEPS = {"decode": (64, 64), "mixed": (256, 16), "many rows": (256, 128), "prefill": (8192, 256), "one token": (1, 1)}
"""Tokens and rows of a step; prefill's are the most that an engine takes by default."""
REFUSED: dict[str, tuple[Callable[[Cell], bool], str]] = {
    "tpu": (
        lambda cell: cell.page_size < 32 and cell.dtypes[1] in ("int8", "float8_e4m3fn"),
        "cannot statically prove that index in dimension 2 is a multiple of 32",
    ),
    "gpu": (
        lambda cell: (
            cell.head_size in (80, 96, 192)
            and (cell.dtypes[1] != "bfloat16" or (cell.chip, cell.head_size, cell.page_size) == ("a100", 80, 16))
        ),
        "copies to shared memory cannot divide such rows",
    ),
    "gpu, wgmma": (lambda cell: cell.head_size not in (64, 128), "its rows are no blocks, or its sums too many"),
}
"""Platform → cells that its kernels refuse, and the reason; for TPUs the compiler's message. The rest must compile."""
MODELS: dict[str, tuple[tuple[int, int], int, str]] = {
    "Llama-3.1-8B": ((32, 8), 128, "none"),
    "Llama-3.1-70B": ((64, 8), 128, "none"),
    "Llama-3.2-1B": ((32, 8), 64, "none"),
    "Llama-3.2-3B": ((24, 8), 128, "none"),
    "Llama-2-7B": ((32, 32), 128, "none"),
    "Mistral-7B-v0.1": ((32, 8), 128, "mistral"),
    "Qwen2.5-0.5B": ((14, 2), 64, "none"),
    "Qwen2.5-7B": ((28, 4), 128, "none"),
    "Qwen3-0.6B": ((16, 8), 128, "none"),
    "Qwen3-30B-A3B": ((32, 4), 128, "none"),
    "Gemma-2-2B": ((8, 4), 256, "gemma-2"),
    "Gemma-2-9B": ((16, 8), 256, "gemma-2"),
    "Gemma-3-4B": ((8, 4), 256, "gemma-3"),
    "Gemma-3-27B": ((32, 16), 128, "gemma-3"),
    "Phi-3-mini": ((32, 32), 96, "none"),
    "Phi-4": ((40, 10), 128, "none"),
    "SmolLM2-135M": ((9, 3), 64, "none"),
    "SmolLM2-1.7B": ((32, 32), 64, "none"),
    "gpt-oss-20b": ((64, 8), 64, "gpt-oss"),
    "Falcon-7B": ((71, 1), 64, "none"),
}
"""Public model → (query heads, KV heads), head size and feature, as its configuration has them."""
MOST_LAYER_BYTES = 32 << 20
"""The most temporary memory of `sharded_layer`: room for its activations of 256 tokens, in bfloat16 and float32."""
MODEL_PAGES = {"tpu": 128, "gpu": 64}
"""Platform → tokens of a page in an engine with default options."""


def covering_cells(platform: str) -> list[Cell]:
    """Return cells that together have every pair of values that is not refused; a greedy, repeatable choice."""
    values_of, is_refused = VALUES[platform], REFUSED[platform][0]
    names = list(values_of)
    pairs = list(itertools.combinations(range(len(names)), 2))
    first = [values[0] for values in values_of.values()]
    missing = {
        (a, x, b, y)
        for a, b in pairs
        for x in values_of[names[a]]
        for y in values_of[names[b]]
        if not is_refused(Cell(*_with_pair(first, a, x, b, y), why=""))
    }
    rng, cells = random.Random(0), []
    while missing:
        candidates = []
        while len(candidates) < 60:
            values = _with_pair([rng.choice(values_of[name]) for name in names], *rng.choice(sorted(missing, key=repr)))
            if not is_refused(Cell(*values, why="")):
                candidates.append(values)
        best = max(candidates, key=lambda values: len(missing & set(_pairs_of(values, pairs))))
        missing -= set(_pairs_of(best, pairs))
        cells.append(Cell(*best, why="pairs"))
    return cells


def _with_pair(values: list[Any], a: int, x: Any, b: int, y: Any) -> list[Any]:
    return [x if index == a else y if index == b else value for index, value in enumerate(values)]


def _pairs_of(values: list[Any], pairs: list[tuple[int, int]]) -> list[tuple[int, Any, int, Any]]:
    return [(a, values[a], b, values[b]) for a, b in pairs]


def all_cells(platform: str) -> list[Cell]:
    """Return the cells of all pairs, of public models and of seeded random shapes, the same in each run."""
    rng = random.Random(20261120)
    models = [
        Cell(chip, heads, head_size, "bfloat16", MODEL_PAGES[platform], feature, step, why=model)
        for chip in VALUES[platform]["chip"]
        for model, (heads, head_size, feature) in MODELS.items()
        for step in ("decode", "prefill")
    ]
    values = VALUES[platform].values()
    chance = [Cell(*(rng.choice(each) for each in values), why="random") for _ in range(NUM_RANDOM)]
    return [*covering_cells(platform), *models, *chance]


def cache_layout(cell: Cell, backend: Any) -> Any:
    """Return the layout of a cache of two layers, large enough to lie in HBM.

    Raises ValueError if the backend does not support the cell.
    """
    from jpaged.commands.bench.bundles import CACHE_BYTES
    from jpaged.pallas_kernels.ragged_paged_attention.interface import KVShape

    layout = backend.layout(KVShape(2, 1, cell.page_size, cell.heads[1], cell.head_size, cell.dtypes[1]))
    return dataclasses.replace(layout, num_pages=-(-CACHE_BYTES // layout.page_bytes))


def two_layers(cell: Cell, backend: Any, layout: Any, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a step of two layers, to be lowered, and the shapes of its arguments: cache, q, k, v, step, sinks."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.layout import Format, Layout
    from jax.sharding import NamedSharding, PartitionSpec

    from jpaged.pallas_kernels.ragged_paged_attention.interface import AttentionMetadata, LayerPlace
    from jpaged.pallas_kernels.ragged_paged_attention.kv_scales import KVScales
    from jpaged.pallas_kernels.ragged_paged_attention.paged_cache import PagedCache

    (num_heads, num_kv_heads), (num_tokens, num_rows) = cell.heads, STEPS[cell.step]
    everywhere = NamedSharding(mesh, PartitionSpec())

    def shaped(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    def by_token(num_heads: int) -> Any:
        """Return the shape of an array [T, heads, H] that lies by token, as kernels read it.

        XLA would otherwise lay some arguments out by head, and copy them.
        """
        layout = Format(Layout((0, 1, 2)), everywhere)
        return jax.ShapeDtypeStruct((num_tokens, num_heads, cell.head_size), dtype, sharding=layout)

    pages = tuple(shaped(*shape, dtype=layout.dtype) for shape in layout.shapes)
    scales, dtype = None, jnp.dtype(cell.dtypes[0])
    if layout.dtype.itemsize == 1:
        scales = KVScales(*[shaped(2, num_kv_heads, dtype=jnp.float32)] * 2)
    cache = PagedCache(pages, layout, (LayerPlace(0, 0), LayerPlace(0, 1)), backend, scales)
    step = AttentionMetadata(
        positions=shaped(num_tokens),
        slot_mapping=shaped(1, num_tokens),
        query_starts=shaped(num_rows + 1),
        context_lens=shaped(num_rows),
        page_tables=shaped(1, num_rows, 8192 // cell.page_size),
        num_rows=shaped(),
        num_decode_rows=shaped(),
        plan=shaped(backend.plan_len(num_tokens, num_rows, decodes_only=cell.decodes_only)),
        decodes_only=cell.decodes_only,
    )
    options = dict(FEATURES[cell.feature])
    sinks = shaped(num_heads, dtype=jnp.float32) if options.pop("sinks", False) else None
    k, v = (None, None) if options.pop("reads", False) else (by_token(num_kv_heads), by_token(num_kv_heads))

    def program(cache: Any, q: Any, k: Any, v: Any, step: Any, sinks: Any) -> Any:
        results = []
        for layer in range(2):
            q, cache = cache.attend(layer, q, k, v, step, scale=cell.head_size**-0.5, sinks=sinks, **options)
            # A model has a product here. Without it XLA would gather the next layer's sorted queries from this one's.
            q = jax.lax.optimization_barrier(q)
            results.append(q)  # What is returned is no temporary memory.
            # As in a model, what the next layer writes depends on this one's output. A write that did not could come
            # before this layer's read, and would want a copy of the cache. A number that the compiler does not know to
            # be 0 takes no memory; keys and values that depended on the output would take theirs.
            late = jnp.minimum(q[0, 0, 0].astype(jnp.int32), 0)
            numbers = {name: getattr(step, name) + late for name in ("slot_mapping", "context_lens", "plan")}
            step = dataclasses.replace(step, **numbers)
            cache = dataclasses.replace(cache, scales=jax.tree.map(lambda scale: scale + late, cache.scales))  # noqa: B023
        # In the order in which JAX pairs donated arguments with results of their shape.
        return (results[1], k, v, results[0]), cache

    q = by_token(num_heads)
    layouts = tuple(x and x.format for x in (q, k, v, q))
    to_lower = jax.jit(program, donate_argnums=(0, 1, 2, 3), out_shardings=(layouts, None))
    return to_lower, (cache, q, k, v, step, sinks)


def page_table_copies(cell: Cell, hlo: str) -> int:
    """Return how many instructions of a compiled program of `two_layers` bring its page tables into another form.

    Copies from one memory to another, which run beside other work, are left out.
    """
    num_rows, table_len = STEPS[cell.step][1], 8192 // cell.page_size
    made = re.findall(r"= s32\[([\d,]+)\]\S* (?:reshape|transpose|fusion)\(", hlo)
    return sum(math.prod(map(int, dims.split(","))) == num_rows * table_len for dims in made)


def aliased_parameters(hlo: str) -> set[int]:
    """Return the numbers of the parameters whose memory a compiled program's results take, read from its first line."""
    return {int(number) for number in re.findall(r"\((\d+), \{\}, (?:may|must)-alias\)", hlo.split("\n", 1)[0])}


def sharded_layer(backend: Any, mesh: Any, page_size: int) -> tuple[Any, tuple[Any, ...], int]:
    """Build one whole layer of Llama 3 8B, its 32/8 heads of 128 and its MLP sharded over the mesh.

    `backend` is made for the heads of one chip. Returns the program, its arguments' shapes, and the number of arrays
    that the cache has on one chip.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jpaged.models.config.rope import RopeConfig
    from jpaged.models.layers import RMSNorm, WeightMaker
    from jpaged.models.rope import inverse_frequencies, rotation_at
    from jpaged.pallas_kernels.ragged_paged_attention.interface import AttentionMetadata, KVShape, LayerPlace
    from jpaged.pallas_kernels.ragged_paged_attention.paged_cache import PagedCache
    from jpaged.sharding import TENSOR_AXIS

    (num_heads, num_kv_heads), head_size, num_tokens, num_rows = (32, 8), 128, 256, 16
    hidden_size, inner_size = 4096, 14336
    num_chips, num_pages = mesh.shape[TENSOR_AXIS], 8192 // page_size
    whole, local = (
        backend.layout(KVShape(1, num_pages, page_size, n, head_size, "bfloat16"))
        for n in (num_kv_heads, num_kv_heads // num_chips)
    )

    def shaped(shape: tuple[int, ...], spec: PartitionSpec, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    everywhere, by_head = PartitionSpec(), PartitionSpec(None, TENSOR_AXIS)
    pages = tuple(shaped(shape, by_head, whole.dtype) for shape in whole.shapes)
    weights = {
        "q": shaped((hidden_size, num_heads, head_size), by_head),
        "k": shaped((hidden_size, num_kv_heads, head_size), by_head),
        "v": shaped((hidden_size, num_kv_heads, head_size), by_head),
        "o": shaped((num_heads, head_size, hidden_size), PartitionSpec(TENSOR_AXIS)),
        "gate": shaped((hidden_size, inner_size), by_head),
        "up": shaped((hidden_size, inner_size), by_head),
        "down": shaped((inner_size, hidden_size), PartitionSpec(TENSOR_AXIS)),
    }
    specs = {name: weight.sharding.spec for name, weight in weights.items()}
    shapes = {
        "positions": (num_tokens,),
        "slot_mapping": (1, num_tokens),
        "query_starts": (num_rows + 1,),
        "context_lens": (num_rows,),
        "page_tables": (1, num_rows, num_pages),
        "num_rows": (),
        "num_decode_rows": (),
        "plan": (backend.plan_len(num_tokens, num_rows),),
    }
    step = AttentionMetadata(**{name: shaped(shape, everywhere, jnp.int32) for name, shape in shapes.items()})

    make = WeightMaker(
        new=lambda shape, axes, fill: jnp.ones(shape, jnp.bfloat16),
        num_shards=mesh.size,
        dtype=jnp.bfloat16,
    )

    def normed(x_TD: Any) -> Any:
        return RMSNorm(hidden_size, eps=1e-5, make=make)(x_TD)

    def summed(spec: str, x: Any, weight: Any) -> Any:
        out_TD = jnp.einsum(spec, x, weight, preferred_element_type=jnp.float32)
        return jax.lax.psum(out_TD, TENSOR_AXIS).astype(x.dtype)

    def on_a_chip(pages: Any, x_TD: Any, weights: Any, step: Any) -> Any:
        q, k, v = (jnp.einsum("TD,DNH->TNH", normed(x_TD), weights[name]) for name in "qkv")
        frequencies = inverse_frequencies(RopeConfig(theta=500000.0), head_size)
        rotation = rotation_at(step.positions, frequencies, 1.0)
        q, k = rotation.apply(q), rotation.apply(k)
        cache = PagedCache(pages, local, (LayerPlace(0, 0),), backend)
        out_TNH, cache = cache.attend(0, q, k, v, step, scale=head_size**-0.5)
        x_TD += summed("TNH,NHD->TD", out_TNH, weights["o"])
        gate, up = (jnp.einsum("TD,DF->TF", normed(x_TD), weights[name]) for name in ("gate", "up"))
        return cache.pages, x_TD + summed("TF,FD->TD", jax.nn.silu(gate) * up, weights["down"])

    program = jax.shard_map(
        on_a_chip,
        mesh=mesh,
        in_specs=((by_head,) * len(pages), everywhere, specs, everywhere),
        out_specs=((by_head,) * len(pages), everywhere),
        check_vma=False,  # Kernels do not say how their results vary over the mesh.
    )
    arguments = pages, shaped((num_tokens, hidden_size), everywhere), weights, step
    return program, arguments, len(pages)


def check_sharded_layer(gate: Any, page_size: int) -> dict[str, Any]:
    """Compile `sharded_layer` for four chips and return its entry in the report.

    `fault` is None if it has two sums over the chips, a wholly aliased cache and no spills.
    """
    import jax

    backend = gate.backend(8, 2, 128, ())
    program, arguments, num_arrays = sharded_layer(backend, gate.mesh, page_size)
    with gate.told(), jax.set_mesh(gate.mesh):
        lowered = jax.jit(program, donate_argnums=0).lower(*arguments)
    executable = lowered.compile()
    hlo, temp_bytes = executable.as_text(), executable.memory_analysis().temp_size_in_bytes
    collectives = len(
        re.findall(r" (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", hlo)
    )
    if not set(range(num_arrays)) <= aliased_parameters(hlo):
        fault = "the cache is not aliased whole"
    elif collectives != 2:
        fault = f"{collectives} collectives, wanted two sums"
    elif temp_bytes > MOST_LAYER_BYTES:
        fault = f"{temp_bytes} bytes of temporary memory"
    else:
        fault = gate.spilled(lowered.as_text())
    return {"temp_bytes": temp_bytes, "collectives": collectives, "fault": fault}
