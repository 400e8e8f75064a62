"""Reads what config.json says about quantized safetensors: which kinds of matrices there may be, and no others."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..fields import Fields

CONFIG_KEYS = ("quantization_config", "compression_config")
METHODS = ("fp8", "compressed-tensors", "fbgemm_fp8", "modelopt", "awq", "gptq")
WAY_OUT = "take the unquantized checkpoint or a .gguf file"
MAX_GROUP = 1 << 20


@dataclass(frozen=True)
class Float8Scheme:
    """Matrices in float8_e4m3fn, each with scales that multiply it: one for the matrix, or one per row or block."""

    block: tuple[int, int] | None = None
    """Rows and columns of a block that shares a scale, where there are scales per block."""
    has_row_scales: bool = False
    """Whether a matrix may have a scale per row; beside scales per block, it may also have one for all of it."""


@dataclass(frozen=True)
class PackedScheme:
    """Matrices of small integers, or of floats of 4 bits, each with scales that groups of a row's numbers share."""

    layout: str
    """How the matrices are stored: awq, gptq, gptq_v2, or a format of compressed-tensors, a key of `COMPRESSED`."""
    bits: int
    group: int | None
    """Numbers of a row that share a scale; None for all of a row, or of the matrix."""
    has_zeros: bool = False
    """Whether each group has its own code of 0; it is the middle one otherwise."""
    has_matrix_scale: bool = False
    """Whether all of a matrix shares a scale."""
    needs_order: bool = False
    """Whether each matrix must say which group each column belongs to, since they are not in the order of groups."""


@dataclass(frozen=True)
class Quantization:
    """The kinds of quantized matrices that a checkpoint may have."""

    method: str
    """Its `quant_method`, for messages."""
    float8: Float8Scheme | None = None
    packed: tuple[PackedScheme, ...] = ()
    """A matrix is stored by one of these, which its tensors show."""
    has_activation_scheme: bool = False
    """Whether it says how to quantize activations, which stay floats here."""


def read_quantization(fields: Fields) -> Quantization | None:
    """Return how the matrices of a checkpoint are quantized; None for a config without quantization.

    `fields` are those of config.json. Their object `quantization_config` names the method, whose own keys say the rest;
    "modelopt" has one scale per matrix, and "fbgemm_fp8" one per row. Raises ModelLoadError, which names the method and
    what to do, for everything that is not read.
    """
    present = [key for key in CONFIG_KEYS if fields.has(key)]
    if not present:
        return None
    quantization = fields.mapping(present[0])
    if not quantization.has("quant_method") or quantization.data["quant_method"] not in METHODS:
        raise quantization.wrong("quant_method", f"one of {', '.join(METHODS)}: {WAY_OUT}")
    method = str(quantization.data["quant_method"])
    if method == "fp8":
        return _read_fp8(quantization, method)
    if method == "compressed-tensors":
        return _read_compressed(quantization, method)
    if method == "awq":
        return _read_awq(quantization, method)
    if method == "gptq":
        return _read_gptq(quantization, method)
    if method == "modelopt":
        _check_only(quantization, "quant_algo", ("FP8",), method, is_required=True)
        return Quantization(method, Float8Scheme(), has_activation_scheme=True)
    # fbgemm_fp8 always has a scale per row.
    return Quantization(method, Float8Scheme(has_row_scales=True), has_activation_scheme=True)


def _read_fp8(fields: Fields, method: str) -> Quantization:
    """Return the scheme of the method fp8, as DeepSeek's and Qwen's checkpoints have it."""
    _check_only(fields, "fmt", ("e4m3",), method)
    block = _read_block(fields, "weight_block_size") if fields.has("weight_block_size") else None
    return Quantization(method, Float8Scheme(block=block), has_activation_scheme=fields.has("activation_scheme"))


def _read_awq(fields: Fields, method: str) -> Quantization:
    """Return the scheme of AutoAWQ's layout "gemm", whose keys have two names each."""
    bits = "w_bit" if fields.has("w_bit") else "bits"
    group = "q_group_size" if fields.has("q_group_size") else "group_size"
    _check_only(fields, bits, (4,), method, is_required=True)
    _check_only(fields, "version", ("gemm", "GEMM"), method)
    _check_only(fields, "zero_point", (True,), method)
    return Quantization(method, packed=(PackedScheme("awq", 4, _read_group(fields, group), has_zeros=True),))


def _read_gptq(fields: Fields, method: str) -> Quantization:
    """Return the scheme of AutoGPTQ and GPTQModel; the latter also writes the key `format`, and zeros as they are."""
    _check_only(fields, "bits", (4, 8), method, is_required=True)
    layouts = ("gptq", "gptq_v2")
    key = "checkpoint_format" if fields.has("checkpoint_format") else "format"
    _check_only(fields, key, layouts, method)
    _check_only(fields, "is_marlin_format", (False,), method)
    _check_only(fields, "pack_dtype", ("int32",), method)
    _check_only(fields, "dynamic", ({},), method)
    layout = fields.choice(key, layouts, "gptq")
    scheme = PackedScheme(layout, fields.integer("bits"), _read_group(fields, "group_size"), has_zeros=True)
    return Quantization(method, packed=(replace(scheme, needs_order=fields.boolean("desc_act", False)),))


