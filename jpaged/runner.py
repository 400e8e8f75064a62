"""Runs steps on the device: owns the weights, the device state and the compile plan.

Knows arrays and executables; no request beyond the number of its slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from .buckets import Buckets
from .compile_plan import CompilePlan, Key
from .models.loading import Weights
from .pallas_kernels.ragged_paged_attention import Backend, KVLayout, LayerPlace, PagedCache
from .sampler import SampledRows, SampleMode
from .sharding import replicated, sharding_of
from .step import DeviceState, forward, sample_rows, update_tables
from .step_inputs import CHANGE_FIELDS, SAMPLE_FIELDS, BuiltStep, StepInputBuilder, StepInputs


@dataclass(frozen=True)
class StepOutputs:
    """What a step leaves on the device for the host to read: one entry per sampled row, in order."""

    sampled: SampledRows | None
    num_samples: int

    def read(self) -> SampledRows | None:
        """Copy to the host as numpy, padding cut off. None if no row was sampled."""
        if self.sampled is None:
            return None
        return jax.tree.map(lambda leaf: np.asarray(leaf)[: self.num_samples], self.sampled)


class Runner:
    """One model on one mesh, with one paged cache."""

    def __init__(
        self,
        *,
        weights: Weights,
        hidden_size: int,
        mesh: Mesh,
        backend: Backend,
        kv_layout: KVLayout,
        layer_places: tuple[LayerPlace, ...],
        buckets: Buckets,
        builder: StepInputBuilder,
        max_num_seqs: int,
        max_pages: int,
        num_groups: int,
        max_logprobs: int,
    ):
        """`max_pages` is the width of a page table, `max_num_seqs` the number of state slots but the null slot."""
        self.weights = weights
        self.mesh = mesh
        self.buckets = buckets
        self.max_logprobs = max_logprobs
        whole = replicated(mesh)

        def shape(dims: tuple[int, ...], dtype: Any, sharding: Any = whole) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

        pages = tuple(
            shape(dims, kv_layout.dtype, sharding_of(mesh, axes))
            for dims, axes in zip(kv_layout.shapes, kv_layout.logical_axes, strict=True)
        )
        state = DeviceState(
            cache=PagedCache(pages, kv_layout, layer_places, backend),
            page_tables=shape((num_groups, max_num_seqs + 1, max_pages), jnp.int32),
            last_tokens=shape((max_num_seqs + 1,), jnp.int32),
        )
        self.plan = CompilePlan(self._programs(state, hidden_size, builder, shape))
        self.state = self._allocate(state)

    def forward_key(self, num_tokens: int) -> Key:
        return ("forward", self.buckets.tokens_for(num_tokens))

    def sample_key(self, num_samples: int, mode: SampleMode) -> Key:
        return ("sample", self.buckets.samples_for(num_samples, logprobs=mode is SampleMode.LOGPROBS), mode)

    def dispatch(self, step: BuiltStep, mode: SampleMode) -> StepOutputs:
        """Start a step; returns before the device is done."""
        for changes in step.table_updates:
            tables = self.plan.get(("tables",))(self.state.page_tables, changes)
            self.state = replace(self.state, page_tables=tables)
        inputs = StepInputs(jax.device_put(step.inputs.packed, replicated(self.mesh)))
        run_forward = self.plan.get(("forward", step.layout.num_tokens))
        self.state, hidden, samples = run_forward(self.weights.state, self.state, inputs)
        if not step.samples:
            return StepOutputs(None, 0)
        run_sample = self.plan.get(self.sample_key(len(step.samples), mode))
        last_tokens, sampled = run_sample(self.weights.state, self.state.last_tokens, hidden, samples)
        self.state = replace(self.state, last_tokens=last_tokens)
        return StepOutputs(sampled, len(step.samples))

    def prepare(self, keys: Iterable[Key], **options: Any) -> None:
        """Compile these executables ahead of their first use."""
        self.plan.prepare(keys, **options)

    def close(self) -> None:
        """Give the device's memory back."""
        self.plan.close()
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()

    def _allocate(self, state: DeviceState) -> DeviceState:
        """Device arrays of these shapes. Pages start with whatever was there: attention reads no slot before its write."""

        def build() -> DeviceState:
            pages = tuple(lax.empty(leaf.shape, leaf.dtype) for leaf in state.cache.pages)
            return DeviceState(
                cache=replace(state.cache, pages=pages),
                page_tables=jnp.zeros(state.page_tables.shape, jnp.int32),
                last_tokens=jnp.zeros(state.last_tokens.shape, jnp.int32),
            )

        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        return jax.jit(build, out_shardings=shardings)()

    def _programs(self, state: DeviceState, hidden_size: int, builder: StepInputBuilder, shape: Any) -> dict[Key, Any]:
        """How to lower each executable of the plan, from abstract shapes."""
        weights, graph = self.weights.state, self.weights.graph
        abstract = jax.tree.map(lambda leaf: shape(leaf.shape, leaf.dtype, leaf.sharding), weights)
        dtype = jax.tree.leaves(weights)[0].dtype
        hidden = shape((self.buckets.max_samples, hidden_size), dtype)
        samples = shape((len(SAMPLE_FIELDS), self.buckets.max_samples), jnp.int32)
        changes = shape((len(CHANGE_FIELDS), builder.num_changes), jnp.int32)

        def lower_forward(num_tokens: int) -> jax.stages.Lowered:
            layout = builder.layouts[num_tokens]

            def run(weights: Any, state: DeviceState, inputs: StepInputs) -> Any:
                return forward(graph, weights, state, inputs, layout)

            run.__name__ = f"forward_{num_tokens}"
            inputs = StepInputs(shape((layout.size,), jnp.int32))
            return jax.jit(run, donate_argnums=1).lower(abstract, state, inputs)

        def lower_sample(num_rows: int, mode: SampleMode) -> jax.stages.Lowered:
            def run(weights: Any, last_tokens: Any, hidden: Any, samples: Any) -> Any:
                return sample_rows(graph, weights, last_tokens, hidden, samples, num_rows, mode, self.max_logprobs)

            run.__name__ = f"sample_{num_rows}_{mode.value}"
            return jax.jit(run, donate_argnums=1).lower(abstract, state.last_tokens, hidden, samples)

        programs: dict[Key, Any] = {("forward", size): partial(lower_forward, size) for size in self.buckets.num_tokens}
        for mode in SampleMode:
            is_logprobs = mode is SampleMode.LOGPROBS
            sizes = self.buckets.num_logprob_samples if is_logprobs else self.buckets.num_samples
            programs |= {("sample", size, mode): partial(lower_sample, size, mode) for size in sizes}
        programs["tables",] = lambda: jax.jit(update_tables, donate_argnums=0).lower(state.page_tables, changes)
        return programs
