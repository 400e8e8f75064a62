"""Matrices that stay codes: products with them have the bits of those with the decoded matrix."""

from collections.abc import Sequence

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.formats.gguf_codes import BLOCK_BYTES, codes_of
from jpaged.pallas_kernels.code_formats import CODE_FORMATS, CodedMatrix
from jpaged.pallas_kernels.layer_ops import Product, StoredMatrix
from jpaged.pallas_kernels.native import llvm
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.pallas_kernels.native.products.chain import product
from jpaged.pallas_kernels.native.products.panels import in_panels

from .test_products import DTYPES, be_processor

PROCESSORS = {
    "this": None,
    "AVX2": {"has_pairs": False, "has_avx512": False},
    "AVX-512": {"has_pairs": False, "has_avx512": True},
    "AVX512-BF16": {"has_pairs": True, "has_avx512": True},
}
EVERYWHERE = ("Q5_0", "Q4_K", "Q6_K")
"""Formats that each run multiplies for all processors: codes of 4, 5 and 6 bits, with and without minima."""
ROWS = (1, 2, 13, 17, 40, 300)
HALF_BYTES = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}
"""Where a block has its float16: a scale; others have a minimum behind it."""


def stored_rows(name: str, num_rows: int, depth: int) -> np.ndarray:
    """Return rows of random blocks, as a file has them, with scales of about 0.05."""
    rng = np.random.default_rng(num_rows + depth)
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][0]
    blocks = rng.integers(0, 256, (num_rows, depth // block, BLOCK_BYTES[name]), dtype=np.uint8)
    for first in HALF_BYTES.get(name, (0, 2)):
        scales = (0.05 * rng.normal(size=(*blocks.shape[:2], 1))).astype(np.float16)
        blocks[..., first : first + 2] = scales.view(np.uint8)
    return blocks.reshape(num_rows, -1)


def matrices(parts: Sequence[tuple[str, int]], depth: int, dtype: str) -> tuple[CodedMatrix, jax.Array]:
    """Return a matrix W [K, N] whose columns have these formats, as codes, and decoded by the gguf package [N, K]."""
    packed, decoded = [], []
    for name, num_columns in parts:
        stored = stored_rows(name, num_columns, depth)
        codes = codes_of(stored, CODE_FORMATS[name])
        packed.append(NATIVE_OPS.packed_codes(codes, CODE_FORMATS[name], dtype).reshape(-1))
        decoded.append(gguf.dequantize(stored, gguf.GGMLQuantizationType[name]))
    code_parts = tuple((CODE_FORMATS[name], num_columns) for name, num_columns in parts)
    data = jnp.asarray(np.concatenate(packed))
    assert data.shape == NATIVE_OPS.coded_shape(depth, code_parts)
    return CodedMatrix(data, depth, code_parts, dtype), jnp.asarray(np.concatenate(decoded)).astype(dtype)


def chain(rows: jax.Array, weights: Sequence[StoredMatrix], sizes: Sequence[int], stream: jax.Array) -> jax.Array:
    """Return what a gated product and one that is added to the stream give, as the MLP of a layer has them."""
    gate_up = Product(weight=weights[0], num_out=sizes[0], activation="silu", is_gated=True)
    down = Product(weight=weights[1], num_out=sizes[1], adds_to_stream=True)
    return NATIVE_OPS.chain(rows, [gate_up, down], stream)[0]


@pytest.mark.parametrize(
    ("name", "processor"),
    [
        pytest.param(name, processor, marks=() if processor == "this" or name in EVERYWHERE else pytest.mark.slow)
        for name in CODE_FORMATS
        for processor in PROCESSORS
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_have_the_bits_of_those_with_the_decoded_matrix(
    name: str, dtype: str, processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (features := PROCESSORS[processor]) is not None:
        for needed, feature in (("has_avx512", "avx512f"), ("has_pairs", "avx512bf16")):
            if features[needed] and not llvm.host_has(feature):
                pytest.skip(f"this processor has no {feature}")
        be_processor(monkeypatch, **features)
    for num_out, depth in ((70, 512), (32, 1792)):
        coded, decoded = matrices([(name, num_out)], depth, dtype)
        panels = in_panels(decoded.T)
        for num_rows in ROWS:
            x = jnp.asarray(np.random.default_rng(num_rows).normal(size=(num_rows, depth)).astype(np.float32))
            # A new function each time: JAX would take a product that was traced for another processor.
            run = jax.jit(lambda x, weight, num_out=num_out: product(x, weight, num_out))
            found, wanted = (np.asarray(run(x, weight)) for weight in (coded, panels))
            np.testing.assert_array_equal(found, wanted, err_msg=f"{num_rows} rows of {num_out} × {depth}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain_of_matrices_in_several_formats_has_the_bits_of_the_decoded_one(dtype: str) -> None:
    gate_up = matrices([("Q4_K", 256), ("Q6_K", 256)], 256, dtype)
    down = matrices([("Q5_0", 96), ("Q8_0", 32), ("Q4_1", 160)], 256, dtype)
    panels = [in_panels(decoded.T) for _, decoded in (gate_up, down)]
    for num_rows in (1, 20, 70):
        rng = np.random.default_rng(num_rows)
        x, stream = (jnp.asarray(rng.normal(size=(num_rows, size)).astype(np.float32)) for size in (256, 288))
        found = chain(x, [gate_up[0], down[0]], (512, 288), stream)
        np.testing.assert_array_equal(found, chain(x, panels, (512, 288), stream))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODE_FORMATS)
def test_columns_are_those_of_the_decoded_matrix(name: str, dtype: str) -> None:
    coded, decoded = matrices([(name, 64), ("Q8_0", 40)], 512, dtype)
    ids = jnp.asarray([0, 63, 17, 31, 32, 64, 103, 17])
    np.testing.assert_array_equal(NATIVE_OPS.columns(coded, ids, 512), decoded[ids])


@pytest.mark.parametrize("name", CODE_FORMATS)
def test_codes_take_the_bytes_of_the_file_and_three_in_a_hundred_more_at_most(name: str) -> None:
    coded, _ = matrices([(name, 64)], 512, "float32")
    assert 1.0 <= coded.data.size / stored_rows(name, 64, 512).size <= 1.03


def test_bytes_of_another_matrix_are_refused() -> None:
    coded, _ = matrices([("Q4_0", 64)], 512, "float32")
    x = jnp.zeros((2, 256), jnp.float32)
    with pytest.raises(ValueError, match=r"product: got codes of 512 × 64 in .* wanted 256 × 64 in 9216 of uint8"):
        product(x, coded, 64)
