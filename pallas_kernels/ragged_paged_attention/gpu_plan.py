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

import numpy as np

ALIGN = 8
"""Query rows: each row's begin at a multiple of it, since tiles of shared memory have eight rows."""
GRANULE = 64
"""Keys: units are cut at multiples of it."""
UNIT_COST = 2
"""Granules of keys that beginning and ending a piece is taken to cost."""
LEAST_SHARE = 6
"""Granules of keys, with UNIT_COST, that a thread block gets before the next one gets any."""
BALANCED = 1.1
"""Units are not cut if the longest list is within this of the mean."""
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
        """MERGE_FIELDS × max_cuts."""
        return self.pieces + PIECE_FIELDS * self.tiles.max_pieces

    @property
    def end(self) -> int:
        """Behind all of them."""
        return self.merges + MERGE_FIELDS * self.tiles.max_cuts


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


def units_of(rows: np.ndarray, query_lens: np.ndarray, context_lens: np.ndarray, group: int, tile_rows: int) -> Units:
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


def write_order(order: Order, units: Units, window: int | None, is_cut: bool, out: np.ndarray) -> None:
    """Deal the units out to the lists of `order`, and write who does what into `out`.

    `is_cut` False leaves every unit whole, so that a row's result does not depend on its company.
    """
    begin = np.zeros_like(units.end) if window is None else np.maximum(units.first_position - window + 1, 0) // GRANULE
    cut_units, cut_granules, starts = _deal(begin, -(-units.end // GRANULE), order.tiles, is_cut)
    num_units, num_cuts = len(units.row), len(cut_units)
    cuts_of_unit = np.bincount(cut_units, minlength=num_units)[:num_units]
    first_piece = np.arange(num_units) + np.cumsum(cuts_of_unit) - cuts_of_unit
    num_pieces = num_units + num_cuts
    unit = np.repeat(np.arange(num_units), cuts_of_unit + 1)
    begins, ends = np.zeros(num_pieces, np.int32), np.full(num_pieces, NO_END, np.int32)
    cut_pieces = cut_units + 1 + np.arange(num_cuts)
    begins[cut_pieces] = ends[cut_pieces - 1] = cut_granules * GRANULE
    is_split = cuts_of_unit[unit] > 0
    slots = np.where(is_split, np.cumsum(is_split) - 1, -1)
    pieces = out[order.pieces : order.merges].reshape(PIECE_FIELDS, -1)
    _fill(pieces, units.row[unit], units.first[unit], units.place[unit], begins, ends, slots)
    piece_of_start = np.concatenate([first_piece, [num_pieces], cut_pieces])
    lists = out[order.list_starts : order.num_merges]
    lists[0], lists[1:-1], lists[-1] = 0, piece_of_start[starts], num_pieces
    merged = np.flatnonzero(cuts_of_unit)
    out[order.num_merges] = len(merged)
    merges = out[order.merges : order.end].reshape(MERGE_FIELDS, -1)
    _fill(
        merges, units.place[merged], units.num_query_rows[merged], slots[first_piece[merged]], cuts_of_unit[merged] + 1
    )


def _fill(fields: np.ndarray, *columns: np.ndarray) -> None:
    for field, values in zip(fields, columns, strict=True):
        field[: len(values)] = values


def _deal(
    begin: np.ndarray, end: np.ndarray, tiles: TileClass, is_cut: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Deal out units [begin, end) of granules: (units that are cut, at which granule, begin of each list but the first).

    A list begins at a unit; the number of units stands for the end of all, and what lies behind it for the cuts.
    """
    num_units = len(begin)
    cost = end - begin + UNIT_COST
    ends = np.cumsum(cost)
    total = int(ends[-1]) if num_units else 0
    whole = np.empty(0, np.int64)

    def borders_of(num_lists: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(where the borders lie, the unit each lies in, and the unit before whose begin it lies most nearly)."""
        share = max(-(-total // num_lists), LEAST_SHARE)
        borders = np.minimum(np.arange(1, num_lists) * share, total)
        unit = np.searchsorted(ends, borders, side="right")
        middle = np.append(ends - cost / 2, total)[unit]
        return borders, unit, np.minimum(unit + (borders > middle), num_units)

    borders, _, nearest = borders_of(tiles.num_lists)
    edges = np.concatenate([[0], np.append(ends, total)[nearest - 1] * (nearest > 0), [total]])
    loads = np.diff(edges)
    if not is_cut or not tiles.max_cuts or loads.max() <= BALANCED * max(total / tiles.num_lists, LEAST_SHARE):
        return whole, whole, nearest
    borders, unit, nearest = borders_of(min(tiles.num_lists, tiles.max_cuts + 1))
    inner = np.minimum(unit, num_units - 1)
    granule = begin[inner] + borders - (ends - cost)[inner] - UNIT_COST
    # A cut so near to an end of the unit that it spares nobody anything moves to that end.
    is_inside = (unit < num_units) & (granule >= begin[inner] + UNIT_COST) & (granule <= end[inner] - UNIT_COST)
    starts = np.full(tiles.num_lists - 1, num_units)
    starts[: len(nearest)] = nearest
    starts[: len(nearest)][is_inside] = num_units + 1 + np.arange(np.count_nonzero(is_inside))
    return inner[is_inside], granule[is_inside], starts
