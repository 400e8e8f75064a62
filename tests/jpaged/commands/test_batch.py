"""`jpaged batch` as a user calls it: responses, errors of lines, and runs that were killed."""

import io
import json
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jpaged.commands.batch import main

from ..tiny_model import SIZE_FLAGS
from .command_line import ROOT, Run, records

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")
NUM_LINES = 24
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def batch(*args: Any) -> Run:
    """Run the command in this process."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        status = main([str(arg) for arg in args])
    return Run(status, out.getvalue(), err.getvalue())


def request(id_: Any, url: str = COMPLETION, **body: Any) -> dict[str, Any]:
    return {"custom_id": id_, "method": "POST", "url": url, "body": {"model": "tiny", "max_tokens": 4, **body}}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


class Files(NamedTuple):
    input: Path
    output: Path
    errors: Path


@pytest.fixture(scope="module")
def flags(tiny: str) -> list[Any]:
    return ["-m", tiny, *SIZE_FLAGS, "--served-model-name", "tiny"]


@pytest.fixture(scope="module")
def unbroken(few_buckets: None, flags: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Run a file of chats and completions, some with several prompts or samples, and one that is wrong."""
    lines = []
    for index in range(NUM_LINES):
        text, drawn = (
            f"Line {index} " + "says something " * (index % 3),
            {"max_tokens": 3 + 2 * index, "ignore_eos": True},
        )
        forms = [
            request(f"chat-{index}", CHAT, messages=[{"role": "user", "content": text}], n=2, **drawn),
            request(f"drawn-{index}", prompt=[text, text], **drawn),
            request(f"seeded-{index}", prompt=text, seed=index, **drawn),
        ]
        lines.append(forms[index % 3])
    lines[7]["body"]["temperature"] = -1
    folder = tmp_path_factory.mktemp("batch")
    files = Files(write(folder / "in.jsonl", lines), folder / "out.jsonl", folder / "out.errors.jsonl")
    run = batch(*flags, "-i", files.input, "-o", files.output)
    assert run.returncode == 3, run.stderr
    assert run.stdout == ""
    return files


def test_responses_stand_in_input_order_and_errors_in_a_file_of_their_own(unbroken: Files) -> None:
    asked = [json.loads(line) for line in unbroken.input.read_text().splitlines()]
    wrong = asked.pop(7)
    found = records(unbroken.output)
    assert [record["custom_id"] for record in found] == [line["custom_id"] for line in asked]
    for line, record in zip(asked, found, strict=True):
        assert set(record) == {"id", "custom_id", "response", "error"}
        assert (record["error"], record["response"]["status_code"]) == (None, 200)
        body = record["response"]["body"]
        num_choices = 2 if line["custom_id"].startswith(("chat", "drawn")) else 1
        assert len(body["choices"]) == num_choices
        assert body["usage"]["completion_tokens"] == num_choices * line["body"]["max_tokens"]
        assert body["model"] == "tiny"
    (error,) = records(unbroken.errors)
    assert (error["custom_id"], error["error"]) == (wrong["custom_id"], None)
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["param"] == "temperature"
    ids = [record["id"] for record in (*found, error)]
    assert len(set(ids)) == NUM_LINES
    two = next(record for record in found if record["custom_id"] == "drawn-1")["response"]["body"]["choices"]
    assert two[0]["text"] != two[1]["text"]  # Equal prompts of a line have seeds of their own.


