"""Arrays in memory are a checkpoint like any other: read by slices, checked by name, copied."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jpaged.models.errors import ModelLoadError
from jpaged.models.formats.tree_checkpoint import TreeCheckpoint, _block
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.weights.loading import abstract_weights, check_tensors, load_weights
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.sharding import device_mesh

from .test_saving import LLAMA, bits, restored

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


def nested(flat):
    """Return the tree of nested dicts and lists whose dotted names are those of `flat`."""
    if "" in flat:
        return flat[""]
    parts = {}
    for name, value in flat.items():
        key, _, rest = name.partition(".")
        parts.setdefault(key, {})[rest] = value
    made = {key: nested(part) for key, part in parts.items()}
    return [made[str(index)] for index in range(len(made))] if all(map(str.isdigit, made)) else made


FORMS = {
    "flat, numpy": lambda tensors: tensors,
    "under another name": lambda tensors: {"params": tensors},
    "a training state": lambda tensors: {
        "step": np.int32(7),
        "params": tensors,
        "opt_state": [{"count": jnp.int32(7)}, None],
    },
    "nested, JAX": lambda tensors: nested({name: jnp.asarray(values) for name, values in tensors.items()}),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_tree_gives_the_weights_that_its_file_gives_and_keeps_nothing_of_it(form):
    tensors = load_file(LLAMA / "model.safetensors")
    config, checkpoint = open_checkpoint(LLAMA, params=form(tensors))
    abstract = abstract_weights(config, "float32", device_mesh(jax.devices()[:1]), NATIVE_OPS)
    check_tensors(abstract, config, checkpoint)
    weights = load_weights(abstract, config, checkpoint)
    for values in tensors.values():
        values.fill(7)
    assert bits(weights) == bits(restored(LLAMA, NATIVE_OPS))


def test_slices_of_numpy_and_jax_arrays_are_equal():
    """What lies on another device is fetched in blocks."""
    on_host = TreeCheckpoint({"a.weight": ROWS})
    in_jax = TreeCheckpoint({"a": {"weight": jnp.asarray(ROWS)}})
    np.testing.assert_array_equal(_block(jnp.asarray(ROWS), (np.int32(1), np.int32(0)), (2, 2)), ROWS[1:3, :2])
    for checkpoint in (on_host, in_jax):
        assert list(checkpoint.names()) == ["a.weight"]
        assert (checkpoint.shape("a.weight"), checkpoint.dtype("a.weight")) == ((4, 3), "float32")
        np.testing.assert_array_equal(checkpoint.read("a.weight", slice(1, 3), slice(0, 2)), ROWS[1:3, :2])


def deleted():
    array = jnp.asarray(ROWS)
    array.delete()
    return array


def deep(levels):
    tree = ROWS
    for _ in range(levels):
        tree = {"a": tree}
    return tree


def shape_of_first(tree):
    checkpoint = TreeCheckpoint(tree)
    return checkpoint.shape(next(iter(checkpoint.names())))


WRONG = {
    "no array": ({"a": {"w": 5.0}}, "params: a.w is a float, wanted an array of numpy or JAX"),
    "none": ({"a": None}, "params: a is a NoneType, wanted an array"),
    "64 bits": ({"a": np.zeros(3)}, "params: a is float64, wanted one of float32, bfloat16, float16: cast it"),
    "8 bits": ({"a": np.zeros(3, ml_dtypes.float8_e4m3fn)}, "params: a is float8_e4m3fn, wanted one of float32"),
    "two of one name": ({"a": {"b": ROWS}, "a.b": ROWS}, "params: two leaves have the name 'a.b'"),
    "donated": ({"a": deleted()}, "params: a was deleted or donated"),
    "100 levels": (deep(100), "nested deeper than 64 levels"),
}


@pytest.mark.parametrize(("tree", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_leaf_that_is_asked_for_and_no_array_of_floats_is_refused_by_its_name(tree, message):
    with pytest.raises(ModelLoadError, match=message) as caught:
        shape_of_first(tree)
    assert "\n" not in str(caught.value)


def faults_of(tree):
    config, checkpoint = open_checkpoint(LLAMA, params=tree)
    with pytest.raises(ModelLoadError, match=r"^params: ") as caught:
        check_tensors(abstract_weights(config, "float32", device_mesh(jax.devices()[:1])), config, checkpoint)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("form", [lambda tree: tree, lambda tree: {"params": tree, "mu": tree}], ids=["tree", "state"])
def test_all_names_that_are_left_over_missing_or_misshapen_are_listed(form):
    tensors = load_file(LLAMA / "model.safetensors")
    norms = sorted(name for name in tensors if "norm" in name)
    more = {f"model.more.{number}": ROWS for number in range(3)}
    names = "model.more.0, model.more.1, model.more.2"
    assert f"model.more.0 has no place in the model (3 such tensors: {names})" in faults_of(form(tensors | more))
    without = {name: values for name, values in tensors.items() if name not in norms}
    assert f"({len(norms)} of 21 are: {', '.join(norms)}); without a place in the model: {names};" in faults_of(
        form(without | more)
    )
    cut = {name: values[:1] if name in norms else values for name, values in tensors.items()}
    fault = faults_of(form(cut))
    assert all(name in fault for name in norms)
    many = {f"model.more.{number:03}": ROWS for number in range(60)}
    assert "model.more.049 and 10 more)" in faults_of(form(tensors | many))
