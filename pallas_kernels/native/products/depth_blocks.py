"""How K is cut into blocks, for multipliers that keep what they have made of a block of a panel in a cache."""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from ..llvm import I64, Code


@dataclass(frozen=True)
class DepthBlocks:
    """Cuts steps over K, 32 values each, into as few blocks of one size as possible; the last may have fewer steps."""

    num_steps: int
    max_steps: int
    """Steps of a block at most."""

    @property
    def num_blocks(self) -> int:
        return -(-self.num_steps // self.max_steps)

    @property
    def steps_per_block(self) -> int:
        return -(-self.num_steps // self.num_blocks)

    def steps(self, code: Code, block: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the first step of a block, and the one behind its last, int64."""
        first_step = code.build.mul(block, I64(self.steps_per_block))
        return first_step, code.min(code.build.add(first_step, I64(self.steps_per_block)), I64(self.num_steps))
