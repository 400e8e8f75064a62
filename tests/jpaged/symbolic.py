"""A device without a model: every slot holds a hash of the whole token history up to it.

`SymbolicDevice` sees what the compiled step sees, the packed buffer and the page-table changes, and nothing
else. It keeps its own page tables and last tokens, writes keys at the packed slots, reads them through the
tables, and draws the next token from all that a row reads and from its sampling parameters. A page that is
stale, shared, freed too early or packed wrongly changes a token, and `solo_tokens` says which token is right
from the request alone.

`Host` drives the real scheduler, block manager and step builder with it, one step at a time as the engine does.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np

from jpaged.block_manager import BlockManager
from jpaged.buckets import make_buckets
from jpaged.pallas_kernels.ragged_paged_attention import XlaBackend
from jpaged.request import RequestState, derived_seed, make_request
from jpaged.sampling_params import SamplingParams
from jpaged.scheduler import Scheduler
from jpaged.step_inputs import SAMPLE_FIELDS, StepInputBuilder

VOCAB = 1 << 30
"""So large that two different histories never draw the same token by chance."""
POISON_TOKEN = 7
"""The model makes NaN of this token and of everything after it."""
NAN = None


def key_hash(group, before, position, token):
    """What a layer of `group` writes for this token after this history."""
    return NAN if before is NAN or token == POISON_TOKEN else hash((group, before, position, token))


def draw(keys, sample_row):
    """The next token, from all keys of all groups and the row of sampling parameters; None for NaN logits."""
    if any(key is NAN for group in keys for key in group):
        return None
    return hash((tuple(map(tuple, keys)), tuple(sample_row))) % VOCAB


def solo_tokens(prompt, *, seed, sample_index, params, max_tokens, num_groups, stop_share):
    """Output tokens and the end of a request computed alone: no page, no step, no code of the host core."""
    tokens, keys = list(prompt), [[] for _ in range(num_groups)]
    fields = [sample_index, seed % 2**32, seed // 2**32, max(params.top_k, 0)]
    floats = [np.float32(value) for value in (params.temperature, params.top_p, params.min_p)]
    for output_index in range(max_tokens):
        for group, history in enumerate(keys):
            for position in range(len(history), len(tokens)):
                history.append(key_hash(group, history[-1] if history else 0, position, tokens[position]))
        token = draw(keys, [output_index, *fields, *map(float, floats)])
        if token is None:
            return tokens[len(prompt) :], RequestState.FINISHED_ERROR
        tokens.append(token)
        if stop_share and token % stop_share == 0:
            return tokens[len(prompt) :], RequestState.FINISHED_STOPPED
    return tokens[len(prompt) :], RequestState.FINISHED_LENGTH


class SymbolicDevice:
    """Executes packed steps. `max_pages` is the width of a page table."""

    def __init__(self, *, num_blocks, block_size, num_groups, max_num_seqs, max_pages):
        self.block_size = block_size
        self.num_groups = num_groups
        self.garbage = ((-1, number) for number in itertools.count())
        self.keys = [next(self.garbage) for _ in range(num_blocks * block_size)]
        self.tables = [[[0] * max_pages for _ in range(max_num_seqs + 1)] for _ in range(num_groups)]
        self.last_tokens = [-1] * (max_num_seqs + 1)
        self.writers = {}
        """Slot → row, of this step's writes."""
        self.num_changes = 0
        self.num_update_batches = 0

    def run(self, layout, table_updates, packed):
        """One step; returns the drawn tokens, None where the logits were NaN."""
        for changes in table_updates:
            self.num_update_batches += 1
            self._change_tables(changes.tolist())
        view = {name: array.tolist() for name, array in layout.view(packed).items()}
        self._change_tables(view["changes"])
        num_tokens, num_rows, num_decode_rows, num_samples = view["counts"]
        self._check_padding(view, num_tokens, num_rows)
        starts = view["query_starts"]
        self._claim_slots(view["slots"], starts, num_rows)
        seen_by_token = {}
        for row in range(num_rows):
            start, end = starts[row], starts[row + 1]
            assert end > start, "a row without a token"
            assert (end - start == 1) == (row < num_decode_rows), "rows of one token do not come first"
            first = view["context_lens"][row] - (end - start)
            for token in range(start, end):
                index = first + token - start
                token_id = view["token_ids"][token]
                assert token_id != -1, "−1 would wrap to the last row of the embedding"
                if token_id < -1:
                    token_id = self.last_tokens[-token_id - 1]
                for group in range(self.num_groups):
                    before = self._read(group, row, view["row_slots"][row], index - 1) if index else 0
                    at = view["slots"][group][token]
                    self.keys[at] = key_hash(group, before, view["positions"][token], token_id)
                seen_by_token[token] = (row, view["row_slots"][row], index + 1)
        return self._sample(view["samples"], num_samples, seen_by_token)

    def _sample(self, samples, num_samples, seen_by_token):
        columns = dict(zip(SAMPLE_FIELDS, samples, strict=True))
        drawn = []
        for sample in range(num_samples):
            row, slot, num_keys = seen_by_token[columns["token"][sample]]
            keys = [
                [self._read(group, row, slot, index) for index in range(num_keys)] for group in range(self.num_groups)
            ]
            token = draw(keys, _sample_row(columns, sample))
            drawn.append(token)
            self.last_tokens[columns["slot"][sample]] = 0 if token is None else token
        for slot in columns["slot"][num_samples:]:
            self.last_tokens[slot] = -1
        return drawn

    def _change_tables(self, changes):
        for group, slot, index, page in zip(*changes, strict=True):
            assert min(group, slot, index, page) >= 0, "a negative index wraps"
            assert (slot == 0) == (page == 0), "the null page and the null slot belong to padding"
            self.num_changes += slot > 0
            self.tables[group][slot][index] = page

    def _check_padding(self, view, num_tokens, num_rows):
        assert all(slot > 0 for slot in view["row_slots"][:num_rows]), "a row in the null slot"
        assert not any(view["row_slots"][num_rows:]), "a padding row has a state slot"
        assert not any(view["context_lens"][num_rows:]), "a padding row has a context"
        assert set(view["query_starts"][num_rows:]) == {num_tokens}, "a padding row has queries"
        assert not any(view["token_ids"][num_tokens:]), "a padding token has an id"
        for slots in view["slots"]:
            assert all(slot >= self.block_size for slot in slots[:num_tokens]), "a token writes the null page"
            assert not any(slots[num_tokens:]), "padding writes a real page"

    def _claim_slots(self, slots_by_group, starts, num_rows):
        """One writer a slot; until it writes, the slot holds garbage. So does the null page, always."""
        self.writers = {}
        for slots in slots_by_group:
            for row in range(num_rows):
                for slot in slots[starts[row] : starts[row + 1]]:
                    assert slot not in self.writers, "two tokens write one slot"
                    self.writers[slot] = row
        for slot in (*range(self.block_size), *self.writers):
            self.keys[slot] = next(self.garbage)

    def _read(self, group, row, state_slot, index):
        page = self.tables[group][state_slot][index // self.block_size]
        slot = page * self.block_size + index % self.block_size
        assert self.writers.get(slot, row) == row, "a row reads what another one writes in the same step"
        return self.keys[slot]


def _sample_row(columns, sample):
    seeds = [columns[name][sample] % 2**32 for name in ("seed_low", "seed_high")]
    bits = np.array([columns[name][sample] for name in ("temperature", "top_p", "min_p")], np.int32)
    first = [columns["output_index"][sample], columns["sample_index"][sample]]
    return [*first, *seeds, columns["top_k"][sample], *bits.view(np.float32).tolist()]


class Host:
    """Scheduler, block manager and step builder over a symbolic device, stepped as `Engine` steps its own."""

    def __init__(
        self,
        *,
        num_blocks=64,
        block_size=4,
        num_groups=1,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=128,
        enable_prefix_caching=True,
        watermark=0.0,
        platform="cpu",
        dtype="float32",
        engine_seed=0,
        stop_share=0,
    ):
        """`stop_share`: one drawn token in so many ends its sequence; 0: none does."""
        self.stop_share = stop_share
        self.num_groups = num_groups
        self.engine_seed = engine_seed
        self.blocks = BlockManager(
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            num_groups=num_groups,
        )
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            watermark=watermark,
            clock=lambda: float(self.num_steps),
        )
        buckets = make_buckets(
            max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs, platform=platform, dtype=dtype
        )
        self.builder = StepInputBuilder(
            buckets=buckets,
            backend=XlaBackend(),
            block_size=block_size,
            num_groups=num_groups,
            max_num_seqs=max_num_seqs,
        )
        self.device = SymbolicDevice(
            num_blocks=num_blocks,
            block_size=block_size,
            num_groups=num_groups,
            max_num_seqs=max_num_seqs,
            max_pages=-(-max_model_len // block_size),
        )
        self.requests = []
        self.num_steps = 0
        self.num_finished = 0
        self.log = []
        """What happened, for comparing two runs: (step, request, sample, token or end)."""

    def add(self, prompt, *, max_tokens=4, n=1, params=None):
        """Queue a request; its number is its place in `requests`."""
        params = params or SamplingParams()
        # Several samples a request are ready in the host core, and not yet in the sampling parameters.
        object.__setattr__(params, "n", n)
        request = make_request(
            request_id=f"r{len(self.requests)}",
            number=len(self.requests),
            prompt_token_ids=list(prompt),
            params=params,
            arrival_time=float(self.num_steps),
            max_tokens=max_tokens,
            engine_seed=self.engine_seed,
            num_groups=self.num_groups,
        )
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def finish(self, sequence, state):
        was_finished = sequence.request.state.is_finished
        self.scheduler.finish(sequence, state)
        self.num_finished += sequence.request.state.is_finished and not was_finished
        self.log.append((self.num_steps, sequence.request.number, sequence.index, state.value))

    def abort(self, request):
        for sequence in request.live_sequences:
            self.finish(sequence, RequestState.FINISHED_ABORTED)

    def step(self):
        """One step, with every invariant that can be seen from outside; returns what was scheduled."""
        oldest = next(request for request in self.requests if not request.state.is_finished)
        work = self.scheduler.schedule()
        self.scheduler.check()
        self._check_schedule(work, oldest)
        built = self.builder.build(work.scheduled)
        self._check_writes(built)
        drawn = self.device.run(built.layout, built.table_updates, built.inputs.packed)
        for item in work.scheduled:
            self.scheduler.complete(item)
        self.num_steps += 1
        for sequence, token in zip(built.samples, drawn, strict=True):
            if token is None:
                self.finish(sequence, RequestState.FINISHED_ERROR)
                continue
            sequence.token_ids.append(token)
            sequence.is_last_token_on_device = True
            self.log.append((self.num_steps, sequence.request.number, sequence.index, token))
            if self.stop_share and token % self.stop_share == 0:
                self.finish(sequence, RequestState.FINISHED_STOPPED)
            elif sequence.num_output_tokens == sequence.request.max_tokens:
                self.finish(sequence, RequestState.FINISHED_LENGTH)
        self.scheduler.check()
        return work

    def run(self):
        """Step to the end, check every request against its solo run, and that nothing is left behind."""
        while self.scheduler.has_unfinished:
            self.step()
        self.check_results()
        return self

    def check_results(self):
        for request in self.requests:
            for sequence in request.sequences:
                tokens, state = self.solo(request, sequence.index)
                output = sequence.token_ids[len(request.prompt_token_ids) :]
                if sequence.state is RequestState.FINISHED_ABORTED:
                    tokens = tokens[: len(output)]
                else:
                    assert sequence.state is state, f"request {request.number} ends otherwise than alone"
                assert output == tokens, f"request {request.number} draws other tokens than alone"
        assert self.num_finished == len(self.requests), "a request ended never or twice"
        assert self.blocks.num_used == 0, "pages are left behind"
        assert len(self.scheduler.free_slots) == self.scheduler.max_num_seqs, "slots are left behind"

    def solo(self, request, sample_index=0):
        params, number = request.params, request.number
        seed = params.seed % 2**64 if params.seed is not None else derived_seed(self.engine_seed, number)
        return solo_tokens(
            request.prompt_token_ids,
            seed=seed,
            sample_index=sample_index,
            params=params,
            max_tokens=request.max_tokens,
            num_groups=self.num_groups,
            stop_share=self.stop_share,
        )

    def _check_schedule(self, work, oldest):
        scheduler = self.scheduler
        assert any(item.sequence.request is oldest for item in work.scheduled), "the oldest request does not advance"
        assert work.num_tokens <= scheduler.max_num_batched_tokens, "more tokens than the budget"
        assert len(work.scheduled) <= scheduler.max_num_seqs, "more rows than slots"
        sequences = [item.sequence for item in work.scheduled]
        assert len(set(map(id, sequences))) == len(sequences), "a sequence is scheduled twice"
        for item in work.scheduled:
            assert item.num_tokens >= 1, "a row without a token"
            assert item.start == item.sequence.num_computed, "a gap in what is computed"
            assert item.start + item.num_tokens <= item.sequence.num_tokens, "tokens that nobody knows yet"
        queued = [request.number for request in (*scheduler.running, *scheduler.waiting)]
        assert queued == [request.number for request in self.requests if not request.state.is_finished], "out of order"

    def _check_writes(self, built):
        """No write to a page that others read or may find."""
        view = built.layout.view(built.inputs.packed)
        for slots in view["slots"]:
            for page in set((slots[slots > 0] // self.blocks.block_size).tolist()):
                assert self.blocks.ref_counts[page] == 1, "a write to a shared page"
                assert page not in self.blocks.hash_of_page, "a write to a published page"


@dataclass
class Tally:
    """What a workload made happen: a harness that never preempts proves nothing about preemption."""

    steps: int = 0
    requests: int = 0
    preemptions: int = 0
    hits: int = 0
    chunks: int = 0
    update_batches: int = 0
    aborts: int = 0
    errors: int = 0
    groups: int = 0

    def __iadd__(self, other):
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


class Workload:
    """Random requests over random sizes, all from one seed; `run` checks every token against the solo runs."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.tally = Tally()
        self.max_len = rng.choice([12, 30, 60])
        max_num_seqs = rng.choice([1, 2, 4, 8, 8])
        self.max_samples = min(max_num_seqs, rng.choice([1, 1, 1, 3]))
        num_groups, block_size = rng.choice([1, 1, 2]), rng.choice([1, 4, 16])
        largest = self.max_samples * num_groups * -(-self.max_len // block_size)
        budget = max_num_seqs + rng.choice([0, 3, 20, 100])
        platform, dtype = rng.choice([("cpu", "float32"), ("cpu", "bfloat16"), ("tpu", "bfloat16")])
        self.host = Host(
            num_blocks=1 + int(largest * rng.choice([1, 1, 1.3, 2, 5])),
            block_size=block_size,
            num_groups=num_groups,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=self.max_len,
            enable_prefix_caching=rng.random() < 0.8,
            watermark=rng.choice([0.0, 0.01, 0.3]),
            platform=platform,
            dtype=dtype,
            engine_seed=seed,
            stop_share=29,
        )
        self.max_prompt = rng.choice([4, 8, self.max_len // 2, self.max_len - 1])
        self.documents = [self._tokens(self.max_len) for _ in range(3)]
        self.num_to_come = rng.choice([5, 15, 40])

    def run(self):
        host, rng = self.host, self.rng
        arrival_share, abort_share = rng.choice([0.1, 0.5, 1.0]), rng.choice([0.0, 0.02, 0.1])
        while self.num_to_come or host.scheduler.has_unfinished:
            while self.num_to_come and (rng.random() < arrival_share or not host.scheduler.has_unfinished):
                self.num_to_come -= 1
                self._add()
            host.step()
            while rng.random() < abort_share:
                # Any request: one that waits, that runs, in the middle of its prompt, or that has ended.
                request = rng.choice(host.requests)
                self.tally.aborts += not request.state.is_finished
                host.abort(request)
            if rng.random() < 0.01:
                host.blocks.reset_prefix_cache()
            host.scheduler.check()
        host.check_results()
        return self._count()

    def _add(self):
        rng = self.rng
        room = self.max_prompt
        prompt = rng.choice(self.documents)[: rng.randint(1, room)]
        if rng.random() < 0.3 and self.host.requests:
            # A second turn: what an earlier request was asked and has answered so far.
            prompt = rng.choice(rng.choice(self.host.requests).sequences).token_ids[:room]
        if rng.random() < 0.7:
            prompt = [*prompt, *self._tokens(rng.randint(1, 8))][:room]
        if rng.random() < 0.05:
            prompt = [*prompt]
            prompt[rng.randrange(len(prompt))] = POISON_TOKEN
        params = SamplingParams(
            seed=rng.choice([None, None, 5, -1, 2**63 - 1]),
            temperature=rng.choice([0.0, 0.7, 2.0]),
            top_k=rng.choice([-1, 0, 40]),
            top_p=rng.choice([0.1, 1.0]),
            min_p=rng.choice([0.0, 0.05]),
        )
        max_tokens = min(self.max_len - len(prompt), rng.choice([1, 5, 100, 100]))
        self.host.add(prompt, max_tokens=max_tokens, n=rng.randint(1, self.max_samples), params=params)

    def _tokens(self, count):
        return [self.rng.randrange(10, 14) for _ in range(count)]

    def _count(self):
        host, tally = self.host, self.tally
        tally.steps, tally.requests = host.num_steps, len(host.requests)
        tally.preemptions, tally.hits = host.scheduler.num_preemptions, host.blocks.num_hit_tokens
        tally.chunks, tally.update_batches = host.scheduler.num_prefill_chunks, host.device.num_update_batches
        tally.errors = sum(request.state is RequestState.FINISHED_ERROR for request in host.requests)
        tally.groups = sum(len(request.sequences) > 1 for request in host.requests)
        return tally
