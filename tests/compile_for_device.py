"""Compiles programs that move pages, and attention in plain XLA, for chips that are not there; prints what came of it.

    python compile_for_device.py v6e|h100|cpu NUM_DEVICES NUM_PAGES

One JSON object, bytes per chip. A process of its own, because JAX reads its environment when it starts; all but
`cpu` needs the wheels of the extra `aot`.
"""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from compile_gpu import GpuGate
from compile_tpu import TpuGate
from gate_cells import Cell, two_layers


def mesh_of(target: str, num_devices: int):
    """To be called before JAX is imported: it reads what the gates write into the environment."""
    if target == "v6e":
        return TpuGate("v6e", num_devices).mesh
    if target == "h100":
        return GpuGate("h100", num_devices).mesh
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from jpaged.sharding import device_mesh

    return device_mesh(jax.devices()[:num_devices])


def move_reports(target: str, num_devices: int, num_pages: int) -> dict:
    """For the cache of a model of 8e9 parameters, its heads spread over the chips."""
    mesh = mesh_of(target, num_devices)
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


if __name__ == "__main__":
    print(json.dumps(move_reports(sys.argv[1], *map(int, sys.argv[2:]))))
