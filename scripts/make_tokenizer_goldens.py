"""Write the token ids of published tokenizers, and the chats of published templates, as transformers 4.57 gives them.

    python -m venv old && old/bin/pip install 'transformers==4.57.*' sentencepiece protobuf jinja2
    old/bin/python scripts/make_tokenizer_goldens.py TOKENIZERS TEMPLATES MISTRAL tests/golden/tokenizers.json.xz

TOKENIZERS has a directory for each tokenizer and TEMPLATES has `.jinja` files:
`tests/jpaged/text/tokenizing/published_tokenizers.py` downloads both into the user's cache, and names their sources.
MISTRAL is the SentencePiece model of Mistral v0.3 (`mistral_common/data/mistral_instruct_tokenizer_240323.model.v3` in
the wheel mistral-common 1.13.1), without which transformers 4.57 refuses `add_prefix_space` there. A variant is a
directory of the same vocabulary whose tokenizer_config.json, or the steps around the model in whose tokenizer.json,
differ.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
import shutil
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

NUM_TEXTS, NUM_VARIANT_TEXTS, NUM_CHATS = 240, 20, 25
WRITTEN = [
    "", " ", "  ", "\n", "\t", "\n\n\n", " \n ", "\r\n", "\u00a0", "\u3000", "\u200b", "\ufeff", ".", "a", " a",
    "a ", "A", "Hello", " Hello", "Hello ", "  Hello  ", "hello world", "Hello, world!", "HELLO WORLD",
    "hELLO wORLD", "I've told you they'LL don't", "it's 'quoted' \"twice\" `thrice`", "'' ``", "don’t “curly”",
    "e.g., i.e. etc...", "1", "12", "123", "1234", "12345", "1999", "3.14159", "1,000,000", "-7 +8 *9", "0x1F",
    "1e-10", "٣٤", "½ ² Ⅷ", "２０２４", "2024-01-31T23:59:59Z", "192.168.0.1", "a1b2c3", "7up", "x²+y²", "100%",
    "$5.00", "€9", "#42", "@user", "こんにちは、世界。", "你好，世界", "中文abc混合123", "한국어 텍스트",
    "アイウ ｱｲｳ", "漢字かな交じり文", "吾輩は猫である。名前はまだ無い。", "👩‍👩‍👧‍👦", "🦙.cpp", "😶‍🌫️",
    "✅", "🇫🇷🇩🇪", "👍🏽 ok", "☃️", "🏳️‍🌈", "a🙂b", "🙂🙂🙂", "e\u0301", "é", "Å\u030a", "ñ n\u0303",
    "Cửa Việt", "résumé", "Äpfel und Öl", "ﬁne ligature", "Straße", "İstanbul ıi", "ǅ Ǆ", "a\u0327\u0301\u0316b",
    "\u0301", "Z͑ͫ̓ͪ̂ͫ̽͏a͏l͏g͏o", "нещо", "Привет, мир!", "Ελληνικά", "العربية مرحبا", "שלום", "कन्नड नमस्ते",
    "ไทยภาษา", "ខ្មែរ កាន់តែពិសេស", "தமிழ்", "ქართული", "አማርኛ", "မြန်မာ", "\u202eright to left\u202c",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚", "Ⓐⓑ ㋿ ㎏", "\x00", "\x01\x7f", "a\x00b", "def f(x):\n    return {'a': x**2}  # 100%\n",
    "if (a<b && c>=d) { e[i]++; }", "SELECT * FROM t WHERE x='y';--",
    "#include <stdio.h>\nint main(void){return 0;}\n", "\tfor i in range(10):\n\t\tprint(i)\n\n",
    "<div class=\"a\">&nbsp;</div>", "https://example.org/a?b=c&d=%20#e", "/usr/local/bin/python3.11",
    "C:\\Windows\\System32", "user.name+tag@example.org", "{\"a\": [1, 2.5, null, true], \"b\": {}}",
    "x = y\n\n\n    z", "\\frac{a}{b} \\sum_{i=0}^n", "```python\nx\n```", "// TODO", "a_b_c aBcD",
    "camelCaseWord snake_case_word kebab-case-word", "HTTPServer's IDs 'RE", "lorem ipsum dolor sit amet", "a" * 50,
    " " * 40, "a" + " " * 17 + "b", "\n" * 20, "\t" * 9, "ab" * 30, "=" * 33, "-" * 80, "." * 17, "!?" * 12,
    "\r\n\r\n a \r\n", "a\u2028b\u2029c\x85d", "<s>", "</s>", "<s>[INST] a [/INST] b </s><s>[INST] c</s>",
    "[INST] Hi [/INST]", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<|endoftext|>",
    "a<|endoftext|>b", " <|endoftext|> ",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", "<bos>a<eos>", "<pad><unk><mask>",
    "[CLS] a [SEP] b [MASK] [PAD] [UNK]", "<｜begin▁of▁sentence｜>a<｜end▁of▁sentence｜>",
    "<｜User｜>Hi<｜Assistant｜>", "<extra_id_0> x <extra_id_1>", "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
    "<tool_call>\n{\"name\": \"f\"}\n</tool_call>", "[TOOL_CALLS] [{\"name\": \"f\"}]</s>", "<|endofprompt|>",
    "<|im_start|><|im_start|>", "<unused0>", "<b>bold</b> <i>i</i>", "▁", "▁a", "a▁b", "Ġa", "<0x41>", "<0xE2>",
    "<|", "|>", "< s >", "<S>", "</S>", "[cls]",
]  # fmt: skip
PIECES = [
    "word", " the", " quick", "Brown", " fox's", "\n", "\n\n", " ", "  ", "   ", "\t", "1", " 42", "2024", ".5", ",",
    ".", "!?", " (", ")", "'ll", "世界", "、", "🙂", "👍🏽", "é", "e\u0301", "нет", " שלום", "ไทย", "한글",
    "<|endoftext|>", "</s>", "<s>", "{", "}", "==", "->", "_x", "http://", "ß", "\u00a0",
]  # fmt: skip
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}},
}
FLAGS = {
    **{
        f"{name} {value}": {name: value} for name in ("add_bos_token", "add_eos_token") for value in (True, False, None)
    },
    "add_bos_token and add_eos_token": {"add_bos_token": True, "add_eos_token": True},
    "neither": {"add_bos_token": False, "add_eos_token": False},
    **{f"add_prefix_space {value}": {"add_prefix_space": value} for value in (True, False, None)},
    "split_special_tokens": {"split_special_tokens": True},
    "legacy": {"legacy": True},
    "not legacy": {"legacy": False},
    "not legacy, no prefix space": {"legacy": False, "add_prefix_space": False},
    "legacy, no prefix space": {"legacy": True, "add_prefix_space": False},
    "legacy and prefix space": {"legacy": True, "add_prefix_space": True},
    "not lower case": {"do_lower_case": False},
    "strip_accents": {"strip_accents": False, "do_lower_case": True},
    "no Chinese characters": {"tokenize_chinese_chars": False},
    "a special token of its own": {"additional_special_tokens": ["HELLO"]},
    "a token declared": {"added_tokens_decoder": {"5": {"content": " fox", "special": False, "lstrip": True}}},
}
CLASSES = (
    "LlamaTokenizer", "GemmaTokenizerFast", "GPT2TokenizerFast", "GPTNeoXTokenizerFast", "Qwen2Tokenizer",
    "CohereTokenizerFast", "CodeLlamaTokenizer", "BloomTokenizerFast", "PreTrainedTokenizerFast",
)  # fmt: skip
BYTE_LEVEL = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
STEPS = {
    "byte-level, prefix space": {"pre_tokenizer": {**BYTE_LEVEL, "add_prefix_space": True}},
    "byte-level, no prefix space": {"pre_tokenizer": {**BYTE_LEVEL, "add_prefix_space": False}},
}


FILES: dict[str, dict[str, Any]] = {
    "special_tokens_map.json counts before the options": {
        "config": {"add_eos_token": True},
        "files": {"special_tokens_map.json": {"eos_token": "HELLO", "bos_token": {"content": "<s>", "rstrip": True}}},
    },
    "added_tokens.json": {"files": {"added_tokens.json": {"HELLO": 32000, "</s>": 2}}},
    "added_tokens.json beside added_tokens_decoder": {
        "config": {"added_tokens_decoder": {"32000": {"content": "HELLO", "special": False}}},
        "files": {"added_tokens.json": {" fox": 32001}},
    },
    "special tokens with names of their own": {"config": {"extra_special_tokens": {"image_token": "HELLO"}}},
    "the class of config.json": {
        "config": {"tokenizer_class": ..., "add_bos_token": ...},
        "files": {"config.json": {"model_type": "gpt_neox", "tokenizer_class": "GemmaTokenizer"}},
    },
    "the class of a model type": {
        "config": {"tokenizer_class": ..., "add_bos_token": ...},
        "files": {"config.json": {"model_type": "gpt_neox"}},
    },
}
"""Variants of Llama 2's tokenizer that have more files."""


