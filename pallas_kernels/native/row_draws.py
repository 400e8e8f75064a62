"""Draws tokens of rows of logits in native code: weighs them, cuts them by truncation, and draws down a tree.

XLA:CPU computes these on one core, batch of rows after batch. Here a row is one unit of work, which any thread takes.
A row's results depend on that row alone. What the limits of truncation mean is written in `sampling.truncation`, and
what the tree is in `sampling.drawing`.

Letters: R rows, b blocks of B tokens, L levels of trees.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ffi import ffi_call
from jaxtyping import Array, Bool, Float, Int
from llvmlite import ir

from .draw_trees import DrawTree
from .llvm import F32, I32, I64, Code, constant, lanes_for
from .registry import register
from .row_calls import RowShape, is_set, prepare_rows, row_address
from .row_thresholds import Limits, room_size, truncation_threshold
from .row_weights import WeightsAt, kept_weights, sum_blocks, weigher
from .xla_call import handler


class RowLimits(NamedTuple):
    """The limits of truncation of R rows, in the order in which they apply; see `truncation.TruncationLimits`."""

    min_p: Float[Array, " R"]
    """A number that is not above 0, NaN too, keeps all."""
    top_k: Int[Array, " R"]
    top_p: Float[Array, " R"]
    """A NaN keeps all."""


class DrawnRows(NamedTuple):
    """A token of each of R rows, and what is kept of the row. Of rows that are not drawn all this means nothing.

    A weight is exp((logit − row maximum) ÷ temperature), and 0 below e⁻⁸⁷.
    """

    token_ids: Int[Array, " R"]
    """0 if all weights are 0."""
    threshold: Float[Array, " R"]
    """Weights that reach it are kept."""
    totals: Float[Array, " R"]
    """The sum of all weights."""
    block_sums: Float[Array, "R b"]
    """The sum of the kept weights of each block."""


def drawn_rows(
    blocks: Float[Array, "R b B"],
    row_max: Float[Array, " R"],
    is_drawn: Bool[Array, " R"],
    temperature: Float[Array, " R"],
    limits: RowLimits,
    uniforms_RL: Float[Array, "R L"],
    *,
    num_branches: int,
) -> DrawnRows:
    """Return a token of each row with `is_drawn`, by its weight, among those that min-p, top-k and top-p leave.

    `blocks` are logits, of which −inf fills up the last block of a row. `uniforms_RL` are the random numbers of each
    row for the L levels of two trees with `num_branches`: first for its blocks, then for the tokens of one.
    """
    num_rows, shape = len(blocks), RowShape(*blocks.shape[1:])
    types = [
        jax.ShapeDtypeStruct((num_rows, *row_shape), dtype)
        for row_shape, dtype in (
            ((), jnp.int32),
            ((), jnp.float32),
            ((), jnp.float32),
            ((shape.num_blocks,), jnp.float32),
        )
    ]
    call = ffi_call(_handler(shape, num_branches), types)
    rows = blocks.reshape(num_rows, -1)
    return DrawnRows(*call(rows, row_max, is_drawn, 1.0 / temperature, *limits, uniforms_RL))


class _Buffers(NamedTuple):
    """The addresses of the arguments and the results of the custom call."""

    logits: ir.Value
    row_max: ir.Value
    is_drawn: ir.Value
    scale: ir.Value
    min_p: ir.Value
    top_k: ir.Value
    top_p: ir.Value
    uniforms: ir.Value
    token_ids: ir.Value
    threshold: ir.Value
    totals: ir.Value
    block_sums: ir.Value


@cache
def _handler(shape: RowShape, num_branches: int) -> str:
    """Compile the custom call of `drawn_rows` for rows of this shape, and return its name."""

    def body(code: Code, arguments: list[ir.Value], row: ir.Value) -> None:
        buffers = _Buffers(*arguments)
        with code.build.if_then(is_set(code, buffers.is_drawn, row)):
            _emit_row(code, shape, num_branches, buffers, row)

    name = f"jpaged_drawn_rows_{shape.num_blocks}_{shape.block}_{num_branches}_{shape.lanes}"
    return register(name, lambda: handler(name, 8, 4, prepare_rows, body))


def _emit_row(code: Code, shape: RowShape, num_branches: int, buffers: _Buffers, row: ir.Value) -> None:
    """Emit the results of row number `row`, which is drawn."""
    build = code.build
    logits = row_address(code, buffers.logits, row, shape.size, F32)
    block_sums = row_address(code, buffers.block_sums, row, shape.num_blocks, F32)
    row_max, scale = (code.load(array, row, F32) for array in (buffers.row_max, buffers.scale))
    weigh, limits = weigher(code, row_max, scale, shape.lanes), _limits(code, buffers, row)

    def weights_at(token: ir.Value) -> ir.Value:
        return weigh(code.load_vector(logits, token, F32, shape.lanes))

    def search(room: ir.Value) -> None:
        """Emit the search of the threshold; a row's weights are stored in the room for it."""

        def newly_stored_at(token: ir.Value) -> ir.Value:
            weights = weights_at(token)
            code.store_vector(weights, room, token)
            return weights

        def stored_at(token: ir.Value) -> ir.Value:
            return code.load_vector(room, token, F32, shape.lanes)

        total = sum_blocks(code, shape, newly_stored_at, threshold=limits.min_p, block_sums=block_sums)
        code.store(total, buffers.totals, row)
        threshold = truncation_threshold(code, shape, room, limits)
        code.store(threshold, buffers.threshold, row)
        sum_blocks(code, shape, stored_at, threshold=threshold, block_sums=block_sums)

    code.store(limits.min_p, buffers.threshold, row)
    needs_search = build.or_(limits.is_top_k_set(code, shape), limits.is_top_p_set(code))
    with build.if_else(needs_search) as (then, otherwise):
        with then, code.borrowed(F32, room_size(shape)) as room:
            search(room)
        with otherwise:
            total = sum_blocks(code, shape, weights_at, threshold=limits.min_p, block_sums=block_sums)
            code.store(total, buffers.totals, row)
    trees = _Trees(DrawTree(code, shape.num_blocks, num_branches), DrawTree(code, shape.block, num_branches))
    token = trees.draw(
        code,
        uniforms=row_address(code, buffers.uniforms, row, trees.num_levels, F32),
        block_sums=block_sums,
        weights_at=weights_at,
        threshold=code.load(buffers.threshold, row, F32),
    )
    code.store(build.trunc(token, I32), buffers.token_ids, row)


