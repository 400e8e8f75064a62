"""The weights of experts are read from tensors of one expert and of all, and written back as they were."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jpaged.models.experts import ExpertLinear
from jpaged.models.formats import tree_checkpoint
from jpaged.models.formats.checkpoint import UnsavedTensor
from jpaged.models.formats.orbax_checkpoint import OrbaxCheckpoint, write_orbax
from jpaged.models.formats.safetensors_checkpoint import SafetensorsCheckpoint
from jpaged.models.formats.tree_checkpoint import TreeCheckpoint
from jpaged.models.layers import WeightMaker
from jpaged.models.recipe import Source, make_recipes
from jpaged.models.weights.loading import _read_weight, load_arrays
from jpaged.models.weights.saving import _rows_of, _Stored
from jpaged.pallas_kernels.layer_ops import XLA_OPS, LayerOps
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.sharding import device_mesh, sharding_of

E, D, F = 3, 6, 10
PARTS = {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}
BY_EXPERT = {
    f"experts.{{e}}.{part}": Source(f"m.experts.{{e}}.{part}", others=(Source(f"m.experts.{part}"),)) for part in PARTS
}
ENDS = {"weight": "", "bias": "_bias"}
IN_TURN: dict[str, Any] = {"step": 2, "is_transposed": True, "ends": ENDS}
OF_ALL = {
    "experts.{e}.gate_proj": Source("m.experts.gate_up_proj", ((0, 2 * F),), **IN_TURN),
    "experts.{e}.up_proj": Source("m.experts.gate_up_proj", ((1, 2 * F),), **IN_TURN),
    "experts.{e}.down_proj": Source("m.experts.down_proj", is_transposed=True, ends=ENDS),
}
"""As GPT-OSS names them: W [E, in, out], gates and ups in turn."""
Numbers = dict[str, tuple[np.ndarray, np.ndarray]]


def numbers_of_experts() -> Numbers:
    """Return random W [E, in, out] and biases [E, out] of three projections."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    return {part: (normal(E, *shape), normal(E, shape[1])) for part, shape in PARTS.items()}


def tensors_by_expert(numbers: Numbers) -> dict[str, np.ndarray]:
    weights = {f"m.experts.{e}.{part}.weight": numbers[part][0][e].T for part in PARTS for e in range(E)}
    return weights | {f"m.experts.{e}.{part}.bias": numbers[part][1][e] for part in PARTS for e in range(E)}


def stacked_tensors(numbers: Numbers) -> dict[str, np.ndarray]:
    weights = {f"m.experts.{part}.weight": numbers[part][0].swapaxes(1, 2) for part in PARTS}
    return weights | {f"m.experts.{part}.bias": numbers[part][1] for part in PARTS}


def tensors_in_turn(numbers: Numbers) -> dict[str, np.ndarray]:
    gates, ups = numbers["gate_proj"], numbers["up_proj"]
    in_turn = [np.stack(each, axis=-1).reshape(*each[0].shape[:-1], 2 * F) for each in zip(gates, ups, strict=True)]
    pairs = {"gate_up_proj": in_turn, "down_proj": numbers["down_proj"]}
    return {f"m.experts.{name}{end}": pair[i] for name, pair in pairs.items() for i, end in enumerate(ENDS.values())}


class Sparse(nnx.Module):
    """The experts of a layer, on some devices, as `models.experts.Experts` makes them."""

    def __init__(self, make: WeightMaker, *, is_by_expert: bool) -> None:
        num_experts, inner = make.ops.expert_share(E, F, make.num_shards, is_by_expert=is_by_expert)
        axes = ("expert", None) if is_by_expert else (None, "mlp")
        options: dict[str, Any] = {"bias": True, "make": make, "true_experts": E}
        run, whole, num_shards = ((0, 0, F),), ((0, 0, D),), 1 if is_by_expert else make.num_shards
        self.experts = nnx.Dict(
            gate_up_proj=ExpertLinear(
                num_experts, D, (("gate_proj", inner), ("up_proj", inner)), axes=(axes[0], "embed", axes[1]),
                runs=run, in_runs=whole, num_shards=num_shards, **options,
            ),
            down_proj=ExpertLinear(
                num_experts, inner, ((None, D),), axes=(*axes, "embed"),
                runs=whole, in_runs=run, num_shards=1, **options,
            ),
        )  # fmt: skip


def abstract_state(ops: LayerOps, num_devices: int, *, dtype: str = "float32", is_by_expert: bool = False) -> nnx.State:
    """Return the state of experts as it is on some devices; here one device has the whole of it."""
    mesh = device_mesh(jax.devices()[:1])

    def new(shape: tuple[int, ...], axes: Any, fill: float | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_of(mesh, axes))

    return nnx.state(Sparse(WeightMaker(new, num_devices, dtype, ops), is_by_expert=is_by_expert))


