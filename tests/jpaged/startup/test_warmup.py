"""A start compiles everything, nothing, or the programs that known requests need first."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jpaged import Engine, EngineConfig, SamplingParams
from jpaged.sampling.sampling_params import SampleMode
from jpaged.startup.sizing.sizes import Demand
from jpaged.startup.warmup import warmup_keys

from ..symbolic import Host
from ..tiny_model import write_tiny_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)


def test_warmup_full_compiles_the_plan_at_start_and_off_compiles_nothing(tmp_path: Path) -> None:
    """The plan of one bucket is small: allocate, tables, set_rules, copy, forward, sample."""
    tiny = str(write_tiny_model(tmp_path))
    sizes = {"max_num_seqs": 1, "max_model_len": 64, "deterministic": True}
    with Engine(tiny, **sizes, warmup="full") as engine:
        stats = engine.stats()
        assert stats["executables"] == stats["planned_executables"] == 6
    with Engine(tiny, **sizes, warmup="off") as engine:
        assert engine.stats()["executables"] == 1, "the program that allocates the device state"
        engine.generate([[5, 6, 7]], PARAMS, use_tqdm=False)
        assert engine.stats()["executables"] == 3, "and those that computed the step"


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "options"),
    [(1024, {}), (64, {}), (1024, {"long_prefill_token_threshold": 48}), (1024, {"enable_chunked_prefill": False})],
)
def test_the_forward_programs_of_a_known_prompt_are_exactly_those_that_its_first_token_needs(
    max_num_batched_tokens: int, options: dict[str, Any]
) -> None:
    """This holds for every prompt length, also where a step leaves tokens to the next one rather than pad a bucket."""
    config = EngineConfig(max_num_batched_tokens=max_num_batched_tokens, **options)
    for prompt_len in range(1, 255):
        host = Host(
            max_num_seqs=1, max_num_batched_tokens=max_num_batched_tokens, max_model_len=256, num_blocks=65, **options
        )
        builder, demands = host.core.builder, [Demand(prompt_len, 2)]
        programs: Any = SimpleNamespace(lower={("decode", 1, SampleMode.RANDOM): None}, lower_masked={})
        first, deferred = warmup_keys(config, programs, builder, demands, [SampleMode.GREEDY], is_cpu=True)
        assert deferred == [("decode", 1, SampleMode.RANDOM)]
        request = host.add(range(20, 20 + prompt_len), max_tokens=2, params=PARAMS)
        used = []
        while not request.sequences[0].num_output_tokens:
            host.dispatch()
            layout = host.core.in_flight[-1].inputs.layout
            used.append(("forward_decodes" if layout.decodes_only else "forward", layout.num_tokens))
            host.retire()
        assert first == [*dict.fromkeys(used), ("sample", 1, SampleMode.RANDOM)]


def test_a_device_compiles_what_unknown_requests_need_first_first() -> None:
    """The largest forwards, then samplers and decode programs, those for few rows first; page moves come last."""
    host = Host(max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=4096, num_blocks=65)
    decode, sample = (("decode", 16, SampleMode.FULL), ("sample", 8, SampleMode.RANDOM))
    wanted = [("allocate",), ("forward", 2048), ("forward", 1024), sample, decode, ("forward", 512), ("copy",)]
    masked = ("sample_masked", 8, SampleMode.RANDOM)
    programs: Any = SimpleNamespace(lower=dict.fromkeys(sorted(wanted, key=str)), lower_masked={masked: None})
    found = warmup_keys(EngineConfig(), programs, host.core.builder, [], [], is_cpu=False)
    assert found == ([], [*wanted, masked])
    found = warmup_keys(EngineConfig(warmup="full"), programs, host.core.builder, [], [], is_cpu=False)
    assert found == (wanted, [masked]), "a start without grammars waits for none of theirs"
    demands = [Demand(8, 2, has_grammar=True), Demand(8, 2)]
    host.core.builder.buckets = replace(host.core.builder.buckets, masks_apart=True)
    first, _ = warmup_keys(EngineConfig(), programs, host.core.builder, demands, [SampleMode.RANDOM], is_cpu=True)
    assert first[-2:] == [("sample", 8, SampleMode.RANDOM), ("sample_masked", 8, SampleMode.RANDOM)]


def test_the_first_token_of_a_known_prompt_waits_for_no_compilation_after_the_start(tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(write_tiny_model(tmp_path)), max_num_seqs=1, max_num_batched_tokens=64, max_model_len=128
    )
    with Engine.from_engine_args(config, demands=[Demand(80, 2)], modes=[SampleMode.GREEDY]) as engine:
        plan = engine.runner.compile_plan
        plan.wait()
        num_compiled, waited_s = plan.num_compiled, plan.waited_s
        engine.add_request("a", {"prompt_token_ids": [5] * 80}, PARAMS)
        while not engine.step():
            pass
        assert plan.waited_s == waited_s
        assert num_compiled <= 5, "not the whole plan"
