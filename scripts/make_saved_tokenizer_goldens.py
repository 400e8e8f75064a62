"""Writes the token ids that transformers 5.24 gives for tokenizers that it saved.

    python -m venv /tmp/goldens && /tmp/goldens/bin/pip install transformers==5.24.0 jinja2
    /tmp/goldens/bin/python scripts/make_saved_tokenizer_goldens.py TOKENIZERS tests/golden/saved_tokenizers.json.xz

TOKENIZERS has a directory for each published tokenizer, as in `make_tokenizer_goldens.py`. Each is opened, changed as
users change tokenizers, saved and opened again; the ids are those of the last one. A case has the saved files without
what they share with the published ones, such as the vocabulary, and sums of ids: one of 240 texts, and one of each of
25 chats, null for one that the template refuses. The same is done with tiny tokenizers, trained here, under the name of
every class: of these the vocabularies and the ids of each text are written.
"""

from __future__ import annotations

import json
import lzma
import sys
import tempfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from make_tokenizer_goldens import chats, texts
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TINY_TEXTS = (
    "", " ", "Hello", " Hello fox", "hello  Fox\n\n 12 1234", "a</s><s>b", "a <s> b </s> c", "[INST]Hi[/INST]",
    "e\u0301 é Héllo 世界 🙂", "HELLO wORLD", " <x1> a <x2> b", "foxy fox", "<|endoftext|>a", "don't they'll  x\t",
)  # fmt: skip
CORPUS = ["the quick brown fox says hello, Hello world 12 1234", "héllo hello fox foxes don't they'll word words"]
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
CLASSES = (
    "LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "GemmaTokenizerFast", "GPT2TokenizerFast",
    "GPTNeoXTokenizerFast", "Qwen2Tokenizer", "Qwen3_5Tokenizer", "CohereTokenizerFast", "BloomTokenizerFast",
    "PreTrainedTokenizerFast", "TokenizersBackend",
)  # fmt: skip


def set_ends(bos: bool | None, eos: bool | None) -> Callable[[Any], None]:
    """Return a change that sets the properties `add_bos_token` and `add_eos_token`, those that are not None."""

    def change(tokenizer: Any) -> None:
        if bos is not None:
            tokenizer.add_bos_token = bos
        if eos is not None:
            tokenizer.add_eos_token = eos

    return change


def add(tokenizer: Any) -> None:
    """Add plain and special tokens with each of the flags."""
    plain = [
        AddedToken(" fox", lstrip=True),
        AddedToken("wOrLd", normalized=True),
        AddedToken("foxy", single_word=True),
    ]
    tokenizer.add_tokens(["HELLO", *plain])
    tokenizer.add_special_tokens(
        {"pad_token": "<mypad>", "extra_special_tokens": ["<x1>", AddedToken("<x2>", lstrip=True, rstrip=True)]}
    )


def strip_around_eos(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"eos_token": AddedToken(tokenizer.eos_token, lstrip=True, rstrip=True)})


def change_steps(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()


CHANGES: dict[str, Callable[[Any], None]] = {
    "as it is": lambda tokenizer: None,
    "no BOS": set_ends(False, None),
    "BOS and EOS": set_ends(True, True),
    "tokens added": add,
    "spaces around EOS": strip_around_eos,
    "other steps": change_steps,
}
"""What users do with a tokenizer before they save it."""
OPTIONS: dict[str, dict[str, Any]] = {
    "add_prefix_space": {"add_prefix_space": True},
    "no add_prefix_space": {"add_prefix_space": False},
    "legacy": {"legacy": True},
    "split_special_tokens": {"split_special_tokens": True},
    "own names": {"image_token": "<img>", "extra_special_tokens": {"audio_token": "<audio>"}},
}
"""What stands in the tokenizer_config.json that is opened at first."""
EDITS: dict[str, dict[str, Any]] = {
    "edited: add_bos_token": {"add_bos_token": False, "add_eos_token": True},
    "edited: legacy": {"legacy": True},
    "edited: TokenizersBackend": {"tokenizer_class": "TokenizersBackend"},
    "edited: PreTrainedTokenizerFast": {"tokenizer_class": "PreTrainedTokenizerFast"},
    "edited: GPT2Tokenizer": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
}
"""What is written into the saved tokenizer_config.json by hand."""
MODEL_TYPES = {"llama2": "mistral", "llama3": "llama", "mistral": "mistral", "deepseek": "qwen2", "qwen": "qwen2"}
"""Published tokenizer → `model_type` in a config.json beside it."""
TINY_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "olmo2", "gpt_neox")


