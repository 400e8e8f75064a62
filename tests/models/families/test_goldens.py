"""Every family against transformers with torch in float32: golden files of tiny random models.

`scripts/make_family_goldens.py` makes them, one for each option that changes what is computed. Each prompt is longer
than the model's window and than the length its rotary scaling starts from.
"""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jpaged.models.config.decoder import DecoderConfig
from jpaged.models.config.rope import ROPE_KINDS
from jpaged.models.families.table import FAMILIES
from jpaged.models.inputs import ModelInputs
from jpaged.models.layers import Embedding, WeightMaker
from jpaged.models.opening.open_checkpoint import open_checkpoint
from jpaged.models.weights.loading import abstract_weights, check_tensors, load_weights
from jpaged.models.weights.weights import Weights
from jpaged.pallas_kernels.ragged_paged_attention.interface import Backend, KVShape, LayerPlace
from jpaged.pallas_kernels.ragged_paged_attention.native.backend import NativeBackend
from jpaged.pallas_kernels.ragged_paged_attention.paged_cache import PagedCache
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import Tiles, XlaBackend
from jpaged.pallas_kernels.tpu_ops import TPU_OPS
from jpaged.sharding import device_mesh

from ...paged_steps import metadata, nan_cache

FOLDERS = sorted(path for path in (Path(__file__).parents[2] / "golden" / "families").iterdir())
ATOL = 1e-4
"""Logits go up to 10; both sides sum in float32, each in its own order. Any wrong position, window or bias shows in
the first decimal: see the control at the end."""
PROMPT_LEN, NUM_TOKENS = 48, 64
PAGE_SIZE, TABLE_LEN, BUCKET = 8, 9, 80
CHUNKS = [13, 13, 13, 9]
XLA_FOLDERS = {
    "gemma2", "gemma3", "gpt2", "gpt_neox_linear", "gpt_oss", "gpt_oss_60_layer_types", "granite", "llama",
    "llama_tied", "mistral_window", "mixtral", "mixtral_window_one_of_60", "olmo2", "olmo3", "olmoe",
    "olmoe_renormalized_bias", "phi3_partial", "qwen2", "qwen2_moe", "qwen2_moe_renormalized_window", "qwen3",
    "qwen3_moe", "qwen3_moe_some_dense_window", "smollm3",
}  # fmt: skip
"""One of each family, and all with experts, which are compared on the operations that GPUs and TPUs use too."""
SLOW = {
    "gpt_oss_60_layer_types", "mixtral_window_one_of_60", "olmoe_renormalized_bias", "qwen2_moe_renormalized_window",
    "qwen3_moe",
}  # fmt: skip
"""Further models of families with experts: one of each is for every run."""
VARIANTS = {
    "gemma2_layer_types_linear", "gemma3_layer_types", "gemma3_with_images", "gpt_neox_gelu_fast_tied",
    "granite_bias_tied", "granite_linear", "llama_quick_gelu", "llama_yarn_attention_factor", "mistral_full",
    "mistral_with_images", "olmo2_bias_yarn", "olmo3_layer_types_bias", "phi3_longrope_attention_factor",
    "phi3_window", "qwen2_layer_types_tied", "qwen2_window", "qwen3_bias", "qwen3_window", "smollm3_llama3",
    "smollm3_window",
}  # fmt: skip
"""Models whose options other models of every run have, of their family or of one that shares the code of the option."""
FAST_XLA = ("gpt2", "gpt_oss", "llama")
TPU_FOLDERS = {"gpt2", "gpt_oss", "llama_tied", "qwen2_moe"}
"""Models whose weights are compared as TPUs store them: their widths, 32 and 64, are padded to 128 columns."""


class StoresForTpus(XlaBackend):
    """Plain XLA with the layer operations of TPUs."""

    layer_ops = TPU_OPS


