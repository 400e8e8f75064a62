"""Takes requests from waiting to running, out of the device and back, and to their end.

    waiting ──run──▶ running ──finish──▶ ended
       ▲               │  ▲
       └──recompute────┘  └──swap in── swapped ◀── swap out ── running

A running request holds a state slot for each of its samples, and pages. What steps in flight may still write is
taken by no other sequence before those steps have retired. Samples of a request may share pages: each gets a copy of
a partly filled page before it writes it, except the last sample that still has it.

Decides nothing: the scheduler, which is a `Lifecycle`, does. The only writer of `state` of sequences and requests, of
`seq_slot` of sequences, and of `error`, `finished_time`, `num_preemptions` and `num_swaps` of requests.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from ..checks import refusal
from ..kv_cache import sample_tree
from ..kv_cache.block_manager import BlockManager
from ..kv_cache.page_demand import PageDemand
from ..request import Request, RequestState, SampleSequence
from . import progress
from .admission import Admission
from .preemption import Preemption, PreemptionMode
from .scheduler_config import Clock, SchedulerConfig
from .scheduler_output import AdmissionGate, unscored


class Lifecycle:
    """The unfinished and the ended requests, their slots, and the numbers of the steps in flight."""

    def __init__(self, blocks: BlockManager, config: SchedulerConfig, *, clock: Clock, gate: AdmissionGate | None):
        """Start without requests. `clock` gives seconds; `gate` is asked before a request may run."""
        self.blocks, self.prefixes, self.arithmetic = blocks, blocks.prefixes, blocks.arithmetic
        self.config, self.preemption = config, config.preemption
        self.clock, self.gate = clock, gate
        self.demand = PageDemand(blocks)
        self.admission = Admission(blocks, self.demand, config, gate)
        self.waiting, self.swapped = self.admission.waiting, self.admission.swapped
        self.counts = self.admission.counts
        """Counts since start, by name: preemptions, swap-ins, chunks, forks, aborts by stage, bypasses and more."""
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
        self._sequences: list[SampleSequence] = []
        self._has_changed = False
        """Sequences have come or gone since `_sequences` was made."""

    @property
    def sequences(self) -> list[SampleSequence]:
        """Return the live sequences of the running requests, in the requests' order."""
        if self._has_changed:
            self._has_changed = False
            self._sequences = [sequence for request in self.running for sequence in request.live]
        return self._sequences

    @property
    def has_unfinished(self) -> bool:
        return bool(self.unfinished)

    def is_in_flight(self, sequence: SampleSequence) -> bool:
        """Return whether a step that was scheduled and has not retired computes tokens of this sequence."""
        return progress.is_in_flight(sequence, self.retired_step)

    # Requests come

    def add(self, request: Request) -> None:
        """Queue a request. Raise InvalidRequestError if it can never fit, QueueFullError if too many wait."""
        self.check(request)
        self.admission.add(request)
        self.unfinished[request] = None

    def check(self, request: Request) -> None:
        """Raise InvalidRequestError if the request can never run, or if the policy's key for it cannot be sorted.

        It can never run if it needs more slots or pages than there are. Neither can it if its prompt or a continuation
        must be scored in one step, since chunked prefill is off, and is longer than what one step may score.
        """
        self.demand.check(request, self.config.max_num_seqs)
        num_scored, limit = max(len(unscored(sequence)) for sequence in request.live), self.config.max_scored_tokens
        if not self.config.enable_chunked_prefill and num_scored > limit:
            got = f"{num_scored} tokens to score while enable_chunked_prefill is false"
            allowed = f"at most {limit}, as many as a step has room for while max_logprobs is -1"
            way_out = "leave chunked prefill on, or start the engine with a max_logprobs that is a number of tokens"
            raise refusal("prompt_logprobs" if request.scoring is None else "continuations", got, allowed, way_out)
        self.admission.check(request)

    # Slots and pages

    def take_slot(self, sequence: SampleSequence) -> None:
        """Give a sequence a state slot, of which one must be free."""
        sequence.seq_slot = self.free_slots.pop()
        self.blocks.send_table(sequence)

    def release(self, sequence: SampleSequence) -> None:
        """Take the slot and the pages of a sequence. None of its tokens counts as computed any more."""
        self.defer_free(sequence)
        self._free_slot(sequence)
        self.blocks.release(sequence)
        progress.lose_pages(sequence)

    def defer_free(self, sequence: SampleSequence) -> None:
        """Keep the pages of a running sequence that steps in flight may write from reuse before these have retired."""
        if self.is_in_flight(sequence) and sequence.state is RequestState.RUNNING:
            self.blocks.defer_free(sequence, self.step)

    def _free_slot(self, sequence: SampleSequence) -> None:
        if sequence.seq_slot:
            self.free_slots.append(sequence.seq_slot)
            sequence.seq_slot = 0

    def idle_fault(self) -> str | None:
        """Return a description of leaked slots and pages, or None if nothing is lost.

        Example: "1 state slots and 3 device pages". Call this only while no request is unfinished. Then every state
        slot must be free, every host page must be free or cached, and every device page must be free, cached, pinned,
        or waiting for a step in flight to retire. `num_used` of a pool leaves out free, cached and waiting pages.
        """
        num_free_slots, max_slots = len(self.free_slots), self.config.max_num_seqs
        num_used_pages, num_pinned = self.blocks.device.num_used, len(self.blocks.store.pinned_pages)
        lost = {
            "state slots": max_slots - num_free_slots,
            "device pages": num_used_pages - num_pinned,
            "host pages": self.blocks.host.num_used,
        }
        faults = [f"{count} {name}" for name, count in lost.items() if count]
        return " and ".join(faults) or None

    def _all_slots(self) -> list[int]:
        return list(range(self.config.max_num_seqs, 0, -1))

    # From state to state

    def run(self, request: Request) -> None:
        """Insert a request among the running ones, which are sorted by `order`, and give each live sample a state slot.

        The caller has taken the request out of its queue and given it its first pages. One slot per live sample must be
        free. The states of the request and of its live samples become RUNNING. The admission gate, if there is one, is
        told that the request runs.
        """
        insort(self.running, request, key=lambda other: other.order)
        request.state = RequestState.RUNNING
        for sequence in request.live:
            sequence.state = RequestState.RUNNING
            self.take_slot(sequence)
        if self.gate is not None:
            self.gate.enter(request)
        self._has_changed = True

    def preempt(self, request: Request) -> Preemption:
        """Take the pages and slots of all samples of a running request, and queue it again in its old place.

        The preemption policy chooses between two modes. SWAP moves the pages to the host pool, and the request becomes
        SWAPPED. RECOMPUTE gives the pages up, and the request waits to compute its tokens again. A beam search and a
        request for which the host pool has no room are always recomputed. Return the request with the mode that was
        used and the reason for it in words. The counters of preemptions and swaps are raised.
        """
        num_tokens, num_pages = sample_tree.num_distinct_tokens(request), self.blocks.num_held(request.live)
        mode, reason = self.preemption.choose(num_tokens=num_tokens, num_pages=num_pages)
        if request.beams is not None:
            mode, reason = PreemptionMode.RECOMPUTE, "its beams may continue each other while it is away"
            request.beams.forget_rows()  # Scores that wait for those of other beams: all are computed again.
        if mode is PreemptionMode.SWAP and not self._swap_out(request):
            mode, reason = PreemptionMode.RECOMPUTE, "the host pool is full"
        is_swapped = mode is PreemptionMode.SWAP
        for sequence in () if is_swapped else request.live:  # `_swap_out` has moved pages and freed slots already.
            self.release(sequence)
        self._leave(request)
        self._queue(request, RequestState.SWAPPED if is_swapped else RequestState.WAITING)
        request.num_preemptions += 1
        request.num_swaps += is_swapped
        self.counts[f"preemptions_{mode.value}"] += 1
        return Preemption(request, mode, reason)

    def recompute(self, request: Request) -> None:
        """Take the pages of a running or swapped request, and queue it again to compute its tokens anew."""
        for sequence in request.live:
            self.release(sequence)
        self._leave(request)
        self._queue(request, RequestState.WAITING)
        request.num_preemptions += 1

    def _swap_out(self, request: Request) -> bool:
        """Move the pages of a request's live samples to the host pool, and free the samples' slots.

        Return whether this was done. If the host pool is too full, the request keeps its pages and slots.
        """
        # Steps in flight may still write the device pages, which must not be reused before these steps have retired.
        for sequence in request.live:
            self.defer_free(sequence)
        if not self.blocks.swap_out(request.live):
            return False
        for sequence in request.live:
            self._free_slot(sequence)
            progress.leave_device(sequence)
        return True

    def finish(self, sequence: SampleSequence, state: RequestState) -> None:
        """End one sequence in the state `state`, and free its slot and pages. Do nothing if it has ended already.

        When its last live sequence ends, the request ends in the same state. After an error, the prefix cache no longer
        offers the sequence's pages, since they may hold what caused the error. Children of the sequence get another
        parent. An abort is counted under what the sequence was doing, such as `abort_decoding`. A request that has
        ended waits in `ended` until its caller is told.
        """
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

    def mix_pages(self) -> None:
        """Record that the weights have changed: requests that have pages keep them, and continue with new weights."""
        for request in self.unfinished:
            request.has_mixed_pages = request.state is not RequestState.WAITING

    def restart(self) -> None:
        """Queue every unfinished request again, after the device has lost all pages and all results in flight.

        Each request keeps the tokens that the host knows, and computes all of them again. An interrupt may have left
        the queues, slots and page tables half-written, so they are rebuilt from `unfinished`. A request without live
        samples ends in the state of its last sample. A request that had left the waiting queue counts as preempted once
        more. Before this call, the caller must have given the samples of a beam search the tokens of its running beams.
        """
        if self.gate is not None:
            for request in self.running:
                self.gate.leave(request)
        self.running.clear()
        self.admission.clear()
        self.free_slots = self._all_slots()
        self.blocks.clear(sequence for request in self.unfinished for sequence in request.live)
        self._note_retired(self.step)
        for request in list(self.unfinished):
            if request.beams is not None:
                self._restart_beams(request)
            if not request.live:
                self._end(request, request.sequences[-1].state)
                continue
            request.num_preemptions += request.state is not RequestState.WAITING
            for sequence in request.sequences:
                if sequence not in request.live:  # An interrupt may have come before its children got a new parent.
                    sample_tree.reparent_children(sequence)
            for sequence in request.live:
                sequence.seq_slot = 0
                progress.lose_steps(sequence)
            self._queue(request, RequestState.WAITING)
        self.counts["restart"] += 1

    def _restart_beams(self, request: Request) -> None:
        """Prepare the live samples of a beam search to be queued again after all pages are lost.

        If the search is over, its live samples end. Otherwise each sample shares only the prompt with the first one
        from now on, and drops its page hashes: the samples got their tokens anew from the search, so the tree of shared
        tokens and the hashes from before may be wrong after the prompt.
        """
        assert request.beams is not None
        request.beams.forget_rows()
        if request.beams.is_over:
            for sequence in list(request.live):
                sequence.state = RequestState.FINISHED_STOPPED
                sample_tree.remove(sequence)
            return
        sample_tree.reset_to_prompt(request)
        for sequence in request.live:
            self.prefixes.forget_hashes(sequence)

    def _note_retired(self, step: int) -> None:
        """Record that every step up to `step` is done: pages that no later step may write can be reused."""
        self.retired_step = step
        self.blocks.retire(step)

    def _queue(self, request: Request, state: RequestState) -> None:
        """Set the state of a request and its live samples to `state`, WAITING or SWAPPED, and put it into that queue.

        A waiting request has no pages, so none that several versions of the weights have computed (`has_mixed_pages`),
        and each sample with a parent waits again for the parent to compute the tokens that both share. A swapped
        request keeps its pages in the host pool.
        """
        request.state = state
        if state is RequestState.WAITING:
            request.has_mixed_pages = False
        for sequence in request.live:
            sequence.state = state
            if state is RequestState.WAITING:
                sample_tree.set_waiting(sequence, sequence.parent is not None)
        self.admission.requeue(request)
        self._has_changed = True

    def _leave(self, request: Request) -> None:
        """Take a request out of the running requests, and tell the gate; or out of its queue if it does not run."""
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
        """Return a word for what a sequence is doing, such as "waiting" or "decoding", for counts and logs."""
        if sequence.state is not RequestState.RUNNING:
            return sequence.state.label
        return "decoding" if sequence.is_last_token_on_device else "prefilling"

    # Samples that begin with the pages of another sample

    def fork(
        self,
        parent: SampleSequence,
        indices: Sequence[int],
        num_tokens: int | None = None,
        first_token_ids: Sequence[int] | None = None,
    ) -> list[SampleSequence]:
        """Add copies of the live sample `parent` to its request, one for each sample index in `indices`; return them.

        A copy has the first `num_tokens` tokens of the parent, by default all that the host knows, and shares the pages
        of all of them but the last. Before a sample writes a partly filled page that others share, it gets a copy of
        that page. `first_token_ids` are the tokens that the copies draw first, whatever the logits are. Raise
        InvalidRequestError, and change nothing, if the request could not run alone with so many samples.
        """
        num_tokens = len(parent.token_ids) if num_tokens is None else num_tokens
        self.demand.check_fork(parent, len(indices), self.config.max_num_seqs, num_tokens)
        tokens = [None] * len(indices) if first_token_ids is None else first_token_ids
        return [self._fork(parent, *one, num_tokens) for one in zip(indices, tokens, strict=True)]

    def _fork(self, parent: SampleSequence, index: int, first_token_id: int | None, num_tokens: int) -> SampleSequence:
        """Add one copy of `parent` with sample index `index` to its request, and return the copy.

        `fork` has checked that the request can run with one more sample. The copy shares the parent's pages now, or
        later if the parent has not computed the shared tokens yet. It has no state slot yet: the scheduler gives it one
        when it takes part in a step. Example: of a parent with 10 tokens, the copy shares 9 and computes the last.

        A window of the parent may have passed pages that the copy needs. The copy then computes its tokens itself, and
        a swapped request, whose pages lie in the other pool, is computed anew as a whole.
        """
        request = parent.request
        child = request.new_sequence(index, parent.token_ids[:num_tokens], self.arithmetic.num_groups, parent=parent)
        child.state = parent.state
        child.given_token = None if first_token_id is None else (num_tokens, first_token_id)
        # All tokens but the last are shared. The child computes the last one itself, to have logits to draw from.
        num_shared = num_tokens - 1
        # A parent that has computed nothing may have no pages: the child waits even if it shares no token.
        sample_tree.attach(child, parent, awaits_parent=parent.num_computed < max(1, num_shared))
        self._has_changed = True
        self.counts["fork"] += 1
        if child.awaits_parent:
            return child
        if request.state is RequestState.SWAPPED and not self.blocks.can_share(parent, num_shared):
            self.recompute(request)
        else:
            self.share_with_parent(child)
        return child

    def branch(self, request: Request, parents: Sequence[SampleSequence]) -> list[SampleSequence]:
        """Make the live samples of a request continue `parents`; return the successor of each parent, in that order.

        This is one step of a beam search. `parents` are live samples of the request, and one that several chosen beams
        continue is in the list several times. Its first successor is the parent itself. Each further successor is a
        live sample that is no parent: it gives up its own pages and shares the parent's, and the caller copies the
        tokens. Example: samples a, b, c with the parents (a, a, c) give the successors (a, b, c). There must be enough
        such samples; those left over end, and without parents all of them do. No step in flight may compute the
        request.
        """
        idle = [sample for sample in request.live if all(sample is not parent for parent in parents)]
        successors: list[SampleSequence] = []
        for parent in parents:
            successor = idle.pop() if parent in successors else parent
            if successor is not parent:
                self._clone(parent, successor)
            successors.append(successor)
        for sample in idle:
            self.finish(sample, RequestState.FINISHED_STOPPED)
        return successors

    def _clone(self, parent: SampleSequence, sequence: SampleSequence) -> None:
        """Make a sample give up its slot and pages and become a child of `parent` that shares all of its tokens.

        If the parent has computed all its tokens, the sample shares the parent's pages now; otherwise it waits for the
        parent. Only the number of tokens is set here: the caller copies the tokens themselves.
        """
        self.release(sequence)
        self.prefixes.forget_hashes(sequence)
        progress.set_num_tokens(sequence, parent.num_tokens)
        sample_tree.move_under(sequence, parent, awaits_parent=parent.num_computed < parent.num_tokens)
        self._has_changed = True
        if not sequence.awaits_parent:
            self._share_all(parent, sequence, parent.num_tokens)

    def share_with_parent(self, sequence: SampleSequence) -> None:
        """Give a sample that has no pages its parent's pages of the tokens that both share and the parent has computed.

        The sample's last token is not shared: the sample computes it itself, to have logits for its next token.

        Nothing is shared with the parent in two cases. Either the sample has no parent any more, or the parent's
        sliding windows have given back pages that the sample needs. The second case arises if the first parent has
        ended and the sample's new parent has computed far more than the shared tokens. In both cases the sample waits
        for no parent any more. It starts from the pages that the prefix cache has of its tokens, and computes all
        tokens after them in pages of its own. If too few pages are free to take the cached ones, it starts at its first
        token.
        """
        parent, num_shared = sequence.parent, min(sequence.fork_len, sequence.num_tokens - 1)
        if parent is not None and self.blocks.can_share(parent, num_shared):
            self._share_all(parent, sequence, num_shared)
            return
        sample_tree.share_nothing(sequence)
        match = self.prefixes.match(sequence, self.demand.match_limit(sequence))
        if self.prefixes.num_free_needed(match) <= self.blocks.num_free:
            progress.start_at(sequence, self.blocks.adopt(sequence, match))

    def share(self, parent: SampleSequence, child: SampleSequence, num_tokens: int) -> None:
        """Give `child` the pages of the first `num_tokens` tokens, computed by its parent before or in this step."""
        self.blocks.share(parent, child, num_tokens)
        progress.start_at(child, num_tokens)
        sample_tree.set_waiting(child, False)

    def _share_all(self, parent: SampleSequence, child: SampleSequence, num_tokens: int) -> None:
        """Give `child` the parent's pages of its first `num_tokens` tokens, and stop the parent from decoding on.

        The last of these pages may be partly filled, and the parent may be decoding into it. So the parent's decode
        limit becomes 0: before it decodes its next token, the scheduler checks it again and copies the page if both
        still reference it. A step in flight may still write that page for the parent. `defer_free` therefore keeps the
        page from reuse until that step has retired, even if both sequences give it back before.
        """
        self.share(parent, child, num_tokens)
        progress.set_decode_limit(parent, 0)
        self.defer_free(parent)
