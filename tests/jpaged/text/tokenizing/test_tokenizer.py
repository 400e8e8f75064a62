"""Tokenizers of Hugging Face directories and GGUF files give the published ids, and chats are rendered as text."""

import functools
import json
import os
import random
import subprocess
import sys
import tracemalloc
from functools import partial
from pathlib import Path
from types import MappingProxyType

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jpaged.errors import InvalidRequestError, ModelLoadError
from jpaged.text.chat import template_environment
from jpaged.text.chat.chat_template import render_chat
from jpaged.text.chat.tools import tools_of
from jpaged.text.tokenizing.gguf_tokenizer import build_gguf_backend
from jpaged.text.tokenizing.tokenizer import Tokenizer, load_tokenizer

from ....gguf_file import write_gguf
from .published_tokenizers import (
    FAMILIES,
    TEXTS,
    byte_tokenizer,
    family_directory,
    llama_cpp_models,
    load_family,
    load_smollm2,
    sentence_piece_tokenizer,
)

GOLDEN = Path(__file__).parents[3] / "golden"
SMOLLM2 = json.loads((GOLDEN / "smollm2.json").read_text())["items"]
PIECES = json.loads((GOLDEN / "pre_tokenizers.json").read_text())
HELLO = [{"role": "user", "content": "Hello"}]

# The built-in model.


@pytest.mark.parametrize("item", SMOLLM2, ids=lambda item: item["text"][-40:])
def test_golden_prompts_of_the_built_in_model(item):
    tokenizer = load_smollm2()
    assert tokenizer.encode(item["text"]) == item["prompt_ids"]
    if "messages" in item:
        assert render_chat(tokenizer, item["messages"]) == item["text"]
        assert tokenizer.encode(item["text"], add_special_tokens=False) == item["prompt_ids"]


@functools.cache
def known_bytes():
    tokenizer = load_smollm2()
    return {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_any_text_comes_back_from_its_byte_level_tokens(text):
    """Bytes without a token in the vocabulary, such as most control characters, are dropped."""
    tokenizer, known = load_smollm2(), known_bytes()
    kept = bytes(byte for byte in text.encode() if bytes([byte]) in known)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == kept.decode(errors="replace")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_the_bytes_of_a_texts_tokens_are_the_bytes_of_the_text(text):
    tokenizer = load_smollm2()
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


# Hugging Face directories.


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("bert", "deepseek", "llama2"))) for name in FAMILIES],
)
def test_a_directory_encodes_as_its_tokenizer_json_says(family):
    tokenizer = load_family(family)
    raw = tokenizers.Tokenizer.from_file(str(family_directory(family) / "tokenizer.json"))
    for text in TEXTS.values():
        for add_special_tokens in (True, False):
            ids = tokenizer.encode(text, add_special_tokens)
            if family == "deepseek" and add_special_tokens:
                assert ids.pop(0) == tokenizer.bos_token_id, "its tokenizer_config.json adds BOS"
            assert ids == raw.encode(text, add_special_tokens=add_special_tokens).ids
            assert all(type(token_id) is int for token_id in ids)
    assert tokenizer.vocab_size == max(raw.get_vocab().values()) + 1


@pytest.mark.parametrize(
    "family",
    ["deepseek", "mistral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma", "llama3", "qwen"))],
)
def test_a_directory_encodes_and_decodes_as_transformers_does(family):
    """transformers 5 loads these families from tokenizer.json; others it rebuilds from the vocabulary alone.

    It ignores DeepSeek's `add_bos_token`.
    """
    from transformers import AutoTokenizer

    tokenizer, reference = load_family(family), AutoTokenizer.from_pretrained(family_directory(family))
    first = [0] if family == "deepseek" else []
    rng = random.Random(family)
    for text in TEXTS.values():
        ids = tokenizer.encode(text)
        assert ids == first + reference(text).input_ids
        ids += [rng.randrange(tokenizer.vocab_size) for _ in range(8)]
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (reference.bos_token_id, reference.eos_token_id)


def test_special_tokens_between_two_turns_of_a_chat_are_found():
    """Llama 2's file declares them `normalized`; taken literally, "</s><s>" would be found only after a space."""
    tokenizer = load_family("llama2")
    ids = tokenizer.encode("<s>[INST] a [/INST] b </s><s>[INST] c</s>", add_special_tokens=False)
    assert [token_id for token_id in ids if token_id in tokenizer.special_ids] == [1, 2, 1, 2]
    assert "s>" not in tokenizer.decode(ids)


def save(folder, tokenizer, **config):
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_length_limit_in_the_file_does_not_truncate_prompts(tmp_path):
    save(tmp_path, byte_tokenizer())
    file = tmp_path / "tokenizer.json"
    limit = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps({**json.loads(file.read_text()), "truncation": limit}))
    assert len(load_tokenizer(tmp_path).encode("0123456789")) == 10


