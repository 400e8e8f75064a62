"""Object code runs alike whoever loads it, and what the loader does not know is refused."""

import ctypes
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding as binding
import pytest

from jpaged.pallas_kernels.native import compiler, object_code, processor, registry

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="elsewhere LLVM loads all code"
)
CODE = """
declare i64 @labs(i64)
declare i64 @jpaged_test_double(i64)
@shifts = internal constant [3 x i64] [i64 10, i64 20, i64 30]
define internal i64 @shift(i64 %i) noinline {
  %place = getelementptr [3 x i64], ptr @shifts, i64 0, i64 %i
  %shift = load volatile i64, ptr %place
  ret i64 %shift
}
define i64 @jpaged_test(i64 %i, i64 %x) {
  %size = call i64 @labs(i64 %x)
  %twice = call i64 @jpaged_test_double(i64 %size)
  %shift = call i64 @shift(i64 %i)
  %sum = add i64 %twice, %shift
  ret i64 %sum
}
"""
DOUBLE = "define i64 @jpaged_test_double(i64 %x) {\n  %y = add i64 %x, %x\n  ret i64 %y\n}\n"
INTEGERS = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def test_a_function_finds_constants_and_what_it_calls_whoever_loads_it() -> None:
    called = object_code.load(compiler.compile_module(DOUBLE), registry._function)
    code = compiler.compile_module(CODE)
    loaded = object_code.load(code, lambda name: called.get(name) or registry._function(name))
    owner, address = compiler.load("jpaged_test", code, called)
    assert set(loaded) == {"jpaged_test"}
    for place in loaded["jpaged_test"], address:
        assert [INTEGERS(place)(i, -7) for i in range(3)] == [24, 34, 44]
    del owner


def test_a_function_that_is_nowhere_is_named() -> None:
    with pytest.raises(AttributeError, match="undefined symbol: jpaged_test_double"):
        object_code.load(compiler.compile_module(CODE), registry._function)


def with_short_addresses(module: object) -> bytes:
    """Compile a module in another code model of LLVM's, whose relocations `object_code` does not know."""
    compiler.host_features()  # It registers LLVM's code generator.
    machine = binding.Target.from_default_triple().create_target_machine(codemodel="small", reloc="pic", jit=True)
    code: bytes = machine.emit_object(binding.parse_assembly(str(module)))
    return code


def test_what_is_unknown_is_refused() -> None:
    for count in "global i64 1", "global i64 0":  # With a value, and filled with zeros.
        with pytest.raises(ValueError, match=r"^object code: got a section to write, number \d+, allowed: none$"):
            object_code.load(compiler.compile_module(f"@count = {count}\n{DOUBLE}"), registry._function)
    with pytest.raises(ValueError, match=r"^object code: got a relocation of type \d+, allowed: 1$"):
        object_code.load(with_short_addresses(CODE), registry._function)
    code = compiler.compile_module(DOUBLE)
    for other in b"\xcf\xfa\xed\xfe" + code[4:], code[: object_code.MACHINE_OFFSET] + b"\xb7\0" + code[20:]:
        with pytest.raises(ValueError, match=r"^object code: got a file that begins with [0-9a-f]{40}, allowed: ELF"):
            object_code.load(other, registry._function)


def test_llvm_loads_what_is_refused_also_when_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def build() -> Any:
        double: Any = DOUBLE
        registry.link("jpaged_test_double", lambda: double)
        return CODE

    def never() -> Any:
        raise AssertionError("written again")

    monkeypatch.setattr(registry, "_path_of", tmp_path.joinpath)
    monkeypatch.setattr(compiler, "compile_module", with_short_addresses)
    for writes in build, never:
        monkeypatch.setattr(registry, "_addresses", {})  # As in a new process.
        monkeypatch.setattr(registry, "_engines", owners := [])
        registry.link("jpaged_test", writes)
        function = INTEGERS(registry._addresses["jpaged_test"])
        assert [function(i, -7) for i in range(3)] == [24, 34, 44]
        assert owners, "LLVM has loaded one"


def test_functions_of_several_sections_are_refused() -> None:
    """Their offsets would be those in different sections."""
    other = DOUBLE.replace("jpaged_test_double", "other").replace("{", 'section ".text.other" {', 1)
    with pytest.raises(ValueError, match=r"^object code: got functions in the sections \[\d+, \d+\], allowed: one"):
        object_code.functions(compiler.compile_module(DOUBLE + other))
    assert [one.name for one in object_code.functions(compiler.compile_module(DOUBLE))] == ["jpaged_test_double"]


EXIT = """
import threading, time
import jax, jax.numpy as jnp
import jpaged
from jpaged.pallas_kernels.native.products.chain import product
x, weight = jnp.ones((512, 2048)), jnp.full((64, 2048, 32), 0.001)
work = jax.jit(lambda x, weight: jax.lax.fori_loop(0, 1000, lambda _, x: product(x, weight, 2048), x))
work = work.lower(x, weight).compile()
threading.Thread(target=lambda: work(x, weight), daemon=True).start()
time.sleep(0.2)
"""


def test_a_process_may_end_while_native_code_runs() -> None:
    command = [sys.executable, "-c", EXIT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[3])
    assert (done.returncode, done.stderr) == (0, "")


def test_the_system_tells_the_features_that_llvm_finds() -> None:
    found = compiler.host_features()
    asked = "avx2", "avx512f", "avx512bf16", "avx512vnni", "avxvnni", "amx-bf16", "fma", "no-such-feature"
    assert {name: processor.host_has(name) for name in asked} == {name: found.get(name, False) for name in asked}
