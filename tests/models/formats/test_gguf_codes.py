"""Blocks of GGUF's quantized types as codes: their numbers are those that the `gguf` package gives."""

import gguf
import numpy as np
import pytest

from jpaged.models.formats.gguf_codes import codes_of
from jpaged.pallas_kernels.code_formats import CODE_FORMATS, are_finite, decode

from ...gguf_file import random_blocks

EDGES = {
    "zero": lambda count: np.zeros(count),
    "smallest": lambda count: np.full(count, 2.0**-24),
    "largest": lambda count: np.where(np.arange(count) % 2, 60000.0, -60000.0),
    "infinite": lambda count: np.full(count, -np.inf),
}
"""What the float16 of blocks are."""


@pytest.mark.parametrize("name", CODE_FORMATS)
def test_codes_are_the_numbers_that_the_gguf_package_gives(name: str) -> None:
    """Random bytes come upon every code and every entry of a table."""
    code_format, rng = CODE_FORMATS[name], np.random.default_rng(0)
    stored = random_blocks(name, (280, 2048), rng)
    codes = codes_of(stored, code_format)
    np.testing.assert_array_equal(decode(codes, code_format), gguf.dequantize(stored, gguf.GGMLQuantizationType[name]))
    assert len(np.unique(codes.codes)) == len(code_format.code_values)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("scale", EDGES)
@pytest.mark.parametrize("name", CODE_FORMATS)
def test_the_smallest_and_the_largest_codes_and_scales_are_those_of_the_package(name: str, scale: str) -> None:
    """All bits but those of scales are 0, or 1, or random. A block whose scale is infinite is found."""
    code_format, rng = CODE_FORMATS[name], np.random.default_rng(0)
    for byte in (0, 255, None):
        stored = random_blocks(name, (4, 512), rng, EDGES[scale], byte=byte)
        codes = codes_of(stored, code_format)
        if scale == "infinite" and name != "MXFP4":
            assert not are_finite(codes, code_format)
        else:
            wanted = gguf.dequantize(stored, gguf.GGMLQuantizationType[name])
            np.testing.assert_array_equal(decode(codes, code_format), wanted)
            assert are_finite(codes, code_format)
