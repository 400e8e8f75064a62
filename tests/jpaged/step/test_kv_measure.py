"""Scales of pages of one byte: measured at start, or of the checkpoint; new weights; the bytes that pages take."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpaged import Engine
from jpaged.errors import ModelLoadError
from jpaged.models.kv_ranges import MEAN_POSITIONS
from jpaged.step.kv_measure import NUM_PARTS, PART_TOKENS, TEXT, measured_tokens

from ..tiny_model import SIZES, write_tiny_model

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")
BIASED = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 256}
BIASED_CHANNELS = (3, 16 + 5)
"""One channel of each KV head of 16."""
BIAS = 50.0


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a model whose keys have one channel of a head that is far larger than the others."""
    directory = write_tiny_model(tmp_path_factory.mktemp("biased"), **BIASED)
    tensors = load_file(directory / "model.safetensors")
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.k_proj.bias"][list(BIASED_CHANNELS)] = BIAS
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def engine(biased: Path) -> Iterator[Engine]:
    with Engine(str(biased), **SIZES, kv_cache_dtype="int8") as engine:
        yield engine


def scales(engine: Engine) -> dict[str, np.ndarray]:
    """Return the scales that steps read, on the device."""
    found = engine.runner.state.cache.scales
    assert found is not None
    assert found.key_channels is not None
    assert found.value_channels is not None
    arrays = {"k": found.k, "v": found.v, **found.key_channels._asdict()}
    of_values = {f"value_{name}": array for name, array in found.value_channels._asdict().items()}
    return {name: np.array(array) for name, array in {**arrays, **of_values}.items()}


def logprobs(engine: Engine) -> np.ndarray:
    return np.asarray(engine.logprobs(list(range(2, 90))))


def start_anew(engine: Engine) -> None:
    """Make a new device state, with the host's copy of the scales."""
    engine.runner.reset()
    engine.reset_prefix_cache()


def test_biased_keys_get_factors_and_give_what_float32_gives(engine: Engine, biased: Path) -> None:
    found = scales(engine)
    assert all((found[name] > 0).all() for name in ("k", "v", "factors", "value_factors"))
    assert all(np.isfinite(array).all() for array in found.values())
    # Rotation spreads a channel over its pair, 8 channels away. The first head's turns within the context and keeps its
    # range; the second one's hardly turns, so that most of it is an offset.
    others = np.delete(np.arange(16), [3, 3 + 8])
    assert (found["factors"][:, 0, 3] == 1).all()
    assert (found["factors"][:, 0, others] <= 0.25).all()
    assert (found["offsets"][:, 1, 5] > 0.8 * BIAS).all()
    assert (found["k"][:, 1] < 0.5 * found["k"][:, 0]).all()
    with Engine(str(biased), **SIZES) as plain:
        wanted = logprobs(plain)
    error = np.abs(logprobs(engine) - wanted).max()
    page_scales = engine.runner._page_scales
    assert page_scales is not None
    before = page_scales.scales
    assert before is not None
    channels = before.key_channels  # Their factors are what helps.
    assert channels is not None
    page_scales.scales = replace(before, key_channels=channels._replace(factors=np.ones_like(channels.factors)))
    start_anew(engine)
    without = logprobs(engine)
    page_scales.scales = before
    start_anew(engine)
    assert 2 * error < np.abs(without - wanted).max()


@pytest.mark.parametrize("in_flight", ["wait", "keep"])
def test_new_weights_are_measured_unless_pages_are_kept(engine: Engine, biased: Path, in_flight: str) -> None:
    before, tensors = scales(engine), load_file(biased / "model.safetensors")
    larger = {name: 3 * x if "v_proj" in name else x for name, x in tensors.items()}
    engine.update_params(larger, in_flight=in_flight)
    factor = 1 if in_flight == "keep" else 3
    # Of the first layer alone: what the second one reads has changed.
    np.testing.assert_allclose(scales(engine)["v"][0], factor * before["v"][0], rtol=1e-5)
    engine.sleep(level=1)
    engine.update_params(tensors, in_flight="wait")
    engine.wake_up()
    np.testing.assert_array_equal(scales(engine)["v"], before["v"])
    assert engine.stats()["recompiles"] == 0


