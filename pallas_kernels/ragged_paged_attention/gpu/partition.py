"""Deals units of different length out to lists of equal length, cutting as few of them as it must.

units, end to end   ├───── 0 ─────┤├ 1 ┤├── 2 ──┤├──── 3 ────┤…
borders             │        │        │        │        │          equal shares, one list between two
nothing cut         ├───── 0 ─────┤├ 1 ┤├── 2 ──┤├──── 3 ────┤      each border moves to the nearest end of a unit
cut                 ├── 0 ──┼ 0 ┤├1 ┤├ 2 ┼ 2 ┤├── 3 ──┼──…         where that leaves the longest list too long: a border
                                                                   stays if it is far from the nearest end
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

UNIT_COST = 2
"""Granules of keys that beginning and ending a piece is taken to cost."""
BALANCED = 1.1
"""Units are not cut if the longest list is within this of the mean."""


class Deal(NamedTuple):
    """Who gets what. A list begins at a unit; the number of units stands for the end of all, and what lies behind it
    for the cuts."""

    longest: int
    """Granules of the longest list, with what its pieces cost."""
    cut_units: np.ndarray
    cut_granules: np.ndarray
    """Where each of them is cut."""
    starts: np.ndarray
    """Where all lists but the first begin."""


def deal(begin: np.ndarray, end: np.ndarray, *, num_lists: int, max_cuts: int, least_share: int) -> Deal:
    """Deal out units [begin, end) of granules, one of them at least. `least_share` is what a list gets before the next
    one gets any.

    With cuts for all borders every list but the last is equally long. With fewer, the best of three is taken: all
    lists, of which some have borders that moved; as many lists as there are cuts for; as many as cut
    every unit into the same number of pieces. The lists that are not used are empty.
    """
    cost = end - begin + UNIT_COST
    ends = cost.cumsum()
    total = int(ends[-1])

    def divided(count: int) -> _Borders:
        return _Borders(begin, end, cost, ends, count, max(-(-total // count), least_share))

    borders = divided(num_lists)
    whole = borders.cut(num_lists, 0)
    if not max_cuts or whole.longest <= BALANCED * max(total / num_lists, least_share):
        return whole
    tried = [whole, borders.cut(num_lists, max_cuts)]
    if max_cuts < num_lists - 1:
        evenly = min(num_lists, max_cuts + len(begin)) // len(begin) * len(begin)
        counts = {max_cuts + 1, evenly} - {0, num_lists}
        tried += [divided(count).cut(num_lists, max_cuts) for count in sorted(counts)]
    return min(tried, key=lambda deal: deal.longest)


class _Borders:
    """Of `count` equal shares of the units, end to end."""

    def __init__(self, begin: np.ndarray, end: np.ndarray, cost: np.ndarray, ends: np.ndarray, count: int, share: int):
        self.num_units, self.total = len(begin), ends[-1]
        self.borders = np.minimum(np.arange(1, count) * share, self.total)
        self.unit = np.minimum(ends.searchsorted(self.borders, side="right"), self.num_units - 1)
        unit_cost = cost[self.unit]
        within = self.borders - ends[self.unit] + unit_cost
        is_behind = 2 * within > unit_cost
        self.nearest = self.unit + is_behind
        self.moves = is_behind * unit_cost - within
        """From each border to the nearest end of a unit."""
        self.granule = begin[self.unit] + within - UNIT_COST
        self.is_inside = (self.granule > begin[self.unit]) & (self.granule < end[self.unit])

    def cut(self, num_lists: int, max_cuts: int) -> Deal:
        """With cuts at the `max_cuts` borders that are farthest from an end of a unit; the others move there.

        No border passes another one: of two inside of one unit, the one that moves is nearer to the end it moves to.
        """
        cuts = self.is_inside.nonzero()[0]
        if len(cuts) > max_cuts:
            cuts = np.sort(cuts[np.argsort(-np.abs(self.moves[cuts]), kind="stable")[:max_cuts]])
        starts = np.full(num_lists - 1, self.num_units)
        starts[: len(self.nearest)] = self.nearest
        starts[cuts] = self.num_units + 1 + np.arange(len(cuts))
        edges = np.empty(len(self.borders) + 2, np.int64)
        edges[0], edges[1:-1], edges[-1] = 0, self.borders + self.moves, self.total
        edges[1:-1][cuts] = self.borders[cuts]
        return Deal(int((edges[1:] - edges[:-1]).max()), self.unit[cuts], self.granule[cuts], starts)
