"""How attention is computed: chosen once, at the start, by the device, the model and what was asked for.

Nothing is switched later, or silently: what cannot be served as asked is an error that names the way out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from .buckets import sample_sizes
from .errors import ConfigError
from .models.config import ModelConfig
from .pallas_kernels.ragged_paged_attention import Backend, XlaBackend
from .user_cache import user_cache

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
TPU_BLOCK_SIZES = (128, 256, 512, 1024)
MAX_TABLE_ENTRIES = 255_000
"""Numbers of page tables that fit into a TPU core's scalar memory, 1 MiB, with `ROW_NUMBERS` for each row."""
ROW_NUMBERS = 8
"""Of a row, beside its page numbers: lengths, and its share of the plan of prefill's tiles."""


@dataclass(frozen=True)
class AttentionChoice:
    """A backend, and why it was chosen."""

    backend: Backend
    reason: str


def choose_attention(
    asked: str, model: ModelConfig, device: jax.Device, kv_dtype: str = "bfloat16", *, deterministic: bool = False
) -> AttentionChoice:
    """The backend for `attention_backend` = `asked`, on this device, over pages of `kv_dtype`. ConfigError if it cannot
    be had. `deterministic`: one that rounds a row with one query alike in any company."""
    # On a CPU a row has the same bits whether it shares or not.
    xla = XlaBackend(platform=device.platform, share_prefixes=device.platform == "cpu")
    if asked == "xla" or (asked == "auto" and device.platform != "tpu"):
        return AttentionChoice(xla, "asked for" if asked == "xla" else _why_xla(device))
    if deterministic and asked == "auto":
        return AttentionChoice(xla, "deterministic: pallas-tpu writes a row's keys while others are attending")
    name = "pallas-tpu" if asked == "auto" else asked
    if device.platform != DEVICE_OF_KERNELS[name]:
        raise ConfigError(
            f"attention_backend: got {name}, allowed on this device ({device.device_kind}): auto, xla; leave it out"
        )
    try:
        heads = model.num_heads, model.num_kv_heads, model.head_size
        backend = kernel_backend(name, device, *heads, model.windows, kv_dtype, is_cut=not deterministic)
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
    kv_dtype: str = "bfloat16",
    *,
    is_cut: bool = True,
) -> Backend:
    """The kernels of that name, for that many heads on this chip, over pages of the size that a start takes first.
    ValueError names what they do not take. `is_cut`: a GPU's may cut rows as their company wants it."""
    if name == "pallas-tpu":
        backend: Backend = _tpu_backend(device.device_kind, num_heads, head_size)
    else:
        backend = _gpu_backend(device, num_heads, num_kv_heads, head_size, windows, is_cut=is_cut)
    backend.layout(
        num_layers=1,
        num_pages=1,
        page_size=TPU_BLOCK_SIZES[0] if name == "pallas-tpu" else XLA_BLOCK_SIZE,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=kv_dtype,
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
    """Where `jpaged tune` keeps what this user has tuned. RuntimeError if the user has no home directory."""
    return user_cache("tuned") / "tpu.json"


def user_tuned() -> tuple[TunedEntry, ...]:
    """What this user has tuned. ConfigError if the table is broken; one that cannot be looked for is a warning."""
    from .pallas_kernels.ragged_paged_attention.tpu_sizes import read_tuned

    try:
        path = tuned_path()
        is_there = path.exists()
    except (OSError, RuntimeError) as problem:
        logger.warning("this user's table of tile sizes is not looked for: %s", problem)
        return ()
    try:
        return read_tuned(path) if is_there else ()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _gpu_backend(
    device: Any, num_heads: int, num_kv_heads: int, head_size: int, windows: Sequence[int | None], *, is_cut: bool
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
        is_cut=is_cut,
    )


def block_size_of(
    backend: Backend, model: ModelConfig, kv_dtype: str, asked: int | None, max_num_seqs: int, max_model_len: int
) -> int:
    """Tokens per page. ConfigError if the page table of so many sequences would not fit the device."""
    if backend.name != "pallas-tpu":
        return asked or XLA_BLOCK_SIZE
    sizes = [asked or TPU_BLOCK_SIZES[0]]
    if asked is None and 2 * _table_entries(sizes[0], max_num_seqs, max_model_len) > MAX_TABLE_ENTRIES:
        # A page table is fetched anew by every layer: one of more than half of the memory is worth larger pages.
        sizes = [size for size in TPU_BLOCK_SIZES[1:] if _takes_pages(backend, model, kv_dtype, size)] + sizes
    for size in sizes:
        if _table_entries(size, max_num_seqs, max_model_len) <= MAX_TABLE_ENTRIES:
            return size
    largest = max(sizes)
    needed = _table_entries(largest, max_num_seqs, max_model_len)
    raise ConfigError(
        f"max_model_len: got {max_model_len} for {max_num_seqs} sequences and pages of {largest} tokens, "
        f"{needed} numbers of page tables, allowed: {MAX_TABLE_ENTRIES} with pallas-tpu; lower max_num_seqs or "
        f"max_model_len{', raise block_size' if asked else ''}, or use --attention-backend xla"
    )


def _table_entries(block_size: int, max_num_seqs: int, max_model_len: int) -> int:
    """Of the largest steps, which have room for a few rows more than there are sequences."""
    return sample_sizes(max_num_seqs)[-1] * (-(-max_model_len // block_size) + ROW_NUMBERS)


def _takes_pages(backend: Backend, model: ModelConfig, kv_dtype: str, block_size: int) -> bool:
    try:
        backend.layout(
            num_layers=1,
            num_pages=1,
            page_size=block_size,
            num_kv_heads=model.num_kv_heads,
            head_size=model.head_size,
            dtype=kv_dtype,
        )
    except ValueError:
        return False
    return True
