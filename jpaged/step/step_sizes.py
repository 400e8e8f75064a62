"""The limits of an engine's steps, from which every array shape on the device follows. Imports no JAX.

`startup/sizing/sizes.py` chooses them once, at start; they never change while the engine lives.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..scheduling.buckets import Buckets, make_buckets, one_bucket


@dataclass(frozen=True)
class StepSizes:
    """How many tokens and sequences a step may hold, and how their keys and values are stored."""

    dtype: str
    """Data type of the weights and of the activations between layers."""
    kv_cache_dtype: str
    block_size: int
    """Tokens per page."""
    max_model_len: int
    """Longest sequence in tokens, prompt and output together."""
    max_num_seqs: int
    max_num_batched_tokens: int
    is_deterministic: bool = False
    """Whether every step is padded to `max_num_batched_tokens` and computes each of its tokens as a row of its own."""

    @property
    def max_pages(self) -> int:
        """Return the width of a page table: the pages of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    def buckets(self, platform: str) -> Buckets:
        """Return the padded sizes that steps are compiled for on this platform ("cpu", "gpu" or "tpu")."""
        if self.is_deterministic:
            return one_bucket(self.max_num_seqs)
        max_tokens, max_seqs = self.max_num_batched_tokens, self.max_num_seqs
        return make_buckets(max_num_batched_tokens=max_tokens, max_num_seqs=max_seqs, platform=platform)
