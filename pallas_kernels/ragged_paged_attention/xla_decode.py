"""Rows with one query each, in plain XLA: a tile of rows, some pages of each at a time.

                turn 0    turn 1
    row 0       ■ ■       ■ ◧          ■ page whose slots are all seen     ◧ the row's last page
    row 1       ■ ◧       · ·          · nothing left: the null page, which stays in the processor's cache
    row 2       ◧ ·       · ·
                k [r × p, K, H, Z], v [r × p, K, Z, H], q [r × p, K, G, H]: two batched products a turn

A row's pages are dealt over p strands, one column of the picture each, with a softmax each; in the end they become
one. So a turn sums nothing over pages, and knows nothing of p. Rows come longest first, so those of a tile have about
as many pages. What is computed for a row, and in which order, does not depend on the other rows: its bits are the same
in any company.

On a CPU the time goes into copying the pages together. XLA copies rows of 64 values or fewer one value at a time: it
unrolls the inner loop before it could make vectors of it. With some arithmetic on the way the loop is too long to be
unrolled and becomes vectors: 16 pages of 64 tokens, 3 heads of 64, take 38 µs on one core and not 65. So keys are
scaled here and not queries, and values are halved here and doubled in the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .interface import NULL_PAGE
from .xla_pages import LayerPages
from .xla_softmax import Softmax

COPIED_AS = 0.5
"""What values are multiplied by on their way: a power of two, which rounds nothing and leaves NaN and infinities."""


@dataclass(frozen=True)
class DecodeTiles:
    """How the pages of a tile of rows are taken."""

    pages: LayerPages
    pages_a_turn: int
    """Of each row."""

    def live(self, tables: Int[Array, "R P"], lens: Int[Array, " R"]) -> Int[Array, "R P"]:
        """Where in the cache the pages of each row are; the null page past its end."""
        num_pages = (lens + self.pages.page_size - 1) // self.pages.page_size
        is_live = jnp.arange(tables.shape[1])[None] < num_pages[:, None]
        return self.pages.first + jnp.where(is_live, tables, NULL_PAGE)

    def attend(
        self,
        q: Float[Array, "r K G H"],
        tables: Int[Array, "r P"],
        lens: Int[Array, " r"],
        num_seen: Int[Array, " r"],
        before: Softmax | None,
    ) -> Float[Array, "r K G H"]:
        """Attend to the first `lens` tokens of each row, of whose pages `before` has seen the first `num_seen`.

        `tables` are `live`: one for all tiles, because each would take longer to make its own.
        """
        page_size, window, num_strands = self.pages.page_size, self.pages.window, self.pages_a_turn
        num_pages = (lens + page_size - 1) // page_size
        first = num_seen if window is None else jnp.maximum(lens - window, 0) // page_size
        q, lens = jnp.repeat(q, num_strands, axis=0), jnp.repeat(lens, num_strands)
        strands = first[:, None] + jnp.arange(num_strands)[None]

        def see_pages(turn: Array, state: Softmax) -> Softmax:
            indices = strands + turn * num_strands
            pages = jnp.take_along_axis(tables, indices, axis=1, mode="clip")
            return self._see(q, pages.reshape(-1), indices.reshape(-1), lens, state)

        num_turns = (jnp.max(num_pages - first) + num_strands - 1) // num_strands
        state = lax.fori_loop(0, num_turns, see_pages, Softmax.start(q, None))
        state = replace(state, values=state.values / COPIED_AS).merged(num_strands)
        return (state if before is None else state.and_also(before)).result()

    def _see(
        self,
        q: Float[Array, "b K G H"],
        pages: Int[Array, " b"],
        indices: Int[Array, " b"],
        lens: Int[Array, " b"],
        state: Softmax,
    ) -> Softmax:
        """See one page of each strand, the one at `indices` in its row."""
        page_size, window = self.pages.page_size, self.pages.window
        slots = indices[:, None] * page_size + jnp.arange(page_size)[None]
        is_seen = slots < lens[:, None]
        if window is not None:
            is_seen &= slots >= (lens - window)[:, None]
        k = self.pages.keys.at[pages].get(mode="promise_in_bounds").astype(jnp.float32) * self.pages.scale
        scores = jnp.where(is_seen[:, None, None], self.pages.scores(q, k), -jnp.inf)
        # A dead slot may hold NaN, and 0 × NaN is NaN: its value is replaced, not only its weight.
        v = self.pages.values.at[pages].get(mode="promise_in_bounds").astype(jnp.float32)
        v = jnp.where(is_seen[:, None, :, None], v * COPIED_AS, 0.0)
        return state.add(scores, lambda weights: jnp.einsum("bkgs,bksh->bkgh", weights, v))
