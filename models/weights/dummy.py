"""Random weights in the memory of the device, for speed and correctness checks without a checkpoint.

Every number is an odd integer of eight bits times a power of two, so that bfloat16 holds it exactly: weights of both
dtypes, and on every platform, are the same numbers. Where an engine quantizes, these numbers are quantized. Nothing
passes through the memory of the host.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ...pallas_kernels.code_formats import CodeParts
from ...pallas_kernels.layer_ops import LayerOps
from ..config.shares import Run, true_size
from .code_arrays import HeldCodes, quantized_rows
from .weight_recipe import parts_of_expert
from .weights import Weights

SEED = 0
STANDARD_DEVIATION = 147.8
"""Standard deviation of odd integers that are drawn evenly from −255 to 255."""


@dataclass(frozen=True)
class ExpertLayout:
    """Where the numbers of each expert's matrix lie among the rows of Wᵀ [experts × rows of one, in]."""

    num_experts: int
    true_experts: int
    rows_of_expert: int
    num_in: int
    parts: tuple[tuple[int, tuple[Run, ...]], ...]
    """Rows of each part of a fused matrix, with padding, and its runs: see `recipe.make_recipes`."""
    columns: tuple[Run, ...]
    num_shards: int


def dummy_weights(abstract: Weights, *, progress: Callable[[int, int], None] | None = None) -> Weights:
    """Return `abstract` with random arrays in its dtypes and shardings, made one after the other on their devices.

    The values of a matrix W [in, out] have the mean 0 and a standard deviation of about 1 ÷ √in. Weights with a "fill"
    in their metadata are constant: gains of norms have the value that changes nothing; biases and sinks are 0. A
    weight's values depend on its path in the model and on its shape in a checkpoint, and not on how its backend stores
    it. `progress(done, total)`, if given, is called after each array with the numbers of arrays.
    """
    leaves = nnx.to_flat_state(abstract.state)
    made: dict[tuple[Any, ...], Any] = {}
    for path, leaf in leaves:
        metadata = leaf.get_metadata()
        # Waiting for each array keeps the temporary memory of only one array alive at a time.
        name = ".".join(map(str, (*path[:-1], metadata.get("tensor", path[-1]))))
        made[path] = leaf.replace(jax.block_until_ready(_array(leaf, name, metadata)))
        if progress is not None:
            progress(len(made), len(leaves))
    return replace(abstract, state=nnx.from_flat_state(made))


def _array(leaf: nnx.Variable[Any], name: str, metadata: dict[str, Any]) -> jax.Array:
    """Return the array of one weight on its devices: constant if its metadata has a "fill", else random.

    `leaf` is an nnx variable with the weight's shape, dtype and sharding and no values yet. `name` is the weight's
    dotted path, such as "layers.3.mlp.down_proj.weight". It seeds the random numbers: the seed is SEED, folded with
    the path's CRC-32, which is the same on every machine. The numbers of a matrix that is stored as codes are
    quantized.
    """
    if "fill" in metadata:
        make: Callable[[], jax.Array] = partial(jnp.full, leaf.shape, metadata["fill"], leaf.dtype)
        return jax.jit(make, out_shardings=leaf.sharding)()
    key = jax.random.fold_in(jax.random.key(SEED, impl="threefry2x32"), zlib.crc32(name.encode()))
    codes = (metadata["code_parts"], metadata["decoded_dtype"]) if "code_parts" in metadata else None
    is_scales = metadata.get("is_scales", False)
    if "num_experts" in metadata:
        held, ops = metadata.get("held"), metadata["ops"]
        storage = _Storage(leaf.shape, leaf.dtype, ops, codes=codes, held=held, is_scales=is_scales)
        return _maker_of_experts(_layout_of(metadata), storage, leaf.sharding)(key)
    rows = _drawn_rows(leaf, metadata)
    if "held" in metadata:
        return _maker_of_codes(rows, leaf.shape, metadata["held"], leaf.sharding, is_scales=is_scales)(key)
    if "matrix" in metadata:
        return _maker_of_matrix(rows, leaf.dtype, metadata["ops"], codes, leaf.sharding)(key)
    return _maker_of_table(rows, leaf.dtype, leaf.sharding)(key)


