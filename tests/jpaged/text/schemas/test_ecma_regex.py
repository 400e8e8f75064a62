"""Expressions: what every dialect reads alike is taken, what two read differently is refused with the reason.

What ECMAScript (Node 20, with and without the flag u) and Rust make of each was looked up once; Python's `re` is asked
here.
"""

import re

import pytest

from jpaged.checks import Unfit
from jpaged.errors import InvalidRequestError
from jpaged.structured_outputs import StructuredOutputsParams
from jpaged.text.schemas.ecma_regex import portable_regex

from ..grammar.grammar_walks import grammars_of
from ..tokenizing.published_tokenizers import byte_tokenizer

GRAMMARS = grammars_of(byte_tokenizer())


def matches(pattern, text):
    """Return whether a grammar of the expression allows the text as a whole output."""
    matcher = GRAMMARS.matcher(GRAMMARS.grammar_of(StructuredOutputsParams(regex=pattern)))
    return (
        matcher.parser.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.parser.is_accepting()
    )


TAKEN = {  # pattern: texts that it matches, texts that it does not
    r"\p{L}+": (["aé日"], ["1", "p{L}"]),
    r"\P{L}": (["1"], ["a"]),
    r"\p{Script=Greek}": (["λ"], ["l"]),
    r"[\p{L}\d]": (["é", "5"], ["-"]),
    r"[^\p{L}]": (["5"], ["é"]),
    r"\u{1F600}": (["😀"], ["u"]),
    r"x\u{000041}": (["xA"], []),
    r"[\u{1F600}-\u{1F64F}]": (["😀"], ["a"]),
    r"\u0041\x41\cA\0\t": (["AA\x01\0\t"], []),
    r"[\b\0\cA\u0041]": (["\b", "A"], ["b"]),
    "(?s)a.": (["a\n", "ab"], []),
    "(?s:a.)b.": (["a\nbc"], ["a\nb\n"]),
    "(?s)a(?-s:.).": (["ab\n"], ["a\n\n"]),
    "a.": (["ab"], ["a\n", "a\u2028"]),
    "(?i)yes|no": (["YES", "No"], ["y"]),
    "a(?i:b)c": (["aBc"], ["ABc", "abC"]),
    "(?i)a(?-i:b)": (["Ab"], ["aB"]),
    "((?i)a)b": (["Ab"], ["aB"]),
    "(?is)a.": (["A\n"], []),
    "(?m)a": (["a"], []),
    "(?x) a b # c [\n c\\ d": (["abc d"], ["a b"]),
    "(?x: a )\\ b": (["a b"], []),
    "(?<year>[0-9]{2})(?P<stop>a)": (["12a"], ["12"]),
    "(a|)b||c": (["ab", "b", "", "c"], ["a"]),
    "a{2}b{1,}c{0,1}d*?e+?f??": (["aabe", "aabbcddeef"], ["abe"]),
    "a}?]{": (["a]{", "a}]{"], ["a}?]{"]),
    "a{b}{2, 3}": (["a{b}{2, 3}"], []),
    "[^[\\]]": (["a"], ["[", "]"]),
    "[[]": (["["], []),
    "[:alpha:]": (["l", ":"], ["z"]),
    "[-a][a-][--][a-c-e]": (["-a--", "a--b"], ["dd-d"]),
    r"[\w-z][+-\d]": (["--", "a5"], ["`/"]),
    r"[\s\S][^]": (["\u3000\n"], [""]),
    r"[^\s\S]?": ([""], ["a"]),
    r"\/\-\"\'\@\_\é\ ": (["/-\"'@_é "], []),
    r"[\<\/\-\]\^]": (["<", "]", "^"], ["\\"]),
    "^(?:a|b)$": (["a"], ["^a"]),
    "^a|b$": (["a", "b"], ["ab"]),
    r"(?i)^a$": (["A"], []),
    r"\Aa\Z": (["a"], ["Aa"]),
    r"a\z": (["a"], ["az"]),
    r"\W": (["-"], ["é", "_", "Ⓐ", "\u200d"]),
}


