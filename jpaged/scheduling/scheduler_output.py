"""The nouns between the scheduler and its neighbours: the work of one step, and what a gate must answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ..kv_cache.page_store import PageMove
from ..request import Request, SampleSequence
from .preemption import Preemption


@dataclass(frozen=True, slots=True)
class Chunk:
    """`num_tokens` consecutive tokens of a sequence, all known to the host, the first at position `start`."""

    sequence: SampleSequence
    start: int
    num_tokens: int
    samples: tuple[SampleSequence, ...]
    """The sequences that draw their next token from the chunk's last position: none if the sequence has more tokens,
    mostly the sequence itself, and those samples of the same prompt that share all of its tokens."""

    @property
    def scored(self) -> range:
        """Return the positions of the chunk whose logits score a token that is given: the token at the next position.

        Empty unless the request wants the logprobs of its prompt, or draws no token but scores those it has. Positions
        that are scored already are left out, and so is a prompt's last position, after which no prompt token comes.
        Example: a chunk of 4 tokens from position 8 of a prompt of 12 tokens has the range 8 to 10, which scores the
        tokens 9 to 11.
        """
        span = unscored(self.sequence)
        return range(max(self.start, span.start), min(self.start + self.num_tokens, span.stop))

    def tokens(self) -> Iterator[Chunk]:
        """Yield the same work in chunks of one token."""
        last = self.start + self.num_tokens - 1
        for position in range(self.start, last + 1):
            yield Chunk(self.sequence, position, 1, self.samples if position == last else ())


def unscored(sequence: SampleSequence) -> range:
    """Return the positions whose logits have still to score the token at the next one, empty if there is none.

    The last token of a sample that is scored has no position of its own among the known ones: the logits of the last
    known token score it.
    """
    request = sequence.request
    if request.scoring is not None:
        return range(sequence.num_scored, sequence.num_tokens)
    return range(request.num_scored, request.prompt_len - 1) if request.needs_prompt_scores else range(0)


def scored_end(sequence: SampleSequence, start: int, num_scored: int) -> int:
    """Return the largest end of a chunk that starts at `start`, if the step may score `num_scored` more tokens.

    An end is the position after the chunk's last token. It is the number of known tokens if nothing has to be scored,
    or if all that has to be scored fits into the step. Otherwise the chunk ends `num_scored` positions after the first
    position without a score. Example: a prompt of 100 tokens without scores, `start` 0 and `num_scored` 64 give 64;
    with `num_scored` 99 the result is 100, since the last position of a prompt scores none of its tokens.
    """
    span = unscored(sequence)
    end = max(start, span.start) + num_scored
    return sequence.num_tokens if not span or end >= span.stop else end


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The work of one step."""

    step: int
    """The step's number, counted from 1."""
    decodes: list[SampleSequence] = field(default_factory=list)
    """Sequences that compute the last token drawn in their state slot."""
    chunks: list[Chunk] = field(default_factory=list)
    new_in_slots: list[SampleSequence] = field(default_factory=list)
    """Sequences that got their state slot since the last step; the slot's sampling state is another sequence's."""
    table_changes: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(group, slot, entry, page) for each entry of the page tables that changes."""
    moves: list[PageMove] = field(default_factory=list)
    """Page copies, to be made in this order before the step writes anything."""
    preempted: list[Preemption] = field(default_factory=list)
    ignored: list[Request] = field(default_factory=list)
    """Requests that ended because the pool has become too small for them."""
    decode_lens: list[int] = field(default_factory=list)
    """How many tokens each of `decodes` may compute one after another on the device; empty: one each."""

    @property
    def is_empty(self) -> bool:
        """Return whether the device has nothing to compute, to copy or to note."""
        return not (self.decodes or self.chunks or self.moves or self.new_in_slots or self.table_changes)

    @property
    def num_tokens(self) -> int:
        """Return the most tokens that the step computes."""
        num_decoded = sum(self.decode_lens) if self.decode_lens else len(self.decodes)
        return num_decoded + sum(chunk.num_tokens for chunk in self.chunks)


class AdmissionGate(Protocol):
    """A further condition for requests to run, such as a free slot for their adapter.

    Any number of later requests may pass one that the gate refuses, since they may not need what it lacks. The gate
    is asked in the order of the queue, so to admit a request at last, it can refuse later ones that would stand in its
    way. `enter` and `leave` come in pairs.
    """

    @property
    def version(self) -> int:
        """Return a number that rises each time that the gate may admit a request which it has refused."""

    def fault_of(self, request: Request) -> str | None:
        """Return why the gate would refuse this request for ever, for its caller; None if it may admit it."""

    def admits(self, request: Request) -> bool:
        """Return whether this request may run now, as far as the gate knows."""

    def enter(self, request: Request) -> None:
        """Note that this request runs now."""

    def leave(self, request: Request) -> None:
        """Note that this request runs no more."""
