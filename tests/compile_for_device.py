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

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 64
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 3350000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 85899345920
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  device_vendor: "NVIDIA Corporation" device_address_bits: 64 name: "NVIDIA H100 80GB HBM3"
  driver_version: "12.8.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3"
"""


def prepare(target: str) -> None:
    """Environment of a JAX that compiles for the target; to be called before JAX is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if target == "v6e":
        os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
        os.environ["TPU_ACCELERATOR_TYPE"] = "v6e-4"
    if target == "h100":
        import nvidia.cuda_nvcc

        cuda = Path(next(iter(nvidia.cuda_nvcc.__path__)))
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        os.environ["PATH"] = f"{cuda / 'bin'}:{os.environ['PATH']}"
        os.environ["XLA_FLAGS"] = f"--xla_gpu_cuda_data_dir={cuda}"


def devices(target: str) -> list:
    import jax
    from jax.experimental import topologies

    jax.devices()  # Finds the plugins.
    if target == "v6e":
        return topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices
    if target == "h100":
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", topology="1x1x4", target_config=H100
        ).devices
    return jax.devices()


def move_reports(target: str, num_devices: int, num_pages: int) -> dict:
    """For the cache of a model of 8e9 parameters, its heads spread over the chips."""
    from jpaged.pallas_kernels.ragged_paged_attention import XlaBackend
    from jpaged.programs import move_programs
    from jpaged.sharding import device_mesh

    mesh = device_mesh(devices(target)[:num_devices])
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
                programs[name] = memory_of(
                    lower_attention(mesh, replace(layout, num_layers=2, num_pages=pages), is_sharing)
                )
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


def lower_attention(mesh, layout, is_sharing: bool):
    """Two layers of a step of 256 tokens in at most 128 rows, decode rows and others."""
    import jax
    import jax.numpy as jnp

    from jpaged.pallas_kernels.ragged_paged_attention import AttentionMetadata, LayerPlace, PagedCache, XlaBackend
    from jpaged.sharding import replicated

    platform = mesh.devices.flat[0].platform
    backend = XlaBackend(platform="gpu" if platform == "cuda" else platform, share_prefixes=is_sharing)
    num_tokens, num_rows = 256, 128

    def shaped(*shape: int, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(mesh))

    pages = tuple(shaped(*shape, dtype=layout.dtype) for shape in layout.shapes)
    cache = PagedCache(pages, layout, (LayerPlace(0, 0), LayerPlace(0, 1)), backend)
    step = AttentionMetadata(
        positions=shaped(num_tokens),
        slots=shaped(1, num_tokens),
        query_starts=shaped(num_rows + 1),
        context_lens=shaped(num_rows),
        page_tables=shaped(1, num_rows, 64),
        num_rows=shaped(),
        num_decode_rows=shaped(),
        plan=shaped(backend.plan_len(num_tokens, num_rows)),
    )

    def two_layers(cache, q, k, step):
        for layer in range(2):
            out, cache = cache.attend(layer, q, k, k, step, scale=0.1)
            q, k = q + out, k + out[:, : k.shape[1]]
        return q, cache

    q, k = (shaped(num_tokens, heads, layout.head_size, dtype=layout.dtype) for heads in (32, layout.num_kv_heads))
    with jax.set_mesh(mesh):
        return jax.jit(two_layers, donate_argnums=0).lower(cache, q, k, step)


if __name__ == "__main__":
    prepare(sys.argv[1])
    print(json.dumps(move_reports(sys.argv[1], *map(int, sys.argv[2:]))))
