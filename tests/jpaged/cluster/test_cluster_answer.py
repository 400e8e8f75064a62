"""What is no cluster of Ray is told in time, whatever answers at its address."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from jpaged.cluster.cluster_answer import CHECK_ALIVE, check_answers
from jpaged.errors import ConfigError

SHORT_S = 0.5
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a server of HTTP/2 begins with."""


@contextmanager
def server(answer: bytes) -> Iterator[str]:
    """Give the address of a server that answers the first message of each connection so, and nothing later."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connections = []
            while True:
                try:
                    connection, _ = listener.accept()
                    connections.append(connection)
                    connection.recv(1000)
                    connection.sendall(answer)
                except OSError:
                    if listener.fileno() < 0:
                        return

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def rpc_server(method: str, status: str = "OK") -> Iterator[str]:
    """Give the address of a server of gRPC that has one method, which ends in this status."""
    grpc = pytest.importorskip("grpc")

    def answer(request: bytes, context: Any) -> bytes:
        if status != "OK":
            context.abort(grpc.StatusCode[status], "no")
        return b""

    service, name = method.removeprefix("/").split("/")
    handler = grpc.unary_unary_rpc_method_handler(answer)
    started = grpc.server(ThreadPoolExecutor(1))
    started.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {name: handler})])
    port = started.add_insecure_port("127.0.0.1:0")
    started.start()
    yield f"127.0.0.1:{port}"
    started.stop(None)


@pytest.mark.parametrize("status", ["OK", "UNAUTHENTICATED"])
def test_a_head_of_ray_answers_also_without_a_token(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with rpc_server(CHECK_ALIVE, status) as address:
        check_answers(address)


def test_an_address_where_nothing_listens_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ConfigError, match=r"^--ray: got 127\.0\.0\.1:\d+ \(Connection refused\), allowed: "):
        check_answers(address)


@pytest.mark.parametrize("answer", [b"", SETTINGS], ids=["silent", "silent behind HTTP/2"])
def test_what_does_not_answer_is_refused_in_time(answer: bytes) -> None:
    pytest.importorskip("grpc")
    with (
        server(answer) as address,
        pytest.raises(ConfigError, match=r"^--ray: got .* \(no answer in 0\.5 s\), allowed"),
    ):
        check_answers(address, SHORT_S)


def test_what_is_no_head_of_ray_is_refused() -> None:
    with rpc_server("/other.Service/Call") as address, pytest.raises(ConfigError, match="is no head of Ray"):
        check_answers(address)
    with server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address, pytest.raises(ConfigError, match="no head of Ray"):
        check_answers(address)


def test_with_tls_a_connection_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with server(b"") as address:
        check_answers(address)
