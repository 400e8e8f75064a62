"""What `serve_clients.py` asks of each client, and how it reads the client's report.

A `Run` has the arguments of a client's command line and a function that turns the files that the client has written
into an `Observation`: the scores and the texts that it has got, and the figures that it tells. Nothing here knows the
engine; the options are those of lm_eval 0.4.13, aiperf 0.13.0 and guidellm 0.8.1.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m"
MAX_MODEL_LEN = 1024
NUM_REQUESTS, CONCURRENCY, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 20, 4, 48, 24
CHOICES: tuple[tuple[str, tuple[str, str, str], int], ...] = (
    ("The capital of France is", ("Berlin", "Paris", "Madrid"), 1),
    ("The capital of Germany is", ("Berlin", "Paris", "Madrid"), 0),
    ("The capital of Japan is", ("Seoul", "Beijing", "Tokyo"), 2),
    ("The capital of Canada is", ("Toronto", "Ottawa", "Montreal"), 1),
    ("The opposite of hot is", ("cold", "warm", "loud"), 0),
    ("A week has seven", ("months", "days", "hours"), 1),
    ("Water is made of hydrogen and", ("oxygen", "carbon dioxide", "iron ore"), 0),
    ("Two plus two equals", ("three", "five", "four"), 2),
    ("1, 2, 3, 4, 5, 6,", ("7", "8", "17"), 0),
    ("The sun rises in the", ("north", "west", "east"), 2),
    ("Once upon a time, there was a", ("little girl who", "very old volcano", "tax return"), 0),
    ("def add(a, b):\n    return a", ("+ b", "- b", "print"), 0),
    ("To be, or not to be, that is the", ("question", "answer", "most delicious soup"), 0),
    ("The chemical symbol for gold is", ("Ag", "Au", "Fe"), 1),
    ("Grüße aus Köln! Ich heiße", ("Jürgen", "und", "鳥"), 0),
    ("The first president of the United States was", ("Lincoln", "George Washington", "Napoleon"), 1),
    ("A dog says “woof” and a cat says", ("“meow”", "“moo”", "nothing 🐄"), 0),
    ("She opened the door and", ("walked into the room", "banana the of", "the door opened she"), 0),
    ("The largest planet of the solar system is", ("Mars", "Earth", "Jupiter"), 2),
    ("Ice is frozen  ", ("fire", "water", "sand"), 1),  # lm_eval moves the spaces into the continuation.
)
"""Question, answers, index of the right answer."""
TEXTS = (
    "The capital of France is",
    "Question: What is the largest planet?\nAnswer:",
    "Here is a list of three colors:\n1.",
    "Once upon a time, there was a little girl who",
    "Grüße aus Köln! Mein Name ist",
    "def fibonacci(n):\n",
)
STOPS, MAX_TEXT_TOKENS = (".", "\n\n", "Question:"), 32
GUIDELLM_FIGURES = {
    "ttft_ms": "time_to_first_token_ms",
    "itl_ms": "inter_token_latency_ms",
    "output_tokens_per_s": "output_tokens_per_second",
}
"""Our name of a figure → the metric of guidellm's report whose mean it is."""


@dataclass(frozen=True)
class Score:
    """What a client says of a continuation: the sum of its logprobs, and whether greedy decoding would give it."""

    context: str
    continuation: str
    logprob: float
    is_greedy: bool


@dataclass(frozen=True)
class Answer:
    """A greedy text that a client has got: for a text or for a chat's messages, with further sampling parameters."""

    prompt: str | list[dict[str, Any]]
    params: dict[str, Any]
    text: str


@dataclass
class Observation:
    """What a client has reported of one run."""

    scores: list[Score] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    accuracy: float | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """A run of a client: its arguments, of the server's URL, and what reads its report out of the run's folder."""

    client: str
    kind: str
    arguments: Callable[[str], list[str]]
    read: Callable[[], Observation]


def write_tasks(folder: Path) -> None:
    """Write the two tasks, and their items, for lm_eval's `--include_path`."""
    choices = [{"question": q, "choices": c, "answer": answer} for q, c, answer in CHOICES]
    metric = {"aggregation": "mean", "higher_is_better": True}
    settings: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        "jpaged_choices": (choices, {
            "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}", "target_delimiter": " ", "metric_list": [{"metric": "acc", **metric}],
        }),
        "jpaged_texts": ([{"question": text} for text in TEXTS], {
            "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "",
            "metric_list": [{"metric": "exact_match", **metric}],
            "generation_kwargs": {"until": STOPS, "max_gen_toks": MAX_TEXT_TOKENS, "do_sample": False},
        }),
    }  # fmt: skip
    folder.mkdir()
    for name, (items, task) in settings.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(item) + "\n" for item in items))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        text = json.dumps({"task": name, **source, **task, "num_fewshot": 0, "metadata": {"version": 1.0}})
        (folder / f"{name}.yaml").write_text(text)  # JSON is YAML.


