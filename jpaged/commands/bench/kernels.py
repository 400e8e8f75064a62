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
import jax.numpy as jnp
import numpy as np

from ...pallas_kernels.ragged_paged_attention.interface import (
    NULL_PAGE,
    AttentionMetadata,
    Backend,
    KVLayout,
    KVShape,
    LayerPlace,
)
from ...pallas_kernels.ragged_paged_attention.kv_scales import KVScales, is_quantized, largest_number, quantize
from ...pallas_kernels.ragged_paged_attention.paged_cache import PagedCache
from ...pallas_kernels.ragged_paged_attention.plain_steps import random_tables, step_of_rows

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 9, 3, 64


@dataclass(frozen=True)
class Workload:
    """The rows (sequences) of a step: all of one length, or of lengths spread evenly between two."""

    num_rows: int
    context_len: int
    """Tokens of the longest row, including the step's new tokens."""
    num_layers: int
    query_len: int = 1
    """New tokens of each row; 1: all rows decode."""
    num_shared: int = 0
    """Tokens at the start of all rows whose pages are shared."""
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
        """Return 1 / √head_size, by which attention scores are multiplied."""
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


def paged(
    backend: Backend,
    workload: Workload,
    page_size: int,
    dtype: str,
    *,
    num_copies: int = 1,
    kv_dtype: str | None = None,
) -> Program:
    """Return a compiled program that attends the workload's rows to random pages, layer after layer.

    `dtype` is that of queries, keys and values, and of pages unless `kv_dtype` is given. The pages are in random order,
    in a cache of `num_copies` times the pages that the rows need.
    """
    cache, step = random_pages(backend, workload, page_size, kv_dtype or dtype, num_copies)

    def attend(layer: int, cache: PagedCache, q: Any, k: Any, v: Any) -> tuple[Any, PagedCache]:
        return cache.attend(layer, q, k, v, step, scale=workload.scale)

    return chain_of_layers(attend, cache, workload, dtype)


def measure(programs: dict[str, Program], num_runs: int) -> None:
    """Run each program `num_runs` times, in turns, and record the times in `Program.times_s`.

    The turns are A, B, A, B, …, so that a change of the clock or of the load meets all programs alike. A first run of
    each, which warms up, is not counted; times from before are dropped.
    """
    for program in programs.values():
        program.time()
        program.times_s.clear()
    for _ in range(num_runs):
        for program in programs.values():
            program.time()


def random_pages(
    backend: Backend, workload: Workload, page_size: int, dtype: str, num_copies: int
) -> tuple[PagedCache, AttentionMetadata]:
    """Return a paged cache with random contents, and the metadata of a step over the workload's rows.

    The page tables [rows, P] name the pages that the rows need, in random order; the cache has `num_copies` times as
    many, and the null page. The first `num_shared` tokens, rounded down to whole pages, are in the same pages for all
    rows. The tables have room for `table_len` tokens (at least `context_len`); the entries beyond a row's pages are the
    null page. Random numbers have fixed seeds.
    """
    num_layers, num_rows, query_len = workload.num_layers, workload.num_rows, workload.query_len
    tables = random_tables(workload.context_lens, page_size, np.random.default_rng(0))
    # Page 0 is the null page.
    num_pages, num_shared_pages = 1 + num_copies * int(tables.max()), workload.num_shared // page_size
    tables[:, :num_shared_pages] = tables[0, :num_shared_pages]  # All rows share those of the first one.
    layout = backend.layout(KVShape(num_layers, num_pages, page_size, workload.num_kv_heads, workload.head_size, dtype))
    pages = tuple(_random_numbers(index, shape, layout) for index, shape in enumerate(layout.shapes))
    places = tuple(LayerPlace(0, layer) for layer in range(num_layers))
    # Entries beyond the pages of the longest row, up to the length that the tables shall have.
    num_unused = -(-(workload.table_len or workload.context_len) // page_size) - tables.shape[1]
    tables = np.pad(tables, ((0, 0), (0, num_unused)), constant_values=NULL_PAGE)
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
    scales: KVScales | None = None
    if is_quantized(layout.dtype):
        by_head = jnp.full((num_layers, layout.num_kv_heads), _scale(layout))
        scales = KVScales(by_head, by_head + 0.0)  # Two arrays, since both are donated.
    return PagedCache(pages, layout, places, backend, scales), step


def _scale(layout: KVLayout) -> float:
    """Return a scale with which pages of one byte a number reach ±6."""
    return 6 / largest_number(layout.dtype)


def _random_numbers(seed: int, shape: tuple[int, ...], layout: KVLayout) -> jax.Array:
    """Return an array of a cache, normal numbers of the pages' dtype; in one byte those that `_scale` belongs to."""
    if not is_quantized(layout.dtype):
        return jax.random.normal(jax.random.key(seed), shape, layout.dtype)
    numbers = jax.random.normal(jax.random.key(seed), shape)
    stored = quantize(numbers.reshape(1, 1, -1), jnp.full(1, _scale(layout)), layout.dtype)
    return jax.lax.bitcast_convert_type(stored, layout.stored_dtype).reshape(shape)


def chain_of_layers(attend: Callable[..., tuple[Any, Any]], cache: Any, workload: Workload, dtype: str) -> Program:
    """Compile a program that calls `attend(layer, cache, q, k, v)` for each layer; it returns an output and a cache.

    Queries and outputs are [T, N, H], keys and values [T, K, H]: T tokens, N query heads, K KV heads of size H. The
    next layer's queries, keys and values are 0.9 of the former ones plus 0.1 of the output (of its first K heads for
    keys and values), so that the compiler can neither drop nor reorder layers. The first layer's are random, of type
    `dtype`. The program's state is the tuple (cache, q, k, v).
    """
    num_tokens, num_kv_heads = workload.num_rows * workload.query_len, workload.num_kv_heads
    q, k, v = (
        # Keys from 10 on, since `random_pages` uses the first ones.
        jax.random.normal(jax.random.key(10 + index), (num_tokens, heads, workload.head_size), dtype)
        for index, heads in enumerate((workload.num_heads, num_kv_heads, num_kv_heads))
    )

    def run(state: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the state (cache, q, k, v) after all layers."""
        cache, q, k, v = state
        for layer in range(workload.num_layers):
            out, cache = attend(layer, cache, q, k, v)
            kv_out = out[:, :num_kv_heads].astype(dtype)
            q, k, v = 0.9 * q + 0.1 * out.astype(dtype), 0.9 * k + 0.1 * kv_out, 0.9 * v + 0.1 * kv_out
        return cache, q, k, v

    return compiled(run, (cache, q, k, v), workload.num_layers)


def compiled(run: Callable[[Any], Any], state: Any, num_layers: int) -> Program:
    """Compile `run`, a function from a state to the next state; the program owns `state` and donates it to each run."""
    return Program(jax.jit(run, donate_argnums=0).lower(state).compile(), state, num_layers, [])