def test_scales_stay_where_new_weights_are_not_finite(engine: Engine, biased: Path, caplog: Any) -> None:
    before, tensors = scales(engine), load_file(biased / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    engine.update_params({**tensors, name: np.full_like(tensors[name], 3e38)})
    np.testing.assert_array_equal(scales(engine)["k"], before["k"])
    assert re.search("the scales of pages stay: model: the values of layer 1 reach (inf|nan)", caplog.text)
    engine.update_params(tensors)


def test_pages_of_one_byte_hold_almost_four_times_the_tokens(engine: Engine, biased: Path) -> None:
    sizes: dict[str, Any] = {**SIZES, "num_blocks": None, "kv_cache_memory_bytes": 1 << 18}
    num_blocks = []
    for dtype in ("float32", "fp8"):
        with Engine(str(biased), **sizes, kv_cache_dtype=dtype, attention_backend="xla") as some:
            num_blocks.append(some.stats()["blocks"])
            pages = some.runner.state.cache.pages
            assert sum(array.nbytes for array in pages) <= 1 << 18
    assert num_blocks[1] >= 3.9 * num_blocks[0]


def with_scales(
    biased: Path, directory: Path, change: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None, **config: Any
) -> str:
    """Copy the model with scales of its pages in the checkpoint, which `change` changes, and keys of config.json."""
    shutil.copytree(biased, directory)
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**written, **config}))
    tensors = {f"model.layers.{i}.self_attn.{x}_scale": np.float32(0.1 + i) for i in range(2) for x in "kv"}
    change(tensors)
    arrays = {name: np.array(value) for name, value in tensors.items()}
    save_file({**load_file(biased / "model.safetensors"), **arrays}, directory / "model.safetensors")
    return str(directory)


