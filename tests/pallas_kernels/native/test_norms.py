"""Native norms on a CPU: numbers, every width, the same bits beside any other rows, who uses them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.layers import LayerNorm, RMSNorm, RMSNormFloat32, RMSNormPlusOne, WeightMaker
from jpaged.pallas_kernels.layer_ops import XLA_OPS, LayerOps
from jpaged.pallas_kernels.native import llvm, norms, processor
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.pallas_kernels.native.norms import layer_norm, rms_norm

SIZES = (576, *(pytest.param(size, marks=pytest.mark.slow) for size in (2048, 96, 64, 7)), 40, 36, 1)
ROWS = (1, 15, 16, 17, 300)
EPS = 1e-5


def rms(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return rms_norm(x, weight, eps)


def layer(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Norm rows that lie 3 off zero; the bias is the weight once more."""
    return layer_norm(x + 3, weight, weight, eps)


NORMS = [rms, layer]


def rows_of(count: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Return random rows [count, size] and a gain [size]."""
    rng = np.random.default_rng(size)
    # Converted by numpy: JAX would compile a program for each shape.
    rows = rng.normal(size=(count, size)).astype(np.float32)
    gain = rng.normal(size=size).astype(np.float32)
    return jnp.asarray(rows, jnp.float32), jnp.asarray(gain, jnp.float32)


def exact(x: jax.Array, weight: jax.Array, eps: float, norm: Callable[..., jax.Array] = rms) -> np.ndarray:
    rows, gain = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    if norm is layer:
        rows = rows - rows.mean(axis=1, keepdims=True)
    normed = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + eps) * gain
    return normed + gain if norm is layer else normed


@pytest.mark.parametrize("has_avx512", [False, True], ids=["eight lanes", "sixteen"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("norm", NORMS)
def test_norms_are_what_they_should_be(
    norm: Callable[..., jax.Array], size: int, has_avx512: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_avx512 and not processor.host_has_avx512():
        pytest.skip("this processor has no vectors of sixteen lanes")
    monkeypatch.setattr(llvm, "host_has_avx512", lambda: has_avx512)
    norms._handler.cache_clear()
    for count in ROWS:
        x, weight = rows_of(count, size)
        found = jax.jit(lambda x, weight: norm(x, weight, EPS))(x, weight)
        # Taking the mean off rows of 3 rounds in the last bits of 3.
        np.testing.assert_allclose(found, exact(x, weight, EPS, norm), rtol=2e-6, atol=1e-7 if norm is rms else 5e-6)
    norms._handler.cache_clear()


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
def test_eps_is_under_the_root(eps: float) -> None:
    x, weight = rows_of(3, 64)
    x = x * 1e-3
    np.testing.assert_allclose(rms_norm(x, weight, eps), exact(x, weight, eps), rtol=2e-6)
    assert np.array_equal(rms_norm(jnp.zeros_like(x), weight, eps), np.zeros(x.shape))
    found = layer_norm(x, weight, weight, eps)
    np.testing.assert_allclose(found, exact(x, weight, eps, layer), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("norm", NORMS)
def test_a_row_has_the_same_bits_beside_any_others(norm: Callable[..., jax.Array], size: int) -> None:
    run = jax.jit(norm, static_argnums=2)
    x, weight = rows_of(ROWS[-1], size)
    together = np.asarray(run(x, weight, EPS)).view(np.int32)
    for count in ROWS:
        for first in (0, ROWS[-1] - count):
            found = np.asarray(run(x[first : first + count], weight, EPS)).view(np.int32)
            assert np.array_equal(found, together[first : first + count]), (count, first)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    x, weight = rows_of(20, 64)
    for norm in NORMS:
        found = np.asarray(norm(x.at[2, 5].set(jnp.nan).at[9, 0].set(jnp.inf), weight, EPS))
        assert np.flatnonzero(np.isnan(found).any(axis=1)).tolist() == [2, 9]


def test_what_native_code_would_misread_is_refused() -> None:
    x, weight = rows_of(4, 64)
    for given in ((x.astype(jnp.bfloat16), weight), (x, weight.astype(jnp.bfloat16))):
        with pytest.raises(ValueError, match=r"rms_norm: got rows of .*float32"):
            rms_norm(*given, EPS)
    with pytest.raises(ValueError, match=r"rms_norm: got rows of \(64,\) and a weight of \(63,\)"):
        rms_norm(x, weight[1:], EPS)
    with pytest.raises(ValueError, match=r"layer_norm: got rows of \(64,\) and a weight of \(63,\)"):
        layer_norm(x, weight, weight[1:], EPS)


LAYERS = {
    RMSNorm: lambda x, gain: exact(x, gain, EPS),
    RMSNormFloat32: lambda x, gain: exact(x, gain, EPS),
    RMSNormPlusOne: lambda x, gain: exact(x, 1 + gain, EPS),
    LayerNorm: lambda x, gain: exact(x, gain, EPS, layer),
}


@pytest.mark.parametrize(("ops", "is_native"), [(NATIVE_OPS, True), (XLA_OPS, False)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", LAYERS)
def test_norms_are_made_by_the_operations_they_are_given(kind: Any, ops: LayerOps, is_native: bool, dtype: str) -> None:
    """Rows by head, [T, H, D], are normed like others."""
    make = WeightMaker(lambda shape, axes, fill: jnp.full(shape, 0.5, dtype), 1, dtype, ops)
    norm = kind(64, eps=EPS, make=make)
    x = rows_of(6, 64)[0].astype(ops.stream_dtype(dtype))
    assert ("_norm_64" in jax.jit(norm).lower(x).as_text()) == is_native
    found = norm(x)
    assert found.dtype == ops.stream_dtype(dtype)
    wanted = LAYERS[kind](x, jnp.full(64, 0.5))
    rounding = {"rtol": 0.02, "atol": 0.01} if x.dtype != jnp.float32 else {"rtol": 2e-6, "atol": 1e-6}
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, **rounding)
    assert np.array_equal(norm(x.reshape(3, 2, 64)).reshape(6, 64), found)
