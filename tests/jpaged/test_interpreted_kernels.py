"""Whole engines whose attention is that of a TPU or a GPU, interpreted on this CPU, give the tokens of plain XLA.

Prompts in chunks, samples of one prompt, forks, prefix hits, preemption both ways, several tokens in a dispatch, and
the padded sizes of the platform; a GPU's samplers also have no branch and no loop of unknown length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from jpaged import CompletionOutput, Engine, RequestOutput, SamplingParams
from jpaged.pallas_kernels.ragged_paged_attention.gpu.backend import GpuBackend
from jpaged.pallas_kernels.ragged_paged_attention.interface import Backend
from jpaged.pallas_kernels.ragged_paged_attention.tpu.backend import TpuBackend
from jpaged.pallas_kernels.ragged_paged_attention.tpu.decode_refs import DecodeSizes
from jpaged.pallas_kernels.ragged_paged_attention.tpu.sizes import TpuSizes, write_slots_of
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend
from jpaged.startup.abstract_engine import AbstractEngine
from jpaged.startup.attention.choice import AttentionChoice

from .tiny_model import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 64
SIZES: dict[str, Any] = {
    "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 96, "block_size": 16, "num_blocks": 33,
    "warmup": "off", "max_logprobs": 2, "num_decode_steps": 3,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, logprobs=2, detokenize=False)
"""Logprobs say how close the likeliest tokens are; on a GPU, requests with logprobs decode one token in a dispatch."""
DRAWN = dataclasses.replace(GREEDY, temperature=0.8, top_p=0.9, max_tokens=6, seed=3)
LONG, SHORT = list(range(40, 111)), [7, 8, 9]
WINDOW = 20
MAX_GAP = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest gap between the logprobs of the two likeliest tokens at which two roundings may choose differently."""


def tpu_backend(dtype: str) -> Backend:
    sizes = DecodeSizes(tile=128, full=128, tail=128, max_rows=16, write_slots=write_slots_of("v6e", dtype))
    interpret = pltpu.InterpretParams(dma_execution_mode="on_wait")
    return TpuBackend(sizes=TpuSizes(sizes, tile_kv=128, sub_kv=128), tile_q=32, interpret=interpret)


def gpu_backend(dtype: str) -> Backend:
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": HEAD_SIZE}
    return GpuBackend(**heads, windows=(WINDOW,), num_sms=2, interpret=interpret)


CASES = [("tpu", "float32"), ("tpu", "bfloat16")]
if jax.__version_info__ >= (0, 11, 2):
    CASES.append(("gpu", "bfloat16"))
