"""The item about experts of `gpu_check` and `tpu_check`: it tells wrong results apart from rounding."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jpaged.pallas_kernels.layer_ops import LayerOps
from jpaged.pallas_kernels.tpu_ops import TPU_OPS

from .check_scripts import Script


class Unweighted(LayerOps):
    """Adds up results without their weights."""

    def sum_of_experts(self, rows: Any, routing: Any, experts: Any) -> Any:
        return super().sum_of_experts(rows, replace(routing, weights=jnp.full_like(routing.weights, 0.3)), experts)


class Curious(LayerOps):
    """Reads the last expert for every row, though no row has chosen it."""

    def sum_of_experts(self, rows: Any, routing: Any, experts: Any) -> Any:
        return super().sum_of_experts(rows, routing, experts) + 0 * jnp.sum(experts.down.weight[-1]).astype(jnp.float32)


def error(script: Script, ops: LayerOps) -> float:
    backend = SimpleNamespace(layer_ops=ops)
    session = SimpleNamespace(is_tiny=True, seed=7, num_repeats=0, case=None, backend_of=lambda case: backend)
    return script("device_checks.experts_check").error_of(session, "bfloat16")


@pytest.mark.slow
def test_wrong_weights_are_more_than_is_forgiven(script: Script) -> None:
    assert error(script, Unweighted()) > 5 * script("device_checks.experts_check").MOST_ERROR


@pytest.mark.slow
def test_columns_that_pad_experts_on_a_tpu_may_hold_anything(script: Script) -> None:
    assert error(script, TPU_OPS) < script("device_checks.experts_check").MOST_ERROR


@pytest.mark.slow
def test_an_expert_that_no_row_chose_is_found_in_results(script: Script) -> None:
    with pytest.raises(FloatingPointError, match="an expert that no row chose"):
        error(script, Curious())
