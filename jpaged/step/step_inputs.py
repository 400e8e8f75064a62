"""Builds the input of each step: the scheduler's lists become one padded int32 buffer here, and nowhere else.

    SchedulerOutput ─▶ StepInputBuilder.build ─▶ StepInputs (numbers and numpy) ─▶ Runner.dispatch
                                               └▶ StepRows (sequences and requests), kept until the step retires

step_layout.py describes the buffer. Most of what a row needs is the same from step to step, so the builder keeps it in
numpy tables indexed by state slot, and packs hundreds of rows by a few array operations (15 µs; rebuilding everything
from the sequences took 623 µs at 256 rows). It keeps a copy of the device's page tables too: only changes travel.
Each step gets a new buffer, since two steps may be in flight, and a CPU device may read the host's array in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..kv_cache.page_store import PageMove
from ..pallas_kernels.ragged_paged_attention.interface import Backend, PlanRows
from ..request import SampleSequence
from ..sampling.logit_rules_spec import LogitRulesSpec
from ..sampling.sample_columns import SAMPLE_FIELDS, STEP_FIELDS, pack_columns
from ..sampling.sampling_params import MODES, sample_mode
from ..scheduling.buckets import Buckets
from ..scheduling.scheduler_output import Chunk, SchedulerOutput
from .program_choice import ProgramChoice
from .score_inputs import score_rows
from .step_layout import CHANGE_FIELDS, OUTPUT_INDEX, SLOT, TOKEN, StepLayout
from .step_records import NO_ROWS, StepInputs, StepRows
from .step_sizes import StepSizes


@dataclass(frozen=True)
class _RowVectors:
    """The rows of a step as vectors, in the order in which they are packed: rows with one token first."""

    seq_slots: np.ndarray
    """State slot of each row."""
    starts: np.ndarray
    """Position of each row's first token."""
    query_lens: np.ndarray
    """Tokens of each row in this step."""
    row_of_work: np.ndarray
    """Row of each decode and then of each chunk, in the scheduler's order."""
    num_decode_rows: int
    """Rows with one token, whether or not the host knows which token it is."""
    decode_lens: np.ndarray | None = None
    """Tokens that each row decodes one after another; None if each decodes one."""

    @cached_property
    def context_lens(self) -> np.ndarray:
        """Return the tokens [R] that each row's context has after its first token, or after all tokens of its chunk."""
        return self.starts + self.query_lens

    @property
    def final_lens(self) -> np.ndarray:
        """Return the context lengths [R] once every token of the step is computed."""
        return self.context_lens if self.decode_lens is None else self.context_lens + self.decode_lens - 1

    @cached_property
    def query_ends(self) -> np.ndarray:
        """Return where each row ends among the tokens of the step, [R]."""
        return np.cumsum(self.query_lens)

    @cached_property
    def query_starts(self) -> np.ndarray:
        """Return where each row begins among the tokens of the step, [R]."""
        return self.query_ends - self.query_lens

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the step, without padding."""
        return int(self.query_ends[-1])

    def chunk_starts(self, num_chunks: int) -> list[int]:
        """Return the index of each chunk's first token in the step; chunks are the last `num_chunks` of the work."""
        return self.query_starts[self.row_of_work[len(self.row_of_work) - num_chunks :]].tolist()


class _Packed(NamedTuple):
    """A step, and its rows before they were packed."""

    inputs: StepInputs
    step_rows: StepRows
    vectors: _RowVectors


_View = dict[str, np.ndarray]  # Name of a section (`StepLayout.sections`) → its part of a step's buffer.


