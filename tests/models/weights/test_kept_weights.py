"""Weights that a start keeps: the next start maps the same bits; other files, a torn file, a full disk are noticed."""

import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jpaged import ConfigError, Engine, SamplingParams
from jpaged.models.formats.checkpoint import UnsavedTensor
from jpaged.models.weights import kept_weights, loading
from jpaged.models.weights.saving import write_orbax

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")
LLAMA = Path(__file__).parents[2] / "golden" / "families" / "llama"
ENGINE: dict[str, Any] = {
    "num_blocks": 16,
    "max_num_seqs": 2,
    "skip_tokenizer_init": True,
    "warmup": "off",
    "num_decode_steps": 1,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
SCORED = SamplingParams(temperature=0.0, max_tokens=4, logprobs=0)


@pytest.fixture(autouse=True)
def small_weights_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(kept_weights, "MIN_BYTES", 0)
    monkeypatch.setattr(kept_weights, "CHUNK_BYTES", 4096)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(LLAMA, tmp_path / "model"))


def served(model, cache, dtype="float32"):
    """Return the tokens that an engine draws, and its weights as numpy arrays."""
    directory = None if cache is None else str(cache)
    with Engine(str(model), dtype=dtype, weights_cache_dir=directory, **ENGINE) as engine:
        (output,) = engine.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
        return output.outputs[0].token_ids, [np.array(leaf) for leaf in jax.tree.leaves(engine.runner.weights.state)]


def refuse_to_convert(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("converted")

    monkeypatch.setattr(loading, "load_weights", fail)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_later_start_has_the_same_bits(model: Path, tmp_path: Path, dtype: str, monkeypatch) -> None:
    tokens, weights = served(model, "off", dtype)
    assert served(model, tmp_path / "cache", dtype)[0] == tokens
    refuse_to_convert(monkeypatch)
    kept_tokens, kept = served(model, tmp_path / "cache", dtype)
    assert kept_tokens == tokens
    assert [array.tobytes() for array in kept] == [array.tobytes() for array in weights]


def test_other_files_and_other_dtypes_have_weights_of_their_own(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    served(model, cache)
    file = model / "model.safetensors"
    status, content = file.stat(), bytearray(file.read_bytes())
    content[-4:] = b"\0\0\0\0"  # The last weight, in the same file, with the same size and time.
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = served(model, cache)[1]
    assert [array.tobytes() for array in changed] == [array.tobytes() for array in served(model, "off")[1]]
    served(model, cache, "bfloat16")
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("fault", ["cut", "changed", pytest.param("zeros", marks=pytest.mark.slow)])
def test_a_torn_file_is_converted_again(model: Path, tmp_path: Path, fault: str, caplog) -> None:
    cache = tmp_path / "cache"
    first = served(model, cache)
    (file,) = cache.iterdir()
    content = file.read_bytes()
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    file.write_bytes({"cut": content[:-100], "changed": changed, "zeros": bytes(len(content))}[fault])
    with caplog.at_level(logging.WARNING):
        again = served(model, cache)
    assert [record.message for record in caplog.records if "torn" in record.message]
    assert [array.tobytes() for array in again[1]] == [array.tobytes() for array in first[1]]
    assert file.read_bytes() == content


def test_without_a_place_to_keep_them_a_warning_says_so(model: Path, tmp_path: Path, monkeypatch, caplog) -> None:
    first = served(model, "off")
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert served(model, tmp_path / "file" / "cache")[0] == first[0]
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        assert served(model, tmp_path / "cache")[0] == first[0]
    messages = [record.message for record in caplog.records]
    assert sum("weights cache off" in message for message in messages) == 1
    assert sum("has no room" in message for message in messages) == 1
    assert not list((tmp_path / "cache").iterdir())


def test_arrays_of_the_caller_are_not_kept(model: Path, tmp_path: Path) -> None:
    tree = load_file(model / "model.safetensors")
    name = "model.norm.weight"
    outputs = []
    for factor in (1, 3):
        params = {**tree, name: tree[name] * factor}
        with Engine(str(model), dtype="float32", params=params, **ENGINE) as engine:
            (output,) = engine.generate([[5, 6, 7]], SCORED, use_tqdm=False)
            outputs.append(output.outputs[0].cumulative_logprob)
    assert outputs[0] != outputs[1]
    assert not (tmp_path / "user" / "jpaged" / "weights").exists()
    with pytest.raises(
        ConfigError, match=r"weights_cache_dir: got '.*', allowed: a directory where weights are read from"
    ):
        Engine(str(model), params=tree, weights_cache_dir=str(tmp_path / "cache"), **ENGINE)
    with pytest.raises(ConfigError, match=r"weights_cache_dir: got '.*', allowed: a directory where weights are read"):
        Engine(str(model), load_format="dummy", weights_cache_dir=str(tmp_path / "cache"), **ENGINE)


@pytest.mark.parametrize("has_metadata", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_folder_of_orbax_is_served_and_not_kept(model: Path, tmp_path: Path, has_metadata: bool) -> None:
    wanted = served(model, "off")[0]
    tensors = load_file(model / "model.safetensors")
    made = {
        name: UnsavedTensor(tensor.shape, tensor.dtype, lambda tensor=tensor: tensor)
        for name, tensor in tensors.items()
    }
    folder = tmp_path / "orbax"
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    (folder / "tree").mkdir()
    write_orbax(folder / "tree", made, is_nested=True)
    if has_metadata:
        (folder / "tree" / "_CHECKPOINT_METADATA").write_text("{}")
    assert served(folder, None)[0] == wanted
    assert not (tmp_path / "user" / "jpaged" / "weights").exists()


def test_a_file_that_changes_while_it_is_read_is_not_kept(model: Path, tmp_path: Path, monkeypatch) -> None:
    load = loading.load_weights

    def load_and_touch(*arguments, **options):
        os.utime(model / "model.safetensors")
        return load(*arguments, **options)

    monkeypatch.setattr(loading, "load_weights", load_and_touch)
    served(model, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_directory_that_every_user_may_write_to_is_refused(model: Path, tmp_path: Path, caplog) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with caplog.at_level(logging.WARNING):
        served(model, tmp_path / "cache")
    assert any("every user may write" in record.message for record in caplog.records)
    assert not list((tmp_path / "cache").iterdir())


def test_weights_that_were_used_longest_ago_make_room(model: Path, tmp_path: Path, monkeypatch) -> None:
    cache = tmp_path / "cache"
    served(model, cache)
    (first,) = cache.iterdir()
    (cache / "folder").mkdir()
    (cache / "checkpoint").write_bytes(bytes(first.stat().st_size))
    os.utime(cache / "checkpoint", (0, 0))
    monkeypatch.setattr(kept_weights, "MAX_BYTES", first.stat().st_size * 7 // 4)
    served(model, cache, "bfloat16")  # Half as large: there is room for both.
    os.utime(first, (1, 1))
    served(model, cache)  # Used again, and so newer than the other.
    os.utime(model / "model.safetensors")
    served(model, cache, "bfloat16")
    names = {file.name for file in cache.iterdir()}
    assert {first.name, "folder", "checkpoint"} < names, "others' files stay"
    assert len(names) == 4
