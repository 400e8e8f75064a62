"""Writes small random models with experts as checkpoints of Hugging Face."""

import json
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


def write_model(directory: Path, family: str, dtype: Any = np.float32) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Write a random model to a directory, and return the content of its config.json and its tensors."""
    config = {"architectures": [f"{family}ForCausalLM"], **MODELS[family]}
    (directory / "config.json").write_text(json.dumps(config))
    random, shapes = np.random.default_rng(0), tensor_shapes(read_config(directory), device_mesh(jax.devices()[:1]))
    tensors = {name: random.uniform(-0.9, 0.9, shape).astype(dtype) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return config, tensors
