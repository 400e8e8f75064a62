"""The programs that `jpaged bench latency` and `throughput` time: the engine, what bounds it, and other engines.

    RecordedEngine   requests in, tokens out, as a user has it; records the steps that it runs
    ReplayBaseline   the programs of the engine's last run, on the same inputs, back to back: no host work
    BareBaseline     steps of the same shapes with the same weights and logits, but without attention and cache
    DenseBaseline    static batches in order of arrival, padded to the longest prompt, over a dense cache
    PeerBaseline     another engine behind a command (peer.py)

Each computes a whole workload and returns how many seconds that took.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from itertools import cycle
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ...core.step_record import StepRecord
from ...engine import Engine
from ...models.config.spec import ModelSpec
from ...models.inputs import unpaged_inputs
from ...models.weights.weights import Weights
from ...outputs import RequestMetrics
from ...sampling.sampler import sample
from ...sampling.sampling_params import SampleMode, SamplingParams
from ...sampling.sampling_rows import SamplingRows
from ...step.step_layout import COUNT_FIELDS
from ...step.step_records import StepInputs
from .workloads import Workload

DENSE_ROWS = 16
"""Prompts of a static batch."""

GREEDY: dict[str, Any] = {"temperature": 0.0}
RANDOM: dict[str, Any] = {"temperature": 0.8}
MIXED: tuple[dict[str, Any], ...] = (
    GREEDY,
    RANDOM,
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "min_p": 0.02},
    {"temperature": 0.7, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.0, "logit_bias": {100: 2.0, 200: -100.0}, "bad_words": ["never", "in no case"]},
    {"temperature": 0.9, "allowed_token_ids": list(range(10, 250)), "min_tokens": 4},
    {"temperature": 0.0, "logprobs": 5},
)
"""Sampling parameters of a mixed batch, assigned to its requests in rotation: every logit rule, and some without."""
SAMPLING: dict[str, tuple[dict[str, Any], ...]] = {
    "drawn": (RANDOM,),
    "top-k-top-p": ({"temperature": 0.8, "top_k": 40, "top_p": 0.9},),
    "penalties": ({**GREEDY, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2},),
    "bias": ({**GREEDY, "logit_bias": {100: 2.0, 200: -100.0}},),
    "bad-words": ({**GREEDY, "bad_words": ["never", "in no case"]},),
    "min-tokens": ({**GREEDY, "min_tokens": 1},),
    "logprobs-0": ({**GREEDY, "logprobs": 0},),
    "logprobs-1": ({**GREEDY, "logprobs": 1},),
    "logprobs-20": ({**GREEDY, "logprobs": 20},),
    "mixed": MIXED,
}
"""Name → the sampling parameters, in rotation, of one kind of requests; plain greedy ones are the engine's own."""


class Baseline(Protocol):
    """Something that computes workloads and is timed."""

    def run(self, workload: Workload) -> float:
        """Compute the workload once; return the seconds that this took."""


@dataclass(frozen=True)
class StepShape:
    """The padded size of a step. Without attention, it alone decides how long the device takes."""

    num_tokens: int
    num_samples: int
    """Number of logits vectors; 0 if the step samples nothing."""


