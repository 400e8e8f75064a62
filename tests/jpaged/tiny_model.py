"""A whole model directory in miniature: config, byte-level tokenizer with a chat template, random weights."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jpaged.models.config.decoder import DecoderConfig
from jpaged.models.weights.loading import abstract_weights
from jpaged.models.weights.weights import Weights
from jpaged.pallas_kernels.ragged_paged_attention.interface import Backend, KVLayout, KVShape
from jpaged.sharding import device_mesh

SIZES: dict[str, Any] = {
    "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, "block_size": 8, "num_blocks": 257,
    "warmup": "off",
}  # fmt: skip
"""Sizes of most engines in the tests: engines of equal sizes share executables, and compile those that they use."""
SIZE_FLAGS = [word for name, size in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(size))]
"""SIZES as flags of the command line."""
SPECIALS = ["<|end|>", "<|start|>"]
CHAT_TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}\n{% endfor %}<|start|>assistant: "
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 258, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "torch_dtype": "float32", "bos_token_id": None, "eos_token_id": 0, "hidden_act": "silu",
}  # fmt: skip


def tensors(seed: int = 0, head_size: int = 16, *, has_bias: bool = False) -> dict[str, np.ndarray]:
    """Return weights scaled so that the logits of different tokens lie well apart; biases of zero if there are any."""
    rng = np.random.default_rng(seed)
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    queries, kv = (CONFIG[f"num_{name}_heads"] * head_size for name in ("attention", "key_value"))

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    found = {"model.embed_tokens.weight": rng.normal(0, 1, (CONFIG["vocab_size"], hidden)).astype(np.float32)}
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        for part, shape in {
            "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():  # fmt: skip
            found[f"{name}{part}.weight"] = matrix(*shape)
            if has_bias and part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                found[f"{name}{part}.bias"] = np.zeros(shape[0], np.float32)
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
    has_bias = config.get("model_type") == "qwen2"
    save_file(tensors(head_size=config.get("head_dim", 16), has_bias=has_bias), str(directory / "model.safetensors"))
    return directory


def tiny_layout(backend: Backend, *, num_pages: int, page_size: int) -> KVLayout:
    """Return the layout of this model's cache in float32."""
    head_size = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    return backend.layout(
        KVShape(CONFIG["num_hidden_layers"], num_pages, page_size, CONFIG["num_key_value_heads"], head_size, "float32")
    )


def reference_logits(
    token_ids: Sequence[int],
    seed: int | Sequence[int] = 0,
    windows: Sequence[int | None] = (None, None),
    sinks: Sequence[np.ndarray] | None = None,
) -> np.ndarray:
    """Return the logits [T, V] of the model over these tokens, in float64 and without any code of jpaged.

    `seed` is that of the weights, or one for each token: then each position is computed by its own weights, from the
    keys and values of earlier positions as theirs have computed them. `windows` has the latest positions that a query
    sees, its own included, for each layer; None for all. `sinks` has the sink of each query head for each layer, which
    adds its exponential to the denominator of the softmax; None for none.
    """
    num_heads, num_kv_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    num_tokens, size = len(token_ids), CONFIG["hidden_size"] // num_heads
    seeds = np.broadcast_to(np.asarray(seed), (num_tokens,))
    weights = {one: tensors(one) for one in set(seeds.tolist())}
    angles = np.outer(np.arange(num_tokens), CONFIG["rope_theta"] ** (-np.arange(0, size, 2) / size))
    cos, sin = (np.tile(wave(angles), 2)[:, None] for wave in (np.cos, np.sin))

    def by_seed(compute: Any, *rows: np.ndarray) -> np.ndarray:
        """Return `compute(weights of a token, its rows)` for each token."""
        found = {one: compute(own, *rows) for one, own in weights.items()}
        return np.stack([found[one][position] for position, one in enumerate(seeds.tolist())])

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scaled = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + CONFIG["rms_norm_eps"])
        return by_seed(lambda own, rows: rows * own[name].astype(np.float64), scaled)

    def product(x: np.ndarray, name: str) -> np.ndarray:
        return by_seed(lambda own, rows: rows @ own[name].astype(np.float64).T, x)

    def heads(x: np.ndarray, name: str, count: int, *, is_rotated: bool) -> np.ndarray:
        y = product(x, name).reshape(num_tokens, count, size)
        turned = np.concatenate([-y[..., size // 2 :], y[..., : size // 2]], axis=-1)
        return np.repeat(y * cos + turned * sin if is_rotated else y, num_heads // count, axis=1)

    x = by_seed(lambda own: own["model.embed_tokens.weight"][list(token_ids)].astype(np.float64))
    for layer in range(CONFIG["num_hidden_layers"]):
        attention, mlp = (f"model.layers.{layer}.{part}." for part in ("self_attn", "mlp"))
        y = norm(x, f"model.layers.{layer}.input_layernorm.weight")
        q = heads(y, f"{attention}q_proj.weight", num_heads, is_rotated=True)
        k = heads(y, f"{attention}k_proj.weight", num_kv_heads, is_rotated=True)
        v = heads(y, f"{attention}v_proj.weight", num_kv_heads, is_rotated=False)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size)
        is_passed = np.tri(num_tokens, k=-(windows[layer] or num_tokens), dtype=bool)
        scores = np.where(np.tri(num_tokens, dtype=bool) & ~is_passed, scores, -np.inf)
        largest = scores.max(axis=-1, keepdims=True)
        shares = np.exp(scores - largest)
        of_sinks = 0.0 if sinks is None else np.exp(sinks[layer].astype(np.float64)[:, None, None] - largest)
        shares /= shares.sum(axis=-1, keepdims=True) + of_sinks
        x = x + product(np.einsum("hqk,khd->qhd", shares, v).reshape(num_tokens, -1), f"{attention}o_proj.weight")
        y = norm(x, f"model.layers.{layer}.post_attention_layernorm.weight")
        gate = product(y, f"{mlp}gate_proj.weight")
        inner = gate / (1 + np.exp(-gate)) * product(y, f"{mlp}up_proj.weight")
        x = x + product(inner, f"{mlp}down_proj.weight")
    return product(norm(x, "model.norm.weight"), "lm_head.weight")


def random_weights(config: DecoderConfig, backend: Backend) -> Weights:
    """Return float32 weights for one CPU device, the same at each call, as `backend` stores them."""
    abstract = abstract_weights(config, "float32", device_mesh(jax.devices("cpu")[:1]), backend.layer_ops)
    rng = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.ones(leaf.shape) if len(leaf.shape) == 1 else jnp.asarray(rng.normal(0, 0.02, leaf.shape), "float32")

    return replace(abstract, state=jax.tree.map(draw, abstract.state))
