"""Lets an engine give the memory of its device to others for a while, and take it back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from ..checks import check, integer, one_of, refusal, told
from ..errors import ConfigError
from ..models.weights.weights import Weights
from ..startup.build_engine import EngineComponents
from ..step.freed_memory import return_freed_memory
from ..step.jax_settings import engine_settings
from .weight_updates import WeightVersions

logger = logging.getLogger("jpaged")

MODES = ("abort", "wait", "keep")
"""What becomes of unfinished requests when an engine falls asleep. abort: they end. wait: those that have begun are
computed to their end first. keep: they go on after waking, from the tokens they have."""
WEIGHTS, KV_CACHE = TAGS = "weights", "kv_cache"
"""What `wake_up` brings back."""


class Sleep:
    """Frees the pages and the weights of an engine, and brings them back."""

    def __init__(self, parts: EngineComponents, versions: WeightVersions):
        self.runner, self.device, self.versions = parts.runner, parts.device, versions
        self.is_without_pages = False
        """Whether `begin` has freed the pages, and `end` has not made new ones."""
        self.reload: Callable[[], Weights] | None = parts.reload_weights

    @property
    def missing(self) -> list[str]:
        """Return which of TAGS the engine cannot compute without and does not have at present."""
        has = {WEIGHTS: self.runner.store.is_ready, KV_CACHE: not self.is_without_pages}
        return [tag for tag in TAGS if not has[tag]]

    @property
    def way_out(self) -> str:
        """Return, as a clause for errors, which calls bring back what is missing.

        `wake_up` brings back the pages, and the weights from the host's memory or from files. If the weights are in
        neither, the caller has to give them by `update_params`.
        """
        if WEIGHTS not in self.missing or self._has_weights_to_bring_back:
            return "wake_up() first"
        # Also where an update was interrupted, or a device failed in it: half of the weights are gone.
        return "update_params() and then wake_up() first" if KV_CACHE in self.missing else "update_params() first"

    @property
    def _has_weights_to_bring_back(self) -> bool:
        """Return whether weights that are away are in the host's memory, or in files that are read again."""
        return bool(self.runner.store.leaves) or (self.reload is not None and not self.versions.num_updates)

    def check(self, level: Any, mode: Any) -> None:
        """Raise ConfigError for a level or a mode that does not exist, and for an engine that sleeps."""
        check("level", level, integer(1, 2), error=ConfigError)
        check("mode", mode, one_of(*MODES), error=ConfigError)
        if self.missing:
            raise refusal("sleep", "an engine that sleeps", "one that is awake", self.way_out, error=ConfigError)

    @engine_settings()
    def begin(self, level: int) -> None:
        """Free the pages, and move (level 1) or drop (level 2) the weights.

        Level 1 moves the weights to the host's pinned memory; on a CPU they stay, with a warning, since they are in the
        host's memory already. No request may have pages and no step may be in flight.
        """
        self.is_without_pages = True
        self.runner.drop_state()
        if level == 2:
            self.runner.store.drop()
        elif self.device.platform == "cpu":
            logger.warning("sleep: the weights stay where they are: a CPU has no other memory for them")
        else:
            self.runner.store.move("pinned_host")
        return_freed_memory()

    @engine_settings()
    def end(self, tags: Any) -> None:
        """Bring back what `tags` name: the weights, the pages, or both, which is what None means.

        `tags` is a collection of any of TAGS; what the engine has already is left alone. Weights that were dropped and
        come from no checkpoint cannot be brought back. With `tags` of None that raises ConfigError, and nothing is
        changed. If `tags` names them, they stay away, as with vLLM, until `update_params`. New pages are empty. Raise
        ConfigError for other tags, and for a single string.
        """
        wanted = TAGS if tags is None else tags
        if isinstance(wanted, str) or not isinstance(wanted, Collection) or not set(wanted) <= set(TAGS):
            raise refusal("tags", told(wanted), f"None, or a list of {', '.join(TAGS)}", error=ConfigError)
        if WEIGHTS in wanted and WEIGHTS in self.missing and not self._bring_weights_back() and tags is None:
            allowed = "an engine with the weights of its checkpoint"
            got = "an engine that was given its weights, and has lost them"
            raise refusal("wake_up", got, allowed, "update_params() refills them", error=ConfigError)
        if KV_CACHE in wanted and KV_CACHE in self.missing:
            self.runner.reset()
            self.is_without_pages = False

    def _bring_weights_back(self) -> bool:
        """Move the weights back to the device, or read them from the checkpoint again; return whether it has them now.

        Weights that were moved to the host are in `store.leaves`; dropped ones are not, and are read again if there is
        a checkpoint. It is not read again after an update, since its weights are then older than those that were lost.
        """
        store = self.runner.store
        if store.leaves:
            store.move(None)  # To the device's default memory.
        elif self.reload is not None and self._has_weights_to_bring_back:
            store.put(self.reload())
        return store.is_ready
