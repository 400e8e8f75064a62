"""What a line of a prompt file may carry, and what becomes of a line that carries something else."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from jpaged.jobs import LINE_KEYS, BadLine, Job, JobReader
from jpaged.prompts import PromptEncoder
from jpaged.rule_book import RuleBook
from jpaged.sampling_params import FIELDS
from jpaged.tokenizer import Tokenizer

from .tiny_model import CHAT_TEMPLATE, CONFIG, write_tiny_model

FORMS = {
    "prompt": "hi",
    "prompt_token_ids": [10, 11],
    "messages": [{"role": "user", "content": "hi"}],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    return Tokenizer(Backend.from_file(str(directory / "tokenizer.json")), {}, chat_template=CHAT_TEMPLATE)


@pytest.fixture
def read(tokenizer, tmp_path):
    """Jobs of lines, under a policy."""

    def read(*lines, **options):
        return read_text("".join(json.dumps(line) + "\n" for line in lines), **options)

    def read_text(text, policy="fcfs", use_chat=False, max_num_seqs=None):
        path = Path(tmp_path / "lines.jsonl")
        path.write_text(text)
        reader = JobReader(
            encoder=PromptEncoder(tokenizer, RuleBook(CONFIG["vocab_size"]), 100),
            defaults={},
            max_logprobs=20,
            max_num_seqs=max_num_seqs,
            scheduling_policy=policy,
            use_chat=use_chat,
        )
        return reader.file_jobs(path)

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


def test_a_priority_that_would_be_ignored_becomes_the_error_of_its_line(read):
    lines = [{"prompt": "a", "priority": 3}, {"prompt": "b", "priority": 0}, {"prompt": "c"}]
    bad, *good = read(*lines)
    assert isinstance(bad, BadLine)
    assert bad.error.param == "priority"
    assert "got 3 under scheduling_policy fcfs, allowed: 0" in str(bad.error)
    assert all(isinstance(job, Job) for job in good)
    for policy in ("priority", lambda request: request.priority):
        assert [job.prompt.priority for job in read(*lines, policy=policy)] == [3, 0, 0]


def test_samples_go_by_both_names_and_are_held_against_what_the_engine_runs_together(read):
    named, flagged, many = read(
        {"prompt": "a", "n": 4}, {"prompt": "a", "num_samples": 3}, {"prompt": "a", "n": 5}, max_num_seqs=4
    )
    assert (named.params.n, flagged.params.n) == (4, 3)
    assert isinstance(many, BadLine)
    assert many.error.param == "n"
    assert "n: got 5, allowed: at most max_num_seqs, 4" in str(many.error)
    # Nothing is given: the engine is made for as many as are asked for.
    assert read({"prompt": "a", "n": 128})[0].params.n == 128


@pytest.mark.parametrize(
    ("line", "param"),
    [
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "priority": "high"}, "priority"),
        ({"prompt": "a", "priority": None}, "priority"),
        ({"prompt": "a", "n": 129}, "n"),
        ({"prompt": "a", "n": 2, "temperature": 0}, "n"),
        ({"prompt": "a", "n": 2, "num_samples": 3}, "num_samples"),
        ({"prompt": "a", "lora_request": "x"}, "lora_request"),
        ({"prompt": "a", "beam_width": 3}, "beam_width"),
        ({"prompt": "a", "logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    ],
)
def test_a_wrong_value_is_the_error_of_its_line_and_of_no_other(read, line, param):
    bad, good = read(line, {"prompt": "b"}, policy="priority")
    assert bad.error.param == param
    assert isinstance(good, Job)


def test_what_lines_cannot_have_says_where_it_goes(read):
    for line, words in (
        ({"prompt": "a", "multi_modal_data": {}}, "multi_modal_data: not available in this version; leave it out"),
        ({"prompt": "a", "json_schema": {}}, "json_schema: not available in this version; leave it out"),
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
def test_a_name_that_is_in_an_object_twice_is_the_error_of_its_line(read, line, name):
    bad, good = read.text(line + '\n{"prompt": "c"}\n')
    assert bad.error.param == name
    assert f"{name!r}: is in one object twice" in str(bad.error)
    assert isinstance(good, Job)


def test_a_name_means_one_thing():
    assert not set(LINE_KEYS) & set(FIELDS)
