"""Builds an engine: device → backend → sizes and programs → backend check → weights → components."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from ..checks import refusal, shown
from ..config.engine_config import EngineConfig
from ..core.engine_core import EngineCore
from ..errors import ConfigError
from ..kv_cache.block_manager import BlockManager
from ..models.config.spec import ModelSpec
from ..models.own_model import OwnModel
from ..models.weights.at_load import AT_LOAD
from ..models.weights.coded import are_mostly_floats, coded_weights, codes_note
from ..models.weights.kept_weights import KeptWeights
from ..models.weights.weights import Weights
from ..pallas_kernels.ragged_paged_attention.interface import Backend, CheckGuard
from ..sampling.logit_rules_spec import LogitRulesSpec
from ..sampling.sampling_params import SampleMode
from ..scheduling.preemption import PreemptionMode, PreemptionPolicy, SwapCosts
from ..scheduling.request_queue import POLICIES, QueueLimits
from ..scheduling.scheduler import Scheduler
from ..scheduling.scheduler_config import SchedulerConfig
from ..sharding import outside_mesh
from ..step.compile_threads import compiling_alone, lower_priority
from ..step.jax_settings import trace_settings
from ..step.program_choice import ProgramChoice
from ..step.program_gate import ProgramGate
from ..step.program_keys import ALLOCATE_KEY, TABLES_KEY, is_sampler
from ..step.runner import Runner
from ..step.step_inputs import StepInputBuilder
from ..text.output_processor import OutputProcessor
from .attention.check import find_failure
from .attention.check_process import check_before_opening, check_in_subprocess, check_request
from .attention.choice import FALLBACK, attention_shape, backend_by_name, cannot_serve, choose_attention
from .caches import NO_CACHE, use_compilation_cache, weights_cache
from .devices import log_devices, serving_devices
from .experts import check_experts_can_be_counted, check_has_mesh, experts_note, with_spread_experts
from .open_model import ModelHandle, checkpoint_again
from .prepared_engine import PreparedEngine, free_memory, prepare_engine
from .sizing.device_memory import unreserved_memory_note
from .sizing.sizes import (
    Demand,
    EngineSizes,
    chosen_dtypes,
    requested_max_len,
)
from .warmup import served_prompt_tokens

if TYPE_CHECKING:
    from ..models.weights.live_weights import LiveWeights

logger = logging.getLogger("jpaged")

SWITCH_INTERVAL_S = 0.001
"""Thread switch interval while weights load; CPython's default is 5 ms."""
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
    experts: str
    """How many experts the model has, how they are spread, and what multiplies by them; empty without experts."""
    memory: str
    """What the device's memory is used for."""
    core: EngineCore
    runner: Runner
    rules_spec: LogitRulesSpec
    load_s: float
    """Seconds that reading the weights, or making them, took."""
    live: Callable[[], LiveWeights]
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
    compiles_behind: bool = False,
) -> EngineComponents:
    """Build all parts of an engine: choose its sizes, start compiling its programs, and load its weights.

    `demands` and `modes` are the requests that will come and their sampling modes, if all are known; both are empty
    otherwise. Programs that these requests need first are compiled while the weights are read, and the sizes are no
    larger than these requests need. `progress` is told of long phases. With `keeps_programs`, step programs are kept
    beside JAX's compilation cache, and those that are there are not traced. With `compiles_behind` and `warmup=lazy`,
    the engine is built once the programs of a plain request are there; the others are compiled behind, and no request
    waits for a program that it does not need. Raises ConfigError if the options do not fit the model, the devices or
    their memory, and ModelLoadError if the weights cannot be loaded.
    """
    if config.data_parallel_size > 1:
        way_out = "take AsyncEngine, jpaged serve or jpaged generate, which start a process for each"
        raise refusal("data_parallel_size", config.data_parallel_size, "1 for one engine", way_out, error=ConfigError)
    compiles_behind = compiles_behind and config.warmup == "lazy"
    is_own = isinstance(handle.config, OwnModel)
    # A model of the caller's own comes with the caller's process, whose JAX is left as it is.
    if config.compilation_cache_dir is not None or not is_own:
        use_compilation_cache(config.compilation_cache_dir)
    max_model_len = requested_max_len(config, handle.spec)
    check_experts_can_be_counted(config, handle.config)
    handle = replace(handle, config=with_spread_experts(config, handle.config).without_idle_windows(max_model_len))
    on_chip = handle.config.spec_on_chip(config.num_devices or 1)
    check_before_opening(config, on_chip, _phase(progress, "check"))
    devices = serving_devices(config)
    check_has_mesh(config, devices)
    log_devices(config, handle.config, devices)
    weights_directory = _weights_directory(config, devices, handle)
    prepare = partial(
        prepare_engine,
        config,
        handle,
        devices,
        free=free_memory(devices),
        demands=demands,
        modes=modes,
        keeps_programs=keeps_programs,
        compiles_behind=compiles_behind,
        weights_in=weights_directory,
    )
    prepared, attention = _with_checked_backend(config, handle.config.spec_on_chip(len(devices)), devices, prepare)
    engine, handle, plan, sizes = prepared.engine, prepared.handle, prepared.plan, prepared.sizes
    programs, live, builder = prepared.programs, prepared.live, prepared.builder
    if handle.config.longrope:
        logger.info("rotary embedding: %s; max_model_len is %s", handle.config.longrope, sizes.step.max_model_len)
    if experts := experts_note(programs.weights, engine.backend, devices):
        logger.info("experts: %s", experts)
    for note in sizes.notes:
        logger.warning(note)
    on_each = " on each device" if len(devices) > 1 else ""
    memory = f"{sizes.memory}{on_each}{unreserved_memory_note(devices[0])}"
    logger.info("memory: %s", memory)
    if codes := codes_note(programs.weights.state, prepared.stored_formats):
        is_little = config.quantization in AT_LOAD and are_mostly_floats(programs.weights.state)
        logger.log(logging.WARNING if is_little else logging.INFO, "weights: %s", codes)
    start = time.monotonic()
    try:
        # Reading weights seldom holds the interpreter's lock, so the programs are traced meanwhile.
        plan.start([ALLOCATE_KEY, *prepared.needed_first], progress=_phase(progress, "compile"))
        with _short_switch_interval():
            report = _phase(progress, "load")
            if handle.arrays is not None:
                held = handle.config.statistics if isinstance(handle.config, OwnModel) else {}
                weights = live().weights(live().check(handle.arrays, held), plan.get)
            elif handle.checkpoint is None:
                from ..models.weights.dummy import dummy_weights

                weights = dummy_weights(programs.weights.built, progress=report)
            else:
                weights = _read_weights(programs.weights, handle, prepared.kept_weights, report)
        load_s = time.monotonic() - start
        runner = Runner(
            weights=weights,
            compile_plan=plan,
            buckets=builder.buckets,
            mesh=engine.mesh,
            page_scales=prepared.page_scales,
        )
        gate: ProgramGate | None = None
        if config.warmup == "full":
            plan.wait()
        if compiles_behind:
            jax.block_until_ready((runner.weights.state, runner.state))
            with compiling_alone() as compiler_threads:
                plan.start([TABLES_KEY])  # All others may have been compiled while the weights were read.
                plan.wait()
            lower_priority(compiler_threads)
            first_step, _ = builder.null_prefill(served_prompt_tokens(builder, is_cpu=devices[0].platform == "cpu"))
            runner.rehearse(first_step)
            builder.choice = runner.choice = choice = ProgramChoice(builder.buckets, plan.is_ready)
            limits = {"max_tokens": sizes.step.max_num_batched_tokens, "max_logprobs": config.max_logprobs}
            gate = ProgramGate(plan, choice, **limits)
        preemption = _preemption(config, sizes, builder, runner)
        scheduler = _scheduler(config, sizes, builder, preemption, engine.num_decode_steps, gate)
        outputs = OutputProcessor(handle.tokenizer, eos_token_ids=handle.eos_token_ids, grammars=handle.grammars)
        core = EngineCore(
            scheduler=scheduler,
            builder=builder,
            runner=runner,
            outputs=outputs,
            clock=time.monotonic,
            seed=config.seed,
            gate=gate,
        )
        if compiles_behind and devices[0].platform == "cpu":
            plan.pauses.end_requests()  # The first pause begins now: requests come as soon as they can.
            plan.start_behind(prepared.deferred)
        elif compiles_behind:
            plan.start(prepared.deferred)
        else:
            plan.defer(prepared.deferred)
        return EngineComponents(
            # The engine drops the caller's arrays and the open checkpoint: it has weights of its own now.
            config=config if config.params is None else replace(config, params=None),
            handle=replace(handle, checkpoint=None, arrays=None),
            sizes=sizes,
            device=devices[0],
            mesh=engine.mesh,
            backend=engine.backend,
            attention=attention,
            experts=experts,
            memory=memory,
            core=core,
            runner=runner,
            rules_spec=engine.rules_spec,
            load_s=load_s,
            live=live,
            reload_weights=_reload_weights(config, handle, programs.weights),
        )
    except BaseException:
        plan.close()
        raise


