#!/usr/bin/env bash
# transformers 5.24.0: LlamaTokenizer reads a unigram tokenizer.model as BPE
#
# Without a tokenizer.json the class takes the vocabulary of the file, makes up merges, and ignores the file's
# model_type: words become characters. No error and no warning says so.
# Seen: ['▁', 't', 'h', 'e', '▁', 'k', 'i', 'n', 'g']; sentencepiece 0.2.3 has ['▁the', '▁', 'k', 'i', 'n', 'g']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 sentencepiece==0.2.3 protobuf==7.36.2
"$folder/venv/bin/python" - "$folder" <<'PYTHON' 2>/dev/null
import json
import sys
from pathlib import Path

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import AutoTokenizer

folder = Path(sys.argv[1], "model")
folder.mkdir()
sentences = ["the king and the queen", "a king of the north", "then the queen went north"] * 20
with (folder / "tokenizer.model").open("wb") as file:
    SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=file, model_type="unigram", vocab_size=24, minloglevel=2
    )
(folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
original = SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).encode("the king", out_type=str)
found = AutoTokenizer.from_pretrained(folder).tokenize("the king")
print(found, original)
assert original == ["▁the", "▁", *"king"]
assert found == ["▁", *"the", "▁", *"king"]
PYTHON
