"""Where a run on Ray goes, checked without Ray."""

import argparse
from importlib import util
from typing import Any

import pytest

from jpaged.cluster import ray_options as module
from jpaged.cluster.ray_options import RayOptions, ray_options
from jpaged.config.engine_config import EngineConfig
from jpaged.errors import ConfigError


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all packages be there, and no cluster be named."""
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize("address", ["auto", "local"])
def test_words_need_no_server(address: str) -> None:
    assert ray_options(address, 3, {"CPU": 0.5}) == RayOptions(address, 3, {"CPU": 0.5})


def test_auto_is_what_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, address in {"": "auto", "local": "local"}.items():
        monkeypatch.setenv("RAY_ADDRESS", name)
        assert ray_options("auto", None, None).address == address
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    with pytest.raises(ConfigError, match=r"^--ray: got 'nowhere', allowed: "):
        ray_options("auto", None, None)


@pytest.mark.parametrize("address", ["", "nowhere", ":6379", "host:", "host:x", "host:0", "host:70000", "ray://host:1"])
def test_other_words_are_refused_with_the_allowed_ones(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^--ray: got .*, allowed: auto .*, local .* or HOST:PORT$"):
        ray_options(address, None, None)


@pytest.mark.parametrize(
    "resources",
    [
        {},
        {"CPU": 0},
        {"CPU": -1},
        {"GPU": "1"},
        {"CPU": True},
        {"CPU": float("inf")},
        {"CPU": float("nan")},
        {"GPU": 1.5},
        {"object_store_memory": 1},
    ],
)
def test_wrong_resources_are_refused(resources: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^--ray-resources: got .*, allowed: "):
        ray_options("local", None, resources)


@pytest.mark.parametrize("package", ["ray", "pyarrow", "grpc", "zmq"])
def test_a_missing_extra_is_told(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == package else util.find_spec("json"))
    with pytest.raises(ConfigError, match=rf"no package {package}, allowed: the extra ray; run: pip install"):
        ray_options("local", None, None)


def test_flags_without_effect_are_refused() -> None:
    from jpaged.commands.generate import _ray_options

    config, alone = EngineConfig(), argparse.Namespace(ray=None, ray_resources=None)
    assert _ray_options(alone, config) is None
    with pytest.raises(ConfigError, match=r"^--ray-resources: has no effect without --ray"):
        _ray_options(argparse.Namespace(ray=None, ray_resources={"CPU": 1}), config)
    with pytest.raises(ConfigError, match=r"^--count-expert-tokens: has no effect with --ray"):
        _ray_options(argparse.Namespace(ray="local", ray_resources=None), EngineConfig(count_expert_tokens=True))
