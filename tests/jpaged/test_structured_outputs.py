"""Structured outputs in the engine: every output that stops validates, whatever else is computed and happens."""

import gc
import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from jpaged import (
    BeamSearchParams,
    Engine,
    InvalidRequestError,
    LogitsProcessor,
    SamplingParams,
    StructuredOutputsParams,
)
from jpaged.text.chat.chat_template import render_chat
from jpaged.text.grammar.grammar import Matcher
from jpaged.text.output_processor import OutputProcessor

from .text.grammar.test_grammar import QWEN3, SMOLLM3
from .tiny_model import CONFIG, write_tiny_model

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")
NUM_SCHEMAS, NUM_PLAIN = 120, 30
MAX_TOKENS = 150
SIZES: dict[str, Any] = {
    "max_num_seqs": 24, "max_num_batched_tokens": 64, "max_model_len": 256, "block_size": 8, "warmup": "off",
    "max_logprobs": 3,
}  # fmt: skip
TEXT = {"type": "string", "minLength": 1, "maxLength": 6}
ASKED = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a"],
         "additionalProperties": False}  # fmt: skip


def bounded_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Return a schema all of whose values are short."""
    leaves = [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -rng.randint(0, 50), "maximum": rng.randint(1, 999)},
        {"type": "integer", "multipleOf": rng.randint(2, 7), "minimum": 0, "maximum": 99},
        {"enum": rng.sample(["north", "south", "é", 1, None, [True], {"k": 2}], rng.randint(1, 4))},
        {"const": rng.choice(["日本", 7, "a b"])},
        {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 5)},
        {"type": "string", "pattern": rng.choice(["^[a-c]{1,4}$", r"^\d{2}-\d{2}$", "^(x|yz){1,2}$"])},
        {"type": "string", "format": rng.choice(["date", "ipv4"])},
    ]
    if not depth or rng.random() < 0.3:
        return rng.choice(leaves)
    inner = [bounded_schema(rng, depth - 1) for _ in range(3)]
    kind = rng.choice(["array", "tuple", "object", "object", "anyOf"])
    if kind == "array":
        return {"type": "array", "items": inner[0], "minItems": rng.randint(0, 1), "maxItems": rng.randint(1, 3)}
    if kind == "tuple":
        return {"type": "array", "prefixItems": inner[:2], "items": False, "minItems": 2}
    if kind == "anyOf":
        return {"anyOf": inner[: rng.randint(2, 3)]}
    names = rng.sample(["a", "b c", "é", 'q"'], 3)
    required = rng.sample(names, rng.randint(1, 3))
    properties = dict(zip(names, inner, strict=True))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def requests(num_schemas: int, num_plain: int) -> dict[str, tuple[str, SamplingParams, dict[str, Any] | None]]:
    """Return (prompt, parameters, schema) of each request by its id; plain ones have no schema."""
    rng, found = random.Random(5), {}
    for number in range(num_schemas + num_plain):
        schema = bounded_schema(rng) if number < num_schemas else None
        temperature = rng.choice([0.0, 0.7, 1.5])
        params = SamplingParams(
            n=1 if temperature == 0 else rng.choice([1, 1, 2, 3]),
            temperature=temperature,
            seed=number,
            max_tokens=MAX_TOKENS if schema else rng.randint(1, 40),
            logprobs=rng.choice([None, None, 0, 2]),
            presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            top_p=rng.choice([1.0, 0.9]),
            ignore_eos=rng.random() < 0.3,
            detokenize=rng.random() < 0.8,
            structured_outputs=schema and {"json": schema, "disable_any_whitespace": rng.random() < 0.9},
        )
        found[f"r{number}"] = "x" * rng.randint(1, 30), params, schema
    return found


def run(engine: Engine, asked: dict[str, Any], *, num_forks: int = 0) -> dict[str, Any]:
    """Compute all requests, with forks on the way; return their outputs by id. An interrupt is passed over."""
    for name, (prompt, params, _) in asked.items():
        engine.add_request(name, prompt, params)
    rng, found, forkable = random.Random(0), {}, [name for name, (_, params, _) in asked.items() if params.temperature]
    while engine.has_unfinished_requests():
        try:
            outputs = engine.step()
        except KeyboardInterrupt:
            continue
        found |= {output.request_id: output for output in outputs if output.finished}
        if num_forks and rng.random() < 0.4:
            name = rng.choice(forkable)
            request = engine.requests.get(name)
            if request is not None and request.live and request.live[0].num_output_tokens:
                engine.fork(name, 1, sample=request.live[0].index)
                num_forks -= 1
    return found


def check(engine: Engine, asked: dict[str, Any], found: dict[str, Any]) -> float:
    """Check that what stopped validates and what was cut is a beginning; return the share that stopped."""
    num_stopped = num_samples = 0
    for name, (_, params, schema) in asked.items():
        output = found[name]
        assert output.error is None, output.error
        if schema is None:
            continue
        for sample in output.outputs:
            num_samples += 1
            num_stopped += sample.finish_reason == "stop"
            tokens = [token for token in sample.token_ids if token not in engine.handle.eos_token_ids]
            text = engine.tokenizer.decode(tokens)
            assert not params.detokenize or sample.text == text
            if sample.finish_reason == "stop" and sample.stop_reason is None:
                jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
            else:
                assert sample.finish_reason == "length"
                grammars = engine.handle.grammars
                matcher = grammars.matcher(grammars.grammar_of(params.structured_outputs))
                for token in tokens:
                    matcher.advance(token)
    return num_stopped / num_samples


def tokens_of(found: dict[str, Any]) -> dict[str, Any]:
    return {name: {one.index: one.token_ids for one in output.outputs} for name, output in found.items()}


def num_matchers() -> int:
    gc.collect()
    return sum(isinstance(one, Matcher) for one in gc.get_objects())


@pytest.fixture(scope="module")
def campaign(tiny: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Give 150 requests, and their tokens from an engine with room for all, one step after another."""
    asked = requests(NUM_SCHEMAS, NUM_PLAIN)
    with Engine(tiny, **SIZES, num_blocks=1025, async_scheduling=False, num_decode_steps=1) as engine:
        found = run(engine, asked)
        assert check(engine, asked, found) >= 0.95
        return asked, tokens_of(found)


