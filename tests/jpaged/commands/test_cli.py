"""A command is one file: its first line makes it known, and only a command that is called is imported."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jpaged import commands
from jpaged.commands.cli import _find_commands, main

HELLO = '''"""`jpaged hello`: greet. More about it."""


def main(argv: list[str]) -> int:
    print("hello", *argv)
    return 7
'''


def test_a_file_is_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    assert main(["hello", "to", "you"]) == 7
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("hello to you\n")
    assert "  tune       find the best tile sizes of the TPU kernels for a shape\n  hello      greet\n" in out


def test_every_module_with_a_main_function_is_a_command() -> None:
    folder = Path(commands.__path__[0])
    with_main = {path.stem for path in folder.rglob("*.py") if re.search(r"^(def )?main\b", path.read_text(), re.M)}
    assert with_main - {"cli"} == {module.rsplit(".", 1)[1] for module, _ in _find_commands().values()} - {"bench"}


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from jpaged.commands.cli import main; main(['--help']); main(['bench', '--help'])\n"
        "assert not {'jax', 'numpy', 'jpaged.commands.generate', 'jpaged.commands.bench'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(commands.__path__[0]).parents[1], timeout=60)
