"""Every executable of an engine, as a way to lower it from abstract shapes: nothing here has weights or pages yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .buckets import Buckets
from .compile_plan import Key, Lower
from .logit_rules import new_rules, rule_shapes, set_rules
from .models.loading import Weights
from .pallas_kernels.ragged_paged_attention import (
    MAX_MOVES,
    KVLayout,
    PagedCache,
    copy_pages,
    put_pages,
    take_pages,
)
from .sampler import SampleSettings
from .sampling_params import SampleMode
from .sharding import replicated, sharding_of
from .step import DeviceState, decode, forward, new_state, sample_rows, update_tables
from .step_inputs import CHANGE_FIELDS, SAMPLE_FIELDS, StepInputBuilder, StepInputs

TABLES_KEY = ("tables",)
ALLOCATE_KEY = ("allocate",)
SET_RULES_KEY = ("set_rules",)
COPY_KEY = ("copy",)
SWAP_OUT_KEY = ("swap_out",)
SWAP_IN_KEY = ("swap_in",)


@dataclass(frozen=True)
class Programs:
    """Abstract shapes of one engine, and its programs by key."""

    weights: Weights
    """Shapes with their placement."""
    state: DeviceState
    """The same for what stays on the device."""
    lower: dict[Key, Lower]


def forward_key(buckets: Buckets, num_tokens: int) -> Key:
    """Key of the forward program that takes this many tokens."""
    return ("forward", buckets.tokens_for(num_tokens))


def decode_key(buckets: Buckets, num_rows: int) -> Key:
    """Key of the program that decodes several tokens of this many rows."""
    return ("decode", buckets.tokens_for(num_rows))


def sample_key(buckets: Buckets, num_samples: int, mode: SampleMode) -> Key:
    """Key of the sample program that takes this many rows."""
    return ("sample", buckets.samples_for(num_samples, mode), mode)


def step_programs(
    *,
    weights: Weights,
    hidden_size: int,
    mesh: Mesh,
    cache: PagedCache,
    buckets: Buckets,
    builder: StepInputBuilder,
    max_num_seqs: int,
    max_pages: int,
    settings: SampleSettings,
    num_host_blocks: int,
    num_decode_steps: int = 1,
) -> Programs:
    """Programs of an engine: one forward per token bucket, samplers per row bucket and mode, table updates, page moves.

    With `num_decode_steps` above 1 also a decoding program for each token bucket up to the sequences' number.
    Programs take the weights as a flat tuple of arrays, samplers those of the logits: a call need not take a tree of
    modules apart.

    `weights` holds shapes and dtypes; `cache` is the cache without its arrays (`pages` is not read). A page
    table is `max_pages` wide, and there are `max_num_seqs` state slots beside the null slot. Without host pages
    there are no programs that swap.
    """
    whole, layout = replicated(mesh), cache.layout

    def shape(dims: tuple[int, ...], dtype: Any, sharding: Any = whole) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    state = DeviceState(
        cache=replace(cache, pages=_cache_arrays(layout, mesh)),
        page_tables=shape((builder.num_groups, max_num_seqs + 1, max_pages), jnp.int32),
        last_tokens=shape((max_num_seqs + 1,), jnp.int32),
        hidden=shape((buckets.num_tokens[-1], hidden_size), weights.stream_dtype),
    )
    columns = shape((len(SAMPLE_FIELDS), buckets.max_samples), jnp.int32)
    changes = shape((len(CHANGE_FIELDS), builder.num_changes), jnp.int32)
    leaves, tree = jax.tree.flatten(weights.state)

    def step_program(run: Callable[..., Any], name: str, *arguments: Any) -> jax.stages.Lowered:
        def on_leaves(leaves: tuple[Any, ...], *arguments: Any) -> Any:
            return run(weights.graph, jax.tree.unflatten(tree, leaves), *arguments)

        on_leaves.__name__ = name
        return jax.jit(on_leaves, donate_argnums=1).lower(tuple(leaves), *arguments)

    def lower_forward(num_tokens: int) -> jax.stages.Lowered:
        step_layout = builder.layouts[num_tokens]
        inputs = StepInputs(shape((step_layout.size,), jnp.int32))
        return step_program(partial(forward, layout=step_layout), f"forward_{num_tokens}", state, inputs)

    def lower_decode(num_rows: int) -> jax.stages.Lowered:
        step_layout = builder.layouts[num_rows]
        inputs = StepInputs(shape((step_layout.size,), jnp.int32))
        return step_program(partial(decode, layout=step_layout), f"decode_{num_rows}", state, inputs)

    some_leaves, whole_state = weights.split_logits()

    rules = rule_shapes(builder.rule_book, max_num_seqs + 1, whole)

    def lower_sample(num_rows: int, mode: SampleMode) -> jax.stages.Lowered:
        sample = partial(sample_rows, num_rows=num_rows, mode=mode, settings=settings)

        def run(leaves: tuple[Any, ...], *arguments: Any) -> Any:
            return sample(weights.graph, whole_state(leaves), *arguments)

        run.__name__ = f"sample_{num_rows}_{mode.value}"
        kept = state.last_tokens, rules if mode is SampleMode.EVERYTHING else None
        return jax.jit(run, donate_argnums=1).lower(tuple(some_leaves), kept, state.hidden, columns)

    def lower_tables() -> jax.stages.Lowered:
        return jax.jit(update_tables, donate_argnums=0).lower(state.page_tables, changes)

    def lower_allocate() -> jax.stages.Lowered:
        placement = jax.tree.map(lambda leaf: leaf.sharding, (state, rules))
        empty = partial(new_rules, builder.rule_book, max_num_seqs + 1)
        return jax.jit(lambda: (new_state(state), empty()), out_shardings=placement).lower()

    def lower_set_rules() -> jax.stages.Lowered:
        row, slot = shape((builder.rule_book.width,), jnp.int32), shape((), jnp.int32)
        return jax.jit(set_rules, donate_argnums=0).lower(rules, row, slot)

    lower: dict[Key, Lower] = {
        TABLES_KEY: lower_tables,
        ALLOCATE_KEY: lower_allocate,
        SET_RULES_KEY: lower_set_rules,
    }
    lower |= move_programs(layout, mesh, num_host_blocks=num_host_blocks)
    lower |= {("forward", size): partial(lower_forward, size) for size in buckets.num_tokens}
    if num_decode_steps > 1:
        lower |= {("decode", size): partial(lower_decode, size) for size in buckets.decode_sizes}
    for mode in buckets.modes:
        lower |= {("sample", size, mode): partial(lower_sample, size, mode) for size in buckets.sample_sizes(mode)}
    return Programs(weights, state, lower)


def move_programs(layout: KVLayout, mesh: Mesh, *, num_host_blocks: int) -> dict[Key, Lower]:
    """Programs that move pages of a cache of this layout; without host pages, none that swap."""
    pages = _cache_arrays(layout, mesh)
    page_list = jax.ShapeDtypeStruct((MAX_MOVES,), jnp.int32, sharding=replicated(mesh))
    placement = tuple(array.sharding for array in pages)
    page = tuple(array.update(shape=(layout.num_layers, *array.shape[1:])) for array in pages)

    def lower_copy() -> jax.stages.Lowered:
        run = partial(copy_pages, layout=layout)
        return jax.jit(run, donate_argnums=0, out_shardings=placement).lower(pages, page_list, page_list)

    def lower_swap_out() -> jax.stages.Lowered:
        run = partial(take_pages, layout=layout)
        return jax.jit(run, out_shardings=(placement,) * MAX_MOVES).lower(pages, page_list)

    def lower_swap_in() -> jax.stages.Lowered:
        run = partial(put_pages, layout=layout)
        jitted = jax.jit(run, donate_argnums=0, out_shardings=(placement, page_list.sharding))
        return jitted.lower(pages, (page,) * MAX_MOVES, page_list)

    swaps: dict[Key, Lower] = {SWAP_OUT_KEY: lower_swap_out, SWAP_IN_KEY: lower_swap_in} if num_host_blocks else {}
    return {COPY_KEY: lower_copy, **swaps}


def _cache_arrays(layout: KVLayout, mesh: Mesh) -> tuple[Any, ...]:
    return tuple(
        jax.ShapeDtypeStruct(shape, layout.stored_dtype, sharding=sharding_of(mesh, axes))
        for shape, axes in zip(layout.shapes, layout.logical_axes, strict=True)
    )
