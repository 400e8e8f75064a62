"""Whole engines whose attention is that of a TPU or a GPU, interpreted on this CPU, give the tokens of plain XLA.

Prompts in chunks, samples of one prompt, forks, prefix hits, preemption both ways, several tokens in a dispatch, and
the padded sizes of the platform; a GPU's samplers also have no branch and no loop of unknown length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from jpaged import Engine, RequestOutput, SamplingParams
from jpaged.pallas_kernels.ragged_paged_attention.gpu.backend import GpuBackend
from jpaged.pallas_kernels.ragged_paged_attention.interface import Backend
from jpaged.pallas_kernels.ragged_paged_attention.tpu.backend import TpuBackend
from jpaged.pallas_kernels.ragged_paged_attention.tpu.decode_refs import DecodeSizes
from jpaged.pallas_kernels.ragged_paged_attention.tpu.sizes import TpuSizes, write_slots_of
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend
from jpaged.startup.abstract_engine import AbstractEngine
from jpaged.startup.attention_choice import AttentionChoice

from .tiny_model import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 64
SIZES: dict[str, Any] = {
    "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 96, "block_size": 16, "num_blocks": 33,
    "warmup": "off", "max_logprobs": 2, "num_decode_steps": 3,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, logprobs=2, detokenize=False)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=6, ignore_eos=True, seed=3, detokenize=False)
LONG, SHORT = list(range(40, 111)), [7, 8, 9]
MAX_GAP = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest gap between the logprobs of the two likeliest tokens at which two roundings may choose differently."""


def tpu_backend(dtype: str) -> Backend:
    sizes = DecodeSizes(tile=128, full=128, tail=128, max_rows=16, write_slots=write_slots_of("v6e", dtype))
    interpret = pltpu.InterpretParams(dma_execution_mode="on_wait")
    return TpuBackend(sizes=TpuSizes(sizes, tile_kv=128, sub_kv=128), tile_q=32, interpret=interpret)


def gpu_backend(dtype: str) -> Backend:
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    return GpuBackend(num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, num_sms=2, interpret=interpret)


CASES = [("tpu", "float32"), ("tpu", "bfloat16")]
if jax.__version_info__ >= (0, 11):
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

    def make(**options: Any) -> list[Engine]:
        found = []
        for backend in (MADE[platform](dtype), XlaBackend()):
            choice = AttentionChoice(backend, "of the test")
            monkeypatch.setattr("jpaged.startup.build_engine.choose_attention", lambda *_, c=choice, **__: c)
            found.append(Engine(model, **SIZES | {"dtype": dtype} | options))
        assert all(engine.core.builder.buckets.num_tokens[0] == 16 for engine in found), "sizes of a device"
        return found

    return make


def assert_same(ours: list[RequestOutput], theirs: list[RequestOutput], dtype: str) -> None:
    """Compare greedy outputs token by token, up to one that rounding may decide."""
    for one, other in zip(ours, theirs, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            differs = np.flatnonzero(np.not_equal(a.token_ids, b.token_ids))
            if len(differs):
                likely = sorted((entry.logprob for entry in b.logprobs[differs[0]].values()), reverse=True)
                assert likely[0] - likely[1] < MAX_GAP[dtype], (a.token_ids, b.token_ids)
                assert dtype == "bfloat16", "in float32 no two tokens of this model are as close"


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [one.token_ids for output in outputs for one in output.outputs]


def test_prompts_in_chunks_beside_decodes_and_hits_of_the_prefix_cache(engines: Any) -> None:
    """The long prompt takes three steps, in which the short one decodes; then it begins with cached pages."""
    pair = engines()
    results = []
    for engine in pair:
        with engine:
            first = engine.generate([SHORT, LONG], GREEDY, use_tqdm=False)
            again = engine.generate([LONG, SHORT], GREEDY, use_tqdm=False)
            assert again[0].num_cached_tokens == 64
            # Without logprobs a GPU too decodes several tokens a dispatch.
            several = engine.generate([SHORT, LONG], dataclasses.replace(GREEDY, logprobs=None), use_tqdm=False)
            assert_same(several, first, dtype=engine.config.dtype)
            results.append([*first, *again])
    assert_same(*results, dtype=pair[0].config.dtype)


def test_samples_of_one_prompt_and_a_fork(engines: Any) -> None:
    """In float32 draws are the same; in bfloat16 a draw may be as close to an edge as rounding is."""
    results = []
    for engine in engines():
        with engine:
            found = engine.generate([LONG[:20]], dataclasses.replace(DRAWN, n=3), use_tqdm=False)
            engine.add_request("a", LONG[:37], DRAWN)
            while not engine.step():
                pass
            assert engine.fork("a", 1) == [1]
            results.append(tokens(found) + tokens(list(engine.run_until_done())[-1:]))
            assert all(len(each) == 6 for each in results[-1])
            dtype = engine.config.dtype
    same = np.mean([a == b for a, b in zip(*results, strict=True)])
    assert same == 1 or (dtype == "bfloat16" and same >= 0.4), results


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
