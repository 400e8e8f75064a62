"""What `jpaged bench latency` and `throughput` time in turns: an engine, what bounds it, and what one has without it.

    engine   requests in, tokens out, as a user has it
    replay   the very programs that the engine has just run, on the same inputs, back to back, and no host
    bare     the same steps with the same weights, products and logits, and no attention, no cache, no host
    dense    static batches in order of arrival, padded to the longest, over a dense cache, with the same layers
    peer     a command that serves the same token ids, over lines of JSON

Each computes a whole workload and says how long it took.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import cycle
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from .engine import Engine
from .errors import ConfigError
from .models.loading import Weights
from .pallas_kernels.ragged_paged_attention import AttentionMetadata
from .sampler import SamplingRows, sample
from .sampling_params import SampleMode, SamplingParams
from .step_inputs import COUNT_FIELDS, BuiltStep
from .workloads import Workload

DENSE_ROWS = 16
"""Of a static batch."""


class Contender(Protocol):
    """Something that computes workloads."""

    def run(self, workload: Workload) -> float:
        """Compute it once; returns seconds."""
        ...


@dataclass(frozen=True)
class StepShape:
    """A step as the device sees it."""

    num_tokens: int
    """Padded."""
    num_samples: int
    """Padded rows that get logits."""


GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 0.8}
MIXED: tuple[dict[str, Any], ...] = (
    GREEDY,
    DRAWN,
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "min_p": 0.02},
    {"temperature": 0.7, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.0, "logit_bias": {100: 2.0, 200: -100.0}, "bad_words": ["never", "in no case"]},
    {"temperature": 0.9, "allowed_token_ids": list(range(10, 250)), "min_tokens": 4},
    {"temperature": 0.0, "logprobs": 5},
)
"""What requests of a mixed batch ask for, by turns: every rule, and a few that ask for none."""


@dataclass
class EngineContender:
    """An engine whose steps are written down. `kinds`: what its requests ask for, by turns."""

    engine: Engine
    kinds: tuple[dict[str, Any], ...] = (GREEDY,)
    steps: list[StepShape] = field(default_factory=list)
    """Of the last run."""
    built: list[BuiltStep] = field(default_factory=list)
    """What those were dispatched with."""
    true_tokens: Counter[str] = field(default_factory=Counter)
    """Of the last run, by kind of step: decode alone, or with prompts."""
    padded_tokens: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.dispatch = self.engine.runner.dispatch

        def noted(step: BuiltStep) -> Any:
            if step.layout is not None:
                self._note(step)
            return self.dispatch(step)

        self.engine.runner.dispatch = noted  # type: ignore[method-assign]

    def run(self, workload: Workload) -> float:
        """From all requests at once to the last token; no prefix is cached from the run before."""
        engine = self.engine
        engine.reset_prefix_cache()
        for kept in (self.steps, self.built, self.true_tokens, self.padded_tokens):
            kept.clear()
        params = [
            SamplingParams(**kind, max_tokens=n, ignore_eos=True, detokenize=False, seed=index)
            for index, (n, kind) in enumerate(zip(workload.outs, cycle(self.kinds), strict=False))
        ]
        prompts = [list(prompt) for prompt in workload.prompts]
        start = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(output.outputs[0].token_ids) for output in outputs] == list(workload.outs)
        self.metrics = [output.metrics for output in outputs]
        return seconds

    def _note(self, step: BuiltStep) -> None:
        assert step.layout is not None
        assert step.inputs is not None
        counts = dict(zip(COUNT_FIELDS, step.inputs.view(step.layout)["counts"].tolist(), strict=True))
        num_tokens = counts["num_tokens"]
        self.built.append(step)
        kind = "decode" if num_tokens == counts["num_decode_rows"] else "prompts"
        num_steps = max(step.draws, default=1)
        samples = self.engine.runner.buckets.samples_for(len(step.samples), SampleMode.GREEDY) if step.samples else 0
        self.steps += [StepShape(step.layout.num_tokens, samples)] * num_steps
        self.true_tokens[kind] += sum(step.draws) if step.draws else num_tokens
        self.padded_tokens[kind] += step.layout.num_tokens * num_steps


class ReplayContender:
    """The programs of an engine's last run, on the inputs they had, back to back: a device that never waits."""

    def __init__(self, of: EngineContender):
        self.of = of

    def run(self, workload: Workload) -> float:
        """Seconds for all steps of the engine's last run. They write into its pages what that run wrote."""
        steps = [replace(step, inputs=jax.device_put(step.inputs)) for step in self.of.built]
        jax.block_until_ready([step.inputs for step in steps])
        start = time.perf_counter()
        for step in steps:
            self.of.dispatch(step)
        jax.block_until_ready(self.of.engine.runner.state.last_tokens)
        return time.perf_counter() - start


