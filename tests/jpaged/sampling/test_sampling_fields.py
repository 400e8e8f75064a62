"""Every field of SamplingParams through the whole engine: each does what it says, in one batch with all the others.

test_logit_rules.py compares what rules do to logits with numpy; here the engine's own logits of each step go through
the same definition and must give the same tokens.
"""

import dataclasses
import itertools
import json

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import tokenizers

from jpaged import (
    BeamSearchParams,
    ConfigError,
    Engine,
    InvalidRequestError,
    LogitsProcessor,
    RequestOutputKind,
    SamplingParams,
)
from jpaged.sampling.sampling_params import FIELDS

from ..tiny_model import CONFIG, SPECIALS, reference_logits, write_tiny_model
from .test_logit_rules import expected

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")
VOCAB_SIZE = CONFIG["vocab_size"]
PROMPTS = ["hello there", "abcabcabc", "x", "The quick brown fox jumps over the lazy dog, again and again."]
NUM_TOKENS = 24
LIFT = LogitsProcessor(
    "lift", ("lifted_token", "height"), lambda logits, token, height: logits.at[token.astype(jnp.int32)].add(height)
)
EOS = CONFIG["eos_token_id"]


def new_engine(tiny, **options):
    sizes = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "max_model_len": 256, "block_size": 8, "num_blocks": 300}
    sizes |= {"warmup": "off"}
    return Engine(tiny, **{**sizes, "logits_processors": [LIFT], "max_logprobs": -1, **options})


@pytest.fixture(scope="module")
def engine(tiny):
    with new_engine(tiny) as engine:
        yield engine


GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
RANDOM = {"temperature": 1.5, "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 11}
ASKED = {
    "greedy": GREEDY,
    "drawn": RANDOM,
    "n": {**RANDOM, "n": 3},
    "temperature": {**RANDOM, "temperature": 0.3},
    "top_k": {**RANDOM, "top_k": 2},
    "top_p": {**RANDOM, "top_p": 0.3},
    "min_p": {**RANDOM, "min_p": 0.5},
    "seed": {**RANDOM, "seed": 12},
    "presence_penalty": {**GREEDY, "presence_penalty": 2.0},
    "frequency_penalty": {**GREEDY, "frequency_penalty": 1.9},
    "repetition_penalty": {**GREEDY, "repetition_penalty": 1.8},
    "logit_bias": {**GREEDY, "logit_bias": {70: 6.0, 71: 5.5, 40: -100.0}},
    "allowed_token_ids": {**RANDOM, "allowed_token_ids": [66, 67, 90]},
    "bad_words": {**GREEDY, "bad_words": ["gr", "ot", "mv9", "Qa", "zzz"]},
    "extra_args": {**GREEDY, "extra_args": {"lifted_token": 99, "height": 8.0}},
    "min_tokens": {**RANDOM, "ignore_eos": False, "min_tokens": 15, "logit_bias": {EOS: 100.0}},
    "stop": {**RANDOM, "stop": ["a", "e"], "include_stop_str_in_output": True},
    "stop_token_ids": {**RANDOM, "stop_token_ids": list(range(60, 90))},
    "no text": {**RANDOM, "detokenize": False},
    "specials": {
        **RANDOM, "allowed_token_ids": [0, 1, 70], "skip_special_tokens": False, "spaces_between_special_tokens": False,
    },
    "logprobs": {**RANDOM, "logprobs": 3},
    "prompt_logprobs": {**GREEDY, "prompt_logprobs": 2},
    "all rules": {
        **RANDOM, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "min_tokens": 9,
        "logit_bias": {70: 3.0}, "allowed_token_ids": list(range(30, 130)), "bad_words": ["a", "bc"], "logprobs": 0,
        "extra_args": {"lifted_token": 99, "height": 2.0}, "top_p": 0.9, "min_p": 0.01, "top_k": 30,
    },
}  # fmt: skip


def run(engine, asked, prompt=PROMPTS[0]):
    """Return the output of each of these requests, run one after another."""
    return {
        name: engine.generate([prompt], SamplingParams(**fields), use_tqdm=False)[0] for name, fields in asked.items()
    }


def tokens_of(output):
    return [list(one.token_ids) for one in output.outputs]


@pytest.fixture(scope="module")
def alone(engine):
    return run(engine, ASKED)


@pytest.mark.parametrize("options", [{}, {"async_scheduling": False, "num_decode_steps": 1}], ids=["ahead", "in turns"])
def test_requests_of_all_kinds_in_one_batch_give_what_each_gives_alone(tiny, alone, options):
    """All random requests have seeds, since those without one draw by their number."""
    search = BeamSearchParams(beam_width=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    with new_engine(tiny, **options) as engine:
        (search_alone,) = engine.beam_search([PROMPTS[0]], search, use_tqdm=False)
        for name, fields in ASKED.items():
            engine.add_request(name, PROMPTS[0], SamplingParams(**fields))
        engine.add_request("search", PROMPTS[0], search)
        ended, most_running = {}, 0
        while engine.has_unfinished_requests():
            ended |= {output.request_id: output for output in engine.step() if output.finished}
            most_running = max(most_running, engine.stats()["requests_running"])
        assert engine.stats()["recompiles"] == 0
    assert most_running == len(ASKED) + 1, "all of them at the same time"
    for name, output in ended.items():
        wanted = alone.get(name, search_alone)
        assert tokens_of(output) == tokens_of(wanted), name
        for ours, theirs in zip(output.outputs, wanted.outputs, strict=True):
            assert (ours.text, ours.finish_reason, ours.stop_reason) == (
                theirs.text,
                theirs.finish_reason,
                theirs.stop_reason,
            )


LOGITS_RULES = (
    "greedy", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "extra_args",
)  # fmt: skip


@pytest.fixture(scope="module")
def logits_of():
    """Return a function that gives the logits at each position of an output, in float64 by the model's definition."""
    return lambda output: reference_logits([*output.prompt_token_ids, *output.outputs[0].token_ids])


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", LOGITS_RULES)
def test_each_token_of_a_greedy_request_with_rules_is_the_likeliest_by_definition(engine, logits_of, name, prompt):
    params = SamplingParams(**ASKED[name])
    output = engine.generate([prompt], params, use_tqdm=False)[0]
    prompt_ids, token_ids = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    assert len(token_ids) == NUM_TOKENS
    bad_words = [engine.tokenizer.encode(prefix + word) for word in params.bad_words for prefix in ("", " ")]
    num_moved = 0
    for count, row in enumerate(logits_of(output)[len(prompt_ids) - 1 : -1]):
        wanted = ruled_logits(row, params, prompt_ids, token_ids[:count], bad_words)
        best = np.sort(wanted)[::-1]
        num_moved += wanted.argmax() != row.argmax()
        assert token_ids[count] == wanted.argmax() or best[0] - best[1] < 1e-3, (name, count)
    assert (num_moved > 0) == (name != "greedy"), "a rule that changes nothing here is not tested"


def ruled_logits(row, params, prompt_ids, token_ids, bad_words):
    extra = params.extra_args or {}
    named = dataclasses.replace(params, extra_args=None)
    if extra:
        row = row.copy()
        row[int(extra["lifted_token"])] += extra["height"]
    return expected(row, named, prompt_ids, token_ids, bad_words)


def test_logprobs_and_prompt_logprobs_follow_the_definition(tiny, logits_of):
    """The request asks for the whole vocabulary, with the prompt in chunks, and again with a warm prefix cache."""
    prompt = PROMPTS[3]
    for options in ({}, {"long_prefill_token_threshold": 7}):
        with new_engine(tiny, **options) as engine:
            for _ in range(2):
                params = SamplingParams(**{**GREEDY, "logprobs": -1, "prompt_logprobs": -1, "presence_penalty": 1.0})
                output = engine.generate([prompt], params, use_tqdm=False)[0]
                logits = logits_of(output)
                exact = logits - np.log(np.exp(logits - logits.max()).sum(axis=1, keepdims=True)) - logits.max()
                sampled = output.outputs[0]
                total = sum(
                    entry[token].logprob for token, entry in zip(sampled.token_ids, sampled.logprobs, strict=True)
                )
                assert sampled.cumulative_logprob == pytest.approx(total)
                given = [*output.prompt_logprobs[1:], *sampled.logprobs]
                tokens = [*output.prompt_token_ids[1:], *output.outputs[0].token_ids]
                assert output.prompt_logprobs[0] is None
                assert len(given) == len(tokens) == len(exact) - 1
                for entries, token_id, row in zip(given, tokens, exact[:-1], strict=True):
                    assert len(entries) == VOCAB_SIZE
                    assert next(iter(entries)) == token_id
                    assert entries[token_id].rank == 1 + (row > row[token_id]).sum()
                    got = [entries[index].logprob for index in range(VOCAB_SIZE)]
                    np.testing.assert_allclose(got, row, atol=1e-4)


def test_prompts_are_scored_in_as_many_steps_as_they_are_computed_in(tiny, logits_of):
    """A step holds more tokens than a sampler takes rows. With the logprobs of all of the vocabulary that would take
    too much memory, and more steps are made."""
    prompts = [[(7 * at + place) % 250 for at in range(21)] for place in range(3)]
    asked = SamplingParams(**{**GREEDY, "prompt_logprobs": 3})
    steps = {}
    for max_logprobs in (3, -1):
        with new_engine(tiny, max_logprobs=max_logprobs) as engine:
            outputs = engine.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False)
            steps[max_logprobs] = engine.stats()["steps"]
            scored = engine.generate(prompts, asked, use_tqdm=False)
            steps[max_logprobs] = engine.stats()["steps"] - 2 * steps[max_logprobs]
        assert [tokens_of(output) for output in scored] == [tokens_of(output) for output in outputs]
        for output in scored:
            rows = logits_of(output)
            for at, entries in enumerate(output.prompt_logprobs[1:]):
                exact = rows[at] - np.log(np.exp(rows[at] - rows[at].max()).sum()) - rows[at].max()
                for rank, token_id in enumerate(np.argsort(-exact, kind="stable")[:3], 1):
                    assert entries[int(token_id)].rank == rank
                for token_id, entry in entries.items():
                    assert abs(entry.logprob - exact[token_id]) < 1e-4
                assert next(iter(entries)) == output.prompt_token_ids[at + 1]
    assert steps[3] == 0 < steps[-1]


@pytest.mark.parametrize(("temperature", "bias"), [(0.8, 4.0), (0.5, 80.0)], ids=["mild", "all but one underflow"])
def test_processed_logprobs_are_of_the_distribution_that_is_drawn_from(tiny, logits_of, temperature, bias):
    fields = {**RANDOM, "temperature": temperature, "top_k": 5, "logit_bias": {70: bias}, "logprobs": -1}
    with new_engine(tiny, logprobs_mode="processed_logprobs") as engine:
        output = engine.generate([PROMPTS[1]], SamplingParams(**fields), use_tqdm=False)[0]
    rows = logits_of(output)[len(output.prompt_token_ids) - 1 : -1]
    for entries, token_id, row in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, rows, strict=True):
        row[70] += bias
        row = np.where(row >= np.sort(row)[-5], row / temperature, -np.inf)
        row -= np.log(np.exp(row - row.max()).sum()) + row.max()
        got = np.array([entries[index].logprob for index in range(VOCAB_SIZE)])
        assert np.isfinite(got).sum() == 5
        np.testing.assert_allclose(got, row, atol=1e-4)
        assert np.isfinite(entries[token_id].logprob)


