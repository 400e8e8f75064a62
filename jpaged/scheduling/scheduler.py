"""Chooses which requests compute which tokens in the next step.

A running sequence either decodes, one token a step, or still has tokens that the host knows and its pages do not
hold: a chunk of them is computed. In nearly all steps nearly all sequences decode, so how far a sequence may go
without a check is written down in it (`SampleSequence.decode_limit`), and only those that have come so far are checked.

Results may be up to two steps late: `schedule` counts every token as computed once it is scheduled, `retire` learns
that it is. Knows requests and pages; no array, no device, no text. The only writer of `num_scored` of requests and
sequences, and of `first_scheduled_time` and `num_cached_tokens` of requests.
"""

from __future__ import annotations

from ..kv_cache import sample_tree
from ..kv_cache.block_manager import BlockManager
from ..kv_cache.prefix_cache import PrefixMatch
from ..request import Request, RequestState, SampleSequence
from . import progress
from .admission import StepRoom
from .lifecycle import Lifecycle
from .scheduler_config import Clock, SchedulerConfig
from .scheduler_output import AdmissionGate, Chunk, SchedulerOutput, scored_end
from .step_shape import StepShape


class Scheduler(Lifecycle):
    """Continuous batching with chunked prefill, priorities, and preemption by recompute or by swap.

    How a request gets from state to state is inherited from `Lifecycle`; which one does, and when, is decided here.
    """

    def __init__(
        self, blocks: BlockManager, config: SchedulerConfig, *, clock: Clock, gate: AdmissionGate | None = None
    ):
        """Start without requests. `clock` returns the time in seconds.

        `gate` is asked before a request may run, and may refuse it; None admits every request.
        """
        super().__init__(blocks, config, clock=clock, gate=gate)
        self.isolated_request: Request | None = None
        """While set, only this request is admitted, and only once no other request runs."""
        self.shape = StepShape(config)
        self._work = SchedulerOutput(0)
        """The step that is being scheduled, or was scheduled last."""
        self._room: StepRoom
        """The room that chunks have left in that step."""

    def stats(self) -> dict[str, int]:
        """Return counts under the names of `Engine.stats`: requests now, preemptions and prompt chunks since start.

        `preemptions` is the sum of those by recompute and by swap. `prefill_chunks` leaves out each sequence's last
        chunk, after which it draws a token.
        """
        num_recomputed, num_swapped = self.counts["preemptions_recompute"], self.counts["preemptions_swap"]
        return {
            "prefill_chunks": self.counts["prefill_chunks"],
            "preemptions": num_recomputed + num_swapped,
            "preemptions_recompute": num_recomputed,
            "preemptions_swap": num_swapped,
            "requests_running": len(self.running),
            "requests_waiting": len(self.waiting),
            "requests_swapped": len(self.swapped),
        }

    def note_new_weights(self, num_updates: int) -> None:
        """Record that the weights have changed. `num_updates` counts updates since start; no step may be in flight.

        Requests that have pages keep them and continue with the new weights. Other requests have no pages, so they
        score their prompts again from the start. No cached prefix of the old weights is found any more, and pins apply
        to pages that the new weights compute.
        """
        self.prefixes.renew(num_updates)
        self.mix_pages()
        for request in self.unfinished:
            if not request.has_mixed_pages:
                request.num_scored = 0
                for sequence in request.live:
                    sequence.num_scored = request.first_scored

    # The step

    def schedule(self) -> SchedulerOutput:
        """Choose the tokens of the next step.

        Running requests are served first, in order. When pages run out, and no step in flight is about to free some,
        the last running request is preempted: it gives all of its pages back. Then swapped requests are swapped in and
        waiting ones are admitted, but not in a step that preempted a request: memory is short, and a newcomer would
        cause the next preemption. If prompts have kept sequences from decoding for too long, the step has no chunks.
        Scheduled tokens count as computed from here on, before the device computes them. The result may be empty: it
        then gets no step number, and the next call uses that number.
        """
        work = self._work = SchedulerOutput(self.step + 1)
        now = self.clock()
        sequences, tokens_ahead = self.sequences, self.config.tokens_ahead
        # Most sequences are below their decode limit, which says how far they may decode without a check. Only the
        # others are looked at one by one: they get slots or pages, or turn out to need a chunk.
        in_need = [s for s in sequences if s.num_computed + tokens_ahead > s.decode_limit]
        prefilling = [sequence for sequence in in_need if self._provide(sequence)]
        decodes = [s for s in sequences if s.num_computed < s.decode_limit]
        if not (decodes and self.shape.must_decode):
            budget, max_scored = self.shape.prefill_budget(len(decodes)), self.config.max_scored_tokens
            slots, running = self.free_slots, self.running
            self._room = StepRoom(work.step, now, budget, max_scored, slots, running, self.retired_step)
            for sequence in prefilling:
                self._add_chunk(sequence)
            if not work.preempted:
                self._swap_in()
            if not work.preempted:
                self._admit()
        self._drop_preempted(decodes)
        decodes = self.shape.choose_decodes(decodes, work.chunks)
        if work.chunks and self.config.enable_chunked_prefill:
            self.counts["chunks_cut"] += self.shape.cut_to_bucket(work.chunks, len(decodes))
        if self._may_decode_several(sequences, decodes):
            work.decode_lens.extend(self._decode_lens(decodes))
        work.decodes.extend(decodes)
        self._count_as_computed(work)
        work.table_changes[:], work.moves[:] = self.blocks.take_changes()
        if not work.is_empty:
            self.step = work.step
        return work

    def retire(self, work: SchedulerOutput) -> None:
        """Record that the oldest step in flight, `work`, is done.

        Pages that only this step could still write may be reused, its scored prompt tokens count, and pages that the
        sliding windows of its chunks have passed are given back. The tokens that the step has drawn are not looked at:
        `update_pages` gives back what they pass.
        """
        self._note_retired(work.step)
        self.admission.retire(work.step, self.clock())
        for chunk in work.chunks:
            sequence, request = chunk.sequence, chunk.sequence.request
            end = chunk.start + chunk.num_tokens
            request.num_scored = max(request.num_scored, min(end, request.prompt_len))
            sequence.num_scored = max(sequence.num_scored, end)
            # The pages of a prompt's last chunk are published only once the token that it draws is known. A request
            # with the same prompt would then start after the last full page that leaves it a token to compute: at
            # token 8 of 10, and also of 12, with pages of 4 tokens. The pages that a window reads from there are kept.
            num_known, block_size = len(sequence.token_ids), self.arithmetic.block_size
            num_done = end if end < num_known else (num_known - 1) // block_size * block_size
            self._pass_windows(sequence, num_done)

    def update_pages(self, sequence: SampleSequence) -> None:
        """Offer a sequence's full pages to the prefix cache, and give back pages that its sliding windows have passed.

        Call this after a new token was appended, if the host then knows more than `check_at_len` tokens, and before the
        sequence ends. All tokens before the new one are computed, and their pages hold no NaN, since the logits that
        the token was drawn from were finite. `check_at_len` becomes the number of known tokens up to which no call is
        needed. A sequence that was preempted while its step was in flight has lost its pages or has them on the host:
        it offers none. Example with pages of 4 tokens: at 9 known tokens, the first 2 pages are offered, and
        `check_at_len` becomes 12 (or less if the sequence ends before), so the next call comes at 13 tokens.
        """
        num_known = len(sequence.token_ids)
        if sequence.state is RequestState.RUNNING:
            self.prefixes.publish(sequence, num_known - 1)
            page_end = self.arithmetic.pages_for(num_known) * self.arithmetic.block_size
            # Two later tokens need a check: the one after `page_end` tokens, which shows that the page of the new token
            # is full and sound, and token number `max_len`, which ends the sequence.
            progress.set_check(sequence, min(page_end, sequence.max_len - 1))
        # A sequence that is swapped out gives back host pages here. One that waits has no pages, so nothing happens.
        # Both keep `check_at_len` 0, so this is called for each of their tokens until they run again.
        self._pass_windows(sequence, num_known - 1)

    def finish_scored(self, sequence: SampleSequence) -> None:
        """End a sequence whose tokens are all scored, and offer its full pages to the prefix cache.

        Samples of its request that wait for it get its pages before.
        """
        if sequence.state is RequestState.RUNNING:
            self._share_with_waiting(sequence)
            self.prefixes.publish(sequence, sequence.num_computed)
        self.finish(sequence, RequestState.FINISHED_LENGTH)

    def count_chosen_token(self, sequence: SampleSequence) -> None:
        """Note a new token that was chosen by the host, as a beam search does, and not drawn on the device."""
        progress.set_num_tokens(sequence, sequence.num_tokens + 1)
        self.update_pages(sequence)

    def _pass_windows(self, sequence: SampleSequence, num_done: int) -> None:
        """Give back the sequence's pages that no query at position `num_done` or later reads through a sliding window.

        Before that, children that wait for this sequence share its pages, if it has computed all tokens that they have
        in common: they may need pages that are about to be given back. A child needs no state slot for that. Without
        sliding windows this does nothing: such children are served when they get their slot.
        """
        if not self.arithmetic.window_groups:
            return
        self._share_with_waiting(sequence)
        self.blocks.pass_windows(sequence, num_done)

    def _share_with_waiting(self, sequence: SampleSequence) -> None:
        """Give children that wait for this sequence its pages, if it has computed all that they have in common."""
        for child in sample_tree.children_of(sequence):
            if child.awaits_parent and child.fork_len <= sequence.num_computed:
                self.share_with_parent(child)

    # Running sequences

    def _provide(self, sequence: SampleSequence) -> bool:
        """Give a running sequence the state slot and the pages that it needs next, possibly by preempting others.

        Return True if it still has tokens that the host knows and that must be computed as a chunk. Return False if it
        can decode, or must wait for a slot, for pages or for its parent, or was itself preempted.
        """
        if sequence.state is not RequestState.RUNNING:
            return False  # Its request was preempted or ended in this step, to give pages to an earlier one.
        if not sequence.seq_slot and not self._provide_slot(sequence):
            return False
        if sequence.awaits_parent and not self._attach(sequence):
            return False
        if not sequence.is_last_token_on_device:
            return True
        self._extend(sequence)
        return False

    def _extend(self, sequence: SampleSequence) -> None:
        """Get pages for a sequence's next tokens, and a last page of its own; then raise its decode limit to match."""
        # The last token ends the sequence, so its keys and values are never computed.
        num_tokens = min(sequence.num_computed + self.config.tokens_ahead, sequence.max_len - 1)
        if num_tokens > sequence.num_computed and self._make_room(sequence, num_tokens):
            self._set_decode_limit(sequence)

    def _set_decode_limit(self, sequence: SampleSequence) -> None:
        # A sequence that decodes has equally many pages in all groups.
        page_end = len(sequence.pages[0]) * self.arithmetic.block_size
        progress.set_decode_limit(sequence, min(page_end, sequence.max_len - 1))

    def _add_chunk(self, sequence: SampleSequence) -> None:
        """Add a chunk of a sequence's next known tokens to the step: the longest one that the step has room for.

        `_room` limits the tokens of chunks and the prompt tokens that the step can score, and is reduced by the chunk.
        A chunk also ends where a child that waits for this sequence begins to differ from it (a fork point). Pages are
        taken, if need be by preempting later requests. Add nothing if the step has no room, if pages are missing, or if
        the sequence does not run any more. Without chunked prefill, the chunk holds all pending tokens up to the next
        fork point, or nothing is added. Example: of a prompt of 100 tokens that begins to run, a step with room for 64
        tokens computes 64, or 40 if a child that shares 40 tokens waits.
        """
        if sequence.state is not RequestState.RUNNING:
            return
        config, room, start = self.config, self._room, sequence.num_computed
        # The chunk ends at the next fork point, so that a child which waits for this sequence can share its pages then.
        fork_lens = [child.fork_len for child in sample_tree.children_of(sequence) if child.awaits_parent]
        end = min([sequence.num_tokens, *(fork_len for fork_len in fork_lens if fork_len > start)])
        max_end = scored_end(sequence, start, room.score_budget)
        if config.enable_chunked_prefill:
            end = min(end, start + room.token_budget, start + config.max_chunk, max_end)
        elif end - start > room.token_budget or end > max_end:
            return
        if end <= start or not self._make_room(sequence, end):
            return
        is_drawn = sequence.request.scoring is None
        samples = tuple(sample_tree.samples_drawn_at(sequence, end)) if is_drawn else ()
        chunk = Chunk(sequence, start, end - start, samples)
        self._work.chunks.append(chunk)
        room.token_budget -= chunk.num_tokens
        room.score_budget -= len(chunk.scored)

    def _make_room(self, sequence: SampleSequence, num_tokens: int) -> bool:
        """Get the pages for a sequence's first `num_tokens` tokens; return whether the sequence has them.

        While too few pages are free, the last running request is preempted and gives its pages back. Return False if a
        step in flight will free pages when it retires, which the sequence then awaits. Return False too if its own
        request is the last running one: the request then waits for steps in flight, or has been preempted or ended.
        Waiting for a retirement raises the counter `awaited_retirement`.
        """
        while not self.blocks.prepare(sequence, num_tokens):
            if self.blocks.has_deferred:
                self.counts["awaited_retirement"] += 1
                return False
            if not self._preempt_last(sequence.request):
                return False
        return True

    def _provide_slot(self, sequence: SampleSequence) -> bool:
        """Give a forked sample a state slot, if need be by preempting later requests.

        The sample then counts among the step's `new_in_slots`. Return False, and wait, if no slot is free and its own
        request is the last running one: a request never preempts itself for a slot.
        """
        while not self.free_slots:
            if self.running[-1] is sequence.request:
                return False
            self._preempt_last(sequence.request)
        self.take_slot(sequence)
        self._work.new_in_slots.append(sequence)
        return True

    def _attach(self, sequence: SampleSequence) -> bool:
        """Give a waiting sample its parent's pages; return whether the sample can continue in this step.

        Return False, and share nothing, while the parent has not computed the tokens that both share. A sample without
        a parent, since its parent has ended, starts by itself. Sharing stops the parent from decoding until its last
        page is its own again; a parent that could decode before gets that page here. Return False too if the request
        was preempted in this call.
        """
        parent = sequence.parent
        if parent is not None and parent.num_computed < sequence.fork_len:
            return False
        could_decode = parent is not None and parent.decode_limit > 0
        self.share_with_parent(sequence)
        if parent is not None and could_decode and not parent.decode_limit:
            # The parent could decode in this step until its last page was shared. For lack of pages this may preempt
            # their own request.
            self._extend(parent)
        return sequence.state is RequestState.RUNNING

    def _preempt_last(self, asking: Request) -> bool:
        """Take the pages of the last running request for the request `asking`; return whether that can try again.

        The last request is preempted, or ended if it could no longer run even alone. Return True if it was another
        request than `asking`. If `asking` is the last one itself, return False: it keeps its pages and waits while
        steps are in flight, and is preempted or ended otherwise.
        """
        request = self.running[-1]
        if request is asking and self.step > self.retired_step:
            return False  # Results in flight may end a sequence, and waiting for them costs less.
        if self.demand.fits_alone(request):
            self._work.preempted.append(self.preempt(request))
        else:
            self._ignore(request)
        return request is not asking

    def _ignore(self, request: Request) -> None:
        """End an accepted request that can never run: the gate has found a fault, or the pool has become smaller."""
        max_pages, available = self.demand.max_pages(request), self.demand.available
        too_small = f"the pool has become too small: it needs up to {max_pages} pages, and there are {available}"
        self.fail(request, self.admission.gate_fault(request) or too_small, RequestState.FINISHED_IGNORED)
        self.counts["ignored"] += 1
        self._work.ignored.append(request)

    # Requests that begin to run

    def _swap_in(self) -> None:
        """Let swapped requests run again, in order, as long as they fit.

        A request gets its pages back from the host pool. Then a chunk of its known tokens that are not computed yet is
        added for each sample, except samples that wait for their parent. Adding one may preempt a request: then stop,
        since memory is short. Requests that can never run again end.
        """
        for request, can_run in self.admission.choose_swapped(self._room):
            if not can_run:
                self._ignore(request)
                continue
            # Pages first: `swap_in` reads the host pages of requests whose state is still SWAPPED.
            self.blocks.swap_in(request.live)
            self.run(request)
            self._work.new_in_slots.extend(request.live)
            self.counts["swap_in"] += 1
            for sequence in request.live:
                if not sequence.awaits_parent:
                    self._add_chunk(sequence)
            if self._work.preempted:
                return

    def _admit(self) -> None:
        """Let waiting requests run as long as they fit."""
        for request, match in self.admission.choose_waiting(self._room, self.isolated_request):
            if match is None:
                self._ignore(request)
            else:
                self._start(request, match)

    def _start(self, request: Request, match: PrefixMatch) -> None:
        """Let a waiting request run: adopt the cached pages of `match`, and add the first chunk of its first sample.

        The other samples wait for the first one to compute the tokens that they share. At a request's first start, its
        time and the number of cached tokens are recorded. `Admission` has checked that the pages and the chunk fit, so
        a chunk is always added.
        """
        first = request.live[0]
        num_cached = self.blocks.adopt(first, match)
        progress.start_at(first, num_cached)
        sample_tree.set_waiting(first, False)
        self.run(request)
        self._work.new_in_slots.extend(request.live)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self._room.start_time
            request.num_cached_tokens = num_cached
            self.prefixes.count_query(first.num_tokens, num_cached)
        num_chunks = len(self._work.chunks)
        self._add_chunk(first)
        assert len(self._work.chunks) > num_chunks, "its pages were counted"

    # The end of the step

    def _drop_preempted(self, decodes: list[SampleSequence]) -> None:
        """Remove sequences that were preempted or ended while this step was scheduled from its work and from `decodes`.

        The lists change in place. Such a sequence does not run, has no state slot, and has a decode limit of 0; each
        list is filtered by one of these. Without preemptions nothing changes.
        """
        work = self._work
        if work.preempted or work.ignored:
            work.chunks[:] = [chunk for chunk in work.chunks if chunk.sequence.state is RequestState.RUNNING]
            work.new_in_slots[:] = [sequence for sequence in work.new_in_slots if sequence.seq_slot]
            decodes[:] = [sequence for sequence in decodes if sequence.num_computed < sequence.decode_limit]

    def _may_decode_several(self, sequences: list[SampleSequence], decodes: list[SampleSequence]) -> bool:
        """Return whether `decodes` may each decode several tokens in this step.

        `sequences` are all running ones. No other work may be due: no chunk, no preemption, no queued request, and no
        running sequence that waits to decode. The sampling mode of each request must allow it, and the host must not
        await each of its tokens. With `max_decode_steps=1`, or no sequence in `decodes`, the result is False.
        """
        work = self._work
        if self.config.max_decode_steps == 1 or not decodes:
            return False
        if work.chunks or work.preempted or len(self.waiting) or len(self.swapped):
            return False
        # A sequence that has drawn its last possible token has nothing to decode; the host is about to read the token.
        is_all = all(s.num_computed < s.decode_limit or s.num_computed == s.max_len - 1 for s in sequences)
        modes = self.shape.limits.several_modes
        return is_all and all(s.request.mode in modes and not s.request.awaits_each_token for s in decodes)

    def _decode_lens(self, decodes: list[SampleSequence]) -> list[int]:
        """Return how many tokens each of `decodes` decodes one after another in this step; empty means one token each.

        A sequence decodes at most `max_decode_steps` tokens, and no more than its pages hold or its length allows. More
        pages are taken for it if they are free, never from another request. `StepShape.even_out` then lowers the counts
        so that the step does not run long for a few sequences. The last token of a sequence ends it and is never
        computed, hence `max_len - 1`.
        """
        lens, max_steps = [], self.config.max_decode_steps
        for sequence in decodes:
            end = min(sequence.num_computed + max_steps, sequence.max_len - 1)
            if end > sequence.decode_limit and self.blocks.prepare(sequence, end):
                self._set_decode_limit(sequence)
            lens.append(min(sequence.decode_limit - sequence.num_computed, max_steps))
        return self.shape.even_out(lens)

    def _count_as_computed(self, work: SchedulerOutput) -> None:
        """Count the step's tokens as computed, before the device computes them.

        A child that draws its first token from the last position of its parent's chunk shares the parent's pages up to
        the chunk's end, and no longer waits. Chunks that end before their sequence's last token raise the counter
        `prefill_chunks`; a sequence's last chunk, after which it draws a token, does not.
        """
        for chunk in work.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
            self.counts["prefill_chunks"] += end < sequence.num_tokens
            for sample in chunk.samples:
                if sample is not sequence:
                    self.share(sequence, sample, end)
        progress.count_step(work)
