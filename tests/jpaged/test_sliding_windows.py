"""Models with sliding windows give pages back as their windows pass, and draw what they draw with all of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged import BeamSearchParams, Engine, RequestOutput, SamplingParams
from jpaged.kv_cache.page_arithmetic import PageArithmetic

from .host_requests import new_request
from .tiny_model import SIZES, reference_logits, write_tiny_model

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")
Z, WINDOW, CHUNK = 4, 8, 7
"""Tokens per page, of a window, and of a chunk: some chunks begin at the last token of a page."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, seed=5, n=3)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=20)
PROMPTS = [[2 + (37 * index + 5 * at * at + 11 * at) % 250 for at in range(41 + index)] for index in range(8)]
LONG = [2 + (7 * at * at + 3 * at) % 250 for at in range(120)]
"""15 windows; 18 with the output."""
CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "on both layers": ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, 21),
    "on one layer": (
        {
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        61,
    ),
}  # fmt: skip
"""Where there are windows → config, and pages that hold the longest request, but not all of `PROMPTS` together."""


@dataclass(frozen=True)
class Model:
    """A model of two layers with windows, and its engines."""

    path: str
    windows: tuple[int | None, ...]
    num_blocks: int

    def engine(self, **options: Any) -> Engine:
        sizes = {
            **SIZES, "max_model_len": 160, "block_size": Z, "num_blocks": self.num_blocks, "num_host_blocks": 201,
            "long_prefill_token_threshold": CHUNK, "num_decode_steps": 4, "preemption_mode": "recompute",
            "attention_backend": "native",
        }  # fmt: skip
        return Engine(self.path, **sizes | options)


