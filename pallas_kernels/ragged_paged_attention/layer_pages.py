"""The pages of one layer, as the loops over pages take them."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Int

from .interface import AttendOptions


@dataclass(frozen=True)
class LayerPages:
    """Keys and values of one layer, and its options. A subclass defines the layout of the two arrays."""

    keys: Array
    """Keys of all layers."""
    values: Array
    """Values of all layers."""
    first_page: Int[Array, ""]
    """Number of the layer's first page in these arrays."""
    options: AttendOptions