MADE: dict[str, Callable[[str], Backend]] = {"tpu": tpu_backend, "gpu": gpu_backend}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose heads are as wide as the kernels take them."""
    return str(write_tiny_model(tmp_path_factory.mktemp("wide"), head_dim=HEAD_SIZE))


@pytest.fixture(params=CASES, ids=str)
def engines(request: pytest.FixtureRequest, model: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Engine]]:
    """Return what makes two engines with the same options: with the interpreted kernels, and with plain XLA."""
    platform, dtype = request.param
    monkeypatch.setattr(AbstractEngine, "platform", platform)
    monkeypatch.setattr("jpaged.startup.build_engine.find_failure", lambda *_: None)
    monkeypatch.setattr("jpaged.startup.build_engine.check_in_subprocess", lambda *_: None)

    def make(path: str = model, **options: Any) -> list[Engine]:
        found = []
        for backend in (MADE[platform](dtype), XlaBackend()):
            choice = AttentionChoice(backend, "of the test")
            monkeypatch.setattr("jpaged.startup.build_engine.choose_attention", lambda *_, c=choice, **__: c)
            found.append(Engine(path, **SIZES | {"dtype": dtype} | options))
        assert all(engine.core.builder.buckets.num_tokens[0] == 16 for engine in found), "sizes of a device"
        return found

    return make


def assert_same(ours: list[RequestOutput], theirs: list[RequestOutput], dtype: str) -> None:
    """Compare greedy outputs token by token, up to one that rounding may decide. Theirs have logprobs."""
    for one, other in zip(ours, theirs, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            differs = np.flatnonzero(np.not_equal(a.token_ids, b.token_ids))
            if len(differs):
                assert b.logprobs is not None
                assert a.token_ids[differs[0]] in b.logprobs[differs[0]], "neither of the two likeliest tokens"
                likely = likeliest(b, differs[0])
                assert likely[0] - likely[1] < MAX_GAP[dtype], (a.token_ids, b.token_ids)
                assert dtype == "bfloat16", "in float32 no two tokens of this model are as close"


def assert_same_draws(ours: list[RequestOutput], theirs: list[RequestOutput], dtype: str) -> None:
    """Compare drawn outputs with logprobs: while the tokens are the same, so are the logprobs of what is likeliest.

    In float32 all draws are the same. In bfloat16 a draw may be as close to an edge as rounding is; what follows
    another token is not compared.
    """
    for one, other in zip(ours, theirs, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert dtype == "bfloat16" or a.token_ids == b.token_ids
            differs = np.flatnonzero(np.not_equal(a.token_ids, b.token_ids))
            for index in range(differs[0] + 1 if len(differs) else len(a.token_ids)):
                np.testing.assert_allclose(likeliest(a, index), likeliest(b, index), atol=MAX_GAP[dtype], rtol=0)


def likeliest(output: CompletionOutput, index: int) -> list[float]:
    """Return the logprobs of the two likeliest tokens at an index of the output, the higher one first."""
    assert output.logprobs is not None
    return sorted((entry.logprob for entry in output.logprobs[index].values() if entry.rank <= 2), reverse=True)


def test_prompts_in_chunks_beside_decodes_and_hits_of_the_prefix_cache(engines: Any) -> None:
    """The long prompt takes three steps, in which the short one decodes; then it begins with cached pages."""
    pair = engines()
    results = []
    for engine in pair:
        with engine:
            first = engine.generate([SHORT, LONG], GREEDY, use_tqdm=False)
            again = engine.generate([LONG, SHORT], GREEDY, use_tqdm=False)
            assert again[0].num_cached_tokens == 64
            results.append([*first, *again])
    assert_same(*results, dtype=pair[0].config.dtype)


def test_samples_of_one_prompt_and_a_fork(engines: Any) -> None:
    results, pair = [], engines()
    for engine in pair:
        with engine:
            found = engine.generate([LONG[:20]], dataclasses.replace(DRAWN, n=3), use_tqdm=False)
            engine.add_request("a", LONG[:37], DRAWN)
            while not engine.step():
                pass
            assert engine.fork("a", 1) == [1]
            results.append([*found, *list(engine.run_until_done())[-1:]])
            assert all(len(one.token_ids) == 6 for each in results[-1] for one in each.outputs)
    assert_same_draws(*results, dtype=pair[0].config.dtype)


def test_greedy_rows_decode_several_tokens_in_a_dispatch(engines: Any) -> None:
    """What rounding may decide is known from another run in plain XLA, which asks for logprobs."""
    prompts, params = [SHORT, LONG[:20], LONG[30:60]], dataclasses.replace(GREEDY, max_tokens=16)
    plain, results, num_steps = dataclasses.replace(params, logprobs=None), [], []
    pair = engines()
    for engine in pair:
        with engine:
            results.append(engine.generate(prompts, plain, use_tqdm=False))
            num_steps.append(engine.stats()["steps"])
            if engine is pair[1]:
                with_logprobs = engine.generate(prompts, params, use_tqdm=False)
    for ours in results:
        assert_same(ours, with_logprobs, dtype=pair[0].config.dtype)
    assert num_steps[0] == num_steps[1] <= 2 + 5, "two steps of prompts, and 15 tokens by threes"


def test_a_layer_with_a_window_beside_one_of_full_attention(engines: Any, tmp_path: Path) -> None:
    """While the long prompt is computed, in chunks, its window passes the first of its five pages."""
    types = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    options = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": WINDOW, **types}
    pair, results = engines(str(write_tiny_model(tmp_path, head_dim=HEAD_SIZE, **options))), []
    for engine in pair:
        with engine:
            results.append(engine.generate([SHORT, LONG], GREEDY, use_tqdm=False))
            assert engine.blocks.arithmetic.windows == (None, WINDOW)
    assert_same(*results, dtype=pair[0].config.dtype)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_both_ways(engines: Any, mode: str) -> None:
    """Three prompts fill the pool; while they grow, one has to give its pages back."""
    prompts = [LONG[start : start + 30] for start in (0, 10, 20)]
    options = {"num_blocks": 8, "preemption_mode": mode, "num_host_blocks": 17, "enable_prefix_caching": False}
    pair, results = engines(**options), []
    for engine in pair:
        with engine:
            results.append(engine.generate(prompts, dataclasses.replace(GREEDY, max_tokens=12), use_tqdm=False))
            assert engine.stats()[f"preemptions_{mode}"] > 0
    assert_same(*results, dtype=pair[0].config.dtype)
