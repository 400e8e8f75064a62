"""A GGUF file gives back the model that it was converted from: its config, its tensors and its loaded weights."""

import json
import struct
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType
from safetensors.numpy import save_file

from jpaged.models.errors import ModelLoadError
from jpaged.models.formats.gguf import read_gguf
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.weights.loading import abstract_weights, check_tensors, load_weights
from jpaged.sharding import device_mesh

from ...gguf_file import convert_to_gguf, write_gguf

EMBEDDING = "model.embed_tokens.weight"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
GEMMA = LLAMA | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True}
GEMMA2_CAPS = {"attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, biases": LLAMA | {"attention_bias": True},
    "llama, tied": LLAMA | {"tie_word_embeddings": True},
    "qwen2": LLAMA | {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": QWEN3,
    "qwen3, biases": QWEN3 | {"attention_bias": True},
    "gemma2": GEMMA | {"architectures": ["Gemma2ForCausalLM"], **GEMMA2_CAPS},
    "gemma3": GEMMA | {"architectures": ["Gemma3ForCausalLM"], "rope_theta": 5e5},
}


def hf_tensors(config):
    """Return random tensors for all weights of a model, under Hugging Face's names."""
    random = np.random.default_rng(0)
    (architecture,), head_size = config["architectures"], config.get("head_dim", 8)
    matrices = {
        "self_attn.q_proj": (4 * head_size, 32),
        "self_attn.k_proj": (2 * head_size, 32),
        "self_attn.v_proj": (2 * head_size, 32),
        "self_attn.o_proj": (32, 4 * head_size),
        "mlp.gate_proj": (64, 32),
        "mlp.up_proj": (64, 32),
        "mlp.down_proj": (32, 64),
    }
    vectors = {"input_layernorm.weight": 32, "post_attention_layernorm.weight": 32}
    if architecture.startswith("Gemma"):
        vectors |= {"pre_feedforward_layernorm.weight": 32, "post_feedforward_layernorm.weight": 32}
    if architecture.startswith(("Qwen3", "Gemma3")):
        vectors |= {"self_attn.q_norm.weight": head_size, "self_attn.k_norm.weight": head_size}
    has_bias = config.get("attention_bias", False)
    for name in "qkvo" if has_bias else "qkv" if architecture.startswith("Qwen2") else "":
        vectors[f"self_attn.{name}_proj.bias"] = matrices[f"self_attn.{name}_proj"][0]
    is_tied = config.get("tie_word_embeddings", False)
    shapes = {EMBEDDING: (10, 32), "model.norm.weight": (32,)} | ({} if is_tied else {"lm_head.weight": (10, 32)})
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"model.layers.{i}.{name}": (length,) for name, length in vectors.items()}
    return {name: random.uniform(-0.9, 0.9, shape).astype(np.float32) for name, shape in shapes.items()}


def tolerance(config, name):
    """Return how far a tensor may be off: 1 + w, as Gemma's norms are stored, rounds w to half of 2 ** −23."""
    is_gemma = config["architectures"][0].startswith("Gemma")
    return 1e-7 if is_gemma and name.endswith("norm.weight") else 0


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_a_gguf_file_gives_back_the_tensors_it_was_converted_from(tmp_path, model):
    """Any rows come back, bit for bit except Gemma's norms."""
    written = hf_tensors(model)
    _, checkpoint = open_checkpoint(convert_to_gguf(tmp_path / "m.gguf", model, written))
    assert set(checkpoint.names()) == set(written)
    for name, values in written.items():
        assert checkpoint.shape(name) == values.shape
        for rows in (slice(None), slice(3, 9), slice(5, 6), slice(-3, None)):
            read = checkpoint.read(name, rows)
            assert read.dtype == np.float32
            np.testing.assert_allclose(read, values[rows], rtol=0, atol=tolerance(model, name), err_msg=name)


def load(path):
    """Return the fields of the config that say what the model computes, and the loaded weights by path."""
    config, checkpoint = open_checkpoint(path)
    abstract = abstract_weights(config, "float32", device_mesh(jax.devices()[:1]))
    check_tensors(abstract, config, checkpoint)
    weights = load_weights(abstract, config, checkpoint)
    fields = {**vars(config), "source": None, "norm_eps": pytest.approx(config.norm_eps, rel=1e-6)}
    return fields, {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(weights.state)}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_a_gguf_file_loads_as_the_directory_it_was_converted_from(tmp_path, model):
    tensors = hf_tensors(model)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(model))
    config, weights = load(convert_to_gguf(tmp_path / "m.gguf", model, tensors))
    expected_config, expected = load(tmp_path)
    assert config == expected_config
    assert weights.keys() == expected.keys()
    for path, values in expected.items():
        atol = tolerance(model, ".".join(map(str, path)))
        np.testing.assert_allclose(weights[path], values, rtol=0, atol=atol, err_msg=str(path))


BIASED = {f"self_attn.{part}_proj": "attention_bias" for part in "qkvo"} | {
    f"mlp.{part}_proj": "mlp_bias" for part in ("gate", "up", "down")
}