def texts() -> list[str]:
    """Return the 240 texts: those written above, then random joins of PIECES from a fixed seed."""
    rng = random.Random(240)
    made = ["".join(rng.choices(PIECES, k=rng.randint(3, 24))) for _ in range(NUM_TEXTS - len(WRITTEN))]
    return [*WRITTEN, *made]


def variant_texts() -> list[str]:
    """Return a sample of `texts()`, and four texts that show prefix spaces, special tokens and accents."""
    sample = random.Random(20).sample(texts(), NUM_VARIANT_TEXTS - 4)
    return [*sample, "Hello", " Hello fox", "a</s><s>b", "Héllo HELLO 你好"]


def chats() -> list[list[dict[str, Any]]]:
    """Return chats with and without a system prompt, of several turns, with tool calls, and of odd texts."""
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
    system = {"role": "system", "content": "Be brief."}
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    two_calls = {**call, "tool_calls": [CALL, {**CALL, "id": "bcdefghij"}]}
    result = {"role": "tool", "content": "18 °C", "tool_call_id": "abcdefghi", "name": "weather"}
    found = [
        [user], [system, user], [user, answer, user], [system, user, answer, user], [user, answer],
        [system, user, answer], [user, call, result], [system, user, call, result],
        [user, call, result, answer, user], [user, {**call, "content": "I look."}, result, answer],
        [user, {**answer, "reasoning_content": "They greet."}, user], [system], [user, user], [answer, user],
        [{"role": "developer", "content": "Be brief."}, user],
        [user, two_calls, result, {**result, "tool_call_id": "bcdefghij"}],
    ]  # fmt: skip
    odd = ["", " ", "\n a \n", "<|im_end|>", "</s>", "héllo 世界 👍🏽", "def f():\n    pass", "{{ x }}", "a" * 300]
    return [*found, *([{"role": "user", "content": text}] for text in odd)]


