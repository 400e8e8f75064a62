"""Swap or recompute: the cost of each, which one is chosen, and the reason that is given."""

import pytest

from jpaged.scheduling.preemption import PreemptionMode, PreemptionPolicy, SwapCosts

COSTS = SwapCosts(page_bytes=50, swap_bytes_per_s=1000.0, prefill_s_per_token=0.25)


@pytest.mark.parametrize(
    ("mode", "costs", "num_tokens", "num_pages", "expected", "reason"),
    [
        ("swap", None, 0, 0, "recompute", "nothing is computed yet"),
        ("swap", None, 1, 1, "swap", "preemption_mode=swap"),
        ("recompute", COSTS, 100, 1, "recompute", "preemption_mode=recompute"),
        ("auto", None, 100, 1, "recompute", "no costs of swapping are known"),
        ("auto", COSTS, 0, 0, "recompute", "nothing is computed yet"),
        ("auto", COSTS, 1, 2, "swap", "2 pages out and in take 200 ms, 1 tokens anew 250 ms"),
        ("auto", COSTS, 2, 5, "recompute", "5 pages out and in take 500 ms, 2 tokens anew 500 ms"),
        ("auto", COSTS, 1, 3, "recompute", "3 pages out and in take 300 ms, 1 tokens anew 250 ms"),
    ],
)
def test_auto_chooses_the_cheaper_mode_and_gives_the_reason(mode, costs, num_tokens, num_pages, expected, reason):
    policy = PreemptionPolicy(PreemptionMode(mode), costs)
    assert policy.choose(num_tokens=num_tokens, num_pages=num_pages) == (PreemptionMode(expected), reason)
