"""The engine's items tell right tokens from wrong ones, count launches, and say what memory is missing."""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jpaged.config.engine_config import EngineConfig
from jpaged.pallas_kernels.ragged_paged_attention.interface import AttentionShape
from jpaged.startup.attention import check_process
from jpaged.startup.attention.check_process import check_request
from jpaged.startup.open_model import open_model

from ..jpaged.startup.attention import broken_kernels
from .check_scripts import Script

HLO = """HloModule step, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %a = f32[4]{0} add(f32[4]{0} %p, f32[4]{0} %p)
}

%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element((s32[], f32[4]{0}) %t), index=1
  %f = f32[4]{0} fusion(f32[4]{0} %x), kind=kLoop, calls=%fused
  %c = f32[4]{0} custom-call(f32[4]{0} %f), custom_call_target="kernel"
  ROOT %r = (s32[], f32[4]{0}) tuple(s32[] %x, f32[4]{0} %c)
}

%condition (t: (s32[], f32[4])) -> pred[] {
  %t = (s32[], f32[4]{0}) parameter(0)
  ROOT %l = pred[] compare(s32[] %t, s32[] %t), direction=LT
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %b = f32[4]{0} bitcast(f32[4]{0} %p)
  %w = (s32[], f32[4]) while((s32[], f32[4]) %b), condition=%condition, body=%body, x={"known_trip_count":{"n":"3"}}
  %v = (s32[], f32[4]{0}) while((s32[], f32[4]{0}) %w), condition=%condition, body=%body
  ROOT %f = f32[4]{0} fusion(f32[4]{0} %v), kind=kLoop, calls=%fused
}
"""


def output(*token_ids: int) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=token_ids)])


def test_a_wrong_token_is_found_unless_two_were_nearly_equal_and_later_ones_are_not_compared(script: Script) -> None:
    differences = script("device_checks.engine_check").differences
    item = {"output_ids": [5, 6, 7], "top1_margin": [1.0, 0.05, 1.0]}
    assert differences([output(5, 6, 7)], [item]) == ([], 0, 3)
    assert differences([output(5, 9, 1)], [item]) == ([], 1, 2)
    assert differences([output(5, 6, 1), output(5, 6, 7)], [item, item]) == (
        ["prompt 0, token 2: got 1, wanted 7, margin 1"], 0, 6,
    )  # fmt: skip
    assert differences([output(5, 6)], [item])[0] == ["prompt 0: 2 tokens"]


def test_an_engine_with_a_wrong_token_or_with_many_near_ties_is_wrong(script: Script) -> None:
    check = script("device_checks.engine_check")
    right = {"prompt_ids": [1], "output_ids": [5], "top1_margin": [1.0]}
    engine = SimpleNamespace(generate=lambda prompts, params, use_tqdm: [output(5) for _ in prompts])
    assert check.wrong_tokens(engine, [right]) == 0.0
    with pytest.raises(AssertionError, match="1 of 2 outputs are wrong: prompt 1, token 0: got 5, wanted 6"):
        check.wrong_tokens(engine, [right, {**right, "output_ids": [6]}])
    with pytest.raises(AssertionError, match="1 of 2 tokens differ where two are nearly equal"):
        check.wrong_tokens(engine, [right, {**right, "output_ids": [6], "top1_margin": [0.01]}])


def test_no_golden_token_is_a_near_tie_and_prompts_are_cut_in_pieces(script: Script) -> None:
    check = script("device_checks.engine_check")
    items = json.loads(check.GOLDEN.read_text())["items"]
    assert len(items) >= 20
    assert min(margin for item in items for margin in item["top1_margin"]) > check.NEAR_TIE
    lens = [len(item["prompt_ids"]) for item in items]
    assert max(lens) > 2 * check.SMALL_SIZES["max_num_batched_tokens"]
    assert len({token for item in items for token in item["output_ids"]}) > 50


