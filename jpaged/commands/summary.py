"""The closing summary of `generate`: parameters and where they came from, start-up times, throughput, pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..outputs import ClusterSummary, EngineSummary
from ..sampling.sampling_params import FIELDS, BeamSearchParams, SamplingParams
from .flags import SAMPLING_DEFAULTS

SHOWN_PARAMS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
"""Sampling parameters that the summary always shows; it shows the others if they differ from the default."""


class SamplingSummary:
    """The sampling parameters in effect and where each came from; `note` adds the requests one by one.

    Sources are a flag, a line of the input file, the model's generation_config.json, or the default.
    """

    def __init__(self, flags: Mapping[str, Any], model_defaults: Mapping[str, Any]):
        """`flags` and `model_defaults` are the parameters given by flags and by generation_config.json."""
        self._flags, self._model_defaults = flags, model_defaults
        self._first: SamplingParams | BeamSearchParams | None = None
        self._last: SamplingParams | BeamSearchParams | None = None
        self._varying: set[str] = set()

    def note(self, params: SamplingParams | BeamSearchParams) -> None:
        """Take the parameters of one more request into account: those that differ from the first request's vary.

        The parameters of beam searches are not compared, and count as the first only if no request samples.
        """
        if self._first is None or (isinstance(self._first, BeamSearchParams) and isinstance(params, SamplingParams)):
            self._first = params
        # Lines without own parameters share one object, which need not be compared again.
        if params is self._last or isinstance(params, BeamSearchParams):
            return
        self._last = params
        self._varying |= {name for name in FIELDS if getattr(params, name) != getattr(self._first, name)}

    def __str__(self) -> str:
        """Return the parameters in one line, such as "temperature 0.7 (flag) · top_p 0.9 (model) · n varies (…)".

        Parameters of `SHOWN_PARAMS` are always shown; others only if a flag or the model gives them, or if the value is
        not the default. If the first request is a beam search, all its parameters are shown, without sources. The text
        is empty before the first request.
        """
        first = self._first
        if first is None:
            return ""
        if isinstance(first, BeamSearchParams):
            return " · ".join(f"{name} {value}" for name, value in vars(first).items())
        shown = []
        for name in FIELDS:
            if name == "output_kind":  # The command's, not its user's.
                continue
            value = getattr(first, name)
            source = "flag" if name in self._flags else "model" if name in self._model_defaults else "default"
            if name in self._varying:
                shown.append(f"{name} varies (lines of the file)")
            elif name in SHOWN_PARAMS or source != "default" or value != SAMPLING_DEFAULTS[name]:
                # What a line without this parameter gets: flags come before the model, and the model before defaults.
                without_line = {**SAMPLING_DEFAULTS, **self._model_defaults, **self._flags}[name]
                shown.append(f"{name} {value} ({source if value == without_line else 'line'})")
        return " · ".join(shown)


def summary(
    ran: EngineSummary | ClusterSummary, sampling: SamplingSummary, elapsed_s: float, first_token_s: float
) -> Iterator[str]:
    """Yield the lines of the summary of what has computed a run, after a blank one.

    `elapsed_s` is the time of the run without compilation, `first_token_s` the time from the start of the process to
    the first token.
    """
    yield ""
    if isinstance(ran, ClusterSummary):
        yield from _cluster_lines(ran, sampling, elapsed_s, first_token_s)
    else:
        yield from _engine_lines(ran, sampling, elapsed_s, first_token_s)


def _cluster_lines(
    cluster: ClusterSummary, sampling: SamplingSummary, elapsed_s: float, first_token_s: float
) -> Iterator[str]:
    """Yield the lines about workers, sampling, start times and throughput."""
    resources = ", ".join(f"{name} {amount:g}" for name, amount in cluster.resources.items())
    yield f"workers: {cluster.num_workers}, each with {resources} · nodes: {', '.join(cluster.nodes) or 'none'}"
    yield f"sampling: {sampling}"
    yield f"start: first worker {cluster.start_s:.1f} s · first token {first_token_s:.1f} s after process start"
    yield (
        f"throughput: {cluster.num_output_tokens / elapsed_s:.1f} output tokens/s, "
        f"{cluster.num_prompt_tokens / elapsed_s:.1f} prompt tokens/s over {elapsed_s:.1f} s (start excluded)"
    )


def _engine_lines(
    engine: EngineSummary, sampling: SamplingSummary, elapsed_s: float, first_token_s: float
) -> Iterator[str]:
    """Yield the lines about device, memory, sampling, start times, throughput and pages.

    Items that do not apply, such as swapped bytes when nothing was swapped, are left out. Example of a line:
    "start: load 2.1 s · compile 8.0 s · first token 12.3 s after process start".
    """
    stats = engine.stats
    yield f"device: {engine.device} · {engine.dtype}, KV {engine.kv_cache_dtype}"
    if engine.mesh:
        yield f"mesh: {engine.mesh}"
    yield f"attention: {engine.attention}"
    if engine.rope:
        yield f"rotary embedding: {engine.rope}"
    if engine.experts:
        yield f"experts: {engine.experts}"
    yield f"memory: {engine.memory}"
    yield f"sampling: {sampling}"
    yield f"ends: {engine.ends or 'none'}"
    yield (
        f"start: load {engine.load_s:.1f} s · compile {stats['compile_seconds']:.1f} s · "
        f"first token {first_token_s:.1f} s after process start"
    )
    yield (
        f"throughput: {stats['generation_tokens'] / elapsed_s:.1f} output tokens/s, "
        f"{stats['prompt_tokens'] / elapsed_s:.1f} prompt tokens/s over {elapsed_s:.1f} s (compilation excluded)"
    )
    if "expert_tokens" in stats:
        yield f"expert tokens: {balance_of_experts(stats['expert_tokens'])}"
    recomputed, swapped = stats["preemptions_recompute"], stats["preemptions_swap"]
    pages = [
        f"peak {stats['peak_blocks_used']} of {stats['blocks']} × {engine.block_size} tokens{engine.page_groups}",
        engine.num_host_blocks and f"host peak {stats['peak_host_blocks_used']} of {engine.num_host_blocks}",
        f"preemptions {recomputed + swapped} ({recomputed} by recompute, {swapped} by swap)",
        stats["swap_bytes"] and f"swapped {stats['swap_bytes'] / 1e6:.1f} MB",
        stats["copies"] and f"copies on write {stats['copies']}",
        f"prefix cache hits {stats['prefix_cache_hits'] / max(1, stats['prefix_cache_queries']):.1%}",
        f"padding {stats['padding_share']:.1%}",
        f"recompiles {stats['recompiles']}",
    ]
    # A part is 0 instead of a text if it does not apply.
    yield f"pages: {' · '.join(str(part) for part in pages if part)}"


def balance_of_experts(by_layer: Sequence[Sequence[int]]) -> str:
    """Return in words how evenly tokens have chosen experts, given the tokens of each expert of each layer.

    Example: "the busiest expert of a layer has 1.4 to 3.2 times the mean, 5 of 96 have none".
    """
    sparse = [counts for counts in by_layer if any(counts)]
    if not sparse:
        return "none were computed"
    shares = [max(counts) * len(counts) / sum(counts) for counts in sparse]
    num_idle, num_experts = sum(counts.count(0) for counts in map(list, sparse)), sum(map(len, sparse))
    times = f"{min(shares):.1f} to {max(shares):.1f} times"
    return f"the busiest expert of a layer has {times} the mean, {num_idle} of {num_experts} have none"
