"""What the flags of a run on Ray say, as far as it can be checked without Ray."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ..checks import is_number, refusal, shown
from ..errors import ConfigError
from .cluster_answer import FLAG, check_answers

RESOURCES_FLAG = "--ray-resources"
AUTO, LOCAL = "auto", "local"
ADDRESSES = f"{AUTO} (the cluster of RAY_ADDRESS or of this machine), {LOCAL} (one for this run) or HOST:PORT"
NOT_RESERVED = "object_store_memory"
"""A resource of nodes that is not reserved for actors."""
PACKAGES = ("ray", "pyarrow", "grpc", "zmq")
"""What workers and their driver need beside the package itself."""


@dataclass(frozen=True)
class RayOptions:
    """Where a run goes, and what its workers are."""

    address: str
    """"auto", "local" or HOST:PORT."""
    num_workers: int | None
    """None: as many as the cluster has room for."""
    resources: Mapping[str, float] | None
    """What Ray reserves for a worker, by Ray's names; None: what `worker_plan` takes."""


def ray_options(address: str, num_workers: int | None, resources: Mapping[str, Any] | None) -> RayOptions:
    """Return checked options. Raise ConfigError for wrong ones, and if a package is missing or no cluster answers."""
    if address == AUTO:
        address = os.environ.get("RAY_ADDRESS") or AUTO
    if address not in (AUTO, LOCAL):
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise refusal(FLAG, shown(address), ADDRESSES, error=ConfigError)
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        way_out = "run: pip install 'jpaged[ray]'"
        raise refusal(FLAG, f"{address} and no package {missing[0]}", "the extra ray", way_out, error=ConfigError)
    for name, amount in (resources or {}).items():
        if name == NOT_RESERVED:
            allowed = "CPU, GPU, memory and other resources of nodes, which Ray reserves for an actor"
            raise refusal(RESOURCES_FLAG, name, allowed, error=ConfigError)
        if not (is_number(amount) and 0 < amount < math.inf):
            allowed = 'numbers above 0, such as {"CPU": 0.5}'
            raise refusal(RESOURCES_FLAG, f"{shown(amount)} for {shown(name)}", allowed, error=ConfigError)
        if name == "GPU" and amount > 1 and amount % 1:
            allowed = "a part of one, or whole ones"
            raise refusal(RESOURCES_FLAG, f"{shown(amount)} for 'GPU'", allowed, error=ConfigError)
    if resources == {}:
        raise refusal(RESOURCES_FLAG, "none", 'at least one, such as {"GPU": 1}', error=ConfigError)
    if address not in (AUTO, LOCAL):
        check_answers(address)
    return RayOptions(address, num_workers, resources)
