"""Every engine option at its limits, and options that contradict each other."""

import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jpaged import not_available
from jpaged.checks import INT64, shown
from jpaged.config.engine_config import (
    MAX_BLOCK_SIZE,
    MAX_DECODE_STEPS,
    MAX_DEVICES,
    MAX_STEP_SEQS,
    MAX_STEP_TOKENS,
    MAX_SWAP_SPACE,
    EngineConfig,
)
from jpaged.errors import ConfigError
from jpaged.limits import DEFAULT_LIMITS, LIMITS
from jpaged.pallas_kernels.ragged_paged_attention.names import BACKEND_NAMES
from jpaged.sampling.logits_processor import LogitsProcessor

LARGEST = INT64[1]


def shortest_first(request):
    return len(request.prompt_token_ids)


MESH = Mesh(np.array(jax.devices("cpu")[:1])[None], ("data", "tensor"))
SCALE = LogitsProcessor("scale", ("factor",), lambda logits, factor: logits * factor)
BOOLEAN = [True, False], [0, 1, None, "true"]
SIZE = [None, 1, LARGEST], [0, -1, LARGEST + 1, 5.0]
# Values that are taken and values that are refused. What is of another type altogether is test_checks'.
RANGES = {
    "seed": ([0, *INT64, np.int64(3)], [INT64[0] - 1, LARGEST + 1, None]),
    "max_logprobs": ([-1, 0, 20, 1000], [-2, 1001, None]),
    "load_format": (["auto", "hf", "safetensors", "orbax", "gguf", "dummy"], ["pt", "Dummy", "", None]),
    "tokenizer": ([None, "org/name", Path("somewhere")], ["", 5]),
    "skip_tokenizer_init": BOOLEAN,
    "tool_call_parser": ([None, "hermes", "none"], ["", 5, True]),
    "reasoning_parser": ([None, "qwen3", "none"], ["", 5, True]),
    "hf_overrides": (
        [{}, {"rope_theta": 5.0, "rope_parameters": {"factor": 2, "rope_type": None}}],
        [None, 5, "rope_theta=5", [("rope_theta", 5)]],
    ),
    "params": ([None, {}], []),
    "logprobs_mode": (["raw_logprobs", "processed_logprobs"], ["raw_logits", "", None]),
    "logits_processors": ([(), (SCALE,)], [None, SCALE, (5,), "scale", (SCALE, SCALE)]),
    "max_model_len": SIZE,
    "tensor_parallel_size": ([None, 1, MAX_DEVICES], [0, -1, 2**31 - 1, 5.0]),
    "data_parallel_size": ([1, np.int64(1), 2], [0, -1, None, True, "1", 2.0]),
    "pipeline_parallel_size": ([1], [0, 2, None, True]),
    "enable_expert_parallel": BOOLEAN,
    "count_expert_tokens": BOOLEAN,
    "mesh": ([None, MESH], [5, "tensor", ("data", "tensor")]),
    "sharding_rules": ([None], [5, "tp", ("heads", "tp"), [("heads", "tp")], {5: "tp"}]),
    "block_size": ([None, 1, 2, 16, 512, MAX_BLOCK_SIZE], [0, -16, 3, 48, MAX_BLOCK_SIZE + 1, 2048, "5"]),
    "num_blocks": ([None, 2, LARGEST], [1, 0, -5, LARGEST + 1]),
    "num_host_blocks": ([None, 0, 2, LARGEST], [1, -1, LARGEST + 1, 2.0]),
    "swap_space": ([None, 0, 0.5, MAX_SWAP_SPACE, np.float32(2)], [-1, -1e-9, MAX_SWAP_SPACE + 1]),
    "preemption_mode": (["auto", "recompute", "swap"], ["Swap", "none", "", None]),
    "max_cached_blocks": ([None, 0, 1, LARGEST], [-1, LARGEST + 1]),
    "enable_chunked_prefill": BOOLEAN,
    "long_prefill_token_threshold": ([0, 1, LARGEST], [-1, LARGEST + 1, None]),
    "scheduling_policy": (["fcfs", "priority", shortest_first], ["lifo", "FCFS", "", None, 5, ["fcfs"]]),
    "scheduling_delay_factor": ([0, 0.5, 1e308], [-1e-9, -1, float("inf"), None]),
    "limits": (
        [{"waiting_requests": 1, "waiting_tokens": LARGEST}, {"waiting_requests": None, "waiting_tokens": np.int64(5)}],
        [None, 5, "waiting_requests=5", [("waiting_requests", 5)], {"waiting_requests"}],
    ),
    "kv_cache_memory_bytes": SIZE,
    "max_num_batched_tokens": ([None, 1, MAX_STEP_TOKENS], [0, MAX_STEP_TOKENS + 1]),
    "max_num_seqs": ([None, 1, MAX_STEP_SEQS], [0, MAX_STEP_SEQS + 1]),
    "device_memory_utilization": ([1e-9, 0.5, 1], [0, -0.1, 1.0001, None]),
    "watermark": ([0, 0.999], [1, -0.01, None]),
    "enable_prefix_caching": BOOLEAN,
    "dtype": (["auto", "float32", "bfloat16"], ["float16", "Float32", "", None, np.dtype("float32")]),
    "kv_cache_dtype": (["auto", "float32", "bfloat16", "int8", "fp8"], ["float8_e4m3fn", "", None]),
    "device": (["auto", "cpu", "gpu", "tpu"], ["cuda", "", None, 0]),
    "attention_backend": (["auto", *BACKEND_NAMES], ["flash", "", None, ["xla"]]),
    "generation_config": (["auto", "none"], [None, "", "vllm"]),
    "quantization": (["auto", "none", "int8", "fp8", "int4"], ["awq", "", None, True]),
    "perf_map": BOOLEAN,
    "async_scheduling": BOOLEAN,
    "deterministic": BOOLEAN,
    "num_decode_steps": (["auto", 1, MAX_DECODE_STEPS], [0, -1, MAX_DECODE_STEPS + 1, None, "2", "", True, 2.0]),
    "warmup": (["lazy", "full", "off"], ["Full", "", None]),
    "model": (["smollm2-135m", Path("somewhere")], [None, ""]),
    "revision": ([None, "main"], ["", 5]),
    "compilation_cache_dir": ([None, "somewhere", Path("somewhere")], ["", 5]),
    "weights_cache_dir": ([None, "somewhere", Path("somewhere")], ["", 5]),
}
REFUSED = [(name, value) for name, (_, refused) in RANGES.items() for value in refused]