def test_tokens_named_in_tokenizer_config_are_special(tmp_path):
    tokenizer = load_tokenizer(save(tmp_path, sentence_piece_tokenizer(), bos_token="<s>", eos_token="</s>"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_ids == {0, 1, 2}
    assert not tokenizer.has_chat_template


def test_a_chat_template_is_read_from_its_own_file(tmp_path):
    (save(tmp_path, byte_tokenizer()) / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert render_chat(load_tokenizer(tmp_path), HELLO) == "Hello!"


TOOL_USE = "{% for m in messages %}{{ m.content }}{% endfor %}{% for t in tools %}{{ t | tojson }}{% endfor %}"
TOOL_FILES = {
    "a list": {
        "tokenizer_config.json": json.dumps(
            {
                "chat_template": [
                    {"name": name, "template": text}
                    for name, text in (("default", "{{ messages[0].content }}!"), ("tool_use", TOOL_USE))
                ]
            }
        )
    },
    "a folder": {
        "chat_template.jinja": "{{ messages[0].content }}!",
        "additional_chat_templates/tool_use.jinja": TOOL_USE,
    },
}


@pytest.mark.parametrize("files", TOOL_FILES.values(), ids=TOOL_FILES.keys())
def test_a_chat_with_tools_has_the_models_template_for_them(tmp_path, files):
    save(tmp_path, byte_tokenizer())
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    tokenizer = load_tokenizer(tmp_path)
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    tools = tools_of([{"type": "function", "function": tool}])
    assert render_chat(tokenizer, HELLO) == "Hello!"
    assert render_chat(tokenizer, HELLO, tools=tools).startswith('Hello{"type": "function", "function": {"name": "f"')
    gguf = load_tokenizer(spm_gguf(tmp_path, chat_template="{{ messages[0].content }}!"))
    assert gguf.tool_template is None


BOM = "\ufeff"
MARKED = BOM + "{{ messages[0].content }}!"
WAYS_IN = {
    "chat_template.jinja": {"chat_template.jinja": MARKED},
    "tokenizer_config.json": {"tokenizer_config.json": json.dumps({"chat_template": MARKED})},
    "one of several": {
        "tokenizer_config.json": json.dumps({"chat_template": [{"name": "default", "template": MARKED}]})
    },
    "chat_template.json": {"chat_template.json": json.dumps({"chat_template": MARKED})},
    "a JSON file with a mark of its own": {"tokenizer_config.json": BOM + json.dumps({"chat_template": MARKED})},
}


@pytest.mark.parametrize("files", WAYS_IN.values(), ids=WAYS_IN.keys())
def test_a_byte_order_mark_at_the_head_of_a_file_is_not_part_of_a_chat(tmp_path, files):
    save(tmp_path, byte_tokenizer())
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert render_chat(load_tokenizer(tmp_path), HELLO) == "Hello!"


def test_a_byte_order_mark_in_a_gguf_files_or_a_callers_template_is_not_part_of_a_chat(tmp_path):
    tokenizer = load_tokenizer(spm_gguf(tmp_path, chat_template=MARKED))
    assert render_chat(tokenizer, HELLO) == "Hello!"
    assert render_chat(tokenizer, HELLO, template=MARKED + "?") == "Hello!?"
    said = [{"role": "user", "content": BOM + "a"}]
    assert render_chat(tokenizer, said) == BOM + "a!", "a user's own text is kept"


def test_a_tokenizer_json_with_a_byte_order_mark_is_read(tmp_path):
    save(tmp_path, byte_tokenizer())
    file = tmp_path / "tokenizer.json"
    file.write_text(BOM + file.read_text(), encoding="utf-8")
    assert load_tokenizer(tmp_path).encode("a") == byte_tokenizer().encode("a")


# GGUF files.


def metadata_of(family, pre, **values):
    """Return the metadata that a GGUF file of a published byte-level tokenizer would hold."""
    file = json.loads((family_directory(family) / "tokenizer.json").read_text())
    ids = {**file["model"]["vocab"], **{token["content"]: token["id"] for token in file["added_tokens"]}}
    tokens = [f"[PAD{index}]" for index in range(max(ids.values()) + 1)]
    types = [gguf.TokenType.UNUSED] * len(tokens)
    for token, index in ids.items():
        tokens[index], types[index] = token, gguf.TokenType.NORMAL
    for token in file["added_tokens"]:
        types[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in file["model"]["merges"]]
    values = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges, **values}
    return ggml(values)


def gemma_metadata():
    """Return the metadata that a GGUF file of Gemma 2's published tokenizer would hold.

    llama.cpp's converter writes added tokens with spaces (conversion/base.py). A score made of the rank of a token's
    first merge orders tokens as SentencePiece's scores do, since the published merges are sorted by those.
    """
    values = metadata_of("gemma", "default", model="llama", add_space_prefix=False)
    ranks = {}
    for rank, merge in enumerate(values.pop("tokenizer.ggml.merges")):
        ranks.setdefault(merge.replace(" ", ""), rank)
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    scores = [-float(ranks.get(token, 0)) for token in tokens]
    for index, kind in enumerate(types):
        if kind == gguf.TokenType.USER_DEFINED:
            tokens[index] = tokens[index].replace("▁", " ")
    return values | ggml({"scores": scores})


MORE_TEXTS = [
    "<|im_start|>user\n1999<|endoftext|>",
    "HTTPServer's IDs 'RE",
    "a" + " " * 40 + "b" + "\n" * 40 + "\t\t\tc",
    "<start_of_turn>user\nHi  <b>there</b><end_of_turn>\n<start_of_turn>model\n",
]


@pytest.mark.parametrize(
    ("pre", "family"),
    [
        ("deepseek-v3", "deepseek"),
        ("llama-bpe", "llama3"),
        *(
            pytest.param(pre, family, marks=pytest.mark.slow)
            for pre, family in (("default", "gemma"), ("gpt-4o", "o200k"), ("qwen2", "qwen"))
        ),
    ],
)
def test_a_gguf_encodes_as_the_directory_it_was_made_from(pre, family):
    metadata = gemma_metadata() if family == "gemma" else metadata_of(family, pre)
    backend, _ = build_gguf_backend(Path("x.gguf"), metadata | ggml({"add_bos_token": False}))
    published = load_family(family)
    for text in [*TEXTS.values(), *MORE_TEXTS]:
        ids = published.encode(text, add_special_tokens=False)
        assert backend.encode(text).ids == ids
        assert backend.decode(ids) == published.decode(ids)


def split(pre):
    """Return the pieces that the pre-tokenizer `pre` splits the recorded text into."""
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    values = {"model": "gpt2", "pre": pre, "tokens": list(alphabet), "merges": []}
    backend, _ = build_gguf_backend(Path("x.gguf"), ggml(values))
    text = PIECES["text"]
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", PIECES["cuts"])
def test_a_pre_tokenizer_splits_text_as_when_it_was_verified(pre):
    """The slow tests compare whole vocabularies with llama.cpp's golden files; these pieces were recorded then."""
    assert PIECES["mark"].join(split(pre)) == PIECES["cuts"][pre]


def test_every_supported_pre_name_has_recorded_pieces():
    with pytest.raises(ModelLoadError) as caught:
        split("nonsense")
    supported = str(caught.value).split("wanted one of ")[1].split(":")[0].split(", ")
    assert set(supported) == set(PIECES["cuts"])


SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "<tool>"]
SPM_TYPES = [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1, 4]
SPM_SCORES = [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0, 0.0]
SPM = {"model": "llama", "tokens": SPM_TOKENS, "token_type": SPM_TYPES, "scores": SPM_SCORES}
SPM |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


def ggml(values):
    """Return metadata: each key of `values` under tokenizer.ggml, but chat_template under tokenizer."""
    return {f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}": value for key, value in values.items()}


def spm_gguf(folder, **values):
    return write_gguf(folder / "m.gguf", ggml({**SPM, **values}))


def tokens_of(tokenizer, text, **options):
    return [SPM_TOKENS[token_id] for token_id in tokenizer.encode(text, **options)]


def test_sentence_piece_merges_by_score_and_falls_back_to_bytes(tmp_path):
    tokenizer = load_tokenizer(spm_gguf(tmp_path))
    assert tokens_of(tokenizer, "ab") == ["<s>", "▁a", "b"], "▁a has a better score than ab"
    assert tokens_of(tokenizer, "é", add_special_tokens=False) == ["▁", "<0xC3>", "<0xA9>"]
    assert tokens_of(tokenizer, "a<tool>b</s>") == ["<s>", "▁a", "<tool>", "▁", "b", "</s>"]
    assert tokenizer.decode(tokenizer.encode("ab é  a")) == "ab é  a"
    assert tokenizer.special_ids == {0, 1, 2}
    better = [0.0] * 259 + [-1.0, -2.0, -3.0, -5.0, -4.0, 0.0]
    assert tokens_of(load_tokenizer(spm_gguf(tmp_path, scores=better)), "ab") == ["<s>", "▁", "ab"]


def test_a_file_may_turn_off_the_space_prefix_and_bos_and_turn_on_eos(tmp_path):
    tokenizer = load_tokenizer(spm_gguf(tmp_path, add_space_prefix=False, add_bos_token=False, add_eos_token=True))
    assert tokens_of(tokenizer, "ab") == ["ab", "</s>"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab", "no space was added, so none is removed"


def test_a_chat_of_a_model_that_adds_bos_has_one_bos(tmp_path):
    template = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = load_tokenizer(spm_gguf(tmp_path, chat_template=template))
    assert tokens_of(tokenizer, "a") == ["<s>", "▁a"]
    text = render_chat(tokenizer, [{"role": "user", "content": "a"}])
    assert [SPM_TOKENS[i] for i in tokenizer.encode(text, add_special_tokens=False)] == ["<s>", "▁a"]


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
GPT2 = {"model": "gpt2", "pre": "gpt-2"}
BAD_GGUF = {
    "unknown model": ({"model": "rwkv"}, "tokenizer.ggml.model is 'rwkv', wanted one of gpt2, llama"),
    "no model": ({}, "tokenizer.ggml.model is missing, wanted one of gpt2"),
    "unknown pre": ({"model": "gpt2", "pre": "novel"}, "tokenizer.ggml.pre is 'novel', wanted one of"),
    "no pre": ({"model": "gpt2"}, "tokenizer.ggml.pre is missing, wanted one of"),
    "no merges": (GPT2, "tokenizer.ggml.merges is missing, wanted a list"),
    "bad merge": (GPT2 | {"merges": ["a zz"]}, "merges holds 'a zz'"),
    "merge of one": (GPT2 | {"merges": ["a"]}, "merges holds 'a'"),
    "merge without its token": (GPT2 | {"merges": ["a b"]}, "merges holds 'a b'"),
    "too few types": ({"model": "gpt2", "token_type": [1]}, "token_type is [1], wanted 256 values"),
    "no scores": ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
    "too few scores": ({"model": "llama", "scores": [0.0]}, "scores is [0.0], wanted 256 values"),
    "eos past the end": (
        {"model": "llama", "scores": [0.0] * 256, "eos_token_id": 256},
        "eos_token_id is 256, wanted an integer from 0 to 255",
    ),
    "bert without special tokens": ({"model": "bert"}, "unknown_token_id is missing"),
    "template is a number": ({"model": "gpt2", "chat_template": 7}, "chat_template is not a string"),
}


def test_merges_of_tokens_with_spaces_are_read_one_by_one(tmp_path):
    tokens = [*BYTES, "a b", " a", "ca", "ca b", " ac", "ab", "end"]
    merges = ["c a", "c a b", " a c", "a b"]  # A separator is the first space behind the first character.
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", ggml({**GPT2, "tokens": tokens, "merges": merges})))
    read = json.loads(tokenizer.backend.to_str())["model"]["merges"]
    assert read == [["c", "a"], ["c", "a b"], [" a", "c"], ["a", "b"]]
    assert tokenizer.base_vocab_size == len(tokens)


@pytest.mark.parametrize(("values", "message"), BAD_GGUF.values(), ids=BAD_GGUF.keys())
def test_a_bad_gguf_is_an_error_of_one_line_that_names_the_file(tmp_path, values, message):
    path = write_gguf(tmp_path / "bad.gguf", ggml({"tokens": BYTES, **values}))
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(path)
    text = str(caught.value)
    assert message in text
    assert text.startswith(str(path))
    assert "\n" not in text


# Directories that cannot be used.


WHOLE_JSON = byte_tokenizer().backend.to_str()
BAD_DIRECTORIES = {
    "no tokenizer": ({}, r"tokenizer\.json: is missing"),
    "empty": ({"tokenizer.json": ""}, r"tokenizer\.json: cannot be read"),
    "cut JSON": ({"tokenizer.json": WHOLE_JSON[:1000]}, r"tokenizer\.json: cannot be read"),
    "HTML": ({"tokenizer.json": "<html>"}, r"tokenizer\.json: cannot be read"),
    "a list": ({"tokenizer.json": "[]"}, r"tokenizer\.json: cannot be read"),
    "no vocabulary": ({"tokenizer.json": '{"version": "1.0"}'}, r"tokenizer\.json: cannot be read"),
}
JSON_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
    "chat_template.json",
)
BAD_JSON = {
    "empty": ("", "is not JSON .*: fetch it again"),
    "cut": ('{"backend": "tok', "is not JSON .*: fetch it again"),
    "a list": ("[]", "holds a JSON list, wanted an object .*: fetch it again"),
    "null": ("null", "holds a JSON null, wanted an object .*: fetch it again"),
}
WRONG_OPTIONS = {
    "backend": (3, "wanted the name of a backend"),
    "tokenizer_class": (["LlamaTokenizer"], "wanted a string"),
    "bos_token": (3, "wanted a string or an object"),
    "eos_token": ({"content": "<end>", "lstrip": "yes"}, "wanted a string or an object"),
    "pad_token": ({}, "wanted a string or an object"),
    "extra_special_tokens": ("<x>", "wanted a list or an object of tokens"),
    "additional_special_tokens": ([None], "wanted a list or an object of tokens"),
    "added_tokens_decoder": ([{"content": "<x>"}], "wanted an object"),
    "add_bos_token": ("yes", "wanted true or false"),
    "split_special_tokens": (1, "wanted true or false"),
    "chat_template": (["{{ messages }}"], "wanted objects with the keys name and template"),
}
"""Option of tokenizer_config.json → a value that is not right, and a part of the error."""


@pytest.mark.parametrize(("files", "message"), BAD_DIRECTORIES.values(), ids=BAD_DIRECTORIES.keys())
def test_a_bad_directory_is_an_error_of_one_line_that_names_the_file(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize(("content", "message"), BAD_JSON.values(), ids=BAD_JSON.keys())
def test_a_half_written_file_of_a_tokenizer_is_an_error_that_names_it(tmp_path, name, content, message):
    (tmp_path / "tokenizer.json").write_text(WHOLE_JSON)
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelLoadError, match=rf"{name}: {message}") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("written_by", ["transformers 4", "transformers 5"])
@pytest.mark.parametrize("option", WRONG_OPTIONS)
def test_an_option_of_a_wrong_type_is_an_error_of_one_line_that_names_it(tmp_path, option, written_by):
    value, message = WRONG_OPTIONS[option]
    options = {"tokenizer_class": "GPTNeoXTokenizer", **({"backend": "tokenizers"} if written_by[-1] == "5" else {})}
    (tmp_path / "tokenizer.json").write_text(WHOLE_JSON)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**options, option: value}))
    if written_by == "transformers 5" and option == "add_bos_token":
        assert load_tokenizer(tmp_path).encode("a") == [ord("a")]  # It has no effect there.
        return
    with pytest.raises(ModelLoadError, match=rf"tokenizer_config\.json: {option} is .*{message}") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_class_that_tokenizer_json_cannot_be_of_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(WHOLE_JSON)
    options = {"backend": "tokenizers", "tokenizer_class": "BertTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    with pytest.raises(
        ModelLoadError, match=r"BertTokenizer is for models of the type WordPiece, .* name TokenizersBackend"
    ):
        load_tokenizer(tmp_path)


