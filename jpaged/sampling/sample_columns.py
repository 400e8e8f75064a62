"""The columns of a sampled row: the int32 values that the host packs for each row and the step reads.

Floats travel as their bits, seeds as two halves. Parameters get their columns from the table of sampling parameters;
`SamplingRows` in `sampler.py` is the device's half. Imports no JAX.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntFlag

import numpy as np

from .parameter import Column
from .sampling_params import SamplingParams, parameters_in

STEP_FIELDS = ("token", "slot", "output_index")
"""Columns that differ in every step: the token of the step whose hidden state is sampled from, the state slot of the
sequence, and how many tokens the sequence has drawn. All others are fixed while the sequence holds its slot."""
INT_PARAMETERS = parameters_in(Column.INT32)
FLOAT_PARAMETERS = parameters_in(Column.FLOAT32)
STOP_FIELDS = ("stop_0", "stop_1", "stop_2", "stop_3")
"""Tokens that end the sequence, as many as fit: a dispatch of several tokens stops a row that draws one of them."""
NO_TOKEN = -1
ALL_ALLOWED = -1
"""A word of a mask whose 32 tokens are all allowed."""
SAMPLE_FIELDS = (
    *STEP_FIELDS, "ruled_slot", "score", "sample_index", "seed_low", "seed_high", *INT_PARAMETERS,
    *FLOAT_PARAMETERS, *STOP_FIELDS,
)  # fmt: skip
"""Names of all columns. `ruled_slot` is the state slot if the request has rules, else 0; `score` is a `Score`."""
SCORE_FIELDS = ("token", "target", "temperature")
"""Columns of a row that scores a given token: the token of the step whose hidden state scores it, its id, and the bits
of the temperature, or 0 for the model's own logits."""
MAX_INT32 = (1 << 31) - 1
_PACKED = struct.Struct(f"=iiiII{len(INT_PARAMETERS)}i{len(FLOAT_PARAMETERS)}f{len(STOP_FIELDS)}i")


class Score(IntFlag):
    """What a row's token gets beside its id, a bit each; padding, all zeros, gets nothing."""

    OWN = 1
    """Its own logprob and rank."""
    TOPS = 2
    """The ids and logprobs of the most likely tokens."""
    MASS = 4
    """The probability that truncation has left."""


def pack_columns(
    params: SamplingParams,
    *,
    seq_slot: int,
    sample_index: int,
    seed: int,
    stop_ids: Iterable[int],
) -> np.ndarray:
    """Return the SAMPLE_FIELDS after STEP_FIELDS of one sequence, int32: those fixed while it has its state slot.

    `sample_index` is the sequence's index in its request. `seed` has 64 bits and travels as two columns, the low half
    first. Of `stop_ids`, the token ids that end the sequence, the lowest four are packed, and NO_TOKEN where there are
    fewer. A program that decodes several tokens stops at these; the host checks all of them when it reads a token.
    `ruled_slot` is the state slot if the request has logit rules, else 0, the slot whose rules change nothing.
    """
    stops = sorted(stop_ids)[: len(STOP_FIELDS)]
    packed = _PACKED.pack(
        seq_slot if params.has_rules else 0,
        score_of(params.logprobs, wants_mass=params.log_kept_mass),
        sample_index,
        seed & 0xFFFFFFFF,
        seed >> 32,
        # Python's integers have no limit. A top-k at the limit keeps all tokens, as a larger one does.
        *(min(getattr(params, name), MAX_INT32) for name in INT_PARAMETERS),
        *map(vars(params).__getitem__, FLOAT_PARAMETERS),
        *stops,
        *[NO_TOKEN] * (len(STOP_FIELDS) - len(stops)),
    )
    return np.frombuffer(packed, np.int32)


def num_mask_words(vocab_size: int) -> int:
    """Return the words of a mask, int32: a bit for each token of the vocabulary."""
    return -(-vocab_size // 32)


def score_of(logprobs: int | None, *, wants_mass: bool = False) -> Score:
    """Return what rows get for the parameter `logprobs` or `prompt_logprobs`, as bits of `Score`.

    None asks for nothing. 0 asks for the logprob of the row's own token, and any other number, −1 too, also for those
    of the most likely tokens. `wants_mass` adds the probability that truncation has left, but not for None.
    """
    if logprobs is None:
        return Score(0)
    return Score.OWN | (Score.TOPS if logprobs else Score(0)) | (Score.MASS if wants_mass else Score(0))
