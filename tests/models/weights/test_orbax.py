"""Folders that orbax writes are read by slices under dotted names, and what is no checkpoint is refused in one line."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from safetensors.numpy import load_file

from jpaged.models.errors import ModelLoadError
from jpaged.models.families.llama import Llama
from jpaged.models.formats.orbax_checkpoint import OrbaxCheckpoint
from jpaged.models.opening.open_checkpoint import open_checkpoint, read_config
from jpaged.models.opening.reading import config_from_hf
from jpaged.models.recipe import make_recipes
from jpaged.models.weights.loading import abstract_weights, check_tensors
from jpaged.sharding import device_mesh
from jpaged.startup.model_source import resolve_model

from .processes import HAS_PROC, peak_bytes, run_python

LLAMA = Path(__file__).parents[2] / "golden" / "families" / "llama"
GOLDEN = Path(__file__).parents[2] / "golden" / "orbax"
MESH = device_mesh(jax.devices()[:1])

RNG = np.random.default_rng(0)
TREE = {
    "model": {
        "embed": {"weight": RNG.normal(size=(9, 6)).astype(np.float32)},
        "layers": [{"w": RNG.normal(size=(4, 5)).astype(ml_dtypes.bfloat16)}, {"w": np.ones((3, 2), np.float16)}],
        "empty": {},
    },
    "lm_head.weight": jnp.arange(12, dtype=jnp.float32).reshape(4, 3),
    "norm": np.arange(5, dtype=np.float32),
}
FLAT = {
    "model.embed.weight": TREE["model"]["embed"]["weight"],
    "model.layers.0.w": TREE["model"]["layers"][0]["w"],
    "model.layers.1.w": TREE["model"]["layers"][1]["w"],
    "lm_head.weight": TREE["lm_head.weight"],
    "norm": TREE["norm"],
}
LAYOUTS = {"ocdbt": {}, "files": {"use_ocdbt": False}, "zarr3": {"use_zarr3": True}}


def save(path, tree=TREE, **layout):
    with orbax.checkpoint.PyTreeCheckpointer(**layout) as checkpointer:
        checkpointer.save(path, tree)
    return path


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_slices_of_a_nested_tree_come_back_bit_for_bit_under_dotted_names(tmp_path, layout):
    checkpoint = OrbaxCheckpoint(save(tmp_path / "tree", **layout))
    assert set(checkpoint.names()) == set(FLAT)
    for name, values in FLAT.items():
        assert (checkpoint.shape(name), checkpoint.dtype(name)) == (values.shape, values.dtype.name)
        for rows in (slice(None), slice(1, 3), slice(2, 100), slice(2, 2)):
            read = checkpoint.read(name, rows)
            assert read.dtype == values.dtype
            np.testing.assert_array_equal(read, values[rows])
            if values.ndim == 2:
                np.testing.assert_array_equal(checkpoint.read(name, rows, slice(1, 2)), values[rows, 1:2])


SAVE_FROM_TWO_DEVICES = """
import sys
import jax, jax.numpy as jnp, orbax.checkpoint
from jax.sharding import NamedSharding, PartitionSpec
mesh, values = jax.make_mesh((2,), ("x",)), jnp.arange(60, dtype=jnp.float32).reshape(10, 6)
axes = {"rows": PartitionSpec("x"), "columns": PartitionSpec(None, "x"), "copies": PartitionSpec()}
tree = {name: jax.device_put(values, NamedSharding(mesh, spec)) for name, spec in axes.items()}
with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
    checkpointer.save(sys.argv[1], tree)
