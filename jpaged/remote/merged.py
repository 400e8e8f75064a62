"""What several cores tell, as one core would tell it: counts are added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..core.request_counts import Histogram, RequestCounts
from ..outputs import EngineSummary
from .core_client import CoreSnapshot, CoreStatus

LARGEST = ("compile_seconds", "end_tokens")
"""Counters of which the largest counts: cores compile at the same time, and have the same model."""


def merged_status(statuses: Sequence[CoreStatus]) -> CoreStatus:
    """Return what at least one core is doing."""
    return CoreStatus(
        is_alive=any(one.is_alive for one in statuses),
        is_sleeping=any(one.is_sleeping for one in statuses),
        num_programs_done=sum(one.num_programs_done for one in statuses),
        num_programs=sum(one.num_programs for one in statuses),
        held_s=max(one.held_s for one in statuses),
        is_compiling=any(one.is_compiling for one in statuses),
        num_steps=sum(one.num_steps for one in statuses),
        has_work=any(one.has_work for one in statuses),
    )


def merged_snapshot(snapshots: Sequence[CoreSnapshot]) -> CoreSnapshot:
    """Return the counters of all cores together."""
    counts = [one.requests for one in snapshots if one.requests is not None]
    by_layer = [one.expert_tokens for one in snapshots]
    return CoreSnapshot(
        stats=merged_stats([one.stats for one in snapshots]),
        block_size=snapshots[0].block_size,
        expert_tokens={layer: _added([one[layer] for one in by_layer]) for layer in by_layer[0]},
        requests=_merged_counts(counts) if counts else None,
    )


def merged_stats(all_stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the counters of `Engine.stats` of all cores together."""
    merged: dict[str, Any] = {}
    for name in all_stats[0]:
        values = [stats[name] for stats in all_stats]
        if name == "expert_tokens":
            merged[name] = [_added(layers) for layers in zip(*values, strict=True)]
        else:
            merged[name] = max(values) if name in LARGEST else sum(values)
    if "padding_share" in merged:
        num_padded = merged["padded_tokens"]
        merged["padding_share"] = 1 - merged["step_tokens"] / num_padded if num_padded else 0.0
    return merged


def merged_summary(summaries: Sequence[EngineSummary]) -> EngineSummary:
    """Return what all engines are, which are alike, and what they have done together."""
    first, num_engines = summaries[0], len(summaries)
    return msgspec.structs.replace(
        first,
        device=first.device if num_engines == 1 else f"{num_engines} × {first.device}",
        memory=first.memory if num_engines == 1 else f"for each engine {first.memory}",
        load_s=max(one.load_s for one in summaries),
        num_host_blocks=sum(one.num_host_blocks for one in summaries),
        stats=merged_stats([one.stats for one in summaries]),
    )


def _merged_counts(counts: Sequence[RequestCounts]) -> RequestCounts:
    histograms = {}
    for name, first in counts[0].histograms.items():
        each = [one.histograms[name] for one in counts]
        histograms[name] = Histogram(first.bounds, _added([one.counts for one in each]), sum(one.sum for one in each))
    reasons = dict.fromkeys(reason for one in counts for reason in one.finished)
    return RequestCounts(histograms, {reason: sum(one.finished.get(reason, 0) for one in counts) for reason in reasons})


def _added(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)]