class BareContender:
    """The steps that an engine's last run took, with its weights, one program after another, and no attention."""

    def __init__(self, of: EngineContender):
        self.of = of
        self.weights = of.engine.runner.weights
        self._programs: dict[StepShape, Any] = {}

    def run(self, workload: Workload) -> float:
        """Seconds for as many steps of each shape as the engine took."""
        for shape in set(self.of.steps):
            if shape not in self._programs:
                self._programs[shape] = self._compiled(shape)
        runs = [self._programs[shape] for shape in self.of.steps]
        leaves, tokens = jax.tree.leaves(self.weights.state), jnp.int32(0)
        start = time.perf_counter()
        for run in runs:
            tokens = run(leaves, tokens)
        jax.block_until_ready(tokens)
        return time.perf_counter() - start

    def _compiled(self, shape: StepShape) -> Any:
        leaves = jax.tree.leaves(self.weights.state)
        return jax.jit(bare_step(self.weights, shape)).lower(leaves, jnp.int32(0)).compile()


def bare_step(weights: Weights, shape: StepShape) -> Callable[[list[Array], Array], Array]:
    """A step without attention, of the weights' leaves and a token: returns another token."""
    tree = jax.tree.structure(weights.state)

    def run(leaves: list[Array], token: Int[Array, ""]) -> Int[Array, ""]:
        model = nnx.merge(weights.graph, jax.tree.unflatten(tree, leaves))
        positions = jnp.arange(shape.num_tokens, dtype=jnp.int32)
        ids = jnp.where(positions == 0, token, 7)
        hidden, _ = model(ids, _NoCache(), _step_at(positions))
        if not shape.num_samples:
            return jnp.sum(hidden).astype(jnp.int32) & 7
        rows = SamplingRows(**{one.name: jnp.zeros(shape.num_samples) for one in fields(SamplingRows)})
        drawn = sample(model.logits(hidden[: shape.num_samples]), rows, SampleMode.GREEDY)
        return drawn.token_ids[0] & 7

    return run


def _step_at(positions: Int[Array, " T"]) -> AttentionMetadata:
    """All that layers and a cache without pages read of a step: where its tokens stand."""
    nothing = jnp.zeros(0, jnp.int32)
    none = {field.name: nothing for field in fields(AttentionMetadata)}
    return AttentionMetadata(**{**none, "positions": positions})


