"""Reads what config.json says about quantized safetensors: which kinds of matrices there may be, and no others."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..fields import Fields
from .unread_quantizers import refuse_by_config

CONFIG_KEYS = ("quantization_config", "compression_config")
METHODS = (
    "fp8", "compressed-tensors", "fbgemm_fp8", "modelopt", "awq", "gptq", "auto-round", "intel/auto-round", "mxfp4",
)  # fmt: skip
WAY_OUT = "take the unquantized checkpoint or a .gguf file"
MAX_GROUP = 1 << 20


@dataclass(frozen=True)
class Float8Scheme:
    """Matrices in float8_e4m3fn, each with scales that multiply it: one for the matrix, or one per row or block.

    The shape of its scale tells which of these a matrix has.
    """

    block: tuple[int, int] | None = None
    """Rows and columns of a block that shares a scale; None if there are no scales per block."""


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
    config_key: str = ""
    """The key in the config of the rule that says this, where there may be several; for messages."""


@dataclass(frozen=True)
class Quantization:
    """The kinds of quantized matrices that a checkpoint may have."""

    method: str
    """Its `quant_method`, for messages."""
    float8: Float8Scheme | None = None
    packed: tuple[PackedScheme, ...] = ()
    """Each matrix is stored by one of these, which its tensors show."""
    has_activation_scheme: bool = False
    """Whether the config says how to quantize activations, which stay floats here."""
    has_expert_blocks: bool = False
    """Whether tensors of all experts are blocks of floats of 4 bits, as in GPT-OSS."""

    @property
    def has_matrices(self) -> bool:
        """Return whether matrices are quantized, and not only activations, keys or values."""
        return self.float8 is not None or bool(self.packed) or self.has_expert_blocks


def read_quantization(fields: Fields) -> Quantization | None:
    """Return how the matrices of a checkpoint are quantized; None for a config without quantization.

    `fields` are those of config.json. Their object `quantization_config` names the method, whose own keys say the rest.
    Raises ModelLoadError, which names the key and what to do, for everything that is not supported.
    """
    refuse_by_config(fields, CONFIG_KEYS, WAY_OUT)
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
    if method in ("auto-round", "intel/auto-round"):
        return _read_auto_round(quantization, method)
    if method == "mxfp4":
        return Quantization(method, has_expert_blocks=True)
    if method == "modelopt":
        _check_only(quantization, "quant_algo", ("FP8",), method, is_required=True)
    return Quantization(method, Float8Scheme(), has_activation_scheme=True)


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
    scheme = PackedScheme(
        fields.choice(key, layouts, "gptq"),
        fields.integer("bits"),
        _read_group(fields, "group_size"),
        has_zeros=True,
        needs_order=fields.boolean("desc_act", False),
    )
    return Quantization(method, packed=(scheme, *_read_overrides(fields, "dynamic", scheme, (4, 8), method)))


def _read_auto_round(fields: Fields, method: str) -> Quantization:
    """Return the scheme of Intel's AutoRound, which packs matrices as AutoGPTQ or AutoAWQ does."""
    layouts = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
    _check_only(fields, "packing_format", tuple(layouts), method, is_required=True)
    _check_only(fields, "data_type", ("int",), method)
    layout = layouts[fields.choice("packing_format", layouts)]
    allowed_bits = (4,) if layout == "awq" else (4, 8)
    _check_only(fields, "bits", allowed_bits, method, is_required=True)
    scheme = PackedScheme(layout, fields.integer("bits"), _read_group(fields, "group_size"), has_zeros=True)
    packed = (scheme, *_read_overrides(fields, "extra_config", scheme, allowed_bits, method))
    return Quantization(method, packed=packed, has_activation_scheme=fields.integer("act_bits", 16) < 16)


def _read_overrides(
    fields: Fields, key: str, scheme: PackedScheme, allowed_bits: tuple[int, ...], method: str
) -> list[PackedScheme]:
    """Return the other schemes that an object with rules for modules adds: module, or its pattern → other values.

    Which module a rule is for is not read: a matrix's own tensors show which scheme it has. So rules for modules that
    are not quantized, which begin with "-:" in GPTQModel and have 16 bits or more in AutoRound, change nothing.
    """
    rules, found = fields.mapping(key), list[PackedScheme]()
    for name in rules.data:
        rule = None if name.startswith("-:") else rules.mapping(name)
        if rule is None or rule.data.get("bits") in (16, 32):
            continue
        _check_only(rule, "bits", allowed_bits, method)
        _check_only(rule, "data_type", ("int",), method)
        _check_only(rule, "pack_dtype", ("int32",), method)
        other = replace(
            scheme,
            bits=rule.integer("bits", scheme.bits),
            group=_read_group(rule, "group_size") if rule.has("group_size") else scheme.group,
            needs_order=rule.boolean("desc_act", scheme.needs_order),
            config_key=name,
        )
        if all(replace(other, config_key=each.config_key) != each for each in (scheme, *found)):
            found.append(other)
    return found


