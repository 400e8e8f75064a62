"""What schemas of generators hold beyond llguidance's keywords: numbers, unique items, names, formats."""

import itertools
import json
import logging
import random
import re

import jsonschema
import numpy as np
import pytest

from jpaged.errors import InvalidRequestError
from jpaged.structured_outputs import StructuredOutputsParams
from jpaged.text.chat.thinking import Thinking
from jpaged.text.schemas.json_schema import unknown_formats
from jpaged.text.schemas.known_patterns import DURATION, EMAIL, HOSTNAME, without_look_ahead

from ..grammar.grammar_walks import grammars_of, random_output
from ..tokenizing.published_tokenizers import byte_tokenizer

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
BELOW_HALF = {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}
LETTERS = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}
BIT = {"type": "boolean"}
INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
UINT64 = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
COLORS = {"$defs": {"Color": {"enum": ["red", "green"]}}}
OVERLAPPING = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"


@pytest.fixture(scope="module")
def grammars():
    return grammars_of(byte_tokenizer())


def started(grammars, schema):
    params = StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=True)
    return grammars.matcher(grammars.grammar_of(params))


def is_whole(matcher, text):
    data = list(text.encode())
    return matcher.parser.try_consume_tokens(data) == len(data) and matcher.parser.is_accepting()


def is_allowed(grammars, schema, text):
    return is_whole(started(grammars, schema), text)


def record(kind):
    """Return the schema of an object that names its own kind."""
    properties = {"kind": {"const": kind}, "size": BIT}
    return {"type": "object", "properties": properties, "required": ["size", "kind"], "additionalProperties": False}


