"""The TPU's part of the compile gate: compiles attention without a TPU, by the compiler in the wheel libtpu."""

from __future__ import annotations

import re
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from gate_cells import STEPS, Cell, aliased_parameters, cache_layout, page_table_copies, two_layers

sys.path.insert(0, str(Path(__file__).parents[1]))

from jpaged.commands.bench.bundles import TOPOLOGIES, prepare

CHIPS = {**TOPOLOGIES, "v4": "v4:2x2x1", "v5p": "v5p:2x2x1"}
"""Chip → the topology that the compiler is asked for."""
SLICES = {(chip, size): f"{chip}:{grid}" for chip in ("v5e", "v6e") for size, grid in ((8, "2x4"), (16, "4x4"))}
"""Chip and number of devices → a topology with more than those of CHIPS have."""

MOST_TEMP_BYTES = 4 << 20
"""The most temporary memory of a cell beside its own arrays: too little for a hidden copy of 8,192 tokens' arrays."""


KERNEL = re.compile(r"= (\(.*?\)|\S+) custom-call\(([^)]*)\), custom_call_target=\"tpu_custom_call\"")
"""A Pallas kernel's call in optimized HLO: the shapes of its results, and the names of its operands."""
DEFINED = re.compile(r"^ *(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) [\w-]+\(", re.MULTILINE)
IN_VMEM = re.compile(r"\b(\w+\[\d+,\d+,[\d,]+\])\{[^}]*S\(1\)")


def kernel_arrays_in_vmem(hlo: str) -> list[str]:
    """Return the operands and results of Pallas kernels that XLA placed in VMEM: memory that the kernels count on.

    Arrays of less than three dimensions pass through VMEM on their way to SMEM, and are left out.
    """
    shapes = dict(DEFINED.findall(hlo))
    found = []
    for results, operands in KERNEL.findall(hlo):
        names = re.findall(r"%?([\w.-]+)(?:, |$)", re.sub(r"/\*.*?\*/", "", operands))
        found += [each for text in (results, *(shapes[name] for name in names)) for each in IN_VMEM.findall(text)]
    return found


class TpuGate:
    """Compiles cells for one chip. Create it before JAX is imported, since JAX then reads its environment."""

    def __init__(self, chip: str, num_devices: int = 1):
        prepare()
        from jax.experimental import topologies

        from jpaged.sharding import device_mesh

        name = SLICES.get((chip, num_devices), CHIPS[chip])
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
        if num_devices > len(topology.devices):
            raise SystemExit(f"compile_tpu: {chip} × {num_devices}: {name} has {len(topology.devices)} devices")
        self.chip, self.mesh = chip, device_mesh(topology.devices[:num_devices])

    def backend(self, num_heads: int, num_kv_heads: int, head_size: int, windows: tuple[int | None, ...]) -> Any:
        """Return the backend for that many heads on one chip."""
        from jpaged.pallas_kernels.ragged_paged_attention.tpu.backend import TpuBackend

        return TpuBackend.for_heads(self.chip, num_heads, head_size)

    def told(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: the TPU's compilers know the chip from the topology."""
        return nullcontext()

    def spilled(self, lowered: str) -> str | None:
        """Return None: spills of TPU kernels are counted in the compiler's dump, by `tpu_bundles.py --spills`."""
        return None

    def compile(self, cell: Cell) -> dict[str, Any]:
        """Compile a cell and return its entry in the report.

        `fault` says what is wrong, or is None; `refused` says what the layout does not support.
        """
        import jax

        start = time.monotonic()
        backend = self.backend(*cell.heads, cell.head_size, ())
        try:
            layout = cache_layout(cell, backend)
        except ValueError as error:
            return {**cell._asdict(), "refused": str(error), "fault": None}
        program, arguments = two_layers(cell, backend, layout, self.mesh)
        try:
            with jax.set_mesh(self.mesh):
                executable = program.lower(*arguments).compile()
        except Exception as error:
            message = str(error).strip().splitlines()
            return {**cell._asdict(), "fault": f"{type(error).__name__}: {' '.join(message)[:400]}"}
        memory = executable.memory_analysis()
        # What the program itself holds beside its arguments: a layer's keys and values, rounded as its pages hold them.
        is_rounded = cell.dtypes[0] != cell.dtypes[1]
        own_bytes = 2 * _tiled_bytes(cell) if is_rounded and arguments[2] is not None else 0
        fault, hlo = None, executable.as_text()
        num_kernels, num_copies = len(KERNEL.findall(hlo)), page_table_copies(cell, hlo)
        if not set(range(len(layout.shapes))) <= aliased_parameters(hlo):
            fault = "the cache is not aliased whole"
        elif in_vmem := kernel_arrays_in_vmem(hlo):
            fault = f"XLA places arrays of kernels in VMEM: {', '.join(in_vmem)}"
        elif cell.decodes_only and num_kernels != 2:
            fault = f"{num_kernels} kernels in two layers of decode rows, wanted one a layer"
        elif num_copies > 1:
            fault = f"page tables are copied {num_copies} times in two layers, wanted once"
        elif memory.temp_size_in_bytes > MOST_TEMP_BYTES + own_bytes:
            fault = f"{memory.temp_size_in_bytes} bytes of temporary memory, {own_bytes} the program's own"
        seconds = round(time.monotonic() - start, 2)
        return {
            **cell._asdict(),
            "temp_bytes": memory.temp_size_in_bytes,
            "own_bytes": own_bytes,
            "kernels": num_kernels,
            "seconds": seconds,
            "fault": fault,
        }


def _tiled_bytes(cell: Cell) -> int:
    """Return the bytes of a step's keys as they are written, in tiles of 8 heads and 128 lanes."""
    numbers = STEPS[cell.step][0] * -(-cell.heads[1] // 8) * 8 * -(-cell.head_size // 128) * 128
    step, pages = cell.dtypes
    dtype = step if pages in ("int8", "float8_e4m3fn") else pages
    return numbers * (4 if dtype == "float32" else 2)
