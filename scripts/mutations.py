"""Small changes to a Python source, one at a time: what a test suite must be able to see.

A mutant is one edit of the syntax tree. Left alone are docstrings, annotations, decorators, strings, `raise`
statements and the messages of asserts, the `strict` of a zip, `__repr__`, and functions named `check` or `_check…`,
which are the invariants that judge the rest. Knows Python's syntax; no test, no process.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

NEIGHBOURS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPPOSITES: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
NO_INTEGER = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp, ast.Dict, ast.Set, ast.GeneratorExp)
PURE = ("all", "any", "isinstance", "len", "max", "min", "sum")


@dataclass(frozen=True)
class Edit:
    """`new` in the place of what `parent` has under `field`, at `index` if that is a list."""

    parent: ast.AST
    field: str
    index: int | None
    new: Any

    @contextmanager
    def applied(self) -> Iterator[None]:
        old = self._put(self.new)
        try:
            yield
        finally:
            self._put(old)

    def _put(self, value: Any) -> Any:
        if self.index is None:
            old = getattr(self.parent, self.field)
            setattr(self.parent, self.field, value)
            return old
        values = getattr(self.parent, self.field)
        old, values[self.index] = values[self.index], value
        return old


@dataclass(frozen=True)
class Mutant:
    """One edit: where it is, and the statement (of a compound one, its head) before and after it."""

    file: str
    line: int
    column: int
    kind: str
    number: int
    """Counts the mutants of one kind at one place."""
    function: str
    original: str
    mutated: str
    ordinal: int
    """Counts the mutants of one function that read the same."""
    tree: ast.Module = field(repr=False)
    edit: Edit = field(repr=False)

    @property
    def id(self) -> str:
        return f"{self.file}:{self.line}:{self.column}:{self.kind}:{self.number}"

    @property
    def key(self) -> tuple[str, str, str, str, str, int]:
        """What it is called for longer than a day: lines move, so no line is in it."""
        return self.file, self.function, self.kind, self.original, self.mutated, self.ordinal

    def compile(self, filename: str) -> CodeType:
        with self.edit.applied():
            return compile(ast.fix_missing_locations(copy.deepcopy(self.tree)), filename, "exec")


def mutants_of(source: str, file: str) -> list[Mutant]:
    """Every mutant of this source, in the order of its text."""
    return _Mutator(ast.parse(source), file).mutants


class _Mutator:
    def __init__(self, tree: ast.Module, file: str):
        self.tree = tree
        self.file = file
        self.mutants: list[Mutant] = []
        self.function: list[str] = []
        self.statement: ast.stmt = ast.Pass()
        self.stores: Counter[str] = Counter()
        """How often each local name of the current function is assigned."""
        self.texts: set[tuple[int, str]] = set()
        self.numbers: Counter[tuple[object, ...]] = Counter()
        self._statements(tree, "body")

    def _add(self, kind: str, node: ast.AST, parent: ast.AST, name: str, index: int | None, new: Any) -> None:
        edit = Edit(parent, name, index, new)
        original = _head(self.statement)
        with edit.applied():
            mutated = "pass" if isinstance(new, ast.Pass) else _head(self.statement)
        if mutated == original or (id(self.statement), mutated) in self.texts:
            return
        self.texts.add((id(self.statement), mutated))
        line, column = getattr(node, "lineno", self.statement.lineno), getattr(node, "col_offset", 0)
        function = ".".join(self.function) or "<module>"
        number, ordinal = (line, column, kind), (function, kind, original, mutated)
        self.numbers.update([number, ordinal])
        self.mutants.append(
            Mutant(
                self.file,
                line,
                column,
                kind,
                self.numbers[number] - 1,
                function,
                original,
                mutated,
                self.numbers[ordinal] - 1,
                self.tree,
                edit,
            )
        )

    # Statements.

    def _statements(self, parent: ast.AST, name: str, guard: ast.If | None = None) -> None:
        for index in range(len(getattr(parent, name))):
            self._statement(parent, name, index, guard)

    def _statement(self, parent: ast.AST, name: str, index: int, guard: ast.If | None) -> None:
        node = getattr(parent, name)[index]
        self.statement = node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._function(node)
            return
        if isinstance(node, ast.ClassDef):
            self.function.append(node.name)
            self._statements(node, "body")
            self.function.pop()
            return
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        dropped = self._dropped_kind(node, guard)
        if dropped:
            self._add(dropped, node, parent, name, index, ast.copy_location(ast.Pass(), node))
        if isinstance(node, ast.If | ast.While):
            for value in (True, False) if isinstance(node, ast.If) else (False,):
                self._add("removed guard", node, node, "test", None, ast.Constant(value))
        if isinstance(node, ast.AugAssign) and type(node.op) in OPPOSITES:
            self._add("plus minus", node, node, "op", None, OPPOSITES[type(node.op)]())
            self._shift(node.value, node, "value", None)
        for child_name, value in ast.iter_fields(node):
            if child_name in ("annotation", "msg") or (child_name == "target" and isinstance(node, ast.AnnAssign)):
                continue
            if isinstance(value, ast.expr):
                self._expression(node, child_name, None, shifted=isinstance(node, ast.AugAssign))
            elif isinstance(value, list):
                self._list(node, child_name, value)

    def _list(self, node: ast.stmt, name: str, values: list[Any]) -> None:
        if values and isinstance(values[0], ast.stmt):
            self._statements(node, name, guard=node if isinstance(node, ast.If) else None)
            return
        for index, value in enumerate(values):
            if isinstance(value, ast.expr):
                self._expression(node, name, index)
            elif isinstance(value, ast.withitem):
                self._expression(value, "context_expr", None)
            elif isinstance(value, ast.ExceptHandler | ast.match_case):
                self._statements(value, "body")

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in ("check", "__repr__") or node.name.startswith("_check"):
            return
        for name in ("defaults", "kw_defaults"):
            for index, default in enumerate(getattr(node.args, name)):
                if default is not None:
                    self._expression(node.args, name, index)
        stores, self.stores = self.stores, Counter()
        for child in ast.walk(node):
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                self.stores[child.id] += 1
            elif isinstance(child, ast.arg):
                self.stores[child.arg] += 1
        self.function.append(node.name)
        self._statements(node, "body")
        self.function.pop()
        self.stores = stores

    def _dropped_kind(self, node: ast.stmt, guard: ast.If | None) -> str | None:
        """What kind of mutant dropping this statement is; None where nothing is learned from dropping it."""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
            return "dropped call"
        if isinstance(node, ast.Return | ast.Continue | ast.Break) and guard is not None:
            # Alone under a condition that does nothing, it is the guard that is never taken.
            is_alone = len(guard.body) == 1 and guard.body[0] is node and not guard.orelse
            calls = [child for child in ast.walk(guard.test) if isinstance(child, ast.Call)]
            has_call = any(ast.unparse(call.func) not in PURE for call in calls)
            return None if is_alone and not has_call else "removed guard"
        if isinstance(node, ast.Delete | ast.AugAssign):
            return "dropped assignment"
        if isinstance(node, ast.Assign | ast.AnnAssign) and self.function:
            if node.value is None or self.function[-1] == "__init__":
                return None
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            # A name without its only assignment is a NameError, which any test sees.
            if any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets) or any(
                isinstance(target, ast.Name) and self.stores[target.id] > 1 for target in targets
            ):
                return "dropped assignment"
        return None

    # Expressions. `shifted`: one more and one less of the whole was tried already, around it.

    def _expression(self, parent: ast.AST, name: str, index: int | None, *, shifted: bool = False) -> None:
        node = getattr(parent, name)
        node = node if index is None else node[index]
        if isinstance(node, ast.Compare):
            for position, op in enumerate(node.ops):
                self._add("comparison", node, node, "ops", position, NEIGHBOURS[type(op)]())
        elif isinstance(node, ast.Constant):
            self._constant(node, parent, name, index)
        elif isinstance(node, ast.BinOp):
            self._arithmetic(node, parent, name, index, shifted)
            return
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._add("removed guard", node, parent, name, index, node.operand)
        elif isinstance(node, ast.BoolOp):
            for position in range(len(node.values)):
                rest = node.values[:position] + node.values[position + 1 :]
                new = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
                self._add("removed guard", node, parent, name, index, new)
        elif isinstance(node, ast.IfExp):
            for value in (True, False):
                self._add("removed guard", node, node, "test", None, ast.Constant(value))
        elif isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.Slice):
            for bound in ("lower", "upper"):
                if getattr(node, bound) is not None:
                    self._shift(getattr(node, bound), node, bound, None)
        elif isinstance(node, ast.JoinedStr):
            return
        is_inside = isinstance(node, ast.Slice) or (shifted and isinstance(node, ast.UnaryOp))
        self._children(node, shifted=is_inside)

    def _children(self, node: ast.expr, *, shifted: bool) -> None:
        is_range = isinstance(node, ast.Call) and ast.unparse(node.func) == "range"
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr):
                self._expression(node, name, None, shifted=shifted)
            for index, item in enumerate(value if isinstance(value, list) else []):
                if isinstance(item, ast.expr):
                    self._expression(node, name, index, shifted=is_range)
                elif isinstance(item, ast.keyword) and item.arg != "strict":
                    self._expression(item, "value", None)
                elif isinstance(item, ast.comprehension):
                    self._expression(item, "iter", None)
                    for position, test in enumerate(item.ifs):
                        self._add("removed guard", test, item, "ifs", position, ast.Constant(True))
                        self._expression(item, "ifs", position)

    def _constant(self, node: ast.Constant, parent: ast.AST, name: str, index: int | None) -> None:
        if isinstance(node.value, bool):
            self._add("boolean", node, parent, name, index, ast.Constant(not node.value))
        elif isinstance(node.value, int):
            for step in (1, -1):
                self._add("one off", node, parent, name, index, ast.Constant(node.value + step))

    def _arithmetic(self, node: ast.BinOp, parent: ast.AST, name: str, index: int | None, shifted: bool) -> None:
        if not (_may_be_integer(node.left) and _may_be_integer(node.right)):
            self._children(node, shifted=False)
            return
        is_sum = type(node.op) in OPPOSITES
        if is_sum:
            self._add("plus minus", node, node, "op", None, OPPOSITES[type(node.op)]())
        elif isinstance(node.op, ast.FloorDiv):
            ceiling = ast.UnaryOp(ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub(), node.left), ast.FloorDiv(), node.right))
            self._add("rounding", node, parent, name, index, ceiling)
        if isinstance(node.op, ast.Add | ast.Sub | ast.FloorDiv | ast.Mod | ast.Mult) and not shifted:
            self._shift(node, parent, name, index)
        for operand in ("left", "right"):
            if isinstance(node.op, ast.FloorDiv | ast.Mod | ast.Mult):
                self._shift(getattr(node, operand), node, operand, None)
            self._expression(node, operand, None, shifted=True)

    def _shift(self, node: ast.expr, parent: ast.AST, name: str, index: int | None) -> None:
        """One more and one less than this value; a constant, alone or as a summand, has its own."""
        summands = [node]
        if isinstance(node, ast.BinOp) and type(node.op) in OPPOSITES:
            summands = [node.left, node.right]
        if any(isinstance(summand, ast.Constant) for summand in summands) or not _may_be_integer(node):
            return
        for op in (ast.Add(), ast.Sub()):
            self._add("one off", node, parent, name, index, ast.BinOp(node, op, ast.Constant(1)))

    def _call(self, node: ast.Call) -> None:
        function = ast.unparse(node.func)
        if function in ("min", "max"):
            swapped = ast.Name("max" if function == "min" else "min", ast.Load())
            self._add("min max", node, node, "func", None, swapped)
        elif not any(isinstance(arg, ast.Starred) for arg in node.args):
            for position in range(len(node.args) - 1):
                args = list(node.args)
                args[position : position + 2] = reversed(args[position : position + 2])
                self._add("swapped arguments", node, node, "args", None, args)
        if function == "range":
            for position, arg in enumerate(node.args):
                self._shift(arg, node, "args", position)


def _may_be_integer(node: ast.expr) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return not is_text and not isinstance(node, NO_INTEGER)


def _head(statement: ast.stmt) -> str:
    """The statement on one line; of a compound one, what stands before its body."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        statement = copy.copy(statement)
        statement.decorator_list = []
    return ast.unparse(statement).split("\n", 1)[0]
