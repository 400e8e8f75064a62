"""Reads what config.json says about quantized safetensors. Some forms of 8-bit floats are supported, and no others."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ..fields import Fields

CONFIG_KEYS = ("quantization_config", "compression_config")
METHODS = ("fp8", "compressed-tensors", "fbgemm_fp8", "modelopt")
WAY_OUT = "take the unquantized checkpoint or a .gguf file"


@dataclass(frozen=True)
class Float8Scheme:
    """Matrices in float8_e4m3fn, each with scales that multiply it: one for the matrix, or one per row or block."""

    block: tuple[int, int] | None = None
    """Rows and columns of a block that shares a scale, where there are scales per block."""
    has_row_scales: bool = False
    """Whether a matrix may have a scale per row; beside scales per block, it may also have one for all of it."""


def read_quantization(fields: Fields) -> Float8Scheme | None:
    """Return how the matrices of a checkpoint are quantized; None for a config without quantization.

    `fields` are those of config.json. Their object `quantization_config` names the method, whose own keys say the rest;
    "modelopt" has one scale per matrix, and "fbgemm_fp8" one per row. Raises ModelLoadError, which names the method and
    what to do, unless matrices are quantized to float8_e4m3fn with scales per matrix, row or block.
    """
    present = [key for key in CONFIG_KEYS if fields.has(key)]
    if not present:
        return None
    quantization = fields.mapping(present[0])
    if not quantization.has("quant_method") or quantization.data["quant_method"] not in METHODS:
        raise quantization.wrong("quant_method", f"one of {', '.join(METHODS)}, with 8-bit floats: {WAY_OUT}")
    method = str(quantization.data["quant_method"])
    if method == "fp8":
        return _read_fp8(quantization, method)
    if method == "compressed-tensors":
        return _read_compressed(quantization, method)
    if method == "modelopt":
        _check_only(quantization, "quant_algo", ("FP8",), method, is_required=True)
        return Float8Scheme()
    return Float8Scheme(has_row_scales=True)  # fbgemm_fp8 always has a scale per row.


def _read_fp8(fields: Fields, method: str) -> Float8Scheme:
    """Return the scheme of the method fp8, as DeepSeek's and Qwen's checkpoints have it."""
    _check_only(fields, "fmt", ("e4m3",), method)
    return Float8Scheme(block=_read_block(fields, "weight_block_size") if fields.has("weight_block_size") else None)


def _read_compressed(quantization: Fields, method: str) -> Float8Scheme:
    """Return the scheme of the method compressed-tensors, which llm-compressor writes.

    Each group of `config_groups` describes some matrices. One scheme is returned for all, so groups may differ in
    whether a matrix has one scale or one per row, which the shape of the scale shows; all blocks must be equal. Raises
    ModelLoadError for anything but symmetric 8-bit floats.
    """
    _check_only(quantization, "format", ("float-quantized", "naive-quantized"), method)
    _check_only(quantization.mapping("sparsity_config"), "format", ("dense",), method)
    _check_only(quantization, "transform_config", ({},), method)
    groups = quantization.mapping("config_groups")
    if not groups.data:
        raise quantization.wrong("config_groups", f"at least one group of {method}: {WAY_OUT}")
    scheme = Float8Scheme(has_row_scales=True)
    for name in groups.data:
        weights = groups.mapping(name).mapping("weights")
        if not weights.data:
            continue  # The group quantizes activations only, which are not quantized here.
        required: dict[str, tuple[Any, ...]] = {
            "num_bits": (8,), "type": ("float",), "strategy": ("tensor", "channel", "block"),
        }  # fmt: skip
        for key, allowed in required.items():
            _check_only(weights, key, allowed, method, is_required=True)
        _check_only(weights, "symmetric", (True,), method)
        if weights.data["strategy"] == "block":
            block = _read_block(weights, "block_structure")
            if scheme.block not in (None, block):
                raise weights.wrong("block_structure", f"{list(scheme.block or ())}, as in another group: {WAY_OUT}")
            scheme = Float8Scheme(block=block, has_row_scales=True)
    return scheme


def _read_block(fields: Fields, key: str) -> tuple[int, int]:
    """Return the rows and columns that share a scale, from the list under `key`; ModelLoadError for other lists."""
    block = fields.items(key, int)
    if len(block) != 2 or min(block) < 1:
        raise fields.wrong(key, "two integers from 1: rows and columns")
    return block[0], block[1]


def _check_only(fields: Fields, key: str, allowed: Collection[Any], method: str, *, is_required: bool = False) -> None:
    """Raise ModelLoadError if the value of `key` is not in `allowed`, or if it `is_required` and absent.

    `method` is the quantization method, for the error.
    """
    # Without `is_required` an absent key is right, since its default is a value that is supported.
    if (fields.has(key) and fields.data[key] not in allowed) or (is_required and not fields.has(key)):
        wanted = f"{' or '.join(map(str, allowed))}, since nothing else of {method} is read"
        raise fields.wrong(key, f"{wanted}: {WAY_OUT}")
