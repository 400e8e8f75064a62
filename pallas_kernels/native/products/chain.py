"""Chains of products with weights in one custom call, with what comes before and after each of them.

    rows ──▶ norm, packed ──▶ · W in panels ──▶ bias, activation, gate ──▶ added to the stream ──▶ the next product
             phase: rows      phase: panels                                or packed

Threads share the units of a phase, and wait for one another between phases. Nothing but the outputs goes back to XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ffi import ffi_call
from jaxtyping import Array, Float
from llvmlite import ir

from ...code_formats import CodedMatrix, CodeParts
from ...grouped import Routing
from ..llvm import F32, I64, Code, constant, lanes_for
from ..norms import emit_row_norm
from ..processor import has_amx_unit, host_has, host_has_avx512
from ..registry import register
from ..xla_call import Body, Call, Work, handler
from .batches import rows_per_batch
from .codes.decoded import CodedMultiplier
from .codes.decoder import Vectors
from .codes.integers import IntegerMultiplier, has_integer_products
from .codes.panels import Order, stored_bytes
from .codes.stored_parts import stored_parts
from .groups import GroupShape, GroupTables, emit_groups, group_shape
from .heads import finish_heads
from .multiplier import Batch, FloatMultiplier, Multiplier, Panel, StepTask
from .panels import DEPTH, PANEL, panels_shape
from .parts import PartMultiplier
from .results import add_normed_rows, add_weighted_rows, finish_batch
from .stages import Block, Place, Stage, StageCode, chain_data
from .tiles import TileMultiplier
from .vectors import VectorMultiplier

MAX_SERIAL_WEIGHTS = 1 << 16
"""A chain with at most this many elements of weights runs on one thread: waking a second would take longer."""


def run_chain(
    stages: Sequence[Stage],
    rows: Float[Array, "R K"],
    stream: Float[Array, "R D"] | None,
    weights: Sequence[Array],
    choices: Routing | None = None,
) -> list[Array]:
    """Return the outputs of a chain of products: the new stream if a stage adds to it, and the last stage's parts.

    `weights` are, for each stage, its panels, its bias if it has one, the vectors of its norms, and the arrays of its
    heads. `choices` are those of the rows, if the stages have experts, all of them equally many. Outputs then have a
    row for each choice, [R × k, part], in the order of the rows; a row of no expert holds anything. Native code checks
    no arguments, so this raises ValueError for an array of another shape or dtype. R is at least 1.
    """
    num_rows = num_packed_rows = num_output_rows = rows.shape[0]
    adds, last = any(stage.adds for stage in stages), stages[-1]
    chosen, tables = list[Array](), list[tuple[tuple[int, ...], Any]]()
    if choices is not None:
        num_output_rows = num_rows * choices.experts.shape[1]
        groups = _group_shape(stages)
        num_packed_rows = groups.max_packed_rows(num_output_rows)
        tables = [(shape, jnp.int32) for shape in groups.table_shapes(num_output_rows)]
        chosen = [choices.experts.astype(jnp.int32), choices.weights.astype(jnp.float32)][: 1 + adds]
    _check_arrays(stages, rows, stream if adds else None, chosen, weights)
    streams = [stream] if adds and stream is not None else []
    results = [(each.shape, jnp.float32) for each in streams]
    results += [((num_output_rows, size), jnp.float32) for size in last.parts]
    scratch = [array for stage in stages for array in stage.scratch_shapes(num_rows, num_packed_rows)]
    result_types = [jax.ShapeDtypeStruct(*array) for array in (*results, *tables, *scratch)]
    # The new stream takes the place of the old one in memory.
    call = ffi_call(_handler(tuple(stages)), result_types, input_output_aliases={1: 0} if streams else {})
    return list(call(rows, *streams, *chosen, *weights)[: len(results)])


def _group_shape(stages: Sequence[Stage]) -> GroupShape:
    """Return how rows are grouped by the experts of a chain's stages."""
    return group_shape(stages[0].num_experts, [stage.multiplier for stage in stages])


