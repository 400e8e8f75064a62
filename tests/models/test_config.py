"""config.json is read as transformers reads it, a GGUF file gives the same config, and bad values are refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from transformers import CONFIG_MAPPING

from jpaged.models.config.decoder import DecoderConfig
from jpaged.models.config.experts import read_grouped_routing
from jpaged.models.config.rope import RopeConfig
from jpaged.models.errors import ModelLoadError
from jpaged.models.families.table import BY_ARCHITECTURE
from jpaged.models.fields import Fields
from jpaged.models.formats.gguf import read_gguf
from jpaged.models.opening.gguf_config import config_from_gguf
from jpaged.models.opening.reading import config_from_hf
from jpaged.models.rope import inverse_frequencies

from ..gguf_file import write_gguf

PATH = Path("somewhere/config.json")
FAMILIES = Path(__file__).parents[1] / "golden" / "families"
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
MULTIPLIERS = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "logits_divisor",
}
"""Granite's key → field of the config."""
SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], **SIZES}
MISTRAL = {"architectures": ["MistralForCausalLM"], **SIZES}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], **SIZES}
WITHOUT_KV_HEADS = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}

VALID = {
    "llama, sizes only": LLAMA,
    "llama, kv heads absent": WITHOUT_KV_HEADS,
    "llama, kv heads and head size null": LLAMA | {"num_key_value_heads": None, "head_dim": None},
    "llama, head size of its own": LLAMA | {"head_dim": 32},
    "llama, biases everywhere": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama, tied, stop ids": LLAMA | {"tie_word_embeddings": True, "eos_token_id": [3, 4, 5], "bos_token_id": None},
    "llama, no stop id": LLAMA | {"eos_token_id": None},
    "llama, window that llama does not have": LLAMA | {"sliding_window": 8},
    "llama, old rope keys": LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama, new rope keys": LLAMA | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
    "llama, rope null": LLAMA | {"rope_scaling": None, "rope_theta": 123},
    "llama, linear by the oldest key": LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}},
    "llama, llama3 without its original length": LLAMA
    | {"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 1, "high_freq_factor": 4}},
    "llama, llama3 with another original length beside it": LLAMA
    | {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "original_max_position_embeddings": 4096},
    "mistral, window absent": MISTRAL,
    "mistral, window null": MISTRAL | {"sliding_window": None, "max_position_embeddings": 512, "rms_norm_eps": 1e-5},
    "mistral, window": MISTRAL | {"sliding_window": 16},
    "qwen2, sizes only": QWEN2,
    "qwen2, window not in use": QWEN2 | {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 2},
    "qwen2, window from layer 2": QWEN2 | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    "qwen2, window from layer 28 of 4": QWEN2 | {"use_sliding_window": True, "sliding_window": 16},
    "qwen2, window by layer type": QWEN2
    | {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "qwen2, yarn": QWEN2 | {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}, "torch_dtype": "bfloat16"},
    "qwen2, yarn with everything": QWEN2
    | {
        "rope_scaling": {
            "rope_type": "yarn",
            "beta_fast": 24.0,
            "beta_slow": 2.0,
            "attention_factor": 1.5,
            "mscale": 0.7,
            "mscale_all_dim": 0.8,
            "truncate": False,
            **YARN,
        },
        "dtype": "float16",
    },
}


OLD_LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
OLD_KEYS = {
    "qwen3, theta beside": ("Qwen3ForCausalLM", {"head_dim": 32, "rope_theta": 1e6}),
    "qwen3, windows": (
        "Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "phi3, longrope": (
        "Phi3ForCausalLM",
        {
            "rope_scaling": {"type": "longrope", **OLD_LONGROPE}, "original_max_position_embeddings": 1024,
            "sliding_window": 9,
        },
    ),
    "phi3, yarn that is longrope": (
        "Phi3ForCausalLM",
        {
            "rope_scaling": {"type": "yarn", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
            "partial_rotary_factor": 0.75,
            "rope_theta": 5e5,
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        {
            "attention_multiplier": 0.5, "embedding_multiplier": 12, "residual_multiplier": 0.2, "logits_scaling": 8.0,
            "rope_theta": 1e7, "rope_scaling": {"type": "linear", "factor": 2.0}, "attention_bias": True,
        },
    ),
    "smollm3, interval": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2, "rope_theta": 5e6}),
    "smollm3, layers": (
        "SmolLM3ForCausalLM",
        {"no_rope_layers": [1, 0, 0, 1], "use_sliding_window": True, "sliding_window": 8, "tie_word_embeddings": False},
    ),
    "olmo2": ("Olmo2ForCausalLM", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", **YARN}}),
    "olmo3": (
        "Olmo3ForCausalLM",
        {"rope_theta": 3e5, "rope_scaling": {"rope_type": "yarn", **YARN}, "sliding_window": 8},
    ),
    "gemma2": ("Gemma2ForCausalLM", {"rope_theta": 2e4, "query_pre_attn_scalar": 144, "sliding_window": 8}),
    "gemma2, no caps": (
        "Gemma2ForCausalLM", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 12},
    ),
    "gemma3, pattern": (
        "Gemma3ForCausalLM",
        {
            "sliding_window_pattern": 2, "sliding_window": 8, "rope_theta": 2e6, "rope_local_base_freq": 3e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "query_pre_attn_scalar": 168,
        },
    ),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": 8}),
    "mixtral, experts by their other name": ("MixtralForCausalLM", {"num_experts": 6, "num_experts_per_tok": 3}),
    "qwen2_moe, windows": (
        "Qwen2MoeForCausalLM",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3, "num_experts": 6, "qkv_bias": False},
    ),
    "qwen2_moe, some dense": (
        "Qwen2MoeForCausalLM",
        {"decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": True, "moe_intermediate_size": 24},
    ),
    "qwen3_moe, windows": (
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 32, "use_sliding_window": True, "sliding_window": 8, "num_experts": 16, "mlp_only_layers": [3],
            "decoder_sparse_step": 2,
        },
    ),
    "gpt_oss": ("GptOssForCausalLM", {"num_local_experts": 8}),
    "gpt_oss, layer types": (
        "GptOssForCausalLM",
        {
            "layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 8, "attention_bias": False,
            "rope_theta": 1e5, "rope_scaling": {"rope_type": "yarn", "truncate": False, **YARN},
        },
    ),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 16, "norm_topk_prob": True, "attention_bias": True}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 128, "n_inner": 100, "scale_attn_weights": False},
    ),
    "gpt2, scaled by layer": (
        "GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"},
    ),
    "pythia": ("GPTNeoXForCausalLM", {"rotary_pct": 0.5, "rotary_emb_base": 25_000, "use_parallel_residual": False}),
    "gpt_neox, whole heads": (
        "GPTNeoXForCausalLM",
        {"rotary_pct": 1.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "attention_bias": False},
    ),
}  # fmt: skip
"""Configs with the keys of transformers 4, in which most files are written."""
OLD = {name: {"architectures": [architecture], **SIZES, **keys} for name, (architecture, keys) in OLD_KEYS.items()}