def test_each_token_and_each_sample_has_its_own_random_numbers(tiny):
    """Every token comes from the same flat distribution, so that equal numbers would give equal tokens."""
    flat = LogitsProcessor("flat", ("factor",), lambda logits, factor: logits * factor)
    params = SamplingParams(**{**RANDOM, "n": 3, "extra_args": {"factor": 0.0}, "max_tokens": 40})
    with new_engine(tiny, logits_processors=[flat]) as engine:
        samples = tokens_of(engine.generate([PROMPTS[0]], params, use_tqdm=False)[0])
    assert all(len(set(tokens)) > 25 for tokens in samples)
    for one, other in itertools.combinations(samples, 2):
        assert sum(x == y for x, y in zip(one, other, strict=True)) < 5


def test_drawn_tokens_are_among_those_that_truncation_keeps(engine, alone, logits_of):
    """Each token is among those that its rule keeps, and the rule changes some token."""
    for name in ("top_k", "top_p", "min_p", "allowed_token_ids"):
        params, output = SamplingParams(**ASKED[name]), alone[name]
        rows = logits_of(output)[len(output.prompt_token_ids) - 1 : -1]
        for token_id, row in zip(output.outputs[0].token_ids, rows, strict=True):
            shares = np.exp((row - row.max()) / params.temperature)
            shares /= shares.sum()
            kept = {
                "top_k": shares >= np.sort(shares)[-2],
                "top_p": shares >= np.sort(shares)[::-1][np.searchsorted(np.cumsum(np.sort(shares)[::-1]), 0.3)],
                "min_p": shares >= 0.5 * shares.max() - 1e-6,
                "allowed_token_ids": np.isin(np.arange(VOCAB_SIZE), params.allowed_token_ids or ()),
            }[name]
            assert kept[token_id], name
        assert tokens_of(output) != tokens_of(alone["drawn"]), name


