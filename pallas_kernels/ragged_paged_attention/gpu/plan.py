"""The order of work of a GPU step, made on the host: tiles of query rows, cut into pieces of equal length.

    query rows of one row and KV head: its queries × the G query heads that share the KV head, query by query
      row 0: ├─ tile ─┤├─ tile ─┤├─ ti…        a unit is one tile; every KV head has the same units

    units by the length of their keys, end to end, dealt out to `num_lists` thread blocks per KV head:
      ████████████│██████ ████│██ ███ ██│…     a cut inside a unit splits its keys into pieces, whose results
      block 0      block 1      block 2          are merged by a second kernel; most units are one piece

Queries of few rows (decode) go into small tiles, all others into large ones: two `TileClass`es, one launch each. A
piece holds no length that a later step could change: the first piece of a unit begins at 0 and the last one has no
end, and the kernel takes both from the lengths it finds on the device.

Pure numpy, one order for all layers of the same window.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from .gpu_deal import deal

ALIGN = 8
"""Query rows: each row's begin at a multiple of it, since tiles of shared memory have eight rows."""
GRANULE = 64
"""Keys: units are cut at multiples of it."""
NUM_STAGES = 2
"""Tiles of keys and values in shared memory: one is computed, the others are on their way."""
RESERVED_BYTES = 1 << 10
"""Of shared memory, which the hardware takes for itself, per thread block."""
REDUCTION_BYTES = 1 << 10
"""Of shared memory for sums over warps: two rows a thread."""
SCRATCH_BYTES = REDUCTION_BYTES + 128
"""Of shared memory beside the tiles, no more: with the barriers."""
TEMP_BYTES = 14 << 20
"""Of memory for the aligned queries of 256 tokens and for results of pieces, of which one class of tiles at a time has
any."""
NO_END = 1 << 30
PIECE_FIELDS = 6
"""(row, first query row in it, the same among the aligned ones, first key, end of keys, slot if it is cut or −1)."""
MERGE_FIELDS = 4
"""(first aligned query row, number of them, first slot, number of slots)."""


@dataclass(frozen=True)
class TileClass:
    """Sizes of one class of tiles, all static."""

    tile_rows: int
    """Query rows of a tile."""
    num_lists: int
    """Thread blocks per KV head."""
    max_cuts: int
    """Inside of units."""
    max_units: int

    @property
    def max_merges(self) -> int:
        """Units that are cut."""
        return min(self.max_cuts, self.max_units)

    @property
    def max_pieces(self) -> int:
        """Every cut makes one more."""
        return self.max_units + self.max_cuts

    @property
    def num_slots(self) -> int:
        """Pieces of units that are cut."""
        return 2 * self.max_cuts


@dataclass(frozen=True)
class Order:
    """Places, in the plan, of the order of work of one class of tiles for one window."""

    tiles: TileClass
    list_starts: int
    """First piece of each list, and the end of the last: num_lists + 1 values."""

    @property
    def num_merges(self) -> int:
        """One value."""
        return self.list_starts + self.tiles.num_lists + 1

    @property
    def pieces(self) -> int:
        """PIECE_FIELDS × max_pieces."""
        return self.num_merges + 1

    @property
    def merges(self) -> int:
        """MERGE_FIELDS × max_merges."""
        return self.pieces + PIECE_FIELDS * self.tiles.max_pieces

    @property
    def end(self) -> int:
        """Behind all of them."""
        return self.merges + MERGE_FIELDS * self.tiles.max_merges


