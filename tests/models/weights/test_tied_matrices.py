"""A model whose config ties its matrices has one or two of them by the same rules, whatever its weights come in."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint
import pytest
from safetensors.numpy import load_file, save_file

from jpaged.models.errors import ModelLoadError
from jpaged.models.families.table import family_class
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.weights.loading import abstract_weights, check_tensors, load_weights
from jpaged.models.weights.weights import Weights
from jpaged.pallas_kernels.layer_ops import XLA_OPS
from jpaged.sharding import device_mesh

from ...gguf_file import convert_to_gguf
from ..opening.test_gguf_checkpoint import LLAMA, hf_tensors
from .test_saving import bits

GOLDEN = Path(__file__).parents[2] / "golden" / "families"
TIED = [
    "llama_tied", "gemma2", "gemma3_with_images", "gpt2", "gpt_neox_gelu_fast_tied", "granite_bias_tied",
    "phi3_partial", "qwen2_layer_types_tied", "qwen3_head_dim", "smollm3",
]  # fmt: skip
"""A model of each family that ties its matrices, with the names that it has for them."""


def load(path: Path, **options: Any) -> Weights:
    config, checkpoint = open_checkpoint(path, **options)
    abstract = abstract_weights(config, "float32", device_mesh(jax.devices("cpu")[:1]), XLA_OPS)
    check_tensors(abstract, config, checkpoint)
    return load_weights(abstract, config, checkpoint)


def write(directory: Path, name: str, tensors: dict[str, np.ndarray]) -> Path:
    """Write a directory with the config of a golden model and these tensors."""
    directory.mkdir()
    shutil.copy(GOLDEN / name / "config.json", directory)
    save_file(tensors, directory / "model.safetensors")
    return directory


def names_of(name: str) -> tuple[str, str]:
    """Return what the checkpoint of a golden model calls its embedding, and would call its head."""
    config, checkpoint = open_checkpoint(GOLDEN / name)
    model = family_class(config.architecture)
    stored = model.naming(checkpoint.names())
    return stored(f"{model.tensor_names['embed']}.weight"), stored(f"{model.tensor_names['head']}.weight")


@pytest.mark.parametrize("name", TIED)
def test_a_tied_matrix_may_be_stored_as_the_head_alone(name, tmp_path):
    tensors = load_file(GOLDEN / name / "model.safetensors")
    embedding, head = names_of(name)
    tensors[head] = tensors.pop(embedding)
    wanted = bits(load(GOLDEN / name))
    assert bits(load(write(tmp_path / "files", name, tensors))) == wanted
    assert bits(load(GOLDEN / name, params={"step": 3, "params": tensors})) == wanted


def test_an_orbax_tree_may_store_a_tied_matrix_as_the_head_alone(tmp_path):
    tensors = load_file(GOLDEN / "llama_tied" / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", {"params": tensors, "step": 3})
    assert bits(load(GOLDEN / "llama_tied", orbax=tmp_path / "tree")) == bits(load(GOLDEN / "llama_tied"))


def test_a_head_that_differs_counts_in_a_gguf_file_that_is_called_tied(tmp_path):
    path = convert_to_gguf(tmp_path / "m.gguf", LLAMA, hf_tensors(LLAMA))
    assert bits(load(path, overrides={"tie_word_embeddings": True})) == bits(load(path))


def test_matrices_of_two_dtypes_are_tied_if_their_values_are_equal(tmp_path):
    tensors = load_file(GOLDEN / "llama_tied" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].astype(np.float32)
    assert open_checkpoint(write(tmp_path / "equal", "llama_tied", tensors))[0].tie_word_embeddings
    tensors["lm_head.weight"][-1, -1] += 2**-12
    assert not open_checkpoint(write(tmp_path / "other", "llama_tied", tensors))[0].tie_word_embeddings


def test_the_subtree_that_holds_the_weights_is_found_beside_those_of_an_optimizer(tmp_path):
    tensors = load_file(GOLDEN / "llama" / "model.safetensors")
    others = {name: 2 * values for name, values in tensors.items()}
    wanted = bits(load(GOLDEN / "llama"))
    moments = {"mu": others, "nu": others}
    for state in (
        {"params": tensors, "ema_params": others},
        {"ema": {"params": others}, "params": {"params": tensors}},
        {"step": 3, "params": {"params": tensors}, "opt_state": moments},
        {"mu": others, "train": {"state": {"model": tensors}}},
        {"params": tensors, "optim": {"m": others, "v": others}},
        {"ema_params": tensors},
        {"avg": {"params": tensors}, "opt_state": moments},
        {"params": {name.removeprefix("model."): values for name, values in tensors.items()}, "opt_state": moments},
    ):
        assert bits(load(GOLDEN / "llama", params=state)) == wanted, list(state)
    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", {"params": tensors, "ema_params": others, "opt_state": moments})
    assert bits(load(GOLDEN / "llama", orbax=tmp_path / "tree")) == wanted
    for state in ({"actor": tensors, "critic": others}, {"actor": {"params": tensors}, "critic": {"params": others}}):
        with pytest.raises(ModelLoadError, match=r"^params: 2 subtrees hold tensors of the model: actor.*, critic"):
            load(GOLDEN / "llama", params=state)
    # Moments are not taken for weights that lack a tensor, or all that subtrees are known by.
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        del tensors[name]
        with pytest.raises(ModelLoadError, match=r"tensor .* is missing"):
            load(GOLDEN / "llama", params={"params": tensors, "opt_state": {"mu": others}})
