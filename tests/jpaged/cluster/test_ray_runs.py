"""`jpaged generate --ray` on a cluster of one machine: the file of a run without it, whatever is killed meanwhile.

These tests need the extra `ray`, which CI does not have: `scripts/release_check.sh ray` runs them.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jpaged.remote.last_outputs import ENDED_CORES

from ..commands.command_line import Run, generate, without_metrics
from ..tiny_model import SIZE_FLAGS
from .ray_cluster import NEEDS_RAY, WAIT_S, Cluster, wait_until
from .ray_makers import KILLING_PROMPT

pytestmark = [pytest.mark.slow, NEEDS_RAY]

NUM_LINES, NUM_SOON = 500, 60
"""Lines of the file, and those that are done when something is killed."""
STEP_S = 0.01


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write lines of several forms; one of them is wrong."""
    lines: list[dict[str, Any]] = []
    for index in range(NUM_LINES):
        text = f"Line {index} " + "says something " * (index % 3)
        forms: list[dict[str, Any]] = [
            {"prompt": text},
            {"messages": [{"role": "user", "content": text}], "id": f"chat-{index}"},
            {"prompt_token_ids": list(range(10, 30 + index % 40)), "temperature": 0.0, "logprobs": 2},
            {"prompt": text, "seed": index, "top_k": 20, "n": 2, "id": f"seeded-{index}"},
            {"prompt": text, "structured_outputs": {"choice": ["yes", "no"]}, "prompt_logprobs": 1},
        ]
        lines.append({**forms[index % len(forms)], "max_tokens": 5 + index % 30, "ignore_eos": True})
    lines[16]["temperature"] = -1
    return write_lines(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", lines)


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def slow_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers have engines whose steps take longer."""
    from jpaged.cluster import driver
    from jpaged.cluster.worker import WorkerSpec

    def slow_spec(config: Any, num_on_node: int, options: Any) -> WorkerSpec:
        return WorkerSpec(config, num_on_node, {"step_s": STEP_S}, "ray_makers:slow")

    monkeypatch.setattr(driver, "WorkerSpec", slow_spec)


Flags = list[Any]


@pytest.fixture(scope="module")
def flags(model: Path) -> Flags:
    return ["-m", model, *SIZE_FLAGS]


@pytest.fixture(scope="module")
def plain(flags: Flags, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of a run without Ray."""
    path = tmp_path_factory.mktemp("plain") / "out.jsonl"
    run = generate(*flags, "--prompt-file", prompts, "-o", path)
    assert run.returncode == 3, run.stderr
    return without_metrics(path)


def ray_flags(cluster: Cluster, num_workers: int) -> Flags:
    return ["--ray", cluster.address, "--data-parallel-size", num_workers, "--ray-resources", '{"CPU": 0.5}']


def check_ended_well(run: Run) -> None:
    assert run.returncode == 3, run.stderr  # One line is wrong.
    assert run.stdout == ""


@contextmanager
def killing(output: Path, pids: Callable[[], list[int]]) -> Iterator[None]:
    """Kill a process of the run once some lines are done."""
    killed: list[int] = []

    def kill() -> None:
        wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") > NUM_SOON)
        killed.append(pids()[0])
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    yield
    thread.join()
    assert killed


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_the_file_is_that_of_a_run_without(
    num_workers: int, cluster: Cluster, flags: Flags, prompts: Path, plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    run = generate(*flags, *ray_flags(cluster, num_workers), "--prompt-file", prompts, "-o", output)
    check_ended_well(run)
    assert without_metrics(output) == plain
    assert f"workers: {num_workers}, each with CPU 0.5" in run.stderr
    wait_until(lambda: not cluster.cores())


@pytest.mark.parametrize("killed", ["cores", "workers"])
def test_the_file_is_the_same_after_a_process_was_killed(
    killed: str,
    cluster: Cluster,
    flags: Flags,
    prompts: Path,
    plain: list[dict[str, Any]],
    tmp_path: Path,
    slow_workers: None,
) -> None:
    output = tmp_path / "out.jsonl"
    with killing(output, getattr(cluster, killed)):
        run = generate(*flags, *ray_flags(cluster, 2), "--prompt-file", prompts, "-o", output)
    check_ended_well(run)
    assert without_metrics(output) == plain


def test_a_line_that_kills_cores_costs_itself_alone(
    cluster: Cluster, flags: Flags, prompts: Path, plain: list[dict[str, Any]], tmp_path: Path, slow_workers: None
) -> None:
    lines = [json.loads(line) for line in prompts.read_text().splitlines()]
    lines.append({"prompt": KILLING_PROMPT, "id": "killer"})
    file, output = write_lines(tmp_path / "prompts.jsonl", lines), tmp_path / "out.jsonl"
    run = generate(*flags, "--no-chat", *ray_flags(cluster, 2), "--prompt-file", file, "-o", output)
    check_ended_well(run)
    expected = tmp_path / "plain.jsonl"
    generate(*flags, "--no-chat", "--prompt-file", prompts, "-o", expected)
    *others, killer = without_metrics(output)
    assert others == without_metrics(expected)
    assert killer["error"]["message"] == ENDED_CORES


def test_a_run_whose_driver_was_killed_goes_on(
    cluster: Cluster, flags: Flags, prompts: Path, plain: list[dict[str, Any]], tmp_path: Path, slow_workers: None
) -> None:
    output = tmp_path / "out.jsonl"
    args = [str(one) for one in [*flags, *ray_flags(cluster, 2), "--prompt-file", prompts, "-o", output]]
    code = f"""
import sys
from jpaged.cluster import driver
from jpaged.commands.generate import main
spec = driver.WorkerSpec
driver.WorkerSpec = lambda config, num_on_node, options: spec(
    config, num_on_node, {{"step_s": {STEP_S}}}, "ray_makers:slow")
sys.exit(main({args!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") > NUM_SOON)
    process.kill()
    process.wait()
    wait_until(lambda: not cluster.cores())
    run = generate(*args, "--resume")
    check_ended_well(run)
    assert without_metrics(output) == plain
    num_kept = int(run.stderr.partition("resume: ")[2].partition(" ")[0])
    assert NUM_SOON <= num_kept < NUM_LINES


def test_a_single_prompt_is_printed_and_nothing_else(cluster: Cluster, flags: Flags) -> None:
    args = [*flags, "--temperature", 0, "--max-tokens", 9, "Hello"]
    run = generate(*args, *ray_flags(cluster, 1))
    assert run.returncode == 0, run.stderr
    assert run.stdout == generate(*args).stdout


def check_refused(run: Run, *parts: str) -> None:
    """Check that a run ended with status 1 and one line, which has some parts."""
    assert run.returncode == 1
    lines = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, run.stderr
    assert all(part in lines[0] for part in parts), lines[0]


@pytest.mark.parametrize("token", ["", "f" * 64], ids=["missing", "wrong"])
def test_a_token_that_is_missing_or_wrong_is_told(token: str, cluster: Cluster, flags: Flags, tmp_path: Path) -> None:
    """In a process of its own: Ray reads the token once."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment |= {"HOME": str(tmp_path), "RAY_AUTH_TOKEN": token} if token else {"HOME": str(tmp_path)}
    command = [sys.executable, "-m", "jpaged.generate", *flags, *ray_flags(cluster, 1), "Hello"]
    ended = subprocess.run(map(str, command), env=environment, capture_output=True, text=True, timeout=WAIT_S)
    check_refused(Run(ended.returncode, ended.stdout, ended.stderr), cluster.address, "RAY_AUTH_TOKEN")
    assert len(ended.stderr.splitlines()) == 1


def test_resources_and_workers_that_no_node_has_are_told(cluster: Cluster, flags: Flags) -> None:
    at = ["--ray", cluster.address]
    run = generate(*flags, *at, "--ray-resources", '{"GPU": 1}', "Hello")
    check_refused(run, "--ray-resources: got {'GPU': 1}, which no node has, allowed: at most CPU 2")
    check_refused(
        generate(*flags, *at, "--data-parallel-size", 2, "Hello"), "data_parallel_size: got 2, allowed: at most 1"
    )


def test_amounts_that_ray_does_not_reserve_are_told(cluster: Cluster, flags: Flags) -> None:
    run = generate(*flags, "--ray", cluster.address, "--ray-resources", '{"CPU": 0.00001}', "Hello")
    check_refused(run, "--ray-resources: got {'CPU': 1e-05}, allowed: what Ray reserves (The precision of")


def test_another_version_at_a_worker_is_told_with_its_node(
    cluster: Cluster, flags: Flags, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jpaged.cluster import driver

    monkeypatch.setattr(driver, "WorkerSpec", partial(driver.WorkerSpec, greeting=b"jpaged 9.9 x"))
    run = generate(*flags, *ray_flags(cluster, 1), "Hello")
    check_refused(run, f"--ray: on the node {socket.gethostname()}", "allowed: jpaged 9.9 x; install one version")


def test_a_model_that_a_worker_has_not_is_told_with_its_node(
    cluster: Cluster, flags: Flags, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jpaged.cluster import driver

    monkeypatch.setattr(driver, "sent_config", lambda config: {"model": "/nowhere/model"})
    run = generate(*flags, *ray_flags(cluster, 1), "Hello")
    check_refused(run, f"--ray: on the node {socket.gethostname()}", "/nowhere/model")
