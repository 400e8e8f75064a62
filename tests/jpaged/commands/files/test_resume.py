"""`--resume`: what a run takes over from an earlier one, after a kill, an interrupt, or with other options."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from jpaged.commands.files.results import ResultFile
from jpaged.errors import ConfigError
from jpaged.startup.model_source import resolve_model
from jpaged.step.step_inputs import StepInputBuilder

from ...tiny_model import CHAT_TEMPLATE, SIZE_FLAGS
from ..command_line import BAD_LINE, NUM_LINES, ROOT, command, generate, records, without_metrics

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")


def kill_half_way(args: list[Any], path: Path) -> int:
    """Start a process, kill it when a quarter of the lines are there, and leave a torn line; return the whole lines."""
    process = subprocess.Popen(command(*args, "--max-num-seqs", 1), cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not path.exists() or path.read_bytes().count(b"\n") < NUM_LINES // 4:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = path.read_bytes()
    num_kept = kept.count(b"\n")
    assert num_kept < NUM_LINES
    path.write_bytes(kept + kept.splitlines()[0][:50])
    return num_kept


def test_a_killed_run_resumes_to_the_file_of_an_unbroken_one(
    tiny: str, prompt_file: Path, unbroken: Path, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    args = ["-m", tiny, *SIZE_FLAGS, "--prompt-file", prompt_file, "-o", path]
    num_kept = kill_half_way(args, path)
    resumed = generate(*args, "--resume")
    assert resumed.returncode == 3
    # The bad line is there as an error from the start, and errors are tried again.
    assert f"resume: {num_kept - 1} of {NUM_LINES} are there already" in resumed.stderr
    assert without_metrics(path) == without_metrics(unbroken)


@pytest.mark.slow
def test_the_default_model_resumes_to_the_file_of_an_unbroken_run(tmp_path: Path) -> None:
    """The file has 64 prompts of many lengths, half of them sampled, one of them bad."""
    prompts = tmp_path / "prompts.jsonl"
    workloads = json.loads((ROOT / "jpaged" / "commands" / "bench" / "workloads.json").read_text())
    with prompts.open("w") as file:
        for index, request in enumerate(workloads["B"]["requests"]):
            sampling = {"temperature": 0.0} if index % 2 else {"temperature": 0.7, "top_p": 0.9}
            line = {"prompt_token_ids": request["prompt"], "max_tokens": request["out"], **sampling}
            file.write(json.dumps({**line, "top_p": 2} if index == BAD_LINE else line) + "\n")
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    assert generate("--prompt-file", prompts, "-o", whole).returncode == 3
    kill_half_way(["--prompt-file", prompts, "-o", broken], broken)
    assert generate("--prompt-file", prompts, "-o", broken, "--resume").returncode == 3
    assert without_metrics(broken) == without_metrics(whole)
    assert [record["id"] for record in records(whole)] == list(range(1, NUM_LINES + 1))
    assert [index for index, record in enumerate(records(whole)) if "error" in record] == [BAD_LINE]


def test_resuming_a_finished_run_loads_no_weights(tiny: str, prompt_file: Path, unbroken: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    shutil.copy(unbroken, path)
    run = generate("-m", tiny, *SIZE_FLAGS, "--prompt-file", prompt_file, "-o", path, "--resume")
    assert run.returncode == 3
    assert "load:" not in run.stderr
    assert path.read_bytes() == unbroken.read_bytes()


def test_a_result_of_another_prompt_is_not_taken_over(tiny: str, tmp_path: Path) -> None:
    prompts, path = tmp_path / "p.txt", tmp_path / "out.jsonl"
    prompts.write_text("one\ntwo\n")
    args = ["-m", tiny, *SIZE_FLAGS, "--prompt-file", prompts, "-o", path, "-n", 5, "--ignore-eos", "--resume"]
    assert generate(*args).returncode == 0
    first = without_metrics(path)
    prompts.write_text("one\nthree\n")
    run = generate(*args)
    assert "resume: 1 of 2" in run.stderr
    assert without_metrics(path)[0] == first[0]
    assert "three" in records(path)[1]["prompt"]


def test_an_interrupted_run_keeps_its_finished_results_and_can_be_resumed(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, path = tmp_path / "p.txt", tmp_path / "out.jsonl"
    prompts.write_text("one\ntwo\nthree\n")
    args = ["-m", tiny, *SIZE_FLAGS, "--prompt-file", prompts, "-o", path, "-n", 5, "--ignore-eos", "--max-num-seqs", 1]
    build = StepInputBuilder.build

    def interrupted(self: StepInputBuilder, work: Any) -> Any:
        inputs, rows = build(self, work)
        if any(sequence.request.request_id == "2" for sequence in rows.samples):
            raise KeyboardInterrupt
        return inputs, rows

    with monkeypatch.context() as patch:
        patch.setattr(StepInputBuilder, "build", interrupted)
        run = generate(*args)
    assert (run.returncode, run.stderr.splitlines()[-1]) == (130, "interrupted")
    assert [record["id"] for record in records(path)] == [1]
    resumed = generate(*args, "--resume")
    assert (resumed.returncode, [record["id"] for record in records(path)]) == (0, [1, 2, 3])
    assert "resume: 1 of 3" in resumed.stderr


def with_files(args: list[Any], prompts: Path, output: Path) -> list[Any]:
    """Return the arguments with another prompt file and another output file."""
    files = {"--prompt-file": prompts, "-o": output}
    return [files.get(str(flag), value) for flag, value in zip(["", *args[:-1]], args, strict=True)]


CHANGED_FLAGS = {
    "max_tokens": ["-n", 6], "temperature": ["--temperature", 0.5], "top_p": ["--top-p", 0.5], "top_k": ["--top-k", 5],
    "min_p": ["--min-p", 0.1], "seed": ["--seed", 1], "n": ["--num-samples", 2], "stop": ["--stop", "a"],
    "stop_token_ids": ["--stop-token-ids", 9], "min_tokens": ["--min-tokens", 2], "ignore_eos": ["--ignore-eos"],
    "presence_penalty": ["--presence-penalty", 1], "frequency_penalty": ["--frequency-penalty", 1],
    "repetition_penalty": ["--repetition-penalty", 2], "logprobs": ["--logprobs", 1],
    "prompt_logprobs": ["--prompt-logprobs", 1], "logit_bias": ["--logit-bias", "5=1"],
    "allowed_token_ids": ["--allowed-token-ids", 70], "bad_words": ["--bad-words", "x"], "beams": ["--beam-width", 2],
    "chat": ["--no-chat"], "system": ["--system", "Be brief."], "template": ["--chat-template", "{}.jinja"],
    "generation_config": ["--generation-config", "none"], "logprobs_mode": ["--logprobs-mode", "tempered_logprobs"],
    "hf_overrides": ["--hf-overrides", '{"rope_theta": 5e5}'], "model": ["-m", "{}"],
    "random weights": ["--load-format", "dummy"],
    "tokenizer": ["--tokenizer", "{}"],
}  # fmt: skip
"""Flags that change what results are; {} is another directory with the same files."""


@pytest.fixture(scope="module")
def finished_run(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """Give the flags of a run of three lines, and its output file."""
    folder = tmp_path_factory.mktemp("finished")
    model = shutil.copytree(tiny, folder / "model")
    (model / "generation_config.json").write_text('{"temperature": 0.9}')
    lines = [{"prompt": "one", "id": "a"}, {"prompt": "two"}, {"prompt_token_ids": [5, 6, 7], "temperature": 0.0}]
    (folder / "p.jsonl").write_text("".join(json.dumps({**line, "priority": 0}) + "\n" for line in lines))
    args = ["-m", model, *SIZE_FLAGS, "--prompt-file", folder / "p.jsonl", "-o", folder / "out.jsonl", "--resume"]
    assert generate(*args, "-n", 5).returncode == 0
    return args, folder / "out.jsonl"


@pytest.mark.parametrize("name", CHANGED_FLAGS)
def test_results_of_other_options_are_refused_and_stay(name, finished_run, tiny, tmp_path):
    args, path = finished_run
    before, other = path.read_bytes(), tmp_path / "other"
    shutil.copytree(tiny, other)
    (tmp_path / "other.jinja").write_text(CHAT_TEMPLATE + "now: ")
    flags = [
        str(flag).replace("{}", str(other)) if str(flag).startswith("{}") else flag for flag in CHANGED_FLAGS[name]
    ]
    run = generate(*args, "-n", 5, *flags)
    assert run.returncode == 1, run.stderr
    (error,) = run.stderr.splitlines()
    assert error.startswith(f"error: --resume: got {path}, with 3 results of other options, allowed: results of this")
    assert path.read_bytes() == before


def test_engine_flags_and_the_spelling_of_a_path_do_not_matter(finished_run, monkeypatch):
    args, path = finished_run
    before = path.read_bytes()
    monkeypatch.chdir(path.parent)
    flags = ["--max-num-seqs", 2, "--block-size", 16, "--num-decode-steps", 1, "--no-enable-prefix-caching"]
    options = ["--attention-backend", "xla", "--dtype", "bfloat16", "-m", "./model", "--scheduling-policy", "priority"]
    run = generate(*args, "-n", 5, *flags, *options, "--temperature", 0.9)
    assert run.returncode == 0
    assert run.stderr.splitlines() == ["resume: 3 of 3 are there already"]
    assert path.read_bytes() == before


CHANGED_LINES = {
    "its prompt": {"prompt": "ones"}, "its id": {"id": "b"}, "a parameter": {"max_tokens": 3}, "a seed": {"seed": 1},
    "its priority": {"priority": 1}, "its salt": {"cache_salt": "x"},
    "its form": {"prompt": None, "prompt_token_ids": [5]},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGED_LINES.values(), ids=CHANGED_LINES.keys())
def test_a_line_that_has_changed_is_computed_anew(change, finished_run, tmp_path):
    args, path = finished_run
    first, *others = Path(args[args.index("--prompt-file") + 1]).read_text().splitlines()
    line = {key: value for key, value in {**json.loads(first), **change}.items() if value is not None}
    prompts, output = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("\n".join([json.dumps(line), *others]))
    shutil.copy(path, output)
    run = generate(*with_files(args, prompts, output), "-n", 5, "--scheduling-policy", "priority")
    assert run.returncode == 0, run.stderr
    assert "2 of 3 are there already; 1 of other prompts are dropped, out.jsonl.bak keeps them" in run.stderr
    assert without_metrics(tmp_path / "out.jsonl.bak")[:3] == without_metrics(path)
    assert without_metrics(output)[1:] == without_metrics(path)[1:]
    assert records(output)[0]["metrics"] != records(path)[0]["metrics"]


def test_an_output_file_of_lines_that_are_no_results_is_gone_on_with(finished_run, tmp_path):
    """Errors, torn and foreign lines are dropped, and a copy keeps what is no error; a result stands for one line."""
    args, path = finished_run
    output = tmp_path / "out.jsonl"
    first, second, third = path.read_text().splitlines()
    error = json.dumps({"id": 2, "error": {"type": "EngineError", "message": "x", "param": None}})
    output.write_text("\n".join([first, error, "[]", '{"id": 3}', "no JSON", first, third, second[:50]]))
    run = generate(*args, "-n", 5, "-o", output)
    assert run.returncode == 0, run.stderr
    others = "1 of other prompts and 3 lines that are no results are dropped, out.jsonl.bak keeps them"
    assert f"resume: 2 of 3 are there already; {others}" in run.stderr
    assert without_metrics(output) == without_metrics(path)
    assert "no JSON" in (tmp_path / "out.jsonl.bak").read_text().splitlines()


def test_results_of_a_version_without_keys_are_refused_as_such(finished_run, tmp_path):
    args, path = finished_run
    record = json.loads(path.read_text().splitlines()[0])
    del record["metrics"]["resume_key"]
    (tmp_path / "out.jsonl").write_text(json.dumps(record) + "\n")
    run = generate(*args, "-o", tmp_path / "out.jsonl")
    assert run.returncode == 1
    assert "with 1 results without a resume_key, which earlier versions wrote, allowed: results of" in run.stderr


def test_kept_results_are_printed_in_their_order_too(finished_run, tmp_path):
    args, path = finished_run
    first, second, third = path.read_text().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_text(third + first)
    run = generate(*args, "-n", 5, "-o", tmp_path / "out.jsonl", "--json")
    assert run.returncode == 0, run.stderr
    printed = [json.loads(line)["id"] for line in run.stdout.splitlines()]
    assert printed == [json.loads(line)["id"] for line in (first, second, third)]
    assert without_metrics(tmp_path / "out.jsonl") == without_metrics(path)


@pytest.mark.parametrize(
    "line", [b'\xef\xbb\xbf{"prompt": "x"}', b'{"prompt": "x", "id": "\\ud800"}'], ids=["mark", "id"]
)
def test_lines_that_only_python_reads_are_kept(line, finished_run, tmp_path):
    args, _ = finished_run
    (tmp_path / "p.jsonl").write_bytes(line)
    args = with_files(args, tmp_path / "p.jsonl", tmp_path / "out.jsonl")
    for num_kept in (0, 1):
        run = generate(*args, "-n", 2)
        assert run.returncode == 0, run.stderr
        assert f"resume: {num_kept} of 1 are there already" in run.stderr


def test_a_file_of_texts_is_no_file_of_json_lines(finished_run, tmp_path):
    args, _ = finished_run
    for name, status in (("p.txt", 0), ("p.jsonl", 1)):
        (tmp_path / name).write_text('{"prompt": "x"}')
        run = generate(*with_files(args, tmp_path / name, tmp_path / "out.jsonl"), "-n", 2)
        assert run.returncode == status, run.stderr


def test_a_file_that_another_run_writes_is_refused_and_one_that_was_changed_is_not_replaced(finished_run, tmp_path):
    args, _ = finished_run
    output = tmp_path / "out.jsonl"
    first = ResultFile(output)
    first.start(0)
    first.append(1, '{"id":1}')
    run = generate(*args, "-n", 2, "-o", output)
    assert run.returncode == 1
    assert "is written by another run; wait for its end, or give another name" in run.stderr
    output.write_text('{"id": "longer"}\n')
    with pytest.raises(ConfigError, match="was changed by others"):
        first.finish()
    assert output.read_text() == '{"id": "longer"}\n'
    first.close()


def test_each_checkpoint_of_orbax_is_a_model_of_its_own(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    folders = [tmp_path / str(step) / "default" for step in (100, 200)]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "_METADATA").write_text("{}")
    found = [resolve_model(str(path)).identity for path in (folders[0].parent, folders[1].parent, tmp_path)]
    assert found == [str(folders[0]), str(folders[1]), str(folders[1])]