QWEN_OPTIONS = json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"})
WITHOUT_VOCABULARY = {
    "nothing": {},
    "tokenizer_config.json": {"tokenizer_config.json": QWEN_OPTIONS},
    "special_tokens_map.json": {"special_tokens_map.json": '{"eos_token": "<|im_end|>"}'},
    "added_tokens.json": {"added_tokens.json": '{"<|im_end|>": 0}'},
    "merges.txt": {"merges.txt": "#version: 0.2\na b\n"},
    "vocab.json without merges.txt": {"vocab.json": '{"a": 0, "b": 1, "ab": 2}'},
    "an empty tokenizer.json": {"tokenizer.json": ""},
    "another class's vocabulary": {"vocab.txt": "[UNK]\na\nb\n"},
}
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "smollm3", "olmo2", "olmo3", "gemma2")
MODEL_TYPES += ("gemma3_text", "gpt2", "gpt_neox")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("files", WITHOUT_VOCABULARY.values(), ids=WITHOUT_VOCABULARY.keys())
def test_no_tokenizer_is_made_up_for_a_directory_without_a_vocabulary(tmp_path, files, model_type):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: (is missing|cannot be read)") as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["tokenizer.json", "vocab.json"])
def test_a_vocabulary_of_special_tokens_alone_is_refused(tmp_path, kind):
    if kind == "tokenizer.json":
        backend = tokenizers.Tokenizer(models.BPE({"<|endoftext|>": 0}, []))
        backend.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
        backend.save(str(tmp_path / kind))
    else:
        (tmp_path / kind).write_text("{}")
        (tmp_path / "merges.txt").write_text("#version: 0.2\n")
        (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(
        ModelLoadError, match=r"(no vocabulary beside its special|is missing).*--tokenizer DIR"
    ) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("kind", [models.BPE, models.WordLevel])
def test_the_json_of_a_tokenizer_keeps_the_ids_of_added_tokens_over_gaps(tmp_path, kind):
    """Server processes and grammars read it. The ids in the file itself would come back as 3 and 4."""
    model = kind({"a": 0, "b": 1, "<end>": 9}, **({"merges": []} if kind is models.BPE else {"unk_token": "a"}))
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(["<end>"])
    save(tmp_path, Tokenizer(backend, {}), additional_special_tokens=["<new>", "<newer>"])
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("a<new>b<newer><end>")
    assert ids == [0, 10, 1, 11, 9]
    assert tokenizers.Tokenizer.from_str(tokenizer.to_json()).encode("a<new>b<newer><end>").ids == ids


@pytest.mark.parametrize("options", [{}, {"backend": "tokenizers", "tokenizer_class": "TokenizersBackend"}])
def test_a_model_that_drops_merges_at_random_is_refused(tmp_path, options):
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.1)), {})
    save(tmp_path, tokenizer, **options)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: the model's dropout is 0\.1, .* wanted null: set"):
        load_tokenizer(tmp_path)
    tokenizer.backend.model.dropout = 0.0
    save(tmp_path, tokenizer, **options)
    assert load_tokenizer(tmp_path).encode("ab") == [2]


