"""Records of the decode kernel: its tuned sizes, every reference that it works on, parts of its
work, and how far its loops are unrolled: as far as the registers of a core hold what is computed.

Letters: B rows of a block · K KV heads · G query heads per KV head · S rows of 128 lanes per token and KV head ·
W lanes of a query, H rounded up to 128 · h KV heads whose scores one product computes · J = K/h products per key tile ·
h·G rows of one product's scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array

from .lanes import Ref, Scalar

MAX_UNROLLED_PRODUCTS, MAX_UNROLLED_ROWS, MAX_UNROLLED_HEADS = 8, 160, 32
"""Products, rows of scores and KV heads in one loop body; with more, the compiler spills registers."""


class DecodeSizes(NamedTuple):
    """Tuned sizes of the decode kernel. `tile` is a multiple of the page size and of `full` and `tail`."""

    tile: int
    """Tokens of a KV tile, which is fetched as a whole."""
    full: int
    """Tokens of a full tile that one product computes (at most `MAX_MASKED_KEYS` in a layer with a window)."""
    tail: int
    """Tokens of a row's last tile that one product computes."""
    max_rows: int
    """Rows of scores in one product at most, where more than one KV head shares it."""
    write_slots: int
    """Consecutive slots of a page that one DMA can address by themselves."""
    buffers: int = 2
    """Full tiles in VMEM, a power of two: one is computed while the others are fetched. Tables that were written when
    there were always two do not name it."""


class DecodeScalars(NamedTuple):
    """Scalar arguments, int32 in SMEM."""

    page_tables: Ref
    """[R × P] the page tables of all rows, row after row."""
    context_lens: Ref
    """[R + padding] tokens of each row, its new one included; 0 for a row that is not decoded."""
    next_long_row: Ref
    """[R + padding] for each row, the first row from it on that has full tiles; R if there is none."""
    first_page_and_count: Ref
    """[2] index of the layer's page 0 among the pages of all layers, and the number of rows to decode."""


class DecodeInputs(NamedTuple):
    """Arrays that the kernel reads; a field is None where the layer has no such thing."""

    q: Ref
    """[B, N, H] in VMEM: the queries of this block's rows."""
    k: Ref | None
    """[B, K, H] in VMEM: the new keys of this block's rows; None if the pages hold them already."""
    v: Ref | None
    """[B, K, H] in VMEM: the new values of this block's rows; None with `k`."""
    sinks: Ref | None
    """float32 [N, 128] in VMEM, equal in all lanes: sink logits times log₂ e."""
    scales: Ref | None
    """float32 [2, N, 128] in VMEM, equal in all lanes: for each query head, the scales of its KV head's keys and
    values in one-byte pages."""
    pages: Ref
    """[C, K, S, Z, 128] in HBM: the pages of all layers, whose memory the output takes."""


class DecodeOutputs(NamedTuple):
    """Arrays that the kernel writes."""

    out: Ref
    """[B, N, H] in VMEM: the outputs of this block's rows; of rows that are not decoded, their queries."""
    pages: Ref
    """[C, K, S, Z, 128] in HBM: the pages, read and written through this reference."""


class DecodeScratch(NamedTuple):
    """Scratch memory. A leading 2 counts the two buffers of what is fetched ahead; full tiles have `buffers`."""

    full_tiles: Ref
    """[buffers, K, S, tile, 128] in VMEM, of the pages' dtype: full KV tiles of whichever rows come next."""
    tail_tiles: Ref
    """[2, B, K, S, tile, 128] in VMEM, of the pages' dtype: the last KV tile of each row of this and the next block."""
    diagonal_q: Ref
    """[B, J, h·G, h·W] in VMEM, of the compute dtype: queries of h KV heads on the diagonal, zeros elsewhere."""
    running_max: Ref
    """float32 [B, J, h·G, 128] in VMEM, equal in all lanes: the largest score of each query so far."""
    running_sum: Ref
    """float32 [B, J, h·G, 128] in VMEM, equal in all lanes: the sum of each query's weights so far."""
    acc: Ref
    """float32 [B, J, h·G, W] in VMEM: the weighted sum of values of each query so far."""
    full_sems: Ref
    """DMA semaphores [buffers]: the copies into each of the full tiles."""
    tail_sems: Ref
    """DMA semaphores [2]: the copies into the tail tiles of an even and of an odd block."""
    write_sem: Ref
    """DMA semaphore: the copies of new tokens from the tails to their pages."""
    next_buffer: Ref
    """int32 [1] in SMEM: index in `full_tiles` of the tile that is computed next."""
    next_fetch: Ref
    """int32 [2] in SMEM: the row, and the index among its KV tiles, of the full tile that is fetched next; row R if
    there is none."""


