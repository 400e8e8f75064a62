"""Products of bfloat16 in the matrix unit of an x86 processor (AMX), as native code.

    x [R, K] · panel [K ÷ 2, 32, 2]      C (2 × 2 tiles of 16 × 16 sums) += A (2 of 16 rows) · B (2 of 16 columns)

A tile holds 16 rows of 64 bytes. What the unit multiplies at once is 32 values of K: a panel's pairs lie as it wants
them, and rows of x as they are. Each result is one sum in one order, in whatever tiles; there is none for fewer rows.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache

from llvmlite import ir

from .cpu_code import I8, I16, I32, I64, POINTER, Code, declared, host_has, register
from .cpu_handler import Buffer, handler

TILE = 16
"""Rows of a tile, and columns of its sums; pairs of K in a row of it."""
TILE_BYTES = 64
"""Of a row of a tile."""
LINE_BYTES = 128
"""From one pair of K to the next in a panel."""
PAIRS_AT_ONCE = 256
"""Of K: that much of a panel stays in the first cache while all rows of x are multiplied with it."""
SUMS, ROWS, COLUMNS = ((0, 1), (2, 3)), (4, 5), (6, 7)
"""Numbers of the tiles: C by rows and columns, A, B."""
# A configuration of tiles, in bytes: palette, then bytes in a row of each (int16), then rows of each (int8).
CONFIG_BYTES, PALETTE, BYTES_OF, ROWS_OF = 64, 1, 16, 48
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""Linux wants to be asked before a process has tiles: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)."""


@cache
def has_tiles() -> bool:
    """Whether the processor has a matrix unit for bfloat16 and the system lets this process use it."""
    if not (sys.platform == "linux" and platform.machine() == "x86_64" and host_has("amx-bf16")):
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0


@cache
def tile_handler(panel_width: int, worth_help: int) -> str:
    """Name of the custom call x [R, K], panels [N ÷ 32, K ÷ 2, 32, 2] → float32 [R, N]; K a multiple of 32."""

    def prepare(code: Code, args: list[Buffer], rets: list[Buffer]) -> tuple[list[ir.Value], ir.Value, ir.Value]:
        x, panels = args
        build, num_panels, pairs = code.build, panels.size(0), panels.size(1)
        words = build.mul(build.mul(num_panels, I64(panel_width)), pairs)
        values = [x.data, panels.data, rets[0].data, pairs, rets[0].size(1), x.size(0)]
        return values, num_panels, build.icmp_signed(">", words, I64(worth_help))

    def body(code: Code, given: list[ir.Value], unit: ir.Value) -> None:
        x, panels, out, pairs, width, num_rows = given
        build, add, mul = code.build, code.build.add, code.build.mul
        panel = mul(mul(unit, pairs), I64(panel_width))
        x_stride, out_stride = mul(pairs, I64(4)), mul(width, I64(4))
        config = code.allocate(I8, CONFIG_BYTES)

        def call(name: str, *args: ir.Value) -> None:
            function = declared(build.module, f"llvm.x86.{name}", ir.VoidType(), *(arg.type for arg in args))
            build.call(function, args)

        def address(base: ir.Value, word: ir.Value) -> ir.Value:
            return build.bitcast(code.at(base, word, I32), POINTER)

        def configure(first_rows: ir.Value, other_rows: ir.Value) -> None:
            """So many rows in the tiles of the first 16 rows of x, and of the others."""
            for at in range(0, CONFIG_BYTES, 8):
                code.store(I64(PALETTE if at == 0 else 0), config, at // 8)
            rows = {tile: I64(TILE) for tile in COLUMNS}
            for sums, of_x, count in zip(SUMS, ROWS, (first_rows, other_rows), strict=True):
                rows |= dict.fromkeys((*sums, of_x), count)
            for tile, count in rows.items():
                code.store(I16(TILE_BYTES), config, BYTES_OF // 2 + tile)
                code.store(build.trunc(count, I8), config, ROWS_OF + tile)
            call("ldtilecfg", config)

        def multiply(first: ir.Value, num_tiles: int, begin: ir.Value, end: ir.Value) -> None:
            """Up to 32 rows of x from `first`, in one or two tiles; pairs from `begin` to `end`."""
            firsts = [add(first, I64(TILE * i)) for i in range(num_tiles)]
            starts = [mul(row, pairs) for row in firsts]
            places = [
                (SUMS[i][j], address(out, add(mul(row, width), add(mul(unit, I64(panel_width)), I64(TILE * j)))))
                for i, row in enumerate(firsts)
                for j in range(2)
            ]
            is_begun = build.icmp_signed(">", begin, I64(0))
            with build.if_else(is_begun) as (then, otherwise):
                with then:
                    for tile, place in places:
                        call("tileloadd64", I8(tile), place, out_stride)
                with otherwise:
                    for tile, _ in places:
                        call("tilezero", I8(tile))

            def step(k: ir.Value) -> None:
                of_panel = add(panel, mul(k, I64(panel_width)))
                for j, tile in enumerate(COLUMNS):
                    call("tileloadd64", I8(tile), address(panels, add(of_panel, I64(TILE * j))), I64(LINE_BYTES))
                for i, start in enumerate(starts):
                    call("tileloadd64", I8(ROWS[i]), address(x, add(start, k)), x_stride)
                    for j in range(2):
                        call("tdpbf16ps", I8(SUMS[i][j]), I8(ROWS[i]), I8(COLUMNS[j]))

            code.loop(begin, end, step, step=TILE)
            for tile, place in places:
                call("tilestored64", I8(tile), place, out_stride)

        whole = build.sdiv(num_rows, I64(2 * TILE))
        done = mul(whole, I64(2 * TILE))
        rest = build.sub(num_rows, done)
        with build.if_then(build.icmp_signed(">", whole, I64(0))):
            configure(I64(TILE), I64(TILE))

            def some_depth(begin: ir.Value) -> None:
                end = code.least(add(begin, I64(PAIRS_AT_ONCE)), pairs)
                code.loop(0, done, lambda first: multiply(first, 2, begin, end), step=2 * TILE)

            code.loop(0, pairs, some_depth, step=PAIRS_AT_ONCE)
        with build.if_then(build.icmp_signed(">", rest, I64(TILE))):
            configure(I64(TILE), build.sub(rest, I64(TILE)))
            multiply(done, 2, I64(0), pairs)
        is_small = build.and_(build.icmp_signed(">", rest, I64(0)), build.icmp_signed("<=", rest, I64(TILE)))
        with build.if_then(is_small):
            configure(rest, I64(TILE))
            multiply(done, 1, I64(0), pairs)
        call("tilerelease")

    return register(handler("jpaged_product_in_tiles", 2, 1, prepare, body))