def tiny() -> dict[str, tokenizers.Tokenizer]:
    """Return a byte-level tokenizer, one of SentencePiece's kind, BERT's and T5's, of some hundred tokens each."""
    byte_level = tokenizers.Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [*SPECIAL, "<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    byte_level.train_from_iterator(CORPUS, trainer)
    bars = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    bars.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bars.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=pieces, show_progress=False)
    bars.train_from_iterator(CORPUS, trainer)
    file = json.loads(bars.to_str())
    file["added_tokens"] = file["added_tokens"][: len(SPECIAL)]  # Byte tokens are plain entries of the vocabulary.
    bars = tokenizers.Tokenizer.from_str(json.dumps(file))
    bert = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    bert.normalizer, bert.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    bert.decoder = decoders.WordPiece()
    names = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    bert.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=names, show_progress=False)
    )
    t5 = tokenizers.Tokenizer(models.Unigram())
    t5.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    t5.decoder = decoders.Metaspace("▁", "always")
    names = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=names, unk_token="<unk>", show_progress=False)
    t5.train_from_iterator(CORPUS, trainer)
    return {"byte-level": byte_level, "bars": bars, "bert": bert, "t5": t5}


def reopened(
    folder: Path, file: str, options: dict[str, Any], change: Callable[[Any], None], **more: dict[str, Any]
) -> tuple[Path, Any]:
    """Open a tokenizer.json beside `options`, apply `change`, save it, and return the saved folder and its tokenizer.

    `more` may have `edits`, which are written into the saved tokenizer_config.json, and `config`, which is put into a
    config.json before the first opening.
    """
    before, after = folder / "before", folder / "after"
    before.mkdir()
    (before / "tokenizer.json").write_text(file)
    (before / "tokenizer_config.json").write_text(json.dumps(options))
    after.mkdir()
    if "config" in more:
        for directory in (before, after):
            (directory / "config.json").write_text(json.dumps(more["config"]))
    tokenizer = AutoTokenizer.from_pretrained(before)
    change(tokenizer)
    tokenizer.save_pretrained(after)
    saved = after / "tokenizer_config.json"
    saved.write_text(json.dumps(json.loads(saved.read_text()) | more.get("edits", {}), ensure_ascii=False))
    return after, AutoTokenizer.from_pretrained(after)


def rest_of(folder: Path, published: dict[str, Any]) -> dict[str, Any]:
    """Return the files of a saved folder, tokenizer.json without what it shares with the `published` one.

    Shared are the vocabulary, the merges and the normalizer, which is a large table of characters for T5.
    """
    file = json.loads((folder / "tokenizer.json").read_text())
    for key in ("vocab", "merges"):
        assert entries(file["model"].pop(key, None)) == entries(published["model"].get(key)), key
    if file["normalizer"] and file["normalizer"] == published["normalizer"]:
        del file["normalizer"]
    others = [path for path in sorted(folder.iterdir()) if path.name != "tokenizer.json"]
    return {"tokenizer.json": file, **{path.name: path.read_text() for path in others}}


def entries(part: Any) -> Any:
    """Return a vocabulary or merges in one form: older files write a merge as a string."""
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in part] if isinstance(part, list) else part


def ids_of(tokenizer: Any, some: tuple[str, ...] | list[str]) -> list[list[list[int]]]:
    return [tokenizer(some, add_special_tokens=adds).input_ids for adds in (True, False)]


def ids_of_chats(tokenizer: Any) -> list[list[int] | None]:
    """Return the ids of each chat; None for one that the template refuses."""
    found: list[list[int] | None] = []
    for chat in chats():
        try:
            found.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        except Exception:
            found.append(None)
    return found


def sum_of_chat(ids: list[int] | None) -> str | None:
    return None if ids is None else sum_of(ids)


