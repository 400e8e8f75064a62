"""Calls of functions that many modules need, each compiled once as a module of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import llvmlite.binding as llvm
from llvmlite import ir

from .llvm import Code, declare
from .registry import link


def call_linked(code: Code, name: str, arguments: Sequence[ir.Value], emit: Callable[..., None]) -> None:
    """Emit a call of a function of its own module, whose body `emit(new code, *its arguments)` emits; see `link`."""
    types = [value.type for value in arguments]

    def build() -> ir.Module:
        module = ir.Module(name)
        module.triple = llvm.get_default_triple()
        new_code = Code(ir.Function(module, ir.FunctionType(ir.VoidType(), types), name))
        emit(new_code, *new_code.build.function.args)
        new_code.build.ret_void()
        return module

    code.build.call(declare(code.build.module, link(name, build), ir.VoidType(), *types), arguments)
