"""Plans a step for backends that take queries in tiles: query tiles of prefill rows, and rows that share first pages.

    row 0  A B C D e            shared tile: rows 0, 1 and 3 begin with pages A B C and attend to these together, as a
    row 1  A B C f g            tile of queries; each row then goes on alone with its other pages
    row 2  h i j                decode rows that share nothing need no entry in the plan
    row 3  A B C k
    rows with many queries      query tiles in token order

Pure numpy on the host. The plan is one int32 array, whose parts `TilePlanner.sections` returns.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .interface import Backend, PlanRows

LEAST_TILE = 16
"""Queries of a full query tile at least, unless `tile_q` is less."""
MAX_PREFIXES = 8
"""Sets of rows with the same first pages that the host looks for in a step, the largest first: each costs it time."""


class PlanSections(NamedTuple):
    """Parts of a plan: views of a numpy array, slices of a traced one."""

    num_query_tiles: Any
    """[1]: query tiles in use."""
    query_tiles: Any
    """[3, tiles]: row, first token, number of queries."""
    num_shared_tiles: Any
    """[1]: shared tiles in use."""
    shared_tiles: Any
    """[3, tiles]: index of the tile's first row in `members`, number of rows, number of pages."""
    members: Any
    """[R]: the rows of all shared tiles, one tile after the other."""
    num_shared_pages: Any
    """[R]: pages that each row of the step attends to in a shared tile; 0 for rows that share none."""

    def without_shared_tiles(self) -> PlanSections:
        """Return the plan in which each decode row attends to all its pages alone."""
        return self._replace(num_shared_tiles=0 * self.num_shared_tiles, num_shared_pages=0 * self.num_shared_pages)


