"""The native norm on a CPU: numbers, every width, the same bits beside any other rows, who uses it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.layers import RMSNorm, WeightMaker
from jpaged.pallas_kernels.layer_ops import XLA_OPS, LayerOps
from jpaged.pallas_kernels.native import llvm
from jpaged.pallas_kernels.native import rms_norm as norm_module
from jpaged.pallas_kernels.native.layer_ops import NATIVE_OPS
from jpaged.pallas_kernels.native.rms_norm import rms_norm

SIZES = (576, 2048, 96, 64, 40, 36, 7, 1)
ROWS = (1, 2, 7, 8, 15, 16, 17, 33, 300)
EPS = 1e-5

run = jax.jit(rms_norm, static_argnums=2)


def rows_of(count: int, size: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(size)
    return jnp.asarray(rng.normal(size=(count, size)), jnp.float32), jnp.asarray(rng.normal(size=size), jnp.float32)


def exact(x: jax.Array, weight: jax.Array, eps: float) -> np.ndarray:
    rows = np.asarray(x, np.float64)
    return rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + eps) * np.asarray(weight, np.float64)


@pytest.mark.parametrize("has_avx512", [None, False, True], ids=["this machine", "eight lanes", "sixteen"])
@pytest.mark.parametrize("size", SIZES)
def test_norms_are_what_they_should_be(size: int, has_avx512: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_avx512 is not None:
        if has_avx512 and not llvm.host_has_avx512():
            pytest.skip("this processor has no vectors of sixteen lanes")
        monkeypatch.setattr(llvm, "host_has_avx512", lambda: has_avx512)
        norm_module._handler.cache_clear()
    for count in ROWS:
        x, weight = rows_of(count, size)
        found = jax.jit(lambda x, weight: rms_norm(x, weight, EPS))(x, weight)
        np.testing.assert_allclose(found, exact(x, weight, EPS), rtol=2e-6, atol=1e-7)
    norm_module._handler.cache_clear()


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
def test_eps_is_under_the_root(eps: float) -> None:
    x, weight = rows_of(3, 64)
    x = x * 1e-3
    np.testing.assert_allclose(run(x, weight, eps), exact(x, weight, eps), rtol=2e-6)
    assert np.array_equal(run(jnp.zeros_like(x), weight, eps), np.zeros(x.shape))


@pytest.mark.parametrize("size", SIZES)
def test_a_row_has_the_same_bits_beside_any_others(size: int) -> None:
    x, weight = rows_of(ROWS[-1], size)
    together = np.asarray(run(x, weight, EPS)).view(np.int32)
    for count in ROWS:
        for first in (0, ROWS[-1] - count):
            found = np.asarray(run(x[first : first + count], weight, EPS)).view(np.int32)
            assert np.array_equal(found, together[first : first + count]), (count, first)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    x, weight = rows_of(20, 64)
    found = np.asarray(run(x.at[2, 5].set(jnp.nan).at[9, 0].set(jnp.inf), weight, EPS))
    assert np.flatnonzero(np.isnan(found).any(axis=1)).tolist() == [2, 9]


def test_what_native_code_would_misread_is_refused() -> None:
    x, weight = rows_of(4, 64)
    for given in ((x.astype(jnp.bfloat16), weight), (x, weight.astype(jnp.bfloat16))):
        with pytest.raises(ValueError, match=r"rms_norm: got rows of .*float32"):
            rms_norm(*given, EPS)
    with pytest.raises(ValueError, match=r"rms_norm: got rows of \(64,\) and a weight of \(63,\)"):
        rms_norm(x, weight[1:], EPS)


@pytest.mark.parametrize(("ops", "is_native"), [(NATIVE_OPS, True), (XLA_OPS, False)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_are_made_by_the_operations_they_are_given(ops: LayerOps, is_native: bool, dtype: str) -> None:
    make = WeightMaker(lambda shape, axes, fill: jnp.full(shape, 0.5, dtype), 1, dtype, ops)
    layer = RMSNorm(64, eps=EPS, make=make)
    x = rows_of(5, 64)[0].astype(ops.stream_dtype(dtype))
    assert ("jpaged_rms_norm" in jax.jit(layer).lower(x).as_text()) == is_native
    found = layer(x)
    assert found.dtype == ops.stream_dtype(dtype)
    wanted = exact(x, jnp.full(64, 0.5), EPS)
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=0.02 if x.dtype != jnp.float32 else 2e-6)
