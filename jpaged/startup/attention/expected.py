"""What the check at start expects of a backend, computed by numpy in float32: attention, products and
norms, and the numbers of codes.

Products are those of `numpy.einsum`: the threads of BLAS, behind `@`, would wait in a loop on the cores that compile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float

from ...pallas_kernels.code_formats import CodeFormat, Codes

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
    ) -> Float[np.ndarray, "T N H"]:
        """Keep k and v of the row's next T tokens, let these attend to all tokens so far, and return the outputs.

        k and v are rounded to the dtype of the pages. Query head n of N reads KV head n // (N ÷ K). A token attends to
        itself and those before it, with a `window` to that many in all. A score s becomes `soft_cap` × tanh(s ÷
        `soft_cap`) if there is a cap.
        """
        for kept, new in zip(self._kept, (k, v), strict=True):
            kept.append(new.astype(self._kv_dtype).astype(np.float32))
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
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[:, head] = product(weights, values[:, kv_head]) / weights.sum(axis=-1, keepdims=True)
        return out


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
    codes = rng.integers(0, 1 << code_format.bits, (num_rows, num_columns), dtype=np.uint8)
    codes[np.isnan(values)[codes]] = 0
    largest = 1 / float(np.nanmax(values))

    def floats(num_groups: int, size: float, dtype: np.dtype[Any]) -> list[np.ndarray]:
        return [(size * rng.random((num_rows, num_groups))).astype(dtype) for _ in range(num_kinds)]

    if code_format.super_group is not None:
        scales = [rng.integers(1, 64, (num_rows, num_groups)).astype(code_format.scale_dtype) for _ in range(num_kinds)]
        super_scales = floats(num_columns // code_format.super_group, largest / 64, np.dtype(np.float16))
        return Codes(codes, scales, super_scales)
    if code_format.scale == "power":
        return Codes(codes, [rng.integers(122, 126, (num_rows, num_groups), dtype=np.uint8)], [])
    zeros = None
    if code_format.has_zeros:
        zeros = rng.integers(0, 1 << code_format.bits, (num_rows, num_groups), dtype=np.uint8)
    return Codes(codes, floats(num_groups, largest, code_format.scale_dtype), [], zeros)