TILES = Tiles(kv_splits=8, decode_keys=32, queries=16, prefill_keys=16, shared_rows=8)
BACKENDS = {"native": NativeBackend(), "xla": XlaBackend(TILES), "weights of TPUs": StoresForTpus(TILES)}
COMPARED = {"native": {path.name for path in FOLDERS}, "xla": XLA_FOLDERS, "weights of TPUs": TPU_FOLDERS}
FAST = {"native": COMPARED["native"] - SLOW - VARIANTS, "xla": FAST_XLA, "weights of TPUs": {"gpt_oss"}}
"""Backend → the folders of every run."""


def open_family(directory: Path, backend: Backend) -> tuple[DecoderConfig, Weights]:
    config, checkpoint = open_checkpoint(directory)
    config = config.for_context(NUM_TOKENS)
    abstract = abstract_weights(config, "float32", device_mesh(jax.devices()[:1]), backend.layer_ops)
    check_tensors(abstract, config, checkpoint)
    return config, load_weights(abstract, config, checkpoint)


def forward(graph: Any, weights: Any, cache: PagedCache, ids: jax.Array, step: Any) -> tuple[jax.Array, PagedCache]:
    model = nnx.merge(graph, weights)
    hidden, cache = model(ModelInputs(ids, step), cache)
    return model.logits(hidden), cache


