"""Makes tests/golden/routers.safetensors: which experts the routers of transformers' models choose, and their weights.

Run this once where torch is installed (`pip install torch==2.13.0 transformers safetensors`); the tests only read the
file. For every name of ROUTERS it has `NAME.logits`, `NAME.experts`, `NAME.weights` and, where there is one,
`NAME.correction_bias`; the settings are JSON under the name in its metadata. Correction biases are so large that some
sums of score and bias are negative.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

NUM_ROWS, HIDDEN_SIZE = 32, 16
GROUPS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "routed_scaling_factor": 2.5}
EXPERTS_60 = {"num_experts": 60, "num_experts_per_tok": 4}

ROUTERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("mixtral", "MixtralTopKRouter", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2_moe", "Qwen2MoeTopKRouter", EXPERTS_60 | {"norm_topk_prob": False}),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeTopKRouter", EXPERTS_60 | {"norm_topk_prob": True}),
    "gpt_oss": ("gpt_oss", "GptOssTopKRouter", {"num_local_experts": 32, "num_experts_per_tok": 4}),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3TopkRouter", GROUPS | {"n_group": 4, "topk_group": 2}),
    "deepseek_v3_not_renormalized": (
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        GROUPS | {"n_group": 8, "topk_group": 3, "norm_topk_prob": False},
    ),
    "glm4_moe": (
        "glm4_moe",
        "Glm4MoeTopkRouter",
        GROUPS | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
    ),
}
"""Name → module of transformers, class of the router, settings."""


@torch.no_grad()
def make(path: Path) -> None:
    """Write the file."""
    tensors, metadata = dict[str, torch.Tensor](), {"format": "pt"}
    for index, (name, (model_type, class_name, settings)) in enumerate(ROUTERS.items()):
        generator = torch.Generator().manual_seed(index)
        config = AutoConfig.for_model(model_type, **settings, hidden_size=HIDDEN_SIZE)
        router = getattr(import_module(f"transformers.models.{model_type}.modeling_{model_type}"), class_name)(config)
        for weight in [*router.parameters(), *router.buffers()]:
            weight.copy_(torch.randn(weight.shape, generator=generator) * (0.5 if weight.dim() == 2 else 1.0))
        rows = torch.randn(NUM_ROWS, HIDDEN_SIZE, generator=generator)
        logits, weights, experts = router(rows)
        tensors |= {f"{name}.logits": logits, f"{name}.weights": weights, f"{name}.experts": experts.int()}
        if hasattr(router, "e_score_correction_bias"):
            tensors[f"{name}.correction_bias"] = router.e_score_correction_bias
        metadata[name] = json.dumps(settings)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", default=Path("tests/golden/routers.safetensors"))
    make(parser.parse_args().path)
