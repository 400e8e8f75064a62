"""Lets an engine give the memory of its device to others for a while, and take it back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

import jax

from ..checks import check, integer, one_of, refusal, shown
from ..errors import ConfigError
from ..models.io.loading import Weights
from ..request_builder import RequestBuilder
from ..startup.build_engine import EngineComponents

logger = logging.getLogger("jpaged")

MODES = ("abort", "wait", "keep")
"""What becomes of unfinished requests when an engine falls asleep. abort: they end. wait: those that have begun are
computed to their end first. keep: they go on after waking, from the tokens they have."""
WEIGHTS, KV_CACHE = TAGS = "weights", "kv_cache"
"""What `wake_up` brings back."""


class Sleep:
    """What of an engine's memory is given away at present."""

    def __init__(self, parts: EngineComponents, builder: RequestBuilder):
        """`builder` knows how often the weights were updated."""
        self.runner, self.device, self.builder = parts.runner, parts.device, builder
        self.reload: Callable[[], Weights] | None = parts.reload_weights
        self.away: set[str] = set()
        """Those of TAGS that the engine is without."""
        self._are_on_host = False

    def check(self, level: Any, mode: Any) -> None:
        """Refuse a level or a mode that there is not, and an engine that sleeps; ConfigError."""
        check("level", level, integer(1, 2), error=ConfigError)
        check("mode", mode, one_of(*MODES), error=ConfigError)
        if self.away:
            raise refusal("sleep", "an engine that sleeps", "one that is awake", "wake_up() first", error=ConfigError)

    def begin(self, level: int) -> None:
        """Free the pages, and the weights as the level says. No request may have pages, no step be in flight."""
        self.runner.drop_state()
        self.away = {KV_CACHE}
        if level == 2:
            self.runner.store.drop()
            self.away.add(WEIGHTS)
        elif self.device.platform == "cpu":
            logger.warning("sleep: the weights stay where they are: a CPU has no other memory for them")
        else:
            self.away.add(WEIGHTS)
            self._are_on_host = True
            with jax.transfer_guard("allow"):
                self.runner.store.move("pinned_host")

    def end(self, tags: Any) -> None:
        """Bring back what `tags` name, None for all. Raises ConfigError where weights can come from nowhere."""
        tags = TAGS if tags is None else tags
        if isinstance(tags, str) or not isinstance(tags, Collection) or not set(tags) <= set(TAGS):
            raise refusal("tags", shown(tags), f"None, or a list of {', '.join(TAGS)}", error=ConfigError)
        if WEIGHTS in tags and WEIGHTS in self.away:
            self._bring_weights_back()
            self.note_weights()
        if KV_CACHE in tags and KV_CACHE in self.away:
            self.runner.reset()
            self.away.discard(KV_CACHE)

    def note_weights(self) -> None:
        """Note that the weights are there again."""
        self._are_on_host = False
        self.away.discard(WEIGHTS)

    def _bring_weights_back(self) -> None:
        with jax.transfer_guard("allow"):
            if self._are_on_host:
                self.runner.store.move(None)
            elif self.reload is not None and not self.builder.num_weight_updates:
                self.runner.store.put(self.reload())
            else:
                allowed = "an engine with the weights of its checkpoint"
                got = "an engine that was given its weights, and has lost them"
                raise refusal("wake_up", got, allowed, "update_params() refills them", error=ConfigError)
