"""Matrices in 8-bit floats are read as float32, times their scales, or as codes; other ways to quantize are refused."""

import json
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jpaged.models.errors import ModelLoadError
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.weights.loading import abstract_weights, check_tensors, load_weights
from jpaged.pallas_kernels.code_formats import decode
from jpaged.sharding import device_mesh

LLAMA = Path(__file__).parents[2] / "golden" / "families" / "llama"
DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"
BLOCK = (48, 40)
"""Rows and columns; neither divides the matrices of LLAMA."""


def compressed(strategy, **weights):
    group = {"weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **weights}}
    group["input_activations"] = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


def block_scales(shape):
    return tuple(-(-size // step) for size, step in zip(shape, BLOCK, strict=True))


def row_scales(shape):
    return shape[0], 1


SCHEMES = {
    "one per matrix": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", lambda shape: ()),
    "one per block": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [*BLOCK]}, "weight_scale_inv", block_scales,
    ),
    "compressed, one per matrix": (compressed("tensor"), "weight_scale", lambda shape: (1,)),
    "compressed, one per row": (compressed("channel"), "weight_scale", row_scales),
    "compressed, one per block": (
        compressed("block", block_structure=[*BLOCK]) | {"transform_config": {}}, "weight_scale", block_scales,
    ),
    "compressed, one per matrix beside groups with blocks": (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {
            **compressed("tensor")["config_groups"],
            "group_1": compressed("block", block_structure=[*BLOCK])["config_groups"]["group_0"],
        }}, "weight_scale", lambda shape: (1,),
    ),
    "compressed, one per block, as a string": (
        compressed("block", block_structure="48x40"), "weight_scale", block_scales,
    ),
    "one per matrix, as a matrix": ({"quant_method": "fp8"}, "weight_scale", lambda shape: (1, 1)),
    "one per matrix beside blocks": (
        {"quant_method": "fp8", "weight_block_size": [*BLOCK]}, "weight_scale", lambda shape: (1,),
    ),
    "one per row": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "weight_scale", row_scales),
    "one per row, as a vector": ({"quant_method": "fbgemm_fp8"}, "weight_scale", lambda shape: shape[:1]),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        "weight_scale", lambda shape: (),
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        "weight_scale", row_scales,
    ),
}  # fmt: skip


def quantized(directory, scheme="one per matrix", change=lambda tensors: None, **config):
    """Write LLAMA with its layers' matrices in 8-bit floats; return what their values are by the explicit formula."""
    quantization, suffix, shape_of = SCHEMES[scheme]
    rng, stored, wanted = np.random.default_rng(0), {"model.layers.0.self_attn.kv_scale": np.ones((), np.float32)}, {}
    for name, values in load_file(LLAMA / "model.safetensors").items():
        stored[name] = values
        wanted[name] = values.astype(np.float32)
        if "_proj" not in name:
            continue
        scale = np.asarray(rng.uniform(0.5, 2.0, shape_of(values.shape)), np.float32)
        stored[name] = (16 * wanted[name]).astype(ml_dtypes.float8_e4m3fn)
        module = name.removesuffix("weight")
        stored |= {module + suffix: scale, module + "input_scale": np.ones((), np.float32)}
        spread = scale
        if shape_of is block_scales:
            spread = np.kron(scale, np.ones(BLOCK, np.float32))[: values.shape[0], : values.shape[1]]
        wanted[name] = stored[name].astype(np.float32) * (
            spread[:, None] if scale.shape == values.shape[:1] else spread
        )
    change(stored)
    save_file(stored, directory / "model.safetensors")
    content = json.loads((LLAMA / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**content, "quantization_config": quantization, **config}))
    return wanted


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_block_of_a_matrix_is_its_numbers_times_its_scales(tmp_path, scheme):
    """Matrices that were left as they were, here the head's, are found by their dtype. Scales are no weights."""
    wanted = quantized(tmp_path, scheme)
    config, checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.names()) == set(wanted)
    for name, values in wanted.items():
        assert checkpoint.shape(name) == values.shape
        for rows in (slice(None), slice(3, 9), slice(40, 63), slice(47, 49)):
            for columns in (slice(None), slice(1, 41)) if values.ndim == 2 else (slice(None),):
                read = checkpoint.read(name, rows, columns)
                np.testing.assert_array_equal(read, values[rows, columns] if values.ndim == 2 else values[rows])
        assert read.dtype == (np.float32 if "_proj" in name else ml_dtypes.bfloat16)
        if (code_format := checkpoint.code_format(name)) is not None:
            decoded = decode(checkpoint.read_codes(name, slice(3, 63)), code_format)
            np.testing.assert_array_equal(decoded.view(np.uint32), values[3:63].view(np.uint32))
    coded = [name for name in wanted if checkpoint.code_format(name)]
    # Rows of 80 inputs are no multiple of 32, and neither are groups of 40 inputs.
    assert len(coded) == (0 if SCHEMES[scheme][2] is block_scales else 12)
    abstract = abstract_weights(config, "float32", device_mesh(jax.devices()[:1]))
    check_tensors(abstract, config, checkpoint)
    weights = load_weights(abstract, config, checkpoint)
    model = nnx.merge(weights.graph, weights.state)
    np.testing.assert_array_equal(model.layers[1].mlp.down_proj.weight[...].T, wanted[DOWN_PROJ])


