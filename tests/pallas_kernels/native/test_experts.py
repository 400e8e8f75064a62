"""Native products of experts: the bits of each expert's product alone, beside any rows, and no work for others."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.code_formats import CodedMatrix
from jpaged.pallas_kernels.grouped import Routing
from jpaged.pallas_kernels.layer_ops import XLA_OPS, ExpertProducts, Product, RowNorm, StoredMatrix
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS

from .test_codes import format_of, random_part
from .test_products import DTYPES, TOLERANCES, be_processor

DEPTH, INNER, WIDTH = 64, 96, 72
"""Columns of the rows, of what is activated, and of the stream: no whole panels."""
SCALE = 0.5
MAX_ROWS = 300
ROWS = 1, 5, MAX_ROWS
"""With 4 experts, 300 rows give each about 120: several batches."""
AVX2, AVX512 = ({"has_pairs": False, "has_avx512": has_avx512} for has_avx512 in (False, True))


def matrices(stored: str, num_experts: int, num_in: int, num_out: int) -> tuple[StoredMatrix, list[StoredMatrix]]:
    """Return matrices [num_in, num_out] side by side, as experts store them, and each of them alone.

    Of codes in two formats, joined by a plus sign, the first half of each matrix has one and the second half the other.
    """
    num_columns = NATIVE_OPS.expert_columns(num_out)
    if stored in DTYPES:
        rng = np.random.default_rng(num_in + num_out)
        weights = jnp.asarray(rng.normal(size=(num_experts, num_in, num_out)) / np.sqrt(num_in), stored)
        padded = jnp.pad(weights, ((0, 0), (0, 0), (0, num_columns - num_out)))
        together = NATIVE_OPS.store(jnp.concatenate(list(padded), axis=1))
        assert together.shape == NATIVE_OPS.experts_shape(num_experts, num_in, num_out, stored)
        return together, [NATIVE_OPS.store(each) for each in weights]
    names = stored.split("+")
    dtype, size = "bfloat16" if "_K" in stored else "float32", num_columns // len(names)
    by_name, parts = [], tuple((format_of(name, num_in), size) for name in names)
    for name in names:
        codes, _ = random_part(name, num_experts * size, num_in)
        by_name.append(np.split(NATIVE_OPS.packed_codes(codes, format_of(name, num_in), parts, dtype), num_experts))
    of_experts = [np.concatenate([panels.reshape(-1) for panels in each]) for each in zip(*by_name, strict=True)]
    # The last column of one matrix alone need not end a panel.
    parts_alone = (*parts[:-1], (parts[-1][0], size - num_columns + num_out))
    alone = [CodedMatrix(jnp.asarray(each), num_in, parts_alone, dtype) for each in of_experts]
    return CodedMatrix(jnp.asarray(np.concatenate(of_experts)), num_in, parts * num_experts, dtype), alone


class Experts:
    """E experts, together and each alone."""

    def __init__(
        self,
        stored: str = "float32",
        num_experts: int = 4,
        *,
        activation: str = "silu",
        is_gated: bool = True,
        has_biases: bool = False,
        inner: int = INNER,
        behind: RowNorm | None = None,
    ) -> None:
        # Blocks of Q4_K and Q6_K have 256 numbers along the rows.
        self.depth, inner = (256, 256) if "_K" in stored else (DEPTH, inner)
        parts = (inner, inner) if is_gated else ()
        num_inner, self.num_experts = sum(parts) or inner, num_experts
        gate_up, self.gate_ups = matrices(stored, num_experts, self.depth, num_inner)
        down, self.downs = matrices(stored.split("+")[0], num_experts, inner, WIDTH)
        rng = np.random.default_rng(7)
        self.norm = RowNorm(jnp.asarray(rng.normal(size=self.depth), jnp.float32), 1e-5)
        biases = [
            jnp.asarray(rng.normal(size=(num_experts, size)), jnp.float32) if has_biases else None
            for size in (num_inner, WIDTH)
        ]
        gates: dict[str, Any] = {"parts": parts, "activation": activation, "is_gated": is_gated}
        self.products = ExpertProducts(
            gate_up=Product(weight=gate_up, num_out=num_inner, bias=biases[0], **gates),
            down=Product(weight=down, num_out=WIDTH, bias=biases[1], scale=SCALE, norm_behind=behind),
            num_experts=num_experts,
        )

    def alone(self, expert: int) -> list[Product]:
        """Return the products of one expert, with its own matrices, and the norm of the rows that they read."""
        gate_up = replace(self.products.gate_up, norm=self.norm)
        products = zip((gate_up, self.products.down), (self.gate_ups, self.downs), strict=True)
        return [
            replace(each, weight=weights[expert], bias=None if each.bias is None else each.bias[expert])
            for each, weights in products
        ]

    def expected(self, rows: np.ndarray, routing: Routing, stream: np.ndarray) -> np.ndarray:
        """Return the stream plus sums of what each expert's chain alone gives, in the order of the choices."""
        chosen, factors = np.asarray(routing.experts), np.asarray(routing.weights)
        used = [expert for expert in np.unique(chosen) if expert < self.num_experts]
        # Always as many rows: code is compiled for each number of rows in a batch, and gives the same bits.
        padded = np.pad(rows, ((0, MAX_ROWS - len(rows)), (0, 0)))
        results = {expert: np.asarray(NATIVE_OPS.chain(padded, self.alone(expert))[0]) for expert in used}
        total = np.zeros(stream.shape, np.float32)
        for choice in range(chosen.shape[1]):
            for expert in used:
                is_chosen = chosen[:, choice] == expert
                total[is_chosen] += results[expert][: len(rows)][is_chosen] * factors[is_chosen, choice, None]
        return np.asarray(stream) + np.float32(SCALE) * total

    def add(self, rows: np.ndarray, routing: Routing, stream: np.ndarray) -> np.ndarray:
        """Return what the experts make of rows, which are normed first, added to the stream."""

        # A new function each time: JAX would take one that was traced for another processor.
        @jax.jit
        def add(rows: jax.Array, routing: Routing, stream: jax.Array) -> jax.Array:
            return NATIVE_OPS.add_experts(NATIVE_OPS.norm(rows, self.norm), routing, self.products, stream)

        return np.asarray(add(rows, routing, stream))

    def inputs(self, num_rows: int, num_chosen: int = 2) -> tuple[np.ndarray, Routing, np.ndarray]:
        """Return random rows, their choices, some of which are of no expert, and a stream.

        Rows and stream are arrays of numpy: JAX would compile a program for each part that tests take of them.
        """
        rng = np.random.default_rng(num_rows)
        rows, stream = (rng.normal(size=(num_rows, size)).astype(np.float32) for size in (self.depth, WIDTH))
        experts = np.stack([rng.permutation(self.num_experts + 1)[:num_chosen] for _ in range(num_rows)])
        factors = rng.random((num_rows, num_chosen))
        return rows, Routing(jnp.asarray(experts, jnp.int32), jnp.asarray(factors, jnp.float32)), stream


