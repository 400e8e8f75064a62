"""Random requests to one engine: lengths, sampling modes, seeds, stops, aborts and forks, on a two-layer random model.

None of them may compile what was not planned at the start, and the plan is small.
"""

import random
from contextlib import suppress
from typing import Any

import pytest

from jpaged import Engine, SamplingParams
from jpaged.errors import InvalidRequestError

from .tiny_model import SIZES

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")

MAX_EXECUTABLES = 36
DEFAULTS: dict[str, Any] = {"max_model_len": 128, "block_size": 16}
SWAP: dict[str, Any] = {"num_blocks": 40, "num_host_blocks": 40, "preemption_mode": "swap"}


def random_params(rng: random.Random) -> SamplingParams:
    options: dict[str, Any] = {"max_tokens": rng.randint(1, 32), "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.5:
        options["temperature"] = 0.0
    else:
        options |= {
            "temperature": rng.choice([0.5, 1.0, 1.5]),
            "top_k": rng.choice([0, 5]),
            "top_p": rng.choice([0.7, 1.0]),
            "min_p": rng.choice([0.0, 0.1]),
            "seed": rng.choice([None, rng.randrange(2**40)]),
            "n": rng.choice([1, 1, 1, 2, 3]),
        }
    if rng.random() < 0.1:
        options["logprobs"] = rng.randint(0, 5)
    if rng.random() < 0.2:
        options["stop_token_ids"] = rng.sample(range(10, 258), rng.randint(1, 6))
    if rng.random() < 0.2:
        options["stop"] = [chr(rng.randrange(97, 123))]
    options["detokenize"] = bool(options.get("stop")) or rng.random() < 0.3
    return SamplingParams(**options)


def run_random_requests(engine: Engine, num_requests: int, seed: int) -> int:
    """Run that many requests, some of which are aborted or forked; return how many ended by an output or an abort."""
    rng = random.Random(seed)
    num_added = num_ended = num_aborted = 0
    while num_added < num_requests or engine.has_unfinished_requests():
        # In bursts, so that steps are now full and now nearly empty, and now and then nothing waits.
        for _ in range(rng.choice([0, 0, 0, 1, 2, 80]) if num_added < num_requests else 0):
            prompt = [rng.randrange(10, 258) for _ in range(rng.randint(1, 64))]
            engine.add_request(f"{num_added}", prompt, random_params(rng))
            num_added += 1
        num_ended += sum(output.finished for output in engine.step())
        if engine.requests and rng.random() < 0.05:
            one = rng.choice(list(engine.requests))
            engine.abort_request(one)
            num_aborted += 1
        if engine.requests and rng.random() < 0.05:
            with suppress(InvalidRequestError):  # Greedy, or too many samples already.
                engine.fork(rng.choice(list(engine.requests)), rng.choice([1, 2]))
    return num_ended + num_aborted


@pytest.mark.parametrize(
    ("num_requests", "options"),
    [
        pytest.param(150, SIZES | {"warmup": "lazy"}, id="150 requests"),
        pytest.param(10_000, DEFAULTS, id="10,000 requests", marks=pytest.mark.slow),
        pytest.param(3000, DEFAULTS | SWAP, id="3,000 that swap", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_compiled_outside_the_plan(tiny: str, num_requests: int, options: dict[str, Any]) -> None:
    with Engine(tiny, **options) as engine:
        assert run_random_requests(engine, num_requests, seed=num_requests) >= num_requests
        stats = engine.stats()
        assert stats["recompiles"] == 0
        assert stats["executables"] <= stats["planned_executables"] <= MAX_EXECUTABLES
        assert stats["blocks_used"] == stats["requests"] == 0
        if "preemption_mode" in options:
            assert stats["preemptions_swap"] > 0


def test_a_compilation_within_a_step_is_counted(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the negative control: a step compiles a function of its own."""
    import jax

    with Engine(tiny, **SIZES) as engine:
        dispatch = engine.runner.dispatch
        monkeypatch.setattr(
            engine.runner, "dispatch", lambda step: [jax.jit(lambda x: x * 3.25)(1.0), dispatch(step)][1]
        )
        engine.generate("one", SamplingParams(max_tokens=2), use_tqdm=False)
        assert engine.stats()["recompiles"] > 0