TEXTS = {
    "a bound of few places": ({"type": "number", "maximum": 1.25}, "1.2 1.20 1.25 1.250 0 -3.5 -0.50", "1.26 1.251"),
    "0.15": ({"type": "number", "minimum": 0, "maximum": 0.15}, "0.1 0.10 0.15 0", "0.16 0.2 1 -0"),
    "99.99": ({"type": "number", "maximum": 99.99}, "99.9 99.99 99 9", "100 99.991"),
    "below zero": ({"type": "number", "minimum": -0.17}, "-0.1 -0.17 0 0.5", "-0.2 -0.18 -1"),
    "an excluded zero": (BELOW_HALF, "0.5 0.50 0.01", "0 -0 0.0 0.51 0.00"),
    "an excluded zero above": (
        {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0},
        "-0.5 -0.01",
        "-0 0 -0.0 -0.6",
    ),
    "an excluded 2": ({"type": "number", "exclusiveMinimum": 2, "maximum": 2.05}, "2.01 2.05 2.0001", "2 2.0 2.06"),
    "quarters": ({"type": "number", "multipleOf": 0.25}, "0.5 0.25 3 -1.75 0.50", "0.3 0.125"),
    "quarters up to 10": ({"type": "number", "multipleOf": 0.25, "maximum": 9.6}, "9.5 9.50", "9.75 9.6"),
    "an excluded multiple": ({"type": "number", "multipleOf": 0.7, "exclusiveMinimum": 0}, "0.7 1.4 7", "0 0.5 -0.7"),
    "two ranges": ({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, "0.5 0.1", "0 0.6"),
    "a range of a reference": (
        {"$defs": {"F": {"type": "number", "exclusiveMinimum": 2}}, "$ref": "#/$defs/F", "maximum": 2.05},
        "2.01 2.05",
        "2 2.06",
    ),
    "ranges of options": (
        {"type": "number", "exclusiveMinimum": 0, "anyOf": [{"maximum": 0.15}, {"minimum": 2.5}]},
        "0.1 0.15 2.5 2.50",
        "0 0.2 2.4",
    ),
    "one property, twice": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "number", "exclusiveMinimum": 0}}, "required": ["a"]},
                {"properties": {"a": {"maximum": 0.5}}, "additionalProperties": False},
            ]
        },
        '{"a":0.5} {"a":0.1}',
        '{"a":0} {"a":0.6}',
    ),
    "fractions in integers' bounds": ({"type": "integer", "minimum": 0.5, "maximum": 2.5}, "1 2", "0 3 1.0"),
    "an enum within bounds": ({"enum": [0.1, 0.3, "x"], "maximum": 0.25}, '0.1 "x"', "0.3"),
    "no integer between": (
        {"type": "array", "items": {"type": "integer", "minimum": 5, "maximum": 1}},
        "[]",
        "[3] [5]",
    ),
    "no integer beside a number": (
        {"anyOf": [BELOW_HALF, {"type": "array", "prefixItems": [{"type": "integer", "minimum": 5, "maximum": 1}]}]},
        "[] 0.5",
        "[3] 0",
    ),
    "no value of a reference beside a number": (
        {"anyOf": [BELOW_HALF, {"$ref": "#/$defs/Color", "type": "integer"}], **COLORS},
        "0.5 0.1",
        '"red" 1',
    ),
    "int64": (INT64, f"{-(2**63)} {1 - 2**63} {2**63 - 1} 0 -7", f"{-(2**63) - 1} {2**63}"),
    "uint64": (UINT64, f"{2**64 - 1} {2**63} 0", f"{2**64} -1 -0"),
    "a large constant": ({"const": -(2**63)}, str(-(2**63)), f"{1 - 2**63}"),
    "large values": ({"enum": [2**60 + 1, [2**60 + 1], "a"]}, f'{2**60 + 1} [{2**60 + 1}] "a"', f"{2**60} {2**60 + 2}"),
    "constants of 700 options": (
        {"oneOf": [{"const": f"c{number}"} for number in range(700)]},
        '"c0" "c699"',
        '"c700"',
    ),
    "constants told apart by type": ({"oneOf": [{"const": 1}, {"const": True}, {"const": "1"}]}, '1 true "1"', "false"),
    "objects of 100 options": (
        {"oneOf": [record(f"c{number}") for number in range(100)]},
        '{"kind":"c99","size":true}',
        '{"kind":"c100","size":true} {"kind":"c1","size":0}',
    ),
    "a definition without a use": ({"$defs": {"A": OVERLAPPING, "B": {"$ref": "#/$defs/A"}}, **BIT}, "true", "1"),
    "a use within a definition": (
        {"$defs": {"A": OVERLAPPING, "b/c d": {"items": BIT}}, "$ref": "#/$defs/b~1c%20d/items"},
        "true",
        "1",
    ),
    "float64": (
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        "0.5 -7",
        "1e5",
    ),
    "a tiny maximum": ({"type": "number", "minimum": -1, "exclusiveMaximum": 1e-99}, "0 -0.5", "0.1 0.0000001"),
    "a huge bound": ({"type": "number", "minimum": 1.5e300}, "2" + "0" * 300, "1e301 " + "1" * 300),
    "unique letters": (LETTERS, '[] ["a"] ["c","a","b"]', '["a","a"] ["a","b","c","a"] ["d"]'),
    "at least two": ({**LETTERS, "minItems": 2}, '["a","b"] ["c","b","a"]', '[] ["a"] ["a","a"]'),
    "at most one": ({**LETTERS, "maxItems": 1}, '[] ["a"]', '["a","b"]'),
    "one of many": (
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1},
        "[] [7]",
        "[7,8]",
    ),
    "unique booleans": ({"type": "array", "items": BIT, "uniqueItems": True}, "[true,false] [false]", "[true,true]"),
    "unique integers": (
        {"type": "array", "items": {"type": "integer", "exclusiveMinimum": 0, "maximum": 8}, "uniqueItems": True},
        "[8,1,3] []",
        "[3,3] [0] [9]",
    ),
    "unique values of a reference": (
        {
            **COLORS,
            "type": "object",
            "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/Color"}, "uniqueItems": True}},
        },
        '{"c":["green","red"]} {}',
        '{"c":["red","red"]}',
    ),
    "tuple of draft-07": (
        {"$schema": DRAFT_7, "type": "array", "items": [BIT, {"type": "null"}], "additionalItems": False},
        "[true,null] [true] []",
        "[null] [true,null,1]",
    ),
    "tuple of draft-07 with a rest": (
        {"$schema": DRAFT_7, "type": "array", "items": [BIT], "additionalItems": {"type": "null"}, "minItems": 1},
        "[true] [true,null,null]",
        "[] [true,true]",
    ),
    "one schema beside additionalItems": (
        {"$schema": DRAFT_7, "type": "array", "items": BIT, "additionalItems": False},
        "[true,false]",
        "[null]",
    ),
    "names of an enum": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": BIT},
        '{} {"a":true} {"a":true,"b":false}',
        '{"c":true} {"a":1} {"a":true,"a":false}',
    ),
    "names of an enum beside properties": (
        {
            "type": "object",
            "propertyNames": {"enum": ["a", "b"]},
            "required": ["b"],
            "properties": {"b": {"type": "null"}, "c": {}},
            "additionalProperties": BIT,
        },
        '{"b":null} {"b":null,"a":true}',
        '{} {"b":null,"c":1} {"a":true}',
    ),
    "names of a reference": (
        {**COLORS, "type": "object", "propertyNames": {"$ref": "#/$defs/Color"}, "additionalProperties": BIT},
        '{"red":true}',
        '{"blue":true}',
    ),
    "names of a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^x-"}, "additionalProperties": BIT},
        '{"x-1":true} {}',
        '{"y":true} {"x-1":1}',
    ),
    "names of a length": (
        {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}, "additionalProperties": BIT},
        '{"ab":true,"abc":false}',
        '{"a":true} {"abcd":true}',
    ),
    "names of a format": (
        {"type": "object", "propertyNames": {"format": "date"}, "additionalProperties": BIT},
        '{"2024-02-03":true}',
        '{"a":true}',
    ),
    "nullable": ({"type": "string", "nullable": True, "maxLength": 1}, 'null "a"', '1 "ab"'),
    "a nullable enum": ({"enum": ["a"], "nullable": True}, 'null "a"', '"b" 1'),
    "a nullable reference": (
        {**COLORS, "type": "object", "properties": {"c": {"$ref": "#/$defs/Color", "nullable": True}}},
        '{"c":null} {"c":"red"}',
        '{"c":1}',
    ),
    "nullable options": ({"anyOf": [BIT, {"const": "x"}], "nullable": True}, 'null true "x"', "1"),
    "draft-04's excluded bound": ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, "0.1 3", "0 -1"),
    "an unknown format": ({"type": "string", "format": "cuid", "pattern": "^[a-c]+$"}, '"abc"', '"d"'),
    "zod's e-mail": (
        {"type": "string", "format": "email", "pattern": EMAIL},
        '"a.b@c.de" "o\'x+1@a-b.c.org"',
        '".a@b.cd" "a..b@c.de" "a.@b.cd" "a@b"',
    ),
    "Pydantic's Decimal": (
        {"type": "string", "pattern": DECIMAL + r"\d*\.?\d*$"},
        '"1.5" "-.5" "+1." "0"',
        '"." "" "1e5"',
    ),
    "Pydantic's Decimal with places": (
        {"type": "string", "pattern": DECIMAL + r"(?:\d{0,4}|(?=[\d.]{1,7}0*$)\d{0,4}\.\d{0,2}0*$)"},
        '"1234.5600" "1234" "0001.5" ".5"',
        '"12345" "1.234" "-"',
    ),
}
"""A schema, texts that it allows, and texts that it does not."""


