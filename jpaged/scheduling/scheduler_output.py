"""What the scheduler says of a step, and what it asks of a gate. Only nouns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from .page_store import PageMove
from .preemption import Preemption
from .request import Request, Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """`num_tokens` tokens of a sequence, known to the host, from position `start` on."""

    sequence: Sequence
    start: int
    num_tokens: int
    samplers: tuple[Sequence, ...]
    """Who draws its next token from the chunk's last position: nobody if the sequence knows more tokens, mostly
    the sequence itself, and those samples of the same prompt that share all of its tokens."""

    @property
    def scored(self) -> range:
        """Positions of the chunk whose next token is one of the prompt, with a logprob that is wanted and not there."""
        request = self.sequence.request
        if not request.needs_prompt_scores:
            return range(0)
        return range(max(self.start, request.num_scored), min(self.start + self.num_tokens, request.prompt_len - 1))

    def tokens(self) -> Iterator[Chunk]:
        """The same work in chunks of one token."""
        last = self.start + self.num_tokens - 1
        for position in range(self.start, last + 1):
            yield Chunk(self.sequence, position, 1, self.samplers if position == last else ())


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The work of one step."""

    step: int
    """Counts from 1."""
    decodes: list[Sequence] = field(default_factory=list)
    """Each computes the last token drawn in its slot."""
    chunks: list[Chunk] = field(default_factory=list)
    placed: list[Sequence] = field(default_factory=list)
    """Sequences that got their state slot since the last step."""
    table_changes: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(group, slot, entry, page), one for each entry of the page tables that changes."""
    moves: list[PageMove] = field(default_factory=list)
    """To be done in this order before anything of the step is written."""
    preempted: list[Preemption] = field(default_factory=list)
    ignored: list[Request] = field(default_factory=list)
    """Requests that ended since they can never fit any more."""
    decode_lens: list[int] = field(default_factory=list)
    """How many tokens each of `decodes` may compute one after another on the device; empty: one each."""

    @property
    def is_empty(self) -> bool:
        """There is nothing that the device has to do or to know."""
        return not (self.decodes or self.chunks or self.moves or self.placed or self.table_changes)

    @property
    def num_tokens(self) -> int:
        num_decoded = sum(self.decode_lens) if self.decode_lens else len(self.decodes)
        return num_decoded + sum(chunk.num_tokens for chunk in self.chunks)


class AdmissionGate(Protocol):
    """What else may keep a request waiting, such as slots for adapters. `enter` and `leave` come in pairs.

    Whom it refuses any number of later ones may pass, since those may need nothing of it. It is asked in the order
    of the queue: a gate that must let somebody in at last refuses those behind that would stand in the way.
    """

    def admits(self, request: Request) -> bool: ...

    def enter(self, request: Request) -> None: ...

    def leave(self, request: Request) -> None: ...
