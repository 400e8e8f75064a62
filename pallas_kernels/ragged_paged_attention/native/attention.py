"""Attention over pages in native code: which tokens form a tile, and which pages each tile goes through.

    unit = (tile, KV head)     a tile: tokens of rows that begin with the same pages, or of one row
      page by page ──▶ scores [queries, Z] ──▶ weights ──▶ sums [queries, H]       queries, query_tiles

    shared tiles     decode rows that begin with the same pages: all rows attend to these together, then each row to
                     its other pages alone
    decode rows      those that are in no shared tile, each as a tile of one token
    query tiles      consecutive tokens of one prefill row

A page's keys and values are read from memory once per tile and KV head; further queries of the tile find them in the
processor's caches. A token's sums are added page by page in the same order in every tile. So its bits depend neither on
the tile, nor on other rows, nor on the number of threads, nor on how a prompt was cut into chunks. This holds only for
finite values: a later token's value has weight 0 for the earlier tokens of its tile, and NaN × 0 is NaN.
"""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ffi import ffi_call
from jaxtyping import Array, Float, Int
from llvmlite import ir

from ...native.llvm import F32, I64, LOG2_E, Code, constant
from ...native.processor import has_amx_unit, host_has, host_has_avx512
from ...native.registry import register
from ...native.xla_call import Buffer, Call, Work, handler
from ..kv_scales import LayerScales
from ..tile_plan import PlanSections
from .byte_pages import READ_FACTORS
from .pages import NativePages, stacked
from .queries import PageBlock
from .query_tiles import TiledQueries
from .query_vectors import VectorQueries
from .shape import Shape
from .whole_blocks import WholeBlockQueries

MAX_SERIAL_ELEMENTS = 1 << 17
"""Largest number of elements of keys that one thread attends to alone: waking a second would take longer."""


def attend_tiles(
    pages: NativePages,
    q: Float[Array, "T K G H"],
    tables: Int[Array, "R P"],
    positions: Int[Array, " T"],
    plan: PlanSections,
    num_decode_rows: Int[Array, ""],
    *,
    max_tokens: int,
    sinks: Float[Array, "K G"] | None,
    scales: LayerScales | None = None,
) -> Float[Array, "T K G H"]:
    """Return the attention of a step's tokens to the pages of their rows, in float32; zeros for padding tokens.

    There are R rows (sequences), and P entries in each page table. `plan` cuts the tokens into tiles of at most
    `max_tokens` tokens that go through pages together. A query tile is consecutive tokens of one prefill row. A shared
    tile is decode rows, of one token each, that begin with the same pages: they attend to these pages together, then
    each row attends to its other pages alone. A decode row in no shared tile is a tile of its own. Token r belongs to
    row r for r < `num_decode_rows`.

    Each token attends to the keys of its row up to its own position, within the window if there is one. `pages` has
    the keys and values of all layers, and `tables` holds page numbers within this layer. Entries up to the page of a
    row's last token must be valid, because native code does not check them; later entries are not read. `sinks` are
    the logits of one attention sink per query head, or None. `scales` are those of the keys and of the values, for
    pages of one byte a number. Raises ValueError if the arrays of `pages` do not fit the
    heads of `q`.
    """
    _, num_kv_heads, group_size, head_size = q.shape
    pages.check(num_kv_heads, head_size)
    # A handler is compiled for each shape. The processor's features are part of it, since they decide the code.
    shape = Shape(
        is_bf16_packed=pages.is_bf16_packed,
        byte_dtype=pages.byte_dtype,
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        head_size=head_size,
        page_size=pages.page_size,
        scale=float(pages.options.scale) * LOG2_E,  # Scores are in units of ln 2, so that weights are powers of two.
        window=pages.options.window,
        soft_cap=pages.options.soft_cap and pages.options.soft_cap * LOG2_E,
        has_sinks=sinks is not None,
        max_tokens=max_tokens,
        has_avx512=host_has_avx512(),
        has_avx512_bf16=host_has("avx512bf16"),
        has_amx=has_amx_unit(),
    )
    sinks = None if sinks is None else sinks * LOG2_E
    arrays = [q.astype(jnp.float32), pages.keys, pages.values, tables, positions, pages.place]
    # Tiles are numbered in the order of these counts: shared tiles, decode rows, query tiles. All decode rows count
    # here, but the own tile of a row in a shared tile is empty: `num_shared_pages` [R] is above 0 for such a row.
    counts = jnp.stack([plan.num_shared_tiles[0], num_decode_rows, plan.num_query_tiles[0]])
    # `query_tiles` [3, tiles]: row, first token, number of tokens. `shared_tiles` [3, tiles]: index of the first row in
    # `members`, number of rows, number of common pages. `members` [R]: the rows of all shared tiles, tile by tile.
    tiles = [counts, plan.query_tiles, plan.shared_tiles, plan.members, plan.num_shared_pages]
    no_sinks = jnp.zeros((0,), jnp.float32)
    read_scales = stacked(scales) * READ_FACTORS.get(pages.byte_dtype or "", 1.0)
    out = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    return ffi_call(_attend_handler(shape), out)(*arrays, *tiles, no_sinks if sinks is None else sinks, read_scales)


