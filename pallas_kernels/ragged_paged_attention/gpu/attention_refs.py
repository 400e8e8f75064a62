"""Records of the attention kernel: what one launch fixes, and every reference that the kernel works on.

Letters: A aligned query rows (see `queries`) · M query rows of a tile · T keys of a KV tile · P2 partial results.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from ..interface import AttendOptions
from .memory_ops import Chip, Ref, Scalar
from .plan import PlanSection


@dataclass(frozen=True)
class Launch:
    """Numbers that are fixed when one launch of the kernel is traced: one tile class over one layer."""

    section: PlanSection
    """Where the pieces of this launch lie in the plan."""
    group_size: int
    """G: query heads per KV head."""
    options: AttendOptions
    tile_kv: int
    """T: keys of a KV tile."""
    num_stages: int
    """KV tiles in shared memory."""
    reads_ahead: bool
    """Whether the next piece's row and lengths are read while a piece is computed."""
    num_query_tiles: int
    """Tiles of queries in shared memory: with two, the next piece's queries are fetched ahead as well."""
    products: ModuleType
    """The module `mma` or `wgmma`, whose functions compute the products."""
    chip: Chip


class AttentionInputs(NamedTuple):
    """References to global memory that the kernel reads; a field is None where the layer has no such thing."""

    queries: Ref
    """[K, A, H] bfloat16, read and written: outputs take the place of their queries."""
    k_pages: Ref
    """[L × C, K, Z, H] of the cache's dtype: the keys of all layers."""
    v_pages: Ref
    """[L × C, K, Z, H] of the cache's dtype: the values of all layers."""
    page_tables: Ref
    """int32 [R × P]: the page tables of all rows, row after row."""
    context_lens: Ref
    """int32 [R]: tokens of each row, this step's included."""
    query_starts: Ref
    """int32 [R + 1]: index of each row's first query among the step's tokens."""
    plan: Ref
    """int32: the plan of the step, see `plan`."""
    first_page: Ref
    """int32 [1]: index of the layer's page 0 among the pages of all layers."""
    k_scales: Ref | None = None
    """float32 [K]: scales of the keys of one-byte pages."""
    v_scales: Ref | None = None
    """float32 [K]: scales of the values of one-byte pages."""
    sinks: Ref | None = None
    """float32 [K, G + M]: each KV head's G sink logits, repeated, so that a tile that begins at any of them finds M."""


class PieceRow(NamedTuple):
    """The row of a piece and its lengths, read while the piece before is computed.

    Registers hold them all that time, which are few: what else the plan says of a piece is read when it begins.
    """

    row: Scalar
    """Row of the step."""
    context_len: Scalar
    """Tokens of the row."""
    num_queries: Scalar
    """Queries of the row."""


class Partials(NamedTuple):
    """Partial results of the pieces of split tiles, in global memory, float32."""

    acc: Ref
    """[P2, K, M, H]: weighted sums of values."""
    running_max: Ref
    """[P2, K, M]: largest score of each query row, times log₂ e."""
    running_sum: Ref
    """[P2, K, M]: sum of each query row's weights, relative to that maximum."""


class AttentionScratch(NamedTuple):
    """Shared memory and barriers of one thread block; a field is None where the chip or the dtype has no use for it."""

    k_tiles: Ref
    """[stages, T, H] of the cache's dtype: keys."""
    k_bf16: Ref | None
    """[T, H] bfloat16: the keys of one KV tile of one-byte pages, converted."""
    kv_barriers: Ref | None
    """One barrier per stage, at which the copies of its keys and values arrive; None without TMA."""
    q_barriers: Ref | None
    """One barrier per tile of queries, at which its copies arrive; None without TMA."""
    q_tiles: Ref
    """[query tiles, M, H] bfloat16: the queries of a tile, and later its outputs on their way to global memory. Of two,
    one is filled for the next piece."""
    v_tiles: Ref
    """[stages, T, H] of the cache's dtype: values."""
    v_bf16: Ref | None
    """[T, H] bfloat16: the values of one KV tile of one-byte pages, converted."""
    weights: Ref
    """[M, T] bfloat16: softmax weights of one KV tile."""
