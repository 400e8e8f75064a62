"""Each keyword of JSON Schema is enforced, as random outputs show to an independent validator, or refused by name."""

import json
import re
from pathlib import Path

import jsonschema
import pytest

from jpaged.errors import InvalidRequestError
from jpaged.structured_outputs import StructuredOutputsParams
from jpaged.text.schemas.json_schema import ANNOTATIONS, DRAFTS, ENFORCED, FORMATS, REFUSED, enforced_schema

from ..grammar.grammar_walks import grammars_of, random_output
from ..tokenizing.published_tokenizers import byte_tokenizer

INT, BIT = {"type": "integer", "minimum": 0, "maximum": 99}, {"type": "boolean"}
TEXT = {"type": "string", "maxLength": 3}
CUT = object()
DOCS = Path(__file__).parents[4] / "docs" / "structured_outputs.md"

CASES = {
    "type": {"type": ["boolean", "null"]},
    "const": {"const": {"a": [1, "é", None]}},
    "enum": {"enum": [1, "a", None, True, [1, 2], {"k": 1.5}]},
    "anyOf": {"anyOf": [TEXT, {"type": "integer", "minimum": 5, "maximum": 7}]},
    "allOf": {
        "type": "object",
        "maxProperties": 2,
        "allOf": [{"properties": {"a": INT}, "required": ["a"]}, {"properties": {"b": BIT}, "required": ["b"]}],
    },
    "oneOf": {"oneOf": [{"type": "array", "items": BIT, "maxItems": 2}, {"enum": ["x", "y"]}, {"type": "null"}]},
    "$ref": {"$defs": {"a/b%c": {"type": "integer", "minimum": 3, "maximum": 5}}, "$ref": "#/$defs/a~1b%25c"},
    "$defs": {"$defs": {"one": BIT}, "type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 3},
    "definitions": {
        "definitions": {"one": BIT},
        "type": "array",
        "items": {"$ref": "#/definitions/one"},
        "maxItems": 3,
    },
    "properties": {
        "type": "object",
        "properties": {'a"b': INT, "é\n": BIT},
        "required": ["é\n"],
        "maxProperties": 2,
        "minProperties": 2,
        "additionalProperties": False,
    },
    "required": {
        "type": "object",
        "properties": {"a": INT, "b": INT},
        "required": ["a"],
        "additionalProperties": False,
    },
    "additionalProperties": {
        "type": "object",
        "properties": {"a": INT},
        "required": ["a"],
        "maxProperties": 2,
        "additionalProperties": {"type": "null"},
    },
    "patternProperties": {
        "type": "object",
        "properties": {"foo": {"type": "integer", "maximum": 9}},
        "required": ["foo"],
        "patternProperties": {"^f.{0,2}$": {"type": "integer", "minimum": 7, "maximum": 20}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "minProperties": {
        "type": "object",
        "patternProperties": {"^x[ab]$": BIT},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
    "maxProperties": {
        "type": "object",
        "patternProperties": {"^x[a-z]$": BIT},
        "additionalProperties": False,
        "maxProperties": 1,
    },
    "items": {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 3},
    "prefixItems": {
        "type": "array",
        "prefixItems": [INT, BIT],
        "items": {"type": "null"},
        "minItems": 2,
        "maxItems": 4,
    },
    "minItems": {"type": "array", "items": BIT, "minItems": 2, "maxItems": 3},
    "maxItems": {"type": "array", "items": BIT, "maxItems": 2},
    "minLength": {"type": "string", "minLength": 2, "maxLength": 4},
    "maxLength": TEXT,
    "pattern": {"type": "string", "pattern": r"^\w\W\d\D\s\S[^\w\s]?[\d-]x+?$", "maxLength": 12},
    "format": {"type": "string", "format": "date"},
    "minimum": {"type": "number", "minimum": 3, "maximum": 8.5},
    "maximum": {"type": "integer", "maximum": 5, "minimum": -5},
    "exclusiveMinimum": {"type": "integer", "exclusiveMinimum": 3, "maximum": 5},
    "exclusiveMaximum": {"type": "integer", "exclusiveMaximum": 3, "minimum": 0},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": -50, "maximum": 50},
    "uniqueItems": {"type": "array", "items": {"enum": ["a", 1, None]}, "uniqueItems": True, "maxItems": 4},
    "propertyNames": {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": BIT,
        "maxProperties": 1,
    },
}
"""Keyword → a schema that is about it."""
WEAKER = {
    "oneOf": {},
    "allOf": {"type": "object"},
    "$ref": {},
    "$defs": {"type": "array"},
    "definitions": {"type": "array"},
    "pattern": TEXT,
    "format": TEXT,
    "properties": {"type": "object"},
    "maxProperties": {"type": "object"},
}
"""What a schema becomes without the keyword, where dropping it alone gives a schema that cannot be enforced or ends
too late."""


@pytest.fixture(scope="module")
def write():
    tokenizer = byte_tokenizer()
    grammars = grammars_of(tokenizer)

    def write(schema, seed, **options):
        """Return a random value that the schema allows; CUT if it was cut."""
        options = {"disable_any_whitespace": True, **options}
        output, is_over = random_output(
            grammars, 256, seed, json=schema, token_bytes=lambda token_id: bytes([token_id]), **options
        )
        return json.loads(output) if is_over else CUT

    return write


@pytest.mark.parametrize("keyword", CASES)
def test_an_enforced_keyword_holds_of_all_outputs_and_without_it_not(keyword, write):
    schema = CASES[keyword]
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    values = [write(schema, seed) for seed in range(25)]
    assert sum(value is not CUT for value in values) >= 20
    for value in values:
        if value is not CUT:
            validator.validate(value)
    weaker = WEAKER.get(keyword, {name: value for name, value in schema.items() if name != keyword})
    others = [write(weaker, seed) for seed in range(60)]
    assert not all(validator.is_valid(value) for value in others if value is not CUT), "these outputs show nothing"


def test_every_keyword_of_the_draft_is_enforced_or_refused_or_says_nothing():
    vocabularies = jsonschema.validators.validator_for({}).META_SCHEMA["allOf"]
    registry = jsonschema.Draft202012Validator({})._resolver
    keywords = set()
    for one in vocabularies:
        keywords |= (
            registry.lookup(f"https://json-schema.org/draft/2020-12/{one['$ref']}").contents["properties"].keys()
        )
    known = {*ENFORCED, *REFUSED, *ANNOTATIONS, "$schema", "$id", "uniqueItems"}
    assert keywords <= known
    assert set(CASES) == {*ENFORCED, "uniqueItems", "propertyNames"}


@pytest.mark.parametrize("keyword", [name for name in REFUSED if name != "id"] + ["uniqueItems", "$id"])
def test_a_keyword_that_is_not_enforced_is_refused_with_its_path(keyword):
    schema = {"type": "object", "properties": {"a/b": {"items": {keyword: {"a": True}}}}}
    with pytest.raises(InvalidRequestError, match=re.escape(f"#/properties/a~1b/items/{keyword}")) as caught:
        enforced_schema(schema, closes_objects=False)
    assert caught.value.param == "json"


NOT_ENFORCED = {
    "another document": ({"$ref": "http://example.com/schema"}, r"another document at #/\$ref"),
    "a file": ({"items": {"$ref": "file:///etc/passwd"}}, r"another document at #/items/\$ref"),
    "nothing": ({"$ref": "#/$defs/missing"}, r"nothing at #/\$ref"),
    "an unknown keyword": ({"type": "string", "maxlength": 3}, "#/maxlength.*did you mean maxLength"),
    "an unknown type": ({"type": "int"}, "another type at #/type, .*did you mean integer"),
    "overlapping options": ({"oneOf": [INT, {"type": "number"}]}, "options 0 and 1.* at #/oneOf"),
    "overlapping constants": ({"oneOf": [{"enum": ["a", "b"]}, {"const": "b"}]}, "options 0 and 1.* at #/oneOf"),
    "options of several types": ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "options 0 and 1.* at #/oneOf"),
    "names that may come twice": ({"type": "object", "minProperties": 3, "required": ["a"]}, "#/minProperties"),
    "a large number": ({"enum": [1, [{"a": 10**40}]]}, "#/enum/1/0/a"),
    "a huge count": ({"type": "array", "maxItems": 10**9}, "#/maxItems"),
    "a negative count": ({"maxLength": -1}, "#/maxLength"),
    "items of another draft": ({"items": [INT]}, "#/items.*prefixItems"),
    "no options": ({"anyOf": []}, "#/anyOf"),
    "no schema": ({"properties": {"a": 3}}, "a JSON number at #/properties/a"),
    "many patterns at once": (
        {"allOf": [{"properties": {"a": {"pattern": f"a.{{{n}}}b"}}} for n in range(9)]},
        "9 of pattern and format",
    ),
    "another draft": ({"$schema": "http://json-schema.org/draft-03/schema#"}, r"another draft at #/\$schema"),
    "false": (False, "false at #"),
}


@pytest.mark.parametrize(("schema", "told"), NOT_ENFORCED.values(), ids=NOT_ENFORCED)
def test_what_cannot_be_enforced_is_refused_with_its_path(schema, told):
    with pytest.raises(InvalidRequestError, match=told):
        enforced_schema(schema, closes_objects=False)


NEEDS_A_COMPILER = {
    "a look-ahead": ({"properties": {"a": {"items": {"pattern": "(?=a)b"}}}}, "#/properties/a/items"),
    "nothing satisfies it": (
        {"type": "object", "properties": {"a": {"allOf": [TEXT, INT]}}, "required": ["a"]},
        "#/properties/a",
    ),
    "overlapping patterns": ({"anyOf": [INT, {"patternProperties": {"^f": INT, "o$": BIT}}]}, "#/anyOf/1"),
    "no room": ({"anyOf": [{"type": "array", "minItems": 3, "maxItems": 2}]}, "#/anyOf/0"),
}


@pytest.mark.parametrize(("schema", "place"), NEEDS_A_COMPILER.values(), ids=NEEDS_A_COMPILER)
def test_what_only_compiling_shows_is_refused_with_its_path_too(schema, place):
    with pytest.raises(InvalidRequestError, match=re.escape(f"at {place}:")):
        grammars_of(byte_tokenizer()).grammar_of(StructuredOutputsParams(json=schema))


PYDANTIC = {
    "a discriminated union": {
        "$defs": {
            "Cat": {
                "properties": {
                    "kind": {"const": "cat", "title": "Kind", "type": "string"},
                    "lives": {"maximum": 9, "minimum": 0, "title": "Lives", "type": "integer"},
                },
                "required": ["kind", "lives"],
                "title": "Cat",
                "type": "object",
                "additionalProperties": False,
            },
            "Dog": {
                "properties": {
                    "kind": {"const": "dog", "title": "Kind", "type": "string"},
                    "good": {"default": True, "title": "Good", "type": "boolean"},
                },
                "required": ["kind"],
                "title": "Dog",
                "type": "object",
                "additionalProperties": False,
            },
        },
        "properties": {
            "pet": {
                "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
                "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
                "title": "Pet",
            }
        },
        "required": ["pet"],
        "title": "Owner",
        "type": "object",
        "additionalProperties": False,
    },
    "a union whose discriminator has a default": {
        "$defs": {
            name: {
                "properties": {
                    "kind": {"const": name, "default": name, "title": "Kind", "type": "string"},
                    "lives": {"maximum": 9, "minimum": 0, "title": "Lives", "type": "integer"},
                },
                "required": ["lives"],
                "title": name,
                "type": "object",
                "additionalProperties": False,
            }
            for name in ("cat", "dog")
        },
        "properties": {
            "pet": {
                "discriminator": {"mapping": {"cat": "#/$defs/cat", "dog": "#/$defs/dog"}, "propertyName": "kind"},
                "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            }
        },
        "required": ["pet"],
        "type": "object",
        "additionalProperties": False,
    },
    "Optional": {
        "properties": {
            "name": {"anyOf": [{"maxLength": 5, "type": "string"}, {"type": "null"}], "default": None, "title": "Name"},
            "age": {
                "anyOf": [{"exclusiveMinimum": 0, "maximum": 120, "type": "integer"}, {"type": "null"}],
                "title": "Age",
            },
        },
        "required": ["age"],
        "title": "Person",
        "type": "object",
        "additionalProperties": False,
    },
    "a recursive model": {
        "$defs": {
            "Node": {
                "properties": {
                    "value": {"maximum": 9, "minimum": 0, "title": "Value", "type": "integer"},
                    "left": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}], "default": None},
                },
                "required": ["value", "left"],
                "title": "Node",
                "type": "object",
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/Node",
    },
    "a strict schema of the openai SDK": {
        "type": "object",
        "title": "Event",
        "additionalProperties": False,
        "required": ["name", "day", "people"],
        "properties": {
            "name": {"title": "Name", "type": "string", "maxLength": 8},
            "day": {"$ref": "#/$defs/Day"},
            "people": {"items": {"type": "string", "maxLength": 3}, "title": "People", "type": "array", "maxItems": 2},
        },
        "$defs": {"Day": {"enum": ["mon", "tue"], "title": "Day", "type": "string"}},
    },
}
"""As Pydantic 2 and `openai.lib._pydantic.to_strict_json_schema` write them."""


@pytest.mark.parametrize("schema", PYDANTIC.values(), ids=PYDANTIC)
def test_the_schemas_of_pydantic_and_of_the_openai_sdk_are_taken_as_they_are(schema, write):
    values = [write(schema, seed) for seed in range(25)]
    assert sum(value is not CUT for value in values) >= 20
    for value in values:
        if value is not CUT:
            jsonschema.validate(value, schema)


OPEN = {"type": "object", "properties": {"a": INT}, "required": ["a"]}
FORBIDDEN = [
    # A name has one spelling, so that no further property can replace the value of another one.
    (OPEN, '{"a":1,"\\u0061":"x"}'),
    (OPEN, '{"a":1,"a":"x"}'),
    ({"type": "object", "patternProperties": {"^f": INT}}, '{"\\u0066":"x"}'),
    ({"type": "object", "properties": {"a\n": False}}, '{"a\\u000a":1}'),
    ({"allOf": [{"type": "integer", "multipleOf": 4}, {"multipleOf": 6}]}, "8"),
    ({"type": "string", "pattern": r"^[\w-z]$"}, '"`"'),
    ({"type": "string", "pattern": r"^[+-\d]$"}, '"/"'),
    ({"type": "string", "pattern": "^a{2, 3}$"}, '"aa"'),
    ({"type": "string", "pattern": r"^\W$"}, '"é"'),
    ({"type": "string", "pattern": r"^[^\d]$"}, '"٣"'),
    (PYDANTIC["a union whose discriminator has a default"], '{"pet":{"lives":3}}'),
]


@pytest.mark.parametrize(("schema", "text"), FORBIDDEN)
def test_a_text_that_a_validator_refuses_cannot_be_written(schema, text):
    grammars = grammars_of(byte_tokenizer())
    matcher = grammars.matcher(grammars.grammar_of(StructuredOutputsParams(json=schema, disable_any_whitespace=True)))
    num_taken = matcher.parser.try_consume_tokens(list(text.encode()))
    assert num_taken < len(text.encode()) or not matcher.parser.is_accepting()


USUAL = [
    (OPEN, '{"a":1,"b\\n":"x"}'),
    ({"type": "string", "pattern": r"^[\w-\.]+@([\w-]+\.)+[\w-]{2,4}$"}, '"a-b.c@d-e.org"'),
    ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INT}, '{"x":1}'),
    ({"type": "integer", "format": "int64", "nullable": False, "propertyOrdering": []}, "5"),
    ({"type": "string", "format": "password"}, '"x"'),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {name: INT}, "required": [name], "additionalProperties": False}
                for name in ("Circle", "Square")
            ]
        },
        '{"Square":4}',
    ),
    (
        {
            "type": "object",
            "patternProperties": {"^x": INT},
            "anyOf": [{"required": ["xa"]}, {"required": ["xb"]}],
            "additionalProperties": False,
        },
        '{"xb":1}',
    ),
    (PYDANTIC["a union whose discriminator has a default"], '{"pet":{"kind":"cat","lives":3}}'),
]


