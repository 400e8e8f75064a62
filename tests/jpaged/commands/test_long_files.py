"""Prompt files that are read while requests run: more lines than the start looks at, pipes, and their order."""

import json
import os
import subprocess
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from jpaged.commands import generate as command_module
from jpaged.commands.files.jobs import Job
from jpaged.commands.files.lines import LineSource
from jpaged.sampling.sampling_params import SamplingParams
from jpaged.scheduling import request_source
from jpaged.text.prompts import EncodedPrompt

from ..tiny_model import SIZE_FLAGS
from .command_line import ROOT, command, generate, records

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")


@pytest.fixture
def short_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the start look at four lines, and eight requests wait."""
    monkeypatch.setattr(command_module, "HEAD_JOBS", 4)
    monkeypatch.setattr(request_source, "MIN_READ_AHEAD", 8)


def write(path: Path, lines: list[object]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.usefixtures("short_head")
def test_lines_behind_the_head_get_their_results_or_errors_of_their_own(tiny: str, tmp_path: Path) -> None:
    lines: list[object] = [{"prompt": f"line {number}", "id": f"id-{number}", "max_tokens": 3} for number in range(60)]
    lines[20] = {"prompt": "x", "n": 9, "temperature": 1.0, "max_tokens": 3}  # max_num_seqs is 8.
    lines[30] = {"prompt_token_ids": [5] * 128}
    lines[40] = {"prompt": "again", "id": "id-3"}
    lines[50] = "{no JSON"
    lines[55] = {"prompt": "x", "n": 4, "temperature": 1.0, "max_tokens": 3}
    prompts, path = write(tmp_path / "p.jsonl", lines), tmp_path / "out.jsonl"
    run = generate("-m", tiny, *SIZE_FLAGS, "--prompt-file", prompts, "-o", path)
    assert run.returncode == 3, run.stderr
    found = records(path)
    assert [number for number, record in enumerate(found) if "error" in record] == [20, 30, 40, 50]
    assert [found[number]["error"]["param"] for number in (20, 30, 40, 50)] == ["n", "prompt", "id", None]
    assert "max_num_seqs, 8" in found[20]["error"]["message"]
    assert found[30]["error"]["code"] == "context_length_exceeded"
    assert "which line 4 has too" in found[40]["error"]["message"]
    assert len(found[55]["outputs"]) == 4
    assert [record["id"] for record in found[:3]] == ["id-0", "id-1", "id-2"]
    assert "recompiles 0" in run.stderr
    printed = generate("-m", tiny, *SIZE_FLAGS, "--prompt-file", prompts, "--json")
    assert [json.loads(line)["id"] for line in printed.stdout.splitlines()] == [record["id"] for record in found]


@pytest.mark.usefixtures("short_head")
def test_a_line_without_an_id_of_its_own_takes_no_other_ones(tiny: str, tmp_path: Path) -> None:
    lines = [{"prompt": "x", "id": 2}, "{no JSON", {"prompt": "y", "id": 4}, '["list"]', {"prompt": "z", "id": 1.5}]
    prompts, path = write(tmp_path / "p.jsonl", lines), tmp_path / "out.jsonl"
    run = generate("-m", tiny, *SIZE_FLAGS, "--prompt-file", prompts, "-o", path, "-n", 2)
    assert run.returncode == 3
    found = records(path)
    assert [record["id"] for record in found] == [2, None, 4, None, None]
    assert [found[number]["error"]["message"][:8] for number in (1, 3, 4)] == ["line 2: ", "line 4: ", "line 5: "]
    assert "error: line 2: is not JSON" in run.stderr


@pytest.mark.usefixtures("short_head")
def test_priorities_order_the_lines_that_have_been_read(tiny: str, tmp_path: Path) -> None:
    """Sixteen requests may wait, twice as many as run: the last lines cannot be the first to run."""
    lines = [{"prompt": f"{number}", "priority": -number, "max_tokens": 2, "ignore_eos": True} for number in range(60)]
    prompts, path = write(tmp_path / "p.jsonl", lines), tmp_path / "out.jsonl"
    flags = ["--scheduling-policy", "priority", "--num-decode-steps", 1]
    run = generate("-m", tiny, *SIZE_FLAGS, *flags, "--prompt-file", prompts, "-o", path)
    assert run.returncode == 0, run.stderr
    started = [record["metrics"]["first_scheduled_time"] for record in records(path)]
    order = sorted(range(60), key=started.__getitem__)
    assert started[15] == min(started)
    assert started[0] == max(started)
    assert max(order[:8]) < 32


@pytest.mark.slow
def test_a_pipe_is_answered_while_it_stays_open(tiny: str) -> None:
    args = ["-m", tiny, *SIZE_FLAGS, "--prompt-file", "-", "--json", "-n", 3]
    process = subprocess.Popen(
        command(*args), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    timer = threading.Timer(60, process.kill)  # A hang must not block `readline` for ever.
    timer.daemon = True
    timer.start()
    assert process.stdin is not None
    assert process.stdout is not None
    for number in (1, 2, 3):
        process.stdin.write(json.dumps({"prompt": f"line {number}"}) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == number
    process.stdin.close()
    assert process.wait(60) == 0
    assert process.stdout.read() == ""
    timer.cancel()


def test_a_pipe_that_never_pauses_is_waited_for_no_longer_than_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start takes what has come within its time, here of lines that come ten times as often."""
    monkeypatch.setattr(command_module, "MAX_WAIT_S", 0.3)
    reader, writer = os.pipe()

    def write_on() -> None:
        with suppress(BrokenPipeError), os.fdopen(writer, "wb", buffering=0) as pipe:
            while True:
                pipe.write(b"{}\n")
                time.sleep(0.03)

    thread = threading.Thread(target=write_on)
    thread.start()
    with closing(LineSource(f"/dev/fd/{reader}")) as lines:
        os.close(reader)
        jobs = (None if line is None else Job(0, 0, EncodedPrompt([1], None), SamplingParams()) for line in lines)
        head, is_whole = command_module._read_head(jobs, lines)
    thread.join()
    assert not is_whole
    assert 1 < len(head) <= 20


def test_a_closed_pipe_of_prompts_ends_the_start(tiny: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(writer)
    run = subprocess.run(
        command("-m", tiny, "--prompt-file", "-", "-o", tmp_path / "out"), cwd=ROOT, stdin=reader, capture_output=True
    )
    os.close(reader)
    assert (run.returncode, run.stderr.count(b"\n")) == (1, 1)
    assert b"holds no prompt" in run.stderr
