"""Makes native code a custom call of XLA's, whose work is shared among threads.

    handler(call frame)     reads buffers, cuts the work into units, has other threads help
      └─ work(job)          takes one unit after the other until none is left: caller and helpers alike
           └─ body(unit)    what a kernel is

The interface of custom calls is described in `ffi`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import llvmlite.binding as llvm
from jax.typing import DTypeLike
from llvmlite import ir

from . import ffi
from .llvm import I32, I64, POINTER, Code, declare, register

TAKEN, DONE, HOLDERS, NUM_UNITS, VALUES = 0, 1, 2, 3, 4
"""Words of a job in memory: units taken and units done so far, threads that still hold the job, units; then the values
that units are computed from."""
SYSTEM_PAGE, MADVISE_HUGEPAGE = 4096, 14
MIN_LARGE_PAGE_BYTES = 256 << 20
"""Bytes from which on large system pages are asked for: the first touch of each makes the system zero 2 MB."""


class Buffer:
    """An argument or a result of a handler: its data and its dimensions."""

    def __init__(self, code: Code, buffers: ir.Value, index: int) -> None:
        """`buffers` is the address of XLA's list of arguments or of results."""
        self._code, self._buffer = code, code.load(buffers, index, POINTER)

    @property
    def data(self) -> ir.Value:
        """Return the address of the first element."""
        return self._code.load(self._buffer, ffi.BUFFER_DATA, POINTER)

    def size(self, dimension: int) -> ir.Value:
        """Return one dimension of the array, an int64."""
        return self._code.load(self._code.load(self._buffer, ffi.BUFFER_DIMS, POINTER), dimension, I64)


class Work(NamedTuple):
    """What a call has to compute, as its buffers say: units that threads share."""

    values: list[ir.Value]
    """Addresses and int64 numbers that each unit is computed from."""
    num_units: ir.Value
    """int64."""
    is_large: ir.Value
    """i1: whether the work is worth waking other threads."""


Prepare = Callable[[Code, list[Buffer], list[Buffer]], Work]
"""(code, arguments, results) → the call's work; runs once, on the calling thread."""
Body = Callable[[Code, list[ir.Value], ir.Value], None]
"""(code, `Work.values`, unit): computes one unit, on any thread."""


def handler(name: str, num_args: int, num_rets: int, prepare: Prepare, body: Body) -> ir.Module:
    """Return a module with an XLA handler of that name, whose units its caller and XLA's threads share.

    Work sharing by an atomic counter: each thread takes the next unit until none is left. The caller takes part and
    then spins until the units of the others are done.
    """
    module = ir.Module(name)
    module.triple = llvm.get_default_triple()
    function = ir.Function(module, ir.FunctionType(POINTER, [POINTER]), name)
    code = Code(function)
    build, frame = code.build, function.args[0]
    _answer_metadata(code, frame)
    args, rets = (code.load(frame, frame_offset, POINTER) for frame_offset in (ffi.FRAME_ARGS, ffi.FRAME_RETS))
    arguments = [Buffer(code, args, index) for index in range(num_args)]
    results = [Buffer(code, rets, index) for index in range(num_rets)]
    values, num_units, is_large = prepare(code, arguments, results)
    # A helper may begin after the caller has left, so the job belongs to neither: its last holder frees it.
    work = _work(module, [value.type for value in values], body)
    job = build.call(declare(module, "malloc", POINTER, I64), [I64(8 * (VALUES + len(values)))])
    for offset, value in enumerate((I64(0), I64(0), I64(1), num_units, *values)):
        code.store(value, job, offset)
    with build.if_then(build.and_(is_large, build.icmp_signed(">", num_units, I64(1)))):
        _ask_for_help(code, frame, work, job, num_units)
    build.call(work, [job])
    # Wait until the units that other threads have begun are done.
    waiting, end = build.append_basic_block("waiting"), build.append_basic_block("end")
    build.branch(waiting)
    build.position_at_end(waiting)
    done = build.load_atomic(code.at(job, DONE, I64), "acquire", 8)
    build.cbranch(build.icmp_signed("<", done, num_units), waiting, end)
    build.position_at_end(end)
    _leave(code, job)
    build.ret(ir.Constant(POINTER, None))
    return module


def _answer_metadata(code: Code, frame: ir.Value) -> None:
    """Emit the answer to XLA, which asks a handler for its interface version before it computes anything.

    Such a call frame has an extension of type 1, metadata, whose fields are filled in. Offsets in `ffi` count words of
    8 bytes; a number of 32 bits lies at twice the offset of its word, or one behind.
    """
    build = code.build
    extension = code.load(frame, ffi.FRAME_EXTENSION, POINTER)
    with build.if_then(_is_not_null(code, extension)):
        is_metadata = build.icmp_signed("==", code.load(extension, 2 * ffi.EXTENSION_TYPE, I32), I32(1))
        with build.if_then(is_metadata):
            metadata = code.load(extension, ffi.EXTENSION_METADATA, POINTER)
            for offset, number in enumerate(ffi.check_interface(ffi.interface_header())):
                code.store(I32(number), metadata, 2 * ffi.METADATA_VERSION + offset)
            code.store(I32(0), metadata, 2 * ffi.METADATA_TRAITS)
            build.ret(ir.Constant(POINTER, None))


