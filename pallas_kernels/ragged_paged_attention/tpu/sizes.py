"""Tile sizes of the TPU kernels for a shape: from a table where the shape has been tuned, else by a rule.

The tables are JSON data: our own `tuned.json`, and the table that `jpaged tune` writes for a user. Each entry names the
chip and the shape that it is for, the source of its numbers (`measured` in time on the chip, or `bundles`, counted in
the compiler's schedule) and the date. The numbers that the rule needs for each chip are data too, `rules.json`, tuned
at a few shapes. An entry with sizes that the kernels cannot work with is refused when its table is read.
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
from jax.typing import DTypeLike

from .decode import decode_vmem_bytes
from .decode_refs import DecodeSizes
from .lanes import LANES, HeadLanes


class Chip(NamedTuple):
    """What the sizes of tiles on one chip follow from. Sizes of memory are in bytes."""

    vmem_bytes: int
    """VMEM of one core."""
    tile_bytes: int = 2 << 20
    """Keys and values of all heads in one KV tile by the rule: enough to hide the start of a copy."""
    flight_bytes: int = 8 << 20
    """Full tiles of decode by the rule, of which all but one are under way: their number is a power of two. What memory
    delivers in a few microseconds, so that it is never idle."""
    query_bytes: int = 40 << 20
    """VMEM for the queries and accumulators of one query tile of prefill."""
    spare_bytes: int = 16 << 20
    """VMEM beside decode's tiles."""
    min_tile_q: int = 32
    """Fewest queries of one query tile of prefill."""
    rule: str | None = None
    """Chip with a rule of its own whose rule this chip takes: the nearest one. None for a chip that has one."""


CHIPS = {
    "v4": Chip(
        16 << 20,
        tile_bytes=1 << 19,
        flight_bytes=2 << 20,
        query_bytes=4 << 20,
        spare_bytes=4 << 20,
        min_tile_q=16,
        rule="v5e",
    ),
    "v5e": Chip(128 << 20),
    "v5p": Chip(64 << 20, rule="v5e"),
    "v6e": Chip(128 << 20),
    "v7x": Chip(64 << 20, flight_bytes=16 << 20),
}
MAX_SCORES = 16 << 10
"""Scores of one decode product over a full tile, at most: in float32 they take a quarter of the registers."""
MAX_BUFFERS = 16
"""Full tiles of decode at most, by the rule: small tiles are few bytes, but each fetch ahead delays the first tile."""
MAX_PREFILL_KEYS = 512
"""Keys of one prefill product at most, by the rule."""


class TpuSizes(NamedTuple):
    """Sizes of the KV tiles of both kernels, in tokens."""

    decode: DecodeSizes
    tile_kv: int
    """Tokens of a KV tile of prefill, which is fetched as a whole."""
    sub_kv: int
    """Tokens of it that one product computes."""


class TpuShape(NamedTuple):
    """The shape that sizes are tuned for: heads on one chip, and the pages' dtype and tokens."""

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
    """Return the sizes of exactly this shape in `tuned`, else those in our own table, else those by the rule.

    `tuned` are entries of a user's table. Of several entries in it for the same chip and shape, the last one counts.
    """
    tuned_sizes = {(entry.chip, entry.shape): entry.sizes for entry in (*_shipped_entries(), *tuned)}
    return tuned_sizes.get((chip, shape)) or sizes_by_rule(chip, shape)


def read_tuned(table: Path | Traversable) -> tuple[TunedEntry, ...]:
    """Return the entries of a JSON table of tile sizes, in the order of the file.

    The file holds a list of objects, each with the keys `ENTRY_KEYS`. If the file cannot be read, or if any of its
    entries cannot be used, this raises ValueError, whose text names the file, the entry and the way out; then no entry
    is used.
    """
    try:
        entries = json.loads(table.read_text())
        if not isinstance(entries, list):
            raise ValueError(f"got {type(entries).__name__}, allowed: a list of entries")
    except (OSError, ValueError) as error:
        raise ValueError(f"{table}: {error}; delete it, and tune again") from error
    tuned_entries = []
    for index, entry in enumerate(entries):
        try:
            tuned_entries.append(_entry(entry))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{table}: entry {index}: {error}; delete the entry, and tune again") from error
    return tuple(tuned_entries)


