"""Every rule of every field: what is refused, in which words, and what is taken as what."""

import copy
import dataclasses

import numpy as np
import pytest

from jpaged.errors import InvalidRequestError
from jpaged.sampling_params import (
    FIELDS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_SAMPLES,
    MAX_STOP_CHARS,
    MAX_STOPS,
    NOT_BUILT,
    RequestOutputKind,
    SamplingParams,
    check_name,
    shown,
)

HUGE = 10**5000
NOT_NUMBERS = ["0.5", None, True, [0.5], {}, 1j, float("nan"), float("inf"), -float("inf"), HUGE, np.float64("nan")]
NOT_INTEGERS = ["5", 5.0, 1e30, True, [5], {}, float("nan"), -HUGE, np.float32(5), np.bool_(True)]
ALLOWED_IN_WORDS = {
    "n": "an integer in [1, 128]",
    "presence_penalty": "a number in [-2, 2]",
    "frequency_penalty": "a number in [-2, 2]",
    "repetition_penalty": "a number in [1e-06, 1e+06]",
    "temperature": "a number in [0, 2]",
    "top_p": "a number in (0, 1]",
    "top_k": "an integer ≥ -1",
    "min_p": "a number in [0, 1]",
    "seed": "an integer in [-9223372036854775808, 9223372036854775807]",
    "max_tokens": "an integer ≥ 1",
    "min_tokens": "an integer in [0, 16]",
    "logprobs": "an integer ≥ -1",
    "prompt_logprobs": "an integer ≥ -1",
    "stop": "string",
    "stop_token_ids": "a list of token ids ≥ 0",
    "ignore_eos": "true or false",
    "detokenize": "true or false",
    "skip_special_tokens": "true or false",
    "spaces_between_special_tokens": "true or false",
    "include_stop_str_in_output": "true or false",
    "output_kind": "one of cumulative, delta, final_only",
    "logit_bias": "a",
    "allowed_token_ids": "token id",
    "bad_words": "",
    "extra_args": "a mapping of arguments of the engine's logits_processors to finite numbers",
}
WRONG = {
    "n": [0, -1, MAX_SAMPLES + 1, 10**9, None, *NOT_INTEGERS],
    "presence_penalty": [-2.0000001, 2.0000001, 1e30, *NOT_NUMBERS],
    "frequency_penalty": [-2.0000001, 2.0000001, -1e30, *NOT_NUMBERS],
    "repetition_penalty": [0, 0.0, -1.0, 1e-7, 1e7, *NOT_NUMBERS],
    "temperature": [-1e-9, -1, 2.0000001, 1e30, *NOT_NUMBERS],
    "top_p": [0, 0.0, -0.0, -0.1, 1.0000001, 2, *NOT_NUMBERS],
    "top_k": [-2, 1.5, None, *NOT_INTEGERS],
    "min_p": [-1e-9, 1.0000001, *NOT_NUMBERS],
    "seed": [2**63, -(2**63) - 1, HUGE, *NOT_INTEGERS],
    "max_tokens": [0, -1, *NOT_INTEGERS],
    "min_tokens": [-1, 17, None, *NOT_INTEGERS],
    "logprobs": [-2, *NOT_INTEGERS],
    "prompt_logprobs": [-2, *NOT_INTEGERS],
    "stop": [
        "", [""], ["a", ""], ["a", 5], 0, 5, False, {}, b"a", {"a"}, [None], np.array(["a"]),
        "\ud800", ["a", "b\udfff"], ["a"] * (MAX_STOPS + 1), "x" * (MAX_STOP_CHARS + 1), "x" * 10**6,
    ],
    "stop_token_ids": [
        0, 5, False, "5", {}, [-1], [1, True], [1.0], ["1"], [None], [[1]], np.array([1, 2]), {1}, [HUGE, -1],
    ],
    "ignore_eos": [0, 1, None, "true", np.bool_(True)],
    "detokenize": [0, None],
    "skip_special_tokens": [1, "yes"],
    "spaces_between_special_tokens": [0, "no", None],
    "include_stop_str_in_output": ["", None],
    "output_kind": ["deltas", 1, None, True, []],
    "logit_bias": [
        5, "x", [], [(1, 2.0)], {"abc": 1.0}, {-1: 1.0}, {"-1": 1.0}, {1.5: 1.0}, {True: 1.0}, {None: 1.0}, {"": 1.0},
        {"٣": 1.0}, {HUGE: 1.0}, {1: float("nan")}, {1: float("inf")}, {1: 100.001}, {1: -1e9}, {1: "2"}, {1: None},
        {1: True}, dict.fromkeys(range(MAX_BIASES + 1), 0.0), dict.fromkeys(range(10**5), 1.0), {5: 1.0, "5": 2.0},
    ],
    "allowed_token_ids": [[], (), 5, "5", [-1], [1.0], [True], [None], np.array([1])],
    "bad_words": ["word", [""], ["a", " "], [5], 5, {"a"}, [b"a"], ["a"] * (MAX_BAD_WORDS + 1)],
    "extra_args": [5, "x", [], {1: 2.0}, {"a": "2"}, {"a": None}, {"a": True}, {"a": float("nan")}, {"a": 1e39}],
}  # fmt: skip
TAKEN = {
    "n": [1, 2, 128, np.int64(4)],
    "temperature": [0, 0.0, -0.0, 1e-300, 1, 2, 2.0, np.float32(0.5), np.int32(1)],
    "top_p": [1, 1.0, 1e-300, 0.5, np.float16(0.5)],
    "top_k": [-1, 0, 1, 2**31, HUGE, np.int64(7), np.uint8(7)],
    "min_p": [0, 1, -0.0, 0.5],
    "seed": [None, 0, -(2**63), 2**63 - 1, np.int64(-5)],
    "max_tokens": [None, 1, 10**12, np.int32(4)],
    "presence_penalty": [-2, 2.0, 0, np.float32(0.5)],
    "frequency_penalty": [-2.0, 2, np.float16(0.5)],
    "repetition_penalty": [1e-6, 1, 1.3, 1e6],
    "min_tokens": [0, 16, np.int64(3)],
    "logprobs": [None, -1, 0, 20, np.uint8(3)],
    "prompt_logprobs": [None, -1, 0, 5],
    "ignore_eos": [True, False],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values], ids=shown
)
def test_a_wrong_value_is_refused_by_field_value_and_range(name, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert caught.value.param == name
    assert message.startswith(f"{name}: got {shown(value)}, allowed: ")
    assert ALLOWED_IN_WORDS[name] in message
    assert len(message) < 400
    assert "\n" not in message


def test_every_field_has_a_rule_that_is_tested():
    assert set(WRONG) == set(FIELDS) == set(ALLOWED_IN_WORDS)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in TAKEN.items() for value in values], ids=shown
)
def test_a_right_value_is_taken_as_a_plain_python_number(name, value):
    taken = getattr(SamplingParams(**{name: value}), name)
    assert taken == value
    assert type(taken) in (int, float, bool, type(None))


