"""The example of Ray Serve by OpenAI's own client: replicas come, go and are killed.

These tests need the extra `ray`, which CI does not have: `scripts/release_check.sh ray` runs them.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..tiny_model import SIZES
from .ray_cluster import EXAMPLES, NEEDS_RAY, Cluster, wait_until

openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.slow, NEEDS_RAY]

NUM_CLIENTS, NUM_TOKENS = 6, 40
END_S = 5.0
"""Seconds in which the streams of a replica end that was killed."""


class Application:
    """The example with the tiny model, and its address."""

    def __init__(self, cluster: Cluster, model: Path, port: int):
        import ray
        from ray import serve

        ray.init(cluster.address, logging_level="ERROR")
        self.url = f"http://127.0.0.1:{port}/v1"
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        self.settings = yaml.safe_load((EXAMPLES / "ray_serve.yaml").read_text())["applications"][0]
        self.arguments = {"model": str(model), "model_name": "tiny", "options": SIZES}
        self.scale(1)

    def scale(self, num_replicas: int) -> None:
        """Have so many replicas; return once they serve."""
        import ray_serve
        from ray import serve

        options = {"num_replicas": num_replicas, "ray_actor_options": {"num_cpus": 0.5}}
        deployment = ray_serve.Server.options(**options)
        application = deployment.bind(self.arguments["model"], "tiny", SIZES)
        serve.run(application, name=self.settings["name"], route_prefix=self.settings["route_prefix"])

    def client(self) -> Any:
        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60)

    def stream(self, client: Any, num_tokens: int = NUM_TOKENS) -> Any:
        return client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=num_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )


@pytest.fixture(scope="module")
def application(cluster: Cluster, model: Path) -> Iterator[Application]:
    import ray
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield Application(cluster, model, port)
        serve.shutdown()
        ray.shutdown()


def check_whole(stream: Any, num_tokens: int = NUM_TOKENS) -> None:
    events = list(stream)
    assert events[-1].choices[0].finish_reason == "length"


def test_the_file_of_the_example_builds_it(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(yaml.safe_load((EXAMPLES / "ray_serve.yaml").read_text()))
    (application,) = schema.applications
    import ray_serve

    assert application.import_path == "ray_serve:build"
    built = ray_serve.build(application.args)
    assert [one.name for one in application.deployments] == [built._bound_deployment.name]


def test_a_response_has_one_id_the_clients_own(application: Application) -> None:
    client = application.client()
    response = client.completions.with_raw_response.create(
        model="tiny", prompt="Hi", max_tokens=2, extra_headers={"X-Request-ID": "mine"}
    )
    assert response.headers.get_list("x-request-id") == ["mine"]
    response = client.models.with_raw_response.list()
    assert len(response.headers.get_list("x-request-id")) == 1
    assert [one.id for one in response.parse().data] == ["tiny"]


@contextmanager
def clients(application: Application) -> Iterator[list[Future[int]]]:
    """Let clients stream one answer after the other; their futures tell how many were whole."""
    is_over = threading.Event()

    def run() -> int:
        client, num_whole = application.client(), 0
        while not is_over.is_set():
            check_whole(application.stream(client))
            num_whole += 1
        return num_whole

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        futures = [pool.submit(run) for _ in range(NUM_CLIENTS)]
        yield futures
        is_over.set()


def test_replicas_come_and_go_and_lose_nothing(application: Application, cluster: Cluster) -> None:
    with clients(application) as futures:
        application.scale(2)
        wait_until(lambda: len(cluster.cores()) == 2)
        application.scale(1)
        wait_until(lambda: len(cluster.cores()) == 1)
    assert all(future.result() for future in futures)


def is_cut(stream: Any) -> bool:
    """Return whether a stream ends without the end of its answer."""
    events: list[Any] = []
    with suppress(Exception):  # Of the client, or of the library by which it reads.
        events.extend(stream)
    return not any(choice.finish_reason for event in events for choice in event.choices)


@pytest.mark.parametrize("killed", ["workers", "cores"])
def test_the_streams_of_a_killed_replica_end_and_others_follow(
    killed: str, application: Application, cluster: Cluster
) -> None:
    wait_until(lambda: len(cluster.cores()) == 1)
    client = application.client()
    streams = [application.stream(client, 100) for _ in range(NUM_CLIENTS)]
    for stream in streams:
        next(stream)
    (pid,) = getattr(cluster, killed)()
    os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()
    assert any([is_cut(stream) for stream in streams])
    assert time.monotonic() - killed_s < END_S

    def is_served() -> bool:
        try:
            check_whole(application.stream(client))
        except openai.APIError:
            return False
        return True

    wait_until(is_served)
