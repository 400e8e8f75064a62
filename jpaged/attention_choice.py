"""How attention is computed: chosen once, at the start, by the device, the model and what was asked for.

A kernel that serves is first compared with the XLA path on the device itself, on one small ragged batch. Nothing is
switched later, or silently: what cannot be served as asked is an error that names the way out.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from . import __version__
from .errors import ConfigError
from .models.config import ModelConfig
from .pallas_kernels.ragged_paged_attention import (
    AttentionMetadata,
    Backend,
    KVLayout,
    LayerPlace,
    PagedCache,
    XlaBackend,
    interface,
    random_tables,
    step_of_rows,
)
from .user_cache import make_private, user_cache

if TYPE_CHECKING:
    from .pallas_kernels.ragged_paged_attention import GpuBackend, TpuBackend
    from .pallas_kernels.ragged_paged_attention.tpu_sizes import TunedEntry

logger = logging.getLogger("jpaged")

TPU_CHIPS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7x",
    "TPU v7x": "v7x",
}
"""What devices call themselves → the chips that the kernels have sizes for."""
DEVICE_OF_KERNELS = {"pallas-tpu": "tpu", "pallas-gpu": "gpu"}
LEAST_GPU_CAPABILITY = (8, 0)
GPU_KERNELS_NEED = (0, 11)
"""Of JAX, the version that has their instructions first."""
XLA_BLOCK_SIZE = 64
TPU_BLOCK_SIZES = (128, 256)
MAX_TABLE_ENTRIES = 255_000
"""Page numbers that fit into a TPU core's scalar memory, 1 MiB, beside the rest of a step's plan."""
LARGEST_ERROR = 2e-2
"""Of an output row's norm, between a kernel and the XLA path: both round to bfloat16 in different places."""
LONG_CONTEXT = 1000
"""Tokens of one row of that comparison: so many that kernels which cut long rows cut it, also in decode."""
CHECK_TOKENS, CHECK_ROWS = 64, 8


@dataclass(frozen=True)
class AttentionChoice:
    """A backend, and why it was chosen."""

    backend: Backend
    reason: str


def choose_attention(asked: str, model: ModelConfig, device: jax.Device) -> AttentionChoice:
    """The backend for `attention_backend` = `asked`, on this device. ConfigError if it cannot be had."""
    xla = XlaBackend(platform=device.platform)
    if asked == "xla" or (asked == "auto" and device.platform != "tpu"):
        return AttentionChoice(xla, "asked for" if asked == "xla" else _why_xla(device))
    name = "pallas-tpu" if asked == "auto" else asked
    if device.platform != DEVICE_OF_KERNELS[name]:
        raise ConfigError(
            f"attention_backend: got {name}, allowed on this device ({device.device_kind}): auto, xla; leave it out"
        )
    try:
        backend = kernel_backend(name, device, model.num_heads, model.num_kv_heads, model.head_size, model.windows)
    except ConfigError:
        raise  # The user's table of sizes is broken: nothing that another backend could be taken for.
    except ValueError as error:
        if asked == "auto":
            return AttentionChoice(xla, f"pallas-tpu does not take this: {error}")
        raise ConfigError(str(error)) from error
    return AttentionChoice(backend, "asked for" if asked == name else "the default on tpu")


def _why_xla(device: jax.Device) -> str:
    """Why XLA serves by default on this device; found without Pallas, which such a start does not need."""
    default = f"the default on {device.platform}"
    if device.platform != "gpu":
        return default
    if jax.__version_info__ < GPU_KERNELS_NEED:
        needed = ".".join(map(str, GPU_KERNELS_NEED))
        return f"{default}: the pallas-gpu kernels need jax {needed} or later, this is {jax.__version__}"
    return f"{default}: the pallas-gpu kernels have not passed scripts/gpu_check.py on {device.device_kind}"


def kernel_backend(
    name: str,
    device: jax.Device,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    windows: Sequence[int | None] = (),
) -> Backend:
    """The kernels of that name, for that many heads on this chip. ValueError names what they do not take."""
    if name == "pallas-tpu":
        backend: Backend = _tpu_backend(device.device_kind, num_heads, head_size)
    else:
        backend = _gpu_backend(device, num_heads, num_kv_heads, head_size, windows)
    backend.layout(
        num_layers=1,
        num_pages=1,
        page_size=XLA_BLOCK_SIZE,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype="bfloat16",
    )
    return backend


