"""Checks trees of arrays that are to become a model's weights, and lists everything that is wrong with them."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ModelLoadError
from ..formats.checkpoint import DTYPES, are_equal
from ..formats.tree_checkpoint import TreeCheckpoint, is_on_host

CODES_WITHOUT_NAN = "uint8", "int8", "int4", "float4_e2m1fn"
"""Dtypes of codes that all stand for a number; the owner of bytes looks for others."""
MAX_NAMED = 50
"""Faults of one kind that an error names; the rest is counted."""


class TreeLayout(enum.Enum):
    """How a tree holds the weights of a model."""

    TENSORS = "of tensors"
    """Under the names of a Hugging Face checkpoint, one array per tensor."""
    STACKED = "of stacked tensors"
    """Under these names without the layers' numbers, the tensors of all layers in one array [L, …]."""
    OWN = "under the paths of the model's own weights"
    """Under the paths of the engine's own weights, in their shapes."""


@dataclass(frozen=True)
class Twin:
    """A matrix that a tree may hold under two names, and that the model has once, such as a tied head.

    Both arrays must be equal in the dtype of the model's weight.
    """

    name: str
    kept_name: str
    """Name of the other array, which becomes the weight."""
    dtype: Any
    """The dtype of the model's weight."""


@dataclass(frozen=True)
class WantedTree:
    """The arrays that a tree of one layout has."""

    layout: TreeLayout
    shapes: Mapping[str, tuple[int, ...]]
    may_have: frozenset[str] = frozenset()
    """Names that the tree may have and that are not read."""
    twin: Twin | None = None
    dtypes: tuple[str, ...] = DTYPES
    """Names of the dtypes that the arrays may have."""
    codes: Mapping[str, str] = field(default_factory=dict)
    """Name of each array that is codes → its dtype."""


@dataclass(frozen=True)
class CheckedTree:
    """A tree without faults."""

    layout: TreeLayout
    arrays: Mapping[str, np.ndarray | jax.Array]


def check_tree(arrays: Mapping[str, Any], wanted: WantedTree, parts: Iterable[tuple[str, ...]]) -> CheckedTree:
    """Return the arrays of a tree that the model needs, by name; those of `may_have` and a twin are left out.

    `arrays` are the tree's leaves by name. `wanted` has the names and shapes that the model needs, further names that
    are allowed and not read (`may_have`), and the twin: the second name of a matrix that the model has once, such as a
    tied head. Each tuple in `parts` has the names of arrays that make one weight together, such as queries, keys and
    values; these must have the same dtype. Raises ModelLoadError, which lists all faults: missing and unknown names,
    wrong types and shapes, mixed dtypes, NaN and infinity, and a twin that differs. Every value is read once to look
    for NaN, and a twin once more to compare it.
    """
    twin, shapes = wanted.twin, dict(wanted.shapes)
    if twin is not None:  # Both copies are checked, and the second one is left out of the result.
        shapes[twin.name] = shapes[twin.kept_name]
    faults = [
        *_listed("missing", shapes.keys() - arrays.keys()),
        *_listed("without a place in the model", arrays.keys() - shapes.keys() - wanted.may_have),
    ]
    needed = {name: arrays[name] for name in shapes if name in arrays}
    dtypes = {name: (wanted.codes[name],) if name in wanted.codes else wanted.dtypes for name in needed}
    misfits = {name: fault for name, leaf in needed.items() if (fault := _misfit(leaf, shapes[name], dtypes[name]))}
    # Each of these names has a fault of its own, so every one gets a clause of its own.
    faults += [f"{name} {fault}" for name, fault in list(misfits.items())[:MAX_NAMED]]
    faults += [f"and {len(misfits) - MAX_NAMED} more such"] if len(misfits) > MAX_NAMED else []
    fitting = {name: leaf for name, leaf in needed.items() if name not in misfits}
    mixed_parts = [names for names in parts if len({fitting[name].dtype for name in names if name in fitting}) > 1]
    mixed_names = {name for names in mixed_parts for name in names}
    faults += _listed("of another dtype than other parts of one weight", mixed_names)
    floats = {name: leaf for name, leaf in fitting.items() if wanted.codes.get(name) not in CODES_WITHOUT_NAN}
    faults += _listed("holding a NaN or an infinity", set(_not_finite(floats)))
    # A twin is compared only if both copies are there and fit. If not, that is a fault already, which is raised below.
    if twin is not None and not misfits.keys() & {twin.name, twin.kept_name} and twin.kept_name in needed:
        if not _are_equal_as_weights(needed[twin.name], needed[twin.kept_name], twin.dtype):
            faults.append(
                f"{twin.name} differs from {twin.kept_name}, wanted equal ones: the model has one matrix for both "
                "(tie_word_embeddings), so start an engine with these params"
            )
        del needed[twin.name]
    if faults:
        way_out = "nothing was changed; give all arrays of the model"
        raise ModelLoadError(f"params, a tree {wanted.layout.value}: {'; '.join(faults)}; {way_out}")
    return CheckedTree(wanted.layout, needed)


