"""What Codex (`codex exec`) does in `tool_turns.py`: its settings, the model's scripts, and what must come of them.

Codex sends its tools in three ways, by what the entry of its model says, and each way has a turn:

- all in the field `tools`: it runs a command, applies a patch by a custom tool with a grammar, runs two commands at
  once, and calls a tool of a namespace;
- some of them found by a search, whose call and result are items of their own;
- all in an item in front of the input, where one custom tool takes code that calls the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripted_answers import END, THOUGHT, call

TASK = "Write hello.txt by a patch, then look at it."
CONFIG = """\
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
PATCH = "*** Begin Patch\n*** Add File: hello.txt\n+it says hello\n*** End Patch\n"
CODE = "const ran = await tools.exec_command({cmd: 'echo found $((40+2)) files'}); text(ran.output);"
ASK = call("multi_agent_v1__wait_agent", targets=["nobody"]) + END
NO_ANSWER = "invalid agent id nobody"
"""What Codex's own tool of the namespace says."""


@dataclass(frozen=True)
class CodexTurn:
    """One turn of Codex."""

    scripts: Mapping[str, str]
    """The text of a prompt that stands last in it → what the model writes behind it."""
    done: tuple[str, ...]
    """What Codex must have done: types of its items."""
    texts: tuple[str, ...]
    """What it must have said."""
    patched: str | None = None
    """What hello.txt must hold; None: there is no such file."""
    entry: Mapping[str, Any] = field(default_factory=dict)
    """What changes in the server's entry for the model."""


TURNS = {
    "codex": CodexTurn(
        {
            TASK: THOUGHT + "I look first." + call("exec_command", cmd="echo found $((40+2)) files") + END,
            "found 42 files": call("apply_patch", input=PATCH) + END,
            "A hello.txt": call("exec_command", cmd="cat hello.txt")
            + "\n"
            + call("exec_command", cmd="echo $((50+5)) bytes")
            + END,
            "55 bytes": ASK,
            NO_ANSWER: THOUGHT + "hello.txt holds one line." + END,
        },
        done=("command_execution", "file_change", "command_execution", "command_execution"),
        texts=("I look first.", "hello.txt holds one line."),
        patched="it says hello\n",
    ),
    "codex, tools by search": CodexTurn(
        {
            TASK: call("tool_search", query="spawn agent", limit=8) + END,
            "multi_agent_v1__wait_agent": ASK,
            NO_ANSWER: "Nobody answers." + END,
        },
        done=(),
        texts=("Nobody answers.",),
        entry={"supports_search_tool": True},
    ),
    "codex, tools in code": CodexTurn(
        {
            TASK: THOUGHT + call("functions__exec", input=CODE) + END,
            "found 42 files": "There are 42 files." + END,
        },
        done=("command_execution",),
        texts=("There are 42 files.",),
        entry={"use_responses_lite": True, "tool_mode": "code_mode_only"},
    ),
}
DOINGS = ("command_execution", "file_change")
ARGUMENTS = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json", TASK)
"""What stands behind the command `codex`."""


def write_settings(home: Path, url: str, models: bytes, turn: CodexTurn) -> None:
    """Write Codex's settings, by which it knows no address but `url`; `models` is the body of its /v1/models."""
    listed = json.loads(models)
    listed["models"][0] |= turn.entry
    (home / "models.json").write_text(json.dumps(listed))
    catalog, base_url = json.dumps(str(home / "models.json")), json.dumps(f"{url}/v1")
    (home / "config.toml").write_text(CONFIG.format(catalog=catalog, base_url=base_url))


def variables(home: Path) -> dict[str, str]:
    """Return the environment of the command: nothing of this process's but where programs are."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home), "TERM": "dumb"}


def told(output: str) -> list[dict[str, Any]]:
    """Return what the lines of its output tell, without the id of its thread."""
    lines = [json.loads(line) for line in output.splitlines()]
    return [line for line in lines if line["type"] != "thread.started"]


def faults(turn: CodexTurn, found: dict[str, Any]) -> list[str]:
    """Return what is wrong with a run, of which `found` has the exit status, what `told` returns, and hello.txt."""
    wrong = [] if found["exit"] == 0 else [f"exit status {found['exit']}: {' / '.join(found['stderr'][-3:])}"]
    ended = [one["item"] for one in found["output"] if one["type"] == "item.completed"]
    kinds = [item["type"] for item in ended]
    if tuple(kind for kind in kinds if kind in DOINGS) != turn.done:
        wrong.append(f"it did {', '.join(kinds)}")
    texts = tuple(item["text"] for item in ended if item["type"] == "agent_message")
    if texts != turn.texts:
        wrong.append(f"it said {texts}")
    if any(item.get("exit_code") for item in ended) or "error" in kinds:
        wrong.append("a command failed")
    if found["hello.txt"] != turn.patched:
        wrong.append(f"hello.txt holds {found['hello.txt']!r}")
    return wrong
