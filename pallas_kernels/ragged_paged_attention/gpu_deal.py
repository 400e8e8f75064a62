"""Deals units of different length out to lists of equal length, cutting as few of them as it must.

units, end to end   ├───── 0 ─────┤├ 1 ┤├── 2 ──┤├──── 3 ────┤…
borders             │        │        │        │        │          equal shares, one list between two
nothing cut         ├───── 0 ─────┤├ 1 ┤├── 2 ──┤├──── 3 ────┤      each border moves to the nearest end of a unit
cut                 ├── 0 ──┼ 0 ┤├1 ┤├ 2 ┼ 2 ┤├── 3 ──┼──…         where that leaves the longest list too long
"""

from __future__ import annotations

import numpy as np

UNIT_COST = 2
"""Granules of keys that beginning and ending a piece is taken to cost."""
BALANCED = 1.1
"""Units are not cut if the longest list is within this of the mean."""


def deal(
    begin: np.ndarray, end: np.ndarray, *, num_lists: int, max_cuts: int, least_share: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Deal out units [begin, end) of granules, one of them at least.

    Returns the units that are cut, at which granule, and where all lists but the first begin.

    A list begins at a unit; the number of units stands for the end of all, and what lies behind it for the cuts. With
    fewer cuts allowed than there are borders, the last lists are empty when units are cut. `least_share` is what a list
    gets before the next one gets any.
    """
    num_units = len(begin)
    cost = end - begin + UNIT_COST
    ends = np.cumsum(cost)
    total = int(ends[-1])
    whole = np.empty(0, np.int64)

    def borders_of(num_lists: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(where the borders lie, the unit that each lies in, and the unit whose begin is nearest to it)."""
        share = max(-(-total // num_lists), least_share)
        borders = np.minimum(np.arange(1, num_lists) * share, total)
        unit = np.searchsorted(ends, borders, side="right")
        middle = np.append(ends - cost / 2, total)[unit]
        return borders, unit, np.minimum(unit + (borders > middle), num_units)

    _, _, nearest = borders_of(num_lists)
    edges = np.concatenate([[0], np.append(0, ends)[nearest], [total]])
    if not max_cuts or np.diff(edges).max() <= BALANCED * max(total / num_lists, least_share):
        return whole, whole, nearest
    borders, unit, nearest = borders_of(min(num_lists, max_cuts + 1))
    inner = np.minimum(unit, num_units - 1)
    granule = begin[inner] + borders - (ends - cost)[inner] - UNIT_COST
    is_inside = (unit < num_units) & (granule > begin[inner]) & (granule < end[inner])
    starts = np.full(num_lists - 1, num_units)
    starts[: len(nearest)] = nearest
    starts[: len(nearest)][is_inside] = num_units + 1 + np.arange(np.count_nonzero(is_inside))
    return inner[is_inside], granule[is_inside], starts
