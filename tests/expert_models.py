"""Writes small random models with experts as checkpoints of Hugging Face, and gives their tensors other forms."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jpaged.models.opening.open_checkpoint import read_config
from jpaged.models.weights.loading import tensor_shapes
from jpaged.sharding import device_mesh

SIZES = {
    "vocab_size": 10, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "bos_token_id": None,
    "eos_token_id": None, "num_experts_per_tok": 2, "head_dim": 16,
}  # fmt: skip
QWEN = SIZES | {"num_experts": 3, "moe_intermediate_size": 32}
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16, "truncate": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": SIZES | {"num_local_experts": 3, "rope_theta": 1e4},
    "Qwen2Moe": QWEN | {"shared_expert_intermediate_size": 64},
    "Qwen3Moe": QWEN | {"norm_topk_prob": True},
    "GptOss": SIZES | {"num_local_experts": 3, "sliding_window": 8, "rope_parameters": YARN},
}
"""Family → what its config.json has beside the name of the class."""


Tree = dict[str, np.ndarray]


def write_model(directory: Path, family: str, dtype: Any = np.float32) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Write a random model to a directory, and return the content of its config.json and its tensors."""
    config = {"architectures": [f"{family}ForCausalLM"], **MODELS[family]}
    (directory / "config.json").write_text(json.dumps(config))
    random, shapes = np.random.default_rng(0), tensor_shapes(read_config(directory), device_mesh(jax.devices()[:1]))
    tensors = {name: random.uniform(-0.9, 0.9, shape).astype(dtype) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return config, tensors


def joined(tree: Tree, pattern: str, name: str) -> Tree:
    """Return a tree in which all tensors that differ in a number of their names are one array, in its order."""
    arrays = defaultdict[str, dict[int, np.ndarray]](dict)
    others = {}
    for key, leaf in tree.items():
        if match := re.search(pattern, key):
            arrays[key.replace(match[0], name)][int(match[1])] = leaf
        else:
            others[key] = leaf
    return others | {key: np.stack([leaves[i] for i in sorted(leaves)]) for key, leaves in arrays.items()}


def of_all_experts(tree: Tree) -> Tree:
    return joined(tree, r"\.experts\.(\d+)\.", ".experts.")


def of_all_layers(tree: Tree) -> Tree:
    return joined(tree, r"\.layers\.(\d+)\.", ".layers.")


def in_memory_of_transformers(tree: Tree) -> Tree:
    """Return a tree of a module of transformers 5: gates and ups of all experts in one array [E, 2 F, D]."""
    for old, new in (("block_sparse_moe", "mlp"), ("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        tree = {name.replace(old, new): leaf for name, leaf in tree.items()}
    found = {}
    for name, leaf in of_all_experts(tree).items():
        if ".experts." not in name:
            found[name] = leaf
        elif name.endswith("down_proj.weight"):
            found[name.removesuffix(".weight")] = leaf
        elif name.endswith("gate_proj.weight"):
            ups = of_all_experts(tree)[name.replace("gate_proj", "up_proj")]
            found[name.replace("gate_proj.weight", "gate_up_proj")] = np.concatenate([leaf, ups], axis=1)
    return found
