"""Writes safetensors: one file or shards with an index, one tensor in memory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import UnsavedTensor
from .files import INDEX_FILE, SINGLE_FILE

FOR_TRANSFORMERS = {"format": "pt"}
"""Metadata without which transformers reads no file."""
SHARD_BYTES = 5 * 10**9
"""Bytes of the tensors in one file that is written, at most; more are spread over several files."""
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int32": "I32", "int64": "I64"}
"""Dtype → what the header of a file calls it."""


def write_safetensors(directory: Path, tensors: Mapping[str, UnsavedTensor], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `model.safetensors` to the directory, making one tensor after the other.

    If the tensors have more than `shard_bytes` bytes, they are written as shards of at most so many, or of one larger
    tensor, with an index. Tensors must be float32, bfloat16 or float16.
    """
    shards: list[dict[str, UnsavedTensor]] = [{}]
    total = num_bytes = 0
    for name, tensor in tensors.items():
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        if shards[-1] and num_bytes + size > shard_bytes:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = tensor
        num_bytes, total = num_bytes + size, total + size
    if len(shards) == 1:
        write_tensors(directory / SINGLE_FILE, tensors, FOR_TRANSFORMERS)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(directory / file_name, shard, FOR_TRANSFORMERS)
        weight_map |= dict.fromkeys(shard, file_name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, UnsavedTensor], metadata: Mapping[str, str]) -> None:
    """Write one file of safetensors. Dtypes are float32, bfloat16, float16, int32 and int64.

    The file has the length of the header in 8 bytes, the header, which is a JSON object with `metadata` and each
    tensor's dtype, shape and place, and then the tensors' bytes one after the other. It is written here because the
    safetensors package would need all tensors in memory at once. Source:
    https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    # Offsets, which count from the end of the header, follow from shapes and dtypes. So the header is complete before
    # the first tensor is made.
    offset = 0
    for name, tensor in tensors.items():
        start, offset = offset, offset + math.prod(tensor.shape) * tensor.dtype.itemsize
        entry = {"dtype": _DTYPES[tensor.dtype.name], "shape": tensor.shape, "data_offsets": [start, offset]}
        header[name] = entry
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # Tensor data begin at a multiple of 8 bytes, as the format asks.
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors.values():
            # numpy gives no buffer of bfloat16 values, so their bytes are written.
            file.write(np.ascontiguousarray(tensor.make()).reshape(-1).view(np.uint8).data)
