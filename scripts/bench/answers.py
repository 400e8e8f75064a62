"""Measures what it costs a server to tell thoughts and tool calls of chats apart; a part of `serving.py`.

The event loop reads every token of every stream, so its processor time is compared with that of chats whose text is all
there is. The servers of both take turns, so that a busy machine slows them alike.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from served_process import ANSWERS_TEMPLATE, Server, cpu_s, stream_all

from jpaged.commands.progress import say

NUM_STREAMS, NUM_TOKENS = 64, 150
STEP_MS = 8.0
"""Long enough that the event loop is done with the tokens of a step before the next ones come."""
NUM_NEWLINES = 8000
"""Tokens of an answer of newlines alone, which a mark may follow that would take them away."""
CONTEXT = 8192
PATH = "/v1/chat/completions"
TOOLS = [
    {"type": "function", "function": {
        "name": "note", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    }}
]  # fmt: skip


def chat_body(script: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": f"script:{script} "}]
    asked = {"messages": messages, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    return json.dumps({**asked, **fields}).encode()


async def loop_us(server: Server, body: bytes, *, num_streams: int, num_tokens: int) -> float:
    """Return the processor time of the event loop in µs a token, of so many streams at once."""
    before = cpu_s(server.process.pid)
    streams = await stream_all(server.port, [body] * num_streams, PATH)
    for stream in streams:
        if b"data: [DONE]" not in (end := b"".join(stream.data[-5:])):
            raise RuntimeError(f"a stream has failed: {end[-1000:].decode()}")
    return float(1e6 * (cpu_s(server.process.pid) - before)[1] / (num_streams * num_tokens))


def measure_answers(num_runs: int) -> dict[str, Any]:
    """Return the times of the event loop in µs a token, by what an answer is: medians, of newlines of one run."""
    tools = {"tools": TOOLS}
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "plain": ("content", {}),
        "content": ("content", tools),
        "thought": ("thought", tools),
        "call": ("call", tools),
        "plain_newlines": ("newlines", {"max_tokens": NUM_NEWLINES}),
        "newlines": ("newlines", {"max_tokens": NUM_NEWLINES, **tools}),
    }
    found: dict[str, list[float]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as plain_folder, tempfile.TemporaryDirectory() as folder:
        plain = Server(Path(plain_folder), STEP_MS, CONTEXT)
        marked = Server(Path(folder), STEP_MS, CONTEXT, ANSWERS_TEMPLATE)
        for run in range(num_runs + 1):
            for name, (script, fields) in cases.items():
                server = plain if name.startswith("plain") else marked
                has_newlines = script == "newlines"
                if has_newlines and run < num_runs:  # They take as long as all others together.
                    continue
                sizes = {"num_streams": 2, "num_tokens": NUM_NEWLINES} if has_newlines else {}
                counts = {"num_streams": NUM_STREAMS, "num_tokens": NUM_TOKENS, **sizes}
                time_us = asyncio.run(loop_us(server, chat_body(script, **fields), **counts))
                if run:  # The first one compiles.
                    found[name].append(time_us)
        plain.stop()
        marked.stop()
    times_us = {name: round(float(np.median(values)), 1) for name, values in found.items()}
    added_us = {name: round(times_us[name] - times_us["plain"], 1) for name in ("content", "thought", "call")}
    added_us["newlines"] = round(times_us["newlines"] - times_us["plain_newlines"], 1)
    report = {"event_loop_us_per_token": times_us, "added_us_per_token": added_us}
    say(f"answers: {report}")
    return report
