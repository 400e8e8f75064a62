"""Native code: kept in JAX's compilation cache, compiled again where that is broken; for any processor there is."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import llvmlite.binding as binding
import pytest
from llvmlite import ir

from jpaged.pallas_kernels.code_formats import CODE_FORMATS
from jpaged.pallas_kernels.native import (
    ffi,
    llvm,
    norms,
    processor,
    registry,
    row_draws,
    row_scores,
    ruled_rows,
    xla_call,
)
from jpaged.pallas_kernels.native.norms import NormKind
from jpaged.pallas_kernels.native.products import chain
from jpaged.pallas_kernels.native.products.codes.decoded import CodedMultiplier
from jpaged.pallas_kernels.native.products.codes.decoder import Vectors
from jpaged.pallas_kernels.native.products.codes.integers import IntegerMultiplier
from jpaged.pallas_kernels.native.products.codes.stored_parts import stored_parts
from jpaged.pallas_kernels.native.products.multiplier import Multiplier
from jpaged.pallas_kernels.native.products.parts import PartMultiplier
from jpaged.pallas_kernels.native.products.stages import HeadShape, Stage
from jpaged.pallas_kernels.native.products.tiles import TileMultiplier
from jpaged.pallas_kernels.native.products.vectors import VectorMultiplier
from jpaged.pallas_kernels.native.row_calls import RowShape
from jpaged.pallas_kernels.ragged_paged_attention.native import attention, pages
from jpaged.pallas_kernels.ragged_paged_attention.native.shape import Shape

from .test_codes import SELDOM

ROOT = Path(__file__).parents[3]
MULTIPLY = """
import os, jax, jax.numpy as jnp, numpy as np
import jpaged
from jpaged.pallas_kernels.native import compiler
from jpaged.pallas_kernels.native.products.chain import product
compile_module = compiler.compile_module
def noted(module):
    print("compiles")
    return compile_module(module)
compiler.compile_module = noted
jax.config.update("jax_compilation_cache_dir", os.environ["CACHE"] or None)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 1000.0)
found = jax.jit(product, static_argnums=2)(jnp.full((3, 64), 2.0), jnp.full((2, 32, 32, 2), 0.5, "bfloat16"), 64)
assert (np.asarray(found) == 64.0).all()
"""


ALLOCATE = """
import re, jax, jax.numpy as jnp
from jpaged.pallas_kernels.native.xla_call import uninitialized
for megabytes in 40, 255, 256:
    array = jax.block_until_ready(jax.jit(lambda: uninitialized((megabytes, 1 << 18), jnp.float32))())
    middle = array.unsafe_buffer_pointer() + array.nbytes // 2
    for line in open("/proc/self/smaps"):
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_there = int(mapping[1], 16) <= middle < int(mapping[2], 16)
        elif is_there and line.startswith("VmFlags:"):
            print(megabytes, "hg" in line.split())
