"""What /metrics tells: counts and times of steps and requests, under vLLM's names.

The core counts in plain numbers; Prometheus's format is made of its snapshot, when it is asked for. No label comes from
a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ..core.request_counts import RequestCounter
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

    def text(self, snapshot: CoreSnapshot | None) -> bytes:
        """Return all metrics in Prometheus's text format; counters of the core are 0 without a snapshot of it."""
        from prometheus_client import generate_latest

        return generate_latest(_Collector(partial(self._families, snapshot)))  # type: ignore[arg-type]

    def _families(self, snapshot: CoreSnapshot | None) -> Iterable[Metric]:
        """Yield each metric with all its samples."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        stats = {} if snapshot is None else dict(snapshot.stats)
        requests = NOTHING if snapshot is None or snapshot.requests is None else snapshot.requests
        stats["padding_tokens"] = stats.get("padded_tokens", 0) - stats.get("step_tokens", 0)
        labels, label_values = ["model_name"], [self._label]
        for name, (key, text) in GAUGES.items():
            value = stats.get(key, 0)
            yield self._with(GaugeMetricFamily(f"{self.prefix}:{name}", text, labels=labels), label_values, value)
        share = GaugeMetricFamily(f"{self.prefix}:kv_cache_usage_perc", "Pages in use, 0 to 1.", labels=labels)
        yield self._with(share, label_values, stats.get("blocks_used", 0) / max(1, stats.get("blocks", 1)))
        if snapshot is not None:
            text = "Tokens of a page, and pages: labels of a value that is always 1."
            pool = GaugeMetricFamily(
                f"{self.prefix}:cache_config_info", text, labels=[*labels, "block_size", "num_gpu_blocks"]
            )
            sizes = [str(snapshot.block_size), str(stats["blocks"])]
            yield self._with(pool, [*label_values, *sizes], 1)
        for name, (key, text) in COUNTERS.items():
            value = stats.get(key, 0)
            yield self._with(CounterMetricFamily(f"{self.prefix}:{name}", text, labels=labels), label_values, value)
        success = CounterMetricFamily(
            f"{self.prefix}:request_success", "Requests that have ended.", labels=[*labels, "finished_reason"]
        )
        for reason, count in requests.finished.items():
            success.add_metric([*label_values, reason], count)
        yield success
        if snapshot is not None and snapshot.expert_tokens:
            text = "Tokens that have chosen each expert of each layer."
            chosen = CounterMetricFamily(f"{self.prefix}:expert_tokens", text, labels=[*labels, "layer", "expert"])
            for layer, counts in snapshot.expert_tokens.items():
                for expert, count in enumerate(counts):
                    chosen.add_metric([*label_values, str(layer), str(expert)], count)
            yield chosen
        for name, histogram in requests.histograms.items():
            family = HistogramMetricFamily(f"{self.prefix}:{name}", HISTOGRAM_TEXTS[name], labels=labels)
            family.add_metric(label_values, histogram.buckets(), histogram.sum)
            yield family

    @staticmethod
    def _with(family: Metric, labels: Sequence[str], value: float) -> Metric:
        family.add_metric(labels, value)  # type: ignore[attr-defined]
        return family


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
