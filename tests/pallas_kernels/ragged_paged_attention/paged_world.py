"""Sequences whose keys and values lie in pages, and the attention over them that every backend must compute."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.pallas_kernels.ragged_paged_attention.interface import NULL_PAGE, Backend, KVShape, LayerPlace
from jpaged.pallas_kernels.ragged_paged_attention.kv_scales import KVScales, quantize
from jpaged.pallas_kernels.ragged_paged_attention.native.backend import NativeBackend
from jpaged.pallas_kernels.ragged_paged_attention.paged_cache import PagedCache

from ...paged_steps import metadata, nan_cache
from .dense_attention import dense_attention

ATOL = 1e-5
"""Outputs are means of unit normals: float32 rounds them by 1e-7, some 1000 terms by 1e-6, and ten times that is
still a hundredth of what one key more or less moves among 1000."""
BF16_NORM = 1e-2
"""Greatest norm of the error of a head's output, relative to the output's: weights, values and sums have 8 bits."""
ONE_LAYER = (LayerPlace(0, 0),)


@dataclass(frozen=True)
class Shape:
    """Sizes of a run. `num_tokens` and `num_rows` are those that every step is padded to."""

    page_size: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    num_tokens: int = 48
    num_rows: int = 6
    table_len: int = 8
    layers: tuple[LayerPlace, ...] = ONE_LAYER
    num_group_layers: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    backend: Backend = NativeBackend(share_prefixes=False)  # noqa: RUF009  (frozen)
    slot_axes: tuple[int, ...] = (3, 2)
    """The axis that counts the tokens of a page, in each array of the cache."""
    dtype: str = "float32"
    """Dtype of the pages."""
    step_dtype: str | None = None
    """Dtype of queries, keys and values; None: float32 for pages of float32, else bfloat16."""

    @property
    def input_dtype(self) -> str:
        return self.step_dtype or ("float32" if self.dtype == "float32" else "bfloat16")


class World:
    """Sequences whose whole history is kept on the host and in pages; every step is compared with the oracle."""

    def __init__(self, shape: Shape, *, num_pages: int = 64, seed: int = 0):
        self.shape, self.rng = shape, np.random.default_rng(seed)
        self.num_groups = 1 + max(place.table_group for place in shape.layers)
        sizes = shape.num_group_layers, num_pages, shape.page_size, shape.num_kv_heads, shape.head_size, shape.dtype
        self.layout = shape.backend.layout(KVShape(*sizes))
        self.scales = self._scales() if jnp.dtype(shape.dtype).itemsize == 1 else None
        # A copy: the cache is given up at each step.
        self.cache = nan_cache(self.layout, shape.layers, shape.backend, jax.tree.map(jnp.array, self.scales))
        self.free = [int(page) for page in self.rng.permutation(np.arange(1, num_pages))]
        self.tables: list[list[list[int]]] = [[] for _ in range(self.num_groups)]
        self.keys: list[list[np.ndarray]] = []  # [row][layer] → [S, K, H]
        self.values: list[list[np.ndarray]] = []
        options = dict(shape.options)
        sinks = options.pop("sinks", None)
        self.run = partial(attend_layers, sinks=sinks, options=tuple(options.items()))

    def add_row(self, prefix_of: int | None = None, num_shared: int = 0) -> int:
        """Add a sequence whose first `num_shared` pages are those of another, as after a cache hit; return its row."""
        row, size = len(self.keys), num_shared * self.shape.page_size
        empty = np.zeros((0, self.shape.num_kv_heads, self.shape.head_size), np.float32)
        for group in range(self.num_groups):
            self.tables[group].append([] if prefix_of is None else self.tables[group][prefix_of][:num_shared])
        for history in (self.keys, self.values):
            shared = [empty] * len(self.shape.layers) if prefix_of is None else history[prefix_of]
            history.append([layer[:size] for layer in shared])
        return row

    def add_rows(self, count: int) -> None:
        """Add `count` sequences that share no page."""
        for _ in range(count):
            self.add_row()

    def forget(self, row: int, num_pages: int) -> None:
        """Replace the row's first pages, which its window has passed, by the null page, whose slots hold NaN."""
        for group in range(self.num_groups):
            self.tables[group][row][:num_pages] = [NULL_PAGE] * num_pages

    def step(
        self, work: dict[int, int], tolerance: float = ATOL, *, decodes_only: bool = False, **oracle_options: Any
    ) -> None:
        """Compute `work[row]` more tokens of each row, in every layer, and compare outputs and pages.

        `decodes_only`: by the program of steps whose rows have one token each.
        """
        shape = self.shape
        rows = sorted(work, key=lambda row: work[row] > 1)
        query_lens = [work[row] for row in rows]
        total = sum(query_lens)
        q, k, v = (self.padded(total, heads) for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads))
        q[:, total::2] = 1.0  # Padding with finite queries has to have finite outputs; the rest of it stays NaN.
        start = 0
        stored_k, stored_v = self._as_stored(k, "k"), self._as_stored(v, "v")
        for row, length in zip(rows, query_lens, strict=True):
            for layer in range(len(shape.layers)):
                self.keys[row][layer] = np.concatenate([self.keys[row][layer], stored_k[layer, start : start + length]])
                self.values[row][layer] = np.concatenate(
                    [self.values[row][layer], stored_v[layer, start : start + length]]
                )
            for table in self.tables:
                while len(table[row]) * shape.page_size < len(self.keys[row][0]):
                    table[row].append(self.free.pop())
            start += length
        context_lens = [len(self.keys[row][0]) for row in rows]
        step = metadata(
            shape.backend,
            query_lens,
            context_lens,
            [[table[row] for row in rows] for table in self.tables],
            page_size=shape.page_size,
            num_tokens=shape.num_tokens,
            num_rows=shape.num_rows,
            table_len=shape.table_len,
            decodes_only=decodes_only,
        )
        before = [np.array(pages) for pages in self.cache.pages]
        dtype = jnp.dtype(shape.input_dtype)
        outs, self.cache = self.run(self.cache, *(jax.device_put(x.astype(dtype)) for x in (q, k, v)), step)
        self._check_pages(before, np.asarray(step.slot_mapping))
        is_padding = np.arange(shape.num_tokens) >= total
        for layer, out in enumerate(outs):
            is_finite = np.isfinite(np.asarray(out, np.float32)).all(axis=(1, 2))
            assert is_finite[is_padding & np.isfinite(q[layer]).all(axis=(1, 2))].all(), "padding tokens"
        for layer in range(len(shape.layers) if rows else 0):
            options = {**shape.options, **oracle_options}
            wanted = dense_attention(
                q[layer, :total],
                [self.keys[row][layer] for row in rows],
                [self.values[row][layer] for row in rows],
                query_lens,
                **{name: np.asarray(value) if name == "sinks" else value for name, value in options.items()},
            )
            got = np.asarray(outs[layer], np.float32)[:total]
            if shape.input_dtype == "float32" and shape.dtype != "bfloat16":
                np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance)
            else:
                errors = np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
                assert errors.max(initial=0) <= BF16_NORM, (
                    f"Not equal to tolerance: off by {errors.max()} of a head's norm"
                )

    def padded(self, total: int, heads: int) -> np.ndarray:
        """Return [layer, T, heads, H]: normal numbers, and NaN from token `total` on."""
        shape = (len(self.shape.layers), self.shape.num_tokens, heads, self.shape.head_size)
        values = self.rng.normal(size=shape).astype(np.float32).astype(self.shape.input_dtype).astype(np.float32)
        values[:, total:] = np.nan
        return values

    def _scales(self) -> KVScales:
        """Return scales, different for every head and layer, with which the largest of 1,000 normal numbers fits."""
        shape = (len(self.shape.layers), self.shape.num_kv_heads)
        is_whole = jnp.issubdtype(self.shape.dtype, jnp.integer)
        most = jnp.iinfo(self.shape.dtype).max if is_whole else float(jnp.finfo(self.shape.dtype).max)
        return KVScales(
            *(jnp.asarray((self.rng.uniform(4, 8, size=shape) / most).astype(np.float32)) for _ in range(2))
        )

    def _as_stored(self, x: np.ndarray, which: str) -> np.ndarray:
        """Return x [layer, T, heads, H] as the pages give it back, rounded to their dtype."""
        if self.scales is None:
            return x.astype(self.shape.dtype).astype(np.float32)
        scales = getattr(self.scales, which)
        stored = [jitted_quantize(layer, scale, self.shape.dtype) for layer, scale in zip(x, scales, strict=True)]
        return np.stack(
            [np.asarray(layer, np.float32) * np.asarray(s)[:, None] for layer, s in zip(stored, scales, strict=True)]
        )

    def _check_pages(self, before: list[np.ndarray], slots: np.ndarray) -> None:
        """Check that every slot to which the step wrote no token holds the bits it held before."""
        page_size, num_pages = self.layout.page_size, self.layout.num_pages
        is_written = np.zeros((self.layout.num_layers * num_pages, page_size), bool)
        for place in self.shape.layers:
            pages = self.layout.entry(place.index, slots[place.table_group] // page_size)
            is_written[pages, slots[place.table_group] % page_size] = True
        for old, new, slot_axis in zip(before, self.cache.pages, self.shape.slot_axes, strict=True):
            old_slots, new_slots = (slots_of(x, slot_axis, page_size) for x in (old, new))
            assert np.array_equal(old_slots[~is_written], new_slots[~is_written])


def bits_of(x: np.ndarray | jax.Array) -> np.ndarray:
    """Return the bits of an array as integers: unlike NaN, each is equal to itself."""
    array = np.asarray(x)
    return array.view({1: np.int8, 2: np.int16, 4: np.int32}[array.dtype.itemsize])


def slots_of(x: np.ndarray | jax.Array, slot_axis: int, page_size: int) -> np.ndarray:
    """Return bits with the slots of a page in axis 1; a word that holds two slots is split."""
    bits = np.moveaxis(bits_of(x), slot_axis, 1)
    if bits.shape[1] == page_size:
        return bits
    halves = np.stack([bits & 0xFFFF, bits >> 16 & 0xFFFF], axis=2)
    return halves.reshape(bits.shape[0], page_size, *bits.shape[2:])


COMPILER_OPTIONS: dict[str, Any] = {"xla_backend_optimization_level": "0"}
"""XLA's optimizations take longer than they save: native code is compiled without XLA, and an interpreted kernel is
hundreds of calls of Python."""
if jax.__version_info__ < (0, 11):
    COMPILER_OPTIONS["xla_cpu_use_fusion_emitters"] = False


jitted_quantize = jax.jit(quantize, static_argnums=2)


@partial(jax.jit, donate_argnums=0, static_argnames="options", compiler_options=COMPILER_OPTIONS)
def attend_layers(
    cache: PagedCache, q: jax.Array, k: jax.Array, v: jax.Array, step: Any, *, sinks: Any, options: tuple[Any, ...]
) -> tuple[list[jax.Array], PagedCache]:
    """Attend in every layer of the cache to q, k and v [layer, T, heads, H]; worlds of equal shape share a program."""
    outs = []
    for layer in range(len(cache.layers)):
        out, cache = cache.attend(layer, q[layer], k[layer], v[layer], step, sinks=sinks, **dict(options))
        outs.append(out)
    return outs, cache


def shape_of(page_size: int = 8, **changes: Any) -> Shape:
    """Return a shape with room for rows of more than three pages in one step; without a scale, `options` get 1/√H."""
    options = {"scale": changes.get("head_size", 64) ** -0.5, **changes.pop("options", {})}
    return Shape(page_size=page_size, num_tokens=4 * page_size + 16, options=options, **changes)
