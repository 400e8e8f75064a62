"""A command is one file and a line of a table, and only a command that is called is imported."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jpaged import commands
from jpaged.commands.cli import BENCHES, COMMANDS, main


def test_every_module_with_a_main_function_is_a_command() -> None:
    folder = Path(commands.__path__[0])
    with_main = {path.stem for path in folder.rglob("*.py") if re.search(r"^(def )?main\b", path.read_text(), re.M)}
    in_table = {module.rsplit(".", 1)[1] for module in (*COMMANDS.values(), *BENCHES.values())}
    assert with_main - {"cli"} == in_table


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from jpaged.commands.cli import main; main(['--help']); main(['bench', '--help'])\n"
        "assert not {'jax', 'numpy', 'jpaged.commands.generate', 'jpaged.commands.bench'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(commands.__path__[0]).parents[1], timeout=60)


def test_help_of_chat_and_batch_loads_nothing_large() -> None:
    code = (
        "import sys; from contextlib import suppress; from jpaged.commands.cli import main\n"
        "for name in ('chat', 'batch'):\n    with suppress(SystemExit): main([name, '--help'])\n"
        "assert not {'jax', 'numpy', 'tokenizers', 'jinja2', 'ssl', 'jpaged.serving.protocols'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(commands.__path__[0]).parents[1], timeout=60)


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["scheduler"]])
def test_a_bench_that_there_is_not_is_refused_with_those_that_there_are(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *argv]) == 1
    error = capsys.readouterr().err.strip()
    assert error.endswith("allowed: latency, throughput, serve")
    assert "\n" not in error