def _entry(entry: dict[str, Any]) -> TunedEntry:
    """Check one JSON entry of a table of tile sizes, and return its chip, shape and sizes as a `TunedEntry`.

    The entry must have exactly the keys `ENTRY_KEYS`; its source, date, JAX version and figures are not returned. The
    source and the date are checked, too. Raises ValueError for a bad value or other keys, TypeError or KeyError for an
    unknown or a missing field of the shape or of the sizes.
    """
    if not isinstance(entry, dict) or set(entry) != ENTRY_KEYS:
        raise ValueError(f"got {entry!r}, allowed: an object of {', '.join(sorted(ENTRY_KEYS))}")
    for name, allowed in (("chip", CHIPS), ("source", SOURCES)):
        if entry[name] not in allowed:
            raise ValueError(f"{name}: got {entry[name]!r}, allowed: {', '.join(allowed)}")
    date.fromisoformat(entry["date"])  # Raises ValueError for anything but a date.
    shape, sizes = TpuShape(**entry["shape"]), entry["sizes"]
    tuned_entry = TunedEntry(entry["chip"], shape, TpuSizes(**{**sizes, "decode": DecodeSizes(**sizes["decode"])}))
    check_sizes(*tuned_entry)
    return tuned_entry


def check_sizes(chip: str, shape: TpuShape, sizes: TpuSizes) -> None:
    """Raise ValueError for sizes that the kernels cannot work with at this shape; the text names the first bad one.

    Every number of the shape and of the sizes is a positive integer. A KV tile (`tile` of decode, `tile_kv` of prefill,
    in tokens) is whole pages, and all buffers of it fit into the VMEM of one core. The tokens of one product (`full`
    and `tail` of decode, `sub_kv` of prefill) are a multiple of 128 lanes and divide their KV tile. `write_slots` is
    the number of slots of a page that one DMA can address on this chip. `buffers`, decode's number of full tiles in
    VMEM, is a power of two from 2 on: one is computed while at least one is fetched.
    """
    values = {**shape._asdict(), **sizes._asdict(), **sizes.decode._asdict()}
    del values["dtype"], values["decode"]

    def require(name: str, is_valid: bool, allowed: str, got_note: str = "") -> None:
        if not is_valid:
            raise ValueError(f"{name}: got {values[name]!r}{got_note}, allowed: {allowed}")

    for name, value in values.items():  # A bool, which JSON may hold, is an int for `isinstance`, but no size.
        require(name, type(value) is int and value >= 1, "an integer ≥ 1")
    for name in ("full", "tail", "sub_kv"):
        require(name, values[name] % LANES == 0, f"multiples of {LANES}")
    for name in ("tile", "tile_kv"):
        require(name, values[name] % shape.page_size == 0, f"multiples of a page's {shape.page_size} tokens")
    for name, tile_name in (("full", "tile"), ("tail", "tile"), ("sub_kv", "tile_kv")):
        require(name, values[tile_name] % values[name] == 0, f"divisors of {tile_name}, {values[tile_name]}")
    write_slots = write_slots_of(chip, shape.dtype)
    require("write_slots", sizes.decode.write_slots == write_slots, f"{write_slots} on {chip} for {shape.dtype}")
    require("buffers", values["buffers"] >= 2 and not values["buffers"] & (values["buffers"] - 1), "powers of two")
    # Prefill has two buffers of KV tiles. Decode's formula, which also counts tails, bounds both kernels.
    for name, buffers in (("tile", sizes.decode.buffers), ("tile_kv", 2)):
        tile_bytes, vmem_bytes = values[name] * _token_bytes(shape), CHIPS[chip].vmem_bytes
        needed_bytes = decode_vmem_bytes(tile_bytes, buffers, spare_bytes=CHIPS[chip].spare_bytes)
        allowed = f"those that fit into the {vmem_bytes >> 20} MiB of a core of {chip}"
        require(name, needed_bytes <= vmem_bytes, allowed, f", tiles that need {needed_bytes >> 20} MiB")


