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
NUM_SEEDS = 250

FLOORS = {
    "NaN": 50,
    "abort decoding": 200,
    "abort in flight": 150,
    "abort prefilling": 45,
    "abort swapped": 5,
    "abort waiting": 200,
    "bypass": 500,
    "clock jump": 150,
    "copy-on-write": 400,
    "eviction": 4000,
    "eviction kept on host": 2500,
    "fault: dispatch after": 20,
    "fault: dispatch before": 15,
    "fault: read": 15,
    "fork": 350,
    "fork behind an earlier token": 30,
    "fork in flight": 100,
    "fork prefilling": 30,
    "fork swapped": 5,
    "fork waiting": 100,
    "fork with a given token": 85,
    "grammar": 200,
    "hit": 150,
    "host hit": 50,
    "host pool full": 50,
    "ignored": 50,
    "long prompt in chunks": 2000,
    "passed page published": 450,
    "pin": 150,
    "prefix awaited": 50,
    "preemption by recompute": 200,
    "refused: InvalidRequestError": 150,
    "refused: QueueFullError": 350,
    "reset": 50,
    "retirement awaited": 50,
    "shrink": 100,
    "swap-in": 17,
    "swap-out": 50,
    "table update batch": 50,
    "unpin": 50,
    "update abort": 30,
    "update keep": 35,
    "update recompute": 35,
    "update wait": 35,
}
"""Event → how often it must happen: about half as often as in today's lives (12,000 steps)."""

REGRESSIONS = {
    121: "a request was bypassed by many more in the step in which it reached its bound",
    282: "a fork without a state slot drew a token in the null slot",
    842: "forks that share all of their tokens took more pages than the pool was said to need",
    5999: "the gate was not asked about a request that was swapped in",
    8711: "a fork had a page more behind its window than was counted",
    18906: "a fork whose parent ended was to share pages that a window of its next parent had passed",
    15164: "a swapped request with a pinned prefix held other pages, and could never be swapped in",
}
"""Seed → the bug that it has found, and finds again when that is put back."""


def test_other_requests_and_events_change_no_token_though_every_kind_of_event_happens_often():
    total = Summary(-1)
    for seed in range(NUM_SEEDS):
        summary = simulate(seed)
        total.steps += summary.steps
        total.requests += summary.requests
        total.events += summary.events
    assert not {name: total.events[name] for name, floor in FLOORS.items() if total.events[name] < floor}
    assert total.steps >= 40 * NUM_SEEDS
    assert total.requests >= 10 * NUM_SEEDS


@pytest.mark.parametrize("seed", REGRESSIONS, ids=str)
def test_a_seed_that_has_found_a_bug_passes(seed):
    simulate(seed)


def test_a_seed_has_one_event_log():
    """The log is the same in another process, with other string hashes and addresses."""
    code = "from tests.jpaged.simulation import simulate; print(*(simulate(seed).log_hash for seed in range(8)))"
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == " ".join(simulate(seed).log_hash for seed in range(8)) + "\n"


def test_a_failing_seed_says_how_to_replay_it(monkeypatch):
    monkeypatch.setattr(
        "jpaged.kv_cache.page_pool.PagePool.defer_free", lambda pool, page, step: pool.free.append(page)
    )
    with pytest.raises(AssertionError) as failure:
        list(map(simulate, range(20)))
    [note] = failure.value.__notes__
    assert re.search(r"replay: python scripts/simulate.py \d+$", note)
