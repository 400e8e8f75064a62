"""Decides what happens after a step has failed: compute again, try requests one by one, or give up.

A failed step costs no tokens: its requests are computed again. Only failures with no generated token between them
count, so rare faults never add up. Knows requests and counts; it ends no request and touches no queue itself.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable

from ..request import Request

MAX_FAILED_STEPS = 3
"""Failed steps, without a generated token between them, after which requests are tried one by one. After as many
failures of requests that were tried alone, all requests end."""


class FailureVerdict(enum.Enum):
    """Which requests must end because a step has failed."""

    RETRY = enum.auto()
    """No request ends: the next steps compute again what was lost."""
    END_ISOLATED = enum.auto()
    """The isolated request ends: it failed with no other request in the step."""
    END_ALL = enum.auto()
    """Every unfinished request ends: the fault does not depend on the request."""


class Quarantine:
    """Finds the request whose steps fail by trying the quarantined requests one by one.

    A quarantined request is released when it has generated a token, and leaves when it ends.
    """

    def __init__(self) -> None:
        self._quarantined: deque[Request] = deque()
        self._num_failed_steps = 0
        self._num_failed_alone = 0
        self._num_generated = 0

    @property
    def isolated_request(self) -> Request | None:
        """Return the quarantined request that the next step computes alone; None if all requests may run."""
        while self._quarantined and self._quarantined[0].state.is_finished:
            self._quarantined.popleft()
        return self._quarantined[0] if self._quarantined else None

    def note_step(self, num_generated: int) -> bool:
        """Record a step that did not fail; return whether it releases the isolated request from quarantine.

        It does if the requests have generated a token since the last call; earlier failures then count no more. Without
        a quarantined request the result is False. `num_generated` counts the tokens of all requests since the engine's
        start. After a release the caller queues all requests again, so that the next quarantined request can run alone,
        or all can run if none is left.
        """
        is_released = bool(self._quarantined) and self._has_generated(num_generated)
        if is_released:
            self._quarantined.popleft()
        return is_released

    def note_failure(self, running: Iterable[Request], num_generated: int) -> FailureVerdict:
        """Record a failed step and return which requests must end.

        `running` are the requests that the step computed; `num_generated` counts the tokens of all requests since the
        engine's start. After MAX_FAILED_STEPS failures in a row without a new token, the running requests are
        quarantined, to be tried one by one. Return END_ISOLATED if the failed request was alone. Return END_ALL instead
        if MAX_FAILED_STEPS requests have failed alone in a row, or if no request is left to try; the quarantine and the
        counts are then empty. Otherwise return RETRY.
        """
        self._has_generated(num_generated)
        self._num_failed_steps += 1
        was_alone = bool(self._quarantined)
        if was_alone:
            self._num_failed_alone += 1
        elif self._num_failed_steps >= MAX_FAILED_STEPS:
            self._quarantined.extend(running)
        has_no_candidate = self._num_failed_steps >= MAX_FAILED_STEPS and not self._quarantined
        if has_no_candidate or self._num_failed_alone == MAX_FAILED_STEPS:
            self._quarantined.clear()
            self._num_failed_steps = self._num_failed_alone = 0
            return FailureVerdict.END_ALL
        return FailureVerdict.END_ISOLATED if was_alone else FailureVerdict.RETRY

    def _has_generated(self, num_generated: int) -> bool:
        """Return whether tokens were generated since the last call; if so, earlier failures count no more."""
        has_more = num_generated > self._num_generated
        self._num_generated = num_generated
        if has_more:
            self._num_failed_steps = self._num_failed_alone = 0
        return has_more
