"""Finds the quantized matrices among the tensors of safetensors, and checks that these fit each other and the config.

Headers are read, and the few values that say how a matrix is stored: its shape, and the order of its columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ...pallas_kernels.code_formats import CODE_FORMATS, CodeFormat
from ..errors import ModelLoadError
from .checkpoint import WHOLE
from .float8 import (
    SCALE_DTYPES,
    STORED_DTYPE,
    WEIGHT_SCALES,
    ZERO_POINT,
    Float8Matrix,
    float8_matrix,
    is_scale,
    is_zero,
    scale_of,
)
from .packed_matrix import (
    BLOCK_SCALES,
    BLOCKS,
    AWQMatrix,
    ByteMatrix,
    ExpertBlocks,
    Float4Matrix,
    GPTQMatrix,
    QuantizedMatrix,
    WordMatrix,
)
from .quantization import WAY_OUT, PackedScheme, Quantization
from .tensor_files import TensorFiles
from .unread_quantizers import MODELOPT_FILE, refuse_by_tensors

FETCH_AGAIN = f"fetch it again, or {WAY_OUT}"
CODES_TENSOR = {
    "awq": "qweight",
    "gptq": "qweight",
    "gptq_v2": "qweight",
    "pack-quantized": "weight_packed",
    "mxfp4-pack-quantized": "weight_packed",
    "int-quantized": "weight",
}
"""Layout → end of the name of the tensor that holds a matrix's codes."""
COMPANION_TENSORS = {
    "qweight": ("qzeros", "scales", "g_idx"),
    "weight_packed": ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    "weight": ("weight_scale", "weight_zero_point", "weight_g_idx"),
}
"""End of that name → ends of the names of the tensors beside it."""
PACKED_ENDS = ("qweight", "qzeros", "weight_packed", "weight_zero_point", "weight_shape", "weight_g_idx")
"""Ends of names that no tensor of a checkpoint without quantization has."""


def refuse_quantized(files: TensorFiles, quantization: Quantization | None) -> None:
    """Raise ModelLoadError if a tensor is quantized, for a config that does not say how weights are quantized.

    `quantization` is what the config says of keys, values or activations alone; None if it has no such key.
    """
    if quantization is None:
        refuse_by_tensors(files, WAY_OUT)
    for name in files.names():
        is_weight = name.endswith(WEIGHT_SCALES) or not is_scale(name)
        is_float8 = files.dtype(name).startswith("F8_") and is_weight
        if is_float8 or name.rpartition(".")[2] in PACKED_ENDS:
            kind = f"8-bit floats ({files.dtype(name)})" if is_float8 else "a part of a packed matrix"
            key = "quantization_config" if quantization is None else f"weights in the {quantization.method} config"
            fault = f"config.json has no {key}, which says how they are scaled"
            add = "add it" if quantization is None else "add them"
            if quantization is None and (files.path / MODELOPT_FILE).is_file():
                add = f"add it with the quant_method modelopt and the quant_algo that {MODELOPT_FILE} has"
            raise files.fault(name, f"holds {kind}, and {fault}: {add}, or {WAY_OUT}")


def find_matrices(files: TensorFiles, quantization: Quantization) -> tuple[dict[str, QuantizedMatrix], list[str]]:
    """Return the quantized matrices by the names of their weights, and the names of all other weights.

    Raises ModelLoadError for a matrix whose tensors are incomplete, or whose dtypes or shapes fit neither each other
    nor the config, and for a tensor that belongs to no matrix.
    """
    matrices, used, others = dict[str, QuantizedMatrix](), set[str](), list[str]()
    for name in files.names():
        module, _, end = name.rpartition(".")
        if quantization.has_expert_blocks and name.endswith(BLOCKS):
            matrices[name] = _expert_blocks(files, name)
            used.add(name.removesuffix(BLOCKS) + BLOCK_SCALES)
            continue
        if (matrix := _matrix(files, name, end, quantization)) is None:
            others.append(name)
            continue
        weight = f"{module}.weight" if end != "weight" else name
        if weight != name and weight in files.names():
            raise files.fault(weight, f"is there twice, as {name!r} too: {FETCH_AGAIN}")
        matrices[weight] = matrix
        if isinstance(matrix, Float8Matrix):
            used.add(f"{module}.{ZERO_POINT}")  # Its scale is known by its name.
        else:
            used.update(f"{module}.{part}" for part in COMPANION_TENSORS[end])
    others = [name for name in others if name not in used and not is_scale(name)]
    _refuse_parts(files, others, quantization)
    return matrices, others


