"""Random lives of a host core: sizes, options, requests, events and faults of a life all follow from one seed.

`simulate(seed)` raises on the first broken promise; `scripts/simulate.py SEED` replays a seed with its event log. The
promises are checked by `symbolic.Host`.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field

from jpaged.errors import InvalidRequestError, QueueFullError
from jpaged.kv_cache.page_arithmetic import PageArithmetic
from jpaged.request import CacheKey, RequestState
from jpaged.research.weight_updates import IN_FLIGHT
from jpaged.sampling.sampling_params import SamplingParams
from jpaged.scheduling.preemption import PreemptionMode, PreemptionPolicy, SwapCosts
from jpaged.scheduling.request_queue import POLICIES, QueueLimits

from .shrinking_pool import withdraw
from .symbolic import EOS, POISON_TOKEN, STOP_TOKEN, DeviceError, Host, Interrupt

MAX_STEPS = 5000
"""Steps of one life; more mean that it makes no progress."""
MAX_AHEAD = 4
"""Tokens that a decoding sequence has pages for ahead of the next one."""
STAGES = ("waiting", "prefilling", "decoding", "swapped")
FAULTS = ("dispatch before", "dispatch after", "read")
INTERRUPTS = ("before", "after")


@dataclass
class Summary:
    """Counts of what happened in a life: one that never swaps proves nothing about swapping."""

    seed: int
    steps: int = 0
    requests: int = 0
    events: Counter = field(default_factory=Counter)
    log_hash: str = ""


class AdapterGate:
    """A gate that lets requests of at most `max_adapters` adapters run together."""

    def __init__(self, max_adapters):
        self.max_adapters = max_adapters
        self.running = Counter()
        self.version = 0

    def fault_of(self, request):
        return None

    def admits(self, request):
        name = request.cache_key.lora_name
        return name is None or name in self.running or len(self.running) < self.max_adapters

    def enter(self, request):
        assert self.admits(request), "more adapters than there are slots for"
        self.version += 1
        if request.cache_key.lora_name:
            self.running[request.cache_key.lora_name] += 1

    def leave(self, request):
        name = request.cache_key.lora_name
        self.version += 1
        if name:
            assert self.running[name] > 0, "an adapter leaves twice"
            self.running[name] -= 1
            if not self.running[name]:
                del self.running[name]


def simulate(seed, log=None):
    """Live one life; return its Summary. `log` is called with each event, as a line of text."""
    life = Life(seed, log)
    try:
        return life.run()
    except Exception as error:
        error.add_note(f"seed {seed}, step {life.host.scheduler.step}; replay: python scripts/simulate.py {seed}")
        raise


class Life:
    """The options and events of one seed."""

    def __init__(self, seed, log=None):
        self.seed, self.log = seed, log
        self.rng = rng = random.Random(seed)
        self.user = random.Random(f"{seed} user")
        """Draws for faults that were added later, apart from `rng`: older regression seeds keep their lives."""
        self.trainer = random.Random(f"{seed} weight updates")
        """Draws for updates of the weights, apart from the others likewise."""
        self.scorer = random.Random(f"{seed} given tokens")
        """Draws for requests that score given tokens, likewise."""
        self.scored_share = self.scorer.choice([0.0, 0.0, 0.2, 0.6])
        self.grammarian = random.Random(f"{seed} grammar")
        """Draws for requests with a grammar, likewise."""
        self.grammar_share = self.grammarian.choice([0.0, 0.0, 0.0, 0.3, 0.8])
        self.tree = random.Random(f"{seed} trees")
        """Draws for forks behind an earlier token, and for their given tokens, likewise."""
        self.tree_share = self.tree.choice([0.0, 0.5, 1.0])
        self.digest = hashlib.sha256()
        self.events = Counter()
        self.num_steps = 0
        step_options = self._step_options(random.Random(f"{seed} steps"))
        options = self._options(step_options["max_decode_steps"]) | step_options
        self.log_event("options", *(f"{name}={value}" for name, value in options.items() if not callable(value)))
        self.gate = AdapterGate(rng.choice([1, 1, 2])) if rng.random() < 0.3 else None
        self.depth = rng.choice([1, 2, 2])
        late_share = rng.choice([0.0, 0.5])
        self.host = Host(
            **options,
            gate=self.gate,
            engine_seed=seed,
            stop_share=rng.choice([60, 300]),
            poison_share=rng.choice([0, 0, 300]),
            is_late=lambda: rng.random() < late_share,
            log_event=self.log_event,
        )
        self.documents = [self._tokens(self.max_len) for _ in range(2)]
        self.num_to_come = rng.choice([12, 16, 24])
        self.shares = {
            "arrival": rng.choice([0.15, 0.4, 1.0]),
            "abort": rng.choice([0.0, 0.03, 0.08]),
            "fork": rng.choice([0.0, 0.05, 0.2]),
            "reset": rng.choice([0.0, 0.0, 0.01]),
            "pin": rng.choice([0.0, 0.05]),
            "resize": rng.choice([0.0, 0.0, 0.05]),
            "fault": rng.choice([0.0, 0.0, 0.01]),
            "jump": rng.choice([0.0, 0.02]),
            "scores": rng.choice([0.0, 0.1, 0.5]),
        }
        self.update_share = self.trainer.choice([0.0, 0.0, 0.0, 0.02, 0.1])
        self.keys = [CacheKey()]
        if rng.random() < 0.5 or self.gate:
            self.keys += [
                CacheKey(lora_name="a", lora_version=1),
                CacheKey(lora_name="a", lora_version=2),
                CacheKey(lora_name="b", lora_version=1),
                CacheKey(cache_salt="a"),
                CacheKey(cache_salt="b"),
                CacheKey(items=((0, b"image"),)),
                CacheKey(items=((0, b"another"),)),
            ]
        self.pins = []
        self.num_withdrawn = {"device": 0, "host": 0}

    def _options(self, max_decode_steps):
        rng = self.rng
        block_size = rng.choice([1, 4, 4, 16])
        self.max_len = rng.choice([24, 40, 64] if block_size == 16 else [12, 24, 40])
        window = rng.choice([2, 3, 5, 8, 13])
        windows = rng.choice([(None,)] * 4 + [(None, window)] * 2 + [(window, 2 * window), (window,)])
        max_num_seqs = rng.choice([1, 2, 4, 4, 8, 8, 8])
        is_chunked = rng.random() < 0.8
        budget = max_num_seqs + rng.choice([0, 3, 16, 60])
        if not is_chunked:
            budget = max(budget, self.max_len)
        threshold = rng.choice([0, 0, 3, 8]) if is_chunked else 0
        max_chunk = max(threshold or budget, max_decode_steps, MAX_AHEAD)
        arithmetic = PageArithmetic(windows, block_size, max_chunk)
        self.max_samples = min(max_num_seqs, rng.choice([1, 1, 2, 4]))
        num_alike = rng.choice([1, self.max_samples])
        largest = arithmetic.max_pages(0, [self.max_len - 1] * num_alike)
        num_blocks = 1 + int(largest * rng.choice([1, 1.2, 1.5, 1.5, 2, 3]))
        costs = SwapCosts(
            page_bytes=1, swap_bytes_per_s=2 * rng.choice([0.5, 1, 1.5]) / block_size, prefill_s_per_token=1.0
        )
        return dict(
            num_blocks=num_blocks,
            block_size=block_size,
            windows=windows,
            num_host_blocks=rng.choice([0, 2, 4, 1 + num_blocks // 2, 3 * num_blocks, 3 * num_blocks]),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=self.max_len,
            enable_prefix_caching=rng.random() < 0.8,
            max_cached_blocks=rng.choice([None, None, None, 0, 3]),
            platform=rng.choice(["cpu", "tpu"]),
            watermark=rng.choice([0.0, 0.0, 0.01, 0.3]),
            policy=rng.choice([POLICIES["fcfs"], POLICIES["priority"], lambda request: request.prompt_len]),
            enable_chunked_prefill=is_chunked,
            long_prefill_token_threshold=threshold,
            delay_factor=rng.choice([0.0, 0.0, 0.5, 2.0]),
            preemption=PreemptionPolicy(
                rng.choice([*PreemptionMode, PreemptionMode.SWAP, PreemptionMode.SWAP]),
                rng.choice([costs, costs, costs, None]),
            ),
            limits=rng.choice([QueueLimits()] * 2 + [QueueLimits(waiting_requests=4), QueueLimits(waiting_tokens=80)]),
            tokens_ahead=rng.choice([1, 1, MAX_AHEAD]),
            max_chunk=max_chunk,
        )

    @staticmethod
    def _step_options(rng):
        return {
            "max_decode_steps": rng.choice([1, 2, 5, 16]),
            "min_filled": rng.choice([1, 8, 64]),
            "bounds_scores": rng.choice([True, False]),
        }

    def log_event(self, *event):
        """Add an event to the digest and the log."""
        line = " ".join(map(str, event))
        self.digest.update(line.encode() + b"\n")
        if self.log:
            self.log(line)

    def run(self):
        host, rng, shares = self.host, self.rng, self.shares
        while self.num_to_come or host.scheduler.has_unfinished or host.core.in_flight:
            while self.num_to_come and (rng.random() < shares["arrival"] or not host.scheduler.has_unfinished):
                self.num_to_come -= 1
                self._arrive()
            if rng.random() < shares["fault"]:
                host.runner.fault = rng.choice(FAULTS)
            if self.user.random() < shares["fault"]:
                host.core.outputs.interrupt = self.user.choice(INTERRUPTS)
            try:
                self._advance()
            except DeviceError as fault:
                self._happen(f"fault: {fault}")
                host.restart()
            except Interrupt as interrupt:
                self._happen(f"interrupt {interrupt} a token is checked")
                host.restart()
            self._interfere()
            if self.trainer.random() < self.update_share:
                self._update()
            if rng.random() < 0.4:
                host.check_contents()
        self._end()
        return self._summary()

    def _advance(self):
        """Dispatch or retire one step."""
        host, in_flight = self.host, self.host.core.in_flight
        if in_flight and (len(in_flight) == self.depth or self.rng.random() < 0.3):
            samples = host.retire()
            self.log_event("retire", len(samples))
            return
        host.now += self.rng.random()
        before = host.scheduler.step
        work = host.dispatch()
        if work.is_empty:
            for request in work.ignored:
                self._note_ignored(request)
            if in_flight:
                self.log_event("retire", len(host.retire()))
            return
        assert host.scheduler.step == before + 1
        self.num_steps += 1
        assert self.num_steps < MAX_STEPS, "no end"
        self.events["several tokens a step"] += bool(work.decode_lens)
        self.log_event(
            f"step {work.step}",
            "decodes", [f"{s.request.number}.{s.index}" for s in work.decodes], *work.decode_lens,
            "chunks", [f"{c.sequence.request.number}.{c.sequence.index}@{c.start}+{c.num_tokens}" for c in work.chunks],
            "moves", [f"{move.kind.value} {move.source}→{move.destination}" for move in work.moves],
            "preempted", [f"{each.request.number} {each.mode.value}: {each.reason}" for each in work.preempted],
        )  # fmt: skip
        for request in work.ignored:
            self._note_ignored(request)

    def _note_ignored(self, request):
        self._happen("ignored", request.number)
        assert self.num_withdrawn["device"] or self.pins, "ignored with a pool as large as ever"

    # Events

    def _interfere(self):
        rng, shares = self.rng, self.shares
        for name, act in (
            ("abort", self._abort),
            ("fork", self._fork),
            ("reset", self._reset),
            ("pin", self._pin),
            ("resize", self._resize),
            ("jump", self._jump),
        ):
            if rng.random() < shares[name]:
                act()

    def _arrive(self):
        rng, host, shares = self.rng, self.host, self.shares
        params = SamplingParams(
            n=(n := rng.randint(1, self.max_samples)),
            seed=rng.choice([None, None, 5, -1, 2**63 - 1]),
            temperature=rng.choice([0.0, 0.7, 2.0] if n == 1 else [0.7, 2.0]),
            top_k=rng.choice([-1, 0, 40]),
            top_p=rng.choice([0.1, 1.0]),
            min_p=rng.choice([0.0, 0.05]),
            ignore_eos=rng.random() < 0.4,
            stop_token_ids=rng.choice([None, (STOP_TOKEN,)]),
            detokenize=False,
        )
        prompt = self._prompt()
        scoring = self._scoring(prompt) if self.scorer.random() < self.scored_share else {}
        has_grammar = not scoring and self.grammarian.random() < self.grammar_share
        grammar = self.grammarian.randrange(1, 1 << 40) if has_grammar else None
        try:
            request = host.add(
                prompt,
                max_tokens=min(self.max_len - len(prompt), rng.choice([1, 5, 100, 100, 100])),
                params=params,
                priority=rng.randint(0, 2),
                cache_key=rng.choice(self.keys) if rng.random() < 0.4 else self.keys[0],
                scores=(rng.random() < shares["scores"]) and not scoring,
                needs_every_token=rng.random() < 0.2,
                grammar=grammar,
                **scoring,
            )
        except (InvalidRequestError, QueueFullError) as error:
            self._happen(f"refused: {type(error).__name__}")
            return
        self._happen("given tokens") if scoring else None
        self._happen("grammar") if has_grammar else None
        self.log_event("add", request.number, prompt, request.max_tokens, n, request.cache_key, *scoring.values())

    def _scoring(self, prompt):
        """Return continuations of a prompt to score, and the first token of each that is scored."""
        rng, most = self.scorer, self.max_len - len(prompt)
        num_samples = rng.randint(1, self.max_samples) if len(prompt) > 1 else 1
        continuations = [
            [rng.randint(10, 400) for _ in range(rng.randint(1, min(most, rng.choice([1, 2, 20]))))]
            for _ in range(num_samples)
        ]
        return {"continuations": continuations, "first": rng.randint(0, min(map(len, continuations)) - 1)}

    def _prompt(self):
        rng = self.rng
        prompt = rng.choice(self.documents)[: rng.randint(1, rng.choice([3, 6, 12, self.max_len - 1]))]
        if rng.random() < 0.4 and self.host.requests:
            # The next message of a conversation: an earlier prompt and its answer so far.
            prompt = list(rng.choice(rng.choice(self.host.requests[-6:]).sequences).token_ids)
        if rng.random() < 0.6:
            prompt = [*prompt, *self._tokens(rng.randint(1, 6))]
        prompt = prompt[: self.max_len - 1]
        if rng.random() < 0.02:
            prompt[rng.randrange(len(prompt))] = POISON_TOKEN
        return prompt

    def _abort(self):
        """Abort a request in any state, or one of its samples, maybe twice."""
        host, rng = self.host, self.rng
        victim = self._pick_sequence() if rng.random() < 0.9 else rng.choice(list(host.solos) or [None])
        if victim is None:
            return
        if victim.state.is_finished:
            self._happen("abort after the end")
        elif host.scheduler.is_in_flight(victim):
            self._happen("abort in flight", victim.request.number)
        for _ in range(rng.randint(1, 2)):
            if rng.random() < 0.5:
                host.abort_sequence(victim)
            else:
                host.abort(victim.request)

    def _update(self):
        """Update the weights; a fault that was to come does not come meanwhile."""
        host, mode = self.host, self.trainer.choice(IN_FLIGHT)
        host.runner.fault = host.core.outputs.interrupt = None
        host.update_weights(mode)
        self.pins = [(document, host.versions.key(key)) for document, key in self.pins]
        self._happen(f"update {mode}")

    def _fork(self):
        host, rng = self.host, self.rng
        parent = self._pick_sequence()
        if parent is None or len(parent.request.sequences) >= 6 or parent.request.scoring is not None:
            return
        request = parent.request
        stage = host.scheduler.stage_of(parent)
        is_in_flight = host.scheduler.is_in_flight(parent)
        num_forks, num_known, at = rng.choice([1, 1, 2]), len(parent.token_ids), {}
        if self.tree.random() < self.tree_share:
            at["num_tokens"] = self.tree.randint(request.prompt_len, num_known)
            if self.tree.random() < 0.7:
                most = [EOS, STOP_TOKEN, POISON_TOKEN, *range(10, 400)]
                at["first_token_ids"] = [self.tree.choice(most) for _ in range(num_forks)]
        try:
            host.fork(parent, num_forks, **at)
        except InvalidRequestError:
            self._happen("fork refused", request.number)
            return
        self._happen(f"fork {stage}", f"{request.number}.{parent.index}", *at.values())
        self.events["fork in flight"] += is_in_flight
        self.events["fork behind an earlier token"] += at.get("num_tokens", len(parent.token_ids)) < len(
            parent.token_ids
        )
        self.events["fork with a given token"] += "first_token_ids" in at

    def _pick_sequence(self):
        """Return a random sequence that has not ended, from a random queue that is not empty; None if all are."""
        scheduler = self.host.scheduler
        all_queues = (scheduler.waiting, scheduler.running, scheduler.swapped, scheduler.swapped)
        queues = [list(queue) for queue in all_queues if queue]
        if not queues:
            return None
        return self.rng.choice(self.rng.choice(self.rng.choice(queues)).live)

    def _reset(self):
        self.host.blocks.prefixes.reset()
        self._happen("reset")
        self.host.check()

    def _pin(self):
        blocks, block_size, rng = self.host.blocks, self.host.arithmetic.block_size, self.rng
        if self.pins and rng.random() < 0.4:
            pin = self.pins.pop(rng.randrange(len(self.pins)))
            assert blocks.prefixes.unpin(*pin) == (len(pin[0]) >= block_size), "a pin is forgotten"
            self._happen("unpin")
        else:
            document = rng.choice(self.documents)[: rng.randint(1, self.max_len)]
            pin = list(document), self.host.versions.key(rng.choice(self.keys))
            if blocks.prefixes.num_new_pins(*pin) > self._num_spare():
                return
            num_kept = blocks.prefixes.pin(*pin)
            assert num_kept % block_size == 0
            self.pins.append(pin)
            self._happen("pin", num_kept)
        self.host.check()

    def _resize(self):
        """Make a pool smaller, or larger again."""
        name = self.rng.choice(["device", "device", "host"])
        pool = getattr(self.host.blocks, name)
        withdrawn = self.num_withdrawn[name]
        if withdrawn and self.rng.random() < 0.5:
            change = -self.rng.randint(1, withdrawn)
        else:
            num_spare = self._num_spare() if name == "device" else pool.num_pages // 2
            if num_spare <= 0:
                return
            change = self.rng.randint(1, num_spare)
        withdraw(pool, change)
        self.num_withdrawn[name] += change
        self._happen("shrink" if change > 0 else "expand", name, change)
        self.host.check()

    def _num_spare(self):
        """Return pages that no request needs; now and then more, so that requests become infeasible."""
        blocks, scheduler = self.host.blocks, self.host.scheduler
        if self.rng.random() < 0.1:
            return blocks.num_available - 1
        return blocks.num_available - max(map(scheduler.demand.max_pages, self.host.unfinished), default=1)

    def _jump(self):
        self.host.now += self.rng.choice([-3600.0, 3600.0])
        self._happen("clock jump")

    def _happen(self, event, *details):
        self.events[event] += 1
        self.log_event(event, *details)

    # The end

    def _end(self):
        """Check that every page is free once pins and withdrawn pages are given back."""
        host, blocks = self.host, self.host.blocks
        host.check_contents()
        host.check_end()
        while self.pins:
            blocks.prefixes.unpin(*self.pins.pop())
        withdraw(blocks.device, -self.num_withdrawn["device"])
        withdraw(blocks.host, -self.num_withdrawn["host"])
        blocks.prefixes.reset()
        host.check()
        for pool in (blocks.device, blocks.host):
            assert sorted(pool.free) == list(range(1, pool.num_pages)), "pages are lost"
            assert not pool.key_of
            assert not pool.pending_writers
        assert not self.gate or not self.gate.running, "an adapter is left behind"

    def _summary(self):
        host, events = self.host, self.events
        scheduled, stored = host.scheduler.counts, host.blocks.store.counts
        events |= {
            "swap-out": scheduled["preemptions_swap"],
            "swap-in": scheduled["swap_in"],
            "preemption by recompute": scheduled["preemptions_recompute"],
            "copy-on-write": stored["copy_on_write"],
            "fork": scheduled["fork"],
            "eviction": stored["eviction"],
            "eviction kept on host": stored["eviction_kept"],
            "host hit": stored["host_hit"],
            "host pool full": stored["host_pool_full"],
            "retirement awaited": scheduled["awaited_retirement"],
            "bypass": scheduled["bypass"],
            "NaN": sum(state is RequestState.FINISHED_ERROR for state, _ in host.ends.values()),
            "table update batch": host.runner.num_update_batches,
            "long prompt in chunks": scheduled["prefill_chunks"],
            "chunks cut to a bucket": scheduled["chunks_cut"],
            "prefix awaited": scheduled["await_prefix"],
            "passed page published": stored["passed_published"],
            "hit": sum(start > 0 for start in host.first_starts.values()),
        }
        events |= {f"abort {stage}": scheduled[f"abort_{stage}"] for stage in STAGES}
        return Summary(self.seed, self.num_steps, len(host.requests), events, self.digest.hexdigest())

    def _tokens(self, count):
        return [self.rng.randrange(10, 13) for _ in range(count)]