class Row(NamedTuple):
    """Scalars of one row of the block."""

    row_index: Scalar
    """Index of the row in the step."""
    context_len: Scalar
    """Tokens of the row, its new one included; 0 if it is not decoded."""
    first_tile: Scalar
    """Index of the first KV tile that holds a key the row's query attends to."""
    last_tile: Scalar
    """Index of the KV tile that the row ends in, its tail. The tiles from `first_tile` to before it are full."""


class SubTile(NamedTuple):
    """Consecutive tokens of one row that are attended together."""

    row_in_block: Scalar
    """Index of the row among the rows of the block."""
    kv: Ref
    """[K, S, tokens, 128] in VMEM: their keys and values."""
    first_position: Scalar
    """Position of the first of these tokens in its sequence."""
    context_len: Scalar
    """Tokens of the row."""

    def is_visible(self, token: Array, window: int | None) -> Array:
        """Return whether the row's query attends to each of `token`, indices into the sub-tile's tokens.

        The query is the row's last token. It attends to the last `window` tokens, its own included; None means all.
        """
        is_visible = token < self.context_len - self.first_position
        if window is None:
            return is_visible
        return is_visible & (token >= self.context_len - self.first_position - window)


def tail_rows_together(dtype: np.dtype[Any]) -> int:
    """Return how many rows' tails (last KV tiles) are computed together; the registers do not hold the data of more.

    `dtype` is that of the pages, or float32 if products are computed in float32.
    """
    return 1 if dtype == jnp.float32 else 2


def max_unrolled_products(rows: int, heads: int, dtype: np.dtype[Any]) -> int:
    """Return how many products (scores and weighted values of some KV heads) one loop body of decode holds at most.

    A product has `rows` rows of scores, the query heads of its `heads` KV heads. `dtype` is that of the pages, or
    float32 if products are computed in float32. The limits on one loop body were found by compiling: beyond them the
    compiler spilled registers. They are 160 rows of scores, 32 KV heads (16 for int8, since 32 spilled on v5e), and 8
    products: 4 for float8_e4m3fn, whose numbers are widened in many steps, and 1 for float32, whose products take six
    passes. A single product may exceed them, so the result is at least 1. Example: bfloat16 products of 32 rows and 8
    KV heads give min(8, 160 // 32, 32 // 8) = 4.
    """
    limit = {"float32": 1, "float8_e4m3fn": MAX_UNROLLED_PRODUCTS // 2}.get(dtype.name, MAX_UNROLLED_PRODUCTS)
    max_heads = MAX_UNROLLED_HEADS // 2 if dtype.name == "int8" else MAX_UNROLLED_HEADS
    return max(min(limit, MAX_UNROLLED_ROWS // rows, max_heads // heads), 1)


def unroll_factor(num_iterations: int, max_unroll: int) -> int:
    """Return how many iterations one loop body holds: all if there are at most `max_unroll`, else a divisor of them.

    The divisor is the greatest common one with `max_unroll`, not always the largest possible; `max_unroll` below 1
    counts as 1. Example: 12 iterations with `max_unroll` 8 are unrolled by gcd(12, 8) = 4, in a loop of 3.
    """
    return num_iterations if num_iterations <= max_unroll else math.gcd(num_iterations, max(max_unroll, 1))


def unrolled_loop(num_iterations: int, max_unroll: int, do: Callable[[Any], None]) -> None:
    """Call `do(0)` … `do(num_iterations − 1)` in order, several calls in each iteration of a loop on the device.

    The loop body holds `unroll_factor` of the calls, at most `max_unroll`, which divides `num_iterations`. If one body
    holds all calls, there is no loop and `do` gets Python integers; else `do` gets traced ones. Example: 12 calls with
    `max_unroll` 8 become a loop of 3 iterations with 4 calls each.
    """
    unroll = unroll_factor(num_iterations, max_unroll)

    def unrolled_body(loop_index: Scalar) -> None:
        for index in range(unroll):
            do(loop_index * unroll + index)

    if unroll == num_iterations:
        unrolled_body(0)
    else:
        pl.loop(0, num_iterations // unroll)(unrolled_body)
