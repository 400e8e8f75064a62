"""GPT-NeoX: attention and MLP side by side, LayerNorm, heads rotated in part, q, k and v by head in one tensor.

Source: Black et al. 2022, arXiv:2204.06745; Biderman et al. 2023, arXiv:2304.01373 (Pythia).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...pallas_kernels.activations import ACTIVATIONS
from ..config.decoder import DecoderConfig
from ..config.hf import num_layers_of, read_equal_heads, read_tokens_and_dtype
from ..config.rope import context_len, read_rope, rope_fields
from ..family import ModelFamily
from ..fields import Fields
from ..sources import Source


@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(DecoderConfig):
    """A decoder's config, and whether attention and MLP both read the stream as it enters the layer."""

    is_parallel: bool = True


class GPTNeoX(ModelFamily):
    """GPT-NeoX and Pythia."""

    config_defaults = {
        "vocab_size": 50432, "intermediate_size": 24576, "max_position_embeddings": 2048, "bos_token_id": 0,
        "eos_token_id": 2,
    }  # fmt: skip
    without_effect = frozenset({"hidden_dropout", "classifier_dropout", "is_decoder"})
    base = "gpt_neox."
    ignored_tensors = re.compile(r"\.attention\.(masked_)?bias$|rotary_emb\.inv_freq$")
    tensor_names = {
        "embed": "gpt_neox.embed_in",
        "layers.{i}.attention_norm": "gpt_neox.layers.{i}.input_layernorm",
        "layers.{i}.attention.o_proj": "gpt_neox.layers.{i}.attention.dense",
        "layers.{i}.mlp_norm": "gpt_neox.layers.{i}.post_attention_layernorm",
        "layers.{i}.mlp.up_proj": "gpt_neox.layers.{i}.mlp.dense_h_to_4h",
        "layers.{i}.mlp.down_proj": "gpt_neox.layers.{i}.mlp.dense_4h_to_h",
        "norm": "gpt_neox.final_layer_norm",
        "head": "lm_head",
    }
    other_names = {"lm_head.weight": "embed_out.weight"}
    decoder = "decoders.gpt_neox.GPTNeoXDecoder"

    @classmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        """Read GPT-NeoX's config. Raises ModelLoadError, which names the key, for a value that is not supported.

        The head size is the hidden size ÷ the number of heads, and each query head has its own KV head. Only the first
        `rotary_pct` of a head's lanes are rotated, by default a quarter. The MLP always has biases; those of attention
        may be turned off.
        """
        vocab_size, num_layers, heads = fields.integer("vocab_size"), num_layers_of(fields), read_equal_heads(fields)
        has_bias = fields.boolean("attention_bias", True)
        parameters = rope_fields(fields, theta_key="rotary_emb_base", share=0.25, share_key="rotary_pct")
        rope = read_rope(fields, parameters, head_size=heads["head_size"], is_partial=True)
        return GPTNeoXConfig(
            vocab_size=vocab_size,
            **heads,
            intermediate_size=fields.integer("intermediate_size"),
            norm_eps=fields.number("layer_norm_eps", 1e-5, above=0),
            ropes=(rope,) * num_layers,
            windows=(None,) * num_layers,
            max_context_len=context_len(rope, fields.integer("max_position_embeddings")),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            activation=fields.choice("hidden_act", ACTIVATIONS, "gelu"),
            qkv_bias=has_bias,
            out_bias=has_bias,
            mlp_bias=True,
            is_parallel=fields.boolean("use_parallel_residual", True),
            **read_tokens_and_dtype(fields, vocab_size),
        )

    @classmethod
    def sources(cls, config: DecoderConfig) -> dict[str, Source]:
        """Return, for each module, where a checkpoint keeps it.

        One tensor, query_key_value, holds for each head the rows of its query, then of its key, then of its value, and
        then those of the next head. For 2 heads of size 4 the queries are rows 0 to 3 and 12 to 15.
        """
        size, tensor = config.head_size, "gpt_neox.layers.{i}.attention.query_key_value"
        # First rows of each head's queries, keys and values (parts 0, 1 and 2); a head has 3 × `size` rows.
        starts = [range(part * size, 3 * size * config.num_heads, 3 * size) for part in range(3)]
        return super().sources(config) | {
            f"layers.{{i}}.attention.{part}_proj": Source(
                tensor, tuple((start, start + size) for start in starts[index])
            )
            for index, part in enumerate("qkv")
        }
