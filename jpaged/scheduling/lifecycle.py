"""Takes requests from waiting to running, out of the device and back, and to their end.

    waiting ──run──▶ running ──finish──▶ ended
       ▲               │  ▲
       └──recompute────┘  └──swap in── swapped ◀── swap out ── running

A running request holds a state slot for each of its samples, and pages. What steps in flight may still write is
taken by no other sequence before those steps have retired. Decides nothing. The only writer of `state` of sequences
and requests, of `seq_slot` of sequences, and of `error`, `finished_time`, `num_preemptions` and `num_swaps` of
requests.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable

from ..kv_cache import sample_tree
from ..kv_cache.block_manager import BlockManager
from ..request import Request, RequestState, SampleSequence
from . import progress
from .admission import Admission
from .preemption import Preemption, PreemptionMode
from .scheduler_config import SchedulerConfig
from .scheduler_output import AdmissionGate


class Lifecycle:
    """The running and the ended requests, their slots, and the numbers of the steps in flight."""

    def __init__(
        self,
        blocks: BlockManager,
        admission: Admission,
        config: SchedulerConfig,
        *,
        clock: Callable[[], float],
        gate: AdmissionGate | None,
    ):
        """Start without requests. `admission` has the queues of those that do not run; `clock` gives seconds."""
        self.blocks, self.prefixes = blocks, blocks.prefixes
        self.admission = admission
        self.preemption = config.preemption
        self.max_num_seqs = config.max_num_seqs
        self.clock = clock
        self.gate = gate
        self.running: list[Request] = []
        """Running requests by `Request.order`: the last one is preempted first."""
        self.free_slots = self._all_slots()
        self.unfinished: dict[Request, None] = {}
        """Every request that was added and has not ended."""
        self.ended: dict[Request, None] = {}
        """Requests that have ended and whose callers do not know it yet. The engine takes them out."""
        self.step = 0
        """The last step that was scheduled."""
        self.retired_step = 0
        """The last step whose results the host has."""
        self.counts: Counter[str] = Counter()
        self._sequences: list[SampleSequence] = []
        self._has_changed = False
        """Sequences have come or gone since `_sequences` was made."""

    @property
    def sequences(self) -> list[SampleSequence]:
        """Live sequences of the running requests, in the requests' order."""
        if self._has_changed:
            self._has_changed = False
            self._sequences = [sequence for request in self.running for sequence in request.live]
        return self._sequences

    @property
    def has_steps_in_flight(self) -> bool:
        return self.step > self.retired_step

    def is_in_flight(self, sequence: SampleSequence) -> bool:
        """Return whether a step that was scheduled and has not retired computes tokens of this sequence."""
        return progress.is_in_flight(sequence, self.retired_step)

    def add(self, request: Request) -> None:
        """Queue a new request that was checked. Raise QueueFullError if too many wait."""
        self.admission.add(request)
        self.unfinished[request] = None

    def join(self, sequence: SampleSequence) -> None:
        """Give a new sample the state of its parent."""
        assert sequence.parent is not None, "a new sample has a parent"
        sequence.state = sequence.parent.state
        self.mark_changed()

    def mark_changed(self) -> None:
        """Note that a request's live samples have changed, or their order."""
        self._has_changed = True

    def count_step(self, step: int) -> None:
        """Note that the step of this number was scheduled."""
        self.step = step

    def retire(self, step: int) -> None:
        """Note that every step up to this one is done: what only those could write may be taken again."""
        self.retired_step = step
        self.blocks.retire(step)

    # Slots and pages

    def take_slot(self, sequence: SampleSequence) -> None:
        """Give a sequence a state slot, of which one must be free."""
        sequence.seq_slot = self.free_slots.pop()
        self.blocks.send_table(sequence)

    def release(self, sequence: SampleSequence) -> None:
        """Take the slot and the pages of a sequence."""
        self.defer_free(sequence)
        self._free_slot(sequence)
        self.blocks.release(sequence)
        progress.lose_pages(sequence)

    def defer_free(self, sequence: SampleSequence) -> None:
        """Keep what steps in flight may write of a running sequence from being taken before they have retired."""
        if self.is_in_flight(sequence) and sequence.state is RequestState.RUNNING:
            self.blocks.defer_free(sequence, self.step)

    def _free_slot(self, sequence: SampleSequence) -> None:
        if sequence.seq_slot:
            self.free_slots.append(sequence.seq_slot)
            sequence.seq_slot = 0

    def _all_slots(self) -> list[int]:
        return list(range(self.max_num_seqs, 0, -1))

    # From state to state

    def run(self, request: Request) -> None:
        """Let a request run that has its first pages and was taken out of its queue."""
        insort(self.running, request, key=lambda other: other.order)
        request.state = RequestState.RUNNING
        for sequence in request.live:
            sequence.state = RequestState.RUNNING
            self.take_slot(sequence)
        if self.gate is not None:
            self.gate.enter(request)
        self._has_changed = True

    def preempt(self, request: Request) -> Preemption:
        """Take the pages and slots of all samples of a running request. It keeps its place in the order."""
        mode, reason = self.preemption.choose(
            num_tokens=sample_tree.num_distinct_tokens(request), num_pages=self.blocks.num_held(request.live)
        )
        if request.beams is not None:
            mode, reason = PreemptionMode.RECOMPUTE, "its beams may continue each other while it is away"
            request.beams.forget_rows()
        if mode is PreemptionMode.SWAP and not self._swap_out(request):
            mode, reason = PreemptionMode.RECOMPUTE, "the host pool is full"
        self._leave(request)
        if mode is PreemptionMode.SWAP:
            request.num_swaps += 1
            self._queue(request, RequestState.SWAPPED)
        else:
            for sequence in request.live:
                self.release(sequence)
            self._queue(request, RequestState.WAITING)
        request.num_preemptions += 1
        self.counts[f"preemptions_{mode.value}"] += 1
        return Preemption(request, mode, reason)

    def _swap_out(self, request: Request) -> bool:
        """Move a request's pages to the host pool and take its slots; False if the pool is too full."""
        for sequence in request.live:
            self.defer_free(sequence)
        if not self.blocks.swap_out(request.live):
            return False
        for sequence in request.live:
            self._free_slot(sequence)
            progress.leave_device(sequence)
        return True

    def finish(self, sequence: SampleSequence, state: RequestState) -> None:
        """End one sequence and free what it holds; its request ends with its last one. Later calls do nothing."""
        if sequence.state.is_finished:
            return
        request = sequence.request
        if state is RequestState.FINISHED_ABORTED:
            self.counts[f"abort_{self.stage_of(sequence)}"] += 1
        elif state is RequestState.FINISHED_ERROR:
            self.prefixes.discard(sequence)
        self.release(sequence)
        sequence.state = state
        sample_tree.remove(sequence)
        self._has_changed = True
        if not request.live:
            self._leave(request)
            self._end(request, state)

    def fail(self, request: Request, message: str, state: RequestState = RequestState.FINISHED_ERROR) -> None:
        """End all live samples of a request in this state, with an error message for its caller."""
        request.error = message
        for sequence in list(request.live):
            self.finish(sequence, state)

    def restart(self) -> None:
        """Queue every unfinished request anew: the device has lost what it held, and all results in flight.

        All state but the requests themselves may be half-written, by an interrupt, and is rebuilt from them. The
        samples of a beam search must have the tokens of its running beams.
        """
        if self.gate is not None:
            for request in self.running:
                self.gate.leave(request)
        self.running.clear()
        self.admission.clear()
        self.free_slots = self._all_slots()
        self.blocks.clear(sequence for request in self.unfinished for sequence in request.live)
        self.retire(self.step)
        for request in list(self.unfinished):
            if request.beams is not None:
                self._restart_beams(request)
            if not request.live:
                self._end(request, request.sequences[-1].state)
                continue
            request.num_preemptions += request.state is not RequestState.WAITING
            for sequence in request.sequences:
                if sequence not in request.live:
                    sample_tree.reparent_children(sequence)
            for sequence in request.live:
                sequence.seq_slot = 0
                progress.lose_steps(sequence)
            self._queue(request, RequestState.WAITING)
        self.counts["restart"] += 1

    def _restart_beams(self, request: Request) -> None:
        assert request.beams is not None
        request.beams.forget_rows()
        if request.beams.is_over:
            for sequence in request.live:
                sequence.state = RequestState.FINISHED_STOPPED
            sample_tree.remove_all(request)
            return
        sample_tree.reset_to_prompt(request)
        for sequence in request.live:
            self.prefixes.forget_tokens(sequence)

    def _queue(self, request: Request, state: RequestState) -> None:
        """Put a request that has stopped running back into a queue, in this state."""
        request.state = state
        for sequence in request.live:
            sequence.state = state
            if state is RequestState.WAITING:
                sample_tree.set_waiting(sequence, sequence.parent is not None)
        self.admission.requeue(request)
        self._has_changed = True

    def _leave(self, request: Request) -> None:
        """Take a request out of the running ones, or out of its queue."""
        if request.state is not RequestState.RUNNING:
            self.admission.remove(request)
            return
        self.running.remove(request)
        if self.gate is not None:
            self.gate.leave(request)

    def _end(self, request: Request, state: RequestState) -> None:
        request.state, request.finished_time = state, self.clock()
        self.ended[request] = None
        del self.unfinished[request]

    def stage_of(self, sequence: SampleSequence) -> str:
        """Return a word for what a sequence is doing, for counts and logs."""
        if sequence.state is not RequestState.RUNNING:
            return sequence.state.label
        return "decoding" if sequence.is_last_token_on_device else "prefilling"
