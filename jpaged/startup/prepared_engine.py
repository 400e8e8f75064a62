"""An engine that lacks only its weights: for one attention backend, its sizes, its programs and what compiles them.

What can fail cheaply fails first: options, shapes and the free memory are checked before anything large is allocated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ..checks import one_line, refusal, shown
from ..config.engine_config import EngineConfig
from ..errors import ConfigError
from ..models.config.decoder import DecoderConfig
from ..models.opening.gguf_checkpoint import GGUFCheckpoint
from ..models.weights.at_load import AT_LOAD, formats_at_load, transposed_matrices
from ..models.weights.code_arrays import has_group_scales
from ..models.weights.coded import StoredFormats, coded_weights, reasons_for_floats, stored_formats
from ..models.weights.kept_weights import KeptWeights
from ..pallas_kernels.layer_ops import XLA_OPS
from ..pallas_kernels.ragged_paged_attention.interface import Backend
from ..sampling.logit_rules_spec import LogitRulesSpec
from ..sampling.logits_processor import LogitsProcessor
from ..sampling.sampler import SampleSettings
from ..sampling.sampling_params import SampleMode
from ..sharding import device_mesh
from ..step.compile_plan import CompilePlan, Key
from ..step.kv_measure import MEASURE_KEY, PageScales
from ..step.programs import Programs
from ..step.step_inputs import StepInputBuilder
from .abstract_engine import AbstractEngine, StepMemoryCheck
from .caches import compilation_cache
from .open_model import ModelHandle
from .sizing.host_memory import free_host_bytes, num_host_cores
from .sizing.sizes import Demand, EngineSizes, FreeMemory, chosen_dtypes, num_decode_steps, size_engine
from .sizing.step_memory import activation_bytes
from .warmup import served_keys, warmup_keys

if TYPE_CHECKING:
    from ..models.weights.live_weights import LiveWeights

logger = logging.getLogger("jpaged")

CPU_COMPILERS, MAX_COMPILERS = 2, 16
"""Programs that are compiled at the same time on a CPU, and at most elsewhere."""
COMPILER_BYTES = 1 << 30
"""Bytes of the host's memory that compiling a program may take."""


@dataclass(frozen=True)
class PreparedEngine:
    """An engine without weights. `plan.close` frees what it holds."""

    engine: AbstractEngine
    handle: ModelHandle
    """The model, with its rotary embedding for the engine's context."""
    sizes: EngineSizes
    builder: StepInputBuilder
    programs: Programs
    live: Callable[[], LiveWeights]
    """What makes weights of a trainer's arrays, made at the first call."""
    kept_weights: KeptWeights | None
    """The file of the weights for later starts; None if they are not kept."""
    page_scales: PageScales | None
    """Makes the scales of pages of one byte a number; None for other pages."""
    plan: CompilePlan
    needed_first: list[Key]
    deferred: list[Key]
    """Programs to compile while the weights are read and later, as `warmup_keys` or `served_keys` returns them."""
    stored_formats: StoredFormats
    """The formats of the checkpoint's tensors that are codes, whether they stay so or not."""


