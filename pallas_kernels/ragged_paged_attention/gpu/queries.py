"""Queries by KV head, aligned, and back, by XLA gathers: rows of H values each.

    q [T, N, H]   token t, head k · G + g is query row (t − its row's first token) · G + g of KV head k

    aligned [K, A, H]   ├─ row 0 ─────────┤├─ row 1 ─┤├─ row 2 …       each row from a multiple of ALIGN on
                        [ tile ][ tile ][ ti|le ]                     a row's last tile would reach into the next row

Results take the place of the queries that they belong to. What a tile computes behind its row's end it does not write.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .gpu_plan import ALIGN
from .interface import AttentionMetadata


@dataclass(frozen=True)
class QueryRows:
    """Where each query of a step stands. `group` is G; `tile_rows` is how far the last row's last tile may reach."""

    step: AttentionMetadata
    num_kv_heads: int
    group: int
    tile_rows: int

    @property
    def begins(self) -> Int[Array, " R"]:
        """First aligned query row of each row, as `gpu_plan` counts them."""
        lens = jnp.diff(self.step.query_starts) * self.group
        aligned = -(-lens // ALIGN) * ALIGN
        return jnp.cumsum(aligned) - aligned

    def align(self, q: Float[Array, "T N H"]) -> Float[Array, "K A H"]:
        """Queries to aligned query rows; what belongs to no query is any query."""
        num_tokens, num_heads, head_size = q.shape
        (num_rows,) = self.step.context_lens.shape
        room = num_tokens * self.group + (ALIGN - 1) * min(num_rows, num_tokens) + self.tile_rows
        query_row = jnp.arange(-(-room // ALIGN) * ALIGN)
        row = _row_of(query_row, self.begins)
        within = query_row - self.begins[row]
        token = jnp.minimum(self.step.query_starts[row] + within // self.group, num_tokens - 1)
        head_KA = jnp.arange(self.num_kv_heads)[:, None] * self.group + (within % self.group)[None]
        found: Array = q.reshape(-1, head_size)[(token * num_heads)[None] + head_KA]
        return found

    def take(self, aligned: Float[Array, "K A H"]) -> Float[Array, "T N H"]:
        """Results in the order of tokens, and zeros for padding: a tile may have computed what lies behind the last row
        from keys that no query sees."""
        starts = self.step.query_starts
        token = jnp.arange(self.step.positions.shape[0])
        row = jnp.minimum(_row_of(token, starts), starts.shape[0] - 2)
        place_TG = ((token - starts[row]) * self.group + self.begins[row])[:, None] + jnp.arange(self.group)[None]
        num_kv_heads, room, head_size = aligned.shape
        head_K = jnp.arange(num_kv_heads) * room
        found = aligned.reshape(-1, head_size)[head_K[None, :, None] + jnp.minimum(place_TG, room - 1)[:, None]]
        results = found.reshape(len(token), num_kv_heads * self.group, head_size)
        return jnp.where((token < starts[-1])[:, None, None], results, 0)


def _row_of(index: Int[Array, " I"], starts: Int[Array, " R"]) -> Int[Array, " I"]:
    """The last row that begins at or before each index; by comparing with all of them, since a search is a loop."""
    return jnp.searchsorted(starts, index, side="right", method="compare_all").astype(jnp.int32) - 1
