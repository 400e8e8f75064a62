"""Recipes name the layer and the expert of a tensor as their templates do, whatever other numbers stand in a path."""

import jax
import pytest
from flax import nnx

from jpaged.models.config.shares import Shares
from jpaged.models.layers import Linear, WeightMaker
from jpaged.models.recipe import Source, make_recipes, numbers_in

PATHS = {
    "a layer": ("layers.{i}.norm", ("layers", 3, "norm"), {"i": 3}),
    "a layer's expert": ("layers.{i}.experts.{e}.up_proj", ("layers", 3, "experts", 7, "up_proj"), {"i": 3, "e": 7}),
    "an expert in front of its layer": ("experts.{e}.layers.{i}", ("experts", 7, "layers", 3), {"i": 3, "e": 7}),
    "no number": ("norm", ("norm",), {}),
    "another module": ("layers.{i}.norm", ("layers", 3, "mlp"), None),
    "a longer path": ("layers.{i}", ("layers", 3, "norm"), None),
    "a shorter path": ("layers.{i}.norm", ("layers", 3), None),
    "a number without a name": ("layers.{i}", ("layers", 3, 7), None),
    "a word for a number": ("layers.{i}", ("layers", "3"), None),
}


@pytest.mark.parametrize(("template", "module", "numbers"), PATHS.values(), ids=PATHS.keys())
def test_a_template_says_which_number_of_a_path_is_the_layer(template, module, numbers):
    assert numbers_in(template, module) == numbers


class Experts(nnx.Module):
    """Three experts of two layers each, in a path with the expert in front."""

    def __init__(self) -> None:
        make = WeightMaker(lambda shape, axes, fill: jax.ShapeDtypeStruct(shape, "float32"), 1, "float32")

        def expert() -> Linear:
            return Linear(2, 4, axes=("embed", "mlp"), bias=False, make=make)

        self.experts = nnx.List([nnx.List([expert(), expert()]) for _ in range(3)])


def test_tensors_of_experts_have_both_numbers_and_stacked_names_leave_out_the_layer_alone():
    sources = {"experts.{e}.{i}": Source("model.layers.{i}.experts.{e}.up_proj")}
    recipes = make_recipes(nnx.state(Experts()), sources)
    assert recipes.shapes == {
        f"model.layers.{i}.experts.{e}.up_proj.weight": (4, 2) for i in range(2) for e in range(3)
    }
    names = {tensor: tuple(stacked) for tensor, stacked in recipes.stacked.items()}
    assert names["model.layers.1.experts.2.up_proj.weight"] == ("model.layers.experts.2.up_proj.weight", 1)
    assert len(set(names.values())) == 6


class Sinks(nnx.Module):
    """Attention of 9 query heads and 3 KV heads with a sink for each stored query head, on 8 devices."""

    def __init__(self) -> None:
        make = WeightMaker(lambda shape, axes, fill: jax.ShapeDtypeStruct(shape, "float32"), 8, "float32")
        shares = Shares(8, 9, 3, 64, 64)
        self.sinks = make.vector(shares.stored_heads, "heads", fill=0.0, rows=((None, shares.query_runs(1)),))


def test_a_vector_of_a_module_has_the_name_of_both_and_lies_where_the_heads_do():
    """Groups of 3 query heads are stored as 4: the vector has a place for each stored head."""
    model = nnx.List([Sinks(), Sinks()])
    recipes = make_recipes(nnx.state(model), {"{i}": Source("model.layers.{i}.self_attn")})
    assert recipes.shapes == {f"model.layers.{i}.self_attn.sinks": (9,) for i in range(2)}
    assert recipes.stacked["model.layers.1.self_attn.sinks"] == ("model.layers.self_attn.sinks", 1)
    places = [(piece.source, piece.target) for piece in recipes.pieces[1, "sinks"]]
    assert places == [(((0, 3),), ((0, 3),)), (((3, 6),), ((4, 7),)), (((6, 9),), ((8, 11),))]
