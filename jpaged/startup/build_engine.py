"""Puts an engine together: device, sizes, scheduler, executables, weights. Whatever can fail early fails first."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .attention_check import check_kernels
from .attention_choice import block_size_of, choose_attention
from .block_manager import BlockManager
from .buckets import Buckets, filled_tokens, make_buckets, one_bucket
from .compile_plan import CompilePlan, Key
from .config import MAX_DECODE_STEPS, EngineConfig
from .core import Core
from .errors import ConfigError
from .logits_processor import LogitsProcessor
from .models.config import ModelConfig
from .models.loading import abstract_weights, check_tensors, load_weights
from .opening import OpenedModel
from .output_processor import OutputProcessor
from .pallas_kernels.cpu_tiles import what_multiplies
from .pallas_kernels.ragged_paged_attention import Backend, KVLayout, LayerPlace, PagedCache
from .preemption import PreemptionMode, PreemptionPolicy, SwapCosts
from .programs import ALLOCATE_KEY, Programs, decode_key, forward_key, sample_key, step_programs
from .request_queue import POLICIES, QueueLimits
from .rule_book import RuleBook
from .runner import Runner
from .sampler import PLAIN, SampleSettings
from .sampling_params import SampleMode, shown
from .scheduler import Scheduler
from .sharding import device_mesh, select_devices
from .sizing import Demand, EngineSizes, StepSizes, chosen_dtypes, free_host_bytes, rules_bytes, size_engine
from .step_inputs import StepInputBuilder
from .user_cache import make_private, user_cache

logger = logging.getLogger("jpaged")

TURN_S = 0.001
"""Python's is five times as long."""
WINDOWS = (None,)
"""Page-table groups: all layers of the models here see all of their context."""
PREFILL_TOKENS = 256
"""Tokens of the step by which the cost of computing anew is measured."""


class Progress(Protocol):
    """What is told of a long phase: `name` of the phase, `done` of `total`."""

    def __call__(self, name: str, done: int, total: int) -> None: ...


@dataclass(frozen=True)
class EngineParts:
    """Everything that an engine is made of, ready to run."""

    config: EngineConfig
    opened: OpenedModel
    sizes: EngineSizes
    device: jax.Device
    backend: Backend
    core: Core
    runner: Runner
    rule_book: RuleBook
    load_seconds: float