@pytest.fixture(scope="module", params=[pytest.param("on both layers", marks=pytest.mark.slow), "on one layer"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    config, num_blocks = CONFIGS[request.param]
    path = write_tiny_model(tmp_path_factory.mktemp("windows"), sliding_window=WINDOW, **config)
    return Model(str(path), (None if "layer_types" in config else WINDOW, WINDOW), num_blocks)


@pytest.fixture(scope="module")
def engine(model: Model) -> Iterator[Engine]:
    with model.engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def with_all_pages(model: Model) -> dict[Any, list[list[tuple[int, ...]]]]:
    """Return what the model draws while one page holds a whole sequence, so that no window passes a page."""
    with model.engine(block_size=256, num_blocks=33) as engine:
        return {kind: drawn(engine, kind) for kind in (GREEDY, SAMPLED, BEAMS)}


def drawn(engine: Engine, kind: SamplingParams | BeamSearchParams) -> list[list[tuple[int, ...]]]:
    """Return the tokens of each output of the prompts."""
    if isinstance(kind, BeamSearchParams):
        outputs: list[RequestOutput] = engine.beam_search(PROMPTS[:3], kind, use_tqdm=False)
    else:
        outputs = engine.generate(PROMPTS, kind, use_tqdm=False)
    return [[one.token_ids for one in output.outputs] for output in outputs]


def check_long(engine: Engine, model: Model) -> int:
    """Check that the long prompt's tokens are those of float64; return the most pages that were used."""
    (output,) = engine.generate([LONG], GREEDY, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    logits = reference_logits([*LONG, *tokens], windows=model.windows)[len(LONG) - 1 : -1]
    assert tokens == tuple(np.argmax(logits, axis=-1).tolist())
    assert engine.stats()["blocks_used"] == 0
    return int(engine.stats()["peak_blocks_used"])


@pytest.mark.slow
def test_a_long_context_takes_the_pages_that_are_counted(model: Model, engine: Engine) -> None:
    """Full attention takes 30 pages for the prompt and 36 in the end, a window what it sees and what is computed."""
    arithmetic = engine.blocks.arithmetic
    assert arithmetic == PageArithmetic(tuple(dict.fromkeys(model.windows)), Z, CHUNK)
    num_full = arithmetic.windows.count(None)
    with model.engine(async_scheduling=False, num_decode_steps=1, attention_backend="xla") as one_by_one:
        # A window sees 2 pages before the current one; a chunk touches 3, a decoded token 1.
        assert check_long(one_by_one, model) == max(30 * num_full + 2 + 3, 36 * num_full + 2 + 1)
    most = arithmetic.max_pages(0, [len(LONG) + 24 - 1], num_steps=2)
    assert most == 36 * num_full + 2 + 5
    assert 36 * num_full + 2 + 1 <= check_long(engine, model) <= most < 36 * len(model.windows)


def test_samples_forks_beams_and_recomputed_requests_draw_the_same_tokens(
    engine: Engine, with_all_pages: dict[Any, list[list[tuple[int, ...]]]]
) -> None:
    for kind, wanted in with_all_pages.items():
        assert drawn(engine, kind) == wanted
    stats = engine.stats()
    assert stats["preemptions_recompute"] > 0
    assert stats["copies"] > 0
    assert (stats["blocks_used"], stats["recompiles"]) == (0, 0)


def test_swapped_requests_draw_the_same_tokens(
    model: Model, with_all_pages: dict[Any, list[list[tuple[int, ...]]]]
) -> None:
    with model.engine(preemption_mode="swap") as engine:
        for kind in (GREEDY, SAMPLED):
            assert drawn(engine, kind) == with_all_pages[kind]
        stats = engine.stats()
        assert stats["preemptions_swap"] > 0
        assert (stats["blocks_used"], stats["host_blocks_used"], stats["recompiles"]) == (0, 0, 0)


def test_a_prompt_that_comes_again_is_found_but_for_its_last_page_wherever_it_ends(
    engine: Engine, with_all_pages: dict[Any, list[list[tuple[int, ...]]]]
) -> None:
    for prompt, wanted in list(zip(PROMPTS, with_all_pages[GREEDY], strict=True))[:Z]:
        engine.generate([prompt], GREEDY, use_tqdm=False)
        (again,) = engine.generate([prompt], GREEDY, use_tqdm=False)
        assert [again.outputs[0].token_ids] == wanted
        assert again.num_cached_tokens == (len(prompt) - 1) // Z * Z


def test_a_pinned_prefix_serves_prompts_that_go_on_for_longer_than_a_window(
    engine: Engine, with_all_pages: dict[Any, list[list[tuple[int, ...]]]]
) -> None:
    """The window passes the pinned pages while the first of these prompts is computed, before they may be published."""
    prompt, (wanted,) = PROMPTS[7], with_all_pages[GREEDY][7]
    beginning = prompt[: 5 * Z]
    engine.reset_prefix_cache()
    assert engine.pin_prefix(beginning) == 0
    engine.generate([[*beginning, *LONG[:40]]], GREEDY, use_tqdm=False)
    assert engine.stats()["blocks_used"] == engine.blocks.num_pinned > 0
    engine.generate(PROMPTS[:7], GREEDY, use_tqdm=False)
    (output,) = engine.generate([prompt], GREEDY, use_tqdm=False)
    assert (output.num_cached_tokens, output.outputs[0].token_ids) == (5 * Z, wanted)
    engine.unpin_prefix(beginning)
    assert engine.stats()["blocks_used"] == 0


GEMMA = str(Path(__file__).parents[1] / "golden" / "families" / "gemma3")
"""Five layers with a window of 8 and one of full attention: six page-table groups."""
DRAWN = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, seed=5, detokenize=False)


@pytest.mark.slow
def test_prompts_of_one_beginning_and_their_forks_draw_what_each_draws_alone_with_windows_as_in_gemma_3() -> None:
    prompts = [[1 + (7 * at * at + 3 * at) % 90 for at in range(24)] for _ in range(4)]
    for index, prompt in enumerate(prompts):
        prompt += [2 + (11 * at * at + 13 * index + at) % 90 for at in range(12 + index)]
    sizes = SIZES | {"max_model_len": 64, "skip_tokenizer_init": True, "attention_backend": "native"}
    forks: dict[tuple[str, int], tuple[int, ...]] = {}
    """(request, sample) → the output that the sample begins with."""
    options = {"block_size": Z, "long_prefill_token_threshold": CHUNK, "num_decode_steps": 3}
    with Engine(GEMMA, **sizes | options) as engine:
        assert engine.blocks.arithmetic.windows == (None, *[8] * 5)
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), {"prompt_token_ids": prompt}, DRAWN)
        outputs: dict[str, RequestOutput] = {}
        for request_id in ("0", "1", "0"):  # The last time the first one has passed a window since its first fork.
            while len(forks) < 3:
                outputs |= {output.request_id: output for output in engine.step()}
                before = outputs[request_id].outputs[0].token_ids if request_id in outputs else ()
                if len(before) > 4 * len(forks):
                    forks[request_id, *engine.fork(request_id)] = before
                    break
        outputs |= {output.request_id: output for output in engine.run_until_done()}
        stats = engine.stats()
    assert stats["copies"] > 0
    assert (stats["blocks_used"], stats["recompiles"], stats["preemptions"]) == (0, 0, 0)
    assert [outputs[str(index)].num_cached_tokens for index in range(4)] == [0, 24, 24, 24]
    drawn = {(name, one.index): one.token_ids for name, output in outputs.items() for one in output.outputs}
    assert drawn.keys() == {(str(index), 0) for index in range(4)} | forks.keys()
    one_by_one = {"block_size": 64, "async_scheduling": False, "num_decode_steps": 1, "enable_prefix_caching": False}
    with Engine(GEMMA, **sizes | one_by_one) as engine:
        for (name, sample), tokens in drawn.items():
            before = forks.get((name, sample), ())
            request = new_request(
                prompts[int(name)], params=DRAWN, max_tokens=16, sample_indices=[sample], num_groups=6
            )
            sequence = request.sequences[0]
            sequence.token_ids.extend(before)
            sequence.num_tokens = len(sequence.token_ids)
            (output,) = engine.run_until_done([request])
            assert output.outputs[0].token_ids == tokens, (name, sample)
