"""Native products of few rows on a CPU: numbers, every shape, the same bits beside any other rows, who uses them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.layers import Embedding, FusedLinear, Linear, WeightMaker
from jpaged.pallas_kernels import cpu_code, cpu_products
from jpaged.pallas_kernels.cpu_products import MOST_ROWS, product, product_by_rows

KINDS: dict[str, Callable[..., Any]] = {"columns": product, "rows": product_by_rows}
ROWS = (1, 2, 5, 6, 7, 16, MOST_ROWS)


def operands(kind: str, rows: int, depth: int, num_out: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(depth + num_out)
    shape = (depth, num_out) if kind == "columns" else (num_out, depth)
    return tuple(jnp.asarray(rng.normal(size=size), dtype) for size in ((rows, depth), shape))  # type: ignore[return-value]


def error(kind: str, x: jax.Array, weight: jax.Array) -> float:
    """Of the result, to the size of what it is a sum of."""
    exact_x, exact_weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    exact_weight = exact_weight if kind == "columns" else exact_weight.T
    found = np.asarray(jax.jit(KINDS[kind])(x, weight))
    assert found.dtype == np.float32
    assert found.shape == (len(x), exact_weight.shape[1])
    scale = np.abs(exact_x) @ np.abs(exact_weight)
    return float((np.abs(found - exact_x @ exact_weight) / scale).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("depth", "num_out"), [(576, 960), (64, 3072), (40, 32), (33, 17), (7, 258), (1536, 576), (96, 8)]
)
def test_products_are_what_they_should_be(kind: str, depth: int, num_out: int, dtype: str) -> None:
    for rows in ROWS:
        assert error(kind, *operands(kind, rows, depth, num_out, dtype)) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_long", [False, True])
def test_other_processors_multiply_as_well(
    kind: str, dtype: str, has_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those without pairs of bfloat16, with vectors of sixteen lanes and of eight."""
    monkeypatch.setattr(cpu_products, "host_has", lambda feature: False)
    monkeypatch.setattr(cpu_products, "has_long_vectors", lambda: has_long)
    monkeypatch.setattr(cpu_code, "has_long_vectors", lambda: has_long)
    for depth, num_out in ((576, 960), (64, 64), (33, 17)):
        assert error(kind, *operands(kind, 7, depth, num_out, dtype)) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_beside_any_others(kind: str, dtype: str) -> None:
    x, weight = operands(kind, MOST_ROWS, 576, 960, dtype)
    run = jax.jit(KINDS[kind])
    together = np.asarray(run(x, weight)).view(np.int32)
    for rows in ROWS:
        for first in (0, MOST_ROWS - rows):
            found = np.asarray(run(x[first : first + rows], weight)).view(np.int32)
            assert np.array_equal(found, together[first : first + rows])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "dtype", "other"),
    [
        (MOST_ROWS + 1, "float32", "float32"),
        (4, "float32", "bfloat16"),
        (4, "bfloat16", "float32"),
        (4, "int32", "int32"),
    ],
)
def test_what_native_code_would_misread_is_refused(kind: str, rows: int, dtype: str, other: str) -> None:
    x, weight = operands(kind, rows, 64, 64, "float32")
    with pytest.raises(
        ValueError, match=rf"product: got {rows} rows of {dtype} and a weight of {other}, wanted at most"
    ):
        KINDS[kind](x.astype(dtype), weight.astype(other))


def test_what_is_not_a_number_stays_in_its_row() -> None:
    for kind, run in KINDS.items():
        x, weight = operands(kind, 4, 64, 96, "float32")
        found = np.asarray(jax.jit(run)(x.at[2, 5].set(jnp.nan), weight))
        assert np.isnan(found).all(axis=1).tolist() == [False, False, True, False]
        assert np.isfinite(np.delete(found, 2, axis=0)).all()


@pytest.mark.parametrize(
    ("platform", "num_shards", "is_native"), [("cpu", 1, True), ("cpu", 2, False), ("tpu", 1, False)]
)
def test_layers_use_them_for_few_rows_on_one_cpu(platform: str, num_shards: int, is_native: bool) -> None:
    """Nobody else can: a mesh of CPUs would gather the weights for them."""
    make = WeightMaker(lambda shape, axes, fill: jnp.full(shape, 0.5), num_shards, platform)
    parts = (("a", 32), ("b", 64))
    layers = {
        "linear": Linear(64, 96, axes=("embed", "mlp"), bias=False, make=make),
        "fused": FusedLinear(64, parts, axes=("embed", "mlp"), bias=False, make=make),
        "embedding": Embedding(96, 64, make=make).logits,
    }
    for name, layer in layers.items():
        for rows in (1, MOST_ROWS, MOST_ROWS + 1):
            calls = "jpaged_product" in jax.jit(layer).lower(jnp.ones((rows, 64))).as_text()
            assert calls == (is_native and rows <= MOST_ROWS), (name, rows)
