"""Beam search against a plain version of its rules over the tiny model, against transformers on the default model
(golden file), and its use of pages."""

import json
from pathlib import Path

import numpy as np
import pytest

from jpaged import BeamSearchParams, ConfigError, Engine, InvalidRequestError, SamplingParams
from jpaged.commands.flags import beam_flags, parse_generate
from jpaged.sampling.sampling_params import FIELDS

from .. import tiny_model
from ..tiny_model import reference_logits, write_tiny_model

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")
EOS_IDS = (0, 26, 83, 170, 192)
"""They are so many that beams end often."""
PROMPTS = ["hello there", "abcabcabc", "x", "The quick brown fox"]
SIZES = tiny_model.SIZES | {"max_num_batched_tokens": 128}
GOLDEN = Path(__file__).parents[2] / "golden" / "beams.json"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    config = {"eos_token_id": list(EOS_IDS), "max_position_embeddings": 1024}
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), **config))


def new_engine(tiny, **options):
    return Engine(tiny, **{**SIZES, "max_logprobs": -1, **options})


@pytest.fixture(scope="module")
def engine(tiny):
    with new_engine(tiny) as engine:
        yield engine


def plain_search(prompt_ids, params, end_ids):
    """Search by the rules, over all continuations of all beams; return (tokens, score, log probability) of each."""
    running, ended = [((), 0.0)], []
    width = params.beam_width
    for length in range(1, params.max_tokens + 1):
        continuations = []
        for tokens, total in running:
            row = reference_logits([*prompt_ids, *tokens])[-1]
            row = row - row.max() - np.log(np.exp(row - row.max()).sum())
            continuations += [((*tokens, token), total + logprob) for token, logprob in enumerate(row.tolist())]
        continuations.sort(key=lambda one: -one[1])
        considered = continuations[: max(2, 1 + len(end_ids)) * width]
        is_end = [tokens[-1] in end_ids or length == params.max_tokens for tokens, _ in considered]
        ended += [
            (tokens, total / length**params.length_penalty, total)
            for (tokens, total), ends in zip(considered[:width], is_end, strict=False)
            if ends
        ]
        ended = sorted(ended, key=lambda one: -one[1])[:width]
        running = [one for one, ends in zip(considered, is_end, strict=True) if not ends][:width]
        if not running:
            break
        if len(ended) == width:
            max_len = params.max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
            if params.early_stopping is True or running[0][1] / max_len**params.length_penalty <= ended[-1][1]:
                break
    return ended


SEARCHES = [
    {"beam_width": 1},
    {"beam_width": 2},
    {"beam_width": 4},
    {"beam_width": 7},
    {"beam_width": 3, "length_penalty": 0.0},
    {"beam_width": 3, "length_penalty": 2.0, "early_stopping": "never"},
    {"beam_width": 2, "max_tokens": 20, "early_stopping": "never"},
    {"beam_width": 3, "length_penalty": -1.0},
    {"beam_width": 4, "early_stopping": True},
    {"beam_width": 4, "ignore_eos": True},
    {"beam_width": 4, "max_tokens": 1},
]


def check(output, params):
    end_ids = () if params.ignore_eos else EOS_IDS
    wanted = plain_search(list(output.prompt_token_ids), params, end_ids)
    assert output.finished
    assert [one.index for one in output.outputs] == list(range(params.beam_width))
    for got, (tokens, score, total) in zip(output.outputs, wanted, strict=True):
        assert got.token_ids == tokens
        assert got.cumulative_logprob == pytest.approx(total, abs=1e-4)
        assert got.cumulative_logprob / len(tokens) ** params.length_penalty == pytest.approx(score, abs=1e-4)
        assert got.finish_reason == ("stop" if tokens[-1] in end_ids else "length")
    return sum(one.finish_reason == "stop" for one in output.outputs)


@pytest.mark.parametrize("asked", SEARCHES, ids=str)
def test_a_search_finds_the_beams_that_its_rules_give(engine, asked):
    params = BeamSearchParams(**{"max_tokens": 8, **asked})
    outputs = engine.beam_search(PROMPTS, params, use_tqdm=False)
    num_stopped = sum(check(output, params) for output in outputs)
    assert (num_stopped > 0) != params.ignore_eos
    assert engine.stats()["blocks_used"] == engine.stats()["recompiles"] == 0


