"""The pages of one layer: what every way to attend to them has in common."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Int


@dataclass(frozen=True)
class LayerPages:
    """Keys and values of one layer, and what makes scores of them. A subclass says how they lie in their arrays."""

    keys: Array
    """Of all layers."""
    values: Array
    first: Int[Array, ""]
    """Where the layer's pages begin."""
    scale: float
    window: int | None
    soft_cap: float | None