def _weights_directory(config: EngineConfig, devices: Sequence[jax.Device], handle: ModelHandle) -> Path | None:
    """Return the directory in which the weights are kept for later starts; None if they are not kept.

    Those that a single CPU device reads from files can be. Raises ConfigError for others if the caller has named a
    directory for them.
    """
    directory = config.weights_cache_dir
    if devices[0].platform == "cpu" and len(devices) == 1 and handle.weight_files:
        return weights_cache(directory)
    if directory not in (None, NO_CACHE):
        allowed = "a directory where weights are read from files onto one CPU device; leave it out"
        raise refusal("weights_cache_dir", shown(directory), allowed, error=ConfigError)
    return None


def _read_weights(
    abstract: Weights,
    handle: ModelHandle,
    kept: KeptWeights | None,
    progress: Callable[[int, int], None] | None,
) -> Weights:
    """Return the weights of a model's files: those that an earlier start has `kept`, else read from the files.

    The latter are then kept, unless `kept` is None.
    """
    assert handle.checkpoint is not None, "weights that come from files"
    weights = None if kept is None else kept.load(progress)
    if weights is None:
        from ..models.weights.loading import check_tensors, load_weights

        check_tensors(abstract.built, handle.decoder, handle.checkpoint)  # A kept file that is torn was no proof.
        weights = load_weights(abstract.built, handle.decoder, handle.checkpoint, progress=progress)
        if kept is not None:
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
        from ..models.weights.dummy import dummy_weights
        from ..models.weights.loading import check_tensors, load_weights

        checkpoint = checkpoint_again(config, handle)
        if checkpoint is None:
            return dummy_weights(abstract.built)
        check_tensors(abstract.built, handle.decoder, checkpoint)  # The files may have changed.
        return load_weights(abstract.built, handle.decoder, checkpoint)

    return reload


