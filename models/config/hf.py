"""Readers of values that the config.json of many families has under the same keys.

An absent key means what it means to the family's transformers class. A value that is not supported is an error that
names its key; no such value is ignored.
"""

from __future__ import annotations

from typing import Any

from ..errors import ModelLoadError
from ..fields import Fields
from ..formats.checkpoint import DTYPES

MAX_LAYERS = 10_000
SLIDING, FULL = "sliding_attention", "full_attention"
ROPE_OBJECTS = ("rope_scaling", "rope_parameters")
"""Keys of the object with the rotary embedding's parameters, as transformers 4 and 5 write it."""


def read_sizes(fields: Fields) -> dict[str, Any]:
    """Return keyword arguments of `DecoderConfig` whose keys most families share: sizes, heads, token ids and dtype.

    The number of layers is not among them; see `num_layers_of`. Without its key, a KV head for each query head, a head
    size of hidden size ÷ heads, and an untied head are assumed. Raises ModelLoadError, which names the key, for a value
    that is missing or wrong.
    """
    vocab_size, hidden_size = fields.integer("vocab_size"), fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": read_kv_heads(fields, num_heads),
        "head_size": read_head_size(fields, hidden_size, num_heads),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", False),
        **read_tokens_and_dtype(fields, vocab_size),
    }


def read_tokens_and_dtype(fields: Fields, vocab_size: int) -> dict[str, Any]:
    """Return keyword arguments of `DecoderConfig` that every family has: token ids and the checkpoint's dtype.

    transformers 5 writes `dtype` and version 4 `torch_dtype`; `dtype` counts if a file has both, and float32 if it has
    none. Token ids may be absent, and a file may name several end tokens. An id must be below `vocab_size`, or
    ModelLoadError is raised.
    """
    has_bos = fields.has("bos_token_id")
    return {
        "dtype": fields.choice("dtype" if fields.has("dtype") else "torch_dtype", DTYPES, "float32"),
        "bos_token_id": fields.integer("bos_token_id", min=0, max=vocab_size - 1) if has_bos else None,
        "eos_token_ids": fields.token_ids("eos_token_id", vocab_size=vocab_size),
    }


def num_layers_of(fields: Fields) -> int:
    """Return the number of layers."""
    return fields.integer("num_hidden_layers", max=MAX_LAYERS)


def read_kv_heads(fields: Fields, num_heads: int) -> int:
    """Return the number of KV heads, which must divide the number of query heads, `num_heads`.

    Without the key, each query head has a KV head of its own. Raises ModelLoadError for a number that does not divide
    them: 4 fits 32 query heads, and 5 does not.
    """
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of the {num_heads} query heads")
    return num_kv_heads


def read_head_size(fields: Fields, hidden_size: int, num_heads: int) -> int:
    """Return the number of lanes of a head; without the key `head_dim` it is `hidden_size` ÷ `num_heads`.

    `hidden_size` is the model's width, and `num_heads` counts query heads. Raises ModelLoadError if the head size is
    odd, since rotary embedding works on pairs of lanes, or if the key is absent and the heads do not divide the hidden
    size. If the key is there, the heads need not divide it.
    """
    key = "head_dim"
    if not fields.has(key) and hidden_size % num_heads:
        raise fields.wrong(key, f"an even integer, as {num_heads} heads do not divide hidden size {hidden_size}")
    head_size = fields.integer(key, hidden_size // num_heads)
    if head_size % 2:
        name = fields.name_of(key)
        raise ModelLoadError(
            f"{fields.path}: the head size ({name}) is {head_size}, rotary embedding needs an even one"
        )
    return head_size


def read_equal_heads(fields: Fields) -> dict[str, Any]:
    """Return keyword arguments of `DecoderConfig` for a family without grouped queries and without a head size key.

    Each query head has its own KV head, and the head size is the hidden size ÷ the number of heads: 768 and 12 heads
    give heads of 64 lanes. Raises ModelLoadError if the heads do not divide the hidden size.
    """
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise fields.wrong("num_attention_heads", f"a divisor of the hidden size, {hidden_size}")
    return {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_size": hidden_size // num_heads,
    }


def read_layer_types(fields: Fields, default: list[str]) -> list[str]:
    """Return the attention type of each layer, SLIDING or FULL; `default` if the file has no `layer_types`.

    `default` has one type per layer of the model. Raises ModelLoadError for a list of another length or another type.
    """
    if not fields.has("layer_types"):
        return default
    layer_types: list[str] = fields.items("layer_types", str)
    if len(layer_types) != len(default) or not set(layer_types) <= {SLIDING, FULL}:
        raise fields.wrong("layer_types", f"{len(default)} times {FULL} or {SLIDING}")
    return layer_types


def windows_by_type(fields: Fields, layer_types: list[str], window: int | None) -> tuple[int | None, ...]:
    """Return the window of each layer, in positions: `window` for SLIDING, None for FULL.

    `layer_types` has one type per layer. If none is SLIDING, `window` is not used. Raises ModelLoadError if a layer is
    SLIDING and `window` is None.
    """
    if SLIDING in layer_types and window is None:
        raise fields.wrong("layer_types", f"{FULL} only, as this model has no sliding window in use")
    return tuple(window if kind == SLIDING else None for kind in layer_types)