def test_a_class_that_builds_its_model_anew_drops_no_merges_and_keeps_no_words_whole(tmp_path):
    """The ids are those of transformers 5.24, which takes neither `dropout` nor `ignore_merges` from tokenizer.json."""
    model = models.BPE({"a": 0, "b": 1, "ab": 2, "aa": 3}, [("a", "a")], dropout=0.5, ignore_merges=True)
    save(tmp_path, Tokenizer(tokenizers.Tokenizer(model), {}), backend="tokenizers", tokenizer_class="GPT2Tokenizer")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("ab") == [0, 1]
    assert all(tokenizer.encode("aaab") == [3, 0, 1] for _ in range(20))


def test_the_error_for_a_missing_vocabulary_names_the_ways_out(tmp_path):
    with pytest.raises(ModelLoadError, match="--tokenizer DIR, or --skip-tokenizer-init"):
        load_tokenizer(tmp_path)


def test_vocab_json_and_merges_without_tokenizer_json_are_read(tmp_path):
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary = alphabet | {"ab": 256, "<|endoftext|>": 257}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("ab<|endoftext|>c") == [256, 257, alphabet["c"]]
    assert tokenizer.eos_token_id == 257


def test_a_missing_path_is_an_error(tmp_path):
    with pytest.raises(ModelLoadError, match="nowhere: does not exist; wanted"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_tokenizer_that_needs_code_of_the_model_is_an_error_and_the_code_does_not_run(tmp_path):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass T: pass\n")
    auto_map = {"AutoTokenizer": ["evil.T", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T", "auto_map": auto_map}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil"}))
    with pytest.raises(ModelLoadError, match="needs code of the model"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_decoder_that_cannot_be_streamed_is_an_error():
    backend = tokenizers.Tokenizer.from_str(WHOLE_JSON)
    backend.decoder = decoders.CTC()
    with pytest.raises(ModelLoadError, match=r"decoder CTC cannot be streamed, supported are"):
        Tokenizer(backend, {})


# Chats.


def chat_tokenizer(template):
    return Tokenizer(byte_tokenizer().backend, {"eos_token": "<end>"}, chat_template=template)


LINES = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"


def test_the_caller_chooses_the_generation_prompt_and_may_give_a_template():
    tokenizer = chat_tokenizer(LINES + "{% if add_generation_prompt %}assistant:{% endif %}")
    assert render_chat(tokenizer, HELLO) == "user: Hello<end>\nassistant:"
    assert render_chat(tokenizer, HELLO, add_generation_prompt=False) == "user: Hello<end>\n"
    assert render_chat(tokenizer, HELLO, template="{{ messages[0].content }}") == "Hello"


def test_text_parts_are_joined_and_tool_calls_need_no_content():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render_chat(chat_tokenizer(LINES), [{"role": "user", "content": parts}]) == "user: one\ntwo<end>\n"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    calls = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name ~ c.function.arguments }}"
    assert render_chat(chat_tokenizer(calls + "{% endfor %}{% endfor %}"), [call]) == "f{}"


