"""`jpaged bench latency`: one stream of tokens, workload A, measured as `throughput` measures its workloads."""

from __future__ import annotations

from functools import partial

from .throughput import bench

main = partial(bench, "latency")
