"""Compile small programs for a CPU, or for chips that this machine lacks, and print what the compiler made of them.

    python compile_for_device.py v6e|h100|cpu NUM_DEVICES NUM_PAGES

The programs move pages, attend in plain XLA, or are the loops that time kernels. The output is one JSON object; sizes
are in bytes per chip. Tests run this script as a process of its own, because JAX reads its environment when it starts.
All targets but `cpu` need the wheels of the extra `aot`.
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
"""Rows of the decode loop, each with 8,192 tokens of context."""


def gate_of(target: str, num_devices: int):
    """Return the gate that compiles for a chip, or None for the CPU. Call it before JAX reads the environment."""
    if target in ("v5e", "v6e", "v7x"):
        return TpuGate(target, num_devices)
    if target == "h100":
        return GpuGate("h100", num_devices)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num_devices}"
    return None


def mesh_of(gate, num_devices: int):
    if gate:
        return gate.mesh
    import jax

    from jpaged.sharding import device_mesh

    return device_mesh(jax.devices()[:num_devices])


def move_reports(mesh, target: str, num_devices: int, num_pages: int) -> dict:
    """Compile copies, swaps and attention on the cache of a model with 8e9 parameters, its heads spread over chips."""
    from jpaged.pallas_kernels.ragged_paged_attention.interface import KVShape
    from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend
    from jpaged.step.programs import move_programs

    platform = {"v6e": "tpu", "h100": "gpu"}.get(target, target)
    page_size, dtype = 128 if platform == "tpu" else 64, "float32" if platform == "cpu" else "bfloat16"
    layout = XlaBackend(platform=platform).layout(KVShape(32, num_pages, page_size, 8, 128, dtype))
    programs = {name: memory_of(lower()) for (name,), lower in move_programs(layout, mesh, num_host_blocks=1).items()}
    if num_devices == 1:
        # Attention that shares prefixes has the loops of plain attention too, and compilers for chips take longer. For
        # TPUs, whose compiler takes longest, there is one number of pages.
        for pages in (num_pages,) if platform == "tpu" else (num_pages, 2 * num_pages):
            for is_sharing in (False, True) if platform == "cpu" else (True,):
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
    """Lower two layers of attention for a step of 256 tokens in at most 128 rows, some of which decode.

    The second result is the size in bytes of the queries, keys and values, which are donated beside the cache.
    """
    import jax

    from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend

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
    """Report on the loops of `device_checks.kernel_speed`: a copy, and decode by the chip's kernel or plain XLA."""
    import jax
    from device_checks.kernel_check import Bench
    from device_checks.kernel_speed import LLAMA, Loop, Sizes, copy_loop, loop_of, run
    from jax.sharding import NamedSharding, PartitionSpec

    from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend

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

        # Only shapes: the arrays may be larger than this machine's memory.
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


def copies_in_loop(text: str, min_bytes: int) -> list[str]:
    """Return the instructions of optimized HLO that copy at least `min_bytes` in each iteration of `run`'s loop."""
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
        and math.prod(map(int, filter(None, match[3].split(",")))) * int(match[2]) // 8 >= min_bytes
    ]


def main(target: str, num_devices: int, num_pages: int) -> None:
    gate = gate_of(target, num_devices)
    found = move_reports(mesh_of(gate, num_devices), target, num_devices, num_pages)
    found["loops"] = loop_reports(gate, target) if gate and num_devices == 1 else {}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