BAD_MESSAGES = {
    "none": ([], "at least one message"),
    "no list": ("hi", "messages must be a list"),
    "not a mapping": ([*HELLO, "hi"], r"messages\[1\] must be an object"),
    "no role": ([*HELLO, {"content": "x"}], r"messages\[1\].role is null, allowed are system"),
    "unknown role": (
        [{"role": "robot", "content": "x"}],
        r"messages\[0\].role is a string of 5 characters, allowed are sys",
    ),
    "no content": ([{"role": "user"}], r"messages\[0\].content is null, allowed are a string or a list"),
    "number": ([{"role": "user", "content": 5}], r"messages\[0\].content is 5"),
    "no parts": ([{"role": "user", "content": []}], r"messages\[0\].content is an array of 0 items"),
    "image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        r"messages\[0\].content\[0\] is a part of the type image_url, allowed is",
    ),
}


@pytest.mark.parametrize(("messages", "message"), BAD_MESSAGES.values(), ids=BAD_MESSAGES.keys())
def test_malformed_messages_are_refused_by_their_index(messages, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        render_chat(chat_tokenizer(LINES), messages)
    assert caught.value.param == "messages"


REFUSED_TEMPLATES = {
    "raises": ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
    "raises what it reads": ("{{ raise_exception('no ' + messages[0].content) }}", "messages: no …;"),
    "divides by zero": ("{{ 1 / 0 }}", "refuses these messages: ZeroDivisionError;"),
    "reads past the end": ("{{ messages[7].content }}", "refuses these messages"),
    "climbs to Python's classes": ("{{ ''.__class__.__mro__[1]() }}", "refuses these messages"),
    "is not Jinja": ("\n{% for %}", "line 2"),
    "nests blocks deeply": ("{% for i in range(1) %}" * 22 + "{% endfor %}" * 22, "cannot compile it"),
    "nests brackets deeply": ("{{ " + "(" * 4000 + "1" + ")" * 4000 + " }}", "cannot compile it"),
}


@pytest.mark.parametrize(("template", "message"), REFUSED_TEMPLATES.values(), ids=REFUSED_TEMPLATES.keys())
def test_a_failing_or_hostile_template_is_an_error_of_one_line(template, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        render_chat(chat_tokenizer(LINES), HELLO, template=template)
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)


def by_transformers(template, messages, special_tokens):
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        chats = render_jinja_template(
            conversations=[messages], chat_template=template, add_generation_prompt=True, **special_tokens
        )[0]
    except Exception:
        return "refused"
    return chats[0]


def by_jpaged(template, messages, special_tokens):
    tokenizer = Tokenizer(byte_tokenizer().backend, special_tokens, chat_template=template)
    try:
        return render_chat(tokenizer, messages)
    except InvalidRequestError:
        return "refused"


CONVERSATION = [
    {"role": "system", "content": "Be <brief> & kind — schön."},
    {"role": "user", "content": "  How many?\n"},
    {"role": "assistant", "content": "Seven.", "reasoning": "I count.", "marks": [{"n": 7, "of": ["ä", None]}]},
    {"role": "user", "content": "Sure?"},
]
CONVENTIONS = {
    "blocks and the spaces before them are removed": "a\n  {% if true %}\n  b\n  {% endif %}\nc\n",
    "comments": "a\n  {# nothing #}\nb",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }} "
    "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "JSON": "{{ messages[0] | tojson }} {{ messages[2].marks | tojson(indent=2) }}",
    "JSON with options": "{{ messages[2] | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}",
    "nothing is escaped": "{{ messages[0].content }}",
    "generation has a scope": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{{ messages[2].content }}"
    "{% endgeneration %}{{ x }}",
    "reasoning under its other names": "{{ messages[2].reasoning_content }} {{ messages[2].thinking }}",
    "tools and documents are none": "{{ tools is none }} {{ documents is none }} {{ nothing is defined }}",
    "special tokens": "{{ eos_token }}{{ bos_token | default('none') }}",
    "the generation prompt": "{% if add_generation_prompt %}go{% endif %}",
    "a namespace": "{% set ns = namespace(n=0) %}{% for m in 'ab' %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "a namespace refuses underscores": "{% set ns = namespace(n=0) %}{% set ns._n = 1 %}{{ ns.n }}",
    "a namespace refuses underscores from the start": "{% set ns = namespace(__n=0) %}{{ 1 }}",
    "a dictionary": "{{ dict(a=1, b='x') }} {{ dict.fromkeys('ab', 2) }}",
    "dict is not a class": "{{ dict.mro() }}",
    "dict does not show its class": "{{ dict | attr('__class__') }}",
    "messages cannot be changed": "{% set x = messages.append(1) %}",
    "the year": "{{ strftime_now('%Y') | int > 2024 }}",
    "a refusal": "{{ raise_exception('no') }}",
    "Python's methods": "{{ messages[1].content.strip().split(' ')[-1].upper() }} {{ messages[::-1][0].content }}",
    "macros": "{% macro line(m) %}{{ m.role }}: {{ m.content | trim }}{% endmacro %}{{ line(messages[1]) }}",
    "unknown tags": "{% translate %}",
}


