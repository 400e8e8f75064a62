"""Where native code cannot serve, `xla` does: one line says why, and no token changes."""

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from jpaged import Engine, SamplingParams
from jpaged.errors import ConfigError
from jpaged.pallas_kernels.native.layer_ops import NativeOps
from jpaged.pallas_kernels.ragged_paged_attention.native.backend import NativeBackend

from ...tiny_model import write_tiny_model

ROOT = Path(__file__).parents[4]
SIZES = {"max_model_len": 128, "max_num_seqs": 4, "num_blocks": 20, "block_size": 16}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
WITHOUT_LLVMLITE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "llvmlite":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from jpaged.generate import main
sys.exit(main(sys.argv[1:]))
"""


class WrongNorm(NativeOps):
    """Forgets the weight."""

    def rms_norm(self, x, weight, eps):
        return super().rms_norm(x, 2 * jnp.ones_like(weight), eps)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def run_without_llvmlite(tiny: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_LLVMLITE, "-m", str(tiny), "--temperature", "0", "-n", "12", *args, "hi"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


@pytest.mark.slow
def test_without_llvmlite_xla_serves_and_native_by_name_ends_the_start(tiny):
    with Engine(tiny, **SIZES) as engine:
        assert engine.backend.name == "native"
        messages, params = [{"role": "user", "content": "hi"}], replace(PARAMS, ignore_eos=False)
        wanted = engine.chat(messages, params, use_tqdm=False)[0].outputs[0].text
    run = run_without_llvmlite(tiny)
    assert (run.returncode, run.stdout) == (0, wanted + "\n")
    why = "it needs llvmlite, which cannot be imported (No module named 'llvmlite')"
    assert f"attention: xla, not native: {why}" in run.stderr.splitlines()
    run = run_without_llvmlite(tiny, "--attention-backend", "native")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == (
        f"error: attention_backend: got native, which cannot serve here: {why}; use --attention-backend xla\n"
    )


def test_a_failed_check_lets_xla_serve_and_ends_a_start_that_asked_for_native(tiny, tmp_path, monkeypatch, caplog):
    with Engine(tiny, **SIZES) as engine:
        wanted = engine.generate(["hi"], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(NativeBackend, "layer_ops", WrongNorm())
    with caplog.at_level(logging.WARNING, "jpaged"), Engine(tiny, **SIZES) as engine:
        assert engine.backend.name == "xla"
        assert engine.generate(["hi"], PARAMS, use_tqdm=False)[0].outputs[0].token_ids == wanted
    (line,) = [record.getMessage() for record in caplog.records if "attention" in record.getMessage()]
    assert line.startswith("attention: xla, not native: it differs from numpy on cpu by ")
    refused = r"got native, which cannot serve here: it differs from numpy .*; use .* xla$"
    with pytest.raises(ConfigError, match=refused):
        Engine(tiny, **SIZES, attention_backend="native")


def test_names_for_perf_are_refused_where_no_code_is_native(tiny):
    with pytest.raises(ConfigError, match=r"perf_map: got true with the attention backend xla, allowed: false, or"):
        Engine(tiny, **SIZES, attention_backend="xla", perf_map=True)
