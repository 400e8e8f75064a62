"""Every engine option at its limits, and every option that is not one."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import (
    INT64,
    LIMITS,
    MAX_BLOCK_SIZE,
    MAX_DECODE_STEPS,
    MAX_STEP_SEQS,
    MAX_STEP_TOKENS,
    MAX_SWAP_SPACE,
    NOT_BUILT,
    OPTIONS,
    EngineConfig,
    check_option,
)
from jpaged.errors import ConfigError
from jpaged.logits_processor import LogitsProcessor
from jpaged.sampling_params import shown

LARGEST = INT64[1]
HUGE = 10**5000
NOT_INTEGERS = ["5", 5.0, True, [5], float("nan"), HUGE, -HUGE, np.float32(5)]
NOT_NUMBERS = ["0.5", None, True, float("nan"), float("inf"), HUGE, 1j]
NOT_TEXT = [5, True, "", ["a"], b"a"]


def shortest_first(request):
    return len(request.prompt_token_ids)


SCALE = LogitsProcessor("scale", ("factor",), lambda logits, factor: logits * factor)

RANGES = {
    "seed": ([0, INT64[0], LARGEST, np.int64(3)], [INT64[0] - 1, LARGEST + 1, None, *NOT_INTEGERS]),
    "max_logprobs": ([-1, 0, 20, 1000], [-2, 1001, None, *NOT_INTEGERS]),
    "logprobs_mode": (["raw_logprobs", "processed_logprobs"], ["raw_logits", "", None, True]),
    "logits_processors": ([(), (SCALE,)], [None, SCALE, (5,), "scale", (SCALE, SCALE)]),
    "max_model_len": ([None, 1, LARGEST], [0, -1, LARGEST + 1, *NOT_INTEGERS]),
    "block_size": ([None, 1, 2, 16, 512, MAX_BLOCK_SIZE], [0, -16, 3, 48, MAX_BLOCK_SIZE + 1, 2048, *NOT_INTEGERS]),
    "num_blocks": ([None, 2, LARGEST], [1, 0, -5, LARGEST + 1, *NOT_INTEGERS]),
    "num_host_blocks": ([None, 0, 2, LARGEST], [1, -1, LARGEST + 1, *NOT_INTEGERS]),
    "swap_space": (
        [None, 0, 0.0, 0.5, 4, MAX_SWAP_SPACE, np.float32(2)],
        [-1, -1e-9, MAX_SWAP_SPACE + 1, *(value for value in NOT_NUMBERS if value is not None)],
    ),
    "preemption_mode": (["auto", "recompute", "swap"], ["Swap", "none", "", None, True]),
    "max_cached_blocks": ([None, 0, 1, LARGEST], [-1, LARGEST + 1, *NOT_INTEGERS]),
    "enable_chunked_prefill": ([True, False], [0, 1, None, "true", np.bool_(True)]),
    "long_prefill_token_threshold": ([0, 1, LARGEST], [-1, LARGEST + 1, None, *NOT_INTEGERS]),
    "scheduling_policy": (["fcfs", "priority", shortest_first], ["lifo", "FCFS", "", None, 5, ["fcfs"]]),
    "scheduling_delay_factor": ([0, 0.0, 0.5, 1e308, np.float16(2)], [-1e-9, -1, *NOT_NUMBERS]),
    "limits": (
        [{"waiting_requests": 1, "waiting_tokens": LARGEST}, {"waiting_requests": None, "waiting_tokens": np.int64(5)}],
        [None, 5, "waiting_requests=5", [("waiting_requests", 5)], {"waiting_requests"}],
    ),
    "kv_cache_memory_bytes": ([None, 1, LARGEST], [0, -1, LARGEST + 1, *NOT_INTEGERS]),
    "max_num_batched_tokens": ([None, 1, MAX_STEP_TOKENS], [0, -1, MAX_STEP_TOKENS + 1, *NOT_INTEGERS]),
    "max_num_seqs": ([None, 1, MAX_STEP_SEQS], [0, -1, MAX_STEP_SEQS + 1, *NOT_INTEGERS]),
    "device_memory_utilization": ([1e-9, 0.5, 1, 1.0, np.float32(0.5)], [0, 0.0, -0.1, 1.0001, *NOT_NUMBERS]),
    "watermark": ([0, 0.0, 0.999], [1, 1.0, -0.01, *NOT_NUMBERS]),
    "enable_prefix_caching": ([True, False], [0, 1, None, "true", np.bool_(True)]),
    "dtype": (["auto", "float32", "bfloat16"], ["float16", "Float32", "", None, jnp.float32, np.dtype("float32"), 5]),
    "kv_cache_dtype": (["auto", "float32", "bfloat16"], ["fp8", "", None, np.dtype("float32")]),
    "device": (["auto", "cpu", "gpu", "tpu"], ["cuda", "", None, 0]),
    "attention_backend": (["auto", "xla", "pallas-tpu", "pallas-gpu"], ["flash", "", None, ["xla"]]),
    "generation_config": (["auto", "none"], [None, "", "vllm"]),
    "async_scheduling": ([True, False], [0, 1, None, "true", np.bool_(True)]),
    "deterministic": ([True, False], [0, 1, None, "true", np.bool_(True)]),
    "num_decode_steps": (["auto", 1, MAX_DECODE_STEPS], [0, -1, MAX_DECODE_STEPS + 1, None, "2", "", *NOT_INTEGERS]),
    "warmup": (["lazy", "full", "off"], ["Full", "", None, True]),
    "model": (["smollm2-135m", Path("somewhere")], [None, *NOT_TEXT]),
    "revision": ([None, "main"], NOT_TEXT),
    "compilation_cache_dir": ([None, "somewhere", Path("somewhere")], NOT_TEXT),
}  # fmt: skip
TAKEN = [(name, value) for name, (taken, _) in RANGES.items() for value in taken]
REFUSED = [(name, value) for name, (_, refused) in RANGES.items() for value in refused]


def test_every_option_has_limits_that_are_tested():
    assert set(RANGES) == set(OPTIONS)


@pytest.mark.parametrize(("name", "value"), TAKEN, ids=shown)
def test_a_value_at_its_limit_is_taken_as_a_plain_python_value(name, value):
    taken = getattr(EngineConfig(**{name: value}), name)
    assert taken == (str(value) if isinstance(value, Path) else value)
    plain = (int, float, bool, str, type(None), dict, tuple, type(shortest_first))
    assert all(type(each) in plain for each in (taken, *(taken.values() if isinstance(taken, dict) else ())))


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=shown)
def test_a_value_beyond_its_limit_is_refused_by_name_value_and_range(name, value):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert f"got {shown(value)}" in message
    assert "allowed: " in message
    assert len(message) < 300
    assert "\n" not in message


def test_fewer_tokens_than_sequences_are_refused():
    assert EngineConfig(max_num_batched_tokens=8, max_num_seqs=8).max_num_seqs == 8
    with pytest.raises(ConfigError, match="max_num_batched_tokens: got 7, allowed: at least max_num_seqs, 8"):
        EngineConfig(max_num_batched_tokens=7, max_num_seqs=8)


def test_two_sizes_for_one_pool_are_refused():
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes: got 5, allowed: none beside num_blocks, 10"):
        EngineConfig(num_blocks=10, kv_cache_memory_bytes=5)


PAIRS = {
    "two sizes for one host pool": (
        {"num_host_blocks": 8, "swap_space": 4},
        "swap_space: got 4.0, allowed: none beside num_host_blocks, 8: give one of the two",
    ),
    "two sizes, one of them zero": (
        {"num_host_blocks": 8, "swap_space": 0}, "swap_space: got 0.0, allowed: none beside num_host_blocks, 8",
    ),
    "swap without host pages": (
        {"preemption_mode": "swap", "num_host_blocks": 0},
        "preemption_mode: got 'swap', allowed: auto or recompute while num_host_blocks is 0; raise num_host_blocks or",
    ),
    "swap without swap space": (
        {"preemption_mode": "swap", "swap_space": 0},
        "preemption_mode: got 'swap', allowed: auto or recompute while swap_space is 0; raise swap_space",
    ),
    "a cap on a cache that is off": (
        {"max_cached_blocks": 5, "enable_prefix_caching": False},
        "max_cached_blocks: got 5, allowed: 0 or none while enable_prefix_caching is false; leave one of them out",
    ),
    "a cap on pieces that are not cut": (
        {"long_prefill_token_threshold": 5, "enable_chunked_prefill": False},
        "long_prefill_token_threshold: got 5, allowed: 0 while enable_chunked_prefill is false",
    ),
    "several tokens a dispatch, and one": (
        {"num_decode_steps": 4, "deterministic": True},
        "num_decode_steps: got 4, allowed: auto or 1 while deterministic is true; leave one of them out",
    ),
    "prompts of any length in steps of one": (
        {"enable_chunked_prefill": False, "deterministic": True},
        "enable_chunked_prefill: got False, allowed: true while deterministic is true",
    ),
    "kernels that round prompts as they are cut": (
        {"attention_backend": "pallas-tpu", "deterministic": True},
        "attention_backend: got 'pallas-tpu', allowed: auto, xla or pallas-gpu while deterministic is true",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "words"), PAIRS.values(), ids=PAIRS.keys())
def test_options_that_contradict_each_other_are_refused_by_both_names(options, words):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)
    assert str(caught.value).startswith(words)
    for name in options:  # Each alone is taken.
        assert EngineConfig(**{name: options[name]})


def test_options_that_only_look_contradictory_are_taken():
    assert EngineConfig(preemption_mode="swap", swap_space=0.5).preemption_mode == "swap"
    assert EngineConfig(preemption_mode="swap", num_host_blocks=2).num_host_blocks == 2
    assert EngineConfig(preemption_mode="recompute", num_host_blocks=0).num_host_blocks == 0
    assert EngineConfig(deterministic=True, num_decode_steps=1, long_prefill_token_threshold=16).deterministic
    assert EngineConfig(deterministic=True, num_decode_steps="auto", attention_backend="pallas-gpu").deterministic
    assert EngineConfig(max_cached_blocks=0, enable_prefix_caching=False).max_cached_blocks == 0


def test_limits_hold_every_name_and_are_the_callers_no_more():
    assert EngineConfig().limits == dict.fromkeys(LIMITS)
    given = {"waiting_tokens": 7}
    config = EngineConfig(limits=given)
    given["waiting_tokens"] = 8
    assert config.limits == {"waiting_requests": None, "waiting_tokens": 7}
    assert dataclasses.asdict(config)["limits"] == config.limits


BAD_LIMITS = {
    "a name close to one": (
        {"waiting_request": 5}, "limits: got the unknown key 'waiting_request'; did you mean waiting_requests?",
    ),
    "a name near none": ({"zzz": 5}, "limits: got the unknown key 'zzz'; allowed: waiting_requests, waiting_tokens"),
    "a key that is no name": ({5: 5}, "limits: got the unknown key 5; allowed: waiting_requests, waiting_tokens"),
    **{
        f"the value {shown(value)}": (
            {"waiting_tokens": value}, f"limits: got {shown(value)} for waiting_tokens, allowed: an integer ≥ 1",
        )
        for value in (0, -1, LARGEST + 1, *NOT_INTEGERS)
    },
}  # fmt: skip


@pytest.mark.parametrize(("limits", "words"), BAD_LIMITS.values(), ids=BAD_LIMITS.keys())
def test_a_limit_that_is_none_is_refused_by_name_and_value(limits, words):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(limits=limits)
    assert str(caught.value).startswith(words)
    assert len(str(caught.value)) < 300


def test_a_policy_of_the_callers_own_is_kept_and_a_wrong_word_is_told_of_it():
    assert EngineConfig(scheduling_policy=shortest_first).scheduling_policy is shortest_first
    with pytest.raises(ConfigError, match="allowed: fcfs, priority, or in Python a key function of a request"):
        EngineConfig(scheduling_policy="shortest")


@pytest.mark.parametrize("name", NOT_BUILT)
def test_an_option_that_is_not_built_is_refused_by_name_and_value(name):
    with pytest.raises(ConfigError, match=rf"^{name}: not available in this version \(got -1\); allowed: leave it out"):
        EngineConfig(**{name: -1})
    assert name not in OPTIONS


@pytest.mark.parametrize(
    ("name", "near"), [("max_model_length", "max_model_len"), ("blocksize", "block_size"), ("sede", "seed")]
)
def test_an_unknown_option_is_refused_with_the_nearest(name, near):
    with pytest.raises(ConfigError, match=rf"^{name}: unknown option; did you mean {near}\?"):
        EngineConfig(**{name: 1})


def test_an_option_near_nothing_lists_what_there_is_and_is_cut_itself():
    with pytest.raises(ConfigError, match="unknown option; allowed: model, revision, ") as caught:
        check_option("z" * 10_000, others=["prompt"])
    assert str(caught.value).endswith("prompt")
    assert len(str(caught.value)) < 700
    check_option("prompt", others=["prompt"])


def test_vllms_name_for_the_share_of_memory_is_taken():
    assert EngineConfig(gpu_memory_utilization=0.5).device_memory_utilization == 0.5
    assert EngineConfig(gpu_memory_utilization=0.5) == EngineConfig(device_memory_utilization=0.5)
    with pytest.raises(ConfigError, match=r"device_memory_utilization: got 1\.5"):
        EngineConfig(gpu_memory_utilization=1.5)


def test_options_are_keywords_only_frozen_and_checked_again_when_replaced():
    with pytest.raises(TypeError, match="positional"):
        EngineConfig("smollm2-135m")
    config = EngineConfig(seed=3, gpu_memory_utilization=0.5)
    assert dataclasses.replace(config, seed=4) == EngineConfig(seed=4, device_memory_utilization=0.5)
    with pytest.raises(ConfigError, match="seed"):
        dataclasses.replace(config, seed="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 5
    assert hash(config) == hash(dataclasses.replace(config))


def test_every_option_explains_itself():
    assert all(option.metadata["help"] for option in dataclasses.fields(EngineConfig))