@dataclass
class RecordedEngine:
    """An engine that records the steps of its last run. Several of these, with other sampling, may share one engine."""

    engine: Engine
    sampling: tuple[dict[str, Any], ...] = (GREEDY,)
    """SamplingParams fields of the requests: the first request gets the first dict, and so on, in rotation."""
    shapes: list[StepShape] = field(default_factory=list)
    """Shape of each step; a step that decodes K tokens counts K times."""
    steps: list[StepInputs] = field(default_factory=list)
    """The steps as they were dispatched."""
    true_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens by kind of step: "decode" for steps that only decode, else "prompts"."""
    padded_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens with padding, by kind of step."""
    metrics: list[RequestMetrics] = field(default_factory=list)
    """Times of each request."""

    def __post_init__(self) -> None:
        """Keep the engine's runner, whose programs and weights other baselines use."""
        self.runner = self.engine.runner

    def run(self, workload: Workload) -> float:
        """Queue all requests of the workload at once; return the seconds until the last token.

        The prefix cache is emptied first. While the run lasts, this object is the engine's observer, whose `dispatched`
        is called for each step; afterwards `shapes`, `steps`, the counts of tokens and `metrics` are those of this run.
        Requests ignore ends of sequences, so that each generates exactly as many tokens as the workload says, and each
        has its index as its seed.
        """
        engine = self.engine
        engine.reset_prefix_cache()
        for record in (self.shapes, self.steps, self.true_tokens, self.padded_tokens):
            record.clear()
        params = [
            SamplingParams(**sampling, max_tokens=n, ignore_eos=True, detokenize=False, seed=index)
            # Not strict: `cycle` has no end.
            for index, (n, sampling) in enumerate(zip(workload.output_lens, cycle(self.sampling), strict=False))
        ]
        prompts = [list(prompt) for prompt in workload.prompts]
        engine.core.observer = self
        try:
            start = time.perf_counter()
            outputs = engine.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - start
        finally:
            engine.core.observer = None
        assert [len(output.outputs[0].token_ids) for output in outputs] == list(workload.output_lens)
        self.metrics = [output.metrics for output in outputs]
        return seconds

    def dispatched(self, record: StepRecord) -> None:
        """Record a step that the engine has dispatched, unless it has no rows: then it has no packed inputs.

        A step of K decode iterations counts as K steps, each with the padded tokens; `decode_lens` has the tokens that
        each row really decodes in it. Tokens are counted as "decode" if all rows of the step decode, else as "prompts".
        Example: two rows that decode 4 and 3 tokens in a bucket of 8 rows add 7 true and 4 · 8 = 32 padded tokens.
        """
        step = record.inputs
        if step.layout is None or step.packed is None:
            return
        counts = dict(zip(COUNT_FIELDS, step.layout.view(step.packed)["counts"].tolist(), strict=True))
        num_tokens = counts["num_tokens"]
        self.steps.append(step)
        # A row that decodes has one token; a step with as many tokens as such rows has no prompt.
        kind = "decode" if num_tokens == counts["num_decode_rows"] else "prompts"
        num_iterations = max(step.decode_lens, default=1)
        samples = self.runner.buckets.samples_for(step.num_samples, step.mode) if step.num_samples else 0
        self.shapes += [StepShape(step.layout.num_tokens, samples)] * num_iterations
        self.true_tokens[kind] += sum(step.decode_lens) if step.decode_lens else num_tokens
        self.padded_tokens[kind] += step.layout.num_tokens * num_iterations

    def retired(self, record: StepRecord) -> None:
        """Do nothing: steps are recorded when they are dispatched, but an observer has both methods."""


class ReplayBaseline:
    """Runs the programs of an engine's last run on their inputs back to back, so that the device never waits."""

    def __init__(self, recorded: RecordedEngine):
        self.recorded = recorded

    def run(self, workload: Workload) -> float:
        """Dispatch all steps of the engine's last run again; return the seconds until the device has computed them.

        `workload` is not used: the last run must have been of this workload. The steps write the same keys and values
        into the same pages as before. Their inputs are copied to the device before the time is taken.
        """
        steps = [replace(step, packed=jax.device_put(step.packed)) for step in self.recorded.steps]
        jax.block_until_ready([step.packed for step in steps])
        start = time.perf_counter()
        for step in steps:
            self.recorded.runner.dispatch(step)
        jax.block_until_ready(self.recorded.runner.state)
        return time.perf_counter() - start


class BareBaseline:
    """Runs steps of the same shapes as an engine's last run, with its weights, but without attention and cache."""

    def __init__(self, recorded: RecordedEngine):
        self.recorded = recorded
        self.weights = recorded.runner.weights
        self._programs: dict[StepShape, Any] = {}

    def run(self, workload: Workload) -> float:
        """Run one bare step for each step of the engine's last run, back to back; return the seconds.

        `workload` is not used: the last run must have been of this workload. Programs of new shapes are compiled before
        the time is taken. Each step takes a token id of the step before, so that the device runs them in this order.
        """
        leaves, token = jax.tree.leaves(self.weights.state), jnp.int32(0)
        for shape in set(self.recorded.shapes) - self._programs.keys():
            self._programs[shape] = jax.jit(bare_step(self.weights, shape)).lower(leaves, token).compile()
        programs = [self._programs[shape] for shape in self.recorded.shapes]
        start = time.perf_counter()
        for program in programs:
            token = program(leaves, token)
        jax.block_until_ready(token)
        return time.perf_counter() - start


