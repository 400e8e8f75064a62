"""The item about experts: products of rows that choose their matrices, against the oracle and beside dense products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.pallas_kernels.grouped import Routing
from jpaged.pallas_kernels.layer_ops import ExpertProducts, LayerOps, Product, RowNorm, StoredMatrix
from jpaged.pallas_kernels.scaled_matrix import ScaledMatrix

from .items import Item, Part
from .kernel_check import random_numbers
from .kernel_items import Session
from .kernel_speed import Loop, copy_loop, matmul_loop, times

FORMATS = ("bfloat16", "int8")
"""What the matrices of experts are held in: floats, or codes with a scale for each output."""
MOST_ERROR = 2e-2
"""The most error of a row's sum, relative to its norm: gates, what they gate and their products are rounded to 8 bits,
and few of them make up a sum where shapes are tiny."""
NUM_ALONE = 4
"""Rows that are computed in the company of padding alone as well."""
NORM_EPS = 1e-6
FEW_TOKENS = 8
"""Tokens of a small step: those of a row alone are padding but one."""


@dataclass(frozen=True)
class ExpertShape:
    """Experts by their number, how many of them a row takes, the width of rows and their inner width."""

    num_experts: int = 128
    num_chosen: int = 8
    hidden: int = 2048
    inner: int = 768


MEASURED = ExpertShape()
"""A layer of Qwen3-30B-A3B."""
CHECKED = ExpertShape(60, 4, 1024, 512)
TINY_SHAPE = ExpertShape(5, 2, 16, 8)


class Layer:
    """The experts of one layer with random weights. The last expert is not a number, and no row chooses it."""

    def __init__(self, shape: ExpertShape, ops: LayerOps, format_name: str, seed: int) -> None:
        self.shape, self.ops, self.rng = shape, ops, np.random.default_rng(seed)
        self.keys = iter(jax.random.split(jax.random.key(seed), 4))
        # Both matrices, [E, D, 2 F] and [E, F, D], keep the variance of what they read.
        self.weights = [
            self._matrix(shape.hidden, 2 * shape.inner, format_name),
            self._matrix(shape.inner, shape.hidden, format_name),
        ]

    def _matrix(self, num_in: int, num_out: int, format_name: str) -> StoredMatrix:
        shape = self.ops.experts_shape(self.shape.num_experts, num_in, num_out, "bfloat16")
        factor = num_in**-0.5
        if format_name == "int8":
            scales = jnp.full((shape[0], shape[2]), factor / 60, jnp.float32).at[-1].set(jnp.nan)
            return ScaledMatrix(random_numbers(next(self.keys), shape, jnp.int8), scales, False, "bfloat16")
        return (random_numbers(next(self.keys), shape, jnp.bfloat16) * jnp.bfloat16(factor)).at[-1].set(jnp.nan)

    def rows(self, num_tokens: int) -> jax.Array:
        """Return random rows [T, D]."""
        key = jax.random.key(int(self.rng.integers(1 << 31)))
        return random_numbers(key, (num_tokens, self.shape.hidden), jnp.bfloat16)

    def routing(self, num_tokens: int, num_real: int) -> Routing:
        """Return random choices of the first rows, each of other experts than the last; the others choose none."""
        num_experts, num_chosen = self.shape.num_experts, self.shape.num_chosen
        chosen = np.full((num_tokens, num_chosen), num_experts, np.int32)
        for row in range(num_real):
            chosen[row] = self.rng.choice(num_experts - 1, num_chosen, replace=False)
        weights = self.rng.uniform(0.1, 1, (num_tokens, num_chosen)) / num_chosen
        return Routing(jnp.asarray(chosen), jnp.asarray(weights, jnp.float32))

    def expected(self, rows: jax.Array, routing: Routing, num_real: int) -> np.ndarray:
        """Return the sums of the first rows' experts, [R, D], by numpy in float64 with every product in full."""
        found = np.zeros((num_real, self.shape.hidden))
        numbers, chosen = np.asarray(rows[:num_real], np.float64), np.asarray(routing.experts)[:num_real]
        factors = np.asarray(routing.weights, np.float64)
        for expert in np.unique(chosen):
            of_rows, choices = np.nonzero(chosen == expert)
            gate_up, down = (decoded(weight, expert) for weight in self.weights)
            gates, ups = np.split((numbers[of_rows] @ gate_up)[:, : 2 * self.shape.inner], 2, axis=1)
            results = (gates / (1 + np.exp(-gates)) * ups) @ down
            found[of_rows] += factors[of_rows, choices, None] * results[:, : self.shape.hidden]
        return found


