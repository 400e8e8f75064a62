"""The experts of a decoder's sparse MLPs: how many, how wide, and how rows choose among them."""

from __future__ import annotations

from dataclasses import dataclass

SCORINGS = "softmax", "sigmoid"


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
