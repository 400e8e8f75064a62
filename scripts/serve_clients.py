"""Runs clients of other projects against a real server, and compares what they report with an engine in this process.

    python scripts/serve_clients.py -o docs/measurements/serve_clients.json   # 3 minutes; the first time 25, and 9 GB

lm_eval asks for loglikelihoods and greedy texts, by token ids and by the server's own tokenizer; aiperf and guidellm
send streams at concurrency 4 to chats and to completions. Every logprob, every flag "greedy" and every text must be
what `Engine` gives for the same prompts, and the server's counters must have grown by what was sent.

LiteLLM, dspy, inspect_ai and LangChain (Python and JavaScript) send prompts that are too long, and openai-go reads a
stream that is silent at first: `client_reactions.py` says what each must make of it.

`client_environments.py` installs the clients. Exit status 1 says that something disagrees. The speeds in the report are
those of a shared machine and are not judged.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from client_environments import CLIENTS, command, environment
from client_reactions import EXPECTED, SILENCE_S, reaction, silent_stream
from client_runs import CHOICES, MAX_MODEL_LEN, MODEL, Observation, Run, Score, make_runs, write_tasks

from jpaged import Engine, SamplingParams
from jpaged.commands.bench.report import host_machine, write_report
from jpaged.text.tokenizing.tokenizer import Tokenizer
from tests.jpaged.serving.served import Served, serving, wait_until

MAX_NUM_SEQS = 8
START_S, CLIENT_S = 900.0, 900.0
"""Seconds after which the server's start and a client's run have failed."""
MAX_LOGPROB_DIFFERENCE = 1e-4
"""lm_eval adds up the logprobs of a continuation, at most 6 tokens, in float64, and the engine in float32."""


def run_client(command: Sequence[str], client: str, folder: Path) -> int:
    """Run a client, with what it prints in `folder`/log; return its exit status. Its processes end with it."""
    variables = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    if client == "aiperf":
        del variables["HF_HUB_OFFLINE"]  # With it aiperf takes the tokenizer's folder for a repository's name.
    with (folder / "log").open("wb") as log:
        options: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen(command, cwd=folder, env=variables, start_new_session=True, **options)
        try:
            return process.wait(CLIENT_S)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def counters(server: Served) -> Counter[str]:
    """Return what the server has counted: prompt_tokens, generation_tokens, and ended requests by finish reason."""
    names = "prompt_tokens|generation_tokens|request_success"
    total = re.compile(rf'jpaged:({names})_total(?:\{{finished_reason="(\w+)"\}})?')
    counts: Counter[str] = Counter()
    for name, value in server.metrics().items():
        if match := total.fullmatch(name):
            counts[match[2] or match[1]] = int(value)
    return counts


def observe(run: Run, server: Served, folder: Path) -> dict[str, Any]:
    """Run a client; return what it has reported, what the server has counted meanwhile, the command and the time."""
    folder.mkdir(exist_ok=True)
    arguments = run.arguments(server.url)
    before, start = counters(server), time.monotonic()
    status = run_client([*command(run.client), *arguments], run.client, folder)
    seconds = time.monotonic() - start
    wait_until(server.is_idle, 30.0, "requests are left after a client has ended")
    after = counters(server)
    try:
        found = run.read()
    except (OSError, StopIteration, LookupError, ValueError) as error:
        found = Observation(wrong=[f"its report cannot be read ({type(error).__name__}: {error})"])
    if status:
        last = (folder / "log").read_text(errors="replace").splitlines()[-5:]
        found.wrong.append(f"exit status {status}: {' / '.join(last)}")
    shown = shlex.join([run.client, *arguments]).replace(server.url, "URL").replace(str(folder.parent), "FOLDER")
    counted = Counter({name: after[name] - before[name] for name in after})
    return {"found": found, "counted": counted, "command": shown, "seconds": round(seconds, 1)}


def compare(engine: Engine, found: Observation, counted: Counter[str]) -> None:
    """Compare a client's report, and what the server has counted, with the engine; complete the report's figures.

    What disagrees is appended to `found.wrong`.
    """
    expected = compare_scores(engine, found) if found.scores else Counter[str]()
    expected += compare_answers(engine, found) if found.answers else Counter[str]()
    got = Counter({name: counted[name] for name in ("prompt_tokens", "generation_tokens")})
    got["requests"] = counted["stop"] + counted["length"]
    if got != expected or counted["abort"] or counted["error"]:
        found.wrong.append(f"the server counts {dict(counted)}, wanted {dict(expected)}")
    found.figures |= expected


def compare_scores(engine: Engine, found: Observation) -> Counter[str]:
    """Compare loglikelihoods, flags and the accuracy; return what the server should have counted for them."""
    assert engine.tokenizer is not None
    contexts, continuations = zip(*(_split(engine.tokenizer, score) for score in found.scores), strict=True)
    scores = engine.score(list(contexts), list(continuations))
    sums, is_greedy = scores.sums.tolist(), (scores.is_greedy | ~scores.mask).all(axis=1).tolist()
    difference = max(abs(mine - one.logprob) for mine, one in zip(sums, found.scores, strict=True))
    num_differing = sum(mine != one.is_greedy for mine, one in zip(is_greedy, found.scores, strict=True))
    of_questions = [sums[first : first + 3] for first in range(0, len(sums), 3)]
    chosen = [of_answers.index(max(of_answers)) for of_answers in of_questions]
    num_right = sum(mine == right for mine, (_, _, right) in zip(chosen, CHOICES, strict=True))
    accuracy = num_right / len(CHOICES)
    if difference > MAX_LOGPROB_DIFFERENCE or num_differing or accuracy != found.accuracy:
        flags = f"{num_differing} flags differ"
        accuracies = f"accuracy is {found.accuracy}, the engine's {accuracy}"
        found.wrong.append(f"loglikelihoods differ by up to {difference:.3g}, {flags}, {accuracies}")
    found.figures |= {"loglikelihoods": len(sums), "max_difference": difference, "greedy": sum(is_greedy)}
    found.figures["accuracy"] = found.accuracy
    num_prompt_tokens = sum(map(len, contexts)) + sum(map(len, continuations))
    # A token is drawn after each prompt that is scored: lm_eval asks for one.
    return Counter(requests=len(sums), prompt_tokens=num_prompt_tokens, generation_tokens=len(sums))


def compare_answers(engine: Engine, found: Observation) -> Counter[str]:
    """Compare texts; return what the server should have counted for them."""
    prompts = [{"prompt" if isinstance(one.prompt, str) else "messages": one.prompt} for one in found.answers]
    params = [SamplingParams(temperature=0.0, **one.params) for one in found.answers]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    samples = [output.outputs[0] for output in outputs]
    differing = [(one, mine.text) for one, mine in zip(found.answers, samples, strict=True) if one.text != mine.text]
    for one, text in differing[:1]:
        found.wrong.append(f"{len(differing)} texts differ: {one.text!r} for {one.prompt!r}, the engine's {text!r}")
    num_stopped = sum(sample.finish_reason == "stop" for sample in samples)
    found.figures |= {"texts": len(samples), "stopped": num_stopped}
    num_prompt_tokens = sum(len(output.prompt_token_ids or ()) for output in outputs)
    num_output_tokens = sum(len(sample.token_ids) for sample in samples)
    return Counter(requests=len(samples), prompt_tokens=num_prompt_tokens, generation_tokens=num_output_tokens)


def _split(tokenizer: Tokenizer, score: Score) -> tuple[list[int], list[int]]:
    """Return the tokens of context and continuation; spaces between the two belong to the continuation."""
    context = score.context.rstrip()
    whole = tokenizer.encode(score.context + score.continuation, add_special_tokens=False)
    length = len(tokenizer.encode(context, add_special_tokens=False))
    return whole[:length], whole[length:]


def reactions(clients: Sequence[str], server: Served, folder: Path) -> dict[str, Any]:
    """Return what each client makes of prompts that are too long, or of a silent stream; print a line for each."""
    found = {}
    for client in clients:
        if client in EXPECTED:
            found[client] = reaction(client, server, folder)
        elif client.startswith("openai_go"):
            found[client] = silent_stream(client, server, folder)
        else:
            continue
        print(f"{client}: {'; '.join(found[client]['wrong']) or 'reacts as documented'}")
    return found


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer to a directory that transformers opens."""
    folder.mkdir()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    options |= {"chat_template": tokenizer.chat_template, "model_max_length": MAX_MODEL_LEN, **tokenizer.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))


