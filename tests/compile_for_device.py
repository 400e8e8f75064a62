"""Compiles programs that move pages, attention in plain XLA, and the loops that kernels are timed by, for chips that
are not there; prints what came of it.

    python compile_for_device.py v6e|h100|cpu NUM_DEVICES NUM_PAGES

One JSON object, bytes per chip. A process of its own, because JAX reads its environment when it starts; all but
`cpu` needs the wheels of the extra `aot`.
"""

import json
import math
import os
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from compile_gpu import GpuGate
from compile_tpu import TpuGate
from gate_cells import Cell, two_layers

ROWS = 64
"""Of decode, 8,192 tokens each: K1's first shape."""


def gate_of(target: str, num_devices: int):
    """To be called before JAX is imported: it reads what the gates write into the environment. None for the CPU."""
    if target == "v6e":
        return TpuGate("v6e", num_devices)
    if target == "h100":
        return GpuGate("h100", num_devices)
    os.environ["JAX_PLATFORMS"] = "cpu"
    return None


def mesh_of(gate, num_devices: int):
    if gate:
        return gate.mesh
    import jax

    from jpaged.sharding import device_mesh

    return device_mesh(jax.devices()[:num_devices])


def move_reports(mesh, target: str, num_devices: int, num_pages: int) -> dict:
    """For the cache of a model of 8e9 parameters, its heads spread over the chips."""
    from jpaged.pallas_kernels.ragged_paged_attention import XlaBackend
    from jpaged.programs import move_programs

    platform = {"v6e": "tpu", "h100": "gpu"}.get(target, target)
    layout = XlaBackend(platform=platform).layout(
        num_layers=32,
        num_pages=num_pages,
        page_size=128 if platform == "tpu" else 64,
        num_kv_heads=8,
        head_size=128,
        dtype="float32" if platform == "cpu" else "bfloat16",
    )
    programs = {name: memory_of(lower()) for (name,), lower in move_programs(layout, mesh, num_host_blocks=1).items()}
    if num_devices == 1:
        for pages in (num_pages, 2 * num_pages):
            for is_sharing in (False, True):
                name = f"attention, {'shared prefixes, ' * is_sharing}{pages} pages"
                lowered, own_bytes = lower_attention(
                    platform, mesh, replace(layout, num_layers=2, num_pages=pages), is_sharing
                )
                programs[name] = memory_of(lowered)
                programs[name]["aliased"] -= own_bytes
    kind = mesh.devices.flat[0].device_kind
    return {"kind": kind, "page_bytes": layout.page_bytes // num_devices, "programs": programs}


def memory_of(lowered) -> dict:
    executable = lowered.compile()
    memory = executable.memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "collectives": len(re.findall(r"\b(?:all-|reduce-scatter|collective-)", executable.as_text())),
    }


def lower_attention(platform: str, mesh, layout, is_sharing: bool):
    """Two layers of a step of 256 tokens in at most 128 rows, decode rows and others.

    And the bytes of its queries, keys and values, which are given up beside the cache.
    """
    import jax

    from jpaged.pallas_kernels.ragged_paged_attention import XlaBackend

    heads = (32, layout.num_kv_heads)
    cell = Cell(
        platform, heads, layout.head_size, str(layout.dtype), layout.page_size, "none", "many rows", "no kernel"
    )
    backend = XlaBackend(platform=platform, share_prefixes=is_sharing)
    program, arguments = two_layers(cell, backend, layout, mesh)
    own_bytes = sum(x.size * x.dtype.itemsize for x in arguments[1:4])
    with jax.set_mesh(mesh):
        return program.lower(*arguments), own_bytes


def loop_reports(gate, target: str) -> dict:
    """Of the loops that K1 is the ratio of: the copy, and decode by the kernels, or by plain XLA where JAX has none."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec
    from kernel_check import Bench
    from kernel_speed import LLAMA, Loop, Sizes, copy_loop, loop_of, run

    from jpaged.pallas_kernels.ragged_paged_attention import XlaBackend

    has_kernels = target == "v6e" or jax.__version_info__ >= (0, 11)
    backend = gate.backend(32, 8, 128, (None,)) if has_kernels else XlaBackend(platform="gpu")
    case = replace(LLAMA, page_size=128 if target == "v6e" else 64)
    bench = Bench(lambda case: backend, 0)
    num_bytes = Sizes().copied_bytes
    decode_bytes = ROWS * 8192 * case.num_kv_heads * case.head_size * 2
    makers = {
        "copy": (lambda: copy_loop(num_bytes), num_bytes),
        "decode": (lambda: loop_of(bench.batch(case, [1] * ROWS, [8192] * ROWS)), decode_bytes),
    }
    everywhere, found = NamedSharding(gate.mesh, PartitionSpec()), {}
    for name, (make, buffer_bytes) in makers.items():
        bodies = []

        def arrays(make=make, bodies=bodies):
            loop = make()
            bodies.append(loop.body)
            return loop.first, loop.others

        # Shapes alone: the arrays are larger than this machine's memory may be.
        first, others = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), jax.eval_shape(arrays)
        )
        loop = Loop(bodies[0], first, others)
        with gate.told() if has_kernels else nullcontext(), jax.set_mesh(gate.mesh):
            lowered = run.lower(loop.body, Sizes().trial_calls, loop.first, *loop.others)
        executable = lowered.compile()
        found[name] = {
            "buffer": buffer_bytes,
            "temporary": executable.memory_analysis().temp_size_in_bytes,
            "copies": copies_in_loop(executable.as_text(), buffer_bytes // 2),
        }
    return found


def copies_in_loop(text: str, least_bytes: int) -> list[str]:
    """Instructions of optimized HLO that copy as many bytes or more in each turn of `run`'s own loop."""
    computations = {
        match[1]: match[2] for match in re.finditer(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{\n((?:  .*\n)*)", text, re.M)
    }
    (loop,) = re.findall(r'while\(.*body=%?([\w.-]+), .*op_name="jit\(run\)/while"', text)
    reached, waiting = set(), [loop]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [word for word in re.findall(r"[\w.-]+", computations[name]) if word in computations]
    instruction = re.compile(r"= \(?([a-z]+)(\d+)\w*\[([\d,]*)\]\S* .*?\b(copy(?:-start)?)\(")
    return [
        line.strip()[:200]
        for name in sorted(reached)
        for line in computations[name].splitlines()
        if (match := instruction.search(line))
        and math.prod(map(int, filter(None, match[3].split(",")))) * int(match[2]) // 8 >= least_bytes
    ]


def main(target: str, num_devices: int, num_pages: int) -> None:
    gate = gate_of(target, num_devices)
    found = move_reports(mesh_of(gate, num_devices), target, num_devices, num_pages)
    found["loops"] = loop_reports(gate, target) if gate and num_devices == 1 else {}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