@pytest.mark.parametrize("template", CONVENTIONS.values(), ids=CONVENTIONS.keys())
def test_templates_give_what_they_give_in_transformers(template):
    special_tokens = {"eos_token": "<end>"}
    assert by_jpaged(template, CONVERSATION, special_tokens) == by_transformers(template, CONVERSATION, special_tokens)


class DictWithMethod(dict):
    def method(self):
        return "!"


def test_a_template_sees_plain_data_only():
    message = DictWithMethod(role="user", content="a", meta=MappingProxyType({"k": DictWithMethod(x=(1, 2))}))
    render = partial(render_chat, chat_tokenizer("{{ messages[0].meta.k.x }} {{ messages[0].method is defined }}"))
    assert render([message]) == "[1, 2] False"
    with pytest.raises(
        InvalidRequestError, match=r"messages\[1\] holds a value that JSON cannot hold \(an object of type object\)"
    ):
        render([message, {"role": "user", "content": "b", "meta": object()}])


def long_loop(body):
    return "{% for i in range(99999) %}" + body + "{% endfor %}"


def doubled(start, again):
    return f"{{% set ns = namespace(x={start}) %}}" + long_loop(f"{{% set ns.x = ns.x {again} ns.x %}}")


X_S = "{{ '" + "x" * 999 + "' }}"
GREEDY_TEMPLATES = {
    "loops without output": long_loop(long_loop("{% set x = i %}")),
    "loops in macros": "{% macro m() %}" + long_loop("") + "{% endmacro %}" + long_loop("{{ m() }}"),
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(90) }}",
    "much text": long_loop(X_S),
    "much text in a block": "{% set x %}" + long_loop(X_S) + "{% endset %}",
    "a long text": "{{ 'x' * 99999999 }}",
    "a long list": "{{ ([0] * 99999999) | length }}",
    "a text that doubles": doubled("'ab'", "~"),
    "a sum that doubles": doubled("'ab'", "+"),
    "lists of lists": "{% set ns = namespace(x='ab') %}" + long_loop("{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x }}",
    "lists of lists in a filter": "{% set x = 'ab' %}" + "{% set x = [x, x] %}" * 50 + "{{ x | tojson }}",
    "lists of lists in a filter's keyword": "{% set x = 'ab' %}"
    + "{% set x = [x, x] %}" * 50
    + "{{ '%(x)s' | format(x=x) }}",
    "a filter's text": "{{ 'x' | center(9999999) }}",
    "a filter's list": "{{ range(9999) | map('string') | map('center', 9999) | list | length }}",
    "filters that take long": "{% set l = range(99999) | list %}" + "{% set x = l | sort %}" * 900,
    "a high power": "{{ 9 ** (9 ** 9) }}",
    "a product that doubles": doubled("3", "*"),
}


