"""The keys of an engine's executables, by which the compile plan finds them.

    key                       run by the runner
    ("allocate",)             once at start and after a failed step: makes the device state and the logit rules
    ("forward", T)            each step of prefill chunks and single decodes, in the token bucket T
    ("forward_decodes", T)    instead of that in some buckets, when every row has one token
    ("sample", S, mode)       after a forward, in the sample bucket S
    ("sample_masked", S, mode)   instead of that, where a row has a grammar; a CPU's samplers all take masks
    ("score", S, kind)        after a forward, for each batch of given tokens that are scored
    ("decode", T, mode)       instead of both, when every row decodes several tokens
    ("tables",)               before a step whose page-table changes do not fit its buffer
    ("set_rules",)            when a sequence with logit rules gets a state slot
    ("copy",) ("swap_out",) ("swap_in",)   before a step that moves pages

T is a token bucket and S a sample bucket, both padded sizes.
"""

from __future__ import annotations

from ..sampling.sampling_params import SampleMode, ScoreKind
from ..scheduling.buckets import Buckets
from .compile_plan import Key
from .step_layout import StepLayout

TABLES_KEY = ("tables",)
ALLOCATE_KEY = ("allocate",)
SET_RULES_KEY = ("set_rules",)
COPY_KEY = ("copy",)
SWAP_OUT_KEY = ("swap_out",)
SWAP_IN_KEY = ("swap_in",)


def forward_key(buckets: Buckets, num_tokens: int, *, decodes_only: bool = False) -> Key:
    """Return the key of the forward program for a step of this many tokens: ("forward", T) or ("forward_decodes", T).

    T is the token bucket, the padded number of tokens. `decodes_only` says that each row of the step has one token. For
    such steps, some token buckets have the program "forward_decodes". A bucket that has only this program gives its key
    even if `decodes_only` is false, since all steps of such a bucket are made of rows of one token.
    """
    bucket = buckets.tokens_for(num_tokens)
    has_decode_program = buckets.has_decodes_apart(bucket)
    takes_decodes_only = has_decode_program and (decodes_only or bucket not in buckets.forward_tokens)
    return forward_key_of(bucket, takes_decodes_only)


def layout_key(layout: StepLayout) -> Key:
    """Return the key of the forward program for steps of this layout."""
    return forward_key_of(layout.num_tokens, layout.decodes_only)


def forward_key_of(num_tokens: int, decodes_only: bool) -> tuple[str, int]:
    """Return the key of the forward program of a token bucket, which takes rows of one token only if `decodes_only`."""
    return ("forward_decodes" if decodes_only else "forward", num_tokens)


def decode_key(buckets: Buckets, num_rows: int, mode: SampleMode) -> Key | None:
    """Return the key of the program that decodes several tokens of each of this many rows; None if there is none."""
    decode_mode = buckets.decode_mode_for(mode)
    return None if decode_mode is None else ("decode", buckets.tokens_for(num_rows), decode_mode)


def sample_key(
    buckets: Buckets, num_samples: int, mode: SampleMode, *, is_masked: bool = False
) -> tuple[str, int, SampleMode]:
    """Return the key of the sample program for this many rows of a mode; `is_masked`: rows have masks.

    If not all programs take masks (`Buckets.masks_apart`), rows with masks have programs of their own.
    """
    mode = buckets.mode_for(mode)
    name = "sample_masked" if is_masked and buckets.masks_apart else "sample"
    return name, buckets.samples_for(num_samples, mode), mode


def is_sampler(key: Key) -> bool:
    """Return whether a key is that of a sample program: it calls no attention, so it may be compiled before a check."""
    return isinstance(key, tuple) and key[0] in ("sample", "sample_masked")


def score_key(num_rows: int, kind: ScoreKind) -> Key:
    """Return the key of the program that scores given tokens, for this many rows, padding included."""
    return ("score", num_rows, kind)
