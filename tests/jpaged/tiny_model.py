"""A whole model directory in miniature: config, byte-level tokenizer with a chat template, random weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jpaged.pallas_kernels.ragged_paged_attention import XlaBackend
from jpaged.pallas_kernels.ragged_paged_attention.xla import XlaLayout

SPECIALS = ["<|end|>", "<|start|>"]
CHAT_TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}\n{% endfor %}<|start|>assistant: "
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 258, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "torch_dtype": "float32", "bos_token_id": None, "eos_token_id": 0, "hidden_act": "silu",
}  # fmt: skip


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights scaled so that the logits of different tokens lie well apart."""
    rng = np.random.default_rng(seed)
    hidden, inner, kv = CONFIG["hidden_size"], CONFIG["intermediate_size"], 32

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    found = {"model.embed_tokens.weight": rng.normal(0, 1, (CONFIG["vocab_size"], hidden)).astype(np.float32)}
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        for part, shape in {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():  # fmt: skip
            found[f"{name}{part}.weight"] = matrix(*shape)
        for part in ("input_layernorm", "post_attention_layernorm"):
            found[f"{name}{part}.weight"] = np.ones(hidden, np.float32)
    found["model.norm.weight"] = np.ones(hidden, np.float32)
    found["lm_head.weight"] = 4 * matrix(CONFIG["vocab_size"], hidden)
    return found


def write_tiny_model(directory: Path, **config: Any) -> Path:
    """Write the model to `directory`; keywords replace entries of its config."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    save_file(tensors(), str(directory / "model.safetensors"))
    return directory


def tiny_layout(*, num_pages: int, page_size: int) -> XlaLayout:
    """Layout of this model's cache on the XLA path, in float32."""
    return XlaBackend().layout(
        num_layers=CONFIG["num_hidden_layers"],
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=CONFIG["num_key_value_heads"],
        head_size=CONFIG["hidden_size"] // CONFIG["num_attention_heads"],
        dtype="float32",
    )
