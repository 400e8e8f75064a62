"""Scenarios that every attention backend runs; each is given a `World` of a backend.

The lengths of rows follow from the page size, so that rows begin, cross and end at edges of pages of any size.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.pallas_kernels.ragged_paged_attention.interface import Backend, KVShape, LayerPlace

from ...paged_steps import metadata
from .paged_world import ATOL, COMPILER_OPTIONS, World, bits_of

LAYERS_OF_TWO_GROUPS = (LayerPlace(0, 0), LayerPlace(1, 0), LayerPlace(0, 1), LayerPlace(1, 1))
TWO_GROUPS: dict[str, Any] = {"layers": LAYERS_OF_TWO_GROUPS, "num_group_layers": 2}
"""Options of a shape with two page-table groups of two layers each."""
PLACE: dict[str, Any] = {"layers": (LayerPlace(1, 1),), "num_group_layers": 2}
"""One layer, the second of the second group of page tables: only there are its pages and table not the first."""
Steps = list[dict[int, int]]
"""Row → its new tokens, for each step."""


def features(page_size: int) -> dict[str, dict[str, Any]]:
    """Return name → options of `attend`, with windows at and beside the edges of a page."""
    return {
        "window 1": {"window": 1},
        "window of a page less one": {"window": page_size - 1},
        "window of a page": {"window": page_size},
        "window of a page and one": {"window": page_size + 1},
        "window beyond the context": {"window": 1000},
        "soft cap": {"soft_cap": 1.5},
        "sinks": {"sinks": jnp.array([-1.0, 0.0, 2.0, 30.0])},
        "all of them": {
            "window": page_size + page_size // 4 + 1,
            "soft_cap": 1.5,
            "sinks": jnp.array([-1.0, 0.0, 2.0, 3.0]),
        },
    }


def run_ragged(world: World) -> None:
    """Run rows of 1, page − 1, page, page + 1 and many tokens: chunked prefill, mixed steps, decode over page edges."""
    page = world.shape.page_size
    world.add_rows(5)
    world.step({0: 1, 1: page - 1, 2: page, 3: page + 1})
    world.step({0: 1, 1: 1, 4: 2 * page + 3})
    world.step({3: 1, 4: page + 2, 1: 2, 2: 1})
    for _ in range(2):
        world.step({0: 1, 1: 1, 2: 1, 3: 1, 4: 1})
    world.step({4: 1})


def run_three_steps(world: World) -> None:
    """Run a prefill step, a mixed one and a decode step over rows that begin, cross and end at edges of pages."""
    page = world.shape.page_size
    world.add_rows(3)
    world.step({0: 2 * page + 1, 1: page, 2: 1})
    world.step({0: 1, 1: 2, 2: page - 1})
    world.step({0: 1, 1: 1, 2: 1})


def run_beyond_the_window(world: World, *, num_steps: int, chunk: int) -> None:
    """Decode a row and prefill another by chunks, while the pages that their window has passed become null."""
    page, window = world.shape.page_size, world.shape.options["window"]
    world.add_rows(3)
    world.step({0: 30, 1: 17})
    for _ in range(num_steps):
        for row in (0, 1):
            # The next query stands at position len, and sees from len − window + 1 on.
            world.forget(row, max(0, len(world.keys[row][0]) - window + 1) // page)
        world.step({0: 1, 1: chunk, 2: 3})


def run_shared_pages(world: World) -> None:
    """Run a row that begins with another's first two pages beside that one."""
    page = world.shape.page_size
    first = world.add_row()
    world.step({first: 2 * page + page // 2 + 1})
    second = world.add_row(prefix_of=first, num_shared=2)
    world.step({first: 1, second: 3})
    world.step({first: 1, second: 1})


def run_single_tokens(world: World) -> None:
    """Run the smallest bucket, one token and one row, from a row's first token over the edge of a page."""
    world.shape = dataclasses.replace(world.shape, num_tokens=1, num_rows=1)
    world.add_row()
    for _ in range(world.shape.page_size + 1):
        world.step({0: 1})


def run_layer_without_keys(world: World) -> None:
    """Check that a call with k = v = None writes no page and attends to the pages that the call before it wrote."""
    shape = world.shape
    tables = [[[world.free.pop()], [world.free.pop() for _ in range(-(-9 // shape.page_size))]]] * world.num_groups
    sizes = {"page_size": shape.page_size, "num_tokens": 16, "num_rows": 4, "table_len": 8}
    step = metadata(shape.backend, [1, 9], [1, 9], tables, **sizes)
    heads = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads
    q, k, v = (jnp.asarray(world.padded(10, n)[0, :16], shape.input_dtype) for n in heads)
    attend = jax.jit(lambda cache, k, v: cache.attend(0, q, k, v, step, scale=0.125), compiler_options=COMPILER_OPTIONS)
    first, written = attend(world.cache, k, v)
    second, shared = attend(written, None, None)
    assert np.array_equal(np.asarray(first)[:10], np.asarray(second)[:10])
    for old, new in zip(written.pages, shared.pages, strict=True):
        assert np.array_equal(bits_of(old), bits_of(new))


def check_that_a_wrong_window_is_noticed(world: World, error: int) -> None:
    """Check that an oracle whose window is off by `error` differs, in float32 by 1000 × the tolerance."""
    world.add_row()
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        world.step({0: 40}, tolerance=1000 * ATOL, window=world.shape.options["window"] + error)


@st.composite
def ragged_steps(
    draw: st.DrawFn, *, most_steps: int, most_tokens: int, most_context: int, lengths: tuple[int, ...]
) -> Steps:
    """Draw steps over up to five rows; a step has 1 to `most_tokens` tokens and a row at most `most_context`.

    A row is given one token, as many as may be, or one of `lengths`.
    """
    lens, steps = [0] * 5, []
    for _ in range(draw(st.integers(1, most_steps))):
        work: dict[int, int] = {}
        for row in draw(st.lists(st.integers(0, 4), min_size=1, unique=True)):
            most = min(most_tokens - sum(work.values()), most_context - lens[row])
            if most > 0:
                work[row] = draw(st.sampled_from([1, most, *(length for length in lengths if length < most)]))
                lens[row] += work[row]
        if work:
            steps.append(work)
    return steps


def check_any_order(
    make: Callable[..., World],
    steps: st.SearchStrategy[Steps],
    *,
    kinds: st.SearchStrategy[tuple[Any, ...]] = st.just(()),  # noqa: B008  (as constant as a number)
    max_examples: int,
) -> None:
    """Check chunks and decodes in any order; `make` takes a seed and the items of one of `kinds`, returns a world."""
    runs: dict[str, Any] = {}

    @settings(max_examples=max_examples, deadline=None)
    @given(steps=steps, seed=st.integers(0, 2**16), kind=kinds)
    def check(steps: Steps, seed: int, kind: tuple[Any, ...]) -> None:
        world = make(seed, *kind)
        world.run = runs.setdefault(repr(kind), world.run)  # One compilation for all examples of a kind.
        world.add_rows(5)
        for work in steps:
            world.step(work)

    check()


def check_that_a_layout_is_refused(backend: Backend, message: str, **changes: Any) -> None:
    """Check that a layout which the backend takes is refused with these `changes`."""
    sizes: dict[str, Any] = {"num_layers": 1, "num_pages": 4, "page_size": 16, "num_kv_heads": 2, "head_size": 64}
    with pytest.raises(ValueError, match=message):
        backend.layout(KVShape(**{**sizes, **changes}))
