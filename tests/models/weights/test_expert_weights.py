"""The weights of experts are read from tensors of one expert and of all, and written back as they were."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jpaged.models.errors import ModelLoadError
from jpaged.models.experts import ExpertLinear
from jpaged.models.formats import tree_checkpoint
from jpaged.models.formats.checkpoint import UnsavedTensor
from jpaged.models.formats.orbax_checkpoint import OrbaxCheckpoint, write_orbax
from jpaged.models.formats.quantization import Quantization
from jpaged.models.formats.safetensors_checkpoint import SafetensorsCheckpoint
from jpaged.models.formats.tree_checkpoint import TreeCheckpoint
from jpaged.models.layers import WeightMaker, stored_matrix
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.recipe import Piece, Source, make_recipes
from jpaged.models.weights.at_load import QuantizedCheckpoint
from jpaged.models.weights.coded import stored_formats
from jpaged.models.weights.dummy import dummy_weights
from jpaged.models.weights.loading import _read_weight, abstract_weights, check_tensors, load_arrays, load_weights
from jpaged.models.weights.saving import _rows_of, _Stored, save_checkpoint
from jpaged.models.weights.weights import Weights
from jpaged.pallas_kernels.code_formats import decode, int8_format, quantize
from jpaged.pallas_kernels.layer_ops import XLA_OPS, LayerOps
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.pallas_kernels.tpu_ops import TPU_OPS
from jpaged.sharding import device_mesh, sharding_of

from ...expert_models import write_model

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


def write_back(written: dict[str, np.ndarray], leaf: Any, pieces: tuple[Piece, ...]) -> None:
    """Put the numbers of a weight into tensors by its recipe; what is no piece must be zero, and padding finite."""
    metadata = leaf.get_metadata()
    num_rows = metadata["num_experts"] * metadata["rows_of_expert"]
    rows = np.array(_rows_of(_Stored(leaf, None), np.arange(num_rows, dtype=np.int32)), np.float32)
    for piece in pieces:
        target = tuple(slice(*bounds) for bounds in piece.target)
        piece.block_of(written[piece.tensor])[...] = rows[target]
        rows[target] = 0
    assert not rows.any()
    assert not np.isnan(np.asarray(leaf[...], np.float32)).any()


PLACES: dict[str, tuple[LayerOps, int, dict[str, Any]]] = {
    "XLA": (XLA_OPS, 1, {}),
    "native": (NATIVE_OPS, 1, {}),
    "native in bfloat16": (NATIVE_OPS, 1, {"dtype": "bfloat16"}),
    "a part of each on 4 devices": (XLA_OPS, 4, {}),
    "whole ones on 2 devices": (XLA_OPS, 2, {"is_by_expert": True}),
    "a TPU": (TPU_OPS, 1, {}),
    "a part of each on 4 TPUs": (TPU_OPS, 4, {}),
    "whole ones on 2 TPUs": (TPU_OPS, 2, {"is_by_expert": True}),
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
        write_back(written, leaf.replace(loaded[path]), recipes.pieces[path])
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


def test_dummy_experts_are_the_same_numbers_wherever_they_lie():
    """Padding of the inner width, of columns and of experts is zero, and changes no number."""
    found = list[dict[str, np.ndarray]]()
    for ops, num_devices, options in PLACES.values():
        state = abstract_state(ops, num_devices, **options)
        recipes = make_recipes(state, BY_EXPERT)
        found.append({name: np.full(shape, np.nan, np.float32) for name, shape in recipes.shapes.items()})
        made = dummy_weights(Weights(None, state, None, ()))
        for path, leaf in nnx.to_flat_state(made.state):
            write_back(found[-1], leaf, recipes.pieces[path])
    for name, values in found[0].items():
        assert name.endswith("bias") is not values.any()
        for others in found[1:]:
            np.testing.assert_array_equal(others[name], values, err_msg=name)
    weights = [values for name, values in found[0].items() if name.endswith("weight")]
    assert len({values.tobytes() for values in weights}) == len(weights) == 3 * E


MESH = device_mesh(jax.devices()[:1])


def decoded_rows(leaf: Any, scales: Any = None) -> np.ndarray:
    """Return Wᵀ [E × rows of an expert, in] of stored matrices, of floats or codes, whose scales may be apart."""
    num_in, num_out = leaf.matrix
    rows = np.arange(num_out, dtype=np.int32)
    if leaf.ops.stores_experts_apart:
        return np.asarray(_rows_of(_Stored(leaf, scales), rows), np.float32)
    return np.asarray(leaf.ops.columns(stored_matrix(leaf), rows, num_in), np.float32)


@pytest.mark.parametrize(
    "family", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("Mixtral", "Qwen2Moe")), "GptOss"]
)
@pytest.mark.parametrize(
    ("ops", "dtype"),
    [(NATIVE_OPS, "bfloat16"), (XLA_OPS, "float32"), (TPU_OPS, "bfloat16")],
    ids=["native", "XLA", "TPU"],
)
def test_a_saved_model_has_the_tensors_that_it_was_loaded_from(tmp_path: Path, family: str, ops: LayerOps, dtype: str):
    """Routers are float32 in memory, and saved so; all other tensors have the dtype of the run."""
    _, tensors = write_model(tmp_path, family, ml_dtypes.bfloat16)
    config, checkpoint = open_checkpoint(tmp_path)
    abstract = abstract_weights(config, dtype, MESH, ops)
    check_tensors(abstract, config, checkpoint)
    save_checkpoint(load_weights(abstract, config, checkpoint), tmp_path / "saved", format="safetensors")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == tensors.keys()
    for name, values in tensors.items():
        is_router = name.endswith((".gate.weight", ".router.weight", ".router.bias"))
        assert saved[name].dtype == ("float32" if is_router else dtype), name
        np.testing.assert_array_equal(saved[name].astype(np.float32), values.astype(np.float32), err_msg=name)
    assert replace(open_checkpoint(tmp_path / "saved")[0], dtype=config.dtype) == config


@pytest.mark.parametrize("family", [pytest.param("Mixtral", marks=pytest.mark.slow), "Qwen2Moe"])
def test_experts_are_quantized_at_load_each_as_a_matrix_of_its_own(tmp_path: Path, family: str):
    """Routers, gates of shared experts, norms and biases stay floats."""
    write_model(tmp_path, family)
    config, checkpoint = open_checkpoint(tmp_path)
    quantized = QuantizedCheckpoint(checkpoint, "int8")
    floats = load_weights(abstract_weights(config, "float32", MESH, NATIVE_OPS), config, checkpoint)
    abstract = abstract_weights(config, "float32", MESH, NATIVE_OPS, stored_formats(quantized))
    leaves = dict(nnx.to_flat_state(floats.state))
    for path, leaf in nnx.to_flat_state(load_weights(abstract, config, quantized).state):
        is_coded = "code_parts" in leaf.get_metadata()
        assert is_coded is ("matrix" in leaf.get_metadata() and {"router", "shared_gate"}.isdisjoint(path)), path
        if "num_experts" in leaf.get_metadata():
            rows = decoded_rows(leaves[path])
            expected = decode(quantize(rows, int8_format(rows.shape[1])), int8_format(rows.shape[1]))
            np.testing.assert_array_equal(decoded_rows(leaf), expected)


def test_codes_of_gpt_oss_are_kept_and_stand_for_the_numbers_of_its_format(tmp_path: Path):
    """Each byte has two neighbouring inputs, the first in its lower half; 32 share a power of two.

    What pads inputs and outputs, on a TPU, is zero.
    """
    content, tensors = write_model(tmp_path, "GptOss", ml_dtypes.bfloat16)
    random, numbers = np.random.default_rng(2), dict[str, np.ndarray]()
    values_of_codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_in, num_out = tensors.pop(name).shape
        codes = random.integers(0, 16, (num_experts, num_out, num_in // 32, 32), np.uint8)
        scales = random.integers(110, 130, codes.shape[:3], np.uint8)
        tensors |= {f"{name}_blocks": codes[..., ::2] | codes[..., 1::2] << 4, f"{name}_scales": scales}
        by_group = values_of_codes[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
        numbers[name] = by_group.reshape(num_experts, num_out, num_in)
    save_file(tensors, tmp_path / "model.safetensors")
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}
    (tmp_path / "config.json").write_text(json.dumps(content | {"quantization_config": quantization}))
    config, checkpoint = open_checkpoint(tmp_path)
    kept = stored_formats(checkpoint)
    for ops, formats in ((XLA_OPS, ()), (XLA_OPS, kept), (NATIVE_OPS, kept), (TPU_OPS, kept)):
        abstract = abstract_weights(config, "float32", MESH, ops, formats)
        check_tensors(abstract, config, checkpoint)
        leaves = dict(nnx.to_flat_state(load_weights(abstract, config, checkpoint).state))
        for layer in range(2):
            experts = ("layers", layer, "mlp", "experts")
            gate_up, down = (leaves[*experts, name, "weight"] for name in ("gate_up_proj", "down_proj"))
            assert ("code_parts" in gate_up.get_metadata()) is bool(formats)
            gates_and_ups = numbers[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
            apart = np.concatenate([gates_and_ups[:, ::2], gates_and_ups[:, 1::2]], axis=1)
            scales = [leaves.get((*experts, name, "scales")) for name in ("gate_up_proj", "down_proj")]
            found = decoded_rows(gate_up, scales[0]).reshape(3, 2, -1, 64)
            np.testing.assert_array_equal(found[:, :, :32], apart.reshape(3, 2, 32, 64))
            downs = decoded_rows(down, scales[1]).reshape(3, -1, down.matrix[0])
            np.testing.assert_array_equal(downs[:, :64, :32], numbers[f"model.layers.{layer}.mlp.experts.down_proj"])
            assert not any(padding.any() for padding in (found[:, :, 32:], downs[:, 64:], downs[:, :, 32:]))


def test_blocks_of_gpt_oss_without_their_scales_are_refused(tmp_path: Path):
    save_file({"experts.down_proj_blocks": np.zeros((2, 4, 1, 16), np.uint8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"without 'experts\.down_proj_scales' of the shape \(2, 4, 1\)"):
        SafetensorsCheckpoint(tmp_path, Quantization("mxfp4", has_expert_blocks=True))
