"""Runs steps on the device: owns the weights, the device state and the executables.

Knows arrays and executables; no request beyond the number of its slot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from .buckets import Buckets
from .compile_plan import CompilePlan
from .models.loading import Weights
from .programs import ALLOCATE_KEY, TABLES_KEY, sample_key
from .sampler import SampledRows, SampleMode
from .sharding import replicated
from .step import DeviceState
from .step_inputs import BuiltStep, StepInputs


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

    def __init__(self, *, weights: Weights, plan: CompilePlan, buckets: Buckets, mesh: Mesh):
        self.weights = weights
        self.state: DeviceState = plan.get(ALLOCATE_KEY)()
        self.plan = plan
        self.buckets = buckets
        self._whole = replicated(mesh)

    def dispatch(self, step: BuiltStep, mode: SampleMode) -> StepOutputs:
        """Start a step; returns before the device is done."""
        for changes in step.table_updates:
            tables = self.plan.get(TABLES_KEY)(self.state.page_tables, jax.device_put(changes, self._whole))
            self.state = replace(self.state, page_tables=tables)
        inputs = StepInputs(jax.device_put(step.inputs.packed, self._whole))
        run_forward = self.plan.get(("forward", step.layout.num_tokens))
        self.state, hidden, samples = run_forward(self.weights.state, self.state, inputs)
        if not step.samples:
            return StepOutputs(None, 0)
        run_sample = self.plan.get(sample_key(self.buckets, len(step.samples), mode))
        last_tokens, sampled = run_sample(self.weights.state, self.state.last_tokens, hidden, samples)
        self.state = replace(self.state, last_tokens=last_tokens)
        return StepOutputs(sampled, len(step.samples))

    def reset(self) -> None:
        """A new device state, as at start: a step that failed may have taken the old one with it."""
        _delete(self.state)
        self.state = self.plan.get(ALLOCATE_KEY)()

    def close(self) -> None:
        """Give the device's memory back: pages and weights."""
        self.plan.close()
        _delete(self.state)
        _delete(self.weights.state)


def _delete(arrays: Any) -> None:
    for leaf in jax.tree.leaves(arrays):
        if not leaf.is_deleted():
            leaf.delete()