def decoded(weight: Any, expert: int) -> np.ndarray:
    """Return an expert's matrix [in, out] in float64."""
    if isinstance(weight, ScaledMatrix):
        return np.asarray(weight.codes[expert], np.float64) * np.asarray(weight.scales[expert], np.float64)
    return np.asarray(weight[expert], np.float64)


def products_of(shape: ExpertShape, weights: Any) -> ExpertProducts:
    """Return both products of all experts, with gates of silu."""
    inner = shape.inner
    gated: dict[str, Any] = {"parts": (inner, inner), "activation": "silu", "is_gated": True}
    return ExpertProducts(
        gate_up=Product(weight=weights[0], num_out=2 * inner, **gated),
        down=Product(weight=weights[1], num_out=shape.hidden),
        num_experts=shape.num_experts,
    )


@partial(jax.jit, static_argnums=(0, 1))
def sums(ops: LayerOps, shape: ExpertShape, rows: jax.Array, routing: Routing, weights: Any) -> jax.Array:
    """Return the weighted sums of what each row's experts give, in float32."""
    return ops.sum_of_experts(rows, routing, products_of(shape, weights))


def first_real(num_tokens: int) -> int:
    """Return how many of a step's tokens are no padding."""
    return num_tokens - num_tokens // 8


def error_of(session: Session, format_name: str) -> float:
    """Return the largest error of a row's sum of experts, relative to its norm, in a small and a larger step.

    Raises FloatingPointError if an expert that no row chose, or padding, reaches a result, and RuntimeError if the same
    step gives other bits when it is run again.
    """
    shape, most = (TINY_SHAPE, 24) if session.is_tiny else (CHECKED, 320)
    ops = session.backend_of(session.case).layer_ops
    layer, found = Layer(shape, ops, format_name, session.seed), 0.0
    for num_tokens in (FEW_TOKENS, most):
        num_real = first_real(num_tokens)
        rows, routing = layer.rows(num_tokens), layer.routing(num_tokens, num_real)
        got = np.asarray(sums(ops, shape, rows, routing, layer.weights))
        for _ in range(session.num_repeats):
            if np.asarray(sums(ops, shape, rows, routing, layer.weights)).tobytes() != got.tobytes():
                raise RuntimeError("the same step gives other bits when it is run again")
        if np.any(got[num_real:]) or not np.isfinite(got).all():
            raise FloatingPointError("padding, or an expert that no row chose, reaches a result")
        wanted = layer.expected(rows, routing, num_real)
        errors = np.linalg.norm(got[:num_real] - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
        found = max(found, float(errors.max()))
    return found


def company(layer: Layer, num_tokens: int) -> dict[str, float]:
    """Return how rows alone differ from the same rows in a full step: the share with equal bits, and the most error."""
    ops, shape = layer.ops, layer.shape
    rows, routing = layer.rows(num_tokens), layer.routing(num_tokens, num_tokens)
    together = np.asarray(sums(ops, shape, rows, routing, layer.weights))[:NUM_ALONE]
    alone = []
    for row in range(NUM_ALONE):
        chosen = jnp.full((FEW_TOKENS, shape.num_chosen), shape.num_experts, jnp.int32).at[0].set(routing.experts[row])
        weights = jnp.zeros(chosen.shape, jnp.float32).at[0].set(routing.weights[row])
        own = jnp.zeros((FEW_TOKENS, shape.hidden), rows.dtype).at[0].set(rows[row])
        alone.append(np.asarray(sums(ops, shape, own, Routing(chosen, weights), layer.weights))[0])
    errors = np.linalg.norm(np.stack(alone) - together, axis=-1) / np.linalg.norm(together, axis=-1)
    is_equal = [one.tobytes() == other.tobytes() for one, other in zip(alone, together, strict=True)]
    return {"equal bits in company": float(np.mean(is_equal)), "difference in company": float(errors.max())}


def experts_loop(layer: Layer, num_tokens: int) -> Loop:
    """Return a loop over the experts of a layer, with random rows that all choose some."""
    ops, shape = layer.ops, layer.shape

    def body(rows: Any, routing: Routing, gain: Any, weights: Any) -> Any:
        normed = ops.norm(rows, RowNorm(gain, NORM_EPS))
        return ops.add_experts(normed, routing, products_of(shape, weights), rows)

    gain = jnp.ones(shape.hidden, jnp.bfloat16)
    return Loop(body, layer.rows(num_tokens), (layer.routing(num_tokens, num_tokens), gain, layer.weights))


def dense_loop(layer: Layer, num_tokens: int, num_experts: int) -> Loop:
    """Return a loop over one MLP that is as wide as so many experts, with random rows and weights."""
    ops, hidden, inner = layer.ops, layer.shape.hidden, num_experts * layer.shape.inner

    def body(rows: Any, gain: Any, weights: Any) -> Any:
        both = products_of(ExpertShape(1, 1, hidden, inner), weights)
        gate_up = replace(both.gate_up, norm=RowNorm(gain, NORM_EPS))
        return ops.chain(rows, [gate_up, replace(both.down, adds_to_stream=True)], rows)[0]

    weights = [
        random_numbers(jax.random.key(each), ops.matrix_shape(*sizes, "bfloat16"), jnp.bfloat16)
        * jnp.bfloat16(sizes[0] ** -0.5)
        for each, sizes in enumerate(((hidden, 2 * inner), (inner, hidden)))
    ]
    return Loop(body, layer.rows(num_tokens), (jnp.ones(hidden, jnp.bfloat16), weights))


def measure_experts(session: Session) -> dict[str, Any]:
    """Measure a decode step's bytes of chosen experts a second, and a prompt's operations a second.

    They stand beside those of a copy and of a product of matrices, and beside one dense MLP of as many bytes, or
    operations. Also how far a row's sum is from that of the row alone.
    """
    shape, num_rows, num_prompt = (TINY_SHAPE, 4, 8) if session.is_tiny else (MEASURED, 16, 4096)
    layer = Layer(shape, session.backend_of(session.case).layer_ops, "bfloat16", session.seed)
    decode, prompt = experts_loop(layer, num_rows), experts_loop(layer, num_prompt)
    num_chosen, sizes = len(np.unique(decode.others[0].experts)), session.sizes
    loops = {"decode": decode, "dense decode": dense_loop(layer, num_rows, num_chosen)}
    loops |= {"prompt": prompt, "dense prompt": dense_loop(layer, num_prompt, shape.num_chosen)}
    loops |= {"copy": copy_loop(sizes.copied_bytes), "matmul": matmul_loop(sizes.matmul)}
    seconds = times(loops, sizes).seconds
    numbers = 3 * shape.hidden * shape.inner
    bytes_per_s = 2 * num_chosen * numbers / seconds["decode"]
    flops_per_s = 2 * num_prompt * shape.num_chosen * numbers / seconds["prompt"]
    return {
        "experts ÷ copy": bytes_per_s / (2 * sizes.copied_bytes / seconds["copy"]),
        "experts ÷ product": flops_per_s / (2 * sizes.matmul**3 / seconds["matmul"]),
        "decode ÷ dense": seconds["decode"] / seconds["dense decode"],
        "prompt ÷ dense": seconds["prompt"] / seconds["dense prompt"],
        "chosen experts": num_chosen,
        "bytes_per_s": bytes_per_s,
        "flops_per_s": flops_per_s,
        "seconds": seconds,
        **company(layer, num_rows),
    }


def experts_item() -> Item:
    """Return the item: a case for each format of weights, and the measurement."""

    def parts(session: Session) -> dict[str, Part]:
        checks = {f"experts, {name}": Part(partial(error_of, session, name), MOST_ERROR) for name in FORMATS}
        return checks | {"experts": Part(partial(measure_experts, session))}

    about = "rows that choose experts: against the oracle; decode ÷ copy, prompt ÷ product"
    return Item("experts", 1.0, about, parts)
