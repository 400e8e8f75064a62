"""Keys and values of prefill rows into their pages, on TPU.

    k, v [T, K, H]   ├─ row 0 ─────────┤├─ row 1 ┤        tiles of tokens, as prefill's queries are cut
                     [tile   ][tile   ]  [tile  ]
    a tile's span of its row, in blocks of tokens that the hardware can address:

      position   … │ · · k k │ k k k k │ k · · · │ …       block in VMEM [K, S, B, 128]
                    partial:  whole:     partial:
                    read first           read first         both: laid out by head, merged, copied to the page

The token is the leading axis of k and v, so that a block begins at any token of the tile: it is taken from there, with
what lies around it, and only the slots that the tile has are replaced. Pages that are written belong to their row.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from .tpu_heads import heads_of, rows_shape, take_tokens
from .tpu_prefill import QueryTiles
from .tpu_tiles import LANES, HeadLanes, divide, iota

MOST_TOKENS = 32
"""Of a block: enough for every dtype's hardware tile, few enough that reading a partial one costs little."""


def write_prefill(
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pages: Float[Array, "C K S Z L"],
    tables: Int[Array, "R P"],
    tiles: QueryTiles,
    first_page: Int[Array, ""],
    *,
    tile_q: int,
    interpret: Any = False,
    check_bounds: bool = False,
) -> Float[Array, "C K S Z L"]:
    """Put the keys and values of these tiles' tokens into the pages, which are given up.

    Numbers of pages of one byte come in two or four bytes, which hold them exactly.
    """
    _, num_kv_heads, head_size = k.shape
    _, _, num_lane_rows, page_size, _ = pages.shape
    lanes, block = HeadLanes(head_size), math.gcd(page_size, MOST_TOKENS)
    room = block + tile_q + block

    def kernel(
        tables: Any,
        rows: Any,
        tokens: Any,
        positions: Any,
        lens: Any,
        scalars: Any,
        k_hbm: Any,
        v_hbm: Any,
        _pages_in: Any,
        pages: Any,
        k_tiles: Any,
        v_tiles: Any,
        rows_of: Any,
        blocks: Any,
        came: Any,
        read: Any,
        went: Any,
    ) -> None:
        this, first_page, count = pl.program_id(0), scalars[0], scalars[1]
        slot = lax.rem(this, 2)

        def copies(index: Any, slot: Any) -> list[Any]:
            source, target = pl.ds(tokens[index], lens[index]), pl.ds(block, lens[index])
            return [
                pltpu.make_async_copy(k_hbm.at[source], k_tiles.at[slot, target], came.at[slot]),
                pltpu.make_async_copy(v_hbm.at[source], v_tiles.at[slot, target], came.at[slot]),
            ]

        def start(index: Any, slot: Any) -> None:
            for copy in copies(index, slot):
                copy.start()

        pl.when(this == 0)(lambda: start(0, 0))
        pl.when(this + 1 < count)(lambda: start(this + 1, 1 - slot))
        for copy in copies(this, slot):
            copy.wait()
        for lane in range(0, lanes.width, LANES):
            for index, some in enumerate((k_tiles, v_tiles)):
                take_tokens(some.at[slot], lane, rows_of.at[index, lane // LANES])
        position, end = positions[this], positions[this] + lens[this]
        first_block, past_block = divide(position, block), divide(end + block - 1, block)

        def in_page(number: Any) -> Any:
            """A block's place in the pages."""
            index = divide(number * block, page_size)
            page = first_page + tables[rows[this] * tables_len + index]
            offset = pl.multiple_of(number * block - index * page_size, block)
            return pages.at[page, :, :, pl.ds(offset, block)]

        def write(number: Any, at: Any) -> Any:
            return pltpu.make_async_copy(blocks.at[at], in_page(number), went.at[at])

        @pl.loop(first_block, past_block)
        def _(number: Any) -> None:
            at = lax.rem(number - first_block, 2)
            begin = number * block

            @pl.when(number - first_block >= 2)
            def _() -> None:
                write(number - 2, at).wait()

            @pl.when((begin < position) | (begin + block > end))
            def _() -> None:
                copy = pltpu.make_async_copy(in_page(number), blocks.at[at], read)
                copy.start()
                copy.wait()

            token = begin + iota((block, LANES), 0)
            is_new = (token >= position) & (token < end)
            for lane in range(0, lanes.width, LANES):
                its_rows = [rows_of.at[index, lane // LANES] for index in range(2)]
                first = block + begin - position
                keys, values = (heads_of(some, first, block, num_kv_heads, k.dtype) for some in its_rows)
                for head, (key, value) in enumerate(zip(keys, values, strict=True)):
                    for lane_row, new in lanes.row_pairs(key, value, lane):
                        old = blocks[at, head, lane_row]
                        blocks[at, head, lane_row] = jnp.where(is_new, new.astype(old.dtype), old)
            write(number, at).start()

        @pl.when(past_block - first_block >= 2)
        def _() -> None:
            write(past_block - 2, lax.rem(past_block - 2 - first_block, 2)).wait()

        write(past_block - 1, lax.rem(past_block - 1 - first_block, 2)).wait()

    tables_len = tables.shape[1]
    written: Array = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(tiles.num_tiles,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 3,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((2, room, num_kv_heads, head_size), k.dtype),
                pltpu.VMEM((2, room, num_kv_heads, head_size), v.dtype),
                pltpu.VMEM((2, lanes.num_tiles, *rows_shape(room, num_kv_heads, k.dtype)), jnp.int32),
                pltpu.VMEM((2, num_kv_heads, num_lane_rows, block, LANES), pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA(()),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={8: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=not check_bounds, vmem_limit_bytes=64 << 20
        ),
        interpret=interpret,
        name="ragged_paged_write",
    )(tables.reshape(-1), *tiles[:4], jnp.stack([first_page, tiles.num_tiles]), k, v, pages)
    return written
