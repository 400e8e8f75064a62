"""What an observer is told of each step: its size, its rows, where its time went, and what it had to give up.

Nothing is recorded while a core has no observer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..scheduling.scheduler_output import SchedulerOutput

if TYPE_CHECKING:
    from ..step.step_records import StepInputs


class Turn(NamedTuple):
    """The tokens that one step computes of one sequence."""

    request_id: str
    sample_index: int
    num_tokens: int
    """Length of the prompt's chunk, or the most tokens that the step decodes for the sequence."""


class PreemptedRequest(NamedTuple):
    """A request that lost its pages when the step was scheduled."""

    request_id: str
    mode: str
    """"recompute" or "swap"."""
    reason: str


@dataclass(slots=True)
class StepRecord:
    """One step. Times are seconds; those after its dispatch are 0 until it has retired."""

    number: int
    """Counts the core's steps from 1."""
    inputs: StepInputs
    turns: tuple[Turn, ...]
    """Those of sequences that decode come first, then chunks of prompts."""
    num_decodes: int
    """Turns of sequences that decode."""
    preempted: tuple[PreemptedRequest, ...]
    num_waiting: int
    """Requests that wait for their first step or to run again."""
    num_free_pages: int
    schedule_s: float
    build_s: float
    dispatch_s: float
    read_s: float = 0.0
    """From asking for its results to having them: mostly waiting for the device."""
    process_s: float = 0.0
    """Tokens given to their sequences, stop rules, text."""
    is_retired: bool = field(default=False)
    """Its results were processed; a step whose sequences all ended before it was read never is."""

    @property
    def num_padded_tokens(self) -> int:
        """Return the tokens that the step has room for: its bucket, times the tokens that it decodes at most."""
        layout = self.inputs.layout
        return 0 if layout is None else layout.num_tokens * max(self.inputs.decode_lens, default=1)

    @property
    def num_tokens(self) -> int:
        """Return the tokens that the step computes at most, without padding."""
        return sum(turn.num_tokens for turn in self.turns)


class StepObserver(Protocol):
    """Is told of every step of an `EngineCore` that has it as its `observer`."""

    def dispatched(self, record: StepRecord) -> None:
        """Note a step that was started."""

    def retired(self, record: StepRecord) -> None:
        """Note that the results of the step were processed; `record` is the one of `dispatched`, now complete."""


def turns_of(work: SchedulerOutput) -> tuple[Turn, ...]:
    """Return what a step computes of each sequence: one `Turn` per decode, then one per chunk of a prompt."""
    lens = work.decode_lens or [1] * len(work.decodes)  # Empty lens mean one token for each sequence.
    rows = [*zip(work.decodes, lens, strict=True), *((chunk.sequence, chunk.num_tokens) for chunk in work.chunks)]
    return tuple(Turn(sequence.request.request_id, sequence.index, count) for sequence, count in rows)


def preempted_of(work: SchedulerOutput) -> tuple[PreemptedRequest, ...]:
    """Return the requests that lost their pages when a step was scheduled, and why."""
    return tuple(PreemptedRequest(one.request.request_id, one.mode.value, one.reason) for one in work.preempted)
