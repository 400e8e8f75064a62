"""Compiles attention for TPUs that are not there, with the compiler that a TPU machine has: the wheel libtpu."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from gate_cells import STEPS, Cell, cache_layout, two_layers

sys.path.insert(0, str(Path(__file__).parents[1]))

from jpaged.bundles import TOPOLOGIES as CHIPS
from jpaged.bundles import prepare

MOST_TEMP_BYTES = 16 << 20


class TpuGate:
    """Compiles cells for one chip. Made before JAX is imported, since JAX reads its environment when it is."""

    def __init__(self, chip: str, num_devices: int = 1):
        prepare()
        from jax.experimental import topologies

        from jpaged.sharding import device_mesh

        topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip])
        self.chip, self.mesh = chip, device_mesh(topology.devices[:num_devices])

    def backend(self, num_heads: int, num_kv_heads: int, head_size: int, windows: tuple[int | None, ...]) -> Any:
        """The kernels, for that many heads on one chip."""
        from jpaged.pallas_kernels.ragged_paged_attention import TpuBackend

        return TpuBackend.for_heads(self.chip, num_heads, head_size)

    def told(self) -> AbstractContextManager[None]:
        """Nothing: the TPU's compilers know the chip from the topology."""
        return nullcontext()

    def compile(self, cell: Cell) -> dict[str, Any]:
        """What became of it: `fault` says what is not as it has to be, `refused` what the layout does not take."""
        import jax

        start = time.monotonic()
        backend = self.backend(*cell.heads, cell.head_size, ())
        try:
            layout = cache_layout(cell, backend)
        except ValueError as error:
            return {**cell._asdict(), "refused": str(error), "fault": None}
        program, arguments = two_layers(cell, backend, layout, self.mesh)
        cache_bytes = layout.page_bytes * layout.num_pages
        try:
            with jax.set_mesh(self.mesh):
                memory = program.lower(*arguments).compile().memory_analysis()
        except Exception as error:
            message = str(error).strip().splitlines()
            return {**cell._asdict(), "fault": f"{type(error).__name__}: {' '.join(message)[:400]}"}
        # One-byte pages take keys and values that the program makes from its own, rounded: with both layers' they lie
        # there beside them, in a model instead of them.
        num_rounded = 4 if layout.dtype.itemsize == 1 and arguments[2] is not None else 0
        temp_bytes = memory.temp_size_in_bytes - num_rounded * _tiled_bytes(cell)
        fault = None
        if memory.alias_size_in_bytes < cache_bytes:
            fault = f"{memory.alias_size_in_bytes} bytes of a cache of {cache_bytes} are aliased"
        elif temp_bytes > MOST_TEMP_BYTES:
            fault = f"{temp_bytes} bytes of temporary memory"
        seconds = round(time.monotonic() - start, 2)
        return {**cell._asdict(), "temp_bytes": temp_bytes, "seconds": seconds, "fault": fault}


def _tiled_bytes(cell: Cell) -> int:
    """Of a step's keys in bfloat16, in tiles of 8 heads and 128 lanes."""
    return STEPS[cell.step][0] * -(-cell.heads[1] // 8) * 8 * -(-cell.head_size // 128) * 128 * 2
