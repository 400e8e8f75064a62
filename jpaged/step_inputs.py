"""Lists become arrays here and nowhere else: one step's work as ONE padded int32 buffer.

The buffer is cut into named sections at static offsets; floats travel as their bits. `StepLayout` describes
the cut for one token bucket, on the host (numpy views, written) and on the device (slices, read) alike.
Page tables live on the device: only their changes travel. A token id of −(s + 1) ≤ −2 stands for the last
token sampled in state slot s, which the host need not have seen.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import numpy as np

from .buckets import Buckets
from .pallas_kernels.ragged_paged_attention import Backend
from .request import Sequence
from .scheduler import ScheduledSequence

SAMPLE_FIELDS = (
    "token", "slot", "output_index", "sample_index", "seed_low", "seed_high", "top_k", "temperature", "top_p", "min_p",
)  # fmt: skip
"""Columns of a sampled row. `token` is where in the step its hidden state is; the last three are float bits."""
NUM_STEP_FIELDS = 3
"""The first of them differ in every step; the others belong to the sequence."""
CHANGE_FIELDS = ("group", "slot", "index", "page")
"""A page-table change: entry `index` of state slot `slot`'s table in `group` becomes `page`."""
COUNT_FIELDS = ("num_tokens", "num_rows", "num_decode_rows", "num_samples")


