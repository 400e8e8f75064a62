"""Products by vectors: for a batch of rows, all sums with 32 columns stay in registers while k goes over a block of K.

    for each k:   one value of each row × 32 values of the panel

In float32 they become part of the sums in memory every `WORDS_PER_SUM` values of k. Rows lie one after the other,
[R, K], in the weight's dtype. In bfloat16 a word is a pair of values along K, both of which are multiplied at once
(AVX512-BF16), or one after the other as float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from llvmlite import ir

from ..linked_calls import call_linked
from ..llvm import F32, I32, I64, LONG_LANES, Code, constant
from .batches import MAX_SPECIALIZED_ROWS, EvenBatches
from .multiplier import Batch, DepthBlock, Panel, WordSource
from .panels import DEPTH, PANEL

VECTORS = 2
"""Vectors of sums per row that stay in registers."""
MAX_WORDS_PER_BLOCK = 768
"""Words of a column per block at most: this part of a panel stays in the level-2 cache while all rows use it."""
WORDS_PER_SUM = 96
"""Products of float32 that are added one by one, from zero; these partial sums are then added to each other. Beside one
product that is large, as in rows of special tokens, each later addition loses bits: so only those of its partial sum
do. Sums of 64 cost up to 4 % of a product's time, of 96 or 128 about 2 %."""
PREFETCH_WORDS = 32 * PANEL
"""Distance in words from what is read in a panel to what is prefetched: hardware prefetchers do not reach as far."""
WORDS_TOGETHER = 8
"""Words of a column whose products are written one behind the other. Left to LLVM they were as many as nine, whose
prefetches come at once and hold up the loads: a step of one row took 1.13 times as long."""


class _BatchArguments(NamedTuple):
    """The arguments of a function that multiplies a batch by words of a panel."""

    rows: ir.Value
    """Address of the batch's first row."""
    panel: ir.Value
    """Address of the panel, if it is in memory."""
    sums: ir.Value
    """Address of the sums, float32 [rows, 32]."""
    begin: ir.Value
    end: ir.Value
    """The words `begin` … `end` − 1 of K are multiplied."""


