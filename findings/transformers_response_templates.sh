#!/usr/bin/env bash
# transformers 5.24.0: with its own response_template for Qwen3, `parse_response` loses text and whole answers.
#
# `transformers serve` falls back on a template for Qwen 2 and 3 (`_RESPONSE_TEMPLATE_FALLBACKS`). With it, text behind a
# tool call takes the place of the text before the call, since each region of `content` is assigned anew. A call whose
# argument holds "</tool_call>" ends there: json.loads is given half an object, and the ValueError takes the thought and
# every other call of the answer with it. Numbers are written anew where arguments become JSON again: 1e400 becomes
# Infinity, which is no JSON. An end mark in a string, and text on both sides of a call, are valid output of the model.
#
# Seen: behind {'content': 'B'}
#       mark ValueError
#       number '{"n": Infinity}'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.24.0 tokenizers==0.23.1
TRANSFORMERS_NO_ADVISORY_WARNINGS=1 "$folder/venv/bin/python" - <<'PY'
import json

from transformers.utils.chat_parsing import parse_response

# A copy of the entry for "qwen3": the module that has it needs the packages of a server.
TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>)", "content": "text"},
    },
}


def call(arguments):
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


behind = parse_response(f"A\n{call('{}')}\nB", TEMPLATE, prefix="")
behind = {"content": behind["content"]}
try:
    mark = parse_response("<think>hm</think>" + call("{}") + call('{"text": "</tool_call>"}'), TEMPLATE, prefix="")
except ValueError as error:
    mark = type(error).__name__
number = parse_response(call('{"n": 1e400}'), TEMPLATE, prefix="")["tool_calls"][0]["function"]["arguments"]
number = json.dumps(number)
print("behind", behind)
print("mark", mark)
print("number", repr(number))
assert behind == {"content": "B"}
assert mark == "ValueError"
assert number == '{"n": Infinity}'
PY
echo "as described"