def test_a_device_without_memory_for_the_model_is_told_how_many_bytes_are_missing(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, items = script("device_checks.engine_check"), script("device_checks.items")
    stats = {"bytes_limit": 16 << 30, "bytes_in_use": 1 << 30}
    device = SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(check.jax, "devices", lambda: [device])
    parameters = 8_030_261_248  # Of Llama 3 8B without its norms' gains: 65 × 4096 fewer.
    needed = 2 * (parameters - 65 * 4096) + 8193 * 131072 + check.STEP_BYTES
    missing = needed - (15 << 30)
    with pytest.raises(items.Skipped, match=f"{15 << 30} are free, {missing} are missing"):
        check._check_memory(check.LLAMA_8B, 8193)
    stats["bytes_limit"] = 80 << 30
    check._check_memory(check.LLAMA_8B, 8193)


def test_an_engine_that_another_backend_serves_is_wrong(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens and its speed would be reported under a wrong name."""
    check = script("device_checks.engine_check")
    with check.engine_with(check.TINY_8B, "xla", max_model_len=64, **check.DUMMY) as engine:
        assert engine.backend.name == "xla"
    monkeypatch.setattr(check, "Engine", lambda *_, **options: nullcontext(engine))
    with (
        pytest.raises(AssertionError, match="asked for pallas-gpu, but xla serves"),
        check.engine_with(check.TINY_8B, "pallas-gpu", **check.DUMMY),
    ):
        pass


def test_kernels_are_checked_before_the_gpu_is_opened_as_the_engine_will_ask(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every item with an engine asks ahead; what it asks is remembered, so that the engine starts no child."""
    check, asked = script("device_checks.engine_check"), []
    monkeypatch.setattr(check_process, "check_in_subprocess", asked.append)
    monkeypatch.setattr(check_process, "visible_accelerators", lambda: ["gpu"])
    monkeypatch.setattr(check_process, "_jax_may_use_gpus", lambda: True)
    monkeypatch.setattr(check_process, "load_backend", lambda entry: broken_kernels.Right)
    monkeypatch.setattr(check_process.jax, "__version_info__", (0, 11, 2))
    items = {item.name: item for item in script("gpu_check").ITEMS if item.environment is not None}
    assert set(items) == {
        "engine-small",
        "engine-smollm2",
        "step",
        "engine-8b",
        "engine-8b-no-command-buffers",
        "scores",
    }
    for name in ("step", "engine-8b", "engine-8b-no-command-buffers", "scores", "engine-small"):
        items[name].before_opening()
    *large, small = asked
    assert {request.shape for request in large} == {AttentionShape(32, 8, 128, (None,), "bfloat16")}
    with check.model_folder({**check.LLAMA_8B, "num_hidden_layers": 2}) as folder:
        config = EngineConfig(model=str(folder), **check.DUMMY)
        assert set(large) == {check_request(config, open_model(config).spec, broken_kernels.Right, "gpu")}
    golden = json.loads(check.GOLDEN.read_text())["config"]
    with check.engine_with(golden, "xla", **check.DUMMY | check.SMALL_SIZES) as engine:
        assert small == check_request(engine.config, engine.handle.spec, broken_kernels.Right, "gpu")


def test_launches_are_counted_with_the_trips_of_their_loops(script: Script) -> None:
    found = script("device_checks.step_profile").launches(HLO)
    wanted = {"fusion": 3 + 1 + 1, "custom-call": 3 + 1, "compare": 3 + 1, "while of unknown length": 1}
    assert dict(found) == wanted


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("backend", ["xla", "native"])
def test_golden_tokens_hold_in_bfloat16_under_every_backend_of_a_cpu(script: Script, backend: str) -> None:
    tpu = script("tpu_check")
    session = tpu.session_of(script("device_checks.items").arguments("A run.", ["--interpret"], tpu.ITEMS))
    parts = script("device_checks.engine_check").small_parts(replace(session, backends=(backend,), is_tiny=False))
    assert {name: part.run() for name, part in parts.items()} == {f"engine-small, {backend}": 0.0}
