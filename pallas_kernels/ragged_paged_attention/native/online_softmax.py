"""The online softmax of a tile's queries in native code: scores become weights, relative to the maximum so far.

    scores [rows, slots] ──▶ weights [rows, slots]      a row of both for each query that is computed at a time
                   running maximum, weight sum          of each query of the tile

Scores are in units of ln 2, so that weights are powers of two. Source: Milakov & Gimelshein 2018, arXiv:1805.02867.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import NamedTuple

from llvmlite import ir

from ...native.llvm import (
    EXP2_TERMS,
    EXP2_TERMS_FOR_BF16,
    F32,
    I32,
    I64,
    Code,
    constant,
    lanes_for,
)
from ..xla.softmax import INITIAL_MAX
from .shape import Shape

SLOTS_BESIDE = 64
"""Slots among whose weights four pieces of other code stand."""


class SlotRange(NamedTuple):
    """Consecutive slots `begin` … `end` − 1 of a block of pages, int64 values; none if `end` ≤ `begin`."""

    begin: ir.Value
    end: ir.Value


class OnlineSoftmax:
    """Scores and weights of the queries that are computed at a time, and the state of all queries of a tile.

    The value sums of the queries are the caller's: they are only rescaled here.
    """

    def __init__(
        self,
        code: Code,
        shape: Shape,
        *,
        num_queries: int,
        num_rows: int,
        score_stride: int,
        weight_stride: int,
        value_sums: ir.Value,
    ) -> None:
        """Emit the allocation of `num_rows` rows of scores and of weights, and of the state of `num_queries` queries.

        Rows are `score_stride` float32 numbers and `weight_stride` words apart. `value_sums` is the address of the
        queries' sums, float32 [queries, H].
        """
        self.code, self.shape = code, shape
        self.slot_lanes, self.head_lanes = lanes_for(shape.page_size), lanes_for(shape.head_size)
        self.score_stride, self.weight_stride = score_stride, weight_stride
        self.has_rounding = shape.is_bf16_packed and shape.has_bf16_instructions(self.slot_lanes)
        """Whether the processor has instructions that round vectors of weights."""
        self.vectors_at_once = 2 if self.has_rounding and shape.page_size % (2 * self.slot_lanes) == 0 else 1
        """Vectors of a query's weights that are stored together."""
        self.value_sums = value_sums
        self.scores = code.allocate(F32, num_rows * score_stride)
        """Scores of a block of pages, and in float32 also the weights that replace them."""
        self.weights = code.allocate(I32, num_rows * weight_stride) if shape.is_bf16_packed else self.scores
        if shape.page_size % 2 and shape.is_bf16_packed:
            # The upper half of a query's last word of weights is never written, but is multiplied: it must be 0.
            code.loop(0, num_rows * weight_stride, lambda word: code.store(I32(0), self.weights, word))
        self.running_max = code.allocate(F32, num_queries)
        self.weight_sums = code.allocate(F32, num_queries * self.slot_lanes)
        """Each query's sum of weights, lane by lane: the lanes are added at the end."""

    def start(self, query: ir.Value, sink: ir.Value | None) -> None:
        """Emit the start of a query's state: a finite minimum as its maximum, and a weight sum of 0.

        The logit of an attention sink, if there is one, is the first maximum; its weight is 1.
        """
        self.code.store(constant(F32, INITIAL_MAX) if sink is None else sink, self.running_max, query)
        # A sink's weight is in a single lane.
        first_sum = [1.0 if sink is not None and lane == 0 else 0.0 for lane in range(self.slot_lanes)]
        self._store_lane_sums(ir.Constant(ir.VectorType(F32, self.slot_lanes), first_sum), query)

    def weight_sum(self, query: ir.Value) -> ir.Value:
        """Return a query's sum of weights; 0 if it has attended to no key and has no sink."""
        return self.code.reduce(self._lane_sums(query), self.code.build.fadd)

    def update(
        self,
        queries: Sequence[ir.Value],
        score_rows: Sequence[ir.Value],
        visible: Sequence[SlotRange],
        end_slot: ir.Value,
    ) -> None:
        """Emit one step of the online softmax for some queries at once: a block's scores become weights.

        Query `queries[j]` of the tile has its scores and its weights, [rows, slots], in row `score_rows[j]`. Scores are
        capped first if the layer has a soft cap. weight[z] = 2^(score[z] − new maximum) for slots z < `end_slot`, and
        0 for a slot out of `visible[j]`, which the query must not attend to. If a maximum has grown, weight sum and
        value sums of its query are multiplied by 2^(old − new maximum). Then the weights are added to the weight sum.
        The block's values are added by the caller.

        A maximum, a sum or an exponential waits for its own steps one after the other: those of several queries fill
        these waits, and each query's are the same as alone. Scores are only masked from the first vector on that holds
        a slot which some query must not see.
        """
        code, build, lanes = self.code, self.code.build, self.slot_lanes
        begins, ends = zip(*visible, strict=True)
        has_all_begun = build.icmp_signed("<=", reduce(code.max, begins), I64(0))
        first_hidden = build.select(has_all_begun, code.max(reduce(code.min, ends, end_slot), I64(0)), I64(0))
        rows = [ScoreRow(self, row, slots) for row, slots in zip(score_rows, visible, strict=True)]
        with build.if_else(build.icmp_signed("==", first_hidden, end_slot)) as (all_visible, some_hidden):
            with all_visible:
                self._update_rows(queries, rows, end_slot, end_slot)
            with some_hidden:
                first_masked = build.sub(first_hidden, build.srem(first_hidden, I64(lanes * self.vectors_at_once)))
                self._update_rows(queries, rows, first_masked, end_slot)

    def update_whole(
        self,
        queries: Sequence[ir.Value],
        score_rows: Sequence[ir.Value],
        num_slots: int,
        beside: Callable[[ir.Value, int], None],
    ) -> None:
        """Emit what `update` emits for queries that see all of `num_slots` slots, with other code in between.

        That is `beside(slot, i)` for i = 0 … 3, spread among the weights of `SLOTS_BESIDE` slots from `slot` on.
        """
        whole = SlotRange(I64(0), I64(num_slots))
        rows = [ScoreRow(self, row, whole) for row in score_rows]
        self._update_rows(queries, rows, whole.end, whole.end, beside)

    def _update_rows(
        self,
        queries: Sequence[ir.Value],
        rows: Sequence[ScoreRow],
        first_masked: ir.Value,
        end_slot: ir.Value,
        beside: Callable[[ir.Value, int], None] | None = None,
    ) -> None:
        """Emit what `update` emits; scores are masked from slot `first_masked` on, where vectors at once begin."""
        code, build, lanes = self.code, self.code.build, self.slot_lanes
        span = lanes * self.vectors_at_once

        def each_vector(step: Callable[..., ir.Value], carried: Sequence[ir.Value], span: int) -> Sequence[ir.Value]:
            """Emit `step(row, slot, the row's value, has_mask)` for each `span` slots; return the last values."""

            def each_row(slot: ir.Value, *values: ir.Value, has_mask: bool) -> list[ir.Value]:
                return [step(row, slot, value, has_mask) for row, value in zip(rows, values, strict=True)]

            carried = code.loop(0, first_masked, partial(each_row, has_mask=False), step=span, carried=carried)
            if first_masked is end_slot:
                return carried
            return code.loop(first_masked, end_slot, partial(each_row, has_mask=True), step=span, carried=carried)

        def add_weights_beside(first_slot: ir.Value, *sums: ir.Value) -> list[ir.Value]:
            """Return the sums of the rows with the weights of `SLOTS_BESIDE` slots, emitted among other code."""
            assert beside is not None
            new_sums = list(sums)
            parts = [(slot, i) for slot in range(0, SLOTS_BESIDE, span) for i in range(len(rows))]
            for number, (slot, i) in enumerate(parts, start=1):
                new_sums[i] = rows[i].add_weights(build.add(first_slot, I64(slot)), new_sums[i], has_mask=False)
                if number % (len(parts) // 4) == 0:
                    beside(first_slot, 4 * number // len(parts) - 1)
            return new_sums

        old_maxima = [code.load(self.running_max, query, F32) for query in queries]
        largest = each_vector(ScoreRow.update_max, [code.broadcast(old_max, lanes) for old_max in old_maxima], lanes)
        new_maxima = [code.reduce(vector, code.maximum) for vector in largest]
        for row, new_max in zip(rows, new_maxima, strict=True):
            row.max_in_lanes = code.broadcast(new_max, lanes)
        zeros = constant(ir.VectorType(F32, lanes), 0.0)
        no_sums = [zeros] * len(rows)
        if beside is None:
            block_sums = each_vector(ScoreRow.add_weights, no_sums, span)
        else:
            block_sums = code.loop(0, end_slot, add_weights_beside, step=SLOTS_BESIDE, carried=no_sums)
        for query, old_max, new_max, block_sum in zip(queries, old_maxima, new_maxima, block_sums, strict=True):
            # An unchanged maximum needs no rescaling of earlier sums; a NaN counts as a change.
            with build.if_then(build.fcmp_unordered("!=", old_max, new_max)):
                self._rescale(query, old_max, new_max)
            self._store_lane_sums(build.fadd(self._lane_sums(query), block_sum), query)

    def _rescale(self, query: ir.Value, old_max: ir.Value, new_max: ir.Value) -> None:
        """Emit the change of a query's maximum: its earlier sums are multiplied by 2^(old − new maximum)."""
        code, build, lanes = self.code, self.code.build, self.head_lanes
        # All lanes of `decay` are equal.
        decay = code.exp2(code.broadcast(build.fsub(old_max, new_max), lanes))
        decay_of_sum = code.broadcast(build.extract_element(decay, I32(0)), self.slot_lanes)
        self._store_lane_sums(build.fmul(self._lane_sums(query), decay_of_sum), query)
        code.store(new_max, self.running_max, query)
        first_sum = build.mul(query, I64(self.shape.head_size))

        def rescale(lane: ir.Value) -> None:
            element = build.add(first_sum, lane)
            rescaled = build.fmul(code.load_vector(self.value_sums, element, F32, lanes), decay)
            code.store_vector(rescaled, self.value_sums, element)

        code.loop(0, self.shape.head_size, rescale, step=lanes)

    def _lane_sums(self, query: ir.Value) -> ir.Value:
        """Return a query's sum of weights, lane by lane."""
        offset = self.code.build.mul(query, I64(self.slot_lanes))
        return self.code.load_vector(self.weight_sums, offset, F32, self.slot_lanes)

    def _store_lane_sums(self, lane_sums: ir.Value, query: ir.Value) -> None:
        self.code.store_vector(lane_sums, self.weight_sums, self.code.build.mul(query, I64(self.slot_lanes)))

    def store_weights(self, weights: Sequence[ir.Value], element: ir.Value) -> None:
        """Store vectors of weights that are stored together, in the type of pages, from the one at `element` on."""
        if len(weights) == 2:
            first, second = weights
            self.code.store_rounded_pair(first, second, self.weights, element)
        elif self.shape.is_bf16_packed:
            self.code.store_rounded(weights[0], self.weights, element, has_avx512_bf16=self.has_rounding)
        else:
            self.code.store_vector(weights[0], self.weights, element)

    def exp2(self, x: ir.Value) -> ir.Value:
        """Return the weight of a score x below the maximum, x ≤ 0, as exactly as weights are stored."""
        return self.code.exp2(x, EXP2_TERMS_FOR_BF16 if self.shape.is_bf16_packed else EXP2_TERMS)


class ScoreRow:
    """A query's scores of a block of pages, and the weights that replace them; slots out of `visible` can be masked."""

    max_in_lanes: ir.Value
    """The maximum to which weights are relative, in all lanes."""

    def __init__(self, softmax: OnlineSoftmax, row: ir.Value, visible: SlotRange) -> None:
        """Emit what all of the row's vectors share. `row` counts rows of scores."""
        code, build, lanes = softmax.code, softmax.code.build, softmax.slot_lanes
        self._softmax = softmax
        self._first_score = build.mul(row, I64(softmax.score_stride))
        # In elements: a word of bfloat16 weights holds two.
        has_pairs = softmax.shape.is_bf16_packed
        self._first_weight = build.mul(row, I64(2 * softmax.weight_stride)) if has_pairs else self._first_score
        self._bounds = [code.broadcast(build.trunc(bound, I32), lanes) for bound in visible]

    def update_max(self, slot: ir.Value, largest: ir.Value, has_mask: bool) -> ir.Value:
        """Return the larger of `largest` and a vector of scores; with a soft cap these are capped, in memory too."""
        softmax, code = self._softmax, self._softmax.code
        score = self._load(slot)
        if softmax.shape.soft_cap is not None:
            score = code.soft_capped(score, softmax.shape.soft_cap)
            code.store_vector(score, softmax.scores, self._offset(slot))
        return code.maximum(self._masked(score, slot, INITIAL_MAX) if has_mask else score, largest)

    def add_weights(self, slot: ir.Value, weight_sum: ir.Value, has_mask: bool) -> ir.Value:
        """Store the weights of the vectors at once from `slot` on; return them plus `weight_sum`, lane by lane."""
        softmax, build = self._softmax, self._softmax.code.build
        slots = [build.add(slot, I64(i * softmax.slot_lanes)) for i in range(softmax.vectors_at_once)]
        weights = [softmax.exp2(build.fsub(self._load(each), self.max_in_lanes)) for each in slots]
        if has_mask:
            weights = [self._masked(weight, each, 0.0) for weight, each in zip(weights, slots, strict=True)]
        softmax.store_weights(weights, build.add(self._first_weight, slot))
        return reduce(build.fadd, weights, weight_sum)

    def _offset(self, slot: ir.Value) -> ir.Value:
        return self._softmax.code.build.add(self._first_score, slot)

    def _load(self, slot: ir.Value) -> ir.Value:
        return self._softmax.code.load_vector(self._softmax.scores, self._offset(slot), F32, self._softmax.slot_lanes)

    def _masked(self, values: ir.Value, slot: ir.Value, hidden: float) -> ir.Value:
        """Return `values` of the slots from `slot` on, with `hidden` in place of those that are masked."""
        code, build, lanes = self._softmax.code, self._softmax.code.build, self._softmax.slot_lanes
        lane_indices = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
        element = build.add(lane_indices, code.broadcast(build.trunc(slot, I32), lanes))
        is_behind = build.icmp_signed(">=", element, self._bounds[0])
        is_visible = build.and_(is_behind, build.icmp_signed("<", element, self._bounds[1]))
        return build.select(is_visible, values, constant(values.type, hidden))
