"""Packed matrices of safetensors are read as the libraries that packed them read them, as floats and as codes."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

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


def opened(case):
    path = GOLDENS / case / "config.json"
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
