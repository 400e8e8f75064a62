"""Says which tokens of a GGUF file end a reply.

The file names one or a few by id, and the converters that wrote published files often missed others: Qwen2.5-Coder's
names `<|im_end|>`, which ends a turn of a chat, and not `<|endoftext|>`, which ends a completion. llama.cpp therefore
knows ends by their text too. This module follows its list and its exceptions (`src/llama-vocab.cpp`, of the version in
llama-cpp-python 0.3.36): tokens that pad or separate the files of a repository end a completion too. It differs in one
thing: an ordinary token, which a text may hold, is no end.
"""

from __future__ import annotations

from ..fields import Fields

KEY = "tokenizer.ggml."
NAMED_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Ends of the text, of a turn, and of a message to a tool, then the padding, the name of a repository and the separator
of files, as the metadata call them."""
MARKED_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_utterance>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>",
)  # fmt: skip
"""Texts of tokens that end a reply. No ordinary text has them."""
WRITABLE_TEXTS = (
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "[e~[", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
)  # fmt: skip
"""Texts of tokens that end a reply unless the token is an ordinary one, which a text may hold."""
HTML_TEXT = "</s>"
"""The text of a token that ends a reply if it is a control token: Gemma has it as a token of HTML."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # Values of tokenizer.ggml.token_type.
END_KINDS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(MARKED_TEXTS, (NORMAL, UNKNOWN, CONTROL, USER_DEFINED)),
    **dict.fromkeys(WRITABLE_TEXTS, (UNKNOWN, CONTROL, USER_DEFINED)),
    HTML_TEXT: (CONTROL,),
}
"""The token types with which a token of a text ends a reply."""


def end_token_ids(fields: Fields, vocab_size: int) -> list[int]:
    """Return the ids of tokens that end a reply: those that the metadata name, then those that are known by their text.

    `vocab_size` is the number of the model's token ids. A token known by its text whose id is not below it is left out;
    for such an id that the metadata name, ModelLoadError is raised.
    """
    named = [i for name in NAMED_ENDS for i in fields.token_ids(f"{KEY}{name}_token_id", vocab_size=vocab_size)]
    tokens = fields.items(KEY + "tokens", str, [])
    # In a file without types, a text alone decides.
    kinds = fields.items(KEY + "token_type", int, []) or [CONTROL] * len(tokens)
    # The index is the id.
    known = [(token, index) for index, token in enumerate(tokens[: min(vocab_size, len(kinds))]) if token in END_KINDS]
    ids = {token: index for token, index in known if kinds[index] in END_KINDS[token]}
    # In these vocabularies `<|end|>` ends one message of a reply, and the model continues with the next message.
    if {"<|return|>", "<|call|>"} <= ids.keys() or ("<|flush|>" in ids and {"<|call|>", "<|calls|>"} & ids.keys()):
        ids.pop("<|end|>", None)
    # In vocabularies with one of these tokens, `</s>` is a tag of HTML; llama.cpp makes the same exception.
    if "<|tool_response>" in tokens or "<|plamo:eos|>" in tokens:
        ids.pop(HTML_TEXT, None)
    return list(dict.fromkeys([*named, *ids.values()]))
