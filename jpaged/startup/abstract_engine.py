"""An engine as abstract shapes: what its pages, weights and steps would take, and its programs, before any memory is.

Needs no device either: the mesh may be of a chip that is described and not present, which is how the compile gates
build the programs of a TPU on a machine without one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..checks import one_line, shown
from ..errors import ConfigError, ModelLoadError
from ..models.checked_cache import LOOP, CheckedCache
from ..models.config.decoder import DecoderConfig
from ..models.formats.checkpoint import Checkpoint
from ..models.inputs import CALL_WANTED, ModelInputs
from ..models.opening.page_scales import read_page_scales
from ..models.own_model import OwnModel
from ..models.traces import computes_outputs, constant_output, draws_random_numbers, num_attention_calls
from ..models.weights.code_arrays import converted_bytes
from ..models.weights.coded import StoredFormats
from ..models.weights.kept_shapes import kept_shapes
from ..models.weights.weights import Weights
from ..pallas_kernels.ragged_paged_attention.interface import AttentionShape, Backend, KVLayout, LayerPlace
from ..pallas_kernels.ragged_paged_attention.kv_scales import KVScales, is_quantized, scale_shapes
from ..pallas_kernels.ragged_paged_attention.paged_cache import PagedCache
from ..sampling.control_flow import DYNAMIC, STATIC
from ..sampling.logit_rules_spec import LogitRulesSpec
from ..sampling.sampler import PLAIN, SampleSettings
from ..sampling.sampling_params import SampleMode
from ..sharding import TENSOR_AXIS, sharding_of
from ..step.compile_plan import Executable, Key
from ..step.jax_settings import trace_settings
from ..step.kv_measure import MEASURE_KEY, NUM_PARTS, PART_TOKENS, PageScales, measured_tokens
from ..step.model_calls import merged_model
from ..step.programs import ProgramOptions, Programs, cache_arrays
from ..step.step import trial
from ..step.step_inputs import StepInputBuilder
from ..step.step_sizes import StepSizes
from .attention.choice import attention_shape, block_size_of
from .sizing.host_memory import num_host_cores
from .sizing.layer_groups import LayerGroups, group_layers
from .sizing.step_memory import activation_bytes, measured_bytes

logger = logging.getLogger("jpaged")

STEP_PROGRAMS = ("forward", "forward_decodes", "sample", "decode", *MEASURE_KEY)
"""First parts of the keys of programs that compute a step, or measure the scales of pages."""


@dataclass(frozen=True)
class AbstractEngine:
    """A model on a mesh with an attention backend. Implements `sizing.MemoryCosts`."""

    model: DecoderConfig | OwnModel
    mesh: Mesh
    backend: Backend
    rules_spec: LogitRulesSpec
    settings: SampleSettings = PLAIN
    num_decode_steps: int = 1
    """Most tokens of a sequence in one dispatch."""
    formats: StoredFormats = ()
    """The formats of a checkpoint's tensors, if those that are codes are to stay so."""
    counts_expert_tokens: bool = False
    """Whether steps count the tokens of each expert; only for a model that has experts."""
    shapes_in: Path | None = None
    """Directory in which the shapes of weights are kept for later starts; None for none."""

    @cached_property
    def groups(self) -> LayerGroups:
        """Return the page-table groups of the model's layers; ConfigError for windows that cannot be served."""
        return group_layers(self.model.spec.layers)

    @property
    def num_chips(self) -> int:
        """Return the number of devices that tensors are spread over."""
        return self.mesh.shape[TENSOR_AXIS]

    @property
    def platform(self) -> str:
        """Return the kind of the mesh's devices: "cpu", "gpu" or "tpu"."""
        return self.mesh.devices.flat[0].platform

    def block_size(self, asked: int | None, kv_dtype: str, max_num_seqs: int, max_model_len: int) -> int:
        """Return the tokens per page, `asked` if given; ConfigError if the page tables have no room on the device."""
        return block_size_of(self.backend, self._shape_on_chip(kv_dtype), asked, max_num_seqs, max_model_len)

    def page_bytes(self, block_size: int, kv_dtype: str) -> int:
        """Return the bytes of one page on a chip, in all layers of the largest page-table group together."""
        return self._layout(1, block_size, kv_dtype).page_bytes // self.num_chips

    def weights(self, dtype: str) -> Weights:
        """Return the shapes of the weights with their placement."""
        if isinstance(self.model, OwnModel):
            return self.model.weights(self.mesh)
        if self.shapes_in is not None and self.platform == "cpu" and self.num_chips == 1:
            return kept_shapes(self.shapes_in, self.model, dtype, self.mesh, self.backend, self.formats)
        from ..models.weights.loading import abstract_weights

        return abstract_weights(self.model, dtype, self.mesh, self.backend.layer_ops, self.formats)

    def weights_bytes(self, dtype: str) -> int:
        """Return the bytes of the weights on a chip."""
        return self.weights(dtype).chip_bytes

    def converted_bytes(self, dtype: str) -> int:
        """Return the bytes of the largest matrix of codes on a chip that a program makes floats, one at a time.

        XLA does so on a CPU, before each product.
        """
        return converted_bytes(self.weights(dtype).state) if self.platform == "cpu" else 0

    def measure_bytes(self, dtype: str, kv_dtype: str) -> int:
        """Return the bytes that measuring the scales of pages takes beside weights; 0 for pages without scales."""
        if not is_quantized(jnp.dtype(kv_dtype)):
            return 0
        itemsize = activation_bytes(dtype, on_cpu=self.platform == "cpu")
        on_chip = self.model.spec_on_chip(self.num_chips, self.backend.layer_ops, itemsize)
        return measured_bytes(on_chip, itemsize, NUM_PARTS * PART_TOKENS)

    def builder(self, sizes: StepSizes) -> StepInputBuilder:
        """Return the builder of step inputs for an engine of these sizes and the buckets of its platform.

        If `max_logprobs` is negative, which means no limit, there is no decode program of the mode FULL: requests with
        rules or several logprobs then decode one token per step.
        """
        buckets = sizes.buckets(self.platform)
        if self.settings.max_logprobs < 0:
            # The logprobs of the whole vocabulary for several tokens per row would take too much memory.
            modes = tuple(mode for mode in buckets.decode_modes if mode is not SampleMode.FULL)
            buckets = replace(buckets, decode_modes=modes)
        return StepInputBuilder(
            sizes,
            buckets,
            self.backend,
            rules_spec=self.rules_spec,
            windows=self.groups.windows,
            max_logprobs=self.settings.max_logprobs,
        )

    def programs(
        self, builder: StepInputBuilder, *, num_blocks: int, num_host_blocks: int = 0, kept_in: Path | None = None
    ) -> Programs:
        """Return the programs of an engine with these pools of pages, for the step inputs of `builder`.

        The pools' sizes count their null pages; `num_host_blocks` 0 means that there is no host pool. `kept_in` is a
        directory in which step programs are kept for later starts. Programs for several devices, for other devices than
        a CPU, and with code of the caller's own are not kept. Nothing is compiled or allocated: weights and cache are
        shapes without arrays. A caller's own model is traced in steps of all sizes, which also tells the dtype of its
        hidden states, and then in each program; ModelLoadError if that fails.
        """
        sizes = builder.sizes
        layout = self._layout(num_blocks, sizes.block_size, sizes.kv_cache_dtype)
        # On a GPU the host would have to read the condition of each branch and loop, so programs have none there.
        control_flow = STATIC if self.platform == "gpu" else DYNAMIC
        has_native_code = self.backend.has_own_products
        settings = replace(self.settings, control_flow=control_flow, has_native_code=has_native_code)
        layers = tuple(LayerPlace(*place) for place in self.groups.places)
        mesh = self.mesh if self.num_chips > 1 else None  # One device needs no `shard_map` around attention.
        scales: KVScales | None = None
        if is_quantized(layout.dtype):
            sharding = sharding_of(self.mesh, (None, "kv_heads"))
            scales = scale_shapes(len(layers), layout.num_kv_heads, layout.head_size, sharding)
        # Without pages: only their layout is known yet.
        cache = PagedCache((), layout, layers, self.backend, scales, mesh=mesh, mesh_axis=TENSOR_AXIS)
        has_own_code = isinstance(self.model, OwnModel) or bool(settings.processors)
        is_kept = self.platform == "cpu" and self.num_chips == 1 and not has_own_code
        options = ProgramOptions(
            settings,
            self.num_decode_steps,
            num_host_blocks,
            kept_in if is_kept else None,
            num_cores=num_host_cores(),
            expert_counts=self._expert_counts(),
        )
        weights = self.weights(sizes.dtype)
        if isinstance(self.model, OwnModel):
            weights = replace(weights, stream_dtype=self._checked_stream_dtype(weights, cache, builder))
        programs = Programs(
            weights, cache, self.mesh, builder, hidden_size=self.model.spec.hidden_size, options=options
        )
        if isinstance(self.model, OwnModel):
            for name, run, arguments in programs.programs_to_trace():
                self._traced(f"its {name} program", partial(jax.eval_shape, run), *arguments)
        return programs

    def _expert_counts(self) -> tuple[int, int] | None:
        """Return the numbers of layers and of experts that steps count tokens for; None if they count none."""
        if not self.counts_expert_tokens:
            return None
        assert isinstance(self.model, DecoderConfig), "experts of a caller's own module are not known"
        assert self.model.experts is not None, "a model without experts has none to count"
        return self.model.num_layers, self.model.experts.num_experts

    def page_scales(
        self, sizes: StepSizes, encode: Callable[[str], Sequence[int]] | None, checkpoint: Checkpoint | None
    ) -> PageScales | None:
        """Return what makes the scales of pages of one byte a number; None for other pages.

        `encode` makes token ids of a text. Scales that the checkpoint has are read; ModelLoadError for wrong ones.
        """
        layout, spec = self._layout(1, sizes.block_size, sizes.kv_cache_dtype), self.model.spec
        if not is_quantized(layout.dtype):
            return None
        stored: KVScales | None = None
        if checkpoint is not None:
            assert not isinstance(self.model, OwnModel)  # A caller's own model has no files.
            heads = layout.num_kv_heads, layout.head_size
            stored = read_page_scales(checkpoint, self.model, *heads, layout.dtype.name)
        source = "of the checkpoint" if stored is not None else "measured on the built-in text"
        if stored is None and encode is None:
            source = "measured on random token ids, since there is no tokenizer"
        logger.info("pages of %s: their scales are %s", sizes.kv_cache_dtype, source)
        tokens = measured_tokens(encode, spec.vocab_size, spec.max_context_len)
        return PageScales(layout, spec.layers, tokens, stored)

    def _checked_stream_dtype(self, weights: Weights, cache: PagedCache, builder: StepInputBuilder) -> jnp.dtype[Any]:
        """Trace a caller's own model in steps of all sizes; return the dtype that its hidden states are kept in.

        `weights` and `cache` are abstract shapes, so nothing is computed. The model must return hidden states [T, D]
        for a step of T tokens, and logits [R, V] for the hidden states of R rows (D `hidden_size`, V `vocab_size`). If
        the dtypes of the hidden states differ between steps of different sizes, float32 is returned, which holds the
        values of all. Raises ModelLoadError if the model cannot be traced for one size, calls `attend` more often than
        its spec has layers, attends otherwise than its spec says, or returns other shapes or no floats.
        """
        assert isinstance(self.model, OwnModel)
        spec, buckets = self.model.spec, builder.buckets
        paged = replace(cache, pages=cache_arrays(cache.layout, self.mesh))
        tables = jax.ShapeDtypeStruct(builder.tables.shape, jnp.int32)
        # Keys of `builder.layouts`: (tokens of the step, whether each row has one token).
        layout_keys = {(size, False) for size in buckets.forward_tokens}
        layout_keys |= {(size, True) for size in (*buckets.forward_decode_tokens, *buckets.decode_sizes)}
        layouts = [builder.layouts[key] for key in sorted(layout_keys)]
        dtypes = set()
        for layout in layouts:
            packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
            step = partial(trial, weights.graph, layout, spec.layers)
            arguments = weights.state, paged, tables, packed
            traced, outputs = self._traced("a step of it", jax.make_jaxpr(step, return_shape=True), *arguments)
            hidden, _, statistics = outputs  # Outputs of the trace by their order: the first must be one array.
            _check_floats("hidden states", hidden, (layout.num_tokens, spec.hidden_size))
            if (num_calls := num_attention_calls(traced.jaxpr)) != len(spec.layers):
                wanted = f"{len(spec.layers)}, each layer once, with the cache that the last call returned"
                raise ModelLoadError(f"model: it calls attend {num_calls} times in a step, its spec wants {wanted}")
            with jax.set_mesh(self.mesh):  # That of the trace: a trainer may have set its own.
                num_attended = constant_output(traced, 1)
            if num_attended != len(spec.layers):
                wanted = f"those of the spec's {len(spec.layers)}: return the cache that `attend` gave last"
                raise ModelLoadError(
                    f"model: its cache has new keys and values of {num_attended} layers, wanted {wanted}"
                )
            self._refuse_draws(traced.jaxpr)
            if computes_outputs(traced, range(2, 2 + len(statistics))):
                fault = "changes its running statistics in evaluation mode too, by the tokens of other requests"
                raise ModelLoadError(f"model: {self.model.name} {fault}, wanted a call that only reads them")
            dtypes.add(jnp.dtype(hidden.dtype))
        stream_dtype = dtypes.pop() if len(dtypes) == 1 else jnp.dtype(jnp.float32)
        for num_rows in sorted({*buckets.num_samples, *(layout.num_rows for layout in layouts)}):
            hidden = jax.ShapeDtypeStruct((num_rows, spec.hidden_size), stream_dtype)
            trace_logits = jax.make_jaxpr(partial(_logits, weights.graph), return_shape=True)
            traced, logits = self._traced("its `logits`", trace_logits, weights.state, hidden)
            self._refuse_draws(traced.jaxpr)
            _check_floats("logits", logits, (num_rows, spec.vocab_size))
        return stream_dtype

    def _refuse_draws(self, jaxpr: Any) -> None:
        """Raise ModelLoadError if a caller's own model draws from one of its random streams in `jaxpr`, a trace of it.

        The same tokens would have other logits in each step.
        """
        assert isinstance(self.model, OwnModel)
        if (streams := self.model.graph.random_streams) and draws_random_numbers(jaxpr):
            fault = f"draws random numbers in evaluation mode too (its streams: {', '.join(streams)})"
            raise ModelLoadError(f"model: {self.model.name} {fault}, wanted a call that gives the same each time")

    def _traced(self, name: str, trace: Callable[..., Any], *arguments: Any) -> Any:
        """Return `trace(*arguments)`, which traces a function of a caller's own model on this engine's mesh.

        JAX's settings are those under which steps are compiled. Raises ModelLoadError if the function cannot be traced;
        `name` says in the message which function that is.
        """
        try:
            with trace_settings(), jax.set_mesh(self.mesh):
                return trace(*arguments)
        except Exception as error:  # A caller's code may raise anything.
            reason = f"{type(error).__name__}: {one_line(error)}"
            if ModelInputs.__name__ in reason:  # The module took its inputs for something else, such as token ids.
                reason += f"; its __call__ gets {CALL_WANTED}"
            if CheckedCache.__name__ in str(error):  # What is static in the cache has changed, as in a scan.
                reason += f"; if it scans over layers, {LOOP}"
            raise ModelLoadError(f"model: {name} cannot be traced: {reason}") from error

    def _shape_on_chip(self, kv_dtype: str) -> AttentionShape:
        """Return what a chip's attention computes: its own heads."""
        return attention_shape(self.model.spec_on_chip(self.num_chips), kv_dtype)

    def _layout(self, num_pages: int, block_size: int, dtype: str) -> KVLayout:
        """Return the layout of a cache of `num_pages` pages with the KV heads of all devices together.

        `block_size` is the tokens per page and `dtype` that of keys and values. Raises ConfigError if the backend does
        not take them. The backend lays out the heads of one device. Their number is then multiplied by that of the
        devices, because the cache is one array whose KV heads are spread over the devices.
        """
        shape = self._shape_on_chip(dtype)
        try:
            kv_shape = shape.kv_shape(block_size, num_layers=self.groups.num_layers, num_pages=num_pages)
            layout = self.backend.layout(kv_shape)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return replace(layout, num_kv_heads=layout.num_kv_heads * self.num_chips)


