"""The plan of a GPU step, made on the host: query tiles, their keys split into pieces, and the pieces of each block.

    query rows of one row and KV head: its queries × the G query heads that share the KV head, query by query
      row 0: ├─ tile ─┤├─ tile ─┤├─ ti…        every KV head has the same tiles

    tiles by the length of their keys, end to end, partitioned over `num_lists` thread blocks per KV head:
      ████████████│██████ ████│██ ███ ██│…     a border inside a tile splits its keys into pieces (split-KV, as in
      block 0      block 1      block 2          flash-decoding), whose partial results a second kernel merges;
                                                 most tiles are one piece

Rows of few queries (decode) go into small tiles, all others into large ones: two `TileClass`es, one launch each. The
plan of a step that only decodes has no large tiles, unless the heads of one query fill them. A piece holds no length
that a later step could change: the first piece of a tile begins at key 0 and the last one has no end, and the kernel
takes both from the lengths that it finds on the device. Therefore a plan that was made for longer contexts serves the
steps before as well.

The plan is one int32 array, written by numpy alone. All layers with the same window share one section of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..interface import PlanRows
from .partition import partition

ROW_ALIGN = 8
"""Each row's query rows begin at a multiple of it, because tiles of shared memory have blocks of eight rows."""
SPLIT_GRANULE = 64
"""Key ranges are split at multiples of so many keys."""
RESERVED_BYTES = 1 << 10
"""Shared memory per thread block that the hardware takes for itself."""
REDUCTION_BYTES = 1 << 10
"""Shared memory for reductions over warps: two rows per thread."""
SCRATCH_BYTES = REDUCTION_BYTES + 128
"""Shared memory of a thread block beside its tiles at most, barriers included."""
TEMP_BYTES = 14 << 20
"""Global memory for the aligned queries of 256 tokens and the partial results of one tile class at a time."""
FULL_REGISTERS = (96, 256)
"""Head sizes at which tiles of 16 rows need all registers that three thread blocks leave each other, 168 a thread."""
NO_END = 1 << 30
"""End of the keys of a tile's last piece."""


class Piece(NamedTuple):
    """One piece of work: a query tile over a range of its row's keys. All fields are int32 numbers of the plan."""

    row: Any
    """Row of the step."""
    first_query_row: Any
    """First query row of the tile, among those of its row."""
    aligned_row: Any
    """Index of the first query row among the aligned query rows of the step."""
    begin: Any
    """First key."""
    end: Any
    """Last key + 1, or `NO_END`."""
    partial: Any
    """Index of the piece's partial result, or −1 if the piece is its whole tile."""


class Merge(NamedTuple):
    """One tile whose keys were split. All fields are int32 numbers of the plan."""

    aligned_row: Any
    """First of its query rows among the aligned query rows of the step."""
    num_query_rows: Any
    first_partial: Any
    """Index of its first partial result; the others follow."""
    num_partials: Any


PIECE_FIELDS, MERGE_FIELDS = len(Piece._fields), len(Merge._fields)


@dataclass(frozen=True)
class TileClass:
    """Sizes of the small or the large query tiles of a step, all static."""

    tile_rows: int
    """M: query rows of a tile."""
    num_lists: int
    """Thread blocks per KV head, each with a list of pieces."""
    max_splits: int
    max_tiles: int

    @property
    def max_merges(self) -> int:
        """Return the largest number of tiles that are split."""
        return min(self.max_splits, self.max_tiles)

    @property
    def max_pieces(self) -> int:
        """Return the largest number of pieces: every split makes one more."""
        return self.max_tiles + self.max_splits

    @property
    def num_partials(self) -> int:
        """Return the number of partial results that must have room: the pieces of split tiles."""
        return 2 * self.max_splits


