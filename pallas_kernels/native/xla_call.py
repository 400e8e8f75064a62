"""Makes native code a custom call of XLA, whose work is shared among threads.

    handler(call frame)     reads buffers, cuts the work into units, schedules helpers: other threads of XLA's pool
      └─ work(job)          phase by phase, takes units until none is left: caller and helpers alike
           └─ body(unit)    the kernel's own code

Units of one phase may read what the phases before it have written: between phases every thread waits until all units
of the phase are done. The interface of custom calls is described in `ffi`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import llvmlite.binding as llvm
from jax.typing import DTypeLike
from llvmlite import ir

from . import ffi
from .llvm import CACHE_LINE, I32, I64, POINTER, Code, declare
from .registry import register

WORDS_OF_LINE = CACHE_LINE // 8
HOLDERS = 0
TAKEN, DONE, NUM_UNITS = 0, 1, 2
"""A job is one call's work in memory, as words of 8 bytes in lines of 64. The first line begins with the number of
holders, which are threads that may still read the job. A line for each phase begins with the units taken and the units
done so far, and the number of units. Then come the values that units are computed from."""
NUM_SPINS = 2000
"""Times that a thread looks whether a phase has ended before it offers its core to other threads each time."""
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
    """The work of one call, in phases that are cut into units, which threads share."""

    values: list[ir.Value]
    """Addresses and int64 numbers that each unit is computed from."""
    num_units: list[ir.Value]
    """int64: the units of each phase."""
    is_large: ir.Value
    """i1: whether the work is worth waking other threads."""


class Call(NamedTuple):
    """What XLA hands to a handler."""

    arguments: list[Buffer]
    results: list[Buffer]
    num_threads: ir.Value
    """int64: threads of XLA's pool, at least 1."""


Prepare = Callable[[Code, Call], Work]
"""(code, call) → the call's work; runs once, on the calling thread."""
Body = Callable[[Code, list[ir.Value], ir.Value], None]
"""(code, `Work.values`, unit): computes one unit of a phase, on any thread."""


def handler(name: str, num_args: int, num_rets: int, prepare: Prepare, *bodies: Body) -> ir.Module:
    """Return an LLVM module with an XLA handler of that name: a function that XLA calls with a call frame.

    The frame has `num_args` arguments and `num_rets` results. `prepare` emits code that cuts the work into units, and
    each of `bodies` emits code for one unit of a phase. The thread that XLA calls (the caller) and helper threads of
    XLA's pool share the units of a phase by an atomic counter: each takes the next unit until none is left, waits until
    all units of the phase are done, and goes on to the next phase. The handler returns null, which means no error.
    Helpers are scheduled only if `Work.is_large` and a phase has more than one unit.
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
    api, context = (code.load(frame, field, POINTER) for field in (ffi.FRAME_API, ffi.FRAME_CONTEXT))
    num_threads = _num_threads(code, api, context)
    values, num_units, is_large = prepare(code, Call(arguments, results, num_threads))
    work = _work(module, [value.type for value in values], bodies)
    # A helper may start after the caller has returned, so the job is on the heap, and its last holder frees it.
    first_value = WORDS_OF_LINE * (1 + len(bodies))
    job = build.call(declare(module, "malloc", POINTER, I64), [I64(8 * (first_value + len(values)))])
    code.store(I64(1), job, HOLDERS)  # The caller alone so far.
    max_units = I64(0)
    for phase, phase_units in enumerate(num_units):
        for offset, word in ((TAKEN, I64(0)), (DONE, I64(0)), (NUM_UNITS, phase_units)):
            code.store(word, job, _phase_line(phase) + offset)
        max_units = code.max(max_units, phase_units)
    for offset, value in enumerate(values):
        code.store(value, job, first_value + offset)
    with build.if_then(build.and_(is_large, build.icmp_signed(">", max_units, I64(1)))):
        num_helpers = build.sub(code.min(num_threads, max_units), I64(1))
        _schedule_helpers(code, api, context, work, job, num_helpers)
    build.call(work, [job])
    if bodies:
        _wait_for_phase(code, job, len(bodies) - 1)
    _release_job(code, job)
    build.ret(ir.Constant(POINTER, None))
    return module


def _phase_line(phase: int) -> int:
    """Return the first word of a phase's line in a job."""
    return WORDS_OF_LINE * (1 + phase)


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


