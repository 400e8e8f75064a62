"""Matrices that stay codes, where they are multiplied as integers: how near results are, and that bits do not vary."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.native import llvm
from jpaged.pallas_kernels.native.products import chain as chain_module
from jpaged.pallas_kernels.native.products.chain import code_order, product
from jpaged.pallas_kernels.native.products.codes.panels import Order

from .test_codes import FORMATS, chain, matrices
from .test_products import be_processor

INTEGERS = [name for name in FORMATS if not name.startswith("fp8")]
ROWS = (1, 2, 13, 17, 40, 300)
VECTORS = {"AVX2": False, "AVX-512": True}


@pytest.fixture(autouse=True)
def has_no_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    if not llvm.host_has("avx2"):
        pytest.skip("this processor has no AVX2")
    monkeypatch.setattr(chain_module, "has_amx_unit", lambda: False)


def inputs(num_rows: int, depth: int) -> np.ndarray:
    """Return random rows, with outliers of up to 60 times the others."""
    rng = np.random.default_rng(num_rows)
    rows = rng.normal(size=(num_rows, depth)).astype(np.float32)
    rows[:, rng.permutation(depth)[:4]] *= 60
    return rows


def rounded(rows: np.ndarray) -> np.ndarray:
    """Return rows whose values are multiples of the largest magnitude of 32 neighbors ÷ 32,767."""
    blocks = rows.reshape(len(rows), -1, 32)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    integers = np.rint(blocks * (np.float32(32767) / largest))
    return (integers.astype(np.float64) * (largest * np.float32(1 / 32767))).reshape(rows.shape)


def error(found: np.ndarray, rows: np.ndarray, decoded: np.ndarray) -> float:
    """Return the largest error of rows · W as a share of the norms of a row and of a column: `decoded` is Wᵀ."""
    rows, decoded = rows.astype(np.float64), decoded.astype(np.float64)
    norms = np.linalg.norm(rows, axis=1)[:, None] * np.linalg.norm(decoded, axis=1)
    return float((np.abs(found - rows @ decoded.T) / norms).max())


def results(
    parts: Sequence[tuple[str, int]], depth: int, xs: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return x · W for each x, and Wᵀ decoded."""
    coded, decoded = matrices(parts, depth, "float32")
    assert code_order(coded.parts, "float32") is Order.WORDS
    # A new function each time: JAX would take a product that was traced for another processor.
    run = jax.jit(lambda x, weight: product(x, weight, coded.num_out))
    return [np.asarray(run(x, coded)) for x in xs], np.asarray(decoded)


@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("name", INTEGERS)
def test_products_are_those_of_rows_rounded_to_16_bits(
    name: str, vectors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rounding is all that is lost, whatever the vectors; the rest is float32's own error."""
    if VECTORS[vectors] and not llvm.host_has("avx512bw"):
        pytest.skip("this processor has no AVX-512")
    be_processor(monkeypatch, has_pairs=False, has_avx512=VECTORS[vectors])
    for num_out, depth in ((70, 512), (32, 1792)):
        xs = [inputs(num_rows, depth) for num_rows in ROWS]
        found, decoded = results([(name, num_out)], depth, xs)
        for x, each in zip(xs, found, strict=True):
            assert error(each, rounded(x), decoded) < 2e-6
            assert error(each, x, decoded) < 5e-5


@pytest.mark.parametrize("name", ["Q5_0", "Q4_K", "Q6_K", "MXFP4", "zeros of float32", "groups of 8"])
def test_bits_depend_neither_on_other_rows_nor_on_the_vectors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 9, 23 and 300 are cut into batches of all kinds: one, several alike, and of two sizes. K is cut too."""
    x = inputs(300, 1792)
    xs = [x[:1], x[:9], x[:23], x]
    by_vectors = []
    for vectors, has_avx512 in VECTORS.items():
        if vectors == "AVX-512" and not llvm.host_has("avx512bw"):
            continue
        with monkeypatch.context() as patch:
            be_processor(patch, has_pairs=False, has_avx512=has_avx512)
            found, _ = results([(name, 70)], 1792, xs)
        for each in found:
            np.testing.assert_array_equal(each, found[-1][: len(each)])
        by_vectors.append(found[-1])
    np.testing.assert_array_equal(by_vectors[0], by_vectors[-1])


def test_a_chain_packs_the_rows_of_its_next_product() -> None:
    """Matrices in several formats, a gate, and a product that is added to the stream."""
    (gate_up, wide), (down, narrow) = (
        matrices(parts, 256, "float32")
        for parts in ([("Q4_K", 256), ("Q6_K", 256)], [("Q5_0", 96), ("Q8_0", 32), ("Q4_1", 160)])
    )
    rng = np.random.default_rng(0)
    rows, stream = (rng.normal(size=(70, size)).astype(np.float32) for size in (256, 288))
    gates, ups = np.split(rows.astype(np.float64) @ np.asarray(wide, np.float64).T, 2, axis=1)
    wanted = stream + (gates / (1 + np.exp(-gates)) * ups) @ np.asarray(narrow, np.float64).T
    found = [
        np.asarray(chain(jnp.asarray(rows[:n]), [gate_up, down], (512, 288), jnp.asarray(stream[:n])))
        for n in (1, 20, 70)
    ]
    largest = np.abs(found[-1] - wanted).max(axis=1) / np.linalg.norm(wanted, axis=1)
    assert largest.max() < 1e-4
    for each in found:
        np.testing.assert_array_equal(each, found[-1][: len(each)])


def test_odd_rows_stay_what_they_are() -> None:
    """Zeros give zeros, a NaN or an infinity a NaN in its whole row alone, and tiny and huge values are right."""
    x = inputs(40, 512)
    x[3], x[5, 7], x[6, 9] = 0, np.nan, np.inf
    x[8], x[9], x[10, :32] = 1e-30 * x[7], 1e30 * x[7], 0
    (found,), decoded = results([("Q4_1", 70)], 512, [x])
    np.testing.assert_array_equal(found[3], 0)
    assert np.isnan(found[[5, 6]]).all()
    is_finite = np.isfinite(x).all(axis=1)
    assert np.isfinite(found[is_finite]).all()
    assert error(found[7:11], x[7:11], decoded) < 5e-5