@dataclass(frozen=True, kw_only=True)
class GpuPlanner:
    """Makes the plans of a backend. `num_heads` and `num_kv_heads` are those on one chip.

    `windows` are those of layers that get an order of work of their own beside that of full attention. `is_cut` False
    leaves every unit whole, so that a row's result does not depend on its company. `least_share` counts granules of
    keys that a thread block gets before the next one gets any. Of the chip: `num_sms` multiprocessors, and
    `block_memory` bytes of shared memory that one thread block may have.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    windows: tuple[int | None, ...]
    num_sms: int
    block_memory: int
    is_cut: bool
    least_share: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def large_rows(self) -> int:
        """Query rows of a large tile: what fits into registers."""
        return 64 if self.head_size <= 128 else 32

    @property
    def small_rows(self) -> int:
        """Query rows of a small tile: as few as one query's heads need."""
        return min(max(1 << (self.group - 1).bit_length(), 16), self.large_rows)

    @property
    def tile_kv(self) -> int:
        """Keys of a tile."""
        return 64 if self.head_size <= 128 else 32

    def blocks_per_sm(self, tile_rows: int) -> int:
        """Thread blocks that a multiprocessor holds at once: what registers allow, and shared memory."""
        kv_bytes = NUM_STAGES * 2 * self.tile_kv * self.head_size * 2  # In one byte a number: half, and a tile in two.
        tile_bytes = tile_rows * (self.head_size + self.tile_kv) * 2
        by_memory = (self.block_memory + RESERVED_BYTES) // (kv_bytes + tile_bytes + SCRATCH_BYTES + RESERVED_BYTES)
        return max(min(3 if tile_rows == 16 else 2, by_memory), 1)

    @property
    def unfinished_bytes(self) -> int:
        """Of memory for results of pieces: what the queries leave of `TEMP_BYTES`, and not much more than is of use."""
        return min(max(TEMP_BYTES - 256 * self.num_heads * self.head_size * 2, 4 << 20), 11 << 20)

    @property
    def planned_windows(self) -> tuple[int | None, ...]:
        """Those that have an order of work; full attention's is the first."""
        return (None, *sorted({window for window in self.windows if window is not None}))

    def plan_len(self, num_tokens: int, num_rows: int) -> int:
        """All classes of tiles, all windows."""
        return self.orders(num_tokens, num_rows)[-1][-1].end

    def plan(
        self, query_lens: np.ndarray, context_lens: np.ndarray, *, num_tokens: int, num_rows: int, out: np.ndarray
    ) -> None:
        """Cut the rows into tiles and these into pieces, and deal them out, in a step with room for that many."""
        query_rows, fewest = query_lens * self.group, 1
        for orders in self.orders(num_tokens, num_rows):
            tile_rows = orders[0].tiles.tile_rows
            is_its = query_rows >= fewest
            if tile_rows < self.large_rows:
                is_its &= query_rows <= tile_rows
                fewest = tile_rows + 1
            units = _units_of(np.flatnonzero(is_its), query_lens, context_lens, self.group, tile_rows)
            for order, window in zip(orders, self.planned_windows, strict=True):
                _write_order(order, units, window, is_cut=self.is_cut, least_share=self.least_share, out=out)

    def max_units(self, tile_rows: int, num_tokens: int, num_rows: int) -> int:
        """Of one class of tiles in a step of that size. A row of few queries has one small tile; every other row may
        end in a partial one."""
        if tile_rows < self.large_rows:
            return min(num_tokens, num_rows)
        fewest = 1 if self.small_rows == self.large_rows else self.small_rows // self.group + 1
        return num_tokens * self.group // tile_rows + min(num_tokens // fewest, num_rows)

    def orders(self, num_tokens: int, num_rows: int) -> list[list[Order]]:
        """Of small and of large tiles, for each window; only of large ones if one query's heads fill them."""
        return _orders(self, num_tokens, num_rows)