"""


def test_a_tensor_that_was_saved_from_two_devices_is_read_whole(tmp_path):
    """Orbax stores what lies on each device as one piece."""
    flags = "--xla_force_host_platform_device_count=2"
    run_python(SAVE_FROM_TWO_DEVICES, str(tmp_path / "tree"), flags=flags)
    checkpoint = OrbaxCheckpoint(tmp_path / "tree")
    chunks = {name: checkpoint._arrays[name].chunk for name in checkpoint.names()}
    assert chunks == {"rows": (5, 6), "columns": (10, 3), "copies": (5, 6)}
    for name in chunks:
        values = np.arange(60, dtype=np.float32).reshape(10, 6)
        np.testing.assert_array_equal(checkpoint.read(name, slice(1, 9), slice(1, 5)), values[1:9, 1:5])


def test_the_weights_of_a_training_state_are_found_under_its_params(tmp_path):
    """Its optimizer has trees of the same names below, and its counts are no floats."""
    tensors = load_file(LLAMA / "model.safetensors")
    moments = {name: np.zeros_like(values) for name, values in tensors.items()}
    state = {"step": np.int32(7), "params": tensors, "opt_state": [{"count": np.int32(7), "mu": moments}, None]}
    _, checkpoint = open_checkpoint(LLAMA, orbax=save(tmp_path / "tree", state))
    assert set(checkpoint.names()) == set(tensors)
    for name, values in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name, slice(None)), values)
    two = save(tmp_path / "two", {"params": tensors, "averages": moments})
    assert "averages.lm_head.weight" in open_checkpoint(LLAMA, orbax=two)[1].names(), "nothing says which is meant"


BESIDE = {
    "name": "a run", "none": None, "step": 7, "rate": 0.5, "is_last": True, "count": np.int64(2), "empty": {},
    "nothing": [], "metrics": {"loss": np.float32(1.5), "notes": ["best", ()]}, "key": jax.random.key(0),
    "mask": np.ones(3, bool), "a.b": np.ones(2), "a": {"b": np.ones(2)},
}  # fmt: skip
"""Parts of a training state that are no weights; two of them have one name."""


def assert_is_model(checkpoint, tensors):
    check_tensors(abstract_weights(read_config(LLAMA), "float32", MESH), read_config(LLAMA), checkpoint)
    for name, values in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name, slice(None)), values)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_is_beside_the_parameters_does_not_matter(tmp_path, layout):
    tensors = load_file(LLAMA / "model.safetensors")
    path = save(tmp_path / "tree", {"params": tensors, **BESIDE, "damaged": np.ones(4)}, **layout)
    if layout == LAYOUTS["files"]:
        (path / "damaged" / ".zarray").write_text("{")
    assert_is_model(open_checkpoint(LLAMA, orbax=path)[1], tensors)


def test_states_of_flax_open(tmp_path):
    """A `TrainState` has named tuples of optax; a state of nnx has each array under a further key, "value"."""
    tensors = jax.tree.map(jnp.asarray, load_file(LLAMA / "model.safetensors"))
    state = TrainState.create(apply_fn=print, params=tensors, tx=optax.adamw(1e-3))
    assert_is_model(open_checkpoint(LLAMA, orbax=save(tmp_path / "linen", state))[1], tensors)
    variables = nnx.State({"model": {name: nnx.Param(values) for name, values in tensors.items()}})
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "nnx", variables)
    assert_is_model(open_checkpoint(LLAMA, orbax=tmp_path / "nnx")[1], tensors)


def test_of_the_items_of_a_manager_the_one_with_the_parameters_is_read(tmp_path):
    tensors = load_file(LLAMA / "model.safetensors")
    moments = {"mu": tensors, "nu": tensors}
    items = {"ema_params": tensors, "params": tensors, "opt_state": moments, "texts": {"name": "a run"}}
    saved = {name: orbax.checkpoint.args.PyTreeSave(tree) for name, tree in items.items()}
    with orbax.checkpoint.CheckpointManager(tmp_path / "run") as manager:
        manager.save(5, args=orbax.checkpoint.args.Composite(**saved, rates=orbax.checkpoint.args.JsonSave({"a": 1})))
    checkpoint = open_checkpoint(LLAMA, orbax=tmp_path / "run" / "5")[1]
    assert checkpoint.path == tmp_path / "run" / "5" / "params"
    assert_is_model(checkpoint, tensors)
    shutil.copytree(tmp_path / "run" / "5" / "params", tmp_path / "run" / "5" / "policy")
    with pytest.raises(ModelLoadError, match=r"5: 2 subtrees hold tensors of the model: params, policy; give one of"):
        open_checkpoint(LLAMA, orbax=tmp_path / "run" / "5")
    for name in ("params", "policy", "ema_params"):
        shutil.rmtree(tmp_path / "run" / "5" / name)
    with pytest.raises(ModelLoadError, match=r"5: none of opt_state, texts holds tensors of the model: give one of"):
        open_checkpoint(LLAMA, orbax=tmp_path / "run" / "5")


def test_what_an_older_orbax_saved_opens():
    """`scripts/make_orbax_goldens.py` says what is in the folder."""
    source = resolve_model(str(GOLDEN))
    assert source.orbax == GOLDEN / "5"
    config, checkpoint = open_checkpoint(source.path, orbax=source.orbax)
    check_tensors(abstract_weights(config, "float32", MESH), config, checkpoint)
    for number, name in enumerate(sorted(checkpoint.names())):
        values = checkpoint.read(name, slice(None))
        np.testing.assert_array_equal(values.ravel(), number + np.arange(values.size) / 64)


NO_WEIGHTS = {
    "a string": ({"model.norm.weight": "text"}, "'params.model.norm.weight' is a leaf of the type 'string', wanted an"),
    "a string that no weight takes": (
        {"note": "text"},
        "'params.note' is a leaf of the type 'string', wanted an array",
    ),
    "None": ({"model.norm.weight": None}, "tensor model.norm.weight is missing"),
    "a number": ({"model.norm.weight": 3}, r"tensor model.norm.weight has shape \(\), the config asks for"),
}


@pytest.mark.parametrize(("leaf", "message"), NO_WEIGHTS.values(), ids=NO_WEIGHTS)
def test_a_parameter_that_is_no_array_is_refused_by_its_path(tmp_path, leaf, message):
    params = load_file(LLAMA / "model.safetensors") | leaf
    config, checkpoint = open_checkpoint(LLAMA, orbax=save(tmp_path / "tree", {"params": params, "step": 1}))
    with pytest.raises(ModelLoadError, match=message) as caught:
        check_tensors(abstract_weights(config, "float32", MESH), config, checkpoint)
    assert "\n" not in str(caught.value)


def test_a_tensor_of_another_dtype_is_refused_when_it_is_read(tmp_path):
    checkpoint = OrbaxCheckpoint(save(tmp_path / "tree", {"step": np.arange(3)}))
    with pytest.raises(
        ModelLoadError, match="tensor 'step' is stored as int64, float32, bfloat16, float16 are available"
    ):
        checkpoint.read("step", slice(0, 0))


def changed_tree(change):
    def apply(path):
        tree = json.loads((path / "_METADATA").read_text())
        change(tree)
        (path / "_METADATA").write_text(json.dumps(tree))

    return apply


def set_key(name):
    def change(tree):
        next(iter(tree["tree_metadata"].values()))["key_metadata"] = [{"key": name, "key_type": 2}]

    return changed_tree(change)


def set_zarray(**values):
    def apply(path):
        file = path / "a" / ".zarray"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return apply


DAMAGED = {
    "not JSON": (lambda path: (path / "_METADATA").write_text("{"), "_METADATA: is not JSON"),
    "no tree": (lambda path: (path / "_METADATA").write_text("{}"), "_METADATA: holds no array"),
    "a leaf that is text": (
        changed_tree(lambda tree: tree["tree_metadata"]["('a',)"]["value_metadata"].update(value_type="string")),
        "'a' is a leaf of the type 'string', wanted an array",
    ),
    "two leaves of one name": (set_key("b"), "'b' is there twice"),
    "a name outside of the folder": (set_key("../a"), r"'\.\./a' is no name of an array"),
    "an array that is not there": (lambda path: shutil.rmtree(path / "a"), "tensor 'a' cannot be read"),
    "pieces larger than the array": (set_zarray(chunks=[2**40, 2]), "is stored in pieces of the shape"),
    "metadata of an array that are no JSON": (lambda path: (path / "a" / ".zarray").write_text("{"), "'a' cannot be"),
    "not finished": (
        lambda path: (path / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": null}'), "did not end",
    ),
}  # fmt: skip


def shapes_of(path):
    checkpoint = OrbaxCheckpoint(path)
    return {name: checkpoint.shape(name) for name in checkpoint.names()}


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_folder_is_refused_before_values_are_read(tmp_path, damage, message):
    damage(save(tmp_path / "tree", {"a": np.ones((3, 2), np.float32), "b": np.ones(3, np.float32)}, use_ocdbt=False))
    with pytest.raises(ModelLoadError, match=message) as caught:
        shapes_of(tmp_path / "tree")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", [{}, {"store_array_data_equal_to_fill_value": False}], ids=["no key", "false"])
def test_a_piece_that_is_missing_is_zeros_where_orbax_did_not_store_zeros(tmp_path, key):
    """As older versions of orbax did, and which its metadata say. Else it is an error: see the next test."""
    path = save(tmp_path / "tree", {"a": np.ones((3, 2), np.float32)}, use_ocdbt=False)
    tree = json.loads((path / "_METADATA").read_text())
    assert tree.pop("store_array_data_equal_to_fill_value") is True
    (path / "_METADATA").write_text(json.dumps(tree | key))
    (path / "a" / "0.0").unlink()
    np.testing.assert_array_equal(OrbaxCheckpoint(path).read("a", slice(0, 2)), np.zeros((2, 2)))


PIECES = {"missing": lambda piece: piece.unlink(), "cut": lambda piece: piece.write_bytes(piece.read_bytes()[:-1])}


@pytest.mark.parametrize("damage", PIECES.values(), ids=PIECES)
def test_a_piece_that_is_missing_or_cut_is_an_error_and_not_zeros(tmp_path, damage):
    damage(save(tmp_path / "tree", {"a": np.ones((3, 2), np.float32)}, use_ocdbt=False) / "a" / "0.0")
    with pytest.raises(ModelLoadError, match="tensor 'a' cannot be read") as caught:
        OrbaxCheckpoint(tmp_path / "tree").read("a", slice(0, 2))
    assert "\n" not in str(caught.value)


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 8, "num_attention_heads": 8, "max_position_embeddings": 64,
}  # fmt: skip
LOAD_AND_SAVE = """
import sys
from pathlib import Path
import jax
from jpaged.models.weights.loading import abstract_weights, check_tensors, load_weights
from jpaged.models.opening.open_checkpoint import open_checkpoint, read_config
from jpaged.models.weights.saving import save_checkpoint
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.sharding import device_mesh
folder = Path(sys.argv[1])
config, checkpoint = open_checkpoint(folder, orbax=folder)
abstract = abstract_weights(config, "float32", device_mesh(jax.devices()), NATIVE_OPS)
check_tensors(abstract, config, checkpoint)
jax.numpy.zeros(1).block_until_ready()
print(abstract.size_bytes, flush=True)
sys.stdin.readline()
weights = load_weights(abstract, config, checkpoint)
print("done", flush=True)
print(abstract.size_bytes, flush=True)
sys.stdin.readline()
save_checkpoint(weights, folder / "saved")
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_PROC, reason="reads /proc")
def test_loading_and_saving_take_little_more_memory_than_is_needed(tmp_path):
    """At most 1.3 × the bytes of the weights is promised for loading, though orbax stores each tensor as one compressed
    piece; 1.12 is usual, and the bound of 1.2 lies between the two.

    Embedding and head are a third of the weights each. Saving takes a copy of one of them, 96 MB, some 25 MB for
    compiling, and up to 60 MB that the allocator keeps of what tensorstore's threads have freed.
    """
    config = config_from_hf(CONFIG, tmp_path / "config.json")
    abstract = abstract_weights(config, "float32", device_mesh(jax.devices()[:1]))
    shapes = make_recipes(abstract.state, Llama.sources(config)).shapes
    save(tmp_path / "tree", {name: RNG.standard_normal(shape, np.float32) for name, shape in shapes.items()})
    (tmp_path / "tree" / "config.json").write_text(json.dumps(CONFIG))
    (weights_bytes, loading), (_, saving) = peak_bytes(LOAD_AND_SAVE, str(tmp_path / "tree"))
    assert weights_bytes == abstract.size_bytes <= loading <= 1.2 * weights_bytes
    assert saving <= 220e6
