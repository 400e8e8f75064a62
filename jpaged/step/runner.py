"""Runs steps on the device: owns the weights, the device state, the host pages and the executables.

Knows arrays and executables; no request beyond the number of its slot.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from .buckets import Buckets
from .compile_plan import CompilePlan
from .logit_rules import SlotRules
from .models.loading import Weights
from .page_store import MoveKind, PageMove
from .pallas_kernels.ragged_paged_attention import MAX_MOVES, NULL_PAGE, Page
from .programs import (
    ALLOCATE_KEY,
    COPY_KEY,
    SET_RULES_KEY,
    SWAP_IN_KEY,
    SWAP_OUT_KEY,
    TABLES_KEY,
    sample_key,
)
from .sampler import SampledRows
from .sampling_params import SampleMode
from .sharding import replicated
from .step import DeviceState
from .step_inputs import BuiltStep, StepInputs, StepLayout

MAX_STAGED = 4
"""Swap batches under way at once: they bound the device memory that pages take on their way."""


@dataclass(frozen=True)
class StepOutputs:
    """What a step leaves on the device for the host to read: an entry for each sampled row, in order, then padding.

    Its copy to the host begins as soon as the step is done, whoever reads it when.
    """

    sampled: SampledRows | None
    scored: tuple[SampledRows, ...] = ()
    """In as many pieces as it took: all but the last are full."""

    def __post_init__(self) -> None:
        for array in jax.tree.leaves((self.sampled, self.scored)):
            array.copy_to_host_async()

    def read(self) -> SampledRows | None:
        """Wait for the step; its rows as numpy, by row, or by step and row where several tokens were decoded.

        None if no row was sampled.
        """
        return None if self.sampled is None else jax.tree.map(np.asarray, self.sampled)

    def read_scores(self) -> SampledRows | None:
        """The same of the tokens of prompts that the step has scored. None if it has scored none."""
        if len(self.scored) < 2:
            return jax.tree.map(np.asarray, self.scored[0]) if self.scored else None
        return jax.tree.map(lambda *pieces: np.concatenate(pieces), *self.scored)


class Runner:
    """One model on one mesh, with one paged cache and the host pages that swapping fills."""

    def __init__(self, *, weights: Weights, plan: CompilePlan, buckets: Buckets, mesh: Mesh):
        self.weights = weights
        self._leaves = tuple(jax.tree.leaves(weights.state))
        self._leaves_of_logits = tuple(weights.split_logits()[0])
        self.state: DeviceState
        self.rules: SlotRules
        self.state, self.rules = plan.get(ALLOCATE_KEY)()
        self.plan = plan
        self.buckets = buckets
        self.num_copies = 0
        """Pages copied within the cache so far."""
        self.swap_out_bytes = 0
        self.swap_in_bytes = 0
        self._whole = replicated(mesh) if mesh.size > 1 else None
        self._on_device = tuple(array.sharding for array in self.state.cache.pages)
        self._on_host = tuple(sharding.with_memory_kind("pinned_host") for sharding in self._on_device)
        # Memory is pinned for a host page when it is first written. A page written again is a new array: whoever
        # still reads the old one keeps it, so transfers need no order but that of the data.
        self._host_pages: dict[int, Page] = {}
        self._staged: deque[Any] = deque()

    @property
    def swap_bytes(self) -> int:
        """Bytes moved to and from the host so far."""
        return self.swap_out_bytes + self.swap_in_bytes

    def dispatch(self, step: BuiltStep) -> StepOutputs:
        """Start a step: its page moves, in order, then its rows.

        Returns before the device is done, unless more than MAX_STAGED batches of pages would be under way.
        """
        self._move(step.moves)
        for changes in step.table_updates:
            tables = self.plan.get(TABLES_KEY)(self.state.page_tables, self._put(changes))
            self.state = replace(self.state, page_tables=tables)
        for slot, row in step.rules.items():
            self.rules = self.plan.get(SET_RULES_KEY)(self.rules, self._put(row), self._put(np.array(slot, np.int32)))
        if step.layout is None or step.inputs is None:
            return StepOutputs(None)
        if step.draws:
            run_decode = self.plan.get(("decode", step.layout.num_tokens))
            self.state, sampled = run_decode(self._leaves, self.state, StepInputs(self._put(step.inputs.packed)))
            return StepOutputs(sampled)
        columns = self._forward(step.layout, step.inputs)
        sampled = self._sample(columns, len(step.samples), step.mode) if step.samples else None
        return StepOutputs(sampled, tuple(self._score(step)))

    def measure_swap(self) -> float:
        """Bytes per second to the host and back, by one batch of null pages; waits for it. Not during a step."""
        nothing = [NULL_PAGE] * MAX_MOVES

        def round_trip() -> None:
            pages = jax.block_until_ready(self._swap_out(nothing))
            self._swap_in(pages, nothing)
            jax.block_until_ready(self.state.cache.pages)

        return 2 * MAX_MOVES * self.state.cache.layout.page_bytes / _shortest_s(round_trip)

    def measure_prefill(self, layout: StepLayout) -> float:
        """Seconds per token of a prefill that fills this bucket, in the null page; waits for it. Not during a step."""
        inputs, num_tokens = self._null_prefill(layout)
        return _shortest_s(lambda: jax.block_until_ready(self._forward(layout, inputs))) / num_tokens

    def reset(self) -> None:
        """A new device state and no host pages, as at start: a step that failed may have taken the old with it."""
        self._drop_state()
        self.state, self.rules = self.plan.get(ALLOCATE_KEY)()

    def close(self) -> None:
        """Give the memory back: pages, on the device and the host, and weights."""
        self.plan.close()
        self._drop_state()
        _delete(self.weights.state)

    def _forward(self, layout: StepLayout, inputs: StepInputs) -> jax.Array:
        run_forward = self.plan.get(("forward", layout.num_tokens))
        self.state, columns = run_forward(self._leaves, self.state, StepInputs(self._put(inputs.packed)))
        return columns

    def _score(self, step: BuiltStep) -> Iterator[SampledRows]:
        """The tokens of prompts that the step scores, as many at once as a sampler takes."""
        num_left = step.num_scored
        for columns in step.score_columns:
            num_rows = min(num_left, columns.shape[1])
            yield self._sample(self._put(columns), num_rows, SampleMode.EVERYTHING)
            num_left -= num_rows

    def _sample(self, columns: np.ndarray | jax.Array, num_rows: int, mode: SampleMode) -> SampledRows:
        run_sample = self.plan.get(sample_key(self.buckets, num_rows, mode))
        kept = self.state.last_tokens, self.rules if mode is SampleMode.EVERYTHING else None
        (last_tokens, rules), sampled = run_sample(self._leaves_of_logits, kept, self.state.hidden, columns)
        self.state = replace(self.state, last_tokens=last_tokens)
        self.rules = rules or self.rules
        return sampled

    def _move(self, moves: list[PageMove]) -> None:
        for kind, batch in _batches(moves):
            sources = [move.source for move in batch]
            destinations = [move.destination for move in batch]
            num_bytes = len(batch) * self.state.cache.layout.page_bytes
            match kind:
                case MoveKind.COPY:
                    lists = self._page_list(sources), self._page_list(destinations)
                    self._replace_pages(self.plan.get(COPY_KEY)(self.state.cache.pages, *lists))
                    self.num_copies += len(batch)
                case MoveKind.SWAP_OUT:
                    self._host_pages.update(zip(destinations, self._swap_out(sources), strict=True))
                    self.swap_out_bytes += num_bytes
                case MoveKind.SWAP_IN:
                    self._swap_in([self._host_pages[source] for source in sources], destinations)
                    self.swap_in_bytes += num_bytes

    def _swap_out(self, sources: list[int]) -> list[Page]:
        """Start copying device pages to the host; returns the host pages. Later steps run beside the transfer."""
        self._make_room()
        staged = self.plan.get(SWAP_OUT_KEY)(self.state.cache.pages, self._page_list(sources))
        pages = jax.device_put(list(staged[: len(sources)]), [self._on_host] * len(sources))
        self._staged.append(pages)
        return pages

    def _swap_in(self, pages: list[Page], destinations: list[int]) -> None:
        """Start copying host pages into the cache."""
        self._make_room()
        staged = jax.device_put(pages, [self._on_device] * len(pages))
        staged += staged[-1:] * (MAX_MOVES - len(staged))
        run = self.plan.get(SWAP_IN_KEY)
        pages_after, done = run(self.state.cache.pages, tuple(staged), self._page_list(destinations))
        self._replace_pages(pages_after)
        self._staged.append(done)

    def _make_room(self) -> None:
        if len(self._staged) == MAX_STAGED:
            jax.block_until_ready(self._staged.popleft())

    def _page_list(self, pages: list[int]) -> np.ndarray | jax.Array:
        return self._put(np.array(pages + [NULL_PAGE] * (MAX_MOVES - len(pages)), np.int32))

    def _put(self, array: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        """For all chips. One takes a host's array as it is, which nobody may write any more: a call transfers it sooner
        than device_put does."""
        return array if self._whole is None else jax.device_put(array, self._whole)

    def _replace_pages(self, pages: tuple[jax.Array, ...]) -> None:
        self.state = replace(self.state, cache=replace(self.state.cache, pages=pages))

    def _drop_state(self) -> None:
        """All but the weights."""
        self._staged.clear()
        self._host_pages.clear()
        _delete((self.state, self.rules))

    def _null_prefill(self, layout: StepLayout) -> tuple[StepInputs, int]:
        """A step of as long rows as page tables allow, all in state slot 0, whose pages are null pages."""
        page_size = self.state.cache.layout.page_size
        row_len = min(layout.num_tokens, self.state.page_tables.shape[-1] * page_size)
        num_rows = min(layout.num_tokens // row_len, layout.num_rows)
        num_tokens = num_rows * row_len
        num_decode_rows = num_rows if row_len == 1 else 0
        row_lens = np.full(num_rows, row_len, np.int32)
        packed = np.zeros(layout.size, np.int32)
        view = layout.view(packed)
        positions = view["positions"][:num_tokens]
        positions[:] = np.tile(np.arange(row_len, dtype=np.int32), num_rows)
        view["slots"][:, :num_tokens] = positions % page_size
        view["query_starts"][:] = np.minimum(np.arange(layout.num_rows + 1), num_rows) * row_len
        view["context_lens"][:num_rows] = row_lens
        view["counts"][:] = num_tokens, num_rows, num_decode_rows, 0, False
        self.state.cache.backend.plan(
            row_lens,
            row_lens,
            num_decode_rows,
            np.full((layout.num_groups, 1, self.state.page_tables.shape[-1]), NULL_PAGE, np.int32),
            np.zeros(num_rows, np.intp),
            page_size=page_size,
            num_tokens=layout.num_tokens,
            num_rows=layout.num_rows,
            out=view["plan"],
        )
        return StepInputs(packed), num_tokens


def _batches(moves: list[PageMove]) -> Iterator[tuple[MoveKind, list[PageMove]]]:
    """Consecutive moves of one kind, at most MAX_MOVES together, in order."""
    for kind, run in groupby(moves, key=lambda move: move.kind):
        moves_of_kind = list(run)
        for start in range(0, len(moves_of_kind), MAX_MOVES):
            yield kind, moves_of_kind[start : start + MAX_MOVES]


def _shortest_s(run: Callable[[], object]) -> float:
    """Seconds of the shortest of three runs: the first may also compile and pin memory."""
    times_s = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start)
    return min(times_s)


def _delete(arrays: Any) -> None:
    for leaf in jax.tree.leaves(arrays):
        if not leaf.is_deleted():
            leaf.delete()