@dataclass(frozen=True)
class PlanSection:
    """Where the work of one tile class for one window lies in the plan: offsets of its four parts, in order."""

    tiles: TileClass
    lists_offset: int
    """Offset of the first piece of each list, and the end of the last: num_lists + 1 numbers."""

    @property
    def num_merges_offset(self) -> int:
        """Return the offset of the number of merges."""
        return self.lists_offset + self.tiles.num_lists + 1

    @property
    def pieces_offset(self) -> int:
        """Return the offset of the pieces, field by field: PIECE_FIELDS × max_pieces numbers."""
        return self.num_merges_offset + 1

    @property
    def merges_offset(self) -> int:
        """Return the offset of the merges, field by field: MERGE_FIELDS × max_merges numbers."""
        return self.pieces_offset + PIECE_FIELDS * self.tiles.max_pieces

    @property
    def end(self) -> int:
        """Return the offset behind the section."""
        return self.merges_offset + MERGE_FIELDS * self.tiles.max_merges


@dataclass(frozen=True, kw_only=True)
class GpuPlanner:
    """The plans of one backend on one kind of chip, and the sizes of tiles that follow from the chip and the heads."""

    num_heads: int
    """Query heads on one chip."""
    num_kv_heads: int
    """KV heads on one chip."""
    head_size: int
    windows: tuple[int | None, ...] = ()
    """Windows of layers that get a section of the plan of their own, beside that of full attention."""
    num_sms: int = 132
    """Streaming multiprocessors of the chip."""
    block_memory: int = 232448
    """Bytes of shared memory that one thread block may have."""
    split_kv: bool = True
    """Whether keys of a tile may be split. If not, a row's bits do not depend on the other rows of its step, which
    costs time where rows are few or of very different length."""
    min_share: int = 6
    """Granules of `SPLIT_GRANULE` keys that a thread block gets before the next one gets any."""
    num_stages: int = 2
    """KV tiles in shared memory: one is computed while the others are fetched."""
    max_tile_kv: int = 64
    """Most keys of a KV tile."""

    @property
    def group_size(self) -> int:
        """Return G, the number of query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def large_tile_rows(self) -> int:
        """Return the query rows of a large tile: as many as fit into registers."""
        return 64 if self.head_size <= 128 else 32

    @property
    def small_tile_rows(self) -> int:
        """Return the query rows of a small tile: G, the heads of a query, rounded up to a power of two, within bounds.

        The lower bound is 16 if the head size is a multiple of 32, else 32: in a tile of 16 rows four warps share the
        columns of a product, eight columns at a time; in a tile of 32 rows only two do. The upper bound is the
        size of a large tile. At head size 128, G = 4 gives 16, G = 20 gives 32, and G = 80 gives 64.
        """
        min_rows = 16 if self.head_size % 32 == 0 else 32
        return min(max(1 << (self.group_size - 1).bit_length(), min_rows), self.large_tile_rows)

    @property
    def tile_kv(self) -> int:
        """Return the number of keys of a KV tile."""
        return min(64 if self.head_size <= 128 else 32, self.max_tile_kv)

    def reads_ahead(self, tile_rows: int) -> bool:
        """Return whether a thread block reads the next piece's row and lengths while it computes a piece.

        It does, unless registers have no room: that is so in tiles of 16 query rows at head sizes 96 and 256.
        """
        return tile_rows > 16 or self.head_size not in FULL_REGISTERS

    def num_query_tiles(self, tile_rows: int) -> int:
        """Return how many query tiles of `tile_rows` rows a thread block holds in shared memory: one or two.

        With two, the queries of the next piece of work are copied while a piece is computed. It is one if a second tile
        would leave room for fewer thread blocks on a multiprocessor, or if registers have no room to read the next
        piece's row ahead (`reads_ahead`).
        """
        has_memory = self.blocks_per_sm(tile_rows, num_query_tiles=2) == self.blocks_per_sm(tile_rows)
        return 2 if has_memory and self.reads_ahead(tile_rows) else 1

    def blocks_per_sm(self, tile_rows: int, *, num_query_tiles: int = 1) -> int:
        """Return how many thread blocks with tiles of `tile_rows` query rows fit on a multiprocessor, at least 1.

        Shared memory and registers limit the number: the registers hold three blocks with tiles of 16 query rows, else
        two. A block's shared memory holds `num_stages` tiles of keys and as many of values, `num_query_tiles` tiles of
        queries, and one tile of softmax weights [`tile_rows`, `tile_kv`], all counted with two bytes a number. One
        block may have all memory of a multiprocessor but the `RESERVED_BYTES` that the hardware takes for each block.
        """
        # Pages of one byte a number take no more: half of `kv_bytes`, and one bfloat16 tile each for keys and values.
        kv_bytes = self.num_stages * 2 * self.tile_kv * self.head_size * 2
        tile_bytes = tile_rows * (num_query_tiles * self.head_size + self.tile_kv) * 2
        bytes_per_block = kv_bytes + tile_bytes + SCRATCH_BYTES + RESERVED_BYTES
        return max(min(3 if tile_rows == 16 else 2, (self.block_memory + RESERVED_BYTES) // bytes_per_block), 1)

    @property
    def partial_bytes(self) -> int:
        """Return the bytes of global memory for partial results: at least 4 MiB, at most 11 MiB.

        Between these bounds it is what the queries of 256 tokens, two bytes a number, leave of `TEMP_BYTES`.
        """
        return min(max(TEMP_BYTES - 256 * self.num_heads * self.head_size * 2, 4 << 20), 11 << 20)

    @property
    def planned_windows(self) -> tuple[int | None, ...]:
        """Return the windows that have a section in the plan; the first is None, full attention."""
        return (None, *sorted({window for window in self.windows if window is not None}))

    def plan_len(self, num_tokens: int, num_rows: int, *, decodes_only: bool = False) -> int:
        """Return how many int32 values the plan of a step has that is padded to that many tokens and rows."""
        return self.sections(num_tokens, num_rows, decodes_only=decodes_only)[-1][-1].end

    def plan(self, rows: PlanRows, out: np.ndarray) -> None:
        """Write the plan of these sequences into `out`: their queries in tiles, and the tiles in lists of equal cost.

        `out` is int32, of `plan_len` numbers. A query row is one (query, query head) pair of a KV head: a sequence of n
        queries has n × `group_size` of them. Sequences whose query rows fit into one small tile get a small tile, all
        others large tiles; a sequence without queries gets none. With 4 query heads per KV head and small tiles of 16
        query rows, 4 queries go into one small tile, 5 into large ones. Each tile size and window has a section of the
        plan of its own, where a tile's keys may be split (split-KV).
        """
        query_rows, min_query_rows = rows.query_lens * self.group_size, 1
        for sections in self.sections(rows.padded_tokens, rows.padded_rows, decodes_only=rows.decodes_only):
            tile_rows = sections[0].tiles.tile_rows
            has_tile_size = query_rows >= min_query_rows
            if tile_rows < self.large_tile_rows:  # Small tiles come first; what exceeds them is left to the large ones.
                has_tile_size &= query_rows <= tile_rows
                min_query_rows = tile_rows + 1
            rows_of_size = np.flatnonzero(has_tile_size)
            tiles = _cut_tiles(rows_of_size, rows.query_lens, rows.context_lens, self.group_size, tile_rows)
            for section, window in zip(sections, self.planned_windows, strict=True):
                self._write_section(section, tiles, window, out)

    def max_tiles(self, tile_rows: int, num_tokens: int, num_rows: int) -> int:
        """Return the most tiles of `tile_rows` query rows that a step of `num_tokens` in `num_rows` sequences may have.

        The result is an upper bound that holds however the tokens are spread over the sequences; the length of the plan
        follows from it. A sequence of n queries has n × G query rows, G = `group_size`. If they fit into a small tile,
        it has one small tile; else it has large ones, of which the last may not be full. Example with G = 4, small
        tiles of 16 query rows and large ones of 64: a step of 100 tokens in 8 sequences has at most 8 small tiles. A
        sequence with large tiles has at least 5 queries, so there are at most 400 // 64 = 6 full large tiles and
        min(100 // 5, 8) = 8 others: 14 in all.
        """
        if tile_rows < self.large_tile_rows:
            return min(num_tokens, num_rows)
        # The fewest queries of a sequence that has large tiles: one more than fit a small tile, or 1 if all tiles have
        # the same size.
        min_queries = 1 if self.small_tile_rows == self.large_tile_rows else self.small_tile_rows // self.group_size + 1
        return num_tokens * self.group_size // tile_rows + min(num_tokens // min_queries, num_rows)

    def sections(self, num_tokens: int, num_rows: int, *, decodes_only: bool = False) -> list[list[PlanSection]]:
        """Return two lists of plan sections, for the small tiles and for the large ones, in order of `planned_windows`.

        There is one list if small and large tiles have the same size, because the heads of one query fill a large tile.
        Else a step that only decodes has the list of the small tiles only.
        """
        return _sections(self, num_tokens, num_rows, decodes_only)

    def _write_section(self, section: PlanSection, tiles: QueryTiles, window: int | None, out: np.ndarray) -> None:
        """Partition the tiles over the section's lists (split-KV), and write lists, pieces and merges into `out`.

        A piece is a query tile over a range of its keys; each split makes one more piece of its tile. Example: of three
        tiles, tile 1 is split, and the split begins the second of two lists. The pieces 0 … 3 belong to the tiles 0, 1,
        1, 2: `first_piece` is [0, 1, 3], `split_piece` [2], `list_begins` [0, 2, 4]. The pieces 1 and 2 get the partial
        results 0 and 1, which one merge combines; pieces 0 and 3, each a whole tile, get −1.

        `window` is None for full attention. `out` is the plan of the whole step, int32. Pieces and merges are written
        field by field: all rows, then all first query rows, and so on. Without tiles, only the lists and the number of
        merges are written, as zeros.
        """
        if not len(tiles.row):
            out[section.lists_offset : section.num_merges_offset + 1] = 0
            return
        # Keys are counted in granules of `SPLIT_GRANULE` = 64, at whose multiples tiles may be split.
        begin_granule = np.zeros_like(tiles.end)
        if window is not None:
            begin_granule = np.maximum(tiles.first_position - window + 1, 0) // SPLIT_GRANULE
        _, split_tiles, split_granules, list_starts = partition(
            begin_granule,
            -(-tiles.end // SPLIT_GRANULE),
            num_lists=section.tiles.num_lists,
            max_splits=section.tiles.max_splits if self.split_kv else 0,
            min_share=self.min_share,
        )
        num_tiles, num_splits = len(tiles.row), len(split_tiles)
        num_pieces = num_tiles + num_splits
        splits_of_tile = np.bincount(split_tiles, minlength=num_tiles)
        first_piece = np.arange(num_tiles) + splits_of_tile.cumsum() - splits_of_tile
        piece_tile = np.arange(num_tiles).repeat(splits_of_tile + 1)  # The tile of each piece.
        split_piece = split_tiles + 1 + np.arange(num_splits)  # The piece that each split begins.
        is_split = splits_of_tile[piece_tile] > 0
        partial_index = np.where(is_split, is_split.cumsum() - 1, -1)
        # Each field is a view of `out`, so assigning to its elements writes the plan.
        pieces = Piece(*out[section.pieces_offset : section.merges_offset].reshape(PIECE_FIELDS, -1)[:, :num_pieces])
        pieces.row[:], pieces.first_query_row[:] = tiles.row[piece_tile], tiles.first_query_row[piece_tile]
        pieces.aligned_row[:], pieces.partial[:] = tiles.aligned_row[piece_tile], partial_index
        # The kernel finds the first and the last key of a tile by the lengths on the device, which may be shorter than
        # those of the plan. Only the keys at which a tile is split are written.
        pieces.begin[:], pieces.end[:] = 0, NO_END
        pieces.begin[split_piece] = pieces.end[split_piece - 1] = split_granules * SPLIT_GRANULE
        list_begins = out[section.lists_offset : section.num_merges_offset]
        # A number in `list_starts` stands for a tile, the end, or a split: it indexes this array of their first pieces.
        first_pieces = np.concatenate([first_piece, [num_pieces], split_piece])
        list_begins[0], list_begins[1:-1], list_begins[-1] = 0, first_pieces[list_starts], num_pieces
        merged_tiles = splits_of_tile.nonzero()[0]
        out[section.num_merges_offset] = len(merged_tiles)
        merges = Merge(*out[section.merges_offset : section.end].reshape(MERGE_FIELDS, -1)[:, : len(merged_tiles)])
        merges.aligned_row[:] = tiles.aligned_row[merged_tiles]
        merges.num_query_rows[:] = tiles.num_query_rows[merged_tiles]
        merges.first_partial[:] = partial_index[first_piece[merged_tiles]]
        merges.num_partials[:] = splits_of_tile[merged_tiles] + 1


@cache
def _sections(planner: GpuPlanner, num_tokens: int, num_rows: int, decodes_only: bool) -> list[list[PlanSection]]:
    """Return what `GpuPlanner.sections` returns: for each size of tiles a list with one section for each window.

    The result is cached by the size of the step, because computing it would take a third of the time of a plan. The
    sections follow one another in the plan, first those of the small tiles. With `decodes_only` there are no others.
    `num_lists` is the number of thread blocks per KV head that the chip holds at once, or 1 if there are more KV heads
    than thread blocks. `max_splits` is limited by `num_lists` − 1, the borders between lists, and by the room for
    partial results: each split adds at most two of them, [`tile_rows`, head size] float32 for each KV head.
    """
    sections: list[list[PlanSection]] = []
    section_offset = 0
    for tile_rows in sorted({planner.small_tile_rows, planner.large_tile_rows})[: 1 if decodes_only else 2]:
        num_lists = max(planner.num_sms * planner.blocks_per_sm(tile_rows) // planner.num_kv_heads, 1)
        bytes_per_partial = planner.num_kv_heads * tile_rows * planner.head_size * 4  # 4 bytes a float32.
        max_splits = min(num_lists - 1, planner.partial_bytes // bytes_per_partial // 2)
        tiles = TileClass(tile_rows, num_lists, max_splits, planner.max_tiles(tile_rows, num_tokens, num_rows))
        sections.append([])
        for _ in planner.planned_windows:
            sections[-1].append(PlanSection(tiles, section_offset))
            section_offset = sections[-1][-1].end
    return sections


class QueryTiles(NamedTuple):
    """Query tiles of one class in order of rows; each field has one number per tile."""

    row: np.ndarray
    """Row of the step."""
    first_query_row: np.ndarray
    """First query row of the tile, among those of its row."""
    aligned_row: np.ndarray
    """Index of the first query row among the aligned query rows of the step."""
    num_query_rows: np.ndarray
    first_position: np.ndarray
    """Position of the tile's first query."""
    end: np.ndarray
    """Position behind the last key that any of its queries attends to."""


def _cut_tiles(
    rows: np.ndarray, query_lens: np.ndarray, context_lens: np.ndarray, group_size: int, tile_rows: int
) -> QueryTiles:
    """Cut the queries of the sequences with indices `rows` into tiles of at most `tile_rows` query rows.

    `query_lens` and `context_lens` are of all sequences of the step. `group_size` is G, the query heads per KV head: a
    sequence of n queries has n × G query rows. With G = 4 and tiles of 16, 6 queries are 24 query rows and two tiles:
    query rows 0 … 15 (queries 0 … 3) and 16 … 23 (queries 4 and 5). Aligned query rows count those of all sequences of
    the step, each rounded up to a multiple of `ROW_ALIGN` = 8: if one sequence of 12 query rows comes before the 24 of
    the example, these begin at aligned row 16. A sequence's queries are its last positions, so its first query has the
    position context length − number of queries. `end` is the position behind the last query of a tile, since attention
    is causal.
    """
    query_rows = query_lens * group_size
    aligned_lens = -(-query_rows // ROW_ALIGN) * ROW_ALIGN
    aligned_begins = np.cumsum(aligned_lens) - aligned_lens
    num_tiles = -(-query_rows[rows] // tile_rows)
    row = np.repeat(rows, num_tiles)  # The sequence of each tile; the arrays below have one number per tile, too.
    tiles_before_row = np.cumsum(num_tiles) - num_tiles
    first_query_row = (np.arange(len(row)) - np.repeat(tiles_before_row, num_tiles)) * tile_rows
    row_position = context_lens[row] - query_lens[row]
    return QueryTiles(
        row=row,
        first_query_row=first_query_row,
        aligned_row=aligned_begins[row] + first_query_row,
        num_query_rows=np.minimum(query_rows[row] - first_query_row, tile_rows),
        first_position=row_position + first_query_row // group_size,
        end=np.minimum(row_position + (first_query_row + tile_rows - 1) // group_size + 1, context_lens[row]),
    )
