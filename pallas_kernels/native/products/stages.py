"""The products of a chain as their code knows them: what they are compiled for, and where their arrays lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llvmlite import ir

from ..llvm import I64, Code
from ..norms import NormKind
from .multiplier import Multiplier
from .panels import PANEL

ROWS_OF_UNIT = 4
"""Rows that a unit of work packs or norms."""


class HeadShape(NamedTuple):
    """What becomes of the heads in the first outputs of a stage: a norm of each head, then a rotation."""

    size: int
    """Lanes of a head."""
    num_rotated: int
    """Lanes that are rotated, the first ones of a head; 0 for none."""
    norms: tuple[NormKind | None, ...]
    """The norm of the heads in each of these outputs."""

    @property
    def num_vectors(self) -> int:
        """Return how many arrays there are for it: cosines and sines, and the vectors of the norms."""
        return 2 * (self.num_rotated > 0) + sum(norm.num_vectors for norm in self.norms if norm)

    @property
    def name(self) -> str:
        """Return it as part of a handler's name."""
        norms = (f"{norm.name}{norm.eps.hex()}" if norm else "plain" for norm in self.norms)
        return "_".join(["heads", str(self.size), str(self.num_rotated), *norms])


@dataclass(frozen=True)
class Stage:
    """What code is compiled for, of one product of a chain."""

    multiplier: Multiplier
    depth: int
    """K: the columns of the rows that are read."""
    num_results: int
    """Columns of the results: half of those of W if gates are among them."""
    parts: tuple[int, ...] = ()
    """Columns of each output array that the results are split into; empty if they are no outputs."""
    norm: NormKind | None = None
    """The norm of the rows that are read."""
    has_bias: bool = False
    activation: str | None = None
    is_gated: bool = False
    """W's columns are those of gates and then those that are gated: the results are activation(gate) × other."""
    norm_behind: NormKind | None = None
    """The norm of results before they are added to the stream."""
    heads: HeadShape | None = None
    """What becomes of the heads in the first outputs."""
    adds: bool = False
    """The results are added to the stream, which is also what the next product reads."""
    scale: float = 1.0
    """Factor of the results before they are added."""

    def array_shapes(self, num_rows: int) -> list[tuple[int, ...]]:
        """Return the shapes of the float32 arrays that a chain of `num_rows` rows takes behind the panels, in order.

        They are the bias, the vectors of both norms, the cosines and sines, and the vectors of the norms of heads.
        """
        shapes: list[tuple[int, ...]] = [(self.num_results * (2 if self.is_gated else 1),)] * self.has_bias
        for norm, size in ((self.norm, self.depth), (self.norm_behind, self.num_results)):
            shapes += [(size,)] * (norm.num_vectors if norm else 0)
        if self.heads is not None:
            shapes += [(num_rows, self.heads.num_rotated // 2)] * (2 if self.heads.num_rotated else 0)
            shapes += [(self.heads.size,)] * sum(norm.num_vectors for norm in self.heads.norms if norm)
        return shapes

    @property
    def num_panels(self) -> int:
        """Return the number of panels of results."""
        return -(-self.num_results // PANEL)

    @property
    def name(self) -> str:
        """Return the stage as part of a handler's name."""
        norms = [
            norm and f"{place}{norm.name}{norm.eps.hex()}"
            for place, norm in (("", self.norm), ("behind_", self.norm_behind))
        ]
        flags = [("bias", self.has_bias), ("gated", self.is_gated), ("adds", self.adds)]
        heads = self.heads and self.heads.name
        set_flags = (name for name, is_set in flags if is_set)
        words = [self.multiplier.name, *norms, self.activation, *set_flags, *self.parts, heads]
        scale = [] if self.scale == 1.0 else [self.scale.hex()]
        return "_".join([f"{self.depth}x{self.num_results}", *(str(word) for word in words if word), *scale])


class StageData(NamedTuple):
    """Addresses of one stage's arrays."""

    weight: ir.Value
    bias: ir.Value | None
    norm: list[ir.Value]
    norm_behind: list[ir.Value]
    """Vectors of both norms."""
    heads: list[ir.Value]
    """Cosines and sines, float32 [R, rotated lanes ÷ 2], if heads are rotated, then the vectors of their norms."""
    packed: ir.Value
    """The rows as the multiplier reads them."""
    results: ir.Value | None
    """float32 [R, results], if they are normed before they are added."""


class ChainData(NamedTuple):
    """Addresses of a chain's arrays, in the order of arguments and results."""

    num_threads: ir.Value
    num_rows: ir.Value
    rows: ir.Value
    old_stream: ir.Value | None
    """float32 [R, D], to which the first stage that adds adds."""
    stream: ir.Value | None
    """float32 [R, D]: the stream after that."""
    outputs: list[ir.Value]
    stages: list[StageData]


def chain_data(stages: Sequence[Stage], values: Sequence[ir.Value]) -> ChainData:
    """Return the values of a job by their names: the number of rows, and the addresses of arguments and results."""
    following: Iterator[ir.Value] = iter(values)

    def take(count: int) -> list[ir.Value]:
        return [next(following) for _ in range(count)]

    adds = any(stage.adds for stage in stages)

    def take_if(is_there: bool) -> ir.Value | None:
        return next(following) if is_there else None

    num_threads, num_rows, rows = take(3)
    old_stream = take_if(adds)
    weights = []
    for stage in stages:
        weight, bias = next(following), take_if(stage.has_bias)
        norms = [take(norm.num_vectors if norm else 0) for norm in (stage.norm, stage.norm_behind)]
        weights.append((weight, bias, norms, take(stage.heads.num_vectors if stage.heads else 0)))
    stream, outputs = take_if(adds), take(len(stages[-1].parts))
    data = []
    for stage, (weight, bias, (norm, norm_behind), heads) in zip(stages, weights, strict=True):
        packed, results = next(following), take_if(stage.norm_behind is not None)
        data.append(StageData(weight, bias, norm, norm_behind, heads, packed, results))
    return ChainData(num_threads, num_rows, rows, old_stream, stream, outputs, data)


def units_of_rows(code: Code, num_rows: ir.Value) -> ir.Value:
    """Return the number of units of `ROWS_OF_UNIT` rows."""
    return code.build.sdiv(code.build.add(num_rows, I64(ROWS_OF_UNIT - 1)), I64(ROWS_OF_UNIT))


@dataclass(frozen=True)
class StageCode:
    """One stage of a chain whose code is being written."""

    code: Code
    stages: Sequence[Stage]
    """All stages of the chain."""
    index: int
    """The number of this one."""
    data: ChainData

    @property
    def stage(self) -> Stage:
        return self.stages[self.index]

    @property
    def arrays(self) -> StageData:
        """Return the addresses of the stage's arrays."""
        return self.data.stages[self.index]

    @property
    def following(self) -> StageCode | None:
        """Return the stage behind this one; None behind the last."""
        is_last = self.index + 1 == len(self.stages)
        return None if is_last else StageCode(self.code, self.stages, self.index + 1, self.data)

    def each_row(self, unit: ir.Value, body: Callable[[ir.Value], None]) -> None:
        """Emit `body` for each row of a unit of `ROWS_OF_UNIT` rows; the last unit may have fewer."""
        code = self.code
        first_row = code.build.mul(unit, I64(ROWS_OF_UNIT))
        code.loop(first_row, code.min(code.build.add(first_row, I64(ROWS_OF_UNIT)), self.data.num_rows), body)
