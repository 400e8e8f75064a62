"""Decides which waiting and swapped requests run next.

Swapped requests come back as soon as they fit, and no waiting one runs before a swapped one that goes before it.
Waiting requests are admitted in order, but one that does not fit yet may be passed by a bounded number of later ones,
and one that a gate refuses by any number.

Knows queues, slots, numbers of pages, and pins. It only decides: the scheduler carries each decision out before it
asks for the next. The only writer of `policy_key`, `order` and `admission` of requests.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..kv_cache.block_manager import BlockManager
from ..kv_cache.page_demand import PageDemand
from ..kv_cache.prefix_cache import PrefixMatch
from ..request import Request, RequestState, SampleSequence
from .progress import is_in_flight
from .request_queue import Policy, RequestQueue
from .scheduler_config import SchedulerConfig
from .scheduler_output import AdmissionGate, scored_end

MAX_BYPASSES = 8
"""Later requests that may be admitted before one that does not fit yet. After so many, no later one may pass it."""
MAX_SKIPPED = 4
"""Requests that do not fit yet which one step passes over in search of requests that do."""
MAX_DELAYED = 32
"""Requests that one step passes over because they await a prefix. One that was passed MAX_BYPASSES times computes the
prefix itself."""


@dataclass(slots=True)
class StepRoom:
    """The step that is being scheduled, and the room that it has left. The scheduler keeps it up to date."""

    step: int
    start_time: float
    """When the step began, in seconds of the scheduler's clock."""
    token_budget: int
    """Tokens that chunks of the step may still take."""
    score_budget: int
    """Prompt tokens whose logprobs the step may still return."""
    free_slots: Sequence[int]
    running: Sequence[Request]
    retired_step: int
    """The last step whose results the host has."""


