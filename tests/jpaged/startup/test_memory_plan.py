"""Memory is planned before any is taken: by what the compiled step says, as it is then taken, and refused in bytes."""

import json
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jpaged import ConfigError, Engine, SamplingParams
from jpaged.assembly import own_bytes
from jpaged.sizing import estimated_step_bytes

from .tiny_model import CONFIG, write_tiny_model

ROOT = Path(__file__).parents[2]
SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, "block_size": 16}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


def with_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """A machine with so much free memory."""
    monkeypatch.setattr("jpaged.assembly.free_host_bytes", lambda: num_bytes)


def kept_between_steps(engine: Engine) -> int:
    """Rules of slots, and hidden states."""
    return engine.runner.state.hidden.nbytes + sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runner.rules))


def largest_step(engine: Engine) -> int:
    """By what its executables say."""
    keys = [key for key in engine.runner.plan.programs if key[0] in ("forward", "sample", "decode")]
    return max(own_bytes(engine.runner.plan.get(key)) for key in keys)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_planned_is_what_is_taken(tiny: str, dtype: str) -> None:
    with Engine(tiny, **SIZES, dtype=dtype) as engine:
        memory = engine.sizes.memory
        state, weights = engine.runner.state, engine.runner.weights
        assert memory.pool_bytes == sum(array.nbytes for array in state.cache.pages)
        assert memory.weights_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(weights.state))
        assert not memory.is_measured
        taken = largest_step(engine) + kept_between_steps(engine)
        assert 0 <= memory.step_bytes - taken < 20 << 20, "an estimate on the generous side"


def test_where_memory_is_short_the_step_is_measured_and_the_pool_takes_half_of_the_rest(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(tiny, **SIZES) as engine:
        plenty, most = engine.sizes.memory, largest_step(engine)
        page_bytes = engine.runner.state.cache.layout.page_bytes
        wanted = engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    num_pages = 48
    free = plenty.weights_bytes + most + 2 * num_pages * page_bytes
    with_memory(monkeypatch, free)
    with Engine(tiny, **SIZES) as engine:
        memory = engine.sizes.memory
        assert memory.is_measured
        assert memory.step_bytes < plenty.step_bytes
        taken = largest_step(engine) + kept_between_steps(engine)
        assert memory.step_bytes == pytest.approx(taken, rel=0.05), "pages do not change a step"
        room = (free - memory.weights_bytes - memory.step_bytes) // 2
        # Rounded down to three significant bits, so that compiled shapes stay what they are.
        assert 0.74 * room <= memory.pool_bytes <= room
        assert memory.pool_bytes == sum(array.nbytes for array in engine.runner.state.cache.pages)
        again = engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
        assert again[0].outputs[0].token_ids == wanted[0].outputs[0].token_ids


def test_a_context_that_the_memory_cannot_hold_is_refused_with_the_longest_that_it_can(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(tiny, **SIZES) as engine:
        memory, page_bytes = engine.sizes.memory, engine.runner.state.cache.layout.page_bytes
        most = largest_step(engine)
    with_memory(monkeypatch, memory.weights_bytes + most + 20 * page_bytes)
    with pytest.raises(ConfigError) as caught:
        Engine(tiny, **SIZES)
    found = re.search(r"(\d+) bytes are missing; lower max_model_len to (\d+)", str(caught.value))
    assert found, caught.value
    missing, longest = int(found[1]), int(found[2])
    assert missing == (256 - longest) // 16 * page_bytes
    with Engine(tiny, **SIZES | {"max_model_len": longest}) as engine:
        output = engine.generate([[7] * (longest - 3)], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert len(output[0].outputs[0].token_ids) == 3
    with pytest.raises(ConfigError, match="bytes are missing"):
        Engine(tiny, **SIZES | {"max_model_len": longest + 16})


def test_the_estimate_follows_the_sizes_of_a_step(tiny: str) -> None:
    with Engine(tiny, **SIZES) as engine:
        model = engine.opened.config
    assert estimated_step_bytes(model, 128, 8) > estimated_step_bytes(model, 64, 8)
    assert estimated_step_bytes(model, 64, 16) > estimated_step_bytes(model, 64, 8)
    assert estimated_step_bytes(replace(model, vocab_size=10**6), 64, 8) > estimated_step_bytes(model, 64, 8)


def write_hollow_model(directory: Path) -> Path:
    """Files of a model of 7e10 parameters that take no room: all zeros, which the file system does not keep."""
    write_tiny_model(directory)
    hidden, inner, layers, kv, vocab = 8192, 28672, 80, 1024, 258
    config = {
        **CONFIG, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": 64, "num_key_value_heads": 8,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,), "lm_head": (vocab, hidden)}
    for layer in range(layers):
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }.items():  # fmt: skip
            shapes[f"model.layers.{layer}.{name}"] = shape
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return directory


def test_a_model_that_does_not_fit_ends_the_command_with_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jpaged.generate", "-m", str(write_hollow_model(tmp_path / "hollow")), "hi"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert run.returncode == 1
    (line,) = run.stderr.strip().splitlines()
    found = re.search(
        r"weights and a step take at most (\d+) GB, .*; (\d+) bytes are missing, and no max_model_len fits", line
    )
    assert found, line
    assert int(found[1]) >= 270
    assert int(found[2]) > 10**11
