"""Norms and rotations of the heads of queries and keys, in the outputs of a product."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from llvmlite import ir

from ..llvm import F32, I64, Code, lanes_for
from ..norms import NormKind, emit_row_norm
from .stages import StageCode


class _Part(NamedTuple):
    """An output whose heads are normed and rotated."""

    output: ir.Value
    width: int
    norm: NormKind | None
    vectors: list[ir.Value]
    """Addresses of the norm's vectors."""


def finish_heads(stage_code: StageCode, unit: ir.Value) -> None:
    """Emit code that norms and rotates each head of the first outputs, where they lie, in the rows of a unit."""
    code, build, stage = stage_code.code, stage_code.code.build, stage_code.stage
    heads, arrays = stage.heads, list(stage_code.weights.heads)
    assert heads is not None, "it is a phase of stages that have heads"
    rotation = [arrays.pop(0), arrays.pop(0)] if heads.num_rotated else []
    parts = []
    # Outputs behind the first ones, such as values, stay as they are.
    for output, width, norm in zip(stage_code.data.outputs, stage.parts, heads.norms, strict=False):
        parts.append(_Part(output, width, norm, [arrays.pop(0) for _ in range(norm.num_vectors if norm else 0)]))

    def finish_head(part: _Part, row: ir.Value, first_lane: ir.Value) -> None:
        start = build.add(build.mul(row, I64(part.width)), first_lane)
        if part.norm is not None:
            emit_row_norm(
                code,
                part.norm,
                heads.size,
                lambda lane, lanes: code.load_vector(part.output, build.add(start, lane), F32, lanes),
                part.vectors,
                lambda lane, normed: code.store_vector(normed, part.output, build.add(start, lane)),
            )
        if rotation:
            _rotate(code, part.output, start, row, rotation, heads.num_rotated // 2)

    def finish_row(row: ir.Value) -> None:
        for part in parts:
            code.loop(0, part.width, partial(finish_head, part, row), step=heads.size)

    stage_code.each_row(unit, stage_code.data.num_rows, finish_row)


def _rotate(
    code: Code, output: ir.Value, start: ir.Value, row: ir.Value, rotation: Sequence[ir.Value], num_pairs: int
) -> None:
    """Emit the rotation of a head's lanes from element `start` of an output on, by the pairs (i, i + `num_pairs`).

    `rotation` are the addresses of cosines and sines, [R, pairs], of which a head of row `row` takes its row.
    """
    build, lanes = code.build, lanes_for(num_pairs)
    angles = build.mul(row, I64(num_pairs))

    def rotate(lane: ir.Value) -> None:
        cos, sin = (code.load_vector(array, build.add(angles, lane), F32, lanes) for array in rotation)
        offsets = build.add(start, lane), build.add(start, build.add(lane, I64(num_pairs)))
        first, second = (code.load_vector(output, offset, F32, lanes) for offset in offsets)
        rotated = (
            build.fsub(build.fmul(first, cos), build.fmul(second, sin)),
            build.fadd(build.fmul(second, cos), build.fmul(first, sin)),
        )
        for offset, values in zip(offsets, rotated, strict=True):
            code.store_vector(values, output, offset)

    code.loop(0, num_pairs, rotate, step=lanes)