class TileArguments(NamedTuple):
    """Values that `prepare` hands to `body`: addresses of the arguments' and the result's data, then int64 numbers."""

    queries: ir.Value
    """float32 [T, K, G, H] queries."""
    keys: ir.Value
    values: ir.Value
    """Keys and values of all layers, see `pages`."""
    tables: ir.Value
    """int32 [R, P] page tables."""
    positions: ir.Value
    """int32 [T] position of each token."""
    query_tiles: ir.Value
    shared_tiles: ir.Value
    members: ir.Value
    num_shared_pages: ir.Value
    """The fields of `PlanSections`, int32."""
    sinks: ir.Value
    """float32 [K, G], or of no elements."""
    scales: ir.Value
    """float32 [2, K], or of no elements: factors of a head's queries and of its outputs."""
    out: ir.Value
    """float32 [T, K, G, H] outputs."""
    table_len: ir.Value
    """P: entries of one row's page table."""
    max_query_tiles: ir.Value
    max_shared_tiles: ir.Value
    """Tiles that `query_tiles` and `shared_tiles` have room for: the distance from one field to the next."""
    num_shared_tiles: ir.Value
    num_decode_rows: ir.Value
    num_query_tiles: ir.Value
    first_page: ir.Value
    """Index of the layer's page 0 among the pages of all layers."""
    page_step: ir.Value
    """From there to the layer's page 1."""
    num_threads: ir.Value
    """Threads that share the units."""


