"""Check that the GPU attention kernels compile, without a GPU, and spill no register.

    python scripts/compile_gpu.py a100 32 8 128 bfloat16 64 none decode     # one cell

`GpuGate` is the GPU's part of the compile gate. XLA compiles a step of two layers for the chip and dumps the PTX of the
kernels; ptxas compiles that and reports registers and spills. Needs the wheels of the extra `aot`, and
jax ≥ 0.11; one process a chip.
"""

from __future__ import annotations

import argparse
import atexit
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gate_cells import FEATURES, STEPS, Cell, aliased_parameters, cache_layout, two_layers

ROOT = Path(__file__).parents[1]
MOST_TEMP_BYTES = 16 << 20
RESERVED_BYTES = 1 << 10
"""Shared memory that the hardware keeps for itself in each thread block."""
SM_REGISTERS = 1 << 16
ATTENTION = "ragged_paged_attention_of_"
"""The names of attention kernels begin so; the number of rows of a tile follows."""


class GpuChip(NamedTuple):
    """The properties of a chip that XLA and ptxas need, from NVIDIA's data sheets."""

    name: str
    capability: tuple[int, int]
    ptxas: str
    num_sms: int
    block_memory: int
    """Bytes of shared memory that one thread block may have."""
    sm_memory: int
    memory: int
    bandwidth: int
    l2: int
    clock_ghz: float


CHIPS = {
    "a100": GpuChip(
        "NVIDIA A100-SXM4-80GB", (8, 0), "sm_80", 108, 166912, 167936, 80 << 30, 2_000_000_000_000, 40 << 20, 1.41
    ),
    "h100": GpuChip(
        "NVIDIA H100 80GB HBM3", (9, 0), "sm_90a", 132, 232448, 233472, 80 << 30, 3_350_000_000_000, 50 << 20, 1.98
    ),
    "h200": GpuChip("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 233472, 141 << 30, 4_800_000_000_000, 50 << 20, 1.98),
    "b200": GpuChip(
        "NVIDIA B200", (10, 0), "sm_100a", 148, 232448, 233472, 178 << 30, 8_000_000_000_000, 126 << 20, 1.965
    ),
}


def target_config(chip: GpuChip) -> str:
    """Return the description of the chip in XLA's text format."""
    extension = "feature_extension: ACCELERATED_FEATURES" if chip.capability >= (9, 0) else ""
    return f"""
    gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: {chip.num_sms}
      fpus_per_core: {128 if chip.capability >= (9, 0) else 64} shared_memory_per_block: 49152
      shared_memory_per_core: {chip.sm_memory} shared_memory_per_block_optin: {chip.block_memory}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      memory_bandwidth: {chip.bandwidth} l2_cache_size: {chip.l2} clock_rate_ghz: {chip.clock_ghz}
      device_memory_size: {chip.memory}
      cuda_compute_capability {{ major: {chip.capability[0]} minor: {chip.capability[1]} {extension} }}
      device_vendor: "NVIDIA Corporation" device_address_bits: 64 name: "{chip.name}"
      driver_version: "12.8.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
    }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{chip.name}"
    """


def cuda_folder() -> Path:
    """Return the folder of CUDA's compiler in the wheels that are installed: CUDA 13's, else CUDA 12's."""
    import nvidia

    folders = [Path(root) / name for name in ("cu13", "cuda_nvcc") for root in nvidia.__path__]
    found = next((folder for folder in folders if (folder / "bin" / "ptxas").is_file()), None)
    if found is None:
        raise SystemExit("compile_gpu: found no ptxas; pip install '.[aot]', or nvidia-cuda-nvcc of CUDA 13")
    return found


def prepare() -> Path:
    """Set the environment in which JAX compiles for GPUs; call it before JAX is imported.

    Returns the folder that PTX is dumped to.
    """
    cuda = cuda_folder()
    dump = Path(tempfile.mkdtemp(prefix="ptx-"))
    atexit.register(shutil.rmtree, dump, ignore_errors=True)
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "PATH": f"{cuda / 'bin'}:{os.environ['PATH']}",
        "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={cuda}",
        "MOSAIC_GPU_DUMP_TO": str(dump),
        "MOSAIC_GPU_DUMP_PTX": "1",
    }
    return dump