class _DrawnRows(NamedTuple):
    """The rows of random numbers that make a matrix or a table."""

    num_rows: int
    num_columns: int
    """Numbers in each row."""
    padding: int
    """Zeros behind the numbers of each row."""

    def draw(self, key: jax.Array) -> jax.Array:
        """Return the rows, float32 [num_rows, num_columns + padding]."""
        return _random_numbers(key, (self.num_rows, self.num_columns), self.padding)


def _drawn_rows(leaf: nnx.Variable[Any], metadata: dict[str, Any]) -> _DrawnRows:
    """Return the rows of a weight in the shape that a checkpoint has, whatever a backend makes of it.

    A matrix W [in, out] is drawn as Wᵀ [out, in], and a table as [V, D], which zeros pad.
    """
    if "matrix" in metadata:
        num_in, num_out = metadata["matrix"]
        return _DrawnRows(num_out, num_in, padding=0)
    num_rows, padded_columns = metadata.get("table", leaf.shape)
    num_columns = true_size(metadata["columns"])
    return _DrawnRows(num_rows, num_columns, padding=padded_columns - num_columns)


def _layout_of(metadata: dict[str, Any]) -> ExpertLayout:
    """Return the layout of experts that the metadata of their weight describe."""
    (num_in, _), runs = metadata["matrix"], dict(metadata["rows"])
    parts = metadata.get("parts", ((None, metadata["rows_of_expert"]),))
    names = "num_experts", "true_experts", "rows_of_expert", "num_shards"
    return ExpertLayout(
        num_in=num_in,
        parts=tuple((size, tuple(runs[name])) for name, size in parts),
        columns=tuple(metadata["columns"]),
        **{name: metadata[name] for name in names},
    )


