"""The items about attention kernels that `gpu_check` and `tpu_check` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jpaged.pallas_kernels.ragged_paged_attention.interface import Backend
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend

from . import kernel_speed
from .items import Goal, Item, Part, Skipped
from .kernel_check import Batch, Bench, Case, parts_of
from .kernel_speed import Loop, Sizes, Variants

CASE_LIMIT_S = 120.0
"""Seconds after which a case of correctness counts as hanging; its programs compile beside those of others."""
GOALS: dict[str, Goal] = {
    "K1": Goal("≥", 0.90, "K1"),
    "K2": Goal("≥", 0.9, "K2"),
    "K3": Goal("≥", 0.75, "K3"),
    "K5": Goal("≤", 0.10, "K5"),
    "K6": Goal("≤", 0.60, "K6"),
}


@dataclass(frozen=True)
class Session:
    """What the items have to know of the device, and of this run."""

    seed: int
    backend_of: Callable[[Case], Backend]
    cases: Sequence[Case]
    case: Case
    """The heads and pages that are measured."""
    sizes: Sizes
    backends: tuple[str, ...]
    """Values of `attention_backend` for the engine, the first one that of this device."""
    num_repeats: int = 0
    decode_variants: Variants = field(default_factory=dict)
    prefill_variants: Variants = field(default_factory=dict)
    window_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the backend for a model all of whose layers have the measured window."""
    is_tiny: bool = False
    """Whether kernels are interpreted, and the engine's model and requests are tiny."""
    output: Path | None = None
    """The report's file, beside which a profile goes; None: nowhere."""

    @property
    def bench(self) -> Bench:
        """Return a new bench of this device's kernels with this run's seed."""
        return Bench(self.backend_of, self.seed)

    @property
    def quick_bench(self) -> Bench:
        """Return a new bench with this run's seed; with tiny shapes one of plain XLA, which takes less time than an
        interpreter."""
        return Bench(lambda case: XlaBackend(), self.seed) if self.is_tiny else self.bench


@dataclass(frozen=True)
class Rival:
    """Another implementation of attention for this kind of device, which is timed beside the kernels."""

    item: str
    """Name of the item that compares decode."""
    name: str
    """Its name in ratios."""
    dense: Callable[[Batch], Loop]
    """Makes its loop over the prompts of a batch if `is_ragged`, else over one as long as the longest of them."""
    is_ragged: bool
    paged: Callable[[Batch], Loop]
    """Makes its loop over the rows of a batch of decodes."""


def one(name: str, minutes: float, about: str, measure: Callable[[Session], dict[str, Any]], **options: Any) -> Item:
    """Return an item of one measurement, which has the item's name."""
    return Item(name, minutes, about, lambda session: {name: Part(lambda: measure(session))}, **options)


def kernel_items() -> list[Item]:
    """Return correctness, the bandwidth of a copy, and K1 to K3, K5 and K6."""
    return [
        Item(
            "correctness",
            2.0,
            "every kind of kernel against the dense oracle, 20 times the same bits",
            lambda session: parts_of(session.backend_of, session.cases, session.seed, num_repeats=session.num_repeats),
            in_threads=True,
            part_limit_s=CASE_LIMIT_S,
        ),
        one("copy", 0.2, "bandwidth of a copy, beside the data sheet", _copy),
        one("K1", 1.2, "decode ÷ copy; other tiles, plain XLA", _decode),
        one("K2", 0.8, "decode of skewed rows ÷ equal ones; other tiles, plain XLA", _skewed),
        one("K3", 0.8, "prefill ÷ matrix product; other tiles, plain XLA", _prefill),
        one("K5", 0.8, "a window ÷ full attention; other tiles, plain XLA", _window),
        one("K6", 0.4, "pages of one byte ÷ two", _bytes),
    ]


def compared_items(rival: Rival) -> list[Item]:
    """Return K4, prompts of different length, and decode, both against another implementation."""
    dense, paged = {rival.name: rival.dense}, {rival.name: rival.paged}

    def ragged(session: Session) -> dict[str, Any]:
        return kernel_speed.measure_ragged(
            session.quick_bench,
            session.case,
            session.sizes,
            session.prefill_variants,
            dense,
            is_ragged=rival.is_ragged,
        )

    def decode(session: Session) -> dict[str, Any]:
        return kernel_speed.measure_others(session.quick_bench, session.case, session.sizes, paged)

    about = f"prompts of different length; one prompt ÷ {rival.name}"
    return [one("K4", 0.8, about, ragged), one(rival.item, 0.8, f"decode ÷ {rival.name}", decode)]


def _copy(session: Session) -> dict[str, Any]:
    return kernel_speed.measure_copy(session.sizes)


def _decode(session: Session) -> dict[str, Any]:
    # The one measurement whose kernels are interpreted with tiny shapes as well.
    return kernel_speed.measure_decode(session.bench, session.case, session.sizes, session.decode_variants)


def _skewed(session: Session) -> dict[str, Any]:
    return kernel_speed.measure_skewed(session.quick_bench, session.case, session.sizes, session.decode_variants)


def _prefill(session: Session) -> dict[str, Any]:
    return kernel_speed.measure_prefill(session.quick_bench, session.case, session.sizes, session.prefill_variants)


def _window(session: Session) -> dict[str, Any]:
    variants, options = session.decode_variants, session.window_options
    return kernel_speed.measure_window(session.quick_bench, session.case, session.sizes, variants, **options)


def _bytes(session: Session) -> dict[str, Any]:
    if session.is_tiny:
        raise Skipped("plain XLA has no pages of one byte")
    return kernel_speed.measure_bytes(session.quick_bench, session.case, session.sizes)
