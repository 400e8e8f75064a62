"""How far the decode kernel's loops are unrolled: as far as the registers of a TPU core hold what is computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from .lanes import Scalar

MAX_UNROLLED_PRODUCTS, MAX_UNROLLED_ROWS, MAX_UNROLLED_HEADS = 8, 160, 32
"""Products, rows of scores and KV heads in one loop body; with more, the compiler spills registers."""


def tail_rows_together(dtype: np.dtype[Any]) -> int:
    """Return the rows of a block whose tails are computed together; more of them do not fit into registers.

    `dtype` is that of the pages, or float32 if products are computed in float32.
    """
    return 1 if dtype == jnp.float32 else 2


def max_unrolled_products(rows: int, heads: int, dtype: np.dtype[Any]) -> int:
    """Return how many products of `rows` rows and `heads` KV heads may stand in one stretch of instructions.

    With more, the compiler spills registers. `dtype` is as in `tail_rows_together`. A product in float32 takes six
    passes, of three parts of each number; float8 numbers are widened in many steps.
    """
    limit = {"float32": 1, "float8_e4m3fn": MAX_UNROLLED_PRODUCTS // 2}.get(dtype.name, MAX_UNROLLED_PRODUCTS)
    max_heads = MAX_UNROLLED_HEADS // 2 if dtype.name == "int8" else MAX_UNROLLED_HEADS
    return max(min(limit, MAX_UNROLLED_ROWS // rows, max_heads // heads), 1)


def unroll_factor(num_iterations: int, max_unroll: int) -> int:
    """Return how many iterations stand in one loop body: all if `max_unroll` allows it, else a divisor of their number.

    Example: 12 iterations with `max_unroll` 8 are unrolled by gcd(12, 8) = 4, in a loop of 3.
    """
    return num_iterations if num_iterations <= max_unroll else math.gcd(num_iterations, max(max_unroll, 1))


def unrolled_loop(num_iterations: int, max_unroll: int, do: Callable[[Any], None]) -> None:
    """Call `do(0)` … `do(num_iterations − 1)`, unrolled by `unroll_factor`; without a loop if that is all of them.

    `do` takes a Python integer without a loop, else a traced one.
    """
    unroll = unroll_factor(num_iterations, max_unroll)

    def unrolled_body(loop_index: Scalar) -> None:
        for index in range(unroll):
            do(loop_index * unroll + index)

    if unroll == num_iterations:
        unrolled_body(0)
    else:
        pl.loop(0, num_iterations // unroll)(unrolled_body)
