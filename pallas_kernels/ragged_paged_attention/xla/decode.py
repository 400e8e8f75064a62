"""Rows with one query each, in plain XLA: each row's pages are cut into KV splits, taken some splits at a time.

    row 0, 7 pages   split 0  ■ ■ ■ ◧      ■ page whose slots are all visible  ◧ the row's last page
                     split 1  ■ ■ ■ ·      · nothing left: the null page, which stays in the processor's cache
    row 1, 3 pages   split 2  ■ ■ ◧ ·
    row 2, 2 pages   split 3  ■ ◧ · ·      ─▶ iterations of one batch of splits
                k [w, K, S, H], v [w, K, S, H], q [w, K, G, H]: two batched products an iteration, w splits at once

Splits are numbered row after row, so a short row takes no more iterations than it needs beside a long one. Each split
has a softmax state of its own; all are kept, and merged into one per row in the end. How a row's pages are cut, and in
which order its splits are merged, does not depend on the other rows: its bits are the same in any batch.

A loop whose count is an array makes a GPU's host wait in every iteration, since it reads whether to go on. There only
the loop over pages has such a count; batches are as many as all rows could need, and merging is a sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..interface import NULL_PAGE
from .pages import XlaPages, as_float32
from .softmax import Softmax


class SplitRows(NamedTuple):
    """What a split must know of its row, int32: one number per row, or per split."""

    lens: Int[Array, " r"]
    """Tokens of the row."""
    page_offsets: Int[Array, " r"]
    """Added to a split's number among all rows' splits, this gives the index of its first page in the page table."""
    num_splits: Int[Array, " r"]
    """Splits of the row: the distance from one page of a split to its next."""
    num_iterations: Int[Array, " r"]
    """Pages of the row's first split, which has the most."""


@dataclass(frozen=True)
class KVSplits:
    """Attention of decode rows over their pages, cut into KV splits."""

    pages: XlaPages
    batch_size: int
    """Splits that are computed at once."""
    max_splits: int
    """Largest number of splits of one row."""
    min_pages: int
    """Pages of a split, if its row has as many; more only where the row would exceed `max_splits` otherwise."""
    has_static_counts: bool = False
    """Whether the numbers of batches and of merged splits are constants, the most that there can be."""

    def attend(
        self,
        q: Float[Array, "R K G H"],
        tables: Int[Array, "R P"],
        lens: Int[Array, " R"],
        num_skipped: Int[Array, " R"],
    ) -> Softmax:
        """Return the softmax state of each row after the first `lens` tokens, without its first `num_skipped` pages.

        Split-KV (flash decoding): each row's pages are dealt to at most `max_splits` splits, `batch_size` splits of
        all rows are computed at once, and the states of a row's splits are merged by log-sum-exp. Split s of a row with
        n splits takes the pages s, s + n, s + 2n …: with 7 pages and 2 splits, split 0 takes the pages 0, 2, 4 and 6.
        A row of length 0 attends to nothing and takes no time.
        """
        page_size, window, width = self.pages.page_size, self.pages.options.window, self.batch_size
        num_rows, end_pages = len(lens), (lens + page_size - 1) // page_size
        first_pages = num_skipped if window is None else jnp.maximum(lens - window, 0) // page_size
        num_pages = end_pages - first_pages
        pages_per_split = jnp.maximum((num_pages + self.max_splits - 1) // self.max_splits, self.min_pages)
        num_splits = (num_pages + pages_per_split - 1) // pages_per_split
        num_iterations = jnp.minimum(pages_per_split, num_pages)
        split_ends = jnp.cumsum(num_splits)
        split_starts = split_ends - num_splits
        # A row of length 0 follows the last row: splits that fill up the last batch belong to it.
        is_live = jnp.arange(tables.shape[1])[None] < end_pages[:, None]
        tables = self.pages.first_page + jnp.pad(jnp.where(is_live, tables, NULL_PAGE), ((0, 1), (0, 0)))
        rows_by_field = SplitRows(lens, first_pages - split_starts, num_splits, num_iterations)
        split_rows_table = jnp.pad(jnp.stack(rows_by_field, axis=1), ((0, 1), (0, 0)))

        def attend_batch(batch: Array, states: Softmax) -> Softmax:
            splits = batch * width + jnp.arange(width)
            row_of_split = jnp.sum(split_ends[None] <= splits[:, None], axis=1, dtype=jnp.int32)
            split_rows = SplitRows(*split_rows_table[row_of_split].T)
            queries = q[jnp.minimum(row_of_split, num_rows - 1)] * self.pages.options.scale
            first_indices = split_rows.page_offsets + splits

            def attend_pages(iteration: Array, state: Softmax) -> Softmax:
                page_indices = first_indices + iteration * split_rows.num_splits
                pages = tables.at[row_of_split, page_indices].get(mode="clip")
                return self._attend_page(queries, pages, page_indices, split_rows.lens, state)

            state = lax.fori_loop(0, jnp.max(split_rows.num_iterations), attend_pages, Softmax.start(queries, None))
            return jax.tree.map(
                lambda old, new: lax.dynamic_update_slice_in_dim(old, new, batch * width, 0), states, state
            )

        max_states = num_rows * self.max_splits
        max_states += -max_states % width
        # The last state is never written: it is empty, and is merged into rows that have no split left. The others
        # begin as copies of a query, which is never read: XLA:CPU would keep zeros for every layer at once.
        states = Softmax.start(jnp.zeros((max_states + 1, *q.shape[1:]), jnp.float32), None)
        states = replace(states, values=jnp.concatenate([jnp.repeat(q[:1], max_states, axis=0), states.values[-1:]]))
        num_batches = max_states // width if self.has_static_counts else (split_ends[-1] + width - 1) // width
        states = lax.fori_loop(0, num_batches, attend_batch, states)

        def split_state(index: Array | int) -> Softmax:
            """Return the state of split `index` of each row; the empty one for rows of fewer splits."""
            splits = jnp.where(index < num_splits, split_starts + index, max_states)
            return jax.tree.map(lambda x: x[splits], states)

        if self.has_static_counts:
            return Softmax.merge_all(jax.vmap(split_state)(jnp.arange(self.max_splits)))
        return lax.fori_loop(
            1, jnp.max(num_splits), lambda index, state: state.merge(split_state(index)), split_state(0)
        )

    def _attend_page(
        self,
        q: Float[Array, "b K G H"],
        pages: Int[Array, " b"],
        page_indices: Int[Array, " b"],
        lens: Int[Array, " b"],
        state: Softmax,
    ) -> Softmax:
        """Return the state after one more page of each of b splits, one step of the online softmax.

        `pages` are indices among all layers' pages, `page_indices` those in the row's page table, which give positions.
        """
        page_size, window = self.pages.page_size, self.pages.options.window
        slots = page_indices[:, None] * page_size + jnp.arange(page_size)[None]
        is_visible = slots < lens[:, None]
        if window is not None:
            is_visible &= slots >= (lens - window)[:, None]
        k = as_float32(self.pages.keys.at[pages].get(mode="promise_in_bounds"))
        scores = jnp.where(is_visible[:, None, None], self.pages.scores(q, k), -jnp.inf)
        # An unwritten slot may hold NaN, and 0 × NaN is NaN: its value is replaced, not only its weight.
        v = as_float32(self.pages.values.at[pages].get(mode="promise_in_bounds"))
        v = jnp.where(is_visible[:, None, :, None], v, 0.0)
        return state.add(scores, lambda weights: jnp.einsum("bkgs,bksh->bkgh", weights, v))
