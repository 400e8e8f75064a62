"""Lists become arrays here and nowhere else: one step's work as ONE padded int32 buffer.

The buffer is cut into named sections at static offsets; floats travel as their bits. `StepLayout` describes
the cut for one token bucket, on the host (numpy views, written) and on the device (slices, read) alike.
Page tables live on the device: only their changes travel. A token id of −(s + 1) ≤ −2 stands for the last
token sampled in state slot s, which the host need not have seen.

What a row of a step needs is kept in numpy tables by state slot, so that hundreds of rows are packed by a few
array operations. Nothing here asks a sequence how long it is, or which pages it has.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .buckets import Buckets
from .pallas_kernels.ragged_paged_attention import Backend
from .rule_book import RuleBook
from .sampling_params import SCORED, UNSCORED, SampleMode, sample_mode

if TYPE_CHECKING:
    from .page_store import PageMove
    from .request import Request, Sequence
    from .schedule import Chunk, SchedulerOutput

STOP_FIELDS = ("stop_0", "stop_1", "stop_2", "stop_3")
"""Tokens that end a sequence, as many as fit, so that a step of several tokens need not go on for nobody."""
NO_TOKEN = -1
SAMPLE_FIELDS = (
    "token", "slot", "output_index", "ruled_slot", "forced_token", "sample_index", "seed_low", "seed_high", "top_k",
    "temperature", "top_p", "min_p", *STOP_FIELDS,
)  # fmt: skip
"""Columns of a sampled row. `token` is where in the step its hidden state is; `ruled_slot` its slot if its logits have
rules, else 0; `forced_token` 1 + the id of one that is not drawn but given, to be scored, or SCORED or UNSCORED;
temperature, top_p and min_p are float bits."""
TOKEN, OUTPUT_INDEX, FORCED_TOKEN = map(SAMPLE_FIELDS.index, ("token", "output_index", "forced_token"))
NUM_STEP_FIELDS = 3
"""The first of them differ in every step; the others belong to the sequence."""
CHANGE_FIELDS = ("group", "slot", "index", "page")
"""A page-table change: entry `index` of state slot `slot`'s table in `group` becomes `page`."""
COUNT_FIELDS = ("num_tokens", "num_rows", "num_decode_rows", "num_samples", "is_drawn")
"""`is_drawn`: a row is not greedy."""
MODES = tuple(SampleMode)
"""Each does what the ones before it do."""


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
            "row_steps": (self.num_rows,),
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
    """What the runner needs to know about a step on the host beside its packed inputs.

    `inputs` and `layout` are None for a step without rows, in which pages move and page tables change.
    """

    inputs: StepInputs | None
    layout: StepLayout | None
    table_updates: tuple[np.ndarray, ...]
    """Page-table changes that do not fit the step's buffer, [4, N] each; to be applied before it."""
    samples: list[Sequence]
    """Sequences whose next token the step yields, in the order of its outputs."""
    draws: list[int]
    """How many tokens each of `samples` gets at most, where rows decode several; empty: one each."""
    mode: SampleMode
    """The least that does what all of `samples` ask for."""
    moves: list[PageMove]
    """To be executed in this order, before everything else."""
    rules: dict[int, np.ndarray]
    """By slot, of sequences that have just taken it: `RuleBook.row`. To be set before anything is sampled."""
    scored: list[tuple[Request, range]]
    """Whose prompt's tokens are scored, behind which positions, in the order of the rows of scores."""
    score_columns: list[np.ndarray]
    """SAMPLE_FIELDS of those rows, [fields, S] each and all but the last full: as many as a sampler takes at once."""

    @property
    def num_scored(self) -> int:
        return sum(len(positions) for _, positions in self.scored)


