"""Devices are chosen, never guessed: no silent fall-back to the CPU beside an accelerator."""

from pathlib import Path

import jax
import pytest

from jpaged.sharding import devices, select_devices

if jax.default_backend() != "cpu":
    pytest.skip("these are about a JAX that has a CPU only", allow_module_level=True)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without accelerator: its device files are looked for in a folder."""
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
def test_auto_does_not_pass_over_an_accelerator_that_jax_cannot_use(file: str, name: str, machine: Path) -> None:
    (machine / file).touch()
    with pytest.raises(RuntimeError, match=rf"auto found a {name} .*install jpaged\[.*--device cpu"):
        select_devices("auto")
    assert select_devices("cpu") == jax.devices("cpu"), "asked for, it is given"


@pytest.mark.parametrize(("vendor", "is_tpu"), [("0x1ae0", True), ("0x8086", False)])
def test_a_vfio_device_is_a_tpu_if_its_vendor_is(vendor: str, is_tpu: bool, machine: Path) -> None:
    (machine / "vfio").mkdir()
    (machine / "vfio" / "0").touch()
    (machine / "pci" / "0000:00:04.0").mkdir(parents=True)
    (machine / "pci" / "0000:00:04.0" / "vendor").write_text(vendor + "\n")
    assert devices.visible_accelerators() == (["tpu"] if is_tpu else [])


@pytest.mark.parametrize("kind", ["gpu", "tpu"])
def test_a_kind_that_jax_lacks_is_an_error_with_the_way_out(kind: str) -> None:
    with pytest.raises(RuntimeError, match=rf"device: got {kind}, which JAX .* does not have .*; install jpaged\["):
        select_devices(kind)