class GpuGate:
    """Compiles cells for one chip. Create it before JAX is imported, since JAX then reads its environment."""

    def __init__(self, chip: str, num_devices: int = 1, **backend_options: Any):
        self.chip, self.dump, self.backend_options = CHIPS[chip], prepare(), backend_options
        self.judged: set[str] = set()
        """Mosaic's hashes of the kernels that ptxas has compiled already."""
        import jax
        from jax.experimental import topologies

        from jpaged.sharding import device_mesh

        jax.devices()  # Finds the plugins.
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="", topology=f"1x1x{num_devices}", target_config=target_config(self.chip)
        )
        self.mesh = device_mesh(topology.devices[:num_devices])

    def compile(self, cell: Cell) -> dict[str, Any]:
        """Compile a cell and return its entry in the report.

        `fault` says what is wrong, or is None; `refused` says what the kernels do not support.
        """
        import jax

        from jpaged.pallas_kernels.ragged_paged_attention.interface import AttendOptions

        start = time.monotonic()
        try:
            backend = self.backend(*cell.heads, cell.head_size, (FEATURES[cell.feature].get("window"),))
            layout = cache_layout(cell, backend)
        except ValueError as error:
            return {**cell._asdict(), "refused": str(error), "fault": None}
        launches = backend.launches(*STEPS[cell.step], AttendOptions(scale=1.0), decodes_only=cell.decodes_only)
        self.planner, self.tiles = backend, [launch.section.tiles for launch in launches]
        program, arguments = two_layers(cell, backend, layout, self.mesh)
        try:
            with self.told(), jax.set_mesh(self.mesh):
                lowered = program.lower(*arguments)
            executable = lowered.compile()
        except Exception as error:
            message = " ".join(str(error).strip().splitlines())[:400]
            return {**cell._asdict(), "fault": f"{type(error).__name__}: {message}"}
        kernels, spilled = self.kernels(lowered.as_text())
        memory = executable.memory_analysis()
        own_bytes = _own_bytes(arguments[1])
        if not set(range(len(layout.shapes))) <= aliased_parameters(executable.as_text()):
            fault = "the cache is not aliased whole"
        elif memory.temp_size_in_bytes > MOST_TEMP_BYTES + own_bytes:
            fault = f"{memory.temp_size_in_bytes} bytes of temporary memory, {own_bytes} the program's own"
        else:
            fault = spilled or self._crowd(kernels)
        found = {
            "temp_bytes": memory.temp_size_in_bytes,
            "own_bytes": own_bytes,
            "kernels": kernels,
            "block_memory": self.block_memory,
        }
        return {**cell._asdict(), **found, "seconds": round(time.monotonic() - start, 2), "fault": fault}

    def spilled(self, lowered: str) -> str | None:
        """Return the fault that ptxas finds in the kernels of a compiled program, or None."""
        return self.kernels(lowered)[1]

    def kernels(self, lowered: str) -> tuple[list[dict[str, Any]], str | None]:
        """Return registers and spills of the kernels compiled since `told`, and their fault, or None.

        `lowered` is the text of the program that they belong to. A kernel equal to one of an earlier cell is not
        compiled again, and appears only in that cell's entry.
        """
        names = set(re.findall(r'kernel_hash = "([^"]*)"', lowered))
        kernels = [self._kernel(ptx) for ptx in sorted(self.dump.glob("*.ptx"))]
        fault = None
        if not names or len(kernels) != len(names - self.judged):
            fault = f"{len(kernels)} kernels were compiled, of {len(names - self.judged)} new ones"
        elif errors := [kernel["error"] for kernel in kernels if "error" in kernel]:
            fault = f"ptxas: {errors[0]}"
        elif spills := sum(kernel["spill_bytes"] for kernel in kernels):
            fault = f"{spills} bytes of spills"
        self.judged |= names
        return kernels, fault

    @contextmanager
    def told(self) -> Iterator[None]:
        """Make Mosaic compile for this chip: it would read architecture and memory of the first device, here a CPU.

        PTX dumped before is deleted.
        """
        from jax.experimental.mosaic.gpu import core, utils

        for old in self.dump.iterdir():
            old.unlink()
        sizes: list[int] = []
        infer, bound, tree_size = utils._infer_arch, core._SMEM_SIZE_BOUND, core._smem_tree_size

        def noted(*args: Any) -> int:
            sizes.append(tree_size(*args))
            return sizes[-1]

        utils._infer_arch, core._smem_tree_size = lambda: self.chip.capability, noted
        core._SMEM_SIZE_BOUND = self.chip.block_memory
        try:
            yield
        finally:
            utils._infer_arch, core._SMEM_SIZE_BOUND, core._smem_tree_size = infer, bound, tree_size
            self.block_memory, self.kernel_memory = max(sizes, default=0), sizes

    def _crowd(self, kernels: list[dict[str, Any]]) -> str | None:
        """Return which thread blocks, planned for one multiprocessor, do not fit there together, or None.

        A block without room would wait until another one ends. `kernel_memory` holds the shared memory of each kernel
        in the order of launches, a merge after the kernel whose partial results it merges.
        """
        sizes = iter(self.kernel_memory)
        for tiles in self.tiles:
            rows, memory = tiles.tile_rows, next(sizes)
            if tiles.num_partials:
                next(sizes)
            num_blocks = self.planner.blocks_per_sm(rows)
            if num_blocks * (memory + RESERVED_BYTES) > self.chip.sm_memory:
                return f"{num_blocks} blocks of {memory} bytes of shared memory, for tiles of {rows} rows"
            for kernel in kernels:
                registers = -(-kernel["registers"] // 8) * 8  # The hardware allocates registers by eights.
                if kernel["name"].startswith(f"{ATTENTION}{rows}_") and num_blocks * 128 * registers > SM_REGISTERS:
                    return f"{num_blocks} blocks of {registers} registers a thread, for tiles of {rows} rows"
        assert not list(sizes), "a kernel that is no launch of the backend"
        return None

    def _kernel(self, ptx: Path) -> dict[str, Any]:
        """Compile the PTX of one kernel; return its name, registers and spilled bytes, or the error."""
        command = ["ptxas", "-v", f"-arch={self.chip.ptxas}", str(ptx), "-o", os.devnull]
        result = subprocess.run(command, capture_output=True, text=True)
        said = result.stdout + result.stderr
        if result.returncode:
            return {"error": said.strip()[:400], "spill_bytes": 0}
        registers = [int(count) for count in re.findall(r"Used (\d+) registers", said)]
        spills = [int(count) for count in re.findall(r"(\d+) bytes spill", said)]
        return {"name": ptx.stem, "registers": max(registers), "spill_bytes": sum(spills)}

    def backend(self, num_heads: int, num_kv_heads: int, head_size: int, windows: tuple[int | None, ...]) -> Any:
        """Return the backend for that many heads on one chip."""
        from jpaged.pallas_kernels.ragged_paged_attention.gpu.backend import GpuBackend

        return GpuBackend(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            windows=windows,
            num_sms=self.chip.num_sms,
            block_memory=self.chip.block_memory,
            capability=self.chip.capability,
            **self.backend_options,
        )


def _own_bytes(q: Any) -> int:
    """Return the bytes of the queries sorted by head, which the results overwrite; they grow with the step."""
    return int(math.prod(q.shape)) * q.dtype.itemsize


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chip", choices=CHIPS)
    parser.add_argument("num_heads", type=int)
    parser.add_argument("num_kv_heads", type=int)
    parser.add_argument("head_size", type=int)
    parser.add_argument("dtype")
    parser.add_argument("page_size", type=int)
    parser.add_argument("feature", choices=FEATURES)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--prefill", default="mma", help="mma, or wgmma (Hopper only)")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    heads = args.num_heads, args.num_kv_heads
    cell = Cell(args.chip, heads, args.head_size, args.dtype, args.page_size, args.feature, args.step, "asked for")
    found = GpuGate(args.chip, prefill=args.prefill).compile(cell)
    print(json.dumps(found))
    return bool(found["fault"])


if __name__ == "__main__":
    sys.exit(main())
