"""Lark and GBNF: each is recognised, read as its own engine reads it, or refused by name."""

import re

import pytest

from jpaged.errors import InvalidRequestError
from jpaged.structured_outputs import StructuredOutputsParams
from jpaged.text.grammar.lark_grammar import MIN_JOINED, joined_texts

from ..tokenizing.published_tokenizers import byte_tokenizer
from .grammar_walks import grammars_of

GRAMMARS = grammars_of(byte_tokenizer())
TEXTS = {  # grammar: texts of it, texts that are none of it
    '?start: "a" | b\nb: "b"': (["a", "b"], ["c"]),
    '!start: "a"': (["a"], []),
    '!?start: "a"': (["a"], []),
    'x: "a"\n\t?start : x -> y': (["a"], []),
    "start[lazy]: /a+/": (["a"], []),
    'start: NAME "::=" NAME\nNAME: /[a-z]+/': (["a::=b"], []),
    '# root ::= "a"\n%import common (INT, WS)\n%ignore WS\n?start: INT "+" INT': (["1 + 2"], ["a"]),
    'root ::= start | b\nstart ::= "x"\nb ::= [0-9]+': (["x", "12"], [""]),
    'root   ::=\n  "a" |\n  "b" # c\n': (["a", "b"], ["c"]),
    r'root ::= "\u0041bc" . [\u0030-\u0039] "\U0001F600"': (["Abc\n5😀"], ["\u41bc\n5😀"]),
    r'root ::= [&&a]+ [~~] "\x41." [^"\\\x7F\x00-\x1F]': (["a&~A.é"], ["&&A.é", 'a~A."']),
}


@pytest.mark.parametrize("grammar", TEXTS)
def test_a_grammar_of_either_kind_has_these_texts_and_not_those(grammar):
    key = GRAMMARS.grammar_of(StructuredOutputsParams(grammar=grammar))
    for texts, is_text in zip(TEXTS[grammar], (True, False), strict=True):
        for text in texts:
            parser, data = GRAMMARS.matcher(key).parser, list(text.encode())
            assert (parser.try_consume_tokens(data) == len(data) and parser.is_accepting()) == is_text, text


REFUSED = {  # grammar: what its error says
    'start.2: "a"': "priority not supported",
    'A.2: "a"\nstart: A': "priority not supported",
    'x{y}: y\nstart: x{"a"}': "params not supported",
    "%declare A\nstart: A": "declare statement not supported",
    '%override start: "a"': "override statement not supported",
    "%import python.NAME\nstart: NAME": "Unknown common regex",
    'start ::= "a"': "No … rule found",
    'root ::= a-b aB\na-b ::= "a"\naB ::= "b"': "Rule … already exists",
    '?begin: "a"': "no start rule found",
}


@pytest.mark.parametrize("grammar", REFUSED)
def test_what_llguidance_has_not_of_lark_is_refused_by_name(grammar):
    with pytest.raises(InvalidRequestError, match=re.escape(REFUSED[grammar])):
        GRAMMARS.grammar_of(StructuredOutputsParams(grammar=grammar))


def test_an_error_behind_a_long_list_of_texts_names_the_line_that_was_sent():
    grammar = "start: " + "\n  | ".join(f'"{number}"' for number in range(50)) + "\nx: y z:"
    with pytest.raises(InvalidRequestError, match="line 51, column 7"):
        GRAMMARS.grammar_of(StructuredOutputsParams(grammar=grammar))


def test_long_lists_of_texts_become_one_expression_and_nothing_else_changes():
    texts = [rf'"{number}/\x41\u00e9\n"' for number in range(MIN_JOINED)]
    whole, short = "\n  | ".join(texts), " | ".join(texts[1:])
    joined = joined_texts(f"?start: {whole} // all\n  | x\nx: ({short})")
    assert (
        joined
        == "?start: /(?:"
        + "|".join(rf"{n}\/Aé\x0a" for n in range(MIN_JOINED))
        + ")/"
        + "\n" * (MIN_JOINED - 1)
        + f" // all\n  | x\nx: ({short})"
    )
    for kept in (
        f"start: {short} x",
        f"start: {short}*",
        f'start: {short} | ""',
        f'start: {short}.."z"',
        f"start: x{short}",
    ):
        assert joined_texts(kept) == kept
    assert joined_texts("start: " + " | ".join(f'"{n}"i' for n in range(MIN_JOINED))).startswith(
        "start: /(?:(?i:0)|(?i:1)|"
    )
