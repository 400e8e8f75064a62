"""Tokens are counted for the experts that they choose, once for each time that a step computes them."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jpaged import ConfigError, Engine, SamplingParams, load_module
from jpaged.commands.summary import balance_of_experts
from jpaged.models.dense import DenseAttention
from jpaged.models.experts import tokens_of_experts
from jpaged.models.inputs import ModelInputs, unpaged_inputs
from jpaged.remote.thread_client import ThreadClient
from jpaged.scheduling.preemption import PreemptionMode, PreemptionPolicy
from jpaged.serving.metrics import ServerMetrics
from jpaged.step.expert_tokens import ExpertTokens

DIRECTORY = Path(__file__).parents[1] / "golden" / "families" / "qwen3_moe_some_dense_window"
PROMPT_LENS = (30, 21, 9, 4)
SIZES: dict[str, Any] = {
    "max_num_seqs": 3, "max_num_batched_tokens": 24, "long_prefill_token_threshold": 8, "block_size": 4,
    "max_model_len": 64, "num_blocks": 129, "num_host_blocks": 129, "enable_prefix_caching": False, "warmup": "off",
    "skip_tokenizer_init": True, "count_expert_tokens": True,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=14, detokenize=False, output_kind="final_only")

pytestmark = pytest.mark.usefixtures("few_buckets", "shared_executables")


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    tokens = load_file(DIRECTORY / "golden.safetensors")["tokens"].tolist()
    return {str(length): tokens[:length] for length in PROMPT_LENS}


def run(engine: Engine, prompts: dict[str, list[int]], params: SamplingParams, modes: Any) -> dict[str, list[int]]:
    """Return what is drawn; after some of the first steps the last sequence loses its pages, in turn as `modes` say."""
    drawn = {}
    for name, prompt in prompts.items():
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    for step in count(1):
        drawn |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
        if not engine.has_unfinished_requests():
            return drawn
        if step in (3, 6, 9) and engine.scheduler.running:
            engine.scheduler.preemption = PreemptionPolicy(next(modes))
            engine.scheduler.preempt(engine.scheduler.running[-1])


def counts_of(sequences: list[list[int]]) -> np.ndarray:
    """Return the counts of sequences that are computed at once, each whole and without pages."""
    module, longest = load_module(str(DIRECTORY)), max(map(len, sequences))
    ids = np.array([sequence + [0] * (longest - len(sequence)) for sequence in sequences])
    counted = np.array([[index < len(sequence) for index in range(longest)] for sequence in sequences])
    inputs = unpaged_inputs(jnp.asarray(ids.ravel()), jnp.tile(jnp.arange(longest), len(sequences)))
    inputs = replace(inputs, counted=jnp.asarray(counted.ravel()))

    @jax.jit
    def count_all(inputs: ModelInputs) -> jax.Array:
        return module.decoder().with_expert_tokens(inputs, DenseAttention(len(sequences)))[2]

    return np.asarray(count_all(inputs))


@contextmanager
def client_of(engine: Engine) -> Iterator[ThreadClient]:
    """Give the client that a server would have of an engine, and end both behind it."""
    client = ThreadClient(engine)
    yield client
    client.shutdown()


def series_of_experts(client: ThreadClient) -> set[str]:
    """Return the lines of /metrics that count the tokens of experts."""
    lines = ServerMetrics("tiny").text(asyncio.run(client.snapshots())).decode().splitlines()
    return {line for line in lines if line.startswith("jpaged:expert_tokens_total")}


class RunningStep:
    """The counts of a step that the device never ends: reading them would wait for ever."""

    def copy_to_host_async(self) -> None:
        """Begin nothing."""

    def is_ready(self) -> bool:
        return False

    def block_until_ready(self) -> None:
        raise AssertionError("a scrape waits for the device")

    def __array__(self, *_: object) -> np.ndarray:
        raise AssertionError("the counts were read before the device was done")


@pytest.mark.parametrize("num_decode_steps", [1, 4])
def test_every_computed_token_is_counted_once_and_none_behind_the_end(num_decode_steps: int, prompts) -> None:
    """Prompts come in chunks beside other rows and padding; sequences are swapped, and some end before steps ahead."""
    with Engine(str(DIRECTORY), **SIZES, num_decode_steps=num_decode_steps) as engine, client_of(engine) as client:
        free = run(engine, prompts, PARAMS, cycle([PreemptionMode.SWAP]))
        ends = [free[name][6] for name in prompts]
        drawn = run(engine, prompts, replace(PARAMS, stop_token_ids=ends), cycle([PreemptionMode.SWAP]))
        assert any(len(drawn[name]) < len(free[name]) for name in prompts)
        # Undisturbed, so that a dispatch decodes several tokens of rows that end before others.
        params = [replace(PARAMS, max_tokens=3 * len(name)) for name in prompts]
        outputs = engine.generate(list(prompts.values()), params, use_tqdm=False)
        alone = {name: list(output.outputs[0].token_ids) for name, output in zip(prompts, outputs, strict=True)}
        stats = engine.stats()
        assert stats["preemptions_swap"] > 0
        assert stats["recompiles"] == 0
        config = engine.handle.decoder.experts
        wanted = {
            f'jpaged:expert_tokens_total{{engine="0",expert="{expert}",layer="{layer}",model_name="tiny"}} {count}.0'
            for layer, counts in enumerate(stats["expert_tokens"]) if config.sparse_layers[layer]
            for expert, count in enumerate(counts)
        }  # fmt: skip
        assert not all(config.sparse_layers), "a layer without experts has no counters"
        assert wanted == series_of_experts(client)
        engine.sleep(level=1)
        assert engine.stats()["expert_tokens"] == stats["expert_tokens"]
        assert wanted == series_of_experts(client)
    # The last token of a sequence is drawn and not computed.
    sequences = [prompts[name] + found[name][:-1] for found in (free, drawn, alone) for name in prompts]
    np.testing.assert_array_equal(stats["expert_tokens"], counts_of(sequences))
    total = sum(map(len, sequences)) * config.num_chosen
    assert [sum(counts) for counts in stats["expert_tokens"]] == [
        total * is_sparse for is_sparse in config.sparse_layers
    ]


def test_tokens_that_are_computed_again_count_again(prompts) -> None:
    options = SIZES | {"async_scheduling": False, "num_decode_steps": 1, "preemption_mode": "auto"}
    with Engine(str(DIRECTORY), **options) as engine, client_of(engine) as client:
        assert not np.any(engine.stats()["expert_tokens"]), "what the start measures belongs to no request"
        seen, clock = list[Any](), engine.scheduler.clock
        engine.scheduler.clock = lambda: (seen.append(engine.stats()), clock())[1]  # Inside of steps.
        drawn = run(engine, prompts, PARAMS, cycle([PreemptionMode.RECOMPUTE]))
        engine.scheduler.clock = clock
        stats, config = engine.stats(), engine.handle.decoder.experts
        assert any(np.any(each["expert_tokens"]) for each in seen)
        series = series_of_experts(client)
        engine.runner.expert_tokens.add(RunningStep())
        with ThreadPoolExecutor(1) as other_thread, engine.loop.turn("step"):
            assert other_thread.submit(series_of_experts, client).result(timeout=20) == series
    num_once = sum(len(prompt) for prompt in prompts.values()) + sum(len(tokens) - 1 for tokens in drawn.values())
    assert stats["step_tokens"] > num_once
    assert {sum(counts) for counts in stats["expert_tokens"]} == {0, stats["step_tokens"] * config.num_chosen}


class FailedStep:
    """The counts of a step that has failed."""

    def copy_to_host_async(self) -> None:
        """Begin nothing."""

    def is_ready(self) -> bool:
        raise RuntimeError("the step has failed")


def test_counts_of_a_step_that_fails_are_lost_and_later_ones_are_not() -> None:
    tokens = ExpertTokens(jnp.zeros((2, 3), jnp.int32))
    tokens.add(FailedStep())
    tokens.add(jnp.full((2, 3), 5, jnp.int32))
    np.testing.assert_array_equal(tokens.of_ended_steps(), np.full((2, 3), 5))


def test_choices_are_counted_as_numpy_counts_them() -> None:
    random = np.random.default_rng(0)
    experts, counted = random.integers(0, 6, (50, 3)), random.integers(0, 2, 50).astype(bool)  # 5 stands for none.
    found = jax.jit(tokens_of_experts, static_argnums=2)(jnp.asarray(experts, jnp.int32), jnp.asarray(counted), 5)
    np.testing.assert_array_equal(found, np.bincount(experts[counted].ravel(), minlength=6)[:5])


def test_the_summary_says_how_evenly_experts_are_chosen() -> None:
    counts = [[0, 0, 0, 0], [4, 4, 4, 4], [8, 4, 4, 0]]
    assert balance_of_experts(counts) == "the busiest expert of a layer has 1.0 to 2.0 times the mean, 1 of 8 have none"
    assert balance_of_experts(counts[:1]) == "none were computed"


def test_a_model_without_experts_is_refused_by_name(tiny: str) -> None:
    with pytest.raises(ConfigError, match=r"^count_expert_tokens: got true for a LlamaForCausalLM, which "):
        Engine(tiny, count_expert_tokens=True)
