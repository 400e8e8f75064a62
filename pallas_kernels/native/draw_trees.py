"""Draws one of many weights in native code, down a tree. What the tree means is written in `sampling.drawing`."""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from .llvm import F32, I64, Code, constant


class _Level(NamedTuple):
    """A level of a tree in memory: its first node, its nodes with padding, and those of the level above."""

    first: int
    size: int
    num_parents: int


class DrawTree:
    """A tree over weights: a level's nodes are sums of nodes of the level below. Its leaves are written by the caller.

    With 40 leaves and 16 branches, there are 3 nodes above them: node 1 has the sum of the leaves 1, 4, 7 and so on.
    """

    def __init__(self, code: Code, num_leaves: int, num_branches: int) -> None:
        self._code, self._num_branches, self.num_leaves = code, num_branches, num_leaves
        self._levels: list[_Level] = []
        first, num_nodes = 0, num_leaves
        while not self._levels or num_nodes > 1:
            num_parents = -(-num_nodes // num_branches)
            self._levels.append(_Level(first, num_parents * num_branches, num_parents))
            first, num_nodes = first + num_parents * num_branches, num_parents
        self.leaves = code.allocate(F32, first)
        """The address of the leaves, float32, and of the levels above behind them."""

    @property
    def num_levels(self) -> int:
        """Levels below the root: as many random numbers are taken for a draw."""
        return len(self._levels)

    def draw(self, uniforms: ir.Value, first_uniform: int) -> ir.Value:
        """Emit a draw among the leaves, and return the leaf, an int64: 0 if no leaf has any weight.

        `uniforms` is the address of random numbers in [0, 1), of which the root's has the index `first_uniform`.
        """
        code, num_nodes = self._code, self.num_leaves
        for level, parents in zip(self._levels, [*self._levels[1:], None], strict=True):
            for padding in range(num_nodes, level.size):
                code.store(constant(F32, 0.0), self.leaves, level.first + padding)
            if parents is not None:
                self._add_up(level, parents)
            num_nodes = level.num_parents
        node: ir.Value = I64(0)
        for index, level in enumerate(reversed(self._levels)):
            uniform = code.load(uniforms, first_uniform + index, F32)
            node = code.build.add(node, code.build.mul(self._draw_branch(level, node, uniform), I64(level.num_parents)))
        return node

    def _add_up(self, level: _Level, parents: _Level) -> None:
        """Emit the sums of a level's nodes, which are nodes of the level above."""
        code, build = self._code, self._code.build

        def add_branches(node: ir.Value) -> None:
            total = constant(F32, 0.0)
            for branch in range(self._num_branches):
                offset = build.add(node, I64(level.first + branch * level.num_parents))
                total = build.fadd(total, code.load(self.leaves, offset, F32))
            code.store(total, self.leaves, build.add(node, I64(parents.first)))

        code.loop(0, level.num_parents, add_branches)

    def _draw_branch(self, level: _Level, node: ir.Value, uniform: ir.Value) -> ir.Value:
        """Return a branch of a node, by the inverse CDF of its branches' weights; see `drawing._inverse_cdf`."""
        code, build = self._code, self._code.build
        weights, running_sums, total = [], [], constant(F32, 0.0)
        for branch in range(self._num_branches):
            offset = build.add(node, I64(level.first + branch * level.num_parents))
            weights.append(code.load(self.leaves, offset, F32))
            total = build.fadd(total, weights[-1])
            running_sums.append(total)
        target, last = build.fmul(uniform, total), I64(0)
        has_weight = [build.fcmp_ordered(">", weight, constant(F32, 0.0)) for weight in weights]
        for branch, is_possible in enumerate(has_weight):
            last = build.select(is_possible, I64(branch), last)
        first = last  # If no running sum exceeds the target.
        for branch in reversed(range(self._num_branches)):
            exceeds_target = build.fcmp_ordered(">", running_sums[branch], target)
            first = build.select(build.and_(has_weight[branch], exceeds_target), I64(branch), first)
        return first
