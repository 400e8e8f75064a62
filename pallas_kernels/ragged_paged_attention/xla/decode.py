"""Rows with one query each, in plain XLA: each row's pages are cut into KV splits, computed in batches.

    row 0, 7 pages   split 0  ■ ■ ■ ◧      ■ page whose slots are all visible  ◧ the row's last page
                     split 1  ■ ■ ■ ·      · nothing left: the null page, which stays in the processor's cache
    row 1, 3 pages   split 2  ■ ■ ◧ ·
    row 2, 2 pages   split 3  ■ ◧ · ·      ─▶ iterations of one batch of splits
                k [w, K, S, H], v [w, K, S, H], q [w, K, G, H]: two batched products an iteration, w splits at once

Splits are numbered row after row, so a short row takes no more iterations than it needs beside a long one. Each split
has a softmax state of its own; all are kept, and merged into one per row at the end. How a row's pages are cut, and in
which order its splits are merged, does not depend on the other rows: its bits are the same in any batch.

A loop whose count is an array makes a GPU's host wait in every iteration, because the host reads the loop's condition.
On a GPU only the loop over pages has such a count: batches are as many as all rows could need, and merging is a sum.
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
    """Numbers of a row that its splits need, int32: one per row, or one per split."""

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
        """Return the softmax state of each row's query, [R, K, G], over the row's first `lens` tokens.

        A row is a sequence with one query, of G heads for each of K KV heads. Its first `num_skipped` pages are left
        out, because `attend_shared` attends to the pages that rows share.

        Split-KV (flash decoding): each row's pages are dealt to at most `max_splits` splits, `batch_size` splits of
        all rows are computed at once, and the states of a row's splits are merged by log-sum-exp. Split s of a row with
        n splits takes the pages s, s + n, s + 2n …: with 7 pages and 2 splits, split 0 takes the pages 0, 2, 4 and 6.

        `tables` holds page numbers within the layer. With a window, `num_skipped` is ignored, and a row begins at its
        window's first page. A row of length 0 attends to nothing and has no split: its state is empty. If
        `has_static_counts`, the numbers of batches and of merged splits are the most that there can be, because a GPU's
        host waits in each iteration of a loop whose count is an array.
        """
        page_size, window, batch_size = self.pages.page_size, self.pages.options.window, self.batch_size
        num_rows, end_pages = len(lens), (lens + page_size - 1) // page_size
        first_pages = num_skipped if window is None else jnp.maximum(lens - window, 0) // page_size
        num_pages = end_pages - first_pages
        # Both divisions round up.
        pages_per_split = jnp.maximum((num_pages + self.max_splits - 1) // self.max_splits, self.min_pages)
        num_splits = (num_pages + pages_per_split - 1) // pages_per_split
        num_iterations = jnp.minimum(pages_per_split, num_pages)
        split_ends = jnp.cumsum(num_splits)
        split_starts = split_ends - num_splits
        # Entries after a row's last page may be stale: they become the null page. One more row of length 0 is appended:
        # the splits that fill up the last batch belong to it.
        is_live = jnp.arange(tables.shape[1])[None] < end_pages[:, None]
        tables = self.pages.first_page + jnp.pad(jnp.where(is_live, tables, NULL_PAGE), ((0, 1), (0, 0)))
        # If a row has its first page at table index 2, and its splits are numbers 3 and 4, the offset is 2 − 3 = −1.
        rows_by_field = SplitRows(lens, first_pages - split_starts, num_splits, num_iterations)
        split_rows_table = jnp.pad(jnp.stack(rows_by_field, axis=1), ((0, 1), (0, 0)))

        def attend_batch(batch: Array, states: Softmax) -> Softmax:
            """Return `states` with those of batch `batch`: splits batch × `batch_size` …, numbered over all rows.

            Each iteration computes one page of every split of the batch (`attend_pages`), until the split with the most
            pages is done. Split s of a row with n splits has the pages s, s + n, s + 2n …, so the page's table index
            grows by n. Splits with fewer pages go on beyond the row's end, where every slot is masked.
            """
            splits = batch * batch_size + jnp.arange(batch_size)
            # As many rows as have all their splits before this one. Splits that fill up the last batch get row R.
            row_of_split = jnp.sum(split_ends[None] <= splits[:, None], axis=1, dtype=jnp.int32)
            split_rows = SplitRows(*split_rows_table[row_of_split].T)
            queries = q[jnp.minimum(row_of_split, num_rows - 1)] * self.pages.options.scale
            first_table_indices = split_rows.page_offsets + splits

            def attend_pages(iteration: Array, state: Softmax) -> Softmax:
                table_indices = first_table_indices + iteration * split_rows.num_splits
                pages = tables.at[row_of_split, table_indices].get(mode="clip")  # Beyond the table, any page will do.
                return self._attend_page(queries, pages, table_indices, split_rows.lens, state)

            state = lax.fori_loop(0, jnp.max(split_rows.num_iterations), attend_pages, Softmax.start(queries, None))
            return jax.tree.map(
                lambda old, new: lax.dynamic_update_slice_in_dim(old, new, batch * batch_size, 0), states, state
            )

        # All splits that there may be, filled up to whole batches, and one more state.
        max_states = num_rows * self.max_splits
        max_states += -max_states % batch_size
        # The last state is never written: it is empty, and is merged into rows that have no split left. The values of
        # the others begin as copies of a query and are overwritten before they are read: zeros would be a constant, of
        # which XLA:CPU would keep one for every layer.
        states = Softmax.start(jnp.zeros((max_states + 1, *q.shape[1:]), jnp.float32), None)
        states = replace(states, values=jnp.concatenate([jnp.repeat(q[:1], max_states, axis=0), states.values[-1:]]))
        # Adding `batch_size` − 1 makes the division by it round up; `max_states` is a multiple of it.
        num_padded_splits = max_states if self.has_static_counts else split_ends[-1] + batch_size - 1
        states = lax.fori_loop(0, num_padded_splits // batch_size, attend_batch, states)

        def split_state(index: Array | int) -> Softmax:
            """Return the state of split `index` of each row; the empty state for rows with fewer splits."""
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
        table_indices: Int[Array, " b"],
        lens: Int[Array, " b"],
        state: Softmax,
    ) -> Softmax:
        """Return the softmax state of b splits after one more page of each: one step of the online softmax.

        A split is a part of the pages of one row (sequence). `q` [b, K, G, H] is the row's query, scaled, G heads for
        each of K KV heads. `pages` are the pages' indices in the arrays of keys and values of all layers.
        `table_indices` are the indices of the same pages in their rows' page tables, and give the positions of their
        slots. `lens` is the length of each split's row. Slots from the row's end on, or before its window, are masked:
        with a window of 4, a row of 10 tokens sees the positions 6 … 9. A page without any other slot leaves the state
        as it is.
        """
        page_size, window = self.pages.page_size, self.pages.options.window
        positions = table_indices[:, None] * page_size + jnp.arange(page_size)[None]
        is_visible = positions < lens[:, None]
        if window is not None:
            is_visible &= positions >= (lens - window)[:, None]
        k = as_float32(self.pages.keys.at[pages].get(mode="promise_in_bounds"))
        scores = jnp.where(is_visible[:, None, None], self.pages.scores(q, k), -jnp.inf)
        # An unwritten slot may hold NaN, and 0 × NaN is NaN: its value is replaced, not only its weight.
        v = as_float32(self.pages.values.at[pages].get(mode="promise_in_bounds"))
        v = jnp.where(is_visible[:, None, :, None], v, 0.0)
        return state.add(scores, lambda weights: jnp.einsum("bkgs,bksh->bkgh", weights, v))
