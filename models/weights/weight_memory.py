"""Host memory for weights, which JAX aliases on a CPU."""

from __future__ import annotations

import contextlib
import math
import mmap
from threading import Lock
from typing import Any

import numpy as np

NUM_READERS = 2
"""Threads that read weights."""
ALIGNMENT = 64
"""Bytes. On a CPU JAX aliases host memory that is aligned so, and copies any other."""
BLOCK_BYTES = 32 << 20
"""Bytes of one allocation, in which small weights lie one after the other."""


class WeightMemory:
    """Allocates host memory for weights, in blocks that are large enough for the system's large pages.

    Large pages cost a processor fewer address translations. Threads may share one instance.
    """

    def __init__(self) -> None:
        self._lock, self._block, self._num_used = Lock(), np.empty(0, np.uint8), 0

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Return an uninitialized array, aligned so that JAX can alias it. The array keeps its block alive.

        Arrays of up to a quarter of BLOCK_BYTES lie one after the other in shared blocks, each from a multiple of
        ALIGNMENT bytes on. A new block is begun only when the next such array does not fit, so a block has less than a
        quarter of unused bytes. A larger array is put into the current block too if it fits, and otherwise gets a block
        of its own size.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            block, start = self._block, self._num_used
            if start + num_bytes > len(block):
                block, start = _allocate_block(num_bytes if num_bytes > BLOCK_BYTES // 4 else BLOCK_BYTES), 0
            # A block of its own does not become the current one, so that the rest of the current block stays in use.
            if block is self._block or len(block) == BLOCK_BYTES:
                self._block, self._num_used = block, start + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return block[start : start + num_bytes].view(dtype).reshape(shape)


def _allocate_block(num_bytes: int) -> np.ndarray:
    """Return new memory as an array of `num_bytes` bytes, for which the system is asked to use large pages.

    For 0 bytes the array has one byte, because an empty mapping is an error. The array keeps the mapping alive; the
    memory is freed with the last array that views it.
    """
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A system without large pages raises an error; the memory is usable all the same.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