def windows_of(config):
    """Return the window of each layer, as transformers' attention layers take it from their config."""
    window = getattr(config, "sliding_window", None)
    if config.model_type in ("llama", "granite", "olmo2", "olmoe", "gpt2", "gpt_neox"):
        window = None
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def ropes_of(config):
    """Return the parameters of the rotary embedding of each layer, None for none."""
    if config.model_type == "gpt2":
        return [None] * config.num_hidden_layers
    config.standardize_rope_params()  # As its rotary embedding does first.
    if "full_attention" in config.rope_parameters:
        return [config.rope_parameters[kind] for kind in config.layer_types]
    has_rope = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
    return [config.rope_parameters if has else None for has in has_rope]


def scales_of(config, head_size):
    """Return the factor of the scores of each layer, as transformers' attention layers compute it."""
    scale = head_size**-0.5
    if config.model_type == "granite":
        scale = config.attention_multiplier
    elif config.model_type.startswith("gemma"):
        scale = config.query_pre_attn_scalar**-0.5
    elif not getattr(config, "scale_attn_weights", True):
        scale = 1.0
    by_layer = getattr(config, "scale_attn_by_inverse_layer_idx", False)
    return [scale / (layer + 1 if by_layer else 1) for layer in range(config.num_hidden_layers)]


def stop_ids_of(config):
    ids = config.eos_token_id
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def reference_config(data):
    """Return transformers' config of a copy of `data`, whose nested objects it would change."""
    model_type = BY_ARCHITECTURE[data["architectures"][0]].model_type
    return CONFIG_MAPPING[model_type](**json.loads(json.dumps(data)))


def public_configs():
    paths = sorted((Path(__file__).parents[1] / "public_configs").glob("*.json"))
    return {path.stem: json.loads(path.read_text())["config"] for path in paths}


ALL = {**VALID, **OLD, **public_configs()}


def assert_experts(config, theirs):
    """Compare the experts of a config with those of transformers' config."""
    if not hasattr(theirs, "num_experts_per_tok"):
        assert config.experts is None
        return
    experts = config.experts
    num_experts = theirs.num_local_experts if hasattr(theirs, "num_local_experts") else theirs.num_experts
    assert (experts.num_experts, experts.num_chosen) == (num_experts, theirs.num_experts_per_tok)
    assert experts.width == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert experts.renormalizes == getattr(theirs, "norm_topk_prob", True)
    assert experts.shared_width == getattr(theirs, "shared_expert_intermediate_size", 0)
    step, dense = getattr(theirs, "decoder_sparse_step", 1), getattr(theirs, "mlp_only_layers", [])
    layers = range(theirs.num_hidden_layers)
    assert experts.sparse_layers == tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)


@pytest.mark.parametrize("data", ALL.values(), ids=ALL.keys())
def test_config_json_is_read_as_transformers_reads_it(data):
    config, theirs = config_from_hf(data, PATH), reference_config(data)
    assert config.architecture == data["architectures"][0]
    assert (config.vocab_size, config.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    inner = theirs.n_inner or 4 * theirs.n_embd if theirs.model_type == "gpt2" else theirs.intermediate_size
    assert (config.intermediate_size, config.num_layers) == (inner, theirs.num_hidden_layers)
    is_gpt = theirs.model_type in ("gpt2", "gpt_neox")
    num_kv_heads = theirs.num_attention_heads if is_gpt else theirs.num_key_value_heads
    assert (config.num_heads, config.num_kv_heads) == (theirs.num_attention_heads, num_kv_heads)
    head_size = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    eps = next(getattr(theirs, name) for name in EPSILONS if hasattr(theirs, name))
    assert (config.head_size, config.norm_eps) == (head_size, eps)
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    in_vocabulary = [i for i in (theirs.bos_token_id,) if i is not None and i < theirs.vocab_size]
    assert config.bos_token_id == next(iter(in_vocabulary), None)
    assert config.eos_token_ids == tuple(i for i in stop_ids_of(theirs) if i < theirs.vocab_size)
    assert config.windows == windows_of(theirs)
    assert config.dtype == (str(theirs.dtype or "float32").removeprefix("torch."))
    has_bias = getattr(theirs, "attention_bias", theirs.model_type in ("qwen2", "gpt2"))
    of_qkv = getattr(theirs, "qkv_bias", has_bias)
    assert (config.qkv_bias, config.out_bias) == (of_qkv, has_bias and theirs.model_type != "qwen2")
    assert_experts(config, theirs)
    assert config.mlp_bias == getattr(theirs, "mlp_bias", is_gpt)
    assert list(config.scales) == pytest.approx(scales_of(theirs, head_size))
    is_gemma2 = theirs.model_type == "gemma2"
    assert config.attention_soft_cap == (theirs.attn_logit_softcapping if is_gemma2 else None)
    assert config.logits_soft_cap == getattr(theirs, "final_logit_softcapping", None)
    multipliers = [getattr(theirs, name, 1.0) for name in MULTIPLIERS]
    assert [getattr(config, name) for name in MULTIPLIERS.values()] == multipliers
    for rope, ours in zip(ropes_of(theirs), config.ropes, strict=True):
        if rope is None or ours is None:
            assert rope == ours
            continue
        assert (ours.theta, ours.kind) == (rope["rope_theta"], rope["rope_type"])
        assert ours.original_max_position == rope.get("original_max_position_embeddings")
        share = rope.get("partial_rotary_factor") or 1.0
        assert (ours.rotary_size or head_size) == int(head_size * share)
        assert list(ours.short_factors) == rope.get("short_factor", [])
        assert list(ours.long_factors) == rope.get("long_factor", [])
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate"):
            assert getattr(ours, name) == rope.get(name, getattr(RopeConfig(), name))
        if ours.kind != "longrope":
            for name in ("attention_factor", "mscale", "mscale_all_dim"):
                assert getattr(ours, name) == rope.get(name)
            assert ours.factor == rope.get("factor", 1.0)


@pytest.mark.parametrize("data", {**VALID, **OLD}.values(), ids=[*VALID, *OLD])
def test_a_config_saved_by_transformers_reads_the_same(data, tmp_path):
    """Version 5 of transformers saves other keys than it reads: rope_parameters, dtype, layer_types."""
    reference_config(data).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert config_from_hf(written, PATH) == config_from_hf(data, PATH)


def test_model_type_alone_names_the_architecture():
    data = {"model_type": "qwen2", **SIZES}
    assert config_from_hf(data, PATH) == config_from_hf(QWEN2, PATH)


GEMMA3 = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "sliding_window": 8}
GEMMA3_TEXT = GEMMA3 | {"architectures": ["Gemma3ForCausalLM"]}
WITH_IMAGES = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "vision_config": {"hidden_size": 32},
    "mm_tokens_per_image": 256,
    "torch_dtype": "bfloat16",
    "eos_token_id": [1, 106],
    "text_config": GEMMA3 | {"eos_token_id": 1, "torch_dtype": "float32"},
}


