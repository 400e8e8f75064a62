"""A device without a model: each key that it writes is a hash of the whole token history up to it.

`SymbolicDevice` gets what the compiled step gets: page moves, page-table changes and the packed buffer. It has page
tables, last tokens and host pages of its own, writes keys at the packed slots, reads them through the tables, and draws
the next token from all that a row may see and from its sampling parameters. A page that is stale, shared, freed too
early, copied wrongly or packed wrongly changes a token, and `Solo` gives the right token from the request alone.

Steps run in order but late, as on a real device: a change of a buffer after its handover is seen.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import Counter, deque
from dataclasses import dataclass, replace

import numpy as np

from jpaged.core.engine_core import EngineCore
from jpaged.kv_cache.block_manager import BlockManager
from jpaged.kv_cache.page_arithmetic import PageArithmetic
from jpaged.kv_cache.page_store import MoveKind
from jpaged.messages import ResultForm, Scoring
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend
from jpaged.request import CacheKey, Request, RequestState
from jpaged.research.weight_updates import WeightVersions
from jpaged.sampling.logit_rules_spec import LogitRulesSpec
from jpaged.sampling.sample_columns import SAMPLE_FIELDS, STOP_FIELDS
from jpaged.sampling.sampler import SampledRows
from jpaged.sampling.sampling_params import SamplingParams
from jpaged.sampling.token_scores import TokenScores
from jpaged.scheduling.admission import MAX_BYPASSES
from jpaged.scheduling.scheduler import Scheduler
from jpaged.scheduling.scheduler_config import SchedulerConfig
from jpaged.step.step_inputs import StepInputBuilder
from jpaged.step.step_sizes import StepSizes
from jpaged.text.grammar.grammar import Matcher
from jpaged.text.output_processor import OutputProcessor, weight_versions

from .invariants import check_scheduler
from .shrinking_pool import withdrawn_pages

VOCAB = 1 << 30
"""It is so large that two different histories never draw the same token by chance."""
EOS, STOP_TOKEN, POISON_TOKEN = 3, 4, 7
"""The model makes NaN of POISON_TOKEN and of every token after it."""
UNDRAWN = 9
"""The token that the device leaves where a row has drawn none: a token like any other."""
NAN = 0
"""The key that is not finite. No other key is 0."""
ENDLESS = 1 << 40
GRAMMAR_END, GRAMMAR_STUCK = 17, 97
"""One state of a grammar in so many is its end, or one from which it cannot go on."""
ALL_TOKENS = -1
"""The mask of a row without a grammar. The mask that allows token t alone is `ALL_TOKENS` − 1 − t."""


@dataclass(frozen=True)
class Model:
    """The rule by which keys and tokens follow from tokens; `windows` has one entry per page-table group."""

    windows: tuple[int | None, ...] = (None,)
    stop_share: int = 0
    """One drawn token in so many is EOS, and another one STOP_TOKEN; 0: none."""
    poison_share: int = 0

    def __post_init__(self):
        object.__setattr__(self, "spans", [ENDLESS if window is None else window for window in self.windows])

    def first_seen(self, group, position):
        """Return the first position that a query sees in a group."""
        return max(0, position - self.spans[group] + 1)

    def append(self, histories, extra, position, token):
        """Append the keys of one more token, which depend on all that it sees and on its position in the step."""
        index = len(histories[0])
        seen = [tuple(keys[max(0, index - span + 1) : index]) for keys, span in zip(histories, self.spans, strict=True)]
        if token == POISON_TOKEN or any(NAN in keys for keys in seen):
            for keys in histories:
                keys.append(NAN)
            return
        before = hash(tuple(seen))
        for group, keys in enumerate(histories):
            keys.append(hash((group, before, extra, position, token)) or 1)

    def is_finite(self, histories, end):
        """Return whether the logits after the first `end` tokens are finite."""
        return not any(NAN in keys[max(0, end - span) : end] for keys, span in zip(histories, self.spans, strict=True))

    def draw(self, histories, end, sample_row, mask=ALL_TOKENS):
        """Return the token after the first `end` ones, which a mask changes; None if the logits are not finite."""
        seen = [tuple(keys[max(0, end - span) : end]) for keys, span in zip(histories, self.spans, strict=True)]
        if not self.is_finite(histories, end):
            return None
        if mask < ALL_TOKENS:
            return ALL_TOKENS - 1 - mask
        number = hash((tuple(seen), sample_row if mask == ALL_TOKENS else (*sample_row, mask))) % VOCAB
        if self.stop_share and number % self.stop_share < 2:
            return (EOS, STOP_TOKEN)[number % self.stop_share]
        if self.poison_share and number % self.poison_share == 2:
            return POISON_TOKEN
        return max(number, 10)


def next_state(state, token):
    """Return the state of a grammar after one more token."""
    return hash((state, token))


def is_over(state):
    return state % GRAMMAR_END == 0


def is_stuck(state):
    return state % GRAMMAR_STUCK == 0


def mask_of(state):
    """Return the mask of a state, which stands for the tokens that may come next."""
    return state % VOCAB


class SymbolicMatcher(Matcher):
    """A matcher whose state is a number, and depends on all tokens in their order."""

    def __init__(self, state):
        self.state = state

    def copy(self):
        return SymbolicMatcher(self.state)

    def advance(self, token_id):
        self.state = next_state(self.state, token_id)
        return is_over(self.state)

    def advance_all(self, token_ids):
        for token_id in token_ids:
            self.advance(token_id)

    @property
    def failure(self):
        return "stuck" if is_stuck(self.state) else ""


class SymbolicGrammars:
    """Grammars that are numbers: a mask is a number for each row."""

    def masks(self, matchers):
        return np.array([[ALL_TOKENS if one is None else mask_of(one.state)] for one in matchers], np.int64)


class Solo:
    """One sequence that is computed by itself, without pages, steps or code of the host core."""

    def __init__(self, model, *, prompt, params, seed, sample_index, max_tokens, extra=0, grammar=None):
        self.grammar = self.first_grammar = grammar
        """The state of its grammar, which each of its output tokens changes, and the first one; None without one."""
        self.given = None
        """(number of tokens before it, token): a token that it does not draw; None if it draws all."""
        self.model, self.params, self.extra = model, params, extra
        self.is_pure = True
        """All of its keys are those of its present `extra`."""
        self.versions = []
        """The version of the weights that drew each output token."""
        self.prompt_len, self.max_len = len(prompt), len(prompt) + max_tokens
        self.seed = seed
        self.tokens, self.keys = [], [[] for _ in model.windows]
        self.end = None
        for token in prompt:
            self.append(token)
        self._set_row(sample_index)

    def fork(self, sample_index, num_tokens=None, token=None):
        """Return a copy of the first tokens that draws its next ones with another sample index, or `token` first.

        It computes the last of these tokens anew, maybe with other weights than its parent did.
        """
        other = object.__new__(Solo)
        other.__dict__.update(self.__dict__)
        num_tokens = len(self.tokens) if num_tokens is None else num_tokens
        other.tokens, other.keys = self.tokens[:num_tokens], [keys[: num_tokens - 1] for keys in self.keys]
        self.model.append(other.keys, self.extra, num_tokens - 1, other.tokens[-1])
        other.versions = self.versions[: num_tokens - self.prompt_len]
        other.given = None if token is None else (num_tokens, token)
        if self.grammar is not None:
            other.grammar = self.first_grammar
            for each in other.tokens[self.prompt_len :]:
                other.grammar = next_state(other.grammar, each)
        other._set_row(sample_index)
        return other

    def change_weights(self, extra, num_kept):
        """Keep the first `num_kept` keys, and compute all others with other weights."""
        self.extra, self.is_pure = extra, num_kept == 0
        self.keys = [keys[:num_kept] for keys in self.keys]
        for position in range(num_kept, len(self.tokens)):
            self.model.append(self.keys, extra, position, self.tokens[position])

    def give(self, tokens):
        """Append tokens that are given, of which the last has no keys. They are scored, and nothing is drawn."""
        for token in tokens[:-1]:
            self.model.append(self.keys, self.extra, len(self.tokens), token)
            self.tokens.append(token)

    def next_token(self):
        """Return the token that it draws now; None if its logits are not finite, or its grammar cannot go on."""
        if self.grammar is not None and is_stuck(self.grammar):
            return None
        mask = ALL_TOKENS if self.grammar is None else mask_of(self.grammar)
        if self.given is not None and self.given[0] == len(self.tokens):
            mask = ALL_TOKENS - 1 - self.given[1]
        return self.model.draw(self.keys, len(self.tokens), (len(self.tokens) - self.prompt_len, *self.row), mask)

    def append(self, token):
        self.model.append(self.keys, self.extra, len(self.tokens), token)
        self.tokens.append(token)
        if len(self.tokens) > self.prompt_len:
            is_end = token == EOS and not self.params.ignore_eos
            if is_end or token in (self.params.stop_token_ids or ()):
                self.end = RequestState.FINISHED_STOPPED
                return
            if self.grammar is not None:
                self.grammar = next_state(self.grammar, token)
                if is_over(self.grammar):
                    self.end = RequestState.FINISHED_STOPPED
                    return
            if len(self.tokens) == self.max_len:
                self.end = RequestState.FINISHED_LENGTH

    def run(self):
        """Run to the end; return the output tokens and the state it ends in."""
        while self.end is None:
            token = self.next_token()
            if token is None:
                self.end = RequestState.FINISHED_ERROR
            else:
                self.append(token)
        return self.tokens[self.prompt_len :], self.end

    def _set_row(self, sample_index):
        params = self.params
        floats = [float(np.float32(value)) for value in (params.temperature, params.top_p, params.min_p)]
        self.row = (sample_index, self.seed % 2**32, self.seed // 2**32, params.top_k, *floats)


def _seed(own, engine_seed, number):
    """Return 64 bits: the request's own seed, or a hash of the engine's seed and the request's number."""
    text = f"jpaged request seed {engine_seed % 2**64} {number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") if own is None else own % 2**64