def lm_eval_run(folder: Path, tasks: Path, kind: str, *, batch_size: int, **model_args: Any) -> Run:
    """Return a run of both tasks; `model_args` say who tokenizes."""

    def arguments(url: str) -> list[str]:
        given = {
            "model": MODEL, "base_url": f"{url}/v1/completions", "max_length": MAX_MODEL_LEN, "max_retries": 1,
            **model_args,
        }  # fmt: skip
        return [
            "run", "--model", "local-completions", "--include_path", str(tasks),
            "--tasks", "jpaged_choices", "jpaged_texts", "--output_path", str(folder), "--log_samples",
            "--batch_size", str(batch_size),
            "--model_args", *(f"{name}={value}" for name, value in given.items()),
        ]  # fmt: skip

    def read() -> Observation:
        found = Observation()
        for sample in _lines(folder, "samples_jpaged_choices_*.jsonl"):
            for index, (reply,) in enumerate(sample["resps"]):
                asked = sample["arguments"][f"gen_args_{index}"]
                found.scores.append(Score(asked["arg_0"], asked["arg_1"], float(reply[0]), reply[1] == "True"))
        for sample in _lines(folder, "samples_jpaged_texts_*.jsonl"):
            asked = sample["arguments"]["gen_args_0"]
            params = {"max_tokens": asked["arg_1"]["max_gen_toks"], "stop": list(asked["arg_1"]["until"])}
            found.answers.append(Answer(asked["arg_0"], params, sample["resps"][0][0]))
        results = json.loads(next(folder.rglob("results_*.json")).read_text())["results"]
        found.accuracy = results["jpaged_choices"]["acc,none"]
        expected = 3 * len(CHOICES), len(TEXTS)
        if (len(found.scores), len(found.answers)) != expected:
            found.wrong.append(f"{len(found.scores)} scores and {len(found.answers)} texts, wanted {expected}")
        return found

    return Run("lm_eval", kind, arguments, read)


def _lines(folder: Path, pattern: str) -> list[Any]:
    """Return the lines of the JSONL file of this name below the folder."""
    return list(map(json.loads, next(folder.rglob(pattern)).read_text().splitlines()))


def aiperf_run(folder: Path, tokenizer: Path, kind: str) -> Run:
    """Return a run of synthetic prompts; `kind` is chat or completions. aiperf reads /metrics by itself too."""

    def arguments(url: str) -> list[str]:
        # aiperf asks for usage in every event of chats only.
        more = ["--per-chunk-usage"] if kind == "chat" else []
        return [
            "profile", "--model", MODEL, "--url", url, "--endpoint-type", kind, "--streaming", "--ui", "none",
            "--concurrency", str(CONCURRENCY), "--request-count", str(NUM_REQUESTS), "--tokenizer", str(tokenizer),
            "--isl", str(NUM_PROMPT_TOKENS), "--isl-stddev", "0", "--osl", str(NUM_OUTPUT_TOKENS), "--osl-stddev", "0",
            "--extra-inputs", "ignore_eos:true", "temperature:0", "--use-server-token-count", *more,
            "--wait-for-model-timeout", "60", "--wait-for-model-mode", "models", "--no-gpu-telemetry",
            "--export-outputs-json", "--output-artifact-dir", str(folder),
        ]  # fmt: skip

    def read() -> Observation:
        found = Observation()
        sent = json.loads((folder / "inputs.json").read_text())["data"]
        bodies = {one["session_id"]: one["payloads"][0] for one in sent}
        for one in json.loads((folder / "outputs.json").read_text())["data"]:
            found.answers.append(_answer(bodies[one["conversation_id"]], one["response_text"]))
        report = json.loads((folder / "profile_export_aiperf.json").read_text())
        if report["error_summary"] or report["was_cancelled"] or report["request_error_rate"]["avg"]:
            found.wrong.append(f"failed requests: {report['error_summary']}")
        _check_streams(found, report["request_count"]["avg"], report["output_sequence_length"])
        scraped = json.loads((folder / "server_metrics_export.json").read_text())["metrics"]
        ended = sum(one["stats"]["total"] for one in scraped["jpaged:request_success"]["series"])
        if ended != NUM_REQUESTS:
            found.wrong.append(f"{ended} requests have ended by the metrics that aiperf has read, of {NUM_REQUESTS}")
        found.figures |= {
            "ttft_ms": round(report["time_to_first_token"]["avg"], 1),
            "itl_ms": round(report["inter_token_latency"]["avg"], 1),
            "output_tokens_per_s": round(report["output_token_throughput"]["avg"], 1),
        }
        return found

    return Run("aiperf", kind, arguments, read)