def test_a_search_that_never_stops_early_finds_beams_that_another_misses(engine):
    found = []
    for early_stopping in (False, "never"):
        params = BeamSearchParams(beam_width=2, max_tokens=20, early_stopping=early_stopping)
        outputs = engine.beam_search(PROMPTS, params, use_tqdm=False)
        found.append([[one.token_ids for one in output.outputs] for output in outputs])
    assert found[0] != found[1]


def test_the_text_of_a_beam_is_that_of_its_tokens_without_the_end_token(engine):
    for output in engine.beam_search(PROMPTS, BeamSearchParams(beam_width=4, max_tokens=8), use_tqdm=False):
        for one in output.outputs:
            shown = one.token_ids[:-1] if one.finish_reason == "stop" else one.token_ids
            assert one.text == engine.tokenizer.decode(shown)


def answers(outputs):
    return [[(one.token_ids, one.finish_reason) for one in output.outputs] for output in outputs]


WIDE = BeamSearchParams(beam_width=4, max_tokens=30, ignore_eos=True)
LONG_PROMPTS = [[2 + (7 * index + 3 * place * place) % 250 for place in range(60)] for index in range(5)]


@pytest.fixture(scope="module")
def solo_beams(engine):
    return [answers(engine.beam_search([prompt], WIDE, use_tqdm=False))[0] for prompt in LONG_PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 36},
        {"num_blocks": 36, "preemption_mode": "swap", "num_host_blocks": 200},
        {"async_scheduling": False, "enable_prefix_caching": False, "long_prefill_token_threshold": 16},
        {"enable_chunked_prefill": False},
    ],
    ids=str,
)  # fmt: skip
def test_other_requests_preemption_and_scheduling_options_change_no_beam(tiny, solo_beams, options):
    """The other requests are greedy ones and ones that sample."""
    with new_engine(tiny, **options) as engine:
        prompts, params = [], []
        for index, prompt in enumerate(LONG_PROMPTS):
            other = SamplingParams(temperature=float(index % 2), seed=index, max_tokens=40, ignore_eos=True)
            prompts += [prompt, prompt[:20]]
            params += [WIDE, other]
        outputs = engine.generate(prompts, params, use_tqdm=False)
        stats = engine.stats()
    assert answers(outputs[::2]) == solo_beams
    assert (stats["preemptions"] > 0) == ("num_blocks" in options)
    assert stats["recompiles"] == stats["blocks_used"] == 0


def test_beams_share_the_pages_of_their_prompt_and_copy_those_that_they_write(tiny):
    prompt = [2 + place * place % 250 for place in range(96)]
    with new_engine(tiny) as engine:
        engine.beam_search([prompt], BeamSearchParams(beam_width=1, max_tokens=32, ignore_eos=True), use_tqdm=False)
        solo = engine.stats()["peak_blocks_used"]
    with new_engine(tiny) as engine:
        engine.beam_search([prompt], BeamSearchParams(beam_width=4, max_tokens=32, ignore_eos=True), use_tqdm=False)
        stats = engine.stats()
    assert solo == -(-(96 + 31) // 8)
    assert stats["peak_blocks_used"] < 0.6 * 4 * solo
    assert stats["copies"] > 0


def test_an_abort_frees_all_beams(engine):
    engine.add_request("beams", PROMPTS[0], WIDE)
    for _ in range(6):
        assert engine.step() == []
    assert engine.stats()["blocks_used"] > 0
    engine.abort_request("beams")
    assert not engine.has_unfinished_requests()
    engine.generate([PROMPTS[1]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert engine.stats()["blocks_used"] == 0


class InjectedError(Exception):
    pass


def test_a_step_that_fails_changes_no_beam(engine, solo_beams):
    """Several steps of a search fail, each in a run of its own, and are computed anew."""
    dispatch = engine.runner.dispatch
    for failing in (1, 2, 5, 20):
        count = 0

        def faulty(step, failing=failing):
            nonlocal count
            count += 1
            if count == failing:
                raise InjectedError
            return dispatch(step)

        engine.runner.dispatch = faulty
        engine.add_request("beams", LONG_PROMPTS[0], WIDE)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        engine.runner.dispatch = dispatch
        assert count > failing
        assert answers(outputs) == [solo_beams[0]]


def test_a_search_that_cannot_run_is_refused_by_the_name_of_its_parameter(engine, tiny):
    with pytest.raises(InvalidRequestError, match="beam_width: got 9, allowed: at most max_num_seqs, 8") as caught:
        engine.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=9, max_tokens=4), use_tqdm=False)
    assert caught.value.param == "beam_width"
    with pytest.raises(InvalidRequestError, match=r"params: got .*allowed: BeamSearchParams"):
        engine.beam_search([PROMPTS[0]], SamplingParams(), use_tqdm=False)
    engine.add_request("beams", PROMPTS[0], WIDE)
    with pytest.raises(InvalidRequestError, match="request_id: got a beam search"):
        engine.fork("beams")
    engine.abort_request("beams")
    with new_engine(tiny, max_logprobs=8) as few:
        with pytest.raises(InvalidRequestError, match="beam_width: got 4, which needs the logprobs of 9 tokens"):
            few.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=4, max_tokens=4), use_tqdm=False)
        few.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=3, max_tokens=4), use_tqdm=False)


