"""From GGUF metadata to the config.json that the same model would have, which its family then reads.

The size of the vocabulary, tied embeddings, biases and the dtype come from the list of tensors. Source of the keys:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..errors import ModelLoadError
from ..families.table import BY_GGUF
from ..io.fields import Fields
from .decoder import DecoderConfig
from .hf import MAX_LAYERS
from .reading import config_from_hf
from .rope import DEFAULT_THETA

if TYPE_CHECKING:
    from ..io.gguf import GGUFFile

SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
"""Key of config.json → key of the metadata behind the architecture's name."""


def config_from_gguf(file: GGUFFile) -> DecoderConfig:
    """Return the config in a GGUF file's metadata. Raises ModelLoadError."""
    fields = Fields(file.metadata, file.path)
    architecture = fields.choice("general.architecture", BY_GGUF)
    reader = _Metadata(file, fields, architecture)
    return config_from_hf(reader.config(), file.path, names=reader.names)


class _Metadata:
    """The metadata of one file. `names` says what the file calls the keys of the config."""

    def __init__(self, file: GGUFFile, fields: Fields, architecture: str):
        self.file, self.fields, self.architecture = file, fields, architecture
        self.names = {key: self.key(name) for key, name in SIZES.items()} | {
            "num_key_value_heads": self.key("attention.head_count_kv"),
            "head_dim": self.key("attention.key_length"),
            "num_hidden_layers": self.key("block_count"),
            "rms_norm_eps": self.key("attention.layer_norm_rms_epsilon"),
            "eos_token_id": "tokenizer.ggml.eos_token_id",
            "bos_token_id": "tokenizer.ggml.bos_token_id",
            "freq_factors": "rope_freqs.weight",
        }

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def config(self) -> dict[str, Any]:
        """Return the content of config.json. Raises ModelLoadError for metadata that is invalid or not supported."""
        fields, tensors = self.fields, self.file.tensors
        embedding = tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            reason = "so it holds no model (perhaps only a tokenizer)"
            raise ModelLoadError(f"{self.file.path}: has no matrix token_embd.weight, {reason}")
        if fields.integer(self.key("expert_count"), 0, min=0) > 0:
            raise fields.wrong(self.key("expert_count"), "0: mixtures of experts are not supported")
        config: dict[str, Any] = {key: fields.integer(name) for key, name in self.names.items() if key in SIZES}
        vocab_size = embedding.shape[0]
        config |= {
            "architectures": [BY_GGUF[self.architecture].architecture],
            "vocab_size": vocab_size,
            "num_hidden_layers": fields.integer(self.key("block_count"), max=MAX_LAYERS),
            "rms_norm_eps": fields.number(self.names["rms_norm_eps"], above=0),
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": bool({"blk.0.attn_q.bias", "blk.0.attn_output.bias"} & tensors.keys()),
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
            "dtype": self._dtype(),
            "rope_parameters": self._rope(),
            "eos_token_id": self._stop_ids(vocab_size),
        }
        for key in ("num_key_value_heads", "head_dim"):
            if fields.has(self.names[key]):
                config[key] = fields.integer(self.names[key])
        if fields.has(self.names["bos_token_id"]):
            config["bos_token_id"] = fields.integer(self.names["bos_token_id"], min=0)
        else:
            config["bos_token_id"] = None
        self._check_head_size(config)
        return config | self._window(config)

    def _dtype(self) -> str:
        kinds = {tensor.type_name for tensor in self.file.tensors.values() if len(tensor.shape) > 1}
        return "bfloat16" if kinds == {"BF16"} else "float16" if kinds == {"F16"} else "float32"

    def _stop_ids(self, vocab_size: int) -> list[int]:
        """Return the tokens that end a reply: the end of the text, of the turn, or of a message to a tool."""
        keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
        ids = [token_id for key in keys for token_id in self.fields.token_ids(key, vocab_size=vocab_size)]
        return list(dict.fromkeys(ids))

    def _check_head_size(self, config: dict[str, Any]) -> None:
        """Refuse values of another size than keys, and heads that are rotated in parts."""
        head_size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        for name in ("attention.value_length", "rope.dimension_count"):
            if self.fields.integer(self.key(name), head_size) != head_size:
                raise self.fields.wrong(self.key(name), f"the head size, {head_size}")

    def _window(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return what config.json says of a sliding window.

        Mistral's files name the architecture llama: the two differ only in their windows.
        """
        key = self.key("attention.sliding_window")
        if not self.fields.has(key) or self.fields.data[key] == 0:
            return {}
        if self.architecture != "llama" or self.fields.has(key + "_pattern"):
            raise self.fields.wrong(key, "none: the file does not say which layers have it")
        return {"architectures": ["MistralForCausalLM"], "sliding_window": self.fields.integer(key)}

    def _rope(self) -> dict[str, Any]:
        """Return the rotary embedding: unscaled, linear, yarn, or a factor per frequency (`rope_freqs.weight`)."""

        def key(name: str) -> str:
            return self.key(f"rope.{name}")

        fields = self.fields
        theta = {"rope_theta": fields.number(key("freq_base"), DEFAULT_THETA, above=1)}
        kind = fields.choice(key("scaling.type"), ("none", "linear", "yarn"), "none")
        factor = fields.number(key("scaling.factor"), fields.number(key("scale_linear"), 1.0, min=0), min=0)
        # Older files have a factor without a type, which means linear; factors 0 and 1 both mean no scaling.
        if kind == "none" and factor > 1 and not fields.has(key("scaling.type")):
            kind = "linear"
        if "rope_freqs.weight" in self.file.tensors:
            if kind != "none":
                raise fields.wrong(key("scaling.type"), "none beside a tensor rope_freqs.weight")
            factors = self.file.read_rows("rope_freqs.weight", slice(None)).ravel().tolist()
            return {**theta, "rope_type": "llama3", "freq_factors": factors}
        if kind == "none":
            return {**theta, "rope_type": "default"}
        if kind == "linear":
            return {**theta, "rope_type": "linear", "factor": max(factor, 1.0)}
        return {**theta, "rope_type": "yarn", **self._yarn()}

    def _yarn(self) -> dict[str, Any]:
        fields, prefix = self.fields, self.key("rope.scaling.")
        for name, neutral in {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}.items():
            if fields.number(prefix + name, neutral) != neutral:
                raise fields.wrong(prefix + name, f"{neutral:g}: other values are not supported")
        factor = fields.number(prefix + "factor", min=1)
        context_len = fields.integer(self.key("context_length"))
        found: dict[str, Any] = {
            "factor": factor,
            "original_max_position_embeddings": fields.integer(prefix + "original_context_length", context_len),
            "beta_fast": fields.number(prefix + "yarn_beta_fast", 32.0, above=0),
            "beta_slow": fields.number(prefix + "yarn_beta_slow", 1.0, above=0),
        }
        if fields.has(prefix + "attn_factor"):
            # It is multiplied by YaRN's formula here; transformers' attention_factor replaces the formula.
            scale = fields.number(prefix + "attn_factor", above=0)
            found["attention_factor"] = scale * (0.1 * math.log(factor) + 1.0)
        return found
