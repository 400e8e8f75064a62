"""Matrices that stay codes, where they are decoded: products have the bits of those with the decoded matrix."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product as product_of

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.formats.gguf_codes import codes_of
from jpaged.pallas_kernels.code_formats import (
    CODE_FORMATS,
    CodedMatrix,
    CodeFormat,
    Codes,
    are_finite,
    decode,
    float8_format,
    int8_format,
    quantize,
)
from jpaged.pallas_kernels.layer_ops import Product, StoredMatrix
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.pallas_kernels.native.processor import host_has
from jpaged.pallas_kernels.native.products import chain as chain_module
from jpaged.pallas_kernels.native.products.chain import product
from jpaged.pallas_kernels.native.products.panels import in_panels
from jpaged.startup.attention.expected import random_codes

from ...gguf_file import random_blocks
from .test_products import DTYPES, be_processor

PROCESSORS = {
    "this": None,
    "AVX2": {"has_pairs": False, "has_avx512": False},
    "AVX-512": {"has_pairs": False, "has_avx512": True},
    "AVX512-BF16": {"has_pairs": True, "has_avx512": True},
}
ROW = -1
"""A group of all of a row."""
FORMATS = {
    **CODE_FORMATS,
    "zeros": CodeFormat("zeros", 4, 64, has_zeros=True),
    "zeros of float32": CodeFormat("zeros", 8, 128, has_zeros=True, scale="float32"),
    "4 bits of bfloat16": CodeFormat("4 bits", 4, 128, zero=8, scale="bfloat16"),
    "groups of 8": CodeFormat("groups of 8", 4, 8, has_zeros=True, scale="bfloat16"),
    "int8": int8_format(ROW),
    "fp8": float8_format(ROW),
    "fp8 blocks": float8_format(128),
}
EVERYWHERE = ("Q5_0", "Q4_K", "Q6_K", "MXFP4", "fp8", "zeros of float32", "groups of 8", "Q2_K", "IQ2_S")
"""Formats that each run multiplies as other processors do: codes of each kind, with minima, zeros and neither."""
SELDOM = ("Q3_K", "IQ4_NL", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "TQ2_0")
"""Formats that each run only reads: others have their kinds of codes, of scales and of tables."""


def stored_rows(name: str, num_rows: int, depth: int) -> np.ndarray:
    """Return rows of random blocks, as a file of GGUF has them, with scales of about 0.05."""
    return random_blocks(name, (num_rows, depth), np.random.default_rng(num_rows + depth))


def format_of(name: str, depth: int) -> CodeFormat:
    """Return the format of this name for rows of `depth` numbers."""
    code_format = FORMATS[name]
    return replace(code_format, group=depth) if code_format.group == ROW else code_format


def random_part(name: str, num_rows: int, depth: int) -> tuple[Codes, np.ndarray]:
    """Return random rows of Wᵀ as codes, and as the numbers that the gguf package, or `decode`, gives."""
    if name in CODE_FORMATS:
        stored = stored_rows(name, num_rows, depth)
        return codes_of(stored, CODE_FORMATS[name]), gguf.dequantize(stored, gguf.GGMLQuantizationType[name])
    codes = random_codes(format_of(name, depth), num_rows, depth, np.random.default_rng(num_rows + depth))
    return codes, decode(codes, format_of(name, depth))


def matrices(parts: Sequence[tuple[str, int]], depth: int, dtype: str) -> tuple[CodedMatrix, jax.Array]:
    """Return a matrix W [K, N] whose columns have these formats, as codes, and decoded as Wᵀ [N, K]."""
    packed, decoded = [], []
    code_parts = tuple((format_of(name, depth), num_columns) for name, num_columns in parts)
    for name, num_columns in parts:
        codes, numbers = random_part(name, num_columns, depth)
        packed.append(NATIVE_OPS.packed_codes(codes, format_of(name, depth), code_parts, dtype).reshape(-1))
        decoded.append(numbers)
    data = jnp.asarray(np.concatenate(packed))
    assert data.shape == NATIVE_OPS.coded_shape(depth, code_parts)
    return CodedMatrix(data, depth, code_parts, dtype), jnp.asarray(np.concatenate(decoded)).astype(dtype)


def chain(rows: jax.Array, weights: Sequence[StoredMatrix], sizes: Sequence[int], stream: jax.Array) -> jax.Array:
    """Return what a gated product and one that is added to the stream give, as the MLP of a layer has them."""
    gate_up = Product(weight=weights[0], num_out=sizes[0], activation="silu", is_gated=True)
    down = Product(weight=weights[1], num_out=sizes[1], adds_to_stream=True)
    return NATIVE_OPS.chain(rows, [gate_up, down], stream)[0]


def columns(matrix: CodedMatrix, ids: jax.Array, depth: int) -> np.ndarray:
    """Return columns of a matrix, by one program: the steps of `NATIVE_OPS.columns` would be many."""
    return np.asarray(jax.jit(lambda matrix, ids: NATIVE_OPS.columns(matrix, ids, depth))(matrix, ids))


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have codes decoded, as processors with a matrix unit do, and those that multiply no integers."""
    monkeypatch.setattr(chain_module, "has_integer_products", lambda parts: False)


