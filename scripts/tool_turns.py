"""Runs whole tool turns of clients of other projects against a server whose model writes what a script says.

    python scripts/tool_turns.py -o docs/measurements/tool_turns.json   # 2 minutes; the first time 4

Codex (`codex exec`) and Claude Code (`claude -p`) have this server as their only address. They run commands, also two
at once, apply a patch by a custom tool with a grammar, search tools that their prompts do not list, and end with a text
(`codex_turns.py`, `claude_code_turn.py`). langchain-openai, pydantic-ai and openai-agents call a function twice at
once, by chat completions and by responses, streamed and whole. Every prompt must find what it repeats in the prefix
cache.
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
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import claude_code_turn
import codex_turns
from client_environments import CLIENTS, command
from scripted_answers import END, THOUGHT, call

from jpaged.commands.bench.report import write_report
from jpaged.request import Request
from tests.jpaged.serving.scripted import scripted_server, write_scripted_model

TURN_S = 300.0
"""Seconds after which a client has failed."""
MIN_HIT_SHARE = 0.9
"""Of the tokens that a prompt repeats of the one before it, so many must come from the prefix cache."""
SIZES: dict[str, Any] = {"max_model_len": 65536, "num_blocks": 8193, "max_num_batched_tokens": 4096}
"""Each byte is a token of the scripted model; Codex sends 25 kB, and Claude Code 50 kB."""
QUESTION, ANSWER = "in Rome and in Paris?", "It rains in both."
WEATHER_SCRIPTS = {
    QUESTION: THOUGHT + "I ask." + call("weather", city="Rome") + "\n" + call("weather", city="Paris") + END,
    "It rains in Paris.": ANSWER + END,
}
"""The text of a prompt that stands last in it → what the model writes behind it."""


@dataclass(frozen=True)
class Turn:
    """What a client does against the scripted model."""

    client: str
    """One of CLIENTS."""
    scripts: Mapping[str, str]
    run: Callable[[str, Path], dict[str, Any]]
    """Runs the client, given the server's URL and an empty folder, and returns what it has told."""
    wrong: Callable[[dict[str, Any]], list[str]]
    """Returns what is wrong with that."""


def run(arguments: list[str], folder: Path, variables: Mapping[str, str]) -> tuple[int, str, str]:
    """Return exit status, stdout and stderr of a client that runs in a folder."""
    ran = subprocess.run(
        arguments, cwd=folder, env=dict(variables), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=TURN_S,
    )  # fmt: skip
    return ran.returncode, ran.stdout, ran.stderr


def codex(turn: codex_turns.CodexTurn) -> Turn:
    """Return a turn of Codex, which knows no other address, with the server's own entry for the model."""

    def run_codex(url: str, folder: Path) -> dict[str, Any]:
        home, work = folder / "home", folder / "work"
        home.mkdir()
        work.mkdir()
        with urllib.request.urlopen(f"{url}/v1/models") as reply:
            codex_turns.write_settings(home, url, reply.read(), turn)
        status, out, err = run([*command("codex"), *codex_turns.ARGUMENTS], work, codex_turns.variables(home))
        hello = work / "hello.txt"
        return {
            "exit": status,
            "output": codex_turns.told(out),
            "stderr": [line for line in err.splitlines() if "codex_home" not in line],
            "hello.txt": hello.read_text() if hello.is_file() else None,
        }

    return Turn("codex", turn.scripts, run_codex, partial(codex_turns.faults, turn))


def run_claude(url: str, folder: Path) -> dict[str, Any]:
    """Run `claude -p`, which knows no other address."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    arguments = [*command("claude"), *claude_code_turn.ARGUMENTS]
    status, out, err = run(arguments, work, claude_code_turn.variables(url, home))
    return {"exit": status, "output": claude_code_turn.told(out), "stderr": err.splitlines()}


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
    **{name: codex(turn) for name, turn in codex_turns.TURNS.items()},
    "claude": Turn("claude", claude_code_turn.SCRIPTS, run_claude, claude_code_turn.faults),
    **{
        name: Turn(name, WEATHER_SCRIPTS, program(name), weather_faults)
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
    # A prompt that is not longer than the one before begins another conversation.
    longer = [(before, one) for before, one in pairwise(prompts) if one["tokens"] > before["tokens"]]
    num_hits = sum(min(one["cached"], before["tokens"]) for before, one in longer)
    share = num_hits / sum(before["tokens"] for before, _ in longer)
    found["hit_share"] = round(share, 4)
    if share < MIN_HIT_SHARE:
        found["wrong"].append(f"{share:.2f} of what prompts repeat comes from the cache")
    text = json.dumps(found).replace(url, "URL").replace(str(folder), "FOLDER")
    return json.loads(text)


def main() -> int:
    """Run the clients, print a line for each, and return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description="Run tool turns of clients against a scripted model, and check them.")
    parser.add_argument("--turns", nargs="+", choices=TURNS, default=list(TURNS))
    parser.add_argument("-o", "--output", type=Path, help="write the JSON here")
    args = parser.parse_args()
    clients = dict.fromkeys(TURNS[name].client for name in args.turns)
    report: dict[str, Any] = {"packages": {client: CLIENTS[client].packages for client in clients}, "turns": {}}
    with tempfile.TemporaryDirectory() as folder:
        model = write_scripted_model(Path(folder) / "model", max_model_len=SIZES["max_model_len"])
        for number, name in enumerate(args.turns):
            found = observe(TURNS[name], model, Path(folder) / str(number))
            report["turns"][name] = found
            print(f"{name}: {len(found['prompts'])} prompts; {'; '.join(found['wrong']) or 'as it should be'}")
    if args.output is not None:
        write_report(report, args.output)
    return 1 if any(one["wrong"] for one in report["turns"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
