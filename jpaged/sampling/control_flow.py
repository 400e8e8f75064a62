"""Two ways to compile what depends on the data: without branches and loops of unknown length, or with them.

`ControlFlow` computes everything for every row: it is for a device whose branch conditions the host has to read, a GPU.
`DynamicControlFlow` skips what no row needs. Both give the same results up to rounding. An engine chooses one when it
is built, and the sampler and the decode loop ask it. The classes have no fields, so that two objects of one class are
equal as static arguments of a compiled function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from .thresholds import bisect_thresholds, section_thresholds
from .top_blocks import RowSelection

T = TypeVar("T")


@dataclass(frozen=True)
class ControlFlow:
    """How a program treats work that only some data need: this class always computes it.

    So there is no branch, and no loop whose length depends on data. `DynamicControlFlow` has both instead.
    """

    searches_likely_blocks = False
    """Whether thresholds are searched in a few likely blocks first, with a branch that reads whole rows."""
    highest_thresholds = staticmethod(section_thresholds)
    """Returns what `bisect_thresholds` does, or thresholds that keep the same weights."""

    def compute_if(self, is_needed: Bool[Array, ""], compute: Callable[[], T], default: Callable[[], T]) -> T:
        """Return `compute()`. A subclass may return `default()` instead if `is_needed` is false.

        So both must return arrays of the same shapes, and either result must do for the caller if `is_needed` is false.
        """
        return compute()

    def for_row_batches(
        self,
        is_needed: Bool[Array, " R"],
        sort_keys: Int[Array, " R"],
        update: Callable[[RowSelection, T], T],
        state: T,
        *,
        num_keys: int,
    ) -> T:
        """Apply state = update(selection, state) to batches that hold every row of `is_needed`; return the last state.

        `update` gets a batch's rows as an index array or a slice, and the state of all R rows. This class makes one
        batch of all rows, so it reads neither `is_needed` nor `sort_keys`. `DynamicControlFlow` makes small batches of
        needed rows, where rows with near sort keys (0 to `num_keys` − 1) share a batch. A batch may hold rows that are
        not needed, and a row may be in two batches: `update` must then write the same results twice.
        """
        return update(slice(None), state)

    def repeat(self, num_steps: int, step: Callable[[Int[Array, ""], T], T], state: T) -> T:
        """Apply state = step(index, state) for the indices 0 to `num_steps` − 1; return the last state.

        This class writes the steps out one after another, `DynamicControlFlow` makes them a loop with one body.
        """
        return lax.fori_loop(0, num_steps, step, state, unroll=True)

    def repeat_while(
        self, has_work: Callable[[T], Bool[Array, ""]], step: Callable[[T], T], state: T, *, max_steps: int
    ) -> T:
        """Apply state = step(state) while `has_work(state)` is true; return the last state.

        The caller guarantees that at most `max_steps` steps have work. This class always runs `max_steps` steps and
        never asks `has_work`, so a step without work must change nothing that the caller reads. `DynamicControlFlow`
        stops as soon as `has_work` is false.
        """
        return lax.fori_loop(0, max_steps, lambda _, state: step(state), state)


@dataclass(frozen=True)
class DynamicControlFlow(ControlFlow):
    """Branches and loops that depend on the data: work that no row needs is skipped."""

    searches_likely_blocks = True
    highest_thresholds = staticmethod(bisect_thresholds)

    def compute_if(self, is_needed: Bool[Array, ""], compute: Callable[[], T], default: Callable[[], T]) -> T:
        """Return `compute()` if it is needed, else `default()`."""
        return lax.cond(is_needed, compute, default)

    def for_row_batches(
        self,
        is_needed: Bool[Array, " R"],
        sort_keys: Int[Array, " R"],
        update: Callable[[RowSelection, T], T],
        state: T,
        *,
        num_keys: int,
    ) -> T:
        """Apply state = update(row indices, state) to batches of the rows with `is_needed`; return the last state.

        A batch has 8 rows if there are more than 16 rows, else 4; if there are at most 4 rows, they are one batch.
        Needed rows are sorted by `sort_keys` (0 to `num_keys` − 1), so that a batch holds rows with similar work. The
        last batch is filled up with rows that are not needed, or with rows of the batch before. With 20 rows of which
        11 are needed, two batches of 8 hold these 11 and 5 others. Without a needed row, `update` does not run.
        """
        num_rows = len(sort_keys)
        batch_size = 8 if num_rows > 16 else 4
        if num_rows <= batch_size:
            # A branch and not a loop: the body would not depend on the loop's index, and XLA would move it in front of
            # the loop, where it runs even if no row is needed.
            return lax.cond(jnp.any(is_needed), lambda x: update(slice(None), x), lambda x: x, state)
        # Rows that need no update get the key `num_keys`, so they are sorted after all needed rows.
        order = jnp.argsort(jnp.where(is_needed, sort_keys, num_keys), stable=True)
        num_needed = jnp.sum(is_needed.astype(jnp.int32))
        num_batches = (num_needed + batch_size - 1) // batch_size

        def update_batch(index: Int[Array, ""], state: T) -> T:
            # If the last batch would reach beyond the last row, dynamic_slice starts it earlier: some rows of the
            # batch before are then updated again.
            return update(lax.dynamic_slice_in_dim(order, index * batch_size, batch_size), state)

        return lax.fori_loop(0, num_batches, update_batch, state)

    def repeat(self, num_steps: int, step: Callable[[Int[Array, ""], T], T], state: T) -> T:
        """Apply state = step(index, state) for the indices 0 to `num_steps` − 1; return the last state."""
        return lax.fori_loop(0, num_steps, step, state)

    def repeat_while(
        self, has_work: Callable[[T], Bool[Array, ""]], step: Callable[[T], T], state: T, *, max_steps: int
    ) -> T:
        """Apply state = step(state) while `has_work(state)` is true; return the last state.

        `has_work` must be false after `max_steps` steps, which are not counted here.
        """
        return lax.while_loop(has_work, step, state)


DYNAMIC, STATIC = DynamicControlFlow(), ControlFlow()
