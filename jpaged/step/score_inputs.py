"""Which tokens of a step are given and scored, and the rows that the device reads for them.

Knows sequences, chunks and columns; not where a step's tokens lie, which its caller tells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from ..request import Request, SampleSequence
from ..sampling.sample_columns import SCORE_FIELDS
from ..sampling.sampling_params import ScoreKind
from ..scheduling.scheduler_output import Chunk
from .program_choice import ProgramChoice
from .step_records import ScoreBatch, ScoredPositions


class _Piece(NamedTuple):
    """Positions of one chunk whose rows stand in one batch."""

    sequence: SampleSequence
    positions: range
    first_token: int
    """Index in the step of the token at the first position."""


def score_rows(
    chunks: Iterable[tuple[Chunk, int]], choice: ProgramChoice, max_logprobs: int
) -> tuple[list[ScoredPositions], tuple[ScoreBatch, ...]]:
    """Return the rows that score given tokens, in batches of one kind each, and the positions that each batch scores.

    `chunks` are those of a step, each with the index in the step of its first token. The hidden state at a position
    scores the sequence's next token. `choice` says how far a batch is padded. `max_logprobs` is the engine's limit.

    Example: of a chunk of the positions 4 to 6, the first at token 10 of the step, `scored` is 5 to 6: the rows read
    the step's tokens 11 and 12, and score the sequence's tokens 6 and 7.
    """
    by_kind: dict[ScoreKind, list[_Piece]] = defaultdict(list)
    for chunk, first_token in chunks:
        if positions := chunk.scored:
            piece = _Piece(chunk.sequence, positions, first_token + positions.start - chunk.start)
            by_kind[score_kind(chunk.sequence.request).padded(max_logprobs)].append(piece)
    scored: list[ScoredPositions] = []
    batches: list[ScoreBatch] = []
    for kind, pieces in by_kind.items():
        for batch in _cut(pieces, choice.buckets.max_samples):
            num_rows = sum(len(piece.positions) for piece in batch)
            padding = choice.score_rows(num_rows, kind) - num_rows
            columns = np.pad(np.concatenate([_columns(piece) for piece in batch], axis=1), ((0, 0), (0, padding)))
            asked = None
            if kind.num_asked:
                asked = np.pad(
                    np.concatenate([_asked(piece, kind.num_asked) for piece in batch]), ((0, padding), (0, 0))
                )
            scored.append([(piece.sequence, piece.positions) for piece in batch])
            batches.append(ScoreBatch(kind, columns, asked, num_rows))
    return scored, tuple(batches)


def _cut(pieces: Iterable[_Piece], max_rows: int) -> Iterator[list[_Piece]]:
    """Yield the pieces in lists of at most `max_rows` positions; one that does not fit is cut in two or more."""
    batch: list[_Piece] = []
    room = max_rows
    for sequence, positions, first_token in pieces:
        start = 0
        while start < len(positions):
            part = positions[start : start + room]
            batch.append(_Piece(sequence, part, first_token + start))
            start, room = start + len(part), room - len(part)
            if not room:
                yield batch
                batch, room = [], max_rows
    if batch:
        yield batch


def score_kind(request: Request) -> ScoreKind:
    """Return what is computed for the tokens of a request that are scored and not drawn."""
    return ScoreKind(request.params.prompt_logprobs or 0) if request.scoring is None else request.scoring.kind


def _columns(piece: _Piece) -> np.ndarray:
    """Return the SCORE_FIELDS of the rows of one piece, int32 [fields, R]."""
    sequence, positions, first_token = piece
    num_rows, scoring = len(positions), sequence.request.scoring
    targets = np.array(sequence.token_ids[positions.start + 1 : positions.stop + 1], np.int32)
    if scoring is not None and len(targets) < num_rows:
        # The last token is no part of the sequence: nothing reads its keys and values.
        last = np.frombuffer(scoring.continuations[sequence.index], np.int32)[-1:]
        targets = np.concatenate([targets, last])
    columns = {
        "token": np.arange(first_token, first_token + num_rows, dtype=np.int32),
        "target": targets,
        "temperature": np.full(num_rows, _temperature_of(sequence), np.float32).view(np.int32),
    }
    return np.stack([columns[name] for name in SCORE_FIELDS])


def _temperature_of(sequence: SampleSequence) -> float:
    """Return the temperature at which tokens of a sequence are scored; 0 stands for the model's own logits."""
    request = sequence.request
    if request.scoring is not None:
        return request.scoring.temperatures[sequence.index]
    return request.params.temperature if request.tempers_scores else 0.0


def _asked(piece: _Piece, num_padded: int) -> np.ndarray:
    """Return the other tokens to score at each position of a piece, int32 [R, num_padded]."""
    sequence, positions, _ = piece
    scoring = sequence.request.scoring
    assert scoring is not None
    asked = np.frombuffer(scoring.asked[sequence.index], np.int32).reshape(-1, scoring.kind.num_asked)
    first = positions.start + 1 - sequence.request.prompt_len
    rows = asked[first : first + len(positions)]
    return np.pad(rows, ((0, 0), (0, num_padded - rows.shape[1])))
