"""What is no prompt is refused before anything is computed, in words that name it; JAX would clamp it silently."""

import array
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jpaged.errors import InvalidRequestError
from jpaged.prompts import MAX_CHARS_PER_TOKEN, MAX_SALT_CHARS, NOT_BUILT, PROMPT_KEYS, PromptEncoder, check_priority
from jpaged.rule_book import RuleBook
from jpaged.sampling_params import SamplingParams, shown
from jpaged.tokenizer import Tokenizer

VOCAB, CONTEXT = 300, 50
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    """Byte level: an id for each byte, and one special token."""
    backend = Backend(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(backend, {"bos_token": "<s>"}, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return PromptEncoder(tokenizer, RuleBook(VOCAB), CONTEXT)


GOOD_IDS = {
    "a list": [1, 2, 299],
    "a tuple": (1, 2, 299),
    "numpy integers in a list": [np.int64(1), np.uint8(2), np.int32(299)],
    "a numpy array": np.array([1, 2, 299]),
    "a numpy array of unsigned": np.array([1, 2, 299], np.uint64),
    "a jax array": jnp.array([1, 2, 299]),
    "an array of the standard library": array.array("q", [1, 2, 299]),
}


@pytest.mark.parametrize("ids", GOOD_IDS.values(), ids=GOOD_IDS.keys())
def test_ids_are_taken_as_plain_integers(encoder, ids):
    for prompt in (ids, {"prompt_token_ids": ids}):
        encoded = encoder.encode(prompt)
        assert encoded.token_ids == [1, 2, 299]
        assert {type(token_id) for token_id in encoded.token_ids} == {int}
        assert encoded.text is None


NO_IDS = {
    "negative": ([1, -1], "token id -1 is out of vocabulary, allowed: 0 to 299"),
    "the vocabulary's size": ([300, 1], "token id 300 is out of vocabulary"),
    "2³¹": ([2**31], "token id 2147483648 is out of vocabulary"),
    "2⁶³": ([1, 2**63], "token id 9223372036854775808 is out of vocabulary"),
    "2³³ + 5, which int32 would make 5": ([2**33 + 5], "out of vocabulary"),
    "thousands of digits": ([10**5000], "out of vocabulary"),
    "true": ([1, True], "got True among the token ids, allowed: integers"),
    "a float": ([1, 2.0], "got 2.0 among the token ids"),
    "NaN": ([float("nan")], "got nan among the token ids"),
    "a string": ([1, "2"], "got '2' among the token ids"),
    "None": ([None], "got None among the token ids"),
    "nested": ([1, [2, 3]], r"got \[2, 3\] among the token ids"),
    "nested numpy": (np.array([[1, 2]]), r"got \[1, 2\] among the token ids"),
    "numpy floats": (np.array([1.0]), "got 1.0 among the token ids"),
    "numpy booleans": (np.array([True]), "got True among the token ids"),
    "numpy out of vocabulary": (np.array([2**40]), "out of vocabulary"),
    "jax floats": (jnp.array([1.0]), "got 1.0 among the token ids"),
    "empty": ([], "cannot be empty"),
    "empty numpy": (np.array([], np.int32), "cannot be empty"),
    "no list": (5, "got 5, allowed: a string, a list of token ids, or a mapping"),
    "a numpy scalar": (np.int64(5), "allowed: a string, a list"),
    "None itself": (None, "got None, allowed: a string"),
    "bytes": (b"abc", "allowed: a string"),
    "a set": ({1, 2}, "allowed: a string"),
    "a generator": ((i for i in (1, 2)), "allowed: a string"),
}


@pytest.mark.parametrize(("ids", "words"), NO_IDS.values(), ids=NO_IDS.keys())
def test_what_is_no_list_of_ids_is_refused(encoder, ids, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        encoder.encode(ids)
    assert caught.value.param == "prompt"
    assert len(str(caught.value)) < 400


def test_text_is_encoded_and_kept(encoder):
    for prompt in ("hi ☃", {"prompt": "hi ☃"}):
        encoded = encoder.encode(prompt)
        assert len(encoded.token_ids) == 6
        assert encoded.text == "hi ☃"


def test_a_chat_is_written_out_by_the_template(encoder, tokenizer):
    encoded = encoder.encode({"messages": [{"role": "user", "content": "hi"}]})
    assert encoded.text == "<s>hi"
    assert encoded.token_ids == tokenizer.encode("<s>hi")
    assert len(encoded.token_ids) == 3
    own = PromptEncoder(tokenizer, RuleBook(VOCAB), CONTEXT, chat_template="{{ messages[0].content }}!")
    assert own.encode({"messages": [{"role": "user", "content": "hi"}]}).text == "hi!"


NO_PROMPTS = {
    "empty text": ("", "prompt", "cannot be empty"),
    "empty text in a mapping": ({"prompt": ""}, "prompt", "cannot be empty"),
    "empty mapping": ({}, "prompt", "got no key, allowed: exactly one of prompt"),
    "two forms": ({"prompt": "a", "prompt_token_ids": [1]}, "prompt", "got prompt and prompt_token_ids"),
    "ids as prompt": ({"prompt": [1, 2]}, "prompt", r"got \[1, 2\], allowed: a string"),
    "text as ids": ({"prompt_token_ids": "ab"}, "prompt_token_ids", "got 'ab', allowed: a list of token ids"),
    "None as prompt": ({"prompt": None}, "prompt", "got None, allowed: a string"),
    "a typing error in what stands beside": (
        {"prompt": "a", "cache_slat": "x"},
        "cache_slat",
        r"^cache_slat: unknown key of a prompt; did you mean cache_salt\?",
    ),
    "a typing error": ({"promt": "a"}, "promt", r"^promt: unknown key of a prompt; did you mean prompt\?"),
    "a foreign key": ({"prompt": "a", "zzz": 1}, "zzz", "^zzz: unknown key of a prompt; a prompt holds one of"),
    "a key that is no string": ({5: "a"}, "5", "^5: unknown key"),
    "a huge key": ({"z" * 10**6: 1}, "z" * 100, "unknown key"),
    "no messages": ({"messages": []}, "messages", "at least one message"),
    "a message without a role": ({"messages": [{"content": "a"}]}, "messages", "role is None, allowed are system"),
    "messages that are no list": ({"messages": 5}, "messages", "must be a list"),
    "a lone surrogate": ("a\ud800", "prompt", "valid Unicode"),
}


@pytest.mark.parametrize(("prompt", "param", "words"), NO_PROMPTS.values(), ids=NO_PROMPTS.keys())
def test_what_is_no_prompt_is_refused(encoder, prompt, param, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        encoder.encode(prompt)
    assert caught.value.param == param
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "prompt",
    [{"prompt": "a"}, {"prompt_token_ids": [1]}, {"messages": [{"role": "user", "content": "a"}]}],
    ids=PROMPT_KEYS,
)
def test_a_salt_and_a_priority_stand_beside_every_form_of_prompt(encoder, prompt):
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
def test_a_salt_that_is_none_is_refused(encoder, salt):
    with pytest.raises(InvalidRequestError) as caught:
        encoder.encode({"prompt": "a", "cache_salt": salt})
    assert caught.value.param == "cache_salt"
    assert str(caught.value).startswith(f"cache_salt: got {shown(salt)}, allowed: a string of 1 to 256 printable")
    assert "leave it out" in str(caught.value)


def test_salts_at_their_limits_are_taken(encoder):
    for salt in ("a", " ", "a" * MAX_SALT_CHARS):
        assert encoder.encode({"prompt": "a", "cache_salt": salt}).cache_salt == salt


@pytest.mark.parametrize(
    "priority", [2**63, -(2**63) - 1, 10**5000, "3", 3.0, True, None, float("nan"), [3]], ids=shown
)
def test_a_priority_that_is_none_is_refused_under_every_policy(encoder, priority):
    words = f"priority: got {shown(priority)}, allowed: an integer in [-9223372036854775808, 9223372036854775807]"
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
    encoder = PromptEncoder(tokenizer, RuleBook(VOCAB), CONTEXT, max_waiting_tokens=5)
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


@pytest.mark.parametrize("key", NOT_BUILT)
def test_a_key_that_is_not_built_is_refused_by_name(encoder, key):
    with pytest.raises(InvalidRequestError, match=f"^{key}: not available in this version") as caught:
        encoder.encode({"prompt": "a", key: 1})
    assert caught.value.param == key
    assert key not in PROMPT_KEYS


def test_the_longest_prompt_leaves_room_for_one_token(encoder):
    assert len(encoder.encode([1] * (CONTEXT - 1)).token_ids) == CONTEXT - 1
    assert len(encoder.encode("a" * (CONTEXT - 1)).token_ids) == CONTEXT - 1
    for prompt in ([1] * CONTEXT, "a" * CONTEXT, np.ones(CONTEXT, int)):
        with pytest.raises(
            InvalidRequestError, match="maximum context length is 50 tokens, your prompt has 50"
        ) as caught:
            encoder.encode(prompt)
        assert caught.value.param == "prompt"


def lines_run(run):
    """The code of each line of Python that runs, calls and returns too."""
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
    limit = CONTEXT * MAX_CHARS_PER_TOKEN
    with pytest.raises(InvalidRequestError, match=f"your prompt has {limit}"):
        encoder.encode("a" * limit)
    with pytest.raises(InvalidRequestError, match=f"got {limit + 1} characters.*at most {limit} characters"):
        encoder.encode("a" * (limit + 1))
    with pytest.raises(InvalidRequestError, match="characters"):
        encoder.encode({"messages": [{"role": "user", "content": "a" * limit}]})

    def refuse() -> None:
        with pytest.raises(InvalidRequestError, match="characters"):
            encoder.encode("a" * (limit + 1))

    assert Tokenizer.encode.__code__ in lines_run(lambda: encoder.encode("a"))
    assert Tokenizer.encode.__code__ not in lines_run(refuse)


@pytest.mark.parametrize("make", [list, tuple, np.array], ids=["list", "tuple", "array"])
def test_a_long_list_of_ids_is_not_walked_in_python(tokenizer, make):
    """100,000 ids take 4 ms as a whole; one by one they took 30, as long as a step. Lines run are counted, not time."""
    encoder = PromptEncoder(tokenizer, RuleBook(VOCAB), 1 << 20)

    def count(prompt):
        return len(lines_run(lambda: encoder.encode(prompt)))

    count(make([0]))  # The first of a type is looked up among the abstract classes, by Python.
    ids = make([299, 0, 17, 5] * 25_000)
    assert count(ids) == count(make([299]))
    assert encoder.encode(ids).token_ids == list(ids)
    with pytest.raises(InvalidRequestError, match="token id 300"):
        encoder.encode(make([299] * 70_000 + [300] + [0] * 30_000))


def test_the_callers_list_is_not_kept(encoder):
    ids = [1, 2, 3]
    encoded = encoder.encode(ids)
    ids[0] = 299
    assert encoded.token_ids == [1, 2, 3]


def test_text_whose_ids_the_model_lacks_is_refused(tokenizer):
    """The tokenizer may know more than the output head has rows."""
    with pytest.raises(InvalidRequestError, match=r"token id .* is out of vocabulary, allowed: 0 to 19"):
        PromptEncoder(tokenizer, RuleBook(20), CONTEXT).encode("zz")


def test_parameters_are_held_against_the_model(encoder):
    def check(params, max_logprobs=20):
        encoder.check_params(params, max_logprobs=max_logprobs, max_num_seqs=4)

    check(SamplingParams(stop_token_ids=[0, 299], logprobs=20))
    with pytest.raises(InvalidRequestError, match="stop_token_ids: token id 300 is out of vocabulary") as caught:
        check(SamplingParams(stop_token_ids=[5, 300]))
    assert caught.value.param == "stop_token_ids"
    with pytest.raises(InvalidRequestError, match="at most max_logprobs, 20; ask for fewer, or start") as caught:
        check(SamplingParams(logprobs=21))
    assert caught.value.param == "logprobs"
    check(SamplingParams(logprobs=300), 1000)
    with pytest.raises(InvalidRequestError, match="got 301, allowed: at most the size of the vocabulary, 300"):
        check(SamplingParams(logprobs=301), 1000)
    check(SamplingParams(logprobs=-1, prompt_logprobs=-1), -1)
    check(SamplingParams(logprobs=300), -1)
    with pytest.raises(InvalidRequestError, match="prompt_logprobs: got 301, allowed: at most the size of the"):
        check(SamplingParams(prompt_logprobs=301), -1)
    with pytest.raises(InvalidRequestError, match="logprobs: got -1, allowed: at most max_logprobs, 20; start the eng"):
        check(SamplingParams(logprobs=-1))


def test_where_nothing_may_end_yet_some_token_must_be_allowed(tokenizer):
    encoder = PromptEncoder(tokenizer, RuleBook(300), CONTEXT, eos_token_ids=frozenset({2}))

    def check(**params):
        encoder.check_params(SamplingParams(**params), max_logprobs=20, max_num_seqs=4)

    check(allowed_token_ids=[2, 7])
    check(allowed_token_ids=[2, 8], stop_token_ids=[7], min_tokens=1)
    for ignore_eos in (False, True):  # min_tokens holds EOS back also where it would end nothing.
        with pytest.raises(InvalidRequestError, match=r"got \[2, 7\], which end .* min_tokens is 1") as caught:
            check(allowed_token_ids=[2, 7], stop_token_ids=[7], min_tokens=1, ignore_eos=ignore_eos)
        assert caught.value.param == "allowed_token_ids"


def test_all_samples_of_a_prompt_must_fit_into_one_step(encoder):
    for n, most in ((4, 4), (128, None), (1, 1)):
        encoder.check_params(SamplingParams(n=n), max_logprobs=20, max_num_seqs=most)
    with pytest.raises(
        InvalidRequestError, match=r"n: got 5, allowed: at most max_num_seqs, 4, .*; lower n or"
    ) as caught:
        encoder.check_params(SamplingParams(n=5), max_logprobs=20, max_num_seqs=4)
    assert caught.value.param == "n"


def test_values_in_messages_are_short_and_on_one_line():
    for value in ("x" * 10**6, list(range(10**5)), np.zeros((50, 50)), 10**5000, [10**5000], "a\nb", {1: "y" * 999}):
        assert len(shown(value)) < 250
        assert "\n" not in shown(value)
