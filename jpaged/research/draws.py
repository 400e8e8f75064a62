"""Draws tokens from a trainer's own logits, as an engine draws them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from ..checks import Rule, check, integer, refusal, shown
from ..sampling.sample_columns import MAX_INT32
from ..sampling.sampler import sample as sample_logits
from ..sampling.sampling_params import SampleMode, SamplingParams
from ..sampling.sampling_rows import SamplingRows
from ..step.jax_settings import trace_settings

UINT32 = 0xFFFFFFFF


def draw(logits: Float[Array, "*R V"], seed: Any, sample: Any, index: Any, params: SamplingParams) -> Int[Array, "*R"]:
    """Return the tokens that an engine draws from these logits: int32 [R] for R rows, a scalar for logits [V].

    A token depends on the row's logits and on three numbers: the `seed` of its request, the index of its `sample` in
    the request, from 0, and the `index` of the token in the sample's output, from 0. Each is an integer or an array
    [R]. Seeds have 64 bits as integers of Python or numpy, and 32 as arrays of JAX. Of `params` the temperature,
    `top_k`, `top_p` and `min_p` count, and not the `seed`. All but `params` may be traced, in a jitted function.

    Raise InvalidRequestError for parameters that change logits by the tokens before, such as penalties, for logits of
    another shape, and for numbers that are no integers, or not one for all rows or one for each.
    """
    if not isinstance(params, SamplingParams):
        raise refusal("params", type(params).__name__, "SamplingParams")
    if params.has_rules:
        allowed = "temperature, top_k, top_p and min_p alone"
        raise refusal("params", "logit rules", allowed, "change the logits by them before")
    if getattr(logits, "ndim", 0) not in (1, 2) or not logits.size:
        raise refusal("logits", shown(getattr(logits, "shape", logits)), "an array [V] or [R, V]")
    with trace_settings():
        rows = _unsharded(jnp.asarray(logits, jnp.float32))
        rows = rows[None] if rows.ndim == 1 else rows
        num_rows = rows.shape[0]
        seed_low, seed_high = _halves(_each("seed", seed, num_rows, integer(-(1 << 63), (1 << 64) - 1)))
        columns = {
            "seed_low": seed_low,
            "seed_high": seed_high,
            "sample_index": _int32(_each("sample", sample, num_rows, integer(0, MAX_INT32))),
            "output_index": _int32(_each("index", index, num_rows, integer(0, MAX_INT32))),
            "top_k": jnp.int32(min(params.top_k, MAX_INT32)),
            **{name: jnp.float32(getattr(params, name)) for name in ("temperature", "top_p", "min_p")},
            **dict.fromkeys(("ruled_slot", "score"), jnp.int32(0)),
        }
        parameters = SamplingRows(**{name: jnp.broadcast_to(value, (num_rows,)) for name, value in columns.items()})
        tokens = _draw(rows, parameters, SampleMode.GREEDY if params.is_greedy else SampleMode.RANDOM)
    return tokens[0] if logits.ndim == 1 else tokens


def _unsharded(array: jax.Array) -> jax.Array:
    """Return an array whose explicit axes of a mesh, if its type names any, are gathered: drawing sorts by blocks of
    the vocabulary, and JAX does not split such work by itself."""
    sharding = jax.typeof(array).sharding
    return jax.sharding.reshard(array, sharding.update(spec=PartitionSpec())) if sharding.mesh.explicit_axes else array


def _each(name: str, value: Any, num_rows: int, rule: Rule) -> Any:
    """Return one integer or `num_rows` of them, as an array of JAX if they are one, which may be traced.

    Raise InvalidRequestError for another shape or type; the values of JAX's arrays are not checked.
    """
    array = value if isinstance(value, jax.Array) else np.asarray(value, object)
    if array.shape not in ((), (num_rows,)):
        raise refusal(name, f"the shape {list(array.shape)}", f"an integer, or an array [{num_rows}], one for each row")
    if not isinstance(array, jax.Array):
        return np.array([check(name, one, rule) for one in array.reshape(-1)], object)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise refusal(name, f"an array of {array.dtype}", "int32 or uint32, or integers of Python or numpy")
    return array


def _int32(values: Any) -> Int[Array, "*R"]:
    return values.astype(jnp.int32) if isinstance(values, jax.Array) else jnp.asarray(values.astype(np.int32))


def _halves(seeds: Any) -> tuple[Int[Array, "*R"], Int[Array, "*R"]]:
    """Return the low and the high 32 bits of seeds, as int32: an array of JAX, or one of numpy of Python's integers."""
    if isinstance(seeds, jax.Array):
        if seeds.dtype == jnp.uint32:
            return jax.lax.bitcast_convert_type(seeds, jnp.int32), jnp.zeros(seeds.shape, jnp.int32)
        if seeds.dtype != jnp.int32:
            raise refusal("seed", f"an array of {seeds.dtype}", "int32 or uint32, or integers of Python or numpy")
        return seeds, jnp.where(seeds < 0, jnp.int32(-1), jnp.int32(0))  # A negative one has only ones above.
    seeds = np.asarray([one % (1 << 64) for one in seeds], np.uint64)
    low, high = ((seeds >> np.uint64(shift) & np.uint64(UINT32)).astype(np.uint32).view(np.int32) for shift in (0, 32))
    return jnp.asarray(low), jnp.asarray(high)


@partial(jax.jit, static_argnums=2)
def _draw(logits_RV: Float[Array, "R V"], rows: SamplingRows, mode: SampleMode) -> Int[Array, " R"]:
    """Return a token for each row. Equal shapes share a program, whatever the parameters are."""
    return sample_logits(logits_RV, rows, mode).token_ids
