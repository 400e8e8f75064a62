"""The comparison of a kernel with the XLA path, on the device that it is to serve on, before it serves.

One small ragged batch is prefilled and decoded by both. A kernel that computes something else does not start; one that
agrees is not compared again until something about it changes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ConfigError
from ..models.config import ModelConfig
from ..pallas_kernels.ragged_paged_attention import (
    AttentionMetadata,
    Backend,
    KVShape,
    LayerPlace,
    PagedCache,
    XlaBackend,
    interface,
    random_tables,
    step_of_rows,
)
from .user_cache import make_private, user_cache

logger = logging.getLogger("jpaged")

LARGEST_ERROR = 2e-2
"""Of an output row's norm, between a kernel and the XLA path: both round to bfloat16 in different places."""
CHECK_TOKENS, CHECK_ROWS = 64, 8


def check_kernels(
    backend: Backend, model: ModelConfig, dtype: str, kv_dtype: str, block_size: int, device: jax.Device
) -> None:
    """Compare a kernel with the XLA path on this device, unless that was done before with the same versions.

    ConfigError if they differ, or if the kernel cannot be run. Where this user's files cannot be kept, it is done each
    time, with a warning.
    """
    if not backend.needs_check:
        return
    key = check_key(backend, model, dtype, kv_dtype, block_size, device)
    each_start = "the check of %s is made at each start: %s"
    mark: Path | None
    try:
        mark = user_cache("checked") / (hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32] + ".json")
        if mark.exists():
            return
    except (OSError, RuntimeError) as problem:
        mark = None
        logger.warning(each_start, backend.name, problem)
    try:
        error = kernel_error(
            backend,
            model.num_heads,
            model.num_kv_heads,
            model.head_size,
            dtype,
            kv_dtype,
            block_size,
            device,
            windows=model.windows,
        )
    except Exception as failure:
        raise ConfigError(
            f"attention_backend: {backend.name} failed its check on {device.device_kind}: "
            f"{' '.join(str(failure).split())[:500]}; use --attention-backend xla"
        ) from failure
    if not error <= LARGEST_ERROR:
        raise ConfigError(
            f"attention_backend: {backend.name} differs from the XLA path on {device.device_kind} by {error:.3g} of an "
            f"output's norm, allowed: {LARGEST_ERROR}; use --attention-backend xla"
        )
    logger.info("%s agrees with the XLA path on %s to %.2g", backend.name, device.device_kind, error)
    if mark is None:
        return
    try:
        make_private(mark.parent)
        mark.write_text(json.dumps({"checked": key, "error": error}))
    except OSError as problem:
        logger.warning(each_start, backend.name, problem)


def check_key(
    backend: Backend, model: ModelConfig, dtype: str, kv_dtype: str, block_size: int, device: jax.Device
) -> list[Any]:
    """What a comparison holds for: another kernel, shape, chip, driver or version is compared anew."""
    shape = [model.num_heads, model.num_kv_heads, model.head_size, sorted({window or 0 for window in model.windows})]
    versions = [device.client.platform_version, jax.__version__, source_digest()]
    return [repr(backend), *shape, dtype, kv_dtype, block_size, device.device_kind, *versions]


def source_digest(folder: Path = Path(interface.__file__).parent) -> str:
    """Of the source of all backends: a kernel that was changed is another one, whatever our version says."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def kernel_error(
    backend: Backend,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: str,
    kv_dtype: str,
    block_size: int,
    device: jax.Device,
    *,
    windows: Sequence[int | None] = (None,),
) -> float:
    """The largest difference from the XLA path, as a share of an output row's norm, over prefill and decode steps.

    In the second of two layers, for each of `windows`, of queries, keys and values in `dtype`. All steps have the same
    shapes, so that each backend compiles one program a window.
    """
    worst = 0.0
    for window in dict.fromkeys(windows):
        rng = np.random.default_rng(0)
        shape = KVShape(2, 1, block_size, num_kv_heads, head_size, kv_dtype)
        context_len = backend.check_context_len(num_heads, backend.layout(shape), dtype)
        tables, num_tokens, works = check_steps(block_size, context_len, rng)
        shape = dataclasses.replace(shape, num_pages=int(tables.max()) + 1)
        caches = [_unwritten_cache(each, shape) for each in (backend, XlaBackend(platform=device.platform))]
        lens = np.zeros(len(tables), int)
        for work in works:
            lens += work
            rows, inputs = np.flatnonzero(work), []
            for num in (num_heads, num_kv_heads, num_kv_heads):
                inputs.append(jnp.asarray(rng.normal(size=(num_tokens, num, head_size)), dtype))
            outs = []
            for index, cache in enumerate(caches):
                step = step_of_rows(
                    cache.backend,
                    work[rows].tolist(),
                    lens[rows].tolist(),
                    tables[rows],
                    page_size=block_size,
                    num_tokens=num_tokens,
                    num_rows=CHECK_ROWS,
                )
                with jax.default_device(device):
                    out, caches[index] = _attend(cache, *inputs, step, scale=head_size**-0.5, window=window)
                outs.append(np.asarray(out[: work.sum()], np.float32))
            errors = np.linalg.norm(outs[0] - outs[1], axis=-1) / np.linalg.norm(outs[1], axis=-1)
            worst = max(worst, float(errors.max()) if np.isfinite(errors).all() else np.inf)
    return worst


def check_steps(block_size: int, long: int, rng: np.random.Generator) -> tuple[np.ndarray, int, list[np.ndarray]]:
    """Page tables [rows, P], the tokens that a step has room for, and the new tokens of each row in each step.

    Short rows around the end of a page and a long one, which is written in two steps; then all of them decode.
    """
    short = np.array([1, 17, block_size - 1, block_size + 1])
    num_tokens = -(-(short.sum() + long) // (2 * CHECK_TOKENS)) * CHECK_TOKENS
    first = int(num_tokens - short.sum())
    works = [np.array(work) for work in ([*short, first], [0, 0, 0, 0, long - first], [1] * 5, [1] * 5)]
    return random_tables(np.sum(works, axis=0).tolist(), block_size, rng), int(num_tokens), works


@functools.partial(jax.jit, static_argnames=("scale", "window"))
def _attend(
    cache: PagedCache, q: jax.Array, k: jax.Array, v: jax.Array, step: AttentionMetadata, *, scale: float, window: Any
) -> tuple[jax.Array, PagedCache]:
    return cache.attend(1, q, k, v, step, scale=scale, window=window)


def _unwritten_cache(backend: Backend, shape: KVShape) -> PagedCache:
    """A cache of two layers whose pages hold NaN, as if nothing had been written yet."""
    layout = backend.layout(shape)
    pages = tuple(jnp.full(shape, layout.unwritten) for shape in layout.shapes)
    return PagedCache(pages, layout, (LayerPlace(0, 0), LayerPlace(0, 1)), backend)