def _work(module: ir.Module, value_types: list[ir.Type], bodies: Sequence[Body]) -> ir.Function:
    """Return a new function work(job), which computes units of a job, phase by phase, until none is left.

    Every thread that shares the job calls it. After each phase but the last one it waits until all units of the phase
    are done, also those that other threads compute. A thread that starts late finds no units left in earlier phases.
    The values, of types `value_types`, lie behind the lines of the phases. `bodies` emit the unit of each phase.
    """
    work = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), "work")
    work.linkage = "internal"
    code = Code(work)
    job, first_value = work.args[0], WORDS_OF_LINE * (1 + len(bodies))
    values = [code.load(job, first_value + offset, value_type) for offset, value_type in enumerate(value_types)]
    # Allocations of the bodies go to the entry block, so its branch to the first phase is added last.
    entry = code.build.block
    first_phase = code.build.append_basic_block("phases")
    code.build.position_at_end(first_phase)
    for phase, body in enumerate(bodies):
        if phase > 0:
            _wait_for_phase(code, job, phase - 1)
        _share_units(code, job, phase, partial(body, code, values))
    code.build.ret_void()
    code.build.position_at_end(entry)
    code.build.branch(first_phase)
    return work


def _share_units(code: Code, job: ir.Value, phase: int, compute: Callable[[ir.Value], None]) -> None:
    """Emit a loop that takes units of a phase until none is left, and `compute`s each.

    An atomic addition to TAKEN returns a different unit to every thread, and a number that is not below NUM_UNITS ends
    the loop. The addition to DONE is a release, so that a thread that waits for it sees the unit's results.
    """
    build, line = code.build, _phase_line(phase)
    num_units = code.load(job, line + NUM_UNITS, I64)
    take_block, unit_block, end = (build.append_basic_block(name) for name in ("take", "unit", "end"))
    build.branch(take_block)
    build.position_at_end(take_block)
    unit = build.atomic_rmw("add", code.at(job, line + TAKEN, I64), I64(1), "monotonic")
    build.cbranch(build.icmp_signed("<", unit, num_units), unit_block, end)
    build.position_at_end(unit_block)
    compute(unit)
    build.atomic_rmw("add", code.at(job, line + DONE, I64), I64(1), "release")
    build.branch(take_block)
    build.position_at_end(end)


def _wait_for_phase(code: Code, job: ir.Value, phase: int) -> None:
    """Emit a wait until all units of a phase are done; the acquire makes their results visible.

    The thread spins, since the units that are left take microseconds. If they do not end soon, another thread may need
    this core to end them: from then on the thread yields each time.
    """
    build, line = code.build, _phase_line(phase)
    num_units = code.load(job, line + NUM_UNITS, I64)
    entry, waiting, end = build.block, build.append_basic_block("waiting"), build.append_basic_block("end")
    build.branch(waiting)
    build.position_at_end(waiting)
    num_spins = build.phi(I64)
    num_spins.add_incoming(I64(0), entry)
    if sys.platform != "win32":
        with build.if_then(build.icmp_signed(">", num_spins, I64(NUM_SPINS))):
            build.call(declare(build.module, "sched_yield", I32), [])
    done = build.load_atomic(code.at(job, line + DONE, I64), "acquire", 8)
    num_spins.add_incoming(build.add(num_spins, I64(1)), build.block)
    build.cbranch(build.icmp_signed("<", done, num_units), waiting, end)
    build.position_at_end(end)


def _num_threads(code: Code, api: ir.Value, context: ir.Value) -> ir.Value:
    """Return the number of threads of XLA's pool, an int64; 1 if XLA returns an error instead."""
    num_threads = code.allocate(I64, 1)
    code.store(I64(1), num_threads, 0)
    _destroy(code, api, _call(code, api, ffi.NUM_THREADS, context, num_threads))
    return code.load(num_threads, 0, I64)


def _schedule_helpers(
    code: Code, api: ir.Value, context: ir.Value, work: ir.Function, job: ir.Value, num_helpers: ir.Value
) -> None:
    """Emit code that schedules helpers, which run `work` on other threads of XLA's thread pool.

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

    def prepare(code: Code, call: Call) -> Work:
        """Emit the request to Linux, madvise(2), if the result is large; return no work.

        madvise takes an address at the begin of a system page of 4096 bytes, so the result's begin is rounded up: a
        result at address 5000 is requested from 8192 on. Other systems have no such request.
        """
        build, num_bytes, result = code.build, I64(item_size), call.results[0]
        for dimension in range(rank):
            num_bytes = build.mul(num_bytes, result.size(dimension))
        if sys.platform == "linux":
            start = build.ptrtoint(result.data, I64)
            first_page = build.and_(build.add(start, I64(SYSTEM_PAGE - 1)), I64(-SYSTEM_PAGE))
            madvise = declare(build.module, "madvise", I32, POINTER, I64, I32)
            num_page_bytes = build.sub(build.add(start, num_bytes), first_page)
            with build.if_then(build.icmp_signed(">=", num_bytes, I64(MIN_LARGE_PAGE_BYTES))):
                # A system without large pages returns an error, which is ignored.
                build.call(madvise, [build.inttoptr(first_page, POINTER), num_page_bytes, I32(MADVISE_HUGEPAGE)])
        return Work([], num_units=[], is_large=ir.Constant(ir.IntType(1), 0))

    name = f"jpaged_uninitialized_{rank}_{item_size}"
    return register(name, lambda: handler(name, 0, 1, prepare))
