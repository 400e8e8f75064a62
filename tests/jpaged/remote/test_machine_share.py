"""The parts of a machine that core processes get, for machines of which only the files are there."""

import os
from pathlib import Path
from typing import Any

import pytest

from jpaged.config.engine_config import EngineConfig
from jpaged.errors import ConfigError
from jpaged.remote import machine_share
from jpaged.remote.machine_share import WHOLE_MACHINE, machine_shares


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the folder of the files of devices: none are there, nor variables; the machine has 5 processors."""
    monkeypatch.setattr(machine_share, "GPU_FILES", f"{tmp_path}/nvidia[0-9]*")
    monkeypatch.setattr(machine_share, "TPU_FILES", (f"{tmp_path}/accel[0-9]*", f"{tmp_path}/vfio[0-9]*"))
    monkeypatch.setattr(machine_share, "PCI_IDS", f"{tmp_path}/pci*")
    monkeypatch.setattr(machine_share, "free_host_bytes", lambda: 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 5, 6})
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def make(folder: Path, name: str, count: int) -> None:
    for index in range(count):
        (folder / f"{name}{index}").write_text("")


def shares(num_cores: int, **options: Any) -> list[Any]:
    return machine_shares(EngineConfig(data_parallel_size=num_cores, **options))


def test_one_core_has_the_whole_machine():
    assert shares(1) == [WHOLE_MACHINE]


def test_on_a_cpu_processors_and_memory_are_divided():
    found = shares(2)
    assert [one.cpus for one in found] == [(0, 1), (2, 5, 6)]
    assert [one.host_bytes for one in found] == [500, 500]
    assert [one.environment for one in found] == [{}, {}]
    assert [len(one.cpus) for one in shares(5)] == [1] * 5
    with pytest.raises(ConfigError, match=r"^data_parallel_size: got 6, allowed: at most 5: 5 processors are there$"):
        shares(6)


def test_gpus_are_divided_also_those_that_are_named(machine: Path, monkeypatch: pytest.MonkeyPatch):
    make(machine, "nvidia", 4)
    name = "CUDA_VISIBLE_DEVICES"
    assert [one.environment for one in shares(2)] == [{name: "0"}, {name: "1"}]
    assert [one.environment for one in shares(2, tensor_parallel_size=2)] == [{name: "0,1"}, {name: "2,3"}]
    assert [one.cpus for one in shares(4)] == [(0,), (1,), (2,), (5, 6)]
    monkeypatch.setenv(name, "3, MIG-5,1")
    assert [one.environment for one in shares(3)] == [{name: "3"}, {name: "MIG-5"}, {name: "1"}]
    allowed = "at most 1: 3 GPUs are there, 2 for each"
    with pytest.raises(ConfigError, match=f"^data_parallel_size: got 2, allowed: {allowed}$"):
        shares(2, tensor_parallel_size=2)
    assert [one.environment for one in shares(2, device="cpu")] == [{}, {}]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert [one.environment for one in shares(2)] == [{}, {}]


def test_more_cores_than_processors_share_them_all_beside_gpus(machine: Path):
    make(machine, "nvidia", 8)
    assert [one.cpus for one in shares(8)] == [()] * 8


def test_tpu_chips_are_divided_and_few_of_them_have_bounds(machine: Path, monkeypatch: pytest.MonkeyPatch):
    make(machine, "vfio", 8)
    one_chip = {"TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1", "TPU_HOST_BOUNDS": "1,1,1"}
    two_chips = {"TPU_CHIPS_PER_HOST_BOUNDS": "1,2,1", "TPU_HOST_BOUNDS": "1,1,1"}
    assert [one.environment for one in shares(2)] == [{"TPU_VISIBLE_CHIPS": str(chip), **one_chip} for chip in (0, 1)]
    assert shares(2, tensor_parallel_size=2)[1].environment == {"TPU_VISIBLE_CHIPS": "2,3", **two_chips}
    assert shares(2, tensor_parallel_size=4)[1].environment == {"TPU_VISIBLE_CHIPS": "4,5,6,7"}
    with pytest.raises(ConfigError, match="at most 2: 8 TPU chips are there, 4 for each"):
        shares(3, tensor_parallel_size=4)
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "2,3")
    assert shares(2)[1].environment["TPU_VISIBLE_CHIPS"] == "3"


def test_a_chip_of_two_devices_counts_once(machine: Path):
    make(machine, "accel", 4)
    (machine / "pci0").write_text("0x0076\n")
    assert shares(2, tensor_parallel_size=4)[1].environment["TPU_VISIBLE_CHIPS"] == "2,3"
