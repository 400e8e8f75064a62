"""LLVM: compiles modules to object code for this processor, and loads what `object_code` does not.

Only a start that compiles, or one on another processor than x86-64, imports this module, and so LLVM's library.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import jax
import llvmlite.binding as llvm

if TYPE_CHECKING:
    from llvmlite import ir


@cache
def host_features() -> llvm.FeatureMap:
    """Register LLVM's code generator for this processor; return which of LLVM's feature names the processor has."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.get_host_cpu_features()


@cache
def processor_name() -> str:
    """Return LLVM's name of the processor."""
    name: str = llvm.get_host_cpu_name()
    return name


def optimization_level() -> int:
    """Return LLVM's level: the highest, or none while `jax_disable_most_optimizations` is set, as for XLA's programs.

    Without optimizations modules compile four times as fast, and run up to 1.6 times as long. Results have the same
    bits: no operation may be reordered, and which products are fused with sums follows the processor, not the level. A
    module that is registered stays as it was compiled.
    """
    return 0 if jax.config.read("jax_disable_most_optimizations") else 3


def compile_module(module: ir.Module) -> bytes:
    """Return the object code of a module, for this processor.

    Modules are written as vectors and in the form of static single assignments, with loops unrolled where that helps.
    Of LLVM's pipeline a few passes are left, which take half of the time; the others gain nothing measurable.
    """
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    machine = _target_machine()
    level = optimization_level()
    if level > 0:
        passes = llvm.create_new_module_pass_manager()
        passes.add_sroa_pass()
        passes.add_simplify_cfg_pass()
        passes.add_instruction_combine_pass()
        passes.add_loop_rotate_pass()
        passes.add_instruction_combine_pass()
        options = llvm.create_pipeline_tuning_options(speed_level=level)
        passes.run(parsed, llvm.create_pass_builder(machine, options))
    code: bytes = machine.emit_object(parsed)
    return code


def load(name: str, code: bytes, called: Mapping[str, int]) -> tuple[llvm.ExecutionEngine, int]:
    """Load a module's object code; return what owns it, and the address of its function of the module's name.

    `called` has the addresses of functions of other modules that it calls.
    """
    for function, function_address in called.items():
        llvm.add_symbol(function, function_address)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address: int = engine.get_function_address(name)
    return engine, address


def _target_machine() -> llvm.TargetMachine:
    """Return LLVM's code generator for this processor; an execution engine that it is given to frees it."""
    features = host_features().flatten()  # It also registers LLVM's code generator.
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=processor_name(), features=features, opt=optimization_level(), jit=True)
