"""The matrix unit of an x86 processor (AMX) in native code: products of bfloat16, summed in float32.

    C [rows, 32] += A [rows, pairs of K] · B [pairs of K, 32]     in tiles of 16 rows of 64 bytes: 2 × 2 of C,
                                                                  2 of A by rows, 2 of B by columns

One instruction multiplies 32 values of K. A is stored by rows; B is stored in pairs of values that follow each other
along K, one pair of bfloat16 in 4 bytes. Each element of C is summed in one fixed order, which does not depend on the
rows beside it.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import dataclass
from functools import cache

from llvmlite import ir

from .llvm import I8, I16, I64, Code, declare, host_has, host_has_avx512, register
from .xla_call import Buffer, Work, handler

TILE = 16
"""Rows of a tile; also the columns of a tile of sums, and the pairs of K in a row of A."""
TILE_BYTES = 64
"""Bytes of one row of a tile."""
PANEL = 32
"""Columns of B that are multiplied together. Weights are stored in panels of this many columns."""
DEPTH = 2 * TILE
"""Values of K that one instruction multiplies; K is padded to a multiple."""
MAX_SERIAL_WORDS = 1 << 16
"""A product with a weight of at most this many 32-bit words runs on one thread: waking a second would take longer."""
MAX_PAIRS_PER_BLOCK = 256
"""Pairs of K per block at most: this part of a panel stays in the level-1 cache while all rows of A use it."""
SUMS, ROWS, COLUMNS = ((0, 1), (2, 3)), (4, 5), (6, 7)
"""Tile registers: C by rows and columns, A, B."""
# A configuration of tiles, in bytes: palette, then bytes in a row of each (int16), then rows of each (int8).
CONFIG_BYTES, PALETTE, BYTES_OF, ROWS_OF = 64, 1, 16, 48
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""Arguments of arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), by which a process asks Linux for tiles."""


@cache
def has_amx_unit() -> bool:
    """Return whether the processor has a matrix unit for bfloat16 and the system lets this process use it."""
    if not (sys.platform == "linux" and platform.machine() == "x86_64" and host_has("amx-bf16")):
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0


def cpu_features() -> str:
    """Return the processor features that native code uses, as text for the log: "AVX-512, AVX512-BF16, AMX".

    A processor without AVX-512 has "vectors of 8 float32" in its place. If there is a matrix unit (AMX) but the system
    does not let this process use it, the text says so. Features that the processor lacks are not named.
    """
    parts = ["AVX-512" if host_has_avx512() else "vectors of 8 float32"]
    if host_has("avx512bf16"):
        parts.append("AVX512-BF16")
    if has_amx_unit():
        parts.append("AMX")
    elif host_has("amx-bf16"):
        parts.append("no AMX: the system does not let this process use it")
    return ", ".join(parts)


@dataclass(frozen=True)
class Matrix:
    """A matrix in memory: the address of its first element, and the bytes between rows. Rows of B are pairs of K."""

    begin: ir.Value
    stride: ir.Value

    def at(self, code: Code, row: ir.Value | int, num_bytes: ir.Value | int = 0) -> ir.Value:
        """Return the address `num_bytes` into a row."""
        build = code.build
        row, num_bytes = (I64(x) if isinstance(x, int) else x for x in (row, num_bytes))
        return build.gep(self.begin, [build.add(build.mul(row, self.stride), num_bytes)])


