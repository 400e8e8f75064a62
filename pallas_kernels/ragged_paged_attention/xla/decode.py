"""Rows with one query each, in plain XLA: each row's pages are cut into KV splits, taken some splits at a time.

    row 0, 7 pages   split 0  ■ ■ ■ ◧      ■ page whose slots are all seen     ◧ the row's last page
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

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..interface import NULL_PAGE
from .pages import XlaPages, as_float32
from .softmax import Softmax


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
        self, q: Float[Array, "R K G H"], tables: Int[Array, "R P"], lens: Int[Array, " R"], num_seen: Int[Array, " R"]
    ) -> Softmax:
        """Attend to the first `lens` tokens of each row, but not to its first `num_seen` pages.

        A row of length 0 sees nothing and takes no time.
        """
        page_size, window, width = self.pages.page_size, self.pages.options.window, self.batch_size
        num_rows, num_pages = len(lens), (lens + page_size - 1) // page_size
        first = num_seen if window is None else jnp.maximum(lens - window, 0) // page_size
        count = num_pages - first
        longest = jnp.maximum((count + self.max_splits - 1) // self.max_splits, self.min_pages)
        num_splits = (count + longest - 1) // longest
        num_iterations = jnp.minimum(longest, count)
        ends = jnp.cumsum(num_splits)
        starts = ends - num_splits
        # A row of length 0 follows the last row: splits that fill up the last batch belong to it.
        is_live = jnp.arange(tables.shape[1])[None] < num_pages[:, None]
        tables = self.pages.first_page + jnp.pad(jnp.where(is_live, tables, NULL_PAGE), ((0, 1), (0, 0)))
        rows = jnp.pad(jnp.stack([lens, first - starts, num_splits, num_iterations], axis=1), ((0, 1), (0, 0)))

        def see_splits(index: Array, states: Softmax) -> Softmax:
            splits = index * width + jnp.arange(width)
            split_rows = jnp.sum(ends[None] <= splits[:, None], axis=1, dtype=jnp.int32)
            row_lens, offsets, strides, iterations = rows[split_rows].T
            queries, first_pages = q[jnp.minimum(split_rows, num_rows - 1)] * self.pages.options.scale, offsets + splits

            def see_pages(iteration: Array, state: Softmax) -> Softmax:
                indices = first_pages + iteration * strides
                pages = tables.at[split_rows, indices].get(mode="clip")
                return self._see(queries, pages, indices, row_lens, state)

            state = lax.fori_loop(0, jnp.max(iterations), see_pages, Softmax.start(queries, None))
            return jax.tree.map(
                lambda kept, new: lax.dynamic_update_slice_in_dim(kept, new, index * width, 0), states, state
            )

        most = num_rows * self.max_splits
        most += -most % width
        # The last state is never written: it is empty, and is merged into rows that have no split left. The others
        # begin as copies of a query, which is never read: XLA:CPU would keep zeros for every layer at once.
        states = Softmax.start(jnp.zeros((most + 1, *q.shape[1:]), jnp.float32), None)
        states = replace(states, values=jnp.concatenate([jnp.repeat(q[:1], most, axis=0), states.values[-1:]]))
        num_batches = most // width if self.has_static_counts else (ends[-1] + width - 1) // width
        states = lax.fori_loop(0, num_batches, see_splits, states)

        def split_state(index: Array | int) -> Softmax:
            splits = jnp.where(index < num_splits, starts + index, most)
            return jax.tree.map(lambda x: x[splits], states)

        if self.has_static_counts:
            return Softmax.merge_all(jax.vmap(split_state)(jnp.arange(self.max_splits)))
        return lax.fori_loop(
            1, jnp.max(num_splits), lambda index, state: state.merge(split_state(index)), split_state(0)
        )

    def _see(
        self,
        q: Float[Array, "b K G H"],
        pages: Int[Array, " b"],
        indices: Int[Array, " b"],
        lens: Int[Array, " b"],
        state: Softmax,
    ) -> Softmax:
        """Return the state after one more page of each split, the page at `indices` in its row."""
        page_size, window = self.pages.page_size, self.pages.options.window
        slots = indices[:, None] * page_size + jnp.arange(page_size)[None]
        is_seen = slots < lens[:, None]
        if window is not None:
            is_seen &= slots >= (lens - window)[:, None]
        k = as_float32(self.pages.keys.at[pages].get(mode="promise_in_bounds"))
        scores = jnp.where(is_seen[:, None, None], self.pages.scores(q, k), -jnp.inf)
        # An unwritten slot may hold NaN, and 0 × NaN is NaN: its value is replaced, not only its weight.
        v = as_float32(self.pages.values.at[pages].get(mode="promise_in_bounds"))
        v = jnp.where(is_seen[:, None, :, None], v, 0.0)
        return state.add(scores, lambda weights: jnp.einsum("bkgs,bksh->bkgh", weights, v))
