#!/usr/bin/env bash
# tokenizers 0.23.1: the normalizer Precompiled drops marks, and does not compose what sentencepiece composes
#
# The map of a SentencePiece file is applied by grapheme: the first entry that fits its beginning replaces all of it, so
# that a second accent and one behind ① are lost. Of graphemes of six bytes and more each character is replaced alone,
# so that ｶﾞ does not become ガ. sentencepiece replaces the longest entry at each place.
# Seen: ['á', '1', 'カ゛', 'か゛'] with combining marks, sentencepiece 0.2.3 has ['á̂', '1́', 'ガ', 'が']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tokenizers==0.23.1 sentencepiece==0.2.3 protobuf==7.36.2
"$folder/venv/bin/python" - <<'PYTHON'
import io

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import normalizers

file = io.BytesIO()
SentencePieceTrainer.train(
    sentence_iterator=iter(["to be or not to be"]), model_writer=file, model_type="char", vocab_size=11,
    add_dummy_prefix=False, normalization_rule_name="nmt_nfkc", minloglevel=2,
)
normalizer = ModelProto.FromString(file.getvalue()).normalizer_spec
converted = normalizers.Precompiled(normalizer.precompiled_charsmap)
original = SentencePieceProcessor(model_proto=file.getvalue())
texts = ["a\u0301\u0302", "\u2460\u0301", "\uff76\uff9e", "\u304b\u3099"]
found = [converted.normalize_str(text) for text in texts], [original.normalize(text) for text in texts]
print(ascii(found))
assert found[0] == ["\xe1", "1", "\u30ab\u3099", "\u304b\u3099"]
assert found[1] == ["\xe1\u0302", "1\u0301", "\u30ac", "\u304c"]
PYTHON
