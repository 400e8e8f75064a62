"""Compares a backend with the `xla` backend on the device that it is to serve on, before it serves.

One small ragged batch is prefilled and decoded by both; a backend with products and norms of its own computes these
too. A backend that computes something else does not serve; one that agrees is not compared again until the backend,
the model's shape, the chip or a version changes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from ... import pallas_kernels
from ...checks import one_line
from ...models.config.spec import ModelSpec
from ...pallas_kernels.layer_ops import XLA_OPS, LayerOps
from ...pallas_kernels.ragged_paged_attention.interface import (
    AttentionShape,
    Backend,
    CheckGuard,
    KVShape,
    LayerPlace,
)
from ...pallas_kernels.ragged_paged_attention.paged_cache import PagedCache
from ...pallas_kernels.ragged_paged_attention.plain_steps import random_tables, step_of_rows
from ...pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend
from ..user_cache import make_private, user_cache
from .choice import attention_shape

logger = logging.getLogger("jpaged")

MAX_ERROR = 2e-2
"""Largest difference of a row from the `xla` backend's, as a share of its norm: both round to bfloat16 in different
places."""
WATCHDOG_S = 120.0
"""Seconds after which a comparison on a TPU counts as hanging: it takes a few, with the compilation of all kernels."""
EACH_START = "the check of %s is made at each start: %s"
CHECK_TOKENS, CHECK_ROWS = 64, 8
CHECK_SOFT_CAP = 2.0
"""For models that have one: it bounds scores of the size of 1, where a larger one would change nothing."""
NORM_EPS = 1e-5
PRODUCT_ROWS, PRODUCT_COLUMNS = (1, 3, 40), 100
"""Rows and columns of the products that are compared: no multiples of any tile."""


def find_failure(
    backend: Backend, model: ModelSpec, dtype: str, kv_dtype: str, block_size: int, device: jax.Device
) -> str | None:
    """Compare a backend with `xla` on this device, unless that was done before with the same versions.

    A backend whose check is made in a subprocess is not compared here (`check_process`). Returns a
    clause that says why the backend must not serve: it differs, or it cannot be run. None if it may serve.
    Where this user's files cannot be kept, it is compared at each start, with a warning.
    """
    if not backend.needs_check or backend.check_guard is CheckGuard.CHILD:
        return None
    where = f"on {device.device_kind}"
    mark: Path | None = None
    try:
        key = check_key(backend, model, dtype, kv_dtype, block_size, device)
        try:
            path = result_file(key)
            if path.exists():
                return None
            mark = path
        except (OSError, RuntimeError) as problem:
            logger.warning(EACH_START, backend.name, problem)
        with _watchdog(backend):
            error = kernel_error(backend, attention_shape(model, kv_dtype), dtype, block_size, device)
        if backend.layer_ops != XLA_OPS:
            error = max(error, layer_error(backend.layer_ops, model.hidden_size, dtype, device))
    except Exception as failure:
        return f"it failed its check {where}: {one_line(failure, 500)}"
    if difference := too_different(error, device):
        return difference
    logger.info("%s agrees with xla %s to %.2g", backend.name, where, error)
    if mark is not None:
        keep_result(mark, {"checked": key, "error": error}, backend.name)
    return None


def result_file(key: Any) -> Path:
    """Return the file that remembers the comparison of this key, of JSON values; RuntimeError if it has no place."""
    return user_cache("checked") / (hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32] + ".json")


def keep_result(path: Path, result: Any, name: str) -> bool:
    """Write a result to the file that remembers it; return whether that was possible. `name` is for the warning."""
    try:
        make_private(path.parent)
        path.write_bytes(msgspec.json.encode(result))
    except OSError as problem:
        logger.warning(EACH_START, name, problem)
        return False
    return True


def too_different(error: float, device: jax.Device) -> str | None:
    """Return the clause for a backend whose largest difference from `xla` is `error`; None if it may serve."""
    if error <= MAX_ERROR:
        return None
    where = f"on {device.device_kind}"
    return f"it differs from xla {where} by {error:.3g} of an output's norm, allowed: {MAX_ERROR}"


@contextlib.contextmanager
def _watchdog(backend: Backend) -> Iterator[None]:
    """End the process with one line after WATCHDOG_S, for a backend that asks for it: nothing ends a hanging kernel."""

    def end_process() -> None:
        message = f"error: attention: the check of {backend.name} has given no answer within {WATCHDOG_S:g} s; "
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os.write(2, f'{message}use --attention-backend xla, or Engine(attention_backend="xla")\n'.encode())
        os._exit(1)

    timer = threading.Timer(WATCHDOG_S, end_process)
    timer.daemon = True
    if backend.check_guard is CheckGuard.WATCHDOG:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_key(
    backend: Backend, model: ModelSpec, dtype: str, kv_dtype: str, block_size: int, device: jax.Device
) -> list[Any]:
    """Return the backend, shape, chip, driver and versions of a comparison; where one differs, it is made anew."""
    windows = sorted({window or 0 for window in model.windows})
    heads = attention_shape(model, kv_dtype)
    shape = [heads.num_heads, heads.num_kv_heads, heads.head_size, model.hidden_size, windows, heads.has_soft_cap]
    versions = [device.client.platform_version, jax.__version__, version("jaxlib"), source_digest()]
    return [repr(backend), *shape, dtype, kv_dtype, block_size, backend.hardware(device), *versions]


def source_digest(folder: Path = Path(pallas_kernels.__file__).parent) -> str:
    """Return a digest of the source of all backends: a changed kernel is another one, whatever our version says."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def kernel_error(backend: Backend, shape: AttentionShape, dtype: str, block_size: int, device: jax.Device) -> float:
    """Return the largest difference from `xla`, as a share of an output row's norm, over prefill and decode steps.

    Compares attention in the second of two layers, for each window of `shape`, with queries, keys and values in
    `dtype`. All steps have the same shapes, so that each backend compiles two programs per window: the one for
    steps that only decode is another than that for prompts.
    """
    worst, head_size = 0.0, shape.head_size
    soft_cap = CHECK_SOFT_CAP if shape.has_soft_cap else None
    for window in dict.fromkeys(shape.windows or (None,)):
        options = {"scale": head_size**-0.5, "window": window, "soft_cap": soft_cap}
        attend = jax.jit(functools.partial(PagedCache.attend, **options), static_argnums=1)
        rng = np.random.default_rng(0)
        layout = backend.layout(shape.kv_shape(block_size, num_layers=2))
        context_len = backend.check_context_len(shape.num_heads, layout, dtype)
        tables, num_tokens, works = check_steps(block_size, context_len, rng)
        kv_shape = shape.kv_shape(block_size, num_layers=2, num_pages=int(tables.max()) + 1)
        caches = [_unwritten_cache(each, kv_shape) for each in (backend, XlaBackend(platform=device.platform))]
        lens = np.zeros(len(tables), int)
        for work in works:
            lens += work
            heads = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads
            inputs = [jnp.asarray(rng.normal(size=(num_tokens, num, head_size)), dtype) for num in heads]
            rows, outs = np.flatnonzero(work), []
            query_lens, context_lens = work[rows].tolist(), lens[rows].tolist()
            is_decode = bool((work[rows] == 1).all())
            for index, cache in enumerate(caches):
                step = step_of_rows(
                    cache.backend,
                    query_lens,
                    context_lens,
                    tables[rows],
                    page_size=block_size,
                    num_tokens=num_tokens,
                    num_rows=CHECK_ROWS,
                    decodes_only=is_decode,
                )
                with jax.default_device(device):
                    out, caches[index] = attend(cache, 1, *inputs, step)
                outs.append(np.asarray(out[: work.sum()], np.float32))
            worst = max(worst, _largest_difference(*outs))
    return worst