class _NoCache:
    """Attention that is none: every head's output is what it asked, with a share of its key and value."""

    def attend(self, layer: int, q: Any, k: Any, v: Any, step: Any, **options: Any) -> tuple[Any, _NoCache]:
        return q + jnp.repeat(k + v, q.shape[1] // k.shape[1], axis=1), self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _DenseCache:
    """Keys and values [L, rows, S, K, H] of rows of which each stands at its own length."""

    keys: Float[Array, "L R S K H"]
    values: Float[Array, "L R S K H"]

    def attend(
        self, layer: int, q: Any, k: Any, v: Any, step: Any, *, scale: float, window: int | None = None
    ) -> tuple[Any, _DenseCache]:
        """Write at the step's positions, then attend to all slots up to them."""
        num_rows, num_slots = self.keys.shape[1:3]
        positions = step.positions.reshape(num_rows, -1)
        rows = jnp.arange(num_rows)[:, None]
        k, v = (x.reshape(*positions.shape, *x.shape[1:]) for x in (k, v))
        keys = self.keys.at[layer, rows, positions].set(k)
        values = self.values.at[layer, rows, positions].set(v)
        grouped = q.reshape(*positions.shape, k.shape[2], -1, q.shape[-1])
        scores = jnp.einsum("rtkgh,rskh->rkgts", grouped, keys[layer], preferred_element_type=jnp.float32) * scale
        slots = jnp.arange(num_slots)[None, None]
        is_seen = slots <= positions[:, :, None]
        if window is not None:
            is_seen &= slots > positions[:, :, None] - window
        weights = jax.nn.softmax(jnp.where(is_seen[:, None, None], scores, -jnp.inf), axis=-1).astype(q.dtype)
        out = jnp.einsum("rkgts,rskh->rtkgh", weights, values[layer], preferred_element_type=jnp.float32)
        return out.reshape(q.shape).astype(q.dtype), replace(self, keys=keys, values=values)


class DenseContender:
    """What one writes without an engine: batches of 16 prompts, padded, decoded until the last one is done."""

    def __init__(self, weights: Weights, num_layers: int, num_kv_heads: int, head_size: int):
        self.weights = weights
        self.leaves, self.tree = jax.tree.flatten(weights.state)
        self.cache_shape = num_layers, num_kv_heads, head_size
        self.dtype = weights.stream_dtype
        self._prefill = jax.jit(self._first, donate_argnums=1)
        self._decode = jax.jit(self._next, donate_argnums=1)

    def run(self, workload: Workload) -> float:
        """One batch after the other; the first run of a workload compiles for its shapes."""
        start = time.perf_counter()
        for first in range(0, len(workload.prompts), DENSE_ROWS):
            batch = slice(first, first + DENSE_ROWS)
            self._run_batch(workload.prompts[batch], workload.outs[batch])
        return time.perf_counter() - start

    def _run_batch(self, prompts: tuple[tuple[int, ...], ...], outs: tuple[int, ...]) -> None:
        lens = np.array([len(prompt) for prompt in prompts], np.int32)
        num_slots = max(length + out for length, out in zip(lens.tolist(), outs, strict=True))
        ids = np.zeros((len(prompts), lens.max()), np.int32)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        num_layers, num_kv_heads, head_size = self.cache_shape
        shape = num_layers, len(prompts), num_slots, num_kv_heads, head_size
        cache = _DenseCache(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype))
        tokens, cache = self._prefill(self.leaves, cache, ids, lens)
        drawn = [tokens]
        for index in range(1, max(outs)):
            tokens, cache = self._decode(self.leaves, cache, tokens, lens + index - 1)
            drawn.append(tokens)
        np.asarray(jnp.stack(drawn))

    def _model(self, leaves: list[Array]) -> Any:
        return nnx.merge(self.weights.graph, jax.tree.unflatten(self.tree, leaves))

    def _first(self, leaves: Any, cache: _DenseCache, ids: Any, lens: Any) -> tuple[Any, _DenseCache]:
        positions = jnp.tile(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape[0])
        model = self._model(leaves)
        hidden, cache = model(ids.reshape(-1), cache, _step_at(positions))
        last = hidden[jnp.arange(ids.shape[0]) * ids.shape[1] + lens - 1]
        return jnp.argmax(model.logits(last), axis=-1).astype(jnp.int32), cache

    def _next(self, leaves: Any, cache: _DenseCache, tokens: Any, positions: Any) -> tuple[Any, _DenseCache]:
        model = self._model(leaves)
        hidden, cache = model(tokens, cache, _step_at(positions))
        return jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32), cache


class PeerContender:
    """Another engine behind a command, which lives as long as the bench does.

    The command writes a line of JSON, {"ready": …}, once its model is loaded. Then for each line that it reads,
    {"requests": [{"prompt": [ids], "out": n}], "max_num_seqs": n}, it computes these greedily, ignoring ends, with
    no prefix kept from before, and writes {"seconds": s, "tokens": n}. What else it has to say goes to stderr.
    """

    def __init__(self, name: str, command: str, max_num_seqs: int):
        self.name, self.max_num_seqs = name, max_num_seqs
        try:
            self._process = subprocess.Popen(
                shlex.split(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"--peer: {name} cannot be started: {error}") from error
        self.ready = self._read()

    def run(self, workload: Workload) -> float:
        """Seconds as the peer measures them, from ids to ids."""
        pairs = zip(workload.prompts, workload.outs, strict=True)
        requests = [{"prompt": list(prompt), "out": out} for prompt, out in pairs]
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # It has ended, as reading will say.
            self._process.stdin.write(json.dumps({"requests": requests, "max_num_seqs": self.max_num_seqs}) + "\n")
            self._process.stdin.flush()
        answer = self._read()
        if answer.get("tokens") != workload.num_out:
            raise ConfigError(
                f"--peer: {self.name} gave {answer.get('tokens')} tokens for {workload.name}, wanted {workload.num_out}"
            )
        return float(answer["seconds"])

    def close(self) -> None:
        """End the command."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise ConfigError(f"--peer: {self.name} ended with status {status} and no answer; run its command alone")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ConfigError(
                f"--peer: {self.name} wrote {line.strip()[:100]!r}, wanted an object of JSON; what else it has to say "
                "belongs to stderr"
            )
        return answer