@dataclass(frozen=True)
class _Rows:
    """The rows of a step as vectors, in the order in which they are packed."""

    slots: np.ndarray
    starts: np.ndarray
    """Position of each row's first token."""
    query_lens: np.ndarray
    places: np.ndarray
    """Row of each piece of the work: of the decodes, then of the chunks."""
    num_decode_rows: int
    """Rows with one token, whether or not the host knows it."""
    num_steps: np.ndarray | None = None
    """Tokens that each row decodes one after another; None: one each."""

    @cached_property
    def context_lens(self) -> np.ndarray:
        return self.starts + self.query_lens

    @property
    def final_lens(self) -> np.ndarray:
        """Context lengths when all tokens of the step are computed."""
        return self.context_lens if self.num_steps is None else self.context_lens + self.num_steps - 1

    @cached_property
    def query_ends(self) -> np.ndarray:
        return np.cumsum(self.query_lens)

    @cached_property
    def query_starts(self) -> np.ndarray:
        return self.query_ends - self.query_lens

    @property
    def num_tokens(self) -> int:
        return int(self.query_ends[-1])

    def one_token_on(self) -> _Rows:
        """The same rows in the step after this one, in which each decodes the next token."""
        return replace(self, starts=self.starts + 1)


class StepInputBuilder:
    """Builds step inputs for one engine: its buckets, its backend, its state slots.

    What steps say of a state slot is kept from step to step, so they must be built in the order in which the
    device runs them. Several may be in flight: each has a buffer of its own.
    """

    def __init__(
        self,
        *,
        buckets: Buckets,
        backend: Backend,
        block_size: int,
        num_groups: int,
        max_num_seqs: int,
        max_pages: int,
        rule_book: RuleBook,
        one_token_rows: bool = False,
    ):
        """`max_pages` is the width of a page table."""
        self.buckets = buckets
        self.backend = backend
        self.block_size = block_size
        self.num_groups = num_groups
        self.rule_book = rule_book
        self.one_token_rows = one_token_rows
        self.least_mode = MODES.index(buckets.modes[0])
        self.layouts = {size: self._layout(size) for size in buckets.num_tokens}
        self.num_changes = self.layouts[buckets.num_tokens[-1]].num_changes
        num_slots = max_num_seqs + 1
        self.max_pages = max_pages
        self.tables = np.zeros((num_groups, num_slots, max_pages), np.int32)
        """The device's page tables, as they are once every step built so far has run."""
        self.next_positions = np.zeros(num_slots, np.intp)
        """Where the token stands that a decode of the slot would compute."""
        # Written when a slot changes hands: its owner's prompt length, place in MODES and SAMPLE_FIELDS.
        self.prompt_lens = np.zeros(num_slots, np.intp)
        self.modes = np.zeros(num_slots, np.intp)
        self.sample_rows = np.zeros((len(SAMPLE_FIELDS) - NUM_STEP_FIELDS, num_slots), np.int32)
        self._last: tuple[BuiltStep, _Rows] | None = None
        """The last step and its rows, if each decoded one token and still has its slot."""

    def build(self, work: SchedulerOutput) -> BuiltStep:
        """Pack the step's work.

        With `one_token_rows` each token of a chunk is a row of its own, computed as if it were decoded: so its bits do
        not depend on how its prompt was cut.

        Rows with one token come first, longest context first, as backends want them: rows of like length can
        then be taken together. Samples keep the order of the work: decodes, then each chunk's samplers.
        """
        rules: dict[int, np.ndarray] = {}
        for sequence in work.placed:
            self._take_slot(sequence)
            if sequence.request.params.has_rules:
                rules[sequence.slot] = self._rules(sequence)
            self._last = None
        changes = self._change_tables(work.table_changes)
        if not work.decodes and not work.chunks:
            return BuiltStep(None, None, self._batches(changes), [], [], SampleMode.GREEDY, work.moves, rules, [], [])
        is_plain = not (work.chunks or work.decode_lens)
        if is_plain and self._last is not None and self._last[0].samples == work.decodes:
            step, rows = self._one_token_on(*self._last, changes, work.moves)
        else:
            step, rows = self._packed(work, changes, rules)
        self._last = (step, rows) if is_plain else None
        return step

    def _packed(
        self, work: SchedulerOutput, changes: np.ndarray, rules: dict[int, np.ndarray]
    ) -> tuple[BuiltStep, _Rows]:
        if self.one_token_rows:
            work = replace(work, chunks=[one for chunk in work.chunks for one in chunk.tokens()])
        rows = self._rows(work)
        layout = self.layouts[self.buckets.tokens_for(rows.num_tokens)]
        # A new one costs no more than to clean an old one, which the device might still be reading.
        packed = np.zeros(layout.size, np.int32)
        view = layout.view(packed)
        updates = self._fill_changes(view, changes, layout)
        self._fill_rows(view, rows)
        self._fill_plan(view, rows, layout)
        self._fill_places(view, rows)
        self._fill_token_ids(view["token_ids"], rows, work.chunks)
        samples, mode = self._fill_samples(view["samples"], rows, work)
        is_drawn = mode is not SampleMode.GREEDY
        view["counts"][:] = rows.num_tokens, len(rows.slots), rows.num_decode_rows, len(samples), is_drawn
        step = BuiltStep(
            StepInputs(packed),
            layout,
            updates,
            samples,
            work.decode_lens,
            mode,
            work.moves,
            rules,
            *self._scores(rows, work.chunks),
        )
        return step, rows

    def _one_token_on(
        self, last: BuiltStep, last_rows: _Rows, changes: np.ndarray, moves: list[PageMove]
    ) -> tuple[BuiltStep, _Rows]:
        """What `_packed` would give for a step in which the rows of the last one decode their next token.

        Most steps are such: all that differs is where the tokens stand, and the pages.
        """
        assert last.inputs is not None
        assert last.layout is not None
        rows, layout, packed = last_rows.one_token_on(), last.layout, np.array(last.inputs.packed)
        view, num_rows = layout.view(packed), len(rows.slots)
        view["changes"][:] = 0
        view["plan"][:] = 0
        updates = self._fill_changes(view, changes, layout)
        view["context_lens"][:num_rows] += 1
        self._fill_plan(view, rows, layout)
        self._fill_places(view, rows)
        view["samples"][OUTPUT_INDEX, :num_rows] += 1
        self.next_positions[rows.slots] = rows.context_lens
        return BuiltStep(StepInputs(packed), layout, updates, last.samples, [], last.mode, moves, {}, [], []), rows

    def _layout(self, num_tokens: int) -> StepLayout:
        num_rows = self.buckets.rows_for(num_tokens)
        return StepLayout(
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_samples=self.buckets.max_samples,
            num_groups=self.num_groups,
            # Each row may end one page and begin another. More come from prefix-cache hits, forks and swaps.
            num_changes=self.num_groups * (2 * num_rows + num_tokens // self.block_size),
            plan_len=self.backend.plan_len(num_tokens, num_rows),
        )

    def _take_slot(self, sequence: Sequence) -> None:
        slot, request = sequence.slot, sequence.request
        self.prompt_lens[slot] = request.prompt_len
        self.modes[slot] = MODES.index(sample_mode(request.params))
        self.sample_rows[:, slot] = _sample_row(sequence)

    def _rules(self, sequence: Sequence) -> np.ndarray:
        """Of a sequence that takes its slot: it has drawn no token there yet, and the host knows all that it has."""
        request, token_ids = sequence.request, sequence.token_ids
        assert sequence.num_tokens - len(token_ids) <= 1, "a slot is taken while tokens are in flight"
        return self.rule_book.row(
            request.params,
            prompt=request.prompt_token_ids,
            output=token_ids[request.prompt_len :],
            stop_ids=sequence.stop_ids,
            bad_words=request.bad_words,
        )

    def _change_tables(self, changes: SequenceOf[tuple[int, int, int, int]]) -> np.ndarray:
        """Enter the changes in the tables here; returns them as the device gets them, [4, N]."""
        columns = np.array(changes, np.int32).reshape(-1, len(CHANGE_FIELDS)).T
        group, slot, index, page = columns
        self.tables[group, slot, index] = page
        return columns

    def _batches(self, changes: np.ndarray) -> tuple[np.ndarray, ...]:
        """Changes that travel by themselves, padded to the one size that there is a program for."""
        parts = [changes[:, at : at + self.num_changes] for at in range(0, changes.shape[1], self.num_changes)]
        return tuple(np.pad(part, ((0, 0), (0, self.num_changes - part.shape[1]))) for part in parts)

    def _rows(self, work: SchedulerOutput) -> _Rows:
        """Order the rows. A chunk of one token is a decode whose token the host happens to know."""
        slots = np.array(
            [sequence.slot for sequence in work.decodes] + [chunk.sequence.slot for chunk in work.chunks], np.intp
        )
        query_lens = np.ones_like(slots)
        query_lens[len(work.decodes) :] = [chunk.num_tokens for chunk in work.chunks]
        starts = self.next_positions[slots]
        starts[len(work.decodes) :] = [chunk.start for chunk in work.chunks]
        order = np.lexsort((-starts, query_lens > 1))
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        num_decode_rows = int(np.count_nonzero(query_lens == 1))
        num_steps = np.array(work.decode_lens, np.intp)[order] if work.decode_lens else None
        return _Rows(slots[order], starts[order], query_lens[order], places, num_decode_rows, num_steps)

    def _fill_changes(
        self, view: dict[str, np.ndarray], changes: np.ndarray, layout: StepLayout
    ) -> tuple[np.ndarray, ...]:
        """Page-table changes go with the step; returns them in batches of their own where they are too many."""
        if changes.shape[1] > layout.num_changes:
            return self._batches(changes)
        view["changes"][:, : changes.shape[1]] = changes
        return ()

    def _fill_rows(self, view: dict[str, np.ndarray], rows: _Rows) -> None:
        num_rows = len(rows.slots)
        view["query_starts"][1 : num_rows + 1] = rows.query_ends
        view["query_starts"][num_rows + 1 :] = rows.num_tokens
        view["context_lens"][:num_rows] = rows.context_lens
        view["row_slots"][:num_rows] = rows.slots
        if rows.num_steps is not None:
            view["row_steps"][:num_rows] = rows.num_steps

    def _fill_plan(self, view: dict[str, np.ndarray], rows: _Rows, layout: StepLayout) -> None:
        """For the longest that contexts become, which holds for all shorter ones: true lengths are the device's."""
        self.backend.plan(
            rows.query_lens,
            rows.final_lens,
            rows.num_decode_rows,
            self.tables,
            rows.slots,
            page_size=self.block_size,
            num_tokens=layout.num_tokens,
            num_rows=layout.num_rows,
            out=view["plan"],
        )

    def _fill_places(self, view: dict[str, np.ndarray], rows: _Rows) -> None:
        """Where each token stands and is written."""
        num_tokens = rows.num_tokens
        slots, positions = rows.slots, rows.starts
        if num_tokens > len(slots):
            slots = np.repeat(slots, rows.query_lens)
            positions = np.arange(num_tokens) + np.repeat(positions - rows.query_starts, rows.query_lens)
        pages = self.tables[:, slots, positions // self.block_size]
        view["positions"][:num_tokens] = positions
        view["slots"][:, :num_tokens] = pages * self.block_size + positions % self.block_size

    def _fill_token_ids(self, token_ids: np.ndarray, rows: _Rows, chunks: list[Chunk]) -> None:
        """Which tokens they are, by id or by the slot that drew it."""
        token_ids[: rows.num_decode_rows] = -1 - rows.slots[: rows.num_decode_rows]
        places = rows.places[len(rows.places) - len(chunks) :]
        for chunk, at in zip(chunks, rows.query_starts[places].tolist(), strict=True):
            known = chunk.sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens]
            assert len(known) == chunk.num_tokens, "a chunk of tokens that the host does not know"
            token_ids[at : at + chunk.num_tokens] = known

    def _scores(self, rows: _Rows, chunks: list[Chunk]) -> tuple[list[tuple[Request, range]], list[np.ndarray]]:
        """Which tokens of prompts are scored, and the rows for it: each is given its token, in no slot, and has the
        hidden state before it."""
        scored: list[tuple[Request, range]] = []
        tokens: list[int] = []
        given: list[int] = []
        places = rows.places[len(rows.places) - len(chunks) :]
        for chunk, at in zip(chunks, rows.query_starts[places].tolist(), strict=True):
            if not (positions := chunk.scored):
                continue
            first = at + positions.start - chunk.start
            tokens.extend(range(first, first + len(positions)))
            given.extend(chunk.sequence.token_ids[positions.start + 1 : positions.stop + 1])
            scored.append((chunk.sequence.request, positions))
        pieces = []
        for start in range(0, len(tokens), size := self.buckets.max_samples):
            piece = np.zeros((len(SAMPLE_FIELDS), size), np.int32)
            for field, values in ((TOKEN, tokens), (FORCED_TOKEN, given)):
                here = values[start : start + size]
                piece[field, : len(here)] = here
            piece[FORCED_TOKEN, : len(here)] += 1
            pieces.append(piece)
        return scored, pieces

    def _fill_samples(
        self, columns: np.ndarray, rows: _Rows, work: SchedulerOutput
    ) -> tuple[list[Sequence], SampleMode]:
        """Who draws a token from which row. All of them decode from there in the next step."""
        num_decodes = len(work.decodes)
        samplers = [sampler for chunk in work.chunks for sampler in chunk.samplers]
        num_samples = num_decodes + len(samplers)
        row_of_sample = rows.places
        if work.chunks:
            num_samplers = np.ones_like(row_of_sample)
            num_samplers[num_decodes:] = [len(chunk.samplers) for chunk in work.chunks]
            row_of_sample = np.repeat(row_of_sample, num_samplers)
        slots = rows.slots[row_of_sample]
        slots[num_decodes:] = [sampler.slot for sampler in samplers]
        self.next_positions[rows.slots] = rows.final_lens
        self.next_positions[slots] = rows.final_lens[row_of_sample]
        columns[TOKEN, :num_samples] = rows.query_ends[row_of_sample] - 1
        columns[1, :num_samples] = slots
        columns[OUTPUT_INDEX, :num_samples] = rows.context_lens[row_of_sample] - self.prompt_lens[slots]
        columns[NUM_STEP_FIELDS:, :num_samples] = self.sample_rows.take(slots, axis=1)
        return [*work.decodes, *samplers], MODES[self.modes[slots].max(initial=self.least_mode)]


def _sample_row(sequence: Sequence) -> np.ndarray:
    """SAMPLE_FIELDS from `ruled_slot` on."""
    request, params = sequence.request, sequence.request.params
    # −1 and 0 both mean no limit; a limit beyond any vocabulary is none either.
    top_k = min(max(params.top_k, 0), np.iinfo(np.int32).max)
    seed_low, seed_high = request.seed & 0xFFFFFFFF, request.seed >> 32
    floats = params.temperature, params.top_p, params.min_p
    stops = sorted(sequence.stop_ids)[: len(STOP_FIELDS)]
    stops += [NO_TOKEN] * (len(STOP_FIELDS) - len(stops))
    ruled_slot = sequence.slot if params.has_rules else 0
    forced = UNSCORED if params.logprobs is None else SCORED
    packed = struct.pack("=iiiIIi3f4i", ruled_slot, forced, sequence.index, seed_low, seed_high, top_k, *floats, *stops)
    return np.frombuffer(packed, np.int32)
