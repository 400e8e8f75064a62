"""The matrix unit of an x86 processor (AMX) in native code: products of bfloat16, summed in float32.

    C [rows, 32] += A [rows, pairs of K] · B [pairs of K, 32]     in tiles of 16 rows of 64 bytes: 2 × 2 of C,
                                                                  2 of A by rows, 2 of B by columns

One instruction multiplies 32 values of K. A is stored by rows; B is stored in pairs of values that follow each other
along K, one pair of bfloat16 in 4 bytes. Each element of C is summed in one fixed order, which does not depend on the
rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from llvmlite import ir

from .llvm import I8, I16, I64, Code, declare

TILE = 16
"""Rows of a tile; also the columns of a tile of sums, and the pairs of K in a row of A."""
TILE_BYTES = 64
"""Bytes of one row of a tile."""
SUMS, ROWS, COLUMNS = ((0, 1), (2, 3)), (4, 5), (6, 7)
"""Tile registers: C by rows and columns, A, B."""
# A configuration of tiles, in bytes: palette, then bytes in a row of each (int16), then rows of each (int8).
CONFIG_BYTES, PALETTE, BYTES_OF, ROWS_OF = 64, 1, 16, 48


class Tiles(NamedTuple):
    """Where the tiles of A or of B lie: tile i of step k begins `next_tile` × i + `next_step` × k bytes after `begin`.

    A step is the 32 values of K that one instruction multiplies.
    """

    begin: ir.Value
    stride: ir.Value
    """Bytes from one row of a tile to the next."""
    next_tile: ir.Value
    next_step: ir.Value
    num_places: int | None = None
    """If so many places, a power of two, are used in turn: step k is at that of k modulo their number."""

    def at(self, code: Code, tile: int, step: ir.Value) -> ir.Value:
        """Return the address of tile `tile` of a step."""
        build = code.build
        if self.num_places is not None:
            step = build.and_(step, I64(self.num_places - 1))
        num_bytes = build.add(build.mul(I64(tile), self.next_tile), build.mul(step, self.next_step))
        return build.gep(self.begin, [num_bytes])


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

    def row_tiles(self, code: Code) -> Tiles:
        """Return the tiles of A, whose rows are this matrix's."""
        return Tiles(self.begin, self.stride, code.build.mul(self.stride, I64(TILE)), I64(TILE_BYTES))

    def column_tiles(self, code: Code) -> Tiles:
        """Return the tiles of B, whose rows are pairs of K."""
        return Tiles(self.begin, self.stride, I64(TILE_BYTES), code.build.mul(self.stride, I64(TILE)))


class MatrixUnit:
    """Emits the unit's instructions. `configure` comes first, `release` last."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._config = code.allocate(I8, CONFIG_BYTES)

    def configure(self) -> None:
        """Emit code that gives each of the eight tile registers 16 rows of 64 bytes, and sets them to zero.

        The instruction LDTILECFG reads the sizes from a structure of 64 bytes: the palette (the number of a register
        layout), and the bytes of a row and the rows of each tile. Rows of A that are not needed are multiplied too:
        each row of C depends on its own row of A alone.
        """
        code = self._code
        for word in range(CONFIG_BYTES // 8):
            code.store(I64(PALETTE if word == 0 else 0), self._config, word)
        for tile in (*SUMS[0], *SUMS[1], *ROWS, *COLUMNS):
            # Offsets count elements: of 2 bytes for the bytes of a row, and of one byte for the number of rows.
            code.store(I16(TILE_BYTES), self._config, BYTES_OF // 2 + tile)
            code.store(I8(TILE), self._config, ROWS_OF + tile)
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

    def load_rows(self, a: Tiles, num_tiles: int, step: ir.Value) -> None:
        """Load `num_tiles` (1 or 2) tiles of A of a step."""
        for i, a_register in enumerate(ROWS[:num_tiles]):
            self._call("tileloadd64", I8(a_register), a.at(self._code, i, step), a.stride)

    def load_columns(self, b: Tiles, step: ir.Value) -> None:
        """Load both tiles of B of a step."""
        for j, b_register in enumerate(COLUMNS):
            self._call("tileloadd64", I8(b_register), b.at(self._code, j, step), b.stride)

    def add_products(self, num_tiles: int) -> None:
        """Add the products of `num_tiles` (1 or 2) tiles of A by both tiles of B to the sums."""
        for i, a_register in enumerate(ROWS[:num_tiles]):
            for sum_register, b_register in zip(SUMS[i], COLUMNS, strict=True):
                self._call("tdpbf16ps", I8(sum_register), I8(a_register), I8(b_register))

    def add_product(self, a: Tiles, b: Tiles, step: ir.Value, product: int) -> None:
        """Emit product 0 … 3 of a step of two tiles of A by both of B, and the loads that it is first to need.

        So the four together do what a step of `multiply` does, and other code can stand between them.
        """
        i, j = divmod(product, 2)
        if i == 0:
            self._call("tileloadd64", I8(COLUMNS[j]), b.at(self._code, j, step), b.stride)
        if j == 0:
            self._call("tileloadd64", I8(ROWS[i]), a.at(self._code, i, step), a.stride)
        self._call("tdpbf16ps", I8(SUMS[i][j]), I8(ROWS[i]), I8(COLUMNS[j]))

    def multiply(
        self,
        a: Tiles,
        b: Tiles,
        num_tiles: int,
        begin: ir.Value | int,
        end: ir.Value | int,
        beside: Callable[[ir.Value], None] | None = None,
    ) -> None:
        """Emit code that adds A · B to the tile registers of C, for `num_tiles` (1 or 2) tiles of 16 rows of A.

        The product goes over steps `begin` … `end` − 1 of 32 values of K. Each iteration multiplies tile i of A by both
        tiles of B, 16 columns each. The products are added to the tile registers C (i, 0) and C (i, 1), in float32.
        `beside` emits what else is done in each step.
        """
        code = self._code

        def step(k: ir.Value) -> None:
            self.load_columns(b, k)
            self.load_rows(a, num_tiles, k)
            self.add_products(num_tiles)
            if beside is not None:
                beside(k)

        code.loop(begin, end, step)

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