def _check_arrays(
    stages: Sequence[Stage], rows: Array, stream: Array | None, chosen: Sequence[Array], weights: Sequence[Array]
) -> None:
    """Raise ValueError unless all arrays of a chain but the panels are float32 and have the shapes that it reads."""
    num_rows = rows.shape[0]
    if {stage.num_experts > 0 for stage in stages} != {len(chosen) > 0}:
        raise ValueError("products: got choices of experts or products of experts, wanted both or neither")
    for array in chosen:
        if array.shape != (num_rows, *chosen[0].shape[1:2]):
            raise ValueError(f"products: got choices {array.shape}, wanted [{num_rows}, k]")
    wanted: list[tuple[str, Array, tuple[int, ...]]] = [("rows", rows, (num_rows, stages[0].depth))]
    for stage in stages:
        if stage.adds:
            if stream is None:
                raise ValueError("products: got no stream, wanted the one that results are added to")
            wanted.append(("stream", stream, (num_rows, stage.num_results)))
    arrays = iter(weights)
    for stage in stages:
        next(arrays)  # The panels, see `check_panels`.
        wanted += [("weights", next(arrays), shape) for shape in stage.array_shapes(num_rows)]
    for name, array, shape in wanted:
        if array.dtype != jnp.float32 or array.shape != shape:
            raise ValueError(f"products: got {name} {array.shape} of {array.dtype}, wanted {shape} of float32")


def product(x: Float[Array, "R K"], panels: Float[Array, ...] | CodedMatrix, num_out: int) -> Float[Array, "R N"]:
    """Return x · W [K, N = `num_out`] in float32, with x rounded to the dtype of W, which is stored in panels.

    `panels` is [panels, K, 32], or [panels, pairs of K, 32, 2] in bfloat16, with K and N padded. For codes that are
    multiplied as integers, x is rounded as `codes.integers` says instead. x has at least one row, R ≥ 1. The bits of a
    result row do not depend on the other rows. Raises ValueError if `panels` has another dtype, or does not have the
    shape of the panels of a [K, N] matrix.
    """
    check_panels(panels, x.shape[1], num_out)
    stage = Stage(multiplier_for(x.shape[0], x.shape[1], panels), x.shape[1], num_out, parts=(num_out,))
    return run_chain([stage], x.astype(jnp.float32), None, [stored_array(panels)])[0]


def stored_array(panels: Array | CodedMatrix) -> Array:
    """Return the array of a stored matrix."""
    return panels.data if isinstance(panels, CodedMatrix) else panels


def check_panels(panels: Array | CodedMatrix, depth: int, num_out: int) -> None:
    """Raise ValueError unless `panels` are those of a matrix [depth, num_out]: native code would read other memory."""
    if isinstance(panels, CodedMatrix):
        num_bytes, found = stored_bytes(depth, panels.parts), panels.data
        is_same = (panels.depth, panels.num_out, found.shape) == (depth, num_out, (num_bytes,))
        if not is_same or found.dtype != jnp.uint8:
            fault = f"got codes of {panels.depth} × {panels.num_out} in {found.shape} of {found.dtype}"
            raise ValueError(f"product: {fault}, wanted {depth} × {num_out} in {num_bytes} of uint8")
        return
    if panels.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"product: got a weight of {panels.dtype}, wanted float32 or bfloat16")
    if (wanted := panels_shape(depth, num_out, panels.dtype)) != panels.shape:
        raise ValueError(
            f"product: got a weight of shape {panels.shape}, wanted {wanted}: panels of {depth} × {num_out}"
        )


def multiplier_for(num_rows: int | None, depth: int, panels: Array | CodedMatrix) -> Multiplier:
    """Return how this processor multiplies rows of `depth` values with a stored matrix.

    `num_rows` is None for any number, which differs from block to block.
    """
    if not isinstance(panels, CodedMatrix):
        return multiplier_of(num_rows, depth, jnp.dtype(panels.dtype))
    stored = stored_parts(depth, panels.parts)
    if code_order(panels.parts, panels.dtype) is Order.QUADS:
        return IntegerMultiplier.for_rows(stored, num_rows, panels.dtype, has_avx512=host_has_avx512())
    vectors = Vectors(panels.dtype == "bfloat16", host_has_avx512(), host_has("avx512bf16"))
    return CodedMultiplier(multiplier_of(num_rows, depth, jnp.dtype(panels.dtype)), stored, vectors)


def code_order(parts: CodeParts, dtype: str) -> Order:
    """Return how the codes of a matrix of these parts lie, for how this processor multiplies them.

    `dtype` is what they are decoded to, where they are: a matrix unit multiplies floats as fast as integers, and these
    would have to be rescaled every 32 values of K.
    """
    if not has_amx_unit() and has_integer_products(parts):
        return Order.QUADS
    return Order.PAIRS if dtype == "bfloat16" else Order.VALUES


