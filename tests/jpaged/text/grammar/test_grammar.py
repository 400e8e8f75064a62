"""Grammars over real tokenizers: outputs that parse, bounded work, and errors that repeat nothing of a request."""

import gc
import json
import random
import re
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest

import jpaged.text.grammar.grammar as grammar_module
from jpaged.errors import InvalidRequestError
from jpaged.sampling.sampling_params import SamplingParams
from jpaged.structured_outputs import MAX_REGEX_BYTES, MAX_SCHEMA_BYTES, StructuredOutputsParams
from jpaged.text.chat.chat_template import render_chat
from jpaged.text.chat.thinking import Thinking, thinking_after
from jpaged.text.grammar.grammar import GrammarFailure, Grammars
from jpaged.text.tokenizing.detokenizer import Detokenizer
from jpaged.text.tokenizing.gguf_tokenizer import build_gguf_backend
from jpaged.text.tokenizing.tokenizer import Tokenizer, load_tokenizer

from ..tokenizing.published_tokenizers import (
    byte_tokenizer,
    llama_cpp_models,
    load_family,
    load_smollm2,
    sentence_piece_tokenizer,
)
from ..tokenizing.test_tokenizer import SPM, ggml
from .grammar_walks import grammars_of, random_output

TOKENIZERS = {
    "byte-level": load_smollm2,
    "byte-level of 128,256 ids": lambda: load_family("llama3"),
    "SentencePiece": lambda: load_family("llama2"),
    "SentencePiece, tiny": sentence_piece_tokenizer,
    "GGUF, tiny": lambda: Tokenizer(*build_gguf_backend(Path("m.gguf"), ggml(SPM))),
    "GGUF, byte-level": lambda: load_tokenizer(llama_cpp_models() / "ggml-vocab-gpt-2.gguf"),
    "GGUF, SentencePiece": lambda: load_tokenizer(llama_cpp_models() / "ggml-vocab-llama-spm.gguf"),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "a b": {"type": "string", "maxLength": 20},
        "é": {"type": "array", "items": {"enum": ["日本", "x y", " lead", 1.5]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["a b", "é"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("GGUF, byte-level", "GGUF, SentencePiece")))
        for name in TOKENIZERS
    ],
)
def test_outputs_of_a_real_tokenizer_validate_as_the_detokenizer_writes_them(name):
    tokenizer = TOKENIZERS[name]()
    grammars = grammars_of(tokenizer)
    for seed in range(8):
        tokens = []

        def token_bytes(token_id, tokens=tokens):
            tokens.append(token_id)
            return tokenizer.token_bytes(token_id)

        output, is_over = random_output(
            grammars, tokenizer.eos_token_id, seed, json=SCHEMA, token_bytes=token_bytes, disable_any_whitespace=True
        )
        assert is_over
        jsonschema.validate(json.loads(output), SCHEMA)
        detokenizer = Detokenizer(tokenizer, tokenizer.encode("x"))
        detokenizer.append(tokens)
        assert detokenizer.delta(finished=True).encode() == output


@pytest.mark.parametrize(
    "name",
    [
        "byte-level",
        "SentencePiece",
        "SentencePiece, tiny",
        "GGUF, tiny",
        pytest.param("GGUF, SentencePiece", marks=pytest.mark.slow),
    ],
)
def test_an_output_that_is_cut_within_a_character_is_a_valid_beginning_byte_by_byte(name):
    tokenizer, text = TOKENIZERS[name](), "é日本語 é🦙!"
    grammars = grammars_of(tokenizer)
    lens = set()
    for seed in range(40):
        cut = random.Random(seed).randint(1, 22)
        output, _ = random_output(
            grammars, tokenizer.eos_token_id, seed, choice=[text], max_tokens=cut, token_bytes=tokenizer.token_bytes
        )
        assert text.encode().startswith(output)
        lens.add(len(output))
    assert any((text.encode()[length] & 0xC0) == 0x80 for length in lens if length < len(text.encode())), "never within"