@pytest.mark.parametrize(("schema", "inside", "outside"), TEXTS.values(), ids=TEXTS)
def test_a_schema_of_a_generator_allows_the_texts_that_it_means(grammars, schema, inside, outside):
    cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    for text in inside.split():
        assert is_allowed(grammars, schema, text), text
        # A validator computes in binary, and knows neither `nullable` nor an excluded bound that is true.
        if (
            "nullable" not in json.dumps(schema)
            and "multipleOf" not in schema
            and schema.get("exclusiveMinimum") is not True
        ):
            cls(schema).validate(json.loads(text))
    for text in outside.split():
        assert not is_allowed(grammars, schema, text), text


AROUND = {
    "properties": {
        "type": "object",
        "properties": {"x": BELOW_HALF, "y": LETTERS, "z": BIT},
        "required": ["y"],
        "additionalProperties": False,
    },
    "other properties": {
        "type": "object",
        "properties": {"x": {"type": "null"}},
        "required": ["x"],
        "additionalProperties": BELOW_HALF,
        "maxProperties": 1,
    },
    "items": {"type": "array", "items": {"anyOf": [BELOW_HALF, LETTERS]}, "minItems": 1, "maxItems": 3},
    "first items": {
        "type": "array",
        "prefixItems": [BELOW_HALF, BIT, LETTERS],
        "items": BELOW_HALF,
        "minItems": 1,
        "maxItems": 4,
    },
    "references": {
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {"v": BELOW_HALF, "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/Node",
    },
    "a reference to a property": {
        "type": "object",
        "properties": {"a": BELOW_HALF, "b": {"$ref": "#/properties/a"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "oneOf": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"k": {"const": "a"}, "v": BELOW_HALF},
                "required": ["k", "v"],
                "additionalProperties": False,
            },
            {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"], "additionalProperties": False},
        ]
    },
    "required options": {
        "type": "object",
        "properties": {"a": BELOW_HALF, "b": BELOW_HALF},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        "additionalProperties": False,
    },
    "a pattern of names": {
        "type": "object",
        "patternProperties": {"^x[ab]$": BELOW_HALF},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "a pattern that a property matches": {
        "type": "object",
        "properties": {"xa": BELOW_HALF},
        "patternProperties": {"^x[ab]$": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.25}},
        "additionalProperties": False,
    },
    "at least one": {
        "type": "object",
        "properties": {"a": BELOW_HALF, "b": BELOW_HALF},
        "minProperties": 1,
        "additionalProperties": False,
    },
    "several types": {"type": ["number", "string", "null"], "minimum": -0.75, "exclusiveMaximum": 0, "maxLength": 2},
}
"""Schemas around parts that are written by themselves, also those in which llguidance compiles these parts too."""


@pytest.mark.parametrize("name", AROUND)
def test_outputs_are_valid_whatever_stands_around_such_a_part(grammars, name):
    schema, num_ended = AROUND[name], 0
    validator = jsonschema.Draft202012Validator(schema)
    for seed in range(24):
        output, is_over = random_output(
            grammars, 256, seed, json=json.dumps(schema), disable_any_whitespace=seed % 2 == 0,
            token_bytes=lambda token_id: bytes([token_id]),
        )  # fmt: skip
        num_ended += is_over
        if is_over:
            validator.validate(json.loads(output))
    assert num_ended >= 20


def test_such_a_schema_stands_behind_a_thought_in_a_grammar_and_among_white_space(grammars):
    schema = {"type": "object", "properties": {"a": BELOW_HALF, "b": LETTERS}, "additionalProperties": False}

    def allows(text, thinking=Thinking.NONE, **params):
        params = StructuredOutputsParams(**params) if params else StructuredOutputsParams(json=schema)
        return is_whole(grammars.matcher(grammars.grammar_of(params, thinking)), text)

    assert allows('So.</think>\n\n{"a": 0.5}', Thinking.OPEN)
    assert not allows('So.</think>{"a": 0}', Thinking.OPEN)
    lark = f'start: "x" (%json {json.dumps(schema)} ";")* | %json {json.dumps(INT64)}'
    assert allows('x{"a": 0.5};{"b": ["c"]};', grammar=lark)
    assert not allows('x{"a": 0};', grammar=lark)
    assert allows(str(-(2**63)), grammar=lark)
    assert allows('{\n  "a": 0.5,\n  "b": [\n    "a"\n  ]\n}')
    assert not allows('{"a":  0.5}')
    assert not allows('{"a": 0. 5}')
    assert allows('{_"a"_:/0.5}', json=schema, whitespace_pattern="_|/")
    assert not allows('{"a": 0.5}', json=schema, whitespace_pattern="_|/")


def written(grammars, schema):
    """Return all texts that a schema of few texts allows, token by token."""
    waiting, found = [(started(grammars, schema), b"")], set()
    while waiting:
        matcher, text = waiting.pop()
        allowed = np.flatnonzero(np.unpackbits(grammars.masks([matcher])[0].view(np.uint8), bitorder="little"))
        assert allowed.size, text
        assert len(waiting) < 200, text
        for token_id in allowed.tolist():
            following = matcher.copy()
            is_over = following.advance(token_id)
            if token_id == 256 or is_over:
                found.add((text + bytes([token_id]) if token_id < 256 else text).decode())
            if token_id != 256 and not is_over:
                waiting.append((following, text + bytes([token_id])))
    return found


def test_a_property_that_would_never_end_is_not_begun(grammars):
    """Each value of it would hold another one; without it the object is finite."""
    definitions = {
        "Endless": {"type": "object", "properties": {"a": {"$ref": "#/$defs/Endless"}}, "required": ["a"]},
        "Itself": {"$ref": "#/$defs/Itself"},
    }
    names = {"a": {"$ref": "#/$defs/Endless"}, "b": {"const": 1}, "c": {"$ref": "#/$defs/Itself"}}
    schema = {"$defs": definitions, "type": "object", "properties": names, "additionalProperties": False}
    assert written(grammars, schema) == {"{}", '{"b":1}'}


def test_unique_items_are_all_arrangements_of_their_values_and_nothing_else(grammars):
    schema = {
        "type": "array",
        "items": {"type": "integer", "minimum": 1, "maximum": 4},
        "uniqueItems": True,
        "minItems": 1,
        "maxItems": 3,
    }
    arrangements = (one for length in (1, 2, 3) for one in itertools.permutations([1, 2, 3, 4], length))
    assert written(grammars, schema) == {json.dumps(one, separators=(",", ":")) for one in arrangements}


FINITE = {
    "all names are listed": (
        {"properties": {"xa": {"const": 1}, "xb": {"const": 2}}, "patternProperties": {"^x[ab]$": {"type": "integer"}}},
        {"{}", '{"xa":1}', '{"xb":2}', '{"xa":1,"xb":2}'},
    ),
    "the pattern's schema holds of a listed name": (
        {"properties": {"foo": {"enum": [1, 2]}}, "patternProperties": {"^foo$": {"minimum": 2}}},
        {"{}", '{"foo":2}'},
    ),
    "a required name that only a pattern describes": (
        {"patternProperties": {"^foo$": {"const": 3}}, "required": ["foo"]},
        {'{"foo":3}'},
    ),
    "two patterns": (
        {
            "properties": {"a": {"const": 1}, "b": {"const": 2}},
            "patternProperties": {"^a$": {}, "^b$": {}},
            "required": ["a"],
        },
        {'{"a":1}', '{"a":1,"b":2}'},
    ),
}


@pytest.mark.parametrize(("schema", "texts"), FINITE.values(), ids=FINITE)
def test_no_comma_stands_where_no_name_is_left(grammars, schema, texts):
    assert written(grammars, {"type": "object", "additionalProperties": False, **schema}) == texts


REFUSED = {
    "nine values": (
        {"type": "array", "uniqueItems": True, "items": {"type": "integer", "minimum": 1, "maximum": 9}},
        "#/uniqueItems",
    ),
    "any values": ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "#/properties/a/uniqueItems"),
    "lists": ({"type": "array", "uniqueItems": True, "items": {"enum": [[1], [2]]}}, "#/uniqueItems"),
    "first items": ({"type": "array", "uniqueItems": True, "prefixItems": [BIT]}, "#/uniqueItems"),
    "more items than values": ({**LETTERS, "minItems": 4}, "nothing satisfies"),
    "a tuple of no draft": ({"type": "array", "items": [BIT]}, "#/items"),
    "additionalItems of no draft": ({"type": "array", "items": BIT, "additionalItems": BIT}, "#/additionalItems"),
    "one constant twice": ({"oneOf": [{"const": number} for number in (6, 7, 8, 7.0)]}, "options 1 and 3"),
    "a definition with a use": ({"$defs": {"A": OVERLAPPING}, "items": {"$ref": "#/$defs/A"}}, "#/$defs/A/oneOf"),
    "nullable that is no boolean": ({"type": "string", "nullable": "yes"}, "#/nullable"),
    "names beside patterns": ({"propertyNames": {"enum": ["a"]}, "patternProperties": {"^a": BIT}}, "#/propertyNames"),
    "an integer of 60 digits": ({"type": "integer", "maximum": 10**60}, "#/maximum"),
    "no value beside a number": (
        {"anyOf": [BELOW_HALF, {"items": {"pattern": "(?=a)"}}]},
        "#/anyOf/1/items: look-around",
    ),
    "no number between": ({"type": "number", "exclusiveMinimum": 0.1, "exclusiveMaximum": 0.1}, "nothing satisfies"),
    "no multiple between": (
        {"type": "number", "minimum": 0.3, "maximum": 0.4, "multipleOf": 0.25},
        "nothing satisfies",
    ),
}


