"""What the parts of an engine would take of memory, as its sizes are chosen by it. Knows no JAX."""

from __future__ import annotations

from typing import Protocol


class MemoryCosts(Protocol):
    """The memory that an engine's parts would take, known before anything is allocated."""

    def block_size(self, asked: int | None, kv_dtype: str, max_num_seqs: int, max_model_len: int) -> int:
        """Return the tokens per page, `asked` if given; ConfigError if the page tables have no room on the device."""

    def page_bytes(self, block_size: int, kv_dtype: str) -> int:
        """Return the bytes of one page on a chip, in all layers of the largest page-table group together."""

    def weights_bytes(self, dtype: str) -> int:
        """Return the bytes of the weights on a chip."""

    def converted_bytes(self, dtype: str) -> int:
        """Return the bytes of the largest matrix of codes on a chip that a program makes floats, one at a time."""

    def measure_bytes(self, dtype: str, kv_dtype: str) -> int:
        """Return the bytes that measuring the scales of pages takes beside weights; 0 for pages without scales."""

    @property
    def num_chips(self) -> int:
        """Return the number of devices that the model is spread over."""
