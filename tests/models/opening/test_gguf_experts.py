"""A GGUF file of a model with experts loads as the checkpoint that it was converted from, as floats and as codes."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType
from safetensors.numpy import save_file

from jpaged.models.errors import ModelLoadError
from jpaged.models.layers import stored_matrix
from jpaged.models.opening.open_checkpoint import open_checkpoint, read_config
from jpaged.models.weights.coded import codes_note, stored_formats
from jpaged.models.weights.loading import abstract_weights, check_tensors, load_weights, tensor_shapes
from jpaged.pallas_kernels.layer_ops import XLA_OPS, LayerOps
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.sharding import device_mesh

from ...gguf_file import convert_to_gguf

MESH = device_mesh(jax.devices()[:1])
SIZES = {
    "vocab_size": 10, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "bos_token_id": None,
    "eos_token_id": None, "num_experts_per_tok": 2, "head_dim": 16,
}  # fmt: skip
QWEN = SIZES | {"num_experts": 3, "moe_intermediate_size": 32}
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16, "truncate": False,
}  # fmt: skip
YARN_METADATA = {
    "gpt-oss.rope.freq_base": 150000.0,
    "gpt-oss.rope.scaling.type": "yarn",
    "gpt-oss.rope.scaling.factor": 32.0,
    "gpt-oss.rope.scaling.original_context_length": 16,
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Mixtral": (SIZES | {"num_local_experts": 3, "rope_theta": 1e4}, {}),
    "Qwen2Moe": (QWEN | {"shared_expert_intermediate_size": 64}, {}),
    "Qwen3Moe": (QWEN | {"norm_topk_prob": True}, {}),
    "GptOss": (SIZES | {"num_local_experts": 3, "sliding_window": 8, "rope_parameters": YARN}, YARN_METADATA),
}


def write_model(directory: Path, family: str, kind: Any = GGMLQuantizationType.F32) -> Path:
    """Write a random model as a directory and as a GGUF file beside it, and return the path of the file."""
    fields, metadata = MODELS[family]
    config = {"architectures": [f"{family}ForCausalLM"], **fields}
    (directory / "config.json").write_text(json.dumps(config))
    random, shapes = np.random.default_rng(0), tensor_shapes(read_config(directory), MESH)
    tensors = {name: random.uniform(-0.9, 0.9, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return convert_to_gguf(directory / "m.gguf", config, tensors, kind=kind, metadata=metadata)


def load(path: Path, ops: LayerOps = XLA_OPS, *, keeps_codes: bool = False):
    config, checkpoint = open_checkpoint(path)
    formats = stored_formats(checkpoint) if keeps_codes else ()
    abstract = abstract_weights(config, "float32", MESH, ops, formats)
    check_tensors(abstract, config, checkpoint)
    return config, load_weights(abstract, config, checkpoint)


@pytest.mark.parametrize("family", MODELS)
def test_a_gguf_file_with_experts_loads_as_the_directory_it_was_converted_from(tmp_path, family):
    (config, weights), (expected_config, expected) = load(write_model(tmp_path, family)), load(tmp_path)
    fields = {**vars(config), "source": None, "norm_eps": pytest.approx(config.norm_eps, rel=1e-6)}
    assert fields == {**vars(expected_config), "source": None}
    leaves = dict(nnx.to_flat_state(weights.state))
    for path, leaf in nnx.to_flat_state(expected.state):
        np.testing.assert_array_equal(leaves[path][...], leaf[...], err_msg=str(path))


@pytest.mark.parametrize("family", MODELS)
def test_codes_of_experts_are_kept_and_stand_for_the_numbers_that_the_file_gives(tmp_path, family):
    """Routers and gates of shared experts stay floats."""
    path = write_model(tmp_path, family, GGMLQuantizationType.Q8_0)
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


def _all_rows(leaf: Any) -> jax.Array:
    num_in, num_out = leaf.matrix
    return leaf.ops.columns(stored_matrix(leaf), np.arange(num_out, dtype=np.int32), num_in)


def test_ways_to_choose_experts_that_a_family_has_not_are_refused(tmp_path):
    fields, _ = MODELS["Mixtral"]
    config = {"architectures": ["MixtralForCausalLM"], **fields}
    for key, value in {"expert_weights_scale": 2.5, "expert_group_count": 4, "expert_gating_func": 2}.items():
        embedding = {"model.embed_tokens.weight": np.zeros((10, 64), np.float32)}
        path = convert_to_gguf(tmp_path / "m.gguf", config, embedding, metadata={f"llama.{key}": value})
        with pytest.raises(ModelLoadError, match=f"llama.{key}"):
            open_checkpoint(path)
