"""Decides which waiting and swapped requests run next.

Swapped requests come back as soon as they fit, and no waiting one runs before a swapped one that goes before it.
Waiting requests are admitted in order, but one that does not fit yet may be passed by a bounded number of later ones.

Knows queues, slots, numbers of pages, and pins. It only decides: the scheduler carries each decision out before it
asks for the next. The only writer of `policy_key`, `order`, `pages_needed`, `missing_hash`, `awaits_prefix` and
`num_bypassed` of requests.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..kv_cache.block_manager import AllocStatus, BlockManager
from ..kv_cache.page_demand import PageDemand
from ..kv_cache.prefix_cache import PrefixMatch
from ..request import Request, RequestState, SampleSequence
from .progress import is_in_flight
from .request_queue import Policy, RequestQueue
from .scheduler_config import SchedulerConfig
from .scheduler_output import AdmissionGate, scored_end

MAX_BYPASSES = 8
"""Later requests that may be admitted before one that does not fit yet. After that none may, whether it fits or not."""
MAX_SKIPPED = 4
"""Requests that do not fit yet among which one step looks for requests that do."""
MAX_DELAYED = 32
"""Requests that one step passes over because the gate refuses them, which any number of later ones may pass, or because
they await a prefix; one that was passed too often for that computes the prefix itself."""


@dataclass(frozen=True, slots=True)
class StepRoom:
    """The room that the step being scheduled has left for further requests, and the requests that run already."""

    num_tokens: int
    """Tokens that the step may still compute."""
    num_scored: int
    """Prompt tokens whose logprobs the step may still return."""
    num_slots: int
    """Free state slots."""
    running: Sequence[Request]
    retired_step: int
    """The last step whose results the host has."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A waiting request that fits: it starts with the pages of `match`."""

    request: Request
    match: PrefixMatch


@dataclass(frozen=True, slots=True)
class SwappedIn:
    """A swapped request that fits: its pages are copied back."""

    request: Request


@dataclass(frozen=True, slots=True)
class Infeasible:
    """A queued request that the pool, which has become smaller, can never hold: it ends."""

    request: Request


