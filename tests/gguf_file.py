"""Writes small GGUF files for tests with the `gguf` package's own writer."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Key of config.json → key of the metadata behind the architecture's name, as llama.cpp's converter writes them."""
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
}


def write_gguf(path, metadata=(), tensors=(), *, architecture="llama"):
    """Write the file `path` and return `path`; entries whose value is None are left out.

    A metadata value may be a pair (value, GGUFValueType), and a tensor a pair (bytes as uint8, GGMLQuantizationType).
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in dict(metadata).items():
        if value is not None:
            value, kind = value if isinstance(value, tuple) else (value, GGUFValueType.get_type(value))
            writer.add_key_value(key, value, kind)
    for name, tensor in dict(tensors).items():
        if tensor is not None:
            data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert_to_gguf(path, config, tensors, *, kind=GGMLQuantizationType.F32, metadata=()):
    """Write a model as llama.cpp's converter does, its matrices quantized to `kind`, and return `path`.

    `kind` may be a function that gives the type of each matrix by its name.
    `metadata` is added, such as that of a tokenizer. `config` is the content of config.json, and `tensors` are float32
    under Hugging Face's names. Source of what the converter changes: llama.cpp, conversion/llama.py, gemma.py.
    """
    architecture = ARCHITECTURES[config["architectures"][0]]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    stored = {}
    for name, values in tensors.items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleaved(values, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        kind_here = kind(name) if callable(kind) else kind
        quantized = values if values.ndim == 1 else (gguf.quantize(values, kind_here), kind_here)
        stored[names.get_name(name, (".weight", ".bias"))] = quantized
    metadata = dict(metadata) | {f"{architecture}.{name}": config[key] for key, name in KEYS.items() if key in config}
    metadata[f"{architecture}.attention.value_length"] = config.get("head_dim")
    return write_gguf(path, metadata, stored, architecture=architecture)


def interleaved(values, num_heads):
    """Return rows of q or k as llama.cpp's converter stores them for llama: a head's two halves, interleaved."""
    split = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.concatenate([split[:, :, i] for i in range(split.shape[2])], axis=1).reshape(values.shape)