def _limits(code: Code, buffers: _Buffers, row: ir.Value) -> Limits:
    """Load the limits of a row; a min-p that is not above 0 counts as 0."""
    min_p = code.maximum(code.load(buffers.min_p, row, F32), constant(F32, 0.0))
    return Limits(min_p, code.load(buffers.top_k, row, I32), code.load(buffers.top_p, row, F32))


class _Trees(NamedTuple):
    """The trees over a row's blocks, and over the tokens of one block."""

    blocks: DrawTree
    tokens: DrawTree

    @property
    def num_levels(self) -> int:
        """Random numbers of a row."""
        return self.blocks.num_levels + self.tokens.num_levels

    def draw(
        self, code: Code, *, uniforms: ir.Value, block_sums: ir.Value, weights_at: WeightsAt, threshold: ir.Value
    ) -> ir.Value:
        """Emit the draw of a block by its sum, then of a token in it that reaches the threshold; return the token."""
        build = code.build

        def copy_sum(block: ir.Value) -> None:
            code.store(code.load(block_sums, block, F32), self.blocks.leaves, block)

        code.loop(0, self.blocks.num_leaves, copy_sum)
        first = build.mul(self.blocks.draw(uniforms, 0), I64(self.tokens.num_leaves))
        for offset in range(0, self.tokens.num_leaves, lanes_for(self.tokens.num_leaves)):
            weights = kept_weights(code, weights_at(build.add(first, I64(offset))), threshold)
            code.store_vector(weights, self.tokens.leaves, I64(offset))
        return build.add(first, self.tokens.draw(uniforms, self.blocks.num_levels))