def main() -> int:
    """Run the clients, print a line for each run, and return 1 if anything disagrees."""
    parser = argparse.ArgumentParser(description="Run clients of other projects against a server, and check them.")
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    parser.add_argument("-o", "--output", type=Path, help="write the JSON here")
    args = parser.parse_args()
    for client in args.clients:
        environment(client)
    report: dict[str, Any] = {
        "model": MODEL,
        **host_machine(),
        "packages": {c: CLIENTS[c].packages for c in args.clients},
    }
    flags = ("--max-num-seqs", MAX_NUM_SEQS, "--max-model-len", MAX_MODEL_LEN)
    serve_flags = (*flags, "--limits", f"silence_s={SILENCE_S}", "--enable-admin")
    report["server"] = shlex.join(["jpaged", "serve", MODEL, *map(str, serve_flags)])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Engine(MODEL, max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN) as engine:
            assert engine.tokenizer is not None
            write_tokenizer(engine.tokenizer, folder / "tokenizer")
            write_tasks(folder / "tasks")
            runs = [run for run in make_runs(folder) if run.client in args.clients]
            with serving(MODEL, *serve_flags, log=folder / "log", awaits=False) as server:
                wait_until(lambda: server.request("/health")[0] == 200, START_S, "the server does not start")
                observed = [observe(run, server, folder / f"{run.client}_{run.kind}") for run in runs]
                log = (folder / "log").read_text().splitlines()  # Before the refusals that clients are to meet.
                report["reactions"] = reactions(args.clients, server, folder)
            report["runs"] = {}
            for run, one in zip(runs, observed, strict=True):
                found: Observation = one.pop("found")
                compare(engine, found, one["counted"])
                report["runs"][f"{run.client} {run.kind}"] = {**one, **found.figures, "wrong": found.wrong}
                shown = ", ".join(f"{name} {value}" for name, value in found.figures.items())
                print(f"{run.client} {run.kind}: {shown}, {one['seconds']} s; {'; '.join(found.wrong) or 'agrees'}")
    # No client may have met a refusal that it did not report.
    report["warnings"] = [line for line in log if re.search(r" (WARNING|ERROR|CRITICAL) | [45]\d\d \S+ s$", line)]
    for line in report["warnings"]:
        print(f"the server's log: {line}")
    if args.output is not None:
        write_report(report, args.output)
    of_clients = [*report["runs"].values(), *report["reactions"].values()]
    return 1 if any(one["wrong"] for one in of_clients) or report["warnings"] else 0


if __name__ == "__main__":
    sys.exit(main())
