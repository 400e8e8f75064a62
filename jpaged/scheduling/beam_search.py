"""Beam search over the samples of one request: which beams go on with which tokens, and which have ended.

The rules are those of Hugging Face transformers: of all continuations of all beams the best (1 + number of EOS
tokens) × width are considered; those among the first `width` that end become hypotheses, and the best of the others go
on. Knows scores and tokens; neither pages nor arrays of a device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import TYPE_CHECKING

from ..request import SampleSequence
from ..sampling.sampling_params import BeamSearchParams

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A beam as its last token and the beam before it, which beams with a common start share."""

    score: float = 0.0
    """Sum of the natural-log probabilities of its tokens."""
    token_id: int | None = None
    before: Beam | None = None

    @property
    def last_token(self) -> int:
        """Return the token generated last; there must be one."""
        assert self.token_id is not None, "a beam that has generated nothing"
        return self.token_id

    @property
    def token_ids(self) -> list[int]:
        """Return all generated tokens, in order."""
        token_ids, beam = list[int](), self
        while beam.before is not None:
            token_ids.append(beam.last_token)
            beam = beam.before
        return token_ids[::-1]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A beam that has ended. `score` is its sum of log probabilities / its length ** length_penalty."""

    score: float
    beam: Beam
    is_stopped: bool
    """Whether an end-of-sequence token ended the beam; else it ended by its length."""


@dataclass(frozen=True, slots=True)
class BeamStep:
    """How all beams of a search go on with one more token."""

    choices: list[tuple[SampleSequence, Beam]]
    """For each beam that goes on, the sample that it continues and what it then is; empty at the end."""
    hypotheses: list[Hypothesis]
    """The best hypotheses so far, as in `BeamSearch`."""


@dataclass(eq=False, slots=True)
class BeamSearch:
    """The search of one request, whose live samples stand for its running beams."""

    params: BeamSearchParams
    end_ids: Collection[int]
    """Tokens that end a beam."""
    max_tokens: int
    """Tokens that a beam generates at most."""
    hypotheses: list[Hypothesis] = field(default_factory=list)
    """The best hypotheses so far, at most `beam_width`, the best first."""
    running: dict[SampleSequence, Beam] = field(default_factory=dict)
    """Live sample → the beam that it stands for; empty before the first token and at the end."""
    num_generated: int = 0
    """Tokens that each running beam has."""
    _rows: dict[SampleSequence, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """Live sample → its likeliest next tokens and their log probabilities, stored since the last choice."""

    @property
    def is_over(self) -> bool:
        """Return whether the search has ended: no beam goes on."""
        return self.num_generated > 0 and not self.running

    @property
    def num_top_tokens(self) -> int:
        """Return how many most likely next tokens of one beam a step needs."""
        return self.params.num_top_tokens(len(self.end_ids))

    def token_ids_of(self, sequence: SampleSequence) -> list[int]:
        """Return the tokens that the beam of a sample has generated; none before the first choice."""
        return self.running[sequence].token_ids if sequence in self.running else []

    def add_scores(self, sequence: SampleSequence, token_ids: np.ndarray, log_probs: np.ndarray) -> bool:
        """Store the likeliest next tokens of one beam, [k] each; return whether all live beams have theirs now."""
        self._rows[sequence] = token_ids, log_probs
        return len(self._rows) == len(sequence.request.live)

    def forget_rows(self) -> None:
        """Drop the noted scores: the samples lose their pages, and all scores are computed and noted once more."""
        self._rows.clear()

    def choose(self, live: Sequence[SampleSequence]) -> BeamStep:
        """Return how the beams of the live samples go on, without changing the search; `commit` stores the result.

        The scores of all live samples must be stored. Of all continuations of all beams by one token, those that end,
        by an end token or at `max_tokens`, become hypotheses if they are among the best `beam_width` ones. The best of
        the others are the choices, at most `beam_width`. There are no choices, and the search is over, if none could
        still become one of the best hypotheses.

        Example of width 2 with EOS as the only end token: if the best continuations are x, EOS, y and z, in this order,
        then the beam that EOS ends becomes a hypothesis, and x and y are the choices. In the order x, y, EOS, z it is
        below the first 2 and is dropped.
        """
        width, num_generated = self.params.beam_width, self.num_generated + 1
        # Before the first token all samples are the same empty beam, so one of them is enough.
        running = [(sample, self.running[sample]) for sample in live] if self.running else [(live[0], Beam())]
        continuations = [
            (parent, Beam(before.score + log_prob, token_id, before))
            for parent, before in running
            for token_id, log_prob in zip(*(column.tolist() for column in self._rows[parent]), strict=True)
        ]
        # Each beam has at most one continuation per end token. So of this many, at least `width` do not end. The factor
        # is at least 2, as in Hugging Face transformers.
        num_candidates = max(2, 1 + len(self.end_ids)) * width
        best = nlargest(num_candidates, continuations, key=lambda continuation: continuation[1].score)
        is_last = num_generated == self.max_tokens
        are_ends = [is_last or beam.last_token in self.end_ids for _, beam in best]  # One per beam in `best`.
        # A beam that ends below the best `width` continuations is dropped: it is no hypothesis.
        ended = [beam for (_, beam), is_end in zip(best[:width], are_ends, strict=False) if is_end]
        scored = [Hypothesis(self._score(beam, num_generated), beam, beam.last_token in self.end_ids) for beam in ended]
        hypotheses = nlargest(width, [*self.hypotheses, *scored], key=lambda hypothesis: hypothesis.score)
        choices = [choice for choice, is_end in zip(best, are_ends, strict=True) if not is_end][:width]
        if choices and not self._may_improve(choices[0][1], num_generated, hypotheses):
            choices = []
        return BeamStep(choices, hypotheses)

    def commit(self, step: BeamStep, successors: Sequence[SampleSequence]) -> None:
        """Make a step's outcome the state of the search; `successors` are the samples of its choices, in order."""
        self._rows.clear()
        self.num_generated += 1
        self.hypotheses = step.hypotheses
        self.running = {successor: beam for successor, (_, beam) in zip(successors, step.choices, strict=True)}

    def _score(self, beam: Beam, length: int) -> float:
        return beam.score / length**self.params.length_penalty

    def _may_improve(self, best: Beam, length: int, hypotheses: Sequence[Hypothesis]) -> bool:
        """Return whether the best running beam, of `length` tokens, may still become one of the best hypotheses.

        The rule is that of Hugging Face transformers. The beam's score at `length` is compared with the worst of the
        `beam_width` hypotheses: sum of log probabilities / length ** length_penalty. With fewer hypotheses the result
        is True. With `early_stopping=True`, or one beam, it is otherwise False. With "never" and a positive length
        penalty, the beam's score is taken at the largest length instead: the sum never grows, so this is the best score
        that it can reach.
        """
        if len(hypotheses) < self.params.beam_width:
            return True
        if self.params.early_stopping is True or self.params.beam_width == 1:
            return False  # A search with one beam is greedy: it ends with the first hypothesis.
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self.max_tokens
        return self._score(best, length) > hypotheses[-1].score
