"""A step as it was built: what the device's side reads of it, and whose results it gives."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..kv_cache.page_store import PageMove
from ..request import Request, SampleSequence
from ..sampling.sampling_params import SampleMode
from .step_layout import StepLayout


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
    decode_lens: list[int] = field(default_factory=list)
    """Most tokens that each of these rows gets from this step; empty if each gets one."""
    num_scored: int = 0
    """Prompt tokens that are scored."""
    score_columns: tuple[np.ndarray, ...] = ()
    """SAMPLE_FIELDS of the rows that are scored, int32 [fields, S] each, as many rows as one sampler takes; only the
    last array is padded."""


@dataclass(frozen=True)
class StepRows:
    """Which sequences and requests the results of a step belong to."""

    samples: list[SampleSequence] = field(default_factory=list)
    """Sequences that get a token, in the order of the sampled rows."""
    scored: list[tuple[Request, range]] = field(default_factory=list)
    """Requests whose prompt tokens are scored, each with the positions whose next token is, in the order of the
    rows of scores."""


NO_ROWS = StepRows()
"""The rows of a step that only moves pages and changes page tables."""
