"""Quantized matrices in safetensors: the codes, scales and zeros of their rows, whatever tensors hold them.

    number = (code − zero) × scale           of its group of columns, in float32
    number = float × scale                   where a code is itself a small float

`packed.py` finds these matrices in a checkpoint, and checks the names, shapes and dtypes of their tensors before.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from ...pallas_kernels.code_formats import RUN_LEN, CodeFormat, Codes, decode
from .checkpoint import WHOLE, block_of
from .tensor_files import TensorFiles

BLOCKS, BLOCK_SCALES = "_blocks", "_scales"
"""Ends of the names of the tensors of GPT-OSS's experts that are floats of 4 bits."""
GROUPS_OF_RUN = (8, 16)
"""Numbers of groups within a run whose codes are kept; other groups must be runs or several of them."""


@dataclass(frozen=True)
class QuantizedMatrix(ABC):
    """A matrix Wᵀ [N, K] of codes. Groups of neighbouring columns share the scale of a row."""

    files: TensorFiles
    module: str
    """What the names of its tensors begin with, such as "model.layers.0.mlp.down_proj."."""
    shape: tuple[int, int]
    stored_format: CodeFormat
    """The format of its codes; a group has any size here, and the last one of a row may be cut off."""
    order: np.ndarray | None = None
    """The group of each column [K], where columns are not in the order of groups."""

    @abstractmethod
    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        """Return a block of codes, uint8; both slices have a start and a stop."""

    @abstractmethod
    def scales(self, rows: slice) -> np.ndarray:
        """Return the scales of rows [rows, groups]."""

    def zeros(self, rows: slice) -> np.ndarray | None:
        """Return the code of 0 of each group of rows, uint8 [rows, groups]; None if it is the format's."""
        return None

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Return the shape of the tensor that the matrix is."""
        return self.shape

    @property
    def code_format(self) -> CodeFormat | None:
        """Return the format that rows can be kept in; None if they can only be made floats."""
        group, (_, width) = self.stored_format.group, self.shape
        fits_run = group in GROUPS_OF_RUN or group % RUN_LEN == 0
        is_whole = width % RUN_LEN == 0 and width % group == 0
        return self.stored_format if fits_run and is_whole and self.order is None else None

    def read_codes(self, rows: slice) -> Codes:
        """Return rows as codes, of `code_format`."""
        rows, columns = block_of(self.shape, rows, WHOLE)
        zeros = self.zeros(rows)
        arrays = [np.ascontiguousarray(each) for each in (self.codes(rows, columns), self.scales(rows))]
        return Codes(arrays[0], [arrays[1]], [], None if zeros is None else np.ascontiguousarray(zeros))

    def read(self, rows: slice, columns: slice) -> np.ndarray:
        """Return a block as float32, with the bits that `decode` gives for the codes of whole rows.

        A product may be infinite or NaN, which raises nothing here.
        """
        rows, columns = block_of(self.shape, rows, columns)
        # Runs of so many columns lie within one group, wherever the block begins and ends.
        run = math.gcd(self.stored_format.group, columns.start, columns.stop - columns.start)
        if self.order is None:
            groups = np.arange(columns.start, columns.stop, run) // self.stored_format.group
        else:
            groups, run = self.order[columns], 1
        zeros = self.zeros(rows)
        zeros = None if zeros is None else zeros[:, groups]
        codes = Codes(self.codes(rows, columns), [self.scales(rows)[:, groups]], [], zeros)
        with np.errstate(invalid="ignore", over="ignore"):  # The loader refuses values that are not finite.
            values: np.ndarray = decode(codes, replace(self.stored_format, group=run))
        return values


class AWQMatrix(QuantizedMatrix):
    """AutoAWQ's layout: words [K, N ÷ 8], each of eight neighbouring outputs, and zeros [groups, N ÷ 8] likewise."""

    ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
    """The nibble, from the lowest one on, that holds each of a word's eight numbers."""

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        return self._outputs("qweight", columns, rows).T

    def scales(self, rows: slice) -> np.ndarray:
        return self.files.read(self.module + "scales", WHOLE, rows).T

    def zeros(self, rows: slice) -> np.ndarray:
        return self._outputs("qzeros", WHOLE, rows).T

    def _outputs(self, name: str, lines: slice, rows: slice) -> np.ndarray:
        """Return codes [lines, rows] of a tensor whose lines are words of the matrix's rows."""
        words, part = _word_range(rows, 8)
        nibbles = unpack(self.files.read(self.module + name, lines, words), 4)
        order = np.arange(nibbles.shape[1]).reshape(-1, 8)[:, self.ORDER].reshape(-1)
        return nibbles[:, order[part]]


