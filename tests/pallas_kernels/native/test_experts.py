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
from jpaged.pallas_kernels.native.products.panels import PANEL

from .test_codes import format_of, random_part
from .test_products import TOLERANCES, be_processor

DEPTH, INNER, WIDTH = 64, 96, 72
"""Columns of the rows, of what is activated, and of the stream: no whole panels."""
STORED = "float32", "bfloat16", "Q8_0", "Q4_K"
PROCESSORS = {
    "this": None,
    "AVX2": {"has_pairs": False, "has_avx512": False},
    "AVX-512": {"has_pairs": False, "has_avx512": True},
}


def matrices(stored: str, num_experts: int, num_in: int, num_out: int) -> tuple[StoredMatrix, list[StoredMatrix]]:
    """Return matrices [num_in, num_out] side by side, as experts store them, and each of them alone."""
    num_columns = NATIVE_OPS.expert_columns(num_out)
    if stored in ("float32", "bfloat16"):
        rng = np.random.default_rng(num_in + num_out)
        weights = jnp.asarray(rng.normal(size=(num_experts, num_in, num_out)) / np.sqrt(num_in), stored)
        padded = jnp.pad(weights, ((0, 0), (0, 0), (0, num_columns - num_out)))
        together = NATIVE_OPS.store(jnp.concatenate(list(padded), axis=1))
        assert together.shape == NATIVE_OPS.experts_shape(num_experts, num_in, num_out, stored)
        return together, [NATIVE_OPS.store(each) for each in weights]
    code_format, packed = format_of(stored, num_in), list[np.ndarray]()
    for expert in range(num_experts):
        codes, _ = random_part(stored, num_columns, num_in + 0 * expert)
        codes = replace(codes, codes=np.roll(codes.codes, expert, axis=0))
        packed.append(NATIVE_OPS.packed_codes(codes, code_format, "float32").reshape(-1))

    def matrix(data: np.ndarray, *sizes: int) -> CodedMatrix:
        return CodedMatrix(jnp.asarray(data), num_in, tuple((code_format, size) for size in sizes), "float32")

    together = matrix(np.concatenate(packed), *[num_columns] * num_experts)
    return together, [matrix(each, num_out) for each in packed]


class Experts:
    """E experts, together and each alone."""

    def __init__(self, stored: str, num_experts: int, *, activation: str = "silu", has_biases: bool = False) -> None:
        # Codes lie in blocks along the rows.
        self.depth, inner = (256, 256) if stored == "Q4_K" else (DEPTH, INNER)
        gate_up, self.gate_ups = matrices(stored, num_experts, self.depth, 2 * inner)
        down, self.downs = matrices(stored, num_experts, inner, WIDTH)
        self.num_experts = num_experts
        rng = np.random.default_rng(7)
        norm = RowNorm(jnp.asarray(rng.normal(size=self.depth), jnp.float32), 1e-5)
        gates: dict[str, Any] = {"parts": (inner, inner), "activation": activation, "is_gated": True, "norm": norm}
        self.gate_up_bias, self.down_bias = (
            jnp.asarray(rng.normal(size=(num_experts, size)), jnp.float32) if has_biases else None
            for size in (2 * inner, WIDTH)
        )
        self.products = ExpertProducts(
            gate_up=Product(weight=gate_up, num_out=2 * inner, bias=self.gate_up_bias, **gates),
            down=Product(weight=down, num_out=WIDTH, bias=self.down_bias, scale=0.5),
            num_experts=num_experts,
        )

    def results_of(self, expert: int, rows: jax.Array) -> np.ndarray:
        """Return what the chain of an expert's products alone makes of rows."""
        biases = (None if each is None else each[expert] for each in (self.gate_up_bias, self.down_bias))
        weights = self.gate_ups[expert], self.downs[expert]
        gate_up, down = (
            replace(each, weight=weight, bias=bias)
            for each, weight, bias in zip(
                (self.products.gate_up, self.products.down), weights, biases, strict=True
            )
        )
        return np.asarray(NATIVE_OPS.chain(rows, [gate_up, down])[0])

    def expected(self, rows: jax.Array, routing: Routing, stream: jax.Array) -> np.ndarray:
        """Return the stream plus the sums of these results, times their factors, in the order of the choices."""
        chosen, factors = np.asarray(routing.experts), np.asarray(routing.weights)
        total = np.zeros(stream.shape, np.float32)
        results = {expert: self.results_of(expert, rows) for expert in np.unique(chosen) if expert < self.num_experts}
        for choice in range(chosen.shape[1]):
            for row, expert in enumerate(chosen[:, choice]):
                if expert < self.num_experts:
                    total[row] += results[expert][row] * factors[row, choice]
        return np.asarray(stream) + np.float32(0.5) * total

    def add(self, rows: jax.Array, routing: Routing, stream: jax.Array) -> np.ndarray:
        return np.asarray(jax.jit(lambda *args: NATIVE_OPS.add_experts(args[0], args[1], self.products, args[2]))(
            rows, routing, stream
        ))

    def inputs(self, num_rows: int, num_chosen: int, *, num_used: int | None = None) -> tuple[Any, ...]:
        """Return random rows, choices among `num_used` experts without repetition, and a stream."""
        rng = np.random.default_rng(num_rows)
        rows, stream = (jnp.asarray(rng.normal(size=(num_rows, n)), jnp.float32) for n in (self.depth, WIDTH))
        num_used = num_used or self.num_experts
        experts = np.stack([rng.permutation(num_used)[:num_chosen] for _ in range(num_rows)])
        factors = jnp.asarray(rng.random((num_rows, num_chosen)), jnp.float32)
        return rows, Routing(jnp.asarray(experts, jnp.int32), factors), stream


def bits(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32).view(np.int32)
