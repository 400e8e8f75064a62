"""How far sequences are: tokens that exist, tokens that are computed, and how far each may decode unattended.

The only writer of `num_tokens`, `num_computed`, `decode_limit`, `check_at_len`, `is_last_token_on_device` and
`last_chunk_step` of sequences. Tokens count as computed as soon as the step that computes them is scheduled. Knows
no page and no queue.
"""

from __future__ import annotations

from ..request import SampleSequence
from .scheduler_output import SchedulerOutput


def is_in_flight(sequence: SampleSequence, retired_step: int) -> bool:
    """Return whether a step that was scheduled after `retired_step`, the last retired one, computes this sequence.

    That is so if the device draws tokens which the host does not know yet, or if the step of its last chunk of known
    tokens has not retired.
    """
    return sequence.num_tokens > len(sequence.token_ids) or sequence.last_chunk_step > retired_step


def count_step(work: SchedulerOutput) -> None:
    """Count the tokens of a scheduled step as computed, and the tokens that the device will draw in it as existing.

    A decoding sequence computes and draws one token, or as many as `decode_lens` says. After a chunk of known tokens,
    each of the chunk's `samples` draws one token, which the next step reads on the device. `last_chunk_step` becomes
    the number of this step.

    Example: a sequence with 10 tokens, of which 9 are computed, decodes one token: 10 are computed, and 11 exist.
    """
    if work.decode_lens:
        for sequence, num_steps in zip(work.decodes, work.decode_lens, strict=True):
            sequence.num_computed += num_steps
            sequence.num_tokens += num_steps
    else:
        for sequence in work.decodes:  # Before the step, each has exactly one token that is not computed.
            num_tokens = sequence.num_tokens
            sequence.num_computed = num_tokens
            sequence.num_tokens = num_tokens + 1
    for chunk in work.chunks:
        sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
        sequence.num_computed, sequence.last_chunk_step = end, work.step
        if sequence.request.beams is None:  # The host, not the device, chooses the next token of a beam.
            for sample in chunk.samples:
                sample.is_last_token_on_device, sample.num_tokens = True, end + 1


def set_num_tokens(sequence: SampleSequence, num_tokens: int) -> None:
    """Count the tokens of a sequence to which the host gives tokens, as a beam search does."""
    sequence.num_tokens = num_tokens


def start_at(sequence: SampleSequence, num_computed: int) -> None:
    """Count as computed what the pages hold that the sequence has got from its parent or from the prefix cache."""
    sequence.num_computed = num_computed


def set_decode_limit(sequence: SampleSequence, num_tokens: int) -> None:
    """Let a sequence decode until so many tokens are computed, or keep it from decoding on by 0."""
    sequence.decode_limit = num_tokens


def set_check(sequence: SampleSequence, num_known: int) -> None:
    """Let the tokens of a sequence be appended without a check until the host knows more than `num_known`."""
    sequence.check_at_len = num_known


def leave_device(sequence: SampleSequence) -> None:
    """Note that a sequence has lost its state slot, and the token that was drawn there; its pages may live on."""
    sequence.decode_limit = sequence.check_at_len = 0
    sequence.is_last_token_on_device = False


def lose_pages(sequence: SampleSequence) -> None:
    """Note that a sequence has lost its slot and its pages: none of its tokens is computed any more."""
    leave_device(sequence)
    sequence.num_computed = 0


def lose_steps(sequence: SampleSequence) -> None:
    """Note that the device has lost all it held and drew: the sequence has only the tokens that the host knows."""
    lose_pages(sequence)
    sequence.num_tokens = len(sequence.token_ids)
    sequence.last_chunk_step = 0
