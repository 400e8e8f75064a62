"""`jpaged bench latency` and `throughput` on a tiny model: what they compare, count and refuse."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged import ConfigError
from jpaged.commands.bench.baselines import SAMPLING
from jpaged.commands.bench.throughput import bench as run_bench
from jpaged.commands.bench.workloads import FIXED, load_workload

from ...tiny_model import write_tiny_model

PEER = """
import json, sys, time
print(json.dumps({{"ready": "a peer"}}), flush=True)
for line in sys.stdin:
    work = json.loads(line)
    assert work["max_num_seqs"] == 8
    time.sleep(0.02)
    tokens = sum(request["out"] for request in work["requests"])
    print(json.dumps({{"seconds": 0.5, "tokens": tokens + {surplus}}}), flush=True)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096))


def peer(tmp_path: Path, surplus: int = 0) -> str:
    script = tmp_path / "peer.py"
    script.write_text(PEER.format(surplus=surplus))
    return f"other={sys.executable} {script}"


def bench(tiny: str, tmp_path: Path, *flags: str, kind: str = "throughput") -> dict[str, Any]:
    output = tmp_path / "out.json"
    sizes = ["--model", tiny, "--max-num-seqs", "8", "--runs", "2", "-o", str(output)]
    assert run_bench(kind, [*sizes, "--workload", "decode", "--num-requests", "4", *flags]) == 0
    return json.loads(output.read_text())


@pytest.mark.slow
def test_every_baseline_computes_the_same_tokens_in_interleaved_runs(tiny: str, tmp_path: Path) -> None:
    versus = ["--versus", "replay", "bare", "dense", "sync", "one-step", "mixed"]
    result = bench(tiny, tmp_path, *versus, "--peer", peer(tmp_path))
    names = ["replay", "bare", "dense", "sync", "one-step", "mixed", "other"]
    assert list(result["seconds"]["decode"]) == ["jpaged", *names]
    assert all(len(times) == 2 for times in result["seconds"]["decode"].values())
    rates, ratios = result["tokens_per_s"]["decode"], result["ratios"]["decode"]
    assert list(ratios) == [f"jpaged ÷ {name}" for name in names]
    for name in names:
        assert ratios[f"jpaged ÷ {name}"] == pytest.approx(rates["jpaged"] / rates[name], rel=0.02)
    workload = load_workload("decode", vocab_size=258, num_requests=4)
    assert rates["other"] == pytest.approx(workload.num_output_tokens / 0.5, rel=1e-3)
    assert result["peers"] == {"other": {"ready": "a peer"}}
    assert result["recompiles"] == 0


@pytest.mark.slow
def test_every_kind_of_sampling_is_timed_at_every_number_of_requests(tiny: str, tmp_path: Path) -> None:
    """Several numbers of requests are as many workloads; the kinds share an engine, whose own steps stay apart."""
    result = bench(tiny, tmp_path, "--num-requests", "1", "3", "--versus", "replay", *SAMPLING)
    assert list(result["ratios"]) == ["decode, 1", "decode, 3"]
    for name, count in (("decode, 1", 1), ("decode, 3", 3)):
        assert list(result["seconds"][name]) == ["jpaged", "replay", *SAMPLING]
        assert result["workloads"][name].startswith(f"{count} requests")
    assert result["recompiles"] == 0


@pytest.mark.slow
def test_steps_are_counted_with_their_padding(tiny: str, tmp_path: Path) -> None:
    details = bench(tiny, tmp_path, "--versus", kind="latency")["details"]["decode"]
    workload = load_workload("decode", vocab_size=258, num_requests=4)
    assert details["steps"] >= max(workload.output_lens)
    padding = details["padded ÷ true tokens"]
    assert set(padding) == {"prompts", "decode"}
    assert all(1.0 <= share <= 8.0 for share in padding.values())
    first = details["time_to_first_token_s"]
    assert 0 < first["median"] <= first["worst"]


@pytest.mark.slow
def test_a_peer_that_computes_another_number_of_tokens_is_refused(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"other gave \d+ tokens for decode, wanted \d+"):
        bench(tiny, tmp_path, "--versus", "--peer", peer(tmp_path, surplus=1))
    with pytest.raises(ConfigError, match="other ended with status 3 and no answer"):
        bench(tiny, tmp_path, "--versus", "--peer", f"other={sys.executable} -c 'raise SystemExit(3)'")


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("no-such-command", "--peer: other cannot be started: .*no-such-command"),
        (f"{sys.executable} -c 'print(7)'", "--peer: other wrote '7', wanted a JSON object"),
        (f"{sys.executable} -c 'print(\"Loading\")'", "--peer: other wrote 'Loading', wanted a JSON object"),
        # It ends before the first workload.
        (f"{sys.executable} -c 'print(\"{{}}\")'", "--peer: other ended with status 0 and no answer"),
    ],
)
def test_a_command_that_is_no_peer_is_refused_by_name(tiny: str, tmp_path: Path, command: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        bench(tiny, tmp_path, "--versus", "--peer", f"other={command}")


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--workload", "D"], "--workload: got 'D', allowed: A, B, C, sharegpt"),
        (
            ["--versus", "vllm"],
            "--versus: got 'vllm', allowed: replay, bare, dense, sync, one-step, deterministic, drawn, top-k-top-p",
        ),
        (["--peer", "vllm"], "--peer: got 'vllm', allowed: NAME=COMMAND"),
        (["--peer", "bare=true"], "--peer: got 'bare=true'"),
        (["--runs", "0"], "--runs: got 0, allowed: an integer ≥ 1"),
        (["--num-requests", "2", "0"], "--num-requests: got 0, allowed: an integer ≥ 1"),
        (["--workload", "A"], "whose token ids go up to"),
        (["--max-model-len", "100"], "max_model_len: got 100, the workloads need"),
        (
            ["-o", "no/such/folder/out.json"],
            "--output: got no/such/folder/out.json, allowed: a file in an existing folder",
        ),
    ],
    ids=str,
)
def test_bad_flags_are_refused_before_anything_runs(tiny: str, flags: list[str], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        run_bench("throughput", ["--model", tiny, "--workload", "sharegpt", *flags])


def test_workloads_have_the_lengths_that_their_descriptions_state() -> None:
    a, b, c = (load_workload(name, vocab_size=49152) for name in FIXED)
    assert ([len(prompt) for prompt in a.prompts], a.output_lens) == ([32], (128,))
    assert len(b.prompts) == 64
    assert max(map(len, b.prompts)) <= 512
    assert {prompt[:512] for prompt in c.prompts} == {c.prompts[0][:512]}
    assert (len(set(c.prompts)), c.output_lens) == (32, (32,) * 32)
    drawn = load_workload("sharegpt", vocab_size=1000, num_requests=4000)
    assert drawn == load_workload("sharegpt", vocab_size=1000, num_requests=4000)
    assert np.mean([len(prompt) for prompt in drawn.prompts]) == pytest.approx(161, rel=0.1)
    assert np.mean(drawn.output_lens) == pytest.approx(338, rel=0.1)
    assert max(max(prompt) for prompt in drawn.prompts) < 1000
