"""A step as it was built: what the device's side reads of it, and whose results it gives."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..kv_cache.page_store import PageMove
from ..request import SampleSequence
from ..sampling.sampling_params import SampleMode, ScoreKind
from .step_layout import StepLayout

ScoredPositions = list[tuple[SampleSequence, range]]
"""Sequences whose tokens are scored, each with the positions whose logits score the next token."""


@dataclass(frozen=True)
class ScoreBatch:
    """Rows whose tokens are given and scored, as many as one program takes, all of one kind."""

    kind: ScoreKind
    """The kind of the program."""
    columns: np.ndarray
    """SCORE_FIELDS of the rows, int32 [fields, R]; padded by zeros."""
    asked: np.ndarray | None
    """Other tokens to score in each row, int32 [R, S], padded by zeros; None if the kind has none."""
    num_rows: int
    """Rows that are no padding."""


@dataclass(frozen=True)
class StepInputs:
    """All that a runner reads of a step, in numbers and numpy arrays: page moves, then page-table changes, then rows.

    `packed` and `layout` are None for a step without rows, which only moves pages and changes page tables.
    """

    moves: list[PageMove]
    """Page moves, executed in this order before everything else."""
    table_updates: tuple[np.ndarray, ...]
    """Page-table changes that do not fit the step's buffer, int32 [4, N] each; applied before the buffer's own."""
    rules: dict[int, np.ndarray]
    """State slot → `LogitRulesSpec.row` of a sequence that has just got the slot; set before anything is sampled."""
    packed: np.ndarray | None = None
    """The packed buffer, int32 [layout.size]."""
    layout: StepLayout | None = None
    num_samples: int = 0
    """Rows that get a token."""
    mode: SampleMode = SampleMode.GREEDY
    """Cheapest sampling mode that serves all of them."""
    has_masks: bool = False
    """Whether some of the samples may draw only certain tokens, which the host knows later: `Runner.sample` then draws
    the tokens of the step, and not `Runner.dispatch`."""
    decode_lens: list[int] = field(default_factory=list)
    """Most tokens that each of these rows gets from this step; empty if each gets one."""
    scores: tuple[ScoreBatch, ...] = ()
    """The rows whose tokens are given, and scored."""


@dataclass(frozen=True)
class StepRows:
    """Which sequences and requests the results of a step belong to."""

    samples: list[SampleSequence] = field(default_factory=list)
    """Sequences that get a token, in the order of the sampled rows."""
    scored: list[ScoredPositions] = field(default_factory=list)
    """What each of `StepInputs.scores` scores, in the order of its rows."""


NO_ROWS = StepRows()
"""The rows of a step that only moves pages and changes page tables."""