@pytest.mark.slow
def test_a_request_alone_draws_what_it_draws_among_others(campaign: Any, tiny: str) -> None:
    asked, expected = campaign
    with Engine(tiny, **SIZES, num_blocks=1025, num_decode_steps=1) as engine:
        for name in random.Random(1).sample(sorted(asked), 24):
            assert tokens_of(run(engine, {name: asked[name]}))[name] == expected[name], name


@pytest.mark.parametrize(
    ("mode", "is_async"),
    [
        ("swap", False),
        *(
            pytest.param(*both, marks=pytest.mark.slow)
            for both in (("recompute", True), ("recompute", False), ("swap", True))
        ),
    ],
)
def test_outputs_validate_and_are_the_same_under_preemption_forks_and_interrupts(
    mode: str, is_async: bool, campaign: Any, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, expected = campaign
    order = random.Random(f"{mode} {is_async}").sample(sorted(asked), len(asked))
    check_stop, calls = OutputProcessor.check_stop, iter(range(1 << 60))

    def interrupted(self: OutputProcessor, sequence: Any, sampled: Any, row: int) -> Any:
        number = next(calls)
        if number % 700 == 350:
            raise KeyboardInterrupt
        end = check_stop(self, sequence, sampled, row)
        if number % 700 == 699:
            raise KeyboardInterrupt
        return end

    monkeypatch.setattr(OutputProcessor, "check_stop", interrupted)
    options = {"async_scheduling": is_async, "preemption_mode": mode, "num_blocks": 97, "num_host_blocks": 200}
    num_before = num_matchers()
    with Engine(tiny, **SIZES, **options) as engine:
        found = run(engine, {name: asked[name] for name in order}, num_forks=20)
        assert check(engine, asked, found) >= 0.95
        drawn = tokens_of(found)
        for name, samples in expected.items():
            assert {index: drawn[name][index] for index in samples} == samples, name
        stats = engine.stats()
        assert stats[f"preemptions_{mode}"] > 10
        assert stats["recompiles"] == stats["idle_faults"] == stats["blocks_used"] == stats["host_blocks_used"] == 0
        assert next(calls) > 4000
        assert sum(len(drawn[name]) - len(samples) for name, samples in expected.items()) > 10, "few forks"
        engine.handle.grammars._worker.shutdown()  # It makes matchers for requests that do not come.
        num_spares = len(engine.handle.grammars._spares)
        del found, samples
        assert num_matchers() - num_spares <= num_before


# How an output ends


@pytest.fixture(scope="module")
def engine(tiny: str) -> Any:
    bomb = LogitsProcessor("only", ("token",), lambda row, token: row * 0 - np.float32(1e9))
    with Engine(tiny, **SIZES, num_blocks=257, logits_processors=[bomb]) as engine:
        yield engine


def one(engine: Engine, structure: Any, **params: Any) -> Any:
    params = {"max_tokens": 60, "temperature": 1.0, "seed": 3, **params}
    return engine.generate("x", SamplingParams(structured_outputs=structure, **params), use_tqdm=False)[0]


def test_the_end_of_the_grammar_is_stop_without_eos_and_also_where_eos_is_ignored(engine: Engine) -> None:
    for ignore_eos in (False, True):
        sample = one(engine, {"choice": ["yes", "no"]}, ignore_eos=ignore_eos).outputs[0]
        assert sample.text in ("yes", "no")
        assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
        assert engine.tokenizer.decode(sample.token_ids) == sample.text
        open_end = one(engine, {"regex": "[ab]{2,40}"}, ignore_eos=ignore_eos, logit_bias={0: 100.0}).outputs[0]
        assert (open_end.finish_reason, open_end.stop_reason, len(open_end.text)) == ("stop", None, 2)


def test_stop_strings_stop_tokens_and_max_tokens_end_an_output_amid_its_grammar(engine: Engine) -> None:
    sample = one(engine, {"regex": "abcdef"}, stop=["cd"]).outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("ab", "stop", "cd")
    (token,) = engine.tokenizer.encode("d")
    sample = one(engine, {"regex": "abcdef"}, stop_token_ids=[token]).outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("abc", "stop", token)
    sample = one(engine, {"regex": "abcdef"}, max_tokens=4).outputs[0]
    assert (sample.text, sample.finish_reason) == ("abcd", "length")
    assert one(engine, {"regex": "abcdef"}, max_tokens=6).outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("structure", "params"),
    [
        ({"choice": ["a"]}, {"bad_words": ["a"]}),
        ({"choice": ["a"]}, {"allowed_token_ids": [9]}),
        ({"regex": "a"}, {"min_tokens": 5}),
        ({"regex": "ab?"}, {"min_tokens": 5}),
    ],
)
def test_rules_that_leave_nothing_to_draw_end_that_request_alone(structure: Any, params: Any, engine: Engine) -> None:
    each = [
        SamplingParams(max_tokens=9, temperature=1, seed=1),
        SamplingParams(max_tokens=9, temperature=1, structured_outputs=structure, **params),
    ]
    plain, bad = engine.generate(["x", "x"], each, use_tqdm=False, on_error="return")
    assert "structured_outputs" in bad.error or "min_tokens" in bad.error
    assert bad.outputs[0].finish_reason == "error"
    assert plain.outputs[0].token_ids == engine.generate("x", each[0], use_tqdm=False)[0].outputs[0].token_ids
    # A bias cannot forbid a token, so the only one that is left is drawn.
    (token,) = engine.tokenizer.encode("a")
    assert one(engine, {"choice": ["a"]}, logit_bias={token: -100.0}).outputs[0].text == "a"