def test_a_model_with_images_is_its_language_model():
    """Its own dtype and stop ids count before those of its text_config."""
    config = config_from_hf(WITH_IMAGES, PATH)
    assert config == config_from_hf(GEMMA3_TEXT | {"dtype": "bfloat16", "eos_token_id": [1, 106]}, PATH)
    assert config_from_hf(config.source, PATH) == config, "what is saved with the weights"
    under_new_key = WITH_IMAGES | {"text_config": WITH_IMAGES["text_config"] | {"dtype": "float32"}}
    assert config_from_hf(under_new_key, PATH).dtype == "bfloat16", "under whatever key either has its own"
    for overrides in ({"text_config": {"sliding_window": 5}}, {"sliding_window": 5}):
        assert 5 in config_from_hf(WITH_IMAGES, PATH, overrides=overrides).windows


@pytest.mark.parametrize("inner", [None, False, True])
@pytest.mark.parametrize("outer", [None, False, True])
@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_the_top_level_alone_says_whether_a_model_with_images_is_tied(name, outer, inner):
    """The class of the whole model ties by default, and what is in `text_config` has no effect in transformers."""
    data = json.loads((FAMILIES / f"{name}_with_images" / "config.json").read_text())
    data |= {"tie_word_embeddings": outer}
    data["text_config"] |= {"tie_word_embeddings": inner}
    for values in (data, data["text_config"]):
        if values["tie_word_embeddings"] is None:
            del values["tie_word_embeddings"]
    theirs = CONFIG_MAPPING[data["model_type"]].from_dict(data)
    assert config_from_hf(data, PATH).tie_word_embeddings is theirs.tie_word_embeddings is (outer is not False)


FLAT = {"rope_type": "default", "rope_theta": 5e5}
OLMO3 = {"architectures": ["Olmo3ForCausalLM"], **SIZES}
FLAT_ROPES = {
    "the defaults": (OLMO3, FLAT),
    "no theta": (OLMO3, {"rope_type": "default"}),
    "no theta, Gemma 3": (GEMMA3_TEXT, {"rope_type": "default"}),
    "as transformers saves it": (OLMO3, {**FLAT, "full_attention": FLAT, "sliding_attention": FLAT}),
}


@pytest.mark.parametrize(("data", "parameters"), FLAT_ROPES.values(), ids=FLAT_ROPES)
def test_parameters_of_all_layers_that_say_what_layer_types_have_are_read(data, parameters):
    """transformers ignores them where each layer type has parameters of its own."""
    config = config_from_hf({**data, "rope_parameters": dict(parameters)}, PATH)
    model_type = BY_ARCHITECTURE[data["architectures"][0]].model_type
    theirs = CONFIG_MAPPING[model_type](**SIZES, rope_parameters=dict(parameters)).rope_parameters
    expected = [theirs["full_attention" if window is None else "sliding_attention"] for window in config.windows]
    assert [(rope.theta, rope.kind) for rope in config.ropes] == [(r["rope_theta"], r["rope_type"]) for r in expected]


OTHER_FLAT_ROPES = {
    "another theta": {**FLAT, "rope_theta": 1e6},
    "yarn": {**FLAT, "rope_type": "yarn", **YARN},
    "another theta beside those of the types": {"rope_theta": 1e4, "full_attention": FLAT, "sliding_attention": FLAT},
}


@pytest.mark.parametrize("parameters", OTHER_FLAT_ROPES.values(), ids=OTHER_FLAT_ROPES)
def test_other_parameters_of_all_layers_are_refused_with_the_reason(parameters):
    reason = "transformers ignores parameters for all layers, and these differ from what it uses"
    message = (
        rf"rope_parameters is .*, wanted objects for full_attention and sliding_attention, .*: {reason}; correct it"
    )
    with pytest.raises(ModelLoadError, match=message):
        config_from_hf({**OLMO3, "rope_parameters": parameters}, PATH)


TWO_NAMES = {
    "one of which is known": (["MyModel", "LlamaForCausalLM"], "llama", "LlamaForCausalLM"),
    "the same twice": (["LlamaForCausalLM"] * 2, "llama", "LlamaForCausalLM"),
    "both known": (["LlamaForCausalLM", "Qwen2ForCausalLM"], "qwen2", "Qwen2ForCausalLM"),
    "both known, another type": (["LlamaForCausalLM", "Qwen2ForCausalLM"], "custom", "LlamaForCausalLM"),
    "one that is no text": ([3, "LlamaForCausalLM"], "llama", "LlamaForCausalLM"),
}


@pytest.mark.parametrize(("names", "model_type", "chosen"), TWO_NAMES.values(), ids=TWO_NAMES)
def test_of_several_architectures_a_known_one_counts(names, model_type, chosen):
    data = {**SIZES, "architectures": names, "model_type": model_type}
    assert config_from_hf(data, PATH).architecture == chosen


def test_one_of_several_architectures_may_be_a_model_with_images():
    data = WITH_IMAGES | {"architectures": ["MyModel", *WITH_IMAGES["architectures"]]}
    assert config_from_hf(data, PATH) == config_from_hf(WITH_IMAGES, PATH)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_may_be_auto_or_have_the_name_of_its_library(key):
    assert config_from_hf(LLAMA | {key: "torch.bfloat16"}, PATH).dtype == "bfloat16"
    automatic = config_from_hf(LLAMA | {key: "auto"}, PATH)
    assert automatic == config_from_hf(LLAMA, PATH)
    assert key not in automatic.source, "the dtype of the stored tensors counts then"
    assert config_from_hf(LLAMA | {"dtype": "bfloat16"}, PATH, overrides={"dtype": "auto"}).source.get("dtype") is None
    inner = WITH_IMAGES | {"torch_dtype": None, "text_config": WITH_IMAGES["text_config"] | {"torch_dtype": "auto"}}
    assert config_from_hf(inner | {key: "auto"}, PATH).dtype == "float32"
    assert config_from_hf(WITH_IMAGES | {"dtype": "auto", "torch_dtype": None}, PATH).dtype == "float32"


