"""Runs steps on the device. Owns everything that takes device memory: weights, device state, executables, host pages.

    dispatch(step)   page moves ─▶ page-table changes ─▶ logit rules ─▶ forward + sample, or decode   (all enqueued)
    sample(step)     the sampler of a step with masks, which the host did not know at the step's dispatch
    StepOutputs      sampled rows on the device, already on their way to the host; `read` waits for them

Calls return before the device is done, so that the host prepares the next step meanwhile. Every executable takes the
arrays that it changes as donated arguments and returns them: after a call that failed they may be gone, and `reset`
makes new ones. The runner knows arrays and executables, and no more of a request than its state slot.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..checks import one_line
from ..kv_cache.page_store import MoveKind, PageMove, move_batches
from ..models.weights.weight_store import WeightStore
from ..models.weights.weights import Weights
from ..pallas_kernels.ragged_paged_attention.interface import NULL_PAGE
from ..pallas_kernels.ragged_paged_attention.page_moves import MAX_MOVES, Page
from ..sampling.logit_rules import LogitRulesState
from ..sampling.sample_columns import ALL_ALLOWED, num_mask_words
from ..sampling.sampler import SampledRows
from ..sampling.sampling_params import SampleMode
from ..scheduling.buckets import Buckets
from ..sharding import replicated
from .compile_plan import CompilePlan, Key
from .expert_tokens import ExpertTokens
from .freed_memory import return_freed_memory
from .kv_measure import MEASURE_KEY, PageScales
from .program_choice import ProgramChoice
from .program_keys import (
    ALLOCATE_KEY,
    COPY_KEY,
    SET_RULES_KEY,
    SWAP_IN_KEY,
    SWAP_OUT_KEY,
    TABLES_KEY,
    layout_key,
    score_key,
)
from .step import DeviceState
from .step_outputs import StepOutputs
from .step_records import StepInputs

logger = logging.getLogger("jpaged")

MAX_SWAPS_UNDER_WAY = 4
"""Batches of swapped pages that are being copied at the same time: each takes device memory for its pages."""


class Runner:
    """One model on one mesh, with one paged cache and the host pages that swapped sequences wait in."""

    def __init__(
        self,
        *,
        weights: Weights,
        compile_plan: CompilePlan,
        buckets: Buckets,
        mesh: Mesh,
        page_scales: PageScales | None = None,
    ):
        """Take weights that are on their devices, and allocate the device state and logit rules.

        This waits until the program that allocates them is compiled. `compile_plan` holds the executables, `buckets`
        the padded sizes and modes that they are compiled for. `page_scales` are those of pages of one byte a number;
        if they are not known yet they are measured now. ModelLoadError if that finds numbers that are not finite.
        """
        self.store = WeightStore(weights)
        self.state: DeviceState
        self.rules: LogitRulesState
        self.compile_plan = compile_plan
        self._page_scales = page_scales
        if page_scales is not None and page_scales.scales is None:
            self._measure(page_scales)
        self._allocate()
        self.has_state = True
        """Whether there is a device state, so that steps can run."""
        counts = self.state.expert_tokens
        self.expert_tokens = None if counts is None else ExpertTokens(counts)
        """Tokens that have chosen each expert in all steps so far; None if they are not counted."""
        self.buckets = buckets
        self.choice = ProgramChoice(buckets)
        """Says which sampler a step gets; a server that compiles meanwhile replaces it."""
        cache = self.state.cache
        self.page_bytes = cache.layout.page_bytes
        """Bytes of one page in all layers together."""
        self.swap_bytes = 0
        """Bytes moved to and from the host so far, by page moves of steps."""
        self._replicated = replicated(mesh) if mesh.size > 1 else None
        # Where each array of a page lies on the device and on the host: as the cache's arrays do.
        self._device_shardings = tuple(array.sharding for array in cache.pages)
        self._host_shardings = tuple(sharding.with_memory_kind("pinned_host") for sharding in self._device_shardings)
        self._all_allowed: dict[int, jax.Array] = {}
        """Rows of a sample program → masks that allow all tokens, for programs that take masks always."""
        # Host page → its arrays. Memory is pinned when a page is first written. Writing a page again makes new arrays;
        # transfers that still read the old ones keep them alive, so that no transfer has to wait for another.
        self._host_pages: dict[int, Page] = {}
        self._swaps_under_way: deque[Any] = deque()
        """Arrays of the swap batches that may still be under way, oldest first."""

    @property
    def weights(self) -> Weights:
        """Return the model's weights."""
        return self.store.weights

    def dispatch(self, step: StepInputs) -> StepOutputs:
        """Start a step: its page moves in order, its page-table changes and logit rules, then its rows.

        Returns before the device is done; waits only if more than MAX_SWAPS_UNDER_WAY batches of swapped pages would be
        under way, or for an executable that is not compiled yet. A step with `decode_lens` runs a decode program. Any
        other step with rows runs a forward program, and then a sampler for sampled rows and programs for scored tokens.
        The sampler of a step with masks is left to `sample`, which must be called before the next step is dispatched.
        """
        self._move(step.moves)
        for changes in step.table_updates:
            tables = self._run(TABLES_KEY, self.state.page_tables, self._put(changes))
            self.state = replace(self.state, page_tables=tables)
        for slot, row in step.rules.items():
            slot_array = self._put(np.array(slot, np.int32))
            self.rules = self._run(SET_RULES_KEY, self.rules, self._put(row), slot_array)
        if step.layout is None:
            return StepOutputs(None)
        if step.decode_lens:
            sampled = self._decode(step)
            self._count_expert_tokens()
            return StepOutputs(sampled)
        columns = self._forward(step)
        self._count_expert_tokens()
        scored = tuple(self._score(step))
        if step.has_masks:
            return StepOutputs(None, scored, columns)
        return StepOutputs(self._sample(columns, step) if step.num_samples else None, scored)

    def sample(self, step: StepInputs, outputs: StepOutputs, masks: np.ndarray) -> StepOutputs:
        """Start the sampler of a step with masks, and return its outputs, now with the sampled rows.

        `outputs` are those of its dispatch, after which no other step may have been dispatched: the hidden states on
        the device must be those of this step. `masks`, int32 [num_samples, W], have a bit for each token that a row may
        draw; see `sampler.sample`.
        """
        assert outputs.columns is not None, "the step has no sampler to start"
        return StepOutputs(self._sample(outputs.columns, step, masks), outputs.scored)

    def _count_expert_tokens(self) -> None:
        """Add the experts' tokens of the program just started to those of all steps, if they are counted."""
        counts = self._take_expert_tokens()
        if self.expert_tokens is not None and counts is not None:
            self.expert_tokens.add(counts)

    def _take_expert_tokens(self) -> jax.Array | None:
        """Return the counts of experts' tokens in the device state, and put zeros in their place, if there are any.

        No later program takes the returned array as a donated argument, so that it can be read at any time.
        """
        counts = self.state.expert_tokens
        if counts is not None:
            zeros = jax.device_put(np.zeros(counts.shape, counts.dtype), counts.sharding)
            self.state = replace(self.state, expert_tokens=zeros)
        return counts

    def measure_swap(self) -> float:
        """Return the bytes per second of swapping pages, measured on a round trip of MAX_MOVES pages.

        The bytes of a round trip are those of the way out and of the way back: 2 × MAX_MOVES pages. All of these are
        the null page, which belongs to no sequence, so no content is lost. The shortest of three round trips counts.
        This waits for the device, and must not be called while a step is in flight.
        """
        null_pages = [NULL_PAGE] * MAX_MOVES

        def round_trip() -> None:
            """Swap the null page out MAX_MOVES times and in again, and wait for it."""
            pages = jax.block_until_ready(self._swap_out(null_pages))
            self._swap_in(pages, null_pages)
            jax.block_until_ready(self._pages)

        return 2 * MAX_MOVES * self.page_bytes / _shortest_s(round_trip)

    def measure_forward(self, step: StepInputs) -> float:
        """Return the seconds that the forward program of a step takes, the shortest of three runs.

        Running a step changes the pages that it names; `StepInputBuilder.null_prefill` makes one that names null pages
        alone. This waits for the device, and must not be called while a step is in flight.
        """
        seconds = _shortest_s(lambda: jax.block_until_ready(self._forward(step)))
        self._take_expert_tokens()  # The tokens of the measurement are no request's.
        return seconds

    def rehearse(self, step: StepInputs) -> None:
        """Run the forward program of a step of `null_prefill` once, and wait for it.

        What only a first step does is done then: the system gives the memory of its results, and that of the first
        pages of each layer, which took 0.3 s of the first request of a server on a CPU.
        """
        jax.block_until_ready(self._forward(step))
        self._take_expert_tokens()  # Its tokens are no request's.

    def reset(self) -> None:
        """Make a new device state and new logit rules, and drop the host pages.

        A step that failed may have destroyed the old ones, which were donated to it.
        """
        self.drop_state()
        self._allocate()
        self.has_state = True

    def measure_page_scales(self) -> None:
        """Measure the scales of pages of one byte a number with the present weights; do nothing for other pages.

        Pages that are written must not be read again. If that fails, or if a key or a value is not finite, a warning
        says so and the scales stay. This waits for the device, and must not be called while a step is in flight.
        """
        if self._page_scales is None:
            return
        try:
            self._measure(self._page_scales)
        except Exception as error:  # The weights are new already, and serve with the scales from before.
            logger.warning("the scales of pages stay: %s", one_line(error, 500))
        if self.has_state:
            self._place_scales()

    def _measure(self, page_scales: PageScales) -> None:
        page_scales.measure(self.store.leaves, partial(self._run, MEASURE_KEY))

    def _allocate(self) -> None:
        """Make a new device state and new logit rules."""
        self.state, self.rules = self._run(ALLOCATE_KEY)
        if self._page_scales is not None:
            self._place_scales()

    def _place_scales(self) -> None:
        """Replace the scales in the device's state by new arrays of the host's copy."""
        cache = self.state.cache
        assert self._page_scales is not None
        assert cache.scales is not None
        self.state = replace(self.state, cache=replace(cache, scales=self._page_scales.placed(cache.scales)))

    def close(self) -> None:
        """Free the pages on the device and the host, the rest of the device state, and the weights."""
        self.compile_plan.close()
        self.drop_state()
        self.store.drop()
        return_freed_memory()

    def _run(self, key: Key, *arguments: Any) -> Any:
        """Start the executable of `key` once it is compiled; return its results, which may not be computed yet."""
        return self.compile_plan.get(key)(*arguments)

    def _forward(self, step: StepInputs) -> jax.Array:
        """Start the forward program of a step; return the SAMPLE_FIELDS of the rows to sample, [fields, S].

        S is the largest number of samples of a step; columns after the step's own are padding. The device state is
        donated to the program, and `self.state` becomes the state that it returns.
        """
        assert step.layout is not None  # A step without rows has neither layout nor buffer, and runs no program.
        assert step.packed is not None
        packed = self._put(step.packed)
        self.state, columns = self._run(layout_key(step.layout), self.store.leaves, self.state, packed)
        return columns

    def _decode(self, step: StepInputs) -> SampledRows:
        """Start the decode program of a step; return its sampled rows, [K, R]: up to K tokens of each of R padded rows.

        K is the most tokens of a decode program; of a row's K results, at most the first `decode_lens` count. Returns
        before they are computed. The program takes the device state as a donated argument, and `self.state` becomes the
        state that it returns. A program of mode FULL also takes and returns the logit rules. Others take None for them
        and return None, so that `self.rules` stays as it is. The step must have a buffer, that is, rows.
        """
        assert step.layout is not None  # A step without rows has neither layout nor buffer, and is not decoded.
        assert step.packed is not None
        mode = self.buckets.decode_mode_for(step.mode)  # The scheduler uses `decode_lens` in modes with a program only.
        key = "decode", step.layout.num_tokens, mode
        state = self.state, self.rules if mode is SampleMode.FULL else None
        (self.state, rules), sampled = self._run(key, self.store.leaves, state, self._put(step.packed))
        self.rules = rules or self.rules
        return sampled

    def _score(self, step: StepInputs) -> Iterator[SampledRows]:
        """Start a program for each batch of given tokens that the step scores, and yield its rows of scores."""
        for batch in step.scores:
            key = score_key(batch.columns.shape[1], batch.kind)
            leaves = () if batch.kind.is_hidden else self.store.logits_leaves
            asked = None if batch.asked is None else self._put(batch.asked)
            yield self._run(key, leaves, self.state.hidden, self._put(batch.columns), asked)

    def _sample(self, columns: jax.Array, step: StepInputs, masks: np.ndarray | None = None) -> SampledRows:
        """Start the sample program on the hidden states of the last forward program; return the sampled rows.

        `columns` are the SAMPLE_FIELDS of the step's samples, then padding, int32 [fields, S]; the results are padded
        to the sample bucket. If the step's mode has no sample programs, or none
        that is ready, those of the next mode that has some are used. Returns before the results are computed. The last
        tokens of the state slots are donated and replaced. A program of mode FULL does the same with the logit rules;
        others take None for them and return None, so that `self.rules` stays.
        """
        key = self.choice.sampler(step.num_samples, step.mode, is_masked=masks is not None)
        _, num_rows, mode = key
        padded_masks = self._masks(masks, num_rows)
        state = self.state.last_tokens, self.rules if mode is SampleMode.FULL else None
        arguments = self.store.logits_leaves, state, self.state.hidden, columns, padded_masks
        (last_tokens, rules), sampled = self._run(key, *arguments)
        self.state = replace(self.state, last_tokens=last_tokens)
        self.rules = rules or self.rules
        return sampled

    def _masks(self, masks: np.ndarray | None, num_rows: int) -> np.ndarray | jax.Array | None:
        """Return the masks of a sample program of this many rows, padded to them; without masks, those that allow all.

        The latter are None where a program without masks samples such rows.
        """
        if masks is not None:
            padding = (0, num_rows - len(masks)), (0, 0)
            return self._put(np.pad(masks, padding, constant_values=ALL_ALLOWED))
        if self.buckets.masks_apart:
            return None
        if num_rows not in self._all_allowed:
            shape = num_rows, num_mask_words(self.rules.bias.shape[1])  # A bias for each token.
            # All calls share it, where the other lists of the device state lie.
            all_allowed, placement = np.full(shape, ALL_ALLOWED, np.int32), self.state.last_tokens.sharding
            self._all_allowed[num_rows] = jax.device_put(all_allowed, placement)
        return self._all_allowed[num_rows]

    def _move(self, moves: list[PageMove]) -> None:
        """Start the page moves in their order, in batches of consecutive moves of one `MoveKind`.

        Sources and destinations are page numbers of the device pool; only the destination of a swap-out and the source
        of a swap-in are page numbers of the host pool. A swap-out stores its pages in `_host_pages`, where they stay
        until they are written again. Swapped bytes, not those of copies, are added to `swap_bytes`.
        """
        for kind, batch in move_batches(moves, MAX_MOVES):
            sources = [move.source for move in batch]
            destinations = [move.destination for move in batch]
            if kind is not MoveKind.COPY:
                self.swap_bytes += len(batch) * self.page_bytes
            match kind:
                case MoveKind.COPY:
                    lists = self._page_list(sources), self._page_list(destinations)
                    self._replace_pages(self._run(COPY_KEY, self._pages, *lists))
                case MoveKind.SWAP_OUT:
                    self._host_pages.update(zip(destinations, self._swap_out(sources), strict=True))
                case MoveKind.SWAP_IN:
                    self._swap_in([self._host_pages[source] for source in sources], destinations)

    def _swap_out(self, sources: list[int]) -> list[Page]:
        """Start copying these device pages, at most MAX_MOVES, to the host; return the host pages in the same order.

        The pages are first gathered into arrays of their own on the device, so that later steps may overwrite the pages
        during the transfer. Waits first if MAX_SWAPS_UNDER_WAY batches are under way.
        """
        self._wait_for_room()
        staged = self._run(SWAP_OUT_KEY, self._pages, self._page_list(sources))
        # The program takes MAX_MOVES pages; those of the list's padding are not transferred.
        pages = jax.device_put(list(staged[: len(sources)]), [self._host_shardings] * len(sources))
        self._swaps_under_way.append(pages)
        return pages

    def _swap_in(self, pages: list[Page], destinations: list[int]) -> None:
        """Start copying host pages, at most MAX_MOVES, into the cache, to these pages of the device pool.

        They travel to arrays of their own on the device; a program then writes these into the cache. Waits first if
        MAX_SWAPS_UNDER_WAY batches are under way.
        """
        self._wait_for_room()
        staged = jax.device_put(pages, [self._device_shardings] * len(pages))
        staged += staged[-1:] * (MAX_MOVES - len(staged))  # Padding repeats the last page; it goes to the null page.
        page_list = self._page_list(destinations)
        cache_pages, completion = self._run(SWAP_IN_KEY, self._pages, tuple(staged), page_list)
        self._replace_pages(cache_pages)
        # The program's second result is ready once the staged pages have been read.
        self._swaps_under_way.append(completion)

    def _wait_for_room(self) -> None:
        """Wait for the oldest swap batch if MAX_SWAPS_UNDER_WAY batches are under way."""
        if len(self._swaps_under_way) == MAX_SWAPS_UNDER_WAY:
            jax.block_until_ready(self._swaps_under_way.popleft())

    def _page_list(self, pages: list[int]) -> np.ndarray | jax.Array:
        """Return MAX_MOVES page numbers for a move program, padded by the null page."""
        return self._put(np.array(pages + [NULL_PAGE] * (MAX_MOVES - len(pages)), np.int32))

    def _put(self, array: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        """Return a host array as an argument for an executable; the array must not be written any more.

        On a mesh the result is a JAX array with a copy on every device. For a single device it is the array itself: the
        call of the executable transfers a numpy array faster than `device_put` does.
        """
        return array if self._replicated is None else jax.device_put(array, self._replicated)

    @property
    def _pages(self) -> tuple[jax.Array, ...]:
        """Return the arrays of the paged cache."""
        return self.state.cache.pages

    def _replace_pages(self, pages: tuple[jax.Array, ...]) -> None:
        """Make these arrays the pages of the paged cache."""
        self.state = replace(self.state, cache=replace(self.state.cache, pages=pages))

    def drop_state(self) -> None:
        """Free the device state, the logit rules and the host pages, but not the weights. Further calls do nothing.

        `reset` makes the state and the rules anew.
        """
        self.has_state = False
        self._swaps_under_way.clear()
        self._host_pages.clear()
        _delete((self.state, self.rules))


def _shortest_s(run: Callable[[], object]) -> float:
    """Call `run` three times and return the seconds of the shortest call; the first may also compile and pin memory."""
    times_s = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start)
    return min(times_s)


def _delete(arrays: Any) -> None:
    """Free the device memory of the JAX arrays in a tree; arrays that are freed or donated already are skipped."""
    for leaf in jax.tree.leaves(arrays):
        if not leaf.is_deleted():
            leaf.delete()