def gone(name):
    return lambda tensors: tensors.pop(name)


def replaced(name, values):
    return lambda tensors: tensors.__setitem__(name, values)


SCALE = DOWN_PROJ + "_scale"
VECTOR = {
    "model.norm.weight": np.ones(64, ml_dtypes.float8_e4m3fn),
    "model.norm.weight_scale": np.ones((), np.float32),
}
BAD_FILES = {
    "no scale": ("one per matrix", gone(SCALE), f"{DOWN_PROJ}' is stored as F8_E4M3 without a scale"),
    "a scale of another shape": (
        "one per block", replaced(SCALE + "_inv", np.ones((1, 2), np.float32)),
        f"{DOWN_PROJ}' has the shape (64, 80) and a scale of the shape (1, 2), wanted (2, 2) or (64,) or (64, 1) or ()",
    ),
    "a scale per block without a scheme of blocks": (
        "one per matrix", replaced(SCALE, np.ones((2, 2), np.float32)),
        "of the shape (2, 2), wanted (64,) or (64, 1) or () or (1,) or (1, 1)",
    ),
    "a scale of numbers that are not quantized": (
        "one per matrix", replaced(DOWN_PROJ, np.ones((64, 80), np.float32)),
        f"{DOWN_PROJ}' has a scale, '{SCALE}', and is stored as F32",
    ),
    "another 8-bit float": (
        "one per matrix", replaced(DOWN_PROJ, np.ones((64, 80), ml_dtypes.float8_e5m2)), "and is stored as F8_E5M2",
    ),
    "a scale of integers": (
        "one per matrix", replaced(SCALE, np.ones((), np.int32)),
        f"{DOWN_PROJ}' has a scale, '{SCALE}', that is stored as I32, wanted F16 or BF16 or F32",
    ),
    "integers": (
        "one per matrix", replaced(DOWN_PROJ, np.ones((64, 80), np.int8)),
        f"{DOWN_PROJ}' has a scale, '{SCALE}', and is stored as I8",
    ),
    "a vector": (
        "one per matrix", lambda tensors: tensors.update(VECTOR),
        "model.norm.weight' has the shape (64,) and 8-bit floats, wanted a matrix",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("scheme", "change", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_8_bit_floats_whose_scales_do_not_fit_are_refused_by_name(tmp_path, scheme, change, message):
    quantized(tmp_path, scheme, change)
    with pytest.raises(ModelLoadError, match=re.escape(message)) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value).endswith("take the unquantized checkpoint or a .gguf file")
    assert "\n" not in str(caught.value)


BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block"}
OTHER_METHODS = {
    "an unknown one": (
        {"quant_method": "hqq"},
        "quant_method is 'hqq', wanted one of fp8, compressed-tensors, fbgemm_fp8",
    ),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quant_method is 'bitsandbytes', wanted"),
    "no method": ({"bits": 4}, "quant_method is missing, wanted one of fp8"),
    "another format of 8 bits": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2', wanted e4m3"),
    "a block of one number": (
        {"quant_method": "fp8", "weight_block_size": [128]},
        "weight_block_size is [128], wanted",
    ),
    "4 bits": (
        compressed("channel", num_bits=4),
        "num_bits is 4, wanted 8 (only this is supported for compressed-tensors in float",
    ),
    "integers": (
        compressed("channel", type="int"),
        "type is 'int', wanted float (only this is supported for compressed-",
    ),
    "groups": (compressed("group"), "strategy is 'group', wanted tensor or channel or block (only these"),
    "blocks of two sizes": (
        compressed("block")
        | {"config_groups": {str(size): {"weights": BLOCKS | {"block_structure": [size, 8]}} for size in (8, 16)}},
        "block_structure is [16, 8], wanted [8, 8], as in another group",
    ),
    "rotated": (
        compressed("channel") | {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
        "transform_config is {'config_groups': {'u': {'type': 'hadamard'}}}, wanted {} (only this is supported for",
    ),
    "4 bits of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "quant_algo is 'NVFP4', wanted FP8 (only this is supported for modelopt)",
    ),
    "zero points": (compressed("channel", symmetric=False), "symmetric is False, wanted True"),
    "floats that are packed": (
        compressed("channel") | {"format": "pack-quantized"},
        "type is 'float', wanted int (only this is supported for compressed-tensors in pack-quantized)",
    ),
    "an unknown format": (
        compressed("channel") | {"format": "nvfp4-pack-quantized"},
        "format is 'nvfp4-pack-quantized', wanted float-quantized or int-quantized or naive-",
    ),
    "weights in a dense checkpoint": (
        compressed("channel") | {"format": "dense"},
        "format is 'dense', wanted float-quantized or",
    ),
    "no groups": (
        {"quant_method": "compressed-tensors", "format": "dense"},
        "config_groups is missing, wanted at least one",
    ),
    "a block of words": (
        compressed("block", block_structure="48 by 40"),
        "block_structure is '48 by 40', wanted two integers from 1, rows and columns",
    ),
    "no format of a group": (
        compressed("channel") | {"format": "mixed-precision"},
        "format is missing, wanted float-q",
    ),
    "sparse": (
        compressed("channel") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "format is 'sparse-24-bit",
    ),
}


@pytest.mark.parametrize(("quantization", "message"), OTHER_METHODS.values(), ids=OTHER_METHODS.keys())
def test_any_other_way_of_quantizing_is_refused_by_name_with_the_way_out(tmp_path, quantization, message):
    quantized(tmp_path, quantization_config=quantization)
    with pytest.raises(ModelLoadError, match=rf"config\.json: .*{re.escape(message)}") as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_8_bit_floats_without_a_word_in_the_config_are_refused_for_that_and_not_for_their_names(tmp_path):
    quantized(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    message = r"holds 8-bit floats \(F8_E4M3\), and config.json has no quantization_config, .*: add it, or take"
    with pytest.raises(ModelLoadError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_scale_that_is_not_finite_is_refused_by_the_name_of_its_matrix(tmp_path):
    quantized(tmp_path, change=replaced(SCALE, np.asarray(np.inf, np.float32)))
    config, checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(ModelLoadError, match=f"tensor {DOWN_PROJ} holds a NaN or an infinity"):
        load_weights(abstract_weights(config, "float32", device_mesh(jax.devices()[:1])), config, checkpoint)
