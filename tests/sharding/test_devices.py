"""Devices are selected by kind; a CPU is never the silent fallback on a machine with an accelerator."""

from pathlib import Path

import jax
import pytest

from jpaged.sharding import devices, select_devices

if jax.default_backend() != "cpu":
    pytest.skip("needs a JAX that has a CPU only", allow_module_level=True)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a machine without accelerator, whose device files are looked for in this folder."""
    monkeypatch.setattr(
        devices, "ACCELERATOR_FILES", {"gpu": f"{tmp_path}/nvidia[0-9]*", "tpu": f"{tmp_path}/accel[0-9]*"}
    )
    monkeypatch.setattr(devices, "VFIO_FILES", f"{tmp_path}/vfio/[0-9]*")
    monkeypatch.setattr(devices, "PCI_VENDOR_FILES", f"{tmp_path}/pci/*/vendor")
    return tmp_path


@pytest.mark.parametrize("kind", ["auto", "cpu"])
def test_a_machine_without_accelerator_runs_on_its_cpu(kind: str, machine: Path) -> None:
    assert select_devices(kind) == jax.devices("cpu")


@pytest.mark.parametrize(("file", "name"), [("nvidia0", "GPU"), ("accel0", "TPU")])
def test_auto_refuses_the_cpu_beside_an_accelerator_that_jax_cannot_use(file: str, name: str, machine: Path) -> None:
    (machine / file).touch()
    with pytest.raises(RuntimeError, match=rf"auto found a {name} .*install jpaged\[.*--device cpu"):
        select_devices("auto")
    assert select_devices("cpu") == jax.devices("cpu"), "a CPU may be asked for by name"


@pytest.mark.parametrize(("vendor", "is_tpu"), [("0x1ae0", True), ("0x8086", False)])
def test_a_vfio_device_counts_as_a_tpu_if_its_vendor_is_google(vendor: str, is_tpu: bool, machine: Path) -> None:
    (machine / "vfio").mkdir()
    (machine / "vfio" / "0").touch()
    (machine / "pci" / "0000:00:04.0").mkdir(parents=True)
    (machine / "pci" / "0000:00:04.0" / "vendor").write_text(vendor + "\n")
    assert devices.visible_accelerators() == (["tpu"] if is_tpu else [])


@pytest.mark.parametrize("kind", ["gpu", "tpu"])
def test_a_kind_that_jax_lacks_is_refused_with_the_extra_to_install(kind: str) -> None:
    with pytest.raises(RuntimeError, match=rf"device: got {kind}, which JAX .* does not have .*; install jpaged\["):
        select_devices(kind)
