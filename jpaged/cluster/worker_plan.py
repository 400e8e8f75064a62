"""How many workers a cluster has room for, and what each reserves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..checks import refusal, shown
from ..config.engine_config import EngineConfig
from ..errors import ConfigError
from .ray_options import RESOURCES_FLAG, RayOptions

Resources = Mapping[str, float]
NODE_MARK = "node:"
"""How resources begin that name a node; they are no amounts."""
TWO_DEVICE_CHIPS = "V7X"
"""Part of the names of TPUs whose chips are two devices each."""


class WorkerPlan(NamedTuple):
    """The workers of a run."""

    num_workers: int
    resources: Resources
    """What Ray reserves for each."""
    max_on_node: int
    """Workers of the run that one node may have, at most."""

    @property
    def platform(self) -> str:
        """Return "gpu", "tpu" or "cpu": what the workers compute on, as far as their resources tell."""
        return next((name.lower() for name in ("GPU", "TPU") if name in self.resources), "cpu")


def worker_plan(options: RayOptions, nodes: Sequence[Resources], config: EngineConfig) -> WorkerPlan:
    """Return the workers of a run on nodes with these resources. Raise ConfigError if there is no room for them.

    `config` has the options of each worker's engine.
    """
    resources = options.resources or _default_resources(nodes, config)
    on_each = [_num_on(node, resources) for node in nodes]
    if not any(on_each):
        names = sorted({name for node in nodes for name in node if not name.startswith(NODE_MARK)})
        most = ", ".join(f"{name} {max(node.get(name, 0) for node in nodes):g}" for name in names)
        got = f"{shown(dict(resources))}, which no node has"
        raise refusal(RESOURCES_FLAG, got, f"at most {most} of one node", error=ConfigError)
    num_workers = options.num_workers or sum(on_each)
    if num_workers > sum(on_each):
        allowed = f"at most {sum(on_each)}, each with {shown(dict(resources))}"
        way_out = f"lower it, or {RESOURCES_FLAG}"
        raise refusal("data_parallel_size", num_workers, allowed, way_out, error=ConfigError)
    return WorkerPlan(num_workers, resources, min(num_workers, max(on_each)))


def _default_resources(nodes: Sequence[Resources], config: EngineConfig) -> Resources:
    """Return the devices of one engine; for engines on CPUs the processors of the smallest node."""
    num_devices = config.tensor_parallel_size or 1
    if config.device == "gpu" or (config.device == "auto" and any(node.get("GPU") for node in nodes)):
        return {"GPU": num_devices}
    if config.device == "tpu" or (config.device == "auto" and any(node.get("TPU") for node in nodes)):
        has_two = any(TWO_DEVICE_CHIPS in name.upper() for node in nodes for name in node)
        return {"TPU": -(-num_devices // (2 if has_two else 1))}
    return {"CPU": min((cpus for node in nodes if (cpus := node.get("CPU", 0))), default=1)}


def _num_on(node: Resources, resources: Resources) -> int:
    """Return how many workers a node has room for: 25 of 0.28 processors on 7, though 7 / 0.28 is 24.999…"""
    return min(int(node.get(name, 0) / amount + 1e-9) for name, amount in resources.items())
