"""Makes native code a custom call of XLA, whose work is shared among threads.

    handler(call frame)     reads buffers, cuts the work into units, schedules helpers: other threads of XLA's pool
      └─ work(job)          takes one unit after the other until none is left: caller and helpers alike
           └─ body(unit)    the kernel's own code

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
"""A job is one call's work in memory, as words of 8 bytes: units taken and units done so far; the number of holders,
which are threads that may still read the job; the number of units; then the values that units are computed from."""
SYSTEM_PAGE, MADVISE_HUGEPAGE = 4096, 14
MIN_LARGE_PAGE_BYTES = 256 << 20
"""Smallest array for which large system pages are requested: the first access to each makes the system zero 2 MB."""


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
    """The work of one call, cut into units that threads share."""

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
    """Return an LLVM module with an XLA handler of that name: a function that XLA calls with a call frame.

    The frame has `num_args` arguments and `num_rets` results. `prepare` emits code that cuts the work into units, and
    `body` emits code for one unit. The thread that XLA calls (the caller) and helper threads of XLA's pool share the
    units by an atomic counter: each takes the next unit until none is left. The caller then spins until the helpers'
    units are done, and returns null, which means no error. Helpers are scheduled only if `Work.is_large` and there is
    more than one unit.
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
    # A helper may start after the caller has returned, so the job is on the heap, and its last holder frees it.
    work = _work(module, [value.type for value in values], body)
    # The words TAKEN and DONE, which are 0, HOLDERS (the caller alone so far) and NUM_UNITS, then the values.
    job = build.call(declare(module, "malloc", POINTER, I64), [I64(8 * (VALUES + len(values)))])
    for offset, value in enumerate((I64(0), I64(0), I64(1), num_units, *values)):
        code.store(value, job, offset)
    with build.if_then(build.and_(is_large, build.icmp_signed(">", num_units, I64(1)))):
        _schedule_helpers(code, frame, work, job, num_units)
    build.call(work, [job])
    # Wait until the units that other threads have taken are done; the acquire makes their results visible.
    waiting, end = build.append_basic_block("waiting"), build.append_basic_block("end")
    build.branch(waiting)
    build.position_at_end(waiting)
    done = build.load_atomic(code.at(job, DONE, I64), "acquire", 8)
    build.cbranch(build.icmp_signed("<", done, num_units), waiting, end)
    build.position_at_end(end)
    _release_job(code, job)
    build.ret(ir.Constant(POINTER, None))
    return module