def multiplier_of(num_rows: int | None, depth: int, dtype: Any) -> FloatMultiplier:
    """Return how this processor multiplies rows of `depth` values with a weight of a dtype, see `multiplier_for`."""
    is_bf16, has_avx512 = dtype == jnp.bfloat16, host_has_avx512()
    if has_amx_unit():
        return TileMultiplier(depth, host_has("avx512bf16")) if is_bf16 else PartMultiplier(depth)
    has_pairs = is_bf16 and has_avx512 and host_has("avx512bf16")
    batch_rows = None if num_rows is None else rows_per_batch(num_rows, has_avx512)
    return VectorMultiplier(depth, is_bf16, has_avx512, has_pairs, batch_rows)


@cache
def _handler(stages: tuple[Stage, ...]) -> str:
    """Compile the custom call of a chain, and return its name."""

    def prepare(code: Code, call: Call) -> Work:
        """Emit code that counts the units of each phase, after it has sorted the choices of experts."""
        num_rows, num_matrices, counts = call.arguments[0].size(0), I64(1), list[ir.Value]()
        if stages[0].num_experts:
            experts, (first_table, end_table) = call.arguments[1 + adds], (num_outputs, num_outputs + 3)
            tables = GroupTables(*(buffer.data for buffer in call.results[first_table:end_table]))
            num_choices = code.build.mul(num_rows, experts.size(1))
            num_matrices = emit_groups(code, _group_shape(stages), experts.data, num_choices, tables)
            counts = [experts.size(1), num_matrices]
        addresses = (buffer.data for buffer in (*call.arguments, *call.results))
        values = [call.num_threads, num_rows, *counts, *addresses]
        data = chain_data(stages, values)
        num_units = [phase.num_units(StageCode(code, stages, phase.stage_index, data)) for phase in phases]
        num_weights = code.build.mul(num_matrices, I64(sum(stage.depth * stage.num_results for stage in stages)))
        return Work(values, num_units, code.build.icmp_signed(">", num_weights, I64(MAX_SERIAL_WEIGHTS)))

    phases = [phase for index in range(len(stages)) for phase in _phases(stages, index)]

    def body_of(phase: Phase) -> Body:
        return lambda code, values, unit: phase.body(
            StageCode(code, stages, phase.stage_index, chain_data(stages, values)), unit
        )

    adds, has_experts = any(stage.adds for stage in stages), stages[0].num_experts > 0
    num_outputs = adds + len(stages[-1].parts)
    num_args = 1 + adds + has_experts * (1 + adds) + sum(1 + len(stage.array_shapes(num_rows=1)) for stage in stages)
    num_scratch = 3 * has_experts + sum(len(stage.scratch_shapes(1, 1)) for stage in stages)
    name = "_".join(["jpaged_products", *(stage.name for stage in stages)])
    num_rets = num_outputs + num_scratch
    return register(name, lambda: handler(name, num_args, num_rets, prepare, *map(body_of, phases)))


class Phase(NamedTuple):
    """A phase of a chain: what is done for each unit of it."""

    stage_index: int
    num_units: Callable[[StageCode], ir.Value]
    body: Callable[[StageCode, ir.Value], None]
    """(stage, unit): emits the code of one unit."""


def _phases(stages: tuple[Stage, ...], index: int) -> Iterator[Phase]:
    """Yield the phases of stage `index`: its rows are packed, unless the stage before has done so; the product; what
    becomes of heads; and the weighted sums of results and the norm behind it."""
    stage = stages[index]

    def units_of_rows(stage_code: StageCode) -> ir.Value:
        return stage_code.units_of(stage_code.data.num_rows)

    if index == 0 or stages[index - 1].adds:
        yield Phase(index, lambda stage_code: stage_code.units_of(stage_code.num_choices), _pack_rows)
    yield Phase(index, lambda stage_code: stage_code.num_units, _multiply)
    if stage.heads is not None:
        yield Phase(index, units_of_rows, finish_heads)
    if stage.keeps_results:
        yield Phase(index, units_of_rows, add_weighted_rows if stage.num_experts else add_normed_rows)