def prepare_engine(
    config: EngineConfig,
    handle: ModelHandle,
    devices: Sequence[jax.Device],
    backend: Backend,
    *,
    free: FreeMemory,
    demands: Sequence[Demand],
    modes: Collection[SampleMode],
    keeps_programs: bool,
    compiles_behind: bool,
    weights_in: Path | None,
) -> PreparedEngine:
    """Return an engine with this attention backend; nothing is compiled or allocated yet.

    `free` is the memory before anything is allocated, and `weights_in` the directory of kept weights, None if they are
    not kept; the other arguments are those of `build_engine`. Raises
    ConfigError if the options do not fit the model, the devices or their free memory, and ModelLoadError if the model's
    files do not have its tensors.
    """
    # `on_chip` has the heads and activations of one device, as all sizes here are counted per device.
    device, on_chip = devices[0], handle.config.spec_on_chip(len(devices))
    processors = config.logits_processors
    check_processors(processors, on_chip.vocab_size)
    mesh, formats = device_mesh(list(devices)), stored_formats(handle.checkpoint)
    if config.load_format == "dummy" and config.quantization in AT_LOAD and isinstance(handle.config, DecoderConfig):
        from ..models.weights.loading import tensor_shapes

        shapes = tensor_shapes(handle.decoder, mesh)
        formats = formats_at_load(config.quantization, shapes, transposed_matrices(handle.decoder, shapes))
    elif config.quantization not in AT_LOAD and formats and isinstance(handle.config, DecoderConfig):
        # Codes that are stored by rows of W, and not of Wᵀ, become floats.
        transposed = transposed_matrices(handle.decoder, [name for name, _ in formats])
        formats = tuple((name, None if name in transposed else code_format) for name, code_format in formats)
    engine = AbstractEngine(
        handle.config,
        mesh,
        backend,
        LogitRulesSpec(on_chip.vocab_size, processors, frozenset(handle.eos_token_ids)),
        SampleSettings(processors, config.max_logprobs, config.logprobs_mode),
        num_decode_steps(config, device.platform),
        () if config.quantization == "none" else formats,
        counts_expert_tokens=config.count_expert_tokens,
        shapes_in=compilation_cache() if keeps_programs else None,
    )
    dtype, _ = chosen_dtypes(config, on_chip, device.platform)
    if device.platform == "gpu" and engine.num_decode_steps > 1 and has_group_scales(engine.weights(dtype).state):
        if config.num_decode_steps == "auto":
            config, engine = replace(config, num_decode_steps=1), replace(engine, num_decode_steps=1)
        steps = engine.num_decode_steps
        reason = "a loop of steps would convert each matrix with scales of groups in front of its product"
        logger.info("num_decode_steps: %s; on a GPU %s", steps, reason)
    if isinstance(handle.checkpoint, GGUFCheckpoint) and config.quantization != "none":
        kept = {
            code_format.name for _, parts, _ in coded_weights(engine.weights(dtype).state) for code_format, _ in parts
        }
        # Said before memory is planned, which may be too small for the floats.
        if note := handle.checkpoint.floats_note(dtype, kept):
            logger.warning("weights: %s", note)
    itemsize = activation_bytes(dtype, on_cpu=device.platform == "cpu")
    # Layer operations, which import much, say what experts take, and nothing of other layers.
    has_experts = isinstance(handle.config, DecoderConfig) and handle.config.experts is not None
    on_chip = handle.config.spec_on_chip(len(devices), backend.layer_ops if has_experts else XLA_OPS, itemsize)
    sizes = size_engine(config, on_chip, engine, free, demands)
    # The rotary embeddings depend on the longest context, which `size_engine` may have lowered.
    handle = replace(handle, config=handle.config.for_context(sizes.step.max_model_len))
    engine = replace(engine, model=handle.config)
    if config.quantization in AT_LOAD and not coded_weights(engine.weights(sizes.step.dtype).state):
        reasons = reasons_for_floats(engine.weights(sizes.step.dtype).state)
        fault = ": ".join([f"{shown(config.quantization)}, for which no matrix can be kept", *reasons])
        allowed = "auto, none, or a model of jpaged's families whose rows are a multiple of 32 values"
        raise refusal("quantization", fault, allowed, error=ConfigError)
    kept_weights = None
    if weights_in is not None:
        identity = repr((handle.config, handle.decoder.source, backend, backend.hardware(device)))
        kept_weights = KeptWeights(weights_in, engine.weights(sizes.step.dtype), handle.weight_files, identity)
    # Kept weights are those of the same files, whose tensors were checked when they were read.
    if handle.checkpoint is not None and (kept_weights is None or not kept_weights.path.exists()):
        from ..models.weights.loading import check_tensors

        check_tensors(engine.weights(sizes.step.dtype).built, handle.decoder, handle.checkpoint)
    handle.check_weight_files()
    builder = engine.builder(sizes.step)
    pools = {"num_blocks": sizes.num_blocks, "num_host_blocks": sizes.num_host_blocks}
    programs = engine.programs(builder, **pools, kept_in=compilation_cache() if keeps_programs else None)

    @cache
    def live() -> LiveWeights:
        from ..models.weights.live_weights import LiveWeights

        return LiveWeights(programs.weights.built, engine.mesh)

    encode = None if handle.tokenizer is None else handle.tokenizer.encode
    page_scales = engine.page_scales(sizes.step, encode, handle.checkpoint)
    measures = {} if page_scales is None else page_scales.programs(programs.weights, programs.lower_program)
    plan = CompilePlan(
        programs.lower,
        {**programs.lower_scores, **programs.lower_masked, **measures},
        of_updates=lambda: live().programs(),
        num_compilers=_num_compilers(device.platform),
        on_compiled=StepMemoryCheck(sizes.memory.program_bytes),
    )
    if compiles_behind:
        needed_first, deferred = served_keys(config, programs, builder, is_cpu=free.is_cpu)
    else:
        needed_first, deferred = warmup_keys(config, programs, builder, demands, modes, is_cpu=free.is_cpu)
    if page_scales is not None and page_scales.scales is None:
        needed_first = [MEASURE_KEY, *needed_first]
    return PreparedEngine(
        engine, handle, sizes, builder, programs, live, kept_weights, page_scales, plan, needed_first, deferred, formats
    )


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


def free_memory(devices: Sequence[jax.Device]) -> FreeMemory:
    """Return the memory that is free on each of these devices, and on the host."""
    # Virtual devices of a CPU share its memory.
    num_sharing = len(devices) if devices[0].platform == "cpu" else 1
    return FreeMemory(devices[0].platform, min(map(_free_bytes, devices)) // num_sharing, free_host_bytes())


def _free_bytes(device: jax.Device) -> int:
    """Return the bytes that are free on the device; on a CPU, those of the host."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return free_host_bytes() if stats is None else stats["bytes_limit"] - stats["bytes_in_use"]


def _num_compilers(platform: str) -> int:
    """Return how many programs are compiled at once: CPU_COMPILERS on a CPU, whose cores also compute the steps.

    Elsewhere as many as the host has cores and free COMPILER_BYTES for, but from CPU_COMPILERS to MAX_COMPILERS.
    """
    if platform == "cpu":
        return CPU_COMPILERS
    num_fitting = free_host_bytes() // COMPILER_BYTES
    return min(max(min(num_host_cores(), num_fitting), CPU_COMPILERS), MAX_COMPILERS)
