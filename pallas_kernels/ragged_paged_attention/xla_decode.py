"""Rows with one query each, in plain XLA: a tile of rows, some pages of each at a time.

                turn 0    turn 1
    row 0       ■ ■       ■ ◧          ■ page whose slots are all seen     ◧ the row's last page
    row 1       ■ ◧       · ·          · nothing left: the null page, which stays in the processor's cache
    row 2       ◧ ·       · ·
                k [r × p, K, H, Z], v [r × p, K, Z, H], q [r × p, K, G, H]: two batched products a turn

Rows come longest first, so those of a tile have about as many pages. What is computed for a row, and in which order,
does not depend on the other rows: its bits are the same in any company.

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
from .xla_softmax import Softmax

COPIED_AS = 0.5
"""What values are multiplied by on their way: a power of two, which rounds nothing and leaves NaN and infinities."""


@dataclass(frozen=True)
class DecodeTiles:
    """The pages of one layer, and how those of a tile of rows are taken."""

    k_pages: Float[Array, "C K H Z"]
    """Or [C, K, Z, H], if the keys are not transposed."""
    v_pages: Float[Array, "C K Z H"]
    are_keys_transposed: bool
    first_page: Int[Array, ""]
    """Where the layer's pages begin."""
    pages_a_turn: int
    scale: float
    window: int | None
    soft_cap: float | None

    def attend(
        self,
        q: Float[Array, "r K G H"],
        tables: Int[Array, "r P"],
        lens: Int[Array, " r"],
        num_seen: Int[Array, " r"],
        state: Softmax,
    ) -> Float[Array, "r K G H"]:
        """Attend to the first `lens` tokens of each row, of whose pages `state` has seen the first `num_seen`."""
        page_size = self.v_pages.shape[2]
        num_pages = (lens + page_size - 1) // page_size
        first = num_seen if self.window is None else jnp.maximum(lens - self.window, 0) // page_size
        # In the loop it would take longer to compile.
        is_live = jnp.arange(tables.shape[1])[None] < num_pages[:, None]
        tables = self.first_page + jnp.where(is_live, tables, NULL_PAGE)
        q = jnp.broadcast_to(q[:, None], (q.shape[0], self.pages_a_turn, *q.shape[1:]))

        def see_pages(turn: Array, state: Softmax) -> Softmax:
            indices = first[:, None] + turn * self.pages_a_turn + jnp.arange(self.pages_a_turn)[None]
            return self._see(q, jnp.take_along_axis(tables, indices, axis=1, mode="clip"), indices, lens, state)

        num_turns = (jnp.max(num_pages - first) + self.pages_a_turn - 1) // self.pages_a_turn
        state = lax.fori_loop(0, num_turns, see_pages, replace(state, values=state.values * COPIED_AS))
        return state.result() / COPIED_AS

    def _see(
        self,
        q: Float[Array, "r p K G H"],
        pages: Int[Array, "r p"],
        indices: Int[Array, "r p"],
        lens: Int[Array, " r"],
        state: Softmax,
    ) -> Softmax:
        page_size = self.v_pages.shape[2]
        slots = indices[..., None] * page_size + jnp.arange(page_size)[None, None]
        is_seen = slots < lens[:, None, None]
        if self.window is not None:
            is_seen &= slots >= (lens - self.window)[:, None, None]
        is_seen = is_seen.reshape(-1, 1, 1, page_size)
        k = self.k_pages.at[pages.reshape(-1)].get(mode="promise_in_bounds").astype(jnp.float32) * self.scale
        spec = "bkgh,bkhs->bkgs" if self.are_keys_transposed else "bkgh,bksh->bkgs"
        scores = jnp.einsum(spec, q.reshape(-1, *q.shape[2:]), k, preferred_element_type=jnp.float32)
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        scores = jnp.where(is_seen, scores, -jnp.inf)
        # A dead slot may hold NaN, and 0 × NaN is NaN: its value is replaced, not only its weight.
        v = self.v_pages.at[pages.reshape(-1)].get(mode="promise_in_bounds").astype(jnp.float32)
        v = jnp.where(jnp.swapaxes(is_seen, 2, 3), v * COPIED_AS, 0.0)

        def weigh(weights: Array) -> Array:
            values = jnp.einsum("bkgs,bksh->bkgh", weights.reshape(scores.shape), v, preferred_element_type=jnp.float32)
            return jnp.sum(values.reshape(q.shape), axis=1)

        return state.add(scores.reshape(*q.shape[:4], page_size), weigh)
