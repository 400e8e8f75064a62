"""The commands and examples of the README work as they are written there, and the reference has all fields."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from inspect import signature
from pathlib import Path
from textwrap import indent

import pytest

from jpaged import AttentionLayer, EngineConfig, ModelSpec
from jpaged.pallas_kernels.ragged_paged_attention.paged_cache import PagedCache

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def users_environment() -> dict[str, str]:
    """Return the environment of this process without what tests/conftest.py sets in it."""
    return {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}


def commands(label: str) -> str:
    """Return the commands of the block that begins with the comment `# (label)`."""
    return next(block for block in blocks("sh") if block.startswith(f"# ({label})"))


@pytest.mark.slow
def test_the_python_examples_print_an_answer_and_a_stream() -> None:
    first, streaming, *_ = blocks("python")
    streaming = indent(f"print('== stream')\n{streaming}", "    ")  # Into the block of the first one's engine.
    run = subprocess.run(
        [sys.executable, "-c", first + streaming],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env=users_environment(),
    )
    assert run.returncode == 0, run.stderr
    answer, stream = run.stdout.split("== stream\n")
    assert "Paris" in answer
    assert len(stream) > 100


@pytest.mark.slow
def test_the_servers_commands_and_the_clients_lines_give_an_answer() -> None:
    """The server of block (c), the `curl` of (d), and the five lines of OpenAI's package, as they are written there."""
    block, client = commands("c"), next(block for block in blocks("python") if "OpenAI" in block)
    serve = shlex.split(block.splitlines()[1].partition(" && ")[2])
    curl = commands("d").partition("curl ")[2]
    server = subprocess.Popen([sys.executable, *serve[1:]], cwd=ROOT, env=users_environment())
    try:
        waits = "curl --retry 300 --retry-all-errors --retry-delay 1 -sf http://127.0.0.1:8000/health"
        subprocess.run(waits, shell=True, capture_output=True, timeout=400, check=True)
        whole = subprocess.run(f"curl -sS {curl}", shell=True, capture_output=True, text=True, timeout=100, check=True)
        assert "Paris" in json.loads(whole.stdout)["choices"][0]["message"]["content"]
        run = subprocess.run([sys.executable, "-c", client], capture_output=True, text=True, timeout=100, check=True)
        assert len(run.stdout) > 20
    finally:
        server.terminate()
        assert server.wait(40) == 0


def test_ci_runs_the_second_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for part in commands("b").splitlines()[1].split(" && "):
        assert part.removeprefix("python -m pip install ") in script


def test_the_reference_has_every_field_of_a_spec_and_every_argument_of_attend() -> None:
    reference = (ROOT / "docs" / "research_reference.md").read_text()
    arguments = signature(PagedCache.attend).parameters.keys() - {"self"}
    named = [one.name for described in (ModelSpec, AttentionLayer) for one in fields(described)]
    assert [name for name in (*named, *arguments) if f"`{name}`" not in reference] == []
    options = {one.name for one in fields(EngineConfig)}
    listed = re.findall(r"^\| (`.*?) \|", reference.split("## Options that matter")[1].split("## ")[0], re.MULTILINE)
    assert {name for row in listed for name in re.findall(r"`(\w+)", row)} <= options


@pytest.mark.slow
def test_the_first_command_answers_in_a_fresh_environment(tmp_path: Path) -> None:
    source = tmp_path / "clone"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", "build", "*.egg-info", "__pycache__"))
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=300)
    env = {**users_environment(), "PATH": f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}"}
    env.pop("PYTHONPATH", None)
    run = subprocess.run(
        ["bash", "-e", "-c", commands("a")], capture_output=True, text=True, cwd=source, env=env, timeout=1800
    )
    assert run.returncode == 0, run.stderr
    assert "Paris" in run.stdout
    listed = subprocess.run(["python", "-m", "pip", "list"], capture_output=True, text=True, env=env, timeout=120)
    assert "jpaged" in listed.stdout
    assert not re.search(r"^torch ", listed.stdout, re.MULTILINE)