@pytest.mark.filterwarnings("ignore:Possible nested set")
@pytest.mark.parametrize("pattern", TAKEN)
def test_an_expression_that_dialects_read_alike_matches_what_all_of_them_match(pattern):
    matched, others = TAKEN[pattern]
    assert [text for text in matched if not matches(pattern, text)] == []
    assert [text for text in others if matches(pattern, text)] == []
    try:
        expression = re.compile(pattern)
    except re.error:  # Python has no \p, \u{…}, \c and names without P.
        return
    for text in (*matched, *filter(lambda text: matches(pattern, text), " aA1é_-\n[]{}^$|")):
        assert expression.fullmatch(text)


REFUSED = {  # pattern: the reason
    "a{,3}": r"a repeat {,n}, which Python reads as {0,n} and ECMAScript as text, at character 2",
    "a{,}": r"a repeat {,n}",
    "[[:alpha:]]": "a bracket within a class (as in [[:alpha:]]), which Rust reads as a class of its own",
    "[a[b]c]": "a bracket within a class",
    "[a&&b]": "&&, -- or ~~ in a class, which Rust reads as an operation on sets",
    "[+--]": "&&, -- or ~~",
    "[--a]": "&&, -- or ~~",
    "[a~~b]": "&&, -- or ~~",
    "[]a]": "a class that begins with a bracket, which ECMAScript ends there and Python does not",
    "[^]a]": "a class that begins with a bracket",
    "a++": "a repeat that keeps what it took",
    "a{2}+": "a repeat that keeps what it took",
    "(?>a)": "an atomic group",
    "(?(1)a|b)": "a condition",
    "(?#a)b": "a group (?… of an unknown kind",
    "(?|a)": "a group (?… of an unknown kind",
    "(?a)b": "flags that dialects do not share",
    "(?R)b": "flags that dialects do not share",
    "(?-u:a)": "flags that dialects do not share",
    "(?ii)a": "flags that dialects do not share",
    "(?m)^a$": "^ under the flag m",
    "(?x)[a b]": "white space or # in a class under the flag x",
    "(?x)a{2, 3}": "a brace that begins no count under the flag x",
    "(?x)a\u3000b": "white space that only some dialects skip",
    r"\ud83d\ude00": "a surrogate, of which only ECMAScript makes a pair",
    r"[\ud800-\udfff]": "a surrogate",
    r"(a)\1": "a back reference or an octal number",
    r"\01": "a back reference or an octal number",
    r"[\1]": "a back reference or an octal number",
    r"(?P<n>a)(?P=n)": "a back reference",
    r"(?<n>a)\k<n>": "a back reference",
    r"\ba": "a word boundary",
    r"\<a\>": r"\< or \>, which Rust reads as the boundary of a word",
    r"\N{BULLET}": "a backslash that begins no escape",
    r"\e": "a backslash that begins no escape",
    r"\u41": "a backslash that begins no escape",
    r"\x4": "a backslash that begins no escape",
    r"\u{110000}": "a number beyond those of characters",
    "a\\": "a backslash that begins no escape",
    "(?<n>a)(?<n>b)": "the name of another group",
    "a??*": "a repeat behind a lazy one",
    "*a": "a repeat of nothing",
    "^{2}": "a repeat of nothing",
    "(a": "a group without its end",
    "a)": "the end of a group that did not begin",
    "[a": "a class without its end",
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_an_expression_that_dialects_read_differently_is_refused_with_the_reason(pattern):
    with pytest.raises(Unfit) as unfit:
        portable_regex(pattern)
    assert unfit.value.got.startswith(REFUSED[pattern])
    assert re.search(r" at character \d+$", unfit.value.got)
    for params in (
        {"regex": pattern},
        {"json": {"pattern": pattern}},
        {"json": {"patternProperties": {pattern: {}}}},
        {"json_object": True, "whitespace_pattern": pattern},
    ):
        with pytest.raises(InvalidRequestError, match=re.escape(REFUSED[pattern])):
            GRAMMARS.grammar_of(StructuredOutputsParams(**params))


@pytest.mark.parametrize("pattern", ["a^b", "a$b", "(?=a)b", "a{2,1}", "[z-a]", r"\p{Nothing}", r"[\p{L}-z]"])
def test_what_only_the_compiler_sees_is_refused_too(pattern):
    with pytest.raises(InvalidRequestError):
        GRAMMARS.grammar_of(StructuredOutputsParams(regex=pattern))