"""
"""Whether the system was asked for large pages; in a process whose memory is fresh."""


def output_of(script: str, **environment: str) -> str:
    environment = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def multiply(cache: Path | None) -> str:
    return output_of(MULTIPLY, CACHE=str(cache or ""))


def test_code_is_compiled_once_for_all_processes_and_anew_where_its_file_is_broken(tmp_path: Path) -> None:
    assert multiply(tmp_path) == "compiles\n"
    (file,) = tmp_path.glob("native_*")
    assert file.suffix == ".o"
    whole = file.read_bytes()
    assert multiply(tmp_path) == ""
    file.write_bytes(whole[:-1])
    assert multiply(tmp_path) == "compiles\n"
    assert file.read_bytes() == whole


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"short", bytes(5000)], ids=["short", "zeros"])
def test_a_broken_file_is_made_anew(tmp_path: Path, content: bytes) -> None:
    multiply(tmp_path)
    (file,) = tmp_path.glob("native_*.o")
    whole = file.read_bytes()
    file.write_bytes(content)
    assert multiply(tmp_path) == "compiles\n"
    assert file.read_bytes() == whole


@pytest.mark.slow
def test_without_a_cache_each_process_compiles(tmp_path: Path) -> None:
    assert multiply(None) == "compiles\n"
    (tmp_path / "file").write_text("")
    assert multiply(tmp_path / "file") == "compiles\n", "a directory that cannot be"


BITS = """
import hashlib, os
import jax, jax.numpy as jnp, numpy as np
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from tests.pallas_kernels.native import test_codes as codes, test_products as products
from tests.pallas_kernels.ragged_paged_attention.native import test_attention as attention
dtype = os.environ["DTYPE"]
rng = np.random.default_rng(0)
chain = jax.jit(products.chain_of(NATIVE_OPS, dtype, behind="rms", has_biases=True, num_rotated=0))
weights = codes.matrices([("Q4_K", 512)], 256, dtype)[0], codes.matrices([("Q6_K", 288)], 256, dtype)[0]
sizes = products.HEADS, products.STREAM, 256, 288
rows, stream, x, other = (jnp.asarray(rng.normal(size=(20, size)), jnp.float32) for size in sizes)
found = [*chain(rows, stream), codes.chain(x, weights, (512, 288), other)]
pages = attention.random_pages(rng, 2, 64, 16, dtype)
found.append(attention.random_step(rng, pages, 3, [70, 5, 40], (9,)).attend())
for array in found:
    print(hashlib.sha256(np.asarray(array).tobytes()).hexdigest())
"""
"""Hashes of what products of floats and of codes, norms and attention give."""


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_code_has_the_same_bits_without_optimizations(dtype: str) -> None:
    """So what other tests find in quickly compiled code holds for the code that users run."""
    quick, users = (output_of(BITS, DTYPE=dtype, JAX_DISABLE_MOST_OPTIMIZATIONS=value) for value in ("True", "False"))
    assert quick.count("\n") == 5 + 1
    assert quick == users


NAMED = """
import os
from pathlib import Path
import jax, jax.numpy as jnp
import jpaged
from jpaged.pallas_kernels.native import registry
from jpaged.pallas_kernels.native.products.chain import product
jax.config.update("jax_compilation_cache_dir", os.environ["CACHE"])
registry.name_functions_for_perf()
jax.jit(product, static_argnums=2)(jnp.ones((3, 64)), jnp.ones((64, 64, 32)), 2048)
path = Path(f"/tmp/perf-{os.getpid()}.map")
named = {name: (int(begin, 16), int(size, 16)) for begin, size, name in map(str.split, path.read_text().splitlines())}
path.unlink()
for name, address in registry._addresses.items():
    begin, size = named[name]
    assert begin == address
    assert size > 0
print({name.rpartition("::")[2] for name in named} >= {"work", "help"})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="perf is Linux's profiler")
def test_functions_are_named_for_perf(tmp_path: Path) -> None:
    """Also those of code that an earlier process has compiled."""
    for _ in range(2):
        assert output_of(NAMED, CACHE=str(tmp_path)) == "True\n"


def test_constants_that_are_equal_are_written_once_and_minus_zero_is_not_zero() -> None:
    vector_type = llvm.ir.VectorType(llvm.F32, 4)
    assert llvm.constant(vector_type, 0.0) is llvm.constant(llvm.ir.VectorType(llvm.F32, 4), 0.0)
    assert str(llvm.constant(vector_type, -0.0)) != str(llvm.constant(vector_type, 0.0))


