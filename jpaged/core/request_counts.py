"""Counts and times of steps and requests, as a server's metrics have them: a logger that sums up what it is told."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

import msgspec

from .stat_loggers import EndedRequest
from .step_record import StepRecord

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


class Histogram(msgspec.Struct):
    """Counts of values by the bucket that they fall into, and their sum."""

    bounds: tuple[float, ...]
    """The upper ends of the buckets, ascending; a last bucket without an end follows."""
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, bounds: Sequence[float]) -> Histogram:
        """Return a histogram without values."""
        return cls(tuple(bounds), [0] * (len(bounds) + 1))

    def add(self, value: float, count: int = 1) -> None:
        """Count a value so many times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def copy(self) -> Histogram:
        """Return the present counts, which do not change any more."""
        return Histogram(self.bounds, list(self.counts), self.sum)

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper end, number of values up to it), as Prometheus has them."""
        counts, total = list(self.counts), 0
        result: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), counts, strict=True):
            total += count
            result.append(("+Inf" if bound == float("inf") else repr(float(bound)), total))
        return result


class RequestCounts(msgspec.Struct, frozen=True):
    """What a `RequestCounter` has counted, at one moment."""

    histograms: dict[str, Histogram]
    finished: dict[str, int]
    """Finish reason → requests that have ended by it."""


class RequestCounter:
    """Counts the steps and the ended requests of an engine. A logger: see `StatLogger`."""

    def __init__(self) -> None:
        self.histograms = {
            "time_to_first_token_seconds": Histogram.of(FIRST_TOKEN_BOUNDS_S),
            "inter_token_latency_seconds": Histogram.of(TOKEN_BOUNDS_S),
            "e2e_request_latency_seconds": Histogram.of(REQUEST_BOUNDS_S),
            "request_queue_time_seconds": Histogram.of(REQUEST_BOUNDS_S),
            "request_prefill_time_seconds": Histogram.of(REQUEST_BOUNDS_S),
            "request_decode_time_seconds": Histogram.of(REQUEST_BOUNDS_S),
            "request_inference_time_seconds": Histogram.of(REQUEST_BOUNDS_S),
            "request_time_per_output_token_seconds": Histogram.of(TOKEN_BOUNDS_S),
            "request_prompt_tokens": Histogram.of(REQUEST_BOUNDS),
            "request_generation_tokens": Histogram.of(REQUEST_BOUNDS),
            "request_max_num_generation_tokens": Histogram.of(REQUEST_BOUNDS),
            "request_params_max_tokens": Histogram.of(REQUEST_BOUNDS),
            "request_params_n": Histogram.of(SAMPLE_BOUNDS),
            "iteration_tokens_total": Histogram.of(STEP_BOUNDS),
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

    def counts(self) -> RequestCounts:
        """Return what was counted so far. Any thread may call."""
        return RequestCounts({name: one.copy() for name, one in self.histograms.items()}, dict(self.finished))