@pytest.mark.parametrize(
    ("max_position", "wanted"), [(32768, math.sqrt(1 + math.log(8) / math.log(4096))), (4096, 1.0)]
)
def test_longrope_scales_by_how_much_longer_the_context_has_become(max_position, wanted):
    """Ding et al. 2024, arXiv:2402.13753."""
    scaling = {"type": "su", **OLD_LONGROPE}  # Its first name, which transformers 5 fails to read.
    phi3 = {"architectures": ["Phi3ForCausalLM"], **SIZES, "rope_scaling": scaling}
    lens = {"max_position_embeddings": max_position, "original_max_position_embeddings": 4096}
    rope = config_from_hf(phi3 | lens, PATH).ropes[0]
    assert rope.attention_factor == pytest.approx(wanted)
    assert (rope.for_context(4096).is_long, rope.for_context(4097).is_long) == (False, True)


def test_windows_that_no_sequence_leaves_are_full_attention():
    config = config_from_hf(MISTRAL | {"sliding_window": 16}, PATH)
    assert config.without_idle_windows(16).windows == (None,) * 4
    assert config.without_idle_windows(17) == config


def with_experts(family, **keys):
    return {"architectures": [f"{family}ForCausalLM"], **SIZES, **keys}


def scaled(**rope):
    return LLAMA | {"rope_scaling": rope}


def mistral_with(types):
    return MISTRAL | {"sliding_window": 8, "layer_types": types}


