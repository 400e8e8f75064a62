"""Sizes of an engine: how many pages, sequences and tokens, from the options, the model and the memory there is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .config import EngineConfig
from .errors import ConfigError
from .models.config import ModelConfig

GIB = 1 << 30
CPU_POOL_BYTES = 4 * GIB
DEFAULT_BLOCK_SIZE = 64
DEFAULT_SEQS = {"cpu": 64}
DEFAULT_TOKENS = {"cpu": 1024}
DEVICE_SEQS, DEVICE_TOKENS = 256, 8192


@dataclass(frozen=True)
class Demand:
    """What one known request needs: its prompt, and the output tokens it was promised (1 if it has no limit)."""

    prompt_len: int
    max_tokens: int | None

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + (self.max_tokens or 1)


@dataclass(frozen=True)
class EngineSizes:
    """Numbers that are fixed for the life of an engine."""

    dtype: str
    kv_cache_dtype: str
    block_size: int
    num_blocks: int
    """Pages of the pool, the null page among them."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    notes: tuple[str, ...] = ()
    """What was chosen against expectation, and why: to be shown."""


def requested_max_len(config: EngineConfig, model: ModelConfig) -> int:
    """Longest sequence that the model and the options allow, whatever the pool can hold."""
    most = model.max_context_len
    if config.max_model_len is not None and config.max_model_len > most:
        raise ConfigError(
            f"max_model_len: got {config.max_model_len}, allowed: at most {most}, which is as far as the model's rotary "
            "embedding reaches; lower it or leave it out"
        )
    return config.max_model_len or most


def size_engine(
    config: EngineConfig,
    model: ModelConfig,
    *,
    platform: str,
    free_bytes: int,
    page_bytes: Callable[[int, str], int],
    weights_bytes: Callable[[str], int],
    demands: Sequence[Demand] = (),
) -> EngineSizes:
    """Choose every size that the options leave open.

    `page_bytes(block_size, dtype)` and `weights_bytes(dtype)` say what a page and the weights take;
    `free_bytes` is the memory free before the weights. `demands` are the requests known beforehand, if all
    are: a pool need not hold more sequences than there will be. Raises ConfigError.
    """
    is_cpu = platform == "cpu"
    dtype = config.dtype if config.dtype != "auto" else "float32" if is_cpu else _device_dtype(model)
    kv_dtype = config.kv_cache_dtype if config.kv_cache_dtype != "auto" else "float32" if is_cpu else dtype
    block_size = config.block_size or DEFAULT_BLOCK_SIZE
    max_num_seqs, max_num_batched_tokens = _step_sizes(config, platform, len(demands))
    max_model_len = requested_max_len(config, model)
    bytes_per_page = page_bytes(block_size, kv_dtype)
    pages_per_sequence = -(-max_model_len // block_size)
    if config.num_blocks is not None:
        num_pages = config.num_blocks - 1
    elif config.kv_cache_memory_bytes is not None:
        num_pages = config.kv_cache_memory_bytes // bytes_per_page - 1
    else:
        weights = weights_bytes(dtype)
        if is_cpu:
            free = (free_bytes - weights) // 2
            budget = min(CPU_POOL_BYTES, _round_down(free))
        else:
            step = _step_bytes(model, max_num_batched_tokens, max_num_seqs)
            budget = int(free_bytes * config.device_memory_utilization) - weights - step
        num_pages = min(max_num_seqs * pages_per_sequence, max(0, budget) // bytes_per_page - 1)
    notes = []
    if num_pages < pages_per_sequence:
        max_model_len = _lowered_len(config, num_pages * block_size, max_model_len, bytes_per_page, demands)
        notes.append(
            f"max_model_len lowered to {max_model_len}: the pool of {num_pages} pages × {block_size} tokens "
            f"({num_pages * bytes_per_page / 1e6:.0f} MB) holds no longer sequence"
        )
    return EngineSizes(
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        block_size=block_size,
        num_blocks=num_pages + 1,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        notes=tuple(notes),
    )


def free_host_bytes() -> int:
    """Memory that this process could still take: what the kernel calls available, within its control group."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        available = int(fields["MemAvailable"].split()[0]) * 1024
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            if (most := limit.read().strip()) != "max":
                available = min(available, int(most) - int(used.read()))
    except (OSError, KeyError):  # No Linux, or no control group: the larger figure stands.
        return available
    return available


def _device_dtype(model: ModelConfig) -> str:
    # float16 has bfloat16's size and not its range; every device here computes bfloat16.
    return "float32" if model.dtype == "float32" else "bfloat16"


def _step_sizes(config: EngineConfig, platform: str, num_known: int) -> tuple[int, int]:
    tokens = config.max_num_batched_tokens
    seqs = config.max_num_seqs
    if seqs is None:
        seqs = DEFAULT_SEQS.get(platform, DEVICE_SEQS)
        if num_known:  # A power of two, so that few shapes are ever compiled.
            seqs = min(seqs, 1 << (num_known - 1).bit_length())
        seqs = min(seqs, tokens or seqs)
    return seqs, tokens or max(seqs, DEFAULT_TOKENS.get(platform, DEVICE_TOKENS))


def _lowered_len(
    config: EngineConfig, capacity: int, max_model_len: int, page_bytes: int, demands: Sequence[Demand]
) -> int:
    way_out = "raise num_blocks or kv_cache_memory_bytes, or free some memory"
    if config.max_model_len is not None:
        raise ConfigError(
            f"max_model_len: got {max_model_len}, the pool holds {capacity} tokens ({page_bytes} bytes a page); lower "
            f"max_model_len to {capacity}, {way_out}"
        )
    longest = max((demand.num_tokens for demand in demands), default=2)
    if longest > capacity:
        raise ConfigError(
            f"num_blocks: the pool holds {capacity} tokens, one request needs {longest} (prompt and max_tokens); {way_out}"
        )
    return capacity


def _round_down(num_bytes: int) -> int:
    """To three significant bits: free memory differs from run to run, compiled shapes should not."""
    shift = max(0, num_bytes.bit_length() - 3)
    return num_bytes >> shift << shift


def _step_bytes(model: ModelConfig, num_tokens: int, num_seqs: int) -> int:
    """Bytes that a step's activations and logits take, on the generous side."""
    widths = 4 * model.hidden_size + 3 * model.intermediate_size + 3 * model.num_heads * model.head_size
    return 4 * num_tokens * widths + 3 * 4 * num_seqs * model.vocab_size