def is_fast(name: str, processor: str, dtype: str) -> bool:
    """Return whether each run multiplies this: every format in one of the dtypes, some for AVX2 and AVX512-BF16 too."""
    if (
        name in SELDOM or processor == "AVX-512"
    ):  # In float32 its code is that of AVX512-BF16, in bfloat16 its steps are those of AVX2.
        return False
    if (processor, dtype) == ("AVX512-BF16", "float32"):  # The code of "this" too, where a processor has the feature.
        return False
    if processor != "this":
        return name in EVERYWHERE and dtype == DTYPES[EVERYWHERE.index(name) % len(DTYPES)]
    return dtype == DTYPES[list(FORMATS).index(name) % len(DTYPES)]


@pytest.mark.parametrize(
    ("name", "processor", "dtype"),
    [
        pytest.param(*case, marks=() if is_fast(*case) else pytest.mark.slow)
        for case in product_of(FORMATS, PROCESSORS, DTYPES)
    ],
)
@pytest.mark.usefixtures("decodes")
def test_products_have_the_bits_of_those_with_the_decoded_matrix(
    name: str, processor: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (features := PROCESSORS[processor]) is not None:
        for needed, feature in (("has_avx512", "avx512f"), ("has_pairs", "avx512bf16")):
            if features[needed] and not host_has(feature):
                pytest.skip(f"this processor has no {feature}")
        be_processor(monkeypatch, **features)
    # Decoded for a single batch as it is multiplied, and for several batches before; for two units of work.
    for num_out, depth, row_counts in ((70, 512, (2, 300)), (32, 1792, (1, 17))):
        coded, decoded = matrices([(name, num_out)], depth, dtype)
        panels = in_panels(decoded.T)
        for num_rows in row_counts:
            x = jnp.asarray(np.random.default_rng(num_rows).normal(size=(num_rows, depth)).astype(np.float32))
            # A new function each time: JAX would take a product that was traced for another processor.
            run = jax.jit(lambda x, weight, num_out=num_out: product(x, weight, num_out))
            found, wanted = (np.asarray(run(x, weight)) for weight in (coded, panels))
            np.testing.assert_array_equal(found, wanted, err_msg=f"{num_rows} rows of {num_out} × {depth}")


@pytest.mark.usefixtures("decodes")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain_of_matrices_in_several_formats_has_the_bits_of_the_decoded_one(dtype: str) -> None:
    gate_up = matrices([("Q4_K", 256), ("Q6_K", 256)], 256, dtype)
    down = matrices([("Q5_0", 96), ("Q8_0", 32), ("Q4_1", 160)], 256, dtype)
    panels = [in_panels(decoded.T) for _, decoded in (gate_up, down)]
    for num_rows in (1, 70):
        rng = np.random.default_rng(num_rows)
        x, stream = (jnp.asarray(rng.normal(size=(num_rows, size)).astype(np.float32)) for size in (256, 288))
        found = chain(x, [gate_up[0], down[0]], (512, 288), stream)
        np.testing.assert_array_equal(found, chain(x, panels, (512, 288), stream))


@pytest.mark.parametrize(
    ("is_decoded", "name", "dtype"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case[0] != is_fast(case[1], "this", case[2])))
        for case in product_of((False, True), FORMATS, DTYPES)
    ],
)
def test_columns_are_those_of_the_decoded_matrix(
    is_decoded: bool, name: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    if is_decoded:
        request.getfixturevalue("decodes")
    coded, decoded = matrices([(name, 64), ("Q8_0", 40)], 512, dtype)
    ids = jnp.asarray([0, 63, 17, 31, 32, 64, 103, 17])
    np.testing.assert_array_equal(columns(coded, ids, 512), decoded[ids])


@pytest.mark.parametrize("name", CODE_FORMATS)
def test_codes_take_the_bytes_of_the_file_and_three_in_a_hundred_more_at_most(name: str) -> None:
    """Of types of 1 to 3 bits it may be eight in a hundred: signs and scales lie apart from what they share words with.

    All are near what other types of the same bits take.
    """
    coded, _ = matrices([(name, 64)], 512, "float32")
    assert (
        1.0 <= coded.data.size / stored_rows(name, 64, 512).size <= (1.08 if CODE_FORMATS[name].is_in_quads else 1.03)
    )


def test_bytes_of_another_matrix_are_refused() -> None:
    coded, _ = matrices([("Q4_0", 64)], 512, "float32")
    x = jnp.zeros((2, 256), jnp.float32)
    with pytest.raises(ValueError, match=r"product: got codes of 512 × 64 in .* wanted 256 × 64 in 9216 of uint8"):
        product(x, coded, 64)


@pytest.mark.parametrize("given", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q8_0", "int8", "fp8"])
def test_a_device_and_the_host_quantize_to_the_same_bytes(name: str, given: str) -> None:
    """Numbers of few bits lie halfway between codes often, where a division rounds otherwise than a product."""
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(2048, 256)).astype(np.float32)).astype(given)
    rows = rows.at[0].set(0).at[1, 7].set(9).at[2].set(1e-41)
    code_format = format_of(name, 256)
    parts = ((code_format, 2048),)
    on_device = jax.jit(lambda rows: NATIVE_OPS.store_codes(rows, parts, "bfloat16"))(rows)
    codes = quantize(np.asarray(rows), code_format)
    packed = NATIVE_OPS.packed_codes(codes, code_format, parts, "bfloat16")
    np.testing.assert_array_equal(on_device, packed.reshape(-1))
    # The nearest code is at most half a step away, or in 8-bit floats half of the last bit of the mantissa.
    floats, numbers = np.asarray(rows).astype(np.float32), decode(codes, code_format)
    half_step = np.abs(codes.scales[0].astype(np.float32)).repeat(code_format.group, axis=1) / 2
    allowed = 2.0**-4 * np.abs(floats) + half_step / 256 if name == "fp8" else 1.001 * half_step
    # One side of 4 and 5 bits has a code less.
    largest = np.abs(floats.reshape(2048, -1, code_format.group)).max(-1).repeat(code_format.group, axis=1)
    is_inside = (np.abs(floats) < 0.85 * largest) & (largest > 1e-30)
    assert (np.abs(numbers - floats) <= allowed)[is_inside].all()
    np.testing.assert_array_equal(numbers[[0, 2]], 0)


