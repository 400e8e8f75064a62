"""Every sampling flag of `generate` reaches the parameters of each request."""

import pytest
from tokenizers import Tokenizer as Backend

from jpaged.errors import ConfigError
from jpaged.flags import SAMPLING_FLAGS, parse_generate, sampling_flags
from jpaged.jobs import JobReader
from jpaged.prompts import PromptEncoder
from jpaged.rule_book import RuleBook
from jpaged.sampling_params import SamplingParams
from jpaged.tokenizer import Tokenizer

from .tiny_model import CONFIG, write_tiny_model

GIVEN = {
    "max_tokens": ("--max-tokens 7", 7),
    "temperature": ("--temperature 0.4", 0.4),
    "top_p": ("--top-p 0.5", 0.5),
    "top_k": ("--top-k 9", 9),
    "min_p": ("--min-p 0.25", 0.25),
    "seed": ("--seed 12", 12),
    "n": ("--num-samples 3", 3),
    "presence_penalty": ("--presence-penalty 0.5", 0.5),
    "frequency_penalty": ("--frequency-penalty -0.5", -0.5),
    "repetition_penalty": ("--repetition-penalty 1.5", 1.5),
    "min_tokens": ("--min-tokens 2", 2),
    "logprobs": ("--logprobs 4", 4),
    "prompt_logprobs": ("--prompt-logprobs 3", 3),
    "stop": ("--stop ab --stop c", ("ab", "c")),
    "stop_token_ids": ("--stop-token-ids 7 --stop-token-ids 9", (7, 9)),
    "allowed_token_ids": ("--allowed-token-ids 7 --allowed-token-ids 99", (7, 99)),
    "bad_words": ("--bad-words ab --bad-words c", ("ab", "c")),
    "logit_bias": ("--logit-bias 7=-2.5 --logit-bias 9=1", {7: -2.5, 9: 1.0}),
    "ignore_eos": ("--ignore-eos", True),
}
PLAIN = SamplingParams(max_tokens=None)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    directory = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    return PromptEncoder(Tokenizer(Backend.from_file(str(directory / "tokenizer.json")), {}), RuleBook(300), 100)


def params_of(encoder, argv):
    reader = JobReader(
        encoder=encoder,
        defaults=sampling_flags(parse_generate(["a prompt", *argv.split()])),
        max_logprobs=20,
        max_num_seqs=None,
        scheduling_policy="fcfs",
        use_chat=False,
    )
    return reader.job(0, 0, "a prompt", {}).params


def test_every_sampling_flag_is_among_these():
    assert set(SAMPLING_FLAGS) < set(GIVEN)
    assert CONFIG["vocab_size"] < 300


@pytest.mark.parametrize("name", GIVEN)
def test_a_flag_says_what_its_parameter_says_and_nothing_else(encoder, name):
    argv, value = GIVEN[name]
    assert params_of(encoder, argv) == SamplingParams(**{"max_tokens": None, name: value}) != PLAIN


def test_all_flags_together(encoder):
    argv = " ".join(flag for flag, _ in GIVEN.values())
    assert params_of(encoder, argv) == SamplingParams(**{name: value for name, (_, value) in GIVEN.items()})
    assert params_of(encoder, "") == PLAIN


def test_a_bias_that_is_given_twice_is_refused(encoder):
    with pytest.raises(ConfigError, match=r"^--logit-bias: got a token id twice, allowed: each once; leave one"):
        params_of(encoder, "--logit-bias 7=1 --logit-bias 9=1 --logit-bias 7=2")