def test_the_installed_interface_is_the_one_that_native_code_takes() -> None:
    assert ffi.check_interface(ffi.interface_header())[0] == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("_API_MAJOR 0", "_API_MAJOR 1", r"got version 1\.\d+ in XLA's interface .*wanted 0\.x"),
        ("  int64_t rank;\n", "", "got XLA_FFI_Buffer with .*wanted .*rank, dims"),
        ("_FIELD(XLA_FFI_Stream_Get);", "_FIELD(XLA_FFI_A);\n  _FIELD(XLA_FFI_B);", "as number 11 of XLA_FFI_Api"),
    ],
    ids=["major version", "field", "function"],
)
def test_another_interface_is_refused(old: str, new: str, message: str) -> None:
    header = ffi.interface_header()
    assert old in header
    with pytest.raises(RuntimeError, match=message):
        ffi.check_interface(header.replace(old, new))


@pytest.mark.parametrize(
    ("features", "is_granted", "wanted"),
    [
        ((), False, "vectors of 8 float32"),
        (("avx512bf16",), False, "vectors of 8 float32, AVX512-BF16"),
        (("amx-bf16",), True, "vectors of 8 float32, AMX"),
        (("amx-bf16",), False, "vectors of 8 float32, no AMX: the system does not let this process use it"),
    ],
)
def test_a_start_names_the_cpu_features(
    features: tuple[str, ...], is_granted: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "host_has", lambda name: name in features)
    monkeypatch.setattr(processor, "has_amx_unit", lambda: is_granted)
    monkeypatch.setattr(processor, "host_has_avx512", lambda: False)
    assert processor.cpu_features() == wanted


PROCESSORS = {
    "x86-64-v3": ("x86_64", False, False, False),
    "skylake-avx512": ("x86_64", True, False, False),
    "znver4": ("x86_64", True, True, False),
    "sapphirerapids": ("x86_64", True, True, True),
    "alderlake": ("x86_64", False, False, False),
    "neoverse-n1": ("aarch64", False, False, False),
}
"""Architecture; has vectors of sixteen lanes, products of pairs, a matrix unit."""
EVERY_RUN = "neoverse-n1"
WITH_VNNI = ("znver4", "sapphirerapids", "alderlake")
"""Processors that multiply bytes."""
OF_LIBC = {"malloc", "free", "madvise", "memcpy", "memset", "memmove", "sched_yield"}


def multipliers(is_bf16: bool, has_avx512: bool, has_pairs: bool, has_amx: bool) -> list[Callable[[int], Multiplier]]:
    """Return what a processor multiplies by: a function of K for each."""
    vectors = partial(
        VectorMultiplier,
        is_bf16=is_bf16,
        has_avx512=has_avx512,
        has_avx512_bf16=is_bf16 and has_pairs,
        rows_per_batch=5,
    )
    tiles = partial(TileMultiplier, has_avx512_bf16=True) if is_bf16 else PartMultiplier
    return [vectors, *([tiles] if has_amx else [])]


def layer_of(multiplier: Callable[[int], Multiplier]) -> tuple[Stage, ...]:
    """Return a layer's products after attention, with everything that may be in them."""
    norm, centered = (NormKind(1e-5, is_centered=is_centered) for is_centered in (False, True))
    return (
        Stage(multiplier(40), 40, 96, has_bias=True, adds=True, norm_behind=norm, scale=0.5),
        Stage(multiplier(96), 96, 64, norm=centered, activation="gelu_new", is_gated=True),
        Stage(multiplier(64), 64, 96, adds=True),
        Stage(multiplier(96), 96, 128, parts=(64, 32, 32), heads=HeadShape(32, 24, (norm, None))),
    )


