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
from jpaged.models.formats.tensor_files import TensorFiles
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
    "compressed_int8_zeros_channel": "int8 with zeros",
    "compressed_int8_zeros_tensor": "int8 with zeros",
    "compressed_int8_zeros_packed": "int8 with zeros",
    "gptq_8bit_zeros": "GPTQ-8/32",
    "compressed_float8_channel": "fp8",
    "compressed_float8_block": "fp8/64",
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


def stored_tensors(case):
    """Return the tensors of a case by name; the safetensors package gives numpy no 8-bit floats."""
    files = TensorFiles(GOLDENS / case)
    tensors = {name: files.read(name) for name in files.names()}
    return {
        name: values.view("float8_e4m3fn") if files.dtype(name) == "F8_E4M3" else values
        for name, values in tensors.items()
    }


def changed(directory, case, *, tensors=(), config=(), of_weights=()):
    """Write a case with other tensors, without those that are None, and with other values of its config; open it."""
    stored = {**stored_tensors(case), **{f"{MODULE}.{end}": new for end, new in tensors}}
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
    "scales of an activation": (
        "awq", {"scales": None, "qweight": None, "qzeros": None, "act.scales": zeros(64, dtype=np.float16)},
        ".act.scales' holds scales of an activation, not available in this version",
    ),
    "a vector": ("awq", {"qweight": zeros(192)}, "has the shape (192,) and is stored as I32, wanted a matrix of I32"),
    "scales of integers": ("awq", {"scales": zeros(3, 64)}, "scales' is stored as I32, wanted F16 or BF16 or F32"),
    "an order where there is none": ("awq", {"g_idx": zeros(192)}, ".g_idx' is there, and awq has no order of columns"),
    "scales of another size": ("gptq_v1", {"scales": zeros(2, 64, dtype=np.float16)}, "(2, 64), wanted (4, 64) for (1"),
    "outputs that are no whole words": ("gptq_v1", {"qweight": zeros(16, 63)}, "has 63 columns, wanted a multiple of"),
    "no order of compressed-tensors": (
        "compressed_actorder", {"weight_g_idx": None}, f"is quantized without '{MODULE}.weight_g_idx', the order of",
    ),
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
    "zeros of a symmetric matrix that are not 0": (
        "compressed_int8_channel", {"weight_zero_point": zeros(64, 1, dtype=np.int8) + 1},
        "weight_zero_point' is there, and the config says that all zeros are equal (symmetric)",
    ),
    "bytes as zeros of another size": (
        "compressed_int4_zeros", {"weight_zero_point": zeros(72, 2, dtype=np.int8)},
        "has the shape (72, 2), wanted (72, 4) for (72, 16) packed",
    ),
    "zeros of 8-bit floats that are not 0": (
        "compressed_float8_channel", {"weight_zero_point": np.ones((32, 1), "float8_e4m3fn")},
        f"has zero points, '{MODULE}.weight_zero_point', that are not 0",
    ),
    "zeros of 8-bit floats that are not there": (
        "compressed_float8_channel", {"weight": None, "weight_zero_point": np.ones((32, 1), "float8_e4m3fn")},
        "weight_zero_point' is a part of a quantized matrix without its weight",
    ),
    "8-bit floats of another name": (
        "compressed_float8_channel", {"codes": np.ones((32, 1), "float8_e4m3fn")},
        ".codes' is stored as F8_E4M3, wanted a name that ends with weight",
    ),
    "no zeros of an asymmetric matrix": (
        "compressed_int4_zeros", {"weight_zero_point": None}, f"is quantized without '{MODULE}.weight_zero_point'",
    ),
    "no scale": ("compressed_int8_channel", {"weight_scale": None}, f"is quantized without '{MODULE}.weight_scale'"),
    "a scale of another kind": (
        "compressed_int8_channel", {"weight_scale": zeros(1, dtype=np.float16)},
        "weight_scale' has the shape (1,), wanted (64, 1) for (64, 128) packed; 'group_0' of the config has 8 bits",
    ),
    "a scale for each row of a matrix with one": (
        "compressed_int8_tensor", {"weight_scale": zeros(64, 1, dtype=np.float16)},
        "(64, 1), wanted () or (1,) for (64, 128) packed; 'group_0' of the config has 8 bits and matrices",
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
    assert str(caught.value).endswith("take the unquantized checkpoint or a .gguf file")
    assert "\n" not in str(caught.value)


def of_config(case, message, **values):
    return case, {"config": values}, message


def of_weights(case, message, **values):
    return case, {"of_weights": values}, message


BAD_CONFIGS = {
    "3 bits": of_config("gptq_v1", "bits is 3, wanted 4 or 8 (only these are supported for gptq)", bits=3),
    "8 bits of AWQ": of_config("awq", "bits is 8, wanted 4 (only this is supported for awq)", bits=8),
    "no bits": of_config("awq", "bits is missing, wanted 4", bits=None),
    "no group": of_config("awq", "group_size is missing, wanted −1 or an integer from 1 to", group_size=None),
    "a group of nothing": of_config("gptq_v1", "group_size is 0, wanted −1 or an integer from 1 to", group_size=0),
    "a negative group": of_config("gptq_v1", "group_size is -2, wanted −1 or an integer from 1 to", group_size=-2),
    "AWQ for other kernels": of_config("awq", "version is 'gemv', wanted gemm", version="gemv"),
    "AWQ without zeros": of_config("awq", "zero_point is False, wanted True", zero_point=False),
    "GPTQ for other kernels": of_config(
        "gptq_v1", "checkpoint_format is 'marlin', wanted gptq or gptq_v2", checkpoint_format="marlin"
    ),
    "GPTQ of other bits for some modules": of_config(
        "gptq_v1", "dynamic.+:.*up.bits is 3, wanted 4 or 8 (only", dynamic={"-:.*down": {}, "+:.*up": {"bits": 3}}
    ),
    "bits of GPTQ that are no integer": of_config("gptq_v1", "bits is 4.0, wanted 4 or 8 (only these", bits=4.0),
    "bits of AWQ that are no integer": of_config("awq", "bits is 4.0, wanted 4 (only this is", bits=4.0),
    "AutoRound in a layout of its own": of_config(
        "gptq_v1", "packing_format is 'auto_round', wanted auto_round:auto_gptq or auto_round:auto_awq (only",
        quant_method="auto-round", packing_format="auto_round",
    ),
    "AutoRound of small floats": of_config(
        "gptq_v1", "data_type is 'mx_fp', wanted int (only",
        quant_method="auto-round", packing_format="auto_round:auto_gptq", data_type="mx_fp",
    ),
    "8 bits of AutoRound in AWQ's layout": of_config(
        "awq", "extra_config.lm_head.bits is 8, wanted 4 (only this is supported for intel/auto-round",
        quant_method="intel/auto-round", packing_format="auto_round:auto_awq", extra_config={"lm_head": {"bits": 8}},
    ),
    "6 bits": of_weights("compressed_int4_group", "num_bits is 6, wanted 4 or 8 (only these are", num_bits=6),
    "blocks of integers": of_weights(
        "compressed_int8_channel", "strategy is 'block', wanted tensor or channel or group", strategy="block"
    ),
    "no size of groups": of_weights(
        "compressed_int4_group",
        "group_size is missing, wanted −1 or an integer from 1 to 1048576 (numbers that share a scale): take the un",
        group_size=None,
    ),
    "small floats in larger groups": of_weights(
        "mxfp4", "group_size is 64, wanted 32 (only this is supported for", group_size=64
    ),
    "dynamic weights": of_weights("compressed_int8_channel", "dynamic is True, wanted False", dynamic=True),
}  # fmt: skip


@pytest.mark.parametrize(("case", "change", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS.keys())
def test_configs_that_are_not_known_are_refused_by_key(tmp_path, case, change, message):
    changes = {key: values.items() for key, values in change.items()}
    with pytest.raises(ModelLoadError, match=rf"config\.json: quantization_config.*{re.escape(message)}") as caught:
        changed(tmp_path, case, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", FORMATS)
def test_packed_matrices_without_a_word_in_the_config_are_refused(case):
    # Bytes with a sign need not be quantized: they are refused as tensors of a dtype that no model has.
    if case not in ("compressed_int8_channel", "compressed_int8_tensor"):
        kind = "8-bit floats (F8_E4M3)" if "float8" in case else "a part of a packed matrix"
        with pytest.raises(ModelLoadError, match=re.escape(f"holds {kind}, and config.json has no quantization_")):
            SafetensorsCheckpoint(GOLDENS / case)


def test_a_matrix_is_read_by_that_group_of_the_config_that_its_tensors_fit(tmp_path):
    """The group of the golden is the second; its own tensors, and no names of modules, tell that it is meant."""
    case, path = "compressed_int4_zeros", GOLDENS / "compressed_int4_group" / "config.json"
    content = json.loads((GOLDENS / case / "config.json").read_text())["quantization_config"]
    others = json.loads(path.read_text())["quantization_config"]["config_groups"]
    groups = {"other": others["group_0"], **content["config_groups"]}
    checkpoint = changed(tmp_path, case, config={"config_groups": groups, "format": "mixed-precision"}.items())
    np.testing.assert_array_equal(checkpoint.read(WEIGHT, slice(None)), opened(case).read(WEIGHT, slice(None)))


def read(checkpoint):
    return checkpoint.read(WEIGHT, slice(None))


SAME = {
    "rules for modules that are not quantized": (
        "gptq_v1", {"dynamic": {"-:.*down": {}, r"-:.*gate$": {"bits": 2}}}, {},
    ),
    "rules for other modules": ("gptq_v1", {"dynamic": {"+:.*up": {"bits": 8, "group_size": 16}}}, {}),
    "rules for this module": ("gptq_8bit", {"bits": 4, "group_size": 32, "dynamic": {
        "lm_head": {"group_size": -1}, ".*down": {"bits": 8, "group_size": -1, "sym": True},
    }}, {}),
    "AutoRound in GPTQ's layout": ("gptq_v1", {
        "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "checkpoint_format": None,
        "data_type": "int", "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
    }, {}),
    "AutoRound in AWQ's layout": (
        "awq", {"quant_method": "intel/auto-round", "packing_format": "auto_round:auto_awq", "version": None}, {},
    ),
    "AutoRound with rules for this module": ("gptq_8bit", {
        "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32,
        "extra_config": {"model.layers.0.mlp.down_proj": {"bits": 8, "group_size": -1}},
    }, {}),
    "zeros of 0 of a symmetric matrix": (
        "compressed_int8_channel", {}, {"weight_zero_point": zeros(64, 1, dtype=np.int8)},
    ),
    "zeros of 0 of a symmetric matrix that is packed": (
        "compressed_int4_group", {}, {"weight_zero_point": zeros(64, 2, dtype=np.int8)},
    ),
    "zeros of 0 of 8-bit floats": (
        "compressed_float8_channel", {}, {"weight_zero_point": -np.zeros((32, 1), "float8_e4m3fn")},
    ),
    "an order of 64 bits": ("gptq_actorder", {}, {
        "g_idx": stored_tensors("gptq_actorder")[f"{MODULE}.g_idx"].astype(np.int64),
    }),
}  # fmt: skip


@pytest.mark.parametrize(("case", "config", "tensors"), SAME.values(), ids=SAME.keys())
def test_what_does_not_change_a_matrix_is_accepted(tmp_path, case, config, tensors):
    checkpoint = changed(tmp_path, case, config=config.items(), tensors=tensors.items())
    np.testing.assert_array_equal(read(checkpoint), read(opened(case)))
    assert list(checkpoint.names()) == [WEIGHT]


def test_zeros_of_a_packed_matrix_may_be_bytes(tmp_path):
    case = "compressed_int4_zeros"
    words = stored_tensors(case)[f"{MODULE}.weight_zero_point"]
    nibbles = words.T[:, :, None].view(np.uint32) >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    signed = (nibbles.reshape(words.shape[1], -1).T.astype(np.int8) - 8)[:72]
    checkpoint = changed(tmp_path, case, tensors={"weight_zero_point": np.ascontiguousarray(signed)}.items())
    for rows in (slice(None), slice(3, 9), slice(31, 70)):
        np.testing.assert_array_equal(checkpoint.read(WEIGHT, rows), opened(case).read(WEIGHT, rows))


def test_weights_are_floats_where_only_keys_and_values_are_quantized(tmp_path):
    weight = np.ones((64, 128), np.float32)
    config = {"format": "dense", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    gone = {end: None for end in ("weight_packed", "weight_scale", "weight_shape")}
    tensors = {**gone, "weight": weight}.items()
    checkpoint = changed(tmp_path, "compressed_int4_group", tensors=tensors, config=config.items())
    np.testing.assert_array_equal(read(checkpoint), weight)
    assert checkpoint.notes() == []
    (tmp_path / "stale").mkdir()
    stale = changed(tmp_path / "stale", "compressed_int4_group", tensors=tensors)
    assert stale.notes() == ["no tensor is quantized, although quantization_config names compressed-tensors"]
    np.testing.assert_array_equal(read(stale), weight)
    (tmp_path / "packed").mkdir()
    with pytest.raises(
        ModelLoadError, match=r"a part of a packed .* no weights in the compressed-tensors config, which"
    ):
        changed(tmp_path / "packed", "compressed_int4_group", config=config.items())


ERRORS_OF_GROUPS = {
    "the scale": ({"weight_scale": zeros(64, 3, dtype=np.float16)}, "wanted (64, 2) for (64, 16) packed; 'right' of"),
    "the order": (
        {"weight_g_idx": zeros(9)},
        "wanted (128,) for (64, 16) packed; 'right' of the config has 4 bits and",
    ),
}


@pytest.mark.parametrize(("tensors", "message"), ERRORS_OF_GROUPS.values(), ids=ERRORS_OF_GROUPS.keys())
def test_an_error_is_that_of_the_group_which_fits_best(tmp_path, tensors, message):
    case = "compressed_int4_group"
    (right,) = json.loads((GOLDENS / case / "config.json").read_text())["quantization_config"]["config_groups"].values()
    eight = {**right, "weights": {**right["weights"], "num_bits": 8, "group_size": 64}}
    groups = {"of_8_bits": eight, "right": right, "again": eight}
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        changed(tmp_path, case, tensors=tensors.items(), config={"config_groups": groups}.items())


def test_an_error_is_that_of_the_rule_which_fits_best(tmp_path):
    rules = {"-:lm_head": {}, ".*down": {"bits": 8, "group_size": 16}}
    config = {"bits": 4, "group_size": 64, "dynamic": rules}
    message = "wanted (4, 32) for (16, 32) packed; '.*down' of the config has 8 bits and groups of 16"
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        changed(tmp_path, "gptq_8bit_zeros", config=config.items())


def test_the_file_of_modelopt_is_named_where_the_config_says_nothing(tmp_path):
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    save_file({"weight": zeros(2, 2, dtype="float8_e4m3fn")}, tmp_path / "model.safetensors")
    message = "add it with the quant_method modelopt and the quant_algo that hf_quant_config.json has, or take"
    with pytest.raises(ModelLoadError, match=message):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("case", "end"), [("gptq_v1", "g_idx"), ("compressed_int4_group", "weight_g_idx")])
def test_columns_in_the_order_of_groups_stay_codes(tmp_path, case, end, dtype):
    group, width = (32, 128) if case == "gptq_v1" else (64, 128)
    order = np.arange(width, dtype=dtype) // group
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