@dataclass(frozen=True)
class StepLayout:
    """Sections of the packed buffer of one token bucket. Hashable: a static part of a compiled step."""

    num_tokens: int
    num_rows: int
    num_samples: int
    num_groups: int
    num_changes: int
    plan_len: int

    @cached_property
    def sections(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Name → (offset, shape), in int32."""
        shapes: dict[str, tuple[int, ...]] = {
            "counts": (len(COUNT_FIELDS),),
            "samples": (len(SAMPLE_FIELDS), self.num_samples),
            "changes": (len(CHANGE_FIELDS), self.num_changes),
            "token_ids": (self.num_tokens,),
            "positions": (self.num_tokens,),
            "slots": (self.num_groups, self.num_tokens),
            "query_starts": (self.num_rows + 1,),
            "context_lens": (self.num_rows,),
            "row_slots": (self.num_rows,),
            "plan": (self.plan_len,),
        }
        sections, offset = {}, 0
        for name, shape in shapes.items():
            sections[name] = (offset, shape)
            offset += prod(shape)
        return sections

    @cached_property
    def size(self) -> int:
        """int32 values in the buffer."""
        offset, shape = self.sections["plan"]
        return offset + prod(shape)

    def view(self, packed: Any) -> dict[str, Any]:
        """The sections of a numpy buffer (writable views) or of a traced array (slices at static offsets)."""
        return {
            name: packed[offset : offset + prod(shape)].reshape(shape)
            for name, (offset, shape) in self.sections.items()
        }


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """One step's padded arrays, packed. `num_samples` rows are sampled, in the order of the `samples` section."""

    packed: np.ndarray | jax.Array

    def view(self, layout: StepLayout) -> dict[str, Any]:
        return layout.view(self.packed)


@dataclass(frozen=True)
class BuiltStep:
    """What the runner needs to know about a step on the host beside its packed inputs."""

    inputs: StepInputs
    layout: StepLayout
    table_updates: tuple[np.ndarray, ...]
    """Page-table changes that do not fit the step's buffer, [4, N] each; to be applied before it."""
    samples: tuple[Sequence, ...]
    """Sequences whose next token the step yields, in the order of its outputs."""


class StepInputBuilder:
    """Builds step inputs for one engine: its buckets, its backend, its state slots."""

    def __init__(self, *, buckets: Buckets, backend: Backend, block_size: int, num_groups: int, max_num_seqs: int):
        self.buckets = buckets
        self.backend = backend
        self.block_size = block_size
        self.num_groups = num_groups
        self.layouts = {size: self._layout(size) for size in buckets.num_tokens}
        self.num_changes = self.layouts[buckets.num_tokens[-1]].num_changes
        # What the sampler wants to know of a sequence, per state slot: written when the slot changes hands.
        self.sample_rows = np.zeros((max_num_seqs + 1, len(SAMPLE_FIELDS) - NUM_STEP_FIELDS), np.int32)

    def build(self, scheduled: SequenceOf[ScheduledSequence]) -> BuiltStep:
        """Pack the step's work. Rows with one token come first, longest context first, as backends want them.

        Longest first lets a backend take rows of like length together. Marks the pages as sent.
        """
        rows = sorted(scheduled, key=lambda item: (item.num_tokens > 1, -item.start))
        num_tokens = sum(item.num_tokens for item in rows)
        layout = self.layouts[self.buckets.tokens_for(num_tokens)]
        packed = np.zeros(layout.size, np.int32)
        view = layout.view(packed)
        query_lens = np.array([item.num_tokens for item in rows], np.int32)
        context_lens = np.array([item.start + item.num_tokens for item in rows], np.int32)
        num_decode_rows = int(np.count_nonzero(query_lens == 1))
        self._fill_decode(view, rows[:num_decode_rows])
        view["query_starts"][1 : len(rows) + 1] = np.cumsum(query_lens)
        view["query_starts"][len(rows) + 1 :] = num_tokens
        view["context_lens"][: len(rows)] = context_lens
        view["row_slots"][: len(rows)] = [item.sequence.slot for item in rows]
        samples, sample_tokens = [], []
        for item, start in zip(rows, view["query_starts"].tolist(), strict=False):
            if item.num_tokens > 1:
                self._fill_chunk(view, item, start)
            if item.samples:
                samples.append(item.sequence)
                sample_tokens.append(start + item.num_tokens - 1)
        self._fill_samples(view["samples"], samples, sample_tokens)
        updates, changes = self._changes([item.sequence for item in rows], layout.num_changes)
        view["changes"][:, : changes.shape[1]] = changes
        view["counts"][:] = num_tokens, len(rows), num_decode_rows, len(samples)
        self.backend.plan(query_lens, context_lens, num_decode_rows, num_tokens, view["plan"])
        return BuiltStep(StepInputs(packed), layout, updates, tuple(samples))

    def _layout(self, num_tokens: int) -> StepLayout:
        num_rows = self.buckets.rows_for(num_tokens)
        return StepLayout(
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_samples=self.buckets.max_samples,
            num_groups=self.num_groups,
            # Each row may end one page and begin another; prefix-cache hits beyond that travel by themselves.
            num_changes=self.num_groups * (2 * num_rows + num_tokens // self.block_size),
            plan_len=self.backend.plan_len(num_tokens, num_rows),
        )

    def _fill_decode(self, view: dict[str, np.ndarray], rows: list[ScheduledSequence]) -> None:
        """The rows of one token, all at once: a step may have hundreds of them."""
        num_rows = len(rows)
        positions = np.array([item.start for item in rows], np.int32)
        view["positions"][:num_rows] = positions
        view["token_ids"][:num_rows] = [
            -(item.sequence.slot + 1) if item.sequence.is_last_token_on_device else item.sequence.token_ids[item.start]
            for item in rows
        ]
        for group in range(self.num_groups):
            pages = np.array([item.sequence.pages[group][item.start // self.block_size] for item in rows], np.int32)
            view["slots"][group, :num_rows] = pages * self.block_size + positions % self.block_size

    def _fill_chunk(self, view: dict[str, np.ndarray], item: ScheduledSequence, start: int) -> None:
        sequence, end = item.sequence, start + item.num_tokens
        view["token_ids"][start:end] = sequence.token_ids[item.start : item.start + item.num_tokens]
        positions = np.arange(item.start, item.start + item.num_tokens, dtype=np.int32)
        view["positions"][start:end] = positions
        first_page = item.start // self.block_size
        last_page = (item.start + item.num_tokens - 1) // self.block_size
        for group, pages in enumerate(sequence.pages):
            page_of_token = np.array(pages[first_page : last_page + 1], np.int32)[
                positions // self.block_size - first_page
            ]
            view["slots"][group, start:end] = page_of_token * self.block_size + positions % self.block_size

    def _fill_samples(self, rows: np.ndarray, samples: list[Sequence], tokens: list[int]) -> None:
        for sequence in samples:
            if not sequence.has_sample_row:
                sequence.has_sample_row = True
                self.sample_rows[sequence.slot] = _sample_row(sequence)
        num_samples = len(samples)
        slots = np.array([sequence.slot for sequence in samples], np.intp)
        rows[0, :num_samples] = tokens
        rows[1, :num_samples] = slots
        rows[2, :num_samples] = [sequence.num_output_tokens for sequence in samples]
        rows[NUM_STEP_FIELDS:, :num_samples] = self.sample_rows[slots].T

    def _changes(self, sequences: list[Sequence], room: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """Page-table entries that the device lacks: in batches of their own, and those that travel with the step.

        All travel with the step unless there are more than `room`, which only prefix-cache hits can bring about.
        """
        found: list[tuple[int, int, int, int]] = []
        for sequence in sequences:
            for group, pages in enumerate(sequence.pages):
                sent = sequence.pages_sent[group]
                found.extend((group, sequence.slot, index, pages[index]) for index in range(sent, len(pages)))
                sequence.pages_sent[group] = len(pages)
        changes = np.array(found, np.int32).reshape(-1, len(CHANGE_FIELDS)).T
        if len(found) <= room:
            return (), changes
        parts = [changes[:, start : start + self.num_changes] for start in range(0, len(found), self.num_changes)]
        return tuple(np.pad(part, ((0, 0), (0, self.num_changes - part.shape[1]))) for part in parts), changes[:, :0]


def _sample_row(sequence: Sequence) -> np.ndarray:
    """SAMPLE_FIELDS from `sample_index` on."""
    request, params = sequence.request, sequence.request.params
    words = np.array([request.seed & 0xFFFFFFFF, request.seed >> 32], np.uint32).view(np.int32)
    floats = np.array([params.temperature, params.top_p, params.min_p], np.float32).view(np.int32)
    # −1 and 0 both mean no limit; a limit beyond any vocabulary is none either.
    top_k = min(max(params.top_k, 0), np.iinfo(np.int32).max)
    return np.array([sequence.index, *words, top_k, *floats], np.int32)
