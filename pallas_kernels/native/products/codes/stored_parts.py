"""The parts of a quantized matrix, whose columns have one format in each, and which of them a panel is in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from llvmlite import ir

from ....code_formats import CodeFormat, CodeParts, joined_parts
from ...llvm import I64, Code
from ..panels import PANEL
from .panels import panel_bytes, stored_bytes


class PartBegin(NamedTuple):
    """Where a part begins in the sequence of parts that a matrix repeats."""

    first_panel: int
    first_byte: int
    code_format: CodeFormat


@dataclass(frozen=True)
class StoredParts:
    """The parts of a matrix W [K, N]."""

    depth: int
    """K, a multiple of the blocks of all formats."""
    parts: CodeParts
    """Formats of the matrix's columns, or of the first of them if the others repeat these."""
    num_repeats: int = 1
    """How often the matrix has the `parts`, one sequence of them behind the other."""

    @property
    def name(self) -> str:
        """Return the parts as part of a handler's name."""
        repeats = [] if self.num_repeats == 1 else [f"by{self.num_repeats}"]
        return "_".join([*(f"{code_format.key}x{size}" for code_format, size in self.parts), *repeats])

    def panel(self, code: Code, panels: ir.Value, index: ir.Value) -> ir.Value:
        """Return the address of panel `index` of the matrix, which begins at `panels`.

        The panel is in the last part that begins at it or before. Example: with parts of 2 and 3 panels, panel 4 is
        number 2 of part 1, and its address is that of the part and twice the bytes of a panel of its format.
        """
        build, begin = code.build, panels
        if self.num_repeats > 1:
            repeat = build.udiv(index, I64(self._panels_per_repeat))
            begin = build.gep(panels, [build.mul(repeat, I64(stored_bytes(self.depth, self.parts)))])
        index, address = self._index_in_repeat(code, index), begin
        for first_panel, first_byte, code_format in self._part_begins():
            panels_in_part = build.sub(index, I64(first_panel))
            offset = build.add(build.mul(panels_in_part, I64(panel_bytes(code_format, self.depth))), I64(first_byte))
            is_here_or_later = build.icmp_signed(">=", index, I64(first_panel))
            address = build.select(is_here_or_later, build.gep(begin, [offset]), address)
        return address

    @property
    def _panels_per_repeat(self) -> int:
        return sum(-(-size // PANEL) for _, size in self.parts)

    def _index_in_repeat(self, code: Code, index: ir.Value) -> ir.Value:
        """Return the number of a panel, given among all panels, within its sequence of parts."""
        return index if self.num_repeats == 1 else code.build.urem(index, I64(self._panels_per_repeat))

    def by_format(self, code: Code, panel: ir.Value, emit: Callable[[CodeFormat], None]) -> None:
        """Emit a branch for each format; that of the panel's format runs. `panel` is the panel's number."""
        build, begins = code.build, self._part_begins()
        if len(begins) == 1:
            emit(begins[0].code_format)
            return
        index = self._index_in_repeat(code, panel)
        has_format: dict[CodeFormat, ir.Value] = {}
        ends = [begin.first_panel for begin in begins[1:]] + [None]
        for (first_panel, _, code_format), end in zip(begins, ends, strict=True):
            is_here = build.icmp_signed(">=", index, I64(first_panel))
            if end is not None:
                is_here = build.and_(is_here, build.icmp_signed("<", index, I64(end)))
            before = has_format.get(code_format)
            has_format[code_format] = is_here if before is None else build.or_(before, is_here)
        for code_format, is_format in has_format.items():
            with build.if_then(is_format):
                emit(code_format)

    def _part_begins(self) -> list[PartBegin]:
        """Return where each part begins."""
        begins, num_panels, num_bytes = list[PartBegin](), 0, 0
        for code_format, size in self.parts:
            begins.append(PartBegin(num_panels, num_bytes, code_format))
            num_panels += -(-size // PANEL)
            num_bytes += stored_bytes(self.depth, ((code_format, size),))
        return begins


def stored_parts(depth: int, parts: CodeParts) -> StoredParts:
    """Return the parts of a matrix W [K, N] with K = `depth`, some of which may be repeated."""
    sequence, num_repeats = _repeated_parts(joined_parts(parts))
    return StoredParts(depth, sequence, num_repeats)


def _repeated_parts(parts: CodeParts) -> tuple[CodeParts, int]:
    """Return the shortest sequence of parts that makes up a matrix if it is repeated, and how often it is.

    Neighbors have different formats, as `joined_parts` returns them. Experts whose gates and ups have formats A and B
    are parts A, B, A, B, …: the sequence is A, B, and each expert repeats it.
    """
    for length in range(2, len(parts) // 2 + 1):
        if parts[:length] * (len(parts) // length) == parts:
            return parts[:length], len(parts) // length
    return parts, 1