def test_a_given_token_follows_the_grammar_and_its_fork_goes_on_by_it(engine: Engine) -> None:
    params = SamplingParams(structured_outputs={"regex": "a[bc]{3}(bx|cy)"}, temperature=0.0, max_tokens=20)
    token_of = {letter: engine.tokenizer.encode(letter)[0] for letter in "abcxy"}
    engine.add_request("a", "x", params)
    while len(engine.requests["a"].sequences[0].token_ids) < engine.requests["a"].prompt_len + 3:
        engine.step()
    for at, letter in ((0, "b"), (1, "x"), (2, "y")):
        with pytest.raises(
            InvalidRequestError, match=f"first_token_ids: got token id {token_of[letter]}, which the gr"
        ):
            engine.fork("a", num_output_tokens=at, first_token_ids=[token_of[letter]])
    engine.fork("a", num_output_tokens=1, first_token_ids=[token_of["b"], token_of["c"]])
    engine.fork("a", num_output_tokens=0, first_token_ids=[token_of["a"]])
    texts = [sample.text for sample in next(iter(engine.run_until_done())).outputs]
    assert all(re.fullmatch("a[bc]{3}(bx|cy)", text) for text in texts)
    assert [text[1] for text in texts[1:3]] == ["b", "c"]
    assert texts[3] == texts[0], "greedy, with the same tokens"


def test_a_logits_processor_of_the_engine_cannot_leave_the_grammar(engine: Engine) -> None:
    assert one(engine, {"choice": ["yes"]}, extra_args={"token": 9}).outputs[0].text == "yes"


def test_results_as_arrays_hold_structured_samples_too(engine: Engine) -> None:
    params = SamplingParams(n=3, temperature=1, seed=1, max_tokens=60, logprobs=0, structured_outputs={"json": ASKED})
    arrays = engine.generate(["x", "y"], params, use_tqdm=False, return_arrays=True)
    for tokens, mask in zip(np.asarray(arrays.tokens), np.asarray(arrays.mask), strict=True):
        jsonschema.validate(json.loads(engine.tokenizer.decode(tokens[mask].tolist())), ASKED)
    assert len(arrays.tokens) == 6


# Other engines


