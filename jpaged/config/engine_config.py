"""Every engine option, checked before anything is loaded: one frozen object behind flags, keywords and files.

Knows names, values and ranges; what they mean for a model and a device is the business of `startup/sizing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

from .. import checks, not_available
from ..checks import INT64, CheckedFields, Rule, boolean, integer, number, one_of, or_none, refusal, text
from ..errors import ConfigError
from ..pallas_kernels.ragged_paged_attention.names import BACKEND_NAMES, BACKENDS
from ..sampling.logits_processor import LogitsProcessor
from . import option_rules as rules
from .option_rules import COUNT, MAX_BLOCK_SIZE, MAX_DECODE_STEPS, SIZE

if TYPE_CHECKING:
    from ..sharding import AxisTable

DEFAULT_MODEL = "smollm2-135m"
"""The built-in model that serves where none is named."""
DTYPES = ("auto", "float32", "bfloat16")
KV_DTYPES = (*DTYPES, "int8", "fp8")
LOAD_FORMATS = ("auto", "hf", "safetensors", "orbax", "gguf", "dummy")
"""Formats of weights; hf and safetensors mean the same, since pickled weights are never read."""
DEVICES = ("auto", "cpu", "gpu", "tpu")
MAX_STEP_TOKENS = 1 << 20
"""Largest max_num_batched_tokens. A step's sizes are compiled shapes, and no memory holds one as large as this."""
MAX_STEP_SEQS = 1 << 16
MAX_SWAP_SPACE = 10**6
"""Largest swap_space in GiB, far beyond the memory of one host."""
MAX_DEVICES = 1 << 16
"""Largest tensor_parallel_size, far beyond the devices of one process."""
WARMUPS = ("lazy", "full", "off")
PREEMPTION_MODES = ("auto", "recompute", "swap")
LOGPROBS_MODES = ("raw_logprobs", "tempered_logprobs", "processed_logprobs")
LIMITS_HELP = (
    "the largest values of what requests ask for and of what may wait: waiting_requests, waiting_tokens and others "
    "(docs/serving.md)"
)
OVERRIDES_HELP = "values instead of those in config.json, on the command line a JSON object; objects are merged"
MESH_HELP = "a jax.sharding.Mesh in Python, over whose axes for tensors the model is spread"
RULES_HELP = "in Python: logical axis → the axes of mesh that a trainer splits it over, or None"
PARAMS_HELP = "weights, in Python: a tree of arrays under Hugging Face names, for the config of the model's directory"
PYTHON_ONLY = ("logits_processors", "mesh", "params", "sharding_rules")
"""Options without a flag."""
ALIASES = {"gpu_memory_utilization": "device_memory_utilization"}


def _option(default: Any, help_text: str, rule: Rule) -> Any:
    """Return the field of an option; one whose default is None takes None too."""
    return checks.checked(default, or_none(rule) if default is None else rule, help_text)


