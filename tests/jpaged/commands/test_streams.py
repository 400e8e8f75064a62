"""Standard streams that are closed, that end, or that know few characters; and interrupts at any time."""

import io
import itertools
import json
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from jpaged import Engine, SamplingParams
from jpaged.commands.generate import main

from ..tiny_model import SIZE_FLAGS, SIZES
from .command_line import ROOT, command, records, without_metrics

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")
FLAGS = [*SIZE_FLAGS, "-n", "3", "--ignore-eos"]
CLOSED = [streams for size in (1, 2, 3) for streams in itertools.combinations(range(3), size)]


@pytest.mark.parametrize(
    "closed", [pytest.param(one, marks=[pytest.mark.slow] if one != (0, 1, 2) else []) for one in CLOSED], ids=str
)
def test_results_reach_their_file_whichever_streams_are_closed(
    closed: tuple[int, ...], tiny: str, tmp_path: Path
) -> None:
    words = " ".join(f"{descriptor}>&-" for descriptor in closed).replace("0>&-", "0<&-")
    shell = ["sh", "-c", f'exec "$@" {words}', "sh", *command("-m", tiny, *FLAGS, "-o", tmp_path / "out", "a", "b")]
    assert subprocess.run(shell, cwd=ROOT, capture_output=True, timeout=60).returncode == 0
    assert [record["id"] for record in records(tmp_path / "out")] == [0, 1]
    assert [len(record["outputs"][0]["token_ids"]) for record in records(tmp_path / "out")] == [3, 3]


@pytest.mark.parametrize("target", [[], ["--json"]], ids=["text", "json"])
def test_a_closed_stdout_is_refused_where_results_would_be_lost(target: list[str], tiny: str) -> None:
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *command("-m", tiny, *FLAGS, *target, "a")]
    run = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert run.stderr == "error: stdout: got a closed one, allowed: an open one; give --output F instead\n"


def test_a_pipe_as_output_is_refused_before_anything_is_loaded(tiny: str) -> None:
    run = subprocess.run(
        command("-m", tiny, *FLAGS, "-o", "/dev/stdout", "a"), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stdout) == (1, "")
    (error,) = run.stderr.splitlines()
    assert error.startswith(
        "error: --output: /dev/stdout is no regular file that can be written; give another name, or"
    )


def printed(encoding: str, *args: Any) -> str:
    """Return what the command writes to a stdout of this encoding."""
    written = io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(written, encoding=encoding)) as out, redirect_stderr(io.StringIO()):
        assert main([str(arg) for arg in args]) == 0
        out.flush()
        return written.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-16", "latin-1", "utf-8-sig", "cp500"])
def test_lines_are_json_and_texts_are_whole_in_every_encoding(encoding: str, tiny: str) -> None:
    args = ["-m", tiny, *FLAGS, "--seed", 5, "Zoë\u2028 日本 \U0001f600 \\x"]
    wanted, found = (json.loads(printed(name, *args, "--json")) for name in ("utf-8", encoding))
    assert found["prompt"] == wanted["prompt"]
    assert found["outputs"] == wanted["outputs"]
    text = wanted["outputs"][0]["text"]
    assert printed(encoding, *args).rstrip("\n") == text.encode(encoding, "backslashreplace").decode(encoding).rstrip(
        "\n"
    )


@pytest.mark.parametrize("stderr", [None, "closed"])
def test_engines_work_without_stderr(stderr: str | None, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    with Engine(tiny, **SIZES) as engine, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr and stream)
        assert len(engine.generate(["a", "b"], SamplingParams(max_tokens=2))) == 2


DROPPED = """
import gc, signal, sys, time
from jpaged.commands.process import run_command
signal.signal(signal.SIGINT, signal.default_int_handler)  # A test run in the background may ignore it.
def collect(phase, info):
    if phase == "start" and not done:
        done.append(1)
        signal.raise_signal(signal.SIGINT)
done = []
def run(argv):
    gc.callbacks.append(collect)
    gc.collect()
    time.sleep(5)
    return 0
sys.exit(run_command(run, []))
"""


def test_an_interrupt_that_python_drops_ends_the_command() -> None:
    run = subprocess.run([sys.executable, "-c", DROPPED], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (130, "interrupted\n")


def interrupted(after_s: float, args: list[Any]) -> tuple[int, str]:
    """Interrupt a process after so many seconds; return its exit status and the end of its stderr."""
    process = subprocess.Popen(command(*args), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    return process.returncode, said


NUM_TRIES = 120
"""Interrupts of one run, each at another time."""


@pytest.mark.slow
def test_an_interrupt_at_any_time_of_a_run_ends_it_in_one_line_and_loses_nothing(tiny: str, tmp_path: Path) -> None:
    """Before Python runs the command, in the first tenth of a short run, the interpreter itself ends."""
    prompts, path = tmp_path / "p.txt", tmp_path / "out.jsonl"
    prompts.write_text("".join(f"line {number}\n" for number in range(40)))
    flags = [*SIZE_FLAGS, "-n", 30, "--ignore-eos", "--num-decode-steps", 1, "--max-num-seqs", 4, "--seed", 3]
    args = ["-m", tiny, *flags, "--prompt-file", prompts, "-o", path]
    start = time.monotonic()
    assert subprocess.run(command(*args), cwd=ROOT, capture_output=True).returncode == 0
    whole, took_s = without_metrics(path), time.monotonic() - start
    for number in range(NUM_TRIES):
        path.unlink(missing_ok=True)
        status, said = interrupted(took_s * (number + 0.5) / NUM_TRIES, args)
        if status == 0:
            assert without_metrics(path) == whole
        elif status == 130:
            assert said.splitlines()[-1] == "interrupted"
            assert "Traceback" not in said
        else:
            assert number < NUM_TRIES / 10, said
        assert all(record in whole for record in (without_metrics(path) if path.exists() else []))
