"""Model configs: sizes, rotary embedding and sliding windows, read from config.json or from a GGUF file.

config.json is read directly, with the keys that transformers 4 and 5 write, because AutoConfig would import
transformers, which takes seconds. An absent key means what it means to the architecture's transformers class. A value
that is not supported is an error that names its key; no such value is ignored. Of tensors only the names, shapes and
types are read here, and the frequency factors of a GGUF file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ModelLoadError
from .io.fields import Fields

if TYPE_CHECKING:
    from .io.gguf import GGUFFile

DTYPES = ("float32", "bfloat16", "float16")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
MAX_LAYERS = 10_000
DEFAULT_THETA = 10_000.0

# Defaults of each transformers class for keys that are absent from config.json; a key that is null is not absent.
_LLAMA_IDS = {"bos_token_id": 1, "eos_token_id": 2}
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048, **_LLAMA_IDS},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "sliding_window": 4096, **_LLAMA_IDS},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "sliding_window": 4096},
}
ARCHITECTURES = tuple(_CLASS_DEFAULTS)
_ARCHITECTURE_OF_MODEL_TYPE = {name.removesuffix("ForCausalLM").lower(): name for name in ARCHITECTURES}
# Mistral's GGUF files name the architecture llama. The two differ only in their windows, which the file holds.
_ARCHITECTURE_OF_GGUF = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


@dataclass(frozen=True)
class RopeConfig:
    """The parameters of the rotary embedding, under transformers' names.

    `freq_factors` is GGUF's form of llama3: one divisor for each of the H / 2 default inverse frequencies. Where it is
    set, `factor`, `low_freq_factor`, `high_freq_factor` and `original_max_position` are not used.
    """

    theta: float = DEFAULT_THETA
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The config of one dense decoder of the Llama family.

    `architecture` names the transformers class, and `dtype` is the checkpoint's. `windows` has one entry per layer: the
    number of latest positions that a query attends to, its own included, or None for all.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def max_context_len(self) -> int:
        """Return the longest context, in positions, that the rotary embedding is made for.

        `linear` and `yarn` stretch the context that the model was trained on, and files differ in whether
        `max_position_embeddings` already includes that. For llama3 it always does.
        """
        if self.rope.kind == "linear":
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.kind == "yarn" and self.rope.original_max_position is not None:
            return max(self.max_position_embeddings, int(self.rope.original_max_position * self.rope.factor))
        return self.max_position_embeddings


def config_from_hf(data: dict[str, Any], path: Path) -> ModelConfig:
    """Return the config in `data`, the JSON object of config.json. Raises ModelLoadError, which names `path`."""
    architecture = _hf_architecture(Fields(data, path))
    fields = Fields({**_CLASS_DEFAULTS[architecture], **data}, path)
    for key in ("quantization_config", "compression_config"):
        if fields.has(key):
            raise ModelLoadError(
                f"{path}: {key} is set, wanted none: quantized safetensors are not supported; "
                "take the unquantized checkpoint or a .gguf file"
            )
    fields.choice("hidden_act", ["silu"], "silu")
    vocab_size, hidden_size = fields.integer("vocab_size"), fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    is_llama, is_qwen2 = architecture == "LlamaForCausalLM", architecture == "Qwen2ForCausalLM"
    attention_bias = is_llama and fields.boolean("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", max=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, "num_key_value_heads", num_heads),
        head_size=_head_size(fields, "head_dim", hidden_size, num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, above=0),
        rope=_hf_rope(fields),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=is_qwen2 or attention_bias,
        out_bias=attention_bias,
        mlp_bias=is_llama and fields.boolean("mlp_bias", False),
        windows=_hf_windows(fields, architecture),
        dtype=fields.choice("dtype" if fields.has("dtype") else "torch_dtype", DTYPES, "float32"),
        bos_token_id=_token_id(fields, "bos_token_id", vocab_size),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size=vocab_size),
    )


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Return the config in a GGUF file's metadata. Raises ModelLoadError.

    The size of the vocabulary, tied embeddings, biases and the dtype come from the list of tensors instead.
    """
    fields = Fields(file.metadata, file.path)
    gguf_architecture = fields.choice("general.architecture", _ARCHITECTURE_OF_GGUF)
    key = (gguf_architecture + ".{}").format
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        reason = "so it holds no model (perhaps only a tokenizer)"
        raise ModelLoadError(f"{file.path}: has no matrix token_embd.weight, {reason}")
    if fields.integer(key("expert_count"), 0, min=0) > 0:
        raise fields.wrong(key("expert_count"), "0: mixtures of experts are not supported")
    hidden_size, vocab_size = fields.integer(key("embedding_length")), embedding.shape[0]
    num_layers = fields.integer(key("block_count"), max=MAX_LAYERS)
    num_heads = fields.integer(key("attention.head_count"))
    head_size = _head_size(fields, key("attention.key_length"), hidden_size, num_heads)
    for size_key in (key("attention.value_length"), key("rope.dimension_count")):
        if fields.integer(size_key, head_size) != head_size:
            raise fields.wrong(size_key, f"the head size, {head_size}")
    matrix_types = {tensor.type_name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    # A reply ends with the end of the text, of the turn, or of a message to a tool.
    stop_keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    stop_ids = [i for stop_key in stop_keys for i in fields.token_ids(stop_key, vocab_size=vocab_size)]
    return ModelConfig(
        architecture=_ARCHITECTURE_OF_GGUF[gguf_architecture],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer(key("feed_forward_length")),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, key("attention.head_count_kv"), num_heads),
        head_size=head_size,
        rms_norm_eps=fields.number(key("attention.layer_norm_rms_epsilon"), above=0),
        rope=_gguf_rope(file, fields, gguf_architecture, head_size),
        max_position_embeddings=fields.integer(key("context_length")),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        windows=(_gguf_window(fields, gguf_architecture),) * num_layers,
        dtype="bfloat16" if matrix_types == {"BF16"} else "float16" if matrix_types == {"F16"} else "float32",
        bos_token_id=_token_id(fields, "tokenizer.ggml.bos_token_id", vocab_size),
        eos_token_ids=tuple(dict.fromkeys(stop_ids)),
    )


