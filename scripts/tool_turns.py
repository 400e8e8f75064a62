"""Runs whole tool turns of clients of other projects against a server whose model writes what a script says.

    python scripts/tool_turns.py -o docs/measurements/tool_turns.json   # 2 minutes; the first time 4

Codex (`codex exec`) has this server as its only address: it reads the model's entry from /v1/models, runs a command,
applies a patch by a custom tool with a grammar, runs two commands at once, and ends with a text. So does Claude Code
(`claude -p`) by Anthropic's interface, with a search of a tool in place of the patch. langchain-openai,
pydantic-ai and openai-agents call a function twice at once, by chat completions and by responses, streamed and whole.
Everything but the tokens is real: prompts, tools, pages, grammars, streams. `client_environments.py` installs the
clients. Exit status 1 says that something is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import claude_code_turn
from client_environments import CLIENTS, command

from jpaged.commands.bench.report import write_report
from jpaged.request import Request
from tests.jpaged.serving.scripted import scripted_server, write_scripted_model

TURN_S = 300.0
"""Seconds after which a client has failed."""
MIN_HIT_SHARE = 0.9
"""Of the tokens of all prompts but a conversation's first, so many must come from the prefix cache."""
SIZES: dict[str, Any] = {"max_model_len": 65536, "num_blocks": 8193, "max_num_batched_tokens": 4096}
"""Each byte is a token of the scripted model; Codex sends 25 kB, and Claude Code 50 kB."""


def call(name: str, **arguments: Any) -> str:
    """Return a call as the scripted model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


END, THOUGHT = "<|end|>", "<think>\nWhat is there to do?\n</think>\n\n"
QUESTION, ANSWER = "in Rome and in Paris?", "It rains in both."
WEATHER_SCRIPTS = {
    QUESTION: THOUGHT + "I ask." + call("weather", city="Rome") + "\n" + call("weather", city="Paris") + END,
    "It rains in Paris.": ANSWER + END,
}
"""The text of a prompt that stands last in it → what the model writes behind it."""
CODEX_TASK, CODEX_ANSWER = "Write hello.txt by a patch, then look at it.", "hello.txt holds one line."
PATCH = "*** Begin Patch\n*** Add File: hello.txt\n+it says hello\n*** End Patch\n"
LOOKS = call("exec_command", cmd="cat hello.txt") + "\n" + call("exec_command", cmd="echo $((50+5)) bytes")
CODEX_SCRIPTS = {
    CODEX_TASK: THOUGHT + "I look first." + call("exec_command", cmd="echo found $((40+2)) files") + END,
    "found 42 files": call("apply_patch", input=PATCH) + END,
    "A hello.txt": LOOKS + END,
    "55 bytes": THOUGHT + CODEX_ANSWER + END,
}
CODEX_CONFIG = """\
model = "scripted"
model_catalog_json = {catalog}
model_provider = "local"

[model_providers.local]
name = "local"
base_url = {base_url}
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


@dataclass(frozen=True)
class Turn:
    """What a client does against the scripted model."""

    scripts: Mapping[str, str]
    run: Callable[[str, Path], dict[str, Any]]
    """Runs the client, given the server's URL and an empty folder, and returns what it has told."""
    wrong: Callable[[dict[str, Any]], list[str]]
    """Returns what is wrong with that."""
    min_hit_share: float | None = None


def run(arguments: list[str], folder: Path, variables: Mapping[str, str]) -> tuple[int, str, str]:
    """Return exit status, stdout and stderr of a client that runs in a folder."""
    ran = subprocess.run(
        arguments, cwd=folder, env=dict(variables), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=TURN_S,
    )  # fmt: skip
    return ran.returncode, ran.stdout, ran.stderr


def run_codex(url: str, folder: Path) -> dict[str, Any]:
    """Run `codex exec`, which knows no other address, with the server's own entry for the model."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    with urllib.request.urlopen(f"{url}/v1/models") as reply:
        (home / "models.json").write_bytes(reply.read())
    catalog, base_url = json.dumps(str(home / "models.json")), json.dumps(f"{url}/v1")
    (home / "config.toml").write_text(CODEX_CONFIG.format(catalog=catalog, base_url=base_url))
    arguments = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json", CODEX_TASK]
    variables = {"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home), "TERM": "dumb"}
    status, out, err = run([*command("codex"), *arguments], work, variables)
    hello = work / "hello.txt"
    return {
        "exit": status,
        "output": [json.loads(line) for line in out.splitlines()],
        "stderr": [line for line in err.splitlines() if "codex_home" not in line],
        "hello.txt": hello.read_text() if hello.is_file() else None,
    }


def run_claude(url: str, folder: Path) -> dict[str, Any]:
    """Run `claude -p`, which knows no other address."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    arguments = [*command("claude"), *claude_code_turn.ARGUMENTS]
    status, out, err = run(arguments, work, claude_code_turn.variables(url, home))
    return {"exit": status, "output": claude_code_turn.told(out), "stderr": err.splitlines()}


