"""Clients of both kinds, and where core processes find what makes their engines."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jpaged import Engine
from jpaged.config.engine_config import EngineConfig
from jpaged.intake.request_builder import RequestBuilder
from jpaged.remote.core_client import CoreClient
from jpaged.remote.process_client import ProcessClient
from jpaged.remote.thread_client import ThreadClient

from ..tiny_model import SIZES

OPTIONS: dict[str, Any] = {**SIZES, "limits": {"waiting_requests": 4}}

StartProcess = Callable[..., ProcessClient]


@pytest.fixture(scope="session", autouse=True)
def import_path() -> Iterator[None]:
    """Let core processes find `core_makers`: they search where this process does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield


@pytest.fixture(scope="module")
def start_process(tiny: str) -> Iterator[StartProcess]:
    """Give a function that starts a core process for the tiny model; all are shut down after the module."""
    clients: list[ProcessClient] = []

    def start(maker: str = "", **options: Any) -> ProcessClient:
        named = {"maker": f"core_makers:{maker}"} if maker else {}
        clients.append(ProcessClient(EngineConfig(model=tiny, **OPTIONS), **named, **options))
        return clients[-1]

    yield start
    for client in clients:
        client.shutdown()


@pytest.fixture(scope="module", params=["thread", "process"])
def shared_client(
    request: pytest.FixtureRequest, tiny: str, start_process: StartProcess, shared_executables: None
) -> Iterator[CoreClient]:
    """Give a client of each kind for all tests of a module."""
    if request.param == "process":
        yield start_process()
        return
    client = ThreadClient(Engine(tiny, **OPTIONS), counts_requests=True)
    yield client
    client.shutdown()


@pytest.fixture
def client(shared_client: CoreClient) -> Iterator[CoreClient]:
    """Give a client of each kind, which tests leave awake and idle; one that fails may leave it paused."""
    yield shared_client
    shared_client.resume()


@pytest.fixture(scope="module")
def alone(tiny: str, shared_executables: None) -> Iterator[Engine]:
    """Give an engine of the same model."""
    with Engine(tiny, **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def builder(alone: Engine) -> RequestBuilder:
    return alone.builder