def test_values_at_their_limits_are_kept_as_plain_python_values():
    assert set(RANGES) == {option.name for option in dataclasses.fields(EngineConfig)}
    plain = (int, float, bool, str, type(None), dict, tuple, type(shortest_first), Mesh)
    for name, (taken, _) in RANGES.items():
        for value in taken:
            kept = getattr(EngineConfig(**{name: value}), name)
            if name == "limits":  # Names that are not given have their defaults.
                value = DEFAULT_LIMITS | value
            assert kept == (str(value) if isinstance(value, Path) else value), (name, value)
            assert all(type(each) in plain for each in (kept, *(kept.values() if isinstance(kept, dict) else ())))


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: re.sub("0x[0-9a-f]+", "", shown(value)))
def test_a_value_beyond_its_limit_is_refused_by_name_value_and_range(name, value):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}: got {shown(value)}, allowed: ")
    assert len(message) < 300
    assert "\n" not in message


@pytest.mark.parametrize(("num_devices", "got"), [(0, "no device"), (2, "one device twice")])
def test_a_mesh_that_has_no_device_or_one_twice_is_refused(num_devices, got):
    devices = np.array(jax.devices("cpu")[:1] * num_devices, object).reshape(1, num_devices)
    with pytest.raises(ConfigError, match=f"^mesh: got {got}, allowed: devices, each of them once"):
        EngineConfig(mesh=Mesh(devices, ("data", "tensor")))


FSDP_TP = Mesh(np.array([*jax.devices("cpu")[:1], object()], object).reshape(2, 1), ("fsdp", "tp"))
"""A mesh of two devices, the second of which does nothing in these tests."""


def test_a_mesh_with_axes_of_other_names_is_refused_with_the_rules_it_needs():
    """A mesh of one axis or one device needs none."""
    words = (
        "mesh: got axes {'fsdp': 2, 'tp': 1}, allowed: one axis, or an axis tensor; give sharding_rules, such as "
        '{"heads": "tp", "mlp": "tp", "vocab": "tp"}'
    )
    with pytest.raises(ConfigError) as caught:
        EngineConfig(mesh=FSDP_TP)
    assert str(caught.value) == words
    assert EngineConfig(mesh=Mesh(FSDP_TP.devices[:, 0], ("any",))).num_devices == 2
    assert EngineConfig(mesh=Mesh(FSDP_TP.devices[:1], ("fsdp", "tp"))).num_devices == 1