def bare_step(weights: Weights, shape: StepShape) -> Callable[[list[Array], Array], Array]:
    """Return a function, to be compiled, that computes the model on `shape.num_tokens` tokens without attention.

    It takes the weights' leaves and a token id, both as arrays, and returns another token id for the next step. This
    dependence makes the device run the steps one after another. If the shape has samples, logits [num_samples, V] and
    greedy sampling are included. Otherwise the sum of all hidden states gives the id, so that the compiler drops none.
    """
    tree = jax.tree.structure(weights.state)

    def run(leaves: list[Array], token: Int[Array, ""]) -> Int[Array, ""]:
        """Compute one step whose first token is `token`, and return an id from 0 to 7 that depends on its results."""
        model = nnx.merge(weights.graph, jax.tree.unflatten(tree, leaves))
        positions = jnp.arange(shape.num_tokens, dtype=jnp.int32)
        # Only the first token depends on the step before; 7 stands for any id, and & 7 gives an id of every vocabulary.
        hidden, _ = model(unpaged_inputs(jnp.where(positions == 0, token, 7), positions), _NoAttention())
        if not shape.num_samples:
            return jnp.sum(hidden).astype(jnp.int32) & 7
        # Greedy sampling reads none of these fields, so zeros serve for all of them.
        rows = SamplingRows(**{each.name: jnp.zeros(shape.num_samples) for each in fields(SamplingRows)})
        return sample(model.logits(hidden[: shape.num_samples]), rows, SampleMode.GREEDY).token_ids[0] & 7

    return run


class _NoAttention:
    """A cache whose `attend` costs next to nothing, yet uses queries, keys and values, so that all are computed."""

    def attend(
        self, layer: int, q: Array, k: Array, v: Array, step: Any, **options: Any
    ) -> tuple[Float[Array, "T N H"], _NoAttention]:
        """Return each query [T, N, H] plus the key and value [T, K, H] of its KV head, and this cache."""
        return q + jnp.repeat(k + v, q.shape[1] // k.shape[1], axis=1), self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _DenseCache:
    """Keys and values of a static batch: S slots for each of R rows, in all L layers."""

    keys: Float[Array, "L R S K H"]
    values: Float[Array, "L R S K H"]

    def attend(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array,
        step: Any,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, _DenseCache]:
        """Write keys and values at the step's positions and return the queries' causal attention, and the new cache.

        The tokens are R rows of T tokens each, flattened: `q` and the result are [R·T, N, H], `k` and `v` are [R·T, K,
        H], and `step.positions` [R·T] says where in its row's cache each token is. N query heads share K KV heads, G =
        N ÷ K each. A query at position p attends to slots 0 … p, with a `window` only to the last `window` of these.
        Scores are multiplied by `scale`, and limited to ±`soft_cap` by tanh unless that is None. `sinks` [N] are logits
        that join the softmax of each query head and have no value.
        """
        num_rows, num_slots = self.keys.shape[1:3]
        positions = step.positions.reshape(num_rows, -1)
        rows = jnp.arange(num_rows)[:, None]  # [R, 1], to index with `positions` [R, T].
        k, v = (x.reshape(*positions.shape, *x.shape[1:]) for x in (k, v))
        keys = self.keys.at[layer, rows, positions].set(k)
        values = self.values.at[layer, rows, positions].set(v)
        grouped_q = q.reshape(*positions.shape, k.shape[2], -1, q.shape[-1])  # [R, T, K, G, H]
        scores = jnp.einsum("rtkgh,rskh->rkgts", grouped_q, keys[layer], preferred_element_type=jnp.float32) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        slots = jnp.arange(num_slots)[None, None]
        # [R, T, S]: slots behind the query's position hold padding or nothing yet.
        is_visible = slots <= positions[:, :, None]
        if window is not None:
            is_visible &= slots > positions[:, :, None] - window
        scores = jnp.where(is_visible[:, None, None], scores, -jnp.inf)
        if sinks is not None:  # They are the scores of a last key, whose value is 0.
            sinks_1KG11 = sinks.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1, 1)
            scores = jnp.concatenate([scores, jnp.broadcast_to(sinks_1KG11, (*scores.shape[:-1], 1))], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :num_slots].astype(q.dtype)
        out = jnp.einsum("rkgts,rskh->rtkgh", weights, values[layer], preferred_element_type=jnp.float32)
        return out.reshape(q.shape).astype(q.dtype), replace(self, keys=keys, values=values)


