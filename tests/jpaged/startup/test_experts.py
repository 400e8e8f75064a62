"""Experts are spread as the options say, which is refused where it would do nothing, and the start says how."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from flax import nnx

from jpaged import ConfigError, EngineConfig
from jpaged.models.config.experts import ExpertsConfig
from jpaged.models.opening.reading import config_from_hf
from jpaged.models.weights.weights import Weights
from jpaged.pallas_kernels.layer_ops import XLA_OPS
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.pallas_kernels.tpu_ops import TPU_OPS
from jpaged.startup.experts import check_has_mesh, experts_note, with_spread_experts

from ..tiny_model import CONFIG

ASKED = EngineConfig(enable_expert_parallel=True)
DENSE = config_from_hf(CONFIG, Path("config.json"))
SPARSE = replace(
    DENSE,
    experts=ExpertsConfig(num_experts=60, num_chosen=4, width=21, sparse_layers=(True,) * DENSE.num_layers),
)


@dataclass
class Device:
    """What a note reads of a device."""

    platform: str


def weights_of(config):
    return Weights(None, nnx.State({}), "float32", (), config)


def test_whole_experts_are_refused_without_experts_and_on_one_device():
    with pytest.raises(ConfigError, match=r"^enable_expert_parallel: got true for a LlamaForCausalLM, which has no "):
        with_spread_experts(ASKED, DENSE)
    with pytest.raises(ConfigError, match=r"^enable_expert_parallel: got true with 1 device, allowed: false, or 2 dev"):
        check_has_mesh(ASKED, jax.devices()[:1])
    assert with_spread_experts(ASKED, SPARSE).spreads_experts
    assert with_spread_experts(EngineConfig(), SPARSE) == SPARSE
    check_has_mesh(ASKED, [Device("cpu")] * 2)


@pytest.mark.parametrize(
    ("config", "ops", "devices", "words"),
    [
        (SPARSE, NATIVE_OPS, ["cpu"], "products by native code"),
        (SPARSE, TPU_OPS, ["tpu"], "products by ragged_dot"),
        (SPARSE, XLA_OPS, ["gpu"] * 7, "each cut over 7 devices; products by tiles of rows in plain XLA"),
        (
            SPARSE,
            XLA_OPS,
            ["gpu"] * 8,
            "each cut over 8 devices (24 columns for 21); products by tiles of rows in plain XLA",
        ),
        (SPARSE, TPU_OPS, ["tpu"] * 8, "each cut over 8 devices (512 columns for 21); products by ragged_dot"),
        (
            replace(SPARSE, spreads_experts=True),
            XLA_OPS,
            ["gpu"] * 8,
            "8 on each of 8 devices, whole (64 stored for 60); products by tiles of rows in plain XLA",
        ),
    ],
    ids=["native", "ragged", "cut", "padded", "in tiles", "whole"],
)
def test_the_start_says_how_experts_are_spread_and_what_multiplies(config, ops, devices, words):
    layers = DENSE.num_layers
    note = experts_note(weights_of(config), SimpleNamespace(layer_ops=ops), [Device(platform) for platform in devices])
    assert note == f"60 in {layers} of {layers} layers, 4 for each token; {words}"
    assert experts_note(weights_of(DENSE), SimpleNamespace(layer_ops=ops), [Device("cpu")]) == ""
