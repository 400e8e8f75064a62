"""From GGUF metadata to the config.json that the same model would have, which its family then reads.

The size of the vocabulary, tied embeddings, biases and the dtype come from the list of tensors. Source of the keys:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config.decoder import DecoderConfig
from ..config.hf import FULL, MAX_LAYERS, ROPE_OBJECTS, SLIDING
from ..config.rope import DEFAULT_THETA, RopeConfig, checked_factors
from ..errors import ModelLoadError
from ..families.table import BY_GGUF
from ..fields import Fields
from ..rope import inverse_frequencies
from .gguf_ends import end_token_ids
from .reading import config_from_hf

if TYPE_CHECKING:
    from ..formats.gguf import GGUFFile

SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
"""Key of config.json → key of the metadata behind the architecture's name."""
NUM_LAYERS_27B = {"gemma2": 46, "gemma3": 62}
"""Only the size of 27B parameters divides scores by √(hidden size ÷ heads) and not by √(head size).

Files do not say which, and llama.cpp knows the size by its number of layers too (src/models/gemma2.cpp, gemma3.cpp).
"""
EXPERT_KEYS = {
    "llama": "num_local_experts", "qwen2moe": "num_experts", "qwen3moe": "num_experts", "gpt-oss": "num_local_experts",
}  # fmt: skip
"""Architecture whose files may have experts → key of config.json for their number."""
ALWAYS_SPARSE = EXPERT_KEYS.keys() - {"llama"}
"""Architectures without dense models: their files name a number of experts."""
_STAYS_FLOAT32 = re.compile(r"\.ffn_gate_inp\.weight$|_exps\.bias$")
"""Names of tensors of several axes that llama.cpp's converter writes as float32, whatever the dtype of the model."""
_ATTENTION_BIAS = re.compile(r"blk\.\d+\.attn_(q|k|v|output)\.bias")
_MLP_BIAS = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.bias")
GEMMA3_LAYERS_OF_FACTOR_8 = (34, 48, 62)
"""Gemma 3 with 4B, 12B and 27B parameters: layers without a window have a linear factor 8, which some files omit."""


def config_from_gguf(file: GGUFFile, overrides: Mapping[str, Any] | None = None) -> DecoderConfig:
    """Return the config in a GGUF file's metadata, after the `overrides` of `hf_overrides`.

    The metadata are turned into the content of config.json, and `overrides` are merged into that. Divisors of the
    rotary frequencies that config.json cannot express are set on the config afterwards, unless an override names a kind
    of rotary scaling or turns it off. Raises ModelLoadError.
    """
    fields = Fields(file.metadata, file.path)
    architecture = fields.choice("general.architecture", BY_GGUF)
    reader = _Metadata(file, fields, architecture)
    config = config_from_hf(reader.config(), file.path, names=reader.names, overrides=overrides)
    scalings = [overrides[key] for key in ROPE_OBJECTS if key in overrides] if overrides else []
    # An override of null turns scaling off, and one with a type names another scaling: then the divisors do not count.
    if reader.freq_factors is None or any(obj is None or {"rope_type", "type"} & obj.keys() for obj in scalings):
        return config
    changes: dict[str, Any] = {"kind": "llama3", "freq_factors": reader.freq_factors}
    ropes = (None if rope is None else replace(rope, **changes) for rope in config.ropes)
    return replace(config, ropes=tuple(ropes))


