"""Queries from the model's order to aligned query rows by KV head, and results back, by XLA gathers.

    q [T, N, H]   token t, head k · G + g is query row (t − its row's first token) · G + g of KV head k

    aligned [K, A, H]   ├─ row 0 ─────────┤├─ row 1 ─┤├─ row 2 …       each row begins at a multiple of ROW_ALIGN
                        [ tile ][ tile ][ ti|le ]                     a row's last tile reaches into the next row

In a step that only decodes, row t is token t: no gather then, but a transposition, which XLA fuses with its neighbours.
Results take the place of the queries that they belong to. What a tile computes behind its row's end is not stored.
Letters: G query heads per KV head · A aligned query rows of all rows, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..interface import AttentionMetadata
from .plan import ROW_ALIGN


@dataclass(frozen=True)
class QueryRows:
    """The query rows of one step."""

    step: AttentionMetadata
    num_kv_heads: int
    group_size: int
    """G: query heads per KV head."""
    tile_rows: int
    """Aligned query rows after those of the last row of the step: its last tile may reach that far."""

    @property
    def begins(self) -> Int[Array, " R"]:
        """Return the index of the first aligned query row of each of the R rows (sequences) of the step.

        Each row takes its queries × G aligned query rows, rounded up to a multiple of `ROW_ALIGN` = 8, as the plan
        counts them: with G = 2, rows of 3, 5 and 1 queries begin at 0, 8 and 24. A row without queries takes none.
        """
        lens = jnp.diff(self.step.query_starts) * self.group_size
        aligned = -(-lens // ROW_ALIGN) * ROW_ALIGN
        return jnp.cumsum(aligned) - aligned

    def align(self, q: Float[Array, "T N H"]) -> Float[Array, "K A H"]:
        """Gather queries into aligned query rows, [KV head, aligned query row, H]; what padding rows hold is arbitrary.

        `q` holds T tokens' queries of N = K × G heads. In the result each sequence (row of the step) begins at a
        multiple of `ROW_ALIGN` = 8; its query rows are (query, head) pairs, G of them for each query and KV head.
        With G = 2 and rows of 3 and 5 queries, row 0 takes the aligned rows 0 … 5 (and 6, 7 as padding), row 1 the
        aligned rows 8 … 17: aligned row 11 is query (11 − 8) // 2 = 1 of row 1, by head 2k + 1 of KV head k.
        In a step that only decodes, row t is token t, so a transposition replaces the gather, and each token's G query
        rows are padded to a multiple of 8. In both cases `tile_rows` padding rows are added at the end, because the
        last tile may reach beyond the last row.
        """
        num_tokens, num_heads, head_size = q.shape
        if self.step.decodes_only:
            q_KTGH = q.reshape(num_tokens, self.num_kv_heads, self.group_size, head_size).transpose(1, 0, 2, 3)
            q_KTgH = jnp.pad(q_KTGH, ((0, 0), (0, 0), (0, -self.group_size % ROW_ALIGN), (0, 0)))
            return jnp.pad(q_KTgH.reshape(self.num_kv_heads, -1, head_size), ((0, 0), (0, self.tile_rows), (0, 0)))
        (num_rows,) = self.step.context_lens.shape
        # An upper bound that is known when the step is traced: each row with a token takes at most ROW_ALIGN − 1 query
        # rows of padding, and no more rows than tokens have one.
        num_aligned_rows = num_tokens * self.group_size + (ROW_ALIGN - 1) * min(num_rows, num_tokens) + self.tile_rows
        query_row = jnp.arange(-(-num_aligned_rows // ROW_ALIGN) * ROW_ALIGN)
        row = _last_begun(query_row, self.begins)
        row_offset = query_row - self.begins[row]
        # Aligned query rows after the last query may hold any query; the clamp keeps the index valid.
        token = jnp.minimum(self.step.query_starts[row] + row_offset // self.group_size, num_tokens - 1)
        head_KA = jnp.arange(self.num_kv_heads)[:, None] * self.group_size + (row_offset % self.group_size)[None]
        return q.reshape(-1, head_size)[(token * num_heads)[None] + head_KA]

    def restore(self, aligned: Float[Array, "K A H"]) -> Float[Array, "T N H"]:
        """Return the results of aligned query rows in the order of tokens [T, N, H]: this undoes `align`.

        In `aligned`, each sequence (row of the step) begins at a multiple of `ROW_ALIGN` = 8 and holds its results as
        (query, query head) pairs: with G = 2, query 1 of a sequence that begins at aligned row 8 is in the aligned rows
        10 and 11. In a step that only decodes, each token has G aligned rows, rounded up to a multiple of 8, and the
        last `tile_rows` aligned rows belong to no token: `align` appended them for the last tile.

        Padding tokens, those after the last sequence, get zeros. What their aligned rows hold is arbitrary.
        """
        starts = self.step.query_starts
        token = jnp.arange(self.step.positions.shape[0])
        num_kv_heads, num_aligned_rows, head_size = aligned.shape
        if self.step.decodes_only:
            by_head = aligned[:, : -self.tile_rows].reshape(num_kv_heads, len(token), -1, head_size)
            by_token = by_head[:, :, : self.group_size].transpose(1, 0, 2, 3)  # Without each token's padding rows.
        else:
            # Padding tokens lie in no sequence. Both clamps keep their indices valid (R − 1 is the last of R + 1 starts
            # that begins a sequence); zeros replace what they gather.
            row = jnp.minimum(_last_begun(token, starts), starts.shape[0] - 2)
            first_row_T = (token - starts[row]) * self.group_size + self.begins[row]
            aligned_row_TG = jnp.minimum(first_row_T[:, None] + jnp.arange(self.group_size)[None], num_aligned_rows - 1)
            head_K = jnp.arange(num_kv_heads) * num_aligned_rows  # The first aligned row of each KV head.
            by_token = aligned.reshape(-1, head_size)[head_K[None, :, None] + aligned_row_TG[:, None]]
        results = by_token.reshape(len(token), num_kv_heads * self.group_size, head_size)
        return jnp.where((token < starts[-1])[:, None, None], results, 0)


def _last_begun(index: Int[Array, " I"], starts: Int[Array, " R"]) -> Int[Array, " I"]:
    """Return, for each index, the number of the last row whose start is at most that index; `starts` never decrease.

    With starts 0, 3, 3 and 8, index 3 gives row 2 and index 9 row 3. Each index is compared with all starts, because a
    binary search would be a loop on the device.
    """
    return jnp.searchsorted(starts, index, side="right", method="compare_all").astype(jnp.int32) - 1
