"""Matrices that stay codes, where they are multiplied as integers: how near results are, and that bits do not vary."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.code_formats import CODE_FORMATS, CodedMatrix, decode, float8_format
from jpaged.pallas_kernels.native import processor
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.pallas_kernels.native.products import chain as chain_module
from jpaged.pallas_kernels.native.products.chain import code_order, product
from jpaged.pallas_kernels.native.products.codes import integers
from jpaged.pallas_kernels.native.products.codes.panels import Order
from jpaged.startup.attention.expected import random_codes

from .test_codes import FORMATS, SELDOM, chain, format_of, matrices
from .test_experts import Experts, bits
from .test_products import DTYPES, be_processor

INTEGERS = [name for name in FORMATS if not name.startswith("fp8")]
KINDS = ["Q5_0", "Q4_K", "MXFP4", "Q6_K", "zeros of float32", "groups of 8", "IQ2_S"]
"""Formats of each kind: plain groups, minima, a table of floats, super-scales, zeros, small groups, a grid."""
LARGEST_ERRORS = {"float32": 1e-6, "bfloat16": 5e-5}
"""As a share of norms. Rows of 24 bits leave float32's own error; rows of 16 bits are rounded more."""
LOST_BITS = {"float32": 2.0**-24, "bfloat16": 2.0**-16}
"""What rounding takes from each of 32 values of a row, up to about, as a share of the largest magnitude among them."""
VECTORS = {"AVX2": False, "AVX-512": True}


@pytest.fixture(autouse=True)
def has_no_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (processor.host_has("avx512vnni") or processor.host_has("avxvnni")):
        pytest.skip("this processor has no VNNI")
    monkeypatch.setattr(chain_module, "has_amx_unit", lambda: False)


def be_vectors(monkeypatch: pytest.MonkeyPatch, vectors: str) -> None:
    """Have products compiled for vectors of AVX2 or AVX-512."""
    if VECTORS[vectors] and not processor.host_has("avx512vnni"):
        pytest.skip("this processor has no VNNI in AVX-512")
    be_processor(monkeypatch, has_pairs=False, has_avx512=VECTORS[vectors])


def inputs(num_rows: int, depth: int) -> np.ndarray:
    """Return random rows, with outliers of up to 60 times the others; every second row is positive."""
    rng = np.random.default_rng(num_rows)
    rows = rng.normal(size=(num_rows, depth)).astype(np.float32)
    rows[:, rng.permutation(depth)[:4]] *= 60
    rows[1::2] = np.abs(rows[1::2])
    return rows


def error(found: np.ndarray, rows: np.ndarray, decoded: np.ndarray) -> float:
    """Return the largest error of rows · W as a share of the norms of a row and of a column: `decoded` is Wᵀ."""
    rows, decoded = rows.astype(np.float64), decoded.astype(np.float64)
    norms = np.linalg.norm(rows, axis=1)[:, None] * np.linalg.norm(decoded, axis=1)
    return float((np.abs(found - rows @ decoded.T) / norms).max())


