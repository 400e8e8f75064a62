"""Native code for decode rows and page writes on a CPU: numbers, dead slots, threads, company, layers."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llvmlite import ir

from jpaged.pallas_kernels import cpu_code
from jpaged.pallas_kernels.cpu_code import F32, I64, Code, register
from jpaged.pallas_kernels.cpu_handler import Buffer, handler
from jpaged.pallas_kernels.ragged_paged_attention import cpu_attention
from jpaged.pallas_kernels.ragged_paged_attention.cpu_attention import decode_rows, write_pages
from jpaged.pallas_kernels.ragged_paged_attention.xla_pages import LayerPages, as_float32, as_stored

ROOT = Path(__file__).parents[2]
NUM_PAGES = 24
BIT = ir.IntType(1)


def random_pages(rng: np.random.Generator, heads: int, head_size: int, page_size: int, dtype: Any) -> list[jax.Array]:
    shapes = (NUM_PAGES, heads, head_size, page_size), (NUM_PAGES, heads, page_size, head_size)
    return [as_stored(jnp.asarray(rng.normal(size=shape), jnp.float32), dtype) for shape in shapes]


def exact(
    pages: list[jax.Array],
    q: np.ndarray,
    tables: np.ndarray,
    lens: np.ndarray,
    first_page: int,
    num_seen: np.ndarray,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> np.ndarray:
    """The definition, in float64."""
    keys, values = (np.asarray(as_float32(array)).astype(np.float64) for array in pages)
    out = np.zeros(q.shape)
    for row, length in enumerate(lens):
        ids = first_page + tables[row, : -(-length // values.shape[2])]
        seen = slice(max(num_seen[row] * values.shape[2], 0 if window is None else length - window), length)
        for head in range(q.shape[1] if length else 0):
            k = np.concatenate(keys[ids, head], axis=1)[:, seen]
            v = np.concatenate(values[ids, head], axis=0)[seen]
            scores = scale * q[row, head] @ k
            scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[row, head] = weights @ v / weights.sum(axis=1, keepdims=True)
    return out


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
@pytest.mark.parametrize(
    ("heads", "group", "head_size", "page_size"),
    [(3, 3, 64, 64), (1, 1, 64, 16), (2, 7, 128, 32), (2, 5, 80, 8), (1, 4, 24, 12), (2, 8, 256, 64), (1, 3, 7, 5)],
)
@pytest.mark.parametrize(
    ("window", "soft_cap"), [(None, None), (1, None), (20, None), (None, 3.0)], ids=["plain", "1", "20", "cap"]
)
def test_decode_rows_are_what_attention_is(
    heads: int, group: int, head_size: int, page_size: int, dtype: str, window: int | None, soft_cap: float | None
) -> None:
    """Whatever the vectors that a page and a head are cut into, at every edge of a page, in a layer of its own."""
    rng = np.random.default_rng(page_size)
    pages = random_pages(rng, heads, head_size, page_size, jnp.dtype(dtype))
    edges = (0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size, 4 * page_size - 1)
    lens, first_page = np.array(edges, np.int32), 4
    q = rng.normal(size=(len(lens), heads, group, head_size)).astype(np.float32)
    tables = rng.integers(0, NUM_PAGES - first_page, (len(lens), 6)).astype(np.int32)
    tables[np.arange(6)[None] * page_size >= lens[:, None]] = 2**30  # Not looked at.
    num_seen = np.where((lens > 2 * page_size) & (window is None), 1, 0).astype(np.int32)
    layer = LayerPages(*pages, True, jnp.int32(first_page), head_size**-0.5, window, soft_cap)
    out = jax.jit(lambda *args: decode_rows(layer, *args).result())(q, tables, lens, num_seen)
    wanted = exact(pages, q, tables, lens, first_page, num_seen, head_size**-0.5, window, soft_cap)
    assert np.abs(np.asarray(out) - wanted).max() < 2e-6
    assert (np.asarray(out)[0] == 0).all()


def test_vectors_of_eight_lanes_do_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cpu_code, cpu_attention):
        monkeypatch.setattr(module, "has_long_vectors", lambda: False)
    cpu_attention._decode_handler.cache_clear()
    test_decode_rows_are_what_attention_is(3, 5, 80, 24, "float32", 20, None)
    cpu_attention._decode_handler.cache_clear()


@pytest.mark.parametrize("spread", [1e-3, 30.0, 1e4])
def test_scores_of_any_size_make_weights(spread: float) -> None:
    """One key for all weight, or nearly the same for each: no overflow, no page forgotten."""
    rng = np.random.default_rng(0)
    pages = random_pages(rng, 1, 64, 8, jnp.float32)
    pages[0] = pages[0] * spread
    q = rng.normal(size=(1, 1, 2, 64)).astype(np.float32)
    tables, lens, none = np.arange(20, dtype=np.int32)[None], np.array([160], np.int32), np.zeros(1, np.int32)
    layer = LayerPages(*pages, True, jnp.int32(0), 1.0, None, None)
    out = np.asarray(jax.jit(lambda *args: decode_rows(layer, *args).result())(q, tables, lens, none))
    # A score of 1e4 has a unit of the last place of 1e-3.
    assert np.abs(out - exact(pages, q, tables, lens, 0, none, 1.0, None, None)).max() < max(2e-6, spread * 1e-6)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    rng = np.random.default_rng(0)
    keys, values = random_pages(rng, 2, 64, 8, jnp.float32)
    keys = keys.at[3, 1, 5, 2].set(jnp.nan)
    values = values.at[7, 0, 4, 9].set(jnp.inf).at[9].set(jnp.nan)
    tables = np.array([[1, 2], [1, 3], [7, 2], [2, 9]], np.int32)
    lens = np.array([16, 16, 16, 8], np.int32)
    layer = LayerPages(keys, values, True, jnp.int32(0), 0.125, None, None)
    q = rng.normal(size=(4, 2, 2, 64)).astype(np.float32)
    run = jax.jit(lambda *args: decode_rows(layer, *args).result())
    out = np.asarray(run(q, tables, lens, np.zeros(4, np.int32)))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1, 1]).all()
    assert np.isfinite(out[1, 0]).all()
    assert np.isinf(out[2, 0, :, 9]).all()
    assert np.isfinite(np.delete(out[2, 0], 9, axis=1)).all()
    assert np.isfinite(out[3]).all()


BITS_OF_LONG_ROWS = """
import hashlib, sys, jax, jax.numpy as jnp, numpy as np
from jpaged.pallas_kernels.ragged_paged_attention.cpu_attention import decode_rows
from jpaged.pallas_kernels.ragged_paged_attention.xla_pages import LayerPages
rng = np.random.default_rng(0)
keys, values = (jnp.asarray(rng.normal(size=(40, 3, 64, 64)), jnp.float32) for _ in range(2))
layer = LayerPages(keys, values, True, jnp.int32(0), 0.125, None, None)
rows = 16
q = rng.normal(size=(rows, 3, 3, 64)).astype(np.float32)
tables = rng.integers(0, 40, (rows, 32)).astype(np.int32)
lens = rng.integers(500, 2000, rows).astype(np.int32)
run = jax.jit(lambda *args: decode_rows(layer, *args).result())
for _ in range(200):  # Whoever comes late must find nothing left, and no memory that is gone.
    out = np.asarray(run(q, tables, lens, np.zeros(rows, np.int32)))
