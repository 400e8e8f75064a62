"""A trainer's rules say which axes of arrays are split, as in Flax."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jpaged.sharding import AxisTable, outside_mesh

RULES = {"heads": "tp", "mlp": ("fsdp", "tp"), "rows": "tp", "embed": "tp", "batch": "dp"}


def mesh_of(*axes: str) -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:1]).reshape((1,) * len(axes)), axes)


@pytest.mark.parametrize(
    ("mesh", "rules", "split", "whole"),
    [
        (None, None, ["heads", "kv_heads", "mlp", "vocab", "expert", "tensor"], ["embed", "data"]),
        (mesh_of("any"), None, ["heads", "vocab", "any"], ["embed"]),
        (mesh_of("fsdp", "tensor"), None, ["heads", "tensor"], ["embed", "fsdp"]),
        # A name of the caller's own counts, one without a rule is whole, and so is embed, whatever its rule.
        (mesh_of("dp", "fsdp", "tp"), RULES, ["heads", "mlp", "rows", "fsdp", "tp"], ["vocab", "embed", "batch", "dp"]),
        (mesh_of("dp", "fsdp"), {"embed": "fsdp", "rows": "fsdp"}, [], ["rows", "heads", "fsdp"]),
    ],
)
def test_axes_are_split_that_rules_give_to_the_axes_for_tensors(mesh, rules, split, whole) -> None:
    table = AxisTable.of(mesh, rules)
    assert {name: table.is_split(name) for name in (*split, *whole)} == {
        name: name in split for name in (*split, *whole)
    }
    assert set(table.names) >= {*split, *whole}


def test_outside_of_a_mesh_arrays_are_not_placed_on_it() -> None:
    mesh = jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")[:1])
    with jax.set_mesh(mesh):
        with outside_mesh():
            assert jax.sharding.get_mesh().empty
        assert jax.sharding.get_mesh() == mesh