def guidellm_run(folder: Path, tokenizer: Path, kind: str) -> Run:
    """Return a run of synthetic prompts; `kind` is chat or completions. Its exit status is 0 if all requests fail."""

    report_file = folder / "report.json"

    def arguments(url: str) -> list[str]:
        route = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        backend = {
            "kind": "openai_http", "target": url, "model": MODEL, "request_format": route,
            "extras": {"body": {"temperature": 0}},  # guidellm adds max_tokens and ignore_eos itself.
        }  # fmt: skip
        tokens = f"prompt_tokens={NUM_PROMPT_TOKENS},output_tokens={NUM_OUTPUT_TOKENS}"
        return [
            "run", "--backend", json.dumps(backend), "--profile", f"kind=concurrent,streams={CONCURRENCY}",
            "--constraint", f"kind=max_requests,count={NUM_REQUESTS}", "--data", f"kind=synthetic_text,{tokens}",
            "--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--output", f"kind=json,path={report_file}",
            "--disable-console-interactive",
        ]  # fmt: skip

    def read() -> Observation:
        found = Observation()
        bench = json.loads(report_file.read_text())["benchmarks"][0]
        for request in bench["requests"]["successful"]:
            found.answers.append(_answer(json.loads(request["request_args"])["body"], request["output"]))
        if any(bench["requests"][state] for state in ("errored", "incomplete")):
            found.wrong.append(f"failed requests: {bench['metrics']['request_totals']}")
        _check_streams(found, len(found.answers), bench["metrics"]["output_token_count"]["successful"])
        for ours, theirs in GUIDELLM_FIGURES.items():
            found.figures[ours] = round(bench["metrics"][theirs]["successful"]["mean"], 1)
        return found

    return Run("guidellm", kind, arguments, read)


def _answer(body: dict[str, Any], text: str | None) -> Answer:
    """Return the answer to a body that a client has sent."""
    names = ("max_tokens", "max_completion_tokens")
    params = {"max_tokens": next(body[name] for name in names if name in body), "ignore_eos": body["ignore_eos"]}
    return Answer(body["messages"] if "messages" in body else body["prompt"], params, text or "")


def _check_streams(found: Observation, num_requests: float, output_tokens: dict[str, Any]) -> None:
    """Note it if not all requests have got exactly the tokens that were asked for."""
    if num_requests != NUM_REQUESTS or len(found.answers) != NUM_REQUESTS:
        found.wrong.append(f"{num_requests} requests, {len(found.answers)} texts, wanted {NUM_REQUESTS}")
    if output_tokens["min"] != NUM_OUTPUT_TOKENS or output_tokens["max"] != NUM_OUTPUT_TOKENS:
        found.wrong.append(f"{output_tokens['min']} to {output_tokens['max']} tokens, wanted {NUM_OUTPUT_TOKENS}")


def make_runs(folder: Path) -> list[Run]:
    """Return all runs; each writes to a folder CLIENT_KIND in `folder`, where `tokenizer` and `tasks` are."""
    tokenizer, tasks = folder / "tokenizer", folder / "tasks"
    ids = {"tokenizer_backend": "huggingface", "tokenizer": tokenizer, "tokenized_requests": True, "num_concurrent": 4}
    # The server's /tokenizer_info, /tokenize and /detokenize, and requests of four texts each.
    remote = {"tokenizer_backend": "remote", "tokenized_requests": False}
    return [
        lm_eval_run(folder / "lm_eval_ids", tasks, "ids", batch_size=1, **ids),
        lm_eval_run(folder / "lm_eval_remote", tasks, "remote", batch_size=4, **remote),
        *(aiperf_run(folder / f"aiperf_{kind}", tokenizer, kind) for kind in ("chat", "completions")),
        *(guidellm_run(folder / f"guidellm_{kind}", tokenizer, kind) for kind in ("chat", "completions")),
    ]
