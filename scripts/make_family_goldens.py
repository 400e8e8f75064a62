"""Makes tests/golden/families: tiny random checkpoints of every model family, and what transformers computes with them.

Run this once where torch is installed (`pip install torch==2.13.0 transformers safetensors numpy`); the tests only read
the files. Each folder holds config.json and model.safetensors as transformers would save them, and golden.safetensors:
`tokens` (a prompt of PROMPT_LEN tokens and its greedy continuation) and `logits` of every position in float32, all from
one pass over the whole sequence. Prompts are longer than the sliding windows and than the context that the rotary
scalings start from, except in `phi3_longrope_short`. To add families, append them to the table and name them with
`--only`: the other folders stay as they are, which another CPU or version would change in their last bits.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

PROMPT_LEN, NUM_OUTPUTS = 48, 16
NUM_FIRST = 12  # So many families of the table were made with wider spreads and other demands, and stay as they are.
FIRST_MARGIN = 0.01  # What MIN_MARGIN is for these.
SEED_STEP = 1000
MIN_MARGIN = 0.03  # From the prompt's end on, the best token's logit leads the second best by at least this much.
MAX_ROUNDING = 2e-5  # Logits in float32 and in float64 differ by no more: the tests allow 1e-4.
MIN_DISTINCT = 8  # A continuation has at least so many different tokens: repetition would hide a wrong position.

TOKENS = {"vocab_size": 96, "bos_token_id": None, "eos_token_id": 0}
SIZES = TOKENS | {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SMALL = SIZES | {"hidden_size": 32, "intermediate_size": 48, "rms_norm_eps": 1e-3, "pad_token_id": None}
WINDOW = {"sliding_window": 8}
TIED = {"tie_word_embeddings": True}
BIAS = {"attention_bias": True}
FULL_FIRST = {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.2, "truncate": False}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.3, 2.0, 4.0, 6.0],
}
LONGROPE_PARTIAL = LONGROPE | {
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.2, 2.0],
    "long_factor": [1.3, 2.0, 6.0],
    "attention_factor": 1.4,
}
SMALL_YARN = YARN | {"rope_theta": 20.0, "original_max_position_embeddings": 32, "beta_fast": 2.0, "beta_slow": 0.5}
OLMO3_YARN = {"sliding_attention": DEFAULT_ROPE, "full_attention": SMALL_YARN}
GEMMA3_LINEAR = {
    "sliding_attention": DEFAULT_ROPE,
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}

QWEN3 = SMALL | {"head_dim": 8}
QWEN3_WINDOW = WINDOW | {"num_hidden_layers": 3, "use_sliding_window": True, "max_window_layers": 1}
PHI3_LONG = SMALL | {"max_position_embeddings": 128, "rope_parameters": LONGROPE}
GRANITE = SMALL | {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.5,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.7,
}
SMOLLM3 = SMALL | TIED | {"num_hidden_layers": 4}
SMOLLM3_NO_ROPE = BIAS | {"no_rope_layers": [0, 1, 0], "num_hidden_layers": 3, "tie_word_embeddings": False}
OLMO3 = SMALL | WINDOW | {"num_hidden_layers": 4}
GEMMA2 = SMALL | WINDOW | TIED | {"num_hidden_layers": 4, "head_dim": 12, "query_pre_attn_scalar": 5}
GEMMA2_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
GEMMA3 = SMALL | WINDOW | TIED | {"intermediate_size": 40, "head_dim": 8, "query_pre_attn_scalar": 5}
IMAGES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
"""A small encoder of images, whose weights the files hold beside the language model's."""
GPT2 = TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "layer_norm_epsilon": 1e-3}
GPT_NEOX = TOKENS | {
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-3,
}
MOE = SMALL | {"intermediate_size": 24}
EXPERTS_60 = {"num_experts": 60, "num_experts_per_tok": 4}
EXPERTS_4 = {"num_experts": 4, "num_experts_per_tok": 2}
ON_EVERY_SECOND = {"num_hidden_layers": 4, "decoder_sparse_step": 2}
QWEN2_MOE = MOE | {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 16}
QWEN3_MOE = MOE | {"moe_intermediate_size": 8, "head_dim": 8}
GPT_OSS = MOE | WINDOW | {"head_dim": 8, "rope_parameters": SMALL_YARN | {"truncate": False}}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "llama_tied": ("llama", SIZES | TIED | {"num_key_value_heads": 1}),
    "llama_bias": ("llama", SIZES | BIAS | {"mlp_bias": True}),
    "llama_linear": ("llama", SIZES | {"rope_parameters": LINEAR, "max_position_embeddings": 16}),
    "llama_llama3": ("llama", SIZES | {"rope_parameters": LLAMA3}),
    "llama_yarn": ("llama", SIZES | {"rope_parameters": YARN}),
    "llama_yarn_mscale": ("llama", SIZES | {"rope_parameters": YARN_MSCALE}),
    "llama_yarn_attention_factor": ("llama", SIZES | {"rope_parameters": {**YARN, "attention_factor": 1.5}}),
    "mistral_window": ("mistral", SIZES | WINDOW | {"head_dim": 24}),
    "mistral_full": ("mistral", SIZES | {"sliding_window": None, "head_dim": 10, "num_key_value_heads": 4}),
    "qwen2": ("qwen2", SIZES | {"num_attention_heads": 8}),
    "qwen2_window": ("qwen2", SIZES | WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("qwen3", QWEN3),
    "qwen3_bias": ("qwen3", QWEN3 | BIAS),
    "qwen3_window": ("qwen3", QWEN3 | QWEN3_WINDOW),
    "qwen3_head_dim": ("qwen3", QWEN3 | TIED | {"head_dim": 20, "num_key_value_heads": 1}),
    "phi3": ("phi3", SMALL),
    "phi3_window": ("phi3", SMALL | WINDOW | {"num_key_value_heads": 4}),
    "phi3_partial": ("phi3", SMALL | TIED | {"rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.75}}),
    "phi3_longrope_short": ("phi3", PHI3_LONG | {"original_max_position_embeddings": 64}),
    "phi3_longrope_long": ("phi3", PHI3_LONG | {"original_max_position_embeddings": 32}),
    "phi3_longrope_attention_factor": (
        "phi3",
        PHI3_LONG | {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE_PARTIAL},
    ),
    "granite": ("granite", GRANITE),
    "granite_bias_tied": ("granite", GRANITE | BIAS | TIED | {"mlp_bias": True, "embedding_multiplier": 0.6}),
    "smollm3": ("smollm3", SMOLLM3),
    "smollm3_no_rope_layers_bias": ("smollm3", SMOLLM3 | SMOLLM3_NO_ROPE | {"mlp_bias": True}),
    "smollm3_window": ("smollm3", SMOLLM3 | WINDOW | {"no_rope_layer_interval": 2, "use_sliding_window": True}),
    "olmo2": ("olmo2", SMALL),
    "olmo2_bias_yarn": ("olmo2", SMALL | BIAS | {"rope_parameters": SMALL_YARN}),
    "olmo3": ("olmo3", OLMO3),
    "olmo3_yarn": ("olmo3", OLMO3 | {"rope_parameters": OLMO3_YARN}),
    "olmo3_layer_types_bias": ("olmo3", OLMO3 | FULL_FIRST | BIAS),
    "gemma2": ("gemma2", GEMMA2 | GEMMA2_CAPS),
    "gemma2_uncapped_bias": ("gemma2", GEMMA2 | BIAS | dict.fromkeys(GEMMA2_CAPS)),
    "gemma3": ("gemma3_text", GEMMA3 | {"num_hidden_layers": 6, "rope_parameters": GEMMA3_LINEAR}),
    "gemma3_softcap_bias": (
        "gemma3_text",
        GEMMA3 | BIAS | {"num_hidden_layers": 3, "sliding_window_pattern": 2, "final_logit_softcapping": 5.0},
    ),
    "gemma3_layer_types": (
        "gemma3_text",
        GEMMA3 | FULL_FIRST | {"rope_parameters": GEMMA3_LINEAR, "tie_word_embeddings": False},
    ),
    "gpt2": ("gpt2", GPT2),
    "gpt2_inverse_layer_relu": (
        "gpt2",
        GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 80, "activation_function": "relu"},
    ),
    "gpt2_unscaled_untied": ("gpt2", GPT2 | {"scale_attn_weights": False, "tie_word_embeddings": False}),
    "gpt_neox": ("gpt_neox", GPT_NEOX),
    "gpt_neox_sequential": ("gpt_neox", GPT_NEOX | {"use_parallel_residual": False}),
    "gpt_neox_rotary_no_bias": (
        "gpt_neox",
        GPT_NEOX | {"rotary_pct": 1.0, "rotary_emb_base": 500, "attention_bias": False},
    ),
    "gpt_neox_gelu_fast_tied": ("gpt_neox", GPT_NEOX | TIED | {"hidden_act": "gelu_fast"}),
    "llama_gelu_heads": ("llama", SMALL | {"hidden_act": "gelu", "head_dim": 12, "num_attention_heads": 8}),
    "llama_quick_gelu": ("llama", SMALL | {"hidden_act": "quick_gelu"}),
    "mistral_relu2": ("mistral", SMALL | {"hidden_act": "relu2", "sliding_window": None}),
    "qwen2_layer_types_tied": (
        "qwen2",
        SMALL | WINDOW | TIED | FULL_FIRST | {"use_sliding_window": True},
    ),
    "qwen3_yarn": ("qwen3", QWEN3 | {"rope_parameters": SMALL_YARN}),
    "granite_linear": ("granite", GRANITE | {"rope_parameters": LINEAR, "max_position_embeddings": 16}),
    "smollm3_llama3": ("smollm3", SMOLLM3 | {"rope_parameters": LLAMA3}),
    "gemma2_layer_types_linear": (
        "gemma2",
        GEMMA2
        | FULL_FIRST
        | {"rope_parameters": LINEAR, "max_position_embeddings": 16, "tie_word_embeddings": False}
        | {"attn_logit_softcapping": None, "final_logit_softcapping": 5.0},
    ),
    "gpt_neox_linear": (
        "gpt_neox",
        GPT_NEOX | {"rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}, "max_position_embeddings": 16},
    ),
    "gemma3_with_images": ("gemma3", {"text_config": GEMMA3 | FULL_FIRST, "vision_config": IMAGES}),
    "mistral_with_images": (
        "mistral3",
        {
            "text_config": SMALL | WINDOW | {"model_type": "mistral"},
            "vision_config": IMAGES | {"model_type": "pixtral", "head_dim": 8},
            "tie_word_embeddings": False,
        },
    ),
    "mixtral": ("mixtral", MOE | {"num_local_experts": 4}),
    "mixtral_window_one_of_60": (
        "mixtral",
        MOE | WINDOW | {"num_local_experts": 60, "num_experts_per_tok": 1, "intermediate_size": 8},
    ),
    "qwen2_moe": ("qwen2_moe", QWEN2_MOE | EXPERTS_60),
    "qwen2_moe_renormalized_window": (
        "qwen2_moe",
        QWEN2_MOE
        | EXPERTS_4
        | WINDOW
        | {"num_hidden_layers": 3, "use_sliding_window": True, "max_window_layers": 2, "qkv_bias": False}
        | {"norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE | EXPERTS_60 | {"norm_topk_prob": True}),
    "qwen3_moe_some_dense_window": (
        "qwen3_moe",
        QWEN3_MOE | EXPERTS_4 | WINDOW | BIAS | ON_EVERY_SECOND | {"use_sliding_window": True, "mlp_only_layers": [3]},
    ),
    "gpt_oss": ("gpt_oss", GPT_OSS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss_60_layer_types": (
        "gpt_oss",
        GPT_OSS | FULL_FIRST | {"num_local_experts": 60, "attention_bias": False, "intermediate_size": 8},
    ),
    "olmoe": ("olmoe", MOE | {"num_experts": 60, "num_experts_per_tok": 8, "intermediate_size": 8}),
    "olmoe_renormalized_bias": ("olmoe", MOE | EXPERTS_4 | BIAS | {"norm_topk_prob": True}),
}
OLD_NAMES = {
    "gpt2": [(r"^transformer\.", "")],
    "gpt_neox": [(r"^lm_head\.", "embed_out.")],
    "gemma3_with_images": [(r"^model\.language_model\.", "language_model.model."), (r"^model\.", "")],
}
"""Families whose tensors are named as in older files: patterns in today's names, and what replaces them."""


@dataclass(frozen=True)
class Spread:
    """Standard deviations of biases and of embeddings that are also the head, and that head's gain (in the last norm).

    A tied embedding that is large beside what the layers add would make every token its own best continuation.
    """

    bias: float = 0.3
    tied_embedding: float = 0.1
    tied_head: float = 3.0


FIRST_SPREAD = Spread(bias=1.0, tied_embedding=0.3, tied_head=1.0)


def draw(name: str, drawn: torch.Tensor, config: PreTrainedConfig, spread: Spread) -> torch.Tensor:
    """Scale one weight's normal draws so that heads attend to few positions and logits differ much."""
    if "norm" in name or ".ln_" in name:
        if name.endswith("bias"):
            return spread.bias * drawn
        is_final = name.endswith(("model.norm.weight", "ln_f.weight", "final_layer_norm.weight"))
        gain = spread.tied_head if is_final and config.tie_word_embeddings else 2.0 if "q_norm" in name else 1.0
        drawn = gain * (1 + 0.2 * drawn)
        return drawn - 1 if config.model_type.startswith("gemma") else drawn  # Gemma's gain is 1 + weight.
    if drawn.dim() == 1 or name.endswith("bias"):
        return spread.bias * drawn
    if any(part in name for part in ("embed_tokens", "embed_in", "wte", "wpe")):
        return spread.tied_embedding * drawn if config.tie_word_embeddings else drawn
    gain = 1.5 if any(part in name for part in ("qkv_proj", "query_key_value", "c_attn")) else 1.0
    if any(part in name for part in ("q_proj", "lm_head", "mlp.gate.", "mlp.router.")):
        gain = 2.0
    if config.model_type == "gpt_oss" and "gate_up_proj" in name:
        gain = 3.0  # Gates and what they gate are clipped at 7.
    # GPT-2 stores its matrices as [inputs, outputs], and GPT-OSS those of its experts; others as [outputs, inputs].
    is_transposed = ".c_" in name or (drawn.dim() == 3 and config.model_type == "gpt_oss")
    return gain * drawn * drawn.shape[-2 if is_transposed else -1] ** -0.5


def fill(model: PreTrainedModel, seed: int, spread: Spread) -> None:
    """Draw weights that bfloat16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        drawn = draw(name, torch.randn(weight.shape, generator=generator), model.config, spread)
        weight.data = drawn.bfloat16().float()


def generate(model: PreTrainedModel, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random prompt with its greedy continuation, and the logits of all its positions.

    Every token comes from a pass over the whole sequence so far: nothing depends on what a cache would hold.
    """
    tokens = torch.randint(1, TOKENS["vocab_size"], (PROMPT_LEN,), generator=torch.Generator().manual_seed(seed))
    for _ in range(NUM_OUTPUTS):
        logits = model(tokens[None], use_cache=False).logits[0]
        tokens = torch.cat([tokens, logits[-1:].argmax(-1)])
    return tokens, model(tokens[None], use_cache=False).logits[0]


def smallest_margin(logits: torch.Tensor) -> float:
    """Return by how much the best token leads the second best, where that is closest, from the prompt's end on."""
    top = logits[PROMPT_LEN - 1 :].topk(2).values
    return (top[:, 0] - top[:, 1]).min().item()


def is_clear(model: PreTrainedModel, tokens: torch.Tensor, logits: torch.Tensor) -> bool:
    """Return whether a continuation is varied, free of the end token and safe from rounding."""
    outputs = set(tokens[PROMPT_LEN:].tolist())
    if TOKENS["eos_token_id"] in outputs or len(outputs) < MIN_DISTINCT or smallest_margin(logits) < MIN_MARGIN:
        return False
    exact = deepcopy(model).double()(tokens[None], use_cache=False).logits[0]
    return (exact - logits).abs().max().item() <= MAX_ROUNDING


def has_experts(model: PreTrainedModel) -> bool:
    """Return whether a model has sparse MLPs."""
    return hasattr(model.config, "num_experts_per_tok")


def state_of(model: PreTrainedModel, family: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a family's file."""
    state = dict(model.named_parameters())
    if has_experts(model):
        # In memory transformers has one tensor for the matrices of all experts, and in files most often one for each.
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            state = load_file(Path(directory) / "model.safetensors")
    state = {name: weight.bfloat16().contiguous() for name, weight in state.items()}
    for pattern, replacement in OLD_NAMES.get(family, []):
        state = {re.sub(pattern, replacement, name): weight for name, weight in state.items()}
    if family == "gpt2":
        # Files of that time hold the causal mask, under a name that looks like a bias.
        mask = torch.ones(PROMPT_LEN + NUM_OUTPUTS, PROMPT_LEN + NUM_OUTPUTS).tril()
        state |= {f"h.{i}.attn.bias": mask[None, None].clone() for i in range(model.config.n_layer)}
    return state


@torch.no_grad()
def make(directory: Path, model_type: str, settings: dict[str, Any], index: int) -> None:
    """Write the folder of the table's entry number `index`, with the first seed of its own whose golden is clear."""
    config = AutoConfig.for_model(model_type, **settings, attn_implementation="eager")
    auto = AutoModelForImageTextToText if "vision_config" in settings else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    if has_experts(model):
        model.set_experts_implementation("eager")  # The others have no float64.
    is_first = index < NUM_FIRST
    for seed in range(index, index + 100 * SEED_STEP, SEED_STEP):
        fill(model, seed, FIRST_SPREAD if is_first else Spread())
        tokens, logits = generate(model, seed)
        if smallest_margin(logits) >= FIRST_MARGIN if is_first else is_clear(model, tokens, logits):
            break
    else:
        raise RuntimeError(f"{directory.name}: no seed gives a clear continuation")
    largest, margin = logits.abs().max().item(), smallest_margin(logits)
    print(f"{directory.name}: seed {seed}, logits up to {largest:.1f}, smallest top-1 margin {margin:.4f}")
    directory.mkdir(parents=True, exist_ok=True)
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(directory)
    save_file(state_of(model, directory.name), directory / "model.safetensors", metadata={"format": "pt"})
    save_file({"tokens": tokens.int(), "logits": logits.contiguous()}, directory / "golden.safetensors")
    for file in directory.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=Path("tests/golden/families"))
    parser.add_argument(
        "--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY", help="make these alone"
    )
    arguments = parser.parse_args()
    for index, (name, (model_type, settings)) in enumerate(FAMILIES.items()):
        if name in arguments.only:
            make(arguments.directory / name, model_type, settings, index)
