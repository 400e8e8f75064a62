"""Replaces an engine's weights by a trainer's, and tells requests and cached prefixes which weights they belong to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..checks import boolean, check, integer, one_of, or_none
from ..errors import ConfigError
from ..models.live.live_weights import CheckedWeights
from ..request import Request
from ..request_builder import RequestBuilder
from ..startup.build_engine import EngineComponents

MAX_VERSION = (1 << 31) - 1
"""Versions stand in arrays of int32."""
IN_FLIGHT = ("wait", "keep", "recompute", "abort")
"""What becomes of unfinished requests when the weights change. wait: those that have begun end with the old weights.
keep: they go on with the pages they have. recompute: they keep their tokens, and their pages are computed anew. abort:
they end."""


class WeightUpdates:
    """The versions of one engine's weights."""

    def __init__(self, parts: EngineComponents, builder: RequestBuilder):
        """`builder` makes the requests of the engine."""
        self.live, self.runner, self.scheduler, self.builder = parts.live, parts.runner, parts.core.scheduler, builder

    @property
    def version(self) -> int:
        """Return the version of the present weights."""
        return self.builder.weights_version

    def check(self, params: Any, version: Any, in_flight: Any, copy: Any) -> tuple[CheckedWeights, int]:
        """Return the tree and the version to go to. Raises ModelLoadError for a tree that does not fit, ConfigError."""
        check("in_flight", in_flight, one_of(*IN_FLIGHT), error=ConfigError)
        check("version", version, or_none(integer(-MAX_VERSION - 1, MAX_VERSION)), error=ConfigError)
        check("copy", copy, boolean, error=ConfigError)
        return self.live.check(params), self.version + 1 if version is None else int(version)

    def tag(self, request: Request) -> None:
        """Note that a request that comes belongs to the present weights."""
        request.weights_version = self.version
        request.cache_key = replace(request.cache_key, weights_version=self.builder.num_weight_updates)
        for sequence in request.sequences:
            sequence.weight_versions = [(0, self.version)]
            self.scheduler.prefixes.forget_hashes(sequence)

    def apply(self, checked: CheckedWeights, version: int, *, copy: bool) -> None:
        """Replace the weights; no step may be in flight. If this fails, the engine is without weights.

        Requests that have pages keep them, but no other request finds them.
        """
        self.runner.store.update(self.live, checked, self.runner.plan.get, copy=copy)
        builder = self.builder
        builder.weights_version = version
        builder.num_weight_updates += 1
        self.scheduler.prefixes.renew(builder.num_weight_updates)
        self.scheduler.mix_pages()
        for request in self.scheduler.unfinished:
            self._note_version(request)
            request.cache_key = replace(request.cache_key, weights_version=builder.num_weight_updates)
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
