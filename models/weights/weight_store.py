"""The weights of a running engine: whole on its devices, or away while it sleeps, and replaced one by one."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from ..recipe import Path
from .weight_state import flat_state
from .weights import Weights

if TYPE_CHECKING:
    from .live_weights import CheckedWeights, LiveWeights

MAX_UNFINISHED_WEIGHTS = 4
"""Weights that are being made at the same time, beside which their tensors may take memory for a while."""


class WeightStore:
    """The arrays of a model's weights, as programs take them.

    An array may belong to the caller. The store never deletes such an array; it only drops its reference.
    """

    def __init__(self, weights: Weights):
        """Take weights that are on their devices, in the memory that programs read.

        Their tree and the sharding of each array are kept, also while the store is empty: weights that are stored later
        must have the same tree, shapes and shardings.
        """
        self._without_state, self._tree = replace(weights, state=None), jax.tree.structure(weights.state)
        self._paths = [path for path, _ in flat_state(weights.state)]
        self._placement = [leaf.sharding for leaf in jax.tree.leaves(weights.state)]
        self._borrowed: set[Path] = set()
        """Paths of the weights whose arrays belong to the caller, so that the store must not delete them."""
        self._is_on_cpu = all(
            device.platform == "cpu" for sharding in self._placement for device in sharding.device_set
        )
        self._is_reusable = False
        """Whether new weights may be made in the memory of the present ones; false if JAX may not own it."""
        self.is_ready = False
        """Whether all weights are in the memory that programs read."""
        self.leaves: tuple[jax.Array, ...] = ()
        """All weights in order; empty while there are none."""
        self.logits_leaves: tuple[jax.Array, ...] = ()
        """The weights that logits are computed from, as sample programs take them."""
        self.put(weights)

    @property
    def weights(self) -> Weights:
        """Return the weights as a model, if there are any."""
        assert self.leaves, "the weights were dropped"
        return replace(self._without_state, state=jax.tree.unflatten(self._tree, self.leaves))

    @property
    def by_path(self) -> dict[Path, jax.Array]:
        """Return the weights by their paths; none while there are none."""
        # The paths stay while the store is empty; otherwise there is one array for each.
        return dict(zip(self._paths, self.leaves, strict=bool(self.leaves)))

    def put(self, weights: Weights) -> None:
        """Store weights of the same shapes as the first ones; the store must be empty."""
        # On a CPU, weights may lie in the memory that files were read into, which `update` must not overwrite.
        self._is_reusable = not self._is_on_cpu
        self._take(jax.tree.leaves(weights.state))

    def update(
        self, live: LiveWeights, checked: CheckedWeights, program: Callable[[Hashable], Any], *, copy: bool
    ) -> None:
        """Replace all weights by those of a checked tree, one by one, and wait until they are there.

        `checked` is the tree and where each weight is in it. `live` makes the new weights from it; `program(key)`
        returns the compiled program of `live` with that key. With `copy`, no new weight is one of the tree's own
        arrays. Without it, arrays of the tree that fit are taken as they are; they stay the caller's ("borrowed"), and
        the store never deletes them. No step may be in flight. Each old array is given up just before the new one is
        made: beside the tree and the weights, memory holds at most MAX_UNFINISHED_WEIGHTS weights that are being made.
        So a failure leaves neither the old weights nor the new ones: the store is then empty.
        """
        old, borrowed = self.by_path, self._borrowed  # `old` is empty after `drop`.
        tree, _ = checked
        # Addresses of all memory that the tree's arrays lie in.
        is_reusable, tree_buffers = self._is_reusable, set().union(*map(_buffers, tree.arrays.values()))
        self.is_ready = False
        self.leaves = self.logits_leaves = ()
        self._borrowed = set()

        def take(path: Path) -> jax.Array | None:
            """Give up the old array of a weight: return it if the new weight may be made in its memory, else None.

            In the latter case its memory is freed, unless the array is a caller's or shares memory with the tree.
            """
            leaf = old.pop(path, None)
            # The tree may hold this engine's own weights, which were given to the caller before.
            if leaf is None or leaf.is_deleted() or path in borrowed or tree_buffers & _buffers(leaf):
                return None
            if is_reusable:
                return leaf
            leaf.delete()
            gc.collect(0)  # JAX frees memory of the host only when Python collects garbage.
            return None

        # JAX returns arrays before they are computed. Only the oldest is waited for, so the next ones begin meanwhile.
        made: dict[Path, jax.Array] = {}
        pending: deque[jax.Array] = deque()
        for new in live.make(checked, program, take=take, copy=copy):
            made[new.path] = new.array
            if new.is_borrowed:
                self._borrowed.add(new.path)
            pending.append(new.array)
            if len(pending) == MAX_UNFINISHED_WEIGHTS:
                jax.block_until_ready(pending.popleft())
        jax.block_until_ready(list(pending))
        self._is_reusable = True  # JAX has allocated all of them except borrowed ones, which `take` never gives up.
        self._take([made[path] for path in self._paths])

    def move(self, memory_kind: str | None) -> None:
        """Move all weights to this JAX memory kind of their devices, such as "pinned_host", one after another.

        None moves them back to the memory that programs read; only then `is_ready` becomes true. Weights that are there
        already stay. Each old array is deleted once its copy is complete, unless it is a caller's; the new ones are the
        engine's own. If this fails, each weight is in one of the two memories, and another call moves the rest.
        """
        self._is_reusable, self.is_ready = not self._is_on_cpu, False
        for index, (path, placement) in enumerate(zip(self._paths, self._placement, strict=True)):
            target = placement.with_memory_kind(memory_kind) if memory_kind else placement
            leaf = self.leaves[index]
            if leaf.sharding.memory_kind == target.memory_kind:
                continue
            # The copy must not share memory with the old array, which is deleted below.
            moved = jax.block_until_ready(jax.device_put(leaf, target, may_alias=False))
            self.leaves = (*self.leaves[:index], moved, *self.leaves[index + 1 :])
            if path not in self._borrowed:
                leaf.delete()
            self._borrowed.discard(path)
        self._take(self.leaves)
        self.is_ready = memory_kind is None  # `_take` has set it to true.

    def drop(self) -> None:
        """Empty the store: free the device memory of its arrays, except those in `_borrowed`, which are the caller's.

        An empty store stays empty. Its tree, paths and shardings are kept, so that `put` or `update` may fill it again.
        """
        self.is_ready = False
        for path, leaf in self.by_path.items():
            # `weights` and `by_path` hand these arrays out, so a caller may have deleted one.
            if path not in self._borrowed and not leaf.is_deleted():
                leaf.delete()
        self._borrowed = set()
        # `logits_leaves` are some of `leaves` again, so nothing is left to delete there.
        self.leaves = self.logits_leaves = ()

    def _take(self, leaves: Iterable[jax.Array]) -> None:
        """Make these arrays, which are in the order of the tree's leaves, the weights that programs take."""
        self.leaves = tuple(leaves)
        self.logits_leaves = tuple(self.weights.split_logits()[0])
        self.is_ready = True


def _buffers(array: Any) -> set[int]:
    """Return the addresses of a JAX array's buffers on its devices; none for a numpy array or a deleted one."""
    if not isinstance(array, jax.Array) or array.is_deleted():
        return set()
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
