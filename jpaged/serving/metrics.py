"""What /metrics tells: counts and times of steps and requests, under vLLM's names.

Steps and ends of requests are noted on the engine's thread, in plain numbers; Prometheus's format is made when it is
asked for, of these and of a snapshot of the core. No label comes from a request.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ..core.stat_loggers import EndedRequest
from ..core.step_record import StepRecord
from ..remote.core_client import CoreSnapshot

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error")
FIRST_TOKEN_BOUNDS_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
REQUEST_BOUNDS_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
REQUEST_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
SAMPLE_BOUNDS = (1, 2, 5, 10, 20)
STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
"""Upper ends of the buckets of histograms: of times in seconds, and of numbers of tokens and samples."""


class Histogram:
    """Counts of values by the bucket that they fall into, and their sum."""

    def __init__(self, bounds: Sequence[float]):
        """`bounds` are the upper ends of the buckets, ascending; a last bucket without an end follows."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value so many times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper end, number of values up to it), as Prometheus has them."""
        counts, total = list(self.counts), 0
        result: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), counts, strict=True):
            total += count
            result.append(("+Inf" if bound == float("inf") else repr(float(bound)), total))
        return result


class _Collector(NamedTuple):
    """What Prometheus's client makes its text of."""

    collect: Callable[[], Iterable[Metric]]


class ServerMetrics:
    """Observes an engine's steps and ended requests, and collects them for Prometheus."""

    def __init__(self, model_name: str, *, has_vllm_names: bool = False):
        """`model_name` is a label of all metrics; with `has_vllm_names` their names begin with `vllm:`."""
        self.prefix, self._label = "vllm" if has_vllm_names else "jpaged", model_name
        self.histograms = {
            "time_to_first_token_seconds": Histogram(FIRST_TOKEN_BOUNDS_S),
            "inter_token_latency_seconds": Histogram(TOKEN_BOUNDS_S),
            "e2e_request_latency_seconds": Histogram(REQUEST_BOUNDS_S),
            "request_queue_time_seconds": Histogram(REQUEST_BOUNDS_S),
            "request_prefill_time_seconds": Histogram(REQUEST_BOUNDS_S),
            "request_decode_time_seconds": Histogram(REQUEST_BOUNDS_S),
            "request_inference_time_seconds": Histogram(REQUEST_BOUNDS_S),
            "request_time_per_output_token_seconds": Histogram(TOKEN_BOUNDS_S),
            "request_prompt_tokens": Histogram(REQUEST_BOUNDS),
            "request_generation_tokens": Histogram(REQUEST_BOUNDS),
            "request_max_num_generation_tokens": Histogram(REQUEST_BOUNDS),
            "request_params_max_tokens": Histogram(REQUEST_BOUNDS),
            "request_params_n": Histogram(SAMPLE_BOUNDS),
            "iteration_tokens_total": Histogram(STEP_BOUNDS),
        }
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self._prompt_end_s: dict[str, float] = {}
        """When the last chunk of each running request's prompt was computed: the time of its samples' first tokens."""
        self._last_token_s: dict[str, dict[int, float]] = {}
        """When each sample of a running request got its last token, by its index, from the second token on."""
        self._last_step = 0
        """Number of the step that was dispatched last."""
        self._last_step_of_ended: dict[str, int] = {}
        """Number of the last step that a request which has ended may be in, oldest first, until that step is over."""

    # On the engine's thread

    def dispatched(self, record: StepRecord) -> None:
        """Note the number of the step."""
        self._last_step = record.number

    def retired(self, record: StepRecord) -> None:
        """Count a step's tokens, and the time that each sequence has waited for its token."""
        self.histograms["iteration_tokens_total"].add(record.num_tokens)
        now_s, intervals = time.monotonic(), self.histograms["inter_token_latency_seconds"]
        for index, turn in enumerate(record.turns):
            request_id = turn.request_id
            if request_id in self._last_step_of_ended:
                continue
            if index >= record.num_decodes:
                self._prompt_end_s[request_id] = now_s
                continue
            times_s = self._last_token_s.setdefault(request_id, {})
            before_s = times_s.get(turn.sample_index) or self._prompt_end_s.get(request_id)
            if before_s is not None:
                intervals.add((now_s - before_s) / turn.num_tokens, turn.num_tokens)
            times_s[turn.sample_index] = now_s
        for request_id, last_step in list(self._last_step_of_ended.items()):
            if last_step > record.number:
                break
            del self._last_step_of_ended[request_id]

    def ended(self, request: EndedRequest) -> None:
        """Count a request that has ended."""
        self._last_token_s.pop(request.request_id, None)
        self._prompt_end_s.pop(request.request_id, None)
        self._last_step_of_ended[request.request_id] = self._last_step
        self.finished[request.finish_reason] += 1
        histograms, end_s = self.histograms, request.finished_time or time.monotonic()
        histograms["e2e_request_latency_seconds"].add(end_s - request.arrival_time)
        histograms["request_prompt_tokens"].add(request.num_prompt_tokens)
        histograms["request_generation_tokens"].add(request.num_output_tokens)
        histograms["request_max_num_generation_tokens"].add(request.longest_output)
        histograms["request_params_max_tokens"].add(request.max_tokens)
        histograms["request_params_n"].add(request.n)
        start_s, first_token_s = request.first_scheduled_time, request.first_token_time
        if start_s is None:
            return
        histograms["request_queue_time_seconds"].add(start_s - request.arrival_time)
        histograms["request_inference_time_seconds"].add(end_s - start_s)
        if first_token_s is None:
            return
        histograms["time_to_first_token_seconds"].add(first_token_s - request.arrival_time)
        histograms["request_prefill_time_seconds"].add(first_token_s - start_s)
        histograms["request_decode_time_seconds"].add(end_s - first_token_s)
        if request.longest_output > 1:
            token_s = (end_s - first_token_s) / (request.longest_output - 1)
            histograms["request_time_per_output_token_seconds"].add(token_s)

    # On the server's thread

    def text(self, snapshot: CoreSnapshot | None) -> bytes:
        """Return all metrics in Prometheus's text format; counters of the core are 0 without a snapshot of it."""
        from prometheus_client import generate_latest

        return generate_latest(_Collector(partial(self._families, snapshot)))  # type: ignore[arg-type]

    def _families(self, snapshot: CoreSnapshot | None) -> Iterable[Metric]:
        """Yield each metric with all its samples."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        stats = {} if snapshot is None else dict(snapshot.stats)
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
        for reason in FINISH_REASONS:
            success.add_metric([*label_values, reason], self.finished[reason])
        yield success
        if snapshot is not None and snapshot.expert_tokens:
            text = "Tokens that have chosen each expert of each layer."
            chosen = CounterMetricFamily(f"{self.prefix}:expert_tokens", text, labels=[*labels, "layer", "expert"])
            for layer, counts in snapshot.expert_tokens.items():
                for expert, count in enumerate(counts):
                    chosen.add_metric([*label_values, str(layer), str(expert)], count)
            yield chosen
        for name, histogram in self.histograms.items():
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