@pytest.mark.parametrize(("schema", "text"), USUAL)
def test_schemas_as_common_libraries_write_them_allow_what_they_should(schema, text):
    if "pattern" not in schema:  # Python's dialect takes fewer than ECMAScript's.
        jsonschema.validate(json.loads(text), schema)
    grammars = grammars_of(byte_tokenizer())
    matcher = grammars.matcher(grammars.grammar_of(StructuredOutputsParams(json=schema, disable_any_whitespace=True)))
    assert matcher.parser.try_consume_tokens(list(text.encode())) == len(text.encode())
    assert matcher.parser.is_accepting()


RECURSIVE = {
    "$defs": {
        name: {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/Any"}, "right": {"$ref": "#/$defs/Any"}, "kind": {"const": name}},
            "required": ["left", "right", "kind"],
        }
        for name in ("Sum", "Product", "Difference", "Quotient")
    }
}
RECURSIVE["$defs"]["Number"] = {"type": "integer", "minimum": 0, "maximum": 9}
RECURSIVE["$defs"]["Any"] = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in RECURSIVE["$defs"]]}
RECURSIVE["$ref"] = "#/$defs/Any"


def test_options_that_lead_back_to_themselves_are_told_apart_by_their_constants(write):
    values = [write(RECURSIVE, seed) for seed in range(10)]
    for value in values:
        if value is not CUT:
            jsonschema.validate(value, RECURSIVE)