def _read_group(fields: Fields, key: str) -> int | None:
    """Return how many numbers of a row share a scale: None for −1, which stands for all of them.

    The key is required. Raises ModelLoadError for anything but −1 and an integer from 1 to MAX_GROUP.
    """
    group = fields.data[key] if fields.has(key) else None
    if type(group) is not int or group == 0 or not -1 <= group <= MAX_GROUP:
        raise fields.wrong(key, f"−1 or an integer from 1 to {MAX_GROUP} (numbers that share a scale): {WAY_OUT}")
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
DENSE = "dense"
"""The format of a checkpoint of compressed-tensors whose weights are floats: only keys and values are quantized."""
MX_GROUP = 32
"""Numbers that share a power of two, in matrices of floats of 4 bits."""


def _read_compressed(quantization: Fields, method: str) -> Quantization:
    """Return the schemes of the method compressed-tensors, which llm-compressor writes.

    Each group of `config_groups` describes some matrices, and which ones is not read: a matrix's own tensors show which
    of the schemes it has. Groups of 8-bit floats may differ in whether a matrix has one scale or one per row; all
    blocks must be equal. There may be no groups if only keys and values are quantized, and weights are floats. Raises
    ModelLoadError for anything but the formats in COMPRESSED.
    """
    _check_only(quantization, "format", (*COMPRESSED, MIXED, DENSE), method)
    _check_only(quantization.mapping("sparsity_config"), "format", (DENSE,), method)
    _check_only(quantization, "transform_config", ({},), method)
    groups = quantization.mapping("config_groups")
    if not groups.data and not quantization.mapping("kv_cache_scheme").data:
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
        found = _with_group(found, weights, of_group.choice("format", COMPRESSED, "naive-quantized"), name)
    return found


def _with_group(found: Quantization, weights: Fields, format_name: str, group_name: str) -> Quantization:
    """Return what was found, with the matrices that a group of compressed-tensors describes by `weights`."""
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
        return replace(found, packed=(*found.packed, PackedScheme(format_name, 4, MX_GROUP, config_key=group_name)))
    if kind == "float":
        block = _read_block(weights, "block_structure") if strategy == "block" else None
        known = found.float8.block if found.float8 else None
        if block is not None and known not in (None, block):
            raise weights.wrong("block_structure", f"{list(known or ())}, as in another group: {WAY_OUT}")
        return replace(found, float8=Float8Scheme(block or known))
    scheme = PackedScheme(
        "pack-quantized" if format_name == "pack-quantized" else "int-quantized",
        weights.integer("num_bits"),
        _read_group(weights, "group_size") if strategy == "group" else None,
        has_zeros=not is_symmetric,
        has_matrix_scale=strategy == "tensor",
        needs_order=weights.data.get("actorder") in ("group", "dynamic", True),
        config_key=group_name,
    )
    return replace(found, packed=(*found.packed, scheme))


def _read_block(fields: Fields, key: str) -> tuple[int, int]:
    """Return the rows and columns that share a scale, from a list such as [128, 128] or a string such as "128x128".

    Raises ModelLoadError for other values.
    """
    value = fields.data[key] if fields.has(key) else None
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", value):
        value = [int(size) for size in value.split("x")]
    if not isinstance(value, list) or [type(size) for size in value] != [int, int] or min(value) < 1:
        raise fields.wrong(key, f"two integers from 1, rows and columns: {WAY_OUT}")
    return value[0], value[1]


def _check_only(fields: Fields, key: str, allowed: Collection[Any], method: str, *, is_required: bool = False) -> None:
    """Raise ModelLoadError if the value of `key` is not in `allowed`, or if it `is_required` and absent.

    The type counts too: 4.0 is not 4. `method` is the quantization method, for the error.
    """
    # Without `is_required` an absent key is right, since its default is a value that is supported.
    is_right = not is_required
    if fields.has(key):
        value = fields.data[key]
        is_right = any(type(value) is type(each) and value == each for each in allowed)
    if not is_right:
        these = "these are" if len(allowed) > 1 else "this is"
        wanted = f"{' or '.join(map(str, allowed))} (only {these} supported for {method})"
        raise fields.wrong(key, f"{wanted}: {WAY_OUT}")
