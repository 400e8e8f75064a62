"""Checkpoints give rows back as they were written, and a damaged download is refused before memory is allocated."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpaged.models.errors import ModelLoadError
from jpaged.models.formats.safetensors_checkpoint import SafetensorsCheckpoint
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.weights.loading import abstract_weights, check_tensors
from jpaged.sharding import device_mesh

MISTRAL_WITH_IMAGES = Path(__file__).parents[2] / "golden" / "families" / "mistral_with_images"
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
        "from jpaged.models.formats.safetensors_checkpoint import SafetensorsCheckpoint;"
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
    "null": (None, "JSON null, wanted an object .*: fetch it again"),
    "no map": ({"metadata": {}}, "weight_map is empty or missing"),
    "map is a list": ({"weight_map": ["a"]}, "weight_map is .*; fetch it again"),
    "shard in the parent": ({"weight_map": {"a": "../x-1.safetensors"}}, r"'\.\./x-1.safetensors'"),
    "shard in a folder": ({"weight_map": {"a": "sub/x-1.safetensors"}}, "'sub/x-1.safetensors'"),
    "shard by backslash": ({"weight_map": {"a": "..\\x-1.safetensors"}}, "x-1.safetensors'"),
    "shard at an absolute path": ({"weight_map": {"a": "/x-1.safetensors"}}, "'/x-1.safetensors'"),
    "shard is a dot": ({"weight_map": {"a": ".."}}, r"'\.\.'"),
    "shard is a pickle": ({"weight_map": {"a": "x-1.bin"}}, "'x-1.bin'"),
    "shard is a number": ({"weight_map": {"a": 1}}, "in 1, wanted the name .*: fetch it again"),
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


@pytest.mark.parametrize("num_bytes", [0, 1, 40, -1])
def test_a_half_written_index_is_refused_in_one_line(tmp_path, num_bytes):
    write_shards(tmp_path, {"x-1.safetensors": one("a"), "x-2.safetensors": one("b")})
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(index.read_bytes()[:num_bytes])
    with pytest.raises(
        ModelLoadError, match=r"model\.safetensors\.index\.json: is not JSON .*: fetch it again$"
    ) as caught:
        SafetensorsCheckpoint(tmp_path)
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize("inner", [True, False])
def test_a_model_with_images_without_a_word_about_tying_has_the_head_that_is_stored(tmp_path, inner):
    """So in transformers 5.24, whatever its `text_config` says."""
    data = json.loads((MISTRAL_WITH_IMAGES / "config.json").read_text())
    del data["tie_word_embeddings"]
    data["text_config"]["tie_word_embeddings"] = inner
    (tmp_path / "config.json").write_text(json.dumps(data))
    tensors = load_file(MISTRAL_WITH_IMAGES / "model.safetensors")
    for is_stored in (True, False):
        if not is_stored:
            del tensors["lm_head.weight"]
        save_file(tensors, tmp_path / "model.safetensors")
        config, checkpoint = open_checkpoint(tmp_path)
        check_tensors(abstract_weights(config, "float32", device_mesh(jax.devices()[:1])), config, checkpoint)
        assert config.tie_word_embeddings is not is_stored
