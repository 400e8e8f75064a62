"""The memory plans of public models on chips that are not there."""

import pytest


@pytest.fixture
def memory_plans(script):
    return script("memory_plans")


def test_a_plan_takes_as_many_pages_as_fit_into_the_memory(memory_plans):
    plan = memory_plans.plan(dict(memory_plans.read_configs())["meta-llama/Llama-3.1-8B"], "H100")
    room = 0.92 * 80e9 - plan["weights_bytes"] - plan["step_bytes"]
    assert 0 <= room - (plan["num_pages"] + 1) * plan["page_bytes"] < plan["page_bytes"]  # And the null page.
    assert plan["token_bytes"] == 2 * 2 * 32 * 8 * 128
    assert plan["num_seqs_of_8k"] == plan["num_pages"] * plan["page_tokens"] // 8192
    assert plan["max_model_len"] == 131072


def test_a_model_that_does_not_fit_is_refused_in_one_line_with_the_missing_bytes(memory_plans):
    plan = memory_plans.plan(dict(memory_plans.read_configs())["meta-llama/Llama-3.3-70B-Instruct"], "H200")
    assert "bytes are missing" in plan["refused"]
    assert "\n" not in plan["refused"]
    assert "| — |" in memory_plans.markdown_row("70B", {"H200": plan})


def test_a_chip_whose_kernels_lack_the_head_size_has_the_pages_of_plain_xla(memory_plans):
    gpt2 = dict(memory_plans.read_configs())["openai-community/gpt2"]
    assert memory_plans.plan(gpt2, "v5e")["page_tokens"] == 128
    assert memory_plans.plan({**gpt2, "n_embd": 576}, "v5e")["page_tokens"] == 64


SPARSE = ("mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b")
SPARSE_AND_LARGE = ("Qwen/Qwen3-235B-A22B", "openai/gpt-oss-120b")


@pytest.mark.parametrize("name", [*SPARSE, *(pytest.param(name, marks=pytest.mark.slow) for name in SPARSE_AND_LARGE)])
def test_the_weights_of_experts_are_those_of_a_formula(memory_plans, name):
    """All experts in bfloat16, routers in float32; biases and norms are left out of the formula."""
    config = dict(memory_plans.read_configs())[name]
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_size = config.get("head_dim") or hidden // heads
    num_experts = config.get("num_experts") or config["num_local_experts"]
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    of_attention = 2 * hidden * head_size * (heads + config["num_key_value_heads"])
    of_layer = 2 * (of_attention + 3 * num_experts * hidden * inner) + 4 * num_experts * hidden
    formula = config["num_hidden_layers"] * of_layer + 2 * 2 * config["vocab_size"] * hidden
    assert memory_plans.plan(config, "H200")["weights_bytes"] == pytest.approx(formula, rel=0.05)
