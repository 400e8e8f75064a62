"""Logical axes map to mesh axes; only declared axes are split."""

import jax
import pytest
from jax.sharding import PartitionSpec

from jpaged.sharding import DATA_AXIS, TENSOR_AXIS, device_mesh, replicated, sharding_of


@pytest.mark.parametrize("axis", ["vocab", "heads", "kv_heads", "mlp", "expert"])
def test_wide_axes_are_split_over_the_tensor_axis(axis: str) -> None:
    mesh = device_mesh(jax.devices())
    assert sharding_of(mesh, ("embed", axis)).spec == PartitionSpec(None, TENSOR_AXIS)
    assert sharding_of(mesh, (axis, None)).spec == PartitionSpec(TENSOR_AXIS, None)


def test_the_hidden_axis_and_unnamed_ones_stay_whole() -> None:
    mesh = device_mesh(jax.devices())
    assert sharding_of(mesh, ("embed",)).spec == PartitionSpec(None)
    assert replicated(mesh).is_fully_replicated


def test_an_undeclared_axis_is_an_error() -> None:
    with pytest.raises(KeyError, match="sequence"):
        sharding_of(device_mesh(jax.devices()), ("sequence", "embed"))


def test_two_axes_of_an_array_on_one_axis_of_the_mesh_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"got \('expert', 'mlp'\), wanted at most one that is split over 'tensor'"):
        sharding_of(device_mesh(jax.devices()), ("expert", "mlp"))


def test_the_mesh_holds_exactly_the_given_devices() -> None:
    devices = jax.devices()[:1]
    mesh = device_mesh(devices)
    assert dict(mesh.shape) == {DATA_AXIS: 1, TENSOR_AXIS: 1}
    assert list(mesh.devices.flat) == devices
