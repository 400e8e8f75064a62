"""Prompts become token ids, or are refused by name before anything is computed; JAX would clamp ids silently."""

import array
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

import jpaged.text.tokenizing.tokenizer as tokenizer_module
from jpaged import not_available
from jpaged.checks import shown, told
from jpaged.errors import ContextLengthError, InvalidRequestError
from jpaged.limits import DEFAULT_LIMITS, ceiling
from jpaged.sampling.logit_rules_spec import LogitRulesSpec
from jpaged.text.chat.chat_template import render_chat
from jpaged.text.prompts import MAX_SALT_CHARS, PROMPT_KEYS, PromptEncoder, check_priority
from jpaged.text.tokenizing.tokenizer import Tokenizer

from .tokenizing.published_tokenizers import load_family

VOCAB, CONTEXT = 300, 50
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    """Give a byte-level tokenizer: an id for each byte, and one special token."""
    backend = Backend(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(backend, {"bos_token": "<s>"}, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return PromptEncoder(tokenizer, LogitRulesSpec(VOCAB), CONTEXT)


GOOD_IDS = {
    "a list": [1, 2, 299],
    "a tuple": (1, 2, 299),
    "numpy integers in a list": [np.int64(1), np.uint8(2), np.int32(299)],
    "a numpy array": np.array([1, 2, 299]),
    "a numpy array of unsigned": np.array([1, 2, 299], np.uint64),
    "a jax array": jnp.array([1, 2, 299]),
    "jax scalars in a list": [1, jnp.int32(2), jnp.int32(299)],
    "an array of the standard library": array.array("q", [1, 2, 299]),
}


@pytest.mark.parametrize("ids", GOOD_IDS.values(), ids=GOOD_IDS.keys())
def test_ids_are_taken_as_plain_integers(encoder, ids):
    for prompt in (ids, {"prompt_token_ids": ids}):
        encoded = encoder.encode(prompt)
        assert encoded.token_ids == [1, 2, 299]
        assert {type(token_id) for token_id in encoded.token_ids} == {int}
        assert encoded.text is None


BAD_IDS = {
    "negative": ([1, -1], "got token id -1, out of vocabulary, allowed: 0 to 299"),
    "the vocabulary's size": ([300, 1], "token id 300, out of vocabulary"),
    "2³¹": ([2**31], "token id 2147483648, out of vocabulary"),
    "2⁶³": ([1, 2**63], "token id 9223372036854775808, out of vocabulary"),
    "2³³ + 5, which int32 would make 5": ([2**33 + 5], "out of vocabulary"),
    "thousands of digits": ([10**5000], "out of vocabulary"),
    "true": ([1, True], "got true among the token ids, allowed: integers"),
    "a float": ([1, 2.0], "got 2.0 among the token ids"),
    "NaN": ([float("nan")], "got NaN among the token ids"),
    "a string": ([1, "2"], "got a string of 1 character among the token ids"),
    "None": ([None], "got null among the token ids"),
    "nested": ([1, [2, 3]], "got an array of 2 items among the token ids"),
    "nested numpy": (np.array([[1, 2]]), "got an array of 2 items among the token ids"),
    "numpy floats": (np.array([1.0]), "got 1.0 among the token ids"),
    "numpy booleans": (np.array([True]), "got true among the token ids"),
    "numpy out of vocabulary": (np.array([2**40]), "out of vocabulary"),
    "jax floats": (jnp.array([1.0]), "got 1.0 among the token ids"),
    "empty": ([], "cannot be empty"),
    "empty numpy": (np.array([], np.int32), "cannot be empty"),
    "no list": (5, "got 5, allowed: a string, a list of token ids, or a mapping"),
    "a numpy scalar": (np.int64(5), "allowed: a string, a list"),
    "None itself": (None, "got null, allowed: a string"),
    "bytes": (b"abc", "allowed: a string"),
    "a set": ({1, 2}, "allowed: a string"),
    "a generator": ((i for i in (1, 2)), "allowed: a string"),
}


@pytest.mark.parametrize(("ids", "words"), BAD_IDS.values(), ids=BAD_IDS.keys())
def test_what_is_not_a_list_of_ids_of_the_vocabulary_is_refused(encoder, ids, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        encoder.encode(ids)
    assert caught.value.param == "prompt"
    assert len(str(caught.value)) < 400


def test_text_is_encoded_and_kept(encoder):
    for prompt in ("hi ☃", {"prompt": "hi ☃"}):
        encoded = encoder.encode(prompt)
        assert len(encoded.token_ids) == 6
        assert encoded.text == "hi ☃"


def test_messages_become_text_by_the_chat_template(encoder, tokenizer):
    encoded = encoder.encode({"messages": [{"role": "user", "content": "hi"}]})
    assert encoded.text == "<s>hi"
    assert encoded.token_ids == tokenizer.encode("<s>hi")
    assert len(encoded.token_ids) == 3
    own = PromptEncoder(tokenizer, LogitRulesSpec(VOCAB), CONTEXT, chat_template="{{ messages[0].content }}!")
    assert own.encode({"messages": [{"role": "user", "content": "hi"}]}).text == "hi!"


BAD_PROMPTS = {
    "empty text": ("", "prompt", "cannot be empty"),
    "empty text in a mapping": ({"prompt": ""}, "prompt", "cannot be empty"),
    "empty mapping": ({}, "prompt", "got no key, allowed: exactly one of prompt"),
    "two forms": ({"prompt": "a", "prompt_token_ids": [1]}, "prompt", "got prompt and prompt_token_ids"),
    "ids as prompt": ({"prompt": [1, 2]}, "prompt", "got an array of 2 items, allowed: a string"),
    "text as ids": ({"prompt_token_ids": "ab"}, "prompt_token_ids", "got a string of 2 characters, allowed: a list of"),
    "None as prompt": ({"prompt": None}, "prompt", "got null, allowed: a string"),
    "a misspelt key": ({"promt": "a"}, "promt", r"^promt: unknown key of a prompt; did you mean prompt\?"),
    "a foreign key": (
        {"prompt": "a", "zzz": 1},
        "zzz",
        "^zzz: unknown key of a prompt; allowed: prompt, prompt_token_ids, messages, cache_salt, priority",
    ),
    "a key that is no string": ({5: "a"}, "5", "^5: unknown key"),
    "a message without a role": ({"messages": [{"content": "a"}]}, "messages", "role is null, allowed are system"),
    "a lone surrogate": ("a\ud800", "prompt", "valid Unicode"),
}


@pytest.mark.parametrize(("prompt", "param", "words"), BAD_PROMPTS.values(), ids=BAD_PROMPTS.keys())
def test_a_wrong_prompt_is_refused_by_its_field(encoder, prompt, param, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        encoder.encode(prompt)
    assert caught.value.param == param
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "prompt",
    [{"prompt": "a"}, {"prompt_token_ids": [1]}, {"messages": [{"role": "user", "content": "a"}]}],
    ids=PROMPT_KEYS,
)
def test_every_form_of_prompt_may_have_a_salt_and_a_priority(encoder, prompt):
    bare = encoder.encode(prompt)
    assert (bare.cache_salt, bare.priority) == (None, 0)
    encoded = encoder.encode({**prompt, "cache_salt": "tenant 5 ☃", "priority": np.int64(-3)})
    assert (encoded.cache_salt, encoded.priority) == ("tenant 5 ☃", -3)
    assert type(encoded.priority) is int
    assert (encoded.token_ids, encoded.text) == (bare.token_ids, bare.text)


@pytest.mark.parametrize(
    "salt",
    ["", "a" * (MAX_SALT_CHARS + 1), "a" * 10**6, "a\nb", "\0", "\ud800", "\x7f", b"a", 5, None, True, ["a"]],
    ids=shown,
)
def test_a_salt_that_is_not_a_short_printable_string_is_refused(encoder, salt):
    with pytest.raises(InvalidRequestError) as caught:
        encoder.encode({"prompt": "a", "cache_salt": salt})
    assert caught.value.param == "cache_salt"
    assert str(caught.value).startswith(f"cache_salt: got {told(salt)}, allowed: a string of 1 to 256 printable")
    assert "leave it out" in str(caught.value)


def test_salts_at_their_limits_are_taken(encoder):
    for salt in ("a", " ", "a" * MAX_SALT_CHARS):
        assert encoder.encode({"prompt": "a", "cache_salt": salt}).cache_salt == salt


@pytest.mark.parametrize("priority", [2**63, -(2**63) - 1, "3", 3.0, None], ids=shown)
def test_a_priority_that_is_not_64_bits_is_refused_under_every_policy(encoder, priority):
    words = f"priority: got {told(priority)}, allowed: an integer in [-9223372036854775808, 9223372036854775807]"
    for check in (
        lambda: encoder.encode({"prompt": "a", "priority": priority}),
        lambda: check_priority(priority, "fcfs"),
        lambda: check_priority(priority, "priority"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            check()
        assert caught.value.param == "priority"
        assert str(caught.value) == words


def test_a_priority_that_would_be_ignored_is_refused():
    for priority in (-(2**63), -1, 0, np.int8(3), 2**63 - 1):
        assert check_priority(priority, "priority") == priority
        assert type(check_priority(priority, "priority")) is int
        assert check_priority(priority, lambda request: request.priority) == priority
    assert check_priority(0, "fcfs") == 0
    with pytest.raises(InvalidRequestError) as caught:
        check_priority(3, "fcfs")
    assert str(caught.value) == (
        "priority: got 3 under scheduling_policy fcfs, allowed: 0; start the engine with scheduling_policy=priority"
    )
    assert caught.value.param == "priority"


def test_a_prompt_that_could_never_be_queued_is_refused(tokenizer):
    encoder = PromptEncoder(tokenizer, LogitRulesSpec(VOCAB), CONTEXT, limits={**DEFAULT_LIMITS, "waiting_tokens": 5})
    for prompt in ("a" * 5, [1] * 5):
        assert len(encoder.encode(prompt).token_ids) == 5
    for prompt in ("a" * 6, [1] * 6):
        with pytest.raises(InvalidRequestError) as caught:
            encoder.encode(prompt)
        assert str(caught.value) == (
            "prompt: got 6 tokens, allowed: at most waiting_tokens among the limits, 5; "
            "shorten the prompt or raise the limit"
        )
        assert caught.value.param == "prompt"


@pytest.mark.parametrize("key", not_available.PROMPT_KEYS)
def test_a_key_that_is_not_available_is_refused_by_name(encoder, key):
    with pytest.raises(InvalidRequestError, match=f"^{key}: not available in this version") as caught:
        encoder.encode({"prompt": "a", key: 1})
    assert caught.value.param == key


def test_the_longest_prompt_leaves_room_for_one_token(encoder):
    assert len(encoder.encode([1] * (CONTEXT - 1)).token_ids) == CONTEXT - 1
    assert len(encoder.encode("a" * (CONTEXT - 1)).token_ids) == CONTEXT - 1
    for prompt in ([1] * CONTEXT, "a" * CONTEXT, np.ones(CONTEXT, int)):
        with pytest.raises(ContextLengthError) as caught:
            encoder.encode(prompt)
        assert str(caught.value) == (
            "This model's maximum context length is 50 tokens, but your prompt has 50 tokens, and an answer needs at "
            "least one; the prompt is too long, shorten it or raise max_model_len"
        )
        assert caught.value.param == "prompt"
        assert len(encoder.encode(prompt, has_answer=False).token_ids) == CONTEXT  # It is only scored.


@pytest.mark.parametrize("has_answer", [True, False])
@pytest.mark.parametrize("num_tokens", [CONTEXT + 1, CONTEXT * ceiling("chars_per_token") + 1])
def test_a_prompt_beyond_the_context_is_of_one_kind_in_every_form(encoder, has_answer, num_tokens):
    chat = [{"role": "user", "content": "a" * num_tokens}]
    for key, value in (("prompt", "a" * num_tokens), ("prompt_token_ids", [1] * num_tokens), ("messages", chat)):
        with pytest.raises(ContextLengthError, match=f"^This model's maximum context length is {CONTEXT} tokens, but "
                           "your prompt has ") as caught:  # fmt: skip
            encoder.encode({key: value}, has_answer=has_answer)
        assert caught.value.param == ("messages" if key == "messages" else "prompt")
        assert caught.value.code == "context_length_exceeded"


def lines_run(run):
    """Return the code object of each line of Python that `run` executes, calls and returns too."""
    codes = []

    def trace(frame, event, arg):
        codes.append(frame.f_code)
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return codes


def test_too_long_a_text_is_refused_before_it_is_tokenized(encoder):
    """The limit itself goes to the tokenizer, which counts; one character more is refused by its length."""
    limit = CONTEXT * ceiling("chars_per_token")
    with pytest.raises(InvalidRequestError, match=f"has {limit} tokens"):
        encoder.encode("a" * limit)
    with pytest.raises(InvalidRequestError, match=f"has {limit + 1} characters, and at most {limit} are tokenized"):
        encoder.encode("a" * (limit + 1))
    with pytest.raises(InvalidRequestError, match="characters"):
        encoder.encode({"messages": [{"role": "user", "content": "a" * limit}]})

    def refuse() -> None:
        with pytest.raises(InvalidRequestError, match="characters"):
            encoder.encode("a" * (limit + 1))

    assert Tokenizer.encoding.__code__ in lines_run(lambda: encoder.encode("a"))
    assert Tokenizer.encoding.__code__ not in lines_run(refuse)


@pytest.mark.parametrize("family", ["llama2", "qwen"])
def test_a_text_far_too_long_is_refused_by_its_first_parts(monkeypatch, family):
    tokenizer = load_family(family)
    monkeypatch.setattr(tokenizer_module, "PART_CHARS", 2000)
    text = "The quick brown fox — «быстрая» 敏捷的狐狸 1,234 times.\n" * 500
    num_tokens = len(tokenizer.encode(text))
    encoder = PromptEncoder(tokenizer, LogitRulesSpec(tokenizer.vocab_size), 4000)
    with pytest.raises(ContextLengthError, match=r"is 4000 tokens, but your prompt has at least \d+") as refused:
        encoder.encode(text)
    assert 4000 < int(re.search(r"least (\d+)", str(refused.value))[1]) < 6000 < num_tokens
    with pytest.raises(ContextLengthError, match=f"has {num_tokens} tokens"):  # Nearly fits: counted to its end.
        PromptEncoder(tokenizer, LogitRulesSpec(tokenizer.vocab_size), num_tokens).encode(text)
    encoder = PromptEncoder(tokenizer, LogitRulesSpec(tokenizer.vocab_size), num_tokens + 1)
    assert encoder.encode(text).token_ids == tokenizer.encode(text)


@pytest.mark.parametrize("make", [list, tuple, np.array], ids=["list", "tuple", "array"])
def test_a_long_list_of_ids_is_not_walked_in_python(tokenizer, make):
    """100,000 ids take 4 ms as a whole; one by one they took 30, as long as a step. Lines run are counted, not time."""
    encoder = PromptEncoder(tokenizer, LogitRulesSpec(VOCAB), 1 << 20)

    def count(prompt):
        return len(lines_run(lambda: encoder.encode(prompt)))

    count(make([0]))  # The first of a type is looked up among the abstract classes, by Python.
    ids = make([299, 0, 17, 5] * 25_000)
    # Within a few lines: the garbage collector may call Python, such as JAX's callbacks, at any allocation.
    assert count(ids) < count(make([299])) + 100
    assert encoder.encode(ids).token_ids == list(ids)
    with pytest.raises(InvalidRequestError, match="token id 300"):
        encoder.encode(make([299] * 70_000 + [300] + [0] * 30_000))


def test_the_callers_list_is_not_kept(encoder):
    ids = [1, 2, 3]
    encoded = encoder.encode(ids)
    ids[0] = 299
    assert encoded.token_ids == [1, 2, 3]


def test_text_with_ids_outside_the_models_vocabulary_is_refused(tokenizer):
    """The tokenizer may know more than the output head has rows."""
    with pytest.raises(InvalidRequestError, match=r"token id .*, out of vocabulary, allowed: 0 to 19"):
        PromptEncoder(tokenizer, LogitRulesSpec(20), CONTEXT).encode("zz")


def test_a_rendered_chat_as_text_gets_a_second_bos_and_one_warning(caplog):
    """As in vLLM, whose result is kept."""
    deepseek = load_family("deepseek")
    text = render_chat(deepseek, [{"role": "user", "content": "Hi"}])
    encoder = PromptEncoder(deepseek, LogitRulesSpec(129280), CONTEXT)
    with caplog.at_level("WARNING", "jpaged"):
        encoder.encode({"messages": [{"role": "user", "content": "Hi"}]})
        encoder.encode("Hi")
        encoder.encode([0, 0, 5])
        assert not caplog.records
        assert encoder.encode(text).token_ids[:3] == [0, 0, 128803]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(encoder.encode, [text] * 32))
    (record,) = caplog.records
    assert "begins with <｜begin▁of▁sentence｜>" in record.getMessage()
    assert "{'messages': …} or as token ids" in record.getMessage()
