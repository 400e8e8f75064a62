"""Every executable of an engine as a function that lowers it from abstract shapes. Needs no weights, pages or device.

program_keys.py names them, compile_plan.py compiles them. Programs take the weights as a flat tuple of arrays, and
samplers only those that logits need, because taking a tree of modules apart would cost each call more than the transfer
of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ..models.weights.code_arrays import has_group_scales
from ..models.weights.coded import coded_weights
from ..models.weights.weights import Weights
from ..pallas_kernels.ragged_paged_attention.interface import KVLayout
from ..pallas_kernels.ragged_paged_attention.page_moves import MAX_MOVES, copy_pages, put_pages, take_pages
from ..pallas_kernels.ragged_paged_attention.paged_cache import PagedCache
from ..sampling.logit_rules import LogitRulesState, new_rules, rule_shapes, set_rules
from ..sampling.sample_columns import SAMPLE_FIELDS, SCORE_FIELDS, num_mask_words
from ..sampling.sampler import PLAIN, SampledRows, SampleSettings
from ..sampling.sampling_params import SampleMode, ScoreKind, score_kinds
from ..sharding import replicated, sharding_of
from .compile_plan import Key, Lower, Lowered
from .kept_programs import CompilerOptions, KeptPrograms, Program
from .program_keys import (
    ALLOCATE_KEY,
    COPY_KEY,
    SET_RULES_KEY,
    SWAP_IN_KEY,
    SWAP_OUT_KEY,
    TABLES_KEY,
    forward_key_of,
    layout_key,
    score_key,
)
from .scoring import score_tokens
from .step import DecodeSampling, DeviceState, SamplingState, decode, forward, new_state, sample_rows, update_tables
from .step_inputs import StepInputBuilder
from .step_layout import CHANGE_FIELDS, StepLayout

TPU7X_LOOP_OPTIONS: CompilerOptions = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "0"}
"""Compiler options of decode programs for a TPU 7x. Without them XLA copies all weights in front of the loop, from
tiles of 8 rows to tiles of 16."""
GPU_OPTIONS: CompilerOptions = {"xla_gpu_memory_limit_slop_factor": "1000"}
"""Compiler options of programs that hold the cache, for GPUs: a limit of ten times the memory, in percent. XLA counts
the donated cache twice, as argument and as result, and would compute values again to save memory that is not short."""
WHOLE_PRODUCTS: CompilerOptions = {"xla_gpu_experimental_force_split_k": "1"}
"""Compiler options of programs for GPUs whose matrices are codes with scales of groups: XLA would cut their inputs in
parts where there are few rows, and then converts whole matrices in front of the product."""
NUM_MODULES, MAX_MODULES = "xla_cpu_parallel_codegen_split_count", 32
"""A compiler option for a CPU: the modules of LLVM that XLA cuts a program into, and its default. Modules beyond the
number of cores only take memory, 2 MB a program for as long as it is loaded."""
Leaves = tuple[jax.Array, ...]
"""Weights as a flat tuple, in the order in which JAX flattens their tree."""
DecodeState = tuple[DeviceState, LogitRulesState | None]
"""The state that a decode program changes; the rules are None in modes that read none."""


@dataclass(frozen=True)
class ProgramOptions:
    """The options that an engine's programs depend on beside its model, cache and step shapes."""

    settings: SampleSettings = PLAIN
    num_decode_steps: int = 1
    """Most tokens per sequence and dispatch; above 1 there are decode programs."""
    num_host_blocks: int = 0
    """Pages of the host pool; with 0 there are no swap programs."""
    kept_in: Path | None = field(default=None, repr=False)
    """Directory in which step programs are kept for later starts, which then trace nothing; None for none."""
    num_cores: int = field(default=1, repr=False)
    """Cores that the host may keep busy. No trace depends on them: XLA's options do."""
    expert_counts: tuple[int, int] | None = None
    """Numbers of layers and of experts, where steps count the tokens of each expert; None where they do not."""


