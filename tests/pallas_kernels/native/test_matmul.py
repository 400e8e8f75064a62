"""Native products on a CPU: numbers, every shape, the same bits beside any other rows, panels, who uses them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.models.layers import Embedding, FusedLinear, Linear, WeightMaker
from jpaged.pallas_kernels.layer_ops import XLA_OPS, LayerOps
from jpaged.pallas_kernels.native import matmul
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.pallas_kernels.native.matmul import columns_of, empty_panels, fill_panels, panels_shape, product

DTYPES = "float32", "bfloat16"
ROWS = (1, 2, 5, 6, 7, 12, 13, 16, 25, 37, 130)
SHAPES = [(576, 960), (64, 3072), (40, 32), (33, 17), (7, 258), (1536, 576), (1700, 40), (96, 8), (1, 1)]


def panels_of(columns: np.ndarray, *, rows_at_once: int = 45) -> jax.Array:
    """Return W [K, N] in panels, filled from `columns` [N, K] in parts, as a checkpoint is read; the padding is NaN."""
    num_out, depth = columns.shape
    buffer = np.full(panels_shape(depth, num_out, columns.dtype), np.nan, columns.dtype)
    panels = empty_panels(depth, num_out, buffer)
    for first in range(0, num_out, rows_at_once):
        fill_panels(panels, first, columns[first : first + rows_at_once])
    return jnp.asarray(panels)


def operands(rows: int, depth: int, num_out: int, dtype: str) -> tuple[jax.Array, np.ndarray]:
    """Return random x [R, K] and the columns of W [N, K]."""
    rng = np.random.default_rng(depth + num_out)
    x = jnp.asarray(rng.normal(size=(rows, depth)), dtype)
    return x, np.asarray(jnp.asarray(rng.normal(size=(num_out, depth)), dtype))


run = jax.jit(product, static_argnums=2)


def error(x: jax.Array, columns: np.ndarray) -> float:
    """Return the largest error of x · W, relative to the sum of its terms' absolute values."""
    exact_x, exact_weight = np.asarray(x, np.float64), columns.astype(np.float64).T
    found = np.asarray(run(x, panels_of(columns), len(columns)))
    assert found.dtype == np.float32
    assert found.shape == (len(x), len(columns))
    scale = np.abs(exact_x) @ np.abs(exact_weight)
    return float((np.abs(found - exact_x @ exact_weight) / scale).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "num_out"), SHAPES)
def test_products_are_what_they_should_be(depth: int, num_out: int, dtype: str) -> None:
    for rows in ROWS:
        assert error(*operands(rows, depth, num_out, dtype)) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("has_pairs", "has_avx512"), [(False, False), (False, True), (True, True)])
def test_other_processors_multiply_as_well(
    dtype: str, has_pairs: bool, has_avx512: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processors without AMX, with and without AVX512-BF16, with vectors of sixteen lanes and of eight."""
    if has_pairs and not matmul.host_has("avx512bf16"):
        pytest.skip("this processor has no products of pairs")
    monkeypatch.setattr(matmul, "has_amx_unit", lambda: False)
    monkeypatch.setattr(matmul, "host_has", lambda feature: has_pairs)
    monkeypatch.setattr(matmul, "host_has_avx512", lambda: has_avx512)
    for depth, num_out in ((576, 960), (64, 64), (33, 17), (1536, 64)):
        for rows in (3, 7, 40):
            x, columns = operands(rows, depth, num_out, dtype)
            exact = np.asarray(x, np.float64) @ columns.astype(np.float64).T
            found = np.asarray(jax.jit(lambda x, w: product(x, w, num_out))(x, panels_of(columns)))  # noqa: B023
            scale = np.abs(np.asarray(x, np.float64)) @ np.abs(columns.astype(np.float64).T)
            assert (np.abs(found - exact) / scale).max() < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_others(dtype: str) -> None:
    """Few rows or many, in one part of a column or in several."""
    for depth in (576, 3000):
        x, columns = operands(ROWS[-1], depth, 96, dtype)
        panels = panels_of(columns)
        together = np.asarray(run(x, panels, 96)).view(np.int32)
        for rows in ROWS:
            for first in (0, ROWS[-1] - rows):
                found = np.asarray(run(x[first : first + rows], panels, 96)).view(np.int32)
                assert np.array_equal(found, together[first : first + rows]), (depth, rows, first)


@pytest.mark.parametrize(
    ("dtype", "other"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("int32", "int32"), ("float16", "float16")]
)
def test_a_dtype_that_native_code_would_misread_is_refused(dtype: str, other: str) -> None:
    x, weight = jnp.ones((4, 64), dtype), jnp.ones((2, 64, 32), other)
    with pytest.raises(ValueError, match=rf"product: got rows of {dtype} and a weight of {other}, wanted both"):
        product(x, weight, 64)


@pytest.mark.parametrize("shape", [(64, 64), (2, 63, 32), (1, 64, 32), (2, 64, 16)])
def test_a_shape_that_native_code_would_misread_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"wanted \(2, 64, 32\): panels of 64 × 64"):
        product(jnp.ones((4, 64)), jnp.ones(shape), 64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_a_number_stays_in_its_row(dtype: str) -> None:
    x, columns = operands(14, 65, 96, dtype)
    found = np.asarray(run(x.at[2, 5].set(jnp.nan), panels_of(columns), 96))
    assert np.flatnonzero(np.isnan(found).all(axis=1)).tolist() == [2]
    assert np.isfinite(np.delete(found, 2, axis=0)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "num_out"), SHAPES)
@pytest.mark.parametrize("rows_at_once", [1, 31, 32, 200])
def test_columns_come_out_of_panels_as_they_went_in(depth: int, num_out: int, dtype: str, rows_at_once: int) -> None:
    _, columns = operands(1, depth, min(num_out, 300), dtype)
    panels = panels_of(columns, rows_at_once=rows_at_once)
    assert np.isfinite(np.asarray(panels, np.float32)).all(), "what is no column is zero"
    ids = np.random.default_rng(0).integers(0, len(columns), 50)
    found = jax.jit(columns_of, static_argnums=2)(panels, jnp.asarray(ids, jnp.int32), depth)
    assert found.dtype == columns.dtype
    assert np.array_equal(np.asarray(found), columns[ids])


@pytest.mark.parametrize(("ops", "is_native"), [(NATIVE_OPS, True), (XLA_OPS, False)])
def test_layers_multiply_by_the_operations_they_are_given(ops: LayerOps, is_native: bool) -> None:
    make = WeightMaker(lambda shape, axes, fill: jnp.full(shape, 0.5), 1, "float32", ops)
    parts = (("a", 32), ("b", 64))
    layers = {
        "linear": Linear(64, 96, axes=("embed", "mlp"), bias=False, make=make),
        "fused": FusedLinear(64, parts, axes=("embed", "mlp"), bias=False, make=make),
        "embedding": Embedding(96, 64, is_tied=True, make=make).logits,
    }
    for name, layer in layers.items():
        for rows in (1, 33):
            calls = "jpaged_product" in jax.jit(layer).lower(jnp.ones((rows, 64))).as_text()
            assert calls == is_native, (name, rows)


def test_a_table_that_is_only_looked_up_stays_one() -> None:
    make = WeightMaker(lambda shape, axes, fill: jnp.full(shape, 0.5), 1, "float32", NATIVE_OPS)
    table = Embedding(96, 64, is_tied=False, make=make).weight
    assert isinstance(table, nnx.Param)
    assert table.shape == (96, 64)
