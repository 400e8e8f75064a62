"""How the TPU kernels cut their work: tuned numbers where a shape has been tuned, a rule where it has not.

Tuned numbers are data, `tuned_tpu.json` and, beside it, what a user has tuned: each entry names the chip and the shape
that it is for, where the numbers come from (`measured` on the chip, or `bundles` of the compiler's schedule) and when.
So are the numbers of a chip that the rule needs, `ruled_tpu.json`, tuned at a few shapes. An entry whose numbers the
kernels could not work with is refused when its table is read.
"""

from __future__ import annotations

import functools
import json
import math
from datetime import date
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from .tpu_decode import decode_vmem
from .tpu_decode_kernel import DecodeSizes
from .tpu_tiles import LANES, HeadLanes

CHIPS = ("v5e", "v6e", "v7x")
VMEM_BYTES = {"v5e": 128 << 20, "v6e": 128 << 20, "v7x": 64 << 20}
"""Of a core."""
TILE_BYTES = 2 << 20
"""Of keys and values of all heads in one tile: enough to hide the latency of a copy; ten of them fit into VMEM."""
MOST_SCORES = 16 << 10
"""Of one piece of a full tile: in float32 a quarter of the registers."""
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


class TunedEntry(NamedTuple):
    """Sizes for one shape on one chip."""

    chip: str
    shape: TpuShape
    sizes: TpuSizes


SOURCES = ("measured", "bundles")
ENTRY_KEYS = {"chip", "shape", "sizes", "source", "date", "jax", "figures"}


def sizes_of(chip: str, shape: TpuShape, tuned: tuple[TunedEntry, ...] = ()) -> TpuSizes:
    """Those of this very shape in `tuned`, or in our own table, or what the rule gives."""
    known = {entry[:2]: entry.sizes for entry in (*_shipped(), *tuned)}
    return known.get((chip, shape)) or ruled_sizes(chip, shape)


def read_tuned(table: Path | Traversable) -> tuple[TunedEntry, ...]:
    """The entries of a table. ValueError names the file and the entry that cannot be used."""
    try:
        entries = json.loads(table.read_text())
        if not isinstance(entries, list):
            raise ValueError(f"got {type(entries).__name__}, allowed: a list of entries")
    except (OSError, ValueError) as error:
        raise ValueError(f"{table}: {error}; delete it, and tune again") from error
    found = []
    for number, entry in enumerate(entries):
        try:
            found.append(_entry(entry))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{table}: entry {number}: {error}; delete the entry, and tune again") from error
    return tuple(found)


def _entry(entry: dict[str, Any]) -> TunedEntry:
    if not isinstance(entry, dict) or set(entry) != ENTRY_KEYS:
        raise ValueError(f"got {entry!r}, allowed: an object of {', '.join(sorted(ENTRY_KEYS))}")
    for name, allowed in (("chip", CHIPS), ("source", SOURCES)):
        if entry[name] not in allowed:
            raise ValueError(f"{name}: got {entry[name]!r}, allowed: {', '.join(allowed)}")
    date.fromisoformat(entry["date"])
    shape, sizes = TpuShape(**entry["shape"]), entry["sizes"]
    found = TunedEntry(entry["chip"], shape, TpuSizes(**{**sizes, "decode": DecodeSizes(**sizes["decode"])}))
    refuse_invalid(*found)
    return found