@pytest.mark.parametrize(
    "processor",
    [pytest.param(name, marks=pytest.mark.slow if name != EVERY_RUN else ()) for name in PROCESSORS],
)
def test_no_processor_needs_more_than_libc(processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM calls by name what it has no instructions for: an unknown name would end the process."""
    architecture, has_avx512, has_pairs, has_amx = PROCESSORS[processor]
    texts: dict[str, str] = {}

    def written(name: str, build: Callable[[], ir.Module]) -> str:
        """Write a module once: equal names mean equal code."""
        if name not in texts:
            texts[name] = str(build())
        return name

    for module in (xla_call, chain, norms, row_draws, row_scores, ruled_rows, attention, pages):
        monkeypatch.setattr(module, "register", written)
    monkeypatch.setattr(registry, "link", written)
    monkeypatch.setattr(llvm, "host_has_avx512", lambda: has_avx512)
    monkeypatch.setattr(pages, "host_has", lambda feature: has_pairs)
    # Each run takes of formats that are decoded alike one.
    names = [name for name in CODE_FORMATS if processor != EVERY_RUN or name not in SELDOM]
    stored = stored_parts(256, tuple((CODE_FORMATS[name], 32) for name in names))
    for dtype_is_pairs in (False, True):
        for multiplier in multipliers(dtype_is_pairs, has_avx512, has_pairs, has_amx):
            chain._handler.__wrapped__(layer_of(multiplier))
            coded = CodedMultiplier(multiplier(256), stored, Vectors(dtype_is_pairs, has_avx512, has_pairs))
            chain._handler.__wrapped__((Stage(coded, 256, 256, parts=(256,)),))
    for num_rows in (1, 40, None) if processor in WITH_VNNI else ():
        for dtype in ("float32", "bfloat16"):
            integers = IntegerMultiplier.for_rows(stored, num_rows, dtype, has_avx512=has_avx512)
            chain._handler.__wrapped__((Stage(integers, 256, 256, parts=(256,)),))
    for dtype_is_pairs, byte_dtype in ((False, None), (True, None), (False, "int8"), (False, "float8_e4m3fn")):
        pages._write_handler.__wrapped__(dtype_is_pairs, byte_dtype, 3, 64, 64)
        for page_size, window, soft_cap in ((64, None, None), (12, 20, 30.0)):
            attention._attend_handler.__wrapped__(
                Shape(
                    is_bf16_packed=dtype_is_pairs,
                    byte_dtype=byte_dtype,
                    num_kv_heads=3,
                    group_size=3,
                    head_size=64,
                    page_size=page_size,
                    scale=0.125,
                    window=window,
                    soft_cap=soft_cap,
                    has_sinks=window is not None,
                    max_tokens=16,
                    has_avx512=has_avx512,
                    has_avx512_bf16=has_pairs,
                    has_amx=has_amx,
                )
            )
    xla_call._uninitialized.__wrapped__(4, 4)
    norms._handler.__wrapped__(100, norms.NormKind(1e-5, is_centered=False))
    bits = ruled_rows.RuleBits(*(1 << bit for bit in range(7)), *range(4))
    ruled_rows._handler.__wrapped__(ruled_rows._Shape(203, 128, rule_widths=(8, 4), mask_words=7), bits)
    ruled_rows._restore_handler.__wrapped__(RowShape(2, 128))
    row_draws._handler.__wrapped__(RowShape(2, 128), 16)
    row_scores._handler.__wrapped__(RowShape(2, 128), 3)
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple(f"{architecture}-unknown-linux-gnu")
    machine = target.create_target_machine(cpu=processor, opt=3)
    for text in texts.values():
        parsed = binding.parse_assembly(text)
        passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
        passes.getModulePassManager().run(parsed, passes)
        assembly = machine.emit_assembly(parsed)
        called = set(re.findall(r"^\s+(?:callq?|jmp|bl?)\s+([a-z_]\w*)", assembly, re.MULTILINE))
        of_others = {name for name in called if not name.startswith(("jpaged_parts_", "jpaged_decode_"))}
        assert of_others <= OF_LIBC | {"work", "help"}
    assert len(texts) >= 10 + 2 * has_amx


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs Linux with large pages")
def test_large_arrays_of_nothing_lie_in_large_pages():
    """Small ones do not: a first token would wait for each layer's first page to be zeroed, all 2 MB of it."""
    assert output_of(ALLOCATE) == "40 False\n255 False\n256 True\n"
