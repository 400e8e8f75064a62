"""Rows that begin with the same pages attend to these together: the reads of one row, one matrix product for all.

    row 0  A B C D e            shared: rows 0, 1, 3 begin with A B C; they take them as a tile of queries takes a row,
    row 1  A B C f g            [K, G × 3, H] over [K, H, S], and leave with a softmax each
    row 2  h i j                own: each row goes on from there with what is left of its pages
    row 3  A B C k

The host finds them in the page tables. Rounding depends on who shares, so a row's bits depend on its company: whoever
promises otherwise leaves this off. A CPU's native code takes the plan and not these loops: each row's bits are its own.

Source: Ye et al. 2025, arXiv:2501.01005 (attention states that are merged).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from ..interface import NULL_PAGE
from .prefill import PrefillTiles, by_head, by_row
from .softmax import Softmax

MAX_GROUPS = 8
"""Groups of rows that the host looks at in a step, the largest first: each costs it time."""


class Sections(NamedTuple):
    """Parts of the plan: views of a numpy array, slices of a traced one."""

    count: Any
    """Tiles in use, [1]."""
    tiles: Any
    """[3, tiles]: its first place in `rows`, its rows, its pages."""
    rows: Any
    """[R]: the rows of all tiles, one tile after the other."""
    num_seen: Any
    """[R]: pages that each row of the step has seen when it goes on by itself."""


@dataclass(frozen=True)
class SharedPlan:
    """How the shared pages of a step with room for that many rows are written into its plan."""

    num_rows: int
    tile_rows: int

    @property
    def num_tiles(self) -> int:
        return MAX_GROUPS + self.num_rows // self.tile_rows

    @property
    def size(self) -> int:
        return 1 + 3 * self.num_tiles + 2 * self.num_rows

    def sections(self, plan: Any) -> Sections:
        ends = np.cumsum([1, 3 * self.num_tiles, self.num_rows])
        count, tiles, rows, num_seen = (plan[a:b] for a, b in zip([0, *ends], [*ends, self.size], strict=True))
        return Sections(count, tiles.reshape(3, -1), rows, num_seen)

    def fill(
        self,
        out: np.ndarray,
        context_lens: np.ndarray,
        page_tables: np.ndarray,
        table_rows: np.ndarray,
        *,
        page_size: int,
        min_saved_tokens: int,
    ) -> None:
        """Find the rows with one query that begin with the same pages; the arguments hold these rows only.

        A group is taken if its rows together are spared reading `min_saved_tokens`. `out` is zeros.
        """
        sections = self.sections(out)
        num_tiles = place = 0
        for members, num_pages in shared_prefixes(context_lens, page_tables, table_rows, page_size):
            if (len(members) - 1) * num_pages * page_size < min_saved_tokens:
                continue
            sections.rows[place : place + len(members)] = members
            sections.num_seen[members] = num_pages
            for start in range(0, len(members), self.tile_rows):
                sections.tiles[:, num_tiles] = place + start, min(self.tile_rows, len(members) - start), num_pages
                num_tiles += 1
            place += len(members)
        sections.count[:] = num_tiles


def shared_prefixes(
    context_lens: np.ndarray, page_tables: np.ndarray, table_rows: np.ndarray, page_size: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Groups of rows, and the number of full pages that all rows of a group begin with; no row is in two groups.

    Rows with the same first page are compared with the longest of them, and as many pages taken as save most; the
    rows that do not have so many are looked at again. A row's last page is its own. A null entry of a page-table
    group equals any: the window of that group's layers has passed, and the other groups decide.
    """
    num_full = (context_lens - 1) // page_size
    rows = np.flatnonzero(num_full)
    rows = rows[np.argsort(page_tables[0, table_rows[rows], 0], kind="stable")]
    starts = np.flatnonzero(np.diff(page_tables[0, table_rows[rows], 0]))
    parts = [part for part in np.split(rows, starts + 1) if len(part) > 1]
    for _ in range(MAX_GROUPS):
        if not parts:
            return
        members = parts.pop(int(np.argmax([len(part) for part in parts])))
        longest = members[np.argmax(num_full[members])]
        length = num_full[longest]
        tables = page_tables[:, table_rows[members], :length]
        first = page_tables[:, table_rows[longest], None, :length]
        is_other = ((tables != first) & (tables != NULL_PAGE) & (first != NULL_PAGE)).any(axis=0)
        num_same = np.where(is_other.any(axis=1), is_other.argmax(axis=1), length)
        num_same = np.minimum(num_same, num_full[members])
        num_pages = np.sort(num_same)[::-1]
        best = num_pages[(np.arange(len(members)) * num_pages).argmax()]
        if best:
            yield members[num_same >= best], int(best)
        rest = members[num_same < best]
        if best and len(rest) > 1:
            parts.append(rest)


def see_shared(
    tiles: PrefillTiles,
    q: Float[Array, "R K G H"],
    tables: Int[Array, "R P"],
    place: SharedPlan,
    plan: Int[Array, " shared"],
    state: Softmax,
) -> Softmax:
    """Let the rows of each tile see the pages that they share."""
    sections = place.sections(plan)
    page_size, group, tile = tiles.pages.page_size, q.shape[2], place.tile_rows
    rows = jnp.pad(sections.rows, (0, tile))

    def see_tile(index: Array, state: Softmax) -> Softmax:
        start, count, num_pages = sections.tiles[:, index]
        members = lax.dynamic_slice_in_dim(rows, start, tile)
        before = jax.tree.map(lambda x: by_head(x[members])[None], state)
        end = num_pages * page_size
        # All queries stand behind all of the shared pages.
        positions = jnp.full((group * tile,), end)
        after = tiles.attend(by_head(q[members]), tables[members[0]], positions, end, before)
        places = jnp.where(jnp.arange(tile) < count, members, place.num_rows)
        return jax.tree.map(
            lambda old, new: old.at[places].set(by_row(new[0], group), mode="drop"),
            state,
            after,
        )

    return lax.fori_loop(0, sections.count[0], see_tile, state)
