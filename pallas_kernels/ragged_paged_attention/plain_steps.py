"""Builds `AttentionMetadata` from the lengths of rows, for checks and benches that run a backend without the engine.

The engine builds its steps in `jpaged.step.step_inputs`; `AttentionMetadata` is the contract of both.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from .interface import NULL_PAGE, AttentionMetadata, Backend, PlanRows


def random_tables(
    context_lens: Sequence[int], page_size: int, rng: np.random.Generator, *, first_page: int = NULL_PAGE + 1
) -> np.ndarray:
    """Return int32 page tables [rows, P] of rows that share no page: shuffled pages, then null pages up to P.

    `context_lens` are the tokens of each row (sequence), at least one row, and P is the largest number of pages that a
    row takes. With pages of 16 slots and `first_page` 1, rows of 40 and 10 tokens take 3 pages and 1, which are the
    pages 1 … 4 in random order: for example [[3, 1, 4], [2, 0, 0]]. The caller makes the cache large enough for them.
    """
    num_pages = -(-np.asarray(context_lens) // page_size)
    tables = np.full((len(num_pages), num_pages.max()), NULL_PAGE, np.int32)
    # The mask selects the first entries of each row, as many as it has pages.
    tables[np.arange(num_pages.max()) < num_pages[:, None]] = first_page + rng.permutation(num_pages.sum())
    return tables


def step_of_rows(
    backend: Backend,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    tables: np.ndarray,
    *,
    page_size: int,
    num_tokens: int,
    num_rows: int,
    decodes_only: bool = False,
) -> AttentionMetadata:
    """Build a step of these rows, padded to `num_tokens` and `num_rows`, with the plan that `backend` makes for it.

    A row is a sequence. `query_lens` are the tokens of each row in the step, `context_lens` its tokens in all, these
    included. `tables` are the page numbers of each row [rows, P]; the step has this one page-table group. A row's
    queries are its last tokens: a row with 3 of 10 tokens in the step has them at positions 7, 8 and 9. Padding tokens
    get position and slot 0, padding rows no queries and context length 0. `decodes_only`: the step is for a program
    that takes rows with one query only. Raises ValueError unless the rows with one query come first.
    """
    lens, contexts = np.array(query_lens, np.int32), np.array(context_lens, np.int32)  # Tokens in the step, and in all.
    num_given_rows, num_queries, num_decode_rows = len(lens), int(lens.sum()), int(np.count_nonzero(lens == 1))
    if (lens[:num_decode_rows] != 1).any():
        raise ValueError(f"query_lens: got {list(query_lens)}, rows with one query come first")
    query_starts = np.full(num_rows + 1, num_queries, np.int32)  # Padding rows begin and end after the last query.
    query_starts[: num_given_rows + 1] = np.cumsum([0, *query_lens])
    row_of_token = np.repeat(np.arange(num_given_rows), lens)
    positions = np.arange(num_queries) - query_starts[row_of_token] + (contexts - lens)[row_of_token]
    slots = tables[row_of_token, positions // page_size] * page_size + positions % page_size
    page_tables = np.zeros((1, num_rows, tables.shape[1]), np.int32)
    page_tables[0, :num_given_rows] = tables
    plan = np.zeros(backend.plan_len(num_tokens, num_rows, decodes_only=decodes_only), np.int32)
    rows = PlanRows(
        query_lens=lens,
        context_lens=contexts,
        num_decode_rows=num_decode_rows,
        page_tables=page_tables,
        table_rows=np.arange(num_given_rows),
        page_size=page_size,
        padded_tokens=num_tokens,
        padded_rows=num_rows,
        decodes_only=decodes_only,
    )
    backend.plan(rows, plan)

    def padded(values: np.ndarray, length: int) -> np.ndarray:
        return np.pad(values, (0, length - len(values))).astype(np.int32)

    # jax.numpy would compile a program for each shape. On a CPU the results may share the memory of these arrays, which
    # are written no more.
    put = jax.device_put
    return AttentionMetadata(
        positions=put(padded(positions, num_tokens)),
        slot_mapping=put(padded(slots, num_tokens)[None]),
        query_starts=put(query_starts),
        context_lens=put(padded(contexts, num_rows)),
        page_tables=put(page_tables),
        num_rows=put(np.int32(num_given_rows)),
        num_decode_rows=put(np.int32(num_decode_rows)),
        plan=put(plan),
        decodes_only=decodes_only,
    )