class Admission:
    """The queues of waiting and of swapped requests, and the rules by which requests leave them."""

    def __init__(self, blocks: BlockManager, demand: PageDemand, config: SchedulerConfig, gate: AdmissionGate | None):
        self.blocks, self.prefixes, self.demand = blocks, blocks.prefixes, demand
        self.config = config
        self.gate = gate
        self.policy = Policy(config.policy)
        self.waiting = RequestQueue(config.limits)
        self.swapped = RequestQueue()
        self.isolated_request: Request | None = None
        """While set, only this request is admitted, and only once no other request runs."""
        self.counts: Counter[str] = Counter()
        """`bypass`: admissions past an earlier request. `await_prefix`: times that a request awaited a prefix."""
        self._arrivals = itertools.count()
        self._step_time = 0.0
        """When the step that is being scheduled began."""
        self._admitting: deque[tuple[int, float]] = deque()
        """(step, time at which it began) of steps with newcomers that have not retired."""
        self._last_admission_s = 0.0
        """Seconds from scheduling to retirement of the last retired step with newcomers."""
        self._publishing: list[Request] = []
        """Running requests whose prompts the prefix cache is about to get."""

    # The queues

    def check(self, request: Request) -> None:
        """Ask the policy for the request's key, once. Raise InvalidRequestError for a key that cannot be sorted."""
        if request.policy_key is None:
            request.policy_key = self.policy.key_of(request)

    def add(self, request: Request) -> None:
        """Queue a new request that was checked. Raise QueueFullError if too many wait."""
        self.waiting.check_room(request)
        request.order = (request.policy_key, next(self._arrivals))
        self.waiting.push(request)

    def requeue(self, request: Request) -> None:
        """Queue a preempted request again, as its state says, in its old place of the order."""
        request.pages_needed, request.missing_hash = 0, None
        (self.swapped if request.state is RequestState.SWAPPED else self.waiting).push(request)

    def remove(self, request: Request) -> None:
        """Take a waiting or swapped request out of its queue."""
        (self.swapped if request.state is RequestState.SWAPPED else self.waiting).remove(request)

    def clear(self) -> None:
        """Empty both queues."""
        self.waiting = RequestQueue(self.config.limits)
        self.swapped = RequestQueue()

    # The steps

    def begin_step(self, now: float) -> None:
        """Note when the step that is being scheduled began, in seconds of the scheduler's clock."""
        self._step_time = now

    def retire(self, step: int, now: float) -> None:
        """Note that every step up to `step` is done by `now`, and how long the last one with newcomers took."""
        while self._admitting and self._admitting[0][0] <= step:
            self._last_admission_s = now - self._admitting.popleft()[1]

    def choose_swapped(self, room: Callable[[], StepRoom]) -> Iterator[SwappedIn | Infeasible]:
        """Yield the swapped requests that fit, in order; `room` is asked anew after each was carried out."""
        while self.swapped:
            request = self.swapped.first()
            if self.demand.can_never_run(request):
                yield Infeasible(request)
                continue
            now = room()
            if not self._gate_admits(request) or not self._is_worth_checking(request, now):
                return
            if not self._fits_again(request, now) and not (self._gave_up_pins(now) and self._fits_again(request, now)):
                return
            self.swapped.pop()
            request.num_bypassed = 0
            yield SwappedIn(request)

    def choose_waiting(self, room: Callable[[], StepRoom], step: int) -> Iterator[Admitted | Infeasible]:
        """Yield the waiting requests that fit step number `step`, in order, but none before a swapped one that goes
        before it; `room` is asked anew after each was carried out.

        A request that does not fit yet, or awaits a prefix that a running one computes, may be passed by a few later
        ones. One that only the gate refuses may be passed by any number.
        """
        if not self.waiting:
            return
        if self.isolated_request is not None:
            yield from self._choose_isolated(self.isolated_request, room())
            return
        skipped: list[Request] = []
        awaiting_prefix: list[Request] = []
        refused: list[Request] = []
        has_admitted = False
        now = room()
        self._publishing = [other for other in now.running if self._is_publishing(other)]
        while self.waiting and now.num_tokens > 0 and now.num_slots:
            request = self.waiting.first()
            if (self.swapped and self.swapped.first().order < request.order) or not self._has_waited(request, now):
                break
            if self.demand.can_never_run(request):
                yield Infeasible(request)
                continue
            self.waiting.pop()
            if not self._gate_admits(request):
                refused.append(request)
            elif match := self._match_that_fits(request, now):
                has_admitted = True
                request.num_bypassed = 0
                yield Admitted(request, match)
                now = room()
                self._publishing.append(request)
                for other in skipped + awaiting_prefix:
                    other.num_bypassed += 1
                    other.pages_needed = 0  # It may share some with the newcomer: worth a check in the next step.
                    self.counts["bypass"] += 1
            else:
                (awaiting_prefix if request.awaits_prefix else skipped).append(request)
            must_stop = any(other.num_bypassed >= MAX_BYPASSES for other in skipped + awaiting_prefix)
            if must_stop or len(skipped) == MAX_SKIPPED or len(awaiting_prefix + refused) == MAX_DELAYED:
                break
        for request in skipped + awaiting_prefix + refused:
            self.waiting.push(request)
        if has_admitted:
            self._admitting.append((step, self._step_time))

    def _choose_isolated(self, request: Request, now: StepRoom) -> Iterator[Admitted | Infeasible]:
        if now.running or request.state is not RequestState.WAITING:
            return
        if self.demand.can_never_run(request):
            yield Infeasible(request)
            return
        self._publishing = []
        if match := self._match_that_fits(request, now):
            self.waiting.remove(request)
            request.num_bypassed = 0
            yield Admitted(request, match)

    # Whether a request fits

    def _gate_admits(self, request: Request) -> bool:
        return self.gate is None or self.gate.admits(request)

    def _has_waited(self, request: Request, now: StepRoom) -> bool:
        """Return whether newcomers may be admitted now, or wait a little longer for others to join them."""
        if not self.config.delay_factor or not now.running:
            return True
        return self._step_time - request.arrival_time > self.config.delay_factor * self._last_admission_s

    def _is_worth_checking(self, request: Request, now: StepRoom) -> bool:
        """Return whether a closer look may find room: for slots, results in flight, and what the last look missed."""
        if len(request.live) > now.num_slots or any(is_in_flight(one, now.retired_step) for one in request.live):
            return False
        if not now.running or request.pages_needed + self._num_reserved(now) <= self.blocks.num_free:
            return True
        return self.prefixes.has_page(request.missing_hash)

    def _match_that_fits(self, request: Request, now: StepRoom) -> PrefixMatch | None:
        """Return what the prefix cache has of a waiting request, if there is room for the rest of it now."""
        request.awaits_prefix = False
        if not self._is_worth_checking(request, now):
            return None
        match = self._check_fit(request, now)
        return match or (self._check_fit(request, now) if self._gave_up_pins(now) else None)

    def _check_fit(self, request: Request, now: StepRoom) -> PrefixMatch | None:
        """Do what `_match_that_fits` does, and note in the request what was found missing."""
        first = request.live[0]
        match = self.prefixes.match(first, self.demand.match_limit(first))
        request.pages_needed = self.demand.pages_now(request) - self.prefixes.num_shared(match)
        request.missing_hash = match.missing_hash
        start = match.num_pages * self.blocks.block_size
        num_pending = first.num_tokens - start
        may_wait = match.missing_hash is not None and request.num_bypassed < MAX_BYPASSES
        if may_wait and self._is_being_computed(first, match, num_pending):
            request.awaits_prefix = True
            return None
        end = scored_end(first, start, now.num_scored)
        if self.config.enable_chunked_prefill:
            is_too_long = end <= start
        else:
            is_too_long = num_pending > now.num_tokens or end < first.num_tokens
        status = self.demand.status_of(request, request.pages_needed + self._num_reserved(now))
        return match if status is AllocStatus.OK and not is_too_long else None

    def _fits_again(self, request: Request, now: StepRoom) -> bool:
        """Return whether a swapped request has room now for its pages and for those that it needs next."""
        # It may hold more than it needs now: a sample that could share nothing has pages of its own.
        num_next = max(0, self.demand.pages_now(request) - self.blocks.num_held(request.live))
        num_pages = self.blocks.num_to_swap_in(request.live) + num_next
        # Beside others, each of its sequences may need its next page before another request gives pages back.
        request.pages_needed = num_pages + (len(request.live) if now.running else 0)
        return request.pages_needed + self._num_reserved(now) <= self.blocks.num_free

    def _gave_up_pins(self, now: StepRoom) -> bool:
        """Let pinned pages be evicted if no running request or step in flight can free any; return whether it did.

        A request is accepted as if it had the pinned pages of its prefix, but it may hold or find other pages.
        """
        if now.running or self.blocks.has_deferred:
            return False
        self.blocks.release_pins()
        return True

    def _num_reserved(self, now: StepRoom) -> int:
        """Return the pages that a newcomer leaves free beside running requests."""
        return int(self.config.watermark * self.blocks.num_usable) if now.running else 0

    # Prefixes that running requests compute

    def _is_publishing(self, request: Request) -> bool:
        """Return whether a running request's prompt has full pages that are not in the prefix cache yet."""
        num_full = request.prompt_len // self.blocks.block_size
        return self.prefixes.is_enabled and request.live[0].num_published < num_full

    def _is_being_computed(self, sequence: SampleSequence, match: PrefixMatch, num_pending: int) -> bool:
        """Return whether a running request is about to publish most of what the sequence would compute once more.

        The sequence waits if that spares it half of its pending tokens, if the running request has no more left to
        compute than twice that, and if it is served before the sequence.
        """
        block_size, start = self.blocks.block_size, match.num_pages
        max_pages = self.demand.match_limit(sequence) // block_size
        for request in self._publishing:
            other, end = request.live[0], request.prompt_len // block_size
            if request.order > sequence.request.order:
                continue
            if other.page_hashes[start : min(start + 1, end)] != [match.missing_hash]:
                continue
            pairs = zip(other.page_hashes[start:end], sequence.page_hashes[start:max_pages], strict=False)
            num_same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            if 2 * num_same * block_size >= max(num_pending, other.num_tokens - other.num_computed):
                self.counts["await_prefix"] += 1
                return True
        return False