def _with_checked_backend(
    config: EngineConfig,
    on_chip: ModelSpec,
    devices: list[jax.Device],
    prepare: Callable[[Backend], PreparedEngine],
) -> tuple[PreparedEngine, str]:
    """Choose the attention backend, prepare an engine with it, and check the backend on the device.

    Returns the engine that `prepare` has made, and a text that names its backend and the reason for it. The check
    compares the backend's results with what is expected, on a small batch. Sample programs that known requests need
    are compiled meanwhile. If the check fails, `xla` replaces a backend that `auto` chose, the engine is prepared anew,
    and a warning says why. A backend that the user asked for by name raises ConfigError instead. `on_chip` is what one
    device computes of the model.
    """
    device = devices[0]
    _, kv_dtype = chosen_dtypes(config, on_chip, device.platform)
    shape = attention_shape(on_chip, kv_dtype)
    choice = choose_attention(config.attention_backend, shape, devices, deterministic=config.deterministic)
    log = logger.warning if choice.is_replacement or choice.is_unverified else logger.info
    log("attention: %s", choice)
    if config.perf_map and not choice.backend.name_code_for_perf():
        fault = f"got true with the attention backend {choice.backend.name}"
        raise ConfigError(f"perf_map: {fault}, allowed: false, or the backend native on Linux: leave it out")
    prepared = prepare(choice.backend)
    try:
        if config.warmup == "lazy":
            prepared.plan.start(filter(is_sampler, prepared.needed_first))
        failure = _failure_of(config, on_chip, prepared, device)
        if failure is None:
            return prepared, str(choice)
        if config.attention_backend != "auto":
            raise cannot_serve(choice.backend.name, failure)
    except BaseException:
        prepared.plan.close()
        raise
    prepared.plan.close()
    attention = f"{FALLBACK.name}, not {choice.backend.name}: {failure}"
    logger.warning("attention: %s", attention)
    fallback = backend_by_name(FALLBACK.name, shape, devices, deterministic=config.deterministic)
    return prepare(fallback), attention


def _failure_of(config: EngineConfig, on_chip: ModelSpec, prepared: PreparedEngine, device: jax.Device) -> str | None:
    """Return why the engine's backend must not serve on this device, as a clause, or None if it may."""
    backend, step = prepared.engine.backend, prepared.sizes.step
    # A backend that might crash or hang is checked in a subprocess, mostly before this process opened the device.
    if backend.check_guard is CheckGuard.CHILD:
        return check_in_subprocess(check_request(config, on_chip, type(backend), device.platform))
    # Codes that XLA converts are no part of the comparison with the `xla` backend, which reads them the same way.
    coded = coded_weights(prepared.programs.weights.state) if backend.has_own_products else []
    formats = list(dict.fromkeys(code_format for _, parts, _ in coded for code_format, _ in parts))
    return find_failure(backend, on_chip, step.dtype, step.kv_cache_dtype, step.block_size, device, formats)


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


def _scheduler(
    config: EngineConfig,
    sizes: EngineSizes,
    builder: StepInputBuilder,
    preemption: PreemptionPolicy,
    decode_steps: int,
    gate: ProgramGate | None,
) -> Scheduler:
    """Return a scheduler with a block manager for pools of these sizes.

    `decode_steps` is the most tokens that a sequence decodes in one dispatch. The buckets of `builder` are the step
    sizes that have programs, and `preemption` says what happens to requests when pages run out. `gate` keeps requests
    back whose programs are not compiled yet; None admits all.
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
    return Scheduler(blocks, options, clock=time.monotonic, gate=gate)


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
