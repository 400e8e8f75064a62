"""Finds the weights in a training state: the subtree of a tree of arrays that holds a model's tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..config.decoder import DecoderConfig
from ..errors import ModelLoadError
from ..families.table import family_class

OPTIMIZER_TREES = frozenset(
    {"opt", "optim", "optimizer", "tx", "adam", "mu", "nu", "momentum", "grads", "gradients", "history"}
)
"""Words, in the keys of a training state, for trees that have the shape of the weights and are not the weights."""
AVERAGES = frozenset({"ema", "avg", "swa", "polyak", "shadow"})
"""Words for trees of averaged weights, which are meant only where there are no others."""


def model_arrays(leaves: Mapping[str, Any], own_names: Collection[str], config: DecoderConfig | None) -> dict[str, Any]:
    """Return the arrays of the model in a tree, which may be a whole training state, without their common prefix.

    For example "params.layers.0.weight" becomes "layers.0.weight", and "opt_state.count" is left out. `leaves` are the
    tree's leaves by name. They are named by the engine's own paths, `own_names`, or as checkpoints name the tensors of
    a model of `config`, which is None for a caller's own module. A prefix counts if more than half of `own_names`
    follow it; of several, `likeliest_prefixes` leaves out those of an optimizer, such as "mu.". If no prefix counts,
    `model_prefixes` looks for a prefix of checkpoint names. A tree without a prefix is returned as it is. Raises
    ModelLoadError if several prefixes remain, and for a tree of a caller's own module whose names lack a prefix.
    """
    prefixes = list[str]()
    if own_prefixes := _prefixes_of_most(leaves, own_names):
        # With the empty prefix the tree's names are the engine's paths already, and nothing is removed.
        if "" not in own_prefixes:
            prefixes = likeliest_prefixes(own_prefixes)
    elif config is not None:
        prefixes = model_prefixes(leaves, config)
    else:
        refuse_lacking_prefix(leaves, own_names)
    if len(prefixes) > 1:
        raise ModelLoadError(f"params: {ambiguity_message(prefixes)}")
    prefix = prefixes[0] if prefixes else ""
    return {name.removeprefix(prefix): leaf for name, leaf in leaves.items() if name.startswith(prefix)}


def _prefixes_of_most(names: Iterable[str], own_names: Collection[str]) -> list[str]:
    """Return the prefixes behind which more than half of `own_names` are among `names`; "" for names without one."""
    prefixes_seen = (name[:start] for name in names for start in starts_of_parts(name) if name[start:] in own_names)
    return [prefix for prefix, num_names in Counter(prefixes_seen).items() if 2 * num_names > len(own_names)]


def model_prefixes(names: Collection[str], config: DecoderConfig) -> list[str]:
    """Return the prefixes under which a tree of arrays holds the tensors of this model; `names` are the tree's names.

    `params.model.embed_tokens.weight` and `mu.model.embed_tokens.weight` give `["params."]`: `mu` is an optimizer's. A
    subtree is recognised by its embedding or by its last norm, since a tied model may lack the embedding; errors about
    a missing tensor come later. The list is empty if the tree itself has one of these two names, without a prefix, even
    if a subtree has it too. It is also empty if neither name is found. It has several entries if `likeliest_prefixes`
    cannot decide between subtrees.
    """
    model = family_class(config.architecture)
    embedding, norm = (f"{model.tensor_names[module]}.weight" for module in ("embed", "norm"))
    if any(model.naming(names)(anchor) in names for anchor in (embedding, norm)):
        return []
    # A base begins all names of a family but the head's, such as "model.". The embedding's name is looked for without
    # a base too (the "" below), as in a model that was saved without its head.
    bases = *model.other_bases, model.base
    found = _prefixes_of(names, [base + embedding.removeprefix(model.base) for base in (*bases, "")])
    found |= _prefixes_of(names, [base + norm.removeprefix(model.base) for base in bases])
    # "norm.weight" without a base may belong to another model in the tree, so it counts only if nothing else is found.
    return likeliest_prefixes(found or _prefixes_of(names, [norm.removeprefix(model.base)]))


def _prefixes_of(names: Collection[str], ends: Sequence[str]) -> dict[str, None]:
    """Return the distinct prefixes of names that end with a dot and one of `ends`, in the order of the names.

    Each prefix ends with its dot, and is the part before the first of `ends` that fits. The result is a dictionary that
    serves as an ordered set. Example: "params.model.norm.weight" with the ends "model.norm.weight" and "norm.weight"
    gives "params.".
    """
    prefixes: dict[str, None] = {}
    for name in names:
        if (end := next((end for end in ends if name.endswith(f".{end}")), None)) is not None:
            prefixes[name.removesuffix(end)] = None
    return prefixes


def likeliest_prefixes(prefixes: Collection[str]) -> list[str]:
    """Return, sorted, those of `prefixes` whose subtree may be the model's weights.

    Each prefix is that of a subtree with the names of the model's tensors, and it is judged by its words. Subtrees of
    an optimizer, such as `mu.`, are left out, even if there are no others. Averaged weights, such as `ema.`, are left
    out if other weights remain. Example: `params.`, `ema_params.` and `opt_state.mu.` give `["params."]`, and
    `ema_params.` alone gives `["ema_params."]`.
    """
    words = {prefix: set(re.split(r"[._]", prefix.lower())) for prefix in prefixes}
    weights = [prefix for prefix in prefixes if OPTIMIZER_TREES.isdisjoint(words[prefix])]
    return sorted([prefix for prefix in weights if AVERAGES.isdisjoint(words[prefix])] or weights)


def ambiguity_message(prefixes: Collection[str]) -> str:
    """Return in words that several subtrees fit, and the way out."""
    subtrees = ", ".join(prefix.removesuffix(".") for prefix in prefixes)
    return f"{len(prefixes)} subtrees hold tensors of the model: {subtrees}; give one of them alone"


def refuse_lacking_prefix(held: Collection[str], wanted: Collection[str]) -> None:
    """Raise ModelLoadError if most of the `wanted` names have one prefix before a name that is `held`.

    Example: "0.kernel" and "1.kernel" are held, and "blocks.0.kernel" and "blocks.1.kernel" wanted: "blocks." lacks.
    """
    seen = (name[:start] for name in wanted for start in starts_of_parts(name)[1:] if name[start:] in held)
    prefix, num_names = next(iter(Counter(seen).most_common(1)), ("", 0))
    if 2 * num_names > len(wanted):
        example = min(name for name in wanted if name.startswith(prefix))
        fault = f"its names lack the prefix {prefix!r} of the module's, such as {example}"
        raise ModelLoadError(f"params: {fault}; nothing was changed; nest the tree under it")


def starts_of_parts(name: str) -> list[int]:
    """Return where each part of a dotted name begins."""
    return [0, *(index + 1 for index, letter in enumerate(name) if letter == ".")]


def statistics_elsewhere(missing: Collection[str], leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the running statistics `missing` from the weights' subtree that another subtree of `leaves` has.

    Example: {"params": …, "batch_stats": {"norm": {"mean": m}}} has "norm.mean" under "batch_stats.". Subtrees of
    optimizers are passed over. Raises ModelLoadError if several subtrees have one, and for a leaf that looks like one,
    as "norn.mean" does for "norm.mean", but is none: the old statistics would stay unnoticed.
    """
    prefixes_of = {name: likeliest_prefixes(_prefixes_of(leaves, [name])) for name in missing}
    if ambiguous := next((prefixes for prefixes in prefixes_of.values() if len(prefixes) > 1), None):
        raise ModelLoadError(f"params: {ambiguity_message(ambiguous)}")
    leaf_of = {name: prefixes[0] + name for name, prefixes in prefixes_of.items() if prefixes}
    still_missing = set(missing) - leaf_of.keys()
    last_parts = {name.rpartition(".")[2] for name in still_missing}
    alike = [leaf for leaf in leaves if leaf.rpartition(".")[2] in last_parts]
    left_over = [leaf for leaf in alike if leaf not in leaf_of.values() and leaf not in missing]
    if strange := likeliest_prefixes(left_over):
        fault = f"{strange[0]} has no place in the model, and {min(still_missing)} is missing"
        raise ModelLoadError(f"params: {fault}; nothing was changed; give running statistics under their own paths")
    return {name: leaves[leaf] for name, leaf in leaf_of.items()}