WRONG = {
    "beam_width": [0, -1, 129, None, 1.5, True],
    "max_tokens": [0, -1, 1.5, True],
    "ignore_eos": [0, None],
    "temperature": [0.5, -1, 1.0, None],
    "length_penalty": [11, -11, None, float("nan"), "1"],
    "early_stopping": [None, "always", 2, ""],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_refused_by_field_and_range(name, value):
    with pytest.raises(InvalidRequestError, match=f"^{name}: got .*, allowed: ") as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, name: value})
    assert caught.value.param == name


def test_an_unknown_parameter_is_refused_with_the_nearest_name():
    with pytest.raises(InvalidRequestError, match=r"^beam_widht: unknown parameter; did you mean beam_width\?"):
        BeamSearchParams(beam_widht=2, max_tokens=4)


def test_flags_of_beam_search_become_its_parameters():
    def flags(*words):
        return beam_flags(parse_generate(["hello", *words]))

    assert flags() is None
    assert flags("--beam-width", "4", "-n", "7") == {"beam_width": 4, "max_tokens": 7}
    assert flags("--beam-width", "2", "--length-penalty", "0.5", "--ignore-eos") == {
        "beam_width": 2,
        "length_penalty": 0.5,
        "ignore_eos": True,
    }
    with pytest.raises(ConfigError, match="--length-penalty: has no effect without --beam-width"):
        flags("--length-penalty", "0.5")
    for name in set(FIELDS) & {"temperature", "top_p", "seed", "n", "logprobs"}:
        flag = "--num-samples" if name == "n" else f"--{name.replace('_', '-')}"
        with pytest.raises(ConfigError, match=f"^{flag}: has no effect with --beam-width"):
            flags("--beam-width", "2", flag, "1")


@pytest.mark.slow
def test_the_default_model_searches_as_transformers_does():
    """Sequences are equal, and scores to 1e-4."""
    golden = json.loads(GOLDEN.read_text())
    assert len(golden["items"]) == 20
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 256}
    sizes |= {"num_blocks": 257, "block_size": 32, "warmup": "off"}
    with Engine(**sizes) as engine:
        prompts, searches = [], []
        for item in golden["items"]:
            for search in item["searches"]:
                prompts.append(item["prompt_ids"])
                names = ("beam_width", "length_penalty", "early_stopping")
                params = BeamSearchParams(max_tokens=golden["max_tokens"], **{name: search[name] for name in names})
                searches.append((search, params))
        assert {search["beam_width"] for search, _ in searches} >= {1, 2, 4}
        for output, (search, params) in zip(
            engine.beam_search(prompts, [params for _, params in searches], use_tqdm=False), searches, strict=True
        ):
            assert [list(one.token_ids) for one in output.outputs] == search["sequences"]
            lengths = np.array([len(one.token_ids) for one in output.outputs])
            sums = np.array([one.cumulative_logprob for one in output.outputs])
            theirs = np.array(search["scores"])
            if params.length_penalty >= 1:
                np.testing.assert_allclose(sums / lengths**params.length_penalty, theirs, atol=1e-4, rtol=0)
            else:
                # The score is then the sum itself or larger: torch's differs from float64's by up to 1.6e-5 of it.
                np.testing.assert_allclose(sums, theirs * lengths**params.length_penalty, atol=1e-4, rtol=2e-5)
        assert engine.stats()["recompiles"] == 0
