#!/usr/bin/env bash
# tokenizers 0.23.3: of two added tokens that the normalizer makes alike, chance decides which one a text becomes.
#
# Tokens added as plain strings are looked for in the normalized text, in their own normalized form. With a normalizer
# that lower-cases, as BERT's does, "HELLO" and "Hello" are both "hello". Which of the two ids "hello" gets differs from
# one tokenizer to the next that is made of the same file in the same process. Tokens added with normalized=False keep
# their own forms. 0.23.1 raises DuplicatePatternError instead.
#
# Seen: {'normalized': [4, 5], 'normalized=False': [[0, 1, 2, 2, 3]]}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PY'
from tokenizers import AddedToken, Tokenizer, models, normalizers

found = {}
for name, flags in {"normalized": {}, "normalized=False": {"normalized": False}}.items():
    tokenizer = Tokenizer(models.BPE({"h": 0, "e": 1, "l": 2, "o": 3}, []))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_tokens([AddedToken(text, **flags) for text in ("HELLO", "Hello")])
    file = tokenizer.to_str()
    results = {tuple(Tokenizer.from_str(file).encode("hello").ids) for _ in range(200)}
    found[name] = sorted(ids[0] if len(ids) == 1 else list(ids) for ids in results)
print(found)
assert found == {"normalized": [4, 5], "normalized=False": [[0, 1, 2, 2, 3]]}
PY
echo "as described"
