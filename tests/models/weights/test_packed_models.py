"""Whole models whose matrices are packed in safetensors: kept as codes, they give the results of the same floats."""

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jpaged import ConfigError, Engine, ModelLoadError, SamplingParams

from .test_coded import CONFIG, ENGINE, SHAPES, assert_near, formats_of, loaded
from .test_low_bits import write_file as write_low_bits

pytestmark = pytest.mark.usefixtures("few_buckets")
GROUP = 32
Tensors = dict[str, np.ndarray]


def packed_words(codes: np.ndarray) -> np.ndarray:
    """Return codes of 4 bits [A, B] as words [A, B ÷ 8], the first code in the lowest bits."""
    words = codes.reshape(len(codes), -1, 8).astype(np.uint32) << np.arange(0, 32, 4, dtype=np.uint32)
    return words.sum(-1, dtype=np.uint32).view(np.int32)


def random_codes(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return codes of 4 bits and scales of groups for a matrix [out, in]."""
    scales = rng.uniform(0.02, 0.06, (shape[0], shape[1] // GROUP))
    return rng.integers(0, 16, shape), scales


def as_awq(rng: np.random.Generator, module: str, shape: tuple[int, int]) -> Tensors:
    """Return a matrix as AutoAWQ packs it, and a bias of zeros."""
    nibbles = [0, 2, 4, 6, 1, 3, 5, 7]
    codes, scales = random_codes(rng, shape)
    zeros = rng.integers(5, 11, scales.shape)
    in_words = [
        each.T.reshape(each.shape[1], -1, 8)[:, :, nibbles].reshape(each.shape[::-1]) for each in (codes, zeros)
    ]
    return {
        module + "qweight": packed_words(in_words[0]),
        module + "qzeros": packed_words(in_words[1]),
        module + "scales": np.ascontiguousarray(scales.T.astype(np.float16)),
        module + "bias": np.zeros(shape[0], np.float16),
    }


def as_compressed(rng: np.random.Generator, module: str, shape: tuple[int, int]) -> Tensors:
    """Return a matrix as compressed-tensors packs it, symmetric in bfloat16."""
    codes, scales = random_codes(rng, shape)
    return {
        module + "weight_packed": packed_words(codes),
        module + "weight_scale": scales.astype(ml_dtypes.bfloat16),
        module + "weight_shape": np.asarray(shape, np.int64),
    }


def as_int8(rng: np.random.Generator, module: str, shape: tuple[int, int]) -> Tensors:
    """Return a matrix of signed bytes with a zero for each row."""
    return {
        module + "weight": rng.integers(-128, 128, shape, np.int8),
        module + "weight_scale": rng.uniform(0.002, 0.004, (shape[0], 1)).astype(np.float32),
        module + "weight_zero_point": rng.integers(-9, 9, (shape[0], 1), np.int8),
    }


def as_float8(rng: np.random.Generator, module: str, shape: tuple[int, int], *, group: int = GROUP) -> Tensors:
    """Return a matrix of 8-bit floats with a scale for each block of 48 rows and `group` columns."""
    num_scales = [-(-size // step) for size, step in zip(shape, (48, group), strict=True)]
    return {
        module + "weight": rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn),
        module + "weight_scale_inv": rng.uniform(0.2, 0.4, num_scales).astype(np.float32),
    }


def compressed_config(format_name: str, **weights: Any) -> dict[str, Any]:
    group = {"weights": {"type": "int", "symmetric": True} | weights, "input_activations": {"num_bits": 8}}
    return {"quant_method": "compressed-tensors", "format": format_name, "config_groups": {"group_0": group}}


MODELS: dict[str, tuple[dict[str, Any], Callable[..., Tensors], str]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, as_awq, "AWQ-4/32"),
    "int4": (
        compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=GROUP), as_compressed, "int4/32",
    ),
    "int8 with zeros": (
        compressed_config("int-quantized", num_bits=8, strategy="channel", symmetric=False), as_int8, "int8 with zeros",
    ),
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, GROUP]}, as_float8, "fp8/32",
    ),
}  # fmt: skip


def write_model(directory: Path, name: str, change: Callable[[Tensors], Any] = lambda tensors: None) -> Path:
    """Write a small model whose layers' matrices are packed."""
    quantization, pack, _ = MODELS[name]
    rng = np.random.default_rng(0)
    tensors = {f"{name}.weight": 0.3 * rng.normal(size=(70, 128)) for name in ("model.embed_tokens", "lm_head")}
    tensors["model.norm.weight"] = np.ones(128)
    for layer in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = np.ones(128)
    tensors = {name: values.astype(np.float16) for name, values in tensors.items()}
    for layer in range(2):
        for module, shape in SHAPES.items():
            tensors |= pack(rng, f"model.layers.{layer}.{module}.", shape)
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quantization}))
    return directory


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("awq", "fp8"))) for name in MODELS]
)
def test_an_engine_keeps_codes_unless_told_otherwise_and_gives_the_same_logprobs(tmp_path: Path, name: str) -> None:
    """Of AWQ, the layers of the model have no biases, and those of the file are zeros.

    Formats with zeros take codes only when weights are updated, others take floats.
    """
    path, sampling = write_model(tmp_path, name), SamplingParams(temperature=0.0, max_tokens=12, logprobs=3)
    format_name, results = MODELS[name][2], []
    parts = formats_of(loaded(path, "bfloat16", keeps_codes=True))
    assert {each for of_matrix in parts.values() for each, _ in of_matrix} == {format_name}
    assert len(parts) == 2 * 4
    for quantization in ("auto", "none"):
        takes_floats = quantization == "none" or name in ("int4", "fp8")
        wanted = "missing: lm_head" if takes_floats else f"kept as codes of {format_name}, wanted codes under the paths"
        with Engine(str(path), quantization=quantization, **ENGINE) as engine:
            outputs = engine.generate([[1, 2, 3], [4, 5]], sampling)
            results.append([(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs])
            with pytest.raises(ModelLoadError, match=wanted):
                engine.update_params({"model.norm.weight": np.ones(128, np.float32)})
    assert_near(*results)


def test_codes_are_kept_beside_scales_of_pages(tmp_path: Path) -> None:
    """Checkpoints for pages of one byte have scales of keys and values, which are no weights."""
    names = [f"model.layers.{layer}.self_attn.{each}_scale" for layer in (0, 1) for each in "kv"]
    scales = {name: np.ones(1, np.float32) for name in names}
    path = write_model(tmp_path, "fp8", lambda tensors: tensors.update(scales))
    assert len(formats_of(loaded(path, "bfloat16", keeps_codes=True))) == 2 * 4
    with pytest.raises(ConfigError, match="whose weights are quantized by fp8, allowed: auto, which keeps them"):
        Engine(str(path), quantization="int8", **ENGINE)


def test_a_bias_that_the_model_lacks_is_refused_unless_it_is_zero(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.bias"
    path = write_model(tmp_path, "awq", lambda tensors: tensors.update({name: np.eye(1, 128, 5, np.float16)[0]}))
    with pytest.raises(ModelLoadError, match=rf"tensor {name} has no place in the model \(1 such tensors\)"):
        Engine(str(path), **ENGINE)


@pytest.mark.parametrize(
    ("name", "end", "value"),
    [("int4", "weight_scale", ml_dtypes.bfloat16(np.inf)), ("fp8", "weight", ml_dtypes.float8_e4m3fn(np.nan))],
)
@pytest.mark.parametrize("keeps_codes", [True, False])
def test_numbers_that_are_not_finite_are_refused_by_their_tensor(
    tmp_path: Path, name: str, end: str, value: Any, keeps_codes: bool
) -> None:
    module = "model.layers.1.mlp.down_proj."
    path = write_model(tmp_path, name, lambda tensors: tensors[module + end].__setitem__((5, 2), value))
    with pytest.raises(ModelLoadError, match=rf"tensor {module}weight holds a .*(NaN|infinity).* in rows 0 to"):
        loaded(path, "float32", keeps_codes=keeps_codes)


def test_quantizing_once_more_is_refused_by_the_name_of_the_kind(tmp_path: Path) -> None:
    message = (
        "^quantization: got 'int8' for .*, whose weights are quantized by awq, allowed: auto, which keeps them, or"
    )
    with pytest.raises(ConfigError, match=message):
        Engine(str(write_model(tmp_path, "awq")), quantization="int8", **ENGINE)


def test_quantizing_what_cannot_be_kept_as_codes_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 24 values and the type TQ1_0 become floats by `auto`: those of a quantized file all the same."""
    config, pack = MODELS["fp8"][0] | {"weight_block_size": [48, 24]}, partial(as_float8, group=24)
    monkeypatch.setitem(MODELS, "groups of 24", (config, pack, ""))
    in_gguf = write_low_bits(tmp_path, {"up_proj": "TQ1_0", "": "F16"})
    message = r"got 'int8' for .*, whose weights are quantized.*allowed: auto or none, which make"
    for path in (write_model(tmp_path, "groups of 24"), in_gguf):
        with pytest.raises(ConfigError, match=message):
            Engine(str(path), quantization="int8", **ENGINE)


def test_a_start_says_that_activations_stay_floats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jpaged")
    with Engine(str(write_model(tmp_path, "int4")), **ENGINE):
        pass
    assert "the scheme that compressed-tensors has for activations is not used, they stay floats" in caplog.text