def chunked_logits(
    config: DecoderConfig, weights: Weights, tokens: np.ndarray, backend: Backend
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of every position of two equal sequences: one in a single prefill, the other in chunks
    that begin beside it and then token by token."""
    layout = backend.layout(
        KVShape(config.num_layers, 2 * TABLE_LEN + 1, PAGE_SIZE, config.num_kv_heads, config.head_size, "float32")
    )
    cache = nan_cache(layout, tuple(LayerPlace(0, i) for i in range(config.num_layers)), backend)
    pages = np.random.default_rng(0).permutation(np.arange(1, 2 * TABLE_LEN + 1)).reshape(2, -1).tolist()
    run = jax.jit(partial(forward, weights.graph), donate_argnums=1)
    whole, parts, start = np.zeros(0), [], 0
    for chunk in [*CHUNKS, *[1] * (len(tokens) - PROMPT_LEN)]:
        end = start + chunk
        is_first = start == 0
        lens, contexts = ([len(tokens), chunk], [len(tokens), end]) if is_first else ([chunk], [end])
        ids = np.concatenate([tokens, tokens[:chunk]]) if is_first else tokens[start:end]
        step = metadata(
            backend,
            lens,
            contexts,
            [pages[-len(lens) :]],
            page_size=PAGE_SIZE,
            num_tokens=BUCKET,
            num_rows=3,
            table_len=TABLE_LEN,
        )
        logits, cache = run(weights.state, cache, jnp.asarray(np.pad(ids, (0, BUCKET - len(ids)))), step)
        found = np.asarray(logits)[: len(ids)]
        if is_first:
            whole, found = found[: len(tokens)], found[len(tokens) :]
        parts.append(found)
        start = end
    return whole, np.concatenate(parts)


@pytest.mark.parametrize(
    ("directory", "backend"),
    [
        pytest.param(
            path,
            backend,
            id=f"{path.name}, {name}",
            marks=[pytest.mark.slow] * (path.name not in FAST[name]),
        )
        for path in FOLDERS
        for name, backend in BACKENDS.items()
        if path.name in COMPARED[name]
    ],
)
def test_logits_are_those_of_transformers(directory: Path, backend: Backend) -> None:
    config, weights = open_family(directory, backend)
    golden = load_file(directory / "golden.safetensors")
    tokens, wanted = golden["tokens"], golden["logits"]
    assert len(tokens) > PROMPT_LEN > max(window or 0 for window in config.windows)
    whole, chunked = chunked_logits(config, weights, tokens, backend)
    np.testing.assert_allclose(whole, wanted, rtol=0, atol=ATOL)
    np.testing.assert_allclose(chunked, wanted, rtol=0, atol=ATOL)


def test_the_families_cover_what_the_config_can_ask_for() -> None:
    configs = [open_checkpoint(directory)[0] for directory in FOLDERS]
    assert {config.architecture for config in configs} == {family.architecture for family in FAMILIES}
    ropes = [rope for config in configs for rope in config.ropes if rope is not None]
    assert {rope.kind for rope in ropes} == set(ROPE_KINDS)
    assert any(config.ropes[0] is None for config in configs), "no rotary embedding at all"
    assert any(rope.rotary_size for rope in ropes), "a part of a head is rotated"
    assert {rope.for_context(NUM_TOKENS).is_long for rope in ropes if rope.kind == "longrope"} == {False, True}
    assert any(rope.mscale and rope.mscale_all_dim for rope in ropes)
    assert any(rope.attention_factor for rope in ropes)
    for name in ("tie_word_embeddings", "qkv_bias", "out_bias", "mlp_bias"):
        assert {getattr(config, name) for config in configs} == {False, True}, name
    for name in ("attention_soft_cap", "logits_soft_cap", "qk_norm", "attention_scale"):
        assert {getattr(config, name) is None for config in configs} == {False, True}, name
    experts = [config.experts for config in configs if config.experts is not None]
    for name in ("renormalizes", "router_bias", "expert_bias", "has_shared_gate"):
        assert {getattr(each, name) for each in experts} == {False, True}, name
    assert {each.num_experts for each in experts} == {4, 60}
    assert {1, 2, 4, 8} == {each.num_chosen for each in experts}
    assert any(len(set(each.sparse_layers)) == 2 for each in experts), "some layers have one MLP"
    assert {config.has_sinks for config in configs} == {False, True}
    for name in ("embedding_multiplier", "residual_multiplier", "logits_divisor"):
        assert {getattr(config, name) == 1 for config in configs} == {False, True}, name
    assert {len(set(config.windows)) for config in configs} == {1, 2}, "some models mix windowed and full layers"
    assert any(config.num_heads * config.head_size != config.hidden_size for config in configs)
    assert any(config.num_heads == config.num_kv_heads for config in configs)
    assert any(config.num_kv_heads == 1 for config in configs)


def test_a_window_off_by_one_would_be_noticed() -> None:
    """The control: with another window, logits move a thousand times further than the tolerance."""
    directory = next(path for path in FOLDERS if path.name == "mistral_window")
    backend = BACKENDS["native"]
    config, weights = open_family(directory, backend)
    golden = load_file(directory / "golden.safetensors")
    model = nnx.merge(weights.graph, weights.state)
    model.windows = tuple(window + 1 for window in model.windows)
    changed = replace(weights, state=nnx.state(model), graph=nnx.graphdef(model))
    whole, _ = chunked_logits(config, changed, golden["tokens"], backend)
    assert np.abs(whole - golden["logits"]).max() > 1000 * ATOL


def test_logits_come_in_float32_from_bfloat16_weights() -> None:
    """Products are not rounded; nor, with native code, are the hidden states."""
    directory = next(path for path in FOLDERS if path.name == "llama")
    config, checkpoint = open_checkpoint(directory)
    abstract = abstract_weights(config, "bfloat16", device_mesh(jax.devices()[:1]), NativeBackend().layer_ops)
    weights = load_weights(abstract, config, checkpoint)
    model = nnx.merge(weights.graph, weights.state)
    hidden = jax.eval_shape(model.embed, jax.ShapeDtypeStruct((4,), jnp.int32))
    assert hidden.dtype == weights.stream_dtype == jnp.float32
    assert jax.eval_shape(model.logits, hidden).dtype == jnp.float32
    assert {leaf.dtype.name for leaf in jax.tree.leaves(weights.state)} == {"bfloat16"}
    # Panels of 32 columns, whose depth is a multiple of 32, round the odd sizes of a few of these matrices up.
    num_values = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
    assert 2 * num_values <= weights.size_bytes < 1.05 * 2 * num_values


def test_hidden_states_of_plain_xla_have_the_dtype_of_the_weights() -> None:
    make = WeightMaker(lambda shape, axes, fill: jnp.zeros(shape, "bfloat16"), 1, "bfloat16")
    hidden = jax.eval_shape(Embedding(8, 4, is_tied=True, make=make), jax.ShapeDtypeStruct((4,), jnp.int32))
    assert hidden.dtype == make.ops.stream_dtype("bfloat16") == jnp.bfloat16