def _work(module: ir.Module, value_types: list[ir.Type], body: Body) -> ir.Function:
    """Emit the function work(job), which takes units of a job until none is left, and computes each by `body`.

    A unit is taken by an atomic addition to the job's counter, which gives every thread another one.
    """
    work = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), "work")
    work.linkage = "internal"
    code = Code(work)
    build, job = code.build, work.args[0]
    num_units = code.load(job, NUM_UNITS, I64)
    values = [code.load(job, VALUES + offset, value_type) for offset, value_type in enumerate(value_types)]
    take_block, unit_block, end = (build.append_basic_block(name) for name in ("head", "unit", "end"))
    entry = build.block
    build.position_at_end(take_block)
    unit = build.atomic_rmw("add", code.at(job, TAKEN, I64), I64(1), "monotonic")
    build.cbranch(build.icmp_signed("<", unit, num_units), unit_block, end)
    build.position_at_end(unit_block)
    body(code, values, unit)
    build.atomic_rmw("add", code.at(job, DONE, I64), I64(1), "release")
    build.branch(take_block)
    build.position_at_end(end)
    build.ret_void()
    build.position_at_end(entry)
    build.branch(take_block)
    return work


def _ask_for_help(code: Code, frame: ir.Value, work: ir.Function, job: ir.Value, num_units: ir.Value) -> None:
    """Emit the scheduling of `work` on every other thread of XLA's pool, at most one per unit beside the caller.

    A busy thread may run it after the job is done, so each helper holds the job in memory and releases it. Where XLA
    refuses to schedule, the caller runs the helper itself.
    """
    build, module = code.build, code.build.module
    helper = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), "help")
    helper.linkage = "internal"
    helper_code = Code(helper)
    helper_code.build.call(work, [helper.args[0]])
    _leave(helper_code, helper.args[0])
    helper_code.build.ret_void()
    api, context = (code.load(frame, field, POINTER) for field in (ffi.FRAME_API, ffi.FRAME_CONTEXT))
    num_threads = code.allocate(I64, 1)
    code.store(I64(1), num_threads, 0)
    _destroy(code, api, _call(code, api, ffi.NUM_THREADS, context, num_threads))
    num_helpers = build.sub(code.min(code.load(num_threads, 0, I64), num_units), I64(1))
    build.atomic_rmw("add", code.at(job, HOLDERS, I64), num_helpers, "monotonic")

    def schedule(_: ir.Value) -> None:
        error = _call(code, api, ffi.SCHEDULE, context, build.bitcast(helper, POINTER), job)
        with build.if_then(_is_not_null(code, error)):
            _destroy(code, api, error)
            build.call(helper, [job])

    code.loop(0, num_helpers, schedule)


def _call(code: Code, api: ir.Value, index: int, *args: ir.Value) -> ir.Value:
    """Emit a call of function `index` of XLA's interface, and return the address of its error, or null.

    The function takes one address: of a structure that holds its own size in bytes, no extension, and then `args`.
    """
    structure = code.allocate(I64, 2 + len(args))
    for offset, word in enumerate((I64(8 * (2 + len(args))), ir.Constant(POINTER, None), *args)):
        code.store(word, structure, offset)
    function_type = ir.FunctionType(POINTER, [POINTER]).as_pointer()
    entry = code.build.bitcast(code.load(api, ffi.API_FUNCTIONS + index, POINTER), function_type)
    return code.build.call(entry, [structure])


def _is_not_null(code: Code, pointer: ir.Value) -> ir.Value:
    """Return, as an i1, whether an address is not null."""
    return code.build.icmp_unsigned("!=", code.build.ptrtoint(pointer, I64), I64(0))


def _destroy(code: Code, api: ir.Value, error: ir.Value) -> None:
    """Emit the release of an error of XLA's, if there is one; it is ignored: the caller computes all units then."""
    with code.build.if_then(_is_not_null(code, error)):
        _call(code, api, ffi.DESTROY_ERROR, error)


def _leave(code: Code, job: ir.Value) -> None:
    """Emit the release of a job by one of its holders; the last holder frees it."""
    build = code.build
    left = build.atomic_rmw("sub", code.at(job, HOLDERS, I64), I64(1), "acq_rel")
    with build.if_then(build.icmp_signed("==", left, I64(1))):
        build.call(declare(build.module, "free", ir.VoidType(), POINTER), [job])


def uninitialized(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Return an array of untouched memory, where XLA:CPU would write zeros.

    A large one lies in large system pages, where there are any: they cost a processor fewer address translations.
    """
    return jax.ffi.ffi_call(_uninitialized(len(shape), jnp.dtype(dtype).itemsize), jax.ShapeDtypeStruct(shape, dtype))()


@cache
def _uninitialized(rank: int, item_size: int) -> str:
    """Return the name of a custom call that leaves its result of `rank` dimensions as XLA has allocated it.

    `prepare` has no units of work: it only asks Linux to back a large result with large pages.
    """

    def prepare(code: Code, _: list[Buffer], rets: list[Buffer]) -> Work:
        build, num_bytes = code.build, I64(item_size)
        for dimension in range(rank):
            num_bytes = build.mul(num_bytes, rets[0].size(dimension))
        if sys.platform == "linux":
            start = build.ptrtoint(rets[0].data, I64)
            first_page = build.and_(build.add(start, I64(SYSTEM_PAGE - 1)), I64(-SYSTEM_PAGE))
            madvise = declare(build.module, "madvise", I32, POINTER, I64, I32)
            num_page_bytes = build.sub(build.add(start, num_bytes), first_page)
            with build.if_then(build.icmp_signed(">=", num_bytes, I64(MIN_LARGE_PAGE_BYTES))):
                # A system without large pages returns an error, which is ignored.
                build.call(madvise, [build.inttoptr(first_page, POINTER), num_page_bytes, I32(MADVISE_HUGEPAGE)])
        return Work([], num_units=I64(0), is_large=ir.Constant(ir.IntType(1), 0))

    return register(handler(f"jpaged_uninitialized_{rank}_{item_size}", 0, 1, prepare, lambda *_: None))
