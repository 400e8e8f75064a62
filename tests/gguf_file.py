"""Writes small GGUF files for tests with the `gguf` package's own writer."""

import re

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
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
"""Key of config.json → key of the metadata behind the architecture's name, as llama.cpp's converter writes them."""
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "MixtralForCausalLM": "llama",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "GptOssForCausalLM": "gpt-oss",
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


HALVES = {"Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "TQ2_0": (64,)}
HALVES |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
"""Where a block has its float16: scale and minimum; others have a scale in front."""


def random_blocks(name, shape, rng, halves=None, byte=None):
    """Return random blocks of a type of GGUF for an array: uint8 [..., bytes of a row].

    `halves(count)` gives the float16 of scales and minima: random ones of about 0.05 unless it is given. All other
    bytes are `byte`, if it is given.
    """
    block, num_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, num_bytes), dtype=np.uint8)
    if byte is not None:
        blocks[...] = byte
    count = blocks[..., 0].size
    halves = halves or (lambda count: 0.05 * rng.normal(size=count))
    if name == "MXFP4":
        blocks[..., 0] = rng.integers(118, 126, blocks.shape[:-1])
    elif name == "IQ1_M":  # The upper halves of bytes 49, 51, 53 and 55.
        bits = halves(count).astype(np.float16).view(np.uint16).reshape(blocks.shape[:-1])
        for i in range(4):
            blocks[..., 49 + 2 * i] = blocks[..., 49 + 2 * i] & 15 | (bits >> 4 * i & 15) << 4
    else:
        for first in HALVES.get(name, (0,)):
            stored = halves(count).astype(np.float16).view(np.uint8)
            blocks[..., first : first + 2] = stored.reshape(*blocks.shape[:-1], 2)
    return blocks.reshape(*shape[:-1], -1)


def quantized(values, kind, rng):
    """Return values quantized to a type, or random blocks of this size where the package does not quantize to it."""
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        of_scale_1 = gguf.dequantize(random_blocks(kind.name, (1, 2048), rng, np.ones), kind)
        scale = values.std() / of_scale_1.std()
        return random_blocks(kind.name, values.shape, rng, lambda count: scale * rng.normal(size=count))


def convert_to_gguf(path, config, tensors, *, kind=GGMLQuantizationType.F32, metadata=(), is_by_expert=False):
    """Write a model as llama.cpp's converter does, its matrices quantized to `kind`, and return `path`.

    Matrices of types that the `gguf` package does not quantize to are random.

    `kind` may be a function that gives the type of each matrix by its name. With `is_by_expert` there is a tensor for
    each expert, as in files of Mixtral from before April 2024.
    `metadata` is added, such as that of a tokenizer. `config` is the content of config.json, and `tensors` are float32
    under Hugging Face's names. Source of what the converter changes: llama.cpp, conversion/llama.py, gemma.py.
    """
    architecture = ARCHITECTURES[config["architectures"][0]]
    architecture_name = architecture.upper().replace("-", "_")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture_name], config["num_hidden_layers"])
    stored, rng = {}, np.random.default_rng(0)
    for name, values in stacked_experts(tensors).items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleaved(values, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if name.endswith("shared_expert_gate.weight"):
            values = values[0]
        kind_here = kind(name) if callable(kind) else kind
        stays_floats = values.ndim == 1 or name.endswith((".gate.weight", ".router.weight", ".bias"))
        tensor = values if stays_floats else (quantized(values, kind_here, rng), kind_here)
        stored[names.get_name(name, (".weight", ".bias"))] = tensor
    if is_by_expert:
        stored = dict(each for item in stored.items() for each in by_expert(*item))
    from_config = {f"{architecture}.{name}": config[key] for key, name in KEYS.items() if key in config}
    metadata = from_config | dict(metadata)
    metadata[f"{architecture}.attention.value_length"] = config.get("head_dim")
    if architecture == "gpt-oss":
        metadata["gpt-oss.expert_feed_forward_length"] = config["intermediate_size"]
    return write_gguf(path, metadata, stored, architecture=architecture)


def stacked_experts(tensors):
    """Return tensors with those of all experts as one, and gate and up apart, as llama.cpp's converter writes them."""
    found, experts = {}, {}
    for name, values in tensors.items():
        parts = re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name)
        if parts:
            experts.setdefault(parts[1] + parts[3], {})[int(parts[2])] = values
        elif name.endswith("sinks"):
            found[f"{name}.weight"] = values
        elif "experts." in name:  # GPT-OSS's, W [E, in, out] and biases [E, out].
            base, end = (name.removesuffix("_bias"), ".bias") if name.endswith("_bias") else (name, ".weight")
            rows = values if end == ".bias" else values.swapaxes(1, 2)
            parts = {"": rows} if "gate_up" not in name else {"gate_proj": rows[:, ::2], "up_proj": rows[:, 1::2]}
            found |= {base.replace("gate_up_proj", part) + end: values for part, values in parts.items()}
        else:
            found[name] = values
    stacked = {name: np.stack([of_expert[e] for e in sorted(of_expert)]) for name, of_expert in experts.items()}
    return {name: np.ascontiguousarray(values) for name, values in (found | stacked).items()}


def by_expert(name, stored):
    """Yield a tensor of all experts as one for each of them, and any other as it is."""
    if "_exps." not in name:
        yield name, stored
        return
    values, kind = stored
    for expert, matrix in enumerate(values):
        yield name.replace("_exps.", f".{expert}."), (matrix, kind)


def interleaved(values, num_heads):
    """Return rows of q or k as llama.cpp's converter stores them for llama: a head's two halves, interleaved."""
    split = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.concatenate([split[:, :, i] for i in range(split.shape[2])], axis=1).reshape(values.shape)
