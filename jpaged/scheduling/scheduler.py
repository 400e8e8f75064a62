"""Chooses which requests compute which tokens in the next step.

    waiting ──admit──▶ running ──finish──▶ (gone)
       ▲                │    ▲
       └──recompute─────┘    └──swap in── swapped ◀── swap out ── running

A running sequence either decodes, one token a step, or still has tokens that the host knows and the pages do
not hold: a chunk of them is computed. Nearly all steps are nearly all decoding, so how far a sequence may go
unasked is written down in it (`Sequence.granted`), and only those that have come so far are looked at.

Results may be up to two steps late: `schedule` counts every token as computed once it is scheduled, `retire`
learns that it is. Knows requests and pages; no array, no device, no text.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from .admission import Admission
from .block_manager import BlockManager
from .buckets import LEAST_FILLED, filled_tokens
from .errors import InvalidRequestError
from .fork_tree import children_of, leave_children, num_distinct, samplers_of
from .page_demand import PageDemand
from .preemption import Preemption, PreemptionMode, PreemptionPolicy
from .prefix_cache import PrefixMatch
from .request import Request, RequestState, Sequence
from .request_queue import POLICIES, PolicyKey, QueueLimits, RequestQueue
from .schedule import AdmissionGate, Chunk, SchedulerOutput

MAX_WITHHELD = 8
"""Steps in a row in which prompts that are computed whole keep others from decoding."""


class Scheduler:
    """Continuous batching with chunked prefill, priorities, and preemption by recompute or by swap."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        watermark: float = 0.0,
        clock: Callable[[], float],
        policy: PolicyKey = POLICIES["fcfs"],
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        delay_factor: float = 0.0,
        preemption: PreemptionPolicy | None = None,
        limits: QueueLimits | None = None,
        gate: AdmissionGate | None = None,
        tokens_ahead: int = 1,
        max_decode_steps: int = 1,
        token_buckets: SequenceOf[int] = (),
        least_filled: int = LEAST_FILLED,
        max_scored: int | None = None,
    ):
        """`watermark` is the share of the pool that admission leaves free for those that run.

        `delay_factor` lets newcomers wait that many times as long as the last step with newcomers took, for
        others to come along. `tokens_ahead` are the tokens that a decoding sequence has pages for, at least.
        `max_decode_steps` is how many tokens sequences may decode one after another in one step, where nothing else
        is to be done; `token_buckets` are the padded numbers of tokens, ascending, that steps come in,
        of which those from `least_filled` on are filled. `max_scored` bounds the prompt tokens of a step that are
        scored, where their logprobs take much room.
        """
        assert max_num_seqs <= max_num_batched_tokens, "a step cannot decode all sequences"
        self.blocks = blocks
        self.demand = PageDemand(blocks)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.clock = clock
        self.enable_chunked_prefill = enable_chunked_prefill
        self.max_chunk = long_prefill_token_threshold or max_num_batched_tokens
        self.preemption = preemption or PreemptionPolicy()
        self.tokens_ahead = tokens_ahead
        self.max_decode_steps = max_decode_steps
        self.token_buckets = tuple(token_buckets)
        self.least_filled = least_filled
        self.max_scored = max_scored or max_num_batched_tokens
        self.admission = Admission(
            self,
            policy=policy,
            limits=limits,
            watermark=watermark,
            delay_factor=delay_factor,
            gate=gate,
        )
        self.running: list[Request] = []
        """By `Request.order`: the last one gives way first."""
        self.sequences: list[Sequence] = []
        """Live sequences of the running requests, in their order."""
        self.free_slots = list(range(max_num_seqs, 0, -1))
        self.step = 0
        """The last one scheduled."""
        self.retired_step = 0
        self.counts: Counter[str] = Counter()
        self.unfinished: dict[Request, None] = {}
        """Every request that was added and has not ended, wherever it stands."""
        self.ended: dict[Request, None] = {}
        """Requests that have ended; whoever tells their callers clears it."""
        self._has_new_members = False
        self._first_decode = 0
        self._num_withheld = 0
        self._work = SchedulerOutput(self.step)

    # Requests come and go

    def add(self, request: Request) -> None:
        """Queue a request. InvalidRequestError if it can never fit, QueueFullError if too many wait."""
        self.check(request)
        self.admission.add(request)
        self.unfinished[request] = None

    def check(self, request: Request) -> None:
        """InvalidRequestError if the request can never fit, or its policy's key cannot be sorted."""
        self.demand.check(request, self.max_num_seqs)
        if request.needs_prompt_scores and not self.enable_chunked_prefill and request.prompt_len - 1 > self.max_scored:
            raise InvalidRequestError(
                f"prompt_logprobs: got a prompt of {request.prompt_len} tokens while enable_chunked_prefill is false, "
                f"allowed: at most {self.max_scored + 1}, as many as a step has room for while max_logprobs is -1; "
                "leave chunked prefill on, or start the engine with a max_logprobs that is a number of tokens",
                param="prompt_logprobs",
            )
        self.admission.check(request)

    def fork(self, parent: Sequence, indices: SequenceOf[int]) -> list[Sequence]:
        """Further samples of the same request, equal so far, with sample indices of their own.

        They share the parent's pages; whoever writes the half-filled last one first gets a copy. Raises
        InvalidRequestError, changing nothing, if the request could not go on with so many samples.
        """
        self.demand.check_fork(parent, len(indices), self.max_num_seqs)
        return [self._fork(parent, index) for index in indices]

    def _fork(self, parent: Sequence, index: int) -> Sequence:
        child = parent.request.new_sequence(index, parent.token_ids, self.blocks.num_groups)
        child.parent, child.fork_len, child.state = parent, child.num_tokens, parent.state
        # All but its last token, which it computes itself to draw the next one. What is not yet computed, the
        # parent computes for both.
        num_shared = child.num_tokens - 1
        child.awaits_parent = parent.num_computed < max(1, num_shared)
        if not child.awaits_parent:
            self._share(parent, child, num_shared)
        self._has_new_members = True
        self.counts["fork"] += 1
        return child

    def branch(self, request: Request, choices: SequenceOf[tuple[Sequence, int]]) -> list[Sequence]:
        """Let the samples of a request go on as these ones do, each with a token more; returns which has which choice.

        A sample that is chosen goes on once in its own place; the others take the places of those that are not, and
        share its pages. Nothing of the request may be in flight. Samples beyond the choices end.
        """
        idle = [one for one in request.live if all(one is not parent for parent, _ in choices)]
        heirs: list[Sequence] = []
        for parent, _ in choices:
            heir = idle.pop() if parent in heirs else parent
            if heir is not parent:
                self._become(heir, parent)
            heirs.append(heir)
        for heir, (_, token_id) in zip(heirs, choices, strict=True):
            heir.token_ids.append(token_id)
            heir.num_tokens += 1
        for heir in heirs:
            self.note_token(heir)
        for one in idle:
            self.finish(one, RequestState.FINISHED_STOPPED)
        return heirs

    def _become(self, sequence: Sequence, parent: Sequence) -> None:
        """Make a sample equal to another one of its request, which shares its pages with it."""
        request = sequence.request
        self._release(sequence)
        request.live.remove(sequence)
        leave_children(sequence)
        request.live.append(sequence)
        sequence.token_ids, sequence.num_tokens = parent.token_ids[:], parent.num_tokens
        sequence.parent, sequence.fork_len = parent, parent.num_tokens
        sequence.awaits_parent = parent.num_computed < parent.num_tokens
        if not sequence.awaits_parent:
            self._share(parent, sequence, parent.num_tokens)
        self._has_new_members = True

    def finish(self, sequence: Sequence, state: RequestState) -> None:
        """End one sequence and free what it holds; its request ends with its last sequence. Later calls do nothing."""
        if sequence.state.is_finished:
            return
        request = sequence.request
        if state is RequestState.FINISHED_ABORTED:
            self.counts[f"abort_{self._stage_of(sequence)}"] += 1
        elif state is RequestState.FINISHED_ERROR:
            self.blocks.prefixes.discard(sequence)
        self._release(sequence)
        sequence.state = state
        request.live.remove(sequence)
        leave_children(sequence)
        self._has_new_members = True
        if request.live:
            return
        self._leave_queue(request)
        self._end(request, state)

    def _end(self, request: Request, state: RequestState) -> None:
        request.state, request.finished_time = state, self.clock()
        self.ended[request] = None
        del self.unfinished[request]

    def is_in_flight(self, sequence: Sequence) -> bool:
        """A step that was scheduled and has not retired computes tokens of this sequence."""
        return sequence.num_tokens > len(sequence.token_ids) or sequence.last_chunk_step > self.retired_step

    @property
    def waiting(self) -> RequestQueue:
        return self.admission.waiting

    @property
    def swapped(self) -> RequestQueue:
        return self.admission.swapped

    @property
    def has_preempted(self) -> bool:
        """The step that is being scheduled took the pages of somebody."""
        return bool(self._work.preempted)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.unfinished)

    # The step

    def schedule(self) -> SchedulerOutput:
        """Choose the tokens of the next step.

        Running requests come first, in order. Where pages run out, and no step in flight is about to free some,
        the last running request gives all of its pages back. Then those that were swapped out come back, then
        newcomers are admitted; neither in a step that preempted somebody: memory is short then, and they would
        cause the next preemption.
        """
        work = self._work = SchedulerOutput(self.step + 1)
        self.admission.step_time = self.clock()
        self._note_members()
        asking = [s for s in self.sequences if s.num_computed + self.tokens_ahead > s.granted]
        prefilling = [sequence for sequence in asking if self._serve(sequence)]
        decodes = [s for s in self.sequences if s.num_computed < s.granted]
        if not decodes or self._num_withheld < MAX_WITHHELD:
            budget = self._prefill_budget(len(decodes))
            for sequence in prefilling:
                budget -= self._chunk(sequence, budget)
            budget -= self.admission.bring_back(budget)
            if not work.preempted:
                self.admission.admit(budget)
        self._commit(decodes)
        return work

    def retire(self, work: SchedulerOutput) -> None:
        """The oldest step in flight is done: what it computed is computed, and freed pages may be reused."""
        self.retired_step = work.step
        self.blocks.device.retire(work.step)
        self.admission.retire(work.step)
        for chunk in work.chunks:
            sequence, request = chunk.sequence, chunk.sequence.request
            end = chunk.start + chunk.num_tokens
            request.num_scored = max(request.num_scored, min(end, request.prompt_len))
            self.blocks.pass_windows(sequence, end)

    def note_token(self, sequence: Sequence) -> None:
        """A sequence got a token that may fill a page: the ones before are computed, and sound.

        Only here are pages published. `next_check` says behind which token the next call is due.
        """
        num_known = len(sequence.token_ids)
        self.blocks.pass_windows(sequence, num_known - 1)
        if sequence.state is not RequestState.RUNNING:
            return  # It is looked at with every token until it runs again.
        self.blocks.prefixes.publish(sequence, num_known - 1)
        next_page = self.blocks.pages_for(num_known) * self.blocks.block_size
        sequence.next_check = min(next_page, sequence.max_len - 1)

    def is_publishing(self, request: Request) -> bool:
        """Whether a running request's prompt is computed, or about to be, and not yet in the prefix cache."""
        first, prefixes = request.live[0], self.blocks.prefixes
        return prefixes.is_enabled and first.num_published < request.prompt_len // self.blocks.block_size

    def restart(self) -> None:
        """The device has lost what it held, and all results in flight: everything live is to be computed anew.

        Whatever was broken off in the middle is set up again from the requests alone.
        """
        if self.admission.gate is not None:
            for request in self.running:
                self.admission.gate.leave(request)
        self.running.clear()
        self.admission.clear()
        self.free_slots = list(range(self.max_num_seqs, 0, -1))
        self.blocks.clear()
        self.retired_step = self.blocks.device.retired_step = self.step
        for request in list(self.unfinished):
            if not request.live:
                self._end(request, request.sequences[-1].state)
                continue
            request.num_preemptions += request.state is not RequestState.WAITING
            for sequence in request.sequences:
                if sequence not in request.live:
                    leave_children(sequence)
            for sequence in request.live:
                sequence.num_tokens = len(sequence.token_ids)
                sequence.last_chunk_step = 0
                sequence.forget_pages()
            self._stop(request, RequestState.WAITING, self.waiting)
        self.counts["restart"] += 1

    # Running sequences

    def _serve(self, sequence: Sequence) -> bool:
        """Give a running sequence what it needs to go on; True if it then wants a chunk of tokens it knows."""
        if sequence.state is not RequestState.RUNNING:
            return False  # Its group gave way to an earlier one just now.
        if not sequence.slot and not self._take_slot(sequence):
            return False
        if sequence.awaits_parent and not self._attach(sequence):
            return False
        if not sequence.is_last_token_on_device:
            return True
        self._grant(sequence)
        return False

    def _grant(self, sequence: Sequence) -> None:
        """Let a sequence decode on: pages for its next tokens, and a tail that nobody else reads."""
        # The last token ends it: what would be computed of it nobody wants to know.
        num_tokens = min(sequence.num_computed + self.tokens_ahead, sequence.max_len - 1)
        if num_tokens > sequence.num_computed and self._make_room(sequence, num_tokens):
            self._note_reach(sequence)

    def _note_reach(self, sequence: Sequence) -> None:
        reach = len(sequence.pages[0]) * self.blocks.block_size  # In all groups: it knows no more tokens.
        sequence.granted = min(reach, sequence.max_len - 1)

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Schedule the next tokens that a sequence knows, within the budget; returns how many."""
        if sequence.state is not RequestState.RUNNING:
            return 0
        start = sequence.num_computed
        # Those who wait for pages of this sequence get them before it goes on.
        stops = [child.fork_len for child in children_of(sequence) if child.awaits_parent and child.fork_len > start]
        end = min(sequence.num_tokens, *stops) if stops else sequence.num_tokens
        scored_end = self.scored_end(sequence, start)
        if self.enable_chunked_prefill:
            end = min(end, start + budget, start + self.max_chunk, scored_end)
        elif end - start > budget or end > scored_end:
            return 0
        if end <= start or not self._make_room(sequence, end):
            return 0
        self._work.chunks.append(Chunk(sequence, start, end - start, tuple(samplers_of(sequence, end))))
        return end - start

    def scored_end(self, sequence: Sequence, start: int) -> int:
        """How far a chunk of a sequence may reach from `start`, so that the step has room for its scores."""
        request, wanted_end = sequence.request, sequence.request.prompt_len - 1
        if not request.needs_prompt_scores:
            return sequence.num_tokens
        room = self.max_scored - sum(len(chunk.scored) for chunk in self._work.chunks)
        end = max(start, request.num_scored) + room
        return sequence.num_tokens if end >= wanted_end else end

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Get pages for so many tokens, from the last running requests if need be; False if it has to wait itself."""
        while not self.blocks.prepare(sequence, num_tokens):
            if self.blocks.device.fenced:
                # Steps in flight hold pages that nobody owns any more: the next one to retire gives some back.
                self.counts["fence_held"] += 1
                return False
            if not self._preempt_last(sequence.request):
                return False
        return True

    def _take_slot(self, sequence: Sequence) -> bool:
        """A slot for a fork, from a later request if need be: its own request does not give way to it."""
        while not self.free_slots:
            if self.running[-1] is sequence.request:
                return False
            self._preempt_last(sequence.request)
        self._place(sequence)
        return True

    def _place(self, sequence: Sequence) -> None:
        self.blocks.place(sequence, self.free_slots.pop())
        self._work.placed.append(sequence)

    def _attach(self, sequence: Sequence) -> bool:
        """Let a sample share the pages of its parent, once the parent has computed what they have in common."""
        parent, num_shared = sequence.parent, min(sequence.fork_len, sequence.num_tokens - 1)
        if parent is not None and parent.num_computed < sequence.fork_len:
            return False
        if parent is None or not self.blocks.can_share(parent, num_shared):
            # Whom it waited for has ended, or a window has passed what it would share: its pages are all its own.
            sequence.fork_len = 0
            self._adopt_cached(sequence)
        else:
            was_granted = parent.granted > 0
            self._share(parent, sequence, num_shared)
            if was_granted:
                self._grant(parent)  # Which may take the pages of both, where nobody else has any to give.
        return sequence.state is RequestState.RUNNING

    def _share(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let a sample have its parent's pages. Both are looked at before they write the last one, which a step in
        flight may still write for the parent, whoever of them gives it back."""
        self.blocks.share(parent, child, num_tokens)
        child.awaits_parent = False
        parent.granted = 0
        self._fence(parent)

    def _adopt_cached(self, sequence: Sequence) -> None:
        """Start a sequence with what the prefix cache has of it, if there is room for that."""
        sequence.awaits_parent = False
        match = self.blocks.prefixes.match(sequence, self.demand.match_limit(sequence))
        if self.blocks.prefixes.num_taken(match) <= self.blocks.device.num_free:
            self.blocks.adopt(sequence, match)

    def _prefill_budget(self, num_decodes: int) -> int:
        """Tokens for chunks: what decoding leaves, and half of the step at least, or decoding could starve prompts."""
        if not self.enable_chunked_prefill:
            return self.max_num_batched_tokens
        return max(self.max_num_batched_tokens - num_decodes, self.max_num_batched_tokens // 2)

    def _commit(self, decodes: list[Sequence]) -> None:
        """Fix the step's work, now that nobody is preempted any more, and count it as computed."""
        work = self._work
        if work.preempted or work.ignored:
            work.chunks[:] = [chunk for chunk in work.chunks if chunk.sequence.state is RequestState.RUNNING]
            work.placed[:] = [sequence for sequence in work.placed if sequence.slot]
            decodes = [sequence for sequence in decodes if sequence.num_computed < sequence.granted]
        # A chunk of one token is no prompt that others would have to wait for.
        has_prompts = any(chunk.num_tokens > 1 for chunk in work.chunks)
        is_withheld = not self.enable_chunked_prefill and has_prompts and bool(decodes)
        self._num_withheld = self._num_withheld + 1 if is_withheld else 0
        if is_withheld:
            decodes = []
        room = self.max_num_batched_tokens - sum(chunk.num_tokens for chunk in work.chunks)
        if len(decodes) > room:
            decodes = self._take_turns(decodes, room)
        if work.chunks and self.enable_chunked_prefill:
            self._fill_bucket(len(decodes))
        if self._may_decode_on(decodes):
            work.decode_lens.extend(self._decode_lens(decodes))
        if work.decode_lens:
            for sequence, num_steps in zip(decodes, work.decode_lens, strict=True):
                sequence.num_computed += num_steps
                sequence.num_tokens += num_steps
        else:
            for sequence in decodes:
                num_tokens = sequence.num_tokens
                sequence.num_computed = num_tokens
                sequence.num_tokens = num_tokens + 1
        work.decodes.extend(decodes)
        for chunk in work.chunks:
            self._commit_chunk(chunk)
        work.table_changes.extend((*entry, page) for entry, page in self.blocks.table_changes.items())
        self.blocks.table_changes.clear()
        work.moves.extend(self.blocks.store.take_moves())
        if not work.is_empty:
            self.step = work.step

    def _fill_bucket(self, num_decodes: int) -> None:
        """Put off the last tokens of the step's chunks that would make it half as large again as it need be.

        A bucket costs by its size, whatever is in it. What is put off is computed in the next step, beside what is
        there anyway. Every chunk keeps a token.
        """
        chunks = self._work.chunks
        num_tokens = num_decodes + sum(chunk.num_tokens for chunk in chunks)
        surplus = num_tokens - filled_tokens(self.token_buckets, num_tokens, self.least_filled)
        if surplus > sum(chunk.num_tokens - 1 for chunk in chunks):
            return
        self.counts["chunks_cut"] += surplus > 0
        for index in reversed(range(len(chunks))):
            chunk = chunks[index]
            if cut := min(surplus, chunk.num_tokens - 1):
                chunks[index] = Chunk(chunk.sequence, chunk.start, chunk.num_tokens - cut, ())
                surplus -= cut

    def _may_decode_on(self, decodes: list[Sequence]) -> bool:
        """Whether these may decode several tokens: nothing else is to be done, and the host need not see each."""
        work = self._work
        if self.max_decode_steps == 1 or not decodes:
            return False
        if work.chunks or work.preempted or len(self.waiting) or len(self.swapped):
            return False
        # Those that do not decode have drawn their last token, which the host is about to read.
        is_all = all(s.num_computed < s.granted or s.num_computed == s.max_len - 1 for s in self.sequences)
        return is_all and all(sequence.request.is_plain for sequence in decodes)

    def _decode_lens(self, decodes: list[Sequence]) -> list[int]:
        """How many tokens each decodes in this step: as many as it may, and as the slowest of its bucket's rows.

        More steps than that would compute a bucket that the rows still going do not need. Pages ahead are taken
        where they are free, never from anybody.
        """
        lens = []
        for sequence in decodes:
            wanted = min(sequence.num_computed + self.max_decode_steps, sequence.max_len - 1)
            if wanted > sequence.granted and self.blocks.prepare(sequence, wanted):
                self._note_reach(sequence)
            lens.append(min(sequence.granted - sequence.num_computed, self.max_decode_steps))
        num_needed = 1 + max((size for size in self.token_buckets if size < len(lens)), default=0)
        num_steps = sorted(lens, reverse=True)[num_needed - 1]
        return [min(length, num_steps) for length in lens] if num_steps > 1 else []

    def _commit_chunk(self, chunk: Chunk) -> None:
        sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
        sequence.num_computed = end
        sequence.last_chunk_step = self._work.step
        self.counts["prefill_chunks"] += end < sequence.num_tokens
        for sampler in chunk.samplers:
            if sampler is not sequence:
                self.blocks.share(sequence, sampler, end)
                sampler.awaits_parent = False
            if sequence.request.beams is None:  # What is drawn for a beam is not its next token.
                sampler.is_last_token_on_device = True
                sampler.num_tokens = end + 1

    def _take_turns(self, decodes: list[Sequence], room: int) -> list[Sequence]:
        """The first sequence always, others one after another from step to step."""
        others = decodes[1:]
        start = self._first_decode % len(others)
        self._first_decode = start + room - 1
        return [decodes[0], *(others[start:] + others)[: room - 1]]

    # Requests come in

    def start(self, request: Request, match: PrefixMatch, budget: int) -> int:
        """Let a waiting request run that fits, from what was found of it; returns its tokens in this step."""
        first = request.live[0]
        num_cached = self.blocks.adopt(first, match)
        first.awaits_parent = False
        self._run(request)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self.admission.step_time
            request.num_cached_tokens = num_cached
            self.blocks.prefixes.count_query(first.num_tokens, num_cached)
        num_scheduled = self._chunk(first, budget)
        assert num_scheduled, "its pages were counted"
        return num_scheduled

    def resume(self, request: Request, budget: int) -> int:
        """Let a swapped request run again that fits; returns its tokens in this step."""
        self.blocks.swap_in(request.live)
        self._run(request)
        self.counts["swap_in"] += 1
        num_scheduled = 0
        for sequence in request.live:
            if not sequence.awaits_parent:
                num_scheduled += self._chunk(sequence, budget - num_scheduled)
        return num_scheduled

    def _run(self, request: Request) -> None:
        """Put a request whose first pages are there among the running ones."""
        insort(self.running, request, key=lambda other: other.order)
        request.state = RequestState.RUNNING
        request.num_bypassed = 0
        for sequence in request.live:
            sequence.state = RequestState.RUNNING
            self._place(sequence)
        if self.admission.gate is not None:
            self.admission.gate.enter(request)
        self._has_new_members = True

    # Preemption

    def _preempt_last(self, asker: Request) -> bool:
        """Take the pages and slots of the last running request, or end it if it could never run again.

        False if that is the asker itself, which keeps them while steps are in flight.
        """
        request = self.running[-1]
        if request is asker and self.step > self.retired_step:
            return False  # Results in flight may end somebody, and cost less to wait for.
        if self.demand.fits_alone(request):
            self._preempt(request)
        else:
            self.ignore(request)
        return request is not asker

    def _preempt(self, request: Request) -> None:
        """Take a running request's pages and slots, of all its samples at once. It keeps its place in the order."""
        mode, reason = self.preemption.choose(
            num_tokens=num_distinct(request), num_pages=self.blocks.num_held(request.live)
        )
        if request.beams is not None:
            mode, reason = PreemptionMode.RECOMPUTE, "its beams may change places while it is away"
            request.beams.forget_rows()
        if mode is PreemptionMode.SWAP:
            slots = [sequence.slot for sequence in request.live if sequence.slot]
            for sequence in request.live:
                self._fence(sequence)
            if self.blocks.swap_out(request.live):
                self.free_slots += slots
            else:
                mode, reason = PreemptionMode.RECOMPUTE, "the host pool is full"
        self._leave_queue(request)
        if mode is PreemptionMode.SWAP:
            request.num_swaps += 1
            self._stop(request, RequestState.SWAPPED, self.swapped)
        else:
            for sequence in request.live:
                self._release(sequence)
            self._stop(request, RequestState.WAITING, self.waiting)
        request.num_preemptions += 1
        self.counts[f"preemptions_{mode.value}"] += 1
        self._work.preempted.append(Preemption(request, mode, reason))

    def _stop(self, request: Request, state: RequestState, queue: RequestQueue) -> None:
        request.state = state
        for sequence in request.live:
            sequence.state = state
            if state is RequestState.WAITING:
                sequence.awaits_parent = sequence.parent is not None
        request.pages_wanted, request.next_hash = 0, None
        queue.push(request)
        self._has_new_members = True

    def ignore(self, request: Request) -> None:
        """End a request that was taken and can never fit any more: the pool has become smaller."""
        request.error = (
            f"its {self.demand.most_pages(request)} pages can never be had: the pool has {self.demand.available} left"
        )
        for sequence in list(request.live):
            self.finish(sequence, RequestState.FINISHED_IGNORED)
        self.counts["ignored"] += 1
        self._work.ignored.append(request)

    def _release(self, sequence: Sequence) -> None:
        """Take slot and pages of a sequence; those that steps in flight may write are free once these have retired."""
        self._fence(sequence)
        if sequence.slot:
            self.free_slots.append(sequence.slot)
        self.blocks.release(sequence)

    def _fence(self, sequence: Sequence) -> None:
        """Keep from reuse what steps in flight may write of a running sequence: copies may run beside them."""
        if self.is_in_flight(sequence) and sequence.state is RequestState.RUNNING:
            self.blocks.fence(sequence, self.step)

    def _leave_queue(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            if self.admission.gate is not None:
                self.admission.gate.leave(request)
        else:
            (self.swapped if request.state is RequestState.SWAPPED else self.waiting).remove(request)

    # What is known of a request

    def _stage_of(self, sequence: Sequence) -> str:
        if sequence.state is not RequestState.RUNNING:
            return sequence.state.label
        return "decoding" if sequence.is_last_token_on_device else "prefilling"

    def _note_members(self) -> None:
        if self._has_new_members:
            self._has_new_members = False
            self.sequences = [sequence for request in self.running for sequence in request.live]
