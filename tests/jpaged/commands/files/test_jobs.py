"""Lines of prompt files, good and bad, and the prompt on stdin."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from jpaged.commands.files.jobs import LINE_KEYS, BadLine, Job, JobReader, error_record, read_prompts
from jpaged.commands.files.lines import LineSource
from jpaged.commands.flags import parse_generate
from jpaged.errors import ConfigError
from jpaged.sampling.logit_rules_spec import LogitRulesSpec
from jpaged.sampling.sampling_params import FIELDS
from jpaged.text.prompts import PromptEncoder
from jpaged.text.tokenizing.tokenizer import Tokenizer

from ...tiny_model import CHAT_TEMPLATE, CONFIG, write_tiny_model

FORMS = {"prompt": "hi", "prompt_token_ids": [10, 11], "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    return Tokenizer(Backend.from_file(str(directory / "tokenizer.json")), {}, chat_template=CHAT_TEMPLATE)


@pytest.fixture
def read(tokenizer, tmp_path):
    """Return a function that reads lines of JSON as a prompt file."""

    def read(*lines, **options):
        return read_text("".join(json.dumps(line) + "\n" for line in lines), **options)

    def read_text(text, policy="fcfs", use_chat=False, max_num_seqs=None):
        path = Path(tmp_path / "lines.jsonl")
        path.write_text(text)
        reader = JobReader(
            encoder=PromptEncoder(tokenizer, LogitRulesSpec(CONFIG["vocab_size"]), 100),
            defaults={},
            max_logprobs=20,
            max_num_seqs=max_num_seqs,
            scheduling_policy=policy,
            use_chat=use_chat,
        )
        return list(reader.file_jobs(LineSource(str(path))))

    read.text = read_text
    return read


@pytest.mark.parametrize("use_chat", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_salt_and_priority_reach_the_request_in_every_form(read, form, use_chat):
    beside = {"cache_salt": "tenant", "priority": -2}
    with_, without = read({form: FORMS[form], **beside}, {form: FORMS[form]}, policy="priority", use_chat=use_chat)
    assert (with_.prompt.cache_salt, with_.prompt.priority) == ("tenant", -2)
    assert (without.prompt.cache_salt, without.prompt.priority) == (None, 0)
    assert (with_.prompt.token_ids, with_.prompt.text) == (without.prompt.token_ids, without.prompt.text)
    chat = "<|start|>user: hi\n<|start|>assistant: "
    texts = {"prompt": chat if use_chat else "hi", "prompt_token_ids": None, "messages": chat}
    assert with_.prompt.text == texts[form]


def test_options_of_a_chat_stand_beside_its_messages(read):
    begun = {"role": "assistant", "content": "So"}
    chat, bad, unknown = read(
        {"messages": [*FORMS["messages"], begun], "continue_final_message": True, "tools": [], "tool_choice": "none"},
        {"messages": FORMS["messages"], "tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"messages": FORMS["messages"], "tools": [{"type": "function", "function": {"name": "f"}}]},
    )
    assert chat.prompt.text == "<|start|>user: hi\n<|start|>assistant: So"
    assert bad.error.param == "tools[0].function.name"
    assert "give a template that shows tools (--chat-template FILE)" in str(unknown.error)


def test_whole_numbers_count_as_integers_and_schemas_in_other_places_are_refused(read):
    job, *bad = read(
        {"prompt": "a", "max_tokens": 4.0, "top_k": 40.0, "seed": 1.0, "num_samples": 2.0, "priority": 0.0},
        {"prompt": "a", "max_tokens": 4.5},
        {"prompt": "a", "top_k": 1e20},
        {"prompt_token_ids": [1.0]},
        {"prompt": "a", "response_format": {"type": "json_object"}},
        {"prompt": "a", "structured_outputs": {"schema": {}}},
    )
    assert (job.params.max_tokens, job.params.top_k, job.params.seed, job.params.n) == (4, 40, 1, 2)
    assert type(job.params.max_tokens) is int
    params = ["max_tokens", "top_k", "prompt_token_ids", "response_format", "structured_outputs.schema"]
    assert [one.error.param for one in bad] == params


def test_a_priority_that_would_be_ignored_becomes_the_error_of_its_line(read):
    lines = [{"prompt": "a", "priority": 3}, {"prompt": "b", "priority": 0}, {"prompt": "c"}]
    bad, *good = read(*lines)
    assert isinstance(bad, BadLine)
    assert bad.error.param == "priority"
    assert "got 3 under scheduling_policy fcfs, allowed: 0" in str(bad.error)
    assert all(isinstance(job, Job) for job in good)
    for policy in ("priority", lambda request: request.priority):
        assert [job.prompt.priority for job in read(*lines, policy=policy)] == [3, 0, 0]


def test_the_number_of_samples_has_two_names_and_is_checked_against_max_num_seqs(read):
    named, flagged, many = read(
        {"prompt": "a", "n": 4}, {"prompt": "a", "num_samples": 3}, {"prompt": "a", "n": 5}, max_num_seqs=4
    )
    assert (named.params.n, flagged.params.n) == (4, 3)
    assert isinstance(many, BadLine)
    assert many.error.param == "n"
    assert "n: got 5, allowed: at most max_num_seqs, 4" in str(many.error)
    # Where max_num_seqs is not given, the engine is started for as many as are asked for.
    assert read({"prompt": "a", "n": 128})[0].params.n == 128


@pytest.mark.parametrize("use_chat", [True, False])
@pytest.mark.parametrize("num_tokens", [100, 10_000])
@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_beyond_the_context_is_an_error_that_programs_recognize(read, form, num_tokens, use_chat):
    value = {"prompt": "x" * num_tokens, "prompt_token_ids": [5] * num_tokens}.get(form)
    (bad,) = read({form: value or [{"role": "user", "content": "x" * num_tokens}], "id": "a"}, use_chat=use_chat)
    record = error_record(bad.id, bad.error)
    assert record["error"].pop("message").startswith("This model's maximum context length is 100 tokens, but your")
    param = "messages" if form == "messages" else "prompt"
    assert record["error"] == {"type": "ContextLengthError", "param": param, "code": "context_length_exceeded"}


@pytest.mark.parametrize(
    ("line", "param"),
    [
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "priority": "high"}, "priority"),
        ({"prompt": "a", "priority": None}, "priority"),
        ({"prompt": "a", "n": 129}, "n"),
        ({"prompt": "a", "n": 2, "num_samples": 3}, "num_samples"),
        ({"prompt": "a", "num_samples": 0}, "num_samples"),
        ({"prompt": "a", "json_schema": {"properties": {"a": {"not": {}}}}}, "json_schema"),
        ({"prompt": "a", "regex": ""}, "regex"),
        ({"prompt": "a", "regex": "a", "choice": ["b"]}, "regex"),
        ({"prompt": "a", "structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"prompt_token_ids": [258]}, "prompt_token_ids"),
        ({"prompt": "a", "lora_request": "x"}, "lora_request"),
        ({"prompt": "a", "beam_width": 3}, "beam_width"),
        ({"prompt": "a", "logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    ],
)
def test_a_wrong_value_is_the_error_of_its_line_and_of_no_other(read, line, param):
    bad, good = read(line, {"prompt": "b"}, policy="priority")
    assert bad.error.param == param
    assert isinstance(good, Job)


def test_a_key_that_a_line_cannot_have_is_refused_with_the_way_out(read):
    for line, words in (
        ({"prompt": "a", "multi_modal_data": {}}, "multi_modal_data: not available in this version; leave it out"),
        ({"prompt": "a", "image": "x.png"}, "image: not available in this version; leave it out"),
        ({"prompt": "a", "regex": "a", "structured_outputs": {"regex": "b"}}, "structured_outputs: got it and regex"),
        ({"prompt": "a", "regex": "a", "choice": ["b"]}, "regex: got regex and choice, allowed: exactly"),
        ({"prompt": "a", "": 1}, "'': unknown parameter"),
        ({"prompt": "a", "x\nerror: forged": 1}, "'x\\nerror: forged': unknown parameter"),
        ({"prompt": "a", "length_penalty": 2}, "length_penalty: is the same for all lines of a run; give --length-p"),
    ):
        (bad,) = read(line)
        assert words in str(bad.error)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('{"prompt": "a", "prompt": "b"}', "prompt"),
        ('{"prompt": "a", "logit_bias": {"5": 1, "5": 2}}', "5"),
        ('{"messages": [{"role": "user", "content": "a", "role": "system"}]}', "role"),
        ("{" + "".join(f'"k{place}": 1, ' for place in range(100_000)) + '"k7": 2}', "k7"),
    ],
    ids=["a key", "a key in it", "a message", "many keys"],
)
def test_a_key_that_stands_twice_in_an_object_is_the_error_of_its_line(read, line, name):
    bad, good = read.text(line + '\n{"prompt": "c"}\n')
    assert bad.error.param == name
    assert f"{name!r}: stands twice in one object" in str(bad.error)
    assert isinstance(good, Job)


def test_no_key_of_a_line_is_also_a_sampling_parameter():
    assert not set(LINE_KEYS) & set(FIELDS)


READ = """
import sys
from jpaged.commands.flags import parse_generate
from jpaged.commands.files.jobs import read_prompts
try:
    print(read_prompts(parse_generate(sys.argv[1:])))
