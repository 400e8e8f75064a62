"""Random lives of a host core on a symbolic device: beside other requests, and whatever happens, every sequence draws
the tokens that it draws by itself, and nothing is left behind. The checks are in `symbolic.Host`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..simulation import Summary, simulate

ROOT = Path(__file__).parents[3]
BLOCKS, BLOCK = 36, 50
TOTAL, DONE = Summary(-1), set()

FLOORS = {
    "NaN": 500,
    "abort decoding": 2000,
    "abort in flight": 1000,
    "abort prefilling": 300,
    "abort swapped": 100,
    "abort waiting": 2000,
    "bypass": 4000,
    "clock jump": 1000,
    "copy-on-write": 4000,
    "eviction": 20000,
    "eviction kept on host": 20000,
    "fault: dispatch after": 100,
    "fault: dispatch before": 100,
    "fault: read": 100,
    "fork": 3000,
    "fork in flight": 900,
    "fork prefilling": 200,
    "fork swapped": 90,
    "fork waiting": 1000,
    "hit": 1000,
    "host hit": 600,
    "host pool full": 600,
    "ignored": 600,
    "long prompt in chunks": 10000,
    "pin": 1000,
    "prefix awaited": 500,
    "preemption by recompute": 1000,
    "refused: InvalidRequestError": 1000,
    "refused: QueueFullError": 3000,
    "reset": 400,
    "retirement awaited": 500,
    "shrink": 900,
    "swap-in": 500,
    "swap-out": 600,
    "table update batch": 800,
    "unpin": 700,
}
"""Event → how often it must happen: about half as often as in today's lives (36 × 50 seeds, 131,000 steps)."""

REGRESSIONS = {
    121: "a request was bypassed by many more in the step in which it reached its bound",
    282: "a fork without a state slot drew a token in the null slot",
    842: "forks that share all of their tokens took more pages than the pool was said to need",
    5999: "the gate was not asked about a request that was swapped in",
    15164: "a swapped request with a pinned prefix held other pages, and could never be swapped in",
    15934: "a sample with pages of its own limited its parent to a negative number of cached tokens",
}
"""Seed → the bug that it has found, and finds again when that is put back."""


def run(seeds):
    for seed in seeds:
        summary = simulate(seed)
        TOTAL.steps += summary.steps
        TOTAL.requests += summary.requests
        TOTAL.events += summary.events


@pytest.mark.parametrize("block", range(BLOCKS))
def test_other_requests_and_events_change_no_token(block):
    run(range(block * BLOCK, block * BLOCK + BLOCK))
    DONE.add(block)


def test_every_kind_of_event_happens_often():
    if len(DONE) < BLOCKS:
        pytest.skip("only some of the lives ran, or one failed")
    few = {name: TOTAL.events[name] for name, floor in FLOORS.items() if TOTAL.events[name] < floor}
    assert not few
    assert TOTAL.steps >= 100_000
    assert TOTAL.requests >= 10 * BLOCKS * BLOCK


@pytest.mark.parametrize("seed", REGRESSIONS, ids=str)
def test_a_seed_that_has_found_a_bug_passes(seed):
    simulate(seed)


def test_a_seed_has_one_event_log():
    """It is the same in another process, with other string hashes and addresses."""
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
    monkeypatch.setattr(
        "jpaged.kv_cache.page_pool.PagePool.defer_free", lambda pool, page, step: pool.free.append(page)
    )
    with pytest.raises(AssertionError) as failure:
        run(range(20))
    [note] = failure.value.__notes__
    assert re.search(r"replay: python scripts/simulate.py \d+$", note)
