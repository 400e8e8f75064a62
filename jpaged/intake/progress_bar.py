"""The progress bar of the offline calls."""

from __future__ import annotations

import sys
import threading
from typing import Any

from tqdm import tqdm


class ProgressBar(tqdm):
    """A bar of tqdm with locks of its own and no thread that watches it.

    The bars of tqdm share two locks, which they take one after the other, also a bar that is not shown, and a thread
    takes them too. An interrupt leaves one of them taken, and a later bar may then wait for ever.
    """

    _lock = threading.RLock()
    """Held for a moment as a bar is made or ends."""
    monitor_interval = 0

    def __init__(self, **options: Any) -> None:
        self._lock = threading.RLock()
        """Held while this bar is drawn."""
        super().__init__(**options)


def progress_bar(num_requests: int, *, is_shown: bool) -> ProgressBar:
    """Return a progress bar. It is shown only if `is_shown` is true and stderr is an open terminal or a notebook's."""
    is_open = sys.stderr is not None and not sys.stderr.closed
    where_open = False if "ipykernel" in sys.modules else None  # tqdm shows nothing for None without a terminal.
    disable = where_open if is_shown and is_open else True
    # An update of each request is shown: without the thread nothing would make up for those that are left out.
    return ProgressBar(total=num_requests, desc="requests", unit="req", miniters=1, disable=disable)
