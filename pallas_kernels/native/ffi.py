"""The part of XLA's custom-call interface that native code relies on, and its comparison with the installed jaxlib.

Source: jaxlib's xla/ffi/api/c_api.h, whose structures only grow at their end while the major version stays.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import version
from pathlib import Path

import jax

MAJOR = 0
"""Major version of the interface that the offsets below belong to."""
# Where fields stand in the structures, counted in words of 8 bytes.
FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT, FRAME_ARGS, FRAME_RETS = 1, 2, 3, 9, 14
BUFFER_DATA, BUFFER_DIMS = 3, 5
EXTENSION_TYPE, EXTENSION_METADATA, METADATA_VERSION, METADATA_TRAITS = 1, 3, 3, 4
API_FUNCTIONS = 6
# Functions of the interface, counted from API_FUNCTIONS on.
DESTROY_ERROR, SCHEDULE, NUM_THREADS = 2, 11, 12

_HEAD = "struct_size", "extension_start"
_EXPECTED = {
    "CallFrame": (*_HEAD, "api", "ctx", "stage", "args", "rets"),
    "Args": (*_HEAD, "size", "types", "args"),
    "Rets": (*_HEAD, "size", "types", "rets"),
    "Buffer": (*_HEAD, "dtype", "data", "rank", "dims"),
    "Metadata_Extension": ("extension_base", "metadata"),
    "Metadata": ("struct_size", "api_version", "traits"),
    "Api_Version": (*_HEAD, "major_version", "minor_version"),
    "Error_Destroy_Args": (*_HEAD, "error"),
    "ThreadPool_Schedule_Args": (*_HEAD, "ctx", "task", "data"),
    "ThreadPool_NumThreads_Args": (*_HEAD, "ctx", "num_threads"),
}
"""First fields of each structure that is read or written. Each takes whole words, but for the two numbers of a version,
which share one word."""
_FUNCTIONS = {"Error_Destroy": DESTROY_ERROR, "ThreadPool_Schedule": SCHEDULE, "ThreadPool_NumThreads": NUM_THREADS}


def check_interface(header: str) -> tuple[int, int]:
    """Return the version (major, minor) of XLA's custom-call interface, read from the text of its C header.

    Raises RuntimeError if the header states no version or a major version other than `MAJOR`. It also does so if a
    structure does not begin with the fields in `_EXPECTED`, or if the table of functions, struct XLA_FFI_Api, does not
    have the functions in `_FUNCTIONS` at those indices: native code reads both by fixed offsets.
    """
    # Two macros: XLA_FFI_API_MAJOR, then XLA_FFI_API_MINOR.
    numbers = tuple(int(number) for number in re.findall(r"#define XLA_FFI_API_M(?:AJ|IN)OR (\d+)", header))
    if len(numbers) != 2 or numbers[0] != MAJOR:
        raise _refusal(f"version {'.'.join(map(str, numbers)) or 'unknown'}", f"{MAJOR}.x")
    for name, expected in _EXPECTED.items():
        # Fields after the expected ones are not read: structures grow at their end.
        if (found := _fields(header, name)[: len(expected)]) != expected:
            raise _refusal(f"XLA_FFI_{name} with {', '.join(found) or 'no fields'}", ", ".join(expected))
    # The first four fields of the table are not functions: its size, extensions, version and internal interface.
    functions = _fields(header, "Api")[4:]
    for name, index in _FUNCTIONS.items():
        # A slice is empty, and so refused, if the table is shorter.
        if functions[index : index + 1] != (f"XLA_FFI_{name}",):
            raise _refusal(f"another function than XLA_FFI_{name} as number {index} of XLA_FFI_Api", "this one")
    return numbers[0], numbers[1]


@cache
def interface_header() -> str:
    """Return the text of the C header in the installed jaxlib. Raises RuntimeError if it cannot be read."""
    try:
        return Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    except OSError as error:
        raise _refusal(f"no header ({error})", "xla/ffi/api/c_api.h") from error


def _fields(header: str, name: str) -> tuple[str, ...]:
    """Return the names of the fields of `struct XLA_FFI_<name>` in their order; none if there is no such structure."""
    body = re.search(rf"struct XLA_FFI_{name} {{(.*?)\n}}", header, re.DOTALL)
    text = re.sub(r"//[^\n]*", "", body[1]) if body else ""
    return tuple(re.findall(r"(\w+)\)?;", text))


def _refusal(got: str, wanted: str) -> RuntimeError:
    """Return the error that the installed jaxlib is not one that native code can be called by."""
    return RuntimeError(
        f"jaxlib {version('jaxlib')}: got {got} in XLA's interface for native code, wanted {wanted}; install a jaxlib "
        "that jpaged was tested with, such as 0.10.2"
    )
