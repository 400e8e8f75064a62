"""Parameters against a model: what does not fit is refused with its name, what is allowed and the way out."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from jpaged.errors import InvalidRequestError
from jpaged.sampling.logit_rules_spec import LogitRulesSpec
from jpaged.sampling.sampling_params import SamplingParams
from jpaged.text.prompt_params import ParamsChecker
from jpaged.text.tokenizing.tokenizer import Tokenizer

VOCAB = 300


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(Backend(models.BPE({"a": 0}, [])), {})


@pytest.fixture(scope="module")
def checker(tokenizer):
    return ParamsChecker(tokenizer, LogitRulesSpec(VOCAB))


# Parameters, the engine's max_logprobs, and what is wrong; None: nothing.
PARAMS = [
    ({"stop_token_ids": [0, 299], "logprobs": 20}, 20, None),
    ({"stop_token_ids": [5, 300]}, 20, "stop_token_ids: got token id 300, out of vocabulary"),
    ({"logprobs": 21}, 20, "logprobs: got 21, allowed: at most max_logprobs, 20; ask for fewer, or start the engine"),
    (
        {"logprobs": -1},
        20,
        "logprobs: got -1, allowed: at most max_logprobs, 20; start the engine with max_logprobs=-1",
    ),
    ({"logprobs": 300}, 1000, None),
    ({"logprobs": 301}, 1000, "logprobs: got 301, allowed: at most the size of the vocabulary, 300"),
    ({"logprobs": -1, "prompt_logprobs": -1}, -1, None),
    ({"logprobs": 300}, -1, None),
    ({"prompt_logprobs": 301}, -1, "prompt_logprobs: got 301, allowed: at most the size of the vocabulary, 300"),
    ({"n": 4}, 20, None),
    (
        {"n": 5},
        20,
        "n: got 5, allowed: at most max_num_seqs, 4, since all samples or beams of a prompt run together; l",
    ),
]


@pytest.mark.parametrize(("params", "max_logprobs", "words"), PARAMS, ids=str)
def test_parameters_are_checked_against_the_model_and_the_engine(checker, params, max_logprobs, words):
    def check():
        checker.check(SamplingParams(**params), max_logprobs=max_logprobs, max_num_seqs=4)

    if words is None:
        check()
        return
    with pytest.raises(InvalidRequestError) as caught:
        check()
    assert str(caught.value).startswith(words)
    assert caught.value.param == words.split(":")[0]


def test_any_number_of_samples_is_taken_while_max_num_seqs_is_not_chosen(checker):
    checker.check(SamplingParams(n=128), max_logprobs=20, max_num_seqs=None)


def test_while_nothing_may_end_some_token_that_ends_nothing_must_be_allowed(tokenizer):
    checker = ParamsChecker(tokenizer, LogitRulesSpec(VOCAB), eos_token_ids=frozenset({2}))

    def check(**params):
        checker.check(SamplingParams(**params), max_logprobs=20, max_num_seqs=4)

    check(allowed_token_ids=[2, 7])
    check(allowed_token_ids=[2, 8], stop_token_ids=[7], min_tokens=1)
    for ignore_eos in (False, True):  # min_tokens holds EOS back also where it would end nothing.
        with pytest.raises(
            InvalidRequestError, match=r"got an array of 2 items, which all end the output.* min_tokens is 1"
        ) as caught:
            check(allowed_token_ids=[2, 7], stop_token_ids=[7], min_tokens=1, ignore_eos=ignore_eos)
        assert caught.value.param == "allowed_token_ids"


def test_a_budget_of_thoughts_is_refused_by_name_where_there_are_none(checker):
    params = SamplingParams(thinking_token_budget=5, detokenize=False)
    words = "thinking_token_budget: got 5, allowed: none, since the model writes no thoughts; leave it out"
    with pytest.raises(InvalidRequestError, match=words) as caught:
        checker.check(params, max_logprobs=20, max_num_seqs=4)
    assert caught.value.param == "thinking_token_budget"
    with pytest.raises(InvalidRequestError, match="thinking_token_budget: got 5, allowed: none, since the engine has"):
        ParamsChecker(None, LogitRulesSpec(VOCAB)).check(params, max_logprobs=20, max_num_seqs=4)
    with pytest.raises(InvalidRequestError, match="thinking_token_budget: got -1, allowed: an integer ≥ 0"):
        SamplingParams(thinking_token_budget=-1)