def bits(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32).view(np.int32)


@pytest.mark.parametrize(
    ("stored", "num_experts"),
    [
        ("float32", 4),
        ("bfloat16", 60),
        ("Q4_K+Q6_K", 4),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("float32", 60), ("bfloat16", 4), ("Q4_K", 4), ("Q8_0", 4), ("MXFP4", 4))
        ),
    ],
)
def test_rows_have_the_bits_of_their_experts_alone(stored: str, num_experts: int) -> None:
    """Where many rows have chosen an expert, and where most experts have few rows or none."""
    experts = Experts(stored, num_experts, has_biases=True)
    for num_rows in ROWS if stored in DTYPES else (1, 40):
        inputs = experts.inputs(num_rows, 4 if num_experts > 4 else 2)
        np.testing.assert_array_equal(bits(experts.add(*inputs)), bits(experts.expected(*inputs)), str(num_rows))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "features"),
    [("float32", AVX2), ("bfloat16", AVX2), ("Q8_0", AVX2), ("bfloat16", AVX512)],
    ids=["float32", "bfloat16", "Q8_0", "bfloat16 in long vectors"],
)
def test_other_processors_give_the_bits_of_experts_alone(
    stored: str, features: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_processor(monkeypatch, **features)
    experts = Experts(stored)
    for num_rows in (5, 40):
        inputs = experts.inputs(num_rows)
        np.testing.assert_array_equal(bits(experts.add(*inputs)), bits(experts.expected(*inputs)))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: str) -> None:
    """Also where K is cut into blocks, and where an expert has more rows than a unit of work multiplies."""
    experts = Experts(dtype, num_experts=2, inner=1600)
    rows, routing, stream = experts.inputs(400)
    together = bits(experts.add(rows, routing, stream))
    for first, num_rows in ((0, 1), (7, 2), (100, 16), (399, 1)):
        part = slice(first, first + num_rows)
        found = experts.add(*jax.tree.map(lambda x: x[part], (rows, routing, stream)))  # noqa: B023
        np.testing.assert_array_equal(bits(found), together[part])


