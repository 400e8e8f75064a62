"""Which weights the requests and the cached prefixes of an engine belong to, from one update to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..checks import boolean, check, integer, one_of, or_none
from ..errors import ConfigError
from ..request import CacheKey, Request
from ..scheduling.scheduler import Scheduler

MAX_VERSION = (1 << 31) - 1
"""Versions stand in arrays of int32."""
IN_FLIGHT = ("wait", "keep", "recompute", "abort")
"""What becomes of unfinished requests when the weights change. wait: those that have begun end with the old weights.
keep: they go on with the pages they have. recompute: they keep their tokens, and their pages are computed anew. abort:
they end."""


class WeightVersions:
    """The present version of the weights, and how requests and prefixes are told of a new one."""

    def __init__(self, scheduler: Scheduler):
        """Begin with version 0, of the weights that the engine has started with."""
        self.scheduler = scheduler
        self.version = 0
        """As outputs name it."""
        self.num_updates = 0
        """Keeps pages of different weights apart also where versions repeat."""

    def check_options(self, version: Any, in_flight: Any, copy: Any) -> int:
        """Return the version number of an update; None is the present one + 1. Raise ConfigError for a wrong value."""
        check("in_flight", in_flight, one_of(*IN_FLIGHT), error=ConfigError)
        check("version", version, or_none(integer(-MAX_VERSION - 1, MAX_VERSION)), error=ConfigError)
        check("copy", copy, boolean, error=ConfigError)
        return self.version + 1 if version is None else int(version)

    def key(self, key: CacheKey) -> CacheKey:
        """Return the key of pages that the present weights compute."""
        return replace(key, weights_version=self.num_updates)

    def tag(self, request: Request) -> None:
        """Record that a new request, which has no tokens yet, is computed by the present weights."""
        request.weights_version = self.version
        for sequence in request.sequences:
            sequence.weight_versions = [(0, self.version)]
        self._renew_key(request)

    def advance(self, version: int) -> None:
        """Record that the weights have changed, and that outputs call the new ones `version`. No step may be in flight.

        Requests that have pages keep them, but the prefix cache no longer offers these pages to other requests. Each
        unfinished request notes that its next tokens belong to `version`, and gets the cache key of the new weights.
        """
        self.version = version
        self.num_updates += 1
        self.scheduler.note_new_weights(self.num_updates)
        for request in self.scheduler.unfinished:
            self._note_version(request)
            self._renew_key(request)

    def _renew_key(self, request: Request) -> None:
        """Give a request the cache key of the present weights, and drop the page hashes that contain the old key."""
        request.cache_key = self.key(request.cache_key)
        for sequence in request.live:
            self.scheduler.prefixes.forget_hashes(sequence)

    def _note_version(self, request: Request) -> None:
        """Record that the next tokens of a request are drawn by the present weights.

        A sequence has a list of (index of the first output token, version), in ascending order. An entry that starts
        where the new one does has drawn no token, and the new one replaces it. Example: version 2 turns [(0, 1)] into
        [(0, 1), (5, 2)] after 5 output tokens, and into [(0, 2)] before the first one.
        """
        request.weights_version = self.version
        # A beam search has one history for all its beams, which have one length at a time. Outputs read it from the
        # first sample, which may have ended, so all samples get the entry.
        sequences = request.live if request.beams is None else request.sequences
        for sequence in sequences:
            start = (sequence if request.beams is None else request.live[0]).num_output_tokens
            versions = [one for one in sequence.weight_versions if one[0] < start]
            sequence.weight_versions = [*versions, (start, self.version)]