@pytest.mark.parametrize(
    "present",
    [("0.self_attn.q_proj", "0.self_attn.k_proj", "0.self_attn.v_proj", "1.self_attn.q_proj", "1.self_attn.k_proj",
      "1.self_attn.v_proj"), ("1.self_attn.v_proj",), ("0.self_attn.o_proj", "1.mlp.up_proj"), ("0.mlp.down_proj",)],
    ids=["all of q, k and v", "v of a layer", "an output and an up", "a down"],
)  # fmt: skip
def test_biases_that_a_file_lacks_beside_others_are_zeros(tmp_path, present):
    """llama.cpp takes each bias as there or not; config.json has one key for all of attention and one for the MLP."""
    switches = {BIASED[name[2:]]: True for name in present}
    in_directory, in_file = hf_tensors(LLAMA), hf_tensors(LLAMA)
    for name, switch in BIASED.items():
        for layer in range(2) if switch in switches else ():
            module = f"model.layers.{layer}.{name}"
            bias = np.zeros(len(in_file[f"{module}.weight"]), np.float32)
            if f"{layer}.{name}" in present:
                in_file[f"{module}.bias"] = bias = np.linspace(-1, 1, len(bias), dtype=np.float32)
            in_directory[f"{module}.bias"] = bias
    save_file(in_directory, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | switches))
    config, weights = load(convert_to_gguf(tmp_path / "m.gguf", LLAMA, in_file))
    expected_config, expected = load(tmp_path)
    assert config == expected_config
    for path, values in expected.items():
        np.testing.assert_array_equal(weights[path], values, err_msg=str(path))


def test_a_qwen2_file_must_have_all_its_biases(tmp_path):
    qwen2 = MODELS["qwen2"]
    tensors = hf_tensors(qwen2)
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.self_attn\.k_proj\.bias is missing \(1 of"):
        load(convert_to_gguf(tmp_path / "m.gguf", qwen2, tensors))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_quantized_rows_equal_those_of_the_dequantized_tensor(tmp_path, kind):
    """The rows are equal bit for bit: quantization works along a row, so rows may be permuted before or after."""
    kind = GGMLQuantizationType[kind]
    written = hf_tensors(LLAMA)
    _, checkpoint = open_checkpoint(convert_to_gguf(tmp_path / "m.gguf", LLAMA, written, kind=kind))
    for name, values in written.items():
        expected = values if values.ndim == 1 else gguf.dequantize(gguf.quantize(values, kind), kind)
        np.testing.assert_array_equal(checkpoint.read(name, slice(2, 9)), expected[2:9], err_msg=name)


def test_only_the_wanted_rows_are_read(tmp_path):
    """The second head of q is stored in eight rows; the rows of the other heads are overwritten here."""
    written = hf_tensors(LLAMA)
    path = convert_to_gguf(tmp_path / "m.gguf", LLAMA, written)
    tensor = read_gguf(path).tensors["blk.1.attn_q.weight"]
    content = bytearray(path.read_bytes())
    start, row_bytes = tensor.offset, tensor.row_bytes
    content[start : start + 8 * row_bytes] = b"\xff" * (8 * row_bytes)
    content[start + 16 * row_bytes : start + 32 * row_bytes] = b"\xff" * (16 * row_bytes)
    path.write_bytes(content)
    name = "model.layers.1.self_attn.q_proj.weight"
    np.testing.assert_array_equal(open_checkpoint(path)[1].read(name, slice(8, 16)), written[name][8:16])


def test_a_gguf_tensor_without_a_hugging_face_name_keeps_its_own(tmp_path):
    """Factors of the rotary embedding belong to the config and are no tensor of the checkpoint."""
    path = convert_to_gguf(tmp_path / "m.gguf", LLAMA, {EMBEDDING: np.zeros((10, 32), np.float32)})
    metadata = {key: value for key, value in read_gguf(path).metadata.items() if key.startswith("llama.")}
    names = ("token_embd.weight", "blk.0.attn_q_norm.weight", "blk.00.attn_q.weight")
    tensors = {name: np.zeros((10, 32), np.float32) for name in names}
    write_gguf(path, metadata, tensors | {"rope_freqs.weight": np.ones(4, np.float32)})
    assert set(open_checkpoint(path)[1].names()) == {EMBEDDING, *names[1:]}


def test_a_type_that_the_gguf_package_cannot_dequantize_is_named(tmp_path):
    path = convert_to_gguf(tmp_path / "m.gguf", LLAMA, hf_tensors(LLAMA))
    content = path.read_bytes()
    header = b"token_embd.weight" + struct.pack("<IQQI", 2, 32, 10, GGMLQuantizationType.F32)
    assert header in content
    path.write_bytes(content.replace(header, header[:-4] + struct.pack("<I", GGMLQuantizationType.I32)))
    with pytest.raises(ModelLoadError, match=r"m\.gguf: tensor 'token_embd.weight' is stored as I32"):
        open_checkpoint(path)[1].read(EMBEDDING, slice(None))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")]
)
def test_quantized_matrices_are_served_in_a_dtype_that_the_kernels_of_gpus_take(tmp_path, kind, dtype):
    path = convert_to_gguf(tmp_path / "m.gguf", LLAMA, hf_tensors(LLAMA), kind=GGMLQuantizationType[kind])
    assert open_checkpoint(path)[0].dtype == dtype
