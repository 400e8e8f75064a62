"""What /metrics tells: counts and times of steps and requests, under vLLM's names.

A core counts in plain numbers; Prometheus's format is made of its snapshot, when it is asked for. Each sample has the
label `engine`, the number of its core. No label comes from a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from ..core.request_counts import RequestCounter, RequestCounts
from ..remote.core_client import CoreSnapshot

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NOTHING = RequestCounter().counts()
"""What is told before there is a core."""


class _Collector(NamedTuple):
    """What Prometheus's client makes its text of."""

    collect: Callable[[], Iterable[Metric]]


class ServerMetrics:
    """Makes Prometheus's text of what a core has counted."""

    def __init__(self, model_name: str, *, has_vllm_names: bool = False):
        """`model_name` is a label of all metrics; with `has_vllm_names` their names begin with `vllm:`."""
        self.prefix, self._label = "vllm" if has_vllm_names else "jpaged", model_name

    def text(self, snapshots: Mapping[int, CoreSnapshot]) -> bytes:
        """Return all metrics in Prometheus's text format, with the samples of each core; without any core all are 0."""
        from prometheus_client import generate_latest

        if snapshots:
            cores = [_Core.of(snapshot, [self._label, str(index)]) for index, snapshot in snapshots.items()]
        else:
            cores = [_Core([self._label, "0"], {}, NOTHING, None)]
        return generate_latest(_Collector(partial(self._families, cores)))  # type: ignore[arg-type]

    def _families(self, cores: Sequence[_Core]) -> Iterable[Metric]:
        """Yield each metric with all its samples."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        def filled(family: Metric, samples: Iterable[tuple[_Core, Sequence[str], float]]) -> Metric:
            """Return a family with a value for each core and each of its further labels."""
            for core, more_labels, value in samples:
                family.add_metric([*core.labels, *more_labels], value)  # type: ignore[attr-defined]
            return family

        labels = ["model_name", "engine"]
        for name, (key, text) in GAUGES.items():
            gauge = GaugeMetricFamily(f"{self.prefix}:{name}", text, labels=labels)
            yield filled(gauge, [(core, (), core.stats.get(key, 0)) for core in cores])
        share = GaugeMetricFamily(f"{self.prefix}:kv_cache_usage_perc", "Pages in use, 0 to 1.", labels=labels)
        yield filled(share, [(core, (), core.share_of_pages) for core in cores])
        with_snapshots = [(core, core.snapshot) for core in cores if core.snapshot is not None]
        if with_snapshots:
            text = "Tokens of a page, and pages: labels of a value that is always 1."
            pool = GaugeMetricFamily(
                f"{self.prefix}:cache_config_info", text, labels=[*labels, "block_size", "num_gpu_blocks"]
            )
            sizes = [(core, (str(found.block_size), str(found.stats["blocks"])), 1) for core, found in with_snapshots]
            yield filled(pool, sizes)
        for name, (key, text) in COUNTERS.items():
            counter = CounterMetricFamily(f"{self.prefix}:{name}", text, labels=labels)
            yield filled(counter, [(core, (), core.stats.get(key, 0)) for core in cores])
        success = CounterMetricFamily(
            f"{self.prefix}:request_success", "Requests that have ended.", labels=[*labels, "finished_reason"]
        )
        ended = [(core, (reason,), count) for core in cores for reason, count in core.requests.finished.items()]
        yield filled(success, ended)
        if chosen := [sample for core, snapshot in with_snapshots for sample in _expert_samples(core, snapshot)]:
            text = "Tokens that have chosen each expert of each layer."
            experts = CounterMetricFamily(f"{self.prefix}:expert_tokens", text, labels=[*labels, "layer", "expert"])
            yield filled(experts, chosen)
        for name, text in HISTOGRAM_TEXTS.items():
            family = HistogramMetricFamily(f"{self.prefix}:{name}", text, labels=labels)
            for core in cores:
                histogram = core.requests.histograms[name]
                family.add_metric(core.labels, histogram.buckets(), histogram.sum)
            yield family


class _Core(NamedTuple):
    """What a core has counted, as metrics have it."""

    labels: list[str]
    """The values of the labels that all its samples have."""
    stats: Mapping[str, float | int]
    requests: RequestCounts
    snapshot: CoreSnapshot | None
    """None before there is a core."""

    @classmethod
    def of(cls, snapshot: CoreSnapshot, labels: list[str]) -> Self:
        """Return the counts of a snapshot."""
        stats = dict(snapshot.stats)
        stats["padding_tokens"] = stats["padded_tokens"] - stats["step_tokens"]
        return cls(labels, stats, snapshot.requests or NOTHING, snapshot)

    @property
    def share_of_pages(self) -> float:
        """Return the share of the pages that is in use."""
        return self.stats.get("blocks_used", 0) / max(1, self.stats.get("blocks", 1))


def _expert_samples(core: _Core, snapshot: CoreSnapshot) -> Iterable[tuple[_Core, Sequence[str], float]]:
    """Yield how many tokens have chosen each expert, if the core counts that."""
    for layer, counts in snapshot.expert_tokens.items():
        for expert, count in enumerate(counts):
            yield core, (str(layer), str(expert)), count


GAUGES = {
    "num_requests_running": ("requests_running", "Requests that steps compute."),
    "num_requests_waiting": ("requests_waiting", "Requests that wait for their first step."),
    "num_requests_swapped": ("requests_swapped", "Requests whose pages are on the host."),
}
"""Name → the key of `Engine.stats`, and what it is."""
COUNTERS = {
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens that were found in the prefix cache."),
    "num_preemptions": ("preemptions", "Times that a request has lost its pages."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of all requests."),
    "generation_tokens": ("generation_tokens", "Output tokens of all requests."),
    "compile_events": ("executables", "Programs that were compiled."),
    "compile_seconds": ("compile_seconds", "Seconds that steps have waited for a compilation."),
    "recompiles_after_warmup": ("recompiles", "Compilations outside of the plan: 0 unless there is a defect."),
    "swap_bytes": ("swap_bytes", "Bytes of pages moved between device and host."),
    "padding_tokens": ("padding_tokens", "Tokens that steps had room for and did not compute."),
}
HISTOGRAM_TEXTS = {
    "time_to_first_token_seconds": "Seconds from a request's arrival to its first token.",
    "inter_token_latency_seconds": "Seconds between two tokens of a sample.",
    "e2e_request_latency_seconds": "Seconds from a request's arrival to its end.",
    "request_queue_time_seconds": "Seconds from a request's arrival to its first step.",
    "request_prefill_time_seconds": "Seconds from a request's first step to its first token.",
    "request_decode_time_seconds": "Seconds from a request's first token to its end.",
    "request_inference_time_seconds": "Seconds from a request's first step to its end.",
    "request_time_per_output_token_seconds": "Seconds per token of a request's longest sample, after the first token.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Output tokens of a request.",
    "request_max_num_generation_tokens": "Output tokens of a request's longest sample.",
    "request_params_max_tokens": "Output tokens that a request asks for, or has room for.",
    "request_params_n": "Samples that a request asks for.",
    "iteration_tokens_total": "Tokens that a step computes.",
}
