"""Weights as TPUs store them, with columns that fill whole tiles: names, shapes and values are those of the model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jpaged.models.families.table import family_class
from jpaged.models.formats.tree_checkpoint import TreeCheckpoint
from jpaged.models.layers import WeightMaker
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.opening.reading import config_from_hf
from jpaged.models.weights.at_load import QuantizedCheckpoint
from jpaged.models.weights.coded import stored_formats
from jpaged.models.weights.dummy import dummy_weights
from jpaged.models.weights.live_weights import LiveWeights
from jpaged.models.weights.loading import abstract_weights, load_weights
from jpaged.models.weights.saving import save_checkpoint
from jpaged.models.weights.weights import Weights
from jpaged.pallas_kernels.layer_ops import XLA_OPS, LayerOps
from jpaged.pallas_kernels.tpu_ops import TPU_OPS
from jpaged.sharding import device_mesh

from ...expert_models import of_all_layers
from .processes import run_over_devices
from .test_code_arrays import logits_of
from .test_live_experts import check_equal
from .test_live_weights import GOLDEN, MESH, compiled, tensors_of

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("num_devices", "is_by_expert"), [(1, False), (8, False), (8, True)])
def test_tables_and_experts_of_gpt_oss_fill_whole_tiles_on_each_device(num_devices: int, is_by_expert: bool) -> None:
    """Its width of 2,880 is 22.5 tiles; of the 5,760 gates and ups of an expert, 8 devices have 5.6 tiles each."""
    content = json.loads((ROOT / "tests" / "public_configs" / "openai__gpt-oss-120b.json").read_text())["config"]
    config = config_from_hf({**content, "num_hidden_layers": 1, "layer_types": ["full_attention"]}, Path("config.json"))

    def new(shape: tuple[int, ...], axes: Any, fill: float | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "bfloat16")

    make = WeightMaker(new, num_devices, "bfloat16", TPU_OPS, mesh=MESH)
    model = family_class(config.architecture).decoder_class()(replace(config, spreads_experts=is_by_expert), make=make)
    experts = model.layers[0].mlp.experts
    inner = 2880 if num_devices == 1 or is_by_expert else 8 * 384
    assert model.embed.weight.shape == (201088, 2944)
    assert experts.gate_up_proj.weight.shape == (128, 2880, 2 * inner)
    assert experts.down_proj.weight.shape == (128, inner, 2944)
    assert experts.down_proj.bias.shape == (128, 2880)


def weights_of(name: str, source: str, ops: LayerOps, num_devices: int = 1, *, by_expert: bool = False) -> Weights:
    """Return a golden model's weights: as they are, quantized as they are loaded, or random ones."""
    config, _ = open_checkpoint(GOLDEN / name)
    config, checkpoint = replace(config, spreads_experts=by_expert), TreeCheckpoint(tensors_of(name))
    if source.startswith("int"):
        checkpoint = QuantizedCheckpoint(checkpoint, source)
    mesh = device_mesh(jax.devices()[:num_devices])
    abstract = abstract_weights(config, "float32", mesh, ops, stored_formats(checkpoint))
    return dummy_weights(abstract) if source == "random" else load_weights(abstract, config, checkpoint)


def check_saved_as_on_one_device(weights: Weights, name: str, source: str, directory: Path) -> None:
    """Check that weights are saved as plain XLA's are on one device."""
    saved = []
    directory.mkdir(exist_ok=True)
    for each in (weights, weights_of(name, source, XLA_OPS)):
        path = directory / str(len(saved))
        save_checkpoint(each, path, format="safetensors")
        saved.append(load_file(path / "model.safetensors"))
    assert saved[0].keys() == saved[1].keys()
    for key, values in saved[1].items():
        np.testing.assert_array_equal(saved[0][key], values, err_msg=key)


def check_live(weights: Weights, name: str) -> None:
    """Check that the tensors of a golden model become its weights in a running engine."""
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), weights.state
    )
    live = LiveWeights(replace(weights, state=shapes), jax.tree.leaves(shapes)[0].sharding.mesh)
    check_equal(live.weights(live.check(of_all_layers(tensors_of(name))), compiled(live)), weights)


FAST = ("llama_tied", "files"), ("llama_tied", "int4"), ("llama_tied", "random")


@pytest.mark.parametrize(
    ("name", "source"),
    [
        pytest.param(name, source, marks=[] if (name, source) in FAST else pytest.mark.slow)
        for name in ("llama_tied", "gpt2", "gpt_oss")
        for source in ("files", "random", "int8", "int4")
    ],
)
def test_padding_changes_no_logit_and_shows_in_no_tensor(name: str, source: str, tmp_path: Path) -> None:
    """A table that is tied to the head, one of positions, and experts; scales are of whole rows, or of groups."""
    weights, plain = (weights_of(name, source, ops) for ops in (TPU_OPS, XLA_OPS))
    assert weights.size_bytes > plain.size_bytes
    logits = logits_of(plain)
    assert np.abs(logits_of(weights) - logits).max() < 1e-5 * np.abs(logits).max()
    check_saved_as_on_one_device(weights, name, source, tmp_path)


OVER_DEVICES = """
import json, sys
from pathlib import Path
import numpy as np
from jpaged.pallas_kernels.layer_ops import XLA_OPS
from tests.models.weights.test_tpu_weights import TPU_OPS, check_live, check_saved_as_on_one_device
from tests.models.weights.test_tpu_weights import logits_of, weights_of
errors, models = [], (("llama_tied", "files", 8), ("gpt_oss", "files", 8), ("gpt_oss", "int4", 2))
for name, source, num_devices in models:
    logits = logits_of(weights_of(name, source, XLA_OPS))
    for by_expert in (False, True) if name == "gpt_oss" else (False,):
        weights = weights_of(name, source, TPU_OPS, num_devices, by_expert=by_expert)
        errors.append(float(np.abs(logits_of(weights) - logits).max() / np.abs(logits).max()))
        check_saved_as_on_one_device(weights, name, source, Path(sys.argv[1]) / str(len(errors)))
        check_live(weights, name)
print(json.dumps(errors))
"""


@pytest.mark.slow
def test_padding_changes_no_logit_over_several_devices(tmp_path: Path) -> None:
    errors = json.loads(run_over_devices(8, OVER_DEVICES, str(tmp_path)).splitlines()[-1])
    assert len(errors) == 5
    assert max(errors) < 1e-5, errors