@cache
def _attend_handler(shape: Shape) -> str:
    """Compile the custom call that computes attention for one shape, and return the name by which XLA calls it.

    `prepare` counts the tiles and decides whether several threads share them. `body` computes one unit of work, a tile
    and KV head: unit u is tile u // K and KV head u % K. Shared tiles come first, then decode rows, then query tiles:
    with 2 shared tiles and 5 decode rows, tile 4 is decode row 2 and tile 7 is query tile 0. A decode row that belongs
    to a shared tile has a number too, but its own tile is empty.
    """
    num_kv_heads, group_size = shape.num_kv_heads, shape.group_size

    def prepare(code: Code, call: Call) -> Work:
        """Emit code that reads the counts of tiles and clears the outputs of padding tokens; return the work.

        There is one unit per tile and KV head. The work is worth several threads if its tokens attend to more than
        `MAX_SERIAL_ELEMENTS` elements of keys, or if there is any query tile.
        """
        build, args, out = code.build, call.arguments, call.results[0]
        q, keys, values, tables, positions, place, counts, query_tiles, shared_tiles, *others = args
        members, num_shared_pages, sinks, scales = others
        num_shared_tiles, num_decode_rows, num_query_tiles = (code.load_index(counts.data, i) for i in range(3))
        token_size = num_kv_heads * group_size * shape.head_size
        _clear_padding(code, q, out, token_size, query_tiles, num_decode_rows, num_query_tiles)
        num_tiles = build.add(build.add(num_shared_tiles, num_decode_rows), num_query_tiles)

        # A decode row attends to about as many keys as its position. A query tile counts as so many keys that one is
        # enough for several threads.
        def add_position(row: ir.Value, num_keys: ir.Value) -> list[ir.Value]:
            return [build.add(num_keys, code.load_index(positions.data, row))]

        keys_of_query_tiles = build.mul(num_query_tiles, I64(MAX_SERIAL_ELEMENTS))
        (num_keys,) = code.loop(0, num_decode_rows, add_position, carried=[keys_of_query_tiles])
        is_large = build.icmp_signed(">", num_keys, I64(MAX_SERIAL_ELEMENTS // (num_kv_heads * shape.head_size)))
        arguments = TileArguments(
            queries=q.data,
            keys=keys.data,
            values=values.data,
            tables=tables.data,
            positions=positions.data,
            query_tiles=query_tiles.data,
            shared_tiles=shared_tiles.data,
            members=members.data,
            num_shared_pages=num_shared_pages.data,
            sinks=sinks.data,
            scales=scales.data,
            table_len=tables.size(1),
            max_query_tiles=query_tiles.size(1),
            max_shared_tiles=shared_tiles.size(1),
            num_shared_tiles=num_shared_tiles,
            num_decode_rows=num_decode_rows,
            num_query_tiles=num_query_tiles,
            out=out.data,
            first_page=code.load_index(place.data, 0),
            page_step=code.load_index(place.data, 1),
            num_threads=call.num_threads,
        )
        return Work(list(arguments), num_units=[build.mul(num_tiles, I64(num_kv_heads))], is_large=is_large)

    def body(code: Code, arguments: list[ir.Value], unit: ir.Value) -> None:
        """Emit the attention of one tile and KV head: its joint pages, then in a shared tile each row's other pages."""
        given = TileArguments(*arguments)
        build, add, sub, mul = code.build, code.build.add, code.build.sub, code.build.mul
        # All query tiles of a KV head follow each other: its keys and values may be in the level-2 cache by then.
        first_query_tile = add(given.num_shared_tiles, given.num_decode_rows)
        query_unit = sub(unit, mul(first_query_tile, I64(num_kv_heads)))
        is_query_tile = build.icmp_signed(">=", query_unit, I64(0))
        num_query_tiles = code.max(given.num_query_tiles, I64(1))
        query_tile = build.srem(query_unit, num_query_tiles)
        tile = build.select(is_query_tile, add(first_query_tile, query_tile), build.sdiv(unit, I64(num_kv_heads)))
        head_of_query_tile = build.sdiv(query_unit, num_query_tiles)
        head = build.select(is_query_tile, head_of_query_tile, build.srem(unit, I64(num_kv_heads)))
        tiled_class = WholeBlockQueries if WholeBlockQueries.takes(shape) else TiledQueries
        queries_class = tiled_class if TiledQueries.takes(shape) else VectorQueries
        queries = queries_class(code, shape, keys=given.keys, values=given.values)

        # Find the type of the tile, its tokens and their rows, and the pages that they attend to together.
        is_shared = build.icmp_signed("<", tile, given.num_shared_tiles)
        decode_row = sub(tile, given.num_shared_tiles)
        is_decode = build.and_(build.not_(is_shared), build.icmp_signed("<", decode_row, given.num_decode_rows))

        def tile_field(array: ir.Value, max_tiles: ir.Value, field: int, index: ir.Value) -> ir.Value:
            return code.load_index(array, add(mul(I64(field), max_tiles), index))

        # To avoid branches, a tile reads the fields of all three types: those of the other two types at index 0.
        query_tile_index = build.select(is_query_tile, query_tile, I64(0))
        shared_index = build.select(is_shared, tile, I64(0))
        decode_index = build.select(is_decode, decode_row, I64(0))
        row, first_token, num_queries = (
            tile_field(given.query_tiles, given.max_query_tiles, field, query_tile_index) for field in range(3)
        )
        first_member, num_members, num_common_pages = (
            tile_field(given.shared_tiles, given.max_shared_tiles, field, shared_index) for field in range(3)
        )
        # A decode row that is a member of a shared tile is computed there: its own tile has no token.
        is_alone = build.icmp_signed("==", code.load_index(given.num_shared_pages, decode_index), I64(0))
        num_decode_tokens = build.select(is_alone, I64(1), I64(0))
        num_tokens = build.select(is_shared, num_members, build.select(is_decode, num_decode_tokens, num_queries))
        # With two threads the other one takes the next unit, and this one the unit after that.
        tile_ahead = build.sdiv(add(unit, given.num_threads), I64(num_kv_heads))
        last_decode_row = sub(given.num_decode_rows, I64(1))
        row_ahead = code.max(code.min(sub(tile_ahead, given.num_shared_tiles), last_decode_row), I64(0))
        pages_per_block = queries.pages_per_block

        def start_token(i: ir.Value) -> None:
            member_index = build.select(is_shared, add(first_member, i), I64(0))
            member = code.load_index(given.members, member_index)
            token = build.select(is_shared, member, build.select(is_decode, decode_row, add(first_token, i)))
            row_of_token = build.select(is_shared, member, build.select(is_decode, decode_row, row))
            queries.set_token(i, token, row_of_token, given.positions)
            queries.prefetch(i, head, given.queries, given.out)
            queries.start(i, head, given.queries, given.sinks, given.scales)

        code.loop(0, num_tokens, start_token)

        def page_of(row: ir.Value, table_index: ir.Value) -> ir.Value:
            """Return a page of a row's table as an index among the pages of all layers and KV heads."""
            page = code.load_index(given.tables, add(mul(row, given.table_len), table_index))
            entry = add(given.first_page, mul(page, given.page_step))
            return add(mul(entry, I64(num_kv_heads)), head)

        def attend_pages(begin_token: ir.Value, end_token: ir.Value, begin: ir.Value, end: ir.Value) -> None:
            """Emit the attention of the tile's tokens `begin_token` … `end_token` − 1 to some pages, in their order.

            These are entries `begin` … `end` − 1 of the page table of the first token's row, which the other tokens'
            rows share; none if `end` ≤ `begin`.
            """
            row = queries.row(begin_token)

            def page_ahead(end: ir.Value, entry: ir.Value) -> ir.Value:
                """Return a page of this row one block further on; for a token alone, one of the row ahead."""
                entry_ahead = code.min(add(entry, I64(pages_per_block)), sub(end, I64(1)))
                is_alone = build.icmp_signed("==", num_tokens, I64(1))
                return page_of(build.select(is_alone, row_ahead, row), build.select(is_alone, entry, entry_ahead))

            def attend_one_block(block: ir.Value) -> None:
                begin_entry = code.max(mul(block, I64(pages_per_block)), begin)
                end_entry = code.min(mul(add(block, I64(1)), I64(pages_per_block)), end)
                pages = PageBlock(begin_entry, end_entry, end, partial(page_of, row), partial(page_ahead, end))
                queries.attend_block(begin_token, end_token, pages)

            # Blocks begin at multiples of their size, whatever the tile, so that a token's sums are the same.
            first_block = build.sdiv(begin, I64(pages_per_block))
            end_block = build.sdiv(add(end, I64(pages_per_block - 1)), I64(pages_per_block))
            code.loop(first_block, end_block, attend_one_block)

        with build.if_then(build.icmp_signed(">", num_tokens, I64(0))):
            queries.begin()
            num_pages_of_last = queries.num_pages(sub(num_tokens, I64(1)))
            # The last pages in common are left to each row if they do not fill a block.
            whole_blocks = mul(build.sdiv(num_common_pages, I64(pages_per_block)), I64(pages_per_block))
            num_joint_pages = build.select(is_shared, whole_blocks, num_pages_of_last)
            attend_pages(I64(0), num_tokens, queries.first_page(I64(0)), num_joint_pages)

            def finish_token(i: ir.Value) -> None:
                # Last token first: a matrix unit also changes the sums of later queries, which are finished by then.
                i = sub(sub(num_tokens, I64(1)), i)
                with build.if_then(is_shared):
                    attend_pages(i, add(i, I64(1)), num_joint_pages, queries.num_pages(i))
                queries.finish(i, head, given.out, given.scales)

            code.loop(0, num_tokens, finish_token)
            queries.end()

    return register(shape.name, lambda: handler(shape.name, 13, 1, prepare, body))


def _clear_padding(
    code: Code,
    q: Buffer,
    out: Buffer,
    token_size: int,
    query_tiles: Buffer,
    num_decode_rows: ir.Value,
    num_query_tiles: ir.Value,
) -> None:
    """Emit code that writes zeros for the outputs of padding tokens, which no tile computes.

    A step is padded to T = `q.size(0)` tokens, and `out` is [T, K, G, H]; `token_size` is K × G × H, the elements of
    one token's output. A step's tokens are those of the decode rows, one each, and then those of the query tiles. So
    padding begins after the last query tile, or at token `num_decode_rows` if there is none. `query_tiles` [3, tiles]
    holds each tile's row, first token and number of tokens. With 5 decode rows and one query tile (5, 5, 3), tokens
    8 … T − 1 are padding.
    """
    build, num_tokens, data = code.build, q.size(0), out.data
    # Without any query tile, tile 0 is read, and its fields are not used.
    last_tile = code.max(build.sub(num_query_tiles, I64(1)), I64(0))
    first_token, num_queries = (
        code.load_index(query_tiles.data, build.add(build.mul(I64(field), query_tiles.size(1)), last_tile))
        for field in (1, 2)
    )
    has_query_tiles = build.icmp_signed(">", num_query_tiles, I64(0))
    end_token = build.select(has_query_tiles, build.add(first_token, num_queries), num_decode_rows)

    def clear(element: ir.Value) -> None:
        code.store(constant(F32, 0.0), data, element)

    code.loop(build.mul(end_token, I64(token_size)), build.mul(num_tokens, I64(token_size)), clear)
