"""Which program computes a step: the smallest one that is compiled and large enough.

A server compiles most of its programs while it serves. Until the best one for a step is ready, a larger one computes
the same rows and more padding, so that no result depends on the choice. If none is ready, the choice is the best one,
and the step waits for it. Knows keys and sizes; no executable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..sampling.sampling_params import MODES, SampleMode, ScoreKind
from ..scheduling.buckets import Buckets
from ..scheduling.step_shape import StepLimits
from .compile_plan import Key
from .program_keys import forward_key_of, sample_key, score_key

SampleKey = tuple[str, int, SampleMode]
"""(name, rows, mode) of a sample program."""


class ProgramChoice:
    """The buckets of one engine, and which of their programs are ready."""

    def __init__(self, buckets: Buckets, is_ready: Callable[[Key], bool] | None = None):
        """`is_ready` tells whether the program of a key is compiled; without it, each step takes what fits it best."""
        self.buckets = buckets
        self.is_ready = is_ready or (lambda key: True)

    def forward(self, num_tokens: int, *, decodes_only: bool) -> tuple[int, bool]:
        """Return the token bucket of the forward program for a step, and whether that takes rows of one token only.

        `decodes_only` says whether each row of the step has one token. IndexError if no bucket holds so many tokens.
        """
        best: tuple[int, bool] | None = None
        for layout in self._forwards(num_tokens, decodes_only=decodes_only):
            if self.is_ready(forward_key_of(*layout)):
                return layout
            best = best or layout
        if best is None:
            raise IndexError(f"no bucket holds {num_tokens} tokens")
        return best

    def _forwards(self, num_tokens: int, *, decodes_only: bool) -> Iterator[tuple[int, bool]]:
        """Yield the programs that could compute a step as `forward` returns them, the best one first."""
        for size in self.buckets.num_tokens:
            if size < num_tokens:
                continue
            if decodes_only and self.buckets.has_decodes_apart(size):
                yield size, True
            if size in self.buckets.forward_tokens:
                yield size, False

    def sampler(self, num_rows: int, mode: SampleMode, *, is_masked: bool = False) -> SampleKey:
        """Return the key of the sample program for this many rows of a mode; `is_masked`: rows have masks."""
        best: SampleKey | None = None
        for key in self.samplers(num_rows, mode, is_masked=is_masked):
            if self.is_ready(key):
                return key
            best = best or key
        assert best is not None, "a step has at most as many rows as the largest sample bucket"
        return best

    def samplers(self, num_rows: int, mode: SampleMode, *, is_masked: bool = False) -> Iterator[SampleKey]:
        """Yield the keys of the programs that could sample this many rows of a mode, the best one first.

        Each mode can do what the ones before it do, and takes longer.
        """
        modes = self.buckets.modes
        for able in modes[modes.index(self.buckets.mode_for(mode)) :]:
            for size in self.buckets.sample_sizes(able):
                if size >= num_rows:
                    yield sample_key(self.buckets, size, able, is_masked=is_masked)

    def score_rows(self, num_rows: int, kind: ScoreKind) -> int:
        """Return the rows, padding included, of the program that scores this many given tokens."""
        sizes = [size for size in self.buckets.sample_sizes(SampleMode.FULL) if size >= num_rows]
        return next((size for size in sizes if self.is_ready(score_key(size, kind))), sizes[0])

    def decodes(self, mode: SampleMode) -> list[Key]:
        """Return the keys of the programs that decode several tokens of rows of this mode; empty if there are none."""
        decode_mode = self.buckets.decode_mode_for(mode)
        return [] if decode_mode is None else [("decode", size, decode_mode) for size in self.buckets.decode_sizes]

    def limits(self, max_tokens: int) -> StepLimits:
        """Return what the programs that are ready can compute in one step of at most `max_tokens` tokens.

        Sequences decode several tokens in one step once all programs of their mode that do so are ready.
        """
        buckets = self.buckets
        sizes = tuple(
            size
            for size in buckets.num_tokens
            if self.is_ready(forward_key_of(size, decodes_only=size not in buckets.forward_tokens))
        )
        several = [mode for mode in MODES if (keys := self.decodes(mode)) and all(map(self.is_ready, keys))]
        return StepLimits(min(max_tokens, sizes[-1]), sizes, frozenset(several))