def _pack_rows(stage_code: StageCode, unit: ir.Value) -> None:
    """Emit code that norms the rows of a unit, if the stage has a norm, and packs them for its multiplier.

    The rows are the chain's, or the stream if the stage before has added to it. With experts a row is packed for each
    of its choices. K may be padded, to a multiple of 32: the padding of a row is zeros, since garbage could be NaN.
    """
    code, build, stage, groups = stage_code.code, stage_code.code.build, stage_code.stage, stage_code.data.groups
    source = stage_code.data.rows if stage_code.index == 0 else stage_code.data.stream
    depth, packed = stage.depth, stage_code.scratch.packed

    def pack_row(row: ir.Value, place: ir.Value) -> None:
        start = build.mul(row, I64(depth))

        def load(element: ir.Value, lanes: int) -> ir.Value:
            return code.load_vector(source, build.add(start, element), F32, lanes)

        def pack(element: ir.Value, values: ir.Value) -> None:
            stage.multiplier.pack(code, packed, place, element, values)

        if stage.norm is None:
            lanes = lanes_for(depth)
            code.loop(0, depth, lambda element: pack(element, load(element, lanes)), step=lanes)
        else:
            emit_row_norm(code, stage.norm, depth, load, stage_code.weights.norm, pack)
        if depth % DEPTH and stage.multiplier.pads_depth:
            zero = constant(ir.VectorType(F32, 1), 0.0)
            code.loop(depth, -(-depth // DEPTH) * DEPTH, lambda element: pack(element, zero))
        stage.multiplier.end_pack(code, packed, place, I64(0), depth)

    def pack_choice(choice: ir.Value) -> None:
        if groups is None:
            pack_row(choice, choice)
            return
        place = code.load_index(groups.tables.places, choice)
        with build.if_then(build.icmp_signed(">=", place, I64(0))):
            pack_row(build.sdiv(choice, groups.num_per_row), place)

    stage_code.each_row(unit, stage_code.num_choices, pack_choice)


def _multiply(stage_code: StageCode, unit: ir.Value) -> None:
    """Emit the product of a block of rows and one panel of results, and what becomes of it.

    A gated stage multiplies two panels: of the gates, and as many columns further on those that they gate. Sums of a
    batch go to memory that stays in the level-1 cache.
    """
    code, stage = stage_code.code, stage_code.stage
    multiplier = stage.multiplier
    place = stage_code.place_of(unit)
    panels = []
    for panel_index, ahead in zip(stage_code.panels_at(place), _panels_ahead(stage_code, unit, place), strict=True):
        tools = multiplier.begin(code)
        panels.append(Panel(multiplier.panel(code, stage_code.weights.matrix, panel_index), ahead, tools, panel_index))
    num_kept = 1 + (multiplier.num_task_steps > 0)
    if multiplier.num_depth_blocks > 1:
        num_kept = multiplier.batches_per_block
    sums = [code.allocate(F32, num_kept * multiplier.max_batch_rows * PANEL) for _ in panels]
    product_unit = _ProductUnit(stage_code, stage_code.rows_at(place), place.panel, panels, sums, num_kept)
    if multiplier.num_task_steps:
        _multiply_and_finish_previous(product_unit)
    else:
        _multiply_by_blocks(product_unit)
    multiplier.end(code)


class _ProductUnit(NamedTuple):
    """A unit of work of a product: a block of rows and a panel of results."""

    stage_code: StageCode
    block: Block
    panel: ir.Value
    """The number of the results' panel."""
    panels: list[Panel]
    """The panel of W; in a gated stage also the one that it gates."""
    sums: list[ir.Value]
    """For each of these, the address of the sums of `num_kept` batches, float32 [rows, 32]."""
    num_kept: int

    def batch(self, index: ir.Value) -> Batch:
        """Return batch `index` of the block's rows."""
        return self.block.batch(self.stage_code.code, self.stage_code.stage.multiplier, index)

    def sums_of(self, number: ir.Value) -> list[ir.Value]:
        """Return the addresses of the sums of a batch, given by its number in the unit."""
        build = self.stage_code.code.build
        batch_bytes = 4 * self.stage_code.stage.multiplier.max_batch_rows * PANEL
        offset = build.mul(build.urem(number, I64(self.num_kept)), I64(batch_bytes))
        return [build.gep(address, [offset]) for address in self.sums]

    def multiply(self, batch: Batch, depth_block: ir.Value, step_tasks: Sequence[StepTask | None]) -> None:
        """Emit the products of a batch with a block of the panels' K; `step_tasks` are those of the panels."""
        stage_code = self.stage_code
        for panel, sums, step_task in zip(self.panels, self.sums_of(batch.number), step_tasks, strict=True):
            panel = panel._replace(step_task=step_task)
            multiply = stage_code.stage.multiplier.multiply
            multiply(stage_code.code, stage_code.scratch.packed, panel, batch, depth_block, sums)

    def finish(self, batch: Batch, begin: ir.Value, end: ir.Value) -> None:
        """Emit what becomes of rows `begin` … `end` − 1 of a batch."""
        sums = self.sums_of(batch.number)
        finish_batch(self.stage_code, self.panel, self.block.expert, batch, sums, begin, end)


def _multiply_and_finish_previous(unit: _ProductUnit) -> None:
    """Emit the products of a unit, where a batch is finished between the steps of the next one.

    So vector instructions finish a batch while the matrix unit multiplies the next, and the sums of two batches are
    kept. The last batch is finished behind the loop. With K = 576 there are 18 steps, in each of which 2 of the 32 rows
    are finished; the last two steps have none left. A gated stage has 18 for each of its two panels: one row a step.
    """
    code, build, multiplier = unit.stage_code.code, unit.stage_code.code.build, unit.stage_code.stage.multiplier
    (begin, end), batch_rows = unit.block.batches, I64(multiplier.max_batch_rows)
    num_steps = multiplier.num_task_steps * len(unit.panels)
    rows_per_step = -(-multiplier.max_batch_rows // num_steps)

    def multiply_batch(index: ir.Value) -> None:
        batch = unit.batch(index)
        previous = batch._replace(
            first_row=build.sub(batch.first_row, batch_rows), number=build.sub(batch.number, I64(1))
        )
        # There is no batch before the first one. Others are whole: only the last one may have fewer rows.
        num_previous_rows = build.select(build.icmp_signed("==", index, begin), I64(0), batch_rows)

        def finish_rows(step: ir.Value, first_step: int) -> None:
            row = build.mul(build.add(step, I64(first_step)), I64(rows_per_step))
            unit.finish(previous, row, code.min(build.add(row, I64(rows_per_step)), num_previous_rows))

        first_steps = range(0, num_steps, multiplier.num_task_steps)
        unit.multiply(batch, I64(0), [partial(finish_rows, first_step=first_step) for first_step in first_steps])

    code.loop(begin, end, multiply_batch)
    last = unit.batch(build.sub(end, I64(1)))
    unit.finish(last, I64(0), last.num_rows)


def _multiply_by_blocks(unit: _ProductUnit) -> None:
    """Emit the products of a unit by blocks of K. Where there are several, all batches' sums wait for the next one."""
    code, build, multiplier = unit.stage_code.code, unit.stage_code.code.build, unit.stage_code.stage.multiplier

    def multiply_block(depth_block: ir.Value) -> None:
        def multiply_batch(index: ir.Value) -> None:
            batch = unit.batch(index)
            unit.multiply(batch, depth_block, [None] * len(unit.panels))
            is_last = build.icmp_signed("==", depth_block, I64(multiplier.num_depth_blocks - 1))
            with build.if_then(is_last):
                unit.finish(batch, I64(0), batch.num_rows)

        code.loop(*unit.block.batches, multiply_batch)

    code.loop(0, multiplier.num_depth_blocks, multiply_block)


def _panels_ahead(stage_code: StageCode, unit: ir.Value, place: Place) -> list[ir.Value]:
    """Return the addresses of the panels that this thread will probably multiply after those of a unit.

    With two threads that is the next panel of their blocks, or of a single block the next but one. Behind the last
    panel it is the first ones of the next stage, and in the last stage any panel that is in the caches: the panel
    itself. With experts the last panel is that of the last block; else rows of further blocks are multiplied by the
    same panels.
    """
    code, build, stage, has_experts = stage_code.code, stage_code.code.build, stage_code.stage, stage_code.data.groups
    num_threads, following = stage_code.data.num_threads, stage_code.following
    here, end = (unit, stage_code.num_units) if has_experts else (place.panel, I64(stage.num_panels))
    ahead = build.add(here, build.sdiv(num_threads, place.num_blocks))
    is_in_stage = build.icmp_signed("<", ahead, end)

    def panels_at(stage_code: StageCode, number: ir.Value) -> list[ir.Value]:
        return stage_code.panels_at(stage_code.place_of(number) if has_experts else place._replace(panel=number))

    addresses = []
    for index in panels_at(stage_code, build.select(is_in_stage, ahead, here)):
        address = stage.multiplier.panel(code, stage_code.weights.matrix, index)
        if following is not None:
            last = build.sub(following.num_units, I64(1)) if has_experts else I64(following.stage.num_panels - 1)
            there = panels_at(following, code.max(code.min(build.sub(ahead, end), last), I64(0)))[0]
            next_address = following.stage.multiplier.panel(code, following.weights.matrix, there)
            address = build.select(is_in_stage, address, next_address)
        addresses.append(address)
    return addresses
