"""Lives of a host core on a symbolic device, each from one seed: alone or in company, whatever happens to it, every
sequence draws the same tokens, and nothing is left behind. What is checked is in `symbolic.Host`.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .simulation import Summary, simulate

ROOT = Path(__file__).parents[2]
BLOCKS, BLOCK = 60, 50
TOTAL, DONE = Summary(-1), set()

FLOORS = {}

REGRESSIONS = {
    32: "a request that was swapped in was swapped out in the same step for want of its next pages, for ever",
    37: "a fork without a state slot drew a token in the null slot",
    482: "a fenced page was kept fenced behind one that was written longer",
    641: "a request was bypassed by many more in the step in which it reached its bound",
    1056: "forks that share all of their tokens took more pages than the pool was said to need",
}
"""Seeds that failed when they first ran, and what they found. Their lives have changed with the simulation since."""


def run(seeds):
    global TOTAL
    for seed in seeds:
        summary = simulate(seed)
        TOTAL.steps += summary.steps
        TOTAL.requests += summary.requests
        TOTAL.events += summary.events


@pytest.mark.parametrize("block", range(BLOCKS))
def test_company_changes_no_token(block):
    run(range(block * BLOCK, block * BLOCK + BLOCK))
    DONE.add(block)


def test_the_lives_made_everything_happen():
    if len(DONE) < BLOCKS:
        pytest.skip("only some of the lives ran, or one failed")
    few = {name: TOTAL.events[name] for name, floor in FLOORS.items() if TOTAL.events[name] < floor}
    assert not few
    assert TOTAL.steps >= 100_000
    assert TOTAL.requests >= 10 * BLOCKS * BLOCK


@pytest.mark.parametrize("seed", REGRESSIONS, ids=str)
def test_a_seed_that_once_failed(seed):
    simulate(seed)


def test_a_seed_has_one_event_log():
    """In another process, with other hashes of strings and other addresses."""
    code = "from tests.jpaged.simulation import simulate; print(*(simulate(seed).log_hash for seed in range(8)))"
    logs = set()
    for hash_seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        logs.add(done.stdout)
    assert len(logs) == 1
    assert logs == {" ".join(simulate(seed).log_hash for seed in range(8)) + "\n"}


def test_a_failing_seed_says_how_to_replay_it(monkeypatch):
    monkeypatch.setattr("jpaged.page_pool.PagePool.fence", lambda pool, page, step: pool.free.append(page))
    with pytest.raises(AssertionError) as failure:
        for seed in range(20):
            simulate(seed)
    assert any(f"python scripts/simulate.py {seed}" in note for note in failure.value.__notes__ for seed in range(20))


