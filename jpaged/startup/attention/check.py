"""Compares a backend with numpy on the device that it is to serve on, before it serves.

One small ragged batch is prefilled and decoded by the backend; one with products and norms of its own computes these
too. What is expected is computed by numpy (`expected`), as compiling plain XLA for a comparison takes seconds. A
backend that computes something else does not serve; one that agrees is not compared again until the backend, the
model's shape, the chip or a version changes.
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
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from ...checks import one_line
from ...models.config.spec import ModelSpec
from ...pallas_kernels.code_formats import CodedMatrix, CodeFormat, decode
from ...pallas_kernels.kept_files import hash_of_sources
from ...pallas_kernels.layer_ops import LayerOps
from ...pallas_kernels.ragged_paged_attention.interface import (
    AttentionShape,
    Backend,
    CheckGuard,
    KVShape,
    LayerPlace,
)
from ...pallas_kernels.ragged_paged_attention.kv_scales import KVScales, is_quantized
from ...pallas_kernels.ragged_paged_attention.paged_cache import PagedCache
from ...pallas_kernels.ragged_paged_attention.plain_steps import random_tables, step_of_rows
from ..user_cache import make_private, user_cache
from .choice import attention_shape
from .expected import NORM_EPS, KeptRow, check_scales, layer_norm, product, random_codes, rms_norm

logger = logging.getLogger("jpaged")

MAX_ERROR = 2e-2
"""Largest difference of a row from what is expected, as a share of its norm: a backend may round to bfloat16 where
numpy computes in float32."""
MAX_CODES_ERRORS = {"float32": 5e-6, "bfloat16": 2e-4}
"""Largest difference of a product with a matrix that stays codes, by the dtype of the run. Native code may multiply by
integers: with a byte less than the dtype asks for, rows differ by 1.5e-5 in float32 and 3e-3 in bfloat16."""
WATCHDOG_S = 120.0
"""Seconds after which a comparison on a TPU counts as hanging: it takes a few, with the compilation of all kernels."""
EACH_START = "the check of %s is made at each start: %s"
CHECK_TOKENS, CHECK_ROWS = 64, 8
CHECK_SOFT_CAP = 2.0
"""For models that have one: it bounds scores of the size of 1, where a larger one would change nothing."""
CHECK_SINKS = 2.0, 6.0
"""Smallest and largest sink, for models that have them: these are e² to e⁶ beside the sum of exponentials of scores,
which is 2 for the shortest row and some 1,600 for one of 1,000 tokens."""
PRODUCT_ROWS, PRODUCT_COLUMNS = (1, 3, 40), 100
"""Rows and columns of the products that are compared: no multiples of any tile."""
CODED_INPUTS = 512
"""Rows of matrices of codes that are compared, at least."""


def find_failure(
    backend: Backend,
    model: ModelSpec,
    dtype: str,
    kv_dtype: str,
    block_size: int,
    device: jax.Device,
    formats: Sequence[CodeFormat] = (),
) -> str | None:
    """Compare a backend with numpy on this device; return why it must not serve, as a clause, or None if it may.

    Compares attention, and also matrix products and norms if the backend has its own; `formats` are those of matrices
    that stay codes. The reason not to serve is that results differ by more than MAX_ERROR, those with codes by more
    than MAX_CODES_ERRORS, or that the comparison raised an exception. An agreement is remembered in this user's cache
    by a file whose name is a digest of `check_key`: if the file is there, nothing is compared. If the cache cannot be
    used, a warning says so and each start compares. Nothing is compared, and the result is None, for a backend that
    needs no check or whose check is made in a subprocess (`check_process`).
    """
    if not backend.needs_check or backend.check_guard is CheckGuard.CHILD:
        return None
    where = f"on {device.device_kind}"
    agreement_file: Path | None = None  # Where an agreement is to be remembered; only agreements have files.
    try:
        key = check_key(backend, model, dtype, kv_dtype, block_size, device)
        key += [code_format.key for code_format in formats]
        try:
            path = result_file(key)
            if path.exists():
                return None
            agreement_file = path
        except (OSError, RuntimeError) as problem:
            logger.warning(EACH_START, backend.name, problem)
        with _watchdog(backend):
            errors = [(kernel_error(backend, attention_shape(model, kv_dtype), dtype, block_size, device), MAX_ERROR)]
        if backend.layer_ops.columns_of_codes is not None:  # Native code; other products are plain XLA.
            errors.append((layer_error(backend.layer_ops, model.hidden_size, dtype, device), MAX_ERROR))
            if formats:
                errors.append((codes_error(backend.layer_ops, formats, dtype, device), MAX_CODES_ERRORS[dtype]))
    except Exception as failure:  # A kernel that does not compile may raise anything.
        return f"it failed its check {where}: {one_line(failure, 500)}"
    for error, allowed in errors:
        if difference := too_different(error, device, allowed):
            return difference
    largest = max(error for error, _ in errors)
    logger.info("%s agrees with numpy %s to %.2g", backend.name, where, largest)
    if agreement_file is not None:
        keep_result(agreement_file, {"checked": key, "error": largest}, backend.name)
    return None


def result_file(key: Any) -> Path:
    """Return the path of the file that remembers the comparison with this key, which consists of JSON values.

    The file may not exist. RuntimeError if the user has no home directory.
    """
    return user_cache("checked") / (hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32] + ".json")


def keep_result(path: Path, result: Any, name: str) -> bool:
    """Write the result of a comparison to the file `path` as JSON, for later starts; return whether that worked.

    The folder of the file is made if it is missing, and is private to its owner. If the file cannot be written, a
    warning says that the check of the backend `name` is made at each start, and the result is False. `result` is any
    value that msgspec can encode.
    """
    try:
        make_private(path.parent)
        path.write_bytes(msgspec.json.encode(result))
    except OSError as problem:
        logger.warning(EACH_START, name, problem)
        return False
    return True


def too_different(error: float, device: jax.Device, allowed: float = MAX_ERROR) -> str | None:
    """Return the clause for a backend whose largest difference from numpy is `error`; None if it may serve."""
    if error <= allowed:
        return None
    where = f"on {device.device_kind}"
    return f"it differs from numpy {where} by {error:.3g} of an output's norm, allowed: {allowed}"


@contextlib.contextmanager
def _watchdog(backend: Backend) -> Iterator[None]:
    """End the whole process, with status 1, if the body of this context lasts longer than WATCHDOG_S.

    One line on stderr then says what to do. This is for a backend whose `check_guard` is WATCHDOG; for others the
    context does nothing. The process ends because nothing can cancel a kernel that hangs.
    """

    def end_process() -> None:
        """Write what is in the buffers of the standard streams, then the error, and end the process with status 1."""
        message = f"error: attention: the check of {backend.name} has given no answer within {WATCHDOG_S:g} s; "
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        # Straight to descriptor 2, past Python's buffers, since the process ends without flushing them.
        os.write(2, f'{message}use --attention-backend xla, or Engine(attention_backend="xla")\n'.encode())
        os._exit(1)  # sys.exit would only end this timer's thread.

    timer = threading.Timer(WATCHDOG_S, end_process)
    timer.daemon = True  # A process that ends otherwise does not wait for the timer.
    if backend.check_guard is CheckGuard.WATCHDOG:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_key(
    backend: Backend, model: ModelSpec, dtype: str, kv_dtype: str, block_size: int, device: jax.Device
) -> list[Any]:
    """Return all that the result of a comparison depends on, as JSON values: if one differs, the check is made anew.

    These are the backend, the model's shape, the data types, the page size, the chip, its driver, the versions of JAX,
    and a digest of the kernels' source.
    """
    windows = sorted({window or 0 for window in model.windows})  # 0 stands for full attention.
    heads = attention_shape(model, kv_dtype)
    shape = [heads.num_heads, heads.num_kv_heads, heads.head_size, model.hidden_size, windows]
    shape += [heads.has_soft_cap, heads.has_sinks]
    versions = [device.client.platform_version, jax.__version__, version("jaxlib"), source_digest()]
    return [repr(backend), *shape, dtype, kv_dtype, block_size, backend.hardware(device), *versions]


def source_digest() -> str:
    """Return a digest of the source of all backends, so that a changed kernel is checked anew without a new version."""
    return hash_of_sources("jpaged.pallas_kernels")[:32]


def kernel_error(backend: Backend, shape: AttentionShape, dtype: str, block_size: int, device: jax.Device) -> float:
    """Return the largest difference between this backend's attention and that of numpy, as a share of a row's norm.

    The backend runs the steps of `check_steps`, prefills and decodes, with random queries [T, N, H], keys and values
    [T, K, H] of `dtype`: T tokens, N query heads, K KV heads of size H. The difference of an output [T, N, H] is taken
    per token and head. The backend's cache has two layers, of which the second is used. Each window of `shape` is
    compared, with a soft cap and with sinks if some layer has them. All steps have the same shapes, so two programs are
    compiled per window: one for steps with prompts, one for steps that only decode. The result is infinity if an output
    is not finite.
    """
    largest_error, head_size = 0.0, shape.head_size
    soft_cap = CHECK_SOFT_CAP if shape.has_soft_cap else None
    for window in dict.fromkeys(shape.windows or (None,)):
        options = {"scale": head_size**-0.5, "window": window, "soft_cap": soft_cap}
        attend = jax.jit(functools.partial(PagedCache.attend, **options), static_argnums=1)
        rng = np.random.default_rng(0)  # The same numbers at each start.
        sinks = rng.uniform(*CHECK_SINKS, shape.num_heads).astype(np.float32) if shape.has_sinks else None
        # A layout of one page, to ask how long the longest row has to be; the cache gets as many pages as rows need.
        layout = backend.layout(shape.kv_shape(block_size, num_layers=2))
        context_len = backend.check_context_len(shape.num_heads, layout, dtype)
        tables, num_tokens, steps = check_steps(block_size, context_len, rng)
        kv_shape = shape.kv_shape(block_size, num_layers=2, num_pages=int(tables.max()) + 1)
        cache, kept_rows = _unwritten_cache(backend, kv_shape), [KeptRow(kv_shape.dtype) for _ in tables]
        context_lens = np.zeros(len(tables), int)
        for query_lens in steps:
            context_lens += query_lens
            head_counts = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads  # Of queries, keys and values.
            inputs = [rng.normal(size=(num_tokens, heads, head_size)).astype(jnp.dtype(dtype)) for heads in head_counts]
            rows = np.flatnonzero(query_lens)  # Rows without new tokens are left out of the step.
            step = step_of_rows(
                backend,
                query_lens[rows].tolist(),
                context_lens[rows].tolist(),
                tables[rows],
                page_size=block_size,
                num_tokens=num_tokens,
                num_rows=CHECK_ROWS,
                decodes_only=bool((query_lens[rows] == 1).all()),
            )
            with jax.default_device(device):
                out, cache = attend(cache, 1, *inputs, step, sinks=sinks)
            # Tokens of row after row. The step is padded to `num_tokens`; outputs of padding are not compared.
            ends = np.cumsum(query_lens[rows])
            expected = [
                kept_rows[row].attend(*(each[end - query_lens[row] : end] for each in inputs), sinks=sinks, **options)
                for row, end in zip(rows, ends, strict=True)
            ]
            out = np.asarray(out, np.float32)[: ends[-1]]
            largest_error = max(largest_error, _largest_difference(out, np.concatenate(expected)))
    return largest_error


def layer_error(ops: LayerOps, hidden_size: int, dtype: str, device: jax.Device) -> float:
    """Return the largest difference between the results of `ops` and those of numpy, as a share of a row's norm.

    Compares the product x · W, columns taken from W, RMS norm and layer norm of x, for x [rows, hidden_size] with each
    number of rows in PRODUCT_ROWS. W [hidden_size, PRODUCT_COLUMNS] and the other inputs are random arrays of `dtype`,
    and `ops` stores W in its own way. The result is infinity if an output is not finite.
    """
    rng, matrix, largest_error = np.random.default_rng(0), (hidden_size, PRODUCT_COLUMNS), 0.0
    weight_t = rng.normal(size=matrix[::-1]).astype(jnp.dtype(dtype))  # Wᵀ [out, in], as checkpoints have it.
    gains, ids = rng.normal(size=hidden_size).astype(weight_t.dtype), np.arange(0, PRODUCT_COLUMNS, 7, dtype=np.int32)
    inputs = [rng.normal(size=(num_rows, hidden_size)).astype(weight_t.dtype) for num_rows in PRODUCT_ROWS]

    @jax.jit
    def run(weight: jax.Array, inputs: list[jax.Array], gains: jax.Array) -> list[list[jax.Array]]:
        """Return the results for each number of rows: of one program, as compiling several takes longer."""
        columns = ops.columns(weight, jnp.asarray(ids), hidden_size)  # Every seventh one, as an embedding reads.

        def outputs(x: jax.Array) -> list[jax.Array]:
            normed = ops.rms_norm(x, gains, NORM_EPS), ops.layer_norm(x, gains, gains, NORM_EPS)
            return [ops.product(x, weight, PRODUCT_COLUMNS), columns, *normed]

        return list(map(outputs, inputs))

    with jax.default_device(device):
        results = run(_stored(ops, weight_t, matrix), inputs, gains)
    weight_t_f32, gains_f32 = weight_t.astype(np.float32), gains.astype(np.float32)
    for x, outs in zip(inputs, results, strict=True):
        x_f32 = x.astype(np.float32)
        normed = rms_norm(x_f32, gains_f32), layer_norm(x_f32, gains_f32)
        expected = [product(x_f32, weight_t_f32.T), weight_t_f32[ids], *normed]
        for out, wanted in zip(outs, expected, strict=True):
            largest_error = max(largest_error, _largest_difference(np.asarray(out, np.float32), wanted))
    return largest_error


def codes_error(ops: LayerOps, formats: Sequence[CodeFormat], dtype: str, device: jax.Device) -> float:
    """Return the largest difference between products of `ops` with matrices of codes and those of numpy, as a share.

    For each format, a matrix W [K, PRODUCT_COLUMNS] of random codes is multiplied by each number of rows in
    PRODUCT_ROWS, and columns are taken from it. K is CODED_INPUTS, or as many blocks as it begins. `dtype` is that
    of the run. A backend may round weights to it or not: the difference counts from the nearer of both results.
    """
    rng, largest_error = np.random.default_rng(0), 0.0
    ids = np.arange(0, PRODUCT_COLUMNS, 7, dtype=np.int32)
    matrices, numbers, inputs = list[CodedMatrix](), list[np.ndarray](), list[list[np.ndarray]]()
    for code_format in formats:
        depth = -(-CODED_INPUTS // code_format.block) * code_format.block
        inputs.append([rng.normal(size=(num_rows, depth)).astype(jnp.dtype(dtype)) for num_rows in PRODUCT_ROWS])
        codes = random_codes(code_format, PRODUCT_COLUMNS, depth, rng)
        parts = ((code_format, PRODUCT_COLUMNS),)
        packed = ops.packed_codes(codes, code_format, parts, dtype).reshape(-1)
        matrices.append(CodedMatrix(jax.device_put(packed, device), depth, parts, dtype))
        numbers.append(decode(codes, code_format))

    @jax.jit
    def run(matrices: list[CodedMatrix], inputs: list[list[jax.Array]]) -> list[list[jax.Array]]:
        return [
            [
                *(ops.product(x, matrix, PRODUCT_COLUMNS) for x in rows),
                ops.columns(matrix, jnp.asarray(ids), matrix.depth),
            ]
            for matrix, rows in zip(matrices, inputs, strict=True)
        ]

    for numbers_t, rows, outs in zip(numbers, inputs, run(matrices, inputs), strict=True):
        rounded_t = numbers_t.astype(jnp.dtype(dtype)).astype(np.float32)
        expected, of_rounded = (
            [*(product(x.astype(np.float32), weight_t.T) for x in rows), weight_t[ids]]
            for weight_t in (numbers_t, rounded_t)
        )
        for out, *both in zip(outs, expected, of_rounded, strict=True):
            nearer = min(_largest_difference(np.asarray(out, np.float32), wanted) for wanted in both)
            largest_error = max(largest_error, nearer)
    return largest_error


def _stored(ops: LayerOps, weight_t: np.ndarray, matrix: tuple[int, int]) -> np.ndarray:
    """Return a matrix W as `ops` stores it. `weight_t` is Wᵀ [out, in], and `matrix` is the shape (in, out) of W.

    `matrix_rows` returns the bounds of the rows to read, here all of them, and a function that stores rows from a first
    one on; it is called once, with all rows.
    """
    out = np.empty(ops.matrix_shape(*matrix, weight_t.dtype), weight_t.dtype)
    _, write = ops.matrix_rows(out, [(0, size) for size in out.shape], matrix)
    write(0, weight_t)
    return out


def _largest_difference(out: np.ndarray, expected: np.ndarray) -> float:
    """Return max over rows of |out − expected| ÷ |expected|, by norms of rows; infinity if one is not finite."""
    errors = np.linalg.norm(out - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return float(errors.max()) if np.isfinite(errors).all() else np.inf


def check_steps(block_size: int, long_len: int, rng: np.random.Generator) -> tuple[np.ndarray, int, list[np.ndarray]]:
    """Return page tables [rows, P], the token capacity of a step, and for each step the new tokens of each row [rows].

    A row is a sequence. Four rows are short, two of them one token shorter and longer than a page, and a fifth has
    `long_len` tokens, more than the others together. Step 1 prefills the short rows and the first chunk of the long
    one, step 2 its second chunk; then all rows decode twice. The capacity is half of all prompt tokens, rounded up to a
    multiple of CHECK_TOKENS; the first chunk fills step 1 up to it.

    Example with pages of 64 tokens and a `long_len` of 300: the capacity is 256, and the steps have [1, 17, 63, 65,
    110], [0, 0, 0, 0, 190], [1, 1, 1, 1, 1] and [1, 1, 1, 1, 1] new tokens.
    """
    # Rows of one query come first in a step: with pages of 2 tokens the row that is one shorter is such a row.
    short_lens = np.array(sorted([1, 17, block_size - 1, block_size + 1], key=lambda query_len: query_len != 1))
    num_tokens = -(-(short_lens.sum() + long_len) // (2 * CHECK_TOKENS)) * CHECK_TOKENS
    first_chunk = int(num_tokens - short_lens.sum())
    prefills = [*short_lens, first_chunk], [0, 0, 0, 0, long_len - first_chunk]
    steps = [np.array(query_lens) for query_lens in (*prefills, [1] * 5, [1] * 5)]
    return random_tables(np.sum(steps, axis=0).tolist(), block_size, rng), int(num_tokens), steps


def _unwritten_cache(backend: Backend, shape: KVShape) -> PagedCache:
    """Return a cache of two layers whose pages hold NaN or the largest integer, as if nothing had been written yet.

    Pages of one byte a number have the scales of `check_scales` in all layers and heads.
    """
    layout = backend.layout(shape)
    pages = tuple(jax.device_put(np.full(shape, layout.unwritten)) for shape in layout.shapes)
    scales: KVScales | None = None
    if is_quantized(layout.dtype):
        heads = 2, layout.num_kv_heads
        k_scale, v_scale = (jax.device_put(np.full(heads, scale)) for scale in check_scales(layout.dtype))
        scales = KVScales(k_scale, v_scale)
    return PagedCache(pages, layout, (LayerPlace(0, 0), LayerPlace(0, 1)), backend, scales)
