"""Every engine option, checked before anything is loaded: one frozen object behind flags, keywords and files.

Knows names, values and ranges; not what a model or a device makes of them (`sizing.py` does).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, field, fields
from numbers import Real
from pathlib import Path
from sys import float_info
from typing import TYPE_CHECKING, Any

from .errors import ConfigError
from .logits_processor import LogitsProcessor
from .model_source import DEFAULT_MODEL
from .pallas_kernels.ragged_paged_attention.names import BACKEND_NAMES
from .sampling_params import is_integer, shown

if TYPE_CHECKING:
    from .request import Request

DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "gpu", "tpu")
MAX_BLOCK_SIZE = 1024
MAX_STEP_TOKENS = 1 << 20
"""Far beyond what one step can compute in memory; sizes of steps are compiled shapes."""
MAX_STEP_SEQS = 1 << 16
MAX_SWAP_SPACE = 10**6
"""GiB, which is far beyond what one host has."""
INT64 = (-(1 << 63), (1 << 63) - 1)
MAX_DECODE_STEPS = 16
"""Tokens that one dispatch decodes at most."""
WARMUPS = ("lazy", "full", "off")
PREEMPTION_MODES = ("auto", "recompute", "swap")
SCHEDULING_POLICIES = ("fcfs", "priority")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
LIMITS = ("waiting_requests", "waiting_tokens")
"""Keys of `limits`."""

NOT_BUILT = (
    "tokenizer", "skip_tokenizer_init", "load_format", "hf_overrides", "quantization", "enforce_eager",
    "tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "mesh",
    "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "speculative_config", "limit_mm_per_prompt",
    "served_model_name", "disable_log_stats", "stat_loggers", "otlp_traces_endpoint", "params",
)  # fmt: skip
"""Options of the full interface that this version refuses by name."""
ALIASES = {"gpu_memory_utilization": "device_memory_utilization"}


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Engine options. None means: chosen at start from the model and the device. Raises ConfigError."""

    model: str = _option(
        DEFAULT_MODEL, "a directory of safetensors, a .gguf file, org/name[@revision], or the built-in smollm2-135m"
    )
    revision: str | None = _option(None, "revision of a model from the hub")
    dtype: str = _option("auto", f"weights and activations: {', '.join(DTYPES)}; auto is float32 on a CPU")
    kv_cache_dtype: str = _option("auto", f"keys and values: {', '.join(DTYPES)}; each backend takes its own")
    seed: int = _option(0, "seeds the draws of requests that have no seed of their own")
    device: str = _option("auto", f"{', '.join(DEVICES)}; auto never leaves a visible accelerator for the CPU")
    attention_backend: str = _option("auto", f"auto or {', '.join(BACKEND_NAMES)}")
    max_model_len: int | None = _option(None, "longest sequence in tokens, prompt and output; default: the model's")
    max_logprobs: int = _option(20, "most logprobs a request may ask for per token; -1: all of the vocabulary")
    logprobs_mode: str = _option(
        "raw_logprobs",
        f"{', '.join(LOGPROBS_MODES)}: of the model, or of what is drawn from, after rules, temperature and truncation",
    )
    logits_processors: tuple[LogitsProcessor, ...] = field(
        default=(), metadata={"help": "rules of your own for logits, in Python; requests give arguments in extra_args"}
    )
    block_size: int | None = _option(
        None, f"tokens per page, a power of two up to {MAX_BLOCK_SIZE}; default 64, with pallas-tpu 128"
    )
    num_blocks: int | None = _option(None, "pages in the pool, the null page among them; default: from memory")
    kv_cache_memory_bytes: int | None = _option(None, "memory of the page pool in bytes; default: from free memory")
    device_memory_utilization: float = _option(0.92, "share of a device's free memory to use, in (0, 1]")
    num_host_blocks: int | None = _option(
        None, "pages in the host's memory, the null page among them; 0: none; default: from swap_space"
    )
    swap_space: float | None = _option(
        None, "GiB of pages in the host's memory; default: up to 4, on a CPU 0 unless preemption_mode is swap"
    )
    preemption_mode: str = _option(
        "auto", f"what is done when pages run out: {', '.join(PREEMPTION_MODES)}; auto takes the cheaper one"
    )
    enable_prefix_caching: bool = _option(True, "let requests share the pages of equal prefixes")
    max_cached_blocks: int | None = _option(None, "most pages kept for later prefixes; default: all that are free")
    enable_chunked_prefill: bool = _option(
        True, "compute long prompts in pieces beside decoding; without it prompts go first, each in one step"
    )
    long_prefill_token_threshold: int = _option(0, "most tokens of one prompt per step; 0: no limit of its own")
    max_num_batched_tokens: int | None = _option(
        None, "tokens per step; default 8192, on a CPU 1024, and max_model_len without chunked prefill"
    )
    max_num_seqs: int | None = _option(None, "sequences per step; default 256, on a CPU 64")
    scheduling_policy: str | Callable[[Request], Any] = field(
        default="fcfs",
        metadata={"help": "who goes first: fcfs, or priority (the lower value, then who came first)"},
    )
    """In Python also a key function: of a request, what to sort by."""
    scheduling_delay_factor: float = _option(
        0.0, "wait this many times the last prompt step's duration for more requests before the next; 0: do not wait"
    )
    watermark: float = _option(0.01, "share of the pool that admission leaves free, in [0, 1)")
    async_scheduling: bool = _option(
        True, "prepare and start each step while the one before is computed; without it they take turns"
    )
    num_decode_steps: int | str = _option(
        "auto",
        f"tokens decoded per dispatch while nothing waits and nobody wants logprobs, 1 to {MAX_DECODE_STEPS}; auto is "
        f"{MAX_DECODE_STEPS}",
    )
    deterministic: bool = _option(
        False,
        "compute each token bitwise alike in any company: every step in one padded size, one token a dispatch; slower",
    )
    warmup: str = _option(
        "lazy",
        f"when executables are compiled: {', '.join(WARMUPS)}; lazy: what known prompts need first, full: all at "
        "start, off: each at its first use",
    )
    compilation_cache_dir: str | None = _option(None, "where executables are kept; default: the user's cache folder")
    generation_config: str = _option("auto", "auto: sampling defaults from the model; none: plain defaults")
    limits: Mapping[str, int | None] = field(
        default_factory=dict,
        hash=False,
        metadata={"help": f"how much may wait before a request is refused: {', '.join(LIMITS)}; default: no limit"},
    )
    gpu_memory_utilization: InitVar[float | None] = None
    """vLLM's name of `device_memory_utilization`."""

    def __new__(cls, **options: Any) -> EngineConfig:
        """Refuse unknown names with the nearest known one, where a dataclass would say `unexpected keyword`."""
        for name in options:
            check_option(name, options[name])
        return super().__new__(cls)

    def __post_init__(self, gpu_memory_utilization: float | None) -> None:
        if gpu_memory_utilization is not None:
            object.__setattr__(self, "device_memory_utilization", gpu_memory_utilization)
        self._text("model", "a directory, a .gguf file, org/name[@revision] or a built-in name")
        self._text("revision", "a branch, a tag or a commit of a model from the hub", optional=True)
        self._text("compilation_cache_dir", "a directory", optional=True)
        self._choice("dtype", DTYPES)
        self._choice("kv_cache_dtype", DTYPES)
        self._choice("device", DEVICES)
        self._choice("attention_backend", ("auto", *BACKEND_NAMES))
        self._choice("generation_config", ("auto", "none"))
        self._integer("seed", *INT64)
        self._integer("max_logprobs", -1, 1000)
        self._choice("logprobs_mode", LOGPROBS_MODES)
        object.__setattr__(self, "logits_processors", self._processors())
        self._integer("max_model_len", 1, INT64[1], optional=True)
        self._integer("kv_cache_memory_bytes", 1, INT64[1], optional=True)
        self._integer("max_num_batched_tokens", 1, MAX_STEP_TOKENS, optional=True)
        self._integer("max_num_seqs", 1, MAX_STEP_SEQS, optional=True)
        self._integer("num_blocks", 2, INT64[1], optional=True)
        self._integer("max_cached_blocks", 0, INT64[1], optional=True)
        self._integer("long_prefill_token_threshold", 0, INT64[1])
        self._integer("num_host_blocks", 0, INT64[1], optional=True)
        if self.num_host_blocks == 1:
            self._refuse("num_host_blocks", "0, or an integer ≥ 2: the first page is the null page")
        self._integer("block_size", 1, MAX_BLOCK_SIZE, optional=True)
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            self._refuse("block_size", f"a power of two from 1 to {MAX_BLOCK_SIZE}, such as 16 or 64")
        self._number("device_memory_utilization", 0.0, 1.0, open_low=True)
        self._number("watermark", 0.0, 1.0, open_high=True)
        self._number("scheduling_delay_factor", 0.0, float_info.max)
        if self.swap_space is not None:
            self._number("swap_space", 0.0, MAX_SWAP_SPACE)
        self._choice("warmup", WARMUPS)
        if self.num_decode_steps != "auto":
            if not is_integer(self.num_decode_steps) or not 1 <= int(self.num_decode_steps) <= MAX_DECODE_STEPS:
                self._refuse("num_decode_steps", f"auto, or an integer in [1, {MAX_DECODE_STEPS}]")
            object.__setattr__(self, "num_decode_steps", int(self.num_decode_steps))
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "true or false")
        self._choice("preemption_mode", PREEMPTION_MODES)
        if not callable(self.scheduling_policy):
            self._choice("scheduling_policy", SCHEDULING_POLICIES, more=", or in Python a key function of a request")
        object.__setattr__(self, "limits", self._limits())
        self._check_pairs()

    def _check_pairs(self) -> None:
        """Refuse options that contradict each other, or of which one would be ignored."""
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            self._refuse("kv_cache_memory_bytes", f"none beside num_blocks, {self.num_blocks}: give one of the two")
        if self.num_host_blocks is not None and self.swap_space is not None:
            self._refuse("swap_space", f"none beside num_host_blocks, {self.num_host_blocks}: give one of the two")
        for name in ("num_host_blocks", "swap_space"):
            if self.preemption_mode == "swap" and getattr(self, name) == 0:
                self._refuse("preemption_mode", f"auto or recompute while {name} is 0; raise {name} or leave it out")
        if self.max_cached_blocks and not self.enable_prefix_caching:
            self._refuse("max_cached_blocks", "0 or none while enable_prefix_caching is false; leave one of them out")
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            self._refuse(
                "long_prefill_token_threshold",
                "0 while enable_chunked_prefill is false: a prompt is computed in one step; leave one of them out",
            )
        if self.deterministic and self.num_decode_steps not in ("auto", 1):
            self._refuse("num_decode_steps", "auto or 1 while deterministic is true; leave one of them out")
        if self.deterministic and not self.enable_chunked_prefill:
            self._refuse("enable_chunked_prefill", "true while deterministic is true: all steps are of one size")
        if self.deterministic and self.attention_backend == "pallas-tpu":
            self._refuse(
                "attention_backend",
                "auto, xla or pallas-gpu while deterministic is true: these kernels round a prompt as it is cut; leave "
                "one of them out",
            )
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and seqs is not None and tokens < seqs:
            self._refuse(
                "max_num_batched_tokens", f"at least max_num_seqs, {seqs}: every sequence decodes one token a step"
            )

    def _text(self, name: str, allowed: str, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not isinstance(value, str | Path) or not str(value):
            self._refuse(name, allowed)
        object.__setattr__(self, name, str(value))

    def _choice(self, name: str, allowed: Iterable[str], *, more: str = "") -> None:
        value = getattr(self, name)
        if not isinstance(value, str) or value not in allowed:
            self._refuse(name, ", ".join(allowed) + more)

    def _processors(self) -> tuple[LogitsProcessor, ...]:
        given = self.logits_processors
        if not isinstance(given, list | tuple) or not all(isinstance(one, LogitsProcessor) for one in given):
            self._refuse("logits_processors", "a list of LogitsProcessor")
        names = [name for processor in given for name in processor.arguments]
        if len(set(names)) < len(names):
            self._refuse("logits_processors", "processors whose arguments all have different names")
        return tuple(given)

    def _limits(self) -> dict[str, int | None]:
        """Every limit by its name; None is none."""
        if not isinstance(self.limits, Mapping):
            self._refuse("limits", f"a mapping of any of {', '.join(LIMITS)} to integers ≥ 1")
        for key, value in self.limits.items():
            if key not in LIMITS:
                near = difflib.get_close_matches(str(key), LIMITS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(LIMITS)}"
                raise ConfigError(f"limits: got the unknown key {shown(key)}; {hint}")
            if value is not None and not (is_integer(value) and 1 <= value <= INT64[1]):
                raise ConfigError(
                    f"limits: got {shown(value)} for {key}, allowed: an integer ≥ 1, or leave it out for no limit"
                )
        given = {key: None if value is None else int(value) for key, value in self.limits.items()}
        return {**dict.fromkeys(LIMITS), **given}

    def _integer(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not is_integer(value) or not low <= value <= high:
            self._refuse(
                name, f"an integer ≥ {low}" if low >= 0 and high == INT64[1] else f"an integer in [{low}, {high}]"
            )
        object.__setattr__(self, name, int(value))

    def _number(self, name: str, low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> None:
        value = getattr(self, name)
        try:
            number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else float("nan")
        except OverflowError:  # An integer of hundreds of digits.
            number = float("nan")
        # A NaN compares false with everything.
        if not low <= number <= high or (open_low and number == low) or (open_high and number == high):
            span = f"a number in {'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
            self._refuse(name, f"a finite number ≥ {low:g}" if high == float_info.max else span)
        object.__setattr__(self, name, number)

    def _refuse(self, name: str, allowed: str) -> None:
        raise ConfigError(f"{name}: got {shown(getattr(self, name))}, allowed: {allowed}")


OPTIONS = tuple(field.name for field in fields(EngineConfig))


def check_option(name: str, value: Any = None, others: Iterable[str] = ()) -> None:
    """Refuse a name that is no engine option (nor one of `others`), naming the nearest."""
    if name in OPTIONS or name in ALIASES or name in others:
        return
    if name in NOT_BUILT:
        given = "" if value is None else f" (got {shown(value)})"
        raise ConfigError(f"{name}: not available in this version{given}; allowed: leave it out")
    near = difflib.get_close_matches(name, [*OPTIONS, *others], n=1)
    hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join([*OPTIONS, *others])}"
    raise ConfigError(f"{name[:100]}: unknown option; {hint}")
