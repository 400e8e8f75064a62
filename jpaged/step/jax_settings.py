"""JAX's settings while an engine runs or traces its programs, whatever the process or the calling thread has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from ..checks import refusal
from ..errors import ConfigError


def refuse_traced(call: str) -> None:
    """Raise ConfigError if JAX traces a function in this thread, as it does for `jax.jit` and `jax.grad`.

    Such a call would happen once, when the function is traced, and not when it runs. `call` is the method in the error.
    """
    try:
        with jax.set_mesh(None):  # JAX lets no function that it traces set a mesh. This takes a microsecond.
            pass
    except ValueError:
        got = "a call from a function that JAX traces"
        allowed = "calls outside of functions of jax.jit, grad and the like"
        way_out = "call it before, and give the function its results as arguments"
        raise refusal(call, got, allowed, way_out, error=ConfigError) from None


@contextmanager
def engine_settings() -> Iterator[None]:
    """Let the calling thread run an engine's programs, in the `with` block or the decorated function.

    A trainer that debugs its own code may have set otherwise. Programs are compiled, as nothing computes them one
    operation at a time (`jax_disable_jit`). NaN and infinities are values: rules of requests and free pages hold some
    (`jax_debug_nans`, `jax_debug_infs`). Arrays may go between host and device (`jax.transfer_guard`).
    """
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        yield


@contextmanager
def trace_settings() -> Iterator[None]:
    """Let the calling thread trace and compile an engine's programs, by `engine_settings` and without x64.

    An engine's arrays have 32 bits at most, and its kernels are written for indices of 32 bits. With `jax_enable_x64`
    programs would compute intermediate values in 64 bits, and so draw other tokens or fail.
    """
    with engine_settings(), jax.enable_x64(False):
        yield