def test_a_seed_of_minus_one_is_none():
    """As scripts for vLLM have it; all others are themselves."""
    assert SamplingParams(seed=-1).seed is SamplingParams(seed=np.int64(-1)).seed is None
    assert SamplingParams(seed=-2).seed == -2


def test_minus_zero_becomes_zero():
    """Thresholds are compared by their bits on the device, where −0.0 would be the lowest of all."""
    params = SamplingParams(temperature=-0.0, min_p=-0.0)
    assert str(params.temperature) == str(params.min_p) == "0.0"


def test_greedy_is_below_1e_5():
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=np.nextafter(1e-5, 0)).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


def test_several_samples_need_chance():
    for temperature in (0, np.nextafter(1e-5, 0)):
        with pytest.raises(InvalidRequestError, match=r"^n: got 2, allowed: 1 when sampling greedily") as caught:
            SamplingParams(n=2, temperature=temperature)
        assert caught.value.param == "n"
        assert "raise it" in str(caught.value)
        assert SamplingParams(n=1, temperature=temperature).is_greedy
    assert SamplingParams(n=2, temperature=1e-5).n == 2


def test_rules_become_plain_values_whatever_they_came_as():
    assert SamplingParams().logit_bias is SamplingParams().allowed_token_ids is SamplingParams().extra_args is None
    assert SamplingParams(logit_bias={"5": 1, np.int64(6): np.float32(0.5)}).logit_bias == {5: 1.0, 6: 0.5}
    assert SamplingParams(logit_bias={}).logit_bias == {}
    assert SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASES), 1)).has_rules
    assert SamplingParams(allowed_token_ids=[3, np.int64(4)]).allowed_token_ids == (3, 4)
    assert SamplingParams(bad_words=["a", "b"]).bad_words == ("a", "b")
    assert SamplingParams(bad_words=["a"] * MAX_BAD_WORDS).has_rules
    assert SamplingParams(bad_words=None).bad_words == ()
    assert SamplingParams(extra_args={"a": 2}).extra_args == {"a": 2.0}
    assert SamplingParams(output_kind="delta").output_kind is RequestOutputKind.DELTA
    given = {5: 1.0}
    params = SamplingParams(logit_bias=given)
    given[6] = 2.0
    assert params.logit_bias == {5: 1.0}