INVALID = {
    "another architecture": (LLAMA | {"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM.*LlamaForCausalLM"),
    "two architectures": (LLAMA | {"architectures": ["BloomForCausalLM", "Llama"]}, "'Llama'.*LlamaForCausalLM"),
    "architecture is a number": (LLAMA | {"architectures": 3}, "architectures is 3"),
    "architecture is a list of lists": (LLAMA | {"architectures": [[]]}, "architectures"),
    "nothing at all": ({}, "architectures is missing"),
    "quantized": (
        LLAMA | {"quantization_config": {"bits": 4}},
        "quant_method is missing, wanted one of fp8, compressed",
    ),
    "another activation": (LLAMA | {"hidden_act": "maxout"}, "hidden_act is 'maxout', wanted one of silu"),
    "unknown rope type": (scaled(rope_type="dynamic", factor=2.0), "dynamic.*default, linear, llama3, yarn, longrope"),
    "rope type is a list": (scaled(rope_type=["linear"]), "rope_type"),
    "rope is a list": (LLAMA | {"rope_scaling": [1]}, "rope_scaling"),
    "rope per layer type": (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
    "factor missing": (scaled(rope_type="linear"), "factor is missing"),
    "factor below 1": (scaled(rope_type="linear", factor=0.5), "factor is 0.5, wanted a number from 1"),
    "factor is NaN": (scaled(rope_type="linear", factor=float("nan")), "factor is nan"),
    "factor is infinite": (scaled(rope_type="linear", factor=float("inf")), "factor is inf"),
    "factor beyond any context": (scaled(rope_type="linear", factor=1e306), "factor is 1e.306, wanted .* up to 1e.06"),
    "longrope of an original context of 1": (
        {
            **LLAMA,
            "architectures": ["Phi3ForCausalLM"],
            "rope_scaling": {"type": "su", **OLD_LONGROPE},
            "original_max_position_embeddings": 1,
        },
        "original_max_position_embeddings is 1, wanted an integer from 2",
    ),
    "longrope with factors no float can hold": (
        {
            **LLAMA,
            "architectures": ["Phi3ForCausalLM"],
            "rope_scaling": {"type": "su", "short_factor": [10**400] * 8, "long_factor": [1.0] * 8},
        },
        r"short_factor holds 10+\.\.\.0+, wanted numbers above 0 and up to 1e\+06",
    ),
    "an odd number of rotated lanes": (
        {
            "architectures": ["GPTNeoXForCausalLM"],
            **SIZES,
            "hidden_size": 66,
            "num_attention_heads": 6,
            "rotary_pct": 1.0,
        },
        "11 lanes of a head are rotated, wanted an even number",
    ),
    "in one of two objects": (
        GEMMA3_TEXT | {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 0.5}}},
        "rope_parameters.full_attention.factor is 0.5",
    ),
    "factor no float can hold": (scaled(rope_type="linear", factor=10**400), "factor"),
    "llama3 without its parameters": (scaled(rope_type="llama3", factor=8.0), "low_freq_factor is missing"),
    "llama3 with crossed bounds": (scaled(rope_type="llama3", **(LLAMA3 | {"high_freq_factor": 1.0})), "high_freq"),
    "yarn with crossed bounds": (scaled(rope_type="yarn", beta_fast=1.0, beta_slow=2.0, **YARN), "beta_fast"),
    "partial rotary": (LLAMA | {"partial_rotary_factor": 0.5}, r"json: partial_rotary_factor is 0\.5"),
    "longrope with a factor that is no number": (
        {
            **LLAMA,
            "architectures": ["Phi3ForCausalLM"],
            "rope_scaling": {"type": "su", "short_factor": [True] * 8, "long_factor": [1.0] * 8},
        },
        "short_factor holds True",
    ),
    "theta 0": (LLAMA | {"rope_theta": 0}, "rope_theta is 0"),
    "unknown dtype": (
        LLAMA | {"torch_dtype": "int8"},
        "torch_dtype is 'int8', wanted one of float32, bfloat16, float16",
    ),
    "size missing": ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "hidden_size is missing"),
    "size is text": (LLAMA | {"hidden_size": "64"}, "hidden_size is '64', wanted an integer"),
    "size is true": (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers is True"),
    "size is a float": (LLAMA | {"vocab_size": 100.0}, "vocab_size is 100.0"),
    "size 0": (LLAMA | {"intermediate_size": 0}, "intermediate_size is 0"),
    "10^12 layers": (LLAMA | {"num_hidden_layers": 10**12}, "num_hidden_layers"),
    "heads that do not divide": (LLAMA | {"num_attention_heads": 7, "num_key_value_heads": 7}, "head_dim is missing"),
    "kv heads that do not divide": (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads is 3.*the 4 query heads"),
    "odd head size": (LLAMA | {"head_dim": 15}, "head_dim.* is 15"),
    "epsilon negative": (LLAMA | {"rms_norm_eps": -1e-5}, "rms_norm_eps"),
    "tied is text": (LLAMA | {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', wanted true or false"),
    "stop id beyond the vocabulary": (LLAMA | {"eos_token_id": [2, 100]}, r"eos_token_id is \[2, 100\].*0 to 99"),
    "stop id is text": (LLAMA | {"eos_token_id": "2"}, "eos_token_id is '2'"),
    "bos id negative": (LLAMA | {"bos_token_id": -1}, "bos_token_id is -1"),
    "window 0": (MISTRAL | {"sliding_window": 0}, "sliding_window is 0"),
    "too few layer types": (QWEN2 | {"layer_types": ["full_attention"]}, "layer_types"),
    "unknown layer type": (QWEN2 | {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    "windows by layer type, none in use": (QWEN2 | {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    "images without text": ({**WITH_IMAGES, "text_config": None}, "text_config is missing, wanted the config of"),
    "images and another text": (
        {**WITH_IMAGES, "text_config": {"model_type": "bloom"}},
        "text_config.model_type is 'bloom', wanted one of gemma3_text",
    ),
    "images and a bad size": (
        {**WITH_IMAGES, "text_config": GEMMA3 | {"hidden_size": 0}},
        "text_config.hidden_size is 0",
    ),
    "more experts for a token than there are": (
        with_experts("Mixtral", num_local_experts=4, num_experts_per_tok=5),
        "num_experts_per_tok is 5, wanted an integer from 1 to 4; correct it there or by hf_overrides, or take another",
    ),
    "no expert for a token": (with_experts("Qwen3Moe", num_experts_per_tok=0), "num_experts_per_tok is 0, wanted"),
    "two numbers of experts": (
        with_experts("GptOss", num_local_experts=8, num_experts=4),
        "num_experts is 4, wanted 8, as num_local_experts says",
    ),
    "a dense layer that is none": (
        with_experts("Qwen2Moe", mlp_only_layers=[0, 4]),
        r"mlp_only_layers is \[0, 4\], wanted numbers of layers from 0 to 3",
    ),
    "a dense layer that is true": (with_experts("Qwen3Moe", mlp_only_layers=[True]), r"mlp_only_layers is \[True\]"),
    "experts on every 0th layer": (with_experts("Qwen3Moe", decoder_sparse_step=0), "decoder_sparse_step is 0"),
    "experts with another activation": (with_experts("Mixtral", hidden_act="maxout"), "hidden_act is 'maxout'"),
    "unknown layer type beside experts": (
        with_experts("GptOss", layer_types=["linear_attention"] * 4),
        "layer_types is .*wanted 4 times full_attention or sliding_attention",
    ),
    "clipped queries": (with_experts("Olmoe", clip_qkv=8.0), "clip_qkv is 8.0, wanted None"),
    "another limit of gates": (with_experts("GptOss", swiglu_limit=5.0), "swiglu_limit is 5.0, wanted 7.0"),
    "mistral with layers of two types": (mistral_with(["full_attention", "sliding_attention"] * 2), "layer_types"),
}


@pytest.mark.parametrize(("data", "message"), INVALID.values(), ids=INVALID.keys())
def test_a_bad_value_is_refused_in_one_line_that_names_its_key(data, message):
    with pytest.raises(ModelLoadError, match=message) as caught:
        config_from_hf(data, PATH)
    assert str(caught.value).startswith(str(PATH))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600  # All architectures are named.


INVALID_GROUPS = {
    "groups that do not divide the experts": ({"n_group": 3}, "n_group is 3, wanted a divisor of the 16 experts"),
    "groups of one expert": ({"n_group": 16}, "n_group is 16, wanted"),
    "more groups chosen than there are": ({"n_group": 4, "topk_group": 5}, "topk_group is 5, wanted an integer from 1"),
    "chosen groups with too few experts": ({"n_group": 8, "topk_group": 1}, "topk_group is 1, wanted groups of 2 exp"),
    "unknown scoring function": ({"scoring_func": "tanh"}, "scoring_func is 'tanh', wanted one of softmax, sigmoid"),
    "a factor of 0": ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0, wanted a number above 0"),
}


@pytest.mark.parametrize(("data", "message"), INVALID_GROUPS.values(), ids=INVALID_GROUPS.keys())
def test_bad_groups_of_experts_are_refused_in_one_line_that_names_the_key(data, message):
    """Each token chooses 4 of 16 experts."""
    with pytest.raises(ModelLoadError, match=f"^{PATH}: {message}") as caught:
        read_grouped_routing(Fields(data, PATH), 16, 4)
    assert "\n" not in str(caught.value)


LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
OVERRIDES = {
    "a number": (LLAMA, {"rope_theta": 5e5}, {"rope_theta": 5e5}),
    "an object where none was": (LLAMA, LINEAR, LINEAR),
    "inside of an object": (
        LLAMA | LINEAR, {"rope_scaling": {"factor": 3.0}}, {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    ),
    "theta beside, where the file has it inside": (
        LLAMA | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}},
    ),
    "scaling by the old key, where the file has the new": (
        LLAMA | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", **YARN}},
    ),
    "scaling by the new key, where the file has the old": (
        LLAMA | LINEAR | {"rope_theta": 5e5}, {"rope_parameters": {"factor": 3.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    ),
    "no scaling, where the file has the new key": (
        LLAMA | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": None}, {"rope_parameters": {"rope_theta": 5e5}},
    ),
    "theta of one layer type": (
        GEMMA3_TEXT
        | {"rope_parameters": {"full_attention": {"rope_theta": 2e4}, "sliding_attention": {"rope_theta": 2e4}}},
        {"rope_theta": 1e6},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 2e4}}},
    ),
    "both keys, where the file has one": (
        LLAMA | LINEAR, {"rope_scaling": {"factor": 3.0}, "rope_parameters": {"rope_theta": 1e6}},
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e6}},
    ),
    "the original context, which the file has beside the object": (
        LLAMA | {"rope_scaling": {"rope_type": "yarn", **YARN}, "original_max_position_embeddings": 64},
        {"rope_scaling": {"original_max_position_embeddings": 128}},
        {"original_max_position_embeddings": 128},
    ),
    "theta of layers with a window, which is beside the object": (
        GEMMA3_TEXT | {"rope_scaling": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e4}},
        {"rope_local_base_freq": 3e4}, {"rope_local_base_freq": 3e4},
    ),
    "null": (LLAMA | LINEAR, {"rope_scaling": None}, {"rope_scaling": None}),
    "another family": (LLAMA, {"architectures": ["Qwen2ForCausalLM"]}, {"architectures": ["Qwen2ForCausalLM"]}),
}  # fmt: skip


@pytest.mark.parametrize(("data", "overrides", "changes"), OVERRIDES.values(), ids=OVERRIDES.keys())
def test_overrides_replace_values_and_are_merged_into_objects(data, overrides, changes):
    config = config_from_hf(data, PATH, overrides=overrides)
    assert config == config_from_hf(data | changes, PATH)
    assert config == config_from_hf(config.source, PATH), "what is saved with the weights"


WRONG_OVERRIDES = {
    "a typo": (
        {"rope_thet": 5e5},
        "^hf_overrides: unknown key 'rope_thet' of this LlamaForCausalLM; did you mean rope_",
    ),
    "a typo in an object": (
        {"rope_scaling": {"rope_type": "linear", "factr": 2.0, "factor": 2.0}},
        r"unknown key 'rope_scaling\.factr' .*; did you mean rope_scaling\.factor\?",
    ),
    "what this kind of rotary embedding has not": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 24.0}},
        "unknown key 'rope_scaling.beta_fast'",
    ),
    "nothing like it": ({"zzz": 1}, "unknown key 'zzz' of this LlamaForCausalLM; leave it out"),
    "a bad value": ({"rope_theta": 0}, "config.json: rope_theta of hf_overrides is 0, wanted a number above 1"),
    "a bad value in an object": (
        {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
        "factor of hf_overrides is 0.5, wanted a number from 1",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), WRONG_OVERRIDES.values(), ids=WRONG_OVERRIDES.keys())
