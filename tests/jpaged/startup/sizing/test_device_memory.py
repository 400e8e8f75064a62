"""A command lets JAX take nearly all of a GPU's memory; an engine in somebody's program says what JAX leaves unused."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from jpaged.commands import cli, generate
from jpaged.startup.sizing.device_memory import SETTINGS, unreserved_memory_note

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.mark.parametrize("main", [cli.main, generate.main], ids=["jpaged", "python -m jpaged.generate"])
def test_a_command_sets_the_share_of_memory_unless_its_user_has(main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.setenv(name, "")  # So that the test's end removes what the command sets.
        monkeypatch.delenv(name)
    with pytest.raises(SystemExit):
        main(["generate", "--help"] if main is cli.main else ["--help"])
    assert os.environ[FRACTION] == "0.95"
    for name, value in ((FRACTION, "0.5"), ("XLA_PYTHON_CLIENT_PREALLOCATE", "false")):
        monkeypatch.delenv(FRACTION, raising=False)
        monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit):
            main(["generate", "--help"] if main is cli.main else ["--help"])
        assert os.environ.get(FRACTION) == (value if name == FRACTION else None)


def test_an_engine_says_what_jax_leaves_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 60e9})
    monkeypatch.delenv(FRACTION, raising=False)
    assert unreserved_memory_note(gpu) == (
        f"; JAX leaves 20 GB of the GPU unused: set {FRACTION}=0.95 before JAX starts to use them"
    )
    monkeypatch.setenv(FRACTION, "0.95")
    assert unreserved_memory_note(gpu) == ""
    assert unreserved_memory_note(SimpleNamespace(platform="cpu")) == ""  # type: ignore[arg-type]