def _expert_blocks(files: TensorFiles, name: str) -> ExpertBlocks:
    """Return the matrices of all experts in floats of 4 bits. Their name is that of their bytes: the transposed one
    without its end is that of unquantized checkpoints, which have W. Raises ModelLoadError if tensors do not fit."""
    module, shape, stored = name.removesuffix(BLOCKS), files.shape(name), CODE_FORMATS["MXFP4"]
    if len(shape) != 4 or 2 * shape[3] != stored.group or files.dtype(name) != "U8":
        got = f"has the shape {shape} and is stored as {files.dtype(name)}"
        raise files.fault(name, f"{got}, wanted (experts, rows, groups, {stored.group // 2}) of U8: {FETCH_AGAIN}")
    scales = module + BLOCK_SCALES
    if scales not in files.names() or files.shape(scales) != shape[:3] or files.dtype(scales) != "U8":
        raise files.fault(name, f"is quantized without {scales!r} of the shape {shape[:3]}, of U8: {FETCH_AGAIN}")
    num_experts, num_rows, num_groups, _ = shape
    joined = num_experts * num_rows, num_groups * stored.group
    return ExpertBlocks(files, module, joined, stored, num_experts=num_experts)


def _refuse_parts(files: TensorFiles, names: list[str], quantization: Quantization) -> None:
    """Raise ModelLoadError if one of the names, which belong to no matrix, is that of a part of a quantized matrix."""
    ends = {end for scheme in quantization.packed for end in COMPANION_TENSORS[CODES_TENSOR[scheme.layout]]}
    for name in names:
        module, _, end = name.rpartition(".")
        if end not in ends and not (end == ZERO_POINT and files.dtype(name).startswith("F8_")):
            continue
        if end == "scales" and not any(f"{module}.{other}" in files.names() for other in ("qweight", "qzeros")):
            # AutoAWQ's ScaledActivation divides the outputs of an activation, such as GELU, by these.
            raise files.fault(name, f"holds scales of an activation, not available in this version: {WAY_OUT}")
        codes = " or ".join(dict.fromkeys(CODES_TENSOR[scheme.layout] for scheme in quantization.packed)) or "weight"
        raise files.fault(name, f"is a part of a quantized matrix without its {codes}: {FETCH_AGAIN}")


def _matrix(files: TensorFiles, name: str, end: str, quantization: Quantization) -> QuantizedMatrix | None:
    """Return the matrix whose codes a tensor holds; None for a tensor that holds none. `end` is that of its name."""
    dtype = files.dtype(name)

    def fault(clause: str) -> ModelLoadError:
        return files.fault(name, f"{clause}: {FETCH_AGAIN}")

    if end != "weight" and (end == ZERO_POINT or is_scale(name)):
        return None
    if dtype == STORED_DTYPE and quantization.float8 is not None:
        if end != "weight":
            raise fault(f"is stored as {STORED_DTYPE}, wanted a name that ends with weight")
        return float8_matrix(files, name, quantization.float8, fault)
    schemes = [scheme for scheme in quantization.packed if CODES_TENSOR[scheme.layout] == end]
    if schemes and (end != "weight" or dtype == "I8"):
        return _first_that_fits(files, name, schemes)
    scale = scale_of(name, files.names()) if end == "weight" else None
    if scale is not None:
        raise fault(f"has a scale, {scale!r}, and is stored as {dtype}")
    if dtype.startswith("F8_"):
        raise fault(f"is stored as {dtype}, of which quantization_config says nothing")
    return None


