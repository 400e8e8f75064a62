"""Writes the keys and values of prefill rows into their pages.

    k, v [T, K, H]   ├─ row 0 ─────────┤├─ row 1 ┤        one grid step per tile of tokens, as prefill's query tiles
                     [tile   ][tile   ]  [tile  ]
    the positions of a tile, in blocks of tokens that the hardware can address:

      position   … │ · · k k │ k k k k │ k · · · │ …       block in VMEM [K, S, block, 128]
                    partial:  whole:     partial:
                    read first           read first         both: transposed by head, merged, copied to the page

Both the tokens of a tile (HBM → VMEM) and the blocks (VMEM → page) are double-buffered: tile n + 1 is fetched while
tile n is written, and a block is computed while the one before it is on its way to its page. A partial block is read
from its page first, and only the slots of this tile's tokens are replaced. The pages that are written must belong to
this row alone.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ..interface import LayerInputs
from .heads import heads_from_rows, rows_shape, tokens_to_rows
from .kernel_call import IN_HBM, CallOptions, call_kernel
from .lanes import LANES, HeadLanes, Ref, divide, iota
from .pages import PageCopies
from .query_tiles import QueryTiles

MAX_BLOCK_TOKENS = 32
"""Tokens of a block at most: every dtype's hardware tile fits, and reading a partial block costs little."""
VMEM_LIMIT_BYTES = 64 << 20


class WriteInputs(NamedTuple):
    """Arrays that the kernel reads, all in HBM."""

    k: Ref
    """[T, K, H] new keys, two or four bytes a number."""
    v: Ref
    """[T, K, H] new values, of the same dtype."""
    pages: Ref
    """[C, K, S, Z, 128] the pages, whose memory the output takes."""


class WriteScratch(NamedTuple):
    """Scratch memory; room = block + tile_q + block tokens. A leading 2 counts the two buffers."""

    k_tiles: Ref
    """[2, room, K, H] in VMEM, of k's dtype: a tile's keys, from token `block` on."""
    v_tiles: Ref
    """[2, room, K, H] in VMEM, of v's dtype: a tile's values, from token `block` on."""
    head_rows: Ref
    """int32 [2, H // 128 rounded up, *rows_shape] in VMEM: keys and values on their way to [head, token] order."""
    blocks: Ref
    """[2, K, S, block, 128] in VMEM, of the pages' dtype: blocks to be written."""
    kv_sems: Ref
    """DMA semaphores [2]: the copies of a tile's keys and values."""
    read_sem: Ref
    """DMA semaphore: the copy of a partial block from its page."""
    write_sems: Ref
    """DMA semaphores [2]: the copy of each of the two blocks to its page."""


def write_prefill(
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pages: Float[Array, "C K S Z L"],
    layer: LayerInputs,
    call: CallOptions,
    *,
    tile_q: int,
) -> Float[Array, "C K S Z L"]:
    """Write the keys and values of the prefill tokens into the pages, which are donated, and return the pages.

    For pages of one byte a number, `k` and `v` hold such numbers exactly, in two or four bytes each. `tile_q` is the
    largest number of tokens of a tile; L is 128.
    """
    _, num_kv_heads, head_size = k.shape
    _, _, num_lane_rows, page_size, _ = pages.shape
    lanes, block = HeadLanes(head_size), math.gcd(page_size, MAX_BLOCK_TOKENS)
    room = block + tile_q + block
    scratch = WriteScratch(
        k_tiles=pltpu.VMEM((2, room, num_kv_heads, head_size), k.dtype),
        v_tiles=pltpu.VMEM((2, room, num_kv_heads, head_size), v.dtype),
        head_rows=pltpu.VMEM((2, lanes.num_tiles, *rows_shape(room, num_kv_heads, k.dtype)), jnp.int32),
        blocks=pltpu.VMEM((2, num_kv_heads, num_lane_rows, block, LANES), pages.dtype),
        kv_sems=pltpu.SemaphoreType.DMA((2,)),
        read_sem=pltpu.SemaphoreType.DMA(()),
        write_sems=pltpu.SemaphoreType.DMA((2,)),
    )

    def kernel(scalars: QueryTiles, inputs: WriteInputs, pages: Ref, scratch: WriteScratch) -> None:
        write = partial(_write_tile, scalars, inputs, pages, scratch, lanes, layer.tables.shape[1])
        pl.when(scalars.num_tiles > 0)(write)

    (written,) = call_kernel(
        kernel,
        QueryTiles.of(layer),
        WriteInputs(k, v, pages),
        WriteInputs(IN_HBM, IN_HBM, IN_HBM),
        scratch,
        outputs=("pages",),
        num_steps=layer.step.plan[0],
        vmem_bytes=VMEM_LIMIT_BYTES,
        name="ragged_paged_write",
        call=call,
    )
    return written