one = np.asarray(run(q[5:6], tables[5:6], lens[5:6], np.zeros(1, np.int32)))
assert np.array_equal(one[0], out[5]), "a row alone"
# Two units: whoever helps begins later and is not done when the caller is.
keys, values = keys[:, :1], values[:, :1]
layer = LayerPages(keys, values, True, jnp.int32(0), 0.125, None, None)
run = jax.jit(lambda *args: decode_rows(layer, *args).result())
two = q[:2, :1], tables[:2], np.full(2, 2000, np.int32), np.zeros(2, np.int32)
alone = np.concatenate([np.asarray(run(*(array[i : i + 1] for array in two))) for i in range(2)])
for _ in range(300):
    assert np.array_equal(np.asarray(run(*two)), alone), "waits for its helper"
print(hashlib.sha256(out.tobytes()).hexdigest())
"""


def test_any_number_of_threads_gives_the_same_bits() -> None:
    """Also none but the caller's, and more than there are cores."""
    found = set()
    for num_threads in (1, 2, 5):
        # XLA makes its pool as large as NPROC says.
        environment = {**os.environ, "NPROC": str(num_threads), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", BITS_OF_LONG_ROWS]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT)
        assert result.returncode == 0, result.stderr[-2000:]
        found.add(result.stdout)
    assert len(found) == 1


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
@pytest.mark.parametrize(("num_tokens", "heads", "head_size", "page_size"), [(1, 3, 64, 64), (17, 2, 7, 5)])
def test_keys_and_values_are_written_where_they_belong_and_nowhere_else(
    num_tokens: int, heads: int, head_size: int, page_size: int, dtype: str
) -> None:
    check_writes(num_tokens, heads, head_size, page_size, dtype)


def test_many_tokens_are_written_by_several_threads() -> None:
    check_writes(1000, 3, 64, 64, "float32")


def check_writes(num_tokens: int, heads: int, head_size: int, page_size: int, dtype: str) -> None:
    rng = np.random.default_rng(num_tokens)
    pages = random_pages(rng, heads, head_size, page_size, jnp.dtype(dtype))
    first_page = 3
    slots = rng.permutation((NUM_PAGES - first_page) * page_size)[:num_tokens].astype(np.int32)
    k, v = (
        as_stored(jnp.asarray(rng.normal(size=(len(slots), heads, head_size)), jnp.float32), jnp.dtype(dtype))
        for _ in range(2)
    )
    wanted = [np.array(array) for array in pages]
    for token, slot in enumerate(slots):
        page, place = first_page + slot // page_size, slot % page_size
        wanted[0][page, :, :, place] = k[token]
        wanted[1][page, :, place] = v[token]
    found = jax.jit(write_pages, donate_argnums=(0, 1))(*pages, k, v, jnp.int32(first_page), slots)
    for array, expected in zip(found, wanted, strict=True):
        assert np.array_equal(np.asarray(array), expected)


def test_exponentials_are_within_two_units_of_the_last_place() -> None:
    def prepare(code: Code, args: list[Buffer], rets: list[Buffer]) -> Any:
        return [args[0].data, rets[0].data, args[0].size(0)], I64(1), BIT(0)

    def body(code: Code, given: list[Any], unit: Any) -> None:
        source, target, size = given
        code.loop(
            0, size, lambda at: code.store_vector(code.exp(code.load_vector(source, at, F32, 16)), target, at), step=16
        )

    name = register(handler("jpaged_test_exp", 1, 1, prepare, body))
    x = -np.concatenate([np.linspace(0, 87, 1 << 16), np.geomspace(1e-30, 1, 1 << 12)]).astype(np.float32)
    out = np.asarray(jax.jit(lambda x: jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, x.dtype))(x))(x))
    wanted = np.exp(x.astype(np.float64))
    assert (np.abs(out - wanted) <= 2 * np.spacing(wanted.astype(np.float32))).all()
