"""Who comes in, and when: the queues of requests that do not run, and the rules by which they leave them.

Swapped requests come back as soon as they fit, and no waiting one runs before a swapped one whose turn is sooner.
Among waiting ones the first in order comes first, but one that does not fit yet may be passed by a bounded number
of later ones.

Knows queues, slots, numbers of pages and pins; what letting a request run means is the scheduler's business.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING

from .block_manager import AllocStatus
from .prefix_cache import PrefixMatch
from .request import Request, RequestState, Sequence
from .request_queue import Policy, PolicyKey, QueueLimits, RequestQueue
from .schedule import AdmissionGate

if TYPE_CHECKING:
    from .scheduler import Scheduler

MAX_BYPASSES = 8
"""Later requests that may be admitted before one that does not fit yet. Then it is its turn, whatever fits."""
MAX_PASSED = 4
"""Requests that do not fit yet among which a step looks for one that does."""
MAX_PARKED = 32
"""The same for requests that only a gate keeps waiting, whom any number of later ones may pass, or a prefix on its way:
who was passed too often for that computes it himself."""


class Admission:
    """The queues `waiting` and `swapped` of one scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        policy: PolicyKey,
        limits: QueueLimits | None,
        watermark: float,
        delay_factor: float,
        gate: AdmissionGate | None,
    ):
        """See `Scheduler` for the options."""
        self.scheduler = scheduler
        self.policy = Policy(policy)
        self.watermark = watermark
        self.delay_factor = delay_factor
        self.gate = gate
        self.waiting = RequestQueue(limits)
        self.swapped = RequestQueue()
        self.step_time = 0.0
        """When the step that is being scheduled began."""
        self._arrivals = itertools.count()
        self._admitting: deque[tuple[int, float]] = deque()
        """Steps with newcomers that have not retired, and when they began."""
        self._last_admission_s = 0.0
        self.alone: Request | None = None
        """Nobody else comes in, and this one only where nobody runs."""
        self._publishing: list[Request] = []
        """Those that run and whose prompts the prefix cache is about to get."""

    def add(self, request: Request) -> None:
        """Queue a new request that was checked. QueueFullError if too many wait."""
        self.waiting.check_room(request)
        request.order = (request.policy_key, next(self._arrivals))
        self.waiting.push(request)

    def check(self, request: Request) -> None:
        """Ask the policy for the request's key, once. InvalidRequestError for one that cannot be sorted."""
        if request.policy_key is None:
            request.policy_key = self.policy.key_of(request)

    def clear(self) -> None:
        """Forget who is queued."""
        self.waiting = RequestQueue(self.waiting.limits)
        self.swapped = RequestQueue()

    def retire(self, step: int) -> None:
        """A step is done: if it had newcomers, note how long it took."""
        while self._admitting and self._admitting[0][0] <= step:
            self._last_admission_s = self.scheduler.clock() - self._admitting.popleft()[1]

    def bring_back(self, budget: int) -> int:
        """Let swapped requests run again, in order, while they fit; returns the tokens scheduled for them."""
        num_scheduled = 0
        while self.swapped and not self.scheduler.has_preempted:
            request = self.swapped.first()
            if self.scheduler.demand.can_never_run(request):
                self.scheduler.ignore(request)
                continue
            is_refused = self.gate is not None and not self.gate.admits(request)
            if is_refused or not self._may_try(request):
                break
            if not self._fits_again(request) and not (self._pins_give_way() and self._fits_again(request)):
                break
            self.swapped.pop()
            num_scheduled += self.scheduler.resume(request, budget - num_scheduled)
        return num_scheduled

    def admit(self, budget: int) -> None:
        """Let waiting requests run, in order, but none before a swapped one whose turn is sooner.

        One that does not fit yet, or waits for a prefix that somebody computes, may be passed by a few later ones that
        do. Whom only the gate refuses stands in nobody's way.
        """
        scheduler = self.scheduler
        if not self.waiting:
            return
        if self.alone is not None:
            self._admit_alone(self.alone, budget)
            return
        passed: list[Request] = []
        expectant: list[Request] = []
        parked: list[Request] = []
        has_admitted = False
        self._publishing = [other for other in scheduler.running if scheduler.is_publishing(other)]
        while self.waiting and budget > 0 and scheduler.free_slots:
            request = self.waiting.first()
            if (self.swapped and self.swapped.first().order < request.order) or not self._has_waited(request):
                break
            if scheduler.demand.can_never_run(request):
                scheduler.ignore(request)
                continue
            self.waiting.pop()
            if self.gate is not None and not self.gate.admits(request):
                parked.append(request)
            elif match := self._match_that_fits(request, budget):
                budget -= scheduler.start(request, match, budget)
                has_admitted = True
                self._publishing.append(request)
                for other in passed + expectant:
                    other.num_bypassed += 1
                    other.pages_wanted = 0  # The newcomer may share some with it: worth a look in the next step.
                    scheduler.counts["bypass"] += 1
            else:
                (expectant if request.awaits_prefix else passed).append(request)
            is_their_turn = any(other.num_bypassed >= MAX_BYPASSES for other in passed + expectant)
            if is_their_turn or len(passed) == MAX_PASSED or len(expectant + parked) == MAX_PARKED:
                break
        for request in passed + expectant + parked:
            self.waiting.push(request)
        if has_admitted:
            self._admitting.append((scheduler.step + 1, self.step_time))

    def _admit_alone(self, request: Request, budget: int) -> None:
        if self.scheduler.running or request.state is not RequestState.WAITING:
            return
        if self.scheduler.demand.can_never_run(request):
            self.scheduler.ignore(request)
            return
        self._publishing = []
        if match := self._match_that_fits(request, budget):
            self.waiting.remove(request)
            self.scheduler.start(request, match, budget)

    def _may_try(self, request: Request) -> bool:
        """Whether a closer look is worth while: slots, results in flight, and what the last look found missing."""
        scheduler = self.scheduler
        if len(request.live) > len(scheduler.free_slots) or any(map(scheduler.is_in_flight, request.live)):
            return False
        if not scheduler.running or request.pages_wanted + self._reserve() <= scheduler.blocks.device.num_free:
            return True
        return scheduler.blocks.prefixes.has(request.next_hash)

    def _match_that_fits(self, request: Request, budget: int) -> PrefixMatch | None:
        """What the prefix cache has of a waiting request, if there is room for the rest of it now."""
        request.awaits_prefix = False
        if not self._may_try(request):
            return None
        match = self._fits(request, budget)
        return match or (self._fits(request, budget) if self._pins_give_way() else None)

    def _fits(self, request: Request, budget: int) -> PrefixMatch | None:
        """The same after a closer look, which is noted."""
        blocks, demand = self.scheduler.blocks, self.scheduler.demand
        first = request.live[0]
        match = blocks.prefixes.match(first, demand.match_limit(first))
        request.pages_wanted = demand.pages_now(request) - blocks.prefixes.num_shared(match)
        request.next_hash = match.next_hash
        num_pending = first.num_tokens - match.num_pages * blocks.block_size
        may_wait = match.next_hash is not None and request.num_bypassed < MAX_BYPASSES
        if may_wait and self._is_on_its_way(first, match, num_pending):
            request.awaits_prefix = True
            return None
        scored_end = self.scheduler.scored_end(first, start := first.num_tokens - num_pending)
        if self.scheduler.enable_chunked_prefill:
            is_too_long = scored_end <= start
        else:
            is_too_long = num_pending > budget or scored_end < first.num_tokens
        status = demand.status_of(request, request.pages_wanted + self._reserve())
        return match if status is AllocStatus.OK and not is_too_long else None

    def _is_on_its_way(self, sequence: Sequence, match: PrefixMatch, num_pending: int) -> bool:
        """Whether somebody who runs is about to publish most of what the sequence would compute once more.

        It waits if that spares it half of its own tokens, is not far behind what the other has still to compute, and
        the other is served before it.
        """
        block_size, start = self.scheduler.blocks.block_size, match.num_pages
        most = self.scheduler.demand.match_limit(sequence) // block_size
        for request in self._publishing:
            other, end = request.live[0], request.prompt_len // block_size
            if request.order > sequence.request.order or other.page_hashes[start : min(start + 1, end)] != [
                match.next_hash
            ]:
                continue
            pairs = zip(other.page_hashes[start:end], sequence.page_hashes[start:most], strict=False)
            num_same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            if 2 * num_same * block_size >= max(num_pending, other.num_tokens - other.num_computed):
                self.scheduler.counts["await_prefix"] += 1
                return True
        return False

    def _fits_again(self, request: Request) -> bool:
        """Whether a swapped request has room now, for what it holds and for what it would ask for at once."""
        blocks = self.scheduler.blocks
        # It may hold more: a sample that could share nothing has pages of its own.
        num_to_ask = max(0, self.scheduler.demand.pages_now(request) - blocks.num_held(request.live))
        num_pages = blocks.num_to_swap_in(request.live) + num_to_ask
        # Beside others, each of its sequences may need its next page before anybody gives one back.
        request.pages_wanted = num_pages + (len(request.live) if self.scheduler.running else 0)
        return request.pages_wanted + self._reserve() <= blocks.device.num_free

    def _pins_give_way(self) -> bool:
        """Let pinned pages be evicted if nobody else has any to give; whether that is so.

        It was taken because its prefix is pinned, and holds or finds other pages than those.
        """
        store = self.scheduler.blocks.store
        if self.scheduler.running or store.device.fenced:
            return False
        for key in list(store.pinned_pages):
            store.unpin(key)
        return True

    def _has_waited(self, request: Request) -> bool:
        """Whether newcomers may come in now, or wait a little longer for others to come along."""
        if not self.delay_factor or not self.scheduler.running:
            return True
        return self.step_time - request.arrival_time > self.delay_factor * self._last_admission_s

    def _reserve(self) -> int:
        """Pages that whoever comes in leaves free beside running requests."""
        return int(self.watermark * self.scheduler.blocks.device.num_usable) if self.scheduler.running else 0