def test_disable_additional_properties_closes_objects_that_do_not_say(write):
    schema = {"type": "object", "properties": {"a": INT, "b": {"type": "object", "properties": {"c": BIT}}}}
    for seed in range(20):
        value = write(schema, seed, disable_additional_properties=True)
        assert value.keys() <= {"a", "b"}
        assert value.get("b", {}).keys() <= {"c"}


def test_white_space_is_bounded_and_may_be_forbidden_or_given():
    tokenizer = byte_tokenizer()
    grammars, schema = grammars_of(tokenizer), {"type": "array", "items": BIT, "minItems": 3, "maxItems": 5}
    gap = r"(?: |\n{1,2}[ \t]{0,20})?"
    found = []
    for options in ({}, {"disable_any_whitespace": True}, {"whitespace_pattern": "_?"}):
        texts = [
            random_output(grammars, 256, seed, json=schema, token_bytes=lambda one: bytes([one]), **options)[0].decode()
            for seed in range(10)
        ]
        found.append(texts)
    assert all(re.fullmatch(f"\\[{gap}(?:(?:true|false){gap},?{gap})+\\]", text) for text in found[0])
    assert any("\n" in text for text in found[0])
    assert not any(character.isspace() for text in found[1] for character in text)
    assert any("_" in text for text in found[2])


def test_the_documentation_lists_every_keyword():
    text = DOCS.read_text(encoding="utf-8")
    for name in (*ENFORCED, *REFUSED, *ANNOTATIONS, *FORMATS, *DRAFTS, "uniqueItems"):
        assert f"`{name}`" in text, name