@dataclass(frozen=True)
class VectorMultiplier(EvenBatches):
    """Multiplies by vectors. See `Multiplier` for the methods."""

    depth: int
    """K."""
    is_bf16: bool
    has_avx512: bool
    has_avx512_bf16: bool
    rows_per_batch: int | None

    @property
    def name(self) -> str:
        return f"{self._lanes_name}x{'any' if self.rows_per_batch is None else self.rows_per_batch}"

    @property
    def _lanes_name(self) -> str:
        """Return a name of what is multiplied in a vector."""
        words = "pairs" if self.is_bf16 and self.has_avx512_bf16 else "bf16" if self.is_bf16 else "f32"
        return f"{words}x{self.lanes}"

    @property
    def lanes(self) -> int:
        """Return the float32 lanes of a vector."""
        return LONG_LANES if self.has_avx512 else LONG_LANES // 2

    @property
    def num_words(self) -> int:
        """Return the words of a packed row: float32, or pairs of bfloat16 with K padded as in panels."""
        return -(-self.depth // DEPTH) * DEPTH // 2 if self.is_bf16 else self.depth

    def depth_block(self, code: Code, block: ir.Value) -> DepthBlock:
        values_per_word = 2 if self.is_bf16 else 1
        return DepthBlock(*(code.build.mul(word, I64(values_per_word)) for word in self._words_of_block(code, block)))

    def _words_of_block(self, code: Code, block: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the first word of a column in a block of K, and the one behind its last."""
        block_words = -(-self.num_words // (self.num_depth_blocks * WORDS_TOGETHER)) * WORDS_TOGETHER
        begin = code.build.mul(block, I64(block_words))
        return begin, code.min(code.build.add(begin, I64(block_words)), I64(self.num_words))

    def takes_steps(self, code: Code, batch: Batch) -> ir.Value | None:
        """See `FloatMultiplier.takes_steps`: an only batch takes words, of few rows if any number is compiled for."""
        if not self.takes_words:
            return None
        is_only = code.build.icmp_signed("==", batch.num_batches, I64(1))
        if self.rows_per_batch is not None:
            return is_only
        return code.build.and_(is_only, code.build.icmp_signed("<=", batch.num_rows, I64(MAX_SPECIALIZED_ROWS)))

    @property
    def takes_words(self) -> bool:
        """See `FloatMultiplier.takes_words`: where all columns are multiplied at once, by an instruction for a word."""
        return VECTORS * self.lanes == PANEL and (self.has_avx512_bf16 or not self.is_bf16)

    @property
    def num_depth_blocks(self) -> int:
        return -(-self.num_words // MAX_WORDS_PER_BLOCK)

    @property
    def pads_depth(self) -> bool:
        return self.is_bf16

    def packed_shape(self, num_rows: int) -> tuple[tuple[int, ...], Any]:
        if self.is_bf16:
            return (num_rows, 2 * self.num_words), jnp.bfloat16
        return (num_rows, self.num_words), jnp.float32

    def pack(self, code: Code, rows: ir.Value, row: ir.Value, column: ir.Value, values: ir.Value) -> None:
        build = code.build
        if self.is_bf16:
            offset = build.add(build.mul(row, I64(2 * self.num_words)), column)
            is_whole = self.has_avx512_bf16 and values.type.count == LONG_LANES
            code.store_rounded(values, rows, offset, has_avx512_bf16=is_whole)
        else:
            code.store_vector(values, rows, build.add(build.mul(row, I64(self.num_words)), column))

    def end_pack(self, code: Code, rows: ir.Value, row: ir.Value, begin: ir.Value, num_values: int) -> None:
        """See `Multiplier.end_pack`: values are packed as they come."""

    def panel(self, code: Code, panels: ir.Value, index: ir.Value) -> ir.Value:
        return code.build.gep(panels, [code.build.mul(index, I64(4 * PANEL * self.num_words))])

    def begin(self, code: Code) -> None:
        """See `Multiplier.begin`: vectors need nothing."""

    def end(self, code: Code) -> None:
        """See `Multiplier.end`: vectors need nothing."""

    def multiply(self, code: Code, rows: ir.Value, panel: Panel, batch: Batch, block: ir.Value, sums: ir.Value) -> None:
        """See `Multiplier.multiply`. A handler is compiled for the two sizes of batches that its rows are cut into, or
        calls functions for all sizes of batches."""
        begin, end = self._words_of_block(code, block)
        arguments = _BatchArguments(self._row_address(code, rows, batch.first_row), panel.begin, sums, begin, end)

        def multiply_rows(num_rows: int) -> None:
            self._multiply_rows(code, num_rows, arguments, panel.words)

        if self.rows_per_batch is None and panel.words is None:
            self.by_rows(code, batch, self.max_batch_rows, lambda num_rows: self._call(code, num_rows, arguments))
        else:
            self.by_rows(code, batch, MAX_SPECIALIZED_ROWS, multiply_rows)

    def _row_address(self, code: Code, rows: ir.Value, row: ir.Value) -> ir.Value:
        """Return the address of a packed row."""
        return code.build.gep(rows, [code.build.mul(row, I64(4 * self.num_words))])

    def _call(self, code: Code, num_rows: int, arguments: _BatchArguments) -> None:
        """Emit a call of the function that multiplies a batch of `num_rows` rows.

        It is compiled once for a number of rows and of words, for all products.
        """
        name = f"jpaged_vectors_{self._lanes_name}_{self.num_words}_{num_rows}"

        def emit(new_code: Code, *values: ir.Value) -> None:
            self._multiply_rows(new_code, num_rows, _BatchArguments(*values), None)

        call_linked(code, name, [*arguments], emit)

    def _multiply_rows(self, code: Code, num_rows: int, arguments: _BatchArguments, words: WordSource | None) -> None:
        """Emit the products of a batch of `num_rows` rows; `words` are those of the panel, if it is not in memory."""
        for first_column in range(0, PANEL, VECTORS * self.lanes):
            self._multiply_columns(code, num_rows, arguments, words, first_column)

    def _multiply_columns(
        self, code: Code, num_rows: int, arguments: _BatchArguments, words: WordSource | None, first_column: int
    ) -> None:
        """Multiply words begin … end − 1 of K for the batch's rows and `VECTORS` vectors of the panel's columns.

        They are added to `sums`, which is set to zero first if `begin` is 0. Meanwhile the sums are in registers, one
        vector per row and v < `VECTORS`: in bfloat16 those of all words, which start at `sums`, in float32 partial sums
        of up to `WORDS_PER_SUM` words, which start at zero. A panel in memory is also prefetched, 32 of its rows ahead;
        beyond its end this is harmless.
        """
        build, add, lanes = code.build, code.build.add, self.lanes
        (rows, panel, sums, begin, end), word_type = arguments, I32 if self.is_bf16 else F32
        starts = [I64(i * self.num_words) for i in range(num_rows)]
        sum_offsets = [I64(i * PANEL + first_column + v * lanes) for i in range(num_rows) for v in range(VECTORS)]

        def add_products(k: ir.Value, vectors: list[ir.Value], totals: Sequence[ir.Value]) -> list[ir.Value]:
            """Return the sums plus the products of word k of each row and of each column: an outer product."""
            factors = (code.load(rows, add(start, k), word_type) for start in starts)
            return code.add_outer(factors, vectors, totals, has_avx512_bf16=self.is_bf16 and self.has_avx512_bf16)

        def add_stored(k: ir.Value, *totals: ir.Value) -> list[ir.Value]:
            word_offset = add(build.mul(k, I64(PANEL)), I64(first_column))
            offsets = (add(word_offset, I64(v * lanes)) for v in range(VECTORS))
            vectors = code.load_vectors(panel, offsets, word_type, lanes)
            code.prefetch(panel, add(word_offset, I64(PREFETCH_WORDS)), word_type, VECTORS * lanes)
            return add_products(k, vectors, totals)

        def add_words(begin: ir.Value, end: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            """Return the sums plus the products of words `begin` … `end` − 1, which are added one by one."""
            if words is None:
                return self._loop_of_words(code, begin, end, add_stored, totals)
            begin_run, run_words = words.begin_run, words.num_values // (2 if self.is_bf16 else 1)

            def add_run(run: ir.Value, *totals: ir.Value) -> list[ir.Value]:
                """Return the sums plus the products of a run of words, which are made one by one."""
                words_of, first_word = begin_run(run), build.mul(run, I64(run_words))
                # The words that are asked for may begin and end within a run.
                words_here = code.max(begin, first_word), code.min(end, add(first_word, I64(run_words)))
                return code.loop(
                    *words_here,
                    lambda k, *totals: add_products(k, words_of(build.sub(k, first_word)), totals),
                    carried=totals,
                )

            end_run = build.udiv(add(end, I64(run_words - 1)), I64(run_words))
            return code.loop(build.udiv(begin, I64(run_words)), end_run, add_run, carried=totals)

        zeros = [constant(ir.VectorType(F32, lanes), 0.0)] * len(sum_offsets)

        def store_sums(totals: Sequence[ir.Value]) -> None:
            for sum_offset, total in zip(sum_offsets, totals, strict=True):
                code.store_vector(total, sums, sum_offset)

        # Before the first block `sums` holds anything.
        with build.if_then(build.icmp_signed("==", begin, I64(0))):
            store_sums(zeros)

        if self.is_bf16:
            store_sums(add_words(begin, end, code.load_vectors(sums, sum_offsets, F32, lanes)))
            return

        def add_partial_sums(word: ir.Value) -> None:
            """Add the products of up to `WORDS_PER_SUM` words from `word` on to `sums`."""
            partial_sums = add_words(word, code.min(end, add(word, I64(WORDS_PER_SUM))), zeros)
            totals = code.load_vectors(sums, sum_offsets, F32, lanes)
            store_sums([build.fadd(*pair) for pair in zip(totals, partial_sums, strict=True)])

        code.loop(begin, end, add_partial_sums, step=WORDS_PER_SUM)

    def _loop_of_words(
        self, code: Code, begin: ir.Value, end: ir.Value, body: Callable[..., list[ir.Value]], carried: list[ir.Value]
    ) -> list[ir.Value]:
        """Emit `carried = body(k, *carried)` for the words of a block of K, and return the last carried values.

        A block begins at a multiple of `WORDS_TOGETHER`; only the last one may end elsewhere.
        """

        def run_several(k: ir.Value, *values: ir.Value) -> list[ir.Value]:
            for number in range(WORDS_TOGETHER):
                values = tuple(body(code.build.add(k, I64(number)), *values))
            return list(values)

        num_rest = self.num_words % WORDS_TOGETHER
        if not num_rest:
            return code.loop(begin, end, run_several, step=WORDS_TOGETHER, carried=carried)
        whole_end = code.build.and_(end, I64(-WORDS_TOGETHER))
        values = code.loop(begin, whole_end, run_several, step=WORDS_TOGETHER, carried=carried)
        return code.loop(whole_end, end, body, carried=values)
