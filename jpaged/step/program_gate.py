"""Keeps requests out of steps until the programs that they need are compiled; other requests go on meanwhile.

    request ─▶ admits? ─▶ runs
                 └─ no: its program is compiled next, with nothing behind beside it, and the request waits for that

A program whose compilation has failed is never ready: requests that cannot do without it end by an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import cache
from typing import Any

from ..checks import one_line
from ..request import Request
from ..sampling.sampling_params import MODES, SampleMode
from ..scheduling.step_shape import StepLimits
from .compile_plan import CompilePlan, Key
from .program_choice import ProgramChoice
from .program_keys import SET_RULES_KEY, score_key
from .score_inputs import score_kind


class ProgramGate:
    """The gate of an engine that compiles while it serves. See `AdmissionGate`."""

    def __init__(self, plan: CompilePlan, choice: ProgramChoice, *, max_tokens: int, max_logprobs: int):
        """Admit what the programs of `plan` that are ready can compute.

        `choice` tells which programs can do the same. Those for the fewest tokens, and a sampler for the rows of any
        step, must be ready. `max_tokens` and `max_logprobs` are the engine's limits.
        """
        self.plan, self.choice = plan, choice
        self._max_tokens, self._max_logprobs = max_tokens, max_logprobs
        self._samplers = cache(self._largest_samplers)
        self._running: Counter[tuple[SampleMode, bool]] = Counter()
        """Requests that run, by their sampling mode and whether they have masks."""
        self._num_left = 0
        """How often the last request of a mode has left."""
        self._awaited: set[Future[Any]] = set()
        """The compilations that refused requests wait for."""
        self._limits_version = -1

    @property
    def version(self) -> int:
        """Return a number that rises with each program that is compiled, and each request that runs no more."""
        return self.plan.num_ended + self._num_left

    def admits(self, request: Request) -> bool:
        """Return whether the programs are ready that the request needs beside those that run.

        The first one that is missing is compiled at once; see `CompilePlan.ask`.
        """
        for alternatives in self._needs(request, beside_others=True):
            if not self._has_any(alternatives):
                missing = [key for key in alternatives if key not in self.plan.failures]
                if missing:
                    self._awaited.add(self.plan.ask(missing[0]))
                return False
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait until a program that a refused request needs is compiled, but no longer than `timeout_s` seconds."""
        _, self._awaited = wait(self._awaited, timeout=timeout_s, return_when=FIRST_COMPLETED)

    def fault_of(self, request: Request) -> str | None:
        """Return the error of a request that needs a program which was not compiled; None if it may be admitted."""
        if not self.plan.failures:
            return None
        for alternatives in self._needs(request, beside_others=False):
            if all(key in self.plan.failures for key in alternatives):
                failure = self.plan.failures[alternatives[0]]
                cause = f"{type(failure).__name__}: {one_line(failure, 200)}"
                return f"a program that this request needs was not compiled ({cause}); requests without it are served"
        return None

    def enter(self, request: Request) -> None:
        """Note that this request runs now.

        The programs that decode several tokens of its mode are compiled behind the others, if they are not yet. Until
        they are ready its rows decode one token a step.
        """
        if not self._running:
            self.plan.pauses.begin_requests()
        self._running[_sampling_of(request)] += 1
        if request.scoring is None:
            keys = [key for key in self.choice.decodes(request.mode) if key in self.plan.programs]
            self.plan.start_behind(keys)

    def leave(self, request: Request) -> None:
        """Note that this request runs no more."""
        sampling = _sampling_of(request)
        self._running[sampling] -= 1
        if not self._running[sampling]:
            del self._running[sampling]
            self._num_left += 1
        if not self._running:
            self.plan.pauses.end_requests()

    def new_limits(self) -> StepLimits | None:
        """Return what the programs that are ready can compute in a step; None if that is as at the last call."""
        if self._limits_version == self.plan.num_ended:
            return None
        self._limits_version = self.plan.num_ended  # Read first: it may rise again meanwhile.
        return self.choice.limits(self._max_tokens)

    def _has_any(self, keys: list[Key]) -> bool:
        return any(self.plan.is_ready(key) for key in keys)

    def _needs(self, request: Request, *, beside_others: bool) -> Iterator[list[Key]]:
        """Yield for each thing that the request needs the keys of the programs that can do it, the best one first.

        `beside_others`: in a step with those that run, whose rows one sampler draws. That must have room for any step.
        """
        if request.scoring is None:
            samplings = [_sampling_of(request), *(self._running if beside_others else ())]
            mode = max((mode for mode, _ in samplings), key=MODES.index)
            is_masked = any(has_masks for _, has_masks in samplings)
            yield self._samplers(mode, is_masked)
            if request.params.has_rules:
                yield [SET_RULES_KEY]
        if request.scoring is not None or request.needs_prompt_scores:
            kind = score_kind(request).padded(self._max_logprobs)
            yield [score_key(self.choice.buckets.max_samples, kind)]

    def _largest_samplers(self, mode: SampleMode, is_masked: bool) -> list[Key]:
        """Return the keys of the samplers that have room for the rows of any step, the best one first."""
        return list(self.choice.samplers(self.choice.buckets.max_samples, mode, is_masked=is_masked))


def _sampling_of(request: Request) -> tuple[SampleMode, bool]:
    """Return the sampling mode of a request, and whether its rows have masks."""
    return request.mode, request.grammar is not None
