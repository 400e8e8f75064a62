"""How a decoder's heads, MLP and vocabulary are shared out over the devices of a mesh, padded where they do not divide.

Kernels then see ordinary heads, the same number on every device. What pads is zero: it adds nothing to any sum, is left
out of results, and is not saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

Run = tuple[int, int, int]
"""(first stored row, first row of the model, number of rows). Stored rows that no run covers are zero."""


def true_size(runs: Iterable[Run]) -> int:
    """Return how many rows or columns the model has, without padding: one more than the last that a run covers."""
    return max(true + count for _, true, count in runs)


@dataclass(frozen=True)
class Shares:
    """The stored sizes of a decoder whose tensors are spread over `num_shards` devices.

    KV heads are padded to the least number that divides the number of devices or is a multiple of it. If there are more
    devices than KV heads, each KV head is copied to several devices, which share its query heads; the query heads of a
    group are then padded to a multiple of the copies. 9 query heads and 3 KV heads become 12 and 4 on 2 or 4 devices.
    On 8 devices they become 16 and 4, and each of the 4 lies on two devices.
    """

    num_shards: int
    num_heads: int
    """Query heads of the model, a multiple of its KV heads."""
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int

    @cached_property
    def _distinct_kv_heads(self) -> int:
        """Return the number of KV heads with padding and without copies.

        It is the least number, from the model's KV heads on, that divides the devices or is a multiple of them. The
        model's 3 KV heads become 4 on 2, 4 or 8 devices, and stay 3 on 1, 3 or 6. The search ends at the number of
        devices or at a multiple of it.
        """
        number = self.num_kv_heads
        while self.num_shards % number and number % self.num_shards:
            number += 1
        return number

    @property
    def kv_copies(self) -> int:
        """Return on how many devices each KV head lies."""
        return max(1, self.num_shards // self._distinct_kv_heads)

    @property
    def stored_kv_heads(self) -> int:
        """Return the KV heads of all devices together, copies included."""
        return self._distinct_kv_heads * self.kv_copies

    @property
    def group_size(self) -> int:
        """Return the query heads of each stored KV head."""
        return -(-self._true_group // self.kv_copies)

    @property
    def _true_group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def stored_heads(self) -> int:
        """Return the query heads of all devices together."""
        return self.stored_kv_heads * self.group_size

    @property
    def stored_inner(self) -> int:
        """Return the width of the MLP on all devices together."""
        return _round_up(self.intermediate_size, self.num_shards)

    @property
    def stored_vocab(self) -> int:
        """Return the rows of the embedding and of the head on all devices together."""
        return _round_up(self.vocab_size, self.num_shards)

    def __str__(self) -> str:
        """Return how many devices there are, and each size that padding or copies make larger.

        Example: "2 devices, which store 12 query heads for 9, 4 KV heads for 3". Without padding: "2 devices".
        """
        stored = {
            "query heads": (self.num_heads, self.stored_heads),
            "KV heads": (self.num_kv_heads, self.stored_kv_heads),
            "MLP columns": (self.intermediate_size, self.stored_inner),
            "vocabulary rows": (self.vocab_size, self.stored_vocab),
        }
        padded = [f"{larger} {name} for {own}" for name, (own, larger) in stored.items() if larger != own]
        return f"{self.num_shards} devices" + (f", which store {', '.join(padded)}" if padded else "")

    def query_runs(self, head_size: int) -> tuple[Run, ...]:
        """Return where the rows of the model's query heads are stored; a head has `head_size` rows of Wᵀ.

        Each run is (first stored row, first row of the model, number of rows). Each stored KV head has `group_size`
        stored query heads. Copies of a KV head take the query heads of its group in turn, and the last copies may get
        fewer than `group_size`, or none; the rest is padding. Adjacent runs are merged.

        Example: 9 query heads and 3 KV heads on 8 devices, where each KV head has 2 copies of 2 query heads each. With
        `head_size` 1 the runs are (0, 0, 3), (4, 3, 3) and (8, 6, 3): each group of 3 heads is stored as 4.
        """
        runs = []
        for kv_head in range(self.stored_kv_heads):
            true_kv_head, copy = divmod(kv_head, self.kv_copies)
            if true_kv_head < self.num_kv_heads:
                # This copy takes the heads of the model's group from number `first` on; none may be left.
                first = copy * self.group_size
                count = max(0, min(self.group_size, self._true_group - first))
                runs.append((kv_head * self.group_size, true_kv_head * self._true_group + first, count))
        return _scaled(runs, head_size)

    def kv_runs(self, head_size: int) -> tuple[Run, ...]:
        """Return where the rows of the model's KV heads are stored; a head has `head_size` rows of Wᵀ.

        Each run is (first stored row, first row of the model, number of rows). A KV head that is copied to several
        devices occurs once for each copy, and a run that continues the one before on both sides is merged with it.

        Example: 3 KV heads of 2 copies each, with `head_size` 1, are the runs (0, 0, 1), (1, 0, 2), (3, 1, 2) and
        (5, 2, 1): heads 0 0 1 1 2 2.
        """
        # Copies of a head are neighbours. Stored heads beyond the model's are padding, and no run covers them.
        heads = ((kv_head, kv_head // self.kv_copies) for kv_head in range(self.stored_kv_heads))
        return _scaled([(kv_head, true, 1) for kv_head, true in heads if true < self.num_kv_heads], head_size)


def _scaled(runs: list[Run], size: int) -> tuple[Run, ...]:
    """Return runs of heads as runs of rows, with `size` rows per head. Empty runs are left out.

    A run is (first stored, first of the model, count), in heads and, in the result, in rows. It is merged with the run
    before it if it continues that run on both sides: (0, 0, 2) and (2, 2, 1) become (0, 0, 3), and with `size` 64 (0,
    0, 192).
    """
    merged: list[Run] = []
    for stored, true, count in runs:
        last_stored, last_true, last_count = merged[-1] if merged else (0, 0, 0)
        if merged and (stored, true) == (last_stored + last_count, last_true + last_count):
            merged[-1] = (last_stored, last_true, last_count + count)
        elif count:
            merged.append((stored, true, count))
    return tuple((stored * size, true * size, count * size) for stored, true, count in merged)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
