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
    lists, of which some have borders that moved; as many lists as there are cuts for; as many as give each unit the
    same number of lists. The lists that are not used are empty.
    """
    line = _Line(begin, end, num_lists, least_share)
    whole = line.divided(num_lists, 0)
    if not max_cuts or whole.longest <= BALANCED * max(line.total / num_lists, least_share):
        return whole
    counts = {num_lists}
    if max_cuts < num_lists - 1:
        counts |= {max_cuts + 1, max(num_lists // len(begin), 1) * len(begin)}
    tried = (line.divided(count, max_cuts) for count in sorted(counts) if count <= num_lists)
    return min(whole, *tried, key=lambda deal: deal.longest)


class _Line:
    """The units, end to end."""

    def __init__(self, begin: np.ndarray, end: np.ndarray, num_lists: int, least_share: int):
        self.begin, self.end, self.num_lists, self.least_share = begin, end, num_lists, least_share
        self.cost = end - begin + UNIT_COST
        self.ends = np.cumsum(self.cost)
        self.total = int(self.ends[-1])

    def divided(self, num_lists: int, max_cuts: int) -> Deal:
        """To the first `num_lists` lists, with cuts at the `max_cuts` borders that are farthest from an end of a unit.

        No border passes another one: of two inside of one unit, the one that moves is nearer to the end it moves to.
        """
        num_units = len(self.begin)
        share = max(-(-self.total // num_lists), self.least_share)
        borders = np.minimum(np.arange(1, num_lists) * share, self.total)
        unit = np.minimum(np.searchsorted(self.ends, borders, side="right"), num_units - 1)
        within = borders - (self.ends - self.cost)[unit]
        is_behind = 2 * within > self.cost[unit]
        starts = np.full(self.num_lists - 1, num_units)
        starts[: num_lists - 1] = unit + is_behind
        moves = np.where(is_behind, self.cost[unit] - within, -within)
        cut_units = cut_granules = np.empty(0, np.int64)
        if max_cuts:
            granule = self.begin[unit] + within - UNIT_COST
            inside = np.flatnonzero((granule > self.begin[unit]) & (granule < self.end[unit]))
            if len(inside) > max_cuts:
                inside = np.sort(inside[np.argsort(-np.abs(moves[inside]), kind="stable")[:max_cuts]])
            moves[inside] = 0
            starts[inside] = num_units + 1 + np.arange(len(inside))
            cut_units, cut_granules = unit[inside], granule[inside]
        places = borders + moves
        longest = np.diff(places, prepend=0, append=self.total).max()
        return Deal(int(longest), cut_units, cut_granules, starts)