def _write_tile(
    scalars: QueryTiles, inputs: WriteInputs, pages: Ref, scratch: WriteScratch, lanes: HeadLanes, table_len: int
) -> None:
    """Write one tile of tokens: wait for them, start fetching the next tile, and write block after block."""
    tile = pl.program_id(0)
    first_page, num_tiles = scalars.first_page_and_count[0], scalars.num_tiles
    copies = PageCopies(pages, scalars.page_tables, table_len, first_page, tile=0)
    num_kv_heads, block, page_size = scratch.blocks.shape[1], scratch.blocks.shape[3], pages.shape[3]
    buffer = lax.rem(tile, 2)

    def kv_copies(tile: Any, buffer: Any) -> list[Any]:
        source, target = pl.ds(scalars.first_tokens[tile], scalars.lens[tile]), pl.ds(block, scalars.lens[tile])
        return [
            pltpu.make_async_copy(tokens.at[source], tiles.at[buffer, target], scratch.kv_sems.at[buffer])
            for tokens, tiles in ((inputs.k, scratch.k_tiles), (inputs.v, scratch.v_tiles))
        ]

    def fetch(tile: Any, buffer: Any) -> None:
        for copy in kv_copies(tile, buffer):
            copy.start()

    pl.when(tile == 0)(lambda: fetch(0, 0))
    pl.when(tile + 1 < num_tiles)(lambda: fetch(tile + 1, 1 - buffer))
    for kv_copy in kv_copies(tile, buffer):
        kv_copy.wait()
    for lane in range(0, lanes.width, LANES):
        for index, tokens in enumerate((scratch.k_tiles, scratch.v_tiles)):
            tokens_to_rows(tokens.at[buffer], lane, scratch.head_rows.at[index, lane // LANES])
    position, end = scalars.first_positions[tile], scalars.end_position(tile)
    first_block, end_block = divide(position, block), divide(end + block - 1, block)

    def slots_of(number: Any) -> Ref:
        """Return the slots, in the pages, of the block that begins at position `number` × block."""
        index = divide(number * block, page_size)
        page = copies.page(scalars.rows[tile], index)
        offset = pl.multiple_of(number * block - index * page_size, block)
        return pages.at[page, :, :, pl.ds(offset, block)]

    def write_copy(number: Any, at: Any) -> Any:
        return pltpu.make_async_copy(scratch.blocks.at[at], slots_of(number), scratch.write_sems.at[at])

    @pl.loop(first_block, end_block)
    def _(number: Any) -> None:
        at = lax.rem(number - first_block, 2)
        begin = number * block

        pl.when(number - first_block >= 2)(lambda: write_copy(number - 2, at).wait())

        @pl.when((begin < position) | (begin + block > end))
        def _() -> None:
            copy = pltpu.make_async_copy(slots_of(number), scratch.blocks.at[at], scratch.read_sem)
            copy.start()
            copy.wait()

        token = begin + iota((block, LANES), 0)
        is_new = (token >= position) & (token < end)
        for lane in range(0, lanes.width, LANES):
            k_rows, v_rows = (scratch.head_rows.at[index, lane // LANES] for index in range(2))
            first = block + begin - position
            keys = heads_from_rows(k_rows, first, block, num_kv_heads, inputs.k.dtype)
            values = heads_from_rows(v_rows, first, block, num_kv_heads, inputs.k.dtype)
            for head, (key, value) in enumerate(zip(keys, values, strict=True)):
                for lane_row, new in lanes.row_pairs(key, value, lane):
                    old = scratch.blocks[at, head, lane_row]
                    scratch.blocks[at, head, lane_row] = jnp.where(is_new, new.astype(old.dtype), old)
        write_copy(number, at).start()

    pl.when(end_block - first_block >= 2)(
        lambda: write_copy(end_block - 2, lax.rem(end_block - 2 - first_block, 2)).wait()
    )
    write_copy(end_block - 1, lax.rem(end_block - 1 - first_block, 2)).wait()
