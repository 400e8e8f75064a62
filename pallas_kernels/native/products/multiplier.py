"""What the code of a product needs of a way to multiply: vectors, or a matrix unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from llvmlite import ir

from ..llvm import Code

StepTask = Callable[[ir.Value], None]
"""Emits what else is done in a step of a product, of which it gets the number."""


class WordSource(NamedTuple):
    """What makes the words of a panel as they are multiplied, in registers."""

    num_values: int
    """Values of K in a run, which is made together."""
    begin_run: Callable[[ir.Value], Callable[[ir.Value], list[ir.Value]]]
    """Emits what the words of a run share, and returns what emits the vectors of a word, by its number in the run."""


class Batch(NamedTuple):
    """Rows that are multiplied together by a panel. Each field is an int64."""

    index: ir.Value
    """Its number if all packed rows are cut into batches of the most rows, see `Multiplier.row_alignment`."""
    first_row: ir.Value
    num_rows: ir.Value
    number: ir.Value
    """Its number among the `num_batches` batches of its unit of work, from 0 on."""
    num_batches: ir.Value


class Batches(NamedTuple):
    """The batches `begin` … `end` − 1 of a unit of work, int64."""

    begin: ir.Value
    end: ir.Value

    def batch(self, code: Code, index: ir.Value, first_row: ir.Value, num_rows: ir.Value) -> Batch:
        """Return one of the batches."""
        build = code.build
        return Batch(index, first_row, num_rows, build.sub(index, self.begin), build.sub(self.end, self.begin))


class Panel(NamedTuple):
    """A panel that a unit of work multiplies, and what is read after it."""

    begin: ir.Value
    """Its address."""
    ahead: ir.Value | None
    """The address of the panel that this thread will probably take next, which is prefetched; None to prefetch none."""
    tools: Any
    """What the multiplier's `begin` has returned for this panel."""
    index: ir.Value
    """Its number in the matrix."""
    provide_step: StepTask | None = None
    """Emits what writes a step of the panel to one of two places from `begin` on, which are used in turn: step k to
    place k modulo 2. None for a panel that is there as a whole. See `FloatMultiplier.takes_steps`."""
    words: WordSource | None = None
    """What makes the panel's words; None for a panel that is in memory. See `FloatMultiplier.takes_words`."""
    step_task: StepTask | None = None
    """Emitted in each step over K of each batch, unless a unit of work has one batch only."""


class DepthBlock(NamedTuple):
    """Values `begin` … `end` − 1 of K, int64. The end may lie beyond K, where K is padded."""

    begin: ir.Value
    end: ir.Value


class Multiplier(Protocol):
    """Multiplies batches of rows by a panel of 32 columns, each result in one order whatever rows are beside it.

    Rows are read in a form of the multiplier's own (packed rows). Multipliers compare equal if they emit equal code.
    """

    @property
    def name(self) -> str:
        """Return the multiplier as part of a handler's name."""

    @property
    def max_batch_rows(self) -> int:
        """Return the largest number of rows of a batch."""

    @property
    def row_alignment(self) -> int:
        """Return a power of two: the packed rows of one of several matrices begin at a multiple of it."""

    @property
    def batches_per_block(self) -> int:
        """Return how many batches a unit of work multiplies: their packed rows stay in the level-2 cache."""

    @property
    def num_depth_blocks(self) -> int:
        """Return into how many blocks K is cut."""

    @property
    def num_task_steps(self) -> int:
        """Return in how many steps `multiply` goes over K and emits `Panel.step_task`; 0 if it never does."""

    @property
    def pads_depth(self) -> bool:
        """Return whether packed rows are padded to a multiple of 32 values, which must be zeros."""

    def packed_shape(self, num_rows: int) -> tuple[tuple[int, ...], Any]:
        """Return shape and dtype of an array that holds `num_rows` packed rows."""

    def pack(self, code: Code, rows: ir.Value, row: ir.Value, column: ir.Value, values: ir.Value) -> None:
        """Emit the store of a float32 vector into a packed row, from value `column` on; `rows` is their address."""

    def end_pack(self, code: Code, rows: ir.Value, row: ir.Value, begin: ir.Value, num_values: int) -> None:
        """Emit what comes after the stores of values `begin` … `begin` + `num_values` − 1 of a packed row.

        Both are multiples of 32, or these are all values of the row.
        """

    def num_batches(self, code: Code, num_rows: ir.Value) -> ir.Value:
        """Return the number of batches of `num_rows` rows."""

    def batch(self, code: Code, batches: Batches, index: ir.Value, num_rows: ir.Value) -> Batch:
        """Return a batch of a unit; there are `num_rows` rows in all."""

    def panel(self, code: Code, panels: ir.Value, index: ir.Value) -> ir.Value:
        """Return the address of a panel."""

    def begin(self, code: Code) -> Any:
        """Emit what comes before the products of a unit; return what `multiply` needs of it, as `Panel.tools`."""

    def multiply(self, code: Code, rows: ir.Value, panel: Panel, batch: Batch, block: ir.Value, sums: ir.Value) -> None:
        """Emit the products of a batch with block `block` of a panel's K, added to `sums`: float32 [rows, 32].

        The sums start at zero in block 0.
        """

    def end(self, code: Code) -> None:
        """Emit what comes after the products of a unit."""


class FloatMultiplier(Multiplier, Protocol):
    """Multiplies by a panel of floats, which may be made as it is multiplied."""

    def depth_block(self, code: Code, block: ir.Value) -> DepthBlock:
        """Return the values of K that block `block` of a panel has."""

    def takes_steps(self, code: Code, batch: Batch) -> ir.Value | None:
        """Return whether `multiply` takes a panel step by step for this batch, 32 values of K each; None for never.

        Such a batch is the only one of its unit, and needs each step once.
        """

    @property
    def takes_words(self) -> bool:
        """Return whether `multiply` takes the words of such a batch one by one, by `Panel.words`, and no steps."""
