#!/usr/bin/env bash
# llguidance 1.9.1 counts a lexeme that max_tokens has cut as complete, also where its expression does not match.
# `thought[lazy, max_tokens=3]: /(?s:.*)<end>/` must end with <end>; behind three tokens without it the answer may come,
# and <end> may not. Of two lexemes that are cut together the one counts that was declared first, whichever matches.
# Output seen:
#   llguidance 1.9.1
#   behind abc, of which no <end> is the end: b'y'
#   the same with the free text declared first: b'<'
#   the same with the free text declared last: b'y'
# Exits with 0 as long as that is so, and with 1 once it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1
"$folder/venv/bin/python" - <<'PROGRAM'
import sys

import llguidance
from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")
TERMINALS = """
text[max_tokens=3]: TEXT
whole[max_tokens=3]: WHOLE
TEXT: /(?s:.*)/ & ~/(?s:.*)<end>(?s:.*)/
WHOLE: /(?s:.*)<end>/ & ~/(?s:.*)<end>(?s:.+)/
"""
GRAMMARS = {
    "behind abc, of which no <end> is the end:": 'start: thought "yes"\nthought[lazy, max_tokens=3]: /(?s:.*)<end>/',
    "the same with the free text declared first:": 'start: (text "<end>" | whole) "yes"' + TERMINALS,
    "the same with the free text declared last:": 'start: (whole | text "<end>") "yes"' + TERMINALS,
}


def following(lark):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    assert matcher.consume_tokens(list(b"abc"))
    return bytes(byte for byte in range(256) if matcher.deep_copy().try_consume_tokens([byte]))


print("llguidance", llguidance.__version__)
seen = [following(lark) for lark in GRAMMARS.values()]
for told, found in zip(GRAMMARS, seen):
    print(told, found)
sys.exit(0 if seen == [b"y", b"<", b"y"] else 1)
PROGRAM