def test_a_killed_run_resumes_to_the_bytes_of_an_unbroken_one(
    flags: list[Any], unbroken: Files, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    args = [*flags, "-i", unbroken.input, "-o", path]
    command = [sys.executable, "-m", "jpaged", "batch", *map(str, args), "--max-num-seqs", "1"]  # Too few for some.
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = path.read_bytes()
    num_kept = kept.count(b"\n")
    assert num_kept < NUM_LINES - 1
    path.write_bytes(kept + kept.splitlines()[0][:50])
    run = batch(*args, "--resume")
    assert run.returncode == 3
    assert f"resume: {num_kept} of {NUM_LINES} are there already" in run.stderr
    assert path.read_bytes() == unbroken.output.read_bytes()
    assert path.with_name("out.errors.jsonl").read_bytes() == unbroken.errors.read_bytes()


def test_results_of_other_options_and_of_generate_are_not_taken_over(
    flags: list[Any], unbroken: Files, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(unbroken.output.read_bytes())
    args = [*flags, "-i", unbroken.input, "-o", path, "--resume"]
    run = batch(*args, "--seed", 1)
    assert (run.returncode, run.stderr.count("\n")) == (1, 1)
    assert "results of other options" in run.stderr
    assert path.read_bytes() == unbroken.output.read_bytes()


BAD_LINES: dict[str, tuple[Any, str | None, Any, str]] = {
    "no JSON": ("{", None, "invalid_json_line", "line 1: is not JSON"),
    "a list": ([], None, "invalid_json_line", "line 1: got an array"),
    "a key twice": ('{"custom_id": "a", "custom_id": "b"}', None, "invalid_json_line", "stands twice"),
    "no id": ({"method": "POST"}, None, "missing_required_parameter", "line 1: custom_id: got none"),
    "an id that is a number": (request(5), None, "invalid_custom_id", "line 1: custom_id: got 5"),
    "an id that is no Unicode": (request("\ud800"), None, "invalid_custom_id", "custom_id"),
    "no method": ({"custom_id": "a", "url": CHAT, "body": {}}, "a", "missing_required_parameter", "method"),
    "no body": ({"custom_id": "a", "method": "POST", "url": CHAT}, "a", "missing_required_parameter", "body"),
    "another method": (request("a") | {"method": "GET"}, "a", "invalid_method", "'GET', allowed: POST"),
    "another url": (request("a") | {"url": "/v1/embeddings"}, "a", "invalid_url", CHAT),
    "a url that is a list": (request("a") | {"url": ["\ud800"]}, "a", "invalid_url", CHAT),
    "a body that is a text": (request("a") | {"body": "x"}, "a", "invalid_request", "body: got a string"),
    "an unknown key": (request("a") | {"bodi\ud800": 1}, "a", "unknown_parameter", "key of a line"),
    "another model": (request("a", prompt="x", model="b"), "a", 404, "`b` does not exist"),
    "a stream": (request("a", prompt="x", stream=True), "a", 400, "stream: got true"),
    "no prompt": (request("a"), "a", 400, "prompt"),
    "text that is no Unicode": (request("a", prompt="\ud800"), "a", 400, ""),
    "a long prompt": (request("a", prompt="x" * 200), "a", 400, "128 tokens"),
    "too many samples": (request("a", prompt="x", n=100), "a", 400, "n: "),
}


def test_each_bad_line_is_an_error_of_its_own_and_the_others_go_on(flags: list[Any], tmp_path: Path) -> None:
    lines: list[Any] = [request("first", prompt="x", use_beam_search=True, n=2), ""]
    for index, (line, id_, _, _) in enumerate(BAD_LINES.values()):
        lines.append({**line, "custom_id": f"{id_}{index}"} if id_ is not None else line)
    lines += [request("first", prompt="y"), request("last", prompt="z", unknown_field=1)]
    path = tmp_path / "out"
    prompts = write(tmp_path / "in.jsonl", lines)
    prompts.write_bytes(b"\xef\xbb\xbf" + prompts.read_bytes())
    run = batch(*flags, "-i", prompts, "-o", path, "--error-file", tmp_path / "bad")
    assert run.returncode == 3
    assert [record["custom_id"] for record in records(path)] == ["first", "last"]
    assert "warning: last: " in run.stderr
    *found, duplicate = records(tmp_path / "bad")
    for index, (record, (_, id_, code, message)) in enumerate(zip(found, BAD_LINES.values(), strict=True)):
        assert record["custom_id"] == (None if id_ is None else f"{id_}{index}")
        if isinstance(code, int):
            assert record["error"] is None
            assert record["response"]["status_code"] == code
            told = record["response"]["body"]["error"]
        else:
            assert record["response"] is None
            told = record["error"]
            assert told["code"] == code
        assert message.replace("line 1:", f"line {index + 3}:") in told["message"]
    assert duplicate["error"]["code"] == "duplicate_custom_id"
    assert "which line 1 has too" in duplicate["error"]["message"]


def test_a_run_without_errors_leaves_no_file_of_errors(flags: list[Any], tmp_path: Path) -> None:
    prompts, errors = write(tmp_path / "in.jsonl", [request("a", prompt="x")]), tmp_path / "out.errors.jsonl"
    errors.write_text("of an earlier run\n")
    args = [*flags, "-i", prompts, "-o", tmp_path / "out.jsonl"]
    assert batch(*args).returncode == 0
    assert not errors.exists()
    run = batch(*args, "--resume")
    assert (run.returncode, run.stderr) == (0, "resume: 1 of 1 are there already\n")  # No model was loaded.


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["--error-file", "{out}"], "--error-file"),
        (["--error-file", "{in}"], "--error-file"),
        (["-o", "{in}"], "--output"),
        (["-i", "/nowhere.jsonl"], "--input"),
        (["-i", "/dev/null"], "--input"),
        (["--temperature", "1"], "--temperature"),
    ],
)
def test_files_and_flags_that_cannot_be_are_refused_before_anything_is_written(
    changed: list[str], named: str, flags: list[Any], tmp_path: Path
) -> None:
    prompts, path = write(tmp_path / "in.jsonl", [request("a", prompt="x")]), tmp_path / "out.jsonl"
    words = [word.format(**{"in": prompts, "out": path}) for word in changed]
    run = batch(*flags, "-i", prompts, "-o", path, *words)
    assert run.returncode == 1
    assert run.stderr.startswith(f"error: {named}: ")
    assert run.stderr.count("\n") == 1
    assert [one.name for one in tmp_path.iterdir()] == ["in.jsonl"]