except ValueError as error:
    print(error)
"""


def prompts_of(*argv, **streams):
    command = [sys.executable, "-c", READ, *argv]
    env = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    return subprocess.run(command, capture_output=True, timeout=60, env=env, **streams).stdout.decode().strip()


USUAL = "prompt: got none, allowed: a prompt as an argument, --prompt-file F, or text on stdin; try jpaged generate"
PIPED = {
    "text": ((), b"two\nlines\n", r"['two\nlines']"),
    "text and a dash": (("-",), b"piped\n", "['piped']"),
    "text and an argument, which goes alone": (("given",), b"piped", "['given']"),
    "text and a file of prompts": (("--prompt-file", "x.txt"), b"piped", "[]"),
    "text behind a byte-order mark": ((), b"\xef\xbb\xbfpiped\n", "['piped']"),
    "nothing": ((), b"", USUAL),
    "an empty line": ((), b"\n", USUAL),
    "no text": ((), b"\xff\xfe", "prompt: stdin is not utf-8 (invalid start byte); give text"),
}


@pytest.mark.parametrize(("argv", "stdin", "wanted"), PIPED.values(), ids=PIPED.keys())
def test_stdin_is_the_prompt_where_there_is_no_other(argv, stdin, wanted):
    assert prompts_of(*argv, input=stdin).startswith(wanted)


def test_stdin_may_be_a_file_and_is_not_read_from_a_terminal_or_a_device(tmp_path):
    (tmp_path / "prompt").write_text("from a file")
    with (tmp_path / "prompt").open() as file:
        assert prompts_of(stdin=file) == "['from a file']"
    assert prompts_of(stdin=subprocess.DEVNULL).startswith(USUAL)
    terminal, other_end = pty.openpty()
    try:
        assert prompts_of(stdin=other_end).startswith(USUAL)
    finally:
        os.close(terminal)
        os.close(other_end)


def test_prompts_beside_a_file_of_prompts_are_refused():
    with pytest.raises(ConfigError, match=r"^prompt: got prompts and --prompt-file, allowed: one of the two; leave"):
        read_prompts(parse_generate(["hi", "--prompt-file", "x.txt"]))
