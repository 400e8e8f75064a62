"""How many workers fit, and what each reserves."""

import re

import pytest

from jpaged.cluster.ray_options import RayOptions
from jpaged.cluster.worker_plan import Resources, WorkerPlan, worker_plan
from jpaged.config.engine_config import EngineConfig
from jpaged.errors import ConfigError

CPUS: list[Resources] = [{"CPU": 8, "memory": 1e9, "node:10.0.0.1": 1}, {"CPU": 8, "memory": 1e9, "node:10.0.0.2": 1}]
GPUS: list[Resources] = [{"CPU": 8}, {"CPU": 64, "GPU": 8}, {"CPU": 64, "GPU": 4}]
V5E: list[Resources] = [{"CPU": 8, "TPU": 4, "accelerator_type:TPU-V5LITEPOD": 1}]
V7X: list[Resources] = [{"CPU": 8, "TPU": 4, "accelerator_type:TPU-V7X": 1}]


def plan(
    nodes: list[Resources],
    num_workers: int | None = None,
    resources: Resources | None = None,
    tp: int | None = 1,
    device: str = "auto",
) -> WorkerPlan:
    config = EngineConfig(tensor_parallel_size=tp, device=device)
    return worker_plan(RayOptions("auto", num_workers, resources), nodes, config)


@pytest.mark.parametrize(
    ("nodes", "tp", "expected"),
    [
        (CPUS, 1, WorkerPlan(2, {"CPU": 8}, 1)),
        ([{"CPU": 4}, {"CPU": 8}, {"CPU": 0}], 1, WorkerPlan(3, {"CPU": 4}, 2)),
        (GPUS, 1, WorkerPlan(12, {"GPU": 1}, 8)),
        (GPUS, 8, WorkerPlan(1, {"GPU": 8}, 1)),
        (V5E, 1, WorkerPlan(4, {"TPU": 1}, 4)),
        (V5E, 4, WorkerPlan(1, {"TPU": 4}, 1)),
        (V7X, 2, WorkerPlan(4, {"TPU": 1}, 4)),
        (V7X, 4, WorkerPlan(2, {"TPU": 2}, 2)),
    ],
)
def test_a_worker_has_the_devices_of_one_engine_or_a_node(nodes: list[Resources], tp: int, expected: WorkerPlan):
    assert plan(nodes, tp=tp) == expected


def test_a_device_that_is_named_is_what_workers_reserve() -> None:
    assert plan(GPUS, device="cpu") == WorkerPlan(17, {"CPU": 8}, 8)
    with pytest.raises(ConfigError, match=r"^--ray-resources: got \{'GPU': 1\}, which no node has"):
        plan(CPUS, device="gpu")
    with pytest.raises(ConfigError, match=r"^--ray-resources: got \{'TPU': 2\}, which no node has"):
        plan(GPUS, device="tpu", tp=2)


def test_shares_that_are_no_binary_fractions_fill_a_node() -> None:
    assert plan([{"CPU": 7}], resources={"CPU": 0.28}) == WorkerPlan(25, {"CPU": 0.28}, 25)


def test_a_number_of_workers_is_kept_where_there_is_room() -> None:
    assert plan(GPUS, 3) == WorkerPlan(3, {"GPU": 1}, 3)
    assert plan(GPUS, 3).platform == "gpu"
    with pytest.raises(ConfigError, match=r"^data_parallel_size: got 13, allowed: at most 12, each with \{'GPU': 1\}"):
        plan(GPUS, 13)


def test_resources_that_no_node_has_are_refused_with_what_nodes_have() -> None:
    text = "--ray-resources: got {'GPU': 1}, which no node has, allowed: at most CPU 8, memory 1e+09 of one node"
    with pytest.raises(ConfigError, match=re.escape(text)):
        plan(CPUS, resources={"GPU": 1})
    with pytest.raises(ConfigError, match=r"^--ray-resources: got \{'GPU': 16\}"):
        plan(GPUS, tp=16)