@dataclass(frozen=True)
class TilePlanner:
    """Writes and reads plans."""

    tile_q: int
    """Queries of a query tile at most."""
    shared_rows: int
    """Rows of a shared tile."""
    is_sharing: bool
    """Whether rows with the same first pages are looked for."""
    min_saved_tokens: int
    """Tokens that a set of rows must be spared reading to become shared tiles."""
    min_tiles: int = 1
    """Full query tiles of one row that a step has room for, however few its tokens: threads share these."""

    def tile_len(self, num_tokens: int) -> int:
        """Return the queries of a query tile in a step that is padded to that many tokens.

        With `tile_q` 64 and 8 tiles, these are 64 in steps of 512 tokens, 32 in those of 256, and 16 in those of 128
        and less (`LEAST_TILE`).
        """
        return min(self.tile_q, max(LEAST_TILE, num_tokens // self.min_tiles))

    def plan_len(self, num_tokens: int, num_rows: int, *, decodes_only: bool = False) -> int:
        """Return the length of the plan of a step that is padded to that many tokens and rows."""
        return sum(self._lens(num_tokens, num_rows, decodes_only))

    def sections(self, plan: Any, num_tokens: int, num_rows: int, *, decodes_only: bool = False) -> PlanSections:
        """Return the parts of the plan of a step that is padded to `num_tokens` tokens and `num_rows` rows (sequences).

        The parts lie one after another in `plan`, one int32 array. If it is a numpy array, they are views of it, and
        assigning to their elements writes the plan; if it is a traced array, they are slices. Tiles are reshaped to
        [3, tiles], one column per tile. With `decodes_only` there is no column for query tiles.
        """
        offsets = np.cumsum([0, *self._lens(num_tokens, num_rows, decodes_only)]).tolist()
        sections = PlanSections(*(plan[begin:end] for begin, end in itertools.pairwise(offsets)))
        query_tiles, shared_tiles = sections.query_tiles.reshape(3, -1), sections.shared_tiles.reshape(3, -1)
        return sections._replace(query_tiles=query_tiles, shared_tiles=shared_tiles)

    def fill(self, rows: PlanRows, out: np.ndarray) -> None:
        """Write the plan for these rows into `out`, int32, which the caller has filled with zeros.

        The plan has query tiles of the prefill rows, those with more than one query, and shared tiles: sets of decode
        rows, which have one query each, that begin with the same pages. All zeros are a valid plan without any tile. So
        nothing is written if there are only decode rows and this planner looks for no shared pages.
        """
        if rows.num_decode_rows == len(rows.query_lens) and not self.is_sharing:
            return
        sections = self.sections(out, rows.padded_tokens, rows.padded_rows, decodes_only=rows.decodes_only)
        self._fill_query_tiles(rows, sections)
        if self.is_sharing:
            self._fill_shared_tiles(rows, sections)

    def _lens(self, num_tokens: int, num_rows: int, decodes_only: bool) -> tuple[int, ...]:
        """Return the lengths of the parts of a plan, in the order of the fields of `PlanSections`.

        A tile takes 3 numbers. The numbers of tiles are upper bounds: each prefill row may end in a query tile that is
        not full, and each of at most `MAX_PREFIXES` = 8 sets of rows in a shared tile that is not full.
        """
        num_query_tiles = 0 if decodes_only else num_tokens // self.tile_len(num_tokens) + num_rows
        num_shared_tiles = MAX_PREFIXES + num_rows // min(self.shared_rows, num_rows)
        return 1, 3 * num_query_tiles, 1, 3 * num_shared_tiles, num_rows, num_rows

    def _fill_query_tiles(self, rows: PlanRows, out: PlanSections) -> None:
        """Cut the prefill rows, which follow the decode rows of one token each, into tiles of `tile_len` tokens.

        The tiles are the first columns of `out.query_tiles`, [3, tiles], and their number goes to
        `out.num_query_tiles`. With one decode row, then rows of 20 and 3 tokens and tiles of 16, the tiles (row, first
        token of the step, number of tokens) are (1, 1, 16), (1, 17, 4) and (2, 21, 3).
        """
        tile_len = self.tile_len(rows.padded_tokens)
        num_tiles, begin = 0, rows.num_decode_rows  # Decode rows have one token each; prefill tokens follow.
        tile_rows, first_tokens, lens = out.query_tiles
        for row in range(rows.num_decode_rows, len(rows.query_lens)):
            end = begin + int(rows.query_lens[row])
            for first_token in range(begin, end, tile_len):
                num_queries = min(tile_len, end - first_token)
                tile_rows[num_tiles], first_tokens[num_tiles], lens[num_tiles] = row, first_token, num_queries
                num_tiles += 1
            begin = end
        out.num_query_tiles[:] = num_tiles

    def _fill_shared_tiles(self, rows: PlanRows, out: PlanSections) -> None:
        """Cut the sets of decode rows that share a prefix into tiles of at most `shared_rows` rows.

        A set is left out if sharing spares it fewer than `min_saved_tokens` tokens of reads: a set of n rows reads its
        prefix once and not n times. The rows of all sets stand in `out.members`, one set after another. A tile is a
        column of `out.shared_tiles`: the index of its first row there, its number of rows, and the number of shared
        pages. With tiles of 4 rows, a set of 6 rows with 9 shared pages becomes the tiles (0, 4, 9) and (4, 2, 9). The
        number of tiles goes to `out.num_shared_tiles`, and each of these rows gets its number of shared pages in
        `out.num_shared_pages`, which stays 0 for all others.
        """
        if not len(rows.page_tables):
            return  # Every layer has a window: there is no table of full attention, and rows share no work.
        decode = slice(rows.num_decode_rows)
        prefixes = shared_prefixes(rows.context_lens[decode], rows.page_tables, rows.table_rows[decode], rows.page_size)
        num_tiles = first_member = 0
        for members, num_pages in prefixes:
            if (len(members) - 1) * num_pages * rows.page_size < self.min_saved_tokens:
                continue
            out.members[first_member : first_member + len(members)] = members
            out.num_shared_pages[members] = num_pages
            for offset in range(0, len(members), self.shared_rows):
                num_rows = min(self.shared_rows, len(members) - offset)
                out.shared_tiles[:, num_tiles] = first_member + offset, num_rows, num_pages
                num_tiles += 1
            first_member += len(members)
        out.num_shared_tiles[:] = num_tiles


class SharedPrefix(NamedTuple):
    """Rows of a step that begin with the same pages."""

    rows: np.ndarray
    """[n] rows of the step."""
    num_pages: int
    """Full pages that all of these rows begin with."""


def shared_prefixes(
    context_lens: np.ndarray, page_tables: np.ndarray, table_rows: np.ndarray, page_size: int
) -> Iterator[SharedPrefix]:
    """Yield sets of rows that begin with the same pages, and the number of these pages.

    `context_lens` [R] are the tokens of each row (sequence). `page_tables` [groups, tables, P] holds row r's pages in
    table `table_rows[r]`; rows share a page if it is the same in all page-table groups. No row is in two sets, and a
    row's last page, which may be partial, is never shared. There are at most `MAX_PREFIXES` = 8 searches; each yields
    one set, whose rows ascend. It is one row alone if the tables of another group differ from the first page on.

    A search takes the largest set of rows with the same first page and compares each row with the longest one, page by
    page. Of all numbers of common pages it takes the one that saves most page reads, (rows − 1) × pages. If some rows
    have fewer common pages, these rows become a candidate for another search. Example: four rows have 9, 9, 9 and 2
    pages in common with the longest, which is one of them. Three rows with 9 pages are yielded, since that saves 18
    reads, while four rows with 2 pages would save 6. The fourth row is then alone.
    """
    num_full_pages = (context_lens - 1) // page_size  # The page of the last token is not counted, even if it is full.
    rows = np.flatnonzero(num_full_pages)
    # Sorted by their first page in the first page-table group, rows that may share stand side by side.
    rows = rows[np.argsort(page_tables[0, table_rows[rows], 0], kind="stable")]
    ends_of_sets = np.flatnonzero(np.diff(page_tables[0, table_rows[rows], 0]))
    # One candidate, an array of rows, for each first page that several rows have.
    candidates = [candidate for candidate in np.split(rows, ends_of_sets + 1) if len(candidate) > 1]
    for _ in range(MAX_PREFIXES):
        if not candidates:
            return
        candidate = candidates.pop(int(np.argmax([len(members) for members in candidates])))
        longest_row = candidate[np.argmax(num_full_pages[candidate])]
        max_pages = num_full_pages[longest_row]
        candidate_tables = page_tables[:, table_rows[candidate], :max_pages]
        longest_table = page_tables[:, table_rows[longest_row], None, :max_pages]
        is_other_page = (candidate_tables != longest_table).any(axis=0)
        common_pages = np.where(is_other_page.any(axis=1), is_other_page.argmax(axis=1), max_pages)
        # Table entries after a row's own pages may hold anything, so they do not count.
        common_pages = np.minimum(common_pages, num_full_pages[candidate])
        # With the rows in descending order of common pages, taking the first n + 1 rows saves n × descending[n] reads.
        # The longest row has all its pages in common with itself, so there is at least one shared page. It stays alone
        # if no other row has any, which needs another page-table group: all have their first page of group 0 in common.
        descending = np.sort(common_pages)[::-1]
        shared_pages = descending[(np.arange(len(candidate)) * descending).argmax()]
        yield SharedPrefix(candidate[common_pages >= shared_pages], int(shared_pages))
        other_rows = candidate[common_pages < shared_pages]
        if len(other_rows) > 1:
            candidates.append(other_rows)


class TiledBackend(Backend):
    """A backend whose steps `TilePlanner` plans."""

    @property
    @abstractmethod
    def planner(self) -> TilePlanner:
        """Return the planner that writes and reads this backend's plans."""

    def plan_len(self, num_tokens: int, num_rows: int, *, decodes_only: bool = False) -> int:
        """See `Backend.plan_len`."""
        return self.planner.plan_len(num_tokens, num_rows, decodes_only=decodes_only)

    def plan(self, rows: PlanRows, out: np.ndarray) -> None:
        """See `Backend.plan`."""
        self.planner.fill(rows, out)