@pytest.mark.parametrize(("dtype", "most"), [("fp8", 448), ("int8", 127)])
def test_a_checkpoint_with_scales_gets_those(biased: Path, tmp_path: Path, dtype: str, most: int) -> None:
    """One scale of a layer, or one of a KV head; a scale reaches 448 × itself, whatever the dtype of the pages."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.1.self_attn.k_scale"] = np.float32([0.5, 0.25])
        tensors["model.layers.0.self_attn.v_proj.output_scale"] = tensors.pop("model.layers.0.self_attn.v_scale")

    model = with_scales(biased, tmp_path / "scaled", change)
    with Engine(model, **SIZES, kv_cache_dtype=dtype) as engine:
        found = scales(engine)
    np.testing.assert_allclose(found["k"] * most / 448, [[0.1, 0.1], [0.5, 0.25]], rtol=1e-6)
    np.testing.assert_allclose(found["v"] * most / 448, [[0.1, 0.1], [1.1, 1.1]], rtol=1e-6)
    assert (found["factors"] == 1).all()
    assert (found["value_factors"] == 1).all()
    assert not found["offsets"].any()
    assert not found["value_offsets"].any()
    Engine(model, **SIZES).shutdown()  # Without such pages the scales are left alone.


def of_numbers(**scheme: Any) -> dict[str, Any]:
    """Return the key of config.json by which compressed-tensors says of which numbers the scales of pages are."""
    quantization = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    return {"quantization_config": {**quantization, "kv_cache_scheme": {"num_bits": 8, "type": "float", **scheme}}}


@pytest.mark.parametrize(("dtype", "most"), [("fp8", 448), ("int8", 127)])
def test_stored_scales_of_integers_reach_127_times_themselves(
    biased: Path, tmp_path: Path, dtype: str, most: int
) -> None:
    model = with_scales(biased, tmp_path / "scaled", **of_numbers(type="int", symmetric=True))
    with Engine(model, **SIZES, kv_cache_dtype=dtype) as engine:
        np.testing.assert_allclose(scales(engine)["k"] * most / 127, [[0.1, 0.1], [1.1, 1.1]], rtol=1e-6)


SCHEMES: dict[str, tuple[dict[str, Any], str]] = {
    "of 4 bits": (of_numbers(num_bits=4), r"kv_cache_scheme.num_bits is 4, wanted 8, .*set kv_cache_dtype to auto"),
    "with zero points": (of_numbers(type="int", symmetric=False), r"kv_cache_scheme.symmetric is False, wanted True"),
    "of no known type": (of_numbers(type=["int"]), r"kv_cache_scheme.type is \['int'\], wanted float or int"),
    "of modelopt's integers": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "INT8"}},
        r"kv_cache_quant_algo is 'INT8', wanted FP8",
    ),
}


@pytest.mark.parametrize(("config", "message"), SCHEMES.values(), ids=SCHEMES.keys())
def test_stored_scales_of_other_numbers_are_refused_by_name(
    biased: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    model = with_scales(biased, tmp_path / "scaled", **config)
    with pytest.raises(ModelLoadError, match=message):
        Engine(model, **SIZES, kv_cache_dtype="int8")


K_SCALE = "model.layers.1.self_attn.k_scale"
FAULTS: dict[str, tuple[Any, str]] = {
    "zero": (
        np.float32(0),
        rf"tensor {K_SCALE} has the value 0.0, .* positive and such .* is finite; correct it, or set kv_",
    ),
    "negative": (np.float32([1, -2]), rf"tensor {K_SCALE} has the value -2.0"),
    "too large": (np.float32(2e38), rf"tensor {K_SCALE} has the value 1.99.*e.38"),
    "too small": (np.float32(1e-44), rf"tensor {K_SCALE} has the value 9.8.*e-45"),
    "NaN": (np.float32(np.nan), rf"tensor {K_SCALE} has the value nan"),
    "no float": (np.int32(1), rf"tensor {K_SCALE} is stored as I32, wanted F16 or BF16 .*; set kv_cache_dtype to auto"),
    "of 8 bits": (np.ones(1, jnp.float8_e4m3fn), rf"tensor {K_SCALE} is stored as F8_E4M3, wanted F16 or BF16 or F32"),
    "a number of heads": (np.ones(3, np.float32), rf"tensor {K_SCALE} has 3 values, wanted 1, or 2"),
    "missing": (None, r"no scale of the keys of layer 1; complete it, or set kv_cache_dtype to auto"),
}


@pytest.mark.parametrize(("value", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_a_wrong_scale_of_a_checkpoint_is_refused_by_name(
    biased: Path, tmp_path: Path, value: Any, message: str
) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors[K_SCALE]
        if value is not None:
            tensors[K_SCALE] = value

    with pytest.raises(ModelLoadError, match=message):
        Engine(with_scales(biased, tmp_path / "scaled", change), **SIZES, kv_cache_dtype="fp8")


def test_the_text_begins_all_over_the_context() -> None:
    def encode(text: str) -> list[int]:
        return [*text.encode(), 300]

    ids, positions = measured_tokens(encode, 256, 4096)
    parts, begins = ids.reshape(NUM_PARTS, PART_TOKENS), positions.reshape(NUM_PARTS, PART_TOKENS)[:, 0]
    assert bytes(parts[0].tolist()) == TEXT.encode()[:PART_TOKENS]
    assert (parts[:, 0] == TEXT.encode()[0]).all()
    assert begins.tolist() == [0, 256, 1024, 3967, 3967]
    assert ids.max() < 256
    assert ids.dtype == positions.dtype == np.int32
    ids, positions = measured_tokens(None, 50, 16)
    assert (len(ids), positions.max(), ids.max() < 50) == (NUM_PARTS * 16, 15, True)
    assert jax.numpy.asarray(ids).shape == positions.shape


def test_three_parts_give_means_and_two_lie_beyond() -> None:
    _, positions = measured_tokens(None, 50, 1 << 17)
    near = (positions < MEAN_POSITIONS).reshape(NUM_PARTS, PART_TOKENS)
    np.testing.assert_array_equal(near, np.array([True] * 3 + [False] * 2)[:, None] & np.ones(PART_TOKENS, bool))


@pytest.mark.parametrize("max_context_len", [16, 128, 256, 257, 513, 1281, 1 << 17])
def test_no_part_of_the_text_continues_the_one_before(max_context_len: int) -> None:
    _, positions = measured_tokens(None, 50, max_context_len)
    begins = np.arange(1, NUM_PARTS) * (len(positions) // NUM_PARTS)
    assert (positions[begins] != positions[begins - 1] + 1).all()
    assert positions.max() < max_context_len
