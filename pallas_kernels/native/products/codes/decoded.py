"""Products with quantized matrices: a panel is decoded into the level-2 cache, and multiplied as any other.

Its numbers are decoded once for all rows of a unit of work. So a result has the bits of the product with the decoded
matrix, for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir

from ....code_formats import CodeFormat
from ...llvm import F32, I8, I32, I64, Code
from ..multiplier import Batch, Batches, FloatMultiplier, Panel, WordSource
from ..panels import DEPTH, PANEL
from .decoder import Decoder, Steps, Vectors, emit_decode
from .panels import VECTOR_COLUMNS, block_layout
from .stored_parts import StoredParts


class CodedTools(NamedTuple):
    """What a unit of work has for one panel."""

    multiplier: Any
    """What the multiplier of decoded panels has for it."""
    numbers: ir.Value
    """Address of the decoded panel."""


@dataclass(frozen=True)
class CodedMultiplier:
    """Decodes panels and multiplies them by another multiplier. See `Multiplier` for the methods."""

    decoded: FloatMultiplier
    stored: StoredParts
    vectors: Vectors

    @property
    def name(self) -> str:
        return f"{self.decoded.name}_{self.stored.name}"

    @property
    def max_batch_rows(self) -> int:
        return self.decoded.max_batch_rows

    @property
    def row_alignment(self) -> int:
        return self.decoded.row_alignment

    @property
    def batches_per_block(self) -> int:
        return self.decoded.batches_per_block

    @property
    def num_depth_blocks(self) -> int:
        return self.decoded.num_depth_blocks

    @property
    def num_task_steps(self) -> int:
        return self.decoded.num_task_steps

    @property
    def pads_depth(self) -> bool:
        return self.decoded.pads_depth

    def packed_shape(self, num_rows: int) -> tuple[tuple[int, ...], Any]:
        return self.decoded.packed_shape(num_rows)

    def pack(self, code: Code, rows: ir.Value, row: ir.Value, column: ir.Value, values: ir.Value) -> None:
        self.decoded.pack(code, rows, row, column, values)

    def end_pack(self, code: Code, rows: ir.Value, row: ir.Value, begin: ir.Value, num_values: int) -> None:
        self.decoded.end_pack(code, rows, row, begin, num_values)

    def num_batches(self, code: Code, num_rows: ir.Value) -> ir.Value:
        return self.decoded.num_batches(code, num_rows)

    def batch(self, code: Code, batches: Batches, index: ir.Value, num_rows: ir.Value) -> Batch:
        return self.decoded.batch(code, batches, index, num_rows)

    def panel(self, code: Code, panels: ir.Value, index: ir.Value) -> ir.Value:
        return self.stored.panel(code, panels, index)

    def begin(self, code: Code) -> CodedTools:
        # A block of K may begin and end within steps.
        num_steps, num_blocks = self.stored.depth // DEPTH, self.decoded.num_depth_blocks
        steps_per_block = num_steps if num_blocks == 1 else -(-num_steps // num_blocks) + 2
        return CodedTools(self.decoded.begin(code), code.allocate(I8, steps_per_block * self._step_bytes))

    @property
    def _step_bytes(self) -> int:
        """Return the bytes of a decoded step."""
        return DEPTH * PANEL * (2 if self.vectors.in_pairs else 4)

    def multiply(self, code: Code, rows: ir.Value, panel: Panel, batch: Batch, block: ir.Value, sums: ir.Value) -> None:
        """See `Multiplier.multiply`. The first batch decodes the panel's block of K.

        Where the multiplier takes steps, they are decoded one by one, and stay in the level-1 cache. Where it takes
        words, these stay in registers.
        """
        build, tools = code.build, panel.tools
        decoded = panel._replace(begin=tools.numbers, ahead=None, tools=tools.multiplier)

        def multiply_whole() -> None:
            values = self.decoded.depth_block(code, block)
            first_step = build.udiv(values.begin, I64(DEPTH))
            end_step = build.udiv(build.add(values.end, I64(DEPTH - 1)), I64(DEPTH))
            # Where the whole panel would begin.
            begin = build.gep(tools.numbers, [build.mul(build.neg(first_step), I64(self._step_bytes))])
            with build.if_then(build.icmp_signed("==", batch.number, I64(0))):
                self._decode(code, panel, begin, Steps(first_step, end_step, I64(-1)))
            self.decoded.multiply(code, rows, decoded._replace(begin=begin), batch, block, sums)

        def provide_step(step: ir.Value) -> None:
            self._decode(code, panel, tools.numbers, Steps(step, build.add(step, I64(1)), I64(1)))

        takes_steps = self.decoded.takes_steps(code, batch)
        if takes_steps is None:
            multiply_whole()
            return
        with build.if_else(takes_steps) as (by_steps, whole):
            with by_steps:
                if self.decoded.takes_words:
                    self._multiply_words(code, rows, panel, batch, block, sums)
                else:
                    self.decoded.multiply(code, rows, decoded._replace(provide_step=provide_step), batch, block, sums)
            with whole:
                multiply_whole()

    def end(self, code: Code) -> None:
        self.decoded.end(code)

    def _multiply_words(
        self, code: Code, rows: ir.Value, panel: Panel, batch: Batch, block: ir.Value, sums: ir.Value
    ) -> None:
        """Emit the product with words that are decoded as they are multiplied, by the format of the panel's part."""

        def multiply(code_format: CodeFormat) -> None:
            assert panel.ahead is not None
            if code_format.is_in_quads:
                source = WordSource(DEPTH, partial(self._words_of_step, code, code_format, panel))
            else:
                decoder = Decoder(code, block_layout(code_format), self.vectors)
                source = WordSource(code_format.run_len, partial(decoder.words, panel.begin, ahead=panel.ahead))
            self.decoded.multiply(code, rows, panel._replace(words=source), batch, block, sums)

        self.stored.by_format(code, panel.index, multiply)

    def _words_of_step(
        self, code: Code, code_format: CodeFormat, panel: Panel, step: ir.Value
    ) -> Callable[[ir.Value], list[ir.Value]]:
        """Emit the decoding of a step, which stays in the level-1 cache; return what emits the loads of a word."""
        assert panel.ahead is not None
        build, numbers, word_type = code.build, panel.tools.numbers, I32 if self.vectors.in_pairs else F32
        steps = Steps(step, build.add(step, I64(1)), I64(0))
        emit_decode(code, code_format, self.vectors, panel.begin, numbers, steps, panel.ahead)

        def words_of(word: ir.Value) -> list[ir.Value]:
            offsets = (build.add(build.mul(word, I64(PANEL)), I64(half * VECTOR_COLUMNS)) for half in range(2))
            return code.load_vectors(numbers, offsets, word_type, VECTOR_COLUMNS)

        return words_of

    def _decode(self, code: Code, panel: Panel, numbers: ir.Value, steps: Steps) -> None:
        """Emit the decoding of steps of a panel, by the format of the part that it is in."""

        def decode(code_format: CodeFormat) -> None:
            assert panel.ahead is not None
            emit_decode(code, code_format, self.vectors, panel.begin, numbers, steps, panel.ahead)

        self.stored.by_format(code, panel.index, decode)
