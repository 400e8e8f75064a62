"""Builds an engine: device → backend → sizes → backend check → programs → weights → components.

What can fail cheaply fails first: options, shapes and the free memory are checked before anything large is allocated.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..checks import one_line, refusal, shown
from ..config.engine_config import EngineConfig
from ..core.engine_core import EngineCore
from ..errors import ConfigError
from ..kv_cache.block_manager import BlockManager
from ..models.own_model import OwnModel
from ..models.weights.dummy import dummy_weights
from ..models.weights.kept_weights import KeptWeights
from ..models.weights.live_weights import LiveWeights
from ..models.weights.loading import Weights, check_tensors, load_weights
from ..pallas_kernels.ragged_paged_attention.interface import Backend, CheckGuard
from ..sampling.logit_rules_spec import LogitRulesSpec
from ..sampling.logits_processor import LogitsProcessor
from ..sampling.sampler import SampleSettings
from ..sampling.sampling_params import SampleMode
from ..scheduling.preemption import PreemptionMode, PreemptionPolicy, SwapCosts
from ..scheduling.request_queue import POLICIES, QueueLimits
from ..scheduling.scheduler import Scheduler
from ..scheduling.scheduler_config import SchedulerConfig
from ..sharding import device_mesh, outside_mesh
from ..step.compile_plan import CompilePlan
from ..step.jax_settings import trace_settings
from ..step.programs import ALLOCATE_KEY
from ..step.runner import Runner
from ..step.step_inputs import StepInputBuilder
from ..text.output_processor import OutputProcessor
from .abstract_engine import AbstractEngine, StepMemoryCheck
from .attention.check import find_failure
from .attention.check_process import check_before_opening, check_in_subprocess, check_request
from .attention.choice import FALLBACK, attention_shape, backend_by_name, cannot_serve, choose_attention
from .caches import NO_CACHE, compilation_cache, use_compilation_cache, weights_cache
from .devices import log_devices, serving_devices
from .open_model import ModelHandle, checkpoint_again
from .sizing.device_memory import unreserved_memory_note
from .sizing.host_memory import free_host_bytes, num_host_cores
from .sizing.sizes import (
    Demand,
    EngineSizes,
    FreeMemory,
    chosen_dtypes,
    num_decode_steps,
    requested_max_len,
    size_engine,
)
from .warmup import warmup_keys

logger = logging.getLogger("jpaged")

SWITCH_INTERVAL_S = 0.001
"""Thread switch interval while weights load; CPython's default is 5 ms."""
CPU_COMPILERS, MAX_COMPILERS = 2, 16
"""Programs that are compiled at the same time on a CPU, and at most elsewhere."""
COMPILER_BYTES = 1 << 30
"""Bytes of the host's memory that compiling a program may take."""
PREFILL_TOKENS = 256
"""Tokens of the step that measures what recomputing costs."""

Progress = Callable[[str, int, int], None]
"""Receives the name of a long phase of the start, and how many of how many of its parts are done."""


@dataclass(frozen=True)
class EngineComponents:
    """The parts of an engine, ready to run."""

    config: EngineConfig
    handle: ModelHandle
    sizes: EngineSizes
    device: jax.Device
    """The first device of the mesh."""
    mesh: Mesh
    backend: Backend
    attention: str
    """The attention backend, the machine's features that it uses, and why it was chosen."""
    memory: str
    """What the device's memory is used for."""
    core: EngineCore
    runner: Runner
    rules_spec: LogitRulesSpec
    load_s: float
    """Seconds that reading the weights, or making them, took."""
    live: LiveWeights
    """What a trainer's arrays become."""
    reload_weights: Callable[[], Weights] | None
    """Reads the weights again; None if they came from no file."""