def assemble(
    config: EngineConfig,
    opened: OpenedModel,
    *,
    demands: Sequence[Demand] = (),
    modes: Collection[SampleMode] = (),
    progress: Progress | None = None,
) -> EngineParts:
    """Build an engine's parts. ConfigError or ModelLoadError; shapes are checked before anything large is allocated."""
    use_compilation_cache(config.compilation_cache_dir)
    try:
        device = select_devices(config.device)[0]
    except RuntimeError as error:
        raise ConfigError(" ".join(str(error).split())) from error
    mesh, model = device_mesh([device]), opened.config
    _, kv_dtype = chosen_dtypes(config, model, device.platform)
    attention = choose_attention(config.attention_backend, model, device, kv_dtype, deterministic=config.deterministic)
    backend = attention.backend
    logger.info("attention: %s, %s", backend.name, attention.reason)
    if device.platform == "cpu":
        logger.info("native code: %s", what_multiplies())
    settings = SampleSettings(
        config.logits_processors, config.max_logprobs, config.logprobs_mode == "processed_logprobs"
    )
    rule_book = RuleBook(model.vocab_size, config.logits_processors, frozenset(opened.eos_token_ids))
    check_processors(config.logits_processors, model.vocab_size)
    sizes = size_engine(
        config,
        model,
        platform=device.platform,
        free_bytes=_free_bytes(device),
        block_size_of=lambda dtype, num_seqs, max_len: block_size_of(
            backend, model, dtype, config.block_size, num_seqs, max_len
        ),
        page_bytes=lambda block_size, dtype: _layout(backend, model, 1, block_size, dtype).page_bytes,
        weights_bytes=lambda dtype: abstract_weights(model, dtype, mesh).size_bytes,
        step_bytes=lambda step: measured_step_bytes(model, step, mesh, backend, rule_book, settings),
        host_free_bytes=free_host_bytes(),
        demands=demands,
    )
    for note in sizes.notes:
        logger.warning(note)
    logger.info("memory: %s", sizes.memory)
    buckets, builder = step_tools(sizes, backend, device.platform, rule_book)
    check_kernels(backend, model, sizes.dtype, sizes.kv_cache_dtype, sizes.block_size, device)
    check_tensors(abstract_weights(model, sizes.dtype, mesh), model, opened.checkpoint)
    programs = planned_programs(
        model,
        sizes,
        mesh,
        backend,
        buckets,
        builder,
        num_blocks=sizes.num_blocks,
        num_host_blocks=sizes.num_host_blocks,
        settings=settings,
        num_decode_steps=_num_decode_steps(config),
    )
    # Reading weights leaves the interpreter alone most of the time: what is needed first is traced meanwhile.
    plan = CompilePlan(programs.lower)
    first, behind = _warmup_keys(config, programs, buckets, sizes, demands, modes, is_cpu=device.platform == "cpu")
    plan.start([ALLOCATE_KEY, *first], progress=_phase(progress, "compile"))
    start = time.monotonic()
    try:
        with _short_turns():
            weights = load_weights(programs.weights, model, opened.checkpoint, progress=_phase(progress, "load"))
        load_seconds = time.monotonic() - start
        runner = Runner(weights=weights, plan=plan, buckets=buckets, mesh=mesh)
        if config.warmup == "full":
            plan.wait()
        preemption = _preemption(config, sizes, builder, runner)
    except BaseException:
        plan.close()
        raise
    plan.start_later(behind)
    return EngineParts(
        config=config,
        opened=opened,
        sizes=sizes,
        device=device,
        backend=backend,
        core=Core(
            scheduler=_scheduler(config, sizes, buckets, preemption),
            builder=builder,
            runner=runner,
            outputs=OutputProcessor(opened.tokenizer, eos_token_ids=opened.eos_token_ids),
            clock=time.monotonic,
        ),
        runner=runner,
        rule_book=rule_book,
        load_seconds=load_seconds,
    )


