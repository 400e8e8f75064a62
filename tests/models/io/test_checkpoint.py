"""Checkpoints give rows back as they were written, and a damaged download is refused before memory is allocated."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import save_file

from jpaged.models.errors import ModelLoadError
from jpaged.models.io.gguf import read_gguf
from jpaged.models.io.open_checkpoint import open_checkpoint
from jpaged.models.io.safetensors_checkpoint import SafetensorsCheckpoint

from ...gguf_file import write_gguf

EMBEDDING = "model.embed_tokens.weight"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TENSORS = {"a": (4, 3), "b": (6, 2), "c": (5,)}


def arrays(dtype=np.float32):
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(dtype) for name, shape in TENSORS.items()}


def write_shards(directory, shards, weight_map=None):
    for name, tensors in shards.items():
        save_file(tensors, directory / name)
    if weight_map is None:
        weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    write_index(directory, {"metadata": {}, "weight_map": weight_map})


def write_index(directory, content):
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("num_files", [1, 2])
def test_safetensors_rows_come_back_bit_for_bit_in_their_own_dtype(tmp_path, dtype, num_files):
    written = arrays(dtype)
    if num_files == 1:
        save_file(written, tmp_path / "model.safetensors")
    else:
        first = {"a": written.pop("a")}
        write_shards(tmp_path, {"x-1.safetensors": first, "x-2.safetensors": written})
        written |= first
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert set(checkpoint.names()) == set(TENSORS)
    for name, values in written.items():
        assert checkpoint.shape(name) == values.shape
        for rows in (slice(None), slice(1, 3), slice(2, 100), slice(-2, None), slice(2, 2)):
            read = checkpoint.read(name, rows)
            assert read.dtype == dtype
            np.testing.assert_array_equal(read, values[rows])


def test_bfloat16_is_read_by_a_process_that_has_not_imported_ml_dtypes(tmp_path):
    save_file({"a": np.ones((2, 2), ml_dtypes.bfloat16)}, tmp_path / "model.safetensors")
    code = (
        "import sys; from pathlib import Path;"
        "from jpaged.models.io.safetensors_checkpoint import SafetensorsCheckpoint;"
        "print(SafetensorsCheckpoint(Path(sys.argv[1])).read('a', slice(None)).dtype)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    checkout = Path(__file__).resolve().parents[3]
    out = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(checkout)}, capture_output=True, timeout=60)
    assert out.stdout.strip() == b"bfloat16", out.stderr.decode()


def test_the_single_file_is_read_where_an_index_exists_too(tmp_path):
    write_shards(tmp_path, {"x-1.safetensors": {"of the shard": np.ones(1, np.float32)}})
    save_file({"of the single file": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    assert set(SafetensorsCheckpoint(tmp_path).names()) == {"of the single file"}


def test_a_tensor_of_another_dtype_is_refused_only_when_it_is_read(tmp_path):
    save_file({"ids": np.arange(3), "w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.read("w", slice(None)).sum() == 3
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: tensor 'ids' is stored as I64, F32, BF16, F16"):
        checkpoint.read("ids", slice(None))


def safetensors_bytes(header, data=bytes(8)):
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(start, stop, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


WHOLE = safetensors_bytes({"a": entry(0, 4), "b": entry(4, 8)})
INCOMPLETE = "is not a complete safetensors file"
DAMAGED = {
    "empty": (b"", "is empty"),
    "HTML": (b"\n<!DOCTYPE html><html></html>", "is an HTML page"),
    "git-LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-LFS pointer.*git lfs pull"),
    "truncated data": (WHOLE[:-1], INCOMPLETE),
    "truncated header": (WHOLE[:20], INCOMPLETE),
    "trailing bytes": (WHOLE + b"x", INCOMPLETE),
    "header is garbage": (struct.pack("<Q", 8) + b"\xff" * 8, INCOMPLETE),
    "header of 2^40 bytes": (struct.pack("<Q", 2**40) + b"{}", INCOMPLETE),
    "shape against size": (safetensors_bytes({"a": entry(0, 8)}), INCOMPLETE),
    "overlapping tensors": (safetensors_bytes({"a": entry(0, 4), "b": entry(0, 8, (2,))}), INCOMPLETE),
    "offset beyond the end": (safetensors_bytes({"a": entry(8, 12)}), INCOMPLETE),
    "unknown dtype": (safetensors_bytes({"a": entry(0, 8, (8,), "Q9")}), INCOMPLETE),
}


@pytest.mark.parametrize(("content", "message"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_refused_by_name(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=rf"model\.safetensors: .*{message}") as caught:
        SafetensorsCheckpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_damaged_shard_is_refused_by_name(tmp_path):
    write_shards(tmp_path, {"x-1.safetensors": one("w")}, {"w": "x-1.safetensors", "a": "x-2.safetensors"})
    (tmp_path / "x-2.safetensors").write_bytes(WHOLE[:-1])
    with pytest.raises(ModelLoadError, match=r"x-2\.safetensors: is not a complete safetensors file"):
        SafetensorsCheckpoint(tmp_path)


def one(name):
    return {name: np.ones(1, np.float32)}


BAD_INDEX = {
    "is no object": ([], "JSON list"),
    "no map": ({"metadata": {}}, "weight_map is empty or missing"),
    "map is a list": ({"weight_map": ["a"]}, "weight_map is"),
    "shard in the parent": ({"weight_map": {"a": "../x-1.safetensors"}}, r"'\.\./x-1.safetensors'"),
    "shard in a folder": ({"weight_map": {"a": "sub/x-1.safetensors"}}, "'sub/x-1.safetensors'"),
    "shard by backslash": ({"weight_map": {"a": "..\\x-1.safetensors"}}, "x-1.safetensors'"),
    "shard at an absolute path": ({"weight_map": {"a": "/x-1.safetensors"}}, "'/x-1.safetensors'"),
    "shard is a dot": ({"weight_map": {"a": ".."}}, r"'\.\.'"),
    "shard is a pickle": ({"weight_map": {"a": "x-1.bin"}}, "'x-1.bin'"),
    "shard is a number": ({"weight_map": {"a": 1}}, "in 1, wanted the name"),
    "shard absent": ({"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}, "names x-2.safetensors"),
    "tensor in no shard": ({"weight_map": {"a": "x-1.safetensors", "b": "x-1.safetensors"}}, "'b' .* in no shard"),
}


@pytest.mark.parametrize(("content", "message"), BAD_INDEX.values(), ids=BAD_INDEX.keys())
def test_a_bad_index_is_refused_by_name(tmp_path, content, message):
    directory = tmp_path / "model"
    (directory / "sub").mkdir(parents=True)
    for folder in (tmp_path, directory, directory / "sub"):
        save_file(one("a"), folder / "x-1.safetensors")
    write_index(directory, content)
    with pytest.raises(ModelLoadError, match=rf"model.safetensors.index.json: .*{message}"):
        SafetensorsCheckpoint(directory)


def test_a_tensor_in_another_shard_than_the_index_says_is_refused(tmp_path):
    shards = {"x-1.safetensors": one("a"), "x-2.safetensors": one("b")}
    write_shards(tmp_path, shards, {"a": "x-2.safetensors", "b": "x-1.safetensors"})
    with pytest.raises(ModelLoadError, match=r"'a' in x-2.safetensors, it is in x-1.safetensors"):
        SafetensorsCheckpoint(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    shards = {"x-1.safetensors": one("a"), "x-2.safetensors": one("a") | one("b")}
    write_shards(tmp_path, shards, {"a": "x-1.safetensors", "b": "x-2.safetensors"})
    with pytest.raises(ModelLoadError, match=r"x-2\.safetensors: tensor 'a' is in x-1\.safetensors too"):
        SafetensorsCheckpoint(tmp_path)


NO_WEIGHTS = {
    "nothing": ([], "holds no weights"),
    "pickles": (["pytorch_model.bin"], r"pickled weights only \(pytorch_model\.bin\).*never read"),
    "pickles by another name": (["consolidated.00.pth"], "pickled weights only"),
    "a GGUF file": (["m.gguf"], r"give that: .*m\.gguf"),
    "shards without an index": (["model-00001-of-00002.safetensors"], "holds model-00001-of-00002.safetensors but"),
}


@pytest.mark.parametrize(("names", "message"), NO_WEIGHTS.values(), ids=NO_WEIGHTS.keys())
def test_a_directory_without_safetensors_says_what_it_holds(tmp_path, names, message):
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelLoadError, match=message):
        SafetensorsCheckpoint(tmp_path)


def test_the_dtype_is_that_of_the_config_or_else_of_the_embedding(tmp_path):
    save_file({EMBEDDING: np.ones((10, 32), ml_dtypes.bfloat16)}, tmp_path / "model.safetensors")
    for data, dtype in ((CONFIG | {"dtype": "float16"}, "float16"), (CONFIG, "bfloat16")):
        (tmp_path / "config.json").write_text(json.dumps(data))
        config, checkpoint = open_checkpoint(tmp_path)
        assert (config.vocab_size, config.dtype, checkpoint.shape(EMBEDDING)) == (10, dtype, (10, 32))


BAD_JSON = {
    "missing": None,
    "empty": b"",
    "HTML": b"<html>",
    "not UTF-8": b"\xff\xfe{}",
    "cut": b'{"a": 1',
    "100,000 levels": b"[" * 100_000,
    "5,000 digits": b'{"a": ' + b"1" * 5000 + b"}",
    "a list": b"[]",
}


@pytest.mark.parametrize("content", BAD_JSON.values(), ids=BAD_JSON.keys())
def test_a_config_that_is_not_a_json_object_is_refused_by_name(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"config\.json: ") as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


HF_SHAPES = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (64, 32),
    "mlp.up_proj": (64, 32),
    "mlp.down_proj": (32, 64),
}


def hf_tensors(*, biases=False, tied=False):
    """Return all tensors of the model of CONFIG under Hugging Face's names."""
    random = np.random.default_rng(0)
    shapes = {EMBEDDING: (10, 32), "model.norm.weight": (32,)} | ({} if tied else {"lm_head.weight": (10, 32)})
    for i in range(CONFIG["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in HF_SHAPES.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{i}.{name}.weight"] = (32,)
        if biases:
            for name in ("q_proj", "k_proj", "v_proj"):
                shapes[f"model.layers.{i}.self_attn.{name}.bias"] = HF_SHAPES[f"self_attn.{name}"][:1]
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def interleaved(values, num_heads):
    """Return rows of q or k as llama.cpp's converter stores them for llama: a head's two halves, interleaved."""
    split = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.concatenate([split[:, :, i] for i in range(split.shape[2])], axis=1).reshape(values.shape)


METADATA = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def write_model(path, tensors, *, architecture="llama", kind=GGMLQuantizationType.F32):
    """Write Hugging Face's `tensors` as llama.cpp's converter does, matrices quantized to `kind`."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 2)
    stored = {"rope_freqs.weight": np.ones(4, np.float32)} if architecture == "llama" else {}
    for name, values in tensors.items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleaved(values, 4 if "q_proj" in name else 2)
        quantized = values if values.ndim == 1 else (gguf.quantize(values, kind), kind)
        stored[names.get_name(name, (".weight", ".bias"))] = quantized
    metadata = {f"{architecture}.{key}": value for key, value in METADATA.items()}
    return write_gguf(path, metadata, stored, architecture=architecture)


@pytest.mark.parametrize("biases", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_gguf_file_gives_back_the_tensors_it_was_converted_from(tmp_path, architecture, biases):
    """Any rows come back bit for bit."""
    written = hf_tensors(biases=biases)
    config, checkpoint = open_checkpoint(write_model(tmp_path / "m.gguf", written, architecture=architecture))
    assert (config.tie_word_embeddings, config.qkv_bias) == (False, biases or architecture == "qwen2")
    assert set(checkpoint.names()) == set(written)
    for name, values in written.items():
        assert checkpoint.shape(name) == values.shape
        for rows in (slice(None), slice(3, 9), slice(5, 6), slice(-3, None)):
            read = checkpoint.read(name, rows)
            assert read.dtype == np.float32
            np.testing.assert_array_equal(read, values[rows], err_msg=name)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_quantized_rows_equal_those_of_the_dequantized_tensor(tmp_path, kind):
    """The rows are equal bit for bit: quantization works along a row, so rows may be permuted before or after."""
    kind = GGMLQuantizationType[kind]
    written = hf_tensors(tied=True)
    config, checkpoint = open_checkpoint(write_model(tmp_path / "m.gguf", written, kind=kind))
    assert config.tie_word_embeddings
    for name, values in written.items():
        expected = values if values.ndim == 1 else gguf.dequantize(gguf.quantize(values, kind), kind)
        np.testing.assert_array_equal(checkpoint.read(name, slice(2, 9)), expected[2:9], err_msg=name)


def test_only_the_wanted_rows_are_read(tmp_path):
    """The second head of q is stored in eight rows; the rows of the other heads are overwritten here."""
    written = hf_tensors()
    path = write_model(tmp_path / "m.gguf", written)
    tensor = read_gguf(path).tensors["blk.1.attn_q.weight"]
    content = bytearray(path.read_bytes())
    start, row_bytes = tensor.offset, tensor.row_bytes
    content[start : start + 8 * row_bytes] = b"\xff" * (8 * row_bytes)
    content[start + 16 * row_bytes : start + 32 * row_bytes] = b"\xff" * (16 * row_bytes)
    path.write_bytes(content)
    name = "model.layers.1.self_attn.q_proj.weight"
    np.testing.assert_array_equal(open_checkpoint(path)[1].read(name, slice(8, 16)), written[name][8:16])


def test_a_gguf_tensor_without_a_hugging_face_name_keeps_its_own(tmp_path):
    names = ("token_embd.weight", "blk.0.attn_q_norm.weight", "blk.00.attn_q.weight")
    tensors = {name: np.zeros((10, 32), np.float32) for name in names}
    path = write_gguf(tmp_path / "m.gguf", {f"llama.{key}": value for key, value in METADATA.items()}, tensors)
    assert set(open_checkpoint(path)[1].names()) == {EMBEDDING, *names[1:]}


def test_a_type_that_the_gguf_package_cannot_dequantize_is_named(tmp_path):
    path = write_model(tmp_path / "m.gguf", hf_tensors())
    content = path.read_bytes()
    header = b"token_embd.weight" + struct.pack("<IQQI", 2, 32, 10, GGMLQuantizationType.F32)
    assert header in content
    path.write_bytes(content.replace(header, header[:-4] + struct.pack("<I", GGMLQuantizationType.I32)))
    with pytest.raises(ModelLoadError, match=r"m\.gguf: tensor 'token_embd.weight' is stored as I32"):
        open_checkpoint(path)[1].read(EMBEDDING, slice(None))
