"""What becomes of the sums of a product: bias, activation and gate, and where the results go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from ..llvm import F32, I64, constant, lanes_for
from ..norms import emit_row_norm
from .activations import NATIVE_ACTIVATIONS, NATIVE_GATES
from .multiplier import Batch
from .panels import PANEL
from .stages import StageCode


def finish_batch(
    stage_code: StageCode,
    panel: ir.Value,
    expert: ir.Value | None,
    batch: Batch,
    sums: Sequence[ir.Value],
    begin: ir.Value,
    end: ir.Value,
) -> None:
    """Emit bias, activation and gate of rows `begin` … `end` − 1 of a batch, and the store of the results.

    `panel` is the number of the results' panel, and `sums` are addresses of float32 [rows, 32]: of the panel, and in a
    gated stage of the one that it gates.
    """
    code, build, stage = stage_code.code, stage_code.code.build, stage_code.stage
    first_column = build.mul(panel, I64(PANEL))
    is_whole = stage.num_results % PANEL == 0
    lanes = lanes_for(stage.num_results)
    gate = NATIVE_GATES.get(stage.activation or "")
    activate = NATIVE_ACTIVATIONS[stage.activation] if stage.activation and gate is None else None
    store = _result_store(stage_code, first_column)

    def finish_row(i: ir.Value) -> None:
        row, row_sums = build.add(batch.first_row, i), build.mul(i, I64(PANEL))

        def result(number: int, column: ir.Value) -> ir.Value:
            """Return a vector of the sums from a column of the panel on, with the bias added."""
            values = code.load_vector(sums[number], build.add(row_sums, column), F32, lanes)
            if stage_code.weights.bias is None:
                return values
            bias_offset = build.add(build.add(first_column, column), I64(number * stage.num_results))
            if expert is not None:
                bias_offset = build.add(bias_offset, build.mul(expert, I64(stage.num_columns)))
            return build.fadd(values, code.load_vector(stage_code.weights.bias, bias_offset, F32, lanes))

        def finish_columns(column: ir.Value) -> None:
            values = result(0, column)
            if activate is not None:
                values = activate(code, values)
            if gate is not None:
                values = gate(code, values, result(1, column))
            elif stage.is_gated:
                values = build.fmul(values, result(1, column))
            store(row, column, values)

        if is_whole:
            for column in range(0, PANEL, lanes):
                finish_columns(I64(column))
        else:
            num_columns = code.min(build.sub(I64(stage.num_results), first_column), I64(PANEL))
            code.loop(0, num_columns, finish_columns, step=lanes)
        if following is not None:
            assert is_whole, "rows of a next product are whole panels"
            following.stage.multiplier.end_pack(code, following.scratch.packed, row, first_column, PANEL)

    following = _packs_for(stage_code)
    code.loop(begin, end, finish_row)


def _packs_for(stage_code: StageCode) -> StageCode | None:
    """Return the stage that results are packed for; None if they go elsewhere."""
    stage = stage_code.stage
    return None if stage.keeps_results or stage.adds or stage.parts else stage_code.following


def _result_store(stage_code: StageCode, first_column: ir.Value) -> Callable[[ir.Value, ir.Value, ir.Value], None]:
    """Return a function (row, column of the panel, vector) that stores results where they go.

    `first_column` is the panel's. Results that are normed or weighted first wait in an array of their own, others are
    added to the stream, or are outputs, or are packed for the next stage. A panel lies in one of several outputs.
    """
    code, build, stage = stage_code.code, stage_code.code.build, stage_code.stage

    def offset_in(width: ir.Value, row: ir.Value, column: ir.Value, first: ir.Value = first_column) -> ir.Value:
        return build.add(build.add(build.mul(row, width), first), column)

    if stage.keeps_results:
        results = stage_code.scratch.results
        return lambda row, column, values: code.store_vector(
            values, results, offset_in(I64(stage.num_results), row, column)
        )
    if stage.adds:
        return lambda row, column, values: _add_to_stream(
            stage_code, offset_in(I64(stage.num_results), row, column), values
        )
    if following := _packs_for(stage_code):
        pack, packed = following.stage.multiplier.pack, following.scratch.packed
        return lambda row, column, values: pack(code, packed, row, build.add(first_column, column), values)
    # The output that the panel lies in, with its width and the panel's first column within it.
    output, width, first = stage_code.data.outputs[0], I64(stage.parts[0]), first_column
    begin = 0
    for part_output, part_width in zip(stage_code.data.outputs, stage.parts, strict=True):
        is_here = build.icmp_signed(">=", first_column, I64(begin))
        output, width = build.select(is_here, part_output, output), build.select(is_here, I64(part_width), width)
        first = build.select(is_here, build.sub(first_column, I64(begin)), first)
        begin += part_width

    def store_output(row: ir.Value, column: ir.Value, values: ir.Value) -> None:
        if stage_code.data.groups is not None:
            row = code.load_index(stage_code.data.groups.tables.choices, row)
        code.store_vector(values, output, offset_in(width, row, column, first))

    return store_output


def _add_to_stream(stage_code: StageCode, offset: ir.Value, values: ir.Value) -> None:
    """Emit stream[offset …] = old stream[offset …] + scale × values, each rounded to float32.

    The first stage that adds reads the stream that the chain was given, later ones read the new one.
    """
    code, build, stage, data = stage_code.code, stage_code.code.build, stage_code.stage, stage_code.data
    source = data.stream if any(earlier.adds for earlier in stage_code.stages[: stage_code.index]) else data.old_stream
    if stage.scale != 1.0:
        values = build.fmul(values, constant(values.type, stage.scale))
    old = code.load_vector(source, offset, F32, values.type.count)
    code.store_vector(build.fadd(old, values), data.stream, offset)


def add_normed_rows(stage_code: StageCode, unit: ir.Value) -> None:
    """Emit code that norms the results of a unit's rows and adds them to the stream."""
    results = stage_code.scratch.results
    stage_code.each_row(unit, stage_code.data.num_rows, lambda row: _add_normed_row(stage_code, results, row))


