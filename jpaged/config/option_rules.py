"""Rules of engine options that say more than a type and a range.

A rule takes a value as the caller gave it, and returns it as `EngineConfig` keeps it, or raises `checks.Unfit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import checks
from ..checks import INT64, Unfit, integer
from ..errors import ConfigError
from ..limits import DEFAULT_LIMITS, LIMITS
from ..sampling.logits_processor import LogitsProcessor

MAX_BLOCK_SIZE = 1024
MAX_DECODE_STEPS = 16
"""Tokens that one dispatch decodes at most."""
SCHEDULING_POLICIES = ("fcfs", "priority")
MAX_JSON_DEPTH = 16
COUNT = integer(0, INT64[1])
SIZE = integer(1, INT64[1])


def model(value: Any) -> str:
    """Take a string or a path that is not empty. `Engine` itself takes modules of nnx, before it makes a config."""
    if isinstance(value, str | Path) and str(value):
        return str(value)
    allowed = "a directory, a .gguf file, org/name[@revision] or a built-in name; for an Engine also a module of nnx"
    if value is None or isinstance(value, str | Path | bytes | int | float | list):
        raise Unfit(allowed)
    if isinstance(value, Mapping) or hasattr(value, "params"):
        raise Unfit(allowed, "give arrays as params, beside the directory that has the model's config")
    if isinstance(value, type):
        raise Unfit(allowed, "give an instance of the class")
    adapter = "an adapter, as examples/linen_model.py has one"
    raise Unfit(allowed, f"put a model of another library, or a function, behind {adapter}")


def block_size(value: Any) -> int:
    """Take a power of two."""
    size: int = integer(1, MAX_BLOCK_SIZE)(value)
    if size & (size - 1):
        raise Unfit(f"a power of two from 1 to {MAX_BLOCK_SIZE}, such as 16 or 64")
    return size


def host_blocks(value: Any) -> int:
    """Take 0, or at least 2 pages: the null page, which holds no tokens, and another one."""
    if COUNT(value) == 1:
        raise Unfit("0, or an integer ≥ 2, since the first page is the null page")
    return int(value)


def policy(value: Any) -> Any:
    """Take a policy's name, or a function of the caller's own."""
    if not callable(value) and (not isinstance(value, str) or value not in SCHEDULING_POLICIES):
        raise Unfit(f"{', '.join(SCHEDULING_POLICIES)}, or in Python a key function of a request")
    return value


def decode_steps(value: Any) -> int | str:
    """Take "auto" or a number of tokens."""
    if isinstance(value, str) and value == "auto":
        return value
    if not checks.is_integer(value) or not 1 <= value <= MAX_DECODE_STEPS:
        raise Unfit(f"auto, or an integer in [1, {MAX_DECODE_STEPS}]")
    return int(value)


def only_one(value: Any) -> int:
    """Take 1 alone, for ways to spread an engine that this version does not have."""
    if not checks.is_integer(value) or value != 1:
        raise Unfit("1: more is not available in this version", "leave it out")
    return 1


def processors(value: Any) -> tuple[LogitsProcessor, ...]:
    """Take a list or a tuple of LogitsProcessor, and return it as a tuple. Raise Unfit for anything else.

    It may be empty. Requests name the arguments of all processors in one mapping, so no two processors may share an
    argument's name; that raises Unfit too.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(one, LogitsProcessor) for one in value):
        raise Unfit("a list of LogitsProcessor")
    arguments = [argument for processor in value for argument in processor.arguments]
    if len(set(arguments)) < len(arguments):
        raise Unfit("processors whose arguments all have different names")
    return tuple(value)


def limits(value: Any) -> dict[str, int | None]:
    """Take a mapping of some names of LIMITS to integers, and return it with all names; None means no limit.

    A limit that is left out, or None, has its default. Raise ConfigError for an unknown name, and Unfit for a wrong
    value, such as one above the ceiling of a limit.
    """
    if not isinstance(value, Mapping):
        raise Unfit("a mapping of names of limits, such as waiting_requests, to integers")
    limits = dict(DEFAULT_LIMITS)
    for name, number in value.items():
        checks.check_name(name, LIMITS, "key of limits", error=ConfigError)
        if number is None:
            continue
        floor, ceiling = LIMITS[name].floor, LIMITS[name].ceiling or INT64[1]
        if not checks.is_integer(number) or not floor <= number <= ceiling:
            allowed = f"an integer ≥ {floor}" if ceiling == INT64[1] else f"an integer in [{floor}, {ceiling}]"
            raise Unfit(f"{allowed}, or leave it out for its default", got=f"{checks.shown(number)} for {name}")
        limits[name] = int(number)
    return limits


def overrides(value: Any) -> dict[str, Any]:
    """Take a mapping of values that JSON has, and return a copy."""
    if not isinstance(value, Mapping):
        raise Unfit("a mapping of keys of config.json to their values")
    copied: dict[str, Any] = _plain(value, MAX_JSON_DEPTH)
    return copied


def _plain(value: Any, depth: int) -> Any:
    """Return a deep copy of a JSON value; tuples become lists. Raise Unfit for a value that JSON does not have.

    Keys of objects must be strings. NaN and infinities pass, as Python's `json` reads and writes them. At most `depth`
    levels of objects, lists and values may be nested, this value included: {"a": [1]} has 3. More raise Unfit.
    """
    if not depth:
        raise Unfit(f"at most {MAX_JSON_DEPTH} levels")
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(inner, depth - 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, depth - 1) for inner in value]
    if not isinstance(value, str | int | float | None):
        raise Unfit("values that JSON has, and strings as keys", got=f"{checks.shown(value)} among the values")
    return value


def params_tree(value: Any) -> Any:
    """Take a tree of arrays; its leaves are checked when the model is opened."""
    if not isinstance(value, Mapping | None):
        raise Unfit("a flat or nested mapping of Hugging Face names to arrays", got=type(value).__name__)
    return value


def trainer_mesh(value: Any) -> Any:
    """Take a `jax.sharding.Mesh` with devices, each of them once, or None, and return it unchanged.

    Raise Unfit for another type, for no device, and for a device that occurs twice.
    """
    if value is None:
        return None
    from jax.sharding import Mesh  # Not before: the command line reads its options without JAX.

    if not isinstance(value, Mesh):
        raise Unfit("a jax.sharding.Mesh")
    if not value.size or len(set(value.devices.flat)) < value.size:
        raise Unfit("devices, each of them once", got="one device twice" if value.size else "no device")
    return value


def axis_rules(value: Any) -> dict[str, str | tuple[str, ...] | None]:
    """Take a mapping of logical axes to axes of a mesh, and return a copy with tuples for lists; raise Unfit else.

    Example: {"heads": "tp", "embed": ["fsdp", "sp"], "norm": None} gives {"heads": "tp", "embed": ("fsdp", "sp"),
    "norm": None}.
    """
    allowed = 'a mapping of logical axes to axes of mesh, such as {"heads": "tp", "embed": None}'
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise Unfit(allowed)
    rules = {name: tuple(axes) if isinstance(axes, list) else axes for name, axes in value.items()}
    for name, axes in rules.items():
        each = axes if isinstance(axes, tuple) else (() if axes is None else (axes,))
        if not all(isinstance(axis, str) for axis in each):
            raise Unfit(allowed, got=f"{checks.shown(axes)} for {checks.shown(name)}")
    return rules
