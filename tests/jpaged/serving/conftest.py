"""A server of the tiny model that the tests of this folder share, and the same model in this process."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jpaged import Engine
from jpaged.serving.protocols.request_parser import RequestParser

from ..tiny_model import SIZE_FLAGS, SIZES
from .scripted import SIZES as SCRIPTED_SIZES
from .scripted import SavedScripts, Scripted, saved_scripts_server, write_scripted_model
from .served import CORE, Served, serving

# A test of the server is no test of optimized programs.
FLAGS: list[Any] = [*SIZE_FLAGS, "--served-model-name", "tiny", "--enable-admin"]

KEYS = ("first-key", "second-key")
SMALL: dict[str, int] = {
    "body_bytes": 2000, "body_s": 1, "header_bytes": 4000, "headers": 24, "header_s": 1, "keep_alive_s": 1,
    "connections": 20, "prompts": 3, "samples": 2, "stop": 2, "bad_words": 2, "logit_bias": 2, "json_depth": 5,
    "requests_per_key": 4, "request_s": 20, "waiting_tokens": 100, "json_values": 40, "send_s": 1, "silence_s": 1,
}  # fmt: skip


@pytest.fixture(scope="session")
def served(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Give a server without keys; tests leave it idle."""
    log = tmp_path_factory.mktemp("served") / "log"
    with serving(tiny, *FLAGS, log=log) as server:
        yield server


@pytest.fixture(scope="session")
def locked(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Give a server with keys and small limits that listens at both addresses of localhost."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "keys").write_text(f"# keys\n{KEYS[1]}\n")
    limits = ",".join(f"{name}={value}" for name, value in SMALL.items())
    flags = (*FLAGS, "--api-key", KEYS[0], "--api-key-file", folder / "keys", "--limits", limits)
    flags = (*flags, "--root-path", "/llm", "--host", "localhost")
    with serving(tiny, *flags, log=folder / "log", key=KEYS[0]) as server:
        yield server


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """Give a server whose model writes what tests put into its scripts."""
    folder = tmp_path_factory.mktemp("scripted")
    directory, scripts = write_scripted_model(folder / "model"), SavedScripts(folder / "scripts")
    with saved_scripts_server(directory, scripts, core=CORE) as url:
        yield Scripted(url, scripts)


@pytest.fixture(scope="session")
def chat_parser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RequestParser]:
    """Give the parser of such a server, whose template shows tools, calls and thoughts."""
    directory = write_scripted_model(tmp_path_factory.mktemp("chat") / "model")
    with Engine(str(directory), load_format="dummy", **SCRIPTED_SIZES) as engine:
        yield RequestParser(engine.builder, ("scripted",))


@pytest.fixture(scope="session")
def engine(tiny: str) -> Iterator[Engine]:
    """Give the model of the server in this process."""
    with Engine(tiny, **SIZES) as engine:
        yield engine


@pytest.fixture(scope="session")
def parser(engine: Engine) -> RequestParser:
    """Give the server's parser of bodies, which needs no server."""
    return RequestParser(engine.builder, ("tiny",))


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RequestParser]:
    """Give the parser of a model that thinks and calls tools; its context has 4096 tokens."""
    model = write_scripted_model(tmp_path_factory.mktemp("thinker") / "model")
    with Engine(str(model), load_format="dummy", **SCRIPTED_SIZES) as engine:
        yield RequestParser(engine.builder, ("tiny",))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients reach this machine directly, whatever proxies the environment names."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
