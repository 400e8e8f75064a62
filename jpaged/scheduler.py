"""Chooses which requests compute which tokens in the next step.

Every sequence wants its pending tokens: one when it decodes, a chunk when it prefills, and the rule is the
same for both. Knows requests and pages; no array, no device, no text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from .block_manager import BlockManager
from .request import Request, RequestState, Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """`num_tokens` tokens of a sequence, from position `start` on."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """The last known token is among them, so the step yields the next one."""
        return self.start + self.num_tokens == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The work of one step."""

    scheduled: tuple[ScheduledSequence, ...]
    preempted: tuple[Request, ...]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


class Scheduler:
    """Continuous batching, first come first served, with chunked prefill and preemption by recompute."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        watermark: float,
        clock: Callable[[], float],
    ):
        """`watermark` is the share of the pool that admission leaves free, so that it causes no preemption."""
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.watermark_pages = int(watermark * blocks.num_usable)
        self.clock = clock
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.free_slots = list(range(max_num_seqs, 0, -1))
        self.num_preemptions = 0
        self.num_prefill_chunks = 0
        """Prefill steps of a sequence that left part of it for later ones."""

    def add(self, request: Request) -> None:
        """Queue a request. The caller has refused what can never fit, which would hold up the queue for ever."""
        num_seqs = len(request.sequences)
        assert num_seqs <= min(self.max_num_seqs, self.max_num_batched_tokens), "more sequences than a step takes"
        # The last token ends its sequence, so that its keys and values are never computed.
        num_tokens = len(request.prompt_token_ids) + request.max_tokens - 1
        assert num_seqs * self.blocks.pages_for(num_tokens) <= self.blocks.num_usable, "larger than the pool"
        self.waiting.append(request)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> SchedulerOutput:
        """Choose the tokens of the next step.

        Running requests come first, oldest first, so that no newcomer starves one that holds pages. Where
        pages run out, the youngest running request gives all of its pages back and waits at the head of the
        queue. Newcomers are admitted only in a step that preempted nobody: memory is short then, and
        admitting would cause the next preemption.
        """
        scheduled: list[ScheduledSequence] = []
        preempted: list[Request] = []
        budget = self.max_num_batched_tokens
        for request in list(self.running):
            for sequence in request.live_sequences:
                if budget == 0 or request.state is not RequestState.RUNNING:
                    break
                num_tokens = min(sequence.num_pending, budget)
                if self._grow(sequence, sequence.num_computed + num_tokens, preempted):
                    scheduled.append(ScheduledSequence(sequence, sequence.num_computed, num_tokens))
                    budget -= num_tokens
        # A sequence of a group may have been scheduled before another one had the whole group preempted.
        scheduled = [item for item in scheduled if item.sequence.request.state is RequestState.RUNNING]
        while not preempted and budget > 0 and self.waiting:
            admitted = self._admit(self.waiting[0], budget)
            if not admitted:
                break
            self.running.append(self.waiting.popleft())
            scheduled.extend(admitted)
            budget -= sum(item.num_tokens for item in admitted)
        self.num_prefill_chunks += sum(not item.samples for item in scheduled)
        return SchedulerOutput(tuple(scheduled), tuple(preempted))

    def complete(self, item: ScheduledSequence) -> None:
        """The step is done: its tokens are computed, and full pages may serve others."""
        item.sequence.num_computed = item.start + item.num_tokens
        self.blocks.publish(item.sequence)

    def preempt_all(self) -> None:
        """Send every running request back to the queue, in order: the device has lost what it held."""
        for request in reversed(list(self.running)):
            self._preempt(request)
        self.blocks.reset_prefix_cache()

    def finish(self, sequence: Sequence, state: RequestState) -> None:
        """End one sequence and free what it holds; its request ends with its last sequence."""
        if sequence.state.is_finished:
            return
        if state is RequestState.FINISHED_ERROR:
            self.blocks.discard_unsound(sequence)
        sequence.state = state
        self._release(sequence)
        request = sequence.request
        if request.live_sequences:
            return
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.state = state
        request.finished_time = self.clock()

    def check(self) -> None:
        """Hold queues, slots and pages against their invariants; AssertionError if one is broken."""
        running = [sequence for request in self.running for sequence in request.live_sequences]
        assert all(request.state is RequestState.RUNNING for request in self.running), "a running request is not"
        assert all(request.state is RequestState.WAITING for request in self.waiting), "a waiting request is not"
        slots = [sequence.slot for sequence in running]
        assert 0 not in slots, "a running sequence without a slot"
        assert sorted([*slots, *self.free_slots]) == list(range(1, self.max_num_seqs + 1)), "a slot lost or held twice"
        for request in self.waiting:
            for sequence in request.sequences:
                assert sequence.slot == 0, "a waiting sequence with a slot"
                assert not any(sequence.pages), "a waiting sequence with pages"
                assert sequence.num_computed == sequence.num_published == 0, "a waiting sequence that forgot nothing"
        self.blocks.check(running)

    def _admit(self, request: Request, budget: int) -> list[ScheduledSequence]:
        """Give a waiting request its slots and first pages; empty, with nothing changed, if it has to wait."""
        sequences = request.live_sequences
        if len(sequences) > min(len(self.free_slots), budget):
            return []
        matched = [self.blocks.match_prefix(sequence) for sequence in sequences]
        wanted = sum(
            self.blocks.pages_for(sequence.num_tokens) - sum(map(len, found))
            for sequence, found in zip(sequences, matched, strict=True)
        )
        reserve = self.watermark_pages if self.running else 0
        if wanted + reserve > self.blocks.num_free_without(chain.from_iterable(matched)):
            return []
        # All adopt before any grows: growing takes free pages, which those that others have matched may be.
        for sequence, found in zip(sequences, matched, strict=True):
            num_cached = self.blocks.adopt(sequence, found)
            if request.first_scheduled_time is None:
                self.blocks.count_query(sequence.num_tokens, num_cached)
                request.num_cached_tokens = num_cached
        admitted: list[ScheduledSequence] = []
        for sequence in sequences:
            num_tokens = min(sequence.num_pending, budget - (len(sequences) - len(admitted) - 1))
            budget -= num_tokens
            has_grown = self.blocks.grow(sequence, sequence.num_computed + num_tokens)
            assert has_grown, "the pages were counted above"
            sequence.slot = self.free_slots.pop()
            sequence.state = RequestState.RUNNING
            admitted.append(ScheduledSequence(sequence, sequence.num_computed, num_tokens))
        request.state = RequestState.RUNNING
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self.clock()
        return admitted

    def _grow(self, sequence: Sequence, num_tokens: int, preempted: list[Request]) -> bool:
        """Get pages for the sequence, from the youngest requests if need be; False if it is itself the youngest."""
        while not self.blocks.grow(sequence, num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence.request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Take a running request's pages and slots; it will compute its tokens anew, before any newcomer."""
        for sequence in request.live_sequences:
            self._release(sequence)
            sequence.state = RequestState.WAITING
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.running.remove(request)
        self.waiting.appendleft(request)

    def _release(self, sequence: Sequence) -> None:
        if sequence.slot:
            self.free_slots.append(sequence.slot)
        self.blocks.release(sequence)