class Programs:
    """The programs of one engine: `lower` by key, and the abstract shapes that they are lowered for."""

    def __init__(
        self,
        weights: Weights,
        cache: PagedCache,
        mesh: Mesh,
        builder: StepInputBuilder,
        *,
        hidden_size: int,
        options: ProgramOptions | None = None,
    ):
        """Make the functions in `lower`; nothing is lowered or compiled yet, and no device memory is taken.

        `weights` and `cache` hold shapes only: weights as `abstract_weights` makes them, a cache without pages. The
        token buckets, modes, state slots and page tables are those of `builder`, so that its steps fit the programs.
        """
        options = options or ProgramOptions()
        self.weights = weights
        """Shapes of the weights with their placement."""
        self._builder, self._buckets = builder, builder.buckets
        self._num_slots, buckets = builder.tables.shape[1], builder.buckets
        # Programs for a single device are written without a mesh: they need no gather of logits.
        self._options, self._mesh = options, mesh if mesh.size > 1 else None
        self._device_kind = mesh.devices.flat[0].device_kind
        is_cpu = mesh.devices.flat[0].platform == "cpu"
        # Compiler options of programs without products, with products, and with products and the cache.
        self._plain_options: CompilerOptions = {NUM_MODULES: min(options.num_cores, MAX_MODULES)} if is_cpu else {}
        self._product_options = self._plain_options | product_options(mesh, weights)
        self._cache_options = self._product_options | compiler_options(mesh)
        self._replicated = replicated(mesh)
        self.state = DeviceState(
            cache=replace(cache, pages=cache_arrays(cache.layout, mesh)),
            page_tables=self._shape(builder.tables.shape, jnp.int32),
            last_tokens=self._shape((self._num_slots,), jnp.int32),
            # Room for the hidden states of the largest step.
            hidden=self._shape((buckets.num_tokens[-1], hidden_size), weights.stream_dtype),
            expert_tokens=self._shape(options.expert_counts, jnp.int32) if options.expert_counts else None,
        )
        """Shapes of the device state with their placement."""
        self._kept: KeptPrograms | None = None
        if options.kept_in is not None:
            made_from = weights.config, cache.layout, cache.layers, builder.layouts, builder.rules_spec, options
            identity = repr((*made_from, coded_weights(weights.state)))
            self._kept = KeptPrograms(options.kept_in, cache.backend, mesh.devices.flat[0], identity)
        self._rules = rule_shapes(builder.rules_spec, self._num_slots, self._replicated)
        self.lower: dict[Key, Lower] = {
            TABLES_KEY: self._lower_tables,
            ALLOCATE_KEY: self._lower_allocate,
            SET_RULES_KEY: self._lower_set_rules,
            **move_programs(cache.layout, mesh, num_host_blocks=options.num_host_blocks),
        }
        # (token bucket, whether every row has one token) of each forward program.
        layout_keys = *product(buckets.forward_tokens, (False,)), *product(buckets.forward_decode_tokens, (True,))
        for layout in (builder.layouts[key] for key in layout_keys):
            self.lower[layout_key(layout)] = partial(self._lower_forward, layout)
        if options.num_decode_steps > 1:
            for size, mode in product(buckets.decode_sizes, buckets.decode_modes):
                self.lower["decode", size, mode] = partial(self._lower_decode, builder.layouts[size, True], mode)
        self.lower_masked: dict[Key, Lower] = {}
        """The sample programs for rows with masks, which only requests with a grammar need; empty if all take masks."""
        for mode in buckets.modes:
            for size in buckets.sample_sizes(mode):
                masked = partial(self._lower_sample, size, mode, is_masked=True)
                if buckets.masks_apart:
                    self.lower["sample", size, mode] = partial(self._lower_sample, size, mode)
                    self.lower_masked["sample_masked", size, mode] = masked
                else:
                    self.lower["sample", size, mode] = masked
        score_programs = product(buckets.sample_sizes(SampleMode.FULL), score_kinds(options.settings.max_logprobs))
        self.lower_scores: dict[Key, Lower] = {
            score_key(size, kind): partial(self._lower_score, size, kind) for size, kind in score_programs
        }
        """The programs that score given tokens; few requests need one, so each is compiled when it is asked for."""

    def _shape(self, dims: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Return the abstract shape of an array of which every device has a whole copy."""
        return jax.ShapeDtypeStruct(dims, dtype, sharding=self._replicated)

    def lower_program(self, program: Program) -> Lowered:
        """Lower a program of a step: the kept one, if programs are kept, else by a trace."""
        return program.lower() if self._kept is None else self._kept.lower(program)

    def _lower_forward(self, layout: StepLayout) -> Lowered:
        """Lower the forward program for steps of one layout: (weights, device state, step's buffer) → (state, columns).

        It runs the model on the step's tokens, and returns the new device state and the SAMPLE_FIELDS of the S rows to
        sample, int32 [fields, S]. The weights are a flat tuple of arrays, as calls with a tree of modules are slower.
        """
        leaves, tree = jax.tree.flatten(self.weights.state)

        def run(leaves: Leaves, state: DeviceState, packed: jax.Array) -> tuple[DeviceState, jax.Array]:
            return forward(self.weights.graph, jax.tree.unflatten(tree, leaves), state, packed, layout)

        name = "_".join(map(str, forward_key_of(layout.num_tokens, layout.decodes_only)))
        arguments = tuple(leaves), self.state, self._shape((layout.size,), jnp.int32)
        return self.lower_program(Program(name, run, arguments, self._cache_options))

    def programs_to_trace(self) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
        """Yield (name, function, abstract arguments) of one sample program, and of one decode program if there is any.

        They let a caller check by tracing alone what a model computes after a forward step. One size and one mode are
        enough for that: of samplers the smallest one, and of decode programs the first one in `lower`.
        """
        mode = self._buckets.modes[0]
        sample = self._sample_program(self._buckets.sample_sizes(mode)[0], mode)
        yield "sample", sample.run, sample.arguments
        decode_keys = (key for key in self.lower if isinstance(key, tuple) and key[0] == "decode")
        for _, size, mode in islice(decode_keys, 1):  # Keys are ("decode", T, mode).
            decode_program = self._decode_program(self._builder.layouts[size, True], mode)
            yield "decode", decode_program.run, decode_program.arguments

    def _decode_program(self, layout: StepLayout, mode: SampleMode) -> Program:
        """Return a decode program, for steps of one layout in one mode.

        Its function has three arguments. The first one is all weights as a flat tuple of arrays, which takes a call
        less time than a tree of modules. The second one is the pair (device state, logit rules); the rules are None if
        the mode reads none. The third one is a step's packed buffer, int32. The result is that of `decode`: the pair of
        the new device state and new rules, and the sampled rows [K, R], K tokens of each of R rows.
        """
        leaves, tree = jax.tree.flatten(self.weights.state)
        sampling = DecodeSampling(mode, self._options.settings, self._options.num_decode_steps, self._mesh)

        def run(leaves: Leaves, state: DecodeState, packed: jax.Array) -> tuple[DecodeState, SampledRows]:
            weights, (device_state, rules) = jax.tree.unflatten(tree, leaves), state
            return decode(self.weights.graph, weights, device_state, rules, packed, layout, sampling)

        state, packed = (self.state, self._rules_of(mode)), self._shape((layout.size,), jnp.int32)
        options = TPU7X_LOOP_OPTIONS if self._device_kind == "TPU7x" else self._cache_options
        return Program(f"decode_{layout.num_tokens}_{mode.value}", run, (tuple(leaves), state, packed), options)

    def _lower_decode(self, layout: StepLayout, mode: SampleMode) -> Lowered:
        """Lower the decode program of one mode for steps of one layout."""
        return self.lower_program(self._decode_program(layout, mode))

    def _rules_of(self, mode: SampleMode) -> LogitRulesState | None:
        """Return the shapes of the logit rules for a program of that mode; None if it reads none."""
        return self._rules if mode is SampleMode.FULL else None

    def _sample_program(self, num_rows: int, mode: SampleMode, *, is_masked: bool = False) -> Program:
        """Return a sample program, for this many rows in one mode.

        Its function has five arguments: the weights that logits need, as a flat tuple of arrays; the sampling state,
        which is the last token of each state slot and the logit rules (None if the mode reads none); the hidden states
        of the last forward program, [T, D]; SAMPLE_FIELDS columns, int32 [fields, S]; and the masks of the rows, int32
        [num_rows, W], or None. S is the largest sample bucket in all sample programs, as forward programs return these
        columns; this one reads the first `num_rows`.
        The result is that of `sample_rows`: the new sampling state, and a sampled token of each row.
        """
        leaves, unflatten = self.weights.split_logits()

        def run(
            leaves: Leaves, state: SamplingState, hidden: jax.Array, columns: jax.Array, masks: jax.Array | None
        ) -> tuple[SamplingState, SampledRows]:
            weights, settings = unflatten(leaves), self._options.settings
            columns = columns[:, :num_rows]
            return sample_rows(self.weights.graph, weights, state, hidden, columns, mode, settings, self._mesh, masks)

        name = f"sample_{'masked_' if is_masked else ''}{num_rows}_{mode.value}"
        state = self.state.last_tokens, self._rules_of(mode)
        columns = self._shape((len(SAMPLE_FIELDS), self._buckets.max_samples), jnp.int32)
        words_per_mask = num_mask_words(self._builder.rules_spec.vocab_size)
        masks = self._shape((num_rows, words_per_mask), jnp.int32) if is_masked else None
        arguments = tuple(leaves), state, self.state.hidden, columns, masks
        return Program(name, run, arguments, self._product_options)

    def _lower_sample(self, num_rows: int, mode: SampleMode, *, is_masked: bool = False) -> Lowered:
        """Lower the sample program of one mode for this many rows."""
        return self.lower_program(self._sample_program(num_rows, mode, is_masked=is_masked))

    def _lower_score(self, num_rows: int, kind: ScoreKind) -> Lowered:
        """Lower the program that scores this many given tokens: (logit weights, hidden, columns, asked) → scores.

        The weights are a flat tuple, empty for hidden states alone; `asked` is None unless the kind has `num_asked`.
        """
        leaves, unflatten = ((), lambda _: self.weights.state) if kind.is_hidden else self.weights.split_logits()

        def run(leaves: Leaves, hidden: jax.Array, columns: jax.Array, asked: jax.Array | None) -> SampledRows:
            return score_tokens(self.weights.graph, unflatten(leaves), hidden, columns, asked, kind, self._mesh)

        run.__name__ = f"score_{num_rows}_{'hidden' if kind.is_hidden else f'{kind.num_tops}_{kind.num_asked}'}"
        asked = self._shape((num_rows, kind.num_asked), jnp.int32) if kind.num_asked else None
        columns = self._shape((len(SCORE_FIELDS), num_rows), jnp.int32)
        jitted = jax.jit(run, compiler_options=self._product_options)
        return jitted.lower(tuple(leaves), self.state.hidden, columns, asked)

    def _lower_tables(self) -> Lowered:
        """Lower the program that applies a padded batch of page-table changes."""
        changes = self._shape((len(CHANGE_FIELDS), self._builder.num_changes), jnp.int32)
        arguments = self.state.page_tables, changes
        program = Program("update_tables", update_tables, arguments, self._plain_options, donated=0, has_rest=False)
        return self.lower_program(program)

    def _lower_allocate(self) -> Lowered:
        """Lower the program that makes a new device state, and logit rules that change nothing; it has no arguments.

        Each array is made where its abstract shape says, for example as equal parts on the devices of a mesh.
        """

        def run() -> DecodeState:
            return new_state(self.state), new_rules(self._builder.rules_spec, self._num_slots)

        made = self.state, self._rules
        return self.lower_program(Program("allocate", run, (), self._plain_options, made=made, has_rest=False))

    def _lower_set_rules(self) -> Lowered:
        """Lower the program that writes the packed rules of one state slot."""
        row, slot = self._shape((self._builder.rules_spec.width,), jnp.int32), self._shape((), jnp.int32)
        arguments = self._rules, row, slot
        program = Program("set_rules", set_rules, arguments, self._plain_options, donated=0, has_rest=False)
        return self.lower_program(program)


def move_programs(layout: KVLayout, mesh: Mesh, *, num_host_blocks: int) -> dict[Key, Lower]:
    """Return the functions that lower the programs which move pages of a cache: copy, swap-out and swap-in, by key.

    If `num_host_blocks`, the pages of the host pool, is 0, there is only the copy. Each program moves MAX_MOVES pages,
    padding included; their numbers are int32 lists. A swap-out returns the pages as arrays of their own, which a
    swap-in takes. Copy and swap-in change the cache: they take its arrays as donated arguments and return them. A
    swap-in also returns a scalar, whose only use is to wait for the program.
    """
    cache = cache_arrays(layout, mesh)
    page_list = jax.ShapeDtypeStruct((MAX_MOVES,), jnp.int32, sharding=replicated(mesh))
    cache_shardings = tuple(array.sharding for array in cache)
    # A page outside of the cache is a tuple of arrays [L, …], its entries of all L layers in each array of the cache.
    page = tuple(array.update(shape=(layout.num_layers, *array.shape[1:])) for array in cache)

    def lower(function: Callable[..., Any], arguments: tuple[Any, ...], shardings: Any, **options: Any) -> Lower:
        """Return a function that lowers one program for these abstract arguments; `shardings` are its results'."""
        jitted = jax.jit(
            partial(function, layout=layout),
            out_shardings=shardings,
            compiler_options=compiler_options(mesh),
            **options,
        )
        return lambda: jitted.lower(*arguments)

    programs: dict[Key, Lower] = {
        COPY_KEY: lower(copy_pages, (cache, page_list, page_list), cache_shardings, donate_argnums=0)
    }
    if num_host_blocks:
        programs[SWAP_OUT_KEY] = lower(take_pages, (cache, page_list), (cache_shardings,) * MAX_MOVES)
        swap_in_arguments = cache, (page,) * MAX_MOVES, page_list
        swap_in_shardings = cache_shardings, page_list.sharding  # The scalar lies whole on each device, as lists do.
        programs[SWAP_IN_KEY] = lower(put_pages, swap_in_arguments, swap_in_shardings, donate_argnums=0)
    return programs


def compiler_options(mesh: Mesh) -> CompilerOptions:
    """Return XLA's options for a program that takes the cache as a donated argument on these devices, mostly none."""
    return GPU_OPTIONS if mesh.devices.flat[0].platform == "gpu" else {}


def product_options(mesh: Mesh, weights: Weights) -> CompilerOptions:
    """Return XLA's options for a program that multiplies by these weights on these devices, mostly none."""
    is_gpu = mesh.devices.flat[0].platform == "gpu"
    return WHOLE_PRODUCTS if is_gpu and has_group_scales(weights.state) else {}


def cache_arrays(layout: KVLayout, mesh: Mesh) -> tuple[Any, ...]:
    """Return the abstract shapes of the cache's arrays, placed by the layout's logical axes."""
    return tuple(
        jax.ShapeDtypeStruct(shape, layout.stored_dtype, sharding=sharding_of(mesh, axes))
        for shape, axes in zip(layout.shapes, layout.logical_axes, strict=True)
    )
