"""The oracle of the tests: dense attention straight from its definition, in numpy and float64, without pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def dense_attention(
    q: np.ndarray,
    keys: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    query_lens: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Attend the last `query_lens[r]` positions of each row to that row's keys and values, causally.

    q is [T, N, H], rows one after the other; keys[r] and values[r] are [S, K, H], S the row's whole context.
    Return [T, N, H] in float64; rows without queries have no tokens in it.
    """
    out = np.zeros(q.shape, np.float64)
    start = 0
    for k_SKH, v_SKH, query_len in zip(keys, values, query_lens, strict=True):
        q_TNH = q[start : start + query_len].astype(np.float64)
        group = q.shape[1] // k_SKH.shape[1]
        k_SNH = np.repeat(k_SKH.astype(np.float64), group, axis=1)
        v_SNH = np.repeat(v_SKH.astype(np.float64), group, axis=1)
        scores_NTS = np.einsum("tnh,snh->nts", q_TNH, k_SNH) * scale
        if soft_cap is not None:
            scores_NTS = soft_cap * np.tanh(scores_NTS / soft_cap)
        positions_T1 = np.arange(len(k_SKH) - query_len, len(k_SKH))[:, None]
        keys_1S = np.arange(len(k_SKH))[None, :]
        seen_TS = keys_1S <= positions_T1
        if window is not None:
            seen_TS &= keys_1S > positions_T1 - window
        scores_NTS = np.where(seen_TS[None], scores_NTS, -np.inf)
        if sinks is not None:
            sink_NT1 = np.broadcast_to(sinks.astype(np.float64)[:, None, None], (q.shape[1], query_len, 1))
            scores_NTS = np.concatenate([scores_NTS, sink_NT1], axis=2)
        scores_NTS -= scores_NTS.max(axis=2, keepdims=True, initial=-np.inf)
        weights_NTS = np.exp(scores_NTS)
        weights_NTS /= weights_NTS.sum(axis=2, keepdims=True)
        out[start : start + query_len] = np.einsum("nts,snh->tnh", weights_NTS[:, :, : len(k_SKH)], v_SNH)
        start += query_len
    return out
