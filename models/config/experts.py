"""The experts of a decoder's sparse MLPs: how many, how wide, and how rows choose among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..fields import Fields

SCORINGS = "softmax", "sigmoid"
EXPERT_TRAINING_KEYS = frozenset({"output_router_logits", "router_aux_loss_coef"})
"""Keys of transformers' classes with experts that change nothing that is computed here."""
SCORES_OF_GROUP = 2
"""How many of the best scores in a group are added up to the group's own in DeepSeek-V3 and GLM-4.5."""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The sparse MLPs of a decoder: every row takes `num_chosen` of `num_experts` MLPs."""

    num_experts: int
    num_chosen: int
    width: int
    """Inner width of an expert."""
    sparse_layers: tuple[bool, ...]
    """Whether each layer has experts; the others have one MLP."""
    scoring: str = "softmax"
    """What makes scores of a router's logits: one of SCORINGS."""
    renormalizes: bool = True
    """Whether the scores of the chosen experts are divided by their sum. A softmax over the chosen logits alone is the
    softmax over all, renormalized."""
    scale: float = 1.0
    """Factor of the weights."""
    num_groups: int = 1
    """Groups that experts are divided into, in order; experts are chosen from the best `num_chosen_groups` alone."""
    num_chosen_groups: int = 1
    scores_of_group: int = 1
    """How many of the best scores in a group are added up to the group's own."""
    has_correction_bias: bool = False
    """Whether a bias is added to the scores by which experts are chosen, and not to their weights."""
    router_bias: bool = False
    expert_bias: bool = False
    activation: str | None = None
    """Activation or gate of the experts; None for the model's."""
    shared_width: int = 0
    """Inner width of the MLP that all rows take beside their experts; 0 for none."""
    has_shared_gate: bool = False
    """Whether the shared MLP's output is multiplied by the sigmoid of a product of its own."""


def read_experts(
    fields: Fields, *, keys: Sequence[str], default: int, sparse_layers: tuple[bool, ...], **options: Any
) -> ExpertsConfig:
    """Read how many experts a family has and how many of them a token takes; `options` are other fields.

    `keys` are the names that the family's files have for the number of all experts, `default` without any of them. The
    number of chosen ones is under `num_experts_per_tok`. Raises ModelLoadError if a token would take more experts than
    there are, and if two of the `keys` disagree.
    """
    found = {key: fields.integer(key) for key in keys if fields.has(key)}
    num_experts = next(iter(found.values()), default)
    for key, number in found.items():
        if number != num_experts:
            raise fields.wrong(key, f"{num_experts}, as {next(iter(found))} says")
    num_chosen = fields.integer("num_experts_per_tok", max=num_experts)
    return ExpertsConfig(num_experts=num_experts, num_chosen=num_chosen, sparse_layers=sparse_layers, **options)


def read_sparse_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has experts, for families with the keys `decoder_sparse_step` and `mlp_only_layers`.

    With a step n the last of every n layers has experts, unless its number, from 0, is in the list. Example: 4 layers,
    a step of 2 and the list [3] give (False, True, False, False). Raises ModelLoadError for a number of no layer.
    """
    step, dense = fields.integer("decoder_sparse_step", 1), fields.items("mlp_only_layers", int, [])
    if any(isinstance(layer, bool) or not 0 <= layer < num_layers for layer in dense):
        raise fields.wrong("mlp_only_layers", f"numbers of layers from 0 to {num_layers - 1}")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))


def read_grouped_routing(fields: Fields, num_experts: int, num_chosen: int) -> dict[str, Any]:
    """Return fields of `ExpertsConfig` under the keys of DeepSeek-V3 and GLM-4.5: sigmoids, groups and correction bias.

    Experts are chosen from the best `topk_group` of `n_group` groups. Raises ModelLoadError if the groups do not divide
    the experts, or hold fewer than two each, if more groups are to be chosen than there are, and if those hold fewer
    experts than a token takes.
    """
    num_groups = fields.integer("n_group", 1)
    if num_experts % num_groups or num_experts // num_groups < SCORES_OF_GROUP:
        raise fields.wrong("n_group", f"a divisor of the {num_experts} experts, of {SCORES_OF_GROUP} and more each")
    num_chosen_groups = fields.integer("topk_group", 1, max=num_groups)
    if num_chosen_groups * (num_experts // num_groups) < num_chosen:
        raise fields.wrong("topk_group", f"groups of {num_experts // num_groups} experts that hold {num_chosen}")
    return {
        "scoring": fields.choice("scoring_func", SCORINGS, "sigmoid"),
        "renormalizes": fields.boolean("norm_topk_prob", True),
        "scale": fields.number("routed_scaling_factor", 1.0, above=0),
        "num_groups": num_groups,
        "num_chosen_groups": num_chosen_groups,
        "scores_of_group": SCORES_OF_GROUP,
        "has_correction_bias": True,
    }
