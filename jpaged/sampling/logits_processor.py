"""A rule for logits that the owner of an engine adds to the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..checks import refusal, shown
from ..errors import ConfigError


@dataclass(frozen=True)
class LogitsProcessor:
    """A rule of the engine's owner, for the requests that ask for it by its arguments.

    `apply(logits, *arguments)` is a function that JAX can trace: it takes one row's logits, [V] in float32, and a
    float32 scalar for each name in `arguments`, and returns logits of the same shape. It changes the logits of requests
    that give numbers for all of `arguments` in their `extra_args`, after `logit_bias` and before penalties. Raises
    ConfigError.
    """

    name: str
    """Says what the rule does; errors name it."""
    arguments: tuple[str, ...]
    """At least one name; no other processor of the engine has one of them."""
    apply: Callable[..., Any]

    def __post_init__(self) -> None:
        """Check the fields, and keep `arguments` as a tuple.

        Raises ConfigError if `name` is no string or only spaces, if `arguments` are not a list or tuple of different
        strings, at least one, or if `apply` cannot be called.
        """
        if not isinstance(self.name, str) or not self.name.strip():
            self._refuse(f"the name {shown(self.name)}", "a string that says what it does, since errors name it")
        # Another type, a string too, counts as no names and is refused.
        names = self.arguments if isinstance(self.arguments, list | tuple) else ()
        if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
            got = f"the arguments {shown(self.arguments)} of {shown(self.name)}"
            self._refuse(got, "a tuple of different names, at least one, since requests ask for the processor by them")
        if not callable(self.apply):
            got = f"{shown(self.apply)} to apply for {shown(self.name)}"
            self._refuse(got, "a function of a row's logits and the processor's arguments")
        object.__setattr__(self, "arguments", tuple(names))  # The class is frozen; lists cannot be hashed.

    def _refuse(self, got: str, allowed: str) -> None:
        raise refusal("logits_processors", got, allowed, error=ConfigError)