class Admission:
    """The queues of waiting and of swapped requests, and the rules by which requests leave them."""

    def __init__(self, blocks: BlockManager, demand: PageDemand, config: SchedulerConfig, gate: AdmissionGate | None):
        """Start with empty queues. `demand` counts the pages of requests in `blocks`, the page tables.

        `gate` may refuse a request for a further reason, such as an adapter that is not loaded; None refuses none.
        """
        self.blocks, self.prefixes, self.demand = blocks, blocks.prefixes, demand
        self.arithmetic = blocks.arithmetic
        self.config = config
        self.gate = gate
        self._gate_version = 0
        """`gate.version` at the last time that parked requests were given their places back."""
        self.policy = Policy(config.policy)
        self.waiting = RequestQueue(config.limits)
        self.swapped = RequestQueue()
        self.holds_newcomers = False
        """While set, no request begins that has never run; those that were preempted do."""
        self.held: dict[Request, None] = {}
        """Requests that wait outside of the queue while newcomers are held."""
        self.counts: Counter[str] = Counter()
        """`bypass`: admissions past an earlier request. `await_prefix`: times that a request awaited a prefix."""
        self._arrivals = itertools.count()
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
        """Queue a preempted request again, among the swapped or the waiting ones, in its old place of the order.

        The request's state says which queue. What the last check found out about its pages is dropped, so the next step
        checks it again. While newcomers are held, a request that has never run is held outside of the queue.
        """
        request.admission.pages_needed, request.admission.missing_hash = 0, None
        if self.holds_newcomers and request.first_scheduled_time is None:
            self.held[request] = None
            return
        (self.swapped if request.state is RequestState.SWAPPED else self.waiting).push(request)

    def remove(self, request: Request) -> None:
        """Take a waiting or swapped request out of its queue, or out of `held` if it waits outside of the queue."""
        if request in self.held:
            del self.held[request]
            return
        (self.swapped if request.state is RequestState.SWAPPED else self.waiting).remove(request)

    def clear(self) -> None:
        """Empty both queues."""
        self.waiting.clear()
        self.swapped.clear()
        self.held.clear()

    def hold_newcomers(self) -> None:
        """Take all requests that have never run out of the queue, until `release_newcomers`."""
        self.holds_newcomers = True
        self.held = {request: None for request in self.waiting if request.first_scheduled_time is None}
        for request in self.held:
            self.waiting.remove(request)

    def release_newcomers(self) -> None:
        """Queue the requests that `hold_newcomers` has taken out, in their old places."""
        self.holds_newcomers = False
        for request in self.held:
            self.waiting.push(request)
        self.held.clear()

    # The steps

    def retire(self, step: int, now: float) -> None:
        """Record that every step up to `step` is done at time `now`, and how long the last one with newcomers took."""
        while self._admitting and self._admitting[0][0] <= step:
            self._last_admission_s = now - self._admitting.popleft()[1]

    def choose_swapped(self, room: StepRoom) -> Iterator[tuple[Request, bool]]:
        """Yield (request, True) for each swapped request that fits, in order, until one does not fit.

        Such a request has left the queue when it is yielded. (request, False) stands for a request that can never run
        again, since the pool has become smaller; it is still in the queue, and the scheduler takes it out when it ends
        the request. The scheduler starts or ends each request before it asks for the next. A request that the gate
        refuses, or that a cheap test rules out, does not fit.
        """
        while self.swapped:
            request = self.swapped.first()
            if self.demand.can_never_run(request):
                yield request, False
                continue
            if not self._gate_admits(request) or not self._is_worth_checking(request, room):
                return
            fits_again = self._fits_again(request, room)
            if not fits_again and self._gave_up_pins(room):  # The last resort, after which it is checked once more.
                fits_again = self._fits_again(request, room)
            if not fits_again:
                return
            self.swapped.pop()
            yield request, True

    def choose_waiting(self, room: StepRoom, isolated: Request | None) -> Iterator[tuple[Request, PrefixMatch | None]]:
        """Yield each waiting request that fits, in order, with the match of cached pages that it starts from.

        (request, None) stands for a request that can never run, since the pool has become smaller or the gate would
        refuse it for ever. The scheduler starts or ends each request, and updates `room`, before it asks for the next.
        If `isolated` is set, only that request is admitted, and only once no other runs.

        The search ends if tokens or slots of the step run out, if a swapped request is earlier in the order, or if the
        next request has not waited long enough (`delay_factor`). It also ends after MAX_SKIPPED requests that do not
        fit, and after MAX_DELAYED that await a prefix.

        A request that does not fit yet, or awaits a prefix that a running one computes, may be passed by at most
        MAX_BYPASSES later ones (its `admission.num_bypassed` counts them). One that only the gate refuses is parked
        until the gate changes, and may be passed by any number. All that are passed stay in the queue.
        """
        if self.gate is not None and self.gate.version != self._gate_version:
            self._gate_version = self.gate.version  # Read first: it may rise again meanwhile.
            self.waiting.unpark()
        if not self.waiting:
            return
        if isolated is not None:
            yield from self._choose_isolated(isolated, room)
            return
        # Requests that this call takes out of the queue and does not admit. They return to it at the end.
        skipped: list[Request] = []
        awaiting_prefix: list[Request] = []
        has_admitted = False
        self._publishing = [other for other in room.running if self._is_publishing(other)]
        while self.waiting.has_next and room.token_budget > 0 and room.free_slots:
            request = self.waiting.first()
            if (self.swapped and self.swapped.first().order < request.order) or not self._has_waited(request, room):
                break
            if self.demand.can_never_run(request) or self.gate_fault(request) is not None:
                yield request, None  # The scheduler ends it, which takes it out of the queue.
                continue
            if not self._gate_admits(request):
                self.waiting.park(request)
                continue
            self.waiting.pop()
            if match := self._match_that_fits(request, room):
                has_admitted = True
                request.admission.num_bypassed = 0
                yield request, match
                self._publishing.append(request)
                for bypassed in skipped + awaiting_prefix:
                    bypassed.admission.num_bypassed += 1
                    # It may share pages with the admitted request, so the next step checks it again.
                    bypassed.admission.pages_needed = 0
                    self.counts["bypass"] += 1
            else:
                (awaiting_prefix if request.admission.awaits_prefix else skipped).append(request)
            # A request that was passed so often may be passed by no other, so the search ends at it.
            must_stop = any(other.admission.num_bypassed >= MAX_BYPASSES for other in skipped + awaiting_prefix)
            if must_stop or len(skipped) == MAX_SKIPPED or len(awaiting_prefix) == MAX_DELAYED:
                break
        for request in skipped + awaiting_prefix:
            self.waiting.push(request)
        if has_admitted:
            self._admitting.append((room.step, room.start_time))

    def _choose_isolated(self, request: Request, room: StepRoom) -> Iterator[tuple[Request, PrefixMatch | None]]:
        """Yield (request, its cached pages) if `request` waits, no other request runs, and it fits.

        Yield (request, None) instead if it can never run, and nothing if it has to wait. It is the only request that
        may be admitted, so the order of the queue and the gate play no role.
        """
        if room.running or request.state is not RequestState.WAITING:
            return
        self._publishing = []  # No running request can compute its prefix.
        if self.demand.can_never_run(request):
            yield request, None
        elif match := self._match_that_fits(request, room):
            self.waiting.remove(request)
            request.admission.num_bypassed = 0
            yield request, match

    # Whether a request fits

    def gate_fault(self, request: Request) -> str | None:
        """Return why the gate would refuse a request for ever; None if it may admit it."""
        return None if self.gate is None else self.gate.fault_of(request)

    def _gate_admits(self, request: Request) -> bool:
        return self.gate is None or self.gate.admits(request)

    def _has_waited(self, request: Request, room: StepRoom) -> bool:
        """Return whether a request has waited longer than `delay_factor` times what the last step with newcomers took.

        The wait lets other newcomers join its step. Without a factor, or while no request runs, no request has to wait,
        and the result is True. Newcomers are requests that were admitted from the waiting queue.
        """
        if not self.config.delay_factor or not room.running:
            return True
        return room.start_time - request.arrival_time > self.config.delay_factor * self._last_admission_s

    def _is_worth_checking(self, request: Request, room: StepRoom) -> bool:
        """Return whether the full check of a request may succeed, by tests that cost little.

        The full check hashes and looks up the prompt, so it is not repeated in every step. It cannot succeed if too few
        state slots are free for the live samples, or while a step in flight computes one of them. Otherwise it may if
        no request runs, if as many pages are free as the last check found to be needed (0 before the first check), or
        if the prefix cache has got the page that it lacked then.
        """
        if len(request.live) > len(room.free_slots) or any(is_in_flight(s, room.retired_step) for s in request.live):
            return False
        has_room = not room.running or self._has_free_pages(request, room)
        return has_room or self.prefixes.has_page(request.admission.missing_hash)

    def _match_that_fits(self, request: Request, room: StepRoom) -> PrefixMatch | None:
        """Return the cached pages that a waiting request starts from; None if there is no room for the rest now."""
        request.admission.awaits_prefix = False
        if not self._is_worth_checking(request, room):
            return None
        match = self._check_fit(request, room)
        if match is None and self._gave_up_pins(room):  # The last resort, after which it is checked once more.
            match = self._check_fit(request, room)
        return match

    def _check_fit(self, request: Request, room: StepRoom) -> PrefixMatch | None:
        """Return the cached pages that a waiting request starts from; None if it cannot start in this step.

        It cannot start if its other pages are not free, if the step has no room for its first chunk, or if it should
        wait for a running request to compute its prefix. `request.admission` gets what was found: the free pages
        needed, the hash of the first page that the cache lacks, and whether it waits for a prefix. Only the first live
        sample is looked up in the prefix cache, since the others share its pages. Pages of the match that other
        sequences use already need no free page.
        """
        first = request.live[0]
        match = self.prefixes.match(first, self.demand.match_limit(first))
        start = match.num_pages * self.arithmetic.block_size
        request.admission.pages_needed = self.demand.pages_now(request, start) - self.prefixes.num_shared(match)
        request.admission.missing_hash = match.missing_hash
        num_pending = first.num_tokens - start
        # A request that was passed too often no longer waits for a prefix, but computes it itself.
        may_wait = match.missing_hash is not None and request.admission.num_bypassed < MAX_BYPASSES
        if may_wait and self._is_being_computed(first, match, num_pending):
            request.admission.awaits_prefix = True
            return None
        # If the step has no room for the score of one more prompt token, the chunk would be empty.
        end = scored_end(first, start, room.score_budget)
        is_too_long = end <= start
        if not self.config.enable_chunked_prefill:  # One step then computes the rest of the prompt as a whole.
            is_too_long = num_pending > room.token_budget or end < first.num_tokens
        return match if not is_too_long and self._has_free_pages(request, room) else None

    def _fits_again(self, request: Request, room: StepRoom) -> bool:
        """Return whether enough device pages are free for a swapped request to run again.

        It needs pages for those that it has in the host pool, unless the device still has their content in use, and for
        its tokens that are not computed yet. While other requests run, one more page per sample and page-table group is
        asked for. The sum is stored as `request.admission.pages_needed`, for the next cheap test.
        """
        # The request may hold more pages than `pages_now` says: its samples may own copies of pages that they shared
        # with a parent that has ended.
        num_next = max(0, self.demand.pages_now(request) - self.blocks.num_held(request.live))
        num_pages = self.blocks.num_to_swap_in(request.live) + num_next
        # If other requests run, each sample may need its next page in every group before any of them gives pages back.
        num_reserved = len(request.live) * self.arithmetic.num_groups if room.running else 0
        request.admission.pages_needed = num_pages + num_reserved
        return self._has_free_pages(request, room)

    def _gave_up_pins(self, room: StepRoom) -> bool:
        """Unpin all pages if no running request and no step in flight can free any page; return whether it did.

        This is the last resort for the next request, which could otherwise never run. The check at its arrival assumed
        that it would use the pinned pages of its prefix. If it holds or matches other pages with the same content
        instead, it may not fit beside the pinned ones.
        """
        if room.running or self.blocks.has_deferred:
            return False
        self.blocks.release_pins()
        return True

    def _has_free_pages(self, request: Request, room: StepRoom) -> bool:
        """Return whether `pages_needed` pages are free, and the watermark's share besides if other requests run."""
        num_reserved = int(self.config.watermark * self.blocks.num_usable) if room.running else 0
        return request.admission.pages_needed + num_reserved <= self.blocks.num_free

    # Prefixes that running requests compute

    def _is_publishing(self, request: Request) -> bool:
        """Return whether a running request's prompt has full pages that the prefix cache will get, and has not got yet.

        It has none if prefix caching is off. Pages that several versions of the weights have computed are never
        offered. The first live sample computes and publishes the prompt for all samples.
        """
        num_full = request.prompt_len // self.arithmetic.block_size
        return (
            self.prefixes.is_enabled and not request.has_mixed_pages and request.live[0].prefix.num_published < num_full
        )

    def _is_being_computed(self, sequence: SampleSequence, match: PrefixMatch, num_pending: int) -> bool:
        """Return whether a waiting sequence should wait until a running request has published pages that it needs.

        `match` holds the cached pages that the sequence could start from now, and `num_pending` counts its tokens after
        them. A running request is worth waiting for if its prompt continues the match with the same full pages, if
        these save at least half of the pending tokens, and if the request has at most twice as many tokens left to
        compute as it saves, so that the wait is short beside the saving. It must come earlier in the order. It must not
        have lost pages that the sequence needs for a sliding window, to sequences that have taken them since.

        If the result is True, the counter `await_prefix` grows by one. Example with pages of 16 tokens: a sequence with
        100 pending tokens has the next 4 pages in common with a running prompt. They save 64 tokens, which is at least
        half of 100, so it waits if that request has at most 128 tokens left to compute.
        """
        block_size, start = self.arithmetic.block_size, match.num_pages
        max_pages = self.demand.match_limit(sequence) // block_size
        for request in self._publishing:
            # The first live sample computes the prompt for all samples of its request.
            publisher, num_full = request.live[0], request.prompt_len // block_size
            if request.order > sequence.request.order:
                continue
            # The first page that the cache lacks must be a full page of the running request's prompt. The slice has
            # that page's hash, or is empty if no hash of such a page is known.
            if publisher.prefix.hashes[start : min(start + 1, num_full)] != [match.missing_hash]:
                continue
            pairs = zip(publisher.prefix.hashes[start:num_full], sequence.prefix.hashes[start:max_pages], strict=False)
            num_same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            num_left = publisher.num_tokens - publisher.num_computed
            is_worth_it = 2 * num_same * block_size >= max(num_pending, num_left)
            if is_worth_it and self.prefixes.will_have(publisher, start + num_same):
                self.counts["await_prefix"] += 1
                return True
        return False
