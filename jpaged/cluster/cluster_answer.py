"""Whether a cluster of Ray answers at an address, told in seconds: Ray itself tries for minutes."""

from __future__ import annotations

import os
import socket
import time

from ..checks import refusal
from ..errors import ConfigError, JpagedError

FLAG = "--ray"
ANSWER_S = 10.0
"""Seconds in which a cluster must answer."""
CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""The call by which the head of a cluster is asked whether it is there."""


def check_answers(address: str, max_s: float = ANSWER_S) -> None:
    """Raise ConfigError unless a cluster answers at HOST:PORT. One that wants a token answers too.

    With TLS, whose keys Ray knows where to find, a connection is enough.
    """
    host, _, port = address.rpartition(":")
    end = time.monotonic() + max_s
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=max_s).close()
    except OSError as error:
        raise _no_cluster(address, error.strerror or str(error)) from error
    if os.environ.get("RAY_USE_TLS") == "1":
        return
    import grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(CHECK_ALIVE)(b"", timeout=max(0.0, end - time.monotonic()))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _no_cluster(address, f"no answer in {max_s:g} s") from error
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                raise _no_cluster(address, "what answers there is no head of Ray") from error


def _no_cluster(address: str, reason: str) -> JpagedError:
    allowed = "the address of a Ray cluster, as `ray start --head` prints it"
    return refusal(FLAG, f"{address} ({reason})", allowed, "start one, or take local", error=ConfigError)