def layer_error(ops: LayerOps, hidden_size: int, dtype: str, device: jax.Device) -> float:
    """Return the largest difference of products, columns and norms from `XLA_OPS`, as a share of a row's norm."""
    rng, matrix, worst = np.random.default_rng(0), (hidden_size, PRODUCT_COLUMNS), 0.0
    columns = rng.normal(size=matrix[::-1]).astype(jnp.dtype(dtype))
    gains, ids = rng.normal(size=hidden_size).astype(columns.dtype), np.arange(0, PRODUCT_COLUMNS, 7, dtype=np.int32)
    stored = [_stored(each, columns, matrix) for each in (ops, XLA_OPS)]

    def outputs(each: LayerOps, weight: np.ndarray, x: np.ndarray) -> list[np.ndarray]:
        @jax.jit
        def run(weight: jax.Array, x: jax.Array, gains: jax.Array) -> list[jax.Array]:
            rows = each.columns(weight, jnp.asarray(ids), hidden_size)
            normed = each.rms_norm(x, gains, NORM_EPS), each.layer_norm(x, gains, gains, NORM_EPS)
            return [each.product(x, weight, PRODUCT_COLUMNS), rows, *normed]

        with jax.default_device(device):
            return [np.asarray(out, np.float32) for out in run(weight, x, gains)]

    for num_rows in PRODUCT_ROWS:
        x = rng.normal(size=(num_rows, hidden_size)).astype(columns.dtype)
        ours, theirs = (outputs(each, weight, x) for each, weight in zip((ops, XLA_OPS), stored, strict=True))
        worst = max([worst, *map(_largest_difference, ours, theirs)])
    return worst


def _stored(ops: LayerOps, columns: np.ndarray, matrix: tuple[int, int]) -> np.ndarray:
    """Return the matrix with these columns, [out, in], as `ops` stores it."""
    out = np.empty(ops.matrix_shape(*matrix, columns.dtype), columns.dtype)
    _, write = ops.matrix_rows(out, [(0, size) for size in out.shape], matrix)
    write(0, columns)
    return out


def _largest_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest norm of a row's difference, as a share of the row's norm; infinity if one is not finite."""
    errors = np.linalg.norm(ours - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)
    return float(errors.max()) if np.isfinite(errors).all() else np.inf


def check_steps(block_size: int, long: int, rng: np.random.Generator) -> tuple[np.ndarray, int, list[np.ndarray]]:
    """Return page tables [rows, P], the token capacity of a step, and the new tokens of each row in each step.

    There are four short rows, two of them a token shorter and longer than a page, and one of `long` tokens, which is
    prefilled in two chunks; then all five decode twice. Both prefill steps fill about half of all tokens.
    """
    short_lens = np.array([1, 17, block_size - 1, block_size + 1])
    num_tokens = -(-(short_lens.sum() + long) // (2 * CHECK_TOKENS)) * CHECK_TOKENS
    first_chunk = int(num_tokens - short_lens.sum())
    works = [
        np.array(work) for work in ([*short_lens, first_chunk], [0, 0, 0, 0, long - first_chunk], [1] * 5, [1] * 5)
    ]
    return random_tables(np.sum(works, axis=0).tolist(), block_size, rng), int(num_tokens), works


def _unwritten_cache(backend: Backend, shape: KVShape) -> PagedCache:
    """Return a cache of two layers whose pages hold NaN, as if nothing had been written yet."""
    layout = backend.layout(shape)
    pages = tuple(jnp.full(shape, layout.unwritten) for shape in layout.shapes)
    return PagedCache(pages, layout, (LayerPlace(0, 0), LayerPlace(0, 1)), backend)
