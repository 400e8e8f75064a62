"""The tokens of a GGUF file that end a reply are found by id and by text, as llama.cpp finds them."""

from pathlib import Path

import pytest

from jpaged.errors import ModelLoadError
from jpaged.models.fields import Fields
from jpaged.models.opening.gguf_ends import HTML_TEXT, MARKED_TEXTS, WRITABLE_TEXTS, end_token_ids

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def ends(tokens, *, vocab_size=1000, types=None, **ids):
    """Return the ends of a file with these tokens, all control tokens by default."""
    values = {"tokens": tokens, "token_type": types or [CONTROL] * len(tokens)} | ids
    fields = Fields({f"tokenizer.ggml.{key}": value for key, value in values.items()}, Path("m.gguf"))
    return end_token_ids(fields, vocab_size)


@pytest.mark.parametrize("text", [*MARKED_TEXTS, *WRITABLE_TEXTS, HTML_TEXT])
def test_a_control_token_with_a_known_text_ends_a_reply(text):
    assert ends(["a", "b", text]) == [2]


def test_qwen_coder_ends_at_the_end_of_a_completion_too():
    tokens = ["a", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_pad|>", "<|file_sep|>"]
    assert ends(tokens, eos_token_id=3, padding_token_id=1) == [3, 1, 5, 6]


def test_ends_that_the_file_names_come_first_and_once():
    tokens = ["<|endoftext|>", "x", "y", "z", "<|im_end|>"]
    assert ends(tokens, eos_token_id=3, eot_token_id=1, eom_token_id=4) == [3, 1, 4, 0]


def test_the_end_of_a_message_is_no_end_where_another_message_may_follow():
    """As in gpt-oss and Solar."""
    assert ends(["<|end|>", "<|return|>", "<|call|>"]) == [1, 2]
    assert ends(["<|end|>", "<|flush|>", "<|calls|>"]) == [1, 2]
    assert ends(["<|end|>", "<|return|>"]) == [0, 1]
    assert ends(["<|end|>", "<|call|>"]) == [0, 1]
    assert ends(["</s>", "<eos>", "<|tool_response>"], eos_token_id=1) == [1, 2]


TYPES = {
    "control": (CONTROL, ["</s>", "<EOT>", "<|im_end|>"]),
    "user defined": (USER_DEFINED, ["<EOT>", "<|im_end|>"]),
    "unknown": (UNKNOWN, ["<EOT>", "<|im_end|>"]),
    "normal": (NORMAL, ["<|im_end|>"]),
    "unused": (UNUSED, []),
    "byte": (BYTE, []),
}


@pytest.mark.parametrize(("kind", "wanted"), TYPES.values(), ids=TYPES.keys())
def test_the_type_of_a_token_decides_whether_its_text_ends_a_reply(kind, wanted):
    tokens = ["</s>", "<EOT>", "<|im_end|>"]
    assert [tokens[index] for index in ends(tokens, types=[kind] * 3)] == wanted


def test_a_token_without_a_row_in_the_model_is_no_end_and_an_id_without_one_is_an_error():
    assert ends(["a", "<|im_end|>", "</s>"], vocab_size=2) == [1]
    with pytest.raises(ModelLoadError, match=r"eot_token_id is 2, wanted null, a token id from 0 to 1"):
        ends(["a", "b", "</s>"], vocab_size=2, eot_token_id=2)


def test_a_file_that_does_not_say_the_types_of_its_tokens_has_ends_by_text():
    fields = Fields({"tokenizer.ggml.tokens": ["a", "<end_of_turn>", "</s>"]}, Path("m.gguf"))
    assert end_token_ids(fields, 10) == [1, 2]


def test_a_file_without_a_vocabulary_has_the_ends_that_it_names():
    fields = Fields({"tokenizer.ggml.eos_token_id": 7}, Path("m.gguf"))
    assert end_token_ids(fields, 10) == [7]
