"""The plan of memory holds: for the compiled step, for what is then allocated, and for what it refuses."""

import json
import re
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jpaged import Engine
from jpaged.sampling.sampling_params import SampleMode
from jpaged.startup.abstract_engine import StepMemoryCheck, own_bytes
from jpaged.startup.sizing.sizes import MemoryPlan

from ...tiny_model import CONFIG, write_tiny_model

pytestmark = pytest.mark.usefixtures("optimized")

ROOT = Path(__file__).parents[4]
SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, "block_size": 16}


@dataclass(frozen=True)
class Measured:
    """The memory that an engine takes where there is plenty."""

    plan: MemoryPlan
    largest_step: int
    """Bytes of the largest of the programs with the most tokens and rows."""
    page_bytes: int


def measure(engine: Engine) -> Measured:
    runner = engine.runner
    keys = [("forward", 64), *((name, 8, SampleMode.FULL) for name in ("decode", "sample"))]
    largest = max(own_bytes(runner.compile_plan.get(key)) for key in keys)
    return Measured(engine.sizes.memory, largest, runner.page_bytes)


def step_bytes(engine: Engine, largest_step: int) -> int:
    """Return what the plan calls a step: the largest program, the logit rules and the hidden states."""
    runner = engine.runner
    return largest_step + runner.state.hidden.nbytes + sum(leaf.nbytes for leaf in jax.tree.leaves(runner.rules))


def set_free_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr("jpaged.startup.prepared_engine.free_host_bytes", lambda: num_bytes)


def measure_with_plenty(tiny: str, dtype: str) -> Measured:
    """Check the plan of an engine with plenty of memory against what it takes; return what it takes."""
    with Engine(tiny, **SIZES, dtype=dtype) as engine:
        found = measure(engine)
        assert found.plan.pool_bytes == sum(array.nbytes for array in engine.runner.state.cache.pages)
        weights = engine.runner.weights.state
        assert found.plan.weights_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
        assert found.largest_step <= found.plan.program_bytes
        assert 0 <= found.plan.step_bytes - step_bytes(engine, found.largest_step) < 20 << 20
        return found


@pytest.fixture(scope="module")
def plenty(tiny: str) -> Measured:
    return measure_with_plenty(tiny, "float32")


@pytest.mark.slow
def test_the_plan_is_what_is_taken_and_its_estimate_of_a_step_is_generous(tiny: str, plenty: Measured) -> None:
    measure_with_plenty(tiny, "bfloat16")


@pytest.mark.slow
def test_where_memory_is_short_the_pool_takes_half_of_what_weights_and_a_step_leave(
    tiny: str, plenty: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = plenty.plan.weights_bytes + plenty.plan.step_bytes + 2 * 48 * plenty.page_bytes
    set_free_memory(monkeypatch, free)
    with Engine(tiny, **SIZES) as engine:
        plan = engine.sizes.memory
        assert plan.step_bytes == plenty.plan.step_bytes
        room = (free - plan.weights_bytes - plan.step_bytes) // 2
        # Rounded down to three significant bits, so that compiled shapes stay the same.
        assert 0.74 * room <= plan.pool_bytes <= room
        assert plan.pool_bytes == sum(array.nbytes for array in engine.runner.state.cache.pages)


def test_a_program_that_takes_more_than_is_kept_for_it_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    array = jax.ShapeDtypeStruct((1 << 20,), np.float32)
    compiled = jax.jit(lambda x: (x * 2, x * 3)).lower(array).compile()
    for kept, keys in ((9 << 20, [("forward", 64)]), (1 << 20, [("forward", 64), ("decode", 8), ("swap_out",)])):
        caplog.clear()
        check = StepMemoryCheck(kept)
        for key in reversed(keys):
            check(key, compiled)
        assert [record.getMessage() for record in caplog.records] == [
            "memory: the program decode 8 takes 0.00839 GB, 0.00105 GB are kept for a step; if memory runs out, lower "
            "device_memory_utilization or max_num_batched_tokens"
        ] * (len(keys) > 1)


def write_hollow_model(directory: Path) -> Path:
    """Write a model of 7e10 parameters as sparse files, which take no room on the disk."""
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


def test_a_model_that_does_not_fit_ends_the_command_with_the_missing_bytes(tmp_path: Path) -> None:
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
