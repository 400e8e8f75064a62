"""How the TPU kernels cut their work: tuned numbers where a shape has been tuned, a rule where it has not.

Tuned numbers are data, `tuned_tpu.json`: each entry names the chip and the shape that it is for, where the numbers come
from (`measured` on the chip, or `bundles` of the compiler's schedule) and when.
"""

from __future__ import annotations

import functools
import json
import math
from importlib import resources
from typing import Any, NamedTuple

import jax.numpy as jnp

from .tpu_decode_kernel import DecodeSizes
from .tpu_tiles import LANES, HeadLanes

CHIPS = ("v5e", "v6e", "v7x")
TILE_BYTES = 2 << 20
"""Of keys and values of all heads in one tile: enough to hide the latency of a copy; ten of them fit into VMEM."""
MOST_SCORE_ROWS = {"v5e": 8, "v6e": 16, "v7x": 32}
FULL_TOKENS = {"v5e": 256, "v6e": 256, "v7x": 512}
"""With these the schedule of a full tile is shortest, at 32/8 heads of 128 (docs/kernels.md)."""


QUERY_BYTES = 40 << 20
MOST_PREFILL_KEYS = 512
"""Of the scores that prefill computes together."""


class TpuSizes(NamedTuple):
    """Sizes of both kernels' tiles of keys, in tokens."""

    decode: DecodeSizes
    tile_kv: int
    """Keys that prefill fetches together."""
    sub_kv: int
    """Of these, computed together."""


class TpuShape(NamedTuple):
    """What sizes are tuned for."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    page_size: int


def sizes_of(chip: str, shape: TpuShape) -> TpuSizes:
    """The tuned sizes of this very shape, or what the rule gives."""
    tuned = _tuned().get((chip, shape))
    return tuned or ruled_sizes(chip, shape)


def ruled_sizes(chip: str, shape: TpuShape) -> TpuSizes:
    """Tiles of about `TILE_BYTES`, cut into pieces whose scores fit into registers."""
    page_size, itemsize = shape.page_size, jnp.dtype(shape.dtype).itemsize
    token_bytes = shape.num_kv_heads * HeadLanes(shape.head_size).num_rows * LANES * itemsize
    fitting = min(max(TILE_BYTES // token_bytes, LANES), 2048)
    tail = LANES if page_size % LANES == 0 else -(-LANES // page_size) * page_size
    full = tail * _power_of_two(min(FULL_TOKENS[chip], fitting) // tail)
    unit = math.lcm(page_size, full)
    tile = unit * _power_of_two(fitting // unit)
    decode = DecodeSizes(tile, full, tail, MOST_SCORE_ROWS[chip], write_height(chip, shape.dtype))
    pieces = [size for size in range(tail, tile + 1, tail) if tile % size == 0 and size <= MOST_PREFILL_KEYS]
    return TpuSizes(decode, tile, max(pieces, default=tail))


def _power_of_two(most: int) -> int:
    return 1 << max(most, 1).bit_length() - 1


def tile_q_of(num_heads: int, head_size: int) -> int:
    """Queries of a tile: as many as let the accumulators and the queries of all heads take `QUERY_BYTES`."""
    # Three accumulators in float32, two slots of queries, one of outputs, and queries by head, at most in float32.
    bytes_of_query = num_heads * (HeadLanes(head_size).width + LANES) * 4 * 4
    return max(min(1 << (QUERY_BYTES // bytes_of_query).bit_length() - 1, 256), 32)


def write_height(chip: str, dtype: Any) -> int:
    """Slots of a page that one write can address: rows of a tile of this chip's memory."""
    itemsize = jnp.dtype(dtype).itemsize
    if chip == "v7x" or itemsize == 1:
        return 32 // itemsize
    return 8


@functools.cache
def _tuned() -> dict[tuple[str, TpuShape], TpuSizes]:
    entries = json.loads(resources.files(__package__).joinpath("tuned_tpu.json").read_text())
    return {
        (entry["chip"], TpuShape(**entry["shape"])): TpuSizes(
            **{**entry["sizes"], "decode": DecodeSizes(**entry["sizes"]["decode"])}
        )
        for entry in entries
    }