def test_ids_without_a_token_are_never_allowed_whether_the_head_has_more_rows_or_fewer():
    tokenizer = byte_tokenizer()
    for num_rows in (256, 257, 400):
        grammars = Grammars(tokenizer, num_rows, {256} if num_rows > 256 else set())
        matcher = grammars.matcher(grammars.grammar_of(StructuredOutputsParams(regex="(?s:.{0,9})")))
        masks = grammars.masks([None, matcher])
        assert masks.shape == (2, -(-num_rows // 32))
        assert (masks[0] == -1).all()
        allowed = np.flatnonzero(np.unpackbits(masks[1].view(np.uint8), bitorder="little")[:num_rows])
        assert allowed.max() <= 256
        assert 65 in allowed


def test_an_end_of_the_grammar_is_seen_with_its_last_token_and_eos_where_more_could_come():
    grammars = grammars_of(byte_tokenizer())
    matcher = grammars.matcher(grammars.grammar_of(StructuredOutputsParams(choice=["no", "none"])))
    assert [matcher.advance(token_id) for token_id in b"no"] == [False, False]
    other = matcher.copy()
    assert other.advance(256)
    assert [matcher.advance(token_id) for token_id in b"ne"] == [False, True]
    with pytest.raises(GrammarFailure):
        grammars.matcher(grammars.grammar_of(StructuredOutputsParams(choice=["no"]))).advance(ord("x"))


def test_a_request_that_reaches_its_limits_leaves_others_with_the_same_grammar_alone():
    """Copies of one parser share an automaton: a full one would end every request with that grammar."""
    grammars = grammars_of(load_smollm2())
    asked = StructuredOutputsParams(regex="(?s:.*)a(?s:.{30})|(?s:.*)b(?s:.{29})e")
    rng, failures = np.random.default_rng(0), []
    for _ in range(2):
        matcher, num_tokens = grammars.matcher(grammars.grammar_of(asked)), 0
        while not matcher.failure and num_tokens < 400:
            mask = grammars.masks([matcher])[0]
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if not matcher.failure:
                matcher.advance(int(rng.choice(allowed)))
                num_tokens += 1
        assert matcher.failure == "its grammar cannot go on: it takes more work than a request may"
        failures.append(num_tokens)
    assert min(failures) > 0


def tools(num_tools):
    """Return a schema of the calls of so many tools."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": f"tool_{number}"},
                "arguments": {
                    "type": "object",
                    "properties": {
                        "path": {"type": "string"},
                        f"query_{number}": {"type": "string"},
                        "limit": {"type": "integer", "minimum": 0, "maximum": 100},
                        "mode": {"enum": ["fast", "slow"]},
                    },
                    "required": ["path"],
                },
            },
            "required": ["name", "arguments"],
        }
        for number in range(num_tools)
    ]
    return StructuredOutputsParams(json={"anyOf": calls})


def wait_for_spare(grammars, text, timeout_s=20):
    end_s = time.monotonic() + timeout_s
    while text not in grammars._spares:
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.parametrize("num_tools", [16, 128])
def test_a_grammar_that_was_asked_for_before_is_not_compiled_for_a_request(num_tools, grammars, monkeypatch):
    text = grammars.grammar_of(tools(num_tools))
    first = grammars.matcher(text)
    wait_for_spare(grammars, text)

    def compiled(text):
        raise AssertionError("compiled while a request waits")

    monkeypatch.setattr(grammars, "_compiled", compiled)
    assert grammars.grammar_of(tools(num_tools)) == text
    second = grammars.matcher(text)
    monkeypatch.undo()
    assert second.parser is not first.parser
    assert not second.failure
    wait_for_spare(grammars, text)


def test_grammars_are_kept_within_bounds_of_bytes(monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_SPARE_BYTES", 1 << 20)
    monkeypatch.setattr(grammar_module, "MAX_TEXT_BYTES", 1 << 12)
    grammars = grammars_of(byte_tokenizer())
    texts = [grammars.grammar_of(StructuredOutputsParams(choice=[f"text {number}"])) for number in range(60)]
    assert 0 < grammars._spares.num_bytes <= 1 << 20
    assert 0 < grammars._texts.num_bytes <= 1 << 12
    assert texts[0] not in grammars._spares
    assert texts[-1] in grammars._spares, "the last one stays"
    monkeypatch.setattr(grammar_module, "BYTES_PER_COMPILE_S", 1e15)
    large = grammars.grammar_of(StructuredOutputsParams(choice=["large"]))
    assert large not in grammars._spares
    assert not grammars.matcher(large).failure
    assert not grammars._to_make, "what has no room is not compiled for later requests"


# Thinking models


QWEN3 = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{%- if enable_thinking is defined and enable_thinking is false %}
<think>

</think>

{%- endif %}
{% endif %}"""
SMOLLM3 = """{%- set ns = namespace(think=true) %}{%- for message in messages %}{%- if message.role == 'system' and
'/no_think' in message.content %}{%- set ns.think = false %}{%- endif %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% if not ns.think %}<think>

</think>
{% endif %}{%- endif %}"""
OPENING = "<|im_start|>assistant\n"
R1 = QWEN3.replace(f"{OPENING}{{%- if", f"{OPENING}<think>\n{{%- if")
MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")


def thinking_tokenizer(template, *, is_special):
    """Return a byte tokenizer with the marks of a chat, and of thoughts as special tokens or not."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(byte_tokenizer().backend.to_str())
    for mark in MARKS:
        is_mark_special = is_special or "im" in mark
        backend.add_tokens([tokenizers.AddedToken(mark, special=is_mark_special, normalized=False)])
    return Tokenizer(backend, {"eos_token": "<|im_end|>"}, chat_template=template)


USER = {"role": "user", "content": "Who?"}
OFF = [{"role": "system", "content": "/no_think"}, USER]
CASES = {
    "Qwen3, on": (QWEN3, [USER], "", Thinking.OPTIONAL),
    "Qwen3, off": (QWEN3, [USER], "<think>\n\n</think>\n\n", Thinking.NONE),
    "Qwen3, begun": (QWEN3, [USER], "<think>\nOkay, so", Thinking.OPEN),
    "Qwen3, later turn": (
        QWEN3,
        [USER, {"role": "assistant", "content": "<think>x</think>I."}, USER],
        "",
        Thinking.OPTIONAL,
    ),
    "SmolLM3, on": (SMOLLM3, [USER], "", Thinking.OPTIONAL),
    "SmolLM3, off": (SMOLLM3, OFF, "", Thinking.NONE),
    "R1, always": (R1, [USER], "", Thinking.OPEN),
}


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize(("template", "messages", "more", "expected"), CASES.values(), ids=CASES)
def test_the_answer_behind_a_thought_is_what_was_asked_for(template, messages, more, expected, is_special):
    tokenizer = thinking_tokenizer(template, is_special=is_special)
    thinking = thinking_after(tokenizer, render_chat(tokenizer, messages) + more, None)
    assert thinking is expected
    grammars, ends, schema = grammars_of(tokenizer), set(), {"enum": ["yes", "no", 3]}
    end, eos = tokenizer.encode("</think>", add_special_tokens=False)[0], tokenizer.eos_token_id
    for seed in range(30):
        rng = random.Random(seed)
        matcher, tokens, is_over = (
            grammars.matcher(grammars.grammar_of(StructuredOutputsParams(json=schema), thinking)),
            [],
            False,
        )
        while not is_over and len(tokens) < 400:
            bits = np.unpackbits(grammars.masks([matcher])[0].view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            # A thought would otherwise end when its end is drawn among 256 bytes.
            token_id = end if end in allowed and rng.random() < 0.1 else rng.choice(allowed)
            is_over = matcher.advance(token_id)
            tokens.append(token_id)
        assert eos not in tokens
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        thought, mark, answer = text.rpartition("</think>")
        ends.add(bool(mark))
        if is_over:
            assert json.loads(answer) in schema["enum"]
            assert not mark or expected is not Thinking.NONE
            assert thought.startswith("<think>") or expected is not Thinking.OPTIONAL or not mark
    assert ends == {Thinking.NONE: {False}, Thinking.OPTIONAL: {False, True}, Thinking.OPEN: {True}}[expected]


def test_a_model_without_marks_of_thoughts_does_not_think():
    tokenizer = byte_tokenizer()
    assert thinking_after(tokenizer, "<think> she said", None) is Thinking.NONE


# Bad and nasty input


SECRET = "zqxj"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def nested(depth, leaf):
    for _ in range(depth):
        leaf = {"anyOf": [leaf, {"type": "array", "items": leaf, "maxItems": 2}]}
    return leaf


def chain(depth):
    schema = {"const": 0}
    for number in range(depth):
        schema = {"anyOf": [schema, {"type": "object", "properties": {"a": {"const": number}}, "required": ["a"]}]}
    return schema


def deep(levels, kind):
    text = "".join('{"' + kind + '":' for _ in range(levels)) + "true" + "}" * levels
    return text


REFUSED = {
    "two kinds": {"json": {}, "regex": SECRET},
    "no kind": {},
    "no choice": {"choice": []},
    "an empty choice": {"choice": [SECRET, ""]},
    "choices that are no list": {"choice": SECRET},
    "too many choices": {"choice": [f"{SECRET}{n}" for n in range(5000)]},
    "no JSON": {"json": "{" + SECRET},
    "a JSON number": {"json": "3"},
    "a JSON string": {"json": f'"{SECRET}"'},
    "a key twice": {"json": '{"type": "string", "type": "object"}'},
    "NaN": {"json": '{"minimum": NaN}'},
    "an infinite number": {"json": '{"minimum": 1e999}'},
    "a digit too many": {"json": '{"minimum": ' + "9" * 5000 + "}"},
    "a set": {"json": {"enum": {1, 2}}},
    "a lone surrogate": {"json": {"const": "\ud800"}},
    "a large schema": {"json": json.dumps({"enum": [SECRET + "x" * MAX_SCHEMA_BYTES]})},
    "65 levels": {"json": deep(65, "items")},
    "5000 levels": {"json": deep(5000, "items")},
    "100000 brackets": {"json": "[" * 60000},
    "x-guidance": {"json": {"x-guidance": {"lenient": True}, "uniqueItems": True}},
    "x-guidance below": {"json": {"properties": {SECRET: {"x-guidance": {}}}}},
    "a schema of false": {"json": "false"},
    "a reference to http": {"json": {"$ref": f"http://{SECRET}.example/schema"}},
    "a reference to a file": {"json": {"$ref": f"file:///etc/{SECRET}"}},
    "a relative reference": {"json": {"$ref": f"{SECRET}.json"}},
    "a reference to nothing": {"json": {"$ref": f"#/$defs/{SECRET}"}},
    "a reference to itself": {"json": {"$ref": "#"}},
    "references in a circle": {
        "json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    },
    "a circle with siblings": {"json": {"$defs": {"a": {"$ref": "#/$defs/a", "type": "string"}}, "$ref": "#/$defs/a"}},
    "endless recursion": {
        "json": {
            "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}, "required": ["b"]}},
            "$ref": "#/$defs/a",
        }
    },
    "not": {"json": {"not": {"const": SECRET}}},
    "uniqueItems": {"json": {"type": "array", "uniqueItems": True}},
    "contains": {"json": {"contains": {"const": SECRET}}},
    "if": {"json": {"if": {}, "then": {}}},
    "an unknown keyword": {"json": {"maxlength": 3}},
    "a huge maxItems": {"json": {"type": "array", "maxItems": 10**9}},
    "a huge minItems": {"json": {"type": "array", "minItems": 10**12}},
    "nothing satisfies it": {"json": {"type": "string", "minLength": 5, "maxLength": 4, "description": SECRET}},
    "no integer between": {"json": {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}},
    "a required property that is forbidden": {
        "json": {"type": "object", "required": [SECRET], "additionalProperties": False}
    },
    "a choice of 2 in 16 places": {
        "json": {
            "type": "object",
            "allOf": [{"anyOf": [{"required": [f"a{n}"]}, {"required": [f"b{n}"]}]} for n in range(16)],
        }
    },
    "40 patterns at once": {
        "json": {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}{SECRET}"} for n in range(40)]}
    },
    "40 patterns of one property": {
        "json": {"allOf": [{"properties": {"p": {"pattern": f"a.{{{n}}}b"}}} for n in range(40)]}
    },
    "patterns that cannot be joined": {
        "json": {"allOf": [{"type": "string", "pattern": f"{SECRET}.{{{n}}}b"} for n in range(6)]}
    },
    "a large multiple": {"json": {"type": "integer", "multipleOf": 999999937}},
    "a pattern with a look-ahead": {"json": {"pattern": f"(?={SECRET})b"}},
    "a pattern with a back reference": {"json": {"pattern": f"({SECRET})\\1"}},
    "an open group": {"regex": f"({SECRET}"},
    "an open class": {"regex": f"[{SECRET}"},
    "a look-behind": {"regex": f"(?<={SECRET})b"},
    "a back reference": {"regex": f"({SECRET})\\1"},
    "a word boundary": {"regex": rf"\b{SECRET}\b"},
    "an expression of 5 KiB": {"regex": SECRET * (MAX_REGEX_BYTES // 3)},
    "an expression of no text": {"regex": f"{SECRET}[]"},
    "a rule that never ends": {"grammar": f'start: start "{SECRET}"'},
    "repeats beyond counting": {"regex": f"({SECRET}{{1,99999999999}})"},
    "an empty expression": {"regex": ""},
    "a large grammar": {"grammar": "start: " + json.dumps(SECRET * 20000)},
    "a rule that is missing": {"grammar": f"start: {SECRET}"},
    "no start": {"grammar": f'{SECRET}: "a"'},
    "no grammar": {"grammar": f"{SECRET} is what I want"},
    "a token that does not exist": {"grammar": f"start: <{SECRET}>"},
    "an import": {"grammar": f"%import {SECRET}.X\nstart: X"},
    "an open text": {"grammar": f'start: "{SECRET}'},
    "lenient JSON in a grammar": {"grammar": 'start: %json {"x-guidance": {"lenient": true}, "uniqueItems": true}'},
    "the same, escaped": {"grammar": 'start: %json {"\\u0078-guidance": {"lenient": true}, "uniqueItems": true}'},
    "uniqueItems in a grammar": {"grammar": 'start: "a" %json {"type": "array", "uniqueItems": true}'},
    "alternatives that begin alike, repeated": {
        "grammar": "start: (" + " | ".join(f'/[a-z]/ "{one}{other}"' for one in LETTERS for other in LETTERS) + ")*"
    },
    "at least one of 600 names": {
        "json": {
            "type": "object",
            "properties": {f"{SECRET}{n}": {} for n in range(600)},
            "additionalProperties": False,
            "minProperties": 1,
        }
    },
    "a rule of a rule of … 2,700 rules": {"grammar": "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(2700))},
    "2,000 references": {
        "json": {
            "$defs": {f"a{n}": {"$ref": f"#/$defs/a{max(0, n - 1)}"} for n in range(1, 1500)},
            "$ref": "#/$defs/a9",
        }
    },
    "400 patterns of names": {"json": {"patternProperties": {f"^k{n}[a-z]{{1,20}}$": {} for n in range(400)}}},
    "options that are the same reference": {
        "json": {
            "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "string"}]}},
            "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}],
        }
    },
    "a structural tag": {"structural_tag": "<a>"},
    "white space of an expression": {"regex": "a", "whitespace_pattern": "_"},
    "white space twice": {"json": {}, "whitespace_pattern": "_", "disable_any_whitespace": True},
    "white space that is no expression": {"json": {}, "whitespace_pattern": f"({SECRET}"},
}
WORDS = [f"w{number}" for number in range(4096)]
ALTERNATIVES = " | ".join(f'"{word}"' for word in WORDS[:2000])
ODD = ["é", "日本語", "a\nb", "\x7f", "(a|b)*", r"\d", "a/b", '"', " lead", "[", "\U0001f600", "\r\n", "a", "aa", "aab"]
LONG = {  # parameters, a text that they allow
    "4,096 choices": ({"choice": [*ODD, *WORDS[len(ODD) :]]}, "w4095"),
    "choices that begin others": ({"choice": ["a" * length for length in range(1, 361)]}, "a" * 360),
    "choices with a long beginning": ({"choice": [f"{'x' * 900}{number}" for number in range(70)]}, "x" * 900 + "69"),
    "a first rule of Lark": ({"grammar": f"start: {ALTERNATIVES}"}, "w1999"),
    "a first rule of GBNF": ({"grammar": f"root ::= {ALTERNATIVES}"}, "w1999"),
    "a tenth rule": (
        {"grammar": "start: r1\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(1, 9)) + f'r9: ({ALTERNATIVES}) "!"'},
        "w1999!",
    ),
    "words of a sentence": ({"grammar": f'start: (word " ")+\nword: {ALTERNATIVES}'}, "w0 w1999 w3 "),
    "alternatives of two parts": (
        {"grammar": f'start: {ALTERNATIVES.replace(" |", " mark |")} mark\nmark: "!"'},
        "w1999!",
    ),
    "an enum of objects": ({"json": {"enum": [{"a": number} for number in range(2500)]}}, '{"a": 2499}'),
    "optional names": (
        {"json": {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(600)}}},
        '{"p0": 1, "p599": 2, "other": [3]}',
    ),
}
NASTY = {
    "anyOf 9 deep, twice each": {"json": nested(9, {"type": "integer"})},
    "anyOf 16 deep": {"json": chain(16)},
    "a million items": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}},
    "a million characters": {"json": {"type": "string", "minLength": 1_000_000}},
    "1500 properties": {"json": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1500)}}},
    "2500 constants": {"json": {"enum": [f"v{n}" for n in range(2500)]}},
    "a pattern of many states": {"json": {"type": "string", "pattern": "(.*a.{20}b.*){5}c"}},
    "an expression of many states": {"regex": "(?s:.*)a(?s:.{30})|(?s:.*)b(?s:.{29})e"},
    "nested repeats": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "many words": {"regex": "(" + "|".join(f"w{n}x{{1,9}}" for n in range(350)) + "){1,50}"},
    "an ambiguous grammar": {"grammar": 'start: e\ne: e e | "a" | e e e'},
    "a grammar of options": {
        "grammar": "start: "
        + " ".join(f"a{n}?" for n in range(50))
        + "\n"
        + "\n".join(f"a{n}: /a*/" for n in range(50))
    },
    "large repeats": {"grammar": 'start: a{1,100000}\na: b{1,100000}\nb: "x"'},
}
"""Grammars that may be served: their work is bounded all the same."""


def rss_mb():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096 / 1e6


@pytest.fixture(scope="module")
def grammars():
    grammars = grammars_of(load_smollm2())
    grammars.grammar_of(StructuredOutputsParams(choice=["warm"]))
    return grammars


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_at_once_and_its_error_repeats_nothing_of_it(name, grammars):
    start_s = time.perf_counter()
    with pytest.raises(InvalidRequestError) as caught:
        grammars.grammar_of(SamplingParams(structured_outputs=REFUSED[name]).structured_outputs)
    assert time.perf_counter() - start_s < 5
    message = str(caught.value)
    assert len(message) < 1000
    assert "\n" not in message
    assert SECRET not in re.sub(r"#/\S*|at #\S*", "", message), "only the place may name a key of the schema"


def test_steps_behind_a_thought_are_tried_too(grammars):
    asked = StructuredOutputsParams(**REFUSED["alternatives that begin alike, repeated"])
    with pytest.raises(InvalidRequestError, match="more work than a request may"):
        grammars.grammar_of(asked, Thinking.OPEN)


@pytest.mark.parametrize("name", LONG)
def test_long_lists_of_alternatives_work_to_their_end(name, grammars):
    params, text = LONG[name]
    matcher = grammars.matcher(grammars.grammar_of(StructuredOutputsParams(**params)))
    for token_id in load_smollm2().encode(text, add_special_tokens=False):
        assert grammars.masks([matcher])[0][token_id // 32] >> token_id % 32 & 1
        assert not matcher.parser.is_stopped()
        matcher.advance(token_id)
    assert matcher.parser.is_accepting()


def test_choices_hold_any_characters():
    grammars = grammars_of(byte_tokenizer())
    key = grammars.grammar_of(StructuredOutputsParams(choice=ODD))
    for text in (*ODD, "ab", "d", "5", ""):
        parser, data = grammars.matcher(key).parser, list(text.encode())
        assert (parser.try_consume_tokens(data) == len(data) and parser.is_accepting()) == (text in ODD), text


@pytest.mark.parametrize("name", NASTY)
def test_nasty_grammars_take_bounded_time_for_each_token(name, grammars):
    start_s = time.perf_counter()
    matcher = grammars.matcher(grammars.grammar_of(StructuredOutputsParams(**NASTY[name])))
    assert time.perf_counter() - start_s < 5
    rng, times_s = random.Random(0), []
    for _ in range(60):
        start_s = time.perf_counter()
        mask = grammars.masks([matcher])[0]
        times_s.append(time.perf_counter() - start_s)
        if matcher.failure:
            assert SECRET not in matcher.failure
            break
        if matcher.advance(rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())):
            break
    assert np.median(times_s) < 0.05
    assert max(times_s) < 0.5  # The processor has other work too.


def test_memory_of_nasty_grammars_comes_back(grammars):
    def run():
        for params in NASTY.values():
            matcher = grammars.matcher(grammars.grammar_of(StructuredOutputsParams(**params)))
            grammars.masks([matcher])
        del matcher
        gc.collect()
        return rss_mb()

    first = run()
    for _ in range(3):
        last = run()
    assert last - first < 60
