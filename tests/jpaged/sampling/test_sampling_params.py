"""Every field of SamplingParams: what is refused, in which words, and what is taken as what."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checks import INT64, shown, told
from jpaged.errors import InvalidRequestError
from jpaged.sampling.parameter import MAX_BAD_WORDS, MAX_BIASES, MAX_STOP_CHARS, MAX_STOPS
from jpaged.sampling.sampling_params import FIELDS, MAX_MIN_TOKENS, MAX_SAMPLES, RequestOutputKind, SamplingParams

HUGE = 10**5000
BIASES = "an object of token ids ≥ 0 to numbers in [-100, 100]"
# What is allowed in words, values that are taken, values that are refused. What is no number at all is test_checks'.
TABLE = {
    "n": ("an integer in [1, 128]", [1, 2, MAX_SAMPLES, np.int64(4)], [0, MAX_SAMPLES + 1, None]),
    "presence_penalty": ("a number in [-2, 2]", [-2, 2.0], [-2.0000001, 2.0000001, None]),
    "frequency_penalty": ("a number in [-2, 2]", [-2, 2.0], [-2.0000001, 2.0000001, None]),
    "repetition_penalty": ("a number in [1e-06, 1e+06]", [1e-6, 1, 1e6], [0, 1e-7, 1e7, None]),
    "temperature": ("a number in [0, 2]", [0, 1e-300, 2], [-1e-9, 2.0000001, None]),
    "top_p": ("a number in [0, 1]", [0, 1e-300, 1], [-1e-9, 1.0000001, None]),
    "top_k": ("an integer ≥ -1", [-1, 0, 2**31, HUGE], [-2, 1.5, None]),
    "min_p": ("a number in [0, 1]", [0, 1], [-1e-9, 1.0000001, None]),
    "seed": (f"an integer in [{INT64[0]}, {INT64[1]}]", [None, 0, *INT64], [INT64[1] + 1, INT64[0] - 1, "5"]),
    "max_tokens": ("an integer ≥ 1", [None, 16, 10**12], [0, -1, "5"]),
    "min_tokens": (f"an integer in [0, {MAX_MIN_TOKENS}]", [0, 16, np.int64(3)], [-1, MAX_MIN_TOKENS + 1, None]),
    "logprobs": ("an integer ≥ -1", [None, -1, 0, 20], [-2, 1.5]),
    "prompt_logprobs": ("an integer ≥ -1", [None, -1, 0, 5], [-2, 1.5]),
    "stop": (
        "string", [], [
            "", [""], ["a", ""], ["a", 5], 0, False, {}, b"a", {"a"}, [None], np.array(["a"]), "\ud800",
            ["a", "b\udfff"], ["a"] * (MAX_STOPS + 1), "x" * (MAX_STOP_CHARS + 1), "x" * 10**6,
        ],
    ),
    "stop_token_ids": (
        "a list of token ids ≥ 0", [], [
            0, False, "5", {}, [-1], [1, True], [1.0], ["1"], [None], [[1]], np.array([[1]]), jnp.array([1.0]),
            jnp.array(1), {1}, [HUGE, -1],
        ],
    ),
    "ignore_eos": ("true or false", [True], [1]),
    "thinking_token_budget": ("an integer ≥ 0", [None, 0, 1, 10**6], [-1, 1.5, "5"]),
    "detokenize": ("true or false", [False], [0]),
    "log_kept_mass": ("true or false", [False], [0]),
    "skip_special_tokens": ("true or false", [False], ["yes"]),
    "spaces_between_special_tokens": ("true or false", [False], [None]),
    "include_stop_str_in_output": ("true or false", [True], [""]),
    "output_kind": ("one of cumulative, delta, final_only", [], ["deltas", 1, None, True, []]),
    "logit_bias": (
        BIASES, [], [
            5, "x", [], [(1, 2.0)], {"abc": 1.0}, {-1: 1.0}, {"-1": 1.0}, {1.5: 1.0}, {True: 1.0}, {None: 1.0},
            {"": 1.0}, {"٣": 1.0}, {HUGE: 1.0}, {1: float("nan")}, {1: float("inf")}, {1: 100.001}, {1: "2"},
            {1: None}, {1: True},
        ],
    ),
    "allowed_token_ids": ("token id", [], [[], (), 5, "5", [-1], [1.0], [True], [None], np.array([1.0])]),
    "bad_words": (
        "", [], ["word", [""], ["a", " "], [5], 5, {"a"}, [b"a"], ["a"] * (MAX_BAD_WORDS + 1)],
    ),
    "extra_args": (
        "a mapping of arguments of the engine's logits_processors to finite numbers", [], [
            5, "x", [], {1: 2.0}, {"a": "2"}, {"a": None}, {"a": True}, {"a": float("nan")}, {"a": 1e39},
        ],
    ),
}  # fmt: skip
MORE_BIASES = {
    "at most 1024 token ids": [dict.fromkeys(range(MAX_BIASES + 1), 0.0), dict.fromkeys(range(10**5), 1.0)],
    "each token id once; it has 5 twice": [{5: 1.0, "5": 2.0}],
}
REFUSED = [(name, words, value) for name, (words, _, values) in TABLE.items() for value in values] + [
    ("logit_bias", words, value) for words, values in MORE_BIASES.items() for value in values
]


@pytest.mark.parametrize(("name", "words", "value"), REFUSED, ids=shown)
def test_a_wrong_value_is_refused_by_field_value_and_range(name, words, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert caught.value.param == name
    assert message.startswith(f"{name}: got {told(value)}, allowed: ")
    assert words in message
    assert len(message) < 400
    assert "\n" not in message


def test_values_at_their_limits_are_taken_as_plain_python_values():
    assert {*TABLE, "structured_outputs"} == set(FIELDS)  # Its values: tests/jpaged/text/grammar/test_grammar.py.
    for name, (_, values, _) in TABLE.items():
        for value in values:
            kept = getattr(SamplingParams(**{name: value}), name)
            assert kept == value, (name, value)
            assert type(kept) in (int, float, bool, type(None))


CONTRADICTIONS = {
    "more than max_tokens": ({"min_tokens": 17}, "min_tokens: got 17, allowed: at most max_tokens, 16; lower it or"),
    "stops without text": (
        {"stop": "a", "detokenize": False},
        "stop: got an array of 1 item, allowed: none while detokenize is",
    ),
}


@pytest.mark.parametrize(("values", "words"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_fields_that_contradict_each_other_are_refused(values, words):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**values)
    assert str(caught.value).startswith(words)
    assert caught.value.param == words.split(":")[0]


def test_a_seed_of_minus_one_is_none():
    """Scripts for vLLM use −1 so; every other seed is kept."""
    assert SamplingParams(seed=-1).seed is SamplingParams(seed=np.int64(-1)).seed is None
    assert SamplingParams(seed=-2).seed == -2


def test_greedy_is_below_1e_5():
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=np.nextafter(1e-5, 0)).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy
    assert SamplingParams(n=2, temperature=0).n == 2


PLAIN_VALUES = [
    ("logit_bias", None, None), ("logit_bias", {}, {}), ("logit_bias", {"5": 1, np.int64(6): 0.5}, {5: 1.0, 6: 0.5}),
    ("allowed_token_ids", None, None), ("allowed_token_ids", [3, np.int64(4)], (3, 4)),
    ("bad_words", None, ()), ("bad_words", ["a", "b"], ("a", "b")), ("extra_args", {"a": 2}, {"a": 2.0}),
    ("output_kind", "delta", RequestOutputKind.DELTA), ("stop", None, ()), ("stop", [], ()), ("stop", "end", ("end",)),
    ("stop", ["a"] * MAX_STOPS, ("a",) * MAX_STOPS), ("stop", "x" * MAX_STOP_CHARS, ("x" * MAX_STOP_CHARS,)),
    ("stop_token_ids", None, ()), ("stop_token_ids", [0, np.int64(5)], (0, 5)),
    ("stop_token_ids", (jnp.int32(0), np.array(5)), (0, 5)), ("stop_token_ids", jnp.array([0, 5]), (0, 5)),
    ("allowed_token_ids", [jnp.int32(3), 4], (3, 4)), ("allowed_token_ids", np.array([3, 4]), (3, 4)),
    ("logit_bias", {np.int32(5): jnp.float32(1), 6: jnp.bfloat16(0.5), 7: np.float32(2)}, {5: 1.0, 6: 0.5, 7: 2.0}),
    ("extra_args", {"a": jnp.float32(2)}, {"a": 2.0}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "kept"), PLAIN_VALUES, ids=shown)
def test_lists_and_mappings_are_kept_as_copies_of_plain_values(name, given, kept):
    got = getattr(SamplingParams(**{name: given}), name)
    assert got == kept
    assert got is not given or given is None
    assert all(type(one) in (int, str) for one in (() if not isinstance(got, tuple | dict) else got))


def test_which_parameters_are_rules():
    """A request with rules runs steps of their own kind, so none may count as having some by mistake."""
    rules = {
        "presence_penalty": 0.1, "frequency_penalty": -0.1, "repetition_penalty": 1.1, "min_tokens": 1,
        "logit_bias": dict.fromkeys(range(MAX_BIASES), 1.0), "allowed_token_ids": [1],
        "bad_words": ["a"] * MAX_BAD_WORDS, "extra_args": {"a": 1.0},
    }  # fmt: skip
    for name, value in rules.items():
        assert SamplingParams(**{name: value}).has_rules, name
    without = {"temperature": 0.3, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 4, "stop": ["a"], "logprobs": 2}
    assert not SamplingParams(**without, logit_bias={}, bad_words=[], extra_args={}).has_rules


def test_the_interface_is_what_is_there_and_what_is_refused_by_name():
    """Every parameter of vLLM's that a script may carry is one or the other."""
    assert {*FIELDS} == {
        "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
        "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
        "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
        "output_kind", "structured_outputs", "logit_bias", "allowed_token_ids", "bad_words", "extra_args",
        "log_kept_mass", "thinking_token_budget",
    }  # fmt: skip
    with pytest.raises(InvalidRequestError, match=r"^temprature: unknown parameter; did you mean temperature\?"):
        SamplingParams(temprature=1)


def test_equal_parameters_are_equal_and_hash_alike():
    one = SamplingParams(temperature=1, stop=["a", "b"], stop_token_ids=[3], seed=np.int64(4))
    other = SamplingParams(temperature=1.0, stop=("a", "b"), stop_token_ids=(3,), seed=4)
    assert one == other
    assert hash(one) == hash(other)
    assert one != SamplingParams(temperature=1, stop=["a"], stop_token_ids=[3], seed=4)
