"""`scripts/bench/scheduler.py` runs the engine's own host core and reports each part of a step."""

import json
import math

import pytest

from jpaged.commands.process import run_command

from ...jpaged.invariants import check_scheduler


@pytest.fixture
def bench(script):
    return script("bench.scheduler")


@pytest.mark.slow
def test_the_bench_writes_its_measurements(bench, tmp_path, capsys):
    path = tmp_path / "scheduler.json"
    sizes = ["--running", "4", "--queued", "3", "9", "--requests", "8", "--runs", "2", "--block-size", "16"]
    assert bench.main([*sizes, "-o", str(path)]) == 0
    result = json.loads(path.read_text())
    assert (result["running"], result["prompt_tokens"], result["output_tokens"]) == (4, 512, 128)
    assert set(result["decode_step"]) == {"schedule", "build", "dispatch", "process", "schedule + process", "sum"}
    for values in result["decode_step"].values():
        assert 0 < values["p50"] <= values["p99"]
    assert set(result["step_with_text"]) == {"deltas", "outputs", "deltas with grammars"}
    for values in result["step_with_text"].values():
        assert 0 < values["p50"] <= values["p99"]
        assert math.isfinite(values["publish_us_per_row"])  # A difference of two times: it may be below 0 here.
    assert set(result["us_per_request"]) == set(result["steps_with_newcomers"]) == {"3", "9"}
    assert result["growth"]["3"] == 1.0
    assert result["hash_and_look_up"]["us_per_page"] > 0
    assert set(result["detokenize"]) == {"us_per_token_plain", "us_per_token_stop_strings"}
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "decode step of 4 sequences" in shown.err


def test_the_bench_serves_real_requests(bench):
    """Each request gets as many tokens as it asks for, and the scheduler's invariants hold at every step."""
    host = bench.Host(num_running=4, block_size=16)
    requests = [host.add(max_tokens=10 + index) for index in range(6)]
    while not all(request.state.is_finished for request in requests):
        host.step()
        check_scheduler(host.core.scheduler)
    assert [request.sequences[0].num_output_tokens for request in requests] == [10, 11, 12, 13, 14, 15]
    assert host.core.num_generated == sum(range(10, 16))


def test_every_page_of_the_hashing_bench_is_found(bench):
    assert bench.bench_hashing(num_pages=50)["us_per_page"] > 0  # The bench asserts that all 50 are found.


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--runs", "0"], "--runs: got 0, allowed: an integer ≥ 1"),
        (["--queued", "-1"], "--queued: got -1, allowed: integers ≥ 0"),
        (["--running", "x"], "--running"),
        (["--speed", "9"], "--speed"),
    ],
)
def test_bad_flags_are_refused_in_one_line(bench, argv, message, capsys):
    assert run_command(bench.main, argv) == 1
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
