"""Published tokenizers, fetched once from package registries into the user's cache, and two tiny ones made here.

If a tokenizer cannot be fetched (no network, no npm), the tests that need it are skipped with the reason; they fail if
the environment variable CI is set.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from jpaged.text.tokenizing.tokenizer import Tokenizer, load_tokenizer

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jpaged" / "tests"
FAMILIES = ("bert", "cl100k", "deepseek", "gemma", "llama2", "llama3", "mistral", "o200k", "qwen", "t5")
MOST_FAMILIES = [pytest.param(name, marks=[pytest.mark.slow] * (name == "gemma")) for name in FAMILIES]
"""All of them as parameters of tests; the largest vocabulary takes ten seconds and is part of the slow tests."""

NPM_PACKAGE = "@plurnk/plurnk-mimetypes-tokenizers@1.4.0"
NPM_SHA256 = "f68429ac2246f45c8257ac13a16b554d30200e7eccf4045eeef590a301e8fb5e"
SDIST = "llama-cpp-python==0.3.36"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
SDIST_MEMBERS = "/vendor/llama.cpp/models/"

TEXTS = {
    "empty": "",
    "words": "Hello, world! I've been told they'LL don't. '' ``",
    "numbers": "1 12 123 1234 1999 3.14159 1,000,000 ٣٤ ½",
    "white space": " leading   runs\n\n\n\t \t tabs \r\n and trailing   ",
    "CJK": "こんにちは、世界。你好 한국어 アイウ",
    "emoji": "👩‍👩‍👧‍👦 🦙.cpp 😶‍🌫️ ✅ 🇫🇷",
    "accents": "Cửa Việt e\u0301 résumé Äpfel",
    "scripts": "нещо العربية कन्नड កាន់តែពិសេស ไทย",
    "code": "def f(x):\n    return {'a': x**2}  # 100%\n",
}


def _run(command, folder, name):
    """Run `command` in `folder`; skip the test if it fails, unless the environment variable CI is set."""
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{name} cannot be fetched: {error}")


def _unpacked(name, command, sha256, part):
    """Return the folder CACHE / `name`, which is made once: `command` fetches an archive into its working folder.

    Of the archive those files are kept whose path contains `part`, under the path after it.
    """
    target = CACHE / name
    if target.is_dir():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        _run(command, folder, name)
        (archive,) = Path(folder).iterdir()
        assert hashlib.sha256(archive.read_bytes()).hexdigest() == sha256, f"{archive.name} is not the pinned archive"
        files = Path(folder) / "files"
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isfile() and part in member.name:
                    member.name = member.name.split(part, 1)[1]
                    tar.extract(member, files, filter="data")
        try:
            files.rename(target)
        except OSError:  # Another process has made the folder meanwhile.
            shutil.rmtree(files)
    return target


@functools.cache
def family_directory(family):
    """Return the folder with `tokenizer.json` and `tokenizer_config.json` of one of FAMILIES."""
    return _unpacked("plurnk-tokenizers-1.4.0", ["npm", "pack", NPM_PACKAGE], NPM_SHA256, "/tokenizers/") / family


@functools.cache
def load_family(family):
    return load_tokenizer(family_directory(family))


@functools.cache
def llama_cpp_models():
    """Return llama.cpp's folder of vocabularies with golden tokenizations, and of chat templates."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python", SDIST]
    return _unpacked("llama-cpp-0.3.36-models", command, SDIST_SHA256, SDIST_MEMBERS)


@functools.cache
def load_smollm2():
    from jpaged.startup.model_source import resolve_model

    return load_tokenizer(resolve_model("smollm2-135m").path)


@functools.cache
def byte_tokenizer():
    """Return a tokenizer in which each byte is the id of its token, and 256 is the special token <end>."""
    # In GPT-2's alphabet printable bytes stand for themselves, and the characters from U+0100 for the other bytes.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [ord(char) for char in alphabet if ord(char) < 256]
    order = [*printable, *(byte for byte in range(256) if byte not in printable)]
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(zip(alphabet, order, strict=True)), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    return Tokenizer(backend, {"eos_token": "<end>"})


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b", "ab", "▁ab"]


@functools.cache
def sentence_piece_tokenizer():
    """Return a tokenizer of Llama 2's kind with 266 tokens."""
    vocab = {piece: index for index, piece in enumerate(PIECES)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in PIECES[:3]])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})
