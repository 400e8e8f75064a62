"""The loop over tiles multiplies at most the rows that have chosen, and a tile for each expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.pallas_kernels.grouped import MAX_TILE, grouped_product, tile_rows


def equations(jaxpr):
    """Yield all equations of a program, those of its loops and branches too, with how often each is computed."""
    for equation in jaxpr.eqns:
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        yield equation, 1
        for value in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from ((found, times * count) for found, count in equations(inner))


@pytest.mark.parametrize(("num_rows", "num_experts"), [(1, 8), (16, 128), (512, 8), (4096, 60)])
def test_products_have_the_rows_of_the_choices_and_a_tile_an_expert(num_rows, num_experts):
    rows, weight = jnp.zeros((num_rows, 24)), jnp.zeros((num_experts, 24, 40))
    traced = jax.make_jaxpr(grouped_product)(rows, weight, jnp.zeros(num_experts, jnp.int32))
    multiplied = [
        times * equation.outvars[0].aval.shape[0]
        for equation, times in equations(traced.jaxpr)
        if equation.primitive.name == "dot_general"
    ]
    tile = tile_rows(num_rows, num_experts)
    assert len(multiplied) == 1
    assert multiplied[0] <= min(num_rows + tile * num_experts, tile * num_rows)
    assert tile <= MAX_TILE
    loops = [equation.primitive.name for equation, _ in equations(traced.jaxpr)]
    assert "while" not in loops, "a GPU's host would read the condition of each iteration"


def test_rows_of_uneven_experts_are_multiplied_by_their_own_matrices():
    rng = np.random.default_rng(0)
    sizes = np.array([0, 1, 40, 0, 9, 2])
    rows, weight = rng.normal(size=(60, 24)).astype(np.float32), rng.normal(size=(6, 24, 40)).astype(np.float32)
    found = grouped_product(jnp.asarray(rows), jnp.asarray(weight), jnp.asarray(sizes, jnp.int32))
    wanted = np.einsum("tk,tkn->tn", rows[: sizes.sum()], weight[np.repeat(np.arange(6), sizes)])
    np.testing.assert_allclose(np.asarray(found)[: sizes.sum()], wanted, atol=1e-4)
