"""Packed matrices of safetensors are read as the libraries that packed them read them, as floats and as codes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpaged.models.errors import ModelLoadError
from jpaged.models.fields import Fields
from jpaged.models.formats.quantization import read_quantization
from jpaged.models.formats.safetensors_checkpoint import SafetensorsCheckpoint
from jpaged.pallas_kernels.code_formats import are_finite, decode

GOLDENS = Path(__file__).parents[2] / "golden" / "quantized"
WEIGHT = "model.layers.0.mlp.down_proj.weight"
FORMATS = {
    "awq": "AWQ-4/64",
    "gptq_v1": "GPTQ-4/32",
    "gptq_v1_borrow": "GPTQ-4/32",
    "gptq_v2": "GPTQ-4/32",
    "gptq_8bit": "GPTQ-8",
    "gptq_actorder": None,
    "compressed_int4_group": "int4/64",
    "compressed_int4_zeros": "int4 with zeros/32",
    "compressed_int8_channel": "int8",
    "compressed_int8_packed": None,  # Its rows of 136 are no multiple of 32.
    "compressed_actorder": None,
    "compressed_int8_tensor": "int8",
    "mxfp4": "MXFP4",
}
"""Case → the format of its codes; None where they can only be made floats."""


def opened(case, directory=GOLDENS):
    path = directory / case / "config.json"
    return SafetensorsCheckpoint(path.parent, read_quantization(Fields(json.loads(path.read_text()), path)))


def test_every_golden_is_read():
    assert {path.name for path in GOLDENS.iterdir()} == FORMATS.keys()


@pytest.mark.parametrize("case", FORMATS)
def test_any_block_is_what_the_library_makes_of_it(case):
    wanted = load_file(GOLDENS / case / "dequantized.safetensors")[WEIGHT]
    checkpoint = opened(case)
    assert list(checkpoint.names()) == [WEIGHT]
    assert checkpoint.shape(WEIGHT) == wanted.shape
    assert checkpoint.dtype(WEIGHT) == "float32"
    for rows in (slice(None), slice(3, 9), slice(8, 16), slice(31, 200), slice(5, 5)):
        for columns in (slice(None), slice(1, 41), slice(32, 96), slice(99, 101), slice(7, 7)):
            read = checkpoint.read(WEIGHT, rows, columns)
            assert read.dtype == np.float32
            np.testing.assert_allclose(read, wanted[rows, columns], rtol=1e-5, atol=0)


@pytest.mark.parametrize("case", FORMATS)
def test_codes_decode_to_the_same_bits(case):
    checkpoint = opened(case)
    code_format = checkpoint.code_format(WEIGHT)
    assert (code_format and code_format.name) == FORMATS[case]
    if code_format is None:
        return
    for rows in (slice(None), slice(3, 9), slice(31, 200)):
        codes = checkpoint.read_codes(WEIGHT, rows)
        assert codes.codes.dtype == np.uint8
        assert codes.scales[0].dtype == code_format.scale_dtype
        assert (codes.zeros is not None) == code_format.has_zeros
        assert are_finite(codes, code_format)
        bits = [each.view(np.uint32) for each in (decode(codes, code_format), checkpoint.read(WEIGHT, rows))]
        np.testing.assert_array_equal(*bits)


def changed(directory, case, *, tensors=(), config=(), of_weights=()):
    """Write a case with other tensors, without those that are None, and with other values of its config; open it."""
    stored = {**load_file(GOLDENS / case / "model.safetensors"), **{f"{MODULE}.{end}": new for end, new in tensors}}
    content = json.loads((GOLDENS / case / "config.json").read_text())
    content["quantization_config"].update(config)
    for group in content["quantization_config"].get("config_groups", {}).values():
        group["weights"].update(of_weights)
    (directory / case).mkdir()
    save_file(
        {name: values for name, values in stored.items() if values is not None}, directory / case / "model.safetensors"
    )
    (directory / case / "config.json").write_text(json.dumps(content))
    return opened(case, directory)


def zeros(*shape, dtype=np.int32):
    return np.zeros(shape, dtype)


MODULE = WEIGHT.removesuffix(".weight")
BAD_TENSORS = {
    "no zeros": ("awq", {"qzeros": None}, f"'{MODULE}.qweight' is quantized without '{MODULE}.qzeros'"),
    "no codes": ("awq", {"qweight": None}, ".qzeros' is a part of a quantized matrix without its qweight"),
    "floats as well": ("awq", {"weight": zeros(64, 192, dtype=np.float32)}, f".weight' is there twice, as '{MODULE}.q"),
    "zeros of another shape": ("awq", {"qzeros": zeros(3, 16)}, "has the shape (3, 16), wanted (3, 8) for (192, 8)"),
    "words of 64 bits": ("awq", {"qweight": zeros(192, 8, dtype=np.int64)}, "(192, 8) and is stored as I64, wanted a"),
    "a vector": ("awq", {"qweight": zeros(192)}, "has the shape (192,) and is stored as I32, wanted a matrix of I32"),
    "scales of integers": ("awq", {"scales": zeros(3, 64)}, "scales' is stored as I32, wanted F16 or BF16 or F32"),
    "an order where there is none": ("awq", {"g_idx": zeros(192)}, ".g_idx' is there, and awq has no order of columns"),
    "scales of another size": ("gptq_v1", {"scales": zeros(2, 64, dtype=np.float16)}, "(2, 64), wanted (4, 64) for (1"),
    "outputs that are no whole words": ("gptq_v1", {"qweight": zeros(16, 63)}, "has 63 columns, wanted a multiple of"),
    "no order": ("gptq_actorder", {"g_idx": None}, f"is quantized without '{MODULE}.g_idx', the order of its columns"),
    "an unknown group": ("gptq_actorder", {"g_idx": zeros(160) + 5}, "has groups from 5 to 5, wanted some from 0 to 4"),
    "an order of another size": ("gptq_v1", {"g_idx": zeros(16)}, "g_idx' has the shape (16,), wanted (128,) for (16"),
    "no shape": ("compressed_int4_group", {"weight_shape": None}, f"is quantized without '{MODULE}.weight_shape'"),
    "another true shape": (
        "compressed_int4_group", {"weight_shape": np.array([64, 136])},
        f"has the shape (64, 16), and '{MODULE}.weight_shape' says (64, 136)",
    ),
    "zeros of a symmetric matrix": (
        "compressed_int4_group", {"weight_zero_point": zeros(8, 2)},
        "weight_zero_point' is there, and the config says that all zeros are equal (symmetric)",
    ),
    "no zeros of an asymmetric matrix": (
        "compressed_int4_zeros", {"weight_zero_point": None}, f"is quantized without '{MODULE}.weight_zero_point'",
    ),
    "no scale": ("compressed_int8_channel", {"weight_scale": None}, f"is quantized without '{MODULE}.weight_scale'"),
    "a scale of another kind": (
        "compressed_int8_channel", {"weight_scale": zeros(1, dtype=np.float16)},
        "weight_scale' has the shape (1,), wanted (64, 1) for (64, 128) packed; the config has 8 bits and rows",
    ),
    "a scale for each row of a matrix with one": (
        "compressed_int8_tensor", {"weight_scale": zeros(64, 1, dtype=np.float16)},
        "has the shape (64, 1), wanted () or (1,) for (64, 128) packed; the config has 8 bits and matrices",
    ),
    "floats with a scale": (
        "compressed_int8_channel", {"weight": zeros(64, 128, dtype=np.float32)},
        f"has a scale, '{MODULE}.weight_scale', and is stored as F32",
    ),
    "8-bit floats beside": (
        "compressed_int8_channel", {"weight": zeros(64, 128, dtype="float8_e4m3fn")},
        f"has a scale, '{MODULE}.weight_scale', and is stored as F8_E4M3",
    ),
    "powers of another shape": ("mxfp4", {"weight_scale": zeros(64, 8, dtype=np.uint8)}, "(64, 8), wanted (64, 4) for"),
    "floats as powers": ("mxfp4", {"weight_scale": zeros(64, 4, dtype=np.float16)}, "is stored as F16, wanted U8"),
    "rows of half a group": (
        "mxfp4", {"weight_packed": zeros(64, 24, dtype=np.uint8)}, "has 48 numbers in a row, wanted a multiple of 32",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("case", "tensors", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS.keys())
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, case, tensors, message):
    with pytest.raises(ModelLoadError, match=rf"model\.safetensors: tensor .*{re.escape(message)}") as caught:
        changed(tmp_path, case, tensors=tensors.items())
    assert str(caught.value).endswith(": fetch it again, or take the unquantized checkpoint or a .gguf file")
    assert "\n" not in str(caught.value)


def of_config(case, message, **values):
    return case, {"config": values}, message


def of_weights(case, message, **values):
    return case, {"of_weights": values}, message


BAD_CONFIGS = {
    "3 bits": of_config("gptq_v1", "bits is 3, wanted 4 or 8, since nothing else of gptq is read", bits=3),
    "8 bits of AWQ": of_config("awq", "bits is 8, wanted 4, since nothing else of awq is read", bits=8),
    "no bits": of_config("awq", "bits is missing, wanted 4", bits=None),
    "no group": of_config("awq", "group_size is missing, wanted how many numbers share a scale", group_size=None),
    "a group of nothing": of_config("gptq_v1", "group_size is 0, wanted −1 or a number from 1", group_size=0),
    "a negative group": of_config("gptq_v1", "group_size is -2, wanted an integer from -1 to", group_size=-2),
    "AWQ for other kernels": of_config("awq", "version is 'gemv', wanted gemm", version="gemv"),
    "AWQ without zeros": of_config("awq", "zero_point is False, wanted True", zero_point=False),
    "GPTQ for other kernels": of_config(
        "gptq_v1", "checkpoint_format is 'marlin', wanted gptq or gptq_v2", checkpoint_format="marlin"
    ),
    "GPTQ with rules for modules": of_config(
        "gptq_v1", "dynamic is {'-:.*down': {}}, wanted {}", dynamic={"-:.*down": {}}
    ),
    "6 bits": of_weights("compressed_int4_group", "num_bits is 6, wanted 4 or 8, since nothing else of", num_bits=6),
    "blocks of integers": of_weights(
        "compressed_int8_channel", "strategy is 'block', wanted tensor or channel or group", strategy="block"
    ),
    "no size of groups": of_weights(
        "compressed_int4_group", "group_size is missing, wanted an integer from 1", group_size=None
    ),
    "small floats in larger groups": of_weights(
        "mxfp4", "group_size is 64, wanted 32, since nothing else", group_size=64
    ),
    "dynamic weights": of_weights("compressed_int8_channel", "dynamic is True, wanted False", dynamic=True),
}


@pytest.mark.parametrize(("case", "change", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS.keys())
def test_configs_that_are_not_known_are_refused_by_key(tmp_path, case, change, message):
    changes = {key: values.items() for key, values in change.items()}
    with pytest.raises(ModelLoadError, match=rf"config\.json: quantization_config.*{re.escape(message)}") as caught:
        changed(tmp_path, case, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", FORMATS)
def test_packed_matrices_without_a_word_in_the_config_are_refused(case):
    if "int8_channel" not in case and "int8_tensor" not in case:
        with pytest.raises(
            ModelLoadError, match=r"holds a part of a packed matrix, and config.json has no quantization_"
        ):
            SafetensorsCheckpoint(GOLDENS / case)


def test_a_matrix_is_read_by_that_group_of_the_config_that_its_tensors_fit(tmp_path):
    """The group of the golden is the second; its own tensors, and no names of modules, tell that it is meant."""
    case, path = "compressed_int4_zeros", GOLDENS / "compressed_int4_group" / "config.json"
    content = json.loads((GOLDENS / case / "config.json").read_text())["quantization_config"]
    others = json.loads(path.read_text())["quantization_config"]["config_groups"]
    groups = {"other": others["group_0"], **content["config_groups"]}
    checkpoint = changed(tmp_path, case, config={"config_groups": groups, "format": "mixed-precision"}.items())
    np.testing.assert_array_equal(checkpoint.read(WEIGHT, slice(None)), opened(case).read(WEIGHT, slice(None)))


@pytest.mark.parametrize(("case", "end"), [("gptq_v1", "g_idx"), ("compressed_int4_group", "weight_g_idx")])
def test_columns_in_the_order_of_groups_stay_codes(tmp_path, case, end):
    group, width = (32, 128) if case == "gptq_v1" else (64, 128)
    order = np.arange(width, dtype=np.int32) // group
    checkpoint = changed(tmp_path, case, tensors={end: order}.items())
    assert checkpoint.code_format(WEIGHT) is not None
    assert checkpoint.notes() == []


def test_a_start_says_which_matrices_have_an_order_of_their_own():
    (note,) = opened("gptq_actorder").notes()
    assert note == ("1 of 1 quantized matrices have columns in an order of their own (act order), and become floats")


@pytest.mark.parametrize(
    ("group", "is_kept"), [(4, False), (8, True), (16, True), (24, False), (48, False), (64, True)]
)
def test_groups_that_no_run_of_32_numbers_fits_become_floats(tmp_path, group, is_kept):
    width = 192
    tensors = {"qzeros": zeros(width // group, 8) + 7, "scales": np.full((width // group, 64), 0.5, np.float16)}
    checkpoint = changed(tmp_path, "awq", tensors=tensors.items(), config={"group_size": group}.items())
    assert (checkpoint.code_format(WEIGHT) is not None) == is_kept
    assert checkpoint.read(WEIGHT, slice(0, 1)).shape == (1, width)