class DenseBaseline:
    """Generation without an engine: batches of DENSE_ROWS prompts, padded, decoded until the longest output is done."""

    def __init__(self, weights: Weights, model: ModelSpec):
        """Use these weights of `model`, on one device. The cache is donated to each step."""
        self.weights = weights
        self.leaves, self.tree = jax.tree.flatten(weights.state)
        self.model = model
        self._step = jax.jit(self._forward, donate_argnums=1)

    def run(self, workload: Workload) -> float:
        """Compute one batch after the other; return the seconds. The first run of a workload includes compilation."""
        start = time.perf_counter()
        for first in range(0, len(workload.prompts), DENSE_ROWS):
            batch = slice(first, first + DENSE_ROWS)
            self._run_batch(workload.prompts[batch], workload.output_lens[batch])
        return time.perf_counter() - start

    def _run_batch(self, prompts: tuple[tuple[int, ...], ...], output_lens: tuple[int, ...]) -> None:
        """Generate greedily from one batch of prompts, and wait for the tokens.

        One step prefills all prompts, padded with id 0 to the longest one, and gives each row its first token. Then all
        rows decode one token per step until the longest output is done, also those whose own output is shorter.
        """
        lens = np.array([len(prompt) for prompt in prompts], np.int32)
        num_slots = max(length + out for length, out in zip(lens.tolist(), output_lens, strict=True))
        ids = np.zeros((len(prompts), int(np.max(lens))), np.int32)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        layers = self.model.layers
        shape = len(layers), len(prompts), num_slots, layers[0].num_kv_heads, layers[0].head_size
        cache = _DenseCache(*(jnp.zeros(shape, self.weights.stream_dtype) for _ in "kv"))  # Keys, then values.
        tokens, cache = self._step(self.leaves, cache, ids, np.zeros_like(lens), lens)
        generated = [tokens]
        for index in range(max(output_lens) - 1):
            tokens, cache = self._step(self.leaves, cache, tokens[:, None], lens + index, np.ones_like(lens))
            generated.append(tokens)
        np.asarray(jnp.stack(generated))  # Waits for the device, and copies the tokens to the host as an engine does.

    def _forward(
        self, leaves: list[Array], cache: _DenseCache, ids: Array, starts: Array, lens: Array
    ) -> tuple[Int[Array, " R"], _DenseCache]:
        """Compute one step: return the most likely next token of each row [R], and the updated cache.

        `ids` [R, T] are token ids, of which the first `lens[r]` (at least 1) of row r count; the others are padding.
        The first one of row r has the position `starts[r]`: 0 in the prefill, then the tokens that the row has already.
        Later steps write over the keys and values of padding before any query attends to them. `leaves` are the leaves
        of the weights.
        """
        num_rows, row_len = ids.shape
        model = nnx.merge(self.weights.graph, jax.tree.unflatten(self.tree, leaves))
        positions = starts[:, None] + jnp.arange(row_len, dtype=jnp.int32)[None]
        hidden, cache = model(unpaged_inputs(ids.reshape(-1), positions.reshape(-1)), cache)
        # The last token of row r that counts is at r · T + lens[r] − 1 of the flattened rows.
        last = hidden[jnp.arange(num_rows) * row_len + lens - 1]
        return jnp.argmax(model.logits(last), axis=-1).astype(jnp.int32), cache