@cache
def _orders(planner: GpuPlanner, num_tokens: int, num_rows: int) -> list[list[Order]]:
    """Once for each size of a step: it would be a third of what a plan takes."""
    orders: list[list[Order]] = []
    end = 0
    for tile_rows in sorted({planner.small_rows, planner.large_rows}):
        num_lists = max(planner.num_sms * planner.blocks_per_sm(tile_rows) // planner.num_kv_heads, 1)
        slot_bytes = planner.num_kv_heads * tile_rows * planner.head_size * 4
        max_cuts = min(num_lists - 1, planner.unfinished_bytes // slot_bytes // 2)
        tiles = TileClass(tile_rows, num_lists, max_cuts, planner.max_units(tile_rows, num_tokens, num_rows))
        orders.append([])
        for _ in planner.planned_windows:
            orders[-1].append(Order(tiles, end))
            end = orders[-1][-1].end
    return orders


@dataclass(frozen=True)
class Units:
    """Tiles of query rows, in order of rows."""

    row: np.ndarray
    first: np.ndarray
    """First query row, in its row."""
    place: np.ndarray
    """The same among the aligned query rows."""
    num_query_rows: np.ndarray
    first_position: np.ndarray
    end: np.ndarray
    """Behind the last key that any of its queries sees."""


def _units_of(rows: np.ndarray, query_lens: np.ndarray, context_lens: np.ndarray, group: int, tile_rows: int) -> Units:
    """Cut the queries of `rows` into tiles. Lengths are of all rows of the step."""
    query_rows = query_lens * group
    aligned = -(-query_rows // ALIGN) * ALIGN
    begins = np.cumsum(aligned) - aligned
    num_units = -(-query_rows[rows] // tile_rows)
    row = np.repeat(rows, num_units)
    first = (np.arange(len(row)) - np.repeat(np.cumsum(num_units) - num_units, num_units)) * tile_rows
    start = context_lens[row] - query_lens[row]
    return Units(
        row=row,
        first=first,
        place=begins[row] + first,
        num_query_rows=np.minimum(query_rows[row] - first, tile_rows),
        first_position=start + first // group,
        end=np.minimum(start + (first + tile_rows - 1) // group + 1, context_lens[row]),
    )


def _write_order(
    order: Order, units: Units, window: int | None, *, is_cut: bool, least_share: int, out: np.ndarray
) -> None:
    """Deal the units out to the lists of `order`, and write who does what into `out`."""
    tiles = order.tiles
    if not len(units.row):
        out[order.list_starts : order.num_merges + 1] = 0
        return
    begin = np.zeros_like(units.end) if window is None else np.maximum(units.first_position - window + 1, 0) // GRANULE
    _, cut_units, cut_granules, starts = deal(
        begin,
        -(-units.end // GRANULE),
        num_lists=tiles.num_lists,
        max_cuts=tiles.max_cuts if is_cut else 0,
        least_share=least_share,
    )
    num_units, num_cuts = len(units.row), len(cut_units)
    num_pieces = num_units + num_cuts
    cuts_of_unit = np.bincount(cut_units, minlength=num_units)
    first_piece = np.arange(num_units) + cuts_of_unit.cumsum() - cuts_of_unit
    unit = np.arange(num_units).repeat(cuts_of_unit + 1)
    cut_pieces = cut_units + 1 + np.arange(num_cuts)
    is_split = cuts_of_unit[unit] > 0
    slots = np.where(is_split, is_split.cumsum() - 1, -1)
    pieces = out[order.pieces : order.merges].reshape(PIECE_FIELDS, -1)[:, :num_pieces]
    pieces[0], pieces[1], pieces[2] = units.row[unit], units.first[unit], units.place[unit]
    pieces[3], pieces[4], pieces[5] = 0, NO_END, slots
    pieces[3, cut_pieces] = pieces[4, cut_pieces - 1] = cut_granules * GRANULE
    lists = out[order.list_starts : order.num_merges]
    lists[0], lists[1:-1], lists[-1] = 0, np.concatenate([first_piece, [num_pieces], cut_pieces])[starts], num_pieces
    merged = cuts_of_unit.nonzero()[0]
    out[order.num_merges] = len(merged)
    merges = out[order.merges : order.end].reshape(MERGE_FIELDS, -1)[:, : len(merged)]
    merges[0], merges[1] = units.place[merged], units.num_query_rows[merged]
    merges[2], merges[3] = slots[first_piece[merged]], cuts_of_unit[merged] + 1
