"""How the owner of an engine adds a rule of his own to its logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError
from .sampling_params import shown


@dataclass(frozen=True)
class LogitsProcessor:
    """A rule of the engine's owner, for the requests that ask for it by its arguments.

    `apply(logits, *arguments)` is a function that JAX can trace: of one row's logits, [V] in float32, and a float32
    scalar for each name in `arguments`; it returns logits of the same shape. A request that gives numbers for all of
    `arguments` in its `extra_args` has its logits changed, others do not. It comes after `logit_bias` and before
    penalties. Raises ConfigError.
    """

    name: str
    arguments: tuple[str, ...]
    apply: Callable[..., Any]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ConfigError(
                f"logits_processors: got the name {shown(self.name)}, allowed: a string that says what it does; errors "
                "name it"
            )
        names = self.arguments if isinstance(self.arguments, list | tuple) else ()
        if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
            raise ConfigError(
                f"logits_processors: got the arguments {shown(self.arguments)} of {shown(self.name)}, allowed: a tuple "
                "of different names, one at least: requests ask for it by them"
            )
        if not callable(self.apply):
            raise ConfigError(
                f"logits_processors: got {shown(self.apply)} to apply for {shown(self.name)}, allowed: a function of a "
                "row's logits and its arguments"
            )
        object.__setattr__(self, "arguments", tuple(names))
