"""What the check at start expects of a backend, computed by numpy in float32: attention, products and
norms, and the numbers of codes.

Products are those of `numpy.einsum`: the threads of BLAS, behind `@`, would wait in a loop on the cores that compile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float

from ...pallas_kernels.code_formats import CodeFormat, Codes
from ...pallas_kernels.ragged_paged_attention.kv_scales import is_quantized, largest_number

NORM_EPS = 1e-5


class KeptRow:
    """The keys and values of one row, which is a sequence: what a backend keeps in pages is kept here as arrays."""

    def __init__(self, kv_dtype: np.dtype) -> None:
        self._kv_dtype = kv_dtype
        self._kept: list[list[np.ndarray]] = [[], []]  # Of keys and of values, those of each step.

    def attend(
        self,
        q: Float[np.ndarray, "T N H"],
        k: Float[np.ndarray, "T K H"],
        v: Float[np.ndarray, "T K H"],
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: Float[np.ndarray, " N"] | None,
    ) -> Float[np.ndarray, "T N H"]:
        """Keep k and v of the row's next T tokens, let these attend to all tokens so far, and return the outputs.

        k and v are rounded to the dtype of the pages, in one byte by the scales of `check_scales`. Query head n of N
        reads KV head n // (N ÷ K). A token attends to itself and those before it, with a `window` to that many in all.
        A score s becomes `soft_cap` × tanh(s ÷ `soft_cap`) if there is a cap. `sinks` are logits that add their
        exponential to the denominator of each head's softmax; None for none.
        """
        for kept, new, page_scale in zip(self._kept, (k, v), check_scales(self._kv_dtype), strict=True):
            kept.append(_stored(new.astype(np.float32), self._kv_dtype, page_scale))
        keys, values = map(np.concatenate, self._kept)
        num_new, num_heads, _ = q.shape
        # How many tokens a key lies behind a query; negative for keys of later tokens.
        distances = np.arange(len(keys) - num_new, len(keys))[:, None] - np.arange(len(keys))[None]
        is_visible = (distances >= 0) & (distances < (window or len(keys)))
        out = np.empty(q.shape, np.float32)
        for head in range(num_heads):
            kv_head = head // (num_heads // keys.shape[1])
            scores = product(q[:, head].astype(np.float32), keys[:, kv_head].T) * np.float32(scale)
            if soft_cap is not None:
                scores = np.float32(soft_cap) * np.tanh(scores / np.float32(soft_cap))
            scores = np.where(is_visible, scores, -np.inf)
            sink = np.float32(-np.inf) if sinks is None else sinks[head]
            largest = np.maximum(scores.max(axis=-1, keepdims=True), sink)
            weights = np.exp(scores - largest)
            total = weights.sum(axis=-1, keepdims=True) + np.exp(sink - largest)
            out[:, head] = product(weights, values[:, kv_head]) / total
        return out


def check_scales(kv_dtype: np.dtype) -> tuple[np.float32, np.float32]:
    """Return the scales of keys and of values in the check's pages: they reach ±6 and ±8 in one byte, else are 1."""
    if not is_quantized(kv_dtype):
        return np.float32(1), np.float32(1)
    most = np.float32(largest_number(kv_dtype))
    return np.float32(6) / most, np.float32(8) / most


def _stored(x: Float[np.ndarray, "T K H"], kv_dtype: np.dtype, scale: np.float32) -> Float[np.ndarray, "T K H"]:
    """Return float32 numbers as pages of this dtype give them back."""
    if not is_quantized(kv_dtype):
        return x.astype(kv_dtype).astype(np.float32)
    most = np.float32(largest_number(kv_dtype))
    in_range = np.clip(x / scale, -most, most)
    whole = np.rint(in_range) if np.issubdtype(kv_dtype, np.integer) else in_range
    return whole.astype(kv_dtype).astype(np.float32) * scale


def product(x: Float[np.ndarray, "R K"], weight: Float[np.ndarray, "K N"]) -> Float[np.ndarray, "R N"]:
    """Return x · W for float32 inputs."""
    return np.einsum("rk,kn->rn", x, weight)


def rms_norm(x: Float[np.ndarray, "R D"], weight: Float[np.ndarray, " D"]) -> Float[np.ndarray, "R D"]:
    """Return x ÷ √(mean(x²) + NORM_EPS) × weight for each row, for float32 inputs."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(NORM_EPS)) * weight


def layer_norm(x: Float[np.ndarray, "R D"], weight: Float[np.ndarray, " D"]) -> Float[np.ndarray, "R D"]:
    """Return the layer norm of each row with `weight`, which is also its bias, for float32 inputs."""
    return rms_norm(x - np.mean(x, axis=-1, keepdims=True), weight) + weight


def random_codes(code_format: CodeFormat, num_rows: int, num_columns: int, rng: np.random.Generator) -> Codes:
    """Return random codes of a matrix Wᵀ [rows, columns], whose numbers have the size of 1."""
    num_groups, num_kinds = num_columns // code_format.group, code_format.num_scales
    values = code_format.code_values
    shape = num_rows, num_columns // code_format.values_per_code
    codes = rng.integers(0, len(values), shape, dtype=np.uint8 if code_format.bits <= 8 else np.uint16)
    if code_format.mantissa_bits is not None:
        codes[np.isnan(values)[codes]] = 0
    signs = rng.integers(0, 2, (num_rows, num_columns), dtype=np.uint8) if code_format.has_signs else None
    largest = 1 / float(np.nanmax(values))

    def floats(num_groups: int, size: float, dtype: np.dtype[Any]) -> list[np.ndarray]:
        return [(size * rng.random((num_rows, num_groups))).astype(dtype) for _ in range(num_kinds)]

    if code_format.super_group is not None:
        end = 64 if code_format.scale_bits == 8 else 16
        scales = [
            rng.integers(1, end, (num_rows, num_groups)).astype(code_format.scale_dtype) for _ in range(num_kinds)
        ]
        largest_scale = code_format.first_scale + end * code_format.scale_step
        super_scales = floats(num_columns // code_format.super_group, largest / largest_scale, np.dtype(np.float16))
        return Codes(codes, scales, super_scales, signs=signs)
    if code_format.scale == "power":
        return Codes(codes, [rng.integers(122, 126, (num_rows, num_groups), dtype=np.uint8)], [])
    zeros = None
    if code_format.has_zeros:
        zeros = rng.integers(0, 1 << code_format.bits, (num_rows, num_groups), dtype=np.uint8)
    return Codes(codes, floats(num_groups, largest, code_format.scale_dtype), [], zeros)
