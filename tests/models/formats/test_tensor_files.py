"""Blocks of tensors are read from safetensors as they are stored, and take no more memory than what was returned."""

import re
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jpaged.models.formats.tensor_files import TensorFiles

DTYPES = (
    "float64", "float32", "float16", ml_dtypes.bfloat16, "int64", "int32", "int16", "int8", "uint64", "uint32",
    "uint16", "uint8", "bool",
)  # fmt: skip


def test_every_dtype_is_read_as_it_was_written(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {str(np.dtype(dtype)): rng.integers(0, 100, (5, 7)).astype(dtype) for dtype in DTYPES}
    tensors |= {"scalar": np.array(3, np.int8), "empty": np.zeros((0, 4), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    assert set(files.names()) == tensors.keys()
    for name, values in tensors.items():
        read = files.read(name)
        assert (files.shape(name), read.dtype) == (values.shape, values.dtype)
        np.testing.assert_array_equal(read, values)
        if values.ndim == 2:
            np.testing.assert_array_equal(files.read(name, slice(1, 4), slice(2, 6)), values[1:4, 2:6])
            np.testing.assert_array_equal(files.read(name, slice(None), slice(2, 6)), values[:, 2:6])


def file_pages_bytes():
    """Return the bytes of pages of files that are resident in this process."""
    return 1024 * int(re.search(r"RssFile:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])


@pytest.mark.skipif(sys.platform != "linux", reason="the resident pages are read from /proc")
@pytest.mark.parametrize("by_columns", [False, True])
def test_pages_of_a_file_are_given_back_once_they_were_read(tmp_path, by_columns):
    shape, num_bytes = (2048, 4096), 4 * 2048 * 4096
    save_file({"weight": np.ones(shape, np.float32)}, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    before = file_pages_bytes()
    for start in range(0, shape[by_columns], 256):
        part = slice(start, start + 256)
        assert files.read("weight", *((slice(None), part) if by_columns else (part,))).all()
    assert file_pages_bytes() - before < num_bytes / 8
