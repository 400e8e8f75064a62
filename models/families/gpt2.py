"""GPT-2: learned positions, LayerNorm, an MLP without a gate, and matrices stored as W [in, out].

Source: Radford et al. 2019, Language models are unsupervised multitask learners.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ...pallas_kernels.activations import ACTIVATIONS
from ..config.decoder import DecoderConfig
from ..config.hf import num_layers_of, read_equal_heads, read_tokens_and_dtype
from ..family import ModelFamily
from ..fields import Fields
from ..sources import Source

OLD_KEYS = {
    "n_embd": "hidden_size", "n_positions": "max_position_embeddings", "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}  # fmt: skip
"""GPT-2's own key in config.json → the usual key, which counts if both are there."""


class GPT2(ModelFamily):
    """GPT-2."""

    config_defaults = {
        "n_embd": 768, "n_positions": 1024, "n_head": 12, "n_layer": 12, "vocab_size": 50257,
        "tie_word_embeddings": True, "bos_token_id": 50256, "eos_token_id": 50256,
    }  # fmt: skip
    fixed_options = {"add_cross_attention": False}
    without_effect = frozenset({
        "resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_type", "summary_use_proj", "summary_activation",
        "summary_proj_to_labels", "summary_first_dropout", "reorder_and_upcast_attn",
    })  # fmt: skip
    base = "transformer."
    ignored_tensors = re.compile(r"\.attn\.(masked_)?bias$")
    tensor_names = {
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "layers.{i}.attention_norm": "transformer.h.{i}.ln_1",
        "layers.{i}.attention.o_proj": "transformer.h.{i}.attn.c_proj",
        "layers.{i}.mlp_norm": "transformer.h.{i}.ln_2",
        "layers.{i}.mlp.up_proj": "transformer.h.{i}.mlp.c_fc",
        "layers.{i}.mlp.down_proj": "transformer.h.{i}.mlp.c_proj",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }
    decoder = "decoders.gpt2.GPT2Decoder"

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        """Read GPT-2's config. Raises ModelLoadError, which names the key, for a value that is not supported.

        The head size is the hidden size ÷ the number of heads, each query head has its own KV head, and all projections
        have biases. Positions are learned, so no layer has a rotary embedding, and none has a window. The MLP is 4
        times as wide as the model unless `n_inner` says otherwise.
        """
        fields = _renamed(fields)
        vocab_size, num_layers, heads = fields.integer("vocab_size"), num_layers_of(fields), read_equal_heads(fields)
        return DecoderConfig(
            vocab_size=vocab_size,
            **heads,
            intermediate_size=fields.integer("n_inner", 4 * heads["hidden_size"]),
            norm_eps=fields.number("layer_norm_epsilon", 1e-5, above=0),
            ropes=(None,) * num_layers,
            windows=(None,) * num_layers,
            max_context_len=fields.integer("max_position_embeddings"),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", True),
            activation=fields.choice("activation_function", ACTIVATIONS, "gelu_new"),
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            # None stands for the usual 1 ÷ √(head size).
            attention_scale=None if fields.boolean("scale_attn_weights", True) else 1.0,
            divides_scale_by_layer=fields.boolean("scale_attn_by_inverse_layer_idx", False),
            **read_tokens_and_dtype(fields, vocab_size),
        )

    @classmethod
    def sources(cls, config: DecoderConfig) -> dict[str, Source]:
        """Return, for each module, where a checkpoint keeps it.

        Matrices of layers are stored as W [in, out], and not as Wᵀ. One tensor, c_attn, holds the outputs of the
        queries, then of the keys, then of the values, `hidden_size` of each. With 768, the keys are outputs 768 to
        1535.
        """
        size, plain = config.hidden_size, super().sources(config)
        transposed = {
            module: Source(source.name, is_transposed=True) if module.endswith("_proj") else source
            for module, source in plain.items()
        }
        parts = {
            f"layers.{{i}}.attention.{part}_proj": Source(
                "transformer.h.{i}.attn.c_attn", ((index * size, (index + 1) * size),), is_transposed=True
            )
            for index, part in enumerate("qkv")
        }
        return transposed | parts


def _renamed(fields: Fields) -> Fields:
    """Return the fields with GPT-2's own keys also under the usual keys, if those are absent or null.

    Example: `n_embd` 768 without `hidden_size` is also found as `hidden_size`. Errors name the key that the file has.
    GPT-2's keys are noted in `asked`, the keys that were asked for, so that `hf_overrides` may hold them.
    """
    values, names = dict(fields.data), dict(fields.names)
    for old, new in OLD_KEYS.items():
        fields.asked.add(old)
        if values.get(new) is None:
            values[new], names[new] = values.get(old), names.get(old, old)
    return replace(fields, data=values, names=names)