def sum_of(ids: Any) -> str:
    return sha256(json.dumps(ids).encode()).hexdigest()[:16]


def tiny_cases(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the label of each case of a tiny tokenizer, and what `reopened` takes for it."""
    classes = {"bert": ["BertTokenizer"], "t5": ["T5Tokenizer"]}.get(name, CLASSES)
    for kind in classes:
        first = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        if name in ("bert", "t5"):
            first = {"tokenizer_class": kind}
        for label, change in CHANGES.items():
            if label != "spaces around EOS" or name != "bert":
                yield f"{kind}, {label}", {"options": first, "change": change}
        for label, options in OPTIONS.items():
            yield f"{kind}, {label}", {"options": first | options, "change": CHANGES["as it is"]}
        for label, edits in EDITS.items():
            if name not in ("bert", "t5") or "GPT2" not in label:
                yield f"{kind}, {label}", {"options": first, "change": CHANGES["as it is"], "edits": edits}
    for model_type in TINY_MODEL_TYPES if name in ("byte-level", "bars") else ():
        for kind in ("LlamaTokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast"):
            options = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
            more = {"config": {"model_type": model_type}, "edits": {"tokenizer_class": kind, "add_prefix_space": True}}
            yield f"{kind} of {model_type}", {"options": options, "change": change_steps, **more}


def published_cases(name: str, options: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the label of each case of a published tokenizer, and what `reopened` takes for it."""
    for label, change in CHANGES.items():
        yield label, {"options": options, "change": change}
    changed = {"add_prefix_space": not options.get("add_prefix_space")}
    yield "other add_prefix_space", {"options": options | changed, "change": CHANGES["as it is"]}
    yield "legacy", {"options": options | {"legacy": True}, "change": CHANGES["as it is"]}
    if name in MODEL_TYPES:
        config = {"model_type": MODEL_TYPES[name]}
        yield "beside config.json", {"options": options, "change": CHANGES["as it is"], "config": config}


def main() -> None:
    published, output = map(Path, sys.argv[1:])
    transformers.logging.set_verbosity_error()
    golden: dict[str, Any] = {"transformers": transformers.__version__, "tiny_texts": TINY_TEXTS, "tiny": {}}
    for name, backend in tiny().items():
        file = json.loads(backend.to_str())
        cases: dict[str, Any] = {}
        for label, case in tiny_cases(name):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    saved, tokenizer = reopened(Path(folder), backend.to_str(), **case)
                except TypeError as error:  # Some classes refuse an option of another class.
                    print(name, label, error)
                    continue
                ids = ids_of(tokenizer, TINY_TEXTS)
                cases[label] = {"files": rest_of(saved, file), "ids": ids, "special": tokenizer.special_tokens_map}
        vocabulary = {key: file["model"][key] for key in ("vocab", "merges") if key in file["model"]}
        shared = {"normalizer": file["normalizer"], "model": vocabulary}
        golden["tiny"][name] = {"shared": shared, "cases": cases}
    golden["published"] = {}
    for directory in sorted(path for path in published.iterdir() if path.is_dir()):
        text = (directory / "tokenizer.json").read_text()
        options = json.loads((directory / "tokenizer_config.json").read_text())
        options.setdefault("tokenizer_class", "BertTokenizer")  # One has no class, which its config.json would tell.
        options.setdefault("chat_template", TEMPLATE)
        cases = golden["published"][directory.name] = {}
        for label, case in published_cases(directory.name, options):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    saved, tokenizer = reopened(Path(folder), text, **case)
                except TypeError as error:
                    print(directory.name, label, error)
                    continue
                files = rest_of(saved, json.loads(text))
                ids, rendered = ids_of(tokenizer, texts()), ids_of_chats(tokenizer)
            cases[label] = {"files": files, "texts": sum_of(ids), "chats": list(map(sum_of_chat, rendered))}
            print(
                directory.name, label, type(tokenizer).__name__, sum(chat is not None for chat in rendered), flush=True
            )
    raw = json.dumps(golden, separators=(",", ":"), ensure_ascii=False).encode()
    output.write_bytes(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME))
    print(output, output.stat().st_size, {name: len(tiny["cases"]) for name, tiny in golden["tiny"].items()})


if __name__ == "__main__":
    main()
