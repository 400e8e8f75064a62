"""What the start decides about a model's experts, and what it says of them: how they are spread, what multiplies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from ..checks import refusal
from ..config.engine_config import EngineConfig
from ..errors import ConfigError
from ..models.config.decoder import DecoderConfig
from ..models.own_model import OwnModel
from ..models.weights.weight_state import flat_state
from ..models.weights.weights import Weights
from ..pallas_kernels.ragged_paged_attention.interface import Backend


def with_spread_experts(config: EngineConfig, model: DecoderConfig | OwnModel) -> DecoderConfig | OwnModel:
    """Return the model's config, with whole experts on each device if `enable_expert_parallel` asks for that.

    Raises ConfigError for a model without experts, whose option would do nothing, and for a module of the caller's own,
    whose variables say themselves how they are spread.
    """
    if not config.enable_expert_parallel:
        return model
    way_out = 'give its variables the logical axis expert, as nnx.Param(array, logical_axes=("expert", None, None))'
    return replace(_with_experts("enable_expert_parallel", model, way_out), spreads_experts=True)


def check_experts_can_be_counted(config: EngineConfig, model: DecoderConfig | OwnModel) -> None:
    """Raise ConfigError if the tokens of experts are to be counted and the model is not known to have experts."""
    if config.count_expert_tokens:
        _with_experts("count_expert_tokens", model, "count them in the module itself")


def _with_experts(option: str, model: DecoderConfig | OwnModel, own_way_out: str) -> DecoderConfig:
    """Return the config of a model with experts. Raises ConfigError, which names the `option`, for any other model.

    `own_way_out` is what the error advises for a module of the caller's own.
    """
    if not isinstance(model, DecoderConfig):
        fault = f"true for {model.name}"
        raise refusal(option, fault, "false for a module of your own", own_way_out, error=ConfigError)
    if model.experts is None or not any(model.experts.sparse_layers):
        got = f"true for a {model.architecture}, which has no experts"
        raise refusal(option, got, "false, or a model with experts", "leave it out", error=ConfigError)
    return model


def check_has_mesh(config: EngineConfig, devices: Sequence[jax.Device]) -> None:
    """Raise ConfigError if experts are to be spread over one device."""
    if config.enable_expert_parallel and len(devices) == 1:
        way_out = "give tensor_parallel_size, or leave it out"
        fault, allowed = "true with 1 device", "false, or 2 devices and more"
        raise refusal("enable_expert_parallel", fault, allowed, way_out, error=ConfigError)


def experts_note(weights: Weights, backend: Backend, devices: Sequence[Any]) -> str:
    """Return in words how many experts there are, how they are spread, and which product serves them; "" for none.

    `weights` may be abstract, and `backend` has the layer operations that read them. Example: "8 in 32 of 32 layers, 2
    for each token; each cut over 8 devices; products by ragged_dot".
    """
    model = weights.config
    if model is None or (experts := model.experts) is None:
        return ""
    ops = backend.layer_ops
    clauses = [
        f"{experts.num_experts} in {sum(experts.sparse_layers)} of {model.num_layers} layers, "
        f"{experts.num_chosen} for each token"
    ]
    if (num_devices := len(devices)) > 1:
        is_by_expert = model.spreads_experts
        stored, width = ops.expert_share(experts.num_experts, experts.width, num_devices, is_by_expert=is_by_expert)
        if is_by_expert:
            padding = f" ({stored} stored for {experts.num_experts})" if stored != experts.num_experts else ""
            clauses.append(f"{stored // num_devices} on each of {num_devices} devices, whole{padding}")
        else:
            padding = f" ({width} columns for {experts.width})" if width != experts.width else ""
            clauses.append(f"each cut over {num_devices} devices{padding}")
    product = "tiles of rows in plain XLA"
    if not ops.stores_experts_apart:
        product = "native code"
    elif devices[0].platform == "tpu" and not _are_codes(weights):
        product = "ragged_dot"
    return "; ".join([*clauses, f"products by {product}"])


def _are_codes(weights: Weights) -> bool:
    """Return whether matrices of experts are kept as codes."""
    metadata = (leaf.get_metadata() for _, leaf in flat_state(weights.state))
    return any("num_experts" in each and "code_parts" in each for each in metadata)