@pytest.mark.parametrize("stored", [*DTYPES, pytest.param("Q8_0", marks=pytest.mark.slow), "Q4_K+Q6_K"])
def test_experts_that_no_row_has_chosen_may_hold_nan(stored: str) -> None:
    """As numbers, or as the scales of codes."""
    experts = Experts(stored, has_biases=True)
    rows, routing, stream = experts.inputs(40)
    routing = replace(routing, experts=jnp.where(routing.experts == 1, 4, routing.experts))
    wanted = experts.add(rows, routing, stream)
    for product in (experts.products.gate_up, experts.products.down):
        is_coded = isinstance(product.weight, CodedMatrix)
        array = product.weight.data if is_coded else product.weight
        size = array.shape[0] // 4
        spoilt = array.at[size : 2 * size].set(255 if is_coded else np.nan)  # Bytes of 255 are a NaN in float16.
        object.__setattr__(product, "weight", replace(product.weight, data=spoilt) if is_coded else spoilt)
    np.testing.assert_array_equal(bits(experts.add(rows, routing, stream)), bits(wanted))


def test_rows_of_no_expert_keep_their_stream() -> None:
    """Padding: such a row may hold NaN, and its stream keeps its bits, also those of minus zero."""
    experts = Experts()
    rows, routing, stream = experts.inputs(40)
    wanted = np.array(experts.add(rows, routing, stream))
    rows[7:9] = np.nan
    stream[7] = -0.0
    routing = replace(routing, experts=routing.experts.at[7:9].set(4))
    wanted[7:9] = stream[7:9]
    np.testing.assert_array_equal(bits(experts.add(rows, routing, stream)), bits(wanted))
    none = replace(routing, experts=jnp.full_like(routing.experts, 4))
    np.testing.assert_array_equal(bits(experts.add(rows, none, stream)), bits(stream))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_rows_to_one_expert_are_a_dense_chain(dtype: str) -> None:
    experts = Experts(dtype, has_biases=True)
    for num_rows in (1, 300):
        rows, _, stream = experts.inputs(num_rows)
        routing = Routing(jnp.full((num_rows, 1), 2, jnp.int32), jnp.ones((num_rows, 1), jnp.float32))
        gate_up, down = experts.alone(2)
        wanted = NATIVE_OPS.chain(rows, [gate_up, replace(down, adds_to_stream=True)], stream)[0]
        np.testing.assert_array_equal(bits(experts.add(rows, routing, stream)), bits(wanted))


OPTIONS: dict[str, dict[str, Any]] = {
    "clamped gates": {"activation": "clamped_swiglu", "has_biases": True},
    "no gates": {"activation": "relu2", "is_gated": False, "has_biases": True},
    "a norm behind": {"behind": RowNorm(jnp.linspace(0.5, 2, WIDTH), 1e-5)},
    "a layer norm behind": {"behind": RowNorm(jnp.linspace(0.5, 2, WIDTH), 1e-5, bias=jnp.linspace(-1, 1, WIDTH))},
    "an activation of XLA": {"activation": "gelu", "has_biases": True},
    "gates that are not whole panels": {"inner": 40},
}


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in OPTIONS), ("clamped gates", "bfloat16")])
def test_experts_are_those_of_plain_xla(name: str, dtype: str) -> None:
    experts = Experts(dtype, **OPTIONS[name])
    gate_up, down = experts.products.gate_up, experts.products.down

    def plain(product: Product, num_in: int) -> Product:
        columns = NATIVE_OPS.columns(product.weight, jnp.arange(4 * NATIVE_OPS.expert_columns(product.num_out)), num_in)
        weight = columns.reshape(4, -1, num_in)[:, : product.num_out].transpose(0, 2, 1)
        return replace(product, weight=weight)

    inner = gate_up.num_out // 2 if gate_up.is_gated else gate_up.num_out
    products = replace(experts.products, gate_up=plain(gate_up, experts.depth), down=plain(down, inner))

    @jax.jit
    def plain_xla(rows: jax.Array, routing: Routing, stream: jax.Array) -> jax.Array:
        return XLA_OPS.add_experts(XLA_OPS.norm(rows, experts.norm), routing, products, stream)

    for num_rows in (1, 40):
        rows, routing, stream = experts.inputs(num_rows)
        if num_rows > 1:  # A row of no expert has a sum of zeros.
            routing = replace(routing, experts=routing.experts.at[1].set(4))
        wanted = plain_xla(rows, routing, stream)
        np.testing.assert_allclose(experts.add(rows, routing, stream), wanted, **TOLERANCES[dtype])


def test_arrays_that_native_code_would_misread_are_refused() -> None:
    experts = Experts(has_biases=True)
    rows, routing, stream = experts.inputs(4)
    with pytest.raises(ValueError, match=r"got choices \(3, 2\), wanted \[4, k\]"):
        experts.add(rows, replace(routing, experts=routing.experts[:3]), stream)
    with pytest.raises(ValueError, match=r"got choices \(4, 1\), wanted \[4, k\]"):
        experts.add(rows, replace(routing, weights=routing.weights[:, :1]), stream)
    experts.products = replace(experts.products, num_experts=3)
    with pytest.raises(ValueError, match=r"got a weight of shape \(24, 64, 32\), wanted \(18, 64, 32\)"):
        experts.add(rows, routing, stream)
