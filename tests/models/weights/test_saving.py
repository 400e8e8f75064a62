"""Weights are saved as the tensors they were made of, whole or not at all, and restored on any number of devices."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint
import pytest
import transformers
from flax import nnx
from safetensors.numpy import load_file

from jpaged.models.config.rope import RopeConfig
from jpaged.models.formats.checkpoint import UnsavedTensor
from jpaged.models.formats.safetensors_checkpoint import SafetensorsCheckpoint
from jpaged.models.formats.safetensors_writing import write_safetensors
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.opening.reading import config_from_hf
from jpaged.models.weights.dummy import dummy_weights
from jpaged.models.weights.loading import abstract_weights, check_tensors, load_weights
from jpaged.models.weights.saving import new_directory, save_checkpoint
from jpaged.models.weights.weights import Weights
from jpaged.pallas_kernels.layer_ops import XLA_OPS
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.sharding import device_mesh

from ...gguf_file import convert_to_gguf
from ..opening.test_gguf_checkpoint import LLAMA as GGUF_LLAMA
from ..opening.test_gguf_checkpoint import hf_tensors
from .processes import run_python

LLAMA = Path(__file__).parents[2] / "golden" / "families" / "llama"
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 0, "bos_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "biases and a tied head": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "fused": {"architectures": ["Phi3ForCausalLM"]},
    "transposed": {"architectures": ["GPT2LMHeadModel"]},
    "fused head by head": {"architectures": ["GPTNeoXForCausalLM"]},
}
OPS = {"native": NATIVE_OPS, "xla": XLA_OPS}
FAST = ("orbax", "native"), ("safetensors", "xla")
"""Formats and layouts that every run restores; slow tests restore all."""


def random_weights(ops, dtype="float32", **config) -> Weights:
    """Return weights no two of which are equal, norms and biases among them."""
    config = config_from_hf({**SIZES, **config}, Path("config.json"))
    weights = dummy_weights(abstract_weights(config, dtype, device_mesh(jax.devices()[:1]), ops))
    rng, leaves = np.random.default_rng(0), dict(nnx.to_flat_state(weights.state))
    for path, leaf in leaves.items():
        if leaf[...].ndim == 1:
            leaves[path] = leaf.replace(jax.numpy.asarray(rng.normal(size=leaf[...].shape), dtype))
    return replace(weights, state=nnx.from_flat_state(leaves))


def opened(directory):
    """Open a directory that may hold either format."""
    return open_checkpoint(directory, orbax=directory if (directory / "_METADATA").is_file() else None)


def restored(directory, ops, dtype="float32") -> Weights:
    config, checkpoint = opened(directory)
    abstract = abstract_weights(config, dtype, device_mesh(jax.devices()[:1]), ops)
    check_tensors(abstract, config, checkpoint)
    return load_weights(abstract, config, checkpoint)


def bits(weights):
    return {path: np.asarray(leaf[...]).tobytes() for path, leaf in nnx.to_flat_state(weights.state)}


@pytest.mark.parametrize(
    ("format", "ops", "family"),
    [
        pytest.param(
            *(format, ops, family),
            id=f"{format}-{name}-{kind}",
            # Each format, each way to store weights and each family once.
            marks=[pytest.mark.slow] * ((format, name) != FAST[index % len(FAST)]),
        )
        for format in ("orbax", "safetensors")
        for name, ops in OPS.items()
        for index, (kind, family) in enumerate(FAMILIES.items())
    ],
)
def test_what_is_saved_from_any_layout_is_restored_bit_for_bit_in_any(tmp_path, format, family, ops):
    """The dtype of config.json is that of what was saved."""
    dtype = "bfloat16" if ops is NATIVE_OPS else "float32"
    weights = random_weights(ops, dtype, **family)
    save_checkpoint(weights, tmp_path / "saved", format=format)
    assert bits(restored(tmp_path / "saved", ops, dtype)) == bits(weights)
    assert opened(tmp_path / "saved")[0] == replace(weights.config, dtype=dtype)
    other = XLA_OPS if ops is NATIVE_OPS else NATIVE_OPS
    assert bits(restored(tmp_path / "saved", other, dtype)) == bits(random_weights(other, dtype, **family))


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_tensors_have_the_names_and_shapes_that_they_were_loaded_with(tmp_path, format):
    """Other programs read them: orbax itself, and the package safetensors."""
    save_checkpoint(restored(LLAMA, NATIVE_OPS), tmp_path / "saved", format=format)
    if format == "orbax":
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            found = checkpointer.restore(tmp_path / "saved")
    else:
        found = load_file(tmp_path / "saved" / "model.safetensors")
    wanted = load_file(LLAMA / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert np.array_equal(found[name], values.astype(np.float32)), name
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config == {**json.loads((LLAMA / "config.json").read_text()), "dtype": "float32"}


@pytest.mark.parametrize("is_gguf", [True, False], ids=["gguf", "safetensors"])
def test_transformers_reads_the_config_that_is_saved(tmp_path, is_gguf):
    """GGUF files have no config.json; what it would have is what the family reads of theirs."""
    path = convert_to_gguf(tmp_path / "m.gguf", GGUF_LLAMA, hf_tensors(GGUF_LLAMA)) if is_gguf else LLAMA
    weights = restored(path, XLA_OPS)
    save_checkpoint(weights, tmp_path / "saved", format="safetensors")
    found = transformers.AutoConfig.from_pretrained(tmp_path / "saved")
    assert (type(found).__name__, found.architectures) == ("LlamaConfig", ["LlamaForCausalLM"])
    assert (found.hidden_size, found.vocab_size) == (weights.config.hidden_size, weights.config.vocab_size)
    assert found.rope_parameters["rope_theta"] == weights.config.ropes[0].theta


TWO_DEVICES = """
import json, sys
from pathlib import Path
import jax, numpy as np
from flax import nnx
from jpaged.models.formats.checkpoint import UnsavedTensor
from jpaged.models.formats.safetensors_checkpoint import SafetensorsCheckpoint
from jpaged.models.formats.safetensors_writing import write_safetensors
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.formats.orbax_checkpoint import OrbaxCheckpoint
from jpaged.models.weights.loading import abstract_weights, load_weights
from jpaged.models.weights.saving import save_checkpoint
from jpaged.sharding import device_mesh

