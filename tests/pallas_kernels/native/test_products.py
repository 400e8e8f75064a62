"""Native products on a CPU: numbers, shapes, chains, the same bits beside any other rows, panels, who uses them."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product as product_of
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.models.layers import Embedding, FusedLinear, Linear, WeightMaker
from jpaged.pallas_kernels.layer_ops import XLA_OPS, Heads, LayerOps, Product, RowNorm
from jpaged.pallas_kernels.native import llvm, norms, processor
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.pallas_kernels.native.products import chain
from jpaged.pallas_kernels.native.products.chain import product
from jpaged.pallas_kernels.native.products.panels import columns_of, empty_panels, fill_panels, panels_shape
from jpaged.pallas_kernels.rotation import Rotation

DTYPES = "float32", "bfloat16"
TOLERANCES: dict[str, Any] = {"float32": {"rtol": 2e-5, "atol": 2e-5}, "bfloat16": {"rtol": 0.05, "atol": 0.05}}
"""Tolerances of the results of chains, by the dtype of the weights. Plain XLA rounds the results of each product to the
dtype of the rows, native code only what the next product reads."""
ROWS = (1, 6, 7, 13, 33, 130)
"""One batch and several, full and of two sizes, with vectors of eight and of sixteen lanes; 33 and 65 rows leave a
single row for the last tile."""
SHAPES = [(576, 960), (64, 3072), (40, 32), (33, 17), (7, 258), (1536, 576), (1700, 40), (96, 8), (1, 1)]
ALL_ROWS = [(33, 17), (1700, 40)]
"""Shapes that are multiplied with all numbers of rows: padded, and cut into blocks of K."""


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


def be_processor(monkeypatch: pytest.MonkeyPatch, *, has_pairs: bool, has_avx512: bool) -> None:
    """Have native code compiled for a processor without AMX."""
    monkeypatch.setattr(chain, "has_amx_unit", lambda: False)
    monkeypatch.setattr(chain, "host_has", lambda feature: has_pairs)
    for module in (chain, llvm):
        monkeypatch.setattr(module, "host_has_avx512", lambda: has_avx512)
    # Its results are cached by the size and the kind of a norm alone.
    monkeypatch.setattr(norms, "_handler", norms._handler.__wrapped__)


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
    for rows in ROWS if (depth, num_out) in ALL_ROWS else (5, 33):
        assert error(*operands(rows, depth, num_out, dtype)) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("has_pairs", "has_avx512"), [(False, False), (False, True), (True, True)])
def test_other_processors_multiply_as_well(
    dtype: str, has_pairs: bool, has_avx512: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processors without AMX, with and without AVX512-BF16, with vectors of sixteen lanes and of eight."""
    if has_pairs and not processor.host_has("avx512bf16"):
        pytest.skip("this processor has no products of pairs")
    be_processor(monkeypatch, has_pairs=has_pairs, has_avx512=has_avx512)
    for depth, num_out, rows in ((64, 960, 3), (33, 17, 7), (1536, 64, 40)):
        x, columns = operands(rows, depth, num_out, dtype)
        exact = np.asarray(x, np.float64) @ columns.astype(np.float64).T
        found = np.asarray(jax.jit(lambda x, w: product(x, w, num_out))(x, panels_of(columns)))  # noqa: B023
        scale = np.abs(np.asarray(x, np.float64)) @ np.abs(columns.astype(np.float64).T)
        assert (np.abs(found - exact) / scale).max() < 1e-6


