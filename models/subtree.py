"""Finds the weights in a training state: the subtree of a tree of arrays that holds a model's tensors."""

from __future__ import annotations

import re
from collections.abc import Collection

from .config.decoder import DecoderConfig
from .families.table import model_class

DERIVED_TREES = frozenset({"opt", "optimizer", "mu", "nu", "momentum", "ema", "avg", "grads", "gradients"})
"""Words, in the keys of a training state, for trees that have the shape of the weights and are not the weights."""


def model_prefixes(names: Collection[str], config: DecoderConfig) -> list[str]:
    """Return what stands before the names of the model's tensors in a tree: `params.` in a whole training state.

    Nothing stands there in a tree that holds them without a prefix, or not at all: the list is empty. It has several
    entries where nothing says which subtree is meant; see `likeliest`. A subtree is known by its embedding and its last
    norm.
    """
    model = model_class(config.architecture)
    bases = *model.other_bases, model.base
    found: dict[str, None] = {}
    # A tied model may lack its embedding, and any subtree may lack something: what is missing is said later. A norm
    # without a base may be another model's.
    for module, own_bases in ("embed", (*bases, "")), ("norm", bases), ("norm", ("",)):
        anchor = f"{model.tensor_names[module]}.weight"
        if model.naming(names)(anchor) in names:
            return []
        if found and own_bases == ("",):
            break
        ends = [base + anchor.removeprefix(model.base) for base in own_bases]
        for name in names:
            if (end := next((end for end in ends if name.endswith(f".{end}")), None)) is not None:
                found[name.removesuffix(end)] = None
    return likeliest(found)


def likeliest(prefixes: Collection[str]) -> list[str]:
    """Return those of the prefixes of equal subtrees that may be the model's, sorted.

    Averages and an optimizer's are passed over where there are others, and then all but those on the highest level.
    """
    kept = [one for one in prefixes if DERIVED_TREES.isdisjoint(re.split(r"[._]", one.lower()))] or list(prefixes)
    level = min((prefix.count(".") for prefix in kept), default=0)
    return sorted(prefix for prefix in kept if prefix.count(".") == level)


def ambiguity(prefixes: Collection[str]) -> str:
    """Return in words that several subtrees fit, and the way out."""
    subtrees = ", ".join(prefix.removesuffix(".") for prefix in prefixes)
    return f"{len(prefixes)} subtrees hold tensors of the model: {subtrees}; give one of them alone"