def _answer_metadata(code: Code, frame: ir.Value) -> None:
    """Emit code that answers and returns if XLA only asks for the interface version of a handler.

    XLA asks when the handler is registered. The call frame then has an extension of type 1 (metadata), whose
    fields are filled in: major and minor version, and 0 for no traits. In any other call, the code goes on behind this.
    Offsets in `ffi` count words of 8 bytes, so the two halves of word n are the 32-bit numbers 2n and 2n + 1. Raises
    RuntimeError, as this code is written, if the installed jaxlib has another interface.
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
    """Return a new function work(job), which takes units of a job until none is left and computes each by `body`.

    Every thread that shares the job calls it. A job is words of 8 bytes: TAKEN, DONE, HOLDERS, NUM_UNITS and the
    values, of types `value_types`. An atomic addition to TAKEN returns a different unit to every thread, and a number
    that is not below NUM_UNITS ends the loop. The addition to DONE is a release, so that the caller, which waits for
    it, sees the unit's results.
    """
    work = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), "work")
    work.linkage = "internal"
    code = Code(work)
    build, job = code.build, work.args[0]
    num_units = code.load(job, NUM_UNITS, I64)
    values = [code.load(job, VALUES + offset, value_type) for offset, value_type in enumerate(value_types)]
    take_block, unit_block, end = (build.append_basic_block(name) for name in ("head", "unit", "end"))
    # Allocations of `body` go to the entry block, so its branch to the loop is added last.
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


def _schedule_helpers(code: Code, frame: ir.Value, work: ir.Function, job: ir.Value, num_units: ir.Value) -> None:
    """Emit code that schedules helpers, which run `work` on other threads of XLA's thread pool.

    There are min(threads of the pool, `num_units`) − 1 helpers, since the caller works too; `num_units` is at least 1.
    A busy thread may run its helper after the job is done. So each helper counts as a holder of the job, and releases
    it at its end; the last holder frees the memory. HOLDERS is raised before any helper can start, and needs no
    memory order: scheduling itself publishes the job. If XLA refuses to schedule a helper, the caller runs that helper.
    """
    build, module = code.build, code.build.module
    helper = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), "help")
    helper.linkage = "internal"
    helper_code = Code(helper)
    helper_code.build.call(work, [helper.args[0]])
    _release_job(helper_code, helper.args[0])
    helper_code.build.ret_void()
    api, context = (code.load(frame, field, POINTER) for field in (ffi.FRAME_API, ffi.FRAME_CONTEXT))
    # The number stays 1, which gives no helpers, if XLA returns an error instead.
    num_threads = code.allocate(I64, 1)
    code.store(I64(1), num_threads, 0)
    _destroy(code, api, _call(code, api, ffi.NUM_THREADS, context, num_threads))
    num_helpers = build.sub(code.min(code.load(num_threads, 0, I64), num_units), I64(1))
    build.atomic_rmw("add", code.at(job, HOLDERS, I64), num_helpers, "monotonic")

    def schedule(_: ir.Value) -> None:
        """Emit code that schedules one helper; if XLA refuses, run it here, since each helper must release the job."""
        error = _call(code, api, ffi.SCHEDULE, context, build.bitcast(helper, POINTER), job)
        with build.if_then(_is_not_null(code, error)):
            _destroy(code, api, error)
            build.call(helper, [job])

    code.loop(0, num_helpers, schedule)


def _call(code: Code, api: ir.Value, index: int, *args: ir.Value) -> ir.Value:
    """Emit a call of function number `index` of XLA's C interface; return the address of its error, null for none.

    `api` is the address of the interface, a table of functions. Each function takes the address of one structure of
    words of 8 bytes: its size in bytes, null (no extension), and then `args`. With one argument, these are 24, null and
    the argument.
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
    """Emit code that frees an XLA error unless it is null. Errors are ignored: the caller computes the units itself."""
    with code.build.if_then(_is_not_null(code, error)):
        _call(code, api, ffi.DESTROY_ERROR, error)


def _release_job(code: Code, job: ir.Value) -> None:
    """Emit code by which one holder releases a job: HOLDERS goes down by one, and the last holder frees the memory."""
    build = code.build
    holders_before = build.atomic_rmw("sub", code.at(job, HOLDERS, I64), I64(1), "acq_rel")
    with build.if_then(build.icmp_signed("==", holders_before, I64(1))):
        build.call(declare(build.module, "free", ir.VoidType(), POINTER), [job])


def uninitialized(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Return an array whose elements may hold anything, and whose memory is not touched.

    XLA:CPU's own `lax.empty` writes zeros. A large array is put into large system pages if the system has them, since
    they need fewer address translations.
    """
    return jax.ffi.ffi_call(_uninitialized(len(shape), jnp.dtype(dtype).itemsize), jax.ShapeDtypeStruct(shape, dtype))()


@cache
def _uninitialized(rank: int, item_size: int) -> str:
    """Compile a custom call that leaves its result of `rank` dimensions as XLA has allocated it; return its name.

    `item_size` is in bytes. The call has no units of work: `prepare` only asks Linux to put a result of at least
    `MIN_LARGE_PAGE_BYTES` into large pages.
    """

    def prepare(code: Code, _: list[Buffer], rets: list[Buffer]) -> Work:
        """Emit the request to Linux, madvise(2), if the result is large; return no work.

        madvise takes an address at the begin of a system page of 4096 bytes, so the result's begin is rounded up: a
        result at address 5000 is requested from 8192 on. Other systems have no such request.
        """
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
