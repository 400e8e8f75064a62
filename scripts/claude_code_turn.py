"""What Claude Code (`claude -p`) does in `tool_turns.py`: its command, the model's script, and what must come of it.

It runs a command, then two at once, then searches a tool that its prompt does not list, and ends with a text. Its own
prompts are real: a system prompt and tools of 48 kB, marks of cached prefixes that move, a header that only Anthropic
reads, and system messages behind the user's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

TASK, ANSWER = "Find out how many files and bytes there are.", "There are 42 files of 55 bytes."
THOUGHT = "<think>\nWhat is there to do?\n</think>\n\n"


def call(name: str, **arguments: Any) -> str:
    """Return a call as the scripted model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


COMMANDS = ("echo found $((40+2)) files", "sleep 1; echo first", "echo $((50+5)) bytes")
SCRIPTS = {
    TASK: f"{THOUGHT}I look first.{call('Bash', command=COMMANDS[0], description='Count')}",
    "found 42 files": call("Bash", command=COMMANDS[1]) + "\n" + call("Bash", command=COMMANDS[2]),
    "55 bytes": call("ToolSearch", query="select:WebFetch", max_results=3),
    '"function": {"name": "WebFetch"': f"{THOUGHT}{ANSWER}",
}
"""The text of a prompt that stands last in it → what the model writes behind it. The last text is of the definition of
the tool that was searched."""
ARGUMENTS = (
    "-p", TASK, "--output-format", "stream-json", "--verbose", "--model", "scripted", "--dangerously-skip-permissions"
)  # fmt: skip
"""What stands behind the command `claude`."""
VARIABLES = {
    "ANTHROPIC_API_KEY": "none",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_MAX_RETRIES": "0",
    "DISABLE_AUTOUPDATER": "1",
    "IS_SANDBOX": "1",  # It skips its questions for permission as root only in a sandbox.
    "TERM": "dumb",
}


def variables(url: str, home: Path) -> dict[str, str]:
    """Return the environment of the command: nothing of this process's but where programs are."""
    return {**VARIABLES, "PATH": os.environ["PATH"], "HOME": str(home), "ANTHROPIC_BASE_URL": url}


def told(output: str) -> list[dict[str, Any]]:
    """Return what the lines of its output tell of the turn, without its ids, its times and this machine."""
    lines = [json.loads(line) for line in output.splitlines()]
    kept = []
    for line in lines:
        if line["type"] in ("assistant", "user"):
            kept.append({"type": line["type"], "content": line["message"]["content"]})
        elif line["type"] == "result":
            kept.append({key: line[key] for key in ("type", "subtype", "is_error", "result", "num_turns", "usage")})
    return kept


def faults(found: dict[str, Any]) -> list[str]:
    """Return what is wrong with a run, of which `found` has the exit status and what `told` returns."""
    wrong = [] if found["exit"] == 0 else [f"exit status {found['exit']}: {' / '.join(found['stderr'][-3:])}"]
    contents = [one["content"] for one in found["output"] if one["type"] in ("assistant", "user")]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    results = {block["tool_use_id"]: block for block in blocks if block["type"] == "tool_result"}
    calls = [block for block in blocks if block["type"] == "tool_use"]
    if [block["input"].get("command") for block in calls if block["name"] == "Bash"] != list(COMMANDS):
        wrong.append(f"it was given the calls {[block['input'] for block in calls]}")
    given = [results[block["id"]]["content"] for block in calls if block["id"] in results]
    reference = [{"type": "tool_reference", "tool_name": "WebFetch"}]
    if given != ["found 42 files", "first", "55 bytes", reference]:
        wrong.append(f"its tools gave {given}")
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    if thoughts != ["What is there to do?"] * 2:
        wrong.append(f"it was given the thoughts {thoughts}")
    ends = [(one["subtype"], one["is_error"], one["result"]) for one in found["output"] if one["type"] == "result"]
    if ends != [("success", False, ANSWER)]:
        wrong.append(f"it ended with {ends}")
    return wrong