def load(
    directory: Path,
    config: dict[str, Any],
    file: dict[str, Any] | None,
    mistral: Path,
    files: dict[str, Any] | None = None,
) -> Any:
    """Return the tokenizer of `directory` with another tokenizer_config.json and, if given, another tokenizer.json.

    `files` are further ones.
    """
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        if directory.name == "mistral":
            shutil.copy(mistral, Path(folder) / "tokenizer.model")
        if file is None:
            shutil.copy(directory / "tokenizer.json", folder)
        else:
            (Path(folder) / "tokenizer.json").write_text(json.dumps(file))
        for name, content in {"tokenizer_config.json": config, **(files or {})}.items():
            (Path(folder) / name).write_text(json.dumps(content))
        return AutoTokenizer.from_pretrained(folder)


def ids_of(
    directory: Path,
    config: dict[str, Any],
    file: dict[str, Any] | None,
    some: list[str],
    mistral: Path,
    files: dict[str, Any] | None = None,
) -> Any:
    """Return the ids of texts, with and without special tokens; the name of the error that transformers raises."""
    try:
        tokenizer = load(directory, config, file, mistral, files)
        with_ends = tokenizer(some).input_ids
        bare = tokenizer(some, add_special_tokens=False).input_ids
    except BaseException as error:  # One of tokenizers' errors is no Exception.
        return type(error).__name__
    return [with_ends, bare]


