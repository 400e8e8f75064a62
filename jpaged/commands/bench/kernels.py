"""Compiles attention over pages as a chain of layers, and times it.

`jpaged tune` and `scripts/bench/kernels.py` use it. Each layer has pages of its own: what a layer writes depends on
what the layer before attended to, as in a model. Runs of programs that are compared are interleaved. Heads are those
of SmolLM2-135M unless a workload has others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import numpy as np

from ...pallas_kernels.ragged_paged_attention.interface import (
    NULL_PAGE,
    AttentionMetadata,
    Backend,
    KVShape,
    LayerPlace,
)
from ...pallas_kernels.ragged_paged_attention.paged_cache import PagedCache
from ...pallas_kernels.ragged_paged_attention.plain_steps import random_tables, step_of_rows

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 9, 3, 64


@dataclass(frozen=True)
class Workload:
    """Rows of a step: of one length, or of lengths spread evenly between two."""

    num_rows: int
    context_len: int
    """Tokens of the longest row, with the step's own tokens."""
    num_layers: int
    query_len: int = 1
    num_shared: int = 0
    """Tokens that all rows begin with, whose pages are the same."""
    shortest_len: int | None = None
    """Context of the shortest row; None: as long as the longest."""
    table_len: int | None = None
    """Tokens that a page table has room for; None: as many as the context."""
    num_heads: int = NUM_HEADS
    num_kv_heads: int = NUM_KV_HEADS
    head_size: int = HEAD_SIZE

    @property
    def context_lens(self) -> list[int]:
        """Return the tokens of each row, longest first, as the engine orders them."""
        shortest = self.context_len if self.shortest_len is None else self.shortest_len
        return np.linspace(self.context_len, shortest, self.num_rows).astype(int).tolist()

    @property
    def scale(self) -> float:
        """Return the factor of the scores."""
        return self.head_size**-0.5


@dataclass
class Program:
    """A compiled step and its state, which each run donates; `times_s` are the seconds per layer of each run."""

    run: Any
    state: Any
    num_layers: int
    times_s: list[float]

    def time(self) -> None:
        """Run the step once and record its seconds per layer."""
        start = time.perf_counter()
        self.state = jax.block_until_ready(self.run(self.state))
        self.times_s.append((time.perf_counter() - start) / self.num_layers)

    @property
    def ms(self) -> float:
        """Return the median milliseconds per layer."""
        return round(1e3 * median(self.times_s), 4)


def paged(backend: Backend, workload: Workload, page_size: int, dtype: str, *, num_copies: int = 1) -> Program:
    """Return the workload over pages in random order, in a cache of `num_copies` times the pages that its rows need."""
    cache, step = random_pages(backend, workload, page_size, dtype, num_copies)

    def attend(layer: int, cache: PagedCache, q: Any, k: Any, v: Any) -> tuple[Any, PagedCache]:
        return cache.attend(layer, q, k, v, step, scale=workload.scale)

    return chain_of_layers(attend, cache, workload, dtype)


def measure(programs: dict[str, Program], num_runs: int) -> None:
    """Time all programs in interleaved runs, after one run of each that is not counted."""
    for program in programs.values():
        program.time()
        program.times_s.clear()
    for _ in range(num_runs):
        for program in programs.values():
            program.time()


def random_pages(
    backend: Backend, workload: Workload, page_size: int, dtype: str, num_copies: int
) -> tuple[PagedCache, AttentionMetadata]:
    """Return a cache with random pages, and the step's metadata, whose page tables name them in random order."""
    num_layers, num_rows, query_len = workload.num_layers, workload.num_rows, workload.query_len
    tables = random_tables(workload.context_lens, page_size, np.random.default_rng(0))
    num_pages, num_shared = 1 + num_copies * int(tables.max()), workload.num_shared // page_size
    tables[:, :num_shared] = tables[0, :num_shared]
    layout = backend.layout(KVShape(num_layers, num_pages, page_size, workload.num_kv_heads, workload.head_size, dtype))
    pages = tuple(jax.random.normal(jax.random.key(index), shape, dtype) for index, shape in enumerate(layout.shapes))
    places = tuple(LayerPlace(0, layer) for layer in range(num_layers))
    num_more = -(-(workload.table_len or workload.context_len) // page_size) - tables.shape[1]
    tables = np.pad(tables, ((0, 0), (0, num_more)), constant_values=NULL_PAGE)
    step = step_of_rows(
        backend,
        [query_len] * num_rows,
        workload.context_lens,
        tables,
        page_size=page_size,
        num_tokens=num_rows * query_len,
        num_rows=num_rows,
        decodes_only=query_len == 1,
    )
    return PagedCache(pages, layout, places, backend), step


def chain_of_layers(attend: Callable[..., tuple[Any, Any]], cache: Any, workload: Workload, dtype: str) -> Program:
    """Compile a chain of layers, each of whose queries, keys and values come from what the one before attended to."""
    num_tokens, num_kv_heads = workload.num_rows * workload.query_len, workload.num_kv_heads
    q, k, v = (
        jax.random.normal(jax.random.key(10 + index), (num_tokens, heads, workload.head_size), dtype)
        for index, heads in enumerate((workload.num_heads, num_kv_heads, num_kv_heads))
    )

    def run(state: tuple[Any, ...]) -> tuple[Any, ...]:
        cache, q, k, v = state
        for layer in range(workload.num_layers):
            out, cache = attend(layer, cache, q, k, v)
            mean = out[:, :num_kv_heads].astype(dtype)
            q, k, v = 0.9 * q + 0.1 * out.astype(dtype), 0.9 * k + 0.1 * mean, 0.9 * v + 0.1 * mean
        return cache, q, k, v

    return compiled(run, (cache, q, k, v), workload.num_layers)


def compiled(run: Callable[[Any], Any], state: Any, num_layers: int) -> Program:
    """Compile a function from a donated state to the next state."""
    return Program(jax.jit(run, donate_argnums=0).lower(state).compile(), state, num_layers, [])
