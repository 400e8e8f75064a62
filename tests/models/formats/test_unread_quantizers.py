"""Checkpoints of tools whose quantization is not read are refused by the tool's name, with the way out."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpaged.models.errors import ModelLoadError
from jpaged.models.opening.open_checkpoint import open_checkpoint, read_config

LLAMA = Path(__file__).parents[2] / "golden" / "families" / "llama"
GEMMA_WITH_IMAGES = LLAMA.parent / "gemma3_with_images"
CONFIG = json.loads((LLAMA / "config.json").read_text())
DOWN_PROJ = "model.layers.1.mlp.down_proj"
WAY_OUT = "not read: take the unquantized checkpoint or a .gguf file"
MLX = {"group_size": 64, "bits": 4}
BITSANDBYTES = {
    "load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_type": "nf4", "llm_int8_threshold": 6.0,
}  # fmt: skip
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "MLX": ({"quantization": MLX, "quantization_config": MLX}, "quantization is {'bits': 4, 'group_size': 64}.* MLX"),
    "MLX under one key": ({"quantization": MLX}, "quantization is {'bits': 4, 'group_size': 64}, .* MLX"),
    "MLX under the other key": ({"quantization_config": MLX}, "quantization_config is .* MLX"),
    "MLX by layer": (
        {"quantization": MLX | {f"{DOWN_PROJ}": {"group_size": 32, "bits": 8}, "lm_head": False}}, "quantization .* MLX"
    ),
    "MLX with a mode": ({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "quantization is .* MLX"),
    "MLX of a quantized checkpoint": (
        {"quantization": MLX, "quantization_config": {"quant_method": "fp8"}}, "quantization is .* MLX"
    ),
    "another object of MLX's name": ({"quantization": {"scheme": "w8"}}, "quantization is .* another tool"),
    "bitsandbytes": ({"quantization_config": BITSANDBYTES}, "quantization_config is .* bitsandbytes"),
    "bitsandbytes, 8 bits": ({"quantization_config": {"load_in_8bit": True}}, "quantization_config is .* bitsandbytes"),
    "MLX by layer alone": ({"quantization": {DOWN_PROJ: MLX}}, "quantization is .* MLX"),
    "ModelOpt": ({"quantization": {"quant_algo": "NVFP4"}}, r"quantization is .* ModelOpt \(NVFP4\)"),
    "ModelOpt's own file in config.json": (
        {"quantization_config": {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A16_NVFP4"}}},
        r"quantization_config is .* ModelOpt \(W4A16_NVFP4\)",
    ),
}  # fmt: skip


def model(path: Path, tensors: dict[str, np.ndarray] | None = None, **more: Any) -> Path:
    """Write a tiny model, in which `tensors` stand in place of one matrix; `more` are keys of config.json."""
    (path / "config.json").write_text(json.dumps(CONFIG | more))
    stored = load_file(LLAMA / "model.safetensors")
    if tensors is not None:
        del stored[f"{DOWN_PROJ}.weight"]
        stored |= {f"{DOWN_PROJ}.{end}": values for end, values in tensors.items()}
    save_file(stored, path / "model.safetensors")
    return path


@pytest.mark.parametrize(("config", "message"), CONFIGS.values(), ids=CONFIGS)
def test_a_tool_that_the_config_does_not_name_is_named(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"config\.json: {message} quantized is {WAY_OUT}$") as caught:
        open_checkpoint(model(tmp_path, **config))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{"bits": 4, "group_size": 128, "desc_act": False, "sym": True}, {"quant_algo": "FP8"}],
    ids=["GPTQ", "ModelOpt's FP8"],
)
def test_what_a_tool_that_is_read_wrote_lacks_only_the_name(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=r"quantization_config\.quant_method is missing, wanted one of fp8, "):
        open_checkpoint(model(tmp_path, quantization_config=options))


def test_the_config_of_a_model_with_images_counts_too(tmp_path: Path) -> None:
    """MLX writes its object at the top level."""
    config = json.loads((GEMMA_WITH_IMAGES / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization": MLX}))
    with pytest.raises(ModelLoadError, match=rf"config\.json: quantization is .* MLX quantized is {WAY_OUT}$"):
        read_config(tmp_path)


@pytest.mark.parametrize("method", ["modelopt_fp4", "bitsandbytes", "nvfp4", "torchao", "exl2", "quark", "bitnet"])
def test_a_method_that_is_not_read_is_quoted(tmp_path: Path, method: str) -> None:
    message = rf"quantization_config\.quant_method is '{method}', wanted one of fp8, .*: take the unquantized"
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(model(tmp_path, quantization_config={"quant_method": method, "bits": 4}))


@pytest.mark.parametrize("nothing", [{"quantization": None}, {"quantization": {}}, {"quantization_config": None}])
def test_a_config_that_names_no_quantization_opens(tmp_path: Path, nothing: dict[str, Any]) -> None:
    open_checkpoint(model(tmp_path, **nothing))


def of(dtype: Any, *shape: int) -> np.ndarray:
    return np.zeros(shape, dtype)


TENSORS: dict[str, tuple[str, dict[str, np.ndarray]]] = {
    "MLX": ("MLX", {"weight": of("u4", 64, 20), "scales": of("f2", 64, 2), "biases": of("f2", 64, 2)}),
    "MLX, mxfp4": ("MLX", {"weight": of("u4", 64, 20), "scales": of("u1", 64, 5)}),
    "bitsandbytes, 4 bits": ("bitsandbytes", {
        "weight": of("u1", 5120, 1), "weight.absmax": of("u1", 160), "weight.quant_map": of("f4", 16),
        "weight.quant_state.bitsandbytes__nf4": of("u1", 90),
    }),
    "bitsandbytes, 8 bits": ("bitsandbytes", {"weight": of("i1", 64, 160), "SCB": of("f4", 64)}),
    "EXL2": ("EXL2", {"q_weight": of("i4", 20, 64), "q_scale": of("i4", 5, 8), "q_invperm": of("i4", 160)}),
    "EXL3": ("EXL3", {"trellis": of("i2", 10, 4, 64), "suh": of("f2", 160), "svh": of("f2", 64)}),
    "HQQ": ("HQQ", {"W_q": of("u1", 32, 160), "scale": of("f2", 64, 1), "zero": of("f2", 64, 1)}),
    "AQLM": ("AQLM", {"codes": of("i2", 64, 20, 1), "codebooks": of("f2", 1, 256, 1, 8), "scales": of("f2", 64)}),
    "QuIP#": ("QuIP#", {"Qidxs": of("i8", 64, 2), "SU": of("f2", 160), "SV": of("f2", 64)}),
    "VPTQ": ("VPTQ", {"centroids.weight": of("f2", 1, 2048), "indices": of("i4", 1, 20, 64)}),
    "quanto": ("quanto", {"weight._data": of("i1", 64, 160), "weight._scale": of("f2", 64, 1)}),
    "torchao": ("torchao", {"_weight_qdata": of("i1", 64, 160), "_weight_scale": of("f2", 64, 1)}),
    "NVFP4": ("ModelOpt's NVFP4", {
        "weight": of("u1", 64, 80), "weight_scale": of(ml_dtypes.float8_e4m3fn, 64, 10), "weight_scale_2": of("f4", 1),
    }),
}  # fmt: skip


@pytest.mark.parametrize(("tool", "tensors"), TENSORS.values(), ids=TENSORS)
def test_a_tool_of_which_only_tensors_tell_is_named(tmp_path: Path, tool: str, tensors: dict[str, np.ndarray]) -> None:
    message = rf"safetensors: tensor '{DOWN_PROJ}\.\S+' is of a matrix that {tool} quantized, which is {WAY_OUT}$"
    with pytest.raises(ModelLoadError, match=message) as caught:
        open_checkpoint(model(tmp_path, tensors))
    assert "\n" not in str(caught.value)


def test_the_file_of_modelopt_names_what_is_not_read(tmp_path: Path) -> None:
    model(tmp_path, TENSORS["NVFP4"][1])
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4", "group_size": 16}}')
    message = rf"hf_quant_config\.json: quantization\.quant_algo is 'NVFP4', wanted FP8: what ModelOpt .* is {WAY_OUT}$"
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(tmp_path)