@pytest.mark.parametrize(
    ("rules", "num_devices"),
    [
        ({"heads": "tp", "mlp": "tp", "embed": "fsdp"}, 1),
        ({"heads": ["fsdp", "tp"]}, 2),
        ({"heads": "tp", "expert": "fsdp", "norm": None}, 2),
        ({"embed": "fsdp"}, 1),
        ({}, 1),
    ],
)
def test_the_axes_that_rules_give_for_tensors_serve(rules, num_devices):
    config = EngineConfig(mesh=FSDP_TP, sharding_rules=rules, tensor_parallel_size=num_devices)
    assert config.num_devices == num_devices
    assert config.axis_table.devices(FSDP_TP) == list(FSDP_TP.devices.flat)[:num_devices]


RULES = {
    "no mesh": ({}, {"heads": "tp"}, "got {'heads': 'tp'}, allowed: none without mesh, whose axes they name; give"),
    "an unknown axis": (
        {"mesh": FSDP_TP}, {"heads": "tp", "mlp": ("fsdp", "tpp")},
        "got 'tpp' for mlp, allowed: axes of mesh: fsdp, tp; did you mean tp?",
    ),
    "no axis": ({"mesh": FSDP_TP}, {"heads": 5}, "got 5 for 'heads', allowed: a mapping of logical axes to axes of"),
}  # fmt: skip


@pytest.mark.parametrize("case", RULES.values(), ids=RULES)
def test_rules_that_name_no_axes_of_a_mesh_are_refused(case):
    options, rules, words = case
    with pytest.raises(ConfigError, match=f"^sharding_rules: {re.escape(words)}"):
        EngineConfig(sharding_rules=rules, **options)


def test_an_unknown_backend_is_refused_with_the_names_of_all():
    with pytest.raises(ConfigError, match=f"allowed: auto, {', '.join(BACKEND_NAMES)}$"):
        EngineConfig(attention_backend="flash")