@pytest.mark.parametrize(("schema", "told"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_grammar_is_refused_with_its_place(grammars, schema, told):
    with pytest.raises(InvalidRequestError, match=re.escape(told)):
        started(grammars, schema)


PATTERNS = {
    "e-mail": (EMAIL, ["a", ".", "'", "@", "b.c", "-", "+", "a@b.cc"], 5),
    "duration": (DURATION, ["P", "T", "1", "2W", "3Y", "4M", "5D", "6H", "7S", "1.5S", "P1", "PT"], 5),
    "host name": (HOSTNAME, ["a", ".", "-", "b", "ab.c"], 6),
    "Decimal": (DECIMAL + r"\d*\.?\d*$", ["0", "1", "2", ".", "-", "+"], 5),
    "Decimal with places": (DECIMAL + r"\d*\.?\d{0,2}0*$", ["0", "1", "2", ".", "-", "00"], 7),
    "Decimal with both": (
        DECIMAL + r"(?:\d{0,2}$|(?=[\d.]{1,5}0*$)\d{0,2}\.\d{0,2}0*$)",
        ["0", "1", "2", ".", "-", "00"],
        7,
    ),
    "Decimal with digits": (DECIMAL + r"(?:\d{0,2}$|(?=[\d.]{1,3}0*$)\d*\.\d*0*$)", ["0", "1", "2", ".", "-", "00"], 7),
    "Decimal with more places than digits": (
        DECIMAL + r"(?:\d{0,0}$|(?=[\d.]{1,3}0*$)\d{0,0}\.\d{0,4}0*$)",
        ["0", "1", ".", "-"],
        7,
    ),
}
"""A pattern with a look-ahead, and of what texts are drawn. (Pydantic ends no integer by $: any text may follow.)"""


@pytest.mark.parametrize(("pattern", "parts", "max_parts"), PATTERNS.values(), ids=PATTERNS)
def test_a_known_pattern_means_the_same_without_its_look_ahead(pattern, parts, max_parts):
    rng, num_matching = random.Random(0), 0
    rewritten = without_look_ahead(pattern.replace("}$|", "}|"))
    assert "(?=" not in rewritten
    assert "(?!" not in rewritten
    for _ in range(4_000):
        text = "".join(rng.choices(parts, k=rng.randint(0, max_parts)))
        num_matching += bool(re.search(pattern, text))
        assert bool(re.search(pattern, text)) == bool(re.search(rewritten, text)), text
    assert num_matching > 20


def test_formats_that_are_not_known_are_told_with_their_places_and_logged_once(caplog):
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "format": "base64"},
            "b": {"type": "array", "items": {"type": "string", "format": "uuid4"}},
            "c": {"type": "integer", "format": "int64"},
            "d": {"type": "string", "format": "date"},
            "e": {"type": "string", "format": "password"},
        },
    }
    assert unknown_formats(schema) == ["base64 at #/properties/a/format", "uuid4 at #/properties/b/items/format"]
    grammars = grammars_of(byte_tokenizer())
    with caplog.at_level(logging.WARNING, "jpaged"):
        for title in ("one", "another"):
            grammars.grammar_of(StructuredOutputsParams(json={**schema, "title": title}))
    assert [record.getMessage().count("base64") for record in caplog.records] == [1, 0]