@lru_cache(maxsize=64)
def _maker_of_table(rows: _DrawnRows, dtype: Any, sharding: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    """Return a jitted function from a random key to a table [V, D]; tables with equal arguments share one program."""
    return jax.jit(lambda key: rows.draw(key).astype(dtype), out_shardings=sharding)


@lru_cache(maxsize=64)
def _maker_of_matrix(
    rows: _DrawnRows,
    dtype: Any,
    ops: LayerOps,
    codes: tuple[CodeParts, str] | None,
    sharding: jax.sharding.Sharding,
) -> Callable[[jax.Array], jax.Array]:
    """Return a jitted function from a random key to a matrix W, as `ops` store it: floats of `dtype`, or codes.

    `codes` are the formats of its columns, and the dtype that these are decoded to; None for floats. Matrices with
    equal arguments share one program.
    """

    def make(key: jax.Array) -> jax.Array:
        if codes is None:
            return ops.store(rows.draw(key).astype(dtype).T)
        code_parts, decoded_dtype = codes
        return ops.store_codes(rows.draw(key).astype(jnp.bfloat16), code_parts, decoded_dtype)

    return jax.jit(make, out_shardings=sharding)


@lru_cache(maxsize=64)
def _maker_of_codes(
    rows: _DrawnRows,
    stored_shape: tuple[int, ...],
    held: HeldCodes,
    sharding: jax.sharding.Sharding,
    *,
    is_scales: bool,
) -> Callable[[jax.Array], jax.Array]:
    """Return a jitted function from a random key to the codes or the scales of a matrix that is kept as both."""

    def make(key: jax.Array) -> jax.Array:
        codes, scales = quantized_rows(rows.draw(key), held)
        return held.arrays.stored(scales if is_scales else codes, stored_shape)

    return jax.jit(make, out_shardings=sharding)


@dataclass(frozen=True)
class _Storage:
    """How the weight of all experts is stored. Codes have the formats of `codes` or of `held`, floats have neither."""

    shape: tuple[int, ...]
    dtype: Any
    ops: LayerOps
    codes: tuple[CodeParts, str] | None
    held: HeldCodes | None
    is_scales: bool

    def part(self, rows: jax.Array) -> jax.Array:
        """Return the part of the weight that the rows of one expert make, float32 [rows of one, in]."""
        if self.held is not None:
            held = self.held.of_expert
            codes, scales = quantized_rows(rows, held)
            return held.arrays.stored(scales if self.is_scales else codes, (1, *self.shape[1:]))
        if self.codes is not None:
            code_parts, decoded_dtype = self.codes
            return self.ops.store_codes(
                rows.astype(jnp.bfloat16), parts_of_expert(code_parts, len(rows)), decoded_dtype
            )
        matrix = rows.astype(self.dtype).T
        return matrix if self.ops.stores_experts_apart else self.ops.store(matrix)


@lru_cache(maxsize=64)
def _maker_of_experts(
    layout: ExpertLayout, storage: _Storage, sharding: jax.sharding.Sharding
) -> Callable[[jax.Array], jax.Array]:
    """Return a jitted function from a random key to the weight of all experts.

    Experts are drawn one after the other: beside the weight, memory holds the float32 numbers of one of them.
    """

    def make(key: jax.Array) -> jax.Array:
        def part(expert: jax.Array) -> jax.Array:
            return storage.part(_rows_of_expert(key, layout, expert))

        return jax.lax.map(part, jnp.arange(layout.num_experts, dtype=jnp.uint32)).reshape(storage.shape)

    return jax.jit(make, out_shardings=sharding)


def _rows_of_expert(key: jax.Array, layout: ExpertLayout, expert: jax.Array) -> jax.Array:
    """Return the random rows [rows of one, in] of an expert's matrix; all that is padding is zero.

    The numbers of each part are drawn on their own, in their shape in a checkpoint: neither the number of experts nor
    any padding changes them.
    """
    width, placed = true_size(layout.columns), list[jax.Array]()
    for index, (size, runs) in enumerate(layout.parts):
        part_key = jax.random.fold_in(jax.random.fold_in(key, expert), index)
        values = _random_numbers(part_key, (true_size(runs), width))
        part = _placed(_placed(values, layout.columns, layout.num_in, 1), runs, size, 0)
        # Each device's shard holds its share of every part.
        placed.append(part.reshape(layout.num_shards, size // layout.num_shards, layout.num_in))
    rows = jnp.concatenate(placed, axis=1).reshape(-1, layout.num_in)
    rows = jnp.pad(rows, ((0, layout.rows_of_expert - len(rows)), (0, 0)))
    return jnp.where(expert < layout.true_experts, rows, 0)


def _placed(values: jax.Array, runs: tuple[Run, ...], size: int, axis: int) -> jax.Array:
    """Return an array with `size` elements along an axis, the values where the runs put them, and zeros elsewhere."""
    out = jnp.zeros((*values.shape[:axis], size, *values.shape[axis + 1 :]), values.dtype)
    for stored, true, count in runs:
        block = jax.lax.slice_in_dim(values, true, true + count, axis=axis)
        out = jax.lax.dynamic_update_slice_in_dim(out, block, stored, axis)
    return out


def _random_numbers(key: jax.Array, shape: tuple[int, ...], padding: int = 0) -> jax.Array:
    """Return random numbers of the `shape` [out, in], float32, and behind each row `padding` zeros.

    A random byte b gives the odd integer 2 b − 255, from −255 to 255. Integers are multiplied by the power of two that
    is nearest, in its exponent, to 1 ÷ (STANDARD_DEVIATION × √in). So bfloat16 holds the values exactly, and their
    standard deviation is about 1 ÷ √in. Example: for 1024 inputs the factor is 2⁻¹², so values lie between ±0.0623 and
    have a standard deviation of 0.036, where 1 ÷ √1024 is 0.031.
    """
    exponent = -round(math.log2(STANDARD_DEVIATION * math.sqrt(shape[1])))
    odd = 2 * jax.random.bits(key, shape, jnp.uint8).astype(jnp.float32) - 255
    return jnp.pad(odd * 2.0**exponent, ((0, 0), (0, padding)))
