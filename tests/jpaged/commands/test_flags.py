"""Every sampling flag of `generate` reaches the parameters of each request."""

import pytest
from tokenizers import Tokenizer as Backend

from jpaged.commands.files.jobs import JobReader
from jpaged.commands.flags import SAMPLING_FLAGS, beam_flags, engine_config, parse_generate, sampling_flags
from jpaged.errors import ConfigError, JpagedError
from jpaged.sampling.logit_rules_spec import LogitRulesSpec
from jpaged.sampling.sampling_params import RequestOutputKind, SamplingParams
from jpaged.text.prompts import PromptEncoder
from jpaged.text.tokenizing.tokenizer import Tokenizer

from ..tiny_model import CONFIG, write_tiny_model

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
    "thinking_token_budget": ("--thinking-token-budget 5", 5),
}
LAST = RequestOutputKind.FINAL_ONLY
PLAIN = SamplingParams(max_tokens=None, output_kind=LAST)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    directory = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    tokenizer = Tokenizer(Backend.from_file(str(directory / "tokenizer.json")), {})
    return PromptEncoder(tokenizer, LogitRulesSpec(300), 100, chat_template="<think></think>")


def params_of(encoder, argv):
    reader = JobReader(
        encoder=encoder,
        defaults=sampling_flags(parse_generate(["a prompt", *argv.split()])),
        max_logprobs=20,
        max_num_seqs=None,
        scheduling_policy="fcfs",
        use_chat=False,
    )
    return reader.job(0, 0, "a prompt").params


def test_the_examples_hold_every_sampling_flag():
    assert set(SAMPLING_FLAGS) == set(GIVEN)
    assert CONFIG["vocab_size"] < 300


@pytest.mark.parametrize("name", GIVEN)
def test_a_flag_sets_its_parameter_and_no_other(encoder, name):
    argv, value = GIVEN[name]
    assert params_of(encoder, argv) == SamplingParams(**{"max_tokens": None, "output_kind": LAST, name: value}) != PLAIN


def test_all_flags_may_be_given_together(encoder):
    argv = " ".join(flag for flag, _ in GIVEN.values())
    assert params_of(encoder, argv) == SamplingParams(
        **{name: value for name, (_, value) in GIVEN.items()}, output_kind=LAST
    )
    assert params_of(encoder, "") == PLAIN


def test_a_json_object_becomes_overrides_of_the_config():
    args = parse_generate(["p", "--hf-overrides", '{"rope_parameters": {"factor": 2.0}}', "--skip-tokenizer-init"])
    config = engine_config(args)
    assert config.hf_overrides == {"rope_parameters": {"factor": 2.0}}
    assert config.skip_tokenizer_init


BAD = {
    "--logit-bias 7=1 --logit-bias 9=1 --logit-bias 7=2": "--logit-bias: got a token id twice, allowed: each once;",
    "--logit-bias 7": "--logit-bias: got '7', allowed: a token id and a number, such as 1234=-100; see",
    "--logit-bias 7=x": "--logit-bias: got 'x', allowed: a number; see jpaged generate --help",
    "--top-k 1.5": "--top-k: got '1.5', allowed: an integer; see jpaged generate --help",
    "-n x": "-n/--max-tokens: got 'x', allowed: an integer; see jpaged generate --help",
    "--limits waiting_tokens": "--limits: got 'waiting_tokens', allowed: pairs such as waiting_requests=1000,",
    "--limits waiting_tokens=1,waiting_tokens=2": "--limits: got 'waiting_tokens=1,waiting_tokens=2', allowed: each",
    "--num-decode-steps x": "--num-decode-steps: got 'x', allowed: an integer; see",
    "--hf-overrides rope_theta=5": "--hf-overrides: got 'rope_theta=5', allowed: a JSON object such as {",
    "--hf-overrides [1]": "--hf-overrides: got '[1]', allowed: a JSON object such as {",
    "--params x": "--params: unknown flag; ",
    "--temprature 1": "--temprature: unknown flag; did you mean --temperature?",
    "--max": "--max: unknown flag; did you mean --max-",
    "--zzz": "--zzz: unknown flag; leave it out, or see jpaged generate --help",
    "--no-enable-lora": "--no-enable-lora: not available in this version; leave it out",
    "--lora=x": "--lora: not available in this version (got 'x'); leave it out",
}


def test_spaces_in_limits_do_not_hide_a_name_given_twice():
    with pytest.raises(ConfigError, match=r"^--limits: got .*, allowed: each name once"):
        parse_generate(["--limits", "waiting_tokens=1, waiting_tokens=2"])


@pytest.mark.parametrize("argv", BAD)
def test_a_wrong_flag_is_refused_in_one_line_that_begins_with_it(argv):
    with pytest.raises(ConfigError) as caught:
        sampling_flags(parse_generate(argv.split()))
    assert str(caught.value).startswith(BAD[argv])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ["--json-schema", "missing.json"],
            r"^--json-schema: got 'missing.json' \(No such file or directory\), allowed:",
        ),
        (
            ["--grammar", "missing.lark"],
            r"^--grammar: got 'missing.lark' \(No such file or directory\), allowed: a file",
        ),
        (
            ["--json-schema", "{"],
            r"^--json-schema: got a string, allowed: JSON; it cannot be parsed \(line 1, column 2\)",
        ),
        (["--regex", "a", "--choice", "b"], "^--regex: got regex and choice, allowed: exactly one of json"),
        (["--regex", "a", "--regex", "b"], r"^--regex: got 'b' too, allowed: one"),
        (["--choice", ""], "^--choice: got an array of 1 item, allowed: a list of at least one text"),
        (["--regex", ""], "^--regex: got a string of 0 characters, allowed: a text with a regular expression"),
        (["--beam-width", "2", "--regex", "a"], r"^--regex: has no effect with --beam-width"),
    ],
)
def test_flags_of_structured_output_that_cannot_serve_are_refused_by_name(argv, told):
    with pytest.raises(JpagedError, match=told):
        beam_flags(parse_generate(["a prompt", *argv]))


def test_flags_of_structured_output_take_files_and_texts(tmp_path):
    (tmp_path / "schema.json").write_text('{"const": "é"}', encoding="utf-8")
    (tmp_path / "a.lark").write_text('start: "a"')
    for argv, field, value in (
        (["--json-schema", str(tmp_path / "schema.json")], "json", '{"const": "é"}'),
        (["--json-schema", ' {"const": 1}'], "json", ' {"const": 1}'),
        (["--grammar", str(tmp_path / "a.lark")], "grammar", 'start: "a"'),
        (["--grammar", 'root ::= "a"'], "grammar", 'root ::= "a"'),
        (["--grammar", "start: " + "x" * 300], "grammar", "start: " + "x" * 300),
        (["--choice", "a", "--choice", "b"], "choice", ("a", "b")),
    ):
        structure = sampling_flags(parse_generate(["a prompt", *argv]))["structured_outputs"]
        assert getattr(structure, field) == value
