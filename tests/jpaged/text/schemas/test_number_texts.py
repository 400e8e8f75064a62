"""Numbers that a schema allows, text by text, held to Python's Decimal: within bounds, at them, and a step outside."""

import json
import random
from decimal import Decimal

import pytest

from jpaged.structured_outputs import StructuredOutputsParams

from ..grammar.grammar_walks import grammars_of
from ..tokenizing.published_tokenizers import byte_tokenizer

TEXTS_A_SCHEMA = 20
MULTIPLES = [Decimal(text) for text in ("1", "5", "0.5", "0.25", "0.1", "0.01", "2.5", "100", "0.7", "3")]
UNTOLD = (Decimal("0.7"), Decimal(3))
"""Multiples that the last digits of a text do not tell."""


@pytest.fixture(scope="module")
def allows():
    grammars = grammars_of(byte_tokenizer())

    def allows(schema, texts):
        """Return whether each of some texts can be written under a schema."""
        params = StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=True)
        matcher = grammars.matcher(grammars.grammar_of(params))
        found = []
        for text in texts:
            parser = matcher.copy().parser
            found.append(parser.try_consume_tokens(list(text.encode())) == len(text) and parser.is_accepting())
        return found

    return allows


def drawn_bound(rng):
    """Return a bound as it stands in a schema: few digits or many, whole or not, of either sign."""
    places = rng.choice([0, 0, 1, 2, 2, 3, 6])
    digits = rng.choice(["0", "1", "5", str(rng.randrange(10)), str(rng.randrange(10**3)), str(rng.randrange(10**7))])
    sign = rng.choice(["", "", "-"])
    return Decimal(f"{sign}{digits}").scaleb(-places)


def drawn_schema(rng):
    """Return the keywords of a schema of numbers that some number satisfies, with bounds as Decimals."""
    while True:
        kind = rng.choice(["number", "number", "integer"])
        low = drawn_bound(rng)
        width = abs(drawn_bound(rng)) * rng.choice([1, 1, Decimal("0.01")])
        schema = {"type": kind}
        if rng.random() < 0.8:
            schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
        if rng.random() < 0.8 or len(schema) == 1:
            schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + width
        if rng.random() < 0.3:
            schema["multipleOf"] = rng.choice(MULTIPLES)
        step = schema.get("multipleOf", Decimal(1) if kind == "integer" else Decimal("1e-12"))
        near = [(low // step + number) * step for number in range(-1, 3)]
        if any(satisfies(schema, value) for value in near):
            return schema


def satisfies(schema, value):
    return (
        value >= schema.get("minimum", value)
        and value <= schema.get("maximum", value)
        and (value > schema["exclusiveMinimum"] if "exclusiveMinimum" in schema else True)
        and (value < schema["exclusiveMaximum"] if "exclusiveMaximum" in schema else True)
        and (value % schema["multipleOf"] == 0 if "multipleOf" in schema else True)
        and (value % 1 == 0 or schema["type"] == "number")
    )


def drawn_texts(rng, schema):
    """Return plain decimals, half of them a step outside a bound, the others near one or between both."""
    bounds = [value for name, value in schema.items() if "imum" in name]
    is_integer = schema["type"] == "integer"
    texts = []
    for number in range(TEXTS_A_SCHEMA):
        bound = rng.choice(bounds)
        places = -min(0, bound.as_tuple().exponent)
        step = Decimal(1).scaleb(-(0 if is_integer else rng.choice([places, places, places + 1, max(places - 1, 0)])))
        if is_integer:
            bound = bound.to_integral_value()
        if number % 2 == 0:
            is_low = any(schema.get(name) == bound for name in ("minimum", "exclusiveMinimum"))
            value = bound - step if is_low else bound + step
        else:
            value = rng.choice([bound, bound + step, bound - step, sum(bounds) / len(bounds), bound + 3 * step])
            if "multipleOf" in schema:
                value = value // schema["multipleOf"] * schema["multipleOf"]
            value = round(value, 0 if is_integer else rng.choice([places, places + 1]))
        if schema.get("multipleOf") in UNTOLD:  # These are written without zeros at the end.
            value = value.normalize() if value else Decimal(0)
        if value == 0 and satisfies(schema, value):  # Where zero is allowed, it may have a minus or not.
            value = abs(value)
        text = f"{value:f}"
        if not is_integer and rng.random() < 0.3 and "multipleOf" not in schema:
            text += ("" if "." in text else ".") + "0" * rng.randint(1, 3)
        texts.append(text)
    return texts


def differences(allows, seed, num_pairs):
    """Return pairs of a schema and a text on which the grammar and Decimal disagree, and how many were drawn inside."""
    rng, wrong, num_inside = random.Random(seed), [], 0
    for _ in range(num_pairs // TEXTS_A_SCHEMA):
        schema = drawn_schema(rng)
        texts = drawn_texts(rng, schema)
        written = {
            name: value if isinstance(value, str) else int(value) if value % 1 == 0 else float(value)
            for name, value in schema.items()
        }
        wanted = [satisfies(schema, Decimal(text)) for text in texts]
        num_inside += sum(wanted)
        found = allows(written, texts)
        wrong += [(written, text, is_in) for text, is_in, has in zip(texts, wanted, found, strict=True) if is_in != has]
    return wrong, num_inside


@pytest.mark.parametrize("num_pairs", [4_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_text_can_be_written_just_if_its_decimal_value_satisfies_the_bounds(allows, num_pairs):
    wrong, num_inside = differences(allows, num_pairs, num_pairs)
    assert not wrong, (len(wrong), wrong[:10])
    assert 0.2 < num_inside / num_pairs < 0.6