def _read_group(fields: Fields, key: str) -> int | None:
    """Return how many numbers of a row share a scale: None for −1, which stands for all of them."""
    if not fields.has(key):
        raise fields.wrong(key, f"how many numbers share a scale: {WAY_OUT}")
    group = fields.integer(key, min=-1, max=MAX_GROUP)
    if group == 0:
        raise fields.wrong(key, f"−1 or a number from 1: {WAY_OUT}")
    return None if group == -1 else group


class _Numbers(NamedTuple):
    """Numbers of a type that compressed-tensors may store."""

    bits: tuple[int, ...]
    strategies: tuple[str, ...]
    """Which numbers may share a scale."""


_FLOAT8 = _Numbers((8,), ("tensor", "channel", "block"))
_INT8 = _Numbers((8,), ("tensor", "channel", "group"))
COMPRESSED: dict[str, dict[str, _Numbers]] = {
    "float-quantized": {"float": _FLOAT8},
    "int-quantized": {"int": _INT8},
    "naive-quantized": {"float": _FLOAT8, "int": _INT8},
    "pack-quantized": {"int": _Numbers((4, 8), _INT8.strategies)},
    "mxfp4-pack-quantized": {"float": _Numbers((4,), ("group",))},
}
"""Format of compressed-tensors → types of the numbers that it may store, and which of these are read."""
MIXED = "mixed-precision"
"""The format of a checkpoint of compressed-tensors whose groups have formats of their own."""
MX_GROUP = 32
"""Numbers that share a power of two, in matrices of floats of 4 bits."""


def _read_compressed(quantization: Fields, method: str) -> Quantization:
    """Return the schemes of the method compressed-tensors, which llm-compressor writes.

    Each group of `config_groups` describes some matrices, and which ones is not read: a matrix's own tensors show which
    of the schemes it has. Groups of 8-bit floats may differ in whether a matrix has one scale or one per row; all
    blocks must be equal. Raises ModelLoadError for anything but the formats in COMPRESSED.
    """
    _check_only(quantization, "format", (*COMPRESSED, MIXED), method)
    _check_only(quantization.mapping("sparsity_config"), "format", ("dense",), method)
    _check_only(quantization, "transform_config", ({},), method)
    groups = quantization.mapping("config_groups")
    if not groups.data:
        raise quantization.wrong("config_groups", f"at least one group of {method}: {WAY_OUT}")
    found, is_mixed = Quantization(method), quantization.data.get("format") == MIXED
    for name in groups.data:
        group = groups.mapping(name)
        if group.mapping("input_activations").data or group.mapping("output_activations").data:
            found = replace(found, has_activation_scheme=True)
        weights = group.mapping("weights")
        if not weights.data:
            continue  # The group quantizes activations only, which are not quantized here.
        of_group = group if is_mixed or group.has("format") else quantization
        _check_only(of_group, "format", tuple(COMPRESSED), method, is_required=is_mixed)
        found = _with_group(found, weights, of_group.choice("format", COMPRESSED, "naive-quantized"))
    return found


def _with_group(found: Quantization, weights: Fields, format_name: str) -> Quantization:
    """Return what was found, with the matrices that one group of compressed-tensors describes by `weights`."""
    allowed, method = COMPRESSED[format_name], f"{found.method} in {format_name}"
    _check_only(weights, "type", tuple(allowed), method, is_required=True)
    kind = weights.choice("type", allowed)
    _check_only(weights, "num_bits", allowed[kind].bits, method, is_required=True)
    _check_only(weights, "strategy", allowed[kind].strategies, method, is_required=True)
    _check_only(weights, "dynamic", (False,), method)
    strategy, is_symmetric = weights.choice("strategy", allowed[kind].strategies), weights.boolean("symmetric", True)
    if kind == "float":
        _check_only(weights, "symmetric", (True,), method)
    if format_name == "mxfp4-pack-quantized":
        _check_only(weights, "group_size", (MX_GROUP,), method, is_required=True)
        return replace(found, packed=(*found.packed, PackedScheme(format_name, 4, MX_GROUP)))
    if kind == "float":
        block = _read_block(weights, "block_structure") if strategy == "block" else None
        known = found.float8.block if found.float8 else None
        if block is not None and known not in (None, block):
            raise weights.wrong("block_structure", f"{list(known or ())}, as in another group: {WAY_OUT}")
        return replace(found, float8=Float8Scheme(block or known, has_row_scales=True))
    scheme = PackedScheme(
        "pack-quantized" if format_name == "pack-quantized" else "int-quantized",
        weights.integer("num_bits"),
        weights.integer("group_size", max=MAX_GROUP) if strategy == "group" else None,
        has_zeros=not is_symmetric,
        has_matrix_scale=strategy == "tensor",
        needs_order=weights.data.get("actorder") in ("group", "dynamic"),
    )
    return replace(found, packed=(*found.packed, scheme))


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