def variants(name: str, config: dict[str, Any], file: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return name → what is put into tokenizer_config.json (`config`), and into tokenizer.json (`file`)."""
    found = {label: {"config": flags} for label, flags in FLAGS.items()}
    if name == "mistral":  # Converted from the SentencePiece model, transformers 4.57 counts 24 tokens twice.
        del found["a special token of its own"]
    if name == "llama2":
        found |= FILES
    if name in ("deepseek", "llama2"):
        for kind in CLASSES:
            found[kind] = {"config": {"tokenizer_class": kind}}
            for flag in ("add_bos_token", "add_eos_token"):
                value = not config[flag]
                found[f"{kind}, {flag} {value}"] = {"config": {"tokenizer_class": kind, flag: value}}
            found[f"{kind}, add_prefix_space"] = {"config": {"tokenizer_class": kind, "add_prefix_space": True}}
    if name == "mistral":
        found["no add_prefix_space"] = {"config": {"add_prefix_space": ...}}
    if name in ("o200k", "deepseek"):
        for step, change in STEPS.items():
            for flags in ({}, {"add_prefix_space": True}, {"add_prefix_space": False}, {"add_prefix_space": None}):
                found[f"{step}, {flags}"] = {"config": flags, "file": change}
    return found


def main() -> None:
    tokenizers, templates, mistral, output = map(Path, sys.argv[1:])
    import transformers
    from transformers.utils.chat_template_utils import render_jinja_template

    golden: dict[str, Any] = {
        "transformers": transformers.__version__,
        "texts": texts(),
        "variant_texts": variant_texts(),
    }
    assert len(golden["texts"]) == len(set(golden["texts"])) == NUM_TEXTS
    golden["tokenizers"] = {}
    for directory in sorted(path for path in tokenizers.iterdir() if path.is_dir()):
        config = json.loads((directory / "tokenizer_config.json").read_text())
        config.setdefault("tokenizer_class", "BertTokenizer")  # One has no class, which its config.json would tell.
        file = json.loads((directory / "tokenizer.json").read_text())
        found: dict[str, Any] = {"ids": ids_of(directory, config, None, golden["texts"], mistral), "variants": {}}
        for name, change in variants(directory.name, config, file).items():
            changed = {key: value for key, value in (config | change.get("config", {})).items() if value is not ...}
            new_file = file | change["file"] if "file" in change else None
            ids = ids_of(directory, changed, new_file, golden["variant_texts"], mistral, change.get("files"))
            options = {key: "absent" if value is ... else value for key, value in change.get("config", {}).items()}
            found["variants"][name] = {**change, "config": options, "ids": ids}
        golden["tokenizers"][directory.name] = found
        print(directory.name, {name: v["ids"] for name, v in found["variants"].items() if isinstance(v["ids"], str)})
    golden["chats"] = chats()
    assert len(golden["chats"]) == NUM_CHATS
    golden["date"] = date.today().isoformat()  # Some templates write it.
    golden["templates"] = {}
    for path in sorted(templates.glob("*.jinja")):
        digests: list[str | None] = []
        for chat in golden["chats"]:
            try:
                text = render_jinja_template(
                    conversations=[chat], chat_template=path.read_text(), add_generation_prompt=True,
                    bos_token="<s>", eos_token="</s>",
                )[0][0]  # fmt: skip
                digests.append(hashlib.sha256(text.encode()).hexdigest()[:12])
            except Exception:
                digests.append(None)
        golden["templates"][path.name] = digests
    golden["rendered"] = {}
    for directory in sorted(path for path in tokenizers.iterdir() if path.is_dir()):
        config = json.loads((directory / "tokenizer_config.json").read_text())
        if config.get("chat_template"):
            tokenizer = load(directory, config, None, mistral)
            golden["rendered"][directory.name] = [ids_of_chat(tokenizer, chat) for chat in golden["chats"]]
    output.write_bytes(lzma.compress(json.dumps(golden, separators=(",", ":")).encode(), preset=9))
    print(output, output.stat().st_size)


def ids_of_chat(tokenizer: Any, chat: list[dict[str, Any]]) -> list[int] | None:
    try:
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    except Exception:
        return None


if __name__ == "__main__":
    main()