class Recorded(OrbaxCheckpoint):
    read_rows = {}
    def read(self, name, rows, columns=slice(None)):
        self.read_rows.setdefault(name, []).append((rows.start, rows.stop))
        return super().read(name, rows, columns)

def by_device(values, metadata):
    # Return a weight of one device as several hold it: the first half of each of its parts, then the second.
    if "parts" not in metadata:
        return values
    sizes = [size for _, size in metadata["parts"]]
    parts = np.split(values, np.cumsum(sizes)[:-1], axis=-1)
    count = metadata["num_shards"]
    return np.concatenate([np.split(part, count, axis=-1)[i] for i in range(count) for part in parts], axis=-1)

source, target = map(Path, sys.argv[1:])
config, _ = open_checkpoint(source, orbax=source)
checkpoint = Recorded(source)
one, two = (
    load_weights(abstract_weights(config, "float32", device_mesh(jax.devices()[:count])), config, opened)
    for count, opened in ((1, OrbaxCheckpoint(source)), (2, checkpoint))
)
wanted, num_shards = dict(nnx.to_flat_state(one.state)), {}
for path, leaf in nnx.to_flat_state(two.state):
    array, values = leaf[...], by_device(np.asarray(wanted[path][...]), leaf.get_metadata())
    assert np.array_equal(np.asarray(array), values), path
    assert len(array.devices()) == 2, path
    for shard in array.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), values[shard.index]), (path, shard.device)
    num_shards[".".join(map(str, path))] = len({str(shard.index) for shard in array.addressable_shards})