def _first_that_fits(files: TensorFiles, name: str, schemes: list[PackedScheme]) -> QuantizedMatrix:
    """Return a matrix by the first scheme that fits its tensors.

    If none fits, raises the ModelLoadError of the scheme that fits most: the bits first, then tensor after tensor.
    """
    best_fit, best_error = (False, -1), None
    for scheme in schemes:
        tensors = _Tensors(files, name, scheme)
        try:
            return _MAKERS[scheme.layout](tensors)
        except ModelLoadError as error:
            fit = ("bits" in tensors.fitting, len(tensors.fitting))
            if fit > best_fit:
                best_fit, best_error = fit, error
    assert best_error is not None, "there is at least one scheme"
    raise best_error


@dataclass(frozen=True)
class _Tensors:
    """The tensors of one matrix, and the scheme that they are compared with."""

    files: TensorFiles
    main: str
    """The name of the one that holds its codes."""
    scheme: PackedScheme
    fitting: list[str] = field(default_factory=list)
    """What fits the scheme so far: ends of the names of tensors, and "bits"."""

    @property
    def module(self) -> str:
        """Return what all of their names begin with, with its dot."""
        return self.main.removesuffix(CODES_TENSOR[self.scheme.layout])

    def main_shape(self, dtype: str) -> tuple[int, int]:
        """Return the shape of the codes' tensor. Raises ModelLoadError unless it is a matrix of `dtype`."""
        shape = self.files.shape(self.main)
        if self.files.dtype(self.main) != dtype or len(shape) != 2:
            got = f"has the shape {shape} and is stored as {self.files.dtype(self.main)}"
            raise self.fault(self.main, f"{got}, wanted a matrix of {dtype}")
        return shape[0], shape[1]

    def has(self, end: str) -> bool:
        """Return whether there is a tensor with an end of the name."""
        return self.module + end in self.files.names()

    def check(self, end: str, *shapes: tuple[int, ...], dtypes: tuple[str, ...] = ("I32",)) -> str:
        """Return the dtype of a tensor. Raises ModelLoadError unless it is there, with one of the shapes and dtypes."""
        name = self.module + end
        if not self.has(end):
            raise self.fault(self.main, f"is quantized without {name!r}")
        if (dtype := self.files.dtype(name)) not in dtypes:
            raise self.fault(name, f"is stored as {dtype}, wanted {' or '.join(dtypes)}")
        if (shape := self.files.shape(name)) not in shapes:
            wanted = " or ".join(map(str, shapes))
            raise self.fault(name, f"has the shape {shape}, wanted {wanted} for {self.files.shape(self.main)} packed")
        self.fitting.append(end)
        return dtype

    def refuse(self, end: str, reason: str) -> None:
        """Raise ModelLoadError if there is a tensor with an end of the name."""
        if self.has(end):
            raise self.fault(self.module + end, f"is there, and {reason}")

    def fault(self, name: str, clause: str) -> ModelLoadError:
        """Return (do not raise) an error about a tensor, which says what the config has."""
        group = "rows" if self.scheme.group is None else f"groups of {self.scheme.group}"
        group = "matrices" if self.scheme.has_matrix_scale else group
        source = f"{self.scheme.config_key!r} of the config" if self.scheme.config_key else "the config"
        return self.files.fault(name, f"{clause}; {source} has {self.scheme.bits} bits and {group}: {FETCH_AGAIN}")

    def group(self, width: int) -> tuple[int, int]:
        """Return how many columns share a scale, and how many groups a row of `width` columns has."""
        group = max(1, self.scheme.group or width)
        return group, -(-width // group)

    def order(self, end: str, width: int) -> np.ndarray | None:
        """Return the group of each column, from the tensor with this end; None where they are in the order of groups.

        compressed-tensors writes −1 where it has noted no order. Raises ModelLoadError for a group that is not there.
        """
        if not self.has(end):
            if self.scheme.needs_order:
                raise self.fault(self.main, f"is quantized without {self.module + end!r}, the order of its columns")
            return None
        self.check(end, (width,), dtypes=("I32", "I64"))
        order, (group, num_groups) = self.files.read(self.module + end, WHOLE), self.group(width)
        if np.array_equal(order, np.arange(width) // group) or (order == -1).all():
            return None
        if order.min() < 0 or order.max() >= num_groups:
            got = f"has groups from {order.min()} to {order.max()}"
            raise self.fault(self.module + end, f"{got}, wanted some from 0 to {num_groups - 1}")
        return order

    def format_of_integers(self, name: str, width: int, scale: str) -> CodeFormat:
        """Return the format of the codes; `name` is what messages call it, and `scale` the dtype of its scales."""
        group, _ = self.group(width)
        group = width if self.scheme.has_matrix_scale else group
        if group < width:
            name += f"/{group}"
        zero = 0 if self.scheme.has_zeros else 2 ** (self.scheme.bits - 1)
        return CodeFormat(name, self.scheme.bits, max(1, group), zero, has_zeros=self.scheme.has_zeros, scale=scale)


def _awq_matrix(tensors: _Tensors) -> QuantizedMatrix:
    """Return a matrix of AutoAWQ, whose words hold outputs."""
    width, num_words = tensors.main_shape("I32")
    _, num_groups = tensors.group(width)
    scale = tensors.check("scales", (num_groups, num_words * 8), dtypes=tuple(SCALE_DTYPES))
    tensors.check("qzeros", (num_groups, num_words))
    tensors.refuse("g_idx", "awq has no order of columns")
    stored = tensors.format_of_integers("AWQ-4", width, SCALE_DTYPES[scale])
    return AWQMatrix(tensors.files, tensors.module, (num_words * 8, width), stored)


def _gptq_matrix(tensors: _Tensors, *, has_lower_zeros: bool) -> QuantizedMatrix:
    """Return a matrix of AutoGPTQ, whose words hold inputs."""
    bits = tensors.scheme.bits
    num_words, height = tensors.main_shape("I32")
    width = num_words * 32 // bits
    if height * bits % 32:
        raise tensors.fault(tensors.main, f"has {height} columns, wanted a multiple of {32 // bits}")
    _, num_groups = tensors.group(width)
    # Words of zeros tell the bits, whatever the groups are.
    if tensors.has("qzeros") and tensors.files.shape(tensors.module + "qzeros")[-1:] == (height * bits // 32,):
        tensors.fitting.append("bits")
    scale = tensors.check("scales", (num_groups, height), dtypes=tuple(SCALE_DTYPES))
    tensors.check("qzeros", (num_groups, height * bits // 32))
    order = tensors.order("g_idx", width)
    stored = tensors.format_of_integers(f"GPTQ-{bits}", width, SCALE_DTYPES[scale])
    return GPTQMatrix(tensors.files, tensors.module, (height, width), stored, order, has_lower_zeros)


def _pack_quantized_matrix(tensors: _Tensors) -> QuantizedMatrix:
    """Return a matrix of compressed-tensors whose words hold inputs."""
    bits, (num_rows, num_words) = tensors.scheme.bits, tensors.main_shape("I32")
    tensors.check("weight_shape", (2,), dtypes=("I64", "I32"))
    height, width = map(int, tensors.files.read(tensors.module + "weight_shape", WHOLE))
    if (height, -(-width * bits // 32)) != (num_rows, num_words):
        stored = (
            f"has the shape {(num_rows, num_words)}, and {tensors.module + 'weight_shape'!r} says {(height, width)}"
        )
        raise tensors.fault(tensors.main, stored)
    tensors.fitting.append("bits")
    num_groups = _check_scale(tensors, height, width)
    if tensors.scheme.has_zeros:
        if tensors.scheme.has_matrix_scale:
            tensors.check(ZERO_POINT, (), (1,), dtypes=("I8",))
        elif tensors.has(ZERO_POINT) and tensors.files.dtype(tensors.module + ZERO_POINT) == "I8":
            tensors.check(ZERO_POINT, (height, num_groups), dtypes=("I8",))  # A byte each, not packed.
        else:
            tensors.check(ZERO_POINT, (-(-height * bits // 32), num_groups))
    return _checked_integers(tensors, WordMatrix, (height, width))


def _int_quantized_matrix(tensors: _Tensors) -> QuantizedMatrix:
    """Return a matrix of compressed-tensors in signed bytes."""
    height, width = tensors.main_shape("I8")
    num_groups = _check_scale(tensors, height, width)
    if tensors.scheme.has_zeros:
        shapes: list[tuple[int, ...]] = [(), (1,)] if tensors.scheme.has_matrix_scale else [(height, num_groups)]
        tensors.check(ZERO_POINT, *shapes, dtypes=("I8",))
    return _checked_integers(tensors, ByteMatrix, (height, width))


def _check_scale(tensors: _Tensors, height: int, width: int) -> int:
    """Check the scale of a matrix of integers, and that it has no zeros too many; return how many groups rows have."""
    _, num_groups = tensors.group(width)
    shapes: list[tuple[int, ...]] = [(), (1,)] if tensors.scheme.has_matrix_scale else [(height, num_groups)]
    tensors.check("weight_scale", *shapes, dtypes=tuple(SCALE_DTYPES))
    if not tensors.scheme.has_zeros and tensors.has(ZERO_POINT):
        # Signed bytes are zero points as they are; integers of 32 bits hold several, to which the middle code is added.
        name = tensors.module + ZERO_POINT
        if tensors.files.dtype(name) != "I8" or not is_zero(tensors.files, name):
            tensors.refuse(ZERO_POINT, "the config says that all zeros are equal (symmetric)")
    return num_groups


def _checked_integers(
    tensors: _Tensors, matrix: Callable[..., QuantizedMatrix], shape: tuple[int, int]
) -> QuantizedMatrix:
    """Return a matrix of compressed-tensors whose tensors have been checked, but for its order."""
    scale = SCALE_DTYPES[tensors.files.dtype(tensors.module + "weight_scale")]
    name = f"int{tensors.scheme.bits}" + " with zeros" * tensors.scheme.has_zeros
    stored = tensors.format_of_integers(name, shape[1], scale)
    return matrix(tensors.files, tensors.module, shape, stored, tensors.order("weight_g_idx", shape[1]))


def _mxfp4_matrix(tensors: _Tensors) -> QuantizedMatrix:
    """Return a matrix of compressed-tensors in floats of 4 bits."""
    height, num_bytes = tensors.main_shape("U8")
    stored = CODE_FORMATS["MXFP4"]
    if 2 * num_bytes % stored.group:
        raise tensors.fault(tensors.main, f"has {2 * num_bytes} numbers in a row, wanted a multiple of {stored.group}")
    tensors.check("weight_scale", (height, 2 * num_bytes // stored.group), dtypes=("U8",))
    for end in (ZERO_POINT, "weight_g_idx"):
        tensors.refuse(end, "floats of 4 bits have none")
    return Float4Matrix(tensors.files, tensors.module, (height, 2 * num_bytes), stored)


_MAKERS: dict[str, Callable[[_Tensors], QuantizedMatrix]] = {
    "awq": _awq_matrix,
    "gptq": partial(_gptq_matrix, has_lower_zeros=True),
    "gptq_v2": partial(_gptq_matrix, has_lower_zeros=False),
    "pack-quantized": _pack_quantized_matrix,
    "int-quantized": _int_quantized_matrix,
    "mxfp4-pack-quantized": _mxfp4_matrix,
}
"""Layout → what makes a matrix of its tensors, and checks them."""
assert _MAKERS.keys() == CODES_TENSOR.keys()
