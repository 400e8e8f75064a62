"""A directory with `tekken.json` alone has the ids of mistral-common: rank plus the number of special tokens."""

import base64
import json
import random
import subprocess
import sys
import unicodedata
import zipfile
from itertools import pairwise

import pytest
import regex

from jpaged.errors import InvalidRequestError, ModelLoadError
from jpaged.text.chat.chat_template import render_chat
from jpaged.text.tokenizing.detokenizer import Detokenizer
from jpaged.text.tokenizing.tekken_tokenizer import SPECIAL_TOKENS
from jpaged.text.tokenizing.tokenizer import has_tokenizer, load_tokenizer

PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The expression in Mistral's files."""
TOKENS = [
    *(bytes([byte]) for byte in range(256)),
    *(text.encode() for text in (
        "th", "he", "in", "  ", "the", "aa", " t", "é", "ab", "ba", " the", "aaa", "aba", "abab", "--", "\n\n", "日",
        "    ", "日本", "----", "Hello", "<s", "zz9",
    )),
]  # fmt: skip
"""Single bytes, then texts; the last are beyond the vocabulary of DATA, and "Hello" is only reached as a whole."""
NUM_SPECIAL = 30
DATA = {
    "config": {
        "pattern": PATTERN, "num_vocab_tokens": len(TOKENS), "default_vocab_size": NUM_SPECIAL + len(TOKENS) - 2,
        "default_num_special_tokens": NUM_SPECIAL, "version": "v3",
    },
    "vocab": [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="ignore")}
        for rank, token in enumerate(TOKENS)
    ],
}  # fmt: skip
OWN = [
    {"rank": rank, "token_str": text, "is_control": True}
    for rank, text in enumerate(["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[THINK]"])
]