def check_processors(processors: Sequence[LogitsProcessor], vocab_size: int) -> None:
    """ConfigError for one that JAX cannot trace, or that makes something else of a row of logits."""
    row, argument = jax.ShapeDtypeStruct((vocab_size,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    for processor in processors:
        try:
            made = jax.eval_shape(processor.apply, row, *[argument] * len(processor.arguments))
        except Exception as error:  # It is anybody's code.
            raise ConfigError(
                f"logits_processors: {shown(processor.name)} cannot be traced by JAX: {type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}; use jax.numpy alone"
            ) from error
        if not isinstance(made, jax.ShapeDtypeStruct) or (made.shape, made.dtype) != (row.shape, row.dtype):
            raise ConfigError(
                f"logits_processors: {shown(processor.name)} makes {shown(made)} of a row of logits, allowed: float32 "
                f"of shape ({vocab_size},), as it was given"
            )


@contextmanager
def _short_turns() -> Iterator[None]:
    """Threads hand the interpreter on sooner: whoever calls numpy gives it up each time and waits a turn to get it."""
    before = sys.getswitchinterval()
    if before <= TURN_S:  # Also if another engine is being put together: that one will set it back.
        yield
        return
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def use_compilation_cache(directory: str | None) -> None:
    """Keep executables across processes, readable by their owner only. A cache that cannot be written is a warning."""
    if directory is None and jax.config.values.get("jax_compilation_cache_dir"):
        return  # The user has chosen one.
    try:
        path = Path(directory) if directory else user_cache("xla")
        make_private(path)
        if not os.access(path, os.W_OK):
            raise PermissionError(f"{path} is not writable")
    except (OSError, RuntimeError) as error:
        logger.warning("compilation cache off, each start compiles anew: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _layout(backend: Backend, model: ModelConfig, num_pages: int, block_size: int, dtype: str) -> KVLayout:
    try:
        return backend.layout(
            num_layers=model.num_layers,
            num_pages=num_pages,
            page_size=block_size,
            num_kv_heads=model.num_kv_heads,
            head_size=model.head_size,
            dtype=dtype,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def step_tools(
    sizes: EngineSizes | StepSizes, backend: Backend, platform: str, rule_book: RuleBook
) -> tuple[Buckets, StepInputBuilder]:
    """The padded sizes that steps come in, and what builds them."""
    if sizes.is_deterministic:
        buckets = one_bucket(sizes.max_num_seqs)
    else:
        buckets = make_buckets(
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_num_seqs=sizes.max_num_seqs,
            platform=platform,
        )
    builder = StepInputBuilder(
        buckets=buckets,
        backend=backend,
        block_size=sizes.block_size,
        num_groups=len(WINDOWS),
        max_num_seqs=sizes.max_num_seqs,
        max_pages=-(-sizes.max_model_len // sizes.block_size),
        rule_book=rule_book,
        one_token_rows=sizes.is_deterministic,
    )
    return buckets, builder


def planned_programs(
    model: ModelConfig,
    sizes: EngineSizes | StepSizes,
    mesh: Mesh,
    backend: Backend,
    buckets: Buckets,
    builder: StepInputBuilder,
    *,
    num_blocks: int,
    num_host_blocks: int = 0,
    settings: SampleSettings = PLAIN,
    num_decode_steps: int = 1,
) -> Programs:
    """Every program of an engine of these sizes. Nothing is allocated, and no device asked: the mesh may be of a
    topology that is not here."""
    layout = _layout(backend, model, num_blocks, sizes.block_size, sizes.kv_cache_dtype)
    places = tuple(LayerPlace(group=0, index=layer) for layer in range(model.num_layers))
    return step_programs(
        weights=abstract_weights(model, sizes.dtype, mesh),
        hidden_size=model.hidden_size,
        mesh=mesh,
        cache=PagedCache((), layout, places, backend, mesh=mesh if mesh.size > 1 else None),
        buckets=buckets,
        builder=builder,
        max_num_seqs=sizes.max_num_seqs,
        max_pages=builder.max_pages,
        settings=settings,
        num_host_blocks=num_host_blocks,
        num_decode_steps=num_decode_steps,
    )


def measured_step_bytes(
    model: ModelConfig,
    sizes: StepSizes,
    mesh: Mesh,
    backend: Backend,
    rule_book: RuleBook,
    settings: SampleSettings,
) -> int:
    """What the largest step, sampling and decoding loop take beside weights and cache, by what their compiler says.

    Compiled over a cache of one page: nothing that a step makes for itself grows with the pages.
    """
    buckets, builder = step_tools(sizes, backend, mesh.devices.flat[0].platform, rule_book)
    programs = planned_programs(
        model, sizes, mesh, backend, buckets, builder, num_blocks=2, num_decode_steps=2, settings=settings
    )
    most_rows = buckets.max_samples
    keys = [
        forward_key(buckets, buckets.num_tokens[-1]),
        sample_key(buckets, most_rows, SampleMode.EVERYTHING),
        decode_key(buckets, most_rows),
    ]
    with ThreadPoolExecutor(len(keys)) as compilers:
        most = max(compilers.map(lambda key: own_bytes(programs.lower[key]().compile()), keys))
    hidden = programs.state.hidden
    return most + hidden.size * hidden.dtype.itemsize + rules_bytes(model.vocab_size, sizes.max_num_seqs)


def own_bytes(compiled: jax.stages.Compiled) -> int:
    """Memory that an executable takes beside its arguments: for itself, and for outputs of their own."""
    memory = compiled.memory_analysis()
    assert memory is not None, "every backend here says what memory a program takes"
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)


def _num_decode_steps(config: EngineConfig) -> int:
    if config.deterministic:
        return 1
    return MAX_DECODE_STEPS if config.num_decode_steps == "auto" else int(config.num_decode_steps)


def _scheduler(config: EngineConfig, sizes: EngineSizes, buckets: Buckets, preemption: PreemptionPolicy) -> Scheduler:
    blocks = BlockManager(
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        windows=WINDOWS,
        num_host_blocks=sizes.num_host_blocks,
        max_cached_blocks=config.max_cached_blocks,
        max_chunk=sizes.max_num_batched_tokens,
        keep_evicted=_is_keeping_worth_while(preemption.costs, sizes),
    )
    policy = config.scheduling_policy
    return Scheduler(
        blocks,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        watermark=config.watermark,
        clock=time.monotonic,
        policy=POLICIES[policy] if isinstance(policy, str) else policy,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        delay_factor=config.scheduling_delay_factor,
        preemption=preemption,
        limits=QueueLimits(**config.limits),
        max_decode_steps=_num_decode_steps(config),
        token_buckets=buckets.num_tokens,
        # Of each come all logprobs of the vocabulary then.
        max_scored=buckets.max_samples if config.max_logprobs < 0 else None,
    )


def _preemption(
    config: EngineConfig, sizes: EngineSizes, builder: StepInputBuilder, runner: Runner
) -> PreemptionPolicy:
    """How requests give way; where that is to be chosen by cost, what both ways cost on this machine."""
    mode = PreemptionMode(config.preemption_mode)
    if mode is not PreemptionMode.AUTO or not sizes.num_host_blocks:
        return PreemptionPolicy(mode)
    num_tokens = builder.buckets.tokens_for(min(PREFILL_TOKENS, sizes.max_num_batched_tokens))
    costs = SwapCosts(
        page_bytes=runner.state.cache.layout.page_bytes,
        swap_bytes_per_s=runner.measure_swap(),
        prefill_s_per_token=runner.measure_prefill(builder.layouts[num_tokens]),
    )
    logger.info("%s", costs)
    return PreemptionPolicy(mode, costs)


def _is_keeping_worth_while(costs: SwapCosts | None, sizes: EngineSizes) -> bool:
    """Whether a page's way to the host and back takes less than computing it anew. Where that is not known, yes."""
    return costs is None or costs.swap_s(1) < costs.recompute_s(sizes.block_size)


def _warmup_keys(
    config: EngineConfig,
    programs: Programs,
    buckets: Buckets,
    sizes: EngineSizes,
    demands: Sequence[Demand],
    modes: Collection[SampleMode],
    *,
    is_cpu: bool,
) -> tuple[list[Key], list[Key]]:
    """Executables that are compiled while the weights are read, and those that are compiled behind them.

    On a CPU nothing is compiled on the mere chance that it is needed: the compiler would take the cores that compute.
    """
    everything = list(programs.lower)
    if config.warmup == "full":
        return everything, []
    if config.warmup == "off":
        return [], []
    if not demands:
        return [], [] if is_cpu else everything
    num_seqs = min(sum(demand.num_samples for demand in demands), sizes.max_num_seqs)
    samplers = [sample_key(buckets, num_seqs, buckets.mode_for(mode)) for mode in modes]
    decodes = [decode_key(buckets, num_seqs), forward_key(buckets, num_seqs)]
    behind = [key for key in decodes if key in programs.lower]
    return [*_prompt_keys(config, buckets, sizes, demands), *samplers], behind if is_cpu else [*behind, *everything]


def _prompt_keys(
    config: EngineConfig, buckets: Buckets, sizes: EngineSizes, demands: Sequence[Demand]
) -> dict[Key, None]:
    """Of the steps that a prompt's first token waits for, in order; of several prompts, of the first step."""
    left = sum(demand.prompt_len for demand in demands)
    most = sizes.max_num_batched_tokens
    if len(demands) == 1 and config.enable_chunked_prefill:
        most = min(most, config.long_prefill_token_threshold or most)
    keys: dict[Key, None] = {}
    while left and (len(demands) == 1 or not keys):
        num_tokens = min(left, most)
        if config.enable_chunked_prefill:
            num_tokens = filled_tokens(buckets.num_tokens, num_tokens)
        keys[forward_key(buckets, num_tokens)] = None
        left -= num_tokens
    return keys


def _free_bytes(device: jax.Device) -> int:
    stats = device.memory_stats() if device.platform != "cpu" else None
    return free_host_bytes() if stats is None else stats["bytes_limit"] - stats["bytes_in_use"]


def _phase(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(name, done, total)