def sizes_by_rule(chip: str, shape: TpuShape, *, in_float32: bool = False) -> TpuSizes:
    """Return sizes by a rule: KV tiles of about the chip's `tile_bytes`, and products whose scores fit into registers.

    `tile` counts the tokens of a KV tile, the same for decode and prefill. It is a power of two times the smallest tile
    of whole products and whole pages: as many as `tile_bytes` hold, at least one, and no more than 2,048 tokens unless
    a page is larger. `full` and `tail` count the tokens of one product of decode over a full tile and over a row's last
    tile, and `max_rows` is the largest number of rows of scores in one product. `sub_kv` counts the tokens of one
    product of prefill: the largest divisor of `tile` that is a multiple of `tail` and at most `MAX_PREFILL_KEYS` = 512,
    or `tail` if there is none. `in_float32` says that products are computed in float32 although the pages hold narrower
    numbers.

    Example: 8 KV heads of 128 in bfloat16 take 4 KiB a token, so 2 MiB hold a tile of 512 tokens.
    """
    page_size, itemsize = shape.page_size, jnp.dtype(shape.dtype).itemsize
    token_bytes, tile_bytes = _token_bytes(shape), CHIPS[chip].tile_bytes
    # A product has at least 128 tokens; pages of fewer tokens are taken whole.
    tail = LANES if page_size % LANES == 0 else -(-LANES // page_size) * page_size
    max_rows, full = (1, tail) if in_float32 or shape.dtype == "float32" else _chip_rule(chip, itemsize)
    # A product has at least the query heads of one KV head as rows, which may be more than `max_rows`.
    full = min(full, MAX_SCORES // max(shape.num_heads // shape.num_kv_heads, max_rows))
    # A tile of one-byte numbers has at least `full` tokens if that takes no more than twice `tile_bytes`: shorter
    # products of such numbers spill a register on v5e.
    min_tile = full if itemsize == 1 and full * token_bytes <= 2 * tile_bytes else LANES
    max_tile = min(max(tile_bytes // token_bytes, min_tile), 2048)
    full = tail * _power_of_two_up_to(min(full, max_tile) // tail)  # At least `tail`.
    tile_unit = math.lcm(page_size, full)
    tile = tile_unit * _power_of_two_up_to(max_tile // tile_unit)
    buffers = buffers_of(chip, tile * token_bytes)
    decode = DecodeSizes(tile, full, tail, max_rows, write_slots_of(chip, shape.dtype), buffers)
    sub_kv_sizes = [size for size in range(tail, tile + 1, tail) if tile % size == 0 and size <= MAX_PREFILL_KEYS]
    return TpuSizes(decode, tile, max(sub_kv_sizes, default=tail))


def buffers_of(chip: str, tile_bytes: int) -> int:
    """Return decode's number of full tiles in VMEM: the largest power of two that `flight_bytes` hold, 2 to 16."""
    return min(max(_power_of_two_up_to(CHIPS[chip].flight_bytes // tile_bytes), 2), MAX_BUFFERS)


def _token_bytes(shape: TpuShape) -> int:
    """Return the bytes of one token's keys and values in a page, padding lanes included."""
    return shape.num_kv_heads * HeadLanes(shape.head_size).num_rows * LANES * jnp.dtype(shape.dtype).itemsize


def _power_of_two_up_to(limit: int) -> int:
    """Return the largest power of two that is at most `limit`, or 1."""
    return 1 << max(limit, 1).bit_length() - 1


def tile_q_of(chip: str, num_heads: int, head_size: int) -> int:
    """Return prefill's queries per tile: the largest power of two whose queries and accumulators `query_bytes` hold.

    The result is at most 256, and at least the chip's `min_tile_q` even if that takes more.
    """
    # Three accumulators in float32, two buffers of queries, one of outputs, and queries by head, at most in float32.
    bytes_per_query = num_heads * (HeadLanes(head_size).width + LANES) * 4 * 4
    fitting = _power_of_two_up_to(CHIPS[chip].query_bytes // bytes_per_query)
    return max(min(fitting, 256), CHIPS[chip].min_tile_q)


def write_slots_of(chip: str, dtype: DTypeLike) -> int:
    """Return the consecutive slots of a page that one DMA can address: the rows of one tile of the chip's memory.

    That is 32 slots in pages of one-byte numbers; on v7x 16 for two bytes and 8 for four, on all other chips 8 for
    both.
    """
    itemsize = jnp.dtype(dtype).itemsize
    if chip == "v7x" or itemsize == 1:
        return 32 // itemsize
    return 8


@functools.cache
def _chip_rule(chip: str, itemsize: int) -> tuple[int, int]:
    """Return decode's `max_rows` (rows of scores) and `full` (tokens), both of one product, from `rules.json`.

    `itemsize` is the bytes of a number in the pages, 1 or 2; a chip without an entry takes that of the nearest chip.

    The values were chosen from those that spill no register at the shapes named in the file: their compiled schedule
    of a full tile is the shortest, or within one percent of it.
    """
    rules = json.loads(resources.files(__package__).joinpath("rules.json").read_text())["chips"]
    rule = rules[CHIPS[chip].rule or chip]
    return rule["max_rows"], rule["full"][str(itemsize)]


@functools.cache
def _shipped_entries() -> tuple[TunedEntry, ...]:
    return read_tuned(resources.files(__package__).joinpath("tuned.json"))
