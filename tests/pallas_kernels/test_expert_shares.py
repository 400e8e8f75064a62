"""Experts over the devices of a mesh give what they give on one, by one all-reduce: virtual devices of a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .. import quick_compile

ROOT = Path(__file__).parents[2]

SUMS = """
import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.pallas_kernels.expert_shares import add_experts_over_devices
from jpaged.pallas_kernels.grouped import Routing
from jpaged.pallas_kernels.layer_ops import XLA_OPS, ExpertProducts, Product, RowNorm, SharedProducts
from jpaged.pallas_kernels.scaled_matrix import ScaledMatrix
from jpaged.sharding import TENSOR_AXIS, device_mesh

D, F, E, T, S = 32, 16, 6, 9, 24
rng = np.random.default_rng(0)
draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)
# The seventh row chooses the second expert alone, and the last two are padding: they go to none.
chosen = np.array([rng.choice(E, 2, replace=False) for _ in range(T)], np.int32)
chosen[6], chosen[7:] = (1, E), E
weights, rows, shared_weights = abs(draw(T, 2)), draw(T, D), abs(draw(T, 1))
gate, up, down = draw(E, D, F), draw(E, D, F), draw(E, F, D)
gate_bias, up_bias, down_bias = draw(E, F), draw(E, F), draw(E, D)
shared_gate, shared_up, shared_down, shared_bias = draw(D, S), draw(D, S), draw(S, D), draw(D)
norm = RowNorm(1 + draw(D), 1e-6)


def blocks(first, second, num_devices):
    '''Return two parts side by side, the share of each device after the other.'''
    cut = [jnp.split(part, num_devices, axis=-1) for part in (first, second)]
    return jnp.concatenate([share for shares in zip(*cut) for share in shares], axis=-1)


def padded(array, num_experts):
    '''Return arrays of experts with further ones, which hold NaN.'''
    return jnp.concatenate([array, jnp.full((num_experts - E, *array.shape[1:]), np.nan)])


def coded(matrices, group):
    '''Return the matrices of experts as codes and scales, of groups of inputs or of all of them.'''
    num_experts, num_in, num_out = matrices.shape
    in_groups = matrices.reshape(num_experts, -1, group or num_in, num_out)
    codes = jnp.clip(jnp.nan_to_num(in_groups) * 40, -127, 127).astype(jnp.int8)
    # Of each group, output and expert its own, NaN for experts that pad.
    scales = jnp.abs(in_groups[:, :, 0]) / 40
    if group is None:
        codes, scales = codes[:, 0], scales[:, 0]
    return ScaledMatrix(codes, scales, False, "float32")


def sums(num_devices, by_expert, group=0):
    num_experts = -(-E // num_devices) * num_devices if by_expert else E
    num_shards = 1 if by_expert else num_devices
    stored = lambda matrix, group: matrix if group == 0 else coded(matrix, group)
    if group == 0:
        first = padded(blocks(gate, up, num_shards), num_experts)
    else:
        whole = coded(padded(np.concatenate([gate, up], axis=-1), num_experts), group)
        cut = lambda array: blocks(*jnp.split(array, 2, axis=-1), num_shards)
        first = replace(whole, codes=cut(whole.codes), scales=cut(whole.scales))
    products = ExpertProducts(
        gate_up=Product(
            weight=first, num_out=2 * F, parts=(F, F), num_shards=num_shards, activation="silu",
            bias=padded(blocks(gate_bias, up_bias, num_shards), num_experts), is_gated=True,
        ),
        down=Product(
            weight=stored(padded(down, num_experts), group), bias=padded(down_bias, num_experts), num_out=D,
            norm_behind=norm, scale=0.5,
        ),
        num_experts=num_experts,
        mesh=device_mesh(jax.devices()[:num_devices]) if num_devices > 1 else None,
        mesh_axis=TENSOR_AXIS,
        is_spread_by_expert=by_expert,
    )
    first = Product(
        weight=blocks(shared_gate, shared_up, num_devices), num_out=2 * S, parts=(S, S), num_shards=num_devices,
        activation="silu", is_gated=True,
    )
    shared = SharedProducts(
        first=first, down=Product(weight=shared_down, num_out=D, bias=shared_bias), weights=shared_weights,
    )
    routing = Routing(jnp.asarray(np.where(chosen == E, num_experts, chosen)), weights)
    products = replace(products, shared=shared)
    add = partial(add_experts_over_devices, XLA_OPS) if num_devices > 1 else XLA_OPS.add_experts
    run = lambda: add(rows, routing, products, rows)
    compiled = jax.jit(run).lower().compile()
    kinds = "all-reduce(", "all-gather(", "reduce-scatter(", "all-to-all(", "collective-permute("
    return np.asarray(compiled()), [compiled.as_text().count(kind) for kind in kinds]


for group in (0, None, 2):
    wanted, _ = sums(1, False, group)
    assert np.isfinite(wanted).all()
    for by_expert in (False, True):
        found, collectives = sums(4, by_expert, group)
        error = float(np.abs(found - wanted).max())
        print(json.dumps([group, by_expert, error, collectives]))
"""
"""Prints, for floats, codes and codes in groups, by how much sums over devices differ, and how many collectives they
have. Experts that pad the others, two on each of 4 devices, hold NaN."""


@pytest.fixture(scope="module")
def sums():
    environment = quick_compile.environment("--xla_force_host_platform_device_count=4") | {"NPROC": "16"}
    result = subprocess.run(
        [sys.executable, "-c", SUMS], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_experts_and_a_shared_mlp_give_over_devices_what_they_give_on_one(sums):
    """Whole experts, or a share of each, with biases of all kinds; sums differ by rounding alone."""
    assert len(sums) == 6
    for *case, error, _ in sums:
        assert error < 1e-4, case


def test_all_of_it_is_added_up_by_one_all_reduce(sums):
    for *case, _, collectives in sums:
        assert collectives == [1, 0, 0, 0, 0], case