def _listed(fault: str, names: set[str]) -> list[str]:
    """Return one message with a fault and the names that have it; an empty list without names."""
    return [f"{fault}: {joined_names(names)}"] if names else []


def joined_names(names: Collection[str]) -> str:
    """Return the sorted names, joined by commas. At most MAX_NAMED are listed, and the rest are counted.

    With a limit of 2, the names a to e give "a, b and 3 more".
    """
    rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(sorted(names)[:MAX_NAMED]) + rest


def _misfit(leaf: Any, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> str | None:
    """Return what is wrong with a leaf's type, dtype, memory or shape; None if nothing is. Values are not read.

    `leaf` is what a caller's tree has at one name, so it may be of any type. `shape` is the wanted shape, and `dtypes`
    are the names of the allowed dtypes, in the machine's byte order (`isnative`). The result follows the leaf's name in
    an error, such as "has shape (2, 3), wanted (3, 2)". Only the first fault is returned.
    """
    if not isinstance(leaf, np.ndarray | jax.Array):
        return f"is a {type(leaf).__name__}, wanted an array of numpy or JAX"
    if leaf.dtype.name not in dtypes or not leaf.dtype.isnative:
        return f"is {leaf.dtype}, wanted {', '.join(dtypes)}"
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return "was deleted or donated"
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return "lies in part on devices of other processes"
    return None if tuple(leaf.shape) == shape else f"has shape {tuple(leaf.shape)}, wanted {shape}"


def _are_equal_as_weights(first: np.ndarray | jax.Array, second: np.ndarray | jax.Array, dtype: Any) -> bool:
    """Return whether two matrices of the same shape have equal values after both are converted to `dtype`.

    They are the two copies [V, D] of a matrix that the model has only once, such as a tied head, and `dtype` is that of
    the model's weight. Values that become equal by rounding count as equal, and so do 0 and −0. A NaN equals nothing,
    but an array counts as equal to itself without a look at its values. JAX arrays with the same sharding are compared
    on their devices, and all others on the host, a block of rows at a time.
    """
    if first is second:
        return True
    if isinstance(first, jax.Array) and isinstance(second, jax.Array) and first.sharding == second.sharding:
        return bool(_equal_on_device(first, second, jnp.dtype(dtype)))
    tree = TreeCheckpoint({"first": first, "second": second})  # `are_equal` reads tensors by name.
    return are_equal(tree, "first", "second", lambda block, other: (block.astype(dtype), other.astype(dtype)))


@partial(jax.jit, static_argnums=2)
def _equal_on_device(first: jax.Array, second: jax.Array, dtype: Any) -> jax.Array:
    return jnp.all(first.astype(dtype) == second.astype(dtype))


def _not_finite(arrays: Mapping[str, np.ndarray | jax.Array]) -> Iterator[str]:
    """Yield the names of arrays with a NaN or an infinity, in the order of `arrays`.

    Arrays that numpy cannot view are checked on their devices. These checks are all started before the first result is
    awaited, so they run at the same time, and while other arrays are checked on the host.
    """
    on_device = {
        name: _all_finite(leaf) for name, leaf in arrays.items() if isinstance(leaf, jax.Array) and not is_on_host(leaf)
    }
    for name, leaf in arrays.items():
        if not (on_device[name] if name in on_device else _all_finite_on_host(np.asarray(leaf))):
            yield name


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:
    # x × 0 is 0, or NaN for an infinity and a NaN.
    return jnp.isfinite(jnp.sum(array * 0))


def _all_finite_on_host(array: np.ndarray) -> bool:
    """Return whether an array in host memory has no NaN and no infinity; an empty array has none.

    A sum of squares that is finite has finite terms only, and BLAS computes it (`np.dot`) several times as fast as
    `isfinite` reads the array. A sum that is not finite may come from large finite values, so `isfinite` decides then.
    It also decides for other dtypes than float32, and for arrays that are not contiguous.
    """
    if array.dtype == np.float32 and array.flags.c_contiguous:
        flat = array.reshape(-1)
        with np.errstate(all="ignore"):  # The sum may overflow, which is no error.
            if np.isfinite(np.dot(flat, flat)):
                return True
    return bool(np.isfinite(array).all())