def _tpu_backend(device_kind: str, num_heads: int, head_size: int) -> TpuBackend:
    from .pallas_kernels.ragged_paged_attention import TpuBackend  # Pallas takes a quarter of a second to import.

    chip = TPU_CHIPS.get(device_kind)
    if chip is None:
        raise ValueError(
            f"attention_backend: got pallas-tpu, its kernels have sizes for {', '.join(TPU_CHIPS)}, this device is "
            f"{device_kind}; use --attention-backend xla"
        )
    return TpuBackend.for_heads(chip, num_heads, head_size, user_tuned())


def tuned_path() -> Path:
    """Where `jpaged tune` keeps what this user has tuned."""
    return user_cache("tuned") / "tpu.json"


def user_tuned() -> tuple[TunedEntry, ...]:
    """What this user has tuned. ConfigError if the table is broken."""
    from .pallas_kernels.ragged_paged_attention.tpu_sizes import read_tuned

    path = tuned_path()
    try:
        return read_tuned(path) if path.exists() else ()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _gpu_backend(
    device: Any, num_heads: int, num_kv_heads: int, head_size: int, windows: Sequence[int | None]
) -> GpuBackend:
    from .pallas_kernels.ragged_paged_attention import GpuBackend

    capability = tuple(int(number) for number in device.compute_capability.split("."))
    if capability < LEAST_GPU_CAPABILITY:
        raise ValueError(
            f"attention_backend: got pallas-gpu, its kernels run from Ampere (8.0) on, {device.device_kind} is of "
            f"compute capability {device.compute_capability}; use --attention-backend xla"
        )
    return GpuBackend(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        windows=tuple(sorted({window for window in windows if window is not None})),
        num_sms=device.core_count,
        block_memory=device.shared_memory_per_block_optin,
        capability=(capability[0], capability[1]),
    )