def test_numbers_that_are_not_finite_are_found_in_codes_and_in_panels() -> None:
    for name in ("Q4_0", "Q6_K", "int8", "fp8", "MXFP4"):
        code_format = format_of(name, 512)
        codes, _ = random_part(name, 40, 512)
        parts = ((code_format, 40),)
        packed = NATIVE_OPS.packed_codes(codes, code_format, parts, "float32").reshape(-1)
        assert are_finite(codes, code_format)
        assert NATIVE_OPS.are_codes_finite(packed, 512, parts)
        assert not NATIVE_OPS.are_codes_finite(np.full_like(packed, 255), 512, parts)
    large = Codes(np.full((1, 512), 255, np.uint8), [np.full((1, 1), 3e37, np.float32)], [])
    assert not are_finite(large, format_of("int8", 512))


def test_the_smallest_power_of_two_is_0_everywhere() -> None:
    codes, code_format = Codes(np.full((32, 32), 7, np.uint8), [np.zeros((32, 1), np.uint8)], []), FORMATS["MXFP4"]
    parts = ((code_format, 32),)
    packed = NATIVE_OPS.packed_codes(codes, code_format, parts, "float32").reshape(-1)
    matrix = CodedMatrix(jnp.asarray(packed), 32, parts, "float32")
    np.testing.assert_array_equal(decode(codes, code_format), 0)
    np.testing.assert_array_equal(columns(matrix, jnp.arange(32), 32), 0)
    np.testing.assert_array_equal(product(jnp.ones((1, 32)), matrix, 32), 0)