@dataclass(frozen=True)
class GPTQMatrix(QuantizedMatrix):
    """AutoGPTQ's layout: words [K × bits ÷ 32, N], each of neighbouring inputs; zeros [groups, N × bits ÷ 32]."""

    has_lower_zeros: bool = False
    """Whether words of zeros are stored minus a word of ones.

    A zero of 0 has borrowed from its neighbour in the word, which only the sum of whole words undoes.
    """

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        words, part = _word_range(columns, 32 // self.stored_format.bits)
        stored = self.files.read(self.module + "qweight", words, rows)
        return unpack(stored.T, self.stored_format.bits)[:, part]

    def scales(self, rows: slice) -> np.ndarray:
        return self.files.read(self.module + "scales", WHOLE, rows).T

    def zeros(self, rows: slice) -> np.ndarray:
        bits = self.stored_format.bits
        words, part = _word_range(rows, 32 // bits)
        stored = self.files.read(self.module + "qzeros", WHOLE, words).view(np.uint32)
        if self.has_lower_zeros:
            stored = stored + np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
        return unpack(stored, bits)[:, part].T


class CompressedMatrix(QuantizedMatrix):
    """What the layouts of compressed-tensors share: scales [N, groups], or one for the whole matrix."""

    def scales(self, rows: slice) -> np.ndarray:
        return self._of_rows("weight_scale", rows)

    def _of_rows(self, name: str, rows: slice) -> np.ndarray:
        """Return the values of rows [rows, groups] of a tensor that may have a single one for all of them."""
        name = self.module + name
        if len(self.files.shape(name)) == 2:
            return self.files.read(name, rows, WHOLE)
        return np.full((rows.stop - rows.start, 1), self.files.read(name).reshape(()))


class WordMatrix(CompressedMatrix):
    """The layout pack-quantized: words [N, K × bits ÷ 32] of neighbouring inputs, whose zeros are words of outputs."""

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        words, part = _word_range(columns, 32 // self.stored_format.bits)
        stored = self.files.read(self.module + "weight_packed", rows, words)
        return unpack(stored, self.stored_format.bits)[:, part]

    def zeros(self, rows: slice) -> np.ndarray | None:
        name, bits = self.module + "weight_zero_point", self.stored_format.bits
        if not self.stored_format.has_zeros:
            return None
        if self.files.dtype(name) == "I8":  # Signed bytes, which are not packed.
            return self._of_rows("weight_zero_point", rows).view(np.uint8) + np.uint8(2 ** (bits - 1))
        words, part = _word_range(rows, 32 // bits)
        return unpack(self.files.read(name, words, WHOLE).T, bits)[:, part].T


class ByteMatrix(CompressedMatrix):
    """The layout int-quantized: signed bytes [N, K], and zeros likewise."""

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        return self.files.read(self.module + "weight", rows, columns).view(np.uint8) ^ 128

    def zeros(self, rows: slice) -> np.ndarray | None:
        return self._of_rows("weight_zero_point", rows).view(np.uint8) ^ 128 if self.stored_format.has_zeros else None


class Float4Matrix(CompressedMatrix):
    """The layout mxfp4-pack-quantized: bytes [N, K ÷ 2] of two neighbouring inputs, and powers of two as scales."""

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        pairs, part = _word_range(columns, 2)
        return unpack(self.files.read(self.module + "weight_packed", rows, pairs), 4)[:, part]


@dataclass(frozen=True)
class ExpertBlocks(QuantizedMatrix):
    """The matrices Wᵀ of E experts as one [E × R, C], in GPT-OSS's layout.

    They are bytes [E, R, C ÷ 32, 16] of two neighbouring inputs each, and powers of two [E, R, C ÷ 32].
    """

    num_experts: int = 1

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        num_rows, width = self.shape
        return self.num_experts, num_rows // self.num_experts, width

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        blocks = self._of_rows(BLOCKS, rows)
        return unpack(blocks.reshape(len(blocks), self.shape[1] // 2), 4)[:, columns]

    def scales(self, rows: slice) -> np.ndarray:
        return self._of_rows(BLOCK_SCALES, rows)

    def _of_rows(self, end: str, rows: slice) -> np.ndarray:
        """Return rows of a tensor [E, R, …], which are those of one expert or of several whole ones."""
        stored = self.files.read(self.module + end, *block_of(self.tensor_shape, rows, WHOLE)[:2])
        return stored.reshape(-1, *stored.shape[2:])


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes of 4 or 8 bits in integers [A, B], uint8 [A, B × codes of one], from their lowest bits on."""
    little = np.ascontiguousarray(words, words.dtype.newbyteorder("<"))
    stored = little.view(np.uint8).reshape(len(words), words.shape[1] * words.itemsize)
    if bits == 8:
        return stored
    return np.stack([stored & 15, stored >> 4], axis=-1).reshape(len(words), 2 * stored.shape[1])


def _word_range(numbers: slice, per_word: int) -> tuple[slice, slice]:
    """Return which words hold a range of numbers, and where the range is among the numbers of these words.

    Example: the numbers 6 to 9, with 8 in a word, are in the words 0 and 1, and there from 6 to 9 too; the numbers 17
    and 18 are in word 2, and there 1 and 2.
    """
    first = numbers.start // per_word
    start = numbers.start - first * per_word
    return slice(first, -(-numbers.stop // per_word)), slice(start, start + numbers.stop - numbers.start)
