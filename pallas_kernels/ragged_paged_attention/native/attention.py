"""Attention over pages in native code: which tokens form a tile, and which pages each tile goes through.

    unit = (tile, KV head)     a tile: tokens of rows that begin with the same pages, or of one row
      page by page ──▶ scores [queries, Z] ──▶ weights ──▶ sums [queries, H]       queries, query_tiles

    shared tiles     decode rows that begin with the same pages: those for all rows at once, then each goes on by itself
    decode rows      that are in no such tile
    prefill tiles    some tokens of one row

A page's keys and values are read once, from memory into registers, for all queries of a KV head, and of a tile from the
caches. In any tile and beside any rows, a token's sums are the same in the same order, page by page: its bits depend
neither on the tile, nor on the number of threads, nor on how a prompt was cut. This holds for finite values only: a
later token's value has weight 0 for the earlier tokens of its tile, and NaN × 0 would reach them.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
from jax.ffi import ffi_call
from jaxtyping import Array, Float, Int
from llvmlite import ir

from ...native.amx import has_amx_unit
from ...native.llvm import F32, I64, Code, constant, host_has, host_has_avx512, register
from ...native.xla_call import Buffer, handler
from ..tile_plan import PlanSections
from .pages import NativePages, as_words
from .queries import Queries, Shape
from .query_tiles import TiledQueries

MAX_SERIAL_ELEMENTS = 1 << 17
"""Elements of keys that one thread attends to alone at most: for fewer, waking another would take longer."""


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
) -> Float[Array, "T K G H"]:
    """Return the attention of decode rows, shared tiles and query tiles, in float32; zeros for other tokens.

    A tile holds at most `max_tokens` tokens, and each token attends up to its position. Entries of `tables` up to a
    token's page must lie in the layer; others are not read.
    """
    _, num_kv_heads, group, head_size = q.shape
    pages.check(num_kv_heads, head_size)
    shape = Shape(
        is_bf16_packed=pages.is_bf16_packed,
        num_kv_heads=num_kv_heads,
        group=group,
        head_size=head_size,
        page_size=pages.page_size,
        window=pages.options.window,
        soft_cap=pages.options.soft_cap,
        has_sinks=sinks is not None,
        max_tokens=max_tokens,
        has_avx512=host_has_avx512(),
        has_avx512_bf16=host_has("avx512bf16"),
        has_amx=has_amx_unit(),
    )
    queries = as_words(q.astype(jnp.float32) * pages.options.scale, is_bf16_packed=pages.is_bf16_packed)
    arrays = [queries, pages.keys, pages.values, tables, positions, pages.first_page[None]]
    counts = jnp.stack([plan.num_shared_tiles[0], num_decode_rows, plan.num_query_tiles[0]])
    tiles = [counts, plan.query_tiles, plan.shared_tiles, plan.members, plan.num_shared_pages]
    no_sinks = jnp.zeros((0,), jnp.float32)
    out = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    return ffi_call(_attend_handler(shape), out)(*arrays, *tiles, no_sinks if sinks is None else sinks)


@cache
def _attend_handler(shape: Shape) -> str:
    """Compile and register the handler of one shape; return the name by which XLA calls it.

    `prepare` counts the tiles and decides whether several threads share them, `body` computes one tile.
    """
    num_kv_heads, group, page_size = shape.num_kv_heads, shape.group, shape.page_size

    def prepare(code: Code, args: list[Buffer], rets: list[Buffer]) -> tuple[list[ir.Value], ir.Value, ir.Value]:
        build = code.build
        q, keys, values, tables, positions, first, counts, prefill, shared, members, num_seen, sinks = args
        num_shared, num_decode, num_prefill = (code.load_index(counts.data, i) for i in range(3))
        _clear_padding(code, q, rets[0], num_kv_heads * group * shape.head_size, prefill, num_decode, num_prefill)
        num_tiles = build.add(build.add(num_shared, num_decode), num_prefill)

        # Decode rows see as many tokens as their positions say; a single prefill tile is enough for several threads.
        def add_position(row: ir.Value, sum: ir.Value) -> list[ir.Value]:
            return [build.add(sum, code.load_index(positions.data, row))]

        (total,) = code.loop(0, num_decode, add_position, carried=[build.mul(num_prefill, I64(MAX_SERIAL_ELEMENTS))])
        is_large = build.icmp_signed(">", total, I64(MAX_SERIAL_ELEMENTS // (num_kv_heads * shape.head_size)))
        arrays = q, keys, values, tables, positions, prefill, shared, members, num_seen, sinks
        data = [array.data for array in arrays]
        sizes = [tables.size(1), prefill.size(1), shared.size(1), num_shared, num_decode]
        given = [*data, rets[0].data, *sizes, code.load_index(first.data, 0)]
        return given, build.mul(num_tiles, I64(num_kv_heads)), is_large

    def body(code: Code, given: list[ir.Value], unit: ir.Value) -> None:
        (
            q, keys, values, tables, positions, prefill, shared, members, num_seen, sinks, out,
            table_len, most_prefill, most_shared, num_shared, num_decode, first_page,
        ) = given  # fmt: skip
        build, add, sub, mul = code.build, code.build.add, code.build.sub, code.build.mul
        tile, head = build.sdiv(unit, I64(num_kv_heads)), build.srem(unit, I64(num_kv_heads))
        kind = TiledQueries if TiledQueries.takes(shape) else Queries
        queries = kind(code, shape, keys=keys, values=values)

        # Which tokens, of which rows; and how many pages all of them go through together.
        is_shared = build.icmp_signed("<", tile, num_shared)
        decode = sub(tile, num_shared)
        is_decode = build.and_(build.not_(is_shared), build.icmp_signed("<", decode, num_decode))
        index = sub(decode, num_decode)

        def of_tile(array: ir.Value, size: ir.Value, kind: int, index: ir.Value) -> ir.Value:
            return code.load_index(array, add(mul(I64(kind), size), index))

        # An index that is none of this kind's reads the first of it, and is not used.
        at_prefill = build.select(build.or_(is_shared, is_decode), I64(0), index)
        at_shared = build.select(is_shared, tile, I64(0))
        at_decode = build.select(is_decode, decode, I64(0))
        row, start, length = (of_tile(prefill, most_prefill, kind, at_prefill) for kind in range(3))
        place, num_members, num_pages = (of_tile(shared, most_shared, kind, at_shared) for kind in range(3))
        # A row of a shared tile is no tile of its own.
        alone = build.select(build.icmp_signed("==", code.load_index(num_seen, at_decode), I64(0)), I64(1), I64(0))
        count = build.select(is_shared, num_members, build.select(is_decode, alone, length))

        def note(i: ir.Value) -> None:
            at = build.select(is_shared, add(place, i), I64(0))
            member = code.load_index(members, at)
            token = build.select(is_shared, member, build.select(is_decode, decode, add(start, i)))
            row_of_token = build.select(is_shared, member, build.select(is_decode, decode, row))
            queries.set_token(i, token, row_of_token, positions)
            queries.start(i, head, q, sinks)

        code.loop(0, count, note)

        def page_of(row: ir.Value, index: ir.Value) -> ir.Value:
            """Return the index of a page of this KV head among the pages of all layers and heads."""
            page = add(first_page, code.load_index(tables, add(mul(row, table_len), index)))
            return add(mul(page, I64(num_kv_heads)), head)

        def see(first: ir.Value, last: ir.Value, begin: ir.Value, end: ir.Value) -> None:
            """Let tokens first … last of the tile attend to pages begin … end of the first token's row."""
            row = queries.row(first)

            def see_page(index: ir.Value) -> None:
                following = page_of(row, code.min(add(index, I64(1)), sub(end, I64(1))))
                queries.see_page(first, last, page_of(row, index), following, mul(index, I64(page_size)))

            code.loop(begin, end, see_page)

        with build.if_then(build.icmp_signed(">", count, I64(0))):
            queries.begin()
            to_end = queries.num_pages(sub(count, I64(1)))
            together = build.select(is_shared, num_pages, to_end)
            see(I64(0), count, queries.first_page(I64(0)), together)

            def go_on(i: ir.Value) -> None:
                # The last one first: a matrix unit also adds to the sums of queries behind, which are done then.
                i = sub(sub(count, I64(1)), i)
                with build.if_then(is_shared):
                    see(i, add(i, I64(1)), together, queries.num_pages(i))
                queries.finish(i, head, out)

            code.loop(0, count, go_on)
            queries.end()

    return register(handler(shape.name, 12, 1, prepare, body))


def _clear_padding(
    code: Code, q: Buffer, out: Buffer, token_size: int, prefill: Buffer, num_decode: ir.Value, num_prefill: ir.Value
) -> None:
    """Write zeros for the padding tokens, which follow the last tile."""
    build, num_tokens, data = code.build, q.size(0), out.data
    last = code.max(build.sub(num_prefill, I64(1)), I64(0))
    start, length = (
        code.load_index(prefill.data, build.add(build.mul(I64(kind), prefill.size(1)), last)) for kind in (1, 2)
    )
    has_prefill = build.icmp_signed(">", num_prefill, I64(0))
    end = build.select(has_prefill, build.add(start, length), num_decode)

    def clear(at: ir.Value) -> None:
        code.store(constant(F32, 0.0), data, at)

    code.loop(build.mul(end, I64(token_size)), build.mul(num_tokens, I64(token_size)), clear)
