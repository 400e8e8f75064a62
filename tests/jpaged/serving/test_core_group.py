"""A server of two core processes: one's responses; one that dies is started again, and the other serves meanwhile."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from .conftest import FLAGS
from .served import Served, core_pids, read_all, serving, wait_until
from .test_lifecycle import body, send

REPLICAS = [*FLAGS, "--data-parallel-size", 2, "--core-restarts", 1]


@pytest.fixture(scope="module")
def group(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Give a server of two cores, each of which can be started again once; the last test ends it."""
    with serving(tiny, *REPLICAS, log=tmp_path_factory.mktemp("group") / "log") as server:
        yield server


def statuses(server: Served) -> list[str]:
    cores = server.request("/health")[2]["cores"]
    assert [core["engine"] for core in cores] == [0, 1]
    return [core["status"] for core in cores]


def running(server: Served, name: str = "requests_waiting") -> dict[str, float]:
    """Return a number of requests of each core."""
    families = text_string_to_metric_families(server.request("/metrics")[2].decode())
    return {
        sample.labels["engine"]: sample.value
        for family in families if family.name == f"jpaged:num_{name}" for sample in family.samples
    }  # fmt: skip


def test_responses_are_those_of_one_core_and_both_compute(group: Served, served: Served):
    fields: dict[str, Any] = body(max_tokens=20, n=2, logprobs=2)
    group.request("/pause", {})
    connections = [send(group, {**fields, "prompt": f"{index}"}) for index in range(4)]
    wait_until(lambda: running(group) == {"0": 2, "1": 2}, 20)
    group.request("/resume", {})
    for index, connection in enumerate(connections):
        expected = served.request("/v1/completions", {**fields, "prompt": f"{index}"})[2]
        found = json.loads(read_all(connection).partition(b"\r\n\r\n")[2])
        assert found["choices"] == expected["choices"]
    assert group.request("/health")[0] == 200
    assert statuses(group) == ["ok", "ok"]


def test_the_owner_reaches_both(group: Served):
    assert group.request("/sleep?level=1", {})[0] == 200
    assert statuses(group) == ["sleeping", "sleeping"]
    assert group.request("/v1/completions", body())[0] == 503
    assert group.request("/wake_up", {})[0] == 200
    assert group.request("/v1/completions", body(max_tokens=2))[0] == 200


def kill_under_streams(server: Served, core: int) -> list[bytes]:
    """Kill a core while four streams wait, two in each core if there are two; return what the streams have got."""
    server.request("/pause", {})
    connections = [send(server, body(stream=True, max_tokens=5, prompt=f"{index}")) for index in range(4)]
    wait_until(lambda: sum(running(server).values()) == 4, 20)
    os.kill(core, signal.SIGKILL)
    wait_until(lambda: statuses(server) != ["ok", "ok"], 20)
    server.request("/resume", {})
    return [read_all(connection) for connection in connections]


def test_cores_that_die_are_started_again_until_none_is_left(group: Served):
    first, second = core_pids(group)
    group.request("/v1/completions", body(max_tokens=2))
    streams = kill_under_streams(group, second)
    assert sum(b"[DONE]" in stream for stream in streams) == 2
    assert sum(b'"type":"ServiceUnavailableError"' in stream for stream in streams) == 2
    status, _, health = group.request("/health")
    assert (status, health["status"], statuses(group)[0]) == (200, "ok", "ok")
    assert group.request("/v1/completions", body(max_tokens=2))[0] == 200, "the other one serves"
    wait_until(lambda: statuses(group) == ["ok", "ok"], 60)
    (third,) = set(core_pids(group)).difference((first, second))
    kill_under_streams(group, third)
    wait_until(lambda: statuses(group) == ["ok", "failed"], 20)
    assert group.request("/health")[0] == 200
    assert group.request("/v1/completions", body(max_tokens=2))[0] == 200
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: statuses(group) == ["starting", "failed"], 20)
    status, headers, health = group.request("/health")
    assert (status, health["status"], headers["retry-after"]) == (503, "restarting", "1")
    status, headers, _ = group.request("/v1/completions", body())
    assert (status, headers["retry-after"]) == (503, "10")
    wait_until(lambda: group.request("/health")[0] == 200, 60)
    assert group.request("/v1/completions", body(max_tokens=2))[0] == 200
    (last,) = core_pids(group)
    os.kill(last, signal.SIGTERM)  # Service managers send it to all processes: it means nothing to a core.
    os.kill(last, signal.SIGKILL)
    assert group.process.wait(10) == 1
    killed = "the core process was ended by SIGKILL"
    text = group.log.read_text()
    assert text.splitlines()[-1] == f"error: engine 0: {killed}; engine 1: {killed}"
    assert "Traceback" not in text
    assert core_pids(group) == []
