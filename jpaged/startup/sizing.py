"""Sizes of an engine: how many pages, sequences and tokens, from the options, the model and the memory there is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .buckets import deterministic_tokens
from .config import MAX_STEP_TOKENS, EngineConfig
from .errors import ConfigError
from .models.config import ModelConfig
from .rule_book import RuleBook

GIB = 1 << 30
CPU_POOL_BYTES = 4 * GIB
HOST_POOL_BYTES = 4 * GIB
DEFAULT_SEQS = {"cpu": 64}
DEFAULT_TOKENS = {"cpu": 1024}
DEVICE_SEQS, DEVICE_TOKENS = 256, 8192
ATTENTION_BYTES = 16 << 20
"""What attention takes beside a step's queries, keys and values, at most: held by the compile gates."""
MAX_SLOTS = (1 << 31) - 1
"""Slots are numbered in int32."""


@dataclass(frozen=True)
class Demand:
    """What one known request needs: its prompt, and the output tokens it was promised (1 if it has no limit)."""

    prompt_len: int
    max_tokens: int | None
    num_samples: int = 1

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + (self.max_tokens or 1)

    def num_pages(self, block_size: int, max_model_len: int) -> int:
        """Pages of all samples at their ends: the full ones of the prompt are shared."""
        num_tokens = max_model_len if self.max_tokens is None else min(self.num_tokens, max_model_len)
        # Each computes the prompt's last token anew and never its own last one, as `PageDemand` counts too.
        shared = (self.prompt_len - 1) // block_size
        return shared + self.num_samples * (-(-(num_tokens - 1) // block_size) - shared)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a device's memory (of the host's, on a CPU), and what they are for."""

    free_bytes: int
    """Before anything was allocated."""
    weights_bytes: int
    step_bytes: int
    """What the largest step needs beside weights and pages: measured on the compiled step where memory is short,
    estimated on the generous side where there is plenty."""
    is_measured: bool
    pool_bytes: int
    """Of all pages, the null page among them."""

    def __str__(self) -> str:
        how = "measured" if self.is_measured else "at most"
        return (
            f"weights {_gb(self.weights_bytes)} GB, a step {_gb(self.step_bytes)} GB ({how}), pages "
            f"{_gb(self.pool_bytes)} GB, of {_gb(self.free_bytes)} GB free"
        )


@dataclass(frozen=True)
class EngineSizes:
    """Numbers that are fixed for the life of an engine."""

    dtype: str
    kv_cache_dtype: str
    block_size: int
    num_blocks: int
    """Pages of the pool, the null page among them."""
    num_host_blocks: int
    """Pages of the host's pool, its null page among them; 0 without one."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    is_deterministic: bool
    """Every step is padded to `max_num_batched_tokens`, and each of its tokens is a row."""
    memory: MemoryPlan
    notes: tuple[str, ...] = ()
    """What was chosen against expectation, and why: to be shown."""


@dataclass(frozen=True)
class StepSizes:
    """What the memory of a step depends on."""

    dtype: str
    kv_cache_dtype: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    is_deterministic: bool = False


def requested_max_len(config: EngineConfig, model: ModelConfig) -> int:
    """Longest sequence that the model and the options allow, whatever the pool can hold."""
    most = model.max_context_len
    if config.max_model_len is not None and config.max_model_len > most:
        raise ConfigError(
            f"max_model_len: got {config.max_model_len}, allowed: at most {most}, which is as far as the model's "
            "rotary embedding reaches; lower it or leave it out"
        )
    return config.max_model_len or most


def requested_max_seqs(config: EngineConfig) -> int | None:
    """Most samples of one prompt that the options allow; None if the engine is made for as many as are asked for."""
    return config.max_num_seqs or config.max_num_batched_tokens


def size_engine(
    config: EngineConfig,
    model: ModelConfig,
    *,
    platform: str,
    free_bytes: int,
    host_free_bytes: int,
    block_size_of: Callable[[str, int, int], int],
    page_bytes: Callable[[int, str], int],
    weights_bytes: Callable[[str], int],
    step_bytes: Callable[[StepSizes], int],
    demands: Sequence[Demand] = (),
) -> EngineSizes:
    """Choose every size that the options leave open.

    `block_size_of(kv_dtype, max_num_seqs, max_model_len)` says how many tokens a page has; it raises ConfigError if the
    page tables of so many sequences have no room; `page_bytes(block_size, dtype)` and
    `weights_bytes(dtype)` say what a page and the weights take; `step_bytes`, what the largest step takes beside
    them, is asked only where memory is short, since to know it is to compile it; `free_bytes` is the memory free before
    the weights, `host_free_bytes` that of the host, which on a CPU is the same one. `demands` are the requests known
    beforehand, if all are: a pool need not hold more sequences than there will be. Raises ConfigError.
    """
    is_cpu = platform == "cpu"
    dtype, kv_dtype = chosen_dtypes(config, model, platform)
    max_model_len = requested_max_len(config, model)
    max_num_seqs, max_num_batched_tokens = _step_sizes(config, platform, demands, max_model_len)
    wanted_seqs = max_num_seqs
    least_seqs = max((demand.num_samples for demand in demands), default=1)  # Those of a prompt run together.
    while True:
        try:
            block_size = block_size_of(kv_dtype, max_num_seqs, max_model_len)
            break
        except ConfigError:
            if config.max_num_seqs is not None or max_num_seqs // 2 < least_seqs:
                raise
            max_num_seqs //= 2
    bytes_per_page = page_bytes(block_size, kv_dtype)
    pages_per_sequence = -(-max_model_len // block_size)
    weights = weights_bytes(dtype)
    if config.deterministic:
        max_num_batched_tokens = deterministic_tokens(max_num_seqs)
    step_sizes = StepSizes(
        dtype, kv_dtype, block_size, max_model_len, max_num_seqs, max_num_batched_tokens, config.deterministic
    )
    step, is_measured = estimated_step_bytes(model, max_num_batched_tokens, max_num_seqs), False
    if config.num_blocks is not None:
        num_pages = config.num_blocks - 1
        _check_pool("num_blocks", config.num_blocks, bytes_per_page, free_bytes, weights)
    elif config.kv_cache_memory_bytes is not None:
        num_pages = config.kv_cache_memory_bytes // bytes_per_page - 1
        _check_pool("kv_cache_memory_bytes", config.kv_cache_memory_bytes, 1, free_bytes, weights)
    else:
        most = min(max_num_seqs * pages_per_sequence, MAX_SLOTS // block_size - 1)
        if is_cpu:
            most = min(most, CPU_POOL_BYTES // bytes_per_page - 1)
        share = 1.0 if is_cpu else config.device_memory_utilization

        def affordable(step: int) -> int:
            room = int(free_bytes * share) - weights - step
            return (_round_down(max(0, room) // 2 // bytes_per_page) if is_cpu else room // bytes_per_page) - 1

        # Where not even the weights leave a page, the estimate is enough to refuse them.
        if affordable(0) >= 1 and affordable(step) < most:
            step, is_measured = step_bytes(step_sizes), True
        num_pages = min(most, affordable(step))
        if num_pages < 1:
            raise _no_room(config, platform, free_bytes, weights + step, 2 * bytes_per_page, is_measured)
    if not 1 <= num_pages < MAX_SLOTS // block_size:
        name, unit = ("num_blocks", 1) if config.num_blocks is not None else ("kv_cache_memory_bytes", bytes_per_page)
        raise ConfigError(
            f"{name}: got {getattr(config, name)}, allowed: from {2 * unit} to {MAX_SLOTS // block_size * unit} with "
            f"pages of {block_size} tokens, {bytes_per_page} bytes each"
        )
    notes = []
    if max_num_seqs < wanted_seqs:
        notes.append(
            f"max_num_seqs lowered to {max_num_seqs}: the device has no room for the page tables of more sequences of "
            f"{max_model_len} tokens"
        )
    if config.deterministic and (config.max_num_batched_tokens or 0) > max_num_batched_tokens:
        notes.append(
            f"max_num_batched_tokens lowered to {max_num_batched_tokens}, max_num_seqs rounded up: with deterministic "
            "all steps are of that size"
        )
    if num_pages < pages_per_sequence:
        missing = (pages_per_sequence - num_pages) * bytes_per_page
        max_model_len = _lowered_len(config, num_pages * block_size, max_model_len, missing, demands)
        notes.append(
            f"max_model_len lowered to {max_model_len}: the pool of {num_pages} pages × {block_size} tokens "
            f"({num_pages * bytes_per_page / 1e6:.0f} MB) holds no longer sequence"
        )
    if not config.enable_chunked_prefill and max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens: got {max_num_batched_tokens}, allowed: at least max_model_len, {max_model_len}, "
            "while enable_chunked_prefill is false: a prompt is computed in one step; raise it, lower max_model_len, "
            "or leave chunked prefill on"
        )
    _check_samples(demands, num_pages, block_size, max_model_len)
    used = weights + (num_pages + 1) * bytes_per_page if is_cpu else 0
    return EngineSizes(
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        block_size=block_size,
        num_blocks=num_pages + 1,
        num_host_blocks=_num_host_blocks(
            config, is_cpu=is_cpu, room=max(0, host_free_bytes - used), page_bytes=bytes_per_page, block_size=block_size
        ),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        is_deterministic=config.deterministic,
        memory=MemoryPlan(free_bytes, weights, step, is_measured, (num_pages + 1) * bytes_per_page),
        notes=tuple(notes),
    )


def free_host_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process could still take: what the kernel calls available, within its control groups."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
        groups = (proc / "self" / "cgroup").read_text().splitlines()
    except (OSError, KeyError):  # Not Linux.
        return available
    for line in groups:  # "0::/path" in version 2, "4:memory:/path" in version 1; inside a container mostly "/".
        _, controllers, path = line.split(":", 2)
        root = {"": cgroup, "memory": cgroup / "memory"}.get(controllers)
        if root is not None:
            own = root / path.strip("/")
            for group in (own, *own.parents[: len(own.parts) - len(root.parts)]):
                available = min(available, _free_in_group(group, _GROUP_FILES[controllers], available))
    return available


_GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Controllers of a line of /proc/self/cgroup → files of limit and usage, and the field of memory.stat."""


def _free_in_group(group: Path, names: tuple[str, str, str], available: int) -> int:
    """Memory below the limit of one control group; file pages that nobody uses now can be had back, and count."""
    limit_name, used_name, reclaimable = names
    try:
        limit = (group / limit_name).read_text().strip()
        if limit == "max":
            return available
        used = int((group / used_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(stat.get(reclaimable, 0)))
    except OSError:  # No such group here, or one without a memory controller: no limit.
        return available


def chosen_dtypes(config: EngineConfig, model: ModelConfig, platform: str) -> tuple[str, str]:
    """Of the weights and of the pages."""
    is_cpu = platform == "cpu"
    dtype = config.dtype if config.dtype != "auto" else "float32" if is_cpu else _device_dtype(model)
    return dtype, config.kv_cache_dtype if config.kv_cache_dtype != "auto" else dtype


def _device_dtype(model: ModelConfig) -> str:
    # float16 has bfloat16's size and not its range; every device here computes bfloat16.
    return "float32" if model.dtype == "float32" else "bfloat16"


def _step_sizes(config: EngineConfig, platform: str, demands: Sequence[Demand], max_model_len: int) -> tuple[int, int]:
    tokens = config.max_num_batched_tokens
    seqs = config.max_num_seqs
    if seqs is None:
        seqs = DEFAULT_SEQS.get(platform, DEVICE_SEQS)
        if demands and not config.deterministic:  # Powers of two, so that few shapes are ever compiled.
            seqs = min(seqs, _power_of_two(sum(demand.num_samples for demand in demands)))
            # The samples of a prompt run together.
            seqs = max(seqs, _power_of_two(max(demand.num_samples for demand in demands)))
        seqs = min(seqs, tokens or seqs)
    if tokens is not None:
        return seqs, tokens
    tokens = max(seqs, DEFAULT_TOKENS.get(platform, DEVICE_TOKENS))
    if config.enable_chunked_prefill:
        return seqs, tokens
    if max_model_len > MAX_STEP_TOKENS:
        raise ConfigError(
            f"max_model_len: got {max_model_len}, allowed: at most {MAX_STEP_TOKENS} while enable_chunked_prefill is "
            "false: a prompt is computed in one step; lower it or leave chunked prefill on"
        )
    return seqs, max(tokens, max_model_len)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _num_host_blocks(config: EngineConfig, *, is_cpu: bool, room: int, page_bytes: int, block_size: int) -> int:
    """Pages of the host's pool, from what was asked for and the `room` in bytes that there is for it."""
    most = min(room // page_bytes, MAX_SLOTS // block_size)
    if config.num_host_blocks is None and config.swap_space is None:
        if is_cpu and config.preemption_mode != "swap":
            return 0
        affordable = _round_down(room // 4 // page_bytes)
        num_pages = min(HOST_POOL_BYTES // page_bytes, affordable, most)
        if num_pages < 2 and config.preemption_mode == "swap":
            raise ConfigError(
                f"preemption_mode: got swap, and a quarter of the host's free memory ({_gb(room)} GB) holds no page of "
                f"{page_bytes} bytes beside the null page; free some memory, give num_host_blocks, or allow recompute"
            )
        return num_pages if num_pages >= 2 else 0
    if config.num_host_blocks is not None:
        name, num_pages = "num_host_blocks", config.num_host_blocks
        low, high = "2", f"{most}"
    else:
        assert config.swap_space is not None
        name, num_pages = "swap_space", int(config.swap_space * GIB) // page_bytes
        # Rounded inwards, so that what is named here is taken.
        low = f"{-(-2 * page_bytes * 10**6 // GIB) / 10**6:g}"
        high = f"{most * page_bytes * 1000 // GIB / 1000:g}"
    if num_pages > most or (num_pages < 2 and getattr(config, name)):
        allowed = f"0 or from {low} to {high}" if most >= 2 else "0"
        raise ConfigError(
            f"{name}: got {getattr(config, name)}, allowed: {allowed}, with "
            f"pages of {page_bytes} bytes and {_gb(room)} GB left on the host; change it or free some memory"
        )
    return num_pages


def _check_samples(demands: Sequence[Demand], num_pages: int, block_size: int, max_model_len: int) -> None:
    """Refuse a pool that cannot hold all samples of one known prompt at once."""
    for demand in demands:
        needed = demand.num_pages(block_size, max_model_len)
        if demand.num_samples > 1 and needed > num_pages:
            raise ConfigError(
                f"n: got {demand.num_samples} samples of a prompt of {demand.prompt_len} tokens, which need {needed} "
                f"pages with their outputs, allowed: at most the {num_pages} pages of the pool; lower n or max_tokens, "
                "raise num_blocks or kv_cache_memory_bytes, or free some memory"
            )


def _check_pool(name: str, got: int, unit: int, free_bytes: int, weights: int) -> None:
    """Refuse a pool of `got` times `unit` bytes that was asked for and cannot be had, before anything is loaded."""
    room = max(0, free_bytes - weights)
    if got * unit > room:
        raise ConfigError(
            f"{name}: got {got} ({_gb(got * unit)} GB), allowed: at most {room // unit}: {_gb(free_bytes)} GB are free "
            f"and the weights take {_gb(weights)} GB; lower it or free some memory"
        )


def _no_room(
    config: EngineConfig, platform: str, free_bytes: int, needed: int, least_pool: int, is_measured: bool
) -> ConfigError:
    """The error for a model that leaves no memory for a page of its own."""
    take = f"take{'' if is_measured else ' at most'} {_gb(needed)} GB"
    if platform == "cpu":
        missing = needed + 2 * least_pool - free_bytes
        return ConfigError(
            f"model: its weights and a step {take}, {_gb(free_bytes)} GB are free, and half of the rest "
            f"holds no page; {missing} bytes are missing, and no max_model_len fits: free some memory, take a smaller "
            "model or give num_blocks"
        )
    share = config.device_memory_utilization
    missing = needed + least_pool - int(free_bytes * share)
    return ConfigError(
        f"device_memory_utilization: got {share:g}, of {_gb(free_bytes)} GB free; weights and a step {take}; "
        f"{missing} bytes are missing, and no max_model_len fits: raise it, lower "
        "max_num_batched_tokens or max_num_seqs, or take a smaller model"
    )


def _lowered_len(
    config: EngineConfig, capacity: int, max_model_len: int, missing: int, demands: Sequence[Demand]
) -> int:
    """The longest sequence that a pool of `capacity` tokens holds, which lacks `missing` bytes for one more."""
    way_out = "raise num_blocks or kv_cache_memory_bytes, or free some memory"
    if config.max_model_len is not None:
        raise ConfigError(
            f"max_model_len: got {max_model_len}, the pool holds {capacity} tokens, {missing} bytes are missing; lower "
            f"max_model_len to {capacity}, or {way_out}"
        )
    # A prompt of one token and its answer are the least that anybody can ask.
    longest = min(max_model_len, max((demand.num_tokens for demand in demands), default=2))
    if longest > capacity:
        raise ConfigError(
            f"num_blocks: the pool holds {capacity} tokens, one request needs {longest} (prompt and max_tokens), and "
            f"{missing} bytes are missing for max_model_len, {max_model_len}: at most {capacity} fits; {way_out}"
        )
    return capacity


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g}"


def _round_down(num_pages: int) -> int:
    """To three significant bits: free memory differs from run to run, compiled shapes should not."""
    shift = max(0, num_pages.bit_length() - 3)
    return num_pages >> shift << shift


def estimated_step_bytes(model: ModelConfig, num_tokens: int, num_seqs: int) -> int:
    """Bytes that a step's activations and logits take, on the generous side."""
    widths = 4 * model.hidden_size + 3 * model.intermediate_size + 3 * model.num_heads * model.head_size
    logits = 6 * 4 * num_seqs * model.vocab_size
    return 4 * num_tokens * widths + logits + ATTENTION_BYTES + rules_bytes(model.vocab_size, num_seqs)


def rules_bytes(vocab_size: int, num_seqs: int) -> int:
    """Of the rules that slots hold their logits to, the null slot among them."""
    return 4 * (num_seqs + 1) * RuleBook(vocab_size).width