class MatrixUnit:
    """Emits the unit's instructions. `configure` comes first, `release` last."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._config = code.allocate(I8, CONFIG_BYTES)

    def configure(self, first_rows: ir.Value | int = TILE, other_rows: ir.Value | int = TILE) -> None:
        """Emit code that sets the number of rows of each of the eight tile registers: 4 of C, 2 of A, 2 of B.

        `first_rows` (1 … 16) is the number of rows of the first tile of A, and of the two tiles of C that its products
        are added to. `other_rows` is the same number for the second tile of A. Both tiles of B have 16 rows. Every row
        has 64 bytes. The instruction LDTILECFG reads these numbers from a structure of 64 bytes, which is cleared
        first, and sets all tile registers to zero.
        """
        code = self._code
        row_counts = [I64(x) if isinstance(x, int) else x for x in (first_rows, other_rows)]
        # Clear the structure 8 bytes at a time. Its first byte is the palette, the number of a register layout.
        for word in range(CONFIG_BYTES // 8):
            code.store(I64(PALETTE if word == 0 else 0), self._config, word)
        rows_of_tile = {tile: I64(TILE) for tile in COLUMNS}
        for sums, rows_tile, num_rows in zip(SUMS, ROWS, row_counts, strict=True):
            rows_of_tile |= dict.fromkeys((*sums, rows_tile), num_rows)
        for tile, num_rows in rows_of_tile.items():
            # Offsets count elements: of 2 bytes for the bytes of a row, and of one byte for the number of rows.
            code.store(I16(TILE_BYTES), self._config, BYTES_OF // 2 + tile)
            code.store(code.build.trunc(num_rows, I8), self._config, ROWS_OF + tile)
        self._call("ldtilecfg", self._config)

    def release(self) -> None:
        """Return the tiles to their initial state, so that thread switches need not save them."""
        self._call("tilerelease")

    def clear_sums(self, num_tiles: int) -> None:
        """Set the sums of the first `num_tiles` tiles of rows (1 or 2) to zero."""
        for register_pair in SUMS[:num_tiles]:
            for tile_register in register_pair:
                self._call("tilezero", I8(tile_register))

    def load_sums(self, c: Matrix, num_tiles: int) -> None:
        """Load the sums from C."""
        self._each_sum("tileloadd64", c, num_tiles)

    def store_sums(self, c: Matrix, num_tiles: int) -> None:
        """Store the sums to C."""
        self._each_sum("tilestored64", c, num_tiles)

    def multiply(self, a: Matrix, b: Matrix, num_tiles: int, begin: ir.Value | int, end: ir.Value | int) -> None:
        """Emit code that adds A · B to the tile registers of C, for `num_tiles` (1 or 2) tiles of 16 rows of A.

        The product goes over the pairs of bfloat16 `begin` … `end` − 1 along K, and `end` − `begin` is a multiple of
        16. `a` has a row per row of C, with 4 bytes per pair. `b` has a row per pair, with 4 bytes for each of 32
        columns. Each step of the loop multiplies 16 pairs: tile i of A by both tiles of B, 16 columns each. The
        products are added to the tile registers C (i, 0) and C (i, 1), in float32.
        """
        code = self._code

        def step(k: ir.Value) -> None:
            for j, b_register in enumerate(COLUMNS):
                self._call("tileloadd64", I8(b_register), b.at(code, k, TILE_BYTES * j), b.stride)
            for i, a_register in enumerate(ROWS[:num_tiles]):
                self._call("tileloadd64", I8(a_register), a.at(code, TILE * i, code.build.mul(k, I64(4))), a.stride)
                for sum_register, b_register in zip(SUMS[i], COLUMNS, strict=True):
                    self._call("tdpbf16ps", I8(sum_register), I8(a_register), I8(b_register))

        code.loop(begin, end, step, step=TILE)

    def _each_sum(self, name: str, c: Matrix, num_tiles: int) -> None:
        """Emit the load or store `name` for each register of sums, with the address of its tile in C."""
        for i, register_pair in enumerate(SUMS[:num_tiles]):
            for j, tile_register in enumerate(register_pair):
                self._call(name, I8(tile_register), c.at(self._code, TILE * i, TILE_BYTES * j), c.stride)

    def _call(self, name: str, *args: ir.Value) -> None:
        """Emit an instruction of the matrix unit; `name` is its LLVM intrinsic without "llvm.x86."."""
        build = self._code.build
        function = declare(build.module, f"llvm.x86.{name}", ir.VoidType(), *(arg.type for arg in args))
        build.call(function, args)


@cache
def tile_handler() -> str:
    """Compile the custom call x [R, K] · panels [N ÷ 32, K ÷ 2, 32, 2] → float32 [R, N] for AMX; return its name.

    x and the panels are bfloat16, and K is a multiple of 32. A unit of work, which one thread computes, is one panel of
    32 columns. First, batches of 32 rows (two tiles) are multiplied by one block of K after the other, so that the
    block stays in the level-1 cache. Then the rows that are left are multiplied by all of K, in two tiles if they are
    more than 16, else in one: 75 rows are 2 × 32 rows and one tile of 11 rows.
    """

    def prepare(code: Code, args: list[Buffer], rets: list[Buffer]) -> Work:
        """Emit code that counts the panels, which are the units; a large weight is worth several threads."""
        x, panels = args
        build, num_panels, num_pairs = code.build, panels.size(0), panels.size(1)
        num_words = build.mul(build.mul(num_panels, I64(PANEL)), num_pairs)
        values = [x.data, panels.data, rets[0].data, num_pairs, rets[0].size(1), x.size(0)]
        return Work(values, num_units=num_panels, is_large=build.icmp_signed(">", num_words, I64(MAX_SERIAL_WORDS)))

    def body(code: Code, arguments: list[ir.Value], unit: ir.Value) -> None:
        """Emit the product of all rows of x and panel `unit`, written to 32 columns of `out`."""
        x, panels, out, num_pairs, num_columns, num_rows = arguments
        build, mul = code.build, code.build.mul
        # 128 bytes: a row of a panel, which is 32 pairs of bfloat16, and also 32 float32 of a row of `out`.
        matrix_unit, panel_row = MatrixUnit(code), I64(4 * PANEL)
        b = Matrix(build.gep(panels, [mul(mul(unit, num_pairs), panel_row)]), panel_row)
        all_a = Matrix(x, mul(num_pairs, I64(4)))
        all_c = Matrix(build.gep(out, [mul(unit, panel_row)]), mul(num_columns, I64(4)))

        def multiply_rows(first_row: ir.Value, num_tiles: int, begin: ir.Value, end: ir.Value) -> None:
            """Multiply pairs `begin` … `end` − 1 of K for one or two tiles of rows from `first_row` on.

            The sums start at zero if `begin` is 0, else at the partial sums in `out`, and are stored to `out`.
            """
            a, c = (Matrix(matrix.at(code, first_row), matrix.stride) for matrix in (all_a, all_c))
            with build.if_else(build.icmp_signed("==", begin, I64(0))) as (is_new, is_begun):
                with is_new:
                    matrix_unit.clear_sums(num_tiles)
                with is_begun:
                    matrix_unit.load_sums(c, num_tiles)
            matrix_unit.multiply(a, b, num_tiles, begin, end)
            matrix_unit.store_sums(c, num_tiles)

        num_double_tiles = build.sdiv(num_rows, I64(2 * TILE))
        num_done_rows = mul(num_double_tiles, I64(2 * TILE))
        num_left_rows = build.sub(num_rows, num_done_rows)
        with build.if_then(build.icmp_signed(">", num_double_tiles, I64(0))):
            matrix_unit.configure()

            def multiply_block(begin: ir.Value) -> None:
                end = code.min(build.add(begin, I64(MAX_PAIRS_PER_BLOCK)), num_pairs)
                code.loop(0, num_done_rows, lambda first_row: multiply_rows(first_row, 2, begin, end), step=2 * TILE)

            code.loop(0, num_pairs, multiply_block, step=MAX_PAIRS_PER_BLOCK)
        with build.if_then(build.icmp_signed(">", num_left_rows, I64(TILE))):
            matrix_unit.configure(TILE, build.sub(num_left_rows, I64(TILE)))
            multiply_rows(num_done_rows, 2, I64(0), num_pairs)
        has_left_rows = build.icmp_signed(">", num_left_rows, I64(0))
        with build.if_then(build.and_(has_left_rows, build.icmp_signed("<=", num_left_rows, I64(TILE)))):
            matrix_unit.configure(num_left_rows)
            multiply_rows(num_done_rows, 1, I64(0), num_pairs)
        matrix_unit.release()

    return register(handler("jpaged_product_in_tiles", 2, 1, prepare, body))