@pytest.mark.parametrize("template", GREEDY_TEMPLATES.values(), ids=GREEDY_TEMPLATES.keys())
def test_a_template_that_exceeds_a_limit_is_an_error_of_the_request(template, monkeypatch):
    monkeypatch.setattr("jpaged.text.chat.template_environment.MAX_RENDER_S", 0.3)
    monkeypatch.setattr("jpaged.text.chat.template_environment.MAX_LEN", 1 << 20)
    tokenizer = chat_tokenizer(LINES)
    with pytest.raises(InvalidRequestError, match=r"it takes more than|it makes a") as caught:
        render_chat(tokenizer, HELLO, template=template)
    assert caught.value.param == "messages"
    assert render_chat(tokenizer, HELLO), "the next rendering has its own time limit"


def test_constants_that_a_template_does_not_reach_are_not_computed():
    template = "{% if false %}{{ 'x' | center(999999999) }}{% endif %}ok"
    tracemalloc.start()
    try:
        assert render_chat(chat_tokenizer(LINES), HELLO, template=template) == "ok"
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


def test_a_chat_of_six_million_characters_is_within_the_limits():
    messages = [{"role": role, "content": "word " * 20_000} for role in ("user", "assistant") * 30]
    assert len(render_chat(chat_tokenizer(LINES), messages)) > 6_000_000 > 0.5 * template_environment.MAX_LEN


