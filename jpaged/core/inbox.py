"""Where the requests of one caller wait for it: `step`, a call such as `generate`, or what `submit` has returned.

Whichever thread computes a step, what it has changed goes to the inboxes of the requests' callers. Knows requests; no
step and no output.
"""

from __future__ import annotations

import threading
from collections import deque

from ..request import Request


class Inbox:
    """The requests of one caller, and those of them that have changed since the caller looked last.

    Everything but `changes` and `ended` is read and written under the engine's step lock alone.
    """

    def __init__(self, *, gives_ended: bool = False) -> None:
        """Start without requests. With `gives_ended`, requests that have ended go to `ended`."""
        self.requests: dict[Request, None] = {}
        """Those whose last output the caller has not got, in the order in which they were queued."""
        self._changed: dict[Request, None] = {}
        self.changes = threading.Event()
        """Set with each change, for a caller that waits while another thread computes the steps."""
        self.ended: deque[Request] | None = deque() if gives_ended else None
        """Requests that have ended and that the engine has forgotten, for a caller that takes nothing else of them. It
        takes them here without the step lock, whatever step is computed meanwhile. None for other callers."""

    @property
    def has_changed(self) -> bool:
        """Return whether a request has got a token or ended since the last `take`."""
        return bool(self._changed)

    @property
    def has_unfinished(self) -> bool:
        """Return whether a request has not ended."""
        return any(not request.state.is_finished for request in self.requests)

    def note(self, request: Request) -> None:
        """Record that a request has got a token, or has ended."""
        self._changed[request] = None
        self.changes.set()

    def take(self) -> list[Request]:
        """Return the requests that have changed since the last call, each once."""
        self.changes.clear()
        changed, self._changed = self._changed, {}
        return list(changed)

    def forget(self, request: Request) -> None:
        """Drop a request whose caller has its last output, or takes none."""
        self.requests.pop(request, None)
        self._changed.pop(request, None)
