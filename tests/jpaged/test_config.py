"""Every engine option at its limits, and every option that is not one."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import (
    INT64,
    MAX_BLOCK_SIZE,
    MAX_STEP_SEQS,
    MAX_STEP_TOKENS,
    NOT_BUILT,
    OPTIONS,
    EngineConfig,
    check_option,
)
from jpaged.errors import ConfigError
from jpaged.sampling_params import shown

LARGEST = INT64[1]
HUGE = 10**5000
NOT_INTEGERS = ["5", 5.0, True, [5], float("nan"), HUGE, -HUGE, np.float32(5)]
NOT_NUMBERS = ["0.5", None, True, float("nan"), float("inf"), HUGE, 1j]
NOT_TEXT = [5, True, "", ["a"], b"a"]

LIMITS = {
    "seed": ([0, INT64[0], LARGEST, np.int64(3)], [INT64[0] - 1, LARGEST + 1, None, *NOT_INTEGERS]),
    "max_logprobs": ([0, 20, 1000], [-1, 1001, None, *NOT_INTEGERS]),
    "max_model_len": ([None, 1, LARGEST], [0, -1, LARGEST + 1, *NOT_INTEGERS]),
    "block_size": ([None, 1, 2, 16, 512, MAX_BLOCK_SIZE], [0, -16, 3, 48, MAX_BLOCK_SIZE + 1, 2048, *NOT_INTEGERS]),
    "num_blocks": ([None, 2, LARGEST], [1, 0, -5, LARGEST + 1, *NOT_INTEGERS]),
    "kv_cache_memory_bytes": ([None, 1, LARGEST], [0, -1, LARGEST + 1, *NOT_INTEGERS]),
    "max_num_batched_tokens": ([None, 1, MAX_STEP_TOKENS], [0, -1, MAX_STEP_TOKENS + 1, *NOT_INTEGERS]),
    "max_num_seqs": ([None, 1, MAX_STEP_SEQS], [0, -1, MAX_STEP_SEQS + 1, *NOT_INTEGERS]),
    "device_memory_utilization": ([1e-9, 0.5, 1, 1.0, np.float32(0.5)], [0, 0.0, -0.1, 1.0001, *NOT_NUMBERS]),
    "watermark": ([0, 0.0, 0.999], [1, 1.0, -0.01, *NOT_NUMBERS]),
    "enable_prefix_caching": ([True, False], [0, 1, None, "true", np.bool_(True)]),
    "dtype": (["auto", "float32", "bfloat16"], ["float16", "Float32", "", None, jnp.float32, np.dtype("float32"), 5]),
    "kv_cache_dtype": (["auto", "float32", "bfloat16"], ["fp8", "", None, np.dtype("float32")]),
    "device": (["auto", "cpu", "gpu", "tpu"], ["cuda", "", None, 0]),
    "attention_backend": (["auto", "xla"], ["pallas-tpu", "pallas-gpu", "flash", "", None, ["xla"]]),
    "generation_config": (["auto", "none"], [None, "", "vllm"]),
    "model": (["smollm2-135m", Path("somewhere")], [None, *NOT_TEXT]),
    "revision": ([None, "main"], NOT_TEXT),
    "compilation_cache_dir": ([None, "somewhere", Path("somewhere")], NOT_TEXT),
}  # fmt: skip
TAKEN = [(name, value) for name, (taken, _) in LIMITS.items() for value in taken]
REFUSED = [(name, value) for name, (_, refused) in LIMITS.items() for value in refused]


def test_every_option_has_limits_that_are_tested():
    assert set(LIMITS) == set(OPTIONS)


@pytest.mark.parametrize(("name", "value"), TAKEN, ids=shown)
def test_a_value_at_its_limit_is_taken_as_a_plain_python_value(name, value):
    taken = getattr(EngineConfig(**{name: value}), name)
    assert taken == (str(value) if isinstance(value, Path) else value)
    assert type(taken) in (int, float, bool, str, type(None))


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=shown)
def test_a_value_beyond_its_limit_is_refused_by_name_value_and_range(name, value):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert value in ("pallas-tpu", "pallas-gpu") or f"got {shown(value)}" in message
    assert "allowed: " in message
    assert len(message) < 300
    assert "\n" not in message


def test_a_backend_that_is_not_built_is_refused_as_such():
    with pytest.raises(ConfigError, match="attention_backend: pallas-tpu is not available in this version; allowed"):
        EngineConfig(attention_backend="pallas-tpu")


def test_fewer_tokens_than_sequences_are_refused():
    assert EngineConfig(max_num_batched_tokens=8, max_num_seqs=8).max_num_seqs == 8
    with pytest.raises(ConfigError, match="max_num_batched_tokens: got 7, allowed: at least max_num_seqs, 8"):
        EngineConfig(max_num_batched_tokens=7, max_num_seqs=8)


def test_two_sizes_for_one_pool_are_refused():
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes: got 5, allowed: none beside num_blocks, 10"):
        EngineConfig(num_blocks=10, kv_cache_memory_bytes=5)


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
    assert len(str(caught.value)) < 600
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