def load(folder, data=DATA, **options):
    (folder / "tekken.json").write_text(data if isinstance(data, str) else json.dumps(data))
    (folder / "config.json").write_text('{"model_type": "mistral"}')
    if options:
        (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return load_tokenizer(folder)


def ids_by_definition(data):
    """Return a function from a text to its ids, by the definition of tiktoken, which mistral-common uses."""
    config = data["config"]
    num_special = config["default_num_special_tokens"]
    vocab = data["vocab"][: config["default_vocab_size"] - num_special]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in vocab}

    def ids_of(text):
        ids = []
        for piece in regex.findall(config["pattern"], text):
            parts = [bytes([byte]) for byte in piece.encode()]
            if piece.encode() in ranks:
                parts = [piece.encode()]
            while pairs := [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
                at = min(pairs)[1]
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            ids += [num_special + ranks[part] for part in parts]
        return ids

    return ids_of


def texts(seed, num_texts):
    rng = random.Random(seed)
    found = ["", " ", "\n", "Hello", " Hello the  theé\n\n\n日本語 12", "<s", "\x00\x7f", "ﬁ①", "a" * 99, "🦙👩‍👩‍👧"]
    pieces = [
        "the",
        " the",
        "a",
        "ab",
        "b",
        "-",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "1",
        "日",
        "é",
        "e\u0301",
        "X",
        "'s",
        "/",
    ]
    while len(found) < num_texts:
        scripts = [char for char in map(chr, rng.choices(range(0xD800), k=20)) if unicodedata.category(char) != "Cn"]
        found.append("".join(rng.choices(pieces if rng.random() < 0.7 else scripts, k=rng.randint(1, 30))))
    return found


def check_texts(tokenizer, data, num_texts):
    ids_of = ids_by_definition(data)
    for text in texts(0, num_texts):
        ids = ids_of(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == text
        detokenizer = Detokenizer(tokenizer, [1])
        detokenizer.append(ids)
        assert detokenizer.delta(finished=True) == text


def test_ids_are_rank_plus_the_number_of_special_tokens(tmp_path):
    tokenizer = load(tmp_path)
    assert tokenizer.encode("Hello") == [1, NUM_SPECIAL + TOKENS.index(b"Hello")]
    assert len(tokenizer.encode("zz9", add_special_tokens=False)) == 3, "it is beyond the declared vocabulary"
    check_texts(tokenizer, DATA, 200)


@pytest.mark.parametrize(("special", "version"), [(None, "v3"), (None, "v7"), (OWN, "v3"), (OWN, "v13")])
def test_special_tokens_are_those_of_the_file_or_the_defaults(tmp_path, special, version):
    data = {**DATA, "config": {**DATA["config"], "version": version}, "special_tokens": special}
    tokenizer = load(tmp_path, data)
    texts = SPECIAL_TOKENS if special is None else [entry["token_str"] for entry in special]
    assert [tokenizer.encode(text, add_special_tokens=False) for text in texts] == [[i] for i in range(len(texts))]
    assert tokenizer.special_ids == set(range(NUM_SPECIAL))
    assert tokenizer.vocab_size == DATA["config"]["default_vocab_size"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    text = f"[INST]the{texts[5]}</s><SPECIAL_29>"
    assert tokenizer.encode(text) == [1, 3, *ids_by_definition(data)("the"), 5, 2, 29]
    assert tokenizer.decode(tokenizer.encode(text)) == "the"


def test_options_beside_it_count_and_a_tokenizer_json_counts_before_it(tmp_path):
    tokenizer = load(tmp_path, add_bos_token=False, add_eos_token=True)
    assert tokenizer.encode("the") == [*ids_by_definition(DATA)("the"), 2]
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tekken.json").write_text("{}")
    assert load_tokenizer(tmp_path).encode("the") == [*ids_by_definition(DATA)("the"), 2]


def test_chats_are_refused_unless_a_template_lies_beside_it(tmp_path):
    chat = [{"role": "user", "content": "the"}]
    with pytest.raises(InvalidRequestError, match=r"this model has no chat template; give one"):
        render_chat(load(tmp_path), chat)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}[INST]{{ messages[0].content }}[/INST]")
    tokenizer = load(tmp_path)
    text = render_chat(tokenizer, chat)
    assert tokenizer.encode(text, add_special_tokens=False) == [1, 3, *ids_by_definition(DATA)("the"), 4]


def changed(**parts):
    """Return DATA with other values: a mapping changes keys of it, and ... removes a key."""
    data = {key: value | parts.get(key, {}) if isinstance(value, dict) else value for key, value in DATA.items()}
    data |= {key: value for key, value in parts.items() if not isinstance(value, dict)}
    data["config"] = {key: value for key, value in data["config"].items() if value is not ...}
    return {key: value for key, value in data.items() if value is not ...}


def entry_changed(index, **values):
    vocab = list(DATA["vocab"])
    vocab[index] = vocab[index] | values
    return changed(vocab=vocab)


REFUSED = {
    "half of it": (json.dumps(DATA)[:5000], "is not JSON"),
    "a list": ("[]", "holds a JSON list"),
    "no vocabulary": (changed(vocab=...), "vocab is missing"),
    "an empty vocabulary": (changed(vocab=[]), "wanted the 277 tokens that config declares, not 0"),
    "half a vocabulary": (changed(vocab=DATA["vocab"][:270]), "wanted the 277 tokens that config declares, not 270"),
    "a vocabulary of texts": (changed(vocab=["a"]), "vocab is .*wanted a list of dict values"),
    "no config": (changed(config=dict.fromkeys(DATA["config"], ...)), "default_num_special_tokens is missing"),
    "no expression": (changed(config={"pattern": ...}), r"config\.pattern is missing"),
    "a broken expression": (
        changed(config={"pattern": "(a"}),
        r"config\.pattern is '\(a', wanted a regular expression",
    ),
    "a size as text": (changed(config={"default_vocab_size": "9"}), r"config\.default_vocab_size is '9'"),
    "a small size": (changed(config={"default_vocab_size": 99}), "wanted an integer from 286"),
    "no base64": (entry_changed(270, token_bytes="?"), r"vocab\[270\] is"),
    "no bytes": (entry_changed(270, token_bytes=None), r"vocab\[270\] is"),
    "a wrong rank": (entry_changed(270, rank=271), r"vocab\[270\] is"),
    "a wrong byte": (entry_changed(9, token_bytes="QQ=="), r"vocab\[9\] is"),
    "a token twice": (
        entry_changed(270, token_bytes=DATA["vocab"][271]["token_bytes"]),
        "wanted tokens that all differ",
    ),
    "no special tokens": (changed(config={"version": "v13"}), "wanted a list of them, .* version v13"),
    "a special token twice": (
        changed(special_tokens=[OWN[0], OWN[0]]),
        "special_tokens is .*each with its own token_str",
    ),
    "a rank left out": (changed(special_tokens=[OWN[0], OWN[2]]), "special_tokens is .*of the ranks 0, 1, 2"),
    "too many": (changed(config={"default_num_special_tokens": 5}, special_tokens=OWN), "wanted at most 5 objects"),
    "a special token that is in the vocabulary": (
        changed(special_tokens=[*OWN[:3], {"rank": 3, "token_str": "the"}]),
        "texts that are not in vocab too, as 'the' is",
    ),
}


@pytest.mark.parametrize(("data", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_file_that_is_incomplete_or_contradicts_itself_is_refused_in_one_line(tmp_path, data, message):
    with pytest.raises(ModelLoadError, match=rf"tekken\.json: .*{message}") as caught:
        load(tmp_path, data)
    assert "\n" not in str(caught.value)
    assert has_tokenizer(tmp_path)


@pytest.mark.slow
def test_mistrals_own_files_have_the_ids_of_their_package(tmp_path):
    """The files come with mistral-common, which gave the ids that are written here."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "-d",
        str(tmp_path),
        "mistral-common==1.13.1",
    ]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    for name in ("tekken_240718.json", "tekken_240911.json"):
        data = json.loads(zipfile.ZipFile(wheel).read(f"mistral_common/data/{name}"))
        tokenizer = load(tmp_path, data)
        assert tokenizer.encode("Hello, world! 日本語 12\n") == [
            1,
            22177,
            1044,
            4304,
            1033,
            30367,
            15199,
            1032,
            1049,
            1050,
            1010,
        ]
        check_texts(tokenizer, data, 2000)