class SymbolicDevice:
    """A device that executes steps; `max_pages` is the width of a page table."""

    def __init__(self, model, *, num_blocks, num_host_blocks, block_size, max_num_seqs, max_pages, first_garbage=1):
        self.model = model
        self.block_size = block_size
        self.garbage = (-(1 << 62) - number for number in itertools.count(first_garbage))
        self.keys = [next(self.garbage) for _ in range(num_blocks * block_size)]
        self.host_keys = [next(self.garbage) for _ in range(max(1, num_host_blocks) * block_size)]
        self.tables = [[[0] * max_pages for _ in range(max_num_seqs + 1)] for _ in model.windows]
        self.last_tokens = [-1] * (max_num_seqs + 1)
        self.pending_writers = {}
        """Page → the row that writes it in this step."""
        self.scored = []
        self.hidden = None
        """What the sampler of the last step with masks reads."""
        self.counts = Counter()
        """Page moves of each kind, and changes of the page tables."""

    def run(self, step, moves, extras):
        """Run one step after its moves; return the drawn tokens, None where the logits were not finite.

        A step with masks draws nothing here: `sample` does.

        `extras`: state slot → what its keys depend on besides tokens, such as an adapter.
        """
        self.scored, self.hidden = [], None
        self._move(moves)
        for changes in step.table_updates:
            self._change_tables(changes.tolist())
        if step.layout is None:
            return []
        view = {name: array.tolist() for name, array in step.layout.view(step.packed).items() if name != "plan"}
        self._change_tables(view["changes"])
        num_tokens, num_rows, num_decode_rows, num_samples = view["counts"]
        self._check_padding(view, num_tokens, num_rows)
        if step.decode_lens:
            num_steps = max(step.decode_lens)
            assert num_steps == max(view["decode_lens"]), "as many steps as the host waits for"
            assert num_decode_rows == num_rows == num_samples, "several steps of rows that do not decode"
            return self._decode(view, num_rows, num_steps, extras)
        assert not any(view["decode_lens"]), "a row goes on in a step of one token"
        starts = view["query_starts"]
        self.pending_writers = {}
        self._claim_slots(view["slot_mapping"], starts, num_rows)
        row_of_token = {}
        histories = []
        for row in range(num_rows):
            start, end = starts[row], starts[row + 1]
            assert end > start, "a row without a token"
            assert (end - start == 1) == (row < num_decode_rows), "rows of one token do not come first"
            state_slot = view["seq_slots"][row]
            first = view["context_lens"][row] - (end - start)
            history = self._read(row, state_slot, first)
            for token in range(start, end):
                token_id = view["token_ids"][token]
                assert token_id != -1, "−1 would wrap to the last row of the embedding"
                if token_id < -1:
                    assert -token_id - 1 == state_slot, "another sequence's last token"
                    token_id = self.last_tokens[state_slot]
                self.model.append(history, extras[state_slot], view["positions"][token], token_id)
                self._write(history, state_slot, [slots[token] for slots in view["slot_mapping"]])
                row_of_token[token] = (row, len(history[0]))
            histories.append(history)
        # For each batch the position that each given token is scored from, and the token.
        for batch in step.scores:
            assert batch.num_rows <= batch.columns.shape[1] <= step.layout.num_samples, "no program takes that"
            token, target, _ = batch.columns[:, : batch.num_rows].tolist()
            rows = []
            for one, given in zip(token, target, strict=True):
                row, end = row_of_token[one]
                rows.append((end - 1, given, self.model.is_finite(histories[row], end)))
            self.scored.append(rows)
        self.hidden = view["samples"], num_samples, row_of_token, histories
        return None if step.has_masks else self._sample(*self.hidden)

    def sample(self, masks):
        """Draw the tokens of the last step that was run, one mask for each."""
        assert self.hidden is not None, "another step has overwritten the hidden states"
        return self._sample(*self.hidden, masks)

    def _decode(self, view, num_rows, num_steps, extras):
        """Decode all rows token by token, each until it has its steps or has drawn an end; return [steps][samples]."""
        columns = dict(zip(SAMPLE_FIELDS, view["samples"], strict=True))
        stops = list(zip(*(columns[name] for name in STOP_FIELDS), strict=True))
        samples = [columns["token"].index(row) for row in range(num_rows)]
        drawn = [[UNDRAWN] * num_rows for _ in range(num_steps)]
        for index in range(num_steps):
            self.pending_writers = {}
            for row, sample in enumerate(samples):
                slot = view["seq_slots"][row]
                assert 0 < view["decode_lens"][row] <= num_steps, "a row without a token, or with too many"
                is_live = index < view["decode_lens"][row] and self.last_tokens[slot] not in stops[sample]
                if not is_live and index:
                    continue
                position = view["positions"][row] + index
                history = self._read(row, slot, position)
                page_index, offset = divmod(position, self.block_size)
                slots = [tables[slot][page_index] * self.block_size + offset for tables in self.tables]
                self._claim_slots([[each] for each in slots], [0, 1], 1, row)
                assert all(each >= self.block_size for each in slots), "a token writes the null page"
                if is_live:
                    self.model.append(history, extras[slot], position, self.last_tokens[slot])
                    self._write(history, slot, slots)
                    now = [list(column) for column in view["samples"]]
                    now[SAMPLE_FIELDS.index("output_index")][sample] += index
                    one = [column[sample : sample + 1] for column in now]
                    (drawn[index][sample],) = self._sample(one, 1, {row: (0, len(history[0]))}, [history])
        return drawn

    def _sample(self, samples, num_samples, row_of_token, histories, masks=None):
        columns = dict(zip(SAMPLE_FIELDS, samples, strict=True))
        floats = np.array([columns[name] for name in ("temperature", "top_p", "min_p")], np.int32)
        temperatures, top_ps, min_ps = floats.view(np.float32).tolist()
        drawn = []
        for sample in range(num_samples):
            row, end = row_of_token[columns["token"][sample]]
            sample_row = (
                columns["output_index"][sample],
                columns["sample_index"][sample],
                columns["seed_low"][sample] % 2**32,
                columns["seed_high"][sample] % 2**32,
                columns["top_k"][sample],
                temperatures[sample],
                top_ps[sample],
                min_ps[sample],
            )
            token = self.model.draw(
                histories[row], end, sample_row, ALL_TOKENS if masks is None else int(masks[sample][0])
            )
            drawn.append(token)
            slot = columns["slot"][sample]
            assert slot > 0, "a token is drawn in the null slot"
            self.last_tokens[slot] = POISON_TOKEN if token is None else token
        for slot in columns["slot"][num_samples:]:
            self.last_tokens[slot] = -1
        return drawn

    def _read(self, row, state_slot, num_keys):
        """Return the keys that the first query of a row sees, at their positions, per group."""
        size = self.block_size
        histories = []
        for group, tables in enumerate(self.tables):
            table, first = tables[state_slot], self.model.first_seen(group, num_keys)
            first_page = first // size
            keys = [NAN] * (first_page * size)
            for page in table[first_page : -(-num_keys // size)]:
                assert self.pending_writers.get(page, row) == row, (
                    "a row reads what another one writes in the same step"
                )
                keys += self.keys[page * size : page * size + size]
            del keys[num_keys:]
            histories.append(keys)
        return histories

    def _write(self, histories, state_slot, slots):
        index = len(histories[0]) - 1
        page_index, offset = divmod(index, self.block_size)
        for group, (keys, slot) in enumerate(zip(histories, slots, strict=True)):
            page = self.tables[group][state_slot][page_index]
            assert page * self.block_size + offset == slot, "a key is written to another slot than the page table says"
            self.keys[slot] = keys[-1]

    def _move(self, moves):
        """Make the copies one after another."""
        pools, size = {"device": self.keys, "host": self.host_keys}, self.block_size
        for move in moves:
            assert move.source > 0 < move.destination, "the null page is moved"
            self.counts[move.kind.value] += 1
            source, destination = {
                MoveKind.COPY: ("device", "device"),
                MoveKind.SWAP_OUT: ("device", "host"),
                MoveKind.SWAP_IN: ("host", "device"),
            }[move.kind]
            keys = pools[source][move.source * size : move.source * size + size]
            at = move.destination * size
            assert len(keys) == size, "a page that does not exist"
            assert at < len(pools[destination]), "a page that does not exist"
            pools[destination][at : at + size] = keys

    def _change_tables(self, changes):
        entries = [change[:3] for change in zip(*changes, strict=True) if change[3]]
        assert len(set(entries)) == len(entries), "an entry changes twice in one step: a device takes either"
        for group, slot, index, page in zip(*changes, strict=True):
            assert min(group, slot, index, page) >= 0, "a negative index wraps"
            assert (slot == 0) == (page == 0), "the null page and the null slot belong to padding"
            self.counts["table_changes"] += slot > 0
            self.tables[group][slot][index] = page

    def _check_padding(self, view, num_tokens, num_rows):
        assert all(slot > 0 for slot in view["seq_slots"][:num_rows]), "a row in the null slot"
        assert not any(view["seq_slots"][num_rows:]), "a padding row has a state slot"
        assert not any(view["context_lens"][num_rows:]), "a padding row has a context"
        assert set(view["query_starts"][num_rows:]) == {num_tokens}, "a padding row has queries"
        assert not any(view["token_ids"][num_tokens:]), "a padding token has an id"
        assert len(set(view["seq_slots"][:num_rows])) == num_rows, "two rows of one state slot"
        for slots in view["slot_mapping"]:
            assert all(slot >= self.block_size for slot in slots[:num_tokens]), "a token writes the null page"
            assert not any(slots[num_tokens:]), "padding writes a real page"

    def _claim_slots(self, slots_by_group, starts, num_rows, first_row=0):
        """Check that one token writes each slot and one row each page. Until then the slots hold garbage, as the null
        page always does."""
        claimed = set()
        for slots in slots_by_group:
            for row in range(num_rows):
                for slot in slots[starts[row] : starts[row + 1]]:
                    assert slot not in claimed, "two tokens write one slot"
                    claimed.add(slot)
                    writer = self.pending_writers.setdefault(slot // self.block_size, first_row + row)
                    assert writer == first_row + row, "two rows write one page"
                    self.keys[slot] = next(self.garbage)
        for slot in range(self.block_size):
            self.keys[slot] = next(self.garbage)


class DeviceError(Exception):
    """An injected fault of the device."""


class Interrupt(BaseException):
    """An injected interrupt, such as a user's Ctrl-C."""


class InterruptedOutputs(OutputProcessor):
    """Output rules in the middle of which a user may interrupt."""

    interrupt = None
    """Interrupt "before" or "after" the next token is checked; None: not at all."""

    def _allow_only(self, masks, row, token_id):
        masks[row] = ALL_TOKENS - 1 - token_id

    def check_stop(self, sequence, sampled, row):
        self._fail("before")
        end = super().check_stop(sequence, sampled, row)
        self._fail("after")
        return end

    def _fail(self, when):
        if self.interrupt == when:
            self.interrupt = None
            raise Interrupt(when)


class SymbolicRunner:
    """A runner on a symbolic device, which runs steps in order, at the latest when their results are read."""

    has_state = True

    def __init__(self, make_device, extras_of_slots, *, is_late=lambda: False):
        self.make_device = make_device
        self.extras_of_slots = extras_of_slots
        self.is_late = is_late
        self.fault = None
        """The next fault: "dispatch before", "dispatch after" or "read"; None: no fault."""
        self.num_update_batches = self.num_masked = 0
        self.device = None
        self.reset()

    def reset(self):
        """Replace the device by a new one, as at start."""
        self.device = self.make_device()
        self.queue = deque()

    def dispatch(self, step):
        self._fail("dispatch before")
        # Moves are read now, everything else when the device runs the step.
        self.num_update_batches += len(step.table_updates)
        handle = _Results(self, step, list(step.moves), self.extras_of_slots(), step.has_masks or None)
        self.queue.append(handle)
        if not self.is_late():
            self.drain()
        self._fail("dispatch after")
        return handle

    def sample(self, step, outputs, masks):
        assert outputs.columns, "the step has drawn its tokens"
        assert len(masks) == step.num_samples, "a mask for each sample"
        self.num_masked += 1
        handle = _Sampled(self, step, outputs, masks)
        self.queue.append(handle)
        if not self.is_late():
            self.drain()
        return handle

    def drain(self, last=None):
        """Let the device run the steps it was given, up to `last` if one is given."""
        while self.queue:
            handle = self.queue.popleft()
            handle.run()
            if handle is last:
                break

    def _fail(self, fault):
        if self.fault == fault:
            self.fault = None
            if fault == "dispatch after":
                self.drain()
            raise DeviceError(fault)


class _Results:
    def __init__(self, runner, step, moves, extras, columns):
        self.runner, self.step, self.moves, self.extras, self.columns = runner, step, moves, extras, columns
        self.drawn, self.scored = None, []

    def run(self):
        self.drawn = self.runner.device.run(self.step, self.moves, self.extras)
        self.scored = self.runner.device.scored

    def read(self):
        self.runner._fail("read")
        if self.drawn is None:
            self.runner.drain(last=self)
        if not self.step.num_samples:
            return None
        drawn = np.array(self.drawn, object)
        assert drawn.shape[-1] == self.step.num_samples, "as many tokens as samples"
        is_finite = drawn != None  # noqa: E711  (of each)
        # The token of a NaN row means nothing: here it is one that ends sequences.
        return SampledRows(np.where(is_finite, drawn, EOS).astype(np.int32), is_finite)

    def read_scores(self):
        """Return as log probability of each token the position that it was scored from."""
        found = []
        for batch in self.scored:
            positions, targets, is_finite = (np.array(column) for column in zip(*batch, strict=True))
            nothing = np.zeros((len(targets), 0))
            scores = TokenScores(positions.astype(np.float32), np.ones_like(targets), nothing.astype(int), nothing)
            found.append(SampledRows(targets, is_finite, scores))
        return found


def _is_stuck(sequence):
    """Return whether a sequence has ended since its grammar cannot go on, as its step's sampler finds."""
    return sequence.request.grammar is not None and sequence.state is RequestState.FINISHED_ERROR


class _Sampled(_Results):
    """The results of a step with masks, whose sampler runs after the step itself."""

    def __init__(self, runner, step, outputs, masks):
        super().__init__(runner, step, [], {}, None)
        self.outputs, self.masks = outputs, masks

    def run(self):
        self.drawn, self.scored = self.runner.device.sample(self.masks), self.outputs.scored


class Host:
    """The core that `Engine` drives, over a symbolic device, with all promises checked at every step."""

    def __init__(
        self,
        *,
        num_blocks=64,
        block_size=4,
        windows=(None,),
        num_host_blocks=0,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=128,
        enable_prefix_caching=True,
        max_cached_blocks=None,
        platform="cpu",
        engine_seed=0,
        stop_share=0,
        poison_share=0,
        is_late=lambda: False,
        long_prefill_token_threshold=0,
        max_chunk=None,
        bounds_scores=False,
        gate=None,
        log_event=lambda *event: None,
        **options,
    ):
        """`options` are further fields of `SchedulerConfig`; `max_chunk` is given where a step decodes more."""
        self.model = Model(windows, stop_share, poison_share)
        self.engine_seed = engine_seed
        self.log_event = log_event
        self.now = 0.0
        largest_chunk = max_chunk or long_prefill_token_threshold or max_num_batched_tokens
        self.arithmetic = PageArithmetic(windows, block_size, largest_chunk)
        self.blocks = BlockManager(
            num_blocks=num_blocks,
            arithmetic=self.arithmetic,
            enable_prefix_caching=enable_prefix_caching,
            num_host_blocks=num_host_blocks,
            max_cached_blocks=max_cached_blocks,
        )
        sizes = StepSizes("float32", "float32", block_size, max_model_len, max_num_seqs, max_num_batched_tokens)
        buckets = sizes.buckets(platform)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_token_threshold=long_prefill_token_threshold,
            token_buckets=buckets.num_tokens,
            max_scored=buckets.max_samples if bounds_scores else None,
            **options,
        )
        self.scheduler = Scheduler(self.blocks, config, clock=lambda: self.now, gate=gate)
        builder = StepInputBuilder(sizes, buckets, XlaBackend(), rules_spec=LogitRulesSpec(0), windows=windows)
        first_garbage = itertools.count(1, 1 << 32)
        self.runner = SymbolicRunner(
            lambda: SymbolicDevice(
                self.model,
                num_blocks=num_blocks,
                num_host_blocks=num_host_blocks,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_pages=sizes.max_pages,
                first_garbage=next(first_garbage),
            ),
            lambda: {sequence.seq_slot: self.solos[sequence].extra for sequence in self._running()},
            is_late=is_late,
        )
        self.core = EngineCore(
            scheduler=self.scheduler,
            builder=builder,
            runner=self.runner,
            outputs=InterruptedOutputs(None, eos_token_ids=[EOS], grammars=SymbolicGrammars()),
            clock=lambda: self.now,
        )
        self.requests = []
        self.solos = {}
        """Sequence → the same sequence computed alone, as far as it has come."""
        self.unfinished = []
        self.ends = {}
        """Sequence → (state, number of tokens) when its end was first seen."""
        self.versions = WeightVersions(self.scheduler)
        self.num_recomputed = {}
        self.awaits_old_keys = set()
        """Request → how often it had lost its pages when its keys were last followed."""
        self.extras = {}
        self.claims = {}
        """(group, page hash) → the keys that the page must hold, and the extras and tokens that they come from."""
        self.num_claimed = {}
        self.counts = Counter()
        self.written = deque()
        """Page → the request that it is written for, for each step in flight."""
        self.bypassed = Counter()
        self.first_starts = {}
        self.num_stuck = self.num_idle = self.max_used = self.max_host_used = 0
        self.oldest = None

    # Events

    def add(
        self,
        prompt,
        *,
        max_tokens=4,
        params=None,
        scores=False,
        needs_every_token=False,
        cache_key=None,
        continuations=(),
        first=0,
        grammar=None,
        **options,
    ):
        """Queue a request, whose number is its index in `requests`.

        With `continuations`, lists of tokens, it draws nothing, and scores them from the token `first` of each on.
        `grammar` is the first state of its grammar.
        """
        assert max_tokens >= 1
        params = params or SamplingParams(detokenize=False)
        if continuations:
            params = replace(params, n=len(continuations), temperature=1.0, logprobs=0)
            max_tokens = max(map(len, continuations))
            packed = tuple(array("i", tokens).tobytes() for tokens in continuations)
            options |= {
                "scoring": Scoring(continuations=packed, temperatures=(1.0,) * len(packed), first=first),
                "form": ResultForm.ARRAYS,
            }
        request = Request(
            request_id=f"r{len(self.requests)}",
            number=len(self.requests),
            prompt_token_ids=list(prompt),
            params=replace(params, prompt_logprobs=0) if scores else params,
            arrival_time=self.now,
            max_tokens=max_tokens,
            engine_seed=self.engine_seed,
            num_groups=self.arithmetic.num_groups,
            cache_key=cache_key or CacheKey(),
            stop_ids=params.end_ids(frozenset([EOS])),
            grammar=None if grammar is None else SymbolicMatcher(grammar),
            **options,
        )
        self.versions.tag(request)
        self.core.queue(request)
        self.requests.append(request)
        self.unfinished.append(request)
        seed = _seed(request.params.seed, self.engine_seed, request.number)
        extra = self._extra(request)
        self.num_recomputed[request] = 0
        solo = Solo(
            self.model,
            prompt=prompt,
            params=request.params,
            seed=seed,
            sample_index=request.sequences[0].index,
            max_tokens=max_tokens,
            extra=extra,
            grammar=grammar,
        )
        for sequence in request.sequences:
            sequence.needs_every_token |= needs_every_token
            self.solos[sequence] = solo if sequence is request.sequences[0] else solo.fork(sequence.index)
        for sequence, tokens in zip(request.sequences, continuations, strict=False):
            self.solos[sequence].give(tokens)
        self.check()
        return request

    def fork(self, parent, n=1, num_tokens=None, first_token_ids=None):
        """Add samples to the parent's request, with the next free indices."""
        first = max(sequence.index for sequence in parent.request.sequences) + 1
        children = self.core.fork(parent, range(first, first + n), num_tokens, first_token_ids)
        for index, child, token in zip(itertools.count(first), children, first_token_ids or [None] * n, strict=False):
            assert child.index == index
            assert child.token_ids == parent.token_ids[:num_tokens], "a fork that differs from its parent"
            solo = self.solos[child] = self.solos[parent].fork(index, num_tokens, token)
            if not child.awaits_parent and child.fork_len < len(child.token_ids):
                solo.change_weights(solo.extra, 0)  # Windows of its parent have passed what it would share.
        self.check()
        return children

    def _extra(self, request):
        """Return what the keys of a request depend on besides tokens, from now on."""
        key = replace(request.cache_key, weights_version=0)
        return self.extras.setdefault(key, len(self.extras)) + (self.versions.num_updates << 20)

    def update_weights(self, mode):
        """Let another version of the weights compute what comes; `mode` is one of `IN_FLIGHT`."""
        admission = self.scheduler.admission
        while self.core.in_flight:
            self.retire()
        if mode == "wait":
            admission.hold_newcomers()
            self.check()
            while any(request.first_scheduled_time is not None for request in self.unfinished):
                before = set(self.first_starts)
                self.dispatch()
                assert set(self.first_starts) == before, "a request begins that should wait for the new weights"
                while self.core.in_flight:
                    self.retire()
            admission.release_newcomers()
        for request in list(self.unfinished) if mode == "abort" else ():
            self.abort(request)
        if mode == "recompute":
            self.core.restart()
        for request in self.unfinished if mode == "keep" else ():
            if request.scoring is not None and request.state is not RequestState.WAITING:
                self.scheduler.recompute(request)
        self.runner.drain()
        num_kept = {sequence: self._num_kept(sequence) for request in self.unfinished for sequence in request.live}
        self.versions.advance(self.versions.version + 3)
        for sequence, num in num_kept.items():
            self.solos[sequence].change_weights(self._extra(sequence.request), num)
            self.num_claimed.pop(sequence, None)
        self.awaits_old_keys = {sequence for sequence, num in num_kept.items() if num and sequence.awaits_parent}
        for request in self.unfinished:
            self.num_recomputed[request] = request.num_preemptions - request.num_swaps
        self.check()

    def _num_kept(self, sequence):
        """Return how many keys of a sequence are in pages, of its own or of the sample that it waits for."""
        if sequence.request.state is RequestState.WAITING:
            return 0
        if sequence.awaits_parent:
            if sequence.parent is None:
                return 0  # Its parent ended before it had computed anything for it.
            return min(sequence.fork_len, sequence.num_tokens - 1, self._num_kept(sequence.parent))
        return min(sequence.num_computed, len(sequence.token_ids))

    def _follow_recomputations(self, work):
        """Note which requests begin anew after they had lost their pages: all their keys are of the present weights."""
        for request in dict.fromkeys(chunk.sequence.request for chunk in work.chunks):
            num_recomputed = request.num_preemptions - request.num_swaps
            if num_recomputed != self.num_recomputed[request]:
                self.num_recomputed[request] = num_recomputed
                for sequence in request.live:
                    assert len(sequence.token_ids) == len(self.solos[sequence].tokens), "tokens in flight"
                    self.solos[sequence].change_weights(self._extra(request), 0)

    def _follow_lone_forks(self, chunks=()):
        """Note which samples that awaited keys of older weights compute them anew: their parent cannot give them.

        The parent has ended, or its window has passed the pages. `chunks` are those of a step that was just scheduled.
        """
        starts = {chunk.sequence: chunk.start for chunk in chunks}
        for sequence in [one for one in self.awaits_old_keys if not one.awaits_parent]:
            self.awaits_old_keys.remove(sequence)
            # A sample alone keeps a fork_len of at most 1, and starts where the prefix cache ends.
            is_lone = sequence.fork_len < 2 and starts.get(sequence, sequence.num_computed) != 1
            if is_lone and not sequence.state.is_finished:
                self.solos[sequence].change_weights(self._extra(sequence.request), 0)

    def abort(self, request):
        self.core.abort(request)
        self._note_ends(request)
        self.check()

    def abort_sequence(self, sequence):
        self.core.abort_sample(sequence)
        self._note_ends(sequence.request)
        self.check()

    def dispatch(self):
        """Start a step; return its work."""
        waiting, running = list(self.scheduler.waiting), set(self.scheduler.running)
        blocks = self.blocks
        num_in_flight = len(self.core.in_flight)
        try:
            work = self.core.dispatch()
        finally:
            self._follow_recomputations(self.scheduler._work)
            self._follow_lone_forks(self.scheduler._work.chunks)
            self._note_admissions(self.scheduler._work, waiting)
        for request in work.ignored:
            self._note_ends(request)
        self.check()
        self._check_work(work, running)
        self._check_bypasses(waiting)
        self._check_progress(work, num_in_flight)
        if len(self.core.in_flight) > num_in_flight:
            self._check_pages(self.core.in_flight[-1].inputs, work)
        self.max_used = max(self.max_used, blocks.device.num_used)
        self.max_host_used = max(self.max_host_used, blocks.host.num_used)
        assert self.max_used <= blocks.device.peak_used < blocks.device.num_pages, "the peak was higher"
        assert self.max_host_used <= blocks.host.peak_used < blocks.host.num_pages, "the peak was higher"
        return work

    def retire(self):
        """Retire the oldest step in flight; return the sequences that it drew for."""
        work = self.core.in_flight[0].work
        try:
            samples = self.core.retire()
        except Interrupt:
            for request in list(self.unfinished):
                self._follow(request)
            raise
        self.written.popleft()
        self._follow_lone_forks()
        chunks = [chunk.sequence for chunk in work.chunks]  # Scores may end what draws nothing in this step.
        for request in dict.fromkeys(sequence.request for sequence in (*samples, *chunks)):
            self._follow(request)
            self._note_ends(request)
        self.check()
        return samples

    def restart(self):
        """Go on after a fault, with a new device that knows nothing."""
        for request in self.scheduler.running:  # The failed step may have admitted some.
            self.bypassed.pop(request, None)
        self.runner.reset()
        self.core.restart()
        self.written.clear()
        for request in self.unfinished:  # The failed step may have ended some.
            self._note_ends(request)
        self.check()

    def step(self):
        """Run one step and retire it; return its work."""
        work = self.dispatch()
        while self.core.in_flight:
            self.retire()
        self.check_contents()
        return work

    def run(self):
        """Step until all requests have ended, and check that nothing is left behind."""
        while self.scheduler.has_unfinished:
            self.step()
        self.check_end()
        return self

    # Checks

    def check(self):
        """Check the host's invariants, and S2: an unfinished request is in exactly one queue."""
        check_scheduler(self.scheduler)
        for request in self.unfinished:
            if any(map(_is_stuck, request.sequences)):  # The sampler of any step in flight may find that.
                self._note_ends(request)
        self.unfinished = [request for request in self.unfinished if not request.state.is_finished]
        scheduler = self.scheduler
        queued = [*scheduler.waiting, *scheduler.running, *scheduler.swapped, *scheduler.admission.held]
        assert len(queued) == len(self.unfinished), "a request in no queue, or in two"
        assert set(queued) == set(self.unfinished), "a request in no queue"

    def check_contents(self):
        """Check that every page that is owned or can be found holds what it should."""
        self.runner.drain()
        if self.blocks.store.moves:
            return  # The device has still to make them.
        size, device = self.arithmetic.block_size, self.runner.device
        for request in self.unfinished:
            if request.state is RequestState.WAITING:
                continue
            stored = device.host_keys if request.state is RequestState.SWAPPED else device.keys
            for sequence in request.live:
                keys = self.solos[sequence].keys
                num_known = min(sequence.num_computed, len(sequence.token_ids))
                for group, pages in enumerate(sequence.pages):
                    first = self.model.first_seen(group, min(num_known, len(sequence.token_ids) - 1)) // size
                    for index in range(first, -(-num_known // size)):
                        start, end = index * size, min(num_known, index * size + size)
                        at = pages[index] * size
                        assert stored[at : at + end - start] == keys[group][start:end], (
                            f"page {pages[index]} of r{request.number} holds something else"
                        )
                self._claim(sequence)
                self._check_passed_pages(sequence)
        for pool, stored in ((self.blocks.device, device.keys), (self.blocks.host, device.host_keys)):
            for key, page in pool.page_of.items():
                keys, _ = self.claims[key]
                assert NAN not in keys, "a page is published that is not finite"
                assert stored[page * size : page * size + size] == keys, "a page is found by the hash of another one"

    def _check_passed_pages(self, sequence):
        """Check that pages which windows have passed hold what would be found in them if they were published now."""
        size, solo = self.arithmetic.block_size, self.solos[sequence]
        for (group, index), (page, num_takes) in sequence.prefix.passed_pages.items():
            if self.blocks.device.is_kept(page, num_takes):
                stored = self.runner.device.keys[page * size : page * size + size]
                assert stored == solo.keys[group][index * size : index * size + size], "a passed page was written"

    def check_end(self):
        """Check that every sequence ended as it does alone, and that pools and slots are as at the start."""
        assert not self.scheduler.has_unfinished
        assert not self.core.in_flight
        assert not self.unfinished
        for request in self.requests:
            assert request.state.is_finished
            assert not request.live
            for sequence in request.sequences:
                assert self.ends[sequence] == (sequence.state, len(sequence.token_ids)), "a sequence ended twice"
                assert list(sequence.token_ids) == self.solos[sequence].tokens, "tokens other than alone"
        device, host = self.blocks.device, self.blocks.host
        pinned = set(self.blocks.store.pinned_pages.values())
        assert device.num_used == len(pinned), "pages are left behind"
        assert host.num_used == 0, "host pages are left behind"
        for pool in (device, host):
            assert not pool.deferred, "a page is deferred for ever"
            assert pool.num_free + len(withdrawn_pages(pool)) + pool.num_used == pool.num_pages - 1
        assert len(self.scheduler.free_slots) == self.scheduler.config.max_num_seqs, "slots are left behind"

    def _running(self):
        return [sequence for request in self.scheduler.running for sequence in request.live]

    def _claim(self, sequence):
        """Check that each page hash of a sequence stands for the same tokens and extras in all sequences."""
        size, solo = self.arithmetic.block_size, self.solos[sequence]
        if not solo.is_pure:
            return  # No page of it may be published, so that a claim of one would be missed.
        for index in range(self.num_claimed.get(sequence, 0), len(sequence.prefix.hashes)):
            page_hash, end = sequence.prefix.hashes[index], (index + 1) * size
            origin = (solo.extra, tuple(solo.tokens[:end]))
            for group, keys in enumerate(solo.keys):
                claim = self.claims.setdefault((group, page_hash), (keys[end - size : end], origin))
                assert claim[1] == origin, "two prefixes with one hash"
        self.num_claimed[sequence] = len(sequence.prefix.hashes)

    def _follow(self, request):
        """Compare new tokens with those of the solo run."""
        for sequence in request.sequences:
            solo = self.solos[sequence]
            if sequence in self.ends:
                continue
            for token in sequence.token_ids[len(solo.tokens) :]:
                assert solo.end is None, "a token after the end"
                assert token == solo.next_token(), f"r{request.number}.{sequence.index} draws another token than alone"
                solo.append(token)
                solo.versions.append(self.versions.version)
                self.log_event("token", request.number, sequence.index, token)
            self._claim(sequence)

    def _note_ends(self, request):
        """Check that a sequence ends once, and as it does alone."""
        for sequence in request.sequences:
            if not sequence.state.is_finished or sequence in self.ends:
                continue
            solo = self.solos[sequence]
            self.ends[sequence] = (sequence.state, len(sequence.token_ids))
            found = [
                one.version for one in weight_versions(sequence, len(solo.versions)) for _ in range(one.start, one.end)
            ]
            assert found == solo.versions, "a token of other weights than its output says"
            self.log_event("end", request.number, sequence.index, sequence.state.value)
            match sequence.state:
                case RequestState.FINISHED_ERROR:
                    assert not request.live, "an error of one sample that its siblings survive"
                    siblings = [one for one in request.sequences if one.state is RequestState.FINISHED_ERROR]
                    assert any(self._has_fault(one) for one in siblings), "an error without a cause"
                case RequestState.FINISHED_LENGTH if request.scoring is not None:
                    first = request.scoring.first
                    found = sequence.numbers.logprobs[first : len(solo.tokens) + 1 - request.prompt_len].tolist()
                    assert found == list(range(request.first_scored, len(solo.tokens))), "a token scored wrongly"
                case RequestState.FINISHED_STOPPED | RequestState.FINISHED_LENGTH:
                    assert sequence.state is solo.end, f"r{request.number} ends otherwise than alone"
                    self._check_scores(request)
                case RequestState.FINISHED_IGNORED:
                    assert request.error
                case _:
                    assert solo.end is None, "aborted after its end"
        for sequence in request.live:
            assert self.solos[sequence].end is None, "a sequence goes on after its end"

    def _has_fault(self, sequence):
        """Return whether logits of a sequence are not finite: those of its next token, or of any that is scored."""
        solo, request = self.solos[sequence], sequence.request
        ends = range(request.first_scored + 1, len(solo.tokens) + 1) if request.scoring is not None else ()
        ends = range(1, request.prompt_len) if request.needs_prompt_scores else ends
        return solo.next_token() is None or any(not self.model.is_finite(solo.keys, end) for end in ends)

    def _check_scores(self, request):
        """Check that each token of a prompt is scored from the one before it."""
        if not request.needs_prompt_scores:
            return
        shown = self.core.outputs.output_of(request).prompt_logprobs
        assert shown is not None, "a prompt unscored"
        assert shown[0] is None
        for position, entries in enumerate(shown[1:]):
            wanted = {request.prompt_token_ids[position + 1]: position}
            assert {token_id: entry.logprob for token_id, entry in entries.items()} == wanted, "a token scored wrongly"

    def _check_work(self, work, running):
        """Check S1 and S9: budget, slots, and what is scheduled; `running` are the requests that ran before."""
        config = self.scheduler.config
        rows = [*work.decodes, *(chunk.sequence for chunk in work.chunks)]
        num_tokens = len(work.decodes) + sum(chunk.num_tokens for chunk in work.chunks)
        assert num_tokens <= config.max_num_batched_tokens, "more tokens than the budget"
        assert len(rows) <= config.max_num_seqs, "more rows than slots"
        assert len(set(rows)) == len(rows), "a sequence is scheduled twice"
        is_tight = bool(work.preempted)
        assert not is_tight or {row.request for row in rows} <= running, "a request starts where another is preempted"
        samples = [*work.decodes, *(sample for chunk in work.chunks for sample in chunk.samples)]
        assert len(set(samples)) == len(samples), "a sequence draws twice"
        for sequence in (*rows, *samples):
            if _is_stuck(sequence):
                continue
            assert sequence.state is RequestState.RUNNING, "scheduled without running"
            assert sequence.seq_slot > 0, "scheduled without a slot"
        for chunk in work.chunks:
            assert chunk.num_tokens >= 1, "a row without a token"
            assert chunk.start + chunk.num_tokens <= len(chunk.sequence.token_ids), "tokens that the host lacks"
            limit = config.max_chunk if config.enable_chunked_prefill else config.max_num_batched_tokens
            assert chunk.num_tokens <= limit, "a chunk beyond its limit"
            if not config.enable_chunked_prefill:
                assert not work.decodes or chunk.num_tokens == 1, "a prefill step that decodes"

    def _note_admissions(self, work, waiting):
        """Check P9: the hits are what the first chunk of each request leaves out."""
        for chunk in work.chunks:
            request = chunk.sequence.request
            if request not in self.first_starts:
                self.first_starts[request] = chunk.start
                num_known = len(chunk.sequence.token_ids) if request.scoring is not None else request.prompt_len
                self.counts["queried"] += num_known * self.blocks.prefixes.is_enabled
                self.counts["hit"] += chunk.start
                assert request.num_cached_tokens == chunk.start, "another number of cached tokens"
                assert chunk.start <= request.first_scored, "a hit covers the whole prompt"
        assert (self.blocks.prefixes.num_queried_tokens, self.blocks.prefixes.num_hit_tokens) == (
            self.counts["queried"],
            self.counts["hit"],
        ), "hit statistics differ"

    def _check_bypasses(self, waiting):
        """Check S6: a bounded number of later requests passes one that the gate does not refuse."""
        gate = self.scheduler.admission.gate
        admitted = [request for request in waiting if request.state is RequestState.RUNNING]
        if not admitted:
            return
        for request in admitted:
            self.bypassed.pop(request, None)
        last = max(request.order for request in admitted)
        for request in waiting:
            is_refused = gate is not None and not gate.admits(request)
            if request.state is RequestState.WAITING and request.order < last and not is_refused:
                self.bypassed[request] += sum(request.order < other.order for other in admitted)
                assert self.bypassed[request] <= MAX_BYPASSES, "a request is bypassed for ever"

    def _check_progress(self, work, num_in_flight):
        """Check S3 and S5: there is always work, and the oldest running request advances."""
        if work.is_empty and not num_in_flight and self.scheduler.has_unfinished:
            self.num_idle += 1
            assert self.num_idle <= 2, "nothing to do with requests unfinished"
        elif not work.is_empty:
            self.num_idle = 0
        oldest = self.scheduler.running[0] if self.scheduler.running else None
        rows = {sequence.request for sequence in work.decodes} | {chunk.sequence.request for chunk in work.chunks}
        if oldest is not self.oldest or oldest is None or oldest in rows:
            self.num_stuck = 0
        elif any(sequence.num_tokens < sequence.max_len for sequence in oldest.live):
            self.num_stuck += 1
            limit = 4 if self.scheduler.config.enable_chunked_prefill else 4 + 2 * self.scheduler.config.max_num_seqs
            assert self.num_stuck <= limit, "the first running request does not advance"
        self.oldest = oldest

    def _check_pages(self, step, work):
        """Check B3 and B6: no other sequence reads, finds, or still writes the pages that this step writes."""
        size, device = self.arithmetic.block_size, self.blocks.device
        owner_of_slot = {sequence.seq_slot: sequence for sequence in self._running()}
        # The pages of a prompt belong to all sequences that draw from its last position.
        sharers = {chunk.sequence: set(chunk.samples) | {chunk.sequence} for chunk in work.chunks}
        rows = [*work.decodes, *(chunk.sequence for chunk in work.chunks)]
        written = {}
        if step.layout is not None:
            view = step.layout.view(step.packed)
            starts, seq_slots = view["query_starts"].tolist(), view["seq_slots"].tolist()
            for row in range(view["counts"][1]):
                if seq_slots[row] not in owner_of_slot and any(map(_is_stuck, rows)):
                    continue  # It ended when this step was sampled, and has lost its slot.
                sequence = owner_of_slot[seq_slots[row]]
                for group, slots in enumerate(view["slot_mapping"].tolist()):
                    for page in dict.fromkeys(slot // size for slot in slots[starts[row] : starts[row + 1]]):
                        assert page not in device.key_of, "a write to a published page"
                        num_refs = sum(page in other.pages[group] for other in sharers.get(sequence, {sequence}))
                        assert device.ref_counts[page] == num_refs, "a write to a page that others read"
                        written[page] = sequence.request
        targets = {move.destination for move in work.moves if move.kind is not MoveKind.SWAP_OUT}
        for before in self.written:
            for page in before.keys() & targets:
                raise AssertionError(f"page {page} is a move's destination while a step in flight writes it")
            for page in before.keys() & written.keys():
                assert before[page] is written[page], f"page {page} is reused while a step in flight writes it"
        self.written.append(written)
