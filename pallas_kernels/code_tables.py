"""Tables of quantized formats: what their codes stand for, as the `gguf` package has it.

An entry has one number, or those of 4 or 8 neighbors along a row; such a table is a grid. Numbers are integers here,
bytes from 0 on: what a file means by 0 is the `zero` of the format.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np
from jaxtyping import UInt8

IQ4_ZERO = 127
"""Minus the smallest number of the table of 4 bits."""
IQ1_ZERO = 9
"""IQ1's numbers are −1, 0 and 1, to which all 8 of an entry add an eighth, or take it away: here 8 times as much."""


@cache
def code_table(name: str) -> UInt8[np.ndarray, "entries values"]:
    """Return the table of this name, a key of `_TABLES`."""
    table = _TABLES[name]()
    table.flags.writeable = False
    return table


def _iq4() -> np.ndarray:
    from gguf.quants import IQ4_NL

    return (np.array(IQ4_NL.kvalues)[:, None] + IQ4_ZERO).astype(np.uint8)


def _grid(name: str) -> np.ndarray:
    """Return the magnitudes of a grid plus the largest one, so that those which are negated are bytes too."""
    magnitudes = _grid_numbers(name)
    return (magnitudes + magnitudes.max()).astype(np.uint8)


def _iq1() -> np.ndarray:
    """Return the entries less an eighth, and behind them those plus an eighth, which IQ1 chooses by one bit more."""
    numbers = 8 * _grid_numbers("IQ1_S")
    return (np.concatenate([numbers + 1, numbers - 1]) + IQ1_ZERO).astype(np.uint8)


def _grid_numbers(name: str) -> np.ndarray:
    """Return the numbers of a grid of the `gguf` package: int64 [entries, 4 or 8]."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    return kind.grid[0, 0].astype(np.int64)


_TABLES: dict[str, Callable[[], np.ndarray]] = {
    "IQ4": _iq4,
    "IQ1": _iq1,
    **{name: partial(_grid, name) for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")},
}