PLACES: dict[str, tuple[LayerOps, int, dict[str, Any]]] = {
    "XLA": (XLA_OPS, 1, {}),
    "native": (NATIVE_OPS, 1, {}),
    "native in bfloat16": (NATIVE_OPS, 1, {"dtype": "bfloat16"}),
    "a part of each on 4 devices": (XLA_OPS, 4, {}),
    "whole ones on 2 devices": (XLA_OPS, 2, {"is_by_expert": True}),
}
FORMS: dict[str, tuple[dict[str, Source], Callable[[Numbers], dict[str, np.ndarray]]]] = {
    "by expert": (BY_EXPERT, tensors_by_expert),
    "of all experts": (BY_EXPERT, stacked_tensors),
    "of all, gates and ups in turn": (OF_ALL, tensors_in_turn),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_experts_are_read_into_their_places_and_written_back(form, place):
    """All else is zero: what pads the inner width, the columns of an expert, and the experts."""
    (sources, tensors_of), (ops, num_devices, options) = form, place
    numbers = numbers_of_experts()
    tensors, state = tensors_of(numbers), abstract_state(ops, num_devices, **options)
    recipes = make_recipes(state, sources, held=tensors)
    assert recipes.shapes == {name: values.shape for name, values in tensors.items()}
    leaves = dict(nnx.to_flat_state(state))
    loaded = load_arrays(leaves, recipes.pieces, TreeCheckpoint(tensors))
    written = {name: np.full_like(values, np.nan) for name, values in tensors.items()}
    for path, leaf in leaves.items():
        metadata, array = leaf.get_metadata(), loaded[path]
        num_rows = metadata["num_experts"] * metadata["rows_of_expert"]
        rows = np.array(_rows_of(_Stored(leaf.replace(array), None), np.arange(num_rows, dtype=np.int32)), np.float32)
        for piece in recipes.pieces[path]:
            target = tuple(slice(*bounds) for bounds in piece.target)
            piece.block_of(written[piece.tensor])[...] = rows[target]
            rows[target] = 0
        assert not rows.any()
        assert not np.isnan(np.asarray(array, np.float32)).any()
    for name, values in tensors.items():
        np.testing.assert_array_equal(written[name], values.astype(options.get("dtype", "float32")).astype("float32"))


def test_products_of_loaded_experts_are_those_of_their_matrices():
    """Where rows of Wᵀ lie is not taken from recipes here."""
    numbers, state = numbers_of_experts(), abstract_state(XLA_OPS, 4)
    tensors = tensors_in_turn(numbers)
    loaded = load_arrays(
        dict(nnx.to_flat_state(state)), make_recipes(state, OF_ALL, held=tensors).pieces, TreeCheckpoint(tensors)
    )
    weight, biases = (np.asarray(loaded["experts", "gate_up_proj", kind]) for kind in ("weight", "bias"))
    # On 4 devices 10 columns are padded to 12: each device has 3 gates, then 3 ups.
    for part, first in {"gate_proj": 0, "up_proj": 3}.items():
        columns = np.concatenate([np.arange(3) + 6 * device + first for device in range(4)])[:F]
        np.testing.assert_array_equal(weight[:, :, columns], numbers[part][0])
        np.testing.assert_array_equal(biases[:, columns], numbers[part][1])
    down = np.asarray(loaded["experts", "down_proj", "weight"])
    np.testing.assert_array_equal(down[:, :F], numbers["down_proj"][0])


@pytest.mark.parametrize("is_by_expert", [False, True], ids=["a part of each", "whole ones"])
def test_a_device_reads_what_it_holds(is_by_expert):
    """Each of 2 devices has a slice of all arrays, but for the biases of sums, which are whole."""
    state, tensors = abstract_state(XLA_OPS, 2, is_by_expert=is_by_expert), tensors_in_turn(numbers_of_experts())
    leaves, pieces = dict(nnx.to_flat_state(state)), make_recipes(state, OF_ALL, held=tensors).pieces
    loaded = load_arrays(leaves, pieces, TreeCheckpoint(tensors))
    for path, leaf in leaves.items():
        axes = leaf.get_metadata()["logical_axes"]
        spread = next((axis for axis, name in enumerate(axes) if name in ("mlp", "expert")), None)
        for device in range(2) if spread is not None else ():
            bounds = [(0, size) for size in leaf.shape]
            half = leaf.shape[spread] // 2
            bounds[spread] = device * half, device * half + half
            out = np.full([stop - start for start, stop in bounds], np.nan, np.float32)
            _read_weight(TreeCheckpoint(tensors), pieces[path], bounds, out, leaf.get_metadata())
            np.testing.assert_array_equal(out, np.asarray(loaded[path])[tuple(slice(*each) for each in bounds)])


@pytest.mark.parametrize("kind", ["safetensors", "orbax", "arrays on a device"])
def test_checkpoints_give_rows_of_one_matrix_of_a_tensor_of_three_axes(tmp_path: Path, kind: str, monkeypatch):
    values = np.random.default_rng(1).normal(size=(3, 4, 5)).astype("float32")
    if kind == "safetensors":
        save_file({"w": values}, tmp_path / "model.safetensors")
        checkpoint: Any = SafetensorsCheckpoint(tmp_path)
        assert load_file(tmp_path / "model.safetensors")["w"].shape == (3, 4, 5)
    elif kind == "orbax":
        write_orbax(tmp_path, {"w": UnsavedTensor(values.shape, values.dtype, lambda: values)})
        checkpoint = OrbaxCheckpoint(tmp_path)
    else:
        monkeypatch.setattr(tree_checkpoint, "is_on_host", lambda array: False)
        checkpoint = TreeCheckpoint({"w": jax.device_put(values)})
    assert checkpoint.shape("w") == (3, 4, 5)
    np.testing.assert_array_equal(checkpoint.read("w", slice(5, 8), slice(1, 4)), values[1, 1:, 1:4])
    np.testing.assert_array_equal(checkpoint.read("w", slice(4, 12)), values[1:].reshape(8, 5))
    assert checkpoint.read("w", slice(0, 0)).shape == (0, 5)
    with pytest.raises(ValueError, match="rows of one matrix"):
        checkpoint.read("w", slice(2, 6))