@outside_mesh()
@trace_settings()
def build_engine(
    config: EngineConfig,
    handle: ModelHandle,
    *,
    demands: Sequence[Demand] = (),
    modes: Collection[SampleMode] = (),
    progress: Progress | None = None,
    keeps_programs: bool = False,
) -> EngineComponents:
    """Build all parts of an engine: choose its sizes, start compiling its programs, and load its weights.

    `demands` and `modes` are the requests that will come and their sampling modes, if all are known; both are empty
    otherwise. Programs that these requests need first are compiled while the weights are read, and the sizes are no
    larger than these requests need. `progress` is told of long phases. With `keeps_programs`, step programs are kept
    beside JAX's compilation cache, and those that are there are not traced. Raises ConfigError if the options do not
    fit the model, the devices or their memory, and ModelLoadError if the weights cannot be loaded.
    """
    is_own = isinstance(handle.config, OwnModel)
    # A model of the caller's own comes with the caller's process, whose JAX is left as it is.
    if config.compilation_cache_dir is not None or not is_own:
        use_compilation_cache(config.compilation_cache_dir)
    max_model_len = requested_max_len(config, handle.spec)
    handle = replace(handle, config=handle.config.without_idle_windows(max_model_len))
    on_chip = handle.config.spec_on_chip(config.num_devices or 1)
    check_before_opening(config, on_chip, _phase(progress, "check"))
    devices = serving_devices(config)
    device = devices[0]
    # Virtual devices of a CPU share its memory.
    num_sharing = len(devices) if device.platform == "cpu" else 1
    free = FreeMemory(device.platform, min(map(_free_bytes, devices)) // num_sharing, free_host_bytes())
    engine, sizes, attention = _checked_engine(config, handle, devices, free, demands)
    # The rotary embeddings depend on the longest context, which `size_engine` may have lowered.
    handle = replace(handle, config=handle.config.for_context(sizes.step.max_model_len))
    engine = replace(engine, model=handle.config)
    log_devices(config, handle.config, devices)
    if handle.config.longrope:
        logger.info("rotary embedding: %s; max_model_len is %s", handle.config.longrope, sizes.step.max_model_len)
    for note in sizes.notes:
        logger.warning(note)
    on_each = " on each device" if len(devices) > 1 else ""
    memory = f"{sizes.memory}{on_each}{unreserved_memory_note(device)}"
    logger.info("memory: %s", memory)
    step = sizes.step
    if handle.checkpoint is not None:
        check_tensors(engine.weights(step.dtype), handle.decoder, handle.checkpoint)
    handle.check_weight_files()
    weights_directory = _weights_directory(config, engine, handle)
    builder = engine.builder(step)
    pools = {"num_blocks": sizes.num_blocks, "num_host_blocks": sizes.num_host_blocks}
    programs = engine.programs(builder, **pools, kept_in=compilation_cache() if keeps_programs else None)
    live = LiveWeights(programs.weights, engine.mesh)
    plan = CompilePlan(
        programs.lower,
        occasional={**live.programs(), **programs.lower_scores, **programs.lower_masked},
        num_compilers=_num_compilers(device.platform),
        on_compiled=StepMemoryCheck(sizes.memory.program_bytes),
    )
    needed_first, deferred = warmup_keys(config, programs, builder, demands, modes, is_cpu=free.is_cpu)
    # Reading weights seldom holds the interpreter's lock, so the programs are traced meanwhile.
    plan.start([ALLOCATE_KEY, *needed_first], progress=_phase(progress, "compile"))
    start = time.monotonic()
    try:
        with _short_switch_interval():
            report = _phase(progress, "load")
            if handle.arrays is not None:
                held = handle.config.statistics if isinstance(handle.config, OwnModel) else {}
                weights = live.weights(live.check(handle.arrays, held), plan.get)
            elif handle.checkpoint is None:
                weights = dummy_weights(programs.weights, progress=report)
            else:
                weights = _read_weights(engine, programs.weights, handle, weights_directory, report)
        load_s = time.monotonic() - start
        runner = Runner(weights=weights, compile_plan=plan, buckets=builder.buckets, mesh=engine.mesh)
        if config.warmup == "full":
            plan.wait()
        preemption = _preemption(config, sizes, builder, runner)
        scheduler = _scheduler(config, sizes, builder, preemption, engine.num_decode_steps)
        outputs = OutputProcessor(handle.tokenizer, eos_token_ids=handle.eos_token_ids, grammars=handle.grammars)
        core = EngineCore(
            scheduler=scheduler, builder=builder, runner=runner, outputs=outputs, clock=time.monotonic, seed=config.seed
        )
    except BaseException:
        plan.close()
        raise
    plan.defer(deferred)
    return EngineComponents(
        # The engine drops the caller's arrays and the open checkpoint: it has weights of its own now.
        config=config if config.params is None else replace(config, params=None),
        handle=replace(handle, checkpoint=None, arrays=None),
        sizes=sizes,
        device=device,
        mesh=engine.mesh,
        backend=engine.backend,
        attention=attention,
        memory=memory,
        core=core,
        runner=runner,
        rules_spec=engine.rules_spec,
        load_s=load_s,
        live=live,
        reload_weights=_reload_weights(config, handle, programs.weights),
    )


def _weights_directory(config: EngineConfig, engine: AbstractEngine, handle: ModelHandle) -> Path | None:
    """Return the directory in which the weights are kept for later starts; None if they are not kept.

    Those that a single CPU device reads from files can be. Raises ConfigError for others if the caller has named a
    directory for them.
    """
    directory = config.weights_cache_dir
    if engine.platform == "cpu" and engine.num_chips == 1 and handle.weight_files:
        return weights_cache(directory)
    if directory not in (None, NO_CACHE):
        allowed = "a directory where weights are read from files onto one CPU device; leave it out"
        raise refusal("weights_cache_dir", shown(directory), allowed, error=ConfigError)
    return None


def _read_weights(
    engine: AbstractEngine,
    abstract: Weights,
    handle: ModelHandle,
    directory: Path | None,
    progress: Callable[[int, int], None] | None,
) -> Weights:
    """Return the weights of a model's files: those that an earlier start kept in `directory`, else read from the files.

    The latter are then kept, unless `directory` is None.
    """
    assert handle.checkpoint is not None, "weights that come from files"
    load = partial(load_weights, abstract, handle.decoder, handle.checkpoint, progress=progress)
    if directory is None:
        return load()
    hardware = engine.backend.hardware(engine.mesh.devices.flat[0])
    identity = repr((handle.config, handle.decoder.source, engine.backend, hardware))
    kept = KeptWeights(directory, abstract, handle.weight_files, identity)
    weights = kept.load(progress)
    if weights is None:
        weights = load()
        kept.write(weights)
    return replace(weights, config=handle.decoder)


def _reload_weights(config: EngineConfig, handle: ModelHandle, abstract: Weights) -> Callable[[], Weights] | None:
    """Return a function that makes the engine's weights anew, or None if they came from the caller's arrays.

    The function reads the model's files again, or makes the same random weights with `load_format` dummy. It raises
    ModelLoadError if the files no longer fit `abstract`, which has the shapes and the placement of the weights.
    """
    if config.params is not None or handle.arrays is not None:
        return None
    handle = replace(handle, checkpoint=None)  # Neither the checkpoint nor its files stay open.

    def reload() -> Weights:
        checkpoint = checkpoint_again(config, handle)
        if checkpoint is None:
            return dummy_weights(abstract)
        check_tensors(abstract, handle.decoder, checkpoint)  # The files may have changed.
        return load_weights(abstract, handle.decoder, checkpoint)

    return reload


def _checked_engine(
    config: EngineConfig, handle: ModelHandle, devices: list[jax.Device], free: FreeMemory, demands: Sequence[Demand]
) -> tuple[AbstractEngine, EngineSizes, str]:
    """Choose the attention backend and the engine's sizes, and check the backend on the device.

    Returns the engine as abstract shapes, its sizes, and a text that names the backend and the reason for it. The check
    compares the backend's results with those of `xla` on a small batch. If the check fails, `xla` replaces a backend
    that `auto` chose, the sizes are computed anew, and a warning says why. A backend that the user asked for by name
    raises ConfigError instead. `free` is the memory before anything is allocated; `demands` are the known requests.
    """
    # `model` has the heads and activations of one device, as all sizes here are counted per device.
    device, model = devices[0], handle.config.spec_on_chip(len(devices))
    processors = config.logits_processors
    check_processors(processors, model.vocab_size)
    _, kv_dtype = chosen_dtypes(config, model, device.platform)
    shape = attention_shape(model, kv_dtype)
    rules_spec = LogitRulesSpec(model.vocab_size, processors, frozenset(handle.eos_token_ids))
    settings = SampleSettings(processors, config.max_logprobs, config.logprobs_mode)

    decode_steps = num_decode_steps(config, device.platform)

    def sized_engine(backend: Backend) -> tuple[AbstractEngine, EngineSizes]:
        engine = AbstractEngine(handle.config, device_mesh(devices), backend, rules_spec, settings, decode_steps)
        return engine, size_engine(config, model, engine, free, demands)

    choice = choose_attention(config.attention_backend, shape, devices, deterministic=config.deterministic)
    log = logger.warning if choice.is_replacement or choice.is_unverified else logger.info
    log("attention: %s", choice)
    if config.perf_map and not choice.backend.name_code_for_perf():
        fault = f"got true with the attention backend {choice.backend.name}"
        raise ConfigError(f"perf_map: {fault}, allowed: false, or the backend native on Linux: leave it out")
    engine, sizes = sized_engine(choice.backend)
    step = sizes.step
    # A backend that might crash or hang is checked in a subprocess, mostly before this process opened the device.
    if engine.backend.check_guard is CheckGuard.CHILD:
        failure = check_in_subprocess(check_request(config, model, type(engine.backend), device.platform))
    else:
        failure = find_failure(engine.backend, model, step.dtype, step.kv_cache_dtype, step.block_size, device)
    if failure is None:
        return engine, sizes, str(choice)
    if config.attention_backend != "auto":
        raise cannot_serve(engine.backend.name, failure)
    attention = f"{FALLBACK.name}, not {engine.backend.name}: {failure}"
    logger.warning("attention: %s", attention)
    return *sized_engine(backend_by_name(FALLBACK.name, shape, devices, deterministic=config.deterministic)), attention


def check_processors(processors: Sequence[LogitsProcessor], vocab_size: int) -> None:
    """Raise ConfigError for a processor that JAX cannot trace, or that changes the shape or dtype of the logits.

    Each processor is traced for one row of logits, float32 [vocab_size], and a float32 scalar for each of its
    arguments. Nothing is computed.
    """
    row, argument = jax.ShapeDtypeStruct((vocab_size,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    for processor in processors:
        try:
            result = jax.eval_shape(processor.apply, row, *[argument] * len(processor.arguments))
        except Exception as error:  # A user's code may raise anything.
            fault = f"{shown(processor.name)} cannot be traced by JAX: {type(error).__name__}: {one_line(error)}"
            raise ConfigError(f"logits_processors: {fault}; use jax.numpy alone") from error
        if not isinstance(result, jax.ShapeDtypeStruct) or (result.shape, result.dtype) != (row.shape, row.dtype):
            fault = f"{shown(processor.name)} returns {shown(result)} for a row of logits"
            allowed = f"float32 of shape ({vocab_size},), the type of its argument"
            raise ConfigError(f"logits_processors: {fault}, allowed: {allowed}")


def _free_bytes(device: jax.Device) -> int:
    """Return the bytes that are free on the device; on a CPU, those of the host."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return free_host_bytes() if stats is None else stats["bytes_limit"] - stats["bytes_in_use"]


def _phase(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    """Return a callback that reports to `progress` as the phase `name`."""
    return None if progress is None else lambda done, total: progress(name, done, total)


@contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Let CPython switch threads every SWITCH_INTERVAL_S within this context, then restore the interval from before.

    The thread that loads weights releases the interpreter's lock in each numpy call. It then waits up to one interval
    for a thread that traces programs to give the lock back.
    """
    before = sys.getswitchinterval()
    if before <= SWITCH_INTERVAL_S:  # Perhaps set by another engine that is being built now: that one restores it.
        yield
        return
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _num_compilers(platform: str) -> int:
    """Return how many programs are compiled at once: CPU_COMPILERS on a CPU, whose cores also compute the steps.

    Elsewhere as many as the host has cores and free COMPILER_BYTES for, but from CPU_COMPILERS to MAX_COMPILERS.
    """
    if platform == "cpu":
        return CPU_COMPILERS
    num_fitting = free_host_bytes() // COMPILER_BYTES
    return min(max(min(num_host_cores(), num_fitting), CPU_COMPILERS), MAX_COMPILERS)


def _scheduler(
    config: EngineConfig, sizes: EngineSizes, builder: StepInputBuilder, preemption: PreemptionPolicy, decode_steps: int
) -> Scheduler:
    """Return a scheduler with a block manager for pools of these sizes.

    `decode_steps` is the most tokens that a sequence decodes in one dispatch. The buckets of `builder` are the step
    sizes that have programs, and `preemption` says what happens to requests when pages run out.
    """
    step, arithmetic, buckets, costs = sizes.step, sizes.arithmetic, builder.buckets, preemption.costs
    blocks = BlockManager(
        num_blocks=sizes.num_blocks,
        arithmetic=arithmetic,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_blocks=sizes.num_host_blocks,
        max_cached_blocks=config.max_cached_blocks,
        # Pages that the prefix cache evicts are kept on the host if moving one page per group out and in is faster
        # than computing the tokens of a page anew. They are also kept if no costs were measured.
        keep_evicted=costs is None or costs.swap_s(arithmetic.num_groups) < costs.recompute_s(step.block_size),
    )
    policy = config.scheduling_policy
    options = SchedulerConfig(
        max_num_seqs=step.max_num_seqs,
        max_num_batched_tokens=step.max_num_batched_tokens,
        watermark=config.watermark,
        policy=POLICIES[policy] if isinstance(policy, str) else policy,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        delay_factor=config.scheduling_delay_factor,
        preemption=preemption,
        limits=QueueLimits(config.limits["waiting_requests"], config.limits["waiting_tokens"]),
        max_decode_steps=decode_steps,
        several_modes=frozenset(mode for mode in SampleMode if buckets.decode_mode_for(mode) is not None),
        token_buckets=buckets.num_tokens,
        # With unlimited logprobs each scored token brings a row of the whole vocabulary: one sampler call per step.
        max_scored=buckets.max_samples if config.max_logprobs < 0 else None,
    )
    return Scheduler(blocks, options, clock=time.monotonic)


def _preemption(
    config: EngineConfig, sizes: EngineSizes, builder: StepInputBuilder, runner: Runner
) -> PreemptionPolicy:
    """Return how requests give up their pages when pages run out: by swapping to the host or by recomputing.

    If the mode is `auto` and there is a host pool, `runner` first measures both costs on the device: the speed of page
    transfers, and the seconds per token of a prefill step of at most PREFILL_TOKENS tokens. Else there are no costs.
    """
    mode = PreemptionMode(config.preemption_mode)
    if mode is not PreemptionMode.AUTO or not sizes.num_host_blocks:
        return PreemptionPolicy(mode)
    bucket = builder.buckets.tokens_for(min(PREFILL_TOKENS, sizes.step.max_num_batched_tokens))
    prefill, num_tokens = builder.null_prefill(bucket)  # A step that reads and writes the null page alone.
    costs = SwapCosts(
        page_bytes=runner.page_bytes,
        swap_bytes_per_s=runner.measure_swap(),
        prefill_s_per_token=runner.measure_forward(prefill) / num_tokens,
    )
    logger.info("%s", costs)
    return PreemptionPolicy(mode, costs)
