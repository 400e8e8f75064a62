"""Token ids of a directory that transformers 5 saved are those that transformers 5.24 gives for it.

`scripts/make_saved_tokenizer_goldens.py` made the file, in an environment of its own.
"""

import functools
import json
import lzma
from hashlib import sha256
from pathlib import Path

import pytest

from jpaged.errors import InvalidRequestError
from jpaged.text.chat.chat_template import render_chat
from jpaged.text.tokenizing.tokenizer import load_tokenizer

from .published_tokenizers import FAMILIES, family_directory
from .test_tokenizer_goldens import golden as golden_of_4_57

GOLDEN_FILE = Path(__file__).parents[3] / "golden" / "saved_tokenizers.json.xz"
QUICK = [("mistral", "as it is"), ("llama2", "no BOS")]
"""Published tokenizers and cases that are not part of the slow tests."""


@functools.cache
def golden():
    return json.loads(lzma.decompress(GOLDEN_FILE.read_bytes()))


def write(folder, files, published):
    """Write the files of a saved tokenizer, whose tokenizer.json lacks what it shares with the `published` one."""
    vocabulary = {key: published["model"][key] for key in ("vocab", "merges") if key in published["model"]}
    steps = {"normalizer": published["normalizer"], **files["tokenizer.json"]}
    whole = {**steps, "model": {**steps["model"], **vocabulary}}
    for name, content in {**files, "tokenizer.json": json.dumps(whole)}.items():
        (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize("name", ["byte-level", "bars", "bert", "t5"])
def test_every_class_has_the_ids_of_transformers_5_however_it_was_changed_and_saved(tmp_path, name):
    cases = golden()["tiny"][name]["cases"]
    assert len(cases) >= 10
    for number, (label, case) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        tokenizer = load_tokenizer(write(folder, case["files"], golden()["tiny"][name]["shared"]))
        for text, with_ends, bare in zip(golden()["tiny_texts"], *case["ids"], strict=True):
            assert tokenizer.encode(text) == with_ends, (label, text)
            assert tokenizer.encode(text, add_special_tokens=False) == bare, (label, text)
        named = {key: text for key, text in case["special"].items() if tokenizer.backend.token_to_id(text) is not None}
        assert named == tokenizer.special_tokens, label


def all_published():
    for name in FAMILIES:
        for label in golden()["published"][name]:
            marks = [pytest.mark.slow] * ((name, label) not in QUICK)
            yield pytest.param(name, label, marks=marks, id=f"{name}, {label}")


@pytest.mark.parametrize(("name", "label"), list(all_published()))
def test_published_tokenizers_have_the_ids_of_transformers_5_after_it_saved_them(tmp_path, name, label):
    """240 texts, with what is put around them and without, and 25 chats."""
    case = golden()["published"][name][label]
    published = json.loads((family_directory(name) / "tokenizer.json").read_text())
    tokenizer = load_tokenizer(write(tmp_path, case["files"], published))
    texts, chats = golden_of_4_57()["texts"], golden_of_4_57()["chats"]
    ids = [[tokenizer.encode(text, add_special_tokens=adds) for text in texts] for adds in (True, False)]
    assert sum_of(ids) == case["texts"]
    refused = []
    for messages, expected in zip(chats, case["chats"], strict=True):
        # A template that raises may be given a form that it takes, and one that knows no developer a system message.
        if expected is None or messages[0]["role"] == "developer":
            continue
        try:
            text = render_chat(tokenizer, messages)
        except InvalidRequestError as error:
            refused.append(str(error))
            continue
        assert sum_of(tokenizer.encode(text, add_special_tokens=False)) == expected, messages
    # What the template would drop.
    assert all("this model's chat template" in message for message in refused)
    assert len(refused) <= 5


def sum_of(ids):
    return sha256(json.dumps(ids).encode()).hexdigest()[:16]