def test_who_has_rules():
    """Whoever has none must not be computed as if he had: it costs a step of its own kind."""
    rules = {
        "presence_penalty": 0.1, "frequency_penalty": -0.1, "repetition_penalty": 1.1, "min_tokens": 1,
        "logit_bias": {1: 1.0}, "allowed_token_ids": [1], "bad_words": ["a"], "extra_args": {"a": 1.0},
    }  # fmt: skip
    for name, value in rules.items():
        assert SamplingParams(**{name: value}).has_rules, name
    without = {"temperature": 0.3, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 4, "stop": ["a"], "logprobs": 2}
    assert not SamplingParams(**without, logit_bias={}, bad_words=[], extra_args={}).has_rules


def test_stops_become_tuples_whatever_they_came_as():
    assert SamplingParams().stop == SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == ()
    assert SamplingParams(stop="end").stop == SamplingParams(stop=["end"]).stop == ("end",)
    assert SamplingParams(stop=["a"] * MAX_STOPS).stop == ("a",) * MAX_STOPS
    assert SamplingParams(stop="x" * MAX_STOP_CHARS).stop == ("x" * MAX_STOP_CHARS,)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()
    ids = SamplingParams(stop_token_ids=[0, np.int64(5)]).stop_token_ids
    assert ids == (0, 5)
    assert [type(token_id) for token_id in ids] == [int, int]


def test_stop_strings_need_text():
    with pytest.raises(InvalidRequestError, match=r"stop: got .*none while detokenize is false"):
        SamplingParams(stop="a", detokenize=False)
    assert SamplingParams(detokenize=False).stop == ()


@pytest.mark.parametrize("name", NOT_BUILT)
def test_a_parameter_that_is_not_built_is_refused_by_name(name):
    for value in (None, 0, "x"):
        with pytest.raises(InvalidRequestError, match=f"^{name}: not available in this version") as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name


def test_the_interface_is_what_is_built_and_what_is_refused_by_name():
    """Every parameter of vLLM's that a script may carry is one or the other; none twice."""
    assert not set(FIELDS) & set(NOT_BUILT)
    assert {*FIELDS, *NOT_BUILT} == {
        "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
        "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
        "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
        "output_kind", "structured_outputs", "logit_bias", "allowed_token_ids", "bad_words", "extra_args",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "near"), [("temprature", "temperature"), ("topp", "top_p"), ("max_token", "max_tokens"), ("seeds", "seed")]
)
def test_an_unknown_name_is_refused_with_the_nearest(name, near):
    with pytest.raises(InvalidRequestError, match=f"^{name}: unknown parameter; did you mean {near}\\?") as caught:
        SamplingParams(**{name: 1})
    assert caught.value.param == name


def test_a_name_near_nothing_lists_what_there_is_and_is_cut_itself():
    with pytest.raises(InvalidRequestError, match="unknown parameter; allowed: n, presence_penalty, ") as caught:
        check_name("z" * 10_000, ["prompt"])
    assert "prompt" in str(caught.value)
    assert len(str(caught.value)) < 500
    check_name("prompt", ["prompt"])


def test_parameters_are_keywords_only():
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(0.5)


def test_equal_parameters_are_equal_and_hash_alike():
    one = SamplingParams(temperature=1, stop=["a", "b"], stop_token_ids=[3], seed=np.int64(4))
    other = SamplingParams(temperature=1.0, stop=("a", "b"), stop_token_ids=(3,), seed=4)
    assert one == other
    assert hash(one) == hash(other)
    assert one != SamplingParams(temperature=1, stop=["a"], stop_token_ids=[3], seed=4)


def test_copies_are_equal_and_replacements_are_checked():
    params = SamplingParams(temperature=0.5, stop=["a"], stop_token_ids=[3])
    assert copy.copy(params) == copy.deepcopy(params) == dataclasses.replace(params) == params
    assert dataclasses.replace(params, top_k=4).top_k == 4
    with pytest.raises(InvalidRequestError, match="top_k"):
        dataclasses.replace(params, top_k=-2)
    with pytest.raises(InvalidRequestError, match="tempreature: unknown"):
        dataclasses.replace(params, tempreature=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
