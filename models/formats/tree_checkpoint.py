"""Arrays in memory as a checkpoint: a flat or nested tree under Hugging Face names, of numpy or JAX arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...sharding import with_automatic_axes
from ..errors import ModelLoadError
from .checkpoint import DTYPES, WHOLE, as_matrix, block_of

MAX_DEPTH = 64
PARAMS = Path("params")
"""The path that errors name for a tree: the option that gives it."""


class TreeCheckpoint:
    """The arrays of a tree. Keys of nested mappings, and indices of lists, are joined by dots.

    The tree is never changed, and loading copies its values. Raises ModelLoadError, which names the key, for two leaves
    of the same name, and for a leaf that is read and is no array of floats. A training state may hold other leaves that
    are not read.
    """

    def __init__(self, tree: Mapping[str, Any]):
        self.path = PARAMS
        self._leaves = named_leaves(tree)

    def names(self) -> Collection[str]:
        """Return the names of all leaves."""
        return self._leaves.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's shape."""
        return tuple(self._array(name).shape)

    def dtype(self, name: str) -> str:
        """Return float32, bfloat16 or float16."""
        return self._array(name).dtype.name

    def read(self, name: str, rows: slice, columns: slice = WHOLE) -> np.ndarray:
        """Return `rows` of the first axis, and `columns` of the second of a matrix.

        The result is a view of an array in host memory, and a copy of only this block of an array on a device.
        """
        array = self._array(name)
        axes = block_of(array.shape, rows, columns)
        if isinstance(array, jax.Array) and not is_on_host(array):
            # Starts are arguments of a compiled program and not constants, so that blocks of one size share it.
            starts = tuple(np.int32(axis.start) for axis in axes)
            return as_matrix(np.asarray(_block(array, starts, tuple(axis.stop - axis.start for axis in axes))))
        return as_matrix(np.asarray(array)[axes])

    def _array(self, name: str) -> np.ndarray | jax.Array:
        """Return the leaf `name` of the tree, which must be an array.

        Leaves are checked only here, when they are asked for. Raises ModelLoadError if the leaf is no array, has
        another dtype than DTYPES or another byte order than the machine's, was deleted or donated, or lies in part on
        devices of other processes.
        """
        leaf = self._leaves[name]
        if not isinstance(leaf, np.ndarray | jax.Array):
            raise ModelLoadError(f"{PARAMS}: {name} is a {type(leaf).__name__}, wanted an array of numpy or JAX")
        if leaf.dtype.name not in DTYPES or not leaf.dtype.isnative:
            raise ModelLoadError(f"{PARAMS}: {name} is {leaf.dtype}, wanted one of {', '.join(DTYPES)}: cast it")
        if isinstance(leaf, jax.Array) and (leaf.is_deleted() or not leaf.is_fully_addressable):
            fault = "was deleted or donated" if leaf.is_deleted() else "lies in part on devices of other processes"
            raise ModelLoadError(f"{PARAMS}: {name} {fault}, wanted an array that this process can read")
        return leaf

    def files(self) -> list[Path]:
        """Return none: the arrays are in memory."""
        return []


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a nested tree by name. A name is the keys and indices on the path, joined by dots.

    {"layers": [{"bias": b}]} gives {"layers.0.bias": b}, and so does {"layers/0/bias": b}. Levels are mappings, lists,
    tuples, named tuples and dataclasses, such as Flax's `TrainState`, under the names of their fields. An nnx variable
    counts as the array that it holds, and an array on a mesh with explicit axes as the same one with automatic axes.
    Raises ModelLoadError for two leaves of the same name, for more than MAX_DEPTH levels, and if `tree` is no level.
    """
    if _children(tree) is None:
        raise ModelLoadError(
            f"{PARAMS}: got {type(tree).__name__}, wanted a flat or nested tree of names and arrays, as nnx.state gives"
        )
    found: dict[str, Any] = {}
    for name, leaf in _flat_leaves(tree):
        if name in found:
            raise ModelLoadError(f"{PARAMS}: two leaves have the name {name!r}; leave one of them out")
        found[name] = leaf
    return found


def _is_variable(value: Any) -> bool:
    """Return whether a leaf is a variable of nnx, whose package is not imported for the question."""
    return hasattr(value, "get_metadata")


def _children(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return (key, child) of each child of a level of a tree; None for a leaf."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, list | tuple):
        return enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not _is_variable(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _flat_leaves(tree: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each leaf of a nested tree, depth first.

    An empty level has no leaves. A key that is a tuple is joined by dots, too, and slashes in keys become dots:
    {("layers", 0): {"bias": b}} gives "layers.0.bias". `prefix` is put before each name, and `depth` is the number of
    levels above `tree`. Raises ModelLoadError for a tree that is nested deeper than MAX_DEPTH, such as one that
    contains itself.
    """
    if depth > MAX_DEPTH:
        fault = f"{prefix[:60]}… is nested deeper than {MAX_DEPTH} levels"
        raise ModelLoadError(f"{PARAMS}: {fault}: give a tree of arrays")
    for key, value in _children(tree) or ():
        text = ".".join(map(str, key)) if isinstance(key, tuple) else str(key)
        name = prefix + text.replace("/", ".")
        if _children(value) is not None:
            yield from _flat_leaves(value, f"{name}.", depth + 1)
        else:
            yield name, with_automatic_axes(value.get_value() if _is_variable(value) else value)


@partial(jax.jit, static_argnums=2)
def _block(array: jax.Array, starts: tuple[Any, ...], sizes: tuple[int, ...]) -> jax.Array:
    """Return a block of an array; blocks of one size share a program, wherever they start."""
    return jax.lax.dynamic_slice(array, starts, sizes)


def is_on_host(array: jax.Array) -> bool:
    """Return whether numpy can view the array where it is."""
    return len(devices := array.devices()) == 1 and next(iter(devices)).platform == "cpu"


def lies_on_several_devices(tree: Any) -> bool:
    """Return whether an array of a tree is on more than one device."""
    arrays = (leaf for leaf in named_leaves(tree).values() if isinstance(leaf, jax.Array) and not leaf.is_deleted())
    return any(array.sharding.num_devices > 1 for array in arrays)