def test_a_wrong_override_is_refused_with_the_nearest_key(overrides, message):
    with pytest.raises(ModelLoadError, match=message) as caught:
        config_from_hf(LLAMA, PATH, overrides=overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("others", [{}, {"rope_scaling": {"factor": 3.0}, "rope_parameters": {"factor": 3.0}}])
def test_an_override_of_the_rotary_embedding_that_is_no_object_is_refused_by_its_key(key, others):
    with pytest.raises(ModelLoadError, match=f"hf_overrides: {key} is 5, wanted an object"):
        config_from_hf(LLAMA | LINEAR, PATH, overrides=others | {key: 5})


def test_keys_of_the_family_without_an_effect_may_be_overridden():
    """They are listed as such, or have one value that is supported."""
    gpt2 = LLAMA | {"architectures": ["GPT2LMHeadModel"], "bos_token_id": 0, "eos_token_id": 0}
    assert config_from_hf(
        gpt2, PATH, overrides={"resid_pdrop": 0.5, "add_cross_attention": False, "id2label": {"0": "a"}}
    )


def test_a_familys_own_object_may_be_overridden_in_part():
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    phi = {"architectures": ["Phi3ForCausalLM"], **SIZES, "rope_scaling": longrope, "eos_token_id": 0}
    assert (
        config_from_hf(phi, PATH, overrides={"rope_scaling": {"long_factor": [3.0] * 8}}).ropes[0].long_factors[0]
        == 3.0
    )


def test_a_yarn_factor_of_null_is_the_ratio_of_the_two_lengths():
    """transformers computes it so, for DeepSeek's configs."""
    rope = {"type": "yarn", "factor": None, "original_max_position_embeddings": 1024}
    assert config_from_hf(QWEN2 | {"max_position_embeddings": 4096, "rope_scaling": rope}, PATH).ropes[0].factor == 4.0


def test_linear_and_yarn_stretch_the_context():
    assert config_from_hf(LLAMA | {"max_position_embeddings": 512}, PATH).max_context_len == 512
    linear = LLAMA | {"max_position_embeddings": 512, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert config_from_hf(linear, PATH).max_context_len == 2048
    for max_position in (1024, 4096):
        yarn = QWEN2 | {"max_position_embeddings": max_position, "rope_scaling": {"type": "yarn", **YARN}}
        assert config_from_hf(yarn, PATH).max_context_len == 4096
    llama3 = LLAMA | {"max_position_embeddings": 65536, "rope_scaling": {"type": "llama3", **LLAMA3}}
    assert config_from_hf(llama3, PATH).max_context_len == 65536


GGUF_METADATA = {
    "block_count": 4,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 5e5,
}
GGUF_TENSORS = {
    "token_embd.weight": np.zeros((100, 64), np.float32),
    "output.weight": np.zeros((100, 64), np.float32),
    "output_norm.weight": np.zeros(64, np.float32),
}


def gguf_config(tmp_path, metadata=(), tensors=(), *, tokenizer=(), architecture="llama") -> DecoderConfig:
    """Return the config of a file with the sizes of SIZES; `metadata` and `tensors` are added, and None removes one."""
    values = {f"{architecture}.{key}": value for key, value in (GGUF_METADATA | dict(metadata)).items()}
    ids = {"bos_token_id": 1, "eos_token_id": 2, **dict(tokenizer)}
    values |= {f"tokenizer.ggml.{key}": value for key, value in ids.items()}
    path = write_gguf(tmp_path / "m.gguf", values, GGUF_TENSORS | dict(tensors), architecture=architecture)
    return config_from_gguf(read_gguf(path))


def hf_config(data, **more) -> DecoderConfig:
    return config_from_hf({**data, "max_position_embeddings": 512, "rope_theta": 5e5, **more}, PATH)


def of_model(config):
    """Return the fields that say what the model computes."""
    return {name: value for name, value in vars(config).items() if name != "source"}


def approximately(config):
    """Return the fields of `config` to compare with; GGUF stores epsilon in float32."""
    return {**of_model(config), "norm_eps": pytest.approx(config.norm_eps, rel=1e-6)}


def vector(length):
    return np.zeros(length, np.float32)


QWEN2_BIASES = {f"blk.0.attn_{name}.bias": vector(size) for name, size in (("q", 64), ("k", 32), ("v", 32))}
LLAMA_BIASES = {name: vector(64) for name in ("blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_gate.bias")}
QWEN2_GGUF = {"architecture": "qwen2", "tensors": QWEN2_BIASES}
QWEN2_HF = QWEN2 | {"bos_token_id": 1, "eos_token_id": 2}
GGUF_YARN = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 1024}
LINEAR = LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}
TIED = LLAMA | {"tie_word_embeddings": True}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], **SIZES, "bos_token_id": 1, "eos_token_id": 2}
GEMMA = {**SIZES, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True, "head_dim": 32}
GEMMA2 = GEMMA | {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 32}
GEMMA3 = GEMMA | {"architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 32, "sliding_window": 8}
GEMMA3_FULL = GEMMA3 | {"layer_types": ["full_attention"] * 4}
LINEAR_8 = {"rope_type": "linear", "factor": 8.0}


def rope(values):
    return {f"rope.{key}": value for key, value in values.items()}


def embedding_only(values):
    return {"tensors": {"token_embd.weight": values, "output.weight": None}}


def gemma(version, metadata=(), **more):
    """Return a file of Gemma 2 or 3: its embedding is tied, and its heads are no equal shares of the hidden size."""
    own = {"attention.key_length": 32, **({"attention.sliding_window": 8} if version == 3 else {}), **dict(metadata)}
    return {"architecture": f"gemma{version}", "metadata": own, "tensors": {"output.weight": None}, **more}


def of_size(block_count):
    """Return a config of Gemma 3 with as many layers."""
    return GEMMA3 | {"num_hidden_layers": block_count}


BF16_EMBEDDING = (np.zeros((100, 128), np.uint8), GGMLQuantizationType.BF16)
GGUF_EQUALS_HF = {
    "llama": ({}, LLAMA),
    "tied": ({"tensors": {"output.weight": None}}, TIED),
    "llama with biases": ({"tensors": LLAMA_BIASES}, LLAMA | {"attention_bias": True, "mlp_bias": True}),
    **{
        f"llama with a bias of {name} in layer {layer}": (
            {"tensors": {f"blk.{layer}.{name}.bias": vector(64)}},
            LLAMA | {"attention_bias": name.startswith("attn"), "mlp_bias": name.startswith("ffn")},
        )
        for layer, name in ((0, "attn_k"), (0, "attn_output"), (1, "attn_v"), (0, "ffn_up"), (3, "ffn_down"))
    },
    "qwen2": (QWEN2_GGUF, QWEN2_HF),
    "bfloat16": (embedding_only(BF16_EMBEDDING), TIED | {"dtype": "bfloat16"}),
    "float16": (embedding_only(np.zeros((100, 64), np.float16)), TIED | {"dtype": "float16"}),
    "linear": ({"metadata": rope({"scaling.type": "linear", "scaling.factor": 4.0})}, LINEAR),
    "linear by the oldest key": ({"metadata": rope({"scale_linear": 4.0})}, LINEAR),
    "yarn": (QWEN2_GGUF | {"metadata": rope(GGUF_YARN)}, QWEN2_HF | {"rope_scaling": {"type": "yarn", **YARN}}),
    **{
        f"yarn, attention factor {factor:g}": (
            QWEN2_GGUF | {"metadata": rope({**GGUF_YARN, "scaling.yarn_attn_factor": factor})},
            QWEN2_HF | {"rope_scaling": {"type": "yarn", "attention_factor": factor, **YARN}},
        )
        for factor in (0.75, 1.0, 1.125)
    },
    "stop ids of turn and message": (
        {"tokenizer": {"eot_token_id": 7, "eom_token_id": 2}},
        LLAMA | {"eos_token_id": [2, 7]},
    ),
    "head size of its own": (
        {"metadata": {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32}},
        LLAMA | {"head_dim": 32},
    ),
    "kv heads absent": ({"metadata": {"attention.head_count_kv": None}}, WITHOUT_KV_HEADS),
    "qwen3": ({"architecture": "qwen3", "metadata": {"attention.key_length": 32}}, QWEN3 | {"head_dim": 32}),
    "qwen3, heads of equal shares": ({"architecture": "qwen3"}, QWEN3 | {"head_dim": 16}),
    "qwen3 with biases": (
        {"architecture": "qwen3", "tensors": LLAMA_BIASES},
        QWEN3 | {"head_dim": 16, "attention_bias": True},
    ),
    "qwen3, yarn": (
        {"architecture": "qwen3", "metadata": rope(GGUF_YARN)},
        QWEN3 | {"head_dim": 16, "rope_scaling": {"type": "yarn", **YARN}},
    ),
    "gemma2": (gemma(2), GEMMA2),
    "gemma2, every key": (
        gemma(
            2,
            {"attention.sliding_window": 8, "attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0}
            | {"attention.sliding_window_pattern": 4},
        ),
        GEMMA2
        | {"sliding_window": 8, "attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0}
        | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ),
    "gemma2, 27B": (gemma(2, {"block_count": 46}), GEMMA2 | {"num_hidden_layers": 46, "query_pre_attn_scalar": 16}),
    "gemma2, kv heads absent": (gemma(2, {"attention.head_count_kv": None}), GEMMA2 | {"num_key_value_heads": 4}),
    "gemma3": (gemma(3, {"block_count": 18}), of_size(18)),
    "gemma3, linear": (
        gemma(3, {"block_count": 12, **rope({"scaling.type": "linear", "scaling.factor": 4.0})}),
        of_size(12) | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "gemma3, local theta": (
        gemma(3, {"block_count": 12, "rope.freq_base_swa": 2e4}),
        of_size(12) | {"rope_local_base_freq": 2e4},
    ),
    "gemma3, 4B without its factor": (gemma(3, {"block_count": 34}), of_size(34) | {"rope_scaling": LINEAR_8}),
    "gemma3, 34 layers without scaling": (
        gemma(3, {"block_count": 34, "rope.scaling.type": "none"}),
        of_size(34),
    ),
    "gemma3, 27B": (
        gemma(3, {"block_count": 62}),
        of_size(62) | {"query_pre_attn_scalar": 16, "rope_scaling": LINEAR_8},
    ),
    "gemma3, period": (
        gemma(3, {"attention.sliding_window_pattern": 2}),
        GEMMA3 | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gemma3, period 0": (
        gemma(3, {"attention.sliding_window_pattern": 0}),
        GEMMA3 | {"layer_types": ["sliding_attention"] * 4},
    ),
    "gemma3, layer by layer": (
        gemma(3, {"attention.sliding_window_pattern": [False, True, True, False]}),
        GEMMA3 | {"layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"]},
    ),
    "gemma3 without a window": (gemma(3, {"attention.sliding_window": None}), GEMMA3_FULL),
    "gemma3, window 0": (gemma(3, {"attention.sliding_window": 0}), GEMMA3_FULL),
    "gemma3 with a soft cap": (gemma(3, {"final_logit_softcapping": 20.0}), GEMMA3 | {"final_logit_softcapping": 20.0}),
    "gemma3, soft cap 0": (gemma(3, {"final_logit_softcapping": 0.0}), GEMMA3),
    "gemma3, end of turn": (
        gemma(3, tokenizer={"tokens": ["a", "b", "c", "<end_of_turn>"]}),
        GEMMA3 | {"eos_token_id": [2, 3]},
    ),
}


@pytest.mark.parametrize(("gguf_file", "data"), GGUF_EQUALS_HF.values(), ids=GGUF_EQUALS_HF.keys())
def test_a_gguf_file_gives_the_config_that_config_json_gives(tmp_path, gguf_file, data):
    assert of_model(gguf_config(tmp_path, **gguf_file)) == approximately(hf_config(data))


def test_frequency_factors_of_a_gguf_file_are_those_of_llama3_where_there_are_such(tmp_path):
    """Known as a scaling of transformers, they can be saved as one."""
    wanted = RopeConfig(5e5, "llama3", 32.0, original_max_position=8192)
    factors = inverse_frequencies(RopeConfig(5e5), 16) / inverse_frequencies(wanted, 16)
    found = gguf_config(tmp_path, tensors={"rope_freqs.weight": factors.astype(np.float32)}).ropes[0]
    assert found == wanted
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    path = tmp_path / "m.gguf"
    assert config_from_gguf(read_gguf(path), scaling).ropes[0] == RopeConfig(5e5, "linear", 2.0)


def test_other_frequency_factors_of_a_gguf_file_are_kept(tmp_path):
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    found = gguf_config(tmp_path, tensors={"rope_freqs.weight": factors}).ropes[0]
    assert (found.kind, found.theta, found.freq_factors) == ("llama3", 5e5, tuple(factors.tolist()))
    for scaling in (None, {"rope_type": "default"}):
        off = config_from_gguf(read_gguf(tmp_path / "m.gguf"), {"rope_scaling": scaling})
        assert off.ropes[0] == RopeConfig(5e5)


def test_the_yarn_attention_factor_of_a_gguf_file_multiplies(tmp_path):
    scaling = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.attn_factor": 2.0}
    found = gguf_config(tmp_path, rope(scaling)).ropes[0]
    assert found.attention_factor == pytest.approx(2 * (0.1 * np.log(4) + 1))
    assert found.original_max_position == 512
    found = gguf_config(tmp_path, rope({**scaling, "scaling.yarn_attn_factor": 0.75})).ropes[0]
    assert found.attention_factor == 1.5, "it multiplies what the converter wrote in place of the formula"


def test_gemma_without_a_theta_has_that_of_its_config_json(tmp_path):
    theta = {"rope.freq_base": None}
    assert {rope.theta for rope in gguf_config(tmp_path, **gemma(2, theta)).ropes} == {1e4}
    ropes = gguf_config(tmp_path, **gemma(3, theta | {"block_count": 6})).ropes
    assert [rope.theta for rope in ropes] == [1e4] * 5 + [1e6]


def test_a_mistral_gguf_file_has_its_window_on_all_layers(tmp_path):
    assert gguf_config(tmp_path, {"attention.sliding_window": 16}).windows == (16,) * 4


INVALID_GGUF = {
    "another architecture": ({"architecture": "phi3"}, "phi3.*wanted one of llama, qwen2, .*gpt-oss, gemma2"),
    "vocabulary only": ({"tensors": {"token_embd.weight": None}}, "no matrix token_embd.weight"),
    "experts without a number of chosen ones": ({"metadata": {"expert_count": 8}}, "expert_used_count is missing"),
    "more experts chosen than there are": (
        {"metadata": {"expert_count": 8, "expert_used_count": 9}},
        "llama.expert_used_count is 9",
    ),
    "experts of a dense architecture": (
        {"architecture": "qwen3", "metadata": {"expert_count": 8}},
        "qwen3.expert_count is 8",
    ),
    "sizes missing": ({"metadata": {"embedding_length": None}}, "llama.embedding_length is missing"),
    "kv heads per layer": ({"metadata": {"attention.head_count_kv": [2, 2, 1, 2]}}, "head_count_kv is .2, 2, 1, 2."),
    "values of another size": (
        {"metadata": {"attention.value_length": 8}},
        "value_length is 8, wanted the head size, 16",
    ),
    "partial rotary": ({"metadata": rope({"dimension_count": 8})}, "dimension_count is 8"),
    "unknown rope type": ({"metadata": rope({"scaling.type": "longrope"})}, "longrope.*none, linear, yarn"),
    **{
        f"yarn, {name}": (
            {"metadata": rope({**GGUF_YARN, f"scaling.{name}": value})},
            f"llama.rope.scaling.{name} is {value}, wanted {wanted}",
        )
        for name, value, wanted in (
            ("yarn_attn_factor", 0.0, "a number above 0"),
            ("attn_factor", -1.0, "a number above 0"),
            ("yarn_ext_factor", 0.5, "1: other values"),
            ("yarn_log_multiplier", 0.5, "0: other values"),
        )
    },
    "too few frequency factors": ({"tensors": {"rope_freqs.weight": vector(4) + 1}}, "4 values, wanted 8"),
    "frequency factor 0": ({"tensors": {"rope_freqs.weight": vector(8)}}, "above 0 and up to 1e"),
    "window of unknown layers": (QWEN2_GGUF | {"metadata": {"attention.sliding_window": 8}}, "sliding_window"),
    "stop id beyond the vocabulary": ({"tokenizer": {"eos_token_id": 100}}, "eos_token_id is 100"),
    "window of a qwen3": ({"architecture": "qwen3", "metadata": {"attention.sliding_window": 8}}, "qwen3.*window is 8"),
    "gemma2, window 0": (gemma(2, {"attention.sliding_window": 0}), "gemma2.attention.sliding_window is 0"),
    "gemma2, soft cap 0": (gemma(2, {"attn_logit_softcapping": 0.0}), "gemma2.attn_logit_softcapping is 0.0"),
    "gemma2, two thetas": (gemma(2, {"rope.freq_base_swa": 1e4}), "freq_base_swa is 10000.0, wanted 500000"),
    "gemma3, window is text": (gemma(3, {"attention.sliding_window": "8"}), "gemma3.attention.sliding_window is '8'"),
    "gemma3, soft cap below 0": (gemma(3, {"final_logit_softcapping": -1.0}), "final_logit_softcapping is -1.0"),
    "gemma3, period below 0": (gemma(3, {"attention.sliding_window_pattern": -1}), "sliding_window_pattern is -1"),
    "gemma3, too few layers": (
        gemma(3, {"attention.sliding_window_pattern": [True] * 3}),
        "sliding_window_pattern is .True, True, True., wanted a value for each of the 4 layers",
    ),
    "gemma3, layers by name": (gemma(3, {"attention.sliding_window_pattern": ["a"] * 4}), "a list of bool or int"),
    "gemma3, local theta 0": (gemma(3, {"rope.freq_base_swa": 0.0}), "gemma3.rope.freq_base_swa is 0.0"),
    "gemma3, partial rotary": (gemma(3, rope({"dimension_count": 16})), "dimension_count is 16, wanted the head size"),
}


@pytest.mark.parametrize(("gguf_file", "message"), INVALID_GGUF.values(), ids=INVALID_GGUF.keys())
def test_a_bad_value_in_a_gguf_file_is_refused_in_one_line_that_names_it(tmp_path, gguf_file, message):
    with pytest.raises(ModelLoadError, match=message) as caught:
        gguf_config(tmp_path, **gguf_file)
    assert str(caught.value).startswith(str(tmp_path / "m.gguf"))
    assert "\n" not in str(caught.value)
