"""Rows with one query each, in plain XLA, on devices: their pages dealt over strands, a turn's worth at a time.

    row 0, 7 pages   strand 0  ■ ■ ■ ◧      ■ page whose slots are all seen     ◧ the row's last page
                     strand 1  ■ ■ ■ ·      · nothing left: the null page, which stays in the processor's cache
    row 1, 3 pages   strand 2  ■ ■ ◧ ·
    row 2, 2 pages   strand 3  ■ ◧ · ·      ─▶ turns
                k [w, K, H, Z], v [w, K, Z, H], q [w, K, G, H]: two batched products a turn, w strands at once

Strands lie one after the other whatever row they are of, so that a short row takes no more turns than it needs beside
a long one. Each has a softmax of its own; those of all rows are kept, and become one for each row in the end. Over how
many strands a row's pages are dealt, what is computed for it, and in which order, does not depend on the other rows:
its bits are the same in any company.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..interface import NULL_PAGE
from .pages import XlaPages
from .softmax import Softmax


@dataclass(frozen=True)
class DecodeStrands:
    """How the pages of rows are dealt over strands, and how these are taken."""

    pages: XlaPages
    strands_a_turn: int
    most_strands: int
    """Of a row."""
    strand_pages: int
    """A strand has as many, if its row has, and more only if the row had too many strands otherwise."""

    def attend(
        self,
        q: Float[Array, "R K G H"],
        tables: Int[Array, "R P"],
        lens: Int[Array, " R"],
        num_seen: Int[Array, " R"],
    ) -> Softmax:
        """Attend to the first `lens` tokens of each row, but not to its first `num_seen` pages.

        A row of length 0 sees nothing and takes no time.
        """
        page_size, window, width = self.pages.page_size, self.pages.options.window, self.strands_a_turn
        num_rows, num_pages = len(lens), (lens + page_size - 1) // page_size
        first = num_seen if window is None else jnp.maximum(lens - window, 0) // page_size
        count = num_pages - first
        longest = jnp.maximum((count + self.most_strands - 1) // self.most_strands, self.strand_pages)
        num_strands = (count + longest - 1) // longest
        num_turns = jnp.minimum(longest, count)
        ends = jnp.cumsum(num_strands)
        starts = ends - num_strands
        # Behind the last row stands one of length 0, for strands of a last turn that are nobody's.
        is_live = jnp.arange(tables.shape[1])[None] < num_pages[:, None]
        tables = self.pages.first_page + jnp.pad(jnp.where(is_live, tables, NULL_PAGE), ((0, 1), (0, 0)))
        rows = jnp.pad(jnp.stack([lens, first - starts, num_strands, num_turns], axis=1), ((0, 1), (0, 0)))

        def see_strands(index: Array, strands: Softmax) -> Softmax:
            places = index * width + jnp.arange(width)
            of_row = jnp.sum(ends[None] <= places[:, None], axis=1, dtype=jnp.int32)
            row_lens, offsets, steps, turns = rows[of_row].T
            queries, first_pages = q[jnp.minimum(of_row, num_rows - 1)] * self.pages.options.scale, offsets + places

            def see_pages(turn: Array, state: Softmax) -> Softmax:
                indices = first_pages + turn * steps
                pages = tables.at[of_row, indices].get(mode="clip")
                return self._see(queries, pages, indices, row_lens, state)

            state = lax.fori_loop(0, jnp.max(turns), see_pages, Softmax.start(queries, None))
            return jax.tree.map(
                lambda kept, new: lax.dynamic_update_slice_in_dim(kept, new, index * width, 0), strands, state
            )

        most = num_rows * self.most_strands
        most += -most % width
        # The last one is never written: it has seen nothing, and is merged into rows that have no strand left. Others
        # begin as copies of a query, which nobody reads: zeros for all layers XLA:CPU would make before the first.
        strands = Softmax.start(jnp.zeros((most + 1, *q.shape[1:])), None)
        strands = replace(strands, values=jnp.concatenate([jnp.repeat(q[:1], most, axis=0), strands.values[-1:]]))
        strands = lax.fori_loop(0, (ends[-1] + width - 1) // width, see_strands, strands)

        def strand(index: Array | int) -> Softmax:
            places = jnp.where(index < num_strands, starts + index, most)
            return jax.tree.map(lambda x: x[places], strands)

        return lax.fori_loop(1, jnp.max(num_strands), lambda index, state: state.and_also(strand(index)), strand(0))

    def _see(
        self,
        q: Float[Array, "b K G H"],
        pages: Int[Array, " b"],
        indices: Int[Array, " b"],
        lens: Int[Array, " b"],
        state: Softmax,
    ) -> Softmax:
        """See one page of each strand, the one at `indices` in its row."""
        page_size, window = self.pages.page_size, self.pages.options.window
        slots = indices[:, None] * page_size + jnp.arange(page_size)[None]
        is_seen = slots < lens[:, None]
        if window is not None:
            is_seen &= slots >= (lens - window)[:, None]
        k = self.pages.keys.at[pages].get(mode="promise_in_bounds").astype(jnp.float32)
        scores = jnp.where(is_seen[:, None, None], self.pages.scores(q, k), -jnp.inf)
        # A dead slot may hold NaN, and 0 × NaN is NaN: its value is replaced, not only its weight.
        v = self.pages.values.at[pages].get(mode="promise_in_bounds").astype(jnp.float32)
        v = jnp.where(is_seen[:, None, :, None], v, 0.0)
        return state.add(scores, lambda weights: jnp.einsum("bkgs,bksh->bkgh", weights, v))