def results(
    parts: Sequence[tuple[str, int]], depth: int, xs: Sequence[np.ndarray], dtype: str = "float32"
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return x · W for each x, and Wᵀ decoded to float32."""
    coded, _ = matrices(parts, depth, dtype)
    assert code_order(coded.parts, dtype) is Order.QUADS
    # A new function each time: JAX would take a product that was traced for another processor.
    run = jax.jit(lambda x, weight: product(x, weight, coded.num_out))
    return [np.asarray(run(x, coded)) for x in xs], np.asarray(matrices(parts, depth, "float32")[1])


@pytest.mark.parametrize(
    "vectors", ["this processor's", *(pytest.param(each, marks=pytest.mark.slow) for each in VECTORS)]
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SELDOM)) for name in INTEGERS])
def test_products_are_those_of_the_weights_in_float32(name: str, vectors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 too: weights are not rounded, and rows to 16 bits.

    Rows are one batch, batches of two sizes, a batch of the most rows, and two units of work. That other numbers of
    rows give the same bits, and so do vectors of eight lanes and of sixteen, is the next test's.
    """
    if vectors in VECTORS:
        be_vectors(monkeypatch, vectors)
    block = format_of(name, 512).block if FORMATS[name].group > 0 else 32
    sizes = [(70, 512, 5), (32, 1792, 17), (1, 8960 // block * block, 12), (33, block, 253)]
    cases = list(zip([*DTYPES, *DTYPES], sizes, strict=True))
    if name not in (*KINDS, "int8"):
        cases = cases[:2]  # Another format of its kind has all of them; int8 is the one with scales of rows.
    for dtype, (num_out, depth, num_rows) in cases:
        x = inputs(num_rows, depth)
        (found,), decoded = results([(name, num_out)], depth, [x], dtype)
        assert error(found, x, decoded) < LARGEST_ERRORS[dtype]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.slow] * (place != index % 2 or name == "IQ2_S"))
        for index, name in enumerate(KINDS)
        for place, dtype in enumerate(DTYPES)
    ],
)
def test_bits_depend_neither_on_other_rows_nor_on_the_vectors(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 1, 23 and 300 are cut into batches of all kinds: one, several alike, and of two sizes. K is cut too."""
    x = inputs(300, 1792)
    xs = [x[:1], x[:23], x]
    by_vectors = []
    for has_avx512 in {False, processor.host_has("avx512vnni")}:
        with monkeypatch.context() as patch:
            be_processor(patch, has_pairs=False, has_avx512=has_avx512)
            found, _ = results([(name, 70)], 1792, xs, dtype)
        for each in found:
            np.testing.assert_array_equal(each, found[-1][: len(each)])
        by_vectors.append(found[-1])
    np.testing.assert_array_equal(by_vectors[0], by_vectors[-1])


@pytest.mark.parametrize(
    ("gates_and_ups", "downs"),
    [
        ([("Q4_K", 256), ("Q6_K", 256)], [("Q5_0", 96), ("Q8_0", 32), ("Q4_1", 160)]),
        ([("fp8", 512)], [("Q4_0", 288)]),
        ([("Q4_0", 512)], [("fp8", 288)]),
    ],
    ids=["integers", "floats, then integers", "integers, then floats"],
)
def test_a_product_packs_the_rows_of_the_next_one(
    gates_and_ups: list[tuple[str, int]], downs: list[tuple[str, int]]
) -> None:
    """A gate in one or several formats, and a product that is added to the stream."""
    (gate_up, wide), (down, narrow) = (matrices(parts, 256, "float32") for parts in (gates_and_ups, downs))
    rng = np.random.default_rng(0)
    rows, stream = (rng.normal(size=(70, size)).astype(np.float32) for size in (256, 288))
    gates, ups = np.split(rows.astype(np.float64) @ np.asarray(wide, np.float64).T, 2, axis=1)
    wanted = stream + (gates / (1 + np.exp(-np.maximum(gates, -500))) * ups) @ np.asarray(narrow, np.float64).T
    found = [
        np.asarray(chain(jnp.asarray(rows[:n]), [gate_up, down], (512, 288), jnp.asarray(stream[:n])))
        for n in (1, 20, 70)
    ]
    assert (np.abs(found[-1] - wanted).max(axis=1) / np.linalg.norm(wanted, axis=1)).max() < 1e-5
    for each in found:
        np.testing.assert_array_equal(each, found[-1][: len(each)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_costs_those_of_its_32_as_many_bits_as_it_is_larger(dtype: str) -> None:
    """The weights of the large value are 0, so that its product does not hide what it costs the others."""
    rng, code_format, parts = np.random.default_rng(0), FORMATS["Q8_0"], ((FORMATS["Q8_0"], 64),)
    codes = random_codes(code_format, 64, 512, rng)
    codes.codes[:, 40] = code_format.zero
    packed = NATIVE_OPS.packed_codes(codes, code_format, parts, dtype).reshape(-1)
    matrix, decoded = CodedMatrix(jnp.asarray(packed), 512, parts, dtype), decode(codes, code_format)
    x = rng.normal(size=(5, 512)).astype(np.float32)
    own = np.abs(np.asarray(product(jnp.asarray(x), matrix, 64)) - x.astype(np.float64) @ decoded.T)
    x[:, 40] = 1e5
    errors = np.abs(np.asarray(product(jnp.asarray(x), matrix, 64)) - x.astype(np.float64) @ decoded.T)
    assert (errors <= own + LOST_BITS[dtype] * 1e5 * np.abs(decoded[:, 32:64]).sum(axis=1)).all()


@pytest.mark.parametrize("stored", ["Q8_0", "Q4_K+Q6_K"])
def test_an_expert_has_the_same_bits_for_any_number_of_rows(stored: str) -> None:
    """K = 1,600 is cut into two blocks, and an expert has one, few or hundreds of rows: more than a unit multiplies."""
    experts = Experts(stored, inner=1600)
    rows, routing, stream = experts.inputs(300)
    routing = replace(routing, experts=routing.experts.at[3:, 0].set(2).at[:, 1].set(4))
    together = bits(experts.add(rows, routing, stream))
    for part in (slice(0, 1), slice(3, 8), slice(270, 300)):
        of_part = replace(routing, experts=routing.experts[part], weights=routing.weights[part])
        np.testing.assert_array_equal(bits(experts.add(rows[part], of_part, stream[part])), together[part])


@pytest.mark.parametrize("vectors", VECTORS)
def test_odd_rows_stay_what_they_are(vectors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros give zeros, a NaN or an infinity a NaN in its whole row alone, and tiny and huge values are right."""
    be_vectors(monkeypatch, vectors)
    x = inputs(40, 512)
    x[3], x[5, 7], x[6, 9] = 0, np.nan, np.inf
    x[8], x[9], x[10, :32], x[11] = 1e-28 * x[7], 3e36 / x[7].max() * x[7], 0, 1e-42 * x[7]
    (found,), decoded = results([("Q8_0", 70)], 512, [x])
    np.testing.assert_array_equal(found[[3, 11]], 0)  # Magnitudes below 2⁻¹⁰⁰ count as 0.
    assert np.isnan(found[[5, 6]]).all()
    is_finite = np.isfinite(x).all(axis=1)
    assert np.isfinite(found[is_finite]).all()
    assert error(found[7:11], x[7:11], decoded) < LARGEST_ERRORS["float32"]


def test_formats_and_processors_that_multiply_no_integers_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, small_floats = ((CODE_FORMATS["Q8_0"], 64),), ((float8_format(32), 64),)
    assert code_order(parts, "bfloat16") is Order.QUADS
    assert code_order((*small_floats, *parts), "float32") is Order.VALUES
    x = inputs(5, 512)
    coded, decoded = matrices([("fp8", 64), ("Q8_0", 40)], 512, "float32")
    assert error(np.asarray(product(jnp.asarray(x), coded, 104)), x, np.asarray(decoded)) < 2e-6
    for has_avx512, needed in ((True, "avx512vnni"), (False, "avxvnni")):
        monkeypatch.setattr(integers, "host_has_avx512", lambda has_avx512=has_avx512: has_avx512)
        for has_vnni in (False, True):
            monkeypatch.setattr(integers, "host_has", lambda feature, of=(needed, has_vnni): feature == of[0] and of[1])
            assert code_order(parts, "bfloat16") is (Order.QUADS if has_vnni else Order.PAIRS)
    monkeypatch.setattr(chain_module, "has_amx_unit", lambda: True)
    assert code_order(parts, "float32") is Order.VALUES
