"""The formats of strings whose expression is our own, text by text as RFC 3339, 3986 and 4291 have them."""

import ipaddress
import json
import random

import pytest

from jpaged.structured_outputs import StructuredOutputsParams

from ..grammar.grammar_walks import grammars_of
from ..tokenizing.published_tokenizers import byte_tokenizer

GRAMMARS = grammars_of(byte_tokenizer())


def allows(schema, value):
    """Return whether a grammar of the schema allows a JSON value."""
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    matcher, text = GRAMMARS.matcher(GRAMMARS.grammar_of(params)), json.dumps(value, ensure_ascii=False).encode()
    return matcher.parser.try_consume_tokens(list(text)) == len(text) and matcher.parser.is_accepting()


def test_ipv6_addresses_are_those_of_the_standard_library():
    """Of groups and an IPv4 end in all numbers, with a double colon at each place, and with faults."""
    rng, num_valid = random.Random(0), 0
    for _ in range(600):
        parts = [f"{rng.choice([0, 1, 0xFFFF, rng.randrange(1 << 16)]):x}" for _ in range(rng.randint(0, 8))]
        if rng.random() < 0.4:
            parts.append(".".join(str(rng.choice([0, 1, 255, rng.randrange(300)])) for _ in range(4)))
        text, cut = ":".join(parts), rng.randint(0, len(parts))
        if rng.random() < 0.8:
            text = ":".join(parts[:cut]) + "::" + ":".join(parts[cut:])
        try:
            is_valid = bool(ipaddress.IPv6Address(text))
        except ValueError:
            is_valid = False
        num_valid += is_valid
        assert allows({"type": "string", "format": "ipv6"}, text) == is_valid, text
    assert num_valid > 200


TEXTS = {  # format: those that have it, those that have not
    "ipv6": (["::ffff:192.168.0.1", "1::d6:1.2.3.4", "::", "::1.2.3.4"], ["::1.2.3", "1::2:192.168.256.1", "::1%eth0"]),
    "uri": (
        ["http://[::ffff:1.2.3.4]:80/a?b#c", "urn:a:b", "mailto:a@b.c", "x://", "http://a%20b/", "tel:+1", "a:b@c/d"],
        [
            "http://[::ffff:1.2.3.456]",
            "http://a b",
            "//a",
            "/a",
            "a",
            "http://a/%4",
            "1a:b",
            "http://a:b8/",
            "http://ü",
        ],
    ),
    "date": (
        ["2020-02-29", "2000-02-29", "0400-02-29", "2021-02-28", "2021-12-31", "0001-01-01"],
        ["2021-02-29", "1900-02-29", "0000-01-01", "2021-04-31", "2021-13-01", "2021-1-1"],
    ),
    "date-time": (
        ["2020-02-29T23:59:60.5Z", "2021-01-01t00:00:00-23:59"],
        ["2021-02-29T00:00:00Z", "2021-01-01T24:00:00Z", "2021-01-01T00:00:00", "2021-01-01 00:00:00Z"],
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_format_has_these_texts_and_not_those(name):
    valid, others = TEXTS[name]
    assert [text for text in valid if not allows({"type": "string", "format": name}, text)] == []
    assert [text for text in others if allows({"type": "string", "format": name}, text)] == []


def test_a_format_stands_beside_other_keywords_and_says_nothing_of_other_types():
    both = {"type": "string", "format": "ipv6", "pattern": "^::", "maxLength": 9, "allOf": [{"minLength": 3}]}
    assert [allows(both, text) for text in ("::1", "1::", "::", "::1.2.3.40")] == [True, False, False, False]
    assert allows({"format": "ipv6"}, 5)
    assert allows({"type": ["string", "null"], "format": "ipv6"}, None)
