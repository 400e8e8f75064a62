"""The deltas of a request that may be computed again, as its reader sees them: each part of the text once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from ..outputs import SampleDelta

StreamSink = Callable[[list[SampleDelta]], None]


class NewDeltas:
    """The deltas of a request that is computed again, without the text that was shown already."""

    def __init__(self, show: StreamSink):
        self._show = show
        self._num_shown: Counter[int] = Counter()
        """Characters of each sample that were shown."""
        self._num_come: Counter[int] = Counter()
        """Characters of each sample that have come since it was begun."""

    def begin(self) -> None:
        """Note that the request is computed from its beginning on."""
        self._num_come.clear()

    def take(self, deltas: Iterable[SampleDelta]) -> None:
        """Show what is new of the deltas."""
        new: list[SampleDelta] = []
        for delta in deltas:
            num_known = max(0, self._num_shown[delta.index] - self._num_come[delta.index])
            self._num_come[delta.index] += len(delta.text)
            self._num_shown[delta.index] = max(self._num_shown[delta.index], self._num_come[delta.index])
            if len(delta.text) > num_known or not num_known:
                new.append(msgspec.structs.replace(delta, text=delta.text[num_known:]))
        self._show(new)