@pytest.mark.parametrize("has_amx", [False, True])
def test_a_large_product_costs_few_bits_of_those_behind_it(has_amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of special tokens have such values. Added one by one, 1,535 products behind it cost 10 roundings of its size
    (here their median), and partial sums a third of that."""
    if not has_amx:
        be_processor(monkeypatch, has_pairs=False, has_avx512=processor.host_has_avx512())
    x, columns = operands(3, 1536, 64, "float32")
    x = x.at[:, 0].set(1000.0)
    exact_x, exact_weight = np.asarray(x, np.float64), columns.astype(np.float64).T
    found = np.asarray(jax.jit(lambda x, w: product(x, w, 64))(x, panels_of(columns)))
    rounding = np.abs(exact_x[:, :1] * exact_weight[:1]) * 2.0**-24
    assert np.median(np.abs(found - exact_x @ exact_weight) / rounding) < 6


STREAM, INNER, HEADS = 96, 160, 64


def weight(num_in: int, num_out: int, dtype: str) -> np.ndarray:
    """Return a random W [K, N] whose products with normed rows are of the size of these."""
    rng = np.random.default_rng(num_in + 7 * num_out)
    return np.asarray(jnp.asarray(rng.normal(size=(num_in, num_out)) / np.sqrt(num_in), dtype))


def norm(kind: str | None) -> RowNorm | None:
    gain, bias = (jnp.asarray(np.random.default_rng(seed).normal(size=STREAM), jnp.float32) for seed in (1, 2))
    return None if kind is None else RowNorm(gain, 1e-5, bias=bias if kind == "layer" else None)


CHAINS: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads": {"has_head_norms": True, "num_rotated": 24},
    "heads that are not whole panels": {"head_size": 20, "has_head_norms": True, "num_rotated": 20},
    "heads without a rotation": {"has_head_norms": True, "num_rotated": 0},
    "biases": {"has_biases": True, "front": "layer", "activation": "gelu_new", "is_gated": False},
    "gates with biases": {"has_biases": True},
    "norms behind": {"front": "rms", "behind": "rms", "activation": "gelu_pytorch_tanh"},
    "norms behind alone": {"front": None, "behind": "layer", "scale": 0.22},
    "scaled": {"scale": 0.25, "activation": "relu2", "is_gated": False},
    "an activation of XLA": {"activation": "gelu"},
    "gates that are not whole panels": {"inner": 40},
    "results that are not whole panels": {"inner": 40, "is_gated": False},
}
FAST_VECTORS = ("heads", "biases", "norms behind")
"""Chains that are also computed without a matrix unit, in the other dtype; slow tests do so with all, in both."""


def chain_of(
    ops: LayerOps,
    dtype: str,
    *,
    front: str | None = "rms",
    behind: str | None = None,
    has_biases: bool = False,
    activation: str = "silu",
    is_gated: bool = True,
    scale: float = 1.0,
    inner: int = INNER,
    head_size: int = 32,
    num_rotated: int = 32,
    has_head_norms: bool = False,
) -> Callable[[jax.Array, jax.Array], list[jax.Array]]:
    """Return a layer after attention, and the projections of the next one, as a function of its rows and the stream."""

    def a_product(num_in: int, num_out: int, **ends: Any) -> Product:
        matrix = weight(num_in, num_out, dtype)
        bias = jnp.asarray(matrix[0], jnp.float32) if has_biases else None
        return Product(weight=ops.store(jnp.asarray(matrix)), num_out=num_out, bias=bias, **ends)

    adds: dict[str, Any] = {"adds_to_stream": True, "norm_behind": norm(behind), "scale": scale}
    mlp_parts = (inner, inner) if is_gated else ()
    mlp = a_product(
        STREAM, sum(mlp_parts) or inner, norm=norm(front), activation=activation, is_gated=is_gated, parts=mlp_parts
    )
    layer = [a_product(HEADS, STREAM, **adds), mlp, a_product(inner, STREAM, **adds)]
    parts = 2 * head_size, head_size, head_size
    projections = a_product(STREAM, sum(parts), norm=norm(front), parts=parts)
    head_norm = RowNorm(jnp.linspace(0.5, 2.0, head_size), 1e-6) if has_head_norms else None

    def run(rows: jax.Array, stream: jax.Array) -> list[jax.Array]:
        (stream,) = ops.chain(rows, layer, stream)
        positions = jnp.round(rows[:, 0])  # A row's own, beside any others.
        angles = positions[:, None, None] * jnp.linspace(1.0, 0.01, num_rotated // 2)[None, None]
        rotation = Rotation(jnp.cos(angles), jnp.sin(angles)) if num_rotated else None
        heads = Heads(head_size, rotation, (head_norm, None))
        return [stream, *ops.chain(stream, [replace(projections, heads=heads)])]

    return run


def is_fast(name: str, dtype: str, has_amx: bool) -> bool:
    """Return whether each run computes this: each chain in one dtype, and some without a matrix unit in the other."""
    is_first = dtype == DTYPES[list(CHAINS).index(name) % len(DTYPES)]
    return is_first if has_amx else name in FAST_VECTORS and not is_first


@pytest.mark.parametrize(
    ("name", "dtype", "has_amx"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (not is_fast(*case)))
        for case in product_of(CHAINS, DTYPES, (True, False))
    ],
)
def test_chains_are_what_they_should_be(name: str, dtype: str, has_amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside plain XLA in float32 with the same weights; rows are rounded to bfloat16 where weights are.

    Five rows are one batch of vectors and a part of a tile, 33 several. That a row has the same bits beside any number
    of others is the next test's.
    """
    if not has_amx:
        be_processor(monkeypatch, has_pairs=processor.host_has("avx512bf16"), has_avx512=processor.host_has_avx512())
    native = jax.jit(chain_of(NATIVE_OPS, dtype, **CHAINS[name]))
    exact = jax.jit(chain_of(XLA_OPS, dtype, **CHAINS[name]))
    rng = np.random.default_rng(5)
    for num_rows in (5, 33):
        rows, stream = (rng.normal(size=(num_rows, size)).astype(np.float32) for size in (HEADS, STREAM))
        for found, wanted in zip(native(rows, stream), exact(rows, stream), strict=True):
            assert found.dtype == wanted.dtype == jnp.float32
            np.testing.assert_allclose(found, wanted, **TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        pytest.param({"behind": "rms"}, "float32", id="norm-float32"),
        pytest.param({"inner": 800}, "bfloat16", id="cut-bfloat16"),
        pytest.param({"behind": "rms"}, "bfloat16", id="norm-bfloat16", marks=pytest.mark.slow),
        pytest.param({"inner": 800}, "float32", id="cut-float32", marks=pytest.mark.slow),
    ],
)
def test_a_row_of_a_chain_has_the_same_bits_beside_any_others(options: dict[str, Any], dtype: str) -> None:
    """Also where K is cut into blocks, where units of 256 rows leave one for the last, and where three take turns."""
    run_chain = jax.jit(chain_of(NATIVE_OPS, dtype, **options))
    rng = np.random.default_rng(5)
    # Arrays of numpy: JAX would compile a program for each part that is taken of them.
    rows, stream = (rng.normal(size=(600, size)).astype(np.float32) for size in (HEADS, STREAM))
    together = [np.asarray(x).view(np.int32) for x in run_chain(rows, stream)]
    for num_rows in (*ROWS, 257, 513):
        for first in (0, 600 - num_rows):
            part = slice(first, first + num_rows)
            for found, wanted in zip(run_chain(rows[part], stream[part]), together, strict=True):
                assert np.array_equal(np.asarray(found).view(np.int32), wanted[part]), (num_rows, first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_others(dtype: str) -> None:
    """Few rows or many, in one part of a column or in several."""
    for depth in (576, 3000):
        x, columns = operands(ROWS[-1], depth, 96, dtype)
        x, panels = np.asarray(x), panels_of(columns)
        together = np.asarray(run(x, panels, 96)).view(np.int32)
        for rows in (*ROWS, 65):
            for first in (0, ROWS[-1] - rows):
                found = np.asarray(run(x[first : first + rows], panels, 96)).view(np.int32)
                assert np.array_equal(found, together[first : first + rows]), (depth, rows, first)


@pytest.mark.parametrize("dtype", ["int32", "float16"])
def test_a_dtype_that_native_code_would_misread_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=rf"product: got a weight of {dtype}, wanted float32 or bfloat16"):
        product(jnp.ones((4, 64)), jnp.ones((2, 64, 32), dtype), 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": jnp.ones(95)}, r"got weights \(95,\) of float32, wanted \(96,\)"),
        ({"norm": RowNorm(jnp.ones(63), 1e-5)}, r"got weights \(63,\) of float32, wanted \(64,\)"),
        ({"norm_behind": RowNorm(jnp.ones(95), 1e-5), "adds_to_stream": True}, r"got weights \(95,\) .*\(96,\)"),
        ({"adds_to_stream": True, "stream": jnp.ones((3, 96))}, r"got stream \(3, 96\) of float32, wanted \(4, 96\)"),
        ({"adds_to_stream": True, "stream": None}, "got no stream, wanted the one that results are added to"),
        (
            {"parts": (64, 32), "heads": Heads(32, Rotation(jnp.ones((1, 1, 16)), jnp.ones((1, 1, 16))), (None,))},
            r"got weights \(1, 16\) of float32, wanted \(4, 16\)",
        ),
        (
            {"parts": (64, 32), "heads": Heads(48, None, (RowNorm(jnp.ones(48), 1e-5),))},
            "got heads of 48 in 64 columns",
        ),
    ],
)
def test_arrays_that_native_code_would_misread_are_refused(changes: dict[str, Any], message: str) -> None:
    stream = changes.get("stream", jnp.ones((4, 96)))
    fields = {name: value for name, value in changes.items() if name != "stream"}
    each = Product(weight=NATIVE_OPS.store(jnp.ones((64, 96))), num_out=96, **fields)
    with pytest.raises(ValueError, match=message):
        NATIVE_OPS.chain(jnp.ones((4, 64)), [each], stream)


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
