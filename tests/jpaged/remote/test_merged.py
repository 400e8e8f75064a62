"""What several cores tell is what one would tell that had done all of it."""

from typing import Any

from jpaged.core.request_counts import RequestCounter
from jpaged.remote.core_client import CoreSnapshot, CoreStatus
from jpaged.remote.merged import merged_snapshot, merged_stats, merged_status

IDLE: dict[str, Any] = {
    "is_alive": True, "is_sleeping": False, "num_programs_done": 2, "num_programs": 3, "held_s": 1.0,
    "is_compiling": False, "num_steps": 5, "has_work": False,
}  # fmt: skip


def test_a_status_tells_what_any_core_does():
    busy = CoreStatus(**{**IDLE, "is_compiling": True, "has_work": True, "held_s": 4.0})
    found = merged_status([CoreStatus(**IDLE), busy])
    assert found == CoreStatus(
        is_alive=True, is_sleeping=False, num_programs_done=4, num_programs=6, held_s=4.0, is_compiling=True,
        num_steps=10, has_work=True,
    )  # fmt: skip


def test_counters_are_added_and_shares_are_made_of_the_sums():
    first = {"blocks": 10, "compile_seconds": 3.0, "end_tokens": 2, "step_tokens": 30, "padded_tokens": 40}
    second = {"blocks": 10, "compile_seconds": 5.0, "end_tokens": 2, "step_tokens": 0, "padded_tokens": 20}
    found = merged_stats([
        {**first, "padding_share": 0.25, "expert_tokens": [[1, 2], [0, 0]]},
        {**second, "padding_share": 1.0, "expert_tokens": [[3, 4], [5, 6]]},
    ])  # fmt: skip
    assert found == {
        "blocks": 20, "compile_seconds": 5.0, "end_tokens": 2, "step_tokens": 30, "padded_tokens": 60,
        "padding_share": 0.5, "expert_tokens": [[4, 6], [5, 6]],
    }  # fmt: skip


def test_histograms_of_requests_are_added_bucket_by_bucket():
    counters = [RequestCounter(), RequestCounter()]
    for value, counter in ((1, counters[0]), (3, counters[1]), (30, counters[1])):
        counter.histograms["request_params_n"].add(value)
        counter.finished["stop"] += 1
    snapshots = [
        CoreSnapshot(stats={"blocks": 4}, block_size=8, expert_tokens={1: [1, 2]}, requests=one.counts())
        for one in counters
    ]
    found = merged_snapshot(snapshots)
    assert (found.stats, found.block_size, found.expert_tokens) == ({"blocks": 8}, 8, {1: [2, 4]})
    assert found.requests is not None
    assert found.requests.finished["stop"] == 3
    histogram = found.requests.histograms["request_params_n"]
    assert (histogram.counts, histogram.sum) == ([1, 0, 1, 0, 0, 1], 34)
