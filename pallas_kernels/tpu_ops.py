"""Layer operations of TPUs, whose compiler chooses the order of an array's axes in memory by their sizes.

The last axis in memory fills tiles of 128 lanes. If an array's last axis is no multiple of that, the compiler puts
another axis last wherever the array then takes less memory. Lookups in a table, and products of experts, read arrays in
the order of their axes, so each step would copy the whole array first. Arrays of whole tiles keep that order.
"""

from __future__ import annotations

from dataclasses import dataclass

from .layer_ops import LayerOps
from .ragged_paged_attention.tpu.lanes import LANES


@dataclass(frozen=True)
class TpuOps(LayerOps):
    """Plain XLA, with embedding tables and matrices of experts that fill whole tiles on each device."""

    def table_columns(self, hidden_size: int) -> int:
        return _round_up(hidden_size, LANES)

    def expert_columns(self, num_out: int) -> int:
        return _round_up(num_out, LANES)

    def expert_share(self, num_experts: int, width: int, num_devices: int, *, is_by_expert: bool) -> tuple[int, int]:
        """See `LayerOps.expert_share`. Gates and ups of a device, side by side, fill whole tiles."""
        num_experts, width = super().expert_share(num_experts, width, num_devices, is_by_expert=is_by_expert)
        num_shards = 1 if is_by_expert else num_devices
        return num_experts, num_shards * _round_up(width // num_shards, LANES // 2)

    def choice_values(self, hidden: int, inner: int, itemsize: int, *, has_bias: bool = False) -> int:
        """See `LayerOps.choice_values`.

        Beside the float32 results of gate and up are their values of 16 bits, and the biases of each row in float32.
        If `inner` is small, a compiled step takes as much as two arrays of float32 results of the second product.
        """
        values_of_float32 = 4 // itemsize
        values_of_column = values_of_float32 * (2 if has_bias else 1) + (1 if itemsize < 4 else 0)
        return max(hidden + (2 * values_of_column + 1) * inner, 2 * values_of_float32 * hidden + inner)

    def expert_values(self, num_experts: int, hidden: int, inner: int) -> int:
        """Return 0: no matrix is copied in front of a product."""
        return 0


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


TPU_OPS = TpuOps()