def test_samples_and_seeds_differ_and_the_same_seed_gives_the_same_tokens(engine, alone):
    samples = tokens_of(alone["n"])
    assert len({tuple(one) for one in samples}) == 3
    assert samples[0] == tokens_of(alone["drawn"])[0]
    assert tokens_of(alone["seed"]) != tokens_of(alone["drawn"])
    assert tokens_of(run(engine, {"drawn": RANDOM})["drawn"]) == tokens_of(alone["drawn"])


def test_nothing_ends_a_sequence_before_min_tokens(engine):
    """Neither EOS nor a stop id, both the likeliest tokens, nor a stop string in every token ends the sequence."""
    eos_first = {**GREEDY, "ignore_eos": False, "logit_bias": {EOS: 100.0}}
    ended = {"eos": eos_first, "stop id": {**eos_first, "logit_bias": {77: 100.0}, "stop_token_ids": [77]}}
    for name, fields in {**ended, "stop": {**GREEDY, "stop": ["a"], "logit_bias": {"66": 100.0}}}.items():
        for min_tokens in (0, 1, 6, NUM_TOKENS):
            output = engine.generate([PROMPTS[0]], SamplingParams(**fields, min_tokens=min_tokens), use_tqdm=False)[0]
            num_tokens = len(output.outputs[0].token_ids)
            has_room = min_tokens < NUM_TOKENS
            assert num_tokens == (min_tokens + 1 if has_room else NUM_TOKENS), (name, min_tokens)
            if name != "stop":
                assert output.outputs[0].finish_reason == ("stop" if has_room else "length")


def test_rules_that_leave_no_token_end_their_request_and_no_other(engine, alone):
    nothing = {**RANDOM, "allowed_token_ids": [66], "bad_words": ["a"]}
    assert engine.tokenizer.encode("a") == [66]
    with_it = engine.generate(
        [PROMPTS[0]] * 3, [SamplingParams(**fields) for fields in (RANDOM, nothing, ASKED["all rules"])], use_tqdm=False
    )
    assert with_it[1].outputs[0].finish_reason == "error"
    assert "allowed_token_ids, bad_words and min_tokens, together leave no token" in with_it[1].error
    assert tokens_of(with_it[0]) == tokens_of(alone["drawn"])
    assert tokens_of(with_it[2]) == tokens_of(alone["all rules"])


@pytest.mark.parametrize("name", ["greedy", "n", "logprobs", "min_tokens"])
def test_deltas_joined_give_the_whole_output_and_final_only_comes_once(engine, alone, name):
    kinds = {kind: [] for kind in RequestOutputKind}
    for kind in kinds:
        engine.add_request(kind.value, PROMPTS[0], SamplingParams(**ASKED[name], output_kind=kind))
    while engine.has_unfinished_requests():
        for output in engine.step():
            kinds[RequestOutputKind(output.request_id)].append(output)
    (final,) = kinds[RequestOutputKind.FINAL_ONLY]
    whole = kinds[RequestOutputKind.CUMULATIVE][-1]
    assert final.outputs == whole.outputs
    assert tokens_of(final) == tokens_of(alone[name])
    for index, wanted in enumerate(whole.outputs):
        deltas = [one for output in kinds[RequestOutputKind.DELTA] for one in output.outputs if one.index == index]
        assert "".join(one.text for one in deltas) == wanted.text
        assert sum((one.token_ids for one in deltas), ()) == wanted.token_ids
        if wanted.logprobs is not None:
            assert sum((one.logprobs for one in deltas), ()) == wanted.logprobs
        assert [one.finish_reason for one in deltas] == [None] * (len(deltas) - 1) + [wanted.finish_reason]
        assert all(one.token_ids for one in deltas[:-1]), "a delta of nothing"


