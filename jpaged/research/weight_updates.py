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
        self.scheduler = scheduler
        self.version = 0
        """As outputs name it."""
        self.num_updates = 0
        """Keeps pages of different weights apart also where versions repeat."""

    def check_options(self, version: Any, in_flight: Any, copy: Any) -> int:
        """Return the version that an update goes to; raise ConfigError for an option that there is not."""
        check("in_flight", in_flight, one_of(*IN_FLIGHT), error=ConfigError)
        check("version", version, or_none(integer(-MAX_VERSION - 1, MAX_VERSION)), error=ConfigError)
        check("copy", copy, boolean, error=ConfigError)
        return self.version + 1 if version is None else int(version)

    def key(self, key: CacheKey) -> CacheKey:
        """Return the key of pages that the present weights compute."""
        return replace(key, weights_version=self.num_updates)

    def tag(self, request: Request) -> None:
        """Note that a request which comes belongs to the present weights."""
        request.weights_version = self.version
        for sequence in request.sequences:
            sequence.weight_versions = [(0, self.version)]
        self._renew_key(request)

    def advance(self, version: int) -> None:
        """Note that the weights are others from now on. No step may be in flight.

        Requests that have pages keep them, but no other request finds them.
        """
        self.version = version
        self.num_updates += 1
        self.scheduler.note_new_weights(self.num_updates)
        for request in self.scheduler.unfinished:
            self._note_version(request)
            self._renew_key(request)

    def _renew_key(self, request: Request) -> None:
        request.cache_key = self.key(request.cache_key)
        for sequence in request.live:
            self.scheduler.prefixes.forget_hashes(sequence)

    def _note_version(self, request: Request) -> None:
        """Note that the next tokens of a request are drawn by the present weights."""
        request.weights_version = self.version
        # Beams go on in each other's place, all of one length.
        sequences = request.live if request.beams is None else request.sequences
        for sequence in sequences:
            start = (sequence if request.beams is None else request.live[0]).num_output_tokens
            versions = [one for one in sequence.weight_versions if one[0] < start]
            sequence.weight_versions = [*versions, (start, self.version)]
