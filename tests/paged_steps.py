"""Metadata of a step from plain lists: an independent, slow version of `jpaged.step.step_inputs`."""

from collections.abc import Sequence

import jax
import numpy as np

from jpaged.pallas_kernels.ragged_paged_attention.gpu.plan import GpuPlanner
from jpaged.pallas_kernels.ragged_paged_attention.interface import (
    NULL_PAGE,
    AttentionMetadata,
    Backend,
    KVLayout,
    LayerPlace,
    PlanRows,
)
from jpaged.pallas_kernels.ragged_paged_attention.kv_scales import KVScales
from jpaged.pallas_kernels.ragged_paged_attention.paged_cache import PagedCache


def metadata(
    backend: Backend,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    tables: Sequence[Sequence[Sequence[int]]],
    *,
    page_size: int,
    num_tokens: int,
    num_rows: int,
    table_len: int,
    decodes_only: bool = False,
) -> AttentionMetadata:
    """Return the metadata of rows in order, those with one query first; `decodes_only`: all of them.

    `tables[group][row]` lists pages; `num_tokens`, `num_rows` and `table_len` are the padded sizes.
    """
    num_decode_rows = sum(1 for length in query_lens if length == 1)
    assert all(length == 1 for length in query_lens[:num_decode_rows])
    total = sum(query_lens)
    positions = np.zeros(num_tokens, np.int32)
    slots = np.zeros((len(tables), num_tokens), np.int32)
    page_tables = np.full((len(tables), num_rows, table_len), NULL_PAGE, np.int32)
    token = 0
    for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        for position in range(context_len - query_len, context_len):
            positions[token] = position
            for group, rows in enumerate(tables):
                slots[group, token] = rows[row][position // page_size] * page_size + position % page_size
            token += 1
        for group, rows in enumerate(tables):
            page_tables[group, row, : len(rows[row])] = rows[row]
    query_starts = np.full(num_rows + 1, total, np.int32)
    query_starts[: len(query_lens) + 1] = np.cumsum([0, *query_lens])
    padded_lens = np.zeros(num_rows, np.int32)
    padded_lens[: len(context_lens)] = context_lens
    plan = plan_of(
        backend, query_lens, context_lens, num_tokens, num_rows, page_tables, page_size, decodes_only=decodes_only
    )
    return AttentionMetadata(
        positions=jax.device_put(positions),
        slot_mapping=jax.device_put(slots),
        query_starts=jax.device_put(query_starts),
        context_lens=jax.device_put(padded_lens),
        page_tables=jax.device_put(page_tables),
        num_rows=jax.device_put(np.int32(len(query_lens))),
        num_decode_rows=jax.device_put(np.int32(num_decode_rows)),
        plan=jax.device_put(plan),
        decodes_only=decodes_only,
    )


def plan_of(
    backend: Backend | GpuPlanner,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    num_tokens: int,
    num_rows: int,
    page_tables: np.ndarray | None = None,
    page_size: int = 8,
    *,
    decodes_only: bool = False,
) -> np.ndarray:
    """Return the backend's plan of a step padded to `num_tokens` and `num_rows`; without tables, all pages are null."""
    out = np.zeros(backend.plan_len(num_tokens, num_rows, decodes_only=decodes_only), np.int32)
    rows = rows_to_plan(
        query_lens, context_lens, num_tokens, num_rows, page_tables, page_size, decodes_only=decodes_only
    )
    backend.plan(rows, out)
    return out


def rows_to_plan(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    num_tokens: int,
    num_rows: int,
    page_tables: np.ndarray | None = None,
    page_size: int = 8,
    *,
    decodes_only: bool = False,
) -> PlanRows:
    """Return what a backend plans a step by, for a step padded to `num_tokens` and `num_rows`."""
    if page_tables is None:
        page_tables = np.full((1, num_rows, 1), NULL_PAGE, np.int32)
    return PlanRows(
        query_lens=np.array(query_lens, np.int32),
        context_lens=np.array(context_lens, np.int32),
        num_decode_rows=sum(1 for length in query_lens if length == 1),
        page_tables=page_tables,
        table_rows=np.arange(len(query_lens)),
        page_size=page_size,
        padded_tokens=num_tokens,
        padded_rows=num_rows,
        decodes_only=decodes_only,
    )


def nan_cache(
    layout: KVLayout, layers: tuple[LayerPlace, ...], backend: Backend, scales: KVScales | None = None
) -> PagedCache:
    """Return a cache that was never written: NaN in all pages, the null page included, or the largest integer."""
    unwritten = np.asarray(layout.unwritten)
    pages = tuple(jax.device_put(np.full(shape, unwritten, unwritten.dtype)) for shape in layout.shapes)
    return PagedCache(pages, layout, layers, backend, scales)
