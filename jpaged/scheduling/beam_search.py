"""Beam search over the samples of one request: which of them go on with which tokens, and what has ended.

The rules are transformers': of all continuations of all beams the best (1 + number of EOS tokens) × width are looked
at; those among the first `width` that end are finished, and the best of the others go on. Knows scores and tokens;
neither pages nor arrays of a device.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any

from .request import Request, RequestState, Sequence
from .sampling_params import BeamSearchParams


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A beam by its last token and what came before. Beams share what they have in common."""

    score: float = 0.0
    """Sum of its tokens' logprobs."""
    token_id: int | None = None
    before: Beam | None = None

    @property
    def last_token(self) -> int:
        assert self.token_id is not None, "a beam that has generated nothing"
        return self.token_id

    @property
    def token_ids(self) -> list[int]:
        """What it has generated."""
        return list(self._backwards())[::-1]

    def _backwards(self) -> Iterator[int]:
        beam: Beam | None = self
        while beam is not None and beam.token_id is not None:
            yield beam.token_id
            beam = beam.before


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A beam that has ended. `score` is its sum of logprobs / its length ** length_penalty."""

    score: float
    beam: Beam
    is_stopped: bool
    """By an end-of-sequence token; else by its length."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What becomes of all beams with one more token."""

    choices: list[tuple[Sequence, Beam]]
    """Whom each beam that goes on continues, and what it then is; none at the end."""
    hypotheses: list[Hypothesis]


@dataclass(eq=False, slots=True)
class BeamSearch:
    """The search of one request, whose live samples are its running beams."""

    params: BeamSearchParams
    end_ids: Collection[int]
    """Tokens that end a beam."""
    max_tokens: int
    hypotheses: list[Hypothesis] = field(default_factory=list)
    """The best so far, at most `beam_width`, the best first."""
    running: dict[Sequence, Beam] = field(default_factory=dict)
    """What each live sample stands for; empty before the first token."""
    _rows: dict[Sequence, tuple[Any, Any]] = field(default_factory=dict)
    num_generated: int = 0

    @property
    def is_over(self) -> bool:
        return self.num_generated > 0 and not self.running

    @property
    def num_candidates(self) -> int:
        """Continuations that are looked at."""
        return self.params.num_candidates(len(self.end_ids))

    @property
    def num_of_beam(self) -> int:
        """Of them the most that one beam may have, of those that matter."""
        return self.params.num_of_beam(len(self.end_ids))

    def note(self, sequence: Sequence, token_ids: Any, logprobs: Any) -> bool:
        """Take in the likeliest next tokens of one beam, as numpy; whether those of all beams are there."""
        self._rows[sequence] = token_ids, logprobs
        return len(self._rows) == len(sequence.request.live)

    def forget_rows(self) -> None:
        """The beams lose what was computed of them: all will be computed, and noted, once more."""
        self._rows.clear()

    def choose(self, live: SequenceOf[Sequence]) -> Turn:
        """What becomes of the beams by what was noted of them. Changes nothing: a step may be broken off here."""
        width, num_generated = self.params.beam_width, self.num_generated + 1
        # Before the first token all samples are one and the same beam.
        running = [(one, self.running[one]) for one in live] if self.running else [(live[0], Beam())]
        continuations = [
            (parent, Beam(before.score + logprob, token_id, before))
            for parent, before in running
            for token_id, logprob in zip(*(column.tolist() for column in self._rows[parent]), strict=True)
        ]
        best = nlargest(self.num_candidates, continuations, key=lambda continuation: continuation[1].score)
        is_last = num_generated == self.max_tokens
        ends = [is_last or beam.last_token in self.end_ids for _, beam in best]
        ended = [beam for (_, beam), is_end in zip(best[:width], ends, strict=False) if is_end]
        scored = [Hypothesis(self._score(beam, num_generated), beam, beam.last_token in self.end_ids) for beam in ended]
        hypotheses = nlargest(width, [*self.hypotheses, *scored], key=lambda hypothesis: hypothesis.score)
        going_on = [one for one, is_end in zip(best, ends, strict=True) if not is_end][:width]
        if going_on and not self._may_improve(going_on[0][1], num_generated, hypotheses):
            going_on = []
        return Turn(going_on, hypotheses)

    def commit(self, turn: Turn, heirs: SequenceOf[Sequence]) -> None:
        """The beams have gone on so: these samples stand for the turn's choices, in their order."""
        self._rows.clear()
        self.num_generated += 1
        self.hypotheses = turn.hypotheses
        self.running = {heir: beam for heir, (_, beam) in zip(heirs, turn.choices, strict=True)}

    def restore(self, request: Request) -> None:
        """Give the request's samples the tokens of their beams, or their end: a step was broken off."""
        self._rows.clear()
        if self.is_over:
            for one in request.live:
                one.state = RequestState.FINISHED_STOPPED
            request.live.clear()
            return
        root = request.live[0]
        for one in request.live:
            tokens = self.running[one].token_ids if one in self.running else []
            one.token_ids = array("i", [*request.prompt_token_ids, *tokens])
            one.parent, one.fork_len = (None, 0) if one is root else (root, request.prompt_len)

    def _score(self, beam: Beam, length: int) -> float:
        return beam.score / length**self.params.length_penalty

    def _may_improve(self, best: Beam, length: int, hypotheses: SequenceOf[Hypothesis]) -> bool:
        """Whether a running beam, of which this is the best, may still come among the hypotheses."""
        if len(hypotheses) < self.params.beam_width:
            return True
        if self.params.early_stopping is True or self.params.beam_width == 1:
            return False  # One beam alone is greedy: it ends where it ends.
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self.max_tokens
        return self._score(best, length) > hypotheses[-1].score