class StepInputBuilder:
    """Builds the steps of one engine, in the order in which the device runs them.

    The order matters: page tables and positions are kept up to date as steps are built, before they have run.
    """

    def __init__(
        self,
        sizes: StepSizes,
        buckets: Buckets,
        backend: Backend,
        *,
        rules_spec: LogitRulesSpec,
        windows: tuple[int | None, ...] = (None,),
        max_logprobs: int = 0,
    ):
        """Take the limits of steps, their padded sizes (`buckets`), and the attention backend that plans each step.

        `windows` has the sliding window of each page-table group in tokens; None is full attention, and these groups
        come first. `rules_spec` packs the logit rules of sequences. `max_logprobs` is the engine's option.
        """
        self.num_table_groups, self.num_full_attention_groups = len(windows), windows.count(None)
        assert None not in windows[self.num_full_attention_groups :], "page-table groups of full attention come first"
        self.sizes, self.buckets = sizes, buckets
        self.choice = ProgramChoice(buckets)
        """Says which padded size a step gets; a server that compiles meanwhile replaces it."""
        self.backend, self.rules_spec, self.max_logprobs = backend, rules_spec, max_logprobs
        # Programs for rows of one token: decode programs of several tokens, and some buckets' forward programs.
        decodes = {*buckets.decode_sizes, *buckets.forward_decode_tokens}
        layout_keys = [(size, False) for size in buckets.forward_tokens] + [(size, True) for size in decodes]
        self.layouts = {key: self._layout(*key) for key in layout_keys}
        """(token bucket, whether every row of the step has one token) → layout of the step's buffer."""
        self.num_changes = max(layout.num_changes for layout in self.layouts.values())
        """Page-table changes in one batch of `StepInputs.table_updates`, padding included."""
        num_slots = sizes.max_num_seqs + 1
        self.tables = np.zeros((self.num_table_groups, num_slots, sizes.max_pages), np.int32)
        """The device's page tables as they are once every step built so far has run. Entries that a window has passed,
        and those behind a sequence's last page, are left from earlier."""
        self.next_positions = np.zeros(num_slots, np.intp)
        """Position of the token that a decode in each state slot computes next."""
        # For each slot, written when a sequence gets it: prompt length, index in MODES, grammar or not, SAMPLE_FIELDS.
        self.prompt_lens = np.zeros(num_slots, np.intp)
        self.modes = np.zeros(num_slots, np.intp)
        self.has_grammar = np.zeros(num_slots, bool)
        self.sample_rows = np.zeros((len(SAMPLE_FIELDS) - len(STEP_FIELDS), num_slots), np.int32)
        self._last_decode: _Packed | None = None
        """The previous step and its rows, if each row decoded one token and every sequence still has its slot."""

    def build(self, work: SchedulerOutput) -> tuple[StepInputs, StepRows]:
        """Pack the scheduler's work into one step; return its inputs, and the sequences that its results belong to.

        Rows with one token come first, longest context first, so that a backend can process rows of similar length
        together. Sampled rows keep the order of the work: decodes, then the samples drawn from each chunk. Work without
        decodes and chunks gives inputs without rows: only page moves, page-table changes and logit rules. A step whose
        decodes are those of the previous step is made from that step's buffer.
        """
        rules: dict[int, np.ndarray] = {}
        for sequence in work.new_in_slots:
            self._assign_slot(sequence)
            request = sequence.request
            if request.params.has_rules:
                rules[sequence.seq_slot] = self._rules_row(sequence)
            self._last_decode = None  # Its buffer has the slot's former values.
        changes = self._change_tables(work.table_changes)
        if not work.decodes and not work.chunks:
            return StepInputs(work.moves, _padded_batches(changes, self.num_changes), rules), NO_ROWS
        is_plain_decode = not (work.chunks or work.decode_lens)
        last = self._last_decode if is_plain_decode else None
        if last is not None and last.step_rows.samples == work.decodes and self._has_best_layout(last):
            packed = self._next_decode(last, changes, work.moves)
        else:
            packed = self._pack(work, changes, rules)
        self._last_decode = packed if is_plain_decode else None
        return packed.inputs, packed.step_rows

    def null_prefill(self, num_tokens: int) -> tuple[StepInputs, int]:
        """Return a prefill that fills this token bucket, for measuring, and its number of tokens without padding.

        Its rows are as long as page tables allow (bucket 4096, tables for 1000 tokens: 4 rows, 4000 tokens), or one
        token each if the bucket has no program for longer rows. All rows use state slot 0, whose page table holds null
        pages only: running the step changes no sequence's pages.
        """
        row_len = min(num_tokens, self.sizes.max_pages * self.sizes.block_size)
        if num_tokens not in self.buckets.forward_tokens:
            row_len = 1
        layout = self.layouts[num_tokens, row_len == 1 and self.buckets.has_decodes_apart(num_tokens)]
        num_rows = min(num_tokens // row_len, layout.num_rows)
        zeros = np.zeros(num_rows, np.intp)
        query_lens, num_decode_rows = np.full(num_rows, row_len), num_rows if row_len == 1 else 0
        rows = _RowVectors(zeros, zeros, query_lens, np.arange(num_rows), num_decode_rows)  # Slot 0, position 0 on.
        packed = np.zeros(layout.size, np.int32)
        view = layout.view(packed)
        self._fill_rows(view, rows, layout)
        view["counts"][:] = rows.num_tokens, num_rows, rows.num_decode_rows, 0
        return StepInputs([], (), {}, packed, layout), rows.num_tokens

    def _pack(self, work: SchedulerOutput, changes: np.ndarray, rules: dict[int, np.ndarray]) -> _Packed:
        """Return a step that has at least one row, packed into a new buffer.

        `changes`, int32 [4, N], are the page-table changes and `rules` the logit rules by state slot that the device
        applies before it computes the rows. If the changes do not fit the buffer, they become `table_updates`.
        """
        # Each token becomes a row of its own, so that rounding does not depend on how a prompt is cut into chunks.
        if self.sizes.is_deterministic:
            work = replace(work, chunks=[token for chunk in work.chunks for token in chunk.tokens()])
        rows = self._rows(work)
        layout = self.layouts[self._layout_key(rows)]
        packed = np.zeros(layout.size, np.int32)  # As fast as cleaning a used buffer would be.
        view = layout.view(packed)
        table_updates = self._fill_changes(view, changes, layout)
        self._fill_rows(view, rows, layout)
        self._fill_token_ids(view["token_ids"], rows, work.chunks)
        samples, slots = self._fill_samples(view["samples"], rows, work)
        # Each mode can do what the modes before it do, so the highest one serves all samples.
        mode, has_masks = MODES[self.modes[slots].max(initial=0)], bool(self.has_grammar[slots].any())
        # Tokens count as existing once they are scheduled, so the token of this step does. One that is given comes
        # after a chunk: the fork that draws it has computed the token before it.
        has_masks |= any(one.token_given_after(one.num_tokens - 1) is not None for one in samples[len(work.decodes) :])
        view["counts"][:] = rows.num_tokens, len(rows.seq_slots), rows.num_decode_rows, len(samples)
        chunks = zip(work.chunks, rows.chunk_starts(len(work.chunks)), strict=True)
        scored, scores = score_rows(chunks, self.choice, self.max_logprobs) if work.chunks else ([], ())
        inputs = StepInputs(
            moves=work.moves,
            table_updates=table_updates,
            rules=rules,
            packed=packed,
            layout=layout,
            num_samples=len(samples),
            mode=mode,
            has_masks=has_masks,
            decode_lens=work.decode_lens,
            scores=scores,
        )
        return _Packed(inputs, StepRows(samples, scored), rows)

    def _next_decode(self, previous: _Packed, changes: np.ndarray, moves: list[PageMove]) -> _Packed:
        """Return a step in which every row of the previous step decodes its next token: a changed copy of its buffer.

        Most steps are of this kind. Only positions, page-table changes (`changes`, int32 [4, N]), page moves and the
        backend's plan are new; token ids stay, as they name state slots. `_pack` would return the same, but slower.
        """
        last, vectors = previous.inputs, previous.vectors
        # The previous step had rows, so it has a buffer.
        assert last.packed is not None
        assert last.layout is not None
        rows, layout, packed = replace(vectors, starts=vectors.starts + 1), last.layout, last.packed.copy()
        view, num_rows = layout.view(packed), len(rows.seq_slots)
        view["changes"][:] = 0
        view["plan"][:] = 0
        table_updates = self._fill_changes(view, changes, layout)
        view["context_lens"][:num_rows] += 1
        self._fill_plan(view, rows, layout)
        self._fill_positions(view, rows)
        view["samples"][OUTPUT_INDEX, :num_rows] += 1
        self.next_positions[rows.seq_slots] = rows.context_lens
        inputs = replace(last, moves=moves, table_updates=table_updates, rules={}, packed=packed)
        return _Packed(inputs, previous.step_rows, rows)

    def _has_best_layout(self, step: _Packed) -> bool:
        """Return whether a step with the same rows would be packed in the same layout."""
        return step.inputs.layout is self.layouts[self._layout_key(step.vectors)]

    def _layout_key(self, rows: _RowVectors) -> tuple[int, bool]:
        """Return the key in `layouts` of a step with these rows."""
        if rows.decode_lens is not None:
            # A decode program of several tokens takes rows of one token only.
            return self.buckets.tokens_for(rows.num_tokens), True
        return self.choice.forward(rows.num_tokens, decodes_only=rows.num_tokens == rows.num_decode_rows)

    def _layout(self, num_tokens: int, decodes_only: bool) -> StepLayout:
        """Return the layout of the buffer of a token bucket; with `decodes_only` its steps have rows of one token."""
        num_rows = self.buckets.rows_for(num_tokens)
        return StepLayout(
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_samples=self.buckets.max_samples,
            num_table_groups=self.num_table_groups,
            # Each row may end one page and begin another. Cache hits, forks and swaps may cause more, sent apart.
            num_changes=self.num_table_groups * (2 * num_rows + num_tokens // self.sizes.block_size),
            plan_len=self.backend.plan_len(num_tokens, num_rows, decodes_only=decodes_only),
            decodes_only=decodes_only,
        )

    def _assign_slot(self, sequence: SampleSequence) -> None:
        """Store what stays the same while a sequence has its state slot: prompt length, sampling mode, columns."""
        slot, request = sequence.seq_slot, sequence.request
        self.prompt_lens[slot] = request.prompt_len
        self.modes[slot] = MODES.index(sample_mode(request.params))
        self.has_grammar[slot] = request.grammar is not None
        self.sample_rows[:, slot] = pack_columns(
            request.params,
            seq_slot=slot,
            sample_index=sequence.index,
            seed=request.seed,
            stop_ids=sequence.stop_ids,
        )

    def _rules_row(self, sequence: SampleSequence) -> np.ndarray:
        """Return the packed logit rules of a sequence that has just got its state slot, int32 [width].

        The host must know all tokens that earlier steps have drawn for the sequence, because its penalties count them.
        `num_tokens` also counts the token that this step draws, if it draws one.
        """
        request, token_ids = sequence.request, sequence.token_ids
        assert sequence.num_tokens - len(token_ids) <= 1, "a slot is assigned while tokens are in flight"
        return self.rules_spec.row(
            request.params,
            prompt=request.prompt_token_ids,
            output=token_ids[request.prompt_len :],
            stop_ids=sequence.stop_ids,
            bad_words=request.bad_words,
        )

    def _change_tables(self, changes: Sequence[tuple[int, int, int, int]]) -> np.ndarray:
        """Apply changes (CHANGE_FIELDS) to the host's copy of the page tables; return them as int32 [4, N]."""
        columns = np.array(changes, np.int32).reshape(-1, len(CHANGE_FIELDS)).T
        table_group, slot, table_index, page = columns
        self.tables[table_group, slot, table_index] = page
        return columns

    def _rows(self, work: SchedulerOutput) -> _RowVectors:
        """Order the step's rows: decodes and chunks of one token, then longer chunks, both by descending position.

        Rows of like context thus lie side by side: attention that computes rows together takes as long as the longest.
        With decodes at positions 3 and 9 and a chunk of 5 tokens, the decodes become rows 1 and 0 and the chunk row 2:
        `row_of_work` is [1, 0, 2]. Only a step without chunks has `decode_lens`, the tokens that each decode draws.
        """
        sequences = work.decodes + [chunk.sequence for chunk in work.chunks]
        slots = np.array([sequence.seq_slot for sequence in sequences], np.intp)
        query_lens = np.ones_like(slots)
        query_lens[len(work.decodes) :] = [chunk.num_tokens for chunk in work.chunks]
        starts = self.next_positions[slots]
        starts[len(work.decodes) :] = [chunk.start for chunk in work.chunks]
        # The last key of `lexsort` counts first.
        order = np.lexsort((-starts, query_lens > 1))
        row_of_work = np.empty_like(order)
        row_of_work[order] = np.arange(len(order))  # The inverse permutation of `order`.
        num_decode_rows = int(np.count_nonzero(query_lens == 1))
        decode_lens = np.array(work.decode_lens, np.intp)[order] if work.decode_lens else None
        return _RowVectors(slots[order], starts[order], query_lens[order], row_of_work, num_decode_rows, decode_lens)

    def _fill_changes(self, view: _View, changes: np.ndarray, layout: StepLayout) -> tuple[np.ndarray, ...]:
        """Write changes, int32 [4, N], into the buffer; if it lacks room, return all of them as batches instead."""
        if changes.shape[1] > layout.num_changes:
            return _padded_batches(changes, self.num_changes)
        view["changes"][:, : changes.shape[1]] = changes
        return ()

    def _fill_rows(self, view: _View, rows: _RowVectors, layout: StepLayout) -> None:
        """Write the rows' sections of the buffer, then plan and positions; the other sections are left as they are.

        Query starts after the last row are the number of tokens: padding rows hold no token. The first is 0 already.
        """
        num_rows = len(rows.seq_slots)
        view["query_starts"][1 : num_rows + 1] = rows.query_ends
        view["query_starts"][num_rows + 1 :] = rows.num_tokens
        view["context_lens"][:num_rows] = rows.context_lens
        view["seq_slots"][:num_rows] = rows.seq_slots
        if rows.decode_lens is not None:
            view["decode_lens"][:num_rows] = rows.decode_lens
        self._fill_plan(view, rows, layout)
        self._fill_positions(view, rows)

    def _fill_plan(self, view: _View, rows: _RowVectors, layout: StepLayout) -> None:
        """Have the attention backend write its plan for the step's rows into the section "plan", which must be zeroed.

        It plans for the context lengths at the end of the step. A plan holds for all shorter contexts too, because the
        device reads the true lengths: in a step of several decoded tokens, one plan serves all of them.
        """
        plan_rows = PlanRows(
            query_lens=rows.query_lens,
            context_lens=rows.final_lens,
            num_decode_rows=rows.num_decode_rows,
            page_tables=self.tables[: self.num_full_attention_groups],
            table_rows=rows.seq_slots,
            page_size=self.sizes.block_size,
            padded_tokens=layout.num_tokens,
            padded_rows=layout.num_rows,
            decodes_only=layout.decodes_only,
        )
        self.backend.plan(plan_rows, view["plan"])

    def _fill_positions(self, view: _View, rows: _RowVectors) -> None:
        """Write each token's position in its sequence, and the KV slot of its key and value in each page-table group.

        A KV slot is page × block_size + offset: with 16 slots a page, position 35 of a row whose page table begins with
        the pages 4, 9 and 7 has slot 7 × 16 + 3.
        """
        num_tokens, block_size = rows.num_tokens, self.sizes.block_size
        slots, positions = rows.seq_slots, rows.starts  # These are by row; with one token a row, also by token.
        if num_tokens > len(slots):
            slots = np.repeat(slots, rows.query_lens)
            positions = np.arange(num_tokens) + np.repeat(positions - rows.query_starts, rows.query_lens)
        pages = self.tables[:, slots, positions // block_size]
        view["positions"][:num_tokens] = positions
        view["slot_mapping"][:, :num_tokens] = pages * block_size + positions % block_size

    def _fill_token_ids(self, token_ids: np.ndarray, rows: _RowVectors, chunks: list[Chunk]) -> None:
        """Write the id of each chunk's token, and −1 − s for the token of a decode, which is in state slot s.

        A chunk of one token is one of the decode rows, so it first gets −1 − s too, and then its id instead.
        """
        token_ids[: rows.num_decode_rows] = -1 - rows.seq_slots[: rows.num_decode_rows]
        for chunk, offset in zip(chunks, rows.chunk_starts(len(chunks)), strict=True):
            chunk_ids = chunk.sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens]
            assert len(chunk_ids) == chunk.num_tokens, "a chunk of tokens that the host does not know"
            token_ids[offset : offset + chunk.num_tokens] = chunk_ids

    def _fill_samples(
        self, columns: np.ndarray, rows: _RowVectors, work: SchedulerOutput
    ) -> tuple[list[SampleSequence], np.ndarray]:
        """Write the SAMPLE_FIELDS of all samples into `columns` [fields, samples]; return their sequences and slots.

        Samples are in the order of the work: each decode, then the samples drawn from each chunk, none, one or several.
        With one decode in row 0, a chunk in row 2 with no samples and a chunk in row 1 with three, `row_of_sample` is
        [0, 1, 1, 1]. The field TOKEN is the index in the step of the token whose hidden state is sampled from. If a
        step decodes several tokens of each row, OUTPUT_INDEX is that of the first token drawn, and so is computed from
        `context_lens`; `next_positions` are those after the whole step (`final_lens`).
        """
        num_decodes = len(work.decodes)
        samples = [*work.decodes, *(sample for chunk in work.chunks for sample in chunk.samples)]
        num_samples, row_of_sample = len(samples), rows.row_of_work
        if work.chunks:
            samples_per_row = np.ones_like(row_of_sample)
            samples_per_row[num_decodes:] = [len(chunk.samples) for chunk in work.chunks]
            row_of_sample = np.repeat(row_of_sample, samples_per_row)
        slots = rows.seq_slots[row_of_sample]
        slots[num_decodes:] = [sample.seq_slot for sample in samples[num_decodes:]]
        # A chunk may have no sample, and a sample of the same prompt has another slot than its row: both are written.
        self.next_positions[rows.seq_slots] = rows.final_lens
        self.next_positions[slots] = rows.final_lens[row_of_sample]
        columns[TOKEN, :num_samples] = rows.query_ends[row_of_sample] - 1
        columns[SLOT, :num_samples] = slots
        columns[OUTPUT_INDEX, :num_samples] = rows.context_lens[row_of_sample] - self.prompt_lens[slots]
        # SAMPLE_FIELDS begin with STEP_FIELDS, the three above; the others were packed when the sequence got its slot.
        columns[len(STEP_FIELDS) :, :num_samples] = self.sample_rows.take(slots, axis=1)
        return samples, slots


def _padded_batches(columns: np.ndarray, batch_size: int) -> tuple[np.ndarray, ...]:
    """Cut `columns` [fields, N] into arrays [fields, batch_size], the last one padded with zeros; none if N is 0."""
    batches = [columns[:, start : start + batch_size] for start in range(0, columns.shape[1], batch_size)]
    return tuple(np.pad(batch, ((0, 0), (0, batch_size - batch.shape[1]))) for batch in batches)