def _hf_architecture(fields: Fields) -> str:
    names = fields.data.get("architectures")
    if not names:
        fallback = _ARCHITECTURE_OF_MODEL_TYPE.get(str(fields.data.get("model_type")))
        names = [fallback] if fallback else names
    if isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES:
        return str(names[0])
    raise fields.wrong("architectures", f"one of {', '.join(ARCHITECTURES)}: give a model of one of these families")


def _token_id(fields: Fields, key: str, vocab_size: int) -> int | None:
    return fields.integer(key, min=0, max=vocab_size - 1) if fields.has(key) else None


def _num_kv_heads(fields: Fields, key: str, num_heads: int) -> int:
    num_kv_heads = fields.integer(key, num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong(key, f"a divisor of the {num_heads} query heads")
    return num_kv_heads


def _head_size(fields: Fields, key: str, hidden_size: int, num_heads: int) -> int:
    if not fields.has(key) and hidden_size % num_heads:
        raise fields.wrong(key, f"an even integer, as {num_heads} heads do not divide hidden size {hidden_size}")
    head_size = fields.integer(key, hidden_size // num_heads)
    if head_size % 2:
        raise ModelLoadError(f"{fields.path}: the head size ({key}) is {head_size}, rotary embedding needs an even one")
    return head_size


def _hf_rope(fields: Fields) -> RopeConfig:
    key = "rope_scaling" if fields.data.get("rope_scaling") else "rope_parameters"
    rope = fields.mapping(key)
    if any(isinstance(value, dict) for value in rope.data.values()):
        wanted = "one rotary embedding for all layers: one per layer type is not supported"
        raise fields.wrong(key, wanted)
    theta = fields.number("rope_theta", DEFAULT_THETA, above=1)
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        reason = "rotary embedding of a part of each head is not supported"
        raise ModelLoadError(f"{fields.path}: partial_rotary_factor is {partial:g}, wanted 1: {reason}")
    kind = rope.choice("rope_type" if rope.has("rope_type") else "type", ROPE_KINDS, "default")
    max_position = fields.integer("max_position_embeddings")
    # A value beside rope_scaling overrides the one inside, as in transformers.
    original = rope.integer("original_max_position_embeddings", max_position)
    original = fields.integer("original_max_position_embeddings", original)
    return _checked_rope(rope, kind, rope.number("rope_theta", theta, above=1), original, max_position)


def _checked_rope(rope: Fields, kind: str, theta: float, original: int, max_position: int) -> RopeConfig:
    """Read the parameters that rotary embeddings of this `kind` have; positions are in tokens."""
    if kind == "default":
        return RopeConfig(theta=theta)
    implied = max_position / original if kind == "yarn" else None
    factor = rope.number("factor", implied, min=1)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor", above=0), rope.number("high_freq_factor", above=0)
        if high <= low:
            raise rope.wrong("high_freq_factor", f"a number above low_freq_factor, {low:g}")
        return RopeConfig(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    beta_fast, beta_slow = rope.number("beta_fast", 32.0, above=0), rope.number("beta_slow", 1.0, above=0)
    if beta_fast < beta_slow:
        raise rope.wrong("beta_fast", f"a number from beta_slow, {beta_slow:g}")

    names = [name for name in ("attention_factor", "mscale", "mscale_all_dim") if rope.has(name)]
    more: dict[str, Any] = {name: rope.number(name, above=0) for name in names}
    more |= {"beta_fast": beta_fast, "beta_slow": beta_slow, "truncate": rope.boolean("truncate", True)}
    return RopeConfig(theta, kind, factor, original, **more)


def _hf_windows(fields: Fields, architecture: str) -> tuple[int | None, ...]:
    num_layers = fields.integer("num_hidden_layers", max=MAX_LAYERS)
    # Llama has no windows, whatever the file says; Qwen2 has them only if use_sliding_window is true.
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    has_windows = fields.boolean("use_sliding_window", False) if is_qwen2 else architecture == "MistralForCausalLM"
    window = fields.integer("sliding_window") if has_windows and fields.has("sliding_window") else None
    first = fields.integer("max_window_layers", 28, min=0) if is_qwen2 else 0
    windows = tuple(window if layer >= first else None for layer in range(num_layers))
    if not fields.has("layer_types"):
        return windows
    layer_types = fields.data["layer_types"]
    is_list = isinstance(layer_types, list) and len(layer_types) == num_layers
    if not is_list or any(kind not in ("full_attention", "sliding_attention") for kind in layer_types):
        raise fields.wrong("layer_types", f"{num_layers} times full_attention or sliding_attention")
    if "sliding_attention" in layer_types and window is None:
        raise fields.wrong("layer_types", "full_attention only, as this model has no sliding window in use")
    typed = tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    if not is_qwen2 and typed != windows:
        raise fields.wrong("layer_types", f"the same type for all layers of {architecture}, as sliding_window says")
    return typed


def _gguf_window(fields: Fields, gguf_architecture: str) -> int | None:
    key = f"{gguf_architecture}.attention.sliding_window"
    if not fields.has(key) or fields.data[key] == 0:
        return None
    if gguf_architecture != "llama" or fields.has(key + "_pattern"):
        raise fields.wrong(key, "none: the file does not say which layers have it")
    return fields.integer(key)


def _gguf_rope(file: GGUFFile, fields: Fields, gguf_architecture: str, head_size: int) -> RopeConfig:
    """Return the rotary embedding's config: unscaled, linear, yarn, or a factor per frequency (`rope_freqs.weight`).

    Raises ModelLoadError for metadata that is invalid or not supported.
    """

    def key(name: str) -> str:
        return f"{gguf_architecture}.rope.{name}"

    theta = fields.number(key("freq_base"), DEFAULT_THETA, above=1)
    kind = fields.choice(key("scaling.type"), ("none", "linear", "yarn"), "none")
    factor = fields.number(key("scaling.factor"), fields.number(key("scale_linear"), 1.0, min=0), min=0)
    # Older files have a factor without a type, which means linear; factors 0 and 1 both mean no scaling.
    if kind == "none" and factor > 1 and not fields.has(key("scaling.type")):
        kind = "linear"
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise fields.wrong(key("scaling.type"), "none beside a tensor rope_freqs.weight")
        factors = tuple(file.read_rows("rope_freqs.weight", slice(None)).ravel().tolist())
        if len(factors) != head_size // 2 or not all(0 < value < math.inf for value in factors):
            wanted = f"{head_size // 2} that are positive and finite"
            raise ModelLoadError(f"{file.path}: rope_freqs.weight holds {len(factors)} values, wanted {wanted}")
        return RopeConfig(theta, "llama3", freq_factors=factors)
    if kind == "none":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, max(factor, 1.0))
    unsupported = {"scaling.yarn_ext_factor": 1.0, "scaling.yarn_attn_factor": 1.0, "scaling.yarn_log_multiplier": 0.0}
    for name, neutral in unsupported.items():
        if fields.number(key(name), neutral) != neutral:
            raise fields.wrong(key(name), f"{neutral:g}: other values are not supported")
    factor = fields.number(key("scaling.factor"), min=1)
    context_len = fields.integer(f"{gguf_architecture}.context_length")
    original = fields.integer(key("scaling.original_context_length"), context_len)
    attn_key = key("scaling.attn_factor")
    # GGUF's attn_factor is multiplied by YaRN's formula; transformers' attention_factor replaces the formula.
    scale = fields.number(attn_key, above=0) * (0.1 * math.log(factor) + 1.0) if fields.has(attn_key) else None
    fast, slow = (fields.number(key(f"scaling.yarn_beta_{x}"), y, above=0) for x, y in (("fast", 32.0), ("slow", 1.0)))
    return RopeConfig(theta, kind, factor, original, beta_fast=fast, beta_slow=slow, attention_factor=scale)
