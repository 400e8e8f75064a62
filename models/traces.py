"""What a trace of a caller's model tells: its `attend` calls, random draws, and what it does to its own variables.

All functions take jaxprs, as `jax.make_jaxpr` returns them, and look into nested ones.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import jax
from jax.interpreters import partial_eval

ATTENTION_CALL = "_attention_call"
"""Name of the jitted function that `CheckedCache.attend` calls once, so that jaxprs show the call."""
DRAWS = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"})
"""JAX's primitives that draw random numbers."""


def _inner(equation: Any) -> list[Any]:
    """Return the jaxprs among an equation's parameters: of jitted functions, loops, and the branches of a `cond`."""
    values = (value if isinstance(value, tuple) else (value,) for value in equation.params.values())
    parts = (getattr(part, "jaxpr", part) for value in values for part in value)
    return [part for part in parts if hasattr(part, "eqns")]


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations that hold no jaxpr themselves, of a jaxpr and of all that are nested in it."""
    for equation in jaxpr.eqns:
        inner = _inner(equation)
        for part in inner:
            yield from _equations(part)
        if not inner:
            yield equation


def num_attention_calls(jaxpr: Any) -> int:
    """Return how many `attend` calls are in the jaxpr of a step that was traced with a CheckedCache.

    The body of a scan counts once for each of its steps, that of another loop once. Of the branches of a `cond`, only
    the one with the most calls counts. The caller compares the number with that of the layers, because CheckedCache
    itself does not see a call whose returned cache is dropped: the next call starts from the older cache.
    """
    num_calls = 0
    for equation in jaxpr.eqns:
        # A call of a jitted function is an equation whose parameter `name` is the function's name.
        if equation.params.get("name") == ATTENTION_CALL:
            num_calls += 1
            continue
        counts = [num_attention_calls(part) for part in _inner(equation)]
        count = max(counts, default=0) if equation.primitive.name == "cond" else sum(counts)
        num_calls += count * equation.params["length"] if equation.primitive.name == "scan" else count
    return num_calls


def draws_random_numbers(jaxpr: Any) -> bool:
    """Return whether a jaxpr draws random numbers."""
    return any(equation.primitive.name in DRAWS for equation in _equations(jaxpr))


def constant_output(traced: Any, index: int) -> int | None:
    """Return the value of one output, a number, if it depends on no input of the closed jaxpr `traced`; None else."""
    jaxpr, is_used = _reduced(traced, {index})
    if any(is_used):
        return None
    (value,) = jax.core.eval_jaxpr(jaxpr, traced.consts)
    return int(value)


def computes_outputs(traced: Any, indices: Container[int]) -> bool:
    """Return whether anything is computed for these outputs of the closed jaxpr `traced`.

    Outputs that are inputs, or constants, may pass through jitted functions as they are, and nothing is computed.
    """
    jaxpr, _ = _reduced(traced, indices)
    return any(True for _ in _equations(jaxpr))


def _reduced(traced: Any, indices: Container[int]) -> tuple[Any, list[bool]]:
    """Return a closed jaxpr without dead code, and for each input whether it is used; only these outputs count.

    The elimination is JAX's own, `dce_jaxpr`, for which it has no public name.
    """
    return partial_eval.dce_jaxpr(traced.jaxpr, [place in indices for place in range(len(traced.jaxpr.outvars))])
