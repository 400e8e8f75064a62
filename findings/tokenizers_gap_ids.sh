#!/usr/bin/env bash
# tokenizers 0.23.1: an added token has another id once its own tokenizer.json is read, where the vocabulary has gaps.
#
# A new token gets one more than the largest id of the tokens added by calls before, or the number of entries of the
# vocabulary where none was. Reading a file adds its tokens in one call, and does not look at the ids that stand beside
# them. In a vocabulary with unused ids, as OpenAI's cl100k has, the two differ: a token that was trained under id 10
# comes back as id 3, and the file that says 10 is not refused.
#
# Seen: {'added': 10, 'in the file': 10, 'read again': 3}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check tokenizers==0.23.1
"$folder/venv/bin/python" - <<'PY'
import json

from tokenizers import Tokenizer, models

tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "<end>": 9}, []))
tokenizer.add_special_tokens(["<end>"])  # Declares the entry with id 9.
tokenizer.add_tokens(["<new>"])
file = tokenizer.to_str()
found = {
    "added": tokenizer.token_to_id("<new>"),
    "in the file": next(token["id"] for token in json.loads(file)["added_tokens"] if token["content"] == "<new>"),
    "read again": Tokenizer.from_str(file).token_to_id("<new>"),
}
print(found)
assert found == {"added": 10, "in the file": 10, "read again": 3}
PY
echo "as described"