def _logits(graph: Any, weights: Any, hidden: Any) -> Any:
    return merged_model(graph, weights).logits(hidden)


def _check_floats(name: str, found: Any, shape: tuple[int, ...]) -> None:
    """Raise ModelLoadError unless a model's result is an array of floats of this shape."""
    if getattr(found, "shape", None) != shape:
        raise ModelLoadError(f"model: its {name} are {shown(found)}, its spec wants the shape {shape}")
    if not jnp.issubdtype(found.dtype, jnp.floating):
        raise ModelLoadError(f"model: its {name} are {shown(found)}, wanted floats; cast them, for example to float32")


class StepMemoryCheck:
    """Compares the memory that compiled programs of a step take with what the plan of memory keeps for a step."""

    def __init__(self, kept_bytes: int) -> None:
        """`kept_bytes` is `MemoryPlan.program_bytes`."""
        self.kept_bytes, self.has_warned = kept_bytes, False

    def __call__(self, key: Key, compiled: Executable) -> None:
        """Warn if this program takes more memory than is kept for a step, since running it may exhaust the device.

        Only the first such program is reported, because all have the same remedy. Other programs are not compared:
        their keys are no tuples, or do not begin with one of STEP_PROGRAMS. A compile plan calls this for
        each executable that it has compiled.
        """
        if not isinstance(key, tuple) or key[0] not in STEP_PROGRAMS or self.has_warned:
            return
        if (needed := own_bytes(compiled)) > self.kept_bytes:
            self.has_warned = True
            logger.warning(
                "memory: the program %s takes %.3g GB, %.3g GB are kept for a step; if memory runs out, lower "
                "device_memory_utilization or max_num_batched_tokens",
                " ".join(map(str, key)),
                needed / 1e9,
                self.kept_bytes / 1e9,
            )


def own_bytes(compiled: Executable) -> int:
    """Return the bytes that an executable takes beside its arguments: its temporaries, and outputs not in place."""
    memory = compiled.memory_analysis()
    assert memory is not None, "every backend here says what memory a program takes"
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)
