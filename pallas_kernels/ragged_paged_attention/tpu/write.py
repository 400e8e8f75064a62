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
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ..interface import LayerInputs
from .heads import heads_from_rows, rows_shape, tokens_to_rows
from .kernel_call import IN_HBM, CallOptions, call_kernel
from .lanes import LANES, HeadLanes, Ref, Scalar, divide, iota
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
    pages: Float[Array, "C K S Z L"], layer: LayerInputs, call: CallOptions, *, tile_q: int
) -> Float[Array, "C K S Z L"]:
    """Write the layer's new keys and values of prefill tokens into the pages, which are donated, and return the pages.

    `pages` are C pages of all layers, K KV heads, S rows of L = 128 lanes for a token's key and value, and Z slots.
    `layer.k` and `layer.v` must be given. For pages of one byte a number, they hold the quantized numbers, in two or
    four bytes each. The kernel has a grid step per tile, at most `tile_q` tokens of one row; `layer.step.plan` holds
    the tiles. The new tokens of decode rows are not written here.
    """
    k, v = layer.k, layer.v
    assert k is not None  # `TpuBackend.attend` calls this only in a layer with new keys and values.
    assert v is not None
    _, num_kv_heads, head_size = k.shape
    _, _, num_lane_rows, page_size, _ = pages.shape
    lanes, block = HeadLanes(head_size), math.gcd(page_size, MAX_BLOCK_TOKENS)
    # A block, the greatest common divisor, lies in one page. A tile's tokens begin at token `block` of the buffer, so
    # that its first and last block, which may reach beyond the tile's tokens on either side, lie within the buffer.
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
        pl.when(scalars.num_tiles > 0)(write)  # A plan without tiles has a grid step, too.

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
    """Write the keys and values of one tile of tokens into their pages, one aligned block of slots after another.

    A block has 32 slots, or those of a page if these are fewer: a DMA can address it. Copies are double-buffered twice:
    the next tile's tokens are fetched while this tile is written, and a block is computed while the one before it is
    copied to its page. `table_len` counts the entries of one row's page table. With blocks of 32 slots, a tile of
    positions 40 … 99 takes the blocks 1, 2 and 3: block 1 keeps its slots 0 … 7 and block 3 its slots 4 … 31 as the
    page has them, and block 2 is written whole.
    """
    tile = pl.program_id(0)
    first_page, num_tiles = scalars.first_page_and_count[0], scalars.num_tiles
    copies = PageCopies(pages, scalars.page_tables, table_len, first_page, tile=0)
    num_kv_heads, block, page_size = scratch.blocks.shape[1], scratch.blocks.shape[3], pages.shape[3]
    buffer = lax.rem(tile, 2)

    def kv_copies(tile: Scalar, buffer: Scalar) -> list[Ref]:
        """Return the copies of a tile's keys and values. To wait, build them again: the semaphore counts bytes."""
        source, target = pl.ds(scalars.first_tokens[tile], scalars.lens[tile]), pl.ds(block, scalars.lens[tile])
        return [
            pltpu.make_async_copy(tokens.at[source], tiles.at[buffer, target], scratch.kv_sems.at[buffer])
            for tokens, tiles in ((inputs.k, scratch.k_tiles), (inputs.v, scratch.v_tiles))
        ]

    def fetch(tile: Scalar, buffer: Scalar) -> None:
        for kv_copy in kv_copies(tile, buffer):
            kv_copy.start()

    pl.when(tile == 0)(lambda: fetch(0, 0))
    pl.when(tile + 1 < num_tiles)(lambda: fetch(tile + 1, 1 - buffer))
    for kv_copy in kv_copies(tile, buffer):
        kv_copy.wait()
    for first_lane in range(0, lanes.width, LANES):
        for kv_index, tokens in enumerate((scratch.k_tiles, scratch.v_tiles)):
            tokens_to_rows(tokens.at[buffer], first_lane, scratch.head_rows.at[kv_index, first_lane // LANES])
    first_position, end_position = scalars.first_positions[tile], scalars.end_position(tile)
    first_block, end_block = divide(first_position, block), divide(end_position + block - 1, block)

    def page_slots(block_index: Scalar) -> Ref:
        """Return the slots, in the pages, of the block that begins at position `block_index` × block."""
        table_index = divide(block_index * block, page_size)
        page = copies.page(scalars.rows[tile], table_index)
        offset = pl.multiple_of(block_index * block - table_index * page_size, block)
        return pages.at[page, :, :, pl.ds(offset, block)]

    def write_copy(block_index: Scalar, block_buffer: Scalar) -> Ref:
        return pltpu.make_async_copy(
            scratch.blocks.at[block_buffer], page_slots(block_index), scratch.write_sems.at[block_buffer]
        )

    @pl.loop(first_block, end_block)
    def _(block_index: Scalar) -> None:
        """Compute one block [K, S, block, 128] by KV head, and start its copy to the page.

        The block holds the `block` positions from `block_index` × `block` on. A partial block, at the first or last
        token of the tile, is read from its page first, so that its other slots are written back unchanged. A head's key
        and value take S rows of 128 lanes (`lane_row`).
        """
        block_buffer = lax.rem(block_index - first_block, 2)
        block_position = block_index * block

        # Before a buffer is filled again, the copy of the block that it held must have left it.
        pl.when(block_index - first_block >= 2)(lambda: write_copy(block_index - 2, block_buffer).wait())

        # Slots of a partial block that belong to other tokens keep what their page holds.
        @pl.when((block_position < first_position) | (block_position + block > end_position))
        def _() -> None:
            old_slots, target = page_slots(block_index), scratch.blocks.at[block_buffer]
            page_read = pltpu.make_async_copy(old_slots, target, scratch.read_sem)
            page_read.start()
            page_read.wait()

        slot_position = block_position + iota((block, LANES), 0)
        is_new = (slot_position >= first_position) & (slot_position < end_position)
        for first_lane in range(0, lanes.width, LANES):
            k_rows, v_rows = (scratch.head_rows.at[kv_index, first_lane // LANES] for kv_index in range(2))
            # In the buffer, the token of `first_position` lies at index `block`, after room for a partial block.
            first_token = block + block_position - first_position
            keys = heads_from_rows(k_rows, first_token, block, num_kv_heads, inputs.k.dtype)
            values = heads_from_rows(v_rows, first_token, block, num_kv_heads, inputs.v.dtype)
            for head, (key, value) in enumerate(zip(keys, values, strict=True)):
                for lane_row, new_row in lanes.row_pairs(key, value, first_lane):
                    old_rows = scratch.blocks[block_buffer, head, lane_row]
                    new_rows = jnp.where(is_new, new_row.astype(old_rows.dtype), old_rows)
                    scratch.blocks[block_buffer, head, lane_row] = new_rows
        write_copy(block_index, block_buffer).start()

    # The loop has waited for all copies but the last two. Waiting takes an equal copy: the semaphore counts bytes.
    pl.when(end_block - first_block >= 2)(
        lambda: write_copy(end_block - 2, lax.rem(end_block - 2 - first_block, 2)).wait()
    )
    write_copy(end_block - 1, lax.rem(end_block - 1 - first_block, 2)).wait()
