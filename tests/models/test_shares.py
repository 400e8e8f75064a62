"""How heads are shared out over devices: padded, or on several devices, and every one of the model's exactly where."""

from dataclasses import replace
from pathlib import Path

import pytest

from jpaged.models.config.experts import ExpertsConfig
from jpaged.models.config.shares import Shares
from jpaged.models.opening.open_checkpoint import read_config
from jpaged.pallas_kernels.layer_ops import XLA_OPS
from jpaged.pallas_kernels.tpu_ops import TPU_OPS

GOLDEN = Path(__file__).parents[1] / "golden" / "families"

STORED = {
    # (query heads, KV heads), devices → (stored query heads, stored KV heads, devices of each KV head)
    ((9, 3), 1): (9, 3, 1),
    ((9, 3), 2): (12, 4, 1),
    ((9, 3), 4): (12, 4, 1),
    ((9, 3), 8): (16, 8, 2),
    ((32, 8), 8): (32, 8, 1),
    ((32, 8), 16): (32, 16, 2),
    ((8, 1), 4): (8, 4, 4),
    ((71, 71), 2): (72, 72, 1),
    ((6, 2), 8): (8, 8, 4),
}


@pytest.mark.parametrize(("case", "wanted"), STORED.items())
def test_heads_are_padded_until_they_divide_or_are_divided(case, wanted):
    (num_heads, num_kv_heads), num_shards = case
    shares = Shares(num_shards, num_heads, num_kv_heads, 100, 97)
    assert (shares.stored_heads, shares.stored_kv_heads, shares.kv_copies) == wanted
    assert shares.stored_heads % num_shards == shares.stored_kv_heads % num_shards == 0


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (32, 8), (8, 1), (14, 2), (71, 71), (40, 10)])
def test_each_query_head_is_stored_once_beside_its_kv_head(num_heads, num_kv_heads, num_shards):
    shares = Shares(num_shards, num_heads, num_kv_heads, 100, 97)
    group = num_heads // num_kv_heads
    query_of = {s + i: t + i for s, t, count in shares.query_runs(1) for i in range(count)}
    kv_of = {s + i: t + i for s, t, count in shares.kv_runs(1) for i in range(count)}
    assert sorted(query_of.values()) == list(range(num_heads))
    assert sorted(set(kv_of.values())) == list(range(num_kv_heads))
    for stored, head in query_of.items():
        assert kv_of[stored // shares.group_size] == head // group
    assert max(query_of) < shares.stored_heads
    assert max(kv_of) < shares.stored_kv_heads


def test_one_device_stores_what_the_model_has_in_one_run():
    shares = Shares(1, 32, 8, 100, 97)
    assert shares.query_runs(64) == ((0, 0, 2048),)
    assert shares.kv_runs(64) == ((0, 0, 512),)
    assert (shares.stored_inner, shares.stored_vocab) == (100, 97)


def test_what_is_padded_is_said():
    assert str(Shares(8, 32, 8, 4096, 128)) == "8 devices"
    assert str(Shares(4, 9, 3, 100, 97)) == (
        "4 devices, which store 12 query heads for 9, 4 KV heads for 3, 100 vocabulary rows for 97"
    )


def test_a_chips_step_is_estimated_by_its_own_columns_and_heads():
    """The stream is whole on each of 8 chips; what is computed of MLP and heads shrinks with their number."""
    config = read_config(GOLDEN / "llama")
    alone, on_chip = config.spec_on_chip(1), config.spec_on_chip(8)
    assert alone.activation_width == config.spec.activation_width
    assert on_chip.activation_width - 6 * config.hidden_size == (
        3 * config.shares(8).stored_inner // 8 + 2 * on_chip.layers[0].num_heads * config.head_size
    )


def test_a_step_of_experts_is_estimated_by_what_a_tokens_own_experts_hold():
    """Cut along their width each device holds a share of every one; whole ones may all be those of a token."""
    dense = read_config(GOLDEN / "llama")
    shape = {"num_experts": 8, "num_chosen": 2, "width": 50, "shared_width": 30}
    experts = ExpertsConfig(**shape, sparse_layers=(True,) * dense.num_layers)
    config, hidden = replace(dense, experts=experts), dense.hidden_size

    def layer_width(config, num_devices, itemsize=2, ops=XLA_OPS):
        width = config.spec_on_chip(num_devices, ops, itemsize).activation_width
        return width - 4 * hidden - (0 if num_devices == 1 else 2 * hidden)

    # Rows, results of gate and up in float32, and those of the activation.
    assert layer_width(config, 1) == 2 * (hidden + (2 * 2 + 1) * 50)
    assert layer_width(config, 1, itemsize=4) == 2 * (2 * hidden + 2 * 50), "rows twice"
    shared = replace(config, experts=replace(experts, shared_width=999))
    assert layer_width(shared, 1) == 3 * 999, "the MLP that all tokens take is computed after the experts"
    wide = replace(config, experts=replace(experts, width=200))
    assert layer_width(wide, 1, itemsize=4) == 2 * (hidden + (2 + 1) * 200)
    assert layer_width(wide, 1, ops=TPU_OPS) == 2 * (hidden + (2 * 2 + 2 + 1) * 200), "results in both dtypes"
    biased = replace(wide, experts=replace(wide.experts, expert_bias=True))
    assert layer_width(biased, 1, ops=TPU_OPS) == 2 * (hidden + (2 * 4 + 2 + 1) * 200), "a bias for each row"
    assert layer_width(biased, 1) == layer_width(wide, 1)
    assert layer_width(config, 8) == 2 * (2 * hidden + 2 * 7)
    assert layer_width(config, 8, ops=TPU_OPS) == 2 * (2 * 2 * hidden + 7), "two arrays of float32 results"
    assert layer_width(replace(config, spreads_experts=True), 8) == 2 * (hidden + 5 * 50)
    few = replace(experts, num_chosen=1, width=1, shared_width=0, sparse_layers=(False,) + (True,) * 9)
    heads = 2 * dense.num_heads * dense.head_size
    assert layer_width(replace(config, experts=few, intermediate_size=999), 1) == heads + 3 * 999
    few = replace(few, sparse_layers=(True,) * 9)
    assert layer_width(replace(config, experts=few), 1) == max(heads, 2 * hidden + 2)
