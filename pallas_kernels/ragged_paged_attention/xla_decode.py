"""Rows with one query each, in plain XLA: a tile of rows, some pages of each at a time.

    row 0   ■ ■ ■ ■ ■ ◧        ■ full pages, all of whose slots are seen: a loop over `pages_a_turn` of each row,
    row 1   ■ ■ ■ ◧              [r × p, K, H, Z] keys in one batched product, no slot masked
    row 2   ■ ◧                ◧ the page of the last token: once, before the loop, its dead slots masked
    …                            (they may hold NaN, and 0 × NaN is NaN: the value is replaced too)

Rows come longest first, so those of a tile have about as many pages. A row that has run out of pages takes the null
page, which stays in the processor's cache; what comes of it is dropped. What is computed for a row, and in which order,
does not depend on the other rows: its bits are the same in any company.

On a CPU the time goes into copying pages together, and XLA copies 64 or fewer values at a time one by one (it unrolls
the inner loop before it could make vectors of it): 12 GB/s where rows of 128 values take 21 GB/s on one core. So pages
are read as rows of at least 128 values, f of the true ones side by side, and the product is taken with f times the
queries, of which each row wants one part:

    keys [H, Z]  →  [H / f, f × Z]     queries [G, H]  →  [f × G, H / f]     scores [f × G, f × Z]: the f diagonal blocks
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .interface import NULL_PAGE
from .xla_softmax import Softmax

VECTOR_ROW = 128
MAX_FOLD = 4


@dataclass(frozen=True)
class DecodeTiles:
    """Some rows of one layer, and how they are taken."""

    k_pages: Float[Array, "C K H Z"]
    v_pages: Float[Array, "C K Z H"]
    first_page: Int[Array, ""]
    """Where the layer's pages begin."""
    pages_a_turn: int
    is_folded: bool
    window: int | None
    soft_cap: float | None

    def attend(
        self,
        q: Float[Array, "r K G H"],
        tables: Int[Array, "r P"],
        lens: Int[Array, " r"],
        num_seen: Int[Array, " r"] | int,
        state: Softmax,
    ) -> Float[Array, "r K G H"]:
        """Attend to the first `lens` tokens of each row, of whose pages `state` has seen the first `num_seen`."""
        page_size = self.v_pages.shape[2]
        last = jnp.maximum(lens - 1, 0) // page_size
        first = jnp.minimum(num_seen, last)
        if self.window is not None:
            first = jnp.maximum(first, jnp.maximum(lens - self.window, 0) // page_size)
        state = self._see_last(q, self._pages(tables, last[:, None], lens[:, None] > 0), lens, last, state)

        def see_pages(turn: Array, state: Softmax) -> Softmax:
            indices = first[:, None] + turn * self.pages_a_turn + jnp.arange(self.pages_a_turn)[None]
            is_live = indices < last[:, None]
            return self._see_full(q, self._pages(tables, indices, is_live), lens, indices, is_live, state)

        num_turns = (jnp.max(last - first) + self.pages_a_turn - 1) // self.pages_a_turn
        return lax.fori_loop(0, num_turns, see_pages, state).result()

    def _pages(self, tables: Int[Array, "r P"], indices: Int[Array, "r p"], is_live: Array) -> Int[Array, "r p"]:
        pages = jnp.take_along_axis(tables, jnp.minimum(indices, tables.shape[1] - 1), axis=1)
        return self.first_page + jnp.where(is_live, pages, NULL_PAGE)

    def _see_last(
        self, q: Array, pages: Int[Array, "r 1"], lens: Int[Array, " r"], last: Int[Array, " r"], state: Softmax
    ) -> Softmax:
        page_size = self.v_pages.shape[2]
        slots = last[:, None] * page_size + jnp.arange(page_size)[None]
        is_seen = slots < lens[:, None]
        if self.window is not None:
            is_seen &= slots >= lens[:, None] - self.window
        scores = jnp.where(is_seen[:, None, None], self._scores(q, pages)[:, 0], -jnp.inf)
        v = jnp.where(is_seen[:, None, :, None], self.v_pages[pages[:, 0]].astype(jnp.float32), 0.0)
        return state.add(scores[:, None], lambda weights: _dot("rkgs,rksh->rkgh", weights[:, 0], v))

    def _see_full(
        self,
        q: Array,
        pages: Int[Array, "r p"],
        lens: Int[Array, " r"],
        indices: Int[Array, "r p"],
        is_live: Array,
        state: Softmax,
    ) -> Softmax:
        is_seen = is_live[:, :, None, None, None]
        if self.window is not None:
            page_size = self.v_pages.shape[2]
            slots = indices[..., None] * page_size + jnp.arange(page_size)[None, None]
            is_seen = is_seen & (slots >= (lens - self.window)[:, None, None])[:, :, None, None]
        scores = jnp.where(is_seen, self._scores(q, pages), -jnp.inf)

        def weigh(weights: Array) -> Array:
            values = self._values(weights, pages)
            return jnp.sum(jnp.where(is_live[:, :, None, None, None], values, 0.0), axis=1)

        return state.add(scores, weigh)

    def _scores(self, q: Float[Array, "r K G H"], pages: Int[Array, "r p"]) -> Float[Array, "r p K G Z"]:
        num_pages, num_heads, head_size, page_size = self.k_pages.shape
        fold = self._fold(page_size, head_size)
        k = self.k_pages.reshape(num_pages, num_heads, head_size // fold, fold * page_size)[pages.reshape(-1)]
        queries = jnp.broadcast_to(q[:, None], (*pages.shape, *q.shape[1:])).reshape(-1, *q.shape[1:])
        scores = _diagonal(_dot("rkgh,rkhs->rkgs", _folded(queries, fold), k), fold).reshape(
            *pages.shape, *q.shape[1:3], page_size
        )
        return scores if self.soft_cap is None else self.soft_cap * jnp.tanh(scores / self.soft_cap)

    def _values(self, weights: Float[Array, "r p K G Z"], pages: Int[Array, "r p"]) -> Float[Array, "r p K G H"]:
        num_pages, num_heads, page_size, head_size = self.v_pages.shape
        fold = self._fold(head_size, page_size)
        v = self.v_pages.reshape(num_pages, num_heads, page_size // fold, fold * head_size)[pages.reshape(-1)]
        by_page = weights.reshape(-1, *weights.shape[2:])
        values = _diagonal(_dot("rkgs,rksh->rkgh", _folded(by_page, fold), v), fold)
        return values.reshape(*weights.shape[:4], head_size)

    def _fold(self, row_len: int, num_rows: int) -> int:
        """How many rows of a page are read as one: of `row_len` values each, `num_rows` there are."""
        fold = 1
        while self.is_folded and fold < MAX_FOLD and fold * row_len < VECTOR_ROW and num_rows % (2 * fold) == 0:
            fold *= 2
        return fold


def _dot(spec: str, left: Any, right: Any) -> Array:
    return jnp.einsum(spec, left, right.astype(jnp.float32), preferred_element_type=jnp.float32)


def _folded(x: Float[Array, "b K G S"], fold: int) -> Float[Array, "b K fG S/f"]:
    """Every f-th value of each row, f rows of them: the left side of a product with a folded page."""
    if fold == 1:
        return x
    batch, num_heads, group, length = x.shape
    parts = jnp.moveaxis(x.reshape(batch, num_heads, group, length // fold, fold), 4, 2)
    return parts.reshape(batch, num_heads, fold * group, length // fold)


def _diagonal(x: Float[Array, "b K fG fS"], fold: int) -> Float[Array, "b K G S"]:
    """Sum of the blocks in which both sides are of the same part."""
    if fold == 1:
        return x
    batch, num_heads, rows, columns = x.shape
    blocks = x.reshape(batch, num_heads, fold, rows // fold, fold, columns // fold)
    total = blocks[:, :, 0, :, 0]
    for part in range(1, fold):
        total += blocks[:, :, part, :, part]
    return total
