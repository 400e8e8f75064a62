"""Partitions query tiles with key ranges of different length into lists of equal cost, splitting as few as it must.

tiles, end to end   ├───── 0 ─────┤├ 1 ┤├── 2 ──┤├──── 3 ────┤…
borders             │        │        │        │        │          equal shares of the total, one list between two
no splits           ├───── 0 ─────┤├ 1 ┤├── 2 ──┤├──── 3 ────┤      each border moves to the nearest end of a tile
with splits         ├── 0 ──┼ 0 ┤├1 ┤├ 2 ┼ 2 ┤├── 3 ──┼──…         where that leaves the longest list too long, the
                                                                   borders that are far from a tile's end stay and
                                                                   split the keys of their tile (split-KV)

Key ranges are counted in granules of `SPLIT_GRANULE` keys (see `plan`). Costs are granules, plus `PIECE_COST` per tile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

PIECE_COST = 2
"""Granules of keys that beginning and ending one piece is assumed to cost."""
BALANCED = 1.1
"""No tile is split if the longest list then costs at most this multiple of the mean."""


class Partition(NamedTuple):
    """Which tiles are split where, and where each list begins."""

    max_cost: int
    """Cost of the longest list."""
    split_tiles: np.ndarray
    """Index of the tile of each split; a tile that is split twice stands twice."""
    split_granules: np.ndarray
    """Granule at which each of these tiles is split."""
    list_starts: np.ndarray
    """Where each list but the first begins: at tile t (t), at the end of all n tiles (n), or at split s (n + 1 + s)."""


def partition(begin: np.ndarray, end: np.ndarray, *, num_lists: int, max_splits: int, min_share: int) -> Partition:
    """Partition query tiles into `num_lists` lists of about equal cost, one list for each thread block of a KV head.

    Tile i has the keys of the granules `begin[i]` … `end[i]` − 1, at least one; a granule is a fixed number of keys.
    There is at least one tile. A tile costs its granules plus `PIECE_COST` = 2; the piece that a split adds costs no
    more. The tiles keep their order: they are laid end to end, and borders at equal distances cut them into lists. A
    border inside a tile either splits the tile's keys (split-KV) or moves to the nearest end of the tile. Example:
    tiles of 10 and 2 granules cost 12 and 4, so the share of each of two lists is 8. With a split at granule 6 of tile
    0, both lists cost 8; without one, the border moves to the end of tile 0, and the lists cost 12 and 4.

    A share is at least `min_share`, so there may be fewer shares than lists. `max_splits` is the largest number of
    splits. No tile is split if without splits the longest list costs at most `BALANCED` = 1.1 times the mean, or times
    `min_share` if that is larger. Otherwise up to four partitions are compared, and the one whose longest list costs
    least is returned. Two use shares for `num_lists` lists: one without splits, one with up to `max_splits`. If there
    are more borders than `max_splits`, two more use fewer shares: `max_splits` + 1, all of whose borders may split, and
    the same number for each tile, as many as lists and splits allow. Lists without a share are empty.
    """
    cost = end - begin + PIECE_COST
    ends = cost.cumsum()
    total = int(ends[-1])

    def equal_shares(num_shares: int) -> _EqualShares:  # The cost of a share is rounded up.
        return _EqualShares(begin, end, cost, ends, num_shares, max(-(-total // num_shares), min_share))

    all_shares = equal_shares(num_lists)
    unsplit = all_shares.split(num_lists, 0)
    if not max_splits or unsplit.max_cost <= BALANCED * max(total / num_lists, min_share):
        return unsplit
    candidates = [unsplit, all_shares.split(num_lists, max_splits)]
    if max_splits < num_lists - 1:
        # Splits cut the tiles into at most `max_splits` + `len(begin)` pieces. The number of lists is rounded down to a
        # multiple of the number of tiles: to 0 if there are more tiles than lists. `num_lists` is a candidate already.
        even_pieces = min(num_lists, max_splits + len(begin)) // len(begin) * len(begin)
        share_counts = {max_splits + 1, even_pieces} - {0, num_lists}
        candidates += [equal_shares(num_shares).split(num_lists, max_splits) for num_shares in sorted(share_counts)]
    return min(candidates, key=lambda candidate: candidate.max_cost)


class _EqualShares:
    """The borders between at most `num_shares` shares of cost `share` of all tiles laid end to end.

    `begin` and `end` are the granules of each tile, `cost` its cost, and `ends` the running sum of the costs.
    """

    def __init__(
        self, begin: np.ndarray, end: np.ndarray, cost: np.ndarray, ends: np.ndarray, num_shares: int, share: int
    ):
        """Find, for each border between shares, where it would split a tile, and where it would move to instead.

        A border inside a tile either splits the tile's keys into two pieces of work (split-KV), or moves to the nearest
        end of the tile, so that the tile stays whole; `split` decides which. Keys are split only at multiples of a
        granule, 64 keys. Tile i has the granules `begin[i]` … `end[i]` − 1 and the cost `cost[i]`; `ends` is the
        running sum of `cost`. The tiles are laid end to end on an axis of cost: a tile's first `PIECE_COST` = 2 units
        stand for the fixed cost of a piece, each further unit for one granule. Border i is at cost (i + 1) × `share`,
        or at the end of all tiles if that is less.

        Example: three tiles of cost 4, 8 and 4 with 2 shares of 8 have one border, at cost 8, in the middle of tile 1.
        With `begin[1]` = 0 it could split tile 1 at granule 8 − 4 − 2 = 2. Or it could move by `distance` = −4 to the
        start of tile 1, so `nearest_tile` is 1; of two ends that are equally near, it is the first.
        """
        self.num_tiles, self.total = len(begin), ends[-1]
        self.borders = np.minimum(np.arange(1, num_shares) * share, self.total)
        # `searchsorted` finds the tile that begins at a border or contains it; for a border at the end of all tiles
        # that is no tile, and the last one is taken.
        self.tile = np.minimum(ends.searchsorted(self.borders, side="right"), self.num_tiles - 1)
        """Index of the tile that each border lies in."""
        tile_cost = cost[self.tile]
        cost_before_border = self.borders - ends[self.tile] + tile_cost
        cost_after_border = tile_cost - cost_before_border
        moves_to_end = cost_after_border < cost_before_border
        self.nearest_tile = np.where(moves_to_end, self.tile + 1, self.tile)
        """Index of the tile that begins where a border would move to; the number of tiles for the end of them all."""
        self.distance = np.where(moves_to_end, cost_after_border, -cost_before_border)
        """Cost from each border to the nearest end of a tile, negative if that end lies before the border."""
        # A border can split its tile only if at least one granule lies before it and one after it.
        self.granule = begin[self.tile] + cost_before_border - PIECE_COST
        self.is_inside = (self.granule > begin[self.tile]) & (self.granule < end[self.tile])

    def split(self, num_lists: int, max_splits: int) -> Partition:
        """Return the partition that splits tiles at `max_splits` borders at most, those farthest from an end of a tile.

        These would change the costs most if they moved; all other borders move to the nearest end of a tile. Example:
        three tiles of cost 4, 8 and 4 have their only border in the middle of tile 1. With a split there, two lists
        cost 8 and 8 (`list_starts` [3 + 1 + 0]); without one, the second list starts at tile 1 (`list_starts` [1]), and
        the lists cost 4 and 12. No border passes another: of two borders inside one tile, the one that moves is nearer
        to the end it moves to. If there are more lists than shares, the last ones are empty. `max_cost` of the result
        is the cost of the longest list, in which the piece that a split adds costs nothing.
        """
        split_borders = self.is_inside.nonzero()[0]
        if len(split_borders) > max_splits:
            farthest = np.argsort(-np.abs(self.distance[split_borders]), kind="stable")[:max_splits]
            split_borders = np.sort(split_borders[farthest])
        # A list begins at the tile that its border moves to, or at a split: number s is coded as num_tiles + 1 + s.
        # The number num_tiles stands for the end of all tiles, where empty lists begin.
        list_starts = np.full(num_lists - 1, self.num_tiles)
        list_starts[: len(self.nearest_tile)] = self.nearest_tile
        list_starts[split_borders] = self.num_tiles + 1 + np.arange(len(split_borders))
        # The costs at which the shares begin and end; only borders that do not split their tile have moved.
        list_edges = np.empty(len(self.borders) + 2, np.int64)
        list_edges[0], list_edges[1:-1], list_edges[-1] = 0, self.borders + self.distance, self.total
        list_edges[1:-1][split_borders] = self.borders[split_borders]
        max_cost = int(np.max(list_edges[1:] - list_edges[:-1]))
        return Partition(max_cost, self.tile[split_borders], self.granule[split_borders], list_starts)