save_checkpoint(two, target, format="safetensors")
print(json.dumps({"read": checkpoint.read_rows, "num_shards": num_shards}))
"""


def test_two_devices_restore_what_one_does_each_its_own_slices_and_save_the_same_tensors(tmp_path):
    """Every array is equal as a whole and shard by shard."""
    save_checkpoint(restored(LLAMA, NATIVE_OPS), tmp_path / "one")
    flags = "--xla_force_host_platform_device_count=2"
    found = json.loads(run_python(TWO_DEVICES, str(tmp_path / "one"), str(tmp_path / "two"), flags=flags).stdout)
    read, num_shards = found["read"], found["num_shards"]
    assert {path for path, count in num_shards.items() if count == 1} == {path for path in num_shards if "norm" in path}
    assert sorted(read["model.layers.0.self_attn.q_proj.weight"]) == [[0, 32], [32, 64]]
    assert sorted(read["model.embed_tokens.weight"]) == [[0, 48], [48, 96]]
    found, wanted = load_file(tmp_path / "two" / "model.safetensors"), load_file(LLAMA / "model.safetensors")
    assert all(np.array_equal(found[name], values.astype(np.float32)) for name, values in wanted.items())


def test_a_quantized_checkpoint_is_saved_as_plain_numbers(tmp_path):
    weights = restored(LLAMA, XLA_OPS)
    source = {**weights.config.source, "quantization_config": {"quant_method": "fp8"}, "torch_dtype": "bfloat16"}
    save_checkpoint(replace(weights, config=replace(weights.config, source=source)), tmp_path / "saved")
    assert bits(restored(tmp_path / "saved", XLA_OPS)) == bits(weights)
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved == {**weights.config.source, "dtype": "float32"}


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_a_save_that_fails_leaves_nothing_behind(tmp_path, format):
    weights = random_weights(XLA_OPS, **FAMILIES["fused"])
    jax.tree.leaves(weights.state)[-1].delete()
    with pytest.raises(RuntimeError, match="deleted"):
        save_checkpoint(weights, tmp_path / "saved", format=format)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    weights = random_weights(XLA_OPS, **FAMILIES["fused"])
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    rope = RopeConfig(kind="llama3", freq_factors=(1.0,) * 8)
    divided = replace(weights, config=replace(weights.config, ropes=(None, rope)))
    for wrong, directory, format, message in (
        (weights, "used", "orbax", "directory: got .*used, which is there already, wanted a new or an empty one"),
        (weights, "used/file", "orbax", "directory: got .*file, which is there already"),
        (weights, "new", "gguf", "format: got 'gguf', allowed: orbax, safetensors"),
        (replace(weights, config=None), "new", "orbax", "without the config.json of their model"),
        (divided, "new", "orbax", "weights: got a rotary embedding with a divisor for each frequency.* keep the GGUF"),
    ):
        with pytest.raises(ValueError, match=message):
            save_checkpoint(wrong, tmp_path / directory, format=format)
    assert [path.name for path in tmp_path.iterdir()] == ["used"]
    (tmp_path / "empty").mkdir()
    save_checkpoint(weights, tmp_path / "empty", format="safetensors")
    assert (tmp_path / "empty" / "config.json").is_file()


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_a_manifest_is_one_that_sha256sum_finds_right(tmp_path, format):
    save_checkpoint(random_weights(XLA_OPS, **FAMILIES["transposed"]), tmp_path / "saved", format=format, manifest=True)
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    found = subprocess.run(command, cwd=tmp_path / "saved", capture_output=True, text=True, check=True)
    listed = {line.removesuffix(": OK") for line in found.stdout.splitlines()}
    saved = tmp_path / "saved"
    files = {path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file()}
    assert listed == files - {"SHA256SUMS"}


def test_tensors_beyond_a_shard_are_spread_over_files_with_an_index(tmp_path):
    """Each file has at most so many bytes, or one tensor alone."""
    stored, limit = load_file(LLAMA / "model.safetensors"), 20_000
    tensors = {name: UnsavedTensor(values.shape, values.dtype, values.copy) for name, values in stored.items()}
    write_safetensors(tmp_path, tensors, shard_bytes=limit)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = {name: load_file(tmp_path / name) for name in set(index["weight_map"].values())}
    assert sorted(shards) == [
        f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)
    ]
    sizes = {name: [values.nbytes for values in shard.values()] for name, shard in shards.items()}
    assert all(sum(each) <= limit or len(each) == 1 for each in sizes.values())
    assert any(len(each) > 1 for each in sizes.values())
    assert index["metadata"]["total_size"] == sum(map(sum, sizes.values()))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert set(checkpoint.names()) == tensors.keys()
    for name, values in stored.items():
        np.testing.assert_array_equal(checkpoint.read(name, slice(None)), values)


def test_a_checkpoint_is_replaced_as_a_whole_or_stays(tmp_path):
    weights, directory = random_weights(XLA_OPS, **FAMILIES["fused"]), tmp_path / "saved"
    save_checkpoint(weights, directory, format="safetensors")
    (directory / "optimizer.npy").touch()
    before = {path: path.read_bytes() for path in directory.iterdir()}

    def interrupted() -> None:
        with new_directory(directory, overwrite=True) as unfinished:
            (unfinished / "config.json").write_text("{}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert {path: path.read_bytes() for path in directory.iterdir()} == before
    save_checkpoint(weights, directory, format="orbax", overwrite=True)
    assert bits(restored(directory, XLA_OPS)) == bits(weights)
    assert not {"model.safetensors", "optimizer.npy"} & {path.name for path in directory.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "file").touch()
    with pytest.raises(ValueError, match="notes, which holds no checkpoint, wanted one to overwrite: give another"):
        save_checkpoint(weights, tmp_path / "notes", overwrite=True)