def test_a_model_without_a_template_says_what_to_do():
    with pytest.raises(InvalidRequestError, match="--chat-template FILE"):
        render_chat(chat_tokenizer(None), HELLO)


def test_a_prompt_with_a_lone_surrogate_is_refused():
    with pytest.raises(InvalidRequestError, match="valid Unicode") as caught:
        byte_tokenizer().encode("a\ud800")
    assert caught.value.param == "prompt"


# What is imported, and what is printed.


ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def run_python(code, **variables):
    """Run `code` in a new process whose environment has ADVICE only if it is among `variables`."""
    environment = {name: value for name, value in os.environ.items() if name != ADVICE} | variables
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)


def test_a_gguf_is_loaded_and_a_chat_rendered_without_transformers(tmp_path):
    code = (
        "import sys; from pathlib import Path; from jpaged.text.tokenizing.tokenizer import load_tokenizer;"
        "from jpaged.text.chat.chat_template import render_chat;"
        f"tokenizer = load_tokenizer(Path({str(spm_gguf(tmp_path))!r}));"
        "print(render_chat(tokenizer, [dict(role='user', content='a')], template='{{ messages[0].content }}'));"
        "print('transformers' in sys.modules)"
    )
    assert run_python(code).stdout == "a\nFalse\n"


@pytest.mark.parametrize("variables", [{}, {ADVICE: ""}], ids=["unset", "set"])
def test_transformers_prints_nothing_and_the_environment_is_restored(tmp_path, variables):
    save(tmp_path, byte_tokenizer())
    code = (
        "import os; from pathlib import Path; from jpaged.text.tokenizing.tokenizer import load_tokenizer; "
        "before = dict(os.environ);"
        f"load_tokenizer(Path({str(tmp_path)!r})); print(dict(os.environ) == before)"
    )
    done = run_python(code, **variables)
    assert (done.stdout, done.stderr) == ("True\n", "")


# Comparison with llama.cpp's golden tokenizations, an archive of 76 MB.

GOLDEN_NAMES = ["bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe"]
GOLDEN_NAMES += ["llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"]


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_a_gguf_encodes_as_llama_cpp_does(name):
    path = llama_cpp_models() / f"ggml-vocab-{name}.gguf"
    tokenizer = load_tokenizer(path)
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().split("\n")
    for text, line in zip(texts, lines, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False) == [int(token_id) for token_id in line.split()]


@pytest.mark.slow
def test_published_templates_give_what_they_give_in_transformers():
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, *HELLO]
    paths = sorted((llama_cpp_models() / "templates").glob("*.jinja"))
    texts = {path.name: by_jpaged(path.read_text(), messages, special_tokens) for path in paths}
    assert texts == {path.name: by_transformers(path.read_text(), messages, special_tokens) for path in paths}
    assert len(paths) > 60
    assert sum("Hello" in text for text in texts.values()) >= 0.9 * len(paths)
