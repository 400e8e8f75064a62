"""A GGUF file of a model with experts loads as the checkpoint that it was converted from, as floats and as codes."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType

from jpaged.models.errors import ModelLoadError
from jpaged.models.layers import stored_matrix
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.weights.coded import codes_note, reasons_for_floats, stored_formats
from jpaged.models.weights.loading import abstract_weights, check_tensors, load_weights
from jpaged.pallas_kernels.code_formats import CODE_FORMATS
from jpaged.pallas_kernels.layer_ops import XLA_OPS, LayerOps
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.sharding import device_mesh

from ...expert_models import MODELS, write_model
from ...gguf_file import convert_to_gguf

MESH = device_mesh(jax.devices()[:1])
YARN_METADATA = {
    "gpt-oss.rope.freq_base": 150000.0,
    "gpt-oss.rope.scaling.type": "yarn",
    "gpt-oss.rope.scaling.factor": 32.0,
    "gpt-oss.rope.scaling.original_context_length": 16,
}


FORMS = *MODELS, "Mixtral by expert"


def write_both(directory: Path, form: str, kind: Any = GGMLQuantizationType.F32) -> Path:
    """Write a random model as a directory and as a GGUF file in it, and return the path of the file."""
    family, _, by_expert = form.partition(" ")
    config, tensors = write_model(directory, family)
    metadata = YARN_METADATA if family == "GptOss" else {}
    options = {"kind": kind, "metadata": metadata, "is_by_expert": bool(by_expert)}
    return convert_to_gguf(directory / "m.gguf", config, tensors, **options)


def load(path: Path, ops: LayerOps = XLA_OPS, *, keeps_codes: bool = False):
    config, checkpoint = open_checkpoint(path)
    formats = stored_formats(checkpoint) if keeps_codes else ()
    abstract = abstract_weights(config, "float32", MESH, ops, formats)
    check_tensors(abstract, config, checkpoint)
    return config, load_weights(abstract, config, checkpoint)


@pytest.mark.parametrize("family", FORMS)
def test_a_gguf_file_with_experts_loads_as_the_directory_it_was_converted_from(tmp_path, family):
    (config, weights), (expected_config, expected) = load(write_both(tmp_path, family)), load(tmp_path)
    fields = {**vars(config), "source": None, "norm_eps": pytest.approx(config.norm_eps, rel=1e-6)}
    assert fields == {**vars(expected_config), "source": None}
    leaves = dict(nnx.to_flat_state(weights.state))
    for path, leaf in nnx.to_flat_state(expected.state):
        np.testing.assert_array_equal(leaves[path][...], leaf[...], err_msg=str(path))


@pytest.mark.parametrize("family", FORMS)
def test_codes_of_experts_are_kept_and_stand_for_the_numbers_that_the_file_gives(tmp_path, family):
    """Routers and gates of shared experts stay floats."""
    path = write_both(tmp_path, family, GGMLQuantizationType.Q8_0)
    (_, floats), (_, codes) = load(path, NATIVE_OPS), load(path, NATIVE_OPS, keeps_codes=True)
    leaves = dict(nnx.to_flat_state(floats.state))
    for weight_path, leaf in nnx.to_flat_state(codes.state):
        metadata = leaf.get_metadata()
        if "matrix" in metadata:
            assert ("code_parts" in metadata) is {"router", "shared_gate"}.isdisjoint(weight_path), weight_path
        if "matrix" in metadata and "num_experts" in metadata:
            rows = [np.asarray(_all_rows(each)) for each in (leaf, leaves[weight_path])]
            np.testing.assert_array_equal(*rows, err_msg=str(weight_path))
    note = codes_note(codes.state, stored_formats(open_checkpoint(path)[1]))
    assert note is not None
    assert "are kept as codes of Q8_0" in note


@pytest.mark.parametrize(
    ("ops", "other", "name"), [(NATIVE_OPS, "Q4_0", "Q4_0"), (NATIVE_OPS, None, "floats"), (XLA_OPS, None, "floats")]
)
def test_experts_of_one_matrix_in_several_formats_become_floats(tmp_path, ops, other, name):
    """Those of another matrix or layer stay codes, and the start says once which become floats, and why."""
    config, checkpoint = open_checkpoint(write_both(tmp_path, "Mixtral by expert", GGMLQuantizationType.Q8_0))
    formats = dict(stored_formats(checkpoint))
    formats["model.layers.0.block_sparse_moe.experts.1.w1.weight"] = CODE_FORMATS.get(other)
    state = abstract_weights(config, "float32", MESH, ops, tuple(formats.items())).state
    experts = {path: leaf.get_metadata() for path, leaf in nnx.to_flat_state(state) if "experts" in path}
    floats = {path for path, metadata in experts.items() if "code_parts" not in metadata}
    assert floats == {("layers", 0, "mlp", "experts", "gate_up_proj", "weight")}
    assert reasons_for_floats(state) == [
        f"gate_up_proj of experts becomes floats: got Q8_0 and {name} for 64 inputs and 64 outputs of an expert, "
        "wanted the same formats for all experts, by rows of Wᵀ whose number and length are multiples of 32; a file "
        "that stores them so keeps its codes"
    ]


def _all_rows(leaf: Any) -> jax.Array:
    num_in, num_out = leaf.matrix
    return leaf.ops.columns(stored_matrix(leaf), np.arange(num_out, dtype=np.int32), num_in)


def test_a_file_of_mixtral_with_a_window_stays_one_of_mixtral(tmp_path):
    content, tensors = write_model(tmp_path, "Mixtral")
    config, _ = open_checkpoint(convert_to_gguf(tmp_path / "m.gguf", content | {"sliding_window": 8}, tensors))
    assert (config.architecture, config.windows) == ("MixtralForCausalLM", (8, 8))


def test_ways_to_choose_experts_that_a_family_has_not_are_refused(tmp_path):
    config = {"architectures": ["MixtralForCausalLM"], **MODELS["Mixtral"]}
    for key, value in {"expert_weights_scale": 2.5, "expert_group_count": 4, "expert_gating_func": 2}.items():
        embedding = {"model.embed_tokens.weight": np.zeros((10, 64), np.float32)}
        path = convert_to_gguf(tmp_path / "m.gguf", config, embedding, metadata={f"llama.{key}": value})
        with pytest.raises(ModelLoadError, match=f"llama.{key}"):
            open_checkpoint(path)


@pytest.mark.parametrize("metadata", [{"llama.expert_count": None}, {"llama.expert_count": 0}])
def test_tensors_of_experts_without_their_number_are_refused_and_dense_ones_are_read(tmp_path, metadata):
    """A key for the number of chosen experts alone makes no experts."""
    config, tensors = write_model(tmp_path, "Mixtral")
    path = convert_to_gguf(tmp_path / "m.gguf", config, tensors, metadata=metadata)
    with pytest.raises(ModelLoadError, match=r"llama.expert_count is (missing|0), wanted .* ffn_gate_inp: conv"):
        open_checkpoint(path)
    dense = {"architectures": ["LlamaForCausalLM"], **MODELS["Mixtral"]}
    tensors = {name: values for name, values in tensors.items() if "block_sparse_moe" not in name}
    config, _ = open_checkpoint(convert_to_gguf(tmp_path / "d.gguf", dense, tensors, metadata=metadata))
    assert config.experts is None


@pytest.mark.parametrize("family", ["Qwen2Moe", "Qwen3Moe", "GptOss"])
def test_a_file_of_a_family_with_experts_names_their_number(tmp_path, family):
    """Else a default of config.json, such as 60 experts, would count."""
    config, tensors = write_model(tmp_path, family)
    names = {"Qwen2Moe": "qwen2moe", "Qwen3Moe": "qwen3moe", "GptOss": "gpt-oss"}
    tensors = {name: values for name, values in tensors.items() if ".mlp." not in name}
    config = {key: value for key, value in config.items() if key not in ("num_experts", "num_local_experts")}
    with pytest.raises(ModelLoadError, match=f"{names[family]}.expert_count is missing, wanted the number"):
        open_checkpoint(convert_to_gguf(tmp_path / "m.gguf", config, tensors))
