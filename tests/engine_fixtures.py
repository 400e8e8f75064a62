"""Fixtures of the folders whose tests start many engines: these import them into their conftest."""

import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any

import jax
import pytest

from jpaged.step import step_sizes
from jpaged.step.programs import Programs

from .jpaged.fewest_buckets import fewest_buckets
from .jpaged.tiny_model import write_tiny_model


@dataclass
class SharedProgram:
    """A program that is lowered and compiled once for all engines whose programs are equal."""

    lower: Any
    """Lowers the program of the first of these engines; None once it is compiled."""
    lock: Lock
    compiled: jax.stages.Compiled | None = None

    def compile(self) -> jax.stages.Compiled:
        with self.lock:
            if self.compiled is None:
                self.compiled, self.lower = self.lower().compile(), None
        return self.compiled


MAX_SHARED_PROGRAMS = 100
"""Programs that are kept for later modules: each takes some 200 memory maps, and Linux ends a process that needs more
than 65,530."""
_shared: OrderedDict[Any, SharedProgram] = OrderedDict()
"""The programs that modules of this run share, those used last at the end."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give the directory of the tiny model as it comes."""
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def shared_executables() -> Iterator[None]:
    """Let engines share executables with those of all modules that use this fixture: an engine traces about ten, which
    takes 60 ms each.

    Programs are equal if all that they are made from is: the model's graph, the shapes, the step's layout and the
    sampler's settings. Modules must not use this fixture if their tests change what a program computes.
    """
    init = Programs.__init__

    def init_shared(self: Programs, weights: Any, cache: Any, mesh: Any, builder: Any, **options: Any) -> None:
        init(self, weights, cache, mesh, builder, **options)
        optimized = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"]
        state = self.state, self._rules
        logit_weights, _ = weights.split_logits()
        step_parts = (
            weights.graph, str(jax.tree.leaves(weights.state)), str(jax.tree.leaves(state)), jax.tree.structure(state),
            self._options, builder.rules_spec, builder.num_changes, builder.buckets.max_samples,
            tuple(builder.layouts.values()), optimized,
        )  # fmt: skip
        # Samplers and scores see nothing of pages and of the layouts of steps.
        sampler_state = self.state.last_tokens, self.state.hidden, self._rules
        sampler_parts = (
            weights.graph, str(logit_weights), str(sampler_state), jax.tree.structure(sampler_state),
            self._options.settings, builder.rules_spec, builder.buckets.max_samples, builder.buckets.masks_apart,
            optimized,
        )  # fmt: skip
        for programs in (self.lower, self.lower_masked, self.lower_scores):
            for key, lower in programs.items():
                parts = sampler_parts if key[0] in ("sample", "sample_masked", "score") else step_parts
                program = _shared.setdefault((key, parts), SharedProgram(lower, Lock()))
                _shared.move_to_end((key, parts))
                programs[key] = lambda program=program: program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "__init__", init_shared)
        yield
    # A program that was never compiled holds the engine that would lower it.
    for key_and_parts in [each for each, program in _shared.items() if program.compiled is None]:
        del _shared[key_and_parts]
    while len(_shared) > MAX_SHARED_PROGRAMS:
        _shared.popitem(last=False)


@pytest.fixture(scope="module")
def few_buckets() -> Iterator[None]:
    """Pad steps to two sizes instead of up to six: compiling a program for each takes most of a short test's time.

    For modules whose tests say nothing of the sizes that a CPU pads to; step/, batch invariance and the golden files
    have all of them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_sizes, "make_buckets", fewest_buckets)
        yield