def refuse_invalid(chip: str, shape: TpuShape, sizes: TpuSizes) -> None:
    """ValueError for sizes that the kernels cannot work with."""
    for name in ("num_heads", "num_kv_heads", "head_size", "page_size"):
        number = getattr(shape, name)
        if type(number) is not int or number < 1:
            raise ValueError(f"{name}: got {number!r}, allowed: an integer ≥ 1")
    decode, page = sizes.decode, shape.page_size
    numbers = {**decode._asdict(), "tile_kv": sizes.tile_kv, "sub_kv": sizes.sub_kv}
    for name, number in numbers.items():
        if type(number) is not int or number < 1:
            raise ValueError(f"{name}: got {number!r}, allowed: an integer ≥ 1")
    height = write_height(chip, shape.dtype)
    for name, number, is_right, allowed in (
        ("full", decode.full, decode.full % LANES == 0, f"multiples of {LANES}"),
        ("tail", decode.tail, decode.tail % LANES == 0, f"multiples of {LANES}"),
        ("sub_kv", sizes.sub_kv, sizes.sub_kv % LANES == 0, f"multiples of {LANES}"),
        ("tile", decode.tile, decode.tile % page == 0, f"multiples of a page's {page} tokens"),
        ("tile_kv", sizes.tile_kv, sizes.tile_kv % page == 0, f"multiples of a page's {page} tokens"),
        ("full", decode.full, decode.tile % decode.full == 0, f"divisors of tile, {decode.tile}"),
        ("tail", decode.tail, decode.tile % decode.tail == 0, f"divisors of tile, {decode.tile}"),
        ("sub_kv", sizes.sub_kv, sizes.tile_kv % sizes.sub_kv == 0, f"divisors of tile_kv, {sizes.tile_kv}"),
        ("height", decode.height, decode.height == height, f"{height} on {chip} for {shape.dtype}"),
    ):
        if not is_right:
            raise ValueError(f"{name}: got {number}, allowed: {allowed}")
    for name, number in (("tile", decode.tile), ("tile_kv", sizes.tile_kv)):
        needed = decode_vmem(number * _token_bytes(shape))
        if needed > VMEM_BYTES[chip]:
            raise ValueError(
                f"{name}: got {number}, tiles that need {needed >> 20} MiB, allowed: those that fit into the "
                f"{VMEM_BYTES[chip] >> 20} MiB of a core of {chip}"
            )


def ruled_sizes(chip: str, shape: TpuShape, *, in_float32: bool = False) -> TpuSizes:
    """Tiles of about `TILE_BYTES`, cut into pieces whose scores fit into registers; `in_float32`: all products are."""
    page_size, itemsize = shape.page_size, jnp.dtype(shape.dtype).itemsize
    token_bytes = _token_bytes(shape)
    tail = LANES if page_size % LANES == 0 else -(-LANES // page_size) * page_size
    most_rows, full = (1, tail) if in_float32 or shape.dtype == "float32" else _rule(chip, itemsize)
    # Queries of one KV head may be more rows than that.
    full = min(full, MOST_SCORES // max(shape.num_heads // shape.num_kv_heads, most_rows))
    # Shorter pieces of one-byte numbers spill a register on v5e.
    least = full if itemsize == 1 and full * token_bytes <= 2 * TILE_BYTES else LANES
    fitting = min(max(TILE_BYTES // token_bytes, least), 2048)
    full = tail * _power_of_two(min(full, fitting) // tail)
    unit = math.lcm(page_size, full)
    tile = unit * _power_of_two(fitting // unit)
    decode = DecodeSizes(tile, full, tail, most_rows, write_height(chip, shape.dtype))
    pieces = [size for size in range(tail, tile + 1, tail) if tile % size == 0 and size <= MOST_PREFILL_KEYS]
    return TpuSizes(decode, tile, max(pieces, default=tail))


def _token_bytes(shape: TpuShape) -> int:
    """Of the keys and values of a token."""
    return shape.num_kv_heads * HeadLanes(shape.head_size).num_rows * LANES * jnp.dtype(shape.dtype).itemsize


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
def _rule(chip: str, itemsize: int) -> tuple[int, int]:
    """Rows of scores in one product and keys of one piece, by the bytes of a number in a page: of those that spill no
    register at the table's shapes, the ones whose schedule of a full tile is shortest, within one percent."""
    rule = json.loads(resources.files(__package__).joinpath("ruled_tpu.json").read_text())["chips"][chip]
    return rule["most_rows"], rule["full"][str(itemsize)]


@functools.cache
def _shipped() -> tuple[TunedEntry, ...]:
    return read_tuned(resources.files(__package__).joinpath("tuned_tpu.json"))