def codex_faults(found: dict[str, Any]) -> list[str]:
    """Return what is wrong with a run of Codex."""
    wrong = [] if found["exit"] == 0 else [f"exit status {found['exit']}: {' / '.join(found['stderr'][-3:])}"]
    ended = [one["item"] for one in found["output"] if one["type"] == "item.completed"]
    kinds = [item["type"] for item in ended]
    wanted = ["command_execution", "file_change", "command_execution", "command_execution"]
    if [kind for kind in kinds if kind in wanted] != wanted:
        wrong.append(f"it did {', '.join(kinds)}")
    texts = [item["text"] for item in ended if item["type"] == "agent_message"]
    if texts != ["I look first.", CODEX_ANSWER]:
        wrong.append(f"it said {texts}")
    if any(item.get("exit_code") for item in ended) or "error" in kinds:
        wrong.append("a command failed")
    if found["hello.txt"] != "it says hello\n":
        wrong.append(f"hello.txt holds {found['hello.txt']!r}")
    return wrong


def program(client: str) -> Callable[[str, Path], dict[str, Any]]:
    """Return what runs our program that uses a client."""

    def run_program(url: str, folder: Path) -> dict[str, Any]:
        status, out, err = run([*command(client), url], folder, os.environ | {"NO_PROXY": "127.0.0.1"})
        return {"exit": status, "turns": json.loads(out) if status == 0 else {}, "stderr": err.splitlines()[-3:]}

    return run_program


def weather_faults(found: dict[str, Any]) -> list[str]:
    """Return what is wrong with the turns of a client of the tool `weather`."""
    wanted = {"calls": [{"city": "Rome"}, {"city": "Paris"}], "text": ANSWER}
    wrong = [] if found["exit"] == 0 else [f"exit status {found['exit']}: {' / '.join(found['stderr'])}"]
    return wrong + [f"{name}: {turn}" for name, turn in found["turns"].items() if turn != wanted]


TURNS = {
    "codex": Turn(CODEX_SCRIPTS, run_codex, codex_faults, MIN_HIT_SHARE),
    "claude": Turn(claude_code_turn.SCRIPTS, run_claude, claude_code_turn.faults, MIN_HIT_SHARE),
    **{
        name: Turn(WEATHER_SCRIPTS, program(name), weather_faults)
        for name in ("langchain_tools", "pydantic_ai", "openai_agents")
    },
}


def observe(turn: Turn, model: Path, folder: Path) -> dict[str, Any]:
    """Run a client against a server of its own; return what it has told, the server's counts and what is wrong."""
    folder.mkdir()
    requests: dict[str, Request] = {}
    with scripted_server(model, turn.scripts, requests=requests, **SIZES) as url:
        found = turn.run(url, folder)
    prompts = [{"tokens": one.prompt_len, "cached": one.num_cached_tokens} for one in requests.values()]
    found |= {"prompts": prompts, "wrong": turn.wrong(found)}
    share = sum(one["cached"] for one in prompts[1:]) / max(sum(one["tokens"] for one in prompts[1:]), 1)
    found["hit_share"] = round(share, 4)
    if turn.min_hit_share is not None and share < turn.min_hit_share:
        found["wrong"].append(f"{share:.2f} of the prompts behind the first come from the cache")
    text = json.dumps(found).replace(url, "URL").replace(str(folder), "FOLDER")
    return json.loads(text)


def main() -> int:
    """Run the clients, print a line for each, and return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description="Run tool turns of clients against a scripted model, and check them.")
    parser.add_argument("--clients", nargs="+", choices=TURNS, default=list(TURNS))
    parser.add_argument("-o", "--output", type=Path, help="write the JSON here")
    args = parser.parse_args()
    report: dict[str, Any] = {"packages": {name: CLIENTS[name].packages for name in args.clients}, "clients": {}}
    with tempfile.TemporaryDirectory() as name:
        model = write_scripted_model(Path(name) / "model", max_model_len=SIZES["max_model_len"])
        for client in args.clients:
            found = observe(TURNS[client], model, Path(name) / client)
            report["clients"][client] = found
            print(f"{client}: {len(found['prompts'])} prompts; {'; '.join(found['wrong']) or 'as it should be'}")
    if args.output is not None:
        write_report(report, args.output)
    return 1 if any(one["wrong"] for one in report["clients"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
