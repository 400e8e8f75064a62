"""How a preempted request gives its pages back: its tokens are recomputed later, or its pages move to the host pool.

Knows costs and counts; no queue, no page table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ..request import Request


class PreemptionMode(Enum):
    """The values of the option `preemption_mode`."""

    AUTO = "auto"
    RECOMPUTE = "recompute"
    SWAP = "swap"


class Preemption(NamedTuple):
    """A request that was preempted; `mode` is RECOMPUTE or SWAP, `reason` says in words why that one."""

    request: Request
    mode: PreemptionMode
    reason: str


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """The costs of swapping and of computing on this machine, measured at start."""

    page_bytes: int
    swap_bytes_per_s: float
    prefill_s_per_token: float

    def swap_s(self, num_pages: int) -> float:
        """Return the seconds that moving so many pages out and in again takes."""
        return 2 * num_pages * self.page_bytes / self.swap_bytes_per_s

    def recompute_s(self, num_tokens: int) -> float:
        """Return the seconds that computing so many tokens anew takes."""
        return num_tokens * self.prefill_s_per_token


@dataclass(frozen=True, slots=True)
class PreemptionPolicy:
    """Chooses the mode by the option, or by cost where the option is AUTO. Without costs AUTO means RECOMPUTE."""

    mode: PreemptionMode = PreemptionMode.RECOMPUTE
    costs: SwapCosts | None = None

    def choose(self, *, num_tokens: int, num_pages: int) -> tuple[PreemptionMode, str]:
        """Return RECOMPUTE or SWAP for a request with `num_tokens` computed tokens in `num_pages` pages, and why.

        Tokens and pages that its samples share count once. A request without computed tokens is always recomputed: it
        has nothing to swap. Otherwise the option `preemption_mode` decides, unless it is AUTO. Then the cheaper way is
        chosen, and the reason gives both costs: "12 pages out and in take 3 ms, 192 tokens anew 8 ms". RECOMPUTE is
        chosen if both cost the same, or if no costs were measured.
        """
        if num_tokens == 0:
            return PreemptionMode.RECOMPUTE, "nothing is computed yet"
        if self.mode is not PreemptionMode.AUTO:
            return self.mode, f"preemption_mode={self.mode.value}"
        if self.costs is None:
            return PreemptionMode.RECOMPUTE, "no costs of swapping are known"
        swap_s, recompute_s = self.costs.swap_s(num_pages), self.costs.recompute_s(num_tokens)
        mode = PreemptionMode.SWAP if swap_s < recompute_s else PreemptionMode.RECOMPUTE
        swap = f"{num_pages} pages out and in take {1e3 * swap_s:.3g} ms"
        return mode, f"{swap}, {num_tokens} tokens anew {1e3 * recompute_s:.3g} ms"
