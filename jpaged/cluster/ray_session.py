"""This process as a driver of Ray: it joins a cluster, or starts one for itself, and leaves it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from tempfile import TemporaryFile
from typing import IO

from ..checks import one_line, refusal
from ..errors import ConfigError
from .cluster_answer import FLAG
from .ray_options import LOCAL

ENVIRONMENT = {
    "RAY_NUM_REDIS_GET_RETRIES": "3",  # Tries, of a second each at a cluster that refuses the driver; by default 20.
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Variables that Ray reads when it is imported, where the caller has not set them."""
REFUSED_TOKEN = b"InvalidAuthToken"
"""What Ray's native code writes where a cluster refuses a token. Its exception says nothing of it."""


@contextmanager
def ray_session(address: str) -> Iterator[None]:
    """Be a driver of the cluster at an address of `RayOptions` during a `with`.

    What Ray prints goes to stderr. Raise ConfigError if there is no cluster, or if it does not let this process in.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with redirect_stdout(sys.stderr):
        import ray

        try:
            _join(address)
            yield
        finally:
            ray.shutdown()


def _join(address: str) -> None:
    """Join a cluster, or start one."""
    import ray.data
    from ray.exceptions import AuthenticationError, RayError

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # Lost tasks are computed again, and told of by us.
    options = {"include_dashboard": False} if address == LOCAL else {}
    with TemporaryFile() as said:
        try:
            with _stderr_to(said):
                ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **options)
        except (RayError, ConnectionError, RuntimeError, ValueError, SystemExit) as error:
            said.seek(0)
            if isinstance(error, AuthenticationError) or REFUSED_TOKEN in said.read():
                got, allowed = f"{address}, which refuses this token or wants one", "the token of the cluster"
                way_out = "set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file with it"
            else:
                got = f"{address} ({type(error).__name__}: {one_line(error)})"
                allowed = "a cluster of the same versions of Ray and Python"
                way_out = "start one by `ray start --head`, or take local"
            raise refusal(FLAG, got, allowed, way_out, error=ConfigError) from error


@contextmanager
def _stderr_to(file: IO[bytes]) -> Iterator[None]:
    """Let what native code writes to stderr go to a file during a `with`. The stderr of Python is the same one."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
