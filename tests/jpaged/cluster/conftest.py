"""A cluster for all tests, and a model."""

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..tiny_model import write_tiny_model
from .ray_cluster import Cluster


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Start it, and set its token. Ray reads that when it is first imported, so tests import Ray after this."""
    assert "ray" not in sys.modules
    # A short path: Ray has sockets in it.
    started = Cluster(Path(os.environ.get("RAY_TMPDIR", "/tmp")) / f"jpaged-{secrets.token_hex(4)}")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in started.token_variables.items():
            patch.setenv(name, value)
        yield started
    started.stop()
