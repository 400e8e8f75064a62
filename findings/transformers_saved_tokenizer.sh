#!/usr/bin/env bash
# transformers 5.24.0: a tokenizer that is saved and opened again has other ids, for classes that build their own steps.
#
# save_pretrained writes a tokenizer.json with every step. from_pretrained takes only the vocabulary, the merges, the
# added tokens and the post-processor from it for classes such as LlamaTokenizer, and builds the other steps from
# tokenizer_config.json, which lacks `legacy`: a space is put before a text behind a special token no more.
# GPTNeoXTokenizer replaces the post-processor too, so that add_bos_token = True is lost, which the file has.
# TokenizersBackend.from_pretrained gives the saved ids in both cases.
#
# Seen: Llama {'before': [0, 4], 'tokenizer.json': [0, 4], 'opened': [0, 3]}
#       GPTNeoX {'before': [0, 3], 'tokenizer.json': [0, 3], 'opened': [3]}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.24.0 tokenizers==0.23.1
HF_HUB_OFFLINE=1 TRANSFORMERS_NO_ADVISORY_WARNINGS=1 "$folder/venv/bin/python" - "$folder" <<'PY'
import sys

from tokenizers import Tokenizer
from transformers import GPTNeoXTokenizer, LlamaTokenizer

VOCAB = {"<s>": 0, "</s>": 1, "▁": 2, "a": 3, "▁a": 4}
ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "</s>"}


def ids(tokenizer, text, name):
    """Return the ids before saving, those of the saved tokenizer.json, and those of the directory opened again."""
    path = f"{sys.argv[1]}/{name}"
    tokenizer.save_pretrained(path)
    return {
        "before": tokenizer(text).input_ids,
        "tokenizer.json": Tokenizer.from_file(f"{path}/tokenizer.json").encode(text).ids,
        "opened": type(tokenizer).from_pretrained(path)(text).input_ids,
    }


llama = ids(LlamaTokenizer(vocab=VOCAB, merges=[("▁", "a")], legacy=True, **ENDS), "<s>a", "llama")
neox = GPTNeoXTokenizer(vocab=VOCAB, merges=[], **ENDS)
neox.add_bos_token = True
neox = ids(neox, "a", "neox")
print("Llama", llama)
print("GPTNeoX", neox)
assert llama == {"before": [0, 4], "tokenizer.json": [0, 4], "opened": [0, 3]}
assert neox == {"before": [0, 3], "tokenizer.json": [0, 3], "opened": [3]}
PY
echo "as described"