class _Metadata:
    """The metadata of one file, read as the content of config.json."""

    def __init__(self, file: GGUFFile, fields: Fields, architecture: str):
        """Keep the metadata `fields` of the file, and map keys of config.json to the file's keys for the same values.

        The file's keys begin with its `architecture`, as in "llama.block_count" for `num_hidden_layers`. `names` holds
        the map: values are read by it, and errors name the file's key.
        """
        self.file, self.fields, self.architecture = file, fields, architecture
        self.freq_factors: tuple[float, ...] | None = None
        """Divisors of the rotary frequencies, if llama3's parameters cannot give them; `config` sets them."""
        self.names = {key: self.key(name) for key, name in SIZES.items()} | {
            "num_key_value_heads": self.key("attention.head_count_kv"),
            "head_dim": self.key("attention.key_length"),
            "num_hidden_layers": self.key("block_count"),
            "num_experts": self.key("expert_count"),
            "num_local_experts": self.key("expert_count"),
            "num_experts_per_tok": self.key("expert_used_count"),
            "moe_intermediate_size": self.key("expert_feed_forward_length"),
            "shared_expert_intermediate_size": self.key("expert_shared_feed_forward_length"),
            "rms_norm_eps": self.key("attention.layer_norm_rms_epsilon"),
            "sliding_window": self.key("attention.sliding_window"),
            "attn_logit_softcapping": self.key("attn_logit_softcapping"),
            "final_logit_softcapping": self.key("final_logit_softcapping"),
            "eos_token_id": "tokenizer.ggml.eos_token_id",
            "bos_token_id": "tokenizer.ggml.bos_token_id",
        }

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def config(self) -> dict[str, Any]:
        """Return the content that config.json would have for this model.

        Values that the metadata lack come from the tensors: the vocabulary is the rows of the embedding, a head is tied
        if it is not stored, and biases of attention, or of the MLP, exist if a layer has one of them; `GGUFCheckpoint`
        has zeros for the others. The method of the architecture adds the keys of its family, such as windows and the
        rotary embedding. May set `freq_factors`. Raises ModelLoadError for
        metadata that are invalid or not supported, and for a file without an embedding.
        """
        fields, tensors = self.fields, self.file.tensors
        embedding = tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            reason = "so it holds no model (perhaps only a tokenizer)"
            raise ModelLoadError(f"{self.file.path}: has no matrix token_embd.weight, {reason}")
        num_experts = fields.integer(self.names["num_experts"], 0, min=0)
        if num_experts > 0 and self.architecture not in EXPERT_KEYS:
            raise fields.wrong(self.names["num_experts"], f"0: only {', '.join(EXPERT_KEYS)} are read with experts")
        has_experts = any(".ffn_gate_inp." in name for name in tensors)
        if num_experts == 0 and (has_experts or self.architecture in ALWAYS_SPARSE):
            reason = "the number of experts, an integer from 1" + (", as there are tensors ffn_gate_inp" * has_experts)
            raise fields.wrong(self.names["num_experts"], f"{reason}: convert the model anew, or take another file")
        config: dict[str, Any] = {key: fields.integer(name) for key, name in self.names.items() if key in SIZES}
        vocab_size = embedding.shape[0]
        config |= {
            "architectures": [BY_GGUF[self.architecture].architecture],
            "vocab_size": vocab_size,
            "num_hidden_layers": fields.integer(self.key("block_count"), max=MAX_LAYERS),
            "rms_norm_eps": fields.number(self.names["rms_norm_eps"], above=0),
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": any(map(_ATTENTION_BIAS.fullmatch, tensors)),
            "mlp_bias": any(map(_MLP_BIAS.fullmatch, tensors)),
            "dtype": self._dtype(),
            "eos_token_id": end_token_ids(fields, vocab_size),
            "bos_token_id": None,  # Unless the file names one, below.
        }
        if fields.has(self.names["bos_token_id"]):
            config["bos_token_id"] = fields.integer(self.names["bos_token_id"], min=0)
        # If these keys are absent, the file's sizes give the values; a family's config.json may have other defaults.
        hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
        config["num_key_value_heads"] = fields.integer(self.names["num_key_value_heads"], num_heads)
        equal_share = None if hidden_size % num_heads else hidden_size // num_heads
        config["head_dim"] = fields.integer(self.names["head_dim"], equal_share)
        self._check_head_size(config["head_dim"])
        if num_experts > 0:
            config |= self._experts(config["intermediate_size"])
        readers = {"gemma2": self._gemma2, "gemma3": self._gemma3, "gpt-oss": self._gpt_oss}
        return config | readers.get(self.architecture, self._llama)(config)

    def _dtype(self) -> str:
        """Return the dtype of the matrices: their own if they share one, else float32; bfloat16 for quantized ones.

        Matrices in both F16 and F32, for example, give float32. One quantized matrix is enough for bfloat16: quantized
        numbers have at most 8 bits, and the kernels for GPUs take bfloat16 alone. On a CPU the engine computes in
        float32 whatever this is. Vectors, such as gains of norms, do not count, nor do routers and biases of experts.
        """
        matrices = (tensor for name, tensor in self.file.tensors.items() if not _STAYS_FLOAT32.search(name))
        kinds = {tensor.type_name for tensor in matrices if len(tensor.shape) > 1}
        if not kinds <= {"F32", "F16", "BF16"}:
            return "bfloat16"
        return "bfloat16" if kinds == {"BF16"} else "float16" if kinds == {"F16"} else "float32"

    def _check_head_size(self, head_size: int) -> None:
        """Raise ModelLoadError if values have another size than keys, or if only a part of each head is rotated."""
        for name in ("attention.value_length", "rope.dimension_count"):
            if self.fields.integer(self.key(name), head_size) != head_size:
                raise self.fields.wrong(self.key(name), f"the head size, {head_size}")

    def _experts(self, inner_width: int) -> dict[str, Any]:
        """Return the keys of config.json that a model with experts has; `inner_width` is that of a dense MLP.

        Raises ModelLoadError for ways to choose experts that the architecture's config.json has no keys for.
        """
        fields, used = self.fields, self.names["num_experts_per_tok"]
        for name, neutral in {"expert_weights_scale": (0.0, 1.0), "expert_group_count": (0, 1)}.items():
            if fields.number(self.key(name), neutral[1], min=0) not in neutral:
                raise fields.wrong(self.key(name), f"{neutral[1]:g}: other values are not supported")
        gating = 3 if self.architecture == "gpt-oss" else 1  # A softmax over the chosen logits, or over all.
        if fields.integer(self.key("expert_gating_func"), gating, min=0) not in (0, gating):
            raise fields.wrong(self.key("expert_gating_func"), f"{gating}: other values are not supported")
        keys = {EXPERT_KEYS[self.architecture]: fields.integer(self.names["num_experts"])}
        keys["num_experts_per_tok"] = fields.integer(used)
        width, shared_width = (self.names[f"{name}_intermediate_size"] for name in ("moe", "shared_expert"))
        if self.architecture == "gpt-oss":
            return {**keys, "intermediate_size": fields.integer(width)}
        if self.architecture == "llama":
            return {**keys, "architectures": ["MixtralForCausalLM"]}
        # As in llama.cpp, the default widths are those of a dense MLP: shared, or divided by the chosen experts.
        keys["moe_intermediate_size"] = fields.integer(width, inner_width // keys["num_experts_per_tok"])
        if self.architecture == "qwen2moe":
            keys["shared_expert_intermediate_size"] = fields.integer(shared_width, inner_width)
        renormalizes = fields.boolean(self.key("expert_weights_norm"), self.architecture == "qwen3moe")
        return {**keys, "norm_topk_prob": renormalizes}

    def _gpt_oss(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of config.json that GPT-OSS has beside those of `config`: windows and the rotary embedding.

        Files do not say that YaRN's ramp begins and ends between frequencies (`truncate` in config.json), as it does in
        all published models.
        """
        rope = self._rope(150_000.0, config["head_dim"])
        return {
            "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
            "sliding_window": self.fields.integer(self.names["sliding_window"]),
            "layer_types": self._layer_types(config["num_hidden_layers"], period=2),
        }

    def _llama(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of config.json that Llama, Mistral and Qwen have beside those of `config`.

        Mistral's files name the architecture llama. They are told apart by a sliding window, which makes a llama file
        one of Mistral; a window that is absent or 0 is none. Raises ModelLoadError for a window of another
        architecture, or of some layers only, since the file does not say which layers have it.
        """
        family_keys = {"rope_parameters": self._rope(DEFAULT_THETA, config["head_dim"])}
        key = self.names["sliding_window"]
        if not self.fields.has(key) or self.fields.data[key] == 0:
            return family_keys
        if self.architecture != "llama" or self.fields.has(key + "_pattern"):
            raise self.fields.wrong(key, "none: the file does not say which layers have it")
        name = "MixtralForCausalLM" if EXPERT_KEYS["llama"] in config else "MistralForCausalLM"
        return {**family_keys, "architectures": [name], "sliding_window": self.fields.integer(key)}

    def _gemma2(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of config.json that Gemma 2 has beside those of `config`.

        An absent key gets llama.cpp's default. The layers 0, 2, 4, … have a window unless the file says otherwise.
        Raises ModelLoadError for layers with a window that have a rotary base of their own, since all layers share one
        rotary embedding.
        """
        fields, rope = self.fields, self._rope(DEFAULT_THETA, config["head_dim"])
        local_base = self.key("rope.freq_base_swa")
        if fields.number(local_base, rope["rope_theta"]) != rope["rope_theta"]:
            raise fields.wrong(local_base, f"{rope['rope_theta']:g}, as on layers without a window")
        return {
            **self._gemma(config),
            "rope_parameters": rope,
            "sliding_window": fields.integer(self.names["sliding_window"], 4096),
            "layer_types": self._layer_types(config["num_hidden_layers"], period=2),
            "attn_logit_softcapping": fields.number(self.names["attn_logit_softcapping"], 50.0, above=0),
            "final_logit_softcapping": fields.number(self.names["final_logit_softcapping"], 30.0, above=0),
        }

    def _gemma3(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of config.json that Gemma 3 has beside those of `config`.

        An absent key gets llama.cpp's default, except for the two of the rotary embedding below. A file without a
        window has full attention on all layers, and one without a soft cap has none.
        """
        fields, num_layers = self.fields, config["num_hidden_layers"]
        # llama.cpp would take a base of 10,000 here; its converter, like config.json, takes 1,000,000.
        full = self._rope(1e6, config["head_dim"])
        scaling_keys = [self.key(f"rope.{name}") for name in ("scaling.type", "scaling.factor", "scale_linear")]
        if num_layers in GEMMA3_LAYERS_OF_FACTOR_8 and not any(map(fields.has, scaling_keys)):
            # No published model of these sizes goes without the factor, so the file has lost it. ollama does the same
            # (model/models/gemma3/model_text.go); llama.cpp takes the file at its word.
            full |= {"rope_type": "linear", "factor": 8.0}
        local_base = fields.number(self.key("rope.freq_base_swa"), 1e4, above=1)
        family_keys = {
            **self._gemma(config),
            "rope_parameters": {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": local_base}},
            "layer_types": [FULL] * num_layers,
        }
        soft_cap = fields.number(self.names["final_logit_softcapping"], 0.0, min=0)
        family_keys["final_logit_softcapping"] = soft_cap or None
        if window := fields.integer(self.names["sliding_window"], 0, min=0):
            family_keys |= {"sliding_window": window, "layer_types": self._layer_types(num_layers, period=6)}
        return family_keys

    def _gemma(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of config.json that Gemma 2 and 3 share: the activation and the scale of attention scores.

        Scores are divided by √query_pre_attn_scalar.
        """
        # A file does not say by what scores are divided: the 27B models differ from the others, and are known by their
        # number of layers.
        is_27b = config["num_hidden_layers"] == NUM_LAYERS_27B[self.architecture]
        per_head = config["hidden_size"] // config["num_attention_heads"]
        return {
            "query_pre_attn_scalar": per_head if is_27b else config["head_dim"],
            "hidden_activation": "gelu_pytorch_tanh",
        }

    def _layer_types(self, num_layers: int, *, period: int) -> list[str]:
        """Return the attention type of each layer, SLIDING or FULL.

        The last of each `period` layers has full attention, and the others have a window. The file may give another
        period, where 0 means that all layers have a window, or a list that says for each layer whether it has one. With
        period 6 the layers 5, 11, 17, … have full attention.
        """
        fields, key = self.fields, self.key("attention.sliding_window_pattern")
        if isinstance(fields.data.get(key), list):
            has_window = fields.items(key, (bool, int))
            if len(has_window) != num_layers:
                raise fields.wrong(key, f"a value for each of the {num_layers} layers")
        else:
            period = fields.integer(key, period, min=0)
            has_window = [period == 0 or layer % period < period - 1 for layer in range(num_layers)]
        return [SLIDING if has else FULL for has in has_window]

    def _rope(self, default_theta: float, head_size: int) -> dict[str, Any]:
        """Return the rotary embedding as the object `rope_parameters` of config.json.

        It is unscaled, linear or yarn, as the metadata say, or llama3 if the file has a tensor `rope_freqs.weight` with
        a divisor for each frequency. `default_theta` counts if the file names no base. `head_size` is in lanes.
        """

        def key(name: str) -> str:
            return self.key(f"rope.{name}")

        fields = self.fields
        theta = {"rope_theta": fields.number(key("freq_base"), default_theta, above=1)}
        kind = fields.choice(key("scaling.type"), ("none", "linear", "yarn"), "none")
        factor = fields.number(key("scaling.factor"), fields.number(key("scale_linear"), 1.0, min=0), min=0)
        # Older files have a factor without a type, which means linear; factors 0 and 1 both mean no scaling.
        if kind == "none" and factor > 1 and not fields.has(key("scaling.type")):
            kind = "linear"
        if "rope_freqs.weight" in self.file.tensors:
            if kind != "none":
                raise fields.wrong(key("scaling.type"), "none beside a tensor rope_freqs.weight")
            return theta | self._llama3(theta["rope_theta"], head_size)
        if kind == "none":
            return {**theta, "rope_type": "default"}
        if kind == "linear":
            return {**theta, "rope_type": "linear", "factor": max(factor, 1.0)}  # A factor of 0 means no scaling.
        return {**theta, "rope_type": "yarn", **self._yarn()}

    def _llama3(self, theta: float, head_size: int) -> dict[str, Any]:
        """Return the parameters of llama3 scaling that give the divisors in `rope_freqs.weight`.

        All published models share three of the four parameters, and the fourth, the factor, is the largest divisor. If
        these parameters do not give the file's divisors, the divisors are kept in `freq_factors`, and the embedding is
        described as unscaled.
        """
        factors = self.file.read_rows("rope_freqs.weight", slice(None)).ravel().astype(np.float64)
        checked = checked_factors(factors.tolist(), head_size, f"{self.file.path}: rope_freqs.weight")
        largest = round(max(checked), 3)  # Rounded, since the file holds float32: 7.9999995 stands for 8.
        # 8192 is the original context, in tokens.
        published = RopeConfig(theta, "llama3", largest, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
        plain = inverse_frequencies(RopeConfig(theta), head_size)
        if not np.allclose(plain / inverse_frequencies(published, head_size), factors, rtol=1e-4):
            self.freq_factors = checked
            return {"rope_type": "default"}
        return {
            "rope_type": "llama3",
            "factor": published.factor,
            "low_freq_factor": published.low_freq_factor,
            "high_freq_factor": published.high_freq_factor,
            "original_max_position_embeddings": published.original_max_position,
        }

    def _yarn(self) -> dict[str, Any]:
        """Return the parameters of YaRN under the names that config.json has for them.

        llama.cpp's converter writes `attention_factor` of config.json, which takes the place of YaRN's own factor,
        0.1 ln(factor) + 1, as `yarn_attn_factor`. `attn_factor` multiplies either of the two. Raises ModelLoadError for
        further parameters of llama.cpp, which config.json does not have, unless they have the value that changes
        nothing.
        """
        fields, prefix = self.fields, self.key("rope.scaling.")
        for name, neutral in {"yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}.items():
            if fields.number(prefix + name, neutral) != neutral:
                raise fields.wrong(prefix + name, f"{neutral:g}: other values are not supported")
        factor = fields.number(prefix + "factor", min=1)
        context_len = fields.integer(self.key("context_length"))
        parameters: dict[str, Any] = {
            "factor": factor,
            "original_max_position_embeddings": fields.integer(prefix + "original_context_length", context_len),
            "beta_fast": fields.number(prefix + "yarn_beta_fast", 32.0, above=0),
            "beta_slow": fields.number(prefix + "yarn_beta_slow", 1.0, above=0),
        }
        if fields.has(prefix + "yarn_attn_factor") or fields.has(prefix + "attn_factor"):
            own_factor = fields.number(prefix + "yarn_attn_factor", 0.1 * math.log(factor) + 1.0, above=0)
            parameters["attention_factor"] = own_factor * fields.number(prefix + "attn_factor", 1.0, above=0)
        return parameters