def _add_normed_row(stage_code: StageCode, results: ir.Value, row: ir.Value) -> None:
    """Emit code that norms a row of an array and adds it to the stream."""
    code, build, stage = stage_code.code, stage_code.code.build, stage_code.stage
    assert stage.norm_behind is not None, "it is called for stages that have one"
    start = build.mul(row, I64(stage.num_results))
    emit_row_norm(
        code,
        stage.norm_behind,
        stage.num_results,
        lambda element, lanes: code.load_vector(results, build.add(start, element), F32, lanes),
        stage_code.weights.norm_behind,
        lambda element, normed: _add_to_stream(stage_code, build.add(start, element), normed),
    )


def add_weighted_rows(stage_code: StageCode, unit: ir.Value) -> None:
    """Emit code that adds to the stream the weighted sums of the results of a unit's rows, normed if there is a norm.

    A row's results are added in the order of its choices, each product rounded to float32 before. The sum of a row that
    has chosen no expert is minus zero, which leaves the stream as it is unless it is normed.
    """
    code, build, stage, groups = stage_code.code, stage_code.code.build, stage_code.stage, stage_code.data.groups
    assert groups is not None, "it is a phase of stages that have experts"
    places, factors, results = groups.tables.places, groups.factors, stage_code.scratch.results
    lanes, sums = lanes_for(stage.num_results), stage_code.scratch.sums

    def add_row(row: ir.Value) -> None:
        """Add the weighted sum of one row's results to that row of the stream."""
        first_choice, start = build.mul(row, groups.num_per_row), build.mul(row, I64(stage.num_results))
        end_choice = build.add(first_choice, groups.num_per_row)

        def sum_at(element: ir.Value) -> ir.Value:
            """Return a vector of the row's weighted sum."""

            def add_result(choice: ir.Value, total: ir.Value) -> list[ir.Value]:
                place = code.load_index(places, choice)
                is_there = build.icmp_signed(">=", place, I64(0))
                offset = build.add(build.mul(code.max(place, I64(0)), I64(stage.num_results)), element)
                factor = code.broadcast(code.load(factors, choice, F32), lanes)
                weighted = build.fmul(code.load_vector(results, offset, F32, lanes), factor)
                return [build.select(is_there, build.fadd(total, weighted), total)]

            # Minus zero plus a number is that number, also if it is a zero.
            zeros = constant(ir.VectorType(F32, lanes), -0.0)
            return code.loop(first_choice, end_choice, add_result, carried=[zeros])[0]

        def add_sum(element: ir.Value) -> None:
            offset = build.add(start, element)
            if sums is None:
                _add_to_stream(stage_code, offset, sum_at(element))
            else:
                code.store_vector(sum_at(element), sums, offset)

        code.loop(0, stage.num_results, add_sum, step=lanes)
        if sums is not None:
            _add_normed_row(stage_code, sums, row)

    stage_code.each_row(unit, stage_code.data.num_rows, add_row)