@pytest.mark.parametrize("family", ["qwen3", "smollm3"])
def test_a_thinking_model_s_answer_validates_with_thinking_on_and_off(family: str, tmp_path: Path) -> None:
    """The models are small, and draw at random: a bias lets them end their thoughts."""
    marks = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    directory = write_tiny_model(tmp_path, model_type="llama", vocab_size=CONFIG["vocab_size"])
    content = json.loads((directory / "tokenizer.json").read_text())
    first = 258 - len(marks)  # The marks take the places of the last bytes, which no character begins with.
    for token, index in list(content["model"]["vocab"].items()):
        if index >= first:
            del content["model"]["vocab"][token]
    for index, mark in enumerate(marks, first):
        is_special = "im" in mark  # As in the published tokenizers, where thoughts are shown.
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append({"id": index, "content": mark, "special": is_special, **flags})
    (directory / "tokenizer.json").write_text(json.dumps(content))
    template = {"qwen3": QWEN3, "smollm3": SMOLLM3}[family]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    begin, end = first + 2, first + 3
    params = SamplingParams(
        n=8,
        temperature=1,
        seed=2,
        max_tokens=90,
        logit_bias={end: 6.0, begin: 12.0},
        structured_outputs={"json": ASKED},
    )
    with Engine(str(directory), **SIZES, num_blocks=257) as engine:
        off = {"messages": [{"role": "system", "content": "/no_think"}, {"role": "user", "content": "Who?"}]}
        if family == "qwen3":
            off = {
                "prompt": render_chat(engine.tokenizer, [{"role": "user", "content": "Who?"}])
                + "<think>\n\n</think>\n\n"
            }
        on = {"messages": [{"role": "user", "content": "Who?"}]}
        thinking, plain = engine.generate([on, off], params, use_tqdm=False)
        for output, thinks in ((thinking, True), (plain, False)):
            stopped = [sample for sample in output.outputs if sample.finish_reason == "stop"]
            assert len(stopped) >= 4
            for sample in stopped:
                thought, mark, answer = sample.text.rpartition("</think>")
                assert bool(mark) is thinks is thought.startswith("<think>")
                jsonschema.validate(json.loads(answer), ASKED)


def test_a_deterministic_engine_has_structured_outputs_too(tiny: str) -> None:
    params = SamplingParams(n=2, temperature=1, seed=4, max_tokens=60, structured_outputs={"json": ASKED})
    sizes = {name: size for name, size in SIZES.items() if name != "max_num_batched_tokens"}
    with Engine(tiny, **sizes | {"max_num_seqs": 4, "num_blocks": 257}, deterministic=True) as engine:
        alone = engine.generate("hello", params, use_tqdm=False)[0]
        beside = engine.generate(
            ["hello", "x" * 20], [params, replace(params, structured_outputs=None)], use_tqdm=False
        )
        assert [one.token_ids for one in beside[0].outputs] == [one.token_ids for one in alone.outputs]
        for sample in alone.outputs:
            jsonschema.validate(json.loads(sample.text), ASKED)


# What is refused before anything runs


def test_what_cannot_be_served_is_refused_by_name_before_anything_is_queued(engine: Engine) -> None:
    wanted = {"json": {"properties": {"a": {"not": {}}}}}
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs.json: got not, which is not enforced at #/pro"):
        engine.add_request("a", "x", SamplingParams(structured_outputs=wanted))
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs: got json and regex, allowed: exactly one"):
        StructuredOutputsParams(json={}, regex="a")
    with pytest.raises(InvalidRequestError, match=r"^structural_tag: not available in this version"):
        StructuredOutputsParams(structural_tag="<a>")
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs.jsn: unknown parameter; did you mean json"):
        SamplingParams(structured_outputs={"jsn": {}})
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs: got a string of 4 characters"):
        SamplingParams(structured_outputs="json")
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs: unknown parameter"):
        BeamSearchParams(beam_width=2, max_tokens=4, structured_outputs={"json": {}})
    assert not engine.has_unfinished_requests()


def test_without_a_tokenizer_or_the_package_the_way_out_is_named(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(structured_outputs={"json": ASKED}, detokenize=False)
    with (
        Engine(tiny, **SIZES, num_blocks=65, skip_tokenizer_init=True) as engine,
        pytest.raises(InvalidRequestError, match=r"structured_outputs: .* no tokenizer; start the engine with one"),
    ):
        engine.generate([[5, 6]], params, use_tqdm=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with Engine(tiny, **SIZES, num_blocks=65) as engine:
        with pytest.raises(InvalidRequestError, match=r"pip install 'jpaged\[structured\]'"):
            engine.generate("x", params, use_tqdm=False)
        assert engine.generate("x", replace(params, structured_outputs=None), use_tqdm=False)[0].outputs[0].token_ids
