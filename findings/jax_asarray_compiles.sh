#!/usr/bin/env bash
# jax 0.10.2 (0.12.0.1 alike): jnp.asarray of an array of numpy compiles a program for each new shape and dtype.
#
# One would think that giving an array to the device needs no compiler. jnp.asarray(x) and jnp.array(x) trace and compile
# a small program for every shape that they have not seen, some 20 ms each; so does a change of dtype on the way, though
# numpy could make it. jnp.asarray(x, x.dtype), with the dtype that the array has already, and jax.device_put(x) compile
# nothing. A program that converts a hundred arrays of different shapes starts seconds later for it.
#
# Seen: programs compiled for two shapes: asarray [1, 1], array [1, 1], asarray from float64 to float32 [1, 1],
# asarray with its own dtype [0, 0], device_put [0, 0].
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

num_compiled = 0


def note(event, seconds, **_):
    global num_compiled
    num_compiled += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(note)


def compiled(convert, sizes, dtype):
    """Return how many programs each conversion of an array of 3 x size compiles."""
    counts = []
    for size in sizes:
        before = num_compiled
        convert(np.zeros((3, size), dtype)).block_until_ready()
        counts.append(num_compiled - before)
    return counts


CASES = {
    "asarray": (lambda x: jnp.asarray(x), (5, 6), np.float32, [1, 1]),
    "array": (lambda x: jnp.array(x), (7, 8), np.float32, [1, 1]),
    "asarray, float64 to float32": (lambda x: jnp.asarray(x, jnp.float32), (9, 10), np.float64, [1, 1]),
    "asarray with its own dtype": (lambda x: jnp.asarray(x, x.dtype), (11, 12), np.float32, [0, 0]),
    "device_put": (lambda x: jax.device_put(x), (13, 14), np.float32, [0, 0]),
}
for name, (convert, sizes, dtype, expected) in CASES.items():
    found = compiled(convert, sizes, dtype)
    print(f"{name}: {found}")
    assert found == expected, f"wanted {expected}"
PY
echo "as described"
