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