@checks.described
@dataclass(frozen=True, kw_only=True)
class EngineConfig(CheckedFields, kind="option", error=ConfigError, not_available=not_available.ENGINE_OPTIONS):
    """Engine options. None means: chosen at start from the model and the device. Raises ConfigError.

    `gpu_memory_utilization` is vLLM's name of `device_memory_utilization`, and wins over it.
    """

    model: str = _option(
        DEFAULT_MODEL,
        "a directory of safetensors or of orbax, a .gguf file, org/name[@revision], or the built-in smollm2-135m",
        rules.model,
    )
    revision: str | None = _option(
        None, "revision of a model from the hub", text("a branch, a tag or a commit of a model from the hub")
    )
    tokenizer: str | None = _option(
        None,
        "tokenizer instead of the model's own: a directory, a .gguf file, org/name[@revision], or smollm2-135m",
        rules.model,
    )
    skip_tokenizer_init: bool = _option(False, "load no tokenizer: requests give token ids, and get no text", boolean)
    tool_call_parser: str | None = _option(
        None,
        "format of the model's tool calls, such as hermes or qwen3_coder (vLLM's names too), or none; default: the one "
        "that its chat template has",
        or_none(text("a name")),
    )
    reasoning_parser: str | None = _option(
        None,
        "format of the model's thoughts, such as qwen3 or deepseek_r1 (vLLM's names too), or none; default: the one "
        "that its chat template has",
        or_none(text("a name")),
    )
    load_format: str = _option(
        "auto",
        f"{', '.join(LOAD_FORMATS)}; auto: what the files are, dummy: random weights made on the device, from the "
        "model's config alone",
        one_of(*LOAD_FORMATS),
    )
    """A format that the files do not have is refused. With dummy no weights are read. A directory then needs no more
    than config.json; without a tokenizer in it, requests give token ids and want no text."""
    hf_overrides: Mapping[str, Any] = field(
        default_factory=dict, hash=False, metadata={"rule": rules.overrides, "help": OVERRIDES_HELP}
    )
    """Merged into the nested objects of config.json, before the model is read. A key that the model's family does not
    know is refused."""
    params: Mapping[str, Any] | None = field(
        default=None, hash=False, compare=False, repr=False, metadata={"rule": rules.params_tree, "help": PARAMS_HELP}
    )
    """The engine copies the arrays, and keeps none of them."""
    dtype: str = _option(
        "auto", f"weights and activations: {', '.join(DTYPES)}; auto is float32 on a CPU", one_of(*DTYPES)
    )
    """Type of weights and activations; auto is float32 on a CPU and the checkpoint's type on other devices."""
    kv_cache_dtype: str = _option(
        "auto", f"keys and values: {', '.join(KV_DTYPES)}; each backend takes its own", one_of(*KV_DTYPES)
    )
    """Type of the cached keys and values; auto is that of the activations. int8 and fp8 take one byte a number, with
    scales that the checkpoint has or that are measured at start."""
    seed: int = _option(0, "seeds the draws of requests that have no seed of their own", integer(*INT64))
    """64 bits. The draws of a request without a seed depend on this one and on the request's number."""
    device: str = _option(
        "auto", f"{', '.join(DEVICES)}; auto never leaves a visible accelerator for the CPU", one_of(*DEVICES)
    )
    tensor_parallel_size: int | None = _option(
        None, "devices that the model is spread over; default: 1, on a TPU 7x the 2 of a chip", integer(1, MAX_DEVICES)
    )
    """Devices that the weights and the KV cache are spread over; more than 1 on a CPU is for tests, and serves xla."""
    enable_expert_parallel: bool = _option(
        False, "give each device whole experts of a sparse MLP; without it each has a share of every expert", boolean
    )
    """Refused for a model without experts, and on one device."""
    count_expert_tokens: bool = _option(
        False, "count the tokens that choose each expert of each layer, for stats() and the summary", boolean
    )
    """`Engine.stats()` then has them as `expert_tokens`. Refused for a model without experts."""
    mesh: Any = field(default=None, metadata={"rule": rules.trainer_mesh, "help": MESH_HELP})
    """A `jax.sharding.Mesh` of devices of this process, such as a trainer's. Those along its axes for tensors serve, in
    their order, from index 0 of every other axis. That is its axis tensor, or the only one, unless `sharding_rules` say
    otherwise."""
    sharding_rules: Mapping[str, str | tuple[str, ...] | None] | None = field(
        default=None, hash=False, metadata={"rule": or_none(rules.axis_rules), "help": RULES_HELP}
    )
    """How the trainer splits its arrays over `mesh`, as rules of Flax: {"heads": "tp", "mlp": "tp", "embed": "fsdp"}.
    The axes of vocab, heads, kv_heads, mlp and expert are those for tensors."""
    data_parallel_size: int = _option(
        1,
        "copies of the model, each in a core process with devices of its own; for serve, generate and AsyncEngine",
        integer(1, MAX_DEVICES),
    )
    """Requests go to the copy that has the least to do for them. A single `Engine` takes 1 alone."""
    pipeline_parallel_size: int = _option(
        1, "stages of layers on devices of their own; 1, since more are not available in this version", rules.only_one
    )
    attention_backend: str = _option("auto", f"auto or {', '.join(BACKEND_NAMES)}", one_of("auto", *BACKEND_NAMES))
    """A backend that is named must pass its check at start; one that auto chooses is replaced by xla if it fails."""
    max_model_len: int | None = _option(
        None, "longest sequence in tokens, prompt and output; default: the model's", SIZE
    )
    """The default is the model's length. It is lowered, with a printed reason, where the page pool could not hold one
    such sequence."""
    max_logprobs: int = _option(
        20, "most logprobs a request may ask for per token; -1: all of the vocabulary", integer(-1, 1000)
    )
    """Logprobs of the most likely tokens that a request may ask for; each step computes so many where any are asked
    for. −1 allows all of the vocabulary."""
    logprobs_mode: str = _option(
        "raw_logprobs",
        f"{', '.join(LOGPROBS_MODES)}: of the model, at the request's temperature, or of what is drawn from, after "
        "rules, temperature and truncation",
        one_of(*LOGPROBS_MODES),
    )
    logits_processors: tuple[LogitsProcessor, ...] = _option(
        (), "rules of your own for logits, in Python; requests give arguments in extra_args", rules.processors
    )
    block_size: int | None = _option(
        None,
        f"tokens per page, a power of two up to {MAX_BLOCK_SIZE}; default 64, with pallas-tpu 128",
        rules.block_size,
    )
    num_blocks: int | None = _option(
        None, "pages in the pool, the null page among them; default: from memory", integer(2, INT64[1])
    )
    kv_cache_memory_bytes: int | None = _option(
        None, "memory of the page pool on each device in bytes; default: from free memory", SIZE
    )
    device_memory_utilization: float = _option(
        0.92, "share of a device's free memory to use, in (0, 1]", number(0.0, 1.0, open_min=True)
    )
    """Share of the free memory, measured at start, that weights, steps and pages take together; not used on a CPU."""
    num_host_blocks: int | None = _option(
        None,
        "pages in the host's memory, the null page among them; 0: none; default: from swap_space",
        rules.host_blocks,
    )
    swap_space: float | None = _option(
        None,
        "GiB of pages in the host's memory; default: up to 4, on a CPU 0 unless preemption_mode is swap",
        number(0.0, MAX_SWAP_SPACE),
    )
    preemption_mode: str = _option(
        "auto",
        f"what is done when pages run out: {', '.join(PREEMPTION_MODES)}; auto takes the cheaper one",
        one_of(*PREEMPTION_MODES),
    )
    enable_prefix_caching: bool = _option(True, "let requests share the pages of equal prefixes", boolean)
    max_cached_blocks: int | None = _option(
        None, "most pages kept for later prefixes; default: all that are free", COUNT
    )
    enable_chunked_prefill: bool = _option(
        True, "compute long prompts in pieces beside decoding; without it prompts go first, each in one step", boolean
    )
    long_prefill_token_threshold: int = _option(0, "most tokens of one prompt per step; 0: no limit of its own", COUNT)
    max_num_batched_tokens: int | None = _option(
        None,
        "tokens per step; default 8192, on a CPU 1024, and max_model_len without chunked prefill",
        integer(1, MAX_STEP_TOKENS),
    )
    max_num_seqs: int | None = _option(None, "sequences per step; default 256, on a CPU 64", integer(1, MAX_STEP_SEQS))
    scheduling_policy: str | Callable[[Any], Any] = _option(
        "fcfs", "which request goes first: fcfs, or priority (the lower value, then the earlier arrival)", rules.policy
    )
    """In Python this may also be a key function, which takes a request and returns what requests are sorted by."""
    scheduling_delay_factor: float = _option(
        0.0,
        "wait this many times the last prompt step's duration for more requests before the next; 0: do not wait",
        number(0.0),
    )
    watermark: float = _option(
        0.01, "share of the pool that admission leaves free, in [0, 1)", number(0.0, 1.0, open_max=True)
    )
    """Share of the page pool that stays free when a request is admitted, so that running sequences can grow; else
    an admission would often cause the next preemption."""
    async_scheduling: bool = _option(
        True, "prepare and start each step while the one before is computed; without it they take turns", boolean
    )
    num_decode_steps: int | str = _option(
        "auto",
        f"tokens decoded per dispatch while nothing waits, 1 to {MAX_DECODE_STEPS}; auto is {MAX_DECODE_STEPS}, on a "
        "GPU 4",
        rules.decode_steps,
    )
    deterministic: bool = _option(
        False,
        "compute each token bitwise alike in any batch: every step in one padded size, one token a dispatch; slower",
        boolean,
    )
    warmup: str = _option(
        "lazy",
        f"when executables are compiled: {', '.join(WARMUPS)}; lazy: what known prompts need first, full: all at "
        "start, off: each at its first use",
        one_of(*WARMUPS),
    )
    compilation_cache_dir: str | None = _option(
        None, "where executables are kept, or off; default: the user's cache folder", text("a directory, or off")
    )
    weights_cache_dir: str | None = _option(
        None,
        "on a CPU, where converted weights are kept, at most 8 GiB, or off; default: the user's cache folder",
        text("a directory, or off"),
    )
    quantization: str = _option(
        "auto",
        "auto: keep a quantized model's codes; none: make floats of them; int8, fp8, int4: quantize floats at load",
        one_of("auto", "none", "int8", "fp8", "int4"),
    )
    perf_map: bool = _option(
        False, "name native code for Linux's profiler: write /tmp/perf-PID.map, which perf reads", boolean
    )
    generation_config: str = _option(
        "auto", "auto: sampling defaults from the model; none: plain defaults", one_of("auto", "none")
    )
    limits: Mapping[str, int | None] = field(
        default_factory=dict, hash=False, metadata={"rule": rules.limits, "help": LIMITS_HELP}
    )
    gpu_memory_utilization: InitVar[float | None] = None
    """vLLM's name of `device_memory_utilization`."""

    def __post_init__(self, gpu_memory_utilization: float | None) -> None:
        """Take the alias into account, which wins over its option, and check all options. Raise ConfigError."""
        if gpu_memory_utilization is not None:
            object.__setattr__(self, "device_memory_utilization", gpu_memory_utilization)
        self._check_fields()
        self._check_pairs()

    @property
    def num_devices(self) -> int | None:
        """Return the number of devices that was asked for; None if it is chosen at start, as that of one chip."""
        if self.mesh is None:
            return self.tensor_parallel_size
        return math.prod(self.mesh.shape[axis] for axis in self.axis_table.tensor_axes)

    @property
    def axis_table(self) -> AxisTable:
        """Return how logical axes map to the axes of `mesh`, or of the engine's own mesh if it is None."""
        from ..sharding import AxisTable  # Not before: the command line reads its options without JAX.

        return AxisTable.of(self.mesh, self.sharding_rules)

    def check_logical_axes(self, known: Collection[str]) -> None:
        """Raise ConfigError for a rule of a logical axis that neither the engine nor `known` has, a module's own."""
        from ..sharding import LOGICAL_TO_MESH

        for name in self.sharding_rules or ():
            names = tuple(dict.fromkeys((*LOGICAL_TO_MESH, *known)))
            checks.check_name(name, names, "logical axis in sharding_rules", error=ConfigError)

    def _check_pairs(self) -> None:
        """Raise ConfigError if two options contradict each other, or if one of them would be ignored.

        Runs after the check of each single option, so every value has its type and range. Pairs are checked in the
        order below, and the first that does not fit is reported: `_refuse` raises for an option's name, with the
        allowed values and the way out.
        """
        one, leave = "give one of the two", "leave one of them out"  # Advice that ends the messages.
        # An option that is None was not given; 0 is a value.
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            self._refuse("kv_cache_memory_bytes", f"none beside num_blocks, {self.num_blocks}", one)
        if self.num_host_blocks is not None and self.swap_space is not None:
            self._refuse("swap_space", f"none beside num_host_blocks, {self.num_host_blocks}", one)
        for name in ("num_host_blocks", "swap_space"):
            if self.preemption_mode == "swap" and getattr(self, name) == 0:
                self._refuse("preemption_mode", f"auto or recompute while {name} is 0", f"raise {name} or leave it out")
        if self.max_cached_blocks and not self.enable_prefix_caching:
            self._refuse("max_cached_blocks", "0 or none while enable_prefix_caching is false", leave)
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            allowed = "0 while enable_chunked_prefill is false, when each prompt is computed in one step"
            self._refuse("long_prefill_token_threshold", allowed, leave)
        if self.deterministic and self.num_decode_steps not in ("auto", 1):
            self._refuse("num_decode_steps", "auto or 1 while deterministic is true", leave)
        if self.deterministic and not self.enable_chunked_prefill:
            allowed = "true while deterministic is true, when all steps have one size"
            self._refuse("enable_chunked_prefill", allowed, leave)
        # Backends that cannot serve with `deterministic`, each with the reason.
        not_deterministic = {entry.name: entry.not_deterministic for entry in BACKENDS if entry.not_deterministic}
        if self.deterministic and self.attention_backend in not_deterministic:
            names = ", ".join(["auto", *(name for name in BACKEND_NAMES if name not in not_deterministic)])
            why = not_deterministic[self.attention_backend]
            self._refuse("attention_backend", f"{names} while deterministic is true: {why}", leave)
        self._check_axes()
        if self.mesh is not None and self.tensor_parallel_size not in (None, self.num_devices):
            allowed = f"none beside mesh, or {self.num_devices}, the devices of it that serve"
            self._refuse("tensor_parallel_size", allowed, leave)
        if self.mesh is not None and self.device not in ("auto", platform := self.mesh.devices.flat[0].platform):
            self._refuse("device", f"auto beside mesh, or {platform} as its devices are", leave)
        if self.tokenizer is not None and self.skip_tokenizer_init:
            self._refuse("tokenizer", "none while skip_tokenizer_init is true", leave)
        if self.params is not None and self.load_format != "auto":
            self._refuse("load_format", "auto beside params, which are the weights", leave)
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and seqs is not None and tokens < seqs:
            allowed = f"at least max_num_seqs, {seqs}, since every sequence decodes one token a step"
            self._refuse("max_num_batched_tokens", allowed)

    def _check_axes(self) -> None:
        """Raise ConfigError unless the axes for tensors are known in `mesh`, and rules name axes that it has."""
        if self.mesh is None:
            if self.sharding_rules is not None:
                self._refuse("sharding_rules", "none without mesh, whose axes they name", "give both, or leave it out")
            return
        axes, table = self.mesh.axis_names, self.axis_table
        if self.sharding_rules is None and self.mesh.size > 1 and not table.tensor_axes:
            rules = ", ".join(f'"{name}": "{axes[-1]}"' for name in ("heads", "mlp", "vocab"))
            got, way_out = f"axes {dict(self.mesh.shape)}", f"give sharding_rules, such as {{{rules}}}"
            raise refusal("mesh", got, "one axis, or an axis tensor", way_out, error=ConfigError)
        for name in self.sharding_rules or ():
            if unknown := [axis for axis in table.axes_of(name) if axis not in axes]:
                near = checks.nearest(unknown[0], axes)
                allowed, hint = f"axes of mesh: {', '.join(axes)}", f"did you mean {near}?" if near else ""
                raise refusal("sharding_rules", f"{unknown[0]!r} for {name}", allowed, hint, error=ConfigError)
