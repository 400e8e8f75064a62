"""Parameters against a model: what does not fit is refused with its name, what is allowed and the way out."""

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from jpaged.errors import InvalidRequestError
from jpaged.sampling.logit_rules_spec import LogitRulesSpec
from jpaged.sampling.sampling_params import BeamSearchParams, SamplingParams
from jpaged.text.answers.bound_format import bind_format
from jpaged.text.chat.tools import Tool, ToolChoice, ToolSet
from jpaged.text.prompt_params import ParamsChecker
from jpaged.text.tokenizing.tokenizer import Tokenizer

from .grammar.grammar_walks import grammars_of
from .grammar.test_call_grammar import format_of, tokenizer_of

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


YES = {"structured_outputs": {"json": {"enum": ["yes"]}}}
GET = Tool("get", parameters={"type": "object", "properties": {}, "additionalProperties": False})
CALLED = ToolSet((GET,), ToolChoice("required"))
# Formats write thoughts in marks of their own. Each case: the format, the text by which the chat has opened the answer,
# parameters, tools, and texts with whether each is a whole output; "prefix": the beginning of one.
AFTER = {
    "Gemma 4": (
        "gemma4", "<|turn>model\n", YES, None,
        {'"yes"': True, '<|channel>thought\nhm<channel|>"yes"': True, "<think>": False},
    ),
    "Gemma 4, without thoughts": (
        "gemma4", "<|turn>model\n<|channel>thought\n<channel|>", YES, None,
        {'"yes"': True, "<|channel>thought": False},
    ),
    "Gemma 4, a budget": (
        "gemma4", "", {"thinking_token_budget": 2}, None,
        {"Hi": True, "<|channel>thoughthm<channel|>Hi": True, "<|channel>thoughthmm": False},
    ),
    "Gemma 4, a call": (
        "gemma4", "<|turn>model\n", {"thinking_token_budget": 2}, CALLED,
        {"<|channel>thoughthm<channel|><|tool_call>call:get{}<tool_call|>": True, "Hi": False},
    ),
    "gpt-oss": (
        "openai", "<|end|><|start|>assistant", YES, None,
        {
            '"yes"': False, '<|channel|>final<|message|>"yes"': True,
            '<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"yes"': True,
        },
    ),
    "gpt-oss, a begun thought": (
        "openai", "<|start|>assistant<|channel|>analysis<|message|>", YES, None,
        {'hm<|end|><|start|>assistant<|channel|>final<|message|>"yes"': True, '<|channel|>final': False},
    ),
    "gpt-oss, a budget": (
        "openai", "<|start|>assistant", {"thinking_token_budget": 2}, None,
        {
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi": True,
            "<|channel|>analysis<|message|>hmm": False, "<|channel|>final<|message|>Hello": True,
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}": True,
        },
    ),
    "gpt-oss, a call without thoughts": (
        "openai", "<|start|>assistant", {"thinking_token_budget": 0}, CALLED,
        {
            "<|channel|>commentary to=functions.get <|constrain|>json<|message|>{}": True,
            "<|channel|>analysis": False, "<|channel|>final": False,
        },
    ),
    "Mistral": ("mistral", "", {"thinking_token_budget": 1}, None, {"[THINK]a[/THINK]b": True, "[THINK]ab": False}),
    "free": ("hermes", "", {}, ToolSet((GET,)), None),
    "none": ("hermes", "", {}, ToolSet((GET,), ToolChoice("none")), None),
}  # fmt: skip


@pytest.mark.parametrize("name", AFTER)
def test_what_follows_a_chat_is_in_the_format_of_the_model(name):
    format, opening, options, tools, texts = AFTER[name]
    tokenizer = tokenizer_of(format_of(format))
    grammars, bound = grammars_of(tokenizer), bind_format(format_of(format), tokenizer)
    spec = LogitRulesSpec(tokenizer.vocab_size)
    checker = ParamsChecker(tokenizer, spec, grammars=grammars, answer_format=bound)
    checked = checker.check(SamplingParams(**options), max_logprobs=20, max_num_seqs=4)
    grammar = checker.grammar_after([1, 2], checked, tools, opening)
    assert grammar.unenforced == ()
    if texts is None:
        assert grammar.text == ""
        return

    def is_allowed(text):
        matcher = grammars.matcher(grammar.text)
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            if not np.unpackbits(grammars.masks([matcher])[0].view(np.uint8), bitorder="little")[token_id]:
                return False
            matcher.advance(token_id)
        return matcher.parser.is_accepting() or "prefix"

    assert {text: is_allowed(text) for text in texts} == texts


def test_tools_are_refused_beside_a_beam_search(checker):
    checked = checker.check(BeamSearchParams(beam_width=2, max_tokens=3), max_logprobs=20, max_num_seqs=4)
    assert checker.grammar_after([1], checked).text == ""
    with pytest.raises(InvalidRequestError, match="tools: got tools with a beam search"):
        checker.grammar_after([1], checked, ToolSet((GET,)), "")