def test_a_stream_of_samples_joined_gives_their_last_outputs(engine, alone):
    names = ["greedy", "n", "logprobs", "min_tokens"]
    for name in names:
        engine.add_request(name, PROMPTS[0], SamplingParams(**ASKED[name]))
    steps = []
    ended = {output.request_id: output for _, output in engine.run_requests(stream=steps.append)}
    for name in names:
        assert tokens_of(ended[name]) == tokens_of(alone[name])
        for wanted in ended[name].outputs:
            deltas = [one for step in steps for one in step if (one.request_id, one.index) == (name, wanted.index)]
            assert len(deltas) > 1
            assert "".join(one.text for one in deltas) == wanted.text
            assert sum((one.token_ids for one in deltas), ()) == wanted.token_ids
            assert (wanted.logprobs or ()) == sum((one.logprobs or () for one in deltas), ())
            assert [one.finish_reason for one in deltas] == [None] * (len(deltas) - 1) + [wanted.finish_reason]
            assert all(one.token_ids for one in deltas[:-1]), "a delta of nothing"


def test_spaces_between_special_tokens(tmp_path):
    """The tokenizer writes spaces, and the engine draws only special tokens."""
    model = write_tiny_model(tmp_path / "spaced")
    vocab = {token: index for index, token in enumerate([*SPECIALS, "a", *(f"w{index}" for index in range(255))])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(SPECIALS)
    backend.save(str(model / "tokenizer.json"))
    fields = {**RANDOM, "max_tokens": 5, "allowed_token_ids": [0, 1], "skip_special_tokens": False}
    with new_engine(str(model)) as engine:
        texts = [
            engine.generate(["w1 w2"], SamplingParams(**fields, spaces_between_special_tokens=spaces), use_tqdm=False)
            for spaces in (True, False)
        ]
    with_spaces, without = (output[0].outputs[0].text for output in texts)
    assert with_spaces.count(" ") >= 4
    assert without.lstrip() == with_spaces.replace(" ", "")


def test_an_output_that_was_returned_does_not_change_later(engine):
    engine.add_request("r", PROMPTS[0], SamplingParams(**GREEDY, logprobs=1))
    given = []
    while engine.has_unfinished_requests():
        given += engine.step()
    for count, output in enumerate(given, 1):
        assert len(output.outputs[0].token_ids) == len(output.outputs[0].logprobs) == count
        assert given[-1].outputs[0].text.startswith(output.outputs[0].text)
        assert output.outputs[0] == output.outputs[0]


def test_every_field_is_tested_here_or_in_a_file_of_its_own():
    elsewhere = {
        # test_detokenizer.py, test_engine.py, research/test_arrays_and_logprobs.py, test_structured_outputs.py,
        # text/grammar/test_thought_grammar.py
        "stop", "stop_token_ids", "include_stop_str_in_output", "detokenize", "skip_special_tokens", "log_kept_mass",
        "structured_outputs", "thinking_token_budget",
    }  # fmt: skip
    here = {"output_kind", "spaces_between_special_tokens"} | {name for fields in ASKED.values() for name in fields}
    assert set(FIELDS) == elsewhere | here


def test_token_ids_outside_the_vocabulary_and_too_many_bad_tokens_are_refused(engine):
    for fields, words in {
        "logit_bias": ({"logit_bias": {VOCAB_SIZE: 1.0}}, f"token id {VOCAB_SIZE}, out of vocabulary"),
        "allowed_token_ids": ({"allowed_token_ids": [VOCAB_SIZE]}, f"token id {VOCAB_SIZE}, out of vocabulary"),
        "bad_words": ({"bad_words": ["x" * 600]}, "got 1201 tokens"),
        "extra_args": ({"extra_args": {"unknown": 1}}, "logits_processors: lifted_token, height"),
        "logprobs": ({"logprobs": VOCAB_SIZE + 1}, f"at most the size of the vocabulary, {VOCAB_SIZE}"),
    }.values():
        with pytest.raises(InvalidRequestError, match=words):
            engine.generate([PROMPTS[0]], SamplingParams(**fields), use_tqdm=False)


@pytest.mark.parametrize("options", [{}, {"async_scheduling": False}], ids=["ahead", "in turns"])
def test_the_first_delta_comes_before_the_third_step(tiny, options):
    with new_engine(tiny, **options) as engine:
        params = SamplingParams(**RANDOM, output_kind=RequestOutputKind.DELTA)
        engine.add_request("a", PROMPTS[3], params)
        first = next(number for number in range(1, 9) if any(one.outputs[0].token_ids for one in engine.step()))
        assert first < 3
        engine.abort_request("a")


def test_a_stream_of_deltas_has_the_prompts_logprobs_once(engine):
    params = {**GREEDY, "prompt_logprobs": 2, "max_tokens": 6}
    (whole,) = engine.generate([PROMPTS[3]], SamplingParams(**params), use_tqdm=False)
    engine.add_request("a", PROMPTS[3], SamplingParams(**params, output_kind=RequestOutputKind.DELTA))
    received = []
    while engine.has_unfinished_requests():
        received += [output.prompt_logprobs for output in engine.step() if output.prompt_logprobs is not None]
    assert received == [whole.prompt_logprobs]


def test_an_output_becomes_plain_data(engine):
    (output,) = engine.generate([PROMPTS[0]], SamplingParams(**{**RANDOM, "logprobs": 1}), use_tqdm=False)
    record = json.loads(json.dumps(msgspec.to_builtins(output, str_keys=True)))
    assert record["outputs"][0]["text"] == output.outputs[0].text
    assert record["outputs"][0]["token_ids"] == list(output.outputs[0].token_ids)
    assert set(record["outputs"][0]) == {field.name for field in dataclasses.fields(output.outputs[0])}
    assert len(record["outputs"][0]["logprobs"]) == NUM_TOKENS
    first = next(iter(record["outputs"][0]["logprobs"][0].values()))
    assert set(first) == {"logprob", "rank", "decoded_token"}


def test_min_tokens_hold_back_eos_even_where_ignore_eos_is_set(engine):
    fields = {**GREEDY, "min_tokens": 5, "logit_bias": {EOS: 100.0}}
    (output,) = engine.generate([PROMPTS[0]], SamplingParams(**fields), use_tqdm=False)
    (token_ids,) = tokens_of(output)
    assert [token == EOS for token in token_ids] == [False] * 5 + [True] * (NUM_TOKENS - 5)


WRONG_PROCESSORS = {
    "makes less": (lambda logits, x: logits[:5], "for a row of logits, allowed: float32 of shape \\(258,\\)"),
    "makes one": (lambda logits, x: logits.sum(), "allowed: float32 of shape"),
    "makes integers": (lambda logits, x: logits.astype(jnp.int32), "allowed: float32 of shape"),
    "makes nothing": (lambda logits, x: None, "returns None for a row of logits"),
    "cannot be traced": (lambda logits, x: logits if x > 0 else -logits, "cannot be traced by JAX: Tracer"),
    "takes fewer arguments": (lambda logits: logits, "cannot be traced by JAX: TypeError"),
}


@pytest.mark.parametrize(("apply", "words"), WRONG_PROCESSORS.values(), ids=WRONG_PROCESSORS.keys())
def test_a_processor_that_jax_cannot_apply_ends_the_start_by_its_name(tiny, apply, words):
    with pytest.raises(ConfigError, match=f"logits_processors: 'wrong' .*{words}"):
        Engine(tiny, logits_processors=[LogitsProcessor("wrong", ("x",), apply)])


@pytest.mark.parametrize("word", ["\ud800", "ok\udfff"])
def test_bad_words_that_are_not_unicode_are_refused_by_field(engine, word):
    with pytest.raises(InvalidRequestError, match=r"bad_words: .*Unicode") as caught:
        engine.generate(["x"], SamplingParams(bad_words=["fine", word]), use_tqdm=False)
    assert caught.value.param == "bad_words"
