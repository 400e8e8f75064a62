"""Routers choose the experts that those of transformers choose, with the same weights; what a row must never be given.

`scripts/make_router_goldens.py` makes the golden file.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jpaged.models.config.experts import ExpertsConfig, read_grouped_routing
from jpaged.models.experts import SparseMLP
from jpaged.models.experts import route as untraced_route
from jpaged.models.fields import Fields
from jpaged.models.inputs import unpaged_inputs
from jpaged.models.layers import WeightMaker
from jpaged.models.opening.open_checkpoint import open_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden" / "routers.safetensors"
route = jax.jit(untraced_route, static_argnames="config")
RTOL = 3e-6
"""Both sides compute in float32; their exponentials differ in the last bits."""


def read_golden() -> tuple[dict[str, dict[str, Any]], dict[str, np.ndarray]]:
    """Return the settings and the tensors of the golden file."""
    with safe_open(GOLDEN, "numpy") as file:
        settings = {name: json.loads(text) for name, text in file.metadata().items() if name != "format"}
        return settings, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


SETTINGS, TENSORS = read_golden()
FOUR = ExpertsConfig(num_experts=4, num_chosen=2, width=8, sparse_layers=(True,))


def config_of(settings: dict[str, Any], num_experts: int) -> ExpertsConfig:
    """Return the routing of a golden router; those with groups are read from the keys of their config.json."""
    num_chosen = settings["num_experts_per_tok"]
    if "n_group" in settings:
        options = read_grouped_routing(Fields(settings, Path("config.json")), num_experts, num_chosen)
    else:
        options = {"renormalizes": settings.get("norm_topk_prob", True)}
    return ExpertsConfig(num_experts=num_experts, num_chosen=num_chosen, width=8, sparse_layers=(True,), **options)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_experts_and_weights_are_those_of_transformers(name: str) -> None:
    """The order of choices is not compared: DeepSeek-V3 does not sort them."""
    logits, bias = TENSORS[f"{name}.logits"], TENSORS.get(f"{name}.correction_bias")
    config = config_of(SETTINGS[name], logits.shape[1])
    assert config.has_correction_bias == (bias is not None)
    routing = route(jnp.asarray(logits), config, correction_bias=None if bias is None else jnp.asarray(bias))
    assert (routing.experts.dtype, routing.weights.dtype) == ("int32", "float32")
    experts, wanted = np.asarray(routing.experts), TENSORS[f"{name}.experts"]
    np.testing.assert_array_equal(np.sort(experts, axis=1), np.sort(wanted, axis=1))
    found, expected = (
        np.take_along_axis(weights, np.argsort(numbers, axis=1), axis=1)
        for weights, numbers in ((np.asarray(routing.weights), experts), (TENSORS[f"{name}.weights"], wanted))
    )
    np.testing.assert_allclose(found, expected, rtol=RTOL, atol=0)


SIGMOIDS = {"scoring": "sigmoid", "num_experts": 8, "num_groups": 4, "num_chosen_groups": 2, "scores_of_group": 2}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [(FOUR, [0, 1]), (replace(FOUR, **SIGMOIDS, num_chosen=3), [0, 1, 2])],
    ids=["softmax", "groups of sigmoids"],
)
def test_of_equal_experts_and_groups_the_lower_ones_are_chosen(config: ExpertsConfig, wanted: list[int]) -> None:
    bias = jnp.zeros(config.num_experts) if config.scoring == "sigmoid" else None
    routing = route(jnp.full((3, config.num_experts), 0.5), config, correction_bias=bias)
    assert np.asarray(routing.experts).tolist() == [wanted] * 3


def test_unequal_logits_are_told_apart_where_their_scores_in_float32_are_not() -> None:
    logits = np.array([[0.0, 1e-9, 2e-9, 0.0]], np.float32)
    assert np.asarray(route(jnp.asarray(logits), FOUR).experts).tolist() == [[2, 1]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_an_expert_of_minus_infinity_is_chosen_last_and_has_weight_zero(scoring: str) -> None:
    logits = jnp.array([[-jnp.inf, -jnp.inf, 3.0, -jnp.inf], [1.0, -jnp.inf, -jnp.inf, 2.0]])
    routing = route(logits, replace(FOUR, scoring=scoring))
    assert np.asarray(routing.experts).tolist() == [[2, 0], [3, 0]]
    assert np.asarray(routing.weights)[0].tolist() == [1.0, 0.0]
    assert (np.asarray(routing.weights)[1] > 0).all()


def test_sigmoids_that_are_all_zero_have_weights_of_zero() -> None:
    routing = route(jnp.full((1, 4), -1e30), replace(FOUR, scoring="sigmoid"))
    assert np.asarray(routing.weights).tolist() == [[0.0, 0.0]]


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("scoring", "num_experts"),
    [
        *(("softmax", 4), ("sigmoid", 8), ("softmax", 60)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("sigmoid", 4), ("softmax", 8), ("sigmoid", 60))),
    ],
)
def test_the_weights_of_a_row_have_the_same_bits_in_any_company(scoring: str, num_experts: int) -> None:
    """XLA rounds exponentials and sums that it fuses by the number of all values: 16 of 512 rows would differ."""
    logits = 3 * np.random.default_rng(0).normal(size=(256, num_experts)).astype(np.float32)
    config = replace(FOUR, num_experts=num_experts, scoring=scoring)
    run = jax.jit(lambda logits: route(logits, config).weights)
    together = np.asarray(run(logits))
    for num_rows in (1, 2, 16):
        apart = [np.asarray(run(logits[row : row + num_rows])) for row in range(0, 256, num_rows)]
        np.testing.assert_array_equal(np.concatenate(apart), together)


def test_padding_goes_to_no_expert() -> None:
    """Nothing is added to the stream of rows behind a step's tokens."""
    config, _ = open_checkpoint(GOLDEN.parent / "families" / "mixtral")
    rng = np.random.default_rng(0)
    make = WeightMaker(lambda shape, axes, fill: jnp.asarray(rng.normal(size=shape), jnp.float32), 1, "float32")
    mlp = SparseMLP(config, mlp_class=None, make=make)
    stream = rng.normal(size=(5, config.hidden_size)).astype(np.float32)
    inputs = unpaged_inputs(jnp.zeros(5, jnp.int32), jnp.arange(5))
    inputs = replace(inputs, attention=replace(inputs.attention, query_starts=jnp.array([0, 3])))
    added = np.asarray(jax.jit(lambda stream: mlp.add_to(stream, None, inputs).stream)(stream)) - stream
    assert np.abs(added[:3]).max(axis=1).all()
    np.testing.assert_array_equal(added[3:], 0)
