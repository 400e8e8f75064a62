"""A model family as its files describe it: the keys of config.json, and what checkpoints call its tensors.

Nothing here imports what computes a model: a start whose programs and weights are kept reads files alone.
"""

from __future__ import annotations

import importlib
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from .config.decoder import DecoderConfig
from .fields import Fields
from .sources import Source, other_sources


class ModelFamily:
    """A family is a subclass: class attributes and `read_config` say what is particular to it."""

    config_defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of the transformers class for keys that are absent; a key that is null is not absent."""
    fixed_options: ClassVar[Mapping[str, Any]] = {}
    """Keys of config.json that change what the transformers class computes, with the one value that is supported."""
    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Keys of the transformers class that change nothing that is computed here, such as dropout."""
    tensor_names: ClassVar[Mapping[str, str]] = {}
    """Module, or part of a fused one, → what checkpoints call it; {i} stands for the layer, {e} for an expert. The name
    of a variable follows on both sides: `.weight` and `.bias`, and `.sinks` for attention with sinks."""
    base: ClassVar[str] = "model."
    """Beginning of the names of all tensors but the head's."""
    other_bases: ClassVar[tuple[str, ...]] = ()
    """Beginnings that stand for `base` in some checkpoints."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """Tensor → the name that some checkpoints have for it."""
    ignored_tensors: ClassVar[re.Pattern[str]] = re.compile(r"rotary_emb\.inv_freq$")
    """Names of tensors in checkpoints that are no weights."""
    decoder: ClassVar[str] = "decoder.Decoder"
    """Module of the package `models`, and the class in it that computes the family; imported at its first use."""
    logits_modules: ClassVar[tuple[str, ...]] = ("embed", "head")
    """Modules that `logits` needs: the head, or the embedding where they are tied."""

    @classmethod
    @abstractmethod
    def read_config(cls, fields: Fields) -> DecoderConfig:
        """Read the family's config. Raises ModelLoadError, which names the key."""

    @classmethod
    def naming(cls, held: Collection[str], *, is_tied: bool = False) -> Callable[[str], str]:
        """Return a function from a tensor's usual name to its name in a checkpoint whose tensor names are `held`.

        A usual name that begins with `base` begins in the checkpoint with the first of `other_bases` and `base` that
        any name in `held` begins with. If none does, it keeps `base`, or loses it if `held` has the embedding or the
        last norm without `base`. A key of `other_names` becomes its value if only the value is in `held`. With
        `is_tied`, a checkpoint that holds only one of the embedding and the head gives that name for both, since
        transformers ties a missing matrix to the one that is there. Example: with "norm.weight" in `held`, and no name
        that begins with "model.", "model.layers.0.mlp.up_proj.weight" becomes "layers.0.mlp.up_proj.weight".
        """
        bases = (*cls.other_bases, cls.base)
        # transformers' base classes save a model without its head, under names without `base`.
        parts = (cls.tensor_names[module].removeprefix(cls.base) for module in ("embed", "norm"))
        default_base = "" if any(f"{part}.weight" in held for part in parts) else cls.base
        base = next((base for base in bases if any(name.startswith(base) for name in held)), default_base)

        def stored_name(name: str) -> str:
            """Return the checkpoint's name of the tensor `name`, before embedding and head share one name."""
            if name.startswith(cls.base):
                return base + name.removeprefix(cls.base)
            alternative = cls.other_names.get(name, name)
            return alternative if name not in held and alternative in held else name

        embedding, head = cls.embedding_and_head(stored_name)
        # If both or none of the two are held, neither name stands for the other.
        if not is_tied or (embedding in held) is (head in held):
            return stored_name
        held_matrix, missing_matrix = (head, embedding) if head in held else (embedding, head)
        return lambda name: held_matrix if stored_name(name) == missing_matrix else stored_name(name)

    @classmethod
    def embedding_and_head(cls, stored_name: Callable[[str], str]) -> tuple[str, str]:
        """Return the names of the embedding and of the head in a checkpoint; `stored_name` comes from `naming`."""
        embedding, head = (stored_name(f"{cls.tensor_names[module]}.weight") for module in ("embed", "head"))
        return embedding, head

    @classmethod
    def sources(cls, config: DecoderConfig) -> dict[str, Source]:
        """Return, for each module of `tensor_names`, where a checkpoint keeps its weight, its bias or its sinks."""
        return {
            module: Source(name, others=other_sources(module, name, config.experts))
            for module, name in cls.tensor_names.items()
        }

    @classmethod
    def decoder_class(cls) -> type[Any]:
        """Import the subclass of `Decoder` that computes the family, and return it."""
        module, name = cls.decoder.rsplit(".", 1)
        found: type[Any] = getattr(importlib.import_module(f".{module}", __package__), name)
        return found
