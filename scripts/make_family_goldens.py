"""Makes tests/golden/families: tiny random checkpoints of every model family, and what transformers computes with them.

Run this once where torch is installed (`pip install torch==2.13.0 transformers safetensors numpy`); the tests only read
the files. Each folder holds config.json and model.safetensors as transformers would save them, and golden.safetensors:
`tokens` (a prompt of PROMPT_LEN tokens and its greedy continuation) and `logits` of every position in float32. Prompts
are longer than the sliding windows and than the context that the rotary scalings start from.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

PROMPT_LEN, NUM_OUTPUTS = 48, 16
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.2, "truncate": False}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_linear": ("llama", {"rope_parameters": LINEAR, "max_position_embeddings": 16}),
    "llama_llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama_yarn": ("llama", {"rope_parameters": YARN}),
    "llama_yarn_mscale": ("llama", {"rope_parameters": YARN_MSCALE}),
    "llama_yarn_attention_factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.5}}),
    "mistral_window": ("mistral", {"sliding_window": 8, "head_dim": 24}),
    "mistral_full": ("mistral", {"sliding_window": None, "head_dim": 10, "num_key_value_heads": 4}),
    "qwen2": ("qwen2", {"num_attention_heads": 8}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
}


def fill(model: PreTrainedModel, seed: int) -> None:
    """Draw weights that bfloat16 holds exactly, scaled so that heads attend to few positions and logits differ much."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            drawn = 1 + 0.2 * drawn
        elif "embed_tokens" not in name and weight.dim() == 2:
            gain = 2.0 if "q_proj" in name or "lm_head" in name else 1.0
            drawn = gain * drawn * weight.shape[1] ** -0.5
        elif model.config.tie_word_embeddings and weight.dim() == 2 and "embed_tokens" in name:
            drawn = 0.3 * drawn
        weight.data = drawn.bfloat16().float()


@torch.no_grad()
def make(directory: Path, model_type: str, changes: dict[str, Any], seed: int) -> None:
    """Write one family's folder; `changes` replace values of SIZES in its config."""
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes}, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    fill(model, seed)
    tokens = torch.randint(1, SIZES["vocab_size"], (PROMPT_LEN,), generator=torch.Generator().manual_seed(seed))
    for _ in range(NUM_OUTPUTS):
        logits = model(tokens[None], use_cache=False).logits[0]
        tokens = torch.cat([tokens, logits[-1:].argmax(-1)])
    logits = model(tokens[None], use_cache=False).logits[0]
    top = logits.topk(2).values
    margin = (top[:, 0] - top[:, 1]).min()
    print(f"{directory.name}: logits up to {logits.abs().max():.1f}, smallest top-1 margin {margin:.4f}")
    directory.mkdir(parents=True, exist_ok=True)
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(directory)
    state = {name: weight.bfloat16().contiguous() for name, weight in model.named_parameters()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    save_file({"tokens": tokens.int(), "logits": logits.contiguous()}, directory / "golden.safetensors")
    for file in directory.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=Path("tests/golden/families"))
    directory = parser.parse_args().directory
    for seed, (name, (model_type, changes)) in enumerate(FAMILIES.items()):
        make(directory / name, model_type, changes, seed)