def block_size_of(backend: Backend, asked: int | None, max_num_seqs: int, max_model_len: int) -> int:
    """Tokens per page. ConfigError if the page table of so many sequences would not fit the device."""
    if backend.name != "pallas-tpu":
        return asked or XLA_BLOCK_SIZE
    sizes = TPU_BLOCK_SIZES if asked is None else (asked,)
    tables = {size: max_num_seqs * -(-max_model_len // size) for size in sizes}
    # Half of the memory, where a larger page gives it: a page table is fetched anew by every layer.
    size = next((size for size in sizes if 2 * tables[size] <= MAX_TABLE_ENTRIES), sizes[-1])
    if tables[size] > MAX_TABLE_ENTRIES:
        raise ConfigError(
            f"max_model_len: got {max_model_len} for {max_num_seqs} sequences and pages of {size} tokens, "
            f"{tables[size]} page numbers, allowed: {MAX_TABLE_ENTRIES} with pallas-tpu; lower max_num_seqs or "
            "max_model_len, raise block_size, or use --attention-backend xla"
        )
    return size


def check_kernels(backend: Backend, model: ModelConfig, dtype: str, block_size: int, device: jax.Device) -> None:
    """Compare a kernel with the XLA path on this device, unless that was done before with the same versions.

    ConfigError if they differ, or if the kernel cannot be run.
    """
    if isinstance(backend, XlaBackend):
        return
    key = check_key(backend, model, dtype, block_size, device)
    folder = user_cache("checked")
    mark = folder / (hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32] + ".json")
    if mark.exists():
        return
    try:
        error = kernel_error(
            backend,
            model.num_heads,
            model.num_kv_heads,
            model.head_size,
            dtype,
            block_size,
            device,
            windows=model.windows,
        )
    except Exception as failure:
        raise ConfigError(
            f"attention_backend: {backend.name} failed its check on {device.device_kind}: "
            f"{' '.join(str(failure).split())[:500]}; use --attention-backend xla"
        ) from failure
    if not error <= LARGEST_ERROR:
        raise ConfigError(
            f"attention_backend: {backend.name} differs from the XLA path on {device.device_kind} by {error:.3g} of an "
            f"output's norm, allowed: {LARGEST_ERROR}; use --attention-backend xla"
        )
    logger.info("%s agrees with the XLA path on %s to %.2g", backend.name, device.device_kind, error)
    try:
        make_private(folder)
        mark.write_text(json.dumps({"checked": key, "error": error}))
    except OSError as problem:
        logger.warning("the check of %s is made at each start: %s", backend.name, problem)


def check_key(backend: Backend, model: ModelConfig, dtype: str, block_size: int, device: jax.Device) -> list[Any]:
    """What a comparison holds for: another kernel, shape, chip, driver or version is compared anew."""
    shape = [model.num_heads, model.num_kv_heads, model.head_size, sorted({window or 0 for window in model.windows})]
    versions = [device.client.platform_version, jax.__version__, __version__, source_digest()]
    return [repr(backend), *shape, dtype, block_size, device.device_kind, *versions]


def source_digest(folder: Path = Path(interface.__file__).parent) -> str:
    """Of the source of all backends: a kernel that was changed is another one, whatever our version says."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def kernel_error(
    backend: Backend,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: str,
    block_size: int,
    device: jax.Device,
    *,
    windows: Sequence[int | None] = (None,),
) -> float:
    """The largest difference from the XLA path, as a share of an output row's norm, over prefill and decode steps.

    In the second of two layers, for each of `windows`. All steps have the same shapes, so that each backend compiles
    one program a window.
    """
    worst = 0.0
    for window in dict.fromkeys(windows):
        rng = np.random.default_rng(0)
        layout = _layout(backend, 1, num_kv_heads, head_size, dtype, block_size)
        tables, num_tokens, works = check_steps(block_size, long_context(backend, num_heads, layout), rng)
        num_pages = int(tables.max()) + 1
        caches = [
            _empty_cache(each, _layout(each, num_pages, num_kv_heads, head_size, dtype, block_size))
            for each in (backend, XlaBackend(platform=device.platform))
        ]
        lens = np.zeros(len(tables), int)
        for work in works:
            lens += work
            rows, inputs = np.flatnonzero(work), []
            for num in (num_heads, num_kv_heads, num_kv_heads):
                inputs.append(jnp.asarray(rng.normal(size=(num_tokens, num, head_size)), dtype))
            outs = []
            for index, cache in enumerate(caches):
                step = step_of_rows(
                    cache.backend,
                    work[rows].tolist(),
                    lens[rows].tolist(),
                    tables[rows],
                    page_size=block_size,
                    num_tokens=num_tokens,
                    num_rows=CHECK_ROWS,
                )
                with jax.default_device(device):
                    out, caches[index] = _attend(cache, *inputs, step, scale=head_size**-0.5, window=window)
                outs.append(np.asarray(out[: work.sum()], np.float32))
            errors = np.linalg.norm(outs[0] - outs[1], axis=-1) / np.linalg.norm(outs[1], axis=-1)
            worst = max(worst, float(errors.max()) if np.isfinite(errors).all() else np.inf)
    return worst


def long_context(backend: Backend, num_heads: int, layout: KVLayout) -> int:
    """Of a row that takes all ways through a kernel: cut and merged on a GPU, more than two full tiles on a TPU."""
    if backend.name != "pallas-tpu":
        return LONG_CONTEXT
    return 2 * cast("TpuBackend", backend).sizes_for(num_heads, layout).decode.tile + 1


def check_steps(block_size: int, long: int, rng: np.random.Generator) -> tuple[np.ndarray, int, list[np.ndarray]]:
    """Page tables [rows, P], the tokens that a step has room for, and the new tokens of each row in each step.

    Short rows around the end of a page and a long one, which is written in two steps; then all of them decode.
    """
    short = np.array([1, 17, block_size - 1, block_size + 1])
    num_tokens = -(-(short.sum() + long) // (2 * CHECK_TOKENS)) * CHECK_TOKENS
    first = int(num_tokens - short.sum())
    works = [np.array(work) for work in ([*short, first], [0, 0, 0, 0, long - first], [1] * 5, [1] * 5)]
    return random_tables(np.sum(works, axis=0).tolist(), block_size, rng), int(num_tokens), works


@functools.partial(jax.jit, static_argnames=("scale", "window"))
def _attend(
    cache: PagedCache, q: jax.Array, k: jax.Array, v: jax.Array, step: AttentionMetadata, *, scale: float, window: Any
) -> tuple[jax.Array, PagedCache]:
    return cache.attend(1, q, k, v, step, scale=scale, window=window)


def _layout(
    backend: Backend, num_pages: int, num_kv_heads: int, head_size: int, dtype: str, block_size: int
) -> KVLayout:
    """Of two layers."""
    return backend.layout(
        num_layers=2,
        num_pages=num_pages,
        page_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=dtype,
    )


def _empty_cache(backend: Backend, layout: KVLayout) -> PagedCache:
    """Pages full of NaN."""
    pages = tuple(jnp.full(shape, jnp.nan, layout.dtype) for shape in layout.shapes)
    return PagedCache(pages, layout, (LayerPlace(0, 0), LayerPlace(0, 1)), backend)