PAIRS = {
    "two numbers of devices": (
        {"mesh": MESH, "tensor_parallel_size": 2},
        "tensor_parallel_size: got 2, allowed: none beside mesh, or 1, the devices of it that serve; leave one of",
    ),
    "two kinds of devices": (
        {"mesh": MESH, "device": "tpu"}, "device: got 'tpu', allowed: auto beside mesh, or cpu as its devices are",
    ),
    "fewer tokens than sequences": (
        {"max_num_batched_tokens": 7, "max_num_seqs": 8},
        "max_num_batched_tokens: got 7, allowed: at least max_num_seqs, 8",
    ),
    "two sizes for one pool": (
        {"kv_cache_memory_bytes": 5, "num_blocks": 10},
        "kv_cache_memory_bytes: got 5, allowed: none beside num_blocks, 10; give one of the two",
    ),
    "two sizes for one host pool": (
        {"num_host_blocks": 8, "swap_space": 4},
        "swap_space: got 4.0, allowed: none beside num_host_blocks, 8; give one of the two",
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
    "a limit of a cache that is off": (
        {"max_cached_blocks": 5, "enable_prefix_caching": False},
        "max_cached_blocks: got 5, allowed: 0 or none while enable_prefix_caching is false; leave one of them out",
    ),
    "a limit of chunks that are not cut": (
        {"long_prefill_token_threshold": 5, "enable_chunked_prefill": False},
        "long_prefill_token_threshold: got 5, allowed: 0 while enable_chunked_prefill is false",
    ),
    "several tokens a dispatch, and one": (
        {"num_decode_steps": 4, "deterministic": True},
        "num_decode_steps: got 4, allowed: auto or 1 while deterministic is true; leave one of them out",
    ),
    "prompts of any length in steps of one size": (
        {"enable_chunked_prefill": False, "deterministic": True},
        "enable_chunked_prefill: got False, allowed: true while deterministic is true",
    ),
    "a tokenizer that would not be loaded": (
        {"tokenizer": "somewhere", "skip_tokenizer_init": True},
        "tokenizer: got 'somewhere', allowed: none while skip_tokenizer_init is true; leave one of them out",
    ),
    "weights from two places": (
        {"load_format": "dummy", "params": {}},
        "load_format: got 'dummy', allowed: auto beside params, which are the weights; leave one of them out",
    ),
    "kernels whose rounding depends on the chunks": (
        {"attention_backend": "pallas-tpu", "deterministic": True},
        "attention_backend: got 'pallas-tpu', allowed: auto, xla, native, pallas-gpu while deterministic is true",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "words"), PAIRS.values(), ids=PAIRS.keys())
def test_options_that_contradict_each_other_are_refused_by_both_names(options, words):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)
    assert str(caught.value).startswith(words)
    for name in options:
        assert EngineConfig(**{name: options[name]}), "each by itself is taken"


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"preemption_mode": "swap", "swap_space": 0.5},
        {"preemption_mode": "swap", "num_host_blocks": 2},
        {"preemption_mode": "recompute", "num_host_blocks": 0},
        {"deterministic": True, "num_decode_steps": 1, "long_prefill_token_threshold": 16},
        {"deterministic": True, "num_decode_steps": "auto", "attention_backend": "pallas-gpu"},
        {"max_cached_blocks": 0, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_options_that_only_look_contradictory_are_taken(options):
    assert EngineConfig(**options)


def deep(levels):
    return {"a": deep(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({5: 5}, "^hf_overrides: got .* among the values, allowed: values that JSON has, and strings as keys"),
        (
            {"a": {"b": np.float32(1)}},
            r"^hf_overrides: got np.float32\(1.0\) among the values, allowed: values that JSON",
        ),
        (deep(100), "^hf_overrides: got .*, allowed: at most 16 levels"),
    ],
    ids=shown,
)
def test_overrides_are_what_json_can_hold(overrides, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig(hf_overrides=overrides)


def test_params_are_a_mapping_and_no_part_of_what_a_config_shows_or_equals():
    with pytest.raises(
        ConfigError, match=r"^params: got list, allowed: a flat or nested mapping of Hugging Face names"
    ):
        EngineConfig(params=[1])
    config = EngineConfig(params={"a": np.zeros(3)})
    assert config == EngineConfig()
    assert "params" not in repr(config)


def test_limits_hold_every_name_and_are_a_copy():
    assert EngineConfig().limits == DEFAULT_LIMITS
    assert set(DEFAULT_LIMITS) == set(LIMITS)
    given = {"waiting_tokens": 7}
    config = EngineConfig(limits=given)
    given["waiting_tokens"] = 8
    assert config.limits == {**DEFAULT_LIMITS, "waiting_tokens": 7}
    assert dataclasses.asdict(config)["limits"] == config.limits


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"waiting_request": 5}, r"^waiting_request: unknown key of limits; did you mean waiting_requests\?"),
        ({5: 5}, "^5: unknown key of limits; allowed: waiting_requests, waiting_tokens, samples"),
        ({"silence_s": -1}, "^limits: got -1 for silence_s, allowed: an integer ≥ 0, or leave it out"),
        ({"waiting_tokens": 0}, "^limits: got 0 for waiting_tokens, allowed: an integer ≥ 1, or leave it out"),
        ({"stop": 17}, r"^limits: got 17 for stop, allowed: an integer in \[1, 16\], or leave it out"),
        ({"waiting_tokens": LARGEST + 1}, f"^limits: got {LARGEST + 1} for waiting_tokens, allowed: an integer"),
        ({"waiting_tokens": "5"}, "^limits: got '5' for waiting_tokens, allowed: an integer"),
    ],
    ids=shown,
)
def test_a_wrong_limit_is_refused_by_name_and_value(limits, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig(limits=limits)


def test_a_wrong_policy_is_refused_with_the_python_way():
    with pytest.raises(ConfigError, match="allowed: fcfs, priority, or in Python a key function of a request"):
        EngineConfig(scheduling_policy="shortest")


def test_names_that_are_not_there_are_refused():
    """A name is refused as not available, or with the nearest one; test_checks holds the wording."""
    for name in not_available.ENGINE_OPTIONS:
        with pytest.raises(ConfigError, match=rf"^{name}: not available in this version \(got -1\); leave it out"):
            EngineConfig(**{name: -1})
    with pytest.raises(ConfigError, match=r"^blocksize: unknown option; did you mean block_size\?"):
        EngineConfig(blocksize=1)


def test_vllms_name_for_the_share_of_memory_is_taken():
    assert EngineConfig(gpu_memory_utilization=0.5) == EngineConfig(device_memory_utilization=0.5)
    assert dataclasses.replace(EngineConfig(gpu_memory_utilization=0.5), seed=4).device_memory_utilization == 0.5
    with pytest.raises(ConfigError, match=r"device_memory_utilization: got 1\.5"):
        EngineConfig(gpu_memory_utilization=1.5)
